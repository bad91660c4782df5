"""Shared by the experiments: one harness, which measures, goes on where it was cut off and keeps results, and one maker of
pages.

An experiment is a module of this folder: `python -m benchmarks.NAME` runs it, with --write its results go into
results/NAME.json, and from there into the block of its page and into its pictures. Those with training runs are over the
problems of examples/arithmetic.py."""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.machine import machine, require_kernels
from benchmarks.results import RESULTS, ROOT
from benchmarks.tables import Record, Table, render, replace_block

#: A task that is run for each seed: (the parts of its name, a function of the seed).
Task = tuple[Record, Callable[[int], Any]]
QUIET = 0.5  # load average up to which the machine counts as idle


@dataclass(frozen=True)
class Experiment:
    """What is measured at once, and where it is shown."""

    name: str  # of its module, its result file and the block of its page
    page: Path
    tables: Callable[[Record], Iterable[Table]]
    measure: Callable[[], Record] = dict  # the result beside its origin
    pictures: Callable[[Record], Record] = lambda record: {}  # {name of a file in docs/: its description for plots.save}

    @property
    def command(self) -> str:
        return f"python -m benchmarks.{self.name} --write"

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def block(self, record: Record) -> str:
        """The generated part of the page: how it was made, and the tables. Without a record, the command to run."""
        if not record:
            return f"Not measured yet: `{self.command}`."
        m = record["machine"]
        made_by = f"{m['name']}, {m['threads']} threads, torch {m['torch']}, {record['date']}; `{record['command']}`."
        if record.get("load", 0) > QUIET:
            made_by += f"\n\n**Load average {record['load']:.0f} before: other programs ran, ratios are rough.**"
        return "\n\n".join([made_by, *(render(table, markdown=True) for table in self.tables(record))])

    def updated(self) -> str:
        """The page with what the result file says now."""
        return replace_block(
            self.page.read_text(), self.page.name, self.name, self.block(results.load(self.file)), self.command
        )

    def draw(self) -> None:
        from benchmarks import plots

        record = results.load(self.file)
        for name, shown in self.pictures(record).items() if record else ():
            plots.save(shown, ROOT / "docs" / name)

    def write(self, record: Record) -> None:
        """The result file, the page and its pictures."""
        origin = {"command": self.command, "date": time.strftime("%Y-%m-%d"), "machine": machine("cpu")}
        results.save(self.file, origin | record)
        self.page.write_text(self.updated())
        self.draw()

    def parser(self) -> argparse.ArgumentParser:
        description = sys.modules["__main__"].__doc__
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--write", action="store_true", help="keep the figures, and make the page and its pictures")
        return parser

    def main(self) -> None:
        write = self.parser().parse_args().write
        require_kernels("cpu")
        record = {"load": os.getloadavg()[0]} | self.measure()
        for table in self.tables(record):
            print(render(table, markdown=False))
        if write:
            self.write(record)


@dataclass(frozen=True)
class Runs(Experiment):
    """An experiment of many runs. Each result is saved in runs/NAME as soon as it is known, so that an interrupted command can
    be run again, and several commands may share the seeds."""

    tasks: Callable[[], Iterable[Task]] = list
    seeds: tuple[int, ...] = (0, 1, 2)
    settings: Record = field(default_factory=dict)  # that a result depends on

    @property
    def folder(self) -> Path:
        return ROOT / "runs" / self.name

    def run(self, seeds: Iterable[int], parts: Iterable[str] = (), folder: Path | None = None) -> None:
        """Saves the results of the seeds in the folder. Those that are known are not computed again. parts: only these, if
        any."""
        folder, parts = folder or self.folder, set(parts)
        done = {key(record) for record in self.known(folder)}
        for name, task in self.tasks():
            for record in ({"seed": seed} | name for seed in seeds):
                if key(record) in done or (parts and name["part"] not in parts):
                    continue
                began = time.perf_counter()
                results.save(folder / f"{key(record)}.json", record | {"found": short(task(record["seed"]))})
                print(f"{key(record)}: {time.perf_counter() - began:.0f} s", flush=True)

    def known(self, folder: Path | None = None) -> list[Record]:
        """The results in the folder, and those of the result file if it has these settings. Ordered by task, then by seed."""
        kept = results.load(self.file)
        records = {key(record): record for record in kept.get("runs", ()) if kept["settings"] == self.settings}
        records |= {one.stem: results.load(one) for one in (folder or self.folder).glob("*.json")}
        seeds = sorted({record["seed"] for record in records.values()})
        order = [key({"seed": seed} | name) for name, _ in self.tasks() for seed in seeds]
        return [records[name] for name in order if name in records]

    def main(self) -> None:
        """With --write nothing is measured."""
        parser = self.parser()
        parser.add_argument("--seeds", type=int, nargs="+", default=self.seeds)
        parser.add_argument(
            "--parts",
            nargs="+",
            default=(),
            choices=dict.fromkeys(name["part"] for name, _ in self.tasks()),
            help="default: all",
        )
        args = parser.parse_args()
        if args.write:
            self.write({"settings": self.settings, "runs": self.known()})
        else:
            self.run(args.seeds, args.parts)


