"""Time and memory before and after our loss replaces a trainer's own: the examples that assert equal losses, measured.

    python -m benchmarks.swaps [--write]

Each example runs in a process of its own. --write: benchmarks/results/swaps.json, and the table in
grpo_kernels/integrations/README.md that is made from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.experiments import Experiment
from benchmarks.results import ROOT
from benchmarks.tables import Record, Table

EXAMPLES = {"TRL": "examples.trl_grpo", "Liger": "examples.liger_swap", "verl": "examples.verl_policy_loss"}
PAGE = ROOT / "grpo_kernels" / "integrations" / "README.md"


def measure() -> Record:
    rows = []
    for trainer, module in EXAMPLES.items():
        code = f"import importlib, json; rows = importlib.import_module({module!r}).main(); print(json.dumps(rows))"
        run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        print(run.stdout)
        rows += [{"trainer": trainer} | row for row in json.loads(run.stdout.splitlines()[-1])]
    return {"rows": rows}


def tables(record: Record) -> Iterator[Table]:
    lines = [["trainer", "what", "ms before", "ms after", "MB before", "MB after", "memory"]]
    for r in record["rows"]:
        numbers = [f"{x:.1f}" if x < 100 else f"{x:.0f}" for x in (*r["ms"], *r["mb"])]
        lines.append([r["trainer"], r["what"], *numbers, r["memory"]])
    yield lines


EXPERIMENT = Experiment("swaps", PAGE, tables, measure)

if __name__ == "__main__":
    EXPERIMENT.main()
