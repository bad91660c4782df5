"""What each token counts in each term of a loss, and the loss of log-probs that were computed elsewhere: by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import (
    Denominators,
    LogitTransform,
    NoPolicyTerm,
    Objective,
    Options,
    TokenBatch,
    group_advantages,
    grpo_loss,
    linear_grpo_loss,
)
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.formulas.filters import EntropyFloor, EntropyQuantile, TrustRegion
from grpo_kernels.formulas.surrogates import Clip, PolicyGradient
from grpo_kernels.losses import objective_loss

Tensor = torch.Tensor
TOKENS, MEAN, SUM = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
#: Aggregate, count_empty, denominator, weights of a token of the first and of the second sequence of `three_sequences`.
BY_HAND = [
    (TOKENS, True, 5, 1 / 5, 1 / 5),
    (MEAN, True, 3, 1 / 12, 1 / 3),
    (MEAN, False, 2, 1 / 8, 1 / 2),
    (SUM, True, 3, 1 / 3, 1 / 3),
    (SUM, False, 2, 1 / 2, 1 / 2),
    ("group-mean", True, 2, 1 / 10, 1 / 10),
    ("group-mean", False, 1, 1 / 5, 1 / 5),
    ("token-sum", True, 1, 1.0, 1.0),
    ("constant", True, 30, 1 / 30, 1 / 30),
    ("constant", False, 20, 1 / 20, 1 / 20),
]
AGGREGATES = [TOKENS, MEAN, SUM, "group-mean", "token-sum", "constant"]


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def three_sequences(**fields: Any) -> TokenBatch:
    """With 4, 1 and 0 trained tokens, the last the only one of its group."""
    mask = torch.arange(4) < torch.tensor([4, 1, 0])[:, None]
    given = {"advantages": torch.ones(3), "mask": mask, "groups": torch.tensor([7, 7, -2]), "ref_logps": torch.zeros(3, 4)}
    return TokenBatch(ids(3, 4), **{**given, **fields})


def weights(objective: Objective, batch: TokenBatch, normalizer: Any = None) -> list[list[float]]:
    """What each token counts in the policy term, the KL and the bonus: slopes of terms that are linear."""
    shape, linear = batch.targets.shape, replace(objective, surrogate=PolicyGradient(), kl="k1")
    leaves = [torch.zeros(shape).requires_grad_() for _ in range(2)]
    others = replace(batch, advantages=torch.zeros(shape))

    def slopes(o: Objective, of: TokenBatch) -> tuple[Tensor, ...]:
        out = objective_loss(leaves[0], of, o, entropy=leaves[1], normalizer=normalizer).loss
        assert out.isfinite()
        return torch.autograd.grad(out, leaves, allow_unused=True, materialize_grads=True)

    policy, (kl, entropy) = slopes(replace(linear, beta=0.0), batch)[0], slopes(linear, others)
    return [x.reshape(-1).tolist() for x in (-policy, kl, -entropy)]


def near(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("aggregate, count_empty, denominator, first, second", BY_HAND)
def test_weights_by_hand(aggregate: str, count_empty: bool, denominator: float, first: float, second: float) -> None:
    """Of the policy term, whose normaliser may be given, and of terms with an aggregate of their own, which have their own."""
    batch, expected = three_sequences(), [first] * 4 + [second] + [0.0] * 7
    shared = Objective(aggregate=aggregate, max_tokens=10, count_empty=count_empty, beta=0.5, entropy_coef=-2.0)
    assert float(shared.normalizer(batch)) == pytest.approx(denominator)
    for given, factor in ((None, 1.0), (2.0 * denominator, 0.5)):
        for found, coef in zip(weights(shared, batch, given), (1.0, 0.5, -2.0), strict=True):
            near(found, [coef * factor * x for x in expected])
    own = replace(shared, aggregate=TOKENS, kl_aggregate=aggregate, entropy_aggregate=aggregate)
    for given in (None, 77.0):
        policy, kl, entropy = weights(own, batch, given)
        near(kl, [0.5 * x for x in expected])
        near(entropy, [-2.0 * x for x in expected])
        assert policy[0] == pytest.approx(1 / (given or 5))


@pytest.mark.parametrize("aggregate", [MEAN, SUM, "constant", "group-mean"])
def test_an_empty_packed_sequence_is_counted_or_not(aggregate: str) -> None:
    """Of three sequences one has no rows at all; each is a group of its own."""
    for mask in (None, torch.ones(5).bool()):
        batch = TokenBatch(ids(5), torch.ones(5), cu_seqlens=torch.tensor([0, 2, 2, 5]), mask=mask, groups=torch.arange(3))
        for count_empty, count in ((True, 3), (False, 2)):
            objective = Objective(aggregate=aggregate, max_tokens=1, count_empty=count_empty)
            assert float(objective.normalizer(batch)) == pytest.approx(count)


def test_groups_of_many_sequences() -> None:
    """The mean is over a group's tokens, not over its sequences, and ids are any integers in any order."""
    mask = torch.arange(3) < torch.tensor([3, 1, 2, 0])[:, None]
    batch = TokenBatch(ids(4, 3), torch.ones(4), mask=mask, groups=torch.tensor([5, -1, 5, -1]))
    expected = torch.where(mask, torch.tensor([1 / 10, 1 / 2, 1 / 10, 1 / 2])[:, None], 0.0)
    near(weights(Objective(aggregate="group-mean"), batch)[0], expected.view(-1).tolist())


