"""Sets of ids as lists of lists, and the expected properties of TokenSets."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import settings
from hypothesis import strategies as st

from grpo_kernels import TokenSets

Tensor = torch.Tensor

#: For tests of random sets, on busy machines too.
examples = settings(max_examples=60, deadline=None)

#: Rows as lists of ids, in any order, each once; with empty ones and without any.
ROWS = st.lists(st.lists(st.integers(0, 40), max_size=6, unique=True), max_size=8)


def number(row: int, token: int) -> float:
    """The value of an id in these tests."""
    return row + token / 64


def build(rows: list[list[int]], values: bool = False, dtype: torch.dtype = torch.int64) -> TokenSets:
    ids = torch.tensor([token for row in rows for token in row], dtype=dtype)
    offsets = torch.tensor([sum(map(len, rows[:i])) for i in range(len(rows) + 1)])
    numbers = [number(i, token) for i, row in enumerate(rows) for token in row]
    return TokenSets(ids, offsets, torch.tensor(numbers, dtype=torch.float32) if values else None)


def lists(sets: TokenSets) -> list[list[int]]:
    cuts = sets.offsets.tolist()
    return [sets.ids[a:b].tolist() for a, b in pairwise(cuts)]


def assert_facts(sets: TokenSets, rows: list[list[int]], bound: bool = False) -> None:
    """Asserts the ids and the facts that the host knows. bound: the known largest id may be an upper bound."""
    assert lists(sets) == rows and sets.offsets.dtype == torch.int64
    assert sets.rows == len(sets) == len(rows)
    assert sets.empty_rows == sum(not row for row in rows)
    assert sets.longest == max(map(len, rows), default=0)
    largest = max((token for row in rows for token in row), default=-1)
    assert sets.largest_id >= largest if bound else sets.largest_id == largest
    assert all(type(fact) is int for fact in (sets.rows, sets.empty_rows, sets.longest, sets.largest_id))


SOME = [[3, 1], [], [7], [2, 9, 4], []]


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
