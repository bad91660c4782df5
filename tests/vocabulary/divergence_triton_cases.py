"""The Triton kernels over two streams, against float64. Run as triton_cases.py is."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kernels import Exact, Options, TokenSets, token_divergence
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends import visit
from grpo_kernels.vocabulary.backends.triton_choices import LAUNCH, Choice
from grpo_kernels.vocabulary.rows import RowStats, RowTransform, Slopes, Teacher, partials_of
from support.divergences import KINDS, PLAIN, check, check_small_share, expected, of_listed_ids, row_pairs

Tensor = torch.Tensor

WARM = RowTransform(-0.7, 9.0, torch.linspace(0.4, 2.0, 5))
COOL = RowTransform(1.0, 0.0, 0.8)
CAPPED = RowTransform(1.0, 30.0, 1.25)
SINGLE, HALF = torch.float32, torch.bfloat16
SOME = KINDS[:2] + KINDS[3:]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that short rows have several."""
    monkeypatch.setitem(LAUNCH, "two", Choice(32, 1))
    monkeypatch.setitem(LAUNCH, "mixed", Choice(32, 1))


def padded(x: Tensor, aligned: bool) -> Tensor:
    """Rows [1, n, vocab] that begin at multiples of 16 elements, or do not."""
    vocab = x.shape[-1]
    width = vocab + (-vocab % 16 if aligned else 1 + -vocab % 2)
    wide = torch.full((1, x.shape[0], width), math.nan, dtype=x.dtype)
    wide[..., :vocab] = x
    return wide[..., :vocab]


def stats_of(logits: Tensor, teacher: Teacher, transform: RowTransform, read: Tensor | None = None, *others: str) -> RowStats:
    targets = torch.arange(logits.shape[1]) % logits.shape[2]
    return visit(backend, logits, targets, read, transform, partials_of(("divergence", *others), teacher.kind), teacher)


@pytest.mark.parametrize("kind, mixture", SOME)
def test_values_and_gradients(kind: str, mixture: float) -> None:
    """Tiles that end anywhere, a maximum in the last one, dtypes and transforms of each stream: a softcap of one, and of both."""
    cases = [
        (1, SINGLE, SINGLE, PLAIN, PLAIN, True),
        (531, SINGLE, HALF, WARM, CAPPED, True),
        (530, HALF, HALF, COOL, PLAIN, False),
    ]
    for vocab, dtype, of_teacher, transform, teacher_transform, aligned in cases:
        z, w = (x[[1, 2, 4, 5, 8]] for x in row_pairs(vocab))
        z[0, -1], w[1, -1] = z.max() + 3.0, w.max() + 3.0
        z, w = z.to(dtype), w.to(of_teacher)
        logits, teacher = padded(z, aligned), Teacher(padded(w, aligned), teacher_transform, kind, mixture)
        weights = torch.randn(len(z))
        stats = stats_of(logits, teacher, transform)
        out = torch.full_like(logits, math.nan) if aligned else logits  # or in place
        slopes = Slopes(torch.zeros(len(z)), teacher=weights)
        backend.pull(logits, torch.arange(len(z)) % vocab, stats, slopes, transform, out, teacher=teacher)
        check(stats.divergence, out[0], z, teacher, transform, weights)


