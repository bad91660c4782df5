"""The functions under autograd: second backwards, memory handed over, written in place or shared
with the caller, modes without gradients, loss scales.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    Exact,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    token_divergence,
    token_logprobs,
)
from support.bits import same_bits, snapshot
from support.call_cases import DTYPES, CallCase
from support.public_functions import PreparedCall, run_backward

LOSS = CallCase(objective="grpo, k3 and entropy", transform="per sequence")
LOGPS = replace(LOSS, objective="dapo", function="logprobs")
CALLS = {
    "loss of logits": LOSS,
    "loss of hidden states": replace(LOSS, source="hidden"),
    "log-probs of logits": LOGPS,
    "log-probs of hidden states": replace(LOGPS, source="hidden"),
}
each = pytest.mark.parametrize("name", CALLS)
of_logits = pytest.mark.parametrize("name", [*CALLS][::2])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def ready(name, backend, dtype="float32", **changes):
    return PreparedCall(replace(CALLS[name], dtype=dtype, **changes), backend=backend)


def same(found, expected):
    if isinstance(found, dict):
        found, expected = found.values(), expected.values()
    return all(same_bits(x, y.detach()) for x, y in zip(found, expected, strict=True))


@each_dtype
@each
def test_a_second_backward_is_right_or_refused(name, dtype, backend):
    """The gradient of a loss is handed over once, except in fp16, where it is made in the
    backward.
    """
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
def test_there_are_no_second_derivatives_and_no_forward_mode(name, backend):
    call = ready(name, backend)
    with pytest.raises(RuntimeError, match="second derivative"):
        squares = sum(x.square().sum() for x in call.values().values() if x.requires_grad)
        torch.autograd.grad(squares, call.leaves, create_graph=True)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), torch.autograd.forward_ad.dual_level():
            dual = [
                torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
                for x in call.leaves
            ]
            with pytest.raises((NotImplementedError, RuntimeError)):
                call.values(*dual)


@each
def test_gradients_add_up_where_tensors_are_used_twice(name, backend):
    call = ready(name, backend)
    once, twice = call.gradients(), [call.values(), call.values()]
    call.gradients(twice[0])
    run_backward(call.p, twice[1])
    for x, y in zip(call.leaves, once, strict=True):
        torch.testing.assert_close(x.grad, 2 * y, rtol=1e-6, atol=1e-7)


@each
def test_without_gradients_the_values_are_the_same(name, backend):
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
def test_inputs_are_not_modified(name, dtype, backend):
    call = ready(name, backend, dtype)
    given = (
        dict(enumerate(call.leaves))
        | call.p.fields
        | {
            "targets": call.p.targets,
            "temperature": call.p.temperature,
        }
    )
    tensors = {str(key): x for key, x in given.items() if isinstance(x, Tensor)}
    unchanged, versions = snapshot(**tensors), [x._version for x in tensors.values()]
    call.gradients()
    unchanged()
    assert [x._version for x in tensors.values()] == versions and len(tensors) > 8


@each_dtype
@of_logits
def test_a_gradient_in_place_lies_in_the_memory_of_the_logits(name, dtype, backend):
    expected, call = (
        ready(name, backend, dtype).gradients(),
        ready(name, backend, dtype, inplace=True),
    )
    logits, seen = call.leaves[0] * 1.0, []
    address, version = logits.data_ptr(), logits._version
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    assert same(call.gradients(call.values(logits)), expected)
    assert seen == [address] and logits._version > version


@of_logits
def test_logits_that_were_overwritten_cannot_be_trained_on(name, backend):
    """Another use of the same logits is right beside a call out of place, and raises after one in
    place.
    """
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


def test_logits_written_between_a_loss_in_place_and_its_backward_raise(backend):
    call = ready("loss of logits", backend, inplace=True)
    logits = call.leaves[0] * 1.0
    first, second = (call.values(logits)["loss"] for _ in range(2))
    second.backward()
    with pytest.raises(RuntimeError, match="was written to before the backward"):
        first.backward()


@of_logits
def test_a_leaf_is_not_overwritten_by_its_gradient(name, backend):
    """Neither itself nor a view of it; and nothing is written where there is no gradient."""
    call = ready(name, backend, inplace=True)
    (leaf,), unchanged = call.leaves, snapshot(leaf=call.leaves[0])
    for logits in (leaf, leaf[:]):
        with pytest.raises(ValueError, match=r"inplace=True.*leaf that requires grad"):
            call.values(logits)
    with torch.no_grad():
        call.values(leaf)
    unchanged()


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
@each
def test_fp16_keeps_gradients_that_only_a_loss_scale_brings_into_its_range(
    name, objective, backend
):
    """What GradScaler does: without the scale the gradient of the logits would underflow."""
    loss = name.startswith("loss")
    small, scale = 1.0 if loss else 1e-6, 2.0**16
    changes = (
        {"objective": objective, "normalizer": 3e6 if "logits" in name else 3e4, "given": "column"}
        if loss
        else {}
    )
    call, wide = (
        ready(name, backend, "float16", **changes),
        ready(name, "eager", "float16", **changes),
    )
    found, wide.leaves = (
        call.gradients(scale=small * scale),
        [x.detach().float().requires_grad_() for x in call.leaves],
    )
    for x, y in zip(found, wide.gradients(), strict=True):
        large = y.abs() > 1e-2 * y.abs().max()
        torch.testing.assert_close(
            x[large].double(), y[large].double() * (small * scale), rtol=1e-2, atol=0
        )
        assert "hidden" in name or (y[large].abs() * small).min() < 2.0**-14


# ---- memory that a call shares with its caller


B, T, V = 3, 5, 40
IDS = torch.arange(B * T).view(B, T) % V
DISTILLATION = Objective.preset("grpo", beta=0.5, kl=Exact("reverse"))


def loss(logits, teacher=None, transform=None, normalizer=None, **fields):
    batch = TokenBatch(IDS[:, : logits.shape[1]], **{"advantages": torch.ones(B), **fields})
    teacher = torch.zeros(logits.shape) if teacher is None else teacher
    given = {"transform": transform, "normalizer": normalizer, "inplace": True}
    return grpo_loss(logits, batch, DISTILLATION, ref_logits=teacher, **given)


#: What a call in place would overwrite -> the call, on memory [B, T, V + 8] in fp32.
IN_PLACE = [
    ("ref_logits", lambda x: loss(x[:, 1:, :V], x[:, :-1, :V])),
    ("ref_logits[0]", lambda x: loss(x[..., :V], (x[..., 8:], LogitTransform(2.0)))),
    ("ref_logits[0][1]", lambda x: loss(x[..., :V], [(torch.zeros(B, T, V), x[..., 3])])),
    ("batch.advantages", lambda x: loss(x[..., :V], advantages=x[..., 0])),
    ("transform.temperature", lambda x: loss(x[..., :V], transform=LogitTransform(x[..., 0]))),
    ("normalizer", lambda x: loss(x[..., :V], normalizer=x[0, 0, 0])),
    ("ref_logits", lambda x: token_divergence(x[:, 1:, :V], x[:, :-1, :V], inplace=True)),
    ("mask", lambda x: token_logprobs(x[..., :V], IDS, mask=x.view(torch.bool)[..., 3], inplace=True)),
    ("targets", lambda x: token_logprobs(x.view(torch.bfloat16)[..., 4:V], x.view(torch.int64)[..., 1], inplace=True)),
]  # fmt: skip


@pytest.mark.parametrize("name, make", IN_PLACE, ids=lambda x: x if isinstance(x, str) else "")
def test_in_place_over_what_is_read_is_refused(name, make):
    memory = torch.rand(B, T, V + 8) + 0.5
    before = memory.clone()
    with pytest.raises(
        ValueError, match=f"inplace=True, but logits shares memory with {re.escape(name)}: "
    ):
        make(memory)
    assert same_bits(memory, before)


# ---- `weight_grad=`


def with_memory(kept, backend, objective="dapo", into=None):
    """A loss from hidden states with memory for the weight's gradient, or without."""
    return PreparedCall(
        CallCase(source="hidden", objective=objective, kept=kept, seed=4),
        backend=backend,
        weight_grad=into,
    )


