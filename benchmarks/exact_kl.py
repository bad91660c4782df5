"""The effect on training of the exact KL over whole distributions, and distillation with it.

    python -m benchmarks.exact_kl [--seeds 0 1 ...] [--write]

Three experiments with the reference trainer on the problems of examples/arithmetic.py: how much the KL and its gradient vary from
batch to batch while the policy is fixed; the reward and the KL at the end of training runs; and whether a small student reaches its
teacher. Each result is saved in runs/exact_kl as soon as it is known, so that an interrupted command can be run again, and several
commands may share the seeds. --write: writes the results so far to benchmarks/results/exact_kl.json, and from it the tables and
pictures of docs/exact_kl_experiment.md."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import exact_kl_page, experiments, replay, results
from benchmarks.experiments import Record, Still, Task, moments
from examples import arithmetic
from grpo_kernels import token_divergence
from grpo_kernels.training.data import prompts_of_step
from grpo_kernels.training.rewards import exact
from grpo_kernels.training.rollouts import completion_logits
from grpo_kernels.training.trainer import Trainer

FOLDER = results.ROOT / "runs" / "exact_kl"
SEEDS = (0, 1, 2, 3, 4)
#: Values of --kl. The gradients of k1+ and k3 are those of the two exact divergences above them, estimated from the sampled token.
ARMS = ("exact", "exact-forward", "k1+", "k3")
#: The settings of all runs with rewards.
SETTINGS: Record = {
    "preset": "dapo", "steps": 120, "prompts_per_step": 32, "group_size": 8, "max_new_tokens": 4, "lr": 5e-4, "warmup_steps": 5,
    "lr_schedule": "linear",
}  # fmt: skip
#: Coefficients of the KL, and two settings in which noise has more effect: a large learning rate until the end, and an eighth of
#: the completions.
REWARDS: dict[str, Record] = {
    "beta=0.3": {"beta": 0.3},
    "beta=1": {"beta": 1.0},
    "beta=1, large steps": {"beta": 1.0, "lr": 1e-3, "lr_schedule": "constant"},
    "beta=0.3, small batch": {"beta": 0.3, "prompts_per_step": 8, "group_size": 4},
}
#: Steps of a run without a KL after which its policy is measured, and the number of batches of completions drawn from it.
STOPS, BATCHES = (1, 10, 120), 100
#: Steps between two evaluations of a run, and completions of each held-out prompt in an evaluation.
EVERY, LOOK = 10, 8
#: Distillation: width and layers of teacher and student and their supervised steps; numbers in the problems; runs.
TEACHER, STUDENT, TEACHER_STEPS, STUDENT_STEPS = (128, 2), (64, 2), 700, 300
LARGEST, HELD_OUT = 19, 300
DISTILLED: Record = {
    "steps": 1200, "prompts_per_step": 128, "group_size": 1, "max_new_tokens": 4, "warmup_steps": 5, "lr_schedule": "linear"
}  # fmt: skip
WAYS = {"exact": "distillation", "sampled token": "sampled_distillation"}
#: The first two are the comparison: the exact KL and the sampled token, each at its best learning rate. The others show other
#: rates.
PAIRS = (("exact", 5e-3), ("sampled token", 1e-3), ("exact", 1e-3), ("sampled token", 5e-3))


def trainer(kind: type[Trainer], model: Any, rows: tuple[list[Any], list[Any]], folder: str, **changes: Any) -> Any:
    """A trainer of a copy of the model."""
    settings = {"eval_steps": EVERY, **changes}
    return experiments.trainer(kind, model, arithmetic.tokenizer(), rows, exact, folder, **settings)


@functools.cache
def warmed_up(seed: int) -> tuple[Any, list[Any], list[Any]]:
    """The model, training problems and held-out problems at the start of every run with rewards; those of `replay`."""
    return replay.warmed_up(seed, arithmetic.tokenizer())


# ---- noise at fixed policies


def gradients(seed: int, stops: tuple[int, ...] = STOPS, batches: int = BATCHES) -> list[Record]:
    """The spread over batches of the KL's value and gradient, at policies along a run without a KL."""
    model, training, held_out = warmed_up(seed)
    measurements = []
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(Trainer, model, (training, held_out), folder, seed=seed, **SETTINGS)
        for stop in stops:
            while run.step < stop:
                run.train_step()
            measurements.append({"step": stop} | spread(run.model, model, (training, held_out), seed, batches))
    return measurements


