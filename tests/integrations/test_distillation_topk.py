"""TRL's other distillation losses, and VeOmni's, compared with ours: values and gradients, and the exact differences.

The losses of TRL run as they are installed; VeOmni's is transcribed."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import Exact, LogitTransform, TokenSets, token_divergence
from grpo_kernels.integrations._shared import divergence_of

Tensor = torch.Tensor

B, T, V, K = 2, 5, 37, 6
BETAS = (0.0, 0.3, 1.0)
MASK = torch.arange(T) < torch.tensor([[T], [T - 2]])
LABELS = torch.where(MASK, 3, -100)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    """Logits of student and teacher."""
    g = torch.Generator().manual_seed(0)
    return 2.0 * torch.randn(B, T, V, generator=g), 2.0 * torch.randn(B, T, V, generator=g)


def trl(name: str, trainer: str) -> Any:
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"trl.experimental.{name}.{name}_trainer"), trainer)


def value_and_gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def assert_same(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], logits: Tensor) -> None:
    for a, b in zip(value_and_gradient(ours, logits), value_and_gradient(theirs, logits), strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def known_at(ids: Tensor, teacher: Tensor, valid: Tensor | None = None) -> TokenSets:
    """The teacher's log-probs at these ids of each token, without invalid ids."""
    values = torch.log_softmax(teacher, -1).gather(-1, ids)
    return TokenSets.from_padded(
        (ids if valid is None else ids.masked_fill(~valid, -1)).flatten(0, 1), values=values.flatten(0, 1)
    )


def with_tail(beta: float, tail: str) -> Exact:
    found = divergence_of(beta)
    return Exact(found.direction, found.mixture, tail)


def test_gkds_loss_is_at_temperature_1(rows: tuple[Tensor, Tensor]) -> None:
    """For any temperature of the sampler."""
    trainer, (student, teacher) = trl("gkd", "GKDTrainer"), rows
    labels = torch.cat([torch.full((B, 1), -100), LABELS], 1)[:, :T]

    class Teacher(torch.nn.Module):
        def forward(self, **_: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=teacher)

    this = SimpleNamespace(
        beta=1.0, temperature=0.5, teacher_model=Teacher(), generalized_jsd_loss=trainer.generalized_jsd_loss
    )
    inputs = {"input_ids": None, "attention_mask": None, "labels": labels}
    found = trainer.compute_loss(this, lambda **_: SimpleNamespace(logits=student), inputs)
    mask = labels[:, 1:] != -100
    cold, plain = (
        token_divergence(student[:, :-1], teacher[:, :-1], mask=mask, transform=LogitTransform(t)).sum() / mask.sum()
        for t in (0.5, 1.0)
    )
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-6)
    assert abs(cold - found) > 0.1


WHOLE = [("gkd", "GKDTrainer"), ("gold", "GOLDTrainer"), ("iw_opd", "IWOPDTrainer")]


@pytest.mark.parametrize("name, trainer", WHOLE)
def test_whole_rows(name: str, trainer: str, rows: tuple[Tensor, Tensor]) -> None:
    theirs, (student, teacher) = trl(name, trainer).generalized_jsd_loss, rows
    for beta in BETAS:
        for temperature, items in ((1.0, None), (0.7, 23), (1.6, torch.tensor(23))):
            how = {"mask": MASK, "transform": LogitTransform(temperature)}
            count = MASK.sum() if items is None else items
            assert_same(
                lambda z, beta=beta, how=how, count=count: (
                    token_divergence(z, teacher, divergence_of(beta), **how).sum() / count
                ),
                lambda z, beta=beta, t=temperature, items=items: theirs(
                    z, teacher, LABELS, beta=beta, temperature=t, num_items_in_batch=items
                ),
                student,
            )


