"""The stages of gpu_kit.py, each in a process of its own:

    python -m benchmarks.gpu_stages STAGE --work DIR [--seconds 60] [--wheels DIR] [--rehearse]

A stage writes DIR/json/STAGE.json after each step, so that its results survive a crash or a
timeout. `--rehearse` runs it with small shapes on a CPU, with Triton's interpreter in place of a
GPU; what needs CUDA is then left out, with a note.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import SWITCH, parser_of
from benchmarks import tune as tuning
from benchmarks.gpu_kit import CASES, COMPARED, FURTHER, HEADLINE, REHEARSED, REHEARSED_SUITES
from benchmarks.harness import interleaved
from benchmarks.machine import gpu_state, machine
from benchmarks.report import report
from benchmarks.results import ROOT, load, save
from benchmarks.suites import LOST_DEVICE


class Kit:
    """One running stage: its folder, its time limit, and its results."""

    def __init__(
        self,
        stage: str,
        work: Path,
        seconds: float,
        wheels: Path | None = None,
        rehearse: bool = False,
    ) -> None:
        self.stage, self.work, self.wheels, self.rehearse = stage, work, wheels, rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.deadline = time.monotonic() + seconds
        self.found: dict[str, Any] = {"lines": []}
        self.well = True  # the process ends with 1 otherwise

    @property
    def left(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    def add(self, **found: Any) -> None:
        self.found |= found
        save(self.work / "json" / f"{self.stage}.json", self.found)

    def say(self, line: str, well: bool = True) -> None:
        """Adds a line to the summary."""
        self.well &= well
        print(line, flush=True)
        self.add(lines=[*self.found["lines"], line])

    def leave_out(self, *names: str) -> None:
        """Notes what this machine cannot do, and why."""
        self.add(left_out=[*self.found.get("left_out", []), *names])
        for name in names:
            self.say(f"left out: {name}")

    def child(self, *command: str, seconds: float | None = None, **environment: str) -> int | None:
        """The exit status of a command, whose output goes to this stage's log; None if it took too
        long. "" unsets a variable.
        """
        values = {k: v for k, v in (os.environ | environment).items() if v or k not in environment}
        print(f"\n$ {' '.join(command)}", flush=True)
        try:
            return subprocess.run(
                command, cwd=ROOT, env=values, timeout=min(seconds or self.left, self.left)
            ).returncode
        except subprocess.TimeoutExpired:
            print("(took too long, ended)", flush=True)
            return None

    def python(self, *command: str, seconds: float | None = None, **environment: str) -> int | None:
        return self.child(sys.executable, *command, seconds=seconds, **environment)

    def until_it_keeps_its_gpu(
        self, seconds: float, *command: str, **environment: str
    ) -> int | None:
        """The exit status of one that may lose its GPU to a provider, and then goes on without that
        one when it is run again.
        """
        deadline, status = time.monotonic() + seconds, None
        for _ in range(8):
            status = self.python(
                *command, seconds=max(1.0, deadline - time.monotonic()), **environment
            )
            if status != LOST_DEVICE:
                break
        return status


def outcome(status: int | None) -> str:
    return "ok" if status == 0 else "took too long" if status is None else f"exit status {status}"


# ---- env


def install(kit: Kit) -> None:
    """Unpacks the peers' wheels into the folder of this call."""
    for wheel in sorted(kit.wheels.glob("*.whl")) if kit.wheels else ():
        try:
            zipfile.ZipFile(wheel).extractall(kit.work / "site")
        except (zipfile.BadZipFile, OSError) as failure:
            kit.say(f"{wheel.name} is not installed: {failure}", well=False)
        else:
            kit.say(f"{wheel.name} is installed")


