"""The effect on training of the exact KL over whole distributions, and distillation with it.

    python -m benchmarks.exact_kl [--seeds 0 1 ...] [--write]

Three experiments with the reference trainer on the problems of examples/arithmetic.py: how much the KL and its gradient vary
from batch to batch while the policy is fixed; the reward and the KL at the end of training runs; and whether a small student
reaches its teacher. Each result is saved as soon as it is known, so that an interrupted command can be run again. --write: writes
the results to benchmarks/results/exact_kl.json, and from it the tables and pictures of docs/exact_kl_experiment.md."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks import experiments
from benchmarks.experiments import Experiment, Still, Task, batch_seed, by, curve, last, mean, moments, short, with_spread
from benchmarks.results import ROOT
from benchmarks.tables import Record, Table
from examples import arithmetic
from grpo_kernels import token_divergence
from grpo_kernels.training.data import prompts_of_step
from grpo_kernels.training.rollouts import completion_logits
from grpo_kernels.training.trainer import Trainer

SEEDS = (0, 1, 2, 3, 4)
#: Values of --kl. The gradients of k1+ and k3 are those of the two exact divergences above them, estimated from the sampled
#: token.
ARMS = ("exact", "exact-forward", "k1+", "k3")
#: The settings of all runs with rewards.
SETTINGS: Record = {
    "preset": "dapo", "steps": 120, "prompts_per_step": 32, "group_size": 8, "max_new_tokens": 4, "lr": 5e-4, "warmup_steps": 5,
    "lr_schedule": "linear",
}  # fmt: skip
#: Coefficients of the KL, and two settings in which noise has more effect: a large learning rate until the end, and an eighth
#: of the completions.
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


@functools.cache
def warmed_up(seed: int) -> tuple[Any, list[Any], list[Any]]:
    """The model, training problems and held-out problems at the start of every run with rewards; those of `replay`."""
    return experiments.warmed_up(seed, arithmetic.tokenizer())


def trainer(start: tuple[Any, list[Any], list[Any]], kind: Any = Trainer, **changes: Any) -> Any:
    return experiments.trainer(start, arithmetic.tokenizer(), kind, **({"eval_steps": EVERY} | changes))


# ---- noise at fixed policies


def gradients(seed: int, stops: tuple[int, ...] = STOPS, batches: int = BATCHES) -> list[Record]:
    """The spread over batches of the KL's value and gradient, at policies along a run without a KL."""
    measurements = []
    with trainer(warmed_up(seed), seed=seed, **SETTINGS) as run:
        for stop in stops:
            while run.step < stop:
                run.train_step()
            measurements.append({"step": stop} | spread(run.model, seed, batches))
    return measurements


def spread(policy: Any, seed: int, batches: int) -> Record:
    """Over batches of completions of the same prompts, each as large as that of a step: for each arm the mean and standard
    deviation of the value, and the statistics of the gradient from `of_gradient`."""
    reference, *rows = warmed_up(seed)
    values: dict[str, list[float]] = {arm: [] for arm in ARMS}
    gradients: dict[str, list[torch.Tensor]] = {arm: [] for arm in ARMS}
    settings = SETTINGS | {"preset": "distillation", "kl": "exact", "seed": seed}  # the KL alone
    with trainer((policy, *rows), Still, teacher=reference, **settings) as t:
        objectives = {arm: replace(t.config, kl=arm).objective for arm in ARMS}
        prompts = prompts_of_step(t.train_rows, 0, t.config.prompts_per_step, seed)
        for number in range(batches):
            completions = t.rollouts.sample(prompts, t.config.group_size, batch_seed(seed, number))
            for arm, t.objective in objectives.items():
                values[arm].append(t.update(completions, torch.zeros(len(completions.ids)))["loss"])
                gradients[arm].append(t.gradient)
    found = {arm: torch.stack(of) for arm, of in gradients.items()}
    of_values = {arm: {"value": mean(of), "value_sd": statistics.stdev(of)} for arm, of in values.items()}
    return {arm: of_values[arm] | of_gradient(found[arm], found["exact"]) for arm in ARMS}


def of_gradient(found: torch.Tensor, exactly: torch.Tensor) -> Record:
    """Statistics of gradients [batches, parameters]. deviation: root mean square distance of a batch's gradient from the mean
    gradient, divided by the length of the mean. bias: distance of the mean gradient from that of the exact KL, divided by the
    latter's length, after subtracting the part due to the finite number of batches; bias_noise is that part."""
    _, variance = moments(found)
    distance, noise = moments(found - exactly)
    unit = float(exactly.mean(0).norm())
    return {
        "deviation": math.sqrt(variance) / float(found.mean(0).norm()),
        "bias": math.sqrt(max(distance, 0.0)) / unit,
        "bias_noise": math.sqrt(noise / len(found)) / unit,
    }


