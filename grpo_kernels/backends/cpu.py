"""The CPU backend: C++ row kernels (csrc/), AVX-512, AVX2 or plain code picked at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import RowStats, RowTransform

try:
    from .. import _cpu
except ImportError as error:
    _cpu = None  # type: ignore[assignment]
    _import_error = str(error)

if TYPE_CHECKING:
    from ..objective import Objective, TokenRows
    from . import FusedRows

Tensor = torch.Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

#: Logits per thread between the two visits of a block of rows. Larger blocks share out the 50-150 us that each costs,
#: smaller ones stay in cache; measured on 2 cores with 1 MiB of L2 each and 32 MiB of L3, 2-8 MiB are alike.
BLOCK_BYTES = 4 << 20


def available() -> str | None:
    """None if this backend can run, else the reason in words."""
    if _cpu is None:
        return f"the compiled module grpo_kernels._cpu is missing ({_import_error}): install with a C++17 compiler present"
    return None


def row_stats(
    logits: Tensor,
    targets: Tensor,
    read: Tensor | None,
    transform: RowTransform,
    entropy: bool,
    *,
    rows: tuple[int, int] | None = None,
) -> RowStats:
    """Statistics of the flat rows lo..hi of logits [A, T, V] (all by default); targets, read and a per-row temperature
    are cut to that range, [hi - lo]."""
    _, inner, vocab, outer_stride, inner_stride = _layout(logits)
    lo, hi = rows or (0, logits.shape[0] * inner)
    n = hi - lo
    _check(targets, torch.int64, n)
    if read is not None:
        _check(read, torch.bool, n)
    fixed, per_row = _inverse_temperature(transform, n)
    parts = torch.empty((4 if entropy else 3, n), dtype=torch.float32)
    at = parts.data_ptr()
    _cpu.row_stats(
        logits.data_ptr(), DTYPES[logits.dtype], inner, outer_stride, inner_stride, vocab, lo, n,
        targets.data_ptr(), 0 if read is None else read.data_ptr(),
        transform.scale, transform.softcap, fixed, per_row,
        at, at + 4 * n, at + 12 * n if entropy else 0, at + 8 * n, torch.get_num_threads(),
    )  # fmt: skip
    cut = parts.unbind(0)
    return RowStats(cut[0], cut[1], cut[3] if entropy else None, cut[2])


def row_grads(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    entropy: Tensor | None,
    d_logps: Tensor,
    d_entropy: Tensor | None,
    transform: RowTransform,
    out: Tensor,
    *,
    rows: tuple[int, int] | None = None,
) -> None:
    """The gradient of the flat rows lo..hi of logits [A, T, V] into the same rows of out [A, T, V], which may be the
    logits themselves. The per-row vectors are cut to that range, [hi - lo]; `entropy` is needed with `d_entropy`."""
    outer, inner, vocab, outer_stride, inner_stride = _layout(logits)
    lo, hi = rows or (0, outer * inner)
    n = hi - lo
    out_outer, out_inner, out_vocab, out_outer_stride, out_inner_stride = _layout(out)
    assert (out_outer, out_inner, out_vocab) == (outer, inner, vocab), (out.shape, logits.shape)
    assert (d_entropy is None) or (entropy is not None)
    _check(targets, torch.int64, n)
    for vector in (stats.max, stats.sum, stats.target, d_logps):
        _check(vector, torch.float32, n)
    if d_entropy is not None and entropy is not None:
        _check(entropy, torch.float32, n)
        _check(d_entropy, torch.float32, n)
    fixed, per_row = _inverse_temperature(transform, n)
    _cpu.row_grads(
        logits.data_ptr(), DTYPES[logits.dtype], inner, outer_stride, inner_stride,
        out.data_ptr(), DTYPES[out.dtype], out_outer_stride, out_inner_stride, vocab, lo, n,
        targets.data_ptr(), transform.scale, transform.softcap, fixed, per_row,
        stats.max.data_ptr(), stats.sum.data_ptr(), stats.target.data_ptr(),
        0 if entropy is None else entropy.data_ptr(), d_logps.data_ptr(),
        0 if d_entropy is None else d_entropy.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def fused_loss(logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None) -> FusedRows:
    """Both visits of a block of rows one after the other, so that the second finds the block in cache."""
    from . import cpu, two_visits

    rows_per_thread = max(1, BLOCK_BYTES // (logits.shape[-1] * logits.element_size()))
    return two_visits(cpu, logits, rows, objective, transform, out, rows_per_thread * torch.get_num_threads())


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor (a 0-d tensor), without a pass over it when factor is 1."""
    number = float(factor)
    if number == 1.0:
        return
    if gradient.is_contiguous() and gradient.dtype in DTYPES:
        _cpu.scale(gradient.data_ptr(), DTYPES[gradient.dtype], gradient.numel(), number, torch.get_num_threads())
    else:
        gradient.mul_(number)


def _layout(x: Tensor) -> tuple[int, int, int, int, int]:
    """Sizes A, T, V and the strides of A and T."""
    outer, inner, vocab = x.shape
    outer_stride, inner_stride, unit = x.stride()
    assert (unit == 1 or vocab == 1) and x.dtype in DTYPES and x.device.type == "cpu", (x.stride(), x.dtype, x.device)
    return outer, inner, vocab, outer_stride, inner_stride


def _check(vector: Tensor, dtype: torch.dtype, n: int) -> None:
    assert vector.dtype == dtype and vector.shape == (n,) and vector.is_contiguous(), (vector.dtype, vector.shape, n)


def _inverse_temperature(transform: RowTransform, n: int) -> tuple[float, int]:
    """The number, and the address of the per-row values or 0."""
    t = transform.inv_temperature
    if isinstance(t, Tensor):
        _check(t, torch.float32, n)
        return 1.0, t.data_ptr()
    return t, 0
