"""The softmax of rows of logits: sums over each row, and the statistics and gradients that follow.

z are the transformed logits of a row, p = softmax(z). Every loss of the package depends on z
through statistics of p (log-prob of the target, entropy, ...), and their gradients have one form:

    LogitRows              the rows of a kernel call
    SoftmaxSums            sums over each row, from which all statistics follow
    GradientCoefficients   d loss / d z of each row

Sums and coefficients are tables: fp32 tensors [num_names, num_rows] with the names of their rows.
All other vectors are [num_rows].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import plain
from ..formulas.ops import times
from .divergence import (
    NO_DIVERGENCE,
    PSI_LIMIT,
    TWO_PASS_DIRECTIONS,
    DivergenceKind,
    divergence_of_mixture,
    logit_differences,
    merge_log_ratio_sums,
    phi,
)

#: Logarithms of probabilities are at least this where they are multiplied by 0: 0 * inf is NaN.
MIN_LOGP = -1e4


class RowTransform(NamedTuple):
    """The transform of raw logits x of each row into the logits z of the softmax:

        z = softcap * tanh(x * scale / softcap) * inverse_temperature
        z = x * scale * inverse_temperature                            without a softcap

    scale                 a finite number, not 0
    softcap               0 for none
    inverse_temperature   1 / temperature: a number, or fp32 [num_rows]

    The row kernels apply it while they read the raw logits. C++ does so in csrc/softmax_rows.h:
    `FusedTransform` multiplies 1 / temperature into one factor, and `transform_logits` applies it;
    `TargetLogit` calls it for the logit of the target, from which `Softmax.logp` computes the
    log-prob. Triton does so in core/backends/triton/softmax_rows.py, eager PyTorch in
    `transform_rows`. Single logits of (row, id) pairs go through `transform_pairs`.
    """

    scale: float
    softcap: float
    inverse_temperature: float | Tensor

    def select(self, rows: slice | Tensor) -> RowTransform:
        """Return the transform of some of the rows.

        Only a tensor of temperatures has different values for different rows.

        rows   slice, or int64 [num_selected]
        """
        inverse = self.inverse_temperature
        if isinstance(inverse, float):
            return self
        return self._replace(inverse_temperature=inverse[rows])

    def without_wrappers(self) -> RowTransform:
        """Return the same transform without gradients and without the wrappers of torch.func.

        Under torch.func a tensor of temperatures is a wrapper, which kernels cannot read.
        """
        inverse = self.inverse_temperature
        if isinstance(inverse, float):
            return self
        return self._replace(inverse_temperature=plain(inverse.detach()))

    def transform_pairs(self, logits: Tensor, row_ids: Tensor) -> Tensor:
        """Return z = transform(x) of single logits, fp32 [num_pairs].

            z = softcap * tanh(x * scale / softcap) / temperature
            z = x * scale / temperature                              without a softcap

        logits    x, the raw logits, fp32 [num_pairs]. They are returned themselves if the transform
                  changes nothing.
        row_ids   int64 [num_pairs], the row of each logit, which may have its own temperature
        """
        inverse = self.select(row_ids).inverse_temperature
        if self.softcap:  # 0 stands for none
            return torch.tanh(logits * (self.scale / self.softcap)) * (self.softcap * inverse)
        factor = self.scale * inverse
        is_identity = isinstance(factor, float) and factor == 1.0
        return logits if is_identity else logits * factor

    def transform_rows(self, logits: Tensor, out: Tensor) -> Tensor:
        """Return z = transform(x) of whole rows, fp32 [num_rows, V].

            z = softcap * tanh(x * scale / softcap) / temperature
            z = x * scale / temperature                              without a softcap

        The result is written to `out`, with one exception: if the logits are fp32 and the transform
        changes nothing, they are returned themselves, and `out` is not written.

        logits   x, the raw logits [num_rows, V], as many rows as there are inverse temperatures
        out      fp32 [num_rows, V], which may be the logits
        """
        inverse = self.inverse_temperature
        factor = inverse if isinstance(inverse, float) else inverse[:, None]
        has_unit_factor = isinstance(factor, float) and factor * self.scale == 1.0
        is_identity = has_unit_factor and not self.softcap
        if is_identity and logits.dtype == torch.float32:
            return logits
        z = out.copy_(logits)
        if self.softcap:
            return z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap * factor)
        return z if is_identity else z.mul_(self.scale * factor)


#: The identity, for logits that are transformed already.
TRANSFORMED = RowTransform(1.0, 0.0, 1.0)


class ReferenceRows(NamedTuple):
    """A reference's rows of logits, for the divergence of the policy from it. They get no gradient.

    logits      [A, T, V], the shape of the policy's logits; fp32, bf16 or fp16, not necessarily the
                policy's dtype
    transform   scale, softcap and temperature of the reference's rows
    kind        which divergence it is
    """

    logits: Tensor
    transform: RowTransform
    kind: DivergenceKind

    @property
    def direction(self) -> str:
        """The direction of the divergence: "reverse", "forward", "jsd" or "tv"."""
        return self.kind.direction

    @property
    def mixture(self) -> float:
        """The weight of the reference in "jsd", else 0."""
        return self.kind.mixture

    def select(self, rows: slice | Tensor) -> ReferenceRows:
        """Return the reference for some of the rows of a call.

        The temperatures are selected. The logits stay whole, because the kernels know by
        `LogitRows.row_range` which of their rows belong to a call.

        rows   slice, or int64 [num_selected]
        """
        return self._replace(transform=self.transform.select(rows))


class LogitRows(NamedTuple):
    """The rows of logits of one kernel call, in the order of memory. Vectors are [num_rows].

    logits      [A, T, V], A groups of T rows, with any strides in A and T and unit stride in V;
                fp32, bf16 or fp16
    targets     int64
    mask        bool: rows to process; None processes all
    transform   scale, softcap and temperature of each row
    reference   a reference's rows, or None
    row_range   (start, stop): only these of the A * T rows of logits, num_rows = stop - start. None
                is all rows, num_rows = A * T.
    batch_rows  int64: which row of the batch each row is, for kernels that hold data of the whole
                batch. None if the logits are those of the whole batch: row i is row first_row + i.
    """

    logits: Tensor
    targets: Tensor
    mask: Tensor | None = None
    transform: RowTransform = TRANSFORMED
    reference: ReferenceRows | None = None
    row_range: tuple[int, int] | None = None
    batch_rows: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows of the call: those of `targets`, not all of `logits`."""
        return self.targets.numel()

    @property
    def first_row(self) -> int:
        """The number of the first row of the call among the A * T rows of logits."""
        return 0 if self.row_range is None else self.row_range[0]

    def slice_rows(self, start: int, stop: int) -> LogitRows:
        """Return the rows start to stop - 1 of the call, as a call of their own.

        The logits stay whole, with another row_range. Vectors such as targets are sliced.
        """
        if stop - start == self.num_rows:
            return self  # slicing the vectors would take longer than a small batch
        rows = slice(start, stop)
        return LogitRows(
            logits=self.logits,
            targets=self.targets[rows],
            mask=None if self.mask is None else self.mask[rows],
            transform=self.transform.select(rows),
            reference=None if self.reference is None else self.reference.select(rows),
            row_range=(self.first_row + start, self.first_row + stop),
            batch_rows=None if self.batch_rows is None else self.batch_rows[rows],
        )


