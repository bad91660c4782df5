"""Memory of large results on a CPU: without the cost of its first touch, or only as much as is touched.

A new tensor of some hundred MB has no memory yet: the kernel hands it out in pages of 4 KiB, each with a fault when it is first
written to, which takes several times as long as the pass that writes. Pages of 2 MiB take hardly longer than memory that is there
already. Where the system gives those on request only (transparent_hugepage=madvise), that is requested for such tensors alone.
Nothing is kept between calls, and the memory is given back when the tensor is."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable

import torch

Tensor = torch.Tensor

#: Smaller tensors may share a mapping with others: glibc's malloc gives one of its own to everything from here on.
LARGE_BYTES = 32 << 20


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's madvise; None where there is none, or no pages of another size."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def large_pages(new: Tensor) -> Tensor:
    """`new`, a tensor without values yet, in large pages if it is on a CPU and large. What the system refuses changes nothing
    but the time."""
    if new.device.type != "cpu" or type(new) is not Tensor or new.untyped_storage().nbytes() < LARGE_BYTES:
        return new
    function = _madvise()
    if function is not None:
        begin = -(-new.untyped_storage().data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (new.untyped_storage().data_ptr() + new.untyped_storage().nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        function(begin, end - begin, mmap.MADV_HUGEPAGE)
    return new


def zeros(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros. On a CPU the zeros of a large tensor are not written: they are pages of the system, of which only those that
    are written to, or read, cost time and memory."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LARGE_BYTES or torch.compiler.is_compiling():
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype; x itself if it has that dtype."""
    return x if x.dtype == dtype else large_pages(torch.empty_like(x, dtype=dtype)).copy_(x)
