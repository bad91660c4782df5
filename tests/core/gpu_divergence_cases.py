"""Exact divergences at real sizes, against float64: from logits and from hidden states, with a head of the teacher's own or the
policy's, teachers known at some ids, and over kept sets. Run by benchmarks/gpu_kit.py; on a CPU small, as gpu_cases.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels import (
    Exact,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_divergence,
    token_divergence,
)
from grpo_kernels.vocabulary.rows import RowTransform, Teacher
from support import oracle
from support.cases import same_bits
from support.divergences import PLAIN, expected, row_pairs
from support.linear_cases import in_chunks

Tensor = torch.Tensor
ON_GPU = torch.zeros(()).device.type == "cuda"
VOCABULARIES = (151936, 129921) if ON_GPU else (1040, 1031)
# The interpreter truncates where a GPU rounds to bf16.
DTYPES = (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,)
N, WIDTH, OTHER = (48, 1024, 512) if ON_GPU else (24, 24, 10)
KINDS = [Exact("reverse"), Exact("forward"), Exact("jsd"), Exact("jsd", mixture=0.1)]
KIND_IDS = ["reverse", "forward", "jsd", "jsd-0.1"]
MIRRORED = LogitTransform(temperature=0.8, scale=-1.1)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def values_and_gradients(
    values: Callable[..., Tensor], leaves: tuple[Tensor, ...], upstream: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    own = tuple(x.detach().clone().requires_grad_() for x in leaves)
    found = values(*own)
    return found.detach(), torch.autograd.grad((found * upstream.to(found.dtype)).sum(), own)


# ---- from logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("exact", KINDS, ids=KIND_IDS)
def test_divergences_of_logits(exact: Exact, vocab: int, dtype: torch.dtype, backend: str) -> None:
    """Flat, peaked, disjoint and equal rows, and a teacher that agrees but for one id; without and with a transform."""
    z, w = (x.to(dtype) for x in row_pairs(vocab))
    weights = torch.randn(len(z))
    for transform, row in ((None, PLAIN), (MIRRORED, RowTransform(-1.1, 0.0, 1 / 0.8))):

        def values(leaf: Tensor, transform: LogitTransform | None = transform) -> Tensor:
            return token_divergence(leaf, w, exact, transform=transform, options=Options(backend=backend))

        found, (gradient,) = values_and_gradients(values, (z,), weights)
        exactly = expected(z, Teacher(w[None], row, exact.direction, exact.share), row, weights)
        error = (found.double() - exactly.value).abs()
        assert (error <= 1e-5 * exactly.value + 2e-6).all(), error
        error, largest = (gradient.double() - exactly.gradient).abs().amax(-1), exactly.gradient.abs().amax(-1)
        rounding = 2e-5 if dtype == torch.float32 else 5e-3
        assert (error <= rounding * largest + 2e-6 * (1 + exactly.value) * weights.abs()).all(), (error, largest)


@pytest.mark.parametrize("exact", KINDS[:3], ids=KIND_IDS[:3])
def test_a_loss_in_place(exact: Exact, backend: str) -> None:
    """The same bits as with a gradient of its own, and again; the divergence is that of float64."""
    z, w = (x.to(DTYPES[-1]) for x in row_pairs(VOCABULARIES[0]))
    targets, advantages = torch.randint(z.shape[1], (len(z),)), torch.randn(len(z))
    objective, runs = Objective.preset("dapo", beta=0.3, kl=exact), []
    for inplace in (False, True, True):
        leaf = z.clone().requires_grad_()
        out = grpo_loss(
            leaf * 1.0, TokenBatch(targets, advantages), objective, ref_logits=w, inplace=inplace, backend=backend
        )  # fmt: skip
        runs.append((out, torch.autograd.grad(out.loss, leaf)[0]))
    for out, gradient in runs[1:]:
        assert same_bits(out.loss, runs[0][0].loss) and same_bits(gradient, runs[0][1])
    exactly = oracle.divergence(z.double().log_softmax(-1), w.double().log_softmax(-1), exact.direction, exact.share)
    assert runs[0][0].divergence is not None
    torch.testing.assert_close(runs[0][0].divergence.double(), exactly, rtol=1e-5, atol=1e-9)


# ---- from hidden states


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["own head", "shared head"])
@pytest.mark.parametrize("exact", KINDS[:3], ids=KIND_IDS[:3])
def test_divergences_of_hidden_states(
    exact: Exact, shared: bool, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    """In several chunks of two blocks."""
    in_chunks(monkeypatch, 8, 16)
    hidden, weight, upstream = torch.randn(N, WIDTH).to(dtype), torch.randn(VOCABULARIES[0], WIDTH), torch.rand(N)
    weight = (2.0 * WIDTH**-0.5 * weight).to(dtype)
    if shared:
        ref_hidden, ref_weight = (hidden + 0.3 * torch.randn(N, WIDTH)).to(dtype), weight
    else:
        ref_hidden = torch.randn(N, OTHER).to(dtype)
        ref_weight = (2.0 * OTHER**-0.5 * torch.randn(VOCABULARIES[0], OTHER)).to(dtype)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return linear_divergence(h, w, (ref_hidden, w if shared else ref_weight), exact, options=Options(backend=backend))

    def exactly(h: Tensor, w: Tensor) -> Tensor:
        log_q = (ref_hidden.double() @ ref_weight.double().t()).log_softmax(-1)
        return oracle.divergence((h @ w.t()).log_softmax(-1), log_q, exact.direction, exact.share)

    found, gradients = values_and_gradients(ours, (hidden, weight), upstream)
    right, of_float64 = values_and_gradients(exactly, (hidden.double(), weight.double()), upstream)
    errors = {"divergence": relative(found, right)}
    errors |= {name: relative(*pair) for name, *pair in zip(("hidden", "weight"), gradients, of_float64, strict=True)}
    for name, error in errors.items():
        record_property(name, error)
    limit = {torch.float32: 5e-5, torch.bfloat16: 6e-3}[dtype]
    assert errors["divergence"] < 2e-5 and max(errors.values()) < limit, errors


# ---- of some ids


def listed(log_q: Tensor, k: int) -> TokenSets:
    values, ids = log_q.topk(k)
    return TokenSets.from_padded(ids, values=values.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
def test_a_teacher_known_at_its_largest_ids(direction: Any, dtype: torch.dtype, backend: str) -> None:
    """Their probabilities and that of all others together, from logits and from hidden states."""
    vocab, exact = VOCABULARIES[1], Exact(direction, tail="bin")
    hidden, upstream = torch.randn(N, WIDTH).to(dtype), torch.rand(N)
    weight = (3.0 * WIDTH**-0.5 * torch.randn(vocab, WIDTH)).to(dtype)
    logits = (hidden.double() @ weight.double().t()).to(dtype)
    sets = listed((logits.double() + torch.randn(N, vocab)).log_softmax(-1), 20)
    ids, log_q = sets.ids.view(N, 20), sets.values.double().view(N, 20)  # type: ignore[union-attr]

    def exactly(z: Tensor) -> Tensor:
        both = [z.log_softmax(-1).gather(1, ids), log_q]
        both = [torch.cat([x, torch.log1p(-x.exp().sum(1, keepdim=True))], 1) for x in both]
        return oracle.divergence(both[0], both[1], direction, exact.share)

    options, limit = Options(backend=backend), {torch.float32: 5e-5, torch.bfloat16: 6e-3}[dtype]
    found, (gradient,) = values_and_gradients(lambda z: token_divergence(z, sets, exact, options=options), (logits,), upstream)
    right, (of_float64,) = values_and_gradients(exactly, (logits.double(),), upstream)
    assert relative(found, right) < 2e-5 and relative(gradient, of_float64) < limit
    found, gradients = values_and_gradients(
        lambda h, w: linear_divergence(h, w, sets, exact, options=options), (hidden, weight), upstream
    )
    right, of_both = values_and_gradients(lambda h, w: exactly(h @ w.t()), (hidden.double(), weight.double()), upstream)
    assert relative(found, right) < 2e-5
    assert all(relative(a, b) < limit for a, b in zip(gradients, of_both, strict=True))


@pytest.mark.parametrize("exact", KINDS[:3], ids=KIND_IDS[:3])
def test_divergences_over_sets(exact: Exact, backend: str) -> None:
    """Both sides renormalised over the ids of a set; rows without one over all of them."""
    vocab = VOCABULARIES[1]
    z, w, upstream = 3.0 * torch.randn(N, vocab), 3.0 * torch.randn(N, vocab), torch.rand(N)
    lists = [sorted(torch.randperm(vocab)[: 1 + 7 * i].tolist()) if i % 4 else [] for i in range(N)]
    sets = TokenSets.from_lists(lists, device=z.device)
    keep = sets.mask(vocab)
    keep = keep | ~keep.any(-1, keepdim=True)

    def exactly(x: Tensor) -> Tensor:
        both = [torch.where(keep, y, -1e3).log_softmax(-1) for y in (x, w.double())]
        return oracle.divergence(both[0], both[1], exact.direction, exact.share)

    options = Options(backend=backend)
    found, (gradient,) = values_and_gradients(
        lambda x: token_divergence(x, w, exact, kept=sets, options=options), (z,), upstream
    )
    right, (of_float64,) = values_and_gradients(exactly, (z.double(),), upstream)
    assert math.isfinite(float(found.sum())) and relative(found, right) < 2e-5
    assert relative(gradient, of_float64) < 5e-5 and not gradient[~keep].any()
