"""One cell of a table: every provider is checked against float64, then timed in one interleaved
run.

Implementations that fail the float64 check are not timed; their row shows the errors. A provider
that cannot take part, or that fails, has a row with the reason.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.cases import DIRECTIONS, Case, Cell, errors, make_case, reference
from benchmarks.harness import interleaved, memory_free, memory_in_use, peak_memory, timed
from benchmarks.machine import gpu_state
from benchmarks.providers import Provider, Run, Unavailable, first_line, providers
from benchmarks.tables import Record, Row

#: The largest error of each kind (see cases.errors) that passes, in 32 and in 16 bits. It is a
#: small multiple of the error of a correct implementation that rounds logits and gradients to that
#: precision, and a fraction of the error of one wrong row or one missing term.
FULL = {"loss": 1e-4, "gradient": 1e-4, "worst row": 1e-3, "parameter": 1e-4, "value": 1e-4}
HALF = {"loss": 1e-2, "gradient": 3e-2, "worst row": 0.3, "parameter": 0.1, "value": 0.15}

#: The longest that one run may take on a CPU, in seconds. A provider that needs longer is not
#: timed, because a cell runs each provider six times or more.
RUN_LIMIT_SECONDS = 30.0
#: Fields of a cell in which it may differ from the cell that its times are estimated from.
SCALED_FIELDS = ("rows", "sequences", "dtype")


class DeviceLost(RuntimeError):
    """A provider broke CUDA for this process: only a new process can use it again."""

    def __init__(self, provider: str, reason: str) -> None:
        super().__init__(f"{provider}: {reason}")
        self.provider, self.reason = provider, reason


class _Failed(Exception):
    """The error of a provider, in one line."""


def measure(
    cell: Cell, device: str, *, only: tuple[str, ...] | None = None, seconds: float = 1.0, least: int = 3, most: int = 50,
    memory: bool = True, known: dict[str, str] | None = None, candidates: list[Provider] | None = None,
    save: Callable[[Record], None] | None = None, earlier: Sequence[Record] = (),
) -> Record:  # fmt: skip
    """The measured cell, in the form of the result files. only: the providers that take part
    besides the limits (None: all). known: {provider: reason} of failures in an earlier process,
    which are not tried again. save: called after each provider with the results so far, marked
    "unfinished", and with times of a few runs of each. earlier: cells of the same suite that were
    measured before. On a CPU, providers that were too slow for this cell there are skipped.
    """
    begin, known = time.perf_counter(), known or {}
    too_slow = too_slow_by_earlier_cells(cell, earlier) if device == "cpu" else {}
    every = providers(cell.contract) if candidates is None else candidates
    chosen = {p.name: p for p in every if only is None or p.limit or p.name in only}
    if cell.accumulation == 1:
        chosen = {name: p for name, p in chosen.items() if not p.needs_accumulation}
    # otherwise torch.compile would generalise from the shapes that it has seen
    torch._dynamo.reset()
    case = make_case(cell, device)
    expected = {
        name: x / cell.accumulation if name.startswith("d_") else x
        for name, x in reference(case).items()
    }
    rows, runs, early = {name: _row(p) for name, p in chosen.items()}, {}, {}

    def time_runs(names: list[str], **how: Any) -> dict[str, Row]:
        """One that fails is left out from then on."""

        def attempt(name: str, run: Callable[[], float]) -> float | None:
            try:
                return _attempt(chosen[name], device, run)
            except _Failed as failure:
                rows[name] |= {"status": "failed", "reason": f"while it was timed, {failure}"}
                del runs[name]
                return None

        calls = {name: runs[name].call for name in names if name in runs}
        return interleaved(calls, device, lambda name: _restore(runs[name]), attempt=attempt, **how)

    for name, provider in sorted(
        chosen.items(), key=lambda x: x[1].late
    ):  # providers that compile for long come last
        rows[name] |= _checked(
            provider, case, device, expected, memory, known.get(name), too_slow.get(name), runs
        )
        if save is not None:  # times of a few runs, in case the cell is not finished
            early[name] = rows[name] | time_runs([name], seconds=0.1, least=3, most=5).get(name, {})
            save(
                describe(cell) | {"limit": None, "providers": [*early.values()], "unfinished": True}
            )
    del expected
    _free(device)
    retries = _alloc_retries(device)
    times = time_runs([*runs], seconds=seconds, least=least, most=most)
    state = (
        {"gpu": gpu_state(device), "alloc_retries": _alloc_retries(device) - retries}
        if device == "cuda"
        else {}
    )
    found = with_sum_of_parts([*rows.values()], times)
    for row in found:
        if row["status"] == "ok":
            row |= times[row["name"]] | derived(cell, times[row["name"]]["ms"])
    limits = [
        {"name": row["name"], "ms": row["ms"]} for row in found if row.get("limit") and "ms" in row
    ]
    limit = min(limits, key=lambda x: x["ms"], default=None)
    for row in (row for row in found if "ms" in row):
        row |= {"x_copy": row["ms"] / times["copy"]["ms"]} if "copy" in times else {}
    whole = {"limit": limit, "providers": found, "seconds": round(time.perf_counter() - begin, 1)}
    return describe(cell) | whole | state


def _row(provider: Provider) -> Row:
    return {"name": provider.name} | {
        x: getattr(provider, x) for x in ("limit", "part") if getattr(provider, x)
    }


def _checked(
    provider: Provider, case: Case, device: str, expected: Record, memory: bool, known: str | None,
    too_slow: str | None, runs: dict[str, Run],
) -> Row:  # fmt: skip
    """The status, the errors, and for a provider that passes the check the memory of a separate
    run; its run is put into `runs`.
    """
    row: Row = {}
    try:
        reason = provider.reason_against(case.cell, device, 0.9 * memory_free(device))
        if reason is not None:
            raise Unavailable(reason)
        if known is not None:
            raise _Failed(known)
        if too_slow is not None:
            raise Unavailable(too_slow)
        run = _attempt(provider, device, lambda: provider.make(case))
        result = None
        if device == "cpu":
            result, seconds = _attempt(provider, device, lambda: _first_run(provider, run))
            if seconds > RUN_LIMIT_SECONDS:
                row["run_seconds"] = round(seconds, 1)
                raise Unavailable(
                    f"one run takes {seconds:.0f} s, more than the limit of {RUN_LIMIT_SECONDS:.0f} s"
                )
        if not provider.limit and not provider.beside:
            # In use before its first run, so that memory which it keeps between runs is counted.
            # (On a CPU its code would be counted too, so the state just before the run is used.)
            baseline = memory_in_use(device) if device == "cuda" else None
            scale = float(case.batch.advantages.abs().mean())
            if device != "cpu":
                result = _attempt(provider, device, lambda: _fresh(run)())
            row["errors"] = _attempt(provider, device, lambda: errors(result, expected, scale))
            del result  # its memory would count as in use
            off = outside_gate(case.cell, row["errors"])
            if off is not None:
                return row | {"status": "wrong", "reason": off}
            if memory:
                row["extra_mb"] = (
                    _attempt(provider, device, lambda: peak_memory(_fresh(run), device, baseline))
                    / 1e6
                )
    except Unavailable as missing:
        return row | {"status": "skipped", "reason": str(missing)}
    except _Failed as failure:
        return row | {"status": "failed", "reason": str(failure)}
    runs[provider.name] = run
    return row | {"status": "ok"}


def _first_run(provider: Provider, run: Run) -> tuple[Any, float]:
    """Return the result of a run on a CPU and its seconds.

    The first run of a provider that compiles may take longer than the limit although later runs do
    not, so that its second run counts.
    """
    result, ms, _ = timed(_fresh(run), "cpu")
    if provider.late and ms > 1e3 * RUN_LIMIT_SECONDS:
        del result  # so that two results are never in memory at once
        result, ms, _ = timed(_fresh(run), "cpu")
    return result, ms / 1e3


def too_slow_by_earlier_cells(cell: Cell, earlier: Sequence[Record]) -> dict[str, str]:
    """Return {provider: reason} for the providers that would exceed RUN_LIMIT_SECONDS in `cell`.

    The estimate is the provider's time at an earlier cell times the ratio of rows. The earlier cell
    has the same contract and shape apart from its rows, and of several such cells the one with the
    most rows counts. Without a time in the dtype of `cell`, the time in float32 stands in: on CPUs
    without 16-bit instructions 16 bits are slower still.
    """
    reasons: dict[str, str] = {}
    wanted = describe(cell)
    same_but_rows = [
        other
        for other in earlier
        if all(other[name] == wanted[name] for name in wanted if name not in SCALED_FIELDS)
    ]
    for dtype in ("float32", wanted["dtype"]):
        cells = [other for other in same_but_rows if other["dtype"] == dtype]
        for other in sorted(cells, key=lambda one: one["rows"]):
            for row in other["providers"]:
                seconds = _seconds_of_a_run(row)
                if seconds is None:
                    continue
                # More rows, and then the dtype of `cell`, replace what was found before.
                reasons.pop(row["name"], None)
                estimate = seconds * cell.rows / other["rows"]
                if estimate > RUN_LIMIT_SECONDS:
                    reasons[row["name"]] = (
                        f"a run would take about {estimate:.0f} s"
                        f" ({seconds:.1f} s at {other['rows']:,} rows)"
                    )
    return reasons


def _seconds_of_a_run(row: Row) -> float | None:
    """Return how long a run of this provider took, or None if it was not run."""
    if "run_seconds" in row:  # it exceeded the limit
        return row["run_seconds"]
    return row["ms"] / 1e3 if "ms" in row else None


def with_sum_of_parts(rows: list[Row], times: dict[str, Row]) -> list[Row]:
    """The rows, with one row for each limit that has parts: the sum of the fastest way to compute
    each part. The row's "ways" are the milliseconds of all ways, or the reasons why they have none;
    "of" names the fastest. Its times are added to `times`.
    """
    ways = {row["name"]: row for row in rows if row.get("part")}
    if not ways:
        return rows
    others = [row for row in rows if row["name"] not in ways]
    shown = {
        name: times[name]["ms"] if name in times else row["reason"] for name, row in ways.items()
    }
    whole: Row = {"name": "products", "limit": True, "ways": shown, "status": "ok"}
    parts: dict[str, list[str]] = {}
    for name, row in ways.items():
        parts.setdefault(row["part"], []).extend([name] if name in times else [])
    if not all(parts.values()):
        return [
            *others,
            whole | {"status": "failed", "reason": "one of the products was made in no way"},
        ]
    fastest = [min(names, key=lambda name: times[name]["ms"]) for names in parts.values()]
    times["products"] = {
        key: sum(times[name][key] for name in fastest) for key in ("ms", "p20", "p80")
    }
    times["products"]["runs"] = min(times[name]["runs"] for name in fastest)
    return [*others, whole | {"of": fastest}]


def describe(cell: Cell) -> Record:
    """The cell's shape as the result files have it."""
    return asdict(cell) | {"dtype": str(cell.dtype).removeprefix("torch.")}


