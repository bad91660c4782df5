"""Finds the fastest launch settings: threads, accesses in flight, programs per multiprocessor, grids, cache hints and tiles in
registers of the row kernels, and from hidden states the bytes of a chunk of logits and of a block of gradients.

    python -m benchmarks.tune [--kind visit fused fused32 chunk] [--seconds 0.05] [--json FILE] [--small]

A candidate is a call of the package with another entry in its table of launches, so a trial changes no code. Each is checked
against float64 before it is timed, and the runs of one workload are interleaved. Prints a ranking for each kind (the geometric
mean over its workloads of the time relative to the best), and the table to paste. `--small` uses small shapes on the CPU: with
TRITON_INTERPRET=1 this script can be tested without a GPU; its figures then mean nothing."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.cases import Cell, make_case
from benchmarks.measure import measure
from benchmarks.providers import Provider, Run, Unavailable, first_line, providers
from grpo_kernels.vocabulary import backends, blocks
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends.triton_choices import Choice, clusters

REGISTERS = 65536  # of a multiprocessor
MIB = 1 << 20


@dataclass(frozen=True)
class Rows:
    """The launch of a row kernel, an entry of backend.LAUNCH."""

    kind: str
    choice: Choice

    def __str__(self) -> str:
        c = self.choice
        words = [f"{c.threads} threads x {c.accesses} accesses, {c.programs} per SM", f"ends {c.ends}, kept {c.kept}"]
        words += [f"cluster {c.cluster}"] * (c.cluster > 1)
        return ", ".join([*words, "hints" if c.hints else "no hints", f"grid {c.grid:g}" if c.grid else "a program a row"])

    @property
    def fits(self) -> bool:
        """Whether the registers suffice for the tile (8 numbers for each access in flight) and a few other values."""
        return min(255, REGISTERS // (self.choice.threads * self.choice.programs)) >= 8 * self.choice.accesses + 16

    @contextmanager
    def applied(self) -> Iterator[None]:
        with warnings.catch_warnings(), mock.patch.dict(backend.LAUNCH, {self.kind: self.choice}):
            warnings.simplefilter("error", RuntimeWarning)  # a smaller tile was used, so this one has failed to compile
            yield


@dataclass(frozen=True)
class Chunk:
    """From hidden states: bytes of a chunk of fp32 logits, and of a block of gradients beside a sum of d_weight."""

    mib: int
    block: int
    kind: str = "chunk"

    def __str__(self) -> str:
        return f"{self.mib} MiB of logits, {self.block} MiB of gradients"

    @contextmanager
    def applied(self) -> Iterator[None]:
        with (
            mock.patch.dict(blocks.CHUNK_BYTES, dict.fromkeys(blocks.CHUNK_BYTES, self.mib * MIB)),
            mock.patch.dict(blocks.BLOCK_BYTES, dict.fromkeys(blocks.BLOCK_BYTES, self.block * MIB)),
        ):
            yield


Setting = Rows | Chunk


@contextmanager
def on_triton() -> Iterator[None]:
    """Every backend is Triton, for tensors on a CPU too (in its interpreter), whether or not the C++ module is there."""
    with (
        mock.patch.object(backends, "load", lambda name: backend),
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
        c = self.cell
        shape = " x ".join(str(x) for x in (c.rows, c.hidden, c.vocab) if x is not None)
        return f"{c.contract}, {self.provider}: {shape} {str(c.dtype).removeprefix('torch.')}"

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
    rows, few, vocab, width, dtype = (16, 16, 272, 8, torch.float32) if small else (8192, 2048, 151936, 4096, torch.bfloat16)
    narrow = 4 if small else 1024  # so that 8192 rows are several blocks, and d_weight is a sum over them
    return [
        Workload("fused", "grpo_kernels, in place", Cell("logits", rows, vocab, dtype)),
        Workload("fused32", "grpo_kernels, in place", Cell("logits", few, vocab, torch.float32)),
        Workload("visit", "grpo_kernels", Cell("logits-forward", rows, vocab, dtype)),
        Workload("visit", "grpo_kernels, layer 1 + loss", Cell("logits", rows, vocab, dtype)),
        Workload("chunk", "grpo_kernels", Cell("hidden", rows, vocab, dtype, width)),
        Workload("chunk", "grpo_kernels", Cell("hidden", rows, vocab, dtype, narrow)),
    ]


def settings(kind: str, small: bool) -> list[Setting]:
    """The current setting of the package first, then the others."""
    if kind == "chunk":
        now = Chunk(blocks.CHUNK_BYTES["cuda"] // MIB, blocks.BLOCK_BYTES["cuda"] // MIB)
        # Rows of a large vocabulary: (512, 3072) now. Of one sum of bytes: (768, 2304), (1024, 2048); of more: the others.
        large = [Chunk(*x) for x in ((450, 700), (600, 600), (300, 1800), (600, 1200), (1200, 1200), (1200, 2400))]
        return list(dict.fromkeys((now, *([Chunk(1, 1)] if small else large))))
    now = backend.LAUNCH[kind]
    shapes = [
        now._replace(threads=threads, accesses=accesses, programs=programs)
        for threads in (256, 512, 1024)
        for accesses in (1, 2, 4, 8)
        for programs in (1, 2, 4)
    ]
    around = [now, now._replace(hints=not now.hints)]
    if kind != "visit":
        around += [now._replace(grid=grid) for grid in (0.5, 1.0)] + [now._replace(kept=kept) for kept in range(now.ends)]
        around.append(now._replace(ends=now.ends + 1, kept=now.ends + 1))
        if backend.available() is None and clusters():
            around += [now._replace(cluster=cluster) for cluster in (2, 4, 8)]
            around.append(now._replace(cluster=2, kept=now.ends - 1))  # two multiprocessors, and no register spilled
    candidates = [Rows(kind, choice) for choice in dict.fromkeys([*around, *shapes])]
    candidates = [candidates[0], *(s for s in candidates[1:] if s.fits)]
    return list(candidates[:2]) if small else list(candidates)


# ---- trials


def compile_once(job: tuple[Workload, Setting, str]) -> str | None:
    """Compiles into Triton's cache on disk. Compiled kernels depend on the vocabulary, not on the rows. Returns the reason
    of a failure, else None."""
    workload, setting, device = job
    try:
        run = workload.candidate(setting).make(make_case(replace(workload.cell, rows=16), device))
        run.call()
    except (RuntimeError, ValueError, AssertionError, Unavailable, backend.triton.TritonError) as failure:
        return first_line(failure)
    return None


def compile_all(jobs: list[tuple[Workload, Setting, str]], workers: int) -> None:
    """Compiles in parallel before anything is timed. A failure occurs again in `measure`, which reports it."""
    context = multiprocessing.get_context("spawn")  # a forked process would share the parent's CUDA context
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for (workload, setting, _), reason in zip(jobs, pool.map(compile_once, jobs), strict=True):
            if reason is not None:
                print(f"{workload}, {setting}: {reason}", flush=True)


def ranking(cells: Sequence[dict]) -> list[tuple[str, float]]:
    """[(setting, mean of its times relative to the best of each cell)], best first; only those that were right and timed in
    every cell."""
    timed = [
        {row["name"]: row["ms"] for row in cell["providers"] if row["status"] == "ok" and not row.get("limit")}
        for cell in cells
    ]
    everywhere = [name for name in timed[0] if all(name in cell for cell in timed)] if timed else []
    best = [min(cell[name] for name in everywhere) for cell in timed] if everywhere else []
    relative = {
        name: math.exp(statistics.fmean(math.log(cell[name] / fastest) for cell, fastest in zip(timed, best, strict=True)))
        for name in everywhere
    }
    return sorted(relative.items(), key=lambda item: item[1])


def described(setting: Setting) -> dict[str, Any]:
    return {"choice": setting.choice._asdict()} if isinstance(setting, Rows) else asdict(setting)


def tune(
    kinds: Sequence[str], device: str, small: bool, seconds: float, save: Callable[[dict], None] = lambda results: None
) -> dict:
    """{kind: {"cells", "ranking", "best", "now"}}; `save` gets it after each workload."""
    results: dict[str, dict] = {}
    for kind in kinds:
        candidates = settings(kind, small)
        chosen = [w for w in workloads(small) if w.kind == kind]
        if kind != "chunk":  # its kernels are those that the package compiles
            workers = 1 if small else min(12, os.cpu_count() or 1)
            compile_all([(w, s, device) for w in chosen for s in candidates], workers)
        cells: list[dict] = []
        for workload in chosen:
            cell = measure(
                workload.cell, device, seconds=seconds, least=1 if small else 5, most=20, counters=False, memory=kind == "chunk",
                candidates=[workload.candidate(s) for s in candidates] + [p for p in providers(workload.cell.contract) if p.limit],
            )  # fmt: skip
            cells.append({"workload": str(workload)} | cell)
            order = ranking(cells)
            by_name = {str(s): s for s in candidates}
            best = described(by_name[order[0][0]]) if order else None
            results[kind] = {"cells": cells, "ranking": order, "best": best, "now": str(candidates[0])}
            save(results)
            show_cell(cells[-1])
    return results


# ---- the settings found, for the benchmarks

#: A setting replaces that of the package only if it is faster by more than this share: a smaller difference may be noise.
GAIN = 0.02


def winners(found: dict[str, dict]) -> dict[str, Any]:
    """{kind: the best setting} of those kinds where it is faster than that of the package."""
    chosen = {}
    for kind, result in found.items():
        places = dict(result["ranking"])
        if places and places.get(result["now"], math.inf) > (1 + GAIN) * min(places.values()):
            chosen[kind] = result["best"]
    return chosen


def apply(path: Path) -> dict[str, Any]:
    """Sets the launches of this process to the settings of a file, and returns them. Without a file nothing changes."""
    chosen: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for kind, best in chosen.items():
        if kind == "chunk":
            blocks.CHUNK_BYTES["cuda"], blocks.BLOCK_BYTES["cuda"] = best["mib"] * MIB, best["block"] * MIB
        else:
            backend.LAUNCH[kind] = Choice(**best["choice"])
    return chosen


# ---- printing


def show_cell(cell: dict) -> None:
    print(f"\n{cell['workload']}")
    for row in sorted(cell["providers"], key=lambda row: row.get("ms", math.inf)):
        if row["status"] == "ok":
            memory = f"  {row['extra_mb']:.0f} MB" if row.get("extra_mb") is not None else ""
            print(
                f"  {row['name']:40}{row['ms']:9.3f} ms {row['x_limit']:6.2f} x limit, {row['runs']} runs{memory}", flush=True
            )
        else:
            print(f"  {row['name']:40} {row['status']}: {row['reason']}", flush=True)


def summary(found: dict) -> list[str]:
    """The best of each kind, the current setting of the package, and the table to paste."""
    lines = []
    for kind, result in found.items():
        places = dict(result["ranking"])
        if not places:
            lines.append(f"{kind}: no setting was right in all workloads")
            continue
        (name, value), now = result["ranking"][0], places.get(result["now"], math.nan)
        rest = "as it is now" if name == result["now"] else f"now {result['now']}, {100 * (now / value - 1):.1f} % slower"
        lines.append(f"{kind}: best {name}, {rest}")
    launch = dict(backend.LAUNCH)
    for kind, result in found.items():
        best = result["best"]
        if best is None:
            continue
        if kind == "chunk":
            lines.append(f'CHUNK_BYTES["cuda"] = {best["mib"]} << 20, BLOCK_BYTES["cuda"] = {best["block"]} << 20')
            continue
        launch[kind] = Choice(**best["choice"])
    if found.keys() & launch.keys():
        lines.append("LAUNCH = {" + ", ".join(f'"{kind}": {choice}' for kind, choice in launch.items()) + "}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("fused", "fused32", "visit", "chunk")
    parser.add_argument("--kind", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--seconds", type=float, default=0.05, help="of runs for each candidate and workload")
    parser.add_argument("--json", type=Path, help="write all figures there, after each workload")
    parser.add_argument("--small", action="store_true", help="small shapes on the CPU, to try the script itself")
    args = parser.parse_args(argv)

    def save(results: dict) -> None:
        if args.json is not None:
            part = args.json.with_suffix(".part")
            part.write_text(json.dumps(results, indent=1))
            part.replace(args.json)

    results = tune(args.kind, "cpu" if args.small else "cuda", args.small, args.seconds, save)
    print("\n" + "\n".join(summary(results)))


if __name__ == "__main__":
    main()
