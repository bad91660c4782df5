"""Call reward functions and reward models, check their results, and compute advantages from them.

A reward function is any callable

    reward(prompts, completions, *, completion_ids, **columns) -> list

It gets the prompts and completions of a step as texts, the sampled ids of each completion (with the
end token), and the columns of the data set, each with one entry for each of B completions. It may
name the arguments that it needs, and take the others as **_. For each completion it returns

    a number   the outcome reward, or
    a list     process rewards, with one entry for each sampled token: a number if a step of the
               reasoning ends there, else None

Numbers must be finite; other results raise ValueError. Prompts are the texts that the model sees.
The global random states of torch, Python and NumPy are restored when a run is resumed. Other
generators are not.
"""

from __future__ import annotations

import itertools
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
    """Return 1 for each completion that equals its answer, apart from outer white space, else 0.

    prompts, completions   texts; the prompts are not used
    answer                 the right answer of each completion, a column of the data set

    Raises ValueError if an answer is None.
    """
    answers = _require_answers(answer)
    return [
        float(completion.strip() == right_answer.strip())
        for completion, right_answer in zip(completions, answers, strict=True)
    ]


def number(
    prompts: list[str], completions: list[str], *, answer: list[str], **_: Any
) -> list[float]:
    """Return 1 for each completion whose final number equals that of the answer, else 0.

    prompts, completions   texts; the prompts are not used
    answer                 the right answer of each completion, a column of the data set

    Raises ValueError if an answer is None.
    """
    rewards = []
    for completion, right_answer in zip(completions, _require_answers(answer), strict=True):
        result = _final_number(completion)
        # A completion without a number is wrong, also if the answer has none.
        is_right = result is not None and result == _final_number(right_answer)
        rewards.append(float(is_right))
    return rewards


def _require_answers(answers: list[Any]) -> list[str]:
    """Return the answers unchanged. Raises ValueError, naming the completion, if one is None."""
    if None in answers:
        raise ValueError(
            f"the answer of completion {answers.index(None)} is None: leave rows without an answer"
            " out of the data set."
        )
    return answers


def _final_number(text: str) -> float | None:
    r"""Return the number that a text gives as its answer, None if the text has no number.

    It is the first number after the last "####" (gsm8k), else the last number in the last \boxed{},
    else the last number of the text.
    """
    has_marker = "####" in text
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    if has_marker:
        text = text.rsplit("####", 1)[1]
    elif boxes:
        text = boxes[-1]
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)  # such as "-1,234.5"
    if not numbers:
        return None
    final = numbers[0] if has_marker else numbers[-1]
    return float(final.replace(",", ""))


REWARDS: dict[str, RewardFunction] = {"exact": exact, "number": number}


