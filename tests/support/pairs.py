"""Cases of parametrised tests:

every pair of options in place of the product of all, refusals as tables, how many random ones.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest

#: Random cases that a test draws.
MANY = int(os.environ.get("GRPO_KERNELS_FUZZ", "3000"))


def pairs(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """List cases, each with one value of every axis, so that every two values of two axes meet in
    one of them.

    Greedy and the same in each run: a case starts with the first pair that is missing, and each
    further axis takes the value that adds the most missing pairs; among equals, the one that has
    met the others least often.
    """
    names, options = list(axes), [[*values] for values in axes.values()]
    if len(names) == 1:
        return [{names[0]: value} for value in options[0]]
    missing = dict.fromkeys(
        ((i, a), (j, b))
        for i, j in combinations(range(len(names)), 2)
        for a in range(len(options[i]))
        for b in range(len(options[j]))
    )
    met: Counter[Any] = Counter()
    cases = []
    while missing:
        chosen = dict(next(iter(missing)))
        for axis in sorted(
            set(range(len(names))) - set(chosen), key=lambda axis: -len(options[axis])
        ):
            made = [
                [tuple(sorted([(axis, value), other])) for other in chosen.items()]
                for value in range(len(options[axis]))
            ]
            gains = [
                (sum(pair in missing for pair in each), -sum(met[pair] for pair in each))
                for each in made
            ]
            chosen[axis] = gains.index(max(gains))
        for pair in combinations(sorted(chosen.items()), 2):
            met[pair] += 1
            missing.pop(pair, None)
        cases.append({name: options[axis][chosen[axis]] for axis, name in enumerate(names)})
    return cases


def label(case: dict[str, Any]) -> str:
    """Name a case in the list of tests by its values."""
    return " ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in case.items())


#: A call that is fine, and what its message must say where some of its arguments are others.
Refused = list[tuple[Callable[..., Any], dict[str, Any], dict[str, dict[str, Any]]]]


def refusals(table: Refused) -> Any:
    """Parametrise a test by functions that check one refusal each; unknown keywords raise
    TypeError, all else ValueError.
    """

    def checked(
        call: Callable[..., Any], given: dict[str, Any], message: str, changes: dict[str, Any]
    ) -> None:
        call(**given)
        with pytest.raises(TypeError if "no argument" in message else ValueError, match=message):
            call(**{**given, **changes})

    cases = [
        pytest.param(lambda row=(call, given, message, changes): checked(*row), id=message)
        for call, given, messages in table
        for message, changes in messages.items()
    ]
    return pytest.mark.parametrize("refused", cases)
