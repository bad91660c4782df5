"""Groups of rewards that share a prompt, and reductions over them."""

from __future__ import annotations

import math

import torch

from ..checks import require_whole, warn_once
from ..layout import values_are_checked

Tensor = torch.Tensor


class Groups:
    """Reductions over members with equal ids, each member receiving its group's value: [n] -> [n].

    Sums have a fixed order and use no atomics. Memory is allocated for n groups, so that the host need not wait for their
    number."""

    def __init__(self, ids: Tensor) -> None:
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
        return self._reduce("sum", values)

    def max(self, values: Tensor) -> Tensor:
        return self._reduce("max", values)

    def extremes(self, values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest of the group's values that are counted; inf and -inf where none is."""
        return -self.max(torch.where(counted, -values, -math.inf)), self.max(torch.where(counted, values, -math.inf))

    def max_of_others(self, values: Tensor) -> Tensor:
        """The largest value of the group's other members; -inf where there is none."""
        best = self.max(values)
        is_best = values == best
        second = self.max(torch.where(is_best, -math.inf, values))
        return torch.where(is_best & (self.sum(is_best.double()) == 1), second, best)


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


def warn_of_single_completions(ids: Tensor, group_size: int | None) -> None:
    """Warn once where every group of `ids` [n] has one member, so that a baseline of the group leaves nothing. Ids are only read
    where `values_are_checked`."""
    alone = group_size == 1 if group_size is not None else values_are_checked(ids) and ids.unique().numel() == ids.numel()
    if alone:
        warn_once(
            f"all advantages are 0, and nothing is learned from them: each of the {ids.numel()} groups has one completion. Sample "
            "several completions for each prompt (group_size=8); or take a baseline from elsewhere (the estimators remax and gae), "
            "or none (singleton='raw', or baseline='none' with scale='none')."
        )
