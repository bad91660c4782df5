"""Divergences from hidden states, in one visit, over kept sets and at ids: against float64 and the definition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenSets
from grpo_kernels.formulas.token_stage import TokenRows
from grpo_kernels.loss_stages import OneVisit, _GradientInForward
from grpo_kernels.vocabulary.backends import pick
from grpo_kernels.vocabulary.blocks import CHUNK_BYTES
from grpo_kernels.vocabulary.hidden import Engine, FlatHead
from grpo_kernels.vocabulary.kept import KeptRows
from grpo_kernels.vocabulary.rows import RowTransform, Teacher
from grpo_kernels.vocabulary.sources import Hidden, Logits
from grpo_kernels.vocabulary.sparse import Slots
from grpo_kernels.vocabulary.stage import vocabulary_stage
from grpo_kernels.vocabulary.teachers import TeacherHead
from support import oracle
from support.allocations import Allocations
from support.divergences import COLD, KINDS, READ, SETS, WARM, WIDTH, N, Rows, V, keep_of, near, through_stage, transformed
from support.linear_cases import count_products, in_chunks
from support.sets import build

Tensor = torch.Tensor

CPU = torch.device("cpu")


@pytest.mark.parametrize("shared", [False, True], ids=["own head", "shared head"])
@pytest.mark.parametrize("kind, mixture", KINDS)
def test_from_hidden_states(backend: str, kind: str, mixture: float, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk; the products that this takes are counted: the teacher's logits are one more of the forward and one more
    of the backward, of rows that are read, or none where they are made in the student's."""
    in_chunks(monkeypatch, 4)
    rows = Rows(shared=shared)
    leaves, upstream = rows.leaves, torch.randn(N) * READ
    source = Hidden(pick(backend, CPU), torch.float32, teacher=rows.heads(kind, mixture, leaves))
    counts = count_products(monkeypatch)
    value, gradients = through_stage(source, leaves, upstream)
    exact, exact_gradients = rows.expected(kind, mixture, upstream)
    read = int(READ.sum())
    assert counts == {"logits": 4 * read, "d_hidden": read, "d_weight": read}
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    near(gradients, exact_gradients)


