"""The Triton kernels of the sparse products. Sums go over slots in their order, without atomics."""

import math

import triton
import triton.language as tl

_NEG_INF = tl.constexpr(-math.inf)
#: Rows that a program loads at once. They are summed one after the other.
_SIDE_BY_SIDE = tl.constexpr(8)


@triton.jit
def _at(i, stride, ALIGNED: tl.constexpr):
    """The offset of row i."""
    offset = i.to(tl.int64) * stride
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


@triton.jit
def _width(H, wanted, ALIGNED: tl.constexpr):
    """Number of columns to read of a row: all, or 0 if it is not wanted. The end of an aligned row is read by wide accesses too."""
    width = tl.where(wanted, H, 0)
    if ALIGNED:
        width = width // 16 * 16  # unchanged: multiple_of() is lost where `wanted` is a constant
    return width


# fmt: off
@triton.jit(do_not_specialize=["hidden_stride", "weight_stride", "H", "ids", "rows", "logits"])
def _slot_logits_kernel(
    hidden, hidden_stride: tl.int64, weight, weight_stride: tl.int64, H,
    ids, rows, logits,                                                     # [m], m programs
    ALIGNED: tl.constexpr, LANES: tl.constexpr, ACCESSES: tl.constexpr, COLS: tl.constexpr,
):
    BLOCK: tl.constexpr = LANES * ACCESSES * COLS
    s = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + s)
    if id >= 0:
        x = hidden + _at(tl.load(rows + s), hidden_stride, ALIGNED)
        y = weight + _at(id, weight_stride, ALIGNED)
        width = _width(H, True, ALIGNED)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, H, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            a = tl.load(x + cols, mask=cols < width, other=0.0).to(tl.float32)
            total += a * tl.load(y + cols, mask=cols < width, other=0.0).to(tl.float32)
        tl.store(logits + s, tl.sum(total, axis=0))
    else:
        tl.store(logits + s, _NEG_INF)


