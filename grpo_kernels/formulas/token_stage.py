"""The token stage: from log-probs and entropies to the loss and its slopes.

    loss_t = policy_weight_t * surrogate_t + kl_weight_t * KL_t - entropy_weight_t * entropy_t - nll_weight_t * logp_t

`token_terms` is that line for one token, given the log-ratio at the objective's level; the fused kernel compiles it in.
`terms_of_rows` runs it in torch. Steps that need more than one token come before it (the log-ratio of a sequence, filters and
selections over a batch) or after it (the slope of a sequence's log-ratio goes to the sequence's tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from ..batch import TokenBatch
from ..checks import describe
from .filters import TRUST_REGIONS, EntropyFloor, TrustRegion, above_floor
from .kl import Kl, kl_terms
from .ops import ops

if TYPE_CHECKING:
    from ..objective import Objective

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class TokenRows:
    """The flat rows of a batch with the weights of an objective; every tensor is [n]."""

    targets: Tensor  # int64
    read: Tensor | None  # bool: rows whose logits are read; None = all
    advantages: Tensor  # fp32, like all that follow
    policy_weight: Tensor
    old_logps: Tensor | None = None  # None = on-policy
    ref_logps: Tensor | None = None  # None without a KL term, as is its weight
    kl_weight: Tensor | None = None
    entropy_weight: Tensor | None = None  # None without a bonus
    nll_weight: Tensor | None = None
    divergence_weight: Tensor | None = None  # of the divergence from a second stream of rows; None without one
    sampler_logps: Tensor | None = None  # where a trust region compares with them; None = it compares with old_logps
    weights: Tensor | None = None  # of the batch, as given
    trained: Tensor | None = None  # bool: rows where the batch's mask is set; None = all
    active: Tensor | None = None  # bool: rows that can have a gradient, where only those are read; else None
    __repr__ = describe

    @property
    def mask(self) -> Tensor:
        """bool [n]: `trained`, never None."""
        return torch.ones_like(self.targets, dtype=torch.bool) if self.trained is None else self.trained

    def __getitem__(self, rows: slice | Tensor) -> TokenRows:
        def cut(x: Any) -> Any:
            return None if x is None else x[rows]

        return TokenRows(**{f.name: cut(getattr(self, f.name)) for f in fields(self)})

    def weighted(self, factor: Tensor) -> TokenRows:
        """Every term of every row times `factor` [n]."""
        names = ("policy_weight", "kl_weight", "entropy_weight", "nll_weight", "divergence_weight")
        terms = {name: getattr(self, name) for name in names}
        return replace(self, **{name: torch.where(w != 0, w * factor, 0.0) for name, w in terms.items() if w is not None})


# fmt: off
def token_terms(
    logp, entropy, log_ratio, old_logp, ref_logp, anchor_logp, advantage,
    policy_weight, kl_weight, entropy_weight, nll_weight,
    surrogate_params, trust_params, entropy_floor, ratio_bounds, kl_clamps,
    SURROGATE, DETACHED, LEVEL, TRUST, KL_TERMS, ESTIMATOR, SCORE, WEIGHTING, STRAIGHT_THROUGH,
):
    """(loss, d loss / d logp, d loss / d log-ratio, d loss / d entropy) of a token; None leaves a term out.

    log_ratio is the one at LEVEL. d loss / d log-ratio is nonzero only where the gradient flows through the log-ratio of a
    sequence; at the other levels, and for a detached ratio, d loss / d logp is the whole slope. TRUST compares with
    anchor_logp."""
    zero = policy_weight * 0.0
    if TRUST is not None:
        policy_weight = ops.where(TRUST(logp, anchor_logp, advantage, trust_params), policy_weight, 0.0)
    if entropy_floor is not None:
        high = above_floor(entropy, entropy_floor)
        policy_weight = ops.where(high, policy_weight, 0.0)
        if entropy_weight is not None:
            entropy_weight = ops.where(high, entropy_weight, 0.0)
    bounded = log_ratio
    if ratio_bounds is not None:
        bounded = ops.minimum(ops.maximum(log_ratio, ratio_bounds[0]), ratio_bounds[1])
    if LEVEL == "token" and ratio_bounds is None:
        loss, slope = SURROGATE(logp, old_logp, advantage, surrogate_params)
    elif DETACHED:  # a weight of logp
        loss, slope = SURROGATE(logp, logp - bounded, advantage, surrogate_params)
    else:  # of the ratio alone
        loss, slope = SURROGATE(bounded, zero, advantage, surrogate_params)
        slope = ops.where(bounded == log_ratio, slope, 0.0)
    # A token of weight 0 contributes 0 even where its ratio is NaN.
    out = policy_weight == 0.0
    loss = ops.where(out, 0.0, policy_weight * loss)
    d_logp = ops.where(out, 0.0, policy_weight * slope)
    d_ratio = zero
    if LEVEL == "sequence" or LEVEL == "sequence-sum":
        if not DETACHED:
            d_ratio = d_logp
            d_logp = zero
    if kl_weight is not None:
        kl, kl_slope, through_ratio, both = KL_TERMS(
            logp, old_logp, ref_logp, ratio_of_kl(log_ratio, logp - old_logp, LEVEL), kl_clamps,
            ESTIMATOR, SCORE, WEIGHTING, STRAIGHT_THROUGH,
        )
        loss = loss + kl_weight * kl
        if LEVEL == "sequence" and WEIGHTING == "ratio":
            d_logp = d_logp + kl_weight * kl_slope
            d_ratio = d_ratio + kl_weight * through_ratio
        else:
            d_logp = d_logp + kl_weight * both
    d_entropy = zero
    if entropy_weight is not None:
        loss = loss - entropy_weight * entropy
        d_entropy = -entropy_weight
    if nll_weight is not None:
        loss = loss - ops.where(nll_weight == 0.0, 0.0, nll_weight * logp)
        d_logp = d_logp - nll_weight
    return loss, d_logp, d_ratio, d_entropy
# fmt: on


def ratio_of_kl(log_ratio, own, LEVEL):
    """The log-ratio that weighs a token's KL: that of LEVEL, and at "sequence-sum" the token's own, because the ratio of a
    whole sequence is a product of many and would dominate the KL."""
    if LEVEL == "sequence-sum":
        return own
    else:
        return log_ratio


#: What an objective without a KL has at compile time: one kernel serves all of them.
NO_KL = Kl()


def remembered(objective: Objective, name: str, make: Callable[[Objective], Any]) -> Any:
    """make(objective), cached for an objective whose terms cannot change."""
    known = objective.__dict__.get(name)
    if known is None:
        known = make(objective)
        if objective.__dict__.get("_fixed") and not torch.compiler.is_compiling():
            objective.__dict__[name] = known
    return known


def formulas(objective: Objective) -> dict[str, Callable[..., Any] | str | bool | None]:
    """The arguments of `token_terms` that are fixed at compile time: functions and choices."""
    return remembered(objective, "_formulas", _formulas)


def _formulas(objective: Objective) -> dict[str, Callable[..., Any] | str | bool | None]:
    trust = objective.filter(TrustRegion)
    kl = objective.kl_spec if objective.beta else NO_KL
    return {
        "SURROGATE": objective.surrogate.formula,
        "DETACHED": objective.surrogate.detached_ratio,
        "LEVEL": objective.level,
        "TRUST": None if trust is None else TRUST_REGIONS[trust.kind],
        "KL_TERMS": kl_terms,
        **kl.formula,
    }


def scalars(objective: Objective) -> dict[str, Any]:
    """The numbers that `token_terms` takes at run time besides the rows: changing them recompiles nothing."""
    return remembered(objective, "_scalars", _scalars)


def _scalars(objective: Objective) -> dict[str, Any]:
    trust, floor = objective.filter(TrustRegion), objective.filter(EntropyFloor)
    params = objective.surrogate.params
    if not torch.compiler.is_compiling() and any(math.isnan(x) for x in params):
        name = getattr(objective.surrogate.function, "__qualname__", repr(objective.surrogate))
        raise ValueError(f"the parameters of {name} are {params}: a NaN among them would make the loss one.")
    return {
        "surrogate_params": params,
        "trust_params": () if trust is None else trust.params,
        "entropy_floor": None if floor is None else float(floor.threshold),
        "ratio_bounds": None if objective.log_ratio_bounds is None else tuple(map(float, objective.log_ratio_bounds)),
        "kl_clamps": objective.kl_spec.clamps if objective.beta else None,
    }


def terms_of_rows(
    objective: Objective, logps: Tensor, entropy: Tensor | None, rows: TokenRows, batch: TokenBatch | None, x: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, d_logps, d_entropy) [n] of flat rows at log-ratios x, None: to be computed. One-pass objectives need no
    batch."""
    old = logps if rows.old_logps is None else rows.old_logps
    numbers = scalars(objective)
    if objective.one_pass:
        x = logps - old
    else:
        assert batch is not None
        x = log_ratio(objective, logps, rows, batch) if x is None else x
        rows = _filtered(objective, logps, entropy, rows, batch)
    if objective.surrogate.selects:
        selected = objective.surrogate.select(logps, old, rows.advantages, rows.mask)
        numbers = {**numbers, "surrogate_params": (*numbers["surrogate_params"], selected)}
    losses, d_logps, d_ratio, d_entropy = token_terms(
        logps, entropy, x, old, rows.ref_logps, old if rows.sampler_logps is None else rows.sampler_logps, rows.advantages,
        rows.policy_weight, rows.kl_weight, rows.entropy_weight, rows.nll_weight, **numbers, **formulas(objective),
    )  # fmt: skip
    if objective.through_sequence:
        assert batch is not None
        # The log-ratio is a mean or sum over tokens: its slope goes back to these tokens.
        d_ratio = torch.where(rows.mask, _over_sequences(objective, d_ratio, batch), 0.0)
        d_logps = d_logps + d_ratio * objective.surrogate.in_sequence(_own_log_ratio(logps, rows), rows.advantages)[1]
    return losses, d_logps, d_entropy


