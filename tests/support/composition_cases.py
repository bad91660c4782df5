"""Problems for tests of the compositions, and how far a result may be from float64.

A composition is a function of the package that computes its results from the statistics and single
logits of a row source (`core.sources.RowSource`), for example a divergence over top-k sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels import Exact, TokenSets
from support.row_sources import Float64Source, LinearSource, LogitsSource

NUM_ROWS = 9
VOCAB_SIZE = 23
WIDTH = 6

Source = Float64Source | LinearSource


@dataclass(eq=False)
class Case:
    """Rows of logits as the package gets them, and the same rows in float64.

    tensors   leaves: (logits [num_rows, V]), or (hidden states [num_rows, H], weight [V, H])
    source    makes a row source from `tensors`
    exact     float64 leaves with the same values
    logits    makes float64 logits [num_rows, V] from `exact`
    eps       the relative rounding error of the dtype of `tensors`, half a unit in the last place
    """

    tensors: tuple[Tensor, ...]
    source: Callable[..., Source]
    exact: tuple[Tensor, ...]
    logits: Callable[..., Tensor]
    eps: float

    @classmethod
    def from_kind(cls, kind: str, seed: int = 0) -> Case:
        """Return a case with NUM_ROWS rows of random values over VOCAB_SIZE ids.

        kind   one of SOURCES: the form of the rows, a space, and the name of their dtype
        seed   of the random values
        """
        form, dtype_name = kind.split()
        dtype = getattr(torch, dtype_name)
        g = torch.Generator().manual_seed(seed)
        tensors: tuple[Tensor, ...]
        if form == "linear":
            hidden = torch.randn(NUM_ROWS, WIDTH, generator=g, dtype=torch.float64)
            weight = torch.randn(VOCAB_SIZE, WIDTH, generator=g, dtype=torch.float64)
            tensors = hidden, weight
        else:
            tensors = (3.0 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=g, dtype=torch.float64),)
        return cls.with_values(form, *(x.to(dtype) for x in tensors))

    @classmethod
    def with_values(cls, form: str, *tensors: Tensor) -> Case:
        """Return a case with given values.

        form      "exact" (float64 logits), "logits", or "linear" (hidden states and a weight)
        tensors   logits [num_rows, V], or for "linear" hidden [num_rows, H] and weight [V, H]
        """
        sources = {"exact": Float64Source, "logits": LogitsSource, "linear": LinearSource}
        return cls(
            tensors=tuple(x.clone().requires_grad_() for x in tensors),
            source=sources[form],
            exact=tuple(x.double().requires_grad_() for x in tensors),
            logits=_project if form == "linear" else _unchanged,
            eps=torch.finfo(tensors[0].dtype).eps / 2,
        )

    def tolerance(self, upstream_bound: float = 1.0) -> tuple[float, float]:
        """Return (value tolerance, gradient tolerance): how far each may be from float64, absolute.

        A log-prob is a sum of two logits and a logarithm, each rounded to fp32. A logit of a
        "linear" case is a dot product, which is rounded once for each of its WIDTH terms. A
        probability has the absolute error of its log-prob.

        The gradient of a logit is a sum of probabilities times upstream gradients. It reaches the
        leaf in two parts, from the kernel and from single logits. Both parts, and their sum, are
        rounded to the dtype of the leaf, which makes three roundings. In a "linear" case, it is
        also multiplied by the hidden states or the weight.

        upstream_bound   bound of the sum over a row of the absolute upstream gradients of log-probs
        """
        fp32_eps = torch.finfo(torch.float32).eps / 2
        logits = self.logits(*self.exact).detach()
        largest_logit = float(logits.abs().max())
        is_linear = len(self.tensors) > 1
        if is_linear:
            num_roundings = WIDTH + 3
            largest_factor = max(float(x.detach().abs().max()) for x in self.exact)
        else:
            num_roundings = 3
            largest_factor = 1.0
        value_tolerance = num_roundings * (largest_logit + 1.0) * fp32_eps
        grad_tolerance = upstream_bound * largest_factor * (value_tolerance + 3 * self.eps)
        return value_tolerance, grad_tolerance


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits [num_rows, V] of hidden [num_rows, H] and weight [V, H]."""
    return hidden @ weight.T


def _unchanged(logits: Tensor) -> Tensor:
    return logits


#: Kinds for `Case.from_kind`: form, a space, dtype.
SOURCES = (
    "exact float64",
    "logits float32",
    "logits bfloat16",
    "linear float32",
    "linear bfloat16",
)


