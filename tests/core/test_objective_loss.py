"""`objective_loss`, the token stage over given log-probs: it is `grpo_loss` without the vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenBatch, grpo_loss, token_logprobs
from grpo_kernels.formulas.filters import EntropyFloor, EntropyQuantile
from grpo_kernels.losses import objective_loss
from grpo_kernels.presets import PRESETS

Tensor = torch.Tensor

B, T, V = 4, 6, 13
MASK = torch.arange(T) < torch.tensor([6, 3, 0, 5])[:, None]


def case(packed: bool = False, **fields: Any) -> tuple[Tensor, TokenBatch]:
    g = torch.Generator().manual_seed(1)
    logits, ids = torch.randn(B, T, V, generator=g), torch.randint(V, (B, T), generator=g)
    logps = token_logprobs(logits, ids)[0]
    fields = {
        "old_logps": (logps + 0.3 * torch.randn(B, T, generator=g)).clamp(max=-0.01),
        "ref_logps": logps + 0.3 * torch.randn(B, T, generator=g),
        "weights": torch.rand(B, T, generator=g) + 0.5,
        "nll_weights": 0.1 * torch.rand(B, T, generator=g),
    } | fields
    advantages = torch.randn(B, T, generator=g)
    if packed:
        cu_seqlens = torch.tensor([0, *MASK.sum(1).tolist()]).cumsum(0)
        fields = {name: x[MASK] for name, x in fields.items()}
        return logits[MASK], TokenBatch(ids[MASK], advantages[MASK], cu_seqlens=cu_seqlens, **fields)
    return logits, TokenBatch(ids, advantages, mask=MASK, **fields)


def through(logits: Tensor, batch: TokenBatch, objective: Objective, **options: Any) -> tuple[Any, Tensor]:
    logits = logits.clone().requires_grad_()
    logps, entropy = token_logprobs(logits, batch.targets, mask=batch.mask, entropy=True)
    out = objective_loss(logps, batch, objective, entropy=entropy, **options)
    return out, torch.autograd.grad(3.0 * out.loss, logits)[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "distillation"])  # see test_divergences.py
def test_it_is_grpo_loss(name: str, packed: bool) -> None:
    objective = Objective.preset(name, beta=0.07, entropy_coef=0.05, max_tokens=9)
    logits, batch = case(packed)
    for options in ({}, {"normalizer": 7.0}):
        torch.manual_seed(0)  # Clip-Cov draws
        leaf = logits.clone().requires_grad_()
        want = grpo_loss(leaf, batch, objective, **options)
        (gradient,) = torch.autograd.grad(3.0 * want.loss, leaf)
        torch.manual_seed(0)
        got, d_logits = through(logits, batch, objective, **options)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(d_logits, gradient, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close((got.logps, got.entropy, got.metrics), (want.logps, want.entropy, want.metrics))
        assert gradient.any()


@pytest.mark.parametrize("keep", [EntropyFloor(2.0), EntropyQuantile(0.5)])
def test_filters_of_entropy(keep: Any) -> None:
    logits, batch = case()
    objective = Objective(filters=(keep,))
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(3.0 * grpo_loss(leaf, batch, objective).loss, leaf)
    got, d_logits = through(logits, batch, objective)
    torch.testing.assert_close(d_logits, gradient)
    assert 0 < got.metrics["kept"] < 1


def test_token_weights_multiply_all_terms() -> None:
    """A sum over tokens whose weights are 1 / (B * length) is the mean of means; one weight per sequence is enough."""
    logits, batch = case(nll_weights=None)
    objective = Objective(beta=0.3, entropy_coef=0.1, aggregate="seq-mean-token-mean")
    want, gradient = through(logits, batch, objective)
    weights = 1.0 / (B * MASK.sum(1).clamp(min=1))
    for w in (weights, weights[:, None].expand(B, T)):
        got, d_logits = through(logits, batch, replace(objective, aggregate="token-sum"), token_weights=w)
        torch.testing.assert_close(got.loss, want.loss)
        torch.testing.assert_close(d_logits, gradient)
    junk = torch.where(MASK, weights[:, None], math.nan)
    assert torch.equal(through(logits, batch, replace(objective, aggregate="token-sum"), token_weights=junk)[1], d_logits)


def test_dtypes_masks_and_second_backward() -> None:
    _, batch = case()
    logps = torch.where(MASK, -torch.rand(B, T, dtype=torch.float64), math.nan).requires_grad_()
    out = objective_loss(logps, batch, Objective(beta=0.1))
    (once,) = torch.autograd.grad(out.loss, logps, retain_graph=True)
    (twice,) = torch.autograd.grad(2 * out.loss, logps)
    assert once.dtype == torch.float64 and torch.equal(twice, 2 * once) and not once[~MASK].any() and once[MASK].any()
    assert torch.isfinite(out.loss) and not out.logps[~MASK].any() and out.entropy.isnan().all()
    nothing = TokenBatch(batch.targets, batch.advantages, mask=torch.zeros_like(MASK))
    leaf = torch.full((B, T), math.nan, requires_grad=True)
    assert torch.equal(torch.autograd.grad(objective_loss(leaf, nothing, Objective()).loss, leaf)[0], torch.zeros(B, T))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logps": torch.zeros(B, T - 1)}, r"logps is torch\.float32 \[4, 5\]: pass floats of targets' shape, \[4, 6\]"),
        ({"logps": torch.zeros(B, T, dtype=torch.int64)}, r"logps is torch\.int64"),
        ({"entropy": torch.zeros(B)}, r"entropy is torch\.float32 \[4\]"),
        ({"objective": Objective(entropy_coef=0.1)}, "entropy is None, but the objective has an entropy bonus"),
        ({"objective": Objective(filters=(EntropyFloor(1.0),))}, "entropy is None"),
        ({"token_weights": torch.ones(T)}, r"token_weights has shape \[6\]"),
        ({"objective": "dapo"}, "objective is a str"),
        ({"batch": None}, "batch is a NoneType"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    arguments = {"logps": torch.zeros(B, T), "batch": case()[1], "objective": Objective()} | change
    options = {name: arguments.pop(name) for name in ("entropy", "token_weights") if name in arguments}
    with pytest.raises(ValueError, match=message):
        objective_loss(*arguments.values(), **options)
