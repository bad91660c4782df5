"""Divergence from teachers known at some ids, against plain torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels import Exact, TokenSets
from grpo_kernels.formulas.divergence import LEAST_TAIL, TAILS, divergence_at
from grpo_kernels.teachers import logprobs_with_teacher, teacher_divergence
from support.composition_cases import (
    NUM_ROWS,
    SOURCES,
    VOCAB_SIZE,
    Case,
    assert_matches_float64,
    plain_terms,
    random_mask,
    random_sets,
)
from support.row_sources import Float64Source, LogitsSource

KINDS = [Exact("reverse"), Exact("forward"), Exact("jsd"), Exact("jsd", 0.2), Exact("tv")]


def plain_divergence(exact: Exact, logp: Tensor, logq: Tensor) -> Tensor:
    """The divergence of one row at the ids of its teacher, as docs/divergences.md has it."""
    if exact.tail == "renormalise":
        return plain_terms(exact, logp.log_softmax(0), logq.log_softmax(0)).sum()
    total = plain_terms(exact, logp, logq).sum()
    if exact.tail == "bin":
        rest = (1 - logp.exp().sum()).log(), (1 - logq.exp().sum()).log()
        return total + plain_terms(exact, *rest)
    difference = (logp.exp() - logq.exp()).sum()
    if exact.tail == "generalised" and exact.direction in ("reverse", "forward"):
        return total - (difference if exact.direction == "reverse" else -difference)
    return total


def random_teacher(num_tokens: int, g: torch.Generator, sizes: tuple[int, ...]) -> TokenSets:
    sets = random_sets(num_tokens, g, sizes)
    logps = torch.randn(num_tokens, VOCAB_SIZE, generator=g, dtype=torch.float64).log_softmax(1)
    return sets.with_values(logps[sets.row_of, sets.ids.long()].float())


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("exact", KINDS, ids=str)
def test_divergence(kind, tail, exact):
    exact = Exact(exact.direction, exact.mixture, tail)
    g = torch.Generator().manual_seed(2)
    shared = tail in ("bin", "ignore")
    num_tokens = 25 if shared else NUM_ROWS
    teacher = random_teacher(num_tokens, g, (0, 1, 4, 9))
    targets = torch.randint(VOCAB_SIZE, (num_tokens,), generator=g)
    rows = torch.randint(NUM_ROWS, (num_tokens,), generator=g) if shared else None
    mask = random_mask(num_tokens, g)

    def composed(source):
        result = logprobs_with_teacher(
            source,
            targets,
            teacher,
            exact,
            mask=mask,
            rows=rows,
            names=("entropy",),
        )
        alone = teacher_divergence(source, teacher, exact, mask=mask, rows=rows)
        return {**result, "alone": alone}

    def plain(logits):
        logps = logits.log_softmax(1)
        logps = logps if rows is None else logps[rows]
        starts = teacher.offsets.tolist()
        divergences = []
        for token in range(num_tokens):
            ids = teacher.ids[starts[token] : starts[token + 1]].long()
            logq = teacher.values[starts[token] : starts[token + 1]].double()
            if len(ids) and mask[token]:
                divergences.append(plain_divergence(exact, logps[token, ids], logq))
            else:
                divergences.append(torch.zeros((), dtype=torch.float64))
        divergence = torch.stack(divergences)
        entropy = -(logps.exp() * logps).sum(1)
        return {
            "logps": torch.where(mask, logps[torch.arange(num_tokens), targets], 0.0),
            "entropy": torch.where(mask, entropy, 0.0),
            "divergence": divergence,
            "alone": divergence,
        }

    assert_matches_float64(Case.from_kind(kind), composed, plain)


def test_a_teacher_of_all_ids_is_the_divergence_over_the_vocabulary():
    """The probability outside is 0 on both sides, and counts as 1e-7 on both."""
    g = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 1, VOCAB_SIZE, generator=g, dtype=torch.float64)
    logq = other.log_softmax(1)
    teacher = TokenSets.from_padded(torch.arange(VOCAB_SIZE)[None], values=logq)
    leaf = logits.clone().requires_grad_()
    found = teacher_divergence(Float64Source(leaf), teacher, Exact("forward"))
    exact = logits.clone().requires_grad_()
    expected = (logq.exp() * (logq - exact.log_softmax(1))).sum()
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(found.sum(), leaf) + torch.autograd.grad(expected, exact)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)


@pytest.mark.parametrize("source", [Float64Source, LogitsSource])
@pytest.mark.parametrize("outside", [1e-3, 1e-5, 2e-7])
def test_a_small_probability_outside_keeps_its_digits(outside, source):
    """With fp32 probabilities, 1e-5 would have an error of 1 %."""
    probs = torch.full((1, VOCAB_SIZE), outside / (VOCAB_SIZE - 2), dtype=torch.float64)
    probs[0, :2] = torch.tensor([0.7, 0.3]) * (1 - outside)
    teacher = TokenSets.from_lists([[0, 1]], values=[[-0.9, -0.9]])
    dtype = torch.float64 if source is Float64Source else torch.float32
    leaf = probs.log().to(dtype).requires_grad_()
    found = teacher_divergence(source(leaf), teacher, Exact("forward"))
    exact = leaf.detach().double().requires_grad_()
    logp = exact.log_softmax(1)
    logq = teacher.values.double()
    rest = 1 - logq.exp().sum()
    of_ids = (logq.exp() * (logq - logp[0, :2])).sum()
    expected = of_ids + rest * (rest.log() - logp[0, 2:].logsumexp(0))
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    (exact_grad,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-6, atol=5e-7)


def test_rows_that_are_not_finite():
    """NaN and infinite divergences show, and give no NaN where no gradient arrives."""
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[0, 3] = torch.nan
    leaf = logits.requires_grad_()
    source = Case.with_values("logits", logits.detach()).source(leaf)
    teacher = TokenSets.from_lists(
        [[4, 5], [4, 5], [4, 5]],
        values=[[-1.0, -1.0], [-1.0, -torch.inf], [-1.0, -1.0]],
    )
    divergence = teacher_divergence(source, teacher, Exact("reverse"))
    assert divergence[0].isnan() and divergence[1] == torch.inf and divergence[2].isfinite()
    for upstream, is_nan in (([0.0, 0.0, 1.0], False), ([1.0, 1.0, 0.0], True)):
        (grad,) = torch.autograd.grad(divergence, leaf, torch.tensor(upstream), retain_graph=True)
        assert bool(grad[0, 4:6].isnan().all()) == is_nan
        assert bool(grad[1, 4:6].isnan().all()) == is_nan
        assert not grad[2].isnan().any()


def test_tokens_without_ids_are_not_processed():
    class Refusing(Float64Source):
        def statistics(self, targets, mask, names=(), **_):
            assert mask.tolist() == [False, True, False]
            return super().statistics(targets, mask, names)

    source = Refusing(torch.randn(3, VOCAB_SIZE, dtype=torch.float64))
    teacher = TokenSets.from_lists([[], [1, 2], [3]], values=[[], [-1.0, -1.0], [-1.0]])
    mask = torch.tensor([True, True, False])
    assert teacher_divergence(source, teacher, Exact(), mask=mask).nonzero().tolist() == [[1]]


def test_refusals():
    case = Case.from_kind("exact float64")
    source = case.source(*case.tensors)
    targets = torch.zeros(NUM_ROWS, dtype=torch.int64)
    ids = [[0, 1]] * NUM_ROWS
    with pytest.raises(ValueError, match=r"teacher=.*: it has no values"):
        teacher_divergence(source, TokenSets.from_lists(ids), Exact())
    heavy = TokenSets.from_lists(ids, values=[[-0.1, -0.1]] * NUM_ROWS)
    with pytest.raises(ValueError, match=r"teacher: the values of row 0 are log-probs of 1\.81"):
        logprobs_with_teacher(source, targets, heavy, Exact())
    logprobs_with_teacher(source, targets, heavy, Exact("forward", tail="ignore"))
    outside = TokenSets.from_lists([[VOCAB_SIZE]] * NUM_ROWS, values=[[-1.0]] * NUM_ROWS)
    with pytest.raises(ValueError, match=f"teacher holds id {VOCAB_SIZE} in row 0"):
        teacher_divergence(source, outside, Exact())
    with pytest.raises(ValueError, match="teacher have 1 rows"):
        logprobs_with_teacher(source, targets, heavy[:1], Exact())


def test_a_teacher_without_mass_outside_of_its_ids_has_a_least_tail():
    logp = torch.tensor([-0.5])
    outside = (1.0 - logp.double().exp()).log()
    offsets = torch.tensor([0, 1])
    value = divergence_at(Exact("reverse"), logp, torch.zeros(1), offsets, outside)
    p, rest = logp.double().exp(), outside.exp()
    expected = p * logp.double() + rest * (outside - math.log(LEAST_TAIL))
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
def test_unlikely_ids_are_renormalised(direction):
    """Also if all of their probabilities are 0 in fp64."""
    exact = Exact(direction, tail="renormalise")
    logps, teacher = torch.tensor([-1.0, -2.0, -2.5]), torch.tensor([-2.0, -1.0, -1.5])
    offsets = torch.tensor([0, 3])
    near, far = (divergence_at(exact, logps - x, teacher, offsets) for x in (0.0, 800.0))
    assert near > 0.01
    torch.testing.assert_close(far, near, rtol=1e-5, atol=0)
