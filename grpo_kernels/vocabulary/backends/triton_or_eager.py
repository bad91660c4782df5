"""The Triton backend that backend="auto" uses: a call whose kernel cannot run is computed by eager PyTorch, with a warning.

Launch failures are detected before anything is written, so the logits are intact even when the gradient would overwrite them. The
two backends agree to rounding, so one may compute the gradient from statistics of the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...formulas.program import FormulaRefused
from ..rows import RowStats, RowTransform, Teacher
from ..selection import Drawn
from ..sparse import Slots
from . import FusedRows, eager, fall_back, triton, two_visits
from .triton_launch import KernelFailure

if TYPE_CHECKING:
    from ...formulas.token_stage import TokenRows
    from ...objective import Objective

Tensor = torch.Tensor

WRITES_BEHIND_READS = triton.WRITES_BEHIND_READS  # eager does not need it


SECOND_VISIT = "a second visit of the logits, with the formulas in PyTorch, which is slower"


def _or_else(ours: Callable[..., Any], plain: Callable[..., Any], *arguments: Any, **rows: Any) -> Any:
    try:
        return ours(*arguments, **rows)
    except KernelFailure as failure:
        fall_back("eager PyTorch, which is slow", failure.reason)
    return plain(*arguments, **rows)


def stats(*arguments: Any, **rows: Any) -> RowStats:
    return _or_else(triton.stats, eager.stats, *arguments, **rows)


def mixed(*arguments: Any, **rows: Any) -> Tensor:
    of_rows: Tensor = _or_else(triton.mixed, eager.mixed, *arguments, **rows)
    return of_rows


def pull(*arguments: Any, **rows: Any) -> None:
    _or_else(triton.pull, eager.pull, *arguments, **rows)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    _or_else(triton.scale_, eager.scale_, gradient, factor)


def masses(*arguments: Any) -> Tensor:
    of_rows: Tensor = _or_else(triton.masses, eager.masses, *arguments)
    return of_rows


def select(*arguments: Any) -> Drawn:
    drawn: Drawn = _or_else(triton.select, eager.select, *arguments)
    return drawn


def slot_logits(hidden: Tensor, weight: Tensor, slots: Slots) -> Tensor:
    logits: Tensor = _or_else(triton.slot_logits, eager.slot_logits, hidden, weight, slots)
    return logits


def add_weight_rows(values: Tensor, slots: Slots, weight: Tensor, out: Tensor) -> None:
    _or_else(triton.add_weight_rows, eager.add_weight_rows, values, slots, weight, out)


def add_hidden_rows(values: Tensor, slots: Slots, hidden: Tensor, out: Tensor) -> None:
    _or_else(triton.add_hidden_rows, eager.add_hidden_rows, values, slots, hidden, out)


def fused(
    logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None,
    *, teacher: Teacher | None = None,
) -> FusedRows:  # fmt: skip
    """If the kernel that contains the formulas cannot run, kernels without them may: torch then computes the formulas."""
    try:
        if teacher is None:  # there is no fused kernel with a teacher
            return triton.fused(logits, rows, objective, transform, out)
    except KernelFailure as failure:
        fall_back(SECOND_VISIT, failure.reason)
    except FormulaRefused as refusal:
        fall_back(SECOND_VISIT, str(refusal).rstrip("."))
    n = rows.targets.numel()
    return two_visits(sys.modules[__name__], logits, rows, objective, transform, out, max(1, n), teacher)