def env(kit: Kit) -> None:
    """Describes the machine, and measures its bandwidth and its rate of products."""
    facts = machine(kit.device)
    kit.add(machine=facts)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    kit.say(f"{facts['name']}, Python {facts['python']}, torch {facts['torch']}, {versions}")
    if shutil.which("nvidia-smi"):
        kit.child("nvidia-smi", "--query", "--display=CLOCK,POWER,TEMPERATURE,ECC,PERFORMANCE")
    size, n = (1 << 20, 256) if kit.rehearse else (4 << 30, 8192)
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=kit.device).normal_()
    target = torch.empty_like(source).copy_(source)
    a, b = (torch.empty(n, n, dtype=torch.bfloat16, device=kit.device).normal_() for _ in range(2))
    times = interleaved(
        {"copy": lambda: target.copy_(source), "product": lambda: a @ b},
        kit.device,
        seconds=0.3,
        most=30,
    )
    rates = {
        "copy_gbps": 2 * size / times["copy"]["ms"] / 1e6,
        "bf16_tflops": 2 * n**3 / times["product"]["ms"] / 1e9,
    }
    kit.add(rates=rates, times=times, state=gpu_state(kit.device))
    kit.say(
        f"copy {rates['copy_gbps']:.0f} GB/s (read + write); {n} x {n} x {n} bf16 product"
        f" {rates['bf16_tflops']:.0f} TFLOP/s"
    )
    status = kit.python("-m", "grpo_kernels", "doctor", *(("--quick",) if kit.rehearse else ()))
    kit.say(f"doctor: {outcome(status)}")


# ---- correctness


def correctness(kit: Kit) -> None:
    """Runs the cases of the tests on the device, one group after the other. Of each test, single
    values of the parameters come first and combinations later, see tests/support/on_device.py.
    Combinations that do not fit into the time are not a failure.
    """
    begin, whole, spent = time.monotonic(), 0.95 * kit.left, 0.0
    found = load(kit.work / "json" / "correctness.json").get("groups", {})  # of an earlier call
    for name, cases in CASES.items():
        before = found.get(name, {"failed": True})
        if not before["failed"] and before["ran"] == before["collected"]:
            kit.add(groups=found)
            kit.say(f"{name}: {before['passed']} passed in an earlier call")
            continue
        spent += cases.share  # time left over by earlier groups is given to this one
        report = kit.work / "json" / f"tests-{slug_of(name)}.jsonl"
        report.unlink(missing_ok=True)
        status = kit.python(
            *pytest_command(cases.processes, kit.rehearse), *(f"tests/{file}" for file in cases.files),
            PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
            PYTEST_ADDOPTS="", GRPO_KERNELS_TEST_DEVICE=kit.device, GRPO_KERNELS_TEST_BACKENDS="triton",
            GRPO_KERNELS_TEST_REPORT=str(report), seconds=max(1.0, spent * whole - (time.monotonic() - begin)),
        )  # fmt: skip
        group = found[name] = tally(report)
        kit.add(groups=found)
        enough = 0 < group["first"] <= group["ran"] and not group["failed"]
        kit.say(
            f"{name}: {group['passed']} passed, {len(group['failed'])} failed; {group['ran']} of"
            f" {group['collected']} ran, {group['first']} have every value of every parameter"
            f" ({outcome(status)})",
            well=status == 0 or (status is None and enough),
        )
        for failure in group["failed"][:8]:
            kit.say(
                f"  {failure['test'].removeprefix('tests/')}:"
                f" {' '.join(failure['message'].split())[:160]}"
            )
        for what, value in group["largest"].items():
            kit.say(f"  largest error, {what}: {value:.1e}")


def slug_of(name: str) -> str:
    return name.lower().replace(" ", "-")


def pytest_command(processes: int, rehearse: bool) -> list[str]:
    command = [
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "support.on_device",
    ]
    if (
        importlib.util.find_spec("xdist") and not rehearse
    ):  # few at a time, so that they keep their order
        command += ["-n", str(min(processes, os.cpu_count() or 1)), "--maxschedchunk=2"]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout=90"]
    return command + (["-k", REHEARSED] if rehearse else [])


