"""Triton backend: a program processes one row at a time, and reads it once from device memory and once from L2.

There are no RL formulas here: `fused` compiles those of token_stage.py into its kernel, see triton_formulas.py. Row
counts, strides, scalars and parameters are runtime values, so no length and no schedule compiles anything after the first
call of a kind; what is compile-time is the vocabulary's size class, dtypes, alignment and the presence of optional inputs.
A kernel that does not fit or compile gets a smaller tile and then raises KernelFailure, see triton_launch.py.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
import triton

from ...formulas import token_stage
from ..rows import PARTIALS, RowStats, RowTransform, Slopes
from . import FusedRows
from .triton_formulas import compiled_formula
from .triton_kernels import _fused_kernel, _pull_kernel, _scale_kernel, _stats_kernel
from .triton_launch import Launch, run
from .triton_sparse import add_hidden_rows, add_weight_rows, slot_logits  # noqa: F401

if TYPE_CHECKING:
    from ...formulas.token_stage import TokenRows
    from ...objective import Objective

Tensor = torch.Tensor

WRITES_BEHIND_READS = False  # many threads write at once, and from the end of the row

#: kind of kernel -> (threads of a program, 128-bit accesses in flight per thread), for rows long enough to fill them.
#: 32 KiB in flight is a little over what 4.8 TB/s times 0.7 us of latency ask of each of 132 SMs (25 KiB).
#:   visit  a row is gone over once: as many threads as a program can have, so that loads and arithmetic of its warps mix;
#:          64 registers each hold the tile.
#:   fused  a row is gone over twice, and what lives across the loops needs more than 64 registers: half the threads, with
#:          128 registers each. Its grid is one program per SM, each taking one row after the other: 132 rows of 152k bf16
#:          logits (39 MB) stay in the 50 MB L2 of a Hopper GPU from first to second read, twice as many would not.
#: Short rows take fewer threads, and the fused grid as many more programs. All depends on V and dtype, never on n.
LAUNCH = {"visit": (1024, 2), "fused": (512, 4)}
#: Programs of `scale_`: a few for each SM of the largest GPUs, and few enough to return at once when there is nothing to do.
SCALE_PROGRAMS = 512

_INTERPRETED = not isinstance(_stats_kernel, triton.runtime.jit.JITFunction)


def available() -> str | None:
    """None when the kernels can run here, else the reason in words."""
    if _INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "no CUDA or HIP device is visible (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    return _driver_failure()


@functools.cache
def _driver_failure() -> str | None:
    """Why Triton cannot use the GPU, or None. On first use it builds its launcher with the C compiler of the system."""
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # of a compiler, a linker, a file system
        return f"Triton cannot start ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    return None


def _launch(kind: str, columns: int, tensors: tuple[Tensor, ...], halvings: int) -> Launch:
    """The tile for rows of `columns`, halved so often; `tensors` are [A, T, V], the first sets the width of an access.

    Half a tile is half of what each thread has in flight and then, once that is one access, half the threads."""
    threads, accesses = LAUNCH[kind]
    cols = 16 // tensors[0].element_size()
    lanes = max(32, min(threads * accesses, triton.next_power_of_2(triton.cdiv(columns, cols))) >> halvings)
    # Both strides count, whatever the sizes, so that a dimension of size 1 does not select another kernel.
    aligned = all(x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0 for x in tensors)
    per_sm = max(1, threads // lanes)
    return Launch({"ALIGNED": aligned, "LANES": lanes, "COLS": cols}, _options(min(threads, lanes)), per_sm)


def _options(threads: int) -> dict[str, int]:
    if _INTERPRETED:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    options = {"num_warps": max(1, threads // target.warp_size)}
    if target.backend == "cuda":
        # Left alone, ptxas may spill a few bytes to make room for one more program per SM.
        options["maxnreg"] = min(255, 65536 // threads)
    return options


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _check_layout(logits: Tensor, out: Tensor | None, n: int) -> None:
    assert logits.dim() == 3 and (logits.stride(2) == 1 or logits.shape[2] == 1), (logits.shape, logits.stride())
    assert out is None or (out.shape == logits.shape and (out.stride(2) == 1 or out.shape[2] == 1)), (out.shape, out.stride())
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), logits.dtype
    assert 0 <= n < 2**31 - 2**16 and 0 < logits.shape[2] < 2**31 - 2**16, (n, logits.shape)


def _transform_arguments(transform: RowTransform) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inverse: Any = transform.inv_temperature
    per_row = isinstance(inverse, Tensor)
    shape = "softcap" if transform.softcap != 0 else "linear" if transform.scale >= 0 else "mirrored"
    values = (inverse.contiguous() if per_row else float(inverse), float(transform.scale), float(transform.softcap))
    return values, {"SHAPE": shape, "ROW_TEMPERATURE": per_row}


def _vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def stats(
    logits: Tensor,
    targets: Tensor,
    read: Tensor | None,
    transform: RowTransform,
    names: tuple[str, ...],
    *,
    rows: tuple[int, int] | None = None,
) -> RowStats:
    """Partials of each row of logits [A, T, V]. `rows` = (lo, hi) takes those flat rows; vectors are [hi - lo]."""
    A, T, V = logits.shape
    lo, hi = (0, A * T) if rows is None else rows
    n = hi - lo
    _check_layout(logits, None, n)
    result = RowStats.empty(names, n, logits.device)
    if n == 0:
        return result
    with _on_device(logits):
        scalars, flags = _transform_arguments(transform)
        arguments = (
            logits, logits.stride(0), logits.stride(1), V, T, lo, _vector(targets), _vector(read), *scalars,
            *map(result.get, PARTIALS),
        )  # fmt: skip
        run(_stats_kernel, functools.partial(_launch, "visit", V, (logits,)), lambda _: n, arguments, flags)
    return result


def pull(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    slopes: Slopes,
    transform: RowTransform,
    out: Tensor,
    *,
    rows: tuple[int, int] | None = None,
) -> None:
    """d logits into `out` [A, T, V], which may be the logits. Rows whose slopes are 0 become 0 and are not read."""
    A, T, V = logits.shape
    lo, hi = (0, A * T) if rows is None else rows
    n = hi - lo
    _check_layout(logits, out, n)
    if n == 0:
        return
    with _on_device(logits):
        scalars, flags = _transform_arguments(transform)
        arguments = (
            logits, logits.stride(0), logits.stride(1), out, out.stride(0), out.stride(1), V, T, lo,
            *map(_vector, (targets, stats.max, stats.sum, stats.target, *slopes)), *scalars,
        )  # fmt: skip
        run(_pull_kernel, functools.partial(_launch, "visit", V, (logits, out)), lambda _: n, arguments, flags)


def fused(
    logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None
) -> FusedRows:  # fmt: skip
    """Per-token losses and, with `out`, d loss / d logits, in one visit of each row. Token-level objectives only."""
    assert objective.one_pass, objective
    A, T, V = logits.shape
    n = A * T
    _check_layout(logits, out, n)
    formulas = {
        name: compiled_formula(value) if callable(value) else value for name, value in token_stage.formulas(objective).items()
    }
    logps, entropies, losses = torch.empty(3, n, dtype=torch.float32, device=logits.device).unbind(0)
    if n == 0:
        return FusedRows(logps, entropies, losses)
    with _on_device(logits):
        gradient = logits if out is None else out  # without a gradient the strides are not used
        multiprocessors = _multiprocessors(logits.device)
        scalars, flags = _transform_arguments(transform)
        arguments = (
            logits, logits.stride(0), logits.stride(1), out, gradient.stride(0), gradient.stride(1), V, T, n,
            *map(_vector, (rows.targets, rows.read, rows.old_logps, rows.ref_logps, rows.sampler_logps, rows.advantages)),
            *map(_vector, (rows.policy_weight, rows.kl_weight, rows.entropy_weight, rows.nll_weight)), *scalars,
            *token_stage.scalars(objective).values(), logps, entropies, losses,
        )  # fmt: skip
        run(
            _fused_kernel, functools.partial(_launch, "fused", V, (logits, gradient)),
            lambda launch: min(n, multiprocessors * launch.programs_per_sm),
            arguments, {"TERMS": compiled_formula(token_stage.token_terms), **formulas, **flags},
        )  # fmt: skip
    return FusedRows(logps, entropies, losses)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor, a 0-d tensor. The kernel reads the factor: a factor of 1 costs a launch only, and no host sync."""
    if gradient.numel() == 0:
        return
    # One row when contiguous. Its stride is never used; 0 keeps the length from selecting a kernel.
    view = gradient.as_strided((1, 1, gradient.numel()), (0, 0, 1)) if gradient.is_contiguous() else gradient
    assert view.dim() == 3 and view.stride(2) == 1, (gradient.shape, gradient.stride())
    A, T, V = view.shape
    with _on_device(gradient):
        run(
            _scale_kernel,
            functools.partial(_launch, "visit", 2**31, (view,)),
            lambda launch: min(A * T * triton.cdiv(V, launch.flags["LANES"] * launch.flags["COLS"]), SCALE_PROGRAMS),
            (view, view.stride(0), view.stride(1), V, T, A * T, factor),
            {},
        )
