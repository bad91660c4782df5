"""Runs the engine's code for a GPU without one: stand-ins for the products, which check their arguments, and a count of bytes.

In `of_a_gpu`, tensors on a CPU, or on "meta", which has no values, take the code path of bf16 on CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_kernels.rows import products
from grpo_kernels.rows.backends import FusedRows, eager
from grpo_kernels.rows.partials import LogitRows, Partials
from support.inside import overlap

Tensor = torch.Tensor
MM = torch.mm


class Product(NamedTuple):
    """A product that was computed: [m, k] x [k, n], the dtype of the result, and whether it was added to existing values."""

    m: int
    k: int
    n: int
    dtype: torch.dtype
    added: bool = False


class GpuProducts:
    """torch.mm and torch.addmm with operands of 16 bits, as CUDA has them; `made` are the calls in order. Others stay as they are.

    adds    whether addmm takes an fp32 sum, as from torch 2.10 on."""

    def __init__(self, adds: bool = True) -> None:
        self.adds, self.made = adds, list[Product]()

    def mm(
        self, a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        if a.dtype == b.dtype == torch.float32:
            return MM(a, b) if out is None else MM(a, b, out=out)
        dtype = self._checked(a, b, out_dtype, out)
        self.made.append(Product(*a.shape, b.shape[1], dtype))
        if a.is_meta:
            return a.new_empty(a.shape[0], b.shape[1], dtype=dtype) if out is None else out
        result = a.float() @ b.float()
        return result.to(dtype) if out is None else out.copy_(result)

    def addmm(self, total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        if not self.adds and total.dtype != a.dtype:
            raise RuntimeError("self and mat2 must have the same dtype")
        assert total is out, "another sum would be copied into the result"
        self._checked(a, b, out_dtype, out)
        self.made.append(Product(*a.shape, b.shape[1], out_dtype, added=True))
        return out if a.is_meta else out.add_(a.float() @ b.float())

    def _checked(self, a: Tensor, b: Tensor, out_dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
        dtype = a.dtype if out_dtype is None else out_dtype
        assert a.dtype == b.dtype in (torch.bfloat16, torch.float16) and dtype in (a.dtype, torch.float32)
        assert a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and min(*a.shape, *b.shape) > 0
        for x in (a, b):  # one dimension must be contiguous: otherwise the operand is copied first
            assert any(x.stride(i) == 1 and x.stride(1 - i) >= x.shape[i] for i in (0, 1)), (x.shape, x.stride())
        if out is not None:
            assert out.dtype == dtype and out.shape == (a.shape[0], b.shape[1])
            assert out.stride(1) == 1 and out.stride(0) >= out.shape[1]
            assert not any(overlap(out, x) for x in (a, b)), "a product writes where it reads"
        return dtype


def apart_or_in_place(logits: Tensor, out: Tensor) -> bool:
    """Whether a row kernel may write a gradient there: element for element over its logits, or elsewhere."""
    same = out.dtype == logits.dtype and out.stride() == logits.stride() and out.storage_offset() == logits.storage_offset()
    return out.shape == logits.shape and (same or not overlap(logits, out))


@contextlib.contextmanager
def of_a_gpu(adds: bool = True) -> Iterator[list[Product]]:
    """A context in which products are recorded."""
    stand_ins = GpuProducts(adds)
    tried = products.adds_widened.__wrapped__

    def adds_widened(device: torch.device) -> bool:
        before = len(stand_ins.made)
        found = tried(device)
        del stand_ins.made[before:]  # what it tries is none of the engine's
        return found

    with (
        mock.patch.object(products, "widens", lambda device: True),
        mock.patch.object(products, "adds_widened", adds_widened),
        mock.patch.object(torch, "mm", stand_ins.mm),
        mock.patch.object(torch, "addmm", stand_ins.addmm),
        mock.patch.object(torch, "is_autocast_enabled", lambda *_: False),  # which does not know "meta"
        mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext()),
    ):
        yield stand_ins.made


class NoRows(eager.Kernels):
    """Row kernels that do nothing and take no memory, for tensors without values."""

    writes_behind_reads = False

    def stats(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        return Partials.not_read(names, rows.n, rows.logits.device)

    def pull(self, rows: LogitRows, partials: Any, slopes: Any, out: Tensor) -> None:
        assert apart_or_in_place(rows.logits, out)

    def fused(self, rows: LogitRows, stage: Any, out: Tensor | None) -> FusedRows:
        assert out is None or apart_or_in_place(rows.logits, out)
        return FusedRows(*rows.logits.new_empty(3, rows.n).unbind(0))

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        pass


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes of tensors made inside that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(x.untyped_storage()).cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in given:
                    self._alive[reference.cdata] = (reference, storage.nbytes())
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out
