"""The compiled module for the files of the C++ backend, and tensors as its arguments: the only place that takes addresses, each
behind a check of what C++ will take to be there."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import native
from ..rows import RowStats, RowTransform, Slopes

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


# ---- tensors as addresses and numbers. `name` is what an error calls the tensor, which the caller keeps until the kernel is done.


def wrong(name: str, x: Tensor, taken: str) -> ValueError:
    """The error about a tensor that would be read or written as something else than it is."""
    of = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
    return ValueError(f"{name} is {of}: the C++ kernels take {taken} on a CPU.")


def vector(name: str, x: Tensor | None, dtype: torch.dtype, n: int) -> int:
    """The address of n values in one piece; 0 for None."""
    if x is None:
        return 0
    if x.dtype != dtype or x.shape != (n,) or not x.is_contiguous() or x.device.type != "cpu":
        raise wrong(name, x, f"{str(dtype).removeprefix('torch.')} [{n}] in one piece")
    return x.data_ptr()


def matrix(name: str, x: Tensor, shape: tuple[int, int], dtypes: Collection[torch.dtype] = DTYPES) -> tuple[int, int, int]:
    """Address, dtype and stride of rows that are in one piece each."""
    # contiguous() does not change the strides of an empty tensor
    plain = x.shape == shape and (x.stride(1) == 1 or shape[1] == 1 or x.numel() == 0)
    if not plain or x.dtype not in dtypes or x.device.type != "cpu":
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise wrong(name, x, f"{names} {list(shape)} with unit stride in the last dimension")
    return x.data_ptr(), DTYPES[x.dtype], x.stride(0)


class Rows(NamedTuple):
    """Rows of logits [A, T, V], of which `inner` is T."""

    address: int
    dtype: int
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def out(self) -> tuple[int, int, int, int]:
        """As memory for the gradient of rows."""
        return self.address, self.dtype, self.outer_stride, self.inner_stride


def rows_of(name: str, x: Tensor, shape: torch.Size | None = None) -> Rows:
    """The rows of x [A, T, V]; `shape`: what it must have."""
    plain = x.dim() == 3 and (shape is None or x.shape == shape) and (x.stride(2) == 1 or x.shape[2] == 1 or x.numel() == 0)
    if not plain or x.dtype not in DTYPES or x.device.type != "cpu":
        raise wrong(name, x, f"fp32, bf16 or fp16 {'[A, T, V]' if shape is None else list(shape)} with unit stride in V")
    return Rows(x.data_ptr(), DTYPES[x.dtype], x.shape[1], x.stride(0), x.stride(1))


def part_of(logits: Tensor, rows: tuple[int, int] | None) -> tuple[int, int]:
    """(the first row, how many) of those of logits [A, T, V] that are meant."""
    all_rows = logits.shape[0] * logits.shape[1]
    lo, hi = rows or (0, all_rows)
    if not 0 <= lo <= hi <= all_rows:
        raise ValueError(f"rows={rows}: the logits have {all_rows}.")
    return lo, hi - lo


def of_partials(stats: RowStats, n: int) -> dict[str, int]:
    """The address of each partial of n rows, by name."""
    first, _, step = matrix("partials", stats.values, (len(stats.names), n), (torch.float32,))
    return {name: first + 4 * step * i for i, name in enumerate(stats.names)}


def of_slopes(slopes: Slopes, n: int) -> tuple[int, int, int, int, int]:
    """The addresses of the slopes of n rows, in the order of their fields."""
    target, constant, log, prob, teacher = (
        vector(f"slopes.{name}", x, torch.float32, n) for name, x in zip(Slopes._fields, slopes, strict=True)
    )
    return target, constant, log, prob, teacher


def inverse_temperature(transform: RowTransform, n: int) -> tuple[float, int]:
    """The number, and the address of the per-row values or 0."""
    t = transform.inv_temperature
    return (1.0, vector("inv_temperature", t, torch.float32, n)) if isinstance(t, Tensor) else (t, 0)
