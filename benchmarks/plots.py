"""Pictures of the result files, SVG and PNG, for light and dark pages.

    python -m benchmarks.plots [--results DIR] [--out DIR]

Writes <out>/<machine>/<suite>.svg and .png (default: <results>/<machine>/plots/), and front.svg: see front.py. A picture
contains the numbers that it was drawn from, so that a test can compare them with the result file. The same result file gives
the same SVG."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from benchmarks import front, results
from benchmarks.cell_tables import machines
from benchmarks.harness import RESULTS
from benchmarks.pictures import Bars, Curves, Picture, picture
from benchmarks.suites import OURS

#: The background is transparent: all of these colours can be read on white and on GitHub's dark grey.
TEXT = "#797979"
MUTED = "#8f8f8f"
HIGHLIGHT = "#2f81f7"
#: Styles of curves, by the start of a name: the first match counts.
COLOURS = {
    "grpo_kernels,": "#5b8fc7",
    "grpo_kernels": HIGHLIGHT,
    "eager PyTorch": "#bb6f2c",
    "TRL": "#8a76c9",
    "Liger": "#3f9470",
    "CCE, unfiltered": "#c0679a",
    "CCE": "#c65f5f",
    "verl": "#2e8f9a",
    "products, ours": MUTED,
    "products": TEXT,
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 8.5, "text.color": TEXT, "axes.labelcolor": TEXT, "axes.edgecolor": TEXT,
    "xtick.color": TEXT, "ytick.color": TEXT, "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.labelsize": 8.5,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titlepad": 8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "svg.hashsalt": "grpo_kernels", "svg.fonttype": "path",
}  # fmt: skip
WIDTH = 9.2  # inches, as all sizes below


def draw(shown: Picture, columns: int | None = None) -> Figure:
    """`columns`: panels of bars side by side; None: all of them."""
    with matplotlib.rc_context(STYLE):
        bars = [panel for panel in shown.panels if isinstance(panel, Bars)]
        curves = [panel for panel in shown.panels if isinstance(panel, Curves)]
        made = _draw_bars(shown, bars, columns or len(bars)) if bars else _draw_curves(shown, curves)
        made.patch.set_alpha(0)
        for axes in made.axes:
            axes.patch.set_alpha(0)
    return made


def _page(shown: Picture, height: float) -> tuple[Figure, float, float]:
    """A figure with its title and its notes, and the heights between which the panels go; `height` is what they need."""
    notes = [line for note in shown.notes for line in textwrap.wrap(note, 140, subsequent_indent="    ")]
    bottom = 0.1 + 0.15 * len(notes)
    page = Figure(figsize=(WIDTH, height + bottom + 0.35))
    FigureCanvasAgg(page)
    full = height + bottom + 0.35
    page.text(0.1 / WIDTH, 1 - 0.1 / full, shown.title, fontsize=10.5, fontweight="bold", va="top")
    for i, line in enumerate(notes):
        page.text(0.1 / WIDTH, (bottom - 0.15 * i) / full, line, fontsize=7.5, va="top")
    return page, bottom, bottom + height


def _panel(page: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes between these, in inches."""
    high = page.get_figheight()
    return page.add_axes((left / WIDTH, bottom / high, (right - left) / WIDTH, (top - bottom) / high))


def _draw_bars(shown: Picture, panels: list[Bars], columns: int) -> Figure:
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [0.24 * len(_bar_names(row)) + 0.85 for row in rows]
    page, bottom, _ = _page(shown, sum(heights))
    for i, (row, height) in enumerate(zip(rows, heights, strict=True)):
        below = bottom + sum(heights[i + 1 :])
        _draw_row(page, row, below, below + height)
    return page


def _bar_names(panels: list[Bars]) -> list[str]:
    """The names of the bars: the fastest of the first panel first, those that were not timed last."""
    first = sorted(panels[0].bars, key=lambda bar: bar.value)
    names = list(dict.fromkeys([bar.name for bar in first] + [bar.name for panel in panels for bar in panel.bars]))
    return names + [name for name in dict.fromkeys(n for panel in panels for n in panel.wrong) if name not in names]


