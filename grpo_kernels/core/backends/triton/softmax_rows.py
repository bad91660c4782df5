"""One row of logits inside a Triton kernel: tiles, transform, softmax sums and gradient.

A row is processed in *tiles*. A tile is a tuple of ACCESSES *pieces* of shape [LANES, COLS]: a lane
is a thread of the program, and a piece is one access (load or store) of each thread. A thread
reduces its own elements of all pieces without exchange between threads, and all loads of a tile are
issued before the first value is needed. Compile-time values have upper-case names. TILE is a
`launch.Tile`.

x are the logits in memory, z the logits after scale, softcap and temperature. u is z without its
last factor `u_to_z`: x, -x or tanh(x * scale / softcap), with z = u_to_z * u and u_to_z > 0. The
softmax of z is computed from u, so that the loop over a row has one multiplication less. See
`Transform`.

For the softmax sums, unaligned rows (of an odd vocabulary) are read by single elements. If the
accesses began at the first 16-byte boundary of a row, the order of the sums, and so their bits,
would depend on the row's offset from the boundary. Only the gradient of such rows is written in
16-byte accesses.
"""

import math
from collections import namedtuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
NEG_INF = tl.constexpr(-math.inf)
#: Replaces -inf where it is multiplied by an exponential that may be 0: 0 * -inf would be NaN.
LOWEST = tl.constexpr(-1e30)
#: The largest exponent of 2 whose spacing in fp32 is fine enough. Beyond it the exponentials of
#: adjacent logits differ by a factor of e^22 or more. See `count_maxima`.
MAX_EXPONENT = tl.constexpr(2.0**29)
#: Marks that no column was found.
NO_COLUMN = tl.constexpr(2**31 - 1)
#: Whether Triton's interpreter runs the kernels.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

#: Levels of computation, the argument LEVEL of many functions. Level 0: only what log-probs need.
#: ENTROPY: also what the entropy needs. SQUARES: also what the sum of squared probabilities needs.
ENTROPY = tl.constexpr(1)
SQUARES = tl.constexpr(2)

#: The transform of logits x to z = u_to_z * u, in the form that kernels use:
#:
#:     no softcap (None)      u = x, or -x for a negative scale (mirrored not None), and
#:                            u_to_z = |scale| / temperature
#:     softcap                u = tanh(x * scale / softcap), u_to_z = softcap / temperature
Transform = namedtuple("Transform", "scale softcap mirrored")

#: A row of logits in memory.
#:
#:     start                 pointer to its first logit
#:     V                     number of columns
#:     columns               [LANES, COLS], the columns of a piece that each thread processes
#:     u_to_z                of this row: the last factor of the transform, z = u_to_z * u
#:     inverse_temperature   of this row
#:     scale, softcap, mirrored   see `Transform`
Row = namedtuple("Row", "start V columns u_to_z inverse_temperature scale softcap mirrored")


# ---- tiles


@triton.jit
def thread_columns(TILE, WIDE):
    """Return the columns of a piece that each thread processes, [LANES, COLS].

    WIDE   True: a thread takes COLS neighbouring columns, in one 16-byte access. False: it takes
           COLS single columns, LANES apart, so that neighbouring threads take neighbouring columns.
    """
    if WIDE:
        return tl.arange(0, TILE.LANES)[:, None] * TILE.COLS + tl.arange(0, TILE.COLS)[None, :]
    else:
        return tl.arange(0, TILE.LANES)[:, None] + tl.arange(0, TILE.COLS)[None, :] * TILE.LANES


