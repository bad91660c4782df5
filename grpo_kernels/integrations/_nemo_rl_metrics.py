"""The metrics that NeMo-RL logs for a loss, under its names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ..batch import TokenBatch
from ..formulas.kl import k3
from ..formulas.ops import bounded_exp
from ..formulas.surrogates import PolicyGradient
from ..losses import LossOutput

if TYPE_CHECKING:
    from .nemo_rl import PolicyLoss

Tensor = torch.Tensor


def normalizations(loss_fn: PolicyLoss, kinds: Any, tokens: bool) -> dict[str, Any]:
    """What NeMo-RL divides each metric by, in its own terms (`MetricNormalizer`); tokens: whether the loss is per token."""
    names = (
        "probs_ratio", "probs_ratio_clamped", "token_mult_prob_error", "gen_kl_error", "policy_kl_error",
        "js_divergence_error", "approx_entropy",
    )  # fmt: skip
    own = (
        "num_valid_samples",
        "positive_nll_loss",
        *(f"probs_ratio{x}_{y}" for x in ("", "_clamped") for y in ("min", "max")),
    )
    named = dict.fromkeys(names, kinds.TOKENS) | dict.fromkeys(own, kinds.NONE)
    named |= dict.fromkeys(("loss", "kl_penalty"), kinds.TOKENS if tokens else kinds.SEQUENCES)
    named["sampling_importance_ratio"] = kinds.SEQUENCES if loss_fn.sequences else kinds.TOKENS
    if loss_fn.bounded:
        named["is_oob_ratio"] = kinds.SEQUENCES if loss_fn.drops_sequences else kinds.TOKENS
    if loss_fn.rules:
        named["outside_sampling_set"] = kinds.TOKENS
    return named


def metrics_of(
    loss_fn: PolicyLoss,
    out: LossOutput,
    batch: TokenBatch,
    sample_mask: Tensor,
    tokens: Tensor,
    sequences: Tensor,
    weights: Tensor | None,
    outside: Tensor | None,
) -> dict[str, Tensor]:
    """Sums over the micro-batch by global counts."""
    mask, sampler, logps = batch.mask, batch.sampler_logps, out.logps
    assert mask is not None and sampler is not None
    old = logps if batch.old_logps is None else batch.old_logps
    x = loss_fn.objective.log_ratio(logps.reshape(-1), out.rows, batch).view(mask.shape)
    r = bounded_exp(x)
    clamped = r.clamp(*loss_fn.objective.surrogate.ratio_bounds)
    if isinstance(loss_fn.objective.surrogate, PolicyGradient) and not loss_fn.force_on_policy_ratio:
        r = clamped = logps  # REINFORCE has no ratio, and NeMo-RL shows the log-probs

    def total(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0).sum()

    def mean(values: Tensor) -> Tensor:
        return total(values) / tokens.clamp(min=1)

    value, middle = loss_fn.objective.kl_spec.function, torch.logaddexp(old, sampler) - math.log(2.0)
    metrics = {
        "probs_ratio": mean(r),
        "probs_ratio_clamped": mean(clamped),
        "token_mult_prob_error": mean(bounded_exp((sampler - old).abs())),
        "gen_kl_error": mean(value(sampler, sampler, old)[0]),
        "policy_kl_error": mean(value(old, old, sampler)[0]),
        "js_divergence_error": mean((k3(middle, middle, old)[0] + k3(middle, middle, sampler)[0]) / 2),
        "approx_entropy": mean(-bounded_exp(logps - sampler) * logps),
        "num_valid_samples": sample_mask.sum(),
        "kl_penalty": r.new_zeros(()),
    }
    for name, ratio in (("probs_ratio", r), ("probs_ratio_clamped", clamped)):
        metrics[f"{name}_min"] = torch.where(mask, ratio, torch.inf).amin() if mask.numel() else r.new_tensor(torch.inf)
        metrics[f"{name}_max"] = torch.where(mask, ratio, -torch.inf).amax() if mask.numel() else r.new_tensor(-torch.inf)
    if out.rows.kl_weight is not None:
        kl = loss_fn.objective.kl_terms(logps.reshape(-1), out.rows, x.reshape(-1))[0]
        metrics["kl_penalty"] = torch.where(mask.reshape(-1), out.rows.kl_weight * kl, 0.0).sum() / loss_fn.objective.beta
    w = torch.where(mask, old - sampler, 0.0)
    samples = sequences.clamp(min=1)
    if loss_fn.sequences:
        w = w.sum(1).exp().nan_to_num(0.0, 0.0, 0.0) if weights is None else weights.amax(1)
        metrics["sampling_importance_ratio"] = (torch.where(mask.any(1), w, 1.0) * sample_mask).sum() / samples
    else:
        w = w.exp().nan_to_num(0.0, 0.0, 0.0) if weights is None else weights
        metrics["sampling_importance_ratio"] = mean(w)
    if outside is not None and loss_fn.bounded:
        counted = ((outside & mask).any(1) * sample_mask).sum() / samples
        metrics["is_oob_ratio"] = counted if loss_fn.drops_sequences else mean(outside.float())
    return metrics
