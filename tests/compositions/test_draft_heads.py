"""Losses of draft heads against plain PyTorch in float64: both kinds, depths, masks, packed
sequences, chunks, transforms, metrics, what has a gradient, errors, and what a call costs.
"""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from grpo_kernels import (
    Exact,
    Head,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    draft_head_loss,
    linear_grpo_loss,
)
from support.inside import Allocations, count_products, in_chunks

B, T, H, V = 3, 9, 24, 131
LEFT_PADDED = torch.arange(T) >= torch.tensor([0, 3, 5])[:, None]
RIGHT_PADDED = torch.arange(T) < torch.tensor([9, 6, 2])[:, None]
HOLES = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1]] * B).bool()
SOFTCAPPED = LogitTransform(temperature=0.7, softcap=5.0, scale=1.3)


def problem(depths=2, dtype=torch.float32, shape=(B, T), seed=0):
    """Hidden states of drafts and policy, a head, and ids."""
    torch.manual_seed(seed)
    drafts = [torch.randn(*shape, H).to(dtype).requires_grad_() for _ in range(depths)]
    policy = torch.randn(*shape, H).to(dtype).requires_grad_()
    weight = (torch.randn(V, H) / 3).to(dtype).requires_grad_()
    bias = torch.randn(V).to(dtype).requires_grad_()
    return drafts, policy, weight, bias, torch.randint(V, shape)


def log_softmax(hidden, weight, bias=None, transform=None):
    """Log-probs of each id in float64."""
    logits = hidden.detach().double() @ weight.detach().double().T
    if bias is not None:
        logits = logits + bias.detach().double()
    if transform is not None:
        logits = logits * transform.scale
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
        logits = logits / transform.temperature
    return logits.log_softmax(-1)


def sequences_of(shape, cu_seqlens):
    """Slices of the flat positions, one for each sequence."""
    if cu_seqlens is not None:
        return [slice(a, b) for a, b in pairwise(cu_seqlens.tolist())]
    return [slice(i * shape[1], (i + 1) * shape[1]) for i in range(shape[0])]


def expected(kind, drafts, policy, head, ids, mask, cu_seqlens=None, depth=0, transform=None):
    """For each depth: the losses, masks, acceptances and agreements of flat positions, one by one."""
    shape = policy.shape[:-1]
    real = torch.ones(shape, dtype=torch.bool) if mask is None else mask
    real = real.flatten().tolist()
    log_q = log_softmax(policy, *head, transform=transform).flatten(0, -2)
    flat_ids = ids.flatten().tolist()
    results = []
    for k, draft in enumerate(drafts, depth):
        log_p = log_softmax(draft, *head, transform=transform).flatten(0, -2)
        loss, counts, acceptance, agreement = torch.zeros(4, len(real), dtype=torch.float64)
        for sequence in sequences_of(shape, cu_seqlens):
            for t in range(sequence.start, sequence.stop):
                last = t + k + (1 if kind == "soft" else 2)
                if last >= sequence.stop or not (real[t] and real[last]):
                    continue
                counts[t] = 1
                if kind == "soft":
                    q = log_q[last].exp()
                    loss[t] = -(q * log_p[t]).sum()
                    acceptance[t] = torch.minimum(q, log_p[t].exp()).sum()
                    agreement[t] = log_p[t].argmax() == q.argmax()
                else:
                    loss[t] = -log_p[t, flat_ids[last]]
                    agreement[t] = log_p[t].argmax() == flat_ids[last]
        results.append((loss, counts, acceptance, agreement))
    return [torch.stack(x) for x in zip(*results, strict=True)]


def reference_loss(kind, drafts, policy, head, ids, mask, cu_seqlens=None, depth=0, transform=None):
    """The loss by autograd in float64, and the gradient of each draft."""
    leaves = [x.detach().double().requires_grad_() for x in drafts]
    counts = expected(kind, drafts, policy, head, ids, mask, cu_seqlens, depth, transform)[1]
    weight, bias = head[0].detach().double(), head[1]
    total = 0.0
    for k, (x, count) in enumerate(zip(leaves, counts, strict=True), depth):
        logits = x @ weight.T if bias is None else x @ weight.T + bias.detach().double()
        if transform is not None:
            logits = transform.softcap * torch.tanh(logits * transform.scale / transform.softcap)
            logits = logits / transform.temperature
        log_p = logits.log_softmax(-1).flatten(0, -2)
        if kind == "soft":
            q = log_softmax(policy, *head, transform=transform).exp().flatten(0, -2)
            losses = -(q.roll(-(k + 1), 0) * log_p).sum(-1)
        else:
            labels = ids.flatten().roll(-(k + 2))
            losses = F.nll_loss(log_p, labels, reduction="none")
        total = total + torch.where(count > 0, losses, 0.0).sum() / count.sum().clamp(min=1)
    loss = total / len(drafts)
    loss.backward()
    return loss.detach(), [x.grad for x in leaves]


