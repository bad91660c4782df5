"""Rows of logits for tests of the kernels: the calls of a backend, and expected results in float64.

With GRPO_KERNELS_TEST_BACKENDS=triton the kernels are Triton's: in its interpreter, as compiled
(support/ptx), or on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

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

#: Results of kernels: (statistics or losses by name, [n] each; the gradient of the logits [n, V])
KernelResults = tuple[dict[str, Tensor], Tensor]

TRITON = "triton" in os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "").split()
KERNELS = ["triton"] if TRITON else executors()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The distance from 1 to the next number. It bounds the relative rounding error, even if a number
#: is truncated as in Triton's interpreter.
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
    """Load a backend for a `with` block, and yield its kernels.

    Triton gets small tiles, so that short rows have several.

    name   "triton", "eager", or "cpu" with an instruction set, see `inside.executors`
    """
    with executor(name) as backend, pytest.MonkeyPatch.context() as patch:
        if backend == "triton":
            from grpo_kernels.core.backends.triton.launch import LAUNCH

            for launch_name in LAUNCH.keys() - {"pairs"}:
                small_tiles = LAUNCH[launch_name]._replace(threads=32, accesses=1)
                patch.setitem(LAUNCH, launch_name, small_tiles)
        yield backends.load(backend).Kernels()


def transformed(x: Tensor, transform: RowTransform) -> Tensor:
    """Return softcap * tanh(scale * x / softcap) / temperature, [n, V] in the dtype of x.

    x           logits [n, V]
    transform   scale, softcap (0: none) and inverse temperature: a number, or one per row [n]
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
    mask        bool [n], False: the row is masked, and its logits are not read. None: no row is.
    targets     int64 [n], random if they are not given
    upstream    upstream gradients of the statistics by name, fp32 [n] each, 0 in masked rows.
                Random if they are not given.
    """

    logits: Tensor
    transform: RowTransform = PLAIN
    reference: ReferenceRows | None = None
    mask: Tensor | None = None
    targets: Tensor = field(default_factory=lambda: torch.empty(0))
    upstream: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Draw targets and upstream gradients that are not given, from the global generator.

        With given upstream gradients nothing is drawn, because these rows are a copy of others
        that have their targets.
        """
        if self.upstream:
            return
        targets_are_given = self.targets.dtype == torch.int64  # the default is an fp32 tensor
        if not targets_are_given:
            vocab = self.logits.shape[-1]
            self.targets = torch.randint(max(vocab, 1), (self.count,))
        names = ["logps", "entropy", "sum_squares"]
        if self.reference is not None:
            names.append("divergence")
        is_read = torch.ones(self.count) if self.mask is None else self.mask.float()
        self.upstream = {name: torch.randn(self.count) * is_read for name in names}

    @property
    def count(self) -> int:
        """The number of rows n."""
        return self.logits.shape[0] * self.logits.shape[1]

    def only(self, *names: str) -> Rows:
        """Return the rows with upstream gradients of the statistics `names` alone."""
        return replace(self, upstream={name: self.upstream[name] for name in names})

    @property
    def divergence_alone(self) -> Rows:
        """The rows with an upstream gradient of the divergence alone, and 0 for the log-probs."""
        upstream = {"logps": torch.zeros(self.count), "divergence": self.upstream["divergence"]}
        return replace(self, upstream=upstream)

    def at(self, begin: int, end: int) -> Rows:
        """Return a copy of the rows begin to end - 1, with logits [end - begin, 1, V]."""
        rows = slice(begin, end)

        def copy_logits(logits: Tensor) -> Tensor:
            """Return a copy of these rows of logits [A, T, V]."""
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
    rows: Rows, logits: Tensor, second: tuple[str, float], transform: RowTransform = PLAIN
) -> Rows:
    """Return the rows with the logits of a reference, and new random upstream gradients.

    logits      of the reference, [n, V] or [A, T, V]
    second      (direction, mixture) of the divergence from the reference, as in KINDS
    transform   of the logits of the reference
    """
    direction, mixture = second
    kind = DivergenceKind(direction, mixture)
    reference = ReferenceRows(logits.view(rows.logits.shape), transform, kind)
    return Rows(rows.logits, rows.transform, reference, rows.mask, rows.targets)


# ---- results of the kernels. `part` is (begin, end) of the rows to compute, or None for all.


