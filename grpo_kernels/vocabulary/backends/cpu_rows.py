"""What the C++ backend's functions over rows of logits share: tensors as addresses and numbers."""

from __future__ import annotations

import torch

from ..rows import RowTransform
from .cpu_module import DTYPES

Tensor = torch.Tensor


def layout(x: Tensor) -> tuple[int, int, int, int, int]:
    """Sizes A, T, V and the strides of A and T."""
    outer, inner, vocab = x.shape
    outer_stride, inner_stride, unit = x.stride()
    plain = unit == 1 or vocab == 1 or x.numel() == 0  # contiguous() does not change the strides of an empty tensor
    assert plain and x.dtype in DTYPES and x.device.type == "cpu", (x.stride(), x.dtype, x.device)
    return outer, inner, vocab, outer_stride, inner_stride


def address(vector: Tensor | None) -> int:
    return 0 if vector is None else vector.data_ptr()


def check(vector: Tensor, dtype: torch.dtype, n: int) -> None:
    assert vector.dtype == dtype and vector.shape == (n,) and vector.is_contiguous(), (vector.dtype, vector.shape, n)


def inverse_temperature(transform: RowTransform, n: int) -> tuple[float, int]:
    """The number, and the address of the per-row values or 0."""
    t = transform.inv_temperature
    if isinstance(t, Tensor):
        check(t, torch.float32, n)
        return 1.0, t.data_ptr()
    return t, 0
