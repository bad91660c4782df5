"""Gradients from few columns of each row: correct for the drawn columns, equal to the dense gradient in the mean over seeds,
and the same on every path that computes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from grpo_kernels import (
    Exact,
    Objective,
    Options,
    Sparse,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from grpo_kernels.head import FusedLMHead
from grpo_kernels.losses import objective_loss
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.rows import RowTransform
from grpo_kernels.vocabulary.selection import starts
from support.cases import OBJECTIVES, same_bits
from support.linear_cases import Gradients, LinearCase, build_linear, gradients_of, in_chunks, run_linear, run_logprobs

Tensor = torch.Tensor
STEP = 1 / 16
SEED = 5
DRAWN = {"options": Options(sparse=Sparse(STEP, SEED))}
CAPPED = {"temperature": 0.8, "softcap": 4.0, "scale": 1.5}


def upstream(case: LinearCase, seed: int = 2) -> Tensor:
    return torch.randn(case.tokens.targets.shape, generator=torch.Generator().manual_seed(seed))


def by_hand(case: LinearCase, d_logps: Tensor, d_entropy: Tensor, sparse: Sparse, backend: str) -> Gradients:
    """Gradients in float64 of the columns that the backend draws from fp32 logits, each weighed by max(p, step)."""
    hidden, weight = case.hidden.double().flatten(0, -2), case.weight.double()
    t = case.tokens.transform
    scale, cap, temperature = t.get("scale", 1.0), t.get("softcap") or 0.0, t.get("temperature", 1.0)
    x = F.linear(hidden, weight, None if case.bias is None else case.bias.double())
    z = (torch.tanh(x * scale / cap) * cap if cap else x * scale) / temperature
    slope = scale / temperature * ((1 - torch.tanh(x * scale / cap) ** 2) if cap else torch.ones_like(x))
    logp = z.log_softmax(-1)
    p, H = logp.exp(), -(logp.exp() * logp).sum(-1, keepdim=True)
    targets, read = case.tokens.targets.flatten(), torch.ones(len(z), dtype=torch.bool)
    if case.tokens.mask is not None:
        read = case.tokens.mask.flatten()
    module, transform = backends.load(backend), RowTransform(scale, cap, 1.0 / temperature)
    stats = module.stats(x.float()[None], targets, None, transform, ("max", "sum", "target"))
    rows = torch.arange(len(z)) + sparse.first_row
    drawn = module.select(x.float(), targets, stats, transform, sparse.step, starts(sparse.seed, rows))
    taken = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool).scatter_(1, drawn.ids.long() % (z.shape[1] + 1), True)[:, :-1]
    assert 0.02 < taken[read].double().mean() < 0.6  # else little is tried
    own = F.one_hot(targets, z.shape[1]).bool()
    w = torch.where(own, p, p.clamp(min=sparse.step)) * taken
    g = d_logps.double().flatten()[:, None] * (own.double() - w) - d_entropy.double().flatten()[:, None] * w * (logp + H)
    g = torch.where(read[:, None], g * slope, 0.0)
    found = {"hidden": (g @ weight).view(case.hidden.shape), "weight": g.T @ hidden}
    return found if case.bias is None else found | {"bias": g.sum(0)}


def assert_near(ours: Gradients, exact: Gradients, tolerance: float) -> None:
    assert ours.keys() == exact.keys()
    for name, x in exact.items():
        assert float((ours[name].double() - x).abs().max()) <= tolerance * float(x.abs().max()), name


@pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_the_columns_drawn(dtype: torch.dtype, transform: dict[str, Any], backend: str) -> None:
    case = build_linear(dtype, transform=transform, vocab=300)
    d_logps, d_entropy = upstream(case), upstream(case, 3)
    *_, found = run_logprobs(case, d_logps, d_entropy, backend, **DRAWN)
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert_near(found, by_hand(case, d_logps, d_entropy, Sparse(STEP, SEED), backend), tolerance)
    moved = {"options": Options(sparse=Sparse(STEP, SEED, first_row=7))}
    *_, found = run_logprobs(case, d_logps, d_entropy, backend, **moved)
    assert_near(found, by_hand(case, d_logps, d_entropy, Sparse(STEP, SEED, 7), backend), tolerance)


def test_mean_over_seeds_is_the_dense_gradient(backend: str) -> None:
    """Each error is within 5 standard errors, and all together are as large as chance predicts."""
    case = build_linear(vocab=61, bias=True, transform=CAPPED)
    d_logps, d_entropy = upstream(case), 0.3 * upstream(case, 3)
    *_, dense = run_logprobs(case, d_logps, d_entropy, backend)
    seeds = 150
    drawn = [run_logprobs(case, d_logps, d_entropy, backend, options=Options(sparse=Sparse(STEP, s)))[2] for s in range(seeds)]
    for name, exact in dense.items():
        every = torch.stack([g[name] for g in drawn]).double()
        error = every.mean(0) - exact.double()
        standard = (every.var(0) / seeds).sqrt() + 1e-6 * exact.abs().max()
        assert float((error / standard).abs().max()) < 5, name
        assert 0.7 < float(error.square().sum() / standard.square().sum()) < 1.4, name


def test_a_seed_may_be_a_tensor(backend: str) -> None:
    """It draws what its number draws at the time: a captured graph reads it at each replay."""
    case, seed = build_linear(), torch.zeros((), dtype=torch.int64)
    options = Options(sparse=Sparse(STEP, seed))
    for number in (3, 4, 2**62):
        seed.fill_(number)
        of_number = Options(sparse=Sparse(STEP, number))
        drawn, wanted = (run_logprobs(case, upstream(case), None, backend, options=o)[2] for o in (options, of_number))
        assert all(same_bits(drawn[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["grpo, k3 and entropy", "gspo, k3 by the ratio"])
def test_loss_is_log_probs_and_token_stage(name: str, backend: str) -> None:
    """Bit for bit, with the values of the dense loss."""
    make, _ = OBJECTIVES[name]
    case, objective = build_linear(), make()
    out, found = run_linear(case, objective, backend, **DRAWN)
    dense, _ = run_linear(case, objective, backend)
    torch.testing.assert_close(out.loss, dense.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(out.logps, dense.logps, rtol=1e-6, atol=1e-6)
    leaves, tokens = case.leaves, case.tokens
    logps, entropy = linear_logprobs(
        leaves["hidden"], leaves["weight"], tokens.targets, bias=leaves["bias"], mask=tokens.mask, entropy=True,
        transform=tokens.logit_transform(), backend=backend, **DRAWN,
    )  # fmt: skip
    objective_loss(logps, tokens.batch(), objective, entropy=entropy).loss.backward()
    assert all(same_bits(found[name], x) for name, x in gradients_of(leaves).items())


def test_chunks_threads_and_order_change_no_column(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_linear(vocab=300)
    whole, expected = run_linear(case, Objective.preset("grpo"), backend, **DRAWN)
    in_chunks(monkeypatch, 8)
    torch.set_num_threads(3)
    _, found = run_linear(case, Objective.preset("grpo"), backend, **DRAWN)
    torch.set_num_threads(1)
    again, _ = run_linear(case, Objective.preset("grpo"), backend, **DRAWN)
    assert_near(found, {k: x.double() for k, x in expected.items()}, 1e-5)  # a column more or less is far above that
    assert torch.equal(again.loss, whole.loss) or abs(again.loss - whole.loss) < 1e-6


def test_another_seed_draws_others_and_the_same_the_same(backend: str) -> None:
    case = build_linear(vocab=300)
    first, second, other = (
        run_logprobs(case, upstream(case), None, backend, options=Options(sparse=Sparse(STEP, seed)))[2] for seed in (1, 1, 2)
    )
    assert all(same_bits(first[name], second[name]) and not same_bits(first[name], other[name]) for name in first)


@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_grad(total_dtype: torch.dtype, backend: str) -> None:
    case = build_linear(torch.bfloat16)
    *_, expected = run_logprobs(case, upstream(case), None, backend, **DRAWN)
    total = torch.ones(case.weight.shape, dtype=total_dtype)
    leaves = case.leaves
    logps, _ = linear_logprobs(
        leaves["hidden"], leaves["weight"], case.tokens.targets,
        bias=leaves["bias"], mask=case.tokens.mask, backend=backend, weight_grad=total, **DRAWN,
    )  # fmt: skip
    logps.backward(upstream(case))
    assert leaves["weight"].grad is None and leaves["hidden"].grad is not None
    assert float(((total - 1).float() - expected["weight"].float()).abs().max()) <= 2**-6 * max(
        1.0, float(expected["weight"].abs().max())
    )
    assert not torch.equal(total, torch.ones_like(total))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_part_gets_no_gradient(frozen: str, backend: str) -> None:
    case = build_linear(bias=False)
    *_, expected = run_logprobs(case, upstream(case), None, backend, **DRAWN)
    leaves = case.leaves
    leaves[frozen].requires_grad_(False)
    logps, _ = linear_logprobs(
        leaves["hidden"], leaves["weight"], case.tokens.targets, mask=case.tokens.mask, backend=backend, **DRAWN
    )
    logps.backward(upstream(case))
    assert leaves[frozen].grad is None
    for name in {"hidden", "weight"} - {frozen}:
        assert same_bits(leaves[name].grad, expected[name])


def test_rows_with_sets_go_their_own_way(backend: str) -> None:
    """Their gradient is that of kept sets, the other rows' is drawn: by hand from both."""
    case = build_linear(kept=True)
    sets, d_logps = case.tokens.fields["kept"], upstream(case)
    has = (sets.counts > 0).view(d_logps.shape)
    assert has.any() and not has.all()
    *_, found = run_logprobs(case, d_logps, None, backend, kept=sets, **DRAWN)
    *_, of_sets = run_logprobs(case, torch.where(has, d_logps, 0.0), None, backend, kept=sets)
    *_, of_others = run_logprobs(case, torch.where(has, 0.0, d_logps), None, backend, **DRAWN)
    assert_near(found, {name: (of_sets[name] + x).double() for name, x in of_others.items()}, 1e-6)
    both = {"options": Options(sparse=Sparse(STEP, SEED), entropy_over="vocabulary")}
    objective = OBJECTIVES["grpo, k3 and entropy"][0]()
    out, _ = run_linear(case, objective, backend, **both)
    dense, _ = run_linear(case, objective, backend, options=Options(entropy_over="vocabulary"))
    torch.testing.assert_close(out.entropy, dense.entropy)