def to_logit_rows(rows: Rows, part: tuple[int, int] | None = None) -> LogitRows:
    """Return the rows as the argument of a kernel.

    part   (begin, end) of the rows that the kernel computes; None: all
    """
    logit_rows = LogitRows(rows.logits, rows.targets, rows.mask, rows.transform, rows.reference)
    if part is None:
        return logit_rows
    begin, end = part
    return logit_rows.slice_rows(begin, end)


def softmax_sums_of(
    kernels: Backend, rows: Rows, part: tuple[int, int] | None = None
) -> SoftmaxSums:
    """Return the softmax sums for all statistics, from one kernel call.

    The statistics are log-prob, entropy, sum_squares and top_id, and with a reference the
    divergence.

    part   (begin, end) of the rows to compute; None: all
    """
    statistics = ("entropy", "sum_squares", "top_id")
    direction = ""
    if rows.reference is not None:
        statistics += ("divergence",)
        direction = rows.reference.direction
    return kernels.softmax_sums(to_logit_rows(rows, part), sums_for(statistics, direction))


def statistics_of(stats: SoftmaxSums, rows: Rows) -> dict[str, Tensor]:
    """Return log-prob, entropy, sum_squares, top_prob and, with a reference, divergence by name.

    stats   the sums of `rows`, from which each statistic [n] is computed
    """
    names = ["logps", "entropy", "sum_squares", "top_prob"]
    if rows.reference is not None:
        names.append("divergence")
    return {name: getattr(stats, name) for name in names}


def make_coefficients(stats: SoftmaxSums, upstream: dict[str, Tensor]) -> GradientCoefficients:
    """Return the coefficients of the backward kernel from upstream gradients of statistics."""
    return GradientCoefficients.from_gradients(stats, upstream, None)


def _nan_like(logits: Tensor) -> Tensor:
    """Return contiguous memory for a gradient, filled with NaN."""
    return torch.full_like(logits, torch.nan, memory_format=torch.contiguous_format)


def two_passes(
    kernels: Backend, rows: Rows, out: Tensor | None = None, part: tuple[int, int] | None = None
) -> KernelResults:
    """Return statistics and gradient of the logits, from a forward and a backward kernel call.

    The gradient is that of the sum of rows.upstream[name] * statistic over all names and rows.

    out    memory for the gradient, in the shape of rows.logits. None: new memory, filled with NaN,
           so that elements that a kernel does not write are noticed.
    part   (begin, end) of the rows to compute; None: all
    """
    if out is None:
        out = _nan_like(rows.logits)
    computed = slice(None) if part is None else slice(*part)
    upstream = {name: grad[computed] for name, grad in rows.upstream.items()}
    stats = softmax_sums_of(kernels, rows, part)
    kernels.softmax_gradient(
        to_logit_rows(rows, part), stats, make_coefficients(stats, upstream), out
    )
    return statistics_of(stats, rows), out


def loss_formula_of(rows: Rows, surrogate: Surrogate | None = None) -> TokenLossFormula:
    """Return a loss formula whose gradients of log-prob, entropy and divergence are rows.upstream.

    The loss of a row is -advantage * log-prob with the advantage -rows.upstream["logps"], and
    likewise weights times divergence and entropy. So it is linear in the three.

    surrogate   the policy loss; None: PolicyGradient, for which the above holds
    """
    grad_entropy = rows.upstream.get("entropy")
    has_bonus = grad_entropy is not None
    inputs = TokenInputs(
        rows.targets,
        rows.mask,
        advantages=-rows.upstream["logps"],
        policy_weight=torch.ones(rows.count),
        divergence_weight=rows.upstream.get("divergence"),
        entropy_weight=-grad_entropy if has_bonus else None,
    )
    # Any coefficient but 0 switches the bonus on. The formula has the weights of `inputs`.
    objective = Objective(surrogate or PolicyGradient(), entropy_coef=0.3 if has_bonus else 0.0)
    return objective.loss_formula(inputs)


