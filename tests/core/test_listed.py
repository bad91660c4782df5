"""Terms in the log-probs of listed ids, against float64 and autograd."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_kernels import (
    Cispo,
    Clip,
    ImportanceSampling,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    TrustRegion,
    grpo_loss,
    linear_grpo_loss,
)
from grpo_kernels.formulas.centering import ScoreCentering
from grpo_kernels.formulas.extra_id_terms import LEAST_OUTSIDE, probability_outside
from grpo_kernels.formulas.surrogates import NoPolicyTerm, PolicyGradient
from support import pages
from support.call_cases import CallCase, problem
from support.public_functions import make_batch

V = 61


@pytest.mark.parametrize("level, slope", [("token", 1 / 6), ("sequence", 1 / 18)])
def test_what_is_listed_at_a_token_of_weight_0_adds_nothing(level, slope, backend):
    """Infinite values neither, in loss and gradient; whether the slopes are made with the losses or
    wait for a sequence. What cancels at ids leaves the rest.
    """
    logits, found = torch.randn(1, 3, V), []
    for value in (math.inf, 0.5):
        sets = TokenSets.from_lists(
            [[1, 3], [], [3, 9, 11]], values=[[value, -value], [], [1e9, -1e9, 0.5]]
        )
        batch = TokenBatch(
            torch.tensor([[4, 5, 2]]),
            torch.ones(1),
            weights=torch.tensor([[0.0, 1.0, 1.0]]),
            logp_terms=sets,
        )
        leaf = logits.clone().requires_grad_()
        grpo_loss(leaf, batch, Objective(level=level), options=Options(backend)).loss.backward()
        torch.testing.assert_close(leaf.grad[0, 2, 5], slope * logits[0, 2].softmax(0)[5])
        found.append(leaf.grad)
    assert torch.equal(*found)


#: Functions of one's own that do something else than they should -> what each is refused with, by
#: whatever runs it.
WRONG = {
    lambda logp, *_: [logp, logp]: "^listed=.* no pair of tensors", lambda logp, *_: (logp, 1.0): "^listed=.* no pair",
    lambda logp, values, advantage, sum_over_ids: (sum_over_ids(1.0) * logp, logp): "^sum_over_ids is given a float",
    lambda logp, *_: (logp, int("own")): "^invalid literal",
}  # fmt: skip


def test_a_function_of_ones_own(backend):
    """In place of c log p:

    KL to what is listed, over the ids alone, and half its square; and over given memory the same.
    """

    def kl(logp, values, advantage, sums):
        p, apart = logp.exp(), logp - values
        of_row = advantage * sums(p * apart)
        return advantage * p * apart * (1.0 + 0.5 * of_row), advantage * p * (apart + 1.0) * (
            1.0 + of_row
        )

    sets = TokenSets.from_lists(
        [[1, 3], [], range(2, 602)], values=[[-1.0, -2.0], [], [-3.0] * 600]
    )
    logits, targets, A = (
        torch.randn(3, 701),
        torch.tensor([1, 4, 7]),
        torch.tensor([1.0, -0.7, 0.4]),
    )
    z = logits.double().requires_grad_()
    log_p = z.log_softmax(1)
    at = log_p[sets.row_of, sets.ids.long()]
    of_row = A * torch.zeros(3).double().index_add(0, sets.row_of, at.exp() * (at - sets.values))
    exact = (of_row + 0.5 * of_row.square() - A * log_p[range(3), targets]).mean()
    exact.backward()
    batch, spec = TokenBatch(targets, A, logp_terms=sets), Objective(PolicyGradient(), listed=kl)
    leaf = logits.clone().requires_grad_()
    loss = grpo_loss(leaf, batch, spec, options=Options(backend)).loss
    loss.backward()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(leaf.grad.double(), z.grad, rtol=1e-5, atol=1e-6)
    for function, says in WRONG.items():
        for strict in (False, True):
            with pytest.raises(ValueError, match=says):
                grpo_loss(
                    logits,
                    batch,
                    replace(spec, listed=function),
                    options=Options(backend, strict=strict),
                )


#: A surrogate and a trust region of which either takes some ids of the sampler below and leaves
#: others.
CENTERED = {
    "reinforce": (PolicyGradient(),), "tis": (Cispo(1.1),), "both bounds": (Cispo(1.1, 0.9),),
    "icepop": (Cispo(math.inf), TrustRegion("ratio", 0.15, 0.1)), "ipo": (ImportanceSampling(), TrustRegion("symmetric-tv", 0.02, 0.02)),
    "ppo": (Clip(0.1, 0.1),),
}  # fmt: skip


@pytest.mark.parametrize("A", [1.7, -0.6])
@pytest.mark.parametrize("what", CENTERED)
@pytest.mark.parametrize("tail", [False, True], ids=["over all ids", "with a tail"])
def test_score_centering_has_no_drift(tail, what, A, backend):
    """The mean of the loss' gradient over the sampler's tokens is 0, though the sampler is not the
    policy: over all of its ids, or over its head where p / q of the tail is one number. Of a token
    that the trust region drops the centering stays.
    """
    head, (surrogate, *trust) = 4 if tail else V, CENTERED[what]
    g = torch.Generator().manual_seed(1)
    z = torch.randn(V, generator=g, dtype=torch.float64)
    z[:4] += 4.0
    p, q = z.softmax(0), (z + 0.5 * torch.randn(V, generator=g, dtype=torch.float64)).softmax(0)
    if tail:
        q = torch.cat([q[:head], p[head:] * (1 - q[:head].sum()) / p[head:].sum()])
    sets = TokenSets.from_lists([list(range(head))] * V, values=[q[:head].log().tolist()] * V)
    batch = TokenBatch(
        torch.arange(V), torch.full((V,), A), old_logps=q.log().float(), logp_terms=sets
    )
    drift = []
    for listed in (None, ScoreCentering(surrogate, *trust, tail=tail)):
        leaf = z.float().repeat(V, 1).requires_grad_()
        spec = Objective(surrogate, filters=tuple(trust), aggregate="token-sum", listed=listed)
        grpo_loss(
            leaf,
            batch if listed else replace(batch, logp_terms=None),
            spec,
            options=Options(backend),
        ).loss.backward()
        drift.append((q[:, None] * leaf.grad).sum(0).abs().max())
    assert drift[1] < 1e-6 < 1e-3 < drift[0]


@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize("outside", [0.3, 3.7e-5, 1.6e-5, 2.7e-7, 1e-7, 1e-12])
@pytest.mark.parametrize("sampled", ["listed", "other"])
def test_score_centering_of_a_confident_policy(sampled, outside, source, backend):
    """The list has nearly all of p and not of q. The gradient keeps its digits however small
    P = 1 - sum p is; of P at least 1e-6 is taken.
    """
    g = torch.Generator().manual_seed(6)
    n, k, vocab, eps = 6, 4, 23, torch.finfo(torch.float32).eps
    p = torch.cat(
        [
            (1 - outside) * torch.rand(n, k, generator=g).double().softmax(1),
            outside * torch.rand(n, vocab - k, generator=g).double().softmax(1),
        ],
        1,
    )
    q = 0.7 * torch.rand(n, k, generator=g).double().softmax(1)
    advantages = torch.tensor([1.0, -0.8, 0.5, -1.0, 0.9, 0.3])
    targets = torch.full((n,), 1 if sampled == "listed" else 9)
    head = TokenSets.from_padded(torch.arange(k).expand(n, k), values=q.log().float())
    logits = p.log().float()
    for policy in (NoPolicyTerm(), PolicyGradient()):
        objective = Objective(policy, aggregate="token-sum", listed=ScoreCentering())
        batch = TokenBatch(targets, advantages, logp_terms=head)
        leaf = logits.clone().requires_grad_()
        options = Options(backend=backend, strict=True)
        if source == "logits":
            out = grpo_loss(leaf, batch, objective, options=options)
        else:  # the identity is a head
            out = linear_grpo_loss(
                leaf, torch.eye(vocab, requires_grad=True), batch, objective, options=options
            )
        out.loss.backward()
        now, seen = logits.double().softmax(1), head.values.double().view(n, k).exp()
        rest = now[:, k:].sum(1, keepdim=True)
        ratio = (1 - seen.sum(1, keepdim=True)) / rest.clamp(min=1e-6)
        exact = torch.cat([seen, ratio * now[:, k:]], 1) - now * (
            seen.sum(1, keepdim=True) + ratio * rest
        )
        if policy == PolicyGradient():
            exact = exact + now - torch.nn.functional.one_hot(targets, vocab)
        found, exact = leaf.grad.double(), exact * advantages[:, None]
        torch.testing.assert_close(found[:, :k], exact[:, :k], rtol=0, atol=4 * eps)
        # The kernel returns log(P / p) in fp32. Its rounding is relative in P.
        digits = eps * (4 + abs(math.log(outside)))
        torch.testing.assert_close(found[:, k:], exact[:, k:], rtol=digits, atol=eps)


def test_score_centering_where_logits_are_read_twice(backend):
    """The gradient of fp16 logits is that of the same logits in fp32, rounded."""
    logits = torch.randn(4, V).half()
    head = TokenSets.from_padded(
        torch.arange(5).expand(4, 5), values=torch.rand(4, 5).softmax(1).log() - 0.5
    )
    batch = TokenBatch(torch.arange(4) * 2, torch.tensor([1.0, -0.8, 0.5, -1.0]), logp_terms=head)
    objective = Objective(PolicyGradient(), aggregate="token-sum", listed=ScoreCentering())
    gradients = []
    for x in (logits, logits.float()):
        leaf = x.clone().requires_grad_()
        grpo_loss(leaf, batch, objective, options=Options(backend=backend)).loss.backward()
        gradients.append(leaf.grad.float())
    torch.testing.assert_close(*gradients, rtol=torch.finfo(torch.float16).eps, atol=1e-6)


def test_what_the_page_shows():
    """The examples of docs/token_sets.md, in float64:

    soft targets, a KL that is unbiased whatever the head, a total variation.
    """
    names = pages.given()
    for example in pages.examples(pages.ROOT / "docs" / "token_sets.md"):
        exec(compile(example.code, example.name, "exec"), names)
    mask, ids, log_q = names["mask"], names["teacher_ids"], names["teacher_logps"].double()
    log_p = (names["hidden"].double() @ names["weight"].double().T).log_softmax(-1).detach()
    of_teacher = log_p.flatten(0, 1).gather(1, ids)
    soft = -(log_q.exp() * of_teacher).sum(1).view(mask.shape)[mask].mean()
    torch.testing.assert_close(names["soft_targets"].loss.double(), soft, rtol=1e-5, atol=0)
    p, q = of_teacher.exp(), log_q.exp()
    whole = [torch.cat([x, 1 - x.sum(1, keepdim=True)], 1)[mask.view(-1)] for x in (p, q)]
    of_page = [names[name].double()[mask.view(-1)] for name in ("apart", "kl")]
    apart = (
        0.5 * (whole[0] - whole[1]).abs().sum(1),
        (whole[1] * (whole[1] / whole[0]).log()).sum(1),
    )
    torch.testing.assert_close(of_page, [*apart], rtol=1e-4, atol=1e-6)

    z, q = torch.randn(
        2, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    ).log_softmax(1)
    exact = z.clone().requires_grad_()
    log_p = exact.log_softmax(0)
    (kl := (log_p.exp() * (log_p - q)).sum()).backward()
    for k in (0, 3, 12):
        top = z.topk(k).indices.tolist()
        lists = [[*top, *[y] * (y not in top)] for y in range(12)]
        values = [[float(q[i]) if i in top else -float(q[i]) for i in row] for row in lists]
        leaf = z.float().repeat(12, 1).requires_grad_()
        batch = TokenBatch(
            torch.arange(12),
            torch.zeros(12),
            logp_terms=TokenSets.from_lists(lists, values=values),
            weights=z.exp().float(),
        )
        found = grpo_loss(
            leaf, batch, Objective(NoPolicyTerm(), aggregate="token-sum", listed=names["top_k_kl"])
        )
        found.loss.backward()
        torch.testing.assert_close(found.loss.double(), 0.05 * kl.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(leaf.grad.double().sum(0), 0.05 * exact.grad, rtol=0, atol=1e-7)


def test_a_batch_moves_with_one_list_of_ids():
    batch = make_batch(problem(CallCase(listed="some")))
    moved = batch._apply(torch.clone)
    assert moved.logp_terms.ids is moved.prob_terms.ids is not batch.logp_terms.ids
    assert torch.equal(moved.prob_terms.values, batch.prob_terms.values)


@pytest.mark.parametrize("logp", [0.0, -1e-9])
def test_the_probability_outside_of_a_list_is_bounded(logp):
    """So score centering is finite where the policy has no mass outside of the list."""
    logps = torch.tensor([logp])
    assert probability_outside(logps, lambda x: x) == torch.tensor(LEAST_OUTSIDE)
    term, grad = ScoreCentering()(logps, torch.tensor([-0.5]), torch.ones(1), lambda x: x)
    assert torch.stack([term, grad]).isfinite().all()
