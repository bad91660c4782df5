"""Rows of logits and their transform as arguments of the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..rows import RowTransform, Slopes

Tensor = torch.Tensor

#: Rows, and columns of a tile that may end behind the last one, are numbered by 32 bits.
LARGEST = 2**31 - 2**16


def check_layout(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Raise ValueError unless a kernel can read x as rows [A, T, V], or write to it as those of `like`."""
    plain = x.dim() == 3 and (like is None or x.shape == like.shape) and (x.stride(2) == 1 or x.shape[2] == 1)
    few = plain and x.shape[0] * x.shape[1] < LARGEST and 0 < x.shape[2] < LARGEST
    if not few or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        taken = "[A, T, V]" if like is None else list(like.shape)
        raise ValueError(
            f"{name} is {str(x.dtype).removeprefix('torch.')} {list(x.shape)} with strides {list(x.stride())}: the Triton kernels take "
            f"fp32, bf16 or fp16 {taken} with unit stride in V, of fewer than 2^31 rows and columns."
        )


def vectors(n: int, **given: Tensor | None) -> tuple[Tensor | None, ...]:
    """Values of n rows by name, each in one piece."""
    for name, x in given.items():
        if x is not None and x.shape != (n,):
            raise ValueError(f"{name} has shape {list(x.shape)}: the Triton kernels take one value for each of {n} rows.")
    return tuple(None if x is None else x.contiguous() for x in given.values())


def of_slopes(slopes: Slopes, n: int) -> tuple[Tensor | None, ...]:
    """The slopes of n rows, in the order of their fields."""
    return vectors(n, **{f"slopes.{name}": x for name, x in zip(Slopes._fields, slopes, strict=True)})


def transform_arguments(transform: RowTransform, n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inverse: Any = transform.inv_temperature
    per_row = isinstance(inverse, Tensor)
    shape = "softcap" if transform.softcap != 0 else "linear" if transform.scale >= 0 else "mirrored"
    values = (
        vectors(n, inv_temperature=inverse)[0] if per_row else float(inverse),
        float(transform.scale),
        float(transform.softcap),
    )
    return values, {"SHAPE": shape, "ROW_TEMPERATURE": per_row}
