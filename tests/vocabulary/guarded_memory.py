"""Memory between protected pages, and numbers as kernels store them; for fuzz_kernels.py, which does without torch."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PAGE = mmap.PAGESIZE
FP32, BF16, FP16 = range(3)
STORED: tuple[Any, ...] = (np.float32, np.uint16, np.float16)
SIZE = (4, 2, 2)
libc = ctypes.CDLL(None, use_errno=True)


# ---- memory


def protect(address: int, size: int, mode: int) -> None:
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mode) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


@dataclass(eq=False)
class Buffer:
    address: int
    bytes: Array  # the requested part
    pages: Array  # the accessible part

    def typed(self, dtype: Any) -> Array:
        return self.bytes.view(dtype)


class Memory:
    """Buffers between protected pages."""

    def __init__(self, size: int) -> None:
        self.map = mmap.mmap(-1, size)
        self.all = np.frombuffer(self.map, np.uint8)
        self.base = self.all.ctypes.data

    def reset(self, rng: np.random.Generator) -> None:
        protect(self.base, len(self.all), mmap.PROT_READ | mmap.PROT_WRITE)
        protect(self.base, PAGE, 0)
        self.used, self.rng, self.buffers = PAGE, rng, []  # type: int, np.random.Generator, list[Buffer]

    def take(self, size: int) -> Buffer:
        inside = max(-(-size // PAGE), 1) * PAGE
        first, self.used = self.used, self.used + inside + PAGE
        protect(self.base + self.used - PAGE, PAGE, 0)
        pages = self.all[first : first + inside]
        pages[:] = self.rng.integers(1, 256, inside, dtype=np.uint8)
        start = first + (inside - size if self.rng.integers(2) else 0)
        self.buffers.append(Buffer(self.base + start, self.all[start : start + size], pages))
        return self.buffers[-1]

    def holding(self, x: Array) -> Buffer:
        buffer = self.take(x.nbytes)
        buffer.typed(x.dtype)[:] = x.ravel()
        return buffer

    def snapshot(self) -> list[Array]:
        return [b.pages.copy() for b in self.buffers]

    def check(self, before: list[Array], written: dict[Buffer, Array | None]) -> None:
        """Asserts that nothing has changed except the given places: all of a buffer (None), or its bytes at a bool mask."""
        for buffer, old in zip(self.buffers, before, strict=True):
            same = buffer.pages == old
            if buffer in written:
                at = buffer.bytes.ctypes.data - buffer.pages.ctypes.data
                mask = written[buffer]
                same[at : at + len(buffer.bytes)] |= True if mask is None else mask
            assert same.all(), f"buffer {self.buffers.index(buffer)}: byte {np.flatnonzero(~same)[0]} of its pages was written"


# ---- numbers


def widen(stored: Array, dtype: int) -> Array:
    if dtype == BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def narrow(x: Array, dtype: int) -> Array:
    """fp32 as it is stored: to nearest even, NaN stays NaN."""
    if dtype != BF16:
        return x.astype(STORED[dtype])
    u = x.astype(np.float32).view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + (u >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    x = rng.standard_normal(shape) * {"large": 1e4, "tiny": 1e-30}.get(kind, 3.0)
    if kind == "wild":
        wild = [np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0]
        x = np.where(rng.random(shape) < 0.02, rng.choice(wild, size=shape), x)
    if kind == "masked":
        x = np.where(rng.random(shape) < 0.4, -np.inf, x)
    return x.astype(np.float32)
