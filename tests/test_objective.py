"""Objectives without logits: presets, weights, normalisers and the token stage against the oracle in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import oracle
import pytest
import torch
from cases import OBJECTIVES, Case, build

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.objective import PRESETS
from grpo_kernels.surrogates import Cispo, Clip, PolicyGradient, Surrogate

Tensor = torch.Tensor

#: Surrogate, level and aggregate of each preset, typed from the papers.
PINNED: dict[str, tuple[Surrogate, str, str]] = {
    "grpo": (Clip(0.2, 0.2), "token", "seq-mean-token-mean"),
    "dapo": (Clip(0.2, 0.28), "token", "token-mean"),
    "bnpo": (Clip(0.2, 0.2), "token", "token-mean"),
    "dr_grpo": (Clip(0.2, 0.2), "token", "constant"),
    "gspo": (Clip(3e-4, 4e-4), "sequence", "seq-mean-token-mean"),
    "cispo": (Cispo(5.0, 0.0), "token", "token-mean"),
    "reinforce": (PolicyGradient(), "token", "token-mean"),
}


@pytest.mark.parametrize("name", PINNED)
def test_preset(name: str) -> None:
    objective = Objective.preset(name)
    assert (objective.surrogate, objective.level, objective.aggregate) == PINNED[name]
    assert (objective.beta, objective.kl, objective.entropy_coef, objective.max_tokens) == (0.0, "k3", 0.0, None)
    changed = Objective.preset(name, beta=0.04, kl="k2")
    assert changed == replace(objective, beta=0.04, kl="k2") and Objective.preset(name) == objective


def test_every_preset_is_pinned() -> None:
    assert set(PRESETS) == set(PINNED)


def test_defaults() -> None:
    assert Objective() == Objective(Clip(0.2, 0.2, math.inf), "token", "token-mean", 0.0, "k3", 0.0, None)


# ---- the token stage: value and slopes from log-probs


def stage(
    case: Case, objective: Objective, normalizer: float | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """token_stage on fp32 log-probs near the case's, with those log-probs and entropies."""
    batch = case.batch()
    trained = torch.ones(batch.rows, dtype=torch.bool) if case.mask is None else case.mask.reshape(-1)
    _, logps, entropy = oracle.log_probs(case.logits, case.targets)
    logps, entropy = torch.where(trained, logps, 0.0), torch.where(trained, entropy, 0.0)
    return *objective.token_stage(logps, entropy, objective.token_rows(batch, normalizer), batch), logps, entropy


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("on_policy", [False, True], ids=["old", "on-policy"])
def test_token_stage_matches_oracle(name: str, packed: bool, on_policy: bool) -> None:
    make, spec = OBJECTIVES[name]
    objective, case = make(), build(packed=packed)
    if on_policy:
        case.fields["old_logps"] = None
    losses, d_logps, d_entropy, logps, entropy = stage(case, objective)
    x, h = logps.double().requires_grad_(), entropy.double().requires_grad_()
    fields = {k: v for k, v in case.fields.items() if k not in ("targets", "cu_seqlens")}
    expected = oracle.objective(spec, x, h, oracle.sequences_of(case.targets, case.fields.get("cu_seqlens")), **fields)
    d_x, d_h = torch.autograd.grad(expected.loss, [x, h], allow_unused=True)
    torch.testing.assert_close(losses.sum().double(), expected.loss.detach(), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(d_logps.double(), d_x, rtol=1e-5, atol=1e-8)
    assert d_logps.dtype == losses.dtype == torch.float32 and d_logps.count_nonzero() >= 3
    if spec.entropy_coef == 0:
        assert d_entropy is None and d_h is None
    else:
        assert d_entropy is not None
        torch.testing.assert_close(d_entropy.double(), d_h, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_tokens_have_no_loss_and_no_slope(name: str) -> None:
    case = build()
    losses, d_logps, d_entropy, _, _ = stage(case, OBJECTIVES[name][0]())
    masked = ~case.fields["mask"].reshape(-1)
    assert not losses[masked].any() and not d_logps[masked].any()
    assert d_entropy is None or not d_entropy[masked].any()


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if OBJECTIVES[n][1].level == "token"])
def test_token_level_objectives_take_any_slice(name: str) -> None:
    """Blocks of rows give the same bits as the whole: that is what lets kernels go block by block."""
    case, objective = build(), OBJECTIVES[name][0]()
    losses, d_logps, d_entropy, logps, entropy = stage(case, objective)
    rows = objective.token_rows(case.batch())
    for lo, hi in ((0, 1), (3, 20), (20, 56)):
        a, b, c = objective.token_stage(logps[lo:hi], entropy[lo:hi], rows[lo:hi])
        assert torch.equal(a, losses[lo:hi]) and torch.equal(b, d_logps[lo:hi])
        assert (c is None and d_entropy is None) or (
            c is not None and d_entropy is not None and torch.equal(c, d_entropy[lo:hi])
        )


