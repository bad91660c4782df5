"""Rewards: functions, reward models, per-token process rewards, what may not come of them, and the
advantages made of them.

A reward function is any callable
    reward(prompts, completions, *, completion_ids, **columns) -> list
over the B completions of a step: texts, sampled ids (the end token included) and the data set's
columns, each repeated per completion. It takes what it needs by name and swallows the rest with
**_. It returns, per completion, either

    a number              the outcome reward, or
    a list                process rewards, one entry per sampled token: a number where a step of the
                          reasoning ends, None elsewhere.

Numbers must be finite; anything else raises ValueError. Prompts are texts, as the model sees them.
The global random states of torch, Python and NumPy are restored when a run is resumed; your own
generators are not.
"""

from __future__ import annotations

import math
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..rewards.advantages import zero_variance
from ..rewards.estimators import Evidence
from ..rewards.groups import weighted_sum
from . import Ranks, require

RewardFunction = Callable[..., list[Any]]


# ---- functions by name


def exact(
    prompts: list[str], completions: list[str], *, answer: list[str], **_: Any
) -> list[float]:
    """1 if the completion is the answer, apart from white space around it, else 0."""
    return [float(c.strip() == a.strip()) for c, a in zip(completions, _known(answer), strict=True)]


def number(
    prompts: list[str], completions: list[str], *, answer: list[str], **_: Any
) -> list[float]:
    r"""1 if the final number of the completion equals the answer, else 0:

    after "####", or in \boxed{}, or the last.
    """
    pairs = [
        (_final_number(c), _final_number(a))
        for c, a in zip(completions, _known(answer), strict=True)
    ]
    return [float(found is not None and found == right) for found, right in pairs]


def _known(answers: list[Any]) -> list[str]:
    if None in answers:
        raise ValueError(
            f"the answer of completion {answers.index(None)} is None: leave rows without an answer"
            " out of the data set."
        )
    return answers


def _final_number(text: str) -> float | None:
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    where = text.rsplit("####", 1)[1] if "####" in text else boxed[-1] if boxed else text
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", where)
    return float(numbers[0 if "####" in text else -1].replace(",", "")) if numbers else None


REWARDS: dict[str, RewardFunction] = {"exact": exact, "number": number}


def resolve(name: str) -> RewardFunction:
    """A reward function by its name in REWARDS, or as module:function."""
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise ValueError(
            f"rewards={name!r}: it must be one of {', '.join(REWARDS)}, or module:function."
        )
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"rewards={name!r} cannot be imported ({error}): check the module path and the"
            " function's name."
        ) from error
    return function


