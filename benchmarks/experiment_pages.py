"""Shared by the pages of experiments with training runs: tables, means over seeds, curves, pictures that contain their data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.experiments import Record
from benchmarks.plots import STYLE, TEXT


def made_by(record: Record) -> str:
    m = record["machine"]
    return f"{m['name']}, {m['threads']} threads, torch {m['torch']}, {record['date']}; `{record['command']}`."


def block(record: Record, command: str, tables: Iterable[Callable[[Record], Iterable[str]]]) -> str:
    """The generated part of a page: a line that says how it was made, and the tables. Without a record, the command to run."""
    if not record:
        return f"Not measured yet: `{command}`."
    return "\n".join([made_by(record), *(line for table in tables for line in ("", *table(record)))])


def chosen(record: Record, part: str) -> list[Record]:
    return [run for run in record["runs"] if run["part"] == part]


def by(runs: list[Record], *fields: str) -> dict[tuple, list[Record]]:
    """The runs grouped by the values of these fields."""
    groups: dict[tuple, list[Record]] = {}
    for run in runs:
        groups.setdefault(tuple(run[field] for field in fields), []).append(run)
    return groups


def mean(values: list[float]) -> float:
    return statistics.fmean(values)


def with_spread(values: list[float], form: str) -> str:
    """Mean and standard deviation over the seeds. One seed has no deviation; no seed gives ""."""
    if len(values) < 2:
        return "".join(format(value, form) for value in values)
    return f"{mean(values):{form}} ± {statistics.stdev(values):{form}}"


def over_seeds(curves: list[list[float]]) -> list[float]:
    return [float(f"{mean(list(values)):.4g}") for values in zip(*curves, strict=True)]


# ---- the pictures


def drawn(size: tuple[float, float], fill: Callable[[Figure], None]) -> Figure:
    with matplotlib.rc_context(STYLE):
        page = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(page)
        page.patch.set_alpha(0)
        fill(page)
    return page


def framed(axes: Axes, title: str, below: str) -> None:
    axes.patch.set_alpha(0)
    axes.set_title(title)
    axes.set_xlabel(below)
    axes.grid(color=TEXT, alpha=0.2, linewidth=0.5)


def lines(
    axes: Axes, names: dict, colours: dict, curves: dict[str, list[list[float]]], means: dict[str, list[float]],
    at: Callable[[int], list[float]],
) -> None:  # fmt: skip
    """A thin line for each seed, and their mean. at(n) returns the steps of n numbers."""
    for arm, of_seeds in curves.items():
        for curve in of_seeds:
            axes.plot(at(len(curve)), curve, color=colours[arm], linewidth=0.5, alpha=0.5)
        axes.plot(at(len(means[arm])), means[arm], color=colours[arm], linewidth=1.8, label=names[arm])


def legend(page: Figure, columns: int, axes: Axes) -> None:
    page.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False, labelcolor=TEXT)


def save(page: Figure, path: Path, title: str, description: str) -> None:
    """`description`, the numbers that the picture shows, becomes a field of its file."""
    with matplotlib.rc_context(STYLE):
        page.savefig(path, metadata={"Date": None, "Title": title, "Description": description})
