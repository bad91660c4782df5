"""Statistics of the rest of a row: the softmax over all ids but some that are left out.

The logits z of the ids that are left out are known one by one (`RowSource.logits_at`). The softmax
over the whole row follows from them and from the log-odds of any of these ids y against the rest:

    log_odds = z[y] - logsumexp(z[rest])
    log_p = z - log(exp(z[y] - log_odds) + sum(exp(z[left_out])))

Nothing cancels in these sums, so the probability of the rest keeps its digits, however small it is.
And the gradient of log_odds is 0 at the ids that are left out. Their logits get theirs from
`logits_at` alone, in one piece that is rounded once.
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
    """Return statistics of the softmax over all ids of a row but some, fp32 [num_rows] by name.

    "logps" is the log-odds z[target] - logsumexp(z[rest]).

    source               `GivenLogits` or `ProjectedLogits`
    targets              int64 [num_rows]
    row_ids, token_ids   int64 [num_pairs]: the pairs (row, id) that are left out
    mask                 bool [num_rows]: rows to process; None processes all
    names                the statistics in addition to "logps"
    detached             those of the names that get no gradient
    """
    shard: VocabShard | None = source.shard
    columns = local_ids(plain(token_ids), shard, source.num_columns)
    left_out, _ = sort_by_row(plain(row_ids), columns, source.num_rows)
    target_columns = local_ids(plain(targets), shard, source.num_columns)
    kernels = source.kernels
    if shard is None:
        kernels = RestKernels(kernels, 0, target_columns, left_out)
    elif shard.num_ids(source.num_columns) > 0:
        local_kernels = RestKernels(kernels.kernels, shard.start, target_columns, left_out)
        kernels = VocabParallel(local_kernels, shard)
    row_numbers = torch.arange(source.num_rows, device=source.device)
    rest = replace(source, kernels=kernels)
    return rest.statistics(row_numbers, mask, names, detached=detached)


class RestKernels(BackendWrapper):
    """Kernels over rows from which some ids are left out. There is no reference.

    A call has some of the rows of the batch. In place of targets it has the numbers of these rows,
    less the first id of this rank, which `VocabParallel` subtracts from targets.

    kernels    run over the other ids
    first_id   the first id of this rank
    targets    int64 [num_rows], the column of the target of each row of the batch, which may be
               left out; -1 if this rank does not have it
    left_out   the pairs that are left out, with columns of this rank as ids
    """

    def __init__(self, kernels: Backend, first_id: int, targets: Tensor, left_out: Pairs) -> None:
        super().__init__(kernels)
        self.first_id = first_id
        self.targets = targets
        self.left_out = left_out

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums over the ids of each row that are not left out.

        These logits become -inf in a copy, a block of rows at a time. "target_logit" is the logit
        of the target even if the target is left out.
        """
        rows = merge_groups(rows)
        row_numbers = rows.targets + self.first_id  # this call has row numbers in place of targets
        targets = self.targets[row_numbers]
        num_columns = rows.logits.shape[-1]
        block_size = rows_per_block(rows) * num_columns
        # A copy of a block of logits, and an element that unused pairs write to.
        copy = torch.empty(block_size + 1, dtype=torch.float32, device=targets.device)
        sums = SoftmaxSums.empty(names, rows.num_rows, targets.device)
        for block, logits in blocks_of(rows, rows.logits):
            z = copy[: logits.numel()].view(logits.shape)
            if rows.transform.select(block).transform_rows(logits, z) is logits:
                z.copy_(logits)
            positions, columns = self.pairs_of(row_numbers[block])
            elements = torch.where(columns >= 0, positions * num_columns + columns, block_size)
            copy.index_fill_(0, elements, -torch.inf)
            rest = LogitRows(z[None], targets[block])
            sums.values[:, block] = self.kernels.softmax_sums(rest, names).values
        sums["target_logit"].copy_(target_logits(rows, targets))
        if rows.mask is None:
            return sums
        masked = SoftmaxSums.masked(names, 1, targets.device)
        return replace(sums, values=torch.where(rows.mask, sums.values, masked.values))

    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits to `out`, [A, T, V], and 0 for the ids that are left out."""
        row_numbers = rows.targets + self.first_id  # this call has row numbers in place of targets
        with_targets = rows._replace(targets=self.targets[row_numbers])
        self.kernels.softmax_gradient(with_targets, sums, coefficients, out)
        positions, columns = self.pairs_of(row_numbers)
        fill_pairs(out, rows.first_row + positions, columns, 0.0)

    def pairs_of(self, row_numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pairs that these rows leave out: (positions in row_numbers, columns).

        Both are int64 [num_pairs]. On a GPU the host does not know how many pairs these rows have.
        Then all pairs of the batch are returned, with the column -1 for those of other rows.

        row_numbers   int64 [n], ascending: numbers of rows in the batch
        """
        pairs = self.left_out
        if row_numbers.device.type == "cpu" and len(row_numbers):
            start = int(pairs.offsets[row_numbers[0]])
            stop = int(pairs.offsets[row_numbers[-1] + 1])
            pairs = pairs._replace(ids=pairs.ids[start:stop], rows=pairs.rows[start:stop])
        positions = torch.searchsorted(row_numbers, pairs.rows).clamp(max=len(row_numbers) - 1)
        has_row = row_numbers[positions] == pairs.rows
        return positions, torch.where(has_row, pairs.ids, -1)


def merge_groups(rows: LogitRows) -> LogitRows:
    """Return the same rows with logits [1, A * T, V], if they can be viewed so.

    Blocks of rows do not cross groups, so this makes fewer of them.
    """
    logits = rows.logits
    num_groups, rows_per_group, num_columns = logits.shape
    if num_groups > 1 and logits.stride(0) == rows_per_group * logits.stride(1):
        return rows._replace(logits=logits.view(1, num_groups * rows_per_group, num_columns))
    return rows


def target_logits(rows: LogitRows, targets: Tensor) -> Tensor:
    """Return the logit of the target of each row after scale, softcap and temperature.

    The result is fp32 [num_rows], NaN for a target of -1.

    targets   int64 [num_rows]: a column of each row, or -1
    """
    # Rows of a call are numbered from 0. In the memory of the logits they begin at first_row.
    row_ids = torch.arange(rows.num_rows, device=targets.device)
    index = pair_index(rows.logits, rows.first_row + row_ids, targets)
    raw_logits = rows.logits[index].float()
    logits = rows.transform.transform_pairs(raw_logits, row_ids)
    return torch.where(targets >= 0, logits, torch.nan)


def fill_pairs(x: Tensor, row_ids: Tensor, columns: Tensor, value: float) -> None:
    """Set x[row_ids[i], columns[i]] to value. The host does not wait for a GPU.

    x         [A, T, V]; row_ids count its A * T rows
    columns   int64 [num_pairs]; -1 marks an unused pair
    """
    if columns.numel() == 0 or x.numel() == 0:
        return
    _, rows_per_group, num_columns = x.shape
    keys = torch.where(columns >= 0, row_ids * num_columns + columns, -1)
    # An unused pair writes where the last one in use does. If none is in use, all of them write
    # the value that the first element has.
    last = keys.amax()
    keys = torch.where(keys >= 0, keys, last.clamp(min=0))
    row_ids = keys // num_columns
    index = (row_ids // rows_per_group, row_ids % rows_per_group, keys % num_columns)
    x[index] = torch.where(last >= 0, value, x[index])
