"""The resources that the Triton kernels need on a GPU, and their budgets: registers, accesses,
occupancy, work per logit. No GPU is needed.

    python -m benchmarks.resources [--target sm_90 ...] [--quick] [--write]

Compiles the kernels for each target as the library launches them, and reads the binary (AMD: the
assembly). Exits with 1 when a budget (see `broken`) is exceeded. Nothing is timed. Figures per
logit are counted in the machine code of the loops over a row, see `benchmarks/assembly.py`; not
those of `scale_` and of the products over slots, whose loops do more. Run it with each version of
Triton that is supported, because they order loads differently. `--write` saves the outcome of the
budgets in results/budgets.json, for benchmarks/README.md.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

import triton
from torch.torch_version import TorchVersion
from triton.runtime.jit import JITFunction

from benchmarks import SWITCH, parser_of
from benchmarks.assembly import PIPES, Loop, code, row_loops, taken
from benchmarks.launches import KINDS, QUICK, TARGETS, Case, backend, cases, compiling
from benchmarks.report import BUDGETS
from benchmarks.results import load, save
from benchmarks.tables import Record, Table, render
from grpo_kernels.core.backends.triton.launch import Tile


@dataclass(frozen=True)
class Report:
    target: str
    kernel: str
    case: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    stack: int  # bytes per thread
    shared: int  # bytes per program
    warps: int  # per program
    programs: int  # resident per multiprocessor
    limit: str  # what limits the number of resident programs
    fp64: bool
    # tiles of a row that are computed or copied into shared memory at a time; 1: none is copied
    stages: int
    loops: tuple[Loop, ...]  # over a row: that reads it, and that writes
    size: int  # bytes of a row's numbers, of all streams

    @property
    def threads(self) -> int:
        """Of a program."""
        return self.warps * TARGETS[self.target].gpu.warp_size

    @property
    def loads(self) -> list[int]:
        """Widths in bits of the loops' accesses, per thread."""
        return sorted({width for loop in self.loops for width in loop.loads})

    @property
    def stores(self) -> list[int]:
        return sorted({width for loop in self.loops for width in loop.stores})

    @property
    def in_flight(self) -> float:
        """KiB that the resident programs of a multiprocessor load at once."""
        of_thread = min((loop.in_flight * min(loop.loads) for loop in self.loops), default=0)
        return of_thread / 8 * self.programs * self.threads / 1024

    @property
    def written(self) -> float:
        """Bytes for a logit, of a row that gets a gradient."""
        return sum(sum(loop.stores) / 8 / self.elements(loop) for loop in self.loops)

    def elements(self, loop: Loop) -> float:
        """Logits that a thread processes in one iteration."""
        return sum(loop.loads) / 8 / self.size

    def issued(self, *pipes: str) -> float:
        """Instructions of a thread for a logit, in all passes."""
        return sum(loop.issued[pipe] / self.elements(loop) for loop in self.loops for pipe in pipes)


def report(target: str, case: Case) -> Report:
    with compiling(target) as launches:
        case.launch()
    ((_, kernel),) = launches
    used, warps, shared = taken(kernel), kernel.metadata.num_warps, kernel.metadata.shared
    programs, limit = TARGETS[target].occupancy(warps, used["registers"], shared)
    stages = next(x.STAGES for x in kernel.src.constants.values() if isinstance(x, Tile))
    return Report(
        target, case.kernel, str(case), **used, shared=shared, warps=warps, programs=programs, limit=limit, stages=stages,
        fp64=bool(re.search(r"\.f64|_f64", code(kernel))), loops=tuple(row_loops(kernel, case.kind.loops)), size=sum(case.sizes),
    )  # fmt: skip


# ---- budgets

#: Bytes per thread that a kernel may spill. Outside its loops for three things, for which ptxas
#: needs more registers than there are: a tile in single elements, such as the last one of an odd
#: vocabulary in padded rows; tanh of a tile that is kept in registers; and tanh of two rows with
#: all of their sums. Also for the choices that an H100 has found the fastest, by Triton 3.6, with
#: so many registers that 3.9 needs a few more: the fused kernel in 512 threads, and two rows in two
#: programs of 512, which read some of it again in their loops (3 % faster all the same than half
#: the threads, results/gpu_kit.json).
SPILL = {"fused": 8, "mixed": 32}
UNALIGNED_SPILL = {"fused": 192, "scale_": 32, "mixed": 136, "two_pull": 32}
PADDED_SPILL = {"fused": 160, "pull": 8}
SOFTCAP_SPILL = {"fused": 32, "two_stats": 8}
RELOADS = {"mixed": 38, "two_pull": 7}


