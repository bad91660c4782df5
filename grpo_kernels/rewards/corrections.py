"""Corrections of the sampler mismatch: weights and masks for tokens that another engine, or an
older policy, has sampled.

Let w_t = pi_old(token t) / pi_sampler(token t), W the product of a sequence's w_t and G their
geometric mean. Every correction here is one number per token that multiplies the policy term. It is
known before the policy is evaluated:

    batch = TokenBatch(..., old_logps=old, sampler_logps=sampler)
    weights = importance_weights(batch, high=2.0)
    weights = weights * rejection_mask(batch, over="mean", low=0.99, high=1.01)
    batch = dataclasses.replace(batch, weights=weights)

What the trainers call it, and how to write it (iw = importance_weights, rm = rejection_mask):

    TIS, per token (verl, slime, NeMo, SkyRL: 2.0)     iw(batch, high=2.0)
    TIS, per token (OpenRLHF)                          iw(batch, low=0.5, high=5.0)
    IcePop, MIS, TRL token_mask, verl "0.5_5.0"        iw(batch, mode="mask", low=0.5, high=5.0)
    TIS, sequence product (verl's default)             iw(batch, level="sequence", high=2.0)
    TRL's default, sequence_mask                       iw(batch, level="sequence", mode="mask",
                                                       high=3.0)
    AReaL, level sequence, metric ratio                iw(batch, level="geometric", ...)
    verl's batch normalisation                         iw(batch, ..., normalize=True)
    geometric filter (SkyRL; verl's Geo-RS)            rm(batch, over="mean", low=0.99, high=1.01)
    product mask (SkyRL)                               rm(batch, over="sum", low=0.5, high=2.0)
    token mask (SkyRL, AReaL)                          rm(batch, over="token", low=0.5, high=5.0)
    seq-mask-TIS (OpenRLHF, NeMo)                      rm(batch, over="mean", low=0.99, high=1.01) *
                                                       iw(batch, high=math.inf)
    outlier veto (SkyRL)                               rm(batch, over="min", low=1e-4) * rm(batch,
                                                       over="max", high=100.0)
    outlier veto (slime: a ratio below 1e-4)           rm(batch, over="min", low=1e-4)
    verl token_k1 "lo_hi" (or u, for lo = 1/u, hi = u) rm(batch, metric="k1", low=log(lo),
                                                       high=log(hi))
    verl token_k2, seq_sum_k3, seq_max_k2              rm(batch, metric="k2", high=u),
                                                       rm(batch, metric="k3", over="sum", high=u)
    AReaL kl_k1 in [lo, hi], which is +log w           rm(batch, metric="k1", low=-hi, high=-lo)
    AReaL kl_k3, which is 1/w - 1 + log w              rm with old_logps and sampler_logps exchanged
    off-policy sequence mask                           off_policy_sequence_mask(batch, logps,
                                                       delta=0.5)
    M2PO                                               second_moment_mask(batch, threshold=0.04)
    sequence log-prob error (NeMo)                     sampler_mismatch_mask(batch, logps,
                                                       threshold=2.0)
    the ratio against the sampler itself (prime-rl,    dataclasses.replace(batch,
    torchtitan, verl's bypass mode)                    old_logps=batch.sampler_logps), unscored
                                                       tokens (NaN) taken out of the mask

A rejected token keeps its place in the denominator, as in TRL, AReaL, slime, NeMo and SkyRL. To
take it out as verl's decoupled mode does, put the result into the mask instead: mask & (rm(...) !=
0).

A token whose sampler log-prob is NaN was not scored: its w is 1, and it adds 0 to sums and counts
in means (as in TRL). Log-ratios are bounded at 60 in size and exponents at 60 from above, so that
every result is finite. Every result is fp32, detached and exactly 0 where the mask is False, even
if the inputs are NaN or infinite there. Sums are fp64, in a fixed order.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..checks import (
    DTYPES,
    INTEGRAL,
    LARGEST,
    SMALLEST,
    as_mask,
    expand_to_tokens,
    refuse_unknown,
    require,
    require_number,
    require_one_of,
    require_shape,
    require_tensor,
)
from ..formulas.filters import (
    ADVANTAGES_OF,
    DELTA,
    logp_difference,
    near_sampler,
    sampler_errors,
)
from ..formulas.ops import LOG_RATIO_BOUND
from .groups import Groups, GroupStatistics

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")
METRICS = ("ratio", "k1", "k2", "k3")
OVER = ("token", "sum", "mean", "max", "min")


def importance_weights(
    batch: TokenBatch,
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float = 0.0,
    high: float = 2.0,
    normalize: bool = False,
    process_group: Any = None,
) -> Tensor:
    """Return the weight pi_old / pi_sampler of each token, for `TokenBatch.weights`.

    The result is fp32 in the shape of targets, 0 in masked tokens.

    batch       has old_logps and sampler_logps
    level       "token": the ratio w_t of the token. "sequence": the product of w_t over its
                sequence. "geometric": their geometric mean.
    mode        "truncate": the weight is clamped to [low, high] (TIS). "mask": it is 0 outside of
                [low, high] (MIS, IcePop).
    low, high   0 <= low <= high; math.inf for no upper bound
    normalize   whether to divide by the mean weight. The mean is over trained tokens, or at the
                other levels over the sequences that have trained tokens (as in verl). Normalise the
                whole batch, before you split it.
    process_group  None: the mean is over this process. Otherwise it is over all ranks of this group
                   (torch.distributed.group.WORLD: all ranks), and all of them must call.

    Raises ValueError for other values of these arguments, for a batch without old_logps or
    sampler_logps, and for a level other than "token" with packed rows without cu_seqlens.
    """
    require_one_of("level", level, LEVELS)
    require_one_of("mode", mode, MODES)
    require_number("low", low, "the lower bound is a ratio >= 0.", 0, LARGEST)
    require_number(
        "high", high, f"the upper bound is a ratio above 0 and >= low={low!r}.", max(low, SMALLEST)
    )
    log_weights = _log_weights(batch)  # fp64 [N]
    counted = batch.trained
    if level != "token":
        # [B] from here on: one weight for each sequence.
        reduction = "mean" if level == "geometric" else "sum"
        needs = f'level="{level}" needs'
        log_weights = _reduce_over_sequences(batch, log_weights, reduction, needs)
        counted = batch.lengths > 0
    w = log_weights.clamp(max=LOG_RATIO_BOUND).exp()
    if mode == "truncate":
        w = w.clamp(low, high)
    else:
        w = torch.where((w >= low) & (w <= high), w, 0.0)
    if normalize:
        # The sum of the weights and their number, in one tensor for one all-reduce.
        total = torch.stack([torch.where(counted, w, 0.0).sum(), counted.sum()])
        if process_group is not None:
            torch.distributed.all_reduce(total, group=process_group)
        sum_weights, num_counted = total
        mean = sum_weights / num_counted
        # Without trained tokens, or if all weights are 0, there is no mean to divide by.
        w = torch.where(mean > 0, w / mean, w)
    return _in_shape_of_targets(batch, w if level == "token" else batch.spread(w))


def rejection_mask(
    batch: TokenBatch,
    *,
    metric: str = "ratio",
    over: str = "token",
    low: float = -math.inf,
    high: float = math.inf,
) -> Tensor:
    """Return 1 for tokens with low <= metric <= high, otherwise 0.

    The result is fp32 in the shape of targets, 0 in masked tokens. Multiply several masks to
    combine them.

    batch       has old_logps and sampler_logps
    metric      "ratio": w = pi_old / pi_sampler. "k1", "k2", "k3": the estimates -log w, (log w)^2
                / 2 and w - 1 - log w of KL(sampler || old) (Schulman 2020)
    over        "token": each token is kept or dropped alone. "sum", "mean", "max", "min" over the
                trained tokens of a sequence, which are kept or dropped together. Sum and mean of
                "ratio" are computed from log w: the product and the geometric mean of w.
    low, high   at least one of them. They bound the metric as defined here. verl states the bounds
                of its k1 options as ratios of 1 / w: pass log(lo) and log(hi). AReaL's kl_k1 is
                +log w.

    Raises ValueError like `importance_weights`, and if neither bound is passed.
    """
    require_one_of("metric", metric, METRICS)
    require_one_of("over", over, OVER)
    require_number("low", low, "the lower bound is a number.", high=LARGEST)
    require_number("high", high, f"the upper bound is a number >= low={low!r}.", max(low, -LARGEST))
    bounded = low > -math.inf or high < math.inf
    require(bounded, "high", high, "pass low=, high= or both: without a bound nothing is rejected.")
    x = _log_weights(batch)  # log w of each token, fp64 [N]
    if metric == "k1":
        x = -x
    elif metric == "k2":
        x = 0.5 * x * x
    elif metric == "k3":
        x = x.exp() - 1.0 - x
    if over != "token":
        x = _reduce_over_sequences(batch, x, over, f'over="{over}" needs')  # [B]
    if metric == "ratio":
        # After the reduction, because the product of ratios may overflow.
        x = x.clamp(max=LOG_RATIO_BOUND).exp()
    keep = (x >= low) & (x <= high)
    return _in_shape_of_targets(batch, keep if over == "token" else batch.spread(keep))


def off_policy_sequence_mask(
    batch: TokenBatch, logps: Tensor, *, delta: float, advantage_of: str = "sequence"
) -> Tensor:
    """Return 0 for tokens with A < 0 of sequences that the policy has moved away from, otherwise 1.

    The policy has moved away if the mean of sampler_logp - logp over the trained tokens of the
    sequence exceeds `delta`. Dropping these tokens prevents the loss from pushing it further away.
    The result is fp32 in the shape of targets, 0 in masked tokens.

    logps          log-probs under the policy now, or old_logps: the shape of targets, or flat [N]
    delta          finite: TRL suggests 0.5, slime has 1e-4
    advantage_of   "sequence": A is the sum of the advantages of the sequence's trained tokens, so a
                   sequence is kept or dropped as a whole. "token": A is the advantage of the token
                   (TRL).

    Without sampler_logps, old_logps take their place. Without either the batch is on-policy, and
    nothing is dropped. Raises ValueError for logps of another size and for packed rows without
    cu_seqlens. Sources: DeepSeek-V3.2, arXiv 2512.02556, section 3.1; TRL's
    `off_policy_mask_threshold`.
    """
    require_number("delta", delta, *DELTA)
    require_one_of("advantage_of", advantage_of, ADVANTAGES_OF)
    batch.check_sequences("off_policy_sequence_mask needs")
    flat_logps = _flat_argument(batch, "logps", logps).float()
    keep = near_sampler(batch, flat_logps, delta, advantage_of)
    return _in_shape_of_targets(batch, keep)


def sampler_mismatch_mask(batch: TokenBatch, logps: Tensor, *, threshold: float = 2.0) -> Tensor:
    """Return 1 for tokens of sequences whose log-probs are near the sampler's, otherwise 0.

    A sequence is near if the mean of exp |logp - sampler_logp| over its trained tokens is at most
    `threshold`. The result is fp32 in the shape of targets, 0 in masked tokens. Put it into the
    mask of the batch, mask & (result != 0), so that the denominators count only the sequences that
    are left.

    logps       log-probs under the policy now, or old_logps: the shape of targets, or flat [N]
    threshold   at least 1

    A sequence with a NaN among its log-probs is kept. Raises ValueError for logps of another size,
    without sampler_logps, and for packed rows without cu_seqlens. Source: NeMo-RL's
    `seq_logprob_error_threshold`. `SamplerMismatch` is the filter that uses the log-probs of the
    loss.
    """
    remedy = "the mean of exp |difference| is at least 1."
    require_number("threshold", threshold, remedy, 1, LARGEST)
    batch.check_sequences("sampler_mismatch_mask needs")
    flat_logps = _flat_argument(batch, "logps", logps).float()
    errors = sampler_errors(batch, flat_logps)  # [B]
    keep = ~(errors > threshold)  # not errors <= threshold, which is False for NaN
    return _in_shape_of_targets(batch, batch.spread(keep))


def second_moment_mask(batch: TokenBatch, *, threshold: float) -> Tensor:
    """Return 1 for the tokens with the smallest (log w)^2, otherwise 0.

    w is pi_old / pi_sampler. The mask keeps as many tokens as possible while their mean of
    (log w)^2 is below `threshold`, and at least one. Of equal tokens the later ones are dropped
    first. The result is fp32 in the shape of targets, 0 in masked tokens.

    batch       has old_logps and sampler_logps
    threshold   above 0 (0.04 in the paper)

    Raises ValueError like `importance_weights`. Source: M2PO, arXiv 2510.01161; AReaL's
    `m2_threshold`.
    """
    remedy = "the bound of the mean (log w)^2 is a number above 0."
    require_number("threshold", threshold, remedy, SMALLEST, LARGEST)
    log_weights = _log_weights(batch)
    trained = batch.trained
    # Masked tokens are sorted behind all others.
    squares = torch.where(trained, log_weights * log_weights, torch.inf)
    ordered, order = torch.sort(squares, stable=True)
    rank = torch.arange(batch.tokens, device=squares.device)
    # The mean of the k smallest rises with k, so bisection finds the last k below the threshold.
    # Each step is a plain sum, whose order is fixed on a GPU, unlike that of a cumulative sum, and
    # there is no host sync.
    num_kept = torch.ones((), dtype=torch.int64, device=squares.device)
    upper = trained.sum()
    for _ in range(batch.tokens.bit_length()):
        middle = (num_kept + upper + 1) // 2
        below = torch.where(rank < middle, ordered, 0.0).sum() < threshold * middle
        num_kept = torch.where(below, middle, num_kept)
        upper = torch.where(below, upper, middle - 1)
    keep = torch.zeros_like(trained).scatter(0, order, rank < num_kept)
    return _in_shape_of_targets(batch, keep)


def without_truncated(
    mask: Tensor, finished: Tensor, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return `mask` without the completions that the token budget cut off: bool, the shape of mask.

    mask         bool (or 0/1 integer) [B, T], or packed [N] with cu_seqlens
    finished     bool (or 0/1 integer) [B]: True if the completion ended by itself
    cu_seqlens   int [B + 1], boundaries of packed sequences; None for a mask [B, T]

    Tokens that are removed from the mask do not count in the denominators either (TRL's
    `mask_truncated_completions`; overlong filtering in DAPO, arXiv 2503.14476). Raises ValueError
    for shapes or dtypes that do not fit.
    """
    remedy = "a bool tensor [B, T], or packed [N] with cu_seqlens"
    require_tensor("mask", mask, DTYPES, remedy)
    num_dims = 2 if cu_seqlens is None else 1
    remedy = "pass [B, T], or packed [N] with cu_seqlens."
    require(mask.dim() == num_dims, "mask.shape", list(mask.shape), remedy)
    num_sequences = len(mask) if cu_seqlens is None else cu_seqlens.numel() - 1
    require_tensor("finished", finished, INTEGRAL, f"one bool per sequence, [{num_sequences}]")
    require_shape(
        "finished", finished, torch.Size([num_sequences]), "a tensor of one number a sequence"
    )
    is_trained = as_mask("mask", mask, mask.shape)
    is_finished = expand_to_tokens(finished[:, None], mask.shape, cu_seqlens) != 0
    return is_trained & is_finished


