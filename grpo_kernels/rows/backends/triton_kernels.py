"""The Triton kernels: statistics of rows, their gradient, a fused kernel of both with the formulas of a loss, and scaling.

Rows are on grid axis 0, since the other axes are limited to 65 535: one program per row, or, in the fused kernel, for several rows.
"""

import triton
import triton.language as tl

from .triton_gradient import _write_gradient
from .triton_rows import _first_at, _k, _softmax_partials, _target_u
from .triton_tiles import _columns, _load_end, _load_full, _row_offset, _write_zeros


# fmt: off
@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "T", "first", "targets", "read", "inv_temperature", "scale", "softcap",
    "maxima", "sums", "z_targets", "weighted", "squares", "tops",
])
def _stats_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64, V, T, first: tl.int64,  # [A, T, V]
    targets, read, inv_temperature, scale, softcap,                         # [n], n programs
    maxima, sums, z_targets, weighted, squares, tops,                       # [n], the last three None where not wanted
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr,
    COLS: tl.constexpr, PEELED: tl.constexpr, ENDS: tl.constexpr, KEPT: tl.constexpr, FIRST_HINT: tl.constexpr,
    LAST_HINT: tl.constexpr, STAGES: tl.constexpr,
):
    KIND: tl.constexpr = 2 if squares is not None else 1 if weighted is not None else 0
    i = tl.program_id(0).to(tl.int64)
    live = True
    if read is not None:
        live = tl.load(read + i)
    if live:
        inv_t = inv_temperature
        if ROW_TEMPERATURE:
            inv_t = tl.load(inv_temperature + i)
        row = logits + _row_offset(first + i, T, stride_a, stride_t, ALIGNED)
        k = _k(scale, softcap, inv_t, SHAPE)
        u = _target_u(row, tl.load(targets + i), V, scale, softcap, SHAPE)
        m, s, w, q, _ = _softmax_partials(row, V, k, scale, softcap, SHAPE, KIND, ALIGNED, ACCESSES, LANES, COLS, ENDS, 0,
                                          FIRST_HINT, FIRST_HINT, STAGES)
        tl.store(maxima + i, k * m)
        tl.store(sums + i, s)
        tl.store(z_targets + i, k * u)
        if weighted is not None:
            tl.store(weighted + i, w)
        if squares is not None:
            tl.store(squares + i, q)
        if tops is not None:
            tl.store(tops + i, _first_at(row, V, m, scale, softcap, SHAPE, ALIGNED, LANES, COLS))
    else:
        tl.store(maxima + i, 0.0)
        tl.store(sums + i, 1.0)
        tl.store(z_targets + i, 0.0)
        if weighted is not None:
            tl.store(weighted + i, 0.0)
        if squares is not None:
            tl.store(squares + i, 0.0)
        if tops is not None:
            tl.store(tops + i, -1)


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "out_stride_a", "out_stride_t", "T", "first", "targets", "maxima", "sums", "z_targets",
    "d_targets", "d_constants", "d_logs", "d_probs", "inv_temperature", "scale", "softcap",
])
def _pull_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                        # [A, T, V]
    out, out_stride_a: tl.int64, out_stride_t: tl.int64,                   # [A, T, V], may be the logits
    V, T, first: tl.int64,
    targets, maxima, sums, z_targets,                                      # [n], n programs
    d_targets, d_constants, d_logs, d_probs,                               # [n], all but the first None where there is none
    inv_temperature, scale, softcap,
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr,
    COLS: tl.constexpr, PEELED: tl.constexpr, ENDS: tl.constexpr, KEPT: tl.constexpr, FIRST_HINT: tl.constexpr,
    LAST_HINT: tl.constexpr, STAGES: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    KIND: tl.constexpr = 2 if d_probs is not None else 1 if d_constants is not None or d_logs is not None else 0
    d_target = tl.load(d_targets + i)
    d_constant = d_target * 0.0
    d_log = d_constant
    d_prob = d_constant
    active = d_target != 0.0
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
        inv_t = inv_temperature
        if ROW_TEMPERATURE:
            inv_t = tl.load(inv_temperature + i)
        row = logits + _row_offset(first + i, T, stride_a, stride_t, ALIGNED)
        k = _k(scale, softcap, inv_t, SHAPE)
        m = tl.load(maxima + i)
        s = tl.load(sums + i)
        z = tl.load(z_targets + i)
        _write_gradient(row, out_row, V, None, tl.load(targets + i), tl.div_rn(z, k), tl.div_rn(m, k), s, (z - m) - tl.log(s),
                        d_target, d_constant, d_log, d_prob, k, scale, softcap, inv_t, SHAPE, KIND, ALIGNED, PEELED, ACCESSES,
                        LANES, COLS, LAST_HINT, STAGES)
    else:
        _write_zeros(out_row, V, ALIGNED, LANES, COLS, LAST_HINT)


