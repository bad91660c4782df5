"""Filters: which tokens they keep, also at their bounds, and the terms to which a dropped token still contributes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.formulas.filters import (
    TRUST_REGIONS,
    EntropyFloor,
    EntropyQuantile,
    Filter,
    OffPolicySequences,
    TrustRegion,
)
from grpo_kernels.formulas.surrogates import Clip, ImportanceSampling
from support import oracle
from support.oracle import Margin, Spec, Tokens

Tensor = torch.Tensor
F64 = torch.float64
KINDS = sorted(TRUST_REGIONS)


def batch_of(n: int = 6, **fields: Any) -> TokenBatch:
    """n tokens in two packed sequences."""
    fields.setdefault("advantages", torch.ones(n))
    return TokenBatch(torch.zeros(n, dtype=torch.int64), cu_seqlens=torch.tensor([0, n // 2, n]), **fields)


def kept(f: Filter, batch: TokenBatch, logps: Tensor, entropy: Tensor | None = None) -> list[bool]:
    """By the filter alone."""
    rows = Objective(filters=(f,)).token_rows(batch)
    return f.keep(logps, entropy, rows, batch).tolist()


# ---- trust regions


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.05, 0.3), (0.0, 0.0), (math.inf, 0.1), (0.5, math.inf)])
@pytest.mark.parametrize("kind", KINDS)
def test_trust_region_on_a_grid(kind: str, low: float, high: float) -> None:
    """All probabilities under the policy and the anchor, all signs, against the definition token by token."""
    p, q = torch.meshgrid(torch.linspace(0.011, 0.991, 50, dtype=F64), torch.linspace(0.02, 0.98, 49, dtype=F64), indexing="ij")
    logp, anchor = p.flatten().log(), q.flatten().log()
    region = TrustRegion(kind, low, high)
    for a in (-1.3, 0.0, 0.8):
        ours = TRUST_REGIONS[kind](logp, anchor, torch.full_like(logp, a), region.params)
        assert ours.dtype == torch.bool
        seen = set()
        for x, y, keep in zip(logp.tolist(), anchor.tolist(), ours.tolist(), strict=True):
            margin = Margin()
            expected = oracle.trusts(kind, low, high, x, y, a, margin)
            assert keep == expected or margin.smallest < 1e-12, (math.exp(x), math.exp(y), a)
            seen.add(expected)
        assert len(seen) == 2 or a <= 0 or high == math.inf or low == high == 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kind, side", [(k, s) for k in ("tv", "symmetric-tv", "ratio") for s in ("low", "high")])
def test_trust_region_at_its_bounds(kind: str, side: str, sign: float) -> None:
    """Just inside and just outside. tv only considers the direction in which A pushes."""
    low, high, q, hair = 0.15, 0.25, 0.5, 1e-5
    bound = {"low": 1 - low, "high": 1 + high}[side] * q if kind == "ratio" else q + (high if side == "high" else -low)
    inward = hair if side == "low" else -hair
    p = torch.tensor([bound + inward, bound - inward])
    batch = batch_of(2, advantages=torch.full((2,), sign), old_logps=torch.full((2,), math.log(q)))
    watched = kind != "tv" or (side == "high") == (sign > 0)
    assert kept(TrustRegion(kind, low, high), batch, p.log()) == [True, not watched]


def test_an_unmoved_token_is_inside_a_region_of_no_width_but_for_ratios() -> None:
    """p - q = 0 <= 0; the region of ratios is open, as its source has it."""
    batch = batch_of(2, old_logps=torch.full((2,), -0.7))
    for kind in KINDS:
        for low, high in ((0.0, 0.0), (0.0, 0.5), (0.5, 0.0)):
            assert kept(TrustRegion(kind, low, high), batch, torch.full((2,), -0.7)) == [kind != "ratio"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_tokens_are_trusted(kind: str) -> None:
    assert all(kept(TrustRegion(kind), batch_of(6), -torch.rand(6)))


@pytest.mark.parametrize("a", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_the_sampler_did_not_score_are_dropped(kind: str, a: float) -> None:
    sampler = torch.tensor([math.nan, -0.5, -0.5, math.nan, -0.5, -0.5])
    batch = batch_of(6, advantages=torch.full((6,), a), sampler_logps=sampler)
    logps = torch.full((6,), -0.5)
    f = TrustRegion(kind, anchor="sampler")
    assert kept(f, batch, logps) == [False, True, True, False, True, True]
    objective = Objective(ImportanceSampling(), filters=(f,))
    losses, slopes, _ = objective.token_stage(logps, None, objective.token_rows(batch), batch)
    assert torch.isfinite(losses).all() and torch.isfinite(slopes).all() and not losses[[0, 3]].any()


def test_anchors() -> None:
    """old_logps and sampler_logps give different sets of tokens that have moved."""
    batch = batch_of(2, old_logps=torch.tensor([0.5, 0.9]).log(), sampler_logps=torch.tensor([0.9, 0.5]).log())
    logps = torch.full((2,), 0.9).log()
    assert kept(TrustRegion("tv"), batch, logps) == [False, True]
    assert kept(TrustRegion("tv", anchor="sampler"), batch, logps) == [True, False]
    with pytest.raises(ValueError, match="sampler_logps is None, but TrustRegion"):
        Objective(filters=(TrustRegion(anchor="sampler"),)).token_rows(replace(batch, sampler_logps=None))


# ---- entropy


def test_entropy_floor_includes_its_bound() -> None:
    entropy = torch.tensor([0.0, 1.0, 0.75, math.nextafter(0.75, 0), 0.7499999, 2.0])
    assert kept(EntropyFloor(0.75), batch_of(), torch.zeros(6), entropy) == [False, True, True, True, False, True]
    assert all(kept(EntropyFloor(-1.0), batch_of(), torch.zeros(6), entropy))


@given(st.integers(1, 40), st.floats(0.01, 1.0), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_entropy_quantile_is_that_of_the_trained_tokens(n: int, share: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    entropy, mask = 3 * torch.rand(n, generator=g), torch.rand(n, generator=g) < 0.7
    batch = TokenBatch(torch.zeros(n, dtype=torch.int64), torch.ones(n), mask=mask)
    ours = torch.tensor(kept(EntropyQuantile(share), batch, torch.zeros(n), torch.where(mask, entropy, 0.0)))[mask]
    if not mask.any():
        return
    h = entropy[mask].double()
    threshold = torch.quantile(h, 1 - share)
    clear = (h - threshold).abs() > 1e-6
    assert torch.equal(ours[clear], (h >= threshold)[clear])
    assert int(ours.sum()) >= 1 and (share < 1 or bool(ours.all()))


def test_entropy_filters_narrow_the_bonus_too() -> None:
    """The floor keeps the denominator; the quantile's bonus, aggregated by itself, is a mean over the tokens that are left."""
    entropy, batch = torch.tensor([0.1, 2.0, 0.2, 3.0, 4.0, 0.3]), batch_of(old_logps=torch.full((6,), -1.0))
    logps = torch.full((6,), -1.0)
    for f, aggregate, bonus in (
        (EntropyFloor(1.0), None, 9 / 6),
        (EntropyQuantile(0.5), None, 9 / 6),
        (EntropyFloor(1.0), "token-mean", 9 / 6),
        (EntropyQuantile(0.5), "token-mean", 9 / 3),
    ):
        objective = Objective(filters=(f,), entropy_coef=0.5, entropy_aggregate=aggregate)
        losses, slopes, d_entropy = objective.token_stage(logps, entropy, objective.token_rows(batch), batch)
        assert float(losses.sum()) == pytest.approx(-3 / 6 - 0.5 * bonus)
        assert d_entropy is not None and (d_entropy != 0).tolist() == [False, True, False, True, True, False]
        assert float(d_entropy.sum()) == pytest.approx(-0.5 * bonus / 3)
        assert (slopes != 0).tolist() == (d_entropy != 0).tolist()


