"""Divergences over a vocabulary that is cut over ranks: checks that kept_parallel_checks.py runs in its processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from vocab_parallel_checks import assert_same_everywhere, cut, shards, whole

from grpo_kernels import Exact, Objective, Options, TokenBatch, grpo_loss, linear_divergence, linear_grpo_loss, token_divergence
from grpo_kernels.distributed import VocabShard
from grpo_kernels.formulas.token_stage import TokenRows
from grpo_kernels.loss_stages import OneVisit, _GradientInForward
from grpo_kernels.vocabulary.backends import pick
from grpo_kernels.vocabulary.kept import KeptRows
from grpo_kernels.vocabulary.rows import Teacher
from grpo_kernels.vocabulary.shard import on_shard
from grpo_kernels.vocabulary.sources import Hidden, Logits
from grpo_kernels.vocabulary.sparse import Slots
from support.collectives import counted
from support.divergences import COLD, KINDS, READ, SETS, WARM, N, Rows, V, keep_of, near, of_listed_ids, through_stage
from support.sets import build

Tensor = torch.Tensor


def calls(rank: int, ranks: int) -> Iterator[tuple[list[int], VocabShard, str, str, float]]:
    """Each cut with some of the kinds, and each kind with some of the cuts."""
    for i, (_, widths, shard) in enumerate(shards(rank, ranks)):
        for j, (kind, mixture) in enumerate(KINDS[:3]):
            if ranks < 4 or (i + j) % 2 == 0:
                yield widths, shard, ("eager", "cpu")[(i + j) % 2], kind, mixture


def hidden_source(
    rows: Rows, widths: list[int], rank: int, shard: VocabShard, backend: str, kind: str, mixture: float, **options: Any
) -> tuple[Hidden, list[Tensor]]:
    """The source of this rank's part, and its leaves."""
    leaves: list[Any] = [rows.hidden.clone(), cut(rows.weight, widths, rank, 0), cut(rows.bias, widths, rank, 0)]  # type: ignore[arg-type]
    for leaf in leaves:
        leaf.requires_grad_()
    teacher = rows.heads(kind, mixture, leaves)
    own = teacher.head
    weight, bias = (cut(x, widths, rank, 0, 50.0) for x in (own.weight, own.bias))  # type: ignore[arg-type]
    teacher = replace(teacher, head=replace(own, weight=weight, bias=bias, shard=shard))
    return Hidden(on_shard(pick(backend, leaves[0].device), shard), torch.float32, shard, teacher=teacher, **options), leaves


def together(gradients: list[Tensor], widths: list[int]) -> list[Tensor]:
    found = whole(dict(zip(("hidden", "weight", "bias"), gradients, strict=True)), widths)
    return [found[name] for name in ("hidden", "weight", "bias")]


def check_divergence_from_hidden(rank: int, ranks: int) -> None:
    """One exchange for all partials, one sum for those of a mixture, one for d_hidden."""
    torch.manual_seed(8)
    rows, upstream = Rows(), torch.randn(N) * READ
    for widths, shard, backend, kind, mixture in calls(rank, ranks):
        source, leaves = hidden_source(rows, widths, rank, shard, backend, kind, mixture)
        with counted() as sizes:
            value, gradients = through_stage(source, leaves, upstream)
        read = int(READ.sum())
        alone = ranks == 1
        assert sizes["all_gather"] == [4 * 7 * read] * (not alone)  # max, sum and target, and four of both streams
        assert len(sizes["all_reduce"]) == (0 if alone else 2 if kind == "jsd" else 1), sizes
        exact, exact_gradients = rows.expected(kind, mixture, upstream)
        assert_same_everywhere(value, gradients[0])
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
        near(together(gradients, widths), exact_gradients)


def check_divergence_in_one_visit(rank: int, ranks: int) -> None:
    """Of rows with sets and of others."""
    torch.manual_seed(8)
    rows, weight, targets = Rows(), torch.rand(N) * READ, torch.tensor([(ids or [1])[0] for ids in SETS])
    tokens = TokenRows(targets, READ, torch.zeros(N), torch.zeros(N), divergence_weight=weight)
    for widths, shard, backend, kind, mixture in calls(rank, ranks):
        kept = KeptRows.of(build(SETS), targets, READ)
        source, leaves = hidden_source(rows, widths, rank, shard, backend, kind, mixture, kept=kept)
        loss = _GradientInForward.apply(OneVisit(source, tokens, Objective(), WARM), *leaves)[0]
        gradients = list(torch.autograd.grad(loss, leaves))
        exact, exact_gradients = rows.expected(kind, mixture, weight, keep_of(SETS))
        assert_same_everywhere(loss, gradients[0])
        torch.testing.assert_close(loss.detach().double(), (exact * weight).sum(), rtol=1e-5, atol=1e-6)
        near(together(gradients, widths), exact_gradients)


