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


def pairs_of_rows(row_ids: Tensor, columns: Tensor, num_rows: int) -> Pairs:
    """Return the pairs (row_ids[i], columns[i]), with the offsets of each row.

    row_ids   int64 [num_pairs], in [0, num_rows), ascending
    columns   int64 [num_pairs]; -1 marks an unused pair
    """
    bounds = torch.arange(num_rows + 1, device=row_ids.device)
    offsets = torch.searchsorted(row_ids, bounds)  # the first pair of row r or of a later row
    return Pairs(ids=columns, offsets=offsets, rows=row_ids)
