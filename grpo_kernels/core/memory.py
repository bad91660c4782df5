"""Reuse the memory of large results on a CPU, so that its pages are not faulted in again.

The operating system allocates the pages of a new tensor of some hundred MB at the first write, one
page fault each. This takes several times as long as the pass that writes. So the memory of the last
few large results is kept, and reused when no tensor is in it: at most MAX_BLOCKS blocks of at least
LARGE_BYTES each, until `release` or the end of the process. Typically these are the gradient of the
weight, its sum in fp32, a chunk of logits and one of a reference's; or the gradient of logits.

Measured on 300 MB, fp32: 150 ms in fresh pages of 4 KiB, 25 ms in pages of 2 MiB, 15 ms in memory
that is mapped already. New blocks are therefore requested in pages of 2 MiB, if Linux gives those
on request (transparent_hugepage=madvise). That alone is not enough: a virtual machine whose host
takes idle memory back waits for the host at the first write to such a page, 100 to 600 ms.
Populating the pages in advance (MADV_POPULATE_WRITE) takes as long as the faults.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Smaller tensors come from the allocator, which keeps memory of that size itself.
LARGE_BYTES = 32 << 20

#: Number of blocks that are kept.
MAX_BLOCKS = 4

#: A block is reused for a tensor that takes at least 1 / MAX_WASTE of it.
MAX_WASTE = 2

#: If at least 1 / MIN_TOUCHED of the rows of zeros are written later, reused memory that is set to
#: 0 is faster than new pages.
MIN_TOUCHED = 8


class Block(NamedTuple):
    """A block of memory, and a reference that is alive as long as a tensor is in it."""

    memory: mmap.mmap
    lease: weakref.ref[Any]


_blocks: deque[Block] = deque(maxlen=MAX_BLOCKS)
_lock = threading.Lock()


def release() -> None:
    """Return the memory that is kept for reuse to the operating system.

    Unused blocks are returned at once, the others when their tensors are freed.
    """
    with _lock:
        _blocks.clear()


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose values are not set, as torch.empty does.

    A large tensor on a CPU (LARGE_BYTES or more) reuses memory of an earlier tensor, if a block of
    the right size is free. Its pages are mapped already, so writing to it is several times as fast.
    Other tensors come from torch.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not _is_large(num_bytes, device):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        buffer = _lease(num_bytes)
    except OSError:  # out of memory: torch raises its usual error
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a contiguous tensor of the shape of x, whose values are not set.

    A large tensor on a CPU is in memory of an earlier tensor, whose pages are mapped already
    (`empty`).

    dtype   of the result; None: the dtype of x
    """
    dtype = x.dtype if dtype is None else dtype
    if _is_large(x.numel() * dtype.itemsize, x.device):
        return empty(x.shape, dtype, x.device)
    # For small tensors this is faster than `empty`.
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def zeros(
    shape: torch.Size | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    touched: int = 0,
) -> Tensor:
    """Return a tensor of zeros, as torch.zeros does.

    A large tensor on a CPU is in one of two kinds of memory:

    - New pages, which cost nothing until the caller writes to them: the operating system provides a
      page of zeros at the first access.
    - Reused memory, which is set to 0 here. This is faster if the caller will write many rows.

    touched   the number of rows that the caller will write
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not _is_large(num_bytes, device):
        return torch.zeros(shape, dtype=dtype, device=device)
    writes_many_rows = MIN_TOUCHED * touched >= shape[0]
    if writes_many_rows:
        return empty(shape, dtype, device).zero_()
    return torch.frombuffer(_map_memory(num_bytes), dtype=dtype).view(shape)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x converted to `dtype`; x itself if it has that dtype.

    A large result on a CPU is in memory of an earlier tensor, whose pages are mapped already
    (`empty`).
    """
    return x if x.dtype == dtype else empty_like(x, dtype).copy_(x)


def _is_large(num_bytes: int, device: torch.device) -> bool:
    """Return whether this module, and not torch, provides the memory of a tensor.

    It does for a tensor of LARGE_BYTES or more on a CPU. It does not under torch.compile, which
    plans the memory of a graph itself.
    """
    is_large = device.type == "cpu" and num_bytes >= LARGE_BYTES
    return is_large and not torch.compiler.is_compiling()


def _map_memory(num_bytes: int) -> mmap.mmap:
    """Return num_bytes of new memory from the operating system, which reads as zeros.

    Its pages are not mapped yet. The system provides each page at the first access.
    """
    if hasattr(mmap, "MAP_PRIVATE"):  # not on Windows
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


def _lease(num_bytes: int) -> Any:
    """Return a buffer over a block of memory of at least num_bytes, a free block or a new one.

    The block is not reused as long as the buffer is alive: `Block.lease` is a weak reference to it.
    A tensor that is made from the buffer keeps it alive.
    """
    with _lock:
        memory = _take_free_memory(num_bytes)
        if memory is None:
            memory = _map_memory(num_bytes)
            _request_large_pages(memory)
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        _blocks.append(Block(memory, weakref.ref(buffer)))  # drops the oldest block
        return buffer


def _take_free_memory(num_bytes: int) -> mmap.mmap | None:
    """Remove the smallest free block that is large enough, and return its memory.

    Returns None if there is none. A block of more than MAX_WASTE * num_bytes is left for a larger
    tensor. The caller must hold `_lock`.
    """
    free = []
    for block in _blocks:
        if block.lease() is None and num_bytes <= len(block.memory) <= MAX_WASTE * num_bytes:
            free.append(block)
    if not free:
        return None
    smallest = min(free, key=lambda block: len(block.memory))
    _blocks.remove(smallest)
    return smallest.memory


def _request_large_pages(memory: mmap.mmap) -> None:
    """Ask Linux to back the memory with pages of 2 MiB, which take fewer page faults.

    Does nothing on a system that does not have them.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages: only slower
        pass
