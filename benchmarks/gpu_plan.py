"""The stages of the GPU kit, their order and time limits: names only, for gpu_kit.py, which uses nothing but the standard
library.

A new part of the package is registered here: files of tests in CASES, suites in HEADLINE, COMPARED or FURTHER. Calls whose
waits, recompilations and CUDA graphs are checked are in gpu_counters.py (`calls`, `CAPTURED`), workloads for tuning its
launches in tune.py (`workloads`)."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    name: str
    most: float  # seconds in a call of ten minutes; scaled for other calls
    kept: float  # of these, reserved: earlier stages may not use them


#: The calls, the most important first. Each takes ten minutes, on a machine that keeps nothing between calls.
CALLS = {
    1: (
        Stage("install", 60, 10), Stage("env", 120, 80), Stage("correctness", 300, 170), Stage("counters", 90, 60),
        Stage("headline", 240, 140), Stage("plots", 40, 25),
    ),
    2: (Stage("tune", 570, 480),),
    3: (Stage("install", 60, 10), Stage("comparison", 520, 430), Stage("plots", 40, 25)),
    4: (
        Stage("install", 60, 10), Stage("memcheck", 150, 90), Stage("further", 400, 350),
        Stage("plots", 40, 25),
    ),
}  # fmt: skip
BRINGS = {
    1: "copy and product rates; every kernel and objective against float64; recompilations, waits of the host, CUDA graphs, "
    "registers as loaded; first times of the loss from logits and from hidden states, and which peers run",
    2: "the fastest launches, which call 3 runs with",
    3: "the tables of the targets, with all peers",
    4: "memory checks, all other suites",
}


class Cases(NamedTuple):
    files: tuple[str, ...]  # under tests/
    processes: int  # at a time: oracles in float64 take gigabytes at real sizes
    share: float  # of the time


#: Kernels first: everything else depends on them.
CASES = {
    "Triton kernels": Cases(
        (
            "rows/triton_cases.py", "rows/test_row_kernels.py", "rows/test_two_row_kernels.py",
            "rows/test_sparse.py", "rows/test_selection.py",
        ),
        12, 0.25,
    ),
    "real sizes": Cases(("rows/triton_recipes.py",), 3, 0.4),
    "objectives": Cases(
        (
            "core/test_objectives.py", "core/test_combinations.py", "core/test_relations.py", "core/test_rows.py",
            "core/test_autograd.py", "core/test_sparse_gradients.py",
        ),
        12, 0.35,
    ),
}  # fmt: skip
#: The part of each group that a rehearsal runs, of tests whose bounds its interpreter keeps: it truncates to bf16, a GPU rounds.
REHEARSED = (
    "nothing_to_do or which_unaligned or (test_products and bf16) or (an_objective_is and gspo) or same_bits_again or (slope and not digits) "
    "or offsets_beyond or (shares_near and triton) or no_bit"
)

#: Suites of the benchmarks, the most important first: the first cell of each in call 1, those of the targets, all others.
HEADLINE = ("logits", "hidden", "kept")
COMPARED = ("logits", "hidden", "active", "kept")
FURTHER = (
    "step", "divergence", "sparse", "logits-divergence", "length", "cross-entropy", "hidden-frozen", "logits-forward", "hidden-forward",
    "divergence-forward", "divergence-jsd", "rows", "vocab",
)  # fmt: skip
REHEARSED_SUITES = ("kept", "length")  # of them, on a CPU
