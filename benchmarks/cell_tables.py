"""The cells of a result file as Markdown tables: contenders side by side, everything of one cell, a sweep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.printing import DRAWN, entropy, ways, worst
from benchmarks.roofline import render
from benchmarks.suites import EAGER

Record = dict[str, Any]  # a result file, see results.py
Cell = dict[str, Any]
Row = dict[str, Any]

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
#: The field of a cell that a suite varies, and its description.
SWEEPS = {
    "rows": ("rows", "rows"),
    "vocab": ("vocab", "vocabulary"),
    "active": ("active", "share of sequences with an advantage"),
    "length": ("rows", "tokens in the batch (one sequence from 65,536 on)"),
}


# ---- parts of a result file


def machines(folder: Path, device: str | None = None) -> list[str]:
    """The folders that hold result files of machines, those of CPUs first. device: only these."""
    devices = {path.parent.name: results.load(path)["machine"]["device"] for path in folder.glob("*/*.json")}
    return sorted(
        (name for name in devices if device in (None, devices[name])), key=lambda name: (devices[name] != "cpu", name)
    )


def shapes(records: list[Record]) -> list[list[Cell]]:
    """The cells grouped by shape: those of one group differ in their machine or their dtype."""
    by_shape: dict[tuple, list[Cell]] = {}
    for record in records:
        for cell in record["cells"]:
            shape = (cell["rows"], cell["hidden"], cell["vocab"], cell["active"], cell.get("entropy"))
            by_shape.setdefault(shape, []).append(cell | {"kind": record["machine"]["kind"]})
    return list(by_shape.values())


#: Rows of the smallest training batch that is shown on pages.
BATCH = 256


def headline(*records: Record) -> list[list[Cell]]:
    """The cells of the shapes that are shown: the first and the last that have enough rows for a training batch. records: of one
    suite, on several machines."""
    every = shapes(list(records))
    enough = [cells for cells in every if cells[0]["rows"] >= BATCH] or every
    return [enough[0], enough[-1]] if enough[0][0]["rows"] < enough[-1][0]["rows"] else enough[:1]


def size(cell: Cell) -> str:
    return " x ".join(f"{cell[x]:,}" for x in ("rows", "hidden", "vocab") if cell[x]) + entropy(cell)


def fixed(cell: Cell, varied: str) -> str:
    """The shape without what a suite varies."""
    letters = (("N", "rows"), ("H", "hidden"), ("V", "vocab"))
    return ", ".join(f"{letter} = {cell[x]:,}" for letter, x in letters if x != varied)


def limit(cell: Cell) -> str:
    """The name of what times are divided by."""
    return cell["limit"]["name"].split(",")[0] if cell["limit"] else EAGER


def ratio(cell: Cell, row: Row) -> float | None:
    """The time of a row divided by that of the limit, or by that of eager PyTorch where there is no limit."""
    if cell["limit"]:
        return row["ms"] / cell["limit"]["ms"]
    base = next((r["ms"] for r in cell["providers"] if r["name"] == EAGER and r["status"] == "ok"), None)
    return row["ms"] / base if base else None


def marks(cells: list[Cell], what: str = "dtype") -> list[str]:
    """What tells each cell from the others: the field `what`, and the kind of machine if there are several."""
    several = len({cell.get("kind") for cell in cells}) > 1
    of = [DTYPES[cell["dtype"]] if what == "dtype" else f"{cell[what]:,}" for cell in cells]
    return [f"{cell['kind']} {mark}" if several else mark for cell, mark in zip(cells, of, strict=True)]


def reasons(cells: list[Cell], what: str = "dtype") -> str:
    """The providers that were not timed, one line per reason. Their cells are named by `marks`, unless it is all of them. "" if
    all were timed."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for cell, mark in zip(cells, marks(cells, what), strict=True):
        for row in cell["providers"]:
            if row["status"] != "ok":
                by_reason.setdefault(f"{row['status']}, {row['reason']}", {}).setdefault(row["name"], []).append(mark)
    return "".join(f"\n- {reason}: {named(names, len(cells))}" for reason, names in by_reason.items())


def named(names: dict[str, list[str]], every: int) -> str:
    """The providers, each with its cells, unless it is all of them."""
    return "; ".join(name if len(cells) == every else f"{name} [{', '.join(cells)}]" for name, cells in names.items())


def processor(record: Record) -> str:
    """What the figures of a result file depend on most."""
    m = record["machine"]
    parts = [m["name"]] if m["device"] == "cuda" else [m["name"], f"{m['threads']} threads"]
    parts += [m[x] for x in ("instruction set", "neighbour") if x in m]
    return ", ".join(parts + [f"products by {x}" for x in [m.get("products")] if x not in (None, m.get("instruction set"))])


def source(record: Record, packages: bool = False) -> str:
    """The machine and the command of a result file, in a line."""
    m = record["machine"]
    parts = [processor(record), f"torch {m['torch']}"]
    if packages:
        parts += [f"{name} {version}" for name, version in m["versions"].items()]
    return f"{', '.join(parts)}; {record['date']}; `{record['command']}`."


# ---- numbers


def figure(x: float | None, digits: int = 3) -> str:
    """`digits` significant digits, and always all digits before the point."""
    if x is None:
        return ""
    places = digits - 1 - math.floor(math.log10(abs(x))) if x else 0
    return f"{x:,.{max(0, places)}f}"


def milliseconds(row: Row) -> str:
    """The median; where there are two kinds of runs, the median of each and its share."""
    if not row.get("modes"):
        return figure(row["ms"])
    return " or ".join(f"{figure(ms)} ({share:.0%})" for ms, share in row["modes"])


