"""How the Triton kernels are launched: threads, loads in flight, registers, grids, cache hints; and on which device.

These choices affect results only through the order of sums, which depends on the vocabulary, dtypes and strides, never on the
number of rows. `benchmarks.tune` times other choices; `benchmarks.resources` reads from the binaries what they need."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton

from .triton_kernels import _stats_kernel
from .triton_launch import Launch

Tensor = torch.Tensor

INTERPRETED = not isinstance(_stats_kernel, triton.runtime.jit.JITFunction)


class Choice(NamedTuple):
    """Launch settings of one kind of kernel, for long rows. Shorter rows use fewer accesses, then fewer threads."""

    threads: int  # of a program
    accesses: int  # 128-bit loads that a thread has in flight
    programs: int = 1  # programs resident on a multiprocessor, which share its registers
    ends: int = 1  # the last tiles of a row, loaded at once
    kept: int = 0  # how many of these stay in registers between the first and the second pass over a row
    grid: float = 0.0  # fused kernel: programs per multiprocessor, each looping over rows; 0: one program per row
    hints: bool = False  # cache hints: keep data that is read again, evict the rest
    stages: int = 1  # tiles that are computed or on their way at a time: 3 lets two arrive while one is computed


#: kind of kernel -> its choice. By reasoning and from the binaries, not from measurements: no GPU has timed them yet.
#: 32 KiB in flight is a little over what 4.8 TB/s times 0.7 us of latency ask of each of 132 multiprocessors (25 KiB).
#:   visit    one pass over a row. Two programs, so that one loads while the other reduces at the end of its row.
#:   fused    two passes over a row, and the values that live across the loops need more than 64 registers. One program by
#:            registers: 132 rows of 152k bf16 logits (39 MB) stay in the 50 MB L2 of a Hopper GPU from first to second read,
#:            twice as many would not. A program a row: where another stream holds multiprocessors, no row waits for them.
#:            The end of a row stays in registers, so the second pass starts without a load.
#:   fused32  the same with fp32 logits, of which more than fits goes through L2: as much of a row in registers as there is
#:            room for. `grid` 0.5 halves the rows in flight, and so lets whole rows stay in L2 with half the multiprocessors.
#:            With a softcap and an fp32 gradient ("capped32") one tile less is kept: tanh, and a gradient that is as wide as the
#:            logits, take its registers (Triton 3.8 spilled 48 bytes a thread to keep it).
#:   two      one pass over a row and its teacher's, with twice the loads and sums of `visit`: one program by registers.
#:   mixed    the same for the sums of a mixture, whose hundred instructions a logit hide any load.
#:   select   columns of a sparse gradient. A thread's numbers are neighbours, so that a scan exchanges little; a scan of eight of
#:            them takes more than 64 registers.
#:   slots    products over the slots of kept sets, whose programs read two rows or more before they wait.
#: Three stages copy tiles of a row into shared memory while others are computed (cp.async): of `fused` 32 KiB are on their way
#: while it computes and 64 while it waits, instead of none and 32, for an instruction more a logit and pass and two barriers a
#: tile. Triton 3.6 drops the cache hints of what is copied.
LAUNCH = {
    "visit": Choice(512, 2, programs=2, ends=2, stages=3),
    "fused": Choice(512, 4, ends=2, kept=1, hints=True, stages=3),
    "fused32": Choice(512, 4, ends=3, kept=3, hints=True, stages=3),
    "two": Choice(512, 2),
    "mixed": Choice(512, 1),
    "select": Choice(256, 1, programs=2),
    "slots": Choice(128, 1, programs=4),
}
FUSED = ("fused", "fused32", "capped32")
#: Programs of `scale_`: a few for each multiprocessor of the largest GPUs, and few enough to return at once when there is
#: nothing to do.
SCALE_PROGRAMS = 512


def fused_kind(logits: torch.dtype, gradient: torch.dtype, softcap: float) -> str:
    """The kind of the fused kernel."""
    if logits.itemsize < 4:
        return "fused"
    return "capped32" if softcap and gradient.itemsize == 4 else "fused32"


def choice_of(kind: str) -> Choice:
    """The entry of LAUNCH."""
    return LAUNCH[{"scale": "visit", "capped32": "fused32"}.get(kind, kind)]


def choose(kind: str, columns: int, tensors: tuple[Tensor, ...], halvings: int) -> Launch:
    """The tile for rows of `columns`, halved so often; `tensors` are [A, T, V], the first sets the width of an access.

    Half a tile is half of what each thread has in flight and then, once that is one access, half the threads."""
    cols = 16 // tensors[0].element_size()
    # Both strides count, whatever the sizes, so that a dimension of size 1 does not select another kernel.
    aligned, behind = True, set()
    for x in set(tensors):  # one, where the gradient is written in place
        (A, T, _), (of_a, of_t, _) = x.shape, x.stride()
        aligned = aligned and of_a % 16 == 0 == of_t % 16
        behind.add((of_a % cols if A > 1 else 0, of_t % cols if T > 1 else 0, x.data_ptr() // x.element_size() % cols))
    # Unaligned gradients are written 16 bytes at a time too, if each of their rows has the same offset from a 16-byte boundary
    # as its logits. So only strides modulo an access matter, and the stride of a dimension of size 1 does not.
    peeled = not aligned and len(tensors) == 2 and len(behind) == 1
    device = None if INTERPRETED else triton.runtime.driver.active
    index = tensors[0].device.index
    return _launch(kind, choice_of(kind), columns, cols, aligned, peeled, halvings, device, index)


@functools.lru_cache(maxsize=256)
def _launch(
    kind: str, choice: Choice, columns: int, cols: int, aligned: bool, peeled: bool, halvings: int, driver: Any, index: int | None
) -> Launch:  # fmt: skip
    """As `choose`, from numbers. `driver` and `index` name the device, whose target `options` asks for."""
    full, row = choice.threads * choice.accesses, triton.next_power_of_2(triton.cdiv(columns, cols))
    accesses = max(32, min(full, row) >> halvings)
    lanes = min(choice.threads, accesses)
    flags = {"ALIGNED": aligned, "LANES": lanes, "COLS": cols, "ACCESSES": accesses // lanes}
    if kind in ("visit", *FUSED):
        tiles = triton.cdiv(columns, accesses * cols)
        ends = min(choice.ends, tiles) if aligned else 1  # single elements take more registers
        first, last = ("evict_last", "evict_first") if choice.hints else ("", "")
        flags |= {
            "PEELED": peeled,
            "ENDS": ends,
            "KEPT": min(choice.kept, choice.ends - (kind == "capped32"), ends) if aligned else 0,
        }
        flags |= {"FIRST_HINT": first, "LAST_HINT": last, "STAGES": choice.stages if tiles > ends and _copies_ahead() else 1}
    return Launch(
        flags,
        options(lanes, choice.programs, kind not in ("two", "mixed")),
        max(1, choice.programs * choice.threads // lanes),
    )


def _copies_ahead() -> bool:
    """Whether tiles are copied into shared memory while others are computed: from sm_90 on. An A100 needs less in flight, and for
    AMD Triton keeps the tiles in registers, which it then spills."""
    if INTERPRETED:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def options(lanes: int, programs: int, fusion: bool = True) -> dict[str, Any]:
    """Options of Triton's compiler for the number of threads in a program and of full-size programs that share a multiprocessor.
    `fusion`: of multiplications and additions, which rounds once instead of twice."""
    if INTERPRETED:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    # Not every version fuses multiplications and additions by default.
    found: dict[str, Any] = {"num_warps": max(1, lanes // target.warp_size), "enable_fp_fusion": fusion}
    if target.backend == "cuda":
        # Left alone, ptxas may spill a few bytes to make room for one more program.
        found["maxnreg"] = min(255, 65536 // (lanes * programs))
    return found


# ---- devices


def available() -> str | None:
    """None when the kernels can run here, else the reason in words."""
    if INTERPRETED:
        return None
    if not any(backend.driver.is_active() for backend in triton.backends.backends.values()):
        return "Triton finds no device that it has a driver for (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    return driver_failure()


@functools.cache
def driver_failure() -> str | None:
    """Why Triton cannot use the device, or None. On first use it builds its launcher with the C compiler of the system."""
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # errors of a compiler, a linker, a file system
        return f"Triton cannot start ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    return None


def serves(device: torch.device) -> bool:
    """Whether Triton's driver handles tensors on this device: "cuda" is NVIDIA and AMD, "xpu" Intel. For AMD the kernels have
    been compiled and have budgets; for Intel they have not been compiled. They have been run on neither."""
    if INTERPRETED:
        return True
    return device.type != "cpu" and bool(triton.runtime.driver.active.get_active_torch_device().type == device.type)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if x.device.type == "cpu" else torch.get_device_module(x.device).device(x.device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["multiprocessor_count"])
