"""A row of logits beside a teacher's inside a Triton kernel: the formulas of vocabulary/divergence.py, for both streams at once.

Unlike in the kernels of one stream (triton_rows.py), exponents are relative to the maxima themselves, and multiplications and
additions are fused only by `_fma`: the difference of two nearly equal rows is accurate only if z - w uses rounded z and w."""

import triton
import triton.language as tl

from .triton_rows import _FLOOR, _LOG2E, _NEG_INF, _fma, _u

_INF = tl.constexpr(float("inf"))
#: The same constants and polynomials as in vocabulary/divergence.py and csrc/simd.h.
_SMALL = tl.constexpr(0.5)
_NEAR_MIXTURE = tl.constexpr(0.41)
_NEAR_ONE = tl.constexpr(-0.29)


@triton.jit
def _psi(x):
    """e^x - 1 - x for |x| <= _SMALL."""
    p = _fma(x, 0.00019875608, 0.0013981997)
    p = _fma(p, x, 0.008333452)
    p = _fma(p, x, 0.041665796)
    p = _fma(p, x, 0.16666666)
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
def _logits(xs, at, V, cols, k, scale, softcap, END: tl.constexpr, SHAPE: tl.constexpr):
    """Transformed logits of a tile; -inf from column V on."""
    STEP: tl.constexpr = cols.shape[0] * cols.shape[1]
    zs = ()
    for i in tl.static_range(len(xs)):
        z = k * _u(xs[i], scale, softcap, SHAPE)
        if END:
            z = tl.where(at + i * STEP + cols < V, z, _NEG_INF)
        zs = zs + (z,)  # type: ignore[assignment]  # noqa: RUF005
    return zs


@triton.jit
def _rescaled(m, n, to, teacher_to, s, t, cross, excess, w, q, FORWARD: tl.constexpr):
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
    psi = _psi(-a)
    of_cross = tl.where(near, own * (psi - a), other - own)
    of_sum = tl.where(near, own * psi, (other - own) + own * a)
    excess = tl.where(own == 0.0, other * other_sum, (other * excess - of_cross * cross) + of_sum * own_sum)
    cross = tl.where(own == 0.0, 0.0, own * (cross + a * own_sum))
    excess = tl.where(cross == _INF, _INF, excess)
    return s * f, t * g, cross, excess, w, q * f * f


@triton.jit
def _fold_two(m, n, s, t, cross, excess, w, q, zs, ws, FORWARD: tl.constexpr, KIND: tl.constexpr):
    """Fold a tile into every lane's running maxima m and n, sums s and t, cross and excess of both streams; with KIND >= 1 also w,
    the sum of e^(z - m) (z - m), with KIND = 2 also q, the sum of e^2(z - m). Both maxima are updated together, so that nearly
    equal rows keep nearly equal reference points."""
    top = zs[0]
    teacher_top = ws[0]
    for i in tl.static_range(1, len(zs)):
        top = tl.maximum(top, zs[i])
        teacher_top = tl.maximum(teacher_top, ws[i])
    to = tl.maximum(m, tl.max(top, axis=1))
    teacher_to = tl.maximum(n, tl.max(teacher_top, axis=1))
    s, t, cross, excess, w, q = _rescaled(m, n, to, teacher_to, s, t, cross, excess, w, q, FORWARD)
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
        excess_tile += tl.where(tl.abs(d) <= _SMALL, own * _psi(-d), (other - own) + first)
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
def _against(d, b, rest_of_b):
    """For one column, from d = log p - log q and the mixture m = rest_of_b p + b q, M being the larger of p and q: whether M is p;
    e^-|d|; log M - log m, and the same of the smaller one; the term of M in its KL to m divided by M, and the same of the
    smaller."""
    student_larger = (d >= 0.0) | (d != d)
    distance = tl.abs(d)
    ratio = _exp(-distance)
    less = tl.where(distance <= _SMALL, _psi(-distance) - distance, ratio - 1.0)
    share = tl.where(student_larger, b, rest_of_b)
    rest_of_share = tl.where(student_larger, rest_of_b, b)
    x = share * less
    rest = _rest_of_log1p(x)
    log = tl.where(x >= _NEAR_ONE, x - rest, tl.log(_fma(share, ratio, rest_of_share)))  # near -1 x lacks the digits of 1 + x
    rest = tl.where(x >= _NEAR_ONE, rest, x - log)
    y = -rest_of_share * less / ratio  # m over the smaller one, less 1
    far = (y > _NEAR_MIXTURE) | (y != y)
    rest_of_y = _rest_of_log1p(y)
    beyond = -rest_of_share * less - tl.where(ratio == 0.0, 0.0, ratio * (log + distance))
    log_of_smaller = tl.where(far, log + distance, y - rest_of_y)
    return student_larger, ratio, -log, -log_of_smaller, rest, tl.where(far, beyond, ratio * rest_of_y)


@triton.jit
def _mixed_terms(z, w, base, teacher_base, log_sums, down, teacher_down, b, rest_of_b):
    """m - p + p log(p/m) and m - q + q log(q/m) of columns."""
    d = _between(z, w, base, teacher_base) + log_sums
    student_larger, _, _, _, of_larger, of_smaller = _against(d, b, rest_of_b)
    larger = _exp(tl.where(student_larger, z - base, w - teacher_base)) * tl.where(student_larger, down, teacher_down)
    of_larger = tl.where(larger == 0.0, 0.0, larger * of_larger)
    of_smaller = tl.where(larger == 0.0, 0.0, larger * of_smaller)
    return tl.where(student_larger, of_larger, of_smaller), tl.where(student_larger, of_smaller, of_larger)


@triton.jit
def _slope_of_divergence(p, q, d, center, b, rest_of_b, DIRECTION: tl.constexpr):
    """d divergence / d z of columns, from probabilities and d = log p - log q."""
    if DIRECTION == "forward":
        return tl.where(tl.abs(d) <= _SMALL, p * (d - _psi(-d)), p - q)
    elif DIRECTION == "jsd":
        student_larger, _, of_larger, of_smaller, _, _ = _against(d, b, rest_of_b)
        found = rest_of_b * p * (tl.where(student_larger, of_larger, of_smaller) - center)
        return tl.where(p == 0.0, 0.0, found)
    else:
        return tl.where(p == 0.0, 0.0, p * (d - center))
