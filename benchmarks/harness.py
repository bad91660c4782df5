"""Clocks, memory and counters, for the CPU and CUDA.

Times are medians. The runs of all contenders are interleaved in one process, so that a change of
the machine's speed affects all of them. This file does not know what is measured.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.core.memory import release
from grpo_kernels.diagnosis.machine import memory_available

FLUSH_BYTES = 256 << 20  # beyond every L2
AHEAD_MS = 0.6  # the least host time that Python code may need before its kernels reach the GPU
MOST_AHEAD_MS = 20.0  # a host that takes longer waits for the GPU itself

# ---- time


def interleaved(
    runs: dict[str, Callable[[], Any]],
    device: str,
    before: Callable[[str], Any] | None = None,
    *,
    seconds: float = 1.0,
    least: int = 3,
    most: int = 50,
    attempt: Callable[[str, Callable[[], float]], float | None] = lambda name, run: run(),
) -> dict[str, dict]:
    """{name: {ms, p20, p80, runs, on CUDA host_ms}}. Each round runs every contender once; the
    order rotates from round to round. host_ms: the median time of the host in the call, which the
    GPU need not wait for.

    `before(name)` runs untimed before each run, for example to restore inputs that were
    overwritten. A contender stops taking part once it has `least` runs and `seconds` of time, or
    three runs and three times `seconds`: slow contenders then do not limit the sample of the
    others. The first round is a warm-up: measuring the memory before it has returned all free
    memory to the system, and its pages are to be there again. `attempt(name, run)` executes a run.
    It may catch an exception and return None: that contender is dropped.
    """
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    hosts: dict[str, list[float]] = {name: [] for name in names}
    for i in range(most + 1):
        first = i % max(1, len(names))
        for name in names[first:] + names[:first]:
            if name not in times or _enough(times[name], 1e3 * seconds, least):
                continue

            def run(name: str = name, warm: bool = i > 0) -> float:
                if before is not None:
                    before(name)
                _, ms, host = timed(
                    runs[name], device, ahead=1.5 * max(hosts[name][-3:], default=0.0)
                )
                hosts[name] += [host] if warm else []  # the first may compile
                return ms

            ms = attempt(name, run)
            if ms is None:
                del times[name]
            elif i > 0:
                times[name].append(ms)
    host = {
        name: {"host_ms": statistics.median(hosts[name])} if device != "cpu" and hosts[name] else {}
        for name in times
    }
    return {name: _summary(t) | host[name] for name, t in times.items()}


def _enough(times: list[float], spent: float, least: int) -> bool:
    return (len(times) >= least and sum(times) >= spent) or (
        len(times) >= 3 and sum(times) >= 3 * spent
    )


def timed(run: Callable[[], Any], device: str, ahead: float = 0.0) -> tuple[Any, float, float]:
    """(result, milliseconds, milliseconds of the host in the call). On CUDA the time between two
    events, after the L2 cache was flushed; the GPU then sleeps for `ahead` milliseconds, so that it
    does not wait for the host to send its kernels.
    """
    if device == "cpu":
        begin = time.perf_counter()
        result = run()
        ms = 1e3 * (time.perf_counter() - begin)
        return result, ms, ms
    _flush_buffer().zero_()
    torch.cuda._sleep(round(min(max(AHEAD_MS, ahead), MOST_AHEAD_MS) * _clocks_per_ms()))
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
    """Of the clock that torch.cuda._sleep counts: the most of several, since an idle GPU clocks
    low, and sleeps that are counted by what it did then are too short.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)  # loads the kernel
    most = 0.0
    for _ in range(20):
        start.record()
        torch.cuda._sleep(1_000_000)
        stop.record()
        stop.synchronize()
        most = max(most, 1_000_000 / start.elapsed_time(stop))
    return most


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def _summary(times: list[float]) -> dict:
    cuts = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 4
    return {"ms": statistics.median(times), "p20": cuts[0], "p80": cuts[3], "runs": len(times)}


# ---- memory


def memory_in_use(device: str) -> int:
    """Bytes of tensors on CUDA; resident bytes on a CPU (Linux), after the allocator has returned
    its free memory.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    release()  # frees the memory of our own earlier results
    _trim()
    return _status("VmRSS")


def memory_free(device: str) -> int:
    """Bytes that a contender may still ask for."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    return int(memory_available())


def peak_memory(run: Callable[[], Any], device: str, baseline: int | None = None) -> int:
    """The peak of memory in use during `run`, in bytes above `baseline` (None: above what is in use
    just before).

    On a CPU `run` should have run before, since its code counts too. Free heap pages are returned
    to the system first, so that a run does not reuse what another contender has allocated.
    """
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
    line = next(
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key + ":")
    )
    return 1024 * int(line.split()[1])


# ---- counters


@contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """`with compilations() as count: ...; count()`: the number of new graphs of torch.compile and
    of Triton specialisations that are new to this process, whether compiled or loaded from a cache
    on disk.
    """
    from torch._dynamo.utils import counters

    kernels = 0

    def listener(src: Any = None, **_: Any) -> None:
        nonlocal kernels
        kernels += 1
        print(
            "compiled:",
            getattr(src, "name", src),
            getattr(src, "signature", ""),
            getattr(src, "attrs", ""),
            flush=True,
        )

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
