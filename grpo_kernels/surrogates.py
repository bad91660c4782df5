"""The maths: surrogates and KL estimators, each one plain function that returns a loss and its slope.

Every function here is written with the names that torch and Triton share, taken from `ops`. Under torch (CPU kernels,
the eager backend, the reference) `ops` stands for torch; inside the fused Triton kernel the same source is compiled
with `ops` replaced by `triton.language`. So each formula exists once.

Notation: logp, old_logp, ref_logp are log-probs of the chosen token under the policy, the policy at the start of the
update and the frozen reference; r = exp(logp - old_logp); A the advantage; "slope" = d loss / d logp.

To write your own, see `Custom`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from .checks import LARGEST, SMALLEST, require_number

Tensor = torch.Tensor


class ops:
    """What a formula may call, besides arithmetic and comparisons: element by element, the same in torch and Triton."""

    exp, log, sqrt, abs, sigmoid, where = torch.exp, torch.log, torch.sqrt, torch.abs, torch.sigmoid, torch.where

    @staticmethod
    def minimum(a, b):
        if not isinstance(a, Tensor):  # two parameters
            return min(a, b)
        return torch.minimum(a, b) if isinstance(b, Tensor) else torch.clamp(a, max=b)

    @staticmethod
    def maximum(a, b):
        if not isinstance(a, Tensor):
            return max(a, b)
        return torch.maximum(a, b) if isinstance(b, Tensor) else torch.clamp(a, min=b)


# ---- building blocks


def bounded_exp(x):
    """exp(min(x, 60)): a ratio of e^60 is already lost, and e^60 times any sane weight is still finite in fp32.

    The slopes below keep using the bounded value, so a token beyond the bound is pulled back instead of frozen."""
    return ops.exp(ops.minimum(x, 60.0))


# ---- surrogates: (logp, old_logp, advantage, params) -> (loss, slope)


def clip(logp, old_logp, advantage, params):
    """-min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A). See `Clip`."""
    low = 1.0 - params[0]
    high = 1.0 + params[1]
    delta = params[2]
    r = bounded_exp(logp - old_logp)
    unclipped = ops.minimum(r, delta) * advantage
    clipped = ops.minimum(ops.maximum(r, low), high) * advantage
    # A ratio exactly on a bound counts as inside, as it does for autograd.
    rising = r <= ops.minimum(delta, high)
    falling = (r >= low) & (r <= ops.maximum(delta, high))
    active = ops.where(advantage > 0.0, rising, falling)
    return -ops.minimum(unclipped, clipped), ops.where(active, -r * advantage, 0.0)


def cispo(logp, old_logp, advantage, params):
    """-sg(clip(r, low, cap)) A logp. See `Cispo`."""
    r = bounded_exp(logp - old_logp)
    weight = ops.minimum(ops.maximum(r, params[1]), params[0]) * advantage
    # A token of no weight contributes 0 even where its logp is -inf.
    return ops.where(weight == 0.0, 0.0, -weight * logp), -weight


def policy_gradient(logp, old_logp, advantage, params):
    """-A logp. See `PolicyGradient`."""
    return ops.where(advantage == 0.0, 0.0, -advantage * logp), -advantage


# ---- KL estimators: (logp, old_logp, ref_logp) -> (value, slope). With d = ref_logp - logp:


def k1(logp, old_logp, ref_logp):
    """-d. Unbiased value, but as a loss its expected gradient is zero: use it for rewards and metrics (Schulman 2020)."""
    d = ref_logp - logp
    return -d, 1.0


def k2(logp, old_logp, ref_logp):
    """d^2 / 2. On-policy its gradient is that of KL(policy || reference)."""
    d = ref_logp - logp
    return 0.5 * d * d, -d


def k3(logp, old_logp, ref_logp):
    """e^d - d - 1 >= 0, the estimator of GRPO (arXiv 2402.03300, eq. 4). The exponent is bounded at 60."""
    d = ref_logp - logp
    e = bounded_exp(d)
    return e - d - 1.0, 1.0 - e


KL_ESTIMATORS: dict[str, Callable[..., Any]] = {"k1": k1, "k2": k2, "k3": k3}


# ---- the terms of one token, the same in every backend and inside the fused kernel


def token_terms(
    logp,
    old_logp,
    ref_logp,
    entropy,
    advantage,
    policy_weight,
    token_weight,
    beta,
    entropy_coef,
    SURROGATE,
    PARAMS,
    KL,
    ENTROPY,
):
    """loss_t = policy_weight * surrogate + token_weight * (beta * KL - entropy_coef * entropy), with its slopes.

    Returns (loss, d loss / d logp, d loss / d entropy). KL None leaves out the reference, ENTROPY False the bonus."""
    loss, slope = SURROGATE(logp, old_logp, advantage, PARAMS)
    # A token that its weight takes out is out whatever the ratio is, NaN included.
    loss = ops.where(policy_weight == 0.0, 0.0, policy_weight * loss)
    d_logp = ops.where(policy_weight == 0.0, 0.0, policy_weight * slope)
    d_entropy = token_weight * 0.0
    if KL is not None:
        kl, kl_slope = KL(logp, old_logp, ref_logp)
        loss += beta * token_weight * kl
        d_logp += beta * token_weight * kl_slope
    if ENTROPY:
        loss -= entropy_coef * token_weight * entropy
        d_entropy -= entropy_coef * token_weight
    return loss, d_logp, d_entropy


# ---- surrogates with their parameters, as users name them


class Surrogate:
    """A surrogate function together with its parameters. Subclasses are frozen dataclasses of floats."""

    function: Callable[..., Any]
    #: True: the ratio is a constant weight and the gradient flows through logp itself (CISPO). At sequence level the
    #: slope then stays at its token instead of flowing through the mean log-ratio.
    detached_ratio: bool = False
    #: True: a token with advantage 0 has loss 0 and slope 0 whatever its ratio, so its row need not be looked at.
    zero_at_zero_advantage: bool = True

    @property
    def params(self) -> tuple[float, ...]:
        """What `function` receives as its last argument: runtime floats, so a schedule recompiles nothing."""
        return tuple(float(getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Ratios below the first (A < 0) or above the second (A > 0) count as clipped in the metrics."""
        return (0.0, math.inf)

    def __call__(self, logp: Tensor, old_logp: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Per-token loss and slope, fp32, in the shape of `logp`."""
        return self.function(logp, old_logp, advantage, self.params)


@dataclass(frozen=True)
class Clip(Surrogate):
    """PPO / GRPO clipping with separate bounds: loss = -min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A).

    Sources: PPO arXiv 1707.06347 eq. 7; clip-higher (eps_high > eps_low) DAPO arXiv 2503.14476; the two-sided bound
    `delta`, which caps the loss for A < 0, INTELLECT-2 arXiv 2505.07291. `delta` equals dual clip (arXiv 1912.09729)
    with c = delta for delta >= 1 + eps_high. Infinity switches it off.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float = math.inf
    function = staticmethod(clip)

    def __post_init__(self) -> None:
        require_number("eps_low", self.eps_low, "the lower clip width is a number in [0, 1].", 0, 1)
        require_number("eps_high", self.eps_high, "the upper clip width is a finite number >= 0.", 0, LARGEST)
        require_number(
            "delta", self.delta, "the two-sided bound is above 1 (math.inf switches it off).", math.nextafter(1.0, 2.0)
        )

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        return (1.0 - self.eps_low, 1.0 + self.eps_high)


