"""Rows whose softmax runs over a set of ids.

A set is a small vocabulary. The logits at its ids are gathered side by side into [n, width], padded with -inf, and the row
kernels of a backend run on them as on any logits. The stream reads these logits and gets their gradient at the positions (row, id).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..formulas.token_stage import TokenStage
from .parallel import on_shard
from .partials import TRANSFORMED, LogitRows, Slopes
from .ragged import Distinct, KeptRows, Ragged
from .stream import AtIds, Block, Found, Gradients, Stream, Visit
from .tokens import LogitsAt

#: Bytes of gathered logits at a time. Most sets are small: the limit is for batches with a few very large ones.
BLOCK_BYTES = 64 << 20


#: Rows of like sizes in one memory: which they are, how many, and their width.
Part = tuple[slice | Tensor, int, int]


@dataclass(eq=False)
class OverSets:
    """The rows of a stream over the sets of a visit, with the verbs of a stream. z are transformed logits, fp32 [m], one a slot."""

    stream: Stream
    visit: Visit

    def stats(self, visit: Visit) -> Found:
        z, _ = self._z(self.stream)
        values = visit.not_read(self.kept.read.numel(), z.device)

        def work(block: Block) -> None:
            values[:, block.at] = block.stats()

        self._each(z, work, False)
        found = visit.found(values)
        if "top" in visit.names:  # the kernels give a column of their memory
            found.partials["top"].copy_(self._top_id(z, found.partials.max))
        return found

    def pull(self, visit: Visit, found: Found, slopes: Slopes, gradients: Gradients, at_ids: AtIds | None) -> None:
        z, logits = self._z(self.stream)

        def of(slopes: Slopes) -> Tensor:
            of_z = self._each(
                z, lambda block: block.pull(found.values[:, block.at], slopes.at(block.at), block.rows.logits), True
            )
            assert of_z is not None
            return self._of_logits(of_z, logits)

        if at_ids is None:
            gradient = of(slopes)
        else:
            gradient = self.kept.replaced(of(slopes.without("divergence")), *at_ids)
            of_divergence = slopes.get("divergence")
            gradient = gradient if of_divergence is None else gradient + of(Slopes.of_divergence(of_divergence))
        slots = self._here[2]
        pairs = self._pairs(slots)
        if pairs is None:
            gradients.add(slots, gradient)
        else:
            gradients.add(pairs.slots, pairs.sums(gradient).float())

    def fused(self, visit: Visit, stage: TokenStage, gradients: Gradients) -> Tensor:
        z, logits = self._z(self.stream)
        writes, results = True in gradients.wanted, list[tuple[slice | Tensor, Tensor]]()

        def work(block: Block) -> None:
            results.append((block.at, block.fused(stage.at(block.at), block.rows.logits if writes else None)))

        of_z = self._each(z, work, writes)
        if of_z is not None:
            gradients.add(self._here[2], self._of_logits(of_z, logits))
        at, result = results[0]
        if isinstance(at, Tensor):
            result = visit.no_losses()
            for at, part in results:
                result[:, at] = part
        return result

    def logits_at(self, visit: Visit) -> LogitsAt:
        assert visit.at is not None
        logits = self._read(self.stream.at_all_ranks, visit.at)
        # The log-prob of the only id of a set is 0 whatever its logit is, which is therefore not computed.
        logits = torch.where(self.kept.several[visit.at.rows], logits, 0.0)
        return LogitsAt(visit.at, logits, (visit.at.ids >= 0) & (self.kept.places(visit.at) < self.kept.slots.ids.numel()))

    @property
    def kept(self) -> KeptRows:
        assert self.visit.kept is not None
        return self.visit.kept

    @functools.cached_property
    def _here(self) -> tuple[Tensor, Tensor, Ragged]:
        """(bool [m]: slots in use whose id is among this process's columns, one outside the vocabulary being nobody's; those of
        them whose logits are needed, since their row has several ids; the slots, of which these are in use, columns as ids)."""
        slots, shard, first, end = self.kept.slots, self.stream.shard, 0, self.stream.columns
        if shard is not None:
            first, end = shard.start, min(shard.start + end, shard.vocab)
        own = (slots.ids >= first) & (slots.ids < end)
        used = own & self.kept.several[slots.rows]
        return own, used, slots._replace(ids=torch.where(used, slots.ids - first if first else slots.ids, -1))

    def _z(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """(z, logits) of a stream at the slots. Where a slot is not in use here, z is -inf, and 0 where it is the only one of its
        row."""
        own, used, slots = self._here
        logits = self._read(stream.at, slots)
        z = torch.where(used, stream.transform.of(logits, slots.rows), 0.0)
        return torch.where(own, z, -torch.inf), logits

    def _of_logits(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient of logits from that of z; 0 of a slot that is not in use."""
        _, used, slots = self._here
        return torch.where(used, gradient * self.stream.transform.slope(logits, slots.rows), 0.0)

    def _pairs(self, slots: Ragged) -> Distinct | None:
        """Slots of tokens as those of their rows, each once; None: they are that already."""
        tokens = self.visit.tokens
        if tokens is None:
            return None
        return Distinct.of(tokens.rows[slots.rows], slots.ids, (slots.ids >= 0) & tokens.used[slots.rows], tokens.n)

    def _read(self, logits: Callable[[Ragged], Tensor], slots: Ragged) -> Tensor:
        """fp32 [m]: the logits of a stream at slots."""
        pairs = self._pairs(slots)
        return logits(slots) if pairs is None else logits(pairs.slots)[pairs.place]

    @functools.cached_property
    def _target(self) -> Tensor:
        """int64 [n]: the column of each row's target in a block, -1 where it is not in use here."""
        slots, target = self.kept.slots, self.kept.target
        return torch.where(self._here[0][slots.offsets[:-1] + target], target, -1)

    def _top_id(self, z: Tensor, top: Tensor) -> Tensor:
        """int64 [n]: the lowest id of all ranks whose z is the row's largest, -1 where none is."""
        slots, none, shard = self.kept.slots, torch.iinfo(torch.int64).max, self.stream.shard
        ids = torch.where(self._here[0] & (z == top[slots.rows]), slots.ids, none)
        lowest = torch.full_like(self.kept.target, none).scatter_reduce_(0, slots.rows, ids, "amin")
        lowest = lowest if shard is None else shard.lowest_of_ranks(lowest)
        return torch.where(lowest == none, -1, lowest)

    def _each(self, z: Tensor, work: Callable[[Block], None], writes: bool) -> Tensor | None:
        """Let `work` compute all rows, block by block, and return what it `writes` over their logits, fp32 [m]."""
        other, total = self.visit.other, None
        second = () if other is None else (self._z(other.stream)[0],)
        for parts, at in self._memories():
            sizes = [count * width for _, count, width in parts]
            filled = [
                torch.full((sum(sizes) + 1,), -torch.inf, dtype=torch.float32, device=z.device).scatter_(0, at, x)
                for x in (z, *second)
            ]
            blocks = zip(*(x[:-1].split(sizes) for x in filled), strict=True)
            for (rows, count, width), own in zip(parts, blocks, strict=True):
                work(self._block(rows, *(x.view(1, count, width) for x in own)))
            if writes:
                if isinstance(parts[0][0], Tensor):
                    filled[0][-1:].zero_()  # of slots of other rows
                total = filled[0][at] if total is None else total.add_(filled[0][at])
        return total

    def _block(self, at: slice | Tensor, logits: Tensor, of_other: Tensor | None = None) -> Block:
        """Rows `at` of the visit, from their logits [1, r, width] and those of the second stream."""
        stream, visit = self.stream, self.visit
        second = None if visit.other is None or of_other is None else visit.other.second(of_other, TRANSFORMED)
        rows = LogitRows(logits, self._target[at], self.kept.read[at], TRANSFORMED, second)
        # Every rank's block has the same slots, each with the ids of the rank alone.
        shard = None if stream.shard is None else replace(stream.shard, start=0, vocab=logits.shape[2])
        return Block(stream, on_shard(stream.kernels, shard), visit, rows, at)

    def _memories(self) -> Iterator[tuple[list[Part], Tensor]]:
        """(rows of like sizes, those of each size in one piece; where each slot stands in their memory, int64 [m], in its last
        place for slots of other rows): all rows, or where these take more than BLOCK_BYTES, as many at a time as do not, one at
        least."""
        slots, place, n = self.kept.slots, self.kept.place, self.kept.read.numel()
        parts: list[tuple[Tensor, int]] = []
        for group, width in self.kept.groups:
            if group is None and 4 * n * width <= BLOCK_BYTES:
                yield [(slice(0, n), n, width)], torch.add(place, slots.rows, alpha=width)
                return
            rows = torch.arange(n, device=place.device) if group is None else group
            parts += [(some, width) for some in rows.split(max(1, BLOCK_BYTES // (4 * width)))]
        together = 4 * sum(rows.numel() * width for rows, width in parts) <= BLOCK_BYTES
        for own in [parts] if together else [[part] for part in parts]:
            order, widths = (
                torch.cat(x) for x in zip(*((rows, torch.full_like(rows, width)) for rows, width in own), strict=True)
            )
            size = sum(rows.numel() * width for rows, width in own)
            first = place.new_full((n,), size).index_copy_(0, order, widths.cumsum(0) - widths)
            yield [(rows, rows.numel(), width) for rows, width in own], (first[slots.rows] + place).clamp_(max=size)