def test_masked_rows_may_hold_anything(backend: str) -> None:
    case = build_linear()
    _, expected = run_linear(case, Objective.preset("grpo"), backend, **DRAWN)
    hidden = case.hidden.clone()
    assert case.tokens.mask is not None
    hidden[~case.tokens.mask] = torch.nan
    _, found = run_linear(LinearCase(hidden, case.weight, case.bias, case.tokens), Objective.preset("grpo"), backend, **DRAWN)
    assert all(same_bits(found[name], x) for name, x in expected.items())


def test_nan_shows(backend: str) -> None:
    case = build_linear()
    hidden = case.hidden.clone()
    hidden[0, 0] = torch.nan
    broken = LinearCase(hidden, case.weight, case.bias, case.tokens)
    *_, found = run_logprobs(broken, upstream(case), None, backend, mask=None, **DRAWN)
    assert found["hidden"][0, 0].isnan().all() and found["weight"].isnan().any()
    assert found["hidden"].flatten(0, 1)[1:].isfinite().all()
    without = upstream(case)
    without[0, 0] = 0.0  # as in the row kernels: nothing arrives there
    *_, found = run_logprobs(broken, without, None, backend, mask=None, **DRAWN)
    assert all(x.isfinite().all() for x in found.values()) and not found["hidden"][0, 0].any()