def tally(report: Path) -> dict:
    """What tests/support/on_device.py wrote: {"collected", "first", "ran", "passed", "failed",
    "skipped", "largest": {recorded property: its maximum}}.
    """
    lines = (
        [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    )
    tests = [line for line in lines if "test" in line]
    sizes = {
        what: sum(sum(line.get(what, {}).values()) for line in lines)
        for what in ("collected", "first")
    }
    by = {
        how: [line for line in tests if line["outcome"] == how]
        for how in ("passed", "failed", "skipped")
    }
    largest: dict[str, float] = {}
    for line in tests:
        name = re.sub(r".*::|\[.*", "", line["test"])
        for what, value in line["properties"].items():
            largest[f"{name}, {what}"] = max(value, largest.get(f"{name}, {what}", 0.0))
    return (
        sizes
        | by
        | {
            "ran": len({line["test"] for line in tests}),
            "passed": len(by["passed"]),
            "largest": largest,
        }
    )


# ---- counters


def counters(kit: Kit) -> None:
    """Counts compilations over lengths and schedules and waits of the host; times the host;
    captures CUDA graphs; and reads off the kernels that have run by then. (The budgets of all
    others are checked without a GPU: `python -m benchmarks.resources`.)
    """
    from benchmarks import gpu_counters as on  # needs the tests' pytest, as `small` does

    rows, vocab, width = (
        (8, 272, 8) if kit.rehearse else (64, 16384, 256)
    )  # Python draws the sets of ids, row by row
    few = {"lengths": 2, "schedules": 2, "longest": 2} if kit.rehearse else {}
    with on_triton(kit.rehearse):
        kit.add(recompilations=on.recompilations(kit.device, min(vocab, 2048), width, **few))
        count = kit.found["recompilations"]
        kit.say(f"recompilations over random lengths and schedules: {count}", well=count == 0)
        made = on.calls(kit.device, rows, vocab, width, "float32" if kit.rehearse else "bfloat16")
        if kit.rehearse:
            wrong = [
                name
                for name, one in made.items()
                if not all(x.isfinite().all() for x in one.step())
            ]
            kit.say(
                f"{len(made)} calls, run without a graph; not finite: {wrong or 'none'}",
                well=not wrong,
            )
            kit.leave_out(
                "waits of the host",
                "host time of a call",
                "CUDA graphs",
                "registers of the kernels as loaded",
            )
            return
    steps = {name: one.step for name, one in made.items()} | on.batches(
        kit.device, rows, vocab, width
    )
    waits = {}
    for name, step in steps.items():
        waits[name] = on.first_wait(step)
        kit.add(waits=waits, documented=on.WAITS)
        reason = f" (documented: {on.WAITS[name]})" if name in on.WAITS else ""
        kit.say(
            f"host waits, {name}{reason}: {waits[name] or 'none'}"[:400],
            well=waits[name] is None or name in on.WAITS,
        )
    kit.add(host_ms={name: round(on.host_ms(step), 3) for name, step in steps.items()})
    kit.say(
        "host time, ms: "
        + ", ".join(f"{name} {ms:.2f}" for name, ms in kit.found["host_ms"].items())
    )
    graphs: dict[str, str | None] = {}
    for name in on.CAPTURED:
        graphs[name] = on.replay_differs(made[name])
        kit.add(graphs=graphs)
        kit.say(
            f"CUDA graph, {name}: {graphs[name] or 'replayed as a plain call'}",
            well=graphs[name] is None,
        )
    kit.add(loaded=on.loaded_kernels())
    for k in kit.found["loaded"]:
        kit.say(
            "{kernel}: {registers} registers, {spills} spilled, {shared} bytes shared, {warps}"
            " warps".format(**k)
        )


def on_triton(rehearse: bool) -> contextlib.AbstractContextManager[None]:
    """In a rehearsal "auto" is Triton for tensors on the CPU too."""
    return tuning.on_triton() if rehearse else contextlib.nullcontext()


# ---- tune, comparison, memcheck, plots


def tune(kit: Kit) -> None:
    """Each kind of launches in a process of its own: a candidate may break CUDA."""
    outcomes: dict[str, dict] = {}
    to_do = sum(tuning.KINDS.values())
    for kind, share in tuning.KINDS.items():
        path = kit.work / "json" / f"tune-{kind}.json"
        command = (
            "-m",
            "benchmarks.tune",
            "--kind",
            kind,
            "--json",
            str(path),
            *(("--small",) if kit.rehearse else ()),
        )
        status = kit.until_it_keeps_its_gpu(kit.left * share / to_do, *command)
        to_do -= share
        outcomes |= load(path)
        if status != 0:
            kit.say(f"tuning of {kind}: {outcome(status)}", well=False)
    for kind, result in outcomes.items():
        for name, value in result["ranking"][:4]:
            kit.say(f"{kind}: {value:6.3f} {name}")
    for line in tuning.summary(outcomes):
        kit.say(line)
    save(kit.work / "json" / CHOICES, tuning.winners(outcomes))


#: The settings that the tuner has found clearly faster, for later stages.
CHOICES = "choices.json"
#: The suites of a stage, and options: first cells alone, without the providers that compile for
#: long.
COMPARISONS = {"headline": (HEADLINE, "--first"), "comparison": (COMPARED,), "further": (FURTHER,)}


def compare(kit: Kit) -> None:
    """Runs suites of the benchmarks with the settings that the tuner has found, each suite in its
    own process. A provider that breaks CUDA ends its process; the next process continues without
    that provider.
    """
    results, (names, *options) = kit.work / "results", COMPARISONS[kit.stage]
    if kit.rehearse:
        kit.leave_out(*(f"suite {name}" for name in names if name not in REHEARSED_SUITES))
        names, options = (
            [name for name in names if name in REHEARSED_SUITES],
            [*options, "--quick", "--without-native"],
        )
    for i, name in enumerate(names):
        seconds = max(0.4, 1 / (len(names) - i)) * kit.left  # a suite may hang
        status = kit.until_it_keeps_its_gpu(
            seconds, "-m", "benchmarks", "--device", kit.device, "--out", str(results), *options, "--suite", name,
            "--choices", str(kit.work / "json" / CHOICES), TRITON_INTERPRET="", BENCHMARKS_COMMAND="python -m benchmarks.gpu_kit",
        )  # fmt: skip
        cells = [cell for path in results.glob(f"*/{name}.json") for cell in load(path)["cells"]]
        took = f"{len(cells)} cells, {sum(cell.get('seconds', 0) for cell in cells):.0f} s"
        kit.say(f"{name}: {took}, {outcome(status)}", well=status == 0)


def memcheck(kit: Kit) -> None:
    """compute-sanitizer over small calls of everything, where it is installed.

    (racecheck sees shared memory only.)
    """
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        kit.leave_out("compute-sanitizer, which is not installed")
        return
    for check in ("memcheck", "racecheck", "synccheck"):
        status = kit.child(
            tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu_stages", "small",
            "--work", str(kit.work), *(("--rehearse",) if kit.rehearse else ()),
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )  # fmt: skip
        kit.say(f"{check}: {outcome(status)}", well=status == 0)


def small(kit: Kit) -> None:
    """Runs every kernel once with aligned and once with unaligned rows, for the sanitizer."""
    from benchmarks import gpu_counters as on

    with on_triton(kit.rehearse):
        for dtype in ("float32",) if kit.rehearse else ("float32", "bfloat16", "float16"):
            for vocab in (272, 1031):
                on.calls(kit.device, 8, vocab, 16, dtype)
    kit.say("small calls: done")


#: Of each, the cell of "logits" and the kernels that its call launches: bytes are counted in sizes
#: of the logits.
TRAFFIC = {
    "grpo_kernels, in place": ("fused_loss_kernel",), "grpo_kernels, layer 1 + loss": ("softmax_sums_kernel", "softmax_gradient_kernel"),
}  # fmt: skip
LARGE = {torch.bfloat16: 8192, torch.float32: 2048}  # rows of 151,936 logits
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")


def traffic(kit: Kit) -> None:
    """Counts the bytes of device memory that the kernels from logits read and write, by Nsight
    Compute.
    """
    tool = shutil.which("ncu")
    if tool is None or kit.rehearse:
        kit.leave_out("bytes of device memory, which Nsight Compute counts")
        return
    expected = [(dtype, name) for dtype in LARGE for some in TRAFFIC.values() for name in some]
    names = "|".join({name for _, name in expected})
    how = (
        f"--clock-control none --csv --page raw --print-units base --metrics {','.join(METRICS)}"
        f" --kernel-name regex:^({names})$"
    )
    command = [
        tool,
        *how.split(),
        sys.executable,
        *f"-m benchmarks.gpu_stages large --work {kit.work}".split(),
    ]
    printed = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=kit.left
    ).stdout
    print(printed, flush=True)
    lines = printed.splitlines()
    table = csv.DictReader(
        lines[next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines)) :]
    )
    launched = [row for row in table if row["ID"]]  # the first line has units
    if [row["Kernel Name"] for row in launched] != [name for _, name in expected]:
        kit.say(
            f"bytes of device memory: {[row['Kernel Name'] for row in launched]} were launched",
            well=False,
        )
        return
    for (dtype, name), row in zip(expected, launched, strict=True):
        read, written, ns = (float(row[metric].replace(",", "")) for metric in METRICS)
        size = LARGE[dtype] * 151936 * dtype.itemsize
        found = {"read": read / size, "written": written / size, "ms": ns / 1e6}
        kit.add(traffic=kit.found.get("traffic", {}) | {f"{name}, {dtype}": found})
        kit.say(
            f"{name}, {dtype}: reads {read / size:.3f}, writes {written / size:.3f} x the logits in"
            f" {ns / 1e6:.3f} ms"
        )


