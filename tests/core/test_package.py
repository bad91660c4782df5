"""The cost of an import, and the behaviour without Triton, the C++ module or a GPU."""

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
import torch

import grpo_kernels
from grpo_kernels.vocabulary import backends, native
from support.processes import WITHOUT


def python(
    *arguments: str, source: Path | None = None, site: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Python in the folder `source`, with the package from there and no other (None: the one that this process has). `site`
    stands for site-packages."""
    alone = [] if source is None else ["-S"]  # an editable install would come first
    source = source or Path(grpo_kernels.__file__).parent.parent
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRPO_KERNELS_")} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(source), *([] if site is None else [str(site)]), *sys.path])
    return subprocess.run([sys.executable, *alone, *arguments], env=env, cwd=source, capture_output=True, text=True)


def run(code: str, missing: tuple[str, ...] = (), **options: Any) -> str:
    """What it prints where `missing` cannot be imported; `options` are those of `python`."""
    done = python("-c", WITHOUT.format(missing=missing) + code, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_pulls_in_nothing_optional() -> None:
    optional = ("triton", "transformers", "trl", "liger_kernel", "matplotlib", "datasets", "tqdm", "numpy")
    # What torch itself imports is not ours to avoid.
    out = run(
        f"import torch\nbefore = set(sys.modules)\nimport grpo_kernels\nnew = set(sys.modules) - before\n"
        f"print([m for m in {optional!r} if m in new])"
    )
    assert out.strip() == "[]"


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


def test_without_triton_and_without_the_cpp_module_eager_runs_with_one_warning() -> None:
    out = run(LOSS, missing=("triton", "grpo_kernels._cpu"))
    assert out.count("falls back to eager") == 1 and "doctor" in out


def test_strict_mode_turns_the_fallback_into_an_error() -> None:
    code = "\n".join(
        ["try:", *("    " + line for line in LOSS.splitlines()), "except RuntimeError as e:", "    print('refused:', e)"]
    )
    assert "refused: " in run(code, missing=("grpo_kernels._cpu",), GRPO_KERNELS_STRICT="1")


def test_a_backend_asked_for_by_name_never_falls_back() -> None:
    with pytest.raises(ValueError, match=r"backend='cuda'.*one of auto, eager, cpu, triton"):
        backends.pick("cuda", torch.device("cpu"))
    out = run(
        "import torch\nfrom grpo_kernels.vocabulary import backends\n"
        "for name in ('cpu', 'triton'):\n"
        "    try:\n        backends.pick(name, torch.device('cpu'))\n"
        "    except RuntimeError as e:\n        print(e)",
        missing=("triton", "grpo_kernels._cpu"),
    )
    assert out.count("cannot run: ") == 2 and "doctor" in out


# ---- a checkout that hides the installed package: `pip install .`, then Python in the same folder

ROOT = Path(__file__).parents[2]
MODULE = f"_cpu{EXTENSION_SUFFIXES[0]}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This one, without a compiled module."""
    if native.sources() is None:
        pytest.skip("not a checkout")
    folder = tmp_path / "checkout"
    for name in ("grpo_kernels", "benchmarks", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "results"))
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


WHICH = f"{LOSS}\nfrom grpo_kernels.vocabulary import backends\nprint(backends.pick('auto', torch.device('cpu')).__name__)"
WHICH += "\nprint(getattr(sys.modules.get('grpo_kernels._cpu'), '__file__', None))"
DOCTOR = "from grpo_kernels.diagnosis import doctor\nprint('exit status', doctor.main([]))"


def test_a_checkout_runs_the_compiled_module_that_was_installed_from_it(checkout: Path, site: Path) -> None:
    out = run(WHICH, source=checkout, site=site)
    assert out.splitlines() == ["[]", "grpo_kernels.vocabulary.backends.cpu", str(site / "grpo_kernels" / MODULE)]
    done = python("-m", "grpo_kernels", "doctor", "--quick", source=checkout, site=site)
    assert done.returncode == 0 and "hides the installed package" in done.stdout and "  cpu      ok: " in done.stdout, (
        done.stdout
    )


def change(path: str) -> Callable[[Path, Path], None]:
    def changed(checkout: Path, site: Path) -> None:
        with (checkout / path).open("a") as file:
            file.write("\n")

    return changed


