"""The Triton kernels: statistics of rows of one stream and of two, their gradients, a fused kernel of both with the formula of a
loss, this formula on vectors, scaling, and products over slots.

Rows are on grid axis 0, since the other axes are limited to 65 535: one program per row.
Partials and slopes are tables: a pointer, a stride, and at compile time the names of the rows that are there, as one string."""

import inspect
from typing import Any

import triton
import triton.language as tl

from ...partials import OF_STUDENT, SLOPES_OF_KERNELS
from .one_row import (
    _FLOOR,
    _NEG_INF,
    Stream,
    _at_row,
    _columns,
    _dz_dx,
    _expm1,
    _first_at,
    _load,
    _read_as,
    _softmax_partials,
    _store,
    _target_u,
    _write_gradient,
    _write_zeros,
)
from .two_rows import (
    Softmaxes,
    _add_mixed,
    _exp,
    _finite,
    _log_ratio,
    _partials_of_two,
    _pulled,
    _slope_of_divergence,
)

_STUDENT = tl.constexpr(" ".join(OF_STUDENT))
_SLOPES = tl.constexpr(" ".join(SLOPES_OF_KERNELS))
#: Rows of a product that a program loads at once. They are summed one after the other.
_SIDE_BY_SIDE = tl.constexpr(8)

#: Arguments whose alignment, or divisibility, selects a kernel.
SPECIALIZED = {"logits", "teacher", "out", "V", "hidden", "weight", "parts"}


def _kernel(function: Any) -> Any:
    """A kernel that no other argument of these selects: a new length, or a vector that starts elsewhere, compiles nothing."""
    given = inspect.signature(function).parameters.values()
    others = [x.name for x in given if x.annotation is not tl.constexpr and x.name not in SPECIALIZED]
    return triton.jit(function, do_not_specialize=others)


@triton.constexpr_function
def _row(names, every, k):
    """Which row of a table the k-th of all names has, -1 if it has none."""
    names, name = names.split(), every.split()[k]
    return names.index(name) if name in names else -1


@triton.constexpr_function
def _kind(names, *further):
    """Up to which of `further` a table has rows: 0 if it has none of them, else the last one's place, from 1 on."""
    return max(i * any(name in of.split() for name in names.split()) for i, of in enumerate(further, 1))


@triton.jit
def _entry(x, i, otherwise):
    """Entry i of a vector; `otherwise` where there is none."""
    if x is None:
        return otherwise
    else:
        return tl.load(x + i)


@triton.constexpr_function
def _is_number(x):
    return isinstance(x, float) or not x.dtype.is_ptr()  # a float in the interpreter


@triton.jit
def _number(x, i):
    """A number, or the one of row i."""
    if _is_number(x):
        return x
    else:
        return tl.load(x + i)


@triton.jit
def _put(table, stride, i, values, NAMES):
    """Set entry i of the rows of a table of partials that are there, from the values of OF_STUDENT."""
    for k in tl.static_range(len(values)):
        if _row(NAMES, _STUDENT, k) >= 0:
            tl.store(table + _row(NAMES, _STUDENT, k) * stride + i, values[k])


@triton.jit
def _bits(x):
    """A whole number as an entry of a table."""
    return x.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _put_nothing(table, stride, i, NAMES):
    """Set the partials of a row that is not read."""
    _put(table, stride, i, (0.0, 1.0, 0.0, 0.0, 0.0, _bits(tl.full((), -1, tl.int32))), NAMES)


@triton.jit
def _slopes_of(slopes, stride, i, NAMES):
    """Slopes of a row, and whether one of them is not 0."""
    found = (tl.load(slopes + i),)
    for k in tl.static_range(1, 5):
        x = found[0] * 0.0
        if _row(NAMES, _SLOPES, k) > 0:
            x = tl.load(slopes + _row(NAMES, _SLOPES, k) * stride + i)
        found = found + (x,)  # type: ignore[assignment]  # noqa: RUF005
    active = found[0] != 0.0
    for k in tl.static_range(1, 5):
        if _row(NAMES, _SLOPES, k) > 0:
            active = active | (found[k] != 0.0)
    return found, active


