"""Every objective once against float64, from logits and from hidden states: value, log-probs, entropy, gradient and metrics; and
formulas of a user's own."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from grpo_kernels import Custom, Exact, Objective, Options, TokenBatch, grpo_loss
from grpo_kernels.formulas.ops import ops
from support import oracle
from support.doors import call_of, check, exact_of
from support.inside import executor, executors
from support.objectives import OBJECTIVES
from support.recipes import Recipe, problem

Tensor = torch.Tensor
LENGTHS = (7, 4, 2, 0, 6, 1, 5, 3)


@cache
def recipe(name: str, source: str) -> Recipe:
    """With the first seed for which no number lies at a bound. From hidden states on-policy, without weights, where that can be."""
    own = {"layout": ("padded", "packed")[len(name) % 2], "others": ("near",) if "exact" in name else ()}
    given = ("everything",) if source == "logits" or "sampler" in name else ("on-policy", "everything")
    seeds = (Recipe(source=source, objective=name, lengths=LENGTHS, given=x, seed=i, **own) for x in given for i in range(5))
    return next(r for r in seeds if exact_of(r)[0].clear)


@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_what_its_paper_says(name: str, source: str) -> None:
    """On every executor."""
    for each in executors():
        with executor(each) as backend:
            check(recipe(name, source), backend=backend)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_question_is_not_trivial(name: str) -> None:
    """Every term has a gradient, and tokens lie on both sides of every bound."""
    r = recipe(name, "logits")
    exact, room = exact_of(r)
    gradient = exact.gradients["logits"]
    assert gradient.abs().max() > 1e-3 and (room.gradients["logits"] <= 1e-3 * gradient.abs().max()).all()
    moved = (exact.values["logps"].view(problem(r).shape) - problem(r).seen["old_logps"])[problem(r).seen["mask"]]
    assert (moved > 0.3).any() and (moved < -0.25).any() and (moved.abs() < 0.15).any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_metrics_of_every_objective(name: str, backend: str) -> None:
    p = problem(recipe(name, "logits"))
    out, exact, spec, live = call_of(p, backend=backend)(p.given["logits"]), exact_of(p.recipe)[0].values, p.spec, p.trained
    fields = {name: x for name, x in p.seen.items() if name != "cu_seqlens"}
    found = oracle.objective(spec, exact["logps"], exact["entropy"], p.sequences, divergences=exact.get("divergence"), **fields)
    weights, advantages = (oracle.to_rows(p.seen[x], p.sequences, torch.float64)[live] for x in ("weights", "advantages"))
    ratio = found.log_ratio.exp()
    weighed = ratio if spec.surrogate == "vespo" else ratio * weights  # whose weights are in its ratio
    direct = {
        "tokens": live.sum(), "ratio_mean": ratio.mean(), "ratio_min": ratio.min(), "ratio_max": ratio.max(),
        "clip_low": found.clipped_low.double().mean(), "clip_high": found.clipped_high.double().mean(),
        "entropy": exact["entropy"][live].mean(), "zero_advantage": (advantages == 0).double().mean(),
        "ess": weighed.sum() ** 2 / (len(weighed) * weighed.square().sum()),
    }  # fmt: skip
    if spec.beta:
        direct["kl"] = found.kl[live].mean()
    if spec.trust or spec.off_policy or spec.entropy_floor or spec.entropy_share:
        direct["kept"] = found.kept.double().mean()
    assert out.metrics.keys() == direct.keys()
    for key, value in direct.items():
        same = {"rtol": 5e-5, "atol": 1e-6, "msg": lambda m, key=key: f"{key}: {m}"}
        torch.testing.assert_close(out.metrics[key].double(), value.double(), **same)


def test_without_a_weight_there_is_no_divergence(backend: str) -> None:
    p = problem(recipe("dapo, k3", "logits"))
    out = call_of(p, objective=Objective.preset("dapo", kl=Exact()), backend=backend)(p.given["logits"])
    assert out.divergence is None and "kl" not in out.metrics


# ---- formulas of a user


def pulled_back(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """-A logp, with a spring to the old policy."""
    x = logp - old_logp
    return -advantage * logp + 0.5 * params[0] * x * x, -advantage + params[0] * x


def absolute(logp: Tensor, old_logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor]:
    d = logp - ref_logp
    return ops.abs(d), ops.where(d > 0.0, 1.0, -1.0)


def test_a_surrogate_and_a_kl_of_ones_own(backend: str) -> None:
    logits, targets = torch.randn(3, 4, 31), torch.randint(31, (3, 4))
    old, ref, a = -3 + torch.randn(3, 4), -3 + torch.randn(3, 4), torch.randn(3, 4)
    objective = Objective(Custom(pulled_back, (0.3,)), beta=0.1, kl=absolute)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    out = grpo_loss(leaf, TokenBatch(targets, a, old_logps=old, ref_logps=ref), objective, options=Options(backend=backend))
    out.loss.backward()
    logps = exact.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    loss = (-a * logps + 0.15 * (logps - old) ** 2 + 0.1 * (logps - ref).abs()).mean()
    loss.backward()
    torch.testing.assert_close(out.loss.double(), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)  # type: ignore[union-attr]
