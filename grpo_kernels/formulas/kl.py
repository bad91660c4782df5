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
    """Return the KL estimate -d of each token and its derivative in logp, which is 1.

    d = ref_logp - logp. The estimate is unbiased, but its expected gradient as a loss is 0
    (Schulman 2020).

    logp       log-prob of the sampled token under the policy
    old_logp   not used: all estimators have the same arguments
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
    """
    d = ref_logp - logp
    return -d, 1.0


def k2(logp, old_logp, ref_logp):
    """Return the KL estimate d^2 / 2 of each token and its derivative in logp, which is -d.

    d = ref_logp - logp. On samples of the policy its expected gradient is the gradient of
    KL(policy || reference).

    logp       log-prob of the sampled token under the policy
    old_logp   not used: all estimators have the same arguments
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
    """
    d = ref_logp - logp
    return 0.5 * d * d, -d


def k3(logp, old_logp, ref_logp):
    """Return the KL estimate e^d - d - 1 of each token and its derivative in logp, 1 - e^d.

    d = ref_logp - logp. The estimate is at least 0. It is the estimator of GRPO (arXiv 2402.03300,
    eq. 4). In both results e^d is exp(min(d, 60)), so that it stays finite in fp32.

    logp       log-prob of the sampled token under the policy
    old_logp   not used: all estimators have the same arguments
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
    """
    d = ref_logp - logp
    e = bounded_exp(d)
    return e - d - 1.0, 1.0 - e


def absolute(logp, old_logp, ref_logp):
    """Return |d| of each token and its derivative in logp, which is -sign(d), and 0 at d = 0.

    d = ref_logp - logp.

    logp       log-prob of the sampled token under the policy
    old_logp   not used: all estimators have the same arguments
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
    """
    d = ref_logp - logp
    slope_unless_positive = ops.where(d < 0.0, 1.0, 0.0)
    value = ops.abs(d)
    slope = ops.where(d > 0.0, -1.0, slope_unless_positive)
    return value, slope


def distillation(logp, old_logp, ref_logp):
    """Return the on-policy distillation loss of each token, as in prime-rl, and its derivative.

    The derivative is with respect to logp.

        value      = -sg(d) r [p - p_old >= -0.2] + 1e-3 (log r)^2
        derivative = -sg(d) r [p - p_old >= -0.2] + 2e-3 log r

    d = ref_logp - logp, p = exp(logp), p_old = exp(old_logp) and r = p / p_old. sg stops the
    gradient, and [...] is 1 if the condition holds, otherwise 0. So a token whose probability has
    dropped by more than 0.2 has the quadratic term only. The factor r is exp(min(log r, 60)), so
    that it stays finite in fp32.

    The value is not a KL estimate, but it is used in place of one, because it needs the same three
    log-probs.

    logp       log-prob of the sampled token under the policy
    old_logp   log-prob of the token at the start of the update
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
    """
    log_ratio = logp - old_logp
    ratio = bounded_exp(log_ratio)
    has_not_dropped = ops.exp(logp) - ops.exp(old_logp) >= -0.2
    distillation_loss = ops.where(has_not_dropped, -(ref_logp - logp) * ratio, 0.0)
    value = distillation_loss + 1e-3 * log_ratio * log_ratio
    # d ratio / d logp = ratio, so distillation_loss is also its own derivative.
    slope = distillation_loss + 2e-3 * log_ratio
    return value, slope


def log_gap(logp, old_logp, ref_logp):
    """Return d = ref_logp - logp of each token and its derivative in logp, which is -1.

    Minimising d raises logp.

    logp       log-prob of the sampled token under the policy
    old_logp   not used: all estimators have the same arguments
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
    """
    return ref_logp - logp, -1.0


def sdar_gate(logp, old_logp, ref_logp):
    """Return the weight sigmoid(5 d) of each token, as in SDAR (arXiv 2605.15155).

    d = ref_logp - logp. The weight is near 1 if the reference gives the token a much larger
    probability than the policy does, and near 0 in the opposite case.

    logp       log-prob of the sampled token under the policy
    old_logp   not used: all estimators have the same arguments
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
    """
    return ops.sigmoid(5.0 * (ref_logp - logp))