def outside_gate(cell: Cell, found: dict[str, float]) -> str | None:
    """The first error that rounding cannot explain, in words; None if there is none."""
    for name, value in found.items():
        kind = (
            "worst row"
            if name.endswith("worst row")
            else "gradient"
            if name.startswith("d_")
            else name
        )
        kind = {"gradients": "parameter", "logps": "value", "entropy": "value"}.get(kind, kind)
        most = (FULL if cell.dtype == torch.float32 else HALF)[kind]
        if cell.contract in (*DIRECTIONS, "draft") and kind == "worst row":
            # where two rows nearly agree, their difference is mostly the rounding of the logits
            most *= 2
        if not value <= most:  # NaN as well
            return f"{name} is off by {value:.1e}, limit {most:.0e}"
    return None


def derived(cell: Cell, ms: float) -> Row:
    """Rates from a time. GB/s: as if the logits were read once (1U), or read and written once (2U).
    TFLOP/s: of the products that are needed, where rows of zero advantage (a share 1 - a) take part
    in the first product only.
    """
    if cell.contract in (
        "step",
        "kept",
        "trees",
        "draft",
        *DIRECTIONS,
    ):  # whose work is not known before, or has no one rate
        return {}
    if cell.hidden is None:
        rate = cell.rows * cell.vocab * cell.dtype.itemsize / 1e6 / ms
        return {"gbps_1u": rate} if cell.contract == "logits-forward" else {"gbps_2u": 2 * rate}
    backward = {"hidden-frozen": 2, "gspo-frozen": 2, "hidden-forward": 0}.get(cell.contract, 4)
    a = cell.active_rows / cell.rows
    convention = f"{2 + backward}NHV" if a == 1 or not backward else f"(2+{backward}a)NHV, a={a:g}"
    return {
        "tflops": (2 + backward * a) * cell.rows * cell.hidden * cell.vocab / ms / 1e9,
        "flop_convention": convention,
    }


def _attempt(provider: Provider, device: str, step: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return step()
    except Unavailable:
        raise
    except (
        Exception
    ) as failure:  # a peer's code may raise anything; the other providers are still measured
        reason = first_line(failure)
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise DeviceLost(provider.name, reason) from lost
    _free(device)
    raise _Failed(reason)


def _restore(run: Run) -> None:
    if run.restore is not None:
        run.restore()


def _fresh(run: Run) -> Callable[[], Any]:
    """Its call, on restored inputs."""
    _restore(run)
    return run.call


def _alloc_retries(device: str) -> int:
    """How often CUDA's allocator had to free memory and try again.

    Times with such runs among them are not reliable.
    """
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if device == "cuda" else 0


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
