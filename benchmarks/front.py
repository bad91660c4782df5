"""The picture and the table at the top of the README: on each machine the cell where we are furthest ahead of all others, and the
cell where we are furthest behind or least ahead.

Both are chosen by one rule from the result files, not by hand. The rule compares, in every measured cell with other
implementations, the time of the fastest correct other implementation with the fastest of ours. Cells with fewer rows than a
training batch are left out, and those over kept sets and of sparse gradients: no other project has these operations.

The same files say whether the package keeps its promise: from PROMISED rows on, nothing is slower than plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.cell_tables import BATCH, DTYPES, Cell, Record, figure, megabytes, processor, size, source
from benchmarks.pictures import Bar, Bars, Picture, duration
from benchmarks.printing import render
from benchmarks.suites import EAGER, OURS, SUITES
from grpo_kernels.diagnosis.step import MOST_TIMES

NAME = "front"
SCALED = "upstream 0.5"  # a variant of ours that only the tables show
COLUMNS = 2  # of the picture: time, memory
WITHOUT_PEERS = ("kept", "sparse")
PROMISED = 64  # rows
#: How the names of plain PyTorch begin: a user who has it needs nothing else.
PLAIN = (EAGER, "pairs in PyTorch", "torch.compile", "torch linear_cross_entropy")


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


def standings(folder: Path, machine: str, plain: bool = False) -> list[Standing]:
    """The standings of all cells of a training batch that have both, the strongest first. plain: against plain PyTorch alone, of
    all cells that the promise is about."""
    found = []
    for suite in SUITES:
        if suite in WITHOUT_PEERS and not plain:
            continue
        record = results.load(folder / machine / f"{suite}.json")
        for cell in (cell for cell in record.get("cells", ()) if cell["rows"] >= (PROMISED if plain else BATCH)):
            right = [row for row in cell["providers"] if _checked(row)]
            ours = [row for row in right if row["name"].startswith(OURS) and "eager backend" not in row["name"]]
            peers = [row for row in right if not row["name"].startswith(OURS)]
            peers = [row for row in peers if row["name"].startswith(PLAIN) or not plain]
            if ours and peers:
                fastest = (min(rows, key=lambda row: row["ms"]) for rows in (ours, peers))
                found.append(Standing(record, cell, *fastest))
    return sorted(found, key=lambda standing: -standing.ratio)


def promise(folder: Path, machine: str) -> tuple[bool, str]:
    """(whether it is kept on this machine, the cells that break it or the line that none does)."""
    compared = standings(folder, machine, plain=True)
    broken = [standing for standing in reversed(compared) if standing.ratio * MOST_TIMES < 1]
    what = f"of {len(compared)} cells of {PROMISED} rows or more on {machine}"
    if not broken:
        return True, f"Slower than plain PyTorch (eager, torch.compile, linear_cross_entropy) by more than 5 %: none {what}."
    lines = [f"  {one.title}: {_span(one.ours)}, {_span(one.peer)}: {1 / one.ratio:.2f} times as long" for one in broken]
    remedy = "`python -m grpo_kernels doctor` compares the products that can run here; GRPO_KERNELS_PRODUCTS chooses others."
    return False, "\n".join([f"Slower than plain PyTorch by more than 5 %: {len(broken)} {what}:", *lines, remedy])


def _span(row: dict[str, Any]) -> str:
    return f"{row['name']} {figure(row['ms'])} ms ({figure(row['p20'])} to {figure(row['p80'])})"


def extremes(folder: Path, *machines: str) -> list[tuple[str, Standing]]:
    """The strongest and the weakest cell of each; nothing of one where nothing was measured."""
    ranked = [found for name in machines if (found := standings(folder, name))]
    return [extreme for found in ranked for extreme in (("strongest", found[0]), ("weakest", found[-1]))]


# ---- the table


def table(folder: Path, machines: list[str]) -> str:
    head = [
        f"of all cells of {BATCH} rows or more",
        "ours",
        "fastest other that passes the check",
        "eager PyTorch",
        "ours is faster by",
    ]
    rows = [head]
    for which, standing in extremes(folder, *machines):
        eager = [row for row in standing.cell["providers"] if row["name"] == EAGER and row["status"] == "ok"]
        rows.append([
            f"{processor(standing.record)}, {which}: {standing.title}", _way(standing.ours) + _cost(standing.ours),
            f"{standing.peer['name']}: {_cost(standing.peer)}", _cost(eager[0]) if eager else "", f"x {standing.ratio:.2f}",
        ])  # fmt: skip
    return render(rows, markdown=True)


def sources(folder: Path, machines: list[str]) -> str:
    """Where the lines of the table come from."""
    return "\n".join(f"- {which}: {source(standing.record)}" for which, standing in extremes(folder, *machines))


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
    note = (
        f"Every contender was checked against float64 first. The two cells are chosen by rule from all of {BATCH} rows or more."
    )
    return Picture(f"Where we are strongest, and where weakest · {processor(cells[0][1].record)}", panels, [note])


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