def correction_metrics(
    batch: TokenBatch,
    weights: Tensor | None = None,
    *,
    low: float | None = None,
    high: float | None = None,
) -> dict[str, Tensor]:
    """Return statistics of the mismatch between policy and sampler, as 0-d fp32 tensors.

    They are over the trained tokens of this batch, with w_t = pi_old / pi_sampler:

    ratio_mean, ratio_min, ratio_max, ratio_std   of w_t
    share_below, share_above   share of tokens with w_t < low, w_t > high; only if the bound is
                               passed
    ess                   effective sample size (sum v)^2 / (n sum v^2) in [0, 1], where v are the
                          weights, or w_t if no weights are passed
    share_rejected        share of tokens with weight 0; only if weights are passed
    kl_k1, kl_k3          estimates of KL(sampler || old): mean of -log w, of w - 1 - log w
    chi2_token            mean of w^2, minus 1
    abs_log_ratio_mean, abs_log_ratio_max   of |log w_t|
    share_unscored        share of tokens without a sampler's log-prob

    If the sequences are known, also over the sequences with trained tokens:

    log_ppl_difference    mean of the log-perplexity under the old policy minus that under the
                          sampler
    chi2_sequence         mean of W^2, minus 1, where W is the product of w_t over the sequence

    Pass weights per token (the shape of targets). A batch without trained tokens gives 0
    throughout. There is no host sync. Raises ValueError like `importance_weights`.
    """
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            require_number(name, bound, "the bound is a ratio >= 0.", 0)
    x = _log_weights(batch)
    trained = batch.trained

    def mean(values: Tensor, counted: Tensor = trained) -> Tensor:
        """Return the mean of the values that count, 0-d fp64. It is 0 if none counts."""
        total = torch.where(counted, values, 0.0).sum(dtype=torch.float64)
        return total / counted.sum().clamp(min=1)

    def statistics(values: Tensor) -> GroupStatistics:
        """Return statistics of values [N] over the trained tokens of the batch."""
        return GroupStatistics(Groups(), torch.where(trained, values, 0.0), trained)

    w = x.exp()
    ratio = statistics(w)
    abs_log_ratio = statistics(x.abs())
    metrics = {
        "ratio_mean": ratio.mean,
        "ratio_min": ratio.lowest,
        "ratio_max": ratio.highest,
        "ratio_std": ratio.std(unbiased=False),
        "kl_k1": mean(-x),
        "kl_k3": mean(w - 1.0 - x),
        "chi2_token": mean((2.0 * x).clamp(max=LOG_RATIO_BOUND).exp() - 1.0),
        "abs_log_ratio_mean": abs_log_ratio.mean,
        "abs_log_ratio_max": abs_log_ratio.highest,
        "share_unscored": mean(batch.flat("sampler_logps").isnan()),  # type: ignore[union-attr]
    }
    if low is not None:
        metrics["share_below"] = mean(w < low)
    if high is not None:
        metrics["share_above"] = mean(w > high)
    effective_weights = w
    if weights is not None:
        effective_weights = _flat_argument(batch, "weights", weights).double()
        metrics["share_rejected"] = mean(effective_weights == 0)
    mean_square = mean(effective_weights.square())
    squared_mean = mean(effective_weights).square()
    metrics["ess"] = torch.where(mean_square > 0, squared_mean / mean_square, 0.0)
    if batch.sequences is not None:
        num_trained = batch.sequence_sum(trained)
        has_trained = num_trained > 0
        log_product = batch.sequence_sum(x)
        metrics["log_ppl_difference"] = mean(-log_product / num_trained.clamp(min=1.0), has_trained)
        squares = (2.0 * log_product).clamp(max=LOG_RATIO_BOUND).exp()
        metrics["chi2_sequence"] = mean(squares - 1.0, has_trained)
    # The extremes of no tokens are infinite.
    return {
        name: torch.where(ratio.size > 0, value, 0.0).float() for name, value in metrics.items()
    }


