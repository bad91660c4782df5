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
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.machine import machine, require_kernels
from benchmarks.results import RESULTS, ROOT
from benchmarks.tables import Record, Table, render, replace_block
from examples import arithmetic
from grpo_kernels.training.rewards import exact
from grpo_kernels.training.trainer import TrainConfig, Trainer

#: A task that is run for each seed: (the parts of its name, a function of the seed).
Task = tuple[Record, Callable[[int], Any]]
QUIET = 0.5  # load average up to which the machine counts as idle


@dataclass(frozen=True)
class Experiment:
    """What is measured, and where it is shown: `measure` at once, or `tasks` for each of the seeds."""

    name: str  # of its module, its result file and the block of its page
    page: Path
    tables: Callable[[Record], Iterable[Table]]
    measure: Callable[[], Record] = dict  # the result beside its origin
    pictures: Callable[[Record], Record] = lambda record: {}  # {name of a file in docs/: its description for plots.save}
    tasks: Callable[[], Iterable[Task]] = list
    seeds: tuple[int, ...] = ()
    settings: Record = field(default_factory=dict)  # that the result of a task depends on

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

    def runs(self, seeds: Iterable[int], unfinished: Path) -> Record:
        """The result of every task for the seeds, and for those that are known. Each is saved as soon as it is there: a command
        that was cut off goes on, from its own file and from the result file if that has these settings."""
        known: dict[str, Record] = {}
        for record in map(results.load, (self.file, unfinished)):
            known |= {key(run): run for run in record.get("runs", ()) if record["settings"] == self.settings}

        def found() -> Record:
            every = sorted({run["seed"] for run in known.values()})
            order = [key({"seed": seed} | name) for name, _ in self.tasks() for seed in every]
            return {"settings": self.settings, "runs": [known[name] for name in order if name in known]}

        for name, task in self.tasks():
            for run in ({"seed": seed} | name for seed in seeds if key({"seed": seed} | name) not in known):
                began = time.perf_counter()
                known[key(run)] = run | {"found": short(task(run["seed"]))}
                results.save(unfinished, found())
                print(f"{key(run)}: {time.perf_counter() - began:.0f} s", flush=True)
        return found()

    def main(self) -> None:
        description = sys.modules["__main__"].__doc__
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--write", action="store_true", help="keep the figures, and make the page and its pictures")
        if self.seeds:
            parser.add_argument("--seeds", type=int, nargs="+", default=self.seeds)
        args = parser.parse_args()
        require_kernels("cpu")
        if self.seeds:
            record = self.runs(args.seeds, ROOT / "runs" / f"{self.name}.json")
        else:
            record = {"load": os.getloadavg()[0]} | self.measure()
        for table in self.tables(record):
            print(render(table, markdown=False))
        if args.write:
            origin = {"command": self.command, "date": time.strftime("%Y-%m-%d"), "machine": machine("cpu")}
            results.save(self.file, origin | record)
            self.page.write_text(self.updated())
            self.draw()


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
    rows = [row for part in arithmetic.problems(20_000, seed) for row in part]
    rows = [row for row in rows if all(abs(int(term)) <= LARGEST for term in row["sum"].split())]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def warmed_up(seed: int, tok: Any, policy: Callable[[int, int], Any] = arithmetic.policy) -> tuple[Any, list[Any], list[Any]]:
    """(model after the supervised warm-up of the example, training problems, problems to evaluate on)"""
    training, held_out = problems(seed)
    torch.manual_seed(seed)
    model = policy(WIDTH_OF_MODEL, LAYERS)
    arithmetic.warm_up(model, tok, training, seed, WARM_UP, progress=False)
    return model, training, held_out


def batch_seed(seed: int, number: int) -> torch.Generator:
    """For the completions of a batch that is not one of the run's own."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) - number - 1)


class Still(Trainer):
    """A trainer whose updates store the gradient in `gradient` and do not change the policy."""

    gradient: torch.Tensor

    def move(self, lr: float) -> dict[str, float]:
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()]).double()
        self.optimizer.zero_grad()
        return {}


@contextmanager
def trainer(
    start: tuple[Any, list[Any], list[Any]], tok: Any, kind: Any = Trainer, teacher: Any = None, **changes: Any
) -> Iterator[Any]:
    """A trainer of a copy of the model that `start`s, on these problems. Its folder is temporary."""
    model, *rows = start
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"out": folder, "progress": False, "device": "cpu", "eval_prompts": len(rows[1]), "checkpoint_steps": 0}
        own = {"model": copy.deepcopy(model), "tokenizer": tok, "rows": tuple(rows), "teacher": copy.deepcopy(teacher)}
        yield kind(TrainConfig(**(fixed | changes)), rewards=[exact], **own)


def moments(vectors: torch.Tensor) -> tuple[float, float]:
    """(squared length of the expectation, sum of the variances) of vectors [n, size], unbiased."""
    middle, variance = vectors.mean(0), float(vectors.var(0).sum())
    return float(middle @ middle) - variance / len(vectors), variance
