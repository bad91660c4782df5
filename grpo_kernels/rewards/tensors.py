"""Reads rewards, lengths and weights into fp64 tensors, and refuses wrong types, shapes and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..checks import require_one_of
from ..layout import values_are_checked

Tensor = torch.Tensor


def as_rewards(name: str, rewards: Any) -> Tensor:
    """Rewards as a tensor, of a list or an array those of its numbers. Raises ValueError where they are no real numbers."""
    try:
        tensor = rewards if isinstance(rewards, Tensor) else torch.as_tensor(rewards, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or tensor.is_complex():
        got = type(rewards).__name__ if tensor is None else tensor.dtype
        raise ValueError(f"{name} is {got}: pass numbers, a tensor or a list, one per completion, [B].")
    return tensor


def read_rewards(
    rewards: Any, missing: str = "raise", *, several: bool = False, name: str = "rewards"
) -> tuple[Tensor, Tensor]:
    """(rewards in fp64 with missing ones set to 0, a mask of those not missing); [B], or [B, K] of `several` functions."""
    rewards = as_rewards(name, rewards)
    if rewards.dim() != 1 + several:
        shape_needed = (
            "with reward_weights, one per completion and function, [B, K]" if several else "one number per completion, [B]"
        )
        hint = " (those of K functions, [B, K], go with reward_weights.)" if name == "rewards" and not several else ""
        raise ValueError(f"{name} has shape {list(rewards.shape)}: pass {shape_needed}.{hint}")
    require_one_of("missing", missing, ("raise", "skip"))
    r = rewards.detach().to(torch.float64)
    missed = torch.isnan(r) if missing == "skip" else torch.zeros_like(r, dtype=torch.bool)
    r = torch.where(missed, 0.0, r)
    return finite(name, r, "give every completion a finite number, or leave it out."), ~missed


def finite(name: str, x: Tensor, remedy: str, low: float = -math.inf) -> Tensor:
    """x, whose first value that is NaN, infinite or below `low` is refused where `values_are_checked`."""
    if values_are_checked(x):
        bad = ~(torch.isfinite(x) & (x >= low))
        if bad.any():
            at = bad.nonzero()[0].tolist()
            raise ValueError(f"{name}{at}={float(x[tuple(at)])}: {remedy}")
    return x


def float_tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"{name} is {x.dtype if isinstance(x, Tensor) else type(x).__name__}: pass a floating-point tensor.")
    return x


def read_lengths(lengths: Tensor, n: int, device: torch.device) -> Tensor:
    """Tokens of each of n completions, fp64 [n]."""
    if not isinstance(lengths, Tensor) or lengths.shape != (n,) or lengths.is_complex():
        got = list(lengths.shape) if isinstance(lengths, Tensor) else type(lengths).__name__
        raise ValueError(f"lengths is {got}: pass the number of tokens of each completion, a tensor [{n}].")
    tokens = lengths.detach().to(device=device, dtype=torch.float64)
    return finite("lengths", tokens, "a number of tokens is finite and >= 0.", low=0.0)


def read_weights(weights: Sequence[float] | Tensor, r: Tensor) -> Sequence[Tensor]:
    """K factors, 0-d fp64, for rewards [B, K]. Numbers stay on the CPU: sending them to a device would wait for it."""
    device = r.device if isinstance(weights, Tensor) else "cpu"
    factors = torch.as_tensor(weights, dtype=torch.float64, device=device).detach()
    if factors.shape != r.shape[1:] or not len(factors):
        raise ValueError(
            f"reward_weights has shape {list(factors.shape)}, but rewards has {list(r.shape)}: one for each function."
        )
    return factors.unbind()


def weighted_sum(columns: Sequence[Tensor], factors: Sequence[Any]) -> Tensor:
    """Adds the terms one by one, so that equal rows have exactly equal sums. A matrix product may add different rows in
    different orders."""
    total = torch.zeros_like(columns[0])
    for column, factor in zip(columns, factors, strict=True):
        total = total + factor * column
    return total
