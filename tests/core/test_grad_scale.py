"""`grad_scale`: the forward computes the gradient of the scaled loss. `Options(grad_in_backward=)`:
the backward computes it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    Exact,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    grpo_loss,
    linear_grpo_loss,
    objective_loss,
)
from grpo_kernels.core import backends

NUM_SEQUENCES = 3
LENGTH = 5
VOCABULARY = 37
WIDTH = 8

OBJECTIVES = {
    "dapo": Objective.preset("dapo"),
    "kl and entropy": Objective.preset("grpo", beta=0.1, entropy_coef=0.01),
    "gspo": Objective.preset("gspo"),
    "exact divergence": Objective.preset("dapo", beta=0.1, kl=Exact("reverse")),
}
each_objective = pytest.mark.parametrize("name", OBJECTIVES)
each_source = pytest.mark.parametrize("source", ["logits", "logits in place", "hidden"])


class Example:
    """Inputs of a loss, the same for each call with the same arguments.

    leaves   the tensors that get a gradient, by name
    """

    def __init__(self, name: str, source: str, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        tokens = (NUM_SEQUENCES, LENGTH)
        self.objective = OBJECTIVES[name]
        self.source = source
        self.batch = TokenBatch(
            torch.randint(VOCABULARY, tokens, generator=generator),
            normal(NUM_SEQUENCES),
            mask=torch.rand(tokens, generator=generator) > 0.2,
            old_logps=normal(*tokens) - 3.0,
            ref_logps=normal(*tokens) - 3.0 if name == "kl and entropy" else None,
        )
        hidden = normal(*tokens, WIDTH)
        weight = normal(VOCABULARY, WIDTH)
        self.reference: dict[str, Any] = {}
        if source == "hidden":
            self.leaves = {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}
            if name == "exact divergence":
                self.reference = {"reference": (normal(*tokens, WIDTH), weight)}
        else:
            self.leaves = {"logits": (hidden @ weight.T).to(dtype)}
            if name == "exact divergence":
                self.reference = {"ref_logits": normal(*tokens, VOCABULARY)}
        for x in self.leaves.values():
            x.requires_grad_()

    def loss(self, **arguments: Any) -> Any:
        """Compute the loss."""
        arguments |= self.reference
        if self.source == "hidden":
            return linear_grpo_loss(*self.leaves.values(), self.batch, self.objective, **arguments)
        logits = self.leaves["logits"]
        if self.source == "logits in place":
            return grpo_loss(logits * 1, self.batch, self.objective, inplace=True, **arguments)
        return grpo_loss(logits, self.batch, self.objective, **arguments)

    def gradients(self, factor: float | Tensor, **arguments: Any) -> list[Tensor]:
        """Return the gradients of factor * loss."""
        (factor * self.loss(**arguments).loss).backward()
        gradients = [x.grad for x in self.leaves.values()]
        for x in self.leaves.values():
            x.grad = None
        return gradients


def assert_close(ours: list[Tensor], expected: list[Tensor]) -> None:
    """Compare gradients of one dtype that may differ in the last digits of their fp32 scale."""
    for x, y in zip(ours, expected, strict=True):
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, y, rtol=2 * eps, atol=4 * eps * float(y.abs().max()))


@pytest.mark.parametrize("scale", [0.25, 1 / 3, 1000.0, -2.0])
@each_source
@each_objective
def test_the_gradient_is_right_for_every_factor(name, source, scale, backend):
    """Whatever the loss is multiplied by, its gradient is that of a call without grad_scale."""
    example = Example(name, source)
    options = Options(backend=backend)
    for factor in (scale, 1.0, 7.0):
        expected = example.gradients(factor, options=options)
        assert_close(example.gradients(factor, grad_scale=scale, options=options), expected)


@each_source
@each_objective
def test_the_loss_and_its_metrics_do_not_change(name, source):
    example = Example(name, source)
    plain = example.loss()
    scaled = example.loss(grad_scale=1 / 3)
    torch.testing.assert_close(scaled.loss, plain.loss, rtol=4 * 1.2e-7, atol=1e-7)
    for key, value in plain.metrics.items():
        assert torch.equal(scaled.metrics[key], value), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_source
@each_objective
def test_a_power_of_two_gives_the_bits_of_the_scaled_gradient(name, source, dtype):
    """Scaling by 1 / 4 before or after rounding to bf16 gives the same bits."""
    example = Example(name, source, dtype)
    expected = example.gradients(1.0)
    ours = example.gradients(0.25, grad_scale=0.25)
    for x, y in zip(ours, expected, strict=True):
        assert torch.equal(x, y * 0.25)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("steps", [3, 4, 7])
@each_source
def test_the_backward_multiplies_by_exactly_one(source, steps, as_tensor, monkeypatch):
    """A factor of exactly 1 is what `Backend.scale_` skips."""
    factors = []
    kernels = type(backends.pick("auto", torch.device("cpu")))
    monkeypatch.setattr(kernels, "scale_", lambda self, x, factor: factors.append(float(factor)))
    example = Example("dapo", source)
    scale = torch.tensor(1 / steps) if as_tensor else 1 / steps
    (example.loss(grad_scale=scale).loss / steps).backward()
    assert factors and set(factors) == {1.0}


@each_source
def test_a_scale_of_zero_gives_no_gradient(source):
    example = Example("dapo", source)
    for scale in (0, 0.0, torch.tensor(0.0)):
        out = example.loss(grad_scale=scale)
        torch.testing.assert_close(out.loss, example.loss().loss)
        assert all(x.count_nonzero() == 0 for x in example.gradients(0.0, grad_scale=scale))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, True, "4", None, torch.tensor([1.0]), torch.tensor(2)]
)
def test_what_is_no_scale_is_refused(value):
    with pytest.raises(ValueError, match="grad_scale"):
        Example("dapo", "logits").loss(grad_scale=value)


@each_objective
@each_source
def test_the_gradient_can_be_computed_in_the_backward(name, source, backend):
    """It is that of the forward, for any factor, and as often as backward is called."""
    example = Example(name, source)
    expected = example.gradients(0.3, options=Options(backend=backend))
    options = Options(backend=backend, grad_in_backward=True)
    ours = example.gradients(0.3, options=options)
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * float(y.abs().max()))
    if source == "logits in place":
        return
    loss = example.loss(options=options).loss
    loss.backward(retain_graph=True)
    loss.backward()
    for x, y in zip(example.leaves.values(), expected, strict=True):
        torch.testing.assert_close(
            x.grad, y * (2 / 0.3), rtol=1e-4, atol=1e-4 * float(y.abs().max())
        )


def test_the_forward_writes_no_gradient_that_the_backward_computes(monkeypatch):
    """From logits with grad_in_backward the forward only reads."""
    written = []
    kernels = type(backends.pick("auto", torch.device("cpu")))
    kernel_gradient = kernels.run_gradient_kernel

    def record(self, *arguments):
        written.append(arguments[-1].shape)
        return kernel_gradient(self, *arguments)

    monkeypatch.setattr(kernels, "run_gradient_kernel", record)
    monkeypatch.setattr(kernels, "fused_loss", None)
    out = Example("dapo", "logits").loss(options=Options(grad_in_backward=True))
    assert not written
    out.loss.backward()
    assert len(written) == 1


def test_grad_scale_is_right_under_torch_func():
    """Where the gradient is computed in the backward, grad_scale changes nothing."""
    example = Example("dapo", "logits")
    logits = example.leaves["logits"].detach()

    def loss(logits: Tensor) -> Tensor:
        return grpo_loss(logits, example.batch, example.objective, grad_scale=0.5).loss

    gradient = torch.func.grad(loss)(logits)
    assert_close([gradient], example.gradients(1.0))


def test_a_temperature_and_statistics_work_with_a_scale():
    """The scale meets a transform, and log-probs stay those of the plain loss."""
    example = Example("dapo", "logits")
    transform = LogitTransform(temperature=0.7)
    plain = example.loss(transform=transform)
    scaled = example.loss(transform=transform, grad_scale=0.25)
    assert torch.equal(scaled.logps, plain.logps)
    expected = objective_loss(plain.logps, example.batch, example.objective).loss
    torch.testing.assert_close(scaled.loss.detach(), expected, rtol=1e-6, atol=1e-6)
