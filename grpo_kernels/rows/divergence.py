"""Divergences of two rows, column by column: KL(p||q), KL(q||p), the JSD of a mixture and the total variation, in forms that keep
their digits.

p is the student's row, which gets a gradient, q the teacher's, over the same ids: the softmax of z and of w. Kinds are "reverse",
KL(p||q), "forward", KL(q||p), "jsd", with b the share of the teacher in the mixture m = (1 - b) p + b q:
b KL(q||m) + (1 - b) KL(p||m), and "tv", sum_j |p_j - q_j| / 2.

Of two nearly equal rows the terms p log(p/q) have both signs and nearly cancel: their sum in fp32 is noise, which may be negative.
All their sums are therefore over second-order terms, none of which is negative:

    KL(p||q) = sum_j p_j psi(-D_j),       psi(x) = e^x - 1 - x,       D_j = log p_j - log q_j
    KL(p||m) = sum_j p_j phi(m_j/p_j - 1),  phi(x) = x - log(1 + x)

because p, q and m have the same sum. |p_j - q_j| is M (1 - e^-|D_j|), M the larger of the two. While the row sums are not known
yet, d_j is used, which differs from D_j by a constant of the row; `partials.py` puts the constant in later."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("reverse", "forward", "jsd", "tv")

#: Kinds whose terms take p and q themselves, and so both sums: those of `mixed_terms` are made in a second visit.
OF_BOTH_SUMS = ("jsd", "tv")

#: Up to here psi is a polynomial; its terms are 1 / (k + 2)!.
SMALL = 0.5
PSI = (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040, 1 / 40320, 1 / 362880)

#: Rows whose largest logits are further apart are not treated as close: z - w would be rounded to the precision of the distance.
CLOSE = 4.0

#: Beyond this difference of log-probs the smaller of the two probabilities is negligible.
FAR = 80.0


def psi(x: Tensor) -> Tensor:
    """e^x - 1 - x without cancellation, where |x| <= SMALL."""
    result = torch.full_like(x, PSI[-1])
    for factor in reversed(PSI[:-1]):
        result = result.mul_(x).add_(factor)
    return result.mul_(x).mul_(x)


def phi(x: Tensor) -> Tensor:
    """x - log(1 + x) without cancellation, for x > -1: with s = x / (2 + x), log(1 + x) = 2 atanh(s) and x - 2 s = x s."""
    s = x / (2.0 + x)
    squared = s * s
    series = squared * (1 / 9 + squared * (1 / 11 + squared * (1 / 13)))
    series = s * squared * (1 / 3 + squared * (1 / 5 + squared * (1 / 7 + series)))
    return torch.where(x.abs() <= SMALL, x * s - 2.0 * series, x - torch.log1p(x))


def differences(z: Tensor, w: Tensor, top: Tensor, teacher_top: Tensor) -> Tensor:
    """d = (z - top) - (w - teacher_top), formed from z - w, which is exact, where the rows are close."""
    apart = top - teacher_top
    return torch.where(apart.abs() <= CLOSE, (z - w) - apart, (z - top) - (w - teacher_top))


def first_terms(kind: str, p: Tensor, q: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """(cross, excess) of each column, from p = e^(z - max), q = e^(w - teacher_max) and d as above:

        p d and p psi(-d), of "forward" with the streams swapped: -q d and q psi(d)

    Where p is 0, the pair is (0, q) whatever d is; where q is 0 and p is not, both are infinite."""
    if kind == "forward":
        p, q, d = q, p, -d
    cross = p * d
    excess = torch.where(d.abs() <= SMALL, p * psi(-d), (q - p) + cross)
    none = p == 0
    return cross.masked_fill_(none, 0.0), torch.where(none, q, excess)


def merged_sums(
    kind: str, f: Tensor, g: Tensor, apart: Tensor, total: Tensor, teacher_total: Tensor, cross: Tensor, excess: Tensor
) -> tuple[Tensor, Tensor]:
    """(cross, excess) of whole rows [n] from those of their parts, [parts, n] like all: in the whole row p and q of a part are
    f and g times what they are in the part, and d is by `apart` larger. Where a part has an infinite cross, excess may be NaN."""
    if kind == "forward":
        f, g, apart, total, teacher_total = g, f, -apart, teacher_total, total
    near = apart.abs() <= SMALL
    whole_cross = torch.where(f == 0, 0.0, f * (cross + apart * total))
    # f (e^-a - 1) and f psi(-a), where g = f e^-a; f may underflow where g does not.
    of_cross = torch.where(near, f * torch.expm1(-apart), g - f)
    of_total = torch.where(near, f * psi(-apart), (g - f) + f * apart)
    whole_excess = g * excess - of_cross * cross + of_total * total
    return whole_cross.sum(0), torch.where(f == 0, g * teacher_total, whole_excess).sum(0)


def mixed_terms(kind: str, p: Tensor, q: Tensor, log_ratio: Tensor, mixture: float) -> tuple[Tensor, Tensor]:
    """The terms of each column whose sums are MIXED of a kind, `log_ratio` being log p - log q, of any value where both are 0:

    jsd   m - p + p log(p/m) and m - q + q log(q/m), which sum up to KL(p||m) and KL(q||m)
    tv    p sg / 2 and |p - q| / 2, sg the sign of p - q; the first sum is the mean of the factor of p in the gradient"""
    if kind == "tv":
        larger, apart = torch.where(log_ratio >= 0, p, q), torch.expm1(-log_ratio.abs())
        return torch.where(p == 0, 0.0, p * _half_sign(log_ratio)), torch.where(larger == 0, 0.0, -0.5 * larger * apart)
    log_ratio = log_ratio.clamp(-FAR, FAR)
    return _mixed(p, q, log_ratio, mixture), _mixed(q, p, -log_ratio, 1.0 - mixture)


def of_mixed(kind: str, student: Tensor, teacher: Tensor, mixture: float) -> Tensor:
    """The divergence from the sums of `mixed_terms`."""
    if kind == "tv":
        return teacher
    return mixture * teacher + (1.0 - mixture) * student


def _half_sign(log_ratio: Tensor) -> Tensor:
    """Half the sign of p - q, 0 where they are equal."""
    return torch.where(log_ratio.isnan(), log_ratio, 0.5 * log_ratio.sign())


def _mixed(p: Tensor, q: Tensor, log_ratio: Tensor, share: float) -> Tensor:
    """m - p + p log(p/m) with m = p + share (q - p)."""
    x, log = _against(log_ratio, share)
    term = torch.where(x.abs() <= SMALL, p * phi(x), share * (q - p) - p * log)
    return torch.where(p == 0, share * q, term)


def _against(log_ratio: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """m/p - 1 and log(m/p) with m = p + share (q - p). Of a small m/p the first has lost the digits."""
    x = share * torch.expm1(-log_ratio)
    return x, torch.where(x < -SMALL, torch.log((1.0 - share) + share * torch.exp(-log_ratio)), torch.log1p(x))


def gradient(kind: str, p: Tensor, q: Tensor, log_ratio: Tensor, center: Tensor, mixture: float) -> Tensor:
    """d divergence / d z of each column. `center` is what the sum over p of the factor of p is; `log_ratio` as above."""
    if kind == "forward":
        forward = torch.where(log_ratio.abs() <= SMALL, -p * torch.expm1(-log_ratio), p - q)
        return torch.where(p == 0, -q, forward)
    if kind == "jsd":
        log_ratio = -_against(log_ratio.clamp(-FAR, FAR), mixture)[1]  # log p - log m
        p = (1.0 - mixture) * p
    if kind == "tv":
        log_ratio = _half_sign(log_ratio)
    return torch.where(p == 0, 0.0, p * (log_ratio - center))