def check_divergence_from_logits_beside_ids(rank: int, ranks: int) -> None:
    """With sets, and log-probs of further ids whose gradient meets that of the divergence."""
    torch.manual_seed(8)
    rows, upstream, targets = Rows(), torch.randn(N) * READ, torch.tensor([(ids or [1])[0] for ids in SETS])
    logits = torch.nn.functional.linear(rows.hidden, rows.weight, rows.bias)
    of_teacher = torch.nn.functional.linear(*(x.float() for x in rows.teacher.tensors))  # type: ignore[union-attr]
    asked = build([[*ids[:1], 33 + i] for i, ids in enumerate(SETS)])
    slots, results = Slots(asked.ids.to(torch.int64), asked.offsets, asked.row_of).plain(), []
    d_at = torch.randn(slots.ids.numel())
    for widths, shard, backend, kind, mixture in calls(rank, ranks):
        kept = KeptRows.of(build(SETS), targets, READ)
        leaf = cut(logits, widths, rank, -1)[None].requires_grad_()
        teacher = Teacher(cut(of_teacher, widths, rank, -1, 50.0)[None], COLD, kind, mixture)
        source = Logits(on_shard(pick(backend, leaf.device), shard), shard=shard, kept=kept, at=slots, teacher=teacher)
        value, (gradient,) = through_stage(source, [leaf], upstream, targets, d_at)
        results.append((kind, mixture, widths, value, gradient))
    for kind, mixture, widths, value, gradient in results:
        exact, _ = rows.expected(kind, mixture, upstream, keep_of(SETS))
        assert_same_everywhere(value)
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
        joined = whole({"logits": gradient[0].t().contiguous()}, widths)["logits"].t()
        teacher = Teacher(of_teacher[None], COLD, kind, mixture)
        alone = Logits(pick("eager", logits.device), kept=KeptRows.of(build(SETS), targets, READ), at=slots, teacher=teacher)
        expected = through_stage(alone, [logits[None].clone().requires_grad_()], upstream, targets, d_at)[1]
        near([joined], [expected[0][0].double()])


def check_several_teachers(rank: int, ranks: int) -> None:
    """Loss and gradient of the whole vocabulary, from hidden states and from logits."""
    torch.manual_seed(8)
    rows, weights = Rows(), (0.5, torch.rand(N))
    seconds = [(torch.randn(N, w), torch.randn(V, w)) for w in (5, 7)]
    logits = torch.nn.functional.linear(rows.hidden, rows.weight, rows.bias)
    batch, results = TokenBatch(torch.zeros(N, dtype=torch.int64), torch.zeros(N), mask=READ), []
    for widths, shard, backend, kind, mixture in calls(rank, ranks):
        objective = Objective.preset("distillation", kl=Exact(kind, mixture=mixture or None))
        given: Any = {"shard": shard, "options": Options(backend=backend)}
        leaves: list[Any] = [rows.hidden.clone(), cut(rows.weight, widths, rank, 0), cut(rows.bias, widths, rank, 0)]  # type: ignore[arg-type]
        part, whole_logits = cut(logits, widths, rank, -1), logits.clone().requires_grad_()
        for leaf in (*leaves, part):
            leaf.requires_grad_()
        reference = [((h, cut(w, widths, rank, 0, 50.0)), weight) for (h, w), weight in zip(seconds, weights, strict=True)]
        out = linear_grpo_loss(*leaves[:2], batch, objective, bias=leaves[2], reference=reference, **given)
        out.loss.backward()
        ref_logits = [(cut(h @ w.T, widths, rank, -1, 50.0), weight) for (h, w), weight in zip(seconds, weights, strict=True)]
        again = grpo_loss(part, batch, objective, ref_logits=ref_logits, **given)
        again.loss.backward()
        of_all = [(h @ w.T, weight) for (h, w), weight in zip(seconds, weights, strict=True)]
        alone = grpo_loss(whole_logits, batch, objective, ref_logits=of_all)
        alone.loss.backward()
        for loss in (out.loss, again.loss):
            assert_same_everywhere(loss)
            torch.testing.assert_close(loss, alone.loss, rtol=1e-5, atol=1e-6)
        results.append((widths, leaves[0].grad, part.grad, whole_logits.grad))
    for widths, d_hidden, d_part, exact in results:
        joined = whole({"logits": d_part.t().contiguous()}, widths)["logits"].t()
        near([d_hidden, joined], [exact.double() @ rows.weight.double(), exact.double()])


def check_the_mass_outside_of_a_teachers_ids(rank: int, ranks: int) -> None:
    """Of a confident policy, with parts that are masked whole, or hold no id that is not listed; from logits and hidden states."""
    torch.manual_seed(8)
    logits, of_teacher = torch.randn(N, V), torch.randn(N, V)
    logits[:, 7] += 18.0
    logits[1::2, 30:] = torch.finfo(torch.float32).min
    ids = of_teacher.log_softmax(-1).topk(9).indices
    sets = [[], *(row.tolist() for row in ids[1:-1]), list(range(40))]
    flat = [of_teacher.log_softmax(-1)[i, row] for i, row in enumerate(sets)]
    listed, results = build(sets).with_values(torch.cat(flat)), []
    for widths, shard, backend, kind, mixture in calls(rank, ranks):
        exact, given = Exact(kind, mixture=mixture or None), {"shard": shard, "mask": READ, "options": Options(backend=backend)}
        part = cut(logits, widths, rank, -1, 50.0).requires_grad_()
        found = token_divergence(part, listed, exact, **given)
        found.sum().backward()
        hidden, weight = torch.eye(N), cut(logits.T, widths, rank, 0).requires_grad_()
        again = linear_divergence(hidden, weight, listed, exact, **given)
        again.sum().backward()
        results.append((exact, widths, found, again, part.grad, weight.grad))
    for exact, widths, found, again, d_part, d_weight in results:
        wide = logits.double().requires_grad_()
        want = torch.where(READ, of_listed_ids(exact, wide.log_softmax(-1), listed), 0.0)
        (gradient,) = torch.autograd.grad(want.sum(), wide)
        for value in (found, again):
            assert_same_everywhere(value)
            torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=1e-7)
        for joined in (whole({"x": d_part.t().contiguous()}, widths)["x"].t(), whole({"x": d_weight}, widths)["x"].t()):
            assert ((joined - gradient).norm(dim=-1) <= 1e-5 * gradient.norm(dim=-1) + 1e-9).all()
