"""Cases that hold every pair of options, in place of the product of all options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairs(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """List cases, each with one value of every axis, so that every two values of two axes meet in one of them.

    Greedy and the same in each run: a case starts with the first pair that is missing, and each further axis takes the value
    that adds the most missing pairs; among equals, the one that was used least.
    """
    names, sizes = list(axes), [len(values) for values in axes.values()]
    if len(names) == 1:
        return [{names[0]: value} for value in axes[names[0]]]
    missing = dict.fromkeys(
        ((i, a), (j, b)) for i, j in combinations(range(len(names)), 2) for a in range(sizes[i]) for b in range(sizes[j])
    )
    used = [[0] * size for size in sizes]
    cases = []
    while missing:
        chosen = dict(next(iter(missing)))
        for axis in sorted(set(range(len(names))) - set(chosen), key=lambda axis: -sizes[axis]):
            gains = [
                sum(tuple(sorted([(axis, value), other])) in missing for other in chosen.items())
                for value in range(sizes[axis])
            ]
            chosen[axis] = max(range(sizes[axis]), key=lambda value: (gains[value], -used[axis][value]))
        for pair in combinations(sorted(chosen.items()), 2):
            missing.pop(pair, None)
        for axis, value in chosen.items():
            used[axis][value] += 1
        cases.append({name: axes[name][chosen[axis]] for axis, name in enumerate(names)})
    return cases


def label(case: dict[str, Any]) -> str:
    """Name a case in the list of tests by its values."""
    return " ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in case.items())
