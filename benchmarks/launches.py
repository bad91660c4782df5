"""The launches of our Triton kernels: a list of them, and how to compile them ahead of time without
the GPU. Of one stream of rows, for rows next to a teacher's rows, and for the products over slots
of kept sets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from grpo_kernels.batch import TokenBatch
from grpo_kernels.core.backends import triton as backend
from grpo_kernels.core.backends.triton.launch import (
    LAUNCH,
    Choice,
    choice_of,
    fused_kind,
    reference_gradient_kind,
)
from grpo_kernels.core.divergence import DivergenceKind
from grpo_kernels.core.pairs import Pairs
from grpo_kernels.core.softmax import (
    GradientCoefficients,
    LogitRows,
    ReferenceRows,
    RowTransform,
    SoftmaxSums,
    sums_for,
)
from grpo_kernels.formulas.filters import EntropyFloor
from grpo_kernels.formulas.kl import ESTIMATORS, WEIGHTINGS, Kl
from grpo_kernels.formulas.token_inputs import TokenInputs
from grpo_kernels.objective import PRESETS, Objective

KERNELS = backend.Kernels()

# ---- targets


@dataclass(frozen=True)
class Target:
    """A GPU by its name in Triton, and the resources of one multiprocessor (compute unit).

    NVIDIA: CUDA programming guide, technical specifications per compute capability. CDNA3: LLVM's
    AMDGPU usage guide.
    """

    gpu: GPUTarget
    shared: int  # bytes
    reserved: int = 1024  # bytes of shared memory that each program takes besides its own
    registers: int = 65536
    warps: int = 64
    programs: int = 32

    def occupancy(self, warps: int, registers: int, shared: int) -> tuple[int, str]:
        """(programs resident at a time, what limits them) of programs of so many warps and
        registers per thread.
        """
        # There are four partitions, each with a quarter of the registers. A warp gets a multiple of
        # 8 registers per thread.
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
    "gfx942": Target(
        GPUTarget("hip", "gfx942", 64),
        64 << 10,
        reserved=0,
        registers=131072,
        warps=32,
        programs=16,
    ),
}


class _Driver(NamedTuple):
    """Replaces Triton's."""

    target: str

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target].gpu

    def get_current_device(self) -> str:
        return device_name(self.target)

    def get_current_stream(self, device: str) -> int:
        return 0


def device_name(target: str) -> str:
    """Keeps these kernels apart from those of a real GPU."""
    return f"ahead-of-time {target}"


