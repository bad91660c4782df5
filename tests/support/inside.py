"""Helpers with which tests look inside the package.

Tests use it to set chunk sizes, choose instruction sets, count matmuls, and measure memory. It also
has stand-ins for the matmuls of a GPU, which check their arguments.
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

#: The module that decides the sizes of chunks and blocks.
blocks = linear_memory
#: Second word of the executor that computes matmuls with a library instead of the package's code.
LIBRARY = "library"


def executors() -> list[str]:
    """Return the names of all ways to compute on this machine, for `executor`.

    These are "eager" (PyTorch), "cpu ISA" for each instruction set ISA of the C++ code, and "cpu
    library" if the package has its own code for matmuls on this machine. The environment variable
    GRPO_KERNELS_TEST_BACKENDS can name other backends, separated by spaces. Its default is "eager
    cpu".
    """
    cpu_executors = []
    if _cpu:
        cpu_executors += [f"cpu {isa}" for isa in _cpu.isas()]
    if not cpu_matmuls.unavailable_reason():
        cpu_executors.append(f"cpu {LIBRARY}")
    names = []
    for backend in os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "eager cpu").split():
        names += cpu_executors if backend == "cpu" else [backend]
    return names


@contextmanager
def executor(name: str) -> Iterator[str]:
    """Compute with one of `executors` within the block. Yields the name of its backend.

    name   the backend, optionally followed by a space and an instruction set or "library"
    """
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
                _cpu.use_isa(_cpu.isas()[0])  # the best one, which is the default


def our_products(dtype: torch.dtype) -> bool:
    """Return whether the package's own code computes matmuls of hidden states of this dtype.

    Only then is the result of a row independent of the other rows, bit for bit.
    """
    return cpu_matmuls.unavailable_reason() is None and dtype in cpu_matmuls.OPERANDS


def in_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, block: int | None = None) -> None:
    """Process chunks of `rows` rows, fewer than a real plan has, so that small cases have several.

    block   rows of a block if 16-bit gradients of logits have a buffer; otherwise, and with None,
            each chunk is a block
    """

    def plan(memory: LinearMemory, *_: Any, **__: Any) -> ChunkPlan:
        """Replace LinearMemory.plan, whose arguments (sizes) do not change this plan."""
        has_several_chunks = block is not None and memory.has_grad_buffer
        return ChunkPlan(rows, block if has_several_chunks else rows)

    monkeypatch.setattr(LinearMemory, "plan", plan)


def values_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the checks of tensor values, as on a GPU, where the host would wait for them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("grpo_kernels") and hasattr(module, "values_are_checked"):
            monkeypatch.setattr(module, "values_are_checked", lambda _: False)


def count_products(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the rows that each of the package's three matmuls gets from now on.

    Returns a counter {matmul: number of rows}, which grows. Its keys are "logits" (hidden @
    weight.T), "d_hidden" (grad_logits @ weight) and "d_weight" (grad_logits.T @ hidden).
    """
    num_rows: Counter[str] = Counter()
    make_matmuls = linear.make_matmuls

    def make_counting_matmuls(*args: Any) -> Any:
        """Return what the package's make_matmuls returns, with methods that count their rows."""
        matmuls = make_matmuls(*args)
        for method in _COUNTED_MATMULS:
            matmul = getattr(matmuls, method.name)
            setattr(matmuls, method.name, _counting(matmul, method, num_rows))
        return matmuls

    monkeypatch.setattr(linear, "make_matmuls", make_counting_matmuls)
    return num_rows


class _CountedMatmul(NamedTuple):
    """A method of the package's matmuls, and the argument [num_rows, ...] that has its rows."""

    name: str
    key: str  # in the counter
    keyword: str  # the name of the argument
    position: int  # of the argument, if it is passed by position


_COUNTED_MATMULS = (
    _CountedMatmul("logits", "logits", "hidden", 0),
    _CountedMatmul("grad_hidden", "d_hidden", "grad_logits", 0),
    _CountedMatmul("add_grad_weight", "d_weight", "grad_logits", 1),
)


def _counting(
    matmul: Callable[..., Any], method: _CountedMatmul, num_rows: Counter[str]
) -> Callable[..., Any]:
    """Return a function that calls `matmul` and adds its number of rows to the counter.

    matmul     a bound method of the package's matmuls
    method     says which of its arguments has the rows
    num_rows   the counter
    """

    def counting_matmul(*args: Any, **kwargs: Any) -> Any:
        """Count the rows, and return matmul(*args, **kwargs)."""
        if method.keyword in kwargs:
            matrix = kwargs[method.keyword]
        else:
            matrix = args[method.position]
        num_rows[method.key] += matrix.shape[0]
        return matmul(*args, **kwargs)

    return counting_matmul


