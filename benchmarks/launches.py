"""List the launches of our Triton kernels, and compile them for a GPU that is not there.

The kernels read rows of logits, rows of logits with those of a teacher, or (row, id) pairs of
candidate sets.
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
        """Return (programs that fit on a multiprocessor, the resource that limits them).

        warps       of a program
        registers   of a thread
        shared      bytes of shared memory of a program
        """
        # There are four partitions, each with a quarter of the registers. A warp gets a multiple of
        # 8 registers per thread.
        warp_registers = -(-registers // 8) * 8 * self.gpu.warp_size
        resident_warps = 4 * (self.registers // 4 // warp_registers)
        limits = {
            "registers": resident_warps // warps,
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
    """Replaces Triton's driver, which needs a GPU.

    Triton asks its driver for the target to compile for, and for the device and the stream.
    """

    target: str

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target].gpu

    def get_current_device(self) -> str:
        return device_name(self.target)

    def get_current_stream(self, device: str) -> int:
        return 0


def device_name(target: str) -> str:
    """Return the device in Triton's cache of kernels, which no real GPU has."""
    return f"ahead-of-time {target}"


@contextlib.contextmanager
def compiling(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Compile launches for `target` instead of running them, within a `with` block.

    Yields a list that gets (kernel name, compiled kernel) of each launch. Signatures,
    specialisation and cache keys are those of a real call.
    """
    launches: list[tuple[str, Any]] = []
    original_run = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Replace JITFunction.run, which launches the compiled kernel unless warmup is True."""
        kernel = original_run(function, *args, grid=grid, warmup=True, **kwargs)
        launches.append((function.__name__, kernel))
        return kernel

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(target)),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield launches


# ---- the launches of the library


class Kind(NamedTuple):
    """Facts about a kernel for its budget."""

    launch: str  # the key of its launch in the package
    #: The pipe that the loops over a row issue to. "special" computes exponentials.
    loops: str = "special"
    #: Whether its loops only go over a row, so that their work can be counted per logit.
    counted: bool = True
    stores: bool = False  # whether its loop stores a gradient


#: Kernels over (row, id) pairs. Their loops also read ids and values; they store after the loop.
PAIR_KERNELS = ("pair_logits", "grad_hidden_of_pairs", "grad_weight_of_pairs")
KINDS = {
    "stats": Kind("one_pass"),
    "pull": Kind("one_pass", stores=True),
    "fused": Kind("fused", stores=True),
    "scale_": Kind("one_pass", "memory", counted=False, stores=True),
    "two_stats": Kind("reference"),
    "mixed": Kind("mixture"),
    "two_pull": Kind("reference", stores=True),
    **dict.fromkeys(PAIR_KERNELS, Kind("pairs", "fp32", counted=False)),
}
DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    None: "no gradient",
}
SINGLE = torch.float32
HALF = torch.bfloat16
FP16 = torch.float16