def test_weights_of_a_batch_multiply_the_policy_term_and_nll_weights_are_taken_as_they_are() -> None:
    many, objective = torch.tensor([0.5, 2.0, 7.0]), Objective(beta=1.0, entropy_coef=1.0)
    policy, *others = weights(objective, three_sequences(weights=many))
    near(policy[:5], [0.1] * 4 + [0.4])
    assert all(x[:5] == pytest.approx([0.2] * 5) for x in others)
    with_nll = weights(Objective(), three_sequences(nll_weights=many, advantages=torch.zeros(3)), 100.0)[0]
    near(with_nll, [0.5] * 4 + [2.0] + [0.0] * 7)


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_nothing_trained_is_divided_by_something(aggregate: str, count_empty: bool) -> None:
    """Also by the normaliser of such a batch, passed on as the docs say."""
    objective = Objective(aggregate=aggregate, max_tokens=10, count_empty=count_empty)
    for shape in ((0, 4), (3, 0), (3, 4)):
        nothing = TokenBatch(ids(*shape), torch.zeros(shape), mask=torch.zeros(shape).bool(), groups=torch.arange(shape[0]))
        normalizer = torch.as_tensor(objective.normalizer(nothing))
        assert normalizer.isfinite() and not any(map(sum, weights(objective, nothing)))
        assert not any(map(sum, weights(objective, nothing, normalizer)))
    if aggregate in (TOKENS, MEAN) and not count_empty:
        assert float(global_normalizer(objective, nothing)) == 1.0


@pytest.mark.parametrize("own", [None, "token-sum"])
def test_each_term_is_divided_by_its_own_denominator(own: str | None) -> None:
    """None is the policy term's where a term has no aggregate of its own, else the batch's."""
    batch = TokenBatch(ids(2, 3), torch.ones(2), ref_logps=torch.zeros(2, 3))
    objective = Objective(beta=0.5, entropy_coef=0.25, kl_aggregate=own, entropy_aggregate=own)
    for given, expected in (
        (Denominators(8.0, 4.0, 2.0), (8.0, 4.0, 2.0)),
        (Denominators(8.0, None, 2.0), (8.0, 1.0 if own else 8.0, 2.0)),
        (Denominators(None, 4.0), (6.0, 4.0, 1.0 if own else 6.0)),
        (Denominators(16.0, 8.0, None) / 2, (8.0, 4.0, 1.0 if own else 8.0)),
    ):
        found = [coef / x[0] for coef, x in zip((1, 0.5, 0.25), weights(objective, batch, given), strict=True)]
        near(found, [*expected])


def test_packed_rows_without_offsets_are_enough_for_means_of_tokens() -> None:
    packed = TokenBatch(ids(6), torch.ones(6))
    for aggregate, weight in ((TOKENS, 1 / 6), ("token-sum", 1.0)):
        near(weights(Objective(aggregate=aggregate), packed)[0], [weight] * 6)


# ---- one denominator over micro-batches


def test_a_denominator_of_each_term_only_where_they_differ() -> None:
    batch = three_sequences()
    assert float(global_normalizer(Objective(), batch)) == 5
    terms = {"beta": 0.1, "kl_aggregate": MEAN, "entropy_coef": 0.1, "entropy_aggregate": TOKENS}
    own = Objective(aggregate="token-sum", **terms)
    two = global_normalizer(own, [batch, batch])
    assert isinstance(two, Denominators) and [float(x) for x in two] == [1.0, 6.0, 10.0]
    assert [float(x) for x in two / 4] == [0.25, 1.5, 2.5]
    assert isinstance(global_normalizer(replace(own, beta=0.0, entropy_coef=0.0), batch), Tensor)  # nobody looks at the KL's


# ---- the loss of given log-probs


def test_token_weights_multiply_all_terms() -> None:
    """A sum over tokens whose weights are 1 / (B * length) is the mean of means; one weight per sequence is enough."""
    objective = Objective(beta=0.3, entropy_coef=0.1, aggregate=MEAN)
    batch, logps = three_sequences(), -torch.rand(3, 4)
    leaf, masked = logps.clone().requires_grad_(), batch.mask
    assert masked is not None

    def run(o: Objective, **given: Any) -> tuple[Tensor, Tensor]:
        loss = objective_loss(leaf, batch, o, entropy=leaf * leaf, **given).loss
        return loss, torch.autograd.grad(loss, leaf)[0]

    each = 1.0 / (3 * masked.sum(1).clamp(min=1))
    for given in (each, each[:, None].expand(3, 4), torch.where(masked, each[:, None], math.nan)):
        found = run(replace(objective, aggregate="token-sum"), token_weights=given)
        torch.testing.assert_close(found, run(objective))


