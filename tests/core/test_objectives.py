"""Every objective once against float64: value, log-probs, entropy and gradient, from logits and from hidden states."""

from __future__ import annotations

from functools import cache

import pytest

from support.doors import check, exact_of
from support.inside import executor, executors
from support.objectives import OBJECTIVES
from support.recipes import Recipe, problem

LENGTHS = (7, 4, 2, 0, 6, 1, 5, 3)


@cache
def recipe(name: str, source: str) -> Recipe:
    """With the first seed for which no number lies at a bound."""
    layout, others = ("padded", "packed")[len(name) % 2], ("near",) if "exact" in name else ()
    seeds = (Recipe(source=source, objective=name, lengths=LENGTHS, layout=layout, others=others, seed=i) for i in range(9))
    return next(r for r in seeds if exact_of(r)[0].clear)


@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_what_its_paper_says(name: str, source: str) -> None:
    """On every executor."""
    for each in executors():
        with executor(each) as backend:
            check(recipe(name, source), backend=backend)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_question_is_not_trivial(name: str) -> None:
    """Every term has a gradient, and tokens lie on both sides of every bound."""
    r = recipe(name, "logits")
    exact, room = exact_of(r)
    gradient = exact.gradients["logits"]
    assert gradient.abs().max() > 1e-3 and (room.gradients["logits"] <= 1e-3 * gradient.abs().max()).all()
    moved = (exact.values["logps"].view(problem(r).shape) - problem(r).seen["old_logps"])[problem(r).seen["mask"]]
    assert (moved > 0.3).any() and (moved < -0.25).any() and (moved.abs() < 0.15).any()
