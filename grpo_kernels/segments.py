"""Sums and maxima over segments: groups of values, such as the candidates of each token.

Sums are float64 and run in a fixed order, without atomics, in the forward and in the backward. No
function makes the host wait for a GPU. All functions are differentiable with respect to values, by
autograd and under torch.func, unless their docstring says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Which segment each of some values belongs to. Values of one segment may be at any positions.

    segment_ids   int64 [num_values], the segment of each value, in [0, num_segments)
    order         int64 [num_values], the positions of the values sorted by segment, in ascending
                  order within a segment
    offsets       int64 [num_segments + 1]: the values of segment i are at the positions
                  order[offsets[i] : offsets[i + 1]]
    """

    segment_ids: Tensor
    order: Tensor
    offsets: Tensor

    @classmethod
    def from_ids(cls, segment_ids: Tensor, num_segments: int) -> Segments:
        """Make segments from the segment id of each value.

        segment_ids    int64 [num_values], in [0, num_segments)
        num_segments   number of segments, some of which may be empty
        """
        sorted_ids, order = segment_ids.sort(stable=True)
        bounds = torch.arange(num_segments + 1, device=segment_ids.device)
        offsets = torch.searchsorted(sorted_ids, bounds)
        return cls(segment_ids=segment_ids, order=order, offsets=offsets)

    @classmethod
    def from_offsets(cls, offsets: Tensor, num_values: int) -> Segments:
        """Make segments of values that are sorted by segment.

        offsets      int64 [num_segments + 1]: segment i has the values offsets[i] : offsets[i + 1]
        num_values   number of values, equal to the last offset
        """
        segment_ids = torch.repeat_interleave(offsets.diff(), output_size=num_values)
        order = torch.arange(num_values, device=offsets.device)
        return cls(segment_ids=segment_ids, order=order, offsets=offsets)

    @property
    def num_values(self) -> int:
        """The number of values in all segments."""
        return self.segment_ids.numel()

    @property
    def num_segments(self) -> int:
        """The number of segments, empty ones included."""
        return self.offsets.numel() - 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values of each segment, float64 [num_segments].

        values   float [num_values]
        """
        return _SegmentSum.apply(values.double(), self.segment_ids, self.order, self.offsets)

    def spread(self, segment_values: Tensor) -> Tensor:
        """Return segment_values[segment_ids]: for each value, that of its segment, [num_values].

        The gradient of a segment's value is the sum over its values, in a fixed order.

        segment_values   float [num_segments]
        """
        return _Spread.apply(segment_values, self.segment_ids, self.order, self.offsets)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of each segment, [num_segments]. It is not differentiable.

        The result is -inf for an empty segment, and NaN if a value of the segment is NaN.

        values   float [num_values]
        """
        sorted_values = values.detach()[self.order]
        return torch.segment_reduce(
            sorted_values,
            "max",
            offsets=self.offsets,
            initial=-torch.inf,
            unsafe=True,
        )

    def first(self, is_chosen: Tensor) -> Tensor:
        """Return the position of the first chosen value of each segment, int64 [num_segments].

        If no value of a segment is chosen, the position is num_values.

        is_chosen   bool [num_values]
        """
        indices = torch.arange(self.num_values, device=is_chosen.device)
        return self.lowest(indices, is_chosen, otherwise=self.num_values)

    def lowest(self, numbers: Tensor, is_chosen: Tensor, otherwise: int) -> Tensor:
        """Return the smallest chosen number of each segment, int64 [num_segments].

        numbers     int64 [num_values], a number of each value
        is_chosen   bool [num_values]
        otherwise   the result for a segment without a chosen number. It must be larger than all
                    numbers.
        """
        candidates = torch.where(is_chosen, numbers, otherwise)
        lowest = torch.full_like(self.offsets[:-1], otherwise)
        return lowest.scatter_reduce(0, self.segment_ids, candidates, "amin")


# ---- differences from the largest value of a segment


def find_largest(values: Tensor, is_used: Tensor, segments: Segments) -> Tensor:
    """Return the position of the largest used value of each segment, int64 [num_segments].

    If several values are the largest, it is the position of the first. If no value of the segment
    is used, or if a used value is NaN, it is num_values. Not differentiable.

    values    float [num_values]
    is_used   bool [num_values], the values that count
    """
    used_values = torch.where(is_used, values.detach(), -torch.inf)
    largest_values = segments.max(used_values)[segments.segment_ids]
    # NaN equals nothing, so no position is chosen in a segment with NaN.
    return segments.first(is_used & (used_values == largest_values))


def subtract_largest(
    values: Tensor,
    is_used: Tensor,
    segments: Segments,
    largest: Tensor,
    equals_largest: Tensor,
) -> Tensor:
    """Return each value minus the largest value of its segment, float64 [num_values].

    The result is values - values[largest[segment_ids]], and -inf for values that are not used. The
    difference of two fp32 numbers is nearly exact in float64.

    The gradient has no cancellation either: each value other than the largest gets its upstream
    gradient g_i, and the largest value gets minus the sum of these g_i. (Plain autograd would add
    the upstream gradient of the largest value, subtract it again, and leave a rounding error of
    that size.)

    values           fp32 [num_values]
    is_used          bool [num_values]: values that count. The others get no gradient.
    largest          int64 [num_segments], the position of the largest value of each segment, from
                     `find_largest`
    equals_largest   bool [num_values]: the largest value itself, and values that are always equal
                     to it, such as a repetition of the same logit. Their difference is the constant
                     0, so they get no gradient of their own.
    """
    return _SubtractLargest.apply(
        values.double(),
        is_used,
        is_used & ~equals_largest,
        largest,
        segments.segment_ids,
        segments.order,
        segments.offsets,
    )


