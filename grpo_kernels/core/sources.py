"""Rows of logits: given, or computed from hidden states and an output head.

`GivenLogits` and `ProjectedLogits` have three differentiable methods, from which all compositions
are made: `statistics` (log-probs, entropy, ...), `statistics_of_rest` (the same without some ids of
each row) and `logits_at` (single logits). Each also has a `fused_loss`, whose gradient is computed
in the forward. `ProjectedLogits.fused_sequence_loss` does the same for sequence-level losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..checks import plain
from ..formulas.token_loss import TokenLosses, TokenLossFormula
from .autograd import (
    InputGradient,
    LossWithGradients,
    PrecomputedGradients,
    RequestedStatistics,
    StatisticsPass,
    WeightGradMemory,
    apply_function,
    check_weight_is_present,
    row_statistics,
)
from .backends import Backend
from .divergence import NO_DIVERGENCE, DivergenceKind
from .linear import (
    GradientsWanted,
    KnownGradients,
    PassInputs,
    Projection,
    ReferenceProjection,
    RowOrder,
    SumsRecorder,
    accumulation_dtype,
    gathers_rows,
    linear_softmax_sums,
    make_memory_model,
    run_pass,
    split_sequences,
)
from .loss_formulas import FormulaResult, SequenceFormula, TokenFormula, sum_losses
from .memory import converted, empty_like, zeros
from .pair_logits import GivenPairLogits, ProjectedPairLogits, local_ids
from .pairs import pairs_of_rows
from .rest_of_rows import statistics_of_rest
from .softmax import (
    GradientCoefficients,
    LogitRows,
    ReferenceRows,
    RowTransform,
    SoftmaxSums,
    sums_for,
)
from .vocab_parallel import VocabShard


@dataclass(frozen=True, eq=False)
class Reference:
    """A frozen model that the policy is compared with, and which divergence from it is computed.

    source   the reference's rows: `GivenLogits` or `ProjectedLogits`, the same type as the policy's
    kind     of the divergence; NO_DIVERGENCE if only log-probs are computed

    A pass gets the reference as `ReferenceProjection`, a row kernel as `ReferenceRows`.
    """

    source: Any
    kind: DivergenceKind


class RowSource(Protocol):
    """Rows of logits, given (`GivenLogits`) or computed from hidden states (`ProjectedLogits`).

    Losses and log-probs are compositions of the methods of this class. A row is one position, whose
    logits predict one token or several. V is the number of ids of this rank.
    """

    @property
    def transform(self) -> RowTransform:
        """What is applied to the raw logits of each row: scale, softcap and 1 / temperature."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    @property
    def num_columns(self) -> int:
        """Number of ids of this rank."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, on all ranks of a shard."""

    @property
    def device(self) -> torch.device:
        """The device of the rows."""

    def without_gradient(self) -> RowSource:
        """Return the same rows as constants, also for torch.func."""

    def with_known_order(self, mask: Tensor | None, order: RowOrder) -> RowSource:
        """Return the same rows, and remember which rows a mask selects.

        If `statistics` is then called with this very tensor as its `mask`, it takes the selected
        rows from `order`. So the host need not wait for a device to count them.

        mask    bool [num_rows]: rows to process; None: all
        order   the numbers of the selected rows
        """

    def statistics(
        self,
        targets: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
        reference: Reference | None = None,
    ) -> dict[str, Tensor]:
        """Return "logps" and the named statistics of each row, [num_rows] by name.

        They are fp32 and exactly 0 in masked rows, but "top_id" is int64 and -1 there. All but
        "top_prob" and "top_id" are differentiable in the given logits, or in hidden states, weight
        and bias.

        targets     int64 [num_rows]; any id where mask is False
        mask        bool [num_rows]: rows to process; None processes all
        names       "entropy", "logsumexp", "sum_squares", "top_prob", "top_id"; with a reference
                    also "divergence"
        detached    names of statistics that need no gradient
        reference   the model that "divergence" is computed from
        """

    def statistics_of_rest(
        self,
        targets: Tensor,
        row_ids: Tensor,
        token_ids: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        """Return statistics of the softmax over the rest of each row, [num_rows] each.

        The rest is all ids but those of the pairs (row, id). "logps" is the log-odds of the target
        against the rest, z[target] - logsumexp(z[rest]), and inf if nothing is left. No statistic
        has a gradient at the ids that are left out, not even "logps" at a target that is one of
        them.

        targets              int64 [num_rows], ids of the vocabulary; any where mask is False
        row_ids, token_ids   int64 [num_pairs], sorted by row: the pairs that are left out. An id
                             outside of the vocabulary leaves out nothing. Pairs may repeat.
        mask                 bool [num_rows]: rows to process; None processes all
        names                some of "entropy", "sum_squares", "top_prob", "logsumexp", of the rest
        detached             names of statistics that need no gradient
        """

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logit z of each (row, id) pair after `transform`, fp32 [num_pairs].

        It is differentiable in the given logits, or in hidden states, weight and bias.

        row_ids, token_ids   int64 [num_pairs], sorted by row and distinct (`DistinctPairs`). An id
                             outside of the vocabulary gives -inf and no gradient. Pairs of such
                             ids may repeat.
        """


def softmax_sum_names(names: tuple[str, ...], reference: Reference | None) -> tuple[str, ...]:
    """Return the names of the softmax sums from which statistics of a row follow.

    names       of the statistics, for example "entropy"
    reference   the model that the statistic "divergence" is computed from, or None. The sums depend
                on the direction of the divergence.
    """
    kind = NO_DIVERGENCE if reference is None else reference.kind
    return sums_for(names, kind.direction)


def transform_pairs(
    source: RowSource, logits: Tensor, row_ids: Tensor, token_ids: Tensor
) -> Tensor:
    """Return z = transform(raw logit) of each (row, id) pair, fp32 [num_pairs].

    An id outside of the vocabulary has no logit. Its z is -inf, so that its probability is 0.

    source               the rows, which have a transform each
    logits               fp32 [num_pairs]: the raw logits
    row_ids, token_ids   int64 [num_pairs]
    """
    transformed = source.transform.transform_pairs(logits, row_ids)
    is_outside = token_ids.clamp(0, source.vocab_size - 1) != token_ids
    return transformed.masked_fill(is_outside, -torch.inf)


# ---- given logits


@dataclass(frozen=True, eq=False)
class GivenLogits:
    """Rows of logits that exist.

    logits      [A, T, V] with unit stride in V, num_rows = A * T
    transform   scale, softcap and temperature of each row
    kernels     kernels over rows of logits
    shard       which columns of a sharded vocabulary this rank has; None: all
    inplace     whether the gradient overwrites the logits
    """

    logits: Tensor
    transform: RowTransform
    kernels: Backend
    shard: VocabShard | None = None
    inplace: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.logits.shape[:2].numel()

    @property
    def num_columns(self) -> int:
        """Number of ids of this rank: all ids without a shard."""
        return self.logits.shape[2]

    @property
    def vocab_size(self) -> int:
        """Number of ids, on all ranks of a shard."""
        return self.num_columns if self.shard is None else self.shard.vocab

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.logits.device

    @property
    def tensors(self) -> tuple[Tensor]:
        """The tensors that may need a gradient: (logits,)."""
        return (self.logits,)

    def with_known_order(self, mask: Tensor | None, order: RowOrder) -> GivenLogits:
        """Return the same rows: kernels over given logits read the mask itself, on the device.

        Only logits that are computed from hidden states use the order of the rows of a mask.
        """
        return self

    def without_gradient(self) -> GivenLogits:
        """Return the same rows without a gradient and without the wrappers of torch.func."""
        return replace(
            self, logits=plain(self.logits.detach()), transform=self.transform.without_wrappers()
        )

    def statistics(
        self,
        targets: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
        reference: Reference | None = None,
    ) -> dict[str, Tensor]:
        """Return "logps" and the named statistics of each row, [num_rows] by name.

        They are differentiable in the logits, which the backward reads a second time, and 0 in
        masked rows.

        targets     int64 [num_rows]; any id where mask is False
        mask        bool [num_rows]: rows to process; None processes all
        names       of the statistics in addition to "logps", for example "entropy"
        detached    names of statistics that need no gradient
        reference   the model that the statistic "divergence" is computed from, or None
        """
        row_pass = LogitsPass(
            kernels=self.kernels,
            transform=self.transform.without_wrappers(),
            targets=plain(targets),
            mask=None if mask is None else plain(mask),
            names=softmax_sum_names(names, reference),
            reference=reference_rows(reference),
            inplace=self.inplace,
        )
        return row_statistics(row_pass, RequestedStatistics(names, detached), self.tensors)

    def statistics_of_rest(
        self,
        targets: Tensor,
        row_ids: Tensor,
        token_ids: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        """Return statistics of the softmax over the rest of each row, [num_rows] by name.

        The rest is all ids of a row but those of the (row, id) pairs. "logps" is the log-odds of
        the target against the rest, z[target] - logsumexp(z[rest]). The forward copies the logits,
        a block of rows at a time, and sets those of the pairs to -inf.

        targets              int64 [num_rows], ids of the vocabulary; any where mask is False
        row_ids, token_ids   int64 [num_pairs], sorted by row: the pairs that are left out
        mask                 bool [num_rows]: rows to process; None processes all
        names                the statistics in addition to "logps", such as "entropy" of the rest
        detached             names of statistics that need no gradient
        """
        return statistics_of_rest(self, targets, row_ids, token_ids, mask, names, detached)

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logit z of each (row, id) pair after the transform, fp32 [num_pairs].

        It is differentiable in the logits. With a vocabulary shard, each logit is on one rank, and
        all ranks get it.

        row_ids, token_ids   int64 [num_pairs], sorted by row and distinct. An id outside of the
                             vocabulary gives -inf.
        """
        columns = local_ids(plain(token_ids), self.shard, self.num_columns)
        logits = apply_function(GivenPairLogits, self.logits, plain(row_ids), columns, self.shard)
        return transform_pairs(self, logits, row_ids, token_ids)

    def fused_loss(
        self, loss_formula: TokenLossFormula, mask: Tensor | None, reference: Reference | None
    ) -> FormulaResult:
        """Return a token-level loss of which the forward computes the gradient as well.

        The kernels compute the loss, and write the gradient of the logits for an upstream gradient
        of 1. The backward multiplies it by the upstream gradient.

        loss_formula   computes the loss of a row from its log-prob and entropy
        mask           bool [num_rows]: rows to process; None processes all
        reference      the divergence from it is added to the loss; or None
        """
        logits = self.logits.detach()
        rows = LogitRows(
            logits=logits,
            targets=loss_formula.inputs.targets,
            mask=mask,
            transform=self.transform,
            reference=reference_rows(reference),
        )
        grad_logits = None  # memory for the gradient
        if torch.is_grad_enabled() and self.logits.requires_grad:
            grad_logits = logits if self.inplace else empty_like(logits)
        with torch.no_grad():
            values = self.kernels.fused_loss(rows, loss_formula, grad_logits)
            loss = sum_losses(values.losses)
        gradients = PrecomputedGradients(
            self.kernels, [InputGradient(grad_logits, dtype=logits.dtype)]
        )
        loss = apply_function(LossWithGradients, loss, gradients, self.logits)
        if self.inplace and grad_logits is not None:
            # The kernels wrote to the logits. Autograd learns this from the version counter. The
            # counter is changed after `apply`, because `apply` makes a new, slow graph for a view
            # that was written to before.
            torch.autograd.graph.increment_version(self.logits)
            gradients.record_versions()
        return FormulaResult(loss, values.logps, values.entropy, values.divergence)


def reference_rows(reference: Reference | None) -> ReferenceRows | None:
    """Return a reference with given logits as the row kernels take it; None for None."""
    if reference is None:
        return None
    source = reference.source
    return ReferenceRows(source.logits, source.transform, reference.kind)


class SoftmaxPass(StatisticsPass):
    """A pass over rows whose `compute` returns the values of their softmax sums.

    names       of the softmax sums
    reference   gives the kind of the divergence; None: there is no reference
    """

    names: tuple[str, ...]
    reference: ReferenceRows | ReferenceProjection | None

    def as_sums(self, values: Tensor) -> SoftmaxSums:
        """Return softmax sums with their names, from which statistics of the rows follow.

        values   fp32 [num_sums, num_rows], a row for each of `names`
        """
        kind = NO_DIVERGENCE if self.reference is None else self.reference.kind
        return SoftmaxSums(values, self.names, kind)


@dataclass(frozen=True, eq=False)
class LogitsPass(SoftmaxPass):
    """Compute softmax sums of given logits, and the gradient of the logits.

    `autograd.RowStatistics` calls `compute` in its forward and `gradients` in its backward.

    names       of the softmax sums
    reference   the reference's logits, for the divergence
    inplace     whether the gradient overwrites the logits
    """

    kernels: Backend
    transform: RowTransform
    targets: Tensor
    mask: Tensor | None
    names: tuple[str, ...]
    reference: ReferenceRows | None
    inplace: bool

    def compute(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return a tuple of one tensor: the softmax sums, fp32 [num_sums, num_rows].

        tensors   (logits,), [A, T, V]: A groups of T rows
        """
        (logits,) = tensors
        assert logits is not None
        return (self.kernels.softmax_sums(self.make_rows(logits), self.names).values,)

    def gradients(
        self,
        tensors: Sequence[Tensor | None],
        computed: Sequence[Tensor],
        grads: dict[str, Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return a tuple of one tensor: d loss / d logits, [A, T, V].

        tensors    (logits,)
        computed   (softmax sums,), as `compute` returned them
        grads      d loss / d statistic by name, fp32 [num_rows] each
        wanted     not used: the backward is called only if the logits need a gradient
        """
        coefficients = GradientCoefficients.from_gradients(
            self.as_sums(computed[0]), grads, self.mask
        )
        return self.gradients_of_coefficients(tensors, computed[0], coefficients, wanted)

    def gradients_of_coefficients(
        self,
        tensors: Sequence[Tensor | None],
        values: Tensor,
        coefficients: GradientCoefficients,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return a tuple of one tensor: d loss / d logits, [A, T, V].

        With `inplace` the gradient is written over the logits.

        tensors        (logits,)
        values         the softmax sums, fp32 [num_sums, num_rows]
        coefficients   numbers of each row, from which its gradient follows (the class has the
                       formula)
        wanted         not used: the backward is called only if the logits need a gradient
        """
        (logits,) = tensors
        assert logits is not None
        grad_logits = logits.detach() if self.inplace else empty_like(logits.detach())
        self.kernels.softmax_gradient(
            self.make_rows(logits), self.as_sums(values), coefficients, grad_logits
        )
        # If the kernels wrote to the logits, autograd learns this from the version counter.
        if self.inplace:
            torch.autograd.graph.increment_version(logits)
        return (grad_logits,)

    def tensors_read_again(self) -> list[Tensor | None]:
        """Return the tensors that the backward reads besides the logits; None for an absent one.

        They are targets, mask, temperatures and the reference's logits and temperatures. The
        backward checks that none was written to since the forward.
        """
        tensors = [self.targets, self.mask, temperatures_of(self.transform)]
        if self.reference is not None:
            tensors += [self.reference.logits, temperatures_of(self.reference.transform)]
        return tensors

    def make_rows(self, logits: Tensor) -> LogitRows:
        """Return the rows of a kernel call over all logits [A, T, V], with targets and mask."""
        return LogitRows(
            logits=logits.detach(),
            targets=self.targets,
            mask=self.mask,
            transform=self.transform,
            reference=self.reference,
        )


def temperatures_of(transform: RowTransform) -> Tensor | None:
    """Return 1 / temperature of each row, fp32 [num_rows]; None if one number is for all rows."""
    inverse = transform.inverse_temperature
    return inverse if isinstance(inverse, Tensor) else None


# ---- logits that are computed from hidden states


@dataclass(frozen=True, eq=False)
class KnownOrder:
    """The order of the processed rows, which the caller has computed from a mask.

    mask    bool [num_rows]: rows to process; None: all
    order   the numbers of these rows
    """

    mask: Tensor | None
    order: RowOrder

    def is_for(self, mask: Tensor | None) -> bool:
        """Return whether `mask` is the very tensor that this order was computed from.

        A mask with equal values is not recognized: to compare values, the host would have to wait
        for the device.
        """
        return self.mask is mask


@dataclass(frozen=True, eq=False)
class ProjectedLogits:
    """Rows of logits that are computed from hidden states, a chunk at a time.

    projection      hidden states [num_rows, H], weight [V, H], bias and transform
    kernels         kernels over rows of logits
    shard           which part of a sharded vocabulary this rank has; None: all
    weight_memory   memory of the caller that the gradient of the weight is added to, or None
    known_order     the order of the rows of one mask, which the caller has computed, or None
    """

    projection: Projection
    kernels: Backend
    shard: VocabShard | None = None
    weight_memory: WeightGradMemory | None = None
    known_order: KnownOrder | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.projection.hidden.shape[0]

    @property
    def num_columns(self) -> int:
        """Number of ids of this rank: all ids without a shard."""
        return self.projection.weight.shape[0]

    @property
    def vocab_size(self) -> int:
        """Number of ids, on all ranks of a shard."""
        return self.num_columns if self.shard is None else self.shard.vocab

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self.projection.hidden.device

    @property
    def transform(self) -> RowTransform:
        """What is applied to the raw logits of each row: scale, softcap and 1 / temperature."""
        return self.projection.transform

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors that may need a gradient: (hidden, weight, bias)."""
        return self.projection.hidden, self.projection.weight, self.projection.bias

    @property
    def trains_head(self) -> bool:
        """Whether the weight or the bias needs a gradient."""
        _, weight, bias = self.tensors
        return weight.requires_grad or (bias is not None and bias.requires_grad)

    def with_known_order(self, mask: Tensor | None, order: RowOrder) -> ProjectedLogits:
        """Return the same rows, with the order of the rows of a mask.

        `statistics` of this mask then need not wait for the device to count its rows.

        mask    bool [num_rows]: rows to process; None: all
        order   the numbers of these rows
        """
        return replace(self, known_order=KnownOrder(mask, order))

    def without_gradient(self) -> ProjectedLogits:
        """Return the same rows without a gradient and without the wrappers of torch.func."""
        hidden, weight, bias = self.tensors
        projection = replace(
            self.projection,
            hidden=plain(hidden.detach()),
            weight=plain(weight.detach()),
            bias=None if bias is None else plain(bias.detach()),
            transform=self.transform.without_wrappers(),
        )
        return replace(self, projection=projection, weight_memory=None)

    def with_plain_transform(self) -> ProjectedLogits:
        """Return the same rows, without the wrappers of torch.func around temperatures."""
        transform = self.transform.without_wrappers()
        if transform is self.transform:  # one number for all rows
            return self
        return replace(self, projection=replace(self.projection, transform=transform))

    def statistics(
        self,
        targets: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
        reference: Reference | None = None,
    ) -> dict[str, Tensor]:
        """Return "logps" and the named statistics of each row, [num_rows] by name.

        They are differentiable in hidden states, weight and bias, and 0 in masked rows.

        The forward takes one matmul and keeps no logits. The backward computes them again: three
        matmuls, two with a frozen head. On a CPU it processes the rows whose upstream gradient is
        not 0. On a GPU it processes all rows of the mask, or with `known_order` those that may have
        a gradient.

        With a frozen head and a gradient for log-probs only, the forward takes two matmuls and
        keeps fp32 [num_rows, H], and the backward takes none (`FrozenHeadPass`). Under torch.func
        this is not possible.

        On a GPU the host waits for the rows of a mask, unless it is the mask of `known_order`.

        targets     int64 [num_rows]; any id where mask is False
        mask        bool [num_rows]: rows to process; None processes all
        names       of the statistics in addition to "logps", for example "entropy"
        detached    names of statistics that need no gradient
        reference   the model that the statistic "divergence" is computed from, or None
        """
        requested = RequestedStatistics(names, detached)
        mask = None if mask is None else plain(mask)
        if self.known_order is not None and self.known_order.is_for(mask):
            order = self.known_order.order
        else:
            order = RowOrder.of_mask(mask, self.num_rows, self.device)
        # If the head is frozen and only log-probs have a gradient, the gradient of a row is a
        # scalar times a vector that the forward can compute (`FrozenHeadPass`).
        has_other_gradient = any(requested.has_gradient(name) for name in names)
        needs_hidden_only = (
            torch.is_grad_enabled()
            and self.projection.hidden.requires_grad
            and not self.trains_head
        )
        uses_unit_gradients = (
            needs_hidden_only
            and not has_other_gradient
            and not torch._C._are_functorch_transforms_active()
        )
        pass_type = FrozenHeadPass if uses_unit_gradients else LinearPass
        row_pass = pass_type(
            source=self.with_plain_transform(),
            targets=plain(targets),
            mask=mask,
            order=order,
            names=softmax_sum_names(names, reference),
            reference=reference_projection(reference),
        )
        return row_statistics(row_pass, requested, self.tensors)

    def statistics_of_rest(
        self,
        targets: Tensor,
        row_ids: Tensor,
        token_ids: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        """Return statistics of the softmax over the rest of each row, [num_rows] by name.

        The rest is all ids of a row but those of the (row, id) pairs. "logps" is the log-odds of
        the target against the rest, z[target] - logsumexp(z[rest]). It takes as many matmuls as
        `statistics`.

        targets              int64 [num_rows], ids of the vocabulary; any where mask is False
        row_ids, token_ids   int64 [num_pairs], sorted by row: the pairs that are left out
        mask                 bool [num_rows]: rows to process; None processes all
        names                the statistics in addition to "logps", such as "entropy" of the rest
        detached             names of statistics that need no gradient
        """
        return statistics_of_rest(self, targets, row_ids, token_ids, mask, names, detached)

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logit z of each (row, id) pair after the transform, fp32 [num_pairs].

            z = transform(hidden[row] . weight[id] + bias[id])

        That is one dot product for each pair. It is differentiable in hidden, weight and bias.

        row_ids, token_ids   int64 [num_pairs], sorted by row and distinct. An id outside of the
                             vocabulary gives -inf.
        """
        columns = local_ids(plain(token_ids), self.shard, self.num_columns)
        pairs = pairs_of_rows(plain(row_ids), columns, self.num_rows)
        logits = apply_function(
            ProjectedPairLogits, *self.tensors, pairs, self.kernels, self.shard, self.weight_memory
        )
        return transform_pairs(self, logits, row_ids, token_ids)

    def fused_loss(
        self,
        loss_formula: TokenLossFormula,
        order: RowOrder,
        reference: Reference | None,
    ) -> FormulaResult:
        """Return a token-level loss of which the forward computes the gradient as well.

        The forward takes three matmuls: logits, gradient of hidden states, gradient of the weight.
        It takes two if the head is frozen, and one if nothing requires a gradient. The backward
        multiplies the gradients by the upstream gradient.

        loss_formula   computes the loss of a row from its log-prob and entropy
        order          the rows to process: first those that may have a gradient
        reference      the divergence from it is added to the loss; or None
        """
        formula = TokenFormula(
            self.kernels, loss_formula, order, has_reference=reference is not None
        )
        targets = loss_formula.inputs.targets
        inputs = self.make_inputs(self.projection, targets, reference_projection(reference))
        return self._loss_of_formula(inputs, formula, order, blocks=None)

    def fused_sequence_loss(
        self,
        targets: Tensor,
        compute_losses: Callable[[Tensor, Tensor], TokenLosses],
        order: RowOrder,
        rows_per_sequence: Sequence[int],
    ) -> FormulaResult | None:
        """Return a sequence-level loss (GSPO) whose gradient is computed in the forward.

        A chunk is the rows whose logits exist at one time. A block is the rows whose gradients of
        logits exist at one time: one or several chunks. The order of the matmuls:

        1. Rows without a gradient, a chunk at a time: logits (matmul 1) and softmax sums.
        2. For each block of whole sequences, a chunk at a time: logits (matmul 1), softmax sums,
           and the gradient of each row's log-prob, d log-prob / d logits.
        3. At the end of the block `compute_losses` gives c = d loss / d log-prob of its rows. With
           the row gradients times c, matmul 2 computes the gradient of hidden states and matmul 3
           that of the weight.
        4. The backward runs no matmul.

        Returns None if the forward cannot compute the gradient: a sequence is longer than a block,
        so that its logits would have to be computed twice, or the matmuls are fp16 on a GPU.

        targets             int64 [num_rows]
        compute_losses      (logps, entropy), fp32 [num_rows] -> losses and gradients of all rows
        order               the rows to process
        rows_per_sequence   number of rows of each sequence that may have a gradient
        """
        inputs = self.make_inputs(self.projection, targets, None)
        memory = make_memory_model(
            inputs,
            self.gradients_wanted(),
            grad_hidden_dtype=accumulation_dtype(self.projection.hidden.dtype),
            # The gradient for memory of the caller stays fp32.
            may_round_weight=self.weight_memory is None,
        )
        if memory.has_grad_buffer and memory.scales_rows:
            # The matmuls are fp16 on a GPU. Each row of fp16 gradients is multiplied by a power of
            # two that fits it to the range of fp16. The power is chosen before c is known, and c
            # may be far from 1.
            return None
        num_rows = order.num_with_gradient
        plan = memory.plan(
            self.device.type,
            num_rows=max(num_rows, 1),
            gathers_rows=gathers_rows(self.projection, num_rows),
        )
        blocks = split_sequences(rows_per_sequence, plan.block)
        if blocks is None:
            return None
        formula = SequenceFormula(self.kernels, compute_losses, order)
        return self._loss_of_formula(inputs, formula, order, blocks)

    def gradients_wanted(self) -> GradientsWanted:
        """Return which of hidden states, weight and bias need a gradient."""
        enabled = torch.is_grad_enabled()
        hidden, weight, bias = self.tensors
        return GradientsWanted(
            hidden=enabled and hidden.requires_grad,
            weight=enabled and weight.requires_grad,
            bias=enabled and bias is not None and bias.requires_grad,
        )

    def make_inputs(
        self, projection: Projection, targets: Tensor, reference: ReferenceProjection | None
    ) -> PassInputs:
        """Return the inputs of a pass over these rows: hidden states, heads, targets and kernels.

        projection   that of these rows, possibly with the tensors that autograd has passed
        targets      int64 [num_rows]
        reference    a frozen model that the policy is compared with, or None
        """
        return PassInputs(
            kernels=self.kernels,
            shard=self.shard,
            policy=projection,
            reference=reference,
            targets=targets,
        )

    def _loss_of_formula(
        self,
        inputs: PassInputs,
        formula: TokenFormula | SequenceFormula,
        order: RowOrder,
        blocks: Sequence[slice] | None,
    ) -> FormulaResult:
        """Compute a loss and its gradients, and return the loss as a differentiable tensor.

        The backward of the loss hands over the gradients of hidden states, weight and bias that
        are computed here.

        inputs    what the pass reads
        formula   computes the loss and d loss / d logits from the logits of a chunk of rows
        order     the rows to process: first those that may have a gradient
        blocks    slices of `order`; the gradients of logits of one slice exist at one time. None:
                  as few slices as memory allows. Not used if no gradient is wanted.
        """
        hidden, weight, bias = self.tensors
        wanted = self.gradients_wanted()
        memory = self.weight_memory if wanted.weight else None
        with torch.no_grad():
            gradients = run_pass(
                inputs,
                formula,
                order,
                wanted,
                blocks=blocks if wanted.any else None,
                may_round_weight=memory is None,
            )
            result = formula.result()
        grad_weight = gradients.weight
        # Without a row that has a gradient, the pass makes no gradient of the weight.
        if wanted.weight and grad_weight is None and memory is None:
            grad_weight = zeros(weight.shape, weight.dtype, weight.device)
        # A gradient that is added to memory of the caller stays fp32. The backward adds it there,
        # when the upstream gradient is known.
        weight_dtype = weight.dtype if memory is None else torch.float32
        bias_dtype = torch.float32 if bias is None else bias.dtype
        precomputed = PrecomputedGradients(
            self.kernels,
            [
                InputGradient(gradients.hidden, hidden.dtype),
                InputGradient(grad_weight, weight_dtype, memory),
                InputGradient(gradients.bias, bias_dtype),
            ],
        )
        loss = apply_function(LossWithGradients, result.loss, precomputed, hidden, weight, bias)
        return result._replace(loss=loss)


def reference_projection(reference: Reference | None) -> ReferenceProjection | None:
    """Return a reference from hidden states as a pass over the rows takes it; None for None."""
    if reference is None:
        return None
    return ReferenceProjection(reference.source.projection, reference.kind)


@dataclass(frozen=True, eq=False)
class LinearPass(SoftmaxPass):
    """Compute softmax sums of logits from hidden states, and the gradients of these and the head.

    `autograd.RowStatistics` calls `compute` in its forward and `gradients` in its backward.

    source      hidden states and head. Each method replaces their tensors by its argument
                `tensors`, which are (hidden, weight, bias).
    mask        bool [num_rows]: rows to process; None processes all
    order       the same rows
    names       of the softmax sums
    reference   a frozen model, for the divergence; or None
    """

    source: ProjectedLogits
    targets: Tensor
    mask: Tensor | None
    order: RowOrder
    names: tuple[str, ...]
    reference: ReferenceProjection | None

    def compute(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return a tuple of one tensor: the softmax sums, fp32 [num_sums, num_rows] (one matmul).

        tensors   (hidden, weight, bias)
        """
        return (linear_softmax_sums(self.make_inputs(tensors), self.order, self.names).values,)

    def gradients(
        self,
        tensors: Sequence[Tensor | None],
        computed: Sequence[Tensor],
        grads: dict[str, Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias, None for one that is not wanted.

        This takes three matmuls, two with a frozen head.

        tensors    (hidden, weight, bias)
        computed   (softmax sums,), as `compute` returned them
        grads      d loss / d statistic by name, fp32 [num_rows] each
        wanted     whether each of the three gradients is needed
        """
        coefficients = GradientCoefficients.from_gradients(
            self.as_sums(computed[0]), grads, self.rows_with_gradient()
        )
        return self.gradients_of_coefficients(tensors, computed[0], coefficients, wanted)

    def gradients_of_coefficients(
        self,
        tensors: Sequence[Tensor | None],
        values: Tensor,
        coefficients: GradientCoefficients,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias, each in the tensor's dtype.

        A gradient that is not wanted is None. With memory of the caller for the gradient of the
        weight, this gradient is added there, and what autograd needs in its place is returned
        (`WeightGradMemory.add`).

        tensors        (hidden, weight, bias)
        values         the softmax sums, fp32 [num_sums, num_rows]
        coefficients   numbers of each row, from which d loss / d logits follows
        wanted         whether each of the three gradients is needed
        """
        weight = tensors[1]
        assert weight is not None
        check_weight_is_present(weight, self.source.shard)
        if self.order.is_on_host:
            # Rows whose coefficients are all 0 have the gradient 0.
            order = RowOrder.of_mask(coefficients.nonzero, self.order.num_rows, weight.device)
        else:  # the host would have to wait for the values of the coefficients
            order = self.order.with_gradient()
        formula = KnownGradients(self.source.kernels, self.as_sums(values), coefficients, order)
        hidden_wanted, weight_wanted, bias_wanted = wanted
        memory = self.source.weight_memory if weight_wanted else None
        gradients = run_pass(
            self.make_inputs(tensors),
            formula,
            order,
            GradientsWanted(hidden=hidden_wanted, weight=weight_wanted, bias=bias_wanted),
            # The upstream gradient is known, so blocks can be added to the caller's memory at once.
            weight_total=None if memory is None else memory.fp32_total,
            may_round_weight=memory is None,
        )
        grad_weight = gradients.weight
        if memory is not None:
            grad_weight = memory.add(grad_weight)
        elif weight_wanted and grad_weight is None:  # no row has a gradient
            grad_weight = zeros(weight.shape, weight.dtype, weight.device)
        results = (gradients.hidden, grad_weight, gradients.bias)
        return tuple(
            None if gradient is None or x is None else converted(gradient, x.dtype)
            for gradient, x in zip(results, tensors, strict=True)
        )

    def rows_with_gradient(self) -> Tensor | None:
        """Return a mask of the rows that may have a gradient, bool [num_rows]; None for all rows.

        The loss does not depend on the other rows. The caller takes their upstream gradients as 0,
        even if they are NaN.
        """
        if self.order.num_with_gradient == self.order.num_rows:
            return None
        # The rows that may have a gradient come first in an order.
        row_ids = self.order.row_ids[: self.order.num_with_gradient]
        mask = torch.zeros(self.order.num_rows, dtype=torch.bool, device=row_ids.device)
        return mask.index_fill_(0, row_ids, True)

    def tensors_read_again(self) -> list[Tensor | None]:
        """Return the tensors that the backward reads besides hidden and head; None if absent.

        They are targets, mask, temperatures, and the reference's tensors and temperatures. The
        backward checks that none was written to since the forward.
        """
        tensors = [self.targets, self.mask, temperatures_of(self.source.transform)]
        if self.reference is not None:
            projection = self.reference.projection
            tensors += [projection.hidden, projection.weight, projection.bias]
            tensors += [temperatures_of(projection.transform)]
        return tensors

    def make_inputs(self, tensors: Sequence[Tensor | None]) -> PassInputs:
        """Return what a pass over the rows reads, with the tensors that autograd passes.

        tensors   (hidden, weight, bias). Those of `source` may be wrappers of torch.func, which
                  kernels cannot read.
        """
        projection = self.source.projection.with_tensors(tensors)
        return self.source.make_inputs(projection, self.targets, self.reference)


@dataclass(frozen=True, eq=False)
class FrozenHeadPass(LinearPass):
    """Compute log-probs from hidden states and a frozen head, and the gradient of hidden states.

    The gradient of a row is the scalar d loss / d log-prob, times the unit gradient, d log-prob / d
    hidden [H]. The forward computes the unit gradients of all rows, with two matmuls. The backward
    multiplies them by the scalars.
    """

    def compute(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return (softmax sums, unit gradients), with two matmuls.

        softmax sums     fp32 [num_sums, num_rows]
        unit gradients   fp32 [num_rows, H]: d log-prob / d hidden of each row

        tensors   (hidden, weight, bias)
        """
        inputs = self.make_inputs(tensors)
        recorder = SumsRecorder(inputs, self.order, self.names)
        gradients = run_pass(
            inputs,
            recorder,
            self.order,
            GradientsWanted(hidden=True, weight=False, bias=False),
            grad_hidden_dtype=torch.float32,
        )
        assert gradients.hidden is not None
        return recorder.result().values, gradients.hidden

    def gradients(
        self,
        tensors: Sequence[Tensor | None],
        computed: Sequence[Tensor],
        grads: dict[str, Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return (d loss / d hidden [num_rows, H], None, None): there is no gradient of the head.

            d loss / d hidden[row] = d loss / d log-prob[row] * unit gradient[row]

        The result is 0 where the first factor is 0. A row whose log-prob is NaN has the unit
        gradient 0, but gets NaN if the loss depends on it.

        tensors    (hidden, weight, bias)
        computed   (softmax sums, unit gradients), as `compute` returned them
        grads      contains "logps": d loss / d log-prob, fp32 [num_rows]
        wanted     not used: with a frozen head only hidden states need a gradient
        """
        values, unit_gradient = computed
        hidden = tensors[0]
        assert hidden is not None
        grad_logps = masked_grad(grads["logps"], self.rows_with_gradient())
        is_nan = self.as_sums(values).logps.isnan() & (grad_logps != 0)
        grad_logps = grad_logps.masked_fill(is_nan, torch.nan)
        grad_hidden = unit_gradient * grad_logps[:, None]
        # 0 times an infinite unit gradient would be NaN.
        grad_hidden.masked_fill_((grad_logps == 0)[:, None], 0.0)
        return converted(grad_hidden, hidden.dtype), None, None


def masked_grad(grad: Tensor, mask: Tensor | None) -> Tensor:
    """Return an upstream gradient [num_rows] in fp32, with 0 in masked rows, even for NaN.

    mask   bool [num_rows]: rows to keep; None keeps all
    """
    grad = grad.float()
    return grad if mask is None else torch.where(mask, grad, 0.0)
