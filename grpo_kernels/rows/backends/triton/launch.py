"""How the Triton kernels are launched: on which device, with which threads and tiles, with which arguments.

Choices of threads, loads in flight, registers and cache hints affect results only through the order of sums, which depends
on the vocabulary, dtypes and strides, never on the number of rows. `benchmarks.tune` times other choices; `benchmarks.resources`
reads from the binaries what they need.

A kernel that does not compile, or needs more than the GPU has, is retried with smaller tiles: only if it failed before it started,
since its output may overwrite its input. If a smaller tile works there is one warning; if none does, `KernelFailure` is raised.
Both outcomes are remembered, so later calls compile nothing."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....checks import warn_once
from ....formulas.program import Program
from ....formulas.token_stage import INPUTS
from ...partials import LogitRows, Partials, Slopes
from .kernels import _stats_kernel
from .one_row import Transform

INTERPRETED = not isinstance(_stats_kernel, triton.runtime.jit.JITFunction)

#: Rows, and columns of a tile that may end behind the last one, are numbered by 32 bits.
LARGEST = 2**31 - 2**16

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


# ---- choices


class Choice(NamedTuple):
    """Launch settings of one kind of kernel, for long rows. Shorter rows use fewer accesses, then fewer threads."""

    threads: int  # of a program
    accesses: int  # 128-bit loads that a thread has in flight
    programs: int = 1  # programs resident on a multiprocessor, which share its registers
    ends: int = 1  # the last tiles of a row, loaded at once
    kept: int = 0  # how many of these stay in registers between the first and the second pass over a row
    hints: bool = False  # cache hints: keep data that is read again, evict the rest
    stages: int = 1  # tiles that are computed or on their way at a time: 3 lets two arrive while one is computed


#: kind of kernel -> its choice: near the fastest that an H100 and an H200 timed with Triton 3.6, without spills on Triton 3.9 too.
#:   visit    one pass over a row. Two programs, so that one loads while the other reduces at the end of its row.
#:   fused    two passes over a row. One program: 132 rows of 152k bf16 logits (39 MB) stay in the 50 MB L2 of an H100 from first
#:            to second read if hints keep them there, but for a sixth; twice as many rows do not. A program a row: where another
#:            stream holds multiprocessors, no row waits for them. 1024 threads are 4 % faster, and spill on Triton 3.9.
#:   fused32  the same with fp32 logits, half of which are read from memory again: as much of a row in registers as there is
#:            room for. None of it is kept with a softcap ("capped32"), since tanh takes its registers and more time than a load,
#:            and of any row that ends within an access, whose end is read by single elements: Triton 3.9 spilled 40 to 168 bytes
#:            a thread.
#:   two      one pass over a row and its teacher's, with twice the loads and sums of `visit`.
#:   mixed    the same for the sums of a mixture, whose hundred instructions a logit hide any load, and for gradients with tanh,
#:            which have fifty to ninety (Triton 3.9 spilled to keep twice the loads of fp16 logits).
#:   vectors  a formula, whose numbers are single loads of a thread.
#:   slots    products over the slots of kept sets, whose programs read two rows or more before they wait.
#: Three stages copy tiles of a row into shared memory while others are computed (cp.async), and Triton 3.6 drops the cache hints of
#: what is copied: good for one pass over a row; two passes are 11 to 21 % slower with it, since they then read half of a row from
#: memory again.
LAUNCH = {
    "visit": Choice(512, 2, programs=2, ends=2, stages=3),
    "fused": Choice(512, 4, ends=2, kept=1, hints=True),
    "fused32": Choice(512, 4, ends=3, kept=3, hints=True),
    "two": Choice(256, 2, programs=2),
    "mixed": Choice(512, 1, programs=2),
    "vectors": Choice(128, 1),
    "slots": Choice(64, 2, programs=4),
}
FUSED = ("fused", "fused32", "capped32")
#: Kinds with the same tile for rows of any length.
OF_BLOCKS = ("scale", "vectors", "slots")
#: Programs of `scale_`: a few for each multiprocessor of the largest GPUs, and few enough to return at once when there is
#: nothing to do.
SCALE_PROGRAMS = 512


def fused_kind(logits: torch.dtype, softcap: float) -> str:
    """The kind of the fused kernel."""
    if logits.itemsize < 4:
        return "fused"
    return "capped32" if softcap else "fused32"


def pull_kind(*softcaps: float) -> str:
    """The kind of the gradient beside a second stream, from the softcaps of both."""
    return "mixed" if any(softcaps) else "two"


def choice_of(kind: str) -> Choice:
    """The entry of LAUNCH."""
    return LAUNCH[{"scale": "visit", "capped32": "fused32"}.get(kind, kind)]


class Tile(NamedTuple):
    """What a program takes of a row at a time: the compile-time argument TILE of a kernel."""

    ALIGNED: bool  # rows begin where accesses do
    LANES: int  # threads
    COLS: int  # logits of an access
    ACCESSES: int  # accesses of a thread
    BLOCK: int  # logits in all
    PEELED: bool  # rows do not begin where accesses do, but those of the gradient are as far from there as those of the logits
    ENDS: int  # the last tiles, loaded at once
    KEPT: int  # how many of these stay in registers
    FIRST_HINT: str  # to the cache, about what is read again
    LAST_HINT: str  # and about what is not
    STAGES: int  # tiles that are computed or on their way at a time

    @property
    def accesses(self) -> int:
        """Of all threads together."""
        return self.LANES * self.ACCESSES

    @property
    def size(self) -> str:  # in words; `str` of all fields tells kernels apart in Triton's cache
        return f"{self.accesses} x {self.COLS}"


def choose(kind: str, tensors: tuple[Tensor, ...], halvings: int) -> dict[str, Any]:
    """The tile, halved so often, and options of Triton's compiler. Rows are in the last dimension of `tensors`, the first of
    which sets the width of an access. They depend on vocabulary, dtypes and strides, never on the number of rows.

    Half a tile is half of what each thread has in flight and then, once that is one access, half the threads."""
    cols = 16 // tensors[0].element_size()
    # All strides count, whatever the sizes, so that a dimension of size 1 does not select another kernel.
    aligned = not any([stride % 16 for x in tensors for stride in x.stride()[:-1]])
    if kind == "slots":  # which read the end of a row by whole accesses, too
        aligned = aligned and tensors[0].shape[-1] % 16 == 0
    # Unaligned gradients are written 16 bytes at a time too, if each of their rows has the same offset from a 16-byte boundary
    # as its logits. So only strides modulo an access matter, and the stride of a dimension of size 1 does not.
    peeled = not aligned and kind in ("visit", *FUSED) and len(tensors) == 2 and len({_behind(x, cols) for x in tensors}) == 1
    columns = 2**31 if kind in OF_BLOCKS else tensors[0].shape[-1]
    device = None if INTERPRETED else triton.runtime.driver.active
    index = tensors[0].device.index
    return _launch(kind, choice_of(kind), columns, cols, aligned, peeled, halvings, device, index)


def _behind(x: Tensor, cols: int) -> tuple[int, ...]:
    """How far rows of x lie behind the boundaries of accesses of `cols`."""
    apart = [stride % cols for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
    return *apart, x.data_ptr() // x.element_size() % cols


@functools.lru_cache(maxsize=256)
def _launch(
    kind: str, choice: Choice, columns: int, cols: int, aligned: bool, peeled: bool, halvings: int, driver: Any, index: int | None
) -> dict[str, Any]:  # fmt: skip
    """As `choose`, from numbers. `driver` and `index` name the device, whose target `options` asks for."""
    full, row = choice.threads * choice.accesses, triton.next_power_of_2(triton.cdiv(columns, cols))
    accesses = max(32, min(full, row) >> halvings)
    lanes, block = min(choice.threads, accesses), accesses * cols
    tiles = triton.cdiv(columns, block)
    ends = min(choice.ends, tiles) if aligned else 1  # single elements take more registers
    keeps = aligned and columns % cols == 0 and kind != "capped32"
    hints = ("evict_last", "evict_first") if choice.hints else ("", "")
    stages = choice.stages if tiles > ends and _copies_ahead() else 1
    tile = Tile(
        aligned, lanes, cols, accesses // lanes, block, peeled, ends, min(choice.kept, ends) if keeps else 0, *hints, stages
    )
    return {"TILE": tile, **options(lanes, choice, kind == "slots")}


def _copies_ahead() -> bool:
    """Whether tiles are copied into shared memory while others are computed: from sm_90 on. An A100 needs less in flight, and for
    AMD Triton keeps the tiles in registers, which it then spills."""
    if INTERPRETED:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def options(lanes: int, choice: Choice, fusion: bool) -> dict[str, Any]:
    """Options of Triton's compiler for a program of so many threads. As many threads as the choice has resident share the
    registers, also where rows are short and a program has few of them. `fusion`: of multiplications and additions, which rounds
    once instead of twice; the other kernels say where: `_fma`."""
    if INTERPRETED:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    # Not every version fuses multiplications and additions by default.
    found: dict[str, Any] = {"num_warps": max(1, lanes // target.warp_size), "enable_fp_fusion": fusion}
    if target.backend == "cuda":
        # Left alone, ptxas may spill a few bytes to make room for one more program.
        found["maxnreg"] = min(255, 65536 // (choice.threads * choice.programs))
    return found


# ---- launches, with smaller tiles where they are needed

#: The search for a tile that fits stops at this many accesses. Each try compiles once.
FEWEST = 128


class KernelFailure(RuntimeError):
    """No tile of a kernel runs here, and nothing was written. `reason` says in one line which kernel, and why."""

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
    programs: Callable[[int], int],
    arguments: tuple[Any, ...],
    **flags: Any,
) -> None:
    """Launch a kernel on the device of `tensors` with the first tile that runs, each half the size of the one before, see `choose`.
    `programs`: how many, for a number of columns in a tile.

    Raises KernelFailure if none does. Errors of the device, such as running out of memory, pass through: the kernel may have
    run in part, or would fail with a smaller tile as well."""
    if programs(1) == 0:
        return
    tile = functools.partial(choose, kind, tensors)
    halvings: int | str = 0
    if _remembered:  # usually empty, so that calls need not compute a key
        halvings = _remembered.get(_signature(kernel, tile, arguments, flags), 0)
    if isinstance(halvings, str):
        raise KernelFailure(halvings)
    launch = first = tile(halvings)
    said = ""  # only the text: the exception would keep the arguments alive
    with on_device(tensors[0]):
        while True:
            try:
                kernel[(programs(launch["TILE"].BLOCK),)](*arguments, **flags, **launch)
                break
            except Exception as error:
                if not _before_it_ran(error, kernel, arguments, {**flags, **launch}):
                    raise
                said, key = said or _line(error), _signature(kernel, tile, arguments, flags)
                smaller = tile(halvings + 1)
                if smaller["TILE"].accesses < FEWEST:
                    tried = first["TILE"].size if launch is first else f"{first['TILE'].size} down to {launch['TILE'].size}"
                    reason = f"the Triton kernel {_name(kernel)} does not run with tiles of {tried} logits: {said}"
                    _remembered[key] = reason
                    raise KernelFailure(reason) from error
                launch, halvings = smaller, halvings + 1
    if said:
        _remembered[key] = halvings
        warn_once(
            f"the Triton kernel {_name(kernel)} does not run with a tile of {first['TILE'].size} logits: {said}. It "
            f"runs with {launch['TILE'].size}, which may be slower. `python -m grpo_kernels doctor` says more."
        )


def _before_it_ran(error: Exception, kernel: Any, arguments: Sequence[Any], compiled_for: Mapping[str, Any]) -> bool:
    """Whether the kernel failed in the compiler or at the launch, before it wrote anything."""
    if isinstance(error, triton.TritonError):  # OutOfResources, PTXASError, CompilationError
        return not isinstance(error, triton.InterpreterError)  # the interpreter does not compile, so the kernel was running
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)) or "Triton Error [" in str(error):
        return "too many resources requested for launch" in str(error)  # the only driver error that comes before the start
    # Compiler passes fail with the same RuntimeError as launches. Compiled alone, only the former fail again.
    try:
        kernel.warmup(*arguments, grid=(1,), **compiled_for)
    except Exception:
        return True
    return False


def _signature(
    kernel: Any, tile: Callable[[int], Mapping[str, Any]], arguments: Sequence[Any], flags: Mapping[str, Any]
) -> Hashable:
    """A key for what Triton compiles: kernel, dtypes, devices and compile-time arguments."""

    def kind(x: Any) -> Any:
        return (x.dtype, x.device) if isinstance(x, Tensor) else tuple(map(kind, x)) if isinstance(x, tuple) else type(x)

    return kernel, tuple(map(kind, arguments)), frozenset({**flags, **tile(0)}.items())


def _name(kernel: Any) -> str:
    return str(kernel.__name__).removeprefix("_").removesuffix("_kernel")


def _line(error: BaseException) -> str:
    """The message of an error in one line."""
    while isinstance(error.__cause__, triton.CompilationError):  # every function on the way up wraps the error
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("ptxas"))][:2])
    if (
        isinstance(error, triton.CompilationError) and error.error_message
    ):  # the message comes after the location and its source
        definition = (error.src or "unknown source").strip().splitlines()[0]
        text = f"{error.error_message.strip().splitlines()[0]} ({lines[0].rstrip(':')} of `{definition}`)"
    return f"{type(error).__name__}: {text.rstrip('.')}"


# ---- arguments


def check_layout(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Raise ValueError unless a kernel can read x as rows [A, T, V], or write to it as those of `like`."""
    plain = x.dim() == 3 and (like is None or x.shape == like.shape) and (x.stride(2) == 1 or x.shape[2] == 1)
    few = plain and x.shape[0] * x.shape[1] < LARGEST and 0 < x.shape[2] < LARGEST
    if not few or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        taken = "[A, T, V]" if like is None else list(like.shape)
        raise ValueError(
            f"{name} is {str(x.dtype).removeprefix('torch.')} {list(x.shape)} with strides {list(x.stride())}: the Triton "
            f"kernels take fp32, bf16 or fp16 {taken} with unit stride in V, of fewer than 2^31 rows and columns."
        )


