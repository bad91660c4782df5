"""Filters: which tokens they keep, also at their bounds, and the terms to which a dropped token still contributes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log, nan
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.formulas.filters import (
    TRUST_REGIONS,
    EntropyFloor,
    EntropyQuantile,
    Filter,
    OffPolicySequences,
    TrustRegion,
)
from grpo_kernels.formulas.surrogates import Custom, ImportanceSampling
from support import oracle
from support.oracle import Margin
from support.stages import packed, run

Tensor = torch.Tensor
KINDS = sorted(TRUST_REGIONS)
ONE = Custom(lambda logp, old_logp, advantage, params: (1.0 + 0.0 * logp, 1.0 + 0.0 * logp))


def kept(f: Filter, logps: Any, entropy: Any = None, **fields: Any) -> list[bool]:
    """The tokens of two sequences that still have a policy term: those that the filter says it keeps."""
    logps, n = torch.as_tensor(logps), len(logps)
    batch = packed(n, n // 2, **{k: torch.as_tensor(x) for k, x in fields.items()})
    objective = Objective(ONE, filters=(f,))
    found = (run(objective, batch, logps, entropy)[0] != 0).tolist()
    assert (
        found
        == (f.keep(logps, entropy, objective.token_rows(batch), batch) & (True if batch.mask is None else batch.mask)).tolist()
    )
    return found


# ---- trust regions


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.05, 0.3), (inf, 0.1), (0.5, inf)])
@pytest.mark.parametrize("kind", KINDS)
def test_trust_region_on_a_grid(kind: str, low: float, high: float) -> None:
    """Probabilities under the policy and the anchor, a hair inside and outside of the bounds too, and all signs of the advantage,
    against the definition token by token."""
    q = torch.linspace(0.02, 0.98, 23, dtype=torch.float64).repeat_interleave(34)
    near = torch.tensor([high, -low, high * 0.51, -low * 0.51], dtype=torch.float64).repeat_interleave(2) + torch.tensor(
        [1e-5, -1e-5] * 4
    )
    p = torch.cat([torch.linspace(0.011, 0.991, 26), near]).repeat(23)
    p = torch.where(torch.arange(len(p)) % 34 < 26, p, q + p).clamp(1e-3, 0.999)
    seen = set()
    for a in (-1.3, 0.0, 0.8):
        x, y = p.float().log(), q.float().log()
        found = kept(TrustRegion(kind, low, high), x, old_logps=y, advantages=torch.full_like(x, a))
        for keep, logp, anchor in zip(found, x.tolist(), y.tolist(), strict=True):
            margin = Margin()
            expected = oracle.trusts(kind, low, high, logp, anchor, a, margin)
            assert keep == expected or margin.smallest < 1e-6, (math.exp(logp), math.exp(anchor), a)
            seen.add((expected, a > 0))
    assert len(seen) == 4 or inf in (low, high)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_has_not_moved(kind: str) -> None:
    """It is inside a region of no width, p - q = 0 <= 0; the region of ratios is open, as its source has it. One that the
    sampler did not score is dropped whatever its advantage is, and without old_logps nothing has moved."""
    for low, high in ((0.0, 0.0), (0.0, 0.5), (0.5, 0.0)):
        assert kept(TrustRegion(kind, low, high), [-0.7] * 2, old_logps=[-0.7] * 2) == [kind != "ratio"] * 2
    assert all(kept(TrustRegion(kind), -torch.rand(6)))
    for a in (1.0, -1.0, 0.0):
        f = TrustRegion(kind, anchor="sampler")
        assert kept(f, [-0.5] * 4, sampler_logps=[nan, -0.5, -0.5, nan], advantages=[a] * 4) == [False, True, True, False]


def test_anchors() -> None:
    """old_logps and sampler_logps give different sets of tokens that have moved."""
    given = {"old_logps": [log(0.5), log(0.9)], "sampler_logps": [log(0.9), log(0.5)]}
    assert kept(TrustRegion("tv"), [log(0.9)] * 2, **given) == [False, True]
    assert kept(TrustRegion("tv", anchor="sampler"), [log(0.9)] * 2, **given) == [True, False]


# ---- entropy


def test_entropy_floor_includes_its_bound() -> None:
    entropy = torch.tensor([0.0, 1.0, 0.75, 0.7499999, 2.0, math.nextafter(0.75, 0)])
    assert kept(EntropyFloor(0.75), [-1.0] * 6, entropy) == [False, True, True, False, True, True]
    assert all(kept(EntropyFloor(-1.0), [-1.0] * 6, entropy))


# ---- off-policy sequences

ON, OFF = [True] * 3, [False] * 3
SAMPLER = {"sampler_logps": [-1.0] * 6}


@pytest.mark.parametrize(
    "delta, changes, expected",
    [
        (0.5, SAMPLER, ON + ON),  # at the bound is inside
        (0.49, SAMPLER, OFF + ON),
        (0.2, SAMPLER, OFF + OFF),
        (0.2, {**SAMPLER, "advantages": [-1.0, 0.0, 1.0] * 2}, [False, True, True] * 2),  # only A < 0 is dropped
        (0.2, {"sampler_logps": [-1.0, nan, -1.0, -1.0, -1.0, -1.0]}, ON + OFF),  # NaN counts as 0
        (0.49, {"old_logps": [-1.0] * 6}, OFF + ON),  # which stands in for the sampler
        (-1.0, {}, OFF + OFF),  # on-policy: 0 > -1
        (0.0, {}, ON + ON),
        (
            0.3,
            {"sampler_logps": [-1.0, 1e9, -1.0, nan, -1.0, -1.0], "mask": [1, 0, 1, 0, 1, 1]},
            [True, False, True, False, True, True],
        ),
    ],
)
def test_off_policy_sequences_by_hand(delta: float, changes: dict[str, Any], expected: list[bool]) -> None:
    """Means of (sampler - logp): 0.5 and 0.25, of trained tokens only."""
    logps = [-1.0, -2.0, -1.5, -1.25, -1.25, -1.25]
    if "mask" in changes:
        logps[1] = logps[3] = 0.0
    assert kept(OffPolicySequences(delta), logps, **{"advantages": [-1.0] * 6, **changes}) == expected


# ---- terms of a dropped token


@pytest.mark.parametrize(
    "f", [TrustRegion("tv", 0.0, 0.0), TrustRegion("ratio"), EntropyFloor(99.0), OffPolicySequences(-9999.0)], ids=str
)
def test_a_filtered_token_keeps_its_kl_and_its_place_in_the_denominator(f: Filter) -> None:
    """And it may be anything: its weight and its ratio overflow, and it still contributes exactly 0."""
    advantages, weights, old, ref, logps = (
        torch.full((6,), x) for x in (-3e38, 3e38, -1e3 if "tv" not in str(f) else 1e3, -2.0, -0.8)
    )
    batch = packed(advantages=advantages, weights=weights, old_logps=old, ref_logps=ref)
    for beta in (0.0, 0.5):
        objective = Objective(ImportanceSampling(), filters=(f,), beta=beta, kl="k2")
        losses, slopes, _ = run(objective, batch, logps, torch.ones(6))
        torch.testing.assert_close(losses, torch.full((6,), beta * 1.2**2 / 2 / 6))
        torch.testing.assert_close(slopes, torch.full((6,), beta * 1.2 / 6))
        assert float(objective.normalizer(batch)) == 6


# ---- the specification


@dataclass(frozen=True)
class EverySecond(Filter):
    """A filter of a user."""

    def keep(self, logps: Tensor, entropy: Tensor | None, rows: Any, batch: TokenBatch | None) -> Tensor:
        return torch.arange(len(logps)) % 2 == 0


def test_a_filter_of_yours_is_not_passed_over() -> None:
    assert kept(EverySecond(), [-1.0] * 6) == [True, False] * 3


def test_one_pass() -> None:
    assert Objective(filters=(TrustRegion(), EntropyFloor(1.0))).one_pass
    for f in (EntropyQuantile(0.2), OffPolicySequences(), EverySecond()):
        assert not Objective(filters=(f,)).one_pass and not Objective(filters=(TrustRegion(), f)).one_pass


#: What each field refuses.
PARAMETERS = {
    TrustRegion: {"kind": ("kl2", None, 3), "low": (-0.1, nan, "0.2"), "high": (-0.1, nan, None), "anchor": ("ref", None)},
    EntropyFloor: {"threshold": (nan, inf, None)},
    EntropyQuantile: {"share": (0.0, -0.1, 1.1, nan)},
    OffPolicySequences: {"delta": (nan, inf, "0.5")},
}


@pytest.mark.parametrize("kind", PARAMETERS, ids=lambda kind: kind.__name__)
def test_bad_parameters_name_the_field(kind: type[Filter]) -> None:
    for name, values in PARAMETERS[kind].items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}="):
                kind(**{name: value})


ALONE = TokenBatch(torch.zeros(4, dtype=torch.int64), torch.ones(4))


@pytest.mark.parametrize(
    "message, make",
    [
        *(
            ("^filters=", lambda filters=filters: Objective(filters=filters))
            for filters in (
                [TrustRegion()],
                TrustRegion(),
                ("tv",),
                (TrustRegion("tv"), TrustRegion("kl")),
                (EntropyFloor(1.0), EntropyQuantile(0.2)),
                (OffPolicySequences(), OffPolicySequences(0.1)),
            )
        ),
        *(
            ("^level=.*TrustRegion", lambda level=level: Objective(level=level, filters=(TrustRegion(),)))
            for level in ("sequence", "sequence-token", "sequence-sum")
        ),
        ("cu_seqlens is None", lambda: Objective(filters=(OffPolicySequences(),)).token_rows(ALONE)),
        (
            "sampler_logps is None, but TrustRegion",
            lambda: Objective(filters=(TrustRegion(anchor="sampler"),)).token_rows(ALONE),
        ),
    ],
)
def test_refusals(message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        make()
