"""What a loss returns, and the metrics of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import torch

from .batch import TokenBatch
from .checks import describe, nearest
from .formulas.ops import bounded_exp
from .formulas.token_stage import TokenRows
from .objective import Objective

Tensor = torch.Tensor


class Metrics(dict[str, Tensor]):
    """A dictionary whose KeyError names what it has."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"there is no metric {name!r}.{nearest(name, self)} This loss has {', '.join(self)}.")


@dataclass(eq=False, repr=False)
class LossOutput:
    """What a fused loss returns.

    loss      0-d fp32, differentiable: the sum of all weighted per-token terms.
    logps     fp32, the shape of targets, detached; 0 where masked.
    entropy   likewise, in nats.
    rows      the batch's flat rows as the loss weighed them, for statistics of one's own.
    whole_logps  with kept sets, log-probs over the whole vocabulary, where an option needs them; else None.
    kl_apart  whether the KL is that of whole_logps.
    divergence   of an exact KL (`Exact`), fp32 in nats, the shape of targets, detached; 0 where masked. Else None.
    metrics   computed on first use, see below.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    _objective: Objective = field(repr=False)
    _batch: TokenBatch = field(repr=False)
    rows: TokenRows = field(repr=False)
    _log_ratio: Tensor | None = field(default=None, repr=False)  # fp32 [n] at the objective's level, if the loss computed it
    whole_logps: Tensor | None = field(default=None, repr=False)
    kl_apart: bool = field(default=False, repr=False)
    divergence: Tensor | None = field(default=None, repr=False)
    _metrics: dict[str, Tensor] | None = field(default=None, repr=False)
    __repr__ = describe

    def __getattr__(self, name: str) -> Any:
        known = [*(f.name for f in fields(self) if f.init and not f.name.startswith("_")), "metrics"]
        remedy = f" out.loss.{name} is that of the loss." if hasattr(Tensor, name) else nearest(name, known)
        raise AttributeError(f"a LossOutput has no {name!r}.{remedy}")

    def __iter__(self) -> NoReturn:
        raise TypeError("a LossOutput is no tuple: take out.loss, out.metrics, out.logps and out.entropy.")

    @property
    def metrics(self) -> dict[str, Tensor]:
        """0-d fp32 tensors on the device of the data, computed on first use from the batch's tensors as they are then.
        Computing them is no host sync, reading one is. Means are over the trained tokens of this batch; with
        skip_inactive=True, over those that were read.

        tokens           trained tokens
        ratio_mean, ratio_min, ratio_max     of the ratio at the objective's level (1 when on-policy), bounded at e^60
        clip_low         share of tokens with A < 0 and a ratio below the lower bound
        clip_high        share of tokens with A > 0 and a ratio above the upper bound
        ess              effective sample size of ratio * weights, as a share: (sum r)^2 / (tokens * sum r^2)
        zero_advantage   share of all trained tokens whose advantage is exactly 0
        entropy          mean entropy in nats
        kl               mean of the KL estimator, weighted as it is in the loss, or of the exact divergence (only with beta != 0)
        outside_set      share of tokens that their kept set lacks (only with kept sets)
        kept_mass        mean probability that rows with a set give to it (only where whole_logps is there)
        kept             share of tokens that all filters of this process keep (only with filters)
        """
        if self._metrics is None:
            self._metrics = self._measured()
        return self._metrics

    def _measured(self) -> dict[str, Tensor]:
        rows, logps = self.rows, self.logps.reshape(-1)
        everywhere = torch.ones_like(logps, dtype=torch.bool)
        trained = everywhere if rows.trained is None else rows.trained
        read = everywhere if rows.read is None else rows.read
        count = read.sum().to(torch.float32)
        tokens = count.clamp(min=1.0)

        def mean(x: Tensor) -> Tensor:
            return torch.where(read, x, 0.0).sum() / tokens

        def extreme(x: Tensor, reduce: Any, start: float) -> Tensor:
            if x.numel() == 0:
                return x.new_ones(())
            return torch.where(count > 0, reduce(torch.where(read, x, start)), 1.0)

        x = self._objective.log_ratio(logps, rows, self._batch) if self._log_ratio is None else self._log_ratio
        ratio = bounded_exp(x)
        low, high = self._objective.surrogate.clipped(ratio, rows.advantages)
        weight = ratio if rows.weights is None or self._objective.surrogate.absorbs_weights else ratio * rows.weights
        weight = torch.where(read, weight, 0.0).to(torch.float64)  # the square of a runaway ratio is beyond fp32
        metrics = Metrics(
            {
                "tokens": trained.sum().to(torch.float32),
                "ratio_mean": mean(ratio),
                "ratio_min": extreme(ratio, torch.amin, math.inf),
                "ratio_max": extreme(ratio, torch.amax, -math.inf),
                "clip_low": mean(low.to(torch.float32)),
                "clip_high": mean(high.to(torch.float32)),
                "ess": (weight.sum().square() / (tokens * weight.square().sum()).clamp(min=1e-30)).to(torch.float32),
                "zero_advantage": (trained & (rows.advantages == 0)).sum() / trained.sum().clamp(min=1).to(torch.float32),
                "entropy": mean(self.entropy.reshape(-1)),
            }
        )
        if rows.ref_logps is not None:
            of_kl = self.whole_logps.reshape(-1) if self.kl_apart and self.whole_logps is not None else logps
            metrics["kl"] = mean(self._objective.kl_terms(of_kl, rows, x)[0])
        elif self.divergence is not None:
            metrics["kl"] = mean(self.divergence.reshape(-1))
        sets = self._batch.kept
        if sets is not None:
            metrics["outside_set"] = self._batch.outside_set
            if self.whole_logps is not None:
                has = read & (sets.counts > 0)
                mass = torch.where(has, (self.whole_logps.reshape(-1) - logps).exp(), 0.0).sum()
                metrics["kept_mass"] = torch.where(has.any(), mass / has.sum().clamp(min=1), 1.0)
        if self._objective.filters:
            kept = read
            for f in self._objective.filters:
                over_ranks = self._batch.context_group is not None and not f.one_pass
                if over_ranks or getattr(f, "process_group", None) is not None:
                    continue  # reading metrics must not start a collective
                kept = kept & f.keep(logps, self.entropy.reshape(-1), rows, self._batch)
            metrics["kept"] = kept.sum() / tokens
        return metrics
