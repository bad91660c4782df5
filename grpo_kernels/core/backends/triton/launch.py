"""How the Triton kernels are launched: with which device, threads, tiles and arguments.

Choices of threads, loads in flight, registers and cache hints affect results only through the order
of sums. This depends on the vocabulary, dtypes and strides, never on the number of rows.
`benchmarks.tune` times other choices; `benchmarks.resources` reads from the binaries what they
need.

A kernel that does not compile, or needs more than the GPU has, is retried with smaller tiles. It is
retried only if it failed before it started, because its output may overwrite its input. If a
smaller tile works there is one warning. If none does, `KernelFailure` is raised. Both outcomes are
remembered, so later calls compile nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....checks import warn_once
from ....formulas.program import Program
from ....formulas.token_inputs import PROGRAM_INPUTS
from ...softmax import LogitRows, RowTransform, SoftmaxSums
from .kernels import softmax_sums_kernel
from .softmax_rows import Transform, tanh

#: Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1).
INTERPRETED = not isinstance(softmax_sums_kernel, triton.runtime.jit.JITFunction)

#: Rows and columns are int32 in the kernels, also those of a tile that ends behind the last column.
MAX_SIZE = 2**31 - 2**16

#: Bytes of the widest access of a thread.
ACCESS_BYTES = 16

#: The compute capability from which on Triton copies tiles into shared memory ahead (sm_90).
COPIES_AHEAD_FROM = 90

#: Registers of a multiprocessor, and the most that a thread may have.
REGISTERS = 65536
MAX_REGISTERS = 255

# ---- devices


def unavailable_reason() -> str | None:
    """Return None if the kernels can run here, or else the reason."""
    if INTERPRETED:
        return None
    if not any(backend.driver.is_active() for backend in triton.backends.backends.values()):
        return (
            "Triton finds no device that it has a driver for (TRITON_INTERPRET=1 runs the kernels"
            " on the CPU, slowly)"
        )
    return driver_failure()


@functools.cache
def driver_failure() -> str | None:
    """Return why Triton cannot use the device, or None.

    On first use it builds its launcher with the C compiler of the system.
    """
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # errors of a compiler, a linker, a file system
        first_line = str(error).strip().partition("\n")[0]
        return f"Triton cannot start ({type(error).__name__}: {first_line})"
    return None


def serves(device: torch.device) -> bool:
    """Return whether Triton's driver handles tensors on a device.

    "cuda" is NVIDIA and AMD, "xpu" Intel. For AMD the kernels have been compiled and have budgets.
    For Intel they have not been compiled. They have been run on neither.
    """
    if INTERPRETED:
        return True
    if device.type == "cpu":
        return False
    return bool(triton.runtime.driver.active.get_active_torch_device().type == device.type)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the device of x is the current one."""
    if x.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(x.device).device(x.device)


# ---- threads and tiles


class Choice(NamedTuple):
    """Launch settings of one kind of kernel, for long rows.

    Shorter rows use fewer accesses, then fewer threads.

    threads    threads of a program
    accesses   128-bit loads that a thread has in flight
    programs   programs resident on a multiprocessor, which share its registers
    ends       the last tiles of a row, loaded at once
    kept       how many of these stay in registers between the two passes over a row
    hints      whether cache hints keep data that is read again, and evict the rest
    stages     tiles that are computed or being loaded at a time: with 3, two are loaded while one
               is computed
    """

    threads: int
    accesses: int
    programs: int = 1
    ends: int = 1
    kept: int = 0
    hints: bool = False
    stages: int = 1


