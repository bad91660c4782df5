"""The vocabulary stage as operators of torch.library, which is how torch.compile sees it.

    torch.ops.grpo_kernels.stats, pull                   from logits
    torch.ops.grpo_kernels.linear_stats, linear_pull     from hidden states and a head
    torch.ops.grpo_kernels.linear_draw, linear_pull_drawn  the same with columns that are drawn for a sparse gradient

The namespace is the name that the package is imported by: two copies under two names have operators of their own.

What crosses this border are tensors, numbers and names. Each operator has a schema and a fake implementation, so that a graph
goes through without a break and with symbolic row counts. `VocabularyStage` calls them in place of the kernels, and gives the
gradient; the operators themselves have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .layout import check_targets
from .sparsity import Sparse
from .vocabulary import backends
from .vocabulary.rows import RowStats, RowTransform, Slopes
from .vocabulary.sampled import SampledHidden
from .vocabulary.selection import capacity
from .vocabulary.sources import Hidden, Logits

Tensor = torch.Tensor

NAMESPACE = __name__.partition(".")[0]
ROWS = "Tensor targets, Tensor? read"
SLOPES = "Tensor partials, str[] names, Tensor slope, Tensor? constant, Tensor? log, Tensor? prob"
HEAD = "Tensor hidden, Tensor weight, Tensor? bias, ScalarType dtype"
DRAWS = "Tensor ids, Tensor offsets, Tensor rows, Tensor logits, float step"
TRANSFORM = "float scale, float softcap, float inv_temperature, Tensor? inv_temperatures, str backend, bool strict"


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


def _at_run_time(given: tuple[Any, ...], device: torch.device) -> tuple[RowTransform, backends.SparseBackend]:
    scale, softcap, inv_temperature, inv_temperatures, backend, strict = given
    transform = RowTransform(scale, softcap, inv_temperature if inv_temperatures is None else inv_temperatures)
    return transform, backends.pick(backend, device, strict)


def _fake_stats(targets: Tensor, names: tuple[str, ...]) -> Tensor:
    return torch.empty(len(names), *targets.shape, dtype=torch.float32, device=targets.device)


@_operator(
    f"(Tensor logits, {ROWS}, str[] names, {TRANSFORM}) -> Tensor",
    lambda logits, targets, read, names, *rest: _fake_stats(targets, names),
)
def _stats(logits: Tensor, targets: Tensor, read: Tensor | None, names: list[str], *rest: Any) -> Tensor:
    check_targets(targets, read, logits.shape[-1])
    transform, backend = _at_run_time(rest, targets.device)
    return Logits(backend).stats((logits,), targets, read, transform, tuple(names)).values


@_operator(f"(Tensor logits, {ROWS}, {SLOPES}, {TRANSFORM}) -> Tensor", lambda logits, *rest: logits.new_empty(logits.shape))
def _pull(logits: Tensor, targets: Tensor, read: Tensor | None, partials: Tensor, names: list[str], *rest: Any) -> Tensor:
    slopes, (transform, backend) = Slopes(*rest[:4]), _at_run_time(rest[4:], targets.device)
    stats = RowStats(partials, tuple(names))
    (gradient,) = Logits(backend).pull((logits,), (True,), targets, read, stats, slopes, transform)
    assert gradient is not None
    return gradient


@_operator(
    f"({HEAD}, {ROWS}, str[] names, {TRANSFORM}) -> Tensor",
    lambda hidden, weight, bias, dtype, targets, read, names, *rest: _fake_stats(targets, names),
)
def _linear_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, targets: Tensor, read: Tensor | None,
    names: list[str], *rest: Any,
) -> Tensor:  # fmt: skip
    check_targets(targets, read, weight.shape[0])
    transform, backend = _at_run_time(rest, targets.device)
    return Hidden(backend, dtype).stats((hidden, weight, bias), targets, read, transform, tuple(names)).values


def _fake_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *rest: Any) -> tuple[Tensor, ...]:
    pairs = zip((hidden, weight, bias), rest, strict=False)
    return tuple(x.new_empty(x.shape) if wanted and x is not None else hidden.new_empty(0) for x, wanted in pairs)


@_operator(
    f"({HEAD}, bool d_hidden, bool d_weight, bool d_bias, {ROWS}, {SLOPES}, {TRANSFORM}) -> (Tensor, Tensor, Tensor)",
    _fake_gradients,
)
def _linear_pull(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, h: bool, w: bool, b: bool,
    targets: Tensor, read: Tensor | None, partials: Tensor, names: list[str], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    slopes, (transform, backend) = Slopes(*rest[:4]), _at_run_time(rest[4:], targets.device)
    tensors, stats = (hidden, weight, bias), RowStats(partials, tuple(names))
    gradients = Hidden(backend, dtype).pull(tensors, (h, w, b), targets, read, stats, slopes, transform)
    return tuple(hidden.new_empty(0) if g is None else g for g in gradients)  # an operator cannot return None


def _fake_draw(
    hidden: Tensor, weight: Tensor, bias: Any, dtype: Any, targets: Tensor, read: Any, names: Any, step: float, *rest: Any
) -> tuple[Tensor, ...]:
    n = targets.numel()
    ids, offsets = (torch.empty(k, dtype=torch.int64, device=targets.device) for k in (n * capacity(step), n + 1))
    return _fake_stats(targets, names), ids, offsets, torch.empty_like(ids), torch.empty_like(ids, dtype=torch.float32)


@_operator(
    f"({HEAD}, {ROWS}, str[] names, float step, SymInt seed, Tensor? seeds, SymInt first_row, {TRANSFORM}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_draw,
)
def _linear_draw(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, targets: Tensor, read: Tensor | None,
    names: list[str], step: float, seed: int, seeds: Tensor | None, first_row: int, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_targets(targets, read, weight.shape[0])
    transform, backend = _at_run_time(rest, targets.device)
    source = SampledHidden(backend, dtype, sparse=Sparse(step, seed if seeds is None else seeds, first_row), padded=True)
    stats = source.stats((hidden, weight, bias), targets, read, transform, tuple(names))
    return stats.values, *stats.draws


@_operator(
    f"({HEAD}, bool d_hidden, bool d_weight, bool d_bias, {ROWS}, {SLOPES}, {DRAWS}, {TRANSFORM}) -> (Tensor, Tensor, Tensor)",
    _fake_gradients,
)
def _linear_pull_drawn(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, h: bool, w: bool, b: bool,
    targets: Tensor, read: Tensor | None, partials: Tensor, names: list[str], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    slopes, draws, step, (transform, backend) = Slopes(*rest[:4]), rest[4:8], rest[8], _at_run_time(rest[9:], targets.device)
    source, stats = SampledHidden(backend, dtype, sparse=Sparse(step)), RowStats(partials, tuple(names), draws=draws)
    gradients = source.pull((hidden, weight, bias), (h, w, b), targets, read, stats, slopes, transform)
    return tuple(hidden.new_empty(0) if g is None else g for g in gradients)


# ---- sources that put these operators into a graph


class _Traced:
    at = teacher = None  # log-probs of several ids and divergences leave the graph

    def logits_at(self, tensors: tuple[Any, ...]) -> Any:
        raise AssertionError


@dataclass(frozen=True, eq=False)
class TracedLogits(_Traced):
    """`Logits` in a graph: the backend is picked when the graph runs."""

    backend: str
    strict: bool

    def stats(
        self, tensors: tuple[Any, ...], targets: Tensor, read: Tensor | None, transform: RowTransform, names: tuple[str, ...]
    ) -> RowStats:
        values = _stats(*tensors, targets, read, list(names), *_numbers(transform), self.backend, self.strict)
        return RowStats(values, names)

    def pull(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], targets: Tensor, read: Tensor | None, stats: RowStats,
        slopes: Slopes, transform: RowTransform, several: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        rows = (targets, read, stats.values, list(stats.names), *slopes[:4])
        return (_pull(*tensors, *rows, *_numbers(transform), self.backend, self.strict),)


@dataclass(frozen=True, eq=False)
class TracedHidden(_Traced):
    """`Hidden` in a graph; with `sparse`, `SampledHidden`."""

    backend: str
    strict: bool
    dtype: torch.dtype
    sparse: Sparse | None = None

    def stats(
        self, tensors: tuple[Any, ...], targets: Tensor, read: Tensor | None, transform: RowTransform, names: tuple[str, ...]
    ) -> RowStats:
        rows, how = (self.dtype, targets, read, list(names)), (*_numbers(transform), self.backend, self.strict)
        if self.sparse is None:
            return RowStats(_linear_stats(*tensors, *rows, *how), names)
        step, seed, first_row = self.sparse.step, self.sparse.seed, self.sparse.first_row
        seeds = (0, seed) if isinstance(seed, Tensor) else (seed, None)
        values, *draws = _linear_draw(*tensors, *rows, step, *seeds, first_row, *how)
        return RowStats(values, names, draws=tuple(draws))

    def pull(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], targets: Tensor, read: Tensor | None, stats: RowStats,
        slopes: Slopes, transform: RowTransform, several: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        rows = (self.dtype, *wanted, targets, read, stats.values, list(stats.names), *slopes[:4])
        how = (*_numbers(transform), self.backend, self.strict)
        if self.sparse is None:
            gradients = _linear_pull(*tensors, *rows, *how)
        else:
            gradients = _linear_pull_drawn(*tensors, *rows, *stats.draws, self.sparse.step, *how)
        return tuple(g if w else None for g, w in zip(gradients, wanted, strict=True))


def _numbers(transform: RowTransform) -> tuple[float, float, float, Tensor | None]:
    t = transform.inv_temperature
    return (
        (transform.scale, transform.softcap, 1.0, t) if isinstance(t, Tensor) else (transform.scale, transform.softcap, t, None)
    )
