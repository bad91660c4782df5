"""What is installed, and what runs of it: imports, machines without Triton and C++, a checkout over
an installed copy, the wheel; the backend that a call names, `grpo_kernels.use`, the environment,
and DTensors as their local parts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import grpo_kernels
from grpo_kernels import (
    Head,
    Objective,
    Options,
    TokenBatch,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from support.bits import same_bits
from support.inside import backends_that_run, native, only_eager
from support.processes import WITHOUT

ROOT, PYTHON = Path(__file__).parents[2], sys.executable
MODULE, NAME = f"_cpu{EXTENSION_SUFFIXES[0]}", f"grpo_kernels-{grpo_kernels.__version__}"
Done = subprocess.CompletedProcess[str]


def python(*arguments, source=None, site=None, **environment):
    """Python in the folder `source`, with the package from there and no other (None: the one that
    this process has). `site` stands for site-packages.
    """
    alone = [] if source is None else ["-S"]  # an editable install would come first
    source = source or Path(grpo_kernels.__file__).parent.parent
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRPO_KERNELS_")} | environment
    env["PYTHONPATH"] = os.pathsep.join(
        [str(source), *([] if site is None else [str(site)]), *sys.path]
    )
    return subprocess.run(
        [PYTHON, *alone, *arguments], env=env, cwd=source, capture_output=True, text=True
    )


def run(code, missing=(), **options):
    """What it prints where `missing` cannot be imported; `options` are those of `python`."""
    done = python("-c", WITHOUT.format(missing=missing) + code, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_pulls_in_nothing_optional():
    """What torch itself imports is not ours to avoid."""
    optional = {
        "triton",
        "transformers",
        "trl",
        "liger_kernel",
        "matplotlib",
        "datasets",
        "tqdm",
        "numpy",
    }
    code = (
        "import torch\nbefore = set(sys.modules)\nimport grpo_kernels\nprint(*set(sys.modules) -"
        " before)"
    )
    assert not optional & {*run(code).split()}


def test_names_that_are_elsewhere():
    """The message has the import that works, for `from grpo_kernels import ...` too."""
    for name, module in grpo_kernels._ELSEWHERE.items():
        with pytest.raises(
            ImportError, match=f"Did you mean: from grpo_kernels.{module} import {name}$"
        ):
            exec(f"from grpo_kernels import {name}")
        assert (
            not (ROOT / "grpo_kernels" / f"{name}.py").exists() and name not in grpo_kernels.__all__
        )
        home = ROOT / "grpo_kernels" / f"{module.replace('.', '/')}.py"
        assert re.search(
            rf"^(def|class) {name}\b|__all__ = [^\]]*\"{name}\"", home.read_text(), re.MULTILINE
        ), name
    with pytest.raises(
        AttributeError, match=r"no attribute 'TokenBatchs'. Did you mean TokenBatch\?"
    ):
        grpo_kernels.TokenBatchs  # noqa: B018
    assert not hasattr(grpo_kernels, "nothing")
    with pytest.raises(ImportError, match=r"no GRPOTrainer. Did you mean FusedGRPOTrainer\?"):
        from grpo_kernels.integrations.trl import GRPOTrainer  # noqa: F401


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


def test_without_triton_and_without_the_cpp_module():
    """Eager runs, with one warning. A backend that was asked for, and strict mode, are errors."""
    first, *refused = run(LOSS + REFUSED, missing=("triton", "grpo_kernels._cpu")).splitlines()
    assert first.count("falls back to eager") == 1 and "doctor" in first
    said = "\n".join(refused)
    assert said.count("cannot run: ") == 2 and said.count("doctor") == 3 and "strict" in said


# ---- a checkout that hides the installed package: `pip install .`, then Python in the same folder


@pytest.fixture
def checkout(tmp_path):
    """This one, without a compiled module."""
    folder = tmp_path / "checkout"
    for name in ("grpo_kernels", "csrc"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    shutil.copy(ROOT / "CMakeLists.txt", folder)
    return folder


@pytest.fixture
def site(tmp_path):
    """The compiled module of this process as an installed copy has it."""
    try:
        module = Path(str(native.load().__file__))
    except ImportError as error:
        pytest.skip(str(error))
    if native.built_from(module) != native.source_digest():
        pytest.skip("the compiled module is out of date")
    package = tmp_path / "site" / "grpo_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the checkout hides this')")
    shutil.copy(module, package / MODULE)
    describe(package.parent, grpo_kernels.__version__)
    return package.parent


def describe(site, version):
    about = site / "grpo_kernels.dist-info" / "METADATA"
    about.parent.mkdir(exist_ok=True)
    about.write_text(f"Metadata-Version: 2.1\nName: grpo_kernels\nVersion: {version}\n")


WHICH = f"{LOSS}\nprint(getattr(sys.modules.get('grpo_kernels._cpu'), '__file__', None))"
DOCTOR = "from grpo_kernels.diagnosis import doctor\nprint('exit status', doctor.main([]))"


def change(path):
    return lambda checkout, site: (
        (checkout / path).write_text((checkout / path).read_text() + "\n") and None
    )


#: What makes the installed module another's -> what is said of it.
SPOILT = {
    "sources": (change("csrc/simd.h"), "was built from other C++ sources"),
    "version": (lambda checkout, site: describe(site, "0.0.1"), "is version 0.0.1 and this is"),
}


def test_a_checkout_runs_the_compiled_module_that_was_installed_from_it(checkout, site):
    assert run(WHICH, source=checkout, site=site).splitlines() == [
        "[]",
        str(site / "grpo_kernels" / MODULE),
    ]


@pytest.mark.parametrize("what", SPOILT)
def test_a_checkout_never_runs_another_builds_module_and_says_what_to_do(what, checkout, site):
    spoil, reason = SPOILT[what]
    spoil(checkout, site)
    doctor = DOCTOR if what == "sources" else "print()"
    warned, module, *said = run(f"{WHICH}\n{doctor}", source=checkout, site=site).splitlines()
    assert module == "None" and warned.count("falls back to eager") == 1
    assert (
        f"the installed copy in {site / 'grpo_kernels'} {reason}" in warned
        and f"-e {checkout}`" in warned
    )
    if doctor is DOCTOR:
        report = "\n".join(said)
        assert said[-1] == "exit status 1" and reason in report and f"-e {checkout}" in report
        assert "nothing was tested" in report and "float64" not in report


# ---- archives


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run(
        [PYTHON, "-m", "build", "--sdist", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (archive,) = folder.glob("*.tar.gz")
    return archive


def wheel_of(sdist, folder, **environment):
    command = [
        PYTHON,
        "-m",
        "pip",
        "wheel",
        "--verbose",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(sdist),
    ]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = folder.glob("*.whl")
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    return wheel


@pytest.mark.slow
def test_archives_hold_what_they_should(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        sources = {path.removeprefix(f"{NAME}/") for path in archive.getnames()}
    assert {
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "csrc/module.cpp",
        "tests/conftest.py",
    } <= sources
    assert not [
        path
        for path in sources
        if (path.startswith(("build", ".")) and path != ".gitignore") or path.endswith(".so")
    ]
    wheel = zipfile.ZipFile(wheel_of(sdist, tmp_path))
    names = set(wheel.namelist())
    package = {path for path in names if path.startswith("grpo_kernels/")}
    assert {path.split("/")[0] for path in names - package} == {f"{NAME}.dist-info"}
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert {
        f"grpo_kernels/{path}" for path in ("py.typed", "_cpu.pyi", "integrations/README.md")
    } <= package
    of_python = {
        path for path in sources if path.startswith("grpo_kernels/") and path.endswith(".py")
    }
    assert {path for path in package if path.endswith(".py")} == of_python
    assert (
        len(
            [
                path
                for path in package
                if path.startswith("grpo_kernels/_cpu.") and path.endswith((".so", ".pyd"))
            ]
        )
        == 1
    )
    lines = wheel.read(f"{NAME}.dist-info/METADATA").decode().splitlines()
    required = [
        line.split()[1].split(">")[0]
        for line in lines
        if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert required == ["torch", "triton"]


@pytest.mark.slow
def test_without_a_compiler_it_installs_and_doctor_says_what_is_missing(sdist, tmp_path):
    """CMake looks into /usr/bin whatever PATH says, unless it is told which compiler to take."""
    nothing, site = tmp_path / "bin", tmp_path / "site"
    nothing.mkdir()
    wheel = wheel_of(
        sdist,
        tmp_path / "wheel",
        PATH=str(nothing),
        CC=str(nothing / "cc"),
        CXX=str(nothing / "c++"),
    )
    assert wheel.name.endswith("-py3-none-any.whl")
    said = (wheel.parent / "output.txt").read_text()
    assert "Installed without the C++ module" in said and "`python -m grpo_kernels doctor`" in said
    zipfile.ZipFile(wheel).extractall(site)
    assert not [*site.rglob("*.so")]
    out = run(
        f"import grpo_kernels\nassert grpo_kernels.__file__.startswith({str(site)!r})\n{LOSS}",
        source=site,
    )
    assert out.count("falls back to eager") == 1 and "doctor" in out
    out = run(
        "from grpo_kernels.diagnosis import doctor\nprint('status',"
        " doctor.main(['--without-native']))",
        source=site,
    )
    assert "cpu      not available: " in out and "C++17 compiler" in out and "status 1" in out


# ---- where a call runs


IDS = torch.arange(12).view(3, 4)
LOGITS, HIDDEN, WEIGHT, BIAS = (
    torch.randn(3, 4, 13),
    torch.randn(3, 4, 8),
    torch.randn(13, 8),
    torch.randn(13),
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("BACKEND", "STRICT"):
        monkeypatch.delenv(f"GRPO_KERNELS_{name}", raising=False)


@pytest.fixture
def ran(monkeypatch):
    return backends_that_run(monkeypatch)


def call(**options):
    return token_logprobs(LOGITS, IDS, options=Options(**options)).logps


def test_a_block_says_what_runs_and_blocks_nest(ran):
    """A call's own choice goes first; a block ends with an error, and holds in its own thread."""
    call()
    with grpo_kernels.use(backend="eager"):
        call()
        with grpo_kernels.use(backend="cpu"):
            call()
            with grpo_kernels.use(strict=True):
                call()
        call()
        call(backend="cpu")
        other = threading.Thread(target=call)
        other.start()
        other.join()
    with pytest.raises(ZeroDivisionError), grpo_kernels.use(backend="eager"):
        1 / 0  # noqa: B018
    call()
    assert ran == ["cpu", "eager", "cpu", "cpu", "eager", "cpu", "cpu", "cpu"]


