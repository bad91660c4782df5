"""Rows whose softmax runs over a set of ids.

A set is a small vocabulary. The logits at its ids are gathered side by side into [n, width], padded with -inf, and the row
kernels of a backend run on them as on any logits. The stream reads these logits and writes their gradient; it knows the
positions (row, id) as `Ragged`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..formulas.ops import times
from ..formulas.token_stage import TokenStage
from ..layout import plain
from ..token_sets import TokenSets
from .backends import Backend, FusedRows
from .parallel import VocabShard, exchange, on_shard
from .partials import MIXED, TRANSFORMED, LogitRows, Partials, RowTransform, Second, Slopes, side_by_side
from .ragged import Distinct, Ragged, Tokens
from .stream import Found, Other, Stream, at_all_ranks, one_of, read_beside
from .tokens import LogitsAt

Tensor = torch.Tensor

#: Bytes of gathered logits at a time. Most sets are small: the limit is for batches with a few very large ones.
BLOCK_BYTES = 64 << 20

#: If no row has more slots than this, all rows are padded to one width.
WIDTH = 64


@dataclass(frozen=True, eq=False)
class KeptRows:
    """The rows of a batch that have a set, of n rows in all.

    has       bool [n]: rows with a set. The others run over the whole vocabulary.
    has_all   whether every row that is read has one; False if the host does not know.
    without   how many have none, where the host knows it; else None.
    read      bool [n]: rows with a set that are looked at.
    several   bool [n]: those with more than one id. The log-prob of the only id of a set is 0 whatever its logit is, which is
              therefore not computed.
    slots     int64: the ids of each row's set, and behind them a place for its target, in use where the set lacks it. -1 where
              a slot is not in use, as none is of a row that is not read.
    place     int64 [m]: which slot of its row each is.
    target    int64 [n]: which slot of its row holds the target.
    groups    rows of like sizes, (int64 [r], or None for all rows; at least the number of slots of each).
    """

    has: Tensor
    has_all: bool
    without: int | None
    read: Tensor
    several: Tensor
    slots: Ragged
    place: Tensor
    target: Tensor
    groups: tuple[tuple[Tensor | None, int], ...]

    @classmethod
    def of(cls, sets: TokenSets, targets: Tensor, read: Tensor | None, has: Tensor | None = None) -> KeptRows:
        """Those of flat int64 `targets` [n], of which `read` are looked at. `has`: rows whose set
        counts, None: all that are not empty."""
        n, device = targets.numel(), targets.device
        counts, m = sets.counts, sets.ids.numel() + n
        without = sets.empty_rows if has is None else None
        has = counts > 0 if has is None else has
        looked_at = has if read is None else has & read
        # The number of slots does not depend on which targets their sets lack: it would have to be asked of the device. Each row
        # has one slot more than ids, behind them.
        owner = torch.repeat_interleave(counts + 1, output_size=m)
        offsets, at = sets.offsets + torch.arange(n + 1, device=device), torch.arange(m, device=device)
        place = at - offsets[owner]
        ids = torch.nn.functional.pad(sets.ids, (0, 1))[at - owner].to(torch.int64)  # in the last slot of a row another one's
        elsewhere = place.masked_fill(ids != targets[owner], m)
        target = counts.scatter_reduce(0, owner, elsewhere, "amin")  # the last slot where the set lacks it
        inside = target < counts
        ids = ids.index_copy_(0, offsets[1:] - 1, targets.masked_fill(inside, -1))
        slots = Ragged(torch.where(looked_at[owner], ids, -1), offsets, owner)
        several = looked_at & (counts > inside)
        has_all = without == 0
        if not has_all and read is not None and device.type == "cpu":  # rows of a prompt, which are not read
            has_all = not bool((read & ~has).any())
        looked_at, several, place, target = map(plain, (looked_at, several, place, target))
        return cls(plain(has), has_all, without, looked_at, several, slots.plain(), place, target, _groups(sets))

    def others(self, read: Tensor | None) -> Tensor:
        """bool [n]: rows that are read and have no set."""
        return ~self.has if read is None else read > self.has  # as numbers: read and without a set

    def places(self, at: Ragged) -> Tensor:
        """int64 [k]: the index in `slots` of each pair of `at`; the number of slots where it is not among them."""
        m = self.slots.ids.numel()
        pairs, order = self.slots.pairs.sort()
        place = torch.searchsorted(pairs, at.pairs)
        has_slot = torch.cat([pairs, pairs.new_full((1,), -1)])[place] == at.pairs
        return torch.where(has_slot, torch.cat([order, order.new_full((1,), m)])[place], m)

    def holds(self, at: Ragged) -> Tensor:
        """bool [k]: pairs of `at` that are among `slots`."""
        return self.places(at) < self.slots.ids.numel()

    def replaced(self, gradient: Tensor, at: Ragged, of_ids: Tensor) -> Tensor:
        """The gradient of the logits at `slots`, with `of_ids` in its place at the pairs of `at`."""
        return torch.cat([gradient, gradient.new_zeros(1)]).index_copy_(0, self.places(at), of_ids)[:-1]


def _groups(sets: TokenSets) -> tuple[tuple[Tensor | None, int], ...]:
    """Rows grouped by their number of slots, in widths that grow by factors of 8, so that one large set does not widen all rows."""
    if sets.longest < WIDTH:
        return ((None, -(-(sets.longest + 1) // 16) * 16),)  # few different widths, so that few kernels are compiled
    widths = [WIDTH]
    while widths[-1] <= sets.longest:
        widths.append(8 * widths[-1])

    # Rows are sorted on their device and cut where the host knows that a group ends: nothing is sent, and nobody waits.
    sizes = torch.bincount(torch.bucketize(sets.host_counts + 1, torch.tensor(widths)), minlength=len(widths)).tolist()
    grouped = sets.counts.argsort(stable=True).split(sizes)
    return tuple((rows, width) for rows, width in zip(grouped, widths, strict=True) if rows.numel())


class Beside(NamedTuple):
    """A second stream of rows over the same sets: its transformed logits at the slots, [m]."""

    z: Tensor
    kind: str
    mixture: float


class _Block(NamedTuple):
    """Rows whose logits are in one memory, those of like sizes side by side.

    rows   their numbers.
    parts  of one width, one after the other: (how many of the rows, the width).
    at     int64 [m]: where each slot stands in the memory, in its last place for slots of other rows."""

    rows: slice | Tensor
    parts: tuple[tuple[int, int], ...]
    at: Tensor

    def memory(self, z: Tensor) -> Tensor:
        """z of the slots in their places, and -inf in all others."""
        size = sum(rows * width for rows, width in self.parts)
        return torch.full((size + 1,), -torch.inf, dtype=torch.float32, device=z.device).scatter_(0, self.at, z)

    def added(self, total: Tensor | None, memory: Tensor) -> Tensor:
        """[m]: what stands in the places of the slots, 0 for those of other rows, and the total of other blocks."""
        if isinstance(self.rows, Tensor):
            memory[-1:].zero_()
        return memory[self.at] if total is None else total.add_(memory[self.at])


@dataclass(frozen=True, eq=False)
class SetKernels:
    """The kernels of a backend over rows with sets. `z` are transformed logits, fp32 [m], one a slot, see `transformed`.

    backend   of the row kernels, without an exchange.
    columns   how many ids this process has: all, or those of `shard` from its start on."""

    kept: KeptRows
    backend: Backend
    columns: int
    shard: VocabShard | None = None

    @functools.cached_property
    def slots(self) -> Ragged:
        """The slots whose logits are needed here, with this process's columns as ids: those of rows with several ids."""
        ids = self.kept.slots.ids
        return self.kept.slots._replace(ids=torch.where(self._used, ids - self._first if self._first else ids, -1))

    def transformed(self, logits: Tensor, transform: RowTransform) -> Tensor:
        """z of `logits`, fp32 [m], arbitrary where a slot is not in use here: -inf there, and 0 where it is the only one of its
        row."""
        z = torch.where(self._several, transform.of(logits, self.kept.slots.rows), 0.0)
        return torch.where(self._own, z, -torch.inf)

    def of_logits(self, gradient: Tensor, logits: Tensor, transform: RowTransform) -> Tensor:
        """The gradient of logits from that of z; 0 of a slot that is not in use."""
        return torch.where(self._used, gradient * transform.slope(logits, self.kept.slots.rows), 0.0)

    def stats(self, z: Tensor, names: tuple[str, ...], beside: Beside | None, read: Tensor | None = None) -> Partials:
        """Partials of all rows; one that is not read has log-prob and entropy 0. `read`: bool [n], of the rows that `kept`
        reads."""
        read = self.kept.read if read is None else read
        partials = Partials.empty(names, read.numel(), z.device, beside)
        for block in self._blocks():
            found = [
                self.backend.first_visit(rows, names).values for _, rows in self._parts(block, block.memory(z), beside, read)
            ]
            partials.values[:, block.rows] = side_by_side(found)
        top = partials.get("top")
        if top is not None:  # the kernels give a column of the block
            top.copy_(self._top_id(z, partials.max))
        if self.shard is not None:
            partials = exchange(self.shard, partials, read, 0)
        if MIXED[0] in names:
            mixed = torch.empty(len(MIXED), read.numel(), device=z.device)
            for block in self._blocks():
                own, parts = partials.at(block.rows), self._parts(block, block.memory(z), beside, read)
                mixed[:, block.rows] = side_by_side([self.backend.mixed(rows, own.at(places)) for places, rows in parts])
            partials.put(MIXED, mixed if self.shard is None else self.shard.sum_over_ranks(mixed))
        return partials

    def pull(self, z: Tensor, partials: Partials, slopes: Slopes, beside: Beside | None) -> Tensor:
        """The gradient of z."""
        gradient: Tensor | None = None
        for block in self._blocks():
            memory, found, own = block.memory(z), partials.at(block.rows), slopes.at(block.rows)
            for places, rows in self._parts(block, memory, beside, self.kept.read):
                self.backend.gradient(rows, found.at(places), own.at(places), rows.logits)
            gradient = block.added(gradient, memory)
        assert gradient is not None, "there is one block at least"
        return gradient

    def fused(
        self, z: Tensor, stage: TokenStage, wanted: bool, beside: Beside | None, read: Tensor | None = None
    ) -> tuple[FusedRows, Tensor | None]:
        """Losses of all rows of a token stage, and the gradient of z if it is wanted."""
        read = self.kept.read if read is None else read
        gradient: Tensor | None = None
        order, results = [], []
        for block in self._blocks():
            memory, own = block.memory(z), stage.at(block.rows)
            order += [block.rows] if isinstance(block.rows, Tensor) else []
            for places, rows in self._parts(block, memory, beside, read):
                # Every rank's block has the same slots, each with the ids of the rank alone.
                shard = None if self.shard is None else replace(self.shard, start=0, vocab=rows.logits.shape[2])
                backend, out = on_shard(self.backend, shard), rows.logits if wanted else None
                results.append(backend.fused(rows, own.at(places), out).values)
            gradient = block.added(gradient, memory) if wanted else None
        result = FusedRows(side_by_side(results))
        if order:
            in_blocks, result = result, FusedRows.zeros(read.numel(), read.device, beside)
            result.put(torch.cat(order), in_blocks)
        return result, gradient

    @property
    def _first(self) -> int:
        return 0 if self.shard is None else self.shard.start

    @functools.cached_property
    def _own(self) -> Tensor:
        """bool [m]: slots in use whose id is among this process's columns. An id outside the vocabulary belongs to no rank."""
        ids, end = self.kept.slots.ids, self._first + self.columns
        return (ids >= self._first) & (ids < (end if self.shard is None else min(end, self.shard.vocab)))

    @functools.cached_property
    def _several(self) -> Tensor:
        """bool [m]: slots of rows with several ids."""
        return self.kept.several[self.kept.slots.rows]

    @functools.cached_property
    def _used(self) -> Tensor:
        """bool [m]: slots whose logits are needed here."""
        return self._own & self._several

    @functools.cached_property
    def _target(self) -> Tensor:
        """int64 [n]: the column of each row's target in a block, -1 where it is not in use here."""
        slots, target = self.kept.slots, self.kept.target
        return torch.where(self._own[slots.offsets[:-1] + target], target, -1)

    def _top_id(self, z: Tensor, top: Tensor) -> Tensor:
        """int64 [n]: the lowest id whose z is the row's largest, -1 where none is."""
        slots, none = self.kept.slots, torch.iinfo(torch.int64).max
        ids = torch.where(self._own & (z == top[slots.rows]), slots.ids, none)
        lowest = torch.full_like(self.kept.target, none).scatter_reduce_(0, slots.rows, ids, "amin")
        return torch.where(lowest == none, -1, lowest)

    def _parts(self, block: _Block, memory: Tensor, beside: Beside | None, read: Tensor) -> Iterator[tuple[slice, LogitRows]]:
        """Each part of a block: (its places among the rows of the block, these as rows of logits [1, rows, width])."""
        target, read = self._target[block.rows], read[block.rows]
        second = None if beside is None else block.memory(beside.z)
        row = first = 0
        for rows, width in block.parts:
            places, shape, own = slice(row, row + rows), (1, rows, width), slice(first, first + rows * width)
            other = None if second is None else second[own].view(shape)
            of_second = None if other is None or beside is None else Second(other, TRANSFORMED, beside.kind, beside.mixture)
            yield places, LogitRows(memory[own].view(shape), target[places], read[places], TRANSFORMED, of_second)
            row, first = places.stop, own.stop

    def _blocks(self) -> Iterator[_Block]:
        """As many rows at a time as BLOCK_BYTES allow, one part at least."""
        slots, place, n = self.kept.slots, self.kept.place, self.kept.read.numel()
        parts: list[tuple[Tensor, int]] = []
        for group, width in self.kept.groups:
            if group is None and 4 * n * width <= BLOCK_BYTES:
                yield _Block(slice(0, n), ((n, width),), torch.add(place, slots.rows, alpha=width))
                return
            rows = torch.arange(n, device=place.device) if group is None else group
            parts += [(some, width) for some in rows.split(max(1, BLOCK_BYTES // (4 * width)))]
        while parts:
            own, size, starts = list[tuple[Tensor, int]](), 0, list[Tensor]()
            while parts and (not own or 4 * (size + parts[0][0].numel() * parts[0][1]) <= BLOCK_BYTES):
                rows, width = parts.pop(0)
                own.append((rows, width))
                starts.append(torch.arange(size, size + rows.numel() * width, width, device=place.device))
                size += rows.numel() * width
            order = torch.cat([rows for rows, _ in own])
            first = place.new_full((n,), size).index_copy_(0, order, torch.cat(starts))
            shapes = tuple((rows.numel(), width) for rows, width in own)
            yield _Block(order, shapes, (first[slots.rows] + place).clamp_(max=size))


@dataclass(frozen=True, eq=False)
class OverSets:
    """A visit of rows over their sets. `names` of the partials; `others`: second streams; `at`: further ids of rows
    with a set, in it or not. `tokens`: where the sets are those of tokens, the rows of the stream that these are of."""

    kept: KeptRows
    targets: Tensor
    names: tuple[str, ...]
    others: tuple[Other, ...] = ()
    at: Ragged | None = None
    tokens: Tokens | None = None

    @property
    def read(self) -> Tensor:
        return self.kept.read

    @property
    def one(self) -> Other | None:
        """The second stream that is read in the same visit."""
        return one_of(self.others)

    @property
    def apart(self) -> tuple[Other, ...]:
        """Those that are visited after one another."""
        return () if self.one is not None else self.others

    def stats(self, stream: Stream) -> Found:
        kernels, z, _ = self._rows(stream)
        partials = kernels.stats(z, self.names, self._beside(kernels, self.one))
        apart = []
        for other in self.apart:
            apart.append(kernels.stats(z, other.names, self._beside(kernels, other), read_beside(other.weight, self.read)))
        return Found(partials, tuple(apart))

    def pull(self, stream: Stream, found: Found, slopes: Slopes, at_ids: Tensor | None) -> tuple[Ragged, Tensor]:
        """(slots, the gradient of the logits at them)."""
        kernels, z, logits = self._rows(stream)
        of_divergence = slopes.get("divergence")
        own = slopes.without("divergence") if self.apart else slopes
        gradient = kernels.pull(z, found.partials, own, self._beside(kernels, self.one))
        for other, partials in zip(self.apart, found.apart, strict=True):
            if of_divergence is not None:
                slope = times(other.weight, of_divergence)
                alone = Slopes.stacked({"target": torch.zeros_like(slope), "divergence": slope})
                gradient += kernels.pull(z, partials, alone, self._beside(kernels, other))
        gradient = kernels.of_logits(gradient, logits, stream.transform)
        if at_ids is not None and self.at is not None:
            gradient = self.kept.replaced(gradient, self.at, at_ids)
        pairs = self._pairs(kernels.slots)
        return (kernels.slots, gradient) if pairs is None else (pairs.slots, pairs.sums(gradient).to(torch.float32))

    def fused(self, stream: Stream, stage: TokenStage, wanted: bool) -> tuple[FusedRows, tuple[Ragged, Tensor] | None]:
        """(losses of all rows, what `pull` returns if it is wanted)."""
        kernels, z, logits = self._rows(stream)
        result, gradient = kernels.fused(z, stage, wanted, self._beside(kernels, self.one))
        of_loss = stage.rows.divergence_weight
        for other in self.apart:
            weight = torch.zeros_like(result.losses) if of_loss is None else times(other.weight, of_loss)
            read = read_beside(other.weight, self.read)
            alone = TokenStage.divergence_alone(self.targets, weight)
            part, more = kernels.fused(z, alone, wanted, self._beside(kernels, other), read)
            assert part.divergence is not None
            divergence = times(other.weight, part.divergence)
            divergence = divergence if result.divergence is None else result.divergence + divergence
            result = FusedRows.of(result.logps, result.entropy, result.losses + part.losses, divergence)
            gradient = None if gradient is None or more is None else gradient + more
        if gradient is None:
            return result, None
        return result, (kernels.slots, kernels.of_logits(gradient, logits, stream.transform))

    def logits_at(self, stream: Stream) -> LogitsAt:
        assert self.at is not None
        slots, logits = self.at, self._read(at_all_ranks, stream, self.at)
        # The log-prob of the only id of a set is 0 whatever its logit is, which is therefore not computed.
        logits = torch.where(self.kept.several[slots.rows], logits, 0.0)
        return LogitsAt(slots, logits, (slots.ids >= 0) & self.kept.holds(slots))

    def _rows(self, stream: Stream) -> tuple[SetKernels, Tensor, Tensor]:
        """(the kernels over sets, z of the slots, their logits)."""
        kernels = SetKernels(self.kept, stream.kernels, stream.columns, stream.shard)
        logits = self._read(type(stream).at, stream, kernels.slots)
        return kernels, kernels.transformed(logits, stream.transform), logits

    def _beside(self, kernels: SetKernels, other: Other | None) -> Beside | None:
        if other is None:
            return None
        logits = self._read(type(other.stream).at, other.stream, kernels.slots)
        return Beside(kernels.transformed(logits, other.stream.transform), other.kind, other.mixture)

    def _pairs(self, slots: Ragged) -> Distinct | None:
        """Slots of tokens as those of their rows, each once; None: they are that already."""
        if self.tokens is None:
            return None
        return Distinct.of(
            self.tokens.rows[slots.rows], slots.ids, (slots.ids >= 0) & self.tokens.used[slots.rows], self.tokens.n
        )

    def _read(self, logits: Callable[[Any, Ragged], Tensor], stream: Stream, slots: Ragged) -> Tensor:
        """fp32 [m]: the logits of a stream at slots."""
        pairs = self._pairs(slots)
        return logits(stream, slots) if pairs is None else logits(stream, pairs.slots)[pairs.place]
