"""Every objective once against float64, from logits and from hidden states: value, log-probs,
entropy, gradient and metrics; formulas and weights of a user's own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from grpo_kernels import Custom, Objective, Options, TokenBatch, grpo_loss
from grpo_kernels.formulas.ops import ops
from grpo_kernels.losses import objective_loss
from support import oracle
from support.call_cases import CallCase, problem
from support.inside import executor, executors
from support.objectives import OBJECTIVES
from support.public_functions import check_case, expected_and_tolerance, make_batch, make_call

LENGTHS = (7, 4, 2, 0, 6, 1, 5, 3)


@cache
def case(name, source, marked=False):
    """With the first seed for which no number lies at a bound.

    From hidden states on-policy, without weights, where that can be. marked: some tokens or
    sequences are marked as on-policy.
    """
    own = {
        "layout": ("padded", "packed")[len(name) % 2],
        "other": "near" if "exact" in name else "none",
    }
    given = (
        ("everything",) if source == "logits" or "sampler" in name else ("on-policy", "everything")
    )
    seeds = (
        CallCase(source=source, objective=name, lengths=LENGTHS, given=x, seed=i, **own)
        for x in (("marked",) if marked else given)
        for i in range(5)
    )
    return next(r for r in seeds if expected_and_tolerance(r)[0].clear)


@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_what_its_paper_says(name, source):
    """On every executor."""
    for each in executors():
        with executor(each) as backend:
            check_case(case(name, source), backend=backend)


@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_marked_tokens_have_a_ratio_of_1(name, source, backend):
    """And its gradient, whatever their old log-probs are."""
    marked = case(name, source, marked=True)
    check_case(marked, backend=backend)
    p = problem(marked)
    batch = make_batch(p)
    is_marked = batch.on_policy_tokens.view(p.shape)
    fields = {**p.fields, "old_logps": p.fields["old_logps"].masked_fill(is_marked, math.nan)}
    losses = [
        make_call(x, backend=backend)(*x.given.values()).loss
        for x in (p, replace(p, fields=fields))
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_metrics_of_every_objective(name, marked, backend):
    p = problem(case(name, "logits", marked))
    out, exact, spec, live = (
        make_call(p, backend=backend)(p.given["logits"]),
        expected_and_tolerance(p.case)[0].values,
        p.spec,
        p.trained,
    )
    fields = {name: x for name, x in p.seen.items() if name != "cu_seqlens"}
    found = oracle.objective(
        spec,
        exact["logps"],
        exact["entropy"],
        p.sequences,
        divergences=exact.get("divergence"),
        **fields,
    )
    weights, advantages = (
        oracle.to_rows(p.seen[x], p.sequences, torch.float64)[live]
        for x in ("weights", "advantages")
    )
    ratio = found.log_ratio.exp()
    weighed = (
        ratio if spec.surrogate == "vespo" else ratio * weights
    )  # whose weights are in its ratio
    direct = {
        "tokens": live.sum(), "ratio_mean": ratio.mean(), "ratio_min": ratio.min(), "ratio_max": ratio.max(),
        "clip_low": found.clipped_low.double().mean(), "clip_high": found.clipped_high.double().mean(),
        "entropy": exact["entropy"][live].mean(), "zero_advantage": (advantages == 0).double().mean(),
        "ess": weighed.sum() ** 2 / (len(weighed) * weighed.square().sum()),
    }  # fmt: skip
    if spec.beta:
        direct["kl"] = found.kl[live].mean()
    filtered = (spec.off_policy, spec.entropy_floor, spec.entropy_share, spec.sampler_mismatch)
    if spec.trust or any(filtered):
        direct["kept"] = found.kept.double().mean()
    assert out.metrics.keys() == direct.keys(), (
        "a metric has no float64 reference: add it to `direct` in tests/core/test_objectives.py"
    )
    for key, value in direct.items():
        same = {"rtol": 5e-5, "atol": 1e-6, "msg": lambda m, key=key: f"{key}: {m}"}
        torch.testing.assert_close(out.metrics[key].double(), value.double(), **same)


# ---- formulas of a user


def pulled_back(logp, old_logp, advantage, params):
    """-A logp, with a spring to the old policy."""
    x = logp - old_logp
    return -advantage * logp + 0.5 * params[0] * x * x, -advantage + params[0] * x


def absolute(logp, old_logp, ref_logp):
    d = logp - ref_logp
    return ops.abs(d), ops.where(d > 0.0, 1.0, -1.0)


def test_a_surrogate_and_a_kl_of_ones_own(backend):
    logits, targets = torch.randn(3, 4, 31), torch.randint(31, (3, 4))
    old, ref, a = -3 + torch.randn(3, 4), -3 + torch.randn(3, 4), torch.randn(3, 4)
    objective = Objective(Custom(pulled_back, (0.3,)), beta=0.1, kl=absolute)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    out = grpo_loss(
        leaf,
        TokenBatch(targets, a, old_logps=old, ref_logps=ref),
        objective,
        options=Options(backend=backend),
    )
    out.loss.backward()
    logps = exact.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    loss = (-a * logps + 0.15 * (logps - old) ** 2 + 0.1 * (logps - ref).abs()).mean()
    loss.backward()
    torch.testing.assert_close(out.loss.double(), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)


# ---- weights that are the caller's


@pytest.mark.parametrize("name", ["gspo", "gmpo", "rloo", "vespo"])
def test_masked_tokens_have_no_gradient_and_no_part_in_a_ratio(name):
    """Also in a sequence whose ratio is NaN, and whatever the log-probs of masked tokens are."""
    mask = torch.tensor([[True, True, False], [True, False, True]])
    logps = torch.where(mask, -torch.rand(2, 3), 0.0)
    old_logps = logps - 1e-4 * torch.rand(2, 3)  # inside of all clip bounds
    batch = TokenBatch(
        torch.zeros(2, 3, dtype=torch.int64), torch.ones(2), mask=mask, old_logps=old_logps
    )
    objective = Objective.preset(name)
    inputs = objective.token_inputs(batch)
    ratios, same = (
        objective.log_ratio(torch.where(mask, logps, masked).flatten(), inputs, batch)
        for masked in (0.0, -math.inf)
    )
    assert torch.equal(ratios, same)
    for first in (logps[0, 0].item(), math.nan):
        logps[0, 0] = first
        grads = objective.token_losses(logps.flatten(), None, inputs, batch).grad_logps.view(2, 3)
        assert (grads[~mask] == 0).all() and (grads[mask] != 0).all()
        assert grads[0, :2].isnan().all() == math.isnan(first) and not grads[1].isnan().any()


def test_token_weights_multiply_all_terms():
    """A sum over tokens whose weights are 1 / (B * length) is the mean of means; one weight per
    sequence is enough.
    """
    p = problem(CallCase(objective="grpo, k3 and entropy"))
    batch, trained = replace(make_batch(p), nll_weights=None), p.trained.view(p.shape)
    mean = Objective(beta=0.3, entropy_coef=0.1, aggregate="seq-mean-token-mean")
    leaf = (-torch.rand(p.shape)).requires_grad_()

    def run(objective, **given):
        loss = objective_loss(leaf, batch, objective, entropy=leaf * leaf, **given).loss
        return loss, torch.autograd.grad(loss, leaf)[0]

    each = 1.0 / (len(trained) * trained.sum(1).clamp(min=1))
    for given in (
        each,
        each[:, None].expand(p.shape),
        torch.where(trained, each[:, None], math.nan),
    ):
        torch.testing.assert_close(
            run(replace(mean, aggregate="token-sum"), token_weights=given), run(mean)
        )