def resolve(name: str) -> RewardFunction:
    """Return the reward function of a name in REWARDS, or of "module:function".

    Raises ValueError if it cannot be found.
    """
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
    """A reward function that returns the output of a sequence classifier with one output.

    path   path or Hub name of the classifier

    Raises ValueError if it has several outputs.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        """Load the classifier onto a device.

        path   path or Hub name

        Raises ValueError if it has several outputs.
        """
        self.pipeline = require("transformers").pipeline(
            "text-classification",
            model=path,
            device=device,
            batch_size=32,
            function_to_apply="none",  # the reward is the logit itself, without a sigmoid
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
        # The classifier finds the last real token by the padding id.
        config.pad_token_id = tokenizer.pad_token_id

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """Return the output of the classifier for each prompt with its completion."""
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        return [result["score"] for result in self.pipeline(texts)]


# ---- calls of reward functions, and checks of their results

#: How many characters of a text an error or a sample shows.
SHOWN = 240


class RewardArguments(NamedTuple):
    """The arguments of a reward function, with one entry for each of B completions.

    prompts, completions   texts
    tokens                 the sampled ids of each completion, with its end token
    columns                the columns of the data set, by name
    """

    prompts: list[str]
    completions: list[str]
    tokens: list[list[int]]
    columns: dict[str, list[Any]]


def show_pair(prompt: str, completion: str) -> str:
    """Return two lines with a prompt and its completion, to append to a message.

    Only the first `SHOWN` characters of each are shown. Characters that cannot be printed are
    escaped.
    """
    return f"\n  prompt     {prompt[:SHOWN]!r}\n  completion {completion[:SHOWN]!r}"


def name_of(function: RewardFunction) -> str:
    """Return the name of a reward function. A callable object has the name of its class."""
    return getattr(function, "__name__", type(function).__name__)


def call(function: RewardFunction, arguments: RewardArguments) -> list[float | list[float]]:
    """Call a reward function, and return its rewards: a number or a list for each completion.

    Without completions the function is not called.

    arguments   the arguments of the function, for the completions of this rank

    Raises RuntimeError if the function raises. Raises ValueError if it does not return a list with
    one entry for each completion, which is a finite number, or a list with one entry for each token
    (a finite number or None). The error names the function and shows the completion.
    """
    name = name_of(function)
    prompts = arguments.prompts
    completions = arguments.completions
    if not completions:
        return []
    try:
        values = function(
            prompts, completions, completion_ids=arguments.tokens, **arguments.columns
        )
        if isinstance(values, Iterable):  # a tuple, an array or a generator may raise here
            values = list(values)
    except Exception as error:
        raise RuntimeError(f"reward {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(values, list):
        raise ValueError(
            f"reward {name} returned {_describe(values)}: return a list, with an entry for each"
            " completion."
        )
    if len(values) != len(completions):
        raise ValueError(
            f"reward {name} returned {len(values)} values for {len(completions)} completions:"
            " return one for each."
        )
    rewards = []
    for i, value in enumerate(values):
        try:
            rewards.append(_check_reward(value, num_tokens=len(arguments.tokens[i])))
        except ValueError as error:
            raise ValueError(
                f"reward function {name}, completion {i}: got"
                f" {error}{show_pair(prompts[i], completions[i])}"
            ) from None
    return rewards


def _check_reward(value: Any, num_tokens: int) -> float | list[float]:
    """Return what a function returned for one completion, as a float or a list of floats.

    value        a number (outcome reward), or one entry for each token (process rewards): a number
                 where a step of the reasoning ends, else None, which becomes NaN
    num_tokens   number of sampled tokens of the completion

    Raises ValueError for another value.
    """
    if not isinstance(value, (list, tuple)):
        return _to_float(value, "return a finite number, or a list of process rewards.")
    if len(value) != num_tokens:
        raise ValueError(
            f"{len(value)} process rewards for {num_tokens} tokens: one entry per token."
        )
    remedy = "a process reward is a finite number; None where no step ends."
    return [math.nan if entry is None else _to_float(entry, remedy) for entry in value]


def _to_float(value: Any, remedy: str) -> float:
    """Return a finite Python, NumPy or torch number as a float.

    value    what a reward function returned for a completion or a token
    remedy   what to return instead, the end of the error

    Raises ValueError for a text, NaN, infinity and anything that is not a number.
    """
    if isinstance(value, (str, bytes)):  # float("1") would accept it
        raise ValueError(f"{_describe(value)}: {remedy}")
    try:
        result = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several numbers
        result = math.nan
    if not math.isfinite(result):
        raise ValueError(f"{_describe(value)}: {remedy}")
    return result


def _describe(value: Any) -> str:
    """Return the type of a value and the first 40 characters of its repr, for an error."""
    if value is None:
        return "None"
    return f"a {type(value).__name__} ({value!r:.40})"


# ---- scores and advantages


@dataclass(frozen=True)
class Scores:
    """The rewards of the B completions of all ranks by K functions.

    names     [K]: names of the functions, all different
    weights   [K]: weights of the functions
    lengths   [B]: tokens of each completion
    each      [K, B]: the rewards, of process rewards their sum over the steps. The first function
              decides whether a completion counts as right.
    steps     [K]: process rewards [B, T] with NaN where no step ends, for T tokens of the longest
              completion; None for a function that returns outcome rewards
    texts     the completions of this rank only
    """

    names: list[str]
    weights: list[float]
    lengths: list[int]
    each: Tensor
    steps: list[Tensor | None]
    texts: list[str]

    @property
    def totals(self) -> Tensor:
        """Return the weighted sum of the rewards of each completion, [B]."""
        return weighted_sum(self.each.unbind(), self.weights)

    def summary(self, group_size: int) -> dict[str, float]:
        """Return metrics of the rewards. With several functions, also the mean of each one.

        group_size   number of completions of each prompt
        """
        totals = self.totals
        equal_groups = zero_variance(totals, group_size=group_size).float().mean()
        metrics = dict[str, float]()
        if len(self.names) > 1:
            for name, rewards in zip(self.names, self.each, strict=True):
                metrics[f"reward/{name}"] = rewards.mean().item()
        metrics["reward"] = totals.mean().item()
        metrics["reward_std"] = totals.std(unbiased=False).item()
        metrics["zero_variance_groups"] = equal_groups.item()
        metrics["completion_length"] = sum(self.lengths) / len(self.lengths)
        return metrics

    def advantages(
        self, estimator: Any, step_estimator: Any, *, group_size: int, **evidence: Tensor
    ) -> Tensor:
        """Return the advantages: [B], or [B, T] if they differ among the tokens of a completion.

        A function with process rewards has an entry in `steps`; the others return outcome rewards.
        `estimator` turns the weighted sum of the outcome rewards into advantages. For each function
        with process rewards, `step_estimator` turns these into advantages of tokens. They are added
        with the weight of the function (DeepSeekMath, arXiv 2402.03300, section 4.1.3).

        estimator        an entry of `estimators.ADVANTAGES`
        step_estimator   the same for process rewards; returns [B, T]
        group_size       number of completions of each prompt
        evidence         what `estimator` needs in addition to the rewards, fields of `Evidence`
        """
        outcome_functions = [k for k, steps in enumerate(self.steps) if steps is None]
        outcome_weights = [self.weights[k] for k in outcome_functions]
        outcome_rewards = self.each[outcome_functions]  # [number of such functions, B]
        if outcome_functions:
            summed_rewards = weighted_sum(outcome_rewards.unbind(), outcome_weights)
        else:  # the advantages of rewards that are all 0 are 0
            summed_rewards = torch.zeros_like(self.each[0])
        is_token = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        advantages = estimator(
            Evidence(
                summed_rewards,
                group_size=group_size,
                columns=outcome_rewards.T,
                reward_weights=outcome_weights,
                mask=is_token,
                **evidence,
            )
        )
        for weight, steps in zip(self.weights, self.steps, strict=True):
            if steps is None:
                continue
            if advantages.dim() == 1:  # one number for all tokens of a completion
                advantages = advantages[:, None]
            step_evidence = Evidence(summed_rewards, group_size=group_size, steps=steps)
            advantages = advantages + weight * step_estimator(step_evidence)
        return advantages


def score(
    functions: list[RewardFunction],
    weights: list[float],
    arguments: RewardArguments,
    ranks: Ranks,
) -> Scores:
    """Call the reward functions for the completions of this rank. Return the scores of all ranks.

    functions   the K reward functions
    weights     their weights in the sum of rewards
    arguments   the arguments of each function, for the completions of this rank
    ranks       the ranks of the run; all of them must call this

    Raises the errors of `call` on all ranks, and ValueError if a function returns numbers for some
    completions and lists for others.
    """

    def lengths_and_rewards() -> list[list[Any]]:
        """Return [lengths, rewards of each function], lists with an entry for each completion."""
        lengths = [len(ids) for ids in arguments.tokens]
        return [lengths, *(call(function, arguments) for function in functions)]

    lists_of_ranks = ranks.together(lengths_and_rewards)
    # Concatenate each of the K + 1 lists over the ranks.
    lengths, *rewards_of_functions = (
        list(itertools.chain(*parts)) for parts in zip(*lists_of_ranks, strict=True)
    )
    names = _distinct_names(functions)
    each = list[Tensor]()
    steps = list[Tensor | None]()
    for name, rewards in zip(names, rewards_of_functions, strict=True):
        num_lists = sum(isinstance(reward, list) for reward in rewards)
        if num_lists not in (0, len(rewards)):
            raise ValueError(
                f"reward {name} returned numbers for some completions and lists for others: return"
                " one kind for all."
            )
        tensors = [torch.tensor(reward, dtype=torch.float64) for reward in rewards]
        if num_lists:  # process rewards
            table = pad_sequence(tensors, batch_first=True, padding_value=math.nan)
            each.append(table.nansum(1))
            steps.append(table)
        else:  # outcome rewards
            each.append(torch.stack(tensors))
            steps.append(None)
    return Scores(
        names=names,
        weights=weights,
        lengths=lengths,
        each=torch.stack(each),
        steps=steps,
        texts=arguments.completions,
    )


def _distinct_names(functions: list[RewardFunction]) -> list[str]:
    """Return the name of each reward function, all different.

    A name that occurs again gets a number, such as "exact#2".
    """
    names = [name_of(function) for function in functions]
    distinct = list[str]()
    for k, name in enumerate(names):
        num_earlier = names[:k].count(name)
        if num_earlier > 0:
            name = f"{name}#{num_earlier + 1}"
        distinct.append(name)
    return distinct
