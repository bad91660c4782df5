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
from .cpu_module import DTYPES, _cpu, available, inverse_temperature, matrix, of_partials, of_slopes, part_of, rows_of, vector  # noqa: F401
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
    of_logits, (lo, n) = rows_of("logits", logits), part_of(logits, rows)
    result = RowStats.empty(names, n, logits.device)
    at = of_partials(result, n)
    _cpu.stats(
        *of_logits, logits.shape[2], lo, n,
        vector("targets", targets, torch.int64, n), vector("read", read, torch.bool, n),
        transform.scale, transform.softcap, *inverse_temperature(transform, n),
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
    of_logits, (lo, n) = rows_of("logits", logits), part_of(logits, rows)
    at, (of_logp, constant, log, prob, _) = of_partials(stats, n), of_slopes(slopes, n)
    _cpu.pull(
        *of_logits, *rows_of("out", out, logits.shape).out, logits.shape[2], lo, n, vector("targets", targets, torch.int64, n),
        transform.scale, transform.softcap, *inverse_temperature(transform, n), at["max"], at["sum"], at["target"],
        of_logp, constant, log, prob, torch.get_num_threads(),
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
    n, outputs = inputs[0].numel(), [torch.empty_like(inputs[0]) for _ in program.outputs]
    of_inputs, of_outputs = ([vector("inputs", x, torch.float32, n) for x in xs] for xs in (inputs, outputs))
    _compiled(program).run(numbers, of_inputs, of_outputs, n)
    return outputs


def _by_program(
    logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None, teacher: Teacher | None
) -> FusedRows:
    if not objective.one_pass:
        raise ValueError(f"{objective} in one visit of each row: its slopes depend on other tokens.")
    program, numbers = token_program(objective, rows)
    of_logits, n = rows_of("logits", logits), logits.shape[0] * logits.shape[1]
    inputs = {name: getattr(rows, name).contiguous() for name in program.inputs[2:]}
    of_inputs = [vector(name, x, torch.float32, n) for name, x in inputs.items()]
    by = (_compiled(program), numbers, of_inputs, rows.entropy_weight is not None)
    of_out = (0, *of_logits.out[1:]) if out is None else rows_of("out", out, logits.shape).out
    to = (*of_out, logits.shape[2], n)
    read = (vector("targets", rows.targets, torch.int64, n), vector("read", rows.read, torch.bool, n))
    if teacher is not None:
        return cpu_divergence.fused(logits, rows, transform, teacher, by, to, read)
    results = [torch.empty(n, dtype=torch.float32) for _ in range(3)]
    logps, entropy, losses = (vector("results", x, torch.float32, n) for x in results)
    _cpu.fused(
        *by, *of_logits, *to, *read, transform.scale, transform.softcap, *inverse_temperature(transform, n),
        logps, entropy, losses, torch.get_num_threads(),
    )  # fmt: skip
    return FusedRows(*results)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor (a 0-d tensor), without a pass over it when factor is 1."""
    number = float(factor)
    if number == 1.0:
        return
    if gradient.is_contiguous() and gradient.dtype in DTYPES:
        address, dtype, _ = matrix("gradient", gradient.view(1, -1), (1, gradient.numel()))
        _cpu.scale(address, dtype, gradient.numel(), number, torch.get_num_threads())
    else:
        gradient.mul_(number)
