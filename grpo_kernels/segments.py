"""Sums and maxima over segments: groups of values, such as the candidates of each token.

Sums are float64 and run in a fixed order, without atomics, in the forward and in the backward. No
function makes the host wait for a GPU. All functions of values are differentiable, by autograd and
under torch.func, unless their docstring says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Which segment each value belongs to. Values of one segment may be anywhere.

    segment_ids   int64 [num_values]: the segment of each value, in [0, num_segments)
    order         int64 [num_values]: the values sorted by segment, in their order within a segment
    offsets       int64 [num_segments + 1]: segment i is order[offsets[i] : offsets[i + 1]]
    """

    segment_ids: Tensor
    order: Tensor
    offsets: Tensor

    @classmethod
    def from_ids(cls, segment_ids: Tensor, num_segments: int) -> Segments:
        """Group values by their segment ids, int64 [num_values]."""
        sorted_ids, order = segment_ids.sort(stable=True)
        bounds = torch.arange(num_segments + 1, device=segment_ids.device)
        offsets = torch.searchsorted(sorted_ids, bounds)
        return cls(segment_ids=segment_ids, order=order, offsets=offsets)

    @classmethod
    def from_offsets(cls, offsets: Tensor, num_values: int) -> Segments:
        """Group values that are sorted by segment: segment i is offsets[i] : offsets[i + 1]."""
        segment_ids = torch.repeat_interleave(offsets.diff(), output_size=num_values)
        order = torch.arange(num_values, device=offsets.device)
        return cls(segment_ids=segment_ids, order=order, offsets=offsets)

    @property
    def num_values(self) -> int:
        return self.segment_ids.numel()

    @property
    def num_segments(self) -> int:
        return self.offsets.numel() - 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values [num_values] of each segment, float64 [num_segments]."""
        return _SegmentSum.apply(values.double(), self.segment_ids, self.order, self.offsets)

    def spread(self, segment_values: Tensor) -> Tensor:
        """Give each value the number of its segment: segment_values[segment_ids], [num_values]."""
        return _Spread.apply(segment_values, self.segment_ids, self.order, self.offsets)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of each segment, [num_segments].

        It is -inf in an empty segment, and NaN if a value is NaN. Not differentiable.
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
        """Return the index of the first chosen value of each segment, int64 [num_segments].

        is_chosen   bool [num_values]. The index is num_values if no value of a segment is chosen.
        """
        indices = torch.arange(self.num_values, device=is_chosen.device)
        return self.lowest(indices, is_chosen, otherwise=self.num_values)

    def lowest(self, numbers: Tensor, is_chosen: Tensor, otherwise: int) -> Tensor:
        """Return the smallest chosen number of each segment, int64 [num_segments].

        numbers     int64 [num_values]
        is_chosen   bool [num_values]
        otherwise   the result if no number of a segment is chosen, larger than all numbers
        """
        numbers = torch.where(is_chosen, numbers, otherwise)
        lowest = torch.full_like(self.offsets[:-1], otherwise)
        return lowest.scatter_reduce(0, self.segment_ids, numbers, "amin")


def element_or(values: Tensor, index: Tensor, otherwise: float) -> Tensor:
    """Return values[index], and `otherwise` for an index of len(values). Not differentiable."""
    padded = torch.cat([values.detach(), values.new_full((1,), otherwise)])
    return padded[index]


# ---- differences from the largest value of a segment


def find_largest(values: Tensor, is_used: Tensor, segments: Segments) -> Tensor:
    """Return the index of the largest used value of each segment, int64 [num_segments].

    It is the first one if several are equal. It is num_values if no value of the segment is used,
    or if one is NaN. Not differentiable.

    values    float [num_values]
    is_used   bool [num_values]
    """
    values = torch.where(is_used, values.detach(), -torch.inf)
    largest = segments.max(values)[segments.segment_ids]
    return segments.first(is_used & (values == largest))


def subtract_largest(
    values: Tensor,
    is_used: Tensor,
    segments: Segments,
    largest: Tensor,
    equals_largest: Tensor,
) -> Tensor:
    """Subtract the largest value of each segment, float64 [num_values].

    Differences are exact in float64, and so is their gradient: that of the largest value is minus
    the sum over the values that differ from it, from which nothing of size 1 has to cancel.

    values           fp32 [num_values]
    is_used          bool [num_values]. The others give -inf, and get no gradient.
    largest          int64 [num_segments], from `find_largest`
    equals_largest   bool [num_values]: values that equal the largest of their segment under all
                     circumstances, such as repeated pairs, and the largest itself
    """
    return _Differences.apply(
        values.double(),
        is_used,
        is_used & ~equals_largest,
        largest,
        segments.segment_ids,
        segments.order,
        segments.offsets,
    )


class _Differences(torch.autograd.Function):
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
        references = element_or(values, largest, otherwise=0.0)[segment_ids]
        is_finite = is_used & (values != -torch.inf)
        return torch.where(is_finite, values - references, -torch.inf)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        differs, largest, segment_ids, order, offsets = ctx.saved_tensors
        grad_values = torch.where(differs, grad, 0.0)
        sums = sum_segments(grad_values, order, offsets)
        indices = torch.arange(len(grad_values), device=grad_values.device)
        is_largest = indices == largest[segment_ids]
        grad_values = torch.where(is_largest, -sums[segment_ids], grad_values)
        return grad_values, None, None, None, None, None, None


# ---- rows without a finite value


def replace_values(values: Tensor, is_replaced: Tensor, replacements: Tensor) -> Tensor:
    """Return torch.where(is_replaced, replacements, values), with a gradient where replaced.

    Where a gradient arrives at a replaced value, the gradient is NaN; where none arrives, it is 0.
    For rows that are not finite: replace their logits by finite numbers, and later their results by
    NaN. Then no NaN arises in the backward of a row at which no gradient arrives.
    """
    return _ReplaceValues.apply(values, is_replaced, replacements)


class _ReplaceValues(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, is_replaced: Tensor, replacements: Tensor) -> Tensor:
        return torch.where(is_replaced, replacements, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, is_replaced, _ = inputs
        ctx.save_for_backward(is_replaced)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (is_replaced,) = ctx.saved_tensors
        return torch.where(is_replaced & (grad != 0), torch.nan, grad), None, None


# ---- gradients


def add_gradient_of(values: Tensor, other: Tensor) -> Tensor:
    """Return values, whose gradient `other` gets, too, as if it had been added and subtracted.

    values, other   float of one shape, possibly of two dtypes
    """
    return _AddGradientOf.apply(values, other)


class _AddGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, other: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, other = inputs
        ctx.other_dtype = other.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.to(ctx.other_dtype)


# ---- sums


def sum_segments(values: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of the values of each segment, in the dtype of values. See `Segments`."""
    return torch.segment_reduce(values[order], "sum", offsets=offsets, initial=0.0, unsafe=True)


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, segment_ids: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        return sum_segments(values, order, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, segment_ids, _, _ = inputs
        ctx.save_for_backward(segment_ids)

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        (segment_ids,) = ctx.saved_tensors
        return grad_sums[segment_ids], None, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, segment_ids: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        return x[segment_ids]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, _, order, offsets = inputs
        ctx.save_for_backward(order, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, offsets = ctx.saved_tensors
        return sum_segments(grad.double(), order, offsets).to(grad.dtype), None, None, None
