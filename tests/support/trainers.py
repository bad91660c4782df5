"""Shared by the tests of the adapters: trainers' modules, as stand-ins or from single files of a
trainer, data, and float64.

pip download --no-deps openrlhf==0.11.2 areal==1.0.4 skyrl==0.3.0 unsloth_zoo==2026.10.9       #
                                                                                               unpacked,
                                                                                               on
                                                                                               PYTHONPATH
"""

from __future__ import annotations

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
from torch import Tensor
from torch.testing import assert_close

from support import oracle

ROOTS = (
    "openrlhf",
    "areal",
    "slime",
    "prime_rl",
    "nemo_rl",
    "skyrl",
    "miles",
    "unsloth_made",
    "unsloth_zoo",
    "deepspeed",
)
V, H = 23, 16


def versions() -> dict[str, str]:
    """Of each trainer's package, the newest version that its adapter was tested with."""
    from grpo_kernels.integrations import adapters

    return {
        adapter.package: adapter.tested[-1] for adapter in adapters().values() if adapter.tested
    }


# ---- a batch


@dataclass(frozen=True, eq=False)
class Data:
    """[B, T] each: sequences of unequal length, one without tokens, one with a hole, one with
    advantage 0, one with both signs; ratios on both sides of the clip range, for tokens and for
    whole sequences, or (far) beyond the clamps of trainers.
    """

    logps: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    sampler: Tensor


def drawn(far: bool = False) -> Data:
    g, B, T = torch.Generator().manual_seed(7), 8, 12
    mask = torch.arange(T) < torch.tensor([12, 5, 9, 0, 12, 1, 8, 10])[:, None]
    mask[4, 3:5] = False
    logps = -0.02 - 4 * torch.rand((B, T), generator=g).square()
    shift = torch.tensor([0.3, -0.35, -0.24, 0.1, 0.5, 0.2, 0.05, 0.1])[:, None]
    old = (logps - shift - 0.25 * torch.randn(B, T, generator=g)).clamp(max=-0.01)
    if far:
        old[0, :6] = logps[0, :6] - torch.tensor([21.0, 0.0, 19.0, 0.0, 40.0, 0.0])
        logps[0, :6] -= torch.tensor([0.0, 21.0, 0.0, 19.0, 0.0, 60.0])
        old[1], old[2] = logps[1] - 11.0, logps[2] - 30.0
    advantages = torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, 0.6, 0.0, -0.4])[:, None] * (
        1 + 0.2 * torch.randn(B, T, generator=g)
    )
    advantages[7, ::3] *= -1
    weights = torch.exp(0.4 * torch.randn(B, T, generator=g)).clamp(max=1.5)
    weights[weights < 0.45] = 0.0
    ref, sampler = (
        logps + 0.4 * torch.randn(B, T, generator=g),
        old + 0.3 * torch.randn(B, T, generator=g),
    )
    return Data(logps, old, ref, advantages, mask, weights, sampler.clamp(max=-0.01))


DATA = drawn()
MASK, (B, T) = DATA.mask, DATA.mask.shape


# ---- trainers' modules


def stand_in(name: str, **contents: Any) -> ModuleType:
    """A module of this name in sys.modules, under as many packages as the name has."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            module = sys.modules[path] = ModuleType(path)
            module.__spec__, module.__path__ = (
                importlib.machinery.ModuleSpec(path, None, is_package=i < len(parts)),
                [],
            )
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]


def their_file(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    beside: ModuleType | None = None,
    **stubs: dict[str, Any],
) -> ModuleType:
    """Imports one file of an installed trainer under its name without running its packages'
    __init__ (or another file of the package that `beside` is of); skips if the file is not there.
    """
    root, *rest = name.split(".")
    if beside is not None:
        folder = Path(str(beside.__file__)).parents[beside.__name__.count(".") - 1]
    else:
        spec = importlib.util.find_spec(root) if root not in sys.modules else None
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{root} is not installed")
        folder = Path(spec.submodule_search_locations[0])
    path = folder.joinpath(*rest).with_suffix(".py")
    if not path.exists():
        pytest.skip(f"this {root} has no {path.name}")
    for stub, contents in stubs.items():
        stand_in(stub.replace("__", "."), **contents)
    module = stand_in(name)
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    monkeypatch.setattr(torch, "compile", lambda f=None, **_: f if f is not None else lambda g: g)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


@contextmanager
def without_trainers(*roots: str) -> Iterator[None]:
    """Hides the modules of trainers that are imported here; stand-ins for them go away
    afterwards.
    """

    def found() -> dict[str, ModuleType]:
        return {
            name: module for name, module in sys.modules.items() if name.partition(".")[0] in roots
        }

    own = found()
    for name in own:
        del sys.modules[name]
    yield
    for name in found():
        del sys.modules[name]
    sys.modules.update(own)


# ---- float64

log_softmax_of = oracle.log_probs


def entropy_of(logits: Tensor) -> Tensor:
    return log_softmax_of(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))[1]


def exact(
    spec: oracle.Spec,
    logps: Tensor,
    data: Data = DATA,
    entropy: Tensor | None = None,
    **fields: Any,
) -> oracle.Result:
    """The oracle's loss of log-probs [B, T]; `fields` are its own, in place of those of `data`."""
    given = {"advantages": data.advantages, "mask": data.mask, "old_logps": data.old} | fields
    flat = (torch.zeros_like(logps) if entropy is None else entropy).reshape(-1)
    return oracle.objective(
        spec, logps.reshape(-1), flat, oracle.sequences_of(logps, None), **given
    )


