"""Objectives without logits: what they refuse, which rows they need, weights and normalisers by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import Denominators, Objective, TokenBatch
from grpo_kernels.formulas.filters import EntropyFloor, EntropyQuantile, OffPolicySequences, TrustRegion
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import (
    A2po,
    Cispo,
    Clip,
    ClipCov,
    Custom,
    Dro,
    Gmpo,
    ImportanceSampling,
    KlCov,
    PolicyGradient,
    Sapo,
    Surrogate,
    Vespo,
)
from support.cases import build

Tensor = torch.Tensor
AGGREGATES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "group-mean", "token-sum", "constant"]


def test_defaults() -> None:
    assert Objective() == Objective(
        surrogate=Clip(0.2, 0.2, math.inf),
        level="token",
        aggregate="token-mean",
        beta=0.0,
        kl="k3",
        entropy_coef=0.0,
        max_tokens=None,
        filters=(),
        log_ratio_bounds=None,
        kl_aggregate=None,
        entropy_aggregate=None,
        count_empty=True,
    )


# ---- refusals at construction


@pytest.mark.parametrize(
    "field, changes",
    [
        ("surrogate", {"surrogate": "clip"}),
        ("surrogate", {"surrogate": Clip}),
        ("level", {"level": "group"}),
        ("aggregate", {"aggregate": "mean"}),
        ("aggregate", {"aggregate": None}),
        ("kl_aggregate", {"kl_aggregate": "mean"}),
        ("entropy_aggregate", {"entropy_aggregate": "token_mean"}),
        ("beta", {"beta": -0.1}),
        ("beta", {"beta": math.nan}),
        ("beta", {"beta": math.inf}),
        ("kl", {"kl": "k4"}),
        ("kl", {"kl": None}),
        ("entropy_coef", {"entropy_coef": math.inf}),
        ("entropy_coef", {"entropy_coef": "0"}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 2.5}),
        ("filters", {"filters": [EntropyFloor(1.0)]}),
        ("filters", {"filters": (Clip(),)}),
        ("log_ratio_bounds", {"log_ratio_bounds": 20.0}),
        ("log_ratio_bounds", {"log_ratio_bounds": (-20.0,)}),
        ("log_ratio_bounds", {"log_ratio_bounds": [-20.0, 20.0]}),
        ("log_ratio_bounds", {"log_ratio_bounds": (0.0, 20.0)}),
        ("log_ratio_bounds", {"log_ratio_bounds": (-20.0, -1.0)}),
        ("log_ratio_bounds", {"log_ratio_bounds": (-20.0, math.nan)}),
        ("log_ratio_bounds", {"log_ratio_bounds": (-20.0, 20.0), "surrogate": Dro()}),
    ],
    ids=str,
)
def test_refusals_name_the_field(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{field}="):
        Objective(**changes)


#: Levels that a surrogate is defined at.
LEVELS_OF: dict[Surrogate, tuple[str, ...]] = {
    Clip(): ("token", "sequence", "sequence-token", "sequence-sum"),
    Cispo(): ("token", "sequence", "sequence-token", "sequence-sum"),
    PolicyGradient(): ("token", "sequence", "sequence-token", "sequence-sum"),
    ImportanceSampling(): ("token", "sequence", "sequence-token", "sequence-sum"),
    Sapo(): ("token", "sequence", "sequence-token", "sequence-sum"),
    Vespo(): ("sequence-sum",),
    Gmpo(): ("sequence",),
    A2po(): ("sequence-sum",),
    Dro(): ("token",),
    ClipCov(): ("token",),
    KlCov(): ("token",),
}


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-token", "sequence-sum"])
@pytest.mark.parametrize("surrogate", LEVELS_OF, ids=lambda s: type(s).__name__)
def test_levels_of_a_surrogate(surrogate: Surrogate, level: str) -> None:
    if level in LEVELS_OF[surrogate]:
        assert Objective(surrogate, level=level).level == level
    else:
        with pytest.raises(ValueError, match=rf"^level='{level}': {type(surrogate).__name__} is defined at level .* only"):
            Objective(surrogate, level=level)


# ---- refusals of a batch


def packed(n: int = 6, **fields: Any) -> TokenBatch:
    return TokenBatch(torch.zeros(n, dtype=torch.int64), torch.ones(n), **fields)


@pytest.mark.parametrize(
    "message, objective, fields",
    [
        (r"ref_logps is None, but beta=0.1", {"beta": 0.1}, {}),
        (r"sampler_logps is None", {"filters": (TrustRegion(anchor="sampler"),)}, {}),
        (r"max_tokens is None", {"aggregate": "constant"}, {"cu_seqlens": torch.tensor([0, 6])}),
        (r"max_tokens is None", {"kl_aggregate": "constant", "beta": 1.0}, {"cu_seqlens": torch.tensor([0, 6]), "ref_logps": torch.zeros(6)}),
        (r"groups is None", {"aggregate": "group-mean"}, {"cu_seqlens": torch.tensor([0, 6])}),
        (r"groups is None", {"entropy_aggregate": "group-mean", "entropy_coef": 0.1}, {"cu_seqlens": torch.tensor([0, 6])}),
        (r"cu_seqlens is None", {"aggregate": "seq-mean-token-mean"}, {}),
        (r"cu_seqlens is None", {"aggregate": "seq-mean-token-sum"}, {}),
        (r"cu_seqlens is None", {"aggregate": "constant", "max_tokens": 5}, {}),
        (r"cu_seqlens is None", {"kl_aggregate": "seq-mean-token-mean", "beta": 1.0}, {"ref_logps": torch.zeros(6)}),
        (r"cu_seqlens is None", {"entropy_aggregate": "seq-mean-token-sum", "entropy_coef": 1.0}, {}),
        (r"cu_seqlens is None", {"level": "sequence"}, {}),
        (r"cu_seqlens is None", {"level": "sequence-token"}, {}),
        (r"cu_seqlens is None", {"level": "sequence-sum"}, {}),
        (r"cu_seqlens is None", {"filters": (OffPolicySequences(),)}, {}),
    ],
)  # fmt: skip
def test_a_batch_that_lacks_something_is_refused(message: str, objective: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**objective).token_rows(packed(**fields))


def test_vespo_wants_its_weights_per_token() -> None:
    """They are factors of the sequence's ratio: one weight of a sequence would count once for each of its tokens."""
    batch = replace(three_sequences(), weights=torch.tensor([0.5, 2.0, 7.0]))
    with pytest.raises(ValueError, match=r"weights has shape \[3\]"):
        Objective.preset("vespo").token_rows(batch)


