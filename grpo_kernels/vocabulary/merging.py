"""Partials of parts of a row, which ranks or chunks of the vocabulary have made, as those of the whole row."""

from __future__ import annotations

from typing import Any

import torch

from .divergence import differences, merged_sums
from .rows import MIXED, NOT_READ, RowStats

Tensor = torch.Tensor


def merge(
    values: Tensor, names: tuple[str, ...], read: Tensor | None, starts: Tensor | None = None, teacher: Any = None
) -> RowStats:
    """Partials of parts of a row, `values` [parts, q, n], as those of the whole row.

    A part of only -inf, or of no column, adds nothing. The target is that of the part that has it, NaN where none has it or
    (parts that overlap) several do. `starts` int32 [parts, n]: the id of each part's first column, for `top`. `teacher`: anything
    with a kind and a mixture; MIXED are sums, and simply add up."""
    parts = {name: values[:, i] for i, name in enumerate(names)}
    merged = RowStats.empty(names, values.shape[2], values.device, teacher)
    tops = parts["max"]
    top, shift, share = _shares(tops)
    here = ~parts["target"].isnan()
    found: dict[str, Any] = {
        "max": top,
        "sum": (share * parts["sum"]).sum(0),  # a NaN in any part stays one
        "target": torch.where(here.sum(0) == 1, torch.where(here, parts["target"], 0.0).sum(0), torch.nan),
    }
    if "weighted" in parts:
        weighted = share * (parts["weighted"] + parts["sum"] * shift)
        found["weighted"] = torch.where(share == 0, 0.0, weighted).sum(0)  # a part that is far below: no 0 times infinity
    if "squares" in parts:
        found["squares"] = (share * share * parts["squares"]).sum(0)
    if "top" in parts:
        assert starts is not None
        ids = parts["top"].view(torch.int32)
        last = torch.iinfo(torch.int32).max
        first = torch.where((tops == top) & (ids >= 0), ids + starts, last).amin(0)
        found["top"] = torch.where(first == last, -1, first)
    if "cross" in parts:
        teacher_tops = parts["teacher_max"]
        teacher_top, _, teacher_share = _shares(teacher_tops)
        apart = differences(tops, teacher_tops, top, teacher_top)  # d of the whole row less d of the part
        apart = torch.where((tops == -torch.inf) | (teacher_tops == -torch.inf), 0.0, apart)
        found["teacher_max"], found["teacher_sum"] = teacher_top, (teacher_share * parts["teacher_sum"]).sum(0)
        sums = (parts["sum"], parts["teacher_sum"], parts["cross"], parts["excess"])
        found["cross"], found["excess"] = merged_sums(teacher.kind, share, teacher_share, apart, *sums)
    for name in MIXED:
        if name in parts:
            found[name] = parts[name].sum(0)
    for name in names:
        x = found[name]
        merged.get(name).copy_(x if read is None else torch.where(read, x, NOT_READ[name]))  # type: ignore[union-attr]
    return merged


def _shares(tops: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the largest of the parts' maxima [parts, n], each one's distance to it, e to the power of that), 0 of a part of only
    -inf."""
    top = tops.amax(0)
    empty = tops == -torch.inf
    shift = torch.where(empty, 0.0, tops - top)
    return top, shift, torch.where(empty, 0.0, shift.exp())
