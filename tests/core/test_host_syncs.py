"""No step of a loss waits for the device. Tested with fake tensors, which have no values that the host could read.

The checks of values, which on a GPU are off unless asked for, are off here too."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from grpo_kernels import (
    LogitTransform,
    TokenBatch,
    group_advantages,
    grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.rewards.corrections import importance_weights
from grpo_kernels.vocabulary import hidden as linear
from grpo_kernels.vocabulary.backends import eager
from grpo_kernels.vocabulary.products import Products
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
    # Our own products on a CPU want addresses, which fake tensors have not.
    monkeypatch.setattr(linear, "products_for", lambda weight, bias, dtype: Products(weight, bias))
    return FakeTensorMode()


def without_values(mode: FakeTensorMode, fields: dict[str, Any]) -> dict[str, Any]:
    return {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in fields.items()}


def test_a_wait_is_noticed(fake: FakeTensorMode) -> None:
    x = fake.from_tensor(torch.ones(3))
    with fake:
        for wait in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x.nonzero(), lambda: x[x > 0]):
            with pytest.raises(WAITS):
                wait()


#: Each objective padded or packed; the other way with -m slow.
PADDED_OR_PACKED = [
    pytest.param(
        name, packed, id=f"{name}-{'packed' if packed else 'padded'}", marks=[] if i % 2 == packed else [pytest.mark.slow]
    )
    for i, name in enumerate(OBJECTIVES)
    for packed in (False, True)
]


@pytest.mark.parametrize("name, packed", PADDED_OR_PACKED)
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
