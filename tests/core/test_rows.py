"""Rows whose numbers must keep their digits or be what torch has, kept sets, extra ids and second
distributions: what their float64 answers in test_combinations.py do not ask."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

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
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from grpo_kernels.batch import shift_targets
from grpo_kernels.formulas.surrogates import PolicyGradient
from grpo_kernels.losses import objective_loss
from support.bits import same_bits


@pytest.mark.slow
def test_more_than_2_to_the_31_logits(backend):
    """Rows behind the offsets that 32 bits hold."""
    logits = torch.zeros(1, 1, dtype=torch.bfloat16).expand(2**16 + 2, 2**15).clone()
    logits[-1, -1] = 9.0
    ids = torch.full((len(logits),), 2**15 - 1)
    with torch.no_grad():
        found = token_logprobs(logits, ids, options=Options(backend=backend))[0]
    exact = logits[-2:].double().log_softmax(-1)[:, -1]
    torch.testing.assert_close(found[-2:].double(), exact, rtol=1e-6, atol=1e-6)


# ---- sets


def test_metrics_of_sets():
    """Targets that missing="mask" takes out are counted; the KL is over the sets."""
    logits, mask = torch.randn(4, 6), torch.tensor([True, True, True, False])
    sets = TokenSets.from_lists([[1, 3], [3], [], [3]])
    batch = TokenBatch(
        torch.tensor([1, 2, 4, 5]),
        torch.ones(4),
        mask=mask,
        ref_logps=torch.randn(4),
        kept=sets,
        missing="mask",
    )
    out = grpo_loss(logits, batch, Objective.preset("dapo", beta=0.1, kl="k1"))
    assert (
        float(out.metrics["outside_set"]) == pytest.approx(1 / 3)
        and int(out.metrics["tokens"]) == 2
    )
    logps = torch.stack([logits[0, [1, 3]].log_softmax(0)[0], logits[2].log_softmax(0)[4]])
    kl = logps - batch.ref_logps[[0, 2]]
    assert float(out.metrics["kl"]) == pytest.approx(float(kl.mean()), rel=1e-5)


def test_sets_that_were_not_shifted_are_warned_of_once(monkeypatch):
    """From the second reading of metrics on; never of few targets, or where a few are outside."""
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    monkeypatch.setattr("grpo_kernels.set_alignment._earlier", None)
    ids, completion = torch.randint(3, 40, (4, 60)), torch.arange(60).expand(4, 60) >= 10
    records = [[[int(i), (int(i) + 7) % 40] for i in row[10:]] for row in ids]
    targets, generated = shift_targets(ids, mask=completion)

    def metrics(marked, rows=slice(None), changed=0):
        lists = [[*row] for row in records]
        for row in lists[:changed]:
            row[4] = [1]
        kept = TokenSets.from_lists(lists[rows], generated=marked[rows])
        batch = TokenBatch(targets[rows], torch.ones(4)[rows], mask=generated[rows], kept=kept)
        return grpo_loss(torch.randn(4, 60, 40)[rows], batch, Objective.preset("dapo")).metrics

    with warnings.catch_warnings(action="error"):
        for _ in range(2):
            assert metrics(generated)["outside_set"] == 0
            assert metrics(generated, changed=4)["outside_set"] == 4 / 200
            assert metrics(completion, slice(0, 1))["outside_set"] > 0.5  # of 50 targets
        assert metrics(completion)["outside_set"] > 0.5
    with pytest.warns(
        RuntimeWarning, match=r"\d\d% of the targets.*shift_targets.*generated=generated"
    ):
        metrics(generated)
    with warnings.catch_warnings(action="error"):
        metrics(completion), metrics(completion)


# ---- extra ids


REINFORCE = Objective(PolicyGradient(), aggregate="token-sum")
LISTS = TokenSets.from_lists([[7], [7, 9]], values=[[0.999], [1.0, -2.0]])
TEACHER = LISTS.with_values(torch.full((3,), -1.5))
#: The logit of the likely id 7 and its dtype, how near the gradient has to be, a call, and what it
#: is of float64 log-probs.
CERTAIN = {
    "extra ids": (
        13.0, torch.bfloat16, 2**-8,
        lambda z, o: token_logprobs(z, torch.tensor([3, 3]), at=LISTS, options=o).also["at"] @ torch.tensor([1.0, 1.0, -1.0]),
        lambda log_p: log_p[0, 7] + log_p[1, 7] - log_p[1, 9],
    ),
    "terms beside the targets": (
        10.6, torch.bfloat16, 2**-8,
        lambda z, o: grpo_loss(z, TokenBatch(torch.tensor([7, 7]), torch.ones(2), logp_terms=LISTS), REINFORCE, options=o).loss,
        lambda log_p: (0.999 - 1.0) * log_p[0, 7] - 2 * log_p[1, 9],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CERTAIN)
def test_slopes_at_ids_of_a_certain_row_keep_their_digits(name, backend):
    """1 - p of an id is the probability of all others, of which fp32 has more digits than of a sum
    near 1; and what cancels in a sum of slopes does so before they are rounded.
    """
    likely, dtype, rtol, ours, exact = CERTAIN[name]
    leaf = torch.zeros(2, 40).index_fill(1, torch.tensor(7), likely).to(dtype).requires_grad_()
    z = leaf.detach().double().requires_grad_()
    ours(leaf, Options(backend)).backward()
    exact(z.log_softmax(1)).backward()
    torch.testing.assert_close(leaf.grad.double(), z.grad, rtol=rtol, atol=1e-12)


def test_the_largest_probability_and_its_id(backend):
    """Of ties the first; of a row of only -inf NaN; over a set the set's; of a masked row none."""
    logits = torch.randn(5, 50)
    logits[1, [7, 30]] = logits[1].max() + 1
    logits[3] = -torch.inf
    asked = {
        "kept": TokenSets.from_lists([[], [], [4, 9, 2], [], []]),
        "mask": torch.arange(5) < 4,
        "also": ("top_prob", "top_id"),
    }
    more = token_logprobs(
        logits, torch.tensor([0, 1, 4, 3, 4]), options=Options(backend=backend), **asked
    ).also
    p, in_set = logits.double().softmax(1), logits[2, [4, 9, 2]].double().softmax(0)
    assert more["top_id"].tolist() == [
        int(p[0].argmax()),
        7,
        [4, 9, 2][int(in_set.argmax())],
        0,
        -1,
    ]
    wanted = torch.stack([p[0].max(), p[1].max(), in_set.max()])
    torch.testing.assert_close(more["top_prob"][:3].double(), wanted, rtol=2e-6, atol=0)
    assert more["top_prob"][3].isnan() and more["top_prob"][4] == 0


