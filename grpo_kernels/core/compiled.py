"""Softmax sums and their gradients as operators of torch.library, which is how torch.compile sees
them.

    torch.ops.grpo_kernels.softmax_sums, softmax_gradient       from logits
    torch.ops.grpo_kernels.linear_sums, linear_gradients        from hidden states and a head

The namespace is the name that the package is imported by: copies under two names have operators of
their own.

Operators take tensors, numbers and names. Each has a schema and a fake implementation, so that a
graph goes through without a break and with symbolic row counts. They have no gradient:
`autograd.RowStatistics` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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

#: The rows: tensors of the source, the dtype of matmuls (None: the tensors are logits), ...
ROWS_SCHEMA = "Tensor?[] tensors, ScalarType? dtype, Tensor targets, Tensor? mask, str[] names"
#: ... and how they are processed.
SETTINGS_SCHEMA = (
    "float scale, float softcap, float inv_temperature, Tensor? inv_temperatures, str backend, bool"
    " strict"
)
GRADIENT_SCHEMA = "bool[] wanted, Tensor sums, Tensor coefficients, str[] coefficient_names"


def make_pass(
    tensors: Sequence[Tensor | None],
    dtype: torch.dtype | None,
    targets: Tensor,
    mask: Tensor | None,
    names: Sequence[str],
    settings: tuple[Any, ...],
) -> LogitsPass | LinearPass:
    """Return the pass over rows that an operator runs, from the arguments of its schema.

    tensors    (logits,), or (hidden, weight, bias) if `dtype` is not None
    dtype      the dtype of matmuls; None: the tensors are logits
    names      the softmax sums
    settings   the arguments of SETTINGS_SCHEMA, in their order
    """
    scale, softcap, inv_temperature, inv_temperatures, backend, strict = settings
    inverse = inv_temperature if inv_temperatures is None else inv_temperatures
    transform = RowTransform(scale, softcap, inverse)
    kernels = backends.pick(backend, targets.device, strict)
    if dtype is None:
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
    source = ProjectedLogits(Projection(hidden, weight, bias, transform, dtype), kernels)
    return LinearPass(
        source=source,
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
    """Compute softmax sums of rows: the operators softmax_sums and linear_sums.

    `make_pass` describes the arguments. Returns a list of one tensor, fp32 [num_sums, num_rows].
    """
    vocabulary = tensors[0].shape[-1] if dtype is None else len(tensors[1])  # type: ignore[union-attr, arg-type]
    check_targets(targets, mask, vocabulary)
    return [*make_pass(tensors, dtype, targets, mask, names, settings).compute(tensors)]


def fake_sums(
    tensors: Any, dtype: Any, targets: Tensor, mask: Any, names: list[str], *settings: Any
) -> list[Tensor]:
    """Return empty results of the shapes and dtypes of `compute_sums`."""
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
    """Compute gradients of `tensors`: the operators softmax_gradient and linear_gradients.

    `make_pass` describes the other arguments.

    wanted                            which of the tensors need a gradient
    sums                              what `compute_sums` returned, fp32 [num_sums, num_rows]
    coefficients, coefficient_names   see `GradientCoefficients`

    Returns the gradients of the tensors that need one, in their order.
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
    """Return empty results of the shapes and dtypes of `compute_gradients`."""
    return [x.new_empty(x.shape) for x, needed in zip(tensors, wanted, strict=True) if needed]


