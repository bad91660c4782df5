"""Teachers from hidden states, and several teachers of the same rows, each with a weight for every row: the weighted sum of the
divergences from them, in the visit that makes the loss and its gradient. Of each teacher the logits of one chunk exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..layout import plain
from .backends import Backend, FusedRows
from .rows import RowTransform, Teacher

if TYPE_CHECKING:
    from ..formulas.token_stage import TokenRows
    from ..objective import Objective
    from .hidden import FlatHead

Tensor = torch.Tensor

#: Bytes of the rows that are taken at a time, as fp32, out of logits that are there.
BLOCK_BYTES = {"cpu": 16 << 20, "cuda": 300 << 20}


@dataclass(eq=False)
class TeacherHead:
    """A second stream of the same rows from hidden states of its own: `rows.Teacher` whose logits are made with the student's, a
    chunk at a time. With the student's own weight and bias (adapters in the body of a model), both are one product."""

    head: FlatHead
    transform: RowTransform
    kind: str
    mixture: float

    def plain(self) -> TeacherHead:
        """Without gradients and the wrappers of torch.func, as a source takes it."""
        head = self.head
        bias = None if head.bias is None else plain(head.bias.detach())
        head = replace(head, hidden=plain(head.hidden.detach()), weight=plain(head.weight.detach()), bias=bias)
        return replace(self, head=head, transform=self.transform.plain())

    @property
    def columns(self) -> int:
        return self.head.vocab  # of a row of its logits

    def shares(self, head: FlatHead) -> bool:
        """Whether the two heads are one."""
        own = self.head
        return _same(own.weight, head.weight) and _same(own.bias, head.bias) and own.dtype == head.dtype

    def of(self, logits: Tensor, rows: Tensor) -> Teacher:
        """The stream whose logits of these rows are known, [c, V]."""
        return Teacher(logits[None], self.transform.at(rows), self.kind, self.mixture)


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    place = x.data_ptr() == y.data_ptr() and x.device == y.device
    return place and x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()


@dataclass(frozen=True, eq=False)
class Weighted:
    """A second stream and its weight in each row, fp32 [n], at least 0. Where the weight is 0 the stream adds nothing to the row,
    and is not read."""

    teacher: Any  # a `Teacher`, a `hidden.TeacherHead`, or one that is known at some ids
    weight: Tensor

    def read(self, read: Tensor | None) -> Tensor:
        """bool [n]: the rows of `read` where this stream has a weight."""
        return self.weight != 0 if read is None else read & (self.weight != 0)

    def times(self, x: Tensor) -> Tensor:
        """weight * x; 0 where the weight is 0, whatever x is."""
        return torch.where(self.weight == 0, 0.0, self.weight * x)


@dataclass(frozen=True, eq=False)
class Several:
    """The second streams of a loss that has several, and an objective without a policy term, for their divergences alone."""

    parts: tuple[Weighted, ...]
    alone: Objective

    @property
    def columns(self) -> int:
        """Columns needed beside a row of the student's logits: those of each teacher, and two gradients."""
        return (len(self.parts) + 2) * self.parts[0].teacher.columns

    @property
    def cut(self) -> bool:
        """Whether the heads are sharded over ranks."""
        return any(isinstance(x.teacher, TeacherHead) and x.teacher.head.shard is not None for x in self.parts)

    def at(self, rows: slice | Tensor) -> Several:
        """With the weights of these rows only."""
        return replace(self, parts=tuple(replace(part, weight=part.weight[rows]) for part in self.parts))


def fused_rows(
    backend: Backend, logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None,
    teacher: Teacher | Several | None,
) -> FusedRows:  # fmt: skip
    """`fused` of a backend, which may have several teachers, whose logits are there. Then rows are copied as fp32, a block at a
    time."""
    if not isinstance(teacher, Several):
        return backend.fused(logits, rows, objective, transform, out, teacher=teacher)
    outer, inner, vocab = logits.shape
    size = max(1, BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES["cuda"]) // (4 * vocab))
    result = FusedRows.zeros(outer * inner, logits.device, teacher)
    for a in range(outer):
        for lo in range(0, inner, size):
            t = slice(lo, min(inner, lo + size))
            flat = slice(a * inner + t.start, a * inner + t.stop)

            def rows_of(own: Teacher, here: Tensor | None, a: int = a, t: slice = t, flat: slice = flat) -> Teacher:
                block = own._replace(logits=own.logits[a : a + 1, t], transform=own.transform.at(flat))
                return block if here is None else block.at(here)._replace(logits=block.logits[:, here])

            z, z_out = logits[a : a + 1, t].to(torch.float32), None if out is None else out[a : a + 1, t]
            of_block = (rows[flat], objective, transform.at(flat), z_out, teacher.at(flat), rows_of)
            result.put(flat, in_one_visit(backend, z, *of_block))
    return result


def in_one_visit(
    backend: Backend, logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None,
    several: Several, rows_of: Callable[[Any, Tensor | None], Teacher],
) -> FusedRows:  # fmt: skip
    """`fused` of a backend for the rows of a block, fp32 [1, c, V], with several teachers: each adds weight * divergence.
    `rows` and the weights of `several` are those of the block; `out` may be the logits. `rows_of` makes the rows of a teacher
    at these places of the block, None: at all."""
    gradient = None if out is None else torch.empty_like(logits)
    result = backend.fused(logits, replace(rows, divergence_weight=None), objective, transform, gradient)
    losses, divergence, none = result.losses, torch.zeros_like(result.losses), torch.zeros_like(result.losses)
    terms = dict.fromkeys(("old_logps", "ref_logps", "kl_weight", "entropy_weight", "nll_weight", "sampler_logps", "weights"))
    for part in several.parts:
        read = part.read(rows.read)
        here = read.nonzero()[:, 0] if logits.device.type == "cpu" else None  # on other devices this would synchronise the host
        if here is not None and here.numel() == 0:
            continue
        weight = none if rows.divergence_weight is None else part.times(rows.divergence_weight)
        own = replace(rows, **terms, read=read, policy_weight=none, divergence_weight=weight)  # type: ignore[arg-type]
        z, at = logits, transform
        if here is not None and here.numel() < none.numel():
            part, own, z, at = replace(part, weight=part.weight[here]), own[here], logits[:, here], transform.at(here)
        else:
            here = None
        memory = None if gradient is None else torch.empty_like(z)
        fused = backend.fused(z, own, several.alone, at, memory, teacher=rows_of(part.teacher, here))
        assert fused.divergence is not None
        if gradient is not None and memory is not None:
            gradient = gradient.add_(memory) if here is None else gradient.index_add_(1, here, memory)
        if here is None:
            here = torch.arange(none.numel(), device=none.device)
        losses = losses.index_add(0, here, fused.losses)
        divergence = divergence.index_add(0, here, part.times(fused.divergence))
    if out is not None and gradient is not None:
        out.copy_(gradient)
    return FusedRows(result.logps, result.entropy, losses, divergence)
