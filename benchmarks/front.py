"""The picture and the table at the top of the README: the cell where we are furthest ahead of all others, and the cell where we are
furthest behind or least ahead.

Both are chosen by one rule from the result files, not by hand. The rule compares, in every measured cell with other
implementations, the time of the fastest correct other implementation with the fastest of ours. Cells with fewer rows than a
training batch are left out, and those over kept sets and of sparse gradients: no other project has these operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.cell_tables import BATCH, DTYPES, Cell, Record, figure, megabytes, size
from benchmarks.pictures import Bar, Bars, Picture, duration
from benchmarks.printing import render
from benchmarks.suites import EAGER, OURS, SUITES

NAME = "front"
SCALED = "upstream 0.5"  # a variant of ours that only the tables show
COLUMNS = 2  # of the picture: time, memory
WITHOUT_PEERS = ("kept", "sparse")


class Standing(NamedTuple):
    """One cell: the fastest of ours, and the fastest correct other implementation."""

    record: Record
    cell: Cell
    ours: dict[str, Any]
    peer: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Above 1: ours is faster."""
        return float(self.peer["ms"] / self.ours["ms"])

    @property
    def title(self) -> str:
        return f"{self.record['title']}, {DTYPES[self.cell['dtype']]}, {size(self.cell)}"


def _checked(row: dict[str, Any]) -> bool:
    """Whether it was timed and right: without errors are limits, and another contract that stands beside this one."""
    return row["status"] == "ok" and "errors" in row


def standings(folder: Path, machine: str) -> list[Standing]:
    """The standings of all cells of a training batch that have both, the strongest first."""
    found = []
    for suite in SUITES:
        if suite in WITHOUT_PEERS:
            continue
        record = results.load(folder / machine / f"{suite}.json")
        for cell in (cell for cell in record.get("cells", ()) if cell["rows"] >= BATCH):
            right = [row for row in cell["providers"] if _checked(row)]
            ours = [row for row in right if row["name"].startswith(OURS)]
            peers = [row for row in right if not row["name"].startswith(OURS)]
            if ours and peers:
                fastest = (min(rows, key=lambda row: row["ms"]) for rows in (ours, peers))
                found.append(Standing(record, cell, *fastest))
    return sorted(found, key=lambda standing: -standing.ratio)


def extremes(folder: Path, machine: str) -> list[tuple[str, Standing]]:
    """The strongest and the weakest cell; empty if nothing was measured."""
    ranked = standings(folder, machine)
    return [("strongest", ranked[0]), ("weakest", ranked[-1])] if ranked else []


# ---- the table


def table(folder: Path, machine: str) -> str:
    rows = [
        [
            f"of all cells of {BATCH} rows or more",
            "ours",
            "fastest other that passes the check",
            "eager PyTorch",
            "ours is faster by",
        ]
    ]
    for which, standing in extremes(folder, machine):
        eager = [row for row in standing.cell["providers"] if row["name"] == EAGER and row["status"] == "ok"]
        rows.append([
            f"{which}: {standing.title}", _way(standing.ours) + _cost(standing.ours), f"{standing.peer['name']}: {_cost(standing.peer)}",
            _cost(eager[0]) if eager else "", f"x {standing.ratio:.2f}",
        ])  # fmt: skip
    return render(rows, markdown=True)


def _way(row: dict[str, Any]) -> str:
    """Which of ours it is: the part of its name behind the package's."""
    way = row["name"].removeprefix(OURS).removeprefix(", ")
    return f"{way}: " if way else ""


def _cost(row: dict[str, Any]) -> str:
    return f"{figure(row['ms'])} ms, {megabytes(row) or '0'} MB"


# ---- the picture


def picture(folder: Path, machine: str) -> Picture:
    """Two panels of each of the two cells: time, and memory beyond the inputs."""
    cells = extremes(folder, machine)
    panels: list[Any] = [panel for which, standing in cells for panel in _panels(which, standing)]
    m = cells[0][1].record["machine"]
    where = f"{m['name']}, {m['threads']} threads" if m["device"] == "cpu" else m["name"]
    note = (
        f"Every contender was checked against float64 first. The two cells are chosen by rule from all of {BATCH} rows or more."
    )
    return Picture(f"Where we are strongest, and where weakest · {where}", panels, [note])


def _panels(which: str, standing: Standing) -> list[Bars]:
    timed = [row for row in standing.cell["providers"] if _checked(row)]
    right = [row for row in timed if not row["name"].endswith(SCALED)]
    wrong = [row["name"] for row in standing.cell["providers"] if row["status"] == "wrong"]
    times = [Bar(row["name"], round(row["ms"], 3), duration(row["ms"])) for row in right]
    memory = [Bar(row["name"], round(row["extra_mb"], 1), f"{megabytes(row) or '0'} MB") for row in right if "extra_mb" in row]
    return [
        Bars(f"{which.capitalize()}. {standing.title}", "time, ms", None, times, wrong),
        Bars("", "extra memory, MB", None, memory, wrong),
    ]
