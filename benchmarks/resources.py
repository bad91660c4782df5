"""The resources that the Triton kernels need on a GPU, and their budgets: registers, accesses, occupancy, work per logit. No GPU is
needed.

    python -m benchmarks.resources [--target sm_90 ...] [--quick] [--json FILE] [--write]

Compiles the kernels for each target as the library launches them, and reads the binary (AMD: the assembly). Exits with 1 when
a budget (see `broken`) is exceeded. Nothing is timed. Figures per logit are counted in the machine code of the loops over a
row, see `benchmarks/sass.py`; those of `scale_` and of the sparse products are derived. Run it with each version of Triton that is
supported, because they order loads differently. `--write` saves the outcome of the budgets in results/budgets.json, for
docs/gpu.md."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from benchmarks.assembly import code, taken
from benchmarks.kernel_bounds import BUDGETS
from benchmarks.launches import QUICK, TARGETS, Case, cases, compiling
from benchmarks.other_launches import OTHER_QUICK, other_cases
from benchmarks.results import load, save
from benchmarks.sass import Loop, row_loops
from grpo_kernels.diagnosis import numbers
from grpo_kernels.rows.backends import triton as backend


@dataclass(frozen=True)
class Report:
    target: str
    kernel: str
    case: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    stack: int  # bytes per thread
    reloads: int  # of spilled registers, in a round of the loops over a row
    shared: int  # bytes per program
    warps: int  # per program
    programs: int  # resident per multiprocessor
    limit: str  # what limits the number of resident programs
    loads: list[int]  # widths in bits of the loops' accesses, per thread
    stores: list[int]
    together: list[tuple[int, int, int]]  # of each loop: the most loads of a thread in flight, all of an iteration, their bits
    stages: int  # tiles of a row that are computed or copied into shared memory at a time; 1: none is copied
    in_flight: float  # KiB that the resident programs of a multiprocessor load at once
    read: float  # bytes per logit, of a row that gets a gradient
    written: float
    fp32: float  # instructions of a thread per logit: additions, multiplications and both in one
    special: float  # exponentials, reciprocals
    instructions: float  # all
    counted: bool  # or derived, per-logit figures
    fp64: bool


def report(target: str, case: Case) -> Report:
    with compiling(target) as launches:
        case.launch()
    ((_, kernel),) = launches
    used = taken(kernel)
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    programs, limit = TARGETS[target].occupancy(warps, used["registers"], shared)
    threads = programs * warps * TARGETS[target].gpu.warp_size
    inner = row_loops(kernel, case.loops)
    work: dict[str, Any] = {"counted": case.counted}
    if case.counted:
        work |= per_logit(inner, sum(case.sizes))
    else:
        written = case.gradient.itemsize if case.gradient is not None and case.stores else 0
        work |= {"read": sum(case.sizes), "written": written, "fp32": 1, "special": 0, "instructions": 0}
    return Report(
        target, case.kernel, str(case), **used, reloads=sum(loop.local for loop in inner), shared=shared, warps=warps, programs=programs, limit=limit,
        loads=sorted({width for loop in inner for width in loop.loads}),
        stores=sorted({width for loop in inner for width in loop.stores}),
        together=[(loop.in_flight, len(loop.loads), max(loop.loads)) for loop in inner],
        stages=stages(kernel),
        in_flight=min((loop.in_flight * min(loop.loads) / 8 * threads / 1024 for loop in inner), default=0.0),
        fp64=bool(re.search(r"\.f64|_f64", code(kernel))), **work,
    )  # fmt: skip


def stages(kernel: Any) -> int:
    names = kernel.src.fn.arg_names
    return next((int(value) for (i,), value in kernel.src.constants.items() if names[i] == "STAGES"), 1)


def per_logit(found: Sequence[Loop], size: int) -> dict[str, float]:
    """Bytes and instructions for each of a row's numbers, of `size` bytes in all streams, all visits together."""
    work = dict.fromkeys(("read", "written", "fp32", "special", "instructions"), 0.0)
    for loop in found:
        elements = sum(loop.loads) / 8 / size
        work["read"] += size
        work["written"] += sum(loop.stores) / 8 / elements
        work["fp32"] += loop.issued["fp32"] / elements
        work["special"] += loop.issued["special"] / elements
        work["instructions"] += loop.issued.total() / elements
    return work


#: Bytes per thread that a kernel may spill outside its loops. For three things ptxas needs more registers than there are: a tile in
#: single elements, such as the last one of an odd vocabulary in padded rows; tanh of a tile that is kept in registers; and tanh of
#: two rows with all of their sums.
UNALIGNED_SPILL = {"fused": 192, "scale_": 32}
PADDED_SPILL = {"fused": 160, "pull": 8}
SOFTCAP_SPILL = {"fused": 32, "two_stats": 8}


