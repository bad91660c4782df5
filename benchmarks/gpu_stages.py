"""The stages of gpu_kit.py. Each runs in its own process:

    python -m benchmarks.gpu_stages STAGE --work DIR [--seconds 60] [--wheels DIR] [--rehearse]

A stage writes DIR/json/STAGE.json after each step, so that its results survive a crash or a
timeout. `--rehearse` runs it with small shapes on a CPU, in Triton's interpreter. Parts that need
CUDA are then left out, with a note.
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
    """One running stage: its folder, its time limit, and its results.

    stage       its name, a key of STAGES
    work        the folder of all stages
    wheels      folder with the wheels of other projects. None: none are installed
    rehearse    whether this is a rehearsal on a CPU
    device      "cpu" in a rehearsal, otherwise "cuda"
    deadline    the end of its time, on the clock of time.monotonic
    found       the content of the stage's JSON file so far. "lines" are those of the summary
    well        False if something failed. The process then ends with exit status 1
    """

    def __init__(
        self,
        stage: str,
        work: Path,
        seconds: float,
        wheels: Path | None = None,
        rehearse: bool = False,
    ) -> None:
        """Begin a stage that may take `seconds` from now on."""
        self.stage = stage
        self.work = work
        self.wheels = wheels
        self.rehearse = rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.deadline = time.monotonic() + seconds
        self.found: dict[str, Any] = {"lines": []}
        self.well = True

    @property
    def left(self) -> float:
        """Seconds until the time limit, at least 1."""
        return max(1.0, self.deadline - time.monotonic())

    def add(self, **results: Any) -> None:
        """Add results to the stage's JSON file."""
        self.found |= results
        save(self.work / "json" / f"{self.stage}.json", self.found)

    def say(self, line: str, well: bool = True) -> None:
        """Add a line to the summary. well: whether it reports a success."""
        self.well &= well
        print(line, flush=True)
        self.add(lines=[*self.found["lines"], line])

    def leave_out(self, *names: str) -> None:
        """Note what this machine cannot do."""
        self.add(left_out=[*self.found.get("left_out", []), *names])
        for name in names:
            self.say(f"left out: {name}")

    def child(self, *command: str, seconds: float | None = None, **environment: str) -> int | None:
        """Run a command and return its exit status, or None if it took too long.

        Its output goes to the log of this stage.

        seconds     time limit. None: the time that is left
        environment variables to set; "" unsets one
        """
        variables = os.environ | environment
        for name, value in environment.items():
            if not value:
                del variables[name]
        print(f"\n$ {' '.join(command)}", flush=True)
        limit = min(seconds or self.left, self.left)
        try:
            return subprocess.run(command, cwd=ROOT, env=variables, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            print("(took too long, ended)", flush=True)
            return None

    def python(self, *command: str, seconds: float | None = None, **environment: str) -> int | None:
        """Run Python with a command line, see `child`."""
        return self.child(sys.executable, *command, seconds=seconds, **environment)

    def until_it_keeps_its_gpu(
        self, seconds: float, *command: str, **environment: str
    ) -> int | None:
        """Run a command again until no provider breaks CUDA, and return its exit status.

        The command leaves out the providers that broke CUDA in its earlier runs.

        seconds     time limit of all runs together
        """
        deadline = time.monotonic() + seconds
        status = None
        for _ in range(8):
            left = max(1.0, deadline - time.monotonic())
            status = self.python(*command, seconds=left, **environment)
            if status != LOST_DEVICE:
                break
        return status


def outcome(status: int | None) -> str:
    """Return an exit status in words. None means a timeout."""
    if status is None:
        return "took too long"
    return "ok" if status == 0 else f"exit status {status}"


# ---- env


def install(kit: Kit) -> None:
    """Unpack the wheels of other projects into the folder of this call."""
    for wheel in sorted(kit.wheels.glob("*.whl")) if kit.wheels else ():
        try:
            zipfile.ZipFile(wheel).extractall(kit.work / "site")
        except (zipfile.BadZipFile, OSError) as failure:
            kit.say(f"{wheel.name} is not installed: {failure}", well=False)
        else:
            kit.say(f"{wheel.name} is installed")


def env(kit: Kit) -> None:
    """Record the machine, its memory bandwidth in GB/s and its bf16 matmul rate in TFLOP/s.

    The stage also runs the package's diagnostics (`python -m grpo_kernels doctor`).
    """
    facts = machine(kit.device)
    kit.add(machine=facts)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    kit.say(f"{facts['name']}, Python {facts['python']}, torch {facts['torch']}, {versions}")
    if shutil.which("nvidia-smi"):
        kit.child("nvidia-smi", "--query", "--display=CLOCK,POWER,TEMPERATURE,ECC,PERFORMANCE")
    copied_bytes = 1 << 20 if kit.rehearse else 4 << 30
    n = 256 if kit.rehearse else 8192  # the matrices are [n, n]
    source = torch.empty(copied_bytes // 2, dtype=torch.bfloat16, device=kit.device).normal_()
    target = torch.empty_like(source).copy_(source)
    a = torch.empty(n, n, dtype=torch.bfloat16, device=kit.device).normal_()
    b = torch.empty(n, n, dtype=torch.bfloat16, device=kit.device).normal_()
    times = interleaved(
        {"copy": lambda: target.copy_(source), "product": lambda: a @ b},
        kit.device,
        seconds=0.3,
        most=30,
    )
    rates = {
        "copy_gbps": 2 * copied_bytes / times["copy"]["ms"] / 1e6,
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
    """Run the tests of CASES on the device, one group after the other.

    Within a test, cases that cover single parameter values come before further combinations, see
    tests/support/on_device.py. A group passes if the time suffices for the former.
    """
    begin = time.monotonic()
    total_seconds = 0.95 * kit.left
    groups = load(kit.work / "json" / "correctness.json").get("groups", {})  # of an earlier call
    share = 0.0  # of the time, which this group and all earlier ones may take together
    for name, cases in CASES.items():
        earlier = groups.get(name)
        if earlier and not earlier["failed"] and earlier["ran"] == earlier["collected"]:
            kit.add(groups=groups)
            kit.say(f"{name}: {earlier['passed']} passed in an earlier call")
            continue
        share += cases.share
        report = kit.work / "json" / f"tests-{slug_of(name)}.jsonl"
        report.unlink(missing_ok=True)
        status = kit.python(
            *pytest_command(cases.processes, kit.rehearse),
            *(f"tests/{file}" for file in cases.files),
            seconds=max(1.0, share * total_seconds - (time.monotonic() - begin)),
            PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
            PYTEST_ADDOPTS="",
            GRPO_KERNELS_TEST_DEVICE=kit.device,
            GRPO_KERNELS_TEST_BACKENDS="triton",
            GRPO_KERNELS_TEST_REPORT=str(report),
        )
        group = tally(report)
        groups[name] = group
        kit.add(groups=groups)
        # A timeout is no failure if the first wave of cases has run.
        enough = 0 < group["first"] <= group["ran"] and not group["failed"]
        kit.say(
            f"{name}: {group['passed']} passed, {len(group['failed'])} failed; {group['ran']} of"
            f" {group['collected']} ran, {group['first']} have every value of every parameter"
            f" ({outcome(status)})",
            well=status == 0 or (status is None and enough),
        )
        for failure in group["failed"][:8]:
            test = failure["test"].removeprefix("tests/")
            kit.say(f"  {test}: {' '.join(failure['message'].split())[:160]}")
        for test_and_property, value in group["largest"].items():
            kit.say(f"  largest error, {test_and_property}: {value:.1e}")


def slug_of(name: str) -> str:
    """Return the name of a group for a file."""
    return name.lower().replace(" ", "-")


def pytest_command(processes: int, rehearse: bool) -> list[str]:
    """Return the arguments of Python that run pytest, without the test files.

    processes   most processes at a time. There is at most one for each processor, and only one
                if pytest-xdist is not installed
    rehearse    whether to run only the few tests of REHEARSED
    """
    command = ["-m", "pytest", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "support.on_device"]
    if importlib.util.find_spec("xdist") and not rehearse:
        # Small portions, so that the tests keep their order.
        command += ["-n", str(min(processes, os.cpu_count() or 1)), "--maxschedchunk=2"]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout=90"]
    if rehearse:
        command += ["-k", REHEARSED]
    return command


def tally(report: Path) -> dict:
    """Summarise a file that tests/support/on_device.py wrote.

    Returns the numbers "collected", "first" (cases that cover single parameter values), "ran" and
    "passed", the lines of the "failed" and "skipped" tests, and "largest": {test and recorded
    property: its maximum}.
    """
    lines = []
    if report.exists():
        lines = [json.loads(line) for line in report.read_text().splitlines()]
    tests = [line for line in lines if "test" in line]
    largest: dict[str, float] = {}
    for line in tests:
        name = re.sub(r".*::|\[.*", "", line["test"])
        for property_name, value in line["properties"].items():
            key = f"{name}, {property_name}"
            largest[key] = max(value, largest.get(key, 0.0))
    return {
        "collected": sum(sum(line.get("collected", {}).values()) for line in lines),
        "first": sum(sum(line.get("first", {}).values()) for line in lines),
        "passed": sum(line["outcome"] == "passed" for line in tests),
        "failed": [line for line in tests if line["outcome"] == "failed"],
        "skipped": [line for line in tests if line["outcome"] == "skipped"],
        "ran": len({line["test"] for line in tests}),
        "largest": largest,
    }


# ---- counters


def counters(kit: Kit) -> None:
    """Count recompilations and host waits, time the host, and capture CUDA graphs.

    It also reads the registers and the spills of the kernels that have run. The budgets of all
    kernels are checked without a GPU: `python -m benchmarks.resources`.
    """
    from benchmarks import gpu_counters as on  # here, because it needs pytest

    if kit.rehearse:
        rows = 8
        vocab = 272
        width = 8
        dtype = "float32"
        few = {"lengths": 2, "schedules": 2, "longest": 2}
    else:
        # Few rows, because Python draws their candidate sets one by one.
        rows = 64
        vocab = 16384
        width = 256
        dtype = "bfloat16"
        few = {}
    with on_triton(kit.rehearse):
        count = on.recompilations(kit.device, min(vocab, 2048), width, **few)
        kit.add(recompilations=count)
        kit.say(f"recompilations over random lengths and schedules: {count}", well=count == 0)
        calls = on.calls(kit.device, rows, vocab, width, dtype)
        if kit.rehearse:
            _check_without_cuda(kit, calls)
            return

    steps = {name: call.step for name, call in calls.items()}
    steps |= on.batches(kit.device, rows, vocab, width)
    waits = {}
    for name, step in steps.items():
        waits[name] = on.first_wait(step)
        kit.add(waits=waits, documented=on.WAITS)
        is_documented = name in on.WAITS
        reason = f" (documented: {on.WAITS[name]})" if is_documented else ""
        kit.say(
            f"host waits, {name}{reason}: {waits[name] or 'none'}"[:400],
            well=waits[name] is None or is_documented,
        )
    host_ms = {name: round(on.host_ms(step), 3) for name, step in steps.items()}
    kit.add(host_ms=host_ms)
    kit.say("host time, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in host_ms.items()))
    graphs: dict[str, str | None] = {}
    for name in on.CAPTURED:
        difference = on.replay_differs(calls[name])
        graphs[name] = difference
        kit.add(graphs=graphs)
        kit.say(
            f"CUDA graph, {name}: {difference or 'replayed as a plain call'}",
            well=difference is None,
        )
    kit.add(loaded=on.loaded_kernels())
    for kernel in kit.found["loaded"]:
        kit.say(
            "{kernel}: {registers} registers, {spills} spilled, {shared} bytes shared, {warps}"
            " warps".format(**kernel)
        )


def _check_without_cuda(kit: Kit, calls: dict[str, Any]) -> None:
    """Run each call once, check that its results are finite, and note what needs CUDA.

    calls   {name: StepOfCall}, see gpu_counters.calls
    """
    wrong = []  # names of the calls with results that are not finite
    for name, call in calls.items():
        if not all(tensor.isfinite().all() for tensor in call.step()):
            wrong.append(name)
    kit.say(
        f"{len(calls)} calls, run without a graph; not finite: {wrong or 'none'}", well=not wrong
    )
    kit.leave_out(
        "waits of the host",
        "host time of a call",
        "CUDA graphs",
        "registers of the kernels as loaded",
    )


def on_triton(rehearse: bool) -> contextlib.AbstractContextManager[None]:
    """Make Triton the backend for tensors on a CPU too, in a rehearsal."""
    return tuning.on_triton() if rehearse else contextlib.nullcontext()


# ---- tune, comparison, memcheck, plots


def tune(kit: Kit) -> None:
    """Tune each kind of launch in its own process, because a candidate may break CUDA.

    The settings that are clearly faster than the package's are written for later stages.
    """
    outcomes: dict[str, dict] = {}
    remaining_shares = sum(tuning.KINDS.values())
    for kind, share in tuning.KINDS.items():
        path = kit.work / "json" / f"tune-{kind}.json"
        command = ["-m", "benchmarks.tune", "--kind", kind, "--json", str(path)]
        if kit.rehearse:
            command.append("--small")
        status = kit.until_it_keeps_its_gpu(kit.left * share / remaining_shares, *command)
        remaining_shares -= share
        outcomes |= load(path)
        if status != 0:
            kit.say(f"tuning of {kind}: {outcome(status)}", well=False)
    for kind, result in outcomes.items():
        for name, mean in result["ranking"][:4]:
            kit.say(f"{kind}: {mean:6.3f} {name}")
    for line in tuning.summary(outcomes):
        kit.say(line)
    save(kit.work / "json" / CHOICES, tuning.winners(outcomes))


#: The file of the settings that `tune` has found.
CHOICES = "choices.json"
#: The suites of each stage that compares, and options of `python -m benchmarks`.
COMPARISONS = {"headline": (HEADLINE, "--first"), "comparison": (COMPARED,), "further": (FURTHER,)}


def compare(kit: Kit) -> None:
    """Run suites of the benchmarks with the tuned settings, each suite in its own process.

    A provider that breaks CUDA ends its process. The next process continues without it.
    """
    results = kit.work / "results"
    names, *options = COMPARISONS[kit.stage]
    if kit.rehearse:
        kit.leave_out(*(f"suite {name}" for name in names if name not in REHEARSED_SUITES))
        names = tuple(name for name in names if name in REHEARSED_SUITES)
        options = [*options, "--quick", "--without-native"]
    for i, name in enumerate(names):
        # A suite that hangs takes at most 40 % of the time that is left, unless few suites remain.
        seconds = max(0.4, 1 / (len(names) - i)) * kit.left
        command = ["-m", "benchmarks", "--suite", name, "--device", kit.device]
        command += ["--out", str(results), "--choices", str(kit.work / "json" / CHOICES), *options]
        status = kit.until_it_keeps_its_gpu(
            seconds,
            *command,
            TRITON_INTERPRET="",
            BENCHMARKS_COMMAND="python -m benchmarks.gpu_kit",
        )
        cells = [cell for path in results.glob(f"*/{name}.json") for cell in load(path)["cells"]]
        took = f"{len(cells)} cells, {sum(cell.get('seconds', 0) for cell in cells):.0f} s"
        kit.say(f"{name}: {took}, {outcome(status)}", well=status == 0)


def memcheck(kit: Kit) -> None:
    """Run small calls of every kernel under compute-sanitizer, if it is installed.

    Of its checks, racecheck sees shared memory only.
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
    """Run every kernel once with aligned and once with unaligned rows, for compute-sanitizer."""
    from benchmarks import gpu_counters as on

    with on_triton(kit.rehearse):
        for dtype in ("float32",) if kit.rehearse else ("float32", "bfloat16", "float16"):
            for vocab in (272, 1031):
                on.calls(kit.device, 8, vocab, 16, dtype)
    kit.say("small calls: done")


#: {provider of the contract "logits": the kernels that a call launches}
TRAFFIC = {
    "grpo_kernels, in place": ("fused_loss_kernel",),
    "grpo_kernels, layer 1 + loss": ("softmax_sums_kernel", "softmax_gradient_kernel"),
}
LARGE = {torch.bfloat16: 8192, torch.float32: 2048}  # rows of 151,936 logits
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")


def traffic(kit: Kit) -> None:
    """Count the bytes of device memory that kernels read and write, with Nsight Compute.

    The bytes are reported as multiples of the size of the logits.
    """
    tool = shutil.which("ncu")
    if tool is None or kit.rehearse:
        kit.leave_out("bytes of device memory, which Nsight Compute counts")
        return
    expected = [(dtype, name) for dtype in LARGE for names in TRAFFIC.values() for name in names]
    any_kernel = "|".join({name for _, name in expected})
    command = [tool, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--metrics", ",".join(METRICS), "--kernel-name", f"regex:^({any_kernel})$"]
    command += [sys.executable, "-m", "benchmarks.gpu_stages", "large", "--work", str(kit.work)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=kit.left)
    print(run.stdout, flush=True)
    launches = _launches_of_ncu(run.stdout)
    names = [launch["Kernel Name"] for launch in launches]
    if names != [name for _, name in expected]:
        kit.say(f"bytes of device memory: {names} were launched", well=False)
        return
    for (dtype, name), launch in zip(expected, launches, strict=True):
        # In the order of METRICS. Nsight Compute writes large numbers with commas.
        bytes_read, bytes_written, ns = (
            float(launch[metric].replace(",", "")) for metric in METRICS
        )
        size = LARGE[dtype] * 151936 * dtype.itemsize
        figures = {"read": bytes_read / size, "written": bytes_written / size, "ms": ns / 1e6}
        kit.add(traffic=kit.found.get("traffic", {}) | {f"{name}, {dtype}": figures})
        kit.say(
            f"{name}, {dtype}: reads {figures['read']:.3f}, writes {figures['written']:.3f} x the"
            f" logits in {figures['ms']:.3f} ms"
        )


def _launches_of_ncu(printed: str) -> list[dict[str, str]]:
    """Return {column: text} for each kernel launch that Nsight Compute printed as CSV."""
    lines = printed.splitlines()
    # The table comes after other output. Its head begins with "ID".
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = csv.DictReader(lines[head:])
    return [row for row in table if row["ID"]]  # the line after the head has units and no ID


def large(kit: Kit) -> None:
    """Run the providers of TRAFFIC once at a real size, for Nsight Compute."""
    from benchmarks.cases import Cell, make_case
    from benchmarks.providers import providers

    for dtype, rows in LARGE.items():
        case = make_case(Cell("logits", rows, 151936, dtype), kit.device)
        for name in TRAFFIC:
            next(p for p in providers("logits") if p.name == name).make(case).call()


def plots(kit: Kit) -> None:
    """Make tables and pictures from the result files."""
    results = kit.work / "results"
    status = kit.python("-m", "benchmarks.report", "--write", "--results", str(results))
    kit.say(f"plots: {outcome(status)}", well=status == 0)
    (kit.work / "tables.md").write_text(report(results))


STAGES: dict[str, Callable[[Kit], None]] = {
    stage.__name__: stage
    for stage in (install, env, correctness, counters, tune, traffic, large, memcheck, small, plots)
} | dict.fromkeys(COMPARISONS, compare)


def main(argv: list[str] | None = None) -> int:
    """Run a stage. Returns 0 if all went well."""
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