#: The sums that every call computes:
#:
#:     max_logit         max_j z_j
#:     sum_exp           sum_j exp(z_j - max_logit)
#:     target_logit      z of the target; NaN if it is outside of [0, V)
BASIC_SUMS = ("max_logit", "sum_exp", "target_logit")

#: These and further sums of the policy's row:
#:
#:     sum_exp_shifted   sum_j exp(z_j - max_logit) (z_j - max_logit), 0 where the exponential is 0:
#:                       for the entropy
#:     sum_exp_squared   sum_j exp(2 (z_j - max_logit)): for the sum of p^2
#:     argmax            the first id whose z is the maximum, -1 if there is none; the bits of int32
POLICY_SUMS = (*BASIC_SUMS, "sum_exp_shifted", "sum_exp_squared", "argmax")

#: Sums with a reference, whose transformed logits are w. With p_j = exp(z_j - max_logit),
#: q_j = exp(w_j - reference_max_logit), neither divided by its sum, d_j = log(p_j / q_j), see
#: `divergence.logit_differences`, and psi(x) = exp(x) - 1 - x:
#:
#:     reference_max_logit, reference_sum_exp   as max_logit and sum_exp
#:     sum_log_ratio           sum_j p_j d_j; "forward" swaps p and q: -sum_j q_j d_j
#:     sum_log_ratio_excess    sum_j p_j psi(-d_j); "forward": sum_j q_j psi(d_j)
REFERENCE_SUMS = (
    "reference_max_logit",
    "reference_sum_exp",
    "sum_log_ratio",
    "sum_log_ratio_excess",
)