# fmt: off
@_kernel
def _stats_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                        # [A, T, V]
    inv_temperature, transform, V, T, first: tl.int64,                     # a number or [n], n programs
    targets, read, partials, partials_stride: tl.int64,                    # [n], [n], [q, n]
    NAMES: tl.constexpr, TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    if _entry(read, i, True):
        inv_t = _number(inv_temperature, i)
        of = Stream(*_read_as(logits, V, first + i, T, stride_a, stride_t, inv_t, transform, TILE), *transform)
        u = _target_u(of, tl.load(targets + i))
        m, s, w, q, _ = _softmax_partials(of, _kind(NAMES, "weighted", "squares"), 0, TILE)
        top = m
        if _kind(NAMES, "top") > 0:
            top = _bits(_first_at(of, m, TILE))
        _put(partials, partials_stride, i, (of.k * m, s, of.k * u, w, q, top), NAMES)
    else:
        _put_nothing(partials, partials_stride, i, NAMES)


@_kernel
def _pull_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                        # [A, T, V]
    out, out_stride_a: tl.int64, out_stride_t: tl.int64,                   # [A, T, V], may be the logits
    inv_temperature, transform, V, T, first: tl.int64,                     # a number or [n], n programs
    targets, partials, partials_stride: tl.int64,                          # [n], [q, n]
    slopes, slopes_stride: tl.int64,                                       # [s, n]
    NAMES: tl.constexpr, TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    d, active = _slopes_of(slopes, slopes_stride, i, NAMES)
    out_row = _at_row(out, first + i, T, out_stride_a, out_stride_t, TILE)
    if active:
        inv_t = _number(inv_temperature, i)
        of = Stream(*_read_as(logits, V, first + i, T, stride_a, stride_t, inv_t, transform, TILE), *transform)
        m = tl.load(partials + i)
        s = tl.load(partials + partials_stride + i)
        z = tl.load(partials + 2 * partials_stride + i)
        # In z, as the maximum is stored: divided by k it may be another number than the u that it was.
        _write_gradient(of, out_row, None, tl.load(targets + i), tl.div_rn(z, of.k), (z - m) - tl.log(s), of.k, 1.0, m, s,
                        _kind(NAMES, "constant log", "prob"), d[:4], TILE)
    else:
        _write_zeros(out_row, V, TILE)


@_kernel
def _fused_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                        # [A, T, V]
    out, out_stride_a: tl.int64, out_stride_t: tl.int64,                   # [A, T, V], may be the logits, or None
    inv_temperature, transform, V, T,                                      # a number or [n], n programs
    targets, read,                                                         # [n]; None where there is none
    old_logps, ref_logps, sampler_logps, advantages,                       # [n], likewise
    policy_weight, kl_weight, entropy_weight, nll_weight,                  # [n], likewise
    numbers, results, n,                                                   # [3, n]: log-probs, entropies, losses
    FORMULA: tl.constexpr, TILE: tl.constexpr,
):
    BONUS: tl.constexpr = 1 if entropy_weight is not None else 0
    i = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + i)  # asked for together, so that the row waits once
    inv_t = _number(inv_temperature, i)
    live = _entry(read, i, True)
    if live:
        of = Stream(*_read_as(logits, V, i, T, stride_a, stride_t, inv_t, transform, TILE), *transform)
        # Read before the first store, since the gradient may overwrite the logits. The reductions below act as the barrier.
        u = _target_u(of, target)
        top, s, w, _, kept = _softmax_partials(of, 1, TILE.KEPT, TILE)
        log_s = tl.log(s)
        logp = (of.k * u - of.k * top) - log_s  # the bits that the statistics of layer 1 give
        entropy = log_s - w / s
        entropy = tl.where(entropy < 0.0, 0.0, entropy)  # unlike maximum, keeps NaN
        inputs = (old_logps, ref_logps, sampler_logps, advantages, policy_weight, kl_weight, entropy_weight, nll_weight)
        found = FORMULA((logp, entropy), i, inputs, numbers)
        d_logp = found[1]
        d_entropy = found[2]
        tl.store(results + i, logp)
        tl.store(results + i + n, entropy)
        tl.store(results + i + n + n, found[0])
        if out is not None:
            out_row = _at_row(out, i, T, out_stride_a, out_stride_t, TILE)
            if (d_logp != 0.0) | (d_entropy != 0.0):
                _write_gradient(of, out_row, kept if TILE.KEPT > 0 else None, target, u, logp, 1.0, of.k, top, s, BONUS,
                                (d_logp.to(tl.float32), -d_entropy * entropy, -d_entropy, 0.0), TILE)
            else:
                _write_zeros(out_row, V, TILE)
    else:
        tl.store(results + i, 0.0)
        tl.store(results + i + n, 0.0)
        tl.store(results + i + n + n, 0.0)
        if out is not None:
            _write_zeros(_at_row(out, i, T, out_stride_a, out_stride_t, TILE), V, TILE)