def run(kind, drafts, policy, head, ids, **arguments):
    """Call the function, and return its result and the gradients."""
    out = draft_head_loss(
        drafts if len(drafts) > 1 else drafts[0],
        policy if kind == "soft" else None,
        Head(*head),
        kind=kind,
        ids=ids if kind == "hard" else None,
        **arguments,
    )
    return out, torch.autograd.grad(out.loss, drafts)


CASES = {
    "all": {},
    "one depth": {"depths": 1},
    "later depths": {"depth": 2},
    "left padding": {"mask": LEFT_PADDED},
    "right padding": {"mask": RIGHT_PADDED},
    "holes": {"mask": HOLES},
    "bias": {"has_bias": True},
    "transform": {"transform": SOFTCAPPED, "has_bias": True},
    "packed": {"cu_seqlens": [0, 4, 4, 5, 13, 27]},
    "packed with padding": {"cu_seqlens": [0, 9, 18, 27], "mask": RIGHT_PADDED.flatten()},
    "as deep as a sequence": {"cu_seqlens": [0, 2, 3, 27], "depths": 3},
    "nothing counts": {"mask": torch.zeros(B, T, dtype=torch.bool)},
    "deeper than all": {"depth": T, "depths": 1},
}


@pytest.mark.parametrize("chunk", [4, 1000], ids="chunk {}".format)
@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_float64(case, kind, chunk, backend, monkeypatch):
    in_chunks(monkeypatch, chunk)
    case = dict(case)
    cu_seqlens = case.pop("cu_seqlens", None)
    shape = (B, T) if cu_seqlens is None else (B * T,)
    drafts, policy, weight, bias, ids = problem(case.pop("depths", 2), shape=shape)
    head = (weight, bias if case.pop("has_bias", False) else None)
    if cu_seqlens is not None:
        case["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32)
    mask = case.pop("mask", None)

    out, gradients = run(
        kind, drafts, policy, head, ids, mask=mask, options=Options(backend), **case
    )
    losses, counts, acceptance, agreement = expected(kind, drafts, policy, head, ids, mask, **case)
    loss, exact_gradients = reference_loss(kind, drafts, policy, head, ids, mask, **case)

    def close(x, y):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-6)

    def mean(x):
        return x.sum(1) / counts.sum(1).clamp(min=1)

    close(out.loss, loss)
    close(out.token_losses.flatten(1), losses)
    assert torch.equal(out.mask.flatten(1), counts > 0)
    assert torch.equal(out.token_losses == 0, ~out.mask)
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        close(gradient, exact)
    close(out.metrics["loss"], mean(losses))
    close(out.metrics["positions"], counts.sum(1))
    close(out.metrics["top1_agreement"], mean(agreement))
    assert ("acceptance" in out.metrics) == (kind == "soft")
    if kind == "soft":
        close(out.metrics["acceptance"], mean(acceptance))


def test_a_draft_that_equals_its_teacher_is_always_accepted(backend):
    """The loss is then the teacher's entropy, and the gradient 0 but for rounding."""
    _, policy, weight, _, ids = problem()
    draft = policy.detach().roll(-1, 1).requires_grad_()
    out, (gradient,) = run("soft", [draft], policy, (weight, None), ids, options=Options(backend))
    log_q = log_softmax(policy, weight)[:, 1:]
    entropy = -(log_q.exp() * log_q).sum(-1).mean()
    torch.testing.assert_close(out.loss.double(), entropy, rtol=1e-6, atol=1e-6)
    assert float(out.metrics["acceptance"]) > 1 - 1e-6
    assert float(out.metrics["top1_agreement"]) == 1
    assert float(gradient.abs().max()) < 1e-8


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_trunk_and_head_get_no_gradient(kind, backend):
    drafts, policy, weight, bias, ids = problem()
    out, _ = run(kind, drafts, policy, (weight, bias), ids, options=Options(backend))
    unused = torch.autograd.grad(
        draft_head_loss(
            drafts,
            policy if kind == "soft" else None,
            Head(weight, bias),
            kind=kind,
            ids=ids if kind == "hard" else None,
            options=Options(backend),
        ).loss,
        [policy, weight, bias, *drafts],
        allow_unused=True,
    )
    assert [x is None for x in unused] == [True] * 3 + [False] * len(drafts)
    assert not any(x.requires_grad for x in out.metrics.values())


