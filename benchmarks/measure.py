"""One cell of a table: every provider is checked against float64, then timed in one interleaved run.

Implementations that fail the float64 check are not timed; their row shows the errors. A provider that cannot take part, or
that fails, has a row with the reason."""

from __future__ import annotations

import functools
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import DIRECTIONS, Case, Cell, Result, errors, make_case, reference
from benchmarks.harness import compilations, host_syncs, interleaved, memory_free, memory_in_use, peak_memory
from benchmarks.machine import gpu_state
from benchmarks.providers import Provider, Run, Unavailable, first_line, providers

#: The largest error of each kind (see cases.errors) that passes, in 32 and in 16 bits. It is a small multiple of the error
#: of a correct implementation that rounds logits and gradients to that precision, and a fraction of the error of one wrong
#: row or one missing term.
FULL = {"loss": 1e-4, "gradient": 1e-4, "worst row": 1e-3, "parameter": 1e-4, "value": 1e-4}
HALF = {"loss": 1e-2, "gradient": 3e-2, "worst row": 0.3, "parameter": 0.1, "value": 0.15}
#: The same limits for one draw of a gradient. A row may be off by more than its norm, which is small if the target's p is near
#: 1.
NOISE = {"gradient": 0.5, "worst row": math.inf}
GATE = {torch.float32: FULL, torch.bfloat16: HALF, torch.float16: HALF}


class DeviceLost(RuntimeError):
    """A provider broke CUDA for this process: only a new process can use it again."""

    def __init__(self, provider: str, reason: str) -> None:
        super().__init__(f"{provider}: {reason}")
        self.provider, self.reason = provider, reason


class _Failed(Exception):
    """The error of a provider, in one line."""


def measure(
    cell: Cell,
    device: str,
    *,
    only: tuple[str, ...] | None = None,
    seconds: float = 1.0,
    least: int = 3,
    most: int = 50,
    counters: bool = True,
    memory: bool = True,
    known: dict[str, str] | None = None,
    candidates: list[Provider] | None = None,
    save: Callable[[dict], None] | None = None,
) -> dict:
    """The measured cell, in the form of the result files. only: the providers that take part besides the limits (None: all).
    known: {provider: reason} of failures in an earlier process, which are not tried again. save: called after each provider
    with the results so far, marked "unfinished", and with times of a few runs of each."""
    begin = time.perf_counter()
    chosen = providers(cell.contract) if candidates is None else candidates
    chosen = [p for p in chosen if only is None or p.limit or p.name in only]
    known = known or {}
    counted = {p for p in chosen if p.name not in known} if counters and cell.contract != "step" else set()
    case = make_case(cell, device)
    expected = reference(case)
    byname = {provider.name: provider for provider in chosen}
    rows: list[dict[str, Any]] = [
        {"name": p.name} | {mark: value for mark in ("limit", "part", "drawn") if (value := getattr(p, mark))} for p in chosen
    ]
    runs: dict[str, Run] = {}
    counts: dict[str, int | None] = {}
    early: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: byname[row["name"]].late):  # providers that compile for long come last
        provider = byname[row["name"]]
        if provider in counted and provider.name not in counts:
            together = [p for p in chosen if p in counted and p.late == provider.late]
            counts |= {p.name: _compiles(p, cell, device) for p in together}
            torch._dynamo.reset()  # otherwise torch.compile would generalise from the shapes that it has seen
        try:
            reason = provider.reason_against(cell, device, 0.9 * memory_free(device))
            if reason is not None:
                raise Unavailable(reason)
            if provider.name in known:
                raise _Failed(known[provider.name])
            run = _attempt(provider, device, lambda p=provider: p.make(case))
            if not provider.limit and not provider.beside:
                row |= {"compiles": counts.get(provider.name), "syncs": None}
                row |= _checked(provider, run, case, device, expected, memory, counters)
        except Unavailable as missing:
            row |= {"status": "skipped", "reason": str(missing)}
        except _Failed as failure:
            row |= {"status": "failed", "reason": str(failure)}
        if row.setdefault("status", "ok") == "ok":
            runs[provider.name] = run
        if save is not None:
            early[provider.name] = _early(provider, row, runs, device)
            some = [r | early[r["name"]] for r in rows if r["name"] in early]
            save(describe(cell) | {"limit": None, "providers": some, "unfinished": True})
    del expected
    _free(device)
    failures: dict[str, str] = {}

    def attempt(name: str, run: Callable[[], float]) -> float | None:
        try:
            return _attempt(byname[name], device, run)
        except _Failed as failure:
            failures[name] = f"while it was timed, {failure}"
            return None

    retries = _alloc_retries(device)
    times = interleaved(
        {name: run.call for name, run in runs.items()}, device, lambda name: _restore(runs[name]), attempt=attempt,
        seconds=seconds, least=least, most=most,
    )  # fmt: skip
    state = gpu_state(device)
    rows = with_sum_of_parts(rows, times, failures)
    limits = [{"name": r["name"], "ms": times[r["name"]]["ms"]} for r in rows if r.get("limit") and r["name"] in times]
    limit = min(limits, key=lambda x: x["ms"], default=None)
    for row in rows:
        name = row["name"]
        if name in failures:
            row |= {"status": "failed", "reason": failures[name]}
        elif row["status"] == "ok":
            row |= times[name] | derived(cell, times[name]["ms"])
            row["x_limit"] = row["ms"] / limit["ms"] if limit else None
            if "copy" in times:
                row["x_copy"] = row["ms"] / times["copy"]["ms"]
    reached = {} if case.entropy is None else {"entropy_reached": round(case.entropy, 3)}
    timings = describe(cell) | reached | {"limit": limit, "providers": rows, "seconds": round(time.perf_counter() - begin, 1)}
    return timings | ({"gpu": state, "alloc_retries": _alloc_retries(device) - retries} if device == "cuda" else {})


