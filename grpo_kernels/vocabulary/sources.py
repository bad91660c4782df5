"""The two sources of rows of logits: given logits, and hidden states with a head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .backends import FusedRows, SparseBackend, visit
from .hidden import Engine, FlatHead
from .kept import KeptRows, KeptStage
from .memory import converted, empty, zeros
from .rows import OUTSIDE, RowStats, RowTransform, Slopes, Teacher
from .several import LogitsAt, put_outside
from .shard import VocabShard, of_own_part
from .sparse import Slots, logits_at, merged, write_at
from .teachers import Several, TeacherHead, fused_rows
from .weight_gradient import LateGradient, SlotGradient, WeightGradient, WeightMemory

if TYPE_CHECKING:
    from ..formulas.token_stage import TokenRows
    from ..objective import Objective

Tensor = torch.Tensor


class Source(Protocol):
    """A source of rows of logits. `tensors` are those that may get a gradient, see `stage.with_sums`; vectors are [n], by rows."""

    @property
    def at(self) -> Slots | None:
        """Further ids of rows whose log-probs are wanted."""

    @property
    def teacher(self) -> Teacher | TeacherHead | None:
        """A second stream of the rows, for their divergence from it."""

    def logits_at(self, tensors: tuple[Any, ...]) -> LogitsAt:
        """The logits at them."""

    def stats(
        self, tensors: tuple[Any, ...], targets: Tensor, read: Tensor | None, transform: RowTransform, names: tuple[str, ...]
    ) -> RowStats:
        """Statistics of all rows; a row that is not read has log-prob and entropy 0."""

    def pull(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], targets: Tensor, read: Tensor | None, stats: RowStats,
        slopes: Slopes, transform: RowTransform, several: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Gradients of `tensors`, None where not wanted. Slopes of rows that are not read are 0. `several`: the gradient of the
        logits at `at`, in place of what the slopes say there."""


