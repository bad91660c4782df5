"""The package that was imported and its compiled module: where they are, what they were built with, whether they are current."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from . import Finding, first_line

PACKAGE = Path(__file__).parents[1]
MODULE = "grpo_kernels._cpu"


def package() -> dict[str, Any]:
    """{"path", "kind": "checkout", "editable install" or "install", "shadows": an installed package that is not the one imported}."""
    found: dict[str, Any] = {"path": str(PACKAGE), "kind": "checkout", "shadows": None, "source": None}
    try:
        distribution = importlib.metadata.distribution("grpo_kernels")
    except importlib.metadata.PackageNotFoundError:
        return found
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    found["source"] = direct.get("url", "").removeprefix("file://") or None
    installed = Path(str(distribution.locate_file("grpo_kernels")))
    if direct.get("dir_info", {}).get("editable"):
        found["kind"] = "editable install"
    elif installed.resolve() == PACKAGE.resolve():
        found["kind"] = "install"
    else:
        found["shadows"] = str(installed)
    return found


def build_command(found: dict[str, Any]) -> str:
    """What compiles the module anew, for the package as `package()` has it."""
    if found["kind"] != "install":
        return f"pip install -v --no-deps -e {PACKAGE.parent}"
    return f"pip install -v --no-deps --no-cache-dir --force-reinstall {found['source'] or 'grpo_kernels'}"


def compiler() -> str | None:
    """The C++ compiler that a build would find."""
    names = (os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++", "cl")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def module() -> tuple[dict[str, Any], ModuleType | None]:
    """What is known of the compiled module, and the module if it can be imported."""
    found: dict[str, Any] = {"path": None, "reason": None, "compiler": None, "isa": None, "isas": [], "files": []}
    found["files"] = sorted(p.name for p in PACKAGE.glob("_cpu.*") if p.suffix in (".so", ".pyd", ".dylib"))
    try:
        native = importlib.import_module(MODULE)
    except ImportError as error:
        return found | {"reason": first_line(error)}, None
    found["path"] = native.__file__
    for name in ("compiler", "isa", "isas"):  # one that is older than all of them is stale, which `stale` will say
        if hasattr(native, name):
            found[name] = getattr(native, name)()
    return found, native


def module_findings(
    found: dict[str, Any], native: ModuleType | None, origin: dict[str, Any], flags: frozenset[str], needed: bool
) -> list[Finding]:
    """`needed`: no GPU has kernels of its own here, so that everything would run in eager PyTorch. `flags` are the processor's."""
    command = build_command(origin)
    findings = []
    if origin["shadows"] is not None:
        problem = f"the checkout at {PACKAGE.parent} hides the installed package at {origin['shadows']}"
        remedy = f"run from another directory, or {command}"
        findings.append(Finding(problem, remedy, native is None))
    if native is None:
        problem = f"the compiled module {MODULE} is missing, CPU tensors fall back to eager PyTorch: {why_missing(found)}"
        first = "" if compiler() else "install a C++17 compiler (Debian, Ubuntu: apt-get install g++), then "
        remedy = f"{first}{command} (if the compiler fails, the package installs without the module: the output says why)"
        return [*findings, Finding(problem, remedy, needed)]
    findings += [Finding(f"the compiled module is out of date: {reason}", command, True) for reason in stale(native)]
    best = best_isa(flags)
    if best is not None and found["isa"] != best:
        problem = f"the compiled module runs {found['isa']} code, but this processor has {best}"
        findings.append(Finding(problem, f"{command} (with GCC 10 or Clang 9, or newer)", False))
    return findings


def why_missing(found: dict[str, Any]) -> str:
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    if not found["files"]:
        return f"it was not built ({found['reason']})"
    if any(name == "_cpu" + suffix for name in found["files"] for suffix in suffixes):
        return f"its file is there but does not load ({found['reason']})"
    wanted = sysconfig.get_config_var("EXT_SUFFIX")
    return f"{', '.join(found['files'])} was built for another Python or system, this one loads _cpu{wanted}"


def best_isa(flags: frozenset[str]) -> str | None:
    """The best instruction set of csrc/module.cpp that a processor with these flags runs; None if it is not known to us."""
    if not flags:
        return None
    if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
        return "avx512bf16" if "avx512_bf16" in flags else "avx512"
    return "avx2" if flags >= {"avx2", "fma"} else None


def stale(native: ModuleType) -> list[str]:
    """Signs that the module was built from other sources than those beside it."""
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
    sources = PACKAGE.parent / "csrc"
    if not reasons and native.__file__ is not None and sources.is_dir():
        built = Path(native.__file__).stat().st_mtime
        newer = [p.name for p in sorted(sources.iterdir()) if p.stat().st_mtime > built]
        if newer:
            reasons.append(f"changed since it was built: {', '.join(newer)}")
    return reasons


def parameters(function: Any) -> int | None:
    """Of a compiled function, as nanobind describes it; None if it does not."""
    try:
        described = ast.parse(function.__nb_signature__[0][0] + ": ...").body[0]
        assert isinstance(described, ast.FunctionDef)
        return len(described.args.posonlyargs + described.args.args)
    except (AttributeError, IndexError, SyntaxError, TypeError):
        return None
