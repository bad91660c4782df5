"""Sampler mismatch: weights, masks and metrics against plain Python floats and the trainers' formulas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from grpo_kernels import TokenBatch, layout
from grpo_kernels.rewards.corrections import (
    correction_metrics,
    importance_weights,
    off_policy_sequence_mask,
    rejection_mask,
    second_moment_mask,
    without_truncated,
)

Tensor = torch.Tensor
NAN, INF = math.nan, math.inf

LENGTHS = (6, 0, 1, 9, 4, 5, 3)
SPREAD = (0.3, 0.0, 1.0, 0.1, 1.5, 0.02, 0.6)  # of the log-ratios, by sequence
WIDTH = 10
LAYOUTS = ("padded", "packed")


@dataclasses.dataclass
class Token:
    old: float
    sampler: float
    trained: bool

    @property
    def x(self) -> float:
        """log w"""
        return 0.0 if math.isnan(self.sampler) else self.old - self.sampler


Rows = list[list[Token]]


def make_rows(seed: int = 0) -> Rows:
    """Sequences of all kinds: empty, one token, holes in the mask, one fully masked, unscored tokens, poison where masked."""
    g = torch.Generator().manual_seed(seed)
    rows: Rows = []
    for length, spread in zip(LENGTHS, SPREAD, strict=True):
        sampler = -3.0 * torch.rand(length, generator=g)
        old = sampler + spread * torch.randn(length, generator=g)
        rows.append([Token(float(o), float(s), True) for o, s in zip(old, sampler, strict=True)])
    for b, t, old, sampler in ((0, 2, NAN, INF), (3, 0, -INF, 1e30), (3, 8, 5.0, NAN), (4, 1, 1e4, -1e4)):
        rows[b][t] = Token(old, sampler, False)
    for token in rows[6]:
        token.trained = False
    rows[3][4].sampler = rows[2][0].sampler = NAN
    return rows


def make_batch(rows: Rows, layout: str, advantages: Any = None, **changes: Any) -> TokenBatch:
    per_token: dict[str, list[list[Any]]] = {
        name: [[getattr(token, name) for token in row] for row in rows] for name in ("old", "sampler", "trained")
    }
    if layout == "packed":
        old, sampler, mask = (torch.tensor([v for row in per_token[k] for v in row]) for k in ("old", "sampler", "trained"))
        offsets = [0]
        for row in rows:
            offsets.append(offsets[-1] + len(row))
        cu_seqlens = torch.tensor(offsets)
    else:
        old, sampler, mask = (
            torch.tensor([row + [pad] * (WIDTH - len(row)) for row in per_token[k]])
            for k, pad in (("old", NAN), ("sampler", 7.0), ("trained", False))
        )
        cu_seqlens = None
    fields: dict[str, Any] = (
        dict(mask=mask.bool(), old_logps=old.float(), sampler_logps=sampler.float(), cu_seqlens=cu_seqlens) | changes
    )
    if advantages is None:
        advantages = torch.ones(len(rows))
    return TokenBatch(torch.zeros(fields["mask"].shape, dtype=torch.int64), advantages, **fields)


def unpack(values: Tensor, rows: Rows) -> list[list[float]]:
    """Per sequence, and a check that padding holds exact zeros."""
    if values.dim() == 1:
        return [part.tolist() for part in values.split([len(row) for row in rows])]
    for b, row in enumerate(rows):
        assert values[b, len(row) :].tolist() == [0.0] * (values.shape[1] - len(row))
    return [values[b, : len(row)].tolist() for b, row in enumerate(rows)]


def check(got: Tensor, rows: Rows, expected: Callable[[list[float]], list[float]]) -> list[float]:
    """`expected` maps the log-ratios of a sequence's trained tokens to their values; returns all of those."""
    assert got.dtype == torch.float32 and not got.requires_grad
    every = []
    for values, row in zip(unpack(got, rows), rows, strict=True):
        kept = [v for v, token in zip(values, row, strict=True) if token.trained]
        assert [v for v, token in zip(values, row, strict=True) if not token.trained] == [0.0] * (len(row) - len(kept))
        x = [token.x for token in row if token.trained]
        wanted = expected(x) if x else []
        assert kept == pytest.approx(wanted, rel=1e-6, abs=1e-12)
        every += wanted
    return every


