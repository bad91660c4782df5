"""Cases with hidden states and a head in place of the logits of cases.py, and helpers that observe chunks and products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from support import oracle
from support.cases import LENGTHS, Case, around, assert_no_worse, inside_lengths, pack
from support.oracle import Spec

Tensor = torch.Tensor
Gradients = dict[str, Tensor]

#: How far two fp32 gradients, rounded to a dtype or multiplied in it, may be apart, relative to the largest value.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclass
class LinearCase:
    """A case whose logits, in float64, are hidden @ weight.T + bias."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    tokens: Case

    @property
    def leaves(self) -> Gradients:
        """Clones that require a gradient, by name."""
        found = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {k: v.detach().clone().requires_grad_() for k, v in found.items() if v is not None}

    def logits(self, dtype: torch.dtype) -> tuple[Tensor, Gradients]:
        """Logits by a product in `dtype`, and the leaves they come from."""
        leaves = self.leaves
        if dtype == torch.float64:
            leaves = {k: v.detach().double().requires_grad_() for k, v in leaves.items()}
        cast = {k: v.to(dtype) for k, v in leaves.items()}
        return F.linear(cast["hidden"], cast["weight"], cast.get("bias")), leaves

    def expected(self, spec: Spec, normalizer: float | None = None) -> tuple[oracle.Result, Gradients]:
        return self._oracle(spec, normalizer, torch.float64)

    def naive(self, spec: Spec, normalizer: float | None = None) -> tuple[oracle.Result, Gradients]:
        """Logits in the dtype of the hidden states, the loss in fp32, autograd."""
        return self._oracle(spec, normalizer, torch.float32)

    def _oracle(self, spec: Spec, normalizer: float | None, dtype: torch.dtype) -> tuple[oracle.Result, Gradients]:
        logits, leaves = self.logits(torch.float64 if dtype == torch.float64 else self.hidden.dtype)
        result, d_logits = self.tokens.with_logits(logits.detach())._oracle(spec, normalizer, dtype)
        return result, dict(zip(leaves, torch.autograd.grad(logits, list(leaves.values()), d_logits), strict=True))


def build_linear(
    dtype: torch.dtype = torch.float32,
    *,
    weight_dtype: torch.dtype | None = None,
    packed: bool = False,
    vocab: int = 61,
    width: int = 24,
    bias: bool = True,
    seed: int = 34,
    transform: dict[str, Any] | None = None,
    kept: bool = False,
) -> LinearCase:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(LENGTHS), max(LENGTHS), width, generator=g).to(dtype)
    weight = (2.0 * width**-0.5 * torch.randn(vocab, width, generator=g)).to(weight_dtype or dtype)
    offset = torch.randn(vocab, generator=g).to(weight_dtype or dtype) if bias else None
    logits = F.linear(hidden.double(), weight.double(), None if offset is None else offset.double())
    tokens = around(logits, g, transform or {}, kept)
    if packed:
        hidden, tokens = hidden[inside_lengths()], pack(tokens)
    return LinearCase(hidden, weight, offset, tokens)


def gradients_of(leaves: Gradients) -> Gradients:
    found = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype
        found[name] = leaf.grad
    return found


def assert_gradients_no_worse(ours: Gradients, naive: Gradients, exact: Gradients, tiny: float = 4e-6) -> None:
    """The rule of `assert_no_worse`. Where both round the gradient of the logits to bf16, which of the two has the larger
    error is chance, so those get a margin."""
    assert ours.keys() == exact.keys()
    for name, gradient in ours.items():
        if ours["hidden"].dtype == torch.float32:
            assert_no_worse(gradient, naive[name], exact[name], f"gradient of {name}", tiny)
            continue
        assert torch.isfinite(gradient).all(), name
        scale = float(exact[name].abs().max())
        assert scale > 0, f"gradient of {name}: the case is trivial"
        mine, theirs = ((x[name].double() - exact[name]).abs() for x in (ours, naive))
        for kind, a, b, factor in (
            ("largest", mine.max(), theirs.max(), 2.0),
            ("rms", mine.square().mean().sqrt(), theirs.square().mean().sqrt(), 1.1),
        ):
            assert float(a) <= factor * float(b) + tiny * scale, (
                f"gradient of {name}: {kind} error {float(a):.3e}, naive {float(b):.3e}, scale {scale:.3e}"
            )


def assert_near(a: Tensor, b: Tensor, relative: float, what: str) -> None:
    """Asserts that two tensors differ by at most `relative` times the largest value."""
    assert a.shape == b.shape, f"{what}: {list(a.shape)} and {list(b.shape)}"
    scale = float(b.detach().abs().max())
    error = float((a.detach().double() - b.detach().double()).abs().max())
    assert scale > 0 and error <= relative * scale, f"{what}: they differ by {error:.3e}, the largest value is {scale:.3e}"
