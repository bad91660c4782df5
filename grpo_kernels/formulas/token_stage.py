"""The token stage: from log-probs and entropies to the loss and its slopes.

    loss_t = policy_weight_t * surrogate_t + kl_weight_t * KL_t - entropy_weight_t * entropy_t - nll_weight_t * logp_t

`token_terms` is that line for objectives whose slopes depend on the token alone; the fused kernel compiles it in.
`batch_terms` is the same for those that need a whole sequence or batch of log-probs first; it runs in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from ..batch import TokenBatch
from ..checks import describe
from .filters import TRUST_REGIONS, EntropyFloor, TrustRegion
from .kl import Kl, kl_terms
from .ops import ops

if TYPE_CHECKING:
    from ..objective import Objective

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class TokenRows:
    """The flat rows of a batch with the weights of an objective; every tensor is [n]."""

    targets: Tensor  # int64
    read: Tensor | None  # bool: rows whose logits are looked at; None = all
    advantages: Tensor  # fp32, like all that follow
    policy_weight: Tensor
    old_logps: Tensor | None = None  # None = on-policy
    ref_logps: Tensor | None = None  # None without a KL term, as is its weight
    kl_weight: Tensor | None = None
    entropy_weight: Tensor | None = None  # None without a bonus
    nll_weight: Tensor | None = None
    sampler_logps: Tensor | None = None
    weights: Tensor | None = None  # of the batch, as given
    trained: Tensor | None = None  # bool: rows where the batch's mask is set; None = all
    active: Tensor | None = None  # bool: trained rows that can have a gradient; None = all
    __repr__ = describe

    def __getitem__(self, rows: slice | Tensor) -> TokenRows:
        def cut(x: Any) -> Any:
            return None if x is None else x[rows]

        return TokenRows(**{f.name: cut(getattr(self, f.name)) for f in fields(self)})

    def weighted(self, factor: Tensor) -> TokenRows:
        """Every term of every row times `factor` [n]."""
        terms = {name: getattr(self, name) for name in ("policy_weight", "kl_weight", "entropy_weight", "nll_weight")}
        return replace(self, **{name: torch.where(w != 0, w * factor, 0.0) for name, w in terms.items() if w is not None})


# fmt: off
def token_terms(
    logp, entropy, old_logp, ref_logp, sampler_logp, advantage,
    policy_weight, kl_weight, entropy_weight, nll_weight,
    surrogate_params, trust_params, entropy_floor, ratio_bounds, kl_clamps,
    SURROGATE, DETACHED, TRUST, TRUST_SAMPLER, KL_TERMS, ESTIMATOR, SCORE, WEIGHTING, STRAIGHT_THROUGH,
):
    """(loss, d loss / d logp, d loss / d entropy) of a token; None leaves a term out."""
    d_entropy = policy_weight * 0.0
    if TRUST is not None:
        if TRUST_SAMPLER:
            anchor = sampler_logp
        else:
            anchor = old_logp
        policy_weight = ops.where(TRUST(logp, anchor, advantage, trust_params), policy_weight, 0.0)
    if entropy_floor is not None:
        policy_weight = ops.where(entropy >= entropy_floor, policy_weight, 0.0)
        if entropy_weight is not None:
            entropy_weight = ops.where(entropy >= entropy_floor, entropy_weight, 0.0)
    if ratio_bounds is not None:
        x = logp - old_logp
        inside = (x >= ratio_bounds[0]) & (x <= ratio_bounds[1])
        bounded = logp - ops.minimum(ops.maximum(x, ratio_bounds[0]), ratio_bounds[1])
        loss, slope = SURROGATE(logp, ops.where(inside, old_logp, bounded), advantage, surrogate_params)
        if not DETACHED:
            slope = ops.where(inside, slope, 0.0)
    else:
        loss, slope = SURROGATE(logp, old_logp, advantage, surrogate_params)
    # A token that its weight takes out is out whatever the ratio is, NaN included.
    loss = ops.where(policy_weight == 0.0, 0.0, policy_weight * loss)
    d_logp = ops.where(policy_weight == 0.0, 0.0, policy_weight * slope)
    if kl_weight is not None:
        kl, _, _, kl_slope = KL_TERMS(
            logp, old_logp, ref_logp, logp - old_logp, kl_clamps, ESTIMATOR, SCORE, WEIGHTING, STRAIGHT_THROUGH
        )
        loss += kl_weight * kl
        d_logp += kl_weight * kl_slope
    if entropy_weight is not None:
        loss -= entropy_weight * entropy
        d_entropy -= entropy_weight
    if nll_weight is not None:
        loss -= ops.where(nll_weight == 0.0, 0.0, nll_weight * logp)
        d_logp -= nll_weight
    return loss, d_logp, d_entropy
# fmt: on


def formulas(objective: Objective) -> dict[str, Callable[..., Any] | str | bool | None]:
    """What `token_terms` wants to know at compile time: functions and choices."""
    trust = objective.filter(TrustRegion)
    kl = objective.kl_spec if objective.beta else Kl()  # one kernel for all that have no KL
    return {
        "SURROGATE": objective.surrogate.function,
        "DETACHED": objective.surrogate.detached_ratio,
        "TRUST": None if trust is None else TRUST_REGIONS[trust.kind],
        "TRUST_SAMPLER": trust is not None and trust.anchor == "sampler",
        "KL_TERMS": kl_terms,
        **kl.formula,
    }


def scalars(objective: Objective) -> dict[str, Any]:
    """What `token_terms` takes at run time besides the rows: a schedule of these recompiles nothing."""
    trust, floor = objective.filter(TrustRegion), objective.filter(EntropyFloor)
    return {
        "surrogate_params": objective.surrogate.params,
        "trust_params": () if trust is None else trust.params,
        "entropy_floor": None if floor is None else float(floor.threshold),
        "ratio_bounds": None if objective.log_ratio_bounds is None else tuple(map(float, objective.log_ratio_bounds)),
        "kl_clamps": objective.kl_spec.clamps if objective.beta else None,
    }


def row_terms(objective: Objective, logps: Tensor, entropy: Tensor | None, rows: TokenRows) -> tuple[Tensor, Tensor, Tensor]:
    """`token_terms` of flat rows, in torch."""
    return token_terms(
        logps, entropy, logps if rows.old_logps is None else rows.old_logps, rows.ref_logps, rows.sampler_logps,
        rows.advantages, rows.policy_weight, rows.kl_weight, rows.entropy_weight, rows.nll_weight,
        **scalars(objective), **formulas(objective),
    )  # fmt: skip


# ---- the ratio of a sequence


def trained_rows(rows: TokenRows, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """([n] bool, [B] fp64 count of them in each sequence, at least 1)."""
    trained = torch.ones_like(rows.targets, dtype=torch.bool) if rows.trained is None else rows.trained
    return trained, batch.lengths.clamp(min=1.0)


def log_ratio(objective: Objective, logps: Tensor, rows: TokenRows, batch: TokenBatch) -> Tensor:
    """logp - old_logp at the objective's level, fp32 [n]: per token, or the mean or sum over the sequence's trained tokens."""
    x = torch.zeros_like(logps) if rows.old_logps is None else logps - rows.old_logps
    if objective.level == "token":
        return x
    trained, count = trained_rows(rows, batch)
    x = objective.surrogate.in_sequence(x, rows.advantages)[0]
    if objective.surrogate.absorbs_weights and rows.weights is not None:
        # A weight of 0 takes its token out, and says nothing about the sequence.
        x = x + torch.where(rows.weights == 0, 0.0, rows.weights.abs().log().clamp(-18.420680743952367, 20.0))
    total = batch.sequence_sum(torch.where(trained, x, 0.0))
    return batch.spread(total if objective.level == "sequence-sum" else total / count).to(torch.float32)


def kl_of_rows(
    objective: Objective, logps: Tensor, rows: TokenRows, sequence_ratio: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`kl_terms` [n] of flat rows; `sequence_ratio` is the log-ratio at the objective's level."""
    old = logps if rows.old_logps is None else rows.old_logps
    # The ratio of a whole sequence (a product) would drown a token's KL: there the token's own weighs it.
    ratio = logps - old if objective.level == "sequence-sum" else sequence_ratio
    return kl_terms(logps, old, rows.ref_logps, ratio, objective.kl_spec.clamps, **objective.kl_spec.formula)