def test_what_is_switched_off_is_not_asked_for() -> None:
    """Without a KL term or a bonus their aggregates, and the reference, do not matter."""
    for changes in ({"kl_aggregate": "constant"}, {"entropy_aggregate": "group-mean"}, {"kl": Kl("k1", "ratio")}):
        rows = Objective(**changes).token_rows(packed(ref_logps=torch.zeros(6)))  # type: ignore[arg-type]
        assert rows.kl_weight is rows.entropy_weight is rows.ref_logps is rows.nll_weight is rows.sampler_logps is None


# ---- what an objective needs


def test_one_pass() -> None:
    for one in (Clip(), Cispo(), PolicyGradient(), ImportanceSampling(), Sapo(), Dro(), Custom(Clip.function, (0.1, 0.2, 3.0))):
        assert Objective(one, beta=0.1, entropy_coef=0.1, aggregate="group-mean", filters=(TrustRegion(), EntropyFloor(1.0))
                         if not isinstance(one, Dro) else ()).one_pass  # fmt: skip
    for two in (ClipCov(), KlCov()):
        assert not Objective(two).one_pass
    for level in ("sequence", "sequence-token", "sequence-sum"):
        assert not Objective(level=level).one_pass
    for f in (EntropyQuantile(0.2), OffPolicySequences()):
        assert not Objective(filters=(f,)).one_pass


@pytest.mark.parametrize(
    "objective, rows",
    [
        (Objective(), "contributing"),
        (Objective(beta=0.1), "trained"),
        (Objective(entropy_coef=-0.1), "trained"),
        (Objective(Dro()), "trained"),
        (Objective(KlCov()), "trained"),
        (Objective(A2po(), level="sequence-sum"), "trained"),
        (Objective(level="sequence"), "sequences"),
        (Objective(level="sequence-sum"), "sequences"),
        (Objective(Gmpo(), level="sequence"), "sequences"),
        (Objective(level="sequence-token"), "contributing"),
        (Objective(Cispo(), level="sequence"), "contributing"),
        (Objective(Vespo(), level="sequence-sum"), "contributing"),
        (Objective(Custom(Clip.function, (0.1, 0.2, 3.0))), "trained"),
        (Objective(Custom(Clip.function, (0.1, 0.2, 3.0), zero_at_zero_advantage=True)), "contributing"),
    ],
)
def test_active_rows(objective: Objective, rows: str) -> None:
    assert objective.active_rows == rows


def test_entropy_flag() -> None:
    assert not Objective().needs_entropy and Objective(entropy_coef=-0.1).needs_entropy
    assert not Objective(filters=(EntropyFloor(1.0),)).needs_entropy, "a filter has no gradient"


# ---- normalisers and weights