def clip(w: float, low: float, high: float) -> float:
    return min(max(w, low), high)


def band(w: float, low: float, high: float) -> float:
    return w if low <= w <= high else 0.0


def at_level(level: str, x: list[float]) -> list[float]:
    """The untouched weights of a sequence."""
    if level == "token":
        return [math.exp(v) for v in x]
    total = math.fsum(x)
    return [math.exp(total if level == "sequence" else total / len(x))] * len(x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("low, high", [(0.0, 1.02), (0.6, 1.5), (0.9, INF), (0.0, INF)])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights(level: str, mode: str, low: float, high: float, layout: str) -> None:
    rows = make_rows()
    got = importance_weights(make_batch(rows, layout), level=level, mode=mode, low=low, high=high)
    treat = clip if mode == "truncate" else band
    every = check(got, rows, lambda x: [treat(w, low, high) for w in at_level(level, x)])
    touched = [v in (0.0, low, high) for v in every]
    assert any(touched) != (low == 0 and high == INF) and not all(touched)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalised_weights(level: str, mode: str, layout: str) -> None:
    """Mean over trained tokens, or of one weight per sequence that has any."""
    rows = make_rows()
    treat = clip if mode == "truncate" else band
    logs = [[t.x for t in row if t.trained] for row in rows]
    weights = [[treat(w, 0.0, 1.5) for w in at_level(level, x)] for x in logs if x]
    units = [w for row in weights for w in (row if level == "token" else row[:1])]
    mean = math.fsum(units) / len(units)
    assert abs(mean - 1) > 0.01
    got = importance_weights(make_batch(rows, layout), level=level, mode=mode, high=1.5, normalize=True)
    check(got, rows, lambda x: [treat(w, 0.0, 1.5) / mean for w in at_level(level, x)])


def test_nothing_to_normalise() -> None:
    rows = make_rows()
    rejected = importance_weights(make_batch(rows, "padded"), mode="mask", low=1e6, high=1e7, normalize=True)
    assert not rejected.any() and torch.isfinite(rejected).all()
    none = make_batch(rows, "padded", mask=torch.zeros(len(rows), WIDTH, dtype=torch.bool))
    assert not importance_weights(none, level="sequence", normalize=True).any()


def metric_of(metric: str, x: float) -> float:
    return {"ratio": x, "k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[metric]


def over_of(over: str, values: list[float]) -> list[float]:
    if over == "token":
        return values
    total = {"sum": math.fsum, "mean": lambda v: math.fsum(v) / len(v), "max": max, "min": min}[over](values)
    return [total] * len(values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("over", ["token", "sum", "mean", "max", "min"])
@pytest.mark.parametrize("metric", ["ratio", "k1", "k2", "k3"])
def test_rejection_mask(metric: str, over: str, layout: str) -> None:
    rows = make_rows()
    batch = make_batch(rows, layout)
    found = []
    for row in rows:
        x = [token.x for token in row if token.trained]
        found += over_of(over, [metric_of(metric, v) for v in x]) if x else []
    found = sorted(math.exp(v) if metric == "ratio" else v for v in set(found))
    # Bounds half-way between two values that occur, so that rounding decides nothing.
    low = (found[0] + found[1]) / 2
    high = (found[-2] + found[-1]) / 2
    for bounds in ({"low": low}, {"high": high}, {"low": low, "high": high}):

        def expected(x: list[float], bounds: dict[str, float] = bounds) -> list[float]:
            values = over_of(over, [metric_of(metric, v) for v in x])
            values = [math.exp(v) if metric == "ratio" else v for v in values]
            return [float(bounds.get("low", -INF) <= v <= bounds.get("high", INF)) for v in values]

        every = check(rejection_mask(batch, metric=metric, over=over, **bounds), rows, expected)
        assert 0 < sum(every) < len(every)


def test_bounds_are_inclusive() -> None:
    rows = [[Token(-1.0, -1.5, True), Token(-1.0, -0.5, True)]]  # log w = 0.5, -0.5
    batch = make_batch(rows, "padded")
    assert rejection_mask(batch, metric="k1", low=-0.5, high=0.5)[0, :2].tolist() == [1, 1]
    assert rejection_mask(batch, metric="k1", low=-0.4999, high=0.5)[0, :2].tolist() == [0, 1]
    assert rejection_mask(batch, metric="k2", high=0.125)[0, :2].tolist() == [1, 1]
    assert importance_weights(batch, mode="mask", low=math.exp(-0.5), high=math.exp(0.5))[0, :2].all()


# ---- the trainers' rules, written per sequence from the log-ratios x


def product(x: list[float]) -> float:
    return math.exp(math.fsum(x))


def geometric(x: list[float]) -> float:
    return math.exp(math.fsum(x) / len(x))


def all_or_none(keep: bool, x: list[float]) -> list[float]:
    return [float(keep)] * len(x)


def exchanged(batch: TokenBatch) -> TokenBatch:
    return dataclasses.replace(batch, old_logps=batch.sampler_logps, sampler_logps=batch.old_logps)


#: name -> (our call, their rule for a sequence with trained tokens)
TRAINERS: dict[str, tuple[Callable[[TokenBatch], Tensor], Callable[[list[float]], list[float]]]] = {
    "TRL token_truncate": (
        lambda b: importance_weights(b, high=1.3),
        lambda x: [min(math.exp(v), 1.3) for v in x],
    ),
    "OpenRLHF TIS": (
        lambda b: importance_weights(b, low=0.5, high=1.3),
        lambda x: [clip(math.exp(v), 0.5, 1.3) for v in x],
    ),
    "IcePop": (
        lambda b: importance_weights(b, mode="mask", low=0.5, high=1.3),
        lambda x: [band(math.exp(v), 0.5, 1.3) for v in x],
    ),
    "verl sequence": (
        lambda b: importance_weights(b, level="sequence", high=1.3),
        lambda x: [min(product(x), 1.3)] * len(x),
    ),
    "TRL sequence_mask": (
        lambda b: importance_weights(b, level="sequence", mode="mask", high=1.3),
        lambda x: [product(x) if product(x) <= 1.3 else 0.0] * len(x),
    ),
    "AReaL geometric weight": (
        lambda b: importance_weights(b, level="geometric", mode="mask", low=0.7, high=1.3),
        lambda x: [band(geometric(x), 0.7, 1.3)] * len(x),
    ),
    "SkyRL geometric": (
        lambda b: rejection_mask(b, over="mean", low=0.7, high=1.3),
        lambda x: all_or_none(0.7 <= geometric(x) <= 1.3, x),
    ),
    "SkyRL product": (
        lambda b: rejection_mask(b, over="sum", low=0.5, high=2.0),
        lambda x: all_or_none(0.5 <= product(x) <= 2.0, x),
    ),
    "OpenRLHF seq-mask-TIS": (
        lambda b: rejection_mask(b, over="mean", low=0.7, high=1.3) * importance_weights(b, high=INF),
        lambda x: [math.exp(v) if 0.7 <= geometric(x) <= 1.3 else 0.0 for v in x],
    ),
    "SkyRL outlier veto": (
        lambda b: rejection_mask(b, over="min", low=0.6) * rejection_mask(b, over="max", high=1.6),
        lambda x: all_or_none(all(0.6 <= math.exp(v) <= 1.6 for v in x), x),
    ),
    "slime veto": (
        lambda b: rejection_mask(b, over="min", low=0.6),
        lambda x: all_or_none(all(math.exp(v) >= 0.6 for v in x), x),
    ),
    "verl token_k1 0.8_1.5": (
        lambda b: rejection_mask(b, metric="k1", low=math.log(0.8), high=math.log(1.5)),
        lambda x: [float(0.8 <= 1 / math.exp(v) <= 1.5) for v in x],
    ),
    "verl seq_mean_k1 1.2": (
        lambda b: rejection_mask(b, metric="k1", over="mean", low=math.log(1 / 1.2), high=math.log(1.2)),
        lambda x: all_or_none(1 / 1.2 <= geometric(x) <= 1.2, x),
    ),
    "verl seq_max_k2 and token_k3": (
        lambda b: rejection_mask(b, metric="k2", over="max", high=0.5) * rejection_mask(b, metric="k3", high=0.01),
        lambda x: [float(max(u * u / 2 for u in x) <= 0.5 and math.exp(v) - 1 - v <= 0.01) for v in x],
    ),
    "AReaL kl_k1, sum in [-0.3, 0.6]": (
        lambda b: rejection_mask(b, metric="k1", over="sum", low=-0.6, high=0.3),
        lambda x: all_or_none(-0.3 <= math.fsum(x) <= 0.6, x),
    ),
    "AReaL kl_k3, mean": (
        lambda b: rejection_mask(exchanged(b), metric="k3", over="mean", high=0.1),
        lambda x: all_or_none(math.fsum(math.exp(-v) - 1 + v for v in x) / len(x) <= 0.1, x),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_rules(name: str, layout: str) -> None:
    ours, theirs = TRAINERS[name]
    rows = make_rows()
    got = ours(make_batch(rows, layout))
    every = check(got, rows, theirs)
    assert len(set(every)) > 1


def test_trl_off_policy_mask() -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    rows = make_rows()
    advantages = torch.tensor([-1.0, -1.0, -2.0, -0.5, 1.0, -0.1, -1.0])
    batch = make_batch(rows, "padded", advantages)
    assert batch.mask is not None and batch.old_logps is not None and batch.sampler_logps is not None
    # TRL multiplies by the mask, so it may not see the poison that we put there.
    logps, sampler = (torch.where(batch.mask, x, 0.0) for x in (batch.old_logps, batch.sampler_logps))
    seen = set()
    for delta in (-0.05, 0.0, 0.02, 0.3):
        expected = trainer.get_off_policy_mask(advantages[:, None], logps, sampler, batch.mask.int(), delta)
        got = off_policy_sequence_mask(batch, batch.old_logps, delta=delta)
        assert torch.equal(got, expected.float() * batch.mask)
        seen.add(int(got.sum()))
    assert len(seen) > 1


@pytest.mark.parametrize("option", ["token", "seq_sum", "seq_mean", "seq_max"])
@pytest.mark.parametrize("metric", ["k1", "k2", "k3"])
def test_verl_rejection(option: str, metric: str) -> None:
    verl = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", exc_type=ImportError)
    if (option, metric) == ("seq_max", "k1"):
        pytest.skip("verl has no seq_max_k1")
    batch, x, mask = scored(make_rows())
    seen = set()
    for u in (1.001, 1.1, 3.0):
        upper = u if metric == "k1" else u - 1.0
        expected, _ = verl.compute_rollout_rejection_mask(x, mask, f"{option}_{metric}", upper)
        bounds = {"low": -math.log(u), "high": math.log(u)} if metric == "k1" else {"high": upper}
        got = rejection_mask(batch, metric=metric, over=option.split("_")[-1], **bounds)
        assert torch.equal(got, expected)
        seen.add(int(got.sum()))
    assert len(seen) > 1


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("threshold", [1.2, "0.7_1.4"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_weights(level: str, threshold: float | str, normalize: bool) -> None:
    verl = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", exc_type=ImportError)
    batch, x, mask = scored(make_rows())
    expected, _ = verl.compute_rollout_correction_weights(x, mask, level, threshold, normalize)
    low, high = (0.0, threshold) if isinstance(threshold, float) else map(float, threshold.split("_"))
    mode = "truncate" if isinstance(threshold, float) else "mask"
    got = importance_weights(batch, level=level, mode=mode, low=low, high=high, normalize=normalize)
    torch.testing.assert_close(got, expected * mask, rtol=1e-5, atol=0)
    assert got.unique().numel() > 3


def scored(rows: Rows) -> tuple[TokenBatch, Tensor, Tensor]:
    """The batch without NaN or poison, which verl lets through, with log w and the mask as it wants them."""
    batch = make_batch(rows, "padded")
    assert batch.mask is not None and batch.old_logps is not None and batch.sampler_logps is not None
    old = torch.where(batch.mask, batch.old_logps, 0.0)
    sampler = torch.where(batch.mask & ~batch.sampler_logps.isnan(), batch.sampler_logps, old)
    return dataclasses.replace(batch, old_logps=old, sampler_logps=sampler), old - sampler, batch.mask.float()


# ---- off-policy sequence mask


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("delta", [0.0, 0.05, 0.5])
def test_off_policy_sequence_mask(delta: float, layout: str) -> None:
    rows = make_rows()
    advantages = [1.0, -1.0, -1.0, -0.5, -2.0, -0.3, -1.0]
    batch = make_batch(rows, layout, torch.tensor(advantages))
    assert batch.old_logps is not None
    got = off_policy_sequence_mask(batch, batch.old_logps, delta=delta)
    assert torch.equal(got, off_policy_sequence_mask(batch, batch.old_logps.reshape(-1), delta=delta))
    every = []
    for values, row, a in zip(unpack(got, rows), rows, advantages, strict=True):
        x = [t.x for t in row if t.trained]
        keep = a >= 0 or not x or math.fsum(-v for v in x) / len(x) <= delta
        assert values == [float(keep and t.trained) for t in row]
        every += values
    assert 0 < sum(every) < sum(t.trained for row in rows for t in row)


def test_off_policy_mask_with_advantages_per_token() -> None:
    rows = [[Token(-2.0, -1.0, True)] * 3]
    batch = make_batch(rows, "packed", torch.tensor([1.0, -1.0, 0.0]))
    assert batch.old_logps is not None
    assert off_policy_sequence_mask(batch, batch.old_logps, delta=0.5).tolist() == [1, 0, 1]
    assert off_policy_sequence_mask(batch, batch.old_logps, delta=1.0).tolist() == [1, 1, 1]


def test_off_policy_mask_without_sampler() -> None:
    rows = [[Token(-1.0, 0.0, True)] * 2, [Token(-1.0, 0.0, True)] * 2]
    batch = make_batch(rows, "padded", torch.tensor([-1.0, -1.0]), sampler_logps=None)
    logps = torch.full((2, WIDTH), -1.0)
    logps[1] = -3.0
    assert off_policy_sequence_mask(batch, logps, delta=0.5)[:, :2].tolist() == [[1, 1], [0, 0]]
    on_policy = make_batch(rows, "padded", torch.tensor([-1.0, -1.0]), sampler_logps=None, old_logps=None)
    assert off_policy_sequence_mask(on_policy, logps, delta=0.0)[:, :2].all()
    assert not off_policy_sequence_mask(batch, logps.requires_grad_(), delta=0.5).requires_grad


# ---- M2PO


def kept_by_m2po(squares: list[float], threshold: float) -> int:
    """How many stay when the largest are taken away one by one."""
    rest = sorted(squares)
    while len(rest) > 1 and not math.fsum(rest) < threshold * len(rest):
        rest.pop()
    return len(rest)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("threshold", [1e-9, 0.003, 0.04, 0.3, 100.0])
def test_second_moment_mask(threshold: float, layout: str) -> None:
    rows = make_rows()
    squares = [t.x**2 for row in rows for t in row if t.trained]
    count = kept_by_m2po(squares, threshold)
    bound = sorted(squares)[count - 1]  # the squares differ, but for the two unscored tokens with 0
    if threshold == 1e-9:
        assert count == 2
    got = second_moment_mask(make_batch(rows, layout), threshold=threshold)
    every = check(got, rows, lambda x: [float(v * v <= bound) for v in x])
    assert sum(every) == count


def test_second_moment_keeps_one() -> None:
    rows = [[Token(-1.0, -2.0, True), Token(-1.0, -2.0, True), Token(-1.0, -3.0, True), Token(NAN, NAN, False)]]
    batch = make_batch(rows, "padded")
    assert second_moment_mask(batch, threshold=0.5)[0].tolist() == [1] + [0] * 9  # the mean must be below, not at it
    assert second_moment_mask(batch, threshold=1.0)[0].tolist() == [1] + [0] * 9
    assert second_moment_mask(batch, threshold=1.5)[0].tolist() == [1, 1] + [0] * 8
    assert second_moment_mask(batch, threshold=2.1)[0].tolist() == [1, 1, 1] + [0] * 7
    nothing = make_batch(rows, "padded", mask=torch.zeros(1, WIDTH, dtype=torch.bool))
    assert not second_moment_mask(nothing, threshold=1.0).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-32, 32), st.booleans()), max_size=40), st.integers(1, 1000))
def test_second_moment_in_general(eighths: list[tuple[int, bool]], sixtyfourths: int) -> None:
    """In numbers that binary fractions hold exactly, ties included."""
    tokens, threshold = [(x / 8, trained) for x, trained in eighths], sixtyfourths / 64
    rows = [[Token(x, 0.0, trained) for x, trained in tokens]]
    got = second_moment_mask(make_batch(rows, "packed", torch.ones(1)), threshold=threshold)
    squares = [x * x for x, trained in tokens if trained]
    kept = [x * x for (x, _), keep in zip(tokens, got.tolist(), strict=True) if keep]
    assert len(kept) == (kept_by_m2po(squares, threshold) if squares else 0)
    assert sorted(kept) == sorted(squares)[: len(kept)]


# ---- truncated completions


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_without_truncated(dtype: torch.dtype) -> None:
    finished = torch.tensor([1, 0, 1, 0]).to(dtype)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0], [0, 0, 0]]).to(dtype)
    got = without_truncated(mask, finished)
    assert got.dtype == torch.bool and got.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]]
    packed = without_truncated(torch.tensor([1, 1, 1, 0, 1, 1]).to(dtype), finished, cu_seqlens=torch.tensor([0, 2, 3, 5, 6]))
    assert packed.dtype == torch.bool and packed.tolist() == [1, 1, 0, 0, 1, 0]


