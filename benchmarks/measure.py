"""Measure one cell of a table: check every provider against float64, then time them in turns.

A provider that fails the check is not timed; its row shows the errors. A provider that cannot take
part, fails, or needs too long for a run has a row with the reason.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
    """A provider broke CUDA for this process: only a new process can use CUDA again.

    provider    name of the provider
    reason      its error, one line
    """

    def __init__(self, provider: str, reason: str) -> None:
        super().__init__(f"{provider}: {reason}")
        self.provider = provider
        self.reason = reason


class _Failed(Exception):
    """A provider raised an error. The message is one line."""


@dataclass
class _Contender:
    """A provider in a cell: its row of the result file, and its run once it may be timed."""

    provider: Provider
    row: Row
    run: Run | None = None  # None: not checked yet, or it failed

    @property
    def is_compared(self) -> bool:
        """Whether its results are those of the contract, so that they can be checked."""
        return not self.provider.limit and not self.provider.differs_from_contract


def measure(
    cell: Cell,
    device: str,
    *,
    only: tuple[str, ...] | None = None,
    seconds: float = 1.0,
    least: int = 3,
    most: int = 50,
    memory: bool = True,
    known: dict[str, str] | None = None,
    candidates: list[Provider] | None = None,
    save: Callable[[Record], None] | None = None,
    earlier: Sequence[Record] = (),
) -> Record:
    """Check and time the providers of a cell, and return the record for the result file.

    only        names of the providers that take part in addition to the limits. None: all
    seconds, least, most
                seconds of timing and number of runs of each provider, see harness.interleaved
    memory      whether to measure the peak memory of each provider
    known       {provider: reason} of failures in an earlier process. They are not tried again
    candidates  providers to choose from. None: all that are registered for the contract
    save        called after each provider with the results so far, marked "unfinished". Their times
                are from a few runs only
    earlier     records of cells that were measured before. On a CPU, a provider that was too slow
                there is skipped, see too_slow_by_earlier_cells
    """
    begin = time.perf_counter()
    # Otherwise torch.compile would generalise from the shapes of earlier cells.
    torch._dynamo.reset()
    case = make_case(cell, device)
    expected = _expected_results(case)
    failures = known or {}
    slow = too_slow_by_earlier_cells(cell, earlier) if device == "cpu" else {}
    contenders = [_Contender(p, _new_row(p)) for p in _choose(cell, candidates, only)]

    unfinished: list[Row] = []
    # Providers that compile for long come last, so that a cell that is cut off has the others.
    for contender in sorted(contenders, key=lambda contender: contender.provider.late):
        name = contender.provider.name
        _check(
            contender,
            case,
            expected,
            device,
            with_memory=memory,
            failure=failures.get(name),
            slowness=slow.get(name),
        )
        if save is not None:
            first_times = _time([contender], device, seconds=0.1, least=3, most=5)
            unfinished.append(contender.row | first_times.get(name, {}))
            save(describe(cell) | {"limit": None, "providers": unfinished, "unfinished": True})
    del expected
    _free(device)

    retries_before = _alloc_retries(device)
    times = _time(contenders, device, seconds=seconds, least=least, most=most)
    state: Record = {}
    if device == "cuda":
        retries = _alloc_retries(device) - retries_before
        state = {"gpu": gpu_state(device), "alloc_retries": retries}

    rows = with_sum_of_parts([contender.row for contender in contenders], times)
    for row in rows:
        if row["status"] == "ok":
            row.update(times[row["name"]])
            row.update(derived(cell, row["ms"]))
            if "copy" in times:
                row["x_copy"] = row["ms"] / times["copy"]["ms"]
    limits = [row for row in rows if row.get("limit") and "ms" in row]
    limit = None
    if limits:
        fastest = min(limits, key=lambda row: row["ms"])
        limit = {"name": fastest["name"], "ms": fastest["ms"]}
    elapsed = round(time.perf_counter() - begin, 1)
    return describe(cell) | {"limit": limit, "providers": rows, "seconds": elapsed} | state


def _choose(
    cell: Cell, candidates: list[Provider] | None, only: tuple[str, ...] | None
) -> list[Provider]:
    """Return the providers that take part in a cell. Limits always do.

    candidates  providers to choose from. None: all that are registered for the contract
    only        names of the providers that take part in addition to the limits. None: all
    """
    every = providers(cell.contract) if candidates is None else candidates
    chosen = [p for p in every if only is None or p.limit or p.name in only]
    if cell.accumulation == 1:
        chosen = [p for p in chosen if not p.needs_accumulation]
    return chosen


def _expected_results(case: Case) -> Record:
    """Return the results of `reference`. Gradients are divided by the number of micro-batches.

    Providers divide the loss by this number before its backward, but return the loss itself.
    """
    expected = reference(case)
    for name in expected:
        if name.startswith("d_"):
            expected[name] = expected[name] / case.cell.accumulation
    return expected


def _new_row(provider: Provider) -> Row:
    """Return a row without results. `limit` and `part` are left out where they do not apply."""
    row: Row = {"name": provider.name}
    if provider.limit:
        row["limit"] = True
    if provider.part:
        row["part"] = provider.part
    return row


# ---- before the timing


def _check(
    contender: _Contender,
    case: Case,
    expected: Record,
    device: str,
    *,
    with_memory: bool,
    failure: str | None,
    slowness: str | None,
) -> None:
    """Run a provider, compare its results with float64, and measure its memory.

    Sets `contender.run` if the provider may be timed. The row gets "status", which is "ok",
    "skipped", "failed" or "wrong", and a "reason" unless it is "ok".

    failure     the provider's error in an earlier process, which must not be repeated
    slowness    why a run would exceed RUN_LIMIT_SECONDS
    """
    provider = contender.provider
    row = contender.row
    try:
        _raise_if_ruled_out(provider, case.cell, device, failure, slowness)
        run = _attempt(provider, device, lambda: provider.make(case))
        baseline = None
        if device == "cuda":
            # Memory that the provider keeps between runs counts, so this precedes the first run.
            # On a CPU the provider's code would count too.
            baseline = memory_in_use(device)
        reason = _compare(contender, run, case, expected, device)
        if reason is not None:
            row |= {"status": "wrong", "reason": reason}
            return
        if contender.is_compared and with_memory:
            peak = _attempt(provider, device, lambda: _peak_memory(run, device, baseline))
            row["extra_mb"] = peak / 1e6
    except Unavailable as missing:
        row |= {"status": "skipped", "reason": str(missing)}
    except _Failed as error:
        row |= {"status": "failed", "reason": str(error)}
    else:
        row["status"] = "ok"
        contender.run = run


def _raise_if_ruled_out(
    provider: Provider, cell: Cell, device: str, failure: str | None, slowness: str | None
) -> None:
    """Raise Unavailable or _Failed if it is known without a run that there is nothing to time.

    failure     the provider's error in an earlier process, or None
    slowness    why a run would exceed RUN_LIMIT_SECONDS, or None
    """
    reason = provider.reason_against(cell, device, 0.9 * memory_free(device))
    if reason is not None:
        raise Unavailable(reason)
    if failure is not None:
        raise _Failed(failure)
    if slowness is not None:
        raise Unavailable(slowness)


def _compare(
    contender: _Contender, run: Run, case: Case, expected: Record, device: str
) -> str | None:
    """Run a provider once and compare its results with float64.

    Returns what is wrong, or None. Limits are not compared, but on a CPU they run as well. There,
    Unavailable is raised if the run takes longer than RUN_LIMIT_SECONDS.
    """
    provider = contender.provider
    row = contender.row
    result = None
    if device == "cpu":
        result, seconds = _attempt(provider, device, lambda: _first_run(provider, run))
        if seconds > RUN_LIMIT_SECONDS:
            row["run_seconds"] = round(seconds, 1)
            raise Unavailable(
                f"one run takes {seconds:.0f} s, more than the limit of {RUN_LIMIT_SECONDS:.0f} s"
            )
    elif contender.is_compared:
        result = _attempt(provider, device, lambda: _run_once(run))
    if not contender.is_compared:
        return None
    scale = float(case.batch.advantages.abs().mean())
    row["errors"] = _attempt(provider, device, lambda: errors(result, expected, scale))
    return outside_gate(case.cell, row["errors"])


def _first_run(provider: Provider, run: Run) -> tuple[Any, float]:
    """Return the result of a run on a CPU and its seconds.

    The first run of a provider that compiles may take longer than the limit although later runs do
    not, so that its second run counts.
    """
    _restore(run)
    result, ms, _ = timed(run.call, "cpu")
    if provider.late and ms > 1e3 * RUN_LIMIT_SECONDS:
        del result  # so that two results are never in memory at once
        _restore(run)
        result, ms, _ = timed(run.call, "cpu")
    return result, ms / 1e3


def _run_once(run: Run) -> Any:
    """Return the result of a run on restored inputs."""
    _restore(run)
    return run.call()


def _peak_memory(run: Run, device: str, baseline: int | None) -> int:
    """Return the peak memory of a run in bytes, without the memory to restore its inputs."""
    _restore(run)
    return peak_memory(run.call, device, baseline)


def _restore(run: Run) -> None:
    """Restore the inputs that the last run has overwritten."""
    if run.restore is not None:
        run.restore()


def too_slow_by_earlier_cells(cell: Cell, earlier: Sequence[Record]) -> dict[str, str]:
    """Return {provider: reason} for the providers that would exceed RUN_LIMIT_SECONDS in `cell`.

    The estimate is the provider's time at an earlier cell times the ratio of rows. The earlier cell
    has the same contract and shape apart from its rows, and of several such cells the one with the
    most rows counts. Without a time in the dtype of `cell`, the time in float32 stands in: on CPUs
    without 16-bit instructions 16 bits are slower still.
    """
    reasons: dict[str, str] = {}
    wanted = describe(cell)
    must_agree = [name for name in wanted if name not in SCALED_FIELDS]
    similar = [
        other for other in earlier if all(other[name] == wanted[name] for name in must_agree)
    ]
    for dtype in ("float32", wanted["dtype"]):
        cells = [other for other in similar if other["dtype"] == dtype]
        for other in sorted(cells, key=lambda earlier_cell: earlier_cell["rows"]):
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


def outside_gate(cell: Cell, found: dict[str, float]) -> str | None:
    """Return the first error that is larger than rounding explains, in words. None: all are small.

    found   {name: error} from cases.errors
    """
    tolerances = FULL if cell.dtype == torch.float32 else HALF
    for name, value in found.items():
        kind = _kind_of_error(name)
        most = tolerances[kind]
        if cell.contract in (*DIRECTIONS, "draft") and kind == "worst row":
            # The gradient is a difference of two distributions. In rows where they nearly agree,
            # it is mostly the rounding of the logits.
            most *= 2
        if not value <= most:  # also true for NaN
            return f"{name} is off by {value:.1e}, limit {most:.0e}"
    return None


def _kind_of_error(name: str) -> str:
    """Return the key of FULL and HALF for the name of an error in cases.errors."""
    if name.endswith("worst row"):
        return "worst row"
    if name.startswith("d_"):
        return "gradient"
    return {"gradients": "parameter", "logps": "value", "entropy": "value"}.get(name, name)


# ---- the timing


def _time(contenders: list[_Contender], device: str, **effort: Any) -> dict[str, Row]:
    """Time the contenders that passed their check, in turns.

    Returns {provider: its times}, see harness.interleaved. A contender that raises is marked as
    "failed" and loses its run.

    effort  `seconds`, `least` and `most` of harness.interleaved
    """
    ready = {
        contender.provider.name: contender for contender in contenders if contender.run is not None
    }
    runs = {name: contender.run for name, contender in ready.items() if contender.run is not None}

    def attempt(name: str, run: Callable[[], float]) -> float | None:
        """Return run(), the milliseconds of a run, or None if it raises."""
        contender = ready[name]
        try:
            return _attempt(contender.provider, device, run)
        except _Failed as failure:
            contender.row |= {"status": "failed", "reason": f"while it was timed, {failure}"}
            contender.run = None
            return None

    return interleaved(
        {name: run.call for name, run in runs.items()},
        device,
        lambda name: _restore(runs[name]),
        attempt=attempt,
        **effort,
    )


def with_sum_of_parts(rows: list[Row], times: dict[str, Row]) -> list[Row]:
    """Replace the rows of limits that are parts by one row "products", their sum.

    Several providers compute the same part in different ways, and the fastest of each part counts.
    In the new row, "ways" has the milliseconds of every way, or the reason why it has none, and
    "of" names the ways that count. The times of "products" are added to `times`.
    """
    ways = {row["name"]: row for row in rows if row.get("part")}
    if not ways:
        return rows
    others = [row for row in rows if row["name"] not in ways]
    products: Row = {"name": "products", "limit": True, "ways": {}, "status": "ok"}
    timed_ways: dict[str, list[str]] = {}  # part: the names of the ways that have times
    for name, row in ways.items():
        names = timed_ways.setdefault(row["part"], [])
        if name in times:
            names.append(name)
            products["ways"][name] = times[name]["ms"]
        else:
            products["ways"][name] = row["reason"]
    if not all(timed_ways.values()):
        reason = "one of the products was made in no way"
        return [*others, products | {"status": "failed", "reason": reason}]
    fastest = [min(names, key=lambda name: times[name]["ms"]) for names in timed_ways.values()]
    total: Row = {key: sum(times[name][key] for name in fastest) for key in ("ms", "p20", "p80")}
    total["runs"] = min(times[name]["runs"] for name in fastest)
    times["products"] = total
    return [*others, products | {"of": fastest}]


# ---- the record of a cell


def describe(cell: Cell) -> Record:
    """Return the fields of a cell as they are in the result files."""
    return asdict(cell) | {"dtype": str(cell.dtype).removeprefix("torch.")}


#: Contracts without a rate: their work depends on the data, or mixes memory traffic and matmuls.
WITHOUT_RATE = ("step", "kept", "trees", "draft", *DIRECTIONS)
#: Multiples of N x H x V operations in the backward: 2 for each gradient. Others need both.
BACKWARD_FLOPS = {"hidden-frozen": 2, "gspo-frozen": 2, "hidden-forward": 0}


def derived(cell: Cell, ms: float) -> Row:
    """Return the rates of a run that took `ms` milliseconds, {} for contracts of WITHOUT_RATE.

    From logits, GB/s as if the logits were read once (gbps_1u) or read and written once (gbps_2u).
    From hidden states, TFLOP/s of the matmuls that are needed. A row of zero advantage needs only
    its logits: with a share `a` of active rows, the backward counts `a` times.
    """
    if cell.contract in WITHOUT_RATE:
        return {}
    if cell.hidden is None:
        gbps = cell.rows * cell.vocab * cell.dtype.itemsize / 1e6 / ms
        return {"gbps_1u": gbps} if cell.contract == "logits-forward" else {"gbps_2u": 2 * gbps}
    # Multiples of N x H x V operations: 2 for the logits, and `backward` for the gradients.
    backward = BACKWARD_FLOPS.get(cell.contract, 4)
    active = cell.active_rows / cell.rows
    if active == 1 or backward == 0:
        convention = f"{2 + backward}NHV"
    else:
        convention = f"(2+{backward}a)NHV, a={active:g}"
    flops = (2 + backward * active) * cell.rows * cell.hidden * cell.vocab
    return {"tflops": flops / ms / 1e9, "flop_convention": convention}


# ---- errors and memory


def _attempt(provider: Provider, device: str, step: Callable[[], Any]) -> Any:
    """Return step(), a part of the measurement of a provider, with warnings switched off.

    Raises Unavailable if the provider does, _Failed for any other error, and DeviceLost if CUDA no
    longer works after it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return step()
    except Unavailable:
        raise
    except Exception as failure:  # other projects' code may raise anything
        reason = first_line(failure)
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise DeviceLost(provider.name, reason) from lost
    _free(device)
    raise _Failed(reason)


def _alloc_retries(device: str) -> int:
    """Return how often CUDA's allocator freed its cache to satisfy a request, 0 on a CPU.

    Times of runs in which this happened are not reliable.
    """
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if device == "cuda" else 0


def _free(device: str) -> None:
    """Free the memory of unreachable tensors, and on CUDA the cache of the allocator."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
