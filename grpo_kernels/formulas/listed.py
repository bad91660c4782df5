"""Terms of a loss in the log-probs of ids that are listed for each row, beside its token: soft targets, top-k KL, score
centering (see centering.py).

A function of these has the arguments

    logp       log-probs of the ids, fp32 [k]
    values     what is listed beside each id, fp32 [k]
    advantage  of the row of each id, fp32 [k]
    sums       a function: the sum of x [k] over the ids of a row, for each of its ids, [k]

and returns (term, slope), each [k]: a row's term is the sum over its ids, the slope d term of the row / d logp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
ListedFunction = Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor]]


def logp_term(logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
    """sum_v c_v log p_v, with the values c."""
    return torch.where(values == 0, 0.0, values * logp), values


def prob_term(logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
    """sum_v r_v p_v, with the values r."""
    term = values * logp.exp()
    return term, term


class ListedTerms(NamedTuple):
    """The terms of all rows. `parts`: functions as above with their values; ids lie in the order of rows.

    rows      int64 [k], the row of each id.
    offsets   int64 [n + 1], where the ids of each row begin."""

    parts: tuple[tuple[ListedFunction, Tensor], ...]
    rows: Tensor
    offsets: Tensor

    def of(self, logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(the term of each row, fp32 [n], d term / d log-prob [k]) from log-probs [k] and advantages [n]. Sums are fp64, in the
        order of ids."""
        terms, slopes = torch.zeros_like(logps), torch.zeros_like(logps)
        for function, values in self.parts:
            made = function(logps, values, advantages[self.rows], lambda x: self._sums(x)[self.rows])
            if not isinstance(made, tuple) or [getattr(x, "shape", None) for x in made] != 2 * [logps.shape]:
                raise ValueError(f"listed={function!r} returned no pair of tensors of the shape of logp: return (term, slope).")
            term, slope = made
            terms, slopes = terms + term, slopes + slope
        return self._sums(terms), slopes

    def taken(self, which: Tensor, rows: Tensor, offsets: Tensor) -> ListedTerms:
        """The terms of other rows, whose ids are `which` of these, [m]."""
        return ListedTerms(tuple((function, values[which]) for function, values in self.parts), rows, offsets)

    def _sums(self, x: Tensor) -> Tensor:
        total = torch.segment_reduce(x.to(torch.float64), "sum", offsets=self.offsets, initial=0, unsafe=True)
        return total.to(torch.float32)
