"""One row of logits inside a Triton kernel: its statistics, its gradient, and what both read it with.

A row is gone over in tiles [LANES, COLS]. The second dimension lies within a thread, so that reductions over it need no exchange
between threads."""

import math

import triton
import triton.language as tl

_LOG2E = tl.constexpr(math.log2(math.e))
_NEG_INF = tl.constexpr(-math.inf)
#: Stands for -inf where a factor of exactly 0 follows: 0 * -inf would be NaN.
_FLOOR = tl.constexpr(-1e30)


@triton.jit
def _columns(ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr):
    if ALIGNED:  # neighbours belong to one thread: a 128-bit access
        return tl.arange(0, LANES)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    else:  # neighbours belong to neighbouring threads: single elements, side by side
        return tl.arange(0, LANES)[:, None] + tl.arange(0, COLS)[None, :] * LANES


@triton.jit
def _row_offset(row, T, stride_a, stride_t, ALIGNED: tl.constexpr):
    offset = (row // T) * stride_a + (row % T) * stride_t
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


# z = k u(x) with k > 0: the softmax runs over u, whose maximum is subtracted before the scaling, so a shift of the logits
# costs no precision. SHAPE is "linear" (u = x), "mirrored" (u = -x, for a negative scale) or "softcap" (u = tanh).


@triton.jit
def _u(x, scale, softcap, SHAPE: tl.constexpr):
    if SHAPE == "softcap":
        # tanh(v) = 1 - 2 / (e^2v + 1), off by 6e-8: times the cap, the spacing of fp32 numbers near it.
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2E * scale / softcap)) + 1.0)
    elif SHAPE == "mirrored":
        return -x
    else:
        return x


@triton.jit
def _k(scale, softcap, inv_t, SHAPE: tl.constexpr):
    if SHAPE == "softcap":
        return softcap * inv_t
    else:
        return tl.abs(scale * inv_t)


@triton.jit
def _dz_dx(u, scale, inv_t, SHAPE: tl.constexpr):
    slope = scale * inv_t
    if SHAPE == "softcap":
        slope = slope * (1.0 - u * u)
    return slope


@triton.jit
def _fold(m, s, w, q, u, k, KIND: tl.constexpr):
    """Fold a tile of u into every lane's running max m, sum s of e^k(u - m), with KIND >= 1 sum w of e^k(u - m) (u - m), with
    KIND = 2 sum q of e^2k(u - m)."""
    new = tl.maximum(m, tl.max(u, axis=1))
    base = tl.where(new == _NEG_INF, 0.0, new)
    d = u - base[:, None]
    e = tl.exp2(d * (k * _LOG2E))
    shift = m - base
    keep = tl.exp2(shift * (k * _LOG2E))
    if KIND >= 1:
        w = (w + s * tl.maximum(shift, _FLOOR)) * keep + tl.sum(e * tl.maximum(d, _FLOOR), axis=1)
    if KIND >= 2:
        q = q * keep * keep + tl.sum(e * e, axis=1)
    return new, s * keep + tl.sum(e, axis=1), w, q


@triton.jit
def _softmax_partials(
    row, V, k, scale, softcap,
    SHAPE: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """m = max u, s, w and q (see _fold) of one row."""
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    m = tl.full((LANES,), _NEG_INF, tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    w = tl.zeros((LANES,), tl.float32)
    q = tl.zeros((LANES,), tl.float32)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        x = tl.load(row + start + cols, eviction_policy="evict_last").to(tl.float32)
        m, s, w, q = _fold(m, s, w, q, _u(x, scale, softcap, SHAPE), k, KIND)
    if full < V:
        inside = full + cols < V
        x = tl.load(row + full + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        # -inf goes in after u: tanh and the mirror would make a number, or +inf, of it.
        u = tl.where(inside, _u(x, scale, softcap, SHAPE), _NEG_INF)
        m, s, w, q = _fold(m, s, w, q, u, k, KIND)
    top = tl.max(m, axis=0)
    shift = m - tl.where(top == _NEG_INF, 0.0, top)
    keep = tl.exp2(shift * (k * _LOG2E))
    if KIND >= 1:
        w = (w + s * tl.maximum(shift, _FLOOR)) * keep
    if KIND >= 2:
        q = q * keep * keep
    return top, tl.sum(s * keep, axis=0), tl.sum(w, axis=0), tl.sum(q, axis=0)


@triton.jit
def _first_at(row, V, m, scale, softcap, SHAPE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr):
    """The first column whose u is m, or -1. One more read of the row."""
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    first = tl.full((LANES,), 2147483647, tl.int32)
    for start in range(0, V, BLOCK):
        inside = start + cols < V
        u = _u(tl.load(row + start + cols, mask=inside, other=0.0).to(tl.float32), scale, softcap, SHAPE)
        first = tl.minimum(first, tl.min(tl.where(inside & (u == m), start + cols, 2147483647), axis=1))
    found = tl.min(first, axis=0)
    return tl.where(found == 2147483647, -1, found)


@triton.jit
def _target_u(row, target, V, scale, softcap, SHAPE: tl.constexpr):
    x = tl.load(row + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    return _u(x, scale, softcap, SHAPE)


@triton.jit
def _expm1(x):
    series = 1.0 + x * (1 / 5 + x * (1 / 30 + x * (1 / 210)))
    series = x + x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24) * series))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)  # the series is off by less than 1e-8 there


