"""Surrogates that treat tokens with a large covariance of log-prob and advantage differently (arXiv 2505.22617).

Their functions (logp, old_logp, advantage, params) -> (loss, slope) are like those of surrogates.py. The last entry of params
is 1.0 for selected tokens and 0.0 for the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..checks import LARGEST, require, require_clip_widths, require_number, with_hints
from .custom import Surrogate
from .ops import bounded_exp, ops

Tensor = torch.Tensor

# ---- formulas


def clip_cov(logp, old_logp, advantage, params):
    """`clip`, and nothing for selected tokens. See `ClipCov`."""
    selected = params[-1]
    low = 1.0 - params[0]
    high = 1.0 + params[1]
    r = bounded_exp(logp - old_logp)
    loss = -ops.minimum(r * advantage, ops.minimum(ops.maximum(r, low), high) * advantage)
    active = ops.where(advantage > 0.0, r <= high, r >= low) & (selected == 0.0)
    return ops.where(selected == 0.0, loss, 0.0), ops.where(active, -r * advantage, 0.0)


def kl_cov(logp, old_logp, advantage, params):
    """-r A, plus coef |x| for selected tokens. See `KlCov`."""
    selected = params[-1]
    x = logp - old_logp
    sign = ops.where(x > 0.0, 1.0, ops.where(x < 0.0, -1.0, 0.0))
    term = -bounded_exp(x) * advantage
    return term + params[0] * selected * ops.abs(x), term + params[0] * selected * sign


# ---- selection


def covariance(logps: Tensor, advantages: Tensor, trained: Tensor) -> Tensor:
    """(A - mean A) (logp - mean logp) of every trained token of the batch, fp64 [n]; 0 elsewhere. arXiv 2505.22617 eq. 9.
    logps and advantages fp32 [n], trained bool [n]."""
    count = trained.sum().clamp(min=1)
    centred = []
    for values in (logps, advantages):
        x = torch.where(trained, values.to(torch.float64), 0.0)
        centred.append(x - x.sum() / count)
    return torch.where(trained, centred[0] * centred[1], 0.0)


def _first(order: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
    """fp32 [n]: 1 for the `count` (0-d) eligible tokens with the lowest `order`, 0 for the others. No host sync."""
    ranked = torch.argsort(torch.where(eligible, order, math.inf), stable=True)
    rank = torch.zeros_like(ranked).scatter_(0, ranked, torch.arange(ranked.numel(), device=ranked.device))
    return (eligible & (rank < count)).to(torch.float32)


@with_hints
@dataclass(frozen=True)
class ClipCov(Surrogate):
    """Clip-Cov: `Clip` with eps_low and eps_high, without a random `share` of the tokens (at least one). These are drawn from
    the tokens that are not clipped and whose covariance of log-prob and advantage is between `low` and `high`. Source: arXiv
    2505.22617.

    The random choice follows torch's global seed."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    function = staticmethod(clip_cov)
    levels = ("token",)
    selects = True

    def __post_init__(self) -> None:
        require_clip_widths(self.eps_low, self.eps_high)
        require_number("share", self.share, "the share of tokens is in [0, 1].", 0, 1)
        require_number("low", self.low, "the band of covariances is low < high.")
        require(self.low < self.high, "high", self.high, f"the band of covariances is low < high, but low={self.low}.")

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        return (1.0 - self.eps_low, 1.0 + self.eps_high)

    def select(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, trained: Tensor) -> Tensor:
        low, high = self.clipped(bounded_exp(logps - old_logps), advantages)
        cov = covariance(logps, advantages, trained)
        eligible = trained & ~(low | high) & (cov > self.low) & (cov < self.high)
        count = (self.share * trained.sum().to(torch.float64)).floor().clamp(min=1)
        return _first(torch.rand(logps.shape, device=logps.device), eligible, count)


@with_hints
@dataclass(frozen=True)
class KlCov(Surrogate):
    """KL-Cov: loss = -r A, plus coef |x| for the `share` of the tokens (at least one) with the largest covariance of
    log-prob and advantage. Source: arXiv 2505.22617."""

    coef: float = 1.0
    share: float = 2e-4
    function = staticmethod(kl_cov)
    levels = ("token",)
    zero_at_zero_advantage = False
    selects = True

    def __post_init__(self) -> None:
        require_number("coef", self.coef, "the weight of the penalty is a finite number >= 0.", 0, LARGEST)
        require_number("share", self.share, "the share of tokens is in [0, 1].", 0, 1)

    def select(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, trained: Tensor) -> Tensor:
        count = (self.share * trained.sum().to(torch.float64)).floor().clamp(min=1)
        return _first(-covariance(logps, advantages, trained), trained, count)
