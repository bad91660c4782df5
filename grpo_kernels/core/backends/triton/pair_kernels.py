"""The Triton kernels over (row, id) pairs: rows of hidden states and rows (ids) of the weight.

Hidden states are [num_rows, H], the weight is [V, H], and matrices have unit stride in H. In
`pair_logits_kernel` a program (instance of the kernel) computes one pair. In the other kernels it
computes TILE.BLOCK columns of one row of the output, see `block_of_program`.
"""

import triton
import triton.language as tl

from .kernels import compile_kernel
from .softmax_rows import NEG_INF, row_pointer

#: Rows of a matrix whose loads a program issues together. They are summed one after the other.
ROWS_AT_ONCE = tl.constexpr(8)


@triton.jit
def matrix_row(x, i, stride, TILE):
    """Return a pointer to row i of the matrix x, whose rows are `stride` elements apart."""
    return row_pointer(x, i.to(tl.int64), T=None, stride_a=None, stride_t=stride, TILE=TILE)


@triton.jit
def columns_to_read(H, is_wanted, TILE):
    """Return how many columns of a row of H columns to read: all if is_wanted, else none.

    The result is compared with the columns of a load, as its mask.
    """
    width = tl.where(is_wanted, H, 0)
    if TILE.ALIGNED:
        # H is a multiple of 16 here, so this changes nothing. It tells the compiler so, which then
        # reads the end of a row in wide accesses. tl.multiple_of has no effect if is_wanted is a
        # constant.
        width = width // 16 * 16
    return width


