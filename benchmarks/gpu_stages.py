"""The stages of gpu_kit.py, each in a process of its own:

    python -m benchmarks.gpu_stages STAGE --work DIR [--seconds 60] [--wheels DIR] [--rehearse]

A stage writes DIR/json/STAGE.json after each step, so that its results survive a crash or a timeout. `--rehearse` runs it
with small shapes on a CPU, with Triton's interpreter in place of a GPU; what needs CUDA is then left out, with a note."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import tune as tuning
from benchmarks.cases import Cell, make_case
from benchmarks.harness import compilations, gpu_state, interleaved, machine
from benchmarks.printing import table
from benchmarks.providers import Unavailable, providers
from benchmarks.results import load, save
from benchmarks.suites import LOST_DEVICE
from grpo_kernels import LogitTransform, Objective, TokenBatch, grpo_loss, linear_grpo_loss, linear_logprobs, token_logprobs
from grpo_kernels.formulas.surrogates import Clip
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.backends import triton as backend

Tensor = torch.Tensor
ROOT = Path(__file__).parent.parent


class Kit:
    """One running stage: its folder, its time limit, and its results."""

    def __init__(self, stage: str, work: Path, seconds: float, wheels: Path | None = None, rehearse: bool = False) -> None:
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

    def child(self, *command: str, seconds: float | None = None, **environment: str) -> int | None:
        """The exit status of a command, whose output goes to this stage's log; None if it took too long. "" unsets a
        variable."""
        values = {k: v for k, v in (os.environ | environment).items() if v or k not in environment}
        print(f"\n$ {' '.join(command)}", flush=True)
        try:
            return subprocess.run(command, cwd=ROOT, env=values, timeout=min(seconds or self.left, self.left)).returncode
        except subprocess.TimeoutExpired:
            print("(took too long, ended)", flush=True)
            return None

    def python(self, *command: str, seconds: float | None = None, **environment: str) -> int | None:
        return self.child(sys.executable, *command, seconds=seconds, **environment)


def outcome(status: int | None) -> str:
    return "ok" if status == 0 else "took too long" if status is None else f"exit status {status}"


# ---- env


def env(kit: Kit) -> None:
    """Installs the peers' wheels; describes the machine; measures its bandwidth and flop rate; finds which peers can be
    measured."""
    wheels = sorted(kit.wheels.glob("*.whl")) if kit.wheels else []
    installed = install(kit, wheels)
    for name, how in installed.items():
        if how != "ok":
            kit.say(f"{name} is not installed: {how}", well=False)
    importlib.invalidate_caches()
    found = machine(kit.device)
    kit.add(wheels=installed, machine=found)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    kit.say(f"{found['name']}, Python {found['python']}, torch {found['torch']}, {versions}")
    if shutil.which("nvidia-smi"):
        kit.child("nvidia-smi")
        kit.child("nvidia-smi", "--query", "--display=CLOCK,POWER,TEMPERATURE,ECC,PERFORMANCE")
    kit.python("-m", "grpo_kernels", "doctor", *(("--quick",) if kit.rehearse else ()))
    size, n = (1 << 20, 256) if kit.rehearse else (4 << 30, 8192)
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=kit.device).normal_()
    target = torch.empty_like(source).copy_(source)
    a, b = (torch.empty(n, n, dtype=torch.bfloat16, device=kit.device).normal_() for _ in range(2))
    before = gpu_state(kit.device)
    times = interleaved({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, kit.device, seconds=0.3, most=30)
    rates = {"copy_gbps": 2 * size / times["copy"]["ms"] / 1e6, "bf16_tflops": 2 * n**3 / times["product"]["ms"] / 1e9}
    kit.add(rates=rates, times=times, state={"before": before, "after": gpu_state(kit.device)})
    kit.say(
        f"copy {rates['copy_gbps']:.0f} GB/s (read + write); {n} x {n} x {n} bf16 product {rates['bf16_tflops']:.0f} TFLOP/s"
    )
    rehearse = ("--rehearse",) if kit.rehearse else ()
    status = kit.python("-m", "benchmarks.gpu_stages", "peers", "--work", str(kit.work), *rehearse, TRITON_INTERPRET="")
    for line in load(kit.work / "json" / "peers.json").get("lines", []):
        kit.say(line)
    if status != 0:
        kit.say(f"imports of the peers: {outcome(status)}", well=False)


def install(kit: Kit, wheels: list[Path]) -> dict[str, str]:
    """{wheel: outcome}. All are installed at once; if that fails, one by one."""
    options = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--quiet")
    command = ("-m", "pip", "install", *options, "--target", str(kit.work / "site"))
    if wheels and kit.python(*command, *map(str, wheels)) == 0:
        return {wheel.name: "ok" for wheel in wheels}
    return {wheel.name: outcome(kit.python(*command, str(wheel))) for wheel in wheels}


def peers(kit: Kit) -> None:
    """The peers that cannot be imported here, and why. This runs in a process of its own, since an import may crash."""
    reasons: dict[str, str | None] = {}
    for contract in ("logits", "logits-forward", "hidden", "hidden-forward"):
        cell = Cell(contract, 16, 512, torch.bfloat16, None if contract.startswith("logits") else 128)
        case = make_case(cell, kit.device)
        for one in providers(contract):
            if one.limit or one.name in reasons:
                continue
            reasons[one.name] = one.reason_against(cell, kit.device, math.inf)
            if reasons[one.name] is None:
                try:
                    one.make(case)
                except Unavailable as missing:
                    reasons[one.name] = str(missing)
    kit.add(reasons=reasons)
    for name, reason in reasons.items():
        if reason is not None:
            kit.say(f"not measured: {name}: {reason}")
    kit.say(f"can be measured: {', '.join(name for name, reason in reasons.items() if reason is None)}")


# ---- correctness

#: {group of the report: its files}. Kernels first: everything else depends on them.
CASES = {
    "Triton kernels": ["vocabulary/triton_cases.py", "vocabulary/sparse_triton_cases.py"],
    "real sizes": ["core/gpu_cases.py"],
    "objectives": [
        "core/test_grpo_loss.py", "core/test_linear_grpo_loss.py", "core/test_token_logprobs.py", "core/test_linear_logprobs.py",
        "core/test_grpo_loss_autograd.py", "core/test_token_logprobs_autograd.py", "vocabulary/test_linear_engine.py",
        "core/test_distributed.py",
    ],
}  # fmt: skip
PROCESSES = 12
#: The part of each group to rehearse.
REHEARSED = (
    "range_of_rows or no_rows or (products and bf16-no and plain) or (log_probs and 1031) or zero_advantage_rows or one_token "
    "or (hidden_states_over_sets and gspo and float32) or nothing_to_do"
)


def correctness(kit: Kit) -> None:
    """The cases of the tests on the device, in one run. Of each test, single values of the parameters come first and their
    combinations later, see tests/support/on_device.py. Combinations that do not fit into the time are not a failure."""
    report = kit.work / "json" / "tests.jsonl"
    command = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "support.on_device"]
    if importlib.util.find_spec("xdist") and not kit.rehearse:  # few at a time, so that they keep their order
        command += ["-n", str(min(PROCESSES, os.cpu_count() or 1)), "--maxschedchunk=2"]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout=90"]
    if kit.rehearse:
        command += ["-k", REHEARSED]
    status = kit.python(
        *command, *(f"tests/{file}" for files in CASES.values() for file in files),
        PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        PYTEST_ADDOPTS="", GRPO_KERNELS_TEST_DEVICE=kit.device, GRPO_KERNELS_TEST_BACKENDS="triton",
        GRPO_KERNELS_TEST_REPORT=str(report), seconds=0.95 * kit.left,
    )  # fmt: skip
    groups = {name: tally(report, files) for name, files in CASES.items()}
    kit.add(groups=groups, run=outcome(status))
    for name, group in groups.items():
        kit.say(
            f"{name}: {group['passed']} passed, {len(group['failed'])} failed; {group['ran']} of {group['collected']} ran, "
            f"{group['first']} have every value of every parameter"
        )
        for failure in group["failed"][:8]:
            kit.say(f"  {failure['test'].removeprefix('tests/')}: {' '.join(failure['message'].split())[:160]}")
        for what, value in group["largest"].items():
            kit.say(f"  largest error, {what}: {value:.1e}")
    enough = all(0 < group["first"] <= group["ran"] and not group["failed"] for group in groups.values())
    kit.say(f"tests: {outcome(status)}", well=status == 0 or (status is None and enough))


def tally(report: Path, files: list[str]) -> dict:
    """What tests/support/on_device.py wrote about these files: {"collected", "first", "ran", "passed", "failed", "skipped",
    "largest": {recorded property: its maximum}}."""
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    names = {Path(file).name for file in files}
    sizes = {
        what: sum(count for line in lines for file, count in line.get(what, {}).items() if Path(file).name in names)
        for what in ("collected", "first")
    }
    lines = [line for line in lines if "test" in line and Path(line["test"].split("::")[0]).name in names]
    largest: dict[str, float] = {}
    for line in lines:
        test = re.sub(r".*::|\[.*", "", line["test"])
        for what, value in line["properties"].items():
            largest[f"{test}, {what}"] = max(value, largest.get(f"{test}, {what}", 0.0))
    return sizes | {
        "ran": len({line["test"] for line in lines}),
        "passed": sum(line["outcome"] == "passed" for line in lines),
        "failed": [line for line in lines if line["outcome"] == "failed"],
        "skipped": sorted({f"{line['test']}: {line['message']}" for line in lines if line["outcome"] == "skipped"}),
        "largest": largest,
    }


# ---- resources


def resources(kit: Kit) -> None:
    """The resources of the kernels on this GPU: every specialisation compiled ahead of time, and those that have just run,
    as loaded."""
    target = "sm_90" if kit.rehearse else f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    quick = ("--quick",) if kit.rehearse else ()
    path = kit.work / "json" / "kernels.json"
    status = kit.python("-m", "benchmarks.resources", "--target", target, *quick, "--json", str(path), TRITON_INTERPRET="")
    kernels = load(path).get("kernels", [])
    beyond = [k for k in kernels if k["beyond budget"]]
    kit.add(target=target, status=outcome(status))
    kit.say(
        f"{target}: {len(kernels)} kernels compiled, {len(beyond)} beyond their budgets ({outcome(status)})", well=status == 0
    )
    for k in beyond[:8]:
        kit.say(f"  {k['kernel']} {k['case']}: {'; '.join(k['beyond budget'])}")
    if kit.rehearse:
        kit.say("no kernel is loaded in a rehearsal")
        return
    losses(kit.device, 64, 151936, 64)
    found = loaded_kernels()
    kit.add(loaded=found)
    for k in found:
        kit.say(
            f"  {k['kernel']}: {k['registers']} registers, {k['spills']} spilled, {k['shared']} bytes shared, {k['warps']} warps"
        )


def loaded_kernels() -> list[dict]:
    """Registers, spills and shared memory of the kernels that this process has launched, as the driver reports them."""
    found = []
    for kernel in (backend._stats_kernel, backend._pull_kernel, backend._fused_kernel, backend._scale_kernel):
        for caches in kernel.device_caches.values():
            found += [
                {
                    "kernel": kernel.__name__, "registers": compiled.n_regs, "spills": compiled.n_spills,
                    "shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
                }
                for compiled in caches[0].values() if compiled.module is not None
            ]  # fmt: skip
    return found


# ---- counters


def batch_of(lengths: tuple[int, int], vocab: int, device: str, masked: bool = True) -> TokenBatch:
    """[B, T] random tokens, half of the sequences without an advantage, one token of each masked."""
    targets = torch.randint(vocab, lengths, device=device)
    mask = torch.ones(lengths, dtype=torch.bool, device=device)
    mask[:, 0] = False
    advantages = torch.randn(lengths[0], device=device)
    advantages[::2] = 0.0
    old, ref = torch.randn(2, *lengths, device=device)
    return TokenBatch(targets, advantages, mask=mask if masked else None, old_logps=old - 8, ref_logps=ref - 8)


def losses(device: str, rows: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Callable[[], Any]]:
    """{entry point: a call of it with its backward}, each called once."""
    shape, objective = (4, max(2, rows // 4)), Objective.preset("dapo", beta=0.04)
    batch = batch_of(shape, vocab, device)
    logits = torch.randn(*batch.targets.shape, vocab, device=device).to(dtype).requires_grad_()
    hidden = torch.randn(*batch.targets.shape, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, device=device).to(dtype).requires_grad_()
    head = hidden, weight
    calls: dict[str, Callable[[], Any]] = {
        "grpo_loss": lambda: torch.autograd.grad(grpo_loss(logits, batch, objective).loss, logits),
        "grpo_loss, in place": lambda: torch.autograd.grad(grpo_loss(logits * 1, batch, objective, inplace=True).loss, logits),
        "grpo_loss, metrics": lambda: grpo_loss(logits.detach(), batch, objective).metrics,
        "linear_grpo_loss": lambda: torch.autograd.grad(linear_grpo_loss(*head, batch, objective).loss, head),
        "TokenBatch and linear_grpo_loss": lambda: linear_grpo_loss(*head, batch_of(shape, vocab, device), objective).loss,
        "token_logprobs": lambda: torch.autograd.grad(token_logprobs(logits, batch.targets)[0].sum(), logits),
        "linear_logprobs, no gradient": lambda: linear_logprobs(hidden.detach(), weight.detach(), batch.targets),
        "linear_logprobs, masked": lambda: linear_logprobs(hidden.detach(), weight.detach(), batch.targets, mask=batch.mask),
    }
    for call in calls.values():
        call()
    return calls


def recompilations(
    device: str, vocab: int, width: int, lengths: int = 30, schedules: int = 10, longest: int = 300
) -> int:  # fmt: skip
    """Counts the kernels and graphs that random lengths and schedules compile, after one call of each entry point."""
    draw = random.Random(0)

    def step(length: int, schedule: tuple[float, ...]) -> None:
        low, high, beta, temperature = schedule
        objective = Objective.preset("dapo", surrogate=Clip(low, high), beta=beta)
        transform = LogitTransform(temperature=temperature)
        batch = batch_of((2, length), vocab, device)
        logits = torch.randn(2, length, vocab, device=device, dtype=torch.bfloat16, requires_grad=True)
        hidden = torch.randn(2, length, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocab, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        torch.autograd.grad(grpo_loss(logits, batch, objective, transform=transform).loss * 2.0, logits)
        head = hidden, weight
        torch.autograd.grad(linear_grpo_loss(*head, batch, objective, transform=transform).loss * 2.0, head)
        logps, _ = token_logprobs(logits, batch.targets, transform=transform)
        torch.autograd.grad(logps.sum(), logits)

    kinds = [
        (draw.random(), draw.random(), draw.random() + 1e-3, draw.choice((1.0, 0.5, draw.random() + 0.1)))
        for _ in range(schedules)
    ]
    step(min(longest, 33), kinds[0])
    with compilations() as count:
        for i in range(lengths):
            step(min(longest, draw.choice((1, 16, draw.randint(2, 300)))), kinds[i % schedules])
        return count()


#: The calls that are documented to make the host wait, and why.
WAITS = {
    "linear_logprobs, masked": "rows are picked by the mask",
    "TokenBatch and linear_grpo_loss": "row counts, sent to the host when the batch is made, are needed right after",
}


def first_wait(step: Callable[[], Any]) -> str | None:
    """Where `step` first makes the host wait for CUDA; None if nowhere. The debug mode of torch does not report waits for
    an event, so these are counted here, except for events that are over. Everything before `step` is over."""

    def wait(event: torch.cuda.Event) -> None:
        if not event.query():
            raise RuntimeError("a synchronizing event")

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch.object(torch.cuda.Event, "synchronize", wait):
            step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return " < ".join(
            f"{Path(f.filename).name}:{f.lineno} {f.line}" for f in reversed(traceback.extract_tb(error.__traceback__))
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def graph_replays(device: str, rows: int, vocab: int) -> bool:
    """grpo_loss and its backward, captured as a CUDA graph and replayed on other logits, give the bits of a plain call."""
    batch, objective = batch_of((4, rows // 4), vocab, device), Objective.preset("dapo", beta=0.04)
    first, second = torch.randn(2, *batch.targets.shape, vocab, device=device).bfloat16().unbind(0)
    logits = first.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        loss = grpo_loss(logits, batch, objective).loss
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is created at first use must not be captured
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        logits.copy_(second)
    graph.replay()
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def counters(kit: Kit) -> None:
    """Counts compilations over lengths and schedules and waits of the host; captures a CUDA graph."""
    vocab, width = (272, 8) if kit.rehearse else (32768, 256)
    few = {"lengths": 2, "schedules": 2, "longest": 2} if kit.rehearse else {}
    with on_triton(kit.rehearse):
        kit.add(recompilations=recompilations(kit.device, vocab, width, **few))
        count = kit.found["recompilations"]
        kit.say(f"recompilations over random lengths and schedules: {count}", well=count == 0)
        calls = losses(kit.device, 8 if kit.rehearse else 512, vocab, width, torch.float32 if kit.rehearse else torch.bfloat16)
    if kit.rehearse:
        kit.say("host waits and CUDA graphs: not in a rehearsal")
        return
    calls |= {
        "TokenBatch, masked": lambda: batch_of((4, 64), vocab, kit.device),
        "TokenBatch": lambda: batch_of((4, 64), vocab, kit.device, masked=False),
    }
    waits = {}
    for name, call in calls.items():
        waits[name] = first_wait(call)
        kit.add(waits=waits, documented=WAITS)
        reason = f" (documented: {WAITS[name]})" if name in WAITS else ""
        kit.say(f"host waits, {name}{reason}: {waits[name] or 'none'}"[:400], well=waits[name] is None or name in WAITS)
    try:
        same = graph_replays(kit.device, 512, vocab)
    except RuntimeError as refused:
        same = False
        kit.say(f"CUDA graph: {str(refused).splitlines()[0]}")
    kit.add(graph=same)
    kit.say(f"captured as a CUDA graph, replayed with the same bits: {same}", well=same)


@contextmanager
def on_triton(rehearse: bool) -> Iterator[None]:
    """In a rehearsal "auto" is Triton for tensors on the CPU too."""
    if not rehearse:
        yield
        return
    with mock.patch.object(backends, "load", lambda name: backend):
        yield


# ---- tune, comparison, memcheck, plots


def tune(kit: Kit) -> None:
    found: dict[str, dict] = {}
    kinds = ("fused", "visit", "fused32", "chunk")
    for i, kind in enumerate(kinds):  # each in a process of its own: a candidate may break CUDA
        path = kit.work / "json" / f"tune-{kind}.json"
        small = ("--small",) if kit.rehearse else ()
        share = kit.left / (len(kinds) - i)
        status = kit.python("-m", "benchmarks.tune", "--kind", kind, "--json", str(path), *small, seconds=share)
        found |= load(path)
        if status != 0:
            kit.say(f"tuning of {kind}: {outcome(status)}", well=False)
    for kind, result in found.items():
        for name, value in result["ranking"][:4]:
            kit.say(f"{kind}: {value:6.3f} {name}")
    for line in tuning.summary(found):
        kit.say(line)


#: The most important first: the suites of the targets, then the sweeps.
SUITES = (
    "logits",
    "hidden",
    "active",
    "kept",
    "step",
    "length",
    "cross-entropy",
    "hidden-frozen",
    "logits-forward",
    "hidden-forward",
    "rows",
    "vocab",
)


def comparison(kit: Kit) -> None:
    """All suites with all providers, each suite in a process of its own. A provider that breaks CUDA ends its process; the
    next process continues without it."""
    results, names = kit.work / "results", ("length",) if kit.rehearse else SUITES
    quick = ("--quick",) if kit.rehearse else ()
    for i, name in enumerate(names):
        deadline = time.monotonic() + max(0.4, 1 / (len(names) - i)) * kit.left  # a suite may hang
        status: int | None = LOST_DEVICE
        for _ in range(8):
            left = max(1.0, deadline - time.monotonic())
            command = ("-m", "benchmarks", "--device", kit.device, "--out", str(results), *quick, "--suite", name)
            status = kit.python(*command, seconds=left, TRITON_INTERPRET="")
            if status != LOST_DEVICE:
                break
        name_the_command(results)
        found = [load(path)["cells"] for path in results.glob(f"*/{name}.json")]
        cells = [cell for cells in found for cell in cells]
        took = f"{len(cells)} cells, {sum(cell['seconds'] for cell in cells):.0f} s"
        kit.say(f"{name}: {took}, {outcome(status)}", well=status == 0)


def name_the_command(results: Path) -> None:
    """Writes a command into the result files that a reader can run: that of this call contains a temporary folder."""
    for path in results.glob("*/*.json"):
        record = load(path)
        for made in (record, *record["cells"]):
            if "command" in made:
                made["command"] = "python -m benchmarks.gpu_kit"
        save(path, record)


def memcheck(kit: Kit) -> None:
    """compute-sanitizer over small calls of everything, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        kit.say("compute-sanitizer is not installed")
        return
    for check in ("memcheck", "racecheck"):
        status = kit.child(
            tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu_stages", "small",
            "--work", str(kit.work), *(("--rehearse",) if kit.rehearse else ()),
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )  # fmt: skip
        kit.say(f"{check}: {outcome(status)}", well=status == 0)


