"""A draft head that learns together with its policy: `python -m examples.draft_head`.

The small policy of `examples.arithmetic` goes on by GRPO, with the option `draft_lr` of the
reference trainer. Acceptance is the probability that speculative sampling takes a draft's token,
over the completions of each step, before the draft learns from them. A copy of the draft stops
learning half-way: it shows how much a draft loses while the policy continues to learn.

    python -m examples.draft_head --seed 0 1 2 --write  # the figures of docs/training.md
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks import results
from benchmarks.machine import machine
from benchmarks.plots import HIGHLIGHT, MUTED, STYLE, TEXT
from benchmarks.tables import render, replace_block
from examples import arithmetic
from grpo_kernels.training.draft import DraftTrainer
from grpo_kernels.training.policy import Completions
from grpo_kernels.training.rewards import exact
from grpo_kernels.training.trainer import TrainConfig, Trainer

Record = dict[str, Any]

FILE = results.RESULTS / "draft_head.json"
COMMAND = "python -m examples.draft_head --seed 0 1 2 --write"
PAGE = results.ROOT / "docs" / "training.md"
PICTURE = results.ROOT / "docs" / "draft_heads.svg"
#: Steps whose mean is taken before and after.
FEW = 5


@dataclass(frozen=True)
class Size:
    """The size of the model and of the run."""

    width: int = 64
    layers: int = 2
    warm_up: int = 1000
    steps: int = 120
    prompts: int = 16
    group: int = 8
    lr: float = 3e-4
    draft_lr: float = 2e-3


# ---- a run


class TrainerWithStoppedDraft(Trainer):
    """A Trainer that copies the draft half-way, and measures the copy at each later step."""

    stopped: DraftTrainer | None = None

    def update(self, completions: Completions, advantages: Tensor) -> dict[str, float]:
        metrics = super().update(completions, advantages)
        if self.step == self.config.steps // 2:
            self.stopped = copy_of_draft(self)
        if self.stopped is not None:
            metrics["stopped_acceptance"] = self.stopped.update(completions)["draft_acceptance"]
        return metrics


def copy_of_draft(trainer: Trainer) -> DraftTrainer:
    """Return a copy of the trainer's draft with learning rate 0, whose updates change nothing."""
    assert trainer.draft is not None
    stopped = DraftTrainer(trainer.config, trainer.policy, trainer.ranks)
    stopped.load_state(copy.deepcopy(trainer.draft.state()))
    for group in stopped.optimizer.param_groups:
        group["lr"] = 0.0
    return stopped


def run(seed: int, size: Size, progress: bool = True) -> Record:
    """Train with a draft head. Return the record of a seed: reward and acceptance of each step.

    It uses one thread, which is enough for so small a model.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tok, model = arithmetic.tokenizer(), arithmetic.policy(size.width, size.layers)
    training, _ = arithmetic.problems(8000, seed)
    arithmetic.warm_up(model, tok, training, seed, size.warm_up, progress)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            steps=size.steps, prompts_per_step=size.prompts, group_size=size.group, max_new_tokens=4, lr=size.lr,
            draft_lr=size.draft_lr, warmup_steps=3, eval_steps=0, out=folder, seed=seed, progress=False, device="cpu",
        )  # fmt: skip
        trainer = TrainerWithStoppedDraft(
            config, model=model, tokenizer=tok, rows=(training, []), rewards=[exact]
        )
        for step in range(size.steps):
            lines.append(trainer.train_step())
            if progress and step % 10 == 0:
                print(f"seed {seed}, step {step}: {lines[-1]['draft_acceptance']:.3f}", flush=True)
        trainer.folder.release()
    names = ("reward", "draft_acceptance", "draft_top1_agreement", "draft_loss")
    record: Record = {name: [round(line[name], 4) for line in lines] for name in names}
    record["stopped_acceptance"] = [
        round(line["stopped_acceptance"], 4) for line in lines if "stopped_acceptance" in line
    ]
    return {"seed": seed, **record}


# ---- what it shows


def table(record: Record) -> list[list[str]]:
    """Return a table with a line for each seed: means over the first or last `FEW` steps."""
    head = ["seed", "reward", "acceptance: untrained", "trained throughout"]
    lines = [[*head, "stopped half-way", "top-1 agreement"]]
    for one in record["runs"]:
        reward, acceptance, stopped, agreement = (
            one[name]
            for name in ("reward", "draft_acceptance", "stopped_acceptance", "draft_top1_agreement")
        )
        lines.append(
            [
                str(one["seed"]),
                f"{statistics.fmean(reward[:FEW]):.2f} -> {statistics.fmean(reward[-FEW:]):.2f}",
                f"{acceptance[0]:.3f}",
                f"{statistics.fmean(acceptance[-FEW:]):.3f}",
                f"{statistics.fmean(stopped[-FEW:]):.3f}",
                f"{statistics.fmean(agreement[-FEW:]):.3f}",
            ]
        )
    return lines


def block(record: Record) -> str:
    """Return the text of the page: the setting, the command and the table."""
    size, of = record["size"], record["machine"]
    setting = (
        f"{size['steps']} steps of {size['prompts'] * size['group']} completions; means of the last"
        f" {FEW} steps. {of['name']}, {of['threads']} threads, torch {of['torch']},"
        f" {record['date']}. `{record['command']}`."
    )
    return "\n".join([setting, "", render(table(record), markdown=True)])


def draw(record: Record) -> Figure:
    """Return a figure with the acceptance of each step, a line for each seed."""
    with matplotlib.rc_context(STYLE):
        page = Figure(figsize=(6.0, 2.8), layout="constrained")
        FigureCanvasAgg(page)
        page.patch.set_alpha(0)
        axes = page.subplots()
        for one in record["runs"]:
            is_first = one is record["runs"][0]
            acceptance, stopped = one["draft_acceptance"], one["stopped_acceptance"]
            start = len(acceptance) - len(stopped)
            axes.plot(
                range(start, len(acceptance)),
                stopped,
                color="#bb6f2c",
                linewidth=1.0,
                label="stopped half-way" if is_first else None,
            )
            axes.plot(
                acceptance,
                color=HIGHLIGHT,
                linewidth=1.0,
                label="goes on learning" if is_first else None,
            )
        axes.legend(frameon=False, labelcolor=TEXT, loc="lower right")
        axes.set_xlabel("step")
        seeds = ", ".join(str(one["seed"]) for one in record["runs"])
        axes.set_title(f"acceptance of the draft's tokens, seeds {seeds}")
        axes.patch.set_alpha(0)
        axes.grid(color=MUTED, alpha=0.2, linewidth=0.5)
        axes.set_axisbelow(True)
    return page


def save_picture(record: Record, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        draw(record).savefig(path, metadata={"Date": None, "Title": "A draft head"})


def main(argv: list[str] | None = None, size: Size = Size()) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.draft_head", description="A draft head that learns during GRPO."
    )
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="one run for each (default: 0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/draft_head"),
        help="folder of draft_head.json and draft_heads.svg (default: runs/draft_head)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the figures and the picture of docs/training.md instead",
    )
    args = parser.parse_args(argv)
    runs = [run(seed, size) for seed in args.seed]
    record = results.origin(machine("cpu"), COMMAND) | {"size": asdict(size), "runs": runs}
    print(block(record))
    file = FILE if args.write else args.out / "draft_head.json"
    picture = PICTURE if args.write else args.out / "draft_heads.svg"
    results.save(file, record)
    save_picture(record, picture)
    if args.write:
        page = replace_block(PAGE.read_text(), PAGE.name, "draft_head", block(record), COMMAND)
        PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
