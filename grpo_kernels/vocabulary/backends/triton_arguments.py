"""Rows of logits and their transform as arguments of the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..rows import RowTransform

Tensor = torch.Tensor


def check_layout(logits: Tensor, out: Tensor | None, n: int) -> None:
    assert logits.dim() == 3 and (logits.stride(2) == 1 or logits.shape[2] == 1), (logits.shape, logits.stride())
    assert out is None or (out.shape == logits.shape and (out.stride(2) == 1 or out.shape[2] == 1)), (out.shape, out.stride())
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), logits.dtype
    assert 0 <= n < 2**31 - 2**16 and 0 < logits.shape[2] < 2**31 - 2**16, (n, logits.shape)


def transform_arguments(transform: RowTransform) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inverse: Any = transform.inv_temperature
    per_row = isinstance(inverse, Tensor)
    shape = "softcap" if transform.softcap != 0 else "linear" if transform.scale >= 0 else "mirrored"
    values = (inverse.contiguous() if per_row else float(inverse), float(transform.scale), float(transform.softcap))
    return values, {"SHAPE": shape, "ROW_TEMPERATURE": per_row}


def vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
