"""Sums and maxima over segments: groups of values, such as the candidates of each token.

Sums are float64 and run in a fixed order, without atomics, in the forward and in the backward. No
function makes the host wait for a GPU. All functions are differentiable with respect to values, by
autograd and under torch.func, unless their docstring says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .core.autograd import apply_function

#: Replaces log-probs of -inf in products with the probability 0. exp of it is 0 in float64.
LOWEST_LOGP = -1e300


@dataclass(frozen=True, eq=False)
class Segments:
    """Which segment each of some values belongs to. The values are sorted by segment.

    segment_ids   int64 [num_values], the segment of each value, ascending, in [0, num_segments)
    offsets       int64 [num_segments + 1]: segment i has the values offsets[i] : offsets[i + 1]
    """

    segment_ids: Tensor
    offsets: Tensor

    @classmethod
    def from_offsets(cls, offsets: Tensor, num_values: int) -> Segments:
        """Make segments from the offsets of their values.

        offsets      int64 [num_segments + 1]: segment i has the values offsets[i] : offsets[i + 1]
        num_values   number of values, equal to the last offset
        """
        # Given counts alone, repeat_interleave returns index i as many times as counts[i] says: the
        # counts [2, 1] give [0, 0, 1]. With output_size the host need not wait for their sum.
        counts = offsets.diff()
        segment_ids = torch.repeat_interleave(counts, output_size=num_values)
        return cls(segment_ids=segment_ids, offsets=offsets)

    @property
    def num_values(self) -> int:
        """The number of values in all segments."""
        return self.segment_ids.numel()

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values of each segment, float64 [num_segments].

        values   float [num_values]
        """
        return apply_function(_SegmentSum, values.double(), self.segment_ids, self.offsets)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of each segment, [num_segments]. It is not differentiable.

        The result is -inf for an empty segment, and NaN if a value of the segment is NaN.

        values   float [num_values]
        """
        # unsafe=True skips a check of the offsets, for which the host would wait for a GPU.
        return torch.segment_reduce(
            values.detach(), "max", offsets=self.offsets, initial=-torch.inf, unsafe=True
        )

    def lowest(self, numbers: Tensor, is_chosen: Tensor) -> Tensor:
        """Return the smallest chosen number of each segment, float64 [num_segments].

        The result is inf for a segment without a chosen number. It is float64, because integers
        have no infinity.

        numbers     integers below 2^53, which float64 represents exactly: [num_values]
        is_chosen   bool [num_values], the numbers that count
        """
        chosen = numbers.double().masked_fill(~is_chosen, torch.inf)
        # unsafe=True skips a check of the offsets, for which the host would wait for a GPU.
        return torch.segment_reduce(
            chosen, "min", offsets=self.offsets, initial=torch.inf, unsafe=True
        )


@dataclass(frozen=True, eq=False)
class SortedIndex:
    """An index into some values, and the order that sorts it.

    `take` returns values[index]. Its backward adds up the gradients of all items that took the same
    value. In sorted order these items are neighbours, so the sum has a fixed order.

    index     int64 [num_items]: the position of a value for each item
    order     int64 [num_items]: the items sorted by their index, items with equal index in
              ascending order
    offsets   int64 [num_values + 1]: value i is taken by the items order[offsets[i] :
              offsets[i + 1]]
    """

    index: Tensor
    order: Tensor
    offsets: Tensor

    @classmethod
    def from_index(cls, index: Tensor, num_values: int) -> SortedIndex:
        """Sort an index.

        index        int64 [num_items], in [0, num_values)
        num_values   number of values, some of which no item may take
        """
        sorted_index, order = index.sort(stable=True)
        bounds = torch.arange(num_values + 1, device=index.device)
        offsets = torch.searchsorted(sorted_index, bounds)  # the first item with an index >= i
        return cls(index=index, order=order, offsets=offsets)

    def take(self, values: Tensor) -> Tensor:
        """Return values[index], [num_items].

        The gradient of a value is the sum over its items, in a fixed order.

        values   float [num_values]
        """
        return apply_function(_Take, values, self.index, self.order, self.offsets)


# ---- the softmax of a segment


class LargestValues(NamedTuple):
    """The largest value of each segment, and the difference of each value from it.

    maxima        [num_segments] in the dtype of the values: -inf for an empty segment, NaN if a
                  value of the segment is NaN
    positions     float64 [num_segments]: the position of the first of the largest values of each
                  segment, inf for a segment whose largest value is not finite
    is_largest    bool [num_values]: whether the value is at one of these positions
    differences   float64 [num_values]: each value minus the largest of its segment. The difference
                  of two fp32 numbers is nearly exact in float64. -inf if all values of the segment
                  are -inf.
    """

    maxima: Tensor
    positions: Tensor
    is_largest: Tensor
    differences: Tensor


def find_largest(values: Tensor, segments: Segments) -> LargestValues:
    """Return the largest value of each segment, and the difference of each value from it.

    If several values of a segment are the largest, the first of them counts. The result is not
    differentiable.

    values     float [num_values]
    segments   which segment each value belongs to
    """
    values = values.detach()
    maxima = segments.max(values)
    finite_maxima = maxima.double().clamp(min=LOWEST_LOGP)  # -inf - (-inf) would be NaN
    differences = values.double() - finite_maxima.index_select(0, segments.segment_ids)
    # float64 has an infinity, and represents all positions exactly.
    positions = torch.arange(segments.num_values, device=values.device, dtype=torch.float64)
    # A value is the largest if its difference is 0. NaN differs from 0, so no position is chosen in
    # a segment with NaN.
    candidates = positions.masked_fill(differences != 0.0, torch.inf)
    # unsafe=True skips a check of the offsets, for which the host would wait for a GPU.
    first = torch.segment_reduce(
        candidates, "min", offsets=segments.offsets, initial=torch.inf, unsafe=True
    )
    return LargestValues(
        maxima=maxima,
        positions=first,
        is_largest=positions == first.index_select(0, segments.segment_ids),
        differences=differences,
    )


def log_softmax(values: Tensor, largest: LargestValues, segments: Segments) -> Tensor:
    """Return the log-softmax of the values over each segment, float64 [num_values].

    With d the difference of a value from the largest of its segment:

        log p = d - log1p(sum of exp(d) over the values other than the largest)

    The term of the largest value itself is exp(0) = 1. So a log-prob near 0 and its gradient,
    1 - p, keep their digits. The gradient of the largest value is minus the sum of the gradients of
    the others, for the same reason.

    values    float [num_values], -inf for values that do not count. The log-prob of these is -inf.
    largest   `find_largest(values, segments)`

    The log-probs are 0 in a segment whose largest value is NaN or inf, so that no NaN arises in a
    backward. The caller replaces them (`replace_values`).
    """
    return apply_function(
        _LogSoftmax,
        values,
        largest.differences,
        largest.is_largest,
        segments.segment_ids,
        segments.offsets,
    )


class _LogSoftmax(torch.autograd.Function):
    """`log_softmax` as an autograd function.

    values                    float [num_values], which get the gradient
    differences, is_largest   the fields of `LargestValues`
    segment_ids, offsets      the fields of `Segments`
    """

    @staticmethod
    def forward(
        values: Tensor,
        differences: Tensor,
        is_largest: Tensor,
        segment_ids: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """Return the log-softmax of the values over each segment, float64 [num_values].

            log p = d - log1p(sum of exp(d) over the values other than the largest)

        with d the difference of a value from the largest of its segment.

        values               float [num_values], not read: autograd gives them the gradient
        differences          float64 [num_values]: d of each value
        is_largest           bool [num_values]: the first of the largest values of each segment
        segment_ids          int64 [num_values]: the segment of each value, ascending
        offsets              int64 [num_segments + 1]: segment i has the values offsets[i] :
                             offsets[i + 1]
        """
        other_exps = differences.exp().masked_fill_(is_largest, 0.0)
        log_sums = torch.log1p(sum_segments(other_exps, offsets))  # the 1 is the largest's exp(0)
        logps = differences - log_sums.index_select(0, segment_ids)
        # NaN becomes 0, and -inf stays, which nan_to_num would otherwise replace.
        return logps.nan_to_num_(nan=0.0, neginf=-torch.inf)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save the output of `forward`, the log-probs, from which the gradient follows."""
        values, _, is_largest, segment_ids, offsets = inputs
        ctx.dtype = values.dtype
        ctx.save_for_backward(output, is_largest, segment_ids, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the values.

            grad_value = grad - p * (sum of grad over the segment)

        The gradients of a segment add up to 0. So the gradient of its largest value is computed as
        minus the sum of the others. For p near 1 the formula would cancel digits.

        grad   float64 [num_values], upstream gradients of the log-probs
        """
        logps, is_largest, segment_ids, offsets = ctx.saved_tensors
        grad_sums = sum_segments(grad, offsets)
        grad_values = grad - logps.exp() * grad_sums.index_select(0, segment_ids)
        grad_of_others = grad_values.masked_fill_(is_largest, 0.0)
        grad_of_largest = -sum_segments(grad_of_others, offsets)
        spread_grads = grad_of_largest.index_select(0, segment_ids)
        grad_values = torch.where(is_largest, spread_grads, grad_of_others)
        return grad_values.to(ctx.dtype), None, None, None, None


class LogSoftmaxWithRest(NamedTuple):
    """The log-softmax over the values of each segment and its rest, float64.

    logps        [num_values], the log-prob of each value
    rest_logps   [num_segments], the log-prob of the rest
    """

    logps: Tensor
    rest_logps: Tensor


def log_softmax_with_rest(
    values: Tensor, log_odds: Tensor, largest: LargestValues, segments: Segments
) -> LogSoftmaxWithRest:
    """Return the log-softmax over the values of each segment and a rest, which is one outcome.

    With d the difference of a value from the largest of its segment:

        log_sum     = log(sum of exp(d) over the values + exp(-log_odds))
        log p       = d - log_sum
        log p(rest) = -log_odds - log_sum

    values     float [num_values], -inf for values that do not count
    log_odds   float64 [num_segments]: the largest value minus the logsumexp of the rest. -inf
               gives the rest the probability 1. Its gradient is meant for the rest only: the
               gradient at the largest value is part of the gradient of `values`.
    largest    `find_largest(values, segments)`

    Sums and gradients keep their digits as in `log_softmax`, and so do segments without a finite
    result, whose log-probs are 0.
    """
    logps, rest_logps = apply_function(
        _LogSoftmaxWithRest,
        values,
        log_odds,
        largest.differences,
        largest.is_largest,
        segments.segment_ids,
        segments.offsets,
    )
    return LogSoftmaxWithRest(logps=logps, rest_logps=rest_logps)


class _LogSoftmaxWithRest(torch.autograd.Function):
    """`log_softmax_with_rest` as an autograd function.

    values, log_odds          float [num_values] and float64 [num_segments], which get gradients
    differences, is_largest   the fields of `LargestValues`
    segment_ids, offsets      the fields of `Segments`
    """

    @staticmethod
    def forward(
        values: Tensor,
        log_odds: Tensor,
        differences: Tensor,
        is_largest: Tensor,
        segment_ids: Tensor,
        offsets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the values, [num_values], and of the rests, [num_segments].

            log_sum     = log(sum of exp(d) over the values + exp(-log_odds))
            log p       = d - log_sum
            log p(rest) = -log_odds - log_sum

        with d the difference of a value from the largest of its segment. The rest of a segment is
        one more outcome. All results are float64.

        values          float [num_values], not read: autograd gives them the gradient
        log_odds        float64 [num_segments]: the largest value minus the logsumexp of the rest
        differences     float64 [num_values]: d of each value
        is_largest      bool [num_values]: the first of the largest values of each segment
        segment_ids     int64 [num_values]: the segment of each value, ascending
        offsets         int64 [num_segments + 1]: segment i has the values offsets[i] :
                        offsets[i + 1]
        """
        other_exps = differences.exp().masked_fill_(is_largest, 0.0)
        # Logarithms of both parts of the sum, relative to exp(largest value), whose own term is 1.
        log_of_values = torch.log1p(sum_segments(other_exps, offsets))
        log_of_rest = -log_odds
        log_sums = torch.logaddexp(log_of_values, log_of_rest)
        logps = differences - log_sums.index_select(0, segment_ids)
        # log_odds of -inf give inf - inf = NaN. The rest has the probability 1 then, so its
        # log-prob is 0, which nan_to_num puts in place of NaN.
        rest_logps = log_of_rest - log_sums
        return (
            logps.nan_to_num_(nan=0.0, neginf=-torch.inf),
            rest_logps.nan_to_num_(nan=0.0, neginf=-torch.inf),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the log-probs, from which the gradients follow."""
        values, _, _, is_largest, segment_ids, offsets = inputs
        ctx.dtype = values.dtype
        ctx.save_for_backward(*output, is_largest, segment_ids, offsets)

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor, grad_rest: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of values and log-odds.

        With `total` the sum of all upstream gradients of a segment:

            grad_value    = grad_logp - p * total
            grad_log_odds = p(rest) * total - grad_rest

        The gradients of a segment and of its rest, which is -grad_log_odds, add up to 0. This gives
        the gradient of the largest value, without the cancellation of the formula for p near 1.

        grad_logps   float64 [num_values], upstream gradients of the log-probs of values
        grad_rest    float64 [num_segments], upstream gradients of the log-probs of rests
        """
        logps, rest_logps, is_largest, segment_ids, offsets = ctx.saved_tensors
        total = sum_segments(grad_logps, offsets) + grad_rest
        grad_log_odds = rest_logps.exp() * total - grad_rest
        grad_values = grad_logps - logps.exp() * total.index_select(0, segment_ids)
        grad_of_others = grad_values.masked_fill_(is_largest, 0.0)
        grad_of_largest = grad_log_odds - sum_segments(grad_of_others, offsets)
        spread_grads = grad_of_largest.index_select(0, segment_ids)
        grad_values = torch.where(is_largest, spread_grads, grad_of_others)
        return grad_values.to(ctx.dtype), grad_log_odds, None, None, None, None


# ---- rows without a finite value


def replace_values(values: Tensor, is_replaced: Tensor, replacements: Tensor | float) -> Tensor:
    """Return torch.where(is_replaced, replacements, values), with another gradient.

    Where a value is replaced, the gradient of `values` is NaN if the upstream gradient is nonzero,
    otherwise 0. torch.where would give 0 in both cases. `replacements` get no gradient.

    Use this for rows that are not finite: replace their logits by finite numbers, and their results
    by NaN. Then a row has the gradient NaN if the loss depends on it, and otherwise 0, where a
    backward through the infinite logits would give NaN.

    values         float tensor
    is_replaced    bool of this shape
    replacements   float tensor of this shape, or a number
    """
    return apply_function(_ReplaceValues, values, is_replaced, replacements)


class _ReplaceValues(torch.autograd.Function):
    """`replace_values` as an autograd function."""

    @staticmethod
    def forward(values: Tensor, is_replaced: Tensor, replacements: Tensor | float) -> Tensor:
        """Return the values, or the replacements where is_replaced."""
        return torch.where(is_replaced, replacements, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save which values are replaced."""
        _, is_replaced, _ = inputs
        ctx.save_for_backward(is_replaced)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the values: `grad`, but NaN or 0 where a value is replaced.

        It is NaN if the upstream gradient of a replaced value is not 0, because the loss then
        depends on a value that is not finite.

        grad   the upstream gradients, in the shape of the values
        """
        (is_replaced,) = ctx.saved_tensors
        has_gradient = is_replaced.logical_and(grad)  # replaced, and the upstream gradient is not 0
        return grad.masked_fill(has_gradient, torch.nan), None, None


# ---- sums


def sum_segments(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of the values of each segment, [num_segments] in the dtype of the values.

    The values of a segment are added in their order, so the sum is deterministic. It is 0 for an
    empty segment.

    values    float [num_values], sorted by segment
    offsets   int64 [num_segments + 1]: segment i has the values offsets[i] : offsets[i + 1]
    """
    # unsafe=True skips a check of the offsets, for which the host would wait for a GPU.
    return torch.segment_reduce(values, "sum", offsets=offsets, initial=0.0, unsafe=True)


class _SegmentSum(torch.autograd.Function):
    """`Segments.sum` as an autograd function.

    values                 float64 [num_values]
    segment_ids, offsets   the fields of `Segments`
    """

    @staticmethod
    def forward(values: Tensor, segment_ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the sum of the values of each segment, float64 [num_segments].

        values        float64 [num_values], sorted by segment
        segment_ids   int64 [num_values]: the segment of each value, for the backward
        offsets       int64 [num_segments + 1]: segment i has the values offsets[i] : offsets[i + 1]
        """
        return sum_segments(values, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save the segment of each value."""
        _, segment_ids, _ = inputs
        ctx.save_for_backward(segment_ids)

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each value, which is the gradient of its segment's sum."""
        (segment_ids,) = ctx.saved_tensors
        return grad_sums.index_select(0, segment_ids), None, None


class _Take(torch.autograd.Function):
    """`SortedIndex.take` as an autograd function, whose backward sums in a fixed order.

    values                  float [num_values]
    index, order, offsets   the fields of `SortedIndex`
    """

    @staticmethod
    def forward(values: Tensor, index: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        """Return values[index], the value of each item, [num_items].

        values           float [num_values]
        index            int64 [num_items]: the position of a value for each item
        order, offsets   for the backward: the items in the order of their values, and the offsets
                         of the items of each value
        """
        return values.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save how the items are sorted."""
        _, _, order, offsets = inputs
        ctx.save_for_backward(order, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each value: the sum of the gradients of the items that take it.

        grad   [num_items], upstream gradients of the items
        """
        order, offsets = ctx.saved_tensors
        # Sorted by the value that they take, the items of a value are neighbours: a segment.
        sorted_grads = grad.index_select(0, order).double()
        grad_values = sum_segments(sorted_grads, offsets).to(grad.dtype)
        return grad_values, None, None, None