# ---- second distributions


def test_logits_with_None_as_their_transform_have_none():
    """And not that of the policy."""
    logits, other, divergence = torch.randn(3, 5), torch.randn(3, 5), Exact("reverse")
    found, wanted = (
        token_divergence(logits, (other, own), divergence, transform=LogitTransform(2.0))
        for own in (None, LogitTransform())
    )
    assert same_bits(found, wanted) and not same_bits(found, torch.zeros(3))


def test_several_teachers_are_a_sum_of_divergences(backend):
    """As docs/divergences.md adds them up, against float64:

    value and gradients of the policy's tensors.
    """
    batch, objective = (
        TokenBatch(torch.randint(30, (2, 5)), torch.ones(2)),
        Objective.preset("distillation", kl=Exact("jsd")),
    )
    policy, first, second = ((torch.randn(2, 5, n), torch.randn(30, n)) for n in (8, 4, 6))
    weights, options = torch.tensor([[1.0], [0.0]]), Options(backend=backend)
    ours, exact = (
        [x.to(dtype).requires_grad_() for x in policy] for dtype in (torch.float32, torch.float64)
    )

    def of(teacher):
        return linear_divergence(*ours, teacher, Exact("jsd"), options=options)

    logps = linear_logprobs(*ours, batch.targets, options=options).logps
    found = objective_loss(
        logps, batch, objective, divergence=weights * of(first) + 0.2 * of(second)
    ).loss
    log_p, log_q, log_r = (
        (h.double() @ w.double().T).log_softmax(-1) for h, w in (exact, first, second)
    )
    each = weights * jsd(log_p, log_q) + 0.2 * jsd(log_p, log_r)
    wanted = objective_loss(logps.detach().double(), batch, objective, divergence=each).loss
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(loss, leaves) for loss, leaves in ((found, ours), (wanted, exact))
    ]
    torch.testing.assert_close(
        [x.double() for x in gradients[0]], [*gradients[1]], rtol=1e-4, atol=1e-6
    )