def broken(case: Case, found: Report) -> list[str]:
    """The budgets that a kernel exceeds, in words; empty if it meets all."""
    choice = case.choice
    threads = choice.threads * choice.programs
    spill = max(
        0 if case.aligned else UNALIGNED_SPILL.get(case.kernel, 0),
        PADDED_SPILL.get(case.kernel, 0) if case.vocab % 8 else 0,
        SOFTCAP_SPILL.get(case.kernel, 0) if case.transform == "softcap" else 0,
    )
    # A choice is made for this number of full programs on a multiprocessor, or for as many threads in programs of short rows.
    at_most = {
        "registers": (found.registers, TARGETS[found.target].registers // threads),
        "bytes spilled": (found.spilled + found.stack, spill),
        "reloads in loops": (found.reloads, 0),
        "fp64": (int(found.fp64), 0),
        "kinds of store": (len(found.stores), int(case.stores) if case.counted else 2),
    }
    at_least = {"resident threads": (found.programs * found.warps * TARGETS[found.target].gpu.warp_size, threads)}
    if case.aligned:
        widest = min if case.counted else max
        # The access to the first stream sets the width of a tile: accesses to a stream of a narrower dtype are narrower.
        at_least["bits per load"] = (widest(found.loads, default=0), min(128, 128 * min(case.sizes) // case.sizes[0]))
        if case.gradient is not None and case.stores:
            # The access to the logits sets the width of a tile: 16-bit gradients of fp32 logits are stored in accesses of 64 bits.
            at_least["bits per store"] = (
                widest(found.stores, default=0),
                128 * case.gradient.itemsize // max(case.logits.itemsize, case.gradient.itemsize),
            )
    if case.counted:
        # Of a tile; the assembler may unroll a loop over tiles.
        cols = 16 // case.sizes[0]
        accesses = max(1, min(choice.accesses, triton.next_power_of_2(triton.cdiv(case.vocab, cols)) // choice.threads))
        for together, every, width in found.together:
            tile = min(every, len(case.sizes) * accesses * (1 if width == 128 else cols))
            needed = max(1, round(case.before_wait * tile))
            if found.stages > 1 and width == 128:  # all tiles but the one that is computed
                needed = (found.stages - 1) * tile
            if TARGETS[found.target].gpu.backend == "hip" and numbers(triton.__version__) < (3, 6):
                needed = 1  # Triton's compiler for AMD waits for the first loads of a tile before it issues the last
            if together < needed:
                at_least["loads before the first wait"] = (together, needed)
    return [f"{name} {value}, at most {limit}" for name, (value, limit) in at_most.items() if value > limit] + [
        f"{name} {value}, at least {limit}" for name, (value, limit) in at_least.items() if value < limit
    ]


def measure(job: tuple[str, Case]) -> tuple[Report, list[str]]:
    kernel = report(*job)
    return kernel, broken(job[1], kernel)


def measure_all(targets: Sequence[str], cases: Sequence[Case]) -> Iterator[tuple[Report, list[str]]]:
    """Each case for each target, compiled by as many processes as there are processors."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(measure, product(targets, cases), chunksize=4)


def outcomes(found: Sequence[tuple[Report, list[str]]]) -> dict[str, dict[str, Any]]:
    """{target: how many kernels, which are beyond their budgets, the most bytes that one spills, the least KiB that one has in
    flight on a multiprocessor in a long row}."""
    targets = dict.fromkeys(report.target for report, _ in found)
    rows = {target: [(report, failures) for report, failures in found if report.target == target] for target in targets}
    return {
        target: {
            "kernels": len(some),
            "beyond": [f"{r.kernel} {r.case}: {'; '.join(failures)}" for r, failures in some if failures],
            "spilled": max(r.spilled + r.stack for r, _ in some),
            "in flight": min(r.in_flight for r, _ in some if "V 151936" in r.case),
        }
        for target, some in rows.items()
    }


def line(found: Report) -> str:
    def widths(x: list[int]) -> str:
        return "/".join(map(str, x)) or "-"

    name = f"{found.kernel:10} {found.case}"
    together = "/".join(f"{some} of {every}" for some, every, _ in found.together)
    work = f"{found.read:4g} {found.written:5g} {found.fp32:5.1f} {found.special:5.2f} {found.instructions:6.2f}"
    return (
        f"{name:76} {found.registers:4} {found.spilled:5} {found.stack:5} {found.shared:6} {widths(found.loads):>7} "
        f"{widths(found.stores):>7} {found.warps:5} {found.programs:4} {found.programs * found.warps:5} {found.limit:13} "
        f"{together:>17} {found.in_flight:9.0f} {work}{'' if found.counted else '  derived'}"
    )


HEAD = (
    f"{'kernel':76} {'regs':>4} {'spill':>5} {'stack':>5} {'shared':>6} {'load':>7} {'store':>7} {'warps':>5} {'/SM':>4} {'warps':>5} "
    f"{'limit':13} {'loads before':>17} {'in flight':>9} {'read':>4} {'write':>5} {'fp32':>5} {'exp':>5} {'instr':>6}\n"
    f"{'':76} {'':>4} {'B':>5} {'B':>5} {'B':>6} {'bit':>7} {'bit':>7} {'':>5} {'':>4} {'/SM':>5} "
    f"{'':13} {'the first wait':>17} {'KiB / SM':>9} {'per logit: B, B, instructions'}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--quick", action="store_true", help="a few kernels of each kind")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--write", action="store_true", help=f"and this version's outcome into {BUDGETS.name}")
    args = parser.parse_args()
    if not isinstance(backend._stats_kernel, JITFunction):
        parser.error("TRITON_INTERPRET=1 is set: there is nothing to compile. Unset it.")
    results = []
    for found, failures in measure_all(args.target, [*QUICK, *OTHER_QUICK] if args.quick else [*cases(), *other_cases()]):
        if not results or found.target != results[-1][0].target:
            print(f"\n{found.target}, Triton {triton.__version__}\n{HEAD}")
        print(line(found), flush=True)
        results.append((found, failures))
    failed = [(found, failures) for found, failures in results if failures]
    print(f"\n{len(results)} kernels, {len(failed)} beyond their budgets")
    for found, failures in failed:
        print(f"{found.target} {found.kernel} {found.case}: {'; '.join(failures)}")
    if args.json:
        record = [asdict(found) | {"beyond budget": failures} for found, failures in results]
        args.json.write_text(json.dumps({"triton": triton.__version__, "kernels": record}, indent=1) + "\n")
    if args.write:
        kept = load(BUDGETS)
        kept.setdefault(triton.__version__, {}).update(outcomes(results))
        save(BUDGETS, kept)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
