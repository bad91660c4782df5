"""Advantages, returns and sampler corrections at random against plain Python: every option, sizes from 2^-60 to 2^60.

Numbers are small multiples of a power of two, so that equal means equal and no bound is met by rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import MANY, few

from grpo_kernels import TokenBatch, group_advantages
from grpo_kernels.rewards.corrections import importance_weights, rejection_mask
from grpo_kernels.rewards.returns import discounted_returns, gae
from support.advantage_oracle import gae as plain_gae
from support.advantage_oracle import group_advantages as plain_advantages
from support.advantage_oracle import returns_to_go

Tensor = torch.Tensor

INF = math.inf


@st.composite
def advantage_calls(draw: st.DrawFn) -> tuple[list[float | None], list[int], dict[str, Any]]:
    unit = 2.0 ** draw(st.integers(-60, 60))
    steps = draw(st.lists(st.one_of(st.integers(-8, 8), st.none()), min_size=1, max_size=14))
    rewards = [None if k is None else k * unit for k in steps]
    groups = draw(st.lists(st.integers(-2, 2), min_size=len(steps), max_size=len(steps)))
    baseline = draw(st.sampled_from(["mean", "leave-one-out", "length", "none"]))
    options: dict[str, Any] = {
        "baseline": baseline,
        "scale": "none" if baseline == "none" else draw(st.sampled_from(["group", "batch", "none", "mean", "others"])),
        "unbiased": draw(st.booleans()),
        "eps": draw(st.sampled_from([1e-4, 1e-6, 1.0])) * unit,
        "singleton": draw(st.sampled_from(["zero", "raw"])),
    }
    if baseline == "length":
        options["lengths"] = [float(x) for x in draw(st.lists(st.integers(0, 3), min_size=len(steps), max_size=len(steps)))]
    return rewards, groups, options


def check_advantages(call: tuple[list[float | None], list[int], dict[str, Any]]) -> None:
    rewards, groups, options = call
    given_rewards = torch.tensor([math.nan if r is None else r for r in rewards], dtype=torch.float64)
    lengths = {"lengths": torch.tensor(options["lengths"])} if "lengths" in options else {}

    def ours(order: list[int]) -> Tensor:
        at = torch.tensor(order)
        ids = torch.tensor(groups)[at]
        own = {k: v[at] for k, v in lengths.items()}
        return group_advantages(given_rewards[at], groups=ids, missing="skip", **options | own)

    order = list(range(len(rewards)))
    got = ours(order)
    if all(r is None for r in rewards):
        assert not got.any()
        return
    want = torch.tensor(plain_advantages(rewards, groups, missing="skip", **options), dtype=torch.float64)
    # A reward may equal the mean by lengths, which is then rounded; otherwise what is 0 is exactly 0.
    residue = 1e-15 * float(want.abs().max()) if options["baseline"] == "length" else 0.0
    assert residue or torch.equal(got == 0, want.float() == 0), f"zeros: {got.tolist()}, not {want.tolist()}"
    assert ((got.double() - want).abs() <= 1e-6 * want.abs() + residue).all(), f"{got.tolist()}, not {want.tolist()}"
    # The order changes only the last bits of a sum.
    torch.testing.assert_close(ours(order[::-1]).flip(0), got, rtol=1e-6, atol=residue)


@st.composite
def tokens(draw: st.DrawFn) -> tuple[list[list[int | None]], float, float]:
    """Sequences of steps, None where the mask is False; gamma and lambda."""
    share = st.sampled_from([0.0, 0.5, 0.99, 1.0])
    return (
        draw(st.lists(st.lists(st.one_of(st.integers(-8, 8), st.none()), max_size=6), min_size=1, max_size=4)),
        draw(share),
        draw(share),
    )


def check_returns(call: tuple[list[list[int | None]], float, float]) -> None:
    sequences, gamma, lam = call
    rewards: list[list[float | None]] = [[None if k is None else k / 8 for k in row] for row in sequences]
    values = [[(3 * i + b) % 5 / 4 for i in range(len(row))] for b, row in enumerate(sequences)]
    flat = [r for row in rewards for r in row]
    offsets = torch.tensor([0, *(len(row) for row in rewards)]).cumsum(0)
    mask = torch.tensor([r is not None for r in flat], dtype=torch.bool)
    given_rewards = torch.tensor([math.nan if r is None else r for r in flat])
    given_values = torch.where(mask, torch.tensor([v for row in values for v in row]), math.inf)
    inside = torch.arange(max(len(row) for row in rewards)) < offsets.diff()[:, None]

    def padded(x: Tensor) -> Tensor:
        out = torch.zeros(inside.shape, dtype=x.dtype)
        out[inside] = x
        return out

    def check(got: Tensor, want: list[list[float]]) -> None:
        exact = torch.tensor([x for row in want for x in row], dtype=torch.float64)
        assert ((got.double() - exact).abs() <= 1e-6 * exact.abs() + 1e-12).all(), f"{got.tolist()}, not {exact.tolist()}"
        assert not got[~mask].any()

    whole = returns_to_go(rewards, gamma)
    check(discounted_returns(given_rewards, gamma=gamma, mask=mask, cu_seqlens=offsets), whole)
    check(discounted_returns(padded(given_rewards), gamma=gamma, mask=padded(mask))[inside], whole)
    wanted = plain_gae(rewards, values, gamma, lam)
    packed = gae(given_rewards, given_values, gamma=gamma, lam=lam, mask=mask, cu_seqlens=offsets)
    as_padded = gae(padded(given_rewards), padded(given_values), gamma=gamma, lam=lam, mask=padded(mask))
    for a, b, want in zip(packed, as_padded, wanted, strict=True):
        check(a, want)
        check(b[inside], want)


BOUNDS = st.sampled_from([(0.0, 2.03), (0.53, 5.1), (0.97, 1.06), (0.0, INF)])


@st.composite
def corrections(draw: st.DrawFn) -> tuple[list[list[Any]], dict[str, Any], dict[str, Any]]:
    """Log-weights in eighths, None where masked, NaN where not scored; options of both functions."""
    step = st.one_of(st.integers(-12, 12).map(lambda k: k / 8), st.sampled_from([None, math.nan, 1000.0, -1000.0]))
    sequences = draw(st.lists(st.lists(step, max_size=5), min_size=1, max_size=4))
    low, high = draw(BOUNDS)
    weights = {
        "level": draw(st.sampled_from(["token", "sequence", "geometric"])),
        "mode": draw(st.sampled_from(["truncate", "mask"])),
        "normalize": draw(st.booleans()),
        "low": low,
        "high": high,
    }
    rejection = {
        "metric": draw(st.sampled_from(["ratio", "k1", "k2", "k3"])),
        "over": draw(st.sampled_from(["token", "sum", "mean", "max", "min"])),
        "low": draw(st.sampled_from([-INF, -0.53, 0.033])),
        "high": draw(st.sampled_from([0.57, 2.03])),
    }
    return sequences, weights, rejection


def check_corrections(call: tuple[list[list[Any]], dict[str, Any], dict[str, Any]]) -> None:
    sequences, weights, rejection = call
    rows = [x for row in sequences for x in row]
    mask = torch.tensor([x is not None for x in rows], dtype=torch.bool)
    sampler = torch.tensor([math.inf if x is None else -2.0 - x for x in rows])
    lengths = torch.tensor([0, *(len(row) for row in sequences)])
    batch = TokenBatch(
        torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows)), mask=mask, old_logps=torch.full((len(rows),), -2.0),
        sampler_logps=sampler, cu_seqlens=lengths.cumsum(0),
    )  # fmt: skip

    def check(got: Tensor, want: list[list[float]]) -> None:
        exact = torch.tensor([x for row in want for x in row], dtype=torch.float64)
        assert ((got.double() - exact).abs() <= 1e-6 * exact.abs() + 1e-44).all(), f"{got.tolist()}, not {exact.tolist()}"

    check(importance_weights(batch, **weights), plain_weights(sequences, **weights))
    check(rejection_mask(batch, **rejection), plain_mask(sequences, **rejection))


def scored(x: float) -> float:
    return 0.0 if math.isnan(x) else min(max(x, -60.0), 60.0)


def plain_weights(
    sequences: list[list[Any]], level: str, mode: str, normalize: bool, low: float, high: float
) -> list[list[float]]:
    def weight(x: float) -> float:
        w = math.exp(min(x, 60.0))
        return min(max(w, low), high) if mode == "truncate" else w if low <= w <= high else 0.0

    rows, counted = [], []
    for row in sequences:
        own = [scored(x) for x in row if x is not None]
        if level == "token":
            weights = iter([weight(x) for x in own])
            rows.append([0.0 if x is None else next(weights) for x in row])
            counted += [w for w, x in zip(rows[-1], row, strict=True) if x is not None]
        else:
            w = weight(math.fsum(own) / (len(own) if level == "geometric" and own else 1))
            rows.append([0.0 if x is None else w for x in row])
            counted += [w] if own else []
    mean = math.fsum(counted) / len(counted) if counted else 0.0
    return [[w / mean if normalize and mean > 0 else w for w in row] for row in rows]


def plain_mask(sequences: list[list[Any]], metric: str, over: str, low: float, high: float) -> list[list[float]]:
    out = []
    for row in sequences:
        logs = [scored(x) for x in row if x is not None]
        terms = [{"ratio": x, "k1": -x, "k2": x * x / 2, "k3": math.expm1(x) - x}[metric] for x in logs]
        if over != "token" and terms:
            together = {"sum": math.fsum, "mean": lambda t: math.fsum(t) / len(t), "max": max, "min": min}[over](terms)  # type: ignore[operator]
            terms = [together] * len(terms)
        if metric == "ratio":
            terms = [math.exp(min(x, 60.0)) for x in terms]
        kept = iter([float(low <= x <= high) for x in terms])
        out.append([0.0 if x is None else next(kept) for x in row])
    return out


CHECKS = {
    "advantages": (advantage_calls(), check_advantages),
    "returns": (tokens(), check_returns),
    "corrections": (corrections(), check_corrections),
}


def run(what: str, examples: int) -> None:
    strategy, check = CHECKS[what]

    @few(examples)
    @given(strategy)
    def every(call: Any) -> None:
        check(call)

    every()


@pytest.mark.parametrize("what", CHECKS)
def test_some_random_cases_match_the_oracle(what: str) -> None:
    run(what, 80)


@pytest.mark.nightly
@pytest.mark.parametrize("what", CHECKS)
def test_many(what: str) -> None:
    run(what, MANY)
