"""What must not change a result: the same bits, or the same values, of calls that say the same in another way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Options, grpo_loss, token_logprobs
from grpo_kernels.losses import objective_loss
from support.bits import same_bits
from support.doors import batch_of, compare, exact_of, normalizer_of, objective_of, run, transform_of
from support.inside import in_chunks
from support.oracle import Answer
from support.recipes import KINDS, Recipe, legal, of_sequences, problem, random_recipe

Tensor = torch.Tensor


def drawn(seed: int, **fixed: Any) -> Recipe:
    plain = {
        "mask": "some",
        "spread": 3.0,
        "vocab": 61,
        "upstream": 1.0,
        "extreme": "none",
        "frozen": "nothing",
        "inplace": False,
    }
    return random_recipe(random.Random(seed), **{**plain, **fixed})


#: Each kind of objective at both levels, and log-probs and divergences.
RECIPES = [
    *(drawn(i, door="loss", objective=kind, source=source) for source in ("logits", "hidden") for i, kind in enumerate(KINDS)),
    *(
        drawn(i, door=door, source=source)
        for i, door in enumerate(("logprobs", "divergence"))
        for source in ("logits", "hidden")
    ),
]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def assert_same_bits(found: Answer, expected: Answer, what: str) -> None:
    for kind in ("values", "gradients"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys()
        for name, x in mine.items():
            assert same_bits(x, theirs[name]), f"{what}: {name} differs by {(x - theirs[name]).abs().max()}"


@each_recipe
def test_the_same_call_gives_the_same_bits(recipe: Recipe, backend: str) -> None:
    """Again, and under activation checkpointing."""
    p = problem(recipe)
    first = run(p, backend=backend)
    assert_same_bits(run(p, backend=backend), first, "again")
    if not recipe.inplace and recipe.weight_grad == "none":
        again = run(p, backend=backend, call=lambda f: lambda *x: checkpoint(f, *x, use_reentrant=False))
        assert_same_bits(again, first, "checkpointed")


@each_recipe
def test_threads_change_no_bit(recipe: Recipe, backend: str) -> None:
    """From hidden states a library's products may change with them: then the values are compared."""
    p = problem(recipe)
    first = run(p, backend=backend)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        found = run(p, backend=backend)
        compare(p, found) if recipe.source == "hidden" else assert_same_bits(found, first, f"{threads} threads")


@pytest.mark.parametrize(
    "recipe", [r for r in RECIPES if r.source == "logits" and r.over == "kept" and len(r.others) < 2], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_place_gives_the_same_bits(recipe: Recipe, dtype: str, backend: str) -> None:
    recipe = legal(replace(recipe, dtype=dtype, inplace=True, view="rows apart", also="entropy"))
    assert recipe.inplace
    beside = problem(replace(recipe, inplace=False))
    assert_same_bits(run(problem(recipe), backend=backend), run(beside, backend=backend), "in place")


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.kept == "none" and r.others == () and r.also != "at"], ids=str)
def test_sets_without_ids_are_no_sets(recipe: Recipe, backend: str) -> None:
    p = problem(recipe)
    empty = replace(p, recipe=replace(recipe, kept="empty"), sets=[[]] * len(p.ids))
    compare(p, replace(run(empty, backend=backend)))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.door == "loss"], ids=str)
def test_rows_that_are_skipped_contribute_nothing(recipe: Recipe, backend: str) -> None:
    skipping, reading = (problem(legal(replace(recipe, skip_inactive=skip))) for skip in (True, False))
    found, whole = run(skipping, backend=backend), run(reading, backend=backend)
    assert same_bits(found.values["loss"], whole.values["loss"])
    for name, gradient in found.gradients.items():
        if recipe.source == "logits":
            assert same_bits(gradient, whole.gradients[name])
    compare(skipping, found)


BY_ROWS = [
    replace(r, layout="padded", lengths=(3, 1, 4, 2), mask="some", weight_grad="none", normalizer=7.0)
    for r in RECIPES
    if r.objective not in ("clip-cov", "entropy quantile, bonus of its own")
]


@pytest.mark.parametrize("recipe", [legal(r) for r in BY_ROWS], ids=str)
def test_sequences_do_not_see_each_other(recipe: Recipe, backend: str) -> None:
    """In another order, and in parts whose losses and gradients add up. From logits each row keeps its bits."""
    p = problem(recipe)
    whole = run(p, backend=backend)
    for sequences in ([2, 0, 3, 1], [0, 1], [2, 3], [1]):
        part = run(of_sequences(p, sequences), backend=backend)
        for kind in ("values", "gradients"):
            for name, x in getattr(part, kind).items():
                mine = getattr(whole, kind)[name]
                if x.shape[1:] == mine.shape[1:] and x.dim() and name not in ("weight", "bias", "at"):
                    if recipe.source == "logits":
                        assert same_bits(x, mine[sequences]), f"sequences {sequences}: {name}"
                    else:
                        torch.testing.assert_close(
                            x, mine[sequences], rtol=2e-2 if x.dtype != torch.float32 else 1e-4, atol=1e-4
                        )
    parts = [run(of_sequences(p, part), backend=backend) for part in ([0, 1], [2], [3])]
    exact, room = exact_of(recipe)
    if recipe.door == "loss" and exact.clear:
        total = sum(part.values["loss"].double() for part in parts)
        assert (total - exact.values["loss"]).abs() <= 4 * room.values["loss"] + 1e-6
    for name in ("weight", "bias"):
        if name in whole.gradients and exact.clear:
            total = sum(part.gradients[name].double() for part in parts)
            assert ((total - exact.gradients[name]).abs() <= 4 * room.gradients[name] + 1e-6).all(), name


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "recipe", [*(r for r in RECIPES if r.source == "hidden"), Recipe(source="hidden", bias="plain")], ids=str
)  # fmt: skip
def test_rows_are_projected_some_at_a_time(recipe: Recipe, rows: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, rows)
    compare(problem(recipe), run(problem(recipe), backend=backend))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.door == "loss" and r.source == "logits" and not r.others], ids=str)
def test_a_loss_is_log_probs_and_the_loss_of_these(recipe: Recipe, backend: str) -> None:
    """Layer 2 equals layer 1 with autograd through the token stage."""
    p = problem(legal(replace(recipe, kept="none", skip_inactive=False, dtype="float32")))
    objective, leaf = objective_of(p.recipe), p.given["logits"].detach().clone().requires_grad_()
    given = {"mask": p.fields["mask"], "transform": transform_of(p), "entropy": True, "options": Options(backend)}
    logps, entropy = token_logprobs(leaf, p.targets, **given)
    loss = objective_loss(logps, batch_of(p), objective, entropy=entropy, normalizer=normalizer_of(p.recipe)).loss
    (loss * p.recipe.upstream).backward()
    found = Answer({"loss": loss.detach(), "logps": logps.detach(), "entropy": entropy.detach()}, {"logits": leaf.grad})
    compare(p, found)
    one = grpo_loss(
        p.given["logits"],
        batch_of(p),
        objective,
        transform=transform_of(p),
        normalizer=normalizer_of(p.recipe),
        options=Options(backend=backend),
    )
    if p.recipe.dtype == "float32":
        assert same_bits(one.logps, logps.detach()), "before the first update the ratio is 1, exactly"
