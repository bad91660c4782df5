"""The CPU backend: C++ row kernels (csrc/), AVX-512, AVX2 or plain code picked at run time.

There are no RL formulas here: `fused` has those of token_stage.py traced into a program, which C++ runs between its two visits of a
row. A formula that cannot be traced costs a second visit of the logits with the formulas in torch; `strict` refuses it.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...formulas.program import FormulaRefused, Program
from ...formulas.token_program import compare_once, token_program
from ..rows import RowStats, RowTransform, Slopes, Teacher
from . import FusedRows, cpu_divergence, fall_back, two_visits
from .cpu_divergence import mixed  # noqa: F401
from .cpu_module import DTYPES, _cpu, address, available, check, inverse_temperature, layout  # noqa: F401
from .cpu_select import masses, select  # noqa: F401
from .cpu_sparse import add_hidden_rows, add_weight_rows, slot_logits  # noqa: F401

if TYPE_CHECKING:
    from ...formulas.token_stage import TokenRows
    from ...objective import Objective

Tensor = torch.Tensor

WRITES_BEHIND_READS = True

#: Bytes of logits in a block of rows that is visited twice. A block has a fixed cost of 100-200 us (two parallel regions and
#: the token stage), so it should be large, but no larger than the last-level cache: on 2 cores that share 32 MiB, blocks of
#: 8 / 16 / 32 MiB took 1.57 / 1.40 / 1.32 times a copy of the logits. Large servers have about 4 MiB of cache per thread.
BLOCK_BYTES_PER_THREAD = 4 << 20


@functools.cache
def last_level_cache() -> int:
    """Bytes of one last-level cache; 32 MiB where the system does not say."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(size.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


def stats(
    logits: Tensor,
    targets: Tensor,
    read: Tensor | None,
    transform: RowTransform,
    names: tuple[str, ...],
    *,
    rows: tuple[int, int] | None = None,
    teacher: Teacher | None = None,
) -> RowStats:
    """Partials of the flat rows lo..hi of logits [A, T, V] (all by default); targets, read and a per-row temperature are cut
    to that range, [hi - lo]."""
    if teacher is not None:
        return cpu_divergence.stats(logits, targets, read, transform, names, teacher, rows=rows)
    _, inner, vocab, outer_stride, inner_stride = layout(logits)
    lo, hi = rows or (0, logits.shape[0] * inner)
    n = hi - lo
    check(targets, torch.int64, n)
    if read is not None:
        check(read, torch.bool, n)
    fixed, per_row = inverse_temperature(transform, n)
    result = RowStats.empty(names, n, logits.device)
    at = {name: result.values.data_ptr() + 4 * n * i for i, name in enumerate(names)}
    _cpu.stats(
        logits.data_ptr(), DTYPES[logits.dtype], inner, outer_stride, inner_stride, vocab, lo, n,
        targets.data_ptr(), address(read),
        transform.scale, transform.softcap, fixed, per_row,
        at["max"], at["sum"], at["target"], at.get("weighted", 0), at.get("squares", 0), at.get("top", 0),
        torch.get_num_threads(),
    )  # fmt: skip
    return result


def pull(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    slopes: Slopes,
    transform: RowTransform,
    out: Tensor,
    *,
    rows: tuple[int, int] | None = None,
    teacher: Teacher | None = None,
) -> None:
    """The gradient of the flat rows lo..hi of logits [A, T, V] into the same rows of out [A, T, V], which may be the
    logits themselves. The per-row vectors are cut to that range, [hi - lo]."""
    if slopes.teacher is not None:
        assert teacher is not None
        return cpu_divergence.pull(logits, targets, stats, slopes, transform, out, teacher, rows=rows)
    outer, inner, vocab, outer_stride, inner_stride = layout(logits)
    lo, hi = rows or (0, outer * inner)
    n = hi - lo
    out_outer, out_inner, out_vocab, out_outer_stride, out_inner_stride = layout(out)
    assert (out_outer, out_inner, out_vocab) == (outer, inner, vocab), (out.shape, logits.shape)
    check(targets, torch.int64, n)
    for vector in slopes:
        if vector is not None:
            check(vector, torch.float32, n)
    values = stats.values
    assert values.shape == (len(stats.names), n) and values.dtype == torch.float32, (values.shape, values.dtype)
    assert values.stride(1) == 1 or n <= 1, values.stride()
    first, step = values.data_ptr(), 4 * values.stride(0)
    fixed, per_row = inverse_temperature(transform, n)
    _cpu.pull(
        logits.data_ptr(), DTYPES[logits.dtype], inner, outer_stride, inner_stride,
        out.data_ptr(), DTYPES[out.dtype], out_outer_stride, out_inner_stride, vocab, lo, n,
        targets.data_ptr(), transform.scale, transform.softcap, fixed, per_row,
        first, first + step, first + 2 * step,  # max, sum, target
        slopes.target.data_ptr(), address(slopes.constant), address(slopes.log), address(slopes.prob),
        torch.get_num_threads(),
    )  # fmt: skip


