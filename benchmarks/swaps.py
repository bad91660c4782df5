"""Measure time and memory of training steps before and after a trainer's loss is replaced by ours.

    python -m benchmarks.swaps

The examples of EXAMPLES replace the loss and assert that the losses are equal. The command prints a
table and writes results/swaps.json. `benchmarks.report` copies the table to the page of adapters.
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks import results
from benchmarks.machine import machine, require_kernels
from benchmarks.tables import Record, Table, figure, render

FILE = results.RESULTS / "swaps.json"
#: {trainer: the module of its example, whose `main` returns the lines of the table}
EXAMPLES = {
    "TRL": "examples.trl_grpo",
    "Liger": "examples.liger_swap",
    "verl": "examples.verl_policy_loss",
}


def measure() -> Record:
    """Run each example in a separate process, and return the content of the result file.

    "rows" has the lines of all examples, each with its "trainer".
    """
    rows = []
    for trainer, module in EXAMPLES.items():
        # The new process prints the lines as JSON, after what the example prints.
        code = (
            f"import importlib, json; rows = importlib.import_module({module!r}).main();"
            " print(json.dumps(rows))"
        )
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        last_line = run.stdout.splitlines()[-1]
        rows += [{"trainer": trainer} | row for row in json.loads(last_line)]
    return results.origin(machine("cpu"), "python -m benchmarks.swaps") | {"rows": rows}


def table(record: Record) -> Table:
    """Return the table of a result file. "ms" and "mb" of a row are pairs (before, after)."""
    lines = [["trainer", "what", "ms before", "ms after", "MB before", "MB after", "memory"]]
    for row in record["rows"]:
        figures = [figure(value) for value in (*row["ms"], *row["mb"])]
        lines.append([row["trainer"], row["what"], *figures, row["memory"]])
    return lines


if __name__ == "__main__":
    require_kernels("cpu")
    record = measure()
    results.save(FILE, record)
    print(render(table(record), markdown=False))
