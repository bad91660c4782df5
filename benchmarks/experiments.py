"""Experiments on the package beside the suites, each a line of EXPERIMENTS: what it measures, and the table that it makes.

    python -m benchmarks.experiments NAME [--write]

swaps: the examples that put our loss in the place of a trainer's own and assert equal losses. host_time: what a loss from logits
in place costs the host, without Triton's own launch and without a GPU. With --write the result goes into results/NAME.json, and
from there into the block of its page."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


# ---- host_time: all as for CUDA tensors, on tiny tensors of the CPU, but for launches and for checks that a GPU leaves out

CALLS, ROUNDS = 100, 20


def losses() -> dict[str, Callable[[], Any]]:
    """{what: a loss from logits in place}, with all that a batch usually has."""
    from grpo_kernels import Objective, TokenBatch, grpo_loss

    targets, logits = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    objective, of_model = Objective.preset("dapo", beta=0.04), logits * 1
    fields: dict[str, Any] = {"old_logps": torch.zeros(4, 8), "ref_logps": torch.zeros(4, 8)}
    masked = TokenBatch(targets, torch.randn(4), mask=targets == 0, **fields)
    whole = TokenBatch(targets, torch.randn(4), **fields)
    return {
        "with a mask": lambda: grpo_loss(of_model, masked, objective, inplace=True),
        "without": lambda: grpo_loss(of_model, whole, objective, inplace=True),
    }


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[list[str]]:
    """Inside, kernels are not launched, but their names appended to the list."""
    from triton.runtime.jit import JITFunction

    from benchmarks.launches import compiling
    from grpo_kernels.rows import backends
    from grpo_kernels.rows.backends import triton as backend

    launched: list[str] = []
    stand_ins: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__)),
        (backends, "unavailable", lambda name: None),
        (backends, "_made", lambda name, strict: backend.Kernels(strict)),
    ]
    for name, module in sys.modules.items():
        if name.startswith("grpo_kernels") and hasattr(module, "values_are_checked"):
            stand_ins.append((module, "values_are_checked", lambda _: False))
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling("sm_90"))  # for a driver: nothing is compiled
        for stand_in in stand_ins:
            stack.enter_context(mock.patch.object(*stand_in))
        yield launched


class Operations(TorchDispatchMode):
    """Inside, the names of torch's operations are appended to `names`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        self.names.append(str(operation))
        return operation(*given, **(options or {}))


def operations(call: Callable[[], Any]) -> list[str]:
    """Torch's operations in a call, in order."""
    with Operations() as found:
        call()
    return found.names


def measure_host_time() -> Record:
    torch.set_num_threads(1)
    found = {}
    with as_on_a_gpu():
        for name, call in losses().items():
            taken = []
            for _ in range(2 * ROUNDS):
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call()
                taken.append(1e6 * (time.perf_counter() - begin) / CALLS)
            taken = taken[ROUNDS:]  # what is made once is made
            found[name] = {"least": min(taken), "median": statistics.median(taken), "operations": len(operations(call))}
    return {"us": found}


def host_time(record: Record) -> Table:
    heads = ("median", "least", "operations")
    return [
        ["a loss from logits in place", "us", "us at least", "operations of torch"],
        *([name, *(f"{x[h]:.4g}" for h in heads)] for name, x in record["us"].items()),
    ]


# ---- the command

EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment("swaps", ROOT / "grpo_kernels" / "integrations" / "README.md", measure_swaps, swaps),
        Experiment("host_time", ROOT / "docs" / "gpu.md", measure_host_time, host_time),
    )
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