@triton.jit
def row_pointer(x, row, T, stride_a, stride_t, TILE):
    """Return a pointer to a row of x [A, T, V] (A * T rows of V): row a * T + t is x[a, t].

    row                  number of the row
    T                    None: x is a matrix [num_rows, V] with the row stride stride_t, and
                         stride_a is not used
    stride_a, stride_t   strides of x in A and T
    """
    offset = row * stride_t if T is None else (row // T) * stride_a + (row % T) * stride_t
    if TILE.ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return x + offset


@triton.constexpr_function
def is_number(x):
    """Return whether a kernel argument is a number. It is a pointer to a vector otherwise."""
    # In the interpreter a number is a Python float, which has no dtype.
    return isinstance(x, float) or not x.dtype.is_ptr()


@triton.jit
def load_number(x, i):
    """Return the value of row i: x if it is one number for all rows, or x[i] of a vector."""
    if is_number(x):
        return x
    else:
        return tl.load(x + i)


@triton.jit
def row_fields(
    logits, stride_a, stride_t, inverse_temperature, transform, V, T, first_row, i, TILE
):
    """Return the first five fields of a `Row`: start, V, columns, u_to_z, inverse_temperature.

    The other fields, scale, softcap and mirrored, may be None, which a Triton function cannot
    return. So the caller makes Row(*fields, *transform).

    logits, stride_a, stride_t   logits [A, T, V] and the strides of A and T
    inverse_temperature          a number, or a vector [num_rows]
    first_row, i                 the row is row i of the call, row number first_row + i of the
                                 A * T rows of logits
    """
    inverse_of_row = load_number(inverse_temperature, i)
    start = row_pointer(logits, first_row + i, T, stride_a, stride_t, TILE)
    columns = thread_columns(TILE, TILE.ALIGNED)
    if transform.softcap is None:
        u_to_z = tl.abs(transform.scale * inverse_of_row)
    else:
        u_to_z = transform.softcap * inverse_of_row
    return start, V, columns, u_to_z, inverse_of_row


@triton.jit
def piece_columns(start, i, columns):
    """Return the columns [LANES, COLS] of piece i of a tile.

    start     first column of the tile. If it is a pointer to the first element of the tile, the
              result is pointers to the elements of the piece.
    columns   [LANES, COLS], the columns of piece 0 of the tile at column 0, see `Row`
    """
    return start + i * (columns.shape[0] * columns.shape[1]) + columns


@triton.jit
def load_tile(row, start, PIECES, END, HINT):
    """Load a tile of a row, from column `start` on. Returns a tuple of pieces [LANES, COLS].

    PIECES   number of pieces of the tile
    END      whether the tile may reach beyond the end of the row. Elements there are 0.
    HINT     cache hint of the loads, "" for none
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
    """Store x [LANES, COLS], one access of each thread, as piece i of the tile at column `start`.

    out    pointer to the row that is written
    row    the `Row` of logits, which has the same columns
    END    whether the piece may reach beyond the end of the row. Nothing is stored there.
    HINT   cache hint of the stores, "" for none
    """
    columns = piece_columns(start, i, row.columns)
    values = x.to(out.dtype.element_ty)
    if END:
        tl.store(out + columns, values, mask=columns < row.V, eviction_policy=HINT)
    else:
        tl.store(out + columns, values, eviction_policy=HINT)


@triton.jit
def write_zero_row(out, V, TILE):
    """Store 0 into the V columns of an output row. `out` is a pointer to its first element."""
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

    row    pointer to the first element of the row, which has V elements
    COLS   number of elements in 16 bytes
    """
    ELEMENT_BYTES: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
    # Number of elements from the boundary before the row to the row.
    past = (row.to(tl.int64) // ELEMENT_BYTES) % COLS
    return tl.minimum((COLS - past) % COLS, V).to(tl.int32)


# ---- the transform


@triton.jit
def compute_u(x, row):
    """Return u of logits x: the transformed logits z without their last factor, z = row.u_to_z * u.

    With a softcap u = tanh(x * scale / softcap). Without one u = x, or -x for a negative scale.
    """
    x = x.to(tl.float32)
    if row.softcap is not None:
        # tanh(v) is computed as 1 - 2 / (e^(2v) + 1), with an absolute error of 6e-8. Times the
        # softcap, this is the spacing of fp32 numbers near the softcap.
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E * row.scale / row.softcap)) + 1.0)
    elif row.mirrored is not None:
        return -x
    else:
        return x


