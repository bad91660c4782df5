"""The functions that a formula may call: names that torch and the kernels share.

Under torch (the eager backend, tests) `ops` stands for torch; for the kernels in C++ and Triton a
formula is run once with symbols in place of tensors, see program.py. So each formula of this
package exists once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NUMBERS = (int, float)


class ops:
    """The functions that a formula may call, besides arithmetic and comparisons. They work element
    by element. NaN in gives NaN out. The derivative of tanh(x) is 1 - tanh(x) ** 2.
    """

    exp, log, sqrt, abs, where = torch.exp, torch.log, torch.sqrt, torch.abs, torch.where
    tanh = torch.tanh

    @staticmethod
    def sigmoid(x):
        # torch.sigmoid rounds the last elements of a tensor differently: a token's bits would
        # depend on where a block ends.
        return 1.0 / (1.0 + torch.exp(-x))

    @staticmethod
    def minimum(a, b):
        return _extreme(min, torch.minimum, "max", a, b)

    @staticmethod
    def maximum(a, b):
        return _extreme(max, torch.maximum, "min", a, b)


def _extreme(of_numbers, of_tensors, bound, a, b):
    if isinstance(a, NUMBERS):
        a, b = b, a
    if not isinstance(b, NUMBERS):
        return of_tensors(a, b)
    return of_numbers(a, b) if isinstance(a, NUMBERS) else torch.clamp(a, **{bound: b})  # type: ignore[call-overload]


def bounded_exp(x):
    """exp(min(x, 60)): e^60 times any reasonable weight is still finite in fp32.

    Slopes use the bounded value and are not cut, so a token beyond the bound still gets a gradient
    that pulls it back.
    """
    return ops.exp(x.clamp(max=60.0))


def finite(x):
    """x within +-1e30:

    products of two bounded ratios stay finite, as do their products with a weight.
    """
    return x.clamp(-1e30, 1e30)


def times(weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """weight * x; 0 where the weight is 0, whatever x is. None: a weight of 1."""
    return x if weight is None else (weight * x).masked_fill_(weight == 0, 0.0)


# ---- what a formula has to return, its slope from autograd, and the comparison of both


def check_returned(function: Callable[..., Any], returns: str, remedy: str, *last: Any) -> None:
    """Raise ValueError unless `function`, called with tensors of three tokens (and `last`), returns
    what it should: "loss" or "loss and slope" of each token. Unchecked, a tensor with two rows in
    place of a pair would be unpacked into its rows.
    """
    if torch.compiler.is_compiling():
        return
    given = [
        torch.tensor(values, device="cpu")
        for values in ((-1.0, -0.5, -2.0), (-1.2, -0.5, -1.0), (1.0, 0.0, -1.0))
    ]
    returned = without_branches(function, *given, *last)
    parts = returned if isinstance(returned, tuple) else (returned,)
    shapes: Any = [(3,)], [(3,), ()]  # of the loss; of a slope, which may be a constant
    fine = len(parts) == len(returns.split(" and ")) and all(
        x.shape in known if isinstance(x, Tensor) else isinstance(x, NUMBERS)
        for x, known in zip(parts, shapes, strict=False)
    )
    if not fine:
        got = ", ".join(
            f"a Tensor {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            for x in parts
        )
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(
            f"{name} returned {got or 'nothing'} for tensors of shape [3]: return {returns} of each"
            f" token, {remedy}."
        )


def without_branches(function: Callable[..., Any], *given: Any) -> Any:
    """Return function(*given). Raises ValueError, with the line, where it uses a tensor of several
    values as a condition of Python, about which torch's error does not say what to do in a formula.
    """
    try:
        return function(*given)
    except RuntimeError as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        name = getattr(function, "__qualname__", type(function).__name__)
        lines = [(number, frame.f_code) for frame, number in traceback.walk_tb(error.__traceback__)]
        number, code = lines[-1]
        raise ValueError(
            f"{name} has a branch on values of tokens (line {number} of {code.co_name}). A formula"
            " runs for all tokens at once: write ops.where(condition, a, b) instead of if,"
            " conditional expressions, and min or max of Python (ops.minimum, ops.maximum), and &,"
            " | and ~ instead of and, or and not."
        ) from None


def by_autograd(
    function: Callable[..., Tensor], logp: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss, d loss / d logp) of each token, the shape of logp, for a function (logp, *others) ->
    loss.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = (
            logp.detach().clone().requires_grad_()
        )  # a copy, because a graph cannot save a tensor made in inference mode
        loss = torch.as_tensor(function(x, *(y.detach().clone() for y in others)))
        if not loss.requires_grad:  # the loss does not depend on logp
            return loss.detach().to(x.dtype).expand_as(x), torch.zeros_like(x)
        (slope,) = torch.autograd.grad(loss.expand_as(x).sum(), x, materialize_grads=True)
    return loss.detach().expand_as(x), slope


def log_probs(points: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(log-probs from -5 to 0, their distances to others, within 3 and, one in four, within 20),
    fp64 [points].
    """
    logp = -5.0 * torch.rand(points, generator=g, dtype=torch.float64)
    x = 3.0 * (2.0 * torch.rand(points, generator=g, dtype=torch.float64) - 1.0)
    x[1::4] *= 20.0 / 3.0
    return logp, x