#: Two sums over p and q divided by their sums, see `divergence.mixture_terms`. They take a second
#: pass over the row, `Backend.run_mixture_kernel`, because sum_exp is not known in the first.
MIXTURE_SUMS = ("mixture_policy", "mixture_reference")

#: The sums that the first pass of the C++ and Triton kernels computes, in the order of `enum Sum`
#: in csrc/kernels.h. Eager PyTorch computes others of the first pass.
SUMS_OF_KERNELS = (*POLICY_SUMS, *REFERENCE_SUMS)

#: All sums, in the order of the rows of a table. A sum that the kernels do not know would stand
#: before MIXTURE_SUMS: a table begins with what the kernels compute and ends with the second pass.
SUMS = (*SUMS_OF_KERNELS, *MIXTURE_SUMS)

#: The values of the sums in masked rows. Log-prob, entropy and divergence are then exactly 0.
MASKED_VALUES = {
    **dict.fromkeys(SUMS, 0.0),
    "sum_exp": 1.0,
    "argmax": -1,
    "reference_sum_exp": 1.0,
}

#: Statistics in addition to the log-prob, and the sums that they need. The kernels compute
#: sum_exp_squared only together with sum_exp_shifted.
STATISTICS: dict[str, tuple[str, ...]] = {
    "entropy": ("sum_exp_shifted",),
    "sum_squares": ("sum_exp_shifted", "sum_exp_squared"),
    "top_prob": (),
    "top_id": ("argmax",),
    "logsumexp": (),
    "divergence": REFERENCE_SUMS,
}
#: The statistics that have a gradient.
DIFFERENTIABLE = ("entropy", "sum_squares", "logsumexp", "divergence")


@functools.lru_cache(maxsize=256)
def sums_for(statistics: tuple[str, ...], direction: str = "") -> tuple[str, ...]:
    """Return the names of the softmax sums that statistics need, in the order of SUMS.

    A softmax sum is a sum or maximum over a row of logits, such as "sum_exp". The result always
    includes BASIC_SUMS, for the log-prob.

    statistics   names of STATISTICS, for example "entropy"
    direction    of the divergence, if "divergence" is one of the statistics; else ""
    """
    needed = set(BASIC_SUMS)
    for name in statistics:
        needed.update(STATISTICS[name])
    if "divergence" in statistics and direction in TWO_PASS_DIRECTIONS:
        needed.update(MIXTURE_SUMS)
    return tuple(name for name in SUMS if name in needed)


def concatenate(tables: Sequence[Tensor], dim: int) -> Tensor:
    """Return torch.cat(tables, dim), without a copy if there is only one table."""
    return tables[0] if len(tables) == 1 else torch.cat(list(tables), dim)


class LogRatioSums(NamedTuple):
    """Numbers from which "reverse" or "forward" follows, fp32 or fp64 [num_rows] each.

    e_j and f_j are exp(z_j - max z) and exp(w_j - max w) of policy and reference (for "forward" of
    reference and policy), E and F their sums, and d_j = log(e_j / f_j).

    mean_log_ratio   sum_j e_j d_j / E
    excess           sum_j e_j psi(-d_j) / E, with psi(x) = exp(x) - 1 - x
    sum_ratio        F / E - 1
    log_sum_ratio    log(F / E)
    is_small         whether the d_j are so small that sum_ratio is accurate
    """

    mean_log_ratio: Tensor
    excess: Tensor
    sum_ratio: Tensor
    log_sum_ratio: Tensor
    is_small: Tensor