@dataclass(frozen=True)
class DetachedWeight(Checked):
    """A KL estimator multiplied by a weight that has no gradient.

        value   sg(weight) * k
        slope   sg(weight) * dk / d logp

    k is the estimate, and sg(weight) is the weight as a constant for the gradient. The slope is the
    derivative of the value in logp.

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
        """Return the weighted estimate of each token and its derivative in logp.

        The weight counts as a constant, so both results of the estimator are multiplied by it.

        logp       log-prob of the sampled token under the policy
        old_logp   log-prob of the token at the start of the update
        ref_logp   log-prob of the token under the reference

        All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place
        of tensors: objects that record the operations on them.
        """
        value, slope = self.estimator(logp, old_logp, ref_logp)
        weight = self.weight(logp, old_logp, ref_logp)
        return weight * value, weight * slope

    def with_weight_at(self, fixed_logp: torch.Tensor) -> Callable[..., Any]:
        """Return this estimator with its weight computed at `fixed_logp` instead of at logp.

        The slope treats the weight as a constant, but autograd would differentiate it. With
        log-probs that do not change, it is a constant for autograd too, so that the slope can be
        compared with autograd.

        fixed_logp   float [num_tokens], the log-probs at which the weight is computed

        Return a function (logp, old_logp, ref_logp) -> (value, slope), [num_tokens] each.
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
    """Return k + k' = -d + 1 of each token, for the KL estimate k = -d of the function `k1`.

    d = ref_logp - logp, and k' = dk / d logp = 1.

    logp       log-prob of the sampled token under the policy
    old_logp   not used: all estimators have the same arguments
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
    """
    return 1.0 - (ref_logp - logp)


def k2_value_plus_slope(logp, old_logp, ref_logp):
    """Return k + k' = d^2 / 2 - d of each token, for the KL estimate k = d^2 / 2 of `k2`.

    d = ref_logp - logp, and k' = dk / d logp = -d.

    logp       log-prob of the sampled token under the policy
    old_logp   not used: all estimators have the same arguments
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
    """
    d = ref_logp - logp
    return 0.5 * d * d - d


