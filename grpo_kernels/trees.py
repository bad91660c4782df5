"""Rollouts that share prefixes, as a tree in which the model processes each prefix once.

A row of logits then predicts the tokens of several rollouts, see `shared_row_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch import TokenBatch
from .checks import describe
from .core.sources import RowSource
from .extra_ids import logprobs_with_extra_ids
from .token_sets import TokenSets


@dataclass(frozen=True, eq=False, repr=False)
class PrefixTree:
    """Rollouts as the rows of a tree, in which a shared prefix occurs once.

        tree = PrefixTree.of(rollouts, prompt_lengths)
        batch = TokenBatch(
            tree.targets, advantages[:, None], rows=tree.rows, cu_seqlens=tree.cu_seqlens
        )

    The tree has N rows, and its B rollouts have M targets.

    ids          int64 [N]: the token of each row, depth first: a prefix comes before all of its
                 continuations.
    positions    int64 [N]: the number of tokens before each row in its rollouts, for position_ids.
    ends         int64 [N]: the end of the subtree of each row: row i attends to row j if j <= i <
                 ends[j].
    targets      int64 [M]: the tokens of the completions, one rollout after another.
    rows         int64 [M]: the row that predicts each target.
    cu_seqlens   int64 [B + 1]: where the targets of each rollout begin, as in a TokenBatch.
    """

    ids: Tensor
    positions: Tensor
    ends: Tensor
    targets: Tensor
    rows: Tensor
    cu_seqlens: Tensor
    __repr__ = describe

    @classmethod
    def of(
        cls, rollouts: Sequence[Any], prompt_lengths: Sequence[int] | Tensor, *, device: Any = None
    ) -> PrefixTree:
        """Make the tree of rollouts, of one prompt or several.

        rollouts        the ids of each rollout, prompt and completion: lists, or integer tensors
                        [length].
        prompt_lengths  the number of tokens of each prompt, at least 1. All further tokens are
                        targets.
        device          where the tensors are made. None: the CPU.

        Raises ValueError for a rollout that is shorter than its prompt, and unless there is one
        prompt length for each rollout.
        """
        token_lists = [x.tolist() if isinstance(x, Tensor) else [*x] for x in rollouts]
        lengths = [int(x) for x in prompt_lengths]
        if len(lengths) != len(token_lists):
            raise ValueError(
                f"prompt_lengths has {len(lengths)} numbers, but rollouts are {len(token_lists)}:"
                " pass one for each."
            )
        for i, (tokens, length) in enumerate(zip(token_lists, lengths, strict=True)):
            if not 1 <= length <= len(tokens):
                raise ValueError(
                    f"prompt_lengths[{i}]={length}, but rollout {i} has {len(tokens)} tokens: its"
                    " prompt is one of them at least."
                )

        tree = merge_prefixes(token_lists)
        targets: list[int] = []
        rows: list[int] = []
        cu_seqlens = [0]
        for tokens, rows_of_tokens, prompt_length in zip(
            token_lists, tree.rows_of_rollouts, lengths, strict=True
        ):
            targets += tokens[prompt_length:]
            # The row of a token predicts the next token, so the prompt's last row is the first.
            rows += rows_of_tokens[prompt_length - 1 : -1]
            cu_seqlens.append(len(targets))

        def to_tensor(numbers: list[int]) -> Tensor:
            """Return the numbers as int64 [len(numbers)]."""
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        return cls(
            ids=to_tensor(tree.ids),
            positions=to_tensor(tree.positions),
            ends=to_tensor(tree.ends),
            targets=to_tensor(targets),
            rows=to_tensor(rows),
            cu_seqlens=to_tensor(cu_seqlens),
        )

    @property
    def attention(self) -> Tensor:
        """The attention mask, bool [N, N]: whether row i attends to row j.

        It does if row j is row i, or a token before it in the same rollout: j <= i < ends[j]. For
        long trees, make a block mask from `ends` instead, for example for FlexAttention.
        """
        rows = torch.arange(len(self.ids), device=self.ids.device)
        queries = rows[:, None]
        keys = rows[None, :]
        return (keys <= queries) & (queries < self.ends)


class TreeRows(NamedTuple):
    """The rows of a tree, depth first.

    ids                the token of each row
    positions          the number of tokens before each row in its rollouts
    ends               the row after the last row of each subtree, see `PrefixTree`
    rows_of_rollouts   for each rollout, the row of each of its tokens
    """

    ids: list[int]
    positions: list[int]
    ends: list[int]
    rows_of_rollouts: list[list[int]]


def merge_prefixes(token_lists: list[list[int]]) -> TreeRows:
    """Return a tree of rollouts, in which tokens after the same prefix share a row.

    The rollouts [1, 2, 3] and [1, 2, 4] have four rows, with the ids 1, 2, 3, 4.

    token_lists   the token ids of each rollout
    """
    ids: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    rows_of_rollouts: list[list[int]] = [[] for _ in token_lists]
    # In sorted order, the longest prefix that a rollout shares with any earlier one is the one
    # that it shares with its predecessor.
    previous_tokens: list[int] = []
    previous_rows: list[int] = []
    for i in sorted(range(len(token_lists)), key=token_lists.__getitem__):
        tokens = token_lists[i]
        # commonprefix compares lists element by element.
        num_shared = len(commonprefix([previous_tokens, tokens]))  # noqa: RUF071
        # No later rollout has the predecessor's other rows as a prefix, so their subtrees end here.
        for row in previous_rows[num_shared:]:
            ends[row] = len(ids)
        num_new = len(tokens) - num_shared
        new_rows = range(len(ids), len(ids) + num_new)
        ids += tokens[num_shared:]
        positions += range(num_shared, len(tokens))
        ends += [0] * num_new  # set when a later rollout leaves this branch
        previous_tokens = tokens
        previous_rows = [*previous_rows[:num_shared], *new_rows]
        rows_of_rollouts[i] = previous_rows
    for row in previous_rows:
        ends[row] = len(ids)
    return TreeRows(ids=ids, positions=positions, ends=ends, rows_of_rollouts=rows_of_rollouts)


def unpacked(batch: TokenBatch) -> tuple[Tensor, TokenBatch]:
    """Return (index, plain): the row of each token, and the batch without `rows`.

    Several tokens of the batch may have the same row. hidden[index] has one row for each token.

    index   int64, the shape of targets: the row of each token, 0 where masked
    plain   the same batch, in which row i predicts token i

        index, plain = unpacked(batch)
        linear_grpo_loss(hidden[index], weight, plain, objective)  # hidden: [N, H]

    Raises ValueError for a batch without rows.
    """
    if batch.rows is None:
        raise ValueError("batch has no rows: each of its tokens has a row already.")
    index = batch.rows.long()
    if batch.mask is not None:
        index = torch.where(batch.mask, index, 0)
    return index, replace(batch, rows=None, mask=batch._mask_before_missing)


def shared_row_logprobs(
    source: RowSource,
    targets: Tensor,
    rows: Tensor,
    *,
    mask: Tensor | None = None,
    names: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Return the log-prob of each target, and statistics of its row. Targets may share a row.

        statistics = shared_row_logprobs(source, tree.targets, tree.rows, names=("entropy",))

    targets   int64 [num_tokens]
    rows      int64 [num_tokens]: the row that predicts each target, any number where mask is False
    mask      bool [num_tokens]: tokens to process. None processes all tokens. The others give 0.
    names     statistics of the row that predicts a token, see `RowSource.statistics`

    The results are "logps" and the named statistics, each [num_tokens]. Each row is processed once,
    and costs a dot product for each of its tokens. The gradient of a statistic such as the entropy
    counts once for each token. Raises ValueError on a CPU if a row does not exist.
    """
    no_extra_ids = TokenSets.whole(len(targets), device=targets.device)
    result = logprobs_with_extra_ids(
        source,
        targets,
        no_extra_ids,
        mask=mask,
        rows=rows,
        names=names,
    )
    return result.statistics
