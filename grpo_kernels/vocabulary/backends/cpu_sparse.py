"""The sparse products in C++ (csrc/sparse.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..sparse import Slots
from .cpu_module import _cpu, matrix, vector

Tensor = torch.Tensor


def slot_logits(hidden: Tensor, weight: Tensor, slots: Slots) -> Tensor:
    m, width = slots.ids.numel(), weight.shape[1]
    logits = torch.empty(m, dtype=torch.float32)
    _cpu.slot_logits(
        *_rows("hidden", hidden, width), *_rows("weight", weight, width), width,
        *_of_slots(slots, m), vector("logits", logits, torch.float32, m), m, torch.get_num_threads(),
    )  # fmt: skip
    return logits


def add_weight_rows(values: Tensor, slots: Slots, weight: Tensor, out: Tensor) -> None:
    _add_rows(_cpu.add_weight_rows, values, slots, "weight", weight, out)


def add_hidden_rows(values: Tensor, slots: Slots, hidden: Tensor, out: Tensor) -> None:
    _add_rows(_cpu.add_hidden_rows, values, slots, "hidden", hidden, out)


def _add_rows(kernel: Callable[..., None], values: Tensor, slots: Slots, name: str, source: Tensor, out: Tensor) -> None:
    m, width = slots.ids.numel(), source.shape[1]
    kernel(
        vector("values", values, torch.float32, m), *_of_slots(slots, m), m,
        *_rows(name, source, width), *_rows("out", out, width), width, torch.get_num_threads(),
    )  # fmt: skip


def _rows(name: str, x: Tensor, width: int) -> tuple[int, int, int, int]:
    """Address, dtype, stride and number of rows."""
    return *matrix(name, x, (x.shape[0], width)), x.shape[0]


def _of_slots(slots: Slots, m: int) -> tuple[int, int]:
    """The addresses of ids and rows, whose values are trusted."""
    return vector("slots.ids", slots.ids, torch.int64, m), vector("slots.rows", slots.rows, torch.int64, m)
