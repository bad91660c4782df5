"""The token ids that a sampler keeps of given logits: top-k, top-p and min-p.

Each filter maps scaled logits (logits / temperature), [num_rows, V], to bool [num_rows, V], which
is True for the ids that it keeps. A logit of -inf is an id that an earlier filter removed. Filters
depend only on differences of logits, so that each one acts on the softmax over the ids that are
left, without a renormalisation in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .checks import require, require_number, require_whole

#: How many of the largest logits top-p sorts first. It sorts more if their mass is too small.
TOP_P_FIRST_WIDTH = 64
#: By how much top-p widens what it sorts.
TOP_P_GROWTH = 8


class Filter(Protocol):
    """A rule of a sampler, see the top of this file."""

    def __call__(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TopK:
    """Keep the k largest logits, and all that equal the smallest of these."""

    k: int

    def __call__(self, logits: Tensor) -> Tensor:
        smallest_kept = logits.topk(self.k).values[:, -1:]
        return logits >= smallest_kept


@dataclass(frozen=True)
class MinP:
    """Keep probabilities of at least min_p times the largest one."""

    min_p: float

    def __call__(self, logits: Tensor) -> Tensor:
        return logits >= logits.amax(-1, keepdim=True) + math.log(self.min_p)


@dataclass(frozen=True)
class TopP:
    """Keep the shortest run of largest probabilities whose sum is at least top_p.

    An id is kept if the sum of all larger probabilities is below top_p. Of equal probabilities, the
    lower ids are kept first.
    """

    top_p: float

    def __call__(self, logits: Tensor) -> Tensor:
        vocab_size = logits.shape[-1]
        max_logit = logits.amax(-1, keepdim=True)
        # Sums are fp64: fp32 sums over a large vocabulary would move ids at the edge.
        sum_exp = (logits - max_logit).exp_().sum(-1, keepdim=True, dtype=torch.float64)
        needed_mass = self.top_p * sum_exp

        # Sort only as many of the largest logits as any row needs.
        width = min(TOP_P_FIRST_WIDTH, vocab_size)
        while True:
            largest = logits.topk(width).values
            mass = (largest - max_logit).exp().double()
            mass_of_larger = mass.cumsum(-1) - mass
            num_kept = (mass_of_larger < needed_mass).sum(-1, keepdim=True)
            if width == vocab_size or bool((num_kept < width).all()):
                break
            width = min(TOP_P_GROWTH * width, vocab_size)

        smallest_kept = largest.gather(-1, num_kept - 1)
        is_larger = logits > smallest_kept
        is_equal = logits == smallest_kept
        num_equal_kept = num_kept - is_larger.sum(-1, keepdim=True)
        if bool((is_equal.sum(-1, keepdim=True) > num_equal_kept).any()):
            is_equal &= is_equal.cumsum(-1) <= num_equal_kept
        return is_larger | is_equal


@dataclass(frozen=True)
class SamplerFilters:
    """The filters of a sampler in its order, without those that keep all ids.

    is_sequential   True: each filter sees the ids that the filters before it kept. False: all
                    filters see the whole vocabulary.
    """

    filters: tuple[Filter, ...]
    is_sequential: bool

    @classmethod
    def from_options(
        cls,
        vocab_size: int,
        *,
        top_k: int | None,
        top_p: float | None,
        min_p: float | None,
        order: str,
    ) -> SamplerFilters:
        """Make the filters of a sampler. The options are those of `TokenSets.from_logits`.

        Raises ValueError for options that are out of range.
        """
        top_k = 0 if top_k is None else top_k
        top_p = 1.0 if top_p is None else top_p
        min_p = min_p or 0.0
        require_whole("top_k", top_k, "it is a number of ids; None, 0 or -1 keeps all.", low=-1)
        remedy = (
            "it is a probability above 0, at most 1; None keeps all. A greedy sampler is top_k=1."
        )
        require_number("top_p", top_p, remedy, low=1e-30, high=1)
        remedy = "it is a share of the largest probability in [0, 1]; None keeps all."
        require_number("min_p", min_p, remedy, low=0, high=1)
        remedy = 'samplers truncate differently: pass "vllm" or "sglang".'
        require(order in ("vllm", "sglang"), "order", order, remedy)

        by_top_k: list[Filter] = [TopK(int(top_k))] if 0 < top_k < vocab_size else []
        by_top_p: list[Filter] = [TopP(float(top_p))] if top_p < 1 else []
        by_min_p: list[Filter] = [MinP(float(min_p))] if min_p > 0 else []
        if order == "vllm":
            return cls((*by_min_p, *by_top_k, *by_top_p), is_sequential=True)
        # SGLang has a kernel for top-k and top-p together, which it uses if there is no min-p.
        return cls((*by_top_k, *by_top_p, *by_min_p), is_sequential=bool(by_min_p))

    def keep(self, logits: Tensor, targets: Tensor | None, first_row: int) -> KeptIds:
        """Return the ids that the filters keep. There must be a filter.

        logits      float32 or float64 [num_rows, V], divided by the temperature
        targets     integers [num_rows] that are kept too, None for none. Those outside of [0, V)
                    are ignored.
        first_row   the number of the first row, for messages

        Raises ValueError if the largest logit of a row is not a finite number.
        """
        first_filter = self.filters[0]
        if len(self.filters) == 1 and isinstance(first_filter, TopK) and targets is None:
            kept = keep_top_k(logits, first_filter.k, first_row)
            if kept is not None:
                return kept

        refuse_infinite_maxima(logits.amax(-1), first_row)
        is_kept = logits > -math.inf
        for index, keeps in enumerate(self.filters):
            if self.is_sequential and index > 0:
                is_kept &= keeps(logits.masked_fill(~is_kept, -math.inf))
            else:
                is_kept &= keeps(logits)
        if targets is not None:
            vocab_size = logits.shape[-1]
            targets = targets[:, None]
            columns = targets.long().clamp(0, vocab_size - 1)
            is_in_vocabulary = columns == targets
            is_kept.scatter_(-1, columns, is_kept.gather(-1, columns) | is_in_vocabulary)
        return KeptIds(ids=is_kept.nonzero()[:, 1].to(torch.int32), counts=is_kept.sum(-1))


class KeptIds(NamedTuple):
    """The ids that filters keep.

    ids      int32 [num_ids]: the ids of row 0, then of row 1, ..., ascending in each row
    counts   int64 [num_rows]: the number of ids of each row
    """

    ids: Tensor
    counts: Tensor


def keep_top_k(logits: Tensor, k: int, first_row: int) -> KeptIds | None:
    """Return the k largest ids of each row, which takes one pass over the logits.

    Return None if a row does not have exactly k, because ids k and k + 1 by size are equal. That
    includes rows with fewer than k finite logits.
    """
    values, ids = logits.topk(k + 1)
    refuse_infinite_maxima(values[:, 0], first_row)  # topk puts NaN first
    if bool((values[:, k - 1] == values[:, k]).any()):
        return None
    ids = ids[:, :k].sort(-1).values
    counts = torch.full((len(logits),), k, device=logits.device)
    return KeptIds(ids=ids.to(torch.int32).flatten(), counts=counts)


def refuse_infinite_maxima(maxima: Tensor, first_row: int) -> None:
    """Raise ValueError if the largest logit of a row, [num_rows], is NaN or infinite."""
    bad_rows = (~maxima.isfinite()).nonzero()[:, 0]
    if len(bad_rows) > 0:
        row = first_row + int(bad_rows[0])
        raise ValueError(
            f"logits are NaN, +inf or all -inf in row {row}: there is nothing to sample from."
        )
