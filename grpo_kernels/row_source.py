"""What the compositions need of rows of logits: softmax statistics of rows, and single logits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class RowSource(Protocol):
    """Rows of logits: given, or computed from hidden states and an output head.

    `candidates.py`, `extra_ids.py`, `trees.py` and `teachers.py` are written in terms of these two
    operations. They never see whether the logits exist.

    num_rows     number of rows
    vocab_size   size of the whole vocabulary, of all ranks if it is sharded
    device       the device of the results
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def statistics(
        self,
        targets: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        """Return "logps" and the named statistics of each row, fp32 [num_rows].

        targets   int64 [num_rows], any id where mask is False
        mask      bool [num_rows]: rows to process. None processes all. The others are exactly 0 in
                  value and gradient.
        names     "entropy", "logsumexp", "sum_squares" (differentiable), "top_prob" and "top_id"
                  (not differentiable; "top_id" is int64, -1 in rows that are not processed)
        """
        ...

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        """Return the transformed logit of each (row, token id) pair, fp32 [num_pairs].

        row_ids, token_ids   int64 [num_pairs], in any order. Pairs may repeat. A token id of -1
                             gives -inf and no gradient.

        The gradient is deterministic: equal pairs are summed in a fixed order.
        """
        ...
