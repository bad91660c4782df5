"""prime-rl: its chunked head and its custom loss, against its own where it is on the path and a float64 transcription always."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from grpo_kernels.formulas.surrogates import Cispo, Clip
from grpo_kernels.integrations import prime_rl
from support.trainers import (
    DATA,
    MASK,
    B,
    Data,
    H,
    T,
    V,
    assert_same,
    clipped,
    double,
    log_softmax_of,
    stand_in,
    value_and_gradient,
)

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


def test_prime_rl_head() -> None:
    """A stand-in for the head module: one temperature per token; no gradient through the entropy."""

    class _SequenceChunkedLogProbEntropyFn:
        @staticmethod
        def apply(hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, chunk_size: int) -> Any:
            logits = hidden.double() @ weight.double().T * inv_temperature.double()[:, None]
            logps, entropy = log_softmax_of(logits, labels)
            return logps, entropy.detach()

    home = "prime_rl.trainer.models.layers.lm_head"
    head = stand_in(home, _SequenceChunkedLogProbEntropyFn=_SequenceChunkedLogProbEntropyFn)
    hidden, weight, labels = torch.randn(12, H), torch.randn(V, H), torch.randint(V, (12,))
    inverse, up = 1 / (0.5 + torch.rand(12)), torch.linspace(-1, 1, 12)

    def use(dtype: torch.dtype) -> tuple[Tensor, ...]:
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        logps, entropy = head._SequenceChunkedLogProbEntropyFn.apply(h, w, labels, inverse, 8)
        assert not entropy.requires_grad
        return tuple(x.double() for x in (logps.detach(), entropy, *torch.autograd.grad((logps * up).sum(), (h, w))))

    want = use(torch.float64)
    with prime_rl.bind(strict=True) as slots:
        for got, expected in zip(use(torch.float32), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert slots.counts == {"fused": 1}
        with pytest.raises(RuntimeError, match="ours already"):
            prime_rl.bind()
    assert head._SequenceChunkedLogProbEntropyFn is _SequenceChunkedLogProbEntropyFn


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


def prime_inputs(data: Data, row: int, logps: Tensor, weights: Tensor | None = None) -> LossInputs:
    return LossInputs(logps[row], data.sampler[row], data.ref[row], data.advantages[row], MASK[row], weights)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["dppo_tv", "ipo", "cispo", "k3 to the reference"])
def test_prime_rl_loss(name: str, weighted: bool) -> None:
    stand_in("prime_rl.trainer.rl.loss", LossOutputs=LossOutputs)
    w = 0.5 + torch.rand(B, T) if weighted else torch.ones(B, T)
    options: dict[str, Any] = {"objective": name}
    if name == "k3 to the reference":
        options = {"objective": "grpo", "changes": {"beta": 0.2, "surrogate": Clip(0.1, 0.3)}}
    elif name == "cispo":
        options["changes"] = {"surrogate": Cispo(1.2)}

    def ours(x: Tensor) -> Any:
        outs = [prime_rl.loss(prime_inputs(DATA, b, x, w[b] if weighted else None), **options) for b in range(B)]
        assert all(set(out.metrics) == {"mismatch_kl", "is_masked"} for out in outs)
        return sum(out.loss for out in outs), outs

    def theirs(x: Tensor) -> Tensor:
        q, ref, A = double(DATA.sampler, DATA.ref, DATA.advantages)
        d = x - q
        moved = x.detach().exp() - q.exp()
        if name == "dppo_tv":
            keep = torch.where(A > 0, moved <= 0.2, moved >= -0.2)
            loss = -A * d.exp() * keep + 1e-3 * d * d
        elif name == "ipo":
            loss = -A * d.exp() * (moved.abs() <= 0.1) + 1e-3 * d * d
        elif name == "cispo":
            loss = -d.exp().clamp(max=1.2).detach() * A * x
        else:
            loss = clipped(d.exp(), A, 0.1, 0.3)[0] + 0.2 * ((ref - x).exp() - (ref - x) - 1)
        return (w * loss * MASK).sum()

    (loss, outs), gradient = value_and_gradient(ours, DATA.logps, torch.float32)
    assert_same((loss, gradient), value_and_gradient(theirs, DATA.logps, torch.float64))
    x = (DATA.logps - DATA.sampler)[0][MASK[0]].double()
    assert float(outs[0].metrics["mismatch_kl"]) == pytest.approx(float((x.exp() - x - 1).mean()), rel=1e-4)
    assert 0 < sum(float(out.metrics["is_masked"]) for out in outs) < B
