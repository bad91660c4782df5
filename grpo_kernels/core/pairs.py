"""(row, token id) pairs, sorted by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """(row, id) pairs, sorted by row.

    ids       int64 [num_pairs]; -1 marks an unused pair
    offsets   int64 [num_rows + 1]: row r has the pairs offsets[r] : offsets[r + 1]
    rows      int64 [num_pairs], the row of each pair
    """

    ids: Tensor
    offsets: Tensor
    rows: Tensor


class SortedPairs(NamedTuple):
    """Pairs that were sorted by row.

    pairs   the pairs in their new order
    order   int64 [num_pairs]: where each of them was before
    """

    pairs: Pairs
    order: Tensor


def sort_by_row(row_ids: Tensor, columns: Tensor, num_rows: int) -> SortedPairs:
    """Return the pairs (row_ids[i], columns[i]) sorted by row. Pairs of a row keep their order.

    row_ids   int64 [num_pairs], in [0, num_rows)
    columns   int64 [num_pairs]; -1 marks an unused pair
    """
    sorted_rows, order = row_ids.sort(stable=True)
    bounds = torch.arange(num_rows + 1, device=row_ids.device)
    offsets = torch.searchsorted(sorted_rows, bounds)
    pairs = Pairs(ids=columns[order], offsets=offsets, rows=sorted_rows)
    return SortedPairs(pairs=pairs, order=order)
