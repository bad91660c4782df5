"""The effect of sparse gradients of the head on a training run.

    python -m benchmarks.sparse_training [--seeds 0 1 ...] [--parts noise ...] [--write]

Experiments on the problems of examples/arithmetic.py over a vocabulary of thousands of ids (`spelled`), in three parts. noise: the
noise from drawing columns compared with that of the batch, at fixed policies. trainer and trl: runs of the reference trainer and of
TRL's GRPOTrainer with the dense gradient and with three steps of the grid. Each result is saved in runs/sparse_training as soon
as it is known, so that an interrupted command can be run again, and several commands may share the seeds. --write: writes the
results so far to benchmarks/results/sparse_training.json, and from it the tables and the picture of docs/sparse_training.md."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else TRL calls home

import torch

from benchmarks import experiments, results, sparse_training_page, spelled
from benchmarks.experiments import Record, Still, Task, moments
from examples import arithmetic
from grpo_kernels.integrations import trl
from grpo_kernels.training import require
from grpo_kernels.training.data import prompts_of_step
from grpo_kernels.training.rewards import exact
from grpo_kernels.training.rollouts import Completions, completion_logits
from grpo_kernels.training.trainer import Trainer

FOLDER = results.ROOT / "runs" / "sparse_training"
SEEDS = (0, 1, 2, 3, 4)
#: Steps of the grid on which columns are drawn: fine, coarse, and one column per row in addition to the target's.
STEPS = (1 / 256, 1 / 16, 1.0)
#: Spellings of each digit in the teacher's answers, in the part noise.
MEASURED = (1, 8, 64)
SETTINGS: Record = {
    "preset": "dapo", "steps": 60, "prompts_per_step": 16, "group_size": 8, "max_new_tokens": 4, "lr": 1e-3, "warmup_steps": 5,
    "lr_schedule": "linear",
}  # fmt: skip
TRL_STEPS = 40
#: Steps of a dense run after which its policy is measured, and the number of batches sampled from it.
STOPS, BATCHES = (1, 60), 16
#: The groups of parameters, by the start of their names.
GROUPS = {"head": "lm_head.", "embedding": "model.embed_tokens.", "layers": "model."}


def trainer(kind: type[Trainer], seed: int, spellings: int, folder: str, **changes: Any) -> Any:
    model, *rows = spelled.warmed_up(seed, spellings, FOLDER)
    settings = {"eval_steps": 0, "seed": seed, **SETTINGS, **changes}
    return experiments.trainer(kind, model, spelled.tokenizer(), (rows[0], rows[1]), exact, folder, **settings)


# ---- noise at fixed policies


def noise(seed: int, spellings: int, stops: tuple[int, ...] = STOPS, batches: int = BATCHES) -> list[Record]:
    """The noise that drawing adds to that of a batch, at policies along a run."""
    measurements = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        run, still = trainer(Trainer, seed, spellings, folder), trainer(Still, seed, spellings, other)
        for stop in stops:
            while run.step < stop:
                run.train_step()
            still.model.load_state_dict(run.model.state_dict())
            measurements.append({"after": stop} | spread(still, batches))
    return measurements


def spread(still: Any, batches: int) -> Record:
    """The noise over batches of different prompts and completions, for the gradient of the policy term and for that of an
    entropy bonus alone. For each group of parameters and each step: the mean squared distance from the dense gradient of the
    same batch, divided by the variance of the dense gradient over batches. Also the mean entropy and the number of columns of
    the first batch's rows."""
    config, statistics = still.config, {}
    terms = {"policy": config.objective, "entropy": replace(config, entropy_coef=1.0).objective}
    sums = {(term, group): [0.0] * (2 + len(STEPS)) for term in terms for group in GROUPS}
    for number in range(batches):
        still.step = number  # the columns' seed depends on it
        prompts = prompts_of_step(still.train_rows, number, config.prompts_per_step, config.seed)
        generator = torch.Generator().manual_seed(1_000_003 * (config.seed + 1) - number - 1)
        completions = still.sample(prompts, config.group_size, 1.0, generator=generator)
        scores = still.score(prompts, completions, config.group_size)
        advantages = still.credit.advantages(prompts, completions, scores)
        statistics = statistics or rows(still.model, completions)
        for term, objective in terms.items():
            still.objective = objective
            dense: dict[str, Any] = {}
            for i, step in enumerate((0.0, *STEPS)):
                still.losses.sparse_step = step
                still.update(completions, advantages if term == "policy" else torch.zeros_like(advantages))
                gradient = by_group(still)
                dense = dense or gradient
                for group, x in gradient.items():
                    apart = x - dense[group]
                    total = sums[term, group]
                    if i:
                        total[i + 1] += apart @ apart
                    else:
                        total[0], total[1] = total[0] + x, total[1] + x @ x
    for (term, group), (total, squares, *apart) in sums.items():
        variance = moments(total, squares, batches)[1]
        statistics.setdefault(term, {})[group] = [float(x) / batches / variance for x in apart]
    return statistics


