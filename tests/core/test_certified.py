"""Rows that are left out of the gradient: fewer products, and an error within the bound that is returned."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from grpo_kernels import Certified, Exact, Objective, Options, Sparse, TokenSets, grpo_loss, linear_grpo_loss, linear_logprobs
from support.cases import OBJECTIVES, same_bits
from support.linear_cases import LinearCase, build_linear, count_products, run_linear

Tensor = torch.Tensor


def certified(budget: float, **more: Any) -> dict[str, Any]:
    return {"options": Options(certified=Certified(budget), **more)}


def peaked(seed: int, factor: float) -> LinearCase:
    """Hidden states of very different sizes, so that slopes and bounds are."""
    case = build_linear(seed=seed, transform={"temperature": 0.8, "softcap": 30.0, "scale": -1.2} if seed % 2 else {})
    g = torch.Generator().manual_seed(seed)
    return dataclasses.replace(case, hidden=case.hidden * factor * torch.rand(*case.hidden.shape[:-1], 1, generator=g).exp())


@pytest.mark.parametrize("name", ["grpo", "grpo, k3 and entropy", "gspo, k3 by the ratio"])
def test_the_error_is_within_the_returned_bound(name: str, backend: str) -> None:
    objective, most = OBJECTIVES[name][0](), []
    for seed in range(6):
        case = peaked(seed, (0.3, 1.0, 4.0)[seed % 3])
        _, exact = run_linear(case, objective, backend)
        for budget in (1e-3, 0.03, 0.4):
            out, found = run_linear(case, objective, backend, **certified(budget))
            share, bound = (float(out.metrics[key]) for key in ("dropped", "dropped_bound"))
            lost = float(torch.linalg.matrix_norm((found["weight"] - exact["weight"]).double()))
            assert 0 <= share <= budget * (1 + 1e-5)
            assert lost <= bound + 1e-6 * float(exact["weight"].norm())
            gone = (found["hidden"] == 0).all(-1) & (exact["hidden"] != 0).any(-1)
            assert bool(gone.any()) == (share > 0)
            assert torch.allclose(
                found["hidden"][~gone], exact["hidden"][~gone], rtol=1e-5, atol=1e-6 * float(exact["hidden"].abs().max())
            )
            most.append(lost / bound if bound else 0.0)
    assert max(most) > 0.2  # a loose bound would never be near the error


def test_rows_leave_in_the_order_of_their_bounds() -> None:
    """Rows are left out in the order of their bounds, until one more would exceed the budget. The bounds are summed by hand."""
    case = build_linear(bias=False, packed=True)
    objective = Objective.preset("reinforce")
    leaves = case.leaves
    logps, _ = linear_logprobs(leaves["hidden"], leaves["weight"], case.tokens.targets)
    out, found = run_linear(case, objective, "auto", **certified(0.2))
    _, exact = run_linear(case, objective, "auto")
    # The slope of each row: the gradient of its hidden state by that of its log-prob.
    (per_logp,) = torch.autograd.grad(logps.sum(), leaves["hidden"])
    slope = (exact["hidden"] * per_logp).sum(-1) / per_logp.square().sum(-1)
    bounds = (slope.abs() * math.sqrt(2.0) * -torch.expm1(logps.detach()) * case.hidden.norm(dim=-1)).double()
    gone = (found["hidden"] == 0).all(-1) & (slope != 0)
    spent = bounds[gone].sum() / bounds.sum()
    torch.testing.assert_close(out.metrics["dropped"].double(), spent, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(out.metrics["dropped_bound"].double(), bounds[gone].sum(), rtol=1e-4, atol=0.0)
    stay = bounds[~gone & (slope != 0)]
    assert 0 < spent <= 0.2 < spent + stay.min() / bounds.sum() and bounds[gone].max() <= stay.min()


def test_rows_that_leave_take_part_in_no_product_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    case = peaked(0, 2.0)
    rows = count_products(monkeypatch)
    _, found = run_linear(case, Objective.preset("grpo"), "auto", **certified(0.3))
    stay = int((found["hidden"] != 0).any(-1).sum())
    assert case.tokens.mask is not None and stay < int(case.tokens.mask.sum())
    assert rows["d_hidden"] == rows["d_weight"] == stay and rows["logits"] == int(case.tokens.mask.sum()) + stay


def test_without_a_budget_no_row_is_left_out(backend: str) -> None:
    case = build_linear()
    out, found = run_linear(case, Objective.preset("grpo"), backend, **certified(0.0))
    _, exact = run_linear(case, Objective.preset("grpo"), backend)
    assert out.metrics["dropped"] == 0 == out.metrics["dropped_bound"]
    for name, x in exact.items():
        torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-6 * float(x.abs().max()))
    assert "dropped" not in run_linear(case, Objective.preset("grpo"), backend)[0].metrics


def test_what_masked_rows_hold_is_not_looked_at(backend: str) -> None:
    case = build_linear()
    _, expected = run_linear(case, Objective.preset("grpo"), backend, **certified(0.1))
    assert case.tokens.mask is not None
    hidden = case.hidden.clone()
    hidden[~case.tokens.mask] = torch.nan
    out, found = run_linear(dataclasses.replace(case, hidden=hidden), Objective.preset("grpo"), backend, **certified(0.1))
    assert all(same_bits(found[name], x) for name, x in expected.items()) and 0 < out.metrics["dropped"] <= 0.1


def test_with_drawn_columns(backend: str) -> None:
    """The rows that stay draw what they draw without a budget."""
    case, sparse = peaked(2, 2.0), Sparse(1 / 16, 3)
    _, drawn = run_linear(case, Objective.preset("grpo"), backend, options=Options(sparse=sparse))
    _, dense = run_linear(case, Objective.preset("grpo"), backend, **certified(0.3))
    out, both = run_linear(case, Objective.preset("grpo"), backend, **certified(0.3, sparse=sparse))
    gone = (dense["hidden"] == 0).all(-1)
    assert same_bits(both["hidden"], torch.where(gone[..., None], 0.0, drawn["hidden"])) and out.metrics["dropped"] > 0


def test_rows_with_sets_never_leave(backend: str) -> None:
    case = build_linear()
    targets = case.tokens.targets.flatten().tolist()
    sets = TokenSets.from_lists([[y, (y + 1) % 61, (y + 7) % 61] if i % 3 == 0 else [] for i, y in enumerate(targets)])
    case = dataclasses.replace(case, tokens=dataclasses.replace(case.tokens, fields=case.tokens.fields | {"kept": sets}))
    out, found = run_linear(case, Objective.preset("grpo"), backend, **certified(0.5))
    _, exact = run_linear(case, Objective.preset("grpo"), backend)
    has = (sets.counts > 0).view(case.hidden.shape[:-1])
    torch.testing.assert_close(found["hidden"][has], exact["hidden"][has])
    gone = (found["hidden"] == 0).all(-1) & (exact["hidden"] != 0).any(-1)
    assert gone.any() and out.metrics["dropped"] > 0


def test_what_is_refused() -> None:
    case, options = build_linear(), {"options": Options(certified=Certified())}
    batch, objective = dataclasses.replace(case.tokens.batch(), ref_logps=None), Objective.preset("grpo")
    exact = Objective.preset("grpo", beta=0.1, kl=Exact())
    kept = build_linear(kept=True)
    both = {"options": Options(certified=Certified(), entropy_over="vocabulary")}
    for reason, call in {
        "no product": lambda: grpo_loss(torch.zeros(*batch.targets.shape, 61), batch, objective, **options),
        "no loss": lambda: linear_logprobs(case.hidden, case.weight, batch.targets, **options),
        "do not bound": lambda: linear_grpo_loss(
            case.hidden, case.weight, batch, exact, reference=(case.hidden, case.weight), **options
        ),
        "two gradients": lambda: run_linear(kept, objective, "auto", **both),
        "budget=1": lambda: Certified(1.0),
        "budget=-1": lambda: Certified(-1.0),
        "pass a Certified": lambda: Options(certified=0.1),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(ValueError, match=reason):
            call()