@dataclass(eq=False)
class SoftmaxSums:
    """Sums over each row, and the statistics that follow from them. `merge_shards` merges shards.

    values   fp32 [num_names, num_rows], a row for each name
    names    some of SUMS, in their order
    kind     of the divergence, if the sums are with a reference

    A row of only -inf has the maximum -inf and the sum 0. Its log-prob and entropy are NaN, as in
    torch.log_softmax. A NaN among the logits is a NaN in sum_exp, whatever the maximum is.
    """

    values: Tensor
    names: tuple[str, ...]
    kind: DivergenceKind = NO_DIVERGENCE

    @classmethod
    def empty(
        cls,
        names: tuple[str, ...],
        num_rows: int,
        device: torch.device,
        reference: ReferenceRows | None = None,
    ) -> SoftmaxSums:
        """Return a table of sums for num_rows rows, whose values are not set yet.

        names       of the sums, such as "sum_exp": some of SUMS in their order
        device      device of the table
        reference   gives the kind of the divergence; None: there is no reference
        """
        values = torch.empty(len(names), num_rows, dtype=torch.float32, device=device)
        return cls(values, names, NO_DIVERGENCE if reference is None else reference.kind)

    @classmethod
    def masked(
        cls,
        names: tuple[str, ...],
        num_rows: int,
        device: torch.device,
        reference: ReferenceRows | None = None,
    ) -> SoftmaxSums:
        """Return sums of num_rows masked rows, with which log-prob and entropy are exactly 0.

        names       of the sums, such as "sum_exp": some of SUMS in their order
        device      device of the table
        reference   gives the kind of the divergence; None: there is no reference
        """
        sums = cls.empty(names, num_rows, device, reference)
        sums.values.zero_()
        # log-prob = target_logit - max_logit - log(sum_exp) is 0 - 0 - log(1).
        for name in names:
            if MASKED_VALUES[name] != 0:
                sums[name].fill_(MASKED_VALUES[name])
        return sums

    def __getitem__(self, name: str) -> Tensor:
        """Return a named sum over each row of logits, fp32 [num_rows], as a view of `values`.

        "argmax" is int32: the table stores the bits of int32 numbers in an fp32 row, so that any id
        is exact.

        name   one of `names`, for example "sum_exp"
        """
        row = self.values[self.names.index(name)]
        return row.view(torch.int32) if name == "argmax" else row

    def set_sums(self, names: tuple[str, ...], values: Tensor) -> None:
        """Set the named sums to values [len(names), num_rows].

        The names must follow one another in `self.names`.
        """
        first = self.names.index(names[0])
        self.values[first : first + len(names)] = values

    def select(self, rows: slice | Tensor) -> SoftmaxSums:
        """Return the sums of some of the rows of logits.

        rows   slice, or int64 [num_selected]
        """
        return SoftmaxSums(self.values[:, rows], self.names, self.kind)

    @property
    def direction(self) -> str:
        """The direction of the divergence ("reverse", ...), "" without a reference."""
        return self.kind.direction

    # ---- statistics, each fp32 [num_rows]

    @property
    def max_logit(self) -> Tensor:
        """max_j z_j, the largest logit of the row."""
        return self.values[0]

    @property
    def sum_exp(self) -> Tensor:
        """sum_j exp(z_j - max_logit)."""
        return self.values[1]

    @property
    def logsumexp(self) -> Tensor:
        """log sum_j exp(z_j) = max_logit + log(sum_exp)."""
        return self.max_logit + torch.log(self.sum_exp)

    @property
    def logps(self) -> Tensor:
        """Log-prob of the target: target_logit - max_logit - log(sum_exp)."""
        max_logit, sum_exp, target_logit, *_ = self._accurate_values().unbind()  # BASIC_SUMS first
        return ((target_logit - max_logit) - torch.log(sum_exp)).float()

    @property
    def entropy(self) -> Tensor:
        """Entropy of the row in nats, never negative."""
        return self.logps_and_entropy()[1]

    def logps_and_entropy(self) -> tuple[Tensor, Tensor]:
        """Return (log-prob of the target, entropy), fp32 [num_rows] each, from one logarithm.

            log-prob = target_logit - max_logit - log(sum_exp)
            entropy  = log(sum_exp) - sum_exp_shifted / sum_exp

        sum_exp is sum_j exp(z_j - max_logit), and sum_exp_shifted weights each of its terms by
        z_j - max_logit.
        """
        values = self._accurate_values().unbind()
        max_logit, sum_exp, target_logit, *_ = values  # BASIC_SUMS come first
        sum_exp_shifted = values[self.names.index("sum_exp_shifted")]
        log_sum = torch.log(sum_exp)
        logps = ((target_logit - max_logit) - log_sum).float()
        # Rounding can make the entropy of a one-hot row slightly negative. clamp keeps NaN.
        entropy = (log_sum - sum_exp_shifted / sum_exp).clamp(min=0.0).float()
        return logps, entropy

    @property
    def sum_squares(self) -> Tensor:
        """sum_j p_j^2: the probability that two draws from the row are equal."""
        return self["sum_exp_squared"] / (self.sum_exp * self.sum_exp)

    @property
    def top_prob(self) -> Tensor:
        """The largest probability of the row.

        It is 1 / sum_exp, because sum_exp is relative to the largest logit, whose own exponential
        is 1. It is NaN if all logits are -inf: sum_exp is 0 then.
        """
        return torch.where(self.sum_exp == 0, torch.nan, self.sum_exp.reciprocal())

    @property
    def top_id(self) -> Tensor:
        """The id of the largest probability, int64 [num_rows]; the first if several are equal.

        It is -1 in masked rows.
        """
        return self["argmax"].long()

    @functools.cached_property
    def divergence(self) -> Tensor:
        """Divergence of the policy p from the reference q, [num_rows], never negative.

        The direction says which:

            "reverse"   KL(p || q), infinite where q is 0 and p is not
            "forward"   KL(q || p), infinite where p is 0 and q is not
            "jsd"       b KL(q || m) + (1 - b) KL(p || m), with m = (1 - b) p + b q and b = mixture
            "tv"        sum_j |p_j - q_j| / 2
        """
        if self.direction in TWO_PASS_DIRECTIONS:
            return divergence_of_mixture(
                self.direction, self["mixture_policy"], self["mixture_reference"], self.kind.mixture
            )
        sums = self._log_ratio_sums
        # KL = mean_log_ratio + log_sum_ratio, see `LogRatioSums`. For nearly equal rows the two
        # cancel. mean_log_ratio = excess - sum_ratio and log_sum_ratio = log(1 + sum_ratio). So KL
        # is also excess - phi(sum_ratio), with phi(x) = x - log(1 + x), in which nothing cancels.
        of_near_rows = sums.excess - phi(sums.sum_ratio)
        of_far_rows = sums.mean_log_ratio + sums.log_sum_ratio
        # Rounding can make the KL slightly negative. clamp keeps NaN.
        return torch.where(sums.is_small, of_near_rows, of_far_rows).clamp(min=0.0).float()

    @property
    def log_sum_ratio(self) -> Tensor:
        """log(reference_sum_exp / sum_exp), fp32 [num_rows].

        z and w are the logits of policy and reference, p and q their softmax. This number turns
        d_j = (z_j - max z) - (w_j - max w) into log p_j - log q_j = d_j + log_sum_ratio.
        """
        # `LogRatioSums` has policy and reference swapped for "forward", which changes the sign.
        log_sum_ratio = self._log_ratio_sums.log_sum_ratio
        return (-log_sum_ratio if self.direction == "forward" else log_sum_ratio).float()

    @property
    def gradient_center(self) -> Tensor:
        """The mean that the gradient of the divergence subtracts from each column, [num_rows].

        It is `center` in `divergence.divergence_gradient`, which has the formulas: KL(p || q) for
        "reverse", a sum of the second pass for "jsd" and "tv", and 0 for "forward", whose gradient
        subtracts nothing.
        """
        if self.direction in TWO_PASS_DIRECTIONS:
            return self["mixture_policy"]
        if self.direction == "reverse":
            return self.divergence
        return torch.zeros_like(self.sum_exp)

    def statistics(self, names: tuple[str, ...], mask: Tensor | None) -> list[Tensor]:
        """Return the log-probs and then the named statistics, [num_rows] each.

        They are fp32, and 0 in masked rows. "top_id" is int64, and -1 in masked rows.

        names   some of STATISTICS
        mask    bool [num_rows], the mask that the sums were computed with
        """
        if "entropy" in names:
            logps, entropy = self.logps_and_entropy()
        else:
            logps = self.logps
        results = [logps]
        for name in names:
            values = entropy if name == "entropy" else getattr(self, name)
            if name == "top_prob" and mask is not None:
                # The other statistics are 0 by MASKED_VALUES. This one, 1 / sum_exp, would be 1.
                values = torch.where(mask, values, 0.0)
            results.append(values)
        return results

    def _accurate_values(self) -> Tensor:
        """Return the table of sums, [num_names, num_rows], converted to fp64 on a CPU.

        Logarithms of the sums are then computed in fp64 and rounded to fp32, as the C++ kernels do.
        So log-probs are the same, whether torch or a kernel computes them.
        """
        return self.values.double() if self.values.device.type == "cpu" else self.values

    @functools.cached_property
    def _log_ratio_sums(self) -> LogRatioSums:
        """The sums over log-ratios, divided by the sum of exponentials that weights them.

        For "forward" policy and reference are swapped, so that one set of formulas serves both.
        """
        values = dict(zip(self.names, self._accurate_values(), strict=True))
        sum_p = values["sum_exp"]
        sum_q = values["reference_sum_exp"]
        if self.direction == "forward":
            sum_p, sum_q = sum_q, sum_p
        mean_log_ratio = values["sum_log_ratio"] / sum_p
        excess = values["sum_log_ratio_excess"] / sum_p
        # sum_ratio follows from sums over d, and not from sum_q / sum_p, so that it keeps its
        # digits if the rows are nearly equal. For large d it has fewer digits than the sums
        # themselves, and it is NaN if both terms are infinite; is_small is False then.
        sum_ratio = excess - mean_log_ratio
        is_small = (mean_log_ratio.abs() <= PSI_LIMIT) & (excess <= PSI_LIMIT)
        log_sum_ratio = torch.where(
            is_small, torch.log1p(sum_ratio), torch.log(sum_q) - torch.log(sum_p)
        )
        return LogRatioSums(
            mean_log_ratio=mean_log_ratio,
            excess=excess,
            sum_ratio=sum_ratio,
            log_sum_ratio=log_sum_ratio,
            is_small=is_small,
        )


