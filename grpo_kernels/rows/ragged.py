"""Ids of rows: positions in logits, which a set of kept ids, a teacher's top-k or the columns of a sparse gradient are.

Products of hidden states with the rows of the weight at such positions are the backends' (`backends/__init__.py`). Their speed is
limited by gathering rows of width H from memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..layout import plain

Tensor = torch.Tensor


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
        return self._replace(ids=torch.where((self.ids >= first) & (self.ids < first + count), self.ids - first, -1))

    def only(self, rows: Tensor) -> Ragged:
        """Those of these rows, bool [n], the others not in use."""
        return self._replace(ids=torch.where(rows[self.rows], self.ids, -1))

    def of_rows(self, lo: int, hi: int) -> Ragged:
        """Those of rows lo to hi, the first of which counts as 0. The host does not wait for a GPU: the others stay there,
        not in use."""
        if self.ids.device.type == "cpu":
            first, last = int(self.offsets[lo]), int(self.offsets[hi])
            return Ragged(self.ids[first:last], self.offsets[lo : hi + 1] - first, self.rows[first:last] - lo)
        here = (self.rows >= lo) & (self.rows < hi)
        return self._replace(ids=torch.where(here, self.ids, -1), rows=torch.where(here, self.rows - lo, 0))

    def taken(self, at: Tensor) -> tuple[Ragged, Tensor]:
        """(those of the rows `at`, int64 [r], counted as their places in `at`; which of the slots they are). Waits for a device."""
        counts = self.offsets.diff()[at]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = torch.arange(at.numel(), device=at.device).repeat_interleave(counts)
        which = torch.arange(rows.numel(), device=at.device) + (self.offsets[at] - offsets[:-1])[rows]
        return Ragged(self.ids[which], offsets, rows), which

    def in_chunk(self, at: Tensor, n: int) -> Ragged:
        """Those of the rows `at`, of n, counted as their places in `at`; the others are not in use."""
        place = torch.full((n,), -1, device=at.device).index_copy_(0, at, torch.arange(at.numel(), device=at.device))[self.rows]
        return self._replace(ids=torch.where(place >= 0, self.ids, -1), rows=place.clamp(min=0))

    def positions(self, inner: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of the slots into logits [A, inner, V]; those of another one where a slot is not in use."""
        return self.rows // inner, self.rows % inner, self.ids.clamp(min=0)

    @property
    def pairs(self) -> Tensor:
        """int64 [m]: a number for each pair (row, id)."""
        return (self.rows << 32) + self.ids


def write_at(out: Tensor, positions: tuple[Tensor, ...], values: Tensor, used: Tensor) -> None:
    """out[positions] = values, [m], where `used`, bool [m], whose positions differ. The host does not ask which these are: every
    other slot writes what the first of them does, or where there is none, what is there."""
    m = used.numel()
    if m == 0 or out.numel() == 0:  # of a rank without a part of the vocabulary
        return
    which = torch.where(used, torch.arange(m, device=used.device), used.to(torch.uint8).argmax())
    at = tuple(x[which] for x in positions)
    out[at] = torch.where(used[which], values[which].to(out.dtype), out[at])


def merged(slots: Ragged, values: Tensor, others: Ragged, of_others: Tensor) -> tuple[Ragged, Tensor]:
    """Slots of the same rows with their values, in the order of rows."""
    rows, order = torch.cat([slots.rows, others.rows]).sort(stable=True)
    ids = torch.cat([slots.ids, others.ids])[order]
    return Ragged(ids, slots.offsets + others.offsets, rows), torch.cat([values, of_others])[order]
