"""Estimators of the KL to the reference from sampled tokens, with their weights and clamps (`Kl`).

An estimator is a function (logp, old_logp, ref_logp) -> (value, slope) of a token, fp32. logp,
old_logp and ref_logp are the log-probs of the sampled token under the policy now, under the policy
at the start of the update, and under the reference. The slope is d value / d logp. In this file d
is ref_logp - logp. Only `distillation` uses old_logp.

On samples of the policy, the expected gradient of each estimator as a loss is

    k1   0, so use it in rewards, or with a weighting
    k2   the gradient of KL(policy || reference)
    k3   the gradient of KL(reference || policy)

With the weighting "ratio" or "score", k1 and k3 have the gradient of KL(policy || reference).
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
    check_slope,
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

    d = ref_logp - logp, p = exp(logp), p_old = exp(old_logp) and r = p / p_old. sg stops the
    gradient, and [...] is 1 if the condition holds, otherwise 0. So a token whose probability has
    dropped by more than 0.2 has the quadratic term only. The value is not a KL estimate, but it is
    used in place of one, because it needs the same three log-probs.
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
    """Return the value d = ref_logp - logp and its slope d value / d logp = -1.

    Minimising d raises logp. `old_logp` is not used.
    """
    return ref_logp - logp, -1.0


def sdar_gate(logp, old_logp, ref_logp):
    """Return the weight sigmoid(5 d) of SDAR (arXiv 2605.15155), with d = ref_logp - logp.

    The weight is near 1 if the reference gives the token a much larger probability than the policy
    does, and near 0 in the opposite case. `old_logp` is not used.
    """
    return ops.sigmoid(5.0 * (ref_logp - logp))


@dataclass(frozen=True)
class DetachedWeight(Checked):
    """A KL estimator multiplied by a weight that has no gradient.

    With k the estimate and sg(weight) the weight as a constant for the gradient, the value is
    sg(weight) * k and the slope d value / d logp is sg(weight) * dk / d logp.

        def near_half(logp, old_logp, ref_logp):
            return ops.exp(logp) * (1.0 - ops.exp(logp))

        objective = Objective(beta=0.1, kl=DetachedWeight(near_half, k2))

    weight      function (logp, old_logp, ref_logp) -> weight of a token. Write it under the rules
                of `surrogates.Custom`.
    estimator   function (logp, old_logp, ref_logp) -> (value, slope), one of this module or your
                own

    `check_kl` compares the slope with autograd, which it lets treat the weight as a constant.
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
        """Return this estimator with its weight computed at `fixed_logp` instead of at logp.

        The weight is then a constant for autograd, as it is for the slope.

        fixed_logp   float [num_tokens], the log-probs at which the weight is computed

        The returned function is an estimator: (logp, old_logp, ref_logp) -> (value, slope), with
        arguments [num_tokens] in the dtype of logp.
        """

        def estimator(logp: Any, old_logp: Any, ref_logp: Any) -> tuple[Any, Any]:
            """Return (value, slope) of each token, with the weight at `fixed_logp`."""
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


# ---- value + slope of an estimator in one formula, because adding the two numbers would cancel
# digits. The sum is the derivative of ratio * value with respect to logp at ratio = 1, where
# d ratio / d logp = ratio


def k1_value_plus_slope(logp, old_logp, ref_logp):
    """Return the sum of value and slope of `k1`, -d + 1, with d = ref_logp - logp."""
    return 1.0 - (ref_logp - logp)


def k2_value_plus_slope(logp, old_logp, ref_logp):
    """Return the sum of value and slope of `k2`, d^2 / 2 - d, with d = ref_logp - logp."""
    d = ref_logp - logp
    return 0.5 * d * d - d


def k3_value_plus_slope(logp, old_logp, ref_logp):
    """Return the sum of value and slope of `k3`, which is -d, with d = ref_logp - logp.

    (e^d - d - 1) + (1 - e^d) = -d. In fp32 the two e^d would cancel only up to rounding errors.
    """
    return -(ref_logp - logp)


VALUE_PLUS_SLOPE: dict[Callable[..., Any], Callable[..., Any]] = {
    k1: k1_value_plus_slope,
    k2: k2_value_plus_slope,
    k3: k3_value_plus_slope,
}

WEIGHTINGS = ("none", "ratio", "detached-ratio", "score")

#: A lower log-prob, -inf included, counts as this one in a KL estimate.
LOWEST_LOGP = -1e4