@pytest.mark.parametrize("shared", [False, True], ids=["own head", "shared head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_from_hidden_states_of_16_bits(backend: str, dtype: torch.dtype, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of both streams are never rounded to 16 bits, also where the gradient lies in their memory."""
    in_chunks(monkeypatch, 4)
    rows, upstream = Rows(dtype, shared), torch.randn(N) * READ
    exact, exact_gradients = rows.expected("reverse", 0.0, upstream)
    tokens = TokenRows(torch.zeros(N, dtype=torch.int64), READ, *torch.zeros(2, N), divergence_weight=upstream)
    leaves: list[Any] = rows.leaves
    source = Hidden(pick(backend, CPU), dtype, teacher=rows.heads("reverse", 0.0, leaves))
    value, gradients = through_stage(source, leaves, upstream)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    near(gradients, exact_gradients, 2e-2)
    loss = _GradientInForward.apply(OneVisit(source, tokens, Objective(), WARM), *leaves)[0]
    near(list(torch.autograd.grad(loss, leaves)), exact_gradients, 2e-2)


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("kind, mixture", KINDS)
def test_in_one_visit(backend: str, kind: str, mixture: float, linear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of an objective and the divergence, its gradient made in the forward: four products from hidden states."""
    in_chunks(monkeypatch, 5)
    rows = Rows()
    weight, objective = torch.rand(N) * READ, Objective(entropy_coef=0.01)
    weight[0] = 0.0
    tokens = TokenRows(torch.randint(0, V, (N,)), READ, torch.randn(N), torch.rand(N) * READ, entropy_weight=0.01 * READ)
    head = rows.heads(kind, mixture, [])
    if linear:
        leaves = rows.leaves
        source: Any = Hidden(pick(backend, CPU), torch.float32, teacher=head)
    else:
        logits = torch.nn.functional.linear(rows.hidden, rows.weight, rows.bias)  # type: ignore[arg-type]
        leaves = [logits[None].detach().requires_grad_()]
        of_teacher = torch.nn.functional.linear(*(x.float() for x in rows.teacher.tensors))  # type: ignore[union-attr]
        source = Logits(pick(backend, CPU), teacher=Teacher(of_teacher[None], COLD, kind, mixture))
    counts = count_products(monkeypatch)

    def loss_of(source: Any, tokens: TokenRows) -> tuple[Tensor, list[Tensor]]:
        loss = _GradientInForward.apply(OneVisit(source, tokens, objective, WARM), *leaves)[0]
        return loss.detach(), list(torch.autograd.grad(loss, leaves))

    loss, gradients = loss_of(source, replace(tokens, divergence_weight=weight))
    if linear:
        read = int(READ.sum())
        assert counts == {"logits": 2 * read, "d_hidden": read, "d_weight": read}
    plain, plain_gradients = loss_of(replace(source, teacher=None), tokens)
    exact, exact_gradients = rows.expected(kind, mixture, weight)
    if not linear:
        double = logits.double().requires_grad_()
        found = oracle.divergence(
            transformed(double, WARM).log_softmax(-1), transformed(of_teacher.double(), COLD).log_softmax(-1), kind, mixture
        )
        exact_gradients = [torch.autograd.grad((found * weight).sum(), double)[0][None]]
    torch.testing.assert_close((loss - plain).double(), (exact * weight).sum(), rtol=1e-4, atol=1e-5)
    near([x - y for x, y in zip(gradients, plain_gradients, strict=True)], exact_gradients, 2e-4)
    with torch.no_grad():
        arguments = (replace(tokens, divergence_weight=weight), objective, WARM)
        result, _ = source.fused(tuple(leaves), (False,) * len(leaves), *arguments)
    torch.testing.assert_close(torch.where(READ, result.divergence, 0.0).double(), exact, rtol=1e-5, atol=1e-6)


def test_weights_of_rows_scale_the_divergence_too() -> None:
    tokens = TokenRows(*torch.zeros(4, 3), divergence_weight=torch.tensor([1.0, 2.0, 0.0]))  # type: ignore[misc]
    scaled = tokens.weighted(torch.tensor([2.0, 0.0, torch.nan])).divergence_weight
    assert scaled is not None and scaled.tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("kind, mixture", KINDS)
def test_over_kept_sets(backend: str, kind: str, mixture: float, linear: bool) -> None:
    """Both streams are renormalised over the set of a row; rows without one run over the vocabulary."""
    rows, targets = Rows(), torch.tensor([(ids or [1])[0] for ids in SETS])
    upstream = torch.randn(N) * READ
    kept = KeptRows.of(build(SETS), targets, READ)
    exact, exact_gradients = rows.expected(kind, mixture, upstream, keep_of(SETS))
    leaves: list[Any] = rows.leaves
    head = rows.heads(kind, mixture, leaves)
    if linear:
        source: Any = Hidden(pick(backend, CPU), torch.float32, kept=kept, teacher=head)
        value, gradients = through_stage(source, leaves, upstream, targets)
    else:
        logits = torch.nn.functional.linear(*leaves)
        of_teacher = torch.nn.functional.linear(*(x.float() for x in rows.teacher.tensors))  # type: ignore[union-attr]
        source = Logits(pick(backend, CPU), kept=kept, teacher=Teacher(of_teacher[None], COLD, kind, mixture))
        targets_of = targets
        _, found = vocabulary_stage(source, ("divergence",), ("divergence",), targets_of, READ, WARM, logits[None])
        value = found["divergence"].detach()
        gradients = list(torch.autograd.grad((found["divergence"] * upstream).sum(), leaves))
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    assert (value[[0, 5, 10]] == 0).all()  # of an only id
    near(gradients, exact_gradients)


def test_kept_sets_in_one_visit(backend: str) -> None:
    """The same divergence and gradient as by the way of autograd."""
    rows, targets = Rows(), torch.tensor([(ids or [1])[0] for ids in SETS])
    kept = KeptRows.of(build(SETS), targets, READ)
    for kind, mixture in KINDS:
        leaves: list[Any] = rows.leaves
        source = Hidden(pick(backend, CPU), torch.float32, kept=kept, teacher=rows.heads(kind, mixture, leaves))
        weight = torch.rand(N) * READ
        tokens = TokenRows(targets, READ, torch.zeros(N), torch.zeros(N), divergence_weight=weight)
        loss = _GradientInForward.apply(OneVisit(source, tokens, Objective(), WARM), *leaves)[0]
        exact, exact_gradients = rows.expected(kind, mixture, weight, keep_of(SETS))
        torch.testing.assert_close(loss.detach().double(), (exact * weight).sum(), rtol=1e-5, atol=1e-6)
        near(list(torch.autograd.grad(loss, leaves)), exact_gradients)


@pytest.mark.parametrize("sets", [None, SETS], ids=["whole rows", "sets"])
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_beside_log_probs_at_ids(backend: str, linear: bool, sets: list[list[int]] | None) -> None:
    """The gradient of the logits at these ids is one of both: of their log-probs and of the divergence."""
    rows, targets = Rows(), torch.tensor([(ids or [1])[0] for ids in SETS])
    at = [[3, 1], [5], [], [60], [], [2], [3], [4, 6], [60, 59], [9], [30]]
    asked: TokenSets = build(at)
    slots = Slots(asked.ids.to(torch.int64), asked.offsets, asked.row_of).plain()
    kept = None if sets is None else KeptRows.of(build(sets), targets, READ)
    keep = None if sets is None else keep_of(sets)
    for kind, mixture in KINDS:
        leaves: list[Any] = rows.leaves
        upstream, d_at = torch.randn(N) * READ, torch.randn(slots.ids.numel())
        if linear:
            tensors: list[Any] = leaves
            head = rows.heads(kind, mixture, leaves)
            source: Any = Hidden(pick(backend, CPU), torch.float32, kept=kept, at=slots, teacher=head)
        else:
            tensors = [torch.nn.functional.linear(*leaves)[None]]
            of_teacher = torch.nn.functional.linear(*(x.float() for x in rows.teacher.tensors))  # type: ignore[union-attr]
            teacher = Teacher(of_teacher[None], COLD, kind, mixture)
            source = Logits(pick(backend, CPU), kept=kept, at=slots, teacher=teacher)
        _, found = vocabulary_stage(source, ("divergence",), ("divergence",), targets, READ, WARM, *tensors)
        counted = READ[slots.rows] & found["at"].isfinite()
        total = (found["divergence"] * upstream).sum() + (torch.where(counted, found["at"], 0.0) * d_at).sum()
        gradients = torch.autograd.grad(total, leaves)
        exact: list[Any] = [x.detach().double().requires_grad_() for x in leaves]
        logps, of_teacher = rows.log_probs(exact, keep)
        value = torch.where(READ, oracle.divergence(logps, of_teacher, kind, mixture), 0.0)
        chosen = logps[slots.rows, slots.ids][counted]
        torch.testing.assert_close(found["at"][counted].detach().double(), chosen.detach(), rtol=1e-5, atol=1e-5)
        expected = torch.autograd.grad((value * upstream).sum() + (chosen * d_at[counted]).sum(), exact)
        near(list(gradients), list(expected))


def teacher_of(rows: Rows, kind: str, mixture: float) -> Teacher:
    of_teacher = torch.nn.functional.linear(*(x.float() for x in rows.teacher.tensors))  # type: ignore[union-attr]
    return Teacher(of_teacher[None], COLD, kind, mixture)


def test_transforms_of_torch_func(backend: str) -> None:
    """The gradient by torch.func, where the second stream may have a wrapper, is that of autograd."""
    rows, upstream = Rows(), torch.randn(N) * READ
    targets = torch.zeros(N, dtype=torch.int64)
    for linear in (False, True):
        leaves: list[Any] = rows.leaves if linear else [torch.randn(1, N, V).requires_grad_()]

        def value_of(first: Tensor, linear: bool = linear, leaves: list[Any] = leaves) -> Tensor:
            if linear:
                head = rows.heads("jsd", 0.3, leaves)
                head = replace(head, head=replace(head.head, hidden=head.head.hidden + 0.0 * first.sum()))
                source: Any = Hidden(pick(backend, CPU), torch.float32, teacher=head.plain())
            else:
                teacher = teacher_of(rows, "reverse", 0.0)
                source = Logits(pick(backend, CPU), teacher=teacher._replace(logits=teacher.logits + 0.0 * first.sum()).plain())
            tensors = [first, *leaves[1:]]
            _, found = vocabulary_stage(source, ("divergence",), ("divergence",), targets, READ, WARM, *tensors)
            return (found["divergence"] * upstream).sum()

        by_func = torch.func.grad(value_of)(leaves[0].detach())
        (by_autograd,) = torch.autograd.grad(value_of(leaves[0]), leaves[0])
        torch.testing.assert_close(by_func, by_autograd, rtol=0, atol=0)
        assert by_func.abs().max() > 1e-3


def test_a_second_stream_from_inference_mode(backend: str) -> None:
    """Which is where most teachers' logits come from."""
    rows, upstream = Rows(), torch.randn(N) * READ
    logits = torch.randn(1, N, V)
    found = []
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            teacher, head = teacher_of(rows, "forward", 0.0), rows.heads("forward", 0.0, rows.leaves)
            head = replace(head, head=replace(head.head, hidden=head.head.hidden + 0.0))
        for source, leaves in (
            (Logits(pick(backend, CPU), teacher=teacher), [logits.clone().requires_grad_()]),
            (Hidden(pick(backend, CPU), torch.float32, teacher=head), rows.leaves),
        ):
            value, gradients = through_stage(source, leaves, upstream)
            found.append([value, *gradients])
    for x, y in zip(found[0] + found[1], found[2] + found[3], strict=True):
        assert torch.equal(x, y)


def test_a_second_stream_that_was_overwritten_is_refused(backend: str) -> None:
    rows = Rows()
    leaf, teacher = torch.randn(1, N, V).requires_grad_(), teacher_of(rows, "reverse", 0.0)
    source = Logits(pick(backend, CPU), teacher=teacher)
    arguments = (torch.zeros(N, dtype=torch.int64), READ, WARM, leaf)
    _, found = vocabulary_stage(source, ("divergence",), ("divergence",), *arguments)
    teacher.logits.zero_()
    with pytest.raises(RuntimeError, match=r"second stream of rows .* was written to between forward and backward"):
        found["divergence"].sum().backward()


@pytest.mark.parametrize("shared", [False, True], ids=["own head", "shared head"])
def test_logits_of_neither_stream_exist_beyond_a_chunk(backend: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and the one visit hold a few chunks of rows, of any number of rows."""
    chunk, n = 8, 64
    in_chunks(monkeypatch, chunk)
    rows, weight = Rows(shared=shared), torch.rand(n)
    many = torch.arange(n) % N
    rows.hidden, rows.teacher = rows.hidden[many], replace(rows.teacher, hidden=rows.teacher.hidden[many])
    targets = torch.zeros(n, dtype=torch.int64)
    tokens = TokenRows(targets, None, torch.zeros(n), torch.zeros(n), divergence_weight=weight)
    transform = RowTransform(1.0, 0.0, 1.0)
    leaves: list[Any] = rows.leaves
    head = replace(rows.heads(*KINDS[1 if shared else 2], leaves), transform=transform)
    source = Hidden(pick(backend, CPU), torch.float32, teacher=head)
    with Allocations() as seen:
        _, found = vocabulary_stage(source, ("divergence",), ("divergence",), targets, None, transform, *leaves)
        (found["divergence"] * weight).sum().backward()
        _GradientInForward.apply(OneVisit(source, tokens, Objective(), transform), *leaves)[0].backward()
    assert max(math.prod(shape) for shape in seen.shapes) <= max(2 * chunk * V, n * WIDTH), max(seen.shapes, key=math.prod)


def test_a_chunk_holds_both_streams() -> None:
    head = FlatHead(torch.randn(4, 2), torch.randn(50_000, 2), None, torch.float32)
    teacher = TeacherHead(FlatHead(torch.randn(4, 3), torch.randn(50_000, 3), None, torch.float32), COLD, "reverse", 0.0)
    alone, both = (Engine(head, pick("eager", CPU), teacher=t).chunk_rows for t in (None, teacher))
    assert both == alone and 2 * both * 4 * 50_000 <= 2 * CHUNK_BYTES["cpu"]
