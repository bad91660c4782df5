"""A row of logits and the reference's in a Triton kernel: the formulas of core/divergence.py.

z and w are the transformed logits of policy and reference, p and q their softmax, and

    d = (z - max_logit) - (w - reference_max_logit)
    psi(x) = exp(x) - 1 - x

b is the weight of the reference in the mixture m = (1 - b) p + b q of "jsd".

softmax_rows.py computes exponentials from u = z / u_to_z. Here they are computed from z and w
relative to their maxima, because z - w of two nearly equal rows is accurate only if z and w are
rounded in the same way. For the same reason multiplications and additions are fused only by `fma`.
Tiles and pieces are defined in softmax_rows.py.
"""

import math
from collections import namedtuple

import triton
import triton.language as tl

from .softmax_rows import (
    ENTROPY,
    LOG2E,
    LOWEST,
    NEG_INF,
    SQUARES,
    compute_u,
    fma,
    load_tile,
    piece_columns,
    store_piece,
    transform_derivative,
)

INF = tl.constexpr(float("inf"))
# The same constants and polynomials as in core/divergence.py and csrc/simd.h.
#: The largest |x| for which psi(x) is computed by a polynomial.
PSI_LIMIT = tl.constexpr(0.5)
#: The largest difference of the maxima of two rows for which d is computed from z - w. Beyond it
#: z - w would be rounded to the precision of the difference.
MAX_CLOSE_DISTANCE = tl.constexpr(4.0)
#: The limit of |log p - log q|. Beyond it the smaller of the two probabilities is negligible.
MAX_LOG_RATIO = tl.constexpr(80.0)
#: The largest x for which log(1 + x) is computed by a polynomial of x: 1 + x is below sqrt(2).
LOG1P_LIMIT = tl.constexpr(0.41)
#: The bits of sqrt(1/2) as fp32, and the mask of sign and exponent.
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
EXPONENT_MASK = tl.constexpr(-0x800000)
#: log 2 / 2^23: an exponent in the bits of an fp32 number, times this, is exponent * log 2.
LN2_OVER_2_POW_23 = tl.constexpr(math.log(2.0) / 2**23)

#: Numbers of a row that turn the logits z and w into probabilities p and q:
#:
#:     base, inverse_sum                      p = exp(z - base) * inverse_sum
#:     reference_base, reference_inverse_sum  q = exp(w - reference_base) * reference_inverse_sum
#:     log_sum_ratio                          log p - log q = d + log_sum_ratio
#:
#: base and reference_base are the maxima of z and w, or 0 in place of -inf.
BothSoftmaxes = namedtuple(
    "BothSoftmaxes", "base reference_base inverse_sum reference_inverse_sum log_sum_ratio"
)


# ---- functions of log-ratios


@triton.jit
def psi_of_negative(x):
    """Return psi(-x) = exp(-x) - 1 + x for |x| <= PSI_LIMIT, by a polynomial.

    The argument is x, and not -x, so that callers need no negation: one version of Triton negates
    by subtracting from 0.
    """
    p = fma(x, -0.00019875608, 0.0013981997)
    p = fma(p, x, -0.008333452)
    p = fma(p, x, 0.041665796)
    p = fma(p, x, -0.16666666)
    p = fma(p, x, 0.5)
    return x * x * p


@triton.jit
def x_minus_log1p(t):
    """Return t - log(1 + t) for 1 + t from sqrt(1/2) to sqrt(2), by a polynomial."""
    p = fma(t, 0.08700264, -0.14267462)
    p = fma(p, t, 0.1491481)
    p = fma(p, t, -0.16577588)
    p = fma(p, t, 0.1996306)
    p = fma(p, t, -0.25001338)
    p = fma(p, t, 0.3333391)
    return t * t * fma(-t, p, 0.5)


@triton.jit
def fast_exp(x):
    """Return exp(x), computed as 2^(x * log2(e)).

    The product is rounded, so the result is less accurate than tl.exp.
    """
    return tl.exp2(x * LOG2E)


