"""What tests see and change of the package's inside, in one place: chunks, products, instruction
sets, memory that is allocated; and stand-ins for the products of a GPU, which check their
arguments.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_kernels.core import backends, linear, linear_memory, matmuls
from grpo_kernels.core.backends import FusedLossValues, cpu_matmuls, eager
from grpo_kernels.core.backends import native as native
from grpo_kernels.core.backends.cpu import _cpu
from grpo_kernels.core.compiled import CompiledLogits, CompiledProjection
from grpo_kernels.core.linear import Projection
from grpo_kernels.core.linear_memory import ChunkPlan, LinearMemory
from grpo_kernels.core.softmax import LogitRows, RowTransform, SoftmaxSums
from grpo_kernels.inputs import as_3d_logits, with_unit_stride
from grpo_kernels.overlap import overlap

#: Sizes of chunks and blocks.
blocks = linear_memory
LIBRARY = "library"


def executors() -> list[str]:
    """What can compute here: eager, C++ with each instruction set, and with products of a library
    where it has its own; or the backends that the environment names, as on a GPU.
    """
    chosen = os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "eager cpu").split()
    of_cpu = [f"cpu {isa}" for isa in (_cpu.isas() if _cpu else ())]
    of_cpu += [] if cpu_matmuls.unavailable_reason() else [f"cpu {LIBRARY}"]
    return [name for backend in chosen for name in (of_cpu if backend == "cpu" else [backend])]


@contextmanager
def executor(name: str) -> Iterator[str]:
    """Let an executor compute; gives the name of its backend."""
    backend, _, isa = name.partition(" ")
    with pytest.MonkeyPatch.context() as patch:
        if isa == LIBRARY:
            patch.setattr(cpu_matmuls, "unavailable_reason", lambda: "switched off")
        elif isa:
            _cpu.use_isa(isa)
        try:
            yield backend
        finally:
            if isa:
                _cpu.use_isa(_cpu.isas()[0])


def our_products(dtype: torch.dtype) -> bool:
    """Whether products from hidden states of this dtype are our own, whose sums do not depend on
    what else is there.
    """
    return cpu_matmuls.unavailable_reason() is None and dtype in cpu_matmuls.OPERANDS


def in_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, block: int | None = None) -> None:
    """Process chunks of `rows` rows, fewer than a real plan has, so that small cases have several.

    block   rows of a block if 16-bit gradients of logits have a buffer; otherwise, and with None,
            each chunk is a block
    """

    def plan(memory: LinearMemory, *_: Any, **__: Any) -> ChunkPlan:
        has_several_chunks = block is not None and memory.has_grad_buffer
        return ChunkPlan(rows, block if has_several_chunks else rows)

    monkeypatch.setattr(LinearMemory, "plan", plan)


def values_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of tensors are not checked, as on a GPU, where the host would wait for them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("grpo_kernels") and hasattr(module, "values_are_checked"):
            monkeypatch.setattr(module, "values_are_checked", lambda _: False)


def count_products(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the rows that take part in each of the three products from here on."""
    rows: Counter[str] = Counter()
    make = linear.make_matmuls
    rows_of = {
        "logits": ("hidden", 0),
        "grad_hidden": ("grad_logits", 0),
        "add_grad_weight": ("grad_logits", 1),
    }
    keys = {"logits": "logits", "grad_hidden": "d_hidden", "add_grad_weight": "d_weight"}

    def counted(*args: Any) -> Any:
        products = make(*args)

        def watch(name: str) -> None:
            product = getattr(products, name)

            def counting(*args: Any, **kwargs: Any) -> Any:
                keyword, position = rows_of[name]
                matrix = kwargs[keyword] if keyword in kwargs else args[position]
                rows[keys[name]] += matrix.shape[0]
                return product(*args, **kwargs)

            setattr(products, name, counting)

        for name in rows_of:
            watch(name)
        return products

    monkeypatch.setattr(linear, "make_matmuls", counted)
    return rows


def backends_that_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of backends whose statistics are asked for from here on."""
    names: list[str] = []
    if backends.unavailable("cpu"):
        pytest.skip("needs two backends")
    for name in ("eager", "cpu"):
        kernels = backends.load(name).Kernels

        def stats(*args: Any, right: Any = kernels.run_sums_kernel, name: str = name) -> Any:
            names.append(name)
            return right(*args)

        monkeypatch.setattr(kernels, "run_sums_kernel", stats)
    return names


def only_eager(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """No other backend can run, for this reason, and nobody has been warned of it yet."""
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name == "eager" else reason)
    monkeypatch.setattr("grpo_kernels.checks._warned", set())


def blocks_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager code takes one row of given logits at a time."""
    monkeypatch.setattr(backends.load("eager"), "block_bytes", lambda device: 1)


