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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import plain
from .backends import Backend, BackendWrapper
from .backends.eager import blocks_of, rows_per_block
from .pair_logits import index_pairs, local_ids, select_pairs
from .pairs import Pairs, pairs_of_rows
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

    The rest is all ids of a row but those that are left out of it. The softmax sums are computed by
    kernels that set the logits of the left-out ids to -inf. "logps" is the log-odds of the target
    against the rest, whether or not the target is left out:

        z[target] - logsumexp(z over the rest)

    source               `GivenLogits` or `ProjectedLogits`
    targets              int64 [num_rows]. A target may be left out of its row.
    row_ids, token_ids   int64 [num_pairs]: the pairs (row, id) that are left out, sorted by row
    mask                 bool [num_rows]: rows to process; None processes all
    names                the statistics in addition to "logps"
    detached             the names of statistics that get no gradient
    """
    shard: VocabShard | None = source.shard
    columns = local_ids(plain(token_ids), shard, source.num_columns)
    left_out = pairs_of_rows(plain(row_ids), columns, source.num_rows)
    kernels = source.kernels
    if shard is None:
        kernels = RestKernels(kernels, left_out)
    elif shard.num_ids(source.num_columns) > 0:  # else this rank has no id to leave out
        # `kernels` are VocabParallel, which merges the softmax sums of the ranks. Ids are left out
        # of the columns of one rank, before the merge.
        kernels_of_rank = RestKernels(kernels.kernels, left_out)
        kernels = VocabParallel(kernels_of_rank, shard)
    rest = replace(source, kernels=kernels)
    return rest.statistics(targets, mask, names, detached=detached)


class LeftOutColumns(NamedTuple):
    """The columns that are left out of the rows of a kernel call. A column is an id of this rank.

    positions   int64 [num_pairs]: the row of each pair, as its position in the call
    columns     int64 [num_pairs]: the column that this row leaves out. -1 marks a pair to ignore,
                because its id is on another rank or its row is not in the call.
    """

    positions: Tensor
    columns: Tensor


class RestKernels(BackendWrapper):
    """Row kernels that leave some ids out of the softmax of each row. There is no reference.

    The forward sets the logits of these ids to -inf in a copy, and the backward sets their gradient
    to 0.

    kernels    the kernels that this class wraps
    left_out   the (row, id) pairs to leave out, with rows numbered over the whole batch and columns
               of this rank as ids
    """

    def __init__(self, kernels: Backend, left_out: Pairs) -> None:
        """Wrap kernels, so that they leave some ids out of the softmax of each row.

        kernels    the kernels
        left_out   the (row, id) pairs to leave out, sorted by row
        """
        super().__init__(kernels)
        self.left_out = left_out

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums over the ids of each row that are not left out.

        The logits of the ids that are left out become -inf in a copy, a block of rows at a time.
        "target_logit" is the logit of the target even if the target is left out.

        rows    the rows of the call: logits, targets, mask and transform
        names   of the sums to compute, some of `softmax.SUMS`
        """
        rows = merge_groups(rows)
        batch_rows = rows_of_batch(rows)
        num_columns = rows.logits.shape[-1]
        block_size = rows_per_block(rows) * num_columns
        # The logits of a block, and after them one element, into which the pairs to ignore write.
        copy = torch.empty(block_size + 1, dtype=torch.float32, device=rows.logits.device)
        sums = SoftmaxSums.empty(names, rows.num_rows, rows.logits.device)
        for block, logits in blocks_of(rows, rows.logits):
            z = copy[: logits.numel()].view(logits.shape)
            transformed = rows.transform.select(block).transform_rows(logits, out=z)
            if transformed is logits:  # the transform is the identity and did not write to z
                z.copy_(logits)
            left_out = self.find_left_out(batch_rows[block])
            # The pairs as elements of `copy`. Pairs to ignore write the element after the block.
            elements = left_out.positions * num_columns + left_out.columns
            elements = torch.where(left_out.columns >= 0, elements, block_size)
            copy.index_fill_(0, elements, -torch.inf)
            # z is transformed already, so these rows have no transform.
            rest_of_block = LogitRows(logits=z[None], targets=rows.targets[block])
            sums.values[:, block] = self.kernels.softmax_sums(rest_of_block, names).values
        sums["target_logit"].copy_(target_logits(rows))  # of the logits without -inf
        if rows.mask is None:
            return sums
        # One column with the sums of a masked row, which `where` repeats.
        masked = SoftmaxSums.masked(names, num_rows=1, device=rows.logits.device)
        return replace(sums, values=torch.where(rows.mask, sums.values, masked.values))

    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits to `out`, with 0 for the ids that are left out.

        rows           the rows of the call
        sums           softmax sums over the ids that are not left out, from `run_sums_kernel`
        coefficients   numbers of each row, from which its gradient follows (the class has the
                       formula)
        out            [A, T, V], the shape of rows.logits: A groups of T rows
        """
        self.kernels.softmax_gradient(rows, sums, coefficients, out)
        left_out = self.find_left_out(rows_of_batch(rows))
        fill_pairs(out, rows.first_row + left_out.positions, left_out.columns, 0.0)

    def find_left_out(self, batch_rows: Tensor) -> LeftOutColumns:
        """Return the (row, column) pairs that are left out of the softmax of the rows of a call.

        A call may have some rows of the batch only. The result may contain pairs of other rows,
        with the column -1 for the caller to ignore:

        - On a CPU, the pairs between the first and the last row of the call. The pairs are sorted
          by row, so these are a slice.
        - On a GPU, all pairs of the batch, because the host would have to wait for the bounds of
          the slice.

        batch_rows   int64 [num_rows], ascending: which row of the batch each row of the call is
        """
        pair_rows = self.left_out.rows
        pair_columns = self.left_out.ids
        num_rows = len(batch_rows)
        if batch_rows.device.type == "cpu" and num_rows > 0:
            # The pairs of row r are those from offsets[r] to offsets[r + 1] - 1.
            offsets = self.left_out.offsets
            start = int(offsets[batch_rows[0]])
            stop = int(offsets[batch_rows[-1] + 1])
            pair_rows = pair_rows[start:stop]
            pair_columns = pair_columns[start:stop]
        # For a row that is not in the call, searchsorted returns the position where the row would
        # be inserted, which may be behind the last.
        positions = torch.searchsorted(batch_rows, pair_rows).clamp(max=num_rows - 1)
        is_in_call = batch_rows[positions] == pair_rows
        return LeftOutColumns(
            positions=positions, columns=torch.where(is_in_call, pair_columns, -1)
        )


def rows_of_batch(rows: LogitRows) -> Tensor:
    """Return the number in the batch of each row of a kernel call, int64 [num_rows], ascending.

    If rows.batch_rows is None, the logits of the call are those of the whole batch.
    """
    if rows.batch_rows is not None:
        return rows.batch_rows
    stop = rows.first_row + rows.num_rows
    return torch.arange(rows.first_row, stop, device=rows.logits.device)


def merge_groups(rows: LogitRows) -> LogitRows:
    """Return the same rows with logits [A, T, V] as a view [1, A * T, V], if strides allow it.

    Otherwise return the rows unchanged. `blocks_of` makes blocks from rows of one group only, so
    there are fewer and larger blocks if the A groups of T rows are one group.
    """
    logits = rows.logits
    num_groups, rows_per_group, num_columns = logits.shape
    is_evenly_spaced = logits.stride(0) == rows_per_group * logits.stride(1)
    if num_groups > 1 and is_evenly_spaced:
        return rows._replace(logits=logits.view(1, num_groups * rows_per_group, num_columns))
    return rows


def target_logits(rows: LogitRows) -> Tensor:
    """Return the logit of the target of each row after the transform, fp32 [num_rows].

    It is NaN for a target outside of [0, V), where V is the number of columns of the logits.

    rows   the rows of a kernel call
    """
    columns = rows.targets.clamp(0, rows.logits.shape[-1] - 1)
    is_outside = columns != rows.targets
    row_ids = torch.arange(rows.num_rows, device=columns.device)
    # rows.logits may have rows of other calls before those of this one.
    rows_of_logits = row_ids + rows.first_row if rows.first_row > 0 else row_ids
    raw_logits = select_pairs(rows.logits, rows_of_logits, columns)
    logits = rows.transform.transform_pairs(raw_logits, row_ids)
    return logits.masked_fill(is_outside, torch.nan)


def fill_pairs(x: Tensor, row_ids: Tensor, columns: Tensor, value: float) -> None:
    """Set x[row_ids[i], columns[i]] to value for each pair i, in place, without waiting for a GPU.

    x         [A, T, V], A groups of T rows, with any strides
    row_ids   int64 [num_pairs]: row t of group a has the number a * T + t
    columns   int64 [num_pairs]; -1 marks an unused pair
    """
    if columns.numel() == 0 or x.numel() == 0:
        return
    num_columns = x.shape[2]
    # Only the device knows which pairs are unused, so they cannot be dropped. They write the same
    # value to the same element as the last used pair does. If no pair is used, all of them write
    # the first element, which keeps its value.
    is_unused = columns < 0
    keys = (row_ids * num_columns + columns).masked_fill_(is_unused, -1)
    last_used_key = keys.amax()
    keys = torch.where(is_unused, last_used_key.clamp(min=0), keys)
    view, index = index_pairs(x, keys // num_columns, keys % num_columns)
    view[index] = view[index].masked_fill_(last_used_key >= 0, value)