@dataclass(frozen=True)
class Case:
    """The arguments of a launch that select a compiled kernel.

    The kernels of PAIR_KERNELS have two matrices of hidden size `vocab` in place of the logits and
    their gradient: `logits_dtype` is the dtype of the matrix whose rows are read, `gradient_dtype`
    the dtype of the matrix that is written, or of the hidden states in "pair_logits".
    """

    kernel: str  # a key of KINDS
    logits_dtype: torch.dtype = HALF
    gradient_dtype: torch.dtype | None = HALF  # None: the fused loss without a gradient
    vocab: int = 151936  # vocabulary size: number of columns
    stride: int = 151936  # elements from one row to the next; more than `vocab` in padded rows
    transform: str = "linear"
    entropy: bool = False  # a sum of "stats" and "pull", the entropy bonus of "fused"
    #: Of "stats" and "pull": the sum of squares and, without a teacher, the largest probability.
    squares: bool = False
    objective: str = "grpo"  # a key of OBJECTIVES
    without: str | None = None  # a tensor that the batch lacks: "mask" or "old_logps"
    teacher_dtype: torch.dtype | None = None  # of the teacher's logits. None: no teacher
    divergence: str = ""

    @property
    def partials(self) -> tuple[str, ...]:
        """The names of the softmax sums that the kernel computes or reads, see core.softmax."""
        wanted = []
        if self.teacher_dtype is not None:
            wanted.append("divergence")
        if self.entropy:
            wanted.append("entropy")
        if self.squares:
            wanted.append("sum_squares")
            if self.teacher_dtype is None:
                wanted.append("top_id")
        return sums_for(tuple(wanted), self.divergence)

    @property
    def aligned(self) -> bool:
        """Whether all accesses of a row are aligned."""
        return self.stride % 16 == 0

    # ---- the figures that budgets are computed from

    @property
    def choice(self) -> Choice:
        """The package's launch parameters for it."""
        softcap = TRANSFORMS[self.transform](1).softcap
        if self.kernel == "fused":
            return choice_of(fused_kind(self.logits_dtype, softcap))
        if self.kernel == "two_pull":
            return LAUNCH[reference_gradient_kind(softcap, softcap)]
        return LAUNCH[self.kind.launch]

    @property
    def kind(self) -> Kind:
        """The facts about its kernel."""
        return KINDS[self.kernel]

    @property
    def stores(self) -> bool:
        """Whether its loop over a row stores a gradient."""
        return self.kind.stores and self.gradient_dtype is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes per element of each matrix that a pass reads. The first sets the access width."""
        second = self.gradient_dtype if self.kind.launch == "pairs" else self.teacher_dtype
        return tuple(dtype.itemsize for dtype in (self.logits_dtype, second) if dtype is not None)

    @property
    def before_wait(self) -> float:
        """The share of the loads of a tile that a thread issues before it waits for the first.

        The shares below 1 are those at which memory is still busy:

        - Tanh takes so long that half a tile suffices, or two fifths for single elements.
        - The gradient of an entropy in odd rows has registers for half a tile only.
        - A mixture with a teacher takes eighty instructions per logit, which hide any load.
        - A gradient with a teacher and all coefficients leaves registers for three of four loads.
          With tanh, or with all sums and tanh, half of them.
        """
        tanh = self.transform == "softcap"
        if self.teacher_dtype is None:
            odd = not self.aligned or self.vocab % 8 != 0
            return 0.5 if self.kernel == "fused" and (tanh or (self.entropy and odd)) else 1.0
        if self.divergence == "jsd" and self.kernel != "two_stats":
            return 0.5 if self.aligned else 0.0
        if not self.aligned:
            return 0.4 if tanh else 0.5
        if self.kernel == "two_pull" and not tanh:
            return 0.75 if self.squares else 1.0
        return 0.5 if tanh and (self.squares or self.kernel == "two_pull") else 1.0

    def __str__(self) -> str:
        """Return what distinguishes the launch, such as "bf16, V 151936, aligned, entropy".

        With the name of its kernel, the text identifies a launch in tables and in the lists of
        budgets.json.
        """
        is_over_pairs = self.kind.launch == "pairs"
        dtypes = DTYPE_NAMES[self.logits_dtype]
        if (is_over_pairs or self.kind.stores) and self.gradient_dtype != self.logits_dtype:
            dtypes += f" -> {DTYPE_NAMES[self.gradient_dtype]}"
        words = [
            dtypes,
            f"{'H' if is_over_pairs else 'V'} {self.vocab}",
            "aligned" if self.aligned else "unaligned",
        ]
        if self.stride > self.vocab:
            words.append("padded")
        if self.transform != "linear":
            words.append(self.transform)
        if self.entropy:
            words.append("entropy")
        if self.squares:
            words.append("squares")
        if self.kernel == "fused":
            words.append(self.objective)
        if self.without is not None:
            words.append(f"no {self.without}")
        if self.teacher_dtype is not None:
            words += [f"teacher {DTYPE_NAMES[self.teacher_dtype]}", self.divergence]
        return ", ".join(words)

    def launch(self) -> None:
        """Call the package's function that launches the kernel, with two rows of zeros.

        Inside `compiling` this only compiles the kernel, so the values do not matter.
        """
        if self.kind.launch == "pairs":
            self._launch_over_pairs()
            return
        n = 2  # rows
        logits = self._zeros(n, self.logits_dtype)
        grad_logits = None
        if self.gradient_dtype is not None:
            grad_logits = self._zeros(n, self.gradient_dtype)
        objective = replace(OBJECTIVES[self.objective], entropy_coef=0.01 if self.entropy else 0.0)
        inputs = token_inputs(n, objective, self.without)
        transform = TRANSFORMS[self.transform](n)
        if self.teacher_dtype is None:
            reference = None
            rows = LogitRows(logits, inputs.targets, inputs.processed, transform, None)
        else:
            kind = DivergenceKind(self.divergence, 0.5)
            reference = ReferenceRows(self._zeros(n, self.teacher_dtype), transform, kind)
            rows = LogitRows(logits, inputs.targets, None, transform, reference)
        sums = SoftmaxSums.masked(self.partials, n, logits.device, reference)
        match self.kernel:
            case "fused":
                KERNELS.fused_loss(rows, objective.loss_formula(inputs), grad_logits)
            case "stats" | "two_stats":
                KERNELS.run_sums_kernel(rows, self.partials)
            case "mixed":
                KERNELS.run_mixture_kernel(rows, sums)
            case "pull" | "two_pull":
                coefficients = self._coefficients(n)
                KERNELS.run_gradient_kernel(rows, sums, coefficients, grad_logits)
            case "scale_":
                KERNELS.scale_(logits, torch.ones(()))

    def _zeros(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [1, n, vocab] with the row stride of the case."""
        return torch.zeros(1, n, self.stride, dtype=dtype)[..., : self.vocab]

    def _coefficients(self, n: int) -> GradientCoefficients:
        """Return upstream gradients of 1 for the target's logit and for each sum of the case."""
        names = ["target"]
        if self.entropy:
            names += ["constant", "logp"]
        if self.squares:
            names.append("prob")
        if self.teacher_dtype is not None:
            names.append("divergence")
        return GradientCoefficients(torch.ones(len(names), n), tuple(names))

    def _launch_over_pairs(self) -> None:
        """Call the package's function that launches a kernel over (row, id) pairs.

        Inside `compiling` this only compiles the kernel. Only dtypes and strides matter then, so
        the sizes are small and arbitrary.
        """
        num_rows = 4
        num_pairs = 8
        vocab_size = 16
        pairs = Pairs(
            ids=torch.zeros(num_pairs, dtype=torch.int64),
            offsets=torch.zeros(num_rows + 1, dtype=torch.int64),
            rows=torch.zeros(num_pairs, dtype=torch.int64),
        )
        grad_pair_logits = torch.ones(num_pairs)
        assert self.gradient_dtype is not None
        # [vocab_size, H] like the weight. The first num_rows rows serve as hidden states.
        read_matrix = self._zeros(vocab_size, self.logits_dtype)[0]
        other_matrix = self._zeros(vocab_size, self.gradient_dtype)[0]
        match self.kernel:
            case "pair_logits":
                hidden = other_matrix[:num_rows]
                weight = read_matrix
                KERNELS.pair_logits(hidden, weight, pairs)
            case "grad_hidden_of_pairs":
                weight = read_matrix
                grad_hidden = other_matrix[:num_rows]
                KERNELS.write_grad_hidden_of_pairs(grad_pair_logits, pairs, weight, grad_hidden)
            case "grad_weight_of_pairs":
                hidden = read_matrix[:num_rows]
                grad_weight = other_matrix
                KERNELS.add_grad_weight_of_pairs(grad_pair_logits, pairs, hidden, grad_weight)


