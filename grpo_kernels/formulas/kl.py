"""KL to the reference: estimators, each one plain function, and `Kl`, which says how an estimator
is weighted and clamped.

An estimator is (logp, old_logp, ref_logp) -> (value, slope) of a token, fp32. The slope is d value
/ d logp, and d stands for ref_logp - logp. Only `distillation` uses old_logp, the log-prob at the
start of the update.

The expected gradient of each estimator on samples of the policy: k1 as a loss has none (use it in
rewards, or weighted), k2 has that of KL(policy || reference), k3 that of KL(reference || policy).
Weighted by the ratio or the score, k1 and k3 have that of KL(policy || reference).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import SMALLEST, Checked, nearest, require, require_one_of
from .divergence import DIRECTIONS
from .ops import bounded_exp, check_returned, compare, finite, log_probs, ops

# ---- estimators: (logp, old_logp, ref_logp) -> (value, slope)


def k1(logp, old_logp, ref_logp):
    """-d. Unbiased value, but as a loss its expected gradient is zero (Schulman 2020)."""
    d = ref_logp - logp
    return -d, 1.0


def k2(logp, old_logp, ref_logp):
    """d^2 / 2. On-policy it has the gradient of KL(policy || reference)."""
    d = ref_logp - logp
    return 0.5 * d * d, -d


def k3(logp, old_logp, ref_logp):
    """e^d - d - 1 >= 0, the estimator of GRPO (arXiv 2402.03300, eq.

    4). The exponent is bounded at 60.
    """
    d = ref_logp - logp
    e = bounded_exp(d)
    return e - d - 1.0, 1.0 - e


def absolute(logp, old_logp, ref_logp):
    """|d|, slope -sign(d); 0 at d = 0."""
    d = ref_logp - logp
    return ops.abs(d), ops.where(d > 0.0, -1.0, ops.where(d < 0.0, 1.0, 0.0))


def distillation(logp, old_logp, ref_logp):
    """-sg(d) r [p - q >= -0.2] + 1e-3 (log r)^2: on-policy distillation of the reference, with p, q
    the probabilities under the policy and the one that sampled (prime-rl). Not a KL estimate, but a
    term of the same inputs.
    """
    x = logp - old_logp
    r = bounded_exp(x)
    keep = ops.exp(logp) - ops.exp(old_logp) >= -0.2
    pull = ops.where(keep, -(ref_logp - logp) * r, 0.0)
    return pull + 1e-3 * x * x, pull + 2e-3 * x


def log_gap(logp, old_logp, ref_logp):
    """d, slope -1: minimised, it raises log-probs."""
    return ref_logp - logp, -1.0


def sdar_gate(logp, old_logp, ref_logp):
    """sigmoid(5 d): near 1 where the reference gives the token the larger probability."""
    return ops.sigmoid(5.0 * (ref_logp - logp))


@dataclass(frozen=True)
class DetachedWeight(Checked):
    """An estimator times a weight that has no gradient, where sg stops the gradient: value
    sg(weight) * estimate, slope sg(weight) * slope of the estimate.

        def near_half(logp, old_logp, ref_logp):
            return ops.exp(logp) * (1.0 - ops.exp(logp))

        objective = Objective(beta=0.1, kl=DetachedWeight(near_half, k2))

    weight      (logp, old_logp, ref_logp) -> weight of a token, under the rules of
                `surrogates.Custom`.
    estimator   (logp, old_logp, ref_logp) -> (value, slope): a function of this module or of yours.

    `check_kl` compares the slope of the estimator with its derivative, and none of the weight.
    """

    weight: Callable[..., Any]
    estimator: Callable[..., Any]

    def __post_init__(self) -> None:
        for name in ("weight", "estimator"):
            remedy = "pass a function of (logp, old_logp, ref_logp)."
            require(callable(getattr(self, name)), name, getattr(self, name), remedy)

    def __call__(self, logp: Any, old_logp: Any, ref_logp: Any) -> tuple[Any, Any]:
        value, slope = self.estimator(logp, old_logp, ref_logp)
        weight = self.weight(logp, old_logp, ref_logp)
        return weight * value, weight * slope

    def held_at(self, logp: torch.Tensor) -> Callable[..., Any]:
        """Return the estimator with the weights that it has at these log-probs."""

        def estimator(moved: Any, old_logp: Any, ref_logp: Any) -> tuple[Any, Any]:
            value, slope = self.estimator(moved, old_logp, ref_logp)
            weight = self.weight(logp.to(moved.dtype), old_logp, ref_logp)
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


# ---- value + slope: the slope of a value that is weighted by a ratio of 1, simplified because
# adding the two would cancel


def k1_score(logp, old_logp, ref_logp):
    """Value and slope of `k1`, added."""
    return 1.0 - (ref_logp - logp)


def k2_score(logp, old_logp, ref_logp):
    """Value and slope of `k2`, added."""
    d = ref_logp - logp
    return 0.5 * d * d - d


def k3_score(logp, old_logp, ref_logp):
    """Value and slope of `k3`, added."""
    return -(ref_logp - logp)


SCORES: dict[Callable[..., Any], Callable[..., Any]] = {k1: k1_score, k2: k2_score, k3: k3_score}

WEIGHTINGS = ("none", "ratio", "detached-ratio", "score")


def kl_terms(
    logp, old_logp, ref_logp, log_ratio, clamps, ESTIMATOR, SCORE, WEIGHTING, STRAIGHT_THROUGH
):
    """(value, slope with the ratio held still, slope through the log-ratio, their sum), as `Kl`
    describes.

    log_ratio  that of the weighting. clamps  `Kl.clamps`. ESTIMATOR, SCORE, WEIGHTING,
               STRAIGHT_THROUGH  `Kl.formula`.
    """
    # Where one of the two is -inf, their distance stays finite.
    logp, ref_logp = logp.clamp(min=-1e4), ref_logp.clamp(min=-1e4)
    d = ref_logp - logp
    if clamps is not None:
        near = ops.abs(d) <= clamps[0]
        ref_logp = ops.where(near, ref_logp, logp + d.clamp(-clamps[0], clamps[0]))
    zero = (
        d * 0.0
    )  # NaN of a NaN, which comparisons of the estimator and with the clamps would hide
    value, slope = ESTIMATOR(logp, old_logp, ref_logp)
    value = value + zero
    through, both = value, value + slope if SCORE is None else SCORE(logp, old_logp, ref_logp)
    if clamps is not None:
        inside = near & (ops.abs(value) <= clamps[1])
        value = value.clamp(-clamps[1], clamps[1])
        slope, through, both = (ops.where(inside, x, zero) for x in (slope, through, both))
    if STRAIGHT_THROUGH:
        slope = -d
        both = through - d
    if "ratio" in WEIGHTING:
        r = bounded_exp(log_ratio)
        value, slope, through, both = (finite(r * x) for x in (value, slope, through, both))
    slope = slope + zero
    if WEIGHTING in ("none", "detached-ratio"):
        return value, slope, zero, slope
    return value, slope, through, both


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
        super().__post_init__()
        known = callable(self.estimator) or self.estimator in ESTIMATORS
        remedy = f"it must be one of {', '.join(ESTIMATORS)}, or a function."
        require(known, "estimator", self.estimator, remedy + meant_by(self.estimator))
        if callable(self.estimator):
            remedy = "the estimator and its derivative with respect to logp"
            check_returned(self.estimator, "value and slope", remedy)
        require_one_of("weighting", self.weighting, WEIGHTINGS)
        if self.estimator == "distillation":
            plain = (self.weighting, self.straight_through, self.clamps) == ("none", False, None)
            require(
                plain,
                "estimator",
                self.estimator,
                "it has its own weighting: leave the other fields alone.",
            )

    @property
    def function(self) -> Callable[..., Any]:
        """The estimator itself."""
        return self.estimator if callable(self.estimator) else ESTIMATORS[self.estimator]

    @property
    def clamps(self) -> tuple[float, float] | None:
        """The two bounds; None without any."""
        if self.clamp_log == self.clamp == math.inf:
            return None
        return (float(self.clamp_log), float(self.clamp))

    @property
    def formula(self) -> dict[str, Any]:
        """What `kl_terms` wants to know at compile time."""
        return {
            "ESTIMATOR": self.function,
            "SCORE": SCORES.get(self.function),
            "WEIGHTING": self.weighting,
            "STRAIGHT_THROUGH": self.straight_through,
        }


def as_kl(kl: str | Kl | Callable[..., Any]) -> Kl:
    """`Objective.kl` as a Kl: "k3" stands for Kl("k3"), and "k3+" for its straight-through form."""
    if isinstance(kl, Kl):
        return kl
    if isinstance(kl, str) and kl.endswith("+"):
        return Kl(kl[:-1], straight_through=True)
    known = callable(kl) or (isinstance(kl, str) and kl in ESTIMATORS)
    remedy = f"it must be one of {', '.join(ESTIMATORS)}, a Kl, an Exact or a function."
    require(known, "kl", kl, remedy + meant_by(kl))
    return Kl(kl)


def meant_by(name: object) -> str:
    """Return " Did you mean ...?" for the direction of an exact divergence or a near name of an
    estimator, else "".
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
    """Compare the slope of an estimator (`Objective.kl`, a `Kl` or its function) with autograd's
    derivative of its value, in fp64, at random log-probs that are up to 3 and, one in four, up to
    20 from the others and from the reference's. `points` of them are drawn with `seed`; an error
    above `tolerance` times (1 + the derivative) is refused. The weights, clamps and
    straight-through slope that a `Kl` adds are not checked.

    detached   True: of a formula in which d = ref_logp - logp is a constant weight; ref_logp then
               moves along with logp. Any other weight without a gradient is declared by a
               `DetachedWeight`.

    Raises ValueError as `check_surrogate` does, with d in place of the log-ratio; points on a kink
    have probability 0.
    """
    function, g = as_kl(kl).function, torch.Generator().manual_seed(seed)
    (logp, x), (_, d) = log_probs(points, g), log_probs(points, g)
    old_logp, ref_logp = logp - x, logp + d

    estimator = function.held_at(logp) if isinstance(function, DetachedWeight) else function

    def terms(logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = (old_logp, logp + d.to(logp.dtype) if detached else ref_logp)
        return estimator(logp, *(x.to(logp.dtype) for x in given))

    name = getattr(function, "__qualname__", repr(function))
    at = {"old_logp": old_logp, "ref_logp": ref_logp}
    compare(f"the KL estimator {name}", terms, logp, tolerance, ("ref_logp - logp =", d), at)
