"""Problems for tests of the compositions, and how far a result may be from float64."""

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

    tensors   leaves: logits, or hidden states and weight
    source    makes a row source from `tensors`
    exact     float64 leaves with the same values
    logits    makes float64 logits [num_rows, V] from `exact`
    eps       the relative rounding error of the dtype of `tensors`
    """

    tensors: tuple[Tensor, ...]
    source: Callable[..., Source]
    exact: tuple[Tensor, ...]
    logits: Callable[..., Tensor]
    eps: float

    @classmethod
    def of(cls, kind: str, seed: int = 0) -> Case:
        """Return a case with random values.

        kind   one of SOURCES: form and dtype
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

        form      "exact", "logits" or "linear"
        tensors   logits [num_rows, V], or for "linear" hidden states and weight
        """
        sources = {"exact": Float64Source, "logits": LogitsSource, "linear": LinearSource}
        return cls(
            tensors=tuple(x.clone().requires_grad_() for x in tensors),
            source=sources[form],
            exact=tuple(x.double().requires_grad_() for x in tensors),
            logits=(lambda hidden, weight: hidden @ weight.T) if form == "linear" else lambda x: x,
            eps=torch.finfo(tensors[0].dtype).eps / 2,
        )

    def tolerance(self, arrives: float = 1.0) -> tuple[float, float]:
        """Return how far (a value, a gradient) may be from float64.

        Logits are rounded to fp32, in a dot product once for each term. A log-prob is a sum of two
        logits and a logarithm. A probability has the absolute error of its log-prob. The gradient
        of a logit is a sum of probabilities times gradients that arrive. It reaches the leaf in two
        parts, the kernel's and that of single logits. Both, and their sum, are rounded to the dtype
        of the leaf.

        arrives   bound of the sum over a row of the absolute gradients that arrive at log-probs
        """
        fp32 = torch.finfo(torch.float32).eps / 2
        is_linear = len(self.tensors) > 1
        logits = self.logits(*self.exact).detach()
        value = (WIDTH + 3 if is_linear else 3) * float(logits.abs().max() + 1.0) * fp32
        factor = max(float(x.detach().abs().max()) for x in self.exact) if is_linear else 1.0
        return value, arrives * factor * (value + 3 * self.eps)


SOURCES = (
    "exact float64",
    "logits float32",
    "logits bfloat16",
    "linear float32",
    "linear bfloat16",
)


def random_sets(num_tokens: int, g: torch.Generator, sizes: tuple[int, ...]) -> TokenSets:
    """Return sets of random ids in random order. The size of a set is drawn from `sizes`."""
    lists = []
    for _ in range(num_tokens):
        size = sizes[int(torch.randint(len(sizes), (), generator=g))]
        lists.append(torch.randperm(VOCAB_SIZE, generator=g)[:size].tolist())
    return TokenSets.from_lists(lists)


def random_mask(num_tokens: int, g: torch.Generator) -> Tensor:
    """Return a random mask that is True for 70 % of the tokens."""
    return torch.rand(num_tokens, generator=g) < 0.7


def masked(results: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return statistics that are 0 where the mask is False, and -1 for "top_id"."""
    kept = {}
    for name, values in results.items():
        kept[name] = torch.where(mask, values, -1 if name == "top_id" else 0.0)
    return kept


def weighted_sum(results: dict[str, Tensor], seed: int) -> Tensor:
    """Return a random linear function of all results that have a gradient, in float64."""
    g = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for name in sorted(results):
        values = results[name]
        weights = torch.rand(values.shape, generator=g, dtype=torch.float64) - 0.5
        if name not in ("top_prob", "top_id"):
            is_finite = values.isfinite()
            total = total + (weights * torch.where(is_finite, values, 0.0).double()).sum()
    return total


def check(
    case: Case,
    composed: Callable[[Source], dict[str, Tensor]],
    plain: Callable[[Tensor], dict[str, Tensor]],
    num_terms: float = 1.0,
) -> None:
    """Compare values and gradients of a composition with plain torch in float64.

    composed    returns results by name from a row source
    plain       returns the same results from float64 logits
    num_terms   the number of log-probs that a result is a sum of, times their coefficients, at most
    """
    value_tolerance, grad_tolerance = case.tolerance(5.0 * num_terms)
    value_tolerance *= num_terms
    results = composed(case.source(*case.tensors))
    expected = plain(case.logits(*case.exact))
    assert results.keys() == expected.keys()
    for name, values in results.items():
        if case.tensors[0].dtype != torch.float64:  # a float64 source returns float64
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
    """Return the terms of the sum KL(a, b), from log-probs."""
    return a.exp() * (a - b)


def plain_terms(exact: Exact, logp: Tensor, logq: Tensor) -> Tensor:
    """Return the terms of the sum that is the divergence, one for each outcome.

    logp, logq   log-probs of the policy and of the teacher
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