@contextlib.contextmanager
def compiling(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Inside, a launch compiles for `target` and does not run; (kernel name, compiled kernel) is
    appended to the list. Signatures, specialisation and cache keys are therefore those of a real
    call.
    """
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
    loops: str = (
        "special"  # the pipe that its loops over a row issue to; "special" computes exponentials
    )
    # whether a loop does nothing but go over a row, so that its work can be counted per logit
    counted: bool = True
    stores: bool = False  # whether its loop stores a gradient


#: The loop of scale_ also handles the end of a row; those of products read ids and values of slots,
#: and store behind the loop.
PRODUCTS = ("slot_logits", "add_weight_rows", "add_hidden_rows")
KINDS = {
    "stats": Kind("one_pass"), "pull": Kind("one_pass", stores=True), "fused": Kind("fused", stores=True),
    "scale_": Kind("one_pass", "memory", counted=False, stores=True),
    "two_stats": Kind("reference"), "mixed": Kind("mixture"), "two_pull": Kind("reference", stores=True),
    **dict.fromkeys(PRODUCTS, Kind("pairs", "fp32", counted=False)),
}  # fmt: skip
DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    None: "no gradient",
}
SINGLE, HALF, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """One launch: the choices of a caller that select a compiled kernel. In a product of kept sets
    `vocab` is the width of a row, `logits` the dtype of the rows that are read, `gradient` of those
    that they are multiplied with or added to.
    """

    kernel: str
    logits: torch.dtype = HALF
    gradient: torch.dtype | None = HALF  # None: the fused loss without one
    vocab: int = 151936
    stride: int = 151936
    transform: str = "linear"
    entropy: bool = False  # of stats and pull; the bonus of the fused loss
    squares: bool = (
        False  # of stats and pull: sum of squares and, of one stream, largest probability
    )
    objective: str = "grpo"  # a key of OBJECTIVES
    without: str | None = None  # a tensor that the batch lacks: "mask", "old_logps"
    teacher: torch.dtype | None = None  # of a second stream of rows
    divergence: str = ""

    @property
    def partials(self) -> tuple[str, ...]:
        two = self.teacher is not None
        squares = ("sum_squares",) if two else ("sum_squares", "top_id")
        return sums_for(
            ("divergence",) * two + ("entropy",) * self.entropy + squares * self.squares,
            self.divergence,
        )

    @property
    def aligned(self) -> bool:
        """Whether all accesses of a row are aligned."""
        return self.stride % 16 == 0

    # ---- the figures that budgets are computed from

    @property
    def choice(self) -> Choice:
        softcap = TRANSFORMS[self.transform](1).softcap
        if self.kernel == "fused":
            return choice_of(fused_kind(self.logits, softcap))
        return LAUNCH[
            reference_gradient_kind(softcap, softcap)
            if self.kernel == "two_pull"
            else self.kind.launch
        ]

    @property
    def kind(self) -> Kind:
        return KINDS[self.kernel]

    @property
    def stores(self) -> bool:
        return self.kind.stores and self.gradient is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that a pass reads per logit, for each stream; the first stream sets the width of an
        access.
        """
        second = self.gradient if self.kind.launch == "pairs" else self.teacher
        return tuple(dtype.itemsize for dtype in (self.logits, second) if dtype is not None)

    @property
    def before_wait(self) -> float:
        """The share of the loads of a tile that a thread issues before it waits for the first. Tanh
        takes so long that half a tile, and two fifths of single elements, keep memory busy. The
        gradient of an entropy in odd rows has registers for half a tile only. With a teacher: a
        mixture takes eighty instructions per logit, which hide any load; a gradient with all slopes
        leaves registers for three of four loads, and one with tanh, or all sums with it, for half
        of them.
        """
        tanh = self.transform == "softcap"
        if self.teacher is None:
            odd = not self.aligned or self.vocab % 8 != 0
            return 0.5 if self.kernel == "fused" and (tanh or (self.entropy and odd)) else 1.0
        if self.divergence == "jsd" and self.kernel != "two_stats":
            return 0.5 if self.aligned else 0.0
        if not self.aligned:
            return 0.4 if tanh else 0.5
        if self.kernel != "two_pull":
            return 0.5 if tanh and self.squares else 1.0
        return 0.5 if tanh else 0.75 if self.squares else 1.0

    def __str__(self) -> str:
        slots, dtypes = self.kind.launch == "pairs", [self.logits]
        dtypes += [self.gradient] * ((slots or self.kind.stores) and self.gradient != self.logits)
        words = [" -> ".join(DTYPE_NAMES[dtype] for dtype in dtypes)]
        words += [
            f"{'H' if slots else 'V'} {self.vocab}",
            "aligned" if self.aligned else "unaligned",
        ]
        words += ["padded"] * (self.stride > self.vocab) + [self.transform] * (
            self.transform != "linear"
        )
        words += (
            ["entropy"] * self.entropy
            + ["squares"] * self.squares
            + [self.objective] * (self.kernel == "fused")
        )
        words += [f"no {self.without}"] * (self.without is not None)
        return ", ".join(
            [
                *words,
                *(
                    [f"teacher {DTYPE_NAMES[self.teacher]}", self.divergence]
                    if self.teacher
                    else []
                ),
            ]
        )

    def launch(self) -> None:
        if self.kind.launch == "pairs":
            return self._multiply()
        n, dtypes = 2, (self.logits, self.teacher, self.gradient)
        logits, teacher, out = (
            d and torch.zeros(1, n, self.stride, dtype=d)[..., : self.vocab] for d in dtypes
        )
        objective = replace(OBJECTIVES[self.objective], entropy_coef=0.01 if self.entropy else 0.0)
        of_tokens, transform = (
            token_inputs(n, objective, self.without),
            TRANSFORMS[self.transform](n),
        )
        second = (
            None
            if teacher is None
            else ReferenceRows(teacher, transform, DivergenceKind(self.divergence, 0.5))
        )
        read = of_tokens.processed if second is None else None
        rows = LogitRows(logits, of_tokens.targets, read, transform, second)
        partials = SoftmaxSums.masked(self.partials, n, logits.device, second)
        slopes = (
            "target",
            *("constant", "logp") * self.entropy,
            *("prob",) * self.squares,
            *("divergence",) * (second is not None),
        )
        match self.kernel:
            case "fused":
                KERNELS.fused_loss(rows, objective.loss_formula(of_tokens), out)
            case "stats" | "two_stats":
                KERNELS.run_sums_kernel(rows, self.partials)
            case "mixed":
                KERNELS.run_mixture_kernel(rows, partials)
            case "pull" | "two_pull":
                KERNELS.run_gradient_kernel(
                    rows, partials, GradientCoefficients(torch.ones(len(slopes), n), slopes), out
                )
            case "scale_":
                KERNELS.scale_(logits, torch.ones(()))

    def _multiply(self) -> None:
        """Over the slots of kept sets.

        The weight, or the hidden states: the first matrix sets the width of an access.
        """
        n, m, ids = 4, 8, 16
        slots = Pairs(*(torch.zeros(k, dtype=torch.int64) for k in (m, n + 1, m)))
        read, second = (
            torch.zeros(ids, self.stride, dtype=dtype)[:, : self.vocab]
            for dtype in (self.logits, self.gradient)
        )
        match self.kernel:
            case "slot_logits":
                KERNELS.pair_logits(second[:n], read, slots)
            case "add_weight_rows":
                KERNELS.write_grad_hidden_of_pairs(torch.ones(m), slots, read, second[:n])
            case "add_hidden_rows":
                KERNELS.add_grad_weight_of_pairs(torch.ones(m), slots, read[:n], second)


def token_inputs(
    n: int, objective: Objective, without: str | None = None, offset: int = 0
) -> TokenInputs:
    """Vectors [n] that start at `offset` in their memory."""
    targets, zeros = torch.zeros(1, n + offset, dtype=torch.int64), torch.zeros(1, n + offset)
    optional: dict[str, Tensor] = {"mask": targets == 0, "old_logps": zeros, "ref_logps": zeros}
    batch = TokenBatch(
        targets, zeros, **{name: x for name, x in optional.items() if name != without}
    )
    return objective.token_inputs(batch, normalizer=1.0).select(slice(offset, None))


def _objectives() -> dict[str, Objective]:
    """The formulas of all presets that need one pass, and of the other terms that a preset may
    have.
    """
    presets = {
        name: replace(preset, aggregate="token-mean")
        for name, preset in PRESETS.items()
        if preset.gradient_is_per_token and preset.exact is None
    }
    grpo = presets["grpo"]
    kls = [
        *ESTIMATORS,
        "k3+",
        *(Kl("k3", weighting) for weighting in WEIGHTINGS),
        Kl("k3", clamp_log=20.0, clamp=10.0),
    ]
    every = presets | {
        f"grpo + {kl if isinstance(kl, str) else _kl_name(kl)}": replace(grpo, beta=0.04, kl=kl)
        for kl in kls
    }
    every["grpo, entropy floor"] = replace(grpo, filters=(EntropyFloor(1.0),))
    every["grpo, bounded ratio"] = replace(grpo, log_ratio_bounds=(-20.0, 20.0))
    # Presets with the same formula differ only in parameters, which do not cause a compilation:
    # only the first is kept.
    distinct = {
        (
            *o.formula.functions.values(),
            o.beta != 0,
            o.kl_spec.clamps is None,
            o.filters == (),
            o.log_ratio_bounds,
        ): name
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
#: (vocabulary, stride of a row): long and short rows; aligned, not aligned, and an odd vocabulary
#: in padded rows.
SHORT = 8192
LAYOUTS = ((151936, 151936), (50257, 50257), (50257, 50272), (1024, 1024), (1001, 1001))
#: Dtypes of logits and gradient at logits level; the last are those of a chunk of logits at hidden
#: level. The gradient of fp16 logits has to wait for the loss scale, so the fused kernel does not
#: compute it.
DTYPES = ((SINGLE, SINGLE), (HALF, HALF), (FP16, FP16), (SINGLE, HALF))
#: (logits, teacher, gradient): of logits, of a chunk at hidden level, and with one stream of
#: another width.
PAIRS = (
    (HALF, HALF, HALF), (SINGLE, SINGLE, SINGLE), (FP16, FP16, FP16), (SINGLE, SINGLE, HALF), (SINGLE, HALF, HALF),
    (FP16, SINGLE, FP16),
)  # fmt: skip
#: The divergences that each kernel of two streams has code for.
OF_TWO = {
    "two_stats": ("reverse", "forward"),
    "mixed": ("jsd", "tv"),
    "two_pull": ("reverse", "forward", "jsd", "tv"),
}
#: Dtypes of the two matrices of a product.
MATRICES = ((HALF, HALF), (FP16, FP16), (SINGLE, SINGLE), (HALF, SINGLE), (FP16, SINGLE))


def _varied(case: Case) -> list[Case]:
    """In every layout, and with every transform."""
    return [
        *(replace(case, vocab=v, stride=s) for v, s in LAYOUTS),
        *(replace(case, transform=x) for x in TRANSFORMS),
    ]


def cases() -> list[Case]:
    """The launches of the library. Layouts, transforms, objectives and further sums are varied one
    at a time: the first two change the loops over a row, an objective changes only arithmetic on a
    few scalars.
    """
    found: list[Case] = []
    for (logits, gradient), entropy in product(DTYPES, (False, True)):
        for case in _varied(Case("stats", logits, gradient, entropy=entropy)):
            found += [case] * (logits == gradient)
            found += [
                replace(case, kernel="pull"),
                replace(case, kernel="fused", gradient=None if logits == FP16 else gradient),
            ]
    for name in OBJECTIVES:
        found += [
            Case("fused", objective=name),
            Case("fused", SINGLE, objective=name, entropy=True),
        ]
    found += [
        Case("fused", without="mask"),
        Case("fused", without="old_logps"),
        Case("fused", gradient=None),
    ]
    found += [Case("stats", SINGLE, without="mask")]  # as from hidden states
    for logits in (HALF, SINGLE):
        found += [
            Case("stats", logits, squares=True),
            Case("pull", logits, entropy=True, squares=True),
        ]
    found += [
        Case("scale_", dtype, dtype, stride=151936 + pad)
        for dtype, pad in product((SINGLE, HALF, FP16), (0, 16, 1))
    ]
    for kernel, divergence in ((kernel, x) for kernel, kinds in OF_TWO.items() for x in kinds):
        pairs = [Case(kernel, x, d, teacher=y, divergence=divergence) for x, y, d in PAIRS]
        # A softcap takes most registers: with every pair of dtypes, an odd vocabulary, and all
        # other sums.
        capped = [replace(case, transform="softcap") for case in pairs]
        found += [
            *pairs,
            *_varied(pairs[0]),
            *capped,
            replace(capped[0], vocab=50257, stride=50257),
        ]
        if kernel != "mixed":
            more = [
                replace(pairs[0], entropy=True),
                *(replace(case, entropy=True, squares=True) for case in [pairs[0], *capped]),
            ]
            found += more
    for kernel, (read, second), width in product(PRODUCTS, MATRICES, (4096, 1001)):
        found.append(Case(kernel, read, second, vocab=width, stride=width))
    # A gradient is of those that store one.
    return list(
        dict.fromkeys(
            (
                case
                if case.kind.stores or case.kind.launch == "pairs"
                else replace(case, gradient=None)
            )
            for case in found
        )
    )


#: A few of each kernel, to compile in seconds.
QUICK = [case for kernel in KINDS for case in [x for x in cases() if x.kernel == kernel][::23]]
