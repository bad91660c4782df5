"""Terms of a loss in the log-probs of ids that are listed for each row, beside its token: soft targets, top-k KL, score
centering (see centering.py).

A function of these has the arguments

    logp       log-probs of the ids, fp32 [k]
    values     what is listed beside each id, fp32 [k]
    advantage  of the row of each id, fp32 [k]
    sums       a function: the sum of x [k] over the ids of a row, for each of its ids, [k]

and returns (term, slope), each [k]: a row's term is the sum over its ids, the slope d term of the row / d logp. Kernels run it as a
program (program.py), if it is arithmetic; elsewhere it runs in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

    offsets   int64 [n + 1], where the ids of each row begin."""

    parts: tuple[tuple[ListedFunction, Tensor], ...]
    offsets: Tensor

    @property
    def rows(self) -> Tensor:
        """int64 [k], the row of each id. Made anew at each call."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=self.parts[0][1].numel())

    def of(self, logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(the term of each row, fp32 [n], d term / d log-prob [k]) from log-probs [k] and advantages [n]. Sums are fp64, in the
        order of ids."""
        rows = self.rows

        def of_ids(x: Any) -> bool:
            return isinstance(x, Tensor) and x.shape == logps.shape

        term, slope = added(self.parts, logps, advantages[rows], lambda x: self._sums(x)[rows], of_ids)
        return self._sums(term), slope

    def taken(self, which: Tensor, offsets: Tensor) -> ListedTerms:
        """The terms of other rows, whose ids are `which` of these, [m]."""
        return ListedTerms(tuple((function, values[which]) for function, values in self.parts), offsets)

    def _sums(self, x: Tensor) -> Tensor:
        total = torch.segment_reduce(x.to(torch.float64), "sum", offsets=self.offsets, initial=0, unsafe=True)
        return total.to(torch.float32)


def added(
    parts: Iterable[tuple[ListedFunction, Any]], logp: Any, advantage: Any, sums: Callable[[Any], Any], of_ids: Callable[[Any], bool]
) -> tuple[Any, Any]:  # fmt: skip
    """(term, slope) of each id, added up over functions with their values, all of them tensors or symbols. `of_ids`: whether x is
    a number of each id. Raises ValueError where a function sums or returns anything else."""

    def sums_of_ids(x: Any) -> Any:
        if not of_ids(x):
            raise ValueError(
                f"sums is given a {type(x).__name__} that is no number of each id: pass what has the shape of logp."
            )
        return sums(x)

    term: Any = -0.0  # plus a number that number; no function adds it, so that the sum of the terms is one of its own
    slope: Any = 0.0
    for function, values in parts:
        made = function(logp, values, advantage, sums_of_ids)
        if not (isinstance(made, tuple) and len(made) == 2 and all(map(of_ids, made))):
            raise ValueError(f"listed={function!r} returned no pair of tensors of the shape of logp: return (term, slope).")
        term, slope = term + made[0], slope + made[1]
    return term, slope


def of_random_ids(functions: Sequence[ListedFunction], points: int = 64) -> tuple[list[Tensor], Callable[[], dict[str, Any]]]:
    """(log-probs, advantages and the values of each function, [points] each, of one row; what gives `ListedTerms.of` of these)."""
    g = torch.Generator().manual_seed(0)
    logps, advantages = -5.0 * torch.rand(points, generator=g), torch.full((points,), 0.7)
    parts = tuple((function, torch.randn(points, generator=g)) for function in functions)
    row = ListedTerms(parts, torch.tensor([0, points]))
    return [logps, advantages, *(x for _, x in parts)], lambda: dict(
        zip(("term", "slope"), row.of(logps, advantages[:1]), strict=True)
    )
