"""One row of logits inside a Triton kernel: its tiles, the transform that it is read with, its statistics, its gradient.

A tile is ACCESSES pieces [LANES, COLS], a lane being a thread of the program. A lane reduces its own elements of all pieces
without exchange between threads, and all loads of a tile are issued before the first value is needed. What is known at compile
time has an upper-case name; TILE is a `launch.Tile`.

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

#: What a `RowTransform` is to a kernel. The softmax of z = k u(x), k > 0, runs over u = tanh(x scale / softcap), or x where
#: softcap is None, or -x where `mirrored` is not None, as a negative scale asks for.
Transform = namedtuple("Transform", "scale softcap mirrored")
#: A row of V logits, the columns that each thread takes of a piece, and how they are read.
Stream = namedtuple("Stream", "row V cols k inv_t scale softcap mirrored")


# ---- tiles: which columns each thread takes, and how they are loaded


@triton.jit
def _columns(TILE, WIDE):
    if WIDE:  # neighbours belong to one thread: a 128-bit access
        return tl.arange(0, TILE.LANES)[:, None] * TILE.COLS + tl.arange(0, TILE.COLS)[None, :]
    else:  # neighbours belong to neighbouring threads: single elements, side by side
        return tl.arange(0, TILE.LANES)[:, None] + tl.arange(0, TILE.COLS)[None, :] * TILE.LANES


@triton.jit
def _at_row(x, row, T, stride_a, stride_t, TILE):
    """Where a row of x [A, T, V] begins; of [n, V] where T is None."""
    offset = row * stride_t if T is None else (row // T) * stride_a + (row % T) * stride_t
    if TILE.ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return x + offset


@triton.jit
def _read_as(logits, V, row, T, stride_a, stride_t, inv_t, transform, TILE):
    """A row of logits [A, T, V] as the fields of a Stream before its transform, whose None no function can return."""
    at = _at_row(logits, row, T, stride_a, stride_t, TILE)
    k = tl.abs(transform.scale * inv_t) if transform.softcap is None else transform.softcap * inv_t
    return at, V, _columns(TILE, TILE.ALIGNED), k, inv_t


@triton.jit
def _piece(at, i, cols):
    """Columns of piece i of the tile that begins at `at`, a column or a pointer to it."""
    return at + i * (cols.shape[0] * cols.shape[1]) + cols


@triton.jit
def _load(of, at, PIECES, END, HINT):
    """Pieces of a row from column `at` on. END: they may reach beyond the row's end, and are 0 there."""
    xs = ()
    for i in tl.static_range(PIECES):
        if END:
            here = _piece(at, i, of.cols)
            x = tl.load(of.row + here, mask=here < of.V, other=0.0, eviction_policy=HINT)
        else:
            x = tl.load(_piece(of.row + at, i, of.cols), eviction_policy=HINT)
        xs = xs + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return xs


@triton.jit
def _store(out, at, i, of, x, END, HINT):
    """Write piece i of the tile from column `at` on."""
    here = _piece(at, i, of.cols)
    if END:
        tl.store(out + here, x.to(out.dtype.element_ty), mask=here < of.V, eviction_policy=HINT)
    else:
        tl.store(out + here, x.to(out.dtype.element_ty), eviction_policy=HINT)


@triton.jit
def _write_zeros(out, V, TILE):
    cols = _columns(TILE, TILE.ALIGNED)
    STEP: tl.constexpr = TILE.LANES * TILE.COLS
    zeros = tl.zeros(cols.shape, out.dtype.element_ty)
    full = V // STEP * STEP
    for start in range(0, full, STEP):
        tl.store(out + start + cols, zeros, eviction_policy=TILE.LAST_HINT)
    if full < V:
        tl.store(out + full + cols, zeros, mask=full + cols < V, eviction_policy=TILE.LAST_HINT)


@triton.jit
def _to_boundary(row, V, COLS):
    """How many elements of a row lie before the first 16-byte boundary; COLS elements are 16 bytes."""
    past = (row.to(tl.int64) // (row.dtype.element_ty.primitive_bitwidth // 8)) % COLS
    return tl.minimum((COLS - past) % COLS, V).to(tl.int32)


# ---- statistics


@triton.jit
def _u(x, of):
    x = x.to(tl.float32)
    if of.softcap is not None:
        # tanh(v) = 1 - 2 / (e^2v + 1), off by 6e-8: times the cap, the spacing of fp32 numbers near it.
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2E * of.scale / of.softcap)) + 1.0)
    elif of.mirrored is not None:
        return -x
    else:
        return x


