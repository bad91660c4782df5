"""The four functions under autograd: second backwards, memory handed over or written, modes without gradients, loss scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels import (
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from support.bits import same_bits, snapshot
from support.doors import in_options

Tensor = torch.Tensor
B, T, V, H = 3, 4, 61, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Call = Callable[..., tuple[Tensor, ...]]


class Inputs:
    """Leaves of both sources, and a batch in which every field is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.logits = (2 * torch.randn(B, T, V)).to(dtype)
        self.hidden, self.weight = torch.randn(B, T, H).to(dtype), torch.randn(V, H).to(dtype)
        self.targets, self.mask = torch.randint(V, (B, T)), torch.rand(B, T) < 0.8
        self.fields = {name: -4 + 0.3 * torch.randn(B, T) for name in ("old_logps", "ref_logps")}
        self.fields |= {"advantages": torch.tensor([1.0, -0.5, 0.7]), "weights": 0.5 + torch.rand(B, T)}
        self.temperature = torch.full((B,), 0.8)

    def batch(self) -> TokenBatch:
        return TokenBatch(self.targets, mask=self.mask, **self.fields)

    def call(self, name: str, objective: str = "dapo", **options: Any) -> Call:
        """The function of a name, of its leaves."""
        transform = LogitTransform(self.temperature)
        options = in_options(**options)
        if "log-probs" in name:
            f: Any = token_logprobs if "logits" in name else linear_logprobs
            return lambda *x, **o: f(*x, self.targets, mask=self.mask, transform=transform, entropy=True, **options, **o)
        f = grpo_loss if "logits" in name else linear_grpo_loss
        chosen = Objective.preset(objective, beta=0.1 if "ref_logps" in self.fields else 0.0, entropy_coef=0.01)
        return lambda *x, **o: (f(*x, self.batch(), chosen, transform=transform, **options, **o).loss,)

    def leaves(self, name: str) -> list[Tensor]:
        given = [self.logits] if "logits" in name else [self.hidden, self.weight]
        return [x.clone().requires_grad_() for x in given]


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor], **options: Any) -> list[Tensor]:
    return [x.clone() for x in torch.autograd.grad(sum(x.sum() for x in outputs), leaves, **options)]  # type: ignore[arg-type]


NAMES = ["loss of logits", "loss of hidden states", "log-probs of logits", "log-probs of hidden states"]
each = pytest.mark.parametrize("name", NAMES)
of_logits = pytest.mark.parametrize("name", NAMES[::2])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
@each
def test_a_second_backward_is_right_or_refused(name: str, dtype: torch.dtype, backend: str) -> None:
    """The gradient of a loss is handed over once, except in fp16, where it is made in the backward."""
    inputs = Inputs(dtype)
    leaves = inputs.leaves(name)
    outputs = inputs.call(name, backend=backend)(*leaves)
    first = gradients(outputs, leaves, retain_graph=True)
    if name.startswith("loss") and not (dtype == torch.float16 and "logits" in name):
        with pytest.raises(RuntimeError, match="already handed over"):
            gradients(outputs, leaves)
    else:
        assert all(map(same_bits, first, gradients(outputs, leaves)))
        with pytest.raises(RuntimeError):
            gradients(outputs, leaves)


@each
def test_there_are_no_second_derivatives_and_no_forward_mode(name: str, backend: str) -> None:
    inputs = Inputs()
    leaves = inputs.leaves(name)
    outputs = inputs.call(name, backend=backend)(*leaves)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(sum(x.square().sum() for x in outputs), leaves, create_graph=True)  # type: ignore[arg-type]
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), torch.autograd.forward_ad.dual_level():
            dual = [torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in leaves]
            with pytest.raises((NotImplementedError, RuntimeError)):
                inputs.call(name, backend=backend)(*dual)


@each
def test_gradients_add_up_where_tensors_are_used_twice(name: str, backend: str) -> None:
    inputs = Inputs()
    call, leaves = inputs.call(name, backend=backend), inputs.leaves(name)
    once = gradients(call(*leaves), leaves)
    twice = gradients((*call(*leaves), *call(*leaves)), leaves)
    for x, y in zip(twice, once, strict=True):
        torch.testing.assert_close(x, 2 * y, rtol=1e-6, atol=1e-7)


