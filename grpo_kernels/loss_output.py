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
        hint = metric_meant_by(name, self)
        if name in ABSENT_UNLESS:
            raise KeyError(
                f"there is no metric {name!r}: it needs {ABSENT_UNLESS[name]}. This loss has"
                f" {', '.join(self)}."
            )
        raise KeyError(f"there is no metric {name!r}.{hint} This loss has {', '.join(self)}.")


def metric_meant_by(name: str, known: Iterable[str], form: str = "{}") -> str:
    """Return " Did you mean ...?" for a name that is near one or several known metrics, else "".

    form   how a metric is written
    """
    near = near_name(name, known)
    names = [near] if near else []
    if "clip" in name.lower():  # clip_frac, pg_clipfrac: the share of both sides together
        names = ["clip_low", "clip_high"]
    elif name == "ratio":
        names = ["ratio_mean", "ratio_min", "ratio_max"]
    if not names:
        return ""
    return f" Did you mean {' and '.join(form.format(x) for x in names)}?"


@dataclass(eq=False, repr=False)
class LossOutput:
    """The result of a loss.

    loss         0-d fp32, differentiable: the sum of all weighted per-token terms
    logps        log-prob of each target, fp32, the shape of targets, detached; 0 in masked tokens
    entropy      entropy of each token in nats, the same
    rows         the batch as flat rows with the weights of the loss, for your own statistics
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
        known = [*(f.name for f in fields(self) if not f.name.startswith("_")), "metrics"]
        remedy = nearest(name, known)
        if hasattr(Tensor, name):
            remedy = f" out.loss.{name} is the attribute of the loss."
        if name in METRICS or not remedy:
            remedy = metric_meant_by(name, METRICS, 'out.metrics["{}"]')
        raise AttributeError(f"a LossOutput has no {name!r}.{remedy}")

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "a LossOutput is no tuple: take out.loss, out.metrics, out.logps and out.entropy."
        )

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """0-d fp32 tensors on the device of the data, computed on first use from the batch.

        Computing them does not wait for the device; reading one does. Means are over the trained
        tokens of this batch, with skip_inactive=True over those that were processed.

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
        trained = rows.mask
        processed = trained if rows.processed is None else rows.processed
        count = processed.sum().float()
        tokens = count.clamp(min=1.0)

        def mean(x: Tensor) -> Tensor:
            return torch.where(processed, x, 0.0).sum() / tokens

        def extreme(x: Tensor, reduce: Any, start: float) -> Tensor:
            if x.numel() == 0:
                return x.new_ones(())
            return torch.where(count > 0, reduce(torch.where(processed, x, start)), 1.0)

        log_ratio = self._log_ratio
        if log_ratio is None:
            log_ratio = self._objective.log_ratio(logps, rows, self._batch)
        ratio = bounded_exp(log_ratio)
        surrogate = self._objective.surrogate
        clip_low, clip_high = surrogate.clipped(ratio, rows.advantages)
        weight = ratio
        if rows.weights is not None and not surrogate.absorbs_weights:
            weight = ratio * rows.weights
        # fp64, because the square of a runaway ratio overflows fp32.
        weight = torch.where(processed, weight, 0.0).double()
        squares = (tokens * weight.square().sum()).clamp(min=1e-30)
        num_trained = trained.sum().float()
        has_zero_advantage = trained & (rows.advantages == 0)
        metrics = Metrics(
            {
                "tokens": num_trained,
                "ratio_mean": mean(ratio),
                "ratio_min": extreme(ratio, torch.amin, math.inf),
                "ratio_max": extreme(ratio, torch.amax, -math.inf),
                "clip_low": mean(clip_low.float()),
                "clip_high": mean(clip_high.float()),
                "ess": (weight.sum().square() / squares).float(),
                "zero_advantage": has_zero_advantage.sum() / num_trained.clamp(min=1),
                "entropy": mean(self.entropy.flatten()),
            }
        )
        if rows.ref_logps is not None:
            metrics["kl"] = mean(self._objective.kl_terms(logps, rows, log_ratio)[0])
        elif self.divergence is not None:
            metrics["kl"] = mean(self.divergence.flatten())
        if self._batch.kept is not None:
            metrics["outside_set"] = self._batch.outside_set
            warn_of_misaligned_sets(metrics["outside_set"], metrics["tokens"])
        if self._objective.filters:
            kept = processed
            for f in self._objective.filters:
                over_ranks = self._batch.context_group is not None and not f.is_per_token
                if over_ranks or getattr(f, "process_group", None) is not None:
                    continue  # reading metrics must not start a collective
                kept = kept & f.keep(logps, self.entropy.flatten(), rows, self._batch)
            metrics["kept"] = kept.sum() / tokens
        return metrics