# ---- off-policy sequences


def test_off_policy_sequences_by_hand() -> None:
    """Means of (sampler - logp): 0.5 and 0.25. At the bound is inside; a positive advantage protects; NaN counts as 0."""
    sampler = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0])
    logps = torch.tensor([-1.0, -2.0, -1.5, -1.25, -1.25, -1.25])
    bad = batch_of(advantages=torch.tensor([-1.0, -1.0]), sampler_logps=sampler)
    assert kept(OffPolicySequences(0.5), bad, logps) == [True] * 6
    assert kept(OffPolicySequences(0.49), bad, logps) == [False] * 3 + [True] * 3
    assert kept(OffPolicySequences(0.2), bad, logps) == [False] * 6
    mixed = replace(bad, advantages=torch.tensor([-1.0, 0.0, 1.0, -1.0, 0.0, 1.0]))
    assert kept(OffPolicySequences(0.2), mixed, logps) == [False, True, True] * 2
    unscored = replace(bad, sampler_logps=torch.tensor([-1.0, math.nan, -1.0, -1.0, -1.0, -1.0]))
    assert kept(OffPolicySequences(0.2), unscored, logps)[:3] == [True] * 3  # (0 + 0 + 0.5) / 3
    old = replace(bad, sampler_logps=None, old_logps=sampler)
    assert kept(OffPolicySequences(0.49), old, logps) == [False] * 3 + [True] * 3
    assert kept(OffPolicySequences(-1.0), replace(bad, sampler_logps=None), logps) == [False] * 6  # on-policy: 0 > -1
    assert kept(OffPolicySequences(0.0), replace(bad, sampler_logps=None), logps) == [True] * 6


