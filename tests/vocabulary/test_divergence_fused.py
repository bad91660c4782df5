"""The C++ kernel that makes a row's divergence, its loss and the gradient in one visit: against float64 and against the kernels
that make them one after the other, for every instruction set that this processor runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.formulas.surrogates import Custom, NoPolicyTerm, PolicyGradient
from grpo_kernels.formulas.token_stage import TokenRows
from grpo_kernels.vocabulary.backends import FusedRows, cpu, two_visits
from grpo_kernels.vocabulary.rows import RowTransform, Teacher
from support.divergences import CAPPED, COOL, KINDS, PLAIN, check, check_small_share, expected, row_pairs, streams

if cpu.available() is not None:
    pytest.skip(cpu.available() or "", allow_module_level=True)

from grpo_kernels import _cpu

Tensor = torch.Tensor

ALONE = Objective(NoPolicyTerm())
WITHOUT = Objective(PolicyGradient())
WITH = Objective(PolicyGradient(), entropy_coef=0.3)


@pytest.fixture(params=_cpu.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _cpu.use_isa(request.param)
    yield request.param
    _cpu.use_isa(_cpu.isas()[0])


def rows_of(n: int, vocab: int, objective: Objective, weight: Tensor | None, **fields: Any) -> TokenRows:
    batch = TokenBatch(torch.arange(n) * 5 % vocab, torch.linspace(-1.0, 1.5, n), **fields)
    return replace(objective.token_rows(batch, 1.0), divergence_weight=weight)


def by_kernel(
    logits: Tensor, teacher: Teacher, weight: Tensor | None, transform: RowTransform = PLAIN, out: Tensor | None = None,
    objective: Objective = ALONE, **fields: Any,
) -> FusedRows:  # fmt: skip
    n = logits.shape[0] * logits.shape[1]
    rows = rows_of(n, logits.shape[2], objective, weight, **fields)
    return cpu.fused(logits, rows, objective, transform, out, teacher=teacher)


@pytest.mark.parametrize("vocab", (1, 7, 33, 1030, 5003))
@pytest.mark.parametrize("kind, mixture", KINDS)
def test_values_and_gradients(kind: str, mixture: float, vocab: int) -> None:
    """Blocks and vectors that end anywhere; a maximum late in the row; dtypes and transforms of each stream."""
    for x, teacher, transform in streams(vocab, kind, mixture):
        weight, out = torch.randn(len(x)), torch.full_like(x[None], math.nan)
        found = by_kernel(x[None], teacher, weight, transform, out)
        assert found.divergence is not None
        check(found.divergence, out[0], x, teacher, transform, weight)
        torch.testing.assert_close(found.losses, weight * found.divergence, rtol=1e-6, atol=0.0)
        assert torch.equal(by_kernel(x[None], teacher, weight, transform).losses, found.losses)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_nearly_equal_rows_of_a_real_size(kind: str, mixture: float) -> None:
    """What is kept of a block is relative to the maxima so far; no digit of the difference is lost by it."""
    z = torch.randn(3, 32003).sort(-1).values * torch.tensor([[0.3], [2.0], [6.0]])
    for size in (1e-2, 3e-5):
        teacher = Teacher((z + size * torch.randn_like(z))[None], PLAIN, kind, mixture)
        out = torch.empty_like(z[None])
        found = by_kernel(z[None], teacher, torch.ones(3), PLAIN, out)
        exact = expected(z, teacher, PLAIN, torch.ones(3))
        assert found.divergence is not None and (found.divergence >= 0).all() and exact.value.min() > 1e-12
        torch.testing.assert_close(found.divergence.double(), exact.value, rtol=1e-3, atol=0.0)
        error = (out[0].double() - exact.gradient).norm(dim=-1)
        assert (error <= 3e-3 * exact.gradient.norm(dim=-1)).all()


@pytest.mark.parametrize("mixture", (1e-6, 1 - 1e-6))
def test_shares_near_an_end(mixture: float) -> None:
    def run(logits: Tensor, teacher: Teacher, weights: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(logits)
        found = by_kernel(logits, teacher, weights, PLAIN, out).divergence
        assert found is not None
        return found, out

    check_small_share(run, mixture)


def test_maxima_that_rise_apart() -> None:
    """The terms of each block are relative to other maxima, of either row, some of them far below the last."""
    up = torch.arange(5000) * 0.05
    early, late = torch.full((5000,), -3e4), torch.full((5000,), -math.inf)
    early[:1500], late[3000:] = torch.randn(1500), torch.randn(2000)
    z = torch.stack([up, up, -up, torch.randn(5000), early, torch.where(late.isinf(), -200.0, late), late, torch.randn(5000)])
    w = torch.stack([up + 0.1 * torch.randn(5000), -up, up, up, torch.randn(5000), late, late + 1.0, early.clamp(min=-300)])
    w[5, 3000:] += torch.randn(2000)
    w[5, :3000] = -250.0
    weight = torch.linspace(0.5, 1.5, len(z))
    for kind, mixture in KINDS:
        teacher = Teacher(w[None], PLAIN, kind, mixture)
        out = torch.empty_like(z[None])
        found = by_kernel(z[None], teacher, weight, PLAIN, out)
        assert found.divergence is not None
        check(found.divergence, out[0], z, teacher, PLAIN, weight)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_the_same_as_one_after_the_other(kind: str, mixture: float) -> None:
    """With the terms of an objective, rows that are not read, and rows whose loss has no divergence."""
    z, w = row_pairs(1291)
    n = len(z)
    z, w, weight = z.view(2, n // 2, -1), w.view(2, n // 2, -1), torch.randn(n)
    weight[::3] = 0.0
    mask = torch.arange(n) % 5 != 4
    weight[~mask] = 0.0
    for objective, transform in ((WITHOUT, PLAIN), (WITHOUT, CAPPED), (WITH, CAPPED)):
        teacher = Teacher(w, COOL, kind, mixture)
        of, out, other = (
            rows_of(n, 1291, objective, weight, mask=mask),
            torch.full_like(z, math.nan),
            torch.full_like(z, math.nan),
        )
        found = cpu.fused(z, of, objective, transform, out, teacher=teacher)
        apart = two_visits(cpu, z, of, objective, transform, other, n, teacher)  # type: ignore[arg-type]
        for x, y in zip((*found, out), (*apart, other), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        unread = out.view(n, -1)[~mask]
        assert (unread == 0).all() and all((x[~mask] == 0).all() for x in found if x is not None)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_rows_that_are_not_needed_may_hold_anything(kind: str, mixture: float) -> None:
    """A second row without a weight may hold anything; so may both where a row is not read."""
    z, w = torch.randn(2, 4, 1031).unbind()
    mask, weight = torch.tensor([True, True, True, False]), torch.tensor([0.7, 0.0, 0.0, 0.7])
    for objective in (WITHOUT, WITH):
        clean, out = torch.empty_like(z[None]), torch.empty_like(z[None])
        expected = by_kernel(z[None], Teacher(w[None], PLAIN, kind, mixture), weight, PLAIN, clean, objective, mask=mask)
        x, y = z.clone(), w.clone()
        x[3], y[3], y[1], y[2, 5] = math.nan, math.inf, math.nan, -math.inf
        found = by_kernel(x[None], Teacher(y[None], PLAIN, kind, mixture), weight, PLAIN, out, objective, mask=mask)
        assert torch.equal(out, clean) and torch.equal(found.losses, expected.losses) and out[0, :3].all()
        no_weight = by_kernel(x[None], Teacher(y[None], PLAIN, kind, mixture), None, PLAIN, out, objective, mask=mask)
        assert torch.equal(out[0, 1:], clean[0, 1:]) and not torch.equal(no_weight.losses[:1], found.losses[:1])


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_nan_and_infinite_rows(kind: str, mixture: float) -> None:
    z, w = torch.randn(2, 7, 2100).unbind()
    z[0, 5], w[1, 2099], z[2], w[3] = math.nan, math.nan, -math.inf, -math.inf
    behind, front = (z, w) if kind == "forward" else (w, z)
    front[4, 7], behind[5, 1500], z[6, 9], w[6, 9] = (-math.inf,) * 4
    teacher, weight, out = Teacher(w[None], PLAIN, kind, mixture), torch.ones(7), torch.empty_like(z[None])
    found = by_kernel(z[None], teacher, weight, PLAIN, out)
    assert found.divergence is not None
    assert found.divergence.isnan().tolist() == [True] * 4 + [False] * 3 and out[0, :4].isnan().all()
    assert found.divergence.isinf().tolist() == [kind != "jsd" and i == 5 for i in range(7)]
    exact = expected(z[4:], teacher._replace(logits=w[None, 4:]), PLAIN, weight[4:])
    finite = exact.gradient.isfinite()
    torch.testing.assert_close(out[0, 4:].double()[finite], exact.gradient[finite], rtol=1e-5, atol=1e-7)
    assert torch.equal(out[0, 4:].isfinite(), finite) and out[0, 6, 9] == 0


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_gradients_in_place_and_behind_the_reads(kind: str, mixture: float) -> None:
    """Into the logits' own memory, or, narrower, from the start of each row of theirs."""
    vocab = 2085
    z, w = row_pairs(vocab)
    n = len(z)
    teacher, weight = Teacher(w[None], COOL, kind, mixture), torch.randn(n)
    for transform, objective in ((PLAIN, WITHOUT), (CAPPED, WITHOUT), (PLAIN, WITH)):
        apart = torch.full((1, n, vocab), math.nan)
        by_kernel(z[None], teacher, weight, transform, apart, objective)
        assert apart.isfinite().all()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = z[None].clone()
            rows = torch.as_strided(logits.view(dtype), (1, n, vocab), (0, vocab * 4 // dtype.itemsize, 1))
            by_kernel(logits, teacher, weight, transform, rows, objective)
            assert torch.equal(rows, apart.to(dtype)), (transform, dtype)
        narrow = z[None].bfloat16()
        other = torch.empty_like(narrow)
        by_kernel(narrow, teacher, weight, transform, other, objective)
        by_kernel(narrow, teacher, weight, transform, narrow, objective)
        assert torch.equal(narrow, other)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_a_row_depends_on_nothing_but_itself(kind: str, mixture: float) -> None:
    """Bitwise: not on the number of threads, nor on the rows beside it, nor on what a thread's memory held before."""
    z, w = row_pairs(1291)
    z, w = torch.cat([z, z]).bfloat16(), torch.cat([w, w])
    n = len(z)
    weight, results = torch.randn(n), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        teacher, out = Teacher(w.view(2, n // 2, -1), COOL, kind, mixture), torch.full((2, n // 2, 1291), math.nan).bfloat16()
        small = torch.randn(1, threads, 7)  # rows of another size
        by_kernel(small, Teacher(torch.randn(1, threads, 7), PLAIN, "reverse", 0.0), torch.ones(threads), out=small)
        found = by_kernel(z.view(2, n // 2, -1), teacher, weight, CAPPED, out, WITHOUT)
        results.append((*found, out.view(n, -1)))
    torch.set_num_threads(1)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    rows = rows_of(n, 1291, WITHOUT, weight)[3:4]
    logits, teacher = z[None, 3:4].clone(), Teacher(w[None, 3:4].clone(), COOL, kind, mixture)
    alone = cpu.fused(logits, rows, WITHOUT, CAPPED, logits, teacher=teacher)
    for x, y in zip((*alone, logits[0]), results[0], strict=True):
        assert torch.equal(x[0], y[3])


def test_a_formula_that_cannot_be_traced_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def branching(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
        sign = 1.0 if (advantage >= -10.0).all() else -1.0
        return -sign * advantage * logp, -sign * advantage

    monkeypatch.setattr(cpu, "fall_back", lambda *_: None)
    z, w = row_pairs(300)
    outs = [torch.empty_like(z[None]) for _ in range(2)]
    teacher, weight = Teacher(w[None], COOL, "reverse", 0.0), torch.rand(len(z))
    objectives = WITHOUT, Objective(Custom(branching))
    found, other = (by_kernel(z[None], teacher, weight, CAPPED, out, of) for out, of in zip(outs, objectives, strict=True))
    for x, y in zip((*found, outs[0]), (*other, outs[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_calls_that_cannot_be_right_are_refused() -> None:
    x, targets, memory = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(4, 2)
    stream = _cpu.Stream(x.data_ptr(), 0, 2, 16, 8, 1.0, 0.0, 1.0, 0)
    program = _cpu.Program("nothing", 0, 2, [], [0, 0, 0])
    found, to = [row.data_ptr() for row in memory], (0, 0, 16, 8, 8, 2)

    def call(program: Any, direction: int, to: tuple[int, ...], found: list[int]) -> None:
        _cpu.divergence_fused(program, [], [], False, stream, stream, direction, 0.0, *to, targets.data_ptr(), 0, 0, *found, 1)  # type: ignore[call-arg]

    call(program, 0, to, found)
    assert (memory[3] == 0).all() and (memory[0] == -math.log(8)).all()
    with pytest.raises(ValueError, match="direction=3"):
        call(program, 3, to, found)
    with pytest.raises(ValueError, match="divergence=0"):
        call(program, 0, to, [*found[:3], 0])
    with pytest.raises(ValueError, match="out_dtype=7"):
        call(program, 0, (0, 7, *to[2:]), found)
    with pytest.raises(ValueError, match="does not give a loss and two slopes"):
        call(_cpu.Program("one", 0, 2, [], [0]), 0, to, found)