@pytest.mark.parametrize("name, trainer", WHOLE)
def test_the_trainers_loss_on_whole_rows_has_these_defects(name: str, trainer: str, rows: tuple[Tensor, Tensor]) -> None:
    theirs, (student, teacher) = trl(name, trainer).generalized_jsd_loss, rows
    masked = [torch.where(torch.arange(V) == 4, -torch.inf, x) for x in rows]  # an id that both heads rule out
    close = student + 1e-5 * teacher
    for beta in BETAS:
        assert theirs(*masked, LABELS, beta=beta).isnan()
        value, gradient = value_and_gradient(lambda z, b=beta: token_divergence(z, masked[1], divergence_of(b)), masked[0])
        without = [torch.cat([x[..., :4], x[..., 5:]], -1) for x in rows]
        torch.testing.assert_close(value, token_divergence(*without, divergence_of(beta)))
        assert gradient.isfinite().all() and not gradient[..., 4].any()

        found = token_divergence(student, close, divergence_of(beta))
        p, q = torch.log_softmax(student.double(), -1), torch.log_softmax(close.double(), -1)
        if 0 < beta < 1:
            m = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
            expected = (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(-1)
        else:
            expected = (q.exp() * (q - p) if beta == 0 else p.exp() * (p - q)).sum(-1)
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=0)
        noisy = torch.stack(
            [theirs(student[i, j], close[i, j], beta=beta, reduction="sum") for i in range(B) for j in range(T)]
        )
        assert noisy.min() < 0 and (noisy.double() - expected.flatten()).abs().max() > 10 * expected.max()


@pytest.mark.parametrize("tail", ["bin", "renormalise"])
@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_at_some_ids(beta: float, tail: str, rows: tuple[Tensor, Tensor]) -> None:
    """IW-OPD picks the ids from both sides, the other two from what a server sent."""
    student, teacher = rows
    of_student, of_teacher = student.topk(3)[1], teacher.topk(3)[1]
    ids = {0.0: of_teacher, 1.0: of_student}.get(beta, torch.cat([of_teacher, of_student], -1))
    repeated = torch.tril(ids[..., :, None] == ids[..., None, :], -1).any(-1)
    sets, exact = known_at(ids, teacher, ~repeated), with_tail(beta, tail)
    theirs = trl("iw_opd", "IWOPDTrainer").generalized_jsd_loss
    assert_same(
        lambda z: token_divergence(z, sets, exact, mask=MASK, transform=LogitTransform(0.8)).sum() / MASK.sum(),
        lambda z: theirs(z, 0.8 * teacher, LABELS, beta=beta, temperature=0.8, top_k=3, add_tail=tail == "bin"),
        student,
    )


@pytest.mark.parametrize("tail", ["bin", "renormalise"])
def test_a_served_teacher(tail: str, rows: tuple[Tensor, Tensor]) -> None:
    trainer = trl("server_distillation", "ServerDistillationTrainer")
    chunk = trl("async_distillation", "_jsd_loss_chunk")
    (student, teacher), logps = rows, torch.log_softmax(rows[1], -1)
    ids, bias = teacher.topk(K)[1], torch.zeros(V)
    served = {"topk_logprobs": logps.gather(-1, ids), "topk_token_ids": ids}
    this = SimpleNamespace(loss_add_tail=tail == "bin", _reduce_divergence_loss=trainer._reduce_divergence_loss)
    ours = lambda z, sets, beta: token_divergence(z, sets, with_tail(beta, tail), mask=MASK).sum() / MASK.sum()  # noqa: E731
    assert_same(
        lambda z: ours(z, known_at(ids, teacher), 0.0),
        lambda z: trainer._compute_server_forward_kl_loss(this, served, torch.log_softmax(z, -1), LABELS),
        student,
    )
    for beta in BETAS:

        def of_chunk(z: Tensor, beta: float = beta) -> Tensor:
            every = torch.ones_like(ids[MASK], dtype=torch.bool)
            how = (beta, 1.0, tail == "bin", None, 1)
            return (
                chunk(z[MASK], torch.eye(V), bias, 1.0, None, ids[MASK], logps.gather(-1, ids)[MASK], every, *how)[0]
                / MASK.sum()
            )

        assert_same(lambda z, beta=beta: ours(z, known_at(ids, teacher), beta), of_chunk, student)


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_a_served_teacher_at_one_or_two_ids(beta: float, rows: tuple[Tensor, Tensor]) -> None:
    """For other directions than forward the teacher's first id and the sampled one stand for all; for reverse the sampled one
    alone, and without the tail its loss is a constant 0."""
    trainer, (student, teacher) = trl("server_distillation", "ServerDistillationTrainer"), rows
    logps, first = torch.log_softmax(teacher, -1), teacher.argmax(-1)
    sampled = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    sampled[0, 0] = first[0, 0]

    def theirs(z: Tensor, add_tail: bool = True) -> Tensor:
        this = SimpleNamespace(beta=beta, loss_add_tail=add_tail, _reduce_divergence_loss=trainer._reduce_divergence_loss)
        of_first, of_sampled = (logps.gather(-1, x[..., None])[..., 0] for x in (first, sampled))
        found = torch.log_softmax(z, -1)
        return trainer._compute_sparse_top_1_divergence_loss(this, found, first, of_first, sampled, of_sampled, LABELS)

    ids = sampled[..., None] if beta == 1 else torch.stack([first, sampled], -1)
    valid = torch.ones_like(ids, dtype=torch.bool)
    if beta != 1:
        valid[..., 1] = sampled != first
    sets = known_at(ids, teacher, valid)
    assert_same(lambda z: token_divergence(z, sets, with_tail(beta, "bin"), mask=MASK).sum() / MASK.sum(), theirs, student)
    if beta == 1:
        value, gradient = value_and_gradient(lambda z: theirs(z, False), student)
        assert value.abs() < 1e-6 and gradient.abs().max() < 1e-6
        assert token_divergence(student, teacher, mask=MASK)[MASK].min() > 0.1  # of whole rows


