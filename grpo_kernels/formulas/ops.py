"""The functions that a formula may call, in torch and in the kernels.

Under torch (the eager backend, tests) `ops` stands for torch; for the kernels in C++ and Triton a
formula is run once with symbols in place of tensors, see program.py. So each formula of this
package exists once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUMBERS = (int, float)

#: Bound of log-ratios in nats. e^60 = 1.1e26 times any reasonable weight is still finite in fp32.
LOG_RATIO_BOUND = 60.0


class ops:
    """The functions that a formula may call, besides arithmetic and comparisons.

    They work element by element. The result is NaN if an argument is NaN. For slopes: the
    derivative of tanh(x) is 1 - tanh(x) ** 2.
    """

    exp = torch.exp
    log = torch.log
    sqrt = torch.sqrt
    abs = torch.abs
    tanh = torch.tanh
    where = torch.where

    @staticmethod
    def sigmoid(x):
        """Return 1 / (1 + e^-x)."""
        # torch.sigmoid rounds the last elements of a tensor differently: a token's bits would
        # depend on where a block ends.
        return 1.0 / (1.0 + torch.exp(-x))

    @staticmethod
    def minimum(a, b):
        """Return the smaller of a and b, each a tensor or a number of Python."""
        if isinstance(a, NUMBERS) and isinstance(b, NUMBERS):
            return min(a, b)
        if isinstance(a, NUMBERS):
            return torch.clamp(b, max=a)
        if isinstance(b, NUMBERS):
            return torch.clamp(a, max=b)
        return torch.minimum(a, b)

    @staticmethod
    def maximum(a, b):
        """Return the larger of a and b, each a tensor or a number of Python."""
        if isinstance(a, NUMBERS) and isinstance(b, NUMBERS):
            return max(a, b)
        if isinstance(a, NUMBERS):
            return torch.clamp(b, min=a)
        if isinstance(b, NUMBERS):
            return torch.clamp(a, min=b)
        return torch.maximum(a, b)


def bounded_exp(x):
    """Return exp(min(x, LOG_RATIO_BOUND)).

    Formulas use it for ratios. The derivative that they return for a ratio beyond the bound is the
    bounded ratio, not 0, so such a token still has a gradient, which moves it back.
    """
    return ops.exp(x.clamp(max=LOG_RATIO_BOUND))


def finite(x):
    """Return x, clamped to [-1e30, 1e30].

    A product of bounded ratios (`bounded_exp`) may overflow fp32. Clamped, it is finite, and so is
    its product with a weight.
    """
    return x.clamp(-1e30, 1e30)


def times(weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return weight * x, and 0 where the weight is 0 even if x is infinite or NaN.

    weight and x have one shape. A weight of None stands for 1.
    """
    return x if weight is None else (weight * x).masked_fill_(weight == 0, 0.0)


# ---- what a formula has to return, its slope from autograd, and the comparison of both


def check_returned(
    function: Callable[..., Any], returns: str, remedy: str, *last_arguments: Any
) -> None:
    """Raise ValueError unless a formula returns a number for each token.

    The formula is called once, with three tensors [3] and the last arguments. Its first result, the
    loss, must have the shape [3]; its second, the slope, [3] or []; a number of Python passes for
    both. Without this check a tensor [2, n] would pass for a pair (loss, slope).

    returns   what the formula shall return, one or two words joined by " and ", such as "loss" or
              "loss and slope"
    remedy    the end of the error message
    """
    if torch.compiler.is_compiling():
        return
    first = torch.tensor((-1.0, -0.5, -2.0), device="cpu")
    second = torch.tensor((-1.2, -0.5, -1.0), device="cpu")
    third = torch.tensor((1.0, 0.0, -1.0), device="cpu")
    returned = without_branches(function, first, second, third, *last_arguments)
    results = returned if isinstance(returned, tuple) else (returned,)
    is_right = len(results) == len(returns.split(" and "))
    allowed_shapes: Any = ([(3,)], [(3,), ()])
    for result, shapes in zip(results, allowed_shapes, strict=False):
        if isinstance(result, Tensor):
            is_right = is_right and result.shape in shapes
        else:
            is_right = is_right and isinstance(result, NUMBERS)
    if not is_right:
        descriptions = [
            f"a Tensor {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            for x in results
        ]
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(
            f"{name} returned {', '.join(descriptions) or 'nothing'} for tensors of shape [3]:"
            f" return {returns} of each token, {remedy}."
        )


def without_branches(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), with a helpful error for a Python branch on a tensor.

    If the function uses a tensor of several values as a condition of Python, torch raises a
    RuntimeError. It becomes a ValueError that names the line and says what to write in a formula.
    """
    try:
        return function(*arguments)
    except RuntimeError as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        name = getattr(function, "__qualname__", type(function).__name__)
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        raise ValueError(
            f"{name} has a branch on values of tokens (line {line} of {frame.f_code.co_name})."
            " A formula runs for all tokens at once: write ops.where(condition, a, b) instead of if,"
            " conditional expressions, and min or max of Python (ops.minimum, ops.maximum), and &,"
            " | and ~ instead of and, or and not."
        ) from None


def by_autograd(
    function: Callable[..., Tensor], logp: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and d loss / d logp by autograd, in the shape of logp.

    function       (logp, *others) -> loss of each token. The loss of a token must depend on no
                   other token.
    logp, others   tensors of one shape
    """
    with torch.inference_mode(False), torch.enable_grad():
        # Copies, because a graph cannot save a tensor made in inference mode.
        variable = logp.detach().clone().requires_grad_()
        constants = [x.detach().clone() for x in others]
        loss = torch.as_tensor(function(variable, *constants))
        if not loss.requires_grad:  # the loss does not depend on logp
            loss = loss.detach().to(logp.dtype)
            return loss.expand_as(logp), torch.zeros_like(logp)
        total = loss.expand_as(variable).sum()
        (slope,) = torch.autograd.grad(total, variable, materialize_grads=True)
    return loss.detach().expand_as(logp), slope


