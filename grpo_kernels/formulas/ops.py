"""What a formula is written in: names that torch and Triton share.

Under torch (CPU kernels, the eager backend, tests) `ops` stands for torch; inside the fused Triton kernel the same source
is compiled with `ops` replaced by `triton.language`. So each formula of this package exists once.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


class ops:
    """What a formula may call, besides arithmetic and comparisons: element by element, the same in torch and Triton.
    NaN goes through all of them."""

    exp, log, sqrt, abs, where = torch.exp, torch.log, torch.sqrt, torch.abs, torch.where

    @staticmethod
    def sigmoid(x):
        # torch.sigmoid rounds the last few of a tensor otherwise: a token's bits would depend on where a block ends.
        return 1.0 / (1.0 + torch.exp(-x))

    @staticmethod
    def minimum(a, b):
        if not isinstance(a, Tensor):  # two parameters
            return min(a, b)
        return torch.minimum(a, b) if isinstance(b, Tensor) else torch.clamp(a, max=b)

    @staticmethod
    def maximum(a, b):
        if not isinstance(a, Tensor):
            return max(a, b)
        return torch.maximum(a, b) if isinstance(b, Tensor) else torch.clamp(a, min=b)


def bounded_exp(x):
    """exp(min(x, 60)): a ratio of e^60 is already lost, and e^60 times any sane weight is still finite in fp32.

    Slopes keep using the bounded value, so a token beyond the bound is pulled back instead of frozen."""
    return ops.exp(ops.minimum(x, 60.0))


def finite(x):
    """x within +-1e30: products of two bounded ratios stay finite, as do their products with a weight."""
    return ops.minimum(ops.maximum(x, -1e30), 1e30)
