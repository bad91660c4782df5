"""Advantages from rewards: normalisation within groups of completions of the same prompt, and estimators built on it.

Everything is computed in fp64, in a fixed order, and returned as fp32. Per-token estimators are in `returns`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import LARGEST, SMALLEST, require, require_number
from .groups import Groups, group_ids, warn_of_single_completions
from .tensors import check_choice, check_eps, read_lengths, read_rewards, read_weights

Tensor = torch.Tensor

BASELINES = ("mean", "leave-one-out", "length", "none")
SCALES = ("group", "batch", "none", "mean", "others")
COMBINATIONS = ("sum", "gdpo")

#: `group_advantages(rewards, group_size=8, **NUMERICS["verl"])` has the numbers of that trainer's group normalisation;
#: {**NUMERICS["verl"], "baseline": "leave-one-out", "scale": "none"} is its RLOO. One difference remains: equal rewards give
#: exactly 0 here. In the trainers they give the rounding error of their mean divided by eps (an advantage of up to 1 at eps=1e-9).
NUMERICS: dict[str, dict[str, Any]] = {
    "trl": {"eps": 1e-4, "missing": "skip"},
    "verl": {"eps": 1e-6, "singleton": "raw"},
    "skyrl": {"eps": 1e-6, "singleton": "raw"},
    "slime": {"eps": 1e-6},
    "openrlhf": {"eps": 1e-9},
    "nemo-rl": {"eps": 1e-6, "baseline": "leave-one-out", "scale": "others"},
    "prime-rl": {"scale": "none"},
    "areal": {"eps": 1e-5},
    "torchtitan": {"eps": 1e-6, "unbiased": False},
}


def group_advantages(
    rewards: Tensor | Sequence[Any],
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    baseline: str = "mean",
    scale: str = "group",
    unbiased: bool = True,
    eps: float = 1e-4,
    lengths: Tensor | None = None,
    reward_weights: Sequence[float] | Tensor | None = None,
    combine: str = "sum",
    missing: str = "raise",
    singleton: str = "zero",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A = (reward - baseline) / (scale + eps), computed in fp64, returned as `dtype` [B].

    rewards      numbers, a tensor of any dtype or a list: [B], or [B, K] for K reward functions with their `reward_weights`.
    group_size   G: consecutive runs of G rewards share a prompt; must divide B. Or
    groups       integer [B]: rewards with equal ids share a prompt (any sizes, any order).
    baseline     "mean" of the group. "leave-one-out": mean of the others (RLOO, arXiv 2402.14740, with scale="none").
                 "length": mean weighted by `lengths` (OPO, arXiv 2505.23585). "none": 0, with scale="none".
    scale        "group": std of the group (GRPO, arXiv 2402.03300). "batch": std of all rewards (arXiv 2508.08221).
                 "none": no division (Dr. GRPO, arXiv 2503.20783). "mean": the group's mean, A = 0 where it is not above 0
                 (MaxRL, arXiv 2602.02710, which has eps=0). "others": std of the group's other rewards, no division where
                 those are equal (NeMo-RL).
    unbiased     True: std divides by n - 1 (TRL, verl, slime); False: by n. A group of one has std 0.
    eps          added to the scale: 1e-4 in TRL, 1e-6 in verl. See NUMERICS for those of nine trainers.
    lengths      number [B] >= 0 for baseline="length": tokens of each completion. A group without tokens gets 0.
    reward_weights   K numbers, of the reward functions of rewards [B, K].
    combine      "sum": of the weighted rewards, then as above. "gdpo": as above for each function, then the weighted sum,
                 then (A - its mean) / (its std + eps) over the batch (arXiv 2601.05242).
    missing      "raise" on a NaN. "skip": a completion without any reward counts in no mean or std and gets 0 (TRL);
                 of several rewards, those that are NaN are left out.
    singleton    what a group with one reward gets: "zero", or "raw": baseline 0 and a group scale of 1 (verl, SkyRL). Where all
                 groups have one member and get zeros, a warning says so once.

    Equal rewards in a group (max == min) give exactly 0, except with baseline="none" or singleton="raw". In fp32 the mean of equal
    rewards may differ from them by rounding; divided by eps this would be a meaningless advantage of up to 1e-3 (0.1 at eps=1e-6).
    Kernels can skip rows whose advantage is exactly 0.

    Raises ValueError, naming the index, for NaN or infinite rewards (where `values_are_checked`), for group sizes that do not
    divide B, and for arguments that exclude each other.
    """
    check_choice("baseline", baseline, BASELINES)
    check_choice("scale", scale, SCALES)
    check_choice("combine", combine, COMBINATIONS)
    check_choice("singleton", singleton, ("zero", "raw"))
    require(baseline != "none" or scale == "none", "scale", scale, "without a baseline it must be 'none'; see returns.whiten.")
    require(combine == "sum" or reward_weights is not None, "combine", combine, "it takes rewards [B, K] and reward_weights.")
    check_eps(eps)
    r, scored = read_rewards(rewards, missing, several=reward_weights is not None)
    n = len(r)
    given = "None" if lengths is None else "given"
    require((lengths is None) == (baseline != "length"), "lengths", given, "baseline='length' takes it, no other does.")
    tokens = None if lengths is None else read_lengths(lengths, n, r.device)
    factors = [] if reward_weights is None else read_weights(reward_weights, r)
    ids = group_ids(n, r.device, group_size, groups)
    if n == 0:
        return torch.zeros(0, dtype=dtype, device=r.device)
    if baseline != "none" and singleton == "zero":
        warn_of_single_completions(ids, group_size)
    within = Groups(ids)

    normalised = _Normalisation(within, tokens, baseline, scale, eps, unbiased, singleton)
    if r.dim() == 1:
        return normalised(r, scored)[0].to(dtype)
    if combine == "sum":
        return normalised(_weighted_sum(r.unbind(1), factors), scored.any(1))[0].to(dtype)
    parts, zeros = zip(*map(normalised, r.unbind(1), scored.unbind(1)), strict=True)
    total = _weighted_sum(parts, factors)
    mean, std = _mean_and_std(total, scored.any(1), unbiased)
    return torch.where(torch.stack(zeros).all(0), 0.0, (total - mean) / (std + eps)).to(dtype)