def three_sequences() -> TokenBatch:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    groups = torch.tensor([7, 7, -2])
    return TokenBatch(torch.zeros(3, 4, dtype=torch.int64), torch.ones(3), mask=mask, groups=groups)


#: Aggregate, count_empty, denominator, weights of a token of the first and of the second sequence.
BY_HAND = [
    ("token-mean", True, 5, 1 / 5, 1 / 5),
    ("seq-mean-token-mean", True, 3, 1 / 12, 1 / 3),
    ("seq-mean-token-mean", False, 2, 1 / 8, 1 / 2),
    ("seq-mean-token-sum", True, 3, 1 / 3, 1 / 3),
    ("seq-mean-token-sum", False, 2, 1 / 2, 1 / 2),
    ("group-mean", True, 2, 1 / 10, 1 / 10),
    ("group-mean", False, 1, 1 / 5, 1 / 5),
    ("token-sum", True, 1, 1.0, 1.0),
    ("constant", True, 30, 1 / 30, 1 / 30),
    ("constant", False, 20, 1 / 20, 1 / 20),
]


@pytest.mark.parametrize("aggregate, count_empty, denominator, first, second", BY_HAND)
def test_weights_by_hand(aggregate: str, count_empty: bool, denominator: float, first: float, second: float) -> None:
    """Sequences with 4, 1 and 0 trained tokens, the last the only one of its group."""
    objective, batch = Objective(aggregate=aggregate, max_tokens=10, count_empty=count_empty), three_sequences()
    assert float(objective.normalizer(batch)) == pytest.approx(denominator)
    rows = objective.token_rows(batch)
    expected = torch.tensor([first] * 4 + [second] + [0.0] * 7)
    torch.testing.assert_close(rows.policy_weight, expected)
    given = objective.token_rows(batch, normalizer=denominator * 2.0)
    torch.testing.assert_close(given.policy_weight, expected / 2)


@pytest.mark.parametrize("aggregate, count_empty, denominator, first, second", BY_HAND)
def test_terms_with_an_aggregate_of_their_own(
    aggregate: str, count_empty: bool, denominator: float, first: float, second: float
) -> None:
    """It is that of this batch, whatever normaliser the policy term is given."""
    batch = replace(three_sequences(), ref_logps=torch.zeros(3, 4))
    expected = torch.tensor([first] * 4 + [second] + [0.0] * 7)
    objective = Objective(
        max_tokens=10, count_empty=count_empty, beta=0.5, entropy_coef=-2.0, kl_aggregate=aggregate, entropy_aggregate=aggregate
    )
    for normalizer in (None, 77.0):
        rows = objective.token_rows(batch, normalizer)
        assert rows.kl_weight is not None and rows.entropy_weight is not None
        torch.testing.assert_close(rows.kl_weight, 0.5 * expected)
        torch.testing.assert_close(rows.entropy_weight, -2.0 * expected)
        assert float(rows.policy_weight[0]) == pytest.approx(1 / (normalizer or 5))
    shared = replace(objective, aggregate=aggregate, kl_aggregate=None, entropy_aggregate=None)
    rows = shared.token_rows(batch, 2.0 * denominator)
    assert rows.kl_weight is not None and rows.entropy_weight is not None
    torch.testing.assert_close(rows.kl_weight, 0.5 * expected / 2)
    torch.testing.assert_close(rows.entropy_weight, -2.0 * expected / 2)


@pytest.mark.parametrize("mask", [None, torch.ones(5)], ids=["no mask", "mask"])
@pytest.mark.parametrize("aggregate", ["seq-mean-token-mean", "seq-mean-token-sum", "constant", "group-mean"])
def test_an_empty_packed_sequence_is_counted_or_not(aggregate: str, mask: Tensor | None) -> None:
    """Of three sequences one has no rows at all; each is a group of its own."""
    fields = {"mask": None if mask is None else mask.bool(), "groups": torch.arange(3)}
    batch = packed(5, cu_seqlens=torch.tensor([0, 2, 2, 5]), **fields)
    for count_empty, count in ((True, 3), (False, 2)):
        objective = Objective(aggregate=aggregate, max_tokens=1, count_empty=count_empty)
        assert float(objective.normalizer(batch)) == pytest.approx(count)


