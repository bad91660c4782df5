"""The reference for advantages: plain Python floats, one loop per sentence of the definition. Imports nothing of the package.

Rewards are lists; None stands for a missing one. Tokens are lists of sequences, each a list of tokens, None where the mask
is False. Sources: the papers and trainers named in the package's docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Number = float | None


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], unbiased: bool = True) -> float:
    """The standard deviation; 0 if there is nothing to divide by."""
    m = mean(values)
    n = len(values) - int(unbiased)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / n) if n > 0 else 0.0


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
    missing: str = "raise",
) -> list[float]:
    everything = [r for r in rewards if r is not None]
    out = []
    for i, reward in enumerate(rewards):
        if reward is None:
            out.append(0.0)
            continue
        members = [j for j, g in enumerate(groups) if g == groups[i] and rewards[j] is not None]
        peers = [float(rewards[j]) for j in members]  # type: ignore[arg-type]
        others = [float(rewards[j]) for j in members if j != i]  # type: ignore[arg-type]
        if len(peers) == 1 and singleton == "raw":
            divisor = {"none": 1.0, "batch": std(everything, unbiased) + eps}.get(scale, 1.0 + eps)
            out.append(reward / divisor)
            continue
        if baseline == "none":
            out.append(float(reward))
            continue
        if max(peers) == min(peers):
            out.append(0.0)
            continue
        if baseline == "mean":
            base = mean(peers)
        elif baseline == "leave-one-out":
            base = mean(others)
        else:
            assert baseline == "length" and lengths is not None
            total = math.fsum(lengths[j] for j in members)
            if total == 0:
                out.append(0.0)
                continue
            base = math.fsum(lengths[j] * p for j, p in zip(members, peers, strict=True)) / total
        centred = reward - base
        if scale == "none":
            out.append(centred)
        elif scale == "group":
            out.append(centred / (std(peers, unbiased) + eps))
        elif scale == "batch":
            out.append(centred / (std(everything, unbiased) + eps))
        elif scale == "mean":
            out.append(centred / (mean(peers) + eps) if mean(peers) > 0 else 0.0)
        else:
            assert scale == "others"
            out.append(centred if max(others) == min(others) else centred / (std(others, unbiased) + eps))
    return out


def summed(rewards: Sequence[Sequence[Number]], weights: Sequence[float]) -> list[Number]:
    """The weighted sum over the functions that gave a reward; None if none did."""
    out: list[Number] = []
    for row in rewards:
        given = [w * r for w, r in zip(weights, row, strict=True) if r is not None]
        out.append(math.fsum(given) if given else None)
    return out


def gdpo(
    rewards: Sequence[Sequence[Number]],
    weights: Sequence[float],
    groups: Sequence[int],
    *,
    unbiased: bool = True,
    eps: float = 1e-4,
    **options: object,
) -> list[float]:
    columns = [
        group_advantages(column, groups, unbiased=unbiased, eps=eps, **options)  # type: ignore[arg-type]
        for column in zip(*rewards, strict=True)
    ]
    total = [math.fsum(w * a for w, a in zip(weights, row, strict=True)) for row in zip(*columns, strict=True)]
    scored = [any(r is not None for r in row) for row in rewards]
    counted = [t for t, s in zip(total, scored, strict=True) if s]
    m, d = mean(counted), std(counted, unbiased)
    silent = [all(a == 0 for a in row) for row in zip(*columns, strict=True)]
    return [(t - m) / (d + eps) if not quiet else 0.0 for t, quiet in zip(total, silent, strict=True)]


# ---- tokens: a sequence is a list, None where the mask is False


def returns_to_go(rewards: list[list[Number]], gamma: float) -> list[list[float]]:
    out = []
    for sequence in rewards:
        row = []
        for t in range(len(sequence)):
            later = [r for r in sequence[t:] if r is not None]
            row.append(0.0 if sequence[t] is None else math.fsum(gamma**k * r for k, r in enumerate(later)))
        out.append(row)
    return out


def gae(
    rewards: list[list[Number]], values: list[list[float]], gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    advantages, returns = [], []
    for sequence, vs in zip(rewards, values, strict=True):
        at = [t for t, r in enumerate(sequence) if r is not None]
        a, g = [0.0] * len(sequence), [0.0] * len(sequence)
        following, value = 0.0, 0.0
        for t in reversed(at):
            reward = sequence[t]
            assert reward is not None
            following = reward + gamma * value - vs[t] + gamma * lam * following
            value = vs[t]
            a[t], g[t] = following, following + value
        advantages.append(a)
        returns.append(g)
    return advantages, returns


def process_advantages(
    steps: list[list[Number]], trained: list[list[bool]], groups: list[int], gamma: float = 1.0, **options: object
) -> list[list[float]]:
    """steps: the reward of the step that ends at a token, None if no step ends there."""
    found = [
        (b, t, r)
        for b, row in enumerate(steps)
        for t, r in enumerate(row)
        if r is not None and trained[b][t]
    ]  # fmt: skip
    normalised = group_advantages([r for _, _, r in found], [groups[b] for b, _, _ in found], **options)  # type: ignore[arg-type]
    tokens: list[list[Number]] = [[0.0 if keep else None for keep in row] for row in trained]
    for (b, t, _), a in zip(found, normalised, strict=True):
        tokens[b][t] = a
    return returns_to_go(tokens, gamma)


def optimal_token_advantages(
    rewards: list[list[Number]],
    logps: list[list[float]],
    squares: list[list[float]],
    groups: list[int],
    weights: list[list[float]] | None = None,
) -> list[list[float]]:
    returns = returns_to_go(rewards, 1.0)
    at = [[t for t, r in enumerate(row) if r is not None] for row in rewards]

    def path(b: int, step: int) -> float:
        return math.fsum(
            (1 - 2 * math.exp(logps[b][t]) + squares[b][t]) * (1.0 if weights is None else weights[b][t] ** 2)
            for t in at[b][: step + 1]
        )

    out = [[0.0] * len(row) for row in rewards]
    for b, mine in enumerate(at):
        for step, t in enumerate(mine):
            peers = [c for c, g in enumerate(groups) if g == groups[b] and len(at[c]) > step]
            g = [returns[c][at[c][step]] for c in peers]
            if len(peers) == 1:
                out[b][t] = returns[b][t]
            elif max(g) != min(g):
                w = [path(c, step) for c in peers]
                base = math.fsum(x * y for x, y in zip(g, w, strict=True)) / (math.fsum(w) + 1e-8)
                out[b][t] = returns[b][t] - base
    return out


def whiten(values: list[float], *, unbiased: bool, eps: float, guard: str, shift_mean: bool = True) -> list[float]:
    m = mean(values)
    if max(values) == min(values):
        return [0.0 if shift_mean else m] * len(values)
    d = std(values, unbiased)
    divisor = {"add": math.sqrt(d * d + eps), "floor": math.sqrt(max(d * d, eps)), "std": d + eps}[guard]
    return [(v - m) / divisor + (0.0 if shift_mean else m) for v in values]


# ---- mismatch to the sampler: the log-ratio of each token, NaN where the sampler did not score it


def log_weights(sequence: list[Number]) -> list[float]:
    """Of the trained tokens."""
    return [0.0 if math.isnan(x) else min(max(x, -60.0), 60.0) for x in sequence if x is not None]


def over_sequence(how: str, x: list[float]) -> list[float]:
    """For each token its own number, or that of its sequence."""
    one = {"sum": math.fsum, "mean": mean, "max": max, "min": min}.get(how)
    return x if one is None or not x else [one(x)] * len(x)


def importance_weights(
    sequences: list[list[Number]], level: str, mode: str, low: float, high: float, normalize: bool
) -> list[list[float]]:
    how = {"sequence": "sum", "geometric": "mean"}.get(level, "")
    out = []
    for sequence in sequences:
        w = [math.exp(min(x, 60.0)) for x in over_sequence(how, log_weights(sequence))]
        out.append([min(max(x, low), high) if mode == "truncate" else x if low <= x <= high else 0.0 for x in w])
    counted = [w for row in out for w in (row if level == "token" else row[:1])]
    m = mean(counted) if normalize and any(counted) else 1.0
    return [[w / m for w in row] for row in out]


def rejection_metric(sequences: list[list[Number]], metric: str, over: str) -> list[list[float]]:
    of = {"ratio": lambda x: x, "k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.expm1(x) - x}[metric]
    rows = [over_sequence(over, [of(x) for x in log_weights(sequence)]) for sequence in sequences]
    return [[math.exp(min(x, 60.0)) for x in row] for row in rows] if metric == "ratio" else rows


def kept_by_second_moment(sequences: list[list[Number]], threshold: float) -> list[float]:
    """The squares that stay when the largest are taken away one by one."""
    rest = sorted(x * x for sequence in sequences for x in log_weights(sequence))
    while len(rest) > 1 and not math.fsum(rest) < threshold * len(rest):
        rest.pop()
    return rest


def close(got: torch.Tensor, expected: object, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """Asserts that an fp32 tensor equals the float64 result."""
    assert got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(got.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol)
