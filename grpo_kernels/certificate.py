"""Which rows may be left out of the gradient of a head: a bound on each row's share, and the choice of the smallest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .sparsity import Certified
from .vocabulary.rows import RowTransform

Tensor = torch.Tensor

#: How much rounding in fp32 may lower a bound.
SLACK = 1.0 + 1e-5
#: The accuracy of log-probs and entropies.
KNOWN_TO = 1e-6


class LeftOut(NamedTuple):
    """How much a loss left out of the gradient, 0-d fp32."""

    share: Tensor  # of the bounds of all rows
    bound: Tensor  # on the Frobenius norm of what the gradient of the weight lacks


@dataclass(frozen=True, eq=False)
class Certificate:
    """Decides for a batch of n rows which of them are left out.

    rows       bool [n]: rows that may be left out; None: all. The others are ignored.
    norms      fp32 [n]: of the hidden states.
    transform  of the logits: the largest dz/dx of a row counts."""

    certified: Certified
    rows: Tensor | None
    norms: Tensor
    transform: RowTransform

    @classmethod
    def of(cls, certified: Certified, hidden: Tensor, rows: Tensor | None, transform: RowTransform) -> Certificate:
        """From the hidden states [n, H]."""
        norms = torch.linalg.vector_norm(hidden.detach(), dim=1, dtype=torch.float32)
        return cls(certified, rows, norms, transform)

    def left_out(
        self, logps: Tensor, entropy: Tensor | None, d_logps: Tensor, d_entropy: Tensor | None
    ) -> tuple[Tensor, LeftOut]:  # fmt: skip
        """(bool [n]: rows that are left out, what that is), from log-probs, entropies and the slopes of the loss in them."""
        bounds = self._bounds(logps, entropy, d_logps, d_entropy).to(torch.float64)
        least, order = bounds.sort(stable=True)
        spent, total = least.cumsum(0), bounds.sum()
        out = spent <= self.certified.budget * total  # nothing where a bound is NaN
        bound = torch.where(out, least, 0.0).sum()
        share = torch.where(total == 0, 0.0, bound / total)
        mask = torch.zeros_like(out).scatter(0, order, out)
        mask = mask if self.rows is None else mask & self.rows
        return mask, LeftOut(share.to(torch.float32), (bound * SLACK).to(torch.float32))

    def _bounds(self, logps: Tensor, entropy: Tensor | None, d_logps: Tensor, d_entropy: Tensor | None) -> Tensor:
        """fp32 [n], on the norm of what a row adds to the gradient of the weight: slopes times the norms of the gradients of the
        logits and of the hidden state.

        Of a log-prob that is e_y - p, with a norm of at most sqrt(2) (1 - p_y). Of the entropy it is p_j (log p_j + H), whose
        sum of magnitudes is at most 2 H, and whose norm at most 2 / e + H: (p log p)^2 <= p (4 / e^2), the largest p (log p)^2."""
        of_row = d_logps.abs() * (math.sqrt(2.0) * (KNOWN_TO - torch.expm1(logps)))
        if d_entropy is not None:
            assert entropy is not None
            most = entropy + KNOWN_TO
            of_row = of_row + d_entropy.abs() * torch.minimum(2.0 * most, 2.0 / math.e + most)
        scaled = of_row * self.norms * abs(self.transform.scale) * self.transform.inv_temperature
        return scaled if self.rows is None else torch.where(self.rows, scaled, 0.0)
