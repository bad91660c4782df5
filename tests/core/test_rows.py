"""Rows whose numbers must keep their digits or be what torch has, kept sets, further ids, and second distributions: what their
float64 answers in test_combinations.py do not ask."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import (
    Exact,
    Head,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    token_divergence,
    token_logprobs,
)
from support import oracle

Tensor = torch.Tensor


@pytest.mark.slow
def test_more_than_2_to_the_31_logits(backend: str) -> None:
    """Rows behind the offsets that 32 bits hold."""
    logits = torch.zeros(1, 1, dtype=torch.bfloat16).expand(2**16 + 2, 2**15).clone()
    logits[-1, -1] = 9.0
    ids = torch.full((len(logits),), 2**15 - 1)
    with torch.no_grad():
        found = token_logprobs(logits, ids, options=Options(backend=backend))[0]
    exact = logits[-2:].double().log_softmax(-1)[:, -1]
    torch.testing.assert_close(found[-2:].double(), exact, rtol=1e-6, atol=1e-6)


# ---- sets


def test_metrics_of_sets() -> None:
    """Targets that missing="mask" takes out are counted; the kept mass is that of rows that have a set."""
    logits, mask = torch.randn(4, 6), torch.tensor([True, True, True, False])
    sets = TokenSets.from_lists([[1, 3], [3], [], [3]])
    batch = TokenBatch(
        torch.tensor([1, 2, 4, 5]), torch.ones(4), mask=mask, ref_logps=torch.randn(4), kept=sets, missing="mask"
    )
    options = Options(entropy_over="vocabulary", reference_over="vocabulary")
    out = grpo_loss(logits, batch, Objective.preset("dapo", beta=0.1, kl="k1"), options=options)
    assert float(out.metrics["outside_set"]) == pytest.approx(1 / 3) and int(out.metrics["tokens"]) == 2
    assert float(out.metrics["kept_mass"]) == pytest.approx(float(logits[0].softmax(0)[[1, 3]].sum()), rel=1e-5)
    kl = logits.log_softmax(1)[[0, 2], [1, 4]] - batch.ref_logps[[0, 2]]  # type: ignore[index]
    assert float(out.metrics["kl"]) == pytest.approx(float(kl.mean()), rel=1e-5)


# ---- further ids


def test_slopes_at_ids_of_a_certain_row_keep_their_digits(backend: str) -> None:
    """bf16 logits of a row with p = 0.9999 at one id: 1 - p there, and the slopes of two ids may cancel in their sum."""
    logits = torch.zeros(2, 40)
    logits[:, 7] = 13.0
    leaf = logits.bfloat16().requires_grad_()
    more = token_logprobs(
        leaf, torch.tensor([3, 3]), at=TokenSets.from_lists([[7], [7, 9]]), options=Options(backend=backend)
    ).also
    more["at"].backward(torch.tensor([1.0, 1.0, -1.0]))
    exact = leaf.detach().double().requires_grad_()
    log_p = exact.log_softmax(1)
    (log_p[0, 7] + log_p[1, 7] - log_p[1, 9]).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2**-8, atol=1e-12)  # type: ignore[union-attr]


def test_the_largest_probability_and_its_id(backend: str) -> None:
    """Of ties the first; of a row of only -inf NaN; over a set the set's; of a masked row none."""
    logits = torch.randn(5, 50)
    logits[1, [7, 30]] = logits[1].max() + 1
    logits[3] = -torch.inf
    asked = {
        "kept": TokenSets.from_lists([[], [], [4, 9, 2], [], []]),
        "mask": torch.arange(5) < 4,
        "also": ("top_prob", "top_id"),
    }
    more = token_logprobs(logits, torch.tensor([0, 1, 4, 3, 4]), options=Options(backend=backend), **asked).also
    p, in_set = logits.double().softmax(1), logits[2, [4, 9, 2]].double().softmax(0)
    assert more["top_id"].tolist() == [int(p[0].argmax()), 7, [4, 9, 2][int(in_set.argmax())], 0, -1]
    wanted = torch.stack([p[0].max(), p[1].max(), in_set.max()])
    torch.testing.assert_close(more["top_prob"][:3].double(), wanted, rtol=2e-6, atol=0)
    assert more["top_prob"][3].isnan() and more["top_prob"][4] == 0


# ---- second distributions


@pytest.mark.parametrize("over", ["kept", "vocabulary"])
def test_a_head_of_the_reference_stands_for_its_log_probs(over: str, backend: str) -> None:
    """For an estimate of the KL: a forward product in place of batch.ref_logps, under a transform of its own, over sets or not."""
    hidden, weight, other = torch.randn(2, 5, 8), torch.randn(30, 8), torch.randn(30, 8)
    targets, advantages = torch.randint(30, (2, 5)), torch.tensor([1.0, -1.0])
    objective = Objective.preset("dapo", beta=0.3)
    sets = TokenSets.from_lists([[int(t), (int(t) + 3) % 30] if i % 2 else [] for i, t in enumerate(targets.flatten())])
    own, options = LogitTransform(0.6), Options(reference_over=over, backend=backend)
    ref = token_logprobs(hidden @ other.T, targets, kept=sets if over == "kept" else None, transform=own)[0]
    found, wanted = (hidden.clone().requires_grad_() for _ in range(2))
    of_head, given = (TokenBatch(targets, advantages, ref_logps=x, kept=sets) for x in (None, ref))
    a = linear_grpo_loss(found, weight, of_head, objective, reference=(hidden, Head(other, transform=own)), options=options)
    b = linear_grpo_loss(wanted, weight, given, objective, options=options)
    (a.loss + b.loss).backward()
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("up", [8.0, 20.0])
@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
def test_the_mass_outside_of_a_teachers_ids_keeps_its_digits(direction: str, up: float, backend: str) -> None:
    """A confident policy has a small probability outside, which 1 minus that inside would be the rounding of. The teacher is sure
    of about 20 ids, and of one row does not list the policy's."""
    z, w, rows, sure = torch.randn(8, 1000), torch.randn(8, 1000), torch.arange(8), torch.randint(1000, (8,))
    w += 12.0 * (torch.rand(8, 1000) < 0.02)
    z[rows, sure] += up
    w[rows, sure] += 12.0
    w[-1, sure[-1]] = -4.0
    values, ids = w.log_softmax(-1).topk(20)
    sets, exact = TokenSets.from_padded(ids, values=values), Exact(direction)
    leaf, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    found = token_divergence(leaf, sets, exact, options=Options(backend=backend))
    log_q = torch.zeros(8, 1000, dtype=torch.float64).scatter(1, ids, values.double())
    wanted = oracle.listed_divergence(wide.log_softmax(-1), log_q, ids.tolist(), direction, exact.share, "bin")
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=2e-6, atol=1e-9)
    (gradient,), (expected,) = (torch.autograd.grad(x.sum(), y) for x, y in ((found, leaf), (wanted, wide)))
    assert ((gradient - expected).norm(dim=-1) <= 1e-5 * expected.norm(dim=-1)).all()


def test_a_reference_that_was_made_in_inference_mode_or_written_to(backend: str) -> None:
    with torch.inference_mode():
        w = torch.randn(2, 3, 9)
    leaf = torch.randn(2, 3, 9, requires_grad=True)
    token_divergence(leaf, w, options=Options(backend=backend)).sum().backward()
    assert leaf.grad is not None and leaf.grad.any()
    second = torch.randn(2, 3, 9)
    value = token_divergence(leaf, second, options=Options(backend=backend)).sum()
    second.zero_()
    with pytest.raises(RuntimeError, match="was written to between forward and backward"):
        value.backward()
