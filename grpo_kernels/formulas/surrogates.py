"""Surrogates: the policy term of the loss of a token, and its derivative.

Notation: logp and old_logp are the log-probs of the sampled token under the policy now and at the
start of the update, x = logp - old_logp is the log-ratio, r = exp(x) the ratio and A the advantage.
sg stops the gradient. The slope is d loss / d logp.

A surrogate function is a function (logp, old_logp, advantage, params) -> (loss, slope) of a token,
fp32. params are the fields of its class, in their order. The function is written in arithmetic and
the functions of `ops`, which work on tensors and on the symbols with which a formula is traced for
the fused kernels. To write your own, see `Custom`.

`bounded_exp(x)` is exp(min(x, 60)), so that r stays finite in fp32. Its derivative beyond the bound
would be 0, but the formulas use r as d r / d logp there too, so that the token keeps a gradient.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..checks import LARGEST, SMALLEST, Checked, require
from .kl import absolute
from .ops import (
    ComparisonPoints,
    bounded_exp,
    by_autograd,
    check_returned,
    check_slope,
    ops,
    random_log_probs,
    refuse_overflow,
)

# ---- formulas: (logp, old_logp, advantage, params) -> (loss, slope)


def clip(logp, old_logp, advantage, params):
    """Return the clipped PPO loss of each token, and its slope d loss / d logp. See `Clip`.

        loss  = -min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A)
        slope = -r A where the loss is -r A, otherwise 0

    r = exp(min(logp - old_logp, 60)). The bound of 60 keeps r finite in fp32. delta bounds the loss
    of tokens with a negative advantage, whose ratio the clip does not bound from above (dual clip).

    logp        log-prob of the sampled token under the policy now
    old_logp    log-prob of the token at the start of the update
    advantage   A of the token
    params      (eps_low, eps_high, delta), three numbers

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    eps_low = params[0]
    eps_high = params[1]
    delta = params[2]
    low = 1.0 - eps_low
    high = 1.0 + eps_high
    r = bounded_exp(logp - old_logp)
    unclipped = ops.minimum(r, delta) * advantage
    clipped = r.clamp(low, high) * advantage
    # Inside means that the loss is -r A. A ratio on a bound counts as inside, as it does for
    # autograd.
    is_inside_if_positive = r <= ops.minimum(delta, high)
    is_inside_if_negative = (r >= low) & (r <= ops.maximum(delta, high))
    is_inside = ops.where(advantage > 0.0, is_inside_if_positive, is_inside_if_negative)
    loss = -ops.minimum(unclipped, clipped)
    # d r / d logp = r, so -r A is also the derivative of -r A. Outside, the loss is a constant.
    slope = ops.where(is_inside, loss, 0.0)
    return loss, slope


def cispo(logp, old_logp, advantage, params):
    """Return the CISPO loss of each token, and its slope d loss / d logp. See `Cispo`.

        loss  = -w A logp
        slope = -w A,   w = clip(r, low, cap), a constant for the gradient

    r = exp(min(logp - old_logp, 60)). The bound of 60 keeps r finite in fp32.

    logp        log-prob of the sampled token under the policy now
    old_logp    log-prob of the token at the start of the update
    advantage   A of the token
    params      (cap, low), two numbers

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    cap = params[0]
    low = params[1]
    r = bounded_exp(logp - old_logp)
    weight = r.clamp(low, cap) * advantage
    return weighted_nll(weight, logp)


def policy_gradient(logp, old_logp, advantage, params):
    """Return the REINFORCE loss -A logp of each token, and its slope d loss / d logp = -A.

    The loss of a token with A = 0 is 0, even if logp is -inf. See `PolicyGradient`.

    logp        log-prob of the sampled token under the policy now
    old_logp    not used: all surrogates have the same arguments
    advantage   A of the token
    params      not used either

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    return weighted_nll(advantage, logp)


def weighted_nll(weight, logp):
    """Return the loss -weight * logp of each token, and its slope d loss / d logp = -weight.

    The weight counts as a constant. If it is 0 the loss is 0, even if logp is -inf.

    weight   fp32 [num_tokens], for example an advantage
    logp     fp32 [num_tokens], log-prob of the sampled token under the policy

    For the kernels the function is called once with symbols in place of both tensors: objects that
    record the operations on them.
    """
    # 0 * -inf would be NaN.
    return ops.where(weight == 0.0, 0.0, -weight * logp), -weight


def no_policy_term(logp, old_logp, advantage, params):
    """Return the loss 0 and the slope 0 of each token, in the shape of `advantage`.

    It is the surrogate of an objective without a policy term, see `NoPolicyTerm`. All surrogates
    have the same four arguments. This one uses only the shape of `advantage`, [num_tokens].
    """
    zero = advantage * 0.0  # a 0 for each token; torch.zeros does not exist in the kernels
    return zero, zero