def backends_that_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which backend computes softmax sums from now on.

    Returns a list, to which "eager" or "cpu" is appended at each such computation. The test is
    skipped if there is no C++ backend.
    """
    names: list[str] = []
    if backends.unavailable("cpu"):
        pytest.skip("needs two backends")
    for name in ("eager", "cpu"):
        kernels = backends.load(name).Kernels

        # A closure would see the values of the last iteration. Defaults keep those of this one.
        def record_and_run(
            *args: Any, original: Any = kernels.run_sums_kernel, name: str = name
        ) -> Any:
            """Replace the method run_sums_kernel of a backend: record the backend, then run it."""
            names.append(name)
            return original(*args)

        monkeypatch.setattr(kernels, "run_sums_kernel", record_and_run)
    return names


def only_eager(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Make all backends but eager PyTorch unavailable, and forget which warnings were given.

    reason   why they are unavailable
    """
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name == "eager" else reason)
    monkeypatch.setattr("grpo_kernels.checks._warned", set())


def blocks_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let eager code process one row of given logits at a time."""
    monkeypatch.setattr(backends.load("eager"), "block_bytes", lambda device: 1)


def traced_stages(backend: str, dtype: torch.dtype) -> list[tuple[Callable[..., Any], bool]]:
    """Return functions whose operators torch.compile puts into its graph.

    Returns two pairs (function, whether it takes hidden states). The first function computes
    (log-probs, entropies) [num_rows] from (targets, logits), the second one from (targets, hidden
    states, weight, bias). See `rows_of_logits` and `rows_of_head` for the strides of the tensors.

    backend   name of the backend
    dtype     of the matmuls
    """
    transform = RowTransform(1.0, 0.0, 0.7)  # temperature 0.7

    def from_logits(targets: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (log-probs, entropies) from logits."""
        source = CompiledLogits(logits, transform, None, backend=backend)
        statistics = source.statistics(targets, None, ("entropy",))
        return statistics["logps"], statistics["entropy"]

    def from_hidden(
        targets: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return (log-probs, entropies) from hidden states and a head."""
        projection = Projection(hidden, weight, bias, transform, dtype)
        source = CompiledProjection(projection, None, backend=backend)
        statistics = source.statistics(targets, None, ("entropy",))
        return statistics["logps"], statistics["entropy"]

    return [(from_logits, False), (from_hidden, True)]


def rows_of_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [B, T, V] with the strides that the functions of `traced_stages` need."""
    return as_3d_logits(logits, logits.shape[:2], logits.device)


def rows_of_head(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> list[torch.Tensor]:
    """Return [hidden, weight, bias] with the strides that the functions of `traced_stages` need."""
    return [with_unit_stride(hidden), with_unit_stride(weight), bias]


class Allocations(TorchDispatchMode):
    """A context that records the shapes of new tensors, which operators return.

    Views of arguments and empty tensors are not recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of PyTorch, and record the shapes of results in new memory."""
        out = func(*args, **(kwargs or {}))
        argument_memory = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        for x in tree_leaves(out):
            if not isinstance(x, Tensor) or x.numel() == 0:
                continue
            if x.untyped_storage().data_ptr() not in argument_memory:
                self.shapes.append(tuple(x.shape))
        return out


# ---- the engine's code for a GPU: in `of_a_gpu`, tensors on a CPU or on "meta", which has no
# values, take the path of bf16 on CUDA

#: The original, which stand-ins for it call.
MM = torch.mm


class Product(NamedTuple):
    """A matmul [m, k] x [k, n] that was computed."""

    m: int
    k: int
    n: int
    dtype: torch.dtype  # of the result
    added: bool = False  # whether the result was added to existing values


class GpuProducts:
    """Stand-ins for torch.mm and torch.addmm with 16-bit operands, with the rules of CUDA.

    `made` lists their calls in order. A matmul of fp32 matrices is computed but not listed.

    adds    whether addmm can add to an fp32 matrix, as in torch 2.10 and later
    """

    def __init__(self, adds: bool = True) -> None:
        self.adds = adds
        self.made: list[Product] = []

    def mm(
        self,
        a: Tensor,
        b: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Replace torch.mm: return a @ b, [m, k] x [k, n]. On "meta" the result has no values.

        out_dtype   of the result, fp32 or the dtype of a; None: the dtype of a
        out         memory for the result; None: new memory
        """
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
        """Replace torch.addmm: add a @ b to `total` [m, n] in place, and return it.

        out_dtype   the dtype of `total`
        out         must be `total` itself

        Raises RuntimeError, as older PyTorch does, if `total` is fp32 and `adds` is False.
        """
        if not self.adds and total.dtype != a.dtype:
            raise RuntimeError("self and mat2 must have the same dtype")
        assert total is out, "another sum would be copied into the result"
        self._checked(a, b, out_dtype, out)
        self.made.append(Product(*a.shape, b.shape[1], out_dtype, added=True))
        return out if a.is_meta else out.add_(a.float() @ b.float())

    def _checked(
        self, a: Tensor, b: Tensor, out_dtype: torch.dtype | None, out: Tensor | None
    ) -> torch.dtype:
        """Assert that cuBLAS can compute a @ b without copies. Return the dtype of the result.

        a, b        [m, k] and [k, n], both bf16 or both fp16
        out_dtype   of the result; None: the dtype of a
        out         memory for the result [m, n], or None
        """
        dtype = a.dtype if out_dtype is None else out_dtype
        assert a.dtype == b.dtype
        assert a.dtype in (torch.bfloat16, torch.float16)
        assert dtype in (a.dtype, torch.float32)
        assert a.dim() == b.dim() == 2
        assert a.shape[1] == b.shape[0]
        assert min(*a.shape, *b.shape) > 0
        for x in (a, b):
            # One dimension must be contiguous, otherwise the operand is copied first.
            is_by_column = x.stride(0) == 1 and x.stride(1) >= x.shape[0]
            is_by_row = x.stride(1) == 1 and x.stride(0) >= x.shape[1]
            assert is_by_column or is_by_row, (x.shape, x.stride())
        if out is not None:
            assert out.dtype == dtype and out.shape == (a.shape[0], b.shape[1])
            assert out.stride(1) == 1 and out.stride(0) >= out.shape[1]
            assert not any(overlap(out, x) for x in (a, b)), "a product writes where it reads"
        return dtype


def apart_or_in_place(logits: Tensor, out: Tensor) -> bool:
    """Return whether a row kernel may write the gradient of these logits to `out`.

    `out` must have the shape of the logits. It must be the logits themselves, element for element,
    or memory without an overlap, so that no logit is overwritten before it is read.
    """
    is_in_place = (
        out.dtype == logits.dtype
        and out.stride() == logits.stride()
        and out.storage_offset() == logits.storage_offset()
    )
    return out.shape == logits.shape and (is_in_place or not overlap(logits, out))


@contextlib.contextmanager
def of_a_gpu(adds: bool = True) -> Iterator[list[Product]]:
    """Let the engine use its code for a GPU on tensors of other devices, within the block.

    Yields a list, to which each matmul of 16-bit matrices is appended.

    adds   see `GpuProducts`
    """
    stand_ins = GpuProducts(adds)
    # The function under functools.cache. The cache may have the answer of the real torch.addmm, and
    # would keep the answer of the stand-in after the block.
    can_add_to_fp32 = matmuls.can_add_to_fp32.__wrapped__

    def can_add_to_fp32_unrecorded(device: torch.device) -> bool:
        """Replace can_add_to_fp32, which tries torch.addmm, without a trace in the list."""
        num_made = len(stand_ins.made)
        answer = can_add_to_fp32(device)
        del stand_ins.made[num_made:]
        return answer

    with (
        mock.patch.object(matmuls, "has_fp32_accumulators", lambda device: True),
        mock.patch.object(matmuls, "can_add_to_fp32", can_add_to_fp32_unrecorded),
        mock.patch.object(torch, "mm", stand_ins.mm),
        mock.patch.object(torch, "addmm", stand_ins.addmm),
        # Autocast does not know the device "meta".
        mock.patch.object(torch, "is_autocast_enabled", lambda *_: False),
        mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext()),
    ):
        yield stand_ins.made


class NoRows(eager.Kernels):
    """Row kernels that compute nothing and take no memory, for tensors on "meta".

    They have the methods of a backend's kernels, and assert where a gradient may be written.
    """

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return sums with the values of masked rows."""
        return SoftmaxSums.masked(names, rows.num_rows, rows.logits.device)

    def run_gradient_kernel(
        self, rows: LogitRows, sums: Any, coefficients: Any, out: Tensor
    ) -> None:
        """Leave `out` unchanged."""
        assert apart_or_in_place(rows.logits, out)

    def fused_loss(self, rows: LogitRows, loss_formula: Any, out: Tensor | None) -> FusedLossValues:
        """Return uninitialised losses, log-probs and entropies, and leave `out` unchanged."""
        assert out is None or apart_or_in_place(rows.logits, out)
        return FusedLossValues(rows.logits.new_empty(3, rows.num_rows))

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """Leave the gradient unchanged."""


class LiveBytes(TorchDispatchMode):
    """A context that measures the memory of the tensors that operators make.

    `peak` is the largest number of bytes that were alive at a time. Memory that existed before does
    not count. It also works on "meta", where tensors have no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        #: {address of a storage: (weak reference, bytes)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of PyTorch, and update `peak` with the memory of its results."""
        argument_storages = {
            StorageWeakRef(x.untyped_storage()).cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in argument_storages:
                    self._alive[reference.cdata] = (reference, storage.nbytes())
        self._alive = {
            address: (reference, size)
            for address, (reference, size) in self._alive.items()
            if not reference.expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out
