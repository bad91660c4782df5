"""Time and memory before and after our loss replaces a trainer's own: the examples that assert equal losses, measured.

    python -m benchmarks.swaps [--write]

Each example runs in a process of its own. --write: benchmarks/results/swaps.json, and the table in
grpo_kernels/integrations/README.md that is made from it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from benchmarks import results
from benchmarks.harness import RESULTS
from benchmarks.machine import machine, require_kernels
from benchmarks.tables import replace_block

EXAMPLES = {"TRL": "examples.trl_grpo", "Liger": "examples.liger_swap", "verl": "examples.verl_policy_loss"}
FILE = RESULTS / "swaps.json"
PAGE = results.ROOT / "grpo_kernels" / "integrations" / "README.md"
COMMAND = "python -m benchmarks.swaps --write"


def measure(module: str) -> list[dict[str, Any]]:
    code = f"import importlib, json; rows = importlib.import_module({module!r}).main(); print(json.dumps(rows))"
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    print(run.stdout)
    return json.loads(run.stdout.splitlines()[-1])


def block(record: dict[str, Any]) -> str:
    if not record:
        return f"Not measured yet: `{COMMAND}`."
    m = record["machine"]
    lines = [
        f"{m['name']}, {m['threads']} threads, torch {m['torch']}, {record['date']}; `{record['command']}`.",
        "",
        "| trainer | what | ms before | ms after | MB before | MB after | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in record["rows"]:
        numbers = [f"{x:.1f}" if x < 100 else f"{x:.0f}" for x in (*r["ms"], *r["mb"])]
        lines.append(f"| {r['trainer']} | {r['what']} | {' | '.join(numbers)} | {r['memory']} |")
    return "\n".join(lines)


def insert(text: str, record: dict[str, Any]) -> str:
    return replace_block(text, PAGE.name, "swaps", block(record), COMMAND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the figures")
    write = parser.parse_args().write
    require_kernels("cpu")
    rows = [{"trainer": trainer} | row for trainer, module in EXAMPLES.items() for row in measure(module)]
    record = {
        "command": COMMAND,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine("cpu"),
        "rows": rows,
    }
    print(block(record))
    if write:
        results.save(FILE, record)
        PAGE.write_text(insert(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