def spread(policy: Any, reference: Any, rows: tuple[list[Any], list[Any]], seed: int, batches: int) -> Record:
    """Over batches of completions of the same prompts, each as large as that of a step: for each arm the mean and standard
    deviation of the value, and the statistics of the gradient from `of_gradient`."""
    values: dict[str, list[float]] = {arm: [] for arm in ARMS}
    sums: dict[str, list[Any]] = {arm: [0.0, 0.0, 0.0, 0.0] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | {"preset": "distillation", "kl": "exact", "seed": seed}  # the KL alone
        t = trainer(Still, policy, rows, folder, teacher=reference, **settings)
        objectives = {arm: replace(t.config, kl=arm).objective for arm in ARMS}
        prompts = prompts_of_step(t.train_rows, 0, t.config.prompts_per_step, seed)
        for number in range(batches):
            generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) - number - 1)
            completions = t.rollouts.sample(prompts, t.config.group_size, generator)
            exact_gradient = None
            for arm, objective in objectives.items():
                t.objective = objective
                values[arm].append(t.update(completions, torch.zeros(len(completions.ids)))["loss"])
                exact_gradient = t.gradient if exact_gradient is None else exact_gradient
                apart = t.gradient - exact_gradient
                for i, x in enumerate((t.gradient, t.gradient @ t.gradient, apart, apart @ apart)):
                    sums[arm][i] = sums[arm][i] + x
    unit = float(torch.linalg.vector_norm(sums["exact"][0] / batches))
    return {arm: of_value(values[arm]) | of_gradient(*sums[arm], batches, unit) for arm in ARMS}


def of_value(values: list[float]) -> Record:
    x = torch.tensor(values, dtype=torch.float64)
    return {"value": float(x.mean()), "value_sd": float(x.std())}


def of_gradient(total: Any, squares: Any, apart: Any, squares_apart: Any, count: int, unit: float) -> Record:
    """Statistics from sums over batches: of the gradients and their squared lengths, and of the differences from the gradients
    of the exact KL and their squared lengths. deviation: root mean square distance of a batch's gradient from the mean
    gradient, divided by the length of the mean. bias: distance of the mean gradient from that of the exact KL, divided by the
    latter's length (`unit`), after subtracting the part due to the finite number of batches; bias_noise is that part."""
    _, variance = moments(total, squares, count)
    distance, noise = moments(apart, squares_apart, count)
    return {
        "deviation": math.sqrt(variance) / float(torch.linalg.vector_norm(total / count)),
        "bias": math.sqrt(max(distance, 0.0)) / unit,
        "bias_noise": math.sqrt(noise / count) / unit,
    }


# ---- runs with rewards


def rewarded(seed: int, **changes: Any) -> Record:
    """One run: the mean reward of each step, and the reward and exact KL on held-out prompts every few steps and at the end."""
    model, training, held_out = warmed_up(seed)
    with tempfile.TemporaryDirectory() as folder:
        t = trainer(Trainer, model, (training, held_out), folder, seed=seed, **{**SETTINGS, **changes})
        seen, reward = [look(t, model)], []
        while t.step < t.config.steps:
            reward.append(t.train_step()["reward"])
            if t.step % EVERY == 0 or t.step == t.config.steps:
                seen.append(look(t, model))
    return {"reward": reward, "held_out_reward": [x for x, _ in seen], "kl": [x for _, x in seen]}


