"""The gradient of one row of logits inside a Triton kernel."""

import triton
import triton.language as tl

from .triton_rows import _FAR, _FLOOR, _LN2, _LOG2E, _NEG_INF, _base, _dz_dx, _expm1, _fma, _u
from .triton_tiles import _columns, _load_end, _load_full, _to_boundary


@triton.jit
def _gradient(x, c, b, constant, linear, quadratic, scale, softcap, inv_t, SHAPE: tl.constexpr, KIND: tl.constexpr):
    u = _u(x, scale, softcap, SHAPE)
    slope = _dz_dx(u, scale, inv_t, SHAPE)
    d = _fma(u, c, -b)
    factor = constant * slope
    if KIND >= 1:
        factor += linear * slope * tl.maximum(d, _FLOOR)
    e = tl.exp2(d)
    if KIND >= 2:
        factor += quadratic * slope * e
    return e * factor


@triton.jit
def _factors(m, s, k, d_target, d_constant, d_log, d_prob, KIND: tl.constexpr):
    """c and b of the exponent, and the factors of `_gradient`: d loss / dz_j = 2^(c u_j - b) (constant + linear d + quadratic
    2^d) without the target's own term, d = c u_j - b."""
    c = k * _LOG2E
    b = _base(m, c)
    # Far from 0 only columns equal to m matter: any c will do that separates them from the others and keeps c m finite.
    far = (tl.abs(m * c) >= _FAR) & (tl.abs(m) < -_NEG_INF)
    c = tl.where(far, tl.exp2(30.0 - tl.ceil(tl.log2(tl.abs(m)))), c)
    b = tl.where(far, c * m, b)
    r = tl.where(m == _NEG_INF, 0.0, _fma(m, c, -b))
    down = tl.exp2(-r) / s
    constant = -d_target
    linear = 0.0
    quadratic = 0.0
    if KIND >= 1:
        constant += d_constant - d_log * (tl.log(s) + r * _LN2)
        linear = _LN2 * d_log * down
    if KIND >= 2:
        quadratic = d_prob * down * down
    return c, b, constant * down, linear, quadratic


@triton.jit
def _target_gradient(
    u, logp, d_target, d_constant, d_log, d_prob, scale, inv_t, SHAPE: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """That of the target's logit, computed separately: 1 - p_y cancels as p_y -> 1, -expm1(logp) does not, and adding 1 to a
    stored 16-bit value would lose it."""
    g = -d_target * _expm1(logp)
    if KIND >= 1:
        factor = d_constant + d_log * tl.maximum(logp, _FLOOR)
        if KIND >= 2:
            factor += d_prob * tl.exp(logp)
        g += tl.exp(logp) * factor
    return g * _dz_dx(u, scale, inv_t, SHAPE)


@triton.jit
def _write_tile(
    xs, out, at, V, cols, c, b, constant, linear, quadratic, scale, softcap, inv_t,
    END: tl.constexpr, SHAPE: tl.constexpr, KIND: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = cols.shape[0] * cols.shape[1]
    for i in tl.static_range(len(xs)):
        here = at + i * STEP + cols
        g = _gradient(xs[i], c, b, constant, linear, quadratic, scale, softcap, inv_t, SHAPE, KIND)
        g = g.to(out.dtype.element_ty)
        if END:
            tl.store(out + here, g, mask=here < V, eviction_policy=HINT)
        else:
            tl.store(out + here, g, eviction_policy=HINT)


@triton.jit
def _write_gradient(
    row, out, V, kept,
    target, u_target, m, s, logp, d_target, d_constant, d_log, d_prob,
    k, scale, softcap, inv_t,
    SHAPE: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, PEELED: tl.constexpr, ACCESSES: tl.constexpr,
    LANES: tl.constexpr, COLS: tl.constexpr, HINT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d loss / dx_j = (d_target (1[j = target] - p_j) + p_j (d_constant + d_log log p_j + d_prob p_j)) dz_j / dx_j, with
    p_j = e^k(u_j - m) / s. KIND 0: d_target alone. 1: d_constant and d_log as well. 2: all. `kept`: the last tiles, where
    they are in registers, else None. PEELED: 128-bit accesses between the row's first and last 16-byte boundary."""
    BLOCK: tl.constexpr = ACCESSES * LANES * COLS
    ENDS: tl.constexpr = 1 if kept is None else len(kept) // ACCESSES
    c, b, constant, linear, quadratic = _factors(m, s, k, d_target, d_constant, d_log, d_prob, KIND)
    cols = _columns(ALIGNED or PEELED, LANES, COLS)
    first = row
    first_out = out
    width = V
    if PEELED:
        head = _to_boundary(row, V, COLS)
        width = (V - head) // COLS * COLS
        i = tl.arange(0, 2 * COLS)
        here = tl.where(i < COLS, i, head + width + i - COLS)
        beside = tl.where(i < COLS, i < head, here < V)
        x = tl.load(row + here, mask=beside, other=0.0, eviction_policy=HINT)
        g = _gradient(x, c, b, constant, linear, quadratic, scale, softcap, inv_t, SHAPE, KIND)
        tl.debug_barrier()  # every warp loads these few elements, one of them stores them
        tl.store(out + here, g.to(out.dtype.element_ty), mask=beside, eviction_policy=HINT)
        width = tl.multiple_of(width, COLS)
        first = tl.multiple_of(row + head, 16)
        # Rows of the gradient lie as many elements behind a boundary of COLS elements as those of the logits (see `choose`). Of
        # fp32 logits these are 8 bytes of a 16-bit gradient, which is what a thread stores of it at a time.
        first_out = tl.multiple_of(out + head, COLS * out.dtype.element_ty.primitive_bitwidth // 8)
    # Backwards: the columns read last are the most likely to be still in L2.
    end = tl.maximum(tl.cdiv(width, BLOCK) - ENDS, 0) * BLOCK
    ends = kept
    if kept is None:
        ends = _load_end(first, end, width, cols, ACCESSES, HINT)
    for i in tl.static_range(ENDS - 1, -1, -1):
        _write_tile(
            ends[i * ACCESSES : (i + 1) * ACCESSES], first_out, end + i * BLOCK, width, cols,
            c, b, constant, linear, quadratic, scale, softcap, inv_t, i == ENDS - 1, SHAPE, KIND, HINT,
        )  # fmt: skip
    for done in tl.range(0, end, BLOCK, num_stages=STAGES):
        at = end - BLOCK - done
        xs = _load_full(first, at, cols, ACCESSES, HINT)
        _write_tile(
            xs, first_out, at, width, cols,
            c, b, constant, linear, quadratic, scale, softcap, inv_t, False, SHAPE, KIND, HINT,
        )  # fmt: skip
    g_target = _target_gradient(u_target, logp, d_target, d_constant, d_log, d_prob, scale, inv_t, SHAPE, KIND)
    tl.debug_barrier()  # one store for the row, behind those of its tiles
    tl.store(out + target, g_target.to(out.dtype.element_ty), mask=(target >= 0) & (target < V))