def unmark(checkout: Path, site: Path) -> None:
    module = site / "grpo_kernels" / MODULE
    module.write_bytes(module.read_bytes().replace(b"built from sha256:", b"built long ago    "))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda checkout, site: describe(site, "0.0.1"), "is version 0.0.1 and this is"),
        (change("csrc/simd.h"), "was built from other C++ sources"),
        (change("CMakeLists.txt"), "was built from other C++ sources"),
        (unmark, "was built from other C++ sources"),
        (lambda checkout, site: (site / "grpo_kernels" / MODULE).unlink(), "has none"),
    ],
    ids=["version", "sources", "build", "older", "missing"],
)
def test_a_checkout_never_runs_another_builds_module_and_says_what_to_do(
    checkout: Path, site: Path, spoil: Callable[[Path, Path], None], reason: str
) -> None:
    spoil(checkout, site)
    warned, backend, module, *said = run(f"{WHICH}\n{DOCTOR}", source=checkout, site=site).splitlines()
    report = "\n".join(said)
    assert backend == "grpo_kernels.vocabulary.backends.eager" and module == "None"
    assert warned.count("falls back to eager") == 1
    assert f"the installed copy in {site / 'grpo_kernels'} {reason}" in warned and f"-e {checkout}`" in warned
    assert said[-1] == "exit status 1" and reason in report and f"-e {checkout}" in report
    assert "nothing was tested" in report and "float64" not in report


def test_benchmarks_of_an_unbuilt_checkout_measure_nothing_and_say_what_to_do(checkout: Path, tmp_path: Path) -> None:
    describe(tmp_path, "0.0.1")
    done = python("-m", "benchmarks", source=checkout, site=tmp_path)
    assert done.returncode == 1 and done.stdout == "", done.stdout
    assert "Nothing was measured." in done.stderr and f"-> pip install -v --no-deps -e {checkout}" in done.stderr


# ---- archives


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("not a checkout")
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def wheel_of(sdist: Path, folder: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sdist)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_archives_hold_what_they_should(sdist: Path, tmp_path: Path) -> None:
    name = f"grpo_kernels-{grpo_kernels.__version__}"
    with tarfile.open(sdist) as archive:
        sources = {path.removeprefix(f"{name}/") for path in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "README.md", "csrc/module.cpp", "tests/conftest.py"} <= sources
    assert not [path for path in sources if path.startswith(("build", ".")) and path != ".gitignore"]
    assert not [path for path in sources if path.endswith(".so")]

    wheel = zipfile.ZipFile(wheel_of(sdist, tmp_path))
    names = set(wheel.namelist())
    package = {path for path in names if path.startswith("grpo_kernels/")}
    assert {path.split("/")[0] for path in names - package} == {f"{name}.dist-info"}
    assert f"{name}.dist-info/licenses/LICENSE" in names
    assert {f"grpo_kernels/{path}" for path in ("py.typed", "_cpu.pyi", "integrations/README.md")} <= package
    assert {path for path in package if path.endswith(".py")} == {
        path for path in sources if path.startswith("grpo_kernels/") and path.endswith(".py")
    }
    assert len([path for path in package if path.startswith("grpo_kernels/_cpu.") and path.endswith((".so", ".pyd"))]) == 1
    metadata = wheel.read(f"{name}.dist-info/METADATA").decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert [line.split()[1].split(">")[0] for line in required] == ["torch", "triton"]


@pytest.mark.slow
def test_without_a_compiler_it_installs_and_doctor_says_what_is_missing(sdist: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "bin"
    nothing.mkdir()
    assert not any(shutil.which(tool, path=str(nothing)) for tool in ("cc", "c++", "g++", "clang++", "cmake", "ninja"))
    # CMake looks into /usr/bin whatever PATH says, unless it is told which compiler to take.
    wheel = wheel_of(sdist, tmp_path / "wheel", PATH=str(nothing), CC=str(nothing / "cc"), CXX=str(nothing / "c++"))
    assert wheel.name.endswith("-py3-none-any.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert not [*site.rglob("*.so")]
    out = run(f"import grpo_kernels\nassert grpo_kernels.__file__.startswith({str(site)!r})\n{LOSS}", source=site)
    assert out.count("falls back to eager") == 1 and "doctor" in out
    out = run("from grpo_kernels.diagnosis import doctor\nprint('status', doctor.main(['--without-native']))", source=site)
    assert "cpu      not available: " in out and "C++17 compiler" in out and "status 1" in out


@pytest.mark.slow
def test_pip_install_and_then_the_commands_of_the_readme_in_the_same_folder(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    checkout = tmp_path / f"grpo_kernels-{grpo_kernels.__version__}"
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel_of(sdist, tmp_path / "wheel")).extractall(site)
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GRPO_KERNELS_", "PYTHON"))}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        python = [str(environment / "bin" / "python"), *arguments]
        return subprocess.run(python, env=clean, cwd=checkout, capture_output=True, text=True)

    done = command("-m", "grpo_kernels", "doctor", "--quick")
    assert done.returncode == 0 and f"(checkout, {checkout}" in done.stdout and str(site) in done.stdout, done.stdout
    assert "  cpu      ok: " in done.stdout and "missing" not in done.stdout
    with (checkout / "csrc" / "simd.h").open("a") as source:
        source.write("// changed\n")
    done = command("-m", "benchmarks", "--quick")
    assert done.returncode == 1 and "was built from other C++ sources" in done.stderr and done.stdout == ""