@triton.jit
def transform_derivative(u, row):
    """Return dz / dx, where z are the transformed logits of x. u is z without its factor u_to_z.

    It is scale * inverse_temperature, with a softcap times 1 - u^2, the derivative of tanh.
    """
    derivative = row.scale * row.inverse_temperature
    if row.softcap is not None:
        derivative = derivative * (1.0 - u * u)
    return derivative


@triton.jit
def load_u(row, column):
    """Load the logit of a single column and return its u, or NaN if the column is not in the row.

    u is the transformed logit z without its last factor, z = row.u_to_z * u.
    """
    is_inside = (column >= 0) & (column < row.V)
    x = tl.load(row.start + column, mask=is_inside, other=float("nan"))
    return compute_u(x, row)


# ---- softmax sums
#
# exp(z_j) is computed as 2^(c u_j), with c = u_to_z * log2(e). Each exponential is divided by
# 2^base, where `base` is an integer near the maximum of c u: it is 2^(c u_j - base). One fused
# multiply-add, which rounds once, computes this exponent, so logits far from 0 lose no precision.
# Changing the base multiplies a sum by a power of two, which is exact.


@triton.jit
def fma(x, y, z):
    """Return x * y + z, rounded once (fused multiply-add)."""
    if INTERPRETED:  # in the interpreter tl.fma of Triton up to 3.6 rounds twice
        return (x.to(tl.float64) * y + z).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def exponent_base(max_u, c):
    """Return the integer base of exponentials 2^(c u - base), near the maximum of c u.

    It is max_u * c rounded up, so that no exponent is above 0, or -2^29 if that is larger. So it is
    finite if max_u is -inf: -inf - (-inf) would be NaN.
    """
    return tl.maximum(tl.ceil(max_u * c), -MAX_EXPONENT)


@triton.jit
def add_tile(sums, xs, start, row, c, END, LEVEL):
    """Add a tile to the running softmax sums of each lane (thread), as online softmax does.

    sums    (max_u, base, sum 2^d, sum 2^d d, sum 2^(2d)), [LANES] each, of the columns of the
            lane so far. max_u is the maximum of u, where z = u_to_z * u are the transformed logits,
            and d = c u - base. The base is `exponent_base(max_u, c)`.
    xs      logits of the tile, a tuple of pieces
    start   first column of the tile
    c       u_to_z * log2(e)
    END     whether the tile may reach beyond the end of the row. Such columns are left out.
    LEVEL   sum 2^d d is computed only from ENTROPY on, sum 2^(2d) only with SQUARES

    Returns the new sums. If the maximum rises, the old sums are rescaled to the new base: 2^d is
    multiplied by 2^shift with shift = base - new base, and d grows by shift.
    """
    max_u, base, sum_exp, shifted, squared = sums
    us = ()
    for i in tl.static_range(len(xs)):
        u = compute_u(xs[i], row)
        if END:
            # u is set to -inf, and not x: tanh(-inf) is finite, and -x would be +inf.
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
            # LOWEST replaces d = -inf, where e * d would be NaN.
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
def load_u_piece(row, start):
    """Load a piece of logits at column `start`, which may reach beyond the row, and return its u.

    Returns (is_inside, u), [LANES, COLS] each: whether a column is in the row, and its u, where
    z = u_to_z * u is the transformed logit. In a column beyond the row u belongs to the logit 0.
    """
    is_inside = start + row.columns < row.V
    x = tl.load(row.start + start + row.columns, mask=is_inside, other=0.0)
    return is_inside, compute_u(x, row)


