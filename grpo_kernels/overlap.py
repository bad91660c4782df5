"""Whether tensors share memory: checks before a call writes over memory of its caller.

Two callers need them: inplace=True, which writes the gradient over the logits, and `weight_grad`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .checks import plain

#: How many positions `overlap` tries before it treats two tensors as overlapping.
MAX_POSITIONS = 4000


def refuse_overlap(
    name: str,
    written: Tensor,
    remedy: str,
    read: dict[str, Any],
    read_before_write: dict[str, Any],
) -> None:
    """Raise ValueError if `written` shares memory with a tensor that the same call reads.

    name                the argument that is written, for messages
    written             its tensor
    remedy              what to pass instead, the end of the message
    read                the other arguments by name: tensors, and dataclasses, tuples and lists of
                        tensors
    read_before_write   likewise, for arguments of which each element is read only before the
                        element of `written` at the same index is written. These may be the same
                        memory, with the same dtype, shape and strides. A shifted view may not.

    Bytes of elements are compared, not storages: other columns, rows or halves of one allocation
    are accepted. The answer is exact, except for interleaved views with different row strides that
    take more than MAX_POSITIONS steps to compare. These are refused.
    """
    # A subclass that wraps a tensor, such as DTensor, is replaced by the tensor.
    ((_, written),) = _named_tensors(name, written)
    for argument, value in read.items():
        for part_name, part in _named_tensors(argument, value):
            if overlap(written, part):
                raise ValueError(f"{name} shares memory with {part_name}: {remedy}")
    for argument, value in read_before_write.items():
        for part_name, part in _named_tensors(argument, value):
            if overlap(written, part) and not _same_elements(written, part):
                raise ValueError(f"{name} shares memory with {part_name}: {remedy}")


class Step(NamedTuple):
    """Bytes that an index adds to an address: step * index, with 0 <= index <= last_index."""

    step: int
    last_index: int


def overlap(x: Tensor, y: Tensor) -> bool:
    """Return whether an element of x and an element of y have a byte in common.

    The address of a byte of x is start_x + the sum of step * index over the dimensions of x, where
    a step is a stride in bytes. The bytes within an element are one more dimension, with step 1.
    The same holds for y. If the indices of y are counted from the end, an address of y is the
    address of its last byte minus such a sum. So x and y have a byte in common if there are indices
    with

        sum of step * index over the dimensions of both = address of y's last byte - start_x

    Returns True if this search takes more than MAX_POSITIONS steps.
    """
    start_x = x.data_ptr()
    start_y = y.data_ptr()
    if start_y >= start_x + _num_bytes_spanned(x) or start_x >= start_y + _num_bytes_spanned(y):
        return False
    if x.numel() == 0 or y.numel() == 0 or x.device != y.device or x.is_meta:
        return False
    # Dimensions with the same step are one dimension, whose last index is the sum of theirs.
    last_index_of_step: Counter[int] = Counter()
    for tensor in (x, y):
        element_size = tensor.element_size()
        last_index_of_step[1] += element_size - 1
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
            last_index_of_step[element_size * stride] += size - 1
    del last_index_of_step[0]  # expanded dimensions
    steps = [Step(step, last) for step, last in sorted(last_index_of_step.items(), reverse=True)]
    last_byte_y = start_y + _num_bytes_spanned(y) - 1
    return _SumSearch(MAX_POSITIONS).can_reach(last_byte_y - start_x, steps)


class _SumSearch:
    """A search for indices that make the sum of step * index equal to a distance.

    max_positions   number of indices to try before the search gives up
    """

    def __init__(self, max_positions: int) -> None:
        self.positions_left = max_positions

    def can_reach(self, distance: int, steps: list[Step]) -> bool:
        """Return whether such indices exist. Return True if the search gives up.

        distance   the sum that the indices must make
        steps      the steps and their largest indices, the largest step first
        """
        if not steps:
            return distance == 0
        first, *others = steps
        # The other steps add 0 to longest_of_others. So the first one must reach at least
        # distance - longest_of_others and at most distance.
        longest_of_others = sum(other.step * other.last_index for other in others)
        lowest_index = max(0, -((longest_of_others - distance) // first.step))  # rounded up
        highest_index = min(first.last_index, distance // first.step)
        indices = range(lowest_index, highest_index + 1)
        self.positions_left -= len(indices)
        if self.positions_left < 0:
            return True
        return any(self.can_reach(distance - first.step * index, others) for index in indices)


def _num_bytes_spanned(x: Tensor) -> int:
    """Return the number of bytes from the start of x to its end, gaps included."""
    if x.is_contiguous():
        return x.nbytes
    last_element = sum(
        stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True)
    )
    return x.element_size() * (1 + last_element)


def overlaps_itself(x: Tensor) -> bool:
    """Return whether two elements of x may have the same memory, such as in an expanded tensor.

    The dimensions are looked at from the smallest stride to the largest. Elements have different
    memory if each stride is at least as long as the memory that the smaller strides span.
    """
    # A dimension of size 1 has one index, so its stride does not matter.
    dimensions = [
        (stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1
    ]
    extent = 1  # of the dimensions so far, in elements
    for step, size in sorted(dimensions):
        if step < extent:
            return True
        extent += step * (size - 1)
    return False


def _same_elements(x: Tensor, y: Tensor) -> bool:
    """Return whether x[index] and y[index] are the same memory for each index."""
    if (x.data_ptr(), x.dtype, x.shape) != (y.data_ptr(), y.dtype, y.shape):
        return False
    # The stride of a dimension of size 1 does not matter.
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return all(size == 1 or stride_x == stride_y for size, stride_x, stride_y in strides)


def _named_tensors(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each tensor inside an argument, for example "reference.weight".

    A tensor subclass that wraps others, such as DTensor, is replaced by the tensors that it wraps,
    which have the memory. They have the name of the subclass.

    name   the name of the argument
    x      a tensor, or a tuple, list or dataclass that may contain tensors; None in it is skipped
    """
    if isinstance(x, Tensor):
        x = plain(x)
        if type(x) is Tensor or not hasattr(x, "__tensor_flatten__"):
            yield name, x
            return
        attributes, _ = x.__tensor_flatten__()
        for attribute in attributes:
            yield from _named_tensors(name, getattr(x, attribute))
    elif isinstance(x, (tuple, list)):
        for i, part in enumerate(x):
            yield from _named_tensors(f"{name}[{i}]", part)
    else:
        for field in getattr(x, "__dataclass_fields__", ()):
            part = getattr(x, field)
            if part is not None:
                yield from _named_tensors(f"{name}.{field}", part)
