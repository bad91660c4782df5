"""What the demo shows: its table, two lines of text, the picture, and part of docs/training.md."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.plots import HIGHLIGHT, MUTED, STYLE, TEXT, WIDTH
from benchmarks.tables import Table, render, replace_block

Record = dict[str, Any]

FILE = results.RESULTS / "demo.json"
COMMAND = "python -m examples.demo --seed 0 1 2 --write"
PAGE = results.ROOT / "docs" / "training.md"
PICTURE = results.ROOT / "docs" / "demo.svg"
FUSED, PLAIN = "fused", "plain PyTorch"
COLOURS = {PLAIN: "#bb6f2c", FUSED: HIGHLIGHT}
#: Parts of a step, in its order, with the strength of their colour.
PARTS = (
    ("sampling", "sampling_seconds", 0.35),
    ("loss and gradient", "loss_seconds", 1.0),
    ("optimizer", "optimizer_seconds", 0.6),
)


def middle(record: Record, name: str, field: str) -> float:
    """Return the median of a field over the steps of all seeds, for the loss `name`."""
    return statistics.median(x for run in record["runs"] for x in run["sides"][name][field])


def table(record: Record) -> Table:
    """Return a table with a line for each seed and loss: medians of times and memory, accuracy."""
    head = [
        "seed",
        "loss",
        "s per step",
        "sampling s",
        "loss + gradient ms",
        "optimizer ms",
        "peak MiB",
        "accuracy before",
        "after",
    ]
    lines = [head]
    for run in record["runs"]:
        for name, side in run["sides"].items():
            of = {
                field: middle({"runs": [run]}, name, field)
                for field in ("seconds", "peak_mib", *(part for _, part, _ in PARTS))
            }
            lines.append([
                str(run["seed"]), name, f"{of['seconds']:.2f}", f"{of['sampling_seconds']:.2f}", f"{1e3 * of['loss_seconds']:.0f}",
                f"{1e3 * of['optimizer_seconds']:.0f}", f"{of['peak_mib']:,.0f}", *(f"{x:.1%}" for x in side["accuracy"]),
            ])  # fmt: skip
    return lines


def sentences(record: Record) -> list[str]:
    """Return two lines of text: whether both losses train alike, and their time and memory."""
    pairs = [
        pair
        for run in record["runs"]
        for pair in zip(*(run["sides"][x]["reward"] for x in (FUSED, PLAIN)), strict=True)
    ]
    same, apart = sum(a == b for a, b in pairs), max(abs(a - b) for a, b in pairs)
    gains = [
        100 * (after - before)
        for run in record["runs"]
        for before, after in [run["sides"][FUSED]["accuracy"]]
    ]
    curves = f"The curves coincide: both losses give the same reward at all {len(pairs)} steps."
    if same < len(pairs):
        curves = (
            f"Both losses give the same reward at {same} of {len(pairs)} steps, and rewards at most"
            f" {apart:.3f} apart at the others."
        )
    size, low, high = record["size"], *_kept(record)
    seconds, peak = (
        {x: middle(record, x, field) for x in (FUSED, PLAIN)} for field in ("seconds", "peak_mib")
    )
    loss = {x: 1e3 * middle(record, x, "loss_seconds") for x in (FUSED, PLAIN)}
    kept = f"{low}" if low == high else f"{low} to {high}"
    return [
        (
            f"{curves} With the fused loss, greedy accuracy changes by"
            f" {', '.join(f'{x:+.1f}' for x in gains)} points. Each token is trained over the"
            f" {kept} of {size['vocab']:,} ids that it was drawn from."
        ),
        (
            f"In the median over all steps, loss and gradient take {loss[FUSED]:.0f} ms instead of"
            f" {loss[PLAIN]:.0f}, and a step {seconds[FUSED]:.2f} s and {peak[FUSED]:,.0f} MiB"
            f" instead of {seconds[PLAIN]:.2f} s and {peak[PLAIN]:,.0f} MiB. Sampling, identical in"
            f" both, is {middle(record, FUSED, 'sampling_seconds') / seconds[FUSED]:.0%} of the"
            " fused step."
        ),
    ]


def _kept(record: Record) -> tuple[int, int]:
    """Return the smallest and the largest number of ids that a token was sampled from."""
    kept = [x for run in record["runs"] for side in run["sides"].values() for x in side["kept"]]
    return min(kept), max(kept)


def setting(record: Record) -> str:
    """Return a line with the size of the run and the machine."""
    size, m = record["size"], record["machine"]
    return (
        f"{size['vocab']:,} ids, top-{size['top_k']} and replay of its sets,"
        f" {size['prompts'] * size['group']} completions a step, {size['steps']} steps; medians."
        f" {m['name']}, {m['threads']} threads, torch {m['torch']}, {record['date']}."
    )


def times(record: Record) -> str:
    """Return a sentence with the seconds of the warm-up and of the whole run, for each seed."""
    warm, whole = (
        ", ".join(f"{run['seconds'][what]:.0f}" for run in record["runs"])
        for what in ("warm_up", "all")
    )
    return f"The warm-up took {warm} s, the whole demo {whole} s."


def text(record: Record) -> str:
    """Return the report for the terminal."""
    return "\n".join(
        [
            setting(record),
            "",
            render(table(record), markdown=False),
            "",
            *sentences(record),
            times(record),
        ]
    )


def block(record: Record) -> str:
    """Return the report for docs/training.md, in Markdown."""
    said = [f"- {sentence}" for sentence in [*sentences(record), times(record)]]
    return "\n".join(
        [
            f"{setting(record)} `{record['command']}`.",
            "",
            render(table(record), markdown=True),
            "",
            *said,
        ]
    )


def insert(page: str, record: Record) -> str:
    return replace_block(page, PAGE.name, "demo", block(record), COMMAND)


# ---- the picture


def draw(record: Record) -> Figure:
    """Return a figure: the reward of each step with both losses, and time and memory of a step."""
    with matplotlib.rc_context(STYLE):
        page = Figure(figsize=(WIDTH, 2.8), layout="constrained")
        FigureCanvasAgg(page)
        page.patch.set_alpha(0)
        reward, seconds, memory = page.subplots(1, 3, width_ratios=(2, 1.4, 1))
        for run in record["runs"]:
            for name, width, line in (
                (PLAIN, 3.0, "-"),
                (FUSED, 1.1, "-"),
            ):  # the thin line lies on the thick one
                label = name if run is record["runs"][0] else None
                reward.plot(
                    run["sides"][name]["reward"],
                    line,
                    color=COLOURS[name],
                    linewidth=width,
                    label=label,
                )
        reward.legend(frameon=False, labelcolor=TEXT, loc="lower right")
        reward.set_xlabel("step")
        for name, colour in COLOURS.items():
            left = 0.0
            for part, field, strength in PARTS:
                wide = middle(record, name, field)
                seconds.barh(name, wide, left=left, color=colour, alpha=strength)
                if wide > 0.15 * middle(record, PLAIN, "seconds"):
                    seconds.text(
                        left + wide / 2,
                        name,
                        part.replace(" and ", "\nand "),
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white",
                    )
                left += wide
            memory.barh(name, middle(record, name, "peak_mib"), color=colour)
        memory.set_yticks([])
        heads = (
            (
                "reward, mean of the batch, seed"
                f" {', '.join(str(run['seed']) for run in record['runs'])}"
            ),
            "seconds a step",
            "peak MiB of a step",
        )
        for axes, title in zip((reward, seconds, memory), heads, strict=True):
            axes.patch.set_alpha(0)
            axes.set_title(title)
            axes.grid(color=MUTED, alpha=0.2, linewidth=0.5)
            axes.set_axisbelow(True)
    return page


def described(record: Record) -> str:
    """Return the numbers of the picture as JSON, for the field Description of its file."""
    curves = {
        name: [run["sides"][name]["reward"] for run in record["runs"]] for name in (FUSED, PLAIN)
    }
    fields = ("seconds", "peak_mib", *(field for _, field, _ in PARTS))
    return json.dumps(
        curves
        | {field: [middle(record, name, field) for name in (FUSED, PLAIN)] for field in fields}
    )


def save_picture(record: Record, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        draw(record).savefig(
            path, metadata={"Date": None, "Title": "The demo", "Description": described(record)}
        )