def fused(
    logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None,
    *, teacher: Teacher | None = None,
) -> FusedRows:  # fmt: skip
    """Both passes over a row and the formulas between them, run by one thread per row."""
    try:
        return _by_program(logits, rows, objective, transform, out, teacher)
    except FormulaRefused as refusal:
        fall_back("a second visit of the logits, with the formulas in PyTorch, which is slower", str(refusal).rstrip("."))
    threads = torch.get_num_threads()
    row_bytes = logits.shape[-1] * (logits.element_size() + (0 if teacher is None else teacher.logits.element_size()))
    block_rows = max(last_level_cache(), BLOCK_BYTES_PER_THREAD * threads) // row_bytes
    return two_visits(sys.modules[__name__], logits, rows, objective, transform, out, max(block_rows, threads), teacher)


class _Strict:
    """This backend without that second pass over the logits; a program is compared with torch before it is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[__name__], name)

    def fused(
        self, logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None,
        *, teacher: Teacher | None = None,
    ) -> FusedRows:  # fmt: skip
        compare_once(objective, rows, _run)
        return _by_program(logits, rows, objective, transform, out, teacher)


strict = _Strict()


@functools.lru_cache(maxsize=256)
def _compiled(program: Program) -> _cpu.Program:
    numbers = len(program.numbers_used)
    try:
        return _cpu.Program(program.name, numbers, len(program.inputs), list(program.steps), list(program.outputs))
    except ValueError as error:
        raise FormulaRefused(str(error)) from None


def _run(program: Program, numbers: list[float], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a program for inputs fp32 [n]."""
    outputs = [torch.empty_like(inputs[0]) for _ in program.outputs]
    _compiled(program).run(numbers, [x.data_ptr() for x in inputs], [x.data_ptr() for x in outputs], inputs[0].numel())
    return outputs


def _by_program(
    logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None, teacher: Teacher | None
) -> FusedRows:
    assert objective.one_pass, objective
    program, numbers = token_program(objective, rows)
    compiled = _compiled(program)
    outer, inner, vocab, outer_stride, inner_stride = layout(logits)
    n = outer * inner
    *out_shape, out_outer_stride, out_inner_stride = layout(logits if out is None else out)
    assert out_shape == [outer, inner, vocab], (out_shape, logits.shape)
    vectors = [getattr(rows, name).contiguous() for name in program.inputs[2:]]
    for vector in vectors:
        check(vector, torch.float32, n)
    check(rows.targets, torch.int64, n)
    if rows.read is not None:
        check(rows.read, torch.bool, n)
    by = (compiled, numbers, [x.data_ptr() for x in vectors], rows.entropy_weight is not None)
    to = (address(out), DTYPES[logits.dtype if out is None else out.dtype], out_outer_stride, out_inner_stride, vocab, n)
    if teacher is not None:
        return cpu_divergence.fused(logits, rows, transform, teacher, by, to)
    fixed, per_row = inverse_temperature(transform, n)
    result = FusedRows(*(torch.empty(n, dtype=torch.float32) for _ in range(3)))
    _cpu.fused(
        *by, logits.data_ptr(), DTYPES[logits.dtype], inner, outer_stride, inner_stride, *to,
        rows.targets.data_ptr(), address(rows.read), transform.scale, transform.softcap, fixed, per_row,
        result.logps.data_ptr(), result.entropy.data_ptr(), result.losses.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor (a 0-d tensor), without a pass over it when factor is 1."""
    number = float(factor)
    if number == 1.0:
        return
    if gradient.is_contiguous() and gradient.dtype in DTYPES:
        _cpu.scale(gradient.data_ptr(), DTYPES[gradient.dtype], gradient.numel(), number, torch.get_num_threads())
    else:
        gradient.mul_(number)
