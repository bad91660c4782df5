"""Reads rewards, lengths and weights into fp64 tensors, and refuses wrong types, shapes and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..checks import LARGEST, require_number, require_one_of
from ..layout import values_are_checked

Tensor = torch.Tensor


def as_rewards(name: str, rewards: Tensor | Sequence[Any]) -> Tensor:
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
    rewards: Tensor | Sequence[Any], missing: str = "raise", *, several: bool = False, name: str = "rewards"
) -> tuple[Tensor, Tensor]:
    """(rewards in fp64 with missing ones set to 0, a mask of those not missing); [B], or [B, K] of `several` functions."""
    rewards = as_rewards(name, rewards)
    if rewards.dim() != 1 + several:
        shape_needed = (
            "with reward_weights, one per completion and function, [B, K]" if several else "one number per completion, [B]"
        )
        hint = " (those of K functions, [B, K], go with reward_weights.)" if name == "rewards" and not several else ""
        raise ValueError(f"{name} has shape {list(rewards.shape)}: pass {shape_needed}.{hint}")
    check_choice("missing", missing, ("raise", "skip"))
    r = rewards.detach().to(torch.float64)
    if values_are_checked(r):
        bad = ~torch.isfinite(r) if missing == "raise" else torch.isinf(r)
        if bad.any():
            at = bad.nonzero()[0].tolist()
            value = float(r[tuple(at)])
            raise ValueError(f"{name}{at}={value} is not finite: give every completion a number, or leave it out.")
    if missing == "raise":
        return r, torch.ones_like(r, dtype=torch.bool)
    scored = ~torch.isnan(r)
    return torch.where(scored, r, 0.0), scored


def read_lengths(lengths: Tensor, n: int, device: torch.device) -> Tensor:
    """Tokens of each of n completions, fp64 [n]."""
    if not isinstance(lengths, Tensor) or lengths.shape != (n,) or lengths.is_complex():
        got = list(lengths.shape) if isinstance(lengths, Tensor) else type(lengths).__name__
        raise ValueError(f"lengths is {got}: pass the number of tokens of each completion, a tensor [{n}].")
    tokens = lengths.detach().to(device=device, dtype=torch.float64)
    if values_are_checked(tokens):
        bad = ~((tokens >= 0) & torch.isfinite(tokens))
        if bad.any():
            at = int(bad.nonzero()[0])
            raise ValueError(f"lengths[{at}]={float(tokens[at])}: a number of tokens is finite and >= 0.")
    return tokens


def read_weights(weights: Sequence[float] | Tensor, r: Tensor) -> Sequence[Tensor]:
    """K factors, 0-d fp64, for rewards [B, K]. Numbers stay on the CPU: sending them to a device would wait for it."""
    device = r.device if isinstance(weights, Tensor) else "cpu"
    factors = torch.as_tensor(weights, dtype=torch.float64, device=device).detach()
    if factors.shape != r.shape[1:] or not len(factors):
        raise ValueError(
            f"reward_weights has shape {list(factors.shape)}, but rewards has {list(r.shape)}: one for each function."
        )
    return factors.unbind()


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    require_one_of(name, value, choices)


def check_eps(eps: float) -> None:
    require_number("eps", eps, "it is added to a standard deviation and must be finite and >= 0.", 0, LARGEST)
