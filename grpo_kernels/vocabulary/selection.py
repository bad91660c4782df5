"""Which columns of a row the sparse gradient consists of, and its value there.

Columns with p_j >= step, and that of the target, are always taken. Of the others, in the order of ids, one is taken wherever the
running sum of their probabilities, rounded to multiples of a unit of step / 2^31, crosses a multiple of `step`. Sums of integers
do not depend on the order in which blocks, threads and ranks add. A column of m units, m < 2^31, is taken for exactly m of the
2^31 offsets at which a row may start, so where it is taken it represents a probability of `step`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .sparse import Slots

if TYPE_CHECKING:
    from ..sparsity import Sparse
    from .backends import SparseBackend
    from .rows import RowStats, RowTransform, Slopes

Tensor = torch.Tensor

#: A step is 2^BITS units of mass.
BITS = 31


def per_unit(step: float) -> float:
    """The factor that converts a probability into units. Kernels take it as fp32."""
    return 2.0**BITS / step


def capacity(step: float) -> int:
    """The most columns that a row may have: 1 / step from the sum of their probabilities, one more by rounding, the last crossing,
    and the target."""
    return math.floor(1 / step) + 3


class Drawn(NamedTuple):
    """Columns of n rows, in the order of ids."""

    ids: Tensor  # int32 [n, capacity]; -1: not in use
    logits: Tensor  # fp32 [n, capacity], before the transform

    @classmethod
    def nothing(cls, n: int, step: float, device: torch.device) -> Drawn:
        shape = (n, capacity(step))
        return cls(torch.full(shape, -1, dtype=torch.int32, device=device), torch.zeros(shape, device=device))


def starts(seed: int | Tensor, rows: Tensor) -> Tensor:
    """int64 [n] in [0, 2^BITS): where the running sum of each row starts, a function of the seed and the row's number, int64 [n],
    alone. The generator is SplitMix64 (Steele, Lea and Flood 2014), started from a hash of the seed."""
    step = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number
    first: Tensor | float
    if isinstance(seed, Tensor):
        first = _mixed(seed + step)
    else:  # a copy of it to the device would wait for the device
        first = _mixed(torch.tensor(seed, dtype=torch.int64, device="cpu") + step).item()
    return _shifted(_mixed((rows + 1) * step + first), 64 - BITS)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by of x as an unsigned number."""
    return (x >> by) & ((1 << (64 - by)) - 1)


class Draws:
    """Collects the columns of the rows of a batch of n, chunk by chunk."""

    def __init__(
        self, sparse: Sparse, backend: SparseBackend, n: int, device: torch.device, padded: bool
    ) -> None:  # fmt: skip
        self.sparse, self.backend, self.n, self.device = sparse, backend, n, device
        self.parts: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # rows, ids, logits of slots: on a CPU, where counting needs no synchronisation
        self.whole = Drawn.nothing(n, sparse.step, device) if padded or device.type != "cpu" else None

    def take(self, logits: Tensor, at: Tensor, targets: Tensor, stats: RowStats, transform: RowTransform) -> None:
        """Draw from rows `at` of the batch, whose logits are [c, V]. Vectors have one entry a row of the chunk."""
        first = starts(self.sparse.seed, at + self.sparse.first_row)
        drawn = self.backend.select(logits, targets, stats, transform, self.sparse.step, first)
        if self.whole is not None:
            for x, part in zip(self.whole, drawn, strict=True):
                x[at] = part
            return
        row, place = (drawn.ids >= 0).nonzero(as_tuple=True)
        self.parts.append((at[row], drawn.ids[row, place].to(torch.int64), drawn.logits[row, place]))

    def tensors(self) -> tuple[Tensor, ...]:
        """(ids, offsets, rows) of `Slots` and fp32 logits of them, [m]."""
        if self.whole is not None:
            width = self.whole.ids.shape[1]
            offsets = torch.arange(self.n + 1, device=self.device) * width
            rows = torch.arange(self.n, device=self.device).repeat_interleave(width)
            return self.whole.ids.to(torch.int64).view(-1), offsets, rows, self.whole.logits.view(-1)
        empty = torch.empty(0, dtype=torch.int64)
        rows, ids, logits = map(torch.cat, zip((empty, empty, torch.empty(0)), *self.parts, strict=True))
        if rows.numel() and (rows[1:] < rows[:-1]).any():
            rows, order = rows.sort(stable=True)
            ids, logits = ids[order], logits[order]
        offsets = torch.zeros(self.n + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(rows, minlength=self.n), 0, out=offsets[1:])
        return ids, offsets, rows, logits


def gradient_at(
    slots: Slots, logits: Tensor, step: float, targets: Tensor, stats: RowStats, slopes: Slopes, transform: RowTransform
) -> Tensor:
    """d loss / d logits at the columns drawn, fp32 [m], so that its mean over offsets is the gradient of whole rows. `targets` are
    numbered like the ids of the slots.

    Where p of the target is close to 1, its 1 - p is that of expm1, as in the row kernels."""
    rows = slots.rows
    logps = (transform.of(logits, rows) - stats.max[rows]) - torch.log(stats.sum)[rows]
    p, is_target = logps.exp(), slots.ids == targets[rows]
    weight = torch.where(is_target, p, p.clamp(min=step))
    gradient = slopes.target[rows] * torch.where(is_target, -torch.expm1(logps), -weight)
    finite = logps.clamp(min=-1e4)  # no infinity times 0
    for slope, factor in ((slopes.constant, 1.0), (slopes.log, finite), (slopes.prob, p)):
        if slope is not None:
            gradient = gradient + slope[rows] * (weight * factor)
    counts = (slots.ids >= 0) & slopes.nonzero[rows]
    return torch.where(counts, gradient * transform.slope(logits, rows), 0.0)
