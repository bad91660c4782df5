"""The functions that a formula may call, and the checks of formulas that users write.

A formula computes a number of each token, such as its loss, in arithmetic, comparisons and `ops`.
On tensors `ops` calls torch. For the kernels in C++ and Triton the same formula is run once on
symbols in place of tensors, see program.py. So each formula of this package is written once.
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

    They work element by element, on tensors and on the symbols that record a formula for the
    kernels. The result is NaN if an argument is NaN. If you need the derivative of ops.tanh(x),
    write 1 - ops.tanh(x) ** 2.
    """

    exp = torch.exp
    log = torch.log
    sqrt = torch.sqrt
    abs = torch.abs
    tanh = torch.tanh
    where = torch.where

    @staticmethod
    def sigmoid(x):
        """Return 1 / (1 + e^-x) of each element.

        x   tensor; or a symbol, which records the operation for the kernels
        """
        # torch.sigmoid rounds the last elements of a tensor, which do not fill a SIMD vector,
        # differently than the others. The result of a token would depend on its position.
        return 1.0 / (1.0 + torch.exp(-x))

    @staticmethod
    def minimum(a, b):
        """Return the smaller of a and b elementwise.

        a, b   a tensor or a Python number each; or a symbol, which records the operation for the
               kernels
        """
        # torch.minimum takes no Python number, and torch.clamp needs a tensor or symbol first.
        if isinstance(a, NUMBERS) and isinstance(b, NUMBERS):
            return min(a, b)
        if isinstance(a, NUMBERS):
            return torch.clamp(b, max=a)
        if isinstance(b, NUMBERS):
            return torch.clamp(a, max=b)
        return torch.minimum(a, b)

    @staticmethod
    def maximum(a, b):
        """Return the larger of a and b elementwise.

        a, b   a tensor or a Python number each; or a symbol, which records the operation for the
               kernels
        """
        # torch.maximum takes no Python number, and torch.clamp needs a tensor or symbol first.
        if isinstance(a, NUMBERS) and isinstance(b, NUMBERS):
            return max(a, b)
        if isinstance(a, NUMBERS):
            return torch.clamp(b, min=a)
        if isinstance(b, NUMBERS):
            return torch.clamp(a, min=b)
        return torch.maximum(a, b)


def bounded_exp(x):
    """Return exp(min(x, 60)): the ratio of a token with the log-ratio x, kept finite.

    e^60 = 1.1e26 times any reasonable weight is still finite in fp32.

    If a formula needs d ratio / d x, use the result of this function again. The true derivative is
    0 for x > 60, where the ratio is constant, and a token without a gradient could not move back.

    x   tensor; or a symbol, which records the operation for the kernels
    """
    return ops.exp(x.clamp(max=LOG_RATIO_BOUND))


def finite(x):
    """Return x clamped to [-1e30, 1e30], NaN where x is NaN.

    A product of two ratios may overflow fp32, although each of them is at most e^60
    (`bounded_exp`). The clamped product is finite, and stays finite if it is multiplied by a
    reasonable weight.

    x   tensor; or a symbol, which records the operation for the kernels
    """
    return x.clamp(-1e30, 1e30)


def times(weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return weight * x, and 0 where the weight is 0, even if x is infinite or NaN there.

    weight   float tensor in the shape of x; None stands for 1, so that x itself is returned
    x        float tensor
    """
    if weight is None:
        return x
    return (weight * x).masked_fill_(weight == 0, 0.0)  # 0 * inf and 0 * NaN are NaN


# ---- checks of a formula that a user writes: what it returns, and its slope against autograd


def check_returned(
    function: Callable[..., Any],
    result_names: tuple[str, ...],
    remedy: str,
    *last_arguments: Any,
) -> None:
    """Raise ValueError unless a user's formula returns results of the right number and shape.

    The results are a value of each token, such as its loss, and usually a slope, the derivative of
    the value in the token's log-prob. The formula is called once, with three tensors [3] and then
    `last_arguments`. The value must have the shape [3], the slope [3] or []. A Python number passes
    for both. Without this check a tensor [2, num_tokens] would pass for a pair (value, slope).

    Does nothing while torch.compile traces.

    function         the formula: (tensor, tensor, tensor, *last_arguments) -> its results
    result_names     one name for each expected result, for the error message: ("loss", "slope"), or
                     ("loss",) if the formula returns no slope
    remedy           the end of the error message
    last_arguments   further arguments of the formula, such as its clip widths
    """
    if torch.compiler.is_compiling():
        return
    first = torch.tensor((-1.0, -0.5, -2.0), device="cpu")
    second = torch.tensor((-1.2, -0.5, -1.0), device="cpu")
    third = torch.tensor((1.0, 0.0, -1.0), device="cpu")
    returned = without_branches(function, first, second, third, *last_arguments)
    results = returned if isinstance(returned, tuple) else (returned,)
    is_right = len(results) == len(result_names)
    allowed_shapes: Any = ([(3,)], [(3,), ()])  # of the value, and of the slope
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
            f" return {' and '.join(result_names)} of each token, {remedy}."
        )


def without_branches(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), or raise a helpful error if it has a Python branch on a tensor.

    torch raises RuntimeError if the function uses a tensor of several values as the condition of an
    `if`. Raises ValueError in its place, which names the line and says what to write instead. Any
    other exception of the function is passed on.

    function    a formula of the user
    arguments   its arguments
    """
    try:
        return function(*arguments)
    except RuntimeError as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        name = getattr(function, "__qualname__", type(function).__name__)
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]  # where torch was called
        raise ValueError(
            f"{name} has a branch on values of tokens (line {line} of {frame.f_code.co_name})."
            " A formula runs for all tokens at once: write ops.where(condition, a, b) instead of if,"
            " conditional expressions, and min or max of Python (ops.minimum, ops.maximum), and &,"
            " | and ~ instead of and, or and not."
        ) from None


