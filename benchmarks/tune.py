"""Find the fastest launch settings of the Triton kernels, and the fastest block sizes.

    python -m benchmarks.tune [--kind fused one_pass ...] [--seconds 0.05] [--json FILE] [--small]

A setting of a row kernel is its number of threads, accesses in flight, programs per multiprocessor,
cache hints and tiles in registers. From hidden states, a setting is the bytes of a chunk of logits
and of a block of gradients.

A candidate is a call of the package with another entry in its table of launches, so a trial changes
no code. Each is checked against float64 before it is timed, and the runs of one workload are
interleaved. The file of --json is written after each candidate. A second run continues from it, and
leaves out a candidate that broke CUDA (exit status 75).

Prints a ranking for each kind (the geometric mean over its workloads of the time relative to the
best), and the table to paste. `--small` uses small shapes on a CPU: with TRITON_INTERPRET=1 it
tests this script without a GPU, and its figures mean nothing.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks import SWITCH, parser_of
from benchmarks.cases import Cell, make_case
from benchmarks.measure import DeviceLost, describe, measure
from benchmarks.providers import Provider, Run, Unavailable, first_line, providers
from benchmarks.results import load, save
from benchmarks.suites import LOST_DEVICE
from benchmarks.tables import Record, details, size
from grpo_kernels.core import backends
from grpo_kernels.core import linear_memory as blocks
from grpo_kernels.core.backends import triton as backend
from grpo_kernels.core.backends.triton.launch import FUSED, Choice

#: The kinds of settings, the most valuable first, and the share of the time for each.
KINDS = {
    "fused": 3.5,
    "one_pass": 2.0,
    "fused32": 3.5,
    "chunk": 2.5,
    "reference": 1.5,
    "mixture": 1.0,
    "pairs": 0.7,
    "vectors": 0.2,
}
#: A setting replaces the package's only if it is faster by more than this share. A smaller
#: difference may be noise.
GAIN = 0.02
REGISTERS = 65536  # of a multiprocessor
SHARED = 224 << 10  # bytes of shared memory of a multiprocessor
MIB = 1 << 20
#: Threads, accesses in flight and programs per multiprocessor to try in all combinations. SHAPES
#: has those of the kernels that are not row kernels.
OF_A_ROW = ((256, 512, 1024), (1, 2, 4, 8), (1, 2, 4))
SHAPES = {
    "pairs": ((64, 128, 256, 512), (1, 2), (2, 4)),
    "vectors": ((64, 128, 256), (1, 2, 4), (1, 2)),
}


# ---- settings, and where the package keeps them


class Chunk(NamedTuple):
    """MiB of a chunk of fp32 logits, and of a block of gradients with an fp32 sum of d_weight."""

    mib: int
    block: int


@dataclass(frozen=True)
class Setting:
    """Launch parameters to try for a kind of kernel."""

    kind: str
    choice: Choice | Chunk

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.choice._asdict().items())

    @property
    def fits(self) -> bool:
        """Whether registers and shared memory of a multiprocessor suffice for all its programs.

        A thread needs registers for the tile (8 numbers for each access in flight, in each of the
        rows that it reads at a time) and 16 for other values. It can have at most 255. Shared
        memory holds the tiles that are copied ahead.
        """
        c = self.choice
        if isinstance(c, Chunk):
            return True
        # With a teacher, a kernel reads its row too.
        rows_at_a_time = 2 if self.kind in ("reference", "mixture") else 1
        registers = min(255, REGISTERS // (c.threads * c.programs))
        return copied_ahead(c) <= SHARED and registers >= 8 * rows_at_a_time * c.accesses + 16

    def places(self) -> list[tuple[dict[Any, Any], Any, Any]]:
        """Return (dictionary, key, value) for each entry of the package that it replaces."""
        if isinstance(self.choice, Chunk):
            mib, block = self.choice
            chunks = [(blocks.CHUNK_BYTES, key, mib * MIB) for key in blocks.CHUNK_BYTES]
            return chunks + [(blocks.BLOCK_BYTES, key, block * MIB) for key in blocks.BLOCK_BYTES]
        return [(backend.launch.LAUNCH, self.kind, self.choice)]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the setting within a `with` block, in place of the package's.

        If it cannot be used, the package warns and falls back to another one, whose time would then
        be measured. So these warnings raise within the block.
        """
        with ExitStack() as stack:
            for where, key, value in self.places():
                stack.enter_context(mock.patch.dict(where, {key: value}))
            stack.enter_context(warnings.catch_warnings())
            # These warnings say that a smaller tile or no kernel was used, because this setting
            # failed to compile.
            warnings.filterwarnings(
                "error", "the Triton kernel|grpo_kernels falls back", RuntimeWarning
            )
            yield


