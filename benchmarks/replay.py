"""Compares runs whose loss is over the sets that tokens were sampled from (replay) with runs over the whole vocabulary.

    python -m benchmarks.replay [--write]

Runs of the reference trainer on the problems of examples/arithmetic.py, from the same warm-up, with the same seeds and top-p.
Losses are over the sets; over the vocabulary with the ratio to the sampler's log-probs, as in trainers that use those of the
engine; or over the vocabulary with the ratio to the trainer's own log-probs. There is one update on each batch, so that every
ratio should be 1. --write: benchmarks/results/replay.json, and in docs the table of kept_sets.md and the picture replay.svg."""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.harness import RESULTS
from benchmarks.machine import machine
from benchmarks.plots import HIGHLIGHT, MUTED, STYLE, TEXT, WIDTH
from benchmarks.tables import replace_block
from examples import arithmetic
from grpo_kernels.training.output import read_metrics
from grpo_kernels.training.rewards import exact
from grpo_kernels.training.trainer import TrainConfig, Trainer

FILE = RESULTS / "replay.json"
COMMAND = "python -m benchmarks.replay --write"
PAGE = results.ROOT / "docs" / "kept_sets.md"
PICTURE = results.ROOT / "docs" / "replay.svg"
SEEDS = (0, 1, 2)
WIDTH_OF_MODEL, LAYERS, WARM_UP = 64, 2, 300
#: Problems have numbers up to LARGEST, which such a small model can learn; HELD_OUT of them are held out.
LARGEST, HELD_OUT = 9, 100
#: The settings of all runs.
SETTINGS: dict[str, Any] = {
    "steps": 60, "prompts_per_step": 32, "group_size": 8, "max_new_tokens": 4, "lr": 2e-4, "warmup_steps": 5, "top_p": 0.6
}  # fmt: skip
#: The changes of each run, by its name.
ARMS: dict[str, dict[str, Any]] = {
    "over the sets": {"ratio_to": "sampler", "entropy_over": "vocabulary"},
    "over the vocabulary, ratio to the sampler": {"replay": False, "ratio_to": "sampler"},
    "over the vocabulary, ratio to the trainer's own": {"replay": False},
}
COLOURS = dict(zip(ARMS, (HIGHLIGHT, "#bb6f2c", "#3f9470"), strict=True))
#: The fields of a step that are recorded, and the titles of their panels.
FIELDS = (
    ("ratio", "mean ratio, before any step on the batch"),
    ("outside", "share of tokens with a ratio outside the clip range"),
    ("reward", "reward: share of right answers, sampled"),
    ("entropy", "entropy over the vocabulary, nats"),
)
#: A figure of the table is the mean over so many steps.
SPAN = 10


# ---- the runs


def problems(seed: int) -> tuple[list[Any], list[Any]]:
    """(training problems, problems to evaluate on)"""
    rows = [row for part in arithmetic.problems(20_000, seed) for row in part]
    rows = [row for row in rows if all(abs(int(term)) <= LARGEST for term in row["sum"].split())]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def warmed_up(seed: int, tok: Any, steps: int = WARM_UP) -> tuple[Any, list[Any], list[Any]]:
    """(model after the supervised warm-up of the example, training problems, problems to evaluate on)"""
    torch.manual_seed(seed)
    model = arithmetic.policy(WIDTH_OF_MODEL, LAYERS)
    training, held_out = problems(seed)
    arithmetic.warm_up(model, tok, training, seed, steps, progress=False)
    return model, training, held_out


