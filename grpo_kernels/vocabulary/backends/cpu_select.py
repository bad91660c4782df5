"""Columns of the sparse gradient in C++ (csrc/select.cpp)."""

from __future__ import annotations

import torch

from ..rows import RowStats, RowTransform
from ..selection import Drawn, capacity, per_unit
from .cpu_module import DTYPES, _cpu, address, check, inverse_temperature

Tensor = torch.Tensor


def masses(logits: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform, step: float) -> Tensor:
    sums = torch.empty(logits.shape[0], dtype=torch.int64)
    _select(logits, targets, stats, transform, step, None, None, sums)
    return sums


def select(
    logits: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform, step: float, starts: Tensor
) -> Drawn:  # fmt: skip
    shape = (logits.shape[0], capacity(step))
    drawn = Drawn(torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.float32))
    _select(logits, targets, stats, transform, step, starts, drawn, None)
    return drawn


def _select(
    logits: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform, step: float, starts: Tensor | None,
    drawn: Drawn | None, masses: Tensor | None,
) -> None:  # fmt: skip
    n, vocab = logits.shape
    assert logits.dtype in DTYPES and logits.device.type == "cpu" and (logits.stride(1) == 1 or vocab == 1), logits.dtype
    check(targets, torch.int64, n)
    for vector in (stats.max, stats.sum):
        check(vector, torch.float32, n)
    if starts is not None:
        check(starts, torch.int64, n)
    fixed, per_row = inverse_temperature(transform, n)
    ids, taken = (None, None) if drawn is None else drawn
    _cpu.select(
        logits.data_ptr(), DTYPES[logits.dtype], logits.stride(0), vocab, n, targets.data_ptr(),
        transform.scale, transform.softcap, fixed, per_row, stats.max.data_ptr(), stats.sum.data_ptr(),
        per_unit(step), address(starts), capacity(step), address(ids), address(taken), address(masses), torch.get_num_threads(),
    )  # fmt: skip
