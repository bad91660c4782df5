"""The Triton kernels: statistics of rows of one stream and of two, their gradients, a fused kernel of both with the formula of a
loss, scaling; columns of sparse gradients; products over slots.

Rows are on grid axis 0, since the other axes are limited to 65 535: one program per row.
Partials and slopes are tables: a pointer, a stride, and at compile time the names of the rows that are there, as one string."""

import triton
import triton.language as tl

from ...selection import BITS as _WHOLE_BITS
from .one_row import (
    _FLOOR,
    _NEG_INF,
    _at_ids,
    _columns,
    _dz_dx,
    _expm1,
    _factors,
    _first_at,
    _fma,
    _k,
    _load_end,
    _load_full,
    _row_offset,
    _softmax_partials,
    _target_u,
    _u,
    _write_at_ids,
    _write_gradient,
    _write_zeros,
)
from .two_rows import _between, _exp, _finite, _logits, _mixed_terms, _partials_of_two, _pulled, _slope_of_divergence

_BITS = tl.constexpr(_WHOLE_BITS)
_WHOLE_STEP = tl.constexpr(2.0**_WHOLE_BITS)
#: Rows of a product that a program loads at once. They are summed one after the other.
_SIDE_BY_SIDE = tl.constexpr(8)


@triton.constexpr_function
def _row(names, name):
    """The row of a table that has this name, -1 if none has."""
    names = names.split()
    return names.index(name) if name in names else -1


@triton.jit
def _number(x, i, PER_ROW: tl.constexpr):
    if PER_ROW:
        return tl.load(x + i)
    else:
        return x


# fmt: off
@triton.jit
def _put(table, stride, i, x, NAMES: tl.constexpr, NAME: tl.constexpr):
    """Set entry i of a row of the table, if there is such a row."""
    if _row(NAMES, NAME) >= 0:
        tl.store(table + _row(NAMES, NAME) * stride + i, x)


@triton.jit
def _get(table, stride, i, otherwise, NAMES: tl.constexpr, NAME: tl.constexpr):
    """Entry i of a row of the table; `otherwise` if there is no such row."""
    if _row(NAMES, NAME) >= 0:
        return tl.load(table + _row(NAMES, NAME) * stride + i)
    else:
        return otherwise


@triton.jit
def _bits(x):
    """A whole number as an entry of a table."""
    return x.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _put_nothing(partials, stride, i, NAMES: tl.constexpr):
    """Set the partials of a row that is not read."""
    _put(partials, stride, i, 0.0, NAMES, "max")
    _put(partials, stride, i, 1.0, NAMES, "sum")
    _put(partials, stride, i, 0.0, NAMES, "target")
    _put(partials, stride, i, 0.0, NAMES, "weighted")
    _put(partials, stride, i, 0.0, NAMES, "squares")
    _put(partials, stride, i, _bits(tl.full((), -1, tl.int32)), NAMES, "top")


