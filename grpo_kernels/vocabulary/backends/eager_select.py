"""Columns of the sparse gradient in eager PyTorch: see `vocabulary/selection.py`. No host synchronisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..rows import RowStats, RowTransform
from ..selection import BITS, Drawn, capacity, per_unit
from .eager_rows import block_bytes

Tensor = torch.Tensor


def masses(logits: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform, step: float) -> Tensor:
    sums = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for rows, units, is_target in _blocks(logits, targets, stats, transform, step):
        sums[rows] = _masses(units, is_target).sum(1)
    return sums


def select(
    logits: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform, step: float, starts: Tensor
) -> Drawn:  # fmt: skip
    drawn = Drawn.nothing(logits.shape[0], step, logits.device)
    most = capacity(step)
    for rows, units, is_target in _blocks(logits, targets, stats, transform, step):
        mass = _masses(units, is_target)
        after = mass.cumsum(1).add_(starts[rows, None])
        crosses = (after >> BITS) != ((after - mass) >> BITS)
        taken = crosses | is_target | (units >= 2.0**BITS)
        place = torch.where(taken, taken.cumsum(1) - 1, most).clamp_(max=most)  # the last one is cut off
        columns = torch.arange(units.shape[1], dtype=torch.int32, device=units.device).expand_as(place)
        for x, values in zip(drawn, (columns, logits[rows].to(torch.float32)), strict=True):
            x[rows] = torch.cat([x[rows], x[rows, :1]], 1).scatter_(1, place, values)[:, :most]
    return drawn


def _blocks(
    logits: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform, step: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:  # fmt: skip
    """(rows, their probabilities in units, whether a column is the target's). Rows with a NaN or an infinity have no
    probabilities."""
    n, vocab = logits.shape
    inverse = stats.sum.reciprocal()
    usable = inverse.isfinite() & stats.max.isfinite()
    size = max(1, block_bytes(logits.device) // (48 * max(1, vocab)))
    ids = torch.arange(vocab, device=logits.device)
    for lo in range(0, n, size):
        rows = slice(lo, min(lo + size, n))
        at = torch.arange(lo, rows.stop, device=logits.device)[:, None]
        e = (transform.of(logits[rows].to(torch.float32), at) - stats.max[rows, None]).exp_()
        units = e.mul_(inverse[rows, None]).mul_(per_unit(step))
        yield rows, torch.where(usable[rows, None], units, 0.0), targets[rows, None] == ids


def _masses(units: Tensor, is_target: Tensor) -> Tensor:
    """int64 [r, V]: whole units of the columns that are sampled."""
    return torch.where(is_target | (units >= 2.0**BITS), 0.0, units).to(torch.int64)
