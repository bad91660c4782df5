"""The Triton kernels over (row, id) pairs of hidden states and weight.

num_rows is the number of rows of hidden states. Matrices are [., H] with a stride and unit stride
in H. A program takes one block of columns of a row, see `block_of_program`, except in
`pair_logits_kernel`.
"""

import triton
import triton.language as tl

from .kernels import compile_kernel
from .softmax_rows import NEG_INF, row_pointer

#: Rows of a matrix that a program loads at once. They are summed one after the other.
ROWS_AT_ONCE = tl.constexpr(8)


@triton.jit
def matrix_row(x, i, stride, TILE):
    """Return a pointer to row i of a matrix with this row stride."""
    return row_pointer(x, i.to(tl.int64), None, None, stride, TILE)


@triton.jit
def columns_to_read(H, is_wanted, TILE):
    """Return how many columns of a row to read: H if the row is wanted, else 0."""
    width = tl.where(is_wanted, H, 0)
    if TILE.ALIGNED:
        # H is a multiple of 16 here. Rounding it tells the compiler so, which then reads the end of
        # a row in wide accesses, too: tl.multiple_of is lost if is_wanted is a constant.
        width = width // 16 * 16
    return width


@triton.jit
def block_of_program(H, TILE):
    """Return (row, columns [TILE.BLOCK]) of this program: programs of a row are consecutive."""
    program = tl.program_id(0).to(tl.int64)
    blocks_per_row = tl.cdiv(H, TILE.BLOCK)
    first_column = (program % blocks_per_row).to(tl.int32) * TILE.BLOCK
    return program // blocks_per_row, first_column + tl.arange(0, TILE.BLOCK)


@triton.jit
def load_columns(x, i, stride, columns, H, is_wanted, TILE):
    """Load columns of row i of a matrix in fp32.

    They are 0 if the row is not wanted, and from column H on.
    """
    pointer = matrix_row(x, i, stride, TILE) + columns
    is_inside = columns < columns_to_read(H, is_wanted, TILE)
    return tl.load(pointer, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def add_to_columns(out, i, stride, columns, H, total, TILE):
    """Add total, fp32 [TILE.BLOCK], to columns of row i of a matrix. The sum is rounded once."""
    pointer = matrix_row(out, i, stride, TILE) + columns
    is_inside = columns < columns_to_read(H, True, TILE)
    before = tl.load(pointer, mask=is_inside).to(tl.float32)
    tl.store(pointer, (before + total).to(out.dtype.element_ty), mask=is_inside)


@compile_kernel
def pair_logits_kernel(
    # [num_rows, H] and [V, H]
    hidden,
    hidden_stride: tl.int64,
    weight,
    weight_stride: tl.int64,
    H,
    # [num_pairs]
    ids,
    rows,
    logits,
    TILE: tl.constexpr,
):
    """Compute hidden[row] . weight[id] of each pair, one program a pair; -inf of an unused pair."""
    pair = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + pair)
    if id >= 0:
        i = tl.load(rows + pair)
        total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
        for start in range(0, H, TILE.BLOCK):
            columns = start + tl.arange(0, TILE.BLOCK)
            x = load_columns(hidden, i, hidden_stride, columns, H, True, TILE)
            total += x * load_columns(weight, id, weight_stride, columns, H, True, TILE)
        tl.store(logits + pair, tl.sum(total, axis=0))
    else:
        tl.store(logits + pair, NEG_INF)


@compile_kernel
def grad_hidden_of_pairs_kernel(
    # [num_pairs], [num_pairs], [num_rows + 1]
    values,
    ids,
    offsets,
    # [V, H] and [num_rows, H]
    weight,
    weight_stride: tl.int64,
    out,
    out_stride: tl.int64,
    H,
    TILE: tl.constexpr,
):
    """Write out[i] = sum of values[k] * weight[ids[k]] over the pairs k of row i.

    The pairs of row i are offsets[i] to offsets[i + 1]. A pair is used if its id is not -1 and its
    value is not 0. A row without a used pair is not written.
    """
    i, columns = block_of_program(H, TILE)
    begin = tl.load(offsets + i)
    end = tl.load(offsets + i + 1)
    total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
    has_pair = begin > end
    for first in range(0, end - begin, ROWS_AT_ONCE):
        for k in tl.static_range(ROWS_AT_ONCE):
            pair = begin + first + k
            id = tl.load(ids + pair, mask=pair < end, other=-1)
            value = tl.load(values + pair, mask=pair < end, other=0.0)
            is_used = (id >= 0) & (value != 0.0)
            row = tl.where(is_used, id, 0)
            x = load_columns(weight, row, weight_stride, columns, H, is_used, TILE)
            total += tl.where(is_used, value, 0.0) * x
            has_pair = has_pair | is_used
    if has_pair:
        pointer = matrix_row(out, i, out_stride, TILE) + columns
        is_inside = columns < columns_to_read(H, True, TILE)
        tl.store(pointer, total.to(out.dtype.element_ty), mask=is_inside)


