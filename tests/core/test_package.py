"""What is installed: the cost of an import, a machine without Triton and C++, a checkout over an installed copy, the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

import grpo_kernels
from support.inside import native
from support.processes import WITHOUT

ROOT, PYTHON = Path(__file__).parents[2], sys.executable
MODULE, NAME = f"_cpu{EXTENSION_SUFFIXES[0]}", f"grpo_kernels-{grpo_kernels.__version__}"
Done = subprocess.CompletedProcess[str]


def python(*arguments: str, source: Path | None = None, site: Path | None = None, **environment: str) -> Done:
    """Python in the folder `source`, with the package from there and no other (None: the one that this process has). `site`
    stands for site-packages."""
    alone = [] if source is None else ["-S"]  # an editable install would come first
    source = source or Path(grpo_kernels.__file__).parent.parent
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRPO_KERNELS_")} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(source), *([] if site is None else [str(site)]), *sys.path])
    return subprocess.run([PYTHON, *alone, *arguments], env=env, cwd=source, capture_output=True, text=True)


def run(code: str, missing: tuple[str, ...] = (), **options: Any) -> str:
    """What it prints where `missing` cannot be imported; `options` are those of `python`."""
    done = python("-c", WITHOUT.format(missing=missing) + code, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_pulls_in_nothing_optional() -> None:
    """What torch itself imports is not ours to avoid."""
    optional = {"triton", "transformers", "trl", "liger_kernel", "matplotlib", "datasets", "tqdm", "numpy"}
    code = "import torch\nbefore = set(sys.modules)\nimport grpo_kernels\nprint(*set(sys.modules) - before)"
    assert not optional & {*run(code).split()}


LOSS = """
import warnings, torch
from grpo_kernels import Objective, TokenBatch, grpo_loss
x = torch.randn(3, 11, requires_grad=True)
batch = TokenBatch(torch.tensor([1, 2, 3]), torch.tensor([1.0, -1.0, 0.5]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        grpo_loss(x, batch, Objective.preset("grpo", aggregate="token-mean")).loss.backward()
expected = torch.softmax(x.detach(), -1)
expected[range(3), batch.targets] -= 1
assert torch.allclose(x.grad, 2 * expected * batch.advantages[:, None] / 3, atol=1e-6)
print([str(w.message) for w in caught])
"""
REFUSED = """
import grpo_kernels
from grpo_kernels import Options
for given in ({"backend": "cpu"}, {"backend": "triton"}, {"strict": True}):
    try:
        grpo_loss(x, batch, Objective(), options=Options(**given))
    except RuntimeError as e:
        print(e)
"""


def test_without_triton_and_without_the_cpp_module() -> None:
    """Eager runs, with one warning. A backend that was asked for, and strict mode, are errors."""
    first, *refused = run(LOSS + REFUSED, missing=("triton", "grpo_kernels._cpu")).splitlines()
    assert first.count("falls back to eager") == 1 and "doctor" in first
    said = "\n".join(refused)
    assert said.count("cannot run: ") == 2 and said.count("doctor") == 3 and "strict" in said


# ---- a checkout that hides the installed package: `pip install .`, then Python in the same folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This one, without a compiled module."""
    folder = tmp_path / "checkout"
    for name in ("grpo_kernels", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "CMakeLists.txt", folder)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The compiled module of this process as an installed copy has it."""
    try:
        module = Path(str(native.load().__file__))
    except ImportError as error:
        pytest.skip(str(error))
    if native.built_from(module) != native.sources():
        pytest.skip("the compiled module is out of date")
    package = tmp_path / "site" / "grpo_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the checkout hides this')")
    shutil.copy(module, package / MODULE)
    describe(package.parent, grpo_kernels.__version__)
    return package.parent


def describe(site: Path, version: str) -> None:
    about = site / "grpo_kernels.dist-info" / "METADATA"
    about.parent.mkdir(exist_ok=True)
    about.write_text(f"Metadata-Version: 2.1\nName: grpo_kernels\nVersion: {version}\n")


WHICH = f"{LOSS}\nprint(getattr(sys.modules.get('grpo_kernels._cpu'), '__file__', None))"
DOCTOR = "from grpo_kernels.diagnosis import doctor\nprint('exit status', doctor.main([]))"


def change(path: str) -> Callable[[Path, Path], None]:
    return lambda checkout, site: (checkout / path).write_text((checkout / path).read_text() + "\n") and None


#: What makes the installed module another's -> what is said of it.
SPOILT: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "sources": (change("csrc/simd.h"), "was built from other C++ sources"),
    "version": (lambda checkout, site: describe(site, "0.0.1"), "is version 0.0.1 and this is"),
}


def test_a_checkout_runs_the_compiled_module_that_was_installed_from_it(checkout: Path, site: Path) -> None:
    assert run(WHICH, source=checkout, site=site).splitlines() == ["[]", str(site / "grpo_kernels" / MODULE)]


@pytest.mark.parametrize("what", SPOILT)
def test_a_checkout_never_runs_another_builds_module_and_says_what_to_do(what: str, checkout: Path, site: Path) -> None:
    spoil, reason = SPOILT[what]
    spoil(checkout, site)
    doctor = DOCTOR if what == "sources" else "print()"
    warned, module, *said = run(f"{WHICH}\n{doctor}", source=checkout, site=site).splitlines()
    assert module == "None" and warned.count("falls back to eager") == 1
    assert f"the installed copy in {site / 'grpo_kernels'} {reason}" in warned and f"-e {checkout}`" in warned
    if doctor is DOCTOR:
        report = "\n".join(said)
        assert said[-1] == "exit status 1" and reason in report and f"-e {checkout}" in report
        assert "nothing was tested" in report and "float64" not in report


# ---- archives


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run([PYTHON, "-m", "build", "--sdist", "--outdir", str(folder), str(ROOT)], check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def wheel_of(sdist: Path, folder: Path, **environment: str) -> Path:
    command = [PYTHON, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sdist)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_archives_hold_what_they_should(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        sources = {path.removeprefix(f"{NAME}/") for path in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "README.md", "csrc/module.cpp", "tests/conftest.py"} <= sources
    assert not [path for path in sources if (path.startswith(("build", ".")) and path != ".gitignore") or path.endswith(".so")]
    wheel = zipfile.ZipFile(wheel_of(sdist, tmp_path))
    names = set(wheel.namelist())
    package = {path for path in names if path.startswith("grpo_kernels/")}
    assert {path.split("/")[0] for path in names - package} == {f"{NAME}.dist-info"}
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert {f"grpo_kernels/{path}" for path in ("py.typed", "_cpu.pyi", "integrations/README.md")} <= package
    of_python = {path for path in sources if path.startswith("grpo_kernels/") and path.endswith(".py")}
    assert {path for path in package if path.endswith(".py")} == of_python
    assert len([path for path in package if path.startswith("grpo_kernels/_cpu.") and path.endswith((".so", ".pyd"))]) == 1
    lines = wheel.read(f"{NAME}.dist-info/METADATA").decode().splitlines()
    required = [line.split()[1].split(">")[0] for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required == ["torch", "triton"]


@pytest.mark.slow
def test_without_a_compiler_it_installs_and_doctor_says_what_is_missing(sdist: Path, tmp_path: Path) -> None:
    """CMake looks into /usr/bin whatever PATH says, unless it is told which compiler to take."""
    nothing, site = tmp_path / "bin", tmp_path / "site"
    nothing.mkdir()
    wheel = wheel_of(sdist, tmp_path / "wheel", PATH=str(nothing), CC=str(nothing / "cc"), CXX=str(nothing / "c++"))
    assert wheel.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(site)
    assert not [*site.rglob("*.so")]
    out = run(f"import grpo_kernels\nassert grpo_kernels.__file__.startswith({str(site)!r})\n{LOSS}", source=site)
    assert out.count("falls back to eager") == 1 and "doctor" in out
    out = run("from grpo_kernels.diagnosis import doctor\nprint('status', doctor.main(['--without-native']))", source=site)
    assert "cpu      not available: " in out and "C++17 compiler" in out and "status 1" in out
