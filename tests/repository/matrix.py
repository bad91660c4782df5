"""The wheel in clean environments, over the range of torch, Triton and Python: `python tests/repository/matrix.py [NAME ...]`.

An sdist is made from the checkout and a wheel from the sdist; the wheel goes into a virtual environment that holds torch, the
test runner and nothing else, and the tests run against it from a folder without the package's source. Tests of optional
packages skip themselves; those about this repository's own pages and figures are left out. One line per environment, as a
table; exit status 1 if any failed. `pip`'s own settings (PIP_INDEX_URL, ...) decide whether torch is a CPU build.

Before the tests, `doctor` must find nothing to repair with the C++ module, and the README's first example must run.
`--write` puts the lines into docs/versions.md, where lines of other environments stay."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import versions

ROOT = Path(__file__).parents[2]
RUNNER = ("pytest", "hypothesis")
#: About the checkout, not about the package: the same whatever torch is. The budgets of compiled kernels are not: versions of
#: Triton order loads differently.
REPOSITORY = (
    *(f"benchmarks/{file.name}" for file in (ROOT / "tests" / "benchmarks").glob("test_*.py") if file.stem != "test_resources"),
    "repository",
    "rows/test_sanitizers.py",
)


@dataclass(frozen=True)
class Environment:
    """`triton` None: not installed, nor is anything else that the wheel asks for beside torch."""

    python: str
    torch: str
    triton: str | None
    beside: tuple[str, ...] = ()


#: Each torch with the Triton that it asks for. NumPy is what Triton's interpreter needs, and the interpreter of Triton 3.6 and
#: before one older than 2.4. "gpu" is what machines with a GPU have.
#: "development" is what constraints.txt names.
ENVIRONMENTS = {
    "oldest": Environment("3.10", "2.9.0", "3.5.0", ("numpy<2.4",)),
    "2.10": Environment("3.11", "2.10.0", "3.6.0", ("numpy<2.4",)),
    "gpu": Environment("3.12", "2.11.0", "3.6.0", ("numpy<2.4",)),
    "3.13": Environment("3.13", "2.11.0", "3.6.0", ("numpy<2.4",)),
    "2.12": Environment("3.12", "2.12.1", "3.7.1", ("numpy",)),
    "development": Environment("3.11", "2.13.0", "3.9.0", ("numpy",)),
    "bare": Environment("3.11", "2.13.0", None),
    "2.14": Environment("3.13", "2.14.1", "3.8.0", ("numpy",)),
    "newest": Environment("3.11", "2.15.0", "3.9.0", ("numpy",)),
}

VERSIONS = """
import importlib.metadata as metadata, platform, grpo_kernels
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "-"
assert metadata.version("grpo_kernels") == grpo_kernels.__version__
print(grpo_kernels.__file__, platform.python_version(), *map(version, ("torch", "triton", "numpy")), sep="\\n")
"""
#: The README's first example, from the folder of the tests.
EXAMPLE = """
import sys
sys.path.insert(0, "tests")
from support.pages import README, examples
exec(examples(README)[0].code)
"""


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Nothing of the caller's own paths goes in."""
    outside = ("PYTHON", "PYTEST", "GRPO_KERNELS", "TRITON")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(outside)} | variables
    piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([str(part) for part in command], cwd=cwd, env=environment, **piped)


def call(*command: str | Path, cwd: Path | None = None) -> str:
    """What it printed; its last words and an exit if it failed."""
    done = run(*command, cwd=cwd)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}")
    return done.stdout


def sdist(work: Path) -> Path:
    """Of the checkout. The tests do not come from it, so that those being worked on run too."""
    shutil.rmtree(work, ignore_errors=True)
    call(sys.executable, "-m", "build", "--sdist", "--outdir", work, ROOT)
    return next(work.glob("*.tar.gz"))