def token_inputs(
    n: int, objective: Objective, without: str | None = None, offset: int = 0
) -> TokenInputs:
    """Return the inputs of an objective for n tokens.

    without     a tensor that the batch lacks: "mask", "old_logps" or "ref_logps"
    offset      elements in memory before the first token of each vector
    """
    targets = torch.zeros(1, n + offset, dtype=torch.int64)
    zeros = torch.zeros(1, n + offset)
    optional: dict[str, Tensor] = {"mask": targets == 0, "old_logps": zeros, "ref_logps": zeros}
    if without is not None:
        del optional[without]
    batch = TokenBatch(targets, zeros, **optional)
    return objective.token_inputs(batch, normalizer=1.0).select(slice(offset, None))


def _objectives() -> dict[str, Objective]:
    """Return objectives that cover all formulas of the fused kernel, by a name.

    They are the presets that need one pass, and GRPO with each other term that a preset may have.
    """
    objective_by_name = {
        name: replace(preset, aggregate="token-mean")
        for name, preset in PRESETS.items()
        if preset.gradient_is_per_token and preset.exact is None
    }
    grpo = objective_by_name["grpo"]
    for estimator in (*ESTIMATORS, "k3+"):
        objective_by_name[f"grpo + {estimator}"] = replace(grpo, beta=0.04, kl=estimator)
    for kl in (
        *(Kl("k3", weighting) for weighting in WEIGHTINGS),
        Kl("k3", clamp_log=20.0, clamp=10.0),
    ):
        objective_by_name[f"grpo + {_kl_name(kl)}"] = replace(grpo, beta=0.04, kl=kl)
    objective_by_name["grpo, entropy floor"] = replace(grpo, filters=(EntropyFloor(1.0),))
    objective_by_name["grpo, bounded ratio"] = replace(grpo, log_ratio_bounds=(-20.0, 20.0))
    # Objectives that differ only in parameters share a compiled kernel. They are listed once, with
    # the name of the first and in the place of the last.
    distinct: dict[tuple, str] = {}
    for name, objective in objective_by_name.items():
        key = _formula_key(objective)
        distinct[key] = distinct.pop(key, name)
    return {name: objective_by_name[name] for name in distinct.values()}


