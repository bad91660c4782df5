"""The effect of sparse gradients of the head on a training run.

    python -m benchmarks.sparse_training [--seeds 0 1 ...] [--write]

Experiments on the problems of examples/arithmetic.py over a vocabulary of thousands of ids with many spellings of each
character, in three parts. noise: the noise from drawing columns compared with that of the batch, at fixed policies. trainer and
trl: runs of the reference trainer and of TRL's GRPOTrainer with the dense gradient and with three steps of the grid. Each
result is saved as soon as it is known, so that an interrupted command can be run again. --write: writes the results to
benchmarks/results/sparse_training.json, and from it the tables and the picture of docs/sparse_training.md."""

from __future__ import annotations

import copy
import functools
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else TRL calls home

import torch

from benchmarks import experiments
from benchmarks.experiments import WARM_UP, Experiment, Still, Task, batch_seed, by, curve, last, mean, with_spread
from benchmarks.results import ROOT
from benchmarks.tables import Record, Table
from examples import arithmetic
from grpo_kernels.integrations import trl
from grpo_kernels.training import require
from grpo_kernels.training.data import prompts_of_step
from grpo_kernels.training.rewards import exact
from grpo_kernels.training.rollouts import Completions, completion_logits
from grpo_kernels.training.trainer import Trainer

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


# ---- problems over thousands of ids: each character has many, its spellings

VOCABULARY = 4096
#: Separates a character from the number of its spelling.
MARK = "·"


@functools.cache
def tokenizer() -> Any:
    """A tokenizer that encodes each character as its first spelling and decodes all spellings."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    chars, many = arithmetic.CHARS, len(arithmetic.CHARS)
    names = [chars[i % many] + (f"{MARK}{i // many}" if i >= many else "") for i in range(VOCABULARY)]
    ids = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    ids.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    ids.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace(tokenizers.Regex(f"{MARK}[0-9]+"), ""), tokenizers.decoders.Fuse()]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=ids, eos_token=".", pad_token=".", padding_side="left")


class Teacher:
    """The tokenizer of a teacher that draws each digit of an answer from its first `spellings`."""

    def __init__(self, spellings: int, seed: int) -> None:
        self.spellings, self.random, self.eos_token_id = spellings, random.Random(seed), tokenizer().eos_token_id

    def __call__(self, text: str) -> dict[str, list[int]]:
        ids = tokenizer()(text)["input_ids"]
        if text.isdigit():
            ids = [i + len(arithmetic.CHARS) * self.random.randrange(self.spellings) for i in ids]
        return {"input_ids": ids}


def policy(width: int, layers: int) -> Any:
    """The example's policy with these ids and an untied head."""
    transformers = require("transformers")
    config = arithmetic.policy(width, layers).config.to_dict() | {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(config))


@functools.cache
def warmed_up(seed: int, spellings: int) -> tuple[Any, list[Any], list[Any]]:
    """The model after supervised steps on the teacher's answers, training problems, held-out problems."""
    return experiments.warmed_up(seed, Teacher(spellings, seed), policy)


def trainer(seed: int, spellings: int, kind: Any = Trainer, **changes: Any) -> Any:
    settings = {"eval_steps": 0, "seed": seed, **SETTINGS, **changes}
    return experiments.trainer(warmed_up(seed, spellings), tokenizer(), kind, **settings)


# ---- noise at fixed policies


def noise(seed: int, spellings: int, stops: tuple[int, ...] = STOPS, batches: int = BATCHES) -> list[Record]:
    """The noise that drawing adds to that of a batch, at policies along a run."""
    measurements = []
    with trainer(seed, spellings) as run, trainer(seed, spellings, Still) as fixed:
        for stop in stops:
            while run.step < stop:
                run.train_step()
            fixed.model.load_state_dict(run.model.state_dict())
            measurements.append({"after": stop} | spread(fixed, batches))
    return measurements


