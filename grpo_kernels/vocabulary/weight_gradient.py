"""The gradient of the weight: made when the factor of the backward is known, of parts that lie in different places."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backends import SparseBackend
from .memory import zeros
from .sparse import Slots

Tensor = torch.Tensor


@dataclass(eq=False)
class WeightGradient:
    """d_weight [V, H], the sum of two parts.

    dense   of rows over the whole vocabulary, None if there are none.
    into    what the gradient is added into; None: memory of its own.
    slots, values   of rows with sets: `values` [m] is the gradient of their logits at `slots`, from which a few rows of d_weight
            follow with `hidden`. None if there are none.
    """

    backend: SparseBackend
    shape: torch.Size
    dtype: torch.dtype  # of memory of its own for rows with sets alone
    dense: Tensor | None
    into: Tensor | None
    hidden: Tensor
    slots: Slots | None
    values: Tensor | None

    def made(self, factor: Tensor | None = None) -> Tensor | None:
        """The gradient times `factor` (0-d), in the dtype of its sum; None if it was added into `into`."""
        dense, values = self.dense, self.values
        if factor is not None and dense is not None:
            self.backend.scale_(dense, factor)
        if factor is not None and values is not None:
            values = values * factor
        out = dense
        if self.into is not None:
            out = self.into if dense is None else self.into.add_(dense)
        elif out is None:  # touched in the rows of sets alone
            out = zeros(self.shape, self.dtype, self.hidden.device)
        if values is not None:
            assert self.slots is not None
            self.backend.add_hidden_rows(values, self.slots, self.hidden, out)
        return None if self.into is not None else out


def check_weight_grad(weight_grad: Tensor | None, weight: Tensor) -> None:
    """Raise ValueError unless the gradient of `weight` can be added into `weight_grad`."""
    if weight_grad is None:
        return
    if not isinstance(weight_grad, Tensor) or weight_grad.shape != weight.shape or weight_grad.device != weight.device:
        got = (
            f"{list(weight_grad.shape)} on {weight_grad.device}"
            if isinstance(weight_grad, Tensor)
            else type(weight_grad).__name__
        )
        raise ValueError(f"weight_grad is {got}: pass a tensor like weight, {list(weight.shape)} on {weight.device}.")
    if weight_grad.dtype not in (torch.float32, weight.dtype):
        raise ValueError(f"weight_grad has dtype {weight_grad.dtype}: pass float32, or {weight.dtype}, that of weight.")
    if weight_grad.requires_grad or weight_grad.stride(-1) != 1:
        raise ValueError("weight_grad must not require grad, and must have unit stride in its last dimension.")
    if not weight.requires_grad:
        raise ValueError("weight_grad is given, but weight does not require grad: leave it out for a frozen head.")
