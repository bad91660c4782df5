"""Reuses the memory of large results on a CPU, so that its pages are not faulted in again.

The operating system allocates the pages of a new tensor of some hundred MB at the first write, one page fault each, which takes
several times as long as the pass that writes. So the memory of the last few large results is kept, and reused once no tensor
lies in it: at most KEPT blocks of at least LARGE_BYTES each, for the life of the process or until `release`. Typically these
are the gradient of the weight, its sum in fp32, a chunk of logits and one of a teacher's; or the gradient of logits.

Measured on 300 MB, fp32: 150 ms in fresh pages of 4 KiB, 25 ms in pages of 2 MiB, 15 ms in memory that is mapped already. New
blocks are therefore asked for in pages of 2 MiB, where Linux gives those on request (transparent_hugepage=madvise). That alone
is not enough: a virtual machine whose host takes idle memory back waits for the host at the first touch of such a page, 100 to
600 ms. Populating the pages beforehand (MADV_POPULATE_WRITE) takes as long as the faults."""

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
#: Blocks that are kept.
KEPT = 4


class _Block(NamedTuple):
    memory: mmap.mmap
    lease: weakref.ref[Any]  # alive as long as a tensor lies in it


_kept: deque[_Block] = deque(maxlen=KEPT)
_lock = threading.Lock()


def release() -> None:
    """Return the kept memory to the system: unused blocks at once, the others when their tensors are freed."""
    with _lock:
        _kept.clear()


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, on a CPU in memory that an earlier large result may have left."""
    size = math.prod(shape) * dtype.itemsize
    if not _is_large(size, device):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        lease = _lease(size)
    except OSError:  # out of memory: torch raises its usual error
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(lease, dtype=dtype, count=math.prod(shape)).view(shape)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`empty` of the shape of x. Small results come from torch.empty_like, which is the sooner one."""
    dtype = x.dtype if dtype is None else dtype
    if _is_large(x.numel() * dtype.itemsize, x.device):
        return empty(x.shape, dtype, x.device)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def zeros(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device, touched: int = 0) -> Tensor:
    """torch.zeros. On a CPU the zeros of a large tensor are not written: they are pages of the system, of which only those that
    are written to, or read, cost time and memory. Where an eighth of the rows or more, `touched`, is to be written, that costs more
    than zeros in memory that an earlier large result may have left."""
    size = math.prod(shape) * dtype.itemsize
    if not _is_large(size, device):
        return torch.zeros(shape, dtype=dtype, device=device)
    if 8 * touched >= shape[0]:
        return empty(shape, dtype, device).zero_()
    return torch.frombuffer(_mapped(size), dtype=dtype).view(shape)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype; x itself if it has that dtype."""
    return x if x.dtype == dtype else empty_like(x, dtype).copy_(x)


def _is_large(size: int, device: torch.device) -> bool:
    return device.type == "cpu" and size >= LARGE_BYTES and not torch.compiler.is_compiling()


def _mapped(size: int) -> mmap.mmap:
    """New private memory."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def _lease(size: int) -> Any:
    """A block of at least `size` bytes that no tensor lies in. It is taken for as long as the returned buffer lives."""
    with _lock:
        free = [block for block in _kept if block.lease() is None and size <= len(block.memory) <= 2 * size]
        block = min(free, key=lambda block: len(block.memory), default=None)
        if block is None:
            memory = _mapped(size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                _ask_for_large_pages(memory)
        else:
            _kept.remove(block)
            memory = block.memory
        lease = (ctypes.c_char * len(memory)).from_buffer(memory)
        _kept.append(_Block(memory, weakref.ref(lease)))  # drops the oldest
        return lease


def _ask_for_large_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages: only slower
        pass