@pytest.mark.parametrize("kind, mixture", SOME)
def test_a_teacher_in_the_memory_of_the_gradient(kind: str, mixture: float) -> None:
    """The logits under another transform, which are overwritten: targets in any tile, and outside of the vocabulary."""
    z, targets, weights = torch.randn(4, 130).mul(2.0), torch.tensor([0, 77, 129, 200]), torch.ones(4)

    def run(logits: Tensor, teacher_logits: Tensor) -> Tensor:
        teacher, names = Teacher(teacher_logits, COOL, kind, mixture), partials_of(("divergence",), kind)
        stats = visit(backend, logits, targets, None, PLAIN, names, teacher)
        backend.pull(logits, targets, stats, Slopes(torch.zeros(4), teacher=weights), PLAIN, logits, teacher=teacher)
        return logits

    logits = z[None].clone()
    torch.testing.assert_close(run(logits, logits), run(z[None].clone(), z[None].clone()), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind, mixture", SOME)
def test_nearly_equal_rows(kind: str, mixture: float) -> None:
    z = torch.randn(3, 300).sort(-1).values * torch.tensor([[0.3], [2.0], [6.0]])
    for size in (1e-2, 3e-5):
        teacher = Teacher((z + size * torch.randn_like(z))[None], PLAIN, kind, mixture)
        found, exact = stats_of(z[None], teacher, PLAIN).divergence, expected(z, teacher, PLAIN, torch.ones(3)).value
        assert (found >= 0).all() and exact.min() > 1e-12
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("mixture", (1e-6, 1 - 1e-6))
def test_shares_near_an_end(mixture: float) -> None:
    def run(logits: Tensor, teacher: Teacher, weights: Tensor) -> tuple[Tensor, Tensor]:
        stats, out, n = stats_of(logits, teacher, PLAIN), torch.empty_like(logits), logits.shape[1]
        slopes = Slopes(torch.zeros(n), teacher=weights)
        backend.pull(logits, torch.arange(n), stats, slopes, PLAIN, out, teacher=teacher)
        return stats.divergence, out

    check_small_share(run, mixture)


@pytest.mark.parametrize("kind, mixture", SOME)
def test_infinities_nan_and_rows_that_are_not_read(kind: str, mixture: float) -> None:
    z, w = torch.randn(2, 7, 300).unbind()
    z[0, 250], w[1, 250], z[2], w[3] = math.nan, math.nan, -math.inf, -math.inf
    z[4, :40], w[4, :40] = -math.inf, -math.inf
    behind = z if kind == "forward" else w
    behind[5, 3] = -math.inf
    z[6], w[6] = math.nan, math.inf
    read = torch.arange(7) < 6
    teacher = Teacher(w[None], PLAIN, kind, mixture)
    stats = stats_of(z[None], teacher, PLAIN, read)
    found = stats.divergence
    assert found.isnan().tolist() == [True] * 4 + [False] * 3 and found[6] == 0
    assert bool(found[5].isinf()) == (kind != "jsd")
    exact = expected(z[4:5], teacher._replace(logits=w[4:5]), PLAIN, torch.ones(1))
    torch.testing.assert_close(found[4:5].double(), exact.value, rtol=3e-6, atol=0.0)
    out = torch.full_like(z[None], math.nan)
    slopes = Slopes(torch.zeros(7), teacher=read.float())
    backend.pull(z[None], torch.arange(7), stats, slopes, PLAIN, out, teacher=teacher)
    assert out[0, :2].isnan().all() and (out[0, 4, :40] == 0).all() and out[0, 4].isfinite().all() and (out[0, 6] == 0).all()


@pytest.mark.parametrize("kind, mixture", SOME)
def test_slopes_of_everything_at_once(kind: str, mixture: float) -> None:
    """The other partials are those of one stream; the gradients add up, the target's element too."""
    z, w = (x[:5] for x in row_pairs(150))
    n = len(z)
    others = ("entropy", "sum_squares", "top_id")
    teacher, targets = Teacher(w[None], COOL, kind, mixture), torch.arange(n)
    stats = stats_of(z[None], teacher, WARM, None, *others)
    alone = backend.stats(z[None], targets, None, WARM, partials_of(others))
    for name in alone.names:
        torch.testing.assert_close(stats.get(name), alone.get(name), rtol=1e-5, atol=1e-5)
    slopes = Slopes(*torch.randn(5, n).unbind())
    outs = [torch.full_like(z[None], math.nan) for _ in range(3)]
    alone_slopes = Slopes(torch.zeros(n), teacher=slopes.teacher)
    for out, each in zip(outs, (slopes, slopes._replace(teacher=None), alone_slopes), strict=True):
        backend.pull(z[None], targets, stats, each, WARM, out, teacher=teacher)
    torch.testing.assert_close(outs[0], outs[1] + outs[2], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind, mixture", SOME)
def test_far_targets_and_logits_of_1e30(kind: str, mixture: float) -> None:
    """The target's column, formed apart, and maxima that rise along a row beside one of 1e30, as in test_divergence.py."""
    z, w = torch.randn(2, 4, 131)
    z[0, 0], z[1, 1] = -715.0, -100.0
    wide = (w if kind == "forward" else z)[2:]
    wide[:] = 1e30
    (z if kind == "forward" else w)[2:] = torch.randn(2, 131).sort(-1).values * 3.0
    teacher, weights = Teacher(w[None], PLAIN, kind, mixture), torch.ones(4)
    stats, exact = stats_of(z[None], teacher, PLAIN), expected(z, teacher, PLAIN, weights)
    out = torch.full_like(z[None], math.nan)
    backend.pull(z[None], torch.arange(4), stats, Slopes(torch.zeros(4), teacher=weights), PLAIN, out, teacher=teacher)
    torch.testing.assert_close(stats.divergence.double(), exact.value, rtol=1e-5, atol=1e-6)
    assert ((out[0] - exact.gradient).abs() <= 1e-6 + 1e-4 * exact.gradient.abs()).all()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_mass_outside_of_a_teachers_ids(direction: str) -> None:
    """Of a confident policy, whose columns outside of the ids are visited by themselves."""
    logits, of_teacher = torch.randn(2, 4, 131)
    logits[:2, 9] += 18.0
    logits[2:, 9], of_teacher[:2, 9] = 18.0, 4.0  # which the teacher lists, or does not
    of_teacher[2:, 9] = -4.0
    values, ids = of_teacher.log_softmax(-1).topk(5)
    sets, wide = TokenSets.from_padded(ids, values=values), logits.double().requires_grad_()
    exact = of_listed_ids(Exact(direction), wide.log_softmax(-1), sets)
    (gradient,) = torch.autograd.grad(exact.sum(), wide)
    leaf = logits.clone().requires_grad_()
    found = token_divergence(leaf, sets, direction, options=Options(backend="triton"))
    found.sum().backward()
    torch.testing.assert_close(found.double(), exact.detach(), rtol=1e-5, atol=1e-9)
    assert ((leaf.grad - gradient).norm(dim=-1) <= 1e-5 * gradient.norm(dim=-1)).all()  # type: ignore[operator]


def test_part_of_the_rows_and_none() -> None:
    z, w = row_pairs(50)
    n = len(z)
    teacher = Teacher(w.view(2, n // 2, -1), PLAIN, "reverse", 0.0)
    whole = stats_of(z[None], teacher._replace(logits=w[None]), PLAIN)
    part = backend.stats(z.view(2, n // 2, -1), torch.arange(3, 7), None, PLAIN, whole.names, rows=(3, 7), teacher=teacher)
    assert torch.equal(part.values, whole.values[:, 3:7])
    out = torch.full((2, n // 2, 50), math.nan)
    ones = Slopes(torch.zeros(4), teacher=torch.ones(4))
    arguments = (z.view(2, n // 2, -1), torch.arange(3, 7), part, ones, PLAIN, out)
    backend.pull(*arguments, rows=(3, 7), teacher=teacher)
    assert out.view(n, -1)[3:7].isfinite().all() and out.view(n, -1)[[0, 1, 2, 7, 8, 9]].isnan().all()
    none = Teacher(torch.empty(1, 0, 5), PLAIN, "jsd", 0.5)
    assert stats_of(torch.empty(1, 0, 5), none, PLAIN).values.shape[1] == 0