@triton.jit
def _slopes_of(slopes, stride, i, NAMES: tl.constexpr):
    """Slopes of a row, and whether one of them is not 0."""
    d_target = tl.load(slopes + i)
    d_constant = _get(slopes, stride, i, d_target * 0.0, NAMES, "constant")
    d_log = _get(slopes, stride, i, d_target * 0.0, NAMES, "log")
    d_prob = _get(slopes, stride, i, d_target * 0.0, NAMES, "prob")
    d_divergence = _get(slopes, stride, i, d_target * 0.0, NAMES, "divergence")
    active = d_target != 0.0
    if _row(NAMES, "constant") > 0:
        active = active | (d_constant != 0.0)
    if _row(NAMES, "log") > 0:
        active = active | (d_log != 0.0)
    if _row(NAMES, "prob") > 0:
        active = active | (d_prob != 0.0)
    if _row(NAMES, "divergence") > 0:
        active = active | (d_divergence != 0.0)
    return d_target, d_constant, d_log, d_prob, d_divergence, active


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "T", "first", "targets", "read", "inv_temperature", "scale", "softcap", "partials", "partials_stride",
])
def _stats_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64, V, T, first: tl.int64,  # [A, T, V]
    targets, read, inv_temperature, scale, softcap,                         # [n], n programs
    partials, partials_stride: tl.int64,                                    # [q, n]
    NAMES: tl.constexpr, SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr,
    LANES: tl.constexpr, COLS: tl.constexpr, PEELED: tl.constexpr, ENDS: tl.constexpr, KEPT: tl.constexpr,
    FIRST_HINT: tl.constexpr, LAST_HINT: tl.constexpr, STAGES: tl.constexpr,
):
    KIND: tl.constexpr = 2 if _row(NAMES, "squares") > 0 else 1 if _row(NAMES, "weighted") > 0 else 0
    i = tl.program_id(0).to(tl.int64)
    live = True
    if read is not None:
        live = tl.load(read + i)
    if live:
        inv_t = _number(inv_temperature, i, ROW_TEMPERATURE)
        row = logits + _row_offset(first + i, T, stride_a, stride_t, ALIGNED)
        k = _k(scale, softcap, inv_t, SHAPE)
        u = _target_u(row, tl.load(targets + i), V, scale, softcap, SHAPE)
        m, s, w, q, _ = _softmax_partials(row, V, k, scale, softcap, SHAPE, KIND, ALIGNED, ACCESSES, LANES, COLS, ENDS, 0,
                                          FIRST_HINT, FIRST_HINT, STAGES)
        _put(partials, partials_stride, i, k * m, NAMES, "max")
        _put(partials, partials_stride, i, s, NAMES, "sum")
        _put(partials, partials_stride, i, k * u, NAMES, "target")
        _put(partials, partials_stride, i, w, NAMES, "weighted")
        _put(partials, partials_stride, i, q, NAMES, "squares")
        if _row(NAMES, "top") > 0:
            top = _first_at(row, V, m, scale, softcap, SHAPE, ALIGNED, LANES, COLS)
            _put(partials, partials_stride, i, _bits(top), NAMES, "top")
    else:
        _put_nothing(partials, partials_stride, i, NAMES)


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "out_stride_a", "out_stride_t", "T", "first", "targets", "partials", "partials_stride", "slopes",
    "slopes_stride", "inv_temperature", "scale", "softcap",
])
def _pull_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                        # [A, T, V]
    out, out_stride_a: tl.int64, out_stride_t: tl.int64,                   # [A, T, V], may be the logits
    V, T, first: tl.int64,
    targets, partials, partials_stride: tl.int64,                          # [n], [q, n], n programs
    slopes, slopes_stride: tl.int64,                                       # [s, n]
    inv_temperature, scale, softcap,
    NAMES: tl.constexpr, SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr,
    LANES: tl.constexpr, COLS: tl.constexpr, PEELED: tl.constexpr, ENDS: tl.constexpr, KEPT: tl.constexpr,
    FIRST_HINT: tl.constexpr, LAST_HINT: tl.constexpr, STAGES: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    KIND: tl.constexpr = 2 if _row(NAMES, "prob") > 0 else 1 if _row(NAMES, "constant") > 0 or _row(NAMES, "log") > 0 else 0
    d_target, d_constant, d_log, d_prob, _, active = _slopes_of(slopes, slopes_stride, i, NAMES)
    out_row = out + _row_offset(first + i, T, out_stride_a, out_stride_t, ALIGNED)
    if active:
        inv_t = _number(inv_temperature, i, ROW_TEMPERATURE)
        row = logits + _row_offset(first + i, T, stride_a, stride_t, ALIGNED)
        k = _k(scale, softcap, inv_t, SHAPE)
        m = tl.load(partials + i)
        s = tl.load(partials + partials_stride + i)
        z = tl.load(partials + 2 * partials_stride + i)
        # In z, as the maximum is stored: divided by k it may be another number than the u that it was.
        _write_gradient(row, out_row, V, None, tl.load(targets + i), tl.div_rn(z, k), k, m, s, (z - m) - tl.log(s),
                        d_target, d_constant, d_log, d_prob, 1.0, scale, softcap, inv_t, SHAPE, KIND, ALIGNED, PEELED, ACCESSES,
                        LANES, COLS, LAST_HINT, STAGES)
    else:
        _write_zeros(out_row, V, ALIGNED, LANES, COLS, LAST_HINT)


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "out_stride_a", "out_stride_t", "T", "targets", "read", "old_logps", "ref_logps", "sampler_logps",
    "advantages", "policy_weight", "kl_weight", "entropy_weight", "nll_weight", "inv_temperature", "scale", "softcap", "numbers",
    "results", "m",
])
def _fused_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                        # [A, T, V]
    out, out_stride_a: tl.int64, out_stride_t: tl.int64,                   # [A, T, V], may be the logits, or None
    V, T,
    targets, read,                                                         # [n], n programs; None where there is none
    old_logps, ref_logps, sampler_logps, advantages,                       # [m], likewise
    policy_weight, kl_weight, entropy_weight, nll_weight,                  # [m], likewise
    inv_temperature, scale, softcap, numbers, results, m,                  # [3, m]: log-probs, entropies, losses
    listed,                                                                # `OfListed`, None where tokens list no ids: m is n
    FORMULA: tl.constexpr, LISTED: tl.constexpr, SUMS: tl.constexpr, SHAPE: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
    PEELED: tl.constexpr, ENDS: tl.constexpr, KEPT: tl.constexpr, FIRST_HINT: tl.constexpr, LAST_HINT: tl.constexpr,
    STAGES: tl.constexpr,
):
    BONUS: tl.constexpr = 1 if entropy_weight is not None else 0
    i = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + i)  # asked for together, so that the row waits once
    inv_t = _number(inv_temperature, i, ROW_TEMPERATURE)
    live = True
    if read is not None:
        live = tl.load(read + i)
    t = i
    if listed is not None:
        t = tl.load(listed.token + i)
    if live:
        row = logits + _row_offset(i, T, stride_a, stride_t, ALIGNED)
        # Read before the first store, since the gradient may overwrite the logits. The reductions below act as the barrier.
        k = _k(scale, softcap, inv_t, SHAPE)
        u = _target_u(row, target, V, scale, softcap, SHAPE)
        top, s, w, _, kept = _softmax_partials(row, V, k, scale, softcap, SHAPE, 1, ALIGNED, ACCESSES, LANES, COLS, ENDS,
                                               KEPT, FIRST_HINT, LAST_HINT, STAGES)
        log_s = tl.log(s)
        logp = (k * u - k * top) - log_s  # the bits that the statistics of layer 1 give
        entropy = log_s - w / s
        entropy = tl.where(entropy < 0.0, 0.0, entropy)  # unlike maximum, keeps NaN
        of_row = (row, V, k, k * top, log_s, scale, softcap)
        inputs = (old_logps, ref_logps, sampler_logps, advantages, policy_weight, kl_weight, entropy_weight, nll_weight)
        sums = ()
        for phase in tl.static_range(SUMS):
            x = _at_ids(listed, t, of_row, sums, None, LISTED, phase, SHAPE, LANES)
            sums = sums + (x.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        found = FORMULA((logp, entropy) + sums[-1:], t, inputs, numbers, (), 0)  # noqa: RUF005
        d_entropy = found[2]
        d_ids = found[1]
        tl.store(results + t, logp)
        tl.store(results + t + m, entropy)
        tl.store(results + t + m + m, found[0])
        if listed is not None:
            d_ids += _at_ids(listed, t, of_row, sums, found[3], LISTED, SUMS, SHAPE, LANES)
        if out is not None:
            out_row = out + _row_offset(i, T, out_stride_a, out_stride_t, ALIGNED)
            if (d_ids != 0.0) | (d_entropy != 0.0):
                _write_gradient(row, out_row, V, kept if KEPT > 0 else None, target, u, 1.0, top, s, logp, d_ids.to(tl.float32),
                                -d_entropy * entropy, -d_entropy, 0.0, k, scale, softcap, inv_t, SHAPE, BONUS, ALIGNED,
                                PEELED, ACCESSES, LANES, COLS, LAST_HINT, STAGES)
            else:
                _write_zeros(out_row, V, ALIGNED, LANES, COLS, LAST_HINT)
            if listed is not None:
                _write_at_ids(listed, t, of_row, out_row, target, u, logp, found[1], d_ids, -d_entropy * entropy, -d_entropy,
                              inv_t, SHAPE, LANES)
    else:
        tl.store(results + t, 0.0)
        tl.store(results + t + m, 0.0)
        tl.store(results + t + m + m, 0.0)
        if out is not None:
            _write_zeros(out + _row_offset(i, T, out_stride_a, out_stride_t, ALIGNED), V, ALIGNED, LANES, COLS, LAST_HINT)


@triton.jit(do_not_specialize=["stride_a", "stride_t", "V", "T", "n", "factor"])
def _scale_kernel(
    x, stride_a: tl.int64, stride_t: tl.int64, V: tl.int64, T: tl.int64, n: tl.int64, factor,
    ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        STEP: tl.constexpr = LANES * COLS
        BLOCK: tl.constexpr = ACCESSES * STEP
        cols = _columns(ALIGNED, LANES, COLS)
        per_row = tl.cdiv(V, BLOCK)
        for tile in range(tl.program_id(0).to(tl.int64), n * per_row, tl.num_programs(0)):
            start = (tile % per_row) * BLOCK
            row = x + _row_offset(tile // per_row, T, stride_a, stride_t, ALIGNED)
            if start + BLOCK <= V:
                xs = _load_full(row, start, cols, ACCESSES, "")
                for i in tl.static_range(ACCESSES):
                    tl.store(row + start + i * STEP + cols, (xs[i].to(tl.float32) * f).to(x.dtype.element_ty))
            else:
                xs = _load_end(row, start, V, cols, ACCESSES, "")
                for i in tl.static_range(ACCESSES):
                    here = start + i * STEP + cols
                    tl.store(row + here, (xs[i].to(tl.float32) * f).to(x.dtype.element_ty), mask=here < V)


# ---- two streams


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "teacher_stride_a", "teacher_stride_t", "T", "first", "targets", "read", "inv_temperature", "scale",
    "softcap", "teacher_inv_temperature", "teacher_scale", "teacher_softcap", "partials", "of_both", "partials_stride",
])
def _two_stats_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                         # [A, T, V]
    teacher, teacher_stride_a: tl.int64, teacher_stride_t: tl.int64,        # [A, T, V]
    V, T, first: tl.int64,
    targets, read, inv_temperature, scale, softcap,                         # [n], n programs
    teacher_inv_temperature, teacher_scale, teacher_softcap,
    partials, of_both, partials_stride: tl.int64,                           # [q, n], and from teacher_max on: [4, n]
    NAMES: tl.constexpr, SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, TEACHER_SHAPE: tl.constexpr, TEACHER_ROW_TEMPERATURE: tl.constexpr,
    DIRECTION: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):
    KIND: tl.constexpr = 2 if _row(NAMES, "squares") > 0 else 1 if _row(NAMES, "weighted") > 0 else 0
    i = tl.program_id(0).to(tl.int64)
    live = True
    if read is not None:
        live = tl.load(read + i)
    if live:
        row = logits + _row_offset(first + i, T, stride_a, stride_t, ALIGNED)
        teacher_row = teacher + _row_offset(first + i, T, teacher_stride_a, teacher_stride_t, ALIGNED)
        k = _k(scale, softcap, _number(inv_temperature, i, ROW_TEMPERATURE), SHAPE)
        inv_t = _number(teacher_inv_temperature, i, TEACHER_ROW_TEMPERATURE)
        teacher_k = _k(teacher_scale, teacher_softcap, inv_t, TEACHER_SHAPE)
        u = _target_u(row, tl.load(targets + i), V, scale, softcap, SHAPE)
        m, n, s, t, cross, excess, w, q = _partials_of_two(
            row, teacher_row, V, k, scale, softcap, teacher_k, teacher_scale, teacher_softcap,
            SHAPE, TEACHER_SHAPE, DIRECTION == "forward", KIND, ALIGNED, ACCESSES, LANES, COLS,
        )
        _put(partials, partials_stride, i, m, NAMES, "max")
        _put(partials, partials_stride, i, s, NAMES, "sum")
        _put(partials, partials_stride, i, k * u, NAMES, "target")
        _put(partials, partials_stride, i, w, NAMES, "weighted")
        _put(partials, partials_stride, i, q, NAMES, "squares")
        tl.store(of_both + i, n)
        tl.store(of_both + partials_stride + i, t)
        tl.store(of_both + 2 * partials_stride + i, cross)
        tl.store(of_both + 3 * partials_stride + i, excess)
    else:
        _put_nothing(partials, partials_stride, i, NAMES)
        tl.store(of_both + i, 0.0)
        tl.store(of_both + partials_stride + i, 1.0)
        tl.store(of_both + 2 * partials_stride + i, 0.0)
        tl.store(of_both + 3 * partials_stride + i, 0.0)


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "teacher_stride_a", "teacher_stride_t", "T", "first", "read", "inv_temperature", "scale",
    "softcap", "teacher_inv_temperature", "teacher_scale", "teacher_softcap", "partials", "of_both", "partials_stride", "log_sums",
    "b", "rest_of_b", "sums", "sums_stride",
])
def _mixed_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                         # [A, T, V]
    teacher, teacher_stride_a: tl.int64, teacher_stride_t: tl.int64,        # [A, T, V]
    V, T, first: tl.int64,
    read, inv_temperature, scale, softcap,                                  # [n], n programs
    teacher_inv_temperature, teacher_scale, teacher_softcap,
    partials, of_both, partials_stride: tl.int64, log_sums,                 # [q, n], from teacher_max on, [n]
    b, rest_of_b, sums, sums_stride: tl.int64,                              # [2, n]
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, TEACHER_SHAPE: tl.constexpr, TEACHER_ROW_TEMPERATURE: tl.constexpr,
    DIRECTION: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):
    BLOCK: tl.constexpr = ACCESSES * LANES * COLS
    i = tl.program_id(0).to(tl.int64)
    live = True
    if read is not None:
        live = tl.load(read + i)
    if live:
        row = logits + _row_offset(first + i, T, stride_a, stride_t, ALIGNED)
        teacher_row = teacher + _row_offset(first + i, T, teacher_stride_a, teacher_stride_t, ALIGNED)
        k = _k(scale, softcap, _number(inv_temperature, i, ROW_TEMPERATURE), SHAPE)
        inv_t = _number(teacher_inv_temperature, i, TEACHER_ROW_TEMPERATURE)
        teacher_k = _k(teacher_scale, teacher_softcap, inv_t, TEACHER_SHAPE)
        base = _finite(tl.load(partials + i))
        teacher_base = _finite(tl.load(of_both + i))
        log_sum = tl.load(log_sums + i)
        down = 1.0 / tl.load(partials + partials_stride + i)
        teacher_down = 1.0 / tl.load(of_both + partials_stride + i)
        cols = _columns(ALIGNED, LANES, COLS)
        of_student = tl.zeros((LANES, COLS), tl.float32)
        of_teacher = of_student
        end = (V - 1) // BLOCK * BLOCK
        for start in range(0, end, BLOCK):
            xs = _load_full(row, start, cols, ACCESSES, "")
            ys = _load_full(teacher_row, start, cols, ACCESSES, "")
            zs = _logits(xs, start, V, cols, k, scale, softcap, False, SHAPE)
            ws = _logits(ys, start, V, cols, teacher_k, teacher_scale, teacher_softcap, False, TEACHER_SHAPE)
            for j in tl.static_range(ACCESSES):
                a, c, larger = _mixed_terms(
                    zs[j], ws[j], base, teacher_base, log_sum, down, teacher_down, b, rest_of_b, DIRECTION,
                )
                of_student = _fma(larger, a, of_student)
                of_teacher = _fma(larger, c, of_teacher)
        xs = _load_end(row, end, V, cols, ACCESSES, "")
        ys = _load_end(teacher_row, end, V, cols, ACCESSES, "")
        zs = _logits(xs, end, V, cols, k, scale, softcap, True, SHAPE)
        ws = _logits(ys, end, V, cols, teacher_k, teacher_scale, teacher_softcap, True, TEACHER_SHAPE)
        for j in tl.static_range(ACCESSES):
            a, c, larger = _mixed_terms(
                zs[j], ws[j], base, teacher_base, log_sum, down, teacher_down, b, rest_of_b, DIRECTION,
            )
            of_student = _fma(larger, a, of_student)
            of_teacher = _fma(larger, c, of_teacher)
        nothing = 0.0 * log_sum  # NaN for rows that have no divergence
        tl.store(sums + i, tl.sum(tl.sum(of_student, axis=1), axis=0) + nothing)
        tl.store(sums + sums_stride + i, tl.sum(tl.sum(of_teacher, axis=1), axis=0) + nothing)
    else:
        tl.store(sums + i, 0.0)
        tl.store(sums + sums_stride + i, 0.0)