def times(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}" if x < 100 else f"{x:.0f}"


def megabytes(row: Row) -> str:
    return "" if row.get("extra_mb") is None else f"{row['extra_mb']:,.0f}"


# ---- tables


def comparison(cells: list[Cell]) -> str:
    """Cells of one shape side by side, of one machine or of several: the providers that were timed, then the reasons of the
    others."""
    head = [size(cells[0])]
    for cell, mark in zip(cells, marks(cells), strict=True):
        head += [f"{mark} ms", f"x {limit(cell)}", "extra MB"]
    head.append("worst error " + " / ".join(marks(cells)))
    lines = [head]
    for name in dict.fromkeys(row["name"] for cell in cells for row in cell["providers"]):
        line, errors, label = [], [], name
        for cell in cells:
            row = next((r for r in cell["providers"] if r["name"] == name and r["status"] == "ok"), None)
            line += ["", "", ""] if row is None else [milliseconds(row), times(ratio(cell, row)), megabytes(row)]
            errors.append(worst(row) if row else "")
            if row and row.get("limit"):
                label = f"{name} (limit)"
        if any(line):
            lines.append([label, *line, " / ".join(e for e in errors if e)])
    return render(lines, markdown=True) + _without(reasons(cells))


def multiples(records: dict[str, Record]) -> str:
    """{what a record computes: record}: each contender's time as a multiple of the limit, a column per cell."""
    cells = {
        f"{DTYPES[cell['dtype']]}, {what}, {cell['rows']:,} rows": {
            row["name"]: times(ratio(cell, row)) for row in cell["providers"] if row["status"] == "ok" and not row.get("limit")
        }
        for what, record in records.items()
        for cell in record["cells"]
    }
    names = dict.fromkeys(name for found in cells.values() for name in found)
    lines = [["", *cells], *([name, *(found.get(name, "") for found in cells.values())] for name in names)]
    return render(lines, markdown=True)


def details(cell: Cell) -> str:
    """A cell with everything that was measured of it."""
    timed = [row for row in cell["providers"] if row["status"] == "ok"]
    rates = {
        "gbps_1u": "GB/s (1U)",
        "gbps_2u": "GB/s (2U)",
        "gbps_3u": "GB/s (3U)",
        "tflops": f"TFLOP/s ({next((r['flop_convention'] for r in timed if 'flop_convention' in r), '')})",
        "tflops_dense": "as if dense",
    }
    rates = {key: head for key, head in rates.items() if any(key in row for row in timed)}
    errors = list(dict.fromkeys(name for row in timed for name in row.get("errors", {})))
    head = [
        f"{size(cell)}, {DTYPES[cell['dtype']]}", "ms", "p20", "p80", "runs", f"x {limit(cell)}", "x copy", *rates.values(), "% of limit",
        "extra MB", *(f"error of {name}" for name in errors), "compiles", "syncs",
    ]  # fmt: skip
    lines = [head]
    for row in timed:
        x = ratio(cell, row)
        lines.append(
            [
                row["name"] + (" (limit)" if row.get("limit") else ""),
                milliseconds(row),
                *(figure(row[key]) for key in ("p20", "p80")),
                str(row["runs"]),
                times(x),
                times(row.get("x_copy")),
                *(figure(row.get(key)) for key in rates),
                f"{100 / x:.0f}" if x and cell["limit"] else "",
                megabytes(row),
                *(f"{row['errors'][name]:.0e}" if name in row.get("errors", {}) else "" for name in errors),
                *("" if row.get(key) is None else str(row[key]) for key in ("compiles", "syncs")),
            ]
        )
    kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in lines[1:])]
    sums = [f"{row['name']} (limit), ms: {ways(row)}." for row in timed if row.get("ways")]
    sums += [f"{DRAWN}."] if any(row.get("drawn") for row in timed) else []
    return "\n\n".join([render([[line[i] for i in kept] for line in lines], markdown=True), *sums]) + _without(reasons([cell]))


def _without(lines: str) -> str:
    return f"\n\nNot timed:\n{lines}" if lines else ""


def sweep(record: Record) -> str:
    """Times and memory by what the suite varies, a table per dtype."""
    field, what = SWEEPS[record["suite"]]
    out = []
    for dtype in dict.fromkeys(cell["dtype"] for cell in record["cells"]):
        cells = [cell for cell in record["cells"] if cell["dtype"] == dtype]
        names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["providers"]))
        values = [f"{cell[field]:,g}" if field == "active" else f"{cell[field]:,}" for cell in cells]
        for unit, show in (("ms (x limit)", _time_cell), ("extra MB", lambda cell, row: megabytes(row))):
            lines = [[f"{unit} by {what}, {DTYPES[dtype]}, {fixed(cells[0], field)}", *values]]
            for name in names:
                rows = [next((r for r in cell["providers"] if r["name"] == name), None) for cell in cells]
                line = [
                    "" if row is None else show(cell, row) if row["status"] == "ok" else row["status"]
                    for cell, row in zip(cells, rows, strict=True)
                ]
                limiting = any(row and row.get("limit") for row in rows)
                if any(row and row["status"] == "ok" for row in rows) and not (limiting and unit == "extra MB"):
                    lines.append([name + (" (limit)" if limiting else ""), *line])
            out.append(render(lines, markdown=True))
        out[-1] += _without(reasons(cells, field))
    return "\n\n".join(out)


def _time_cell(cell: Cell, row: Row) -> str:
    return f"{milliseconds(row)} ({times(ratio(cell, row))})"