class RewardModel:
    """An outcome reward function around a sequence classifier with one output."""

    def __init__(self, path: str, device: torch.device) -> None:
        self.pipeline = require("transformers").pipeline(
            "text-classification",
            model=path,
            device=device,
            batch_size=32,
            function_to_apply="none",
        )
        config = self.pipeline.model.config
        tokenizer = self.pipeline.tokenizer
        if config.num_labels != 1:
            raise ValueError(
                f"reward_model={path!r} has {config.num_labels} outputs: use a classifier with"
                " num_labels=1."
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        config.pad_token_id = (
            tokenizer.pad_token_id
        )  # by which the classifier finds the last real token

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        return [found["score"] for found in self.pipeline(texts)]


# ---- calls, and what may not come of them

#: Characters of a text that are shown.
SHOWN = 240


class Asked(NamedTuple):
    """The B completions that reward functions are asked about."""

    prompts: list[str]
    completions: list[str]
    tokens: list[list[int]]
    columns: dict[str, list[Any]]


def pair(prompt: str, completion: str) -> str:
    """A prompt and its completion, as lines that follow what is said of them: what is no printable
    character, such as the end of a line or a terminal's commands, as its escape, and the beginning
    of a long text.
    """
    return f"\n  prompt     {prompt[:SHOWN]!r}\n  completion {completion[:SHOWN]!r}"


def name_of(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def call(function: RewardFunction, asked: Asked) -> list[float | list[float]]:
    """A function's rewards, one for each completion; without completions it is not called. Raises
    RuntimeError where it raises, ValueError for what it must not return; both name the function,
    the second shows the completion with its prompt.
    """
    name = name_of(function)
    count = len(asked.completions)
    if not count:
        return []
    try:
        values = function(
            asked.prompts, asked.completions, completion_ids=asked.tokens, **asked.columns
        )
        values = list(values) if isinstance(values, Iterable) else values
    except Exception as error:
        raise RuntimeError(f"reward {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(values, list):
        raise ValueError(
            f"reward {name} returned {_told(values)}: return a list, with an entry for each"
            " completion."
        )
    if len(values) != count:
        raise ValueError(
            f"reward {name} returned {len(values)} values for {count} completions: return one for"
            " each."
        )
    rewards = []
    for i, value in enumerate(values):
        try:
            rewards.append(_checked(value, len(asked.tokens[i])))
        except ValueError as error:
            raise ValueError(
                f"reward {name} returned for completion {i}"
                f" {error}{pair(asked.prompts[i], asked.completions[i])}"
            ) from None
    return rewards


def _checked(value: Any, length: int) -> float | list[float]:
    """What a function returned for a completion of `length` tokens, as a number or a list of
    numbers, NaN where no step ends.
    """
    if not isinstance(value, (list, tuple)):
        return _number(value, "return a finite number, or a list of process rewards.")
    if len(value) != length:
        raise ValueError(f"{len(value)} process rewards for {length} tokens: one entry per token.")
    remedy = "a process reward is a finite number; None where no step ends."
    return [math.nan if v is None else _number(v, remedy) for v in value]


def _number(value: Any, remedy: str) -> float:
    """A Python, NumPy or torch number, which is finite."""
    try:
        found = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{_told(value)}: {remedy}")
    return found


def _told(value: Any) -> str:
    """A value for an error message: its type and the beginning of its content."""
    return "None" if value is None else f"a {type(value).__name__} ({value!r:.40})"


# ---- scores and advantages


@dataclass(frozen=True)
class Scores:
    """The rewards of the completions of all ranks, by K functions:

    B completions, T tokens in the longest.
    """

    names: list[str]  # [K], each once
    weights: list[float]  # [K]
    lengths: list[int]  # [B]: tokens
    # [K, B]; of process rewards, the sum over steps. The first decides whether a prompt counts as
    # solved
    each: Tensor
    steps: list[
        Tensor | None
    ]  # [K]: process rewards [B, T], NaN where no step ends; None of those that give outcomes
    texts: list[str]  # of the completions of this rank alone, as reward functions see them

    @property
    def totals(self) -> Tensor:
        """[B]: the weighted sum of all rewards."""
        return weighted_sum(self.each.unbind(), self.weights)

    def summary(self, group_size: int) -> dict[str, float]:
        totals = self.totals
        told = {
            f"reward/{name}": x.mean().item() for name, x in zip(self.names, self.each, strict=True)
        }
        return (told if len(told) > 1 else {}) | {
            "reward": totals.mean().item(),
            "reward_std": totals.std(unbiased=False).item(),
            "zero_variance_groups": (
                zero_variance(totals, group_size=group_size).float().mean().item()
            ),
            "completion_length": sum(self.lengths) / len(self.lengths),
        }

    def advantages(
        self, estimate: Any, of_steps: Any, *, group_size: int, **known: Tensor
    ) -> Tensor:
        """[B], or [B, T] where the estimator is one of tokens or there are process rewards.
        `estimate` and `of_steps` are entries of `estimators.ADVANTAGES`, `known` what they need
        in addition to the rewards.

        Outcome rewards are added with their weights. Process rewards follow DeepSeekMath (arXiv
        2402.03300, section 4.1.3): all step rewards of a group are normalised together, and the
        advantage of a token is the sum of the normalised rewards of the steps that end at it or
        later; times the weight, it is added to the outcome's advantage.
        """
        outcomes = [k for k, steps in enumerate(self.steps) if steps is None]
        weights = [self.weights[k] for k in outcomes]
        columns = self.each[outcomes]
        rewards = (
            weighted_sum(columns.unbind(), weights) if outcomes else torch.zeros_like(self.each[0])
        )
        known["mask"] = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        total = estimate(
            Evidence(
                rewards, group_size=group_size, columns=columns.T, reward_weights=weights, **known
            )
        )
        for weight, steps in zip(self.weights, self.steps, strict=True):
            if steps is not None:
                total = total[:, None] if total.dim() == 1 else total
                total = total + weight * of_steps(
                    Evidence(rewards, group_size=group_size, steps=steps)
                )
        return total


def score(
    functions: list[RewardFunction], weights: list[float], asked: Asked, ranks: Ranks
) -> Scores:
    """The scores of a whole batch, of which each rank asks about its completions."""
    of_ranks = ranks.together(
        lambda: [[len(ids) for ids in asked.tokens], *(call(f, asked) for f in functions)]
    )
    lengths, *values = (
        [x for part in parts for x in part] for parts in zip(*of_ranks, strict=True)
    )
    names = [name_of(f) for f in functions]
    names = [
        name if name not in names[:k] else f"{name}#{names[:k].count(name) + 1}"
        for k, name in enumerate(names)
    ]
    each = list[Tensor]()
    steps = list[Tensor | None]()
    for name, rewards in zip(names, values, strict=True):
        lists = sum(isinstance(r, list) for r in rewards)
        if lists not in (0, len(rewards)):
            raise ValueError(
                f"reward {name} returned numbers for some completions and lists for others: return"
                " one kind for all."
            )
        rows = [torch.tensor(r, dtype=torch.float64) for r in rewards]
        table = (
            pad_sequence(rows, batch_first=True, padding_value=math.nan)
            if lists
            else torch.stack(rows)
        )
        each.append(table.nansum(1) if lists else table)
        steps.append(table if lists else None)
    return Scores(names, weights, lengths, torch.stack(each), steps, asked.completions)
