"""The state of the compiled module for doctor and the benchmarks: missing, out of date, or slower than the processor allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ..rows.backends import cpu_products
from ..rows.backends.cpu import NO_AVX2
from ..rows.backends.native import PACKAGE, build_command, built_from, load, package, sources, why_not_here
from . import Finding
from .machine import processor


def module() -> tuple[dict[str, Any], ModuleType | None]:
    """Facts about the compiled module, and the module if it can be loaded."""
    facts: dict[str, Any] = {"path": None, "reason": None, "compiler": None, "isa": None, "isas": []}
    try:
        native = load()
    except ImportError as error:
        return facts | {"reason": str(error)}, None
    facts["path"] = native.__file__
    # One that is out of date may lack some.
    return facts | {name: getattr(native, name)() for name in ("compiler", "isa", "isas") if hasattr(native, name)}, native


def findings(needed: bool) -> Iterator[Finding]:
    """The findings about the compiled module here. `needed`: losses run on the CPU."""
    return module_findings(*module(), package(), processor()[1], needed)


def module_findings(
    found: dict[str, Any], native: ModuleType | None, origin: dict[str, Any], flags: frozenset[str], needed: bool
) -> Iterator[Finding]:
    """`needed`: no GPU has kernels here, so that everything would run in eager PyTorch. `flags` are those of the processor."""
    command, here, best = build_command(origin), PACKAGE.parent, best_isa(flags)
    if origin["shadows"] is not None:
        problem = f"the checkout at {here} hides the installed package at {origin['shadows']}"
        yield Finding(problem, "start Python in another directory to use the installed package")
    unserved = why_not_here() or (NO_AVX2 if found["isa"] == "" else None)
    if unserved is not None:
        yield Finding(f"CPU tensors run in eager PyTorch: {unserved}", "take a processor with AVX2, or a GPU", slows=True)
        return
    if native is None:
        problem = f"the compiled module is missing, CPU tensors fall back to eager PyTorch: {found['reason']}"
        remedy = f"{command}; it needs a C++17 compiler (Debian, Ubuntu: apt-get install g++), and its output says what failed"
        yield Finding(problem, remedy, needed, blocks=needed)
        return
    if native.__file__ is not None and sources(here) not in (None, built_from(Path(native.__file__))):
        problem = f"the compiled module is out of date: {native.__file__} was built from other C++ sources than those in {here}"
        yield Finding(problem, command, grave=True, blocks=needed)
    if best is not None and found["isa"] != best:
        problem = f"the compiled module runs {found['isa']} code, but this processor has {best}"
        yield Finding(problem, f"{command} (with GCC 10 or Clang 9, or newer)", slows=True)


def engine() -> str | None:
    """What makes matrix products on the CPU; None if the setting names something that cannot, or the module is out of date."""
    try:
        return cpu_products.engine()
    except (AttributeError, ValueError):
        return None


def best_isa(flags: frozenset[str]) -> str | None:
    """The best instruction set of csrc/module.cpp for a processor with these flags; None if none of them is known."""
    if not flags:
        return None
    if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
        return "avx512bf16" if "avx512_bf16" in flags else "avx512"
    return "avx2" if flags >= {"avx2", "fma"} else None
