"""No step of a loss waits for the device: with fake tensors, which have no values that the host could ask for.

The checks of values, which on a GPU are off unless asked for, are off here too."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from grpo_kernels import LogitTransform, TokenBatch, group_advantages, grpo_loss, linear_logprobs, token_logprobs
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.rewards.corrections import importance_weights
from grpo_kernels.vocabulary.backends import eager
from support.cases import OBJECTIVES, build, pack
from support.linear_cases import build_linear

Tensor = torch.Tensor
WAITS = (DataDependentOutputException, DynamicOutputShapeException)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    for name, module in list(sys.modules.items()):
        if name.startswith("grpo_kernels") and hasattr(module, "values_are_checked"):
            monkeypatch.setattr(module, "values_are_checked", lambda _: False)
    monkeypatch.setattr(eager, "looks_are_free", lambda _: False)  # fake tensors are on the CPU, where a look costs nothing
    return FakeTensorMode()


def without_values(mode: FakeTensorMode, fields: dict[str, Any]) -> dict[str, Any]:
    return {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in fields.items()}


def test_a_wait_is_noticed(fake: FakeTensorMode) -> None:
    x = fake.from_tensor(torch.ones(3))
    with fake:
        for wait in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x.nonzero(), lambda: x[x > 0]):
            with pytest.raises(WAITS):
                wait()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses(name: str, packed: bool, fake: FakeTensorMode) -> None:
    """Weights, token stage, metrics and backward of every objective, with a temperature per token."""
    case, objective = build(), OBJECTIVES[name][0]()
    case = pack(case) if packed else case
    fields, logits = without_values(fake, case.fields), fake.from_tensor(case.logits.requires_grad_())
    with fake:
        batch = TokenBatch(**fields)
        normalizer = global_normalizer(objective, [batch, batch])
        transform = LogitTransform(torch.ones(case.targets.shape))
        out = grpo_loss(logits, batch, objective, transform=transform, normalizer=normalizer, backend="eager")
        assert len(out.metrics) >= 9
        (gradient,) = torch.autograd.grad(out.loss, logits)
        assert gradient.shape == logits.shape
        grpo_loss(logits, batch, objective, backend="eager", skip_inactive=True)


def test_log_probs_and_what_goes_before_a_loss(fake: FakeTensorMode) -> None:
    case = build_linear()
    fields = without_values(fake, case.tokens.fields)
    logits = fake.from_tensor(case.logits(torch.float32)[0].detach().requires_grad_())
    hidden, weight = fake.from_tensor(case.hidden), fake.from_tensor(case.weight)
    with fake:
        targets, mask = fields["targets"], fields["mask"]
        logps, entropy = token_logprobs(logits, targets, mask=mask, entropy=True, backend="eager")
        assert entropy is not None
        torch.autograd.grad(logps.sum() + entropy.sum(), logits)
        importance_weights(TokenBatch(**fields), level="sequence")
        linear_logprobs(hidden, weight, targets, backend="eager")
        with pytest.raises(WAITS):  # documented: rows are picked by a mask that the host reads
            linear_logprobs(hidden, weight, targets, mask=mask, backend="eager")
        rewards = torch.ones(8)
        group_advantages(rewards, group_size=4)
        TokenBatch.from_rewards(targets, rewards, group_size=2, mask=mask)


def test_the_backward_of_linear_log_probs_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is no CPU, where rows without a slope are found by no look at the slopes. Meta tensors have no values."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    case = build_linear()
    leaves = {name: x.detach().to("meta").requires_grad_() for name, x in case.leaves.items()}
    targets = case.tokens.targets.to("meta")
    logps, entropy = linear_logprobs(
        leaves["hidden"], leaves["weight"], targets, bias=leaves["bias"], entropy=True, backend="eager"
    )
    assert entropy is not None
    torch.autograd.backward(logps.sum() + entropy.sum())
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves.values())
    with pytest.raises(NotImplementedError):  # a wait is noticed
        targets.nonzero()
