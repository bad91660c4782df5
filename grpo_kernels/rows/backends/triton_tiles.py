"""Tiles of a row: which columns each thread takes, and how they are loaded.

A tile is ACCESSES pieces [LANES, COLS], a lane being a thread of the program. A lane reduces its own elements of all pieces
without exchange between threads, and all loads of a tile are issued before the first value is needed."""

import triton
import triton.language as tl


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
