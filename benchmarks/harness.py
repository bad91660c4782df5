"""Measure times, peak memory and compilations on a CPU and on CUDA.

Times are medians. The runs of all contenders are interleaved in one process, so that a change of
the machine's speed affects all of them.
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

FLUSH_BYTES = 256 << 20  # larger than the L2 cache of any GPU
#: How long the GPU sleeps before a run, so that the host can enqueue the run's kernels meanwhile.
MIN_SLEEP_MS = 0.6
MAX_SLEEP_MS = 20.0  # a host that takes longer waits for the GPU during the run anyway

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
    """Time the contenders in turns. Each round runs every contender once, and the order rotates.

    runs        {name: function to time}
    before      before(name) is called before each run and not timed, for example to restore inputs
    seconds, least, most
                A contender stops after `most` runs, after `least` runs that took `seconds` in
                total, or after three runs that took three times `seconds`. So a slow contender does
                not reduce the number of runs of the others
    attempt     attempt(name, run) returns run(), the milliseconds. It may catch an exception and
                return None: the contender is then dropped

    Returns {name: {"ms", "p20", "p80", "runs"}}: the median, two quantiles and the number of runs.
    On CUDA there is also "host_ms", the median time that the host spends in the call.
    """
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    host_times: dict[str, list[float]] = {name: [] for name in names}

    def time_one(name: str, is_warm_up: bool) -> float:
        """Run a contender once. Returns its milliseconds, and appends to `host_times`.

        On CUDA the GPU sleeps before the run, for 1.5 times as long as the host took in the last
        three runs, so that the host has enqueued all kernels when the first one starts.
        """
        if before is not None:
            before(name)
        expected_host_ms = max(host_times[name][-3:], default=0.0)
        _result, ms, host_ms = timed(runs[name], device, sleep_ms=1.5 * expected_host_ms)
        if not is_warm_up:  # the first run may compile
            host_times[name].append(host_ms)
        return ms

    # Round 0 is a warm-up. The measurement of memory has returned all free memory to the system,
    # and the warm-up faults these pages in again.
    for i in range(most + 1):
        first = i % max(1, len(names))
        for name in names[first:] + names[:first]:
            if name not in times or _has_enough(times[name], 1e3 * seconds, least):
                continue
            ms = attempt(name, functools.partial(time_one, name, is_warm_up=i == 0))
            if ms is None:
                del times[name]
            elif i > 0:
                times[name].append(ms)

    summaries = {name: _summary(values) for name, values in times.items()}
    if device != "cpu":
        for name, summary in summaries.items():
            if host_times[name]:
                summary["host_ms"] = statistics.median(host_times[name])
    return summaries


def _has_enough(times: list[float], wanted_ms: float, least: int) -> bool:
    """Return whether a contender has enough runs: see `seconds` and `least` of `interleaved`.

    times       milliseconds of its runs so far
    wanted_ms   `seconds`, in milliseconds
    """
    total_ms = sum(times)
    if len(times) >= least and total_ms >= wanted_ms:
        return True
    return len(times) >= 3 and total_ms >= 3 * wanted_ms


def timed(run: Callable[[], Any], device: str, sleep_ms: float = 0.0) -> tuple[Any, float, float]:
    """Return (run(), milliseconds of the run, milliseconds that the host spent in the call).

    On CUDA the L2 cache is flushed first, and the time is that between two events. The GPU sleeps
    before the first event, so that it does not wait for the host to enqueue kernels.

    sleep_ms    length of the sleep, within MIN_SLEEP_MS and MAX_SLEEP_MS
    """
    if device == "cpu":
        begin = time.perf_counter()
        result = run()
        ms = 1e3 * (time.perf_counter() - begin)
        return result, ms, ms
    _flush_buffer().zero_()
    sleep_ms = min(max(MIN_SLEEP_MS, sleep_ms), MAX_SLEEP_MS)
    torch.cuda._sleep(round(sleep_ms * _clocks_per_ms()))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    begin = time.perf_counter()
    result = run()
    host_ms = 1e3 * (time.perf_counter() - begin)
    stop.record()
    stop.synchronize()
    return result, start.elapsed_time(stop), host_ms


@functools.cache
def _clocks_per_ms() -> float:
    """Return the rate of the clock that torch.cuda._sleep counts.

    This is the highest rate of several measurements: an idle GPU clocks low at first, and sleeps
    converted with that rate would be too short later.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)  # loads the kernel
    clocks = 1_000_000
    highest_rate = 0.0
    for _ in range(20):
        start.record()
        torch.cuda._sleep(clocks)
        stop.record()
        stop.synchronize()
        highest_rate = max(highest_rate, clocks / start.elapsed_time(stop))
    return highest_rate


