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
    """Return the column of each token id among the logits of this rank, int64.

    It is -1 for an id that another rank has, or that is outside of the vocabulary.

    token_ids     int64, ids of the whole vocabulary
    shard         this rank's part of the vocabulary, the ids from shard.start on; None: all ids
    num_columns   number of columns of the logits on this rank
    """
    columns = token_ids
    if shard is not None:
        columns = token_ids - shard.start
        # Columns beyond shard.vocab are padding of the head.
        num_columns = min(num_columns, shard.vocab - shard.start)
    is_local = (columns >= 0) & (columns < num_columns)
    return torch.where(is_local, columns, -1)


def sum_over_ranks(logits: Tensor, shard: VocabShard | None) -> Tensor:
    """Return the logits of pairs on all ranks of a sharded vocabulary, summed in place.

    One rank has the id of a pair, and its logit. The other ranks pass 0, so the sum is the logit.

    logits   fp32 [num_pairs]
    shard    this rank's part of the vocabulary; None: there is one rank, and nothing to do
    """
    if shard is None:
        return logits
    return shard.sum_over_ranks(logits)


class GivenPairLogits(torch.autograd.Function):
    """Select the logit in row row_ids[i] and column columns[i] for each pair i, fp32 [num_pairs].

    logits             [A, T, V], A groups of T rows
    row_ids, columns   int64 [num_pairs]: rows are numbered from 0 to A * T - 1. A pair of the
                       column -1 has the logit 0. Other pairs are distinct.
    shard              this rank's part of the vocabulary, or None
    """

    @staticmethod
    def forward(
        logits: Tensor, row_ids: Tensor, columns: Tensor, shard: VocabShard | None
    ) -> Tensor:
        """Return the logit of each (row, column) pair, fp32 [num_pairs].

        With a shard, one rank has the logit of a pair. The others have 0, and the result is the sum
        over the ranks.

        logits             [A, T, V], the columns of this rank: row t of group a has the number
                           a * T + t
        row_ids, columns   int64 [num_pairs]. The column -1 gives 0.
        shard              this rank's part of the vocabulary; None: the whole vocabulary
        """
        if logits.shape[2] == 0:  # a rank without a part of the vocabulary
            selected = torch.zeros(row_ids.shape, device=logits.device)
        else:
            selected = select_pairs(logits, row_ids, columns)
        return sum_over_ranks(selected.masked_fill_(columns < 0, 0.0), shard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the pairs, and shape and dtype of the logits, which the gradient has as well."""
        logits, row_ids, columns, _ = inputs
        ctx.shape = logits.shape
        ctx.dtype = logits.dtype
        ctx.save_for_backward(row_ids, columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return d loss / d logits [A, T, V], and None for the other inputs of `forward`.

        The gradient of an element is `grad` of the pair that selected it, and 0 if there is none.

        grad   d loss / d logit of each pair, [num_pairs]
        """
        row_ids, columns = ctx.saved_tensors

        def compute_gradient(upstream: Sequence[Tensor]) -> Tensor:
            """Return d loss / d logits [A, T, V].

            upstream   [grad]: d loss / d logit of each pair, [num_pairs]
            """
            (grad,) = upstream
            grad_logits = zeros(ctx.shape, ctx.dtype, grad.device)
            if grad_logits.numel() > 0:
                add_pairs(grad_logits, row_ids, columns, grad)
            return grad_logits

        return without_second_derivative(compute_gradient, [grad]), None, None, None


def add_pairs(out: Tensor, row_ids: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add values[i] to out[row_ids[i], columns[i]] for each pair i. The host waits for no GPU.

    out                [A, T, V] contiguous, A groups of T rows, with V > 0
    row_ids, columns   int64 [num_pairs]: rows are numbered from 0 to A * T - 1. The column -1 marks
                       an unused pair. Other pairs are distinct.
    values             float [num_pairs]
    """
    # Only the device knows which pairs are unused. They add 0 to the first element of their row.
    values = values.masked_fill(columns < 0, 0.0).to(out.dtype)
    elements = row_ids * out.shape[2] + columns.clamp(min=0)
    out.view(-1).index_add_(0, elements, values)


def select_pairs(logits: Tensor, row_ids: Tensor, columns: Tensor) -> Tensor:
    """Return the logit of each pair, fp32 [num_pairs]. A pair of the column -1 gets any number.

    logits    [A, T, V], with V > 0: row t of group a has the number a * T + t
    row_ids   int64 [num_pairs]
    columns   int64 [num_pairs]
    """
    view, index = index_pairs(logits, row_ids, columns)
    return view[index].float()


def index_pairs(x: Tensor, row_ids: Tensor, columns: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a view of x, and the index of each (row, column) pair into this view.

    view[index] are then the elements of the pairs, [num_pairs].

    x         [A, T, V], any strides: row t of group a has the number a * T + t
    row_ids   int64 [num_pairs]
    columns   int64 [num_pairs]
    """
    num_groups, rows_per_group, _ = x.shape
    if num_groups == 1 or x.stride(0) == rows_per_group * x.stride(1):
        return x.flatten(0, 1), (row_ids, columns)  # all groups as one, without a copy
    return x, (row_ids // rows_per_group, row_ids % rows_per_group, columns)


class ProjectedPairLogits(torch.autograd.Function):
    """Compute hidden[row] . weight[column] + bias[column] for each pair, fp32 [num_pairs].

    hidden, weight, bias   [num_rows, H], [V, H], [V] or None
    pairs                  sorted by row, with columns of this rank as ids. A pair of the column -1
                           has the logit 0.
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
        """Return hidden[row] . weight[column] + bias[column] of each pair, fp32 [num_pairs].

        With a shard, one rank has the column of a pair. The others have 0, and the result is the
        sum over the ranks.

        hidden          [num_rows, H]
        weight, bias    [V, H], and [V] or None: the columns of this rank
        pairs           (row, column) pairs, sorted by row. The column -1 gives 0.
        kernels         compute the dot products
        shard           this rank's part of the vocabulary; None: the whole vocabulary
        weight_memory   for the backward: memory of the caller for the gradient of the weight
        """
        if len(weight) == 0:  # a rank without a part of the vocabulary
            return sum_over_ranks(torch.zeros(pairs.ids.shape, device=hidden.device), shard)
        logits = kernels.pair_logits(hidden.detach(), weight.detach(), pairs)
        if bias is not None:
            logits = logits + bias.detach().float()[pairs.ids.clamp(min=0)]
        return sum_over_ranks(logits.masked_fill(pairs.ids < 0, 0.0), shard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs of `forward`, which the backward reads again."""
        hidden, weight, bias, pairs, kernels, shard, weight_memory = inputs
        ctx.pairs = pairs
        ctx.kernels = kernels
        ctx.shard = shard
        ctx.weight_memory = weight_memory
        ctx.save_for_backward(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias, and None for the other inputs.

        A gradient that is not needed is None.

        grad   d loss / d logit of each pair, [num_pairs]
        """
        hidden_wanted, weight_wanted, bias_wanted, *_ = ctx.needs_input_grad

        def compute_gradients(
            upstream: Sequence[Tensor], saved: Sequence[Any], fields_of_pairs: Sequence[Tensor]
        ) -> tuple[Tensor | None, ...]:
            """Return the gradients of hidden, weight and bias.

            upstream          [grad]
            saved             [hidden, weight, bias]
            fields_of_pairs   the tensors of `Pairs`, in the order of its fields
            """
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
    """Return the gradients of hidden states [num_rows, H], weight [V, H] and bias [V], in order.

    Each pair (row, id) adds to them:

        grad_hidden[row] += grad * weight[id]
        grad_weight[id]  += grad * hidden[row]
        grad_bias[id]    += grad

    in fp32, and the sum of an id is rounded once to the dtype of the weight or bias. A gradient
    that is not wanted is None. With `weight_memory`, the gradient of the weight is added to this
    memory, and what autograd needs instead of a gradient is returned (`WeightGradMemory.add`).

    grad            [num_pairs]: d loss / d logit of each pair
    pairs           sorted by row, with columns of this rank as ids
    kernels         compute the sums over pairs
    weight_memory   memory of the caller that the gradient of the weight is added to, or None
    """
    pair_grads = grad.float().contiguous()
    device = hidden.device
    has_columns = len(weight) > 0  # else this rank has no part of the vocabulary
    grad_hidden = grad_weight = grad_bias = None
    if hidden_wanted:
        fp32_grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=device)
        if has_columns:
            kernels.write_grad_hidden_of_pairs(pair_grads, pairs, weight.detach(), fp32_grad_hidden)
        grad_hidden = converted(fp32_grad_hidden, hidden.dtype)
    if weight_wanted:
        if weight_memory is None:
            total = zeros(weight.shape, weight.dtype, device, pairs.ids.numel())
        else:
            total = weight_memory.total
        if has_columns:
            kernels.add_grad_weight_of_pairs(pair_grads, pairs, hidden.detach(), total)
        grad_weight = total if weight_memory is None else weight_memory.add(total)
    if bias_wanted:
        assert bias is not None
        # A bias is a weight of one column whose hidden state is 1.
        fp32_grad_bias = torch.zeros(len(weight), 1, device=device)
        if has_columns:
            ones = torch.ones(len(hidden), 1, device=device)
            kernels.add_grad_weight_of_pairs(pair_grads, pairs, ones, fp32_grad_bias)
        grad_bias = converted(fp32_grad_bias[:, 0], bias.dtype)
    return grad_hidden, grad_weight, grad_bias