class KlTerms(NamedTuple):
    """The weighted KL estimate of each token and its derivatives with respect to logp.

    The value is weight * k, where k is the estimate. A weight that is a ratio depends on logp too,
    or at level "sequence" on the log-probs of the whole sequence, so the derivative through the
    ratio is kept apart.

    value                weight * k
    grad_fixed_ratio     weight * dk / d logp, the derivative while the weight is a constant
    grad_through_ratio   derivative with respect to the log of the ratio; 0 for a constant weight
    grad_both            the sum of the two derivatives, computed without cancellation
    """

    value: Any
    grad_fixed_ratio: Any
    grad_through_ratio: Any
    grad_both: Any


def kl_terms(
    logp,
    old_logp,
    ref_logp,
    log_ratio,
    clamps,
    estimator,
    value_plus_slope,
    weighting,
    straight_through,
):
    """Return the weighted KL estimate of each token and its derivatives, as `KlTerms`.

    With k, k' = estimator(logp, old_logp, ref_logp) and r = exp(log_ratio):

        weighting          value   grad_fixed_ratio   grad_through_ratio
        "none"             k       k'                 0
        "detached-ratio"   r k     r k'               0
        "ratio"            r k     r k'               r k, because d r / d log_ratio = r
        "score"            k       k'                 k, as "ratio" with r = 1

    grad_both is the sum of the two derivatives. Outside of the clamps all derivatives are 0. A NaN
    among logp and ref_logp makes all results NaN.

    logp, old_logp     log-prob of each token under the policy now, and at the start of the update
    ref_logp           log-prob of each token under the reference
    log_ratio          log of the ratio of each token, for the weightings that use it
    clamps             (bound of |ref_logp - logp|, bound of |k|), or None
    estimator          function (logp, old_logp, ref_logp) -> (k, k'), k' = dk / d logp
    value_plus_slope   function (logp, old_logp, ref_logp) -> k + k' without cancellation; None:
                       add the results of `estimator`
    weighting          one of WEIGHTINGS
    straight_through   True: -(ref_logp - logp), the slope of `k2`, takes the place of k'. As in
                       verl it ignores the clamps.

    Tensors are fp32 [num_tokens]. Arguments may also be symbols of a `program.Tracer`.
    """
    # With a log-prob of -inf, the distance d would be infinite or NaN.
    logp = logp.clamp(min=LOWEST_LOGP)
    ref_logp = ref_logp.clamp(min=LOWEST_LOGP)
    d = ref_logp - logp
    if clamps is not None:
        max_distance, max_value = clamps
        is_near = ops.abs(d) <= max_distance
        clamped_ref_logp = logp + d.clamp(-max_distance, max_distance)
        ref_logp = ops.where(is_near, ref_logp, clamped_ref_logp)
    # Added to results, because comparisons in the estimator and with the clamps would hide a NaN.
    nan_or_zero = d * 0.0
    value, slope = estimator(logp, old_logp, ref_logp)
    value = value + nan_or_zero
    grad_through_ratio = value
    if value_plus_slope is None:
        grad_both = value + slope
    else:
        grad_both = value_plus_slope(logp, old_logp, ref_logp)
    if clamps is not None:
        is_inside = is_near & (ops.abs(value) <= max_value)
        value = value.clamp(-max_value, max_value)
        slope = ops.where(is_inside, slope, nan_or_zero)
        grad_through_ratio = ops.where(is_inside, grad_through_ratio, nan_or_zero)
        grad_both = ops.where(is_inside, grad_both, nan_or_zero)
    if straight_through:
        slope = -d
        grad_both = grad_through_ratio - d
    if weighting in ("ratio", "detached-ratio"):
        ratio = bounded_exp(log_ratio)
        value = finite(ratio * value)
        slope = finite(ratio * slope)
        grad_through_ratio = finite(ratio * grad_through_ratio)
        grad_both = finite(ratio * grad_both)
    slope = slope + nan_or_zero
    if weighting in ("none", "detached-ratio"):  # the weight is a constant
        grad_through_ratio = nan_or_zero
        grad_both = slope
    return KlTerms(
        value=value,
        grad_fixed_ratio=slope,
        grad_through_ratio=grad_through_ratio,
        grad_both=grad_both,
    )