def test_without_gradient_nothing_is_drawn(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_linear()
    leaves = case.leaves

    def refused(*_: Any) -> None:
        raise AssertionError("columns are drawn")

    monkeypatch.setattr(backends.load(backend), "select", refused)
    with torch.no_grad():
        run = linear_logprobs(leaves["hidden"], leaves["weight"], case.tokens.targets, backend=backend, **DRAWN)
        dense = linear_logprobs(leaves["hidden"], leaves["weight"], case.tokens.targets, backend=backend)
    assert same_bits(run[0], dense[0])
    out = linear_grpo_loss(case.hidden, case.weight, case.tokens.batch(), Objective.preset("grpo"), backend=backend, **DRAWN)
    assert not out.loss.requires_grad


def test_checkpointing_draws_the_same_columns(backend: str) -> None:
    case = build_linear()
    *_, expected = run_logprobs(case, upstream(case), None, backend, mask=None, **DRAWN)
    leaves = case.leaves

    def forward(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight, case.tokens.targets, bias=bias, backend=backend, **DRAWN)[0]

    checkpoint(forward, *leaves.values(), use_reentrant=False).backward(upstream(case))  # type: ignore[union-attr]
    assert all(same_bits(x, expected[name]) for name, x in gradients_of(leaves).items())


def test_other_ways_to_a_gradient(backend: str) -> None:
    """torch.func, a second backward through a graph that was kept, and no rows at all."""
    case = build_linear(bias=False)
    hidden, weight, targets = case.hidden.flatten(0, 1), case.weight, case.tokens.targets.flatten()

    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight, targets[: len(hidden)], backend=backend, **DRAWN)[0].sum()

    found = torch.func.grad(total, argnums=(0, 1))(hidden, weight)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    loss = total(*leaves)
    loss.backward(retain_graph=True)
    assert all(same_bits(x, leaf.grad) for x, leaf in zip(found, leaves, strict=True))
    loss.backward()
    assert all(same_bits(2 * x, leaf.grad) for x, leaf in zip(found, leaves, strict=True))
    nothing = hidden[:0].clone().requires_grad_()
    total(nothing, weight).backward()
    assert nothing.grad is not None and nothing.grad.shape == nothing.shape


