"""Finds the fastest launch settings: threads, accesses in flight, programs per multiprocessor, grids, cache hints and tiles in
registers of the row kernels, of one stream and of two; of the selection of columns and the sparse products; and from hidden states
the bytes of a chunk of logits and of a block of gradients.

    python -m benchmarks.tune [--kind fused visit ...] [--seconds 0.05] [--json FILE] [--small]

A candidate is a call of the package with another entry in its table of launches, so a trial changes no code. Each is checked
against float64 before it is timed, and the runs of one workload are interleaved. The file of --json is written after each
candidate, and a second run goes on from it: after one that broke CUDA (exit status 75), without that one. Prints a ranking
for each kind (the geometric mean over its workloads of the time relative to the best), and the table to paste. `--small` uses small
shapes on the CPU: with TRITON_INTERPRET=1 this script can be tested without a GPU; its figures then mean nothing."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.inputs import make_case
from benchmarks.measure import DeviceLost, measure
from benchmarks.providers import Unavailable, first_line, providers
from benchmarks.results import load
from benchmarks.suites import LOST_DEVICE
from benchmarks.tune_settings import Setting, Workload, setting_of, settings, workloads
from grpo_kernels.rows.backends import triton as backend
from grpo_kernels.rows.backends.triton.launch import Choice

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
        try:
            for (workload, setting, _), reason in zip(jobs, pool.map(compile_once, jobs), strict=True):
                if reason is not None:
                    print(f"{workload}, {setting}: {reason}", flush=True)
        except BrokenProcessPool as failure:  # a compiler that crashed: the others compile when they are measured
            print(f"not compiled beforehand: {first_line(failure)}", flush=True)


def ranking(cells: Sequence[dict]) -> list[tuple[str, float]]:
    """[(setting, mean of its times relative to the best of each cell)], best first; only those that were right and timed in
    every cell. A cell that was cut off counts where it is the first: its times are those of a few runs."""
    whole = [cell for cell in cells if not cell.get("unfinished")] or cells[:1]
    timed = [
        {row["name"]: row["ms"] for row in cell["providers"] if row["status"] == "ok" and "ms" in row and not row.get("limit")}
        for cell in whole
    ]
    everywhere = [name for name in timed[0] if all(name in cell for cell in timed)] if timed else []
    best = [min(cell[name] for name in everywhere) for cell in timed] if everywhere else []
    relative = {
        name: math.exp(statistics.fmean(math.log(cell[name] / fastest) for cell, fastest in zip(timed, best, strict=True)))
        for name in everywhere
    }
    return sorted(relative.items(), key=lambda item: item[1])


def tune(
    kinds: Sequence[str], device: str, small: bool, seconds: float, save: Callable[[dict], None] = lambda results: None,
    before: dict[str, dict] | None = None,
) -> dict:  # fmt: skip
    """{kind: {"cells", "ranking", "best", "now", "lost"}}; `save` gets it after each candidate. `before`: what a run that was cut
    off has saved. A candidate that breaks CUDA is noted in "lost", and DeviceLost ends the run."""
    results = dict(before or {})
    for kind in kinds:

        def saved(result: dict, kind: str = kind) -> None:
            results[kind] = result
            save(results)

        tune_kind(kind, device, small, seconds, results.get(kind, {}), saved)
    return results


def tune_kind(kind: str, device: str, small: bool, seconds: float, before: dict, save: Callable[[dict], None]) -> None:
    """`tune` of one kind."""
    candidates = settings(kind, small)
    chosen = [w for w in workloads(small) if w.kind == kind]
    measured = {cell["workload"]: cell for cell in before.get("cells", []) if not cell.get("unfinished")}
    lost: dict[str, dict[str, str]] = before.get("lost", {})
    cells: list[dict] = []

    def saved(found: list[dict]) -> None:
        order, by_name = ranking(found), {str(s): s for s in candidates}
        best = by_name[order[0][0]].described() if order else None
        save({"cells": found, "ranking": order, "best": best, "now": str(candidates[0]), "lost": lost})

    if kind != "chunk" and not measured:  # its kernels are those that the package compiles
        workers = 1 if small else min(12, os.cpu_count() or 1)
        compile_all([(w, s, device) for w in chosen for s in candidates], workers)
    for workload in chosen:
        name = {"workload": str(workload)}
        if str(workload) not in measured:
            try:
                cell = measure(
                    workload.cell, device, seconds=seconds, least=1 if small else 5, most=20, counters=False, memory=kind == "chunk",
                    known=lost.get(str(workload)), save=lambda part, name=name: saved([*cells, name | part]),
                    candidates=[workload.candidate(s) for s in candidates] + [p for p in providers(workload.cell.contract) if p.limit],
                )  # fmt: skip
            except DeviceLost as failure:
                lost.setdefault(str(workload), {})[failure.provider] = failure.reason
                saved(cells)
                raise
            measured[str(workload)] = name | cell
        cells.append(measured[str(workload)])
        saved(cells)
        show_cell(cells[-1])


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
        setting_of(kind, best).put(but="cpu")
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
    launch = dict(backend.launch.LAUNCH)
    for kind, best in ((kind, result["best"]) for kind, result in found.items() if result["best"] is not None):
        if kind == "chunk":
            lines.append(f'CHUNK_BYTES["cuda"] = {best["mib"]} << 20, BLOCK_BYTES["cuda"] = {best["block"]} << 20')
        else:
            launch[kind] = Choice(**best["choice"])
    if found.keys() & launch.keys():
        lines.append("LAUNCH = {" + ", ".join(f'"{kind}": {choice}' for kind, choice in launch.items()) + "}")
    return lines


#: The kinds of settings, the most valuable first, and the share of the time for each.
KINDS = {"fused": 3.0, "visit": 2.0, "fused32": 3.0, "chunk": 3.0, "two": 1.5, "mixed": 1.0, "select": 0.7, "slots": 0.7}


def main(argv: Sequence[str] | None = None) -> int:
    """0, or LOST_DEVICE if a candidate has broken CUDA: the same command goes on without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=0.05, help="of runs for each candidate and workload")
    parser.add_argument("--json", type=Path, help="write all figures there, after each candidate, and go on from it")
    parser.add_argument("--small", action="store_true", help="small shapes on the CPU, to try the script itself")
    args = parser.parse_args(argv)

    def save(results: dict) -> None:
        if args.json is not None:
            part = args.json.with_suffix(".part")
            part.write_text(json.dumps(results, indent=1))
            part.replace(args.json)

    before = load(args.json) if args.json is not None else {}
    try:
        results = tune(args.kind, "cpu" if args.small else "cuda", args.small, args.seconds, save, before)
    except DeviceLost as failure:
        print(f"\n{failure}: CUDA is unusable in this process. Run the same command again.", flush=True)
        return LOST_DEVICE
    print("\n" + "\n".join(summary(results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
