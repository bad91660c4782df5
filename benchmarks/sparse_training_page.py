"""The page of `sparse_training`: its tables, and its picture, whose file contains the means that it shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import experiment_pages, results
from benchmarks.experiment_pages import by, chosen, drawn, framed, legend, lines, mean, over_seeds, save, with_spread
from benchmarks.experiments import Record
from benchmarks.harness import RESULTS
from benchmarks.plots import HIGHLIGHT, TEXT, WIDTH
from benchmarks.replay import smooth
from benchmarks.tables import replace_block

FILE = RESULTS / "sparse_training.json"
COMMAND = "python -m benchmarks.sparse_training --write"
PAGE = results.ROOT / "docs" / "sparse_training.md"
PICTURE = results.ROOT / "docs" / "sparse_training.svg"
#: The colour of the dense gradient, then those of the steps from fine to coarse.
COLOURS = (TEXT, HIGHLIGHT, "#3f9470", "#bb6f2c")
TRAINERS = {"trainer": "reference", "trl": "TRL"}
#: The reward of a run is the mean over its last LAST steps; a point of a curve is the mean over SPAN steps.
LAST, SPAN = 20, 8


def name(step: float) -> str:
    return f"step {Fraction(step)}" if step else "dense"


def spelled(count: int) -> str:
    return f"{count} spelling{'s' * (count > 1)}"


# ---- the tables


def block(record: Record) -> str:
    return experiment_pages.block(record, COMMAND, (of_rows, of_noise, of_runs))


def policies(record: Record) -> dict[tuple[int, int], list[Record]]:
    """(spellings, steps of training) -> the measurements there, one per seed."""
    measurements: dict[tuple[int, int], list[Record]] = {}
    for run in chosen(record, "noise"):
        for stop in run["found"]:
            measurements.setdefault((run["spellings"], stop["after"]), []).append(stop)
    return measurements


def of_policy(spellings: int, after: int) -> str:
    return f"{spelled(spellings)}, after {after} step{'s' * (after > 1)}"


def of_rows(record: Record) -> Iterator[str]:
    steps = record["settings"]["steps"]
    yield f"| policy | seeds | entropy, nats | columns a row: {' | '.join(map(name, steps))} |"
    yield "| --- | ---: | ---: |" + " ---: |" * len(steps)
    for policy, measurements in policies(record).items():
        columns = (f"{mean([x['columns'][i] for x in measurements]):.1f}" for i in range(len(steps)))
        yield f"| {of_policy(*policy)} | {len(measurements)} | {mean([x['nats'] for x in measurements]):.2f} | {' | '.join(columns)} |"


def of_noise(record: Record) -> Iterator[str]:
    steps = record["settings"]["steps"]
    heads = [f"{term}: {name(step)}" for term in ("policy term", "entropy bonus") for step in steps]
    yield f"| policy | parameters | {' | '.join(heads)} |"
    yield "| --- | --- |" + " ---: |" * len(heads)
    for policy, measurements in policies(record).items():
        for group in measurements[0]["policy"]:
            cells = [
                percent(mean([x[term][group][i] for x in measurements]))
                for term in ("policy", "entropy")
                for i in range(len(steps))
            ]
            yield f"| {of_policy(*policy)} | {group} | {' | '.join(cells)} |"


def percent(ratio: float) -> str:
    """To two digits, and whole percents above ten."""
    return f"{100 * ratio:.0f} %" if ratio > 0.1 else f"{100 * ratio:.2g} %"


def of_runs(record: Record) -> Iterator[str]:
    yield "| trainer | answers in | gradient of the head | seeds | reward at the end | less that of dense | greedy accuracy |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    for part, trainer in TRAINERS.items():
        runs = by(chosen(record, part), "spellings", "step")
        for (spellings, step), of_step in runs.items():
            ends = of_seeds(of_step)
            dense = of_seeds(runs.get((spellings, 0.0), []))
            apart = [ends[seed] - dense[seed] for seed in ends if seed in dense and step]
            cells = [with_spread([*ends.values()], ".3f"), with_spread(apart, ".3f")]
            cells.append(f"{mean([run['found']['accuracy'] for run in of_step]):.1%}")
            yield f"| {trainer} | {spelled(spellings)} | {name(step)} | {len(of_step)} | {' | '.join(cells)} |"


def of_seeds(runs: list[Record]) -> dict[int, float]:
    """seed -> the mean reward of the last steps."""
    return {run["seed"]: mean(run["found"]["reward"][-LAST:]) for run in runs}


def insert(text: str, record: Record) -> str:
    return replace_block(text, PAGE.name, "sparse_training", block(record), COMMAND)


# ---- the picture


def rewards(record: Record) -> dict[tuple[str, int], dict[str, list[list[float]]]]:
    """(part, spellings) -> gradient -> the smoothed curve of each seed."""
    curves: dict[tuple[str, int], dict[str, list[list[float]]]] = {}
    for part in TRAINERS:
        for (spellings, step), runs in by(chosen(record, part), "spellings", "step").items():
            curves.setdefault((part, spellings), {})[name(step)] = [smooth(run["found"]["reward"], SPAN) for run in runs]
    return curves


def shown(record: Record) -> Record:
    """What the picture shows: mean curves of each panel, and the noise in the gradient of the head."""
    made: Record = {
        f"{part}, {spelled(spellings)}": {arm: over_seeds(curves) for arm, curves in arms.items()}
        for (part, spellings), arms in rewards(record).items()
    }
    made["noise"] = {
        of_policy(*policy): over_seeds([x["policy"]["head"] for x in measurements])
        for policy, measurements in policies(record).items()
    }
    return made


def draw(record: Record) -> Figure:
    return drawn((WIDTH, 6.0), lambda page: _fill(page, record))


def _fill(page: Figure, record: Record) -> None:
    means, steps = shown(record), record["settings"]["steps"]
    names = {name(step): name(step) for step in (0.0, *steps)}
    colours = dict(zip(names, COLOURS, strict=True))
    *panels, last = page.subplots(2, 2).flat
    for axes, ((part, spellings), arms) in zip(panels, rewards(record).items(), strict=False):
        framed(axes, f"reward, {TRAINERS[part]} trainer, {spelled(spellings)}".replace("TRL trainer", "TRL's trainer"), "step")
        of_panel = means[f"{part}, {spelled(spellings)}"]
        lines(axes, names, colours, arms, of_panel, lambda count: [float(i) for i in range(1, count + 1)])
    framed(last, "head: noise of drawing, by the noise of the batch", "step of the grid")
    last.set_xscale("log", base=2)
    last.set_yscale("log")
    last.set_xticks(steps, [str(Fraction(step)) for step in steps])
    for values, (policy, _), style in zip(means["noise"].values(), policies(record), "-:" * len(means["noise"]), strict=False):
        colour = dict(zip(sorted({p for p, _ in policies(record)}), COLOURS[1:], strict=False))[policy]
        last.plot(steps, values, color=colour, linestyle=style, marker="o", markersize=3)
    for (policy, at), values in zip(policies(record), means["noise"].values(), strict=True):
        if at == min(stop for _, stop in policies(record)):
            last.annotate(spelled(policy), (steps[0], values[0]), xytext=(6, -10), textcoords="offset points")
    legend(page, 4, panels[0])


def described(record: Record) -> str:
    """The field Description of the picture's file."""
    return json.dumps(shown(record), separators=(",", ":"))


def save_picture(record: Record, path: Path) -> None:
    save(draw(record), path, "Sparse gradients in training", described(record))


def write(record: Record) -> None:
    """The result file, the page and its picture."""
    results.save(FILE, record)
    PAGE.write_text(insert(PAGE.read_text(), record))
    save_picture(record, PICTURE)
