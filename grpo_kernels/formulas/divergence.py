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

    direction             "reverse"   KL(p || q) = sum p (log p - log q), the divergence that the
                                      estimators of `Kl` estimate; mode-seeking
                          "forward"   KL(q || p), with the gradient p - q with respect to the
                                      logits of the policy; mass-covering
                          "jsd"       mixture * KL(q || m) + (1 - mixture) * KL(p || m), where m =
                                      mixture * q + (1 - mixture) * p (arXiv 2306.13649 eq. 1, as in
                                      TRL, whose beta 0 and 1 are "forward" and "reverse" here)
                          "tv"        total variation, sum |p - q| / 2, in [0, 1]. Its gradient
                                      with respect to the logits is p (s - sum p s) / 2, where s is
                                      the sign of p - q. The gradient jumps where p and q are equal:
                                      there rounding decides the sign.
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
        """Raise ValueError naming the field that is wrong. A mixture is for "jsd" only."""
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
    """Return the divergence between policy and teacher of each row over some ids, fp32 [num_rows].

    A row is one position of the model. Its ids are those at which the teacher's log-prob is known,
    for example the teacher's top 20. All other ids of the vocabulary are outside.

    exact           which divergence (`direction`), and how outside ids are treated (`tail`):
                    "bin"           all outside ids together are one more outcome
                    "renormalise"   p and q are renormalised over the ids of the row
                    "ignore"        the plain sum over the ids, which may be below 0
                    "generalised"   the sum over the ids of `generalised_terms`, which are 0 where
                                    p = q and above 0 elsewhere
    logps           float [num_ids], log-prob of each id under the policy
    teacher_logps   float [num_ids], log-prob of each id under the teacher
    offsets         int64 [num_rows + 1]: row r has the ids offsets[r] : offsets[r + 1] of `logps`
                    and `teacher_logps`
    log_outside     float [num_rows], log of the policy's probability of all outside ids. Only the
                    tail "bin" needs it.

    The result is 0 for a row without ids, and is differentiable in `logps` and `log_outside`. Sums
    are computed in fp64.
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
        # Add the term of one more outcome, which stands for all outside ids.
        assert log_outside is not None
        log_p_outside = log_outside.double().clamp(min=math.log(LEAST_TAIL))
        log_q_outside = (1.0 - sum_rows(q, offsets)).clamp(min=LEAST_TAIL).log()
        divergence = divergence + generalised_terms(exact, log_p_outside, log_q_outside)
    elif exact.tail == "ignore":
        # A generalised term is a (log a - log b) - a + b. For this tail the term of an id is
        # a (log a - log b), so add a - b, which is p - q for "reverse" and q - p for "forward". In
        # "jsd" the differences of both KLs cancel, and "tv" has none.
        differences = {"reverse": p - q, "forward": q - p}
        difference = differences.get(exact.direction, torch.zeros_like(p))
        divergence = divergence + sum_rows(difference, offsets)
    if exact.tail != "ignore":
        # No term is negative, so a negative sum is a rounding error. x - x.detach() has the value 0
        # and keeps the gradient of x.
        divergence = torch.where(divergence < 0, divergence - divergence.detach(), divergence)
    return torch.where(offsets.diff() > 0, divergence, 0.0).float()


def sum_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of x over the ids of each row, [num_rows] in the dtype of x.

    The ids of a row are added in their order, without atomics, so the sum is deterministic. It is 0
    for a row without ids.

    x         float [num_ids], a number of each id
    offsets   int64 [num_rows + 1]: row r has the ids offsets[r] : offsets[r + 1]
    """
    # unsafe=True skips a check of the offsets, for which the host would wait for a GPU.
    return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0, unsafe=True)


def renormalise(log_probs: Tensor, offsets: Tensor) -> Tensor:
    """Return the log-softmax over the ids of each row, so that its probabilities add up to 1.

    The rows have different numbers of ids, so all ids are in one flat list, row after row.

    log_probs   float [num_ids], log-prob of each id. All log-probs of a row may contain the same
                additive constant.
    offsets     int64 [num_rows + 1]: row r has the ids offsets[r] : offsets[r + 1]

    Return float [num_ids].
    """
    # Given counts alone, repeat_interleave returns index r as many times as counts[r] says: the
    # counts [2, 1] give [0, 0, 1]. With output_size the host need not wait for their sum.
    counts = offsets.diff()
    row_of_id = torch.repeat_interleave(counts, output_size=log_probs.numel())
    # Subtract the largest log-prob of the row first. Otherwise the exponentials of all ids of a row
    # may underflow to 0. It is detached: the log-softmax does not depend on the number that is
    # subtracted, so no gradient flows through it. unsafe=True skips a check of the offsets, for
    # which the host would wait for a GPU.
    largest = torch.segment_reduce(
        log_probs.detach(), "max", offsets=offsets, initial=-torch.inf, unsafe=True
    )
    # It is -inf for a row without ids, and for a row whose probabilities are all 0. Subtract 0
    # then, because -inf - (-inf) would be NaN.
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    shifted = log_probs - largest[row_of_id]
    log_sum_exp = sum_rows(shifted.exp(), offsets).log()  # of the shifted log-probs of each row
    return shifted - log_sum_exp[row_of_id]


def generalised_terms(exact: Exact, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the term of each id in a divergence between the policy p and the teacher q.

    "Generalised" means that p = exp(log_p) and q = exp(log_q) need not add up to 1 over the ids.
    The term of an id is

        "reverse"   t(p, q)
        "forward"   t(q, p)
        "jsd"       share * t(q, m) + (1 - share) * t(p, m),   m = share * q + (1 - share) * p
        "tv"        |p - q| / 2

    where t(a, b) = a (log a - log b) - a + b is the term of a generalised KL. No term is negative.
    If p and q both add up to 1 over the ids, the sums of -a and +b cancel, and the terms add up to
    the usual divergence.

    exact   which divergence: "reverse", ... is its `direction`, and share its `share`, the weight
            of q in the mixture m
    log_p   float [num_ids], log-prob of each id under the policy
    log_q   float [num_ids], log-prob of each id under the teacher

    Return float [num_ids].
    """
    if exact.direction == "forward":
        return generalised_kl_term(log_q, log_p)
    if exact.direction == "reverse":
        return generalised_kl_term(log_p, log_q)
    if exact.direction == "tv":
        return (log_p.exp() - log_q.exp()).abs() / 2.0
    share = exact.share
    # For p = q = 0 the gradient of logaddexp(-inf, -inf) would be NaN. So pass any finite numbers
    # in place of both logarithms, and set log m = -inf afterwards.
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
    """Return a (log a - log b) - a + b, the term of each id in a generalised KL(a || b).

    The term is b if a is 0.

    log_a, log_b   float tensors of one shape, logarithms of the probabilities a and b

    Return a float tensor of this shape.
    """
    a = log_a.exp()
    b = log_b.exp()
    is_zero = log_a == -torch.inf  # a = 0
    # For a = 0 put 0 in place of both logarithms and of a: -inf - (-inf) and 0 * -inf would be NaN,
    # in the value or in its gradient.
    log_ratio = torch.where(is_zero, 0.0, log_a) - torch.where(is_zero, 0.0, log_b)
    return torch.where(is_zero, 0.0, a) * log_ratio - a + b
