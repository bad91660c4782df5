"""FIPO's weights: sums over the tokens that follow, bounds, and the form that needs one pass."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from grpo_kernels import Objective, Options, TokenBatch, grpo_loss, objective_loss
from grpo_kernels.formulas.future_kl import FutureKl, future_sums

LENGTHS = (5, 0, 1, 9, 2)
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
N = int(OFFSETS[-1])


def batch_of(layout, **fields):
    """17 tokens in five packed sequences, or as many in rows of equal length."""
    if layout == "packed":
        return TokenBatch(torch.zeros(N, dtype=torch.int64), cu_seqlens=OFFSETS, **fields)
    return TokenBatch(torch.zeros(1, N, dtype=torch.int64), **fields)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("half_life", [0.3, 4.0, 1e4])
def test_sums_stay_in_their_sequence(layout, half_life):
    values = torch.randn(N, dtype=torch.float64)
    ends = OFFSETS.tolist() if layout == "packed" else [0, N]
    want = torch.zeros(N, dtype=torch.float64)
    for first, last in itertools.pairwise(ends):
        for t in range(first, last):
            for k in range(t, last):
                want[t] += 0.5 ** ((k - t) / half_life) * values[k]
    found = future_sums(values, -math.log(2.0) / half_life, batch_of(layout))
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_number_reaches_the_tokens_before_it(broken):
    values = torch.zeros(N, dtype=torch.float64)
    values[9] = broken  # the fourth of the sequence 6 : 15
    found = future_sums(values, -1.0, batch_of("packed"))
    assert (~found.isfinite()).nonzero().flatten().tolist() == [6, 7, 8, 9]


@pytest.fixture
def fields():
    shape = (3, 8)
    old = -3.0 * torch.rand(shape) - 0.1
    mask = torch.rand(shape) < 0.8
    return {
        "targets": torch.randint(13, shape),
        "advantages": torch.randn(shape),
        "old_logps": torch.where(mask, old, math.nan),
        "mask": mask,
    }


def test_weights_of_known_log_probs_need_one_pass(fields, backend):
    """The loss with these weights is that of the preset, if the log-probs are the policy's."""
    batch = TokenBatch(**fields, on_policy=torch.tensor([False, True, False]))
    logits = torch.randn(3, 8, 13)
    whole = Objective.preset("fipo", future_kl=FutureKl(low=0.2, high=5.0))
    plain = replace(whole, future_kl=None)
    assert plain.gradient_is_per_token
    assert whole.gradient_is_per_sequence
    assert not whole.gradient_is_per_token
    results = []
    logps = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    logps = torch.where(batch.mask, logps, math.nan)
    weights = whole.future_kl.weights(batch, logps)
    assert not weights[~batch.mask].any()
    assert (weights[1][batch.mask[1]] == 1).all()
    for objective, given in ((whole, batch), (plain, replace(batch, weights=weights))):
        leaf = logits.clone().requires_grad_()
        out = grpo_loss(leaf, given, objective, options=Options(backend=backend))
        out.loss.backward()
        results.append((out.loss.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
    assert results[0][1].any()


def test_a_weight_is_a_constant(fields):
    """The gradient of a token's loss reaches its own log-prob only."""
    batch = TokenBatch(**fields)
    logps = (-3.0 * torch.rand(3, 8)).requires_grad_()
    objective = Objective(aggregate="token-sum", future_kl=FutureKl(low=0.0, high=9.0))
    first = torch.zeros(3, 8)
    first[0, int(batch.mask[0].nonzero()[0])] = 1.0
    objective_loss(logps, batch, objective, token_weights=first).loss.backward()
    assert not logps.grad[first == 0].any()


def on_ranks_that_share_sequences():
    batch = batch_of("packed", advantages=torch.ones(N))
    batch._put("context_group", object())
    return Objective.preset("fipo").token_inputs(batch)


REFUSED = {
    "future_kl=.*a rank does not know": on_ranks_that_share_sequences,
    "future_kl=.*level": lambda: Objective(level="sequence", future_kl=FutureKl()),
    "future_kl=0.5: pass a FutureKl": lambda: Objective(future_kl=0.5),
    "cu_seqlens is None": lambda: objective_loss(
        torch.zeros(4), TokenBatch(torch.zeros(4).long(), torch.ones(4)), Objective.preset("fipo")
    ),
    "^low=1.5": lambda: FutureKl(low=1.5),
    "^old_logps=None": lambda: FutureKl().weights(
        TokenBatch(torch.zeros(1, 4).long(), torch.ones(1)), torch.zeros(1, 4)
    ),
    "^logps has shape": lambda: FutureKl().weights(batch_of("padded"), torch.zeros(4)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
