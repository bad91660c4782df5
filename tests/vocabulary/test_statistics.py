"""Further statistics of a row (`also=`): values and gradients against float64, on every backend and from both sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, linear_logprobs, token_logprobs
from grpo_kernels.distributed import VocabShard
from grpo_kernels.rewards.returns import optimal_token_advantages
from support.cases import build
from support.linear_cases import build_linear

Tensor = torch.Tensor
ALL = ("sum_squares", "top_prob", "top_id")
TRANSFORM = LogitTransform(temperature=0.8, softcap=9.0, scale=-0.7)


def exact(logits: Tensor, targets: Tensor, transform: LogitTransform | None) -> dict[str, Tensor]:
    z = logits.double()
    if transform is not None:
        z = transform.softcap * torch.tanh(z * transform.scale / transform.softcap) / transform.temperature  # type: ignore[operator]
    logp = z.log_softmax(-1)
    p = logp.exp()
    return {
        "logps": logp.gather(-1, targets[..., None])[..., 0],
        "entropy": -torch.where(p > 0, p * logp, 0.0).sum(-1),
        "sum_squares": p.square().sum(-1),
        "top_prob": p.amax(-1),
        "top_id": logp.argmax(-1),
    }


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], mask: Tensor) -> None:
    for name in expected:
        got, want = found[name].detach(), expected[name].detach()
        assert not (got[~mask] != (-1 if name == "top_id" else 0)).any(), name
        if name == "top_id":
            assert torch.equal(got[mask], want[mask])
        else:
            torch.testing.assert_close(got[mask].double(), want[mask], rtol=5e-6, atol=2e-6)


@pytest.mark.parametrize("transform", [None, TRANSFORM], ids=["plain", "transformed"])
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients(backend: str, linear: bool, transform: LogitTransform | None, entropy: bool) -> None:
    case = build_linear()
    targets, mask, leaves = case.tokens.targets, case.tokens.mask, case.leaves
    g = torch.Generator().manual_seed(3)
    a, b, c = torch.randn(3, *targets.shape, generator=g) * mask
    options: dict[str, Any] = {"mask": mask, "transform": transform, "entropy": entropy, "also": ALL, "backend": backend}
    if linear:
        logps, H, also = linear_logprobs(leaves["hidden"], leaves["weight"], targets, bias=leaves["bias"], **options)
    else:
        logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
        logps, H, also = token_logprobs(logits, targets, **options)
    doubles = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    expected = exact(torch.nn.functional.linear(doubles["hidden"], doubles["weight"], doubles["bias"]), targets, transform)
    found = {"logps": logps, **also} | ({} if H is None else {"entropy": H})
    compare(found, {name: expected[name] for name in found}, mask)
    assert not also["top_prob"].requires_grad and not also["top_id"].requires_grad
    total = (logps * a).sum() + (also["sum_squares"] * b).sum() + (0.0 if H is None else (H * c).sum())
    total.backward()
    total = (expected["logps"] * a).sum() + (expected["sum_squares"] * b).sum()
    (total + (expected["entropy"] * c).sum() * entropy).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad.double(), doubles[name].grad, rtol=2e-5, atol=2e-5)  # type: ignore[union-attr]


def test_the_gradient_of_the_sum_of_squares_alone(backend: str) -> None:
    case = build()
    leaf, double = (x.clone().requires_grad_() for x in (case.logits, case.logits.double()))
    _, _, also = token_logprobs(leaf, case.targets, also=("sum_squares",), backend=backend)
    also["sum_squares"].log().sum().backward()
    exact(double, case.targets, None)["sum_squares"].log().sum().backward()
    torch.testing.assert_close(leaf.grad.double(), double.grad, rtol=2e-5, atol=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_in_a_graph_and_on_a_shard(linear: bool) -> None:
    case = build_linear()
    targets, mask = case.tokens.targets, case.tokens.mask

    def values(x: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if linear:
            logps, _, also = linear_logprobs(x, case.weight, targets, mask=mask, also=ALL, **options)
        else:
            logps, _, also = token_logprobs(x @ case.weight.T, targets, mask=mask, also=ALL, **options)
        return logps.sum() + also["sum_squares"].sum(), also

    results = []
    ways: dict[str, Any] = {
        "eager": values,
        "compile": torch.compile(values, fullgraph=True, backend="aot_eager"),
        "shard": lambda x: values(x, shard=VocabShard(0, case.weight.shape[0])),
    }
    for way in ways.values():
        leaf = case.hidden.clone().requires_grad_()
        total, also = way(leaf)
        total.backward()
        results.append((also, leaf.grad))
    for also, gradient in results[1:]:
        assert torch.equal(also["top_id"], results[0][0]["top_id"]) and (also["top_id"][mask] >= 0).all()
        torch.testing.assert_close(also["sum_squares"], results[0][0]["sum_squares"])
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-5, atol=1e-6)


def test_the_optimal_token_baseline_takes_it() -> None:
    case = build()
    assert case.mask is not None
    logps, _, also = token_logprobs(case.logits, case.targets, mask=case.mask, also=("sum_squares",))
    rewards = torch.randn(case.targets.shape, generator=torch.Generator().manual_seed(0)) * case.mask
    found = optimal_token_advantages(rewards, logps, also["sum_squares"], group_size=2, mask=case.mask)
    expected = exact(case.logits, case.targets, None)
    plain = optimal_token_advantages(
        rewards, expected["logps"].float(), expected["sum_squares"].float(), group_size=2, mask=case.mask
    )
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    assert found.abs().max() > 0.1


@pytest.mark.parametrize("also", ["sum_squares", ("squares",), ("top_id", "top_id"), ("entropy",), None])
def test_unknown_statistics_are_refused(also: Any) -> None:
    case = build()
    with pytest.raises(ValueError, match=r"also=.*'sum_squares', 'top_prob', 'top_id'"):
        token_logprobs(case.logits, case.targets, also=also)


def test_a_row_of_only_minus_infinity_has_no_largest_probability(backend: str) -> None:
    logits = torch.randn(3, 40)
    logits[1] = -torch.inf
    logps, _, also = token_logprobs(logits, torch.tensor([1, 2, 3]), also=("top_prob",), backend=backend)
    torch.testing.assert_close(also["top_prob"].isnan(), torch.tensor([False, True, False]))
    torch.testing.assert_close(logps.isnan(), also["top_prob"].isnan())
    torch.testing.assert_close(also["top_prob"][[0, 2]], logits[[0, 2]].softmax(-1).amax(-1))