def _filtered(
    objective: Objective, logps: Tensor, entropy: Tensor | None, rows: TokenRows, batch: TokenBatch
) -> tuple[Tensor, Tensor | None]:
    """Policy and entropy weights [n] after the objective's filters."""
    policy_weight, entropy_weight = rows.policy_weight, rows.entropy_weight
    for f in objective.filters:
        keep = f.keep(logps, entropy, rows, batch)
        policy_weight = torch.where(keep, policy_weight, 0.0)
        if f.filters_entropy and entropy_weight is not None:
            narrowed = torch.where(keep, entropy_weight, 0.0)
            if objective.entropy_aggregate == "token-mean" and not f.one_pass:
                # The mean is over the tokens that are left, if there are any: of whole sequences, but of this batch only.
                sums = batch.over_context(torch.stack([x.sum(dtype=torch.float64) for x in (narrowed, entropy_weight)]))
                narrowed = narrowed * torch.where(sums[0] == 0, 0.0, sums[1] / sums[0]).to(torch.float32)
            entropy_weight = narrowed
    return policy_weight, entropy_weight


def _policy_terms(objective: Objective, logps: Tensor, rows: TokenRows, x: Tensor) -> tuple[Tensor, Tensor]:
    """The surrogate's (loss, slope) [n] at log-ratios x; the slope with respect to logp where the ratio is detached or a
    token's own, else to x."""
    surrogate = objective.surrogate
    low, high = objective.log_ratio_bounds or (-torch.inf, torch.inf)
    bounded = x.clamp(low, high)
    selected: tuple[Tensor, ...] = ()
    if surrogate.selects:
        trained = torch.ones_like(logps, dtype=torch.bool) if rows.trained is None else rows.trained
        selected = (surrogate.select(logps, logps - x, rows.advantages, trained),)
    if surrogate.detached_ratio or objective.level == "token":  # needs logp itself beside the ratio
        old = logps - bounded
        if objective.level == "token" and rows.old_logps is not None:
            old = torch.where(x == bounded, rows.old_logps, old)
        losses, slopes = surrogate(logps, old, rows.advantages, *selected)
    else:
        losses, slopes = surrogate(bounded, torch.zeros_like(x), rows.advantages)
    return losses, slopes if surrogate.detached_ratio else torch.where(x == bounded, slopes, 0.0)


