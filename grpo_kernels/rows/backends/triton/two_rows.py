"""A row of logits beside another stream's inside a Triton kernel: the formulas of rows/divergence.py, for both streams at once.

Unlike in the kernels of one stream, exponents are relative to the maxima themselves, and multiplications and additions are
fused only by `_fma`: the difference of two nearly equal rows is accurate only if z - w uses rounded z and w."""

import math
from collections import namedtuple

import triton
import triton.language as tl

from .one_row import _FLOOR, _LOG2E, _NEG_INF, _dz_dx, _fma, _load, _piece, _store, _u

_INF = tl.constexpr(float("inf"))
#: The same constants and polynomials as in rows/divergence.py and csrc/simd.h.
_SMALL = tl.constexpr(0.5)
#: Up to here log(1 + x) is a polynomial of x.
_NEAR = tl.constexpr(0.41)
#: Beyond this difference of log-probs the smaller of the two probabilities is negligible.
_BEYOND = tl.constexpr(80.0)
#: log 2 for each bit of an exponent, as bits of a whole number.
_LN2_OF_BITS = tl.constexpr(math.log(2.0) / 2**23)

#: What turns logits of both streams into probabilities, and their difference into log p - log q: what is taken off before the
#: exponential, what it is multiplied with, the logarithm of the ratio of both sums.
Softmaxes = namedtuple("Softmaxes", "base teacher_base down teacher_down log_sum")


@triton.jit
def _psi(x):
    """e^-x - 1 + x for |x| <= _SMALL. Of -x, since a version of Triton subtracts from 0 to change a sign."""
    p = _fma(x, -0.00019875608, 0.0013981997)
    p = _fma(p, x, -0.008333452)
    p = _fma(p, x, 0.041665796)
    p = _fma(p, x, -0.16666666)
    p = _fma(p, x, 0.5)
    return x * x * p


@triton.jit
def _rest_of_log1p(t):
    """t - log(1 + t) for 1 + t from sqrt(1/2) to sqrt(2)."""
    p = _fma(t, 0.08700264, -0.14267462)
    p = _fma(p, t, 0.1491481)
    p = _fma(p, t, -0.16577588)
    p = _fma(p, t, 0.1996306)
    p = _fma(p, t, -0.25001338)
    p = _fma(p, t, 0.3333391)
    return t * t * _fma(-t, p, 0.5)


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2E)


@triton.jit
def _finite(top):
    """The maximum, or 0 in place of -inf: exponents relative to 0 are then all -inf."""
    return tl.where(top == _NEG_INF, 0.0, top)


@triton.jit
def _between(z, w, base, teacher_base):
    """(z - base) - (w - teacher_base). For rows that are close, z - w is exact if z and w are, so small differences are accurate.
    For rows that are far apart, z - w would be rounded to the precision of their distance."""
    apart = base - teacher_base
    return tl.where(tl.abs(apart) <= 4.0, (z - w) - apart, (z - base) - (w - teacher_base))


@triton.jit
def _logits(of, xs, at, END):
    """Transformed logits of a tile; -inf from column V on."""
    zs = ()
    for i in tl.static_range(len(xs)):
        z = of.k * _u(xs[i], of)
        if END:
            z = tl.where(_piece(at, i, of.cols) < of.V, z, _NEG_INF)
        zs = zs + (z,)  # type: ignore[assignment]  # noqa: RUF005
    return zs


@triton.jit
def _both(of, teacher, at, PIECES, END):
    """Transformed logits of a tile of both streams."""
    xs = _load(of, at, PIECES, END, "")
    ys = _load(teacher, at, PIECES, END, "")
    return _logits(of, xs, at, END), _logits(teacher, ys, at, END)


@triton.jit
def _rescaled(to, teacher_to, FORWARD, m, n, s, t, cross, excess, w, q):
    """Sums relative to maxima m and n of both streams, converted to other reference points."""
    f = tl.where(m == _NEG_INF, 0.0, _exp(m - to))
    g = tl.where(n == _NEG_INF, 0.0, _exp(n - teacher_to))
    apart = tl.where((m == _NEG_INF) | (n == _NEG_INF), 0.0, _between(m, n, to, teacher_to))
    w = tl.where(f == 0.0, 0.0, f * (w + s * (m - to)))
    if FORWARD:
        own, other, own_sum, other_sum, a = g, f, t, s, -apart
    else:
        own, other, own_sum, other_sum, a = f, g, s, t, apart
    near = tl.abs(a) <= _SMALL
    psi = _psi(a)
    of_cross = tl.where(near, own * (psi - a), other - own)
    of_sum = tl.where(near, own * psi, (other - own) + own * a)
    excess = tl.where(own == 0.0, other * other_sum, (other * excess - of_cross * cross) + of_sum * own_sum)
    cross = tl.where(own == 0.0, 0.0, own * (cross + a * own_sum))
    excess = tl.where(cross == _INF, _INF, excess)
    return s * f, t * g, cross, excess, w, q * f * f