def test_masked_tokens_have_no_say_about_their_sequence() -> None:
    batch = batch_of(
        advantages=-torch.ones(2),
        mask=torch.tensor([1, 1, 0, 1, 1, 0]),
        sampler_logps=torch.tensor([-1.0, -1.0, 1e9, -1.0, -1.0, math.nan]),
    )
    logps = torch.tensor([-1.1, -1.1, 0.0, -2.0, -2.0, 0.0])
    assert kept(OffPolicySequences(0.5), batch, logps)[:2] == [True] * 2
    assert kept(OffPolicySequences(0.5), batch, logps)[3:5] == [False] * 2


@given(st.integers(0, 10**6), st.floats(-0.5, 0.8))
@settings(max_examples=40, deadline=None)
def test_off_policy_sequences_match_the_oracle(seed: int, delta: float) -> None:
    g = torch.Generator().manual_seed(seed)
    logps, sampler = -torch.rand(12, generator=g), -torch.rand(12, generator=g)
    batch = batch_of(12, advantages=torch.randn(12, generator=g), sampler_logps=sampler)
    advantages = batch.advantages.tolist()
    tokens = Tokens(logps.tolist(), [0.0] * 12, advantages, None, sampler.tolist(), [list(range(6)), list(range(6, 12))])
    margin = Margin()
    expected, _ = oracle.filters(Spec(off_policy=delta), tokens, margin)
    assert margin.smallest < 1e-6 or kept(OffPolicySequences(delta), batch, logps) == expected


# ---- terms of a dropped token


EVERYTHING_OUT = (
    (TrustRegion("tv", 0.0, 0.0),),
    (EntropyFloor(99.0),),
    (OffPolicySequences(-99.0),),
    (EntropyFloor(99.0), OffPolicySequences(-99.0)),
)


@pytest.mark.parametrize("filters", EVERYTHING_OUT, ids=str)
def test_a_filtered_token_keeps_its_kl_and_its_place_in_the_denominator(filters: tuple[Filter, ...]) -> None:
    a, logps = -torch.ones(6), torch.full((6,), -0.8)
    if isinstance(filters[0], TrustRegion):
        logps = torch.full((6,), -1.2)
    batch = batch_of(
        advantages=a, old_logps=torch.full((6,), -1.0), ref_logps=torch.full((6,), -2.0), weights=torch.full((6,), 7.0)
    )
    objective = Objective(filters=filters, beta=0.5, kl="k2")
    rows = objective.token_rows(batch)
    losses, slopes, _ = objective.token_stage(logps, torch.ones(6), rows, batch)
    d = -2.0 - logps
    torch.testing.assert_close(losses, 0.5 * d * d / 2 / 6)
    torch.testing.assert_close(slopes, -0.5 * d / 6)
    assert float(objective.normalizer(batch)) == 6


@pytest.mark.parametrize("filters", EVERYTHING_OUT, ids=str)
def test_a_filtered_token_may_be_anything(filters: tuple[Filter, ...]) -> None:
    """Its ratio and its weight overflow, and it must still contribute exactly 0."""
    batch = batch_of(advantages=torch.full((6,), -3e38), old_logps=torch.full((6,), -1000.0), weights=torch.full((6,), 3e38))
    logps = torch.full((6,), -1200.0 if isinstance(filters[0], TrustRegion) else -1.0)
    if isinstance(filters[0], TrustRegion):
        filters = (TrustRegion("ratio"),)
    objective = Objective(ImportanceSampling(), filters=filters)
    losses, slopes, _ = objective.token_stage(logps, torch.ones(6), objective.token_rows(batch), batch)
    assert not losses.any() and not slopes.any()


