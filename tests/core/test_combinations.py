"""Calls in which every two values of two axes meet (see support/recipes.py), against float64, on
every executor.

Behind `slow`: every three values of three axes. Behind `nightly`: random calls, as many as
GRPO_KERNELS_FUZZ says.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import product

import pytest

from support.doors import check, exact_of
from support.inside import executor, executors
from support.recipes import AXES, PAIRED, Recipe, covering, problem, random_recipe

MANY = int(os.environ.get("GRPO_KERNELS_FUZZ", "2000"))
EXECUTORS = executors()
LOGPS = Recipe(door="logprobs")
ITSELF = Recipe(objective="dapo, exact", other="itself", inplace=True, seed=1)
#: Recipes, each with all combinations of the values of some axes: rows with and without sets beside
#: a second stream; sets, and a factor that the backward brings; real vocabularies, and more rows
#: than a dimension of a grid has; sets of one to thousands of ids; a frozen head, whose log-probs
#: have their gradient made in the forward; impossible logits, those at the ends of a dtype and,
#: from hidden states, beyond fp16; a teacher that is the same logits, which are overwritten; no
#: rows, and no trained row; temperatures that are none at tokens that missing="mask" takes out.
TABLE = [
    (Recipe(objective="dapo, exact", kept="some", missing="full", other="near"), {"seed": (0, 1)}),
    (Recipe(kept="some", upstream=0.5), {"source": AXES["source"], "frozen": ("nothing", "hidden"), "objective": ("dapo", "gspo")}),
    (replace(LOGPS, lengths=(2,)), {"vocab": (1000, 32_001, 129_921, 151_936), "dtype": ("float32", "bfloat16")}),
    (replace(LOGPS, lengths=(65_537,), vocab=3), {}),
    (replace(LOGPS, kept="some", missing="mask", transform="per token"), {"source": AXES["source"]}),
    (replace(LOGPS, lengths=(1,), vocab=1_000_003), {}),
    (Recipe(mask="none", rows="shuffled", objective="dapo, exact", other="near", transform="softcap", dtype="float16", seed=283756), {"exact": ("reverse", "tv"), "vocab": (1, 2, 300), "spread": (3.0, 30.0), "source": AXES["source"]}),
    (Recipe(lengths=(9,), vocab=4000, kept="long"), {"door": ("loss", "logprobs"), "source": AXES["source"]}),
    # with sets of the width of a group, 64
    (Recipe(lengths=(200,), vocab=65, kept="long"), {"source": AXES["source"]}),
    (replace(LOGPS, source="hidden", frozen="weight"), {"also": ("nothing", "detached"), "rows": AXES["rows"]}),
    (LOGPS, {"extreme": ("absent", "ends"), "dtype": AXES["dtype"], "vocab": (7, 300, 9000)}),
    (replace(LOGPS, source="hidden", dtype="float16", spread=5e4), {"transform": ("none", "everything")}),
    (ITSELF, {"exact": AXES["exact"], "dtype": ("float32", "bfloat16"), "objective": ("dapo, exact", "gspo, exact")}),
    (replace(ITSELF, inplace=False), {"exact": AXES["exact"], "kept": ("some",)}),
    (replace(ITSELF, objective="dapo", door="divergence"), {"exact": AXES["exact"]}),
    *((Recipe(lengths=lengths, layout=layout, mask="all"), {"source": AXES["source"], "dtype": AXES["dtype"], "door": ("loss", "logprobs")})
      for lengths, layout in (((0,), "packed"), ((), "padded"), ((0, 0), "padded"), ((3, 2), "padded"))),
]  # fmt: skip
PAIRS = covering()
PAIRS += [
    replace(r, **dict(zip(axes, x, strict=True)))
    for r, axes in TABLE
    for x in product(*axes.values())
]


@pytest.mark.parametrize("recipe", PAIRS, ids=str)
def test_pairs(recipe):
    """Eager (the first executor), and one instruction set after the other."""
    for name in dict.fromkeys((EXECUTORS[0], EXECUTORS[recipe.seed % len(EXECUTORS)])):
        with executor(name) as backend:
            check(recipe, backend=backend)


def test_room_is_small_where_numbers_are_plain():
    """What is compared would not pass whatever came out."""
    plain = [
        r
        for r in covering()
        if (r.spread, r.dtype, r.width, r.extreme, r.transform)
        == (3.0, "float32", 8, "none", "none")
        and r.vocab > 2
    ]
    rooms = [[x.values["logps"] for x in exact_of(r)] for r in plain]
    assert len(rooms) > 5 and all((room <= 2e-4 * (1 + exact.abs())).all() for exact, room in rooms)


@pytest.mark.slow
@pytest.mark.parametrize("axis", PAIRED)
def test_triples(axis):
    for i, value in enumerate(dict.fromkeys(AXES[axis])):
        each(covering(seed=i + 1, **{axis: value}), check)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXECUTORS)
def test_random_calls(name):
    rng = random.Random(os.environ.get("GRPO_KERNELS_FUZZ_SEED", "0"))
    with executor(name) as backend:
        each(
            (random_recipe(rng) for _ in range(MANY)), lambda recipe: check(recipe, backend=backend)
        )


def each(recipes, run):
    for recipe in recipes:
        run(recipe)
        problem.cache_clear()
        exact_of.cache_clear()
