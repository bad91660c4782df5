"""What the pictures of the result files show, in plain numbers; plots.py draws them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cell_tables import (
    DTYPES,
    SWEEPS,
    Cell,
    Record,
    figure,
    fixed,
    headline,
    limit,
    marks,
    megabytes,
    named,
    ratio,
    size,
    times,
)


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    label: str


@dataclass(frozen=True)
class Bars:
    title: str
    axis: str
    mark: float | None  # where the limit is
    bars: list[Bar]
    wrong: list[str]  # providers that are named without a bar


@dataclass(frozen=True)
class Curve:
    name: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Curves:
    title: str
    x_axis: str
    y_axis: str
    log: bool
    curves: list[Curve]


@dataclass(frozen=True)
class Picture:
    title: str
    panels: list[Bars | Curves]  # if all cells are of one kind
    notes: list[str]  # the providers that are missing


def picture(record: Record) -> Picture:
    """Bars of the first shape, a panel per dtype, or curves of time and memory over what the suite varies."""
    m = record["machine"]
    title = f"{record['title']} · {m['name']}" + (f", {m['threads']} threads" if m["device"] == "cpu" else "")
    if record["suite"] in SWEEPS:
        dtypes = dict.fromkeys(cell["dtype"] for cell in record["cells"])
        return Picture(
            title, [panel for dtype in dtypes for panel in _curves(record, dtype)], _missing(record, record["cells"])
        )
    cells = headline(record)[0]
    panels: list[Bars | Curves] = [_time(cell) for cell in cells]
    if record["suite"] == "step":
        panels += [_memory(cell) for cell in cells]
    return Picture(title, panels, _missing(record, cells))


def _contenders(cell: Cell, status: str = "ok") -> list[dict]:
    return [row for row in cell["providers"] if row["status"] == status and not row.get("limit")]


def _time(cell: Cell) -> Bars:
    title, wrong = f"{DTYPES[cell['dtype']]}, {size(cell)}", [row["name"] for row in _contenders(cell, "wrong")]
    ratios = [(row, ratio(cell, row)) for row in _contenders(cell)]
    if any(x is None for _, x in ratios):  # there is neither a limit nor a baseline
        return Bars(
            title, "time, ms", None, [Bar(row["name"], _round(row["ms"]), duration(row["ms"])) for row, _ in ratios], wrong
        )
    bars = [Bar(row["name"], _round(x), f"{times(x)}×  {duration(row['ms'])}") for row, x in ratios if x is not None]
    base = f"limit ({limit(cell)}: {duration(cell['limit']['ms'])})" if cell["limit"] else limit(cell)
    return Bars(title, f"time, × {base}", 1.0, bars, wrong)


def _memory(cell: Cell) -> Bars:
    bars = [Bar(row["name"], _round(row["extra_mb"]), f"{megabytes(row)} MB") for row in _contenders(cell) if megabytes(row)]
    return Bars("memory", "extra memory, MB", None, bars, [row["name"] for row in _contenders(cell, "wrong")])


def _curves(record: Record, dtype: str) -> list[Curves]:
    field, what = SWEEPS[record["suite"]]
    cells = sorted((cell for cell in record["cells"] if cell["dtype"] == dtype), key=lambda cell: cell[field])
    title = f"{DTYPES[dtype]}, {fixed(cells[0], field)}"
    panels = []
    for key, axis, unit, thousand in (("ms", "time", "ms", "s"), ("extra_mb", "extra memory", "MB", "GB")):
        found: dict[str, list[tuple[float, float]]] = {}
        for cell in cells:
            for row in cell["providers"]:
                if row["status"] == "ok" and row.get(key):
                    found.setdefault(row["name"], []).append((cell[field], row[key]))
        large = max((y for points in found.values() for _, y in points), default=0) >= 10_000
        curves = [
            Curve(name, [x for x, _ in points], [_round(y / 1000 if large else y) for _, y in points])
            for name, points in found.items()
        ]
        log = field == "rows"
        scale = " (log)" if log else ""
        panels.append(Curves(title, what + scale, f"{axis}, {thousand if large else unit}{scale}", log, curves))
    return panels


def _missing(record: Record, cells: list[Cell]) -> list[str]:
    """The providers that were skipped, failed or, in a sweep, wrong; and the cells, unless it is all of them."""
    field = SWEEPS[record["suite"]][0] if record["suite"] in SWEEPS else "dtype"
    by_reason: dict[str, dict[str, list[str]]] = {}
    for cell, mark in zip(cells, marks(cells, field), strict=True):
        for row in cell["providers"]:
            if row["status"] != "ok" and (row["status"] != "wrong" or field != "dtype"):
                by_reason.setdefault(row["status"], {}).setdefault(row["name"], []).append(mark)
    return [f"{status}: {named(names, len(cells))}" for status, names in by_reason.items()]


def duration(ms: float) -> str:
    return f"{figure(ms)} ms" if ms < 10_000 else f"{figure(ms / 1000)} s"


def _round(x: float) -> float:
    """Four digits, which is what a picture can show."""
    return float(f"{x:.4g}")
