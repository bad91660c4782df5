"""Sampler mismatch: weights, masks and metrics against plain Python floats and the trainers' rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch

from grpo_kernels import TokenBatch
from grpo_kernels.rewards.corrections import (
    CORRECTIONS,
    LEVELS,
    METRICS,
    MODES,
    OVER,
    correction_metrics,
    importance_weights,
    off_policy_sequence_mask,
    rejection_mask,
    second_moment_mask,
    without_truncated,
)
from support import advantage_oracle as oracle
from support.pairs import label, pairs
from support.refused import Refused, refusals

Tensor = torch.Tensor
Sequences = list[list[float | None]]


def sequences(wild: bool = False) -> Sequences:
    """Log-ratios: None where masked. Empty, one token, a hole in the mask, one fully masked, tokens that were not scored (NaN), and
    `wild` ones beyond all bounds."""
    spread = {6: 0.3, 0: 0.0, 1: 1.0, 9: 0.1, 4: 1.5, 5: 0.02, 3: 0.6}
    rows: Sequences = [(s * torch.randn(n)).tolist() for n, s in spread.items()]
    rows[0][2] = rows[3][0] = rows[3][8] = rows[4][1] = None
    rows[6] = [None] * 3
    rows[3][4] = nan
    if wild:
        rows[0][0], rows[4][0] = 1000.0, -1000.0
    return rows


def batch_of(rows: Sequences, packed: bool, advantages: Any = None, **changes: Any) -> TokenBatch:
    """With numbers of every kind where the mask is not set."""
    wild = [(nan, inf), (-inf, 1e30), (5.0, nan), (1e4, -1e4)]
    tokens = [[(*wild[t % 4], False) if x is None else (-2.0, -2.0 - x, True) for t, x in enumerate(row)] for row in rows]
    longest = max([len(row) for row in rows], default=0) + 1
    if not packed:
        tokens = [row + [(nan, 7.0, False)] * (longest - len(row)) for row in tokens]
    flat = torch.tensor([t for row in tokens for t in row], dtype=torch.float64).reshape(-1, 3)
    old, sampler, mask = (x if packed else x.view(len(rows), longest) for x in flat.unbind(1))
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0) if packed else None
    fields = {"mask": mask != 0, "old_logps": old.float(), "sampler_logps": sampler.float(), "cu_seqlens": offsets, **changes}
    # [B, 1]: one of [B] would be read as one of [N] where the two are equal.
    advantages = torch.ones(len(rows), 1) if advantages is None else torch.tensor(advantages)[:, None]
    return TokenBatch(torch.zeros(mask.shape, dtype=torch.int64), advantages, **fields)


def check(got: Tensor, batch: TokenBatch, expected: list[list[float]]) -> list[float]:
    """Those of trained tokens are expected, all others exactly 0."""
    want = [x for row in expected for x in row]
    assert batch.mask is not None and got.shape == batch.mask.shape and not got[~batch.mask].any()
    oracle.close(got[batch.mask], want, atol=1e-44)
    return want


@pytest.mark.parametrize(
    "case",
    pairs(
        level=LEVELS, mode=MODES, bounds=[(0.0, 1.02), (0.6, 1.5), (0.9, inf), (0.0, inf), (1e6, 1e7)], normalize=[False, True],
        packed=[False, True],
        wild=[False, True],
    ),
    ids=label,
)  # fmt: skip
def test_importance_weights(case: Any) -> None:
    level, mode, (low, high), normalize, packed, wild = case.values()
    rows = sequences(wild)
    batch = batch_of(rows, packed)
    got = importance_weights(batch, level=level, mode=mode, low=low, high=high, normalize=normalize)
    want = check(got, batch, oracle.importance_weights(rows, level, mode, low, high, normalize))
    assert low == 1e6 or len(set(want)) > 1


@pytest.mark.parametrize(
    "case",
    pairs(metric=METRICS, over=OVER, bounds=["low", "high", "low high"], packed=[False, True], wild=[False, True]),
    ids=label,
)
def test_rejection_mask(case: Any) -> None:
    """With bounds half-way between two values that occur, so that rounding decides nothing."""
    metric, over, given, packed, wild = case.values()
    rows = sequences(wild)
    batch, found = batch_of(rows, packed), oracle.rejection_metric(rows, metric, over)
    values = sorted({x for row in found for x in row})
    bounds = {"low": (values[0] + values[1]) / 2, "high": (values[-2] + values[-1]) / 2}
    bounds = {name: bounds[name] for name in given.split()}
    want = [[float(bounds.get("low", -inf) <= x <= bounds.get("high", inf)) for x in row] for row in found]
    assert 0 < sum(check(rejection_mask(batch, metric=metric, over=over, **bounds), batch, want)) < sum(map(len, want))


def test_bounds_are_inclusive() -> None:
    batch = batch_of([[0.5, -0.5]], True)
    assert rejection_mask(batch, metric="k1", low=-0.5, high=0.5).tolist() == [1, 1]
    assert rejection_mask(batch, metric="k1", low=-0.4999, high=0.5).tolist() == [0, 1]
    assert rejection_mask(batch, metric="k2", high=0.125).tolist() == [1, 1]
    assert importance_weights(batch, mode="mask", low=math.exp(-0.5), high=math.exp(0.5)).all()


# ---- masks


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("delta", [0.0, 0.05, 0.5])
def test_off_policy_sequence_mask(delta: float, packed: bool) -> None:
    """Log-probs in the shape of targets or flat; without a sampler the old ones stand in, and without those nothing has moved."""
    rows, advantages = sequences(), [1.0, -1.0, -1.0, -0.5, -2.0, -0.3, -1.0]
    rows[2] = [-1.5]
    want = [
        [float(a >= 0 or -oracle.mean(x) <= delta)] * len(x) if x else []
        for x, a in zip(map(oracle.log_weights, rows), advantages, strict=True)
    ]
    batch = batch_of(rows, packed, advantages)
    now, sampler = batch.old_logps, batch.sampler_logps
    assert now is not None
    assert 0 < sum(check(off_policy_sequence_mask(batch, now.requires_grad_(), delta=delta), batch, want)) < 24
    stand_in = replace(batch, old_logps=sampler, sampler_logps=None)
    for other in (
        off_policy_sequence_mask(batch, now.reshape(-1), delta=delta),
        off_policy_sequence_mask(stand_in, now, delta=delta),
    ):
        check(other, batch, want)
    on_policy = replace(batch, old_logps=None, sampler_logps=None)
    check(off_policy_sequence_mask(on_policy, now, delta=0.0), batch, [[1.0] * len(x) for x in want])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("threshold", [1e-9, 0.003, 0.04, 0.3, 1.0, 100.0])
def test_second_moment_mask(threshold: float, packed: bool) -> None:
    """In eighths too, where ties and means exactly at the threshold occur; at least one token is kept."""
    for rows in (sequences(), [(torch.randint(-8, 9, (n,)) / 8).tolist() for n in (20, 0, 7)], [[1.0, 1.0, None, 2.0]]):
        batch = batch_of(rows, packed)
        got = second_moment_mask(batch, threshold=threshold)
        assert batch.mask is not None and set(got.tolist() if packed else got.view(-1).tolist()) <= {0.0, 1.0}
        squares = torch.tensor([x * x for row in rows for x in oracle.log_weights(row)])
        kept = squares[got[batch.mask] != 0].sort().values
        torch.testing.assert_close(kept, torch.tensor(oracle.kept_by_second_moment(rows, threshold)))
        assert not got[~batch.mask].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_without_truncated(dtype: torch.dtype) -> None:
    mask, finished = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0]]).to(dtype), torch.tensor([1, 0, 1]).to(dtype)
    whole, packed = (
        without_truncated(mask, finished),
        without_truncated(mask.view(-1), finished, cu_seqlens=torch.tensor([0, 3, 6, 9])),
    )
    assert whole.dtype == packed.dtype == torch.bool
    assert whole.tolist() == packed.view(3, 3).tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("packed", [False, True])
def test_correction_metrics(packed: bool) -> None:
    rows = sequences()
    batch, totals = batch_of(rows, packed), [torch.tensor(x, dtype=torch.float64) for x in map(oracle.log_weights, rows) if x]
    x = torch.cat(totals)
    w, size = x.exp(), x.abs()
    v = torch.where((w >= 0.7) & (w <= 1.3), w, 0.0)
    sums, means = (torch.stack([f(t) for t in totals]) for f in (torch.sum, torch.mean))
    expected = {
        "ratio_mean": w.mean(), "ratio_min": w.min(), "ratio_max": w.max(), "ratio_std": w.std(unbiased=False),
        "share_below": (w < 0.7).double().mean(), "share_above": (w > 1.3).double().mean(),
        "share_rejected": (v == 0).double().mean(), "share_unscored": 1 / len(x), "ess": v.mean() ** 2 / (v * v).mean(),
        "kl_k1": -x.mean(), "kl_k3": (x.expm1() - x).mean(), "chi2_token": (w * w).mean() - 1, "abs_log_ratio_mean": size.mean(),
        "abs_log_ratio_max": size.max(), "log_ppl_difference": -means.mean(), "chi2_sequence": (2 * sums).exp().mean() - 1,
    }  # fmt: skip
    expected = {name: float(x) for name, x in expected.items()}
    got = correction_metrics(batch, importance_weights(batch, mode="mask", low=0.7, high=1.3), low=0.7, high=1.3)
    assert {name: float(value) for name, value in got.items()} == pytest.approx(expected, rel=1e-5, abs=1e-9)
    alone = correction_metrics(batch)
    assert set(expected) - set(alone) == {"share_below", "share_above", "share_rejected"}
    assert float(alone["ess"]) == pytest.approx(float(w.mean() ** 2 / (w * w).mean()), rel=1e-5)
    nothing = correction_metrics(replace(batch, mask=batch.targets != 0), batch.targets + 1.0, low=0.5, high=2.0)
    assert set(map(float, nothing.values())) == {0.0}
    unknown = TokenBatch(
        torch.zeros(6, dtype=torch.int64), torch.ones(6), old_logps=torch.ones(6), sampler_logps=torch.zeros(6)
    )
    assert set(alone) - set(correction_metrics(unknown)) == {"chi2_sequence", "log_ppl_difference"}


# ---- properties of all corrections

CALLS = {
    **{
        f"weights, {level}": lambda b, level=level, mode=mode: importance_weights(
            b, level=level, mode=mode, high=1.5, normalize=True
        )
        for level, mode in (("token", "truncate"), ("sequence", "mask"), ("geometric", "truncate"))
    },
    **{
        f"rejection, {metric}, {over}": lambda b, metric=metric, over=over: rejection_mask(
            b, metric=metric, over=over, low=-0.5, high=1.2
        )
        for metric, over in zip(("k3", "k1", "k2", "ratio", "k1"), OVER, strict=True)
    },
    "off-policy": lambda b: off_policy_sequence_mask(b, b.old_logps, delta=0.1),
    "second moment": lambda b: second_moment_mask(b, threshold=0.04),
    "metrics": lambda b: torch.stack(list(correction_metrics(b, low=0.5, high=2.0).values())),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_what_is_masked_has_no_effect(name: str) -> None:
    """Nor has the place of a sequence; without a look at the others it keeps its numbers alone, too."""
    rows, order = sequences(), [3, 5, 0, 6, 2, 4, 1]
    advantages = [-1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0]
    batch = batch_of(rows, False, advantages)
    clean = {k: torch.where(batch.mask, getattr(batch, k), -1.0) for k in ("old_logps", "sampler_logps")}  # type: ignore[arg-type]
    whole = CALLS[name](batch)
    assert torch.equal(whole, CALLS[name](replace(batch, **clean)))
    if name != "metrics":
        moved = CALLS[name](batch_of([rows[i] for i in order], False, [advantages[i] for i in order]))
        torch.testing.assert_close(moved, whole[order], rtol=1e-6, atol=0)
    if name.startswith("rejection") or name == "off-policy":
        for i, row in enumerate(rows):
            assert torch.equal(CALLS[name](batch_of([row], True, [advantages[i]])), whole[i, : len(row)])


@every_call
def test_everything_stays_finite(name: str) -> None:
    wild = torch.tensor([-inf, inf, nan, -1e30, 1e30, -200.0, 0.0, -1e-30])
    batch = TokenBatch(torch.zeros(8, 8, dtype=torch.int64), -torch.ones(8), old_logps=wild.expand(8, 8), sampler_logps=wild[:, None].expand(8, 8))  # fmt: skip
    assert CALLS[name](batch).isfinite().all()
    unbounded = importance_weights(batch, level="sequence", high=inf)
    assert unbounded.isfinite().all() and unbounded.max() > 1e20


@every_call
@pytest.mark.parametrize("packed", [False, True])
def test_empty_batches(name: str, packed: bool) -> None:
    for rows in ([], [[]], [[], []], [[None], [None, None]]):
        assert not CALLS[name](batch_of(rows, packed)).any()


@every_call
def test_corrections_do_not_wait_for_the_device(name: str) -> None:
    """Meta tensors have no data, so reading a value raises. On a GPU such a read would make the host wait."""
    x = torch.zeros(3, 5, device="meta")
    CALLS[name](TokenBatch(x.long(), x[:, 0], old_logps=x, sampler_logps=x.clone(), mask=x == 0))


# ---- by name


@pytest.mark.parametrize(
    "name, function, options",
    [
        ("importance_weights", importance_weights, {}),
        ("tis", importance_weights, {"high": 2.0}),
        ("sequence_tis", importance_weights, {"level": "sequence", "high": 2.0}),
        ("icepop", importance_weights, {"mode": "mask", "low": 0.5, "high": 5.0}),
        ("sequence_mask", importance_weights, {"level": "sequence", "mode": "mask", "high": 3.0}),
        ("geometric_mask", rejection_mask, {"over": "mean", "low": 0.99, "high": 1.01}),
        ("veto", rejection_mask, {"over": "min", "low": 1e-4}),
        ("off_policy_mask", lambda b, delta: off_policy_sequence_mask(b, b.old_logps, delta=delta), {"delta": 0.5}),
        ("m2po", second_moment_mask, {"threshold": 0.04}),
    ],
)
def test_a_correction_is_its_function(name: str, function: Any, options: Any) -> None:
    """It multiplies the weights that are there, of tokens or of sequences, or cuts the mask."""
    batch = batch_of(sequences(), False, [-1.0] * 7)
    once = CORRECTIONS[name](batch).weights
    assert torch.equal(once, function(batch, **options))
    assert torch.equal(CORRECTIONS[name](replace(batch, weights=torch.full((7,), 2.0))).weights, 2 * once)
    twice = CORRECTIONS["rejection_mask"](replace(batch, weights=once), high=1.1).weights
    assert torch.equal(twice, once * rejection_mask(batch, high=1.1))
    cut = CORRECTIONS["without_truncated"](batch, finished=torch.tensor([True, False] * 3 + [True]))
    assert cut.weights is None and cut.mask.sum(1).tolist() == [5, 0, 1, 0, 3, 0, 0]


# ---- refusals


def good(**changes: Any) -> TokenBatch:
    return batch_of([[0.1, 0.2, None], [0.3]], False, **changes)


FLAT = TokenBatch(torch.zeros(6, dtype=torch.int64), torch.zeros(6), old_logps=torch.zeros(6), sampler_logps=torch.zeros(6))
BOOLS = torch.ones(2, 3).bool()
GOOD = {"batch": good()}
#: A call that is fine, and what its message says if these arguments are others.
REFUSED: Refused = [
    (
        importance_weights,
        GOOD,
        {
            r"level='batch': .*geometric": {"level": "batch"},
            r"mode='clip': .*truncate": {"mode": "clip"},
            r"low=-0\.1: .*>= 0": {"low": -0.1},
            "low=nan": {"low": nan},
            "low=inf": {"low": inf},
            "high=0: .*above 0": {"high": 0},
            r"high=0\.5: .*low=0\.8": {"low": 0.8, "high": 0.5},
            'cu_seqlens is None, but level="sequence"': {"batch": FLAT, "level": "sequence"},
        },
    ),
    (
        rejection_mask,
        {**GOOD, "high": 1.0},
        {
            "metric='k4': .*k3": {"metric": "k4"},
            "over='median': .*mean": {"over": "median"},
            "high=inf: pass low=, high= or both": {"high": inf},
            r"high=1\.0: .*low=2\.0": {"low": 2.0},
            "low=True": {"low": True},
            'cu_seqlens is None, but over="max"': {"batch": FLAT, "over": "max"},
        },
    ),
    (
        off_policy_sequence_mask,
        {**GOOD, "logps": torch.zeros(2, 4), "delta": 0.5},
        {
            "delta=nan": {"delta": nan},
            r"logps is \[3\], .*\[2, 4\]": {"logps": torch.zeros(3)},
            "logps is NoneType": {"logps": None},
            "cu_seqlens is None": {"batch": FLAT, "logps": torch.zeros(6)},
        },
    ),
    (second_moment_mask, {**GOOD, "threshold": 1.0}, {"threshold=0: .*above 0": {"threshold": 0}}),
    (correction_metrics, GOOD, {"low=-1: ": {"low": -1}, r"weights is \[7\]": {"weights": torch.ones(7)}}),
    (
        without_truncated,
        {"mask": BOOLS, "finished": BOOLS[:, 0]},
        {
            "mask has dtype torch.float32": {"mask": torch.ones(2, 3)},
            r"mask has shape \[6\]": {"mask": BOOLS.view(-1)},
            "mask has list": {"mask": [[True]]},
            r"finished is torch.bool \[3\]": {"finished": BOOLS[0]},
            "finished is torch.float32": {"finished": torch.ones(2)},
        },
    ),
    (
        CORRECTIONS["tis"],
        GOOD,
        {
            "'gamma' is no argument of the correction 'tis'": {"gamma": 1},
            "old_logps is None: .*old_logps=": {"batch": good(old_logps=None)},
            "sampler_logps is None: .*sampler_logps=": {"batch": good(sampler_logps=None)},
        },
    ),
    (
        CORRECTIONS["without_truncated"],
        {**GOOD, "finished": BOOLS[:, 0]},
        {"finished=None: the correction 'without_truncated'": {"finished": None}},
    ),
]


@refusals(REFUSED)
def test_refusals(refused: Callable[[], None]) -> None:
    refused()
