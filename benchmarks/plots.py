"""Plot result files as SVG and PNG, for light and dark pages.

A picture is described by plain data, {"title", "panels", "notes"}. Its file contains this data, so
that a test can compare it with the result file. A panel has "bars", [[name, value, label], ...], or
"curves", {name: [x values, y values]}, and "x", the label of its horizontal axis.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks import results
from benchmarks.report import README_MACHINE, SCALED, asked, readme_cells
from benchmarks.suites import OURS, SUITES
from benchmarks.tables import (
    DTYPES,
    SWEEPS,
    Cell,
    Record,
    by_dtype,
    display_name,
    figure,
    fixed,
    headline,
    limit,
    machines,
    megabytes,
    processor,
    ratio,
    size,
    timed,
    times,
    untimed,
)

Picture = Record
# The background is transparent. These colours can be read on white and on GitHub's dark grey.
TEXT = "#797979"
MUTED = "#8f8f8f"
HIGHLIGHT = "#2f81f7"  # ours
VARIANT = "#5b8fc7"  # variants of ours
#: Colours of the curves of other projects, in their order.
COLOURS = ("#bb6f2c", "#3f9470", "#8a76c9", "#c65f5f", "#2e8f9a", "#c0679a")
STYLE: Record = {
    "font.family": "DejaVu Sans", "font.size": 8.5, "text.color": TEXT, "axes.labelcolor": TEXT, "axes.edgecolor": TEXT,
    "xtick.color": TEXT, "ytick.color": TEXT, "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.labelsize": 8.5,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titlepad": 8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "svg.hashsalt": "grpo_kernels", "svg.fonttype": "path",
}  # fmt: skip
WIDTH = 9.2  # inches


# ---- the data of a picture


def _rounded(x: float) -> float:
    """Round to four digits, which is what a picture can show."""
    return float(f"{x:.4g}")


def duration(ms: float) -> str:
    """Return a time in milliseconds, or in seconds from 10 s on."""
    return f"{figure(ms)} ms" if ms < 10_000 else f"{figure(ms / 1000)} s"


def _bars(title: str, cell: Cell, relative: bool) -> Record:
    """Return a panel with the time of each provider, the fastest first, then the wrong ones.

    title       of the panel
    cell        a cell of a result file
    relative    label bars with multiples of the limit too, and mark the limit. Otherwise only
                checked rows are shown, without the variants that are for tables
    """
    rows = [row for row in timed(cell) if not row.get("limit")]
    if not relative:
        rows = [row for row in rows if "errors" in row and SCALED not in row["name"]]
    bars = []
    for row in sorted(rows, key=lambda row: row["ms"]):
        costs = [duration(row["ms"])]
        if megabytes(row):
            costs.append(f"{megabytes(row)} MB")
        multiple = ratio(cell, row) if relative else None
        if multiple:
            costs.insert(0, f"{times(multiple)}×")
        bars.append([display_name(row["name"]), _rounded(row["ms"]), ", ".join(costs)])
    for row in cell["providers"]:
        if row["status"] == "wrong":
            bars.append([display_name(row["name"]), 0.0, "wrong, not timed"])
    mark = None
    if relative:
        title += f", × {limit(cell)}"
        if cell["limit"]:
            mark = cell["limit"]["ms"]
            title += " (the line)"
    return {"title": title, "bars": bars, "mark": mark and _rounded(mark), "x": "time, ms"}


def _curves(record: Record) -> list[Record]:
    """Return panels with time and memory over the field that a suite varies, for each dtype.

    record      result file of a suite of SWEEPS
    """
    field, field_title = SWEEPS[record["suite"]]
    panels = []
    for cells in by_dtype(sorted(record["cells"], key=lambda cell: cell[field])):
        title = f"{DTYPES[cells[0]['dtype']]}, {fixed(cells[0], field)}: "
        for key, axis in (("ms", "time, ms"), ("extra_mb", "extra memory, MB")):
            curves: dict[str, list[list[float]]] = {}
            for cell in cells:
                for row in timed(cell):
                    if row.get(key):
                        name = display_name(row["name"])
                        x_values, y_values = curves.setdefault(name, [[], []])
                        x_values.append(cell[field])
                        y_values.append(_rounded(row[key]))
            log = "xy" if field == "rows" else ""  # the axes with a log scale
            panels.append({"title": title + axis, "x": field_title, "log": log, "curves": curves})
    return panels


def of_suite(record: Record) -> Picture:
    """Return the picture of a result file.

    A suite that varies one size has curves over it. Others have bars of the first shape, one panel
    for each dtype. Notes name the providers that were not timed.
    """
    is_sweep = record["suite"] in SWEEPS
    notes = []
    if is_sweep:
        panels = _curves(record)
        for reason, names in untimed(record["cells"], SWEEPS[record["suite"]][0]).items():
            notes.append(f"{reason}: {names}")
    else:
        cells = headline(record)[0]
        panels = []
        for cell in cells:
            title = f"{DTYPES[cell['dtype']]}, {size(cell)}"
            panels.append(_bars(title, cell, relative=True))
        for reason, names in untimed(cells).items():
            if not reason.startswith("failed the check"):  # these have bars
                notes.append(f"{reason}: {names}")
    return {"title": f"{record['title']} · {processor(record)}", "panels": panels, "notes": notes}


def of_front(folder: Path, machine: str) -> Picture | None:
    """Return the picture of the first table of docs/benchmarks.md for a machine.

    None if the machine has no cell of the table.

    folder      of result files
    machine     name of a folder in it
    """
    standing_of_line = {
        words: standings[0]
        for words, standings in asked(folder, machine).items()
        if standings and "cells" not in words  # not the extremes of all cells
    }
    if not standing_of_line:
        return None
    panels = []
    for words, standing in standing_of_line.items():
        title = f"{words}, {size(standing.cell)}"
        panels.append(_bars(title, standing.cell, relative=False))
    title = f"Loss and gradient of DAPO · {processor(next(iter(standing_of_line.values())).record)}"
    return {
        "title": title,
        "panels": panels,
        "notes": [
            "Time, and memory beyond the inputs. Every contender was checked against float64 first."
        ],
    }


def of_readme(folder: Path) -> Picture | None:
    """Return the README's picture: time and memory, from hidden states and from logits.

    A row of two panels for each suite, time on the left. None if there are no results.

    folder      of result files
    """
    cells = readme_cells(folder)
    panels = []
    for suite, (_, cell, rows) in cells.items():
        shape = f"{cell['rows']:,} tokens, {cell['vocab']:,} ids, {DTYPES[cell['dtype']]}"
        if cell["hidden"]:
            shape = f"{shape}, hidden size {cell['hidden']:,}"
        names = [re.sub(r" \+ (loss|matmuls)$", "", display_name(row["name"])) for row in rows]
        milliseconds = [row["ms"] for row in rows]
        gigabytes = [row["extra_mb"] / 1000 for row in rows]
        panels += [
            {
                "title": f"{SUITES[suite].title}: {shape}",
                "bars": [
                    [name, _rounded(ms), figure(ms)]
                    for name, ms in zip(names, milliseconds, strict=True)
                ],
                "x": "time, ms (log scale)",
                "log": "x",
            },
            {
                "title": "",
                "bars": [
                    [name, _rounded(gb), f"{gb:.1f}"]
                    for name, gb in zip(names, gigabytes, strict=True)
                ],
                "x": "peak memory beyond the inputs, GB",
                "names": False,
            },
        ]
    if not panels:
        return None
    record = cells["hidden"][0]
    title = f"DAPO loss with its gradients · {processor(record)}"
    return {"title": title, "panels": panels, "columns": 2, "notes": []}


# ---- drawing


def draw(shown: Picture) -> Figure:
    """Draw a picture, and return matplotlib's figure.

    Curves are in two columns, bars in one unless the picture says otherwise. A legend of all curves
    is at the bottom, and the notes are above it.

    shown   the data of the picture, see the top of this file
    """
    panels = shown["panels"]
    columns = shown.get("columns", 1 if "bars" in panels[0] else min(2, len(panels)))
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(_height(panel) for panel in row) for row in rows]  # inches
    notes: list[str] = []
    for note in shown["notes"]:
        notes += textwrap.wrap(note, 140, subsequent_indent="    ")
    legend_height = 0.4 if columns == 2 else 0.0
    height = 0.6 + sum(heights) + 0.15 * len(notes) + legend_height
    other_projects = _names_of_other_projects(panels)
    with matplotlib.rc_context(STYLE):
        page = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(page)
        page.patch.set_alpha(0)
        page.suptitle(shown["title"], x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        grid = page.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
        line_of: dict[str, Any] = {}  # {name of a curve: its line, for the legend}
        for axes, panel in zip(grid.flat, panels, strict=False):
            axes.patch.set_alpha(0)
            axes.set_title(panel["title"])
            if "bars" in panel:
                _draw_bars(axes, panel)
            else:
                _draw_curves(axes, panel, other_projects)
            lines, names = axes.get_legend_handles_labels()
            line_of.update(zip(names, lines, strict=True))
        if line_of:
            page.legend(
                line_of.values(),
                line_of,
                loc="outside lower center",
                ncols=3,
                frameon=False,
                labelcolor=TEXT,
            )
        if notes:
            legend_rows = -(-len(line_of) // 3)
            # Empty lines keep the notes above the legend: a row of it is as high as two of them.
            text = "\n".join(notes) + "\n" * 2 * legend_rows
            page.supxlabel(text, x=0.01, ha="left", fontsize=7.5)
    return page


def _height(panel: Record) -> float:
    """Return the height of a panel in inches: 0.21 for each bar, and a fixed height for curves."""
    return 0.9 + 0.21 * len(panel["bars"]) if "bars" in panel else 2.6


def _names_of_other_projects(panels: list[Record]) -> list[str]:
    """Return the names of the curves that are neither ours nor limits, each once."""
    names = dict.fromkeys(name for panel in panels for name in panel.get("curves", ()))
    return [name for name in names if not name.startswith((OURS, "matmuls"))]


def _draw_bars(axes: Axes, panel: Record) -> None:
    """Draw horizontal bars with their labels, and a dotted line at the limit.

    panel   see `_bars`. "log": "x" gives a log scale, "names": False leaves the names out
    """
    names, values, labels = zip(*panel["bars"], strict=True)
    colours = [HIGHLIGHT if name.startswith(OURS) else MUTED for name in names]
    is_log = panel.get("log") == "x"
    bars = axes.barh(range(len(names)), values, height=0.62, color=colours, log=is_log)
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_yticks(range(len(names)), names if panel.get("names", True) else [""] * len(names))
    axes.invert_yaxis()
    axes.set_xlabel(panel["x"])
    if is_log:  # half of the smallest bar stays visible, and the label of the largest fits
        axes.set_xlim(min(values) / 2, max(values) * 2)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(right=max(values) * 1.15)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.tick_params(axis="y", length=0)
    for tick, colour in zip(axes.get_yticklabels(), colours, strict=True):
        tick.set_color(colour)
    if panel.get("mark"):
        axes.axvline(panel["mark"], color=TEXT, linewidth=1, linestyle=(0, (1, 2)))


def _draw_curves(axes: Axes, panel: Record, other_projects: list[str]) -> None:
    """Draw a line for each provider. Each is thinner than those before, so that equal ones show.

    other_projects   names of the curves of other projects, in the order of their colours
    """
    axes.set_xlabel(panel["x"])
    axes.grid(color=TEXT, alpha=0.2, linewidth=0.5)
    for i, (name, (x_values, y_values)) in enumerate(panel["curves"].items()):
        if name.startswith("matmuls"):  # a limit
            colour = TEXT
        elif name in other_projects:
            colour = COLOURS[other_projects.index(name) % len(COLOURS)]
        else:
            colour = HIGHLIGHT if name == OURS else VARIANT
        axes.plot(
            x_values,
            y_values,
            linewidth=max(1.0, 2.6 - 0.5 * i),
            marker="o",
            markersize=3,
            label=name,
            color=colour,
            linestyle="--" if name.startswith("matmuls") else "-",
        )
    for scale in (axes.set_xscale, axes.set_yscale):
        scale("log" if panel["log"] else "linear")
    if panel["log"]:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    ticks = sorted({x for curve in panel["curves"].values() for x in curve[0]})
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [_short(x) for x in ticks])


def _short(x: float) -> str:
    """Return the label of a tick: 64, 4,096, 32k (a multiple of 1024), 152k (rounded)."""
    if x < 10_000:
        return f"{x:,g}"
    return f"{x / 1024:,.0f}k" if x % 1024 == 0 else f"{x / 1000:,.0f}k"


# ---- files


def described(shown: Picture) -> str:
    """Return the data of a picture as text, for the field Description of its file."""
    return json.dumps(shown, separators=(",", ":"))


def save(shown: Picture, path: Path) -> Path:
    """Save the picture as `path`, an SVG, and as a PNG of the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page = draw(shown)
    about = {"Title": shown["title"], "Description": described(shown)}
    with matplotlib.rc_context(STYLE):
        page.savefig(path, metadata={"Date": None, **about})
        page.savefig(path.with_suffix(".png"), dpi=160, metadata=about)
    return path


def pictures(folder: Path) -> dict[Path, Picture]:
    """Return {path of the SVG: picture} for all result files, the first tables and the README.

    folder      of result files
    """
    picture_by_path: dict[Path, Picture] = {}
    for machine in machines(folder):
        shown: dict[str, Picture | None] = {}
        for path in sorted((folder / machine).glob("*.json")):
            record = results.load(path)
            if record["cells"]:
                shown[path.stem] = of_suite(record)
        shown["front"] = of_front(folder, machine)
        if machine == README_MACHINE:
            shown["readme"] = of_readme(folder)
        for name, picture in shown.items():
            if picture:
                picture_by_path[folder / machine / "plots" / f"{name}.svg"] = picture
    return picture_by_path
