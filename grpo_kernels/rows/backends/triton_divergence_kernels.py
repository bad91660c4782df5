"""The Triton kernels over two streams of rows: statistics, the divergences of a mixture, gradients. One program per row."""

import triton
import triton.language as tl

from .triton_divergence_rows import _between, _exp, _finite, _fold_two, _logits, _mixed_terms, _rescaled, _slope_of_divergence
from .triton_rows import _FLOOR, _NEG_INF, _dz_dx, _expm1, _fma, _k, _target_u, _u
from .triton_tiles import _columns, _load_end, _load_full, _row_offset, _write_zeros


# fmt: off
@triton.jit
def _number(x, i, PER_ROW: tl.constexpr):
    if PER_ROW:
        return tl.load(x + i)
    else:
        return x


@triton.jit
def _partials_of_two(
    row, teacher_row, V, k, scale, softcap, teacher_k, teacher_scale, teacher_softcap,
    SHAPE: tl.constexpr, TEACHER_SHAPE: tl.constexpr, FORWARD: tl.constexpr, KIND: tl.constexpr,
    ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):
    """Both maxima and the sums of `_fold_two` relative to them, of whole rows."""
    BLOCK: tl.constexpr = ACCESSES * LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    m = tl.full((LANES,), _NEG_INF, tl.float32)
    n = m
    s = tl.zeros((LANES,), tl.float32)
    t = s
    cross = s
    excess = s
    w = s
    q = s
    end = (V - 1) // BLOCK * BLOCK
    for start in range(0, end, BLOCK):
        xs = _load_full(row, start, cols, ACCESSES, "")
        ys = _load_full(teacher_row, start, cols, ACCESSES, "")
        zs = _logits(xs, start, V, cols, k, scale, softcap, False, SHAPE)
        ws = _logits(ys, start, V, cols, teacher_k, teacher_scale, teacher_softcap, False, TEACHER_SHAPE)
        m, n, s, t, cross, excess, w, q = _fold_two(m, n, s, t, cross, excess, w, q, zs, ws, FORWARD, KIND)
    xs = _load_end(row, end, V, cols, ACCESSES, "")
    ys = _load_end(teacher_row, end, V, cols, ACCESSES, "")
    zs = _logits(xs, end, V, cols, k, scale, softcap, True, SHAPE)
    ws = _logits(ys, end, V, cols, teacher_k, teacher_scale, teacher_softcap, True, TEACHER_SHAPE)
    m, n, s, t, cross, excess, w, q = _fold_two(m, n, s, t, cross, excess, w, q, zs, ws, FORWARD, KIND)
    top = tl.max(m, axis=0)
    teacher_top = tl.max(n, axis=0)
    s, t, cross, excess, w, q = _rescaled(m, n, top, teacher_top, s, t, cross, excess, w, q, FORWARD)
    s = tl.sum(s, axis=0)
    t = tl.sum(t, axis=0)
    s = tl.where((s < 1.0) & (top > _NEG_INF), 1.0, s)  # rounding; the maximum itself adds 1
    t = tl.where((t < 1.0) & (teacher_top > _NEG_INF), 1.0, t)
    return top, teacher_top, s, t, tl.sum(cross, axis=0), tl.sum(excess, axis=0), tl.sum(w, axis=0), tl.sum(q, axis=0)


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "teacher_stride_a", "teacher_stride_t", "T", "first", "targets", "read", "inv_temperature", "scale",
    "softcap", "teacher_inv_temperature", "teacher_scale", "teacher_softcap", "maxima", "sums", "z_targets", "weighted", "squares",
    "teacher_maxima", "teacher_sums", "crosses", "excesses",
])
def _two_stats_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                         # [A, T, V]
    teacher, teacher_stride_a: tl.int64, teacher_stride_t: tl.int64,        # [A, T, V]
    V, T, first: tl.int64,
    targets, read, inv_temperature, scale, softcap,                         # [n], n programs
    teacher_inv_temperature, teacher_scale, teacher_softcap,
    maxima, sums, z_targets, weighted, squares,                             # [n], the last two None where not wanted
    teacher_maxima, teacher_sums, crosses, excesses,                        # [n]
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, TEACHER_SHAPE: tl.constexpr, TEACHER_ROW_TEMPERATURE: tl.constexpr,
    DIRECTION: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):
    KIND: tl.constexpr = 2 if squares is not None else 1 if weighted is not None else 0
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
        tl.store(maxima + i, m)
        tl.store(sums + i, s)
        tl.store(z_targets + i, k * u)
        tl.store(teacher_maxima + i, n)
        tl.store(teacher_sums + i, t)
        tl.store(crosses + i, cross)
        tl.store(excesses + i, excess)
        if weighted is not None:
            tl.store(weighted + i, w)
        if squares is not None:
            tl.store(squares + i, q)
    else:
        tl.store(maxima + i, 0.0)
        tl.store(sums + i, 1.0)
        tl.store(z_targets + i, 0.0)
        tl.store(teacher_maxima + i, 0.0)
        tl.store(teacher_sums + i, 1.0)
        tl.store(crosses + i, 0.0)
        tl.store(excesses + i, 0.0)
        if weighted is not None:
            tl.store(weighted + i, 0.0)
        if squares is not None:
            tl.store(squares + i, 0.0)


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "teacher_stride_a", "teacher_stride_t", "T", "first", "read", "inv_temperature", "scale",
    "softcap", "teacher_inv_temperature", "teacher_scale", "teacher_softcap", "maxima", "sums", "teacher_maxima", "teacher_sums",
    "log_sums", "b", "rest_of_b", "student_kl", "teacher_kl",
])
def _mixed_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                         # [A, T, V]
    teacher, teacher_stride_a: tl.int64, teacher_stride_t: tl.int64,        # [A, T, V]
    V, T, first: tl.int64,
    read, inv_temperature, scale, softcap,                                  # [n], n programs
    teacher_inv_temperature, teacher_scale, teacher_softcap,
    maxima, sums, teacher_maxima, teacher_sums, log_sums,                   # [n]
    b, rest_of_b,
    student_kl, teacher_kl,                                                 # [n]
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, TEACHER_SHAPE: tl.constexpr, TEACHER_ROW_TEMPERATURE: tl.constexpr,
    ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
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
        base = _finite(tl.load(maxima + i))
        teacher_base = _finite(tl.load(teacher_maxima + i))
        log_sum = tl.load(log_sums + i)
        down = 1.0 / tl.load(sums + i)
        teacher_down = 1.0 / tl.load(teacher_sums + i)
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
                a, c, larger = _mixed_terms(zs[j], ws[j], base, teacher_base, log_sum, down, teacher_down, b, rest_of_b)
                of_student = _fma(larger, a, of_student)
                of_teacher = _fma(larger, c, of_teacher)
        xs = _load_end(row, end, V, cols, ACCESSES, "")
        ys = _load_end(teacher_row, end, V, cols, ACCESSES, "")
        zs = _logits(xs, end, V, cols, k, scale, softcap, True, SHAPE)
        ws = _logits(ys, end, V, cols, teacher_k, teacher_scale, teacher_softcap, True, TEACHER_SHAPE)
        for j in tl.static_range(ACCESSES):
            a, c, larger = _mixed_terms(zs[j], ws[j], base, teacher_base, log_sum, down, teacher_down, b, rest_of_b)
            of_student = _fma(larger, a, of_student)
            of_teacher = _fma(larger, c, of_teacher)
        nothing = 0.0 * log_sum  # NaN for rows that have no divergence
        tl.store(student_kl + i, tl.sum(tl.sum(of_student, axis=1), axis=0) + nothing)
        tl.store(teacher_kl + i, tl.sum(tl.sum(of_teacher, axis=1), axis=0) + nothing)
    else:
        tl.store(student_kl + i, 0.0)
        tl.store(teacher_kl + i, 0.0)