def jsd(log_p, log_q):
    """The Jensen-Shannon divergence of rows."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1)


def test_entropy_and_kl_over_the_vocabulary_beside_a_ratio_over_sets(backend):
    """As docs/token_sets.md puts them together, against float64."""
    logits, targets = torch.randn(2, 5, 30), torch.randint(30, (2, 5))
    sets = TokenSets.from_lists([[int(t), (int(t) + 3) % 30] for t in targets.flatten()])
    advantages, old, ref = (
        torch.tensor([1.0, -1.0]),
        -0.7 + 0.1 * torch.randn(2, 5),
        -3.0 + torch.randn(2, 5),
    )
    batch = TokenBatch(targets, advantages, old_logps=old, kept=sets)
    of_kl = replace(batch, advantages=torch.zeros(2), old_logps=None, ref_logps=ref, kept=None)
    ours, exact, options = (
        logits.clone().requires_grad_(),
        logits.double().requires_grad_(),
        Options(backend=backend),
    )
    logps = token_logprobs(ours, targets, kept=sets, options=options).logps
    whole, entropy = token_logprobs(ours, targets, entropy=True, options=options)
    found = objective_loss(
        logps, batch, Objective.preset("dapo", entropy_coef=0.1), entropy=entropy
    ).loss
    found = found + objective_loss(whole, of_kl, Objective.preset("dapo", beta=0.3, kl="k3")).loss
    log_p = exact.log_softmax(-1)
    chosen, other = (
        log_p.gather(-1, ids[..., None])[..., 0] for ids in (targets, (targets + 3) % 30)
    )
    ratio = (chosen - torch.logaddexp(chosen, other) - old).exp()
    policy = -torch.minimum(
        ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None]
    )
    kl = (ref - chosen).exp() - 1 - (ref - chosen)
    wanted = (policy + 0.1 * (log_p.exp() * log_p).sum(-1) + 0.3 * kl).mean()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    (a,), (b,) = torch.autograd.grad(found, ours), torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [None, torch.arange(10).view(2, 5) // 2], ids=str)
def test_a_head_of_the_reference_stands_for_its_log_probs(rows, backend):
    """For an estimate of the KL: a forward product in place of batch.ref_logps, under a transform
    of its own, over sets, of rows that tokens share or not.
    """
    hidden, weight, other = torch.randn(2, 5, 8), torch.randn(30, 8), torch.randn(30, 8)
    of_tokens = hidden if rows is None else hidden.flatten(0, 1)[rows]
    targets, advantages = torch.randint(30, (2, 5)), torch.tensor([1.0, -1.0])
    objective = Objective.preset("dapo", beta=0.3)
    sets = TokenSets.from_lists(
        [[int(t), (int(t) + 3) % 30] if i % 2 else [] for i, t in enumerate(targets.flatten())]
    )
    own, options = LogitTransform(0.6), Options(backend=backend)
    ref = token_logprobs(of_tokens @ other.T, targets, kept=sets, transform=own)[0]
    found, wanted = (hidden.clone().requires_grad_() for _ in range(2))
    of_head, given = (
        TokenBatch(targets, advantages, ref_logps=x, kept=sets, rows=rows) for x in (None, ref)
    )
    a = linear_grpo_loss(
        found,
        weight,
        of_head,
        objective,
        reference=(hidden, Head(other, transform=own)),
        options=options,
    )
    b = linear_grpo_loss(wanted, weight, given, objective, options=options)
    (a.loss + b.loss).backward()
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)


def test_a_reference_that_was_made_in_inference_mode_or_written_to(backend):
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
