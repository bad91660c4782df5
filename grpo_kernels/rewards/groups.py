"""Check rewards of completions, and compute statistics of groups of completions.

A group is the set of completions of one prompt. Rewards are computed with in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

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

#: Smallest share of groups with one completion that causes a warning.
MANY_SINGLE = 0.25


def as_rewards(name: str, rewards: Any) -> Tensor:
    """Return rewards as a tensor: a tensor unchanged, a list or an array as fp64.

    Raises ValueError, which names the argument `name`, unless they are real numbers.
    """
    try:
        if isinstance(rewards, Tensor):
            tensor = rewards
        else:
            tensor = torch.as_tensor(rewards, dtype=torch.float64)
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
    """Return (rewards in fp64 with 0 for missing ones, bool mask of the rewards that are given).

    rewards           numbers [B] for B completions; if `several`, [B, K] for K reward functions
    missing_rewards   "skip": a NaN is a missing reward. "raise": a NaN is an error.
    several           whether there are several reward functions
    name              the argument that errors name

    Raises ValueError for another shape, and for values that are not finite (if
    `values_are_checked`).
    """
    rewards = as_rewards(name, rewards)
    num_dims = 2 if several else 1
    if rewards.dim() != num_dims:
        _refuse_shape(name, rewards, several)
    require_one_of("missing_rewards", missing_rewards, ("raise", "skip"))
    values = rewards.detach().double()
    if missing_rewards == "skip":
        missing = torch.isnan(values)
    else:
        missing = torch.zeros_like(values, dtype=torch.bool)
    values = torch.where(missing, 0.0, values)
    # Without "skip" this refuses NaN too.
    require_finite(name, values, "give every completion a finite number, or leave it out.")
    return values, ~missing


def _refuse_shape(name: str, rewards: Tensor, several: bool) -> NoReturn:
    """Raise ValueError that says which shape rewards must have.

    name      the argument, for the error
    rewards   what the caller passed
    several   whether there must be rewards of several functions, [B, K], and not [B]
    """
    if several:
        shape_needed = "with reward_weights, one per completion and function, [B, K]"
    else:
        shape_needed = "one number per completion, [B]"
    hint = ""
    if rewards.dim() == 2 and not several:
        rows, columns = rewards.shape
        hint = (
            f" If these are {rows} prompts with {columns} completions each, pass {name}.flatten()"
        )
        if name == "rewards":
            hint += (
                f" with group_size={columns}. If these are {rows} completions with {columns}"
                " reward functions, also pass reward_weights"
            )
        hint += "."
    raise ValueError(f"{name} has shape {list(rewards.shape)}: pass {shape_needed}.{hint}")


def require_finite(name: str, x: Tensor, remedy: str, low: float = -math.inf) -> None:
    """Raise ValueError, naming the first index, if a value is NaN, infinite or below `low`.

    name     the argument, for the error
    x        a float tensor
    remedy   what to pass instead, the end of the error

    Does nothing unless `values_are_checked`, because the host would wait for a GPU.
    """
    if values_are_checked(x):
        refuse_where(~(torch.isfinite(x) & (x >= low)), name, x, f": {remedy}")


def require_float(name: str, x: Any) -> Tensor:
    """Return x. Raises ValueError unless it is a floating-point tensor."""
    require_tensor(name, x, FLOATING, "a floating-point tensor")
    return x


def read_lengths(lengths: Tensor, num_completions: int, device: torch.device) -> Tensor:
    """Return the number of tokens of each completion on a device, fp64 [num_completions].

    lengths   what the caller passed as the argument `lengths`

    Raises ValueError for another shape or dtype, and for negative numbers (if
    `values_are_checked`).
    """
    remedy = f"the number of tokens of each completion, a tensor [{num_completions}]"
    require_tensor("lengths", lengths, FLOATING | INTEGRAL, remedy)
    expected_shape = torch.Size([num_completions])
    require_shape("lengths", lengths, expected_shape, "a tensor of one number a completion")
    num_tokens = lengths.detach().to(device=device, dtype=torch.float64)
    require_finite("lengths", num_tokens, "a number of tokens is finite and >= 0.", low=0.0)
    return num_tokens


def read_weights(weights: Sequence[float] | Tensor, rewards: Tensor) -> Sequence[Tensor]:
    """Return the weights of K reward functions as 0-d fp64 tensors.

    rewards   [B, K]

    A list stays on the CPU, because a copy to a GPU would make the host wait. PyTorch multiplies
    0-d CPU tensors with GPU tensors. Raises ValueError unless there are K weights.
    """
    device = rewards.device if isinstance(weights, Tensor) else "cpu"
    factors = torch.as_tensor(weights, dtype=torch.float64, device=device).detach()
    if factors.shape != rewards.shape[1:] or not len(factors):
        raise ValueError(
            f"reward_weights has shape {list(factors.shape)}, but rewards has"
            f" {list(rewards.shape)}: one for each function."
        )
    return factors.unbind()


def weighted_sum(columns: Sequence[Tensor], factors: Sequence[Any]) -> Tensor:
    """Return the sum of factors[k] * columns[k] over k.

    The terms are added one by one, so that equal rows have exactly equal sums. A matrix product may
    add different rows in different orders.
    """
    return sum(factor * column for column, factor in zip(columns, factors, strict=True))


# ---- groups


class Groups:
    """Sums and maxima within groups of values.

    Each method takes values [n], and returns for each of them the result of its group, [n].

    ids   int64 [n]: values with equal ids are a group, in any order. None: all values of a tensor
          of any shape are one group, and results are 0-d.

    Sums have a fixed order and use no atomics. Memory is allocated for n groups, so that the host
    does not wait for their number.
    """

    def __init__(self, ids: Tensor | None = None) -> None:
        """Sort the values by group.

        ids   int64 [n]: values with equal ids are a group. None: all values are one group.
        """
        #: int64 [n], indices that sort values by group; None if there is only one group.
        self.order = None
        if ids is not None:
            self.order = torch.argsort(ids, stable=True)
            sorted_ids = ids[self.order]
            # Number the groups from 0: the number rises where the id changes.
            sorted_groups = (sorted_ids.diff(prepend=sorted_ids[:1]) != 0).cumsum(0)
            #: int64 [n], the number of the group of each value.
            self.group = sorted_groups[torch.argsort(self.order)]
            numbers = torch.arange(len(ids) + 1, device=ids.device)
            #: int64 [n + 1], the first position of each group in the sorted values.
            self.offsets = torch.searchsorted(sorted_groups, numbers)

    def _reduce(self, reduction: str, values: Tensor) -> Tensor:
        """Return the sum or maximum of the group of each value, [n].

        reduction   "sum" or "max"
        values      [n]
        """
        # Sorted by group. Group g has the elements offsets[g] to offsets[g + 1] - 1.
        sorted_values = values[self.order]
        results = torch.segment_reduce(sorted_values, reduction, offsets=self.offsets, unsafe=True)
        return results[self.group]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the group of each value."""
        return values.sum() if self.order is None else self._reduce("sum", values)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of the group of each value, -inf without values."""
        if self.order is not None:
            return self._reduce("max", values)
        return values.amax() if values.numel() else values.new_full((), -math.inf)

    def max_of_others(self, values: Tensor) -> Tensor:
        """Return for each value the largest of the other values of its group, -inf if none."""
        best = self.max(values)
        is_best = values == best
        second = self.max(torch.where(is_best, -math.inf, values))
        # If several values are the best, the largest of the others is the best too.
        is_only_best = is_best & (self.sum(is_best.double()) == 1)
        return torch.where(is_only_best, second, best)


class GroupStatistics:
    """Statistics of groups of values, over the values that count.

    groups    the groups of the values
    values    fp64 [n], 0 where they do not count
    counted   bool [n]: the values that count, such as the rewards that are not missing

    Each statistic has one entry for each value, computed over its group, or is 0-d if all values
    are one group:

    size              number of values that count
    mean              their mean, 0 if there are none
    lowest, highest   their extremes, inf and -inf if there are none
    equal             whether they are all equal, True if there are none
    centred           value - mean for each value that counts, else 0. Exactly 0 if all values of
                      the group are equal: their rounded mean may differ from them.
    """

    def __init__(self, groups: Groups, values: Tensor, counted: Tensor) -> None:
        """Compute size, mean and extremes of each group, over the values that count.

        groups    the groups of the values
        values    fp64 [n], 0 where they do not count
        counted   bool [n]: the values that count
        """
        self.groups = groups
        self.values = values
        self.counted = counted
        self.size = groups.sum(counted.double())
        self.mean = groups.sum(values) / self.size.clamp(min=1.0)
        self.lowest = -groups.max(torch.where(counted, -values, -math.inf))
        self.highest = groups.max(torch.where(counted, values, -math.inf))
        self.equal = self.lowest >= self.highest
        # Exactly 0 in a group of equal values, whose rounded mean may differ from them.
        self.centred = torch.where(counted & ~self.equal, values - self.mean, 0.0)

    def variance(self, unbiased: bool) -> Tensor:
        """Return the variance: sum of centred^2, divided by n - 1 if `unbiased`, else by n."""
        squares = self.groups.sum(self.centred * self.centred)
        return squares / (self.size - int(unbiased)).clamp(min=1.0)

    def std(self, unbiased: bool) -> Tensor:
        """Return the square root of `variance`."""
        return self.variance(unbiased).sqrt()


def reward_statistics(
    rewards: object, group_size: int | None, groups: Tensor | None, missing_rewards: str = "raise"
) -> GroupStatistics:  # fmt: skip
    """Check rewards [B] and return the statistics of the groups of completions.

    rewards              numbers [B], as a tensor or a list
    group_size, groups   which completions share a prompt: consecutive runs of group_size, or those
                         with equal numbers in `groups`, integer [B]
    missing_rewards      "skip": a NaN is a missing reward. "raise": a NaN is an error.
    """
    r, scored = read_rewards(rewards, missing_rewards)
    ids = group_ids(len(r), r.device, group_size, groups)
    return GroupStatistics(Groups(ids), r, scored)


def group_ids(
    num_rewards: int, device: torch.device, group_size: int | None, groups: Tensor | None
) -> Tensor:
    """Return a number for each reward, equal for rewards of the same prompt, int64 [num_rewards].

    Exactly one of the last two arguments must be given.

    device       device of the result
    group_size   consecutive runs of so many rewards share a prompt
    groups       integer [num_rewards]: rewards with equal ids share a prompt

    Raises ValueError unless exactly one of the two is given and fits the number of rewards.
    """
    if (group_size is None) == (groups is None):
        raise ValueError(
            f"group_size={group_size} and groups={'None' if groups is None else 'given'}: pass"
            " exactly one of them."
        )
    if groups is not None:
        remedy = f"an integer tensor, one integer id per reward, [{num_rewards}]"
        require_tensor("groups", groups, INTEGRAL - {torch.bool}, remedy)
        expected_shape = torch.Size([num_rewards])
        require_shape("groups", groups, expected_shape, "a tensor of one number a completion")
        return groups.to(device=device, dtype=torch.int64)
    require_whole("group_size", group_size, "it must be a whole number of at least 1.")
    assert group_size is not None
    if num_rewards % group_size:
        raise ValueError(
            f"group_size={group_size} does not divide the {num_rewards} rewards: every prompt needs"
            " group_size completions."
        )
    return torch.arange(num_rewards, device=device) // group_size


def warn_of_single_completions(groups: Groups, group_size: int | None) -> None:
    """Warn once per process if at least MANY_SINGLE of the groups have one completion.

    Its reward equals the mean of its group, so its advantage is 0.

    group_size   completions of each group, None if groups differ. The groups are then counted only
                 if `values_are_checked`, because the host would wait for a GPU.
    """
    ids = groups.group
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
        "Sample several completions for each prompt (group_size=8). Or use another baseline (the"
        " estimators remax and gae), or none (singleton='raw', or baseline='none' with"
        " scale='none')."
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
