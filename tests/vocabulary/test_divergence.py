"""Exact divergences from a second stream of rows: values and gradients against float64, from each source."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_kernels.vocabulary.backends import load, pick
from grpo_kernels.vocabulary.merging import merge
from grpo_kernels.vocabulary.rows import RowStats, RowTransform, Slopes, Teacher, partials_of
from grpo_kernels.vocabulary.sources import Logits
from grpo_kernels.vocabulary.stage import vocabulary_stage
from support.divergences import KINDS, PLAIN, check, check_small_share, expected, row_pairs

Tensor = torch.Tensor

V = 131


def stage(source: Any, transform: RowTransform, *tensors: Any, read: Tensor | None = None) -> Tensor:
    """The divergence of each row, differentiable."""
    n = tensors[0].shape[0] if tensors[0].dim() == 2 else tensors[0].shape[0] * tensors[0].shape[1]
    targets = torch.zeros(n, dtype=torch.int64)
    return vocabulary_stage(source, ("divergence",), ("divergence",), targets, read, transform, *tensors)[1]["divergence"]


def of_logits(
    logits: Tensor, teacher: Teacher, transform: RowTransform, backend: str, read: Tensor | None = None,
    upstream: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(divergence [n], the gradient of its weighted sum in the logits' shape, the weights)."""
    leaf = logits.detach().clone().requires_grad_()
    found = stage(Logits(pick(backend, logits.device), teacher=teacher), transform, leaf, read=read)
    upstream = torch.randn(found.shape) if upstream is None else upstream
    (gradient,) = torch.autograd.grad((found * upstream).sum(), leaf)
    return found.detach(), gradient, upstream


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")], ids=" ".join)
@pytest.mark.parametrize("kind, mixture", KINDS)
def test_value_and_gradient(backend: str, kind: str, mixture: float, dtypes: tuple[str, str]) -> None:
    z, w = row_pairs(V)
    z, w = z.to(getattr(torch, dtypes[0])), w.to(getattr(torch, dtypes[1]))
    n = z.shape[0]
    warm = RowTransform(-0.7, 9.0, torch.linspace(0.4, 2.0, n))
    cases = [(PLAIN, PLAIN), (warm, RowTransform(1.0, 0.0, 0.8)), (RowTransform(1.0, 0.0, 1.3), RowTransform(0.9, 7.0, 1.1))]
    for transform, of_teacher in cases:
        teacher = Teacher(w.view(2, n // 2, V), of_teacher, kind, mixture)
        found, gradient, upstream = of_logits(z.view(2, n // 2, V), teacher, transform, backend)
        check(found, gradient.view(n, V), z, teacher, transform, upstream)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_nearly_equal_rows(backend: str, kind: str, mixture: float) -> None:
    """Down to 1e-10 the value keeps three digits, and none is negative."""
    base = torch.cat([torch.randn(20, V) * scale for scale in (0.1, 3.0, 8.0)])
    of_size_one = mixture * (1.0 - mixture) or 1.0  # twice the divergence, roughly
    for goal in (1e-3, 1e-6, 1e-8, 2e-10):
        size = math.sqrt(2.0 * goal / of_size_one)
        teacher = Teacher((base + size * torch.randn_like(base))[None], PLAIN, kind, mixture)
        found, gradient, upstream = of_logits(base[None], teacher, PLAIN, backend)
        check(found, gradient[0], base, teacher, PLAIN, upstream)
        exact = expected(base, teacher, PLAIN, upstream)
        counts = exact.value >= 1e-10
        assert counts.any(), exact.value.max()
        error = (found.double() - exact.value).abs() / exact.value
        assert error[counts].max() <= 1e-3, (size, error[counts].max())
        gradient_error = (gradient[0].double() - exact.gradient).norm(dim=-1) / exact.gradient.norm(dim=-1)
        assert gradient_error[counts].max() <= 3e-3, (size, gradient_error[counts].max())


@pytest.mark.parametrize("mixture", (1e-6, 1 - 1e-6))
def test_shares_near_an_end(backend: str, mixture: float) -> None:
    """In fp32, 1 less the larger share has few digits of the smaller one, and m/p - 1 few of a small m/p."""
    check_small_share(lambda z, teacher, weights: of_logits(z, teacher, PLAIN, backend, None, weights)[:2], mixture)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_rows_that_agree_but_for_a_constant(kind: str, mixture: float) -> None:
    """Logits 83 apart: the difference of two has the rounding of 83, but those to the largest of a row have not."""
    base = torch.randn(4, V) * 6.0
    teacher = Teacher((base - 3.0 + 0.1 * torch.randn(4, V))[None], PLAIN, kind, mixture)
    found, gradient, upstream = of_logits(base[None] + 80.0, teacher, PLAIN, "eager")
    check(found, gradient[0], base + 80.0, teacher, PLAIN, upstream)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_impossible_ids(backend: str, kind: str, mixture: float) -> None:
    """-inf in both streams counts nothing; where only the second distribution is 0, the KL is infinite, and the JSD is not."""
    z, w = row_pairs(V)
    z[:, 3], w[:, 3] = -math.inf, -math.inf
    behind, front = (z, w) if kind == "forward" else (w, z)
    front[1, 7] = -math.inf  # its own terms vanish
    behind[2, 9] = -math.inf
    teacher = Teacher(w[None], PLAIN, kind, mixture)
    found, gradient, upstream = of_logits(z[None], teacher, PLAIN, backend)
    check(found, gradient[0], z, teacher, PLAIN, upstream)
    assert found.isinf().tolist() == [kind != "jsd" and i == 2 for i in range(len(z))]
    assert (gradient[0][:, 3] == 0).all()


FAR = (-60.0, -88.0, -100.0, -300.0, -715.0, -2000.0, -1e30)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_a_far_target(backend: str, kind: str, mixture: float) -> None:
    """The gradient of the target's column, which is formed apart, is that of any other column."""
    z, w = torch.randn(2, 2 * len(FAR), V)
    z[: len(FAR), 0], w[len(FAR) :, 0] = torch.tensor(FAR), torch.tensor(FAR)
    teacher = Teacher(w[None], PLAIN, kind, mixture)
    found, gradient, upstream = of_logits(z[None], teacher, PLAIN, backend)
    check(found, gradient[0], z, teacher, PLAIN, upstream)
    z, w = z.flip(1), w.flip(1)
    _, elsewhere, _ = of_logits(z[None], teacher._replace(logits=w[None]), PLAIN, backend, upstream=upstream)
    torch.testing.assert_close(gradient[0], elsewhere[0].flip(1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_an_impossible_target_that_the_other_side_hardly_chooses(backend: str, kind: str, mixture: float) -> None:
    """A divergence that is finite, because the probability is 0 in fp32, has a finite gradient."""
    front, behind = torch.randn(2, len(FAR), V)
    front[:, 0], behind[:, 0] = torch.tensor(FAR), -math.inf
    z, w = (behind, front) if kind == "forward" else (front, behind)
    found, gradient, _ = of_logits(z[None], Teacher(w[None], PLAIN, kind, mixture), PLAIN, backend)
    finite = found.isfinite()
    assert finite[FAR.index(-300.0) :].all() and gradient[0, finite].isfinite().all()


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_logits_of_1e30(backend: str, kind: str, mixture: float) -> None:
    """A row far from 0 keeps its differences beside one that is not: the target's, and those of maxima that rise along the row."""
    vocab = 2600
    rising = torch.randn(4, vocab).sort(-1).values * 3.0
    rising[:, 0] = -2.0
    level = torch.tensor([1e30, -1e30, 3e38, 1e30])[:, None].expand(4, vocab).contiguous()
    level[3, 5] = 0.0  # and one id of no probability
    for z, w in (
        ((rising, level), (level, rising)) if kind == "jsd" else ((rising, level),) if kind == "forward" else ((level, rising),)
    ):
        teacher = Teacher(w[None], PLAIN, kind, mixture)
        found, gradient, upstream = of_logits(z[None], teacher, PLAIN, backend)
        exact = expected(z, teacher, PLAIN, upstream)
        torch.testing.assert_close(found.double(), exact.value, rtol=1e-5, atol=0.0)
        assert (gradient[0] - exact.gradient).abs().max() <= 1e-5 * exact.gradient.abs().max()
        error = (gradient[0, :, 0] - exact.gradient[:, 0]).abs() / exact.gradient[:, 0].abs()
        assert error.max() <= 1e-3, error


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_nan_and_empty_rows(backend: str, kind: str, mixture: float) -> None:
    z, w = torch.randn(2, 6, V).unbind()
    z[0, 5], w[1, 5], z[2], w[3] = math.nan, math.nan, -math.inf, -math.inf
    teacher = Teacher(w[None], PLAIN, kind, mixture)
    read = torch.tensor([True] * 5 + [False])
    z[5], w[5] = math.nan, math.inf
    found, gradient, _ = of_logits(z[None], teacher, PLAIN, backend, read)
    assert found.isnan().tolist() == [True] * 4 + [False] * 2
    assert found[5] == 0 and (gradient[0, 5] == 0).all() and found[4] > 0
    assert gradient[0, :2].isnan().all() and gradient[0, 4].isfinite().all()


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_sizes(backend: str, kind: str, mixture: float) -> None:
    """No rows, one id, rows in any layout."""
    none = Teacher(torch.empty(1, 0, V), PLAIN, kind, mixture)
    assert of_logits(torch.empty(1, 0, V), none, PLAIN, backend)[0].shape == (0,)
    one = Teacher(torch.randn(1, 3, 1), PLAIN, kind, mixture)
    found, gradient, _ = of_logits(torch.randn(1, 3, 1), one, PLAIN, backend)
    assert (found == 0).all() and (gradient == 0).all()
    wide, wide_teacher = torch.randn(3, 5, 2 * V)[:, 1:, :V], torch.randn(4, 3, V + 3).transpose(0, 1)[..., 3:]
    teacher = Teacher(wide_teacher, PLAIN, kind, mixture)
    found, gradient, upstream = of_logits(wide, teacher, PLAIN, backend)
    check(
        found,
        gradient.reshape(-1, V),
        wide.reshape(-1, V),
        teacher._replace(logits=wide_teacher.reshape(-1, V)),
        PLAIN,
        upstream,
    )


@pytest.mark.parametrize("kind, mixture", KINDS)
def test_parts_of_rows_merge(backend: str, kind: str, mixture: float) -> None:
    """Also parts of only -inf, of no weight beside the others, and of nearly equal rows."""
    z, w = row_pairs(V)
    near = torch.randn(4, V) * 3.0
    z, w = torch.cat([z, near, z[:4]]), torch.cat([w, near + 1e-5 * torch.randn(4, V), w[:4]])
    z[-4, :50], w[-3, 50:90], z[-2, :50], w[-2, :50], z[-1, :50] = (-math.inf,) * 2 + (-300.0,) * 2 + (-300.0,)
    module, names, targets = load(backend), partials_of(("entropy", "divergence"), kind), torch.zeros(len(z), dtype=torch.int64)

    def stats_of(columns: slice) -> RowStats:
        teacher = Teacher(w[None, :, columns], PLAIN, kind, mixture)
        return module.stats(z[None, :, columns], targets - columns.start, None, PLAIN, names, teacher=teacher)

    first = tuple(name for name in names if not name.startswith("mixed"))
    parts = [stats_of(columns).values[: len(first)] for columns in (slice(0, 50), slice(50, 90), slice(90, V))]
    teacher = Teacher(w[None], PLAIN, kind, mixture)
    merged, whole = merge(torch.stack(parts), first, None, None, teacher), stats_of(slice(0, V))
    exact = expected(z, teacher, PLAIN, torch.ones(len(z)))
    torch.testing.assert_close(merged.log_sums, whole.log_sums, rtol=2e-5, atol=1e-6)
    if kind != "jsd":
        torch.testing.assert_close(merged.divergence.double(), exact.value, rtol=1e-4, atol=1e-12)
        return
    sums = [
        module.mixed(z[None, :, c], merged, PLAIN, teacher._replace(logits=w[None, :, c]), None)
        for c in (slice(0, 50), slice(50, 90), slice(90, V))
    ]
    student, of_teacher = torch.stack(sums).sum(0)
    found = mixture * of_teacher + (1 - mixture) * student
    torch.testing.assert_close(found.double(), exact.value, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("floor", [torch.finfo(torch.float32).min, -1e30, -2e4])
@pytest.mark.parametrize("kind, mixture", KINDS)
def test_a_part_that_a_finite_number_masks(backend: str, kind: str, mixture: float, floor: float) -> None:
    """The columns of a shard hold the number that trainers write for -inf, in both streams or in the one that may be 0 there."""
    z, w = torch.randn(2, 4, V)
    z[0, :50], w[0, :50], (w if kind == "forward" else z)[1, :50], z[2:, 50:] = (floor,) * 4
    w[2:, 50:] = floor
    names, targets = partials_of(("entropy", "sum_squares", "top_id", "divergence"), kind), torch.full((4,), 7)
    names = tuple(name for name in names if not name.startswith("mixed"))
    teacher, module = Teacher(w[None], PLAIN, kind, mixture), load(backend)
    found = [
        module.stats(z[None, :, c], targets - c.start, None, PLAIN, names, teacher=teacher._replace(logits=w[None, :, c]))
        for c in (slice(0, 50), slice(50, V))
    ]
    starts = torch.tensor([[0], [50]], dtype=torch.int32).expand(2, 4)
    merged = merge(torch.stack([part.values for part in found]), names, None, starts, teacher)
    logp, exact = z.double().log_softmax(-1), expected(z, teacher, PLAIN, torch.ones(4))
    entropy = -torch.where(logp.exp() > 0, logp.exp() * logp, 0.0).sum(-1)
    torch.testing.assert_close(merged.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged.sum_squares.double(), logp.exp().square().sum(-1), rtol=1e-5, atol=1e-6)
    if kind != "jsd":
        torch.testing.assert_close(merged.divergence.double(), exact.value, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(merged.log_sums, module.stats(z[None], targets, None, PLAIN, names, teacher=teacher).log_sums)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_a_shard_without_probability_may_have_an_impossible_id(backend: str, kind: str) -> None:
    """Its own KL is infinite, and in the row its probabilities are 0."""
    front, behind, module = torch.randn(2, V), torch.randn(2, V), load(backend)
    front[:, :50] -= 400.0
    behind[:, 10] = -math.inf
    z, w = (front, behind) if kind == "reverse" else (behind, front)
    names, targets = partials_of(("divergence",), kind), torch.zeros(2, dtype=torch.int64)

    def stats_of(columns: slice) -> RowStats:
        teacher = Teacher(w[None, :, columns], PLAIN, kind, 0.0)
        return module.stats(z[None, :, columns], targets, None, PLAIN, names, teacher=teacher)

    parts, whole = [stats_of(columns) for columns in (slice(0, 50), slice(50, V))], stats_of(slice(0, V))
    merged = merge(torch.stack([part.values for part in parts]), names, None, None, whole)
    assert parts[0].divergence.isinf().all() and whole.divergence.isfinite().all()
    torch.testing.assert_close(merged.divergence, whole.divergence, rtol=1e-5, atol=1e-6)


def test_with_other_statistics(backend: str) -> None:
    """One pull for the slopes of log-prob, entropy and divergence together."""
    z, w = row_pairs(V)
    n = len(z)
    for kind, mixture in KINDS:
        teacher, targets = Teacher(w[None], RowTransform(1.0, 0.0, 0.7), kind, mixture), torch.arange(n)
        a, b, c = torch.randn(3, n)
        leaf, double = z[None].clone().requires_grad_(), z.double().requires_grad_()
        source = Logits(pick(backend, leaf.device), teacher=teacher)
        names = ("entropy", "divergence")
        logps, found = vocabulary_stage(source, names, names, targets, None, RowTransform(1.0, 5.0, 1.2), leaf)
        (logps * a + found["entropy"] * b + found["divergence"] * c).sum().backward()
        exact = expected(z, teacher, RowTransform(1.0, 5.0, 1.2), c)
        log_p = (5.0 * torch.tanh(double / 5.0) * 1.2).log_softmax(-1)
        rest = log_p[torch.arange(n), targets] * a - (log_p.exp() * log_p).sum(-1) * b
        (gradient,) = torch.autograd.grad(rest.sum(), double)
        torch.testing.assert_close(leaf.grad[0].double(), gradient + exact.gradient, rtol=2e-5, atol=3e-6)  # type: ignore[index]


def test_rows_without_a_slope_are_not_looked_at(backend: str) -> None:
    z, w = torch.randn(2, 3, V).unbind()
    teacher, module, targets = Teacher(w[None], PLAIN, "reverse", 0.0), load(backend), torch.zeros(3, dtype=torch.int64)
    stats = module.stats(z[None], targets, None, PLAIN, partials_of(("divergence",), "reverse"), teacher=teacher)
    z[1], w[1] = math.nan, math.nan
    slopes = Slopes(torch.zeros(3), teacher=torch.tensor([1.0, 0.0, 2.0]))
    out = torch.full((1, 3, V), math.nan)
    module.pull(z[None], targets, stats, slopes, PLAIN, out, teacher=teacher)
    assert (out[0, 1] == 0).all() and out.isfinite().all() and (out[0, 0] != 0).all()
