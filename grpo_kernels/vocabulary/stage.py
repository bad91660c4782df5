"""The vocabulary stage as one autograd Function.

    forward    source.stats: partials of each row's softmax, from which log-probs and entropy follow
    backward   source.pull:  the gradient of the source's tensors from the slopes of log-probs and entropy

A source is one of `sources.py`, which compute at once, or one of `operators.py`, which puts the same two calls into a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .memory import converted
from .rows import RowStats, RowTransform, Slopes, Teacher, partials_of
from .several import LogitsAt
from .sources import Source

Tensor = torch.Tensor

NO_SECOND = "grpo_kernels has no second derivatives: the gradient of these functions cannot be differentiated again."


class _NotDifferentiable(torch.autograd.Function):
    """Calls a function of tensors whose results torch.func must treat as constants."""

    @staticmethod
    def forward(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(NO_SECOND)


def gradient_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in the backward of an autograd Function. Where its result could be differentiated again, that
    raises RuntimeError: autograd would take the gradient for a constant."""
    if torch.compiler.is_compiling():
        return function(*arguments)
    # torch.func.vjp calls the backward after its level has ended. Wrappers of that level are then without memory.
    live = [torch._C._functorch.unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments]
    if not torch.is_grad_enabled():
        return function(*live)
    by_func = torch._C._are_functorch_transforms_active() or any(x is not y for x, y in zip(live, arguments, strict=True))
    if by_func:  # which always records the backward: only a second derivative is refused
        return _NotDifferentiable.apply(function, *live)
    raise RuntimeError(f"{NO_SECOND} Call backward without create_graph=True.")


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`; in eager code without what `apply` does for torch.func and for arguments by name, which takes
    longer than a small batch."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def with_sums(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What the passes of a loss take that has several over the same hidden states, weight and bias: behind these, where one of them
    has 16 bits, fp32 tensors without memory, to which the sources give the gradients. So autograd adds those of all passes in fp32,
    and they are rounded once."""
    wanted = [x is not None and x.requires_grad for x in tensors]
    narrow = any(x.dtype != torch.float32 for x, w in zip(tensors, wanted, strict=True) if w and x is not None)
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if len(tensors) != 3 or not narrow or traced or not torch.is_grad_enabled():
        return tensors
    sums = applied(_Sums, *tensors)
    return *tensors, *(x if w else None for x, w in zip(sums, wanted, strict=True))


class _Sums(torch.autograd.Function):
    """The tensors of `with_sums`: their gradients, in the dtype of the tensors that they stand for."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        ctx.set_materialize_grads(False)
        return tuple(None if x is None else torch.zeros((), device=x.device).expand(x.shape) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else converted(g, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))


class VocabularyStage(torch.autograd.Function):
    """(log-probs, the statistics asked for, partials), each fp32 with one entry a row. The partials have no gradient, and of the
    statistics those in `with_gradient` have one."""

    @staticmethod
    def forward(
        source: Source,
        statistics: tuple[str, ...],  # see STATISTICS
        with_gradient: tuple[str, ...],
        names: tuple[str, ...],  # the partials that the statistics need
        targets: Tensor,  # int64 [n]
        read: Tensor | None,  # bool [n]
        scale: float,
        softcap: float,
        inv_temperature: float | Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        transform = RowTransform(scale, softcap, inv_temperature)
        stats = source.stats(tensors, targets, read, transform, names)
        statistics_of_rows = stats.found(statistics, read)
        if source.at is None:
            return *statistics_of_rows, *stats.draws, stats.values
        several = source.logits_at(tensors)
        of_teacher = () if several.teacher is None else (several.teacher.logits,)
        return (
            *statistics_of_rows,
            several.log_probs(stats, read, transform),
            several.logits,
            several.used,
            *of_teacher,
            stats.values,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        source, statistics, with_gradient, names, targets, read, scale, softcap, inv_temperature, *tensors = inputs
        # Slices, as torch 2.9 traces strict=False as strict=True.
        values = dict(zip(statistics, output[1 : 1 + len(statistics)], strict=True))
        # What the backward needs beside partials: logits at further ids, behind their log-probs, or columns that were drawn.
        several = output[len(statistics) + (1 if source.at is None else 2) : -1]
        ctx.set_materialize_grads(False)
        fixed = (x for name, x in values.items() if name not in with_gradient)
        ctx.mark_non_differentiable(output[-1], *several, *fixed)
        per_row = isinstance(inv_temperature, Tensor)
        ctx.source, ctx.statistics, ctx.with_gradient, ctx.names = source, statistics, with_gradient, names
        ctx.versions, ctx.draws = _versions(source), 0 if source.at is not None else len(several)
        ctx.numbers = (scale, softcap, None if per_row else inv_temperature)
        kept = [values[name] for name in with_gradient]
        ctx.save_for_backward(targets, read, inv_temperature if per_row else None, output[-1], *several, *kept, *tensors)

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        targets, read, inv_temperatures, partials, *saved = ctx.saved_tensors
        upstream = {"logps": d_logps, **dict(zip(ctx.statistics, others[: len(ctx.statistics)], strict=True))}
        known = ("logps", *ctx.with_gradient)
        if ctx.source.at is not None:
            upstream["at"], known = others[len(ctx.statistics)], (*known, "at")
        given = tuple(name for name in known if upstream[name] is not None)
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        if _versions(ctx.source) != ctx.versions:
            raise RuntimeError(
                "the second stream of rows (its logits, hidden states or head) was written to between forward and backward, which "
                "reads it again: call backward first, or pass a copy."
            )
        plan = _Pull(ctx.source, ctx.names, ctx.needs_input_grad[9:], ctx.numbers, given, ctx.with_gradient, ctx.draws)
        slopes = [upstream[name] for name in given]
        return *(None,) * 9, *gradient_once(_pull, plan, targets, read, inv_temperatures, partials, *slopes, *saved)


def vocabulary_stage(
    source: Source, statistics: tuple[str, ...], with_gradient: tuple[str, ...], targets: Tensor, read: Tensor | None,
    transform: RowTransform, *tensors: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """(log-probs [n], the statistics by name, "at" those of the ids that the source asks for), with the gradient of the source's
    tensors."""
    kind = "" if source.teacher is None else source.teacher.kind
    names, rows = partials_of(statistics, kind), (targets, read, *transform)
    needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if torch.compiler.is_compiling():
        # torch.compile knows such a Function with gradients only.
        stage = VocabularyStage.apply if needed else VocabularyStage.forward
        logps, *values = stage(source, statistics, with_gradient, names, *rows, *tensors)
    elif needed or torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        rows = tuple(map(_savable, rows))
        logps, *values = applied(VocabularyStage, source, statistics, with_gradient, names, *rows, *tensors)
    else:  # for a small batch the overhead of a Function would dominate
        with torch.no_grad():
            logps, *values = VocabularyStage.forward(source, statistics, with_gradient, names, *rows, *tensors)
    known = statistics if source.at is None else (*statistics, "at")
    return logps, dict(zip(known, values[: len(known)], strict=True))


def _versions(source: Source) -> tuple[int, ...]:
    """How often the teacher's tensors were written to, where torch counts it."""
    teacher: Any = source.teacher
    tensors = () if teacher is None else (teacher.logits,) if isinstance(teacher, Teacher) else teacher.head.tensors
    return tuple(x._version for x in tensors if x is not None and not x.is_inference())


def _savable(x: Any) -> Any:
    """x as autograd may save it: a tensor made in inference mode has to be copied."""
    copied = isinstance(x, Tensor) and x.is_inference() and not torch.is_inference_mode_enabled()
    return x.clone() if copied else x


class _Pull(NamedTuple):
    """What the backward of `VocabularyStage` knows beside tensors."""

    source: Source
    names: tuple[str, ...]  # of the partials
    wanted: tuple[bool, ...]
    numbers: tuple[float, float, float | None]  # of the transform; None: temperatures of rows
    given: tuple[str, ...]  # statistics with an upstream gradient
    kept: tuple[str, ...]  # statistics whose values were kept
    draws: int  # tensors of columns that were drawn


def _pull(
    plan: _Pull, targets: Tensor, read: Tensor | None, inv_temperatures: Tensor | None, partials: Tensor, *rest: Tensor | None
) -> tuple[Tensor | None, ...]:
    one, slots = len(plan.given), plan.source.at
    upstream: dict[str, Tensor] = dict(zip(plan.given, rest[:one], strict=True))  # type: ignore[arg-type]
    teacher, several, rest = plan.source.teacher, None, rest[one:]
    if slots is not None:
        (logits, used), rest = rest[:2], rest[2:]
        second = None
        if teacher is not None:
            second, rest = Teacher(rest[0], teacher.transform, teacher.kind, teacher.mixture), rest[1:]  # type: ignore[arg-type]
        several = LogitsAt(slots, logits, used, second)  # type: ignore[arg-type]
    draws, rest = rest[: plan.draws], rest[plan.draws :]
    values, tensors = rest[: len(plan.kept)], rest[len(plan.kept) :]
    d_several, d_outside = upstream.pop("at", None), upstream.pop("outside", None)
    upstream = upstream or {"logps": torch.zeros_like(partials[0])}
    slopes = Slopes.of(dict(zip(plan.kept, values, strict=True)), upstream, read)  # type: ignore[arg-type]
    scale, softcap, number = plan.numbers
    transform = RowTransform(scale, softcap, inv_temperatures if number is None else number)  # type: ignore[arg-type]
    of = ("", 0.0) if teacher is None else (teacher.kind, teacher.mixture)
    stats, gradient = RowStats(partials, plan.names, *of, draws), None  # type: ignore[arg-type]
    if several is not None and (d_several is not None or d_outside is not None):
        d_several = torch.zeros_like(several.logits) if d_several is None else d_several.to(torch.float32)
        gradient, slopes = several.gradients(d_several, d_outside, targets, read, stats, slopes, transform)
    return plan.source.pull(tensors, plan.wanted, targets, read, stats, slopes, transform, gradient)