@triton.jit
def finite_max(max_logit):
    """Return max_logit, or 0 in place of -inf.

    If all logits z of a row are -inf, z - max_logit would be NaN. With 0 in place of max_logit it
    is -inf, and exp(-inf) is 0.
    """
    return tl.where(max_logit == NEG_INF, 0.0, max_logit)


@triton.jit
def logit_difference(z, w, base, reference_base):
    """Return d = (z - base) - (w - reference_base), which is log p - log q up to a constant.

    z and w are transformed logits of policy and reference, and the bases are usually their maxima.
    The constant is the same in all columns of a row. If the bases are close, d is computed as
    (z - w) - (base - reference_base): z - w is exact for nearly equal z and w, so small differences
    are accurate.
    """
    distance = base - reference_base
    close = (z - w) - distance
    far = (z - base) - (w - reference_base)
    return tl.where(tl.abs(distance) <= MAX_CLOSE_DISTANCE, close, far)


@triton.jit
def exp_of_negative(x):
    """Return (exp(-x), psi(-x), exp(-x) - 1) for finite x, with psi(-x) = exp(-x) - 1 + x.

    Near x = 0 a polynomial computes the last two, without cancellation.
    """
    exp = tl.exp2(x * -LOG2E)
    is_small = tl.abs(x) <= PSI_LIMIT
    psi = psi_of_negative(x)
    exp_minus_1 = tl.where(is_small, psi - x, exp - 1.0)
    return exp, tl.where(is_small, psi, exp_minus_1 + x), exp_minus_1


@triton.jit
def log_parts(v, v_minus_1):
    """Split v > 0 into parts (n, t, r), from which its logarithm follows without loss of digits:

        v = 2^k (1 + t), with the integer k chosen so that 1 + t is from sqrt(1/2) to sqrt(2)
        n = k * 2^23
        r = t - log(1 + t)
        log v = n * LN2_OVER_2_POW_23 + (t - r)

    r may be much smaller than t. Callers need log v - t or similar, so t and r are returned apart.

    v_minus_1   v - 1, which the caller may know more accurately than v gives it. If k is 0 it is t.
    """
    bits = v.to(tl.int32, bitcast=True)
    # The exponent of a float is in bits 23 and above, so n = k * 2^23 is k in its place. The bits
    # of 1 + t are the bits of v minus n. Because the bits of sqrt(1/2) are subtracted before the
    # lower bits are cleared, 1 + t is at least sqrt(1/2).
    n = (bits - SQRT_HALF_BITS) & EXPONENT_MASK
    t = (bits - n).to(tl.float32, bitcast=True) - 1.0
    t = tl.where(n == 0, v_minus_1, t)
    return n.to(tl.float32), t, x_minus_log1p(t)


@triton.jit
def half_sign(d):
    """Return sign(p - q) / 2, from d = log p - log q. It is 0 if p = q or d is NaN."""
    return tl.where(d > 0.0, 0.5, tl.where(d < 0.0, -0.5, 0.0))


# ---- tiles of both rows


@triton.jit
def transformed_tile(row, xs, start, END):
    """Return the transformed logits z of a tile, a tuple of pieces.

    row     the `Row` that the tile belongs to
    xs      logits of the tile before the transform, a tuple of pieces
    start   first column of the tile
    END     whether the tile may reach beyond the end of the row. z is -inf there.
    """
    zs = ()
    for i in tl.static_range(len(xs)):
        z = row.u_to_z * compute_u(xs[i], row)
        if END:
            z = tl.where(piece_columns(start, i, row.columns) < row.V, z, NEG_INF)
        zs = zs + (z,)  # type: ignore[assignment]  # noqa: RUF005
    return zs


@triton.jit
def load_both_tiles(row, reference, start, PIECES, END):
    """Load a tile of both rows, and apply scale, softcap and temperature to the logits.

    A tile is consecutive columns from `start` on. It is a tuple of PIECES tensors, each small
    enough to be loaded by one instruction of each thread.

    END   whether the tile may go beyond the last column. Columns beyond it get -inf.

    Returns (z, w), the tiles of policy and reference.
    """
    xs = load_tile(row, start, PIECES, END, HINT="")
    ys = load_tile(reference, start, PIECES, END, HINT="")
    return transformed_tile(row, xs, start, END), transformed_tile(reference, ys, start, END)


