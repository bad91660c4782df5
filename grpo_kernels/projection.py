"""Head: the projection from hidden states to logits, and all that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .checks import describe, with_hints
from .rows.parallel import VocabShard
from .transform import LogitTransform

Tensor = torch.Tensor


@with_hints
@dataclass(frozen=True, eq=False, repr=False)
class Head:
    """What every `linear_*` function takes in place of `weight`, so that the head is described once.

        head = Head(model.lm_head.weight, transform=LogitTransform.of(model), grad=main_grad)
        out = linear_grpo_loss(hidden, head, batch, objective)

    weight     [V, H].
    bias       [V] or None.
    transform  softcap, scale and temperature after the product.
    shard      which part of the vocabulary weight and bias are, see `VocabShard`.
    grad       memory that the gradient of weight is added into, the `weight_grad` of `linear_grpo_loss`.

    The function that takes it checks the tensors, and raises ValueError where one of these is given beside it again."""

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform | None = None
    shard: VocabShard | None = None
    grad: Tensor | None = None
    __repr__ = describe

    def beside(self, **given: Any) -> Head:
        """Self, where nothing is given beside it again. Raises ValueError with the remedy."""
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is given beside a Head: put it into the Head.")
        return self

    @classmethod
    def of(cls, weight: Any, *, bias: Any, transform: Any, shard: Any, weight_grad: Any) -> Head:
        """A caller's `weight` with what was given beside it by keyword."""
        if isinstance(weight, Head):
            return weight.beside(bias=bias, transform=transform, shard=shard, weight_grad=weight_grad)
        return cls(weight, bias, transform, shard, weight_grad)
