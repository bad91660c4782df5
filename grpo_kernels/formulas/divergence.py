"""Exact divergences between the distribution p of the policy and q of a reference or teacher.

`Exact` says which divergence. `core/divergence.py` computes it over a whole vocabulary. If the
teacher's log-probs are known at some ids only, for example the top 20 of a served model,
`divergence_at` computes it over these ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import Checked, require, require_one_of

DIRECTIONS = ("reverse", "forward", "jsd", "tv")
TAILS = ("bin", "renormalise", "ignore", "generalised")

#: The probability of all ids outside of a teacher's ids counts as at least this, as in TRL. A
#: smaller one is lost in the rounding of the teacher's fp32 log-probs.
LEAST_TAIL = 1e-7


@dataclass(frozen=True)
class Exact(Checked):
    """A divergence between whole distributions, for `Objective(kl=Exact(...))`.

    It takes the place of a KL estimate from the sampled token. `token_divergence` and
    `linear_divergence` take an `Exact` too.

        Objective.preset("dapo", beta=0.04, kl=Exact("reverse"))

    p is the distribution of the policy, q that of the reference or teacher.

    direction             "reverse"   KL(p || q) = sum p (log p - log q), which the estimators of
                                      `Kl` estimate; mode-seeking
                          "forward"   KL(q || p), with the gradient p - q; mass-covering
                          "jsd"       mixture * KL(q || m) + (1 - mixture) * KL(p || m), where m =
                                      mixture * q + (1 - mixture) * p (arXiv 2306.13649 eq. 1, as in
                                      TRL, whose beta 0 and 1 are "forward" and "reverse" here)
                          "tv"        total variation, sum |p - q| / 2, in [0, 1]. Its gradient is
                                      p (s - sum p s) / 2 with s the sign of p - q. It jumps where p
                                      and q are equal: there rounding decides the sign.
    mixture               weight of q in the mixture m of "jsd", in (0, 1). None: 0.5
    tail                  what happens to all other ids if the teacher is known at the ids of
                          `TokenSets` only:
                          "bin"           they are one outcome. Its probability under p and under q
                                          counts as at least 1e-7.
                          "renormalise"   they are left out, and p and q are renormalised over the
                                          teacher's ids.
                          "ignore"        they are left out of the sum. With "forward" this is the
                                          cross-entropy to soft targets, whose values may be
                                          logarithms of any weights. With "reverse" the sum has no
                                          minimum at p = q, so the policy may move away.
                          "generalised"   they are left out, and the term of each id is p (log p -
                                          log q) - p + q, which is 0 at p = q and above 0 elsewhere
                                          (MOPD, arXiv 2606.30406 eq. 5; this is "reverse"). For
                                          "tv" the same as "ignore".
    temperature_squared   whether to multiply by the square of the transform's temperature, which
                          keeps the size of the gradient (Hinton et al., arXiv 1503.02531). The
                          temperature itself divides the logits of both distributions.

    The value is at least 0, except for the tail "ignore". It is in nats, for "tv" a probability.
    The KLs are infinite if the second distribution is 0 where the first is not. Raises ValueError
    naming the field that is wrong.
    """

    direction: str = "reverse"
    mixture: float | None = None
    tail: str = "bin"
    temperature_squared: bool = False
    ranges = (
        (
            "mixture",
            "the teacher's share is above 0 and below 1 (0 and 1 would be a KL).",
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
        """The weight of q in the mixture of "jsd", 0 for another direction."""
        if self.direction != "jsd":
            return 0.0
        return 0.5 if self.mixture is None else float(self.mixture)


def as_exact(divergence: str | Exact) -> Exact:
    """Convert the argument `divergence=` to an `Exact`.

    "reverse" becomes Exact("reverse"), and an `Exact` is returned unchanged. Raises ValueError for
    anything else.
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
    """Return the divergence of each row over the ids at which a teacher is known, fp32 [num_rows].

    It is differentiable in logps and log_outside, computed in fp64, and 0 for a row without ids.
    `exact.tail` says what happens to all other ids of a row.

    logps           float [num_ids], log-prob of each id under the policy. The ids of row r are
                    offsets[r] : offsets[r + 1].
    teacher_logps   float [num_ids], log-prob of each id under the teacher
    offsets         int64 [num_rows + 1]
    log_outside     float [num_rows], log of the policy's probability of all other ids. Only the
                    tail "bin" needs it.
    """
    log_p = logps.double()
    log_q = teacher_logps.detach().double()
    if exact.tail == "renormalise":
        log_p = renormalise(log_p, offsets)
        log_q = renormalise(log_q, offsets)
    p = log_p.exp()
    q = log_q.exp()
    divergence = sum_rows(generalised_terms(exact, log_p, log_q), offsets)
    if exact.tail == "bin":  # all other ids are one more outcome
        assert log_outside is not None
        log_p_outside = log_outside.double().clamp(min=math.log(LEAST_TAIL))
        log_q_outside = (1.0 - sum_rows(q, offsets)).clamp(min=LEAST_TAIL).log()
        divergence = divergence + generalised_terms(exact, log_p_outside, log_q_outside)
    elif exact.tail == "ignore":
        # A generalised term is a (log a - log b) - a + b. Put back a - b, which is p - q for
        # "reverse" and q - p for "forward". In "jsd" it cancels, and "tv" has none.
        differences = {"reverse": p - q, "forward": q - p}
        difference = differences.get(exact.direction, torch.zeros_like(p))
        divergence = divergence + sum_rows(difference, offsets)
    if exact.tail != "ignore":
        # No term is negative, so a negative sum is a rounding error. Make it 0, with its gradient.
        divergence = torch.where(divergence < 0, divergence - divergence.detach(), divergence)
    return torch.where(offsets.diff() > 0, divergence, 0.0).float()


