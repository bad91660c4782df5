"""Logits that are there, as a stream of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ..formulas.token_stage import TokenStage
from .backends import FusedRows
from .gradients import Gradients, LateGradient, SlotGradient
from .memory import empty
from .partials import OUTSIDE, LogitRows, Second, Slopes, side_by_side
from .ragged import Ragged, write_at
from .stream import Block, Found, Other, Parts, Stream, Visit

Tensor = torch.Tensor

#: Bytes of the rows that are taken at a time, as fp32, where they are not taken as they lie.
BLOCK_BYTES = {"cpu": 16 << 20, "cuda": 300 << 20}


class LogitsGradient(Gradients):
    """The gradient of logits [A, T, V]: in their memory or other, or of a few positions."""

    def __init__(self, logits: Tensor, inplace: bool, wanted: bool) -> None:
        self.logits, self.inplace, self.wanted = logits, inplace, wanted
        self.out: Tensor | None = None
        self.before: list[Tensor] = []  # of earlier visits

    def rows(self) -> Tensor:
        """Memory, all of which the caller is going to write."""
        if self.out is not None:
            self.before.append(self.out)
        x = self.logits
        self.out = x.detach() if self.inplace else empty(x.shape, x.dtype, x.device)
        return self.out

    def made(self) -> tuple[Tensor | LateGradient | None, ...]:
        if not self.wanted:
            return (None,)
        if self.few is not None:
            few = SlotGradient.of(self.logits, *self.few)
            if self.out is None and not self.inplace:
                return (few,)  # the only part
            self.out = few.add_to(self.logits.detach().zero_() if self.out is None else self.out)
        for earlier in self.before:
            assert self.out is not None
            self.out.add_(earlier)
        if self.inplace:
            torch.autograd.graph.increment_version(self.logits)
        return (self.out,)


@dataclass(frozen=True, eq=False)
class Logits(Stream):
    """Rows of given logits [A, T, V]. `inplace`: their gradient goes into their memory."""

    inplace: bool = False

    @property
    def logits(self) -> Tensor:
        return self.tensors[0]

    @property
    def columns(self) -> int:
        return int(self.logits.shape[-1])

    @property
    def n(self) -> int:
        return self.logits.shape[:2].numel()

    def at(self, slots: Ragged) -> Tensor:
        if self.columns == 0:  # of a rank without a part of the vocabulary
            return torch.zeros(slots.ids.shape, device=self.logits.device)
        return self.logits[slots.positions(self.logits.shape[1])].to(torch.float32)

    def rows(self, at: Tensor) -> Tensor:
        T = self.logits.shape[1]
        return self.logits[at // T, at % T]

    def stats(self, visit: Visit) -> Found:
        blocks = self._blocks(visit, None, OUTSIDE[0] in visit.names)
        return visit.found(side_by_side([block.stats() for block, _ in blocks]))

    def gradients(self, wanted: tuple[bool, ...], parts: Parts) -> LogitsGradient:
        return LogitsGradient(self.logits, self.inplace, wanted[0])

    def pull(self, visit: Visit, found: Found, slopes: Slopes, gradients: LogitsGradient, at_ids: Tensor | None) -> None:
        out = gradients.rows()
        for block, to in self._blocks(visit, out, bool(visit.apart)):
            assert to is not None
            block.pull(found.values[:, block.at], slopes.at(block.at), to)
        if at_ids is not None:
            assert visit.at is not None
            here = self.own(visit.at)
            used = here.ids >= 0 if visit.read is None else (here.ids >= 0) & visit.read[here.rows]
            write_at(out, here.positions(out.shape[1]), at_ids, used)

    def fused(self, visit: Visit, stage: TokenStage, gradients: LogitsGradient | None) -> FusedRows:
        out = None if gradients is None else gradients.rows()
        if not visit.apart and visit.tokens is None:
            return self.backend.fused(self._rows(visit), stage, out)
        at_once = (
            None
            if visit.tokens is None or visit.apart
            else self.backend.fused_tokens(self._rows(visit), visit.tokens, stage, out)
        )
        if at_once is not None:
            return at_once
        result = FusedRows.zeros(stage.rows.targets.numel(), self.logits.device, visit.apart or None)
        for block, to in self._blocks(visit, out, True):
            if visit.tokens is None:
                result.put(block.at, block.fused(stage.at(block.at), to))
            else:
                block.add_tokens(result, stage, to)
        return result

    def _rows(self, visit: Visit) -> LogitRows:
        second = None if visit.one is None else self._second(visit.one)
        return LogitRows(self.logits, visit.targets, visit.read, self.transform, second)

    @staticmethod
    def _second(other: Other) -> Second:
        assert isinstance(other.stream, Logits)
        return other.second(other.stream.logits, other.stream.transform)

    def _blocks(self, visit: Visit, out: Tensor | None, cut: bool) -> Iterator[tuple[Block, Tensor | None]]:
        """Blocks of the rows of a visit, and of `out` the same rows. `cut`: [1, r, V] that have one stride, beside several second
        streams in fp32; else all rows are one block. The ranks of a shard take the same blocks, whatever the widths of their parts:
        each block has an exchange."""
        rows, x, n = self._rows(visit), self.logits, visit.targets.numel()
        if not cut:
            yield Block(self, self.backend, visit, rows, slice(0, n), lambda i, _: self._second(visit.apart[i])), out
            return
        A, T, V = x.shape
        limit = BLOCK_BYTES.get(x.device.type, BLOCK_BYTES["cuda"])
        size = max(1, limit // (4 * (V if self.shard is None else self.shard.vocab)))
        for a, t in product(range(A), range(0, T, size)):
            of = (slice(a, a + 1), slice(t, min(t + size, T)))
            at = slice(a * T + of[1].start, a * T + of[1].stop)

            def second_of(i: int, here: Tensor | None, of: Any = of, at: slice = at) -> Second:
                second = self._second(visit.apart[i]).at(at)
                second = second._replace(logits=second.logits[of])
                return second if here is None else second.at(here)._replace(logits=second.logits[:, here])

            own = rows.cut(at.start, at.stop)._replace(logits=x[of].to(torch.float32) if visit.apart else x[of], part=None)
            yield Block(self, self.backend, visit, own, at, second_of), None if out is None else out[of]