@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "teacher_stride_a", "teacher_stride_t", "out_stride_a", "out_stride_t", "T", "first", "targets", "partials",
    "of_both", "partials_stride", "log_sums", "centers", "b", "rest_of_b", "slopes", "slopes_stride", "inv_temperature", "scale", "softcap", "teacher_inv_temperature", "teacher_scale", "teacher_softcap",
])
def _two_pull_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                         # [A, T, V]
    teacher, teacher_stride_a: tl.int64, teacher_stride_t: tl.int64,        # [A, T, V]
    out, out_stride_a: tl.int64, out_stride_t: tl.int64,                    # [A, T, V], may be the logits, and these the teacher's
    V, T, first: tl.int64,
    targets, partials, of_both, partials_stride: tl.int64,                  # [n], [q, n], from teacher_max on, n programs
    log_sums, centers, b, rest_of_b,                                        # [n], [n]
    slopes, slopes_stride: tl.int64,                                        # [s, n]
    inv_temperature, scale, softcap, teacher_inv_temperature, teacher_scale, teacher_softcap,
    NAMES: tl.constexpr, SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, TEACHER_SHAPE: tl.constexpr, TEACHER_ROW_TEMPERATURE: tl.constexpr,
    DIRECTION: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):
    BLOCK: tl.constexpr = ACCESSES * LANES * COLS
    KIND: tl.constexpr = 2 if _row(NAMES, "prob") > 0 else 1 if _row(NAMES, "log") > 0 else 0
    i = tl.program_id(0).to(tl.int64)
    d_target, d_constant, d_log, d_prob, c, active = _slopes_of(slopes, slopes_stride, i, NAMES)
    out_row = out + _row_offset(first + i, T, out_stride_a, out_stride_t, ALIGNED)
    if active:
        row = logits + _row_offset(first + i, T, stride_a, stride_t, ALIGNED)
        teacher_row = teacher + _row_offset(first + i, T, teacher_stride_a, teacher_stride_t, ALIGNED)
        inv_t = _number(inv_temperature, i, ROW_TEMPERATURE)
        k = _k(scale, softcap, inv_t, SHAPE)
        teacher_inv_t = _number(teacher_inv_temperature, i, TEACHER_ROW_TEMPERATURE)
        teacher_k = _k(teacher_scale, teacher_softcap, teacher_inv_t, TEACHER_SHAPE)
        base = _finite(tl.load(partials + i))
        teacher_base = _finite(tl.load(of_both + i))
        s = tl.load(partials + partials_stride + i)
        log_s = tl.log(s)
        down = 1.0 / s
        teacher_down = 1.0 / tl.load(of_both + partials_stride + i)
        log_sum = tl.load(log_sums + i)
        center = tl.load(centers + i)
        nothing = 0.0 * log_sum  # NaN for rows that have no divergence
        constant = (d_constant - d_target) - d_log * log_s
        target = tl.load(targets + i)
        w = teacher_k * _target_u(teacher_row, target, V, teacher_scale, teacher_softcap, TEACHER_SHAPE)
        tl.debug_barrier()  # between that read and the first store, since the gradient may overwrite the teacher's row, too
        cols = _columns(ALIGNED, LANES, COLS)
        end = (V - 1) // BLOCK * BLOCK
        for start in range(0, end, BLOCK):
            xs = _load_full(row, start, cols, ACCESSES, "")
            ys = _load_full(teacher_row, start, cols, ACCESSES, "")
            _pulled(
                xs, ys, out_row, start, V, cols, k, scale, softcap, inv_t, teacher_k, teacher_scale, teacher_softcap,
                base, teacher_base, down, teacher_down, log_sum, center, b, rest_of_b, constant, d_log, d_prob, c, nothing,
                False, SHAPE, TEACHER_SHAPE, DIRECTION, KIND,
            )
        xs = _load_end(row, end, V, cols, ACCESSES, "")
        ys = _load_end(teacher_row, end, V, cols, ACCESSES, "")
        _pulled(
            xs, ys, out_row, end, V, cols, k, scale, softcap, inv_t, teacher_k, teacher_scale, teacher_softcap,
            base, teacher_base, down, teacher_down, log_sum, center, b, rest_of_b, constant, d_log, d_prob, c, nothing,
            True, SHAPE, TEACHER_SHAPE, DIRECTION, KIND,
        )
        # The target's gradient is formed apart, and stored behind a barrier: see `_write_gradient`.
        z = tl.load(partials + 2 * partials_stride + i)
        logp = (z - base) - log_s
        p = _exp(z - base) * down  # as in `_pulled`: what is 0 there is 0 here
        d = _between(z, w, base, teacher_base) + log_sum
        q = _exp(w - teacher_base) * teacher_down
        of_divergence = c * _slope_of_divergence(p, q, d, center, b, rest_of_b, DIRECTION)
        factor = d_constant + d_log * tl.maximum(logp, _FLOOR) + d_prob * p
        g = -d_target * _expm1(logp) + p * factor + tl.where(c == 0.0, 0.0, of_divergence + nothing)
        g *= _dz_dx(tl.div_rn(z, k), scale, inv_t, SHAPE)
        tl.debug_barrier()
        tl.store(out_row + target, g.to(out.dtype.element_ty), mask=(target >= 0) & (target < V))
    else:
        _write_zeros(out_row, V, ALIGNED, LANES, COLS, "")


