"""Calls in which every two values of two axes meet (see support/recipes.py), against float64, on every executor.

Behind `slow`: every three values of three axes. Behind `nightly`: random calls, as many as GRPO_KERNELS_FUZZ says."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable

import pytest

from support.doors import check, exact_of
from support.inside import executor, executors
from support.processes import checks_of
from support.recipes import AXES, PAIRED, Recipe, covering, legal, problem, random_recipe

MANY = int(os.environ.get("GRPO_KERNELS_FUZZ", "2000"))
EXECUTORS = executors()
#: Where three values meet that no pair brings together: rows with and without sets beside a second stream, several of those beside
#: a term of likelihood.
PAIRS = [
    *covering(),
    *(legal(Recipe(objective="dapo, exact", kept="some", missing="full", others=("near",), seed=seed)) for seed in range(2)),
    legal(Recipe(objective="dapo, exact", others=("whole", "near"))),
]
RANKS = "recipes_on_ranks"


@pytest.mark.parametrize("recipe", PAIRS, ids=str)
def test_pairs(recipe: Recipe) -> None:
    """Eager (the first executor), and one instruction set after the other."""
    for name in dict.fromkeys((EXECUTORS[0], EXECUTORS[recipe.seed % len(EXECUTORS)])):
        with executor(name) as backend:
            check(recipe, backend=backend)


def test_room_is_small_where_numbers_are_plain() -> None:
    """What is compared would not pass whatever came out."""
    plain = [
        r
        for r in PAIRS
        if (r.spread, r.dtype, r.width, r.extreme, r.transform) == (3.0, "float32", 8, "none", "none") and r.vocab > 2
    ]
    rooms = [(exact_of(r)[0].values["logps"], exact_of(r)[1].values["logps"]) for r in plain]
    assert len(rooms) > 10 and all((room <= 2e-4 * (1 + exact.abs())).all() for exact, room in rooms)


@pytest.mark.parametrize("check_of_ranks", checks_of(RANKS))
def test_parts_of_a_vocabulary(on_ranks: Callable[..., dict[str, str]], check_of_ranks: str) -> None:
    assert on_ranks(RANKS, 2)[check_of_ranks] == "ok", on_ranks(RANKS, 2)[check_of_ranks]


@pytest.mark.slow
@pytest.mark.parametrize("axis", PAIRED)
def test_triples(axis: str) -> None:
    for i, value in enumerate(dict.fromkeys(AXES[axis])):
        each(covering(seed=i + 1, **{axis: value}), check)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXECUTORS)
def test_random_calls(name: str) -> None:
    rng = random.Random(os.environ.get("GRPO_KERNELS_FUZZ_SEED", "0"))
    with executor(name) as backend:
        each((random_recipe(rng) for _ in range(MANY)), lambda recipe: check(recipe, backend=backend))


def each(recipes: Iterable[Recipe], run: Callable[[Recipe], None]) -> None:
    for recipe in recipes:
        run(recipe)
        problem.cache_clear()
        exact_of.cache_clear()
