"""The state of the compiled module for doctor and the benchmarks: missing, out of date, or slower than the processor allows."""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

from ..rows.backends import cpu_products
from ..rows.backends.native import PACKAGE, build_command, built_from, load, module_files, package, sources
from . import Finding
from .machine import processor


def compiler() -> str | None:
    """The C++ compiler that a build would find."""
    names = (os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++", "cl")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def module() -> tuple[dict[str, Any], ModuleType | None]:
    """Facts about the compiled module, and the module if it can be loaded."""
    facts: dict[str, Any] = {"path": None, "reason": None, "compiler": None, "isa": None, "isas": [], "files": module_files()}
    try:
        native = load()
    except ImportError as error:
        return facts | {"reason": str(error)}, None
    facts["path"] = native.__file__
    for name in ("compiler", "isa", "isas"):  # a module without them is out of date, which `stale` reports
        if hasattr(native, name):
            facts[name] = getattr(native, name)()
    return facts, native


def findings(needed: bool) -> list[Finding]:
    """The findings about the compiled module here. `needed`: losses run on the CPU."""
    return module_findings(*module(), package(), processor()[1], needed)


def module_findings(
    found: dict[str, Any], native: ModuleType | None, origin: dict[str, Any], flags: frozenset[str], needed: bool
) -> list[Finding]:
    """`needed`: no GPU has kernels here, so that everything would run in eager PyTorch. `flags` are those of the processor."""
    command = build_command(origin)
    findings = []
    if origin["shadows"] is not None:
        problem = f"the checkout at {PACKAGE.parent} hides the installed package at {origin['shadows']}"
        if native is not None and Path(str(native.__file__)).parent != PACKAGE:
            problem += " (but uses its compiled module, which was built from the same sources)"
        findings.append(Finding(problem, "start Python in another directory to use the installed package", False))
    if native is None:
        problem = f"the compiled module is missing, CPU tensors fall back to eager PyTorch: {found['reason']}"
        first = "" if compiler() else "install a C++17 compiler (Debian, Ubuntu: apt-get install g++), then "
        remedy = f"{first}{command} (if the compiler fails, the package installs without the module: the output says why)"
        return [*findings, Finding(problem, remedy, needed, blocks=needed)]
    for reason in stale(native):
        findings.append(Finding(f"the compiled module is out of date: {reason}", command, True, blocks=needed))
    best = best_isa(flags)
    if best is not None and found["isa"] != best:
        problem = f"the compiled module runs {found['isa']} code, but this processor has {best}"
        findings.append(Finding(problem, f"{command} (with GCC 10 or Clang 9, or newer)", False, slows=True))
    return findings


def engine() -> str | None:
    """What makes matrix products on the CPU; None if the setting names something that cannot."""
    try:
        return cpu_products.engine()
    except ValueError:
        return None


def best_isa(flags: frozenset[str]) -> str | None:
    """The best instruction set of csrc/module.cpp for a processor with these flags; None if none of them is known."""
    if not flags:
        return None
    if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
        return "avx512bf16" if "avx512_bf16" in flags else "avx512"
    return "avx2" if flags >= {"avx2", "fma"} else None


def stale(native: ModuleType) -> list[str]:
    """The reasons to believe that the module was built from other sources than those beside it."""
    reasons = []
    for node in ast.parse((PACKAGE / "_cpu.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            function = getattr(native, node.name, None)
            if function is None:
                reasons.append(f"it has no {node.name}()")
            elif parameters(function) not in (None, len(node.args.posonlyargs + node.args.args)):
                reasons.append(
                    f"{node.name}() takes {parameters(function)} arguments, not {len(node.args.posonlyargs + node.args.args)}"
                )
    here = sources(PACKAGE.parent)
    if not reasons and native.__file__ is not None and here not in (None, built_from(Path(native.__file__))):
        reasons.append(f"{native.__file__} was built from other C++ sources than those in {PACKAGE.parent}")
    return reasons


def parameters(function: Any) -> int | None:
    """The number of parameters of a compiled function, as nanobind describes it; None if it does not."""
    try:
        described = ast.parse(function.__nb_signature__[0][0] + ": ...").body[0]
        assert isinstance(described, ast.FunctionDef)
        return len(described.args.posonlyargs + described.args.args)
    except (AttributeError, IndexError, SyntaxError, TypeError):
        return None