def fused_loss_call(
    kernels: Backend, rows: Rows, out: Tensor | None = None, part: tuple[int, int] | None = None
) -> KernelResults:
    """Return statistics, losses and gradient of the logits, from one kernel call.

    The loss of a row is that of `loss_formula_of`. The gradient is that of the sum of all losses.
    The statistics are log-prob, entropy and, with a reference, divergence.

    kernels, rows, out, part   as in `two_passes`
    """
    if out is None:
        out = _nan_like(rows.logits)
    formula = loss_formula_of(rows)
    if part is not None:
        formula = formula.select(slice(*part))
    values = kernels.fused_loss(to_logit_rows(rows, part), formula, out)
    statistics = {"logps": values.logps, "entropy": values.entropy, "losses": values.losses}
    if values.divergence is not None:
        statistics["divergence"] = values.divergence
    return statistics, out


def ways_to_compute(rows: Rows) -> list[tuple[Callable[..., KernelResults], Rows]]:
    """Return pairs (function, rows) that together use all kernels: call function(kernels, rows).

    - `two_passes` with upstream gradients of all statistics
    - `fused_loss_call` of a loss with an entropy bonus
    - `fused_loss_call` of a loss without a bonus. With a reference, it is the divergence alone.
    """
    if rows.reference is None:
        with_bonus = rows.only("logps", "entropy")
        without_bonus = rows.only("logps")
    else:
        with_bonus = rows.only("logps", "entropy", "divergence")
        without_bonus = rows.divergence_alone
    return [(two_passes, rows), (fused_loss_call, with_bonus), (fused_loss_call, without_bonus)]


# ---- in float64


def exact(rows: Rows, dtype: torch.dtype = torch.float64) -> KernelResults:
    """Return statistics and losses [n] and the gradient of the logits [n, V], in float64.

    The loss of a row, under the name "losses", is the sum of upstream gradient * statistic, without
    sum_squares. In rows that are not read, everything is 0, except a top_prob of 1.

    dtype   in which statistics and gradients are computed, by autograd
    """
    is_read = torch.ones(rows.count, dtype=torch.bool) if rows.mask is None else rows.mask
    logits = rows.logits.detach().reshape(rows.count, rows.logits.shape[-1])[is_read].to(dtype)
    logits.requires_grad_()
    statistics = _statistics(rows, logits, is_read)
    upstream = {name: grad[is_read].to(dtype) for name, grad in rows.upstream.items()}
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
        out = torch.full((rows.count, *x.shape[1:]), elsewhere, dtype=torch.float64)
        is_read_by_row = is_read if x.dim() == 1 else is_read[:, None]
        return out.masked_scatter(is_read_by_row, x.detach().double())

    all_statistics = {
        name: to_all_rows(x, elsewhere=1.0 if name == "top_prob" else 0.0)
        for name, x in statistics.items()
    }
    return all_statistics, to_all_rows(gradient)


def _statistics(rows: Rows, logits: Tensor, is_read: Tensor) -> dict[str, Tensor]:
    """Return the statistics of the rows that are read by name, [m] each, with autograd graphs.

    The log-prob of a target outside the vocabulary is NaN.

    logits    [m, V], of the m rows that are read, before the transform
    is_read   bool [n], which of `rows` these are
    """
    dtype = logits.dtype
    log_p = transformed(logits, rows.transform.select(is_read)).log_softmax(-1)
    p = log_p.exp()
    finite_log_p = log_p.masked_fill(p == 0, 0.0)
    targets = rows.targets[is_read]
    is_id = (targets >= 0) & (targets < logits.shape[-1])
    target_logps = log_p.gather(1, torch.where(is_id, targets, 0)[:, None])[:, 0]
    statistics = {
        "logps": target_logps * torch.where(is_id, 1.0, torch.nan).to(dtype),
        "entropy": -(p * finite_log_p).sum(-1),
        "sum_squares": p.square().sum(-1),
        "top_prob": p.amax(-1),
    }
    if rows.reference is not None:
        direction = rows.reference.direction
        mixture = rows.reference.mixture
        reference = rows.reference.logits.reshape(rows.count, logits.shape[-1])[is_read].to(dtype)
        transform = rows.reference.transform.select(is_read)
        log_q = transformed(reference, transform).log_softmax(-1)
        statistics["divergence"] = oracle.divergence(log_p, log_q, direction, mixture)
    return statistics


