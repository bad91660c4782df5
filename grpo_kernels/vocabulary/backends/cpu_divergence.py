"""Student and teacher rows in C++ (csrc/divergence.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..divergence import KINDS
from ..rows import RowStats, RowTransform, Slopes, Teacher
from . import FusedRows
from .cpu_module import _cpu, inverse_temperature, matrix, of_partials, of_slopes, part_of, rows_of, vector

if TYPE_CHECKING:
    from ...formulas.token_stage import TokenRows

Tensor = torch.Tensor


def _streams(logits: Tensor, transform: RowTransform, teacher: Teacher, n: int) -> tuple[_cpu.Stream, _cpu.Stream]:
    """Both streams, of which n rows are taken."""
    own = _cpu.Stream(*rows_of("logits", logits), transform.scale, transform.softcap, *inverse_temperature(transform, n))
    t = teacher.transform
    second = rows_of("teacher.logits", teacher.logits, logits.shape)
    return own, _cpu.Stream(*second, t.scale, t.softcap, *inverse_temperature(t, n))


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
    """Partials of both streams, as `cpu.stats`."""
    lo, n = part_of(logits, rows)
    streams = _streams(logits, transform, teacher, n)
    result = RowStats.empty(names, n, logits.device, teacher)
    at = of_partials(result, n)
    _cpu.divergence_stats(
        *streams, KINDS.index(teacher.kind), logits.shape[-1], lo, n,
        vector("targets", targets, torch.int64, n), vector("read", read, torch.bool, n),
        at["max"], at["sum"], at["target"], at.get("weighted", 0), at.get("squares", 0), at.get("top", 0),
        at["teacher_max"], at["teacher_sum"], at["cross"], at["excess"], torch.get_num_threads(),
    )  # fmt: skip
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
    lo, n = part_of(logits, rows)
    result, at, log_sums = torch.empty(2, n, dtype=torch.float32), of_partials(stats, n), stats.log_sums
    first, _, step = matrix("result", result, (2, n))
    _cpu.divergence_mixed(
        *_streams(logits, transform, teacher, n), teacher.mixture, logits.shape[-1], lo, n, vector("read", read, torch.bool, n),
        at["max"], at["sum"], at["teacher_max"], at["teacher_sum"], vector("log_sums", log_sums, torch.float32, n),
        first, first + 4 * step, torch.get_num_threads(),
    )  # fmt: skip
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
    """The gradient with that of the divergence, as `cpu.pull`."""
    lo, n = part_of(logits, rows)
    at, log_sums, center = of_partials(stats, n), stats.log_sums, stats.center
    of_logp, constant, log, prob, of_teacher = of_slopes(slopes, n)
    _cpu.divergence_pull(
        *_streams(logits, transform, teacher, n), KINDS.index(teacher.kind), teacher.mixture,
        *rows_of("out", out, logits.shape).out, logits.shape[-1], lo, n,
        vector("targets", targets, torch.int64, n), at["max"], at["sum"], at["target"], of_logp, constant, log, prob,
        at["teacher_max"], at["teacher_sum"], vector("log_sums", log_sums, torch.float32, n),
        vector("center", center, torch.float32, n), of_teacher, torch.get_num_threads(),
    )  # fmt: skip


def fused(
    logits: Tensor, rows: TokenRows, transform: RowTransform, teacher: Teacher,
    by: tuple[_cpu.Program, list[float], list[int], bool], to: tuple[int, int, int, int, int, int], of_rows: tuple[int, int],
) -> FusedRows:  # fmt: skip
    """Loss, divergence and gradient of all rows, as `cpu.fused`: by a program with its numbers and inputs, to where `to` says.
    `of_rows`: targets and which rows are read."""
    n = to[-1]
    weight = None if rows.divergence_weight is None else rows.divergence_weight.contiguous()
    results = torch.empty(4, n, dtype=torch.float32).unbind()
    logps, entropy, losses, divergence = (vector("results", x, torch.float32, n) for x in results)
    _cpu.divergence_fused(
        *by, *_streams(logits, transform, teacher, n), KINDS.index(teacher.kind), teacher.mixture, *to, *of_rows,
        vector("divergence_weight", weight, torch.float32, n), logps, entropy, losses, divergence, torch.get_num_threads(),
    )  # fmt: skip
    return FusedRows(*results)