def test_a_frozen_depth_and_no_grad_mode_take_no_gradient_matmul(backend, monkeypatch):
    drafts, policy, weight, _, _ = problem()
    drafts[0].requires_grad_(False)
    rows = count_products(monkeypatch)
    draft_head_loss(drafts, policy, weight, options=Options(backend)).loss.backward()
    assert rows["d_hidden"] == B * (T - 1) and drafts[0].grad is None
    with torch.no_grad():
        out = draft_head_loss(drafts, policy, weight, options=Options(backend))
    assert rows["d_hidden"] == B * (T - 1) and not out.loss.requires_grad


def test_weights_of_positions_and_a_normalizer(backend):
    """Losses of positions are differentiable, and a number may replace the denominator."""
    drafts, policy, weight, _, _ = problem()
    options = Options(backend)
    out = draft_head_loss(drafts, policy, weight, normalizer=torch.tensor(50.0), options=options)
    assert torch.allclose(out.loss, out.token_losses.sum() / 50 / 2)
    token_weights = torch.rand(2, B, T)
    gradients = torch.autograd.grad((out.token_losses * token_weights).sum(), drafts)
    head = (weight.detach().double(), None)
    for k, (draft, gradient) in enumerate(zip(drafts, gradients, strict=True)):
        leaf = draft.detach().double().requires_grad_()
        q = log_softmax(policy, *head).exp().roll(-(k + 1), 1)
        losses = -(q * (leaf @ head[0].T).log_softmax(-1)).sum(-1)[:, : T - k - 1]
        (losses * token_weights[k, :, : T - k - 1]).sum().backward()
        torch.testing.assert_close(gradient.double(), leaf.grad, rtol=2e-5, atol=2e-6)