def small(kit: Kit) -> None:
    """Every kernel once, aligned and not, for the sanitizer."""
    with on_triton(kit.rehearse):
        for dtype in (torch.float32,) if kit.rehearse else (torch.float32, torch.bfloat16, torch.float16):
            for vocab in (272, 1031):
                losses(kit.device, 8, vocab, 16, dtype)
    kit.say("small calls: done")


def plots(kit: Kit) -> None:
    """Tables and pictures from the result files."""
    results = kit.work / "results"
    name_the_command(results)  # an interrupted comparison has not done this
    status = kit.python("-m", "benchmarks.plots", "--results", str(results))
    kit.say(f"plots: {outcome(status)}", well=status == 0)
    text = []
    for path in sorted(results.glob("*/*.json")):
        record = load(path)
        text += [f"## {record['title']}", record["contract"], *(f"```\n{table(cell)}\n```" for cell in record["cells"])]
    (kit.work / "tables.md").write_text("\n\n".join(text) + "\n")


STAGES = {
    stage.__name__: stage for stage in (env, peers, correctness, resources, counters, tune, comparison, memcheck, small, plots)
}


def main(argv: list[str] | None = None) -> int:
    """0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--work", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seconds", type=float, default=600.0, help="that it may take")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small")
    args = parser.parse_args(argv)
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no GPU: use --rehearse to try the script on a CPU.")
    kit = Kit(args.stage, args.work, args.seconds, args.wheels, args.rehearse)
    STAGES[args.stage](kit)
    return 0 if kit.well else 1


if __name__ == "__main__":
    sys.exit(main())
