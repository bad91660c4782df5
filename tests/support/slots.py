"""Slots of sparse products, and matrices for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_kernels.rows.ragged import Ragged

Tensor = torch.Tensor


def slots_of(lists: Sequence[Sequence[int]]) -> Ragged:
    """Ragged from the ids of each row; -1: a slot that is not used."""
    counts = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
    ids = torch.tensor([i for ids in lists for i in ids], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Ragged(ids, offsets, torch.repeat_interleave(torch.arange(len(lists)), counts))


def random_slots(n: int, vocab: int, seed: int = 0) -> Ragged:
    """Rows of 0 to 9 slots with repeated ids and some that are not used; id 0 is in every third row, id 1 in none."""
    g = torch.Generator().manual_seed(seed)
    lists = []
    for i in range(n):
        count = int(torch.randint(0, 10, (), generator=g)) if i % 5 else 0
        ids = torch.randint(2, vocab, (count,), generator=g).tolist()
        lists.append([-1 if k % 4 == 3 else x for k, x in enumerate(ids)] + [0] * (i % 3 == 0))
    return slots_of(lists)


def values_for(slots: Ragged, seed: int = 1) -> Tensor:
    """Every seventh value is 0."""
    values = torch.randn(slots.ids.shape, generator=torch.Generator().manual_seed(seed))
    values[::7] = 0.0
    return values


def matrix(rows: int, width: int, dtype: torch.dtype, seed: int, gap: int = 0) -> Tensor:
    """Random numbers; with `gap` the rows lie further apart than they are wide."""
    numbers = torch.randn(rows, width + gap, generator=torch.Generator().manual_seed(seed)) / 2
    return numbers.to(dtype)[:, gap // 2 : gap // 2 + width]