def spread(still: Any, batches: int) -> Record:
    """The noise over batches of different prompts and completions, for the gradient of the policy term and for that of an
    entropy bonus alone. For each group of parameters and each step: the mean squared distance from the dense gradient of the
    same batch, divided by the variance of the dense gradient over batches. Also the mean entropy and the number of columns of
    the first batch's rows."""
    config, statistics = still.config, {}
    terms = {"policy": config.objective, "entropy": replace(config, entropy_coef=1.0).objective}
    gradients: dict[Any, list[torch.Tensor]] = {(term, step): [] for term in terms for step in (0.0, *STEPS)}
    for number in range(batches):
        still.step = number  # the columns' seed depends on it
        prompts = prompts_of_step(still.train_rows, number, config.prompts_per_step, config.seed)
        completions = still.rollouts.sample(prompts, config.group_size, batch_seed(config.seed, number))
        scores = still.rollouts.score(prompts, completions, config.group_size)
        advantages = still.advantages(prompts, completions, scores)
        statistics = statistics or rows(still.model, completions)
        for (term, step), of in gradients.items():
            still.objective, still.losses.config = terms[term], replace(config, sparse_step=step)
            still.update(completions, advantages if term == "policy" else torch.zeros_like(advantages))
            of.append(still.gradient)
    sizes = {name: p.numel() for name, p in still.model.named_parameters()}
    found = {key: torch.stack(of) for key, of in gradients.items()}
    return statistics | {term: noise_shares(found[term, 0.0], [found[term, step] for step in STEPS], sizes) for term in terms}


def noise_shares(dense: torch.Tensor, sparse: list[torch.Tensor], sizes: dict[str, int]) -> dict[str, list[float]]:
    """{group: the noise of each of `sparse` by that of the batch} from gradients [batches, parameters], dense and drawn for the
    same batches. sizes: of the parameters, in order."""
    groups: dict[str, list[float]] = {}
    owner = [next(group for group, begin in GROUPS.items() if name.startswith(begin)) for name in sizes]
    of_parameters = torch.stack([dense.var(0), *((x - dense).square().mean(0) for x in sparse)]).split([*sizes.values()], 1)
    for group in GROUPS:
        variance, *apart = sum(x.sum(1) for x, of in zip(of_parameters, owner, strict=True) if of == group).tolist()
        groups[group] = [x / variance for x in apart]
    return groups


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


def trained(seed: int, spellings: int, step: float) -> Record:
    """A run of the reference trainer: the mean reward of each of its steps, and greedy accuracy after it."""
    with trainer(seed, spellings, sparse_step=step) as t:
        reward = [t.train_step()["reward"] for _ in range(t.config.steps)]
    return {"reward": reward, "accuracy": arithmetic.accuracy(t.model, tokenizer(), warmed_up(seed, spellings)[2])}


def trained_by_trl(seed: int, spellings: int, step: float) -> Record:
    """The same for TRL's GRPOTrainer."""
    transformers, theirs, datasets = require("transformers"), require("trl"), require("datasets")
    model, training, held_out = warmed_up(seed, spellings)
    with tempfile.TemporaryDirectory() as folder:
        config = theirs.GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
            max_steps=TRL_STEPS, seed=seed, learning_rate=SETTINGS["lr"], warmup_steps=SETTINGS["warmup_steps"],
            lr_scheduler_type=SETTINGS["lr_schedule"], temperature=1.0, num_generations=SETTINGS["group_size"], loss_type="dapo",
            epsilon_high=0.28, max_completion_length=SETTINGS["max_new_tokens"], gradient_checkpointing=False,
            per_device_train_batch_size=SETTINGS["prompts_per_step"] * SETTINGS["group_size"],
        )  # fmt: skip
        t = theirs.GRPOTrainer(
            model=copy.deepcopy(model), args=config, reward_funcs=exact, train_dataset=datasets.Dataset.from_list(training),
            processing_class=tokenizer(),
        )  # fmt: skip
        t.remove_callback(transformers.PrinterCallback)
        fused = trl.patch(t, sparse_step=step)
        t.train()
        assert fused.counts["fused"] == TRL_STEPS
        reward = [line["reward"] for line in t.state.log_history if "reward" in line]
    return {"reward": reward, "accuracy": arithmetic.accuracy(t.model, tokenizer(), held_out)}


# ---- all tasks


def tasks() -> Iterator[Task]:
    for part, spellings, run in (("trainer", 1, trained), ("trl", 1, trained_by_trl), ("trainer", 8, trained)):
        for step in (0.0, *STEPS):
            name = {"part": part, "spellings": spellings, "step": step}
            yield name, functools.partial(run, spellings=spellings, step=step)
    for spellings in MEASURED:
        yield {"part": "noise", "spellings": spellings}, functools.partial(noise, spellings=spellings)


# ---- the page

