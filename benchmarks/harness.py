"""Timing, memory and bookkeeping shared by the benchmarks.

Times are medians of runs interleaved over all contenders in one process, so that a machine that slows down slows down
for everybody. A contender whose answer is wrong gets its error printed and no time."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(
    contenders: dict[str, Callable[[], Any]], rounds: int, before: Callable[[], Any] | None = None
) -> dict[str, dict]:
    """{name: {ms, p20, p80, runs}}: each round runs every contender once, starting with another one each time.

    `before` runs untimed ahead of each run (it restores inputs that a contender overwrote)."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if before is not None:
                before()
            start = time.perf_counter()
            result = contenders[name]()
            stop = time.perf_counter()
            del result
            if i > 0:  # the first round warms up
                times[name].append(1e3 * (stop - start))
    return {name: _summary(t) for name, t in times.items()}


def _summary(times: list[float]) -> dict:
    cuts = statistics.quantiles(times, n=5) if len(times) > 1 else times * 4
    return {"ms": statistics.median(times), "p20": cuts[0], "p80": cuts[3], "runs": len(times)}


def peak_memory(run: Callable[[], Any], warm: bool = False) -> float:
    """Bytes by which resident memory rises at most while `run` runs, after a warm-up unless it is `warm` (Linux)."""
    if not warm:
        run()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key + ":"))
    return 1024 * int(line.split()[1])


def machine() -> dict:
    """What the figures were measured on."""
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "?"
    )
    found = {
        "cpu": cpu,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", ""),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    try:
        from grpo_kernels import _cpu

        found["instruction set"] = _cpu.isa()
    except ImportError:
        pass
    return found


def save(name: str, rows: list[dict]) -> Path:
    """benchmarks/results/<name>.json: the rows with the machine, the time and the command that made them."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    module = Path(sys.argv[0]).stem
    record = {
        "command": " ".join(["python -m", f"benchmarks.{module}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
