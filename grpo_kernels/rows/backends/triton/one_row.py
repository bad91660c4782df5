"""One row of logits inside a Triton kernel: its tiles, the transform that it is read with, its statistics, its gradient.

A tile is ACCESSES pieces [LANES, COLS], a lane being a thread of the program. A lane reduces its own elements of all pieces
without exchange between threads, and all loads of a tile are issued before the first value is needed.

The statistics of unaligned rows (an odd vocabulary) are read by single elements, their gradient alone is peeled to 128-bit
accesses: sums from a 16-byte boundary on have another order, and so other bits, for each place that a row may lie at."""

import math
from collections import namedtuple

import triton
import triton.language as tl

_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2.0))
_NEG_INF = tl.constexpr(-math.inf)
#: Stands for -inf where a factor of exactly 0 follows: 0 * -inf would be NaN.
_FLOOR = tl.constexpr(-1e30)
#: Beyond this, the exponentials of adjacent fp32 numbers differ by a factor of e^22 or more: see `_ties`.
_FAR = tl.constexpr(2.0**29)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# ---- tiles: which columns each thread takes, and how they are loaded


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


@triton.jit
def _to_boundary(row, V, COLS: tl.constexpr):
    """How many elements of a row lie before the first 16-byte boundary; COLS elements are 16 bytes."""
    past = (row.to(tl.int64) // (row.dtype.element_ty.primitive_bitwidth // 8)) % COLS
    return tl.minimum((COLS - past) % COLS, V).to(tl.int32)


@triton.jit
def _load_full(row, at, cols, PIECES: tl.constexpr, HINT: tl.constexpr):
    """Pieces of a row from column `at` on, none of which reaches beyond the row's end."""
    STEP: tl.constexpr = cols.shape[0] * cols.shape[1]
    xs = ()
    for i in tl.static_range(PIECES):
        xs = xs + (tl.load(row + at + i * STEP + cols, eviction_policy=HINT),)  # type: ignore[assignment]  # noqa: RUF005
    return xs


@triton.jit
def _load_end(row, at, V, cols, PIECES: tl.constexpr, HINT: tl.constexpr):
    """The same for pieces that may reach beyond the row's end: 0 there."""
    STEP: tl.constexpr = cols.shape[0] * cols.shape[1]
    xs = ()
    for i in tl.static_range(PIECES):
        here = at + i * STEP + cols
        xs = xs + (tl.load(row + here, mask=here < V, other=0.0, eviction_policy=HINT),)  # type: ignore[assignment]  # noqa: RUF005
    return xs


@triton.jit
def _write_zeros(out, V, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr, HINT: tl.constexpr):
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    zeros = tl.zeros((LANES, COLS), out.dtype.element_ty)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        tl.store(out + start + cols, zeros, eviction_policy=HINT)
    if full < V:
        tl.store(out + full + cols, zeros, mask=full + cols < V, eviction_policy=HINT)


# ---- statistics

# z = k u(x) with k > 0: the softmax runs over u. SHAPE is "linear" (u = x), "mirrored" (u = -x, for a negative scale) or
# "softcap" (u = tanh).


@triton.jit
def _u(x, scale, softcap, SHAPE: tl.constexpr):
    x = x.to(tl.float32)
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


# e^(k u) is 2^(c u - b) with c = k log2(e) and a whole number b near the maximum of c u. One fused multiply-add, which rounds
# once, makes the exponent, so a shift of the logits costs no precision, and whole numbers make sums at two b's comparable
# without rounding.


@triton.jit
def _fma(x, y, z):
    """x y + z, rounded once."""
    if _INTERPRETED:  # that of Triton 3.6 and before rounds twice
        return (x.to(tl.float64) * y + z).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def _base(m, c):
    return tl.maximum(tl.ceil(m * c), -_FAR)


@triton.jit
def _fold(m, b, s, w, q, xs, at, V, cols, c, scale, softcap, END: tl.constexpr, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """Fold a tile into every lane's running maximum m of u, b = _base(m, c), sum s of 2^d for d = c u - b, with KIND >= 1 sum w
    of 2^d d, with KIND = 2 sum q of 2^2d. END: columns from V on are left out."""
    STEP: tl.constexpr = cols.shape[0] * cols.shape[1]
    us = ()
    for i in tl.static_range(len(xs)):
        u = _u(xs[i], scale, softcap, SHAPE)
        if END:  # -inf is put in after u is computed: tanh would turn it into a finite number, and the mirror into +inf.
            u = tl.where(at + i * STEP + cols < V, u, _NEG_INF)
        us = us + (u,)  # type: ignore[assignment]  # noqa: RUF005
    top = us[0]  # type: ignore[misc]
    for i in tl.static_range(1, len(xs)):
        top = tl.maximum(top, us[i])
    m = tl.maximum(m, tl.max(top, axis=1))
    base = _base(m, c)
    s_tile = tl.zeros(cols.shape, tl.float32)
    w_tile = s_tile
    q_tile = s_tile
    for i in tl.static_range(len(xs)):
        d = _fma(us[i], c, -base[:, None])
        e = tl.exp2(d)
        s_tile += e
        if KIND >= 1:
            w_tile = _fma(e, tl.maximum(d, _FLOOR), w_tile)
        if KIND >= 2:
            q_tile = _fma(e, e, q_tile)
    shift = b - base
    keep = tl.exp2(shift)
    if KIND >= 1:
        w = (w + s * shift) * keep + tl.sum(w_tile, axis=1)
    if KIND >= 2:
        q = q * keep * keep + tl.sum(q_tile, axis=1)
    return m, base, s * keep + tl.sum(s_tile, axis=1), w, q


@triton.jit
def _ties(row, V, m, scale, softcap, SHAPE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr):
    """How many columns have u = m; NaN if one is NaN. The sum of e^k(u - m) of a row far from 0, where all others are less
    than e^-22 (a row of the smallest finite number, for one)."""
    cols = _columns(ALIGNED, LANES, COLS)
    found = tl.zeros((LANES,), tl.float32)
    for start in range(0, V, LANES * COLS):
        inside = start + cols < V
        u = _u(tl.load(row + start + cols, mask=inside, other=0.0), scale, softcap, SHAPE)
        found += tl.sum(tl.where(inside, tl.where(u == m, 1.0, tl.where(u != u, u, 0.0)), 0.0), axis=1)
    return tl.sum(found, axis=0)


@triton.jit
def _softmax_partials(
    row, V, k, scale, softcap,
    SHAPE: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr,
    COLS: tl.constexpr, ENDS: tl.constexpr, KEPT: tl.constexpr, HINT: tl.constexpr, LAST_HINT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """m = max u, s = sum of e^k(u - m), w = sum of e^k(u - m) k(u - m), q = sum of e^2k(u - m) of one row, and its
    last KEPT tiles. The last ENDS tiles are loaded at once."""
    BLOCK: tl.constexpr = ACCESSES * LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    c = k * _LOG2E
    m = tl.full((LANES,), _NEG_INF, tl.float32)
    b = tl.full((LANES,), -_FAR, tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    w = tl.zeros((LANES,), tl.float32)
    q = tl.zeros((LANES,), tl.float32)
    end = ((V + BLOCK - 1) // BLOCK - ENDS) * BLOCK
    for start in tl.range(0, end, BLOCK, num_stages=STAGES):
        xs = _load_full(row, start, cols, ACCESSES, HINT)
        m, b, s, w, q = _fold(m, b, s, w, q, xs, start, V, cols, c, scale, softcap, False, SHAPE, KIND)
    xs = _load_full(row, end, cols, ACCESSES * (ENDS - 1), LAST_HINT if KEPT >= ENDS else HINT)
    xs = xs + _load_end(row, end + (ENDS - 1) * BLOCK, V, cols, ACCESSES, LAST_HINT if KEPT > 0 else HINT)
    for i in tl.static_range(ENDS):
        tile = xs[i * ACCESSES : (i + 1) * ACCESSES]
        m, b, s, w, q = _fold(
            m, b, s, w, q, tile, end + i * BLOCK, V, cols, c, scale, softcap, i == ENDS - 1, SHAPE, KIND
        )  # fmt: skip
    top = tl.max(m, axis=0)
    base = _base(top, c)
    shift = b - base
    keep = tl.exp2(shift)
    # From sums at 2^(c u - base) to sums at e^k(u - m).
    r = tl.where(top == _NEG_INF, 0.0, _fma(top, c, -base))
    up = tl.exp2(-r)
    sum_e = tl.sum(s * keep, axis=0)
    w = (tl.sum((w + s * shift) * keep, axis=0) - r * sum_e) * up * _LN2
    q = tl.sum(q * keep * keep, axis=0) * up * up
    s = sum_e * up
    s = tl.where((s < 1.0) & (top > _NEG_INF), 1.0, s)  # rounding; the maximum itself adds 1
    if (tl.abs(top * c) >= _FAR) & (tl.abs(top) < -_NEG_INF):
        s = _ties(row, V, top, scale, softcap, SHAPE, ALIGNED, LANES, COLS)
        w = 0.0 * s
        q = s
    return top, s, w, q, xs[(ENDS - KEPT) * ACCESSES :]


@triton.jit
def _first_at(row, V, m, scale, softcap, SHAPE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr):
    """The first column whose u is m, or -1. Reads the row once more."""
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    first = tl.full((LANES,), 2147483647, tl.int32)
    for start in range(0, V, BLOCK):
        inside = start + cols < V
        u = _u(tl.load(row + start + cols, mask=inside, other=0.0), scale, softcap, SHAPE)
        first = tl.minimum(first, tl.min(tl.where(inside & (u == m), start + cols, 2147483647), axis=1))
    found = tl.min(first, axis=0)
    return tl.where(found == 2147483647, -1, found)


@triton.jit
def _target_u(row, target, V, scale, softcap, SHAPE: tl.constexpr):
    x = tl.load(row + target, mask=(target >= 0) & (target < V), other=float("nan"))
    return _u(x, scale, softcap, SHAPE)


@triton.jit
def _expm1(x):
    series = 1.0 + x * (1 / 5 + x * (1 / 30 + x * (1 / 210)))
    series = x + x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24) * series))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)  # the series is off by less than 1e-8 there


# ---- the gradient


@triton.jit
def _gradient(x, unit, c, b, constant, linear, quadratic, scale, softcap, inv_t, SHAPE: tl.constexpr, KIND: tl.constexpr):
    u = _u(x, scale, softcap, SHAPE)
    slope = _dz_dx(u, scale, inv_t, SHAPE)
    d = _fma(unit * u, c, -b)
    factor = constant * slope
    if KIND >= 1:
        factor = _fma(linear * slope, tl.maximum(d, _FLOOR), factor)
    e = tl.exp2(d)
    if KIND >= 2:
        factor = _fma(quadratic * slope, e, factor)
    return e * factor


@triton.jit
def _factors(m, s, k, d_target, d_constant, d_log, d_prob, KIND: tl.constexpr):
    """c and b of the exponent, and the factors of `_gradient`: d loss / dz_j = 2^d (constant + linear d + quadratic 2^d)
    without the target's own term, d = c v_j - b for e^k(v_j - m), where v_j has the maximum m."""
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
def _store_at(
    out, id, V, u, logp, d_target, d_constant, d_log, d_prob, scale, inv_t, SHAPE: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """The gradient of the logit of an id to whose log-prob a slope belongs, computed separately: 1 - p_y cancels as p_y -> 1,
    -expm1(logp) does not, and adding 1 to a stored 16-bit value would lose it."""
    g = -d_target * _expm1(logp)
    if KIND >= 1:
        factor = d_constant + d_log * tl.maximum(logp, _FLOOR)
        if KIND >= 2:
            factor += d_prob * tl.exp(logp)
        g += tl.exp(logp) * factor
    g = (g * _dz_dx(u, scale, inv_t, SHAPE)).to(tl.float32)
    tl.debug_barrier()  # one store for the row, behind those of its tiles
    tl.store(out + id, g.to(out.dtype.element_ty), mask=(id >= 0) & (id < V))


@triton.jit
def _write_tile(
    xs, out, at, V, cols, unit, c, b, constant, linear, quadratic, scale, softcap, inv_t,
    END: tl.constexpr, SHAPE: tl.constexpr, KIND: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = cols.shape[0] * cols.shape[1]
    for i in tl.static_range(len(xs)):
        here = at + i * STEP + cols
        g = _gradient(xs[i], unit, c, b, constant, linear, quadratic, scale, softcap, inv_t, SHAPE, KIND)
        g = g.to(out.dtype.element_ty)
        if END:
            tl.store(out + here, g, mask=here < V, eviction_policy=HINT)
        else:
            tl.store(out + here, g, eviction_policy=HINT)


@triton.jit
def _write_gradient(
    row, out, V, kept,
    target, u_target, unit, m, s, logp, d_target, d_constant, d_log, d_prob,
    k, scale, softcap, inv_t,
    SHAPE: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, PEELED: tl.constexpr, ACCESSES: tl.constexpr,
    LANES: tl.constexpr, COLS: tl.constexpr, HINT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d loss / dx_j = (d_target (1[j = target] - p_j) + p_j (d_constant + d_log log p_j + d_prob p_j)) dz_j / dx_j, with
    p_j = e^k(unit u_j - m) / s, m the maximum of unit u. KIND 0: d_target alone. 1: d_constant and d_log as well. 2: all.
    `kept`: the last tiles, where they are in registers, else None. PEELED: 128-bit accesses between the row's first and last
    16-byte boundary."""
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
        g = _gradient(x, unit, c, b, constant, linear, quadratic, scale, softcap, inv_t, SHAPE, KIND)
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
            unit, c, b, constant, linear, quadratic, scale, softcap, inv_t, i == ENDS - 1, SHAPE, KIND, HINT,
        )  # fmt: skip
    for done in tl.range(0, end, BLOCK, num_stages=STAGES):
        at = end - BLOCK - done
        xs = _load_full(first, at, cols, ACCESSES, HINT)
        _write_tile(
            xs, first_out, at, width, cols,
            unit, c, b, constant, linear, quadratic, scale, softcap, inv_t, False, SHAPE, KIND, HINT,
        )  # fmt: skip
    _store_at(out, target, V, u_target, logp, d_target, d_constant, d_log, d_prob, scale, inv_t, SHAPE, KIND)


# ---- ids of rows

#: What the fused kernel gets of the k ids that the tokens of n rows list.
#:   token         [n]: the token of each row
#:   offsets, ids  [m + 1], [k]: the ids of each token
#:   us, slopes    [k], memory: u of each id, what arrives at its log-prob
#:   inputs        each [k], of their formula
#:   numbers       of their formula
OfListed = namedtuple("OfListed", "token offsets ids us slopes inputs numbers")


@triton.jit
def _at_ids(
    listed, t, of_row, sums, d_term, LISTED: tl.constexpr, PHASE: tl.constexpr, SHAPE: tl.constexpr, LANES: tl.constexpr
):
    """The sum over the ids of token t of what the formula has in a phase. In the last these are slopes: times `d_term` they arrive
    at log-probs, and are kept like the logits, which the gradient may overwrite."""
    row, V, k, top, log_s, scale, softcap = of_row
    total = tl.zeros((LANES,), tl.float64)
    end = tl.load(listed.offsets + t + 1)
    for start in range(tl.load(listed.offsets + t), end, LANES):
        at = start + tl.arange(0, LANES)
        here = at < end
        u = _target_u(row, tl.load(listed.ids + at, mask=here, other=-1), V, scale, softcap, SHAPE)
        x = LISTED(((k * u - top) - log_s,), tl.where(here, at, start), listed.inputs, listed.numbers, sums, PHASE)
        if d_term is not None:
            x = tl.where(d_term == 0.0, 0.0, d_term * x)
            tl.store(listed.us + at, u, mask=here)
            tl.store(listed.slopes + at, x, mask=here)
        total += tl.where(here, x, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _write_at_ids(
    listed, t, of_row, out, target, u, logp, d_logp, total, d_constant, d_log, inv_t, SHAPE: tl.constexpr, LANES: tl.constexpr
):
    """The gradient of the logits at the target and at the ids of token t, among which the target may be: combined before it is
    rounded, and stored last."""
    _, V, k, top, log_s, scale, _ = of_row
    _store_at(out, target, V, u, logp, d_logp, d_constant + (d_logp - total), d_log, 0.0, scale, inv_t, SHAPE, 1)
    end = tl.load(listed.offsets + t + 1)
    for start in range(tl.load(listed.offsets + t), end, LANES):
        at = start + tl.arange(0, LANES)
        id = tl.load(listed.ids + at, mask=at < end, other=-1)
        v = tl.load(listed.us + at, mask=at < end, other=0.0)
        x = tl.load(listed.slopes + at, mask=at < end, other=0.0).to(tl.float64) + tl.where(id == target, d_logp, 0.0)
        _store_at(out, id, V, v, (k * v - top) - log_s, x, d_constant + (x - total), d_log, 0.0, scale, inv_t, SHAPE, 1)