TRAINERS = {"trainer": "reference", "trl": "TRL"}
#: The reward of a run is the mean over its last LAST steps; a point of a curve is the mean over SPAN steps.
LAST, SPAN = 20, 8


def name(step: float) -> str:
    return f"step {Fraction(step)}" if step else "dense"


def spelled(count: int) -> str:
    return f"{count} spelling{'s' * (count > 1)}"


def percent(ratio: float) -> str:
    """To two digits, and whole percents above ten."""
    return f"{100 * ratio:.0f} %" if ratio > 0.1 else f"{100 * ratio:.2g} %"


def policies(record: Record) -> dict[str, list[Record]]:
    """The measurements of noise at each policy, one per seed."""
    runs = [run for run in record["runs"] if run["part"] == "noise"]
    stops = ({"spellings": run["spellings"], **stop} for run in runs for stop in run["found"])
    return {
        f"{spelled(n)}, after {after} step{'s' * (after > 1)}": of for (n, after), of in by(stops, "spellings", "after").items()
    }


def tables(record: Record) -> Iterator[Table]:
    steps = record["settings"]["steps"]
    lines = [["policy", "seeds", "entropy, nats", *(f"columns a row: {name(step)}" for step in steps)]]
    for policy, at in policies(record).items():
        columns = (f"{mean(x['columns'][i] for x in at):.1f}" for i in range(len(steps)))
        lines.append([policy, str(len(at)), f"{mean(x['nats'] for x in at):.2f}", *columns])
    yield lines
    terms = {"policy": "policy term", "entropy": "entropy bonus"}
    lines = [["policy", "parameters", *(f"{words}: {name(step)}" for words in terms.values() for step in steps)]]
    for policy, at in policies(record).items():
        for group in GROUPS:
            cells = [percent(mean(x[term][group][i] for x in at)) for term in terms for i in range(len(steps))]
            lines.append([policy, group, *cells])
    yield lines
    lines = [
        ["trainer", "answers in", "gradient of the head", "seeds", "reward at the end", "less that of dense", "greedy accuracy"]
    ]
    runs = by((run for run in record["runs"] if run["part"] in TRAINERS), "part", "spellings", "step")
    for part in TRAINERS:
        for (_, spellings, step), of in ((key, of) for key, of in runs.items() if key[0] == part):
            ends, dense = (
                {x["seed"]: last(x["found"]["reward"], LAST) for x in xs} for xs in (of, runs.get((part, spellings, 0.0), []))
            )
            apart = [ends[seed] - dense[seed] for seed in ends if seed in dense and step]
            cells = [
                with_spread(ends.values(), ".3f"),
                with_spread(apart, ".3f"),
                f"{mean(x['found']['accuracy'] for x in of):.1%}",
            ]
            lines.append([TRAINERS[part], spelled(spellings), name(step), str(len(of)), *cells])
    yield lines


def pictures(record: Record) -> Record:
    """Rewards of each trainer, and the noise in the gradient of the head."""
    panels: list[Record] = []
    for (part, spellings), runs in by((run for run in record["runs"] if run["part"] in TRAINERS), "part", "spellings").items():
        rewards = {name(step): [run["found"]["reward"] for run in of] for (step,), of in by(runs, "step").items()}
        curves = {arm: curve([float(i + 1) for i in range(len(of[0]))], of, SPAN) for arm, of in rewards.items()}
        panels.append({"title": f"reward, trainer: {TRAINERS[part]}, {spelled(spellings)}", "x": "step", "curves": curves})
    steps = record["settings"]["steps"]
    of_head = {policy: curve(steps, [x["policy"]["head"] for x in at])[:2] for policy, at in policies(record).items()}
    panels.append(
        {"title": "head: noise of drawing, by the noise of the batch", "x": "step of the grid", "log": "xy", "curves": of_head}
    )
    return {"sparse_training.svg": {"title": "Sparse gradients in training", "panels": panels, "notes": []}}


EXPERIMENT = Experiment(
    "sparse_training", ROOT / "docs" / "sparse_training.md", tables, pictures=pictures, tasks=tasks, seeds=SEEDS[:3],
    settings={
        "run": SETTINGS, "trl_steps": TRL_STEPS, "steps": list(STEPS), "stops": list(STOPS), "batches": BATCHES,
        "vocabulary": VOCABULARY, "warm_up": WARM_UP,
    },
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
