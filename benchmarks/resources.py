"""Check the resources that the Triton kernels need on a GPU against budgets, without a GPU.

    python -m benchmarks.resources [--target sm_90 ...] [--quick] [--write]

The resources are registers, memory accesses, occupancy, and instructions per logit. Nothing is
timed. The kernels are compiled for each target as the package launches them, and the binary (AMD:
the assembly) is read. The exit code is 1 if a kernel exceeds a budget, see `broken`.

Figures per logit are counted in the machine code of the loops over a row, see
`benchmarks/assembly.py`. `scale_` and the kernels over (row, id) pairs have none, because their
loops do more. Run the command with each supported version of Triton, because they order loads
differently. --write saves the outcome in results/budgets.json, for benchmarks/README.md.
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
    """The resources of a compiled kernel."""

    target: str  # a key of TARGETS
    kernel: str  # a key of KINDS
    case: str  # the arguments of its launch, in words
    registers: int  # per thread
    spilled: int  # bytes per thread
    stack: int  # bytes per thread
    shared: int  # bytes per program
    warps: int  # per program
    programs: int  # resident per multiprocessor
    limit: str  # what limits the number of resident programs
    fp64: bool  # whether it has fp64 instructions
    #: Tiles of a row that are being computed or copied into shared memory. 1: none is copied.
    stages: int
    loops: tuple[Loop, ...]  # over a row: the one that only reads it, the one that also writes
    size: int  # bytes per column of a row, of all matrices that a pass reads

    @property
    def threads(self) -> int:
        """The number of threads of a program."""
        return self.warps * TARGETS[self.target].gpu.warp_size

    @property
    def loads(self) -> list[int]:
        """The widths of loads in the loops, in bits per thread."""
        return sorted({width for loop in self.loops for width in loop.loads})

    @property
    def stores(self) -> list[int]:
        """The widths of stores in the loops, in bits per thread."""
        return sorted({width for loop in self.loops for width in loop.stores})

    @property
    def in_flight(self) -> float:
        """KiB that the resident programs of a multiprocessor load at the same time, at least."""
        bits_per_thread = min((loop.in_flight * min(loop.loads) for loop in self.loops), default=0)
        return bits_per_thread / 8 * self.programs * self.threads / 1024

    @property
    def written(self) -> float:
        """Bytes written per logit, in a row that gets a gradient."""
        return sum(sum(loop.stores) / 8 / self.elements(loop) for loop in self.loops)

    def elements(self, loop: Loop) -> float:
        """Return the number of logits that a thread processes in one iteration."""
        return sum(loop.loads) / 8 / self.size

    def issued(self, *pipes: str) -> float:
        """Return the instructions per logit that the loops issue to these pipes, in all passes."""
        return sum(loop.issued[pipe] / self.elements(loop) for loop in self.loops for pipe in pipes)


def report(target: str, case: Case) -> Report:
    """Compile the kernel of a launch for a target, and return its resources.

    target  a key of TARGETS
    """
    with compiling(target) as launches:
        case.launch()
    ((_name, kernel),) = launches  # exactly one kernel is launched
    used = taken(kernel)
    warps = kernel.metadata.num_warps
    shared = kernel.metadata.shared
    programs, limit = TARGETS[target].occupancy(warps, used["registers"], shared)
    return Report(
        target=target,
        kernel=case.kernel,
        case=str(case),
        **used,
        shared=shared,
        warps=warps,
        programs=programs,
        limit=limit,
        fp64=bool(re.search(r"\.f64|_f64", code(kernel))),
        stages=next(
            constant.STAGES
            for constant in kernel.src.constants.values()
            if isinstance(constant, Tile)
        ),
        loops=tuple(row_loops(kernel, case.kind.loops)),
        size=sum(case.sizes),
    )


# ---- budgets

#: Bytes per thread that a kernel may spill. ptxas needs more registers than there are for
#:
#: - a tile that is accessed in single elements: all tiles of unaligned rows, and the last tile of
#:   an odd vocabulary in padded rows,
#: - tanh of a tile that is kept in registers, and tanh in two rows with all of their sums,
#: - the launch parameters that were the fastest on an H100 with Triton 3.6, because Triton 3.9
#:   needs a few registers more. With these, kernels with a teacher even reload spilled registers in
#:   their loops (RELOADS). They are still 3 % faster than with half the threads
#:   (results/gpu_kit.json).
#:
#: The budgets are for all rows, and more for some of them.
SPILL = {"fused": 8, "mixed": 32}
UNALIGNED_SPILL = {"fused": 192, "scale_": 32, "mixed": 136, "two_pull": 32}
PADDED_SPILL = {"fused": 160, "pull": 8}
SOFTCAP_SPILL = {"fused": 32, "two_stats": 8}
#: Accesses to spilled registers in the loops of a kernel.
RELOADS = {"mixed": 38, "two_pull": 7}


def broken(case: Case, figures: Report) -> list[str]:
    """Return the budgets that a kernel exceeds, in words.

    case    the launch
    figures   the resources of its kernel
    """
    # The launch parameters are chosen for this number of threads on a multiprocessor. Short rows
    # have more and smaller programs.
    threads = case.choice.threads * case.choice.programs
    # {name of a budget: (value, limit)}
    at_most = {
        "registers": (figures.registers, TARGETS[figures.target].registers // threads),
        "bytes spilled": (figures.spilled + figures.stack, _most_spilled(case)),
        "reloads in loops": (
            sum(loop.local for loop in figures.loops),
            RELOADS.get(case.kernel, 0),
        ),
        "fp64": (int(figures.fp64), 0),
        "kinds of store": (len(figures.stores), int(case.stores) if case.kind.counted else 2),
    }
    at_least = {"resident threads": (figures.programs * figures.threads, threads)}
    if case.aligned:
        # Loops of other kernels also load ids and values, so only their widest access is checked.
        width_of = min if case.kind.counted else max
        # A thread reads 128 bits of the first matrix at a time, and as many columns of the others,
        # which are fewer bits in a narrower dtype.
        width = min(128, 128 * min(case.sizes) // case.sizes[0])
        at_least["bits per load"] = (width_of(figures.loads, default=0), width)
        if case.gradient_dtype is not None and case.stores:
            # 16-bit gradients of fp32 logits are stored in accesses of 64 bits.
            gradient_bytes = case.gradient_dtype.itemsize
            width = 128 * gradient_bytes // max(case.logits_dtype.itemsize, gradient_bytes)
            at_least["bits per store"] = (width_of(figures.stores, default=0), width)
    if case.kind.counted:
        at_least |= _loads_before_the_first_wait(case, figures)
    exceeded = []
    for name, (value, limit) in at_most.items():
        if value > limit:
            exceeded.append(f"{name} {value}, at most {limit}")
    for name, (value, limit) in at_least.items():
        if value < limit:
            exceeded.append(f"{name} {value}, at least {limit}")
    return exceeded


def _most_spilled(case: Case) -> int:
    """Return the bytes per thread that the kernel of a launch may spill."""
    budgets = [SPILL]
    if not case.aligned:
        budgets.append(UNALIGNED_SPILL)
    if case.vocab % 8 != 0:
        budgets.append(PADDED_SPILL)
    if case.transform == "softcap":
        budgets.append(SOFTCAP_SPILL)
    return max(budget.get(case.kernel, 0) for budget in budgets)


def _loads_before_the_first_wait(case: Case, figures: Report) -> dict[str, tuple[int, int]]:
    """Return {name of the budget: (value, limit)} of the first loop that is below its limit, or {}.

    The value is the number of loads that a thread issues before it waits for the first of them. The
    limit is the share `case.before_wait` of the loads of a tile.
    """
    choice = case.choice
    columns = 16 // case.sizes[0]  # of an access of 128 bits
    accesses_of_row = triton.next_power_of_2(triton.cdiv(case.vocab, columns))
    accesses = max(1, min(choice.accesses, accesses_of_row // choice.threads))
    is_hip = TARGETS[figures.target].gpu.backend == "hip"
    for loop in figures.loops:
        width = max(loop.loads)
        loads_per_access = 1 if width == 128 else columns  # one for each column if unaligned
        # An iteration may have more loads than a tile, because the assembler may unroll the loop.
        loads_of_tile = min(len(loop.loads), len(case.sizes) * accesses * loads_per_access)
        needed = max(1, round(case.before_wait * loads_of_tile))
        if figures.stages > 1 and width == 128:
            # All tiles but the one that is being computed are being copied.
            needed = (figures.stages - 1) * loads_of_tile
        if is_hip and TorchVersion(triton.__version__) < (3, 6):
            # Triton's compiler for AMD waits for the first loads of a tile before it issues the
            # last ones.
            needed = 1
        if loop.in_flight < needed:
            return {"loads before the first wait": (loop.in_flight, needed)}
    return {}


#: The resources of a kernel, and the budgets that it exceeds.
Judged = tuple[Report, list[str]]


def judge(job: tuple[str, Case]) -> Judged:
    """Compile a kernel, and compare it with its budgets.

    job     (target, launch). It is one argument, because a process pool maps over jobs
    """
    target, case = job
    figures = report(target, case)
    return figures, broken(case, figures)


def judge_all(targets: Sequence[str], cases: Sequence[Case]) -> Iterator[Judged]:
    """Yield the outcome of each launch for each target.

    As many processes as there are processors compile the kernels.
    """
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(judge, product(targets, cases), chunksize=4)


def outcome(judged: Sequence[Judged]) -> Record:
    """Return the record of a target for results/budgets.json.

    judged  the outcomes of all launches for the target

    "kernels" is their number, "beyond" lists those that exceed a budget, "spilled" is the most
    bytes that one spills, and "in flight" the least KiB that one loads at the same time on a
    multiprocessor, in long rows.
    """
    reports = [report for report, _exceeded in judged]
    beyond = [
        f"{report.kernel} {report.case}: {'; '.join(exceeded)}"
        for report, exceeded in judged
        if exceeded
    ]
    in_long_rows = [
        report for report in reports if "V 151936" in report.case and KINDS[report.kernel].counted
    ]
    return {
        "kernels": len(judged),
        "beyond": beyond,
        "spilled": max(report.spilled + report.stack for report in reports),
        "in flight": min(report.in_flight for report in in_long_rows),
    }


# ---- the command


def shown(judged: Sequence[Judged]) -> Table:
    """Return a table with a line for each kernel. The last four columns are per logit."""
    lines = [_columns_of_report(report) for report, _ in judged]
    return [list(lines[0]), *(list(columns.values()) for columns in lines)]


def _columns_of_report(r: Report) -> dict[str, str]:
    """Return {head of a column: its text} for the resources of a kernel.

    "load" and "store" are the widths of accesses in bits per thread, "/SM" is the number of
    resident programs of a multiprocessor, and "in flight" the number of loads that are outstanding
    at a time, of those of an iteration, for each loop.
    """
    columns = {
        "kernel": f"{r.kernel:10} {r.case}",
        "regs": f"{r.registers}",
        "spill": f"{r.spilled + r.stack}",
        "shared": f"{r.shared}",
        "load": "/".join(map(str, r.loads)) or "-",
        "store": "/".join(map(str, r.stores)) or "-",
        "warps": f"{r.warps}",
        "/SM": f"{r.programs}",
        "limit": r.limit,
        "in flight": "/".join(f"{loop.in_flight} of {len(loop.loads)}" for loop in r.loops),
        "KiB/SM": f"{r.in_flight:.0f}",
        "written": "",
        "fp32": "",
        "exp": "",
        "all": "",
    }
    if KINDS[r.kernel].counted:
        columns["written"] = f"{r.written:g}"
        columns["fp32"] = f"{r.issued('fp32'):.2f}"
        columns["exp"] = f"{r.issued('special'):.2f}"
        columns["all"] = f"{r.issued(*PIPES):.2f}"
    return columns


def main() -> int:
    """Run the command, and return its exit code."""
    parser = parser_of("benchmarks.resources", __doc__, {
        "--target": {"nargs": "+", "choices": TARGETS, "default": list(TARGETS)},
        "--quick": SWITCH | {"help": "a few kernels of each kind"},
        "--write": SWITCH | {"help": f"and this version's outcome into {BUDGETS.name}"},
    })  # fmt: skip
    args = parser.parse_args()
    if not isinstance(backend.softmax_sums_kernel, JITFunction):
        parser.error("TRITON_INTERPRET=1 is set: there is nothing to compile. Unset it.")
    launches = QUICK if args.quick else cases()
    failed = []
    for target in args.target:
        judged = [*judge_all([target], launches)]
        table = render(shown(judged), markdown=False)
        print(f"\n{target}, Triton {triton.__version__}\n{table}", flush=True)
        target_outcome = outcome(judged)
        failed += [f"{target} {beyond}" for beyond in target_outcome["beyond"]]
        if args.write:
            outcomes = load(BUDGETS)
            outcomes.setdefault(triton.__version__, {})[target] = target_outcome
            save(BUDGETS, outcomes)
    num_kernels = len(launches) * len(args.target)
    print(f"\n{num_kernels} kernels, {len(failed)} beyond their budgets", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