def test_dtypes_masks_and_a_second_backward() -> None:
    batch = three_sequences()
    assert batch.mask is not None
    logps = torch.where(batch.mask, -torch.rand(3, 4, dtype=torch.float64), math.nan).requires_grad_()
    out = objective_loss(logps, batch, Objective(beta=0.1))
    (once,) = torch.autograd.grad(out.loss, logps, retain_graph=True)
    (twice,) = torch.autograd.grad(2 * out.loss, logps)
    assert (
        once.dtype == torch.float64 and torch.equal(twice, 2 * once) and not once[~batch.mask].any() and once[batch.mask].all()
    )
    assert out.loss.isfinite() and not out.logps[~batch.mask].any() and out.entropy.isnan().all()


@pytest.mark.parametrize("keep", [EntropyFloor(2.0), EntropyQuantile(0.5)], ids=str)
def test_filters_of_entropy_read_what_is_given(keep: Any) -> None:
    entropy = torch.tensor([[1.0, 2.5, 3.0, 0.5]])
    leaf = torch.zeros(1, 4, requires_grad=True)
    out = objective_loss(leaf, TokenBatch(ids(1, 4), torch.ones(1)), Objective(filters=(keep,)), entropy=entropy)
    out.loss.backward()
    assert leaf.grad is not None and (leaf.grad != 0).tolist() == [[False, True, True, False]] and out.metrics["kept"] == 0.5


# ---- numbers, and the default dtype of torch


def test_defaults() -> None:
    plain = Objective(
        surrogate=Clip(0.2, 0.2, math.inf), level="token", aggregate=TOKENS, beta=0.0, kl="k3", entropy_coef=0.0, max_tokens=None,
        filters=(), log_ratio_bounds=None, kl_aggregate=None, entropy_aggregate=None, count_empty=True,
    )  # fmt: skip
    assert Objective() == plain and Objective(NoPolicyTerm(), beta=1.0) != plain


def test_numbers_of_numpy_are_numbers() -> None:
    """A normaliser out of a NumPy sum, a schedule out of np.linspace: the same loss as with Python's own."""
    np = pytest.importorskip("numpy")
    logits, found = torch.randn(3, 4, 11), []
    for real, whole in ((float, int), (np.float64, np.int64), (np.float32, np.int32)):
        objective = Objective(
            Clip(real(0.25), real(0.5), real(3.0)), beta=real(0.5), entropy_coef=real(0.125), max_tokens=whole(8),
            aggregate="constant", log_ratio_bounds=(real(-20.0), real(20.0)),
        )  # fmt: skip
        transform = LogitTransform(real(0.5), softcap=real(8.0), scale=real(2.0))
        advantages = group_advantages(torch.tensor([1.0, 0.0, 2.0]), group_size=whole(3))
        batch = three_sequences(advantages=advantages, old_logps=-2 * torch.ones(3, 4))
        found += [grpo_loss(logits, batch, objective, transform=transform, normalizer=x).loss for x in (real(7.0), whole(7))]
        assert type(objective.beta) is float and type(transform.scale) is float
    assert all(torch.equal(x, found[0]) for x in found) and found[0] != 0
    for wrong in (np.float64("nan"), np.bool_(True), np.array([1.0]), np.datetime64("2026-01-01")):
        with pytest.raises(ValueError, match="normalizer"):
            grpo_loss(logits, three_sequences(), Objective(), normalizer=wrong)


@pytest.mark.parametrize("kl", ["k3", "k3+"])
def test_the_default_dtype_of_torch_plays_no_part(kl: str, backend: str) -> None:
    """Neither in losses and gradients nor in the metrics."""
    hidden, weight, batch = torch.randn(3, 4, 8), torch.randn(11, 8), three_sequences(advantages=torch.tensor([0.0, 1.0, -1.0]))
    filtered = Objective(filters=(TrustRegion("tv"),), beta=0.1)
    objectives = [*(Objective.preset(name, beta=0.1, kl=kl, entropy_coef=0.1) for name in ("gmpo", "dapo")), filtered]

    def run() -> list[Tensor]:
        found = []
        for objective in objectives:
            leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
            out = linear_grpo_loss(*leaves, batch, objective, options=Options(backend=backend))
            found += [out.loss.detach(), *torch.autograd.grad(out.loss, leaves), *out.metrics.values()]
        return found

    expected = run()
    assert all(x.dtype == torch.float32 for x in expected)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found = run()
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True)), dtype