@triton.jit
def block_of_program(H, TILE):
    """Return (row, columns): this program computes `columns`, [TILE.BLOCK], of one row.

    A row has H columns, in blocks of TILE.BLOCK. Consecutive programs compute the blocks of the
    same row. The last block of a row may have columns from H on, which do not exist.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks_per_row = tl.cdiv(H, TILE.BLOCK)
    first_column = (program % blocks_per_row).to(tl.int32) * TILE.BLOCK
    return program // blocks_per_row, first_column + tl.arange(0, TILE.BLOCK)


@triton.jit
def load_columns(x, i, stride, columns, H, is_wanted, TILE):
    """Load `columns` [TILE.BLOCK] of row i of the matrix x, converted to fp32.

    Values from column H on, where the row ends, are 0. If is_wanted is False, nothing is read and
    all values are 0.
    """
    pointer = matrix_row(x, i, stride, TILE) + columns
    is_inside = columns < columns_to_read(H, is_wanted, TILE)
    return tl.load(pointer, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def add_to_columns(out, i, stride, columns, H, total, TILE):
    """Add total, fp32 [TILE.BLOCK], to `columns` of row i of the matrix `out` in place.

    The sum is in fp32 and is rounded once, to the dtype of `out`. Columns from H on, where the row
    ends, are not touched.
    """
    pointer = matrix_row(out, i, stride, TILE) + columns
    is_inside = columns < columns_to_read(H, is_wanted=True, TILE=TILE)
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
    # int64 [num_pairs] each, and the results, fp32 [num_pairs]
    ids,
    rows,
    logits,
    TILE: tl.constexpr,
):
    """Compute the dot product hidden[row] . weight[id] of each pair, one program for each pair.

    The result is -inf for the id -1, which marks an unused pair. Each thread sums its own columns
    of all tiles, and the sums of the threads are added at the end.
    """
    pair = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + pair)
    if id >= 0:
        i = tl.load(rows + pair)
        total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
        for start in range(0, H, TILE.BLOCK):
            columns = start + tl.arange(0, TILE.BLOCK)
            x = load_columns(hidden, i, hidden_stride, columns, H, is_wanted=True, TILE=TILE)
            y = load_columns(weight, id, weight_stride, columns, H, is_wanted=True, TILE=TILE)
            total += x * y
        tl.store(logits + pair, tl.sum(total, axis=0))
    else:
        tl.store(logits + pair, NEG_INF)


@compile_kernel
def grad_hidden_of_pairs_kernel(
    # fp32 [num_pairs], int64 [num_pairs], int64 [num_rows + 1]
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
    has_pair = begin > end  # False, as a variable of the type that the loop assigns
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
        is_inside = columns < columns_to_read(H, is_wanted=True, TILE=TILE)
        tl.store(pointer, total.to(out.dtype.element_ty), mask=is_inside)


# ---- the gradient of the weight
#
# Pairs are sorted by id. If an id has 2 * PIECE pairs or more, they are divided into pieces of
# PIECE pairs (the last piece is longer), so that several programs share a frequent id. The first
# kernel sums pieces, the second kernel adds the sums of an id's pieces.
#
# The sorted pairs are also divided into windows of PIECE pairs. Apart from the first piece of an
# id, at most one piece starts in a window. So a piece is found by its window, and its sum is stored
# in the window's row of `partial_sums`, without a list of the pieces.
#
#     ids                int32 [num_pairs], ascending; -1 for unused pairs
#     window_id_begins   int64 [num_pairs // PIECE], from `id_begins_of_windows`: for the last pair
#                        of each window, where the pairs of its id begin
#     partial_sums       fp32 [num_pairs // PIECE + 1, H], for each window the sum of the piece that
#                        starts in it


@triton.jit
def is_id_at(ids, position, end, id):
    """Return whether the pair at this position has the id `id`. It is False from `end` on."""
    return tl.load(ids + position, mask=position < end, other=-1) == id


@triton.jit
def piece_in_window(ids, window_id_begins, window, num_pairs, PIECE):
    """Find the piece that starts in a window and belongs to the last id of the window before it.

    No other piece starts in the window, apart from the first pieces of ids. Returns

        begin    position where the pairs of that id begin
        id       the id
        start    position in the window where a piece of the id would start. The pieces of an id
                 start at begin, begin + PIECE, begin + 2 * PIECE, ...
        exists   whether the id has PIECE pairs or more from `start` on, so that there is a piece

    window      number of the window, at least 1: the first window has no window before it
    num_pairs   number of all pairs
    """
    begin = tl.load(window_id_begins + window - 1)
    start = begin + (window - begin // PIECE) * PIECE
    id = tl.load(ids + begin)
    # The id -1 marks unused pairs, which have no piece.
    return begin, id, start, (id >= 0) & is_id_at(ids, start + PIECE - 1, num_pairs, id)


@compile_kernel
def grad_weight_of_pairs_kernel(
    # fp32 [num_pairs] and int64 [num_pairs], in the order of the pairs
    values,
    rows,
    # [num_pairs]: ascending ids, and the index of the pair that has each of them
    ids,
    order,
    num_pairs,
    # [num_firsts]: the position of the first pair of each distinct id, filled up with num_pairs
    first_positions,
    num_firsts,
    # [num_pairs // PIECE]: where the pairs of the last id of each window begin
    window_id_begins,
    # fp32 [num_pairs // PIECE + 1, H]: row k is the sum of the piece that begins in window k
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
    """For each pair (row, id) with its value: out[id] += value * hidden[row].

    Each program sums the pairs of a piece, in some of the columns. If an id has only one piece (all
    of its pairs), the program adds the sum to out[id]. If an id has several pieces, it stores the
    sum in partial_sums, for `add_partial_sums_kernel`.

    i is the number of a program without its columns. Programs i < num_firsts compute the first
    piece of the i-th distinct id. The others compute the piece that starts in window
    i - num_firsts + 1 and is not the first of its id, if there is one.
    """
    i, columns = block_of_program(H, TILE)
    # position: where the piece of this program begins; num_pairs if it has none
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
        # The id has a next piece if the PIECE pairs after this piece have the id too: a next piece
        # has at least PIECE pairs. The ids ascend, so the last of these pairs decides.
        has_next_piece = is_id_at(ids, position + 2 * PIECE - 1, num_pairs, id)
        # The last piece of an id ends with the id: the loop below stops at the first other id.
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
        is_one_of_several_pieces = has_next_piece | (i >= num_firsts)
        if is_one_of_several_pieces:
            pointer = matrix_row(partial_sums, first // PIECE, H, TILE) + columns
            tl.store(pointer, total, mask=columns < columns_to_read(H, is_wanted=True, TILE=TILE))
        else:
            add_to_columns(out, id, out_stride, columns, H, total, TILE)


@compile_kernel
def add_partial_sums_kernel(
    # [num_pairs], ascending: the id of each pair
    ids,
    num_pairs,
    # [num_pairs // PIECE]: where the pairs of the last id of each window begin
    window_id_begins,
    # fp32 [num_pairs // PIECE + 1, H]: row k is the sum of the piece that begins in window k
    partial_sums,
    # [V, H]
    out,
    out_stride: tl.int64,
    H,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    """For each id with several pieces: out[id] += the sums of its pieces, in their order.

    The pairs are sorted by id. Those of an id are divided into pieces of PIECE pairs, from its
    first pair on. `grad_weight_of_pairs_kernel` has stored the sum of each piece in partial_sums.
    A window is the pairs k * PIECE to (k + 1) * PIECE, in which at most one of these pieces begins:
    the next one begins PIECE pairs later, in the next window.

    There is a program (for each block of columns) for each window but the first. The program of the
    window in which the second piece of an id begins adds up all pieces of this id.
    """
    i, columns = block_of_program(H, TILE)
    window = i + 1
    # begin: the first pair of the id whose piece begins in this window
    begin, id, _, has_piece = piece_in_window(ids, window_id_begins, window, num_pairs, PIECE)
    first_window = begin // PIECE  # the window in which the first piece of the id begins
    is_second_piece = window == first_window + 1
    if has_piece & is_second_piece:
        total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
        has_piece_at = True
        position = begin  # of a piece of the id
        while has_piece_at:
            for k in tl.static_range(ROWS_AT_ONCE):
                # A piece has PIECE pairs of the id. The ids ascend, so the last of them decides.
                last_pair = position + (k + 1) * PIECE - 1
                has_piece_at = is_id_at(ids, last_pair, num_pairs, id)
                window_of_piece = position // PIECE + k
                total += load_columns(
                    partial_sums, window_of_piece, H, columns, H, has_piece_at, TILE
                )
            position += ROWS_AT_ONCE * PIECE
        add_to_columns(out, id, out_stride, columns, H, total, TILE)
