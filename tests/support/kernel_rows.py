"""Rows of logits for tests of the kernels: the calls of a backend, and expected results in float64.

With GRPO_KERNELS_TEST_BACKENDS=triton the kernels are Triton's: in its interpreter, as compiled
(support/ptx), or on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Objective
from grpo_kernels.core import backends
from grpo_kernels.core.backends import Backend
from grpo_kernels.core.divergence import DivergenceKind
from grpo_kernels.core.pairs import Pairs
from grpo_kernels.core.softmax import (
    GradientCoefficients,
    LogitRows,
    ReferenceRows,
    RowTransform,
    SoftmaxSums,
    sums_for,
)
from grpo_kernels.formulas.surrogates import PolicyGradient, Surrogate
from grpo_kernels.formulas.token_inputs import TokenInputs
from grpo_kernels.formulas.token_loss import TokenLossFormula
from support import oracle
from support.bits import note
from support.inside import executor, executors

#: (statistics or losses by name, [n] each; the gradient of the logits)
Found = tuple[dict[str, Tensor], Tensor]

TRITON = "triton" in os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "").split()
KERNELS = ["triton"] if TRITON else executors()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The distance from 1 to the next number. It bounds the rounding error, even if a number is truncated
#: as in Triton's interpreter.
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
EPS = UNIT[torch.float32]
PLAIN = RowTransform(1.0, 0.0, 1.0)
COOL = RowTransform(1.0, 0.0, 0.8)
CAPPED = RowTransform(-0.7, 9.0, 1.3)
TRANSFORMS = {
    "plain": PLAIN,
    "temperature": COOL,
    "softcap": RowTransform(1.0, 5.0, 1.0),
    "everything": CAPPED,
}
#: (direction, mixture) of divergences.
KINDS = [("reverse", 0.0), ("forward", 0.0), ("jsd", 0.5), ("jsd", 0.1), ("tv", 0.0)]


def in_cpp(kernels: Backend) -> bool:
    """Return whether these are the C++ kernels."""
    return type(kernels).__module__.endswith(".cpu")


@contextmanager
def kernels(name: str) -> Iterator[Backend]:
    """Load a backend for a `with` block.

    name   "triton", or the instruction set of the C++ kernels. Triton gets small tiles, so that
           short rows have several.
    """
    with executor(name) as backend, pytest.MonkeyPatch.context() as patch:
        if backend == "triton":
            from grpo_kernels.core.backends.triton.launch import LAUNCH

            for kind in LAUNCH.keys() - {"pairs"}:
                patch.setitem(LAUNCH, kind, LAUNCH[kind]._replace(threads=32, accesses=1))
        yield backends.load(backend).Kernels()


def transformed(x: Tensor, transform: RowTransform) -> Tensor:
    """Return the transformed logits [n, V] in the dtype of x, by the formula.

    x   logits [n, V]
    """
    x = x * transform.scale
    if transform.softcap:
        x = transform.softcap * torch.tanh(x / transform.softcap)
    inverse_temperature = transform.inverse_temperature
    if isinstance(inverse_temperature, Tensor):
        return x * inverse_temperature.to(x.dtype)[:, None]
    return x * inverse_temperature


@dataclass
class Rows:
    """The rows of a kernel call, n = A * T.

    logits      [A, T, V]
    transform   temperature, softcap and scale
    reference   the logits of a reference, or None
    mask        bool [n], False: the row is not read. None: all are read.
    targets     int64 [n], random if they are not given
    upstream    upstream gradients of the statistics by name, [n] each, 0 in masked rows. Random if
                they are not given.
    """

    logits: Tensor
    transform: RowTransform = PLAIN
    reference: ReferenceRows | None = None
    mask: Tensor | None = None
    targets: Tensor = field(default_factory=lambda: torch.empty(0))
    upstream: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.upstream:
            return
        if self.targets.dtype != torch.int64:
            vocab = self.logits.shape[-1]
            self.targets = torch.randint(max(vocab, 1), (self.count,))
        names = ["logps", "entropy", "sum_squares"]
        if self.reference is not None:
            names.append("divergence")
        is_read = torch.ones(self.count) if self.mask is None else self.mask.float()
        self.upstream = {name: torch.randn(self.count) * is_read for name in names}

    @property
    def count(self) -> int:
        """Return the number of rows n."""
        return self.logits.shape[0] * self.logits.shape[1]

    def only(self, *names: str) -> Rows:
        """Return the rows with upstream gradients of these statistics alone."""
        return replace(self, upstream={name: self.upstream[name] for name in names})

    @property
    def divergence_alone(self) -> Rows:
        """Return the rows with an upstream gradient of the divergence alone, as for its loss."""
        upstream = {"logps": torch.zeros(self.count), "divergence": self.upstream["divergence"]}
        return replace(self, upstream=upstream)

    def at(self, begin: int, end: int) -> Rows:
        """Return a copy of the rows from begin to end, with logits [end - begin, 1, V]."""
        rows = slice(begin, end)

        def copy_logits(logits: Tensor) -> Tensor:
            return logits.reshape(self.count, 1, logits.shape[-1])[rows].clone()

        reference = self.reference
        if reference is not None:
            reference = reference.select(rows)._replace(logits=copy_logits(reference.logits))
        return Rows(
            logits=copy_logits(self.logits),
            transform=self.transform.select(rows),
            reference=reference,
            mask=None if self.mask is None else self.mask[rows],
            targets=self.targets[rows],
            upstream={name: grad[rows] for name, grad in self.upstream.items()},
        )


def with_reference(
    r: Rows, logits: Tensor, second: tuple[str, float], transform: RowTransform = PLAIN
) -> Rows:
    """Return the rows with the logits of a reference, and new upstream gradients.

    logits      of the reference, [n, V] or [A, T, V]
    second      (direction, mixture) of the divergence
    transform   of the reference
    """
    kind = DivergenceKind(*second)
    reference = ReferenceRows(logits.view(r.logits.shape), transform, kind)
    return Rows(r.logits, r.transform, reference, r.mask, r.targets)


# ---- results of the kernels. `part` is (begin, end) of the rows to compute, or None for all.


def to_logit_rows(r: Rows, part: tuple[int, int] | None = None) -> LogitRows:
    """Return the rows as the argument of a kernel."""
    rows = LogitRows(r.logits, r.targets, r.mask, r.transform, r.reference)
    return rows if part is None else rows.slice_rows(*part)


def softmax_sums_of(kernels: Backend, r: Rows, part: tuple[int, int] | None = None) -> SoftmaxSums:
    """Return the sums for all statistics, from one kernel call."""
    statistics = ("entropy", "sum_squares", "top_id")
    direction = ""
    if r.reference is not None:
        statistics += ("divergence",)
        direction = r.reference.direction
    return kernels.softmax_sums(to_logit_rows(r, part), sums_for(statistics, direction))


def statistics_of(stats: SoftmaxSums, r: Rows) -> dict[str, Tensor]:
    """Return the statistics by name, [n] each."""
    names = ["logps", "entropy", "sum_squares", "top_prob"]
    if r.reference is not None:
        names.append("divergence")
    return {name: getattr(stats, name) for name in names}


def make_coefficients(stats: SoftmaxSums, upstream: dict[str, Tensor]) -> GradientCoefficients:
    """Return the coefficients of the backward kernel from upstream gradients of statistics."""
    return GradientCoefficients.from_gradients(stats, upstream, None)


def _nan_like(logits: Tensor) -> Tensor:
    """Return contiguous memory for a gradient, filled with NaN."""
    return torch.full_like(logits, torch.nan, memory_format=torch.contiguous_format)


def two_passes(
    kernels: Backend, r: Rows, out: Tensor | None = None, part: tuple[int, int] | None = None
) -> Found:
    """Return statistics and gradient of the logits, from a forward and a backward kernel call."""
    if out is None:
        out = _nan_like(r.logits)
    rows = slice(None) if part is None else slice(*part)
    upstream = {name: grad[rows] for name, grad in r.upstream.items()}
    stats = softmax_sums_of(kernels, r, part)
    kernels.softmax_gradient(to_logit_rows(r, part), stats, make_coefficients(stats, upstream), out)
    return statistics_of(stats, r), out


def loss_formula_of(r: Rows, surrogate: Surrogate | None = None) -> TokenLossFormula:
    """Return a loss whose gradients of log-prob, entropy and divergence are r.upstream."""
    grad_entropy = r.upstream.get("entropy")
    has_bonus = grad_entropy is not None
    inputs = TokenInputs(
        r.targets,
        r.mask,
        advantages=-r.upstream["logps"],
        policy_weight=torch.ones(r.count),
        divergence_weight=r.upstream.get("divergence"),
        entropy_weight=-grad_entropy if has_bonus else None,
    )
    objective = Objective(surrogate or PolicyGradient(), entropy_coef=0.3 if has_bonus else 0.0)
    return objective.loss_formula(inputs)


def fused_loss_call(
    kernels: Backend, r: Rows, out: Tensor | None = None, part: tuple[int, int] | None = None
) -> Found:
    """Return statistics, losses and gradient of the logits, from one kernel call."""
    if out is None:
        out = _nan_like(r.logits)
    formula = loss_formula_of(r)
    if part is not None:
        formula = formula.select(slice(*part))
    values = kernels.fused_loss(to_logit_rows(r, part), formula, out)
    found = {"logps": values.logps, "entropy": values.entropy, "losses": values.losses}
    if values.divergence is not None:
        found["divergence"] = values.divergence
    return found, out


def ways_to_compute(r: Rows) -> list[tuple[Callable[..., Found], Rows]]:
    """Return functions of (kernels, rows), each with the rows for it.

    These are: all statistics in two passes; losses in one pass with an entropy bonus; and losses
    without a bonus, of the divergence alone if there is one.
    """
    if r.reference is None:
        with_bonus = r.only("logps", "entropy")
        without_bonus = r.only("logps")
    else:
        with_bonus = r.only("logps", "entropy", "divergence")
        without_bonus = r.divergence_alone
    return [(two_passes, r), (fused_loss_call, with_bonus), (fused_loss_call, without_bonus)]


# ---- in float64


def exact(r: Rows, dtype: torch.dtype = torch.float64) -> Found:
    """Return statistics and losses [n] and the gradient of the logits [n, V], in float64.

    They are computed by autograd in `dtype`, with the upstream gradients of the rows. In rows that
    are not read, everything is 0, except a top_prob of 1.
    """
    is_read = torch.ones(r.count, dtype=torch.bool) if r.mask is None else r.mask
    logits = r.logits.detach().reshape(r.count, r.logits.shape[-1])[is_read].to(dtype)
    logits.requires_grad_()
    statistics = _statistics(r, logits, is_read)
    upstream = {name: grad[is_read].to(dtype) for name, grad in r.upstream.items()}
    total = sum((grad * statistics[name]).sum() for name, grad in upstream.items())
    statistics["losses"] = torch.zeros(len(logits), dtype=dtype)
    for name, grad in upstream.items():
        if name == "sum_squares":  # no loss depends on it
            continue
        term = grad * statistics[name]
        if name == "divergence":
            # It may be inf in a row where it has no part in the loss.
            term = torch.where(grad == 0, 0.0, term)
        statistics["losses"] = statistics["losses"] + term
    (gradient,) = torch.autograd.grad(total, logits)  # type: ignore[arg-type]

    def to_all_rows(x: Tensor, elsewhere: float = 0.0) -> Tensor:
        """Return x in float64, with the number `elsewhere` in rows that are not read."""
        out = torch.full((r.count, *x.shape[1:]), elsewhere, dtype=torch.float64)
        rows = is_read.view(-1, *[1] * (x.dim() - 1))
        return out.masked_scatter(rows, x.detach().double())

    all_statistics = {
        name: to_all_rows(x, elsewhere=1.0 if name == "top_prob" else 0.0)
        for name, x in statistics.items()
    }
    return all_statistics, to_all_rows(gradient)


def _statistics(r: Rows, logits: Tensor, is_read: Tensor) -> dict[str, Tensor]:
    """Return the statistics of the rows that are read, [n] each, with graphs.

    The log-prob of a target outside the vocabulary is NaN.

    logits    [n, V], of the rows that are read
    is_read   bool [rows]
    """
    dtype = logits.dtype
    log_p = transformed(logits, r.transform.select(is_read)).log_softmax(-1)
    p = log_p.exp()
    finite_log_p = log_p.masked_fill(p == 0, 0.0)
    targets = r.targets[is_read]
    is_id = (targets >= 0) & (targets < logits.shape[-1])
    target_logps = log_p.gather(1, torch.where(is_id, targets, 0)[:, None])[:, 0]
    statistics = {
        "logps": target_logps * torch.where(is_id, 1.0, torch.nan).to(dtype),
        "entropy": -(p * finite_log_p).sum(-1),
        "sum_squares": p.square().sum(-1),
        "top_prob": p.amax(-1),
    }
    if r.reference is not None:
        direction, mixture = r.reference.direction, r.reference.mixture
        reference = r.reference.logits.reshape(r.count, logits.shape[-1])[is_read].to(dtype)
        transform = r.reference.transform.select(is_read)
        log_q = transformed(reference, transform).log_softmax(-1)
        statistics["divergence"] = oracle.divergence(log_p, log_q, direction, mixture)
    return statistics


def first_order(r: Rows) -> tuple[Any, Any]:
    """Return how far fp32 rounding may move a total variation [n] and its gradient [n, V].

    Both depend on the sign of the log-ratio of each id. If a log-ratio is not larger than its
    rounding error in fp32, either sign is right. Other divergences depend on small log-ratios
    quadratically, so that (0.0, 0.0) is returned for them.
    """
    if r.reference is None or r.reference.direction != "tv" or "divergence" not in r.upstream:
        return 0.0, 0.0
    z = transformed(r.logits.double().flatten(0, 1), r.transform)
    w = transformed(r.reference.logits.double().flatten(0, 1), r.reference.transform)
    z_max = z.amax(-1, keepdim=True)
    w_max = w.amax(-1, keepdim=True)
    p = z.softmax(-1)
    q = w.softmax(-1)
    log_ratio = z.log_softmax(-1) - w.log_softmax(-1)

    # The sizes of the numbers that are rounded on the way to the log-ratio.
    difference = (z - z_max) - (w - w_max)
    distance_of_maxima = (z_max - w_max).abs()
    expected_difference = (p * difference.abs()).nan_to_num(0.0).sum(-1, keepdim=True)
    size = (z - w).abs() + distance_of_maxima + (log_ratio - difference).abs() + expected_difference
    size_of_logits = z.abs() + w.abs() + z_max.abs() + w_max.abs() + 1.0
    is_plain = r.transform is PLAIN and r.reference.transform is PLAIN
    # Logits of similar size that are not transformed are subtracted without a rounding error.
    is_exact = (distance_of_maxima <= 4.0) & is_plain
    rounding = 4 * EPS * torch.where(is_exact, size, size + size_of_logits)
    rounding = torch.where(log_ratio.isfinite(), rounding, 0.0)

    is_near_zero = ((log_ratio != 0) & (log_ratio.abs() <= rounding)).double()
    value_error = (torch.maximum(p, q) * rounding).sum(-1) / 2.0
    gradient_error = p * (is_near_zero + (p * is_near_zero).sum(-1, keepdim=True))
    factor = abs(r.transform.scale) * _inverse_temperatures(r)
    factor = factor * r.upstream["divergence"].double().abs()[:, None]
    return value_error.nan_to_num(0.0), (gradient_error * factor).nan_to_num(0.0)


def _inverse_temperatures(r: Rows) -> Tensor:
    """Return the absolute inverse temperature of each row, float64 [n, 1] or [1, 1]."""
    return torch.as_tensor(r.transform.inverse_temperature).double().view(-1, 1).abs()


def check(r: Rows, *found: Found) -> None:
    """Assert that each result is as near to float64 as a careful computation in fp32.

    The tolerance is the error of `exact` in fp32, plus a few roundings. Where float64 is NaN, the
    result is NaN or inf, except for losses.
    """
    right, right_gradient = exact(r)
    naive, naive_gradient = exact(r, torch.float32)
    value_error, gradient_error = first_order(r)
    size = _size_of_logits(r, right_gradient.shape)
    # The rounding of the transformed logits.
    rounded = 0.0 if r.transform is PLAIN else 0.5 * EPS * size[:, 0]
    for values, _ in found:
        for name, x in values.items():
            expected = right[name]
            naive_error = (naive[name] - expected).abs()
            if name == "divergence":
                tolerance = naive_error + 3e-6 * expected + 1e-12 + value_error
                tolerance = tolerance + rounded * expected.abs().sqrt()
            else:
                is_finite = expected.isfinite()
                slack = 1.5 * naive_error[is_finite].amax() if is_finite.any() else 0.0
                tolerance = slack + 8 * EPS * (1 + expected.abs()) + rounded
            _check_statistic(name, x, expected, tolerance)

    gradient_size = torch.zeros(r.count, 1, dtype=torch.float64)
    for name, grad in r.upstream.items():
        statistic_size = 1.0 if name == "logps" else 1 + right[name].abs()
        term = torch.where(grad == 0, 0.0, grad.double().abs() * statistic_size)
        gradient_size[:, 0] += term
    tolerance = (naive_gradient - right_gradient).abs().amax(-1, keepdim=True) + EPS * (
        4 + size
    ) * gradient_size * abs(r.transform.scale) * _inverse_temperatures(r)
    if r.reference is not None:
        # The divergence is subtracted from each log-ratio. Large ones cancel.
        largest = right_gradient.abs().amax(-1, keepdim=True)
        tolerance = tolerance + 1e-6 * largest + gradient_error
    for _, gradient in found:
        _check_gradient(gradient, right_gradient, tolerance, gradient_size)


def _size_of_logits(r: Rows, shape: torch.Size) -> Tensor:
    """Return the largest absolute transformed logit of each row, at least 1, float64 [n, 1].

    Logits more than 200 below the maximum have no probability and are left out.

    shape   (n, V)
    """
    z = transformed(r.logits.double().reshape(shape), r.transform)
    largest = z.nan_to_num(neginf=-1e300).amax(-1, keepdim=True)
    counts = z.isfinite() & (z > largest - 200.0)
    return torch.where(counts, z.abs(), 0.0).amax(-1, keepdim=True).clamp(min=1.0)


def _check_statistic(name: str, x: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """Assert that a statistic [n] is within the tolerance, and inf or NaN where float64 is."""
    is_finite = expected.isfinite()
    is_nan = expected.isnan()
    assert torch.equal(x[~is_nan].isinf(), expected[~is_nan].isinf()), name
    assert name == "losses" or not x[is_nan].isfinite().any(), name
    error = (x.double() - expected).abs()
    excess = (error - tolerance)[is_finite]
    assert (error <= tolerance)[is_finite].all(), (
        f"{name}: off by {excess.max():.3g} above the tolerance"
    )
    if name in ("divergence", "entropy", "sum_squares"):
        assert (x[is_finite] >= 0).all()
    note(name, (error / (1 + expected.abs()))[is_finite])


def _check_gradient(
    gradient: Tensor, expected: Tensor, tolerance: Tensor, gradient_size: Tensor
) -> None:
    """Assert that a gradient of logits is within the tolerance, in rows where float64 is finite.

    expected        float64 [n, V]
    tolerance       [n, 1] or [n, V], without the rounding to the dtype of the gradient
    gradient_size   [n, 1], the size that noted errors are relative to
    """
    gradient = gradient.reshape(expected.shape)
    # Of fp16, the smallest positive number is 2**-24.
    smallest = 2.0**-24 if gradient.dtype == torch.float16 else 0.0
    stored = UNIT[gradient.dtype] * expected.abs() + smallest
    error = (gradient.double() - expected).abs() - stored
    is_finite = expected.isfinite().all(-1)
    note("gradients", (error / (gradient_size + 1e-30))[is_finite])
    tolerance = tolerance.expand_as(error)
    excess = (error - tolerance)[is_finite]
    assert (error <= tolerance)[is_finite].all(), (
        f"gradient: {excess.max():.3g} above the tolerance"
    )


def same(found: Found, expected: Found, what: object = "") -> None:
    """Assert that two results are equal. NaN equals NaN."""
    values = {**found[0], "gradient": found[1]}
    expected_values = {**expected[0], "gradient": expected[1]}
    for name, x in values.items():
        y = expected_values[name]
        assert torch.equal(x.nan_to_num(7e30), y.nan_to_num(7e30)), (what, name)


def row_pairs(vocab: int) -> tuple[Tensor, Tensor]:
    """Return ten rows of a policy and ten of a reference, fp32 [10, vocab] each.

    There are flat and peaked rows, rows near one-hot, a disjoint pair, equal pairs, logits far from
    0, and a reference that differs at one id. In a row of each, the maximum is the last id.
    """
    flat = torch.randn(2, vocab) * 0.1
    peaked = torch.randn(2, vocab) * 6.0
    one_hot = torch.zeros(vocab)
    one_hot[vocab // 2] = 25.0
    last_hot = torch.zeros(vocab)
    last_hot[vocab - 1] = 25.0
    ids = torch.arange(vocab)
    first_half = torch.where(ids < vocab // 2, 0.0, -60.0)
    second_half = torch.where(ids < vocab // 2, -60.0, 0.0)
    more_at_top = torch.where(ids == int(peaked[1].argmax()), 2.0, 0.0)
    pairs = [
        (flat[0], flat[1]),
        (peaked[0], peaked[1]),
        (flat[0], peaked[1]),
        (one_hot, flat[0]),
        (peaked[0], one_hot),
        (one_hot, last_hot),
        (first_half, second_half),
        (peaked[0], peaked[0]),
        (peaked[0] + 80.0, peaked[0] - 3 + flat[1]),
        (peaked[1], peaked[1] + more_at_top),
    ]
    policy = torch.stack([row for row, _ in pairs])
    reference = torch.stack([row for _, row in pairs])
    policy[1, -1] = policy.max() + 3.0
    reference[2, -1] = reference.max() + 3.0
    return policy, reference


# ---- (row, id) pairs of sparse products, and matrices for them


def slots_of(lists: Sequence[Sequence[int]]) -> Pairs:
    """Return the pairs of each row with its ids. The id -1 is a pair that is not used."""
    counts = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
    ids = torch.tensor([i for ids in lists for i in ids], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Pairs(ids, offsets, torch.repeat_interleave(torch.arange(len(lists)), counts))


def random_slots(n: int, vocab: int) -> Pairs:
    """Return pairs of n rows with 0 to 10 ids each.

    Ids repeat, and every fourth one is not used. Id 0 is in every third row, id 1 in none.
    """
    g = torch.Generator().manual_seed(0)
    lists = []
    for i in range(n):
        count = int(torch.randint(0, 10, (), generator=g)) if i % 5 else 0
        ids = torch.randint(2, vocab, (count,), generator=g).tolist()
        ids[3::4] = [-1] * len(ids[3::4])
        if i % 3 == 0:
            ids.append(0)
        lists.append(ids)
    return slots_of(lists)


def values_for(slots: Pairs) -> Tensor:
    """Return a random value for each pair, fp32. Every seventh value is 0."""
    values = torch.randn(slots.ids.shape, generator=torch.Generator().manual_seed(1))
    values[::7] = 0.0
    return values


def matrix(rows: int, width: int, dtype: torch.dtype, seed: int, gap: int = 0) -> Tensor:
    """Return random numbers [rows, width]. With a gap, there is unused memory between the rows.

    gap   number of unused elements between rows
    """
    numbers = torch.randn(rows, width + gap, generator=torch.Generator().manual_seed(seed)) / 2
    return numbers.to(dtype)[:, gap // 2 : gap // 2 + width]
