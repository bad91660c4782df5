"""Gradients of the tensors of a stream, which visits add to. Some are made in the backward, once its factor is known, because they
are sparse or come in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from .backends import Backend
from .memory import zeros
from .ragged import Ragged, merged

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class WeightMemory:
    """Memory that the gradient of a weight is added into, instead of a gradient returned through autograd.

    total     [V, H].
    flagged   the weight whose `grad_added_to_main_grad` is to be set, as Megatron's own layers do where `total` is its main_grad.
    """

    total: Tensor
    flagged: Tensor | None

    @property
    def sum_of_chunks(self) -> Tensor | None:
        """`total` if products may add to it chunk by chunk; None if each sum would be rounded."""
        return self.total if self.total.dtype == torch.float32 else None

    def left_to_autograd(self) -> Tensor | None:
        """The gradient that autograd gets for the weight. Megatron's hook wants one, which it drops, or, with `zero_out_wgrad`
        (an embedding has the same weight), adds to main_grad."""
        weight = self.flagged
        if weight is None:
            return None
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if getattr(weight, "zero_out_wgrad", False):
            return zeros(weight.shape, weight.dtype, weight.device)
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


class LateGradient(Protocol):
    """A gradient that is computed in the backward."""

    def made(self, factor: Tensor | None = None) -> Tensor | None:
        """The gradient times `factor` (0-d); None if autograd gets none."""


@dataclass(eq=False)
class SlotGradient:
    """The gradient of logits that is 0 but at a few positions: `values` [m] at `at`, indices into a tensor of `shape`."""

    shape: torch.Size
    dtype: torch.dtype
    at: tuple[Tensor, ...]
    values: Tensor

    @classmethod
    def of(cls, logits: Tensor, slots: Ragged, values: Tensor) -> SlotGradient:
        """That of logits [A, T, V] whose gradient at slots is `values`; 0 where one is not in use."""
        used = torch.where(slots.ids >= 0, values, 0.0)
        return cls(logits.shape, logits.dtype, slots.positions(logits.shape[1]), used)

    def made(self, factor: Tensor | None = None) -> Tensor:
        return self.add_to(zeros(self.shape, self.dtype, self.values.device), factor)

    def add_to(self, out: Tensor, factor: Tensor | None = None) -> Tensor:
        values = self.values if factor is None else self.values * factor
        if self.shape[-1]:  # else of a rank without a part of the vocabulary
            # Slots that are not in use add 0: to leave them out, the host would have to know them.
            out.index_put_(self.at, values.to(self.dtype), accumulate=True)
        return out


@dataclass(eq=False)
class WeightGradient:
    """d_weight [V, H], the sum of two parts.

    dense   of rows over the whole vocabulary, None if there are none; `into.total` itself where it was added to that.
    into    what the gradient is added into; None: memory of its own.
    slots, values   of rows with sets, or columns that were drawn: `values` [m] is the gradient of the logits at `slots`, from
            which a few rows of d_weight follow with `hidden`. None if there are none.
    """

    backend: Backend
    shape: torch.Size
    dtype: torch.dtype  # of memory of its own for rows with sets alone
    dense: Tensor | None
    into: WeightMemory | None
    device: torch.device
    hidden: Tensor | None
    slots: Ragged | None
    values: Tensor | None

    def __post_init__(self) -> None:
        self._version = _version(self.hidden)

    def made(self, factor: Tensor | None = None) -> Tensor | None:
        """The gradient times `factor` (0-d), in the dtype of its sum; where it was added into `into`, what autograd gets then.
        RuntimeError if hidden states that are needed for it were written to."""
        dense, values = self.dense, self.values
        if values is not None and _version(self.hidden) != self._version:
            raise RuntimeError(
                "hidden was written to in place between the forward and the backward, which needs it for the gradient of weight: "
                "call backward first, or write to a copy."
            )
        total = None if self.into is None else self.into.total
        if factor is not None and dense is not None:
            if dense is total:
                raise RuntimeError("a factor of the gradient is known only after it was added to other gradients.")
            self.backend.scale_(dense, factor)
        if factor is not None and values is not None:
            values = values * factor
        out = dense
        if total is not None:
            out = total if dense is None or dense is total else total.add_(dense)
        elif out is None:  # only the rows of slots are touched
            touched = 0 if values is None else values.numel()
            out = zeros(self.shape, self.dtype, self.device, touched)
        if values is not None:
            assert self.slots is not None and self.hidden is not None
            self.backend.add_hidden_rows(values, self.slots, self.hidden, out)
        return out if self.into is None else self.into.left_to_autograd()


def _version(x: Tensor | None) -> int | None:
    return None if x is None or x.is_inference() else x._version


class Gradients(ABC):
    """The gradients of a stream's tensors, to which visits add.

    few  the gradient of the logits at slots, which is added when visits of whole rows have written theirs."""

    few: tuple[Ragged, Tensor] | None = None

    def add(self, slots: Ragged, values: Tensor) -> None:
        """Add the gradient of the logits at slots, fp32 [m], where they are in use."""
        self.few = (slots, values) if self.few is None else merged(*self.few, slots, values)

    @abstractmethod
    def made(self) -> tuple[Tensor | LateGradient | None, ...]:
        """One for each tensor of the stream, None where it is not wanted."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The same at once, where the factor of the backward is in them."""
        return tuple(g if g is None or isinstance(g, Tensor) else g.made() for g in self.made())
