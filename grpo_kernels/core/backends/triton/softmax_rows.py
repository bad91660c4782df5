"""One row of logits inside a Triton kernel: tiles, transform, softmax sums and gradient.

A *tile* is ACCESSES pieces of shape [LANES, COLS]; a lane is a thread of the program. A lane
reduces its own elements of all pieces without exchange between threads, and all loads of a tile are
issued before the first value is needed. Names of compile-time values are upper-case; TILE is a
`launch.Tile`.

x are the logits in memory, z the logits after scale, softcap and temperature. The softmax of z is
computed from *unscaled* logits u, with z = u_to_z * u and u_to_z > 0, so that the loop over a row
has one multiplication less. See `Transform`.

The sums of unaligned rows (an odd vocabulary) are read by single elements, and only their gradient
is written in 128-bit accesses. Sums from a 16-byte boundary on would have another order, and so
other bits, for each offset that a row may have.
"""

import math
from collections import namedtuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
NEG_INF = tl.constexpr(-math.inf)
#: Stands for -inf if a factor of exactly 0 follows: 0 * -inf would be NaN.
LOWEST = tl.constexpr(-1e30)
#: Exponents beyond this are too coarse for fp32: the exponentials of adjacent numbers differ by a
#: factor of e^22 or more. See `count_maxima`.
MAX_EXPONENT = tl.constexpr(2.0**29)
#: No column.
NO_COLUMN = tl.constexpr(2**31 - 1)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

#: Levels of the statistics that sums and gradients are for: log-probs, or also the entropy, or also
#: the sum of squares.
ENTROPY = tl.constexpr(1)
SQUARES = tl.constexpr(2)

#: A `RowTransform` in a kernel. With a softcap u = tanh(x * scale / softcap). Without one (None)
#: u = x, or -x if `mirrored` is not None, for a negative scale.
Transform = namedtuple("Transform", "scale softcap mirrored")

#: A row of logits, and how it is read.
#:
#:     start                 pointer to its first logit
#:     V                     number of columns
#:     columns               [LANES, COLS], the columns that each thread takes of a piece
#:     u_to_z                z = u_to_z * u, see `Transform`
#:     inverse_temperature   of the row
#:     scale, softcap, mirrored   see `Transform`
Row = namedtuple("Row", "start V columns u_to_z inverse_temperature scale softcap mirrored")


# ---- tiles


@triton.jit
def thread_columns(TILE, WIDE):
    """Return the columns of a piece that each thread takes, [LANES, COLS]."""
    if WIDE:  # neighbours belong to one thread: a 128-bit access
        return tl.arange(0, TILE.LANES)[:, None] * TILE.COLS + tl.arange(0, TILE.COLS)[None, :]
    else:  # neighbours belong to neighbouring threads: single elements
        return tl.arange(0, TILE.LANES)[:, None] + tl.arange(0, TILE.COLS)[None, :] * TILE.LANES