@dataclass(frozen=True, eq=False)
class Logits:
    """Rows of given logits [A, T, V].

    inplace  pull writes the gradient into their memory.
    kept     the rows that have a set of ids; the others, all of them with None, run over the whole vocabulary.
    at       further ids of rows, whose log-probs are wanted.
    teacher  a second stream of the rows, for their divergence from it."""

    backend: SparseBackend
    inplace: bool = False
    shard: VocabShard | None = None
    kept: KeptRows | None = None
    at: Slots | None = None
    teacher: Teacher | None = None

    def logits_at(self, tensors: tuple[Any, ...]) -> LogitsAt:
        (logits,) = tensors
        assert self.at is not None
        own, second = self._own(logits), self.teacher
        second = None if second is None else second._replace(logits=logits_at(second.logits, own))
        return LogitsAt.of(self.at, logits_at(logits, own), own, second, self.kept, self.shard)

    def stats(
        self, tensors: tuple[Any, ...], targets: Tensor, read: Tensor | None, transform: RowTransform, names: tuple[str, ...]
    ) -> RowStats:
        (logits,) = tensors
        if self.kept is None:
            stats = visit(self.backend, logits, targets, read, transform, names, self.teacher)
            if OUTSIDE[0] in names:
                put_outside(stats, self.backend, logits, self._own(logits), targets, read, transform, self.shard)
            return stats
        stage = self._stage(logits)
        of_sets = stage.stats(logits_at(logits, stage.slots), transform, names)
        if self.kept.has_all:
            return of_sets
        others = visit(self.backend, logits, targets, self.kept.others(read), transform, names, self.teacher)
        return self.kept.joined(of_sets, others)

    def pull(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], targets: Tensor, read: Tensor | None, stats: RowStats,
        slopes: Slopes, transform: RowTransform, several: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        (logits,) = tensors
        stage = None if self.kept is None else self._stage(logits)
        of_sets = None
        if stage is not None and self.kept is not None:
            of_sets = self.kept.replaced(stage.pull(logits_at(logits, stage.slots), stats, slopes, transform), self.at, several)
        out = self._out(logits)
        if self.kept is None or not self.kept.has_all:
            slopes = slopes if self.kept is None else slopes.where(~self.kept.has)
            self.backend.pull(logits, targets, stats, slopes, transform, out, teacher=self.teacher)
            if several is not None:
                own = self._own(logits)
                write_at(out, own.positions(out.shape[1]), several, self._over_vocabulary(own, read))
        return (self._written(logits, out, stage, of_sets),)

    def fused(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], rows: TokenRows, objective: Objective, transform: RowTransform,
        several: Several | None = None,
    ) -> tuple[FusedRows, tuple[Tensor | LateGradient | None, ...]]:  # fmt: skip
        """Losses of all rows, and the gradient of the logits or None. `several`: in place of `teacher`, without sets."""
        (logits,) = tensors
        if self.kept is None:
            out = self._out(logits) if wanted[0] else None
            result = fused_rows(self.backend, logits, rows, objective, transform, out, several or self.teacher)
            return result, (None if out is None else self._written(logits, out, None, None),)
        stage = self._stage(logits)
        result, of_sets = stage.fused(logits_at(logits, stage.slots), rows, objective, transform, wanted[0])
        if of_sets is not None and self.kept.has_all and not self.inplace:
            return result, (SlotGradient.of(logits, stage.slots, of_sets),)
        out = self._out(logits) if wanted[0] else None
        if not self.kept.has_all:
            others = replace(rows.weighted((~self.kept.has).to(torch.float32)), read=self.kept.others(rows.read))
            whole = self.backend.fused(logits, others, objective, transform, out, teacher=self.teacher)
            result = self.kept.joined(result, whole)
        return result, (None if out is None else self._written(logits, out, stage, of_sets),)

    def _stage(self, logits: Tensor) -> KeptStage:
        assert self.kept is not None
        stage = KeptStage(self.kept, of_own_part(self.backend), logits.shape[-1], self.shard)
        if self.teacher is not None:
            stage.teacher = self.teacher._replace(logits=logits_at(self.teacher.logits, stage.slots))
        return stage

    def _own(self, logits: Tensor) -> Slots:
        assert self.at is not None
        return self.at.columns(0 if self.shard is None else self.shard.start, logits.shape[-1])

    def _over_vocabulary(self, own: Slots, read: Tensor | None) -> Tensor:
        """bool [m]: slots of this process in rows that are read over the whole vocabulary."""
        here = own.ids >= 0
        if self.kept is not None:
            here = here & ~self.kept.has[own.rows]
        return here if read is None else here & read[own.rows]

    def _out(self, logits: Tensor) -> Tensor:
        """Memory for the gradient, zero-filled unless a row kernel writes all of it."""
        kept_only = self.kept is not None and self.kept.has_all
        if self.inplace:
            return logits.detach().zero_() if kept_only else logits.detach()
        return (zeros if kept_only else empty)(logits.shape, logits.dtype, logits.device)

    def _written(self, logits: Tensor, out: Tensor, stage: KeptStage | None, of_sets: Tensor | None) -> Tensor:
        """`out`, and in it the gradient of the logits of sets, where `out` holds 0 so far."""
        if stage is not None:
            assert of_sets is not None
            SlotGradient.of(logits, stage.slots, of_sets).add_to(out)
        if self.inplace:
            torch.autograd.graph.increment_version(logits)
        return out


