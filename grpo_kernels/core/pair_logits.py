"""Single logits of (row, token id) pairs, differentiable in logits or in hidden states and head.

With a sharded vocabulary each rank has the logits of its own ids. The forward sums them over the
ranks; in the backward each rank takes the gradient of its own ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import WeightGradMemory, check_weight_is_present, without_second_derivative
from .backends import Backend
from .memory import converted, zeros
from .pairs import Pairs
from .vocab_parallel import VocabShard


def local_ids(token_ids: Tensor, shard: VocabShard | None, num_columns: int) -> Tensor:
    """Return the column of each token id on this rank, int64.

    It is -1 for an id that another rank has, or that is outside of the vocabulary.

    shard         this rank's part of the vocabulary; None: all of it
    num_columns   number of columns of the logits on this rank
    """
    start = 0
    stop = num_columns
    if shard is not None:
        start = shard.start
        stop = min(shard.start + num_columns, shard.vocab)
    is_local = (token_ids >= start) & (token_ids < stop)
    return torch.where(is_local, token_ids - start, -1)


def sum_over_ranks(logits: Tensor, shard: VocabShard | None) -> Tensor:
    """Return the sum of logits over the ranks of a shard, in place; the logits without a shard.

    A rank that does not have the id of a logit holds 0.
    """
    return logits if shard is None else shard.sum_over_ranks(logits)


class GivenPairLogits(torch.autograd.Function):
    """The logit in row row_ids[i] and column columns[i] of each pair i, fp32 [num_pairs].

    It is 0 for a column of -1.

    logits             [A, T, V], A groups of T rows
    row_ids, columns   int64 [num_pairs]; rows are numbered from 0 to A * T - 1
    shard              this rank's part of the vocabulary, or None
    """

    @staticmethod
    def forward(
        logits: Tensor, row_ids: Tensor, columns: Tensor, shard: VocabShard | None
    ) -> Tensor:
        """Return the logit of each pair, summed over the ranks of a shard."""
        if logits.shape[2] == 0:  # a rank without a part of the vocabulary
            selected = torch.zeros(row_ids.shape, device=logits.device)
        else:
            selected = logits[pair_index(logits, row_ids, columns)].float()
        return sum_over_ranks(torch.where(columns >= 0, selected, 0.0), shard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the pairs, and shape and dtype of the logits."""
        logits, row_ids, columns, _ = inputs
        ctx.shape = logits.shape
        ctx.dtype = logits.dtype
        ctx.save_for_backward(row_ids, columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return d loss / d logits from grad = d loss / d logit of each pair, [num_pairs]."""
        row_ids, columns = ctx.saved_tensors

        def compute_gradient(upstream: Sequence[Tensor]) -> Tensor:
            """Return d loss / d logits [A, T, V]: the sum of grad over each element's pairs."""
            (grad,) = upstream
            grad_logits = zeros(ctx.shape, ctx.dtype, grad.device)
            if grad_logits.numel() == 0 or row_ids.numel() == 0:
                return grad_logits
            # Equal pairs are summed first, in fp64 and in a fixed order, and rounded once. The key
            # of a pair is its element of grad_logits, so equal pairs are neighbours when sorted.
            keys = torch.where(columns >= 0, row_ids * ctx.shape[2] + columns, -1)
            sorted_keys, order = keys.sort(stable=True)
            group_of_pair = (sorted_keys.diff(prepend=sorted_keys[:1]) != 0).cumsum(0)
            group_ids = torch.arange(keys.numel() + 1, device=keys.device)
            group_offsets = torch.searchsorted(group_of_pair, group_ids)
            sums = torch.segment_reduce(
                grad[order].double(), "sum", offsets=group_offsets, initial=0, unsafe=True
            )
            # Each pair writes the sum of its group: equal pairs write the same number.
            values = torch.where(sorted_keys >= 0, sums[group_of_pair], 0.0)
            is_used = sorted_keys >= 0
            # Unused pairs, whose number only the device knows, must write somewhere: the last pair
            # in use is written again, or 0 to the first element if none is.
            used_keys = torch.where(is_used, sorted_keys, sorted_keys[-1:]).clamp(min=0)
            used_values = torch.where(is_used, values, values[-1:])
            flat = grad_logits.view(-1)
            flat[used_keys] = used_values.to(ctx.dtype)
            return grad_logits

        return without_second_derivative(compute_gradient, [grad]), None, None, None


def pair_index(logits: Tensor, row_ids: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the index of each pair into logits [A, T, V]: (groups, rows of a group, columns).

    A pair of the column -1 gets column 0, for the caller to mask.
    """
    rows_per_group = logits.shape[1]
    return row_ids // rows_per_group, row_ids % rows_per_group, columns.clamp(min=0)


class ProjectedPairLogits(torch.autograd.Function):
    """hidden[row] . weight[column] + bias[column] of each pair, fp32 [num_pairs].

    It is 0 for a column of -1.

    hidden, weight, bias   [num_rows, H], [V, H], [V] or None
    pairs                  in the order of rows, with columns of this rank as ids
    kernels                compute the dot products and their gradients
    shard                  this rank's part of the vocabulary, or None
    weight_memory          memory of the caller that the gradient of the weight is added to, or None
    """

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pairs: Pairs,
        kernels: Backend,
        shard: VocabShard | None,
        weight_memory: WeightGradMemory | None,
    ) -> Tensor:
        """Return the logit of each pair, summed over the ranks of a shard."""
        if len(weight) == 0:  # a rank without a part of the vocabulary
            return sum_over_ranks(torch.zeros(pairs.ids.shape, device=hidden.device), shard)
        logits = kernels.pair_logits(hidden.detach(), weight.detach(), pairs)
        if bias is not None:
            logits = logits + bias.detach().float()[pairs.ids.clamp(min=0)]
        return sum_over_ranks(torch.where(pairs.ids >= 0, logits, 0.0), shard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save hidden states, head and pairs."""
        hidden, weight, bias, pairs, kernels, shard, weight_memory = inputs
        ctx.pairs = pairs
        ctx.kernels = kernels
        ctx.shard = shard
        ctx.weight_memory = weight_memory
        ctx.save_for_backward(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias.

        grad   d loss / d logit of each pair, [num_pairs]
        """
        hidden_wanted, weight_wanted, bias_wanted, *_ = ctx.needs_input_grad

        def compute_gradients(
            upstream: Sequence[Tensor], saved: Sequence[Any], fields_of_pairs: Sequence[Tensor]
        ) -> tuple[Tensor | None, ...]:
            """Return the gradients of hidden, weight and bias."""
            (grad,) = upstream
            hidden, weight, bias = saved
            check_weight_is_present(weight, ctx.shard)
            return pair_gradients(
                grad,
                hidden,
                weight,
                bias,
                Pairs(*fields_of_pairs),
                ctx.kernels,
                ctx.weight_memory,
                hidden_wanted=hidden_wanted,
                weight_wanted=weight_wanted,
                bias_wanted=bias_wanted,
            )

        gradients = without_second_derivative(
            compute_gradients, [grad], ctx.saved_tensors, ctx.pairs
        )
        return *gradients, None, None, None, None


def pair_gradients(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: Pairs,
    kernels: Backend,
    weight_memory: WeightGradMemory | None,
    *,
    hidden_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states [num_rows, H], weight [V, H] and bias [V].

    Each pair (row, id) adds to them:

        grad_hidden[row] += grad * weight[id]
        grad_weight[id]  += grad * hidden[row]
        grad_bias[id]    += grad

    in fp32, and the sum of an id is rounded once to the dtype of the weight or bias. A gradient
    that is not wanted is None.

    grad            [num_pairs]: d loss / d logit of each pair
    pairs           in the order of rows, with columns of this rank as ids
    weight_memory   memory of the caller that the gradient of the weight is added to, or None
    """
    grad = grad.float().contiguous()
    device = hidden.device
    has_columns = len(weight) > 0
    grad_hidden = grad_weight = grad_bias = None
    if hidden_wanted:
        fp32_grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=device)
        if has_columns:
            kernels.write_grad_hidden_of_pairs(grad, pairs, weight.detach(), fp32_grad_hidden)
        grad_hidden = converted(fp32_grad_hidden, hidden.dtype)
    if weight_wanted:
        if weight_memory is None:
            total = zeros(weight.shape, weight.dtype, device, pairs.ids.numel())
        else:
            total = weight_memory.total
        if has_columns:
            kernels.add_grad_weight_of_pairs(grad, pairs, hidden.detach(), total)
        grad_weight = total if weight_memory is None else weight_memory.add(total)
    if bias_wanted:
        assert bias is not None
        # A bias is a weight of one column whose hidden state is 1.
        fp32_grad_bias = torch.zeros(len(weight), 1, device=device)
        if has_columns:
            ones = torch.ones(len(hidden), 1, device=device)
            kernels.add_grad_weight_of_pairs(grad, pairs, ones, fp32_grad_bias)
        grad_bias = converted(fp32_grad_bias[:, 0], bias.dtype)
    return grad_hidden, grad_weight, grad_bias
