"""Hidden states whose gradient takes a few columns of each row: `sources.Hidden` for `Sparse`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .hidden import Engine, FlatHead
from .rows import RowStats, RowTransform, Slopes
from .selection import Draws, gradient_at
from .sources import Hidden
from .sparse import Slots

if TYPE_CHECKING:
    from ..sparsity import Sparse

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class SampledHidden(Hidden):
    """Columns are drawn in the forward, while the logits of a chunk are there; the backward is sparse products of them alone.

    sparse   how they are drawn.
    padded   whether every row has the maximum number of slots; always so on a GPU, where counting them would synchronise the
             host."""

    sparse: Sparse | None = None
    padded: bool = False

    def _forward(
        self, head: FlatHead, index: Tensor, targets: Tensor, transform: RowTransform, names: tuple[str, ...]
    ) -> RowStats:  # fmt: skip
        assert self.sparse is not None
        draws = Draws(self.sparse, self.backend, targets.numel(), targets.device, self.padded)
        stats = self._engine(head).forward(index, targets, transform, names, draws)
        return stats._replace(draws=draws.tensors())

    def _backward(
        self, engine: Engine, targets: Tensor, read: Tensor | None, stats: RowStats, slopes: Slopes, transform: RowTransform,
        several: Tensor | None,
    ) -> tuple[Slots | None, Tensor | None]:  # fmt: skip
        assert self.sparse is not None
        if not stats.draws:  # no row ran over the whole vocabulary
            return None, None
        *of_slots, logits = stats.draws
        slots = Slots(*of_slots)
        own = targets if self.shard is None else targets - self.shard.start
        return slots, gradient_at(slots, logits, self.sparse.step, own, stats, slopes, transform)
