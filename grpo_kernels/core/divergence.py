"""Divergences of two rows, column by column, in forms that keep their digits.

p is the policy's row, which gets a gradient, and q the reference's: the softmax of the policy's
logits z and of the reference's logits w, over the same ids. The directions are

    "reverse"   KL(p||q)
    "forward"   KL(q||p)
    "jsd"       b KL(q||m) + (1 - b) KL(p||m), with m = (1 - b) p + b q and the mixture weight b
    "tv"        sum_j |p_j - q_j| / 2

If two rows are nearly equal, the terms p log(p / q) have both signs and nearly cancel. Their sum in
fp32 is noise and can be negative. The sums here are over second-order terms, none of which is
negative:

    KL(p||q) = sum_j p_j psi(-D_j)           psi(x) = exp(x) - 1 - x,  D_j = log p_j - log q_j
    KL(p||m) = sum_j p_j phi(m_j / p_j - 1)  phi(x) = x - log(1 + x)

because p, q and m have the same sum. |p_j - q_j| is M (1 - exp(-|D_j|)), where M is the larger of
the two. In the first pass over a row its sum is not known. It uses

    d_j = (z_j - max_logit) - (w_j - reference_max_logit),

which differs from D_j by a constant of the row that `SoftmaxSums` adds later.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DIRECTIONS = ("reverse", "forward", "jsd", "tv")

#: Directions whose terms contain p and q divided by their sums. They take a second pass, which
#: computes the sums of `mixture_terms`.
TWO_PASS_DIRECTIONS = ("jsd", "tv")


class DivergenceKind(NamedTuple):
    """Which divergence of the policy from a reference is computed.

    direction   "reverse", "forward", "jsd" or "tv", see above; "" for none
    mixture     b, the weight of the reference in "jsd"; 0 for the others
    """

    direction: str
    mixture: float


#: The kind of rows without a reference.
NO_DIVERGENCE = DivergenceKind("", 0.0)

#: Up to |x| = PSI_LIMIT psi is x^2 times a polynomial with these coefficients, 1 / (k + 2)!.
PSI_LIMIT = 0.5
PSI_COEFFICIENTS = (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040, 1 / 40320, 1 / 362880)

#: If the maxima of two rows differ by more, z - w would be rounded to the precision of the
#: distance.
MAX_CLOSE_DISTANCE = 4.0

#: Beyond this difference of log-probs the smaller of the two probabilities is negligible.
MAX_LOG_RATIO = 80.0


def psi(x: Tensor) -> Tensor:
    """Return psi(x) = exp(x) - 1 - x without cancellation, for |x| <= PSI_LIMIT.

    It is the series x^2 (1 / 2 + x / 6 + x^2 / 24 + ...), evaluated from its last coefficient.
    """
    result = torch.full_like(x, PSI_COEFFICIENTS[-1])
    for coefficient in reversed(PSI_COEFFICIENTS[:-1]):
        result = result.mul_(x).add_(coefficient)
    return result.mul_(x).mul_(x)


def phi(x: Tensor) -> Tensor:
    """Return phi(x) = x - log(1 + x) without cancellation, for x > -1.

    With s = x / (2 + x),

        log(1 + x) = 2 atanh(s) = 2 (s + s^3 / 3 + s^5 / 5 + ...)
        x - 2 s    = x s
        phi(x)     = x s - 2 (s^3 / 3 + s^5 / 5 + ... + s^13 / 13)      for |x| <= PSI_LIMIT

    For larger |x| nothing cancels, and the definition is used.
    """
    s = x / (2.0 + x)
    squared = s * s
    # s^3 / 3 + s^5 / 5 + ... + s^13 / 13, evaluated from its last term
    series = squared * (1 / 9 + squared * (1 / 11 + squared * (1 / 13)))
    series = s * squared * (1 / 3 + squared * (1 / 5 + squared * (1 / 7 + series)))
    return torch.where(x.abs() <= PSI_LIMIT, x * s - 2.0 * series, x - torch.log1p(x))


def logit_differences(
    z: Tensor, w: Tensor, max_logit: Tensor, reference_max_logit: Tensor
) -> Tensor:
    """Return d = (z - max_logit) - (w - reference_max_logit), in the order with less rounding.

    z - w is exact for nearly equal z and w, so it is computed first if the maxima are close:
    d = (z - w) - (max_logit - reference_max_logit). If the maxima are far apart, z - w would be
    rounded to the precision of their distance.

    z, max_logit             logits of the policy, and the maximum of each row
    w, reference_max_logit   logits of the reference, and the maximum of each row
    """
    distance = max_logit - reference_max_logit
    close = (z - w) - distance
    far = (z - max_logit) - (w - reference_max_logit)
    return torch.where(distance.abs() <= MAX_CLOSE_DISTANCE, close, far)


def log_ratio_terms(direction: str, p: Tensor, q: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-ratio terms, excess terms) of each column, [num_rows, V] each.

    Their sums over a row are the softmax sums sum_log_ratio and sum_log_ratio_excess:

                    "reverse"                      "forward", with p and q swapped
        log-ratio   p d                            -q d
        excess      p psi(-d) = q - p + p d        q psi(d) = p - q - q d

    with psi(x) = exp(x) - 1 - x. Where p is 0, the log-ratio term is 0 and the excess q, whatever d
    is. Where only q is 0, both terms are infinite. "forward" swaps p and q here, too.

    direction   "forward" or "reverse"
    p           [num_rows, V]: exp(z - max_logit) of the policy, not divided by the sum
    q           [num_rows, V]: exp(w - reference_max_logit) of the reference, likewise
    d           log(p / q), from `logit_differences`
    """
    if direction == "forward":
        p, q = q, p
        d = -d
    log_ratio = p * d
    # For small d the two parts of (q - p) + p d nearly cancel, and psi is a series. For large d the
    # series would be wrong.
    excess = torch.where(d.abs() <= PSI_LIMIT, p * psi(-d), (q - p) + log_ratio)
    is_zero = p == 0
    return log_ratio.masked_fill_(is_zero, 0.0), torch.where(is_zero, q, excess)


