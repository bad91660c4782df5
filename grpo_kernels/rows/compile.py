"""Statistics of rows as operators of torch.library, which is how torch.compile sees them.

    torch.ops.grpo_kernels.stats, pull                  from logits
    torch.ops.grpo_kernels.linear_stats, linear_pull    from hidden states and a head, also with columns drawn for a sparse gradient

The namespace is the name that the package is imported by: two copies under two names have operators of their own.

What crosses this border are tensors, numbers and names. Each operator has a schema and a fake implementation, so that a graph
goes through without a break and with symbolic row counts. The operators have no gradient: `run.statistics` gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..layout import check_targets
from . import backends
from .hidden import Hidden
from .logits import Logits
from .partials import Partials, RowTransform, Slopes
from .run import DRAWS, Name, Problem, Tensors
from .selection import Sparse, capacity
from .stream import Parts, Stream, Visit

Tensor = torch.Tensor

NAMESPACE = __name__.partition(".")[0]
ROWS = "Tensor targets, Tensor? read, str[] names"
HOW = "float scale, float softcap, float inv_temperature, Tensor? inv_temperatures, str backend, bool strict"
SLOPES = "Tensor partials, Tensor slopes, str[] slope_names"
HEAD = "Tensor hidden, Tensor weight, Tensor? bias, ScalarType dtype"
DRAWN = "Tensor? ids, Tensor? offsets, Tensor? rows, Tensor? logits, float step"  # of columns that were drawn
SPARSE = "float step, SymInt seed, Tensor? seeds, SymInt first_row"  # a step of 0: the gradient has all columns


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: registers the function as an operator with this schema; `fake` makes empty results of the same shapes, dtypes and
    strides. All results are contiguous, whatever the layout of the inputs is."""

    def register(function: Callable[..., Any]) -> Any:
        name = function.__name__.removeprefix("_")
        # From hidden states the host waits for row counts, which a CUDA graph cannot capture.
        unsafe = getattr(torch.Tag, "cudagraph_unsafe", None) if name.startswith("linear") else None
        options: dict[str, Any] = {} if unsafe is None else {"tags": (unsafe,)}
        operator = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema, **options)
        operator.register_fake(fake)
        return operator

    return register


def _stream(tensors: Tensors, dtype: torch.dtype | None, how: tuple[Any, ...]) -> Stream:
    scale, softcap, inv_temperature, inv_temperatures, backend, strict = how
    transform = RowTransform(scale, softcap, inv_temperature if inv_temperatures is None else inv_temperatures)
    picked = backends.pick(backend, tensors[0].device, strict)
    return Logits(tensors, transform, picked, None) if dtype is None else Hidden(tensors, transform, picked, None, dtype)


def _fake_stats(targets: Tensor, names: list[str]) -> Tensor:
    return torch.empty(len(names), *targets.shape, dtype=torch.float32, device=targets.device)


@_operator(
    f"(Tensor logits, {ROWS}, {HOW}) -> Tensor",
    lambda logits, targets, read, names, *_: _fake_stats(targets, names),
)
def _stats(logits: Tensor, targets: Tensor, read: Tensor | None, names: list[str], *how: Any) -> Tensor:
    check_targets(targets, read, logits.shape[-1])
    return _stream((logits,), None, how).stats(Visit(targets, read, tuple(names))).partials.values


@_operator(f"(Tensor logits, {ROWS}, {SLOPES}, {HOW}) -> Tensor", lambda logits, *_: logits.new_empty(logits.shape))
def _pull(
    logits: Tensor, targets: Tensor, read: Tensor | None, names: list[str], partials: Tensor, slopes: Tensor,
    slope_names: list[str], *how: Any,
) -> Tensor:  # fmt: skip
    return _pulled((logits,), (True,), None, Visit(targets, read, tuple(names)), partials, (), slopes, slope_names, how)[0]