# ---- metrics


@pytest.mark.parametrize("layout", LAYOUTS)
def test_correction_metrics(layout: str) -> None:
    rows = make_rows()
    batch = make_batch(rows, layout)
    weights = importance_weights(batch, mode="mask", low=0.7, high=1.3)
    trained = [t for row in rows for t in row if t.trained]
    w, n = [math.exp(t.x) for t in trained], len(trained)
    mean = math.fsum(w) / n
    totals = [[t.x for t in row if t.trained] for row in rows if any(t.trained for t in row)]
    v = [band(u, 0.7, 1.3) for u in w]
    expected = {
        "ratio_mean": mean,
        "ratio_min": min(w),
        "ratio_max": max(w),
        "ratio_std": math.sqrt(math.fsum((u - mean) ** 2 for u in w) / n),
        "share_below": sum(u < 0.7 for u in w) / n,
        "share_above": sum(u > 1.3 for u in w) / n,
        "ess": math.fsum(v) ** 2 / (n * math.fsum(u * u for u in v)),
        "share_rejected": sum(u == 0 for u in v) / n,
        "kl_k1": math.fsum(-t.x for t in trained) / n,
        "kl_k3": math.fsum(math.exp(t.x) - 1 - t.x for t in trained) / n,
        "chi2_token": math.fsum(u * u for u in w) / n - 1,
        "abs_log_ratio_mean": math.fsum(abs(t.x) for t in trained) / n,
        "abs_log_ratio_max": max(abs(t.x) for t in trained),
        "share_unscored": 2 / n,
        "log_ppl_difference": math.fsum(-math.fsum(x) / len(x) for x in totals) / len(totals),
        "chi2_sequence": math.fsum(math.exp(2 * math.fsum(x)) for x in totals) / len(totals) - 1,
    }
    got = correction_metrics(batch, weights, low=0.7, high=1.3)
    assert set(got) == set(expected)
    for name, value in got.items():
        assert value.shape == () and value.dtype == torch.float32
        assert float(value) == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name
    alone = correction_metrics(batch)
    assert set(expected) - set(alone) == {"share_below", "share_above", "share_rejected"}
    assert float(alone["ess"]) == pytest.approx(math.fsum(w) ** 2 / (n * math.fsum(u * u for u in w)), rel=1e-5)


