"""Statistics of a row without some of its ids: the softmax over all other ids, called the rest.

The logits z of the ids that are left out are known one by one (`RowSource.logits_at`). The softmax
over the whole row follows from them and from the log-odds of any of these ids y against the rest:

    log_odds = z[y] - logsumexp(z[rest])
    log_p = z - log(exp(z[y] - log_odds) + sum(exp(z[left_out])))

Nothing cancels in these sums, so the probability of the rest keeps its digits, however small it is.
The gradient of log_odds is 0 at the ids that are left out. These get their gradient from
`logits_at` alone, so that it is rounded once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import plain
from .backends import Backend, BackendWrapper
from .backends.eager import blocks_of, rows_per_block
from .pair_logits import local_ids, pair_index
from .pairs import Pairs, sort_by_row
from .softmax import GradientCoefficients, LogitRows, SoftmaxSums
from .vocab_parallel import VocabParallel, VocabShard


def statistics_of_rest(
    source: Any,
    targets: Tensor,
    row_ids: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    names: tuple[str, ...],
    detached: tuple[str, ...],
) -> dict[str, Tensor]:
    """Return statistics of the softmax over the rest of each row, fp32 [num_rows] by name.

    The rest is all ids but those that are left out. "logps" is the log-odds z[target] -
    logsumexp(z[rest]).

    source               `GivenLogits` or `ProjectedLogits`
    targets              int64 [num_rows]
    row_ids, token_ids   int64 [num_pairs]: the pairs (row, id) that are left out
    mask                 bool [num_rows]: rows to process; None processes all
    names                the statistics in addition to "logps"
    detached             the names of statistics that get no gradient
    """
    shard: VocabShard | None = source.shard
    columns = local_ids(plain(token_ids), shard, source.num_columns)
    left_out, _ = sort_by_row(plain(row_ids), columns, source.num_rows)
    kernels = source.kernels
    if shard is None:
        kernels = RestKernels(kernels, left_out)
    elif shard.num_ids(source.num_columns) > 0:  # else this rank has no id to leave out
        kernels = VocabParallel(RestKernels(kernels.kernels, left_out), shard)
    rest = replace(source, kernels=kernels)
    return rest.statistics(targets, mask, names, detached=detached)


class RestKernels(BackendWrapper):
    """Kernels over rows from which some ids are left out. There is no reference.

    kernels    run over the remaining ids
    left_out   the pairs that are left out: rows of the batch, and columns of this rank as ids
    """

    def __init__(self, kernels: Backend, left_out: Pairs) -> None:
        """Wrap `kernels`, for rows without the pairs `left_out`."""
        super().__init__(kernels)
        self.left_out = left_out

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums over the ids of each row that are not left out.

        The logits of the ids that are left out become -inf in a copy, a block of rows at a time.
        "target_logit" is the logit of the target even if the target is left out.
        """
        rows = merge_groups(rows)
        batch_rows = rows_of_batch(rows)
        num_columns = rows.logits.shape[-1]
        block_size = rows_per_block(rows) * num_columns
        # A copy of a block of logits, and one element more that unused pairs write to.
        copy = torch.empty(block_size + 1, dtype=torch.float32, device=rows.logits.device)
        sums = SoftmaxSums.empty(names, rows.num_rows, rows.logits.device)
        for block, logits in blocks_of(rows, rows.logits):
            z = copy[: logits.numel()].view(logits.shape)
            transformed = rows.transform.select(block).transform_rows(logits, out=z)
            if transformed is logits:  # they needed no transform, and z was not written
                z.copy_(logits)
            positions, columns = self.left_out_of(batch_rows[block])
            elements = torch.where(columns >= 0, positions * num_columns + columns, block_size)
            copy.index_fill_(0, elements, -torch.inf)
            rest_of_block = LogitRows(z[None], rows.targets[block])
            sums.values[:, block] = self.kernels.softmax_sums(rest_of_block, names).values
        sums["target_logit"].copy_(target_logits(rows))
        if rows.mask is None:
            return sums
        masked = SoftmaxSums.masked(names, num_rows=1, device=rows.logits.device)
        return replace(sums, values=torch.where(rows.mask, sums.values, masked.values))

    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits to `out`, [A, T, V], and 0 for the ids that are left out."""
        self.kernels.softmax_gradient(rows, sums, coefficients, out)
        positions, columns = self.left_out_of(rows_of_batch(rows))
        fill_pairs(out, rows.first_row + positions, columns, 0.0)

    def left_out_of(self, batch_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pairs that some rows leave out: (positions in batch_rows, columns).

        Both are int64 [num_pairs]. On a GPU the host does not know how many pairs these rows have.
        Then all pairs of the batch are returned, with the column -1 for pairs of other rows.

        batch_rows   int64 [num_rows], ascending: rows of the batch
        """
        pairs = self.left_out
        if batch_rows.device.type == "cpu" and len(batch_rows):
            start = int(pairs.offsets[batch_rows[0]])
            stop = int(pairs.offsets[batch_rows[-1] + 1])
            pairs = pairs._replace(ids=pairs.ids[start:stop], rows=pairs.rows[start:stop])
        positions = torch.searchsorted(batch_rows, pairs.rows).clamp(max=len(batch_rows) - 1)
        has_row = batch_rows[positions] == pairs.rows
        return positions, torch.where(has_row, pairs.ids, -1)


