"""How the Triton kernels are launched: with which device, threads, tiles and arguments.

A launch runs a grid of *programs*, the instances of a Triton kernel. (The traced formula of a loss,
a `formulas.program.Program`, is called a formula here.) Each program processes a row tile by tile,
see `Tile`.

The numbers of threads, loads in flight and registers, and cache hints, affect results only through
the order of sums. This order depends on the vocabulary, dtypes and strides, never on the number of
rows. `benchmarks.tune` times other choices. `benchmarks.resources` reports the registers and memory
of the compiled kernels.

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

#: Upper limit of numbers of rows and columns: they are int32 in the kernels, and the last tile of a
#: row may end behind the last column.
MAX_SIZE = 2**31 - 2**16

#: Bytes of the widest access (load or store) of a thread.
ACCESS_BYTES = 16

#: The lowest compute capability (sm_90) on which tiles are copied into shared memory in advance,
#: see `copies_ahead`.
COPIES_AHEAD_FROM = 90

#: Threads of a warp of an NVIDIA GPU, the smallest program.
WARP_SIZE = 32

#: Registers of a multiprocessor of an NVIDIA GPU, and the maximum for a thread.
REGISTERS = 65536
MAX_REGISTERS = 255

# ---- devices


def unavailable_reason() -> str | None:
    """Return the reason why Triton kernels cannot run on this machine, or None if they can.

    In Triton's interpreter they always run. Else they need a driver that works.
    """
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
    """Return the reason why Triton cannot use the device, in one line, or None if it can.

    The first use of the device makes Triton compile a launcher with the system's C compiler, which
    may fail.
    """
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # compiler, linker and file system raise errors of many types
        first_line = str(error).strip().partition("\n")[0]
        return f"Triton cannot start ({type(error).__name__}: {first_line})"
    return None


def serves(device: torch.device) -> bool:
    """Return whether Triton's driver can run kernels on tensors of a device.

    The device type "cuda" is NVIDIA or AMD, "xpu" is Intel. For AMD the kernels have been compiled
    but not run. For Intel they have neither been compiled nor run.
    """
    if INTERPRETED:
        return True
    if device.type == "cpu":
        return False
    return bool(triton.runtime.driver.active.get_active_torch_device().type == device.type)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that makes the device of x the current one, as a launch needs it."""
    if x.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(x.device).device(x.device)


# ---- threads and tiles


class Choice(NamedTuple):
    """Launch settings of one kind of kernel, for long rows.

    For shorter rows a thread has fewer accesses, and if one access is enough, there are fewer
    threads.

    threads    threads of a program (an instance of the kernel)
    accesses   128-bit loads of a thread that are in flight at the same time, one tile
    programs   programs that run on a multiprocessor at the same time and share its registers
    ends       number of tiles at the end of a row that are loaded together
    kept       number of these last tiles that stay in registers for the second pass over the row
    hints      whether loads and stores have cache hints: to keep data that is read again, and to
               evict other data
    stages     depth of Triton's software pipeline: with 3, two tiles are being loaded while one is
               computed
    """

    threads: int
    accesses: int
    programs: int = 1
    ends: int = 1
    kept: int = 0
    hints: bool = False
    stages: int = 1