#: kind of kernel -> its choice: near the fastest that an H100 and an H200 timed with Triton 3.6,
#: without spills on Triton 3.9 too.
#:
#:     one_pass    one pass over a row. Two programs, so that one loads while the other reduces at
#:                 the end of its row.
#:     fused       two passes over a row. One program: 132 rows of 152k bf16 logits (39 MB) stay in
#:                 the 50 MB L2 of an H100 from first to second read if hints keep them there, but
#:                 for a sixth; twice as many rows do not. With one program per row, no row waits if
#:                 another CUDA stream holds multiprocessors. 1024 threads are 4 % faster, and spill
#:                 on Triton 3.9.
#:     fused32     the same with fp32 logits, half of which are read from memory again: as much of a
#:                 row in registers as fits. None of it is kept with a softcap ("capped32"), since
#:                 tanh takes its registers and more time than a load. Nor is it kept of a row that
#:                 ends within an access, whose end is read by single elements: Triton 3.9 spilled
#:                 40 to 168 bytes a thread.
#:     reference   one pass over a row and the reference's, with twice the loads and sums of
#:                 one_pass
#:     mixture     the same for the sums of a mixture, whose hundred instructions a logit hide any
#:                 load, and for gradients with tanh, which have fifty to ninety (Triton 3.9 spilled
#:                 to keep twice the loads of fp16 logits)
#:     vectors     a formula, whose numbers are single loads of a thread
#:     pairs       pairs of hidden states and weight; programs read two rows or more before they
#:                 wait
#:
#: Three stages copy tiles of a row into shared memory while others are computed (cp.async), and
#: Triton 3.6 drops the cache hints of what is copied. That is good for one pass over a row. Two
#: passes are 11 to 21 % slower with it, since they then read half of a row from memory again.
LAUNCH = {
    "one_pass": Choice(512, 2, programs=2, ends=2, stages=3),
    "fused": Choice(512, 4, ends=2, kept=1, hints=True),
    "fused32": Choice(512, 4, ends=3, kept=3, hints=True),
    "reference": Choice(256, 2, programs=2),
    "mixture": Choice(512, 1, programs=2),
    "vectors": Choice(128, 1),
    "pairs": Choice(64, 2, programs=4),
}
FUSED = ("fused", "fused32", "capped32")
#: Kinds that share the choice of another one.
SHARED_CHOICES = {"scale": "one_pass", "capped32": "fused32"}
#: Kinds with the same tile for rows of any length.
BLOCK_KINDS = ("scale", "vectors", "pairs")
#: Programs of `scale_`: a few for each multiprocessor of the largest GPUs, and few enough to return
#: at once if there is nothing to do.
SCALE_PROGRAMS = 512


def fused_kind(logits: torch.dtype, softcap: float) -> str:
    """Return the kind of the fused kernel, see LAUNCH, for logits of a dtype and a softcap."""
    if logits.itemsize < 4:
        return "fused"
    return "capped32" if softcap else "fused32"


def reference_gradient_kind(*softcaps: float) -> str:
    """Return the kind of the gradient with a reference, from the softcaps of both."""
    return "mixture" if any(softcaps) else "reference"


def choice_of(kind: str) -> Choice:
    """Return the launch settings of a kind of kernel."""
    return LAUNCH[SHARED_CHOICES.get(kind, kind)]


class Tile(NamedTuple):
    """What a program takes of a row at a time: the compile-time argument TILE of a kernel.

    Triton tells kernels apart in its cache by `str` of all fields.

    ALIGNED      rows begin where accesses do
    LANES        threads
    COLS         logits of an access
    ACCESSES     accesses of a thread
    BLOCK        logits in all
    PEELED       rows do not begin where accesses do, but those of the gradient have the same offset
                 from there as those of the logits
    ENDS         the last tiles, loaded at once
    KEPT         how many of these stay in registers
    FIRST_HINT   cache hint for what is read again
    LAST_HINT    and for what is not
    STAGES       tiles that are computed or being loaded at a time
    """

    ALIGNED: bool
    LANES: int
    COLS: int
    ACCESSES: int
    BLOCK: int
    PEELED: bool
    ENDS: int
    KEPT: int
    FIRST_HINT: str
    LAST_HINT: str
    STAGES: int

    @property
    def accesses(self) -> int:
        """Accesses of all threads together."""
        return self.LANES * self.ACCESSES

    @property
    def size(self) -> str:
        """The size in words."""
        return f"{self.accesses} x {self.COLS}"


