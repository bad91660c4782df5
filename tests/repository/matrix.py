"""The wheel in clean environments, over the range of torch, Triton and Python: `python tests/repository/matrix.py [NAME ...]`.

An sdist is made from the checkout and a wheel from the sdist; the wheel goes into a virtual environment that holds torch, the
test runner and nothing else, and the tests run against it from a folder without the package's source. Tests of optional
packages skip themselves; those about this repository's own pages and figures are left out. One line per environment, as a
table; exit status 1 if any failed. `pip`'s own settings (PIP_INDEX_URL, ...) decide whether torch is a CPU build.

Before the tests, `doctor` must find nothing to repair with the C++ module, and the README's first example must run.

`--python NAME=PYTHON` takes an environment that is there and has the versions of NAME; the wheel goes into a folder beside it.
`--write` puts the lines into docs/versions.md, where lines of other environments stay.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
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
    *sorted(
        f"benchmarks/{file.name}" for file in (ROOT / "tests" / "benchmarks").glob("test_*.py") if file.stem != "test_resources"
    ),
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

#: pytest's arguments for all that is about the package.
ALL = tuple(f"--ignore=tests/{path}" for path in REPOSITORY)

#: What a wheel is made of.
SOURCES = ("grpo_kernels/", "csrc/", "CMakeLists.txt", "pyproject.toml")

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


def run(
    *command: str | Path, cwd: Path | None = None, paths: Sequence[Path] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Nothing of the caller's own paths goes in; `paths` are folders of packages beside those of the environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "GRPO_KERNELS", "TRITON"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def call(*command: str | Path, cwd: Path | None = None, paths: Sequence[Path] = ()) -> str:
    """What it printed; its last words and an exit if it failed."""
    done = run(*command, cwd=cwd, paths=paths)
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


def wheel(python: Path, archive: Path, work: Path) -> Path:
    """The wheel for this Python, made of the archive unless one of the same sources is there."""
    digest = hashlib.sha256()
    with tarfile.open(archive) as tar:
        members = [(m.name.partition("/")[2], m) for m in tar.getmembers() if m.isfile()]
        for name, member in sorted((n, m) for n, m in members if n.startswith(SOURCES)):
            file = tar.extractfile(member)
            assert file is not None
            digest.update(name.encode() + file.read())
    folder = work / "wheels" / digest.hexdigest()[:16]
    version = call(python, "-c", "import sys; print(min(sys.version_info[1], 12))").strip()  # 3.12's serves all later ones
    if not (found := [*folder.glob(f"*-cp3{version}-*.whl")]):
        call(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, archive)
        found = [*folder.glob(f"*-cp3{version}-*.whl")]
        if not found:
            sys.exit(f"the wheel has no C++ module: {', '.join(file.name for file in folder.iterdir())}")
    return found[0]


def empty(environment: Environment, home: Path) -> Path:
    """The Python of a new environment with nothing in it."""
    call(interpreter(environment.python), "-m", "venv", home / "venv")
    return home / "venv" / "bin" / "python"


def fill(python: Path, environment: Environment, built: Path) -> None:
    """What the tests need, then the wheel."""
    pip = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
    triton = [f"triton=={environment.triton}"] if environment.triton else []
    call(*pip, f"torch=={environment.torch}", *triton, *environment.beside, *RUNNER)
    # With its dependencies, where they are there already, pip refuses a wheel whose ranges these versions are outside of.
    call(*pip, *([] if triton else ["--no-deps"]), built)
    call(*pip, f"torch=={environment.torch}", *triton)


def same(found: str, wanted: str) -> bool:
    """A version and what it begins with; "-" is none."""
    return versions.numbers(found)[: len(versions.numbers(wanted))] == versions.numbers(wanted) and (
        found == "-" or wanted != "-"
    )


def quick(environment: Environment) -> list[str]:
    """The quick selection. A single test of a file that skips itself is an error to pytest, and without Triton that file does."""
    return [f"tests/{file}" for file in versions.QUICK if environment.triton or "::" not in file]


def check(
    name: str, environment: Environment, archive: Path, work: Path, chosen: Sequence[str], given: Path | None, quick: bool
) -> dict[str, Any]:
    """A line of the table, from the tests that these arguments of pytest choose.

    given  the Python of an environment that is there; None: a new one
    quick  every value of each parameter; no products, in tests that start pytest neither"""
    home = work / name
    shutil.rmtree(home, ignore_errors=True)
    tests = home / "checkout"
    for folder in ("tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / folder, tests / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tests)

    site = [home / "site"] if given else []
    python = given or empty(environment, home)
    built = wheel(python, archive, work)
    if given:
        call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", home / "site", built)
    else:
        fill(python, environment, built)

    # Torch warns where NumPy is missing.
    file, *found = call(python, "-W", "ignore", "-c", VERSIONS, cwd=tests, paths=site).split()
    if not Path(file).is_relative_to(home):
        sys.exit(f"{name}: tested {file}, not the wheel")
    line = dict(zip(("python", "torch", "triton", "numpy"), found, strict=True))
    wanted = {"python": environment.python, "torch": environment.torch, "triton": environment.triton or "-"}
    if not all(same(line[key], value) for key, value in wanted.items()):
        sys.exit(f"{name} is {wanted}, and {python} has {line}: give --python one that has these versions")
    print(call(python, "-m", "grpo_kernels", "doctor", "--quick", cwd=tests, paths=site), file=sys.stderr)
    call(python, "-W", "ignore", "-c", EXAMPLE, cwd=tests, paths=site)
    began = time.monotonic()
    plugins = "-p no:cacheprovider" + (" -p support.each_value" if quick else "")
    paths = [*site, tests / "tests"]
    done = run(python, "-m", "pytest", "-q", *chosen, cwd=tests, paths=paths, PYTEST_ADDOPTS=plugins)
    seconds = round(time.monotonic() - began, 1)
    return line | versions.tested(done) | {"seconds": seconds, "wheel": "-".join(built.stem.split("-")[2:4])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the named environments, or all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(ENVIRONMENTS)}; all if none is named")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--tests", nargs="+", default=[], metavar="FILE", help="these files of tests/ only")
    chosen.add_argument("--quick", action="store_true", help="the selection of docs/versions.md: 50 seconds to 7 minutes each")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON", help="an environment that is there")
    parser.add_argument("--write", action="store_true", help="keep the lines in benchmarks/results and docs/versions.md")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "matrix", help="where environments are made")
    parser.add_argument("--keep", action="store_true", help="leave the environments there: several GB each with CUDA builds")
    options = parser.parse_args(arguments)
    given = {name: Path(path).absolute() for name, _, path in (text.partition("=") for text in options.python)}
    if unknown := {*options.names, *given} - set(ENVIRONMENTS):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    if options.write and options.tests:
        parser.error("--write keeps whole selections: leave out --tests, or take --quick in its place")
    work = options.work.resolve()
    archive = sdist(work)
    lines, failed = {}, []
    for name in options.names or given or ENVIRONMENTS:
        try:
            files = quick(ENVIRONMENTS[name]) if options.quick else [f"tests/{file}" for file in options.tests]
            found = check(name, ENVIRONMENTS[name], archive, work, files or ALL, given.get(name), options.quick)
            lines[name] = found | {"tests": "quick" if options.quick else "some" if options.tests else "all"}
            failed += [name] if found["failed"] else []
        except SystemExit as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            failed.append(name)
        if not options.keep:
            shutil.rmtree(work / name, ignore_errors=True)
        if options.write and name in lines:
            versions.write("environments", {name: lines[name]})
    today = datetime.date.today().isoformat()
    print(versions.environments((name, line | {"date": today}) for name, line in lines.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