@triton.jit
def count_maxima(row, max_u, TILE):
    """Return how many columns of a row have the maximum u = max_u, or NaN if a logit is NaN.

    This takes another pass over the row. The count is sum_j exp(z_j - max z) for a row whose
    maximum is huge in absolute value, for example if all logits are the smallest finite number. In
    such a row the exponential of any other column is below e^-22, and would be wrong because its
    exponent is rounded (see MAX_EXPONENT).

    row     the row of logits
    max_u   the maximum of its u, where z = u_to_z * u are the transformed logits
    """
    count = tl.full((TILE.LANES,), 0.0, tl.float32)
    for start in range(0, row.V, TILE.LANES * TILE.COLS):
        is_inside, u = load_u_piece(row, start)
        is_max = tl.where(u == max_u, 1.0, tl.where(u != u, u, 0.0))  # u != u: u is NaN
        count += tl.sum(tl.where(is_inside, is_max, 0.0), axis=1)
    return tl.sum(count, axis=0)


@triton.jit
def find_first_maximum(row, max_u, TILE):
    """Return the first column of a row with u = max_u, or -1 if there is none.

    This takes another pass over the row. max_u is the maximum of u, where z = u_to_z * u are the
    transformed logits.
    """
    first = tl.full((TILE.LANES,), NO_COLUMN, tl.int32)
    for start in range(0, row.V, TILE.LANES * TILE.COLS):
        is_inside, u = load_u_piece(row, start)
        columns = tl.where(is_inside & (u == max_u), start + row.columns, NO_COLUMN)
        first = tl.minimum(first, tl.min(columns, axis=1))
    column = tl.min(first, axis=0)
    return tl.where(column == NO_COLUMN, -1, column)