def test_nan_at_positions_that_do_not_count_changes_nothing(backend):
    drafts, policy, weight, _, ids = problem()
    arguments = {"mask": LEFT_PADDED, "options": Options(backend)}
    out, gradients = run("soft", drafts, policy, (weight, None), ids, **arguments)
    poisoned = [x.detach().clone() for x in (*drafts, policy)]
    for x in poisoned:
        x[~LEFT_PADDED] = torch.nan
    *draft_leaves, teacher = (x.requires_grad_() for x in poisoned)
    again, again_gradients = run("soft", draft_leaves, teacher, (weight, None), ids, **arguments)
    assert torch.equal(out.token_losses, again.token_losses)
    for x, y in zip(gradients, again_gradients, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_hidden_states(dtype, backend):
    """Logits are fp32, so that the error is one of the gradient's rounding."""
    drafts, policy, weight, _, ids = problem(dtype=dtype)
    out, gradients = run("soft", drafts, policy, (weight, None), ids, options=Options(backend))
    loss, exact = reference_loss("soft", drafts, policy, (weight, None), ids, None)
    torch.testing.assert_close(out.loss.double(), loss, rtol=1e-5, atol=1e-5)
    for gradient, x in zip(gradients, exact, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - x).norm() <= 2.0**-7 * x.norm()


def test_metrics_can_be_left_out(backend):
    drafts, policy, weight, _, _ = problem()
    out = draft_head_loss(drafts, policy, weight, options=Options(backend))
    plain = draft_head_loss(drafts, policy, weight, metrics=False, options=Options(backend))
    assert torch.equal(out.token_losses, plain.token_losses)
    assert set(plain.metrics) == {"loss", "positions"}
    assert set(out.metrics) == {"loss", "positions", "acceptance", "top1_agreement"}


def test_the_loss_runs_outside_of_a_compiled_graph():
    drafts, policy, weight, _, _ = problem()

    def loss(*drafts):
        return draft_head_loss([2 * x for x in drafts], policy, weight).loss

    compiled = torch.compile(loss, backend="eager")
    torch.testing.assert_close(compiled(*drafts), loss(*drafts))


def test_a_draft_with_a_trained_head_over_fewer_ids(backend):
    """The recipe of the page: gradients of draft and head are those of the cross-entropy with the
    policy's distribution over these ids.
    """
    (draft,), policy, weight, _, ids = problem(depths=1)
    draft_ids = torch.arange(0, V, 3)
    draft_weight = (torch.randn(len(draft_ids), H) / 3).requires_grad_()
    counted = RIGHT_PADDED[:, :-1] & RIGHT_PADDED[:, 1:]
    out = linear_grpo_loss(
        draft[:, :-1],
        draft_weight,
        TokenBatch(torch.zeros_like(ids[:, 1:]), mask=counted),
        Objective.preset("distillation", kl=Exact("forward")),
        reference=(policy.detach()[:, 1:], weight.detach()[draft_ids]),
        options=Options(backend),
    )
    gradients = torch.autograd.grad(out.loss, (draft, draft_weight))

    leaves = [x.detach().double().requires_grad_() for x in (draft, draft_weight)]
    q = log_softmax(policy[:, 1:], weight[draft_ids]).exp()
    log_p = (leaves[0][:, :-1] @ leaves[1].T).log_softmax(-1)
    losses = -(q * log_p).sum(-1)
    exact = torch.autograd.grad(losses[counted].mean(), leaves)
    for gradient, x in zip(gradients, exact, strict=True):
        torch.testing.assert_close(gradient.double(), x, rtol=2e-5, atol=2e-6)


# ---- what a call costs


@pytest.mark.parametrize("metrics", [True, False])
@pytest.mark.parametrize("depths", [1, 3])
def test_depths_share_the_matmul_of_the_policy(depths, metrics, backend, monkeypatch):
    """One matmul of the policy's positions, and two of each depth's; none for metrics."""
    drafts, policy, weight, _, _ = problem(depths)
    rows = count_products(monkeypatch)
    out = draft_head_loss(drafts, policy, weight, metrics=metrics, options=Options(backend))
    out.loss.backward()
    taught = B * (T - 1)
    assert rows == {"logits": taught * (1 + depths), "d_hidden": taught * depths}


def test_hard_takes_two_matmuls_of_the_positions_that_count(backend, monkeypatch):
    drafts, _, weight, _, ids = problem()
    rows = count_products(monkeypatch)
    out = draft_head_loss(drafts, None, weight, kind="hard", ids=ids, options=Options(backend))
    out.loss.backward()
    counted = int(out.mask.sum())
    assert rows == {"logits": counted, "d_hidden": counted}


def test_masked_positions_of_the_policy_take_no_matmul(backend, monkeypatch):
    drafts, policy, weight, _, _ = problem(1)
    rows = count_products(monkeypatch)
    out = draft_head_loss(drafts[0], policy, weight, mask=RIGHT_PADDED, options=Options(backend))
    out.loss.backward()
    counted = int(out.mask.sum())
    assert rows == {"logits": 2 * counted, "d_hidden": counted}


def test_no_tensor_has_the_logits_of_all_positions(backend, monkeypatch):
    """Logits exist for a chunk of positions, of which kernels in PyTorch make several tensors."""
    in_chunks(monkeypatch, 2)
    drafts, policy, weight, _, _ = problem()
    with Allocations() as seen:
        draft_head_loss(drafts, policy, weight, options=Options(backend)).loss.backward()
    sizes = [torch.Size(shape).numel() for shape in seen.shapes if V in shape and shape != (V, H)]
    assert sizes and max(sizes) <= 4 * 2 * V < B * (T - 1) * V / 2


# ---- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "medium"}, "kind='medium'"),
        ({"depth": -1}, "depth=-1"),
        ({"draft_hidden": []}, "draft_hidden"),
        ({"draft_hidden": [torch.zeros(B, T, H), torch.zeros(B, T - 1, H)]}, r"draft_hidden\[1\]"),
        ({"policy_hidden": torch.zeros(B, T - 1, H)}, "policy_hidden has shape"),
        ({"policy_hidden": None}, "policy_hidden is a NoneType"),
        ({"policy_hidden": torch.zeros(B, T, H + 1)}, "policy_hidden has shape"),
        ({"ids": torch.zeros(B, T, dtype=torch.int64)}, "ids='given'"),
        ({"kind": "hard"}, "policy_hidden='given'"),
        ({"kind": "hard", "policy_hidden": None}, "ids is a NoneType"),
        ({"mask": torch.ones(B, T + 1)}, "mask has shape"),
        ({"cu_seqlens": torch.tensor([0, B * T])}, "cu_seqlens goes with packed"),
        ({"weight": torch.zeros(V, H + 1)}, "the last dimensions must agree"),
    ],
    ids=itertools.count(),
)
def test_errors_name_the_argument(changes, message):
    drafts, policy, weight, _, _ = problem()
    arguments = {"draft_hidden": drafts, "policy_hidden": policy, "weight": weight, **changes}
    with pytest.raises(ValueError, match=message):
        draft_head_loss(**arguments)


def test_a_keyword_in_the_wrong_place_is_refused():
    drafts, policy, weight, _, _ = problem()
    with pytest.raises(TypeError, match="LogitTransform"):
        draft_head_loss(drafts, policy, weight, temperature=0.7)
