"""What a loss says of itself, against a direct computation in float64."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import Custom, Exact, Objective, Options, TokenBatch, grpo_loss
from grpo_kernels.formulas.ops import ops
from support import oracle
from support.doors import batch_of, normalizer_of, objective_of, transform_of
from support.objectives import OBJECTIVES
from support.recipes import Recipe, problem

Tensor = torch.Tensor


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if "exact" not in name])
def test_metrics_of_every_objective(name: str, backend: str) -> None:
    r = Recipe(objective=name, lengths=(7, 4, 2, 0, 6, 1, 5, 3), layout=("padded", "packed")[len(name) % 2], given="column")
    p = problem(r)
    out = grpo_loss(
        p.given["logits"],
        batch_of(p),
        objective_of(r),
        transform=transform_of(p),
        normalizer=normalizer_of(r),
        options=Options(backend=backend),
    )
    exact, spec, live = oracle.answer(p), p.spec, p.trained
    fields = {name: x for name, x in p.seen.items() if name != "cu_seqlens"}
    found = oracle.objective(spec, exact.values["logps"], exact.values["entropy"], p.sequences, **fields)
    ratio, weights = found.log_ratio.exp(), oracle.to_rows(p.seen["weights"], p.sequences, torch.float64)[live]
    weighed = ratio if spec.surrogate == "vespo" else ratio * weights  # whose weights are in its ratio
    advantages = oracle.to_rows(p.seen["advantages"], p.sequences, torch.float64)[live]
    direct = {
        "tokens": live.sum(), "ratio_mean": ratio.mean(), "ratio_min": ratio.min(), "ratio_max": ratio.max(),
        "clip_low": found.clipped_low.double().mean(), "clip_high": found.clipped_high.double().mean(),
        "entropy": exact.values["entropy"][live].mean(), "zero_advantage": (advantages == 0).double().mean(),
        "ess": weighed.sum() ** 2 / (len(weighed) * weighed.square().sum()),
    }  # fmt: skip
    if spec.beta:
        direct["kl"] = found.kl[live].mean()
    if spec.trust or spec.off_policy or spec.entropy_floor or spec.entropy_share:
        direct["kept"] = found.kept.double().mean()
    assert out.metrics.keys() == direct.keys()
    for key, value in direct.items():
        torch.testing.assert_close(
            out.metrics[key].double(), value.double(), rtol=5e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_the_kl_of_a_divergence_is_its_mean(backend: str) -> None:
    z, w, mask = torch.randn(2, 3, 9), torch.randn(2, 3, 9), torch.tensor([[True, True, False], [True, False, False]])
    batch = TokenBatch(torch.randint(9, (2, 3)), torch.ones(2), mask=mask)
    out = grpo_loss(z, batch, Objective.preset("dapo", beta=0.1, kl=Exact()), ref_logits=w, options=Options(backend=backend))
    exact = oracle.divergence(z.double().log_softmax(-1), w.double().log_softmax(-1), "reverse")
    torch.testing.assert_close(out.metrics["kl"].double(), exact[mask].mean(), rtol=1e-5, atol=0)
    assert out.divergence is not None and not out.divergence[~mask].any()
    off = grpo_loss(z, batch, Objective.preset("dapo", kl=Exact()), options=Options(backend=backend))
    assert off.divergence is None and "kl" not in off.metrics


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


def test_a_step_down_the_gradient_lowers_the_loss_as_predicted(backend: str) -> None:
    logits = torch.randn(3, 4, 31)
    targets = torch.randint(31, (3, 4))
    old = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0] + 0.05
    batch = TokenBatch(targets, torch.tensor([1.0, -1.0, 0.5]), old_logps=old, ref_logps=-3 + torch.randn(3, 4))
    objective, leaf = Objective.preset("grpo", beta=0.1, entropy_coef=0.01), logits.requires_grad_()
    out = grpo_loss(leaf, batch, objective, options=Options(backend=backend))
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    after = grpo_loss(leaf.detach() - 0.01 * gradient / gradient.norm(), batch, objective, options=Options(backend=backend))
    assert float((out.loss - after.loss).detach()) == pytest.approx(0.01 * float(gradient.norm()), rel=0.05)
