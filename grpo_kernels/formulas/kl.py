"""Estimators of the KL to the reference from sampled tokens, with their weights and clamps (`Kl`).

An estimator is a function (logp, old_logp, ref_logp) -> (value, slope) of a token, fp32. The slope
is d value / d logp. In this file d is ref_logp - logp. Only `distillation` uses old_logp, the
log-prob at the start of the update.

The expected gradient of each estimator on samples of the policy: k1 as a loss has none (use it in
rewards, or weighted), k2 has that of KL(policy || reference), k3 that of KL(reference || policy).
Weighted by the ratio or the score, k1 and k3 have that of KL(policy || reference).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..checks import SMALLEST, Checked, nearest, require, require_one_of
from .divergence import DIRECTIONS
from .ops import (
    ComparisonPoints,
    bounded_exp,
    check_returned,
    compare,
    finite,
    ops,
    random_log_probs,
)

# ---- estimators: (logp, old_logp, ref_logp) -> (value, slope)


def k1(logp, old_logp, ref_logp):
    """Return the KL estimate -d and its slope d value / d logp = 1, with d = ref_logp - logp.

    The value is unbiased, but the expected gradient of this estimator as a loss is 0 (Schulman
    2020). `old_logp` is not used.
    """
    d = ref_logp - logp
    return -d, 1.0


def k2(logp, old_logp, ref_logp):
    """Return the KL estimate d^2 / 2 and its slope d value / d logp = -d, with d = ref_logp - logp.

    On-policy its expected gradient is that of KL(policy || reference). `old_logp` is not used.
    """
    d = ref_logp - logp
    return 0.5 * d * d, -d


def k3(logp, old_logp, ref_logp):
    """Return the KL estimate e^d - d - 1 and its slope d value / d logp = 1 - e^d.

    d = ref_logp - logp, which is bounded at 60 in the exponent. The estimate is at least 0. It is
    the estimator of GRPO (arXiv 2402.03300, eq. 4). `old_logp` is not used.
    """
    d = ref_logp - logp
    e = bounded_exp(d)
    return e - d - 1.0, 1.0 - e


def absolute(logp, old_logp, ref_logp):
    """Return |d| and its slope d value / d logp = -sign(d), which is 0 at d = 0.

    d = ref_logp - logp. `old_logp` is not used.
    """
    d = ref_logp - logp
    slope_unless_positive = ops.where(d < 0.0, 1.0, 0.0)
    return ops.abs(d), ops.where(d > 0.0, -1.0, slope_unless_positive)


def distillation(logp, old_logp, ref_logp):
    """Return prime-rl's loss of on-policy distillation from the reference, and its slope.

        value = -sg(d) r [p - p_old >= -0.2] + 1e-3 (log r)^2
        slope = -sg(d) r [p - p_old >= -0.2] + 2e-3 log r         (d value / d logp)

    d = ref_logp - logp, p = exp(logp), p_old = exp(old_logp), r = p / p_old, and sg stops the
    gradient. So a token whose probability has dropped by more than 0.2 has the quadratic term only.
    This is not a KL estimate, but a loss of the same inputs.
    """
    log_ratio = logp - old_logp
    ratio = bounded_exp(log_ratio)
    has_not_dropped = ops.exp(logp) - ops.exp(old_logp) >= -0.2
    distillation_loss = ops.where(has_not_dropped, -(ref_logp - logp) * ratio, 0.0)
    value = distillation_loss + 1e-3 * log_ratio * log_ratio
    # d ratio / d logp = ratio, so the first term is its own derivative.
    slope = distillation_loss + 2e-3 * log_ratio
    return value, slope


def log_gap(logp, old_logp, ref_logp):
    """Return d = ref_logp - logp and its slope -1. Minimising it raises logp."""
    return ref_logp - logp, -1.0


def sdar_gate(logp, old_logp, ref_logp):
    """Return the weight sigmoid(5 d), d = ref_logp - logp, of SDAR (arXiv 2605.15155).

    It is near 1 if the reference gives the token a larger probability than the policy does.
    """
    return ops.sigmoid(5.0 * (ref_logp - logp))


@dataclass(frozen=True)
class DetachedWeight(Checked):
    """An estimator times a weight without gradient.

    Its value is sg(weight) * estimate and its slope is sg(weight) * slope of the estimate, where sg
    stops the gradient.

        def near_half(logp, old_logp, ref_logp):
            return ops.exp(logp) * (1.0 - ops.exp(logp))

        objective = Objective(beta=0.1, kl=DetachedWeight(near_half, k2))

    weight      (logp, old_logp, ref_logp) -> weight of a token, under the rules of
                `surrogates.Custom`.
    estimator   (logp, old_logp, ref_logp) -> (value, slope): a function of this module or of yours.

    `check_kl` compares the slope with autograd while it keeps the weight constant.
    """

    weight: Callable[..., Any]
    estimator: Callable[..., Any]

    def __post_init__(self) -> None:
        """Raise ValueError unless both fields are functions."""
        for name in ("weight", "estimator"):
            remedy = "pass a function of (logp, old_logp, ref_logp)."
            require(callable(getattr(self, name)), name, getattr(self, name), remedy)

    def __call__(self, logp: Any, old_logp: Any, ref_logp: Any) -> tuple[Any, Any]:
        """Return (weight * value, weight * slope) of each token, from three log-probs."""
        value, slope = self.estimator(logp, old_logp, ref_logp)
        weight = self.weight(logp, old_logp, ref_logp)
        return weight * value, weight * slope

    def with_weight_at(self, fixed_logp: torch.Tensor) -> Callable[..., Any]:
        """Return this estimator with its weight computed at `fixed_logp`, whatever logp is.

        The weight is then a constant for autograd, as it is for the slope. fixed_logp is [n]; the
        returned function has the arguments (logp, old_logp, ref_logp), [n] each, in the dtype of
        logp, and returns (value, slope).
        """

        def estimator(logp: Any, old_logp: Any, ref_logp: Any) -> tuple[Any, Any]:
            value, slope = self.estimator(logp, old_logp, ref_logp)
            weight = self.weight(fixed_logp.to(logp.dtype), old_logp, ref_logp)
            return weight * value, weight * slope

        return estimator


#: SDAR (arXiv 2605.15155): sg(sigmoid(5 d)) d, which raises the log-probs of tokens that a teacher
#: finds likelier than the policy does. Pass the teacher's log-probs as ref_logps.
sdar = DetachedWeight(sdar_gate, log_gap)

ESTIMATORS: dict[str, Callable[..., Any]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "distillation": distillation,
    "sdar": sdar,
}


# ---- value + slope, simplified on paper, since adding the two numbers would cancel digits. This is
# the derivative of ratio * value at a ratio of 1, because d ratio / d logp = ratio


def k1_score(logp, old_logp, ref_logp):
    """Return the sum of value and slope of `k1`, -d + 1, with d = ref_logp - logp."""
    return 1.0 - (ref_logp - logp)


def k2_score(logp, old_logp, ref_logp):
    """Return the sum of value and slope of `k2`, d^2 / 2 - d, with d = ref_logp - logp."""
    d = ref_logp - logp
    return 0.5 * d * d - d


def k3_score(logp, old_logp, ref_logp):
    """Return the sum of value and slope of `k3`, in which e^d cancels: -d, d = ref_logp - logp."""
    return -(ref_logp - logp)


SCORES: dict[Callable[..., Any], Callable[..., Any]] = {k1: k1_score, k2: k2_score, k3: k3_score}

WEIGHTINGS = ("none", "ratio", "detached-ratio", "score")


class KlTerms(NamedTuple):
    """The weighted KL estimate of each token and its derivatives with respect to logp.

    The ratio that weights the estimate depends on logp, or at sequence level on the log-probs of
    the whole sequence. So its part of the derivative is separate.

    value                estimate times weight
    grad_fixed_ratio     derivative while the ratio is a constant
    grad_through_ratio   derivative with respect to the log of the ratio; 0 if the ratio is constant
    grad_both            the sum of the two derivatives, without cancellation
    """

    value: Any
    grad_fixed_ratio: Any
    grad_through_ratio: Any
    grad_both: Any


def kl_terms(
    logp, old_logp, ref_logp, log_ratio, clamps, estimator, score, weighting, straight_through
):
    """Return the KL estimate of each token with its weight, and its derivatives, as `KlTerms`.

    All numbers of tokens are fp32 of one shape. `Kl` describes the choices.

    logp, old_logp     log-prob of the token under the policy now, and at the start of the update
    ref_logp           log-prob of the token under the reference
    log_ratio          log of the ratio that may weight the estimate
    clamps             (bound of |ref_logp - logp|, bound of |estimate|); None without bounds
    estimator          (logp, old_logp, ref_logp) -> (value, d value / d logp)
    score              (logp, old_logp, ref_logp) -> value + d value / d logp in one formula; None:
                       the two numbers are added
    weighting          one of WEIGHTINGS
    straight_through   whether to replace the derivative of the estimate by -(ref_logp - logp)
    """
    # With a log-prob of -inf, the distance d would be infinite or NaN.
    logp = logp.clamp(min=-1e4)
    ref_logp = ref_logp.clamp(min=-1e4)
    d = ref_logp - logp
    if clamps is not None:
        is_near = ops.abs(d) <= clamps[0]
        ref_logp = ops.where(is_near, ref_logp, logp + d.clamp(-clamps[0], clamps[0]))
    # NaN if d is NaN. Comparisons in the estimator and with the clamps would hide that NaN.
    zero = d * 0.0
    value, slope = estimator(logp, old_logp, ref_logp)
    value = value + zero
    # The weight has the derivative of a ratio: d ratio / d log_ratio = ratio.
    grad_through_ratio = value
    if score is None:
        grad_both = value + slope
    else:
        grad_both = score(logp, old_logp, ref_logp)
    if clamps is not None:
        is_inside = is_near & (ops.abs(value) <= clamps[1])
        value = value.clamp(-clamps[1], clamps[1])
        slope = ops.where(is_inside, slope, zero)
        grad_through_ratio = ops.where(is_inside, grad_through_ratio, zero)
        grad_both = ops.where(is_inside, grad_both, zero)
    if straight_through:
        slope = -d
        grad_both = grad_through_ratio - d
    if weighting in ("ratio", "detached-ratio"):
        ratio = bounded_exp(log_ratio)
        value = finite(ratio * value)
        slope = finite(ratio * slope)
        grad_through_ratio = finite(ratio * grad_through_ratio)
        grad_both = finite(ratio * grad_both)
    slope = slope + zero
    if weighting in ("none", "detached-ratio"):
        return KlTerms(value, slope, zero, slope)
    return KlTerms(value, slope, grad_through_ratio, grad_both)


@dataclass(frozen=True)
class Kl(Checked):
    """How the KL to the reference is estimated.

    estimator         "k1", "k2", "k3", "abs", "distillation", "sdar" (see the functions of this
                      module), or a function of yours, (logp, old_logp, ref_logp) -> (value, slope),
                      under the rules of `surrogates.Custom`. A weight in it that has no gradient is
                      declared by a `DetachedWeight`.
    weighting         "none". "ratio": times the ratio of the objective's level, with its gradient,
                      so that off-policy samples stay unbiased (DeepSeek-V3.2, arXiv 2512.02556;
                      TRL's default): k3 then has the slope -r d. "detached-ratio": the ratio is a
                      constant. "score": times exp(logp - sg(logp)), which is 1 but has the
                      score-function gradient (arXiv 2506.09477; NeMo-RL).
    straight_through  True: the value of the estimator with the slope of k2 (verl's "k1+", "k3+").
    clamp_log, clamp  bounds of |d| and of the value, before the weighting. Outside them the
                      gradient is 0, also that through the weight (verl: 20 and 10), so the tokens
                      that have moved furthest get none. Infinity, the default, switches them off.

    A log-prob below -1e4, -inf included, counts as -1e4 (strict mode refuses -inf); log-ratios
    beyond 60 are bounded in the exponent, and weighted values at 1e30: value and slope stay finite
    in fp32. At level "sequence-sum" the ratio that weighs is the token's own. Raises ValueError
    naming the field that is wrong.
    """

    estimator: str | Callable[..., Any] = "k3"
    weighting: str = "none"
    straight_through: bool = False
    clamp_log: float = math.inf
    clamp: float = math.inf
    ranges = (("clamp_log clamp", "the bound is above 0 (math.inf switches it off).", SMALLEST),)

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is wrong."""
        super().__post_init__()
        is_estimator = callable(self.estimator) or self.estimator in ESTIMATORS
        remedy = f"it must be one of {', '.join(ESTIMATORS)}, or a function."
        require(is_estimator, "estimator", self.estimator, remedy + meant_by(self.estimator))
        if callable(self.estimator):
            remedy = "the estimator and its derivative with respect to logp"
            check_returned(self.estimator, "value and slope", remedy)
        require_one_of("weighting", self.weighting, WEIGHTINGS)
        if self.estimator == "distillation":
            has_defaults = (
                self.weighting == "none" and not self.straight_through and self.clamps is None
            )
            remedy = "it has its own weighting: leave the other fields alone."
            require(has_defaults, "estimator", self.estimator, remedy)

    @property
    def function(self) -> Callable[..., Any]:
        """The estimator as a function (logp, old_logp, ref_logp) -> (value, slope)."""
        return self.estimator if callable(self.estimator) else ESTIMATORS[self.estimator]

    @property
    def clamps(self) -> tuple[float, float] | None:
        """(clamp_log, clamp), or None if both are infinite."""
        if self.clamp_log == self.clamp == math.inf:
            return None
        return (float(self.clamp_log), float(self.clamp))

    @property
    def formula(self) -> dict[str, Any]:
        """The arguments of `kl_terms` that are fixed when a formula is compiled, by name."""
        return {
            "estimator": self.function,
            "score": SCORES.get(self.function),
            "weighting": self.weighting,
            "straight_through": self.straight_through,
        }


def as_kl(kl: str | Kl | Callable[..., Any]) -> Kl:
    """Return what was passed as `Objective.kl` as a `Kl`.

    "k3" becomes Kl("k3"), "k3+" becomes Kl("k3", straight_through=True), and a function becomes
    Kl(function). Raises ValueError for anything else.
    """
    if isinstance(kl, Kl):
        return kl
    if isinstance(kl, str) and kl.endswith("+"):
        return Kl(kl[:-1], straight_through=True)
    is_estimator = callable(kl) or (isinstance(kl, str) and kl in ESTIMATORS)
    remedy = f"it must be one of {', '.join(ESTIMATORS)}, a Kl, an Exact or a function."
    require(is_estimator, "kl", kl, remedy + meant_by(kl))
    return Kl(kl)


def meant_by(name: object) -> str:
    """Return " Did you mean ...?" for a name that is no estimator, "" without a suggestion.

    The direction of an exact divergence, such as "reverse", suggests `Exact`. Another name suggests
    the estimator with the most similar name.
    """
    if name in DIRECTIONS:
        return f' Did you mean kl=Exact("{name}"), the divergence over the whole vocabulary?'
    return nearest(name, ESTIMATORS) if isinstance(name, str) else ""


def check_kl(
    kl: str | Kl | Callable[..., Any],
    *,
    detached: bool = False,
    points: int = 4096,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> None:
    """Check that the slope of a KL estimator is the derivative of its value with respect to logp.

    Both are computed in float64, the derivative by autograd, at random points. A point has three
    log-probs of one token: logp is between -5 and 0; old_logp and ref_logp differ from it by up to
    3, and at every fourth point by up to 20.

    kl          what `Objective.kl` takes: the name of an estimator, a `Kl` (of which only the
                estimator is checked, not its weighting, clamps and straight-through slope), or a
                function (logp, old_logp, ref_logp) -> (value, slope)
    detached    True, if the formula treats d = ref_logp - logp as a constant weight. Then ref_logp
                moves along with logp. Declare any other constant weight by a `DetachedWeight`.
    points      number of points
    tolerance   largest |slope - derivative| / (1 + |derivative|)
    seed        seed of the points

    Raises ValueError for a wrong slope or an overflow, with the point, as `check_surrogate` does.
    Here d takes the place of the log-ratio. A point at which there is no derivative (a kink) has
    probability 0.
    """
    estimator = as_kl(kl).function
    name = getattr(estimator, "__qualname__", repr(estimator))
    generator = torch.Generator().manual_seed(seed)
    logp, log_ratio = random_log_probs(points, generator)
    _, ref_distance = random_log_probs(points, generator)
    old_logp = logp - log_ratio
    ref_logp = logp + ref_distance
    if isinstance(estimator, DetachedWeight):
        estimator = estimator.with_weight_at(logp)

    def value_and_slope(moved_logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate the estimator at these log-probs of the policy, in their dtype."""
        dtype = moved_logp.dtype
        moved_ref_logp = moved_logp + ref_distance.to(dtype) if detached else ref_logp.to(dtype)
        return estimator(moved_logp, old_logp.to(dtype), moved_ref_logp)

    compare(
        formula_name=f"the KL estimator {name}",
        value_and_slope=value_and_slope,
        points=ComparisonPoints(
            logp=logp,
            distance_name="ref_logp - logp =",
            distance=ref_distance,
            other_numbers={"old_logp": old_logp, "ref_logp": ref_logp},
        ),
        tolerance=tolerance,
    )
