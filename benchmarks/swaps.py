"""What our loss saves in the place of a trainer's own: the examples that swap it and assert equal
losses.

    python -m benchmarks.swaps

Prints the table, and writes results/swaps.json, from which `benchmarks.report` makes the block of
the page of adapters.
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks import results
from benchmarks.machine import machine, require_kernels
from benchmarks.tables import Record, Table, figure, render

FILE = results.RESULTS / "swaps.json"
EXAMPLES = {
    "TRL": "examples.trl_grpo",
    "Liger": "examples.liger_swap",
    "verl": "examples.verl_policy_loss",
}


def measure() -> Record:
    """Each example runs in a process of its own."""
    rows = []
    for trainer, module in EXAMPLES.items():
        code = (
            f"import importlib, json; rows = importlib.import_module({module!r}).main();"
            " print(json.dumps(rows))"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
        )
        rows += [{"trainer": trainer} | row for row in json.loads(run.stdout.splitlines()[-1])]
    return results.origin(machine("cpu"), "python -m benchmarks.swaps") | {"rows": rows}


def table(record: Record) -> Table:
    head = ["trainer", "what", "ms before", "ms after", "MB before", "MB after", "memory"]
    return [
        head,
        *(
            [r["trainer"], r["what"], *map(figure, (*r["ms"], *r["mb"])), r["memory"]]
            for r in record["rows"]
        ),
    ]


if __name__ == "__main__":
    require_kernels("cpu")
    record = measure()
    results.save(FILE, record)
    print(render(table(record), markdown=False))