# ---- runs with rewards


def rewarded(seed: int, **changes: Any) -> Record:
    """One run: the mean reward of each step, and the reward and exact KL on held-out prompts every few steps and at the end."""
    start = warmed_up(seed)
    with trainer(start, seed=seed, **{**SETTINGS, **changes}) as t:
        seen, reward = [look(t, start[0])], []
        while t.step < t.config.steps:
            reward.append(t.train_step()["reward"])
            if t.step % EVERY == 0 or t.step == t.config.steps:
                seen.append(look(t, start[0]))
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
def pair(seed: int) -> tuple[Any, Any, list[Any], list[Any]]:
    """(teacher, student, training problems, held-out problems with other sums). The teacher was trained on right answers. The
    student, four times as small, was trained for fewer steps on the answers of the example's careless teacher."""
    training, held_out = (
        [row for row in rows if all(abs(int(term)) <= LARGEST for term in row["sum"].split())]
        for rows in arithmetic.problems(40_000, seed)
    )
    right = [row | {"slip": row["answer"]} for row in training]
    tok, made = arithmetic.tokenizer(), []
    for size, rows, steps in ((TEACHER, right, TEACHER_STEPS), (STUDENT, training, STUDENT_STEPS)):
        torch.manual_seed(seed)
        made.append(arithmetic.policy(*size))
        arithmetic.warm_up(made[-1], tok, rows, seed, steps, progress=False)
    return made[0], made[1], training, held_out[:HELD_OUT]