def _formula_key(objective: Objective) -> tuple:
    """Return a key that is equal for objectives with the same compiled kernel."""
    return (
        *objective.formula.functions.values(),
        objective.beta != 0,
        objective.kl_spec.clamps is None,
        objective.filters == (),
        objective.log_ratio_bounds,
    )


def _kl_name(kl: Kl) -> str:
    """Return the estimator and the weighting of a KL term, such as "k3, ratio weighting"."""
    return f"{kl.estimator}, {'clamped' if kl.clamps else f'{kl.weighting} weighting'}"


OBJECTIVES = _objectives()
TRANSFORMS = {
    "linear": lambda n: RowTransform(1.0, 0.0, 1.0),
    "temperature per row": lambda n: RowTransform(1.0, 0.0, torch.ones(n)),
    "mirrored": lambda n: RowTransform(-0.5, 0.0, 1.0),
    "softcap": lambda n: RowTransform(1.0, 30.0, 1.25),
}
SHORT = 8192
#: (vocabulary, stride of a row): long and short rows, aligned and not, and an odd vocabulary in
#: padded rows.
LAYOUTS = ((151936, 151936), (50257, 50257), (50257, 50272), (1024, 1024), (1001, 1001))
#: Dtypes of logits and gradient. The last pair is that of a chunk of logits from hidden states.
#: The fused kernel does not compute the gradient of fp16 logits, which needs the loss scale first.
DTYPES = ((SINGLE, SINGLE), (HALF, HALF), (FP16, FP16), (SINGLE, HALF))
#: Dtypes of logits, teacher logits and gradient. The fourth is for a chunk from hidden states, and
#: the last two have a teacher of another width.
PAIRS = (
    (HALF, HALF, HALF), (SINGLE, SINGLE, SINGLE), (FP16, FP16, FP16), (SINGLE, SINGLE, HALF), (SINGLE, HALF, HALF),
    (FP16, SINGLE, FP16),
)  # fmt: skip
#: The divergences that each kernel with a teacher has code for.
OF_TWO = {
    "two_stats": ("reverse", "forward"),
    "mixed": ("jsd", "tv"),
    "two_pull": ("reverse", "forward", "jsd", "tv"),
}
#: Dtypes of the two matrices of a kernel over pairs.
MATRICES = ((HALF, HALF), (FP16, FP16), (SINGLE, SINGLE), (HALF, SINGLE), (FP16, SINGLE))