@triton.jit
def row_pointer(x, row, T, stride_a, stride_t, TILE):
    """Return a pointer to row a * T + t of x [A, T, V], which is x[a, t].

    If T is None, x is [num_rows, V] with the row stride stride_t.
    """
    offset = row * stride_t if T is None else (row // T) * stride_a + (row % T) * stride_t
    if TILE.ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return x + offset


@triton.constexpr_function
def is_number(x):
    """Return whether an argument is a number and not a pointer."""
    return isinstance(x, float) or not x.dtype.is_ptr()  # a float in the interpreter


@triton.jit
def load_number(x, i):
    """Return x if it is a number for all rows, or else x[i] of a vector [num_rows]."""
    if is_number(x):
        return x
    else:
        return tl.load(x + i)


@triton.jit
def row_fields(
    logits, stride_a, stride_t, inverse_temperature, transform, V, T, first_row, i, TILE
):
    """Return the fields of a `Row` but scale, softcap and mirrored.

    A Triton function cannot return these, since they may be None: the caller adds `*transform`.

    logits, stride_a, stride_t   the rows of logits [A, T, V], see `row_pointer`
    inverse_temperature          a number, or [num_rows]
    first_row, i                 row i of the call is row first_row + i of the logits
    """
    temperature = load_number(inverse_temperature, i)
    start = row_pointer(logits, first_row + i, T, stride_a, stride_t, TILE)
    if transform.softcap is None:
        u_to_z = tl.abs(transform.scale * temperature)
    else:
        u_to_z = transform.softcap * temperature
    return start, V, thread_columns(TILE, TILE.ALIGNED), u_to_z, temperature


@triton.jit
def piece_columns(start, i, columns):
    """Return the columns [LANES, COLS] of piece i of the tile at column `start`.

    If `start` is a pointer, pointers to these columns are returned.
    """
    return start + i * (columns.shape[0] * columns.shape[1]) + columns


@triton.jit
def load_tile(row, start, PIECES, END, HINT):
    """Load PIECES pieces of a row from column `start` on. Returns a tuple of [LANES, COLS].

    END    whether they may reach beyond the end of the row, where 0 is returned
    HINT   cache hint of the loads
    """
    xs = ()
    for i in tl.static_range(PIECES):
        if END:
            columns = piece_columns(start, i, row.columns)
            x = tl.load(row.start + columns, mask=columns < row.V, other=0.0, eviction_policy=HINT)
        else:
            x = tl.load(piece_columns(row.start + start, i, row.columns), eviction_policy=HINT)
        xs = xs + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return xs


@triton.jit
def store_piece(out, start, i, row, x, END, HINT):
    """Write x [LANES, COLS] as piece i of the tile at column `start` of a row.

    out    pointer to the row
    END    whether the piece may reach beyond the end of the row, where nothing is written
    HINT   cache hint of the stores
    """
    columns = piece_columns(start, i, row.columns)
    values = x.to(out.dtype.element_ty)
    if END:
        tl.store(out + columns, values, mask=columns < row.V, eviction_policy=HINT)
    else:
        tl.store(out + columns, values, eviction_policy=HINT)


@triton.jit
def write_zero_row(out, V, TILE):
    """Write 0 into the V columns of the row at the pointer `out`."""
    columns = thread_columns(TILE, TILE.ALIGNED)
    PIECE: tl.constexpr = TILE.LANES * TILE.COLS
    zeros = tl.zeros(columns.shape, out.dtype.element_ty)
    full = V // PIECE * PIECE
    for start in range(0, full, PIECE):
        tl.store(out + start + columns, zeros, eviction_policy=TILE.LAST_HINT)
    if full < V:
        is_inside = full + columns < V
        tl.store(out + full + columns, zeros, mask=is_inside, eviction_policy=TILE.LAST_HINT)


@triton.jit
def elements_to_boundary(row, V, COLS):
    """Return how many elements of a row come before its first 16-byte boundary, at most V.

    COLS elements are 16 bytes.
    """
    ELEMENT_BYTES: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
    past = (row.to(tl.int64) // ELEMENT_BYTES) % COLS
    return tl.minimum((COLS - past) % COLS, V).to(tl.int32)


# ---- the transform


@triton.jit
def unscaled_logit(x, row):
    """Return the unscaled logits u of logits x: tanh(x * scale / softcap), x or -x.

    See `Transform`.
    """
    x = x.to(tl.float32)
    if row.softcap is not None:
        # tanh(v) = 1 - 2 / (e^2v + 1) is off by 6e-8: times the cap, the spacing of fp32 numbers
        # near it.
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E * row.scale / row.softcap)) + 1.0)
    elif row.mirrored is not None:
        return -x
    else:
        return x


@triton.jit
def transform_derivative(u, row):
    """Return dz / dx at unscaled logits u: scale * inverse_temperature, times 1 - u^2 of tanh."""
    derivative = row.scale * row.inverse_temperature
    if row.softcap is not None:
        derivative = derivative * (1.0 - u * u)
    return derivative


@triton.jit
def load_unscaled_logit(row, column):
    """Load u of a single column, NaN if it is outside of the row."""
    is_inside = (column >= 0) & (column < row.V)
    x = tl.load(row.start + column, mask=is_inside, other=float("nan"))
    return unscaled_logit(x, row)


# ---- softmax sums
#
# The exponentials of a row are 2^(c u - base), with c = u_to_z * log2(e) and a whole number `base`
# near the maximum of c u. One fused multiply-add, which rounds once, computes the exponent. So a
# shift of the logits costs no precision, and sums relative to two bases can be added without
# rounding.