#: Distances up to this one are moderate, and tried first.
MODERATE = 3.0

#: (value, slope) of each token from log-probs, in the dtype of these.
ValueAndSlope = Callable[[Tensor], tuple[Tensor, Tensor]]


def compare(
    name: str,
    terms: ValueAndSlope,
    logp: Tensor,
    tolerance: float,
    distance: tuple[str, Tensor],
    at: dict[str, Tensor],
) -> None:
    """Raise ValueError where the slope that `terms` gives at logp is not the derivative of its
    value, or where one of them overflows.

    logp      fp64 [points].
    distance  the name of a distance between log-probs and its value at the points. Where the slope
              is wrong at moderate distances, the message says so whatever happens further away.
    at        other numbers at the points, for the message.
    """
    _, expected = by_autograd(lambda x: terms(x)[0], logp)
    slope = torch.as_tensor(terms(logp)[1]).detach().expand_as(expected)
    error = (slope - expected).abs() / (1.0 + expected.abs())
    error = error.nan_to_num(torch.inf)
    fine = _is_finite(terms, logp)

    def refuse_wrong(points: Tensor) -> None:
        considered = torch.where(points, error, 0.0)
        worst = int(considered.argmax())
        if considered[worst] > tolerance:
            raise ValueError(
                f"the slope of {name} is {float(slope[worst]):.6g}, but autograd gives"
                f" {float(expected[worst]):.6g} at"
                f" logp={float(logp[worst]):.4g}{_numbers_at(worst, at)}."
            )

    refuse_wrong(fine & (distance[1].abs() <= MODERATE))
    refuse_overflow(name, terms, logp, distance, at)
    refuse_wrong(torch.ones_like(fine))


def refuse_overflow(
    name: str,
    terms: ValueAndSlope,
    logp: Tensor,
    distance: tuple[str, Tensor],
    at: dict[str, Tensor],
) -> None:
    """Raise ValueError for the point at the smallest distance where a value or slope is not finite,
    in fp32 or fp64. Arguments as in `compare`.
    """
    bad = ~_is_finite(terms, logp)
    if not bad.any():
        return
    what, x = distance
    nearest = int(torch.where(bad, x.abs(), torch.inf).argmin())
    value, slope = (
        float(torch.as_tensor(part).expand_as(logp)[nearest]) for part in terms(logp.float())
    )
    raise ValueError(
        f"{name} overflows at {what} {float(x[nearest]):.4g}: in float32 its value is {value:.6g}"
        f" and its slope {slope:.6g}, at logp={float(logp[nearest]):.4g}{_numbers_at(nearest, at)}."
        " Bound what grows there, for example bounded_exp(x) of grpo_kernels.formulas.ops in place"
        " of ops.exp(x), or x.clamp(-20.0, 20.0)."
    )


def _is_finite(terms: ValueAndSlope, logp: Tensor) -> Tensor:
    """bool [points]:

    whether value and slope are finite in fp64, and in fp32, in which kernels compute them.
    """
    parts = [
        torch.as_tensor(part).detach().expand_as(logp)
        for x in (logp, logp.float())
        for part in terms(x)
    ]
    return torch.stack([part.isfinite() for part in parts]).all(0)


def _numbers_at(point: int, at: dict[str, Tensor]) -> str:
    return "".join(f", {key}={float(x[point]):.4g}" for key, x in at.items())