def register(
    name: str,
    schema: str,
    function: Callable[..., list[Tensor]],
    fake: Callable[..., list[Tensor]],
    waits: bool,
) -> Any:
    """Register an operator of torch.library and return it. Its results are contiguous.

    name       of the operator, in NAMESPACE
    schema     its arguments; it returns a list of tensors
    function   computes the results
    fake       returns empty results of the right shapes and dtypes, for tracing
    waits      whether the host waits for row counts, which a CUDA graph cannot capture
    """
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    tags: Any = (tag,) if waits and tag is not None else ()
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
LOGITS_SUMS = register("softmax_sums", SUMS_SCHEMA, compute_sums, fake_sums, waits=False)
LINEAR_SUMS = register("linear_sums", SUMS_SCHEMA, compute_sums, fake_sums, waits=True)
LOGITS_GRADIENTS = register(
    "softmax_gradient", GRADIENTS_SCHEMA, compute_gradients, fake_gradients, waits=False
)
LINEAR_GRADIENTS = register(
    "linear_gradients", GRADIENTS_SCHEMA, compute_gradients, fake_gradients, waits=True
)


# ---- sources that put these operators into a graph


@dataclass(frozen=True, eq=False)
class CompiledPass(StatisticsPass):
    """A pass in a graph. The backend is picked when the graph runs.

    dtype     the dtype of matmuls, None from logits
    names     the softmax sums
    backend   its name, see `Options`
    """

    dtype: torch.dtype | None
    transform: RowTransform
    targets: Tensor
    mask: Tensor | None
    names: tuple[str, ...]
    backend: str
    strict: bool

    def compute(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return (softmax sums [num_sums, num_rows],), by an operator of the graph."""
        operator = LOGITS_SUMS if self.dtype is None else LINEAR_SUMS
        (values,) = operator(*self.row_arguments(tensors), *self.settings)
        return (values,)

    def as_sums(self, values: Tensor) -> SoftmaxSums:
        """Return the values of the softmax sums with their names."""
        return SoftmaxSums(values, self.names)

    def gradients(
        self,
        tensors: Sequence[Tensor | None],
        computed: Sequence[Tensor],
        grads: dict[str, Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors from d loss / d statistic, fp32 [num_rows] by name.

        computed   the softmax sums, as `compute` returned them
        wanted     which tensors need a gradient; the others get None
        """
        (values,) = computed
        coefficients = GradientCoefficients.from_gradients(self.as_sums(values), grads, self.mask)
        operator = LOGITS_GRADIENTS if self.dtype is None else LINEAR_GRADIENTS
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
        """Return nothing: a graph knows what is written in it."""
        return []

    def row_arguments(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Return the arguments of ROWS_SCHEMA."""
        return list(tensors), self.dtype, self.targets, self.mask, list(self.names)

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments of SETTINGS_SCHEMA."""
        transform = self.transform
        inverse = transform.inverse_temperature
        temperature = (1.0, inverse) if isinstance(inverse, Tensor) else (inverse, None)
        return transform.scale, transform.softcap, *temperature, self.backend, self.strict


@dataclass(frozen=True, eq=False)
class CompiledLogits(GivenLogits):
    """Given logits in a graph.

    backend, strict   as in `Options`; `kernels` is not used
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
        """Return "logps" and the named statistics of each row, fp32 [num_rows] by name.

        An operator of torch.library computes them. `RowSource` describes the arguments. There is no
        reference.
        """
        assert reference is None
        row_pass = CompiledPass(
            dtype=None,
            transform=self.transform,
            targets=targets,
            mask=mask,
            names=softmax_sum_names(names, None),
            backend=self.backend,
            strict=self.strict,
        )
        return row_statistics(row_pass, RequestedStatistics(names, detached), self.tensors)


@dataclass(frozen=True, eq=False)
class CompiledProjection(ProjectedLogits):
    """Logits from hidden states in a graph.

    backend, strict   as in `Options`; `kernels` is not used
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
        """Return "logps" and the named statistics of each row, fp32 [num_rows] by name.

        An operator of torch.library computes them. `RowSource` describes the arguments. There is no
        reference.
        """
        assert reference is None
        row_pass = CompiledPass(
            dtype=self.projection.matmul_dtype,
            transform=self.transform,
            targets=targets,
            mask=mask,
            names=softmax_sum_names(names, None),
            backend=self.backend,
            strict=self.strict,
        )
        return row_statistics(row_pass, RequestedStatistics(names, detached), self.tensors)