@_kernel
def _evaluate_kernel(
    logps, entropy,                                                        # [n]
    old_logps, ref_logps, sampler_logps, advantages,                       # [n], None where there is none
    policy_weight, kl_weight, entropy_weight, nll_weight,                  # likewise
    numbers, n,
    losses, grad_logps, grad_entropy,                                      # [n], the last None without a bonus
    FORMULA: tl.constexpr, TILE: tl.constexpr,
):
    rows = tl.program_id(0) * TILE.BLOCK + tl.arange(0, TILE.BLOCK)
    inside = rows < n
    # Rows behind the last compute it once more, since a formula loads its inputs without a mask.
    i = tl.minimum(rows, n - 1)
    inputs = (old_logps, ref_logps, sampler_logps, advantages, policy_weight, kl_weight, entropy_weight, nll_weight)
    found = FORMULA((tl.load(logps + i), tl.load(entropy + i)), i, inputs, numbers)
    tl.store(losses + i, found[0], mask=inside)
    tl.store(grad_logps + i, found[1], mask=inside)
    if grad_entropy is not None:
        tl.store(grad_entropy + i, found[2], mask=inside)


@triton.jit
def _scale_tile(of, start, f, PIECES, END):
    xs = _load(of, start, PIECES, END, "")
    for i in tl.static_range(PIECES):
        _store(of.row, start, i, of, xs[i].to(tl.float32) * f, END, "")


