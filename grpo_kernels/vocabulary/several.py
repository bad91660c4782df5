"""Log-probs of several ids of a row, the probability outside of them, and their gradient: one log-sum-exp for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .backends.eager_rows import block_bytes
from .divergence import differences, gradient
from .rows import OUTSIDE, TRANSFORMED, RowStats, RowTransform, Slopes, Teacher, partials_of
from .sparse import Slots, write_at

if TYPE_CHECKING:
    from .backends import Backend
    from .kept import KeptRows
    from .shard import VocabShard

Tensor = torch.Tensor


def sums_outside(backend: Backend, z: Tensor, slots: Slots, targets: Tensor, read: Tensor | None) -> Tensor:
    """fp32 [2, r]: max and sum of transformed rows z [r, V] without the columns of `slots`, which -inf replaces. 1 minus the
    probability of these columns would be the rounding of that, where they have nearly all of it."""
    below = torch.full((), -torch.inf, device=z.device).expand(slots.ids.shape)
    write_at(z, (slots.rows, slots.ids.clamp(min=0)), below, slots.ids >= 0)
    return backend.stats(z[None], targets, read, TRANSFORMED, partials_of(())).values[:2]


def put_outside(
    stats: RowStats, backend: Backend, logits: Tensor, slots: Slots, targets: Tensor, read: Tensor | None, transform: RowTransform,
    shard: VocabShard | None,
) -> None:  # fmt: skip
    """Set the partials OUTSIDE of all rows of logits [A, T, V], a block of which is copied at a time. The ranks of a shard take the
    same blocks, whatever the widths of their parts: each block has an exchange."""
    A, T, V = logits.shape
    size = max(1, block_bytes(logits.device) // (4 * (V if shard is None else shard.vocab)))
    memory = torch.empty(min(size, T), V, device=logits.device)
    for a in range(A):  # a block stays within one outer index, where rows have one stride
        for t in range(0, T, size):
            rows = slice(a * T + t, a * T + min(t + size, T))
            x = logits[a, t : t + size]
            z = transform.at(rows).of_rows(x, memory[: len(x)])
            z = memory[: len(x)].copy_(x) if z is x else z
            of_rows = (slots.of_rows(rows.start, rows.stop), targets[rows], None if read is None else read[rows])
            stats.values[-len(OUTSIDE) :, rows] = sums_outside(backend, z, *of_rows)


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
        self, upstream: Tensor, outside: Tensor | None, targets: Tensor, read: Tensor | None, stats: RowStats, slopes: Slopes,
        transform: RowTransform,
    ) -> tuple[Tensor, Slopes]:  # fmt: skip
        """(d loss / d logits [k], of all that the loss depends on; the slopes of the other columns of the rows), from d loss / d
        log-probs [k], and from d loss / d log of the probability outside of the ids [n], or None.

        Where p is close to 1, the 1 - p of one's own logit is that of expm1, as in the row kernels, or the sum of all else where
        that is known. Sums over the ids are fp64, since what arrives at one of them may be far more than at all others."""
        rows = self.slots.rows
        counted = self.used if read is None else self.used & read[rows]
        upstream = torch.where(counted, upstream, 0.0).to(torch.float64)
        total = self._sums(upstream)
        others = -total  # the gradient of the other columns, in units of their probability
        logps = torch.where(counted, self.log_probs(stats, read, transform), -torch.inf)
        p, rest = logps.exp(), -torch.expm1(logps)
        if outside is not None:  # d log P / d z_j, P the probability outside, is p_j (1 / P - 1), of the ids -p_j
            outside, mass = outside if read is None else torch.where(read, outside, 0.0), torch.exp(stats.outside)
            inside = torch.where(mass > 0.5, self._sums(p), 1.0 - mass)
            others = others + torch.where(outside == 0, 0.0, outside * (inside / mass))
            total = total + outside
            rest = torch.where(p > 0.5, (mass + self._sums(torch.where(p > 0.5, 0.0, p)))[rows], rest)
        g = (rest * upstream - p * (total[rows] - upstream)).to(torch.float32)
        g = g + slopes.target[rows] * torch.where(self.slots.ids == targets[rows], rest, -p)
        finite = logps.clamp(min=-1e4)  # no infinity times 0
        for slope, factor in ((slopes.constant, 1.0), (slopes.log, finite), (slopes.prob, p)):
            if slope is not None:
                g = g + p * slope[rows] * factor
        if slopes.teacher is not None:
            g = g + slopes.teacher[rows] * self._of_divergence(p, stats, transform)
        g = torch.where(counted, g * transform.slope(self.logits, rows), 0.0)
        others = others.to(torch.float32)
        return g, slopes._replace(constant=others if slopes.constant is None else slopes.constant + others)

    def _sums(self, x: Tensor) -> Tensor:
        """[n], of x [k], in a fixed order: no atomics."""
        return torch.segment_reduce(x, "sum", offsets=self.slots.offsets, initial=0, unsafe=True)

    def _of_divergence(self, p: Tensor, stats: RowStats, transform: RowTransform) -> Tensor:
        """d divergence / d z [k]."""
        teacher, rows = self.teacher, self.slots.rows
        top, total = stats.get("teacher_max"), stats.get("teacher_sum")
        assert teacher is not None and top is not None and total is not None
        w = torch.where(self.used, teacher.transform.of(teacher.logits, rows), -torch.inf)
        q = (w - top[rows]).exp() / total[rows]
        log_ratio = differences(transform.of(self.logits, rows), w, stats.max[rows], top[rows]) + stats.log_sums[rows]
        return gradient(teacher.kind, p, q, log_ratio, stats.center[rows], teacher.mixture)