#: The launch settings of each kind of kernel: near the fastest on an H100 and an H200 with Triton
#: 3.6, and without register spills on Triton 3.9 either.
#:
#:     one_pass    One pass over a row. Two programs share a multiprocessor, so that one loads while
#:                 the other reduces at the end of its row.
#:     fused       Two passes over a row, by one program on a multiprocessor. An H100 then processes
#:                 132 rows at a time. With cache hints five sixths of 132 rows of 152k bf16 logits
#:                 (39 MB) stay in its L2 cache (50 MB) until the second pass. Twice as many rows
#:                 would not fit. There is one program for each row, so no row waits if another CUDA
#:                 stream occupies multiprocessors. 1024 threads are 4 % faster, but spill registers
#:                 on Triton 3.9.
#:     fused32     "fused" for fp32 logits. Half of a row does not stay in L2, so as many tiles as
#:                 fit are kept in registers. None are kept with a softcap ("capped32"), because
#:                 tanh needs the registers and takes longer than a load. None are kept if the
#:                 length of a row is not a multiple of an access: its end is read by single
#:                 elements, and Triton 3.9 spilled 40 to 168 bytes for each thread.
#:     reference   One pass over a row and the reference's, with twice the loads and sums of
#:                 "one_pass".
#:     mixture     Sums of a mixture of policy and reference, whose hundred instructions for each
#:                 logit hide any load. Also gradients with a reference and tanh, which have fifty
#:                 to ninety: with twice the loads of fp16 logits Triton 3.9 spilled registers.
#:     vectors     A loss formula on vectors, whose inputs are single loads of a thread.
#:     pairs       Pairs of rows of hidden states and weight. A program has loads of at least two
#:                 rows in flight.
#:
#: With 3 stages tiles are copied into shared memory while others are computed (cp.async), and
#: Triton 3.6 drops the cache hints of these copies. This is faster for one pass over a row. With
#: two passes half of a row would be read from memory again, which is 11 to 21 % slower.
LAUNCH = {
    "one_pass": Choice(threads=512, accesses=2, programs=2, ends=2, stages=3),
    "fused": Choice(threads=512, accesses=4, ends=2, kept=1, hints=True),
    "fused32": Choice(threads=512, accesses=4, ends=3, kept=3, hints=True),
    "reference": Choice(threads=256, accesses=2, programs=2),
    "mixture": Choice(threads=512, accesses=1, programs=2),
    "vectors": Choice(threads=128, accesses=1),
    "pairs": Choice(threads=64, accesses=2, programs=4),
}
#: The kinds of the fused loss kernel.
FUSED = ("fused", "fused32", "capped32")
#: Kinds that have the launch settings of another kind.
SHARED_CHOICES = {"scale": "one_pass", "capped32": "fused32"}
#: Kinds whose tile does not depend on the length of a row.
BLOCK_KINDS = ("scale", "vectors", "pairs")
#: The maximum number of programs of `scale_`: a few for each multiprocessor of the largest GPUs,
#: and few enough to return quickly if the factor is 1.
SCALE_PROGRAMS = 512


def fused_kind(logits: torch.dtype, softcap: float) -> str:
    """Return the kind of the fused loss kernel: "fused", "fused32" or "capped32".

    A kind is a name that LAUNCH or SHARED_CHOICES has launch settings for. fp32 logits have other
    settings than 16-bit ones, and with a softcap, whose tanh needs registers, a third kind.

    logits    dtype of the logits
    softcap   softcap of the logits, 0 for none
    """
    if logits.itemsize < 4:
        return "fused"
    return "capped32" if softcap else "fused32"


def reference_gradient_kind(softcap: float, reference_softcap: float) -> str:
    """Return the kind of the gradient kernel with a reference, a key of LAUNCH.

    With a softcap (0 for none) the kernel computes tanh, and so many instructions for each logit
    that it gets the launch settings of the mixture kernel.
    """
    return "mixture" if softcap or reference_softcap else "reference"


def choice_of(kind: str) -> Choice:
    """Return the launch settings of a kind of kernel, a key of LAUNCH or SHARED_CHOICES."""
    return LAUNCH[SHARED_CHOICES.get(kind, kind)]


