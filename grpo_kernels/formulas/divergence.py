"""Exact divergences to a reference or teacher: `Exact`, which says which one, and the divergence to
a teacher that is known at a few ids of each row.

p is the softmax of the policy's row, q the softmax of the reference or teacher. If all of q is
known, the softmax kernel computes the divergence together with the log-probs (`core/softmax.py`).
If only its largest probabilities are known, as from a served teacher, `divergence_at` computes it
from the log-probs of the policy at those ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import Checked, require, require_one_of

DIRECTIONS = ("reverse", "forward", "jsd", "tv")
TAILS = ("bin", "renormalise", "ignore", "generalised")

#: The least mass outside of a teacher's ids, on both sides, as in TRL: fp32 log-probs of a teacher
#: do not tell a smaller one.
LEAST_TAIL = 1e-7


@dataclass(frozen=True)
class Exact(Checked):
    """The exact divergence of a token's distribution p to the reference's or teacher's q, in place
    of an estimate from the sampled token: as `Objective(kl=Exact(...))`, and in
    `token_divergence` and `linear_divergence`.

        Objective.preset("dapo", beta=0.04, kl=Exact("reverse"))

    direction  "reverse": KL(p || q) = sum p (log p - log q), what the estimators of `Kl` estimate;
               mode-seeking. "forward": KL(q || p); mass-covering. Its gradient is p - q. "jsd":
               mixture * KL(q || m) + (1 - mixture) * KL(p || m), m = mixture * q + (1 - mixture) *
               p (arXiv 2306.13649, eq. 1, in TRL's convention: its beta 0 and 1, which are the two
               KLs, are "forward" and "reverse" here). "tv": the total variation sum |p - q| / 2, in
               [0, 1]. Its gradient p (sg - sum p sg) / 2, sg the sign of p - q, jumps where p and q
               are equal: of ids whose probabilities agree but for rounding, rounding decides.
    mixture    in (0, 1), of the jsd only; None: 0.5.
    tail       for a teacher known at the ids of `TokenSets` only, p and q over those ids, P and Q
               their masses outside:
               "bin"          all other ids are one outcome, of probability P and Q, each at least
                              1e-7
               "renormalise"  both are renormalised over the ids
               "ignore"       the sum over the ids alone: with direction "forward" the cross-entropy
                              to soft targets, whose values may be logarithms of any weights. The
                              sum of "reverse" has no minimum at q: the policy may move away
               "generalised"  each term with the slope at equality taken out, p (log p - log q) - p
                              + q (MOPD, arXiv 2606.30406, eq. 5); that of "tv" has none: the same
                              as "ignore"
    temperature_squared  True: times the square of the transform's temperature, which keeps the size
                         of the gradient (Hinton et al.,
               arXiv 1503.02531). The temperature itself divides the logits of both sides.

    The value is in nats (of "tv" a probability), at least 0, and of the two KLs infinite where the
    other side is 0. Raises ValueError naming the field that is wrong.
    """

    direction: str = "reverse"
    mixture: float | None = None
    tail: str = "bin"
    temperature_squared: bool = False
    ranges = (
        (
            "mixture",
            "the teacher's share is above 0 and below 1 (at them it is a KL).",
            1e-6,
            1 - 1e-6,
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("direction", self.direction, DIRECTIONS)
        require_one_of("tail", self.tail, TAILS)
        remedy = f'"{self.direction}" has none: leave it out, or pass "jsd".'
        require(self.mixture is None or self.direction == "jsd", "mixture", self.mixture, remedy)
        squared = self.temperature_squared
        require(isinstance(squared, bool), "temperature_squared", squared, "pass True or False.")

    @property
    def share(self) -> float:
        """The teacher's share of the mixture; 0 of a KL."""
        return (
            (0.5 if self.mixture is None else float(self.mixture))
            if self.direction == "jsd"
            else 0.0
        )


def as_exact(divergence: str | Exact) -> Exact:
    """A direction by name, or an Exact."""
    if isinstance(divergence, Exact):
        return divergence
    require(
        divergence in DIRECTIONS,
        "divergence",
        divergence,
        f"it must be one of {', '.join(DIRECTIONS)}, or an Exact.",
    )
    return Exact(divergence)


def divergence_at(
    exact: Exact, logps: Tensor, teacher: Tensor, offsets: Tensor, outside: Tensor | None = None
) -> Tensor:
    """fp32 [rows]: the divergence of each row from log-probs `logps` [nnz] of the policy and
    `teacher` [nnz] at the same ids, those of row r at offsets[r] : offsets[r + 1]; 0 of a row
    without ids. `outside` [rows], for the tail "bin": the log of the policy's probability of all
    other ids. Differentiable in logps and outside. In fp64, since a few numbers cost nothing.
    """
    log_p, log_q = logps.double(), teacher.detach().double()
    used = offsets.diff() > 0
    row_of = torch.repeat_interleave(offsets.diff(), output_size=logps.numel())

    def total(x: Tensor) -> Tensor:  # in a fixed order, no atomics
        return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0, unsafe=True)

    def renormalised(x: Tensor) -> Tensor:
        largest = torch.segment_reduce(
            x.detach(), "max", offsets=offsets, initial=-torch.inf, unsafe=True
        )
        x = (
            x - torch.where(largest == -torch.inf, 0.0, largest)[row_of]
        )  # of ids that are hardly ever chosen all p may be 0
        return x - total(x.exp()).log()[row_of]

    if exact.tail == "renormalise":
        log_p, log_q = renormalised(log_p), renormalised(log_q)
    p, q = log_p.exp(), log_q.exp()
    generalised = _terms(exact, log_p, log_q)
    value = total(generalised)
    if exact.tail == "bin":
        assert outside is not None
        rest = (
            outside.double().clamp(min=math.log(LEAST_TAIL)),
            (1.0 - total(q)).clamp(min=LEAST_TAIL).log(),
        )
        value = value + _terms(exact, *rest)
    elif exact.tail == "ignore":
        value = value + total(
            {"reverse": p - q, "forward": q - p}.get(exact.direction, torch.zeros_like(p))
        )
    if (
        exact.tail != "ignore"
    ):  # of terms that are never negative but by rounding, which the value loses and the gradient keeps
        value = torch.where(value < 0, value - value.detach(), value)
    return torch.where(used, value, 0.0).float()


def _terms(exact: Exact, log_p: Tensor, log_q: Tensor) -> Tensor:
    """a (log a - log b) - a + b of each id, of "tv" |p - q| / 2: at least 0, and over outcomes
    whose probabilities add up to 1 the sum is the divergence.
    """
    if exact.direction == "forward":
        return _term(log_q, log_p)
    if exact.direction == "reverse":
        return _term(log_p, log_q)
    if exact.direction == "tv":
        return (log_p.exp() - log_q.exp()).abs() / 2.0
    share = exact.share
    neither = (log_p == -torch.inf) & (
        log_q == -torch.inf
    )  # where logaddexp would have a slope of NaN
    a, b = (torch.where(neither, 0.0, x) for x in (log_q, log_p))
    log_m = torch.where(
        neither, -torch.inf, torch.logaddexp(a + math.log(share), b + math.log1p(-share))
    )
    return share * _term(log_q, log_m) + (1.0 - share) * _term(log_p, log_m)


def _term(log_a: Tensor, log_b: Tensor) -> Tensor:
    a, b = log_a.exp(), log_b.exp()
    nothing = log_a == -torch.inf
    apart = torch.where(nothing, 0.0, log_a) - torch.where(nothing, 0.0, log_b)
    return torch.where(nothing, 0.0, a) * apart - a + b