def by_autograd(
    function: Callable[..., Tensor], logp: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and its derivative d loss / d logp by autograd.

    function   function (logp, *others) -> loss of each token, [num_tokens] or 0-d. The loss of a
               token must depend on no other token.
    logp       float [num_tokens], log-prob of each token
    others     float [num_tokens] each, the other arguments of the function

    Return (loss, derivative), [num_tokens] each, without a graph. The derivative is 0 if the loss
    does not depend on logp.
    """
    with torch.inference_mode(False), torch.enable_grad():
        # Copy the tensors, because autograd cannot save a tensor that was made in inference mode.
        variable = logp.detach().clone().requires_grad_()
        constants = [x.detach().clone() for x in others]
        loss = torch.as_tensor(function(variable, *constants))
        if not loss.requires_grad:  # the loss does not depend on logp
            loss = loss.detach().to(logp.dtype)
            return loss.expand_as(logp), torch.zeros_like(logp)
        # The loss of a token depends on its own log-prob alone, so the gradient of the sum of all
        # losses holds the derivative of each token.
        total = loss.expand_as(variable).sum()
        (slope,) = torch.autograd.grad(total, variable, materialize_grads=True)
    return loss.detach().expand_as(logp), slope


def random_log_probs(num_points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random log-probs and differences of log-probs, on which formulas are compared.

    Return (logp, difference), fp64 [num_points] each. logp is uniform in [-5, 0]. The difference,
    to another log-prob of the same token, is uniform in [-3, 3], at every fourth point in
    [-20, 20].

    generator   torch generator on the CPU, which makes the random numbers
    """
    logp = -5.0 * torch.rand(num_points, generator=generator, dtype=torch.float64)
    uniform = torch.rand(num_points, generator=generator, dtype=torch.float64)
    difference = 3.0 * (2.0 * uniform - 1.0)
    difference[1::4] *= 20.0 / 3.0
    return logp, difference


#: Slopes are compared first at points with at most this distance between log-probs.
MODERATE_DISTANCE = 3.0

#: A function of log-probs [num_points] that returns (value, slope) at each point, in their dtype.
ValueAndSlope = Callable[[Tensor], tuple[Tensor, Tensor]]


class ComparisonPoints(NamedTuple):
    """Random points at which the slope of a formula is compared with its derivative.

    logp            log-prob of a token under the policy, fp64 [num_points]
    distance        difference between logp and another log-prob of the token, fp64 [num_points]
    distance_name   name of the distance in error messages, such as "log-ratio"
    other_numbers   further numbers of the points by name, fp64 [num_points] each, for error
                    messages
    """

    logp: Tensor
    distance: Tensor
    distance_name: str
    other_numbers: dict[str, Tensor]

    def describe(self, point: int) -> str:
        """Return the numbers of one point as text, for example "logp=-1.5, old_logp=-2".

        point   index of the point, in 0 ... num_points - 1
        """
        numbers = {"logp": self.logp, **self.other_numbers}
        return ", ".join(f"{name}={float(x[point]):.4g}" for name, x in numbers.items())


def check_slope(
    formula_name: str, value_and_slope: ValueAndSlope, points: ComparisonPoints, tolerance: float
) -> None:
    """Raise ValueError if the slope that a formula returns is not d value / d logp.

    The derivative is computed by autograd, at random points. Large ratios may overflow, which makes
    the slope wrong too. So errors are looked for in this order, and the first one is raised:
    1. a wrong slope at a point where value and slope are finite and the distance between the
       log-probs is at most 3 (MODERATE_DISTANCE)
    2. an infinite or NaN value or slope at any point (`refuse_overflow`)
    3. a wrong slope at any point

    formula_name      name of the formula in error messages
    value_and_slope   function: logp [num_points] -> (value, slope) at each point, in the dtype of
                      logp
    points            the points: logp, its distance to another log-prob, and numbers for messages
    tolerance         largest allowed |slope - derivative| / (1 + |derivative|)
    """

    def value_alone(logp: Tensor) -> Tensor:
        """Return the value of the formula at each point, without the slope."""
        value, _ = value_and_slope(logp)
        return value

    _, derivative = by_autograd(value_alone, points.logp)
    _, slope = value_and_slope(points.logp)
    slope = torch.as_tensor(slope).detach().expand_as(derivative)
    error = (slope - derivative).abs() / (1.0 + derivative.abs())
    error = error.nan_to_num(nan=torch.inf)  # NaN is as wrong as infinity

    is_moderate = points.distance.abs() <= MODERATE_DISTANCE
    is_compared_first = is_moderate & is_finite(value_and_slope, points.logp)
    first_error = torch.where(is_compared_first, error, 0.0)
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
    """Raise ValueError if a formula is infinite or NaN at a point, in its value or its slope.

    The formula is computed in fp64 and in fp32. The message shows the point with the smallest
    distance among those where it overflows.

    formula_name      name of the formula in the error message
    value_and_slope   function: logp [num_points] -> (value, slope) at each point, in the dtype of
                      logp
    points            the points: logp, its distance to another log-prob, and numbers for messages
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
    """Return at which points both value and slope of a formula are finite, bool [num_points].

    They must be finite in fp64 and also in fp32, in which the kernels compute them.

    value_and_slope   function: logp [num_points] -> (value, slope) at each point, in the dtype of
                      logp
    logp              fp64 [num_points], the points
    """
    result = torch.ones_like(logp, dtype=torch.bool)
    for logp_in_dtype in (logp, logp.float()):
        for x in value_and_slope(logp_in_dtype):
            result &= torch.as_tensor(x).isfinite()
    return result
