"""The sparse products on a GPU: which kernel is launched, with which tile. No host synchronisation.

Sizes and strides are runtime values; dtypes and alignment are compile-time."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from ..sparse import Slots
from .triton_choices import LAUNCH, on_device, options
from .triton_launch import Launch, run
from .triton_sparse_kernels import _add_hidden_rows_kernel, _add_weight_rows_kernel, _slot_logits_kernel

Tensor = torch.Tensor


def slot_logits(hidden: Tensor, weight: Tensor, slots: Slots) -> Tensor:
    m = slots.ids.numel()
    logits = torch.empty(m, dtype=torch.float32, device=hidden.device)
    arguments = (
        hidden, hidden.stride(0), weight, weight.stride(0), hidden.shape[1],
        slots.ids.contiguous(), slots.rows.contiguous(), logits,
    )  # fmt: skip
    _run(_slot_logits_kernel, (weight, hidden), lambda _: m, arguments)
    return logits


def add_weight_rows(values: Tensor, slots: Slots, weight: Tensor, out: Tensor) -> None:
    arguments = (
        values.contiguous(), slots.ids.contiguous(), slots.offsets.contiguous(),
        weight, weight.stride(0), out, out.stride(0), out.shape[1],
    )  # fmt: skip
    _run(_add_weight_rows_kernel, (weight, out), lambda block: out.shape[0] * triton.cdiv(out.shape[1], block), arguments)


def add_hidden_rows(values: Tensor, slots: Slots, hidden: Tensor, out: Tensor) -> None:
    m = slots.ids.numel()
    used = (slots.ids >= 0) & (values != 0)
    ids, order = torch.where(used, slots.ids, -1).to(torch.int32).sort(stable=True)
    places = first_places(ids, min(m, out.shape[0]))
    arguments = (
        values.contiguous(), slots.rows.contiguous(), ids, order, m, places,
        hidden, hidden.stride(0), out, out.stride(0), out.shape[1],
    )  # fmt: skip
    programs = places.numel()
    _run(_add_hidden_rows_kernel, (hidden, out), lambda block: programs * triton.cdiv(out.shape[1], block), arguments)


def first_places(ids: Tensor, most: int) -> Tensor:
    """int64 [most]: where each id that is not -1 occurs first in the sorted ids [m], then m. There are at most `most` of them: how
    many would have to be waited for, and slots that are padded to the maximum are many more."""
    first = ids >= 0
    first[1:] &= ids[1:] != ids[:-1]
    return torch.searchsorted(first.cumsum(0), torch.arange(1, most + 1, device=ids.device))


def _run(kernel: Any, matrices: tuple[Tensor, Tensor], programs: Any, arguments: tuple[Any, ...]) -> None:
    """`programs` gives the grid for a number of columns per block. The first matrix sets the width of an access."""
    for x in matrices:
        assert x.stride(1) == 1 or x.shape[1] <= 1 or not len(x), (x.shape, x.stride())
        assert x.shape[1] == matrices[0].shape[1] and max(x.shape) < 2**31 - 2**16, (x.shape, matrices[0].shape)
    if programs(1) == 0:
        return
    with on_device(matrices[0]):
        run(
            kernel,
            functools.partial(_launch, matrices),
            lambda launch: programs(launch.flags["LANES"] * launch.flags["ACCESSES"] * launch.flags["COLS"]),
            arguments,
            {},
        )


def _launch(matrices: tuple[Tensor, Tensor], halvings: int) -> Launch:
    aligned = all(x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 for x in matrices)
    choice = LAUNCH["slots"]
    lanes = choice.threads >> halvings
    flags = {"ALIGNED": aligned, "LANES": lanes, "ACCESSES": choice.accesses, "COLS": 16 // matrices[0].element_size()}
    return Launch(flags, options(lanes, choice.programs), choice.programs)