def test_the_environment_says_it_too_and_a_block_goes_first(ran, monkeypatch):
    monkeypatch.setenv("GRPO_KERNELS_BACKEND", "eager")
    call()
    with grpo_kernels.use(backend="auto"):
        call()
    monkeypatch.setenv("GRPO_KERNELS_BACKEND", "egaer")
    with pytest.raises(
        ValueError, match=r"backend='egaer': it must be one of auto, eager, cpu, triton"
    ):
        call()
    assert ran == ["eager", "cpu"]


def test_a_backend_that_is_asked_for_never_falls_back():
    """RuntimeError, because the input is right and the machine is not; with the reason and the way
    out.
    """
    with pytest.raises(RuntimeError, match=r'backend="triton" cannot run: .*backend="auto"'):
        call(backend="triton")


def test_a_fallback_warns_once_and_is_an_error_in_strict_mode(monkeypatch):
    only_eager(monkeypatch, "a made-up reason")
    with pytest.warns(RuntimeWarning, match="a made-up reason") as caught:
        first = call(backend="auto")
        call(backend="auto")
    assert (
        len(caught) == 1
        and caught[0].filename == __file__
        and torch.equal(first, call(backend="eager"))
    )
    with pytest.raises(RuntimeError, match="a made-up reason"):
        call(strict=True)
    monkeypatch.setenv("GRPO_KERNELS_STRICT", "1")
    with pytest.raises(RuntimeError, match="strict"):
        call()
    with grpo_kernels.use(strict=False):
        call()
        for strict in (call, lambda: call(strict=True)):
            with (
                grpo_kernels.use(strict=strict is call),
                pytest.raises(RuntimeError, match="a made-up reason"),
            ):
                strict()


