"""Terms of a loss in the log-probs of ids that are listed for each row, beside its token: score centering, soft targets, top-k KL.

A function of these has the arguments

    logp       log-probs of the ids, fp32 [k]
    values     what is listed beside each id, fp32 [k]
    advantage  of the row of each id, fp32 [k]
    sums       a function: the sum of x [k] over the ids of a row, for each of its ids, [k]

and returns (term, slope), each [k]: a row's term is the sum over its ids, the slope d term of the row / d logp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..checks import LARGEST, require_number, require_one_of, with_hints

Tensor = torch.Tensor
ListedFunction = Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor]]


def logp_term(logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
    """sum_v c_v log p_v, with the values c."""
    return torch.where(values == 0, 0.0, values * logp), values


def prob_term(logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
    """sum_v r_v p_v, with the values r."""
    term = values * logp.exp()
    return term, term


@with_hints
@dataclass(frozen=True)
class ScoreCentering:
    """Take the drift of a sampler that is not the policy out of the gradient (arXiv 2609.20807), as `Objective(listed=)`.

        sets = TokenSets.from_padded(sampler_ids, values=sampler_logps)  # of the sampler's head, 128 ids say
        batch = TokenBatch(targets, advantages, old_logps=sampler, logp_terms=sets)
        objective = Objective(PolicyGradient(), listed=ScoreCentering("min", 2.0))

    The expectation of w grad log p over the sampler q is no longer 0. Added is A sum_v sg(q_v w_v) log p_v over the listed ids,
    whose values are log q_v; w is the weight that the policy term has, as a function f of p / q:

    weight   "none": 1. "min": min(p / q, cap), truncated importance sampling. "clip": p / q between 1 / cap and cap. "mask": p / q
             where it is between these, else 0.
    cap      at least 1.
    tail     True: the list is the head of q. The other ids count as if p / q were the same for all of them: the coefficient is
             q f(p / q) - a p, a = r f(1 / r), r = (1 - sum q) / (1 - sum p), both masses at least 1e-6. False: the list is
             all of q, as a kept set is.

    A batch's `weights` multiply both terms: those of a token (TIS) would undo the centering. They belong into the surrogate, as
    `rollout_is` has them. Raises ValueError naming the argument that is wrong."""

    weight: str = "none"
    cap: float = 2.0
    tail: bool = True

    def __post_init__(self) -> None:
        require_one_of("weight", self.weight, WEIGHTS)
        require_number("cap", self.cap, "it bounds p / q and is a finite number of at least 1.", 1, LARGEST)

    def __call__(self, logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
        p, q = logp.exp(), values.exp()
        coefficient = q * self._of_ratio((logp - values).clamp(max=60.0).exp())
        if self.tail:
            rest = (1.0 - sums(q)).clamp(min=1e-6) / (1.0 - sums(p)).clamp(min=1e-6)
            coefficient = coefficient - rest * self._of_ratio(1.0 / rest) * p
        return logp_term(logp, advantage * coefficient, advantage, sums)

    def _of_ratio(self, ratio: Tensor) -> Tensor:
        return WEIGHTS[self.weight](ratio, self.cap)


#: f(p / q, cap).
WEIGHTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "none": lambda ratio, cap: torch.ones_like(ratio),
    "min": lambda ratio, cap: ratio.clamp(max=cap),
    "clip": lambda ratio, cap: ratio.clamp(1.0 / cap, cap),
    "mask": lambda ratio, cap: torch.where((ratio >= 1.0 / cap) & (ratio <= cap), ratio, 0.0),
}


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