@dataclass(frozen=True, eq=False)
class Hidden:
    """Rows of logits that are computed from hidden states [n, H], weight [V, H] and bias [V] or None, some rows at a time.

    dtype    what the products run in.
    index    the rows that are read over the whole vocabulary, [m] int64; None: found from `read`, a host sync on a GPU.
    active   how many of `index`, from its first on, can have a slope; None: all. On a CPU, where it costs no wait, rows whose
             slopes are zero are left out of the products as well.
    kept     the rows that have a set of ids, which take part in no product with the whole weight.
    at       further ids of rows, whose log-probs are wanted.
    teacher  a second stream of the rows, for their divergence from it.
    into     memory that the gradient of the weight is added into."""

    backend: SparseBackend
    dtype: torch.dtype
    shard: VocabShard | None = None
    index: Tensor | None = None
    active: int | None = None
    kept: KeptRows | None = None
    into: WeightMemory | None = None
    at: Slots | None = None
    teacher: TeacherHead | None = None

    def logits_at(self, tensors: tuple[Any, ...]) -> LogitsAt:
        head = self._head(tensors)
        own = self._own(head)
        assert self.at is not None
        with torch.autocast(head.hidden.device.type, enabled=False):
            return LogitsAt.of(self.at, self._at(head, own), own, self._teacher_at(own), self.kept, self.shard)

    def stats(
        self, tensors: tuple[Any, ...], targets: Tensor, read: Tensor | None, transform: RowTransform, names: tuple[str, ...]
    ) -> RowStats:
        head = self._head(tensors)
        with torch.autocast(targets.device.type, enabled=False):
            if self.kept is None:
                return self._forward(head, self._rows(targets, read), targets, transform, names)
            stage = self._stage(head)
            of_sets = stage.stats(self._at(head, stage.slots), transform, names)
            index = self._rows(targets, read)
            if index.numel() == 0:
                return of_sets
            return self.kept.joined(of_sets, self._forward(head, index, targets, transform, names))

    def _forward(
        self, head: FlatHead, index: Tensor, targets: Tensor, transform: RowTransform, names: tuple[str, ...]
    ) -> RowStats:  # fmt: skip
        """Of the rows that run over the whole vocabulary."""
        slots = self._own(head) if OUTSIDE[0] in names else None
        return self._engine(head).forward(index, targets, transform, names, slots=slots)

    def pull(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], targets: Tensor, read: Tensor | None, stats: RowStats,
        slopes: Slopes, transform: RowTransform, several: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        weight = tensors[1]
        emptied = self.shard is None if weight.numel() == 0 else weight.untyped_storage().nbytes() == 0
        if emptied:
            raise RuntimeError(
                "weight is gone before the backward, which computes the logits again: keep it gathered until after it (ZeRO-3: "
                "deepspeed.zero.GatheredParameters around both; FSDP: reshard_after_forward=False), or use linear_grpo_loss with "
                "an objective of one pass (Objective.one_pass), whose gradient is made in the forward."
            )
        head = self._head(tensors)
        engine = self._engine(head, wanted)
        with torch.autocast(targets.device.type, enabled=False):
            slots, at_slots = self._backward(engine, targets, read, stats, slopes, transform, several)
            if self.kept is not None:
                stage = self._stage(head)
                of_sets = stage.pull(self._at(head, stage.slots), stats, slopes, transform)
                of_sets = self.kept.replaced(of_sets, self.at, several)
                slots, at_slots = merged(slots, at_slots, stage.slots, of_sets)
        d_hidden, d_weight, d_bias = self._gradients(engine, slots, at_slots)
        d_weight = d_weight.made() if isinstance(d_weight, WeightGradient) else d_weight
        gradients = zip((d_hidden, d_weight, d_bias), tensors[-3:], strict=True)
        return *(None,) * (len(tensors) - 3), *(None if g is None else converted(g, x.dtype) for g, x in gradients)

    def _backward(
        self, engine: Engine, targets: Tensor, read: Tensor | None, stats: RowStats, slopes: Slopes, transform: RowTransform,
        several: Tensor | None,
    ) -> tuple[Slots | None, Tensor | None]:  # fmt: skip
        """The gradients of the rows that run over the whole vocabulary: in the engine, or as those of the logits at slots."""
        index = self._rows(targets, read)[: self.active]
        own = None if several is None else self._own(engine.head)
        if targets.device.type == "cpu":
            nonzero = slopes.nonzero
            if own is not None:  # slopes of several ids may cancel in the sum of their row
                nonzero = nonzero.index_fill(0, own.rows[several != 0], True)
            index = index[nonzero[index]]
        if self.into is not None:  # all factors are in the slopes
            engine.d_weight = self.into.sum_of_chunks
        engine.backward(index, targets, stats, slopes, transform, own, several)
        return None, None

    def fused(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], rows: TokenRows, objective: Objective, transform: RowTransform,
        several: Several | None = None,
    ) -> tuple[FusedRows, tuple[Tensor | LateGradient | None, ...]]:  # fmt: skip
        """Losses of all rows of an objective of one pass, and the gradients of `tensors`, None where not wanted. `several` as in
        `Logits.fused`."""
        index, n, device = self._rows(rows.targets, rows.read), rows.targets.numel(), rows.targets.device
        active = index.numel() if self.active is None else self.active
        result = FusedRows.zeros(n, device, several or self.teacher)
        head = self._head(tensors)
        engine = self._engine(head, wanted, several)
        slots, of_sets = None, None
        with torch.autocast(device.type, enabled=False):
            engine.fused(index[:active], rows, objective, transform, result, any(wanted))
            engine.fused(index[active:], rows, objective, transform, result, False)
            if self.kept is not None:
                stage = self._stage(head)
                slots, logits = stage.slots, self._at(head, stage.slots)
                of_rows, of_sets = stage.fused(logits, rows, objective, transform, any(wanted))
                result = self.kept.joined(of_rows, result)
        gradients = self._gradients(engine, slots, of_sets) if any(wanted) else ()
        return result, (*(None,) * (len(tensors) - len(gradients)), *gradients)

    def _head(self, tensors: tuple[Any, ...]) -> FlatHead:
        return FlatHead(tensors[0], tensors[1], tensors[2], self.dtype, self.shard)

    def _engine(self, head: FlatHead, wanted: tuple[bool, ...] = (False,) * 3, several: Several | None = None) -> Engine:
        rounded = self.into is None and self.kept is None
        return Engine(head, self.backend, wanted[-3:], rounded, several or self.teacher, len(wanted) > 3)  # type: ignore[arg-type]

    def rows_of(self, n: int, read: Tensor | None, device: torch.device) -> Tensor:
        """Indices of the rows that run over the whole vocabulary, of n. With `read` the host waits for a GPU, and where it does not
        know how many rows have a set."""
        if self.kept is not None:
            if self.kept.has_all:
                return torch.empty(0, dtype=torch.int64, device=device)
            if read is None and self.kept.without is not None:
                return self.kept.has.argsort(stable=True)[: self.kept.without]
            read = self.kept.others(read)
        return torch.arange(n, device=device) if read is None else read.nonzero()[:, 0]

    def _rows(self, targets: Tensor, read: Tensor | None) -> Tensor:
        return self.rows_of(targets.numel(), read, targets.device) if self.index is None else self.index

    def _own(self, head: FlatHead) -> Slots:
        assert self.at is not None
        return self.at.columns(0 if self.shard is None else self.shard.start, head.weight.shape[0])

    # ---- rows with sets

    def _stage(self, head: FlatHead) -> KeptStage:
        assert self.kept is not None
        stage = KeptStage(self.kept, of_own_part(self.backend), head.weight.shape[0], self.shard)
        stage.teacher = self._teacher_at(stage.slots)
        return stage

    def _teacher_at(self, slots: Slots) -> Teacher | None:
        """The teacher with its logits at slots only."""
        t = self.teacher
        return None if t is None else Teacher(self._at(t.head, slots), t.transform, t.kind, t.mixture)

    def _at(self, head: FlatHead, slots: Slots) -> Tensor:
        """fp32 [m]: the logits at slots; arbitrary values where a slot is not in use."""
        if head.weight.shape[0] == 0:  # of a rank without a part of the vocabulary
            return torch.zeros(slots.ids.shape, device=head.hidden.device)
        logits = self.backend.slot_logits(head.hidden.detach(), head.weight.detach(), slots)
        if head.bias is None:
            return logits
        return logits + head.bias.detach().to(torch.float32)[slots.ids.clamp(min=0)]

    def _gradients(
        self, engine: Engine, slots: Slots | None, of_sets: Tensor | None
    ) -> tuple[Tensor | None, Tensor | WeightGradient | None, Tensor | None]:
        """(d_hidden, d_weight, d_bias) of all rows. `of_sets`: the gradient of the logits at `slots`."""
        head = engine.head
        if head.weight.shape[0] == 0:  # of a rank without a part of the vocabulary
            slots, of_sets = None, None
        if slots is not None and of_sets is not None:
            if engine.d_hidden is not None:
                self.backend.add_weight_rows(of_sets, slots, head.weight.detach(), engine.d_hidden)
            if engine.d_bias is not None:
                ones = torch.ones(engine.hidden.shape[0], 1, device=engine.hidden.device)
                self.backend.add_hidden_rows(of_sets, slots, ones, engine.d_bias[:, None])
        d_weight: Tensor | WeightGradient | None = engine.d_weight
        if engine.wanted[1] and (d_weight is None or of_sets is not None or self.into is not None):
            hidden = None if of_sets is None else engine.hidden  # otherwise nothing has to be kept for the backward
            like = (self.backend, head.weight.shape, torch.float32 if engine.summed_later else head.weight.dtype)
            d_weight = WeightGradient(*like, engine.d_weight, self.into, engine.hidden.device, hidden, slots, of_sets)
        return engine.whole_d_hidden(), d_weight, engine.d_bias
