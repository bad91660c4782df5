"""The compiled module `grpo_kernels._cpu`: where it is, and what it was built from.

Python started in a checkout imports the package from there, even if `pip install .` has put the
compiled module into site-packages. A checkout without a compiled module uses that of the installed
copy, if it was built from the same sources.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

#: The name that this package was imported by: another one in a build for the Hub, which has no
#: compiled module.
HOME = __name__.partition(".")[0]
NAME = f"{HOME}._cpu"
PACKAGE = Path(__file__).parents[2]


def version_here() -> str:
    """The version of this package, whose first line it is."""
    return str(sys.modules[HOME].__version__)


def load() -> ModuleType:
    """The compiled module of this package. ImportError says why there is none."""
    try:
        return importlib.import_module(NAME)
    except ImportError as error:
        reason = why_missing(str(error))
    path, why_not = installed_module()
    if path is None:
        raise ImportError(f"{reason}; {why_not}" if why_not else reason, name=NAME)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    sys.modules[HOME]._cpu = module  # type: ignore[attr-defined]  # as an ordinary import does
    return module


def why_not_here() -> str | None:
    """Why no build of the module runs on this machine; None where one may."""
    machine = platform.machine()
    return (
        None
        if machine in ("x86_64", "AMD64")
        else f"the C++ kernels are for x86-64 with AVX2, and this machine is {machine}"
    )


def why_missing(error: str) -> str:
    """`error`: what the import of the module beside this file said."""
    files = module_files()
    if HOME != "grpo_kernels":
        return "a build for the Hub has none"
    if not files:
        return f"it was not built in {PACKAGE} ({error})"
    if any(
        name == "_cpu" + suffix
        for name in files
        for suffix in importlib.machinery.EXTENSION_SUFFIXES
    ):
        return f"its file is there but does not load ({error})"
    expected = sysconfig.get_config_var("EXT_SUFFIX")
    return (
        f"{', '.join(files)} was built for another Python or system, this one loads _cpu{expected}"
    )


def module_files() -> list[str]:
    """Names of compiled modules beside this file, for any version of Python."""
    return sorted(p.name for p in PACKAGE.glob("_cpu.*") if p.suffix in (".so", ".pyd", ".dylib"))


# ---- what a module was built from


def sources(root: Path = PACKAGE.parent) -> str | None:
    """The digest of what the checkout at `root` builds the module from, as CMakeLists.txt computes
    it; None: no checkout.
    """
    if not (root / "csrc").is_dir() or not (root / "CMakeLists.txt").is_file():
        return None
    names = [
        "CMakeLists.txt",
        *(f"csrc/{p.name}" for p in (root / "csrc").iterdir() if p.suffix in (".cpp", ".h")),
    ]
    digests = (
        f"{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}\n"
        for name in sorted(names)
    )
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def built_from(module: Path) -> str | None:
    """The digest that the build left in the file, which need not be loaded; None in one of an older
    version.
    """
    match = re.search(rb"grpo_kernels built from sha256:([0-9a-f]{64})", module.read_bytes())
    return match[1].decode() if match else None


# ---- the installed copy


def package() -> dict[str, Any]:
    """{"path", "kind": "checkout", "editable install" or "install", "shadows": an installed package
    that is not the one imported, "source": what it was installed from}.
    """
    facts: dict[str, Any] = {
        "path": str(PACKAGE),
        "kind": "checkout",
        "shadows": None,
        "source": None,
    }
    try:
        distribution = importlib.metadata.distribution("grpo_kernels")
    except importlib.metadata.PackageNotFoundError:
        return facts
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    facts["source"] = direct.get("url", "").removeprefix("file://") or None
    editable = direct.get("dir_info", {}).get("editable", False)
    installed = (
        Path(facts["source"]) / "grpo_kernels"
        if editable
        else Path(str(distribution.locate_file("grpo_kernels")))
    )
    if installed.resolve() == PACKAGE.resolve():
        facts["kind"] = "editable install" if editable else "install"
    else:
        facts["shadows"] = str(installed)
    return facts


def build_command(facts: dict[str, Any]) -> str:
    """The command that rebuilds the module, for the result of `package()`."""
    if HOME != "grpo_kernels":
        return "pip install grpo_kernels"
    if facts["kind"] != "install":
        return f"pip install -v --no-deps -e {PACKAGE.parent}"
    return (
        "pip install -v --no-deps --no-cache-dir --force-reinstall"
        f" {facts['source'] or 'grpo_kernels'}"
    )


def installed_module() -> tuple[Path | None, str | None]:
    """(the installed copy's module, None) if this checkout may use it, else (None, why not); (None,
    None): there is no copy.
    """
    if HOME != "grpo_kernels":
        return None, None
    try:
        distribution = importlib.metadata.distribution("grpo_kernels")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    folder = Path(str(distribution.locate_file("grpo_kernels")))
    if folder.resolve() == PACKAGE.resolve():
        return None, None
    copy = f"the installed copy in {folder}"
    module = next(
        (m for s in importlib.machinery.EXTENSION_SUFFIXES if (m := folder / f"_cpu{s}").is_file()),
        None,
    )
    if module is None:
        return None, f"{copy} has none"
    version = version_here()
    if distribution.version != version:
        return None, f"{copy} is version {distribution.version} and this is {version}"
    here = sources()
    if here is None or built_from(module) != here:
        return None, f"{copy} was built from other C++ sources"
    return module, None
