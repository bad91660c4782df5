"""How many rows take part in each product with the head, by level of the objective, kind of head, and KL."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from grpo_kernels import (
    EntropyQuantile,
    Head,
    Objective,
    OffPolicySequences,
    Options,
    TokenBatch,
    TokenSets,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
)
from grpo_kernels.formulas.filters import Filter
from support.inside import count_products, in_chunks

Tensor = torch.Tensor
B, T, H, V = 6, 5, 16, 40
MASK = torch.arange(T) < torch.tensor([5, 3, 0, 4, 5, 1])[:, None]
ADVANTAGES = torch.tensor([1.3, 0.0, 2.0, -0.7, 0.0, 0.6])
N, ACTIVE = int(MASK.sum()), int(MASK[ADVANTAGES != 0].sum())

#: The longest of a row's groups is the sequence, but where something is chosen from the whole batch.
LEVELS = {
    "token": Objective.preset("dapo"),
    "sequence": Objective.preset("gspo"),
    "sequence and token": Objective.preset("gspo", level="sequence-token"),
    "geometric mean": Objective.preset("gmpo"),
    "sum": Objective.preset("vespo"),
    "mask of a sequence": Objective.preset("dapo", filters=(OffPolicySequences(),)),
    "choice of a batch": Objective.preset("dapo", filters=(EntropyQuantile(1.0),)),
}


def leaves(frozen):
    g = torch.Generator().manual_seed(5)
    return torch.randn(B, T, H, generator=g).requires_grad_(), torch.randn(V, H, generator=g).requires_grad_(not frozen)


def batch():
    g = torch.Generator().manual_seed(6)
    ref_logps = -4 + 0.1 * torch.randn(
        B, T, generator=g
    )  # on-policy: no ratio is clipped, which would leave a row without a slope
    return TokenBatch(torch.randint(V, (B, T), generator=g), ADVANTAGES, mask=MASK, ref_logps=ref_logps)


@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["", "kl"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("chunks", [True, False], ids=["chunks", "one block"])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_in_the_products_of_a_loss(level, chunks, frozen, beta, backend, monkeypatch):
    if chunks:
        in_chunks(monkeypatch, 4)
    with_gradient = N if beta else ACTIVE
    # A slope waits for its group. Until it is known the gradients of a block are kept, and of a longer group are made again.
    longer = with_gradient if level == "choice of a batch" else 10 if beta else 5
    again = longer if level != "token" and not frozen and chunks else 0
    hidden, weight = leaves(frozen)
    rows = count_products(monkeypatch)
    objective = replace(LEVELS[level], beta=beta)
    linear_grpo_loss(hidden, weight, batch(), objective, options=Options(backend)).loss.backward()
    expected = {"logits": N + again, "d_hidden": with_gradient, "d_weight": 0 if frozen else with_gradient}
    assert rows == Counter(expected)


SETS = TokenSets.from_lists([[1, 2]] + [[]] * (B * T - 1))


@pytest.mark.parametrize("chunks", [True, False], ids=["chunks", "one block"])
def test_rows_beside_one_with_a_set(chunks, backend, monkeypatch):
    """Which is in no product. Without it its sequence fits into a block."""
    if chunks:
        in_chunks(monkeypatch, 4)
    (hidden, weight), rows = leaves(False), count_products(monkeypatch)
    b = replace(batch(), kept=SETS, missing="include")
    linear_grpo_loss(hidden, weight, b, Objective.preset("gspo"), options=Options(backend)).loss.backward()
    assert rows == Counter({"logits": N - 1, "d_hidden": ACTIVE - 1, "d_weight": ACTIVE - 1})


ONE, TEACHER = TokenSets.from_lists([[3, 4]] * (B * T)), torch.full((2 * B * T,), -1.0)
#: Calls of log-probs with a frozen head -> rows in the products of logits and hidden states, in units of N. What has a gradient
#: beside them, or is not what the loss reads, is not made ahead.
FROZEN = {
    "log-probs": ({}, (1, 1)),
    "entropy without a gradient": ({"entropy": "detached", "also": ("top_prob",)}, (1, 1)),
    "entropy": ({"entropy": True}, (2, 1)),
    "sum of squares": ({"also": ("sum_squares",)}, (2, 1)),
    "entropy over the vocabulary": (
        {"entropy": "detached", "kept": SETS, "options": Options(entropy_over="vocabulary", missing="include")}, (1, 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FROZEN)
def test_rows_in_the_products_of_log_probs_of_a_frozen_head(name, backend, monkeypatch):
    in_chunks(monkeypatch, 4)
    given, (projected, with_gradient) = FROZEN[name]
    options = replace(given.get("options", Options()), backend=backend)
    (hidden, weight), b = leaves(True), batch()
    rows = count_products(monkeypatch)
    only_set = name == "entropy over the vocabulary"
    found = linear_logprobs(hidden, weight, b.targets, mask=MASK, **{**given, "options": options})
    (found.logps[0, 0] if only_set else found.logps.sum()).backward()
    expected = Counter({"logits": projected * N, "d_hidden": with_gradient * N})
    assert rows == +expected


@pytest.mark.parametrize("teachers", [1, 2])
def test_teachers_at_some_ids_make_nothing_ahead(teachers, backend, monkeypatch):
    (hidden, weight), rows = leaves(True), count_products(monkeypatch)
    given = [(ONE.with_values(TEACHER), 1.0)] * teachers
    linear_divergence(hidden, weight, given, mask=MASK, options=Options(backend)).sum().backward()
    assert rows == Counter({"logits": (1 + 2 * teachers) * N, "d_hidden": teachers * N})


def test_a_row_without_a_slope_may_hold_anything(backend):
    (hidden, weight), b = leaves(True), batch()
    with torch.no_grad():
        hidden[1, 4] = torch.inf
    logps, _ = linear_logprobs(hidden, weight, b.targets, options=Options(backend))
    torch.where(MASK, logps, 0.0).sum().backward()
    assert not MASK[1, 4] and hidden.grad is not None and (hidden.grad[1, 4] == 0).all() and hidden.grad[1, 0].any()


class AllButTheFirst(Filter):
    """A filter of a user, which may look at the whole batch."""

    def keep(self, logps, *_):
        return torch.arange(len(logps)) > 0


def test_a_row_that_is_not_chosen_may_hold_anything(backend):
    """Of a trained head too, whose products are made before it is known which rows have a slope."""
    found = []
    for held in (0.0, torch.inf):
        (hidden, weight), b = leaves(False), batch()
        with torch.no_grad():
            hidden[0, 0] = held
        objective = Objective.preset("reinforce", filters=(AllButTheFirst(),))
        linear_grpo_loss(hidden, weight, b, objective, options=Options(backend)).loss.backward()
        found.append((hidden.grad, weight.grad))
    for x, y in zip(*found, strict=True):
        assert x is not None and x.any() and torch.equal(x, y)
    with torch.no_grad():
        hidden[0, 1], hidden.grad = torch.inf, None  # one that is chosen
    linear_grpo_loss(hidden, weight, b, objective, options=Options(backend)).loss.backward()
    assert hidden.grad is not None and hidden.grad[0, 1].isnan().all() and not hidden.grad[1:].isnan().any()


def test_without_products_the_weight_may_be_gone(backend):
    """As ZeRO-3 and FSDP leave it after the forward of the module that owns it. An entropy needs it."""

    def gone(weight):
        weight.data = torch.empty(0)

    results = []
    for take_away in (lambda _: None, gone):
        (hidden, weight), (_, trained), b = leaves(True), leaves(False), batch()
        logps, _ = linear_logprobs(hidden, weight, b.targets, mask=MASK, options=Options(backend))
        gathered, loss = trained * 1.0, torch.zeros(())
        for head in (weight, gathered):
            loss = loss + linear_grpo_loss(hidden, head, b, Objective.preset("gspo"), options=Options(backend)).loss
            take_away(head)
        (logps.sum() + loss).backward()
        results.append((hidden.grad, trained.grad))
    for x, y in zip(*results, strict=True):
        assert x.any() and torch.equal(x, y)
    (hidden, weight), b = leaves(True), batch()
    _, entropy = linear_logprobs(hidden, weight, b.targets, entropy=True, options=Options(backend))
    assert entropy is not None
    gone(weight)
    with pytest.raises(RuntimeError, match="weight is gone before the backward"):
        entropy.sum().backward()


@pytest.mark.parametrize("mask", [MASK, None], ids=["some rows", "all rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slopes_of_a_kept_block_are_those_of_logits_that_are_made_again(dtype, mask, backend, monkeypatch):
    """All rows in one block, and sequences of which some fit in one, two of them in the same, and some do not."""
    found, options = [], Options(backend)
    for chunks in (False, True):
        if chunks:
            in_chunks(monkeypatch, 4)
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in leaves(False))
        before = hidden.detach().clone()
        with torch.no_grad():
            logps, _ = linear_logprobs(hidden, weight, batch().targets, mask=mask, options=options)
        advantages = ADVANTAGES if mask is not None else ADVANTAGES + 0.1  # none is 0
        old = logps - 1e-4 * torch.arange(B * T).view(B, T)
        of = replace(batch(), advantages=advantages, mask=mask, old_logps=old)
        out = linear_grpo_loss(hidden, weight, of, Objective.preset("gspo"), options=options)
        out.loss.backward()
        assert torch.equal(out.logps, logps) and torch.equal(hidden.detach(), before)
        found.append((hidden.grad, weight.grad))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2.0**-6}[dtype]
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and other.any()
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * float(other.abs().max()))


def test_a_reference_with_the_weight_of_the_policy_and_a_bias_of_its_own(backend):
    (hidden, weight), options = leaves(True), Options(backend)
    biases = torch.randn(2, V)
    heads = [Head(weight, bias) for bias in biases]
    found = linear_divergence(hidden, heads[0], (0.5 * hidden.detach(), heads[1]), mask=MASK, options=options)
    log_p, log_q = (
        (scale * hidden @ weight.t() + bias).log_softmax(-1) for scale, bias in zip((1.0, 0.5), biases, strict=True)
    )
    expected = torch.where(MASK, (log_p.exp() * (log_p - log_q)).sum(-1), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
