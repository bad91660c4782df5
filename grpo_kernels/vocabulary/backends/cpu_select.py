"""Columns of the sparse gradient in C++ (csrc/select.cpp)."""

from __future__ import annotations

import torch

from ..rows import RowStats, RowTransform
from ..selection import Drawn, capacity, per_unit
from .cpu_module import _cpu, inverse_temperature, matrix, of_partials, vector

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
    address, dtype, stride = matrix("logits", logits, (n, vocab))
    at, places = of_partials(stats, n), n * capacity(step)
    ids, taken = (None, None) if drawn is None else (x.view(-1) for x in drawn)
    _cpu.select(
        address, dtype, stride, vocab, n, vector("targets", targets, torch.int64, n),
        transform.scale, transform.softcap, *inverse_temperature(transform, n), at["max"], at["sum"],
        per_unit(step), vector("starts", starts, torch.int64, n), capacity(step), vector("ids", ids, torch.int32, places),
        vector("taken", taken, torch.float32, places), vector("masses", masses, torch.int64, n), torch.get_num_threads(),
    )  # fmt: skip
