"""Ids of rows: positions in logits, which a set of kept ids or a teacher's top-k are.

Products of hidden states with the rows of the weight at such positions are the backends' (`backends/__init__.py`). Their speed is
limited by gathering rows of width H from memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import plain
from ..token_sets import TokenSets

#: Devices whose values the host reads without a wait.
READ_AT_ONCE = ("cpu",)

#: If no row has more slots than this, all rows are padded to one width.
WIDTH = 64


class Ragged(NamedTuple):
    """Pairs (row, id) in the order of rows, the slots: those of row i are offsets[i] to offsets[i + 1]."""

    ids: Tensor  # int64 [m]; -1: a slot that is not used, which nothing reads
    offsets: Tensor  # int64 [n + 1]
    rows: Tensor  # int64 [m], the row of each slot

    def plain(self) -> Ragged:
        """Tensors with memory: inside a transform of torch.func, what is made of plain tensors may have a wrapper."""
        return Ragged(*map(plain, self))

    def columns(self, first: int, count: int) -> Ragged:
        """These slots counted in `count` columns, of which the first is the id `first`; -1 where the id is not among them."""
        counted = self.ids - first if first else self.ids
        return self._replace(ids=torch.where((self.ids >= first) & (self.ids < first + count), counted, -1))

    def only(self, rows: Tensor) -> Ragged:
        """Those of these rows, bool [n], the others not in use."""
        return self._replace(ids=torch.where(rows[self.rows], self.ids, -1))

    def taken(self, at: Tensor) -> tuple[Ragged, Tensor]:
        """(those of the rows `at`, int64 [r], counted as their places in `at`; which of the slots they are). Waits for a device."""
        counts = self.offsets.diff()[at]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = torch.arange(at.numel(), device=at.device).repeat_interleave(counts)
        which = torch.arange(rows.numel(), device=at.device) + (self.offsets[at] - offsets[:-1])[rows]
        return Ragged(self.ids[which], offsets, rows), which

    def in_chunk(self, at: Tensor, n: int) -> tuple[Ragged, Tensor | slice]:
        """`taken` of the rows `at`, of n, without a wait: where that would be one, all slots, those of other rows not in use."""
        if at.device.type in READ_AT_ONCE:
            return self.taken(at)
        place = places_in(at, n)[self.rows]
        return self._replace(ids=torch.where(place >= 0, self.ids, -1), rows=place.clamp(min=0)), slice(None)

    def positions(self, inner: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of the slots into logits [A, inner, V]; those of another one where a slot is not in use."""
        return self.rows // inner, self.rows % inner, self.ids.clamp(min=0)

    @property
    def pairs(self) -> Tensor:
        """int64 [m]: a number for each pair (row, id)."""
        return (self.rows << 32) + self.ids


def places_in(at: Tensor, n: int) -> Tensor:
    """int64 [n]: the place of each of n rows in `at`, -1 of one that is not there."""
    return torch.full((n,), -1, device=at.device).index_copy_(0, at, torch.arange(at.numel(), device=at.device))


def at_or(x: Tensor, index: Tensor, value: float = 0) -> Tensor:
    """x [k] at an index in [0, k]; `value` at k."""
    return torch.cat([x, x.new_full((1,), value)])[index]


def write_at(out: Tensor, slots: Ragged, values: Tensor) -> None:
    """Write values [m] at slots that are in use, which differ, of rows of logits `out` [A, T, V]. The host does not ask which these
    are: every other slot writes what the first of them does, or where there is none, what is there."""
    m, used = slots.ids.numel(), slots.ids >= 0
    if m == 0 or out.numel() == 0:  # of a rank without a part of the vocabulary
        return
    which = torch.where(used, torch.arange(m, device=used.device), used.to(torch.uint8).argmax())
    at = tuple(x[which] for x in slots.positions(out.shape[1]))
    out[at] = torch.where(used[which], values[which].to(out.dtype), out[at])


def merged(slots: Ragged, values: Tensor, others: Ragged, of_others: Tensor) -> tuple[Ragged, Tensor]:
    """Slots of the same rows with their values, in the order of rows."""
    rows, order = torch.cat([slots.rows, others.rows]).sort(stable=True)
    ids = torch.cat([slots.ids, others.ids])[order]
    return Ragged(ids, slots.offsets + others.offsets, rows), torch.cat([values, of_others])[order]