def distilled(seed: int, way: str, lr: float) -> Record:
    """Greedy accuracy on held-out problems: of the teacher, and of the student at every twentieth of its run. The reward has
    weight 0."""
    teacher, *start = pair(seed)
    settings = {**DISTILLED, "preset": WAYS[way], "lr": lr, "seed": seed, "reward_weights": [0.0]}
    with trainer(tuple(start), teacher=teacher, **settings) as t:
        steps = [t.config.steps * i // 20 for i in range(21)]
        accuracy = []
        for stop in steps:
            while t.step < stop:
                t.train_step()
            accuracy.append(t.rollouts.evaluate(t.eval_rows)["accuracy"])
    return {"teacher": arithmetic.accuracy(teacher, arithmetic.tokenizer(), start[2]), "steps": steps, "accuracy": accuracy}


# ---- all tasks


def tasks() -> Iterator[Task]:
    yield {"part": "gradients"}, gradients
    yield {"part": "rewards", "setting": "beta=0", "arm": "no KL"}, functools.partial(rewarded, beta=0.0)
    for setting, changes in REWARDS.items():
        for arm in ARMS:
            yield {"part": "rewards", "setting": setting, "arm": arm}, functools.partial(rewarded, kl=arm, **changes)
    for way, lr in PAIRS:
        yield {"part": "distillation", "arm": way, "lr": lr}, functools.partial(distilled, way=way, lr=lr)


# ---- the page

NAMES = {
    "exact": "exact, reverse", "exact-forward": "exact, forward", "k1+": "k1+ (gradient of k2)", "k3": "k3", "no KL": "no KL",
    "sampled token": "sampled token",
}  # fmt: skip
#: The exact KL whose gradient is the expectation of an estimator's gradient.
ESTIMATED = {"k1+": "exact", "k3": "exact-forward"}
#: The end of a run is the mean of so many last evaluations.
LAST = 3
#: The settings whose curves are drawn.
SHOWN = ("beta=1", "beta=1, large steps")


def chosen(record: Record, part: str, *fields: str) -> dict[Any, list[Record]]:
    """The runs of a part, by these fields."""
    return by((run for run in record["runs"] if run["part"] == part), *fields)


def at_policies(record: Record) -> dict[Any, list[Record]]:
    """(step, arm) -> the measurements there, one per seed."""
    stops = [stop for runs in chosen(record, "gradients").values() for run in runs for stop in run["found"]]
    return by(({"step": stop["step"], "arm": arm, **stop[arm]} for stop in stops for arm in ARMS), "step", "arm")


def of_seeds(runs: list[Record], name: str) -> dict[int, float]:
    return {run["seed"]: last(run["found"][name], LAST) for run in runs}


def tables(record: Record) -> Iterator[Table]:
    policies = at_policies(record)
    head = ["policy after", "`--kl`", "seeds", "value of a batch", "gradient: deviation", "bias"]
    lines = [[*head, "completions for the noise of the exact form"]]
    for (step, arm), at in policies.items():
        spread = mean(100 * x["value_sd"] / y["value"] for x, y in zip(at, policies[step, "exact"], strict=True))
        pairs = zip(at, policies[step, ESTIMATED.get(arm, arm)], strict=True)
        more = statistics.median((x["deviation"] / y["deviation"]) ** 2 for x, y in pairs)
        value, deviation, bias = (mean(x[name] for x in at) for name in ("value", "deviation", "bias"))
        lines.append([
            f"{step} step{'s' * (step > 1)}", NAMES[arm], str(len(at)), f"{value:.3f} ± {spread:.1f} %", f"{deviation:.2f}",
            "0" if arm == "exact" else f"{bias:.2f}", f"{more:.0f} x" if arm in ESTIMATED else "",
        ])  # fmt: skip
    yield lines
    runs = chosen(record, "rewards", "setting", "arm")
    lines = [["setting", "`--kl`", "seeds", "reward at the end", "less that of exact", "KL to the reference at the end"]]
    for (setting, arm), of in runs.items():
        ends, exactly = (of_seeds(x, "held_out_reward") for x in (of, runs.get((setting, "exact"), [])))
        apart = [ends[seed] - exactly[seed] for seed in ends if seed in exactly and arm != "exact"]
        spreads = (with_spread(values, ".3f") for values in (ends.values(), apart, of_seeds(of, "kl").values()))
        lines.append([setting, NAMES[arm], str(len(of)), *spreads])
    yield lines
    lines = [["KL to the teacher", "learning rate", "seeds", "teacher", "student: first", "halfway", "last"]]
    for (arm, lr), of in chosen(record, "distillation", "arm", "lr").items():
        curves = [run["found"]["accuracy"] for run in of]
        columns = [[run["found"]["teacher"] for run in of], *([x[at] for x in curves] for at in (0, len(curves[0]) // 2, -1))]
        lines.append([NAMES[arm], f"{lr:g}", str(len(of)), *(with_spread(values, ".1%") for values in columns)])
    yield lines


def pictures(record: Record) -> Record:
    """Curves of gradients and rewards; and of students, at the learning rate with the best last accuracy."""
    policies, every = at_policies(record), record["settings"]["run"]["steps"]
    panels: list[Record] = []
    for name, title in (
        ("deviation", "gradient of the KL: deviation of a batch from the mean"),
        ("bias", "gradient of the KL: bias against that of the exact KL"),
    ):
        curves = {
            NAMES[arm]: [[float(step) for step in STOPS], short([mean(x[name] for x in policies[step, arm]) for step in STOPS])]
            for arm in ARMS
        }
        panels.append({"title": title, "x": "steps of the policy from the reference", "log": "x", "curves": curves})
    runs = chosen(record, "rewards", "setting", "arm")
    for setting in SHOWN:
        rewards = {arm: [run["found"]["held_out_reward"] for run in of] for (name, arm), of in runs.items() if name == setting}
        curves = {
            NAMES[arm]: curve([every * i / (len(of[0]) - 1) for i in range(len(of[0]))], of) for arm, of in rewards.items()
        }
        panels.append({"title": f"reward on held-out prompts, {setting}", "x": "step", "curves": curves})
    best: dict[str, list[Record]] = {}
    for (arm, _), of in sorted(
        chosen(record, "distillation", "arm", "lr").items(), key=lambda x: mean(run["found"]["accuracy"][-1] for run in x[1])
    ):
        best[arm] = of
    steps = best["exact"][0]["found"]["steps"]
    curves = {NAMES[arm]: curve(steps, [run["found"]["accuracy"] for run in of]) for arm, of in best.items()}
    teacher = short(mean(run["found"]["teacher"] for run in best["exact"]))
    curves["teacher"] = [[steps[0], steps[-1]], [teacher, teacher]]
    student = [{"title": "greedy accuracy on held-out problems", "x": "step", "curves": curves}]
    return {
        "exact_kl.svg": {"title": "Exact and estimated KL", "panels": panels, "notes": []},
        "distillation.svg": {"title": "A student and its teacher", "panels": student, "notes": []},
    }


EXPERIMENT = Experiment(
    "exact_kl", ROOT / "docs" / "exact_kl_experiment.md", tables, pictures=pictures, tasks=tasks, seeds=SEEDS,
    settings={"run": SETTINGS, "changes": REWARDS, "stops": list(STOPS), "batches": BATCHES, "distillation": DISTILLED},
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
