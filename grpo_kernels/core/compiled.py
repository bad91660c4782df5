"""Softmax sums and their gradients as operators of torch.library, for torch.compile.

    torch.ops.grpo_kernels.softmax_sums, softmax_gradient       from logits
    torch.ops.grpo_kernels.linear_sums, linear_gradients        from hidden states and a head

The namespace is the name that the package is imported by, so that two copies of the package under
different names do not register the same operator.

An operator takes tensors, numbers and strings. It has a schema and a fake implementation, which
returns empty results, so torch.compile traces it without a graph break and with symbolic row
counts. Operators have no gradient formula: `autograd.RowStatistics` calls the second operator in
its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_targets
from . import backends
from .autograd import RequestedStatistics, StatisticsPass, row_statistics
from .linear import Projection, RowOrder
from .softmax import GradientCoefficients, RowTransform, SoftmaxSums
from .sources import (
    GivenLogits,
    LinearPass,
    LogitsPass,
    ProjectedLogits,
    Reference,
    softmax_sum_names,
)

NAMESPACE = __name__.partition(".")[0]

# The arguments of the operators, in three groups, see `make_pass` and `compute_gradients`.

#: The rows of logits, and the names of the softmax sums.
ROWS_SCHEMA = "Tensor?[] tensors, ScalarType? dtype, Tensor targets, Tensor? mask, str[] names"
#: The transform of the logits (inv_temperatures [num_rows] replaces inv_temperature), and the
#: backend.
SETTINGS_SCHEMA = (
    "float scale, float softcap, float inv_temperature, Tensor? inv_temperatures, str backend, bool"
    " strict"
)
#: The further arguments of the operators for gradients.
GRADIENT_SCHEMA = "bool[] wanted, Tensor sums, Tensor coefficients, str[] coefficient_names"


class OperatorSettings(NamedTuple):
    """The arguments of SETTINGS_SCHEMA.

    scale, softcap, inv_temperature   the transform of the logits, see `RowTransform`
    inv_temperatures                  fp32 [num_rows], replaces inv_temperature; or None
    backend, strict                   see `Options`
    """

    scale: float
    softcap: float
    inv_temperature: float
    inv_temperatures: Tensor | None
    backend: str
    strict: bool


def make_pass(
    tensors: Sequence[Tensor | None],
    dtype: torch.dtype | None,
    targets: Tensor,
    mask: Tensor | None,
    names: Sequence[str],
    settings: tuple[Any, ...],
) -> LogitsPass | LinearPass:
    """Return the pass over rows that computes the results of an operator, from its arguments.

    tensors    (logits,) if dtype is None, else (hidden, weight, bias)
    dtype      dtype of the matmuls that compute logits, or None
    targets    int64 [num_rows]
    mask       bool [num_rows]: rows to process, or None for all rows
    names      names of the softmax sums to compute, some of `softmax.SUMS`
    settings   the fields of `OperatorSettings`, in their order
    """
    options = OperatorSettings(*settings)
    inverse_temperature: float | Tensor = options.inv_temperature
    if options.inv_temperatures is not None:
        inverse_temperature = options.inv_temperatures
    transform = RowTransform(
        scale=options.scale, softcap=options.softcap, inverse_temperature=inverse_temperature
    )
    kernels = backends.pick(options.backend, targets.device, options.strict)
    if dtype is None:  # the logits are given
        return LogitsPass(
            kernels=kernels,
            transform=transform,
            targets=targets,
            mask=mask,
            names=tuple(names),
            reference=None,
            inplace=False,
        )
    hidden, weight, bias = tensors
    assert hidden is not None and weight is not None
    projection = Projection(
        hidden=hidden, weight=weight, bias=bias, transform=transform, matmul_dtype=dtype
    )
    return LinearPass(
        source=ProjectedLogits(projection, kernels),
        targets=targets,
        mask=mask,
        order=RowOrder.of_mask(mask, len(hidden), hidden.device),
        names=tuple(names),
        reference=None,
    )


def compute_sums(
    tensors: list[Tensor | None],
    dtype: torch.dtype | None,
    targets: Tensor,
    mask: Tensor | None,
    names: list[str],
    *settings: Any,
) -> list[Tensor]:
    """Return the softmax sums of each row: the operators softmax_sums and linear_sums.

    tensors    [logits] for softmax_sums, [hidden, weight, bias] for linear_sums
    dtype      dtype of the matmuls that compute logits; None for softmax_sums
    targets    int64 [num_rows]
    mask       bool [num_rows]: rows to process, or None for all rows
    names      the sums to compute, some of `softmax.SUMS`
    settings   the fields of `OperatorSettings`, in their order

    The result is a list of one tensor, fp32 [num_sums, num_rows]. Raises ValueError if a target is
    outside of the vocabulary.
    """
    if dtype is None:  # the logits are given
        (logits,) = tensors
        assert logits is not None
        vocab_size = logits.shape[-1]
    else:
        _, weight, _ = tensors
        assert weight is not None
        vocab_size = len(weight)
    check_targets(targets, mask, vocab_size)
    row_pass = make_pass(tensors, dtype, targets, mask, names, settings)
    return list(row_pass.compute(tensors))


def fake_sums(
    tensors: Any, dtype: Any, targets: Tensor, mask: Any, names: list[str], *settings: Any
) -> list[Tensor]:
    """Return what torch.compile traces in place of `compute_sums`: its result without values.

    The result is a list of one tensor, fp32 [num_sums, num_rows]. It has the arguments of
    `compute_sums`, of which only the shape and device of targets and the names are used.
    """
    shape = (len(names), *targets.shape)
    return [torch.empty(shape, dtype=torch.float32, device=targets.device)]


def compute_gradients(
    tensors: list[Tensor | None],
    dtype: torch.dtype | None,
    targets: Tensor,
    mask: Tensor | None,
    names: list[str],
    wanted: list[bool],
    sums: Tensor,
    coefficients: Tensor,
    coefficient_names: list[str],
    *settings: Any,
) -> list[Tensor]:
    """Return d loss / d tensor: the operators softmax_gradient and linear_gradients.

    tensors, dtype, targets, mask, names and settings are those that `compute_sums` got.

    wanted              for each of `tensors`, whether it needs a gradient
    sums                fp32 [num_sums, num_rows]: the softmax sums, from `compute_sums`
    coefficients        fp32 [num_coefficients, num_rows]: factors of the gradient of the loss with
                        respect to logits, see `GradientCoefficients`
    coefficient_names   names of the coefficients

    Returns the gradients of the tensors that need one, in the order of `tensors`.
    """
    row_pass = make_pass(tensors, dtype, targets, mask, names, settings)
    named_coefficients = GradientCoefficients(coefficients, tuple(coefficient_names))
    gradients = row_pass.gradients_of_coefficients(tensors, sums, named_coefficients, wanted)
    return [x for x in gradients if x is not None]


def fake_gradients(
    tensors: Any,
    dtype: Any,
    targets: Any,
    mask: Any,
    names: Any,
    wanted: list[bool],
    *others: Any,
) -> list[Tensor]:
    """Return what torch.compile traces in place of `compute_gradients`: its results without values.

    A gradient has the shape and dtype of its tensor. The function has the arguments of
    `compute_gradients`, of which only these two are used:

    tensors   [logits], or [hidden, weight, bias]
    wanted    for each of `tensors`, whether it needs a gradient
    """
    return [x.new_empty(x.shape) for x, needed in zip(tensors, wanted, strict=True) if needed]


def register(
    name: str,
    schema: str,
    function: Callable[..., list[Tensor]],
    fake: Callable[..., list[Tensor]],
    *,
    synchronizes: bool,
) -> Any:
    """Register an operator of torch.library that returns a list of tensors, and return it.

    name           name of the operator in NAMESPACE
    schema         its arguments in the language of torch.library: "Tensor targets, Tensor? mask"
    function       computes the results, which must be contiguous
    fake           returns uninitialized results of the same shapes and dtypes, for tracing
    synchronizes   whether the host waits for the GPU (to learn the number of unmasked rows), which
                   a CUDA graph cannot capture
    """
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)  # older versions of torch have no such tag
    tags: Any = (tag,) if synchronizes and tag is not None else ()
    operator = torch.library.custom_op(
        f"{NAMESPACE}::{name}",
        function,
        mutates_args=(),
        schema=f"({schema}) -> Tensor[]",
        tags=tags,
    )
    operator.register_fake(fake)
    return operator


SUMS_SCHEMA = f"{ROWS_SCHEMA}, {SETTINGS_SCHEMA}"
GRADIENTS_SCHEMA = f"{ROWS_SCHEMA}, {GRADIENT_SCHEMA}, {SETTINGS_SCHEMA}"
LOGITS_SUMS = register("softmax_sums", SUMS_SCHEMA, compute_sums, fake_sums, synchronizes=False)
LINEAR_SUMS = register("linear_sums", SUMS_SCHEMA, compute_sums, fake_sums, synchronizes=True)
LOGITS_GRADIENTS = register(
    "softmax_gradient", GRADIENTS_SCHEMA, compute_gradients, fake_gradients, synchronizes=False
)
LINEAR_GRADIENTS = register(
    "linear_gradients", GRADIENTS_SCHEMA, compute_gradients, fake_gradients, synchronizes=True
)


# ---- row sources that call these operators


@dataclass(frozen=True, eq=False)
class CompiledPass(StatisticsPass):
    """Softmax sums of rows and their gradients, computed by the operators of this file.

    dtype             dtype of the matmuls that compute logits; None: logits are given
    transform         scale, softcap and temperature of the logits
    targets           int64 [num_rows]
    mask              bool [num_rows]: rows to process, or None for all rows
    names             names of the softmax sums to compute
    backend, strict   see `Options`. The backend is picked when the compiled graph runs.
    """

    dtype: torch.dtype | None
    transform: RowTransform
    targets: Tensor
    mask: Tensor | None
    names: tuple[str, ...]
    backend: str
    strict: bool

    def compute(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return a tuple of one tensor, the softmax sums, fp32 [num_sums, num_rows].

        An operator of torch.library computes them, which torch.compile does not look into.

        tensors   (logits,) or (hidden, weight, bias)
        """
        logits_are_given = self.dtype is None
        operator = LOGITS_SUMS if logits_are_given else LINEAR_SUMS
        (values,) = operator(*self.row_arguments(tensors), *self.settings)
        return (values,)

    def as_sums(self, values: Tensor) -> SoftmaxSums:
        """Return the result of `compute`, fp32 [num_sums, num_rows], with the names of its sums."""
        return SoftmaxSums(values, self.names)

    def gradients(
        self,
        tensors: Sequence[Tensor | None],
        computed: Sequence[Tensor],
        grads: dict[str, Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of each tensor, None for tensors that need none.

        tensors    (logits,) or (hidden, weight, bias)
        computed   the result of `compute`
        grads      d loss / d statistic by name, fp32 [num_rows] each
        wanted     for each tensor, whether it needs a gradient
        """
        (values,) = computed
        coefficients = GradientCoefficients.from_gradients(self.as_sums(values), grads, self.mask)
        logits_are_given = self.dtype is None
        operator = LOGITS_GRADIENTS if logits_are_given else LINEAR_GRADIENTS
        # The operator returns the gradients of the wanted tensors only, in their order, because an
        # operator cannot return None among tensors.
        results = iter(
            operator(
                *self.row_arguments(tensors),
                list(wanted),
                values,
                coefficients.values,
                list(coefficients.names),
                *self.settings,
            )
        )
        return tuple(next(results) if needed else None for needed in wanted)

    def tensors_read_again(self) -> list[Tensor | None]:
        """Return []: torch.compile itself orders the writes and reads of its tensors."""
        return []

    def row_arguments(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Return the first arguments of an operator, in the order of ROWS_SCHEMA.

        tensors   (logits,) or (hidden, weight, bias)
        """
        return list(tensors), self.dtype, self.targets, self.mask, list(self.names)

    @property
    def settings(self) -> OperatorSettings:
        """The last arguments of an operator: transform, backend and strict (SETTINGS_SCHEMA).

        An operator takes numbers and tensors, but no union of both. So the temperature is passed as
        a number and a tensor that replaces it, which is None if all rows have one temperature.
        """
        transform = self.transform
        inverse = transform.inverse_temperature
        inv_temperature = 1.0
        inv_temperatures = None
        if isinstance(inverse, Tensor):  # a temperature for each row
            inv_temperatures = inverse
        else:
            inv_temperature = inverse
        return OperatorSettings(
            scale=transform.scale,
            softcap=transform.softcap,
            inv_temperature=inv_temperature,
            inv_temperatures=inv_temperatures,
            backend=self.backend,
            strict=self.strict,
        )


@dataclass(frozen=True, eq=False)
class CompiledLogits(GivenLogits):
    """Given logits under torch.compile, whose statistics are computed by operators.

    backend, strict   see `Options`. They replace the field `kernels`, which is not used.
    """

    backend: str = "auto"
    strict: bool = False

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

        The results are those of `GivenLogits.statistics`. They follow from softmax sums, which an
        operator of torch.library computes, so that torch.compile traces this method without a graph
        break.

        targets     int64 [num_rows]
        mask        bool [num_rows]: rows to process; None processes all. The others give 0.
        names       the statistics in addition to "logps", see `RowSource.statistics`
        detached    the statistics that need no gradient
        reference   must be None: `compute_loss` and `compute_divergence` break the graph for a
                    divergence, which the operators do not compute
        """
        assert reference is None
        row_pass = CompiledPass(
            dtype=None,  # the logits are given: there is no matmul
            transform=self.transform,
            targets=targets,
            mask=mask,
            names=softmax_sum_names(names, reference=None),
            backend=self.backend,
            strict=self.strict,
        )
        requested = RequestedStatistics(names=names, detached=detached)
        return row_statistics(row_pass, requested, self.tensors)


@dataclass(frozen=True, eq=False)
class CompiledProjection(ProjectedLogits):
    """Logits of hidden states under torch.compile, whose statistics are computed by operators.

    backend, strict   see `Options`. They replace the field `kernels`, which is not used.
    """

    backend: str = "auto"
    strict: bool = False

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

        The results are those of `ProjectedLogits.statistics`. They follow from softmax sums, which
        an operator of torch.library computes, so that torch.compile traces this method without a
        graph break. The forward takes one matmul and the backward three, two with a frozen head.

        targets     int64 [num_rows]
        mask        bool [num_rows]: rows to process; None processes all. The others give 0.
        names       the statistics in addition to "logps", see `RowSource.statistics`
        detached    the statistics that need no gradient
        reference   must be None: `compute_loss` and `compute_divergence` break the graph for a
                    divergence, which the operators do not compute
        """
        assert reference is None
        row_pass = CompiledPass(
            dtype=self.projection.matmul_dtype,
            transform=self.transform,
            targets=targets,
            mask=mask,
            names=softmax_sum_names(names, reference=None),
            backend=self.backend,
            strict=self.strict,
        )
        requested = RequestedStatistics(names=names, detached=detached)
        return row_statistics(row_pass, requested, self.tensors)
