"""Kept sets, further ids of a row, and second distributions: what their float64 answers in test_combinations.py do not ask."""

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
from grpo_kernels.formulas.divergence import DIRECTIONS
from support import oracle

Tensor = torch.Tensor


# ---- sets


def test_the_mass_of_a_set_does_not_depend_on_the_target(backend: str) -> None:
    """A target without probability beside one that has some, in a set that lacks it, alone, and without a set."""
    inf = torch.inf
    logits = torch.tensor([[0.5, -inf, 1.0, 2.0, -1.0]]).repeat(5, 1).requires_grad_()
    sets, targets = TokenSets.from_lists([[0, 1, 2], [0, 1, 2], [0, 2], [1], []]), torch.tensor([1, 0, 1, 1, 1])
    found = token_logprobs(logits, targets, kept=sets, also=("log_kept_mass",), options=Options(backend=backend))
    logps, more = found.logps, found.also
    exact = logits.detach().double().requires_grad_()
    mass = exact.log_softmax(1)[:, [0, 2]].logsumexp(1)[:3]
    found = more["log_kept_mass"]
    assert logps.isneginf().tolist() == [True, False, True, False, True] and found[3:].tolist() == [-inf, 0.0]
    torch.testing.assert_close(found[:3].double(), mass, rtol=1e-6, atol=1e-6)
    (gradient,), (wanted,) = (torch.autograd.grad(x.sum(), leaf) for x, leaf in ((found[:3], logits), (mass, exact)))
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_probability_and_its_id(dtype: torch.dtype, backend: str) -> None:
    """Of ties the first; of a row of only -inf NaN; over a set the set's; of a masked row none."""
    logits = torch.randn(5, 50).to(dtype)
    logits[1, [7, 30]] = logits[1].max() + 1
    logits[3] = -torch.inf
    sets, mask = TokenSets.from_lists([[], [], [4, 9, 2], [], []]), torch.arange(5) < 4
    asked = {"kept": sets, "mask": mask, "also": ("top_prob", "top_id")}
    more = token_logprobs(logits, torch.tensor([0, 1, 4, 3, 4]), options=Options(backend=backend), **asked).also
    p = logits.double().softmax(1)
    in_set = logits[2, [4, 9, 2]].double().softmax(0)
    assert more["top_id"].tolist() == [int(p[0].argmax()), 7, [4, 9, 2][int(in_set.argmax())], 0, -1]
    wanted = torch.stack([p[0].max(), p[1].max(), in_set.max()])
    torch.testing.assert_close(more["top_prob"][:3].double(), wanted, rtol=2e-6, atol=0)
    assert more["top_prob"][3].isnan() and more["top_prob"][4] == 0


# ---- second distributions


@pytest.mark.parametrize("rows, vocab, apart, rtol", [(5, 3001, 1e-5, 1e-4), (30, 7, 0.2, 2e-5)])
@pytest.mark.parametrize("kind", DIRECTIONS)
def test_nearly_equal_rows_keep_the_digits_of_a_tiny_divergence(
    kind: str, rows: int, vocab: int, apart: float, rtol: float, backend: str
) -> None:
    """A divergence of 1e-10 is right to its digits, never negative, and 0 between equal rows. A total variation is of first order
    in roundings of the logits, which adding a constant is."""
    z = 4 * torch.randn(rows, vocab)
    w = z + apart * torch.randn(rows, vocab)
    w[0], w[1] = z[0], z[1] + 3.0
    found = token_divergence(z, w, kind, options=Options(backend=backend))
    exact = oracle.divergence(z.double().log_softmax(1), w.double().log_softmax(1), kind, 0.5)
    assert (found >= 0).all() and found[0] == 0 and found[1] < (1e-12 if kind != "tv" else 1e-6)
    torch.testing.assert_close(found[2:].double(), exact[2:], rtol=rtol, atol=0)


def test_a_divergence_is_infinite_where_the_other_side_cannot_follow(backend: str) -> None:
    """Reverse where the policy chooses what the teacher cannot, forward the other way round, others nowhere."""
    z, w = torch.zeros(2, 4), torch.zeros(2, 4)
    w[0, 1] = z[1, 1] = -torch.inf
    found = {kind: token_divergence(z, w, kind, options=Options(backend=backend)) for kind in DIRECTIONS}
    assert found["reverse"].isinf().tolist() == [True, False] and found["forward"].isinf().tolist() == [False, True]
    assert all(found[kind].isfinite().all() and (found[kind] > 0).all() for kind in ("jsd", "tv"))


def test_soft_targets_are_a_forward_divergence_that_ignores_the_tail(backend: str) -> None:
    z, ids, weights = torch.randn(4, 30), torch.randint(30, (4, 1)) + torch.arange(3) * 9 % 30, torch.rand(4, 3)
    sets = TokenSets.from_padded(ids % 30, values=weights.log())
    leaf, exact = z.clone().requires_grad_(), z.double().requires_grad_()
    token_divergence(leaf, sets, Exact("forward", tail="ignore"), options=Options(backend=backend)).sum().backward()
    (-(weights.double() * exact.log_softmax(1).gather(1, ids % 30)).sum()).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2e-5, atol=1e-7)  # type: ignore[union-attr]


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
@pytest.mark.parametrize("direction", DIRECTIONS)
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


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ids_that_are_hardly_ever_chosen(direction: str) -> None:
    """Renormalised, with probabilities of 0 in float64 too, on one side, the other and both; -inf on both changes nothing."""
    z = torch.tensor([[0.0, -1000.0, -1001.5, -1003.0], [0.0, -1.0, 0.5, 0.2], [0.0, -900.0, -901.0, -902.0]]).requires_grad_()
    values = torch.tensor([[-1.0, -1.5, -2.5], [-800.0, -801.0, -803.0], [-900.0, -902.0, -901.0]])
    exact, wide = Exact(direction, tail="renormalise"), z.detach().double().requires_grad_()
    found = token_divergence(z, TokenSets.from_padded(torch.tensor([[1, 2, 3]]).repeat(3, 1), values=values), exact)
    p, q = wide.log_softmax(-1)[:, 1:].log_softmax(-1), values.double().log_softmax(-1)
    wanted = oracle.divergence(p, q, direction, exact.share)
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    (gradient,), (expected,) = (torch.autograd.grad(x.sum(), y) for x, y in ((found, z), (wanted, wide)))
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)
    absent = torch.tensor([[0.3, 1.0, -0.4, -torch.inf, 0.5]])
    ids, listed = torch.tensor([[0, 1, 3]]), torch.tensor([[-1.0, -2.0, -torch.inf]])
    both = [token_divergence(absent, TokenSets.from_padded(ids[:, :k], values=listed[:, :k]), Exact(direction)) for k in (3, 2)]
    torch.testing.assert_close(*both)


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
