"""Find and load the compiled module `grpo_kernels._cpu`, and say what it was built from.

Python started in a checkout imports the package from there, even if `pip install .` has put the
compiled module into site-packages. A checkout without a compiled module loads the module of the
installed copy, if that was built from the same sources.
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

#: The top-level name that this package is imported by.
TOP_LEVEL_NAME = __name__.partition(".")[0]
#: Whether this is a build for the Hugging Face Hub. Such a build is imported by another name than
#: grpo_kernels, and contains no compiled module.
IS_HUB_BUILD = TOP_LEVEL_NAME != "grpo_kernels"
#: The compiled module's name in an import, and its file name before the suffix.
MODULE_NAME = f"{TOP_LEVEL_NAME}._cpu"
MODULE_STEM = "_cpu"
#: The folder of this package.
PACKAGE = Path(__file__).parents[2]

#: The digest of the sources that CMakeLists.txt writes into the compiled module.
BUILD_MARK = re.compile(rb"grpo_kernels built from sha256:([0-9a-f]{64})")


def package_version() -> str:
    """Return the version of this package."""
    return str(sys.modules[TOP_LEVEL_NAME].__version__)


def load() -> ModuleType:
    """Import and return the compiled module of this package, or else of the installed copy.

    Raises ImportError with the reason if neither can be loaded.
    """
    try:
        return importlib.import_module(MODULE_NAME)
    except ImportError as error:
        reason = reason_missing(str(error))
    path, reason_not_installed = installed_module()
    if path is None:
        if reason_not_installed:
            reason = f"{reason}; {reason_not_installed}"
        raise ImportError(reason, name=MODULE_NAME)
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Register the module, as an ordinary import does.
    sys.modules[MODULE_NAME] = module
    sys.modules[TOP_LEVEL_NAME]._cpu = module  # type: ignore[attr-defined]
    return module


def unsupported_machine() -> str | None:
    """Return the reason why no compiled module can run on this machine, or None if one can."""
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        return None
    return f"the C++ kernels are for x86-64 with AVX2, and this machine is {machine}"


def reason_missing(import_error: str) -> str:
    """Return the reason why the import of this package's compiled module failed, in words.

    The reasons are: this is a Hub build, which has no compiled module; the module was not built;
    its file does not load; or it was built for another Python or system.

    import_error   the message of the ImportError
    """
    if IS_HUB_BUILD:
        return "a build for the Hub has none"
    names = module_files()
    if not names:
        return f"it was not built in {PACKAGE} ({import_error})"
    loadable = {MODULE_STEM + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES}
    if loadable & set(names):
        return f"its file is there but does not load ({import_error})"
    expected = MODULE_STEM + str(sysconfig.get_config_var("EXT_SUFFIX"))
    return f"{', '.join(names)} was built for another Python or system, this one loads {expected}"


def module_files() -> list[str]:
    """Return the file names of compiled modules in this package, for any Python and system."""
    files = PACKAGE.glob(f"{MODULE_STEM}.*")
    return sorted(file.name for file in files if file.suffix in (".so", ".pyd", ".dylib"))


# ---- what a module was built from


def source_digest(root: Path = PACKAGE.parent) -> str | None:
    """Return the SHA-256 digest of the module's C++ sources, or None without the sources.

    It is the digest of a list with a line "path digest" for each file, as in CMakeLists.txt.

    root   the folder of a checkout
    """
    if not (root / "csrc").is_dir() or not (root / "CMakeLists.txt").is_file():
        return None
    names = ["CMakeLists.txt"]
    for file in (root / "csrc").iterdir():
        if file.suffix in (".cpp", ".h"):
            names.append(f"csrc/{file.name}")
    lines = []
    for name in sorted(names):
        digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        lines.append(f"{name} {digest}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def built_from(module: Path) -> str | None:
    """Return the `source_digest` that a compiled module was built from, without loading it.

    The result is None for a module of an older version, which does not contain the digest.
    """
    match = BUILD_MARK.search(module.read_bytes())
    return match[1].decode() if match else None


# ---- the installed copy


def find_distribution() -> importlib.metadata.Distribution | None:
    """Return the installed distribution of this package, or None if it is not installed."""
    try:
        return importlib.metadata.distribution("grpo_kernels")
    except importlib.metadata.PackageNotFoundError:
        return None


def package() -> dict[str, Any]:
    """Return how the imported package was installed, as a dict:

    path      folder of the package that is imported
    kind      "checkout", "editable install" or "install"
    shadows   folder of an installed copy that is not the one imported, or None
    source    path or URL that the installed copy was installed from, or None
    """
    facts: dict[str, Any] = {
        "path": str(PACKAGE),
        "kind": "checkout",
        "shadows": None,
        "source": None,
    }
    distribution = find_distribution()
    if distribution is None:
        return facts
    direct_url = json.loads(distribution.read_text("direct_url.json") or "{}")
    facts["source"] = direct_url.get("url", "").removeprefix("file://") or None
    is_editable = direct_url.get("dir_info", {}).get("editable", False)
    if is_editable:
        installed = Path(facts["source"]) / "grpo_kernels"
    else:
        installed = Path(str(distribution.locate_file("grpo_kernels")))
    if installed.resolve() != PACKAGE.resolve():
        facts["shadows"] = str(installed)
    else:
        facts["kind"] = "editable install" if is_editable else "install"
    return facts


def build_command(facts: dict[str, Any]) -> str:
    """Return the shell command that builds the compiled module again.

    facts   the result of `package`
    """
    if IS_HUB_BUILD:
        return "pip install grpo_kernels"
    if facts["kind"] != "install":
        return f"pip install -v --no-deps -e {PACKAGE.parent}"
    source = facts["source"] or "grpo_kernels"
    return f"pip install -v --no-deps --no-cache-dir --force-reinstall {source}"


def installed_module() -> tuple[Path | None, str | None]:
    """Find another, installed copy of this package, and return (path, reason) for its module.

    path     the compiled module of that copy. None if there is no other copy, or if its module must
             not be loaded here.
    reason   why the module must not be loaded: the copy has none, is of another version, or was
             built from other C++ sources. None if there is no other copy, or if it may be loaded.
    """
    distribution = None if IS_HUB_BUILD else find_distribution()
    if distribution is None:
        return None, None
    folder = Path(str(distribution.locate_file("grpo_kernels")))
    if folder.resolve() == PACKAGE.resolve():
        return None, None
    copy = f"the installed copy in {folder}"
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    candidates = [folder / f"{MODULE_STEM}{suffix}" for suffix in suffixes]
    files = [file for file in candidates if file.is_file()]
    if not files:
        return None, f"{copy} has no compiled module"
    version = package_version()
    if distribution.version != version:
        return None, f"{copy} is version {distribution.version} and this is {version}"
    digest = source_digest()
    if digest is None or built_from(files[0]) != digest:
        return None, f"{copy} was built from other C++ sources"
    return files[0], None
