"""The token stage of an objective, and what float64 says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from grpo_kernels import Objective, TokenBatch
from support import oracle
from support.oracle import Spec

Tensor = torch.Tensor
FIELDS = ("advantages", "mask", "old_logps", "ref_logps", "weights", "sampler_logps", "nll_weights", "groups")


def packed(n: int = 6, length: int = 3, **fields: Any) -> TokenBatch:
    """n tokens in packed sequences of this length."""
    fields.setdefault("advantages", torch.ones(n))
    return TokenBatch(torch.zeros(n, dtype=torch.int64), cu_seqlens=torch.arange(0, n + 1, length), **fields)


def run(
    objective: Objective, batch: TokenBatch, logps: Tensor, entropy: Tensor | None = None, normalizer: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(losses, slopes of the log-probs, slopes of the entropies) [n]."""
    return objective.token_stage(logps, entropy, objective.token_rows(batch, normalizer), batch)[:3]


def exact(
    spec: Spec, batch: TokenBatch, logps: Tensor, entropy: Tensor, normalizer: Any = None
) -> tuple[oracle.Result, Tensor, Tensor]:
    """The oracle's result and both gradients of flat fp32 log-probs and entropies."""
    x, h = logps.double().requires_grad_(), entropy.double().requires_grad_()
    sequences = oracle.sequences_of(batch.targets, batch.cu_seqlens)
    given = {name: getattr(batch, name) for name in FIELDS}
    result = oracle.objective(spec, x, h, sequences, normalizer=normalizer, **given)
    d_x, d_h = torch.autograd.grad(result.loss, [x, h], materialize_grads=True)
    return replace(result, loss=result.loss.detach()), d_x, d_h


def near(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Within fp32's rounding of sums of a few dozen terms."""
    if theirs.numel():
        error, scale = (ours.double() - theirs).abs().max(), theirs.abs().max()
        assert error <= 1e-5 * scale + 1e-6, f"{what}: {ours.tolist()} instead of {theirs.tolist()}"


def check(
    spec: Spec, objective: Objective, batch: TokenBatch, logps: Tensor, entropy: Tensor, normalizer: Any = None
) -> oracle.Result:
    """Loss and gradients are the oracle's, and a token that is not trained has none. Nothing is checked where a number lies on a
    bound, which the margin of the result tells."""
    result, d_x, d_h = exact(spec, batch, logps, entropy, normalizer)
    if result.margin < 1e-5:
        return result
    losses, slopes, d_entropy = run(objective, batch, logps, entropy, normalizer)
    assert losses.dtype == slopes.dtype == torch.float32
    near(losses.double().sum(), result.loss, "loss")
    near(slopes, d_x, "slopes")
    assert (d_entropy is None) == (spec.entropy_coef == 0)
    if d_entropy is not None:
        near(d_entropy, d_h, "slopes of the entropy")
    if batch.mask is not None:
        masked = ~batch.mask.reshape(-1)
        assert not any(x[masked].any() for x in (losses, slopes, d_entropy) if x is not None)
    return result