def key(record: Record) -> str:
    return "-".join(str(value) for name, value in record.items() if name != "found")


def short(x: Any) -> Any:
    """Numbers to four digits."""
    if isinstance(x, dict):
        return {name: short(part) for name, part in x.items()}
    if isinstance(x, list):
        return [short(part) for part in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


# ---- tables and curves over seeds


def by(runs: Iterable[Record], *fields: str) -> dict[tuple, list[Record]]:
    """The runs grouped by the values of these fields."""
    groups: dict[tuple, list[Record]] = {}
    for run in runs:
        groups.setdefault(tuple(run[name] for name in fields), []).append(run)
    return groups


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def with_spread(values: Iterable[float], form: str) -> str:
    """Mean and standard deviation over the seeds. One seed has no deviation; no seed gives ""."""
    values = [*values]
    if len(values) < 2:
        return "".join(format(value, form) for value in values)
    return f"{mean(values):{form}} ± {statistics.stdev(values):{form}}"


def curve(x: list[float], of_seeds: list[list[float]], width: int = 1) -> list[list[float]]:
    """[x, the means over the seeds, the curve of each seed]; each value is a mean over `width` steps."""
    smooth = [[mean(one[max(0, i + 1 - width) : i + 1]) for i in range(len(one))] for one in of_seeds]
    return short([x, [mean(values) for values in zip(*smooth, strict=True)], *smooth])


def last(values: list[float], count: int) -> float:
    return mean(values[-count:])


# ---- training runs

WIDTH_OF_MODEL, LAYERS, WARM_UP = 64, 2, 300
#: Problems have numbers up to LARGEST, which such a small model can learn; HELD_OUT of them are held out.
LARGEST, HELD_OUT = 9, 100


def problems(seed: int) -> tuple[list[Any], list[Any]]:
    """(training problems, problems to evaluate on)"""
    from examples import arithmetic

    rows = [row for part in arithmetic.problems(20_000, seed) for row in part]
    rows = [row for row in rows if all(abs(int(term)) <= LARGEST for term in row["sum"].split())]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def trainer(
    kind: Any, model: Any, tok: Any, rows: tuple[list[Any], list[Any]], reward: Any, folder: str, **changes: Any
) -> Any:
    """A trainer of a copy of the model. `teacher` among the changes goes to the trainer, the others to its config."""
    from grpo_kernels.training.trainer import TrainConfig

    teacher = copy.deepcopy(changes.pop("teacher", None))
    fixed = {"out": folder, "progress": False, "device": "cpu", "eval_prompts": len(rows[1]), "checkpoint_steps": 0}
    config = TrainConfig(**(fixed | changes))
    return kind(config, model=copy.deepcopy(model), tokenizer=tok, rows=rows, rewards=[reward], teacher=teacher)


def still(model: Any, *rest: Any, **changes: Any) -> Any:
    """A trainer whose updates store the gradient in `gradient` and do not change the policy."""
    from grpo_kernels.training.trainer import Trainer

    class Still(Trainer):
        gradient: torch.Tensor

        def move(self, lr: float) -> dict[str, float]:
            self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()]).double()
            self.optimizer.zero_grad()
            return {}

    return trainer(Still, model, *rest, **changes)


def moments(vectors: torch.Tensor) -> tuple[float, float]:
    """(squared length of the expectation, sum of the variances) of vectors [n, size], unbiased."""
    middle, variance = vectors.mean(0), float(vectors.var(0).sum())
    return float(middle @ middle) - variance / len(vectors), variance
