"""Rewards: functions, reward models, per-token process rewards, and the advantages made of them.

A reward function is any callable
    reward(prompts, completions, *, completion_ids, **columns) -> list
over the B completions of a step: texts, sampled ids (the end token included) and the data set's columns, each repeated
per completion. It takes what it needs by name and swallows the rest with **_. It returns, per completion, either

    a number              the outcome reward, or
    a list                process rewards, one entry per sampled token: a number where a step of the reasoning ends,
                          None elsewhere.

Numbers are finite; what is none of this raises ValueError (`reward_calls`). Prompts are texts, as the model sees them. Of random
numbers those of torch, Python and NumPy that everybody shares come back when a run is resumed; a generator of one's own does not.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..rewards.estimators import Evidence
from . import require
from .reward_calls import RewardFunction, Rewards

Tensor = torch.Tensor

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact(prompts: list[str], completions: list[str], *, answer: list[str], **_: Any) -> list[float]:
    """1 if the completion is the answer, apart from white space around it, else 0."""
    return [float(c.strip() == a.strip()) for c, a in zip(completions, _known(answer), strict=True)]


def number(prompts: list[str], completions: list[str], *, answer: list[str], **_: Any) -> list[float]:
    r"""1 if the final number of the completion equals the answer, else 0: after "####", or in \boxed{}, or the last."""
    return [
        float(_final_number(c) is not None and _final_number(c) == _final_number(a))
        for c, a in zip(completions, _known(answer), strict=True)
    ]


def _known(answers: list[str]) -> list[str]:
    missing = [i for i, answer in enumerate(answers) if answer is None]
    if missing:
        raise ValueError(f"the answer of completion {missing[0]} is None: leave rows without an answer out of the data set.")
    return answers


def _final_number(text: str) -> float | None:
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    where = text.rsplit("####", 1)[1] if "####" in text else boxed[-1] if boxed else text
    numbers = NUMBER.findall(where)
    if not numbers:
        return None
    return float((numbers[0] if "####" in text else numbers[-1]).replace(",", ""))


REWARDS: dict[str, RewardFunction] = {"exact": exact, "number": number}


def resolve(name: str) -> RewardFunction:
    """A reward function by its name in REWARDS, or as module:function."""
    if name in REWARDS:
        return REWARDS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"rewards={name!r}: it must be one of {', '.join(REWARDS)}, or module:function.")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"rewards={name!r} cannot be imported ({error}): check the module path and the function's name."
        ) from error
    if not callable(function):
        raise ValueError(f"rewards={name!r} is a {type(function).__name__}: name a function.")
    return function


class RewardModel:
    """An outcome reward function around a sequence classifier with one output."""

    def __init__(self, path: str, device: torch.device, batch_size: int = 32) -> None:
        transformers = require("transformers")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModelForSequenceClassification.from_pretrained(path).to(device).eval()
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"reward_model={path!r} has {self.model.config.num_labels} outputs: use a classifier with num_labels=1."
            )
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # The classifier finds the last real token by this id.
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.device, self.batch_size = device, batch_size

    @torch.no_grad()
    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        scores: list[float] = []
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        for start in range(0, len(texts), self.batch_size):
            inputs = self.tokenizer(texts[start : start + self.batch_size], return_tensors="pt", padding=True).to(self.device)
            logits = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            scores += logits[:, 0].float().tolist()
        return scores


@dataclass(frozen=True)
class Scores:
    """The rewards of the completions of all ranks: B completions, T tokens in the longest."""

    lengths: list[int]  # [B]: tokens
    totals: Tensor  # [B]: the weighted sum of all rewards; of process rewards, the sum over steps
    first: Tensor  # [B]: the first function's reward, which decides whether a prompt counts as solved
    outcomes: Tensor  # [B, K]: of the functions that give outcome rewards, with
    weights: list[float]  # their K weights
    steps: list[tuple[float, Tensor]]  # of those that give process rewards: weight, and [B, T] with NaN where no step ends
    each: dict[str, Tensor]  # [B]: of each function, by its name; of process rewards, the sum over steps
    texts: list[str]  # of the completions of this rank alone, as reward functions see them

    @property
    def mask(self) -> Tensor:
        """bool [B, T]"""
        return torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]

    def summary(self, group_size: int) -> dict[str, float]:
        grouped = self.totals.view(-1, group_size)
        several = {f"reward/{name}": values.mean().item() for name, values in self.each.items()} if len(self.each) > 1 else {}
        return several | {
            "reward": self.totals.mean().item(),
            "reward_std": self.totals.std(unbiased=False).item(),
            "zero_variance_groups": (grouped.amax(1) == grouped.amin(1)).float().mean().item(),
            "completion_length": sum(self.lengths) / len(self.lengths),
        }


def score(rewards: list[Rewards], weights: list[float], lengths: list[int], texts: list[str] | None = None) -> Scores:
    """Add the rewards of a whole batch up. `lengths`: tokens of each completion."""
    numbers = torch.zeros(len(rewards), len(lengths), dtype=torch.float64)
    outcomes, steps = [], []
    for k, (reward, weight) in enumerate(zip(rewards, weights, strict=True)):
        values: list[Any] = reward.values
        if any(isinstance(v, list) for v in values):
            steps.append((weight, step_rewards(reward, lengths)))
            values = [math.fsum(r for r in v if r is not None) for v in values]
        else:
            outcomes.append(k)
        numbers[k] = torch.tensor(values, dtype=torch.float64)
    totals = _weighted(numbers, weights)
    each: dict[str, Tensor] = {}
    for reward, column in zip(rewards, numbers, strict=True):
        same = sum(name.partition("#")[0] == reward.name for name in each)
        each[f"{reward.name}#{same + 1}" if same else reward.name] = column
    chosen = [weights[k] for k in outcomes]
    return Scores(lengths, totals, numbers[0], numbers[outcomes].T, chosen, steps, each, texts or [])


def _weighted(columns: Tensor, weights: list[float]) -> Tensor:
    """Term by term, so that equal completions have equal sums; a matrix product may add them in different orders."""
    total = torch.zeros_like(columns[0]) if len(columns) else torch.zeros(columns.shape[1], dtype=torch.float64)
    for column, weight in zip(columns, weights, strict=True):
        total = total + weight * column
    return total


def advantages(
    scores: Scores, estimate: Callable[..., Tensor], of_steps: Callable[..., Tensor], *, group_size: int, **known: Tensor
) -> Tensor:
    """[B], or [B, T] where the estimator is one of tokens or there are process rewards. `estimate` and `of_steps` are
    entries of `estimators.ADVANTAGES`, `known` what they need beside the rewards.

    Outcome rewards are added with their weights. Process rewards follow DeepSeekMath (arXiv 2402.03300, section 4.1.3): all
    step rewards of a group are normalised together, and the advantage of a token is the sum of the normalised rewards of the
    steps that end at it or later; times the weight, it is added to the outcome's advantage."""
    evidence = Evidence(
        _weighted(scores.outcomes.T, scores.weights), group_size=group_size, columns=scores.outcomes,
        reward_weights=scores.weights, mask=scores.mask, **known,
    )  # fmt: skip
    total = estimate(evidence)
    for weight, steps in scores.steps:
        total = total[:, None] if total.dim() == 1 else total
        total = total + weight * of_steps(Evidence(evidence.rewards, group_size=group_size, steps=steps))
    return total


def step_rewards(reward: Rewards, lengths: list[int]) -> Tensor:
    """Process rewards as fp64 [B, T], NaN where no step ends."""
    rewards = torch.full((len(lengths), max(lengths)), math.nan, dtype=torch.float64)
    for i, steps in enumerate(reward.values):
        if not isinstance(steps, list):
            raise ValueError(
                f"reward {reward.name} returned numbers in one process and lists in another: return lists everywhere, with None "
                "where no step ends."
            )
        for t, step in enumerate(steps):
            if step is not None:
                rewards[i, t] = step
    return rewards
