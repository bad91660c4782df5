"""The build for the Hugging Face `kernels` library, loaded by that library if it is installed, else in the same way."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_kernel import build

import grpo_kernels

Tensor = torch.Tensor


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Two versions, in a repository each."""
    yield [build(tmp_path_factory.mktemp(f"v{version}"), version, ["cpu"])[0] for version in (1, 2)]
    for name in [name for name in sys.modules if name.startswith("grpo_kernels_cpu_v")]:
        del sys.modules[name]


def metadata(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metadata.json").read_text())


def loaded(folder: Path) -> Any:
    """By the library; without it, as its loader does: by the file of the build, under its id."""
    try:
        from kernels import get_local_kernel
    except ImportError:
        name = metadata(folder)["id"]
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
            assert spec is not None and spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]
    return get_local_kernel(folder.parents[1], backend="cpu")


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 5, 8, generator=g, requires_grad=True), torch.randn(23, 8, generator=g, requires_grad=True)
    return hidden, weight, torch.randint(23, (2, 5), generator=g), torch.tensor([1.0, -0.5])


@pytest.mark.filterwarnings("ignore:grpo_kernels falls back to eager PyTorch.*a build for the Hub has none")
def test_two_versions_in_one_process(builds: list[Path]) -> None:
    """Values, gradients and operators of their own, beside the installed package."""
    one, two = (loaded(folder) for folder in builds)
    names = [metadata(folder)["id"] for folder in builds]
    assert [one.__name__, two.__name__] == names and one.TokenBatch is not two.TokenBatch is not grpo_kernels.TokenBatch
    hidden, weight, targets, advantages = operands()
    logps = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(-1, targets[..., None])[..., 0]
    wanted = -(logps - logps.detach()).exp() * advantages[:, None]
    slopes = torch.autograd.grad(wanted.mean(), (hidden, weight))
    for kernel in (one, two):
        out = kernel.linear_grpo_loss(
            hidden, weight, kernel.TokenBatch(targets, advantages), kernel.Objective.preset("dapo", beta=0.0)
        )
        torch.testing.assert_close(torch.autograd.grad(out.loss, (hidden, weight)), slopes, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(out.logps, logps.float(), rtol=1e-5, atol=1e-5)
        ops = importlib.import_module(f"{kernel.__name__}._ops")
        assert ops.add_op_namespace_prefix("stats") == f"{kernel.__name__}::stats" and ops.ops is getattr(
            torch.ops, kernel.__name__
        )
        assert callable(ops.ops.linear_stats)
    assert one.operators.NAMESPACE != two.operators.NAMESPACE != "grpo_kernels"


@pytest.mark.filterwarnings("ignore:grpo_kernels falls back to eager PyTorch")
def test_layers_take_the_place_of_a_forward(builds: list[Path]) -> None:
    """Stateless, as the library asks, and with the weight of the module that they are put into."""
    layers = loaded(builds[0]).layers
    hidden, weight, targets, _ = operands()

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = torch.nn.Parameter(weight.detach()), None

        def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
            return torch.log_softmax(hidden @ self.weight.T, -1).gather(-1, targets[..., None])[..., 0]

    head = Head()
    want = head(hidden, targets)
    for layer in (layers.LinearLogProbs, layers.LinearGRPOLoss):
        others = {name for name in dir(layer)} - {name for name in dir(torch.nn.Module)}
        assert layer.__init__ is torch.nn.Module.__init__ and others == {"has_backward", "can_torch_compile"}
    try:
        from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
    except ImportError:
        head.forward = layers.LinearLogProbs.forward.__get__(head)  # type: ignore[method-assign]
    else:
        replace_kernel_forward_from_hub(Head, "Head")
        repository = LocalLayerRepository(repo_path=builds[0].parents[1], layer_name="LinearLogProbs")
        with use_kernel_mapping({"Head": {"cpu": repository}}):
            kernelize(head, mode=Mode.TRAINING, device="cpu")
    found = head(hidden, targets)
    assert type(found.grad_fn) is not type(want.grad_fn)
    torch.testing.assert_close(found, want)
    slopes = [torch.autograd.grad(x.sum(), head.weight)[0] for x in (found, want)]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)


def test_nothing_inside_is_imported_by_its_absolute_name(builds: list[Path]) -> None:
    files = [*builds[0].rglob("*.py")]
    assert len(files) > 60
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not [name for name in names if name.partition(".")[0] == "grpo_kernels"], path


def test_digests_are_those_of_the_files(builds: list[Path]) -> None:
    """By the library's own, where it is installed. A rebuild gives the same; another version another id."""
    told = metadata(builds[0])
    files = {str(f.relative_to(builds[0])): f for f in builds[0].rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    del files["metadata.json"]
    found = {name: base64.b64encode(hashlib.sha256(f.read_bytes()).digest()).decode() for name, f in files.items()}
    assert told["digest"] == {"algorithm": "sha256", "files": found}
    again = metadata(build(builds[0].parents[2] / "again", 1, ["cpu"])[0])
    assert again == told and metadata(builds[1])["id"] != told["id"] and told["id"].isidentifier()
    try:
        from kernels._rust import Metadata
    except ImportError:
        return
    assert Metadata.read_from_file(builds[0] / "metadata.json").digest.files == found
