"""Shared by experiments with training runs: trainers, gradients at a fixed policy, results saved one by one, the command line."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import results
from benchmarks.machine import machine
from grpo_kernels.training.rewards import RewardFunction
from grpo_kernels.training.trainer import TrainConfig, Trainer

Record = dict[str, Any]
#: A task that is run for each seed: (the parts of its name, a function of the seed).
Task = tuple[Record, Callable[[int], Any]]


def trainer(
    kind: type[Trainer], model: Any, tok: Any, rows: tuple[list[Any], list[Any]], reward: RewardFunction, folder: str, **changes: Any
) -> Any:  # fmt: skip
    """A trainer of a copy of the model. `teacher` among the changes goes to the trainer, the others to its config."""
    config = TrainConfig(**{
        "out": folder, "progress": False, "device": "cpu", "eval_prompts": len(rows[1]), "checkpoint_steps": 0,
        **{name: value for name, value in changes.items() if name != "teacher"},
    })  # fmt: skip
    return kind(
        config, model=copy.deepcopy(model), tokenizer=tok, rows=rows, rewards=[reward],
        teacher=copy.deepcopy(changes.get("teacher")),
    )  # fmt: skip


class Still(Trainer):
    """A trainer whose updates store the gradient in `gradient` and do not change the policy."""

    gradient: torch.Tensor

    def move(self, lr: float) -> dict[str, float]:
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()]).double()
        self.optimizer.zero_grad()
        return {}


def moments(total: Any, squares: Any, count: int) -> tuple[float, float]:
    """(squared length of the expectation, sum of the variances) of vectors, unbiased, from their sum and that of their squared
    lengths."""
    mean = total / count
    variance = max(float(squares - count * (mean @ mean)), 0.0) / (count - 1)
    return float(mean @ mean) - variance / count, variance


# ---- results


def measure(tasks: Iterable[Task], kept: list[Record], seeds: tuple[int, ...], folder: Path, parts: tuple[str, ...]) -> None:
    """Saves the results of the seeds in the folder. Those among `kept` are not computed again. parts: only these, if not empty."""
    done = {key(record) for record in kept}
    for name, task in tasks:
        for seed in seeds:
            record = {"seed": seed} | name
            if key(record) in done or (parts and name["part"] not in parts):
                continue
            began = time.perf_counter()
            results.save(folder / f"{key(record)}.json", record | {"found": short(task(seed))})
            print(f"{key(record)}: {time.perf_counter() - began:.0f} s", flush=True)


def known(tasks: Iterable[Task], seeds: tuple[int, ...], folder: Path, file: Path, settings: Record) -> list[Record]:
    """The results in the folder, and those of the result file if it has these settings. Ordered by task, then by seed."""
    kept = results.load(file)
    records = {key(record): record for record in kept.get("runs", ()) if kept["settings"] == settings}
    records |= {one.stem: results.load(one) for one in folder.glob("*.json")}
    order = [key({"seed": seed} | name) for name, _ in tasks for seed in seeds]
    return [records[name] for name in order if name in records]


def key(record: Record) -> str:
    return "-".join(str(value) for name, value in record.items() if name != "found")


def main(
    description: str | None, page: ModuleType, parts: tuple[str, ...], seeds: tuple[int, ...], measure: Callable[..., None],
    known: Callable[[], list[Record]], setup: Callable[[], Record],
) -> None:  # fmt: skip
    """The command line of an experiment: measures the chosen parts for the chosen seeds; with --write, makes the page instead.

    description: the help text. page: the module with the page's COMMAND and `write`. parts: their names. seeds: the default.
    measure(seeds, parts=...), known() and setup() are those of the experiment."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    parser.add_argument("--parts", nargs="+", default=(), choices=parts, help="default: all")
    parser.add_argument(
        "--write", action="store_true", help="make the page and its pictures from the results so far, and measure nothing"
    )
    args = parser.parse_args()
    if not args.write:
        measure(tuple(args.seeds), parts=tuple(args.parts))
        return
    page.write(
        {
            "command": page.COMMAND,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine("cpu"),
            "settings": setup(),
            "runs": known(),
        }
    )


def short(x: Any) -> Any:
    """Numbers to four digits."""
    if isinstance(x, dict):
        return {name: short(part) for name, part in x.items()}
    if isinstance(x, list):
        return [short(part) for part in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x