def _draw_row(page: Figure, panels: list[Bars], bottom: float, top: float) -> None:
    """Panels side by side between two heights, with the names at the left."""
    names = _bar_names(panels)
    column = 0.25 + max((_width(name, 8.5, bold=_ours(name)) for name in names), default=1.0)
    step = (WIDTH - column - 0.1) / len(panels)
    for i, panel in enumerate(panels):
        axes = _panel(page, column + i * step, bottom + 0.5, column + (i + 1) * step - 0.25, top - 0.3)
        axes.set_title(panel.title)
        axes.set_xlabel(panel.axis)
        axes.set_ylim(len(names) - 0.45, -0.55)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.tick_params(axis="y", length=0)
        axes.set_yticks(range(len(names)), names if i == 0 else [""] * len(names))
        for label, name in zip(axes.get_yticklabels(), names, strict=True):
            if _ours(name):
                label.set(color=HIGHLIGHT, fontweight="bold")
        longest = max((bar.value for bar in panel.bars), default=1.0)
        room = 0.12 + max((_width(bar.label, 8) for bar in panel.bars), default=0)
        axes.set_xlim(0, longest / (1 - room / (step - 0.25)))
        for bar in panel.bars:
            y, colour = names.index(bar.name), HIGHLIGHT if _ours(bar.name) else MUTED
            axes.barh(y, bar.value, height=0.62, color=colour, linewidth=0)
            axes.annotate(bar.label, (bar.value, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
        timed = {bar.name for bar in panel.bars}
        for y, name in enumerate(names):
            if name not in timed:
                text = "wrong, not timed" if name in panel.wrong else "skipped"
                axes.annotate(text, (0, y), (4, 0), textcoords="offset points", va="center", fontsize=8, style="italic")
        if panel.mark is not None:  # between the bars, where there is no text
            gaps = [i - 0.5 for i in range(len(names) + 1)]
            axes.vlines([panel.mark] * len(gaps), [y - 0.15 for y in gaps], [y + 0.15 for y in gaps], color=TEXT, linewidth=1)


def _draw_curves(shown: Picture, panels: list[Curves]) -> Figure:
    """Time and memory side by side, a row of panels per dtype; each curve is named where it ends."""
    names = {curve.name for panel in panels for curve in panel.curves}
    margin = 0.25 + max((_width(line, 8, bold=_ours(name)) for name in names for line in _wrapped(name)), default=1.0)
    rows = len(panels) // 2
    page, _, top = _page(shown, 3.1 * rows)
    step = WIDTH / 2
    for i, panel in enumerate(panels):
        row, column = divmod(i, 2)
        high = top - 3.1 * row
        axes = _panel(page, column * step + 0.65, high - 3.1 + 0.5, (column + 1) * step - margin, high - 0.3)
        axes.set_title(panel.title if column == 0 else "")
        axes.set_xlabel(panel.x_axis)
        axes.set_ylabel(panel.y_axis)
        axes.grid(color=TEXT, alpha=0.2, linewidth=0.5)
        for curve in panel.curves:
            bare = curve.name.startswith("products")
            axes.plot(
                curve.x, curve.y, color=_colour(curve.name), linewidth=2.2 if curve.name == OURS else 1.3,
                linestyle=(0, (4, 2)) if bare else "-", marker="" if bare else "o", markersize=3.5,
                zorder=3 if _ours(curve.name) else 2,
            )  # fmt: skip
        _scale(axes, panel)
        _name_ends(page, axes, panel)
    return page


def _scale(axes: Axes, panel: Curves) -> None:
    """Ticks at the measured sizes, and plain numbers on the vertical axis."""
    plain = FuncFormatter(lambda y, _: f"{y:,.10g}")
    heights = [y for curve in panel.curves for y in curve.y] or [1.0]
    if panel.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        wide = max(heights) / min(heights) > 100
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    else:
        axes.set_ylim(0, 1.08 * max(heights))
    axes.yaxis.set_major_formatter(plain)
    axes.xaxis.set_minor_locator(NullLocator())
    ticks = sorted({x for curve in panel.curves for x in curve.x})
    axes.set_xticks(ticks, [_short(x) for x in ticks])
    places = [(axes.transScale + axes.transLimits).transform((x, heights[0]))[0] for x in ticks]
    labels = axes.get_xticklabels()
    for i in range(len(ticks) - 1):
        room = (places[i + 1] - places[i]) * axes.get_position().width * WIDTH
        if room < 0.06 + sum(_width(_short(x), 8) for x in ticks[i : i + 2]) / 2:  # they move apart
            labels[i].set_horizontalalignment("right")
            labels[i + 1].set_horizontalalignment("left")


def _short(x: float) -> str:
    """64, 4,096, 32k, 152k."""
    if x < 10_000:
        return f"{x:,g}"
    return f"{x / 1024:,.0f}k" if x % 1024 == 0 else f"{x / 1000:,.0f}k"


def _name_ends(page: Figure, axes: Axes, panel: Curves) -> None:
    """Writes the name of each curve at the right, as near to its end as the other names allow, with a line from the end to
    the name. If a curve ends early, its name says where."""
    to_axes = axes.transScale + axes.transLimits
    inches = axes.get_position().height * page.get_figheight()
    last = max((curve.x[-1] for curve in panel.curves), default=0)
    ends = []
    for curve in panel.curves:
        x, y = to_axes.transform((curve.x[-1], curve.y[-1]))
        lines = [*_wrapped(curve.name), *([f"(up to {_short(curve.x[-1])})"] if curve.x[-1] < last else [])]
        ends.append((y, x, (0.135 * len(lines) + 0.04) / 2 / inches, "\n".join(lines), curve))
    ends.sort(key=lambda end: end[0])
    centres: list[float] = []
    floor = 0.0
    for y, _, half, _, _ in ends:
        centres.append(max(y, floor + half))
        floor = centres[-1] + half
    ceiling = 1 + 0.1 / inches
    for i in reversed(range(len(ends))):
        half = ends[i][2]
        centres[i] = min(centres[i], ceiling - half)
        ceiling = centres[i] - half
    for centre, (y, x, _, text, curve) in zip(centres, ends, strict=True):
        colour = _colour(curve.name)
        if curve.x[-1] == last:
            axes.plot([x, 1.04], [y, centre], transform=axes.transAxes, color=colour, linewidth=0.6, clip_on=False)
        axes.text(
            1.055, centre, text, transform=axes.transAxes, color=colour, fontsize=8, va="center", linespacing=1.1,
            fontweight="bold" if _ours(curve.name) else "normal",
        )  # fmt: skip


def _wrapped(name: str) -> list[str]:
    return textwrap.wrap(name.replace("+ ", "+\u00a0"), 17)


def _ours(name: str) -> bool:
    return name.startswith(OURS)


def _colour(name: str) -> str:
    return next((colour for start, colour in COLOURS.items() if name.startswith(start)), MUTED)


def _width(text: str, points: float, bold: bool = False) -> float:
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    return TextPath((0, 0), text, size=points, prop=font).get_extents().width / 72


# ---- files


def described(shown: Picture) -> str:
    """The field Description of a picture's file."""
    return json.dumps(asdict(shown), separators=(",", ":"))


def save(shown: Picture, path: Path, columns: int | None = None) -> list[Path]:
    """`path` with .svg and with .png."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = draw(shown, columns)
    paths = [path.with_suffix(".svg"), path.with_suffix(".png")]
    with matplotlib.rc_context(STYLE):
        made.savefig(paths[0], metadata={"Date": None, "Title": shown.title, "Description": described(shown)})
        made.savefig(paths[1], dpi=160, metadata={"Title": shown.title, "Description": described(shown)})
    return paths


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--out", type=Path, help="folder to write to (default: beside the result files)")
    args = parser.parse_args(argv)
    written = []
    for machine in machines(args.results):
        folder = args.results / machine / "plots" if args.out is None else args.out / machine
        for path in sorted((args.results / machine).glob("*.json")):
            record = results.load(path)
            if record["cells"]:
                written += save(picture(record), folder / path.stem)
        if front.extremes(args.results, machine):
            written += save(front.picture(args.results, machine), folder / front.NAME, front.COLUMNS)
    if not written:
        raise SystemExit(f"--results {args.results}: there are no result files; python -m benchmarks makes them.")
    print("written:", *written, sep="\n")


if __name__ == "__main__":
    main()