def total_variation_errors(rows: Rows) -> tuple[Tensor | float, Tensor | float]:
    """Return how far fp32 rounding may move a total variation [n] and its gradient [n, V].

    Both depend on the sign of the log-ratio of each id. If a log-ratio is not larger than its
    rounding error in fp32, either sign is right. Other divergences depend on small log-ratios
    quadratically, so that (0.0, 0.0) is returned for them, and for rows without a divergence.
    """
    if (
        rows.reference is None
        or rows.reference.direction != "tv"
        or "divergence" not in rows.upstream
    ):
        return 0.0, 0.0
    # z and p are the logits and probabilities of the policy, w and q those of the reference.
    z = transformed(rows.logits.double().flatten(0, 1), rows.transform)
    w = transformed(rows.reference.logits.double().flatten(0, 1), rows.reference.transform)
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
    is_plain = rows.transform is PLAIN and rows.reference.transform is PLAIN
    # Logits of similar size that are not transformed are subtracted without a rounding error.
    is_exact = (distance_of_maxima <= 4.0) & is_plain
    rounding = 4 * EPS * torch.where(is_exact, size, size + size_of_logits)
    rounding = torch.where(log_ratio.isfinite(), rounding, 0.0)

    is_near_zero = ((log_ratio != 0) & (log_ratio.abs() <= rounding)).double()
    value_error = (torch.maximum(p, q) * rounding).sum(-1) / 2.0
    gradient_error = p * (is_near_zero + (p * is_near_zero).sum(-1, keepdim=True))
    factor = abs(rows.transform.scale) * _inverse_temperatures(rows)
    factor = factor * rows.upstream["divergence"].double().abs()[:, None]
    return value_error.nan_to_num(0.0), (gradient_error * factor).nan_to_num(0.0)


def _inverse_temperatures(rows: Rows) -> Tensor:
    """Return the absolute inverse temperature of each row, float64 [n, 1].

    It is [1, 1] if all rows have the same one.
    """
    return torch.as_tensor(rows.transform.inverse_temperature).double().view(-1, 1).abs()


def assert_near_float64(rows: Rows, *results: KernelResults) -> None:
    """Assert that each result is as near to float64 as a careful computation in fp32.

    The tolerance is the error of `exact` in fp32, plus a few roundings. Where float64 is NaN, the
    result is NaN or inf, except for losses.

    rows      the rows that the kernels have computed
    results   of kernels for these rows, from `two_passes` or `fused_loss_call`
    """
    expected, expected_gradient = exact(rows)
    in_fp32, gradient_in_fp32 = exact(rows, torch.float32)
    value_error, gradient_error = total_variation_errors(rows)
    logit_size = _size_of_logits(rows, expected_gradient.shape)

    # The rounding of the transformed logits, [n].
    logit_rounding = 0.0 if rows.transform is PLAIN else 0.5 * EPS * logit_size[:, 0]
    for statistics, _ in results:
        for name, x in statistics.items():
            fp32_error = (in_fp32[name] - expected[name]).abs()
            if name == "divergence":
                tolerance = fp32_error + 3e-6 * expected[name] + 1e-12 + value_error
                tolerance = tolerance + logit_rounding * expected[name].abs().sqrt()
            else:
                is_finite = expected[name].isfinite()
                largest_error = fp32_error[is_finite].amax() if is_finite.any() else 0.0
                tolerance = 1.5 * largest_error + 8 * EPS * (1 + expected[name].abs())
                tolerance = tolerance + logit_rounding
            _check_statistic(name, x, expected[name], tolerance)

    # The size of the terms of the gradient of a row, without the factor of the transform.
    gradient_size = torch.zeros(rows.count, 1, dtype=torch.float64)
    for name, grad in rows.upstream.items():
        statistic_size = 1.0 if name == "logps" else 1 + expected[name].abs()
        term = torch.where(grad == 0, 0.0, grad.double().abs() * statistic_size)
        gradient_size[:, 0] += term
    fp32_error = (gradient_in_fp32 - expected_gradient).abs().amax(-1, keepdim=True)
    # A few roundings of each term, and the rounding of a logit in the exponent of a probability.
    rounding = EPS * (4 + logit_size) * gradient_size
    rounding = rounding * abs(rows.transform.scale) * _inverse_temperatures(rows)
    tolerance = fp32_error + rounding
    if rows.reference is not None:
        # The divergence is subtracted from each log-ratio. Large ones cancel.
        largest = expected_gradient.abs().amax(-1, keepdim=True)
        tolerance = tolerance + 1e-6 * largest + gradient_error
    for _, gradient in results:
        _check_gradient(gradient, expected_gradient, tolerance, gradient_size)


