"""Shared by the tests of the adapters: trainers' modules, as stand-ins or from single files of a trainer, data, and comparisons.

pip download --no-deps openrlhf==0.11.2 areal==1.0.4 skyrl==0.3.0 unsloth_zoo==2026.10.9       # unpacked, on PYTHONPATH
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Tensor = torch.Tensor

B, T, V, H = 5, 7, 23, 16
MASK = torch.arange(T) < torch.tensor([7, 3, 0, 5, 6])[:, None]
MASK[0, 2] = False

#: Of each trainer's package, the version that its adapter was tested with.
VERSIONS = {
    "openrlhf": "0.11.2", "areal": "1.0.4", "slime": "0.3.1", "prime-rl": "0.8.0", "skyrl": "0.3.0", "unsloth_zoo": "2026.10.9",
    "miles": "0.1.0", "verl": "0.9.1",
}  # fmt: skip
ROOTS = ("openrlhf", "areal", "slime", "prime_rl", "nemo_rl", "skyrl", "miles", "unsloth_made", "unsloth_zoo", "deepspeed")


@dataclass(frozen=True, eq=False)
class Data:
    """fp32 [B, T] each, and a mask."""

    logps: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    sampler: Tensor | None = None
    mask: Tensor | None = None
    weights: Tensor | None = None


def drawn() -> Data:
    g = torch.Generator().manual_seed(5)
    logps = -0.02 - 4 * torch.rand(B, T, generator=g).square()
    shift = torch.tensor([0.3, -0.35, 0.1, 0.6, -0.3])[:, None]
    old = (logps - shift - 0.3 * torch.randn(B, T, generator=g)).clamp(max=-0.01)
    sampler = (old + 0.3 * torch.randn(B, T, generator=g)).clamp(max=-0.01)
    advantages = torch.tensor([1.2, 0.8, 0.5, -1.1, -0.7])[:, None] * (1 + 0.2 * torch.randn(B, T, generator=g))
    return Data(logps, old, logps + 0.4 * torch.randn(B, T, generator=g), advantages, sampler)


DATA = drawn()


# ---- trainers' modules


def stand_in(name: str, **contents: Any) -> ModuleType:
    """A module of this name in sys.modules, under as many packages as the name has."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=i < len(parts))
            module.__path__ = []
            sys.modules[path] = module
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]


def their_file(name: str, monkeypatch: pytest.MonkeyPatch, **stubs: dict[str, Any]) -> ModuleType:
    """Imports one file of an installed trainer under its name without running its packages' __init__; skips if the file is not
    there."""
    root = name.split(".")[0]
    spec = importlib.util.find_spec(root) if root not in sys.modules else None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{root} is not installed")
    path = Path(spec.submodule_search_locations[0]).joinpath(*name.split(".")[1:]).with_suffix(".py")
    if not path.exists():
        pytest.skip(f"this {root} has no {path.name}")
    for stub, contents in stubs.items():
        stand_in(stub.replace("__", "."), **contents)
    module = stand_in(name)
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    monkeypatch.setattr(torch, "compile", lambda f=None, **_: f if f is not None else lambda g: g)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


def their_file_beside(name: str, loaded: ModuleType) -> ModuleType:
    """Another file of the same package."""
    module = stand_in(name)
    root = Path(str(loaded.__file__)).parents[loaded.__name__.count(".") - 1]
    path = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


# ---- transcriptions, float64


def mean_of(x: Tensor, mask: Tensor = MASK) -> Tensor:
    return (x * mask).sum() / mask.sum()


def clipped(r: Tensor, A: Tensor, low: float, high: float, c: float | None = None) -> tuple[Tensor, Tensor]:
    """PPO's clip with dual clip, and the tokens at which the bound holds."""
    bounded = r.clamp(1 - low, 1 + high)
    loss = torch.maximum(-r * A, -bounded * A)
    if c is not None:
        loss = torch.where(A < 0, torch.minimum(loss, -c * A), loss)
    return loss, -bounded * A > -r * A


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with fp32 results, as a trainer's own are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return tuple(x if x is None else x.float() for x in out) if isinstance(out, tuple) else out.float()

    return functools.wraps(function)(call)


@contextmanager
def without_trainers(*roots: str) -> Iterator[None]:
    """Hides the modules of trainers that are imported here; stand-ins for them go away afterwards."""

    def found() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in roots}

    own = found()
    for name in own:
        del sys.modules[name]
    yield
    for name in found():
        del sys.modules[name]
    sys.modules.update(own)


def log_softmax_of(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels, entropies, in float64."""
    p = torch.log_softmax(logits.double() / temperature, -1)
    return p.gather(-1, labels[..., None])[..., 0], -(p.exp() * p).sum(-1)


def value_and_gradient(f: Callable[[Tensor], Any], x: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor]:
    x = x.detach().to(dtype, copy=True).requires_grad_()
    result = f(x)
    loss = result if isinstance(result, Tensor) else result[0]
    return result, torch.autograd.grad(loss, x)[0].double()


def assert_same(got: Any, want: Any) -> None:
    """(loss, ...) and gradient, ours and theirs."""
    (ours, gradient), (theirs, expected) = got, want
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
    torch.testing.assert_close(ours[0].detach().double(), theirs[0].detach().double(), rtol=1e-5, atol=1e-6)
    scale = float(expected.abs().max())
    assert scale > 0
    torch.testing.assert_close(gradient, expected, rtol=2e-5, atol=2e-6 * scale)


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in tensors)