#: The coefficients of the gradient that the C++ and Triton kernels take, in the order of
#: `enum Coefficient` in csrc/kernels.h. A gradient with other coefficients runs in eager PyTorch.
COEFFICIENTS_OF_KERNELS = ("target", "constant", "logp", "prob", "divergence")
#: All coefficients, in the order of the rows of a table. "target" is in every table.
COEFFICIENTS = COEFFICIENTS_OF_KERNELS


class GradientCoefficients(NamedTuple):
    """The numbers of a row from which the gradient of its logits follows:

        d loss / d z_j = target * (1[j = y] - p_j)
                       + p_j * (constant + logp * log p_j + prob * p_j)
                       + divergence * G_j

    where y is the row's target, p its softmax and G the gradient of the divergence, see
    `divergence.divergence_gradient`. "target", "constant", "logp", "prob" and "divergence" are the
    names of the coefficients.

    values   fp32 [num_names, num_rows], a row for each name
    names    some of COEFFICIENTS, in their order. The others are 0 in all rows.
    """

    values: Tensor
    names: tuple[str, ...]

    @classmethod
    def from_gradients(
        cls,
        sums: SoftmaxSums,
        grads: dict[str, Tensor],
        mask: Tensor | None,
        *,
        entropy: Tensor | None = None,
    ) -> GradientCoefficients:
        """Return the coefficients of d loss / d z from upstream gradients d loss / d statistic.

        By the chain rule, d loss / d z_j is the sum of grads[name] * (d statistic / d z_j) over the
        statistics. The comments below give d statistic / d z_j. The sum has the form

            d loss / d z_j = target * (1[j = y] - p_j)
                           + p_j * (constant + logp * log p_j + prob * p_j)
                           + divergence * G_j

        where p is the softmax of the row, y its target and G_j the derivative of the divergence.
        The coefficients are "target", "constant", "logp", "prob" and "divergence".

        sums      the sums of the rows
        grads     upstream gradients [num_rows] of "logps" and of statistics in DIFFERENTIABLE
        mask      bool [num_rows]: rows that may have a gradient; None: all. The upstream gradients
                  of other rows count as 0, also if they are NaN.
        entropy   the entropy of each row, if the caller has it; None: it is computed if needed
        """

        def to_masked_fp32(grad: Tensor) -> Tensor:
            """Return an upstream gradient in fp32, with 0 in masked rows."""
            grad = grad.float()
            return grad if mask is None else torch.where(mask, grad, 0.0)

        grads = {name: to_masked_fp32(grad) for name, grad in grads.items()}
        coefficients = {}
        if "logps" in grads:  # d logp / d z_j = 1[j = y] - p_j
            coefficients["target"] = grads["logps"]
        else:  # kernels take this coefficient in any case
            any_gradient = next(iter(grads.values()))
            coefficients["target"] = torch.zeros_like(any_gradient)

        # Terms of the coefficient "constant", which are added up.
        # `times` is a product that is 0 where the gradient is 0, even if the statistic is infinite.
        constants = []
        if "logsumexp" in grads:  # d logsumexp / d z_j = p_j
            constants.append(grads["logsumexp"])
        if "entropy" in grads:  # d entropy / d z_j = -p_j (log p_j + entropy)
            if entropy is None:
                entropy = sums.entropy
            coefficients["logp"] = -grads["entropy"]
            constants.append(times(coefficients["logp"], entropy))
        if "sum_squares" in grads:  # d sum p^2 / d z_j = 2 p_j (p_j - sum p^2)
            coefficients["prob"] = 2.0 * grads["sum_squares"]
            constants.append(times(-coefficients["prob"], sums.sum_squares))
        if constants:
            coefficients["constant"] = sum(constants[1:], constants[0])
        if "divergence" in grads:  # d divergence / d z_j = G_j
            coefficients["divergence"] = grads["divergence"]
        return cls.stack(coefficients)

    @classmethod
    def stack(cls, coefficients: dict[str, Tensor]) -> GradientCoefficients:
        """Return coefficients, fp32 [num_rows] each, as one table [num_names, num_rows].

        coefficients   by name; "target" must be one of them. Names that are missing stand for 0.
        """
        names = tuple(name for name in COEFFICIENTS if name in coefficients)
        rows = [coefficients[name] for name in names]
        if len(rows) == 1:
            return cls(rows[0].contiguous().unsqueeze(0), names)
        return cls(torch.stack(rows), names)

    def get(self, name: str) -> Tensor | None:
        """Return a coefficient of the gradient, fp32 [num_rows]; None if it is 0 in all rows.

        name   one of COEFFICIENTS. Those that are not in the table are 0 in all rows.
        """
        return self.values[self.names.index(name)] if name in self.names else None

    @property
    def target(self) -> Tensor:
        """The coefficient "target", [num_rows]: d loss / d log-prob of the target."""
        return self.values[0]

    def select(self, rows: slice | Tensor) -> GradientCoefficients:
        """Return the coefficients of some of the rows.

        rows   slice, or int64 [num_selected]
        """
        return self._replace(values=self.values[:, rows])

    @property
    def nonzero(self) -> Tensor:
        """Whether any coefficient of a row is not 0, bool [num_rows].

        The gradient of the other rows is exactly 0.
        """
        if len(self.names) == 1:
            return self.target != 0
        return (self.values != 0).any(0)