@triton.jit
def fma(x, y, z):
    """Return x y + z, rounded once."""
    if INTERPRETED:  # tl.fma of Triton 3.6 and before rounds twice there
        return (x.to(tl.float64) * y + z).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def exponent_base(max_u, c):
    """Return the base of exponents for a maximum of u: max_u * c rounded up, at least -2^29."""
    return tl.maximum(tl.ceil(max_u * c), -MAX_EXPONENT)


@triton.jit
def add_tile(sums, xs, start, row, c, END, LEVEL):
    """Add a tile to the running sums of each lane.

    sums    (max_u, base, sum of 2^d for d = c u - base, sum of 2^d d, sum of 2^2d), [LANES] each.
            The last two are computed from LEVEL = ENTROPY and SQUARES on.
    xs      logits of the tile, a tuple of pieces
    start   column of the tile
    c       u_to_z * log2(e)
    END     whether columns from V on are left out

    Returns the new sums. Where the maximum rises, older sums are rescaled to the new base.
    """
    max_u, base, sum_exp, shifted, squared = sums
    us = ()
    for i in tl.static_range(len(xs)):
        u = unscaled_logit(xs[i], row)
        if END:
            # After u is computed: tanh would turn -inf into a finite number, the mirror into +inf.
            is_inside = piece_columns(start, i, row.columns) < row.V
            u = tl.where(is_inside, u, NEG_INF)
        us = us + (u,)  # type: ignore[assignment]  # noqa: RUF005
    tile_max = us[0]  # type: ignore[misc]
    for i in tl.static_range(1, len(xs)):
        tile_max = tl.maximum(tile_max, us[i])
    max_u = tl.maximum(max_u, tl.max(tile_max, axis=1))
    new_base = exponent_base(max_u, c)
    tile_sum_exp = tl.zeros(row.columns.shape, tl.float32)
    tile_shifted = tile_sum_exp
    tile_squared = tile_sum_exp
    for i in tl.static_range(len(xs)):
        d = fma(us[i], c, -new_base[:, None])
        e = tl.exp2(d)
        tile_sum_exp += e
        if LEVEL >= ENTROPY:
            tile_shifted = fma(e, tl.maximum(d, LOWEST), tile_shifted)
        if LEVEL >= SQUARES:
            tile_squared = fma(e, e, tile_squared)
    shift = base - new_base
    scale = tl.exp2(shift)
    if LEVEL >= ENTROPY:
        shifted = (shifted + sum_exp * shift) * scale + tl.sum(tile_shifted, axis=1)
    if LEVEL >= SQUARES:
        squared = squared * scale * scale + tl.sum(tile_squared, axis=1)
    return max_u, new_base, sum_exp * scale + tl.sum(tile_sum_exp, axis=1), shifted, squared


@triton.jit
def load_unscaled_piece(row, start):
    """Load a piece that may reach beyond the row's end.

    Returns (which columns are inside, their u), [LANES, COLS] each.
    """
    is_inside = start + row.columns < row.V
    x = tl.load(row.start + start + row.columns, mask=is_inside, other=0.0)
    return is_inside, unscaled_logit(x, row)


@triton.jit
def count_maxima(row, max_u, TILE):
    """Count the columns with u = max_u; NaN if a logit is NaN.

    This is the sum of exponentials of a row far from 0 (all logits the smallest finite number, for
    example), where all other exponentials are below e^-22.
    """
    count = tl.full((TILE.LANES,), 0.0, tl.float32)
    for start in range(0, row.V, TILE.LANES * TILE.COLS):
        is_inside, u = load_unscaled_piece(row, start)
        is_max = tl.where(u == max_u, 1.0, tl.where(u != u, u, 0.0))
        count += tl.sum(tl.where(is_inside, is_max, 0.0), axis=1)
    return tl.sum(count, axis=0)


@triton.jit
def find_first_maximum(row, max_u, TILE):
    """Return the first column with u = max_u, or -1. Reads the row once more."""
    first = tl.full((TILE.LANES,), NO_COLUMN, tl.int32)
    for start in range(0, row.V, TILE.LANES * TILE.COLS):
        is_inside, u = load_unscaled_piece(row, start)
        columns = tl.where(is_inside & (u == max_u), start + row.columns, NO_COLUMN)
        first = tl.minimum(first, tl.min(columns, axis=1))
    column = tl.min(first, axis=0)
    return tl.where(column == NO_COLUMN, -1, column)