@triton.jit
def _write_zeros(out, V, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr):
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    zeros = tl.zeros((LANES, COLS), out.dtype.element_ty)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        tl.store(out + start + cols, zeros, eviction_policy="evict_first")
    if full < V:
        tl.store(out + full + cols, zeros, mask=full + cols < V, eviction_policy="evict_first")


@triton.jit
def _gradient(x, m, k, constant, linear, quadratic, scale, softcap, inv_t, SHAPE: tl.constexpr, KIND: tl.constexpr):
    u = _u(x, scale, softcap, SHAPE)
    slope = _dz_dx(u, scale, inv_t, SHAPE)
    d = u - m
    factor = constant * slope
    if KIND >= 1:
        factor += linear * slope * tl.maximum(d, _FLOOR)
    e = tl.exp2(d * (k * _LOG2E))
    if KIND >= 2:
        factor += quadratic * slope * e
    return e * factor


@triton.jit
def _write_gradient(
    row, out, V,
    target, u_target, m, s, logp, d_target, d_constant, d_log, d_prob,
    k, scale, softcap, inv_t,
    SHAPE: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """d loss / dx_j = (d_target (1[j = target] - p_j) + p_j (d_constant + d_log log p_j + d_prob p_j)) dz_j / dx_j, with
    p_j = e^k(u_j - m) / s. KIND 0: d_target alone. 1: d_constant and d_log as well. 2: all."""
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    # Without the target's own term this is e (constant + linear (u_j - m) + quadratic e) dz_j / dx_j, e = e^k(u_j - m).
    constant = -d_target / s
    linear = 0.0
    quadratic = 0.0
    if KIND >= 1:
        constant += (d_constant - d_log * tl.log(s)) / s
        linear = k * d_log / s
    if KIND >= 2:
        quadratic = d_prob / (s * s)
    full = V // BLOCK * BLOCK
    # Backwards: what was read last is the surest to be in L2 still.
    if full < V:
        inside = full + cols < V
        x = tl.load(row + full + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        g = _gradient(x, m, k, constant, linear, quadratic, scale, softcap, inv_t, SHAPE, KIND)
        tl.store(out + full + cols, g.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    for done in range(0, full, BLOCK):
        at = full - BLOCK - done
        x = tl.load(row + at + cols, eviction_policy="evict_first").to(tl.float32)
        g = _gradient(x, m, k, constant, linear, quadratic, scale, softcap, inv_t, SHAPE, KIND)
        tl.store(out + at + cols, g.to(out.dtype.element_ty), eviction_policy="evict_first")
    # The target's gradient is formed apart: 1 - p_y cancels as p_y -> 1, -expm1(logp) does not, and adding 1 to a stored
    # 16-bit value would lose it. One store for the row, which the barrier orders behind the tiles' stores.
    g = -d_target * _expm1(logp)
    if KIND >= 1:
        factor = d_constant + d_log * tl.maximum(logp, _FLOOR)
        if KIND >= 2:
            factor += d_prob * tl.exp(logp)
        g += tl.exp(logp) * factor
    g *= _dz_dx(u_target, scale, inv_t, SHAPE)
    tl.debug_barrier()
    tl.store(out + target, g.to(out.dtype.element_ty), mask=(target >= 0) & (target < V))