@torch.no_grad()
def look(t: Trainer, reference: Any) -> tuple[float, float]:
    """(mean reward, KL(policy, reference) per token) of completions of the held-out prompts, always sampled with the same random
    numbers."""
    completions = t.rollouts.sample(t.eval_rows, LOOK, torch.Generator().manual_seed(0))
    reward = float(t.rollouts.score(t.eval_rows, completions, LOOK).totals.mean())
    logits, of_reference = (completion_logits(model, completions) for model in (t.model, reference))
    kl = token_divergence(logits, of_reference, "reverse", mask=completions.mask)
    return reward, float(kl[completions.mask].mean())


# ---- a student and its teacher


@functools.cache
def pair(seed: int, teacher_steps: int = TEACHER_STEPS) -> tuple[Any, Any, list[Any], list[Any]]:
    """(teacher, student, training problems, held-out problems with other sums). The teacher was trained on right answers. The
    student, four times as small, was trained for fewer steps on the answers of the example's careless teacher."""
    training, held_out = (
        [row for row in rows if all(abs(int(term)) <= LARGEST for term in row["sum"].split())]
        for rows in arithmetic.problems(40_000, seed)
    )
    right = [row | {"slip": row["answer"]} for row in training]
    tok, made = arithmetic.tokenizer(), []
    for size, rows, steps in ((TEACHER, right, teacher_steps), (STUDENT, training, min(teacher_steps, STUDENT_STEPS))):
        torch.manual_seed(seed)
        made.append(arithmetic.policy(*size))
        arithmetic.warm_up(made[-1], tok, rows, seed, steps, progress=False)
    return made[0], made[1], training, held_out[:HELD_OUT]


def distilled(seed: int, way: str, lr: float, teacher_steps: int = TEACHER_STEPS, **changes: Any) -> Record:
    """Greedy accuracy on held-out problems: of the teacher, and of the student at every twentieth of its run. The reward has
    weight 0."""
    teacher, student, training, held_out = pair(seed, teacher_steps)
    settings = {**DISTILLED, "preset": WAYS[way], "lr": lr, "seed": seed, "reward_weights": [0.0], **changes}
    with tempfile.TemporaryDirectory() as folder:
        t = trainer(Trainer, student, (training, held_out), folder, teacher=teacher, **settings)
        steps = [t.config.steps * i // 20 for i in range(21)]
        accuracy = []
        for stop in steps:
            while t.step < stop:
                t.train_step()
            accuracy.append(t.rollouts.evaluate(t.eval_rows)["accuracy"])
    of_teacher = arithmetic.accuracy(teacher, arithmetic.tokenizer(), held_out)
    return {"teacher": of_teacher, "steps": steps, "accuracy": accuracy}


# ---- all tasks


def tasks() -> Iterator[Task]:
    yield {"part": "gradients"}, gradients
    yield {"part": "rewards", "setting": "beta=0", "arm": "no KL"}, functools.partial(rewarded, beta=0.0)
    for setting, changes in REWARDS.items():
        for arm in ARMS:
            yield {"part": "rewards", "setting": setting, "arm": arm}, functools.partial(rewarded, kl=arm, **changes)
    for way, lr in PAIRS:
        yield {"part": "distillation", "arm": way, "lr": lr}, functools.partial(distilled, way=way, lr=lr)


def measure(seeds: tuple[int, ...] = SEEDS, folder: Path = FOLDER, parts: tuple[str, ...] = ()) -> None:
    """Adds the results of the seeds to the folder. Results in the folder or in the result file are not computed again."""
    experiments.measure(tasks(), known(folder), seeds, folder, parts)


def known(folder: Path = FOLDER) -> list[Record]:
    return experiments.known(tasks(), SEEDS, folder, exact_kl_page.FILE, setup())


def setup() -> Record:
    """The settings that a result depends on."""
    return {"run": SETTINGS, "changes": REWARDS, "stops": list(STOPS), "batches": BATCHES, "distillation": DISTILLED}


if __name__ == "__main__":
    experiments.main(__doc__, exact_kl_page, ("gradients", "rewards", "distillation"), SEEDS, measure, known, setup)
