"""(row, id) pairs: positions in rows of logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Ragged(NamedTuple):
    """(row, id) pairs in the order of rows. Those of row i are offsets[i] to offsets[i + 1]."""

    ids: Tensor  # int64 [m]; -1: a pair that is not used, which nothing reads
    offsets: Tensor  # int64 [n + 1]
    rows: Tensor  # int64 [m], the row of each pair
