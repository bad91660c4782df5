"""The functions that a formula may call: names that torch and the kernels share.

Under torch (the eager backend, tests) `ops` stands for torch; for the kernels in C++ and Triton a formula is run once with symbols
in place of tensors, see program.py. So each formula of this package exists once.
"""

from __future__ import annotations

import torch

NUMBERS = (int, float)


class ops:
    """The functions that a formula may call, besides arithmetic and comparisons. They work element by element. NaN in gives NaN
    out."""

    exp, log, sqrt, abs, where = torch.exp, torch.log, torch.sqrt, torch.abs, torch.where

    @staticmethod
    def sigmoid(x):
        # torch.sigmoid rounds the last elements of a tensor differently: a token's bits would depend on where a block ends.
        return 1.0 / (1.0 + torch.exp(-x))

    @staticmethod
    def minimum(a, b):
        if isinstance(a, NUMBERS):
            if isinstance(b, NUMBERS):  # two parameters
                return min(a, b)
            a, b = b, a
        return torch.clamp(a, max=b) if isinstance(b, NUMBERS) else torch.minimum(a, b)

    @staticmethod
    def maximum(a, b):
        if isinstance(a, NUMBERS):
            if isinstance(b, NUMBERS):
                return max(a, b)
            a, b = b, a
        return torch.clamp(a, min=b) if isinstance(b, NUMBERS) else torch.maximum(a, b)


def bounded_exp(x):
    """exp(min(x, 60)): e^60 times any reasonable weight is still finite in fp32.

    Slopes use the bounded value and are not cut, so a token beyond the bound still gets a gradient that pulls it back."""
    return ops.exp(ops.minimum(x, 60.0))


def finite(x):
    """x within +-1e30: products of two bounded ratios stay finite, as do their products with a weight."""
    return ops.minimum(ops.maximum(x, -1e30), 1e30)


def times(weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """weight * x; 0 where the weight is 0, whatever x is. None: a weight of 1."""
    return x if weight is None else (weight * x).masked_fill_(weight == 0, 0.0)