def importance_sampling(logp, old_logp, advantage, params):
    """Return the loss -r A of each token, and its slope d loss / d logp, which is -r A too.

    Loss and slope are equal, because d r / d logp = r. See `ImportanceSampling`.

    r = exp(min(logp - old_logp, 60)). The bound of 60 keeps r finite in fp32. Beyond the bound the
    slope stays -r A instead of 0, so that the token keeps a gradient.

    logp        log-prob of the sampled token under the policy now
    old_logp    log-prob of the token at the start of the update
    advantage   A of the token
    params      not used: all surrogates have the same arguments

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    loss = -bounded_exp(logp - old_logp) * advantage
    return loss, loss


def sapo(logp, old_logp, advantage, params):
    """Return the SAPO loss of each token, and its slope d loss / d logp. See `Sapo`.

        loss  = -(4 / tau) g A,       g = sigmoid(tau (r - 1))
        slope = -4 g (1 - g) r A,     because d g / d logp = tau g (1 - g) r

    r = exp(min(logp - old_logp, 60)). The bound of 60 keeps r finite in fp32. Beyond the bound the
    gate g rounds to 1, so the slope is 0 there.

    logp        log-prob of the sampled token under the policy now
    old_logp    log-prob of the token at the start of the update
    advantage   A of the token
    params      (tau for A > 0, tau for A <= 0), two numbers

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    tau_pos = params[0]
    tau_neg = params[1]
    tau = ops.where(advantage > 0.0, tau_pos, tau_neg)
    r = bounded_exp(logp - old_logp)
    gate = ops.sigmoid(tau * (r - 1.0))
    # 1 - sigmoid(x) = sigmoid(-x). The subtraction 1.0 - gate would cancel digits.
    one_minus_gate = ops.sigmoid(tau * (1.0 - r))
    loss = -4.0 / tau * gate * advantage
    slope = -4.0 * gate * one_minus_gate * r * advantage
    return loss, slope


def vespo(logp, old_logp, advantage, params):
    """Return the VESPO loss of each token, and its slope d loss / d logp. See `Vespo`.

        loss  = -phi A logp
        slope = -phi A,   phi = exp(lambda + k log w - lambda w), a constant for the gradient

    w is the ratio of the whole sequence: the caller passes an old_logp for which logp - old_logp is
    the log-ratio of the sequence. log w is clamped to [log(1e-8), 20], and the exponent of phi is
    at most 60, so that both stay finite in fp32.

    logp        log-prob of the sampled token under the policy now
    old_logp    log-prob of the token at the start of the update
    advantage   A of the token
    params      (k and lambda for A >= 0, k and lambda for A < 0), four numbers

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    k_pos = params[0]
    lambda_pos = params[1]
    k_neg = params[2]
    lambda_neg = params[3]
    k = ops.where(advantage >= 0.0, k_pos, k_neg)
    # The lambda of the formula, which is a keyword of Python.
    rate = ops.where(advantage >= 0.0, lambda_pos, lambda_neg)
    log_w = (logp - old_logp).clamp(-18.420680743952367, 20.0)  # the lower bound is log(1e-8)
    phi = bounded_exp(rate + k * log_w - rate * ops.exp(log_w))
    return weighted_nll(phi * advantage, logp)


def dro(logp, old_logp, advantage, params):
    """Return the DRO loss of each token, and its slope d loss / d logp. See `Dro`.

        loss  = -A logp + beta x^2 / 2,   x = logp - old_logp
        slope = -A + beta x

    logp        log-prob of the sampled token under the policy now
    old_logp    log-prob of the token at the start of the update
    advantage   A of the token
    params      (beta,), one number

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    beta = params[0]
    x = logp - old_logp
    loss = -advantage * logp + 0.5 * beta * x * x
    slope = beta * x - advantage
    return loss, slope