def vectors(n: int, **given: Tensor | None) -> tuple[Tensor | None, ...]:
    """Values of n rows by name, each in one piece."""
    for name, x in given.items():
        if x is not None and x.shape != (n,):
            raise ValueError(f"{name} has shape {list(x.shape)}: the Triton kernels take one value for each of {n} rows.")
    return tuple(None if x is None else x.contiguous() for x in given.values())


def table(name: str, n: int, x: Tensor) -> tuple[Tensor, int]:
    """A table [q, n] and the stride of its rows, each of which is in one piece."""
    if x.dim() != 2 or x.shape[1] != n:
        raise ValueError(f"{name} has shape {list(x.shape)}: the Triton kernels take one value for each of {n} rows.")
    x = x if x.stride(1) == 1 or n <= 1 else x.contiguous()
    return x, x.stride(0)


class Arguments:
    """The rows of a call as arguments of a kernel: those of the logits, of a second stream and of `outs`, where there are any."""

    def __init__(self, rows: LogitRows, *outs: Tensor | None) -> None:
        (A, T, V), second = rows.logits.shape, rows.second
        first, end = rows.part or (0, A * T)
        self.n, self.two = end - first, second is not None
        check_layout("logits", rows.logits)
        streams: list[Any] = [rows]
        if second is not None:
            check_layout("second.logits", second.logits, rows.logits)
            streams.append(second)
            self.shares = float(second.mixture), 1.0 - float(second.mixture)  # of the second stream and of the first
        places: tuple[Tensor | None, ...] = (*(of.logits for of in streams), *outs)
        self.tensors = tuple(x for x in places if x is not None)
        if len(self.tensors) > len(streams):
            check_layout("out", self.tensors[-1], rows.logits)
        self.rows: list[Any] = []
        for x in places:
            self.rows += (None, 0, 0) if x is None else (x, x.stride(0), x.stride(1))
        for of in streams:
            scale, softcap, inverse = of.transform
            inverse = vectors(self.n, inv_temperature=inverse)[0] if isinstance(inverse, Tensor) else float(inverse)
            transform = Transform(
                float(scale), float(softcap) if softcap else None, True if scale < 0 and not softcap else None
            )
            self.rows += (inverse, transform)
        self.rows += (V, T, first)

    def vectors(self, **given: Tensor | None) -> tuple[Tensor | None, ...]:
        return vectors(self.n, **given)

    def partials(self, partials: Partials) -> tuple[Any, ...]:
        """The table and its stride; with a second stream also where the rows of both streams begin, in between."""
        values, stride = table("partials", self.n, partials.values)
        return (values, values[partials.names.index("teacher_max") :], stride) if self.two else (values, stride)

    def slopes(self, slopes: Slopes) -> tuple[Tensor, int]:
        return table("slopes", self.n, slopes.values)

    def run(self, kind: str, kernel: Any, *arguments: Any, **flags: Any) -> None:
        """Launch a kernel with a program for each row."""
        run(kind, kernel, self.tensors, lambda _: self.n, arguments, **flags)


