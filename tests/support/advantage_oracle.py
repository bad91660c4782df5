"""The reference for advantages: plain Python floats, one loop for each sentence of the definition.

Imports nothing of the package. Rewards are lists, in which None is a missing reward. Values of
tokens are lists of sequences, and a sequence is a list that has only its trained tokens. Sources:
the papers and trainers that the docstrings of the package name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

#: A reward; None if it is missing.
Number = float | None
#: Values of tokens: a list for each sequence.
Rows = list[list[float]]


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return math.fsum(values) / len(values)


def std(values: Sequence[float], unbiased: bool = True) -> float:
    """Return the standard deviation, or 0 for a single value if unbiased.

    unbiased   whether the variance divides by n - 1, otherwise by n
    """
    center = mean(values)
    divisor = len(values) - 1 if unbiased else len(values)
    if divisor <= 0:
        return 0.0
    return math.sqrt(math.fsum((x - center) ** 2 for x in values) / divisor)


def group_advantages(
    rewards: Sequence[Number],
    groups: Sequence[int],
    *,
    baseline: str = "mean",
    scale: str = "group",
    unbiased: bool = True,
    eps: float = 1e-4,
    lengths: Sequence[float] | None = None,
    singleton: str = "zero",
    missing_rewards: str = "raise",
) -> list[float]:
    """Return (reward - baseline) / (scale + eps) for each reward, and 0 for a missing reward.

    The arguments are those of the package's `group_advantages`. "Others" are the other rewards of
    the group.

    groups            the group of each reward
    baseline          "mean": of the group. "leave-one-out": the mean of the others. "length": the
                      mean of the group, weighted by `lengths`. "none": the reward is returned as it
                      is.
    scale             "none": 1, without eps. "group", "others", "batch": the standard deviation of
                      these rewards (equal "others": 1, without eps). "mean": the mean of the group.
    unbiased          see `std`
    lengths           the number of tokens of each completion; None: all count alike
    singleton         for the only reward of a group. "zero": the advantage is 0. "raw": the
                      baseline is 0, and a scale that is computed from the group is 1.
    missing_rewards   ignored, so that tests can pass the same options to both functions
    """
    scored = {i: reward for i, reward in enumerate(rewards) if reward is not None}
    all_rewards = list(scored.values())
    weights = [1.0] * len(rewards) if lengths is None else lengths

    def divisor(group: list[float], others: list[float]) -> float:
        """Return scale + eps for a reward, from the rewards of its group and from the others."""
        if scale == "none":
            return 1.0
        if scale == "mean":
            return mean(group) + eps
        if scale == "others" and max(others) == min(others):
            return 1.0
        values = {"group": group, "batch": all_rewards, "others": others}[scale]
        return std(values, unbiased) + eps

    def advantage(i: int) -> float:
        """Return the advantage of reward i."""
        if i not in scored:
            return 0.0
        reward = scored[i]
        members = [j for j in scored if groups[j] == groups[i]]
        group = [scored[j] for j in members]
        others = [scored[j] for j in members if j != i]

        if not others and singleton == "raw":
            # The baseline is 0.
            if scale == "none":
                return reward
            if scale == "batch":
                return reward / (std(all_rewards, unbiased) + eps)
            return reward / (1.0 + eps)

        if baseline == "none":
            return reward
        if max(group) == min(group):
            return 0.0
        if scale == "mean" and mean(group) <= 0:
            return 0.0

        if baseline == "leave-one-out":
            base = mean(others)
        elif baseline == "length":
            num_tokens = math.fsum(weights[j] for j in members)
            if num_tokens == 0:
                return 0.0
            base = math.fsum(weights[j] * scored[j] for j in members) / num_tokens
        else:
            base = mean(group)
        return (reward - base) / divisor(group, others)

    return [advantage(i) for i in range(len(rewards))]


def summed(rewards: Sequence[Sequence[Number]], weights: Sequence[float]) -> list[Number]:
    """Return the weighted sum of each completion's rewards, or None if all are missing.

    rewards   for each completion the rewards of all reward functions
    weights   the weight of each function
    """
    sums: list[Number] = []
    for row in rewards:
        terms = [
            weight * reward
            for weight, reward in zip(weights, row, strict=True)
            if reward is not None
        ]
        sums.append(math.fsum(terms) if terms else None)
    return sums


def gdpo(
    rewards: Sequence[Sequence[Number]],
    weights: Sequence[float],
    groups: Sequence[int],
    *,
    eps: float = 1e-4,
    **options: Any,
) -> list[float]:
    """Return advantages of several reward functions as in GDPO (arXiv 2601.05242).

    The advantages of each function are computed alone. Their weighted sum is then normalised over
    the batch. A completion gets 0 if its advantage is 0 for every function.

    rewards   for each completion the rewards of all reward functions
    weights   the weight of each function
    groups    the group of each completion
    eps       added to each standard deviation
    options   of `group_advantages`
    """
    columns = [
        group_advantages(column, groups, eps=eps, **options)
        for column in zip(*rewards, strict=True)
    ]
    advantages_of_completions = list(zip(*columns, strict=True))
    totals = [
        math.fsum(w * a for w, a in zip(weights, advantages, strict=True))
        for advantages in advantages_of_completions
    ]
    # A completion without any reward counts neither in the mean nor in the deviation.
    counted = [
        total
        for total, row in zip(totals, rewards, strict=True)
        if any(reward is not None for reward in row)
    ]
    normalised = []
    for total, advantages in zip(totals, advantages_of_completions, strict=True):
        if any(advantages):
            normalised.append((total - mean(counted)) / (std(counted) + eps))
        else:
            normalised.append(0.0)
    return normalised


# ---- tokens


def returns_to_go(rewards: Rows, gamma: float) -> Rows:
    """Return for each token the sum of its reward and all later ones, discounted by gamma.

    rewards   a reward for each token
    gamma     the factor of a reward for each token that it is later
    """

    def return_of(row: list[float], t: int) -> float:
        """Return the discounted sum of the rewards of a sequence from token t on."""
        return math.fsum(gamma**k * reward for k, reward in enumerate(row[t:]))

    return [[return_of(row, t) for t in range(len(row))] for row in rewards]


def gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """Return (advantages, returns) of generalised advantage estimation.

    The error of a value is reward + gamma * next value - value, with a next value of 0 at the end.
    An advantage is the sum of this error and all later ones, discounted by gamma * lam. A return is
    the advantage plus the value.

    rewards, values   a number for each token
    """
    errors = []
    for row_rewards, row_values in zip(rewards, values, strict=True):
        next_values = [*row_values, 0.0][1:]
        errors.append(
            [
                reward + gamma * next_value - value
                for reward, value, next_value in zip(
                    row_rewards, row_values, next_values, strict=True
                )
            ]
        )
    advantages = returns_to_go(errors, gamma * lam)
    returns = [
        [advantage + value for advantage, value in zip(*row, strict=True)]
        for row in zip(advantages, values, strict=True)
    ]
    return advantages, returns


def process_advantages(
    steps: Sequence[Sequence[Number]], groups: list[int], gamma: float = 1.0, **options: Any
) -> Rows:
    """Return an advantage for each token from rewards of steps (process rewards).

    The rewards of all steps of a group are normalised together. A token gets the discounted sum of
    the normalised rewards at its place and later.

    steps     for each token the reward of the step that ends there, None if no step ends there
    groups    the group of each sequence
    gamma     the factor of a reward for each token that it is later
    options   of `group_advantages`
    """
    step_rewards = []
    step_groups = []
    for sequence, row in enumerate(steps):
        for reward in row:
            if reward is not None:
                step_rewards.append(reward)
                step_groups.append(groups[sequence])
    normalised = iter(group_advantages(step_rewards, step_groups, **options))
    rewards = [[0.0 if reward is None else next(normalised) for reward in row] for row in steps]
    return returns_to_go(rewards, gamma)


def optimal_token_advantages(
    rewards: Rows, logps: Rows, squares: Rows, groups: list[int], weights: Rows | None = None
) -> Rows:
    """Return for each token its return minus a weighted mean of the group's returns at its place.

    The return of a token is the sum of the rewards from there on.

    The weight of a sequence at a token is the energy of its path: the sum of
    (1 - 2 p + sum_squares) w^2 over its tokens so far. The baseline is 0 for a sequence that is the
    only one of its group at this token.

    rewards   of the tokens
    logps     log-probs log p of the tokens
    squares   the sum of squared probabilities at each token
    groups    the group of each sequence
    weights   w of each token; None: 1
    """
    returns = returns_to_go(rewards, 1.0)

    def energy(sequence: int, t: int) -> float:
        """Return the energy of the path of a sequence up to and with token t."""
        terms = []
        for k in range(t + 1):
            w = 1.0 if weights is None else weights[sequence][k]
            prob = math.exp(logps[sequence][k])
            terms.append((1 - 2 * prob + squares[sequence][k]) * w**2)
        return math.fsum(terms)

    def advantage(sequence: int, t: int) -> float:
        """Return the advantage of token t of a sequence."""
        # The sequences of the group that have a token t, this one included.
        members = [
            other
            for other, group in enumerate(groups)
            if group == groups[sequence] and len(returns[other]) > t
        ]
        if len(members) == 1:
            return returns[sequence][t]
        member_returns = [returns[member][t] for member in members]
        if max(member_returns) == min(member_returns):
            return 0.0
        energies = [energy(member, t) for member in members]
        weighted_sum = math.fsum(x * y for x, y in zip(member_returns, energies, strict=True))
        return returns[sequence][t] - weighted_sum / (math.fsum(energies) + 1e-8)

    return [[advantage(b, t) for t in range(len(row))] for b, row in enumerate(returns)]


def whiten(
    values: list[float], *, unbiased: bool, eps: float, guard: str, shift_mean: bool = True
) -> list[float]:
    """Return (x - mean) / std of each value, or 0 if all values are equal.

    values       at least one
    unbiased     see `std`
    guard        how eps keeps the divisor above 0: "add" adds it to the variance, "floor" is the
                 least variance, "std" adds it to the standard deviation
    shift_mean   False: the mean is added again
    """
    center = mean(values)
    deviation = std(values, unbiased)
    if guard == "add":
        divisor = math.sqrt(deviation * deviation + eps)
    elif guard == "floor":
        divisor = math.sqrt(max(deviation * deviation, eps))
    else:
        assert guard == "std", guard
        divisor = deviation + eps
    are_equal = max(values) == min(values)
    offset = 0.0 if shift_mean else center
    return [(0.0 if are_equal else (x - center) / divisor) + offset for x in values]


# ---- mismatch to the sampler: the log-ratio of each trained token, NaN if the sampler did not
# score it

#: The definition bounds log-ratios to [-60, 60], and exponents from above, so that results are
#: finite.
BOUND = 60.0


def log_weights(rows: Rows) -> Rows:
    """Return log-ratios clamped to [-BOUND, BOUND], and 0 for NaN, tokens that were not scored."""
    return [[0.0 if math.isnan(x) else min(max(x, -BOUND), BOUND) for x in row] for row in rows]


def over_sequence(how: str, rows: Rows) -> Rows:
    """Replace each number by the "sum", "mean", "max" or "min" of the numbers of its sequence.

    how    one of these names. With another one, such as "token", the rows are returned unchanged.
    """
    functions = {"sum": math.fsum, "mean": mean, "max": max, "min": min}
    if how not in functions:
        return rows
    reduce: Any = functions[how]
    return [[reduce(row)] * len(row) if row else [] for row in rows]


def importance_weights(
    rows: Rows, level: str, mode: str, low: float, high: float, normalize: bool
) -> Rows:
    """Return the importance weight of each token.

    rows        the log-ratio of each token, old policy to sampler, NaN if it was not scored
    level       "token": the ratio of the token. "sequence": the product over its sequence.
                "geometric": the geometric mean over its sequence.
    mode        "truncate": weights are clamped to [low, high]. "mask": weights outside are 0.
    normalize   whether weights are divided by their mean: over tokens at the level "token",
                otherwise over sequences. Not if all weights are 0.
    """
    reduction = {"token": "token", "sequence": "sum", "geometric": "mean"}[level]
    log_ratios = over_sequence(reduction, log_weights(rows))

    def weight_of(log_ratio: float) -> float:
        """Return the weight for a log-ratio, before weights are normalised."""
        ratio = math.exp(min(log_ratio, BOUND))
        if mode == "truncate":
            return min(max(ratio, low), high)
        return ratio if low <= ratio <= high else 0.0

    weights = [[weight_of(x) for x in row] for row in log_ratios]
    if level == "token":
        counted = [w for row in weights for w in row]
    else:  # all weights of a sequence are equal
        counted = [row[0] for row in weights if row]
    if not normalize or not any(counted):
        return weights
    mean_weight = mean(counted)
    return [[w / mean_weight for w in row] for row in weights]


def rejection_metric(rows: Rows, metric: str, over: str) -> Rows:
    """Return the metric by which tokens are rejected, for each token.

    rows     the log-ratio log w of each token, NaN if it was not scored
    metric   "ratio" w, or an estimate of KL(sampler || old): "k1" -log w, "k2" (log w)^2 / 2,
             "k3" w - 1 - log w
    over     "token", or how the tokens of a sequence are combined, see `over_sequence`. For "ratio"
             the log-ratios are combined.
    """
    functions = {
        "ratio": lambda x: x,
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.expm1(x) - x,
    }
    function = functions[metric]
    combined = over_sequence(over, [[function(x) for x in row] for row in log_weights(rows)])
    if metric == "ratio":
        return [[math.exp(min(x, BOUND)) for x in row] for row in combined]
    return combined


def kept_by_second_moment(rows: Rows, threshold: float) -> list[float]:
    """Return the squared log-ratios of the tokens that are kept, in ascending order.

    The largest are removed one by one until the mean is below the threshold. One is always kept.

    rows   the log-ratio of each token, NaN if it was not scored
    """
    squares = sorted(x * x for row in log_weights(rows) for x in row)
    while len(squares) > 1 and not math.fsum(squares) < threshold * len(squares):
        squares.pop()
    return squares


def self_distilled(
    advantage: float, old: float, teacher: float, strength: float, clip: float, negative_only: bool
) -> float:
    """Return the advantage of a token, scaled by the teacher's evidence (RLSD, arXiv 2604.03128).

    The evidence is the ratio of the probabilities teacher / old, inverted for a negative advantage.
    It is clamped to [1 - clip, 1 + clip].

    old, teacher    log-probs of the token
    strength        share of the scaled advantage in the result, 0 to 1
    negative_only   whether positive advantages are returned unchanged
    """
    if advantage == 0 or (negative_only and advantage > 0):
        return advantage
    log_evidence = math.copysign(1.0, advantage) * (teacher - old)
    evidence = math.exp(min(log_evidence, 700.0))  # exp(710) overflows
    bounded = min(max(evidence, 1 - clip), 1 + clip)
    return advantage * (1 - strength + strength * bounded)


# ---- sequences of tests


class Ragged:
    """Sequences of given lengths whose masks have random holes.

    inside       bool [B, T]: tokens that are not padding
    mask         bool [B, T]: trained tokens
    cu_seqlens   [B + 1]: boundaries of the same sequences if they are packed
    """

    def __init__(self, lengths: list[int]) -> None:
        """Draw the holes from the global generator: about 30 % of the tokens are not trained."""
        self.inside = torch.arange(max(lengths, default=0)) < torch.tensor(lengths)[:, None]
        self.mask = self.inside & (torch.rand(self.inside.shape) > 0.3)
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    def poisoned(self, x: torch.Tensor) -> torch.Tensor:
        """Return x in fp64, with NaN, infinities or 1e30 where the mask is False."""
        wild = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=torch.float64)
        return torch.where(self.mask, x.double(), wild[torch.randint(4, x.shape)])

    def random(self) -> torch.Tensor:
        """Return normal random numbers [B, T], poisoned where the mask is False."""
        return self.poisoned(torch.randn(self.mask.shape))

    def lists(self, x: torch.Tensor) -> Rows:
        """Return the numbers of the trained tokens, a list for each sequence."""
        return [row[row_mask].tolist() for row, row_mask in zip(x, self.mask, strict=True)]

    def check(self, got: torch.Tensor, want: Rows, rtol: float = 1e-6, atol: float = 1e-9) -> None:
        """Assert that trained tokens have the expected numbers, and all others exactly 0.

        got          fp32 [B, T], or packed [N]
        want         the numbers of the trained tokens, a list for each sequence
        rtol, atol   the relative and absolute tolerance, of which the sum is allowed
        """
        mask = self.mask if got.dim() == 2 else self.mask[self.inside]
        assert not got[~mask].any()
        close(got[mask], [x for row in want for x in row], rtol, atol)


def close(got: torch.Tensor, expected: object, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """Assert that a tensor is fp32, requires no gradient, and is near the float64 result.

    expected     a tensor or nested lists, in the shape of `got`
    rtol, atol   the relative and absolute tolerance, of which the sum is allowed
    """
    assert got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(
        got.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol
    )
