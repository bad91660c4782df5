"""Exact divergences of the policy's distribution p from that of a reference or teacher, q.

`Exact` says which divergence. `core/divergence.py` computes it over a whole vocabulary,
`divergence_at` over the ids at which a teacher is known, such as a served one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import Checked, require, require_one_of

DIRECTIONS = ("reverse", "forward", "jsd", "tv")
TAILS = ("bin", "renormalise", "ignore", "generalised")

#: The least mass of p and q outside of a teacher's ids, as in TRL. fp32 log-probs of a teacher do
#: not tell a smaller one.
LEAST_TAIL = 1e-7


@dataclass(frozen=True)
class Exact(Checked):
    """Which divergence of whole distributions, for `Objective(kl=Exact(...))`.

    It takes the place of an estimate from the sampled token. `token_divergence` and
    `linear_divergence` take it too.

        Objective.preset("dapo", beta=0.04, kl=Exact("reverse"))

    direction             "reverse"   KL(p || q) = sum p (log p - log q), which the estimators of
                                      `Kl` estimate; mode-seeking
                          "forward"   KL(q || p), with the gradient p - q; mass-covering
                          "jsd"       mixture * KL(q || m) + (1 - mixture) * KL(p || m), where m =
                                      mixture * q + (1 - mixture) * p (arXiv 2306.13649 eq. 1, as in
                                      TRL, whose beta 0 and 1 are "forward" and "reverse" here)
                          "tv"        total variation, sum |p - q| / 2, in [0, 1]. Its gradient is
                                      p (s - sum p s) / 2 with s the sign of p - q. It jumps where p
                                      and q are equal: there rounding decides the sign.
    mixture               share of q in the mixture of "jsd", in (0, 1). None: 0.5
    tail                  for a teacher that is known at the ids of `TokenSets` only. P and Q are
                          the masses of p and q outside of these ids.
                          "bin"           all other ids are one outcome, of probability P and Q,
                                          each at least 1e-7
                          "renormalise"   p and q are renormalised over the ids
                          "ignore"        the sum over the ids alone. With "forward" it is the
                                          cross-entropy to soft targets, whose values may be
                                          logarithms of any weights. With "reverse" it has no
                                          minimum at q: the policy may move away.
                          "generalised"   each term minus its slope at equality: p (log p - log q)
                                          - p + q (MOPD, arXiv 2606.30406 eq. 5). For "tv" the same
                                          as "ignore".
    temperature_squared   whether to multiply by the square of the transform's temperature, which
                          keeps the size of the gradient (Hinton et al., arXiv 1503.02531). The
                          temperature itself divides the logits of both sides.

    The value is at least 0, in nats ("tv": a probability). The KLs are infinite if the second
    distribution is 0 where the first is not. Raises ValueError naming the field that is wrong.
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
        """Raise ValueError naming the field that is wrong."""
        super().__post_init__()
        require_one_of("direction", self.direction, DIRECTIONS)
        require_one_of("tail", self.tail, TAILS)
        remedy = f'"{self.direction}" has none: leave it out, or pass "jsd".'
        require(self.mixture is None or self.direction == "jsd", "mixture", self.mixture, remedy)
        squared = self.temperature_squared
        require(isinstance(squared, bool), "temperature_squared", squared, "pass True or False.")

    @property
    def share(self) -> float:
        """The share of q in the mixture, 0 if there is no mixture."""
        if self.direction != "jsd":
            return 0.0
        return 0.5 if self.mixture is None else float(self.mixture)


def as_exact(divergence: str | Exact) -> Exact:
    """Return a divergence as an `Exact`: "reverse" becomes Exact("reverse"), an Exact stays.

    Raises ValueError for anything else.
    """
    if isinstance(divergence, Exact):
        return divergence
    remedy = f"it must be one of {', '.join(DIRECTIONS)}, or an Exact."
    require(divergence in DIRECTIONS, "divergence", divergence, remedy)
    return Exact(divergence)


# ---- over the ids at which a teacher is known