@triton.jit(do_not_specialize=["values", "ids", "offsets", "weight_stride", "out_stride", "H"])
def _add_weight_rows_kernel(
    values, ids, offsets,                                                  # [m], [m], [n + 1]
    weight, weight_stride: tl.int64, out, out_stride: tl.int64, H,         # a program for each row of out and block of columns
    ALIGNED: tl.constexpr, LANES: tl.constexpr, ACCESSES: tl.constexpr, COLS: tl.constexpr,
):
    BLOCK: tl.constexpr = LANES * ACCESSES * COLS
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(H, BLOCK)
    i = program // blocks
    cols = (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(offsets + i)
    end = tl.load(offsets + i + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    touched = begin > end
    for first in range(0, end - begin, _SIDE_BY_SIDE):
        for k in tl.static_range(_SIDE_BY_SIDE):
            s = begin + first + k
            id = tl.load(ids + s, mask=s < end, other=-1)
            value = tl.load(values + s, mask=s < end, other=0.0)
            counts = (id >= 0) & (value != 0.0)
            row = weight + _at(tl.where(counts, id, 0), weight_stride, ALIGNED)
            x = tl.load(row + cols, mask=cols < _width(H, counts, ALIGNED), other=0.0).to(tl.float32)
            total += tl.where(counts, value, 0.0) * x
            touched = touched | counts
    if touched:
        tl.store(out + _at(i, out_stride, ALIGNED) + cols, total.to(out.dtype.element_ty), mask=cols < _width(H, True, ALIGNED))


@triton.jit
def _is_at(ids, p, m, id):
    """Whether the id is at place p of the sorted ids [m]."""
    return tl.load(ids + p, mask=p < m, other=-1) == id


@triton.jit
def _piece_in(ids, begins, window, m, PIECE: tl.constexpr):
    """(where the id before this window begins, where a piece of it begins in the window). A window is PIECE places of the sorted
    ids [m], all but the first of which have an entry in `begins`."""
    begin = tl.load(begins + window - 1)
    return begin, begin + (window - begin // PIECE) * PIECE


@triton.jit(do_not_specialize=[
    "values", "rows", "ids", "order", "places", "n", "begins", "m", "hidden_stride", "out_stride", "H",
])
def _add_hidden_rows_kernel(
    values, rows,                                                          # [m]
    ids, order, m,                                                         # sorted ids, and their slots
    places, n,                                                             # [n]: the first occurrence of each used id, then m
    begins, parts,                                                         # see `pieces`; fp32 [m // PIECE + 1, H]
    hidden, hidden_stride: tl.int64, out, out_stride: tl.int64, H,         # a program for each place and window, and block of columns
    ALIGNED: tl.constexpr, LANES: tl.constexpr, ACCESSES: tl.constexpr, COLS: tl.constexpr, PIECE: tl.constexpr,
):
    """Ids of 2 PIECE slots or more are cut into pieces of PIECE, the last of which is longer; at a place between two windows
    there is one piece at most. What a piece sums up goes into `parts`."""
    BLOCK: tl.constexpr = LANES * ACCESSES * COLS
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(H, BLOCK)
    i = program // blocks
    p = m.to(tl.int64)
    if i < n:
        p = tl.load(places + i)
    else:
        begin, p = _piece_in(ids, begins, i - n + 1, m, PIECE)
        id = tl.load(ids + begin)
        if (id < 0) | (not _is_at(ids, p + PIECE - 1, m, id)):
            p = m.to(tl.int64)
    if p < m:
        id = tl.load(ids + p)
        others = _is_at(ids, p + 2 * PIECE - 1, m, id)
        end = tl.where(others, p + PIECE, m)
        first = p
        cols = (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        same = True
        while same:
            for k in tl.static_range(_SIDE_BY_SIDE):
                same = _is_at(ids, p + k, end, id)
                slot = tl.load(order + p + k, mask=same, other=0)
                value = tl.load(values + slot, mask=same, other=0.0)
                row = hidden + _at(tl.load(rows + slot, mask=same, other=0), hidden_stride, ALIGNED)
                total += value * tl.load(row + cols, mask=cols < _width(H, same, ALIGNED), other=0.0).to(tl.float32)
            p += _SIDE_BY_SIDE
        inside = cols < _width(H, True, ALIGNED)
        if others | (i >= n):
            tl.store(parts + _at(first // PIECE, H, ALIGNED) + cols, total, mask=inside)
        else:
            to = out + _at(id, out_stride, ALIGNED) + cols
            tl.store(to, (tl.load(to, mask=inside).to(tl.float32) + total).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["ids", "begins", "m", "out_stride", "H"])
def _add_pieces_kernel(
    ids, m, begins, parts, out, out_stride: tl.int64, H,                   # a program for each window and block of columns
    ALIGNED: tl.constexpr, LANES: tl.constexpr, ACCESSES: tl.constexpr, COLS: tl.constexpr, PIECE: tl.constexpr,
):
    """out[id] += the sums of its pieces, in their order, for each id that was cut."""
    BLOCK: tl.constexpr = LANES * ACCESSES * COLS
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(H, BLOCK)
    window = program // blocks + 1
    begin, p = _piece_in(ids, begins, window, m, PIECE)
    id = tl.load(ids + begin)
    # The first window behind the id's first place has the program that sums its pieces.
    if (id >= 0) & (begin // PIECE + 1 == window) & _is_at(ids, p + PIECE - 1, m, id):
        cols = (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < _width(H, True, ALIGNED)
        total = tl.zeros((BLOCK,), tl.float32)
        same = True
        p = begin
        while same:
            for k in tl.static_range(_SIDE_BY_SIDE):
                same = _is_at(ids, p + (k + 1) * PIECE - 1, m, id)
                row = parts + _at(p // PIECE + k, H, ALIGNED)
                total += tl.load(row + cols, mask=cols < _width(H, same, ALIGNED), other=0.0)
            p += _SIDE_BY_SIDE * PIECE
        to = out + _at(id, out_stride, ALIGNED) + cols
        tl.store(to, (tl.load(to, mask=inside).to(tl.float32) + total).to(out.dtype.element_ty), mask=inside)
# fmt: on