# ---- the sums of a first pass


@triton.jit
def rescale_sums(
    base,
    reference_base,
    FORWARD,
    max_logit,
    reference_max,
    sum_exp,
    reference_sum_exp,
    log_ratio,
    excess,
    shifted,
    squared,
):
    """Convert sums relative to the maxima of both rows to sums relative to other bases.

    For example sum_exp = sum_j exp(z_j - max_logit) becomes sum_j exp(z_j - base): it is multiplied
    by exp(max_logit - base).

    In this function p_j and q_j are the exponentials exp(z_j - max_logit) of the policy and
    exp(w_j - reference_max) of the reference, or with FORWARD the other way round, d_j is
    log(p_j / q_j), sum_p is the sum of p_j, and

        log_ratio = sum_j p_j d_j
        excess    = sum_j p_j psi(-d_j)

    The other bases multiply all p_j by factor_p and all q_j by factor_q, and add shift_p to all
    d_j, where factor_q = factor_p * exp(-shift_p). So these two sums become

        log_ratio   factor_p * (log_ratio + shift_p * sum_p)
        excess      factor_q * excess - (factor_q - factor_p) * log_ratio
                        + (factor_q - factor_p + factor_p * shift_p) * sum_p

    base, reference_base   replace max_logit and reference_max
    FORWARD                whether the divergence is KL(reference || policy)
    max_logit, ...         the sums of `add_both_tiles`

    Returns (sum_exp, reference_sum_exp, log_ratio, excess, shifted, squared), rescaled.
    """
    # If a maximum is -inf, no logit is finite so far: the sums are 0, and so are the factors.
    policy_factor = tl.where(max_logit == NEG_INF, 0.0, fast_exp(max_logit - base))
    reference_factor = fast_exp(reference_max - reference_base)
    reference_factor = tl.where(reference_max == NEG_INF, 0.0, reference_factor)
    is_empty = (max_logit == NEG_INF) | (reference_max == NEG_INF)
    shift = logit_difference(max_logit, reference_max, base, reference_base)
    shift = tl.where(is_empty, 0.0, shift)
    rescaled_shifted = policy_factor * (shifted + sum_exp * (max_logit - base))
    shifted = tl.where(policy_factor == 0.0, 0.0, rescaled_shifted)
    if FORWARD:
        factor_p = reference_factor
        factor_q = policy_factor
        sum_p = reference_sum_exp
        sum_q = sum_exp
        shift_p = -shift
    else:
        factor_p = policy_factor
        factor_q = reference_factor
        sum_p = sum_exp
        sum_q = reference_sum_exp
        shift_p = shift
    # For a small shift the differences of the factors are computed from psi, without cancellation.
    is_small = tl.abs(shift_p) <= PSI_LIMIT
    psi = psi_of_negative(shift_p)
    per_log_ratio = tl.where(is_small, factor_p * (psi - shift_p), factor_q - factor_p)
    per_sum = tl.where(is_small, factor_p * psi, (factor_q - factor_p) + factor_p * shift_p)
    rescaled_excess = (factor_q * excess - per_log_ratio * log_ratio) + per_sum * sum_p
    # If all p_j are 0, the terms p_j psi(-d_j) = q_j - p_j + p_j d_j of the excess are q_j.
    excess = tl.where(factor_p == 0.0, factor_q * sum_q, rescaled_excess)
    log_ratio = tl.where(factor_p == 0.0, 0.0, factor_p * (log_ratio + shift_p * sum_p))
    excess = tl.where(log_ratio == INF, INF, excess)
    return (
        sum_exp * policy_factor,
        reference_sum_exp * reference_factor,
        log_ratio,
        excess,
        shifted,
        squared * policy_factor * policy_factor,
    )


