"""Gradients of a head from few columns of each row: which ones, how they weigh, and that nothing else moves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Head, Objective, Options, Sparse, TokenBatch, TokenSets, linear_grpo_loss, linear_logprobs
from grpo_kernels.losses import objective_loss
from grpo_kernels.model import FusedLMHead
from support.bits import same_bits
from support.doors import in_options
from support.inside import drawn_columns, in_chunks, nothing_is_drawn

Tensor = torch.Tensor
N, V, H, STEP, SEED = 24, 300, 16, 0.02, 5
NAMES = ("hidden", "weight", "bias")


class Case:
    """Leaves, targets, and what arrives at log-probs and entropies."""

    def __init__(self, dtype: torch.dtype = torch.float32, vocab: int = V) -> None:
        g = torch.Generator().manual_seed(34)
        shapes = ((N, H), (vocab, H), (vocab,))
        self.given = [(torch.randn(shape, generator=g) * (1.0, 0.5, 1.0)[i]).to(dtype) for i, shape in enumerate(shapes)]
        self.targets, self.mask = torch.randint(vocab, (N,), generator=g), torch.rand(N, generator=g) < 0.8
        self.d_logps, self.d_entropy = torch.randn(2, N, generator=g)

    def log_probs(self, leaves: list[Tensor], step: float = STEP, seed: Any = SEED, first_row: int = 0, **options: Any) -> Any:
        options = {"mask": self.mask, "entropy": True, "sparse": Sparse(step, seed, first_row), **options}
        return linear_logprobs(leaves[0], Head(leaves[1], leaves[2]), self.targets, **in_options(**options))

    def gradients(self, **options: Any) -> dict[str, Tensor]:
        leaves = [x.clone().requires_grad_() for x in self.given]
        logps, entropy = self.log_probs(leaves, **options)
        outputs = [(logps, self.d_logps), (entropy, self.d_entropy)][: 1 if entropy is None else 2]
        torch.autograd.backward(*zip(*outputs, strict=True))
        return {name: x.grad for name, x in zip(NAMES, leaves, strict=True) if x.grad is not None}

    def batch(self) -> TokenBatch:
        return TokenBatch(self.targets, self.d_logps, mask=self.mask, ref_logps=self.d_entropy - 4)


def assert_near(ours: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == exact.keys()
    for name, x in exact.items():
        assert (ours[name].double() - x).abs().max() <= tolerance * x.abs().max(), name


def assert_same(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert ours.keys() == others.keys() and all(same_bits(x, others[name]) for name, x in ours.items())


@pytest.mark.parametrize("first_row", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_column_that_is_drawn_counts_with_the_larger_of_its_probability_and_the_step(
    dtype: torch.dtype, first_row: int, backend: str
) -> None:
    """In float64, from the columns that the backend draws; the target's with its own probability."""
    head = Case(dtype)
    hidden, weight, bias = (x.double() for x in head.given)
    logp = (hidden @ weight.T + bias).log_softmax(-1)
    taken = drawn_columns((hidden @ weight.T + bias).float(), head.targets, backend, STEP, SEED, first_row)
    assert 0.02 < taken[head.mask].double().mean() < 0.6
    own = torch.nn.functional.one_hot(head.targets, V).bool()
    w = torch.where(own, logp.exp(), logp.exp().clamp(min=STEP)) * taken
    H_of = -(logp.exp() * logp).sum(-1, keepdim=True)
    g = head.d_logps.double()[:, None] * (own.double() - w) - head.d_entropy.double()[:, None] * w * (logp + H_of)
    g = torch.where(head.mask[:, None], g, 0.0)
    exact = {"hidden": g @ weight, "weight": g.T @ hidden, "bias": g.sum(0)}
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert_near(head.gradients(backend=backend, first_row=first_row), exact, tolerance)