def rows_of_batch(rows: LogitRows) -> Tensor:
    """Return which row of the batch each row of a call is, int64 [num_rows]."""
    if rows.batch_rows is not None:
        return rows.batch_rows
    stop = rows.first_row + rows.num_rows
    return torch.arange(rows.first_row, stop, device=rows.logits.device)


def merge_groups(rows: LogitRows) -> LogitRows:
    """Return the same rows with logits [1, A * T, V] in place of [A, T, V], if strides allow it.

    `blocks_of` makes no block across two of the A groups, so it makes fewer blocks of one group.
    """
    logits = rows.logits
    num_groups, rows_per_group, num_columns = logits.shape
    if num_groups > 1 and logits.stride(0) == rows_per_group * logits.stride(1):
        return rows._replace(logits=logits.view(1, num_groups * rows_per_group, num_columns))
    return rows


def target_logits(rows: LogitRows) -> Tensor:
    """Return the transformed logit of the target of each row, fp32 [num_rows].

    It is NaN for a target that is no column.
    """
    columns = local_ids(rows.targets, None, rows.logits.shape[-1])
    row_ids = torch.arange(rows.num_rows, device=columns.device)  # in the call, not in the logits
    index = pair_index(rows.logits, rows.first_row + row_ids, columns)
    raw_logits = rows.logits[index].float()
    logits = rows.transform.transform_pairs(raw_logits, row_ids)
    return torch.where(columns >= 0, logits, torch.nan)


def fill_pairs(x: Tensor, row_ids: Tensor, columns: Tensor, value: float) -> None:
    """Set x[row_ids[i], columns[i]] to value. The host does not wait for a GPU.

    x         [A, T, V], A groups of T rows
    row_ids   int64 [num_pairs], from 0 to A * T - 1
    columns   int64 [num_pairs]; -1 marks an unused pair
    """
    if columns.numel() == 0 or x.numel() == 0:
        return
    _, rows_per_group, num_columns = x.shape
    keys = torch.where(columns >= 0, row_ids * num_columns + columns, -1)
    # Only the device knows which pairs are unused, so they must write somewhere: where the last
    # pair in use does, or if none is in use, to the first element, the value that it has.
    last = keys.amax()
    keys = torch.where(keys >= 0, keys, last.clamp(min=0))
    row_ids = keys // num_columns
    index = (row_ids // rows_per_group, row_ids % rows_per_group, keys % num_columns)
    x[index] = torch.where(last >= 0, value, x[index])