def test_metrics_of_known_batches() -> None:
    same = [[Token(-1.0, -1.0, True)] * 3, [Token(-2.0, -2.0, True)] * 2]
    got = correction_metrics(make_batch(same, "padded"))
    ones = {"ratio_mean", "ratio_min", "ratio_max", "ess"}
    assert {name: float(value) for name, value in got.items()} == {name: float(name in ones) for name in got}
    rows = make_rows()
    nothing = make_batch(rows, "padded", mask=torch.zeros(len(rows), WIDTH, dtype=torch.bool))
    got = correction_metrics(nothing, torch.ones(len(rows), WIDTH), low=0.5, high=2.0)
    assert all(float(value) == 0 for value in got.values())
    one = correction_metrics(make_batch(same, "padded"), torch.eye(2, WIDTH))  # two weights of five tokens
    assert float(one["ess"]) == pytest.approx(2 / 5) and float(one["share_rejected"]) == pytest.approx(3 / 5)


def test_metrics_without_sequences() -> None:
    x = torch.randn(6)
    batch = TokenBatch(torch.zeros(6, dtype=torch.int64), torch.ones(6), old_logps=x, sampler_logps=x - 1)
    got = correction_metrics(batch)
    assert "chi2_sequence" not in got and "log_ppl_difference" not in got
    assert float(got["kl_k1"]) == pytest.approx(-1, rel=1e-6)