def traced_stages(backend: str, dtype: torch.dtype) -> list[tuple[Callable[..., Any], bool]]:
    """What puts operators into a graph: functions of (targets, tensors) that give log-probs and
    entropies of rows, and whether they take hidden states, weight and bias, or logits.
    """
    transform = RowTransform(1.0, 0.0, 0.7)

    def from_logits(targets: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        source = CompiledLogits(logits, transform, None, backend=backend)
        found = source.statistics(targets, None, ("entropy",))
        return found["logps"], found["entropy"]

    def from_hidden(targets: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        source = CompiledProjection(Projection(*tensors, transform, dtype), None, backend=backend)
        found = source.statistics(targets, None, ("entropy",))
        return found["logps"], found["entropy"]

    return [(from_logits, False), (from_hidden, True)]


def rows_of_logits(logits: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] as the stages take them."""
    return as_3d_logits(logits, logits.shape[:2], logits.device)


def rows_of_head(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> list[torch.Tensor]:
    """A head's tensors as the stages take them."""
    return [with_unit_stride(hidden), with_unit_stride(weight), bias]


class Allocations(TorchDispatchMode):
    """The shapes of all tensors that operators return in this context, except for views of existing
    ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, leaves = func(*args, **(kwargs or {})), torch.utils._pytree.tree_leaves
        known = {
            x.untyped_storage().data_ptr()
            for x in leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        for x in leaves(out):
            if (
                isinstance(x, torch.Tensor)
                and x.numel()
                and x.untyped_storage().data_ptr() not in known
            ):
                self.shapes.append(tuple(x.shape))
        return out


# ---- the engine's code for a GPU: in `of_a_gpu`, tensors on a CPU or on "meta", which has no
# values, take the path of bf16 on CUDA

MM = torch.mm


class Product(NamedTuple):
    """A product that was computed:

    [m, k] x [k, n], the dtype of the result, and whether it was added to existing values.
    """

    m: int
    k: int
    n: int
    dtype: torch.dtype
    added: bool = False


class GpuProducts:
    """torch.mm and torch.addmm with operands of 16 bits, as CUDA has them; `made` are the calls in
    order. Others stay as they are.

    adds    whether addmm takes an fp32 sum, as from torch 2.10 on.
    """

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

    def addmm(
        self, total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor
    ) -> Tensor:
        if not self.adds and total.dtype != a.dtype:
            raise RuntimeError("self and mat2 must have the same dtype")
        assert total is out, "another sum would be copied into the result"
        self._checked(a, b, out_dtype, out)
        self.made.append(Product(*a.shape, b.shape[1], out_dtype, added=True))
        return out if a.is_meta else out.add_(a.float() @ b.float())

    def _checked(
        self, a: Tensor, b: Tensor, out_dtype: torch.dtype | None, out: Tensor | None
    ) -> torch.dtype:
        dtype = a.dtype if out_dtype is None else out_dtype
        assert a.dtype == b.dtype in (torch.bfloat16, torch.float16) and dtype in (
            a.dtype,
            torch.float32,
        )
        assert a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and min(*a.shape, *b.shape) > 0
        for x in (a, b):  # one dimension must be contiguous: otherwise the operand is copied first
            assert any(x.stride(i) == 1 and x.stride(1 - i) >= x.shape[i] for i in (0, 1)), (
                x.shape,
                x.stride(),
            )
        if out is not None:
            assert out.dtype == dtype and out.shape == (a.shape[0], b.shape[1])
            assert out.stride(1) == 1 and out.stride(0) >= out.shape[1]
            assert not any(overlap(out, x) for x in (a, b)), "a product writes where it reads"
        return dtype


def apart_or_in_place(logits: Tensor, out: Tensor) -> bool:
    """Whether a row kernel may write a gradient there:

    element for element over its logits, or elsewhere.
    """
    same = (
        out.dtype == logits.dtype
        and out.stride() == logits.stride()
        and out.storage_offset() == logits.storage_offset()
    )
    return out.shape == logits.shape and (same or not overlap(logits, out))


@contextlib.contextmanager
def of_a_gpu(adds: bool = True) -> Iterator[list[Product]]:
    """A context in which products are recorded."""
    stand_ins = GpuProducts(adds)
    tried = matmuls.can_add_to_fp32.__wrapped__

    def adds_widened(device: torch.device) -> bool:
        before = len(stand_ins.made)
        found = tried(device)
        del stand_ins.made[before:]  # what it tries is none of the engine's
        return found

    with (
        mock.patch.object(matmuls, "has_fp32_accumulators", lambda device: True),
        mock.patch.object(matmuls, "can_add_to_fp32", adds_widened),
        mock.patch.object(torch, "mm", stand_ins.mm),
        mock.patch.object(torch, "addmm", stand_ins.addmm),
        mock.patch.object(
            torch, "is_autocast_enabled", lambda *_: False
        ),  # which does not know "meta"
        mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext()),
    ):
        yield stand_ins.made


class NoRows(eager.Kernels):
    """Row kernels that do nothing and take no memory, for tensors without values."""

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        return SoftmaxSums.masked(names, rows.num_rows, rows.logits.device)

    def run_gradient_kernel(
        self, rows: LogitRows, sums: Any, coefficients: Any, out: Tensor
    ) -> None:
        assert apart_or_in_place(rows.logits, out)

    def fused_loss(self, rows: LogitRows, loss_formula: Any, out: Tensor | None) -> FusedLossValues:
        assert out is None or apart_or_in_place(rows.logits, out)
        return FusedLossValues(rows.logits.new_empty(3, rows.num_rows))

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        pass


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes of tensors made inside that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            StorageWeakRef(x.untyped_storage()).cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
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
