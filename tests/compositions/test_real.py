"""The recipe of REAL (2602.05630) from docs/recipes.md, beside float64."""

from __future__ import annotations

import math

import pytest
import torch

from support import pages

RECIPES = pages.ROOT / "docs" / "recipes.md"


@pytest.fixture(scope="module")
def names():
    """What the recipe defines and leaves behind."""
    names = {"__name__": "recipes"}
    setup = pages.examples(RECIPES)[0]
    recipe = pages.example("def real_loss")
    before = recipe.replace("optimizer.step()\noptimizer.zero_grad()\n", "")
    assert before != recipe
    moved = "old_logps += 0.3 * torch.randn(B, T)\n"
    exec(compile(setup.code + moved + before, "recipes.md", "exec"), names)
    return names


def plain_real(scores, is_right, group_size, temperature):
    """As the paper has it, answer by answer."""
    total, groups = 0.0, len(scores) // group_size
    for g in range(groups):
        members = range(g * group_size, (g + 1) * group_size)
        right = [scores[i] for i in members if is_right[i]]
        wrong = [scores[i] for i in members if not is_right[i]]
        if right and wrong:
            total = total + (1 + sum(torch.exp(-s / temperature) for s in right)).log()
            total = total + (1 + sum(torch.exp(s / temperature) for s in wrong)).log()
    return total / groups


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize(
    "answers", ["100010001000", "111100001010", "1010", "00001111"], ids=lambda x: x
)
def test_values_and_gradients(names, answers, temperature):
    """Groups of four, some of them with right or wrong answers alone."""
    is_right = torch.tensor([x == "1" for x in answers])
    results = []
    for loss in (names["real_loss"], plain_real):
        scores = torch.linspace(-2, 3, len(answers), dtype=torch.float64).sin().requires_grad_()
        value = torch.as_tensor(loss(scores, is_right, 4, temperature), dtype=torch.float64)
        if value.requires_grad:
            value.backward()
        grad = torch.zeros_like(scores) if scores.grad is None else scores.grad
        results.append((value.detach(), grad))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-15)


def test_the_recipe_trains_the_head(names):
    """Its gradient is that of logits in float64."""
    x = names["body"](names["ids"]).detach().double()
    weight = names["lm_head"].weight.detach().double().requires_grad_()
    targets, mask = names["targets"], names["mask"]
    old = torch.where(mask, names["old_logps"].double(), 0.0)
    log_p = ((x @ weight.T) / 0.7).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    logps = torch.where(mask, log_p, 0.0)
    d = old - logps
    scores = (logps - old).sum(1) / mask.sum(1)
    kl = (d.exp() - d - 1).sum() / mask.sum()
    loss = plain_real(scores, names["rewards"] > 0, 4, 0.5) + 0.01 * kl
    loss.backward()
    assert math.isclose(loss.item(), names["loss"].item(), rel_tol=1e-5)
    found = names["lm_head"].weight.grad.double()
    torch.testing.assert_close(found, weight.grad, rtol=1e-4, atol=1e-7)