# ---- properties of all corrections

CALLS: dict[str, Callable[[TokenBatch], Any]] = {
    **{
        f"weights, {level}, {mode}{', normalised' * normalize}": lambda b, a=(level, mode, normalize): importance_weights(
            b, level=a[0], mode=a[1], high=1.5, normalize=a[2]
        )
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "mask")
        for normalize in (False, True)
    },
    **{
        f"rejection, {metric}, {over}": lambda b, a=(metric, over): rejection_mask(
            b, metric=a[0], over=a[1], low=-0.5, high=1.2
        )
        for metric in ("ratio", "k1", "k2", "k3")
        for over in ("token", "sum", "mean", "max", "min")
    },
    "off-policy": lambda b: off_policy_sequence_mask(b, b.old_logps, delta=0.1),
    "second moment": lambda b: second_moment_mask(b, threshold=0.04),
    "metrics": lambda b: torch.stack(list(correction_metrics(b, low=0.5, high=2.0).values())),
}


@pytest.mark.parametrize("name", CALLS)
def test_padded_equals_packed(name: str) -> None:
    rows = make_rows()
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0])
    padded, packed = (CALLS[name](make_batch(rows, layout, advantages)) for layout in LAYOUTS)
    if name == "metrics":
        torch.testing.assert_close(padded, packed, rtol=1e-6, atol=1e-9)
    else:
        a, b = ([v for row in unpack(x, rows) for v in row] for x in (padded, packed))
        assert a == pytest.approx(b, rel=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_masked_has_no_effect(name: str) -> None:
    rows = make_rows()
    batch = make_batch(rows, "padded")
    assert batch.mask is not None and batch.old_logps is not None and batch.sampler_logps is not None
    clean = dataclasses.replace(
        batch,
        old_logps=torch.where(batch.mask, batch.old_logps, -1.0),
        sampler_logps=torch.where(batch.mask, batch.sampler_logps, -1.0),
    )
    assert torch.equal(CALLS[name](batch), CALLS[name](clean))


@pytest.mark.parametrize("name", CALLS)
def test_everything_stays_finite(name: str) -> None:
    wild = [-INF, INF, NAN, -1e30, 1e30, -200.0, 0.0, -1e-30]
    pairs = [(o, s) for o in wild for s in wild]
    batch = make_batch([[Token(o, s, True) for o, s in pairs[i::8]] for i in range(8)], "padded", -torch.ones(8))
    got = CALLS[name](batch)
    assert torch.isfinite(got).all()
    unbounded = importance_weights(batch, level="sequence", high=INF)
    assert torch.isfinite(unbounded).all() and unbounded.max() > 1e20


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_empty_batches(name: str, layout: str) -> None:
    for rows in ([], [[]], [[], []]):
        batch = make_batch(rows, "packed", torch.zeros(len(rows)))
        if layout == "padded":
            batch = TokenBatch(
                torch.zeros((len(rows), 0), dtype=torch.int64),
                torch.zeros(len(rows)),
                old_logps=torch.zeros(len(rows), 0),
                sampler_logps=torch.zeros(len(rows), 0),
            )
        got = CALLS[name](batch)
        assert got.shape == batch.targets.shape or name == "metrics"
        assert not got.any()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(len(LENGTHS))), st.sampled_from([n for n in CALLS if n != "metrics"]))