@dataclass(frozen=True)
class Kl(Checked):
    """How the KL to the reference is estimated from sampled tokens, for `Objective(kl=Kl(...))`.

    With d = ref_logp - logp and r the ratio exp(logp - old_logp) at the objective's level:

    estimator         "k1", "k2", "k3", "abs", "distillation", "sdar" (see the functions of this
                      module), or your own function (logp, old_logp, ref_logp) -> (value, slope),
                      under the rules of `surrogates.Custom`. If a weight in your function has no
                      gradient, declare it with a `DetachedWeight`.
    weighting         what the estimate is multiplied by:
                      "none"             1
                      "ratio"            r, with its gradient, so that off-policy samples stay
                                         unbiased (DeepSeek-V3.2, arXiv 2512.02556; TRL's default).
                                         k3 then has the slope -r d.
                      "detached-ratio"   r as a constant
                      "score"            exp(logp - sg(logp)), where sg stops the gradient. It is 1
                                         but has the score-function gradient (arXiv 2506.09477;
                                         NeMo-RL).
    straight_through  True: the value of the estimator with the slope of k2 (verl's "k1+", "k3+")
    clamp_log, clamp  bounds of |d| and of the value, before the weighting (verl: 20 and 10).
                      Outside of them the gradient is 0, also through the weight, so the tokens that
                      have moved furthest get none. Infinity, the default, switches them off.

    Value and slope stay finite in fp32: a log-prob below -1e4, -inf included, counts as -1e4
    (strict mode refuses -inf), exponents are at most 60, and weighted values are clamped to
    [-1e30, 1e30]. At level "sequence-sum" r is the ratio of the token instead of the sequence.
    Raises ValueError naming the field that is wrong.
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
        require(is_estimator, "estimator", self.estimator, remedy + suggestion_for(self.estimator))
        if callable(self.estimator):
            remedy = "the estimator and its derivative with respect to logp"
            check_returned(self.estimator, ("value", "slope"), remedy)
        require_one_of("weighting", self.weighting, WEIGHTINGS)
        if self.estimator == "distillation":
            has_defaults = (
                self.weighting == "none" and not self.straight_through and self.clamps is None
            )
            remedy = "it has its own weighting: leave the other fields at their defaults."
            require(has_defaults, "estimator", self.estimator, remedy)

    @property
    def function(self) -> Callable[..., Any]:
        """The estimator as a function (logp, old_logp, ref_logp) -> (value, slope)."""
        return self.estimator if callable(self.estimator) else ESTIMATORS[self.estimator]

    @property
    def clamps(self) -> tuple[float, float] | None:
        """(clamp_log, clamp) as floats, or None if both are infinite."""
        if self.clamp_log == self.clamp == math.inf:
            return None
        return (float(self.clamp_log), float(self.clamp))

    @property
    def formula(self) -> dict[str, Any]:
        """The keyword arguments of `kl_terms` that do not change from call to call.

        A compiled formula contains them as constants. It receives the clamps at each call.
        """
        return {
            "estimator": self.function,
            "value_plus_slope": VALUE_PLUS_SLOPE.get(self.function),
            "weighting": self.weighting,
            "straight_through": self.straight_through,
        }


def as_kl(kl: str | Kl | Callable[..., Any]) -> Kl:
    """Convert the argument `Objective(kl=)` to a `Kl`.

    "k3" becomes Kl("k3"), "k3+" becomes Kl("k3", straight_through=True), a function becomes
    Kl(function), and a `Kl` is returned unchanged. Raises ValueError for anything else.
    """
    if isinstance(kl, Kl):
        return kl
    if isinstance(kl, str) and kl.endswith("+"):
        return Kl(kl[:-1], straight_through=True)
    is_estimator = callable(kl) or (isinstance(kl, str) and kl in ESTIMATORS)
    remedy = f"it must be one of {', '.join(ESTIMATORS)}, a Kl, an Exact or a function."
    require(is_estimator, "kl", kl, remedy + suggestion_for(kl))
    return Kl(kl)


def suggestion_for(name: object) -> str:
    """Return " Did you mean ...?" for an unknown estimator, or "" if nothing similar exists.

    For the direction of an exact divergence, such as "reverse", the suggestion is `Exact`. For
    another name it is the estimator with the most similar name.
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
    3, and at every fourth point by up to 20. A point without a derivative (a kink) has probability
    0.

    kl          the name of an estimator, a function (logp, old_logp, ref_logp) -> (value, slope),
                or a `Kl`, of which only the estimator is checked, not its weighting, clamps and
                straight-through slope
    detached    True if the formula treats d = ref_logp - logp as a constant weight. Then the check
                moves ref_logp along with logp, so that d stays constant for autograd. Declare any
                other constant weight with a `DetachedWeight`.
    points      number of random points
    tolerance   largest allowed |slope - derivative| / (1 + |derivative|)
    seed        seed of the random points

    Raises ValueError with a point at which the slope is wrong, or at which the value or the slope
    overflows in fp32.
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
        """Return (value, slope) of each point at other log-probs of the policy, in their dtype.

        moved_logp   fp64 or fp32 [num_points], in place of logp
        """
        dtype = moved_logp.dtype
        moved_ref_logp = moved_logp + ref_distance.to(dtype) if detached else ref_logp.to(dtype)
        return estimator(moved_logp, old_logp.to(dtype), moved_ref_logp)

    check_slope(
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