@pytest.mark.parametrize("beta", BETAS)
def test_golds_matched_ids(beta: float, rows: tuple[Tensor, Tensor]) -> None:
    """Probabilities at ids that two tokenizers share, whose sum is not 1: the sum over these ids alone. Below 1e-8 a probability of
    theirs counts as 1e-8 and has no gradient."""
    theirs, (student, teacher) = trl("gold", "GOLDTrainer").generalized_jsd_loss, rows
    ids = torch.arange(3, 3 + K).expand(B, T, K)

    def of_probabilities(z: Tensor, teacher: Tensor) -> Tensor:
        p, q = (torch.softmax(x, -1)[..., 3 : 3 + K].flatten(0, 1) for x in (z, teacher))
        return theirs(p, q, beta=beta, reduction="sum", logits_are_probs=True)

    exact = with_tail(beta, "ignore")
    assert_same(
        lambda z: token_divergence(z, known_at(ids, teacher), exact).sum(), lambda z: of_probabilities(z, teacher), student
    )
    if beta == 0:
        far = student.clone()
        far[..., 4] = -40.0
        value, gradient = value_and_gradient(lambda z: token_divergence(z, known_at(ids, teacher), exact), far)
        other, stopped = value_and_gradient(lambda z: of_probabilities(z, teacher), far)
        log_p, log_q = (torch.log_softmax(x.double(), -1)[..., 4] for x in (far, teacher))
        missing = (log_q.exp() * (math.log(1e-8) - log_p)).sum()
        torch.testing.assert_close(value.double().sum() - other, missing, rtol=1e-4, atol=1e-4, check_dtype=False)
        torch.testing.assert_close((gradient - stopped)[..., 4].double(), -log_q.exp(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clamp", [None, -4.0])
def test_veomni(clamp: float | None, rows: tuple[Tensor, Tensor]) -> None:
    """Its `chunk_topk_distill_function`: value and gradient are written down there, not left to autograd. Its floor replaces
    log-probs of both sides: ours is the same over the ids at which the student is above it, and the rest is a constant."""
    student, teacher = rows
    ids, temperature = teacher.topk(K)[1], 0.8
    of_teacher = torch.log_softmax(teacher, -1).gather(-1, ids)
    z = student / temperature
    at = torch.log_softmax(z, -1).gather(-1, ids)
    floor = -torch.inf if clamp is None else clamp
    active, floored = at >= floor, of_teacher.clamp(min=floor)
    weights = floored.exp()
    value = (weights * (floored - at.clamp(min=floor))).sum(-1) * MASK
    mass = (weights * active).sum(-1, keepdim=True)
    sparse = torch.zeros_like(z).scatter_add_(-1, ids, weights * active)
    gradient = MASK[..., None] * (mass * torch.softmax(z, -1) - sparse) / temperature

    kept = TokenSets.from_padded(ids.masked_fill(~active, -1).flatten(0, 1), values=floored.flatten(0, 1))
    assert bool(active.any(-1)[MASK].all())
    ours = value_and_gradient(
        lambda z: token_divergence(z, kept, Exact("forward", tail="ignore"), mask=MASK, transform=LogitTransform(temperature)),
        student,
    )
    constant = (weights * (floored - floor)).masked_fill(active, 0.0).sum(-1) * MASK
    assert (clamp is None) == bool((constant == 0).all())
    torch.testing.assert_close(ours[0] + constant, value, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours[1], gradient, rtol=1e-4, atol=1e-6)