def log_ratio(objective: Objective, logps: Tensor, rows: TokenRows, batch: TokenBatch) -> Tensor:
    """logp - old_logp at the objective's level, fp32 [n]: per token, or the mean or sum over the sequence's trained tokens."""
    x = _own_log_ratio(logps, rows)
    if objective.level == "token":
        return x
    x = objective.surrogate.in_sequence(x, rows.advantages)[0]
    if objective.surrogate.absorbs_weights and rows.weights is not None:
        # A weight of 0 leaves out its token, and does not change the ratio of the sequence.
        x = x + torch.where(rows.weights == 0, 0.0, rows.weights.abs().log().clamp(-18.420680743952367, 20.0))
    return _over_sequences(objective, torch.where(rows.mask, x, 0.0), batch)


def _own_log_ratio(logps: Tensor, rows: TokenRows) -> Tensor:
    return torch.zeros_like(logps) if rows.old_logps is None else logps - rows.old_logps


def _over_sequences(objective: Objective, x: Tensor, batch: TokenBatch) -> Tensor:
    """fp32 [n]: the sum of x over its sequence at level "sequence-sum", over the number of trained tokens at the others."""
    total = batch.sequence_sum(x)
    return batch.spread(total if objective.level == "sequence-sum" else total / batch.lengths.clamp(min=1.0)).to(torch.float32)