# ---- several of them for a row, which may be equal


class Distinct(NamedTuple):
    """Pairs (row, id) in any order, of which several may be equal, and each of them once.

    slots   each pair once: as many slots as there are pairs, those that are left over not in use, so that no host counts them. They
            lie behind those of the last row and count as its slots: what is added up there is 0.
    place   int64 [k], the slot of each pair.
    order   int64 [k], the pairs in the order of their slots; equal ones stay in their order.
    starts  int64 [k + 1], where those of each slot begin in `order`."""

    slots: Ragged
    place: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, rows: Tensor, ids: Tensor, used: Tensor, n: int) -> Distinct:
        """Pairs [k] of n rows. `used` bool [k]: the others have the slot behind all in use."""
        k, device, none = rows.numel(), rows.device, n << 32
        pairs, order = torch.where(used, (rows << 32) + ids, none).sort(stable=True)
        slot = (pairs.diff(prepend=pairs[:1]) != 0).cumsum(0)
        starts = torch.searchsorted(slot, torch.arange(k + 1, device=device))
        pair = at_or(pairs, starts[:k], none)
        owner, ids = (pair >> 32).clamp(max=n - 1), torch.where(pair < none, pair & 0xFFFFFFFF, -1)
        slots = Ragged(ids, torch.searchsorted(owner, torch.arange(n + 1, device=device)), owner)
        place = torch.empty_like(slot).index_copy_(0, order, slot)
        return cls(slots.plain(), plain(place), plain(order), plain(starts))

    def sums(self, x: Tensor) -> Tensor:
        """fp64 [k], for each slot: the sum of x [k] over its pairs, in their order. 0 of a slot that is not in use."""
        sums = torch.segment_reduce(x[self.order].double(), "sum", offsets=self.starts, initial=0, unsafe=True)
        return torch.where(self.slots.ids >= 0, sums, 0.0)

    def row_sums(self, x: Tensor) -> Tensor:
        """fp64 [n], likewise over the pairs of a row."""
        return torch.segment_reduce(self.sums(x), "sum", offsets=self.slots.offsets, initial=0, unsafe=True)


