"""Terms of the loss that depend on the log-probs of further ids, not only of the sampled token.

A batch lists ids for each token, with a value for each id (`TokenBatch(logp_terms=, prob_terms=)`).
An `ExtraIdFunction` computes the term of each id. The terms of the ids that a token lists add up to
the auxiliary loss of this token, which is added to its surrogate.

An `ExtraIdFunction` is a function (logp, values, advantage, sum_over_ids) -> (term, slope):

    logp           float64 [num_ids], log-prob of each id under the policy, token after token
    values         fp32 [num_ids], the value of each id
    advantage      fp32 [num_ids], the advantage of the token that lists the id
    sum_over_ids   function x -> y, [num_ids] each: y is the sum of x over all ids that the same
                   token lists
    term           float64 [num_ids], what the id adds to the auxiliary loss of its token
    slope          float64 [num_ids], d auxiliary loss / d logp of the id
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ops import without_branches

ExtraIdFunction = Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, ...]]

#: The probability of all ids that a token does not list counts as at least this.
LEAST_OUTSIDE = 1e-6


def logp_term(
    logp: Tensor, values: Tensor, advantage: Tensor, sum_over_ids: Any
) -> tuple[Tensor, Tensor]:
    """Return the term c * logp of each id with the value c, and its derivative c.

    An `ExtraIdFunction`, the default for `TokenBatch.logp_terms`. The term is 0 if c is 0, even if
    logp is -inf.
    """
    return torch.where(values == 0, 0.0, values * logp), values


def prob_term(
    logp: Tensor, values: Tensor, advantage: Tensor, sum_over_ids: Any
) -> tuple[Tensor, Tensor]:
    """Return the term r * p of each id with the value r, and its derivative r * p.

    p = exp(logp), so d (r p) / d logp = r p. An `ExtraIdFunction`, for `TokenBatch.prob_terms`.
    """
    term = values * logp.exp()
    return term, term


def probability_outside(logp: Any, sum_over_ids: Callable[[Any], Any]) -> Any:
    """Return the probability of all ids that a token does not list, at least 1e-6 (LEAST_OUTSIDE).

    logp           float [num_ids], log-prob of each id that is listed
    sum_over_ids   sums over the ids of the same token, see above

    Return float [num_ids], the same number for all ids of a token.
    """
    return (1.0 - sum_over_ids(logp.exp())).clamp(min=LEAST_OUTSIDE)


class AuxiliaryLosses(NamedTuple):
    """The auxiliary loss of each token, which is the sum of the terms of its ids.

    losses       float64 [num_tokens], the auxiliary losses
    grad_logps   float64 [num_ids], d auxiliary loss / d log-prob of each id
    """

    losses: Tensor
    grad_logps: Tensor


class ExtraIdTerms(NamedTuple):
    """The functions that an objective applies to the ids that the tokens of a batch list.

    parts     pairs (function, values): an `ExtraIdFunction` and the value of each id for it, fp32
              [num_ids]
    offsets   int64 [num_tokens + 1]: the ids of token t are offsets[t] : offsets[t + 1]
    """

    parts: tuple[tuple[ExtraIdFunction, Tensor], ...]
    offsets: Tensor

    def token_of_id(self) -> Tensor:
        """Return the index of the token that lists each id, int64 [num_ids]."""
        _, values = self.parts[0]
        num_ids = values.numel()
        return torch.repeat_interleave(self.offsets.diff(), output_size=num_ids)

    def compute(self, logps: Tensor, advantages: Tensor) -> AuxiliaryLosses:
        """Call the functions, and return the auxiliary loss of each token with its gradient.

        logps        float64 [num_ids], log-prob of each id under the policy
        advantages   fp32 [num_tokens]

        Raises ValueError if a function returns anything but two tensors [num_ids], or passes
        anything but a tensor [num_ids] to `sum_over_ids`.
        """
        token_of_id = self.token_of_id()

        def sum_over_ids(x: Any) -> Tensor:
            """Return the sum of x over the ids of the same token, [num_ids] like x."""
            if not has_shape_of(x, logps):
                raise ValueError(
                    f"sum_over_ids is given a {type(x).__name__} that has not one number for each id: pass"
                    " a tensor of the shape of logp."
                )
            return self.sum_of_tokens(x)[token_of_id]

        terms = torch.zeros_like(logps)
        grad_logps = torch.zeros_like(logps)
        for function, values in self.parts:
            returned = without_branches(
                function, logps, values, advantages[token_of_id], sum_over_ids
            )
            check_terms(function, returned, logps)
            term, slope = returned
            terms = terms + term
            grad_logps = grad_logps + slope
        return AuxiliaryLosses(self.sum_of_tokens(terms), grad_logps)

    def sum_of_tokens(self, x: Tensor) -> Tensor:
        """Return the sum of x [num_ids] over the ids of each token, [num_tokens] in the dtype of x.

        The sum is computed in fp64, in the order of the ids.
        """
        total = torch.segment_reduce(
            x.double(), "sum", offsets=self.offsets, initial=0, unsafe=True
        )
        return total.to(x.dtype)


def has_shape_of(x: Any, other: Tensor) -> bool:
    """Return whether x is a tensor of the same shape as `other`."""
    return isinstance(x, Tensor) and x.shape == other.shape


def check_terms(function: ExtraIdFunction, returned: Any, logps: Tensor) -> None:
    """Raise ValueError unless a function returned (term, slope), two tensors shaped like logps.

    returned   what `function` returned
    logps      float64 [num_ids]
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not all(has_shape_of(x, logps) for x in returned):
        raise ValueError(
            f"listed={function!r} returned no pair of tensors of the shape of logp: return"
            " (term, slope)."
        )