class _SubtractLargest(torch.autograd.Function):
    """`subtract_largest` as an autograd function, see there for values, is_used and largest.

    differs                       bool [num_values]: used values that are not always equal to the
                                  largest
    segment_ids, order, offsets   the fields of `Segments`
    """

    @staticmethod
    def forward(
        values: Tensor,
        is_used: Tensor,
        differs: Tensor,
        largest: Tensor,
        segment_ids: Tensor,
        order: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """Return the differences, float64 [num_values], -inf for values that are not used."""
        # The position of a segment without a largest value is num_values. It reads a 0.
        padded_values = torch.cat([values.detach(), values.new_zeros(1)])
        largest_values = padded_values[largest][segment_ids]
        is_finite = is_used & (values != -torch.inf)  # -inf - (-inf) would be NaN
        return torch.where(is_finite, values - largest_values, -torch.inf)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save the tensors that the backward needs."""
        _, _, differs, largest, segment_ids, order, offsets = inputs
        ctx.save_for_backward(differs, largest, segment_ids, order, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the values.

        The gradient of the largest value of a segment is minus the sum of the upstream gradients of
        the values that differ from it. Each of these values has its upstream gradient.
        """
        differs, largest, segment_ids, order, offsets = ctx.saved_tensors
        grad_values = torch.where(differs, grad, 0.0)
        sums = sum_segments(grad_values, order, offsets)
        positions = torch.arange(len(grad_values), device=grad_values.device)
        is_largest = positions == largest[segment_ids]
        grad_values = torch.where(is_largest, -sums[segment_ids], grad_values)
        return grad_values, None, None, None, None, None, None


# ---- rows without a finite value


def replace_values(values: Tensor, is_replaced: Tensor, replacements: Tensor) -> Tensor:
    """Return torch.where(is_replaced, replacements, values), with another gradient.

    Where a value is replaced, the gradient of `values` is NaN if the upstream gradient is nonzero,
    otherwise 0. `replacements` get no gradient.

    Use this for rows that are not finite: replace their logits by finite numbers, and their results
    by NaN. Then a row has the gradient NaN if the loss depends on it, and otherwise 0, where a
    backward through the infinite logits would give NaN.

    values, replacements   float tensors of one shape
    is_replaced            bool of this shape
    """
    return _ReplaceValues.apply(values, is_replaced, replacements)


class _ReplaceValues(torch.autograd.Function):
    """`replace_values` as an autograd function."""

    @staticmethod
    def forward(values: Tensor, is_replaced: Tensor, replacements: Tensor) -> Tensor:
        """Return the values, or the replacements where is_replaced."""
        return torch.where(is_replaced, replacements, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save which values are replaced."""
        _, is_replaced, _ = inputs
        ctx.save_for_backward(is_replaced)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the values: NaN where a gradient arrives at a replaced value."""
        (is_replaced,) = ctx.saved_tensors
        return torch.where(is_replaced & (grad != 0), torch.nan, grad), None, None


# ---- gradients


def add_gradient_of(values: Tensor, other: Tensor) -> Tensor:
    """Return a copy of `values`, and pass the upstream gradient on to `other` too.

    The gradient of both is the upstream gradient, as for values + other, but the result does not
    contain `other`.

    values, other   float tensors of one shape, possibly of two dtypes
    """
    return _AddGradientOf.apply(values, other)


class _AddGradientOf(torch.autograd.Function):
    """`add_gradient_of` as an autograd function."""

    @staticmethod
    def forward(values: Tensor, other: Tensor) -> Tensor:
        """Return a copy of the values."""
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save the dtype in which `other` needs its gradient."""
        _, other = inputs
        ctx.other_dtype = other.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the upstream gradient for both inputs."""
        return grad, grad.to(ctx.other_dtype)


# ---- sums


def sum_segments(values: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of the values of each segment, [num_segments] in the dtype of the values.

    values           float [num_values]
    order, offsets   see `Segments`
    """
    return torch.segment_reduce(values[order], "sum", offsets=offsets, initial=0.0, unsafe=True)


class _SegmentSum(torch.autograd.Function):
    """`Segments.sum` as an autograd function.

    values                        float64 [num_values]
    segment_ids, order, offsets   the fields of `Segments`
    """

    @staticmethod
    def forward(values: Tensor, segment_ids: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        """Return the sum of the values of each segment."""
        return sum_segments(values, order, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save the segment of each value."""
        _, segment_ids, _, _ = inputs
        ctx.save_for_backward(segment_ids)

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each value, which is the gradient of its segment's sum."""
        (segment_ids,) = ctx.saved_tensors
        return grad_sums[segment_ids], None, None, None


class _Spread(torch.autograd.Function):
    """`Segments.spread` as an autograd function, whose backward sums in a fixed order.

    segment_values                float [num_segments]
    segment_ids, order, offsets   the fields of `Segments`
    """

    @staticmethod
    def forward(
        segment_values: Tensor, segment_ids: Tensor, order: Tensor, offsets: Tensor
    ) -> Tensor:
        """Return the segment's value for each value of the segment, [num_values]."""
        return segment_values[segment_ids]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save how the values are grouped."""
        _, _, order, offsets = inputs
        ctx.save_for_backward(order, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each segment's value: a sum over the values of the segment."""
        order, offsets = ctx.saved_tensors
        return sum_segments(grad.double(), order, offsets).to(grad.dtype), None, None, None