@triton.jit
def compute_softmax_sums(row, LEVEL, KEPT, TILE):
    """Compute the softmax sums of a row in one pass over it.

    Returns (max u, sum of e, sum of e d, sum of e^2, tiles) with e = exp(d) and d = z - max z =
    u_to_z * (u - max u). The sums with d and e^2 are right from LEVEL = ENTROPY and SQUARES on.
    `tiles` are the logits x of the last KEPT tiles, which stay in registers for the gradient. The
    last TILE.ENDS tiles are loaded at once.
    """
    ACCESSES: tl.constexpr = TILE.ACCESSES
    ENDS: tl.constexpr = TILE.ENDS
    HINT: tl.constexpr = TILE.FIRST_HINT
    LAST_HINT: tl.constexpr = TILE.LAST_HINT
    c = row.u_to_z * LOG2E
    max_u = tl.full((TILE.LANES,), NEG_INF, tl.float32)
    base = tl.full((TILE.LANES,), -MAX_EXPONENT, tl.float32)
    zero = tl.full((TILE.LANES,), 0.0, tl.float32)
    sums = (max_u, base, zero, zero, zero)
    end = ((row.V + TILE.BLOCK - 1) // TILE.BLOCK - ENDS) * TILE.BLOCK
    for start in tl.range(0, end, TILE.BLOCK, num_stages=TILE.STAGES):
        xs = load_tile(row, start, ACCESSES, False, HINT)
        sums = add_tile(sums, xs, start, row, c, False, LEVEL)
    xs = load_tile(row, end, ACCESSES * (ENDS - 1), False, LAST_HINT if KEPT >= ENDS else HINT)
    last = end + (ENDS - 1) * TILE.BLOCK
    xs = xs + load_tile(row, last, ACCESSES, True, LAST_HINT if KEPT > 0 else HINT)
    for i in tl.static_range(ENDS):
        tile = xs[i * ACCESSES : (i + 1) * ACCESSES]
        sums = add_tile(sums, tile, end + i * TILE.BLOCK, row, c, i == ENDS - 1, LEVEL)

    lane_max, lane_base, lane_sum_exp, lane_shifted, lane_squared = sums
    max_u = tl.max(lane_max, axis=0)
    base = exponent_base(max_u, c)
    shift = lane_base - base
    scale = tl.exp2(shift)
    # From sums of 2^(c u - base) to sums of exp(u_to_z * (u - max_u)).
    remainder = tl.where(max_u == NEG_INF, 0.0, fma(max_u, c, -base))
    up = tl.exp2(-remainder)
    sum_exp2 = tl.sum(lane_sum_exp * scale, axis=0)
    shifted2 = tl.sum((lane_shifted + lane_sum_exp * shift) * scale, axis=0)
    shifted = (shifted2 - remainder * sum_exp2) * up * LN2
    squared = tl.sum(lane_squared * scale * scale, axis=0) * up * up
    sum_exp = sum_exp2 * up
    # Rounding can make it smaller, although the maximum itself adds 1.
    sum_exp = tl.where((sum_exp < 1.0) & (max_u > NEG_INF), 1.0, sum_exp)
    if (tl.abs(max_u * c) >= MAX_EXPONENT) & (tl.abs(max_u) < -NEG_INF):
        sum_exp = count_maxima(row, max_u, TILE)
        shifted = 0.0 * sum_exp
        squared = sum_exp
    return max_u, sum_exp, shifted, squared, xs[(ENDS - KEPT) * ACCESSES :]


# ---- functions that keep their digits


@triton.jit
def expm1(x):
    """Return exp(x) - 1 without cancellation."""
    series = 1.0 + x * (1 / 5 + x * (1 / 30 + x * (1 / 210)))
    series = x + x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24) * series))
    # The series is off by less than 1e-8 there.
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)


@triton.jit
def tanh(x):
    """Return tanh(x): with e = exp(-2 |x|) - 1 it is -e / (2 + e), with the sign of x."""
    e = expm1(-2.0 * tl.abs(x))
    return tl.where(x < 0.0, e, -e) / (2.0 + e)


