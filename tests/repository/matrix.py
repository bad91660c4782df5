"""The wheel in clean environments, one per supported end of the range of torch: `python tests/repository/matrix.py [NAME ...]`.

An sdist is made from the checkout and a wheel from the sdist; the wheel goes into a virtual environment that holds torch, the
test runner and nothing else, and the tests run against it from a folder without the package's source. Tests of optional
packages skip themselves; those about this repository's own pages and figures are left out. One line per environment, as a
table; exit status 1 if any failed. `pip`'s own settings (PIP_INDEX_URL, ...) decide whether torch is a CPU build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNNER = ("pytest", "hypothesis")
#: About the checkout, not about the package: the same whatever torch is. The budgets of compiled kernels are not: versions of
#: Triton order loads differently.
REPOSITORY = (
    *sorted(
        f"benchmarks/{file.name}" for file in (ROOT / "tests" / "benchmarks").glob("test_*.py") if file.stem != "test_resources"
    ),
    "repository",
    "vocabulary/test_sanitizers.py",
)


@dataclass(frozen=True)
class Environment:
    """`triton` None: not installed, nor is anything else that the wheel asks for beside torch."""

    python: str
    torch: str
    triton: str | None
    beside: tuple[str, ...] = ()


#: NumPy is what Triton's interpreter needs, and the interpreter of Triton 3.6 and before one older than 2.4. "gpu" is what machines
#: with a GPU have: tests/repository/rehearsal.py runs the GPU kit in it.
ENVIRONMENTS = {
    "oldest": Environment("3.10", "2.9.0", "3.5.0", ("numpy<2.4",)),
    "gpu": Environment("3.12", "2.11.0", "3.6.0", ("numpy<2.4",)),
    "newest": Environment("3.11", "2.13.0", "3.9.0", ("numpy",)),
    "bare": Environment("3.11", "2.13.0", None),
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


def call(*command: str | Path, cwd: Path | None = None) -> str:
    """What it printed; its last words and an exit if it failed. Nothing of the caller's own paths goes in."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "GRPO_KERNELS", "TRITON"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}")
    return done.stdout


def interpreter(version: str) -> str:
    """An interpreter of that version; the running one, with a word about it, where there is none."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0:
        return found
    running = ".".join(map(str, sys.version_info[:2]))
    if running != version:
        print(f"no Python {version} here: taking {running}", file=sys.stderr)
    return sys.executable


def sdist(work: Path) -> Path:
    """Of the checkout. The tests do not come from it, so that those being worked on run too."""
    shutil.rmtree(work / "sdist", ignore_errors=True)
    call(sys.executable, "-m", "build", "--sdist", "--outdir", work / "sdist", ROOT)
    (archive,) = (work / "sdist").glob("*.tar.gz")
    return archive


def check(name: str, environment: Environment, archive: Path, work: Path, files: Sequence[str]) -> str:
    """A line of the table, from the tests in `files`; none: all that are about the package."""
    home = work / name
    shutil.rmtree(home, ignore_errors=True)
    tests = home / "checkout"
    for folder in ("tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / folder, tests / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tests)

    call(interpreter(environment.python), "-m", "venv", home / "venv")
    python = home / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
    triton = [f"triton=={environment.triton}"] if environment.triton else []
    call(*pip, f"torch=={environment.torch}", *triton, *environment.beside, *RUNNER)
    call(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", home / "wheel", archive)
    (wheel,) = (home / "wheel").glob("*.whl")
    # With its dependencies, where they are there already, pip refuses a wheel whose ranges these versions are outside of.
    call(*pip, *([] if triton else ["--no-deps"]), wheel)
    call(*pip, f"torch=={environment.torch}", *triton)

    # Torch warns where NumPy is missing.
    file, *versions = call(python, "-W", "ignore", "-c", VERSIONS, cwd=tests).split()
    if not Path(file).is_relative_to(home / "venv"):
        sys.exit(f"{name}: tested {file}, not the wheel")
    print(call(python, "-m", "grpo_kernels", "doctor", cwd=tests), file=sys.stderr)
    chosen = [f"tests/{file}" for file in files] or [f"--ignore=tests/{path}" for path in REPOSITORY]
    began = time.monotonic()
    summary = call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, cwd=tests).strip().splitlines()[-1]
    seconds = time.monotonic() - began
    passed, skipped = (int(m[1]) if (m := re.search(rf"(\d+) {word}", summary)) else 0 for word in ("passed", "skipped"))
    return f"| {' | '.join([name, *versions, f'{passed:,}', f'{skipped:,}', f'{seconds:.0f}'])} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the named environments, or all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(ENVIRONMENTS)}; all if none is named")
    parser.add_argument("--tests", nargs="+", default=[], metavar="FILE", help="these files of tests/ only")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "matrix", help="where environments are made")
    parser.add_argument("--keep", action="store_true", help="leave the environments there: several GB each with CUDA builds")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    work = options.work.resolve()
    archive = sdist(work)
    rows, failed = [], 0
    for name in options.names or ENVIRONMENTS:
        try:
            rows.append(check(name, ENVIRONMENTS[name], archive, work, options.tests))
        except SystemExit as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            rows.append(f"| {name} | failed |")
            failed += 1
        if not options.keep:
            shutil.rmtree(work / name, ignore_errors=True)
    print("| environment | Python | torch | triton | NumPy | passed | skipped | seconds |")
    print("| --- | --- | --- | --- | --- | ---: | ---: | ---: |")
    print("\n".join(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