@functools.cache
def _flush_buffer() -> torch.Tensor:
    """Return a buffer that evicts everything else from the L2 cache when it is written."""
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def _summary(times: list[float]) -> dict:
    """Return the median "ms", the 20 % and 80 % quantiles "p20" and "p80", and the number "runs".

    times   milliseconds of the runs of a contender, at least one
    """
    if len(times) > 1:
        fifths = statistics.quantiles(times, n=5, method="inclusive")  # 20, 40, 60, 80 %
        p20 = fifths[0]
        p80 = fifths[-1]
    else:
        p20 = p80 = times[0]
    return {"ms": statistics.median(times), "p20": p20, "p80": p80, "runs": len(times)}


# ---- memory


def memory_in_use(device: str) -> int:
    """Return the memory in use, in bytes.

    On CUDA this is the memory of tensors. On a CPU (Linux) it is the resident memory of the
    process, after the allocators have returned their free memory to the system.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    release()  # buffers that this package keeps for later calls
    _trim()
    return _process_status("VmRSS")


def memory_free(device: str) -> int:
    """Return the bytes that a contender can still allocate."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    return int(memory_available())


def peak_memory(run: Callable[[], Any], device: str, baseline: int | None = None) -> int:
    """Call `run` and return the peak of the memory in use, in bytes above `baseline`.

    On a CPU call `run` once before, because the code that it loads counts too. Free memory is
    returned to the system first, so that the run does not reuse what another contender allocated.

    baseline    bytes. None: the memory in use just before the call
    """
    before = memory_in_use(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
        run()
        peak = _process_status("VmHWM")
    return max(0, peak - (before if baseline is None else baseline))


def _trim() -> None:
    """Return free heap memory to the system, where the C library can (glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _process_status(key: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            kilobytes = int(line.split()[1])
            return 1024 * kilobytes
    raise KeyError(key)


# ---- compilations


@contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """Count compilations: `with compilations() as count: ...; count()`.

    A compilation is a new graph of torch.compile or a Triton kernel that this process has not used
    before, even if it is loaded from a cache on disk. Each kernel is also printed.
    """
    from torch._dynamo.utils import counters

    kernels: list[str] = []

    def listener(src: Any = None, **_other_arguments: Any) -> None:
        """Note a kernel. Triton calls this after it has compiled a kernel or loaded it from disk.

        src     Triton's source of the kernel, with its name, signature and attributes. The other
                arguments (such as the duration) are not needed
        """
        name = str(getattr(src, "name", src))
        kernels.append(name)
        print(
            "compiled:", name, getattr(src, "signature", ""), getattr(src, "attrs", ""), flush=True
        )

    graphs_before = counters["stats"]["unique_graphs"]

    def count() -> int:
        """Return the number of compilations since the `with` block began."""
        return counters["stats"]["unique_graphs"] - graphs_before + len(kernels)

    try:
        from triton import knobs
    except ImportError:  # without Triton there are no kernels to count
        yield count
        return
    former_listener = knobs.compilation.listener
    knobs.compilation.listener = listener
    try:
        yield count
    finally:
        knobs.compilation.listener = former_listener
