"""The losses that TRL and Liger name alike: one configuration, a batch of hidden states, and comparisons of losses with
gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = torch.Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
TEMPERATURE = 0.9


@dataclass(frozen=True)
class Case:
    """A configuration, with numbers that are no defaults."""

    loss_type: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    corrected: bool = False  # the KL is multiplied by the ratio
    delta: float | None = None
    epsilons: tuple[float, float] = (0.2, 0.27)
    cap: float = 1.25
    sapo: tuple[float, float] = (0.9, 1.3)
    vespo: tuple[float, float, float, float] = (1.8, 2.6, 2.7, 2.1)
    share: float = 1.0
    off_policy: float | None = None
    coef: float = 0.0

    @property
    def constants(self) -> dict[str, float]:
        """Of SAPO and VESPO, under the names that both have."""
        names = (
            "sapo_temperature_pos",
            "sapo_temperature_neg",
            "vespo_k_pos",
            "vespo_lambda_pos",
            "vespo_k_neg",
            "vespo_lambda_neg",
        )
        return dict(zip(names, (*self.sapo, *self.vespo), strict=True))


@dataclass(frozen=True, eq=False)
class Data:
    """Hidden states [B, T, H] and head, which give the log-probs, and what a trainer has beside them."""

    hidden: Tensor
    head: Tensor
    ids: Tensor
    mask: Tensor
    old: Tensor | None
    ref: Tensor
    advantages: Tensor
    bias: Tensor | None = None
    sampler: Tensor | None = None
    weights: Tensor | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Result:
    loss: Tensor
    gradients: list[Tensor]
    metrics: Any


def run(leaves: list[Tensor], loss: Any, upstream: float = 1.0) -> Result:
    """`loss(leaves)` gives (loss, metrics)."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    value, metrics = loss(leaves)
    return Result(value.detach(), list(torch.autograd.grad(upstream * value, leaves)), metrics)


def assert_same(got: Result, want: Result, what: object, tolerance: float = 2e-5) -> None:
    """Rounding errors of a loss are relative to its terms, which are of the size of its gradients."""
    sizes = [float(x.abs().max()) for x in want.gradients]
    assert abs(float(got.loss) - float(want.loss)) <= tolerance * max(abs(float(want.loss)), *sizes), (
        what,
        got.loss,
        want.loss,
    )
    for a, b, size in zip(got.gradients, want.gradients, sizes, strict=True):
        error = float((a.double() - b.double()).abs().max())
        assert error <= tolerance * size, f"{what}: a gradient {list(b.shape)} is off by {error} of {size}"


def different(a: Result, b: Result, share: float = 0.01) -> bool:
    return float((a.gradients[0].double() - b.gradients[0].double()).abs().max()) > share * float(b.gradients[0].abs().max())
