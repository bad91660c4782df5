"""Which columns of a row the sparse gradient consists of, and its value there.

Columns with p_j >= step, and that of the target, are always taken. Of the others, in the order of ids, one is taken wherever the
running sum of their probabilities, rounded to multiples of a unit of step / 2^31, crosses a multiple of `step`. Sums of integers
do not depend on the order in which blocks, threads and ranks add. A column of m units, m < 2^31, is taken for exactly m of the
2^31 offsets at which a row may start, so where it is taken it represents a probability of `step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import Checked, as_number, is_capturing, require, require_number, require_whole
from .partials import Partials, RowTransform, Slopes

#: The finest grid. A finer one draws so many columns a row that dense products are faster.
FINEST = 1 / 4096


@dataclass(frozen=True)
class Sparse(Checked):
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
    seed: int | Tensor = 0
    first_row: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, torch.fx.Proxy):  # torch 2.9 makes one of placeholders while it traces
            return
        require_number("step", self.step, "the grid of probabilities is a number in [1/4096, 1].", FINEST, 1)
        if isinstance(self.seed, Tensor):
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
        if isinstance(self.seed, Tensor):
            same = self.seed.device == device
            require(same, "seed", self.seed, f"it is on {self.seed.device}, the rows are on {device}: move it there.")
        elif not torch.compiler.is_compiling() and is_capturing(device):
            raise RuntimeError(
                f"seed={self.seed} of Sparse is a number, and a graph is being captured: every replay would draw the same columns. Pass an "
                "int64 tensor of shape [] on the rows' device, and write the next seed into it before each replay."
            )


#: A step is 2^BITS units of mass.
BITS = 31


def per_unit(step: float) -> float:
    """The factor that converts a probability into units. Kernels take it as fp32."""
    return 2.0**BITS / step


def capacity(step: float) -> int:
    """The most columns that a row may have: 1 / step from the sum of their probabilities, one more by rounding, the last crossing,
    and the target."""
    return math.floor(1 / step) + 3


class Drawn(NamedTuple):
    """Columns of n rows, in the order of ids."""

    ids: Tensor  # int32 [n, capacity]; -1: not in use
    logits: Tensor  # fp32 [n, capacity], before the transform

    @classmethod
    def nothing(cls, n: int, step: float, device: torch.device) -> Drawn:
        shape = (n, capacity(step))
        return cls(torch.full(shape, -1, dtype=torch.int32, device=device), torch.zeros(shape, device=device))


def starts(seed: int | Tensor, rows: Tensor) -> Tensor:
    """int64 [n] in [0, 2^BITS): where the running sum of each row starts, a function of the seed and the row's number, int64 [n],
    alone. The generator is SplitMix64 (Steele, Lea and Flood 2014), started from a hash of the seed."""
    step = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number
    if not isinstance(seed, Tensor):  # a copy of it to the device would wait for the device
        seed = torch.tensor(seed, dtype=torch.int64, device="cpu")
    return _shifted(_mixed((rows + 1) * step + _mixed(seed + step)), 64 - BITS)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by of x as an unsigned number."""
    return (x >> by) & ((1 << (64 - by)) - 1)


class Draws:
    """Collects the columns of the rows of a batch of n, chunk by chunk. `padded`: every row has the maximum number of slots; always
    so on a GPU, where counting them would synchronise the host."""

    def __init__(self, step: float, n: int, device: torch.device, padded: bool) -> None:
        self.n, self.device = n, device
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, ids, logits of slots
        self.whole = Drawn.nothing(n, step, device) if padded or device.type != "cpu" else None

    def take(self, at: Tensor, drawn: Drawn) -> None:
        """Keep what was drawn of the rows `at` of the batch."""
        if self.whole is None:
            row, place = (drawn.ids >= 0).nonzero(as_tuple=True)
            self.parts.append((at[row], drawn.ids[row, place], drawn.logits[row, place]))
        else:
            self.whole.ids[at], self.whole.logits[at] = drawn

    def tensors(self) -> tuple[Tensor, ...]:
        """(ids, offsets, rows) of `Ragged` and fp32 logits of them, [m]."""
        places = torch.arange(self.n + 1, device=self.device)
        if self.whole is None:
            empty = torch.empty(0, dtype=torch.int64)
            rows, ids, logits = map(torch.cat, zip((empty, empty, torch.empty(0)), *self.parts, strict=True))
            rows, order = rows.sort(stable=True)
            ids, logits = ids[order], logits[order]
        else:
            ids, logits = (x.flatten() for x in self.whole)
            rows = places[:-1].repeat_interleave(self.whole.ids.shape[1])
        return ids.long(), torch.searchsorted(rows, places), rows, logits


def gradient_at(
    ids: Tensor, rows: Tensor, logits: Tensor, step: float, targets: Tensor, partials: Partials, slopes: Slopes, transform: RowTransform
) -> Tensor:  # fmt: skip
    """d loss / d logits at the columns drawn, fp32 [m], so that its mean over offsets is the gradient of whole rows. `targets` are
    numbered like the ids of the columns, `rows` those of each.

    Where p of the target is close to 1, its 1 - p is that of expm1, as in the row kernels."""
    logps = (transform.of(logits, rows) - partials.max[rows]) - torch.log(partials.sum)[rows]
    p, is_target = logps.exp(), ids == targets[rows]
    weight = torch.where(is_target, p, p.clamp(min=step))
    gradient = slopes.target[rows] * torch.where(is_target, -torch.expm1(logps), -weight)
    for term in slopes.at_columns(rows, weight, p, logps):
        gradient = gradient + term
    counts = (ids >= 0) & slopes.nonzero[rows]
    return torch.where(counts, gradient * transform.slope(logits, rows), 0.0)
