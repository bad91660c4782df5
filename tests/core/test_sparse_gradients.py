"""Gradients of a head from few columns of each row: which ones, how they weigh, and that nothing else moves them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Sparse
from grpo_kernels.losses import objective_loss
from support.bits import same_bits
from support.doors import batch_of, by_func, call_of, compare, leaves_of, named, objective_of, pull, run
from support.inside import drawn_columns, in_chunks, nothing_is_drawn
from support.recipes import DTYPES, Problem, Recipe, legal, problem

Tensor = torch.Tensor
STEP, SEED = 0.02, 5
ROWS = Recipe(door="logprobs", source="hidden", lengths=(24,), bias="plain", width=16, vocab=300, spread=2.0, seed=34)


def drawn(
    recipe: Recipe | Problem, backend: str, step: float = STEP, seed: Any = SEED, first_row: int = 0, **how: Any
) -> dict[str, Tensor]:
    """The gradients from few columns."""
    p = problem(recipe) if isinstance(recipe, Recipe) else recipe
    return run(p, backend=backend, sparse=Sparse(step, seed, first_row), **how).gradients


def assert_near(ours: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == exact.keys()
    for name, x in exact.items():
        assert (ours[name].double() - x.double()).abs().max() <= tolerance * x.abs().max(), name


def assert_same(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert ours.keys() == others.keys() and all(same_bits(x, others[name]) for name, x in ours.items())


@pytest.mark.parametrize("first_row", [0, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_that_is_drawn_counts_with_the_larger_of_its_probability_and_the_step(
    dtype: str, first_row: int, backend: str
) -> None:
    """In float64, from the columns that the backend draws; the target's with its own probability."""
    p = problem(replace(ROWS, dtype=dtype))
    (hidden, weight, bias), live = (x.double() for x in p.clean.values()), p.trained
    hidden = hidden.flatten(0, -2)
    logits = hidden @ weight.T + bias
    logp, taken = logits.log_softmax(-1), drawn_columns(logits.float(), p.ids, backend, STEP, SEED, first_row)
    assert 0.02 < taken[live].double().mean() < 0.6
    own = torch.nn.functional.one_hot(p.ids, 300).bool()
    w = torch.where(own, logp.exp(), logp.exp().clamp(min=STEP)) * taken
    entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
    d_logps, d_entropy = (p.upstream[name].reshape(-1, 1) for name in ("logps", "entropy"))
    g = d_logps * (own.double() - w) - d_entropy * w * (logp + entropy)
    g = torch.where(live[:, None], g, 0.0)
    exact = {"hidden": (g @ weight).view(p.clean["hidden"].shape), "weight": g.T @ hidden, "bias": g.sum(0)}
    assert_near(drawn(p, backend, first_row=first_row), exact, {"float32": 3e-6, "bfloat16": 2**-8, "float16": 2**-10}[dtype])


def test_a_seed_draws_the_same_columns_whatever_else_changes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again, from a tensor that is read at the time, under checkpointing, by torch.func, in other memory, masked rows of NaN all
    the while; another seed draws others."""
    seed, found = torch.tensor(SEED), drawn(ROWS, backend)
    assert_same(drawn(ROWS, backend), found)
    assert_same(drawn(ROWS, backend, seed=seed), found)
    seed.fill_(SEED + 1)
    other = drawn(ROWS, backend, seed=seed)
    assert_same(other, drawn(ROWS, backend, seed=SEED + 1))
    assert not any(same_bits(found[name], other[name]) for name in found)
    assert_same(drawn(ROWS, backend, call=by_func), found)
    assert_same(drawn(ROWS, backend, call=lambda f: lambda *x: checkpoint(f, *x, use_reentrant=False)), found)
    for view in ("transposed", "rows apart"):
        assert_same(drawn(replace(ROWS, view=view), backend), found)
    in_chunks(monkeypatch, 5)
    torch.set_num_threads(3)
    assert_near(drawn(ROWS, backend), found, 1e-5)


@pytest.mark.parametrize("objective", ["grpo, k3 and entropy", "gspo", "reinforce"])
def test_a_loss_has_the_values_of_the_dense_one_and_the_gradient_of_its_log_probs(objective: str, backend: str) -> None:
    """Of reinforce rows without an advantage have no gradient, and come behind the others."""
    p = problem(
        replace(ROWS, door="loss", also="nothing", objective=objective, lengths=(2,) * 12, layout="packed", given="column")
    )
    assert not p.seen["advantages"].all()
    options = {"backend": backend, "sparse": Sparse(STEP, SEED)}
    found, leaves = run(p, **options), leaves_of(p)
    compare(p, replace(found, gradients=run(p, backend=backend).gradients))
    alone = named(call_of(replace(p, recipe=replace(p.recipe, door="logprobs", also="entropy")), **options)(*leaves.values()))
    pull(p, {"loss": objective_loss(alone["logps"], batch_of(p), objective_of(p.recipe), entropy=alone["entropy"]).loss})
    assert_same({name: x.grad for name, x in leaves.items() if x.grad is not None}, found.gradients)


def test_rows_with_sets_go_their_own_way(backend: str) -> None:
    p = problem(legal(replace(ROWS, kept="some")))
    has, parts = torch.tensor([bool(ids) for ids in p.sets or []]).view(p.shape), []
    for rows, how in ((has, {}), (~has, {"sparse": Sparse(STEP, SEED)})):
        some = {name: torch.where(rows, p.upstream[name], 0.0) for name in ("logps", "entropy")}
        parts.append(run(replace(p, upstream=some), backend=backend, **how).gradients)
    assert_near(drawn(p, backend), {name: x + parts[1][name] for name, x in parts[0].items()}, 1e-6)


def test_without_a_gradient_nothing_is_drawn(backend: str) -> None:
    p = problem(ROWS)
    with nothing_is_drawn(backend), torch.no_grad():
        few, dense = (named(call_of(p, backend=backend, **how)(*p.given.values())) for how in ({"sparse": Sparse()}, {}))
    assert_same(few, dense)