# ---- helpers


def _log_weights(batch: TokenBatch) -> Tensor:
    """Return log(pi_old / pi_sampler) of each of the N tokens, fp64 [N], 0 in masked tokens.

    Raises ValueError if the batch lacks one of the two log-probs.
    """
    for name in ("old_logps", "sampler_logps"):  # pi_old and pi_sampler
        if getattr(batch, name) is None:
            raise ValueError(
                f"{name} is None: the mismatch is pi_old / pi_sampler, so the TokenBatch needs"
                f" {name}= too."
            )
    flat = batch.table("old_logps", "sampler_logps")  # {name: [N]}
    return logp_difference(*flat.values())


def _reduce_over_sequences(batch: TokenBatch, x: Tensor, over: str, needs: str) -> Tensor:
    """Reduce x over the trained tokens of each of B sequences, fp64 [B].

    x       fp64 [N], 0 in masked tokens
    over    "sum", "mean", "max" or "min"
    needs   the start of the error if the batch does not know its sequences, such as
            'level="sequence" needs'

    A sequence without trained tokens gives 0 for "sum" and "mean", -inf for "max", inf for "min".
    """
    num_trained = batch.check_sequences(needs).lengths
    if over == "sum":
        return batch.sequence_sum(x)
    if over == "mean":
        return batch.sequence_sum(x) / num_trained.clamp(min=1.0)
    # Masked tokens get this value, so that they do not change the extreme of their sequence.
    nothing = -torch.inf if over == "max" else torch.inf
    sequence_ids = batch.spread(torch.arange(len(num_trained), device=num_trained.device))
    trained_x = torch.where(batch.trained, x, nothing)
    extremes = torch.full_like(num_trained, nothing)
    extremes = extremes.scatter_reduce(0, sequence_ids, trained_x, f"a{over}")  # "amax" or "amin"
    # With a context_group, tokens of a sequence are on several ranks, whose extremes are combined.
    return batch.over_context(extremes, over.upper())


