"""The launches of our Triton kernels: a list of them, and how to compile them ahead of time without the GPU. Of one stream of
rows, for rows next to a teacher's rows, for the sparse products of kept sets, and for the columns of sparse gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from grpo_kernels.batch import TokenBatch
from grpo_kernels.formulas.filters import EntropyFloor
from grpo_kernels.formulas.kl import ESTIMATORS, WEIGHTINGS, Kl
from grpo_kernels.formulas.token_stage import TokenRows
from grpo_kernels.objective import PRESETS, Objective
from grpo_kernels.rows.backends import triton as backend
from grpo_kernels.rows.backends.triton.launch import LAUNCH, Choice, choice_of, fused_kind, pull_kind
from grpo_kernels.rows.partials import SLOPES, LogitRows, Partials, RowTransform, Second, Slopes, partials_of
from grpo_kernels.rows.ragged import Ragged

Tensor = torch.Tensor
KERNELS = backend.Kernels()

# ---- targets


@dataclass(frozen=True)
class Target:
    """A GPU by its name in Triton, and the resources of one multiprocessor (compute unit).

    NVIDIA: CUDA programming guide, technical specifications per compute capability. CDNA3: LLVM's AMDGPU usage guide."""

    gpu: GPUTarget
    shared: int  # bytes
    reserved: int = 1024  # bytes of shared memory that each program takes besides its own
    registers: int = 65536
    warps: int = 64
    programs: int = 32

    def occupancy(self, warps: int, registers: int, shared: int) -> tuple[int, str]:
        """(programs resident at a time, what limits them) of programs of so many warps and registers per thread."""
        # There are four partitions, each with a quarter of the registers. A warp gets a multiple of 8 registers per thread.
        warp_registers = -(-registers // 8) * 8 * self.gpu.warp_size
        held = 4 * (self.registers // 4 // warp_registers)
        limits = {
            "registers": held // warps,
            "threads": self.warps // warps,
            "programs": self.programs,
            "shared memory": self.shared // (shared + self.reserved) if shared else self.programs,
        }
        limit = min(limits, key=lambda name: limits[name])
        return limits[limit], limit


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 164 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 228 << 10),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 228 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 << 10, reserved=0, registers=131072, warps=32, programs=16),
}


class _Driver:
    """Replaces Triton's driver. Its name of the device keeps these kernels apart from those of a real GPU."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target].gpu

    def get_current_device(self) -> str:
        return device_name(self.target)

    def get_current_stream(self, device: str) -> int:
        return 0


def device_name(target: str) -> str:
    return f"ahead-of-time {target}"


@contextlib.contextmanager
def compiling(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Inside, a launch compiles for `target` and does not run; (kernel name, compiled kernel) is appended to the list.
    Signatures, specialisation and cache keys are therefore those of a real call."""
    launches: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append((self.__name__, kernel))
        return kernel

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(target)),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield launches


# ---- the launches of the library


class Kind(NamedTuple):
    """What budgets have to know about a kernel."""

    launch: str  # the key of its launch
    loops: str = "special"  # the pipe that its loops over a row issue to; "special" computes exponentials
    counted: bool = True  # whether a loop does nothing but go over a row, so that its work can be counted per logit
    stores: bool = False  # whether its loop stores a gradient


#: The loop of scale_ also handles the end of a row; those of products read ids and values of slots, and store behind the loop;
#: the selection scans some of its tiles and stores what it takes.
KINDS = {
    "stats": Kind("visit"), "pull": Kind("visit", stores=True), "fused": Kind("fused", stores=True),
    "scale_": Kind("visit", "memory", counted=False, stores=True),
    "two_stats": Kind("two"), "mixed": Kind("mixed"), "two_pull": Kind("two", stores=True),
    **{kernel: Kind("slots", "fp32", counted=False) for kernel in ("slot_logits", "add_weight_rows", "add_hidden_rows")},
    **{kernel: Kind("select", counted=False) for kernel in ("select", "masses")},
}  # fmt: skip
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", None: "no gradient"}


