"""Clocks, memory and counters, for the CPU and CUDA; and what machine they ran on.

Times are medians. The runs of all contenders are interleaved in one process, so that a change of the machine's speed
affects all of them. This file does not know what is measured."""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import grpo_kernels.vocabulary.native
from grpo_kernels.diagnosis.native import findings
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.memory import release

RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 256 << 20  # beyond every L2
AHEAD_MS = 0.6  # what a call of Python code may take on the host before its kernels reach the GPU
ENVIRONMENT = ("OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "GLIBC_", "LD_PRELOAD", "PYTORCH_", "GRPO_KERNELS_")  # prefixes
NATIVE = {"cpu": "cpu", "cuda": "triton"}  # the backend of the kernels on each device
PACKAGES = ("triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "verl", "quack-kernels")

# ---- time


def interleaved(
    runs: dict[str, Callable[[], Any]],
    device: str,
    before: Callable[[str], Any] | None = None,
    *,
    seconds: float = 1.0,
    least: int = 3,
    most: int = 50,
    warm_up: bool = True,
    attempt: Callable[[str, Callable[[], float]], float | None] = lambda name, run: run(),
) -> dict[str, dict]:
    """{name: {ms, p20, p80, runs, modes if there are two, on CUDA host_ms}}. Each round runs every contender once; the order
    rotates from round to round. host_ms: the median time of the host in the call, which the GPU need not wait for.

    `before(name)` runs untimed before each run, for example to restore inputs that were overwritten. A contender stops
    taking part once it has `least` runs and `seconds` of time, or three runs and three times `seconds`: slow contenders
    then do not limit the sample of the others. The first round is a warm-up, unless `warm_up` is False. `attempt(name,
    run)` executes a run. It may catch an exception and return None: that contender is dropped."""
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    hosts: dict[str, list[float]] = {name: [] for name in names}
    for i in range(0 if warm_up else 1, most + 1):
        first = i % max(1, len(names))
        for name in names[first:] + names[:first]:
            if name not in times or _enough(times[name], 1e3 * seconds, least):
                continue

            def run(name: str = name, warm: bool = i > 0) -> float:
                if before is not None:
                    before(name)
                _, ms, host = timed(runs[name], device)
                hosts[name] += [host] if warm else []
                return ms

            ms = attempt(name, run)
            if ms is None:
                del times[name]
            elif i > 0:
                times[name].append(ms)
    host = {name: {"host_ms": statistics.median(hosts[name])} if device != "cpu" and hosts[name] else {} for name in times}
    return {name: _summary(t) | host[name] for name, t in times.items()}


def _enough(times: list[float], spent: float, least: int) -> bool:
    return (len(times) >= least and sum(times) >= spent) or (len(times) >= 3 and sum(times) >= 3 * spent)


def timed(run: Callable[[], Any], device: str) -> tuple[Any, float, float]:
    """(result, milliseconds, milliseconds of the host in the call). On CUDA the time between two events, after the L2 cache was
    flushed; the GPU then sleeps for AHEAD_MS, so that it does not wait for the host to send the first kernels."""
    if device == "cpu":
        begin = time.perf_counter()
        result = run()
        ms = 1e3 * (time.perf_counter() - begin)
        return result, ms, ms
    _flush_buffer().zero_()
    torch.cuda._sleep(round(AHEAD_MS * _clocks_per_ms()))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    begin = time.perf_counter()
    result = run()
    host = 1e3 * (time.perf_counter() - begin)
    stop.record()
    stop.synchronize()
    return result, start.elapsed_time(stop), host


@functools.cache
def _clocks_per_ms() -> float:
    """Of the clock that torch.cuda._sleep counts."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)  # loads the kernel
    start.record()
    torch.cuda._sleep(1_000_000)
    stop.record()
    stop.synchronize()
    return 1_000_000 / start.elapsed_time(stop)


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def _summary(times: list[float]) -> dict:
    cuts = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 4
    two = modes(times)
    return {"ms": statistics.median(times), "p20": cuts[0], "p80": cuts[3], "runs": len(times)} | (
        {"modes": two} if two else {}
    )


def modes(times: list[float]) -> list[list[float]]:
    """[[ms, share of the runs], [ms, share]] of two kinds of runs, the fast ones first; [] if there is one kind only.

    There are two where the runs fall into groups of at least a fifth each, of which every slow run takes at least 1.3 times as
    long as any fast one, and the groups are further apart than either is wide."""
    ordered, least = sorted(times), max(2, len(times) / 5)
    gaps = [(ordered[i] - ordered[i - 1], i) for i in range(1, len(ordered)) if least <= i <= len(ordered) - least]
    gap, at = max(gaps, default=(0.0, 0))
    fast, slow = ordered[:at], ordered[at:]
    if not fast or slow[0] < 1.3 * fast[-1] or gap < max(fast[-1] - fast[0], slow[-1] - slow[0]):
        return []
    return [[statistics.median(group), len(group) / len(ordered)] for group in (fast, slow)]


# ---- neighbours

#: Keeps a core busy until it is ended, or its parent is gone.
NEIGHBOUR = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(100_000): pass"


@contextmanager
def busy_neighbour() -> Iterator[int]:
    """Inside the block another process keeps one core busy; its id."""
    neighbour = subprocess.Popen([sys.executable, "-S", "-c", NEIGHBOUR, str(os.getpid())])
    try:
        yield neighbour.pid
    finally:
        neighbour.kill()
        neighbour.wait()


# ---- memory


def memory_in_use(device: str) -> int:
    """Bytes of tensors on CUDA; resident bytes on a CPU (Linux), after the allocator has returned its free memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    release()  # what our own large results left
    _trim()
    return _status("VmRSS")


def memory_free(device: str) -> int:
    """Bytes that a contender may still ask for."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    return _read("/proc/meminfo", "MemAvailable")


def peak_memory(run: Callable[[], Any], device: str, baseline: int | None = None) -> int:
    """The peak of memory in use during `run`, in bytes above `baseline` (None: above what is in use just before).

    On a CPU `run` should have run before, since its code counts too. Free heap pages are returned to the system first, so
    that a run does not reuse what another contender has allocated."""
    before = memory_in_use(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        run()
        peak = _status("VmHWM")
    return max(0, peak - (before if baseline is None else baseline))


def _trim() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def _status(key: str) -> int:
    return _read("/proc/self/status", key)


def _read(path: str, key: str) -> int:
    line = next(x for x in Path(path).read_text().splitlines() if x.startswith(key + ":"))
    return 1024 * int(line.split()[1])


# ---- counters


@contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """`with compilations() as count: ...; count()`: the number of new graphs of torch.compile and of Triton specialisations
    that are new to this process, whether compiled or loaded from a cache on disk."""
    from torch._dynamo.utils import counters

    kernels = 0

    def listener(**_: Any) -> None:
        nonlocal kernels
        kernels += 1

    graphs = counters["stats"]["unique_graphs"]
    try:
        from triton import knobs
    except ImportError:  # no Triton, no kernels
        yield lambda: counters["stats"]["unique_graphs"] - graphs
        return
    former, knobs.compilation.listener = knobs.compilation.listener, listener
    try:
        yield lambda: counters["stats"]["unique_graphs"] - graphs + kernels
    finally:
        knobs.compilation.listener = former


def host_syncs(run: Callable[[], Any]) -> int:
    """How often the host waits for CUDA during `run`: what torch reports, and waits for events, which torch does not
    report."""
    waits = 0
    wait = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        nonlocal waits
        waits += 1
        wait(event)

    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.Event.synchronize = counted  # type: ignore[method-assign]
        try:
            run()
        finally:
            torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]
            torch.cuda.set_sync_debug_mode("default")
    return waits + sum("called a synchronizing" in str(w.message) for w in seen)


# ---- machine


def slug(device: str) -> str:
    """The folder of a machine's results: "cpu", or the GPU's name."""
    return "cpu" if device == "cpu" else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def machine(device: str) -> dict:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    reason = backends.unavailable(NATIVE[device])
    found = {
        "device": device,
        "cpu": next((x.split(":")[1].strip() for x in info if x.startswith("model name")), platform.machine()),
        "threads": torch.get_num_threads(),
        "environment": environment(),
        "huge pages": _huge_pages(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": versions(),
        "backend": NATIVE[device] if reason is None else f"eager ({reason})",
        "library": library(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["name"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_gb"] = round(properties.total_memory / 1e9, 1)
        found["cuda"] = torch.version.cuda
        found |= _nvidia_smi("driver_version")
    else:
        found["name"] = found["cpu"]
        if reason is None:
            found["instruction set"] = grpo_kernels.vocabulary.native.load().isa()
    return found


def require_kernels(device: str) -> None:
    """SystemExit with the remedy where the kernels for `device` are missing or out of date: eager PyTorch, or old code,
    would be measured in their place."""
    if device == "cpu":
        reasons = [f"{f.problem}\n  -> {f.remedy}" for f in findings(needed=True) if f.blocks]
    else:
        reason = backends.unavailable(NATIVE[device])
        reasons = [] if reason is None else [f"the kernels for {device} tensors do not run: {reason}"]
    if reasons:
        raise SystemExit("\n".join(["Nothing was measured.", *reasons]))


def environment() -> dict[str, str]:
    """Environment variables that allocators and thread pools read. A path is shortened to the name of the file."""
    return {name: value.rpartition("/")[2] for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)}


def library() -> str:
    """A hash of the compiled module, or "none"."""
    try:
        path = grpo_kernels.vocabulary.native.load().__file__
    except ImportError:
        return "none"
    assert path is not None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().partition("[")[2].partition("]")[0] if path.exists() else ""


def versions() -> dict[str, str]:
    """Versions of the packages whose code is measured, where they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gpu_state(device: str) -> dict[str, str]:
    """Clock, power and temperature now, where nvidia-smi tells; empty on a CPU."""
    return _nvidia_smi("clocks.sm", "power.draw", "temperature.gpu") if device == "cuda" else {}


def _nvidia_smi(*fields: str) -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    values = answer.stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}
