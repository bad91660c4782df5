"""Arguments of compositions that are refused, and the metrics of a sequence-level loss."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import (
    Exact,
    Head,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from grpo_kernels.formulas.filters import EntropyFloor
from grpo_kernels.integrations.trl import logprobs_over_sets
from grpo_kernels.losses import objective_loss

B, T, V = 2, 3, 11
TARGETS = torch.arange(B * T).view(B, T)


def test_a_filter_of_entropy_needs_the_entropy():
    objective = Objective.preset("reinforce", filters=(EntropyFloor(0.5),))
    batch = TokenBatch(TARGETS, torch.ones(B))
    logps = -torch.ones(B, T)
    with pytest.raises(ValueError, match="entropy is None, but the objective has"):
        objective_loss(logps, batch, objective)
    assert objective_loss(logps, batch, objective, entropy=torch.ones(B, T)).loss.isfinite()


def test_sets_of_a_divergence_are_named_as_they_were_passed(backend):
    logits = torch.randn(B, T, V)
    sets = TokenSets.from_lists([[0, V]] * (B * T))
    with pytest.raises(ValueError, match=f"kept holds id {V}"):
        token_divergence(logits, logits, kept=sets, options=Options(backend))


def test_strict_mode_refuses_a_target_outside_of_its_set(backend):
    logits = torch.randn(B, T, V)
    sets = TokenSets.from_lists([[9, 10]] * (B * T))
    for missing in (None, "include"):
        options = Options(backend, strict=missing is None)
        arguments = {"kept": sets, "missing": missing, "options": options}
        if missing is None:
            with pytest.raises(ValueError, match="kept"):
                token_logprobs(logits, TARGETS, **arguments)
        else:
            assert token_logprobs(logits, TARGETS, **arguments).logps.isfinite().all()


def test_metrics_of_a_sequence_level_loss_from_hidden_states(backend):
    """The ratios are those of its sequences."""
    hidden = torch.randn(B, T, 8)
    weight = torch.randn(V, 8, requires_grad=True)
    batch = TokenBatch(TARGETS, torch.tensor([1.0, -2.0]), old_logps=-2.0 - torch.rand(B, T))
    objective = Objective.preset("gspo")
    options = Options(backend)
    found = linear_grpo_loss(hidden, weight, batch, objective, options=options).metrics
    expected = grpo_loss(hidden @ weight.t(), batch, objective, options=options).metrics
    for name in ("ratio_min", "ratio_max", "ess"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert expected["ratio_min"] < expected["ratio_max"]


@pytest.mark.parametrize("has_sets", [False, True])
def test_a_detached_entropy_has_no_gradient(has_sets, backend):
    logits = torch.randn(B, T, V, requires_grad=True)
    sets = TokenSets.from_lists([[0, 1, 2]] * (B * T)) if has_sets else None
    for entropy in (True, "detached"):
        found = token_logprobs(
            logits, TARGETS, entropy=entropy, kept=sets, options=Options(backend)
        )
        assert found.logps.requires_grad and found.entropy is not None
        assert found.entropy.requires_grad == (entropy is True)


def test_a_statistic_is_asked_for_once():
    with pytest.raises(ValueError, match="each once at most"):
        token_logprobs(torch.randn(B, T, V), TARGETS, also=("top_prob", "top_prob"))


def test_a_reference_has_one_bias(backend):
    hidden = torch.randn(B, T, 8)
    weight = torch.randn(V, 8)
    reference = (hidden, Head(weight), torch.randn(V))
    with pytest.raises(ValueError, match="reference has a Head and a third element, a bias"):
        linear_divergence(hidden, weight, reference, options=Options(backend))


def test_an_infinite_divergence_of_weight_0_adds_nothing():
    divergence = torch.ones(B, T)
    divergence[0] = torch.inf
    batch = TokenBatch(TARGETS, torch.ones(B))
    objective = Objective.preset("distillation", kl=Exact("reverse"))
    token_weights = torch.tensor([0.0, 1.0])
    logps = -torch.ones(B, T)
    losses = [
        objective_loss(logps, batch, objective, divergence=x, token_weights=token_weights).loss
        for x in (divergence, torch.ones(B, T))
    ]
    assert torch.equal(*losses) and losses[0].isfinite()


def test_entropies_of_trl_are_over_the_vocabulary_beside_sets():
    hidden = torch.randn(B * T, 8)
    head = Head(torch.randn(V, 8))
    targets = TARGETS.flatten()
    sets = TokenSets.from_lists([[i, 10] for i in range(B * T)])
    logps, entropies = logprobs_over_sets(hidden, head, targets, sets, "detached")
    over_sets = linear_logprobs(hidden, head, targets, kept=sets).logps
    over_vocabulary = linear_logprobs(hidden, head, targets, entropy=True).entropy
    assert torch.equal(logps, over_sets) and torch.equal(entropies, over_vocabulary)


def test_statistics_of_masked_tokens_may_be_anything():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = TokenBatch(TARGETS, torch.ones(B), mask=mask)
    logps = torch.where(mask, -1.0, torch.nan).requires_grad_()
    out = objective_loss(logps, batch, Objective.preset("reinforce"))
    out.loss.backward()
    assert out.loss.isfinite() and torch.equal(out.logps, torch.where(mask, -1.0, 0.0))
    assert logps.grad is not None
    assert (logps.grad != 0).equal(mask) and logps.grad.isfinite().all()
