"""Columns of the sparse gradient on a GPU: see `vocabulary/selection.py`. The host waits for nothing."""

from __future__ import annotations

import functools

import torch

from ..rows import RowStats, RowTransform
from ..selection import Drawn, capacity, per_unit
from .triton_arguments import check_layout, transform_arguments, vectors
from .triton_choices import LAUNCH, on_device, options
from .triton_launch import Launch, run
from .triton_select_kernels import _select_kernel

Tensor = torch.Tensor


def masses(logits: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform, step: float) -> Tensor:
    found = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _run(logits, targets, stats, transform, step, None, found, None)
    return found


def select(
    logits: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform, step: float, starts: Tensor
) -> Drawn:  # fmt: skip
    drawn = Drawn.nothing(logits.shape[0], step, logits.device)
    _run(logits, targets, stats, transform, step, starts, None, drawn)
    return drawn


def _run(
    logits: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform, step: float, starts: Tensor | None,
    masses: Tensor | None, drawn: Drawn | None,
) -> None:  # fmt: skip
    n, vocab = logits.shape
    check_layout("logits", logits[None])
    partials = {f"partials, {name}": stats.get(name) for name in ("max", "sum")}
    of_rows = vectors(n, targets=targets, **partials, starts=starts)
    scalars, flags = transform_arguments(transform, n)
    if n == 0:
        return
    with on_device(logits):
        arguments = (
            logits, logits.stride(0), vocab, *of_rows, *scalars, per_unit(step),
            masses, *(drawn or (None, None)), capacity(step),
        )  # fmt: skip
        run(_select_kernel, functools.partial(_launch, logits), lambda _: n, arguments, flags)


def _launch(logits: Tensor, halvings: int) -> Launch:
    choice = LAUNCH["select"]
    lanes = choice.threads >> halvings
    flags = {"ALIGNED": logits.stride(0) % 16 == 0, "LANES": lanes, "ACCESSES": choice.accesses}
    flags["COLS"] = 16 // logits.element_size()
    return Launch(flags, options(lanes, choice.programs), choice.programs)
