"""The sparse products in C++ (csrc/sparse.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..sparse import Slots
from .cpu_module import DTYPES, _cpu

Tensor = torch.Tensor


def slot_logits(hidden: Tensor, weight: Tensor, slots: Slots) -> Tensor:
    m, width = slots.ids.numel(), _width(hidden, weight)
    logits = torch.empty(m, dtype=torch.float32)
    _check_slots(slots, logits)
    _cpu.slot_logits(
        hidden.data_ptr(), DTYPES[hidden.dtype], hidden.stride(0), hidden.shape[0],
        weight.data_ptr(), DTYPES[weight.dtype], weight.stride(0), weight.shape[0], width,
        slots.ids.data_ptr(), slots.rows.data_ptr(), logits.data_ptr(), m, torch.get_num_threads(),
    )  # fmt: skip
    return logits


def add_weight_rows(values: Tensor, slots: Slots, weight: Tensor, out: Tensor) -> None:
    _add_rows(_cpu.add_weight_rows, values, slots, weight, out)


def add_hidden_rows(values: Tensor, slots: Slots, hidden: Tensor, out: Tensor) -> None:
    _add_rows(_cpu.add_hidden_rows, values, slots, hidden, out)


def _add_rows(kernel: Callable[..., None], values: Tensor, slots: Slots, source: Tensor, out: Tensor) -> None:
    width = _width(source, out)
    _check_slots(slots, values)
    kernel(
        values.data_ptr(), slots.ids.data_ptr(), slots.rows.data_ptr(), slots.ids.numel(),
        source.data_ptr(), DTYPES[source.dtype], source.stride(0), source.shape[0],
        out.data_ptr(), DTYPES[out.dtype], out.stride(0), out.shape[0], width, torch.get_num_threads(),
    )  # fmt: skip


def _width(*matrices: Tensor) -> int:
    width = matrices[0].shape[1]
    for x in matrices:
        assert x.shape[1] == width and (x.stride(1) == 1 or width <= 1 or not len(x)), (x.shape, x.stride(), width)
        assert x.dtype in DTYPES and x.device.type == "cpu", (x.dtype, x.device)
    return width


def _check_slots(slots: Slots, values: Tensor) -> None:
    """Check sizes and dtypes. The values of ids and rows are trusted."""
    m = slots.ids.numel()
    for x, dtype in ((slots.ids, torch.int64), (slots.rows, torch.int64), (values, torch.float32)):
        assert x.shape == (m,) and x.dtype == dtype and x.is_contiguous() and x.device.type == "cpu", (x.shape, x.dtype)
