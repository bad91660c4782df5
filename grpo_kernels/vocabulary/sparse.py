"""Products of hidden states with a few rows of the weight each: what a loss over kept sets needs in place of whole products.

Every backend has three (`vocabulary/backends/__init__.py`). They are bound by gathering rows of width H from memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Slots(NamedTuple):
    """Pairs (row, id) in the order of rows: those of row i are offsets[i] to offsets[i + 1]. The sampled positions of sparse
    products."""

    ids: Tensor  # int64 [m]; -1: a slot that is not used, which no product reads
    offsets: Tensor  # int64 [n + 1]
    rows: Tensor  # int64 [m], the row of each slot

    def plain(self) -> Slots:
        """Tensors with memory: inside a transform of torch.func, what is made of plain tensors may have a wrapper."""
        return Slots(*map(plain, self))

    def columns(self, first: int, count: int) -> Slots:
        """These slots counted in `count` columns, of which the first is the id `first`; -1 where the id is not among them."""
        return self._replace(ids=torch.where((self.ids >= first) & (self.ids < first + count), self.ids - first, -1))

    @property
    def pairs(self) -> Tensor:
        """int64 [m]: a number for each pair (row, id)."""
        return (self.rows << 32) + self.ids


def plain(x: Tensor) -> Tensor:
    """x without the wrappers of torch.func: for numbers that have no gradient."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
