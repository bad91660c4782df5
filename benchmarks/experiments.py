"""Experiments on the package beside the suites, each a line of EXPERIMENTS: what it measures, and the table that it makes.

    python -m benchmarks.experiments NAME [--write]

swaps: the examples that put our loss in the place of a trainer's own and assert equal losses. With --write the result goes into
results/NAME.json, and from there into the block of its page."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results
from benchmarks.machine import machine, require_kernels
from benchmarks.results import RESULTS, ROOT
from benchmarks.tables import Record, Table, render, replace_block

QUIET = 0.5  # load average up to which the machine counts as idle


@dataclass(frozen=True)
class Experiment:
    """What is measured, and where it is shown."""

    name: str  # of its result file and of the block of its page
    page: Path
    measure: Callable[[], Record]  # the result beside its origin
    table: Callable[[Record], Table]

    @property
    def command(self) -> str:
        return f"python -m benchmarks.experiments {self.name} --write"

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def updated(self) -> str:
        """The page with what the result file says now: how it was made, and the table."""
        record = results.load(self.file)
        m = record["machine"]
        made_by = f"{m['name']}, {m['threads']} threads, torch {m['torch']}, {record['date']}; `{self.command}`."
        if record.get("load", 0) > QUIET:
            made_by += f"\n\n**Load average {record['load']:.0f} before: other programs ran, ratios are rough.**"
        block = f"{made_by}\n\n{render(self.table(record), markdown=True)}"
        return replace_block(self.page.read_text(), self.page.name, self.name, block, self.command)


# ---- swaps

EXAMPLES = {"TRL": "examples.trl_grpo", "Liger": "examples.liger_swap", "verl": "examples.verl_policy_loss"}


def measure_swaps() -> Record:
    """Each example runs in a process of its own."""
    rows = []
    for trainer, module in EXAMPLES.items():
        code = f"import importlib, json; rows = importlib.import_module({module!r}).main(); print(json.dumps(rows))"
        run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        rows += [{"trainer": trainer} | row for row in json.loads(run.stdout.splitlines()[-1])]
    return {"rows": rows}


def swaps(record: Record) -> Table:
    lines = [["trainer", "what", "ms before", "ms after", "MB before", "MB after", "memory"]]
    for r in record["rows"]:
        numbers = [f"{x:.1f}" if x < 100 else f"{x:.0f}" for x in (*r["ms"], *r["mb"])]
        lines.append([r["trainer"], r["what"], *numbers, r["memory"]])
    return lines


# ---- the command

EXPERIMENTS = {
    one.name: one for one in (Experiment("swaps", ROOT / "grpo_kernels" / "integrations" / "README.md", measure_swaps, swaps),)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--write", action="store_true", help="keep the figures, and make the block of the page")
    args = parser.parse_args()
    require_kernels("cpu")
    one = EXPERIMENTS[args.name]
    record = {"load": os.getloadavg()[0]} | one.measure()
    print(render(one.table(record), markdown=False))
    if args.write:
        origin = {"command": one.command, "date": time.strftime("%Y-%m-%d"), "machine": machine("cpu")}
        results.save(one.file, origin | record)
        one.page.write_text(one.updated())


if __name__ == "__main__":
    main()
