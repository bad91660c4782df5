"""Sampler mismatch: weights, masks and metrics against plain Python floats and the trainers' rules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf, nan

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
from support.advantage_oracle import Ragged
from support.pairs import label, pairs, refusals

Tensor = torch.Tensor
ADVANTAGES = [1.0, -1.0, -1.0, -0.5, -2.0, -0.3, -1.0]


def ratios(wild=False):
    """Sequences and their log-ratios: an empty one, one token, holes in the mask, one fully masked, a token that was not scored,
    and `wild` ones beyond all bounds."""
    rows = Ragged([6, 0, 1, 9, 4, 5, 3])
    x = torch.tensor([0.3, 0.0, 1.0, 0.1, 1.5, 0.02, 0.6])[:, None] * torch.randn(7, 9)
    rows.mask = rows.inside.clone()
    rows.mask[[0, 3, 3, 4, 6, 6, 6], [2, 0, 8, 1, 0, 1, 2]] = False
    x[2, 0], x[3, 4] = -1.5, nan
    if wild:
        x[0, 0], x[4, 0] = 1000.0, -1000.0
    return rows, x


def batch_of(rows, x, packed=False, **changes):
    """With numbers of every kind where the mask is not set."""
    old, sampler = (rows.poisoned(value).float() for value in (torch.full(x.shape, -2.0), -2.0 - x))
    fields = {"targets": x.new_zeros(x.shape).long(), "mask": rows.mask, "old_logps": old, "sampler_logps": sampler}
    if packed:
        fields = {name: value[rows.inside] for name, value in fields.items()} | {"cu_seqlens": rows.cu_seqlens}
    # [B, 1]: one of [B] would be read as one of [N] where the two are equal.
    return TokenBatch(**{"advantages": torch.tensor(ADVANTAGES)[: len(x), None], **fields, **changes})


both = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


@pytest.mark.parametrize(
    "case",
    pairs(
        level=LEVELS, mode=MODES, bounds=[(0.0, 1.02), (0.6, 1.5), (0.9, inf), (0.0, inf), (1e6, 1e7)], normalize=[False, True],
        packed=[False, True], wild=[False, True],
    ),
    ids=label,
)  # fmt: skip
def test_importance_weights(case):
    level, mode, (low, high), normalize, packed, wild = case.values()
    rows, x = ratios(wild)
    got = importance_weights(batch_of(rows, x, packed), level=level, mode=mode, low=low, high=high, normalize=normalize)
    rows.check(got, oracle.importance_weights(rows.lists(x), level, mode, low, high, normalize), atol=1e-44)
    assert low == 1e6 or len(set(got.flatten().tolist())) > 2


@pytest.mark.parametrize(
    "case",
    pairs(metric=METRICS, over=OVER, bounds=["low", "high", "low high"], packed=[False, True], wild=[False, True]),
    ids=label,
)
def test_rejection_mask(case):
    """With bounds half-way between two values that occur, so that rounding decides nothing."""
    metric, over, given, packed, wild = case.values()
    rows, x = ratios(wild)
    found = oracle.rejection_metric(rows.lists(x), metric, over)
    values = sorted({v for row in found for v in row})
    ends = {"low": (values[0] + values[1]) / 2, "high": (values[-2] + values[-1]) / 2}
    bounds = {name: ends[name] for name in given.split()}
    got = rejection_mask(batch_of(rows, x, packed), metric=metric, over=over, **bounds)
    rows.check(got, [[float(bounds.get("low", -inf) <= v <= bounds.get("high", inf)) for v in row] for row in found])
    assert 0 < got.sum() < rows.mask.sum()


def test_bounds_are_inclusive():
    one = Ragged([2])
    one.mask = one.inside
    batch = batch_of(one, torch.tensor([[0.5, -0.5]]))
    assert rejection_mask(batch, metric="k1", low=-0.5, high=0.5).tolist() == [[1, 1]]
    assert rejection_mask(batch, metric="k1", low=-0.4999, high=0.5).tolist() == [[0, 1]]
    assert rejection_mask(batch, metric="k2", high=0.125).tolist() == [[1, 1]]
    low, high = torch.tensor([-0.5, 0.5]).double().exp().tolist()
    assert importance_weights(batch, mode="mask", low=low, high=high).all()


# ---- masks


@both
@pytest.mark.parametrize("delta", [0.0, 0.05, 0.5])
def test_off_policy_sequence_mask(delta, packed):
    """Log-probs in the shape of targets or flat; without a sampler the old ones stand in, and without those nothing has moved."""
    rows, x = ratios()
    moved = [-oracle.mean(row) if row else 0.0 for row in oracle.log_weights(rows.lists(x))]
    keep = torch.tensor([float(a >= 0 or m <= delta) for a, m in zip(ADVANTAGES, moved, strict=True)])
    batch = batch_of(rows, x, packed)
    now, sampler = batch.old_logps, batch.sampler_logps
    assert now is not None
    calls = {
        "sampler": (batch, now.requires_grad_(), keep), "flat": (batch, now.reshape(-1), keep),
        "old": (replace(batch, old_logps=sampler, sampler_logps=None), now, keep),
        "nothing": (replace(batch, old_logps=None, sampler_logps=None), now, torch.ones(7)),
    }  # fmt: skip
    for given, logps, wanted in calls.values():
        rows.check(off_policy_sequence_mask(given, logps, delta=delta), rows.lists(wanted[:, None].expand(x.shape)))
    assert 0 < keep.sum() < 7


@both
@pytest.mark.parametrize("threshold", [1e-9, 0.003, 0.04, 0.3, 1.0, 100.0])
def test_second_moment_mask(threshold, packed):
    """In eighths too, where ties and means exactly at the threshold occur; at least one token is kept."""
    two = Ragged([4, 4])
    for rows, x in (
        ratios(),
        (Ragged([20, 0, 7]), torch.randint(-8, 9, (3, 20)) / 8),
        (two, 1.0 + two.inside.float().cumsum(0) % 2),
    ):
        got = second_moment_mask(batch_of(rows, x, packed), threshold=threshold)
        mask = rows.mask[rows.inside] if packed else rows.mask
        assert set(got.flatten().tolist()) <= {0.0, 1.0} and not got[~mask].any()
        squares = torch.tensor([w * w for row in oracle.log_weights(rows.lists(x)) for w in row])
        kept = squares[got[mask] != 0].sort().values
        torch.testing.assert_close(kept, torch.tensor(oracle.kept_by_second_moment(rows.lists(x), threshold)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_without_truncated(dtype):
    mask, finished = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0]]).to(dtype), torch.tensor([1, 0, 1]).to(dtype)
    packed = without_truncated(mask.view(-1), finished, cu_seqlens=torch.tensor([0, 3, 6, 9]))
    whole = without_truncated(mask, finished)
    assert whole.dtype == packed.dtype == torch.bool
    assert whole.tolist() == packed.view(3, 3).tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0]]


@both
def test_correction_metrics(packed):
    rows, ratio = ratios()
    batch, totals = (
        batch_of(rows, ratio, packed),
        [torch.tensor(r).double() for r in oracle.log_weights(rows.lists(ratio)) if r],
    )
    x = torch.cat(totals)
    w = x.exp()
    v = torch.where((w >= 0.7) & (w <= 1.3), w, 0.0)
    sums, means = (torch.stack([f(t) for t in totals]) for f in (torch.sum, torch.mean))
    every = {
        "ratio_mean": w.mean(), "ratio_min": w.min(), "ratio_max": w.max(), "ratio_std": w.std(unbiased=False),
        "share_unscored": 1 / len(x), "ess": w.mean() ** 2 / (w * w).mean(), "kl_k1": -x.mean(), "kl_k3": (x.expm1() - x).mean(),
        "chi2_token": (w * w).mean() - 1, "abs_log_ratio_mean": x.abs().mean(), "abs_log_ratio_max": x.abs().max(),
        "log_ppl_difference": -means.mean(), "chi2_sequence": (2 * sums).exp().mean() - 1,
    }  # fmt: skip
    bounded = {
        "share_below": (w < 0.7).double().mean(), "share_above": (w > 1.3).double().mean(),
        "share_rejected": (v == 0).double().mean(), "ess": v.mean() ** 2 / (v * v).mean(),
    }  # fmt: skip
    weights = importance_weights(batch, mode="mask", low=0.7, high=1.3)
    for got, want in (
        (correction_metrics(batch), every),
        (correction_metrics(batch, weights, low=0.7, high=1.3), every | bounded),
    ):
        known = {name: float(value) for name, value in want.items()}
        assert {name: float(value) for name, value in got.items()} == pytest.approx(known, rel=1e-5, abs=1e-9)
    nothing = correction_metrics(replace(batch, mask=batch.targets != 0), batch.targets + 1.0, low=0.5, high=2.0)
    assert set(map(float, nothing.values())) == {0.0}
    unknown = correction_metrics(replace(FLAT, sampler_logps=torch.ones(6)))
    assert set(every) - set(unknown) == {"chi2_sequence", "log_ppl_difference"}


# ---- properties of all corrections

#: Whether a sequence alone has the numbers that it has among others, and the call.
CALLS = {
    "weights, token": (False, partial(importance_weights, high=1.5, normalize=True)),
    "weights, sequence": (False, partial(importance_weights, level="sequence", mode="mask", high=1.5, normalize=True)),
    "weights, geometric": (False, partial(importance_weights, level="geometric", high=1.5, normalize=True)),
    **{
        f"rejection, {metric}, {over}": (True, partial(rejection_mask, metric=metric, over=over, low=-0.5, high=1.2))
        for metric, over in zip(("k3", "k1", "k2", "ratio", "k1"), OVER, strict=True)
    },
    "off-policy": (True, lambda b: off_policy_sequence_mask(b, b.old_logps, delta=0.1)),
    "second moment": (False, partial(second_moment_mask, threshold=0.04)),
    "metrics": (False, lambda b: torch.stack(list(correction_metrics(b, low=0.5, high=2.0).values()))),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_what_is_masked_has_no_effect(name):
    """Nor has the place of a sequence; without a look at the others it keeps its numbers alone, too."""
    alone, call = CALLS[name]
    rows, x = ratios()
    batch, whole = batch_of(rows, x), call(batch_of(rows, x))

    def of(i, **changes):
        names = ("targets", "advantages", "mask", "old_logps", "sampler_logps")
        return TokenBatch(**{name: changes.get(name, getattr(batch, name))[i] for name in names})

    every, order = list(range(7)), [3, 5, 0, 6, 2, 4, 1]
    clean = {k: torch.where(rows.mask, getattr(batch, k), -1.0) for k in ("old_logps", "sampler_logps")}
    assert torch.equal(whole, call(of(every, **clean)))
    if name != "metrics":
        torch.testing.assert_close(call(of(order)), whole[order], rtol=1e-6, atol=0)
    assert not alone or all(torch.equal(call(of([i])), whole[i : i + 1]) for i in every)


@every_call
def test_everything_stays_finite(name):
    wild = torch.tensor([-inf, inf, nan, -1e30, 1e30, -200.0, 0.0, -1e-30])
    fields = {"old_logps": wild.expand(8, 8), "sampler_logps": wild[:, None].expand(8, 8)}
    batch = TokenBatch(torch.zeros(8, 8, dtype=torch.int64), -torch.ones(8), **fields)
    assert CALLS[name][1](batch).isfinite().all()
    unbounded = importance_weights(batch, level="sequence", high=inf)
    assert unbounded.isfinite().all() and unbounded.max() > 1e20


@every_call
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1, 2]], ids=str)
def test_empty_batches(name, lengths):
    rows = Ragged(lengths)
    rows.mask = rows.inside & False
    assert not any(CALLS[name][1](batch_of(rows, torch.randn(rows.mask.shape), packed)).any() for packed in (False, True))


@every_call
def test_corrections_do_not_wait_for_the_device(name):
    """Meta tensors have no data, so reading a value raises. On a GPU such a read would make the host wait."""
    x = torch.zeros(3, 5, device="meta")
    CALLS[name][1](TokenBatch(x.long(), x[:, 0], old_logps=x, sampler_logps=x.clone(), mask=x == 0))


# ---- by name


@pytest.mark.parametrize(
    "name, function",
    [
        ("importance_weights", importance_weights),
        ("tis", partial(importance_weights, high=2.0)),
        ("sequence_tis", partial(importance_weights, level="sequence", high=2.0)),
        ("icepop", partial(importance_weights, mode="mask", low=0.5, high=5.0)),
        ("sequence_mask", partial(importance_weights, level="sequence", mode="mask", high=3.0)),
        ("geometric_mask", partial(rejection_mask, over="mean", low=0.99, high=1.01)),
        ("veto", partial(rejection_mask, over="min", low=1e-4)),
        ("off_policy_mask", lambda b: off_policy_sequence_mask(b, b.old_logps, delta=0.5)),
        ("m2po", partial(second_moment_mask, threshold=0.04)),
    ],
)
def test_a_correction_is_its_function(name, function):
    """It multiplies the weights that are there, of tokens or of sequences, or cuts the mask."""
    batch = batch_of(*ratios())
    once = CORRECTIONS[name](batch).weights
    assert torch.equal(once, function(batch))
    assert torch.equal(CORRECTIONS[name](replace(batch, weights=torch.full((7,), 2.0))).weights, 2 * once)
    twice = CORRECTIONS["rejection_mask"](replace(batch, weights=once), high=1.1).weights
    assert torch.equal(twice, once * rejection_mask(batch, high=1.1))
    cut = CORRECTIONS["without_truncated"](batch, finished=torch.tensor([True, False] * 3 + [True]))
    assert cut.weights is None and cut.mask.sum(1).tolist() == [5, 0, 1, 0, 3, 0, 0]


# ---- refusals


FLAT = TokenBatch(torch.zeros(6, dtype=torch.int64), torch.zeros(6), old_logps=torch.zeros(6), sampler_logps=torch.zeros(6))
BOOLS = torch.ones(2, 3).bool()
GOOD = {"batch": batch_of(*ratios())}
#: A call that is fine, and what its message says if these arguments are others.
REFUSED = [
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
        {**GOOD, "logps": torch.zeros(7, 9), "delta": 0.5},
        {
            "delta=nan": {"delta": nan},
            r"logps is \[3\], .*\[7, 9\]": {"logps": torch.zeros(3)},
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
            "old_logps is None: .*old_logps=": {"batch": replace(GOOD["batch"], old_logps=None)},
            "sampler_logps is None: .*sampler_logps=": {"batch": replace(GOOD["batch"], sampler_logps=None)},
        },
    ),
    (
        CORRECTIONS["without_truncated"],
        {**GOOD, "finished": torch.ones(7).bool()},
        {"finished=None: the correction 'without_truncated'": {"finished": None}},
    ),
]


@refusals(REFUSED)
def test_refusals(refused):
    refused()
