"""What a loss returns: the loss, statistics of each token, and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from .batch import TokenBatch
from .checks import describe, near_name, nearest
from .formulas.ops import bounded_exp
from .formulas.token_inputs import TokenInputs
from .objective import Objective
from .set_alignment import warn_of_misaligned_sets

#: Metrics that only some losses have, and what they need.
ABSENT_UNLESS = {
    "kl": "an objective with beta != 0",
    "outside_set": "a batch with candidate sets (kept=)",
    "kept": "an objective with filters",
}
#: All metrics, see `LossOutput.metrics`.
METRICS = (
    "tokens",
    "ratio_mean",
    "ratio_min",
    "ratio_max",
    "clip_low",
    "clip_high",
    "ess",
    "zero_advantage",
    "entropy",
    *ABSENT_UNLESS,
)


class Metrics(dict[str, Tensor]):
    """A dictionary whose KeyError names what it has."""

    def __missing__(self, name: str) -> Tensor:
        """Raise KeyError for a metric that this loss lacks, and say what the metric needs."""
        hint = metric_meant_by(name, self)
        if name in ABSENT_UNLESS:  # the name is right, but this loss does not have the metric
            raise KeyError(
                f"there is no metric {name!r}: it needs {ABSENT_UNLESS[name]}. This loss has"
                f" {', '.join(self)}."
            )
        raise KeyError(f"there is no metric {name!r}.{hint} This loss has {', '.join(self)}.")


def masked_mean(x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """Return the sum of x over the tokens in the mask, divided by their number, 0-d fp32.

    x       fp32 [num_tokens]
    mask    bool [num_tokens]
    count   0-d fp32, number of tokens in the mask, at least 1
    """
    return torch.where(mask, x, 0.0).sum() / count


def masked_min(x: Tensor, mask: Tensor, has_tokens: Tensor) -> Tensor:
    """Return the smallest x of the tokens in the mask, 0-d fp32. It is 1 if the mask is empty.

    x            fp32 [num_tokens]: ratios, which are 1 if the policy has not changed
    mask         bool [num_tokens]
    has_tokens   0-d bool, whether the mask has a token
    """
    if x.numel() == 0:
        return x.new_ones(())
    smallest = torch.amin(torch.where(mask, x, math.inf))
    return torch.where(has_tokens, smallest, 1.0)


def masked_max(x: Tensor, mask: Tensor, has_tokens: Tensor) -> Tensor:
    """Return the largest x of the tokens in the mask, 0-d fp32. It is 1 if the mask is empty.

    x            fp32 [num_tokens]: ratios, which are 1 if the policy has not changed
    mask         bool [num_tokens]
    has_tokens   0-d bool, whether the mask has a token
    """
    if x.numel() == 0:
        return x.new_ones(())
    largest = torch.amax(torch.where(mask, x, -math.inf))
    return torch.where(has_tokens, largest, 1.0)


def metric_meant_by(name: str, metrics: Iterable[str], form: str = "{}") -> str:
    """Return " Did you mean ...?" with the metrics that a wrong name may mean, "" if there is none.

    name      the unknown name, for example "clip_frac"
    metrics   the names of the metrics that exist
    form      how a metric is written in the message: a format string with one {} for its name
    """
    if "clip" in name.lower():  # clip_frac, pg_clipfrac: the share of both sides together
        names = ["clip_low", "clip_high"]
    elif name == "ratio":
        names = ["ratio_mean", "ratio_min", "ratio_max"]
    else:
        near = near_name(name, metrics)
        names = [near] if near else []
    if not names:
        return ""
    return f" Did you mean {' and '.join(form.format(x) for x in names)}?"


@dataclass(eq=False, repr=False)
class LossOutput:
    """The result of a loss.

    loss         0-d fp32, differentiable: the sum of all weighted per-token terms
    logps        log-prob of each target, fp32, the shape of targets, detached; 0 in masked tokens
    entropy      entropy of each token in nats, the same
    rows         the tokens of the batch, flat, with the weights of the loss, for further statistics
    divergence   divergence from the reference with kl=Exact(...), the same as logps, in nats (a
                 total variation: a probability). Else None.
    metrics      0-d tensors, computed on first use, see below
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    _objective: Objective = field(repr=False)
    _batch: TokenBatch = field(repr=False)
    rows: TokenInputs = field(repr=False)
    _log_ratio: Tensor | None = field(default=None, repr=False)
    divergence: Tensor | None = field(default=None, repr=False)
    __repr__ = describe

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for an unknown attribute, and suggest what the caller may mean.

        The suggestion is an attribute of the output, the attribute of the loss tensor (for example
        `backward`), or a metric. Python calls this only for attributes that do not exist.
        """
        public_fields = [f.name for f in fields(self) if not f.name.startswith("_")]
        remedy = nearest(name, [*public_fields, "metrics"])
        if hasattr(Tensor, name):
            remedy = f" out.loss.{name} is the attribute of the loss."
        if name in METRICS or not remedy:
            remedy = metric_meant_by(name, METRICS, form='out.metrics["{}"]')
        raise AttributeError(f"a LossOutput has no {name!r}.{remedy}")

    def __iter__(self) -> NoReturn:
        """Raise TypeError: an output cannot be unpacked. The message names the fields to use."""
        raise TypeError(
            "a LossOutput is no tuple: take out.loss, out.metrics, out.logps and out.entropy."
        )

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Metrics of this batch by name: 0-d fp32 tensors on its device, computed on first use.

        Computing them does not wait for the device. Reading one does. Means and shares are over the
        trained tokens, with skip_inactive=True over those that were processed. A is the advantage
        of a token.

        tokens           number of trained tokens
        ratio_mean, ratio_min, ratio_max
                         ratio at the objective's level (1 if on-policy), bounded at e^60
        clip_low         share of tokens with A < 0 and a ratio below the lower bound
        clip_high        share of tokens with A > 0 and a ratio above the upper bound
        ess              effective sample size of ratio * weights as a share:
                         (sum r)^2 / (tokens * sum r^2)
        zero_advantage   share of all trained tokens whose advantage is exactly 0
        entropy          mean entropy in nats
        kl               mean of the KL estimator, weighted as in the loss, or of the exact
                         divergence (only with beta != 0)
        outside_set      share of tokens that are not in their candidate set (only with such sets).
                         Above 5 % a later call warns once.
        kept             share of tokens that all filters of this process keep (only with filters)
        """
        rows = self.rows
        logps = self.logps.flatten()
        entropy = self.entropy.flatten()
        trained = rows.mask
        processed = trained if rows.processed is None else rows.processed
        count = processed.sum().float()
        has_tokens = count > 0
        count = count.clamp(min=1.0)
        log_ratio = self._log_ratio
        if log_ratio is None:  # a token-level loss has not kept it
            log_ratio = self._objective.log_ratio(logps, rows, self._batch)
        ratio = bounded_exp(log_ratio)
        clip_low, clip_high = self._objective.surrogate.clipped(ratio, rows.advantages)
        num_trained = trained.sum().float()
        has_zero_advantage = trained & (rows.advantages == 0)
        metrics = Metrics(
            {
                "tokens": num_trained,
                "ratio_mean": masked_mean(ratio, processed, count),
                "ratio_min": masked_min(ratio, processed, has_tokens),
                "ratio_max": masked_max(ratio, processed, has_tokens),
                "clip_low": masked_mean(clip_low.float(), processed, count),
                "clip_high": masked_mean(clip_high.float(), processed, count),
                "ess": self._effective_sample_size(ratio, processed, count),
                "zero_advantage": has_zero_advantage.sum() / num_trained.clamp(min=1),
                "entropy": masked_mean(entropy, processed, count),
            }
        )
        if rows.ref_logps is not None:
            kl = self._objective.kl_terms(logps, rows, log_ratio).value
            metrics["kl"] = masked_mean(kl, processed, count)
        elif self.divergence is not None:
            metrics["kl"] = masked_mean(self.divergence.flatten(), processed, count)
        if self._batch.kept is not None:
            metrics["outside_set"] = self._batch.outside_set
            warn_of_misaligned_sets(metrics["outside_set"], metrics["tokens"])
        if self._objective.filters:
            is_kept = self._kept_by_filters(logps, entropy, processed)
            metrics["kept"] = is_kept.sum() / count
        return metrics

    def _effective_sample_size(self, ratio: Tensor, processed: Tensor, count: Tensor) -> Tensor:
        """Return the effective sample size as a share, 0-d fp32: (sum w)^2 / (count * sum w^2).

        The sums are over the processed tokens. w is the ratio of a token times its weight in the
        batch. The result is 1 if all w are equal, and close to 0 if a few tokens dominate.

        ratio       fp32 [num_tokens], exp(log-ratio) of each token
        processed   bool [num_tokens]: tokens that the loss processed
        count       0-d fp32, number of processed tokens, at least 1
        """
        rows = self.rows
        weight = ratio
        # A surrogate with `absorbs_weights` has the weight of the batch in its ratio already.
        if rows.weights is not None and not self._objective.surrogate.absorbs_weights:
            weight = ratio * rows.weights
        # fp64, because the square of a very large ratio overflows fp32.
        weight = torch.where(processed, weight, 0.0).double()
        squares = (count * weight.square().sum()).clamp(min=1e-30)
        return (weight.sum().square() / squares).float()

    def _kept_by_filters(self, logps: Tensor, entropy: Tensor, processed: Tensor) -> Tensor:
        """Return a mask of the processed tokens that all filters keep, bool [num_tokens].

        A filter that communicates with other ranks is skipped, as if it kept all tokens: reading a
        metric on one rank must not start a collective, for which the other ranks would have to
        call the same code.

        logps, entropy   fp32 [num_tokens]
        processed        bool [num_tokens]: tokens that the loss processed
        """
        is_kept = processed
        for loss_filter in self._objective.filters:
            has_group = getattr(loss_filter, "process_group", None) is not None
            # With a context_group, sums over a sequence are sums over ranks.
            sums_over_ranks = self._batch.context_group is not None and not loss_filter.is_per_token
            if has_group or sums_over_ranks:
                continue
            is_kept = is_kept & loss_filter.keep(logps, entropy, self.rows, self._batch)
        return is_kept