@triton.jit
def add_both_tiles(sums, tiles, FORWARD, LEVEL):
    """Add a tile of both rows to the running sums of each lane (thread), and return the new sums.

    sums      (max_logit, reference_max_logit, sum_exp, reference_sum_exp, sum_log_ratio,
              sum_log_ratio_excess, sum_exp_shifted, sum_exp_squared), [LANES] each, see `SUMS` in
              core/softmax.py
    tiles     (z, w), the transformed logits of policy and reference, a tuple of pieces each
    FORWARD   whether the divergence is KL(q || p), whose sums swap p and q
    LEVEL     sum_exp_shifted is computed only from ENTROPY on, sum_exp_squared only with SQUARES

    Both maxima are updated together for a whole tile, so that the sums of nearly equal rows stay
    relative to nearly equal maxima.
    """
    old_max, old_reference_max = sums[:2]
    zs, ws = tiles
    tile_max = zs[0]
    tile_reference_max = ws[0]
    for i in tl.static_range(1, len(zs)):
        tile_max = tl.maximum(tile_max, zs[i])
        tile_reference_max = tl.maximum(tile_reference_max, ws[i])
    max_logit = tl.maximum(old_max, tl.max(tile_max, axis=1))
    reference_max = tl.maximum(old_reference_max, tl.max(tile_reference_max, axis=1))
    sum_exp, reference_sum_exp, log_ratio, excess, shifted, squared = rescale_sums(
        max_logit, reference_max, FORWARD, *sums
    )
    base = finite_max(max_logit)[:, None]
    reference_base = finite_max(reference_max)[:, None]
    tile_sum_exp = tl.zeros(zs[0].shape, tl.float32)
    tile_reference_sum_exp = tile_sum_exp
    tile_log_ratio = tile_sum_exp
    tile_excess = tile_sum_exp
    tile_shifted = tile_sum_exp
    tile_squared = tile_sum_exp
    for i in tl.static_range(len(zs)):
        x = zs[i] - base
        policy_exp = fast_exp(x)
        reference_exp = fast_exp(ws[i] - reference_base)
        d = logit_difference(zs[i], ws[i], base, reference_base)
        if FORWARD:
            p = reference_exp
            q = policy_exp
            d = -d
        else:
            p = policy_exp
            q = reference_exp
        term = tl.where(p == 0.0, 0.0, p * d)  # d may be -inf, and 0 * -inf would be NaN
        tile_sum_exp += policy_exp
        tile_reference_sum_exp += reference_exp
        tile_log_ratio += term
        is_small = tl.abs(d) <= PSI_LIMIT
        # p psi(-d) = q - p + p d, which cancels for small d
        tile_excess += tl.where(is_small, p * psi_of_negative(d), (q - p) + term)
        if LEVEL >= ENTROPY:
            tile_shifted += policy_exp * tl.maximum(x, LOWEST)
        if LEVEL >= SQUARES:
            tile_squared += policy_exp * policy_exp
    sum_exp += tl.sum(tile_sum_exp, axis=1)
    reference_sum_exp += tl.sum(tile_reference_sum_exp, axis=1)
    log_ratio += tl.sum(tile_log_ratio, axis=1)
    excess += tl.sum(tile_excess, axis=1)
    if LEVEL >= ENTROPY:
        shifted += tl.sum(tile_shifted, axis=1)
    if LEVEL >= SQUARES:
        squared += tl.sum(tile_squared, axis=1)
    return (
        max_logit,
        reference_max,
        sum_exp,
        reference_sum_exp,
        log_ratio,
        excess,
        shifted,
        squared,
    )


