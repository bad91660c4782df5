"""NeMo-RL: its whole loss from logits, each against the trainer's own function where its
package is on the path, and against a float64 transcription always."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainers import (
    DATA,
    MASK,
    B,
    T,
    V,
    assert_same,
    clipped,
    log_softmax_of,
    mean_of,
    stand_in,
    value_and_gradient,
)

from grpo_kernels import Objective
from grpo_kernels.integrations import nemo_rl
from grpo_kernels.kl import Kl

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


NEMO = {
    "tokens": (Objective.preset("dapo", numerics="nemo-rl"), None),
    "sequences, gspo": (Objective.preset("gspo", numerics="nemo-rl"), None),
    "kl, truncated weights": (
        Objective.preset("grpo", numerics="nemo-rl", beta=0.1), {"mode": "truncate", "low": 0.8, "high": 1.3},
    ),
    "sequences, kl, icepop": (
        Objective.preset("grpo", numerics="nemo-rl", beta=0.1, aggregate="seq-mean-token-mean"),
        {"mode": "mask", "low": 0.7, "high": 1.4},
    ),
    "cispo": (Objective.preset("cispo", numerics="nemo-rl"), None),
}  # fmt: skip


@pytest.fixture
def nemo() -> Iterator[None]:
    types = enum.Enum("LossType", ["TOKEN_LEVEL", "SEQUENCE_LEVEL"])
    stand_in(
        "nemo_rl.algorithms.loss.interfaces", LossType=types, LossInputType=enum.Enum("LossInputType", ["LOGIT", "LOGPROB"])
    )
    yield


@pytest.mark.parametrize("what", NEMO)
def test_nemo_rl_loss(what: str, nemo: None) -> None:
    objective, importance = NEMO[what]
    g = torch.Generator().manual_seed(4)
    logits, ids = torch.randn(B, T + 1, V, generator=g), torch.randint(V, (B, T + 1), generator=g)
    logps = log_softmax_of(logits[:, :-1], ids[:, 1:])[0].float()

    def column(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (1, 0))

    sample_mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    fields = {
        "input_ids": ids, "token_mask": column(MASK.float()), "sample_mask": sample_mask, "advantages": column(DATA.advantages),
        "prev_logprobs": column(logps + DATA.old - DATA.logps), "reference_policy_logprobs": column(logps + DATA.ref - DATA.logps),
        "generation_logprobs": column(logps + DATA.sampler - DATA.logps),
    }  # fmt: skip
    toks, seqs = torch.tensor(47.0), torch.tensor(9.0)
    loss_fn = nemo_rl.PolicyLoss(objective, importance=importance)
    assert loss_fn.input_type.name == "LOGIT" and loss_fn.loss_type.name.startswith("TOK" if "seq" not in what else "SEQ")
    (loss, metrics), gradient = value_and_gradient(
        lambda x: loss_fn(logits=x, data=fields, global_valid_seqs=seqs, global_valid_toks=toks), logits, torch.float32
    )

    m = MASK * sample_mask[:, None]
    old, ref, gen, A = (fields[n][:, 1:].double() for n in (
        "prev_logprobs", "reference_policy_logprobs", "generation_logprobs", "advantages"))  # fmt: skip

    def theirs(x: Tensor) -> Any:
        curr = log_softmax_of(x[:, :-1], ids[:, 1:])[0]
        d = curr - old
        if "gspo" in what:
            d = ((d * MASK).sum(1, keepdim=True) / (MASK.sum(1, keepdim=True) + 1e-8)).expand(B, T)
        r, (low, high) = d.exp(), objective.surrogate.ratio_bounds
        value = -r.clamp(low, high).detach() * A * curr if what == "cispo" else clipped(r, A, 1 - low, high - 1)[0]
        if importance is not None:
            w, lo, hi = (old - gen).exp(), importance["low"], importance["high"]
            value = value * (w.clamp(lo, hi) if importance["mode"] == "truncate" else w * ((w >= lo) & (w <= hi)))
        e = ref - curr
        kl = (e.clamp(-20, 20).exp() - e.clamp(-20, 20) - 1).clamp(max=10) * (curr - curr.detach()).exp()

        def reduce(v: Tensor) -> Tensor:
            if "seq" not in what:
                return (v * m).sum() / toks
            return ((v * MASK).sum(1) / (MASK.sum(1) + 1e-8) * sample_mask).sum() / seqs

        penalty = reduce(kl)
        return reduce(value) + objective.beta * penalty, (curr.detach(), r.detach(), penalty.detach())

    (want, (curr, r, penalty)), expected = value_and_gradient(theirs, logits, torch.float64)
    assert_same((loss, gradient), (want, expected))
    assert not gradient[:, -1].any() and not gradient[3].any()
    low, high = objective.surrogate.ratio_bounds
    inside = m != 0
    named = {
        "loss": want, "probs_ratio": (r * m).sum() / toks, "probs_ratio_clamped": (r.clamp(low, high) * m).sum() / toks,
        "token_mult_prob_error": ((gen - old).abs().exp() * m).sum() / toks,
        "sampling_importance_ratio": ((old - gen).exp() * m).sum() / toks,
        "approx_entropy": -((curr - gen).exp() * curr * m).sum() / toks, "num_valid_samples": sample_mask.sum(),
        "kl_penalty": penalty if objective.beta else torch.zeros(()), "probs_ratio_min": r[inside].min(),
        "probs_ratio_max": r[inside].max(), "probs_ratio_clamped_min": r[inside].clamp(low, high).min(),
        "probs_ratio_clamped_max": r[inside].clamp(low, high).max(),
    }  # fmt: skip
    assert metrics == pytest.approx({k: float(v.detach()) for k, v in named.items()}, rel=1e-4, abs=1e-6)


def nemo_fields(g: torch.Generator) -> dict[str, Tensor]:
    def column(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (1, 0))

    return {
        "input_ids": torch.randint(V, (B, T + 1), generator=g), "token_mask": column(MASK.float()), "sample_mask": torch.ones(B),
        "advantages": torch.randn(B, T + 1, generator=g),
        **{n: column(-3 + 0.3 * torch.randn(B, T, generator=g)) for n in (
            "prev_logprobs", "reference_policy_logprobs", "generation_logprobs")},
    }  # fmt: skip


def test_nemo_rl_gradient_over_the_logits(nemo: None) -> None:
    """inplace=True: there is no second [B, S, V]."""
    g = torch.Generator().manual_seed(4)
    logits, fields = torch.randn(B, T + 1, V, generator=g), nemo_fields(g)
    gradients = []
    for inplace in (False, True):
        made = logits.clone().requires_grad_() * 1.0
        loss = nemo_rl.PolicyLoss(Objective.preset("dapo"), inplace=inplace)(made, fields, torch.tensor(5.0), MASK.sum())[0]
        gradients.append(torch.autograd.grad(loss, made)[0])
    assert gradients[1].data_ptr() == made.data_ptr()
    torch.testing.assert_close(*gradients)
    assert gradients[0].any() and not gradients[0][:, -1].any()


def test_nemo_rl_kl_of_the_metrics_is_that_of_the_loss(nemo: None) -> None:
    g = torch.Generator().manual_seed(4)
    logits, fields = torch.randn(B, T + 1, V, generator=g), nemo_fields(g)
    objective = Objective.preset("vespo", aggregate="token-mean", beta=0.3, kl=Kl("k3", weighting="ratio"))
    _, metrics = nemo_rl.PolicyLoss(objective)(logits, fields, torch.tensor(5.0), MASK.sum())
    L = log_softmax_of(logits[:, :-1], fields["input_ids"][:, 1:])[0]
    e, x = (fields["reference_policy_logprobs"][:, 1:] - L), L - fields["prev_logprobs"][:, 1:]
    assert metrics["kl_penalty"] == pytest.approx(float(mean_of((e.exp() - e - 1) * x.exp())), rel=1e-4)
    # A log-prob that is far off is a large number, not inf.
    fields["prev_logprobs"][0, 1] = -400.0
    _, metrics = nemo_rl.PolicyLoss(Objective.preset("dapo"))(logits, fields, torch.tensor(5.0), MASK.sum())
    assert all(math.isfinite(value) for value in metrics.values())


def test_nemo_rl_refuses(nemo: None) -> None:
    with pytest.raises(ValueError, match="aggregate='constant'"):
        nemo_rl.PolicyLoss(Objective.preset("dr_grpo"))
    sharded = SimpleNamespace(placements=())
    with pytest.raises(ValueError, match="logits is a DTensor"):
        nemo_rl.PolicyLoss(Objective())(sharded, {}, torch.ones(()), torch.ones(()))