@_kernel
def _scale_kernel(out, stride_a: tl.int64, stride_t: tl.int64, columns: tl.int64, T: tl.int64, n: tl.int64, factor, TILE: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        cols = _columns(TILE, TILE.ALIGNED)
        per_row = tl.cdiv(columns, TILE.BLOCK)
        for tile in range(tl.program_id(0).to(tl.int64), n * per_row, tl.num_programs(0)):
            start = (tile % per_row) * TILE.BLOCK
            row = _at_row(out, tile // per_row, T, stride_a, stride_t, TILE)
            of = Stream(row, columns, cols, None, None, None, None, None)
            if start + TILE.BLOCK <= columns:
                _scale_tile(of, start, f, TILE.ACCESSES, False)
            else:
                _scale_tile(of, start, f, TILE.ACCESSES, True)


# ---- two streams


@triton.jit
def _softmaxes(partials, of_both, stride, log_sums, i):
    """What the partials of both streams make of row i's logits, and the sum of its own."""
    base = _finite(tl.load(partials + i))
    teacher_base = _finite(tl.load(of_both + i))
    s = tl.load(partials + stride + i)
    return Softmaxes(base, teacher_base, 1.0 / s, 1.0 / tl.load(of_both + stride + i), tl.load(log_sums + i)), s


@_kernel
def _two_stats_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                         # [A, T, V]
    teacher, teacher_stride_a: tl.int64, teacher_stride_t: tl.int64,        # [A, T, V]
    inv_temperature, transform, teacher_inv_temperature, teacher_transform,
    V, T, first: tl.int64,
    targets, read,                                                          # [n], n programs
    partials, of_both, partials_stride: tl.int64,                           # [q, n], and from teacher_max on: [4, n]
    NAMES: tl.constexpr, DIRECTION: tl.constexpr, TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    if _entry(read, i, True):
        of = Stream(*_read_as(logits, V, first + i, T, stride_a, stride_t, _number(inv_temperature, i), transform, TILE), *transform)
        of_teacher = Stream(*_read_as(teacher, V, first + i, T, teacher_stride_a, teacher_stride_t, _number(teacher_inv_temperature, i),
                             teacher_transform, TILE), *teacher_transform)
        u = _target_u(of, tl.load(targets + i))
        KIND: tl.constexpr = _kind(NAMES, "weighted", "squares")
        m, n, s, t, cross, excess, w, q = _partials_of_two(of, of_teacher, DIRECTION == "forward", KIND, TILE)
        _put(partials, partials_stride, i, (m, s, of.k * u, w, q), NAMES)
        _put(of_both, partials_stride, i, (n, t, cross, excess), _STUDENT)
    else:
        _put_nothing(partials, partials_stride, i, NAMES)
        _put(of_both, partials_stride, i, (0.0, 1.0, 0.0, 0.0), _STUDENT)


@_kernel
def _mixed_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                         # [A, T, V]
    teacher, teacher_stride_a: tl.int64, teacher_stride_t: tl.int64,        # [A, T, V]
    inv_temperature, transform, teacher_inv_temperature, teacher_transform,
    V, T, first: tl.int64,
    read,                                                                   # [n], n programs
    partials, of_both, partials_stride: tl.int64, log_sums,                 # [q, n], from teacher_max on, [n]
    shares, sums, sums_stride: tl.int64,                                    # [2, n]
    DIRECTION: tl.constexpr, TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    if _entry(read, i, True):
        of = Stream(*_read_as(logits, V, first + i, T, stride_a, stride_t, _number(inv_temperature, i), transform, TILE), *transform)
        of_teacher = Stream(*_read_as(teacher, V, first + i, T, teacher_stride_a, teacher_stride_t, _number(teacher_inv_temperature, i),
                             teacher_transform, TILE), *teacher_transform)
        softmaxes, _ = _softmaxes(partials, of_both, partials_stride, log_sums, i)
        zeros = tl.zeros(of.cols.shape, tl.float32)
        found = (zeros, zeros)
        end = (V - 1) // TILE.BLOCK * TILE.BLOCK
        for start in range(0, end, TILE.BLOCK):
            found = _add_mixed(found, of, of_teacher, start, softmaxes, shares, DIRECTION, TILE.ACCESSES, False)
        found = _add_mixed(found, of, of_teacher, end, softmaxes, shares, DIRECTION, TILE.ACCESSES, True)
        nothing = 0.0 * softmaxes.log_sum  # NaN for rows that have no divergence
        for k in tl.static_range(2):
            tl.store(sums + k * sums_stride + i, tl.sum(tl.sum(found[k], axis=1), axis=0) + nothing)
    else:
        tl.store(sums + i, 0.0)
        tl.store(sums + sums_stride + i, 0.0)


@_kernel
def _two_pull_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                         # [A, T, V]
    teacher, teacher_stride_a: tl.int64, teacher_stride_t: tl.int64,        # [A, T, V]
    out, out_stride_a: tl.int64, out_stride_t: tl.int64,                    # [A, T, V], may be the logits, and these the teacher's
    inv_temperature, transform, teacher_inv_temperature, teacher_transform,
    V, T, first: tl.int64,
    targets, partials, of_both, partials_stride: tl.int64,                  # [n], [q, n], from teacher_max on, n programs
    log_sums, centers, shares,                                              # [n], [n]
    slopes, slopes_stride: tl.int64,                                        # [s, n]
    NAMES: tl.constexpr, DIRECTION: tl.constexpr, TILE: tl.constexpr,
):
    KIND: tl.constexpr = _kind(NAMES, "log", "prob")
    i = tl.program_id(0).to(tl.int64)
    d, active = _slopes_of(slopes, slopes_stride, i, NAMES)
    d_target, d_constant, d_log, d_prob, c = d
    out_row = _at_row(out, first + i, T, out_stride_a, out_stride_t, TILE)
    if active:
        of = Stream(*_read_as(logits, V, first + i, T, stride_a, stride_t, _number(inv_temperature, i), transform, TILE), *transform)
        of_teacher = Stream(*_read_as(teacher, V, first + i, T, teacher_stride_a, teacher_stride_t, _number(teacher_inv_temperature, i),
                             teacher_transform, TILE), *teacher_transform)
        softmaxes, s = _softmaxes(partials, of_both, partials_stride, log_sums, i)
        log_s = tl.log(s)
        divergence = (c, tl.load(centers + i), shares[0], shares[1])
        factors = ((d_constant - d_target) - d_log * log_s, d_log, d_prob)
        target = tl.load(targets + i)
        w = of_teacher.k * _target_u(of_teacher, target)
        tl.debug_barrier()  # between that read and the first store, since the gradient may overwrite the teacher's row, too
        end = (V - 1) // TILE.BLOCK * TILE.BLOCK
        for start in range(0, end, TILE.BLOCK):
            _pulled(of, of_teacher, out_row, start, softmaxes, factors, divergence, DIRECTION, KIND, TILE.ACCESSES, False)
        _pulled(of, of_teacher, out_row, end, softmaxes, factors, divergence, DIRECTION, KIND, TILE.ACCESSES, True)
        # The target's gradient is formed apart, and stored behind a barrier: see `_write_gradient`.
        z = tl.load(partials + 2 * partials_stride + i)
        logp = (z - softmaxes.base) - log_s
        p = _exp(z - softmaxes.base) * softmaxes.down  # as in `_pulled`: what is 0 there is 0 here
        factor = d_constant + d_log * tl.maximum(logp, _FLOOR) + d_prob * p
        g = -d_target * _expm1(logp) + p * factor
        g += _slope_of_divergence(p, w, _log_ratio(z, w, softmaxes), softmaxes, *divergence, DIRECTION)
        g *= _dz_dx(tl.div_rn(z, of.k), of)
        tl.debug_barrier()
        tl.store(out_row + target, g.to(out.dtype.element_ty), mask=(target >= 0) & (target < V))
    else:
        _write_zeros(out_row, V, TILE)


# ---- products over slots


@triton.jit
def _row_of(x, i, stride, TILE):
    """Where row i of a matrix begins."""
    return _at_row(x, i.to(tl.int64), None, None, stride, TILE)


@triton.jit
def _width(H, wanted, TILE):
    """Number of columns to read of a row: all, or 0 if it is not wanted. The end of an aligned row is read by wide accesses too."""
    width = tl.where(wanted, H, 0)
    if TILE.ALIGNED:
        width = width // 16 * 16  # unchanged: multiple_of() is lost where `wanted` is a constant
    return width


@triton.jit
def _part(H, TILE):
    """Of the programs of a row or a window for each block of columns: which row this one has, and the columns."""
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(H, TILE.BLOCK)
    return program // blocks, (program % blocks).to(tl.int32) * TILE.BLOCK + tl.arange(0, TILE.BLOCK)


@triton.jit
def _read(x, i, stride, cols, H, wanted, TILE):
    """Columns of row i of a matrix, 0 if it is not wanted."""
    return tl.load(_row_of(x, i, stride, TILE) + cols, mask=cols < _width(H, wanted, TILE), other=0.0).to(tl.float32)


@triton.jit
def _add_to(out, i, stride, cols, H, total, TILE):
    """Add to columns of row i of a matrix."""
    to = _row_of(out, i, stride, TILE) + cols
    inside = cols < _width(H, True, TILE)
    tl.store(to, (tl.load(to, mask=inside).to(tl.float32) + total).to(out.dtype.element_ty), mask=inside)


@_kernel
def _slot_logits_kernel(
    hidden, hidden_stride: tl.int64, weight, weight_stride: tl.int64, H,
    ids, rows, of_slots,                                                   # [m], m programs
    TILE: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + s)
    if id >= 0:
        i = tl.load(rows + s)
        total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
        for start in range(0, H, TILE.BLOCK):
            cols = start + tl.arange(0, TILE.BLOCK)
            a = _read(hidden, i, hidden_stride, cols, H, True, TILE)
            total += a * _read(weight, id, weight_stride, cols, H, True, TILE)
        tl.store(of_slots + s, tl.sum(total, axis=0))
    else:
        tl.store(of_slots + s, _NEG_INF)


@_kernel
def _add_weight_rows_kernel(
    values, ids, offsets,                                                  # [m], [m], [n + 1]
    weight, weight_stride: tl.int64, out, out_stride: tl.int64, H,         # a program for each row of out and block of columns
    TILE: tl.constexpr,
):
    i, cols = _part(H, TILE)
    begin = tl.load(offsets + i)
    end = tl.load(offsets + i + 1)
    total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
    touched = begin > end
    for first in range(0, end - begin, _SIDE_BY_SIDE):
        for k in tl.static_range(_SIDE_BY_SIDE):
            s = begin + first + k
            id = tl.load(ids + s, mask=s < end, other=-1)
            value = tl.load(values + s, mask=s < end, other=0.0)
            counts = (id >= 0) & (value != 0.0)
            x = _read(weight, tl.where(counts, id, 0), weight_stride, cols, H, counts, TILE)
            total += tl.where(counts, value, 0.0) * x
            touched = touched | counts
    if touched:
        to = _row_of(out, i, out_stride, TILE) + cols
        tl.store(to, total.to(out.dtype.element_ty), mask=cols < _width(H, True, TILE))


@triton.jit
def _is_at(ids, p, m, id):
    """Whether the id is at place p of the sorted ids [m]."""
    return tl.load(ids + p, mask=p < m, other=-1) == id


@triton.jit
def _piece_in(ids, begins, window, m, PIECE):
    """(where the id before this window begins, that id, where a piece of it would begin in the window, whether one does). A window
    is PIECE places of the sorted ids [m], all but the first of which have an entry in `begins`."""
    begin = tl.load(begins + window - 1)
    p = begin + (window - begin // PIECE) * PIECE
    id = tl.load(ids + begin)
    return begin, id, p, (id >= 0) & _is_at(ids, p + PIECE - 1, m, id)


@_kernel
def _add_hidden_rows_kernel(
    values, rows,                                                          # [m]
    ids, order, m,                                                         # sorted ids, and their slots
    places, n,                                                             # [n]: the first occurrence of each used id, then m
    begins, parts,                                                         # see `pieces`; fp32 [m // PIECE + 1, H]
    hidden, hidden_stride: tl.int64, out, out_stride: tl.int64, H,         # a program for each place and window, and block of columns
    PIECE: tl.constexpr, TILE: tl.constexpr,
):
    """Ids of 2 PIECE slots or more are cut into pieces of PIECE, the last of which is longer; at a place between two windows
    there is one piece at most. What a piece sums up goes into `parts`."""
    i, cols = _part(H, TILE)
    p = m.to(tl.int64)
    if i < n:
        p = tl.load(places + i)
    else:
        _, _, p, there = _piece_in(ids, begins, i - n + 1, m, PIECE)
        if not there:
            p = m.to(tl.int64)
    if p < m:
        id = tl.load(ids + p)
        others = _is_at(ids, p + 2 * PIECE - 1, m, id)
        end = tl.where(others, p + PIECE, m)
        first = p
        total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
        same = True
        while same:
            for k in tl.static_range(_SIDE_BY_SIDE):
                same = _is_at(ids, p + k, end, id)
                slot = tl.load(order + p + k, mask=same, other=0)
                value = tl.load(values + slot, mask=same, other=0.0)
                row = tl.load(rows + slot, mask=same, other=0)
                total += value * _read(hidden, row, hidden_stride, cols, H, same, TILE)
            p += _SIDE_BY_SIDE
        if others | (i >= n):
            tl.store(_row_of(parts, first // PIECE, H, TILE) + cols, total, mask=cols < _width(H, True, TILE))
        else:
            _add_to(out, id, out_stride, cols, H, total, TILE)


@_kernel
def _add_pieces_kernel(
    ids, m, begins, parts, out, out_stride: tl.int64, H,                   # a program for each window and block of columns
    PIECE: tl.constexpr, TILE: tl.constexpr,
):
    """out[id] += the sums of its pieces, in their order, for each id that was cut."""
    i, cols = _part(H, TILE)
    window = i + 1
    begin, id, p, there = _piece_in(ids, begins, window, m, PIECE)
    # The first window behind the id's first place has the program that sums its pieces.
    if there & (begin // PIECE + 1 == window):
        total = tl.full((TILE.BLOCK,), 0.0, tl.float32)
        same = True
        p = begin
        while same:
            for k in tl.static_range(_SIDE_BY_SIDE):
                same = _is_at(ids, p + (k + 1) * PIECE - 1, m, id)
                total += _read(parts, p // PIECE + k, H, cols, H, same, TILE)
            p += _SIDE_BY_SIDE * PIECE
        _add_to(out, id, out_stride, cols, H, total, TILE)
# fmt: on