# ---- DTensors


def value(hidden, weight, bias):
    """Of both functions from hidden states."""
    head = Head(weight, bias)
    loss = linear_grpo_loss(hidden, head, TokenBatch(IDS, torch.ones(3)), Objective()).loss
    return loss + linear_logprobs(hidden, head, IDS)[0].square().sum()


def test_replicated_dtensors_are_taken_as_their_local_tensors(mesh, backend):
    """Plain, one of them or all: the same values, and gradients of the kind of their tensor."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    def gradients(*distributed):
        leaves = [x.clone() for x in (HIDDEN, WEIGHT, BIAS)]
        for i in distributed:
            leaves[i] = distribute_tensor(leaves[i], mesh, [Replicate()])
        leaves = [x.requires_grad_() for x in leaves]
        with grpo_kernels.use(backend=backend):
            value(*leaves).backward()
        assert all(isinstance(x.grad, DTensor) == (i in distributed) for i, x in enumerate(leaves))
        return [x.grad.full_tensor() if i in distributed else x.grad for i, x in enumerate(leaves)]

    expected = gradients()
    for distributed in ((0,), (1, 2), (0, 1, 2)):
        assert all(map(same_bits, gradients(*distributed), expected)) and all(
            x.any() for x in expected
        ), distributed


def test_sharded_dtensors_are_refused_and_the_remedy_works(mesh):
    """With a gradient that lands in the shards."""
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    weight = distribute_tensor(WEIGHT.clone(), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(
        ValueError,
        match=(
            r"weight is a DTensor.*Shard\(dim=0\).*full_tensor\(grad_placements=\[Partial\(\)\]\)"
        ),
    ):
        value(HIDDEN, weight, BIAS)
    value(HIDDEN, weight.full_tensor(grad_placements=[Partial()]), BIAS).backward()
    assert (
        weight.grad is not None
        and weight.grad.placements == (Shard(0),)
        and weight.grad.to_local().any()
    )
