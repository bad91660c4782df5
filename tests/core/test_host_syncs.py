"""No step of a loss waits for the device. Tested with fake tensors, which have no values that the host could read.

The checks of values, which on a GPU are off unless asked for, are off here too."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from grpo_kernels import (
    LogitTransform,
    TokenBatch,
    TokenSets,
    group_advantages,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.rewards.corrections import importance_weights
from grpo_kernels.vocabulary import hidden as linear
from grpo_kernels.vocabulary.backends import eager
from grpo_kernels.vocabulary.products import Products
from support.cases import OBJECTIVES, build, pack
from support.linear_cases import LinearCase, build_linear

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


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is no CPU, whose tensors have no values."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.usefixtures("meta")
def test_the_backward_of_linear_log_probs_does_not_wait_for_the_device() -> None:
    """On a device other than the CPU, rows without a slope are not searched for, because that would read the slopes."""
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


# ---- kept sets

SOME = ("dapo", "grpo, k3 and entropy", "gspo", "vespo")
MISSING = ("include", "full", "mask")


def on_meta(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to("meta") if isinstance(v, Tensor | TokenSets) else v for k, v in fields.items()}


def kept_case(mixed: bool) -> LinearCase:
    """With `mixed` some rows have no set."""
    case = build_linear(kept=True)
    if not mixed:
        rows = case.tokens.targets.numel()
        case.tokens.fields["kept"] = TokenSets.from_counts(torch.arange(2 * rows) % 61, torch.full((rows,), 2))
    return case


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("name", SOME)
def test_what_is_counted_early_is_what_a_loss_asks_for(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows of a kind that a GPU sends to the host when the batch is made."""
    count, asked = TokenBatch.count, set()

    def checked(batch: TokenBatch, kind: str, marked: Tensor | None = None) -> int:
        assert kind in batch._kinds and marked is not None
        early = batch._kinds.index(kind)
        numbers = [batch.rows if m is None else int(m.sum()) for m in map(batch.marked, batch._kinds)]
        assert numbers[early] == int(marked.sum()) > 0, kind
        asked.add(kind)
        return count(batch, kind, marked)

    monkeypatch.setattr(TokenBatch, "count", checked)
    case, objective = kept_case(True), OBJECTIVES[name][0]()
    for skip_inactive in (False, True):
        linear_grpo_loss(
            case.hidden, case.weight, case.tokens.batch(missing=missing), objective, bias=case.bias, skip_inactive=skip_inactive
        )  # fmt: skip
    assert asked and all("whole" in kind for kind in asked)


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "sets alone"])
@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.usefixtures("meta")
def test_losses_over_sets(name: str, missing: str, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, from logits and from hidden states, with memory to add to."""
    case, objective = kept_case(mixed), OBJECTIVES[name][0]()
    real = case.tokens.batch(missing=missing)
    numbers = {kind: real.count(kind) for kind in real._kinds}  # which the host of a GPU has by then
    monkeypatch.setattr(TokenBatch, "count", lambda batch, kind, marked=None: numbers[kind])
    monkeypatch.setattr(eager, "looks_are_free", lambda _: False)
    fields = on_meta(case.tokens.fields)
    leaves = {k: x.detach().to("meta").requires_grad_() for k, x in case.leaves.items()}
    batch, transform = TokenBatch(**fields, missing=missing), LogitTransform(0.7, softcap=9.0)
    logits = torch.empty(*batch.targets.shape, 61, device="meta", requires_grad=True)
    out = grpo_loss(logits, batch, objective, transform=transform, backend="eager")
    assert "kept_mass" not in out.metrics and "outside_set" in out.metrics
    out.loss.backward()
    assert logits.grad is not None
    for memory in (None, torch.zeros(61, 24, device="meta")):
        linear_grpo_loss(
            leaves["hidden"], leaves["weight"], batch, objective,
            bias=leaves["bias"], transform=transform, backend="eager", weight_grad=memory,
        ).loss.backward()  # fmt: skip
    assert all(leaf.grad is not None for leaf in leaves.values())


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "sets alone"])
@pytest.mark.usefixtures("meta")
def test_log_probs_over_sets(mixed: bool) -> None:
    case = kept_case(mixed)
    fields = on_meta(case.tokens.fields)
    leaves = {k: x.detach().to("meta").requires_grad_() for k, x in case.leaves.items()}
    logits = torch.empty(*case.tokens.targets.shape, 61, device="meta", requires_grad=True)
    options: dict[str, Any] = {"kept": fields["kept"], "entropy": True, "also": ("sum_squares", "top_id"), "backend": "eager"}
    for mask in (fields["mask"], None):
        logps, entropy, more = token_logprobs(logits, fields["targets"], mask=mask, **options)
        torch.autograd.backward(logps.sum() + entropy.sum() + more["sum_squares"].sum())
    for call in (options, options | {"also": ("log_kept_mass",)}):
        logps, entropy, more = linear_logprobs(
            leaves["hidden"], leaves["weight"], fields["targets"], bias=leaves["bias"], **call
        )
        torch.autograd.backward(logps.sum() + entropy.sum() + sum(x.sum() for x in more.values() if x.requires_grad))
    assert logits.grad is not None and all(leaf.grad is not None for leaf in leaves.values())
    known = {"kept": fields["kept"], "backend": "eager"}
    if not mixed:
        linear_logprobs(leaves["hidden"], leaves["weight"], fields["targets"], mask=fields["mask"], **known)
        return
    with pytest.raises(NotImplementedError):  # as without sets: rows are picked by a mask that the host reads
        linear_logprobs(leaves["hidden"], leaves["weight"], fields["targets"], mask=fields["mask"], **known)
