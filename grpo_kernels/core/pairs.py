"""(row, token id) pairs, sorted by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """(row, id) pairs in the order of rows.

    ids       int64 [num_pairs]; -1 marks an unused pair, for which nothing is read
    offsets   int64 [num_rows + 1]: the pairs of row i are offsets[i] to offsets[i + 1]
    rows      int64 [num_pairs], the row of each pair
    """

    ids: Tensor
    offsets: Tensor
    rows: Tensor


def sort_by_row(row_ids: Tensor, columns: Tensor, num_rows: int) -> tuple[Pairs, Tensor]:
    """Return pairs in the order of rows, and the permutation that sorts them.

    row_ids, columns   int64 [num_pairs]
    """
    sorted_rows, order = row_ids.sort(stable=True)
    starts = torch.arange(num_rows + 1, device=row_ids.device)
    offsets = torch.searchsorted(sorted_rows, starts)
    return Pairs(columns[order], offsets, sorted_rows), order