def _pulled(
    tensors: Tensors, wanted: tuple[bool, ...], dtype: torch.dtype | None, whole: Visit, partials: Tensor,
    draws: tuple[Tensor, ...], slopes: Tensor, slope_names: list[str], how: tuple[Any, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    stream = _stream(tensors, dtype, how)
    gradients = stream.gradients(wanted, Parts(whole, slots=bool(draws)))
    stream.pull(whole, whole.found(partials, draws), Slopes(slopes, tuple(slope_names)), gradients, None)
    made = gradients.tensors()
    # An operator cannot return None.
    return tuple(tensors[0].new_empty(0) if g is None else g.to(x.dtype) for g, x in zip(made, tensors, strict=True))


def _fake_linear_stats(
    hidden: Tensor, weight: Tensor, bias: Any, dtype: Any, targets: Tensor, read: Any, names: Any, step: float, *_: Any
) -> tuple[Tensor, ...]:
    n = targets.numel()
    slots, rows = (n * capacity(step), n + 1) if step else (0, 0)
    ids, offsets = (torch.empty(k, dtype=torch.int64, device=targets.device) for k in (slots, rows))
    return _fake_stats(targets, names), ids, offsets, torch.empty_like(ids), torch.empty_like(ids, dtype=torch.float32)


@_operator(f"({HEAD}, {ROWS}, {SPARSE}, {HOW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _fake_linear_stats)
def _linear_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, targets: Tensor, read: Tensor | None,
    names: list[str], step: float, seed: int, seeds: Tensor | None, first_row: int, *how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_targets(targets, read, weight.shape[0])
    sparse = Sparse(step, seed if seeds is None else seeds, first_row) if step else None
    whole = Visit(targets, read, tuple(names), sparse=sparse, padded=True)
    found = _stream((hidden, weight, bias), dtype, how).stats(whole)
    nothing = (*(targets.new_empty(0, dtype=torch.int64) for _ in range(3)), targets.new_empty(0, dtype=torch.float32))
    return found.partials.values, *(found.draws or nothing)


def _fake_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *rest: Any) -> tuple[Tensor, ...]:
    pairs = zip((hidden, weight, bias), rest, strict=False)
    return tuple(x.new_empty(x.shape) if wanted and x is not None else hidden.new_empty(0) for x, wanted in pairs)


@_operator(
    f"({HEAD}, bool d_hidden, bool d_weight, bool d_bias, {ROWS}, {SLOPES}, {DRAWN}, {HOW}) -> (Tensor, Tensor, Tensor)",
    _fake_gradients,
)
def _linear_pull(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, h: bool, w: bool, b: bool,
    targets: Tensor, read: Tensor | None, names: list[str], partials: Tensor, slopes: Tensor, slope_names: list[str],
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *drawn, step = rest[:5]
    whole, draws = Visit(targets, read, tuple(names), sparse=Sparse(step) if step else None), tuple(drawn) if step else ()
    return _pulled((hidden, weight, bias), (h, w, b), dtype, whole, partials, draws, slopes, slope_names, rest[5:])


# ---- a problem that puts these operators into a graph


@dataclass(frozen=True, eq=False)
class TracedRows(Problem):
    """One visit over the vocabulary in a graph. The backend is picked when the graph runs.

    dtype  of products; None: the tensors are logits."""

    transform: RowTransform
    backend: str
    strict: bool
    dtype: torch.dtype | None = None

    def stats(self, tensors: Tensors) -> tuple[Tensor, ...]:
        ((visit, statistics, _),) = self.reads
        draws: Any = ()
        if self.dtype is None:
            partials = _stats(*tensors, *self._rows, *self._how)
        else:
            sparse = (0.0, 0, None, 0)
            if visit.sparse is not None:
                seed = visit.sparse.seed
                seeds = (0, seed) if isinstance(seed, Tensor) else (seed, None)
                sparse = (visit.sparse.step, *seeds, visit.sparse.first_row)
            partials, *draws = _linear_stats(*tensors, self.dtype, *self._rows, *sparse, *self._how)
        saved = (partials,) if visit.sparse is None else (partials, *draws)
        return *Partials(partials, visit.names).found(statistics, visit.read), *saved

    def pull(
        self, tensors: Tensors, known: dict[Name, Tensor], upstream: dict[Name, Tensor], wanted: tuple[bool, ...]
    ) -> Tensors:
        ((visit, _, with_gradient),) = self.reads
        slopes = Slopes.of(
            {name: known[0, name] for name in with_gradient}, {name: x for (_, name), x in upstream.items()}, visit.read
        )
        of_slopes = (known[0, "partials"], slopes.values, list(slopes.names))
        if self.dtype is None:
            return (_pull(*tensors, *self._rows, *of_slopes, *self._how),)
        drawn = (*(known.get((0, name)) for name in DRAWS), 0.0 if visit.sparse is None else visit.sparse.step)
        gradients = _linear_pull(*tensors, self.dtype, *wanted, *self._rows, *of_slopes, *drawn, *self._how)
        return tuple(g if w else None for g, w in zip(gradients, wanted, strict=True))

    @property
    def _rows(self) -> tuple[Any, ...]:
        visit = self.reads[0].visit
        return visit.targets, visit.read, list(visit.names)

    @property
    def _how(self) -> tuple[Any, ...]:
        t = self.transform.inv_temperature
        numbers = (1.0, t) if isinstance(t, Tensor) else (t, None)
        return self.transform.scale, self.transform.softcap, *numbers, self.backend, self.strict