def random_sets(num_tokens: int, g: torch.Generator, sizes: tuple[int, ...]) -> TokenSets:
    """Return a set of random ids in random order for each token.

    num_tokens   the number of sets
    g            the random generator
    sizes        the sizes that a set may have, from which its size is drawn
    """
    lists = []
    for _ in range(num_tokens):
        size = sizes[int(torch.randint(len(sizes), (), generator=g))]
        lists.append(torch.randperm(VOCAB_SIZE, generator=g)[:size].tolist())
    return TokenSets.from_lists(lists)


def random_mask(num_tokens: int, g: torch.Generator) -> Tensor:
    """Return a random mask, bool [num_tokens], which is True for about 70 % of the tokens."""
    return torch.rand(num_tokens, generator=g) < 0.7


def masked(results: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return the results as the package gives them: 0 in masked tokens, and -1 for "top_id".

    results   statistics by name, [num_tokens] each
    mask      bool [num_tokens], False for masked tokens
    """
    masked_results = {}
    for name, values in results.items():
        masked_results[name] = torch.where(mask, values, -1 if name == "top_id" else 0.0)
    return masked_results


def weighted_sum(results: dict[str, Tensor], seed: int) -> Tensor:
    """Return a random linear function of all results that have a gradient, 0-d float64.

    The weights are in [-0.5, 0.5) and depend on the seed, and on names and shapes of the results.
    Infinite results and NaN are left out.

    results   tensors by name. "top_prob" and "top_id" have no gradient and are left out.
    """
    g = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for name in sorted(results):
        values = results[name]
        weights = torch.rand(values.shape, generator=g, dtype=torch.float64) - 0.5
        if name not in ("top_prob", "top_id"):
            is_finite = values.isfinite()
            total = total + (weights * torch.where(is_finite, values, 0.0).double()).sum()
    return total


def assert_matches_float64(
    case: Case,
    composition: Callable[[Source], dict[str, Tensor]],
    plain_torch: Callable[[Tensor], dict[str, Tensor]],
    num_terms: float = 1.0,
) -> None:
    """Assert that values and gradients of a composition are near those of plain torch in float64.

    The gradients are those of one `weighted_sum` of all results in the tensors of the case. The
    dtypes of the results are asserted too.

    composition   the function under test, which returns results by name from a row source
    plain_torch   the reference, which returns the same results from float64 logits [num_rows, V]
    num_terms     bound of the number of log-probs that a result is a sum of, times their
                  coefficients. Tolerances grow with it.
    """
    # A weight of `weighted_sum` is at most 0.5, so a bound of 5 allows for ten results of one row.
    value_tolerance, grad_tolerance = case.tolerance(upstream_bound=5.0 * num_terms)
    value_tolerance *= num_terms
    results = composition(case.source(*case.tensors))
    expected = plain_torch(case.logits(*case.exact))
    assert results.keys() == expected.keys()
    for name, values in results.items():
        if case.tensors[0].dtype != torch.float64:  # a float64 source returns float64
            # "extra" has log-probs at extra ids, which the package returns in float64.
            dtypes = {"top_id": torch.int64, "extra": torch.float64}
            assert values.dtype == dtypes.get(name, torch.float32), name
        torch.testing.assert_close(
            values.detach().double(),
            expected[name].detach().double(),
            rtol=0,
            atol=value_tolerance,
            equal_nan=True,
            msg=lambda message, name=name: f"{name}: {message}",
        )
    grads = torch.autograd.grad(weighted_sum(results, 1), case.tensors, allow_unused=True)
    exact = torch.autograd.grad(weighted_sum(expected, 1), case.exact, allow_unused=True)
    for grad, exact_grad in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad.double(), exact_grad, rtol=0, atol=grad_tolerance)


def kl_terms(a: Tensor, b: Tensor) -> Tensor:
    """Return the terms a (log a - log b) of the sum KL(a, b), in the shape of a.

    a, b   log-probs of the two distributions
    """
    return a.exp() * (a - b)


def plain_terms(exact: Exact, logp: Tensor, logq: Tensor) -> Tensor:
    """Return the terms of the sum that is the divergence of teacher and policy, one for each id.

    exact        says which divergence: a KL in either direction, a total variation or a JSD
    logp, logq   log-probs of the policy and of the teacher, in the same shape as the result
    """
    if exact.direction == "reverse":
        return kl_terms(logp, logq)
    if exact.direction == "forward":
        return kl_terms(logq, logp)
    if exact.direction == "tv":
        return (logp.exp() - logq.exp()).abs() / 2
    share = exact.share
    log_m = (share * logq.exp() + (1 - share) * logp.exp()).log()
    return share * kl_terms(logq, log_m) + (1 - share) * kl_terms(logp, log_m)
