"""Student and teacher rows on a GPU: which kernel of triton_divergence_kernels.py is launched, with which arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..rows import RowStats, RowTransform, Slopes, Teacher
from .triton_arguments import check_layout, of_slopes, transform_arguments, vectors
from .triton_choices import choose, on_device
from .triton_divergence_kernels import _mixed_kernel, _two_pull_kernel, _two_stats_kernel
from .triton_launch import run

Tensor = torch.Tensor


class _Streams:
    """Both streams of a call as arguments."""

    def __init__(self, logits: Tensor, transform: RowTransform, teacher: Teacher, rows: tuple[int, int] | None) -> None:
        A, T, self.vocab = logits.shape
        self.first, hi = (0, A * T) if rows is None else rows
        self.n = hi - self.first
        check_layout("logits", logits)
        check_layout("teacher.logits", teacher.logits, logits)
        self.tensors = (logits, teacher.logits)
        self.rows = tuple(x for t in self.tensors for x in (t, t.stride(0), t.stride(1)))
        self.sizes = (self.vocab, T, self.first)
        ours, flags = transform_arguments(transform, self.n)
        of_teacher, teacher_flags = transform_arguments(teacher.transform, self.n)
        self.transforms = (*ours, *of_teacher)
        self.flags = flags | {f"TEACHER_{name}": value for name, value in teacher_flags.items()}

    def run(self, kind: str, kernel: Any, arguments: tuple[Any, ...], *others: Tensor, **flags: Any) -> None:
        tile = functools.partial(choose, kind, self.vocab, (*self.tensors, *others))
        run(kernel, tile, lambda _: self.n, arguments, self.flags | flags)


def stats(
    logits: Tensor,
    targets: Tensor,
    read: Tensor | None,
    transform: RowTransform,
    names: tuple[str, ...],
    teacher: Teacher,
    *,
    rows: tuple[int, int] | None = None,
) -> RowStats:
    """Partials of both streams, as `triton.stats`, except "top", which `triton.stats` fills."""
    of = _Streams(logits, transform, teacher, rows)
    of_rows = vectors(of.n, targets=targets, read=read)
    result = RowStats.empty(names, of.n, logits.device, teacher)
    if of.n == 0:
        return result
    made = ("max", "sum", "target", "weighted", "squares", "teacher_max", "teacher_sum", "cross", "excess")
    with on_device(logits):
        arguments = (*of.rows, *of.sizes, *of_rows, *of.transforms, *map(result.get, made))
        of.run("two", _two_stats_kernel, arguments, DIRECTION="forward" if teacher.kind == "forward" else "reverse")
    return result


def mixed(
    logits: Tensor,
    stats: RowStats,
    transform: RowTransform,
    teacher: Teacher,
    read: Tensor | None,
    *,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """fp32 [2, n]: the terms of these columns of KL(p||m) and KL(q||m), m the mixture of both rows."""
    of = _Streams(logits, transform, teacher, rows)
    (of_rows,), known = vectors(of.n, read=read), _known(stats, of.n)
    result = torch.empty(2, of.n, dtype=torch.float32, device=logits.device)
    if of.n == 0:
        return result
    with on_device(logits):
        arguments = (*of.rows, *of.sizes, of_rows, *of.transforms, *known, *_shares(teacher), *result.unbind())
        of.run("mixed", _mixed_kernel, arguments)
    return result


def pull(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    slopes: Slopes,
    transform: RowTransform,
    out: Tensor,
    teacher: Teacher,
    *,
    rows: tuple[int, int] | None = None,
) -> None:
    """The gradient with that of the divergence, as `triton.pull`."""
    of = _Streams(logits, transform, teacher, rows)
    check_layout("out", out, logits)
    (of_targets, target, center), of_rows = (
        vectors(of.n, targets=targets, target=stats.target, center=stats.center),
        of_slopes(slopes, of.n),
    )
    top, total, *of_teacher = _known(stats, of.n)
    if of.n == 0:
        return
    with on_device(logits):
        arguments = (
            *of.rows, out, out.stride(0), out.stride(1), *of.sizes,
            of_targets, top, total, target, *of_teacher, center, *_shares(teacher), *of_rows, *of.transforms,
        )  # fmt: skip
        of.run("two", _two_pull_kernel, arguments, out, DIRECTION=teacher.kind)


def _known(stats: RowStats, n: int) -> tuple[Tensor | None, ...]:
    """What a second pass needs to know about both rows."""
    partials = {name: stats.get(name) for name in ("max", "sum", "teacher_max", "teacher_sum")}
    return vectors(n, **{f"partials, {name}": x for name, x in partials.items()}, log_sums=stats.log_sums)


def _shares(teacher: Teacher) -> tuple[float, float]:
    """Weights of the teacher and of the student in their mixture."""
    return float(teacher.mixture), 1.0 - float(teacher.mixture)
