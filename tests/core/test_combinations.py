"""Calls in which every two values of two axes meet (see support/recipes.py), against float64, on every executor.

Behind `slow`: every three values of three axes. Behind `nightly`: random calls, as many as GRPO_KERNELS_FUZZ says."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from itertools import product

import pytest

from support.doors import check, exact_of
from support.inside import executor, executors
from support.recipes import AXES, DTYPES, PAIRED, Recipe, covering, legal, problem, random_recipe

MANY = int(os.environ.get("GRPO_KERNELS_FUZZ", "2000"))
EXECUTORS = executors()
#: Where three values meet that no pair brings together: rows with and without sets beside a second stream, several of those beside
#: a term of likelihood.
PAIRS = [
    *covering(),
    *(legal(Recipe(objective="dapo, exact", kept="some", missing="full", others=("near",), seed=seed)) for seed in range(2)),
    legal(Recipe(objective="dapo, exact", others=("whole", "near"))),
]
#: Rows of real vocabularies, and so many that a grid has not enough dimensions for; sets of one to thousands of ids in one call.
PAIRS += [
    *(
        Recipe(door="logprobs", lengths=(n,), vocab=vocab, dtype=dtype)
        for n, vocab, dtype in (
            (2, 1000, "bfloat16"),
            (2, 32_001, "float32"),
            (2, 129_921, "bfloat16"),
            (2, 151_936, "float32"),
            (65_537, 3, "float32"),
            (1, 1_000_003, "float32"),
        )
    ),
    *(
        legal(Recipe(door=door, source=x, lengths=(9,), vocab=4000, kept="long"))
        for door in ("loss", "logprobs")
        for x in AXES["source"]
    ),
]
#: In place, beside a teacher that is the same logits under a transform of its own.
PAIRS += [
    Recipe(objective=name, others=("itself",) * n, exact=exact, inplace=True, kept=kept, dtype=dtype, seed=1)
    for name, n, kept in (
        ("dapo, exact", 1, "none"),
        ("gspo, exact", 1, "none"),
        ("dapo, exact", 1, "some"),
        ("dapo, exact", 2, "none"),
    )
    for exact in ("reverse", "forward", "jsd")
    for dtype in ("float32", "bfloat16")
] + [
    Recipe(door="divergence", also="nothing", others=("itself",), exact=exact, inplace=True, seed=1)
    for exact in ("reverse", "jsd")
]
#: No rows, and no trained row, in which everything may be NaN.
PAIRS += [
    legal(Recipe(door=door, source=source, lengths=lengths, layout=layout, mask="all", dtype=dtype, objective="grpo, k3 and entropy"))
    for door, source, dtype in product(("loss", "logprobs"), ("logits", "hidden"), DTYPES)
    for lengths, layout in (((0,), "packed"), ((), "padded"), ((0, 0), "padded"), ((3, 2), "padded"))
]  # fmt: skip


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
        for r in covering()
        if (r.spread, r.dtype, r.width, r.extreme, r.transform) == (3.0, "float32", 8, "none", "none") and r.vocab > 2
    ]
    rooms = [(exact_of(r)[0].values["logps"], exact_of(r)[1].values["logps"]) for r in plain]
    assert len(rooms) > 10 and all((room <= 2e-4 * (1 + exact.abs())).all() for exact, room in rooms)


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