def test_the_mean_over_seeds_is_the_dense_gradient(backend: str) -> None:
    """Each error is within 5 standard errors, and all together are as large as chance predicts."""
    head, seeds = Case(vocab=61), 150
    dense = head.gradients(backend=backend, sparse=None)
    drawn = [head.gradients(backend=backend, step=0.1, seed=seed) for seed in range(seeds)]
    for name, exact in dense.items():
        every = torch.stack([g[name] for g in drawn]).double()
        error, standard = every.mean(0) - exact.double(), (every.var(0) / seeds).sqrt() + 1e-6 * exact.abs().max()
        assert (error / standard).abs().max() < 5, name
        assert 0.7 < error.square().sum() / standard.square().sum() < 1.4, name


def test_a_seed_draws_the_same_columns_whatever_else_changes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again, from a tensor that is read at the time, under checkpointing, by torch.func; another seed draws others."""
    head, seed = Case(), torch.tensor(SEED)
    found = head.gradients(backend=backend)
    assert_same(head.gradients(backend=backend), found)
    assert_same(head.gradients(backend=backend, seed=seed), found)
    seed.fill_(SEED + 1)
    other = head.gradients(backend=backend, seed=seed)
    assert_same(other, head.gradients(backend=backend, seed=SEED + 1))
    assert not any(same_bits(found[name], other[name]) for name in found)

    def total(*leaves: Tensor) -> Tensor:
        logps, entropy = head.log_probs(list(leaves), backend=backend)
        return (logps * head.d_logps).sum() + (entropy * head.d_entropy).sum()

    by_func = torch.func.grad(total, argnums=(0, 1, 2))(*head.given)
    assert_same(dict(zip(NAMES, by_func, strict=True)), found)
    leaves = [x.clone().requires_grad_() for x in head.given]
    again = checkpoint(total, *leaves, use_reentrant=False)
    assert isinstance(again, Tensor)
    again.backward()
    assert_same({name: x.grad for name, x in zip(NAMES, leaves, strict=True) if x.grad is not None}, found)
    in_chunks(monkeypatch, 5)
    torch.set_num_threads(3)
    assert_near(head.gradients(backend=backend), {name: x.double() for name, x in found.items()}, 1e-5)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "reinforce"])
def test_a_loss_has_the_values_of_the_dense_one_and_the_gradient_of_its_log_probs(preset: str, backend: str) -> None:
    """Of reinforce rows without an advantage have no gradient, and come behind the others."""
    terms = {} if preset == "reinforce" else {"beta": 0.1, "entropy_coef": 0.02}
    head, objective = Case(), Objective.preset(preset, aggregate="token-mean", **terms)
    advantages, offsets = head.d_logps.clamp(min=0), torch.tensor([0, 9, N])
    batch = TokenBatch(head.targets, advantages, mask=head.mask, ref_logps=head.d_entropy - 4, cu_seqlens=offsets)
    found = []
    for options in (Options(backend=backend, sparse=Sparse(STEP, SEED)), Options(backend=backend)):
        leaves = [x.clone().requires_grad_() for x in head.given]
        out = linear_grpo_loss(leaves[0], Head(leaves[1], leaves[2]), batch, objective, options=options)
        out.loss.backward()
        found.append((out, {name: x.grad for name, x in zip(NAMES, leaves, strict=True) if x.grad is not None}))
    (sparse, drawn), (dense, _) = found
    torch.testing.assert_close(sparse.loss, dense.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sparse.logps, dense.logps, rtol=1e-6, atol=1e-6)
    leaves = [x.clone().requires_grad_() for x in head.given]
    logps, entropy = head.log_probs(leaves, backend=backend)
    objective_loss(logps, batch, objective, entropy=entropy).loss.backward()
    assert_same({name: x.grad for name, x in zip(NAMES, leaves, strict=True) if x.grad is not None}, drawn)


@pytest.mark.parametrize("strides", ["transposed", "rows apart"])
def test_strides_masked_rows_and_nan(strides: str, backend: str) -> None:
    """Heads of any strides draw the same; masked rows may be NaN; a NaN that is read shows in its row alone."""
    head = Case()
    found = head.gradients(backend=backend)
    hidden, weight = head.given[:2]
    hidden[~head.mask] = torch.nan
    moved = {"transposed": lambda x: x.T.contiguous().T, "rows apart": lambda x: torch.cat([x, x * torch.nan], 1)[:, :H]}[
        strides
    ]
    head.given[0], head.given[1] = moved(hidden), moved(weight)
    assert_same(head.gradients(backend=backend), found)
    first = int(head.mask.nonzero()[0])
    head.given[0] = hidden.clone()
    head.given[0][first] = torch.nan
    broken = head.gradients(backend=backend)
    assert broken["hidden"][first].isnan().all() and broken["weight"].isnan().any()
    assert broken["hidden"][torch.arange(N) != first].isfinite().all()
    head.d_logps[first] = 0.0  # nothing arrives there
    assert all(x.isfinite().all() for x in head.gradients(backend=backend, entropy=False).values())


def test_rows_with_sets_go_their_own_way(backend: str) -> None:
    head = Case()
    sets = TokenSets.from_lists([[int(t), (int(t) + 3) % V] if i % 2 else [] for i, t in enumerate(head.targets.tolist())])
    has = sets.counts > 0
    found, parts = head.gradients(backend=backend, kept=sets), []
    d_logps, d_entropy = head.d_logps, head.d_entropy
    for rows, options in ((has, {"options": Options(), "kept": sets}), (~has, {})):
        head.d_logps, head.d_entropy = torch.where(rows, d_logps, 0.0), torch.where(rows, d_entropy, 0.0)
        parts.append(head.gradients(backend=backend, **options))
    assert_near(found, {name: (parts[0][name] + parts[1][name]).double() for name in found}, 1e-6)


@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_the_callers_is_added_to(total_dtype: torch.dtype, backend: str) -> None:
    head, total = Case(torch.bfloat16), torch.ones(V, H, dtype=total_dtype)
    expected = head.gradients(backend=backend)["weight"].float()
    rest = head.gradients(backend=backend, weight_grad=total)
    assert set(rest) == {"hidden", "bias"}
    assert ((total - 1).float() - expected).abs().max() <= 2**-6 * max(1.0, float(expected.abs().max())) and (total != 1).any()


def test_a_frozen_part_and_no_gradient_at_all(backend: str) -> None:
    head = Case()
    found = head.gradients(backend=backend)
    for frozen in range(2):
        leaves = [x.clone().requires_grad_(i != frozen) for i, x in enumerate(head.given)]
        logps, entropy = head.log_probs(leaves, backend=backend)
        torch.autograd.backward([logps, entropy], [head.d_logps, head.d_entropy])
        assert leaves[frozen].grad is None and same_bits(leaves[1 - frozen].grad, found[NAMES[1 - frozen]])  # type: ignore[arg-type]
    with nothing_is_drawn(backend), torch.no_grad():
        drawn, dense = head.log_probs(head.given, backend=backend), head.log_probs(head.given, options=Options(backend=backend))
    assert all(map(same_bits, drawn, dense))


def test_the_head_as_a_module() -> None:
    given, linear = Case(), torch.nn.Linear(H, V)
    linear.weight.data, linear.bias.data = given.given[1].clone(), given.given[2].clone()
    head, hidden = FusedLMHead(linear), given.given[0].clone().requires_grad_()
    out = head(hidden, given.targets, mask=given.mask, options=Options(sparse=Sparse(STEP, SEED)))
    out.logps.backward(given.d_logps)
    given.d_entropy = torch.zeros(N)
    expected = given.gradients()
    assert same_bits(hidden.grad, expected["hidden"]) and same_bits(head.weight.grad, expected["weight"])  # type: ignore[arg-type]