def run(model: Any, tok: Any, rows: tuple[list[Any], list[Any]], seed: int, **changes: Any) -> dict[str, Any]:
    """The record of one run: the fields with a number for each step, and greedy accuracy before and after."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(**{
            **SETTINGS, "eval_steps": SETTINGS["steps"], "eval_prompts": len(rows[1]), "checkpoint_steps": 0, "out": folder,
            "seed": seed, "progress": False, "device": "cpu", **changes,
        })  # fmt: skip
        trainer = Trainer(config, model=copy.deepcopy(model), tokenizer=tok, rows=rows, rewards=[exact])
        outside = watched(trainer)
        assert trainer.train()
        lines = read_metrics(trainer.folder.metrics)
    steps = [line for line in lines if "loss" in line]
    accuracy = [line["accuracy"] for line in lines if "accuracy" in line]
    made = {
        "ratio": [line["ratio_mean"] for line in steps],
        "outside": outside,
        "reward": [line["reward"] for line in steps],
        "entropy": [line["entropy"] for line in steps],
    }
    return {name: [float(f"{x:.4g}") for x in values] for name, values in made.items()} | {"accuracy": accuracy}


def watched(trainer: Trainer) -> list[float]:
    """A list to which each loss of the trainer, one per step, appends its share of tokens outside the clip range."""
    shares: list[float] = []
    surrogate, loss = trainer.objective.surrogate, trainer.losses.loss

    def with_share(model: Any, completions: Any, batch: Any, *arguments: Any) -> Any:
        out = loss(model, completions, batch, *arguments)
        old = out.logps if batch.old_logps is None else batch.old_logps
        ratio = (out.logps - old)[batch.mask].exp()
        inside = (ratio >= 1 - surrogate.eps_low) & (ratio <= 1 + surrogate.eps_high)
        shares.append(float((~inside).float().mean()))
        return out

    trainer.losses.loss = with_share  # type: ignore[method-assign]
    return shares


def measure(seeds: tuple[int, ...] = SEEDS, warm_up: int = WARM_UP, **changes: Any) -> list[dict[str, Any]]:
    tok, records = arithmetic.tokenizer(), []
    for seed in seeds:
        model, training, held_out = warmed_up(seed, tok, warm_up)
        for arm, options in ARMS.items():
            began = time.perf_counter()
            made = run(model, tok, (training, held_out), seed, **options, **changes)
            records.append({"arm": arm, "seed": seed} | made)
            print(f"seed {seed}, {arm}: {summary(records[-1])}, {time.perf_counter() - began:.0f} s", flush=True)
    return records


def first(values: list[float]) -> float:
    return sum(values[:SPAN]) / len(values[:SPAN])


def last(values: list[float]) -> float:
    return sum(values[-SPAN:]) / len(values[-SPAN:])


def summary(made: dict[str, Any]) -> str:
    reward, accuracy = made["reward"], made["accuracy"]
    return (
        f"ratio {first(made['ratio']):.3f} -> {last(made['ratio']):.3f}, outside {first(made['outside']):.1%} -> "
        f"{last(made['outside']):.1%}, reward {first(reward):.3f} -> {last(reward):.3f}, greedy accuracy {accuracy[0]:.1%} -> {accuracy[-1]:.1%}"
    )


# ---- the page


def block(record: dict[str, Any]) -> str:
    if not record:
        return f"Not measured yet: `{COMMAND}`."
    m = record["machine"]
    lines = [
        f"{m['name']}, {m['threads']} threads, torch {m['torch']}, {record['date']}; `{record['command']}`.",
        "",
        "| loss | mean ratio | outside the clip range | reward | entropy, nats | greedy accuracy |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm in ARMS:
        runs = [made for made in record["runs"] if made["arm"] == arm]
        cells = [
            f"{_both(runs, 'ratio', '.3f')}", f"{_both(runs, 'outside', '.1%')}", f"{_both(runs, 'reward', '.3f')}",
            f"{_both(runs, 'entropy', '.2f')}",
            " -> ".join(f"{sum(made['accuracy'][at] for made in runs) / len(runs):.1%}" for at in (0, -1)),
        ]  # fmt: skip
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(runs: list[dict[str, Any]], field: str, form: str) -> str:
    """The mean over the seeds, of the first steps and of the last steps."""
    return " -> ".join(format(sum(of(made[field]) for made in runs) / len(runs), form) for of in (first, last))


def insert(text: str, record: dict[str, Any]) -> str:
    return replace_block(text, PAGE.name, "replay", block(record), COMMAND)


# ---- the picture


def curves(record: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """field -> arm -> mean over the seeds, each a mean over the last five steps."""
    by_field: dict[str, dict[str, list[float]]] = {}
    for field, _ in FIELDS:
        for arm in ARMS:
            of_seeds = [made[field] for made in record["runs"] if made["arm"] == arm]
            mean = [sum(values) / len(values) for values in zip(*of_seeds, strict=True)]
            by_field.setdefault(field, {})[arm] = smooth(mean)
    return by_field


def smooth(values: list[float], width: int = 5) -> list[float]:
    parts = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [float(f"{sum(part) / len(part):.4g}") for part in parts]


def draw(record: dict[str, Any]) -> Figure:
    """A panel for each field: a line for each seed, thin, and their mean."""
    with matplotlib.rc_context(STYLE):
        page = Figure(figsize=(WIDTH, 5.6), layout="constrained")
        FigureCanvasAgg(page)
        page.patch.set_alpha(0)
        means = curves(record)
        for axes, (field, title) in zip(page.subplots(2, 2).flat, FIELDS, strict=True):
            axes.patch.set_alpha(0)
            axes.set_title(title)
            axes.set_xlabel("step")
            axes.grid(color=TEXT, alpha=0.2, linewidth=0.5)
            for made in record["runs"]:
                axes.plot(smooth(made[field]), color=COLOURS[made["arm"]], linewidth=0.5, alpha=0.6)
            for arm, mean in means[field].items():
                over = arm == list(ARMS)[-1]  # where the ratio is 1 it is the same as another
                axes.plot(mean, color=COLOURS[arm], linewidth=1.8, label=arm, linestyle=(0, (3, 3)) if over else "-")
        handles, labels = axes.get_legend_handles_labels()
        legend = page.legend(handles, labels, loc="outside lower center", ncols=len(ARMS), frameon=False, labelcolor=TEXT)
        legend.get_frame().set_edgecolor(MUTED)
    return page


def described(record: dict[str, Any]) -> str:
    """The field Description of the picture's file: the mean lines."""
    return json.dumps(curves(record), separators=(",", ":"))


def save_picture(record: dict[str, Any], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        draw(record).savefig(path, metadata={"Date": None, "Title": "Replay", "Description": described(record)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the figures")
    write = parser.parse_args().write
    record = {
        "command": COMMAND,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine("cpu"),
        "settings": SETTINGS,
        "runs": measure(),
    }
    print(block(record))
    if write:
        results.save(FILE, record)
        PAGE.write_text(insert(PAGE.read_text(), record))
        save_picture(record, PICTURE)


if __name__ == "__main__":
    main()