def wheel(python: Path, archive: Path) -> Path:
    """The wheel for this Python, made of the archive unless an environment of this run has made it."""
    version = call(python, "-c", "import sys; print(min(sys.version_info[1], 12))").strip()  # 3.12's serves all later ones
    if not any(archive.parent.glob(f"*-cp3{version}-*.whl")):
        call(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", archive.parent, archive)
    for found in archive.parent.glob(f"*-cp3{version}-*.whl"):
        return found
    sys.exit("the wheel has no C++ module")


def environment(wanted: Environment, home: Path, archive: Path) -> tuple[Path, Path]:
    """(the Python of a new environment with what the tests need and the wheel, the wheel)"""
    found = shutil.which(f"python{wanted.python}")
    if found is None:
        sys.exit(f"no Python {wanted.python} here: put python{wanted.python} on the path")
    call(found, "-m", "venv", home / "venv")
    python = home / "venv" / "bin" / "python"
    built = wheel(python, archive)
    pip = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
    exactly = [f"torch=={wanted.torch}", *([f"triton=={wanted.triton}"] if wanted.triton else [])]
    call(*pip, *exactly, *wanted.beside, *RUNNER)
    # With its dependencies, where they are there already, pip refuses a wheel whose ranges these versions are outside of.
    call(*pip, *([] if wanted.triton else ["--no-deps"]), built)
    call(*pip, *exactly)
    return python, built


def check(name: str, archive: Path, quick: bool) -> dict[str, Any]:
    """A line of the table. quick: every value of each parameter; no products, in tests that start pytest neither."""
    wanted, home = ENVIRONMENTS[name], archive.parent / name
    tests = home / "checkout"
    for folder in ("tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / folder, tests / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tests)
    python, built = environment(wanted, home, archive)

    # Torch warns where NumPy is missing.
    file, *found = call(python, "-W", "ignore", "-c", VERSIONS, cwd=tests).split()
    if not Path(file).is_relative_to(home):
        sys.exit(f"{name}: tested {file}, not the wheel")
    line = dict(zip(("python", "torch", "triton", "numpy"), found, strict=True))
    for key in ("python", "torch", "triton"):
        if not line[key].startswith(getattr(wanted, key) or "-"):
            sys.exit(f"{name} is {wanted}, and {python} has {line}")
    print(call(python, "-m", "grpo_kernels", "doctor", "--quick", cwd=tests), file=sys.stderr)
    call(python, "-W", "ignore", "-c", EXAMPLE, cwd=tests)
    # A single test of a file that skips itself is an error to pytest, and without Triton that file does.
    some = [f"tests/{file}" for file in versions.QUICK if wanted.triton or "::" not in file]
    chosen = some if quick else [f"--ignore=tests/{path}" for path in REPOSITORY]
    began, plugins = time.monotonic(), "-p no:cacheprovider" + " -p support.each_value" * quick
    done = run(python, "-m", "pytest", "-q", *chosen, cwd=tests, PYTEST_ADDOPTS=plugins, PYTHONPATH=str(tests / "tests"))
    seconds, kind = round(time.monotonic() - began, 1), "-".join(built.stem.split("-")[2:4])
    return line | versions.tested(done) | {"seconds": seconds, "wheel": kind, "tests": "quick" if quick else "all"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the named environments, or all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(ENVIRONMENTS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="the selection of docs/versions.md: 50 seconds to 7 minutes each")
    parser.add_argument("--write", action="store_true", help="keep the lines in benchmarks/results and docs/versions.md")
    options = parser.parse_args(arguments)
    if unknown := {*options.names} - {*ENVIRONMENTS}:
        parser.error(f"no such environment: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    archive, names, lines = sdist(ROOT / "build" / "matrix"), options.names or [*ENVIRONMENTS], {}
    for name in names:
        try:
            lines[name] = check(name, archive, options.quick)
        except SystemExit as error:
            print(f"{name} failed: {error}", file=sys.stderr)
        shutil.rmtree(archive.parent / name, ignore_errors=True)  # several GB with CUDA builds
        if options.write and name in lines:
            versions.write("environments", {name: lines[name]})
    today = datetime.date.today().isoformat()
    print(versions.environments((name, line | {"date": today}) for name, line in lines.items()))
    return int(len(lines) < len(names) or any(line["failed"] for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