def test_the_head_as_a_module() -> None:
    case = build_linear(bias=False)
    linear = torch.nn.Linear(24, 61, bias=False)
    linear.weight.data.copy_(case.weight)
    head, hidden = FusedLMHead(linear), case.hidden.clone().requires_grad_()
    head(hidden, case.tokens.targets, mask=case.tokens.mask, **DRAWN).logps.backward(upstream(case))
    *_, expected = run_logprobs(case, upstream(case), None, "auto", **DRAWN)
    assert same_bits(hidden.grad, expected["hidden"]) and same_bits(head.weight.grad, expected["weight"])


def refused(case: LinearCase) -> dict[str, Callable[[], Any]]:
    batch = dataclasses.replace(case.tokens.batch(), ref_logps=None)
    logits = torch.zeros(*case.tokens.targets.shape, 61)
    objective, exact = Objective.preset("grpo"), Objective.preset("grpo", beta=0.1, kl=Exact())
    sets = build_linear(kept=True).tokens.fields["kept"]
    hidden, weight, targets = case.hidden, case.weight, case.tokens.targets
    return {
        "no product to save": lambda: grpo_loss(logits, batch, objective, **DRAWN),
        "no product to": lambda: token_logprobs(logits, targets, **DRAWN),
        "no product": lambda: token_divergence(logits, logits, **DRAWN),
        "do not bound": lambda: linear_grpo_loss(hidden, weight, batch, exact, reference=(hidden, weight), **DRAWN),
        "do not": lambda: linear_divergence(hidden, weight, (hidden, weight), **DRAWN),
        "ids of at=": lambda: linear_logprobs(hidden, weight, targets, at=sets, **DRAWN),
        "pass a Sparse": lambda: Options(sparse=0.01),  # type: ignore[arg-type]
        "step=0.0": lambda: Sparse(0.0),
        "step=2": lambda: Sparse(2),
        "step=nan": lambda: Sparse(float("nan")),
        "seed=-1": lambda: Sparse(seed=-1),
        "as a tensor it is int64": lambda: Sparse(seed=torch.zeros(())),
        "is on cpu, the rows are on meta": lambda: Sparse(seed=torch.zeros((), dtype=torch.int64)).check(torch.device("meta")),
        "seed=1.5": lambda: Sparse(seed=1.5),  # type: ignore[arg-type]
        f"seed={2**63}": lambda: Sparse(seed=2**63),
        "first_row=-1": lambda: Sparse(first_row=-1),
    }


def test_what_is_refused() -> None:
    for reason, call in refused(build_linear()).items():
        with pytest.raises(ValueError, match=reason):
            call()