@dataclass(frozen=True, eq=False)
class _Normalisation:
    """The normalisation of `group_advantages` for the rewards [B] of one function. Its fields are arguments of
    `group_advantages`."""

    within: Groups
    tokens: Tensor | None
    baseline: str
    scale: str
    eps: float
    unbiased: bool
    singleton: str

    def __call__(self, r: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
        """(advantages [B], where they are set to exactly 0)."""
        within, scale = self.within, self.scale
        size = within.sum(scored.double())
        mean = within.sum(r) / size.clamp(min=1.0)
        lowest, highest = within.extremes(r, scored)
        zero = ~scored if self.baseline == "none" else ~scored | (highest == lowest)
        centred = torch.where(zero, 0.0, r - mean)
        advantages, untold = self._above_baseline(r, scored, centred, size)
        zero = zero | untold | (mean <= 0) if scale == "mean" else zero | untold
        divided = self._divided(advantages, r, scored, centred, size, mean)
        if self.singleton == "raw":
            alone = scored & (size == 1)
            zero = zero & ~alone
            divided = torch.where(alone, r if scale in ("none", "batch") else r / (1.0 + self.eps), divided)
        if scale == "batch":
            divided = divided / (_mean_and_std(r, scored, self.unbiased)[1] + self.eps)
        return torch.where(zero, 0.0, divided), zero

    def _above_baseline(self, r: Tensor, scored: Tensor, centred: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """(rewards minus the baseline [B], where there is no baseline)."""
        nowhere = torch.zeros_like(scored)
        if self.baseline == "none":
            return r, nowhere
        if self.baseline == "leave-one-out":
            return centred * size / (size - 1.0).clamp(min=1.0), nowhere
        if self.tokens is None:
            return centred, nowhere
        counted = torch.where(scored, self.tokens, 0.0)
        total = self.within.sum(counted)
        return centred - self.within.sum(counted * centred) / total, total == 0

    def _divided(self, advantages: Tensor, r: Tensor, scored: Tensor, centred: Tensor, size: Tensor, mean: Tensor) -> Tensor:
        """Advantages divided by the scale of their group."""
        if self.scale == "group":
            squares = self.within.sum(centred * centred)
            return advantages / ((squares / (size - int(self.unbiased)).clamp(min=1.0)).sqrt() + self.eps)
        if self.scale == "mean":
            return advantages / (mean + self.eps)
        if self.scale == "others":
            std, equal = _std_of_others(self.within, r, scored, centred, size, self.unbiased)
            return torch.where(equal, advantages, advantages / (std + self.eps))
        return advantages


def pass_at_k_advantages(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    scale: str = "group",
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """The best of a group gets (its reward - the second best) / (std + eps), all others 0: fp32 [B] (arXiv 2503.19595).

    Arguments as in `group_advantages`, scale "group" or "none". Two that share the best reward get 0, and so does a group
    of one (verl raises). Raises ValueError as `group_advantages` does."""
    check_choice("scale", scale, ("group", "none"))
    check_eps(eps)
    r, _ = read_rewards(rewards)
    ids = group_ids(len(r), r.device, group_size, groups)
    if len(r) == 0:
        return torch.zeros(0, device=r.device, dtype=torch.float32)
    warn_of_single_completions(ids, group_size)
    within = Groups(ids)
    size = within.sum(torch.ones_like(r))
    second = within.max_of_others(r)
    lead = torch.where((r > second) & (size > 1), r - second, 0.0)
    if scale == "group":
        centred = r - within.sum(r) / size
        lead = lead / ((within.sum(centred * centred) / (size - int(unbiased)).clamp(min=1.0)).sqrt() + eps)
    return torch.where(lead > 0, lead, 0.0).to(torch.float32)


def greedy_baseline_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """reward - reward of the same prompt's greedy completion: fp32 [B] (ReMax, arXiv 2310.10505).

    rewards and greedy_rewards [B], finite; for G completions a prompt pass `greedy.repeat_interleave(G)`. With per-token
    rewards the same baseline is taken from `discounted_returns`. Raises ValueError for other shapes and values."""
    r, _ = read_rewards(rewards)
    greedy, _ = read_rewards(greedy_rewards, name="greedy_rewards")
    if r.shape != greedy.shape:
        raise ValueError(f"greedy_rewards has shape {list(greedy.shape)}, but rewards has {list(r.shape)}: give one for each.")
    return (r - greedy.to(r.device)).to(torch.float32)


def gpg_scale(rewards: Tensor, *, group_size: int | None = None, groups: Tensor | None = None) -> Tensor:
    """GPG's factor, a 0-d fp32 tensor: B / max(number of samples that count, 1) (arXiv 2504.02546).

    Without group_size and groups (as in `zero_variance`), samples with a reward other than 0 count (verl). With one of them,
    samples of groups whose rewards differ count: those that have a gradient. verl's GPG is gpg_scale(r) * group_advantages(r,
    ..., scale="none", singleton="raw")."""
    if group_size is None and groups is None:
        r, _ = read_rewards(rewards)
        counts = r != 0
    else:
        counts = ~zero_variance(rewards, group_size=group_size, groups=groups)
    return (counts.numel() / counts.sum().clamp(min=1).double()).to(torch.float32)


def a2po_values(rewards: Tensor, *, group_size: int | None = None, groups: Tensor | None = None, beta: float = 0.5) -> Tensor:
    """V* = beta log mean exp(reward / beta) over the group, for each of its members: fp32 [B] (A*-PO, arXiv 2505.20686).

    beta > 0 (TRL's beta1). A small one approaches the best reward, a large one the mean. Raises ValueError as
    `group_advantages` does."""
    require_number("beta", beta, "it divides the rewards and must be a finite number above 0.", SMALLEST, LARGEST)
    r, _ = read_rewards(rewards)
    ids = group_ids(len(r), r.device, group_size, groups)
    if len(r) == 0:
        return torch.zeros(0, device=r.device, dtype=torch.float32)
    within = Groups(ids)
    best = within.max(r)
    mean = within.sum(torch.exp((r - best) / beta)) / within.sum(torch.ones_like(r))
    return (best + beta * mean.log()).to(torch.float32)


def zero_variance(rewards: Tensor, *, group_size: int | None = None, groups: Tensor | None = None) -> Tensor:
    """bool [B]: True where all rewards of the group are exactly equal (max == min), so that the group gives no gradient.

    NaN counts as not scored; a group with no reward at all is True. Raises ValueError as `group_advantages` does."""
    r, scored = read_rewards(rewards, "skip")
    ids = group_ids(len(r), r.device, group_size, groups)
    if len(r) == 0:
        return torch.zeros(0, dtype=torch.bool, device=r.device)
    lowest, highest = Groups(ids).extremes(r, scored)
    return highest <= lowest


def group_metrics(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    extremes: tuple[float, float] = (0.0, 1.0),
) -> dict[str, Tensor]:
    """Statistics of the groups of a batch from its rewards [B]: 0-d fp32 tensors, left on the device.

    zero_variance   share of the groups whose rewards are all equal, exactly
    all_wrong       share of the groups with no reward above extremes[0]; all_correct: with none below extremes[1]
    reward_mean, reward_std   over the batch, the std with n - 1
    group_std       mean of the groups' std, with n - 1 (a group of one has 0)
    missing         share of the completions without a reward (NaN), which count nowhere else

    A group without any reward is left out. Raises ValueError as `group_advantages` does."""
    low, high = extremes
    r, scored = read_rewards(rewards, "skip")
    ids = group_ids(len(r), r.device, group_size, groups)
    names = ("zero_variance", "all_wrong", "all_correct", "reward_mean", "reward_std", "group_std", "missing")
    if len(r) == 0:
        return {name: torch.zeros((), device=r.device, dtype=torch.float32) for name in names}
    within = Groups(ids)
    size = within.sum(scored.double())
    lowest, highest = within.extremes(r, scored)
    centred = torch.where(scored & (highest > lowest), r - within.sum(r) / size, 0.0)
    std = (within.sum(centred * centred) / (size - 1.0).clamp(min=1.0)).sqrt()
    # Each completion stands for 1/size of its group, so a sum over completions counts groups.
    share = torch.where(scored, 1.0 / size, 0.0)
    count = share.sum().clamp(min=1.0)

    def over_groups(values: Tensor) -> Tensor:
        return (share * values).sum() / count

    shares = (over_groups((highest == lowest).double()), over_groups((highest <= low).double()))
    values = (*shares, over_groups((lowest >= high).double()), *_mean_and_std(r, scored, True), over_groups(std))
    return {name: v.to(torch.float32) for name, v in zip(names, (*values, (~scored).double().mean()), strict=True)}


# ---- pieces


def _weighted_sum(columns: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """Adds the terms one by one, so that equal rows have exactly equal sums. A matrix product may add different rows in
    different orders."""
    total = torch.zeros_like(columns[0])
    for column, factor in zip(columns, factors, strict=True):
        total = total + factor * column
    return total


def _mean_and_std(values: Tensor, counted: Tensor, unbiased: bool) -> tuple[Tensor, Tensor]:
    """0-d mean and std of the values that are counted."""
    n = counted.sum()
    mean = torch.where(counted, values, 0.0).sum() / n.clamp(min=1)
    centred = torch.where(counted, values - mean, 0.0)
    return mean, ((centred * centred).sum() / (n - int(unbiased)).clamp(min=1)).sqrt()


def _std_of_others(
    within: Groups, r: Tensor, scored: Tensor, centred: Tensor, size: Tensor, unbiased: bool
) -> tuple[Tensor, Tensor]:
    """([B] std of the group's other scored rewards, where those are exactly equal or fewer than 2).

    Leaving out r subtracts n/(n-1) (r - mean)^2 from the sum of squares. For the r furthest from the mean this subtraction cancels,
    so the sum over the other rewards is computed directly. The second result is needed because rounding may give equal rewards a
    std other than 0."""
    highest = within.max_of_others(torch.where(scored, r, -math.inf))
    lowest = -within.max_of_others(torch.where(scored, -r, -math.inf))
    own = centred * centred * size / (size - 1.0).clamp(min=1.0)
    squares = (within.sum(centred * centred) - own).clamp(min=0.0)
    furthest = centred.abs() == within.max(centred.abs())
    furthest &= within.sum(furthest.double()) == 1
    rest = torch.where(scored & ~furthest, r, 0.0)
    around = torch.where(scored & ~furthest, r - within.sum(rest) / (size - 1.0).clamp(min=1.0), 0.0)
    squares = torch.where(furthest, within.sum(around * around), squares)
    return (squares / (size - 1.0 - int(unbiased)).clamp(min=1.0)).sqrt(), highest <= lowest