@triton.jit
def compute_sums_of_both(row, reference, FORWARD, LEVEL, TILE):
    """Compute the sums of both rows in one pass over them, relative to the maxima of the rows.

    Returns (max_logit, reference_max_logit, sum_exp, reference_sum_exp, sum_log_ratio,
    sum_log_ratio_excess, sum_exp_shifted, sum_exp_squared), see `SUMS` in core/softmax.py.

    FORWARD   whether the divergence is KL(q || p), whose sums swap p and q
    LEVEL     sum_exp_shifted is computed only from ENTROPY on, sum_exp_squared only with SQUARES
    """
    lowest = tl.full((TILE.LANES,), NEG_INF, tl.float32)
    zero = tl.full((TILE.LANES,), 0.0, tl.float32)
    sums = (lowest, lowest, zero, zero, zero, zero, zero, zero)
    # The first column of the last tile, which may reach beyond the end of the row.
    end = (row.V - 1) // TILE.BLOCK * TILE.BLOCK
    for start in range(0, end, TILE.BLOCK):
        tiles = load_both_tiles(row, reference, start, PIECES=TILE.ACCESSES, END=False)
        sums = add_both_tiles(sums, tiles, FORWARD, LEVEL)
    tiles = load_both_tiles(row, reference, end, PIECES=TILE.ACCESSES, END=True)
    sums = add_both_tiles(sums, tiles, FORWARD, LEVEL)

    # Combine the sums of the lanes, relative to the maxima of the rows.
    max_logit = tl.max(sums[0], axis=0)
    reference_max = tl.max(sums[1], axis=0)
    sum_exp, reference_sum_exp, log_ratio, excess, shifted, squared = rescale_sums(
        max_logit, reference_max, FORWARD, *sums
    )
    sum_exp = tl.sum(sum_exp, axis=0)
    reference_sum_exp = tl.sum(reference_sum_exp, axis=0)
    # The maximum itself adds 1. Rounding can make a sum slightly smaller than 1.
    sum_exp = tl.where((sum_exp < 1.0) & (max_logit > NEG_INF), 1.0, sum_exp)
    is_too_small = (reference_sum_exp < 1.0) & (reference_max > NEG_INF)
    reference_sum_exp = tl.where(is_too_small, 1.0, reference_sum_exp)
    return (
        max_logit,
        reference_max,
        sum_exp,
        reference_sum_exp,
        tl.sum(log_ratio, axis=0),
        tl.sum(excess, axis=0),
        tl.sum(shifted, axis=0),
        tl.sum(squared, axis=0),
    )


# ---- mixtures


@triton.jit
def log_probability_ratio(z, w, softmaxes):
    """Return log p - log q of columns with transformed logits z and w."""
    d = logit_difference(z, w, softmaxes.base, softmaxes.reference_base)
    return d + softmaxes.log_sum_ratio


@triton.jit
def log_ratio_to_mixture(d, b, one_minus_b):
    """Return log(p / m) of columns, with m = one_minus_b * p + b * q.

    d is log p - log q. It is limited to +-MAX_LOG_RATIO, so the result is finite.
    """
    d = tl.minimum(tl.maximum(d, -MAX_LOG_RATIO), MAX_LOG_RATIO)
    ratio, _, ratio_minus_1 = exp_of_negative(d)  # ratio is q / p
    # m / p = one_minus_b + b * ratio = 1 + b * (ratio - 1). `log_parts` gives its logarithm, and
    # log(p / m) is minus that.
    n, t, r = log_parts(fma(ratio, b, one_minus_b), b * ratio_minus_1)
    return fma(n, -LN2_OVER_2_POW_23, r - t)


