"""Sampler mismatch and entropy:

weights, masks, metrics and thresholds against plain Python floats and the trainers' rules.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from math import inf, nan

import pytest
import torch

from grpo_kernels import Objective, OffPolicySequences, TokenBatch
from grpo_kernels.losses import objective_loss
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
    sampler_mismatch_mask,
    second_moment_mask,
    without_truncated,
)
from grpo_kernels.rewards.entropy import AdaptiveEntropyCoef, entropy_threshold
from support import advantage_oracle as oracle
from support.advantage_oracle import Ragged
from support.pairs import label, pairs, refusals

ADVANTAGES = [1.0, -1.0, -1.0, -0.5, -2.0, -0.3, -1.0]


def ratios(wild=False):
    """Sequences and their log-ratios: an empty one, one token, holes in the mask, one fully masked,
    a token that was not scored, and `wild` ones beyond all bounds.
    """
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
    fields = {
        "targets": x.new_zeros(x.shape).long(),
        "mask": rows.mask,
        "old_logps": old,
        "sampler_logps": sampler,
    }
    if packed:
        fields = {name: value[rows.inside] for name, value in fields.items()} | {
            "cu_seqlens": rows.cu_seqlens
        }
    # [B, 1]: one of [B] would be read as one of [N] where the two are equal.
    return TokenBatch(
        **{"advantages": torch.tensor(ADVANTAGES)[: len(x), None], **fields, **changes}
    )


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
    got = importance_weights(
        batch_of(rows, x, packed), level=level, mode=mode, low=low, high=high, normalize=normalize
    )
    # The relative error of exp(x) is the error of x, a sum of log-probs rounded to fp32; exp, mean
    # and division add some roundings.
    sums = oracle.over_sequence(
        "sum", [[abs(y) for y in row] for row in oracle.log_weights(rows.lists(x))]
    )
    rtol = 2.0**-23 * (4 + max(min(y, 60.0) for row in sums for y in row))
    rows.check(
        got,
        oracle.importance_weights(rows.lists(x), level, mode, low, high, normalize),
        rtol=rtol,
        atol=1e-44,
    )
    assert low == 1e6 or len(set(got.flatten().tolist())) > 2


@pytest.mark.parametrize(
    "case",
    pairs(
        metric=METRICS,
        over=OVER,
        bounds=["low", "high", "low high"],
        packed=[False, True],
        wild=[False, True],
    ),
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
    rows.check(
        got,
        [
            [float(bounds.get("low", -inf) <= v <= bounds.get("high", inf)) for v in row]
            for row in found
        ],
    )
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
    """Without a sampler the old log-probs stand in, and without those nothing has moved."""
    rows, x = ratios()
    moved = [-oracle.mean(row) if row else 0.0 for row in oracle.log_weights(rows.lists(x))]
    keep = torch.tensor(
        [float(a >= 0 or m <= delta) for a, m in zip(ADVANTAGES, moved, strict=True)]
    )
    batch = batch_of(rows, x, packed)
    for given in (batch, replace(batch, old_logps=batch.sampler_logps, sampler_logps=None)):
        got = off_policy_sequence_mask(given, batch.old_logps, delta=delta)
        rows.check(got, rows.lists(keep[:, None].expand(x.shape)))
    still = off_policy_sequence_mask(
        replace(batch, old_logps=None, sampler_logps=None), batch.old_logps, delta=delta
    )
    rows.check(still, rows.lists(torch.ones_like(x)))
    assert 0 < keep.sum() < 7
    marks = torch.arange(7) % 2 == 0
    for on_policy in (marks, ~marks):
        marked = replace(
            batch,
            old_logps=batch.sampler_logps,
            sampler_logps=None,
            on_policy=on_policy[:, None],
        )
        got = off_policy_sequence_mask(marked, batch.old_logps, delta=delta)
        stays = torch.where(on_policy, 1.0, keep)
        rows.check(got, rows.lists(stays[:, None].expand(x.shape)))


@both
def test_sampler_mismatch_mask(packed):
    """Whole sequences, by the mean of exp |log-ratio|; an unscored token counts as equal."""
    rows, x = ratios()
    batch = batch_of(rows, x, packed)
    errors = []
    for row in rows.lists(x):
        of_tokens = [1.0 if v != v else math.exp(abs(v)) for v in row]
        errors.append(oracle.mean(of_tokens) if row else 0.0)
    threshold = sorted(errors)[len(errors) // 2] + 1e-3
    want = [
        [float(e <= threshold)] * len(row) for e, row in zip(errors, rows.lists(x), strict=True)
    ]
    assert {0.0, 1.0} <= {v for row in want for v in row}
    rows.check(sampler_mismatch_mask(batch, batch.old_logps, threshold=threshold), want)


@both
def test_off_policy_masks_of_advantages_of_both_signs(packed):
    """The sum of the trained tokens' advantages decides for the whole sequence, and the mean
    log-ratio of all is 1. A filter decides alike. What is masked does not count.
    """
    advantages = torch.tensor(
        [[-0.5, 0.25, -0.25], [0.5, -0.25, 0.25], [-0.5, 0.25, 0.25], [0.5, -1.0, nan]]
    )
    rows = Ragged([3, 3, 3, 3])
    rows.mask = torch.ones(4, 3, dtype=torch.bool)
    rows.mask[3, 2] = False
    x = torch.full((4, 3), -1.0)
    batch = batch_of(rows, x, packed, advantages=advantages[rows.inside] if packed else advantages)
    kept = {
        "sequence": [[0, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]],
        "token": [[0, 1, 0], [1, 0, 1], [0, 1, 1], [1, 0, 0]],
    }
    for whose, expected in kept.items():
        got = off_policy_sequence_mask(batch, batch.old_logps, delta=0.5, advantage_of=whose)
        rows.check(got, rows.lists(torch.tensor(expected).float()))
        objective = Objective(filters=(OffPolicySequences(0.5, whose),), aggregate="token-sum")
        out = objective_loss(batch.old_logps, batch, objective)
        terms = -(got * batch.flat("advantages").view(got.shape)).sum()  # of a ratio of 1
        torch.testing.assert_close(out.loss, terms)
        assert out.metrics["kept"] == got.sum() / 11
    assert torch.equal(
        off_policy_sequence_mask(batch, batch.old_logps, delta=0.5),
        off_policy_sequence_mask(batch, batch.old_logps, delta=0.5, advantage_of="sequence"),
    )
    with pytest.raises(ValueError, match="advantage_of='group': it must be one of sequence, token"):
        off_policy_sequence_mask(batch, batch.old_logps, delta=0.5, advantage_of="group")


@both
@pytest.mark.parametrize("threshold", [1e-9, 0.003, 0.04, 0.3, 1.0, 100.0])
def test_second_moment_mask(threshold, packed):
    """In eighths too, where ties and means exactly at the threshold occur; at least one token is
    kept.
    """
    two = Ragged([4, 4])
    for rows, x in (
        ratios(),
        (two, 1.0 + two.inside.float().cumsum(0) % 2),
        (Ragged([20, 7]), torch.randint(-8, 9, (2, 20)) / 8),
    ):
        got = second_moment_mask(batch_of(rows, x, packed), threshold=threshold)
        mask = rows.mask[rows.inside] if packed else rows.mask
        squares = torch.tensor([w * w for row in oracle.log_weights(rows.lists(x)) for w in row])
        want = torch.tensor(oracle.kept_by_second_moment(rows.lists(x), threshold))
        torch.testing.assert_close(squares[got[mask] != 0].sort().values, want)


def test_without_truncated():
    mask, finished = (
        torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0]]).bool(),
        torch.tensor([1, 0, 1]).bool(),
    )
    packed = without_truncated(mask.view(-1), finished, cu_seqlens=torch.tensor([0, 3, 6, 9]))
    assert (
        without_truncated(mask, finished).tolist()
        == packed.view(3, 3).tolist()
        == [[1, 1, 0], [0, 0, 0], [0, 1, 0]]
    )


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
    every = {
        "ratio_mean": w.mean(), "ratio_min": w.min(), "ratio_max": w.max(), "ratio_std": w.std(unbiased=False),
        "share_unscored": 1 / len(x), "ess": v.mean() ** 2 / (v * v).mean(), "kl_k1": -x.mean(), "kl_k3": (x.expm1() - x).mean(),
        "chi2_token": (w * w).mean() - 1, "abs_log_ratio_mean": x.abs().mean(), "abs_log_ratio_max": x.abs().max(),
        "log_ppl_difference": -torch.stack([t.mean() for t in totals]).mean(),
        "chi2_sequence": (2 * torch.stack([t.sum() for t in totals])).exp().mean() - 1, "share_below": (w < 0.7).double().mean(),
        "share_above": (w > 1.3).double().mean(), "share_rejected": (v == 0).double().mean(),
    }  # fmt: skip
    got = correction_metrics(
        batch, importance_weights(batch, mode="mask", low=0.7, high=1.3), low=0.7, high=1.3
    )
    assert {name: float(value) for name, value in got.items()} == pytest.approx(
        {k: float(n) for k, n in every.items()}, rel=1e-5, abs=1e-9
    )
    nothing = correction_metrics(
        replace(batch, mask=batch.targets != 0), batch.targets + 1.0, low=0.5, high=2.0
    )
    assert set(map(float, nothing.values())) == {0.0}


# ---- properties of all corrections

CALLS = {
    **{
        f"weights, {level}": partial(
            importance_weights, level=level, mode=mode, high=1.5, normalize=True
        )
        for level, mode in (("token", "truncate"), ("sequence", "mask"), ("geometric", "truncate"))
    },
    **{
        f"rejection, {metric}, {over}": partial(
            rejection_mask, metric=metric, over=over, low=-0.5, high=1.2
        )
        for metric, over in zip(("k3", "k1", "k2", "ratio", "k1"), OVER, strict=True)
    },
    "sampler mismatch": lambda b: sampler_mismatch_mask(b, b.old_logps, threshold=1.5),
    "off-policy": lambda b: off_policy_sequence_mask(b, b.old_logps, delta=0.1),
    "second moment": partial(second_moment_mask, threshold=0.04),
    "metrics": lambda b: torch.stack(list(correction_metrics(b, low=0.5, high=2.0).values())),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_what_is_masked_has_no_effect(name):
    rows, x = ratios()
    batch = batch_of(rows, x)
    clean = {
        k: torch.where(rows.mask, getattr(batch, k), -1.0) for k in ("old_logps", "sampler_logps")
    }
    assert torch.equal(CALLS[name](batch), CALLS[name](replace(batch, **clean)))


@every_call
def test_everything_stays_finite(name):
    wild = torch.tensor([-inf, inf, nan, -1e30, 1e30, -200.0, 0.0, -1e-30])
    fields = {"old_logps": wild.expand(8, 8), "sampler_logps": wild[:, None].expand(8, 8)}
    batch = TokenBatch(torch.zeros(8, 8, dtype=torch.int64), -torch.ones(8), **fields)
    assert CALLS[name](batch).isfinite().all()


@every_call
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1, 2]], ids=str)
def test_empty_batches(name, lengths):
    rows = Ragged(lengths)
    rows.mask = rows.inside & False
    assert not any(
        CALLS[name](batch_of(rows, torch.randn(rows.mask.shape), packed)).any()
        for packed in (False, True)
    )


@every_call
def test_corrections_do_not_wait_for_the_device(name):
    """Meta tensors have no data, so reading a value raises.

    On a GPU such a read would make the host wait.
    """
    x = torch.zeros(3, 5, device="meta")
    CALLS[name](TokenBatch(x.long(), x[:, 0], old_logps=x, sampler_logps=x.clone(), mask=x == 0))


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
        ("sampler_mismatch", lambda b: sampler_mismatch_mask(b, b.old_logps, threshold=2.0)),
        ("m2po", partial(second_moment_mask, threshold=0.04)),
    ],
)
def test_a_correction_is_its_function(name, function):
    """It multiplies the weights that are there, of tokens or of sequences, or cuts the mask."""
    batch = batch_of(*ratios())
    once = CORRECTIONS[name](batch).weights
    assert torch.equal(once, function(batch))
    assert torch.equal(
        CORRECTIONS[name](replace(batch, weights=torch.full((7,), 2.0))).weights, 2 * once
    )
    twice = CORRECTIONS["rejection_mask"](replace(batch, weights=once), high=1.1).weights
    assert torch.equal(twice, once * rejection_mask(batch, high=1.1))
    cut = CORRECTIONS["without_truncated"](batch, finished=torch.tensor([True, False] * 3 + [True]))
    assert cut.weights is None and cut.mask.sum(1).tolist() == [5, 0, 1, 0, 3, 0, 0]


# ---- entropy as a control: the threshold against torch.quantile, the coefficient against TRL's
# rule, retold

LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    "count, share", [(1, 0.2), (2, 0.73), (5, 1.0), (11, 1e-9), (300, 0.05), (300, 0.2), (100, 0.5)]
)
def test_threshold_is_torchs_quantile(count, share):
    """Of trained tokens, with ties; what is masked or not finite does not count."""
    entropy, mask = 3 * torch.rand(20, 20), torch.zeros(20, 20, dtype=torch.int64)
    entropy[:, ::7] = 0.5
    mask.view(-1)[torch.randperm(400)[:count]] = 1
    expected = torch.quantile(entropy[mask != 0].double(), 1 - share)
    for poison, trained in ((9.0, mask.bool()), (nan, mask * 0 + 1)):
        got = entropy_threshold(torch.where(mask != 0, entropy, poison), trained, share)
        assert float(got) == pytest.approx(float(expected), rel=2.0**-23)  # one spacing of fp32


def test_no_tokens_keep_all():
    assert (
        float(entropy_threshold(torch.rand(3, 4), torch.zeros(3, 4, dtype=torch.bool), 0.2))
        == LOWEST
    )


def test_threshold_waits_for_nothing():
    """Meta tensors have no data, so reading a value raises."""
    assert (
        entropy_threshold(
            torch.rand(3, 4, device="meta"), torch.ones(3, 4, device="meta"), 0.2
        ).shape
        == ()
    )


# ---- the coefficient


@pytest.mark.parametrize(
    "options",
    [{}, {"step": 0.3, "low": 0.1, "high": 0.5, "initial": 0.2}, {"target": 0.35, "high": 0.2}],
    ids=str,
)
def test_the_coefficient_moves_as_trls_does(options):
    """The rule of TRL 1.16 (trl/trainer/grpo_trainer.py, `use_adaptive_entropy`), retold. It is not
    applied before the first update, and a new run continues where the checkpoint was.
    """
    trl = {"target": 0.2, "step": 0.005, "low": 0.0, "high": 1.0, "initial": 0.0} | options
    ours, coef, last = AdaptiveEntropyCoef(**options), trl["initial"], inf
    for entropy in (
        0.5,
        0.2,
        0.1,
        0.1,
        0.3,
        0.15,
        *[0.2001] * 4,
        0.0,
        *(torch.rand(30) / 2).tolist(),
    ):
        assert ours.coef == (coef if last <= trl["target"] else 0.0)
        ours.update(entropy)
        moved = coef + (trl["step"] if entropy <= trl["target"] else -trl["step"])
        coef, last = min(max(moved, trl["low"]), trl["high"]), entropy
        state, ours = ours.state_dict(), AdaptiveEntropyCoef(**options)
        ours.load_state_dict(state)


# ---- refusals


FLAT = TokenBatch(
    torch.zeros(6, dtype=torch.int64),
    torch.zeros(6),
    old_logps=torch.zeros(6),
    sampler_logps=torch.zeros(6),
)
BOOLS = torch.ones(2, 3).bool()
GOOD, ONES = {"batch": batch_of(*ratios())}, torch.ones(3)
#: A call that is fine, and what its message says if these arguments are others.
REFUSED = [
    (
        importance_weights,
        GOOD,
        {
            r"level='batch': .*geometric": {"level": "batch"},
            r"low=-0\.1: .*>= 0": {"low": -0.1},
            "high=0: .*above 0": {"high": 0},
            r"high=0\.5: .*low=0\.8": {"low": 0.8, "high": 0.5},
        },
    ),
    (
        rejection_mask,
        {**GOOD, "high": 1.0},
        {
            "metric='k4': .*k3": {"metric": "k4"},
            "high=inf: pass low=, high= or both": {"high": inf},
            'cu_seqlens is None, but over="max"': {"batch": FLAT, "over": "max"},
        },
    ),
    (second_moment_mask, {**GOOD, "threshold": 1.0}, {"threshold=0: .*above 0": {"threshold": 0}}),
    (
        correction_metrics,
        GOOD,
        {"low=-1: ": {"low": -1}, r"weights is \[7\]": {"weights": torch.ones(7)}},
    ),
    (
        without_truncated,
        {"mask": BOOLS, "finished": BOOLS[:, 0]},
        {
            r"finished has shape \[3\]": {"finished": BOOLS[0]},
        },
    ),
    (
        CORRECTIONS["tis"],
        GOOD,
        {
            "old_logps is None: .*old_logps=": {"batch": replace(GOOD["batch"], old_logps=None)},
            "sampler_logps is None: .*sampler_logps=": {
                "batch": replace(GOOD["batch"], sampler_logps=None)
            },
        },
    ),
    (
        CORRECTIONS["without_truncated"],
        {**GOOD, "finished": torch.ones(7).bool()},
        {"finished=None: the correction 'without_truncated'": {"finished": None}},
    ),
    (
        entropy_threshold,
        {"entropy": ONES, "mask": ONES, "share": 0.2},
        {
            r"share=0.*\(0, 1\]": {"share": 0},
            r"mask has shape \[3\], but entropy has \[3, 1\]": {"entropy": ONES[:, None]},
        },
    ),
    (
        lambda **state: AdaptiveEntropyCoef().load_state_dict(state),
        {"coef": 0.1, "entropy": 0.1},
        {"state=.*'x'": {"x": 0}, "coef=2": {"coef": 2}, "entropy='a'": {"entropy": "a"}},
    ),
]


@refusals(REFUSED)
def test_refusals(refused):
    refused()