def sum_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of x [num_ids] over the ids of each row, [num_rows].

    The order of the sum is fixed, without atomics. The ids of row r are offsets[r] :
    offsets[r + 1].
    """
    return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0, unsafe=True)


def renormalise(log_probs: Tensor, offsets: Tensor) -> Tensor:
    """Return log-probs whose probabilities add up to 1 in each row, the log-softmax over its ids.

    log_probs   float [num_ids], log-probs up to a constant of each row
    offsets     int64 [num_rows + 1]; the ids of row r are offsets[r] : offsets[r + 1]
    """
    row_of_id = torch.repeat_interleave(offsets.diff(), output_size=log_probs.numel())
    # Subtract the largest first, because the exponentials of all ids of a row may underflow to 0.
    largest = torch.segment_reduce(
        log_probs.detach(), "max", offsets=offsets, initial=-torch.inf, unsafe=True
    )
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    shifted = log_probs - largest[row_of_id]
    return shifted - sum_rows(shifted.exp(), offsets).log()[row_of_id]


def generalised_terms(exact: Exact, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the term of each id in the divergence, in the shape of log_p, at least 0.

    With t(a, b) = a (log a - log b) - a + b and m = share * q + (1 - share) * p:

        "reverse"   t(p, q)
        "forward"   t(q, p)
        "jsd"       share * t(q, m) + (1 - share) * t(p, m)
        "tv"        |p - q| / 2

    If p and q each add up to 1 over the ids, the terms add up to the divergence, because the sums
    of -a and b cancel.

    log_p, log_q   log-prob of each id under the policy and under the teacher, of one shape
    """
    if exact.direction == "forward":
        return generalised_kl_term(log_q, log_p)
    if exact.direction == "reverse":
        return generalised_kl_term(log_p, log_q)
    if exact.direction == "tv":
        return (log_p.exp() - log_q.exp()).abs() / 2.0
    share = exact.share
    # logaddexp(-inf, -inf) would have the gradient NaN.
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
    """Return a (log a - log b) - a + b elementwise, which is b if a is 0."""
    a = log_a.exp()
    b = log_b.exp()
    is_zero = log_a == -torch.inf
    # For a = 0 replace the logarithms: -inf - (-inf) and 0 * -inf would be NaN.
    log_ratio = torch.where(is_zero, 0.0, log_a) - torch.where(is_zero, 0.0, log_b)
    return torch.where(is_zero, 0.0, a) * log_ratio - a + b