@triton.jit
def _dz_dx(u, of):
    slope = of.scale * of.inv_t
    if of.softcap is not None:
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
def _fold(sums, xs, at, of, c, END, KIND):
    """Fold a tile into every lane's running maximum m of u, b = _base(m, c), sum s of 2^d for d = c u - b, with KIND >= 1 sum w
    of 2^d d, with KIND = 2 sum q of 2^2d. END: columns from V on are left out."""
    m, b, s, w, q = sums
    us = ()
    for i in tl.static_range(len(xs)):
        u = _u(xs[i], of)
        if END:  # -inf is put in after u is computed: tanh would turn it into a finite number, and the mirror into +inf.
            u = tl.where(_piece(at, i, of.cols) < of.V, u, _NEG_INF)
        us = us + (u,)  # type: ignore[assignment]  # noqa: RUF005
    top = us[0]  # type: ignore[misc]
    for i in tl.static_range(1, len(xs)):
        top = tl.maximum(top, us[i])
    m = tl.maximum(m, tl.max(top, axis=1))
    base = _base(m, c)
    s_tile = tl.zeros(of.cols.shape, tl.float32)
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
def _inside(of, start):
    """A piece that may reach beyond the row's end: which columns are in the row, and their u."""
    inside = start + of.cols < of.V
    return inside, _u(tl.load(of.row + start + of.cols, mask=inside, other=0.0), of)


@triton.jit
def _ties(of, m, TILE):
    """How many columns have u = m; NaN if one is NaN. The sum of e^k(u - m) of a row far from 0, where all others are less
    than e^-22 (a row of the smallest finite number, for one)."""
    found = tl.full((TILE.LANES,), 0.0, tl.float32)
    for start in range(0, of.V, TILE.LANES * TILE.COLS):
        inside, u = _inside(of, start)
        found += tl.sum(tl.where(inside, tl.where(u == m, 1.0, tl.where(u != u, u, 0.0)), 0.0), axis=1)
    return tl.sum(found, axis=0)


@triton.jit
def _first_at(of, m, TILE):
    """The first column whose u is m, or -1. Reads the row once more."""
    first = tl.full((TILE.LANES,), 2147483647, tl.int32)
    for start in range(0, of.V, TILE.LANES * TILE.COLS):
        inside, u = _inside(of, start)
        first = tl.minimum(first, tl.min(tl.where(inside & (u == m), start + of.cols, 2147483647), axis=1))
    found = tl.min(first, axis=0)
    return tl.where(found == 2147483647, -1, found)


@triton.jit
def _softmax_partials(of, KIND, KEPT, TILE):
    """m = max u, s = sum of e^k(u - m), w = sum of e^k(u - m) k(u - m), q = sum of e^2k(u - m) of one row, and its
    last KEPT tiles. The last ENDS tiles are loaded at once."""
    ACCESSES: tl.constexpr = TILE.ACCESSES
    ENDS: tl.constexpr = TILE.ENDS
    HINT: tl.constexpr = TILE.FIRST_HINT
    LAST_HINT: tl.constexpr = TILE.LAST_HINT
    c = of.k * _LOG2E
    m = tl.full((TILE.LANES,), _NEG_INF, tl.float32)
    b = tl.full((TILE.LANES,), -_FAR, tl.float32)
    s = tl.full((TILE.LANES,), 0.0, tl.float32)
    sums = (m, b, s, s, s)
    end = ((of.V + TILE.BLOCK - 1) // TILE.BLOCK - ENDS) * TILE.BLOCK
    for start in tl.range(0, end, TILE.BLOCK, num_stages=TILE.STAGES):
        sums = _fold(sums, _load(of, start, ACCESSES, False, HINT), start, of, c, False, KIND)
    xs = _load(of, end, ACCESSES * (ENDS - 1), False, LAST_HINT if KEPT >= ENDS else HINT)
    xs = xs + _load(of, end + (ENDS - 1) * TILE.BLOCK, ACCESSES, True, LAST_HINT if KEPT > 0 else HINT)
    for i in tl.static_range(ENDS):
        tile = xs[i * ACCESSES : (i + 1) * ACCESSES]
        sums = _fold(sums, tile, end + i * TILE.BLOCK, of, c, i == ENDS - 1, KIND)
    m, b, s, w, q = sums
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
        s = _ties(of, top, TILE)
        w = 0.0 * s
        q = s
    return top, s, w, q, xs[(ENDS - KEPT) * ACCESSES :]


@triton.jit
def _target_u(of, target):
    return _u(tl.load(of.row + target, mask=(target >= 0) & (target < of.V), other=float("nan")), of)


@triton.jit
def _expm1(x):
    series = 1.0 + x * (1 / 5 + x * (1 / 30 + x * (1 / 210)))
    series = x + x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24) * series))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)  # the series is off by less than 1e-8 there


# ---- the gradient


