"""Shared by the eager backend's products and row functions: the size of a block, and sums of rows."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def block_bytes(device: torch.device) -> int:
    """On a CPU, a size that fits its cache and that the allocator keeps for reuse; on a GPU, enough to fill it."""
    return 16 << 20 if device.type == "cpu" else 256 << 20


def row_sums(x: Tensor) -> Tensor:
    """[r, V] -> [r]. On a CPU the sum of a single row is split among threads, which rounds differently: so sum it twice."""
    return x.sum(1) if x.shape[0] > 1 else x.expand(2, -1).sum(1)[:1]
