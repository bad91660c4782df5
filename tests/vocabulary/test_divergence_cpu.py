"""The C++ kernels over two streams of rows, for every instruction set that this processor runs. What every backend has to do is in
test_divergence.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from grpo_kernels.vocabulary.backends import cpu, eager, visit
from grpo_kernels.vocabulary.rows import RowStats, RowTransform, Slopes, Teacher, partials_of
from support.divergences import CAPPED, COOL, KINDS, PLAIN, check, expected, row_pairs, streams

if cpu.available() is not None:
    pytest.skip(cpu.available() or "", allow_module_level=True)

from grpo_kernels import _cpu

Tensor = torch.Tensor


@pytest.fixture(params=_cpu.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _cpu.use_isa(request.param)
    yield request.param
    _cpu.use_isa(_cpu.isas()[0])


def names_of(teacher: Teacher, *others: str) -> tuple[str, ...]:
    return partials_of(("divergence", *others), teacher.kind)


def stats_of(logits: Tensor, teacher: Teacher, transform: RowTransform, read: Tensor | None = None) -> RowStats:
    targets = torch.zeros(logits.shape[0] * logits.shape[1], dtype=torch.int64)
    return visit(cpu, logits, targets, read, transform, names_of(teacher, "entropy", "sum_squares", "top_id"), teacher)


def pulled(
    logits: Tensor, stats: RowStats, teacher: Teacher, transform: RowTransform, slopes: Slopes, out: Tensor | None = None
) -> Tensor:
    targets = torch.zeros(stats.max.numel(), dtype=torch.int64)
    out = torch.full_like(logits, math.nan) if out is None else out
    cpu.pull(logits, targets, stats, slopes, transform, out, teacher=teacher)
    return out


def of_divergence(weights: Tensor) -> Slopes:
    return Slopes(torch.zeros_like(weights), teacher=weights)


@pytest.mark.parametrize("vocab", (1, 7, 33, 1030, 5003))
@pytest.mark.parametrize("kind, mixture", KINDS)
def test_values_and_gradients(kind: str, mixture: float, vocab: int) -> None:
    """Blocks and vectors that end anywhere; a maximum late in the row; dtypes and transforms of each stream."""
    for x, teacher, transform in streams(vocab, kind, mixture):
        weights = torch.randn(len(x))
        stats = stats_of(x[None], teacher, transform)
        gradient = pulled(x[None], stats, teacher, transform, of_divergence(weights))
        check(stats.divergence, gradient[0], x, teacher, transform, weights)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_nearly_equal_rows_of_a_real_size(kind: str, mixture: float) -> None:
    """The maxima of both rows move while they are visited; no digit of the difference is lost by it."""
    z = torch.randn(3, 32003).sort(-1).values * torch.tensor([[0.3], [2.0], [6.0]])
    for size in (1e-2, 3e-5):
        teacher = Teacher((z + size * torch.randn_like(z))[None], PLAIN, kind, mixture)
        stats = stats_of(z[None], teacher, PLAIN)
        exact = expected(z, teacher, PLAIN, torch.ones(3))
        assert (stats.divergence >= 0).all() and exact.value.min() > 1e-12
        torch.testing.assert_close(stats.divergence.double(), exact.value, rtol=1e-3, atol=0.0)
        gradient = pulled(z[None], stats, teacher, PLAIN, of_divergence(torch.ones(3)))[0].double()
        assert ((gradient - exact.gradient).norm(dim=-1) <= 3e-3 * exact.gradient.norm(dim=-1)).all()


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_partials_of_the_student_are_those_of_a_single_stream(kind: str, mixture: float) -> None:
    z, w = row_pairs(1031)
    z[0, 1030] = z[0].max() + 2.0
    teacher, targets = Teacher(w[None], COOL, kind, mixture), torch.tensor([0, 1030, -1, 1031, 5, 6, 7, 8, 9, 10])
    names = partials_of(("entropy", "sum_squares", "top_id"))
    alone = cpu.stats(z[None], targets, None, PLAIN, names)
    beside = cpu.stats(z[None], targets, None, PLAIN, names_of(teacher, "entropy", "sum_squares", "top_id"), teacher=teacher)
    for name in ("max", "target", "top"):
        torch.testing.assert_close(beside.get(name), alone.get(name), rtol=0, atol=0, equal_nan=True)
    for name in ("sum", "weighted", "squares"):
        torch.testing.assert_close(beside.get(name), alone.get(name), rtol=1e-6, atol=1e-6)
    reference = eager.stats(z[None], targets, None, PLAIN, names_of(teacher), teacher=teacher)
    for name in ("teacher_max", "teacher_sum", "cross"):
        torch.testing.assert_close(beside.get(name), reference.get(name), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_slopes_of_everything_at_once(kind: str, mixture: float) -> None:
    """The target's element too, and rows in which only the teacher's slope is 0: their teacher is not read."""
    z, w = row_pairs(77)
    n = len(z)
    teacher, targets = Teacher(w[None], COOL, kind, mixture), torch.arange(n)
    stats = visit(cpu, z[None], targets, None, CAPPED, names_of(teacher, "entropy", "sum_squares"), teacher)
    slopes = Slopes(*torch.randn(5, n).unbind())
    assert slopes.teacher is not None
    slopes.teacher[::3] = 0.0
    w[::3] = math.nan
    apart = [torch.full_like(z[None], math.nan) for _ in range(2)]
    cpu.pull(z[None], targets, stats, slopes._replace(teacher=None), CAPPED, apart[0])
    cpu.pull(z[None], targets, stats, of_divergence(slopes.teacher), CAPPED, apart[1], teacher=teacher)
    together = torch.full_like(z[None], math.nan)
    cpu.pull(z[None], targets, stats, slopes, CAPPED, together, teacher=teacher)
    assert together.isfinite().all()
    torch.testing.assert_close(together, apart[0] + apart[1], rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_rows_do_not_depend_on_threads_and_neighbours(kind: str, mixture: float) -> None:
    z, w = row_pairs(1291)
    z, w = torch.cat([z, z]).bfloat16(), torch.cat([w, w])
    n = len(z)
    weights = torch.randn(n)
    read = torch.arange(n) % 5 != 0
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        teacher = Teacher(w.view(2, n // 2, -1), COOL, kind, mixture)
        stats = stats_of(z.view(2, n // 2, -1), teacher, CAPPED, read)
        gradient = pulled(z.view(2, n // 2, -1), stats, teacher, CAPPED, of_divergence(torch.where(read, weights, 0.0)))
        results.append((stats.values.view(torch.int32), gradient.view(n, -1).view(torch.int16)))
    torch.set_num_threads(1)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    teacher = Teacher(w[None, 3:4], COOL, kind, mixture)  # a row by itself, at another address
    alone = stats_of(z[None, 3:4].clone(), teacher, CAPPED)
    assert torch.equal(alone.values.view(torch.int32)[:, 0], results[0][0][:, 3])
    assert (results[0][1][~read] == 0).all()
    of_both = [alone.names.index(name) for name in ("teacher_max", "teacher_sum", "cross", "excess")]
    assert stats.values[of_both][:, ~read].unique(dim=1).flatten().tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_gradients_in_place_and_behind_the_reads(kind: str, mixture: float) -> None:
    """Into the logits' own memory, or, narrower, from the start of each row of theirs."""
    vocab = 2085
    z, w = row_pairs(vocab)
    n = len(z)
    teacher = Teacher(w[None], COOL, kind, mixture)
    for transform in (PLAIN, CAPPED):
        stats = stats_of(z[None], teacher, transform)
        slopes = Slopes(torch.randn(n), teacher=torch.randn(n))
        slopes.target[2], slopes.teacher[2] = 0.0, 0.0  # type: ignore[index]
        apart = pulled(z[None], stats, teacher, transform, slopes)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = z[None].clone()
            rows = torch.as_strided(logits.view(dtype), (1, n, vocab), (0, vocab * 4 // dtype.itemsize, 1))
            pulled(logits, stats, teacher, transform, slopes, rows)
            assert torch.equal(rows, apart.to(dtype)), (transform, dtype)


def test_calls_that_cannot_be_right_are_refused() -> None:
    x, targets, memory = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(9, 2)
    stream = _cpu.Stream(x.data_ptr(), 0, 2, 16, 8, 1.0, 0.0, 1.0, 0)
    at = [row.data_ptr() for row in memory]
    vectors, of_both = [targets.data_ptr(), 0, *at[:3], 0, 0, 0], at[3:7]
    _cpu.divergence_stats(stream, stream, 1, 8, 0, 2, *vectors, *of_both, 1)
    with pytest.raises(ValueError, match="direction=3"):
        _cpu.divergence_stats(stream, stream, 3, 8, 0, 2, *vectors, *of_both, 1)
    with pytest.raises(ValueError, match="cross=0"):
        _cpu.divergence_stats(stream, stream, 1, 8, 0, 2, *vectors, *of_both[:2], 0, of_both[3], 1)
    with pytest.raises(ValueError, match="inner_count=1"):
        other = _cpu.Stream(x.data_ptr(), 0, 1, 8, 8, 1.0, 0.0, 1.0, 0)
        _cpu.divergence_mixed(stream, other, 0.5, 8, 0, 2, 0, *at[:7], 1)
