"""The launches of our other Triton kernels: for rows next to a teacher's rows, for the sparse products of kept sets, and for
the columns of sparse gradients. launches.py has those of one stream of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.launches import DTYPE_NAMES, KERNELS, LAYOUTS, TRANSFORMS, Case
from grpo_kernels.rows.backends.triton.launch import LAUNCH, Choice
from grpo_kernels.rows.partials import LogitRows, Partials, Second, Slopes, partials_of
from grpo_kernels.rows.ragged import Ragged

SINGLE, HALF, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Beside(Case):
    """Rows next to a teacher's rows: "two_stats", "two_pull", and "mixed", the sums of a mixture."""

    teacher: torch.dtype = HALF
    divergence: str = "reverse"

    @property
    def choice(self) -> Choice:
        return LAUNCH["mixed" if self.kernel == "mixed" else "two"]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.logits.itemsize, self.teacher.itemsize

    @property
    def stores(self) -> bool:
        return self.kernel == "two_pull"

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
    """A product over the slots of kept sets: "slot_logits", "add_weight_rows", "add_hidden_rows". `vocab` is the width of a row,
    `logits` the dtype of the rows that are read, `gradient` of those that they are multiplied with or added to."""

    @property
    def choice(self) -> Choice:
        return LAUNCH["slots"]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.logits.itemsize, self.second.itemsize

    @property
    def second(self) -> torch.dtype:
        assert self.gradient is not None
        return self.gradient

    @property
    def loops(self) -> str:
        return "fp32"

    @property
    def counted(self) -> bool:
        return False  # its loops also read ids and values of slots

    @property
    def stores(self) -> bool:
        return False  # behind the loop

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

    @property
    def choice(self) -> Choice:
        return LAUNCH["select"]

    @property
    def counted(self) -> bool:
        return False  # a scan in some of the tiles

    @property
    def stores(self) -> bool:
        return False  # of what is taken

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
DTYPES = (
    (HALF, HALF, HALF), (SINGLE, SINGLE, SINGLE), (FP16, FP16, FP16), (SINGLE, SINGLE, HALF), (SINGLE, HALF, HALF),
    (FP16, SINGLE, FP16),
)  # fmt: skip
#: The kernels of each direction.
OF_TWO = (
    ("two_stats", "reverse"), ("two_stats", "forward"), ("mixed", "jsd"),
    ("two_pull", "reverse"), ("two_pull", "forward"), ("two_pull", "jsd"),
)  # fmt: skip
PRODUCTS = ("slot_logits", "add_weight_rows", "add_hidden_rows")
SELECTIONS = ("select", "masses")


def beside(kernel: str, divergence: str, logits: torch.dtype, teacher: torch.dtype, gradient: torch.dtype) -> Beside:
    """`gradient` is of "two_pull" only."""
    return Beside(kernel, logits, gradient if kernel == "two_pull" else logits, teacher=teacher, divergence=divergence)


def of_two(divergence: str, transform: str = "linear") -> tuple[Case, ...]:
    """The launches that make a divergence of two rows of bf16 logits and its gradient."""
    kernels = ("two_stats", *(kernel for kernel, kind in OF_TWO[2:] if kind == divergence))
    return tuple(replace(beside(kernel, divergence, HALF, HALF, HALF), transform=transform) for kernel in kernels)


def other_cases() -> list[Case]:
    """Layouts, transforms and further sums are varied one at a time."""
    launches: dict[Case, None] = {}
    for kernel, divergence in OF_TWO:
        for dtypes in DTYPES:
            launches[beside(kernel, divergence, *dtypes)] = None
        base = beside(kernel, divergence, HALF, HALF, HALF)
        around: list[Case] = [replace(base, vocab=vocab, stride=stride) for vocab, stride in LAYOUTS]
        around += [replace(base, transform=transform) for transform in TRANSFORMS]
        # A softcap takes most registers: with every pair of dtypes, an odd vocabulary, and all that is summed beside.
        capped: list[Case] = [replace(beside(kernel, divergence, *dtypes), transform="softcap") for dtypes in DTYPES]
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


#: A few of each kernel, to compile in seconds.
OTHER_QUICK: list[Case] = [
    beside("two_stats", "reverse", HALF, HALF, HALF),
    beside("two_stats", "forward", SINGLE, SINGLE, SINGLE),
    beside("mixed", "jsd", SINGLE, HALF, HALF),
    beside("two_pull", "reverse", SINGLE, SINGLE, HALF),
    beside("two_pull", "jsd", HALF, HALF, HALF),
    replace(beside("two_pull", "jsd", SINGLE, SINGLE, HALF), transform="softcap"),
    *(Sparse(kernel, HALF, HALF, vocab=4096, stride=4096) for kernel in PRODUCTS),
    Selecting("select", SINGLE),
]