@triton.jit
def jsd_terms(policy_is_larger, distance, ratio, psi, ratio_minus_1, b, one_minus_b):
    """Return the term of each column in KL(p || m) and in KL(q || m), divided by M = max(p, q).

    The two terms are m - p + p log(p / m) and m - q + q log(q / m), with m = one_minus_b * p +
    b * q. m - p and m - q sum to 0 over a row. They make each term nonnegative.

    M is the larger of p and q, and ratio * M the smaller one. With

        x = m / M - 1             y = m / (ratio * M) - 1

    the terms divided by M are

        of the larger one    x - log(1 + x)
        of the smaller one   ratio * (y - log(1 + y))

    Because log(1 + y) = log(1 + x) - log(ratio), one logarithm gives both: log(1 + x), or
    log(1 + y) if M has the smaller weight in m. That weight may be so small that 1 + x, which is
    rounded, would not determine y.

    policy_is_larger   whether p >= q
    distance           |log p - log q|
    ratio              exp(-distance)
    psi                exp(-distance) - 1 + distance
    ratio_minus_1      exp(-distance) - 1
    b, one_minus_b     weights of q and p in m
    """
    weight_of_larger = tl.where(policy_is_larger, one_minus_b, b)
    weight_of_smaller = tl.where(policy_is_larger, b, one_minus_b)
    x = weight_of_smaller * ratio_minus_1
    weighted_difference = weight_of_larger * ratio_minus_1
    y = -weighted_difference * fast_exp(distance)
    uses_y = (weight_of_larger < weight_of_smaller) & (y <= LOG1P_LIMIT)
    v = tl.where(uses_y, 1.0, fma(weight_of_smaller, ratio, weight_of_larger))
    n, t, r = log_parts(v, tl.where(uses_y, y, x))
    from_y = fma(ratio_minus_1, y, psi)
    from_x = fma(n, -LN2_OVER_2_POW_23, x - t)
    larger_term = r + tl.where(uses_y, from_y, from_x)
    smaller_from_x = fma(weighted_difference, ratio_minus_1, ratio * (larger_term - psi))
    smaller_term = tl.where(uses_y, ratio * r, smaller_from_x)
    policy_term = tl.where(policy_is_larger, larger_term, smaller_term)
    return policy_term, tl.where(policy_is_larger, smaller_term, larger_term)


@triton.jit
def mixture_terms(z, w, softmaxes, b, one_minus_b, DIRECTION):
    """Return (policy_term / M, reference_term / M, M) of columns, with M = max(p, q).

    The sums over all columns of a row are

        DIRECTION   of policy_term                   of reference_term
        "jsd"       KL(p || m)                       KL(q || m)
        "tv"        sum_j p_j sign(p_j - q_j) / 2    sum_j |p_j - q_j| / 2

    with m = one_minus_b * p + b * q. The caller multiplies the terms by M.

    z, w             transformed logits of policy and reference
    softmaxes        what turns them into p and q, see `BothSoftmaxes`
    b, one_minus_b   weights of q and p in m, not used for "tv"
    """
    d = log_probability_ratio(z, w, softmaxes)
    policy_is_larger = d >= 0.0
    distance = tl.minimum(tl.abs(d), MAX_LOG_RATIO)
    ratio, psi, ratio_minus_1 = exp_of_negative(distance)
    if DIRECTION == "tv":
        policy_term = half_sign(d) * tl.where(policy_is_larger, 1.0, ratio)
        reference_term = -0.5 * ratio_minus_1  # |p - q| = M (1 - ratio)
    else:
        policy_term, reference_term = jsd_terms(
            policy_is_larger, distance, ratio, psi, ratio_minus_1, b, one_minus_b
        )
    exponent = tl.where(policy_is_larger, z - softmaxes.base, w - softmaxes.reference_base)
    inverse_sum = tl.where(policy_is_larger, softmaxes.inverse_sum, softmaxes.reference_inverse_sum)
    return policy_term, reference_term, fast_exp(exponent) * inverse_sum


@triton.jit
def add_mixture_tile(
    sums, row, reference, start, softmaxes, mixture_weights, DIRECTION, PIECES, END
):
    """Add the `mixture_terms` of the tile at column `start` to running sums; return the new sums.

    sums              (sum of policy terms, sum of reference terms), [LANES, COLS] each
    row, reference    rows of logits of policy and reference
    softmaxes         what turns their logits into p and q, see `BothSoftmaxes`
    mixture_weights   (b, 1 - b), with b the weight of the reference in the mixture
    PIECES, END       number of pieces of the tile; whether it may reach beyond the end of the row
    """
    policy_sum, reference_sum = sums
    zs, ws = load_both_tiles(row, reference, start, PIECES, END)
    for i in tl.static_range(PIECES):
        policy_term, reference_term, larger_prob = mixture_terms(
            zs[i], ws[i], softmaxes, *mixture_weights, DIRECTION
        )
        policy_sum = fma(larger_prob, policy_term, policy_sum)
        reference_sum = fma(larger_prob, reference_term, reference_sum)
    return policy_sum, reference_sum