@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "out_stride_a", "out_stride_t", "T", "n", "targets", "read", "old_logps", "ref_logps",
    "sampler_logps", "advantages", "policy_weight", "kl_weight", "entropy_weight", "nll_weight", "inv_temperature", "scale",
    "softcap", "surrogate_params", "trust_params", "entropy_floor", "ratio_bounds", "kl_clamps", "logps", "entropies", "losses",
])
def _fused_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64,                        # [A, T, V]
    out, out_stride_a: tl.int64, out_stride_t: tl.int64,                   # [A, T, V], may be the logits, or None
    V, T, n,
    targets, read, old_logps, ref_logps, sampler_logps, advantages,        # [n], None where there is none
    policy_weight, kl_weight, entropy_weight, nll_weight,                  # [n], likewise
    inv_temperature, scale, softcap,
    surrogate_params, trust_params, entropy_floor, ratio_bounds, kl_clamps,
    logps, entropies, losses,                                              # [n]
    TERMS: tl.constexpr, SURROGATE: tl.constexpr, DETACHED: tl.constexpr, LEVEL: tl.constexpr, TRUST: tl.constexpr,
    KL_TERMS: tl.constexpr, ESTIMATOR: tl.constexpr, SCORE: tl.constexpr, WEIGHTING: tl.constexpr,
    STRAIGHT_THROUGH: tl.constexpr,
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr,
    COLS: tl.constexpr, PEELED: tl.constexpr, ENDS: tl.constexpr, KEPT: tl.constexpr, FIRST_HINT: tl.constexpr,
    LAST_HINT: tl.constexpr, STAGES: tl.constexpr,
):
    BONUS: tl.constexpr = 1 if entropy_weight is not None else 0
    for i in range(tl.program_id(0).to(tl.int64), n, tl.num_programs(0)):
        live = True
        if read is not None:
            live = tl.load(read + i)
        if live:
            inv_t = inv_temperature
            if ROW_TEMPERATURE:
                inv_t = tl.load(inv_temperature + i)
            row = logits + _row_offset(i, T, stride_a, stride_t, ALIGNED)
            target = tl.load(targets + i)
            # Read before the first store, since the gradient may overwrite the logits. The reductions below act as the barrier.
            k = _k(scale, softcap, inv_t, SHAPE)
            u = _target_u(row, target, V, scale, softcap, SHAPE)
            m, s, w, _, kept = _softmax_partials(row, V, k, scale, softcap, SHAPE, 1, ALIGNED, ACCESSES, LANES, COLS, ENDS,
                                                 KEPT, FIRST_HINT, LAST_HINT, STAGES)
            log_s = tl.log(s)
            logp = k * (u - m) - log_s
            entropy = log_s - w / s
            entropy = tl.where(entropy < 0.0, 0.0, entropy)  # unlike maximum, keeps NaN
            old_logp = logp  # on-policy: ratio 1
            if old_logps is not None:
                old_logp = tl.load(old_logps + i)
            ref_logp = None
            if ref_logps is not None:
                ref_logp = tl.load(ref_logps + i)
            anchor_logp = old_logp
            if sampler_logps is not None:
                anchor_logp = tl.load(sampler_logps + i)
            w_kl = None
            if kl_weight is not None:
                w_kl = tl.load(kl_weight + i)
            w_entropy = None
            if entropy_weight is not None:
                w_entropy = tl.load(entropy_weight + i)
            w_nll = None
            if nll_weight is not None:
                w_nll = tl.load(nll_weight + i)
            loss, d_logp, _, d_entropy = TERMS(
                logp, entropy, logp - old_logp, old_logp, ref_logp, anchor_logp, tl.load(advantages + i),
                tl.load(policy_weight + i), w_kl, w_entropy, w_nll,
                surrogate_params, trust_params, entropy_floor, ratio_bounds, kl_clamps,
                SURROGATE, DETACHED, LEVEL, TRUST, KL_TERMS, ESTIMATOR, SCORE, WEIGHTING, STRAIGHT_THROUGH,
            )
            tl.store(logps + i, logp)
            tl.store(entropies + i, entropy)
            tl.store(losses + i, loss)
            if out is not None:
                out_row = out + _row_offset(i, T, out_stride_a, out_stride_t, ALIGNED)
                if (d_logp != 0.0) | (d_entropy != 0.0):
                    _write_gradient(row, out_row, V, kept if KEPT > 0 else None, target, u, m, s, logp, d_logp,
                                    -d_entropy * entropy, -d_entropy, 0.0, k, scale, softcap, inv_t, SHAPE, BONUS, ALIGNED,
                                    PEELED, ACCESSES, LANES, COLS, LAST_HINT, STAGES)
                else:
                    _write_zeros(out_row, V, ALIGNED, LANES, COLS, LAST_HINT)
        else:
            tl.store(logps + i, 0.0)
            tl.store(entropies + i, 0.0)
            tl.store(losses + i, 0.0)
            if out is not None:
                _write_zeros(out + _row_offset(i, T, out_stride_a, out_stride_t, ALIGNED), V, ALIGNED, LANES, COLS, LAST_HINT)
# fmt: on


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
