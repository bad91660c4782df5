"""Compute advantages of completions from their rewards, mostly relative to the other completions of
the same prompt (a group).

Everything is computed in fp64, in a fixed order, and returned as fp32. `returns` has advantages of
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import LARGEST, SMALLEST, require, require_number, require_one_of, require_shape
from .groups import (
    Groups,
    GroupStatistics,
    group_ids,
    read_lengths,
    read_rewards,
    read_weights,
    reward_statistics,
    warn_of_single_completions,
    weighted_sum,
)

BASELINES = ("mean", "leave-one-out", "length", "none")
SCALES = ("group", "batch", "none", "mean", "others")
COMBINATIONS = ("sum", "gdpo")

#: `group_advantages(rewards, group_size=8, **NUMERICS["verl"])` computes what verl's group
#: normalisation computes; {**NUMERICS["verl"], "baseline": "leave-one-out", "scale": "none"} is its
#: RLOO. One difference remains: equal rewards give exactly 0 here. In the trainers they give the
#: rounding error of their mean divided by eps (an advantage of up to 1 at eps=1e-9).
NUMERICS: dict[str, dict[str, Any]] = {
    "trl": {"eps": 1e-4, "missing_rewards": "skip"},
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
    missing_rewards: str = "raise",
    singleton: str = "zero",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute A = (reward - baseline) / (scale + eps) in fp64, and return it as `dtype` [B].

    rewards      numbers, as a tensor of any dtype or a list: [B], or [B, K] for K reward functions
                 with their `reward_weights`
    group_size   G: each run of G consecutive rewards belongs to one prompt. It must divide B.
    groups       instead of group_size, integer [B]: rewards with equal numbers belong to one
                 prompt. Groups may have any size and order.
    baseline     "mean" of the group. "leave-one-out": mean of the others (RLOO, arXiv 2402.14740,
                 with scale="none"). "length": mean weighted by `lengths` (OPO, arXiv 2505.23585).
                 "none": 0, with scale="none".
    scale        "group": std of the group (GRPO, arXiv 2402.03300). "batch": std of all rewards
                 (arXiv 2508.08221). "none": no division (Dr. GRPO, arXiv 2503.20783). "mean": the
                 group's mean; A = 0 unless it is above 0 (MaxRL, arXiv 2602.02710, which has
                 eps=0). "others": std of the group's other rewards; no division if those are equal
                 (NeMo-RL).
    unbiased     True: std divides by n - 1 (TRL, verl, slime). False: by n. A group of one has std
                 0.
    eps          added to the scale: 1e-4 in TRL, 1e-6 in verl. NUMERICS has the values of nine
                 trainers.
    lengths      number [B] >= 0 for baseline="length": tokens of each completion. A group without
                 tokens gets 0.
    reward_weights   K numbers, one for each of the reward functions of rewards [B, K]
    combine      "sum": add the weighted rewards, then compute A. "gdpo": compute A for each
                 function, add the weighted results, then compute (A - mean) / (std + eps) over the
                 batch (arXiv 2601.05242).
    missing_rewards  "raise": a NaN raises ValueError. "skip": a completion without any reward
                     counts in no mean or std and gets 0 (TRL). Of several rewards, NaN ones are
                     left out.
    singleton    the advantage of a group with one reward: "zero", or "raw" with baseline 0 and a
                 group scale of 1 (verl, SkyRL). If a quarter of the groups or more get zeros
                 because they have one member, one warning says so; see `group_metrics`.

    Equal rewards in a group (max == min) give exactly 0, except with baseline="none" or
    singleton="raw". This needs care: in fp32 the mean of equal rewards may differ from them by a
    rounding error, which would become an advantage of up to 1e-3 (0.1 at eps=1e-6) after the
    division by eps. Kernels can skip rows whose advantage is exactly 0.

    Raises ValueError, naming the index, for NaN or infinite rewards (if `values_are_checked`), for
    a group size that does not divide B, and for arguments that exclude each other.
    """
    require_one_of("baseline", baseline, BASELINES)
    require_one_of("scale", scale, SCALES)
    require_one_of("combine", combine, COMBINATIONS)
    require_one_of("singleton", singleton, ("zero", "raw"))
    remedy = "without a baseline it must be 'none'; see returns.whiten."
    require(baseline != "none" or scale == "none", "scale", scale, remedy)
    remedy = "it takes rewards [B, K] and reward_weights."
    require(combine == "sum" or reward_weights is not None, "combine", combine, remedy)
    _check_eps(eps)
    # fp64 [B] or [B, K], and a bool mask of the rewards that are not missing.
    r, scored = read_rewards(rewards, missing_rewards, several=reward_weights is not None)
    shown_lengths = "None" if lengths is None else "given"  # not the whole tensor
    remedy = "baseline='length' takes it, no other does."
    require((lengths is None) == (baseline != "length"), "lengths", shown_lengths, remedy)
    num_tokens = None if lengths is None else read_lengths(lengths, len(r), r.device)
    factors = [] if reward_weights is None else read_weights(reward_weights, r)
    same_prompt = Groups(group_ids(len(r), r.device, group_size, groups))
    if baseline != "none" and singleton == "zero":
        warn_of_single_completions(same_prompt, group_size)

    def normalise(r: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
        """Return (advantages fp64 [B], whether an advantage is exactly 0, bool [B]).

        r        fp64 [B]: one reward for each completion
        scored   bool [B]: completions whose reward is not missing
        """
        g = GroupStatistics(same_prompt, r, scored)
        above_baseline, is_zero = _above_baseline(g, baseline, num_tokens)
        divisor = _divisor(g, scale, unbiased, eps)
        if scale == "mean":
            is_zero = is_zero | (g.mean <= 0)
        if singleton == "raw":
            is_alone = scored & (g.size == 1)
            above_baseline = torch.where(is_alone, r, above_baseline)
            is_zero = is_zero & ~is_alone
            # The scales of a group are 1 for a single reward.
            if scale not in ("none", "batch"):
                divisor = torch.where(is_alone, 1.0 + eps, divisor)
        return torch.where(is_zero, 0.0, above_baseline / divisor), is_zero

    if r.dim() == 1:
        advantages, _ = normalise(r, scored)
        return advantages.to(dtype)
    if combine == "sum":
        summed_rewards = weighted_sum(r.unbind(1), factors)
        advantages, _ = normalise(summed_rewards, scored.any(1))
        return advantages.to(dtype)
    # "gdpo": normalise each reward function, then their weighted sum over the whole batch.
    columns = [normalise(r[:, k], scored[:, k]) for k in range(r.shape[1])]
    column_advantages = [advantages for advantages, _ in columns]
    is_zero = torch.stack([is_zero for _, is_zero in columns]).all(0)
    total = GroupStatistics(Groups(), weighted_sum(column_advantages, factors), scored.any(1))
    advantages = (total.values - total.mean) / (total.std(unbiased) + eps)
    return torch.where(is_zero, 0.0, advantages).to(dtype)


def _above_baseline(
    g: GroupStatistics, baseline: str, num_tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (rewards minus the baseline, whether the advantage is exactly 0), each [B].

    g            the groups of rewards and their statistics
    baseline     "mean", "leave-one-out", "length" or "none", see `group_advantages`
    num_tokens   fp64 [B]: tokens of each completion, with baseline="length"; else None
    """
    if baseline == "none":
        return g.values, ~g.counted
    is_zero = ~g.counted | g.equal
    if baseline == "leave-one-out":
        # r - (mean of the others) = (r - mean) n / (n - 1)
        return g.centred * g.size / (g.size - 1.0).clamp(min=1.0), is_zero
    if num_tokens is None:  # baseline="mean"
        return g.centred, is_zero
    # r - (weighted mean) = (r - mean) - (weighted mean of r - mean)
    weights = torch.where(g.counted, num_tokens, 0.0)
    total = g.groups.sum(weights)
    return g.centred - g.groups.sum(weights * g.centred) / total, is_zero | (total == 0)


def _divisor(g: GroupStatistics, scale: str, unbiased: bool, eps: float) -> Tensor | float:
    """Return what rewards minus the baseline are divided by: fp64 [B], 0-d, or the number 1.

    g          the groups of rewards and their statistics
    scale      "group", "batch", "none", "mean" or "others", see `group_advantages`
    unbiased   whether a std divides by n - 1
    eps        is added to the scale
    """
    if scale == "group":
        return g.std(unbiased) + eps
    if scale == "batch":  # all rewards are one group
        return GroupStatistics(Groups(), g.values, g.counted).std(unbiased) + eps
    if scale == "mean":
        return g.mean + eps
    if scale == "others":
        std, others_are_equal = _std_of_others(g, unbiased)
        return torch.where(others_are_equal, 1.0, std + eps)
    assert scale == "none", scale
    return 1.0


def _std_of_others(g: GroupStatistics, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Return (std of the other rewards of the group, whether these are all equal), each [B].

    Fewer than 2 other rewards are equal. Equality is returned in addition to the std, because
    rounding may give equal rewards a std other than 0.

    g          the groups of rewards and their statistics
    unbiased   whether the std divides by the number of other rewards minus 1
    """
    groups = g.groups
    num_others = (g.size - 1.0).clamp(min=1.0)
    highest = groups.max_of_others(torch.where(g.counted, g.values, -math.inf))
    lowest = -groups.max_of_others(torch.where(g.counted, -g.values, -math.inf))

    # Leaving out r subtracts n / (n - 1) (r - mean)^2 from the sum of squares of a group of n.
    squares = g.centred * g.centred
    sum_squares = (groups.sum(squares) - squares * g.size / num_others).clamp(min=0.0)

    # If r alone is furthest from the mean, its square may be nearly the whole sum, and the
    # difference is mostly rounding error. So the sum over the others is computed directly for it.
    distance = g.centred.abs()
    is_furthest = distance == groups.max(distance)
    is_furthest &= groups.sum(is_furthest.double()) == 1
    is_other = g.counted & ~is_furthest
    mean_of_others = groups.sum(torch.where(is_other, g.values, 0.0)) / num_others
    differences = torch.where(is_other, g.values - mean_of_others, 0.0)
    sum_squares = torch.where(is_furthest, groups.sum(differences * differences), sum_squares)

    variance = sum_squares / (g.size - 1.0 - int(unbiased)).clamp(min=1.0)
    return variance.sqrt(), highest <= lowest


def _check_eps(eps: float) -> None:
    """Raise ValueError unless eps is finite and >= 0."""
    remedy = "it is added to a standard deviation and must be finite and >= 0."
    require_number("eps", eps, remedy, low=0, high=LARGEST)


def pass_at_k_advantages(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    scale: str = "group",
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Compute the advantages of pass@k, fp32 [B] (arXiv 2503.19595).

    The best completion of a group gets (its reward - the second best) / (std + eps). All others get
    0. If two completions share the best reward, or a group has one completion, the result is 0
    (verl raises for a group of one).

    rewards              float [B]
    group_size, groups   which completions share a prompt, as in `group_advantages`
    scale                "group": divide by the group's std + eps. "none": do not divide.
    unbiased             True: std divides by n - 1. False: by n.
    eps                  added to the std

    Raises ValueError as `group_advantages` does.
    """
    require_one_of("scale", scale, ("group", "none"))
    _check_eps(eps)
    g = reward_statistics(rewards, group_size, groups)
    warn_of_single_completions(g.groups, group_size)
    second = g.groups.max_of_others(g.values)
    lead = torch.where((g.values > second) & (g.size > 1), g.values - second, 0.0)
    if scale == "group":
        lead = lead / (g.std(unbiased) + eps)
    return torch.where(lead > 0, lead, 0.0).float()


def greedy_baseline_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Subtract the reward of the prompt's greedy completion from each reward, fp32 [B].

    rewards, greedy_rewards   [B], finite. For G completions per prompt pass
                              `greedy.repeat_interleave(G)`.

    With per-token rewards, subtract the same baseline from `discounted_returns`. Raises ValueError
    for other shapes and values. Source: ReMax, arXiv 2310.10505.
    """
    r, _ = read_rewards(rewards)
    greedy, _ = read_rewards(greedy_rewards, name="greedy_rewards")
    require_shape("greedy_rewards", greedy, r.shape, "rewards")
    return (r - greedy.to(r.device)).float()


def gpg_scale(
    rewards: Tensor, *, group_size: int | None = None, groups: Tensor | None = None
) -> Tensor:
    """Return the factor of GPG, B / max(number of samples that count, 1), 0-d fp32.

    Without group_size and groups, samples with a reward other than 0 count (verl). With one of
    them, samples count whose group has different rewards, because only those have a gradient.
    verl's GPG is gpg_scale(r) * group_advantages(r, ..., scale="none", singleton="raw").

    rewards              float [B]
    group_size, groups   which completions share a prompt, as in `group_advantages`

    Source: arXiv 2504.02546.
    """
    if group_size is None and groups is None:
        r, _ = read_rewards(rewards)
        is_counted = r != 0
    else:
        is_counted = ~zero_variance(rewards, group_size=group_size, groups=groups)
    num_counted = is_counted.sum().clamp(min=1).double()
    return (is_counted.numel() / num_counted).float()


def a2po_values(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    beta: float = 0.5,
) -> Tensor:
    """Compute V* = beta log mean exp(reward / beta) over the group of each reward, fp32 [B].

    rewards              float [B]
    group_size, groups   which completions share a prompt, as in `group_advantages`
    beta                 above 0 (TRL's beta1). For a small beta the result approaches the best
                         reward, for a large beta the mean.

    Raises ValueError as `group_advantages` does. Source: A*-PO, arXiv 2505.20686.
    """
    remedy = "it divides the rewards and must be a finite number above 0."
    require_number("beta", beta, remedy, low=SMALLEST, high=LARGEST)
    g = reward_statistics(rewards, group_size, groups)
    # Relative to the highest reward, so that exp does not overflow.
    mean = g.groups.sum(torch.exp((g.values - g.highest) / beta)) / g.size
    return (g.highest + beta * mean.log()).float()


def zero_variance(
    rewards: Tensor, *, group_size: int | None = None, groups: Tensor | None = None
) -> Tensor:
    """Return for each reward whether all rewards of its group are exactly equal, bool [B].

    Such a group has no gradient. A NaN is a missing reward, which is left out. A group without any
    reward is True.

    rewards              float [B]
    group_size, groups   which completions share a prompt, as in `group_advantages`

    Raises ValueError as `group_advantages` does.
    """
    return reward_statistics(rewards, group_size, groups, missing_rewards="skip").equal


def group_metrics(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    extremes: tuple[float, float] = (0.0, 1.0),
) -> dict[str, Tensor]:
    """Return statistics of the groups of a batch from its rewards [B], as 0-d fp32 tensors.

    The host does not wait for the device.

    zero_variance   share of the groups whose rewards are all exactly equal
    all_wrong       share of the groups with no reward above extremes[0]
    all_correct     share of the groups with no reward below extremes[1]
    reward_mean, reward_std   over the batch; the std divides by n - 1
    group_std       mean of the groups' std, which divides by n - 1 (0 in a group of one)
    single          share of the groups with one reward, whose advantages are 0
    missing         share of the completions without a reward (NaN). The other statistics do not
                    count them.

    A group without any reward is left out. Raises ValueError as `group_advantages` does.
    """
    wrong, right = extremes
    g = reward_statistics(rewards, group_size, groups, missing_rewards="skip")
    batch = GroupStatistics(Groups(), g.values, g.counted)
    # Each completion has the weight 1 / size of its group, so a weighted sum counts groups.
    weight = torch.where(g.counted, 1.0 / g.size, 0.0)
    group_values = {
        "zero_variance": g.equal,
        "single": g.size == 1,
        "all_wrong": g.highest <= wrong,
        "all_correct": g.lowest >= right,
        "group_std": g.std(True),
    }
    metrics = {
        name: (weight * values).sum() / weight.sum().clamp(min=1.0)
        for name, values in group_values.items()
    }
    metrics |= {"reward_mean": batch.mean, "reward_std": batch.std(True)}
    metrics["missing"] = (~g.counted).double().sum() / max(len(g.values), 1)
    return {name: value.float() for name, value in metrics.items()}