def large(kit: Kit) -> None:
    """Runs the kernels from logits once at a real size, for Nsight Compute."""
    from benchmarks.cases import Cell, make_case
    from benchmarks.providers import providers

    for dtype, rows in LARGE.items():
        case = make_case(Cell("logits", rows, 151936, dtype), kit.device)
        for name in TRAFFIC:
            next(p for p in providers("logits") if p.name == name).make(case).call()


def plots(kit: Kit) -> None:
    """Tables and pictures from the result files."""
    results = kit.work / "results"
    status = kit.python("-m", "benchmarks.report", "--write", "--results", str(results))
    kit.say(f"plots: {outcome(status)}", well=status == 0)
    (kit.work / "tables.md").write_text(report(results))


STAGES: dict[str, Callable[[Kit], None]] = {
    stage.__name__: stage
    for stage in (install, env, correctness, counters, tune, traffic, large, memcheck, small, plots)
} | dict.fromkeys(COMPARISONS, compare)


def main(argv: list[str] | None = None) -> int:
    """0 if all went well."""
    parser = parser_of("benchmarks.gpu_stages", __doc__, {
        "stage": {"choices": STAGES},
        "--work": {"type": Path, "required": True, "help": "folder to write to"},
        "--seconds": {"type": float, "default": 600.0, "help": "that it may take"},
        "--wheels": {"type": Path, "help": "folder of wheels to install"},
        "--rehearse": SWITCH | {"help": "on a CPU, small"},
    })  # fmt: skip
    args = parser.parse_args(argv)
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no GPU: use --rehearse to try the script on a CPU.")
    kit = Kit(**vars(args))
    STAGES[args.stage](kit)
    return 0 if kit.well else 1


if __name__ == "__main__":
    sys.exit(main())
