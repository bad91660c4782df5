"""Triton backend: one program per row at a time, the row read from device memory once and once more from L2.

Nothing here knows RL: `fused` compiles the formulas of token_stage.py into its kernel, see triton_formulas.py. Row
counts, strides, scalars and parameters are runtime values, so no length and no schedule compiles anything after the first
call of a kind; what is compile-time is the vocabulary's size class, dtypes, alignment and the presence of optional inputs.
A kernel that does not fit or compile gets a smaller tile and then raises KernelFailure, see triton_launch.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from ...formulas import token_stage
from ...formulas.token_stage import TokenRows
from ...objective import Objective
from ..rows import PARTIALS, RowStats, RowTransform, Slopes
from . import FusedRows
from .triton_formulas import compiled_formula
from .triton_launch import Launch, run

Tensor = torch.Tensor

WRITES_BEHIND_READS = False  # many threads, and backwards

#: kind of kernel -> (threads of a program, 128-bit accesses in flight per thread), for rows long enough to fill them.
#: 32 KiB in flight is a little over what 4.8 TB/s times 0.7 us of latency ask of each of 132 SMs (25 KiB).
#:   visit  a row is gone over once: as many threads as a program can have, so that loads and arithmetic of its warps mix;
#:          64 registers each hold the tile.
#:   fused  a row is gone over twice, and what lives across the loops needs more than 64 registers: half the threads, with
#:          128 registers each. Its grid is one program per SM, each taking one row after the other: 132 rows of 152k bf16
#:          logits (39 MB) stay in the 50 MB L2 of a Hopper GPU from first to second read, twice as many would not.
#: Short rows take fewer threads, and the fused grid as many more programs. All depends on V and dtype, never on n.
LAUNCH = {"visit": (1024, 2), "fused": (512, 4)}
#: Programs of `scale_`: a few for each SM of the largest GPUs, and few enough to return at once when there is nothing to do.
SCALE_PROGRAMS = 512

_LOG2E = tl.constexpr(math.log2(math.e))
_NEG_INF = tl.constexpr(-math.inf)
#: Stands for -inf where a factor of exactly 0 follows: 0 * -inf would be NaN.
_FLOOR = tl.constexpr(-1e30)

# ---- one row, in tiles [LANES, COLS] whose second dimension lies within a thread, so that reductions over it cost no exchange


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


# z = k u(x) with k > 0: the softmax runs over u, whose maximum is subtracted before the scaling, so a shift of the logits
# costs no precision. SHAPE is "linear" (u = x), "mirrored" (u = -x, for a negative scale) or "softcap" (u = tanh).


@triton.jit
def _u(x, scale, softcap, SHAPE: tl.constexpr):
    if SHAPE == "softcap":
        # tanh(v) = 1 - 2 / (e^2v + 1), off by 6e-8: times the cap, the spacing of fp32 numbers near it.
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2E * scale / softcap)) + 1.0)
    elif SHAPE == "mirrored":
        return -x
    else:
        return x


@triton.jit
def _k(scale, softcap, inv_t, SHAPE: tl.constexpr):
    if SHAPE == "softcap":
        return softcap * inv_t
    else:
        return tl.abs(scale * inv_t)


@triton.jit
def _dz_dx(u, scale, inv_t, SHAPE: tl.constexpr):
    slope = scale * inv_t
    if SHAPE == "softcap":
        slope = slope * (1.0 - u * u)
    return slope


@triton.jit
def _fold(m, s, w, q, u, k, KIND: tl.constexpr):
    """Fold a tile of u into every lane's running max m, sum s of e^k(u - m), with KIND >= 1 sum w of e^k(u - m) (u - m), with
    KIND = 2 sum q of e^2k(u - m)."""
    new = tl.maximum(m, tl.max(u, axis=1))
    base = tl.where(new == _NEG_INF, 0.0, new)
    d = u - base[:, None]
    e = tl.exp2(d * (k * _LOG2E))
    shift = m - base
    keep = tl.exp2(shift * (k * _LOG2E))
    if KIND >= 1:
        w = (w + s * tl.maximum(shift, _FLOOR)) * keep + tl.sum(e * tl.maximum(d, _FLOOR), axis=1)
    if KIND >= 2:
        q = q * keep * keep + tl.sum(e * e, axis=1)
    return new, s * keep + tl.sum(e, axis=1), w, q


@triton.jit
def _softmax_partials(
    row, V, k, scale, softcap,
    SHAPE: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """m = max u, s, w and q (see _fold) of one row."""
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    m = tl.full((LANES,), _NEG_INF, tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    w = tl.zeros((LANES,), tl.float32)
    q = tl.zeros((LANES,), tl.float32)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        x = tl.load(row + start + cols, eviction_policy="evict_last").to(tl.float32)
        m, s, w, q = _fold(m, s, w, q, _u(x, scale, softcap, SHAPE), k, KIND)
    if full < V:
        inside = full + cols < V
        x = tl.load(row + full + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        # -inf goes in after u: tanh and the mirror would make a number, or +inf, of it.
        u = tl.where(inside, _u(x, scale, softcap, SHAPE), _NEG_INF)
        m, s, w, q = _fold(m, s, w, q, u, k, KIND)
    top = tl.max(m, axis=0)
    shift = m - tl.where(top == _NEG_INF, 0.0, top)
    keep = tl.exp2(shift * (k * _LOG2E))
    if KIND >= 1:
        w = (w + s * tl.maximum(shift, _FLOOR)) * keep
    if KIND >= 2:
        q = q * keep * keep
    return top, tl.sum(s * keep, axis=0), tl.sum(w, axis=0), tl.sum(q, axis=0)


@triton.jit
def _first_at(row, V, m, scale, softcap, SHAPE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr):
    """The first column whose u is m, or -1. One more read of the row."""
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    first = tl.full((LANES,), 2147483647, tl.int32)
    for start in range(0, V, BLOCK):
        inside = start + cols < V
        u = _u(tl.load(row + start + cols, mask=inside, other=0.0).to(tl.float32), scale, softcap, SHAPE)
        first = tl.minimum(first, tl.min(tl.where(inside & (u == m), start + cols, 2147483647), axis=1))
    found = tl.min(first, axis=0)
    return tl.where(found == 2147483647, -1, found)


@triton.jit
def _target_u(row, target, V, scale, softcap, SHAPE: tl.constexpr):
    x = tl.load(row + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    return _u(x, scale, softcap, SHAPE)


@triton.jit
def _expm1(x):
    series = 1.0 + x * (1 / 5 + x * (1 / 30 + x * (1 / 210)))
    series = x + x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24) * series))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)  # the series is off by less than 1e-8 there


@triton.jit
def _write_zeros(out, V, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr):
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    zeros = tl.zeros((LANES, COLS), out.dtype.element_ty)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        tl.store(out + start + cols, zeros, eviction_policy="evict_first")
    if full < V:
        tl.store(out + full + cols, zeros, mask=full + cols < V, eviction_policy="evict_first")


@triton.jit
def _gradient(x, m, k, constant, linear, quadratic, scale, softcap, inv_t, SHAPE: tl.constexpr, KIND: tl.constexpr):
    u = _u(x, scale, softcap, SHAPE)
    slope = _dz_dx(u, scale, inv_t, SHAPE)
    d = u - m
    factor = constant * slope
    if KIND >= 1:
        factor += linear * slope * tl.maximum(d, _FLOOR)
    e = tl.exp2(d * (k * _LOG2E))
    if KIND >= 2:
        factor += quadratic * slope * e
    return e * factor


@triton.jit
def _write_gradient(
    row, out, V,
    target, u_target, m, s, logp, d_target, d_constant, d_log, d_prob,
    k, scale, softcap, inv_t,
    SHAPE: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """d loss / dx_j = (d_target (1[j = target] - p_j) + p_j (d_constant + d_log log p_j + d_prob p_j)) dz_j / dx_j, with
    p_j = e^k(u_j - m) / s. KIND 0: d_target alone. 1: d_constant and d_log as well. 2: all."""
    BLOCK: tl.constexpr = LANES * COLS
    cols = _columns(ALIGNED, LANES, COLS)
    # Without the target's own term this is e (constant + linear (u_j - m) + quadratic e) dz_j / dx_j, e = e^k(u_j - m).
    constant = -d_target / s
    linear = 0.0
    quadratic = 0.0
    if KIND >= 1:
        constant += (d_constant - d_log * tl.log(s)) / s
        linear = k * d_log / s
    if KIND >= 2:
        quadratic = d_prob / (s * s)
    full = V // BLOCK * BLOCK
    # Backwards: what was read last is the surest to be in L2 still.
    if full < V:
        inside = full + cols < V
        x = tl.load(row + full + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        g = _gradient(x, m, k, constant, linear, quadratic, scale, softcap, inv_t, SHAPE, KIND)
        tl.store(out + full + cols, g.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    for done in range(0, full, BLOCK):
        at = full - BLOCK - done
        x = tl.load(row + at + cols, eviction_policy="evict_first").to(tl.float32)
        g = _gradient(x, m, k, constant, linear, quadratic, scale, softcap, inv_t, SHAPE, KIND)
        tl.store(out + at + cols, g.to(out.dtype.element_ty), eviction_policy="evict_first")
    # The target's gradient is formed apart: 1 - p_y cancels as p_y -> 1, -expm1(logp) does not, and adding 1 to a stored
    # 16-bit value would lose it. One store for the row, which the barrier orders behind the tiles' stores.
    g = -d_target * _expm1(logp)
    if KIND >= 1:
        factor = d_constant + d_log * tl.maximum(logp, _FLOOR)
        if KIND >= 2:
            factor += d_prob * tl.exp(logp)
        g += tl.exp(logp) * factor
    g *= _dz_dx(u_target, scale, inv_t, SHAPE)
    tl.debug_barrier()
    tl.store(out + target, g.to(out.dtype.element_ty), mask=(target >= 0) & (target < V))


# ---- kernels: rows on grid axis 0 (the others end at 65 535), one program per row or, in the fused one, per several rows


# fmt: off
@triton.jit(do_not_specialize=[
    "stride_a", "stride_t", "T", "first", "targets", "read", "inv_temperature", "scale", "softcap",
    "maxima", "sums", "z_targets", "weighted", "squares", "tops",
])
def _stats_kernel(
    logits, stride_a: tl.int64, stride_t: tl.int64, V, T, first: tl.int64,  # [A, T, V]
    targets, read, inv_temperature, scale, softcap,                         # [n], n programs
    maxima, sums, z_targets, weighted, squares, tops,                       # [n], the last three None where not wanted
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
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
        m, s, w, q = _softmax_partials(row, V, k, scale, softcap, SHAPE, KIND, ALIGNED, LANES, COLS)
        tl.store(maxima + i, k * m)
        tl.store(sums + i, s)
        tl.store(z_targets + i, k * u)
        if weighted is not None:
            tl.store(weighted + i, k * w)
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
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
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
        _write_gradient(row, out_row, V, tl.load(targets + i), tl.div_rn(z, k), tl.div_rn(m, k), s, (z - m) - tl.log(s),
                        d_target, d_constant, d_log, d_prob, k, scale, softcap, inv_t, SHAPE, KIND, ALIGNED, LANES, COLS)
    else:
        _write_zeros(out_row, V, ALIGNED, LANES, COLS)


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
    TERMS: tl.constexpr, SURROGATE: tl.constexpr, DETACHED: tl.constexpr, TRUST: tl.constexpr, TRUST_SAMPLER: tl.constexpr,
    KL_TERMS: tl.constexpr, ESTIMATOR: tl.constexpr, SCORE: tl.constexpr, WEIGHTING: tl.constexpr,
    STRAIGHT_THROUGH: tl.constexpr,
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
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
            # Before the first store: the gradient may go where the logits are. The reductions below are the barrier.
            k = _k(scale, softcap, inv_t, SHAPE)
            u = _target_u(row, target, V, scale, softcap, SHAPE)
            m, s, w, _ = _softmax_partials(row, V, k, scale, softcap, SHAPE, 1, ALIGNED, LANES, COLS)
            log_s = tl.log(s)
            logp = k * (u - m) - log_s
            entropy = log_s - k * w / s
            entropy = tl.where(entropy < 0.0, 0.0, entropy)  # unlike maximum, keeps NaN
            old_logp = logp  # on-policy: ratio 1
            if old_logps is not None:
                old_logp = tl.load(old_logps + i)
            ref_logp = None
            if ref_logps is not None:
                ref_logp = tl.load(ref_logps + i)
            sampler_logp = None
            if sampler_logps is not None:
                sampler_logp = tl.load(sampler_logps + i)
            w_kl = None
            if kl_weight is not None:
                w_kl = tl.load(kl_weight + i)
            w_entropy = None
            if entropy_weight is not None:
                w_entropy = tl.load(entropy_weight + i)
            w_nll = None
            if nll_weight is not None:
                w_nll = tl.load(nll_weight + i)
            loss, d_logp, d_entropy = TERMS(
                logp, entropy, old_logp, ref_logp, sampler_logp, tl.load(advantages + i),
                tl.load(policy_weight + i), w_kl, w_entropy, w_nll,
                surrogate_params, trust_params, entropy_floor, ratio_bounds, kl_clamps,
                SURROGATE, DETACHED, TRUST, TRUST_SAMPLER, KL_TERMS, ESTIMATOR, SCORE, WEIGHTING, STRAIGHT_THROUGH,
            )
            tl.store(logps + i, logp)
            tl.store(entropies + i, entropy)
            tl.store(losses + i, loss)
            if out is not None:
                out_row = out + _row_offset(i, T, out_stride_a, out_stride_t, ALIGNED)
                if (d_logp != 0.0) | (d_entropy != 0.0):
                    _write_gradient(row, out_row, V, target, u, m, s, logp, d_logp, -d_entropy * entropy, -d_entropy, 0.0,
                                    k, scale, softcap, inv_t, SHAPE, BONUS, ALIGNED, LANES, COLS)
                else:
                    _write_zeros(out_row, V, ALIGNED, LANES, COLS)
        else:
            tl.store(logps + i, 0.0)
            tl.store(entropies + i, 0.0)
            tl.store(losses + i, 0.0)
            if out is not None:
                _write_zeros(out + _row_offset(i, T, out_stride_a, out_stride_t, ALIGNED), V, ALIGNED, LANES, COLS)
# fmt: on


@triton.jit(do_not_specialize=["stride_a", "stride_t", "V", "T", "n", "factor"])
def _scale_kernel(
    x, stride_a: tl.int64, stride_t: tl.int64, V: tl.int64, T: tl.int64, n: tl.int64, factor,
    ALIGNED: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        BLOCK: tl.constexpr = LANES * COLS
        cols = _columns(ALIGNED, LANES, COLS)
        per_row = tl.cdiv(V, BLOCK)
        for tile in range(tl.program_id(0).to(tl.int64), n * per_row, tl.num_programs(0)):
            start = (tile % per_row) * BLOCK
            at = x + _row_offset(tile // per_row, T, stride_a, stride_t, ALIGNED) + start + cols
            if start + BLOCK <= V:
                tl.store(at, (tl.load(at).to(tl.float32) * f).to(x.dtype.element_ty))
            else:
                inside = start + cols < V
                value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * f
                tl.store(at, value.to(x.dtype.element_ty), mask=inside)


# ---- launches


_INTERPRETED = not isinstance(_stats_kernel, triton.runtime.jit.JITFunction)


def available() -> str | None:
    """None when the kernels can run here, else the reason in words."""
    if _INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "no CUDA or HIP device is visible (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    return _driver_failure()


@functools.cache
def _driver_failure() -> str | None:
    """Why Triton has no way to the GPU: on first use it builds one, with the C compiler of the system."""
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # of a compiler, a linker, a file system
        return f"Triton cannot start ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    return None


def _launch(kind: str, columns: int, tensors: tuple[Tensor, ...], halvings: int) -> Launch:
    """The tile for rows of `columns`, halved so often; `tensors` are [A, T, V], the first sets the width of an access.

    Half a tile is half of what each thread has in flight and then, once that is one access, half the threads."""
    threads, accesses = LAUNCH[kind]
    cols = 16 // tensors[0].element_size()
    lanes = max(32, min(threads * accesses, triton.next_power_of_2(triton.cdiv(columns, cols))) >> halvings)
    # Both strides, whatever the sizes: a dimension of size 1 must not select another kernel.
    aligned = all(x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0 for x in tensors)
    per_sm = max(1, threads // lanes)
    return Launch({"ALIGNED": aligned, "LANES": lanes, "COLS": cols}, _options(min(threads, lanes)), per_sm)


def _options(threads: int) -> dict[str, int]:
    if _INTERPRETED:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    options = {"num_warps": max(1, threads // target.warp_size)}
    if target.backend == "cuda":
        # Left alone, ptxas may spill a few bytes to make room for one more program per SM.
        options["maxnreg"] = min(255, 65536 // threads)
    return options


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _check_layout(logits: Tensor, out: Tensor | None, n: int) -> None:
    assert logits.dim() == 3 and (logits.stride(2) == 1 or logits.shape[2] == 1), (logits.shape, logits.stride())
    assert out is None or (out.shape == logits.shape and (out.stride(2) == 1 or out.shape[2] == 1)), (out.shape, out.stride())
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), logits.dtype
    assert 0 <= n < 2**31 - 2**16 and 0 < logits.shape[2] < 2**31 - 2**16, (n, logits.shape)


def _transform_arguments(transform: RowTransform) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inverse: Any = transform.inv_temperature
    per_row = isinstance(inverse, Tensor)
    shape = "softcap" if transform.softcap != 0 else "linear" if transform.scale >= 0 else "mirrored"
    values = (inverse.contiguous() if per_row else float(inverse), float(transform.scale), float(transform.softcap))
    return values, {"SHAPE": shape, "ROW_TEMPERATURE": per_row}


def _vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def stats(
    logits: Tensor,
    targets: Tensor,
    read: Tensor | None,
    transform: RowTransform,
    names: tuple[str, ...],
    *,
    rows: tuple[int, int] | None = None,
) -> RowStats:
    """Partials of each row of logits [A, T, V]. `rows` = (lo, hi) takes those flat rows; vectors are [hi - lo]."""
    A, T, V = logits.shape
    lo, hi = (0, A * T) if rows is None else rows
    n = hi - lo
    _check_layout(logits, None, n)
    result = RowStats.empty(names, n, logits.device)
    if n == 0:
        return result
    with _on_device(logits):
        scalars, flags = _transform_arguments(transform)
        arguments = (
            logits, logits.stride(0), logits.stride(1), V, T, lo, _vector(targets), _vector(read), *scalars,
            *map(result.get, PARTIALS),
        )  # fmt: skip
        run(_stats_kernel, functools.partial(_launch, "visit", V, (logits,)), lambda _: n, arguments, flags)
    return result


def pull(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    slopes: Slopes,
    transform: RowTransform,
    out: Tensor,
    *,
    rows: tuple[int, int] | None = None,
) -> None:
    """d logits into `out` [A, T, V], which may be the logits. Rows whose slopes are 0 become 0 and are not read."""
    A, T, V = logits.shape
    lo, hi = (0, A * T) if rows is None else rows
    n = hi - lo
    _check_layout(logits, out, n)
    if n == 0:
        return
    with _on_device(logits):
        scalars, flags = _transform_arguments(transform)
        arguments = (
            logits, logits.stride(0), logits.stride(1), out, out.stride(0), out.stride(1), V, T, lo,
            *map(_vector, (targets, stats.max, stats.sum, stats.target, *slopes)), *scalars,
        )  # fmt: skip
        run(_pull_kernel, functools.partial(_launch, "visit", V, (logits, out)), lambda _: n, arguments, flags)


def fused(
    logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None
) -> FusedRows:  # fmt: skip
    """Per-token losses and, with `out`, d loss / d logits, in one visit of each row. Token-level objectives only."""
    assert objective.one_pass, objective
    A, T, V = logits.shape
    n = A * T
    _check_layout(logits, out, n)
    formulas = {
        name: compiled_formula(value) if callable(value) else value for name, value in token_stage.formulas(objective).items()
    }
    logps, entropies, losses = torch.empty(3, n, dtype=torch.float32, device=logits.device).unbind(0)
    if n == 0:
        return FusedRows(logps, entropies, losses)
    with _on_device(logits):
        gradient = logits if out is None else out  # its strides are not looked at without a gradient
        multiprocessors = _multiprocessors(logits.device)
        scalars, flags = _transform_arguments(transform)
        arguments = (
            logits, logits.stride(0), logits.stride(1), out, gradient.stride(0), gradient.stride(1), V, T, n,
            *map(_vector, (rows.targets, rows.read, rows.old_logps, rows.ref_logps, rows.sampler_logps, rows.advantages)),
            *map(_vector, (rows.policy_weight, rows.kl_weight, rows.entropy_weight, rows.nll_weight)), *scalars,
            *token_stage.scalars(objective).values(), logps, entropies, losses,
        )  # fmt: skip
        run(
            _fused_kernel, functools.partial(_launch, "fused", V, (logits, gradient)),
            lambda launch: min(n, multiprocessors * launch.programs_per_sm),
            arguments, {"TERMS": compiled_formula(token_stage.token_terms), **formulas, **flags},
        )  # fmt: skip
    return FusedRows(logps, entropies, losses)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor, a 0-d tensor. The kernel looks at the factor: 1 costs a launch and the host never waits."""
    if gradient.numel() == 0:
        return
    # One row when contiguous. Its stride is never used; 0 keeps the length from selecting a kernel.
    view = gradient.as_strided((1, 1, gradient.numel()), (0, 0, 1)) if gradient.is_contiguous() else gradient
    assert view.dim() == 3 and view.stride(2) == 1, (gradient.shape, gradient.stride())
    A, T, V = view.shape
    with _on_device(gradient):
        run(
            _scale_kernel,
            functools.partial(_launch, "visit", 2**31, (view,)),
            lambda launch: min(A * T * triton.cdiv(V, launch.flags["LANES"] * launch.flags["COLS"]), SCALE_PROGRAMS),
            (view, view.stride(0), view.stride(1), V, T, A * T, factor),
            {},
        )