def by_group(still: Any) -> dict[str, torch.Tensor]:
    """The gradient of each group of parameters, flattened."""
    names, sizes = zip(*((name, p.numel()) for name, p in still.model.named_parameters()), strict=True)
    parts: dict[str, list[torch.Tensor]] = {group: [] for group in GROUPS}
    for name, part in zip(names, still.gradient.split(list(sizes)), strict=True):
        parts[next(group for group, begin in GROUPS.items() if name.startswith(begin))].append(part)
    return {group: torch.cat(part) for group, part in parts.items()}


@torch.no_grad()
def rows(model: Any, completions: Completions) -> Record:
    """The mean entropy in nats, and the mean number of columns at each step, of a batch's rows."""
    p = completion_logits(model, completions)[completions.mask].softmax(-1)
    columns = [float(expected_columns(p, completions.targets[completions.mask], step).mean()) for step in STEPS]
    return {"nats": float(torch.special.entr(p).sum(1).mean()), "columns": columns}


def expected_columns(p: torch.Tensor, targets: torch.Tensor, step: float) -> torch.Tensor:
    """[n]: the mean number of drawn columns, over seeds, for rows with probabilities p [n, V]."""
    drawn = (p / step).clamp(max=1)
    return drawn.sum(1) + 1 - drawn.gather(1, targets[:, None])[:, 0]  # the target is always taken


# ---- runs


def trained(seed: int, spellings: int, step: float, **changes: Any) -> Record:
    """A run of the reference trainer: the mean reward of each of its steps, and greedy accuracy after it."""
    with tempfile.TemporaryDirectory() as folder:
        t = trainer(Trainer, seed, spellings, folder, sparse_step=step, **changes)
        reward = [t.train_step()["reward"] for _ in range(t.config.steps)]
    held_out = spelled.warmed_up(seed, spellings, FOLDER)[2]
    return {"reward": reward, "accuracy": arithmetic.accuracy(t.model, spelled.tokenizer(), held_out)}


def trained_by_trl(seed: int, spellings: int, step: float, steps: int = TRL_STEPS, batch: int | None = None) -> Record:
    """The same for TRL's GRPOTrainer with `batch` completions per step (None: as many as the reference trainer has)."""
    transformers, theirs, datasets = require("transformers"), require("trl"), require("datasets")
    model, training, held_out = spelled.warmed_up(seed, spellings, FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        config = theirs.GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
            max_steps=steps, seed=seed, learning_rate=SETTINGS["lr"], warmup_steps=SETTINGS["warmup_steps"],
            lr_scheduler_type=SETTINGS["lr_schedule"], temperature=1.0, num_generations=SETTINGS["group_size"], loss_type="dapo",
            epsilon_high=0.28, max_completion_length=SETTINGS["max_new_tokens"], gradient_checkpointing=False,
            per_device_train_batch_size=batch or SETTINGS["prompts_per_step"] * SETTINGS["group_size"],
        )  # fmt: skip
        t = theirs.GRPOTrainer(
            model=copy.deepcopy(model), args=config, reward_funcs=exact, train_dataset=datasets.Dataset.from_list(training),
            processing_class=spelled.tokenizer(),
        )  # fmt: skip
        t.remove_callback(transformers.PrinterCallback)
        fused = trl.patch(t, sparse_step=step)
        t.train()
        assert fused.counts["fused"] == steps
        reward = [line["reward"] for line in t.state.log_history if "reward" in line]
        return {"reward": reward, "accuracy": arithmetic.accuracy(t.model, spelled.tokenizer(), held_out)}


# ---- all tasks


def tasks() -> Iterator[Task]:
    for part, spellings, run in (("trainer", 1, trained), ("trl", 1, trained_by_trl), ("trainer", 8, trained)):
        for step in (0.0, *STEPS):
            name = {"part": part, "spellings": spellings, "step": step}
            yield name, functools.partial(run, spellings=spellings, step=step)
    for spellings in MEASURED:
        yield {"part": "noise", "spellings": spellings}, functools.partial(noise, spellings=spellings)


def measure(seeds: tuple[int, ...], parts: tuple[str, ...] = ()) -> None:
    """Adds the results of the seeds to the folder. Results that are already known are not computed again."""
    experiments.measure(tasks(), known(), seeds, FOLDER, parts)


def known(folder: Path = FOLDER) -> list[Record]:
    return experiments.known(tasks(), SEEDS, folder, sparse_training_page.FILE, setup())


def setup() -> Record:
    """The settings that a result depends on."""
    return {
        "run": SETTINGS, "trl_steps": TRL_STEPS, "steps": list(STEPS), "stops": list(STOPS), "batches": BATCHES,
        "vocabulary": spelled.VOCABULARY, "warm_up": spelled.WARM_UP,
    }  # fmt: skip


if __name__ == "__main__":
    experiments.main(__doc__, sparse_training_page, ("noise", "trainer", "trl"), SEEDS[:3], measure, known, setup)
