"""What the fuzz tests compare with float64: values, gradients of logits, of hidden states and of a head."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.fuzz_cases import DTYPES, ROUNDING, STRIDES, Built, Recipe, seen_through
from support.fuzz_sets import EPS

Tensor = torch.Tensor


def within(ours: Tensor, exact: Tensor, room: Tensor, what: str) -> None:
    """No further off than `room`; what a dtype cannot hold is compared at its end."""
    end = torch.finfo(ours.dtype).max
    got, want = ours.detach().double().clamp(-end, end), exact.reshape(ours.shape).clamp(-end, end)
    room = room.reshape(ours.shape)
    bad = ~((got - want).abs() <= room)
    assert not bad.any(), (
        f"{what}: {got[bad][:5].tolist()}, not {want[bad][:5].tolist()}, room {room[bad][:5].tolist()}, "
        f"at {bad.nonzero()[:5].tolist() if bad.dim() else ''}"
    )


def stored(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The error that storing the parts of a gradient, and then their sum, may add."""
    room = stored_once(torch.stack(parts).sum(0), dtype)
    return room if len(parts) == 1 else room + torch.stack([stored_once(part, dtype) for part in parts]).sum(0)


def stored_once(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The error that storing may add: half a unit in the last place (a whole one where Triton's interpreter, which truncates, makes
    bf16), and in fp16 half of the smallest step. The other dtypes may lose values below the normal range, before an upstream
    gradient of up to 1024."""
    truncated = dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"
    rounding = ROUNDING[dtype] * (2.0 if truncated else 1.01)
    return rounding * exact.abs() + (2.0**-25 if dtype == torch.float16 else 1024 * 1.2e-38)


def leaf_is_refused(recipe: Recipe, memory: Tensor, call: Callable[[Tensor], Any]) -> None:
    before = memory.detach().clone()
    with pytest.raises(ValueError, match="leaf that requires grad"):
        call(seen_through(recipe, memory))
    assert torch.equal(memory.view(torch.uint8), before.view(torch.uint8))


def check_masked(built: Built, gradient: Tensor) -> None:
    if built.trained is not None:
        assert (gradient[~built.trained] == 0).all(), "a masked row has a gradient"
    if built.poisoned is not None:
        assert (gradient[built.poisoned.view(gradient.shape)] == 0).all(), "a logit outside of its set has a gradient"
    if built.recipe.dtype != "float16":
        assert torch.isfinite(gradient).all(), "a gradient is not finite"


def projected(recipe: Recipe) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Leaves by name; their logits in float64, and how far products in fp32 may be from those, [.., 1]."""
    g = torch.Generator().manual_seed(recipe.seed + 2)
    dtype = DTYPES[recipe.dtype]
    lengths = recipe.lengths
    shape = (len(lengths), max(lengths, default=0)) if recipe.layout == "padded" else (sum(lengths),)
    hidden = torch.randn(*shape, recipe.width, generator=g).to(dtype)
    weight = (recipe.spread * recipe.width**-0.5 * torch.randn(recipe.vocab, recipe.width, generator=g)).to(dtype)
    weight = weight.to(torch.bfloat16) if recipe.narrow_head and dtype == torch.float32 else weight
    leaves = {"hidden": hidden, "weight": weight}
    exact, size = hidden.double() @ weight.double().T, hidden.double().abs() @ weight.double().abs().T
    if recipe.bias != "none":
        leaves["bias"] = torch.randn(recipe.vocab, generator=g).to(weight.dtype)
        exact, size = exact + leaves["bias"].double(), size + leaves["bias"].double().abs()
    return leaves, exact, 4 * EPS * size.amax(-1)


def spoiled(built: Built, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The leaves with NaN in all that nobody may read: hidden states of rows without a choice, the weight of ids outside of all
    sets, and what lies between the rows in memory."""
    hidden, weight = leaves["hidden"].clone(), leaves["weight"].clone()
    read = torch.ones(built.case.targets.shape, dtype=torch.bool) if built.trained is None else built.trained
    poisoned = built.poisoned
    if poisoned is not None:
        read = read & ~poisoned.all(1).view(read.shape)
        nobody = poisoned[read.reshape(-1)].all(0)
        weight[nobody] = torch.nan
    hidden[~read] = torch.nan
    strided = STRIDES[built.recipe.strides]
    spoiled = {**leaves, "hidden": strided(hidden), "weight": strided(weight)}
    if poisoned is not None and "bias" in leaves:
        spoiled["bias"] = torch.where(nobody, torch.nan, leaves["bias"])
    return spoiled


def check_leaves(
    recipe: Recipe, plain: dict[str, Tensor], leaves: dict[str, Tensor], parts: list[Tensor], room: Tensor, into: Tensor | None
) -> None:  # fmt: skip
    """Gradients of hidden states and head, from the parts [N, V] of that of the logits in float64."""
    # A gradient of the logits may be rounded to bf16 before the products.
    for part in parts:
        room = room + (2.0**-8 if recipe.dtype == "bfloat16" else 4 * EPS) * part.abs()
    flat_hidden, weight = plain["hidden"].double().reshape(len(room), recipe.width), plain["weight"].double()
    results = {
        "hidden": ([G @ weight for G in parts], room @ weight.abs()),
        "weight": ([G.T @ flat_hidden for G in parts], room.T @ flat_hidden.abs()),
        "bias": ([G.sum(0) for G in parts], room.sum(0)),
    }
    for name, leaf in leaves.items():
        wants, space = results[name]
        want, gradient = torch.stack(wants).sum(0), leaf.grad
        if name == "weight" and into is not None:
            assert gradient is None, "beside weight_grad, the weight has a gradient"
            gradient = into
        assert gradient is not None
        # Parts of a gradient are added in fp32, but to memory of 16 bits, where each sum of some rows is rounded.
        rounded = stored_once(want, gradient.dtype)
        if gradient is into:
            rounded = rounded + stored_once(torch.stack([G.abs().T @ flat_hidden.abs() for G in parts]).sum(0), gradient.dtype)
        room_of = space + 2 * len(parts) * EPS * torch.stack(wants).abs().sum(0) + 2 * rounded
        within(gradient, want, room_of, f"gradient of {name}")
