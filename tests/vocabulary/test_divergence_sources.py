"""Divergences from hidden states, in one visit, over kept sets and at ids: against float64 and the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenSets
from grpo_kernels.formulas.token_stage import TokenRows
from grpo_kernels.loss_stages import OneVisit, _GradientInForward
from grpo_kernels.vocabulary.backends import pick
from grpo_kernels.vocabulary.hidden import FlatHead, TeacherHead
from grpo_kernels.vocabulary.kept import KeptRows
from grpo_kernels.vocabulary.rows import RowTransform, Teacher
from grpo_kernels.vocabulary.sources import Hidden, Logits
from grpo_kernels.vocabulary.sparse import Slots
from grpo_kernels.vocabulary.stage import vocabulary_stage
from support import oracle
from support.divergences import KINDS, transformed
from support.linear_cases import count_products, in_chunks
from support.sets import build

Tensor = torch.Tensor

N, V, WIDTH, OTHER = 11, 61, 16, 10
WARM, COLD = RowTransform(0.9, 11.0, 1.2), RowTransform(1.0, 0.0, torch.linspace(0.5, 1.4, N))
READ = torch.tensor([True] * 4 + [False] * 2 + [True] * 5)
CPU = torch.device("cpu")


class Rows:
    """Hidden states and heads of both streams. `shared`: one head for both; `student`: its leaves, in fp64 for the oracle."""

    def __init__(self, dtype: torch.dtype = torch.float32, shared: bool = False, bias: bool = True) -> None:
        self.hidden = torch.randn(N, WIDTH).to(dtype)
        self.weight = (2.0 * WIDTH**-0.5 * torch.randn(V, WIDTH)).to(dtype)
        self.bias = torch.randn(V).to(dtype) if bias else None
        if shared:
            self.teacher = FlatHead((self.hidden + 0.3 * torch.randn(N, WIDTH)).to(dtype), self.weight, self.bias, dtype)
        else:
            own = torch.randn(N, OTHER), OTHER**-0.5 * torch.randn(V, OTHER), torch.randn(V)
            self.teacher = FlatHead(*(x.to(torch.bfloat16) for x in own), torch.bfloat16)

    @property
    def leaves(self) -> list[Tensor | None]:
        given = (self.hidden, self.weight, self.bias)
        return [None if x is None else x.detach().clone().requires_grad_() for x in given]

    def heads(self, kind: str, mixture: float, leaves: list[Any]) -> TeacherHead:
        """The second stream; with a shared head that of these leaves."""
        own = self.teacher
        if own.weight is self.weight:
            own = replace(own, weight=leaves[1], bias=leaves[2])
        return TeacherHead(own, COLD, kind, mixture)

    def log_probs(self, leaves: list[Any], keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of both streams in fp64, over the ids of `keep` bool [N, V]."""
        logits = torch.nn.functional.linear(*leaves)
        of_teacher = torch.nn.functional.linear(*(None if x is None else x.double() for x in self.teacher.tensors))
        z, w = transformed(logits, WARM), transformed(of_teacher, COLD)
        if keep is not None:
            z, w = z.masked_fill(~keep, -torch.inf), w.masked_fill(~keep, -torch.inf)
        return z.log_softmax(-1), w.log_softmax(-1)

    def expected(self, kind: str, mixture: float, upstream: Tensor, keep: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Divergences, 0 where not read, and the gradients of their sum with weights `upstream`."""
        leaves: list[Any] = [None if x is None else x.double().requires_grad_() for x in (self.hidden, self.weight, self.bias)]
        value = torch.where(READ, oracle.divergence(*self.log_probs(leaves, keep), kind, mixture), 0.0)
        wanted = [x for x in leaves if x is not None]
        return value.detach(), list(torch.autograd.grad((value * upstream).sum(), wanted))


def near(found: list[Tensor], exact: list[Tensor], relative: float = 2e-5) -> None:
    assert len(found) == len(exact)
    for x, y in zip(found, exact, strict=True):
        scale = float(y.abs().max())
        assert scale > 0 and float((x.double() - y).abs().max()) <= relative * scale


def through_stage(
    source: Any, leaves: list[Any], upstream: Tensor, targets: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    targets = torch.zeros(N, dtype=torch.int64) if targets is None else targets
    _, found = vocabulary_stage(source, ("divergence",), ("divergence",), targets, READ, WARM, *leaves)
    value = found["divergence"]
    return value.detach(), list(torch.autograd.grad((value * upstream).sum(), [x for x in leaves if x is not None]))


@pytest.mark.parametrize("shared", [False, True], ids=["own head", "shared head"])
@pytest.mark.parametrize("kind, mixture", KINDS)
def test_from_hidden_states(backend: str, kind: str, mixture: float, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk; the products that this takes are counted: the teacher's logits are one more of the forward and one more of the
    backward, of rows that are read, or none where they are made in the student's."""
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


def keep_of(lists: list[list[int]]) -> Tensor:
    keep = torch.ones(N, V, dtype=torch.bool)
    for i, ids in enumerate(lists):
        if ids:
            keep[i] = False
            keep[i, ids] = True
    return keep


SETS = [[3], [5, 60, 2], list(range(1, 61, 2)), [], [9, 8], [4], [0, 1, 2, 3], [], [59, 60], [7, 8, 9], [30]]


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