class Tile(NamedTuple):
    """The part of a row that a program processes at a time: the argument TILE of a kernel.

    It is a compile-time argument. Triton's cache distinguishes kernels by `str` of all fields.

    ALIGNED      whether all rows begin at a multiple of 16 elements, so that 16-byte accesses are
                 aligned
    LANES        number of threads
    COLS         logits of one 16-byte access
    ACCESSES     accesses of a thread in a tile
    BLOCK        logits of a tile: LANES * COLS * ACCESSES
    PEELED       whether rows are not aligned, but each row of the gradient has the same offset from
                 a 16-byte boundary as its row of logits
    ENDS         number of tiles at the end of a row that are loaded together
    KEPT         number of these last tiles that stay in registers for the second pass
    FIRST_HINT   cache hint of accesses to data that is read again
    LAST_HINT    cache hint of accesses to data that is not read again
    STAGES       depth of Triton's software pipeline, see `Choice.stages`
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
        """Number of accesses of all threads in a tile."""
        return self.LANES * self.ACCESSES

    @property
    def size(self) -> str:
        """The size of a tile for messages: accesses x logits of an access."""
        return f"{self.accesses} x {self.COLS}"


def launch_options(kind: str, tensors: tuple[Tensor, ...], halvings: int) -> dict[str, Any]:
    """Return the compile-time arguments of a launch: {"TILE": tile, options of the compiler}.

    They depend on vocabulary, dtypes and strides, never on the number of rows.

    kind       of the kernel, a key of LAUNCH or SHARED_CHOICES
    tensors    the tensors [..., V] that the kernel reads and writes, of which the first sets the
               width of an access; (logits, gradient) for the kinds that read one row
    halvings   how often the tile is halved: first the accesses of each thread, then, when that is
               one access, the threads
    """
    cols = ACCESS_BYTES // tensors[0].element_size()
    # The strides of dimensions of size 1 count as well, so that a call with one row uses the same
    # kernel as a call with several rows.
    is_aligned = not any(stride % 16 for x in tensors for stride in x.stride()[:-1])
    if kind == "pairs":  # these kernels also read the end of a row in wide accesses
        is_aligned = is_aligned and tensors[0].shape[-1] % 16 == 0
    is_peeled = False
    if not is_aligned and kind in ("one_pass", *FUSED) and len(tensors) == 2:
        logits, gradient = tensors
        is_peeled = access_offsets(logits, cols) == access_offsets(gradient, cols)
    return cached_launch_options(
        kind,
        choice_of(kind),
        num_columns=2**31 if kind in BLOCK_KINDS else tensors[0].shape[-1],
        cols=cols,
        is_aligned=is_aligned,
        is_peeled=is_peeled,
        halvings=halvings,
        driver=None if INTERPRETED else triton.runtime.driver.active,
        device_index=tensors[0].device.index,
    )


def access_offsets(x: Tensor, cols: int) -> tuple[int, ...]:
    """Return numbers that describe how the rows of x lie between 16-byte boundaries.

    If they are equal for two tensors of one shape, row i of one tensor has the same offset as row i
    of the other, for every i. The offset of a row is its distance from the previous 16-byte
    boundary, in elements. It follows from the address of the tensor and its strides modulo `cols`.
    The stride of a dimension of size 1 has no effect.

    x      [..., V], rows of V elements
    cols   number of elements in 16 bytes
    """
    strides = zip(x.stride()[:-1], x.shape, strict=False)
    offsets = [stride % cols for stride, size in strides if size > 1]
    return *offsets, x.data_ptr() // x.element_size() % cols


@functools.lru_cache(maxsize=256)
def cached_launch_options(
    kind: str,
    choice: Choice,
    *,
    num_columns: int,
    cols: int,
    is_aligned: bool,
    is_peeled: bool,
    halvings: int,
    driver: Any,
    device_index: int | None,
) -> dict[str, Any]:
    """Return the result of `launch_options` from hashable arguments, so that it can be cached.

    For short rows a tile has fewer accesses than `choice` says, and for very short rows a program
    has fewer threads.

    kind          of the kernel, a key of LAUNCH or SHARED_CHOICES
    choice        its launch settings for long rows
    num_columns   length of a row; any large number if the tile must not depend on it
    cols          elements of a 16-byte access
    is_aligned    see `Tile.ALIGNED`
    is_peeled     see `Tile.PEELED`
    halvings      how often the tile is halved
    driver, device_index   Triton's driver and the device. They are only part of the cache key,
                           because `compiler_options` depends on the current device.
    """
    accesses_of_row = triton.next_power_of_2(triton.cdiv(num_columns, cols))
    accesses_of_full_tile = min(choice.threads * choice.accesses, accesses_of_row)
    accesses = max(WARP_SIZE, accesses_of_full_tile >> halvings)
    lanes = min(choice.threads, accesses)
    block = accesses * cols
    num_tiles = triton.cdiv(num_columns, block)
    # Unaligned rows are read by single elements, which take more registers.
    ends = min(choice.ends, num_tiles) if is_aligned else 1
    keeps_tiles = is_aligned and num_columns % cols == 0 and kind != "capped32"
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
    """Return whether to use Triton's software pipeline (`Choice.stages`) on the current device.

    The pipeline copies tiles into shared memory while others are computed. It is not used on GPUs
    before sm_90, which need fewer loads in flight, nor on AMD, where Triton keeps the tiles in
    registers and spills them.
    """
    if INTERPRETED:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= COPIES_AHEAD_FROM)


def compiler_options(lanes: int, choice: Choice, fuses: bool) -> dict[str, Any]:
    """Return options of Triton's compiler for a program of `lanes` threads.

    The limit of registers for a thread does not depend on `lanes`. It is the limit with which
    choice.programs programs of choice.threads threads fit on a multiprocessor.

    lanes    number of threads of a program
    choice   launch settings of the kernel for long rows
    fuses   whether the compiler may fuse multiplications and additions, which rounds once instead
            of twice. The kernels over rows call `softmax_rows.fma` where they want it.
    """
    if INTERPRETED:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    options: dict[str, Any] = {
        "num_warps": max(1, lanes // target.warp_size),
        "enable_fp_fusion": fuses,  # the default differs between versions of Triton
    }
    if target.backend == "cuda":
        # Without this option ptxas may spill a few bytes so that one more program fits.
        resident_threads = choice.threads * choice.programs
        options["maxnreg"] = min(MAX_REGISTERS, REGISTERS // resident_threads)
    return options


# ---- launches, with smaller tiles if needed

#: The fewest accesses of a tile that a launch is tried with. Each attempt compiles the kernel.
MIN_ACCESSES = 128


class KernelFailure(RuntimeError):
    """A kernel cannot run on this GPU with any tile. It has written nothing.

    reason   name of the kernel, and why it cannot run, in one line
    """

    def __init__(self, reason: str) -> None:
        """Make a message from the reason."""
        super().__init__(
            f'{reason}. Only backend="auto" without strict mode falls back to eager PyTorch; '
            "`python -m grpo_kernels doctor` says more."
        )
        self.reason = reason


#: The outcome for kernels that failed once, by `compile_key`: the number of halvings of the tile
#: that works (int), or the reason why no tile works (str).
_remembered: dict[Hashable, int | str] = {}


def run(
    kind: str,
    kernel: Any,
    tensors: tuple[Tensor, ...],
    num_programs: Callable[[int], int],
    arguments: Mapping[str, Any],
    **flags: Any,
) -> None:
    """Launch a kernel. If it cannot run with its tile, retry with a tile of half the size.

    kind           of the kernel, see LAUNCH
    tensors        the tensors that set the tile, see `launch_options`; the kernel runs on their
                   device
    num_programs   returns the number of programs, from the number of columns of a tile
    arguments      runtime arguments of the kernel by name
    flags          further compile-time arguments of the kernel

    Raises KernelFailure if no tile works. Errors of the device, such as running out of memory, are
    raised as they are: the kernel may have run in part, or would fail with a smaller tile as well.
    """
    if num_programs(1) == 0:
        return
    choose_tile = functools.partial(launch_options, kind, tensors)
    halvings: int | str = 0
    if _remembered:  # usually empty, so that calls need not compute a key
        halvings = _remembered.get(compile_key(kernel, choose_tile, arguments, flags), 0)
    if isinstance(halvings, str):  # the reason why no tile works
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
    """Launch a kernel. Return None if it started, or the reason why it could not start.

    Raises the error if the kernel failed while it was running.

    x              a tensor on the device to run on
    arguments      runtime arguments of the kernel by name
    num_programs   returns the number of programs, from the number of columns of a tile
    compiled_for   compile-time arguments (TILE among them) and options of the compiler
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
    """Launch a kernel with smaller and smaller tiles until one works. Remember it, and warn.

    Each attempt halves the tile again, down to MIN_ACCESSES accesses.

    name          of the kernel, for messages
    key           the `compile_key` of the call, under which the outcome is remembered
    choose_tile   returns the launch options with a tile that is halved n times, from n
    halvings      number of halvings of the tile that failed
    launch_with   launches with options; returns None, or the reason why the kernel did not start
    reason        why the kernel did not start with the first tile

    Raises KernelFailure if no tile works.
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
    """Return whether a kernel failed in the compiler or at the launch, before it wrote anything.

    error          what the launch raised
    kernel         the kernel that was launched
    arguments      its runtime arguments by name
    compiled_for   its compile-time arguments and options of the compiler
    """
    if isinstance(error, triton.TritonError):  # OutOfResources, PTXASError, CompilationError
        # The interpreter does not compile, so there the kernel was running.
        return not isinstance(error, triton.InterpreterError)
    is_device_error = isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError))
    if is_device_error or "Triton Error [" in str(error):
        # This is the only error of the driver that comes before the start.
        return "too many resources requested for launch" in str(error)
    # A RuntimeError may come from a pass of the compiler or from the launch. Compile the kernel
    # without launching it: if that fails as well, the error came from the compiler.
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
    """Return a hashable key: calls with equal keys compile the same kernel with the same tile.

    It contains the kernel, the dtypes and devices of its runtime arguments, and its compile-time
    arguments with those of the tile that is tried first. Triton may compile several binaries for
    one key, because it also looks at the alignment of the arguments in `kernels.SPECIALIZED`.

    choose_tile   returns the compile-time arguments of a tile that is halved this many times
    arguments     runtime arguments of the kernel by name
    flags         further compile-time arguments
    """

    def argument_key(x: Any) -> Any:
        """Return dtype and device of a tensor, or the type of a number, recursively in tuples."""
        if isinstance(x, Tensor):
            return x.dtype, x.device
        return tuple(map(argument_key, x)) if isinstance(x, tuple) else type(x)

    full_tile = choose_tile(0)  # every smaller tile follows from it
    compile_time = frozenset({**flags, **full_tile}.items())
    runtime = tuple((name, argument_key(x)) for name, x in arguments.items())
    return kernel, runtime, compile_time


def kernel_name(kernel: Any) -> str:
    """Return the name of a kernel for messages, without "_kernel" at the end."""
    return str(kernel.__name__).removesuffix("_kernel")


def one_line(error: BaseException) -> str:
    """Return type and message of an error in one line, without the source code in Triton's errors.

    The message of ptxas is included. For a CompilationError the line that it points to is given.
    """
    while isinstance(error.__cause__, triton.CompilationError):
        error = error.__cause__  # Triton wraps the error once for each function that was inlined
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    ptxas_lines = [line for line in lines[1:] if line.startswith("ptxas")]
    text = " ".join([lines[0], *ptxas_lines[:1]])
    if isinstance(error, triton.CompilationError) and error.error_message:
        # str(error) begins with the location and the source of the function. The message follows.
        definition = (error.src or "unknown source").strip().splitlines()[0]
        location = f"{lines[0].rstrip(':')} of `{definition}`"
        text = f"{error.error_message.strip().splitlines()[0]} ({location})"
    return f"{type(error).__name__}: {text.rstrip('.')}"


# ---- arguments


def check_layout(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Raise ValueError unless x is a tensor [A, T, V] (A * T rows of V) that a kernel can take.

    name   name of x in the message
    like   if given, x must have its shape
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
    """Return vectors as arguments of a kernel, by name: contiguous [n], or None for None.

    Raises ValueError if a vector has another shape.
    """
    for name, x in vectors.items():
        if x is not None and x.shape != (n,):
            raise ValueError(
                f"{name} has shape {list(x.shape)}: the Triton kernels take one value for each of"
                f" {n} rows."
            )
    return {name: None if x is None else x.contiguous() for name, x in vectors.items()}


def check_table(name: str, n: int, x: Tensor) -> tuple[Tensor, int]:
    """Return (x, stride of its rows) for a table x [num_names, n].

    x is copied if the stride in n is not 1. Raises ValueError if x has another shape.

    name   name of x in the message
    n      number of rows of the call
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
    """The arguments of a kernel that has one program for each row of logits, and its launch.

    Methods and properties return arguments by name, which the caller merges into one dict for
    `launch`. All tensors are checked; ValueError names one that a kernel cannot take.

    rows   the rows of logits, with a reference if the kernel takes one
    out    [A, T, V] like `rows.logits`: memory for the gradient, or None
    """

    def __init__(self, rows: LogitRows, out: Tensor | None = None) -> None:
        """Check shapes, dtypes and strides of the logits and of the gradient."""
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
        """The arguments for the logits: tensor, strides, transform, and the sizes V and T.

        Row number r of the logits [A, T, V] is logits[r // T, r % T]. With a reference its logits,
        strides and transform are included.
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
        """The arguments for the gradient: tensor and strides; None and 0 without a gradient."""
        if self.out is None:
            return {"out": None, "out_stride_a": 0, "out_stride_t": 0}
        return {
            "out": self.out,
            "out_stride_a": self.out.stride(0),
            "out_stride_t": self.out.stride(1),
        }

    @property
    def mixture_weights(self) -> tuple[float, float]:
        """(b, 1 - b): the weights of reference and policy in the mixture of "jsd"."""
        assert self.rows.reference is not None
        mixture = float(self.rows.reference.mixture)
        return mixture, 1.0 - mixture

    def inverse_temperature(self, transform: RowTransform) -> float | Tensor | None:
        """Return the inverse temperature of a transform as an argument of a kernel.

        It is a float for all rows, or a contiguous vector [num_rows].
        """
        inverse = transform.inverse_temperature
        if isinstance(inverse, Tensor):
            return self.vector_arguments(inverse_temperature=inverse)["inverse_temperature"]
        return float(inverse)

    def vector_arguments(self, **vectors: Tensor | None) -> dict[str, Tensor | None]:
        """Return the vectors [num_rows] by name, contiguous; None stays None."""
        return check_vectors(self.num_rows, **vectors)

    def table_arguments(self, name: str, x: Tensor) -> dict[str, Any]:
        """Return two arguments: `name`, the table x [num_names, num_rows], and its row stride."""
        values, stride = check_table(name, self.num_rows, x)
        return {name: values, f"{name}_stride": stride}

    def sums_arguments(self, sums: SoftmaxSums) -> dict[str, Any]:
        """Return the table of softmax sums and its row stride.

        With a reference there is also the argument `reference_sums`, the rows of the same table
        from reference_max_logit on.
        """
        arguments = self.table_arguments("sums", sums.values)
        if self.rows.reference is not None:
            first_of_reference = sums.names.index("reference_max_logit")
            arguments["reference_sums"] = arguments["sums"][first_of_reference:]
        return arguments

    def launch(self, kind: str, kernel: Any, arguments: dict[str, Any], **flags: Any) -> None:
        """Launch a kernel with one program for each row.

        kind        of the kernel, see LAUNCH
        arguments   runtime arguments by name
        flags       compile-time arguments by name

        Raises KernelFailure if the kernel cannot run.
        """
        run(
            kind=kind,
            kernel=kernel,
            tensors=tuple(self.tensors),
            num_programs=lambda _: self.num_rows,
            arguments=arguments,
            **flags,
        )


def transform_argument(transform: RowTransform) -> Transform:
    """Return the scale and softcap of rows as the argument `transform` of a Triton kernel.

    Triton compiles no code for a field that is None: `softcap` without a softcap, and `mirrored`
    unless the scale is negative. A kernel with a softcap handles a negative scale anyway, because
    tanh keeps the sign.
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
    """Launch a kernel over (row, id) pairs, in which a program takes some columns of the matrices.

    matrices       matrices with H columns and unit stride in H, by name. The first one sets the
                   width of an access.
    num_programs   returns the number of programs, from the number of columns of a program
    arguments      the other runtime arguments by name. The matrices, their strides and H are added.
    flags          compile-time arguments by name

    Raises ValueError if a matrix has another layout, and KernelFailure if the kernel cannot run.
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
    run(
        kind="pairs",
        kernel=kernel,
        tensors=tensors,
        num_programs=num_programs,
        arguments={**matrix_arguments, **arguments},
        **flags,
    )


# ---- formulas

#: Triton source of each operation of a traced formula. By default tl.minimum and tl.maximum drop
#: NaN, which would hide a NaN of the logits.
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
#: The inputs of a formula that a kernel computes. It loads the others from memory.
COMPUTED_INPUTS = ("logps", "entropy")
#: The smallest and largest positive normal number of fp32.
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
LARGEST_NORMAL = torch.finfo(torch.float32).max


@functools.lru_cache(maxsize=256)
def formula_function(program: Program) -> tuple[Any, tuple[int, ...]]:
    """Generate a Triton function that evaluates a traced loss formula for one row, or for a block.

    program   the formula as a list of operations. Each operation reads registers and appends one.
              Registers hold the scalars of a call (constants and parameters of the formula), then
              its inputs, then the results of the operations.

    Returns (function, numbers_taken). The source of the function has a line `x5 = ...` for each
    input and operation. The function has the parameters

        computed   (log-prob, entropy) of the row
        i          index of the row in the vectors `inputs`
        inputs     pointers to vectors [num_rows], in the order of PROGRAM_INPUTS
        numbers    those scalars of the call that are not constants in the source of the function

    and returns the program's outputs. numbers_taken are the indices of `numbers` among all scalars
    of the program. Programs with equal source share one function, and so one compiled kernel.
    """
    # For each register, the expression that stands for it in the source.
    registers: list[str] = []
    numbers_taken: list[int] = []
    for k, source_index in enumerate(program.scalars_in_registers):
        operation, operands = program.scalars[source_index]
        if operation == "constant" and is_literal(operands[0]):
            registers.append(literal(operands[0]))
        else:
            registers.append(f"numbers[{len(numbers_taken)}]")
            numbers_taken.append(k)
    lines = []

    def assign(expression: str) -> None:
        """Assign an expression to a new variable, which is the next register."""
        name = f"x{len(registers)}"
        lines.append(f"    {name} = {expression}")
        registers.append(name)

    for k, name in enumerate(program.inputs):
        if name in COMPUTED_INPUTS:
            assign(f"computed[{k}]")
        else:
            assign(f"tl.load(inputs[{PROGRAM_INPUTS.index(name)}] + i)")
    for operation, *operand_registers in program.instructions:
        template = OPERATIONS[operation]
        # An instruction always lists three registers; the operation reads the first ones.
        num_operands = template.count("{}")
        expressions = [f"({registers[r]})" for r in operand_registers[:num_operands]]
        assign(template.format(*expressions))
    lines.append(f"    return {', '.join(registers[r] for r in program.outputs)}\n")
    return make_function("\n".join(lines)), tuple(numbers_taken)


def is_literal(number: Any) -> bool:
    """Return whether a constant may be written into the source of a Triton function.

    If not, it is an argument: Triton would treat a literal outside of fp32's normal range as fp64.
    """
    if isinstance(number, bool) or number == 0:
        return True
    return SMALLEST_NORMAL <= abs(number) <= LARGEST_NORMAL


def literal(number: Any) -> str:
    """Return the Python source of a constant: True, False or a float."""
    return repr(number) if isinstance(number, bool) else repr(float(number))


@functools.lru_cache(maxsize=256)
def make_function(body: str) -> Any:
    """Define a Triton function (computed, i, inputs, numbers) with this body, and return it.

    Its name contains a hash of the body, because Triton 3.5 identifies functions by their names.

    body   indented lines of Python source, see `formula_function`
    """
    name = f"formula_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    source = f"def {name}(computed, i, inputs, numbers):\n{body}"
    file = f"<{name}>"
    # Triton reads the source of a function through inspect, which finds it in linecache.
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    namespace: dict[str, Any] = {"tl": tl, "tanh": tanh, "__name__": __name__}
    exec(compile(source, file, "exec"), namespace)
    return triton.jit(namespace[name])
