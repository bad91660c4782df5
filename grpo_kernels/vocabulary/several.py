"""Log-probs of several ids of a row, and their gradient: one log-sum-exp for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .divergence import differences, gradient
from .rows import RowStats, RowTransform, Slopes, Teacher
from .sparse import Slots

if TYPE_CHECKING:
    from .kept import KeptRows
    from .shard import VocabShard

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class LogitsAt:
    """Logits at slots, one fp32 number a slot, [k], before the transform.

    used   bool [k]: ids that the row's softmax has. The log-prob of the others is -inf, without gradient. That of all ids of a row
           that is not read is 0.
    teacher  a second stream, whose logits are [k], too."""

    slots: Slots
    logits: Tensor
    used: Tensor
    teacher: Teacher | None = None

    @classmethod
    def of(
        cls, slots: Slots, logits: Tensor, own: Slots, teacher: Teacher | None, kept: KeptRows | None, shard: VocabShard | None
    ) -> LogitsAt:
        """From the logits of this process, whose slots are `own`."""
        has = None if kept is None else kept.has[slots.rows]

        def whole(logits: Tensor) -> Tensor:
            logits = torch.where(own.ids >= 0, logits, 0.0)
            if shard is not None:
                logits = shard.sum_over_ranks(logits)
            if kept is None or has is None:
                return logits
            return torch.where(has & ~kept.several[slots.rows], 0.0, logits)  # like the log-prob of the only id of a set

        used = own.ids >= 0 if shard is None else slots.ids < shard.vocab
        if kept is not None and has is not None:
            used = used & (~has | (kept.places(slots) < kept.slots.ids.numel()))
        teacher = None if teacher is None else teacher._replace(logits=whole(teacher.logits))
        return cls(slots, whole(logits), used, teacher)

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
        if slopes.teacher is not None:
            g = g + slopes.teacher[rows] * self._of_divergence(p, stats, transform)
        g = torch.where(counted, g * transform.slope(self.logits, rows), 0.0)
        return g, slopes._replace(constant=-total if slopes.constant is None else slopes.constant - total)

    def _of_divergence(self, p: Tensor, stats: RowStats, transform: RowTransform) -> Tensor:
        """d divergence / d z [k]."""
        teacher, rows = self.teacher, self.slots.rows
        top, total = stats.get("teacher_max"), stats.get("teacher_sum")
        assert teacher is not None and top is not None and total is not None
        w = torch.where(self.used, teacher.transform.of(teacher.logits, rows), -torch.inf)
        q = (w - top[rows]).exp() / total[rows]
        log_ratio = differences(transform.of(self.logits, rows), w, stats.max[rows], top[rows]) + stats.log_sums[rows]
        return gradient(teacher.kind, p, q, log_ratio, stats.center[rows], teacher.mixture)