# ---- the gradient
#
# The softmax sums of a row are relative to a maximum of u (`fused_loss_kernel`) or of z (stored
# sums). The functions here take either as v:
#
#     v_j = u_to_v * u_j      z_j = v_to_z * v_j      p_j = exp(v_to_z * (v_j - max_v)) / sum_exp
#
#     v is u   u_to_v = 1, v_to_z = u_to_z
#     v is z   u_to_v = u_to_z, v_to_z = 1


@triton.jit
def gradient_factors(max_v, sum_exp, v_to_z, LEVEL, target, constant, logp, prob):
    """Return (c, base, per_exp, per_exponent, per_square), the numbers of `column_gradient`.

    With d = c v_j - base, in which c = v_to_z * log2(e), the gradient of a row is

        d loss / d z_j = 2^d (per_exp + per_exponent d + per_square 2^d)

    without the term target * 1[j = y] of the target y.

    max_v, sum_exp                  of the row, see above
    target, constant, logp, prob    its `GradientCoefficients`; those beyond LEVEL are not used
    """
    c = v_to_z * LOG2E
    base = exponent_base(max_v, c)
    # Far from 0 only columns equal to the maximum count. Any c will do that separates them from the
    # others and keeps c * max_v finite: 2^30 / |max_v|.
    is_far = (tl.abs(max_v * c) >= MAX_EXPONENT) & (tl.abs(max_v) < -NEG_INF)
    c = tl.where(is_far, tl.exp2(30.0 - tl.ceil(tl.log2(tl.abs(max_v)))), c)
    base = tl.where(is_far, c * max_v, base)
    remainder = tl.where(max_v == NEG_INF, 0.0, fma(max_v, c, -base))
    down = tl.exp2(-remainder) / sum_exp  # p_j = 2^d * down
    per_exp = -target
    per_exponent = 0.0
    per_square = 0.0
    if LEVEL >= ENTROPY:
        per_exp += constant - logp * (tl.log(sum_exp) + remainder * LN2)
        per_exponent = LN2 * logp * down
    if LEVEL >= SQUARES:
        per_square = prob * down * down
    return c, base, per_exp * down, per_exponent, per_square


@triton.jit
def column_gradient(x, row, LEVEL, u_to_v, c, base, per_exp, per_exponent, per_square):
    """Return d loss / dx of logits x [LANES, COLS]: dz / dx times the sum in `gradient_factors`.

    The target's own term is not in it, see `store_target_gradient`.
    """
    u = unscaled_logit(x, row)
    derivative = transform_derivative(u, row)
    d = fma(u_to_v * u, c, -base)
    factor = per_exp * derivative
    if LEVEL >= ENTROPY:
        factor = fma(per_exponent * derivative, tl.maximum(d, LOWEST), factor)
    e = tl.exp2(d)
    if LEVEL >= SQUARES:
        factor = fma(per_square * derivative, e, factor)
    return e * factor


