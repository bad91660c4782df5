"""Sparse: gradients of a head from the columns that matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import as_number, require, require_number, require_whole, with_hints
from .row_counts import is_capturing

#: The finest grid. A finer one draws so many columns a row that dense products are faster.
FINEST = 1 / 4096


@with_hints
@dataclass(frozen=True)
class Sparse:
    """`Options(sparse=Sparse(...))`: the gradient of a head from few columns of each row, unbiased.

        out = linear_grpo_loss(hidden, weight, batch, objective, options=Options(sparse=Sparse(step=1 / 256, seed=number_of_step)))

    Once the statistics of a row are known, so are its probabilities p, and the gradient of its logits is p_j times a factor. Every
    column with p_j >= step takes part exactly, and so does the target's. Of the others columns are drawn by systematic sampling:
    the running sum of their p along the row, from an offset that is random, one a row, crosses a grid of `step`, and each column
    in which it does is drawn. That happens with probability p_j / step, and the column counts with p_j = step. So a row has at most
    1 / step + 3 columns, whatever the size of the vocabulary, the mean over seeds is the dense gradient, and a forward and backward
    pass is one dense product and a few sparse ones in place of three or four. An entropy bonus and the slopes of other statistics
    have their own factor of the same p_j, and are unbiased too; log p_j is one that is not bounded, so that their variance is that
    of p (log p)^2.

    step      the grid, a number in [1/4096, 1]. Smaller: more columns, less noise.
    seed      a whole number in [0, 2^63). The same seed, rows and step draw the same columns, whatever the threads, chunks and
              ranks that share the vocabulary: a forward that is computed again for checkpointing does. Give each step of a
              training another seed, and each rank that has rows of its own. In a CUDA graph it is a tensor, int64 [] on the rows'
              device, which every replay reads: write the next seed into it before each.
    first_row  the number that rows are counted from: for a batch in pieces, the rows of the pieces before.

    Log-probs, entropy and the value of a loss are exact. The gradient of the hidden states and of the weight has the columns drawn.
    From hidden states only: logits that exist have no product to save. Refused are exact divergences, whose gradient p_j does not
    bound, and `at=`. Rows with a kept set go their own way, without sampling.

    Dense products are never taken instead. They are faster where flat rows have about V / 30 columns or more (on an AMD EPYC:
    V / 20 in fp32, V / 35 in bf16), which a step of 1/4096 reaches at a vocabulary of 128 thousand and one of 1/1024 at 32
    thousand: take a larger step there. The number of columns varies with what is drawn, so that a choice by it would be
    biased; and once it is known the logits are gone, and would have to be computed again.

    Source: systematic sampling with probabilities in proportion to size (Madow 1949), the weights of Horvitz and Thompson (1952).
    Cut Cross-Entropy (arXiv 2411.09009) leaves out small columns by a threshold, which is biased.
    Raises ValueError naming the field that is wrong."""

    step: float = 1 / 256
    seed: int | torch.Tensor = 0
    first_row: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, torch.fx.Proxy):  # torch 2.9 makes one of placeholders while it traces
            return
        require_number("step", self.step, "the grid of probabilities is a number in [1/4096, 1].", FINEST, 1)
        if isinstance(self.seed, torch.Tensor):
            require(
                self.seed.dtype == torch.int64 and self.seed.dim() == 0,
                "seed",
                self.seed,
                "as a tensor it is int64 of shape [].",
            )
        else:
            require_whole("seed", self.seed, "it is a whole number in [0, 2^63).", 0)
            require_number("seed", self.seed, "it is a whole number in [0, 2^63).", 0, 2**63 - 1)
        require_whole("first_row", self.first_row, "it counts the rows before these, 0 or more.", 0)
        for name in ("step", "seed", "first_row"):
            object.__setattr__(self, name, as_number(getattr(self, name)))

    def check(self, device: torch.device) -> None:
        """Refuse a seed that rows on this device cannot be drawn with."""
        if isinstance(self.seed, torch.Tensor):
            same = self.seed.device == device
            require(same, "seed", self.seed, f"it is on {self.seed.device}, the rows are on {device}: move it there.")
        elif not torch.compiler.is_compiling() and is_capturing(device):
            raise RuntimeError(
                f"seed={self.seed} of Sparse is a number, and a graph is being captured: every replay would draw the same columns. Pass an "
                "int64 tensor of shape [] on the rows' device, and write the next seed into it before each replay."
            )