def merge_log_ratio_sums(
    direction: str,
    *,
    policy_factor: Tensor,
    reference_factor: Tensor,
    shift: Tensor,
    sum_exp: Tensor,
    reference_sum_exp: Tensor,
    sum_log_ratio: Tensor,
    sum_log_ratio_excess: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (sum_log_ratio, sum_log_ratio_excess) of whole rows, fp32 [num_rows] each.

    They are merged from the sums of the shards of a row, which are parts of the vocabulary.

    p_j and q_j are exponentials of policy and reference, not divided by their sums, and d_j is
    log(p_j / q_j). The sums of a shard are relative to its own maxima. In the whole row p_j becomes
    f p_j, q_j becomes g q_j, and d_j becomes d_j + shift, with g = f exp(-shift). So the sums
    become

        sum_j f p_j (d_j + shift)        = f (sum_log_ratio + shift sum_j p_j)
        sum_j f p_j psi(-(d_j + shift))  = g sum_log_ratio_excess - (g - f) sum_log_ratio
                                           + f psi(-shift) sum_j p_j

    and are added over the shards. If sum_log_ratio of a shard is infinite, the merged
    sum_log_ratio_excess may be NaN. All arguments are fp32 [num_shards, num_rows].

    direction                                  "reverse" or "forward"
    policy_factor, reference_factor            f and g, 0 for a shard of only -inf
    shift                                      log(f / g), see above
    sum_exp, reference_sum_exp                 sum_j p_j and sum_j q_j of each shard
    sum_log_ratio, sum_log_ratio_excess        sum_j p_j d_j and sum_j p_j psi(-d_j). "forward" has
                                               p and q swapped, and -d in place of d.
    """
    f = policy_factor
    g = reference_factor
    sum_p = sum_exp
    sum_q = reference_sum_exp
    if direction == "forward":
        f = reference_factor
        g = policy_factor
        sum_p = reference_sum_exp
        sum_q = sum_exp
        shift = -shift
    whole_log_ratio = torch.where(f == 0, 0.0, f * (sum_log_ratio + shift * sum_p))
    # For a small shift g - f = f (exp(-shift) - 1) and f psi(-shift) without cancellation. For a
    # large one from g, because f may underflow when g does not.
    is_small = shift.abs() <= PSI_LIMIT
    factor_of_log_ratio = torch.where(is_small, f * torch.expm1(-shift), g - f)
    factor_of_sum = torch.where(is_small, f * psi(-shift), (g - f) + f * shift)
    whole_excess = g * sum_log_ratio_excess - factor_of_log_ratio * sum_log_ratio
    whole_excess = whole_excess + factor_of_sum * sum_p
    whole_excess = torch.where(f == 0, g * sum_q, whole_excess)
    return whole_log_ratio.sum(0), whole_excess.sum(0)


def mixture_terms(
    direction: str, p: Tensor, q: Tensor, log_ratio: Tensor, mixture: float
) -> tuple[Tensor, Tensor]:
    """Return (policy_terms, reference_terms) of each column for "jsd" or "tv", [num_rows, V] each.

             policy term             reference term
        jsd  m - p + p log(p / m)    m - q + q log(q / m)    with m = p + mixture (q - p)
        tv   p sign(p - q) / 2       |p - q| / 2

    Their sums over a row are the two MIXTURE_SUMS. For jsd these are KL(p||m) and KL(q||m). For tv
    the first is a number that the gradient needs (`center` in `divergence_gradient`), the second is
    the total variation itself.

    direction   "jsd" or "tv"
    p, q        probabilities of policy and reference, [num_rows, V]
    log_ratio   log p - log q, any number where both are 0; for jsd clamped to +-MAX_LOG_RATIO
    mixture     weight of q in m; not used for tv
    """
    if direction == "tv":
        # |p - q| = larger - smaller = larger (1 - exp(-|log_ratio|)), accurate also for p near q.
        larger = torch.where(log_ratio >= 0, p, q)
        relative_difference = -torch.expm1(-log_ratio.abs())
        half_difference = 0.5 * larger * relative_difference
        # log_ratio is any number, also NaN, where both probabilities are 0.
        policy_terms = torch.where(p == 0, 0.0, p * half_sign(log_ratio))
        reference_terms = torch.where(larger == 0, 0.0, half_difference)
        return policy_terms, reference_terms
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    policy_terms = kl_terms_from_mixture(p, q, log_ratio, mixture)
    reference_terms = kl_terms_from_mixture(q, p, -log_ratio, 1.0 - mixture)
    return policy_terms, reference_terms


def divergence_of_mixture(
    direction: str, policy_sum: Tensor, reference_sum: Tensor, mixture: float
) -> Tensor:
    """Return the divergence of each row from the two sums of `mixture_terms`, [num_rows].

        jsd   mixture KL(q||m) + (1 - mixture) KL(p||m)
        tv    sum_j |p_j - q_j| / 2

    direction       "jsd" or "tv"
    policy_sum      [num_rows], the sum of the policy terms: KL(p||m); not used for tv
    reference_sum   [num_rows], the sum of the reference terms: KL(q||m), or the total variation
    mixture         weight of q in m
    """
    if direction == "tv":
        return reference_sum
    return mixture * reference_sum + (1.0 - mixture) * policy_sum


def half_sign(log_ratio: Tensor) -> Tensor:
    """Return sign(p - q) / 2 from log_ratio = log p - log q: 0.5, -0.5, 0 if equal; NaN for NaN."""
    # torch.sign(NaN) is 0.
    return torch.where(log_ratio.isnan(), log_ratio, 0.5 * log_ratio.sign())


def kl_terms_from_mixture(p: Tensor, q: Tensor, log_ratio: Tensor, weight_of_q: float) -> Tensor:
    """Return m - p + p log(p / m) with m = p + weight_of_q (q - p), 0 or more, [num_rows, V].

    Their sum over a row is KL(p||m), because p and m have the same sum. With x = m / p - 1 the term
    is p phi(x), phi(x) = x - log(1 + x), in which nothing cancels for small x.

    p, q          probabilities, [num_rows, V]
    log_ratio     log p - log q, finite, any number where both are 0
    weight_of_q   a number in [0, 1]
    """
    difference, log_m_over_p = mixture_over_p(log_ratio, weight_of_q)
    # Where p is 0, m = weight_of_q q is the whole term.
    terms = torch.where(
        difference.abs() <= PSI_LIMIT,
        p * phi(difference),
        weight_of_q * (q - p) - p * log_m_over_p,
    )
    return torch.where(p == 0, weight_of_q * q, terms)


def mixture_over_p(log_ratio: Tensor, weight_of_q: float) -> tuple[Tensor, Tensor]:
    """Return (m / p - 1, log(m / p)) with m = p + weight_of_q (q - p), without loss of digits.

        m / p - 1 = weight_of_q (q / p - 1)
        m / p     = (1 - weight_of_q) + weight_of_q q / p

    log(m / p) is log1p(m / p - 1). If m / p is small, m / p - 1 is close to -1 and has lost the
    digits of m / p. Then log(m / p) is computed from m / p itself.

    log_ratio   log(p / q), finite
    """
    difference = weight_of_q * torch.expm1(-log_ratio)  # m / p - 1
    ratio = (1.0 - weight_of_q) + weight_of_q * torch.exp(-log_ratio)  # m / p
    log_m_over_p = torch.where(difference < -PSI_LIMIT, torch.log(ratio), torch.log1p(difference))
    return difference, log_m_over_p


def divergence_gradient(
    direction: str, p: Tensor, q: Tensor, log_ratio: Tensor, center: Tensor, mixture: float
) -> Tensor:
    """Return d divergence / d z of each column, [num_rows, V], z being the policy's logits.

        "reverse"   p (log(p / q) - center)                center = KL(p||q)
        "forward"   p - q
        "jsd"       (1 - mixture) p (log(p / m) - center)  center = KL(p||m)
        "tv"        p (sign(p - q) / 2 - center)           center = sum_j p_j sign(p_j - q_j) / 2

    with m = (1 - mixture) p + mixture q. All but "forward" are 0 where p is 0.

    direction   which divergence, see above
    p, q        probabilities of policy and reference, [num_rows, V]
    log_ratio   log p - log q, any number where both are 0; for "jsd" clamped to +-MAX_LOG_RATIO
    center      [num_rows, 1], the mean over the row that is subtracted from each column
    mixture     weight of q in m, for "jsd"
    """
    if direction == "forward":
        # p - q = p (1 - q / p), without cancellation for p near q.
        difference = torch.where(log_ratio.abs() <= PSI_LIMIT, -p * torch.expm1(-log_ratio), p - q)
        return torch.where(p == 0, -q, difference)
    factor = log_ratio  # of p, before the center is subtracted
    if direction == "jsd":
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        factor = -mixture_over_p(log_ratio, mixture)[1]  # -log(m / p) = log(p / m)
        p = (1.0 - mixture) * p
    if direction == "tv":
        factor = half_sign(log_ratio)
    return torch.where(p == 0, 0.0, p * (factor - center))