def copied_ahead(choice: Choice) -> int:
    """Return the bytes of shared memory for tiles that are loaded while another is computed."""
    return 16 * choice.threads * choice.accesses * (choice.stages - 1) * choice.programs


def setting_of(kind: str, choice: dict[str, Any]) -> Setting:
    """Return a setting from the fields of its choice, as they are in a JSON file."""
    return Setting(kind, Chunk(**choice) if kind == "chunk" else Choice(**choice))


def settings(kind: str, small: bool) -> list[Setting]:
    """Return the settings to try for a kind of kernel.

    The first is the setting of the package. All others fit, see `Setting.fits`.

    small   whether to return only two of them
    """
    if kind == "chunk":
        return _chunk_settings(small)
    current = backend.launch.LAUNCH[kind]
    # Settings that differ from the package's in threads, accesses and programs, and settings that
    # differ in one of the other parameters.
    shapes = [
        current._replace(threads=threads, accesses=accesses, programs=programs)
        for threads, accesses, programs in product(*SHAPES.get(kind, OF_A_ROW))
    ]
    variants = []
    if kind in ("one_pass", *FUSED):
        variants.append(current._replace(hints=not current.hints))
        variants += [current._replace(stages=stages) for stages in (1, 3, 4)]
        shapes = [shape._replace(stages=stages) for shape in shapes for stages in (1, 3)]
    if kind in FUSED:
        variants += [current._replace(kept=kept) for kept in range(current.ends)]
        for num_further in (1, 2):
            ends = current.ends + num_further
            variants.append(current._replace(ends=ends, kept=ends))
    settings = [Setting(kind, current)]
    for choice in dict.fromkeys(variants + shapes):
        setting = Setting(kind, choice)
        if choice != current and setting.fits:
            settings.append(setting)
    return settings[:2] if small else settings