def _early(provider: Provider, row: dict[str, Any], runs: dict[str, Run], device: str) -> dict[str, Any]:
    """Times of a few runs of one provider, in case the cell is not finished. One that fails is left out from then on."""
    if row["status"] != "ok":
        return {}
    name, run = provider.name, runs[provider.name]

    def alone() -> dict[str, Any]:
        timings = interleaved({name: run.call}, device, lambda _: _restore(run), seconds=0.1, least=3, most=5)[name]
        return {key: timings[key] for key in ("ms", "p20", "p80", "runs")} | {"x_limit": None}

    try:
        return dict(_attempt(provider, device, alone))
    except _Failed as failure:
        del runs[name]
        row |= {"status": "failed", "reason": f"while it was timed, {failure}"}
        return {}


def with_sum_of_parts(rows: list[dict], times: dict[str, dict], failures: dict[str, str]) -> list[dict]:
    """The rows, with one row for each limit that has parts: the sum of the fastest way to compute each part. The row's "ways"
    are the milliseconds of all ways, or the reasons why they have none; "of" names the fastest. Its times are added to
    `times`."""
    others, ways = [r for r in rows if not r.get("part")], [r for r in rows if r.get("part")]
    if not ways:
        return rows
    shown = {
        r["name"]: times[r["name"]]["ms"] if r["name"] in times else r.get("reason", failures.get(r["name"])) for r in ways
    }
    whole: dict[str, Any] = {"name": "products", "limit": True, "ways": shown, "status": "ok"}
    parts = [
        [r["name"] for r in ways if r["part"] == part and r["name"] in times] for part in dict.fromkeys(r["part"] for r in ways)
    ]
    if not all(parts):
        return [*others, whole | {"status": "failed", "reason": "one of the products was made in no way"}]
    fastest = [min(names, key=lambda name: times[name]["ms"]) for names in parts]
    sums = {key: sum(times[name][key] for name in fastest) for key in ("ms", "p20", "p80")}
    times["products"] = sums | {"runs": min(times[name]["runs"] for name in fastest)}
    return [*others, whole | {"of": fastest}]


def _checked(
    provider: Provider, run: Run, case: Case, device: str, expected: Result, memory: bool, counters: bool
) -> dict[str, Any]:
    """The errors, and for a provider that passes the check also the results of separate runs: memory, and waits of the host."""
    baseline = memory_in_use(device) if device == "cuda" else None
    scale = float(case.batch.advantages.abs().mean())
    row: dict[str, Any] = {"errors": _attempt(provider, device, lambda: _errors(run, expected, scale))}
    off = outside_gate(case.cell, row["errors"], provider.drawn)
    if off is not None:
        return row | {"status": "wrong", "reason": off}
    if memory:
        row["extra_mb"] = _attempt(provider, device, lambda: _extra(run, device, baseline)) / 1e6
    if counters and device == "cuda":
        row["syncs"] = _attempt(provider, device, lambda: _syncs(run))
    return row


def describe(cell: Cell) -> dict:
    """The cell's shape as the result files have it."""
    return {
        "contract": cell.contract,
        "rows": cell.rows,
        "sequences": cell.sequences,
        "hidden": cell.hidden,
        "vocab": cell.vocab,
        "dtype": str(cell.dtype).removeprefix("torch."),
        "active": cell.active,
        "layers": cell.layers,
    } | ({} if cell.entropy is None else {"entropy": cell.entropy})