# ---- merging the sums of shards of a row


class ShardWeights(NamedTuple):
    """Factors that turn the sums of shards, relative to their own maxima, into sums of the row.

        exp(z_j - max of the row) = factor * exp(z_j - max of the shard)

    max_logit   fp32 [num_rows], the maximum of the whole row
    shift       fp32 [num_shards, num_rows], maximum of the shard - maximum of the row; 0 if the
                shard has only -inf
    factor      exp(shift), the same shape; 0 if the shard has only -inf
    """

    max_logit: Tensor
    shift: Tensor
    factor: Tensor

    @classmethod
    def from_max_logits(cls, max_logits: Tensor) -> ShardWeights:
        """Return the maximum of each row, and the shift and factor of each of its shards.

        A shard is a part of the vocabulary. Its sums of exponentials are relative to its own
        maximum, and times `factor` they are relative to the maximum of the row.

            shift = maximum of the shard - maximum of the row,  factor = exp(shift)

        Both are 0 for a shard of only -inf, because -inf - -inf would be NaN.

        max_logits   fp32 [num_shards, num_rows], the largest logit of each shard
        """
        max_logit = max_logits.amax(0)
        is_empty = max_logits == -torch.inf
        shift = torch.where(is_empty, 0.0, max_logits - max_logit)
        factor = torch.where(is_empty, 0.0, shift.exp())
        return cls(max_logit, shift, factor)