def memory():
    return torch.zeros(61, 8)


@pytest.mark.parametrize("into", [True, False], ids=["weight_grad", "autograd"])
@pytest.mark.parametrize("kept", ["all", "none"])
def test_hidden_states_that_change_before_the_backward(kept, into, backend):
    """The backward over candidate sets reads them again, which autograd refuses; a fused loss has
    its gradient already.
    """
    total = memory()
    expected, call = (
        with_memory(kept, backend).gradients()[1],
        with_memory(kept, backend, into=total if into else None),
    )
    hidden, weight = call.leaves[0] * 1.0, call.leaves[1]
    loss = call.values(hidden, weight)["loss"]
    with torch.no_grad():
        hidden.zero_()
    if kept == "all":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert not total.any() and weight.grad is None
    else:
        loss.backward()
        torch.testing.assert_close(total if into else weight.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize("kept", ["some", "none"])
def test_megatrons_main_grad(kept, name, backend):
    """The flag is set, and autograd's gradient is a placeholder, of zeros where an embedding shares
    the weight. Other memory sets no flag.
    """
    expected = with_memory(kept, backend, name).gradients()[1]
    for shared, other in ((False, False), (True, False), (False, True)):
        total = memory()
        call = with_memory(kept, backend, name, total)
        weight = call.leaves[1]
        weight.main_grad, weight.grad_added_to_main_grad = memory() if other else total, False
        weight.zero_out_wgrad = shared
        loss = call.values()["loss"]
        assert not weight.grad_added_to_main_grad
        (loss + weight[3].sum() if shared else loss).backward()
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)
        assert weight.grad_added_to_main_grad is not other and (weight.grad is None) == other
        if shared:
            assert torch.equal(weight.grad, memory().index_fill(0, torch.tensor([3]), 1.0))


def test_a_large_gradient_over_many_ids_is_zero_elsewhere(backend):
    """In memory that an earlier gradient has left, which is used again where many rows are to be
    written.
    """
    lists = [list(range(i, 140_000, 7 * 20)) for i in range(20)]
    batch = TokenBatch(torch.arange(20), torch.ones(20), kept=TokenSets.from_lists(lists))
    hidden, weight = torch.randn(20, 64), torch.zeros(140_000, 64, requires_grad=True)  # 36 MB
    for _ in range(2):
        linear_grpo_loss(
            hidden, weight, batch, Objective.preset("dapo"), options=Options(backend=backend)
        ).loss.backward()
        assert (
            weight.grad is not None
            and weight.grad[:20].any(1).all()
            and not weight.grad.view(-1, 140, 64)[:, 20:].any()
        )
        weight.grad.fill_(1.0)
        weight.grad = None


def test_a_view_that_is_overwritten_keeps_its_graph():
    """Autograd rebuilds the graph of a view that was written to, as AsStrided of the whole base."""
    base = torch.randn(2, 4, 11, requires_grad=True) * 1
    batch = TokenBatch(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2))
    loss = grpo_loss(base[:, :-1], batch, Objective.preset("dapo"), inplace=True).loss
    ((grad_fn, _),) = [f for f in loss.grad_fn.next_functions if f[0] is not None]
    assert grad_fn.name() == "SliceBackward0"