def broken(case: Case, found: Report) -> list[str]:
    """The budgets that a kernel exceeds, in words; empty if it meets all."""
    choice = case.choice
    threads = choice.threads * choice.programs
    spill = max(
        SPILL.get(case.kernel, 0),
        0 if case.aligned else UNALIGNED_SPILL.get(case.kernel, 0),
        PADDED_SPILL.get(case.kernel, 0) if case.vocab % 8 else 0,
        SOFTCAP_SPILL.get(case.kernel, 0) if case.transform == "softcap" else 0,
    )
    # A choice is made for this number of full programs on a multiprocessor, or for as many threads
    # in programs of short rows.
    at_most = {
        "registers": (found.registers, TARGETS[found.target].registers // threads),
        "bytes spilled": (found.spilled + found.stack, spill),
        "reloads in loops": (sum(loop.local for loop in found.loops), RELOADS.get(case.kernel, 0)),
        "fp64": (int(found.fp64), 0),
        "kinds of store": (len(found.stores), int(case.stores) if case.kind.counted else 2),
    }
    at_least = {"resident threads": (found.programs * found.threads, threads)}
    if case.aligned:
        widest = min if case.kind.counted else max
        # The access to the first stream sets the width of a tile: accesses to a stream of a
        # narrower dtype are narrower.
        at_least["bits per load"] = (
            widest(found.loads, default=0),
            min(128, 128 * min(case.sizes) // case.sizes[0]),
        )
        if case.gradient is not None and case.stores:
            # 16-bit gradients of fp32 logits are stored in accesses of 64 bits.
            width = (
                128 * case.gradient.itemsize // max(case.logits.itemsize, case.gradient.itemsize)
            )
            at_least["bits per store"] = (widest(found.stores, default=0), width)
    if case.kind.counted:
        at_least |= _loads_before_the_first_wait(case, found)
    return [
        f"{name} {value}, at most {limit}"
        for name, (value, limit) in at_most.items()
        if value > limit
    ] + [
        f"{name} {value}, at least {limit}"
        for name, (value, limit) in at_least.items()
        if value < limit
    ]


def _loads_before_the_first_wait(case: Case, found: Report) -> dict[str, tuple[int, int]]:
    """Of a tile; the assembler may unroll a loop over tiles."""
    choice, cols = case.choice, 16 // case.sizes[0]
    accesses = max(
        1,
        min(
            choice.accesses, triton.next_power_of_2(triton.cdiv(case.vocab, cols)) // choice.threads
        ),
    )
    for loop in found.loops:
        width = max(loop.loads)
        tile = min(len(loop.loads), len(case.sizes) * accesses * (1 if width == 128 else cols))
        needed = max(1, round(case.before_wait * tile))
        if found.stages > 1 and width == 128:  # all tiles but the one that is computed
            needed = (found.stages - 1) * tile
        if TARGETS[found.target].gpu.backend == "hip" and TorchVersion(triton.__version__) < (3, 6):
            # Triton's compiler for AMD waits for the first loads of a tile before it issues the
            # last
            needed = 1
        if loop.in_flight < needed:
            return {"loads before the first wait": (loop.in_flight, needed)}
    return {}


Judged = tuple[Report, list[str]]  # with the budgets that it exceeds


def judge(job: tuple[str, Case]) -> Judged:
    found = report(*job)
    return found, broken(job[1], found)


def judge_all(targets: Sequence[str], cases: Sequence[Case]) -> Iterator[Judged]:
    """Each case for each target, compiled by as many processes as there are processors."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(judge, product(targets, cases), chunksize=4)


def outcome(found: Sequence[Judged]) -> Record:
    """Of one target: how many kernels, which are beyond their budgets, the most bytes that one
    spills, the least KiB that one has in flight on a multiprocessor in a long row.
    """
    return {
        "kernels": len(found),
        "beyond": [
            f"{r.kernel} {r.case}: {'; '.join(failures)}" for r, failures in found if failures
        ],
        "spilled": max(r.spilled + r.stack for r, _ in found),
        "in flight": min(
            r.in_flight for r, _ in found if "V 151936" in r.case and KINDS[r.kernel].counted
        ),
    }


# ---- the command


#: The columns of the table.
HEAD = (
    "kernel, regs, spill, shared, load, store, warps, /SM, limit, in flight, KiB/SM, written, fp32,"
    " exp, all"
)


def shown(found: Sequence[Judged]) -> Table:
    lines = [HEAD.split(", ")]
    for r, _ in found:
        widths = ["/".join(map(str, x)) or "-" for x in (r.loads, r.stores)]
        together = "/".join(f"{loop.in_flight} of {len(loop.loads)}" for loop in r.loops)
        work = [
            f"{r.written:g}",
            *(f"{r.issued(*pipes):.2f}" for pipes in (("fp32",), ("special",), PIPES)),
        ]
        work = work if KINDS[r.kernel].counted else [""] * len(work)
        held = (
            f"{r.registers}",
            f"{r.spilled + r.stack}",
            f"{r.shared}",
            *widths,
            f"{r.warps}",
            f"{r.programs}",
            r.limit,
        )
        lines.append([f"{r.kernel:10} {r.case}", *held, together, f"{r.in_flight:.0f}", *work])
    return lines


def main() -> int:
    parser = parser_of("benchmarks.resources", __doc__, {
        "--target": {"nargs": "+", "choices": TARGETS, "default": list(TARGETS)},
        "--quick": SWITCH | {"help": "a few kernels of each kind"},
        "--write": SWITCH | {"help": f"and this version's outcome into {BUDGETS.name}"},
    })  # fmt: skip
    args = parser.parse_args()
    if not isinstance(backend.softmax_sums_kernel, JITFunction):
        parser.error("TRITON_INTERPRET=1 is set: there is nothing to compile. Unset it.")
    every = QUICK if args.quick else cases()
    failed = []
    for target in args.target:
        found = [*judge_all([target], every)]
        print(
            f"\n{target}, Triton {triton.__version__}\n{render(shown(found), markdown=False)}",
            flush=True,
        )
        of_target = outcome(found)
        failed += [f"{target} {beyond}" for beyond in of_target["beyond"]]
        if args.write:
            kept = load(BUDGETS)
            kept.setdefault(triton.__version__, {})[target] = of_target
            save(BUDGETS, kept)
    print(
        f"\n{len(every) * len(args.target)} kernels, {len(failed)} beyond their budgets",
        *failed,
        sep="\n",
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