def choose(kind: str, tensors: tuple[Tensor, ...], halvings: int) -> dict[str, Any]:
    """Return the keyword arguments of a launch: {"TILE": tile, options of Triton's compiler}.

    They depend on vocabulary, dtypes and strides, never on the number of rows.

    tensors    rows in the last dimension. The first tensor sets the width of an access.
    halvings   how often the tile is halved: first what each thread has in flight, and then, once
               that is one access, the threads
    """
    cols = ACCESS_BYTES // tensors[0].element_size()
    # All strides count, whatever the sizes, so that a dimension of size 1 does not select another
    # kernel.
    is_aligned = not any(stride % 16 for x in tensors for stride in x.stride()[:-1])
    if kind == "pairs":  # the end of a row is read in wide accesses, too
        is_aligned = is_aligned and tensors[0].shape[-1] % 16 == 0
    is_peeled = False
    if not is_aligned and kind in ("one_pass", *FUSED) and len(tensors) == 2:
        logits, gradient = tensors
        is_peeled = access_offsets(logits, cols) == access_offsets(gradient, cols)
    return choose_from_numbers(
        kind,
        choice_of(kind),
        columns=2**31 if kind in BLOCK_KINDS else tensors[0].shape[-1],
        cols=cols,
        is_aligned=is_aligned,
        is_peeled=is_peeled,
        halvings=halvings,
        driver=None if INTERPRETED else triton.runtime.driver.active,
        device_index=tensors[0].device.index,
    )


def access_offsets(x: Tensor, cols: int) -> tuple[int, ...]:
    """Return the offset of the rows of x from the boundaries of accesses of `cols` elements.

    Unaligned gradients are written 16 bytes at a time, too, if each of their rows has the same
    offset as its logits. So only strides modulo an access count, and the stride of a dimension of
    size 1 does not.
    """
    strides = zip(x.stride()[:-1], x.shape, strict=False)
    offsets = [stride % cols for stride, size in strides if size > 1]
    return *offsets, x.data_ptr() // x.element_size() % cols


@functools.lru_cache(maxsize=256)
def choose_from_numbers(
    kind: str,
    choice: Choice,
    *,
    columns: int,
    cols: int,
    is_aligned: bool,
    is_peeled: bool,
    halvings: int,
    driver: Any,
    device_index: int | None,
) -> dict[str, Any]:
    """Return the result of `choose` from numbers, so that it can be cached.

    columns      length of a row
    cols         elements of an access of 16 bytes
    is_aligned   whether all rows begin at multiples of 16 elements
    is_peeled    see `Tile.PEELED`
    halvings     how often the tile is halved
    driver, device_index   name the device, whose target `compiler_options` asks for
    """
    accesses_of_row = triton.next_power_of_2(triton.cdiv(columns, cols))
    full = min(choice.threads * choice.accesses, accesses_of_row)
    accesses = max(32, full >> halvings)  # a warp at least
    lanes = min(choice.threads, accesses)
    block = accesses * cols
    num_tiles = triton.cdiv(columns, block)
    ends = min(choice.ends, num_tiles) if is_aligned else 1  # single elements take more registers
    keeps_tiles = is_aligned and columns % cols == 0 and kind != "capped32"
    tile = Tile(
        ALIGNED=is_aligned,
        LANES=lanes,
        COLS=cols,
        ACCESSES=accesses // lanes,
        BLOCK=block,
        PEELED=is_peeled,
        ENDS=ends,
        KEPT=min(choice.kept, ends) if keeps_tiles else 0,
        FIRST_HINT="evict_last" if choice.hints else "",
        LAST_HINT="evict_first" if choice.hints else "",
        STAGES=choice.stages if num_tiles > ends and copies_ahead() else 1,
    )
    return {"TILE": tile, **compiler_options(lanes, choice, fuses=kind == "pairs")}


def copies_ahead() -> bool:
    """Return whether tiles are copied into shared memory while others are computed.

    An A100 needs less in flight. For AMD Triton keeps the tiles in registers, which it then spills.
    """
    if INTERPRETED:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= COPIES_AHEAD_FROM)