@dataclass(frozen=True)
class Cispo(Surrogate):
    """CISPO: loss = -sg(clip(r, low, cap)) A logp; the ratio weighs the token, its gradient is never cut.

    `cap` and `low` are absolute bounds of the ratio, not offsets from 1 (TRL passes the cap as `epsilon_high`).
    Sources: MiniMax-M1 arXiv 2506.13585 eq. 4; cap 5 as in ScaleRL arXiv 2510.13786. low = 0 is one-sided.
    """

    cap: float = 5.0
    low: float = 0.0
    function = staticmethod(cispo)
    detached_ratio = True

    def __post_init__(self) -> None:
        require_number("cap", self.cap, "the cap is an absolute ratio above 0, for example 5.0.", SMALLEST, LARGEST)
        require_number("low", self.low, "the lower bound is a ratio in [0, cap].", 0, self.cap)

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        return (self.low, self.cap)


@dataclass(frozen=True)
class PolicyGradient(Surrogate):
    """REINFORCE: loss = -A logp, no ratio (Williams 1992; GPG arXiv 2504.02546)."""

    function = staticmethod(policy_gradient)
    detached_ratio = True


@dataclass(frozen=True)
class Custom(Surrogate):
    """Your own surrogate, which then runs in every backend and inside the fused Triton kernel.

        from grpo_kernels.surrogates import Custom, ops

        def squared(logp, old_logp, advantage, params):       # a module-level function, params a tuple of floats
            x = logp - old_logp
            return -advantage * logp + 0.5 * params[0] * x * x, -advantage + params[0] * x

        objective = Objective(surrogate=Custom(squared, (0.1,)))

    `function` takes and returns scalars as far as it can tell: arithmetic, comparisons and the names of `ops`, no
    Python branches on values. `check_surrogate` compares the slope with autograd. It must be defined in a file
    (Triton compiles its source) and must not close over local variables.
    """

    function: Callable[..., Any]
    parameters: tuple[float, ...] = ()
    detached_ratio: bool = False
    zero_at_zero_advantage: bool = False

    @property
    def params(self) -> tuple[float, ...]:
        return tuple(float(p) for p in self.parameters)


def check_surrogate(surrogate: Surrogate, *, points: int = 4096, tolerance: float = 1e-6, seed: int = 0) -> None:
    """Compare a surrogate's slope with autograd's derivative of its loss, in fp64, at random log-probs, ratios within
    e^-3 and e^3, and advantages of both signs.

    Meant for surrogates of your own. Where the loss has a detached factor (`detached_ratio=True`: the ratio is a
    constant weight) old_logp moves along with logp, so that the ratio stands still. Raises ValueError naming the worst
    point; points on a kink, where a derivative does not exist, have probability 0.
    """
    g = torch.Generator().manual_seed(seed)
    logp = -5.0 * torch.rand(points, generator=g, dtype=torch.float64)
    x = 3.0 * (2.0 * torch.rand(points, generator=g, dtype=torch.float64) - 1.0)
    advantage = torch.randn(points, generator=g, dtype=torch.float64)
    old_logp = logp - x
    logp.requires_grad_()
    loss, slope = surrogate(logp, logp - x if surrogate.detached_ratio else old_logp, advantage)
    (expected,) = torch.autograd.grad(loss.sum(), logp)
    slope = torch.as_tensor(slope).detach().expand_as(expected)
    error = (slope - expected).abs() / (1.0 + expected.abs())
    worst = int(error.argmax())
    if not error[worst] <= tolerance:  # NaN fails too
        raise ValueError(
            f"the slope of {surrogate!r} is {float(slope[worst]):.6g}, but autograd gives {float(expected[worst]):.6g} at "
            f"logp={float(logp[worst].detach()):.4g}, old_logp={float(old_logp[worst]):.4g}, advantage={float(advantage[worst]):.4g}."
        )
