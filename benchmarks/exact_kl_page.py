"""The page of `exact_kl`: its three tables, and its two pictures, whose files contain the means that they show."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import experiment_pages, results
from benchmarks.experiment_pages import by, chosen, drawn, framed, legend, lines, mean, over_seeds, save, with_spread
from benchmarks.experiments import Record
from benchmarks.harness import RESULTS
from benchmarks.plots import HIGHLIGHT, TEXT, WIDTH
from benchmarks.tables import replace_block

FILE = RESULTS / "exact_kl.json"
COMMAND = "python -m benchmarks.exact_kl --write"
PAGE = results.ROOT / "docs" / "exact_kl_experiment.md"
PICTURES = {"kl": results.ROOT / "docs" / "exact_kl.svg", "distillation": results.ROOT / "docs" / "distillation.svg"}
NAMES = {
    "exact": "exact, reverse", "exact-forward": "exact, forward", "k1+": "k1+ (gradient of k2)", "k3": "k3", "no KL": "no KL",
    "sampled token": "sampled token",
}  # fmt: skip
COLOURS = {
    "exact": HIGHLIGHT, "exact-forward": "#3f9470", "k1+": "#8a76c9", "k3": "#bb6f2c", "no KL": TEXT, "sampled token": "#bb6f2c"
}  # fmt: skip
#: The exact KL whose gradient is the expectation of an estimator's gradient.
ESTIMATED = {"k1+": "exact", "k3": "exact-forward"}
#: The end of a run is the mean of so many last evaluations.
LAST = 3
#: The settings whose curves are drawn.
SHOWN = ("beta=1", "beta=1, large steps")


# ---- the tables


def block(record: Record) -> str:
    return experiment_pages.block(record, COMMAND, (of_gradients, of_rewards, of_distillation))


def of_gradients(record: Record) -> Iterator[str]:
    yield "| policy after | `--kl` | seeds | value of a batch | gradient: deviation | bias | completions for the noise of the exact form |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    policies = at_policies(record)
    for (step, arm), measurements in policies.items():
        spreads = [100 * x["value_sd"] / y["value"] for x, y in zip(measurements, policies[step, "exact"], strict=True)]
        cells = [
            f"{mean([x['value'] for x in measurements]):.3f} ± {mean(spreads):.1f} %",
            f"{mean([x['deviation'] for x in measurements]):.2f}",
        ]
        cells.append("0" if arm == "exact" else f"{mean([x['bias'] for x in measurements]):.2f}")
        same = zip(measurements, policies[step, ESTIMATED.get(arm, arm)], strict=True)
        cells.append(
            f"{statistics.median([(x['deviation'] / y['deviation']) ** 2 for x, y in same]):.0f} x" if arm in ESTIMATED else ""
        )
        yield f"| {step} step{'s' * (step > 1)} | {NAMES[arm]} | {len(measurements)} | {' | '.join(cells)} |"


def at_policies(record: Record) -> dict[tuple[int, str], list[Record]]:
    """(step, arm) -> the measurements there, one per seed."""
    measurements: dict[tuple[int, str], list[Record]] = {}
    for run in chosen(record, "gradients"):
        for stop in run["found"]:
            for arm in (name for name in stop if name in NAMES):
                measurements.setdefault((stop["step"], arm), []).append(stop[arm])
    return measurements


def of_rewards(record: Record) -> Iterator[str]:
    yield "| setting | `--kl` | seeds | reward at the end | less that of exact | KL to the reference at the end |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    runs = by(chosen(record, "rewards"), "setting", "arm")
    for (setting, arm), of_arm in runs.items():
        ends = of_seeds(of_arm, "held_out_reward")
        exact = of_seeds(runs.get((setting, "exact"), []), "held_out_reward")
        apart = [ends[seed] - exact[seed] for seed in ends if seed in exact and arm != "exact"]
        cells = [
            with_spread([*ends.values()], ".3f"),
            with_spread(apart, ".3f"),
            with_spread([*of_seeds(of_arm, "kl").values()], ".3f"),
        ]
        yield f"| {setting} | {NAMES[arm]} | {len(of_arm)} | {' | '.join(cells)} |"


def of_seeds(runs: list[Record], field: str) -> dict[int, float]:
    """seed -> the mean of the last numbers of a curve."""
    return {run["seed"]: mean(run["found"][field][-LAST:]) for run in runs}


def of_distillation(record: Record) -> Iterator[str]:
    yield "| KL to the teacher | learning rate | seeds | teacher | student: first | halfway | last |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for (arm, lr), of_arm in by(chosen(record, "distillation"), "arm", "lr").items():
        accuracy = [run["found"]["accuracy"] for run in of_arm]
        cells = [with_spread([run["found"]["teacher"] for run in of_arm], ".1%")]
        cells += [with_spread([curve[at] for curve in accuracy], ".1%") for at in (0, len(accuracy[0]) // 2, -1)]
        yield f"| {NAMES[arm]} | {lr:g} | {len(of_arm)} | {' | '.join(cells)} |"


def insert(text: str, record: Record) -> str:
    return replace_block(text, PAGE.name, "exact_kl", block(record), COMMAND)


# ---- the pictures


def best(record: Record) -> dict[str, list[Record]]:
    """The runs of each way to distil, at the learning rate with the best last accuracy."""
    best_runs: dict[str, list[Record]] = {}
    for (arm, _), runs in by(chosen(record, "distillation"), "arm", "lr").items():
        if arm not in best_runs or _last(runs) > _last(best_runs[arm]):
            best_runs[arm] = runs
    return best_runs


def _last(runs: list[Record]) -> float:
    return mean([run["found"]["accuracy"][-1] for run in runs])


def shown(record: Record, picture: str) -> dict[str, dict[str, list[float]]]:
    """field -> arm -> the means over the seeds that a picture shows."""
    if picture == "distillation":
        return {"accuracy": {arm: over_seeds([run["found"]["accuracy"] for run in runs]) for arm, runs in best(record).items()}}
    at, made = at_policies(record), {}
    for field in ("deviation", "bias"):
        made[field] = {
            arm: [mean([x[field] for x in at[key]]) for key in at if key[1] == arm] for arm in dict.fromkeys(a for _, a in at)
        }
        made[field] = {arm: [float(f"{x:.4g}") for x in values] for arm, values in made[field].items()}
    for setting in SHOWN:
        made[setting] = {arm: over_seeds(curves) for arm, curves in rewards(record, setting).items()}
    return made


def rewards(record: Record, setting: str) -> dict[str, list[list[float]]]:
    """arm -> the curve of each seed."""
    runs = by(chosen(record, "rewards"), "setting", "arm")
    return {arm: [run["found"]["held_out_reward"] for run in of_arm] for (name, arm), of_arm in runs.items() if name == setting}


def draw(record: Record, picture: str) -> Figure:
    kl = picture == "kl"
    return drawn((WIDTH, 5.6) if kl else (WIDTH * 0.7, 3.2), lambda page: (_kl if kl else _distillation)(page, record))


def _kl(page: Figure, record: Record) -> None:
    means, grid = shown(record, "kl"), list(page.subplots(2, 2).flat)
    steps = sorted({step for step, _ in at_policies(record)})
    for axes, field, title in (
        (grid[0], "deviation", "gradient of the KL: deviation of a batch from the mean"),
        (grid[1], "bias", "gradient of the KL: bias against that of the exact KL"),
    ):
        framed(axes, title, "steps of the policy from the reference")
        axes.set_xticks(range(len(steps)), [str(step) for step in steps])
        for i, (arm, values) in enumerate(means[field].items()):
            axes.bar([at + (i - 1.5) * 0.2 for at in range(len(steps))], values, 0.18, color=COLOURS[arm])
    for axes, setting in zip(grid[2:], SHOWN, strict=True):
        framed(axes, f"reward on held-out prompts, {setting}", "step")
        lines(axes, NAMES, COLOURS, rewards(record, setting), means[setting], _looks(record))
    legend(page, 5, grid[2])


def _looks(record: Record) -> Callable[[int], list[float]]:
    steps = record["settings"]["run"]["steps"]
    return lambda count: [steps * i / (count - 1) for i in range(count)]


def _distillation(page: Figure, record: Record) -> None:
    axes = page.subplots()
    framed(axes, "greedy accuracy on held-out problems", "step")
    runs = best(record)
    curves = {arm: [run["found"]["accuracy"] for run in of_arm] for arm, of_arm in runs.items()}
    steps = next(iter(runs.values()))[0]["found"]["steps"]
    lines(axes, NAMES, COLOURS, curves, shown(record, "distillation")["accuracy"], lambda count: steps)
    teacher = mean([run["found"]["teacher"] for run in next(iter(runs.values()))])
    axes.axhline(teacher, color=TEXT, linestyle=(0, (4, 3)), label="teacher")
    axes.set_ylim(0, 1)
    legend(page, 5, axes)


def described(record: Record, picture: str) -> str:
    """The field Description of a picture's file: the means that it shows."""
    return json.dumps(shown(record, picture), separators=(",", ":"))


def save_picture(record: Record, picture: str, path: Path) -> None:
    save(draw(record, picture), path, picture, described(record, picture))


def write(record: Record) -> None:
    """The result file, the page and its pictures."""
    results.save(FILE, record)
    PAGE.write_text(insert(PAGE.read_text(), record))
    for picture, path in PICTURES.items():
        save_picture(record, picture, path)