def outside_gate(cell: Cell, found: dict[str, float], drawn: bool = False) -> str | None:
    """The first error that rounding cannot explain, in words; None if there is none. For a gradient that is `drawn`, the first
    that noise around the dense gradient cannot explain."""
    for name, value in found.items():
        most = GATE[cell.dtype][_kind(name)]
        if cell.contract in DIRECTIONS and _kind(name) == "worst row":
            most *= 2  # where two rows nearly agree, their difference is mostly the rounding of the logits
        if drawn and name != "loss":
            most = NOISE[_kind(name)]
        if not value <= most:  # NaN as well
            return f"{name} is off by {value:.1e}, more than {most:.0e}"
    return None


def _kind(name: str) -> str:
    """The kind of an error, from its name."""
    if name == "loss":
        return name
    if name.endswith("worst row"):
        return "worst row"
    return "gradient" if name.startswith("d_") else "parameter" if name == "gradients" else "value"


def derived(cell: Cell, ms: float) -> dict:
    """Rates from a time. GB/s: as if the logits were read and written once (2U), or read twice and written once (3U).
    TFLOP/s: of the products that are needed, where rows of zero advantage (a share 1 - a) take part in the first product
    only; "tflops_dense" counts all rows in all products."""
    if cell.contract == "step":
        return {}
    seconds = ms / 1e3
    if cell.contract in ("kept", "sparse", *DIRECTIONS):  # whose columns are not known before, or which have rates of their own
        return {}
    if cell.hidden is None:
        unit = cell.rows * cell.vocab * cell.dtype.itemsize / 1e9
        if cell.contract == "logits-forward":
            return {"gbps_1u": unit / seconds}
        return {"gbps_2u": 2 * unit / seconds, "gbps_3u": 3 * unit / seconds}
    backward = {"hidden": 4, "hidden-frozen": 2, "hidden-forward": 0, "cross-entropy": 4}[cell.contract]
    a = cell.active_rows / cell.rows
    convention = f"{2 + backward}NHV" if a == 1 or not backward else f"(2+{backward}a)NHV, a={a:g}"
    product = cell.rows * cell.hidden * cell.vocab / seconds / 1e12
    rates = {"tflops": (2 + backward * a) * product, "flop_convention": convention}
    return rates | ({"tflops_dense": (2 + backward) * product} if a < 1 and backward else {})


def _compiles(provider: Provider, cell: Cell, device: str) -> int | None:
    """None for a limit, and for a provider that cannot run: its check reports the reason."""
    if provider.limit or provider.reason_against(cell, device, memory_free(device)):
        return None
    small = replace(cell, rows=64, sequences=16, vocab=4096, hidden=cell.hidden and 128, active=1.0)
    try:
        return _attempt(provider, device, lambda: recompilations(provider, small, device))
    except (Unavailable, _Failed):
        return None


@functools.cache
def recompilations(provider: Provider, cell: Cell, device: str) -> int:
    """New compilations at three further row counts after that of `cell`, starting with a reset torch.compile."""

    def once(rows: int) -> None:
        run = provider.make(make_case(replace(cell, rows=rows), device))
        _restore(run)
        run.call()

    torch._dynamo.reset()
    once(cell.rows)
    with compilations() as count:
        for rows in (96, 112, 144):
            once(rows)
        return count()


def _attempt(provider: Provider, device: str, step: Callable[[], Any]) -> Any:
    try:
        with _quiet():
            return step()
    except Unavailable:
        raise
    except Exception as failure:  # a peer's code may raise anything; the other providers are still measured
        reason = first_line(failure)
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise DeviceLost(provider.name, reason) from lost
    _free(device)
    raise _Failed(reason)


def _errors(run: Run, expected: Result, scale: float) -> dict[str, float]:
    _restore(run)
    return errors(run.call(), expected, scale)


def _extra(run: Run, device: str, baseline: int | None) -> int:
    """Peak memory of a run beyond the inputs. `baseline` was in use before the provider's first run, so that memory which
    it keeps between runs is counted. (On a CPU the provider's code would be counted too, so the state just before the run
    is used.)"""
    _restore(run)
    return peak_memory(run.call, device, baseline)


def _syncs(run: Run) -> int:
    _restore(run)
    return host_syncs(run.call)


def _alloc_retries(device: str) -> int:
    """How often CUDA's allocator had to free memory and try again. Times with such runs among them are not reliable."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if device == "cuda" else 0


def _restore(run: Run) -> None:
    if run.restore is not None:
        run.restore()


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