@triton.jit
def compute_softmax_sums(row, LEVEL, KEPT, TILE):
    """Compute the softmax sums of a row in one pass over it.

    Returns (max u, sum_j e_j, sum_j e_j d_j, sum_j e_j^2, xs), where

        u    transformed logits z without their last factor: z = u_to_z * u
        d_j  z_j - max z = u_to_z * (u_j - max u)
        e_j  exp(d_j)
        xs   logits of the last KEPT tiles of the row, a tuple of pieces, which the caller keeps in
             registers for the gradient

    LEVEL   sum e_j d_j is computed only from ENTROPY on, sum e_j^2 only with SQUARES
    KEPT    number of tiles at the end of the row that are returned in xs, at most TILE.ENDS

    The last TILE.ENDS tiles of the row are loaded together. In the loop each lane (thread) has sums
    of the columns that it processes, see `add_tile`. They are combined at the end.
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
        xs = load_tile(row, start, ACCESSES, END=False, HINT=HINT)
        sums = add_tile(sums, xs, start, row, c, END=False, LEVEL=LEVEL)
    # Tiles that stay in registers are not read again, so they may leave the cache.
    FULL_TILES_HINT: tl.constexpr = LAST_HINT if KEPT >= ENDS else HINT
    LAST_TILE_HINT: tl.constexpr = LAST_HINT if KEPT > 0 else HINT
    xs = load_tile(row, end, ACCESSES * (ENDS - 1), END=False, HINT=FULL_TILES_HINT)
    last = end + (ENDS - 1) * TILE.BLOCK
    xs = xs + load_tile(row, last, ACCESSES, END=True, HINT=LAST_TILE_HINT)
    for i in tl.static_range(ENDS):
        tile = xs[i * ACCESSES : (i + 1) * ACCESSES]
        start = end + i * TILE.BLOCK
        sums = add_tile(sums, tile, start, row, c, END=i == ENDS - 1, LEVEL=LEVEL)

    # Combine the sums of the lanes, relative to the maximum of the row.
    lane_max, lane_base, lane_sum_exp, lane_shifted, lane_squared = sums
    max_u = tl.max(lane_max, axis=0)
    base = exponent_base(max_u, c)
    shift = lane_base - base
    scale = tl.exp2(shift)
    # The lanes have sums of 2^(c u - base). Wanted are sums of exp(u_to_z * (u - max_u)), which is
    # 2^(c u - c max_u): multiply by 2^-remainder, with remainder = c max_u - base.
    remainder = tl.where(max_u == NEG_INF, 0.0, fma(max_u, c, -base))
    up = tl.exp2(-remainder)
    sum_exp2 = tl.sum(lane_sum_exp * scale, axis=0)
    shifted2 = tl.sum((lane_shifted + lane_sum_exp * shift) * scale, axis=0)
    shifted = (shifted2 - remainder * sum_exp2) * up * LN2
    squared = tl.sum(lane_squared * scale * scale, axis=0) * up * up
    sum_exp = sum_exp2 * up
    # The maximum itself adds 1. Rounding can make the sum slightly smaller than 1.
    sum_exp = tl.where((sum_exp < 1.0) & (max_u > NEG_INF), 1.0, sum_exp)
    # The maximum is huge, but finite.
    if (tl.abs(max_u * c) >= MAX_EXPONENT) & (tl.abs(max_u) < -NEG_INF):
        sum_exp = count_maxima(row, max_u, TILE)
        shifted = 0.0 * sum_exp
        squared = sum_exp
    return max_u, sum_exp, shifted, squared, xs[(ENDS - KEPT) * ACCESSES :]


# ---- functions that keep their digits


@triton.jit
def expm1(x):
    """Return exp(x) - 1. Near x = 0 a Taylor series computes it, without cancellation."""
    series = 1.0 + x * (1 / 5 + x * (1 / 30 + x * (1 / 210)))
    series = x + x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24) * series))
    # For |x| < 0.35 the series has a relative error below 1e-8.
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)


@triton.jit
def tanh(x):
    """Return tanh(x), computed as sign(x) * -e / (2 + e) with e = exp(-2 |x|) - 1."""
    e = expm1(-2.0 * tl.abs(x))
    return tl.where(x < 0.0, e, -e) / (2.0 + e)


# ---- the gradient
#
# u is z without its last factor: z = u_to_z * u. `fused_loss_kernel` has the maximum of u,
# `softmax_gradient_kernel` has the maximum of z from a table. The functions here take either, as
# the maximum of v:
#
#     v_j = u_to_v * u_j      z_j = v_to_z * v_j      p_j = exp(v_to_z * (v_j - max_v)) / sum_exp
#
#     v is u   u_to_v = 1, v_to_z = u_to_z
#     v is z   u_to_v = u_to_z, v_to_z = 1


@triton.jit
def gradient_factors(max_v, sum_exp, v_to_z, LEVEL, target, constant, logp, prob):
    """Return (c, base, per_exp, per_exp_shifted, per_exp_squared) of a row for `column_gradient`.

    The gradient at column j, without the term target * 1[j = y] of the target y, is

        d loss / d z_j = p_j * (constant - target + logp * log p_j + prob * p_j)

    With d = c * v_j - base and c = v_to_z * log2(e), p_j is 2^d times a number of the row. So the
    gradient becomes

        d loss / d z_j = 2^d (per_exp + per_exp_shifted * d + per_exp_squared * 2^d)

    So the three factors multiply 2^d, 2^d d and 2^(2d). Their names are those of the sums of these
    terms over a row, relative to its maximum: sum_exp, sum_exp_shifted and sum_exp_squared.

    max_v, sum_exp, v_to_z         p_j = exp(v_to_z * (v_j - max_v)) / sum_exp, where v is either u
                                   or z, see above
    LEVEL                          constant and logp are used only from ENTROPY on, prob only with
                                   SQUARES; a factor that is not used is 0
    target, constant, logp, prob   coefficients of the row, see `GradientCoefficients`
    """
    c = v_to_z * LOG2E
    base = exponent_base(max_v, c)
    # If the maximum is huge, the probabilities of all other columns are 0 (see `count_maxima`).
    # Then c need not be exact: it has to separate the maximum from other columns, and to keep
    # c * max_v finite. A power of two near 2^30 / |max_v| does both.
    is_far = (tl.abs(max_v * c) >= MAX_EXPONENT) & (tl.abs(max_v) < -NEG_INF)
    c = tl.where(is_far, tl.exp2(30.0 - tl.ceil(tl.log2(tl.abs(max_v)))), c)
    base = tl.where(is_far, c * max_v, base)
    remainder = tl.where(max_v == NEG_INF, 0.0, fma(max_v, c, -base))
    down = tl.exp2(-remainder) / sum_exp  # p_j = 2^d * down
    # per_exp is not multiplied by `down` until it is returned.
    per_exp = -target
    per_exp_shifted = 0.0
    per_exp_squared = 0.0
    if LEVEL >= ENTROPY:
        # log p_j = (d - remainder) * log(2) - log(sum_exp)
        per_exp += constant - logp * (tl.log(sum_exp) + remainder * LN2)
        per_exp_shifted = LN2 * logp * down
    if LEVEL >= SQUARES:
        per_exp_squared = prob * down * down
    return c, base, per_exp * down, per_exp_shifted, per_exp_squared


@triton.jit
def column_gradient(x, row, LEVEL, u_to_v, c, base, per_exp, per_exp_shifted, per_exp_squared):
    """Return d loss / dx of logits x [LANES, COLS], without the term of the target.

    With u of `compute_u`, v = u_to_v * u and d = c * v - base it is

        dz / dx * 2^d (per_exp + per_exp_shifted * d + per_exp_squared * 2^d)

    At the target's column this is not the gradient. `store_target_gradient` overwrites it.

    row                      the `Row` of x, for its transform
    LEVEL                    per_exp_shifted is used only from ENTROPY on, per_exp_squared only with
                             SQUARES
    c, base, per_exp, ...    the result of `gradient_factors`
    """
    u = compute_u(x, row)
    derivative = transform_derivative(u, row)
    d = fma(u_to_v * u, c, -base)
    factor = per_exp * derivative
    if LEVEL >= ENTROPY:
        # LOWEST replaces d = -inf, which times 2^d = 0 would be NaN.
        factor = fma(per_exp_shifted * derivative, tl.maximum(d, LOWEST), factor)
    e = tl.exp2(d)
    if LEVEL >= SQUARES:
        factor = fma(per_exp_squared * derivative, e, factor)
    return e * factor


@triton.jit
def store_target_gradient(
    out, target_id, row, target_u, target_logp, LEVEL, target, constant, logp, prob
):
    """Store d loss / dx at the target's column, in place of the value from `column_gradient`.

    With the target's probability p the gradient is

        dz / dx * (target * (1 - p) + p * (constant + logp * log p + prob * p))

    1 - p is computed as -expm1(log p), which is accurate even if p is near 1. Adding the missing
    term to the value that is stored already, perhaps in 16 bits, would lose digits.

    out                            pointer to the gradient of the row
    target_id                      column of the target; nothing is stored if it is outside of the
                                   row
    row                            the logits of the row
    target_u, target_logp          u (see `compute_u`) and log-prob of the target
    LEVEL                          constant and logp are used only from ENTROPY on, prob only with
                                   SQUARES
    target, constant, logp, prob   coefficients of the row, see `GradientCoefficients`
    """
    grad = -target * expm1(target_logp)
    if LEVEL >= ENTROPY:
        factor = constant + logp * tl.maximum(target_logp, LOWEST)
        if LEVEL >= SQUARES:
            factor += prob * tl.exp(target_logp)
        grad += tl.exp(target_logp) * factor
    grad = (grad * transform_derivative(target_u, row)).to(tl.float32)
    tl.debug_barrier()  # the store follows after all threads have stored their tiles of the row
    is_inside = (target_id >= 0) & (target_id < row.V)
    tl.store(out + target_id, grad.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def write_gradient_tile(xs, out, start, row, LEVEL, END, HINT, u_to_v, factors):
    """Store d loss / dx of the tile at column `start`, by `column_gradient`.

    xs        logits of the tile, a tuple of pieces
    out       pointer to the gradient of the row
    row       the logits of the row
    LEVEL     which of the factors are used, see `column_gradient`
    END       whether the tile may reach beyond the end of the row
    HINT      cache hint of the stores
    u_to_v    v = u_to_v * u, where the factors are for v and u is that of `compute_u`
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
    """Write d loss / dx of a row of logits x, and overwrite the value at the target at the end.

    With p the softmax of the transformed logits z and y the target, it is dz_j / dx_j times

        d loss / d z_j = target * (1[j = y] - p_j)
                       + p_j * (constant + logp * log p_j + prob * p_j)

    p is computed from u of `compute_u`: p_j = exp(v_to_z * (u_to_v * u_j - max_v)) / sum_exp.

    row                     the logits x of the row
    out                     pointer to the gradient of the row, which may overwrite the logits
    kept                    the logits of the last tiles of the row, a tuple of pieces, if they are
                            in registers; None: they are loaded
    target_id               column of the target
    target_u, target_logp   u (see `compute_u`) and log-prob of the target
    u_to_v, v_to_z, max_v, sum_exp   numbers in the formula of p. u_to_v * v_to_z is u_to_z.
    LEVEL                   0: only the coefficient `target` is used; ENTROPY: also constant and
                            logp; SQUARES: also prob
    coefficients            (target, constant, logp, prob)

    If TILE.PEELED, 16-byte accesses are used between the first and the last 16-byte boundary of the
    row, and single elements before and behind.
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
        # `head` elements come before the first boundary, `width` elements between the first and the
        # last one. Process the elements outside of these, both ends at once.
        i = tl.arange(0, 2 * COLS)
        columns = tl.where(i < COLS, i, head + width + i - COLS)
        is_outside = tl.where(i < COLS, i < head, columns < row.V)
        x = tl.load(row.start + columns, mask=is_outside, other=0.0, eviction_policy=HINT)
        grad = column_gradient(x, row, LEVEL, u_to_v, *factors)
        # Every warp loads these few elements, and one warp stores the gradient, perhaps over the
        # logits. So wait until all warps have loaded them.
        tl.debug_barrier()
        values = grad.to(out.dtype.element_ty)
        tl.store(out + columns, values, mask=is_outside, eviction_policy=HINT)
        first = tl.multiple_of(row.start + head, 16)
        aligned_width = tl.multiple_of(width, COLS)
        aligned_row = Row(first, aligned_width, thread_columns(TILE, WIDE=True), *row[3:])
        # Rows of the gradient have the same offset from a boundary, in elements, as rows of the
        # logits (see `launch.access_offsets`). A thread stores COLS elements at a time, which are 8
        # bytes if the gradient is 16-bit and the logits are fp32.
        ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
        aligned_out = tl.multiple_of(out + head, COLS * ELEMENT_BYTES)
    # Process the row backwards: the columns that were read last are most likely in the L2 cache.
    end = tl.maximum(tl.cdiv(aligned_row.V, TILE.BLOCK) - ENDS, 0) * TILE.BLOCK
    ends = kept
    if kept is None:
        ends = load_tile(aligned_row, end, ACCESSES, END=True, HINT=HINT)
    for i in tl.static_range(ENDS - 1, -1, -1):
        tile = ends[i * ACCESSES : (i + 1) * ACCESSES]
        start = end + i * TILE.BLOCK
        write_gradient_tile(
            tile,
            aligned_out,
            start,
            aligned_row,
            LEVEL,
            END=i == ENDS - 1,
            HINT=HINT,
            u_to_v=u_to_v,
            factors=factors,
        )
    for done in tl.range(0, end, TILE.BLOCK, num_stages=TILE.STAGES):
        start = end - TILE.BLOCK - done
        tile = load_tile(aligned_row, start, ACCESSES, END=False, HINT=HINT)
        write_gradient_tile(
            tile,
            aligned_out,
            start,
            aligned_row,
            LEVEL,
            END=False,
            HINT=HINT,
            u_to_v=u_to_v,
            factors=factors,
        )
    store_target_gradient(out, target_id, row, target_u, target_logp, LEVEL, *coefficients)
