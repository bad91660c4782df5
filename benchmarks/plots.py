"""Pictures of result files, SVG and PNG, for light and dark pages.

A picture is described by plain numbers, {"title", "panels", "notes"}, which its file contains, so
that a test can compare them with the result file. A panel has "bars", [[name, value, label], ...],
or "curves", {name: [x, y]}; "x" labels its horizontal axis. The same description gives the same
SVG.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

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
#: The background is transparent: all of these colours can be read on white and on GitHub's dark
#: grey.
TEXT, MUTED, HIGHLIGHT, VARIANT = "#797979", "#8f8f8f", "#2f81f7", "#5b8fc7"
#: Of curves in their order, those of ours and of limits aside.
COLOURS = ("#bb6f2c", "#3f9470", "#8a76c9", "#c65f5f", "#2e8f9a", "#c0679a")
STYLE: Record = {
    "font.family": "DejaVu Sans", "font.size": 8.5, "text.color": TEXT, "axes.labelcolor": TEXT, "axes.edgecolor": TEXT,
    "xtick.color": TEXT, "ytick.color": TEXT, "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.labelsize": 8.5,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titlepad": 8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "svg.hashsalt": "grpo_kernels", "svg.fonttype": "path",
}  # fmt: skip
WIDTH = 9.2  # inches


# ---- what a picture shows


def _rounded(x: float) -> float:
    """Four digits, which is what a picture can show."""
    return float(f"{x:.4g}")


def duration(ms: float) -> str:
    return f"{figure(ms)} ms" if ms < 10_000 else f"{figure(ms / 1000)} s"


def _bars(title: str, cell: Cell, relative: bool) -> Record:
    """Time and memory of each contender, the fastest first, then those that are wrong.

    relative: as multiples of the limit.
    """
    rows = sorted((row for row in timed(cell) if not row.get("limit")), key=lambda row: row["ms"])
    bars = []
    for row in (
        rows if relative else (row for row in rows if "errors" in row and SCALED not in row["name"])
    ):
        cost = [duration(row["ms"])] + [f"{memory} MB" for memory in [megabytes(row)] if memory]
        multiple = ratio(cell, row) if relative else None
        bars.append(
            [
                display_name(row["name"]),
                _rounded(row["ms"]),
                ", ".join([f"{times(multiple)}×"] * bool(multiple) + cost),
            ]
        )
    bars += [
        [display_name(row["name"]), 0.0, "wrong, not timed"]
        for row in cell["providers"]
        if row["status"] == "wrong"
    ]
    mark = cell["limit"]["ms"] if relative and cell["limit"] else None
    base = f", × {limit(cell)} (the line)" if mark else f", × {limit(cell)}" if relative else ""
    return {
        "title": title + base,
        "bars": bars,
        "mark": mark and _rounded(mark),
        "x": "time, ms",
    }


def _curves(record: Record) -> list[Record]:
    """Time and memory by what the suite varies, for each dtype."""
    field, what = SWEEPS[record["suite"]]
    panels = []
    for cells in by_dtype(sorted(record["cells"], key=lambda cell: cell[field])):
        title = f"{DTYPES[cells[0]['dtype']]}, {fixed(cells[0], field)}: "
        for key, axis in (("ms", "time, ms"), ("extra_mb", "extra memory, MB")):
            curves: dict[str, list[list[float]]] = {}
            for cell, row in ((one, row) for one in cells for row in timed(one) if row.get(key)):
                x, y = curves.setdefault(display_name(row["name"]), [[], []])
                x.append(cell[field])
                y.append(_rounded(row[key]))
            panels.append(
                {
                    "title": title + axis,
                    "x": what,
                    "log": "xy" * (field == "rows"),
                    "curves": curves,
                }
            )
    return panels


def of_suite(record: Record) -> Picture:
    """Bars of the first shape, a panel per dtype, or curves of time and memory over what the suite
    varies.
    """
    swept = record["suite"] in SWEEPS
    cells = record["cells"] if swept else headline(record)[0]
    panels = (
        _curves(record)
        if swept
        else [_bars(f"{DTYPES[cell['dtype']]}, {size(cell)}", cell, True) for cell in cells]
    )
    what = SWEEPS[record["suite"]][0] if swept else "dtype"
    notes = [
        f"{why}: {names}"
        for why, names in untimed(cells, what).items()
        if swept or not why.startswith("failed the check")
    ]
    return {"title": f"{record['title']} · {processor(record)}", "panels": panels, "notes": notes}


def of_front(folder: Path, machine: str) -> Picture | None:
    """The cells that a user asks for first, at the most rows that were measured."""
    found = {
        words: standings[-1]
        for words, standings in asked(folder, machine).items()
        if standings and "cells" not in words
    }
    if not found:
        return None
    panels = [_bars(f"{words}, {size(x.cell)}", x.cell, False) for words, x in found.items()]
    title = f"Loss and gradient of DAPO · {processor(next(iter(found.values())).record)}"
    return {
        "title": title,
        "panels": panels,
        "notes": [
            "Time, and memory beyond the inputs. Every contender was checked against float64 first."
        ],
    }


def of_readme(folder: Path) -> Picture | None:
    """Time and memory from hidden states and from logits, one column each."""
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


# ---- how it is drawn


def draw(shown: Picture) -> Figure:
    """Panels in two columns; bars stand below each other where their names are long."""
    panels = shown["panels"]
    columns = shown.get("columns", 1 if "bars" in panels[0] else min(2, len(panels)))
    names = dict.fromkeys(
        name
        for panel in panels
        for name in panel.get("curves", ())
        if not name.startswith((OURS, "matmuls"))
    )
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [
        max(0.9 + 0.21 * len(panel["bars"]) if "bars" in panel else 2.6 for panel in row)
        for row in rows
    ]
    notes = [
        line
        for note in shown["notes"]
        for line in textwrap.wrap(note, 140, subsequent_indent="    ")
    ]
    with matplotlib.rc_context(STYLE):
        page = Figure(
            figsize=(WIDTH, 0.6 + sum(heights) + 0.15 * len(notes) + 0.4 * (columns == 2)),
            layout="constrained",
        )
        FigureCanvasAgg(page)
        page.patch.set_alpha(0)
        page.suptitle(shown["title"], x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        grid = page.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
        for axes, panel in zip(grid.flat, panels, strict=False):
            axes.patch.set_alpha(0)
            axes.set_title(panel["title"])
            _draw_bars(axes, panel) if "bars" in panel else _draw_curves(axes, panel, [*names])
        named = {
            text: line
            for axes in grid.flat
            for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if named:
            page.legend(
                named.values(),
                named,
                loc="outside lower center",
                ncols=3,
                frameon=False,
                labelcolor=TEXT,
            )
        if notes:
            legend_rows = -(-len(named) // 3)
            # Empty lines keep the notes above the legend: a row of it is as high as two of them.
            text = "\n".join(notes) + "\n" * 2 * legend_rows
            page.supxlabel(text, x=0.01, ha="left", fontsize=7.5)
    return page


def _draw_bars(axes: Axes, panel: Record) -> None:
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


def _draw_curves(axes: Axes, panel: Record, names: list[str]) -> None:
    """Each line is thinner than those before, so that equal ones are seen."""
    axes.set_xlabel(panel["x"])
    axes.grid(color=TEXT, alpha=0.2, linewidth=0.5)
    for i, (name, (x, y)) in enumerate(panel["curves"].items()):
        colour = (
            COLOURS[names.index(name) % len(COLOURS)]
            if name in names
            else HIGHLIGHT
            if name == OURS
            else VARIANT
        )
        colour, line = (TEXT, "--") if name.startswith("matmuls") else (colour, "-")
        axes.plot(
            x,
            y,
            linewidth=max(1.0, 2.6 - 0.5 * i),
            marker="o",
            markersize=3,
            label=name,
            color=colour,
            linestyle=line,
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
    """64, 4,096, 32k, 152k."""
    if x < 10_000:
        return f"{x:,g}"
    return f"{x / 1024:,.0f}k" if x % 1024 == 0 else f"{x / 1000:,.0f}k"


# ---- files


def described(shown: Picture) -> str:
    """The field Description of a picture's file."""
    return json.dumps(shown, separators=(",", ":"))


def save(shown: Picture, path: Path) -> Path:
    """Save the picture as `path`, an SVG, and as a PNG of the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page, about = draw(shown), {"Title": shown["title"], "Description": described(shown)}
    with matplotlib.rc_context(STYLE):
        page.savefig(path, metadata={"Date": None, **about})
        page.savefig(path.with_suffix(".png"), dpi=160, metadata=about)
    return path


def pictures(folder: Path) -> dict[Path, Picture]:
    """{<machine>/plots/<suite>.svg: the picture of each result file, and the front's}"""
    found = {}
    for machine in machines(folder):
        records = {
            path.stem: results.load(path) for path in sorted((folder / machine).glob("*.json"))
        }
        shown = {name: of_suite(record) for name, record in records.items() if record["cells"]} | {
            "front": of_front(folder, machine)
        }
        if machine == README_MACHINE:
            shown["readme"] = of_readme(folder)
        found |= {
            folder / machine / "plots" / f"{name}.svg": one for name, one in shown.items() if one
        }
    return found