def test_groups_of_many_sequences() -> None:
    """The mean is over a group's tokens, not over its sequences, and ids are any integers in any order."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    batch = TokenBatch(torch.zeros(4, 3, dtype=torch.int64), torch.ones(4), mask=mask, groups=torch.tensor([5, -1, 5, -1]))
    rows = Objective(aggregate="group-mean").token_rows(batch)
    expected = torch.where(mask, torch.tensor([1 / 10, 1 / 2, 1 / 10, 1 / 2])[:, None], 0.0)
    torch.testing.assert_close(rows.policy_weight.view(4, 3), expected)


def test_weights_multiply_the_policy_term_only() -> None:
    batch = replace(three_sequences(), weights=torch.tensor([0.5, 2.0, 7.0]), ref_logps=torch.zeros(3, 4))
    rows = Objective(beta=1.0, entropy_coef=1.0).token_rows(batch)
    assert rows.policy_weight[:5].tolist() == pytest.approx([0.1] * 4 + [0.4])
    for other in (rows.kl_weight, rows.entropy_weight):
        assert other is not None and other[:5].tolist() == pytest.approx([0.2] * 5)


def test_nll_weights_are_taken_as_they_are() -> None:
    batch = replace(three_sequences(), nll_weights=torch.tensor([0.5, 2.0, 7.0]))
    rows = Objective().token_rows(batch, normalizer=100.0)
    assert rows.nll_weight is not None and rows.nll_weight.tolist() == [0.5] * 4 + [2.0] + [0.0] * 7


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("count_empty", [True, False])
def test_denominators_of_empty_batches_are_at_least_one(aggregate: str, count_empty: bool) -> None:
    objective = Objective(aggregate=aggregate, max_tokens=10, count_empty=count_empty)
    for shape in ((0, 4), (3, 0), (3, 4)):
        targets = torch.zeros(shape, dtype=torch.int64)
        groups = torch.arange(shape[0])
        batch = TokenBatch(targets, torch.zeros(shape), mask=torch.zeros(shape, dtype=torch.bool), groups=groups)
        rows = objective.token_rows(batch)
        assert torch.isfinite(rows.policy_weight).all() and not rows.policy_weight.any()
        assert math.isfinite(float(objective.normalizer(batch)))


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("count_empty", [True, False])
def test_a_given_normalizer_of_zero_trained_tokens(aggregate: str, count_empty: bool) -> None:
    """objective.normalizer() of an all-masked batch, passed on as the docs say, must not give 0 / 0."""
    batch = replace(three_sequences(), mask=torch.zeros(3, 4, dtype=torch.bool))
    objective = Objective(aggregate=aggregate, max_tokens=10, count_empty=count_empty)
    normalizer = objective.normalizer(batch)
    if float(normalizer) == 0 and not isinstance(normalizer, Tensor):
        normalizer = torch.tensor(normalizer)
    assert not objective.token_rows(batch, normalizer=normalizer).policy_weight.any()


@pytest.mark.parametrize("aggregate", ["token-mean", "token-sum"])
def test_packed_without_offsets_is_enough_for_token_aggregates(aggregate: str) -> None:
    weight = {"token-mean": 1 / 6, "token-sum": 1.0}[aggregate]
    assert Objective(aggregate=aggregate).token_rows(packed()).policy_weight.tolist() == pytest.approx([weight] * 6)


def test_weights_that_enter_a_logarithm_are_not_negative() -> None:
    case = build()
    weights = torch.ones(case.targets.shape)
    weights[0, 0] = -0.5
    with pytest.raises(ValueError, match="weights holds negative numbers"):
        Objective.preset("vespo").token_rows(case.batch(weights=weights))
    assert case.mask is not None
    masked = torch.where(case.mask, 1.0, -1.0)  # what a masked token holds has no effect
    Objective.preset("vespo").token_rows(case.batch(weights=masked))


@pytest.mark.parametrize("own", [None, "token-sum"])
def test_each_term_is_divided_by_its_own_denominator(own: str | None) -> None:
    """Also where the KL and the bonus have no aggregation of their own; None is the policy term's then, else the batch's."""
    batch = TokenBatch(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2), ref_logps=torch.zeros(2, 3))
    objective = Objective(beta=0.5, entropy_coef=0.25, kl_aggregate=own, entropy_aggregate=own)
    for given, expected in (
        (Denominators(8.0, 4.0, 2.0), (8.0, 4.0, 2.0)),
        (Denominators(8.0, None, 2.0), (8.0, 8.0 if own is None else 1.0, 2.0)),
        (Denominators(None, 4.0), (6.0, 4.0, 6.0 if own is None else 1.0)),
        (Denominators(16.0, 8.0, None) / 2, (8.0, 4.0, 8.0 if own is None else 1.0)),
    ):
        rows = objective.token_rows(batch, given)
        assert rows.kl_weight is not None and rows.entropy_weight is not None
        found = (1 / rows.policy_weight[0], 0.5 / rows.kl_weight[0], 0.25 / rows.entropy_weight[0])
        torch.testing.assert_close(torch.stack(found), torch.tensor(expected))