# ---- the gradient of the weight
#
# Pairs are sorted by id. The pairs of an id that has 2 PIECE or more are cut into pieces of PIECE
# pairs, the last of which is longer, so that several programs share a frequent id. The sorted pairs
# are also divided into windows of PIECE pairs. At most one piece starts in a window, apart from
# first pieces.
#
#     ids                [num_pairs], sorted
#     window_id_begins   [num_pairs // PIECE], see `id_begins_of_windows`: where the pairs of the id
#                        begin that each window ends with
#     partial_sums       fp32 [num_pairs // PIECE + 1, H], the sum of the piece that starts in each
#                        window


@triton.jit
def is_id_at(ids, position, end, id):
    """Return whether the sorted ids have this id at a position, which is before `end`."""
    return tl.load(ids + position, mask=position < end, other=-1) == id


@triton.jit
def piece_in_window(ids, window_id_begins, window, num_pairs, PIECE):
    """Find the piece that starts in a window and continues the id before that window.

    Returns (begin, id, start, exists): where the pairs of that id begin, the id, where the piece
    would start, and whether there is such a piece. Pieces of an id start at begin, begin + PIECE,
    begin + 2 PIECE, ... The first window has none.
    """
    begin = tl.load(window_id_begins + window - 1)
    start = begin + (window - begin // PIECE) * PIECE
    id = tl.load(ids + begin)
    return begin, id, start, (id >= 0) & is_id_at(ids, start + PIECE - 1, num_pairs, id)


@compile_kernel
def grad_weight_of_pairs_kernel(
    # [num_pairs]
    values,
    rows,
    # [num_pairs]: sorted ids, and the pair of each
    ids,
    order,
    num_pairs,
    # [num_firsts]: the position of the first pair of each used id, then num_pairs
    first_positions,
    num_firsts,
    # [num_pairs // PIECE] and fp32 [num_pairs // PIECE + 1, H]
    window_id_begins,
    partial_sums,
    # [num_rows, H] and [V, H]
    hidden,
    hidden_stride: tl.int64,
    out,
    out_stride: tl.int64,
    H,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the sum of values * hidden[row] over the pairs of each id to out[id].

    There is a program for each first position and for each window. The sums of an id that is cut
    into pieces go to partial_sums instead.
    """
    i, columns = block_of_program(H, TILE)
    position = num_pairs.to(tl.int64)
    if i < num_firsts:
        position = tl.load(first_positions + i)
    else:
        window = i - num_firsts + 1
        _, _, position, has_piece = piece_in_window(ids, window_id_begins, window, num_pairs, PIECE)
        if not has_piece:
            position = num_pairs.to(tl.int64)
    if position < num_pairs:
        id = tl.load(ids + position)
        has_next_piece = is_id_at(ids, position + 2 * PIECE - 1, num_pairs, id)
        end = tl.where(has_next_piece, position + PIECE, num_pairs)
        first = position
        total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
        is_same_id = True
        while is_same_id:
            for k in tl.static_range(ROWS_AT_ONCE):
                is_same_id = is_id_at(ids, position + k, end, id)
                pair = tl.load(order + position + k, mask=is_same_id, other=0)
                value = tl.load(values + pair, mask=is_same_id, other=0.0)
                row = tl.load(rows + pair, mask=is_same_id, other=0)
                x = load_columns(hidden, row, hidden_stride, columns, H, is_same_id, TILE)
                total += value * x
            position += ROWS_AT_ONCE
        if has_next_piece | (i >= num_firsts):
            pointer = matrix_row(partial_sums, first // PIECE, H, TILE) + columns
            tl.store(pointer, total, mask=columns < columns_to_read(H, True, TILE))
        else:
            add_to_columns(out, id, out_stride, columns, H, total, TILE)


@compile_kernel
def add_partial_sums_kernel(
    # [num_pairs], sorted
    ids,
    num_pairs,
    # [num_pairs // PIECE] and fp32 [num_pairs // PIECE + 1, H]
    window_id_begins,
    partial_sums,
    # [V, H]
    out,
    out_stride: tl.int64,
    H,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the sums of its pieces, in their order, to out[id] of each id that was cut.

    There is a program for each window but the first. The window behind that in which an id begins
    adds up its pieces.
    """
    i, columns = block_of_program(H, TILE)
    window = i + 1
    begin, id, _, has_piece = piece_in_window(ids, window_id_begins, window, num_pairs, PIECE)
    if has_piece & (begin // PIECE + 1 == window):
        total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
        has_next = True
        position = begin
        while has_next:
            for k in tl.static_range(ROWS_AT_ONCE):
                has_next = is_id_at(ids, position + (k + 1) * PIECE - 1, num_pairs, id)
                piece = position // PIECE + k
                total += load_columns(partial_sums, piece, H, columns, H, has_next, TILE)
            position += ROWS_AT_ONCE * PIECE
        add_to_columns(out, id, out_stride, columns, H, total, TILE)
