"""What importing costs, and what happens where Triton, the C++ module or a GPU is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import grpo_kernels
from grpo_kernels import backends

#: Makes `import NAME` fail as if it were not installed.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == m or name.startswith(m + ".") for m in {missing!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run(code: str, missing: tuple[str, ...] = (), source: Path | None = None, **environment: str) -> str:
    """What it prints, with the package from the folder `source` and no other; None: the one that this process has."""
    alone = [] if source is None else ["-S"]  # an editable install would come first
    source = source or Path(grpo_kernels.__file__).parent.parent
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRPO_KERNELS_")} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(source), *sys.path])
    command = [sys.executable, *alone, "-c", WITHOUT.format(missing=missing) + code]
    done = subprocess.run(command, env=env, cwd=source, capture_output=True, text=True)
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
    with pytest.raises(ValueError, match=r"backend='cuda'.*auto or one of eager, cpu, triton"):
        backends.pick("cuda", torch.device("cpu"))
    out = run(
        "import torch\nfrom grpo_kernels import backends\n"
        "for name in ('cpu', 'triton'):\n"
        "    try:\n        backends.pick(name, torch.device('cpu'))\n"
        "    except RuntimeError as e:\n        print(e)",
        missing=("triton", "grpo_kernels._cpu"),
    )
    assert out.count("cannot run: ") == 2 and "doctor" in out


# ---- archives

ROOT = Path(__file__).parent.parent


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
    out = run("from grpo_kernels import doctor\nprint('status', doctor.main([]))", source=site)
    assert "cpu      not available: " in out and "C++17 compiler" in out and "status 1" in out
