"""Compares runs whose loss is over the sets that tokens were sampled from (replay) with runs over the whole vocabulary.

    python -m benchmarks.replay [--write]

Runs of the reference trainer on the problems of examples/arithmetic.py, from the same warm-up, with the same seeds and top-p.
Losses are over the sets; over the vocabulary with the ratio to the sampler's log-probs, as in trainers that use those of the
engine; or over the vocabulary with the ratio to the trainer's own log-probs. There is one update on each batch, so that every
ratio should be 1. --write: benchmarks/results/replay.json, and in docs the table of kept_sets.md and the picture replay.svg."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import experiments
from benchmarks.experiments import Experiment, curve, last, mean, short
from benchmarks.results import ROOT
from benchmarks.tables import Record, Table
from examples import arithmetic
from grpo_kernels.training.report import read_metrics
from grpo_kernels.training.trainer import Trainer

SEEDS = (0, 1, 2)
#: The settings of all runs.
SETTINGS: Record = {
    "steps": 60, "prompts_per_step": 32, "group_size": 8, "max_new_tokens": 4, "lr": 2e-4, "warmup_steps": 5, "top_p": 0.6
}  # fmt: skip
#: The changes of each run, by its name.
ARMS: dict[str, Record] = {
    "over the sets": {"ratio_to": "sampler", "entropy_over": "vocabulary"},
    "over the vocabulary, ratio to the sampler": {"replay": False, "ratio_to": "sampler"},
    "over the vocabulary, ratio to the trainer's own": {"replay": False},
}
#: The fields of a step that are recorded, the titles of their panels, and how they are written.
FIELDS = {
    "ratio": ("mean ratio, before any step on the batch", ".3f"),
    "outside": ("share of tokens with a ratio outside the clip range", ".1%"),
    "reward": ("reward: share of right answers, sampled", ".3f"),
    "entropy": ("entropy over the vocabulary, nats", ".2f"),
}
#: A figure of the table is the mean over so many steps.
SPAN = 10


def run(start: tuple[Any, list[Any], list[Any]], tok: Any, seed: int, **changes: Any) -> Record:
    """The record of one run: the fields with a number for each step, and greedy accuracy before and after."""
    settings = {**SETTINGS, "eval_steps": SETTINGS["steps"], "seed": seed, **changes}
    with experiments.trainer(start, tok, **settings) as trainer:
        outside = watched(trainer)
        assert trainer.train()
        lines = read_metrics(trainer.folder.path / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    of_steps = {
        name: [line[of] for line in steps]
        for name, of in (("ratio", "ratio_mean"), ("reward", "reward"), ("entropy", "entropy"))
    }
    return short(of_steps | {"outside": outside}) | {"accuracy": [line["accuracy"] for line in lines if "accuracy" in line]}


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


def measure(seeds: tuple[int, ...] = SEEDS, **changes: Any) -> Record:
    tok, records = arithmetic.tokenizer(), []
    for seed in seeds:
        start = experiments.warmed_up(seed, tok)
        for arm, options in ARMS.items():
            began = time.perf_counter()
            records.append({"arm": arm, "seed": seed} | run(start, tok, seed, **options, **changes))
            print(f"seed {seed}, {arm}: {time.perf_counter() - began:.0f} s", flush=True)
    return {"settings": SETTINGS, "runs": records}


def tables(record: Record) -> Iterator[Table]:
    """Of the first steps and of the last, the means over the seeds."""

    def both(arm: str, name: str, form: str, span: int) -> str:
        of = [run[name] for run in record["runs"] if run["arm"] == arm]
        return " -> ".join(format(mean(ends), form) for ends in ((mean(x[:span]) for x in of), (last(x, span) for x in of)))

    head = ["loss", "mean ratio", "outside the clip range", "reward", "entropy, nats", "greedy accuracy"]
    shown = {name: (form, SPAN) for name, (_, form) in FIELDS.items()} | {"accuracy": (".1%", 1)}
    yield [head, *([arm, *(both(arm, name, *how) for name, how in shown.items())] for arm in ARMS)]


def pictures(record: Record) -> Record:
    """A panel for each field: a line for each seed, thin, and their mean, over the last five steps."""

    def of(arm: str, name: str) -> list[list[float]]:
        curves = [run[name] for run in record["runs"] if run["arm"] == arm]
        return curve([float(i + 1) for i in range(len(curves[0]))], curves, 5)

    panels = [
        {"title": title, "x": "step", "curves": {arm: of(arm, name) for arm in ARMS}} for name, (title, _) in FIELDS.items()
    ]
    return {"replay.svg": {"title": "Losses over the sets and over the vocabulary", "panels": panels, "notes": []}}


EXPERIMENT = Experiment("replay", ROOT / "docs" / "kept_sets.md", tables, measure, pictures)

if __name__ == "__main__":
    EXPERIMENT.main()