def _flat_argument(batch: TokenBatch, name: str, x: object) -> Tensor:
    """Return x, which has one number for each of the N tokens, detached and flat [N].

    batch   has N tokens
    name    the argument, for the error
    x       what the caller passed

    Raises ValueError for another size.
    """
    if not isinstance(x, Tensor) or x.numel() != batch.tokens:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{name} is {got}, but targets has shape {list(batch.targets.shape)}: they must be the"
            " same."
        )
    return x.detach().flatten()


def _in_shape_of_targets(batch: TokenBatch, values: Tensor) -> Tensor:
    """Return values [N] as fp32 in the shape of targets, with 0 in masked tokens."""
    return torch.where(batch.trained, values.float(), 0.0).view(batch.targets.shape)


# ---- by name


@dataclass(frozen=True)
class Correction:
    """A named correction of a `TokenBatch` for the mismatch to its sampler.

    A call runs `function` with `options`, which the call may override. The result multiplies the
    weights of the batch, or becomes its mask.

    name       its name in `CORRECTIONS`
    function   one of the functions above. It returns weights or a mask, in the shape of targets.
    options    keyword arguments of the function that differ from its defaults
    """

    name: str
    function: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        batch: TokenBatch,
        *,
        finished: Tensor | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> TokenBatch:
        """Return the corrected batch.

        finished        bool [B]: True if the completion ended by itself; only "without_truncated"
                        needs it
        process_group   the ranks over which a correction normalises; None: this process
        options         keyword arguments of the function, in place of those in `self.options`

        Raises TypeError for an option that the function does not have, and ValueError as the
        function does.
        """
        parameters = inspect.signature(self.function).parameters
        refuse_unknown(f"the correction {self.name!r}", options, parameters)
        if self.function is without_truncated:  # it changes the mask, not the weights
            remedy = f"the correction {self.name!r} needs to know which completions ended."
            require(finished is not None, "finished", None, remedy)
            assert finished is not None
            mask = batch.trained.view(batch.targets.shape)
            mask = without_truncated(mask, finished, cu_seqlens=batch.cu_seqlens)
            return dataclasses.replace(batch, mask=mask)
        arguments = {**self.options, **options}
        if self.function in (off_policy_sequence_mask, sampler_mismatch_mask):
            # The policy has not been evaluated yet, so its old log-probs are compared.
            arguments["logps"] = batch.old_logps
        if "process_group" in parameters:
            arguments["process_group"] = process_group
        weights = self.function(batch, **arguments)  # a mask is a weight of 0 or 1
        earlier_weights = batch.flat("weights")
        if earlier_weights is not None:
            weights = weights * earlier_weights.view(weights.shape)
        return dataclasses.replace(batch, weights=weights)


#: All corrections by name. The table at the top of this file lists which trainer uses which.
CORRECTIONS: dict[str, Correction] = {
    entry.name: entry
    for entry in (
        Correction("importance_weights", importance_weights),
        Correction("tis", importance_weights, {"high": 2.0}),
        Correction("sequence_tis", importance_weights, {"level": "sequence", "high": 2.0}),
        Correction("icepop", importance_weights, {"mode": "mask", "low": 0.5, "high": 5.0}),
        Correction(
            "sequence_mask", importance_weights, {"level": "sequence", "mode": "mask", "high": 3.0}
        ),
        Correction("rejection_mask", rejection_mask),
        Correction("geometric_mask", rejection_mask, {"over": "mean", "low": 0.99, "high": 1.01}),
        Correction("veto", rejection_mask, {"over": "min", "low": 1e-4}),
        Correction("off_policy_mask", off_policy_sequence_mask, {"delta": 0.5}),
        Correction("sampler_mismatch", sampler_mismatch_mask, {"threshold": 2.0}),
        Correction("m2po", second_moment_mask, {"threshold": 0.04}),
        Correction("without_truncated", without_truncated),
    )
}
