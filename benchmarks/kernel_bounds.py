"""What limits a row kernel on a GPU: issuing its instructions, its exponentials, its fp32 arithmetic, or memory.

The counts are those that benchmarks/instructions.py has read from machine code (results/instructions.json), the rates those of data
sheets and programming guides. The result is an estimate of the least time, which no kernel reaches. `python -m benchmarks.roofline
--kernels` prints it, and `--write` puts it into docs/gpu.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.harness import RESULTS
from benchmarks.printing import Table, render, replace_block
from grpo_kernels.diagnosis import numbers

PATH, BUDGETS = RESULTS / "instructions.json", RESULTS / "budgets.json"
PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"

#: The share of a data sheet's bandwidth that copies and row kernels reach on such GPUs (published figures: 0.82 to 0.94).
REACHED = 0.85


@dataclass(frozen=True)
class Chip:
    """Rates of a GPU: operations of a multiprocessor in a clock cycle, and its clock rate under load."""

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
    """Milliseconds by BOUNDS, for one way to compute the gradient of logits, an entry of results/instructions.json."""
    logits = rows * vocab
    issued = [visit["issued"] for visit in way["visits"]]
    work = {
        "issue": sum(n for visit in issued for pipe, n in visit.items() if pipe != "scalar"),
        "special": sum(visit["special"] for visit in issued),
        "fp32": sum(visit["fp32"] for visit in issued),
    }
    clocks = chip.multiprocessors * chip.ghz * 1e6  # of all multiprocessors in a millisecond
    ms = {name: logits * n / (getattr(chip, name) * clocks) for name, n in work.items()}
    return ms | {"memory": logits * way["bytes"] / (REACHED * chip.bandwidth * 1e9)}


def tables(rows: int = 8192, vocab: int = 151936) -> dict[str, Table]:
    """The bounds, the counts from which they are computed, and the counts of the same kernels with other versions of Triton."""
    record = results.load(PATH)
    version = max(record, key=numbers)
    targets = record[version]["targets"]
    return {
        "bounds": _bounds(targets, rows, vocab),
        "counts": _counts(targets["sm_90"]),
        "loads": _loads(record),
        "budgets": _budgets(results.load(BUDGETS)),
    }


def _bounds(targets: dict[str, dict], rows: int, vocab: int) -> Table:
    chips = [chip for chip in CHIPS if chip.target in targets]
    lines = [[f"ms: {' / '.join(BOUNDS)}", *(chip.name for chip in chips)]]
    for name in targets[chips[0].target]:
        of_chips = [bounds(targets[chip.target][name], chip, rows, vocab) for chip in chips]
        lines.append([name, *map(_cell, of_chips)])
    return lines


def _cell(found: dict[str, float]) -> str:
    most = max(found.values())
    return " / ".join(f"**{x:.2f}**" if x == most else f"{x:.2f}" for x in found.values())


def _counts(ways: dict[str, dict]) -> Table:
    lines = [["of a thread for a logit", "visit", "instructions", "exponentials", "fp32", "memory", "registers x threads"]]
    for name, way in ways.items():
        for visit in way["visits"]:
            issued = visit["issued"]
            what = f"{visit['kernel']}, {'read and write' if visit['writes'] else 'read'}"
            parts = [f"{issued[pipe]:.2f}" for pipe in ("special", "fp32", "memory")]
            spilled = f", {visit['spilled']} B spilled" if visit["spilled"] else ""
            held = f"{visit['registers']} x {visit['threads']}{spilled}"
            lines.append([name, what, f"{sum(issued.values()):.2f}", *parts, held])
    return lines


def _loads(record: dict[str, dict]) -> Table:
    """Of our ways: the loads of a thread before the first wait, of all in a round of the loop, for each visit; and bytes
    spilled."""
    versions = sorted(record, key=numbers)
    columns = [(version, target) for version in versions for target in record[version]["targets"]]
    lines = [["loads before the first wait", *(f"{target}, {version}" for version, target in columns)]]
    names = [name for name in record[versions[-1]]["targets"]["sm_90"] if name.startswith("grpo_kernels")]
    for name in names:
        cells = []
        for version, target in columns:
            visits = record[version]["targets"][target][name]["visits"]
            spilled = max(visit["spilled"] for visit in visits)
            loads = ", ".join(f"{visit['together']} of {visit['loads']}" for visit in visits)
            cells.append(loads + (f"; {spilled} B spilled" if spilled else ""))
        lines.append([name, *cells])
    return lines


def _budgets(record: dict[str, dict]) -> Table:
    lines = [["Triton", "target", "kernels", "beyond their budgets", "most bytes spilled", "least KiB in flight"]]
    for version in sorted(record, key=numbers):
        for target, outcome in record[version].items():
            beyond = "; ".join(outcome["beyond"]) or "0"
            lines.append(
                [version, target, str(outcome["kernels"]), beyond, str(outcome["spilled"]), f"{outcome['in flight']:.0f}"]
            )
    return lines


COMMAND = "python -m benchmarks.roofline --kernels --write"


def insert(text: str) -> str:
    """docs/gpu.md with its tables replaced."""
    for name, table in tables().items():
        text = replace_block(text, PAGE.name, name, render(table, markdown=True), COMMAND)
    return text


def write() -> None:
    PAGE.write_text(insert(PAGE.read_text()))
