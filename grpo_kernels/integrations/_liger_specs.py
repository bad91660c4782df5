"""Liger's options and tensors as an Objective, a TokenBatch and a denominator."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist

from ..batch import TokenBatch
from ..checks import require, require_one_of
from ..formulas.kl import Kl
from ..formulas.surrogates import Cispo, Clip, Sapo, Surrogate, Vespo
from ..formulas.token_stage import TokenRows
from ..layout import values_are_checked
from ..objective import Objective

Tensor = torch.Tensor

#: The versions whose classes gave the same losses, metrics and gradients as ours, for every option that they have.
TESTED = ("0.6.5", "0.7.0", "0.8.2", "0.8.4", "0.8.5")

AGGREGATES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "constant",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "vespo": "token-mean",
}
#: Loss types that are not clipped: they have a ratio of their own.
UNCLIPPED = ("cispo", "sapo", "vespo")
#: Loss types whose denominator is the token count of all micro-batches and ranks.
GLOBAL_COUNT = ("dapo", "cispo", "vespo")


def liger_objective(
    loss_type: str = "dapo",
    *,
    importance_sampling_level: str = "token",
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0),
    max_completion_length: int | None = None,
) -> Objective:
    """Liger's options as an Objective, for the functions of grpo_kernels itself. Raises ValueError naming what is wrong.

    loss_type    "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo": surrogate and denominator.
    importance_sampling_level   "token", or "sequence" for the losses that clip.
    beta         weight of the KL, by k3; use_bias_correction_kl: times the ratio.
    epsilon_low, epsilon_high, delta   clip widths and two-sided bound, as in `Clip`. As in Liger, epsilon_high is CISPO's cap,
                 an absolute ratio, and delta means nothing to CISPO, SAPO and VESPO.
    sapo_temperatures   (for A > 0, for the others).
    vespo        (k, lambda) for A >= 0, then for the others.
    max_completion_length   tokens, which dr_grpo divides by; nothing to the others."""
    require_one_of("loss_type", loss_type, AGGREGATES)
    level = importance_sampling_level
    require(level in ("token", "sequence"), "importance_sampling_level", level, 'it must be "token" or "sequence".')
    # Liger's own message, because callers match on it.
    remedy = f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}. Use importance_sampling_level='token' instead."
    require(level == "token" or loss_type not in UNCLIPPED, "importance_sampling_level", level, remedy)
    if loss_type == "dr_grpo":
        remedy = "dr_grpo divides by it: pass the completion budget, a whole number of tokens."
        require(max_completion_length is not None, "max_completion_length", max_completion_length, remedy)
    surrogate: Surrogate
    if loss_type == "cispo":
        surrogate = Cispo(epsilon_high)
        if epsilon_high < 1:
            warnings.warn(
                f"epsilon_high={epsilon_high} is CISPO's cap, an absolute ratio: below 1 it caps on-policy tokens too. "
                "The paper's value is near 5.", stacklevel=3,
            )  # fmt: skip
    elif loss_type == "sapo":
        surrogate = Sapo(*sapo_temperatures)
    elif loss_type == "vespo":
        k_pos, lambda_pos, k_neg, lambda_neg = vespo
        surrogate = Vespo(k_pos, max(lambda_pos, 1e-4), k_neg, max(lambda_neg, 1e-4))
    else:
        # Below 0 there is no ratio to be clipped.
        surrogate = Clip(min(epsilon_low, 1.0), epsilon_high, math.inf if delta is None else delta)
    return Objective(
        surrogate,
        level="sequence-sum" if loss_type == "vespo" else level,
        aggregate=AGGREGATES[loss_type],
        beta=beta,
        kl=Kl("k3", weighting="ratio" if use_bias_correction_kl else "none"),
        max_tokens=max_completion_length if loss_type == "dr_grpo" else None,
    )


def as_bool(name: str, mask: Tensor | None) -> Tensor | None:
    """A 0/1 mask of any dtype as bool. A fraction is refused, since it would be a weight."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    nonzero = mask != 0
    if values_are_checked(mask) and not torch.equal(mask, nonzero.to(mask.dtype)):
        raise ValueError(f"{name} holds other numbers than 0 and 1: pass weights as vllm_is_ratio.")
    return nonzero


def token_batch(
    ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    old: Tensor | None,
    ref: Tensor | None,
    weights: Tensor | None,
    objective: Objective,
    *,
    names: tuple[str, str, str],
    padding: int = 0,
) -> TokenBatch:
    """Liger's tensors as a TokenBatch, with `padding` masked positions after the last one."""
    shape = ids.shape
    for name, x in zip(names, (mask, old, ref), strict=True):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}, but the token ids have {list(shape)}: they must be the same.")
    if weights is not None:
        whole = (shape[:1], (*shape[:1], 1))
        if weights.shape not in (*whole, shape):
            raise ValueError(f"vllm_is_ratio has shape {list(weights.shape)}: pass [B], [B, 1] or {list(shape)}.")
        if objective.surrogate.absorbs_weights and weights.shape in whole:
            # A weight of a sequence enters its ratio once: at its first trained token.
            trained = torch.ones(shape, dtype=torch.bool, device=ids.device) if mask is None else mask
            first = trained & (trained.cumsum(1) == 1)
            weights = torch.where(first, weights.reshape(-1, 1).clamp(min=1e-8), 1.0)

    def padded(x: Tensor | None) -> Tensor | None:
        return x if x is None or not padding or x.shape != shape else torch.nn.functional.pad(x, (0, padding))

    if advantages.dim() == 2 and advantages.shape == shape:
        advantages = torch.nn.functional.pad(advantages, (0, padding))
    return TokenBatch(
        torch.nn.functional.pad(ids, (0, padding)), advantages.to(torch.float32), mask=padded(mask), old_logps=padded(old),
        ref_logps=padded(ref), weights=padded(weights),
    )  # fmt: skip


def denominator(loss_type: str, batch: TokenBatch, num_items: float | Tensor | None) -> float | Tensor | None:
    """Liger's denominator where it is not the batch's own: the average over ranks of the tokens given or found."""
    if loss_type not in GLOBAL_COUNT:
        return None
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items is None:
        if world == 1:
            return None
        count = torch.full((), batch.rows, device=batch.targets.device) if batch.mask is None else batch.mask.sum()
        num_items = count.to(torch.float32)
        dist.all_reduce(num_items)
    if isinstance(num_items, Tensor):
        return (num_items.to(torch.float32) / world).clamp(min=1.0)
    return max(num_items / world, 1.0)


# ---- masked positions as Liger's chunked loss counts them


def weights_with_padding(weights: Tensor, mask: Tensor) -> Tensor:
    """VESPO's weights [B, T] for Liger's result: Liger multiplies the weights of masked positions into the ratio of the
    sequence too, and replaces 0 by 1e-8. Here each trained token gets an equal share of that product."""
    logs = weights.to(torch.float32).log().clamp(math.log(1e-8), 20.0)
    return (logs.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp().expand_as(weights)


def rows_with_padding(batch: TokenBatch, objective: Objective) -> TokenRows:
    """LUSPO's rows for Liger's result: the mean over all positions of the padded sequence, masked ones included, times the
    number of its trained tokens. The ratio of a sequence is still over its trained tokens."""
    assert batch.mask is not None
    B, T = batch.targets.shape
    share = batch.spread(batch.lengths).to(torch.float32) / (B * T)
    return replace(objective.token_rows(replace(batch, mask=None), 1.0).weighted(share), trained=batch.mask.reshape(-1))
