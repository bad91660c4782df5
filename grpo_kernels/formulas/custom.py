"""The class of all surrogates, `Custom` for your own, and the check of a slope. Published surrogates are in surrogates.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..checks import require, with_hints
from .derivatives import by_autograd, check_returned, compare, log_probs

Tensor = torch.Tensor

LEVELS = ("token", "sequence", "sequence-token", "sequence-sum")


class Surrogate:
    """A surrogate function together with its parameters. Subclasses are frozen dataclasses of floats.

    The attributes tell an objective how it may be used."""

    function: Callable[..., Any]
    #: Levels of the ratio that it is defined for.
    levels: tuple[str, ...] = LEVELS
    #: True: the ratio is a constant weight and the gradient flows through logp itself (CISPO). At sequence levels the
    #: slope then stays at its token instead of flowing through the log-ratio of the sequence.
    detached_ratio: bool = False
    #: True: a token with advantage 0 has loss 0 and slope 0 whatever its ratio, so its row need not be read.
    zero_at_zero_advantage: bool = True
    #: True: a batch's weights enter the ratio of the sequence instead of multiplying the term (VESPO).
    absorbs_weights: bool = False
    #: True: `select` needs the log-probs of the whole batch before any slope can be computed.
    selects: bool = False

    @property
    def in_torch(self) -> bool:
        """True: autograd finds the slope, not `function`. It then runs in torch only, and logits are read twice."""
        return False

    @property
    def formula(self) -> Callable[..., tuple[Any, Any]]:
        """(logp, old_logp, advantage, params) -> (loss, slope) of a token: `function`, where that gives both."""
        return self.function

    @property
    def params(self) -> tuple[float, ...]:
        """What `function` receives as its last argument: runtime floats, so a schedule recompiles nothing. Where the surrogate
        `selects`, what it selected follows them."""
        return tuple(float(getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Ratios below the first (A < 0) or above the second (A > 0) count as clipped in the metrics."""
        return (0.0, math.inf)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens count as clipped, two bools in the shape of ratio and advantages: those below the lower bound with A <
        0, and those above the upper with A > 0."""
        low, high = self.ratio_bounds
        return (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)

    def in_sequence(self, x: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor | float]:
        """What a token adds to its sequence's mean or sum of log-ratios x [n], and the derivative in x; advantages [n]."""
        return x, 1.0

    def select(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, trained: Tensor) -> Tensor:
        """fp32 [n] of 0 and 1, for a surrogate that `selects`, from logps, old_logps and advantages, fp32 [n], and trained,
        bool [n]."""
        raise NotImplementedError

    def __call__(self, logp: Tensor, old_logp: Tensor, advantage: Tensor, *selected: Tensor) -> tuple[Tensor, Tensor]:
        """Per-token loss and slope, fp32, in the shape of `logp`."""
        return self.formula(logp, old_logp, advantage, (*self.params, *selected))


@with_hints
@dataclass(frozen=True)
class Custom(Surrogate):
    """Your own surrogate, which then runs in every backend and inside the kernels that visit a row once.

        from grpo_kernels.formulas.surrogates import Custom, ops

        def squared(logp, old_logp, advantage, params):       # params a tuple of floats
            x = logp - old_logp
            return -advantage * logp + 0.5 * params[0] * x * x, -advantage + params[0] * x

        objective = Objective(surrogate=Custom(squared, (0.1,)))

    `function` is written as if for one token: arithmetic, comparisons and the names of `ops`, without Python branches on
    values. It receives `parameters` as its last argument. `check_surrogate` compares the slope with autograd. For C++ and
    Triton the function, which may be a closure or another object that can be called, is called with symbols in place of
    tensors, again when a function, a number, a list or a dictionary that it uses has changed, and at each call where it uses
    other objects. If this is not possible, the logits are read a second time, with a warning, and strict raises ValueError, as
    does backend="triton"; strict also compares what was made of it with torch before it is first used. At sequence levels,
    unless detached_ratio, logp is the log-ratio of the sequence and old_logp is 0, so the formula may use their difference
    only.

    slope="autograd" is meant for prototypes: `function` returns the loss alone, in operations that torch can differentiate, and
    autograd finds the slope. It runs in torch with every backend, and costs a second read of the logits and a graph over [n]
    numbers. Detach in the formula what shall have no gradient. Raises ValueError where the function does not return what it
    should.
    """

    function: Callable[..., Any]
    parameters: tuple[float, ...] = ()
    detached_ratio: bool = False
    zero_at_zero_advantage: bool = False
    slope: str = "formula"

    def __post_init__(self) -> None:
        require(
            callable(self.function), "function", self.function, "pass (logp, old_logp, advantage, params) -> (loss, slope)."
        )
        require(self.slope in ("formula", "autograd"), "slope", self.slope, 'it must be "formula" or "autograd".')
        object.__setattr__(self, "parameters", tuple(float(p) for p in self.parameters))
        returns = "loss" if self.in_torch else "loss and slope"
        check_returned(self.function, returns, 'or, for a loss alone, pass slope="autograd"', self.parameters)

    @property
    def in_torch(self) -> bool:
        return self.slope == "autograd"

    @property
    def formula(self) -> Callable[..., tuple[Any, Any]]:
        return self._with_slope if self.in_torch else self.function

    def _with_slope(
        self, logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]
    ) -> tuple[Tensor, Tensor]:
        return by_autograd(lambda *given: self.function(*given, params), logp, old_logp, advantage)

    @property
    def params(self) -> tuple[float, ...]:
        return self.parameters


def check_surrogate(surrogate: Surrogate, *, points: int = 4096, tolerance: float = 1e-6, seed: int = 0) -> None:
    """Compare a surrogate's slope with autograd's derivative of its loss, in fp64. It is meant for surrogates of your own.

    `points` random points are drawn with `seed`: log-probs, ratios between e^-3 and e^3 (one in four between e^-20 and e^20),
    and advantages of both signs and 0. An error above `tolerance` times (1 + the derivative) is refused, and so is a surrogate
    with zero_at_zero_advantage=True whose loss or slope is not 0 at advantage 0. With detached_ratio=True old_logp moves along
    with logp, so that the ratio is constant. Raises ValueError naming the worst point. Points on a kink, where a derivative
    does not exist, have probability 0.
    """
    g = torch.Generator().manual_seed(seed)
    logp, x = log_probs(points, g)
    advantage = torch.randn(points, generator=g, dtype=torch.float64)
    advantage[::16] = 0.0
    selected = (torch.rand(points, generator=g) < 0.5).to(torch.float64)
    old_logp = logp - x
    extra = (selected,) if surrogate.selects else ()
    if surrogate.zero_at_zero_advantage:
        for what, value in zip(("loss", "slope"), surrogate(logp, old_logp, 0.0 * x, *extra), strict=True):
            if torch.as_tensor(value).any():
                raise ValueError(f"the {what} of {surrogate!r} is not 0 at advantage 0: set zero_at_zero_advantage=False.")

    if surrogate.in_torch:
        return

    def terms(logp: Tensor) -> tuple[Tensor, Tensor]:
        return surrogate(logp, logp - x if surrogate.detached_ratio else old_logp, advantage, *extra)

    compare(repr(surrogate), terms, logp, tolerance, {"old_logp": old_logp, "advantage": advantage})
