"""Terms of the loss that depend on the log-probs of extra ids, not only of the sampled token.

Extra ids are ids besides the sampled token whose log-probs the loss uses. A batch lists them for
each token, with a value for each id (`TokenBatch(logp_terms=, prob_terms=)`). An `ExtraIdFunction`
computes the term of each id. The terms of the ids that a token lists add up to the auxiliary loss
of this token, which is added to its surrogate.

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
    """Return the term c * logp of each extra id with the value c, and its derivative c.

    The term is 0 if c is 0, even if logp is -inf. This is the default `ExtraIdFunction` for
    `TokenBatch.logp_terms`.

    logp                      float64 [num_ids], log-prob of each id under the policy
    values                    float [num_ids], the coefficient c of each id, a constant
    advantage, sum_over_ids   not used: every `ExtraIdFunction` has the same arguments

    Return (term, d term / d logp), [num_ids] each.
    """
    term = torch.where(values == 0, 0.0, values * logp)  # 0 * -inf would be NaN
    return term, values


def prob_term(
    logp: Tensor, values: Tensor, advantage: Tensor, sum_over_ids: Any
) -> tuple[Tensor, Tensor]:
    """Return the term c * p of each extra id with the value c, and its derivative.

    p = exp(logp), so the derivative d (c p) / d logp is c p too. This is the `ExtraIdFunction` for
    `TokenBatch.prob_terms`.

    logp                      float64 [num_ids], log-prob of each id under the policy
    values                    float [num_ids], the coefficient c of each id, a constant
    advantage, sum_over_ids   not used: every `ExtraIdFunction` has the same arguments

    Return (term, d term / d logp), float64 [num_ids] each.
    """
    term = values * logp.exp()
    return term, term  # d exp(logp) / d logp = exp(logp)


def probability_outside(logp: Any, sum_over_ids: Callable[[Any], Any]) -> Any:
    """Return the probability of all ids that a token does not list, float [num_ids].

        1 - sum of exp(logp) over the ids that the token lists, at least 1e-6 (LEAST_OUTSIDE)

    All ids of a token get the same number.

    logp           float [num_ids], log-prob of each listed id
    sum_over_ids   function x -> y, [num_ids] each: y is the sum of x over all ids that the same
                   token lists
    """
    return (1.0 - sum_over_ids(logp.exp())).clamp(min=LEAST_OUTSIDE)


class AuxiliaryLosses(NamedTuple):
    """The auxiliary loss of each token, which is the sum of the terms of its ids.

    losses        float64 [num_tokens], the auxiliary losses
    grad_logps    float64 [num_ids], d auxiliary loss / d log-prob of each id
    token_of_id   int64 [num_ids], the token that lists each id
    """

    losses: Tensor
    grad_logps: Tensor
    token_of_id: Tensor


class ExtraIdTerms(NamedTuple):
    """The functions that an objective applies to the ids that the tokens of a batch list.

    parts     pairs (function, values): an `ExtraIdFunction` and the value of each id for it, fp32
              [num_ids]
    offsets   int64 [num_tokens + 1]: the ids of token t are offsets[t] : offsets[t + 1]
    """

    parts: tuple[tuple[ExtraIdFunction, Tensor], ...]
    offsets: Tensor

    def token_of_id(self) -> Tensor:
        """Return the index of the token that lists each id, int64 [num_ids].

        For offsets [0, 2, 2, 3] it is [0, 0, 2].
        """
        _, values = self.parts[0]
        num_ids = values.numel()
        # Given counts alone, repeat_interleave returns index t as many times as counts[t] says.
        # With output_size the host need not wait for the sum of the counts.
        counts = self.offsets.diff()
        return torch.repeat_interleave(counts, output_size=num_ids)

    def compute(self, logps: Tensor, advantages: Tensor) -> AuxiliaryLosses:
        """Return the auxiliary loss of each token, and its derivative in the log-prob of each id.

        Each function returns a term of each id and d term / d logp. The terms of all functions are
        added, and then summed over the ids of each token.

        logps        float64 [num_ids], log-prob of each extra id under the policy
        advantages   fp32 [num_tokens]

        Raises ValueError if a function returns anything but two tensors [num_ids], or passes
        anything but a tensor [num_ids] to `sum_over_ids`.
        """
        token_of_id = self.token_of_id()

        def sum_over_ids(x: Any) -> Tensor:
            """Return the sum of x over the ids of the same token, [num_ids] like x."""
            if not has_shape_of(x, logps):
                raise ValueError(
                    f"sum_over_ids is given a {type(x).__name__} that has not one number for each"
                    " id: pass a tensor of the shape of logp."
                )
            return self.sum_of_tokens(x)[token_of_id]

        terms = torch.zeros_like(logps)
        grad_logps = torch.zeros_like(logps)
        for function, values in self.parts:
            advantage = advantages[token_of_id]
            returned = without_branches(function, logps, values, advantage, sum_over_ids)
            check_terms(function, returned, logps)
            term, slope = returned
            terms = terms + term
            grad_logps = grad_logps + slope
        return AuxiliaryLosses(
            losses=self.sum_of_tokens(terms),
            grad_logps=grad_logps,
            token_of_id=token_of_id,
        )

    def sum_of_tokens(self, x: Tensor) -> Tensor:
        """Return the sum of x [num_ids] over the ids of each token, [num_tokens] in the dtype of x.

        The sum is computed in fp64, in the order of the ids.
        """
        # unsafe=True skips a check of the offsets, for which the host would wait for a GPU.
        total = torch.segment_reduce(
            x.double(), "sum", offsets=self.offsets, initial=0, unsafe=True
        )
        return total.to(x.dtype)


def has_shape_of(x: Any, other: Tensor) -> bool:
    """Return whether x is a tensor of the same shape as `other`."""
    return isinstance(x, Tensor) and x.shape == other.shape


def check_terms(function: ExtraIdFunction, returned: Any, logps: Tensor) -> None:
    """Raise ValueError unless `returned` is a pair (term, slope) of two tensors [num_ids].

    function   the `ExtraIdFunction` that was called, for the error message
    returned   what the function returned
    logps      float64 [num_ids], a tensor of the right shape
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not all(has_shape_of(x, logps) for x in returned):
        raise ValueError(
            f"listed={function!r} returned no pair of tensors of the shape of logp: return"
            " (term, slope)."
        )