@each
def test_without_gradients_the_values_are_the_same(name: str, backend: str) -> None:
    """Frozen leaves, no_grad, inference mode, and tensors that were made in it."""
    inputs = Inputs()
    call, leaves = inputs.call(name, backend=backend), inputs.leaves(name)
    expected = [x.detach() for x in call(*leaves)]
    frozen = call(*(x.detach() for x in leaves))
    assert all(map(same_bits, frozen, expected)) and not any(x.requires_grad for x in frozen)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = call(*leaves)
            assert all(map(same_bits, found, expected)) and not any(x.requires_grad for x in found)
    with torch.inference_mode():
        made_inside = [x.detach().clone() for x in leaves]
    assert all(map(same_bits, call(*made_inside), expected))


@each_dtype
@each
def test_inputs_are_not_modified(name: str, dtype: torch.dtype, backend: str) -> None:
    inputs = Inputs(dtype)
    leaves = inputs.leaves(name)
    tensors = (
        dict(enumerate(leaves)) | inputs.fields | {"mask": inputs.mask, "targets": inputs.targets, "t": inputs.temperature}
    )
    unchanged = snapshot(**{str(k): x for k, x in tensors.items()})
    gradients(inputs.call(name, backend=backend)(*leaves), leaves)
    unchanged()
    assert all(x._version == 0 for x in tensors.values())


@each_dtype
@of_logits
def test_a_gradient_in_place_lies_in_the_memory_of_the_logits(name: str, dtype: torch.dtype, backend: str) -> None:
    inputs = Inputs(dtype)
    (leaf,) = inputs.leaves(name)
    call = inputs.call(name, backend=backend)
    (expected,) = gradients(call(leaf), [leaf])
    logits, seen = leaf * 1.0, []
    address, version = logits.data_ptr(), logits._version
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    (found,) = gradients(call(logits, inplace=True), [leaf])
    assert same_bits(found, expected) and seen == [address] and logits._version > version


@of_logits
def test_logits_that_were_overwritten_cannot_be_trained_on(name: str, backend: str) -> None:
    """Another use of the same logits is right beside a call out of place, and raises after one in place."""
    inputs = Inputs()
    for inplace in (False, True):
        (leaf,) = inputs.leaves(name)
        logits = leaf * 1.0
        other = logits.square().sum()
        gradients(inputs.call(name, backend=backend, inplace=inplace)(logits), [leaf], retain_graph=True)
        if inplace:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                other.backward()
        else:
            other.backward()
            assert leaf.grad is not None and same_bits(leaf.grad, 2 * inputs.logits)


def test_logits_written_between_a_loss_in_place_and_its_backward_raise(backend: str) -> None:
    inputs = Inputs()
    logits = inputs.logits.requires_grad_() * 1.0
    call = inputs.call("loss of logits", backend=backend, inplace=True)
    (first,), (second,) = call(logits), call(logits)
    second.backward()
    with pytest.raises(RuntimeError, match="was written to before the backward"):
        first.backward()


@pytest.mark.parametrize("view", [False, True])
@of_logits
def test_a_leaf_is_not_overwritten_by_its_gradient(name: str, view: bool, backend: str) -> None:
    inputs = Inputs()
    (leaf,) = inputs.leaves(name)
    call = inputs.call(name, backend=backend, inplace=True)
    with pytest.raises(ValueError, match=r"inplace=True.*leaf that requires grad"):
        call(leaf[:] if view else leaf)
    assert torch.equal(leaf, inputs.logits)
    with torch.no_grad():  # nothing is written where there is no gradient
        call(leaf)
    assert torch.equal(leaf, inputs.logits)


def test_gradients_flow_into_nothing_but_the_leaves(backend: str) -> None:
    """Not into a batch whose tensors somebody forgot to detach, nor out of what is returned beside the loss."""
    inputs = Inputs()
    (leaf,) = inputs.leaves("loss of logits")
    (expected,) = gradients(inputs.call("loss of logits", backend=backend)(leaf), [leaf])
    for x in inputs.fields.values():
        x.requires_grad_()
    out = grpo_loss(
        leaf, inputs.batch(), Objective.preset("dapo", beta=0.1, entropy_coef=0.01), transform=LogitTransform(inputs.temperature),
        options=Options(backend=backend),
    )  # fmt: skip
    out.loss.backward()
    assert leaf.grad is not None and same_bits(leaf.grad, expected) and all(x.grad is None for x in inputs.fields.values())
    assert not any(x.requires_grad for x in (out.logps, out.entropy, *out.metrics.values()))


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
@each
def test_fp16_keeps_gradients_that_only_a_loss_scale_brings_into_its_range(name: str, objective: str, backend: str) -> None:
    """What GradScaler does: without the scale the gradient of the logits would underflow."""
    inputs = Inputs(torch.float16)
    leaves = inputs.leaves(name)
    options = {"normalizer": 3e6} if name.startswith("loss") else {}
    outputs = inputs.call(name, objective, backend=backend, **options)(*leaves)
    small = 1.0 if options else 1e-6
    found = gradients(tuple(x * (small * 2.0**16) for x in outputs), leaves)
    wide = Inputs.__new__(Inputs)
    wide.__dict__ = {
        **inputs.__dict__,
        "logits": inputs.logits.float(),
        "hidden": inputs.hidden.float(),
        "weight": inputs.weight.float(),
    }
    exact_leaves = wide.leaves(name)
    exact = gradients(wide.call(name, objective, backend="eager", **options)(*exact_leaves), exact_leaves)
    for x, y in zip(found, exact, strict=True):
        want = y.double() * (small * 2.0**16)
        large = want.abs() > 1e-2 * want.abs().max()
        torch.testing.assert_close(x.double()[large], want[large], rtol=1e-2, atol=0)
        assert "hidden" in name or (y[large].abs() * small).min() < 2.0**-14