@dataclass(frozen=True)
class Case:
    """One launch: the choices of a caller that select a compiled kernel."""

    kernel: str
    logits: torch.dtype = torch.bfloat16
    gradient: torch.dtype | None = torch.bfloat16  # None: the fused loss without one
    vocab: int = 151936
    stride: int = 151936
    transform: str = "linear"
    entropy: bool = False  # of stats and pull; the bonus of the fused loss
    squares: bool = False  # of stats and pull: sum of squares and largest probability
    objective: str = "grpo"  # a key of OBJECTIVES
    without: str | None = None  # a tensor that the batch lacks: "mask", "old_logps"

    @property
    def partials(self) -> tuple[str, ...]:
        return partials_of(("entropy",) * self.entropy + ("sum_squares", "top_id") * self.squares)

    @property
    def aligned(self) -> bool:
        return self.stride % 16 == 0

    # ---- the figures that budgets are computed from

    @property
    def choice(self) -> Choice:
        softcap = TRANSFORMS[self.transform](1).softcap
        if self.kernel == "fused":
            return choice_of(fused_kind(self.logits, softcap))
        return LAUNCH[pull_kind(softcap) if self.kernel == "two_pull" else self.kind.launch]

    @property
    def kind(self) -> Kind:
        return KINDS[self.kernel]

    @property
    def stores(self) -> bool:
        return self.kind.stores and self.gradient is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that a visit reads per logit, for each stream; the first stream sets the width of an access."""
        return (self.logits.itemsize,)

    @property
    def before_wait(self) -> float:
        """The share of the loads of a tile that a thread issues before it waits for the first. Tanh takes so long that half a
        tile keeps memory busy. The gradient of an entropy in odd rows has registers for half a tile only."""
        odd = not self.aligned or self.vocab % 8 != 0
        half = self.kernel == "fused" and (self.transform == "softcap" or (self.entropy and odd))
        return 0.5 if half else 1.0

    def __str__(self) -> str:
        words = [DTYPE_NAMES[self.logits]]
        if self.kernel in ("pull", "fused", "two_pull") and self.gradient != self.logits:
            words.append(f"-> {DTYPE_NAMES[self.gradient]}")
        words += [f"V {self.vocab}", "aligned" if self.aligned else "unaligned"]
        words += ["padded"] * (self.stride > self.vocab)
        if self.kernel != "scale_":
            words += [self.transform] + ["entropy"] * self.entropy + ["squares"] * self.squares
        if self.kernel == "fused":
            words.append(self.objective)
        words += [f"no {self.without}"] * (self.without is not None)
        return ", ".join(words).replace(", ->", " ->")

    def launch(self) -> None:
        n = 2
        logits = torch.zeros(1, n, self.stride, dtype=self.logits)[..., : self.vocab]
        out = None if self.gradient is None else torch.zeros(1, n, self.stride, dtype=self.gradient)[..., : self.vocab]
        objective = replace(OBJECTIVES[self.objective], entropy_coef=0.01 if self.entropy else 0.0)
        of_tokens = token_rows(n, objective, self.without)
        rows = LogitRows(logits, of_tokens.targets, of_tokens.read, TRANSFORMS[self.transform](n))
        if self.kernel == "fused":
            KERNELS.fused(rows, objective.stage(of_tokens), out)
        elif self.kernel == "stats":
            KERNELS.stats(rows, self.partials)
        elif self.kernel == "pull":
            assert out is not None
            slopes = SLOPES[: 4 if self.squares else 3 if self.entropy else 1]
            partials = Partials.not_read(self.partials, n, logits.device)
            KERNELS.pull(rows, partials, Slopes(torch.zeros(len(slopes), n), slopes), out)
        else:
            KERNELS.scale_(logits, torch.ones(()))


def token_rows(n: int, objective: Objective, without: str | None = None, offset: int = 0) -> TokenRows:
    """Vectors [n] that start at `offset` in their memory."""
    targets, zeros = torch.zeros(1, n + offset, dtype=torch.int64), torch.zeros(1, n + offset)
    optional: dict[str, Tensor] = {"mask": targets == 0, "old_logps": zeros, "ref_logps": zeros}
    batch = TokenBatch(targets, zeros, **{name: x for name, x in optional.items() if name != without})
    return objective.token_rows(batch, normalizer=1.0)[offset:]


def _objectives() -> dict[str, Objective]:
    """The formulas of all presets that need one pass, and of the other terms that a preset may have."""
    presets = {
        name: replace(preset, aggregate="token-mean")
        for name, preset in PRESETS.items()
        if preset.one_pass and preset.exact is None
    }
    grpo = presets["grpo"]
    kls = [*ESTIMATORS, "k3+", *(Kl("k3", weighting) for weighting in WEIGHTINGS), Kl("k3", clamp_log=20.0, clamp=10.0)]
    every = presets | {f"grpo + {kl if isinstance(kl, str) else _kl_name(kl)}": replace(grpo, beta=0.04, kl=kl) for kl in kls}
    every["grpo, entropy floor"] = replace(grpo, filters=(EntropyFloor(1.0),))
    every["grpo, bounded ratio"] = replace(grpo, log_ratio_bounds=(-20.0, 20.0))
    # Presets with the same formula differ only in parameters, which do not cause a compilation: only the first is kept.
    distinct = {
        (*o.formula.chosen.values(), o.beta != 0, o.kl_spec.clamps is None, o.filters == (), o.log_ratio_bounds): name
        for name, o in reversed(every.items())
    }
    return {name: every[name] for name in reversed(distinct.values())}


def _kl_name(kl: Kl) -> str:
    return f"{kl.estimator}, {'clamped' if kl.clamps else f'{kl.weighting} weighting'}"


OBJECTIVES = _objectives()
TRANSFORMS = {
    "linear": lambda n: RowTransform(1.0, 0.0, 1.0),
    "temperature per row": lambda n: RowTransform(1.0, 0.0, torch.ones(n)),
    "mirrored": lambda n: RowTransform(-0.5, 0.0, 1.0),
    "softcap": lambda n: RowTransform(1.0, 30.0, 1.25),
}
#: (vocabulary, stride of a row): long and short rows; aligned, not aligned, and an odd vocabulary in padded rows.
SHORT = 8192
LAYOUTS = ((151936, 151936), (50257, 50257), (50257, 50272), (1024, 1024), (1001, 1001))
#: Dtypes of logits and gradient at logits level; the last are those of a chunk of logits at hidden level. The gradient of fp16
#: logits has to wait for the loss scale, so the fused kernel does not compute it.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
)


def of_one_stream() -> list[Case]:
    """Layouts, transforms and objectives are varied one at a time: the first two change the loops over a row, an objective
    changes only arithmetic on a few scalars."""
    launches: dict[Case, None] = {}  # in order, once
    for (logits, gradient), entropy in product(DTYPES, (False, True)):
        base = Case("stats", logits, gradient, entropy=entropy)
        around = [replace(base, vocab=vocab, stride=stride) for vocab, stride in LAYOUTS]
        around += [replace(base, transform=transform) for transform in TRANSFORMS]
        for case in around:
            if logits == gradient:
                launches[case] = None
            launches[replace(case, kernel="pull")] = None
            launches[replace(case, kernel="fused", gradient=None if logits == torch.float16 else gradient)] = None
    for name in OBJECTIVES:
        launches[Case("fused", objective=name)] = None
        launches[Case("fused", torch.float32, torch.bfloat16, objective=name, entropy=True)] = None
    launches[Case("fused", without="mask")] = None
    launches[Case("fused", without="old_logps")] = None
    launches[Case("fused", gradient=None)] = None
    launches[Case("stats", torch.float32, without="mask")] = None  # as from hidden states
    for logits, gradient in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
        launches[Case("stats", logits, gradient, squares=True)] = None
        launches[Case("pull", logits, gradient, squares=True)] = None
    for dtype, padding in product((torch.float32, torch.bfloat16, torch.float16), (0, 16, 1)):
        launches[Case("scale_", dtype, dtype, stride=151936 + padding)] = None
    return list(launches)


# ---- the other kernels

SINGLE, HALF, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Beside(Case):
    """Rows next to a teacher's rows: "two_stats", "two_pull", and "mixed", the sums of a mixture."""

    teacher: torch.dtype = HALF
    divergence: str = "reverse"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.logits.itemsize, self.teacher.itemsize

    @property
    def before_wait(self) -> float:
        """A mixture takes eighty instructions per logit, which hide any load. A gradient with all slopes leaves registers for
        three of four loads, and one with tanh, or all sums with it, for half of them; tanh takes so long that these keep memory
        busy, and two fifths of single elements."""
        tanh = self.transform == "softcap"
        if self.divergence == "jsd" and self.kernel != "two_stats":
            return 0.5 if self.aligned else 0.0
        if not self.aligned:
            return 0.4 if tanh else 0.5
        if self.kernel != "two_pull":
            return 0.5 if tanh and self.squares else 1.0
        return 0.5 if tanh else 0.75 if self.squares else 1.0

    def __str__(self) -> str:
        return f"{super().__str__()}, teacher {DTYPE_NAMES[self.teacher]}, {self.divergence}"

    def launch(self) -> None:
        n, dtypes = 2, (self.logits, self.teacher, self.gradient)
        logits, of_teacher, out = (torch.zeros(1, n, self.stride, dtype=dtype)[..., : self.vocab] for dtype in dtypes)
        transform, targets = TRANSFORMS[self.transform](n), torch.zeros(n, dtype=torch.int64)
        rows = LogitRows(logits, targets, None, transform, Second(of_teacher, transform, self.divergence, 0.5))
        names = partials_of(("divergence",) + ("entropy",) * self.entropy + ("sum_squares",) * self.squares, self.divergence)
        partials = Partials.not_read(names, n, logits.device, rows.second)
        if self.kernel == "two_stats":
            KERNELS.stats(rows, names)
        elif self.kernel == "mixed":
            KERNELS.mixed(rows, partials)
        else:
            slopes = ("target", *("constant", "log") * self.entropy, *("prob",) * self.squares, "divergence")
            KERNELS.pull(rows, partials, Slopes(torch.ones(len(slopes), n), slopes), out)


