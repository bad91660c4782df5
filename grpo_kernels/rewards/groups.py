"""Rewards of completions as fp64 tensors, without wrong types, shapes and values, and the groups of
those that share a prompt: sums, extremes, means and deviations of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import (
    FLOATING,
    INTEGRAL,
    refuse_where,
    require_one_of,
    require_shape,
    require_tensor,
    require_whole,
    values_are_checked,
    warn_once,
)

#: From this share of groups with one completion on there is a warning.
MANY_SINGLE = 0.25


def as_rewards(name: str, rewards: Any) -> Tensor:
    """Rewards as a tensor, of a list or an array those of its numbers.

    Raises ValueError where they are no real numbers.
    """
    try:
        tensor = (
            rewards
            if isinstance(rewards, Tensor)
            else torch.as_tensor(rewards, dtype=torch.float64)
        )
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or tensor.is_complex():
        got = type(rewards).__name__ if tensor is None else tensor.dtype
        raise ValueError(
            f"{name} is {got}: pass numbers, a tensor or a list, one per completion, [B]."
        )
    return tensor


def read_rewards(
    rewards: Any, missing_rewards: str = "raise", *, several: bool = False, name: str = "rewards"
) -> tuple[Tensor, Tensor]:
    """(rewards in fp64 with missing ones set to 0, a mask of those not missing); [B], or [B, K] of
    `several` functions.
    """
    rewards = as_rewards(name, rewards)
    if rewards.dim() != 1 + several:
        shape_needed = (
            "with reward_weights, one per completion and function, [B, K]"
            if several
            else "one number per completion, [B]"
        )
        hint = ""
        if rewards.dim() == 2 and not several:
            rows, columns = rewards.shape
            hint = (
                f" If these are {rows} prompts with {columns} completions each, pass"
                f" {name}.flatten()"
            )
            if name == "rewards":
                hint += (
                    f" with group_size={columns}. If these are {rows} completions with {columns}"
                    " reward functions, also pass reward_weights"
                )
            hint += "."
        raise ValueError(f"{name} has shape {list(rewards.shape)}: pass {shape_needed}.{hint}")
    require_one_of("missing_rewards", missing_rewards, ("raise", "skip"))
    r = rewards.detach().double()
    missed = torch.isnan(r) if missing_rewards == "skip" else torch.zeros_like(r, dtype=torch.bool)
    r = torch.where(missed, 0.0, r)
    return finite(name, r, "give every completion a finite number, or leave it out."), ~missed


def finite(name: str, x: Tensor, remedy: str, low: float = -math.inf) -> Tensor:
    """x, whose first value that is NaN, infinite or below `low` is refused where
    `values_are_checked`.
    """
    if values_are_checked(x):
        refuse_where(~(torch.isfinite(x) & (x >= low)), name, x, f": {remedy}")
    return x


def float_tensor(name: str, x: Any) -> Tensor:
    require_tensor(name, x, FLOATING, "a floating-point tensor")
    return x


def read_lengths(lengths: Tensor, n: int, device: torch.device) -> Tensor:
    """Tokens of each of n completions, fp64 [n]."""
    require_tensor(
        "lengths",
        lengths,
        FLOATING | INTEGRAL,
        f"the number of tokens of each completion, a tensor [{n}]",
    )
    require_shape("lengths", lengths, torch.Size([n]), "a tensor of one number a completion")
    tokens = lengths.detach().to(device=device, dtype=torch.float64)
    return finite("lengths", tokens, "a number of tokens is finite and >= 0.", low=0.0)


def read_weights(weights: Sequence[float] | Tensor, r: Tensor) -> Sequence[Tensor]:
    """K factors, 0-d fp64, for rewards [B, K].

    Numbers stay on the CPU: sending them to a device would wait for it.
    """
    device = r.device if isinstance(weights, Tensor) else "cpu"
    factors = torch.as_tensor(weights, dtype=torch.float64, device=device).detach()
    if factors.shape != r.shape[1:] or not len(factors):
        raise ValueError(
            f"reward_weights has shape {list(factors.shape)}, but rewards has {list(r.shape)}: one"
            " for each function."
        )
    return factors.unbind()


def weighted_sum(columns: Sequence[Tensor], factors: Sequence[Any]) -> Tensor:
    """Adds the terms one by one, so that equal rows have exactly equal sums. A matrix product may
    add different rows in different orders.
    """
    return sum(factor * column for column, factor in zip(columns, factors, strict=True))


# ---- groups


class Groups:
    """Reductions over members with equal ids, each member receiving its group's value: [n] -> [n].
    Without ids all are one group, of any shape, and its value is 0-d.

    Sums have a fixed order and use no atomics. Memory is allocated for n groups, so that the host
    need not wait for their number.
    """

    def __init__(self, ids: Tensor | None = None) -> None:
        self.order = None
        if ids is not None:
            self.order = torch.argsort(ids, stable=True)
            ranked = ids[self.order]
            group = (ranked.diff(prepend=ranked[:1]) != 0).cumsum(0)
            self.group = group[torch.argsort(self.order)]
            self.offsets = torch.searchsorted(group, torch.arange(len(ids) + 1, device=ids.device))

    def _reduce(self, how: str, values: Tensor) -> Tensor:
        return torch.segment_reduce(values[self.order], how, offsets=self.offsets, unsafe=True)[
            self.group
        ]

    def sum(self, values: Tensor) -> Tensor:
        return values.sum() if self.order is None else self._reduce("sum", values)

    def max(self, values: Tensor) -> Tensor:
        if self.order is not None:
            return self._reduce("max", values)
        return values.amax() if values.numel() else values.new_full((), -math.inf)

    def max_of_others(self, values: Tensor) -> Tensor:
        """The largest value of the group's other members; -inf where there is none."""
        best = self.max(values)
        is_best = values == best
        second = self.max(torch.where(is_best, -math.inf, values))
        return torch.where(is_best & (self.sum(is_best.double()) == 1), second, best)