def _varied(case: Case) -> list[Case]:
    """Return the case in every layout, and with every transform."""
    layouts = [replace(case, vocab=vocab, stride=stride) for vocab, stride in LAYOUTS]
    return layouts + [replace(case, transform=transform) for transform in TRANSFORMS]


def cases() -> list[Case]:
    """Return the launches of the library, each once.

    Layouts, transforms, objectives and further sums are varied one at a time. Layouts and
    transforms change the loops over a row, an objective only changes arithmetic on a few scalars.
    """
    launch_cases = [
        *_without_teacher(),
        *_with_teacher(),
        *(
            Case(kernel, read_dtype, other_dtype, vocab=hidden_size, stride=hidden_size)
            for kernel, (read_dtype, other_dtype), hidden_size in product(
                PAIR_KERNELS, MATRICES, (4096, 1001)
            )
        ),
    ]
    distinct: dict[Case, None] = {}
    for case in launch_cases:
        has_gradient = case.kind.stores or case.kind.launch == "pairs"
        distinct[case if has_gradient else replace(case, gradient_dtype=None)] = None
    return [*distinct]


def _without_teacher() -> list[Case]:
    """Return the launches of the kernels that read rows of logits, without a teacher.

    These are "stats", "pull", "fused" and "scale_".
    """
    launch_cases: list[Case] = []
    for (logits, gradient), entropy in product(DTYPES, (False, True)):
        for case in _varied(Case("stats", logits, gradient, entropy=entropy)):
            if logits == gradient:
                launch_cases.append(case)
            launch_cases.append(replace(case, kernel="pull"))
            fused_gradient = None if logits == FP16 else gradient
            launch_cases.append(replace(case, kernel="fused", gradient_dtype=fused_gradient))
    for name in OBJECTIVES:
        launch_cases.append(Case("fused", objective=name))
        launch_cases.append(Case("fused", SINGLE, objective=name, entropy=True))
    launch_cases.append(Case("fused", without="mask"))
    launch_cases.append(Case("fused", without="old_logps"))
    launch_cases.append(Case("fused", gradient_dtype=None))
    launch_cases.append(Case("stats", SINGLE, without="mask"))  # as from hidden states
    for logits in (HALF, SINGLE):
        launch_cases.append(Case("stats", logits, squares=True))
        launch_cases.append(Case("pull", logits, entropy=True, squares=True))
    for dtype, padding in product((SINGLE, HALF, FP16), (0, 16, 1)):
        launch_cases.append(Case("scale_", dtype, dtype, stride=151936 + padding))
    return launch_cases


def _with_teacher() -> list[Case]:
    """Return the launches of the kernels that read rows of logits and those of a teacher.

    These are the keys of OF_TWO, each with the divergences that it has code for.
    """
    launch_cases: list[Case] = []
    for kernel, divergences in OF_TWO.items():
        for divergence in divergences:
            plain = [
                Case(kernel, logits, gradient, teacher_dtype=teacher, divergence=divergence)
                for logits, teacher, gradient in PAIRS
            ]
            # A softcap takes most registers, so that it meets every pair of dtypes, an odd
            # vocabulary, and all other sums.
            capped = [replace(case, transform="softcap") for case in plain]
            launch_cases += [*plain, *_varied(plain[0]), *capped]
            launch_cases.append(replace(capped[0], vocab=50257, stride=50257))
            if kernel != "mixed":
                launch_cases.append(replace(plain[0], entropy=True))
                for case in (plain[0], *capped):
                    launch_cases.append(replace(case, entropy=True, squares=True))
    return launch_cases


#: A few launches of each kernel, to compile in seconds.
QUICK = [case for kernel in KINDS for case in [x for x in cases() if x.kernel == kernel][::23]]