def run_blocks(
    kind: str, kernel: Any, matrices: dict[str, Tensor], programs: Callable[[int], int], *arguments: Any, **flags: Any
) -> None:
    """Over rows of matrices [n, width] whose columns are cut into blocks. `programs` gives the grid for a number of columns in a
    block."""
    given = tuple(matrices.values())
    width = given[0].shape[1]
    for name, x in matrices.items():
        plain = x.shape[1] == width and (x.stride(1) == 1 or width <= 1 or x.numel() == 0) and max(x.shape) < LARGEST
        if not plain:
            raise ValueError(
                f"{name} has shape {list(x.shape)} and strides {list(x.stride())}: the Triton kernels take rows of {width} in one "
                "piece."
            )
    run(kind, kernel, given, programs, arguments, **flags)


# ---- formulas

#: Operations of a program in Triton's words. Its minimum and maximum drop NaN unless told, which would hide that a row is broken.
OPERATIONS = {
    "neg": "-{}", "abs": "tl.abs({})", "exp": "tl.exp({})", "log": "tl.log({})", "sqrt": "tl.sqrt({})", "reciprocal": "1.0 / {}",
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}",
    "min": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)", "max": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "lt": "{} < {}", "le": "{} <= {}", "eq": "{} == {}", "ne": "{} != {}", "and": "{} & {}", "or": "{} | {}", "not": "{} == 0",
    "where": "tl.where({}, {}, {})",
}  # fmt: skip
#: Inputs that are not loaded.
OF_KERNEL = ("logps", "entropy")
SMALLEST, LARGEST_NUMBER = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@functools.lru_cache(maxsize=256)
def formula_of(program: Program) -> tuple[Any, tuple[int, ...]]:
    """The program of a token stage as a Triton function, and which of its numbers the function takes: the others are constants in
    its source. Programs with the same source are the same function, and so the same kernel."""
    names: list[str] = []
    used: list[int] = []
    for k, place in enumerate(program.numbers_used):
        what, of = program.sources[place]
        if what == "constant" and isinstance(of[0], bool):
            names.append(repr(of[0]))
        # Others would not be fp32 there.
        elif what == "constant" and (of[0] == 0 or SMALLEST <= abs(of[0]) <= LARGEST_NUMBER):
            names.append(repr(float(of[0])))
        else:
            names.append(f"numbers[{len(used)}]")
            used.append(k)
    lines = []
    for k, name in enumerate(program.inputs):
        names.append(f"x{len(names)}")
        value = f"given[{k}]" if name in OF_KERNEL else f"tl.load(inputs[{INPUTS.index(name)}] + i)"
        lines.append(f"    {names[-1]} = {value}")
    for operation, *registers in program.steps:
        words = OPERATIONS[operation]
        operands = [names[r] for r in registers[: words.count("{}")]]
        names.append(f"x{len(names)}")
        lines.append(f"    {names[-1]} = {words.format(*(f'({x})' for x in operands))}")
    lines.append(f"    return {', '.join(names[r] for r in program.outputs)}\n")
    return _formula("\n".join(lines)), tuple(used)


@functools.lru_cache(maxsize=256)
def _formula(body: str) -> Any:
    """A Triton function with this body. Its name tells it from others: Triton 3.5 has kernels by the names of their functions."""
    name = f"formula_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    source = f"def {name}(given, i, inputs, numbers):\n{body}"
    file = f"<{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # where Triton looks for it
    found: dict[str, Any] = {"tl": tl, "__name__": __name__}
    exec(compile(source, file, "exec"), found)
    return triton.jit(found[name])
