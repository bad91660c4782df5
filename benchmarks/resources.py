"""The resources that the Triton kernels need on a GPU, without a GPU: registers, accesses, occupancy, work per logit; and
their budgets.

    python -m benchmarks.resources [--target sm_90 ...] [--quick] [--json FILE]

Compiles the kernels for each target as the library launches them, and reads the assembly and the binary. Exits with 1 when
a budget (see `broken`) is exceeded. Nothing is timed. Figures per element are counted in the instructions (PTX, AMD's
assembly) of the innermost loops. Those of `scale_` are derived, because its loop also handles the end of a row."""

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

from benchmarks.assembly import LOAD, NO_INSTRUCTION, SPECIAL, STORE, accesses, code, flops, loops, taken
from benchmarks.launches import QUICK, SHORT, TARGETS, Case, cases, compiling
from grpo_kernels.vocabulary.backends import triton as backend


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
    limit: str  # what keeps it from being more
    loads: list[int]  # widths in bits of the loops' accesses, per thread
    stores: list[int]
    in_flight: float  # KiB that the resident programs of a multiprocessor load at once
    read: float  # bytes per logit, of a row that gets a gradient
    written: float
    flops: float
    special: float  # exponentials, reciprocals
    instructions: float  # of a thread
    counted: bool  # or derived, per-logit figures
    fp64: bool


def report(target: str, case: Case) -> Report:
    with compiling(target) as launches:
        case.launch()
    ((_, kernel),) = launches
    assembly = code(kernel)
    used = taken(kernel)
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    programs, limit = TARGETS[target].occupancy(warps, used["registers"], shared)
    inner = loops(assembly)
    loads = sorted({width for loop in inner for width in accesses(LOAD, loop)})
    stores = sorted({width for loop in inner for width in accesses(STORE, loop)})
    size = case.logits.itemsize
    threads = programs * warps * TARGETS[target].gpu.warp_size
    work: dict[str, Any]
    if case.kernel == "scale_":
        work = {"in_flight": 0.0, "read": size, "written": size, "flops": 1, "special": 0, "instructions": 0, "counted": False}
    else:
        work = dict.fromkeys(("in_flight", "read", "written", "flops", "special", "instructions"), 0.0) | {"counted": True}
        for loop in inner:
            loaded = sum(accesses(LOAD, loop)) / 8
            if not loaded:  # zeros for a row without a gradient
                continue
            elements = loaded / size
            work["in_flight"] = max(work["in_flight"], loaded * threads / 1024)
            work["read"] += loaded / elements
            work["written"] += sum(accesses(STORE, loop)) / 8 / elements
            work["flops"] += sum(map(flops, loop)) / elements
            work["special"] += sum(bool(re.match(SPECIAL, line)) for line in loop) / elements
            work["instructions"] += sum(not re.match(NO_INSTRUCTION, line) for line in loop) / elements
    fp64 = bool(re.search(r"\.f64|_f64", assembly))
    return Report(
        target, case.kernel, str(case), **used, shared=shared, warps=warps, programs=programs, limit=limit,
        loads=loads, stores=stores, **work, fp64=fp64,
    )  # fmt: skip


#: Bytes per thread that the kernels named may spill where rows are not aligned: a tile in single elements takes ptxas more
#: registers than there are (sm_90, sm_100), mostly outside the loops.
UNALIGNED_SPILL = {"fused": 128, "scale_": 32}


def broken(case: Case, found: Report) -> list[str]:
    """The budgets that a kernel exceeds, in words; empty if it meets all."""
    fused = case.kernel == "fused"
    threads, in_flight = backend.LAUNCH["fused" if fused else "visit"]
    stores = case.kernel != "stats" and case.gradient is not None
    # `LAUNCH` is made for one program of so many threads per multiprocessor, or as many threads in programs of short rows.
    at_most = {
        "registers": (found.registers, TARGETS[found.target].registers // threads),
        "bytes spilled": (found.spilled + found.stack, 0 if case.aligned else UNALIGNED_SPILL.get(case.kernel, 0)),
        "fp64": (int(found.fp64), 0),
        "kinds of store": (len(found.stores), 2 if case.kernel == "scale_" else int(stores)),
    }
    at_least = {"resident threads": (found.programs * found.warps * TARGETS[found.target].gpu.warp_size, threads)}
    if case.aligned:
        widest = max if case.kernel == "scale_" else min  # the loop of `scale_` also handles the end of a row
        at_least["bits per load"] = (widest(found.loads, default=0), 128)
        if case.gradient is not None and stores:
            # A tile is as wide as an access to the logits: 16-bit gradients of fp32 logits are stored by 64 bits.
            at_least["bits per store"] = (
                widest(found.stores, default=0),
                128 * case.gradient.itemsize // max(case.logits.itemsize, case.gradient.itemsize),
            )
    if case.kernel != "scale_" and case.vocab > SHORT:
        at_least["KiB in flight"] = (round(found.in_flight), threads * in_flight * 16 // 1024)
    return [f"{name} {value}, at most {limit}" for name, (value, limit) in at_most.items() if value > limit] + [
        f"{name} {value}, at least {limit}" for name, (value, limit) in at_least.items() if value < limit
    ]


def measure(job: tuple[str, Case]) -> tuple[Report, list[str]]:
    found = report(*job)
    return found, broken(job[1], found)


def measure_all(targets: Sequence[str], cases: Sequence[Case]) -> Iterator[tuple[Report, list[str]]]:
    """Each case for each target, compiled by as many processes as there are processors."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(measure, product(targets, cases), chunksize=4)


def line(found: Report) -> str:
    def widths(x: list[int]) -> str:
        return "/".join(map(str, x)) or "-"

    name = f"{found.kernel:10} {found.case}"
    work = f"{found.read:4g} {found.written:5g} {found.flops:6.1f} {found.special:5.1f} {found.instructions:6.1f}"
    return (
        f"{name:76} {found.registers:4} {found.spilled:5} {found.stack:5} {found.shared:6} {widths(found.loads):>7} "
        f"{widths(found.stores):>7} {found.warps:5} {found.programs:4} {found.programs * found.warps:5} {found.limit:13} "
        f"{found.in_flight:9.0f} {work}{'' if found.counted else '  derived'}"
    )


HEAD = (
    f"{'kernel':76} {'regs':>4} {'spill':>5} {'stack':>5} {'shared':>6} {'load':>7} {'store':>7} {'warps':>5} {'/SM':>4} {'warps':>5} "
    f"{'limit':13} {'in flight':>9} {'read':>4} {'write':>5} {'flops':>6} {'exp':>5} {'instr':>6}\n"
    f"{'':76} {'':>4} {'B':>5} {'B':>5} {'B':>6} {'bit':>7} {'bit':>7} {'':>5} {'':>4} {'/SM':>5} "
    f"{'':13} {'KiB / SM':>9} {'per logit: B, B, operations, exponentials, instructions'}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--quick", action="store_true", help="a few kernels of each kind")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    if not isinstance(backend._stats_kernel, JITFunction):
        parser.error("TRITON_INTERPRET=1 is set: there is nothing to compile. Unset it.")
    results = []
    for found, failures in measure_all(args.target, QUICK if args.quick else cases()):
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
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