# ---- columns of sparse gradients


@triton.jit(do_not_specialize=[
    "stride", "targets", "partials", "partials_stride", "starts", "inv_temperature", "scale", "softcap", "per_unit", "masses", "ids", "values",
    "capacity",
])
def _select_kernel(
    logits, stride: tl.int64, V,                                           # [n, V]
    targets, partials, partials_stride: tl.int64,                          # [n], [q, n], n programs
    starts, inv_temperature, scale, softcap, per_unit,                     # [n]
    masses, ids, values, capacity,                                         # [n], or None and [n, capacity] twice
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr,
    COLS: tl.constexpr,
):
    BLOCK: tl.constexpr = ACCESSES * LANES * COLS
    i = tl.program_id(0).to(tl.int64)
    k = _k(scale, softcap, _number(inv_temperature, i, ROW_TEMPERATURE), SHAPE)
    m = tl.load(partials + i)
    s = tl.load(partials + partials_stride + i)
    usable = (tl.abs(m) < -_NEG_INF) & (tl.abs(1.0 / s) < -_NEG_INF)
    # As the gradient has them: what it makes of a slope of 1.
    c, b, inverse, _, _ = _factors(m, s, 1.0, -1.0, 0.0, 0.0, 0.0, 0)
    target = tl.load(targets + i)
    row = logits + _at(i, stride, ALIGNED)
    before = tl.zeros((), tl.int64)  # where the running sum is
    if starts is not None:
        before = tl.load(starts + i)
    count = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < V
        x = tl.load(row + cols, mask=inside, other=0.0)
        # -inf goes in after z: tanh and the mirror would make a number, or +inf, of it.
        z = tl.where(inside, k * _u(x, scale, softcap, SHAPE), _NEG_INF)
        units = tl.where(usable, tl.exp2(_fma(z, c, -b)) * inverse * per_unit, 0.0)
        exact = (inside & (cols == target)) | (units >= _WHOLE_STEP)
        mass = tl.where(exact, 0.0, units).to(tl.int32).to(tl.int64)
        after = before + tl.sum(mass, axis=0)
        if ids is not None:
            # Few tiles have a column that is taken: the others cost a sum and no scan.
            if ((before >> _BITS) != (after >> _BITS)) | (tl.max(exact.to(tl.int32), axis=0) > 0):
                running = before + tl.cumsum(mass, axis=0)
                taken = (exact | ((running >> _BITS) != ((running - mass) >> _BITS))).to(tl.int32)
                place = count + tl.cumsum(taken, axis=0) - 1
                here = (taken > 0) & (place < capacity)
                to = i * capacity + place
                tl.store(ids + to, cols, mask=here)
                tl.store(values + to, x.to(tl.float32), mask=here)
                count += tl.sum(taken, axis=0)
        before = after
    if masses is not None:
        tl.store(masses + i, before)


# ---- products over slots


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
