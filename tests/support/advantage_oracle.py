"""The reference for advantages: plain Python floats, one loop per sentence of the definition.
Imports nothing of the package.

Rewards are lists; None stands for a missing one. Tokens are lists of sequences, each a list of its
trained tokens alone. Sources: the papers and trainers named in the package's docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Number = float | None
Rows = list[list[float]]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], unbiased: bool = True) -> float:
    """The standard deviation; 0 if there is nothing to divide by."""
    m, n = mean(values), len(values) - int(unbiased)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / n) if n > 0 else 0.0


def group_advantages(
    rewards: Sequence[Number], groups: Sequence[int], *, baseline: str = "mean", scale: str = "group", unbiased: bool = True,
    eps: float = 1e-4, lengths: Sequence[float] | None = None, singleton: str = "zero", missing_rewards: str = "raise",
) -> list[float]:  # fmt: skip
    scored = {i: r for i, r in enumerate(rewards) if r is not None}
    weights = [1.0] * len(rewards) if lengths is None else lengths

    def spread(values: Sequence[float]) -> float:
        return std(values, unbiased) + eps

    def advantage(i: int) -> float:
        if i not in scored:
            return 0.0
        members = [j for j in scored if groups[j] == groups[i]]
        peers, others = [scored[j] for j in members], [scored[j] for j in members if j != i]
        if not others and singleton == "raw":
            return scored[i] / {"none": 1.0, "batch": spread([*scored.values()])}.get(
                scale, 1.0 + eps
            )
        if baseline == "none":
            return scored[i]
        total = math.fsum(weights[j] for j in members)
        if max(peers) == min(peers) or (baseline == "length" and total == 0):
            return 0.0
        if scale == "mean" and mean(peers) <= 0:
            return 0.0
        base = mean(others) if baseline == "leave-one-out" else mean(peers)
        if baseline == "length":
            base = math.fsum(weights[j] * scored[j] for j in members) / total
        if scale == "none" or (scale == "others" and max(others) == min(others)):
            return scored[i] - base
        if scale == "mean":
            return (scored[i] - base) / (mean(peers) + eps)
        return (scored[i] - base) / spread(
            {"group": peers, "batch": [*scored.values()], "others": others}[scale]
        )

    return [advantage(i) for i in range(len(rewards))]


def summed(rewards: Sequence[Sequence[Number]], weights: Sequence[float]) -> list[Number]:
    """The weighted sum over the functions that gave a reward; None if none did."""
    given = [[w * r for w, r in zip(weights, row, strict=True) if r is not None] for row in rewards]
    return [math.fsum(row) if row else None for row in given]


def gdpo(
    rewards: Sequence[Sequence[Number]],
    weights: Sequence[float],
    groups: Sequence[int],
    *,
    eps: float = 1e-4,
    **options: object,
) -> list[float]:
    """Each function's advantages apart, then their weighted sum over its deviation; 0 where no
    function can tell.
    """
    columns = [
        group_advantages(column, groups, eps=eps, **options)
        for column in zip(*rewards, strict=True)
    ]  # type: ignore[arg-type]
    rows = [*zip(*columns, strict=True)]
    total = [math.fsum(w * a for w, a in zip(weights, row, strict=True)) for row in rows]
    counted = [t for t, row in zip(total, rewards, strict=True) if any(r is not None for r in row)]
    return [
        (t - mean(counted)) / (std(counted) + eps) if any(row) else 0.0
        for t, row in zip(total, rows, strict=True)
    ]


# ---- tokens


def returns_to_go(rewards: Rows, gamma: float) -> Rows:
    return [
        [math.fsum(gamma**k * r for k, r in enumerate(row[t:])) for t in range(len(row))]
        for row in rewards
    ]


def gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """(advantages, returns): sums of the errors of values, decayed by gamma * lam."""
    after = [[*v, 0.0][1:] for v in values]
    errors = [
        [r + gamma * n - v for r, v, n in zip(*row, strict=True)]
        for row in zip(rewards, values, after, strict=True)
    ]
    advantages = returns_to_go(errors, gamma * lam)
    return advantages, [
        [a + v for a, v in zip(*row, strict=True)] for row in zip(advantages, values, strict=True)
    ]


def process_advantages(
    steps: Sequence[Sequence[Number]], groups: list[int], gamma: float = 1.0, **options: object
) -> Rows:
    """steps: the reward of the step that ends at a token, None if no step ends there."""
    found = [(groups[b], r) for b, row in enumerate(steps) for r in row if r is not None]
    normalised = iter(group_advantages([r for _, r in found], [g for g, _ in found], **options))  # type: ignore[arg-type]
    return returns_to_go(
        [[0.0 if r is None else next(normalised) for r in row] for row in steps], gamma
    )


def optimal_token_advantages(
    rewards: Rows, logps: Rows, squares: Rows, groups: list[int], weights: Rows | None = None
) -> Rows:
    """The return less the mean of the group's at that token, weighted by the energy of the paths up
    to it.
    """
    returns = returns_to_go(rewards, 1.0)

    def energy(b: int, t: int) -> float:
        of = zip(
            logps[b],
            squares[b],
            [1.0] * len(logps[b]) if weights is None else weights[b],
            strict=True,
        )
        return math.fsum(
            (1 - 2 * math.exp(logp) + square) * w**2 for logp, square, w in [*of][: t + 1]
        )

    def advantage(b: int, t: int) -> float:
        peers = [c for c, g in enumerate(groups) if g == groups[b] and len(returns[c]) > t]
        g, w = [returns[c][t] for c in peers], [energy(c, t) for c in peers]
        if len(peers) > 1 and max(g) == min(g):
            return 0.0
        base = (
            math.fsum(x * y for x, y in zip(g, w, strict=True)) / (math.fsum(w) + 1e-8)
            if len(peers) > 1
            else 0.0
        )
        return returns[b][t] - base

    return [[advantage(b, t) for t in range(len(row))] for b, row in enumerate(returns)]


def whiten(
    values: list[float], *, unbiased: bool, eps: float, guard: str, shift_mean: bool = True
) -> list[float]:
    m, d = mean(values), std(values, unbiased)
    divisor = {"add": math.sqrt(d * d + eps), "floor": math.sqrt(max(d * d, eps)), "std": d + eps}[
        guard
    ]
    same = max(values) == min(values)
    return [(0.0 if same else (v - m) / divisor) + (0.0 if shift_mean else m) for v in values]


# ---- mismatch to the sampler: the log-ratio of each trained token, NaN where the sampler did not
# score it


def log_weights(rows: Rows) -> Rows:
    return [[0.0 if math.isnan(x) else min(max(x, -60.0), 60.0) for x in row] for row in rows]


def over_sequence(how: str, rows: Rows) -> Rows:
    """For each token its own number, or that of its sequence."""
    one = {"sum": math.fsum, "mean": mean, "max": max, "min": min}.get(how)
    return rows if one is None else [[one(row)] * len(row) if row else [] for row in rows]  # type: ignore[operator]


def importance_weights(
    rows: Rows, level: str, mode: str, low: float, high: float, normalize: bool
) -> Rows:
    how = {"sequence": "sum", "geometric": "mean"}.get(level, "")
    raw = [[math.exp(min(x, 60.0)) for x in row] for row in over_sequence(how, log_weights(rows))]
    out = [
        [
            min(max(w, low), high) if mode == "truncate" else w if low <= w <= high else 0.0
            for w in row
        ]
        for row in raw
    ]
    counted = [w for row in out for w in (row if level == "token" else row[:1])]
    m = mean(counted) if normalize and any(counted) else 1.0
    return [[w / m for w in row] for row in out]


def rejection_metric(rows: Rows, metric: str, over: str) -> Rows:
    of = {
        "ratio": lambda x: x,
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.expm1(x) - x,
    }[metric]
    found = over_sequence(over, [[of(x) for x in row] for row in log_weights(rows)])
    return [[math.exp(min(x, 60.0)) for x in row] for row in found] if metric == "ratio" else found


def kept_by_second_moment(rows: Rows, threshold: float) -> list[float]:
    """The squares that stay when the largest are taken away one by one."""
    rest = sorted(x * x for row in log_weights(rows) for x in row)
    while len(rest) > 1 and not math.fsum(rest) < threshold * len(rest):
        rest.pop()
    return rest


def self_distilled(
    advantage: float, old: float, teacher: float, strength: float, clip: float, negative_only: bool
) -> float:
    """RLSD (2604.03128) of one token."""
    if advantage == 0 or (negative_only and advantage > 0):
        return advantage
    evidence = math.exp(min(math.copysign(1.0, advantage) * (teacher - old), 700.0))
    bounded = min(max(evidence, 1 - clip), 1 + clip)
    return advantage * (1 - strength + strength * bounded)


# ---- sequences of tests


class Ragged:
    """Sequences of these lengths with holes in their masks, padded to [B, T] and packed."""

    def __init__(self, lengths: list[int]) -> None:
        self.inside = torch.arange(max(lengths, default=0)) < torch.tensor(lengths)[:, None]
        self.mask = self.inside & (torch.rand(self.inside.shape) > 0.3)
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    def poisoned(self, x: torch.Tensor) -> torch.Tensor:
        """fp64, with numbers of every kind where the mask is False."""
        wild = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=torch.float64)
        return torch.where(self.mask, x.double(), wild[torch.randint(4, x.shape)])

    def random(self) -> torch.Tensor:
        return self.poisoned(torch.randn(self.mask.shape))

    def lists(self, x: torch.Tensor) -> Rows:
        return [row[own].tolist() for row, own in zip(x, self.mask, strict=True)]

    def check(self, got: torch.Tensor, want: Rows, rtol: float = 1e-6, atol: float = 1e-9) -> None:
        """Those of trained tokens, padded or packed, are wanted, all others exactly 0."""
        mask = self.mask if got.dim() == 2 else self.mask[self.inside]
        assert not got[~mask].any()
        close(got[mask], [x for row in want for x in row], rtol, atol)


def close(got: torch.Tensor, expected: object, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """Asserts that an fp32 tensor equals the float64 result."""
    assert got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(
        got.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol
    )
