"""What binds a row kernel on a GPU: issuing its instructions, its exponentials, its fp32 arithmetic, or memory.

Counts are those that benchmarks/instructions.py read from machine code (results/instructions.json), rates those of data sheets
and programming guides: an estimate of the least time, which no kernel reaches. `python -m benchmarks.roofline --kernels` prints
it, and `--write` puts it on docs/gpu.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import results
from benchmarks.instructions import PATH

#: Of a data sheet's bandwidth, the share that copies and row kernels reach on such GPUs (published figures: 0.82 to 0.94).
REACHED = 0.85


@dataclass(frozen=True)
class Chip:
    """Rates of a GPU: numbers that a multiprocessor takes in a clock, clocks as under load."""

    name: str
    target: str
    multiprocessors: int
    ghz: float
    bandwidth: float  # TB/s of the data sheet
    fp32: int = 128
    issue: int = 128  # four warps of 32, each an instruction
    special: int = 16


#: CUDA programming guide (throughput of arithmetic instructions); AMD's CDNA 3 guide: a compute unit issues for 64 threads in a
#: clock, a quarter of that for exponentials, and its scalar unit works beside.
CHIPS = (
    Chip("A100 80 GB", "sm_80", 108, 1.41, 2.039, fp32=64),
    Chip("H100 SXM", "sm_90", 132, 1.755, 3.35),
    Chip("H200", "sm_90", 132, 1.755, 4.8),
    Chip("B200", "sm_100", 148, 1.86, 8.0),
    Chip("MI300X", "gfx942", 304, 2.1, 5.3, issue=64),
)
BOUNDS = ("issue", "special", "fp32", "memory")


def bounds(way: dict[str, Any], chip: Chip, rows: int, vocab: int) -> dict[str, float]:
    """Milliseconds by BOUNDS of a way from logits to their gradient, an entry of results/instructions.json."""
    logits = rows * vocab
    issued = [visit["issued"] for visit in way["visits"]]
    work = {
        "issue": sum(n for visit in issued for pipe, n in visit.items() if pipe != "scalar"),
        "special": sum(visit["special"] for visit in issued),
        "fp32": sum(visit["fp32"] for visit in issued),
    }
    clocks = chip.multiprocessors * chip.ghz * 1e6  # of all multiprocessors in a millisecond
    found = {name: logits * n / (getattr(chip, name) * clocks) for name, n in work.items()}
    return found | {"memory": logits * way["bytes"] / (REACHED * chip.bandwidth * 1e9)}


def table(version: str, rows: int = 8192, vocab: int = 151936) -> list[list[str]]:
    """Head and lines: instructions a logit on Hopper, then issue / exponentials / fp32 / memory on each GPU, what binds in bold."""
    targets = results.load(PATH)[version]["targets"]
    chips = [chip for chip in CHIPS if chip.target in targets]
    lines = [["from logits to their gradient", *(f"{chip.name}: {' / '.join(BOUNDS)}" for chip in chips)]]
    for name in targets[chips[0].target]:
        found = [bounds(targets[chip.target][name], chip, rows, vocab) for chip in chips]
        lines.append([name, *map(_cell, found)])
    return lines


def _cell(found: dict[str, float]) -> str:
    most = max(found.values())
    return " / ".join(f"**{x:.2f}**" if x == most else f"{x:.2f}" for x in found.values())


def counts(version: str, target: str) -> list[list[str]]:
    """Head and lines: what a thread issues for a logit in each visit of its row."""
    head = [
        "",
        "kernel",
        "instructions",
        "exponentials",
        "fp32",
        "memory",
        "loads before the first wait",
        "registers x threads",
    ]
    lines = [head]
    for name, way in results.load(PATH)[version]["targets"][target].items():
        for visit in way["visits"]:
            issued = visit["issued"]
            what = f"{visit['kernel']}, {'read and write' if visit['writes'] else 'read'}"
            parts = [f"{issued[pipe]:.2f}" for pipe in ("special", "fp32", "memory")]
            held = f"{visit['registers']} x {visit['threads']}" + f", {visit['spilled']} B spilled" * bool(visit["spilled"])
            lines.append([name, what, f"{sum(issued.values()):.2f}", *parts, f"{visit['together']} of {visit['loads']}", held])
    return lines