def divergence_at(
    exact: Exact,
    logps: Tensor,
    teacher_logps: Tensor,
    offsets: Tensor,
    log_outside: Tensor | None = None,
) -> Tensor:
    """Return the divergence of each row over some ids of it, fp32 [num_rows].

    It is differentiable in logps and log_outside, computed in fp64, and 0 for a row without ids.

    logps           [num_ids], log-probs of the policy; the ids of row r are at offsets[r] :
                    offsets[r + 1]
    teacher_logps   [num_ids], log-probs of the teacher at the same ids
    offsets         int64 [num_rows + 1]
    log_outside     [num_rows], log of the policy's probability of all other ids; needed for the
                    tail "bin"
    """
    log_p = logps.double()
    log_q = teacher_logps.detach().double()
    if exact.tail == "renormalise":
        log_p = renormalise(log_p, offsets)
        log_q = renormalise(log_q, offsets)
    p = log_p.exp()
    q = log_q.exp()
    divergence = sum_rows(generalised_terms(exact, log_p, log_q), offsets)
    if exact.tail == "bin":
        assert log_outside is not None
        log_p_outside = log_outside.double().clamp(min=math.log(LEAST_TAIL))
        log_q_outside = (1.0 - sum_rows(q, offsets)).clamp(min=LEAST_TAIL).log()
        divergence = divergence + generalised_terms(exact, log_p_outside, log_q_outside)
    elif exact.tail == "ignore":
        # Put back what the generalised terms leave out.
        slopes = {"reverse": p - q, "forward": q - p}
        divergence = divergence + sum_rows(
            slopes.get(exact.direction, torch.zeros_like(p)), offsets
        )
    if exact.tail != "ignore":
        # The terms are not negative. Remove what rounding made negative, and keep the gradient.
        divergence = torch.where(divergence < 0, divergence - divergence.detach(), divergence)
    return torch.where(offsets.diff() > 0, divergence, 0.0).float()


def sum_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of x [num_ids] over the ids of each row, in a fixed order, without atomics."""
    return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0, unsafe=True)


def renormalise(log_probs: Tensor, offsets: Tensor) -> Tensor:
    """Return log-probs [num_ids] whose probabilities add up to 1 in each row."""
    row_of_id = torch.repeat_interleave(offsets.diff(), output_size=log_probs.numel())
    # Subtract the largest first: all probabilities of unlikely ids may underflow to 0.
    largest = torch.segment_reduce(
        log_probs.detach(), "max", offsets=offsets, initial=-torch.inf, unsafe=True
    )
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    shifted = log_probs - largest[row_of_id]
    return shifted - sum_rows(shifted.exp(), offsets).log()[row_of_id]


def generalised_terms(exact: Exact, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the term of each id in the divergence, in the shape of log_p, at least 0.

    With t(a, b) = a (log a - log b) - a + b and m the mixture of p and q:

        "reverse"   t(p, q)
        "forward"   t(q, p)
        "jsd"       share * t(q, m) + (1 - share) * t(p, m)
        "tv"        |p - q| / 2

    If p and q each add up to 1 over the ids, the terms add up to the divergence, since -a and b
    cancel. log_p is the log-prob under the policy, log_q under the teacher.
    """
    if exact.direction == "forward":
        return generalised_kl_term(log_q, log_p)
    if exact.direction == "reverse":
        return generalised_kl_term(log_p, log_q)
    if exact.direction == "tv":
        return (log_p.exp() - log_q.exp()).abs() / 2.0
    share = exact.share
    # logaddexp(-inf, -inf) has the gradient NaN.
    is_impossible = (log_p == -torch.inf) & (log_q == -torch.inf)
    log_mixture = torch.logaddexp(
        torch.where(is_impossible, 0.0, log_q) + math.log(share),
        torch.where(is_impossible, 0.0, log_p) + math.log1p(-share),
    )
    log_mixture = torch.where(is_impossible, -torch.inf, log_mixture)
    kl_of_q = generalised_kl_term(log_q, log_mixture)
    kl_of_p = generalised_kl_term(log_p, log_mixture)
    return share * kl_of_q + (1.0 - share) * kl_of_p


def generalised_kl_term(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return a (log a - log b) - a + b, which is b if a is 0."""
    a = log_a.exp()
    b = log_b.exp()
    is_zero = log_a == -torch.inf
    # Without infinities, whose difference is NaN.
    log_ratio = torch.where(is_zero, 0.0, log_a) - torch.where(is_zero, 0.0, log_b)
    return torch.where(is_zero, 0.0, a) * log_ratio - a + b
