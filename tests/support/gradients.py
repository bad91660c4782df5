"""The gradients that a backward pass left in a model."""

from __future__ import annotations

import torch
from torch import nn

Tensor = torch.Tensor


def whole(x: Tensor) -> Tensor:
    """All of a tensor that may be spread over ranks."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[operator]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients, whole, under the names that the model has without a wrapper for ranks."""
    return {name.removeprefix("module."): whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The same, and the model has none afterwards."""
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return found
