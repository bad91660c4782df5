"""Inputs as in real batches: vocabularies, sizes, layouts, constrained samplers, mistakes. See tests/README.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, Objective, TokenBatch, grpo_loss, linear_grpo_loss, linear_logprobs, token_logprobs
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.rows import RowTransform
from support.allocations import Allocations
from support.cases import assert_no_worse, build, run, same_bits
from support.linear_cases import build_linear
from support.logprob_cases import ours, random_rows, reference
from support.rows import WITH_ENTROPY, slopes_of

Tensor = torch.Tensor
#: Odd, even, and padded to a tile: sizes of models in use, and small ones.
VOCABULARIES = [7, 1000, 32001, 129920, 151665, 151936, 248320]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_vocabularies_of_real_models(vocab: int, backend: str) -> None:
    """Flat, peaked at the last column, random: no lane beside the vocabulary takes part, no log-prob is above 0."""
    logits, targets, d_logps, d_entropy = random_rows(4, vocab)
    logits[0] = 0.0
    logits[1:3] = -2.0
    logits[1:3, -1] = 3.0 + math.log(vocab)  # p = 0.993
    targets[:3] = torch.tensor([vocab - 1, vocab - 1, 0])
    exact = reference(logits, targets, d_logps, d_entropy, torch.float64)
    naive = reference(logits, targets, d_logps, d_entropy, torch.float32)
    found = ours(logits, targets, d_logps, d_entropy, backend)
    assert found[1] is not None and (found[0] <= 0).all() and (found[1] >= 0).all()
    assert float(found[0][0]) == pytest.approx(-math.log(vocab), rel=3e-7)
    assert float(found[1][0]) == pytest.approx(math.log(vocab), rel=3e-7)
    for mine, theirs, right, what in zip(found, naive, exact, ("logps", "entropy", "gradient"), strict=True):
        assert mine is not None
        assert_no_worse(mine, theirs, right, what, tiny=2e-6)
    leaf = logits.clone().requires_grad_()
    batch = TokenBatch(targets, d_logps, old_logps=exact[0].float() - 0.1)
    out = grpo_loss(leaf, batch, Objective.preset("reinforce"), normalizer=1.0, backend=backend)
    out.loss.backward()
    alone = reference(logits, targets, -d_logps, None, torch.float64)[2]
    assert leaf.grad is not None and (out.logps <= 0).all()
    assert_no_worse(leaf.grad, reference(logits, targets, -d_logps, None, torch.float32)[2], alone, "gradient", tiny=2e-6)


def test_rows_behind_element_2_to_the_31(backend: str) -> None:
    """Two rows at the end of 2^31 and more logits; the pages before them are never touched, so they cost nothing."""
    n, vocab = 14_200, 151_936
    assert (n - 2) * vocab > 2**31
    try:
        logits = torch.empty(1, n, vocab, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this system does not lend 4.3 GB of address space")
    rows, targets = (n - 2, n), torch.tensor([5, vocab - 1])
    last = (3.0 * torch.randn(2, vocab)).bfloat16()
    logits[0, n - 2 :] = last
    d_logps, d_entropy = torch.tensor([1.5, -0.5]), torch.tensor([0.3, 0.7])
    exact = reference(last, targets, d_logps, d_entropy, torch.float64)
    module, plain = backends.load(backend), RowTransform(1.0, 0.0, 1.0)
    stats = module.stats(logits, targets, None, plain, WITH_ENTROPY, rows=rows)
    torch.testing.assert_close(stats.logps.double(), exact[0], rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(stats.entropy.double(), exact[1], rtol=1e-6, atol=4e-6)
    module.pull(logits, targets, stats, slopes_of(stats, d_logps, d_entropy), plain, logits, rows=rows)
    torch.testing.assert_close(logits[0, n - 2 :].double(), exact[2], rtol=2**-8, atol=1e-9)


# ---- samplers that leave tokens out


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_log_probs_over_the_kept_set_of_a_sampler(top_p: float, backend: str) -> None:
    """-inf at what top-p has left out: log-probs, entropy and gradient are those of the set that was kept, and a sampler that
    renormalises over it is on-policy (ratio 1). Without it the ratio is off by the mass that was left out."""
    g = torch.Generator().manual_seed(1)
    logits, advantages = 2.0 * torch.randn(3, 6, 53, generator=g), torch.tensor([1.0, -0.5, 2.0])
    p, order = torch.softmax(logits.double(), -1).sort(-1, descending=True)
    kept = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, order, p.cumsum(-1) - p < top_p)
    sampler = torch.where(kept, torch.softmax(logits.double(), -1), 0.0)
    sampler = sampler / sampler.sum(-1, keepdim=True)
    targets = torch.multinomial(sampler.flatten(0, 1), 1, generator=g).view(3, 6)
    sampled = sampler.gather(-1, targets[..., None])[..., 0].log()
    leaf = logits.double().requires_grad_()
    log_p = leaf.masked_fill(~kept, -math.inf).log_softmax(-1)
    chosen = log_p.gather(-1, targets[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
    (-(advantages[:, None] * chosen) - 0.1 * entropy).sum().backward()

    mine = logits.clone().requires_grad_()
    batch = TokenBatch(targets, advantages, old_logps=sampled.float())
    objective = Objective.preset("dapo", entropy_coef=0.1)
    out = grpo_loss(mine.masked_fill(~kept, -math.inf), batch, objective, normalizer=1.0, backend=backend)
    out.loss.backward()
    torch.testing.assert_close(out.logps.double(), chosen.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(out.entropy.double(), entropy.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(mine.grad.double(), leaf.grad, rtol=1e-5, atol=2e-6)
    assert abs(out.metrics["ratio_min"] - 1) < 1e-5 > abs(out.metrics["ratio_max"] - 1)
    blind = grpo_loss(logits, batch, objective, normalizer=1.0, backend=backend)
    assert blind.metrics["ratio_max"] < 0.99


# ---- layouts and mistakes


@pytest.mark.parametrize("layer", [1, 2])
def test_replicated_dtensors_in_every_combination(layer: int, mesh: Any, backend: str) -> None:
    """Plain, one of them or all: the same values, and gradients of the kind of their tensor."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    case = build_linear(bias=False)
    batch = case.tokens.batch()

    def gradients(distributed: tuple[str, ...]) -> dict[str, Tensor]:
        leaves = {"hidden": case.hidden.clone(), "weight": case.weight.clone()}
        for name in distributed:
            leaves[name] = distribute_tensor(leaves[name], mesh, [Replicate()])
        leaves = {k: v.requires_grad_() for k, v in leaves.items()}
        if layer == 2:
            loss = linear_grpo_loss(leaves["hidden"], leaves["weight"], batch, Objective.preset("dapo"), backend=backend).loss
        else:
            logps, _ = linear_logprobs(leaves["hidden"], leaves["weight"], batch.targets, mask=batch.mask, backend=backend)
            loss = logps.square().sum()
        loss.backward()
        assert all(isinstance(leaves[name].grad, DTensor) == (name in distributed) for name in leaves)
        return {k: v.grad.full_tensor() if k in distributed else v.grad for k, v in leaves.items()}  # type: ignore[union-attr]

    expected = gradients(())
    for distributed in (("hidden",), ("weight",), ("hidden", "weight")):
        found = gradients(distributed)
        assert all(same_bits(found[k], expected[k]) and expected[k].any() for k in expected), distributed