def value_and_gradient(
    f: Callable[..., Any], x: Tensor | list[Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """What `f` returns, its loss detached, and the gradient of that in float64; those of each where
    `x` is a list.
    """
    every = [x] if isinstance(x, Tensor) else x
    leaves = [y.detach().to(dtype, copy=True).requires_grad_() for y in every]
    result = f(*leaves)
    loss, *others = (result,) if isinstance(result, Tensor) else result
    gradients = [y.double() for y in torch.autograd.grad(loss, leaves)]
    return (loss.detach(), *others) if others else loss.detach(), (
        gradients[0] if isinstance(x, Tensor) else gradients
    )


def assert_same(got: Any, want: Any, rtol: float = 2e-5) -> None:
    """(loss, ...) and gradients, ours and theirs: the loss within roundings of its terms, which are
    of the gradients' size, and elements of gradients within roundings of sums whose terms are as
    large as their largest element.
    """
    ours, theirs = (x[0] if isinstance(x, tuple) else x for x in (got[0], want[0]))
    mine, expected = ([x] if isinstance(x, Tensor) else x for x in (got[1], want[1]))
    sizes = [float(x.abs().max()) for x in expected]
    assert max(sizes) > 0
    assert_close(ours.double(), theirs.double(), rtol=rtol, atol=rtol * min(max(sizes), 1.0))
    for a, b, size in zip(mine, expected, sizes, strict=True):
        assert_close(a, b, rtol=rtol, atol=rtol / 2 * size)


def values_and_slopes(
    f: Callable[..., Any], *leaves: Tensor, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """What `f` gives but for None, and the gradients of a weighted sum of it, in float64."""
    leaves = tuple(x.detach().to(dtype, copy=True).requires_grad_() for x in leaves)
    out = f(*leaves)
    found = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    loss = sum(
        (x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum()
        for x in found
        if x.requires_grad
    )
    return [x.detach().double() for x in (*found, *torch.autograd.grad(loss, leaves))]


def assert_scored(
    ours: Any, theirs: Any, *leaves: Tensor, dtype: torch.dtype = torch.float64, rtol: float = 2e-5
) -> None:
    """Our function in fp32, and what it has to give, in value and gradients."""
    found, wanted = (
        values_and_slopes(ours, *leaves),
        values_and_slopes(theirs, *leaves, dtype=dtype),
    )
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, rtol=rtol, atol=rtol * max(1e-3, float(b.abs().max())))


def same_metrics(got: Any, want: Any) -> None:
    """All that are wanted, by name, numbers or 0-d tensors; None is itself."""

    def of(named: Any, number: Callable[[float], Any]) -> dict[Any, Any]:
        return {name: None if named[name] is None else number(float(named[name])) for name in want}

    assert of(got, float) == of(want, lambda x: pytest.approx(x, rel=1e-4, abs=1e-5))


def refused(*calls: tuple[Callable[[], Any], str]) -> None:
    """Each call raises ValueError, with a message that matches."""
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


# ---- the losses that TRL and Liger name alike, and numbers for them that are no defaults

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
#: Of SAPO and VESPO, under the names that both have.
CONSTANTS = {
    "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.3, "vespo_k_pos": 1.8, "vespo_lambda_pos": 2.6, "vespo_k_neg": 2.7,
    "vespo_lambda_neg": 2.1,
}  # fmt: skip