def test_order_of_sequences(seed: int, order: list[int], name: str) -> None:
    """Each sequence keeps its numbers wherever it stands; those that need no look at the others also keep them alone."""
    rows = make_rows(seed)
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0])
    whole = unpack(CALLS[name](make_batch(rows, "packed", advantages)), rows)
    moved = [rows[i] for i in order]
    got = unpack(CALLS[name](make_batch(moved, "packed", advantages[order])), moved)
    for i, values in zip(order, got, strict=True):
        assert values == pytest.approx(whole[i], rel=1e-6)
    if "normalised" not in name and name != "second moment":
        for i in order:
            alone = CALLS[name](make_batch([rows[i]], "packed", advantages[i : i + 1]))
            assert alone.tolist() == whole[i]


@pytest.mark.parametrize("name", CALLS)
def test_corrections_do_not_wait_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: an operation that would make the host wait for a GPU raises. (Packed rows share the code but for
    segment_reduce, which has no fake.)"""
    monkeypatch.setattr(layout, "values_are_checked", lambda tensor: False)
    with FakeTensorMode():
        x = torch.zeros(3, 5)
        fields = dict(old_logps=x, sampler_logps=x.clone(), mask=torch.ones(3, 5, dtype=torch.bool))
        batch = TokenBatch(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3), **fields)
        CALLS[name](batch)
        with pytest.raises(DataDependentOutputException):
            bool(x.any())


# ---- bad input


def good() -> TokenBatch:
    return make_batch(make_rows(), "padded")


def no_sequences() -> TokenBatch:
    x = torch.zeros(6)
    return TokenBatch(torch.zeros(6, dtype=torch.int64), x, old_logps=x, sampler_logps=x)


BAD: list[tuple[str, Callable[[], Any]]] = [
    (r"level='batch': .*geometric", lambda: importance_weights(good(), level="batch")),
    (r"mode='clip': .*truncate", lambda: importance_weights(good(), mode="clip")),
    (r"low=-0\.1: .*>= 0", lambda: importance_weights(good(), low=-0.1)),
    (r"low=nan", lambda: importance_weights(good(), low=NAN)),
    (r"low=inf", lambda: importance_weights(good(), low=INF)),
    (r"high=0: .*above 0", lambda: importance_weights(good(), high=0)),
    (r"high=0\.5: .*low=0\.8", lambda: importance_weights(good(), low=0.8, high=0.5)),
    (r"high=None", lambda: importance_weights(good(), high=None)),  # type: ignore[arg-type]
    (r"metric='k4': .*k3", lambda: rejection_mask(good(), metric="k4", high=1.0)),
    (r"over='median': .*mean", lambda: rejection_mask(good(), over="median", high=1.0)),
    (r"high=inf: .*low=, high=", lambda: rejection_mask(good())),
    (r"high=1\.0: .*low=2\.0", lambda: rejection_mask(good(), low=2.0, high=1.0)),
    (r"low=True", lambda: rejection_mask(good(), low=True)),
    (r"delta=nan", lambda: off_policy_sequence_mask(good(), torch.zeros(len(LENGTHS), WIDTH), delta=NAN)),
    (r"logps is \[3\], .*\[7, 10\]", lambda: off_policy_sequence_mask(good(), torch.zeros(3), delta=0.5)),
    (r"logps is NoneType", lambda: off_policy_sequence_mask(good(), None, delta=0.5)),  # type: ignore[arg-type]
    (r"threshold=0: .*above 0", lambda: second_moment_mask(good(), threshold=0)),
    (r"low=-1: ", lambda: correction_metrics(good(), low=-1)),
    (r"weights is \[7\]", lambda: correction_metrics(good(), torch.ones(7))),
    (r"cu_seqlens is None, but level=\"sequence\"", lambda: importance_weights(no_sequences(), level="sequence")),
    (r"cu_seqlens is None, but over=\"max\"", lambda: rejection_mask(no_sequences(), over="max", high=1.0)),
    (r"cu_seqlens is None", lambda: off_policy_sequence_mask(no_sequences(), torch.zeros(6), delta=0.5)),
    (r"mask has dtype torch.float32", lambda: without_truncated(torch.ones(2, 3), torch.ones(2, dtype=torch.bool))),
    (r"mask has shape \[6\]", lambda: without_truncated(torch.ones(6, dtype=torch.bool), torch.ones(2, dtype=torch.bool))),
    (r"mask has list", lambda: without_truncated([[True]], torch.ones(1, dtype=torch.bool))),  # type: ignore[arg-type]
    (r"finished is torch.bool \[3\]", lambda: without_truncated(torch.ones(2, 3).bool(), torch.ones(3).bool())),
    (r"finished is torch.float32", lambda: without_truncated(torch.ones(2, 3).bool(), torch.ones(2))),
]


@pytest.mark.parametrize("pattern, call", BAD, ids=[pattern for pattern, _ in BAD])
def test_bad_input(pattern: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=pattern):
        call()


@pytest.mark.parametrize("missing", ["old_logps", "sampler_logps"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "off-policy"])
def test_both_log_probs_are_needed(name: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} is None: .*{missing}="):
        CALLS[name](make_batch(make_rows(), "padded", **{missing: None}))