def regression(logp, old_logp, advantage, params):
    """Return the squared error of a regression of beta x onto A, and its slope. See `A2po`.

        loss  = (beta x - A)^2,   x = logp - old_logp
        slope = 2 beta (beta x - A)                     (d loss / d logp)

    logp        log-prob of the sampled token under the policy now
    old_logp    log-prob of the token at the start of the update
    advantage   A of the token
    params      (beta,), one number

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    beta = params[0]
    residual = beta * (logp - old_logp) - advantage
    loss = residual * residual
    slope = 2.0 * beta * residual
    return loss, slope


# ---- surrogates with their parameters, as users name them

#: The ranges of the fields of a surrogate that clips the ratio to [1 - eps_low, 1 + eps_high].
CLIP_WIDTHS = (
    ("eps_low", "the lower clip width is a number in [0, 1].", 0, 1),
    ("eps_high", "the upper clip width is a finite number >= 0.", 0, LARGEST),
)
#: The error message for the field `low` of a surrogate that clips the ratio to [low, cap].
LOW = "the lower bound is a ratio in [0, cap]."
#: The range of the field `share` of a surrogate that selects a share of the tokens.
SHARE = ("share", "the share of tokens is in [0, 1].", 0, 1)

LEVELS = ("token", "sequence", "sequence-token", "sequence-sum")


class Surrogate(Checked):
    """A surrogate function with its parameters. Subclasses are frozen dataclasses of floats.

    The class attributes tell an `Objective` how the surrogate may be used. `function` is the
    surrogate function (logp, old_logp, advantage, params) -> (loss, slope).
    """

    function: Callable[..., Any]
    #: The values of `Objective.level` that the surrogate is defined for.
    levels: tuple[str, ...] = LEVELS
    #: True: the ratio is a constant weight, and the gradient flows through logp itself (CISPO). At
    #: sequence levels the loss of a token then has a gradient at this token alone. False: the
    #: gradient flows through the ratio, at sequence levels to all tokens of the sequence.
    detached_ratio: bool = False
    #: True: a token with advantage 0 has loss 0 and slope 0 whatever its ratio is, so a kernel may
    #: skip its logits.
    zero_at_zero_advantage: bool = True
    #: True: the weights of a batch are multiplied into the ratio of the sequence instead of the
    #: loss (VESPO).
    absorbs_weights: bool = False
    #: True: `function` may use logp in other ways than in logp - old_logp. An objective then
    #: refuses log_ratio_bounds, unless the ratio is detached.
    reads_logp: bool = False
    #: True: the surrogate treats some tokens differently. `select` marks them, for which it needs
    #: the log-probs of the whole batch.
    selects: bool = False

    @property
    def slope_is_by_autograd(self) -> bool:
        """Whether `function` returns the loss alone, so that autograd computes the slope.

        The slope is d loss / d logp. If autograd computes it, no kernel can run the function. It
        runs in torch, between two passes over the logits: the first computes the log-probs, the
        second the gradient of the logits. The result is False unless a subclass overrides it.
        """
        return False

    @property
    def formula(self) -> Callable[..., tuple[Any, Any]]:
        """The function (logp, old_logp, advantage, params) -> (loss, slope) of each token.

        The slope is d loss / d logp. The result is `function`, unless a subclass overrides this
        property.
        """
        return self.function

    @property
    def params(self) -> tuple[float, ...]:
        """The last argument of `function`: all fields of the class as floats, in their order.

        Kernel code that is generated from `function` receives them at each call, so nothing is
        compiled again if a clip width changes. If the surrogate treats selected tokens differently
        (`selects`), the caller appends the result of `select` to them.
        """
        return tuple(float(getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """(low, high): the metrics count a ratio outside of these bounds as clipped.

        The default, (0, inf), counts none. The method `clipped` uses the bounds.
        """
        return (0.0, math.inf)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens count as clipped at the lower and at the upper bound of the ratio.

        A token is clipped at the lower bound if its ratio is below the bound and its advantage is
        below 0, and at the upper bound if its ratio is above the bound and its advantage is above
        0. The bounds are `ratio_bounds`.

        ratio        float [num_tokens], exp(logp - old_logp) of each token
        advantages   float [num_tokens]

        Return (is_clipped_low, is_clipped_high), bool [num_tokens] each.
        """
        low, high = self.ratio_bounds
        is_clipped_low = (ratio < low) & (advantages < 0)
        is_clipped_high = (ratio > high) & (advantages > 0)
        return is_clipped_low, is_clipped_high

    def clip_log_ratios(self, x: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the clipped log-ratio f(x) of each token and its derivative f'(x).

        At other levels than "token", the log-ratio of a sequence is the mean or the sum of f(x)
        over its tokens. Here f is the identity. A subclass that clips the log-ratios of tokens
        overrides this method.

        x            fp32 [num_tokens], log-ratio logp - old_logp of each token
        advantages   fp32 [num_tokens]

        Return (f(x), f'(x)), fp32 [num_tokens] each. f'(x) may be one number for all tokens.
        """
        return x, 1.0

    def select(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, trained: Tensor
    ) -> Tensor:
        """Return 1 for the tokens that the surrogate treats differently, otherwise 0.

        The caller passes the result, fp32 [num_tokens], to the surrogate function as the last of
        its params. A subclass with `selects = True` must define this method. It is not called for
        others.

        logps        fp32 [num_tokens], log-prob of each token of the batch under the policy
        old_logps    fp32 [num_tokens], log-prob of each token at the start of the update
        advantages   fp32 [num_tokens]
        trained      bool [num_tokens], the loss mask
        """
        raise NotImplementedError

    def __call__(
        self, logp: Tensor, old_logp: Tensor, advantage: Tensor, *selected: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each token and its slope d loss / d logp, [num_tokens] each.

        logp        float [num_tokens], log-prob of the sampled token under the policy
        old_logp    float [num_tokens], log-prob of the token at the start of the update
        advantage   float [num_tokens]
        selected    the result of the method `select`, if the surrogate has `selects = True`;
                    otherwise nothing
        """
        return self.formula(logp, old_logp, advantage, (*self.params, *selected))


@dataclass(frozen=True)
class Clip(Surrogate):
    """The clipped surrogate of PPO and GRPO, with separate clip widths.

        loss = -min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A)

    eps_low, eps_high   clip widths (PPO, arXiv 1707.06347 eq. 7). "Clip-higher" is eps_high >
                        eps_low (DAPO, arXiv 2503.14476).
    delta               two-sided bound above 1, which caps the loss for A < 0 (INTELLECT-2, arXiv
                        2505.07291). For delta >= 1 + eps_high it is the dual clip of arXiv
                        1912.09729 with c = delta. math.inf: no such bound.

    Raises ValueError naming the field that is wrong.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float = math.inf
    function = staticmethod(clip)
    ranges = (
        *CLIP_WIDTHS,
        (
            "delta",
            "the two-sided bound is above 1 (math.inf switches it off).",
            math.nextafter(1.0, 2.0),
        ),
    )

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """(1 - eps_low, 1 + eps_high): the metrics count a ratio outside of them as clipped."""
        return (1.0 - self.eps_low, 1.0 + self.eps_high)


@dataclass(frozen=True)
class Cispo(Surrogate):
    """The surrogate of CISPO (MiniMax-M1, arXiv 2506.13585 eq. 4).

        loss = -sg(clip(r, low, cap)) A logp

    The clipped ratio is a constant weight, so every token keeps a gradient.

    cap   upper bound of the ratio itself, not an offset from 1 (TRL passes it as `epsilon_high`).
          5 is the value of ScaleRL, arXiv 2510.13786.
    low   lower bound of the ratio; 0: none

    Raises ValueError naming the field that is wrong.
    """

    cap: float = 5.0
    low: float = 0.0
    function = staticmethod(cispo)
    detached_ratio = True
    ranges = (
        ("cap", "the cap is an absolute ratio above 0, for example 5.0.", SMALLEST),
        ("low", LOW, 0),
    )

    def __post_init__(self) -> None:
        """Raise ValueError unless `cap` is above 0 and `low` is in [0, cap]."""
        super().__post_init__()
        require(self.low <= self.cap, "low", self.low, LOW)

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """(low, cap): the metrics count a ratio outside of these bounds as clipped."""
        return (self.low, self.cap)


@dataclass(frozen=True)
class PolicyGradient(Surrogate):
    """The surrogate of REINFORCE (Williams 1992; GPG, arXiv 2504.02546).

        loss = -A logp

    With A = 1 it is the cross-entropy. `old_logps` are not used.
    """

    function = staticmethod(policy_gradient)
    detached_ratio = True


@dataclass(frozen=True)
class NoPolicyTerm(Surrogate):
    """The surrogate 0, for an objective that is a KL, an entropy bonus or `nll_weights` alone.

    Distillation is such an objective. The advantages are not used.
    """

    function = staticmethod(no_policy_term)


@dataclass(frozen=True)
class ImportanceSampling(Surrogate):
    """The ratio without a clip (Tinker's "importance_sampling").

        loss = -r A

    Together with a `filters.TrustRegion` it is the surrogate of DPPO.
    """

    function = staticmethod(importance_sampling)


@dataclass(frozen=True)
class Sapo(Surrogate):
    """The surrogate of SAPO, with a soft gate instead of a clip (arXiv 2511.20347).

        loss = -(4 / tau) sigmoid(tau (r - 1)) A

    At r = 1 the slope is -A.

    tau_pos   tau for A > 0
    tau_neg   tau for A <= 0

    Raises ValueError naming the field that is wrong.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    function = staticmethod(sapo)
    ranges = (
        (
            "tau_pos tau_neg",
            "the temperature of the gate is a finite number above 0.",
            SMALLEST,
            LARGEST,
        ),
    )


@dataclass(frozen=True)
class Vespo(Surrogate):
    """The surrogate of VESPO (arXiv 2602.10693), for level="sequence-sum".

        loss = -phi A logp,   phi = sg(exp(lambda + k log w - lambda w))

    w is the ratio of the whole sequence: log w is the sum over its trained tokens of the log-ratio,
    clamped to [-20, 20], and of the log of the token's weight in the batch. The weights of the
    batch are part of w instead of multiplying the policy term. log w is clamped to [log 1e-8, 20].

    k_pos, lambda_pos   k and lambda for A >= 0
    k_neg, lambda_neg   k and lambda for A < 0

    Raises ValueError naming the field that is wrong.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    function = staticmethod(vespo)
    levels = ("sequence-sum",)
    detached_ratio = True
    absorbs_weights = True
    ranges = (
        ("k_pos k_neg", "the exponent is a finite number >= 0.", 0, LARGEST),
        ("lambda_pos lambda_neg", "the rate is a finite number of at least 1e-4.", 1e-4, LARGEST),
    )

    def clip_log_ratios(self, x: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return x clamped to [-20, 20], and 1 in place of its derivative.

        The derivative is not used, because VESPO's gradient does not flow through the ratio.

        x            fp32 [num_tokens], log-ratio logp - old_logp of each token
        advantages   not used: other surrogates clip by the sign of the advantage

        Return (clamped x, 1.0).
        """
        return x.clamp(-20.0, 20.0), 1.0


@dataclass(frozen=True)
class Gmpo(Surrogate):
    """The surrogate of GMPO (arXiv 2507.20673), for level="sequence".

        loss = -A exp(mean over the sequence of clipped x)

    So the ratio is the geometric mean of the ratios of the tokens. The log-ratio x of a token is
    clipped to at most eps_high for A > 0, and to at least -eps_low for A < 0.

    Raises ValueError naming the field that is wrong.
    """

    eps_low: float = 0.4
    eps_high: float = 0.4
    function = staticmethod(importance_sampling)
    levels = ("sequence",)
    ranges = (("eps_low eps_high", "the clip width in log space is a number >= 0.", 0),)

    def clip_log_ratios(self, x: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the clipped log-ratio f(x) of each token and its derivative f'(x).

            A > 0   f(x) = min(x, eps_high)
            A < 0   f(x) = max(x, -eps_low)
            A = 0   f(x) = 0, because the token has no loss

        The derivative is 1 where f(x) = x and A is not 0, otherwise 0. If x is NaN, f(x) is NaN for
        any A, so that the loss of the sequence is NaN instead of hiding it. Its derivative is 0.

        x            fp32 [num_tokens], log-ratio logp - old_logp of each token
        advantages   fp32 [num_tokens], A of each token

        Return (f(x), f'(x)), fp32 [num_tokens] each.
        """
        has_advantage = advantages != 0
        clipped = torch.where(
            advantages > 0, x.clamp(max=self.eps_high), x.clamp(min=-self.eps_low)
        )
        keeps_value = has_advantage | x.isnan()
        is_inside = keeps_value & (clipped == x)  # False for NaN, which differs from itself
        derivative = is_inside.to(x.dtype)
        return torch.where(keeps_value, clipped, 0.0), derivative

    @property
    def params(self) -> tuple[float, ...]:
        """(): `function` needs no numbers, because `clip_log_ratios` applies the clip widths."""
        return ()


@dataclass(frozen=True)
class Dro(Surrogate):
    """The surrogate of DRO (verl's "dro"), with a quadratic penalty instead of a clip.

        loss = -A logp + beta x^2 / 2,   x = logp - old_logp

    Raises ValueError naming the field that is wrong.
    """

    beta: float = 1.0
    function = staticmethod(dro)
    levels = ("token",)
    zero_at_zero_advantage = False
    reads_logp = True
    ranges = (("beta", "the penalty is a finite number >= 0.", 0, LARGEST),)


@dataclass(frozen=True)
class A2po(Surrogate):
    """The regression of A*-PO onto A = reward - V* (arXiv 2505.20686), for level="sequence-sum".

        loss of a sequence = (beta * sum over its tokens of log(pi / pi_ref) - A)^2

    Pass the reference's log-probs as the batch's old_logps, and reward - V* as its advantages (see
    `a2po_values`). Raises ValueError naming the field that is wrong.
    """

    beta: float = 1e-3
    function = staticmethod(regression)
    levels = ("sequence-sum",)
    zero_at_zero_advantage = False
    ranges = (
        (
            "beta",
            "the temperature of the regression is a finite number above 0.",
            SMALLEST,
            LARGEST,
        ),
    )


# ---- your own


@dataclass(frozen=True)
class Custom(Surrogate):
    """Your own surrogate, which runs in every backend and inside the fused kernels.

        from grpo_kernels.formulas.surrogates import Custom, ops

        def squared(logp, old_logp, advantage, params):
            (beta,) = params
            x = logp - old_logp
            return -advantage * logp + 0.5 * beta * x * x, -advantage + beta * x

        objective = Objective(surrogate=Custom(squared, (0.1,)))

    function         function (logp, old_logp, advantage, params) -> (loss, slope), where the slope
                     is d loss / d logp. `check_surrogate` compares the slope with autograd.
    parameters       tuple of floats, which `function` receives as `params`
    detached_ratio   see `Surrogate`
    zero_at_zero_advantage   see `Surrogate`
    slope            "formula": `function` returns the slope. "autograd", for prototypes: it returns
                     the loss alone, and autograd computes the slope. The formula then runs in torch
                     with every backend, between two passes over the logits.

    Write `function` as if for one token, in arithmetic, comparisons and the names of `ops`, without
    Python branches on values. At sequence levels, unless detached_ratio, logp is the log-ratio of
    the sequence and old_logp is 0, so the formula may use their difference only. With
    slope="autograd" use any operations that torch can differentiate, and detach constants.

    For the C++ and Triton kernels the function is traced: it is called once with symbols in place
    of tensors. It is traced again if a function, a number, a list or a dictionary that it uses has
    changed, and at each call if it uses other objects. A closure or another callable object works
    too. If it cannot be traced, the formula runs in torch with a warning, which at token level
    takes two passes over the logits. Strict mode and backend="triton" raise ValueError instead, at
    every level. Strict mode also compares the traced program with torch before its first use.

    Raises ValueError naming the field that is wrong, or if the function returns something else.
    """

    function: Callable[..., Any]
    parameters: tuple[float, ...] = ()
    detached_ratio: bool = False
    zero_at_zero_advantage: bool = False
    slope: str = "formula"
    reads_logp = True

    def __post_init__(self) -> None:
        """Convert the parameters to floats. Raises ValueError naming the field that is wrong."""
        remedy = "pass (logp, old_logp, advantage, params) -> (loss, slope)."
        require(callable(self.function), "function", self.function, remedy)
        remedy = 'it must be "formula" or "autograd".'
        require(self.slope in ("formula", "autograd"), "slope", self.slope, remedy)
        is_iterable = isinstance(self.parameters, Iterable)
        require(is_iterable, "parameters", self.parameters, "pass a tuple of numbers.")
        object.__setattr__(self, "parameters", tuple(float(p) for p in self.parameters))
        result_names = ("loss",) if self.slope_is_by_autograd else ("loss", "slope")
        remedy = 'or, for a loss alone, pass slope="autograd"'
        check_returned(self.function, result_names, remedy, self.parameters)

    @property
    def slope_is_by_autograd(self) -> bool:
        """Whether `function` returns the loss alone, so that autograd computes d loss / d logp."""
        return self.slope == "autograd"

    @property
    def formula(self) -> Callable[..., tuple[Any, Any]]:
        """The function (logp, old_logp, advantage, params) -> (loss, slope) of each token.

        The slope is d loss / d logp. With slope="autograd", `function` returns the loss alone, and
        autograd adds the slope.
        """
        return self._with_slope if self.slope_is_by_autograd else self.function

    def _with_slope(
        self, logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and d loss / d logp by autograd, [num_tokens] each.

        logp        float [num_tokens], log-prob of the sampled token under the policy
        old_logp    float [num_tokens], log-prob of the token at the start of the update
        advantage   float [num_tokens]
        params      the last argument of `function`
        """

        def loss(logp: Tensor, old_logp: Tensor, advantage: Tensor) -> Tensor:
            """Return the loss of each token.

            `by_autograd` passes copies of the arguments, of which logp requires grad.
            """
            return self.function(logp, old_logp, advantage, params)

        return by_autograd(loss, logp, old_logp, advantage)

    @property
    def params(self) -> tuple[float, ...]:
        """`parameters`, the last argument of `function`."""
        return self.parameters


def check_surrogate(
    surrogate: Surrogate, *, points: int = 4096, tolerance: float = 1e-6, seed: int = 0
) -> None:
    """Check that the slope of a surrogate is the derivative of its loss with respect to logp.

    Both are computed in float64, the derivative by autograd, at random points. A point has a
    log-prob, a ratio between e^-3 and e^3 (at every fourth point between e^-20 and e^20), and an
    advantage, which is 0 at every sixteenth point. A point without a derivative (a kink) has
    probability 0.

    If the surrogate treats the ratio as a constant (detached_ratio=True), the check moves old_logp
    along with logp, so that the ratio is a constant for autograd too.

    surrogate   a `Surrogate`, for example a `Custom`
    points      number of random points
    tolerance   largest allowed |slope - derivative| / (1 + |derivative|)
    seed        seed of the random points

    Raises ValueError
    - with the worst point, if the slope is wrong at a ratio between e^-3 and e^3
    - otherwise with the smallest log-ratio at which loss or slope overflows in fp32
    - otherwise with the worst point, if the slope is wrong at any ratio
    - if the surrogate has zero_at_zero_advantage=True, but its loss or slope is not 0 at advantage
      0
    - if `surrogate` is not a `Surrogate`
    """
    remedy = "pass a Surrogate, Custom(function) for a function of your own."
    require(isinstance(surrogate, Surrogate), "surrogate", surrogate, remedy)
    generator = torch.Generator().manual_seed(seed)
    logp, log_ratio = random_log_probs(points, generator)
    old_logp = logp - log_ratio
    advantage = torch.randn(points, generator=generator, dtype=torch.float64)
    advantage[::16] = 0.0
    is_selected = (torch.rand(points, generator=generator) < 0.5).double()
    # A surrogate that treats selected tokens differently has one more argument.
    selected = (is_selected,) if surrogate.selects else ()
    if surrogate.zero_at_zero_advantage:
        check_zero_at_zero_advantage(surrogate, logp, old_logp, selected)

    def value_and_slope(moved_logp: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss, slope) of the surrogate at each point, in the dtype of moved_logp.

        moved_logp   fp64 or fp32 [num_points], the log-probs under the policy, in place of logp
        """
        dtype = moved_logp.dtype
        moved_old_logp = old_logp.to(dtype)
        if surrogate.detached_ratio:
            moved_old_logp = moved_logp - log_ratio.to(dtype)  # so the ratio stays constant
        last_arguments = [x.to(dtype) for x in selected]
        return surrogate(moved_logp, moved_old_logp, advantage.to(dtype), *last_arguments)

    comparison_points = ComparisonPoints(
        logp=logp,
        distance_name="log-ratio",
        distance=log_ratio,
        other_numbers={"old_logp": old_logp, "advantage": advantage},
    )
    if surrogate.slope_is_by_autograd:  # there is nothing to compare
        refuse_overflow(repr(surrogate), value_and_slope, comparison_points)
    else:
        check_slope(repr(surrogate), value_and_slope, comparison_points, tolerance)


def check_zero_at_zero_advantage(
    surrogate: Surrogate, logp: Tensor, old_logp: Tensor, selected: tuple[Tensor, ...]
) -> None:
    """Raise ValueError unless loss and slope of a surrogate are 0 for tokens with advantage 0.

    A surrogate declares by `zero_at_zero_advantage = True` that they are. Kernels then skip these
    tokens. A NaN passes, because it comes from 0 * infinity, and `check_surrogate` reports that as
    an overflow.

    surrogate   the surrogate that is checked
    logp        fp64 [num_points], random log-probs under the policy
    old_logp    fp64 [num_points], random log-probs at the start of the update
    selected    (x,) if the surrogate treats selected tokens differently, where x, fp64
                [num_points], is 1 for these tokens and 0 for others; otherwise ()
    """
    loss, slope = surrogate(logp, old_logp, torch.zeros_like(logp), *selected)
    for name, value in (("loss", loss), ("slope", slope)):
        if torch.as_tensor(value).nan_to_num(nan=0.0).any():
            raise ValueError(
                f"the {name} of {surrogate!r} is not 0 at advantage 0: set"
                " zero_at_zero_advantage=False."
            )


def check_log_ratio_bounds(bounds: Any, surrogate: Surrogate) -> None:
    """Raise ValueError unless the log-ratio of a surrogate can be clamped to `bounds`.

    Two conditions must hold:
    1. `bounds` is a tuple (low, high) of real numbers with low < 0 < high. So the log-ratio 0 of an
       on-policy token is inside.
    2. The surrogate depends on the ratio alone, or treats the ratio as a constant. A clamped
       log-ratio has no gradient, so outside of the bounds the slope is set to 0. That would be
       wrong for a surrogate that also has a gradient through logp itself, as -A * logp has.

    bounds      the value of `Objective(log_ratio_bounds=)`, of any type
    surrogate   the surrogate of the objective
    """
    is_pair = (
        isinstance(bounds, tuple)
        and len(bounds) == 2
        and all(isinstance(bound, numbers.Real) for bound in bounds)
    )
    contains_zero = is_pair and bounds[0] < 0 < bounds[1]
    remedy = "pass (low, high) with low < 0 < high, for example (-20.0, 20.0), or None."
    require(contains_zero, "log_ratio_bounds", bounds, remedy)
    may_lose_gradient = surrogate.reads_logp and not surrogate.detached_ratio
    remedy = (
        f"{type(surrogate).__name__} may use logp in addition to the ratio, and a clamp would stop"
        " its gradient: leave it None."
    )
    require(not may_lose_gradient, "log_ratio_bounds", bounds, remedy)


# ---- surrogates that treat tokens with a large covariance of log-prob and advantage differently
# (arXiv 2505.22617). The last of params is 1.0 for such a token, a selected one, otherwise 0.0


# ---- formulas


def clip_cov(logp, old_logp, advantage, params):
    """Return the clipped PPO loss of each token and its slope, both 0 for a selected token.

        loss  = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A),   r = exp(logp - old_logp)
        slope = d loss / d logp

    The function `clip` computes both. See `ClipCov`.

    logp        log-prob of the sampled token under the policy now
    old_logp    log-prob of the token at the start of the update
    advantage   A of the token
    params      (eps_low, eps_high, share, low, high, selected): the fields of `ClipCov`, and 1.0
                for a selected token, 0.0 for another. share, low and high are not used.

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    eps_low = params[0]
    eps_high = params[1]
    loss, slope = clip(logp, old_logp, advantage, (eps_low, eps_high, math.inf))
    is_kept = params[-1] == 0.0
    kept_loss = ops.where(is_kept, loss, 0.0)
    kept_slope = ops.where(is_kept, slope, 0.0)
    return kept_loss, kept_slope


def kl_cov(logp, old_logp, advantage, params):
    """Return the KL-Cov loss of each token, and its slope d loss / d logp. See `KlCov`.

        loss  = -r A + coef |x|         for a selected token, x = logp - old_logp
        slope = -r A + coef sign(x)
        loss  = slope = -r A            for another token

    r = exp(min(x, 60)). The bound of 60 keeps r finite in fp32.

    logp        log-prob of the sampled token under the policy now
    old_logp    log-prob of the token at the start of the update
    advantage   A of the token
    params      (coef, share, selected): the fields of `KlCov`, and 1.0 for a selected token, 0.0
                for another. share is not used.

    Log-probs, advantage, loss and slope are fp32 [num_tokens]. For the kernels the function is
    called once with symbols in place of tensors: objects that record the operations on them.
    """
    coef = params[0]
    selected = params[-1]
    # |x| is the KL estimate |ref_logp - logp| with the old policy as the reference.
    distance, distance_slope = absolute(logp, old_logp, ref_logp=old_logp)
    loss, slope = importance_sampling(logp, old_logp, advantage, params)
    weight = coef * selected
    return loss + weight * distance, slope + weight * distance_slope


# ---- selection


def covariance(logps: Tensor, advantages: Tensor, trained: Tensor) -> Tensor:
    """Return (A - mean A) (logp - mean logp) of each trained token, fp64 [num_tokens].

    It is the contribution of the token to the covariance of advantage and log-prob (arXiv
    2505.22617, eq. 9). The means are over the trained tokens of the batch. Other tokens get 0.

    logps        fp32 [num_tokens], log-prob of each token under the policy
    advantages   fp32 [num_tokens], A of each token
    trained      bool [num_tokens], the loss mask
    """
    num_trained = trained.sum().clamp(min=1)
    # Tokens that are not trained add 0 to the sums below.
    trained_logps = torch.where(trained, logps.double(), 0.0)
    trained_advantages = torch.where(trained, advantages.double(), 0.0)
    centered_logps = trained_logps - trained_logps.sum() / num_trained
    centered_advantages = trained_advantages - trained_advantages.sum() / num_trained
    return torch.where(trained, centered_logps * centered_advantages, 0.0)


def _select_lowest(scores: Tensor, eligible: Tensor, share: float, trained: Tensor) -> Tensor:
    """Return 1 for the eligible tokens with the lowest scores, otherwise 0, fp32 [num_tokens].

    share * (number of trained tokens) tokens are selected, rounded down, but at least 1 and at most
    all eligible tokens. This number stays on the device, so the host does not wait for a GPU.

    scores     float [num_tokens]
    eligible   bool [num_tokens], the tokens that may be selected
    share      number in [0, 1]
    trained    bool [num_tokens], the loss mask
    """
    num_selected = (share * trained.sum().double()).floor().clamp(min=1)
    # Sort tokens that are not eligible to the end.
    order = torch.argsort(torch.where(eligible, scores, math.inf), stable=True)
    # The rank of a token is its position in the sorted order.
    positions = torch.arange(order.numel(), device=order.device)
    ranks = torch.zeros_like(order).scatter_(0, order, positions)
    return (eligible & (ranks < num_selected)).float()


@dataclass(frozen=True)
class ClipCov(Surrogate):
    """The surrogate of Clip-Cov: `Clip` without some random tokens (arXiv 2505.22617).

    The tokens are drawn from those that are not clipped and whose covariance of log-prob and
    advantage (see `covariance`) is between `low` and `high`. Their loss is 0. The random choice
    follows torch's global seed.

    eps_low, eps_high   clip widths, see `Clip`
    share               share of the trained tokens to draw, at least one token
    low, high           bounds of the covariance

    Raises ValueError naming the field that is wrong.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    function = staticmethod(clip_cov)
    levels = ("token",)
    selects = True
    ranges = (*CLIP_WIDTHS, SHARE, ("low high", "the band of covariances is low < high."))

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is outside of its range. `low` is below `high`."""
        super().__post_init__()
        remedy = f"the band of covariances is low < high, but low={self.low}."
        require(self.low < self.high, "high", self.high, remedy)

    ratio_bounds = Clip.ratio_bounds

    def select(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, trained: Tensor
    ) -> Tensor:
        """Return 1 for randomly drawn tokens, whose loss becomes 0, otherwise 0, fp32 [num_tokens].

        A token is eligible if it is trained, if its ratio is not clipped, and if its covariance
        (A - mean A) (logp - mean logp) is between the fields `low` and `high`. Of the eligible
        tokens, share * (number of trained tokens) are drawn, at least one. `share` is a field too.

        logps        fp32 [num_tokens], log-prob of each token of the batch under the policy
        old_logps    fp32 [num_tokens], log-prob of each token at the start of the update
        advantages   fp32 [num_tokens]
        trained      bool [num_tokens], the loss mask
        """
        ratio = bounded_exp(logps - old_logps)
        is_clipped_low, is_clipped_high = self.clipped(ratio, advantages)
        cov = covariance(logps, advantages, trained)
        is_in_band = (cov > self.low) & (cov < self.high)
        eligible = trained & ~is_clipped_low & ~is_clipped_high & is_in_band
        # With a random score for each token, the tokens with the lowest scores are a random choice.
        random_scores = torch.rand(logps.shape, device=logps.device)
        return _select_lowest(random_scores, eligible, share=self.share, trained=trained)


@dataclass(frozen=True)
class KlCov(Surrogate):
    """The surrogate of KL-Cov: a KL penalty for tokens with a large covariance (arXiv 2505.22617).

        loss = -r A + coef |x|   for the tokens with the largest covariance
        loss = -r A              for all other tokens

    x = log r. The covariance is between log-prob and advantage (see `covariance`).

    coef    weight of the penalty
    share   share of the trained tokens with the penalty, at least one token

    Raises ValueError naming the field that is wrong.
    """

    coef: float = 1.0
    share: float = 2e-4
    function = staticmethod(kl_cov)
    levels = ("token",)
    zero_at_zero_advantage = False
    selects = True
    ranges = (("coef", "the weight of the penalty is a finite number >= 0.", 0, LARGEST), SHARE)

    def select(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, trained: Tensor
    ) -> Tensor:
        """Return 1 for the tokens with the largest covariance, otherwise 0, fp32 [num_tokens].

        These tokens get the KL penalty. The covariance of a trained token is
        (A - mean A) (logp - mean logp). The number of selected tokens is
        share * (number of trained tokens), at least one, where `share` is a field.

        logps        fp32 [num_tokens], log-prob of each token of the batch under the policy
        old_logps    not used: `select` of other surrogates, such as ClipCov, compares with it
        advantages   fp32 [num_tokens], A of each token
        trained      bool [num_tokens], the loss mask
        """
        cov = covariance(logps, advantages, trained)
        # The largest covariances are the lowest of the negated ones.
        return _select_lowest(-cov, eligible=trained, share=self.share, trained=trained)