def _chunk_settings(small: bool) -> list[Setting]:
    """Return the sizes of chunks and blocks to try, in MiB. The first is the package's setting.

    small   whether to return only two, the package's and the smallest
    """
    current = Chunk(blocks.CHUNK_BYTES["cuda"] // MIB, blocks.BLOCK_BYTES["cuda"] // MIB)
    if small:
        further = [Chunk(1, 1)]
    else:
        further = [
            Chunk(450, 700),
            Chunk(600, 600),
            Chunk(300, 1800),
            Chunk(600, 1200),
            Chunk(1200, 1200),
            Chunk(1200, 2400),
        ]
    return [Setting("chunk", chunk) for chunk in dict.fromkeys([current, *further])]


# ---- workloads


@contextmanager
def on_triton() -> Iterator[None]:
    """Make Triton the only backend within a `with` block, also for tensors on a CPU.

    On a CPU Triton's interpreter runs the kernels.
    """
    with (
        mock.patch.object(backends, "_make_backend", lambda name, strict: backend.Kernels(strict)),
        mock.patch.object(backends, "unavailable", lambda name: None),
    ):
        yield


@dataclass(frozen=True)
class Workload:
    """A provider of the benchmarks whose time depends on this kind of setting."""

    kind: str
    provider: str
    cell: Cell

    def __str__(self) -> str:
        cell = describe(self.cell)
        return f"{cell['contract']}, {self.provider}: {size(cell)} {cell['dtype']}"

    def candidate(self, setting: Setting) -> Provider:
        """Return a copy of the provider that runs with a setting and is named after it."""
        ours = next(p for p in providers(self.cell.contract) if p.name == self.provider)

        def make(case: Any) -> Run:
            """Return the Run of a case. The setting applies while its `call` runs."""
            with on_triton():
                run = ours.make(case)

            def call() -> dict[str, Any]:
                with setting.applied(), on_triton():
                    return run.call()

            return Run(call, run.restore)

        return replace(ours, name=str(setting), make=make)


def workloads(small: bool) -> list[Workload]:
    """Return the workloads of all kinds.

    small   whether they are tiny, for Triton's interpreter on a CPU
    """
    if small:
        # The interpreter truncates to bf16 where a GPU rounds, so that it runs in fp32.
        rows = fewer_rows = fp32_rows = 16
        vocab = 272
        width = 8
        narrow = 4
        dtype = torch.float32
    else:
        rows = 8192
        fp32_rows = 2048
        fewer_rows = 4096  # a teacher takes as much memory again
        vocab = 151936
        width = 4096
        dtype = torch.bfloat16
        narrow = 1024  # 8192 rows are then several blocks, and d_weight is a sum over them
    with_teacher = (fewer_rows, vocab, dtype)
    return [
        Workload("fused", "grpo_kernels, in place", Cell("logits", rows, vocab, dtype)),
        Workload(
            "fused32", "grpo_kernels, in place", Cell("logits", fp32_rows, vocab, torch.float32)
        ),
        Workload("one_pass", "grpo_kernels", Cell("logits-forward", rows, vocab, dtype)),
        Workload("one_pass", "grpo_kernels, layer 1 + loss", Cell("logits", rows, vocab, dtype)),
        Workload("chunk", "grpo_kernels", Cell("hidden", rows, vocab, dtype, width)),
        Workload("chunk", "grpo_kernels", Cell("hidden", rows, vocab, dtype, narrow)),
        Workload("reference", "grpo_kernels, in place", Cell("logits-divergence", *with_teacher)),
        Workload("mixture", "grpo_kernels", Cell("divergence-jsd", *with_teacher, narrow)),
        Workload("pairs", "grpo_kernels", Cell("kept", rows, vocab, dtype, narrow)),
        Workload("vectors", "grpo_kernels", Cell("kept", rows, vocab, dtype, narrow)),
    ]


# ---- trials


def compile_once(job: tuple[Workload, Setting, str]) -> str | None:
    """Compile a candidate into Triton's cache on disk. Returns why that failed, or None.

    Compiled kernels depend on the vocabulary and not on the rows, so that few rows suffice.

    job     workload, setting, device
    """
    workload, setting, device = job
    try:
        case = make_case(replace(workload.cell, rows=16), device)
        workload.candidate(setting).make(case).call()
    except (
        RuntimeError,
        ValueError,
        AssertionError,
        Unavailable,
        backend.triton.TritonError,
    ) as failure:
        return first_line(failure)
    return None


def compile_all(jobs: list[tuple[Workload, Setting, str]], workers: int) -> None:
    """Compile candidates in parallel before anything is timed.

    A failure is only printed. It occurs again in `measure`, which reports it.
    """
    # A forked process would share the CUDA context of this one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            reasons = pool.map(compile_once, jobs)
            for (workload, setting, _), reason in zip(jobs, reasons, strict=True):
                if reason is not None:
                    print(f"{workload}, {setting}: {reason}", flush=True)
        except BrokenProcessPool as failure:
            # A compiler crashed. The remaining candidates compile when they are measured.
            print(f"not compiled beforehand: {first_line(failure)}", flush=True)


def ranking(cells: Sequence[Record]) -> list[tuple[str, float]]:
    """Rank the settings that were correct and timed in every cell.

    Returns [(setting, geometric mean of its times relative to the best of each cell)], best first.
    A cell that was cut off counts only if there is no other: its times are from a few runs.
    """
    finished = [cell for cell in cells if not cell.get("unfinished")] or cells[:1]
    timed = [_times_of_settings(cell) for cell in finished]
    if not timed:
        return []
    everywhere = [name for name in timed[0] if all(name in cell for cell in timed)]
    means = []
    for name in everywhere:
        logs = [math.log(cell[name] / min(cell[x] for x in everywhere)) for cell in timed]
        means.append((name, math.exp(statistics.fmean(logs))))
    return sorted(means, key=lambda item: item[1])


def _times_of_settings(cell: Record) -> dict[str, float]:
    """Return {setting: milliseconds} of the rows that were timed and are not limits.

    cell    a record of `measure`, in which each setting is a provider
    """
    return {
        row["name"]: row["ms"]
        for row in cell["providers"]
        if row["status"] == "ok" and "ms" in row and not row.get("limit")
    }


def tune(kind: str, small: bool, seconds: float, found: Record, path: Path | None) -> None:
    """Measure all settings of a kind in its workloads.

    found   updated after each candidate: found[kind] = {"cells", "ranking", "best", "now", "lost"}.
            Workloads that it already holds are not measured again
    path    file to write `found` to. None: no file

    Raises DeviceLost if a candidate breaks CUDA. It is then noted in "lost" and is not tried again.
    """
    device = "cpu" if small else "cuda"
    candidates = settings(kind, small)
    setting_by_name = {str(setting): setting for setting in candidates}
    workloads_of_kind = [workload for workload in workloads(small) if workload.kind == kind]
    earlier = found.get(kind, {})
    lost: dict[str, dict[str, str]] = earlier.get("lost", {})  # {workload: {setting: reason}}
    measured = {
        cell["workload"]: cell for cell in earlier.get("cells", []) if not cell.get("unfinished")
    }
    cells: list[Record] = []

    def save_cells(timed: list[Record]) -> None:
        """Rank the settings by these cells, and write found[kind] and the file.

        timed   the records of the workloads so far. The last one may be unfinished
        """
        ranked = ranking(timed)
        best = None
        if ranked:
            best_name, _ = ranked[0]
            best = setting_by_name[best_name].choice._asdict()
        results = {
            "cells": timed,
            "ranking": ranked,
            "best": best,
            "now": str(candidates[0]),
            "lost": lost,
        }
        found[kind] = json.loads(json.dumps(results))  # a copy, as it is in the file
        if path is not None:
            save(path, found)

    # Candidates of "chunk" use the kernels that the package compiles anyway.
    if kind != "chunk" and not measured:
        workers = 1 if small else min(12, os.cpu_count() or 1)
        jobs = [(w, setting, device) for w in workloads_of_kind for setting in candidates]
        compile_all(jobs, workers)
    for workload in workloads_of_kind:
        name = str(workload)
        if name not in measured:
            limits = [p for p in providers(workload.cell.contract) if p.limit]

            def save_part(part: Record, name: str = name) -> None:
                save_cells([*cells, {"workload": name} | part])

            try:
                cell = measure(
                    workload.cell,
                    device,
                    seconds=seconds,
                    least=1 if small else 5,
                    most=20,
                    memory=kind == "chunk",
                    known=lost.get(name),
                    save=save_part,
                    candidates=[workload.candidate(s) for s in candidates] + limits,
                )
            except DeviceLost as failure:
                lost.setdefault(name, {})[failure.provider] = failure.reason
                save_cells(cells)
                raise
            measured[name] = {"workload": name} | cell
        cells.append(measured[name])
        save_cells(cells)
        print(f"\n{workload}\n{details(cells[-1], markdown=False)}", flush=True)


# ---- the settings found


def winners(results_of_kinds: Record) -> Record:
    """Return {kind: the best setting} for the kinds in which it is faster than the package's.

    results_of_kinds    {kind: its results}, see `found` of `tune`
    """
    chosen = {}
    for kind, result in results_of_kinds.items():
        means = dict(result["ranking"])
        if means and means.get(result["now"], math.inf) > (1 + GAIN) * min(means.values()):
            chosen[kind] = result["best"]
    return chosen


def apply(path: Path) -> Record:
    """Use the settings of a file in this process from now on, and return them.

    Returns {kind: fields of its setting}. Chunks on a CPU are not changed, because the settings are
    measured on a GPU. The file is written by `winners`. If it does not exist, nothing changes.
    """
    chosen = load(path)
    for kind, best in chosen.items():
        for where, key, value in setting_of(kind, best).places():
            if key != "cpu":
                where[key] = value
    return chosen


def summary(results_of_kinds: Record) -> list[str]:
    """Return a line for each kind, with its best setting, and the table of launches to paste.

    The table, LAUNCH = {...}, is Python code for the module of the package that has the launches.

    results_of_kinds    {kind: its results}, see `found` of `tune`
    """
    lines = []
    launch = dict(backend.launch.LAUNCH)
    for kind, result in results_of_kinds.items():
        if not result["ranking"]:
            lines.append(f"{kind}: no setting was right in all workloads")
            continue
        means = dict(result["ranking"])
        best_name, best_mean = result["ranking"][0]
        if best_name == result["now"]:
            comparison = "as it is now"
        else:
            slower = 100 * (means.get(result["now"], math.nan) / best_mean - 1)
            comparison = f"now {result['now']}, {slower:.1f} % slower"
        lines.append(f"{kind}: best {best_name}, {comparison}")
        best = setting_of(kind, result["best"]).choice
        if isinstance(best, Chunk):
            lines.append(
                f'CHUNK_BYTES["cuda"] = {best.mib} << 20, BLOCK_BYTES["cuda"] = {best.block} << 20'
            )
        else:
            launch[kind] = best
    if results_of_kinds.keys() & launch.keys():
        entries = ", ".join(f'"{kind}": {choice}' for kind, choice in launch.items())
        lines.append("LAUNCH = {" + entries + "}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or LOST_DEVICE if a candidate broke CUDA. The same command then continues."""
    parser = parser_of("benchmarks.tune", __doc__, {
        "--kind": {"nargs": "+", "choices": KINDS, "default": list(KINDS)},
        "--seconds": {"type": float, "default": 0.05, "help": "of runs for each candidate and workload"},
        "--json": {"type": Path, "help": "write all figures there, after each candidate, and go on from it"},
        "--small": SWITCH | {"help": "small shapes on the CPU, to try the script itself"},
    })  # fmt: skip
    args = parser.parse_args(argv)
    results_of_kinds = load(args.json) if args.json is not None else {}
    try:
        for kind in args.kind:
            tune(kind, args.small, args.seconds, results_of_kinds, args.json)
    except DeviceLost as failure:
        print(
            f"\n{failure}: CUDA is unusable in this process. Run the same command again.",
            flush=True,
        )
        return LOST_DEVICE
    print("\n" + "\n".join(summary(results_of_kinds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