def kl_of_rows(
    objective: Objective, logps: Tensor, rows: TokenRows, sequence_ratio: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`kl_terms` [n] of flat rows; `sequence_ratio` is the log-ratio at the objective's level."""
    old = logps if rows.old_logps is None else rows.old_logps
    ratio = ratio_of_kl(sequence_ratio, logps - old, objective.level)
    return kl_terms(logps, old, rows.ref_logps, ratio, objective.kl_spec.clamps, **objective.kl_spec.formula)


def _filtered(objective: Objective, logps: Tensor, entropy: Tensor | None, rows: TokenRows, batch: TokenBatch) -> TokenRows:
    """The rows, with weights of 0 where a filter that needs the whole batch leaves a token out."""
    for f in objective.filters:
        if f.one_pass:  # `token_terms` does
            continue
        keep = f.keep(logps, entropy, rows, batch)
        rows = replace(rows, policy_weight=torch.where(keep, rows.policy_weight, 0.0))
        if f.filters_entropy and rows.entropy_weight is not None:
            narrowed = torch.where(keep, rows.entropy_weight, 0.0)
            if objective.entropy_aggregate == "token-mean":
                # The mean is over the tokens that are kept, over all ranks of a sequence but in this batch only.
                sums = torch.stack([x.sum(dtype=torch.float64) for x in (narrowed, rows.entropy_weight)])
                sums = batch.over_context(sums)
                narrowed = narrowed * torch.where(sums[0] == 0, 0.0, sums[1] / sums[0]).to(torch.float32)
            rows = replace(rows, entropy_weight=narrowed)
    return rows