@triton.jit
def _factors(m, s, k, KIND, d_target, d_constant, d_log, d_prob):
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
def _gradient(x, of, KIND, unit, c, b, constant, linear, quadratic):
    u = _u(x, of)
    slope = _dz_dx(u, of)
    d = _fma(unit * u, c, -b)
    factor = constant * slope
    if KIND >= 1:
        factor = _fma(linear * slope, tl.maximum(d, _FLOOR), factor)
    e = tl.exp2(d)
    if KIND >= 2:
        factor = _fma(quadratic * slope, e, factor)
    return e * factor


@triton.jit
def _store_at(out, id, of, u, logp, KIND, d_target, d_constant, d_log, d_prob):
    """The gradient of the logit of an id to whose log-prob a slope belongs, computed separately: 1 - p_y cancels as p_y -> 1,
    -expm1(logp) does not, and adding 1 to a stored 16-bit value would lose it."""
    g = -d_target * _expm1(logp)
    if KIND >= 1:
        factor = d_constant + d_log * tl.maximum(logp, _FLOOR)
        if KIND >= 2:
            factor += d_prob * tl.exp(logp)
        g += tl.exp(logp) * factor
    g = (g * _dz_dx(u, of)).to(tl.float32)
    tl.debug_barrier()  # one store for the row, behind those of its tiles
    tl.store(out + id, g.to(out.dtype.element_ty), mask=(id >= 0) & (id < of.V))


@triton.jit
def _write_tile(xs, out, at, of, KIND, END, HINT, unit, factors):
    for i in tl.static_range(len(xs)):
        _store(out, at, i, of, _gradient(xs[i], of, KIND, unit, *factors), END, HINT)


@triton.jit
def _write_gradient(of, out, kept, target, u_target, logp, unit, k, m, s, KIND, slopes, TILE):
    """d loss / dx_j = (d_target (1[j = target] - p_j) + p_j (d_constant + d_log log p_j + d_prob p_j)) dz_j / dx_j of the
    `slopes`, with p_j = e^k(unit u_j - m) / s, m the maximum of unit u. KIND 0: d_target alone. 1: d_constant and d_log as well. 2:
    all. `kept`: the last tiles, where they are in registers, else None. PEELED: 128-bit accesses between the row's
    first and last 16-byte boundary."""
    ACCESSES: tl.constexpr = TILE.ACCESSES
    COLS: tl.constexpr = TILE.COLS
    HINT: tl.constexpr = TILE.LAST_HINT
    ENDS: tl.constexpr = 1 if kept is None else len(kept) // ACCESSES
    factors = _factors(m, s, k, KIND, *slopes)
    rest = of
    rest_out = out
    if TILE.PEELED:
        head = _to_boundary(of.row, of.V, COLS)
        width = (of.V - head) // COLS * COLS
        i = tl.arange(0, 2 * COLS)
        here = tl.where(i < COLS, i, head + width + i - COLS)
        beside = tl.where(i < COLS, i < head, here < of.V)
        x = tl.load(of.row + here, mask=beside, other=0.0, eviction_policy=HINT)
        g = _gradient(x, of, KIND, unit, *factors)
        tl.debug_barrier()  # every warp loads these few elements, one of them stores them
        tl.store(out + here, g.to(out.dtype.element_ty), mask=beside, eviction_policy=HINT)
        first = tl.multiple_of(of.row + head, 16)
        rest = Stream(first, tl.multiple_of(width, COLS), _columns(TILE, True), *of[3:])
        # Rows of the gradient lie as many elements behind a boundary of COLS elements as those of the logits (see `choose`). Of
        # fp32 logits these are 8 bytes of a 16-bit gradient, which is what a thread stores of it at a time.
        rest_out = tl.multiple_of(out + head, COLS * out.dtype.element_ty.primitive_bitwidth // 8)
    # Backwards: the columns read last are the most likely to be still in L2.
    end = tl.maximum(tl.cdiv(rest.V, TILE.BLOCK) - ENDS, 0) * TILE.BLOCK
    ends = kept
    if kept is None:
        ends = _load(rest, end, ACCESSES, True, HINT)
    for i in tl.static_range(ENDS - 1, -1, -1):
        tile = ends[i * ACCESSES : (i + 1) * ACCESSES]
        _write_tile(tile, rest_out, end + i * TILE.BLOCK, rest, KIND, i == ENDS - 1, HINT, unit, factors)
    for done in tl.range(0, end, TILE.BLOCK, num_stages=TILE.STAGES):
        at = end - TILE.BLOCK - done
        _write_tile(_load(rest, at, ACCESSES, False, HINT), rest_out, at, rest, KIND, False, HINT, unit, factors)
    _store_at(out, target, of, u_target, logp, KIND, *slopes)