@dataclass(frozen=True)
class Sparse(Case):
    """A product over the slots of kept sets: "slot_logits", "add_weight_rows", "add_hidden_rows". `vocab` is the width of a
    row, `logits` the dtype of the rows that are read, `gradient` of those that they are multiplied with or added to."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.logits.itemsize, self.second.itemsize

    @property
    def second(self) -> torch.dtype:
        assert self.gradient is not None
        return self.gradient

    def __str__(self) -> str:
        layout = "aligned" if self.aligned else "unaligned"
        return f"{DTYPE_NAMES[self.logits]} and {DTYPE_NAMES[self.second]}, H {self.vocab}, {layout}"

    def launch(self) -> None:
        n, m, ids = 4, 8, 16
        slots = Ragged(*(torch.zeros(k, dtype=torch.int64) for k in (m, n + 1, m)))
        # The weight, or the hidden states: the first matrix sets the width of an access.
        read, second = (torch.zeros(ids, self.stride, dtype=dtype)[:, : self.vocab] for dtype in (self.logits, self.second))
        if self.kernel == "slot_logits":
            KERNELS.slot_logits(second[:n], read, slots)
        elif self.kernel == "add_weight_rows":
            KERNELS.add_weight_rows(torch.ones(m), slots, read, second[:n])
        else:
            KERNELS.add_hidden_rows(torch.ones(m), slots, read[:n], second)


@dataclass(frozen=True)
class Selecting(Case):
    """The columns of a sparse gradient, "select", or the mass of those that are sampled, "masses"."""

    gradient: torch.dtype | None = None

    @property
    def aligned(self) -> bool:
        """Whether all accesses of a row are aligned and whole. Those of an odd vocabulary are made of single elements."""
        return self.stride % 16 == 0 == self.vocab % 16

    def __str__(self) -> str:
        layout = ("aligned" if self.aligned else "unaligned") + ", padded" * (self.stride > self.vocab)
        return f"{DTYPE_NAMES[self.logits]}, {self.vocab} columns, {layout}, {self.transform}"

    def launch(self) -> None:
        n = 2
        logits = torch.zeros(1, n, self.stride, dtype=self.logits)[..., : self.vocab]
        stats, whole = Partials.not_read(partials_of(()), n, logits.device), torch.zeros(n, dtype=torch.int64)
        rows = LogitRows(logits, whole, transform=TRANSFORMS[self.transform](n))
        if self.kernel == "select":
            KERNELS.select(rows, stats, 1 / 256, whole)
        else:
            KERNELS.masses(rows, stats, 1 / 256)


#: (logits, teacher, gradient): of logits, of a chunk at hidden level, and with one stream of another width.
PAIRS = (
    (HALF, HALF, HALF), (SINGLE, SINGLE, SINGLE), (FP16, FP16, FP16), (SINGLE, SINGLE, HALF), (SINGLE, HALF, HALF),
    (FP16, SINGLE, FP16),
)  # fmt: skip
#: The kernels of each direction.
OF_TWO = (
    ("two_stats", "reverse"), ("two_stats", "forward"), ("mixed", "jsd"), ("mixed", "tv"),
    ("two_pull", "reverse"), ("two_pull", "forward"), ("two_pull", "jsd"), ("two_pull", "tv"),
)  # fmt: skip
PRODUCTS = tuple(kernel for kernel, kind in KINDS.items() if kind.launch == "slots")
SELECTIONS = tuple(kernel for kernel, kind in KINDS.items() if kind.launch == "select")


def beside(kernel: str, divergence: str, logits: torch.dtype, teacher: torch.dtype, gradient: torch.dtype) -> Beside:
    """`gradient` is of "two_pull" only."""
    return Beside(kernel, logits, gradient if kernel == "two_pull" else logits, teacher=teacher, divergence=divergence)


def of_others() -> list[Case]:
    """Of two streams, of kept sets and of the selection. Layouts, transforms and further sums are varied one at a time."""
    launches: dict[Case, None] = {}
    for kernel, divergence in OF_TWO:
        for dtypes in PAIRS:
            launches[beside(kernel, divergence, *dtypes)] = None
        base = beside(kernel, divergence, HALF, HALF, HALF)
        around: list[Case] = [replace(base, vocab=vocab, stride=stride) for vocab, stride in LAYOUTS]
        around += [replace(base, transform=transform) for transform in TRANSFORMS]
        # A softcap takes most registers: with every pair of dtypes, an odd vocabulary, and all that is summed beside.
        capped: list[Case] = [replace(beside(kernel, divergence, *dtypes), transform="softcap") for dtypes in PAIRS]
        around += [*capped, replace(base, vocab=50257, stride=50257, transform="softcap")]
        if kernel != "mixed":
            around += [replace(case, entropy=True, squares=True) for case in capped]
            around += [replace(base, entropy=True), replace(base, entropy=True, squares=True)]
        launches |= dict.fromkeys(around)
    for kernel in PRODUCTS:
        for read, second in ((HALF, HALF), (FP16, FP16), (SINGLE, SINGLE), (HALF, SINGLE), (FP16, SINGLE)):
            for width in (4096, 1001):
                launches[Sparse(kernel, read, second, vocab=width, stride=width)] = None
    for kernel in SELECTIONS:
        launches |= dict.fromkeys(Selecting(kernel, dtype) for dtype in (HALF, FP16, SINGLE))
        launches |= dict.fromkeys(Selecting(kernel, SINGLE, vocab=vocab, stride=stride) for vocab, stride in LAYOUTS)
        launches |= dict.fromkeys(Selecting(kernel, SINGLE, transform=transform) for transform in TRANSFORMS)
    return list(launches)


def cases() -> list[Case]:
    """The launches of the library."""
    return [*of_one_stream(), *of_others()]


#: A few of each kernel, to compile in seconds.
QUICK: list[Case] = [
    Case("stats"),
    Case("stats", torch.float32, torch.float32, entropy=True),
    Case("stats", torch.float16, torch.float16, vocab=50257, stride=50257),
    Case("pull", entropy=True),
    Case("pull", torch.float32, torch.float32, transform="softcap"),
    Case("pull", torch.float32, torch.bfloat16),
    Case("fused"),
    Case("fused", torch.float32, torch.bfloat16, entropy=True, objective="grpo + k3"),
    Case("fused", torch.float32, torch.float32, transform="softcap", entropy=True),
    Case("fused", vocab=50257, stride=50257),
    Case("fused", vocab=1024, stride=1024),
    Case("scale_"),
    beside("two_stats", "reverse", HALF, HALF, HALF),
    beside("two_stats", "forward", SINGLE, SINGLE, SINGLE),
    beside("mixed", "jsd", SINGLE, HALF, HALF),
    beside("two_pull", "reverse", SINGLE, SINGLE, HALF),
    beside("two_pull", "jsd", HALF, HALF, HALF),
    replace(beside("two_pull", "jsd", SINGLE, SINGLE, HALF), transform="softcap"),
    *(Sparse(kernel, HALF, HALF, vocab=4096, stride=4096) for kernel in PRODUCTS),
    Selecting("select", SINGLE),
]
