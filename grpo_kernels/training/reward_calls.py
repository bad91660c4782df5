"""Calls of reward functions. What they return is checked here, and here alone; an error shows the completion that it is about."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .shown import pair

RewardFunction = Callable[..., list[Any]]
#: Seconds for finding the completion at which a function fails.
SEARCH = 10.0


@dataclass(frozen=True)
class Rewards:
    """The results of one reward function for some completions."""

    name: str
    values: list[float | list[float | None]]


@dataclass(frozen=True)
class Asked:
    """The B completions that reward functions are asked about."""

    prompts: list[str]
    completions: list[str]
    tokens: list[list[int]]
    columns: dict[str, list[Any]]

    def __getitem__(self, i: int) -> Asked:
        columns = {name: [values[i]] for name, values in self.columns.items()}
        return Asked([self.prompts[i]], [self.completions[i]], [self.tokens[i]], columns)

    def by(self, function: RewardFunction) -> Any:
        """What a function returns, as a list; what is none stays as it is. Without completions it is not called."""
        if not self.completions:
            return []
        returned = function(self.prompts, self.completions, completion_ids=self.tokens, **self.columns)
        plain = isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable)
        return returned if plain else list(returned)

    def shown(self, i: int) -> str:
        return pair(self.prompts[i], self.completions[i])


def call(
    functions: list[RewardFunction],
    *,
    prompts: list[str],
    completions: list[str],
    tokens: list[list[int]],
    columns: dict[str, list[Any]],
) -> list[Rewards]:
    """The functions' rewards, as many as there are completions. Raises RuntimeError where a function raises, ValueError for what it
    must not return; both name the function and the completion, and show it with its prompt."""
    asked = Asked(prompts, completions, tokens, columns)
    return [Rewards(name_of(function), _checked(name_of(function), _called(function, asked), asked)) for function in functions]


def name_of(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _called(function: RewardFunction, asked: Asked) -> Any:
    try:
        return asked.by(function)
    except Exception as error:
        count = len(asked.completions)
        i, said = _failing(function, asked, type(error)), f"raised {type(error).__name__}: {error}"
        where = f"\nWith completion {i} of {count} alone it fails alike:"
        if i is None:
            i, where = 0, f"\nWith none of the {count} completions alone it was seen to fail alike. The first of them:"
        raise RuntimeError(f"reward {name_of(function)} {said}{where}{asked.shown(i)}") from error


def _failing(function: RewardFunction, asked: Asked, kind: type[Exception]) -> int | None:
    """The first completion for which the function fails alone; None: there is none, or it took too long to find."""
    until = time.monotonic() + SEARCH
    for i in range(len(asked.completions)):
        try:
            asked[i].by(function)
        except Exception as error:
            if type(error) is kind:
                return i
        if time.monotonic() > until:
            break
    return None


def _checked(name: str, values: Any, asked: Asked) -> list[float | list[float | None]]:
    """What a function returned, as numbers, or as lists of numbers and None."""
    count = len(asked.completions)
    if not isinstance(values, list):
        raise ValueError(f"reward {name} returned {_shown(values)}: return a list, with an entry for each completion.")
    if len(values) != count:
        first = f" The first without one is completion {len(values)}:{asked.shown(len(values))}" if len(values) < count else ""
        raise ValueError(f"reward {name} returned {len(values)} values for {count} completions: return one for each.{first}")
    rewards = []
    for i, value in enumerate(values):
        try:
            rewards.append(_reward(value, name, i, len(asked.tokens[i])))
            if isinstance(rewards[i], list) != isinstance(rewards[0], list):
                raise ValueError(
                    f"reward {name} returned {_shown(value)} for completion {i} of {len(asked.tokens[i])} tokens, and for others "
                    f"{'lists' if isinstance(rewards[0], list) else 'numbers'}: return the same for all."
                )
        except ValueError as error:
            raise ValueError(f"{error}{asked.shown(i)}") from None
    return rewards


def _reward(value: Any, name: str, i: int, length: int) -> float | list[float | None]:
    """What a function returned for completion i of `length` tokens, as a number or a list of numbers and None."""
    if not isinstance(value, (list, tuple)):
        where = f"reward {name} returned {_shown(value)} for completion {i}"
        return _number(value, f"{where}: return a finite number, or a list with process rewards.")
    if len(value) != length:
        raise ValueError(
            f"process reward {name} returned {len(value)} entries for completion {i} of {length} tokens: one entry per token."
        )
    remedy = "a step's reward is a finite number, and None stands where no step ends."
    return [
        None
        if v is None
        else _number(v, f"process reward {name} returned {_shown(v)} at token {t} of completion {i}: {remedy}")
        for t, v in enumerate(value)
    ]


def _number(value: Any, refusal: str) -> float:
    """A Python, NumPy or torch number, which is finite."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(refusal)
    return number


def _shown(value: Any) -> str:
    """A value for an error message: its type and the beginning of its content."""
    return "None" if value is None else f"a {type(value).__name__} ({value!r:.40})"
