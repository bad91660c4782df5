"""The compiled module for the files of the C++ backend, and conversions of tensors to its arguments: addresses and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import native
from ..rows import RowTransform

if TYPE_CHECKING:
    from ... import _cpu

    _import_error: str
else:
    try:
        _cpu = native.load()
    except ImportError as error:
        _cpu = None
        _import_error = str(error)

Tensor = torch.Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def available() -> str | None:
    """None if this backend can run, else the reason in words."""
    if _cpu is None:
        command = native.build_command(native.package())
        return f"the compiled module is missing: {_import_error}. `{command}` builds it, with a C++17 compiler"
    return None


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