# ---- the gradient


@triton.jit
def divergence_gradient(p, w, d, softmaxes, coefficient, center, b, one_minus_b, DIRECTION):
    """Return coefficient * d divergence / dz of columns, 0 if the coefficient is 0.

    `divergence_gradient` in core/divergence.py has the formulas.

    p                probabilities of the policy; q are the probabilities of the reference
    w                transformed logits of the reference
    d                log p - log q
    softmaxes        what turns w into q, see `BothSoftmaxes`
    coefficient      d loss / d divergence of the row
    center           mean over the row that is subtracted in each column, see
                     `SoftmaxSums.gradient_center`
    b, one_minus_b   weights of reference and policy in the mixture of "jsd"
    DIRECTION        "reverse", "forward", "jsd" or "tv"
    """
    if DIRECTION == "forward":
        q = fast_exp(w - softmaxes.reference_base) * softmaxes.reference_inverse_sum
        grad = tl.where(tl.abs(d) <= PSI_LIMIT, p * (d - psi_of_negative(d)), p - q)
    elif DIRECTION == "jsd":
        grad = one_minus_b * p * (log_ratio_to_mixture(d, b, one_minus_b) - center)
    elif DIRECTION == "tv":
        grad = p * (half_sign(d) - center)
    else:
        grad = tl.where(p == 0.0, 0.0, p * (d - center))
    # If a row has a NaN or only logits of -inf, log_sum_ratio is NaN or infinite, and 0 times it is
    # NaN, as its gradient must be. For other rows it is 0.
    nan_without_divergence = 0.0 * softmaxes.log_sum_ratio
    return tl.where(coefficient == 0.0, 0.0, coefficient * grad + nan_without_divergence)


@triton.jit
def write_gradient_of_both(
    row,
    reference,
    out,
    start,
    softmaxes,
    factors,
    divergence,
    DIRECTION,
    LEVEL,
    PIECES,
    END,
):
    """Write d loss / dx of the tile at column `start`, for a loss with a divergence.

    It is dz / dx times the sum of the gradient of the divergence with respect to z_j, see
    `divergence_gradient`, and

        p_j * (per_exp + per_exp_shifted * (z_j - max z) + per_exp_squared * p_j)

    with p_j = exp(z_j - max z) / sum_exp. Elsewhere factors of these names multiply terms of the
    exponentials themselves: here the division by sum_exp is in p_j.

    This is not the gradient at the target's column, where a term is missing. The caller overwrites
    the value there.

    row, reference   rows of logits of policy and reference
    out              pointer to the gradient of the row
    softmaxes        what turns the logits into p and q, see `BothSoftmaxes`
    factors          (per_exp, per_exp_shifted, per_exp_squared), numbers of the row
    divergence       (coefficient, center, b, 1 - b) of `divergence_gradient`
    DIRECTION        of the divergence: "reverse", "forward", "jsd" or "tv"
    LEVEL            per_exp_shifted is used only from ENTROPY on, per_exp_squared only with SQUARES
    PIECES, END      number of pieces of the tile; whether it may reach beyond the end of the row
    """
    per_exp, per_exp_shifted, per_exp_squared = factors
    xs = load_tile(row, start, PIECES, END, HINT="")
    ys = load_tile(reference, start, PIECES, END, HINT="")
    ws = transformed_tile(reference, ys, start, END)
    for i in tl.static_range(PIECES):
        u = compute_u(xs[i], row)
        z = row.u_to_z * u
        x = z - softmaxes.base
        p = fast_exp(x) * softmaxes.inverse_sum
        factor = per_exp
        if LEVEL >= ENTROPY:
            factor += per_exp_shifted * tl.maximum(x, LOWEST)
        if LEVEL >= SQUARES:
            factor += per_exp_squared * p
        d = log_probability_ratio(z, ws[i], softmaxes)
        grad = p * factor
        grad += divergence_gradient(p, ws[i], d, softmaxes, *divergence, DIRECTION)
        store_piece(out, start, i, row, grad * transform_derivative(u, row), END, HINT="")