@pytest.mark.parametrize("call", [
    lambda hidden, weight, ids: linear_logprobs(weight, hidden, ids),
    lambda hidden, weight, ids: linear_grpo_loss(weight, hidden, TokenBatch(ids, torch.ones(len(ids))), Objective()),
], ids=["linear_logprobs", "linear_grpo_loss"])  # fmt: skip
def test_hidden_states_and_weight_the_wrong_way_round(call: Callable[..., Any]) -> None:
    """Of equal width, so that the product would go through: the rows give it away."""
    hidden, weight, ids = torch.randn(12, 8), torch.randn(31, 8), torch.arange(12)
    with pytest.raises(ValueError, match=r"hidden has shape \[31, 8\], but targets has \[12\]"):
        call(hidden, weight, ids)


@pytest.mark.parametrize("call", [
    lambda hidden, ids: token_logprobs(hidden, ids),
    lambda hidden, ids: grpo_loss(hidden, TokenBatch(ids, torch.ones(len(ids))), Objective()),
], ids=["token_logprobs", "grpo_loss"])  # fmt: skip
def test_hidden_states_where_logits_belong(call: Callable[..., Any]) -> None:
    """The ids of a real vocabulary are beyond their width."""
    with pytest.raises(ValueError, match=r"targets\[1\]=100 is outside the vocabulary \[0, 64\)"):
        call(torch.randn(12, 64), torch.arange(12) * 100)


