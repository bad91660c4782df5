"""Recipes whose vocabulary is cut over ranks, against the same float64 answers: run by test_combinations.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from grpo_kernels.distributed import VocabShard
from support.doors import compare, run
from support.processes import WHOLE_PRODUCTS
from support.recipes import Recipe, covering, cut, problem

#: Axes of what ranks have to exchange.
EXCHANGED = (
    "mask",
    "kept",
    "missing",
    "over",
    "others",
    "exact",
    "tail",
    "also",
    "weight_grad",
    "transform",
    "extreme",
    "spread",
)


def each_value(recipes: list[Recipe]) -> list[Recipe]:
    """Some of them, in which each value of these axes meets both sources."""
    met: set[tuple[str, str, Any]] = set()
    found = []
    for r in recipes:
        values = {(r.source, name, getattr(r, name)) for name in EXCHANGED}
        found += [r] if values - met else []
        met |= values
    return found


def check_each_kind(rank: int, ranks: int) -> None:
    recipes = covering(ranks=ranks)
    for i, recipe in enumerate(recipes if WHOLE_PRODUCTS else each_value(recipes)):
        p = cut(problem(recipe), rank)
        shard = VocabShard(p.columns.start, recipe.vocab)
        found = run(p, backend=("eager", "cpu")[i % 2], shard=shard)
        compare(p, found)
        everyone = [None] * ranks
        dist.all_gather_object(everyone, {name: x for name, x in found.values.items()})
        assert all(torch.equal(x, everyone[0][name]) for name, x in found.values.items()), f"{recipe}: ranks disagree"  # type: ignore[index]


def check_a_share_of_the_gradient_of_hidden_states(rank: int, ranks: int) -> None:
    """With reduce_hidden=False each rank has its own, and they add up."""
    recipe = next(r for r in covering(ranks=ranks, source="hidden", door="loss") if r.mask == "some" and r.frozen == "nothing")
    p = cut(problem(recipe), rank)
    found = run(p, backend="eager", shard=VocabShard(p.columns.start, recipe.vocab, reduce_hidden=False))
    share = found.gradients["hidden"].float()
    before = share.clone()
    dist.all_reduce(share)
    assert not torch.equal(share, before)
    compare(p, replace(found, gradients={**found.gradients, "hidden": share.to(p.clean["hidden"].dtype)}))
