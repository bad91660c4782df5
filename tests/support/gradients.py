"""The gradients that a backward pass has stored in a model."""

from __future__ import annotations

import torch
from torch import nn

Tensor = torch.Tensor


def whole(x: Tensor) -> Tensor:
    """The full tensor, if it is sharded over ranks."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[operator]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients, whole, under the names that the model has without a wrapper for ranks."""
    return {name.removeprefix("module."): whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The same, and removes them from the model."""
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return found
