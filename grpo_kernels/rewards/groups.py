"""Groups of rewards that share a prompt: sums, extremes, means and deviations of each."""

from __future__ import annotations

import math

import torch

from ..checks import require_whole, warn_once
from ..layout import values_are_checked
from .tensors import Tensor, read_rewards


class Groups:
    """Reductions over members with equal ids, each member receiving its group's value: [n] -> [n]. Without ids all are one group,
    of any shape, and its value is 0-d.

    Sums have a fixed order and use no atomics. Memory is allocated for n groups, so that the host need not wait for their
    number."""

    def __init__(self, ids: Tensor | None = None) -> None:
        self.order = None
        if ids is not None:
            self.order = torch.argsort(ids, stable=True)
            ranked = ids[self.order]
            first = torch.zeros_like(ranked)
            first[1:] = ranked[1:] != ranked[:-1]
            group = first.cumsum(0)
            self.group = group[torch.argsort(self.order)]
            self.offsets = torch.searchsorted(group, torch.arange(len(ids) + 1, device=ids.device))

    def _reduce(self, how: str, values: Tensor) -> Tensor:
        return torch.segment_reduce(values[self.order], how, offsets=self.offsets, unsafe=True)[self.group]

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
    """Values in groups, of which those that are `counted` have a part in means and deviations; the others are 0. Attributes are
    those of each member's group; of a group without any, lowest and highest are inf and -inf."""

    def __init__(self, within: Groups, values: Tensor, counted: Tensor) -> None:
        self.within, self.values, self.counted = within, values, counted
        self.size = within.sum(counted.double())
        self.mean = within.sum(values) / self.size.clamp(min=1.0)
        self.lowest = -within.max(torch.where(counted, -values, -math.inf))
        self.highest = within.max(torch.where(counted, values, -math.inf))
        self.equal = self.lowest >= self.highest
        #: Exactly 0 where all values of the group are equal: their rounded mean need not be.
        self.centred = torch.where(counted & ~self.equal, values - self.mean, 0.0)

    def variance(self, unbiased: bool) -> Tensor:
        """`unbiased`: divided by n - 1, not by n."""
        return self.within.sum(self.centred * self.centred) / (self.size - int(unbiased)).clamp(min=1.0)

    def std(self, unbiased: bool) -> Tensor:
        return self.variance(unbiased).sqrt()


def grouped(rewards: object, group_size: int | None, groups: Tensor | None, missing: str = "raise") -> Grouped:
    """The rewards [B] of completions, read and in the groups of their prompts."""
    r, scored = read_rewards(rewards, missing)
    return Grouped(Groups(group_ids(len(r), r.device, group_size, groups)), r, scored)


def group_ids(n: int, device: torch.device, group_size: int | None, groups: Tensor | None) -> Tensor:
    """int64 [n]: equal where two of n rewards share a prompt."""
    if (group_size is None) == (groups is None):
        raise ValueError(
            f"group_size={group_size} and groups={'None' if groups is None else 'given'}: pass exactly one of them."
        )
    if groups is not None:
        if not isinstance(groups, Tensor):
            raise ValueError(f"groups is a {type(groups).__name__}: pass an integer tensor, one id per reward, [{n}].")
        if groups.shape != (n,) or groups.is_floating_point() or groups.dtype == torch.bool:
            raise ValueError(
                f"groups has shape {list(groups.shape)} and dtype {groups.dtype}: pass one integer id per reward, [{n}]."
            )
        return groups.to(device=device, dtype=torch.int64)
    require_whole("group_size", group_size, "it must be a whole number of at least 1.")
    assert group_size is not None
    if n % group_size:
        raise ValueError(f"group_size={group_size} does not divide the {n} rewards: every prompt needs group_size completions.")
    return torch.arange(n, device=device) // group_size


def warn_of_single_completions(within: Groups, group_size: int | None) -> None:
    """Warn once where every group has one member, so that a baseline of the group leaves nothing. Ids are only read where
    `values_are_checked`."""
    ids = within.group
    alone = group_size == 1 if group_size is not None else values_are_checked(ids) and ids.unique().numel() == ids.numel()
    if alone and len(ids):
        warn_once(
            f"all advantages are 0, and nothing is learned from them: each of the {ids.numel()} groups has one completion. Sample "
            "several completions for each prompt (group_size=8); or take a baseline from elsewhere (the estimators remax and gae), "
            "or none (singleton='raw', or baseline='none' with scale='none')."
        )