@triton.jit
def _fold_two(sums, tiles, FORWARD, KIND):
    """Fold a tile into every lane's running maxima m and n, sums s and t, cross and excess of both streams; with KIND >= 1 also w,
    the sum of e^(z - m) (z - m), with KIND = 2 also q, the sum of e^2(z - m). Both maxima are updated together, so that nearly
    equal rows keep nearly equal reference points."""
    m, n, s, t, cross, excess, w, q = sums
    zs, ws = tiles
    top = zs[0]
    teacher_top = ws[0]
    for i in tl.static_range(1, len(zs)):
        top = tl.maximum(top, zs[i])
        teacher_top = tl.maximum(teacher_top, ws[i])
    to = tl.maximum(m, tl.max(top, axis=1))
    teacher_to = tl.maximum(n, tl.max(teacher_top, axis=1))
    s, t, cross, excess, w, q = _rescaled(to, teacher_to, FORWARD, *sums)
    base = _finite(to)[:, None]
    teacher_base = _finite(teacher_to)[:, None]
    s_tile = tl.zeros(zs[0].shape, tl.float32)
    t_tile = s_tile
    cross_tile = s_tile
    excess_tile = s_tile
    w_tile = s_tile
    q_tile = s_tile
    for i in tl.static_range(len(zs)):
        x = zs[i] - base
        p = _exp(x)
        of_teacher = _exp(ws[i] - teacher_base)
        d = _between(zs[i], ws[i], base, teacher_base)
        if FORWARD:
            own, other, d = of_teacher, p, -d
        else:
            own, other = p, of_teacher
        first = tl.where(own == 0.0, 0.0, own * d)
        s_tile += p
        t_tile += of_teacher
        cross_tile += first
        excess_tile += tl.where(tl.abs(d) <= _SMALL, own * _psi(d), (other - own) + first)
        if KIND >= 1:
            w_tile += p * tl.maximum(x, _FLOOR)
        if KIND >= 2:
            q_tile += p * p
    s += tl.sum(s_tile, axis=1)
    t += tl.sum(t_tile, axis=1)
    cross += tl.sum(cross_tile, axis=1)
    excess += tl.sum(excess_tile, axis=1)
    if KIND >= 1:
        w += tl.sum(w_tile, axis=1)
    if KIND >= 2:
        q += tl.sum(q_tile, axis=1)
    return to, teacher_to, s, t, cross, excess, w, q


@triton.jit
def _decay(x):
    """e^-x, psi = e^-x - 1 + x, and e^-x - 1, for finite x."""
    power = tl.exp2(x * -_LOG2E)
    near = tl.abs(x) <= _SMALL
    small = _psi(x)
    less = tl.where(near, small - x, power - 1.0)
    return power, tl.where(near, small, less + x), less


@triton.jit
def _log_parts(v, x):
    """n, t and r with v = 2^n (1 + t) and r = t - log(1 + t), so that log v = n log 2 + (t - r); n as bits of an exponent. x is
    v - 1 with digits that v lacks, and is t where n is 0: for v from sqrt(1/2) to sqrt(2)."""
    bits = v.to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) & -0x800000  # of 2, where exponents are
    t = (bits - power).to(tl.float32, bitcast=True) - 1.0
    t = tl.where(power == 0, x, t)
    return power.to(tl.float32), t, _rest_of_log1p(t)


@triton.jit
def _log_against(d, b, rest_of_b):
    """log p/m of columns, from d = log p - log q and the mixture m = rest_of_b p + b q. Where p is negligible, a finite number."""
    power, _, less = _decay(tl.minimum(tl.maximum(d, -_BEYOND), _BEYOND))
    n, t, rest = _log_parts(_fma(power, b, rest_of_b), b * less)
    return _fma(n, -_LN2_OF_BITS, rest - t)


@triton.jit
def _against_mixture(student_larger, distance, r, psi, less, b, rest_of_b):
    """m - p + p log(p/m) and m - q + q log(q/m) of columns, both divided by the larger of p and q.

    Let M be the larger of p and q, r M the smaller one, x = m / M - 1 and y = m / (r M) - 1. The terms are M (x - log(1 + x)) and
    r M (y - log(1 + y)), and log(1 + y) = log(1 + x) - log r: one logarithm gives both. That of 1 + x, but of 1 + y where M has the
    smaller share of m, which may be so small that y would be lost."""
    share_of_larger = tl.where(student_larger, rest_of_b, b)
    share_of_smaller = tl.where(student_larger, b, rest_of_b)
    x = share_of_smaller * less
    beside = share_of_larger * less
    y = -beside * _exp(distance)
    of_y = (share_of_larger < share_of_smaller) & (y <= _NEAR)
    v = tl.where(of_y, 1.0, _fma(share_of_smaller, r, share_of_larger))
    n, t, rest = _log_parts(v, tl.where(of_y, y, x))
    of_larger = rest + tl.where(of_y, _fma(less, y, psi), _fma(n, -_LN2_OF_BITS, x - t))
    of_smaller = tl.where(of_y, r * rest, _fma(beside, less, r * (of_larger - psi)))
    return tl.where(student_larger, of_larger, of_smaller), tl.where(student_larger, of_smaller, of_larger)