@dataclass(eq=False)
class Tokens:
    """Tokens of n rows of logits: a row may have several, and several of them the same target.

    rows     int64 [m], the row of each token; anything where it is not read.
    targets  int64 [m].
    read     bool [m]: tokens that are looked at; None: all.
    listed   further ids of each token, whose log-probs are wanted.
    of_row   int64 [n], the token of each row, where the host knows that each has one; else None."""

    rows: Tensor
    targets: Tensor
    read: Tensor | None
    n: int
    listed: Ragged | None = None
    of_row: Tensor | None = None

    @classmethod
    def one_a_row(cls, targets: Tensor, read: Tensor | None, listed: Ragged | None = None) -> Tokens:
        """Those of rows that have one token each."""
        rows = torch.arange(targets.numel(), device=targets.device)
        return cls(rows, targets, read, targets.numel(), listed, rows)

    @functools.cached_property
    def used(self) -> Tensor:
        """bool [m]: `read`, never None."""
        return torch.ones_like(self.rows, dtype=torch.bool) if self.read is None else self.read

    @property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """(the tokens that are read, in the order of their rows, and behind them the others, int64 [m]; where those of each row
        begin, int64 [n + 1])."""
        rows, order = torch.where(self.used, self.rows, self.n).sort(stable=True)
        return order, torch.searchsorted(rows, torch.arange(self.n + 1, device=rows.device))

    @functools.cached_property
    def pairs(self) -> Distinct:
        """Of the targets, and behind them the listed ids."""
        rows, used = self.rows, self.used
        ids = torch.where(self.targets < 0, 0x7FFFFFFF, self.targets)  # of no vocabulary
        if self.listed is not None:
            of = self.listed.rows
            rows, used = torch.cat([rows, rows[of]]), torch.cat([used, used[of] & (self.listed.ids >= 0)])
            ids = torch.cat([ids, self.listed.ids])
        return Distinct.of(rows, ids, used, self.n)

    def named(self, tokens: Tensor | None) -> Tensor:
        """bool [n]: rows of these tokens, bool [m], all of which are read; None: of all that are."""
        tokens = self.used if tokens is None else tokens
        named = torch.zeros(self.n + 1, dtype=torch.bool, device=self.rows.device)
        return plain(named.index_fill_(0, torch.where(tokens, self.rows, self.n), True)[: self.n])

    @property
    def of_any(self) -> Tensor:
        """int64 [n]: an id of each row, 0 where nobody names one."""
        slots = self.pairs.slots
        first = at_or(slots.ids, slots.offsets[:-1])
        return plain(torch.where(slots.offsets.diff() > 0, first, 0).clamp(min=0))

    def at(self, rows: Tensor) -> tuple[Tokens, Tensor | slice, Tensor | None]:
        """(the tokens of these rows, int64 [r], which count as their places; which of the tokens they are; and which of the listed
        ids theirs are). Where the host would wait to know how many they are: all tokens, the others not read, and None."""
        of_tokens = places_in(rows, self.n)[self.rows.clamp(0, self.n - 1)]
        here = self.used & (of_tokens >= 0)
        if rows.device.type not in READ_AT_ONCE:
            own = None if self.of_row is None else rows
            return replace(self, rows=of_tokens, read=here, n=rows.numel(), of_row=own), slice(None), None
        which = here.nonzero()[:, 0]
        listed, of_listed = (None, None) if self.listed is None else self.listed.taken(which)
        return Tokens(of_tokens[which], self.targets[which], None, rows.numel(), listed), which, of_listed

    def groups(self, active: Tensor | None, sequences: Tensor, count: int) -> tuple[int, ...]:
        """Of the rows of `active` tokens, in their order: the sizes of the smallest groups that follow one another so that no
        sequence has rows in two. `sequences`, int64 [m], of `count`: that of each token. Waits for a device."""
        rows = self.named(active)
        here = (self.used & rows[torch.where(self.used, self.rows, 0)]).nonzero()[:, 0]
        of, at = sequences[here], (rows.cumsum(0) - 1)[self.rows[here]]
        places = torch.arange(int(rows.sum()), device=of.device)
        last = at.new_zeros(count).scatter_reduce(0, of, at, "amax")
        reached = places.scatter_reduce(0, at, last[of], "amax").cummax(0).values
        ends = (reached == places).nonzero()[:, 0] + 1
        return tuple(ends.diff(prepend=ends.new_zeros(1)).tolist())

    # ---- from rows to tokens, and back

    def of_pairs(self, x: Tensor) -> Tensor:
        """That of each target and listed id, from x [k] at the slots of `pairs`; 0 where it is not in use."""
        return torch.where(self.pairs.slots.ids >= 0, x, 0.0)[self.pairs.place]

    def of_rows(self, x: Tensor) -> Tensor:
        """[m], from x [n]; 0 of a token that is not read, -1 if x are ids."""
        return torch.where(self.used, x[torch.where(self.used, self.rows, 0)], 0 if x.is_floating_point() else -1)

    def to_pairs(self, x: Tensor) -> Tensor:
        """fp32 [k]: sums over equal pairs. A row's total is made of these, as rounded: so in the total less one of them no rounding
        of that is left, which may be more than all others."""
        return self.pairs.sums(x).float()

    def to_rows(self, x: Tensor) -> Tensor:
        """fp32 [n]: sums over the tokens of each row."""
        return self.pairs.row_sums(torch.cat([x, x.new_zeros(self.pairs.place.numel() - x.numel())])).float()


# ---- sets


def slots_of(sets: TokenSets) -> Ragged:
    """The ids of sets, all of them in use."""
    return Ragged(sets.ids.long(), sets.offsets, sets.row_of).plain()


@dataclass(eq=False)
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
        ids = torch.nn.functional.pad(sets.ids, (0, 1))[at - owner].long()  # in the last slot of a row another one's
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
        return torch.where(at_or(pairs, place, -1) == at.pairs, at_or(order, place, m), m)

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