def random_log_probs(num_points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random log-probs, and how much other log-probs differ from them.

    Return fp64 [num_points] each: log-probs, uniform in [-5, 0], and differences, uniform in
    [-3, 3], at every fourth point in [-20, 20].
    """
    logp = -5.0 * torch.rand(num_points, generator=generator, dtype=torch.float64)
    uniform = torch.rand(num_points, generator=generator, dtype=torch.float64)
    difference = 3.0 * (2.0 * uniform - 1.0)
    difference[1::4] *= 20.0 / 3.0
    return logp, difference


#: Slopes are compared first at points with at most this distance between log-probs.
MODERATE = 3.0

#: A function of log-probs [n] that returns a value and a slope of each, in the dtype of these.
ValueAndSlope = Callable[[Tensor], tuple[Tensor, Tensor]]


class ComparisonPoints(NamedTuple):
    """Random points at which the slope of a formula is compared with its derivative.

    logp            log-prob under the policy, fp64 [num_points]
    distance        difference between another log-prob and logp, fp64 [num_points]
    distance_name   what error messages call the distance
    other_numbers   further numbers of the points, fp64 [num_points] each, for error messages
    """

    logp: Tensor
    distance: Tensor
    distance_name: str
    other_numbers: dict[str, Tensor]

    def describe(self, point: int) -> str:
        """Return the numbers of one point, for example "logp=-1.5, old_logp=-2"."""
        numbers = {"logp": self.logp, **self.other_numbers}
        return ", ".join(f"{name}={float(x[point]):.4g}" for name, x in numbers.items())


def compare(
    formula_name: str, value_and_slope: ValueAndSlope, points: ComparisonPoints, tolerance: float
) -> None:
    """Raise ValueError if the slope of a formula is not the derivative of its value.

    The derivative is that of autograd, with respect to the log-prob under the policy. Three errors
    are looked for in this order, each at all points that it may concern:
    1. a wrong slope, where value and slope are finite and the distance is at most 3 (MODERATE)
    2. an infinite or NaN value or slope (`refuse_overflow`)
    3. a wrong slope at any other point

    formula_name      what error messages call the formula
    value_and_slope   (log-probs [num_points]) -> value and slope at each point, in their dtype
    points            log-probs, and further numbers of the points for messages
    tolerance         largest |slope - derivative| / (1 + |derivative|)
    """
    _, derivative = by_autograd(lambda logp: value_and_slope(logp)[0], points.logp)
    slope = torch.as_tensor(value_and_slope(points.logp)[1]).detach().expand_as(derivative)
    error = (slope - derivative).abs() / (1.0 + derivative.abs())
    error = error.nan_to_num(nan=torch.inf)  # NaN is as wrong as infinity

    is_moderate = points.distance.abs() <= MODERATE
    is_first = is_moderate & is_finite(value_and_slope, points.logp)
    first_error = torch.where(is_first, error, 0.0)
    if first_error.max() > tolerance:
        worst = int(first_error.argmax())
    else:
        refuse_overflow(formula_name, value_and_slope, points)
        worst = int(error.argmax())
    if error[worst] > tolerance:
        raise ValueError(
            f"the slope of {formula_name} is {float(slope[worst]):.6g}, but autograd gives"
            f" {float(derivative[worst]):.6g} at {points.describe(worst)}."
        )


def refuse_overflow(
    formula_name: str, value_and_slope: ValueAndSlope, points: ComparisonPoints
) -> None:
    """Raise ValueError if a value or a slope is infinite or NaN, in fp32 or fp64.

    The message shows the point at the smallest distance. Arguments as in `compare`.
    """
    overflows = ~is_finite(value_and_slope, points.logp)
    if not overflows.any():
        return
    nearest = int(torch.where(overflows, points.distance.abs(), torch.inf).argmin())
    value, slope = value_and_slope(points.logp.float())
    value_there = torch.as_tensor(value).expand_as(points.logp)[nearest]
    slope_there = torch.as_tensor(slope).expand_as(points.logp)[nearest]
    raise ValueError(
        f"{formula_name} overflows at {points.distance_name} {float(points.distance[nearest]):.4g}:"
        f" in float32 its value is {float(value_there):.6g} and its slope {float(slope_there):.6g},"
        f" at {points.describe(nearest)}. Bound what grows there, for example bounded_exp(x) of"
        " grpo_kernels.formulas.ops in place of ops.exp(x), or x.clamp(-20.0, 20.0)."
    )


def is_finite(value_and_slope: ValueAndSlope, logp: Tensor) -> Tensor:
    """Return whether value and slope at each log-prob are finite, bool [num_points].

    They must be finite in fp64 and in fp32, in which the kernels compute them. logp is fp64
    [num_points].
    """
    result = torch.ones_like(logp, dtype=torch.bool)
    for logp_in_dtype in (logp, logp.float()):
        for x in value_and_slope(logp_in_dtype):
            result &= torch.as_tensor(x).isfinite()
    return result