class Grouped:
    """Values in groups, of which those that are `counted` have a part in means and deviations; the
    others are 0. Attributes are those of each member's group; of a group without any, lowest and
    highest are inf and -inf.
    """

    def __init__(self, within: Groups, values: Tensor, counted: Tensor) -> None:
        self.within = within
        self.values = values
        self.counted = counted
        self.size = within.sum(counted.double())
        self.mean = within.sum(values) / self.size.clamp(min=1.0)
        self.lowest = -within.max(torch.where(counted, -values, -math.inf))
        self.highest = within.max(torch.where(counted, values, -math.inf))
        self.equal = self.lowest >= self.highest
        #: Exactly 0 where all values of the group are equal: their rounded mean need not be.
        self.centred = torch.where(counted & ~self.equal, values - self.mean, 0.0)

    def variance(self, unbiased: bool) -> Tensor:
        """`unbiased`: divided by n - 1, not by n."""
        return self.within.sum(self.centred * self.centred) / (self.size - int(unbiased)).clamp(
            min=1.0
        )

    def std(self, unbiased: bool) -> Tensor:
        return self.variance(unbiased).sqrt()


def grouped(
    rewards: object, group_size: int | None, groups: Tensor | None, missing_rewards: str = "raise"
) -> Grouped:  # fmt: skip
    """The rewards [B] of completions, read and in the groups of their prompts."""
    r, scored = read_rewards(rewards, missing_rewards)
    return Grouped(Groups(group_ids(len(r), r.device, group_size, groups)), r, scored)


def group_ids(
    n: int, device: torch.device, group_size: int | None, groups: Tensor | None
) -> Tensor:
    """int64 [n]: equal where two of n rewards share a prompt."""
    if (group_size is None) == (groups is None):
        raise ValueError(
            f"group_size={group_size} and groups={'None' if groups is None else 'given'}: pass"
            " exactly one of them."
        )
    if groups is not None:
        require_tensor(
            "groups",
            groups,
            INTEGRAL - {torch.bool},
            f"an integer tensor, one integer id per reward, [{n}]",
        )
        require_shape("groups", groups, torch.Size([n]), "a tensor of one number a completion")
        return groups.to(device=device, dtype=torch.int64)
    require_whole("group_size", group_size, "it must be a whole number of at least 1.")
    assert group_size is not None
    if n % group_size:
        raise ValueError(
            f"group_size={group_size} does not divide the {n} rewards: every prompt needs"
            " group_size completions."
        )
    return torch.arange(n, device=device) // group_size


def warn_of_single_completions(within: Groups, group_size: int | None) -> None:
    """Warn once per process if at least MANY_SINGLE of the groups have one member, whose advantage
    over its group's mean is 0.

    Group ids are read only if `values_are_checked`, because reading them on a GPU waits for it.
    """
    ids = within.group
    if group_size is not None:
        num_groups = ids.numel() // group_size
        num_single = num_groups if group_size == 1 else 0
    elif values_are_checked(ids):
        sizes = ids.unique(return_counts=True)[1]
        num_groups = sizes.numel()
        num_single = int((sizes == 1).sum())
    else:
        return
    if num_single == 0 or num_single < MANY_SINGLE * num_groups:
        return
    remedy = (
        "Sample several completions for each prompt (group_size=8); or take a baseline from"
        " elsewhere (the estimators remax and gae), or none (singleton='raw', or baseline='none'"
        " with scale='none')."
    )
    if num_single == num_groups:
        warn_once(
            f"all advantages are 0, and nothing is learned from them: each of the {num_groups}"
            f" groups has one completion. {remedy}",
            key="all groups have one completion",
        )
    else:
        warn_once(
            f"{num_single} of the {num_groups} groups have one completion: their advantages are 0,"
            " and nothing is learned from "
            'them. This is said once per process; group_metrics reports the share as "single".'
            f" {remedy}",
            key="many groups have one completion",
        )
