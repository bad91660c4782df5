"""The sparse products on a GPU: which kernel is launched, with which tile. No host synchronisation.

Sizes and strides are runtime values; dtypes and alignment are compile-time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton

from ..sparse import Slots
from .triton_arguments import LARGEST, vectors
from .triton_choices import LAUNCH, on_device, options
from .triton_launch import Launch, run
from .triton_sparse_kernels import (
    _add_hidden_rows_kernel,
    _add_pieces_kernel,
    _add_weight_rows_kernel,
    _slot_logits_kernel,
)

Tensor = torch.Tensor

#: A program sums up to twice as many slots of one id. Fewer would need more memory for the sums of pieces: 4 H bytes for each piece
#: that the slots could have, 64 MiB for the two million of 8192 rows of a sparse gradient with H = 4096.
PIECE = 512


def slot_logits(hidden: Tensor, weight: Tensor, slots: Slots) -> Tensor:
    m = slots.ids.numel()
    logits = torch.empty(m, dtype=torch.float32, device=hidden.device)
    of_slots = vectors(m, **{"slots.ids": slots.ids, "slots.rows": slots.rows})
    arguments = (hidden, hidden.stride(0), weight, weight.stride(0), hidden.shape[1], *of_slots, logits)
    _run(_slot_logits_kernel, {"weight": weight, "hidden": hidden}, lambda _: m, arguments)
    return logits


def add_weight_rows(values: Tensor, slots: Slots, weight: Tensor, out: Tensor) -> None:
    of_slots = vectors(slots.ids.numel(), values=values, **{"slots.ids": slots.ids})
    of_rows = vectors(out.shape[0] + 1, **{"slots.offsets": slots.offsets})
    arguments = (*of_slots, *of_rows, weight, weight.stride(0), out, out.stride(0), out.shape[1])
    programs = {"weight": weight, "out": out}, lambda block: out.shape[0] * triton.cdiv(out.shape[1], block)
    _run(_add_weight_rows_kernel, *programs, arguments)


def add_hidden_rows(values: Tensor, slots: Slots, hidden: Tensor, out: Tensor) -> None:
    m = slots.ids.numel()
    of_slots = vectors(m, values=values, **{"slots.rows": slots.rows})
    used = (slots.ids >= 0) & (values != 0)
    ids, order = torch.where(used, slots.ids, -1).to(torch.int32).sort(stable=True)
    places, begins = first_places(ids, min(m, out.shape[0])), pieces(ids)
    # Columns of the sums of pieces are those of out. Their memory is taken, and the second kernel launched, where an id may be cut.
    parts = torch.empty(m // PIECE + 1 if len(begins) else 0, out.shape[1], dtype=torch.float32, device=out.device)
    n, flags = len(places), {"PIECE": PIECE}
    arguments = (
        *of_slots, ids, order, m, places, n, begins, parts,
        hidden, hidden.stride(0), out, out.stride(0), out.shape[1],
    )  # fmt: skip

    def programs(some: int) -> Callable[[int], int]:
        return lambda block: some * triton.cdiv(out.shape[1], block)

    matrices = {"hidden": hidden, "out": out}
    _run(_add_hidden_rows_kernel, matrices, programs(n + len(begins)), arguments, flags)
    arguments = (ids, m, begins, parts, out, out.stride(0), out.shape[1])
    _run(_add_pieces_kernel, matrices, programs(len(begins)), arguments, flags)


def first_places(ids: Tensor, most: int) -> Tensor:
    """int64 [most]: where each id that is not -1 occurs first in the sorted ids [m], then m. There are at most `most` of them: how
    many would have to be waited for, and slots that are padded to the maximum are many more."""
    first = ids >= 0
    first[1:] &= ids[1:] != ids[:-1]
    return torch.searchsorted(first.cumsum(0), torch.arange(1, most + 1, device=ids.device))


def pieces(ids: Tensor) -> Tensor:
    """int64 [m // PIECE], none if no id can have two pieces: where the id begins that every PIECE of the sorted ids [m] ends with.
    From there it is cut, so that its sum does not depend on what other ids have."""
    if len(ids) < 2 * PIECE:
        return torch.empty(0, dtype=torch.int64, device=ids.device)
    return torch.searchsorted(ids, ids[PIECE - 1 :: PIECE].contiguous())


def _run(
    kernel: Any,
    given: dict[str, Tensor],
    programs: Any,
    arguments: tuple[Any, ...],
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """`programs` gives the grid for a number of columns per block. The first matrix sets the width of an access."""
    matrices = tuple(given.values())
    for name, x in given.items():
        width = matrices[0].shape[1]
        plain = x.shape[1] == width and (x.stride(1) == 1 or width <= 1 or x.numel() == 0) and max(x.shape) < LARGEST
        if not plain:
            raise ValueError(
                f"{name} has shape {list(x.shape)} and strides {list(x.stride())}: the Triton kernels take rows of {width} in one piece."
            )
    if programs(1) == 0:
        return
    with on_device(matrices[0]):
        run(
            kernel,
            functools.partial(_launch, matrices),
            lambda launch: programs(launch.flags["LANES"] * launch.flags["ACCESSES"] * launch.flags["COLS"]),
            arguments,
            flags,
        )


def _launch(matrices: tuple[Tensor, ...], halvings: int) -> Launch:
    aligned = all(x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 for x in matrices)
    choice = LAUNCH["slots"]
    lanes = choice.threads >> halvings
    flags = {"ALIGNED": aligned, "LANES": lanes, "ACCESSES": choice.accesses, "COLS": 16 // matrices[0].element_size()}
    return Launch(flags, options(lanes, choice.programs), choice.programs)