@triton.jit
def _pulled(
    xs, ys, out, at, V, cols, k, scale, softcap, inv_t, teacher_k, teacher_scale, teacher_softcap,
    base, teacher_base, down, teacher_down, log_sum, center, b, rest_of_b, constant, linear, quadratic, c, nothing,
    END: tl.constexpr, SHAPE: tl.constexpr, TEACHER_SHAPE: tl.constexpr, DIRECTION: tl.constexpr, KIND: tl.constexpr,
):
    STEP: tl.constexpr = cols.shape[0] * cols.shape[1]
    ws = _logits(ys, at, V, cols, teacher_k, teacher_scale, teacher_softcap, END, TEACHER_SHAPE)
    for j in tl.static_range(len(xs)):
        u = _u(xs[j], scale, softcap, SHAPE)
        z = k * u
        x = z - base
        p = _exp(x) * down
        factor = constant
        if KIND >= 1:
            factor += linear * tl.maximum(x, _FLOOR)
        if KIND >= 2:
            factor += quadratic * p
        d = _between(z, ws[j], base, teacher_base) + log_sum
        q = p
        if DIRECTION == "forward":
            q = _exp(ws[j] - teacher_base) * teacher_down
        of_divergence = c * _slope_of_divergence(p, q, d, center, b, rest_of_b, DIRECTION)
        g = p * factor + tl.where(c == 0.0, 0.0, of_divergence + nothing)
        g = (g * _dz_dx(u, scale, inv_t, SHAPE)).to(out.dtype.element_ty)
        here = at + j * STEP + cols
        if END:
            tl.store(out + here, g, mask=here < V)
        else:
            tl.store(out + here, g)


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "teacher_stride_a", "teacher_stride_t", "out_stride_a", "out_stride_t", "T", "first", "targets", "maxima",
    "sums", "z_targets", "teacher_maxima", "teacher_sums", "log_sums", "centers", "b", "rest_of_b", "d_targets", "d_constants", "d_logs",
    "d_probs", "d_teachers", "inv_temperature", "scale", "softcap", "teacher_inv_temperature", "teacher_scale", "teacher_softcap",
])
def _two_pull_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                         # [A, T, V]
    teacher, teacher_stride_a: tl.int64, teacher_stride_t: tl.int64,        # [A, T, V]
    out, out_stride_a: tl.int64, out_stride_t: tl.int64,                    # [A, T, V], may be the logits, and these the teacher's
    V, T, first: tl.int64,
    targets, maxima, sums, z_targets, teacher_maxima, teacher_sums,         # [n], n programs
    log_sums, centers, b, rest_of_b,                                        # [n], [n]
    d_targets, d_constants, d_logs, d_probs, d_teachers,                    # [n], the middle three None where there is none
    inv_temperature, scale, softcap, teacher_inv_temperature, teacher_scale, teacher_softcap,
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, TEACHER_SHAPE: tl.constexpr, TEACHER_ROW_TEMPERATURE: tl.constexpr,
    DIRECTION: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):
    BLOCK: tl.constexpr = ACCESSES * LANES * COLS
    KIND: tl.constexpr = 2 if d_probs is not None else 1 if d_logs is not None else 0
    i = tl.program_id(0).to(tl.int64)
    d_target = tl.load(d_targets + i)
    c = tl.load(d_teachers + i)
    d_constant = d_target * 0.0
    d_log = d_constant
    d_prob = d_constant
    active = (d_target != 0.0) | (c != 0.0)
    if d_constants is not None:
        d_constant = tl.load(d_constants + i)
        active = active | (d_constant != 0.0)
    if d_logs is not None:
        d_log = tl.load(d_logs + i)
        active = active | (d_log != 0.0)
    if d_probs is not None:
        d_prob = tl.load(d_probs + i)
        active = active | (d_prob != 0.0)
    out_row = out + _row_offset(first + i, T, out_stride_a, out_stride_t, ALIGNED)
    if active:
        row = logits + _row_offset(first + i, T, stride_a, stride_t, ALIGNED)
        teacher_row = teacher + _row_offset(first + i, T, teacher_stride_a, teacher_stride_t, ALIGNED)
        inv_t = _number(inv_temperature, i, ROW_TEMPERATURE)
        k = _k(scale, softcap, inv_t, SHAPE)
        teacher_inv_t = _number(teacher_inv_temperature, i, TEACHER_ROW_TEMPERATURE)
        teacher_k = _k(teacher_scale, teacher_softcap, teacher_inv_t, TEACHER_SHAPE)
        base = _finite(tl.load(maxima + i))
        teacher_base = _finite(tl.load(teacher_maxima + i))
        s = tl.load(sums + i)
        log_s = tl.log(s)
        down = 1.0 / s
        teacher_down = 1.0 / tl.load(teacher_sums + i)
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
        z = tl.load(z_targets + i)
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