@triton.jit
def _half_sign(d):
    """Half the sign of p - q, 0 where they are equal or neither is a number."""
    return tl.where(d > 0.0, 0.5, tl.where(d < 0.0, -0.5, 0.0))


@triton.jit
def _log_ratio(z, w, of):
    """log p - log q of columns."""
    return _between(z, w, of.base, of.teacher_base) + of.log_sum


@triton.jit
def _mixed_terms(z, w, of, b, rest_of_b, DIRECTION):
    """The terms of `mixed_terms` in rows/divergence.py, both divided by the larger of p and q, and that."""
    d = _log_ratio(z, w, of)
    student_larger = d >= 0.0
    distance = tl.minimum(tl.abs(d), _BEYOND)
    r, psi, less = _decay(distance)
    if DIRECTION == "tv":
        of_student, of_teacher = _half_sign(d) * tl.where(student_larger, 1.0, r), -0.5 * less
    else:
        of_student, of_teacher = _against_mixture(student_larger, distance, r, psi, less, b, rest_of_b)
    larger = _exp(tl.where(student_larger, z - of.base, w - of.teacher_base)) * tl.where(
        student_larger, of.down, of.teacher_down
    )
    return of_student, of_teacher, larger


@triton.jit
def _slope_of_divergence(p, w, d, of, c, center, b, rest_of_b, DIRECTION):
    """The term of a divergence of slope c in d loss / d z of columns, from p, the teacher's logit and d = log p - log q."""
    if DIRECTION == "forward":
        q = _exp(w - of.teacher_base) * of.teacher_down
        slope = tl.where(tl.abs(d) <= _SMALL, p * (d - _psi(d)), p - q)
    elif DIRECTION == "jsd":
        slope = rest_of_b * p * (_log_against(d, b, rest_of_b) - center)
    elif DIRECTION == "tv":
        slope = p * (_half_sign(d) - center)
    else:
        slope = tl.where(p == 0.0, 0.0, p * (d - center))
    return tl.where(c == 0.0, 0.0, c * slope + 0.0 * of.log_sum)  # NaN for rows that have no divergence


@triton.jit
def _partials_of_two(of, teacher, FORWARD, KIND, TILE):
    """Both maxima and the sums of `_fold_two` relative to them, of whole rows."""
    m = tl.full((TILE.LANES,), _NEG_INF, tl.float32)
    s = tl.full((TILE.LANES,), 0.0, tl.float32)
    sums = (m, m, s, s, s, s, s, s)
    end = (of.V - 1) // TILE.BLOCK * TILE.BLOCK
    for start in range(0, end, TILE.BLOCK):
        sums = _fold_two(sums, _both(of, teacher, start, TILE.ACCESSES, False), FORWARD, KIND)
    sums = _fold_two(sums, _both(of, teacher, end, TILE.ACCESSES, True), FORWARD, KIND)
    top = tl.max(sums[0], axis=0)
    teacher_top = tl.max(sums[1], axis=0)
    s, t, cross, excess, w, q = _rescaled(top, teacher_top, FORWARD, *sums)
    s = tl.sum(s, axis=0)
    t = tl.sum(t, axis=0)
    s = tl.where((s < 1.0) & (top > _NEG_INF), 1.0, s)  # rounding; the maximum itself adds 1
    t = tl.where((t < 1.0) & (teacher_top > _NEG_INF), 1.0, t)
    return top, teacher_top, s, t, tl.sum(cross, axis=0), tl.sum(excess, axis=0), tl.sum(w, axis=0), tl.sum(q, axis=0)


@triton.jit
def _add_mixed(sums, of, teacher, at, softmaxes, shares, DIRECTION, PIECES, END):
    """Add the terms of a tile to both sums of a mixture."""
    of_student, of_teacher = sums
    zs, ws = _both(of, teacher, at, PIECES, END)
    for i in tl.static_range(PIECES):
        a, c, larger = _mixed_terms(zs[i], ws[i], softmaxes, *shares, DIRECTION)
        of_student = _fma(larger, a, of_student)
        of_teacher = _fma(larger, c, of_teacher)
    return of_student, of_teacher


@triton.jit
def _pulled(of, teacher, out, at, softmaxes, factors, divergence, DIRECTION, KIND, PIECES, END):
    """Write the gradient of a tile. `factors` of p: a constant, of log p, of p."""
    constant, linear, quadratic = factors
    xs = _load(of, at, PIECES, END, "")
    ys = _load(teacher, at, PIECES, END, "")
    ws = _logits(teacher, ys, at, END)
    for j in tl.static_range(PIECES):
        u = _u(xs[j], of)
        z = of.k * u
        x = z - softmaxes.base
        p = _exp(x) * softmaxes.down
        factor = constant
        if KIND >= 1:
            factor += linear * tl.maximum(x, _FLOOR)
        if KIND >= 2:
            factor += quadratic * p
        d = _log_ratio(z, ws[j], softmaxes)
        g = p * factor + _slope_of_divergence(p, ws[j], d, softmaxes, *divergence, DIRECTION)
        _store(out, at, j, of, g * _dz_dx(u, of), END, "")