def test_a_filtered_token_still_counts_in_its_sequences_ratio() -> None:
    """GSPO with an entropy floor: the token's own term is gone, the slope through the mean of the sequence is not."""
    batch = batch_of(old_logps=torch.full((6,), -1.0))
    logps, entropy = torch.tensor([-1.1, -0.9, -1.0, -1.05, -1.0, -1.0]), torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    objective = Objective(level="sequence", filters=(EntropyFloor(0.5),))
    losses, slopes, _ = objective.token_stage(logps, entropy, objective.token_rows(batch), batch)
    assert losses[0] == 0 and losses[1:3].all() and not losses[3:].any()
    assert slopes[:3].all() and not slopes[3:].any()


def test_filters_are_all_applied() -> None:
    batch = batch_of(advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]), old_logps=torch.full((6,), -1.0))
    logps = torch.tensor([-1.0, -0.2, -1.0, -2.0, -1.9, -1.8])
    entropy = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    filters = (TrustRegion("tv"), EntropyFloor(0.5), OffPolicySequences(0.5))
    objective = Objective(ImportanceSampling(), filters=filters)
    losses, _, _ = objective.token_stage(logps, entropy, objective.token_rows(batch), batch)
    assert (losses != 0).tolist() == [False, False, True, False, False, False]
    assert [len(set(kept(f, batch, logps, entropy))) for f in filters] == [2, 2, 2]


# ---- the specification


@dataclass(frozen=True)
class EverySecond(Filter):
    """A filter of a user."""

    def keep(self, logps: Tensor, entropy: Tensor | None, rows: Any, batch: TokenBatch | None) -> Tensor:
        return torch.arange(len(logps)) % 2 == 0


def test_a_filter_of_yours_is_not_passed_over() -> None:
    objective, batch = Objective(Clip(), filters=(EverySecond(),)), batch_of()
    losses, _, _ = objective.token_stage(-torch.ones(6), None, objective.token_rows(batch), batch)
    assert (losses != 0).tolist() == [True, False] * 3


def test_one_pass() -> None:
    assert Objective(filters=(TrustRegion(), EntropyFloor(1.0))).one_pass
    for f in (EntropyQuantile(0.2), OffPolicySequences(), EverySecond()):
        assert not Objective(filters=(f,)).one_pass
        assert not Objective(filters=(TrustRegion(), f)).one_pass


@pytest.mark.parametrize(
    "kind, field, values",
    [
        (TrustRegion, "kind", ("kl2", None, 3)),
        (TrustRegion, "low", (-0.1, math.nan, "0.2")),
        (TrustRegion, "high", (-0.1, math.nan, None)),
        (TrustRegion, "anchor", ("ref", None)),
        (EntropyFloor, "threshold", (math.nan, math.inf, None)),
        (EntropyQuantile, "share", (0.0, -0.1, 1.1, math.nan)),
        (OffPolicySequences, "delta", (math.nan, math.inf, "0.5")),
    ],
)
def test_bad_parameters_name_the_field(kind: type[Filter], field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{field}="):
            kind(**{field: value})


@pytest.mark.parametrize(
    "filters",
    [
        [TrustRegion()],
        TrustRegion(),
        ("tv",),
        (TrustRegion("tv"), TrustRegion("kl")),
        (EntropyFloor(1.0), EntropyQuantile(0.2)),
        (OffPolicySequences(), OffPolicySequences(0.1)),
    ],
    ids=str,
)
def test_refused_collections(filters: Any) -> None:
    with pytest.raises(ValueError, match=r"^filters="):
        Objective(filters=filters)


@pytest.mark.parametrize("level", ["sequence", "sequence-token", "sequence-sum"])
def test_trust_regions_are_for_tokens(level: str) -> None:
    with pytest.raises(ValueError, match=r"^level=.*TrustRegion"):
        Objective(level=level, filters=(TrustRegion(),))


def test_sequences_must_be_known_before_any_work() -> None:
    batch = TokenBatch(torch.zeros(4, dtype=torch.int64), torch.ones(4))
    with pytest.raises(ValueError, match="cu_seqlens is None"):
        Objective(filters=(OffPolicySequences(),)).token_rows(batch)
