"""Rollouts that share prefixes as a tree: a model runs over each prefix once, and a loss over the
tokens of all rollouts.

A row of logits then predicts the tokens of several rollouts: `shared_row_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from os.path import commonprefix
from typing import Any

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

    ids          int64 [N]: the token of each row, depth first: the rows of a prefix stand before
                 those that go on from it.
    positions    int64 [N]: how many tokens a row has before it, for position_ids.
    ends         int64 [N]: where the rows end that go on from this one: row i attends to row j if j
                 <= i < ends[j].
    targets      int64 [M]: the tokens of the completions, one rollout after the other.
    rows         int64 [M]: the row that predicts each of them.
    cu_seqlens   int64 [B + 1]: where each rollout begins among these, as in a TokenBatch.
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
        """The tree of rollouts, of one prompt or several.

        rollouts        a sequence of ids for each, prompt and completion: lists, or integer tensors
                        [length].
        prompt_lengths  how many of these are the prompt, at least 1: what follows are targets.
        device          where the tensors are made; None = the CPU.

        Raises ValueError for a rollout that is shorter than its prompt.
        """
        lists = [x.tolist() if isinstance(x, Tensor) else [*x] for x in rollouts]
        lengths = [int(x) for x in prompt_lengths]
        if len(lengths) != len(lists):
            raise ValueError(
                f"prompt_lengths has {len(lengths)} numbers, but rollouts are {len(lists)}: pass"
                " one for each."
            )
        for i, (own, length) in enumerate(zip(lists, lengths, strict=True)):
            if not 1 <= length <= len(own):
                raise ValueError(
                    f"prompt_lengths[{i}]={length}, but rollout {i} has {len(own)} tokens: its"
                    " prompt is one of them at least."
                )
        ids: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        rows_of: dict[int, list[int]] = {}
        before: list[
            int
        ] = []  # the rollout before in sorted order, which has the longest prefix in common with the next
        path: list[int] = []  # and its rows
        for i in sorted(range(len(lists)), key=lists.__getitem__):
            own = lists[i]
            common = len(commonprefix([before, own]))  # noqa: RUF071 (of lists, element by element)
            for row in path[common:]:
                ends[row] = len(ids)
            path = [*path[:common], *range(len(ids), len(ids) + len(own) - common)]
            ids += own[common:]
            positions += range(common, len(own))
            ends += path[common:]  # until the next rollout shows where they end
            before, rows_of[i] = own, path
        for row in path:
            ends[row] = len(ids)
        targets = [own[length:] for own, length in zip(lists, lengths, strict=True)]
        rows = chain.from_iterable(rows_of[i][length - 1 : -1] for i, length in enumerate(lengths))
        parts = (
            ids,
            positions,
            ends,
            [*chain.from_iterable(targets)],
            [*rows],
            [*accumulate(map(len, targets), initial=0)],
        )
        return cls(*(torch.tensor(x, dtype=torch.int64, device=device) for x in parts))

    @property
    def attention(self) -> Tensor:
        """bool [N, N]: which rows each row attends to, itself and its prefix. For long
        trees make a mask of blocks of `ends`, as FlexAttention takes it.
        """
        row = torch.arange(len(self.ids), device=self.ids.device)
        return (row <= row[:, None]) & (row[:, None] < self.ends)


def unpacked(batch: TokenBatch) -> tuple[Tensor, TokenBatch]:
    """Return (index, plain): the batch with a row for each token, and the shared row of each.

    `index` is int64 in the shape of targets, 0 where masked. Use it like this:

        index, plain = unpacked(batch)
        linear_grpo_loss(hidden[index], weight, plain, objective)  # hidden: [N, H]

    Raises ValueError for a batch without rows.
    """
    if batch.rows is None:
        raise ValueError("batch has no rows: each of its tokens has a row already.")
    index = batch.rows.long()
    index = index if batch.mask is None else torch.where(batch.mask, index, 0)
    return index, replace(batch, rows=None, mask=batch.__dict__.get("_given_mask", batch.mask))


def shared_row_logprobs(
    source: RowSource,
    targets: Tensor,
    rows: Tensor,
    *,
    mask: Tensor | None = None,
    names: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Return the log-prob of each target in a row that may have several targets.

        statistics = shared_row_logprobs(source, tree.targets, tree.rows, names=("entropy",))

    targets   int64 [num_tokens]
    rows      int64 [num_tokens]: the row that predicts each target, any number where mask is False
    mask      bool [num_tokens]: tokens to process. None processes all tokens. The others give 0.
    names     statistics of the row that each token gets too, see `RowSource.statistics`

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