def merge_shards(
    shards: list[SoftmaxSums], mask: Tensor | None, first_ids: Tensor | None
) -> SoftmaxSums:
    """Return the sums of whole rows from the sums of their shards, as online softmax merges tiles.

    A shard is a part of the vocabulary. Its sums are relative to its own maximum. With shift =
    maximum of the shard - maximum of the row, and factor = exp(shift), the sums over the row are

        sum_exp           sum of factor * sum_exp
        sum_exp_shifted   sum of factor * (sum_exp_shifted + shift * sum_exp)
        sum_exp_squared   sum of factor^2 * sum_exp_squared

    shards      sums of the first pass, with the same names
    mask        bool [num_rows]: the mask that the sums were computed with
    first_ids   int32 [num_shards, num_rows], the id of each shard's first column; needed for argmax

    A shard of only -inf, or of no column, adds nothing. The target's logit is taken from the shard
    that has it. It is NaN if no shard has it, or (shards that overlap) several do.
    """
    names = shards[0].names
    values = {name: torch.stack([sums[name] for sums in shards]) for name in names}
    weights = ShardWeights.from_max_logits(values["max_logit"])
    factor = weights.factor

    target_logits = values["target_logit"]  # NaN in a shard that does not have the target
    has_target = ~target_logits.isnan()
    target_logit = torch.where(has_target, target_logits, 0.0).sum(0)
    whole = {
        "max_logit": weights.max_logit,
        "sum_exp": (factor * values["sum_exp"]).sum(0),  # NaN if the sum of any shard is NaN
        "target_logit": torch.where(has_target.sum(0) == 1, target_logit, torch.nan),
    }
    if "sum_exp_shifted" in names:
        shifted = factor * (values["sum_exp_shifted"] + values["sum_exp"] * weights.shift)
        # 0 * inf is NaN if the maximum of a shard is far below that of the row.
        whole["sum_exp_shifted"] = torch.where(factor == 0, 0.0, shifted).sum(0)
    if "sum_exp_squared" in names:
        whole["sum_exp_squared"] = (factor * factor * values["sum_exp_squared"]).sum(0)
    if "argmax" in names:
        assert first_ids is not None
        ids = values["argmax"]  # a column of the shard
        no_id = torch.iinfo(torch.int32).max
        has_max = (values["max_logit"] == weights.max_logit) & (ids >= 0)
        first = torch.where(has_max, ids + first_ids, no_id).amin(0)
        whole["argmax"] = torch.where(first == no_id, -1, first)
    if "sum_log_ratio" in names:
        whole |= merge_reference_sums(values, weights, shards[0].direction)

    merged = SoftmaxSums(torch.empty_like(shards[0].values), names, shards[0].kind)
    for name in names:
        sums = whole[name]
        masked = sums if mask is None else torch.where(mask, sums, MASKED_VALUES[name])
        merged[name].copy_(masked)
    return merged