# ---- memory and autograd from logits


@pytest.mark.parametrize("entropy", [False, "detached", True], ids=str)
def test_a_temperature_on_a_view_makes_no_copy(entropy: bool | str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only new tensors of many logits are the gradient of the view and, by autograd, that of what it is a view of; with
    entropy no more than without."""
    monkeypatch.setattr(backends.load("eager"), "block_bytes", lambda device: 1)  # a row at a time
    whole, targets = torch.randn(4, 9, 601), torch.randint(601, (4, 8))
    leaf, transform = whole.requires_grad_(), LogitTransform(temperature=torch.rand(4) + 0.5, softcap=20.0)

    def large(call: Callable[[], Any]) -> tuple[Any, list[tuple[int, ...]]]:
        with Allocations() as made:
            result = call()
        return result, [shape for shape in made.shapes if math.prod(shape) > 8 * 601]

    (logps, _), forward = large(
        lambda: token_logprobs(leaf[:, :-1], targets, transform=transform, entropy=entropy, backend=backend)
    )
    _, backward = large(lambda: logps.sum().backward())
    assert forward == [] and sorted(backward) == [(4, 8, 601), (4, 9, 601)]
    batch, objective = TokenBatch(targets, torch.randn(4)), Objective.preset("dapo", entropy_coef=0.1)
    _, forward = large(lambda: grpo_loss(leaf[:, :-1], batch, objective, transform=transform, backend=backend))
    assert forward == [(4, 8, 601)]
    source = (leaf * 1.0)[:, :-1]
    _, forward = large(lambda: grpo_loss(source, batch, objective, transform=transform, inplace=True, backend=backend))
    assert forward == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_a_loss_under_activation_checkpointing(name: str, reentrant: bool, backend: str) -> None:
    """The forward runs twice, the second time in the backward: its gradient is handed over once."""
    from torch.utils.checkpoint import checkpoint

    case, objective = build(), Objective.preset(name)
    _, expected = run(case, objective, backend)
    leaf = case.logits.clone().requires_grad_()
    loss = checkpoint(lambda x: grpo_loss(x, case.batch(), objective, backend=backend).loss, leaf, use_reentrant=reentrant)
    loss.backward()
    assert leaf.grad is not None and same_bits(leaf.grad, expected) and expected.any()


@pytest.mark.parametrize("layer", [1, 2])
def test_a_compiled_loss_under_activation_checkpointing(layer: int, backend: str) -> None:
    """One graph, in which the block that ends in the loss is computed again in the backward."""
    from torch.utils.checkpoint import checkpoint

    case, objective, d = build_linear(), Objective.preset("dapo"), torch.randn(8, 7)
    batch, mix = case.tokens.batch(), torch.randn(24, 24) / 5

    def block(hidden: Tensor, weight: Tensor, mix: Tensor) -> Tensor:
        hidden = torch.tanh(hidden @ mix)
        if layer == 2:
            return linear_grpo_loss(hidden, weight, batch, objective, backend=backend).loss
        return (linear_logprobs(hidden, weight, batch.targets, backend=backend)[0] * d).sum()

    found = []
    torch._dynamo.reset()
    again = torch.compile(lambda *x: checkpoint(block, *x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    for call in (block, again):
        leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight, mix)]
        call(*leaves).backward()
        found.append([x.grad for x in leaves])
    for plain, compiled in zip(*found, strict=True):
        assert plain is not None and compiled is not None and plain.any()
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-7)
