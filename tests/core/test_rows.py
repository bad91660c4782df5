"""Rows whose numbers must keep their digits, or be what torch has: confident, impossible, of more than fp16 or 32 bits can hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, Objective, Options, TokenBatch, grpo_loss, linear_logprobs, token_logprobs
from support.bits import same_bits

Tensor = torch.Tensor
#: Half a unit in the last place.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
each_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


@pytest.mark.slow
def test_more_than_2_to_the_31_logits(backend: str) -> None:
    """Rows behind the offsets that 32 bits hold."""
    logits = torch.zeros(1, 1, dtype=torch.bfloat16).expand(2**16 + 2, 2**15).clone()
    logits[-1, -1] = 9.0
    ids = torch.full((len(logits),), 2**15 - 1)
    with torch.no_grad():
        found = token_logprobs(logits, ids, options=Options(backend=backend))[0]
    exact = logits[-2:].double().log_softmax(-1)[:, -1]
    torch.testing.assert_close(found[-2:].double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [False, True], ids=["log-probs", "loss"])
@pytest.mark.parametrize("vocab", [1000, 32_001])
@each_dtype
def test_a_confident_target_keeps_the_digits_of_its_gradient(dtype: torch.dtype, vocab: int, loss: bool, backend: str) -> None:
    """1 - p is right relative to itself where p is near 1; p - 1 in bf16 would be wrong by 100 %."""
    p = torch.tensor([0.5, 0.9, 0.99, 0.999, 0.9999], dtype=torch.float64)
    logits = torch.zeros(len(p), vocab, dtype=dtype)
    logits[:, 17] = torch.log(p / (1 - p) * (vocab - 1)).to(dtype)
    targets, leaf, options = torch.full((len(p),), 17), logits.clone().requires_grad_(), Options(backend=backend)
    if loss:
        batch = TokenBatch(targets, -torch.ones(len(p)))
        grpo_loss(leaf, batch, Objective.preset("reinforce"), normalizer=1.0, options=options).loss.backward()
    else:
        token_logprobs(leaf, targets, options=options).logps.sum().backward()
    exact = (torch.nn.functional.one_hot(targets, vocab) - logits.double().softmax(-1))[:, 17]
    assert leaf.grad is not None
    error = (leaf.grad[:, 17].double() - exact).abs()
    # From an fp32 sum of about 1: known to some units of 2^-24, by the number of partial sums that an instruction set has.
    assert (error <= ROUNDING[dtype] * exact.abs() + 64 * 2.0**-24).all(), error / exact


def test_what_cannot_be_chosen_or_computed(backend: str) -> None:
    """A target at -inf has log-prob -inf; a row of only -inf, or with NaN or +inf, is NaN as in torch; rows beside them are
    untouched; masked, it is 0."""

    def found(**options: Any) -> list[Tensor]:
        leaf = logits.clone().requires_grad_()
        out = token_logprobs(leaf, torch.arange(7), entropy=True, options=Options(backend=backend), **options)
        assert out.entropy is not None
        (out.logps.sum() + out.entropy.sum()).backward()
        return [out.logps.detach(), out.entropy.detach(), leaf.grad]  # type: ignore[list-item]

    logits = torch.randn(7, 40)
    clean = found()
    logits[1, 1], logits[3] = -math.inf, -math.inf
    logits[4, 39], logits[5, 0] = math.nan, math.inf
    logps, entropy, _ = found()
    assert logps[1] == -math.inf and entropy[1].isfinite()
    assert logps[3:6].isnan().all() and entropy[3:6].isnan().all()
    whole = torch.tensor([0, 2, 6])
    assert all(same_bits(x[whole], y[whole]) for x, y in zip((logps, entropy), clean, strict=False))
    mask = torch.ones(7, dtype=torch.bool).index_fill(0, torch.tensor([1, 3, 4, 5]), False)
    for x, y in zip(found(mask=mask), clean, strict=True):
        assert not x[~mask].any() and same_bits(x[mask], y[mask])


@pytest.mark.parametrize("objective", ["dapo", "gspo", "vespo"])
@each_dtype
def test_log_ratios_of_a_thousand_stay_finite(objective: str, dtype: torch.dtype, backend: str) -> None:
    """In the loss, its gradient (e^60 is beyond fp16) and every metric."""
    leaf = torch.randn(1, 7, 61, dtype=dtype).requires_grad_()
    old = torch.tensor([[1000.0, -1000.0, 100.0, -100.0, 0.0, 80.0, -80.0]]) - 4
    batch = TokenBatch(torch.randint(61, (1, 7)), torch.tensor([1.0]), old_logps=old, ref_logps=old.flip(1))
    out = grpo_loss(leaf, batch, Objective.preset(objective, beta=0.1), options=Options(backend=backend))
    out.loss.backward()
    assert out.loss.isfinite() and leaf.grad is not None and all(x.isfinite() for x in out.metrics.values())
    assert leaf.grad.any() and (leaf.grad.isfinite().all() or dtype == torch.float16)


def test_logits_that_fp16_could_not_hold(backend: str) -> None:
    """From fp16 hidden states they are fp32."""
    hidden, weight = (200.0 * torch.randn(4, 8)).half(), (200.0 * torch.randn(30, 8)).half()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    targets = logits.argmax(1).index_fill(0, torch.tensor(0), 3)
    assert logits.abs().amax(1).min() > 65_504
    logps = (logits / 1e4).log_softmax(1).gather(1, targets[:, None])[:, 0]
    logps.sum().backward()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    found, _ = linear_logprobs(*leaves, targets, transform=LogitTransform(1e4), options=Options(backend=backend))
    found.sum().backward()
    torch.testing.assert_close(found.double(), logps, rtol=1e-5, atol=1e-5 * float(logps.detach().abs().max()))
    for leaf, wide in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and wide.grad is not None
        assert (leaf.grad.double() - wide.grad).abs().max() <= 2e-3 * wide.grad.abs().max()
