"""Log-probs of several ids of a row, and their gradient: one log-sum-exp for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .rows import RowStats, RowTransform, Slopes
from .sparse import Slots

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class LogitsAt:
    """Logits at slots, one fp32 number a slot, [k], before the transform.

    used   bool [k]: ids that the row's softmax has. The log-prob of the others is -inf, without gradient. That of all ids of a row
           that is not read is 0."""

    slots: Slots
    logits: Tensor
    used: Tensor

    def log_probs(self, stats: RowStats, read: Tensor | None, transform: RowTransform) -> Tensor:
        """fp32 [k]."""
        rows = self.slots.rows
        z = torch.where(self.used, transform.of(self.logits, rows), -torch.inf)
        logps = (z - stats.max[rows]) - torch.log(stats.sum)[rows]
        return logps if read is None else torch.where(read[rows], logps, 0.0)

    def gradients(
        self, upstream: Tensor, targets: Tensor, read: Tensor | None, stats: RowStats, slopes: Slopes, transform: RowTransform
    ) -> tuple[Tensor, Slopes]:
        """(d loss / d logits [k], of all that the loss depends on; the slopes of the other columns of the rows), from d loss / d
        log-probs [k].

        Where p is close to 1, the 1 - p of one's own logit is that of expm1, as in the row kernels."""
        rows = self.slots.rows
        counted = self.used if read is None else self.used & read[rows]
        upstream = torch.where(counted, upstream, 0.0)
        offsets = self.slots.offsets
        total = torch.segment_reduce(upstream, "sum", offsets=offsets, initial=0, unsafe=True)  # in a fixed order, no atomics
        logps = torch.where(counted, self.log_probs(stats, read, transform), -torch.inf)
        p, rest = logps.exp(), -torch.expm1(logps)
        g = rest * upstream - p * (total[rows] - upstream)
        g = g + slopes.target[rows] * torch.where(self.slots.ids == targets[rows], rest, -p)
        finite = logps.clamp(min=-1e4)  # no infinity times 0
        for slope, factor in ((slopes.constant, 1.0), (slopes.log, finite), (slopes.prob, p)):
            if slope is not None:
                g = g + p * slope[rows] * factor
        g = torch.where(counted, g * transform.slope(self.logits, rows), 0.0)
        return g, slopes._replace(constant=-total if slopes.constant is None else slopes.constant - total)