def _size_of_logits(rows: Rows, shape: torch.Size) -> Tensor:
    """Return the largest absolute transformed logit of each row, at least 1, float64 [n, 1].

    Logits more than 200 below the maximum have no probability and are left out.

    shape   (n, V)
    """
    z = transformed(rows.logits.double().reshape(shape), rows.transform)
    largest = z.nan_to_num(neginf=-1e300).amax(-1, keepdim=True)
    counts = z.isfinite() & (z > largest - 200.0)
    return torch.where(counts, z.abs(), 0.0).amax(-1, keepdim=True).clamp(min=1.0)


def _check_statistic(name: str, x: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """Assert that a statistic [n] is within the tolerance, and inf or NaN where float64 is.

    A loss may have any value where float64 is NaN. Divergence, entropy and sum_squares must not be
    negative. The largest error, relative to 1 + |expected|, is noted under the name.

    x          the statistic of a kernel
    expected   float64 [n]
    tolerance  [n], the largest allowed absolute error
    """
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
    # 2**-24 is the smallest positive number of fp16.
    smallest = 2.0**-24 if gradient.dtype == torch.float16 else 0.0
    storage_rounding = UNIT[gradient.dtype] * expected.abs() + smallest
    error = (gradient.double() - expected).abs() - storage_rounding
    is_finite = expected.isfinite().all(-1)
    note("gradients", (error / (gradient_size + 1e-30))[is_finite])
    tolerance = tolerance.expand_as(error)
    excess = (error - tolerance)[is_finite]
    assert (error <= tolerance)[is_finite].all(), (
        f"gradient: {excess.max():.3g} above the tolerance"
    )


def assert_equal_results(actual: KernelResults, expected: KernelResults, what: object = "") -> None:
    """Assert that two results are equal. NaN equals NaN.

    actual     its names must be among those of `expected`
    what       for the error message, what was compared
    """
    statistics, gradient = actual
    expected_statistics, expected_gradient = expected
    values = {**statistics, "gradient": gradient}
    expected_values = {**expected_statistics, "gradient": expected_gradient}
    for name, x in values.items():
        y = expected_values[name]
        # torch.equal treats NaN as unequal, so it is replaced by a number that no result has.
        assert torch.equal(x.nan_to_num(7e30), y.nan_to_num(7e30)), (what, name)


def row_pairs(vocab: int) -> tuple[Tensor, Tensor]:
    """Return logits of ten rows of a policy and of a reference, fp32 [10, vocab] each.

    Row i of one belongs to row i of the other. There are flat and peaked rows, rows near one-hot, a
    disjoint pair, equal pairs, logits far from 0, and a reference that differs at one id. In a row
    of each, the maximum is the last id.
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
    """Return the (row, id) pairs of rows with these ids, row after row.

    lists   the ids of each row. The id -1 makes a pair that the kernels must leave out.
    """
    counts = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
    ids = torch.tensor([i for ids in lists for i in ids], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Pairs(ids, offsets, torch.repeat_interleave(torch.arange(len(lists)), counts))


def random_slots(n: int, vocab: int) -> Pairs:
    """Return (row, id) pairs of n rows with 0 to 10 ids each, the same in each call.

    Ids repeat. Every fourth id of a row is -1, which marks an unused pair. Id 0 is in every third
    row, id 1 in none.
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
    """Return a random value for each pair, fp32 [num_pairs]. Every seventh value is 0."""
    values = torch.randn(slots.ids.shape, generator=torch.Generator().manual_seed(1))
    values[::7] = 0.0
    return values


def matrix(rows: int, width: int, dtype: torch.dtype, seed: int, gap: int = 0) -> Tensor:
    """Return normal random numbers [rows, width] with the standard deviation 1/2.

    dtype   of the result, in which the fp32 numbers are rounded
    seed    of the numbers, which are the same in each call
    gap     number of unused elements between rows: strides are (width + gap, 1)
    """
    numbers = torch.randn(rows, width + gap, generator=torch.Generator().manual_seed(seed)) / 2
    return numbers.to(dtype)[:, gap // 2 : gap // 2 + width]
