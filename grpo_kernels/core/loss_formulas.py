"""Losses of the GRPO family in the form that the loop over chunks calls: `linear.Formula`.

TokenFormula      the gradient of a token depends on this token alone (GRPO, DAPO, CISPO, ...)
SequenceFormula   the gradient of a token depends on the log-probs of its sequence (GSPO, ...)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..formulas.token_loss import TokenLosses, TokenLossFormula
from .backends import SUMS_OF_ENTROPY, Backend, FusedLossValues
from .linear import ChunkValues, RowOrder, write_unit_gradient
from .softmax import LogitRows


class FormulaResult(NamedTuple):
    """A loss, and the statistics of all rows.

    loss         0-d fp32
    logps        log-prob of each target, fp32 [num_rows], 0 in rows that were not processed
    entropy      entropy of each row in nats, the same shape
    divergence   divergence from the reference, the same shape; None without a reference
    log_ratios   log-ratio of each row's sequence, the same shape; None at token level
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    divergence: Tensor | None
    log_ratios: Tensor | None = None


class TokenFormula:
    """A loss whose gradient with respect to a row's statistics depends on this row alone.

    kernels         compute sums, formula and gradient of rows (`Backend.fused_loss`): in one kernel
                    call where the backend can
    loss_formula    the formula with the inputs of all rows
    order           the rows that the pass processes
    has_reference   whether the loss contains the divergence from a reference
    """

    def __init__(
        self, kernels: Backend, loss_formula: TokenLossFormula, order: RowOrder, has_reference: bool
    ) -> None:
        """Bring the inputs of the formula, one number a row, into the order of the pass.

        kernels         compute sums, formula and gradient of rows
        loss_formula    the formula with the inputs of all rows, in the order of the batch
        order           the rows that the pass processes, in its order
        has_reference   whether the loss contains the divergence from a reference
        """
        self.kernels = kernels
        self.order = order
        self.loss_formula = (
            loss_formula if order.is_identity else loss_formula.select(order.row_ids)
        )
        # Loss, log-prob and entropy of each row, and with a reference the divergence.
        self.num_values = FusedLossValues.num_values(has_reference)
        self.chunks = ChunkValues(order)

    def process_chunk(self, chunk: slice, rows: LogitRows, grad_logits: Tensor | None) -> None:
        """Compute log-probs, entropies and losses of a chunk, and d loss / d logits.

        A chunk is the rows whose logits exist at one time.

        chunk         slice of the rows in the order of the pass
        rows          their logits and targets
        grad_logits   [1, num_chunk_rows, V]: where to write the gradient; None: none is needed
        """
        values = self.kernels.fused_loss(rows, self.loss_formula.select(chunk), grad_logits)
        self.chunks.add(chunk, values.table)

    def row_scale(self, block: slice) -> None:
        """Return None, a factor of 1 for the gradient: `process_chunk` wrote all of it.

        A sequence-level loss returns here what it knows only after all chunks of a block.
        """

    def result(self) -> FormulaResult:
        """Return the loss, and the statistics of all rows in the order of the batch.

        The statistics are log-probs, entropies and, with a reference, divergences. Rows that were
        not processed have 0 for each.
        """
        values = FusedLossValues(self.chunks.in_batch_order(self._zeros))
        return FormulaResult(
            loss=sum_losses(values.losses),
            logps=values.logps,
            entropy=values.entropy,
            divergence=values.divergence,
        )

    def _zeros(self) -> Tensor:
        """Return 0 for each value of each row, fp32 [num_values, num_rows].

        The loss, log-prob, entropy and divergence of rows that were not processed are 0.
        """
        device = self.order.row_ids.device
        return torch.zeros(self.num_values, self.order.num_rows, device=device)


class SequenceFormula:
    """A loss that depends on a sequence through the log-probs of its tokens.

    d loss / d logits[row] = c[row] * d log-prob[row] / d logits[row], where the scalar c[row]
    depends on the log-probs of the whole sequence. `process_chunk` writes the gradient for c = 1,
    and `row_scale` returns c when the log-probs of the sequence are known. This needs a loss
    without a gradient through entropy or divergence.

    kernels          compute the softmax sums
    compute_losses   (logps, entropy), fp32 [num_rows] each -> losses and gradients of all rows
    order            the rows that the pass processes
    """

    def __init__(
        self,
        kernels: Backend,
        compute_losses: Callable[[Tensor, Tensor], TokenLosses],
        order: RowOrder,
    ) -> None:
        """Begin with log-probs and entropies of 0, the values of rows that are not processed.

        kernels          compute the softmax sums
        compute_losses   (logps, entropy), fp32 [num_rows] each -> losses and gradients of all rows
        order            the rows that the pass processes, in its order
        """
        self.kernels = kernels
        self.compute_losses = compute_losses
        self.order = order
        device = order.row_ids.device
        self.logps, self.entropy = torch.zeros(2, order.num_rows, device=device)
        self._losses: TokenLosses | None = None

    def process_chunk(self, chunk: slice, rows: LogitRows, grad_logits: Tensor | None) -> None:
        """Record log-probs and entropies of a chunk, and write d log-prob / d logits of each row.

        The gradient of the loss is this times c[row], which `row_scale` returns later.

        chunk         slice of the rows in the order of the pass
        rows          their logits and targets
        grad_logits   [1, num_chunk_rows, V]: where to write the gradient; None: none is needed
        """
        sums = self.kernels.softmax_sums(rows, SUMS_OF_ENTROPY)
        logps, entropy = sums.logps_and_entropy()
        self.order.scatter_chunk(self.logps, chunk, logps)
        self.order.scatter_chunk(self.entropy, chunk, entropy)
        # Losses that were computed before belong to the former log-probs.
        self._losses = None
        if grad_logits is not None:
            write_unit_gradient(self.kernels, rows, sums, logps, grad_logits)

    def losses_so_far(self) -> TokenLosses:
        """Return the loss of each row and its derivatives, fp32 [num_rows] each.

        They are right for sequences whose rows have all been processed. The log-probs of rows that
        have not been are still 0. The result is kept until the next chunk changes log-probs.
        """
        if self._losses is None:
            self._losses = self.compute_losses(self.logps, self.entropy)
        return self._losses

    def row_scale(self, block: slice) -> Tensor:
        """Return c = d loss / d log-prob of each row of a block, fp32 [num_block_rows].

        The pass calls it when all rows of the sequences in the block have been processed. A row
        whose log-prob is NaN gets NaN, unless the loss does not depend on it (c = 0).

        block   slice of the rows in the order of the pass
        """
        # The log-probs of sequences in later blocks are still 0. They do not affect c of these
        # rows, because no sequence is in two blocks.
        grad_logps = self.losses_so_far().grad_logps
        is_nan = self.logps.isnan() & (grad_logps != 0)
        return self.order.gather_chunk(grad_logps.masked_fill(is_nan, torch.nan), block)

    def result(self) -> FormulaResult:
        """Return the loss, and log-probs, entropies and log-ratios of all rows.

        They are in the order of the batch. Log-probs and entropies of rows that were not processed
        are 0.
        """
        token_losses = self.losses_so_far()
        return FormulaResult(
            loss=sum_losses(token_losses.losses),
            logps=self.logps,
            entropy=self.entropy,
            divergence=None,
            log_ratios=token_losses.log_ratios,
        )


def sum_losses(losses: Tensor) -> Tensor:
    """Return the sum of losses [num_rows] as a 0-d fp32 tensor.

    The sum is computed in fp64 and rounded once. So it is the same however torch splits it among
    threads.
    """
    return losses.sum(dtype=torch.float64).float()