# ---- normalisers and weights


def three_sequences() -> TokenBatch:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    return TokenBatch(torch.zeros(3, 4, dtype=torch.int64), torch.ones(3), mask=mask)


@pytest.mark.parametrize(
    "aggregate, denominator, first, second",
    [
        ("token-mean", 5, 1 / 5, 1 / 5),
        ("seq-mean-token-mean", 3, 1 / 12, 1 / 3),
        ("seq-mean-token-sum", 3, 1 / 3, 1 / 3),
        ("constant", 30, 1 / 30, 1 / 30),
    ],
)
def test_weights_by_hand(aggregate: str, denominator: float, first: float, second: float) -> None:
    """Sequences with 4, 1 and 0 trained tokens; the last counts in B."""
    objective, batch = Objective(aggregate=aggregate, max_tokens=10), three_sequences()
    assert float(objective.normalizer(batch)) == denominator
    rows = objective.token_rows(batch)
    expected = torch.tensor([first] * 4 + [second] + [0.0] * 7)
    torch.testing.assert_close(rows.token_weight, expected)
    torch.testing.assert_close(rows.policy_weight, expected)
    given = objective.token_rows(batch, normalizer=denominator * 2.0)
    torch.testing.assert_close(given.token_weight, expected / 2)


def test_weights_multiply_the_policy_term_only() -> None:
    batch = replace(three_sequences(), weights=torch.tensor([0.5, 2.0, 7.0]))
    rows = Objective().token_rows(batch)
    assert rows.token_weight[:5].tolist() == pytest.approx([0.2] * 5)
    assert rows.policy_weight[:5].tolist() == pytest.approx([0.1] * 4 + [0.4])


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
def test_denominators_of_empty_batches_are_at_least_one(aggregate: str) -> None:
    objective = Objective(aggregate=aggregate, max_tokens=10)
    for shape in ((0, 4), (3, 0), (3, 4)):
        targets = torch.zeros(shape, dtype=torch.int64)
        batch = TokenBatch(targets, torch.zeros(shape), mask=torch.zeros(shape, dtype=torch.bool))
        rows = objective.token_rows(batch)
        assert torch.isfinite(rows.token_weight).all() and not rows.token_weight.any()


def test_a_given_normalizer_of_zero_trained_tokens() -> None:
    """objective.normalizer() of an all-masked batch, passed on as the docs say, must not give 0 / 0."""
    batch = replace(three_sequences(), mask=torch.zeros(3, 4, dtype=torch.bool))
    objective = Objective.preset("dapo")
    rows = objective.token_rows(batch, normalizer=objective.normalizer(batch))
    assert not rows.token_weight.any() and not rows.policy_weight.any()


def test_packed_without_offsets_is_enough_for_token_aggregates() -> None:
    batch = TokenBatch(torch.zeros(6, dtype=torch.int64), torch.ones(6))
    assert Objective.preset("dapo").token_rows(batch).token_weight.tolist() == pytest.approx([1 / 6] * 6)


def test_kl_function_and_entropy_flags() -> None:
    assert Objective().kl_function is None and not Objective().needs_entropy
    assert Objective(beta=0.1).kl_function is not None and Objective(entropy_coef=-0.1).needs_entropy
    assert Objective(kl="k2").kl_function is None
