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
    """A rule of a sampler: a function from logits [num_rows, V] to bool [num_rows, V].

    The result is True for the ids that are kept. The logits are divided by the temperature, and
    -inf for ids that an earlier filter removed.
    """

    def __call__(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TopK:
    """Keep the k largest logits, and all that equal the smallest of these."""

    k: int

    def __call__(self, logits: Tensor) -> Tensor:
        """Return which ids are kept, bool [num_rows, V] like the logits."""
        smallest_kept = logits.topk(self.k).values[:, -1:]
        return logits >= smallest_kept


@dataclass(frozen=True)
class MinP:
    """Keep probabilities of at least min_p times the largest one."""

    min_p: float

    def __call__(self, logits: Tensor) -> Tensor:
        """Return which ids are kept, bool [num_rows, V] like the logits.

        p >= min_p * max p is the same as logit >= max logit + log(min_p).
        """
        return logits >= logits.amax(-1, keepdim=True) + math.log(self.min_p)


@dataclass(frozen=True)
class TopP:
    """Keep the likeliest ids: as few as have together at least the probability top_p.

    An id is kept if the sum of all larger probabilities is below top_p. Of equal probabilities,
    those with lower ids count as larger.
    """

    top_p: float

    def __call__(self, logits: Tensor) -> Tensor:
        """Return which ids are kept, bool [num_rows, V] like the logits."""
        vocab_size = logits.shape[-1]
        max_logit = logits.amax(-1, keepdim=True)
        # Masses are probabilities times sum_exp. Sums are fp64: the rounding of fp32 sums over a
        # large vocabulary would change which ids are kept.
        sum_exp = (logits - max_logit).exp_().sum(-1, keepdim=True, dtype=torch.float64)
        needed_mass = self.top_p * sum_exp

        # Sort only the largest logits, `width` of each row. If a row may keep all of them, sort
        # more.
        width = min(TOP_P_FIRST_WIDTH, vocab_size)
        while True:
            largest = logits.topk(width).values
            mass = (largest - max_logit).exp().double()
            mass_of_larger = mass.cumsum(-1) - mass
            num_kept = (mass_of_larger < needed_mass).sum(-1, keepdim=True)
            if width == vocab_size or bool((num_kept < width).all()):
                break
            width = min(TOP_P_GROWTH * width, vocab_size)

        # Keep ids by comparison with the smallest logit that is kept. If more ids have this logit
        # than are kept, keep the lowest of them.
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

    filters         maps of logits [num_rows, V] to the ids that are kept, see `Filter`
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
        """Make the filters of a sampler from its options, see `TokenSets.from_logits`.

        An option that keeps all ids makes no filter. Raises ValueError for an option that is out of
        range.

        vocab_size   number of ids V
        order        "vllm" or "sglang", which apply the filters in different orders
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
        """Return the ids that the filters keep of each row. There must be at least one filter.

        logits      float32 or float64 [num_rows, V], divided by the temperature
        targets     integers [num_rows]: an id of each row that is kept too. Ids outside of [0, V)
                    are ignored. None: no id.
        first_row   the number of the first row, for messages

        Raises ValueError if the largest logit of a row is not a finite number.
        """
        # A single top-k needs one pass over the logits, and no bool tensor of their shape.
        first_filter = self.filters[0]
        if len(self.filters) == 1 and isinstance(first_filter, TopK) and targets is None:
            kept = keep_top_k(logits, first_filter.k, first_row)
            if kept is not None:
                return kept

        refuse_infinite_maxima(logits.amax(-1), first_row)
        is_kept = logits > -math.inf
        for index, sampler_filter in enumerate(self.filters):
            if self.is_sequential and index > 0:
                remaining_logits = logits.masked_fill(~is_kept, -math.inf)
                is_kept &= sampler_filter(remaining_logits)
            else:
                is_kept &= sampler_filter(logits)
        if targets is not None:
            add_targets(is_kept, targets)
        return KeptIds(ids=is_kept.nonzero()[:, 1].to(torch.int32), counts=is_kept.sum(-1))


class KeptIds(NamedTuple):
    """The ids that filters keep.

    ids      int32 [num_ids]: the ids of row 0, then of row 1, ..., ascending in each row
    counts   int64 [num_rows]: the number of ids of each row
    """

    ids: Tensor
    counts: Tensor


def add_targets(is_kept: Tensor, targets: Tensor) -> None:
    """Set is_kept[row, targets[row]] to True for each row, in place.

    is_kept   bool [num_rows, V]
    targets   integers [num_rows]. Ids outside of [0, V) are ignored.
    """
    vocab_size = is_kept.shape[-1]
    targets = targets[:, None]
    # An id outside of the vocabulary gets the nearest column, which keeps its value.
    columns = targets.long().clamp(0, vocab_size - 1)
    is_in_vocabulary = columns == targets
    is_kept.scatter_(-1, columns, is_kept.gather(-1, columns) | is_in_vocabulary)


def keep_top_k(logits: Tensor, k: int, first_row: int) -> KeptIds | None:
    """Return the ids of the k largest logits of each row, in one pass over the logits.

    Return None if top-k keeps more than k ids of a row, because the k-th and the next logit by size
    are equal. This is so too for a row with fewer than k finite logits: both are -inf.

    logits      float [num_rows, V] with V > k
    first_row   the number of the first row, for messages
    """
    values, ids = logits.topk(k + 1)
    refuse_infinite_maxima(values[:, 0], first_row)  # topk puts NaN first
    if bool((values[:, k - 1] == values[:, k]).any()):
        return None
    ids = ids[:, :k].sort(-1).values
    counts = torch.full((len(logits),), k, device=logits.device)
    return KeptIds(ids=ids.to(torch.int32).flatten(), counts=counts)


def refuse_infinite_maxima(maxima: Tensor, first_row: int) -> None:
    """Raise ValueError if the largest logit of a row is NaN or infinite.

    maxima      float [num_rows], the largest logit of each row
    first_row   the number of the first row, for the message
    """
    bad_rows = (~maxima.isfinite()).nonzero()[:, 0]
    if len(bad_rows) > 0:
        row = first_row + int(bad_rows[0])
        raise ValueError(
            f"logits are NaN, +inf or all -inf in row {row}: there is nothing to sample from."
        )
