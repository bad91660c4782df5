"""The functions under autograd: second backwards, memory handed over or written, modes without gradients, loss scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, Options, TokenBatch, grpo_loss
from support.bits import same_bits, snapshot
from support.doors import Call, call_of, named, pull
from support.recipes import DTYPES, Recipe

Tensor = torch.Tensor
LOSS = Recipe(objective="grpo, k3 and entropy", transform="per sequence")
LOGPS = replace(LOSS, objective="dapo", door="logprobs")
CALLS = {
    "loss of logits": LOSS,
    "loss of hidden states": replace(LOSS, source="hidden"),
    "log-probs of logits": LOGPS,
    "log-probs of hidden states": replace(LOGPS, source="hidden"),
}
each = pytest.mark.parametrize("name", CALLS)
of_logits = pytest.mark.parametrize("name", [*CALLS][::2])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def ready(name: str, backend: str, dtype: str = "float32", **changes: Any) -> Call:
    return Call(replace(CALLS[name], dtype=dtype, **changes), backend=backend)


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, dict):
        found, expected = found.values(), expected.values()
    return all(same_bits(x, y.detach()) for x, y in zip(found, expected, strict=True))


@each_dtype
@each
def test_a_second_backward_is_right_or_refused(name: str, dtype: str, backend: str) -> None:
    """The gradient of a loss is handed over once, except in fp16, where it is made in the backward."""
    call = ready(name, backend, dtype)
    values = call.values()
    first = call.gradients(values, retain_graph=True)
    if name.startswith("loss") and (dtype, name) != ("float16", "loss of logits"):
        with pytest.raises(RuntimeError, match="already handed over"):
            call.gradients(values)
    else:
        assert same(call.gradients(values), first)
        with pytest.raises(RuntimeError):
            call.gradients(values)


@each
def test_there_are_no_second_derivatives_and_no_forward_mode(name: str, backend: str) -> None:
    call = ready(name, backend)
    with pytest.raises(RuntimeError, match="second derivative"):
        squares = sum(x.square().sum() for x in call.values().values() if x.requires_grad)
        torch.autograd.grad(squares, call.leaves, create_graph=True)  # type: ignore[arg-type]
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), torch.autograd.forward_ad.dual_level():
            dual = [torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in call.leaves]
            with pytest.raises((NotImplementedError, RuntimeError)):
                call.values(*dual)


@each
def test_gradients_add_up_where_tensors_are_used_twice(name: str, backend: str) -> None:
    call = ready(name, backend)
    once, twice = call.gradients(), [call.values(), call.values()]
    call.gradients(twice[0])
    pull(call.p, twice[1])
    for x, y in zip(call.leaves, once, strict=True):
        torch.testing.assert_close(x.grad, 2 * y, rtol=1e-6, atol=1e-7)


@each
def test_without_gradients_the_values_are_the_same(name: str, backend: str) -> None:
    """Frozen leaves, no_grad, inference mode, and tensors that were made in it."""
    call = ready(name, backend)
    expected, frozen = call.values(), call.values(*(x.detach() for x in call.leaves))
    found = [frozen]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(call.values())
    assert all(same(x, expected) and not any(y.requires_grad for y in x.values()) for x in found)
    with torch.inference_mode():
        made_inside = [x.detach().clone() for x in call.leaves]
    assert same(call.values(*made_inside), expected)


@each_dtype
@each
def test_inputs_are_not_modified(name: str, dtype: str, backend: str) -> None:
    call = ready(name, backend, dtype)
    given = dict(enumerate(call.leaves)) | call.p.fields | {"targets": call.p.targets, "temperature": call.p.temperature}
    tensors = {str(key): x for key, x in given.items() if isinstance(x, Tensor)}
    unchanged, versions = snapshot(**tensors), [x._version for x in tensors.values()]
    call.gradients()
    unchanged()
    assert [x._version for x in tensors.values()] == versions and len(tensors) > 8


@each_dtype
@of_logits
def test_a_gradient_in_place_lies_in_the_memory_of_the_logits(name: str, dtype: str, backend: str) -> None:
    expected, call = ready(name, backend, dtype).gradients(), ready(name, backend, dtype, inplace=True)
    logits, seen = call.leaves[0] * 1.0, []
    address, version = logits.data_ptr(), logits._version
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    assert same(call.gradients(call.values(logits)), expected)
    assert seen == [address] and logits._version > version


@of_logits
def test_logits_that_were_overwritten_cannot_be_trained_on(name: str, backend: str) -> None:
    """Another use of the same logits is right beside a call out of place, and raises after one in place."""
    for inplace in (False, True):
        call = ready(name, backend, inplace=inplace)
        logits = call.leaves[0] * 1.0
        other = logits.square().sum()
        mine = call.gradients(call.values(logits), retain_graph=True)[0]
        if inplace:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                other.backward()
        else:
            other.backward()
            assert same([call.leaves[0].grad], [mine + 2 * call.leaves[0]])


def test_logits_written_between_a_loss_in_place_and_its_backward_raise(backend: str) -> None:
    call = ready("loss of logits", backend, inplace=True)
    logits = call.leaves[0] * 1.0
    first, second = (call.values(logits)["loss"] for _ in range(2))
    second.backward()
    with pytest.raises(RuntimeError, match="was written to before the backward"):
        first.backward()


@of_logits
def test_a_leaf_is_not_overwritten_by_its_gradient(name: str, backend: str) -> None:
    """Neither itself nor a view of it; and nothing is written where there is no gradient."""
    call = ready(name, backend, inplace=True)
    (leaf,), unchanged = call.leaves, snapshot(leaf=call.leaves[0])
    for logits in (leaf, leaf[:]):
        with pytest.raises(ValueError, match=r"inplace=True.*leaf that requires grad"):
            call.values(logits)
    with torch.no_grad():
        call.values(leaf)
    unchanged()


def test_gradients_flow_into_nothing_but_the_leaves(backend: str) -> None:
    """Not into a batch whose tensors somebody forgot to detach, nor out of what is returned beside the loss."""
    call = ready("loss of logits", backend)
    expected, p = call.gradients(), call.p
    fields = {
        name: x.clone().requires_grad_() for name, x in p.fields.items() if isinstance(x, Tensor) and x.is_floating_point()
    }
    call.call = call_of(replace(p, fields=p.fields | fields), backend=backend)
    out = call.call(*call.leaves)
    assert same(call.gradients(named(out)), expected) and len(fields) > 4 and all(x.grad is None for x in fields.values())
    assert not any(x.requires_grad for x in (out.logps, out.entropy, *out.metrics.values()))


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
@each
def test_fp16_keeps_gradients_that_only_a_loss_scale_brings_into_its_range(name: str, objective: str, backend: str) -> None:
    """What GradScaler does: without the scale the gradient of the logits would underflow."""
    loss = name.startswith("loss")
    small, scale = 1.0 if loss else 1e-6, 2.0**16
    changes = {"objective": objective, "normalizer": 3e6 if "logits" in name else 3e4, "given": "column"} if loss else {}
    call, wide = ready(name, backend, "float16", **changes), ready(name, "eager", "float16", **changes)
    found, wide.leaves = call.gradients(scale=small * scale), [x.detach().float().requires_grad_() for x in call.leaves]
    for x, y in zip(found, wide.gradients(), strict=True):
        large = y.abs() > 1e-2 * y.abs().max()
        torch.testing.assert_close(x[large].double(), y[large].double() * (small * scale), rtol=1e-2, atol=0)
        assert "hidden" in name or (y[large].abs() * small).min() < 2.0**-14


@pytest.mark.parametrize("preset", ["dapo", "cispo", "reinforce"])
def test_a_token_without_weight_adds_nothing_whatever_it_holds(preset: str, backend: str) -> None:
    """A sampler that rejected a token may have no log-prob for it, and a grammar may forbid it."""
    logits, old, weights = torch.randn(1, 5, 11), torch.randn(1, 5) - 2, torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0]])
    logits[0, 2, 3], old[0, 3] = -torch.inf, torch.nan
    batch = TokenBatch(torch.arange(1, 6)[None], torch.ones(1), old_logps=old, weights=weights)
    leaf = logits.requires_grad_()
    loss = grpo_loss(leaf, batch, Objective.preset(preset), options=Options(backend=backend)).loss
    loss.backward()
    assert loss.isfinite() and leaf.grad is not None and leaf.grad.isfinite().all()
    assert not leaf.grad[0, 2:4].any() and leaf.grad[0, 0].any()