def merge_reference_sums(
    values: dict[str, Tensor], weights: ShardWeights, direction: str
) -> dict[str, Tensor]:
    """Return the sums over whole rows that need a reference, from the sums of vocabulary shards.

    They are fp32 [num_rows] each, by name. z_j and w_j are the logits of policy and reference:

        reference_max_logit    max_j w_j
        reference_sum_exp      sum_j exp(w_j - max w)
        sum_log_ratio          sum_j exp(z_j - max z) d_j
        sum_log_ratio_excess   sum_j exp(z_j - max z) psi(-d_j),  psi(x) = exp(x) - 1 - x

    where d_j = (z_j - max z) - (w_j - max w). The KL divergence follows from the last two. For the
    direction "forward" z and w are swapped in them, and so d_j changes its sign.

    In the sums of a shard, max z and max w are the maxima of the shard. In the results they are the
    maxima of the row. To get from one to the other, exp(z_j - max z) is multiplied by
    factor = exp(max z of the shard - max z of the row), and exp(w_j - max w) by such a factor of w.
    To d_j the difference of the two exponents is added, called shift below, the same for all j.

    values      the sums of the shards by name, fp32 [num_shards, num_rows] each
    weights     the row's max z, and the factor of each shard
    direction   of the divergence. All others than "forward" have the sums of "reverse".
    """
    max_logits = values["max_logit"]
    reference_max_logits = values["reference_max_logit"]
    reference = ShardWeights.from_max_logits(reference_max_logits)
    # (shard's max z - row's max z) - (shard's max w - row's max w)
    shift = logit_differences(
        z=max_logits,
        w=reference_max_logits,
        max_logit=weights.max_logit,
        reference_max_logit=reference.max_logit,
    )
    # If all z or all w of a shard are -inf, the shift is infinite or NaN. The log-ratio sums of
    # such a shard are 0 or infinite and stay so, whatever the shift is. So it is set to 0.
    is_empty = (max_logits == -torch.inf) | (reference_max_logits == -torch.inf)
    shift = torch.where(is_empty, 0.0, shift)
    sum_log_ratio, sum_log_ratio_excess = merge_log_ratio_sums(
        direction,
        policy_factor=weights.factor,
        reference_factor=reference.factor,
        shift=shift,
        sum_exp=values["sum_exp"],
        reference_sum_exp=values["reference_sum_exp"],
        sum_log_ratio=values["sum_log_ratio"],
        sum_log_ratio_excess=values["sum_log_ratio_excess"],
    )
    return {
        "reference_max_logit": reference.max_logit,
        "reference_sum_exp": (reference.factor * values["reference_sum_exp"]).sum(0),
        "sum_log_ratio": sum_log_ratio,
        "sum_log_ratio_excess": sum_log_ratio_excess,
    }