def k3_value_plus_slope(logp, old_logp, ref_logp):
    """Return k + k' = -d of each token, for the KL estimate k = e^d - d - 1 of the function `k3`.

    d = ref_logp - logp, and k' = dk / d logp = 1 - e^d. If k and k' were added, their e^d would
    cancel only up to rounding errors.

    logp       log-prob of the sampled token under the policy
    old_logp   not used: all estimators have the same arguments
    ref_logp   log-prob of the token under the reference

    All are fp32 [num_tokens]. For the kernels the function is called once with symbols in place of
    tensors: objects that record the operations on them.
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
    """The weighted KL estimate of each token and its derivatives.

    Each field is fp32 [num_tokens], or a symbol while the formula is traced for the kernels.

    The value is weight * k, where k is the estimate. If the weight is the ratio, it depends on the
    log-prob of the token, or at level "sequence" on the log-probs of its whole sequence. So the
    derivative through the ratio has a separate field.

    value                weight * k
    grad_fixed_ratio     weight * dk / d logp, the derivative in logp if the weight is a constant
    grad_through_ratio   d value / d (log of the ratio); 0 if the weight is a constant
    grad_both            the sum of the two derivatives, computed without cancellation. It is
                         d value / d logp if log_ratio = logp - old_logp.
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
    """Return the KL estimate of each token times its weight, and the derivatives of this product.

    The estimator returns k, an estimate of the KL between policy and reference, and its derivative
    k' = dk / d logp. The weight of k is 1 or the ratio r = exp(log_ratio) of the token:

        weighting          value   grad_fixed_ratio   grad_through_ratio
        "none"             k       k'                 0
        "detached-ratio"   r k     r k'               0, because r counts as a constant
        "ratio"            r k     r k'               r k, because d r / d log_ratio = r
        "score"            k       k'                 k, as "ratio" with r = 1

    grad_fixed_ratio is the derivative in logp while r is fixed. grad_through_ratio is the
    derivative in log_ratio. grad_both is their sum.

    Outside of the clamps all derivatives are 0. So that the results stay finite, a log-prob below
    -1e4 counts as -1e4 (LOWEST_LOGP), r is exp(min(log_ratio, 60)), and products with r are clamped
    to [-1e30, 1e30]. A NaN among logp and ref_logp makes all results NaN.

    logp               log-prob of each token under the policy
    old_logp           log-prob of each token at the start of the update
    ref_logp           log-prob of each token under the reference
    log_ratio          log of the ratio r of each token
    clamps             (bound of |ref_logp - logp|, bound of |k|), two numbers; None: no clamps
    estimator          function (logp, old_logp, ref_logp) -> (k, k')
    value_plus_slope   function (logp, old_logp, ref_logp) -> k + k', in which no digits cancel;
                       None: add the two results of `estimator`
    weighting          "none", "detached-ratio", "ratio" or "score"
    straight_through   True: replace k' by logp - ref_logp, the derivative of the estimator
                       (ref_logp - logp)^2 / 2. As in verl, the clamps do not make it 0.

    The first four are fp32 [num_tokens]. For the kernels the function is called once with symbols
    in place of tensors: objects that record the operations on them.

    Return `KlTerms`: value, grad_fixed_ratio, grad_through_ratio and grad_both of each token.
    """
    # With a log-prob of -inf, the distance d would be infinite or NaN.
    logp = logp.clamp(min=LOWEST_LOGP)
    ref_logp = ref_logp.clamp(min=LOWEST_LOGP)
    d = ref_logp - logp
    if clamps is not None:
        # Clamp d by moving ref_logp, because the estimator takes log-probs.
        max_distance, max_value = clamps
        is_near = ops.abs(d) <= max_distance
        clamped_ref_logp = logp + d.clamp(-max_distance, max_distance)
        ref_logp = ops.where(is_near, ref_logp, clamped_ref_logp)
    # NaN if logp or ref_logp is NaN. Add it to results, because the comparisons in the estimator
    # and with the clamps would hide the NaN.
    nan_or_zero = d * 0.0
    value, slope = estimator(logp, old_logp, ref_logp)
    value = value + nan_or_zero
    # While the ratio is 1, the derivative of ratio * value in the log of the ratio is the value.
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
        # Value and derivatives all contain the ratio as a factor.
        ratio = bounded_exp(log_ratio)
        value = finite(ratio * value)
        slope = finite(ratio * slope)
        grad_through_ratio = finite(ratio * grad_through_ratio)
        grad_both = finite(ratio * grad_both)
    slope = slope + nan_or_zero
    if weighting in ("none", "detached-ratio"):  # the weight is a constant, without derivative
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
        if self.clamp_log == math.inf and self.clamp == math.inf:
            return None
        return (float(self.clamp_log), float(self.clamp))

    @property
    def formula(self) -> dict[str, Any]:
        """The arguments of the function `kl_terms` that a compiled formula has as constants.

        They are its keyword arguments `estimator`, `value_plus_slope`, `weighting` and
        `straight_through`. The clamps are not among them: a compiled formula receives them at each
        call, so that other clamps need no compilation.
        """
        return {
            "estimator": self.function,
            "value_plus_slope": VALUE_PLUS_SLOPE.get(self.function),
            "weighting": self.weighting,
            "straight_through": self.straight_through,
        }


def as_kl(kl: str | Kl | Callable[..., Any]) -> Kl:
    """Convert the argument `Objective(kl=)` to a `Kl`.

    "k3"              Kl("k3"), and so for the names of the other estimators
    "k3+"             Kl("k3", straight_through=True)
    a function        Kl(function)
    a `Kl`            itself
    anything else     raises ValueError
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
    """Return " Did you mean ...?" for an unknown KL estimator, or "" if nothing similar exists.

    For the direction of a divergence of whole distributions, such as "reverse", the suggestion is
    `Exact`. For another name it is the estimator with the most similar name.

    name   what was passed as the estimator; may be no string, which has no suggestion
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
    log-probs of one token. logp is between -5 and 0. old_logp and ref_logp differ from logp by up
    to 3, and at every fourth point by up to 20. A point without a derivative (a kink) has
    probability 0.

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
        """Return (value, slope) of the estimator at each point, in the dtype of moved_logp.

        moved_logp   fp64 or fp32 [num_points], the log-probs under the policy, in place of logp
        """
        dtype = moved_logp.dtype
        moved_ref_logp = ref_logp.to(dtype)
        if detached:
            # ref_logp moves along, so that d = ref_logp - logp is a constant for autograd.
            moved_ref_logp = moved_logp + ref_distance.to(dtype)
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