def batch_terms(
    objective: Objective, logps: Tensor, entropy: Tensor | None, rows: TokenRows, batch: TokenBatch, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, d_logps, d_entropy) [n] of objectives that need more than the token itself, at log-ratios x."""
    level = objective.level

    def to_tokens(d_log_ratio: Tensor) -> Tensor:
        """Slopes with respect to a sequence's log-ratio, as slopes with respect to its tokens' log-probs."""
        trained, count = trained_rows(rows, batch)
        d = batch.sequence_sum(d_log_ratio)
        spread = batch.spread(d if level == "sequence-sum" else d / count).to(torch.float32)
        own = torch.zeros_like(logps) if rows.old_logps is None else logps - rows.old_logps
        return torch.where(trained, spread, 0.0) * objective.surrogate.in_sequence(own, rows.advantages)[1]

    policy_weight, entropy_weight = _filtered(objective, logps, entropy, rows, batch)
    losses, slopes = _policy_terms(objective, logps, rows, x)
    losses = torch.where(policy_weight == 0, 0.0, policy_weight * losses)
    d_logps = torch.where(policy_weight == 0, 0.0, policy_weight * slopes)
    if level in ("sequence", "sequence-sum") and not objective.surrogate.detached_ratio:
        d_logps = to_tokens(d_logps)
    if rows.kl_weight is not None:
        kl, slope, through_ratio, both = kl_of_rows(objective, logps, rows, x)
        losses = losses + rows.kl_weight * kl
        if level == "sequence" and objective.kl_spec.weighting == "ratio":
            d_logps = d_logps + rows.kl_weight * slope + to_tokens(rows.kl_weight * through_ratio)
        else:
            d_logps = d_logps + rows.kl_weight * both
    d_entropy = torch.zeros_like(logps)
    if entropy_weight is not None:
        assert entropy is not None
        losses, d_entropy = losses - entropy_weight * entropy, -entropy_weight
    if rows.nll_weight is not None:
        losses = losses - torch.where(rows.nll_weight == 0, 0.0, rows.nll_weight * logps)
        d_logps = d_logps - rows.nll_weight
    return losses, d_logps, d_entropy
