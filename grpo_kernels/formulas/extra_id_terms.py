"""The loss of a token that depends on the log-probs of extra ids of its row.

A batch lists ids for each token, with a value for each id (`TokenBatch(logp_terms=, prob_terms=)`).
A function computes the term of each id, and the terms of a token add up to its auxiliary loss.
Such a function (`ExtraIdFunction`) is called with

    logp           float64 [num_ids], log-prob of each id under the policy, token after token
    values         fp32 [num_ids], the value of each id
    advantage      fp32 [num_ids], the advantage of the token that lists the id
    sum_over_ids   a function that sums numbers of ids, [num_ids], over the ids of each token, and
                   returns the sum at each id

and returns

    term   [num_ids], what the id adds to the auxiliary loss of its token
    grad   [num_ids], d auxiliary loss / d logp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ops import without_branches

ExtraIdFunction = Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, ...]]

#: The probability of the ids that a token does not list counts as at least this.
LEAST_OUTSIDE = 1e-6


def logp_term(
    logp: Tensor, values: Tensor, advantage: Tensor, sum_over_ids: Any
) -> tuple[Tensor, Tensor]:
    """Return c * logp and its derivative, for the values c. It is 0 if c is 0, even for p = 0."""
    return torch.where(values == 0, 0.0, values * logp), values


def prob_term(
    logp: Tensor, values: Tensor, advantage: Tensor, sum_over_ids: Any
) -> tuple[Tensor, Tensor]:
    """Return r * p and its derivative with respect to log p, for the values r."""
    term = values * logp.exp()
    return term, term


def probability_outside(logp: Any, sum_over_ids: Callable[[Any], Any]) -> Any:
    """Return the probability of all ids that a token does not list, at least LEAST_OUTSIDE."""
    return (1.0 - sum_over_ids(logp.exp())).clamp(min=LEAST_OUTSIDE)


class AuxiliaryLosses(NamedTuple):
    """The auxiliary loss of each token, and its derivatives.

    losses       float64 [num_tokens]
    grad_logps   float64 [num_ids], d loss / d log-prob of each id
    """

    losses: Tensor
    grad_logps: Tensor


class ExtraIdTerms(NamedTuple):
    """The functions that an objective applies to the extra ids of a batch.

    parts     functions, each with its values [num_ids]
    offsets   int64 [num_tokens + 1], where the ids of each token begin
    """

    parts: tuple[tuple[ExtraIdFunction, Tensor], ...]
    offsets: Tensor

    def token_of_id(self) -> Tensor:
        """Return int64 [num_ids], the token that lists each id."""
        num_ids = self.parts[0][1].numel()
        return torch.repeat_interleave(self.offsets.diff(), output_size=num_ids)

    def compute(self, logps: Tensor, advantages: Tensor) -> AuxiliaryLosses:
        """Return the auxiliary losses.

        logps        float64 [num_ids]
        advantages   fp32 [num_tokens]

        Raises ValueError if a function returns or sums anything but one number for each id.
        """
        token_of_id = self.token_of_id()

        def sum_over_ids(x: Any) -> Tensor:
            """Return the sum of x [num_ids] over the ids of the same token, at each id."""
            if not is_tensor_like(x, logps):
                raise ValueError(
                    f"sums is given a {type(x).__name__} that is no number of each id: pass what"
                    " has the shape of logp."
                )
            return self.sum_of_tokens(x)[token_of_id]

        terms = torch.zeros_like(logps)
        grad_logps = torch.zeros_like(logps)
        for function, values in self.parts:
            returned = without_branches(
                function, logps, values, advantages[token_of_id], sum_over_ids
            )
            check_terms(function, returned, logps)
            terms = terms + returned[0]
            grad_logps = grad_logps + returned[1]
        return AuxiliaryLosses(self.sum_of_tokens(terms), grad_logps)

    def sum_of_tokens(self, x: Tensor) -> Tensor:
        """Return the sum of x [num_ids] over the ids of each token, [num_tokens].

        The sum is fp64, in the order of the ids, and returned in the dtype of x.
        """
        total = torch.segment_reduce(
            x.double(), "sum", offsets=self.offsets, initial=0, unsafe=True
        )
        return total.to(x.dtype)


def is_tensor_like(x: Any, like: Tensor) -> bool:
    """Return whether x is a tensor of the shape of `like`."""
    return isinstance(x, Tensor) and x.shape == like.shape


def check_terms(function: ExtraIdFunction, returned: Any, logps: Tensor) -> None:
    """Raise ValueError unless a function returned two tensors of the shape of logps."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not all(is_tensor_like(x, logps) for x in returned):
        raise ValueError(
            f"listed={function!r} returned no pair of tensors of the shape of logp: return"
            " (term, slope)."
        )
