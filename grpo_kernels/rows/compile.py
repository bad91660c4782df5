"""Statistics of rows as operators of torch.library, which is how torch.compile sees them.

    torch.ops.grpo_kernels.stats, pull                  from logits
    torch.ops.grpo_kernels.linear_stats, linear_pull    from hidden states and a head

The namespace is the name that the package is imported by: two copies under two names have operators of their own.

What crosses this border are tensors, numbers and names. Each operator has a schema and a fake implementation, so that a graph
goes through without a break and with symbolic row counts. The operators have no gradient: `run.statistics` gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import check_targets
from . import backends
from .hidden import Hidden
from .partials import Partials, RowTransform, Slopes
from .run import Named, Rows, Tensors
from .stream import Logits, Parts, Stream, Visit

NAMESPACE = __name__.partition(".")[0]
ROWS = "Tensor?[] tensors, ScalarType? dtype, Tensor targets, Tensor? read, str[] names"  # dtype None: the tensors are logits
HOW = "float scale, float softcap, float inv_temperature, Tensor? inv_temperatures, str backend, bool strict"
OF_GRADIENT = "bool[] wanted, Tensor partials, Tensor slopes, str[] slope_names"


def _operators(
    name: str, schema: str, function: Callable[..., list[Tensor]], fake: Callable[..., list[Tensor]]
) -> tuple[Any, Any]:
    """Registers a function as operators from logits and from hidden states; `fake` makes empty results of the same shapes, dtypes
    and strides. All results are contiguous, whatever the layout of the inputs is."""
    made = []
    # From hidden states the host waits for row counts, which a CUDA graph cannot capture.
    for kind, tag in (("", None), ("linear_", getattr(torch.Tag, "cudagraph_unsafe", None))):
        tags: Any = () if tag is None else (tag,)
        operator = torch.library.custom_op(
            f"{NAMESPACE}::{kind}{name}", function, mutates_args=(), schema=f"({schema}) -> Tensor[]", tags=tags
        )
        operator.register_fake(fake)
        made.append(operator)
    return made[0], made[1]


def _stream(tensors: list[Tensor | None], dtype: torch.dtype | None, targets: Tensor, how: tuple[Any, ...]) -> Stream:
    scale, softcap, inv_temperature, inv_temperatures, backend, strict = how
    transform = RowTransform(scale, softcap, inv_temperature if inv_temperatures is None else inv_temperatures)
    of = (tuple(tensors), transform, backends.pick(backend, targets.device, strict), None)
    return Logits(*of) if dtype is None else Hidden(*of, dtype)


def _stats(
    tensors: list[Tensor | None], dtype: torch.dtype | None, targets: Tensor, read: Tensor | None, names: list[str], *how: Any
) -> list[Tensor]:
    """Partials of rows."""
    stream = _stream(tensors, dtype, targets, how)
    check_targets(targets, read, stream.columns)
    return [stream.stats(Visit(targets, read, tuple(names))).values]


def _fake_stats(tensors: Any, dtype: Any, targets: Tensor, read: Any, names: list[str], *_: Any) -> list[Tensor]:
    return [torch.empty(len(names), *targets.shape, dtype=torch.float32, device=targets.device)]


def _pull(
    tensors: list[Tensor | None], dtype: torch.dtype | None, targets: Tensor, read: Tensor | None, names: list[str],
    wanted: list[bool], partials: Tensor, slopes: Tensor, slope_names: list[str], *how: Any,
) -> list[Tensor]:  # fmt: skip
    """The gradients that are wanted."""
    stream = _stream(tensors, dtype, targets, how)
    visit = Visit(targets, read, tuple(names))
    gradients = stream.gradients(tuple(wanted), Parts(visit))
    stream.pull(visit, visit.found(partials), Slopes(slopes, tuple(slope_names)), gradients, None)
    pairs = zip(gradients.tensors(), tensors, strict=True)
    return [g.to(x.dtype) for g, x in pairs if g is not None and x is not None]


def _fake_pull(tensors: Any, dtype: Any, targets: Any, read: Any, names: Any, wanted: list[bool], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, needed in zip(tensors, wanted, strict=True) if needed]


STATS = _operators("stats", f"{ROWS}, {HOW}", _stats, _fake_stats)
PULL = _operators("pull", f"{ROWS}, {OF_GRADIENT}, {HOW}", _pull, _fake_pull)


# ---- rows that put these operators into a graph


@dataclass(eq=False)
class TracedRows(Rows):
    """One visit over the vocabulary in a graph. The backend is picked when the graph runs."""

    backend: str
    strict: bool

    def versions(self) -> list[int]:
        return []

    def without_tensors(self) -> TracedRows:
        return self

    def stats(self, tensors: Tensors) -> tuple[Tensor, ...]:
        (visit,) = self.visits
        (partials,) = STATS[isinstance(self.stream, Hidden)](*self._rows(tensors), *self._how)
        return *Partials(partials, visit.names).found(visit.statistics, visit.read), partials

    def pull(self, tensors: Tensors, known: Named, upstream: Named, wanted: tuple[bool, ...]) -> Tensors:
        visit, of_visit = self.visits[0], known[0]
        slopes = Slopes.of(of_visit, upstream[0], visit.read)
        of_gradient = (list(wanted), of_visit["partials"], slopes.values, list(slopes.names))
        made = PULL[isinstance(self.stream, Hidden)](*self._rows(tensors), *of_gradient, *self._how)
        found = iter(made)
        return tuple(next(found) if needed else None for needed in wanted)

    def _rows(self, tensors: Tensors) -> tuple[Any, ...]:
        visit, dtype = self.visits[0], self.stream.dtype if isinstance(self.stream, Hidden) else None
        return list(tensors), dtype, visit.targets, visit.read, list(visit.names)

    @property
    def _how(self) -> tuple[Any, ...]:
        transform = self.stream.transform
        t = transform.inv_temperature
        numbers = (1.0, t) if isinstance(t, Tensor) else (t, None)
        return transform.scale, transform.softcap, *numbers, self.backend, self.strict