@triton.jit
def store_target_gradient(out, target_id, row, u, logp, LEVEL, target, constant, logp_factor, prob):
    """Store d loss / dx of the target's logit, which `column_gradient` does not compute right.

    It is target (1 - p) + p (constant + logp_factor * logp + prob * p), times dz / dx, with
    p = exp(logp). 1 - p cancels as p -> 1, and -expm1(logp) does not. Adding the target's term to a
    stored 16-bit value would lose digits.

    out         pointer to the gradient of the row
    target_id   column of the target; nothing is stored if it is outside of the row
    u, logp     its unscaled logit and log-prob
    target, constant, logp_factor, prob   `GradientCoefficients` of the row
    """
    grad = -target * expm1(logp)
    if LEVEL >= ENTROPY:
        factor = constant + logp_factor * tl.maximum(logp, LOWEST)
        if LEVEL >= SQUARES:
            factor += prob * tl.exp(logp)
        grad += tl.exp(logp) * factor
    grad = (grad * transform_derivative(u, row)).to(tl.float32)
    tl.debug_barrier()  # the store follows those of the row's tiles
    is_inside = (target_id >= 0) & (target_id < row.V)
    tl.store(out + target_id, grad.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def write_gradient_tile(xs, out, start, row, LEVEL, END, HINT, u_to_v, factors):
    """Write d loss / dx of the tile at column `start`, without the target's own term.

    xs        logits of the tile, a tuple of pieces
    out       pointer to the gradient of the row
    factors   the result of `gradient_factors`
    """
    for i in tl.static_range(len(xs)):
        grad = column_gradient(xs[i], row, LEVEL, u_to_v, *factors)
        store_piece(out, start, i, row, grad, END, HINT)


@triton.jit
def write_gradient(
    row,
    out,
    kept,
    target_id,
    target_u,
    target_logp,
    u_to_v,
    v_to_z,
    max_v,
    sum_exp,
    LEVEL,
    coefficients,
    TILE,
):
    """Write d loss / dx of a row, the formula of `GradientCoefficients` times dz / dx.

    row             the logits
    out             pointer to the gradient of the row, which may overwrite the logits
    kept            the last tiles of the row if they are in registers, else None
    target_id       column of the target
    target_u        its unscaled logit
    target_logp     its log-prob
    u_to_v, v_to_z  what the exponents are made of, see "the gradient" above
    max_v, sum_exp  p_j = exp(v_to_z * (u_to_v * u_j - max_v)) / sum_exp
    LEVEL           0: only the coefficient `target` counts; ENTROPY: also constant and logp;
                    SQUARES: also prob
    coefficients    (target, constant, logp, prob)

    If TILE.PEELED, 128-bit accesses are used between the first and last 16-byte boundary of the
    row, and single elements outside of them.
    """
    ACCESSES: tl.constexpr = TILE.ACCESSES
    COLS: tl.constexpr = TILE.COLS
    HINT: tl.constexpr = TILE.LAST_HINT
    ENDS: tl.constexpr = 1 if kept is None else len(kept) // ACCESSES
    factors = gradient_factors(max_v, sum_exp, v_to_z, LEVEL, *coefficients)
    aligned_row = row
    aligned_out = out
    if TILE.PEELED:
        head = elements_to_boundary(row.start, row.V, COLS)
        width = (row.V - head) // COLS * COLS
        # The elements before the first boundary, then those behind the last.
        i = tl.arange(0, 2 * COLS)
        columns = tl.where(i < COLS, i, head + width + i - COLS)
        is_outside = tl.where(i < COLS, i < head, columns < row.V)
        x = tl.load(row.start + columns, mask=is_outside, other=0.0, eviction_policy=HINT)
        grad = column_gradient(x, row, LEVEL, u_to_v, *factors)
        tl.debug_barrier()  # every warp loads these few elements, and one of them stores them
        values = grad.to(out.dtype.element_ty)
        tl.store(out + columns, values, mask=is_outside, eviction_policy=HINT)
        first = tl.multiple_of(row.start + head, 16)
        aligned_width = tl.multiple_of(width, COLS)
        aligned_row = Row(first, aligned_width, thread_columns(TILE, True), *row[3:])
        # Rows of the gradient have the same offset from a boundary, in elements, as those of the
        # logits (see `launch.choose`). A thread stores COLS elements at a time: of a 16-bit
        # gradient of fp32 logits these are 8 bytes.
        ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
        aligned_out = tl.multiple_of(out + head, COLS * ELEMENT_BYTES)
    # Backwards: the columns that were read last are the most likely to be in L2.
    end = tl.maximum(tl.cdiv(aligned_row.V, TILE.BLOCK) - ENDS, 0) * TILE.BLOCK
    ends = kept
    if kept is None:
        ends = load_tile(aligned_row, end, ACCESSES, True, HINT)
    for i in tl.static_range(ENDS - 1, -1, -1):
        tile = ends[i * ACCESSES : (i + 1) * ACCESSES]
        start = end + i * TILE.BLOCK
        write_gradient_tile(
            tile, aligned_out, start, aligned_row, LEVEL, i == ENDS - 1, HINT, u_to_v, factors
        )
    for done in tl.range(0, end, TILE.BLOCK, num_stages=TILE.STAGES):
        start = end - TILE.BLOCK - done
        tile = load_tile(aligned_row, start, ACCESSES, False, HINT)
        write_gradient_tile(
            tile, aligned_out, start, aligned_row, LEVEL, False, HINT, u_to_v, factors
        )
    store_target_gradient(out, target_id, row, target_u, target_logp, LEVEL, *coefficients)
