"""Cases of parametrised tests: all pairs of options, and tables of refused arguments."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from typing import Any

import pytest

#: How many random cases a test draws.
MANY = int(os.environ.get("GRPO_KERNELS_FUZZ", "3000"))


def pairs(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Return cases that together have every pair of values of two axes.

    axes   the values of each axis by its name

    A case has one value of each axis, {name of the axis: value}. The cases are found greedily and
    are the same in each run. A case starts with the first pair that is still missing. Each further
    axis, the longest first, takes the value that adds the most missing pairs. Among equal values,
    it takes the one whose pairs are in the fewest cases so far.
    """
    names = list(axes)
    options = [list(values) for values in axes.values()]
    if len(names) == 1:
        return [{names[0]: value} for value in options[0]]
    # Axes and values are numbers here. A pair is ((axis, value), (later axis, value)). The
    # dictionary serves as an ordered set.
    missing: dict[_Pair, None] = dict.fromkeys(
        ((i, a), (j, b))
        for i, j in combinations(range(len(names)), 2)
        for a in range(len(options[i]))
        for b in range(len(options[j]))
    )
    num_cases: Counter[_Pair] = Counter()  # the number of cases that have a pair
    cases = []
    while missing:
        chosen: dict[int, int] = dict(next(iter(missing)))  # {axis: value}
        other_axes = set(range(len(names))) - set(chosen)
        for axis in sorted(other_axes, key=lambda axis: -len(options[axis])):
            # For each value (missing pairs that it adds, minus the cases that have its pairs).
            scores = []
            for value in range(len(options[axis])):
                pairs_of_value = [_ordered((axis, value), other) for other in chosen.items()]
                num_missing = sum(pair in missing for pair in pairs_of_value)
                scores.append((num_missing, -sum(num_cases[pair] for pair in pairs_of_value)))
            chosen[axis] = scores.index(max(scores))
        for pair in combinations(sorted(chosen.items()), 2):
            num_cases[pair] += 1
            missing.pop(pair, None)
        cases.append({name: options[axis][chosen[axis]] for axis, name in enumerate(names)})
    return cases


#: Two values of two axes, each as (axis, value). The lower axis comes first.
_Pair = tuple[tuple[int, int], tuple[int, int]]


def _ordered(a: tuple[int, int], b: tuple[int, int]) -> _Pair:
    """Return the pair of two values of different axes."""
    return (a, b) if a < b else (b, a)


def label(case: dict[str, Any]) -> str:
    """Name a case in the list of tests by its values."""
    return " ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in case.items())


#: Rows (function, valid keywords, {message: invalid keywords that replace some of them}). With the
#: invalid keywords the function must raise an error that matches the message.
Refused = list[tuple[Callable[..., Any], dict[str, Any], dict[str, dict[str, Any]]]]


def refusals(table: Refused) -> Any:
    """Return a decorator that parametrises a test by `refused`, one check for each message.

    Each value of `refused` is a function without arguments. It asserts that the valid call
    succeeds, and that the invalid one raises ValueError, or TypeError for an unknown keyword.
    """

    def assert_refused(
        function: Callable[..., Any], valid: dict[str, Any], message: str, invalid: dict[str, Any]
    ) -> None:
        """Assert that function(**valid) succeeds, and that the `invalid` keywords are refused.

        message   regular expression for the error message
        """
        function(**valid)
        error = TypeError if "no argument" in message else ValueError
        with pytest.raises(error, match=message):
            function(**{**valid, **invalid})

    cases = [
        pytest.param(partial(assert_refused, function, valid, message, changes), id=message)
        for function, valid, messages in table
        for message, changes in messages.items()
    ]
    return pytest.mark.parametrize("refused", cases)