def compiler_options(lanes: int, choice: Choice, fuses: bool) -> dict[str, Any]:
    """Return options of Triton's compiler for a program of `lanes` threads.

    The registers are shared by as many threads as the choice has resident, also if rows are short
    and a program has fewer threads.

    fuses   whether multiplications and additions are fused, which rounds once instead of twice. The
            kernels over rows say where: `softmax_rows.fma`.
    """
    if INTERPRETED:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    options: dict[str, Any] = {
        "num_warps": max(1, lanes // target.warp_size),
        "enable_fp_fusion": fuses,  # the default differs between versions
    }
    if target.backend == "cuda":
        # Without a limit ptxas may spill a few bytes so that one more program fits.
        resident_threads = choice.threads * choice.programs
        options["maxnreg"] = min(MAX_REGISTERS, REGISTERS // resident_threads)
    return options


# ---- launches, with smaller tiles if needed

#: The search for a tile that fits stops at this many accesses. Each attempt compiles once.
MIN_ACCESSES = 128


class KernelFailure(RuntimeError):
    """No tile of a kernel runs here, and nothing was written.

    reason   which kernel, and why, in one line
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f'{reason}. Only backend="auto" without strict mode falls back to eager PyTorch; '
            "`python -m grpo_kernels doctor` says more."
        )
        self.reason = reason


#: For kernels that failed once: how often to halve the full tile, or the reason why no tile runs.
_remembered: dict[Hashable, int | str] = {}


def run(
    kind: str,
    kernel: Any,
    tensors: tuple[Tensor, ...],
    num_programs: Callable[[int], int],
    arguments: Mapping[str, Any],
    **flags: Any,
) -> None:
    """Launch a kernel with the first tile that runs, each half the size of the one before.

    kind           of the kernel, see LAUNCH
    tensors        see `choose`; they are on the device
    num_programs   the number of programs, from the number of columns of a tile
    arguments      runtime arguments by name
    flags          compile-time arguments

    Raises KernelFailure if no tile runs. Errors of the device, such as running out of memory, pass
    through: the kernel may have run in part, or would fail with a smaller tile as well.
    """
    if num_programs(1) == 0:
        return
    choose_tile = functools.partial(choose, kind, tensors)
    halvings: int | str = 0
    if _remembered:  # usually empty, so that calls need not compute a key
        halvings = _remembered.get(compile_key(kernel, choose_tile, arguments, flags), 0)
    if isinstance(halvings, str):
        raise KernelFailure(halvings)

    def launch_with(options: dict[str, Any]) -> str | None:
        compiled_for = {**flags, **options}
        return try_to_launch(kernel, tensors[0], num_programs, arguments, compiled_for)

    reason = launch_with(choose_tile(halvings))
    if reason is not None:
        key = compile_key(kernel, choose_tile, arguments, flags)
        search_smaller_tile(kernel_name(kernel), key, choose_tile, halvings, launch_with, reason)


def try_to_launch(
    kernel: Any,
    x: Tensor,
    num_programs: Callable[[int], int],
    arguments: Mapping[str, Any],
    compiled_for: Mapping[str, Any],
) -> str | None:
    """Launch a kernel. Return why it failed before it started, or None if it started.

    x              a tensor on the device that runs it
    compiled_for   compile-time arguments and options of the compiler
    """
    grid = (num_programs(compiled_for["TILE"].BLOCK),)
    with on_device(x):
        try:
            kernel[grid](**arguments, **compiled_for)
        except Exception as error:
            if not failed_before_start(error, kernel, arguments, compiled_for):
                raise
            return one_line(error)  # the exception itself would keep the arguments alive
    return None


def search_smaller_tile(
    name: str,
    key: Hashable,
    choose_tile: Callable[[int], dict[str, Any]],
    halvings: int,
    launch_with: Callable[[dict[str, Any]], str | None],
    reason: str,
) -> None:
    """Launch a kernel with the largest smaller tile that runs, remember it, and warn.

    name          of the kernel
    key           what the outcome is remembered for
    choose_tile   options of a launch, from the number of halvings
    halvings      of the tile that does not run
    launch_with   launches with options. It returns why the kernel did not start, None if it did.
    reason        why the first tile does not run

    Raises KernelFailure if no tile runs.
    """
    first = choose_tile(halvings)["TILE"]
    tile = first
    while True:
        options = choose_tile(halvings + 1)
        if options["TILE"].accesses < MIN_ACCESSES:
            break
        halvings += 1
        tile = options["TILE"]
        if launch_with(options) is None:
            _remembered[key] = halvings
            warn_once(
                f"the Triton kernel {name} does not run with a tile of {first.size} logits:"
                f" {reason}. It runs with {tile.size}, which may be slower. `python -m"
                " grpo_kernels doctor` says more."
            )
            return
    sizes = first.size if tile is first else f"{first.size} down to {tile.size}"
    failure = f"the Triton kernel {name} does not run with tiles of {sizes} logits: {reason}"
    _remembered[key] = failure
    raise KernelFailure(failure)


def failed_before_start(
    error: Exception, kernel: Any, arguments: Mapping[str, Any], compiled_for: Mapping[str, Any]
) -> bool:
    """Return whether a kernel failed in the compiler or at the launch, before it wrote anything."""
    if isinstance(error, triton.TritonError):  # OutOfResources, PTXASError, CompilationError
        # The interpreter does not compile, so there the kernel was running.
        return not isinstance(error, triton.InterpreterError)
    is_device_error = isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError))
    if is_device_error or "Triton Error [" in str(error):
        # The only error of the driver that comes before the start.
        return "too many resources requested for launch" in str(error)
    # Compiler passes fail with the same RuntimeError as launches. Compiled alone, only the former
    # fail again.
    try:
        kernel.warmup(**arguments, grid=(1,), **compiled_for)
    except Exception:
        return True
    return False


def compile_key(
    kernel: Any,
    choose_tile: Callable[[int], Mapping[str, Any]],
    arguments: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> Hashable:
    """Return a hashable key that is equal for calls for which Triton compiles the same binary.

    It contains the kernel, dtypes and devices of runtime arguments, and compile-time arguments.
    """

    def argument_key(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.dtype, x.device
        return tuple(map(argument_key, x)) if isinstance(x, tuple) else type(x)

    compile_time = frozenset({**flags, **choose_tile(0)}.items())
    runtime = tuple((name, argument_key(x)) for name, x in arguments.items())
    return kernel, runtime, compile_time


def kernel_name(kernel: Any) -> str:
    """Return the name of a kernel in messages."""
    return str(kernel.__name__).removesuffix("_kernel")


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, without the source that Triton prints with it."""
    while isinstance(error.__cause__, triton.CompilationError):
        error = error.__cause__  # every function on the way up wraps the error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    ptxas_lines = [line for line in lines[1:] if line.startswith("ptxas")]
    text = " ".join([lines[0], *ptxas_lines[:1]])
    if isinstance(error, triton.CompilationError) and error.error_message:
        # The message comes after the location and its source.
        definition = (error.src or "unknown source").strip().splitlines()[0]
        location = f"{lines[0].rstrip(':')} of `{definition}`"
        text = f"{error.error_message.strip().splitlines()[0]} ({location})"
    return f"{type(error).__name__}: {text.rstrip('.')}"


# ---- arguments


def check_layout(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Raise ValueError unless a kernel can take x as rows [A, T, V], or as the rows of `like`.

    name   what the error calls x
    """
    has_unit_stride = x.dim() == 3 and (x.stride(2) == 1 or x.shape[2] == 1)
    has_right_shape = like is None or x.shape == like.shape
    is_small = has_unit_stride and x.shape[0] * x.shape[1] < MAX_SIZE and 0 < x.shape[2] < MAX_SIZE
    has_right_dtype = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not (is_small and has_right_shape and has_right_dtype):
        dtype = str(x.dtype).removeprefix("torch.")
        expected = "[A, T, V]" if like is None else list(like.shape)
        raise ValueError(
            f"{name} is {dtype} {list(x.shape)} with strides {list(x.stride())}: the Triton "
            f"kernels take fp32, bf16 or fp16 {expected} with unit stride in V, of fewer than 2^31 "
            "rows and columns."
        )


def check_vectors(n: int, **vectors: Tensor | None) -> dict[str, Tensor | None]:
    """Return vectors [n] by name, made contiguous.

    Raises ValueError naming a vector of another shape.
    """
    for name, x in vectors.items():
        if x is not None and x.shape != (n,):
            raise ValueError(
                f"{name} has shape {list(x.shape)}: the Triton kernels take one value for each of"
                f" {n} rows."
            )
    return {name: None if x is None else x.contiguous() for name, x in vectors.items()}


def check_table(name: str, n: int, x: Tensor) -> tuple[Tensor, int]:
    """Return (table [num_names, n] with contiguous rows, stride of its rows).

    Raises ValueError if x has another shape.

    name   what the error calls x
    """
    if x.dim() != 2 or x.shape[1] != n:
        raise ValueError(
            f"{name} has shape {list(x.shape)}: the Triton kernels take one value for each of {n}"
            " rows."
        )
    if x.stride(1) != 1 and n > 1:
        x = x.contiguous()
    return x, x.stride(0)


class RowCall:
    """A launch of a kernel with a program for each row: its arguments that follow from the rows.

    rows   the rows of logits, with a reference if the kernel takes one
    out    [A, T, V]: memory for the gradient, or None
    """

    def __init__(self, rows: LogitRows, out: Tensor | None = None) -> None:
        num_groups, rows_per_group, _ = rows.logits.shape
        first, stop = rows.row_range or (0, num_groups * rows_per_group)
        self.rows = rows
        self.out = out
        self.num_rows = stop - first
        self.tensors = [rows.logits]
        check_layout("logits", rows.logits)
        if rows.reference is not None:
            check_layout("reference.logits", rows.reference.logits, rows.logits)
            self.tensors.append(rows.reference.logits)
        if out is not None:
            check_layout("out", out, rows.logits)
            self.tensors.append(out)

    @property
    def row_arguments(self) -> dict[str, Any]:
        """Arguments of a kernel by name: logits, strides, transform, V and T.

        With a reference also its logits, strides and transform.
        """
        rows = self.rows
        arguments = {
            "logits": rows.logits,
            "stride_a": rows.logits.stride(0),
            "stride_t": rows.logits.stride(1),
            "inverse_temperature": self.inverse_temperature(rows.transform),
            "transform": transform_argument(rows.transform),
            "V": rows.logits.shape[2],
            "T": rows.logits.shape[1],
        }
        if rows.reference is not None:
            reference = rows.reference
            arguments["reference"] = reference.logits
            arguments["reference_stride_a"] = reference.logits.stride(0)
            arguments["reference_stride_t"] = reference.logits.stride(1)
            inverse_temperature = self.inverse_temperature(reference.transform)
            arguments["reference_inverse_temperature"] = inverse_temperature
            arguments["reference_transform"] = transform_argument(reference.transform)
        return arguments

    @property
    def gradient_arguments(self) -> dict[str, Any]:
        """Arguments of a kernel by name: the gradient and its strides; None and 0 without one."""
        if self.out is None:
            return {"out": None, "out_stride_a": 0, "out_stride_t": 0}
        return {
            "out": self.out,
            "out_stride_a": self.out.stride(0),
            "out_stride_t": self.out.stride(1),
        }

    @property
    def mixture_weights(self) -> tuple[float, float]:
        """The weights of reference and policy in the mixture."""
        assert self.rows.reference is not None
        mixture = float(self.rows.reference.mixture)
        return mixture, 1.0 - mixture

    def inverse_temperature(self, transform: RowTransform) -> float | Tensor | None:
        """Return the inverse temperature, a number or a vector [num_rows]."""
        inverse = transform.inverse_temperature
        if isinstance(inverse, Tensor):
            return self.vectors(inverse_temperature=inverse)["inverse_temperature"]
        return float(inverse)

    def vectors(self, **vectors: Tensor | None) -> dict[str, Tensor | None]:
        """Return vectors [num_rows] by name, contiguous."""
        return check_vectors(self.num_rows, **vectors)

    def table(self, name: str, x: Tensor) -> dict[str, Any]:
        """Return a table [num_names, num_rows] and its row stride, as arguments by name."""
        values, stride = check_table(name, self.num_rows, x)
        return {name: values, f"{name}_stride": stride}

    def sums(self, sums: SoftmaxSums) -> dict[str, Any]:
        """Return the table of the sums, with a reference also its rows from reference_max_logit on.

        Both have the same stride.
        """
        arguments = self.table("sums", sums.values)
        if self.rows.reference is not None:
            first_of_reference = sums.names.index("reference_max_logit")
            arguments["reference_sums"] = arguments["sums"][first_of_reference:]
        return arguments

    def launch(self, kind: str, kernel: Any, arguments: dict[str, Any], **flags: Any) -> None:
        """Launch a kernel with one program per row.

        kind        of the kernel, see LAUNCH
        arguments   runtime arguments by name
        flags       compile-time arguments by name
        """
        run(kind, kernel, tuple(self.tensors), lambda _: self.num_rows, arguments, **flags)


def transform_argument(transform: RowTransform) -> Transform:
    """Return the transform of rows as the argument `transform` of a kernel.

    Fields that a kernel must not compile code for are None.
    """
    is_mirrored = transform.scale < 0 and not transform.softcap
    return Transform(
        scale=float(transform.scale),
        softcap=float(transform.softcap) if transform.softcap else None,
        mirrored=True if is_mirrored else None,
    )


def run_over_columns(
    kernel: Any,
    matrices: dict[str, Tensor],
    num_programs: Callable[[int], int],
    arguments: dict[str, Any],
    **flags: Any,
) -> None:
    """Launch a kernel over pairs. Columns of matrices are split into blocks.

    matrices       [., H] by name; the first sets the width of an access
    num_programs   the number of programs, from the number of columns of a block
    arguments      the other runtime arguments by name. The matrices, their strides and H are added.
    """
    tensors = tuple(matrices.values())
    width = tensors[0].shape[1]
    for name, x in matrices.items():
        has_unit_stride = x.stride(1) == 1 or width <= 1 or x.numel() == 0
        if x.shape[1] != width or not has_unit_stride or max(x.shape) >= MAX_SIZE:
            raise ValueError(
                f"{name} has shape {list(x.shape)} and strides {list(x.stride())}: the Triton "
                f"kernels take rows of {width} in one piece."
            )
    matrix_arguments: dict[str, Any] = {"H": width}
    for name, x in matrices.items():
        matrix_arguments[name] = x
        matrix_arguments[f"{name}_stride"] = x.stride(0)
    run("pairs", kernel, tensors, num_programs, {**matrix_arguments, **arguments}, **flags)


# ---- formulas

#: Operations of a program in Triton. Its minimum and maximum drop NaN unless told otherwise, which
#: would hide that a row is broken.
OPERATIONS = {
    "neg": "-{}",
    "abs": "tl.abs({})",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "sqrt": "tl.sqrt({})",
    "tanh": "tanh({})",
    "reciprocal": "1.0 / {}",
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "min": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "max": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "not": "{} == 0",
    "where": "tl.where({}, {}, {})",
}
#: Inputs that the kernel computes. The others are loaded.
COMPUTED_INPUTS = ("logps", "entropy")
#: The normal numbers of fp32.
SMALLEST_NUMBER = torch.finfo(torch.float32).tiny
LARGEST_NUMBER = torch.finfo(torch.float32).max


@functools.lru_cache(maxsize=256)
def formula_function(program: Program) -> tuple[Any, tuple[int, ...]]:
    """Return the program of a loss formula as a Triton function (computed, i, inputs, numbers).

    Also returns which of the program's numbers the function takes. The others are constants in its
    source. Programs with the same source are the same function, and so the same kernel.
    """
    registers: list[str] = []  # the expression for each register of the program
    numbers_taken: list[int] = []
    for k, place in enumerate(program.numbers_used):
        operation, operands = program.sources[place]
        if operation == "constant" and is_literal(operands[0]):
            registers.append(literal(operands[0]))
        else:
            registers.append(f"numbers[{len(numbers_taken)}]")
            numbers_taken.append(k)
    lines = []

    def assign(expression: str) -> None:
        name = f"x{len(registers)}"
        lines.append(f"    {name} = {expression}")
        registers.append(name)

    for k, name in enumerate(program.inputs):
        if name in COMPUTED_INPUTS:
            assign(f"computed[{k}]")
        else:
            assign(f"tl.load(inputs[{PROGRAM_INPUTS.index(name)}] + i)")
    for operation, *operand_registers in program.steps:
        template = OPERATIONS[operation]
        used = operand_registers[: template.count("{}")]
        assign(template.format(*(f"({registers[r]})" for r in used)))
    lines.append(f"    return {', '.join(registers[r] for r in program.outputs)}\n")
    return make_function("\n".join(lines)), tuple(numbers_taken)


def is_literal(number: Any) -> bool:
    """Return whether a constant may be written into the source of a Triton function.

    Triton takes numbers outside of fp32's normal range as fp64.
    """
    if isinstance(number, bool) or number == 0:
        return True
    return SMALLEST_NUMBER <= abs(number) <= LARGEST_NUMBER


def literal(number: Any) -> str:
    """Return a constant as Python source: True, False or a float."""
    return repr(number) if isinstance(number, bool) else repr(float(number))


@functools.lru_cache(maxsize=256)
def make_function(body: str) -> Any:
    """Return a Triton function with this body.

    Its name tells it from others, because Triton 3.5 finds kernels by the names of their functions.
    """
    name = f"formula_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    source = f"def {name}(computed, i, inputs, numbers):\n{body}"
    file = f"<{name}>"
    # Triton reads the source of a function from here.
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    namespace: dict[str, Any] = {"tl": tl, "tanh": tanh, "__name__": __name__}
    exec(compile(source, file, "exec"), namespace)
    return triton.jit(namespace[name])
