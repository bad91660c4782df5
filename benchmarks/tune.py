"""Finds the fastest launch settings: threads, accesses in flight, programs per multiprocessor,
cache hints and tiles in registers of the row kernels, of one stream and of two; of the products
over slots; and from hidden states the bytes of a chunk of logits and of a block of gradients.

    python -m benchmarks.tune [--kind fused one_pass ...] [--seconds 0.05] [--json FILE] [--small]

A candidate is a call of the package with another entry in its table of launches, so a trial changes
no code. Each is checked against float64 before it is timed, and the runs of one workload are
interleaved. The file of --json is written after each candidate, and a second run goes on from it:
after one that broke CUDA (exit status 75), without that one. Prints a ranking for each kind (the
geometric mean over its workloads of the time relative to the best), and the table to paste.
`--small` uses small shapes on the CPU: with TRITON_INTERPRET=1 this script can be tested without a
GPU; its figures then mean nothing.
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
#: A setting replaces that of the package only if it is faster by more than this share: a smaller
#: difference may be noise.
GAIN = 0.02
REGISTERS = 65536  # of a multiprocessor
SHARED = 224 << 10  # bytes, of those that can copy ahead
MIB = 1 << 20
#: (threads, accesses, programs per multiprocessor) to try in all combinations: of the kernels of
#: rows, and of others.
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
    """A choice of launches."""

    kind: str
    choice: Choice | Chunk

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.choice._asdict().items())

    @property
    def fits(self) -> bool:
        """Whether the registers suffice for the tile (8 numbers for each access in flight) and a
        few other values, and shared memory for the tiles that are copied ahead.
        """
        c = self.choice
        if isinstance(c, Chunk):
            return True
        streams = 2 if self.kind in ("reference", "mixture") else 1
        most = min(255, REGISTERS // (c.threads * c.programs))
        return copied_ahead(c) <= SHARED and most >= 8 * streams * c.accesses + 16

    def places(self) -> list[tuple[dict[Any, Any], Any, Any]]:
        """(dictionary, key, value) of all that it changes."""
        if isinstance(self.choice, Chunk):
            sizes = zip((blocks.CHUNK_BYTES, blocks.BLOCK_BYTES), self.choice, strict=True)
            return [(where, device, size * MIB) for where, size in sizes for device in where]
        return [(backend.launch.LAUNCH, self.kind, self.choice)]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for where, key, value in self.places():
                stack.enter_context(mock.patch.dict(where, {key: value}))
            stack.enter_context(warnings.catch_warnings())
            # A smaller tile was used, or no kernel at all: this one has failed to compile.
            warnings.filterwarnings(
                "error", "the Triton kernel|grpo_kernels falls back", RuntimeWarning
            )
            yield


def copied_ahead(choice: Choice) -> int:
    """Bytes of shared memory for the tiles that are on their way while another is computed."""
    return 16 * choice.threads * choice.accesses * (choice.stages - 1) * choice.programs


def setting_of(kind: str, choice: dict[str, Any]) -> Setting:
    return Setting(kind, Chunk(**choice) if kind == "chunk" else Choice(**choice))


def settings(kind: str, small: bool) -> list[Setting]:
    """The current setting of the package first, then the others that fit."""
    if kind == "chunk":
        chunk = Chunk(blocks.CHUNK_BYTES["cuda"] // MIB, blocks.BLOCK_BYTES["cuda"] // MIB)
        # Rows of a large vocabulary: (512, 3072) now. Of one sum of bytes: (768, 2304), (1024,
        # 2048); of more: the others.
        large = ((450, 700), (600, 600), (300, 1800), (600, 1200), (1200, 1200), (1200, 2400))
        return [
            Setting(kind, x)
            for x in dict.fromkeys(
                (chunk, *(Chunk(*sizes) for sizes in (((1, 1),) if small else large)))
            )
        ]
    now = backend.launch.LAUNCH[kind]
    shapes = [
        now._replace(threads=threads, accesses=accesses, programs=programs)
        for threads, accesses, programs in product(*SHAPES.get(kind, OF_A_ROW))
    ]
    around = [now]
    if kind in ("one_pass", *FUSED):
        shapes = [c._replace(stages=stages) for c in shapes for stages in (1, 3)]
        around += [
            now._replace(hints=not now.hints),
            *(now._replace(stages=stages) for stages in (1, 3, 4)),
        ]
    if kind in FUSED:
        around += [now._replace(kept=kept) for kept in range(now.ends)]
        around += [now._replace(ends=now.ends + more, kept=now.ends + more) for more in (1, 2)]
    first, *others = (Setting(kind, choice) for choice in dict.fromkeys([*around, *shapes]))
    return [first, *(setting for setting in others if setting.fits)][: 2 if small else None]


# ---- workloads


@contextmanager
def on_triton() -> Iterator[None]:
    """Every backend is Triton, for tensors on a CPU too (in its interpreter), whether or not the
    C++ module is there.
    """
    with (
        mock.patch.object(backends, "_made", lambda name, strict: backend.Kernels(strict)),
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
        ours = next(p for p in providers(self.cell.contract) if p.name == self.provider)

        def make(case: Any) -> Run:
            with on_triton():
                run = ours.make(case)

            def call() -> dict[str, Any]:
                with setting.applied(), on_triton():
                    return run.call()

            return Run(call, run.restore)

        return replace(ours, name=str(setting), make=make)


def workloads(small: bool) -> list[Workload]:
    # The interpreter truncates to bf16, while a GPU rounds.
    rows, few, vocab, width, dtype = (
        (16, 16, 272, 8, torch.float32) if small else (8192, 2048, 151936, 4096, torch.bfloat16)
    )
    narrow = (
        4 if small else 1024
    )  # so that 8192 rows are several blocks, and d_weight is a sum over them
    beside = (rows if small else 4096, vocab, dtype)  # two streams take twice the memory
    return [
        Workload("fused", "grpo_kernels, in place", Cell("logits", rows, vocab, dtype)),
        Workload("fused32", "grpo_kernels, in place", Cell("logits", few, vocab, torch.float32)),
        Workload("one_pass", "grpo_kernels", Cell("logits-forward", rows, vocab, dtype)),
        Workload("one_pass", "grpo_kernels, layer 1 + loss", Cell("logits", rows, vocab, dtype)),
        Workload("chunk", "grpo_kernels", Cell("hidden", rows, vocab, dtype, width)),
        Workload("chunk", "grpo_kernels", Cell("hidden", rows, vocab, dtype, narrow)),
        Workload("reference", "grpo_kernels, in place", Cell("logits-divergence", *beside)),
        Workload("mixture", "grpo_kernels", Cell("divergence-jsd", *beside, narrow)),
        Workload("pairs", "grpo_kernels", Cell("kept", rows, vocab, dtype, narrow)),
        Workload("vectors", "grpo_kernels", Cell("kept", rows, vocab, dtype, narrow)),
    ]


# ---- trials


def compile_once(job: tuple[Workload, Setting, str]) -> str | None:
    """Compiles into Triton's cache on disk. Compiled kernels depend on the vocabulary, not on the
    rows. Returns the reason of a failure, else None.
    """
    workload, setting, device = job
    try:
        workload.candidate(setting).make(make_case(replace(workload.cell, rows=16), device)).call()
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
    """Compiles in parallel before anything is timed.

    A failure occurs again in `measure`, which reports it.
    """
    context = multiprocessing.get_context(
        "spawn"
    )  # a forked process would share the parent's CUDA context
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            for (workload, setting, _), reason in zip(
                jobs, pool.map(compile_once, jobs), strict=True
            ):
                if reason is not None:
                    print(f"{workload}, {setting}: {reason}", flush=True)
        except (
            BrokenProcessPool
        ) as failure:  # a compiler that crashed: the others compile when they are measured
            print(f"not compiled beforehand: {first_line(failure)}", flush=True)


def ranking(cells: Sequence[Record]) -> list[tuple[str, float]]:
    """[(setting, mean of its times relative to the best of each cell)], best first; only those that
    were right and timed in every cell. A cell that was cut off counts where it is the first: its
    times are those of a few runs.
    """
    whole = [cell for cell in cells if not cell.get("unfinished")] or cells[:1]
    timed = [
        {
            row["name"]: row["ms"]
            for row in cell["providers"]
            if row["status"] == "ok" and "ms" in row and not row.get("limit")
        }
        for cell in whole
    ]
    everywhere = [name for name in timed[0] if all(name in cell for cell in timed)] if timed else []
    relative = {
        name: math.exp(
            statistics.fmean(
                math.log(cell[name] / min(cell[x] for x in everywhere)) for cell in timed
            )
        )
        for name in everywhere
    }
    return sorted(relative.items(), key=lambda item: item[1])


def tune(kind: str, small: bool, seconds: float, found: Record, path: Path | None) -> None:
    """Writes {"cells", "ranking", "best", "now", "lost"} into found[kind], and `found` into a file,
    after each candidate, and goes on from what it finds there. A candidate that breaks CUDA is
    noted in "lost", and DeviceLost ends the run.
    """
    device, candidates, before = (
        "cpu" if small else "cuda",
        settings(kind, small),
        found.get(kind, {}),
    )
    chosen = [w for w in workloads(small) if w.kind == kind]
    measured = {
        cell["workload"]: cell for cell in before.get("cells", []) if not cell.get("unfinished")
    }
    lost: dict[str, dict[str, str]] = before.get("lost", {})
    cells: list[Record] = []

    def saved(timed: list[Record]) -> None:
        order, by_name = ranking(timed), {str(s): s for s in candidates}
        best = by_name[order[0][0]].choice._asdict() if order else None
        of_kind = {
            "cells": timed,
            "ranking": order,
            "best": best,
            "now": str(candidates[0]),
            "lost": lost,
        }
        found[kind] = json.loads(json.dumps(of_kind))
        if path is not None:
            save(path, found)

    if kind != "chunk" and not measured:  # its kernels are those that the package compiles
        workers = 1 if small else min(12, os.cpu_count() or 1)
        compile_all([(w, s, device) for w in chosen for s in candidates], workers)
    for workload in chosen:
        name = {"workload": str(workload)}
        if str(workload) not in measured:
            limits = [p for p in providers(workload.cell.contract) if p.limit]
            try:
                cell = measure(
                    workload.cell, device, seconds=seconds, least=1 if small else 5, most=20, memory=kind == "chunk",
                    known=lost.get(str(workload)), save=lambda part, name=name: saved([*cells, name | part]),
                    candidates=[workload.candidate(s) for s in candidates] + limits,
                )  # fmt: skip
            except DeviceLost as failure:
                lost.setdefault(str(workload), {})[failure.provider] = failure.reason
                saved(cells)
                raise
            measured[str(workload)] = name | cell
        cells.append(measured[str(workload)])
        saved(cells)
        print(f"\n{workload}\n{details(cells[-1], markdown=False)}", flush=True)


# ---- the settings found


def winners(found: Record) -> Record:
    """{kind: the best setting} of those kinds where it is faster than that of the package."""
    chosen = {}
    for kind, result in found.items():
        places = dict(result["ranking"])
        if places and places.get(result["now"], math.inf) > (1 + GAIN) * min(places.values()):
            chosen[kind] = result["best"]
    return chosen


def apply(path: Path) -> Record:
    """Sets the launches of this process to the settings of a file, and returns them.

    Without a file nothing changes.
    """
    chosen = load(path)
    for kind, best in chosen.items():
        for where, key, value in setting_of(kind, best).places():
            if key != "cpu":
                where[key] = value
    return chosen


def summary(found: Record) -> list[str]:
    """The best of each kind, the current setting of the package, and the table to paste."""
    lines, launch = [], dict(backend.launch.LAUNCH)
    for kind, result in found.items():
        if not result["ranking"]:
            lines.append(f"{kind}: no setting was right in all workloads")
            continue
        (name, value), now = (
            result["ranking"][0],
            dict(result["ranking"]).get(result["now"], math.nan),
        )
        rest = (
            "as it is now"
            if name == result["now"]
            else f"now {result['now']}, {100 * (now / value - 1):.1f} % slower"
        )
        lines.append(f"{kind}: best {name}, {rest}")
        best = setting_of(kind, result["best"]).choice
        if isinstance(best, Chunk):
            lines.append(
                f'CHUNK_BYTES["cuda"] = {best.mib} << 20, BLOCK_BYTES["cuda"] = {best.block} << 20'
            )
        else:
            launch[kind] = best
    if found.keys() & launch.keys():
        lines.append(
            "LAUNCH = {" + ", ".join(f'"{kind}": {choice}' for kind, choice in launch.items()) + "}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """0, or LOST_DEVICE if a candidate has broken CUDA: the same command goes on without it."""
    parser = parser_of("benchmarks.tune", __doc__, {
        "--kind": {"nargs": "+", "choices": KINDS, "default": list(KINDS)},
        "--seconds": {"type": float, "default": 0.05, "help": "of runs for each candidate and workload"},
        "--json": {"type": Path, "help": "write all figures there, after each candidate, and go on from it"},
        "--small": SWITCH | {"help": "small shapes on the CPU, to try the script itself"},
    })  # fmt: skip
    args = parser.parse_args(argv)
    found = load(args.json) if args.json is not None else {}
    try:
        for kind in args.kind:
            tune(kind, args.small, args.seconds, found, args.json)
    except DeviceLost as failure:
        print(
            f"\n{failure}: CUDA is unusable in this process. Run the same command again.",
            flush=True,
        )
        return LOST_DEVICE
    print("\n" + "\n".join(summary(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
