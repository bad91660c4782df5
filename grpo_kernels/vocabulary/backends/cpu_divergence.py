"""Student and teacher rows in C++ (csrc/divergence.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..divergence import KINDS
from ..rows import RowStats, RowTransform, Slopes, Teacher
from . import FusedRows
from .cpu_module import DTYPES, _cpu, address, check, inverse_temperature, layout

if TYPE_CHECKING:
    from ...formulas.token_stage import TokenRows

Tensor = torch.Tensor


def _streams(logits: Tensor, transform: RowTransform, teacher: Teacher, n: int) -> tuple[_cpu.Stream, _cpu.Stream]:
    assert teacher.logits.shape == logits.shape, (teacher.logits.shape, logits.shape)
    return _stream(logits, transform, n), _stream(teacher.logits, teacher.transform, n)


def _stream(x: Tensor, transform: RowTransform, n: int) -> _cpu.Stream:
    _, inner, _, outer_stride, inner_stride = layout(x)
    of = (transform.scale, transform.softcap, *inverse_temperature(transform, n))
    return _cpu.Stream(x.data_ptr(), DTYPES[x.dtype], inner, outer_stride, inner_stride, *of)


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
    lo, n = _range(logits, rows)
    check(targets, torch.int64, n)
    if read is not None:
        check(read, torch.bool, n)
    result = RowStats.empty(names, n, logits.device, teacher)
    at = {name: result.values.data_ptr() + 4 * n * i for i, name in enumerate(names)}
    _cpu.divergence_stats(
        *_streams(logits, transform, teacher, n), KINDS.index(teacher.kind), logits.shape[-1], lo, n,
        targets.data_ptr(), address(read),
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
    lo, n = _range(logits, rows)
    if read is not None:
        check(read, torch.bool, n)
    result = torch.empty(2, n, dtype=torch.float32)
    top, total, teacher_top, teacher_total, log_sums = _known(stats, n)
    _cpu.divergence_mixed(
        *_streams(logits, transform, teacher, n), teacher.mixture, logits.shape[-1], lo, n, address(read),
        top.data_ptr(), total.data_ptr(), teacher_top.data_ptr(), teacher_total.data_ptr(), log_sums.data_ptr(),
        result[0].data_ptr(), result[1].data_ptr(), torch.get_num_threads(),
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
    lo, n = _range(logits, rows)
    top, total, teacher_top, teacher_total, log_sums = _known(stats, n)
    center, target = stats.center.contiguous(), stats.target.contiguous()
    for vector in (center, target, *slopes):
        if vector is not None:
            check(vector, torch.float32, n)
    check(targets, torch.int64, n)
    *shape, outer_stride, inner_stride = layout(out)
    assert shape == list(logits.shape), (shape, logits.shape)
    assert slopes.teacher is not None
    _cpu.divergence_pull(
        *_streams(logits, transform, teacher, n), KINDS.index(teacher.kind), teacher.mixture,
        out.data_ptr(), DTYPES[out.dtype], outer_stride, inner_stride, logits.shape[-1], lo, n,
        targets.data_ptr(), top.data_ptr(), total.data_ptr(), target.data_ptr(),
        slopes.target.data_ptr(), address(slopes.constant), address(slopes.log), address(slopes.prob),
        teacher_top.data_ptr(), teacher_total.data_ptr(), log_sums.data_ptr(), center.data_ptr(), slopes.teacher.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip


def fused(
    logits: Tensor, rows: TokenRows, transform: RowTransform, teacher: Teacher,
    by: tuple[_cpu.Program, list[float], list[int], bool], to: tuple[int, int, int, int, int, int],
) -> FusedRows:  # fmt: skip
    """Loss, divergence and gradient of all rows, as `cpu.fused`: by a program with its numbers and inputs, to where `to` says."""
    n = to[-1]
    weight = None if rows.divergence_weight is None else rows.divergence_weight.contiguous()
    if weight is not None:
        check(weight, torch.float32, n)
    logps, entropy, losses, divergence = torch.empty(4, n, dtype=torch.float32).unbind()
    _cpu.divergence_fused(
        *by, *_streams(logits, transform, teacher, n), KINDS.index(teacher.kind), teacher.mixture, *to,
        rows.targets.data_ptr(), address(rows.read), address(weight),
        logps.data_ptr(), entropy.data_ptr(), losses.data_ptr(), divergence.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return FusedRows(logps, entropy, losses, divergence)


def _range(logits: Tensor, rows: tuple[int, int] | None) -> tuple[int, int]:
    """(the first row, how many)."""
    lo, hi = rows or (0, logits.shape[0] * logits.shape[1])
    return lo, hi - lo


def _known(stats: RowStats, n: int) -> tuple[Tensor, ...]:
    """What a second pass needs to know about both rows: max, sum, teacher_max, teacher_sum and log_sums."""
    statistics = (stats.max, stats.sum, stats.get("teacher_max"), stats.get("teacher_sum"), stats.log_sums)
    vectors = tuple(x.contiguous() for x in statistics if x is not None)
    for vector in vectors:
        check(vector, torch.float32, n)
    assert len(vectors) == len(statistics), stats.names
    return vectors