@each_dtype
@each
def test_no_rows_and_no_trained_row_give_a_differentiable_zero(name: str, dtype: torch.dtype, backend: str) -> None:
    for shape in ((0,), (0, 4), (4, 0), (2, 3)):
        inputs = Inputs(dtype)
        inputs.logits, inputs.hidden = (
            torch.full((*shape, V), torch.nan, dtype=dtype),
            torch.full((*shape, H), torch.nan, dtype=dtype),
        )
        inputs.targets, inputs.mask = torch.full(shape, -100), torch.zeros(shape, dtype=torch.bool)
        inputs.fields, inputs.temperature = {"advantages": torch.zeros(shape)}, torch.tensor(1.0)
        leaves = inputs.leaves(name)
        outputs = inputs.call(name, "reinforce", backend=backend)(*leaves)
        assert not any(x.any() for x in outputs)
        found = gradients(outputs, leaves)
        assert all(x.shape == y.shape and not x.any() for x, y in zip(found, leaves, strict=True))


def test_one_row_of_logits_for_all_sequences(backend: str) -> None:
    """The gradient of an expanded tensor is the sum over those that share it."""
    inputs = Inputs()
    call, one = inputs.call("loss of logits", backend=backend), inputs.logits[:1]
    (of_each,) = gradients(call(x := one.expand_as(inputs.logits).clone().requires_grad_()), [x])
    (of_one,) = gradients(call((y := one.clone().requires_grad_()).expand_as(inputs.logits)), [y])
    torch.testing.assert_close(of_one, of_each.sum(0, keepdim=True), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("what", ["int32", "strided", "integer mask", "expanded upstream"])
def test_small_tensors_of_any_layout(what: str, backend: str) -> None:
    inputs = Inputs()
    (leaf,) = inputs.leaves("log-probs of logits")

    def run(d: Tensor) -> Tensor:
        logps = token_logprobs(leaf, inputs.targets, mask=inputs.mask, options=Options(backend=backend))[0]
        return torch.autograd.grad(logps, leaf, d)[0].clone()

    expected = run(torch.full((B, T), 0.37))
    apart = {
        "int32": lambda: setattr(inputs, "targets", inputs.targets.int()),
        "strided": lambda: setattr(inputs, "targets", inputs.targets.t().contiguous().t()),
        "integer mask": lambda: setattr(inputs, "mask", inputs.mask.t().contiguous().t().long()),
        "expanded upstream": lambda: None,
    }
    apart[what]()
    found = run(
        torch.tensor(0.37).expand(B, T)
        if what == "expanded upstream"
        else torch.stack([torch.full((B, T), 0.37)] * 2, -1)[..., 0]
    )
    assert same_bits(found, expected)


@pytest.mark.parametrize("preset", ["dapo", "cispo", "reinforce"])
def test_a_token_without_weight_adds_nothing_whatever_it_holds(preset: str, backend: str) -> None:
    """A sampler that rejected a token may have no log-prob for it, and a grammar may forbid it."""
    logits, old, weights = torch.randn(1, 5, 11), torch.randn(1, 5) - 2, torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0]])
    logits[0, 2, 3], old[0, 3] = -torch.inf, torch.nan
    batch = TokenBatch(torch.arange(1, 6)[None], torch.tensor([[1.0, -1.0, 0.0, 0.5, 2.0]]), old_logps=old, weights=weights)
    leaf = logits.requires_grad_()
    out = grpo_loss(leaf, batch, Objective.preset(preset), options=Options(backend=backend))
    out.loss.backward()
    assert out.loss.isfinite() and leaf.grad is not None and leaf.grad.isfinite().all()
    assert not leaf.grad[0, 2:4].any() and leaf.grad[0, 0].any()
