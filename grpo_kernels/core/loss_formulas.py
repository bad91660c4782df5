"""Losses of the GRPO family as the loop over chunks calls them (`linear.Formula`).

    TokenFormula      the gradient of a token depends on this token alone (GRPO, DAPO, CISPO, ...)
    SequenceFormula   the gradient of a token depends on the log-probs of its sequence (GSPO, ...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formulas.ops import times
from ..formulas.token_stage import Terms, TokenStage
from ..rows.backends import Backend, coefficients_of
from ..rows.partials import LogitRows, partials_of
from ..rows.partials import Partials as SoftmaxSums
from ..rows.partials import Slopes as GradientCoefficients
from .linear import RowOrder

#: Names of the sums that log-prob and entropy follow from.
SUMS_OF_ENTROPY = partials_of(("entropy",))


@dataclass(frozen=True, eq=False)
class FormulaResult:
    """A loss, and the statistics of all rows.

    loss         0-d fp32
    logps        log-prob of each target, fp32 [num_rows], 0 in rows that were not processed
    entropy      entropy of each row in nats, the same shape
    divergence   divergence from the reference, the same shape; None without a reference
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    divergence: Tensor | None


class TokenFormula:
    """A loss whose gradient with respect to a row's statistics depends on this row alone.

    kernels     evaluate the formula, one call for each chunk
    stage       the formula with the inputs of all rows
    order       the rows that the pass processes
    direction   the divergence from the reference, "" without one
    """

    def __init__(
        self, kernels: Backend, stage: TokenStage, order: RowOrder, direction: str
    ) -> None:
        self.kernels = kernels
        self.order = order
        self.stage = stage if order.is_identity else stage.at(order.row_ids)
        self.has_reference = direction != ""
        self.names = SUMS_OF_ENTROPY
        if self.has_reference:
            self.names = partials_of(("entropy", "divergence"), direction)
        num_values = 4 if self.has_reference else 3
        num_processed = len(order.row_ids)
        self.values = torch.zeros(num_values, num_processed, device=order.row_ids.device)

    def softmax_sums(self, chunk: slice, rows: LogitRows) -> SoftmaxSums:
        """Compute the softmax sums of a chunk."""
        return self.kernels.softmax_sums(rows, self.names)

    def coefficients(self, chunk: slice, sums: SoftmaxSums) -> GradientCoefficients:
        """Compute and record the losses of a chunk, and return the coefficients of the gradient."""
        stage = self.stage.at(chunk)
        logps, entropy = sums.softmax(True)
        terms = self.kernels.evaluate(stage, logps, entropy)
        losses = terms.losses
        grads = {"logps": terms.d_logps}
        if terms.d_entropy is not None:
            grads["entropy"] = terms.d_entropy
        values = [logps, entropy, losses]
        if self.has_reference:
            weight = stage.rows.divergence_weight
            assert weight is not None
            divergence = sums.divergence
            grads["divergence"] = weight
            values = [logps, entropy, losses + times(weight, divergence), divergence]
        torch.stack(values, out=self.values[:, chunk])
        return coefficients_of(sums, grads, None, entropy=entropy)

    def row_scale(self, block: slice) -> None:
        """Return None: `coefficients` returned the whole gradient."""

    def result(self) -> FormulaResult:
        """Return the loss of all rows that were processed."""
        values = self.order.scatter(self.values, self.values.new_zeros(len(self.values), 1))
        return FormulaResult(
            loss=sum_losses(values[2]),
            logps=values[0],
            entropy=values[1],
            divergence=values[3] if self.has_reference else None,
        )


class SequenceFormula:
    """A loss that depends on a sequence through the log-probs of its tokens.

    d loss / d logits[row] = c[row] * d log-prob[row] / d logits[row], where the scalar c[row]
    depends on the log-probs of the whole sequence. `coefficients` returns 1 in place of c, and
    `row_scale` returns c when the log-probs of the sequence are known. This needs a loss without a
    gradient through entropy or divergence.

    kernels          compute the softmax sums
    compute_losses   (logps, entropy), fp32 [num_rows] each -> losses and gradients of all rows
    order            the rows that the pass processes
    """

    def __init__(
        self,
        kernels: Backend,
        compute_losses: Callable[[Tensor, Tensor], Terms],
        order: RowOrder,
    ) -> None:
        self.kernels = kernels
        self.compute_losses = compute_losses
        self.order = order
        device = order.row_ids.device
        self.logps = torch.zeros(order.num_rows, device=device)
        self.entropy = torch.zeros(order.num_rows, device=device)

    def softmax_sums(self, chunk: slice, rows: LogitRows) -> SoftmaxSums:
        """Compute the softmax sums of a chunk."""
        return self.kernels.softmax_sums(rows, SUMS_OF_ENTROPY)

    def coefficients(self, chunk: slice, sums: SoftmaxSums) -> GradientCoefficients:
        """Record the statistics of a chunk, and return a gradient of 1 for each log-prob.

        A log-prob of NaN has the gradient 0 here, so that `row_scale` decides whether the gradient
        of the row is NaN.
        """
        row_ids = self.order.row_ids_at(chunk)
        logps, entropy = sums.softmax(True)
        self.logps[row_ids] = logps
        self.entropy[row_ids] = entropy
        return GradientCoefficients.stacked({"target": (~logps.isnan()).float()})

    def row_scale(self, block: slice) -> Tensor:
        """Return c = d loss / d log-prob of rows whose sequences were processed completely."""
        # The log-probs of sequences in later blocks are still 0. They do not affect c of these
        # rows, because no sequence is in two blocks.
        grad_logps = self.compute_losses(self.logps, self.entropy).d_logps
        is_nan = self.logps.isnan() & (grad_logps != 0)
        return grad_logps.masked_fill(is_nan, torch.nan)[self.order.row_ids_at(block)]

    def result(self) -> FormulaResult:
        """Return the loss of all rows that were processed."""
        losses = self.compute_losses(self.logps, self.entropy).losses
        return FormulaResult(sum_losses(losses), self.logps, self.entropy, None)


def sum_losses(losses: Tensor) -> Tensor:
    """Return the sum of losses [num_rows] as a 0-d fp32 tensor.

    The sum is fp64, so that it does not depend on how torch splits it among threads.
    """
    return losses.sum(dtype=torch.float64).float()
