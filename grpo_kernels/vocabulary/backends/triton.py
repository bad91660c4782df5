"""Triton backend: each program processes one row at a time, reading it once from device memory and then once from L2.

There are no RL formulas here: `fused` compiles those of token_stage.py into its kernel, see triton_formulas.py. Row
counts, strides, scalars and parameters are runtime values, so a new length or a new step of a schedule does not recompile.
Compile-time are the vocabulary's size class, dtypes, alignment and the presence of optional inputs.
A kernel that does not fit or compile gets a smaller tile and then raises KernelFailure, see triton_launch.py.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

import torch
import triton

from ...formulas import token_stage
from ..rows import OF_STUDENT, RowStats, RowTransform, Slopes, Teacher, partials_of
from . import FusedRows, triton_divergence, two_visits
from .triton_arguments import check_layout, of_slopes, transform_arguments, vectors
from .triton_choices import LAUNCH, SCALE_PROGRAMS, available, choice_of, choose, fused_kind, multiprocessors, on_device, serves  # noqa: F401
from .triton_divergence import mixed  # noqa: F401
from .triton_formulas import compiled_formula
from .triton_kernels import _fused_kernel, _pull_kernel, _scale_kernel, _stats_kernel
from .triton_launch import run
from .triton_select import masses, select  # noqa: F401
from .triton_sparse import add_hidden_rows, add_weight_rows, slot_logits  # noqa: F401

if TYPE_CHECKING:
    from ...formulas.token_stage import TokenRows
    from ...objective import Objective

Tensor = torch.Tensor

WRITES_BEHIND_READS = False  # many threads write at once, starting at the end of the row
WITH_TOP = partials_of(("top_id",))

#: What the fused kernel takes of `TokenRows`, in the order of its parameters.
OF_ROWS = (
    "targets", "read", "old_logps", "ref_logps", "sampler_logps", "advantages", "policy_weight", "kl_weight", "entropy_weight",
    "nll_weight",
)  # fmt: skip


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
    """Partials of each row of logits [A, T, V]. `rows` = (lo, hi) takes those flat rows; vectors are [hi - lo]."""
    if teacher is not None:
        result = triton_divergence.stats(logits, targets, read, transform, names, teacher, rows=rows)
        if "top" in names:  # rarely asked for with a teacher, so it is a separate pass
            alone = stats(logits, targets, read, transform, WITH_TOP, rows=rows)
            result.get("top").copy_(alone.get("top"))  # type: ignore[union-attr, arg-type]
        return result
    A, T, V = logits.shape
    lo, hi = (0, A * T) if rows is None else rows
    n = hi - lo
    check_layout("logits", logits)
    of_rows = vectors(n, targets=targets, read=read)
    scalars, flags = transform_arguments(transform, n)
    result = RowStats.empty(names, n, logits.device)
    if n == 0:
        return result
    with on_device(logits):
        arguments = (
            logits, logits.stride(0), logits.stride(1), V, T, lo, *of_rows, *scalars, *map(result.get, OF_STUDENT),
        )  # fmt: skip
        run(_stats_kernel, functools.partial(choose, "visit", V, (logits,)), lambda _: n, arguments, flags)
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
    """d logits into `out` [A, T, V], which may be the logits. Rows whose slopes are 0 become 0 and are not read."""
    if slopes.teacher is not None:
        assert teacher is not None
        return triton_divergence.pull(logits, targets, stats, slopes, transform, out, teacher, rows=rows)
    A, T, V = logits.shape
    lo, hi = (0, A * T) if rows is None else rows
    n = hi - lo
    check_layout("logits", logits)
    check_layout("out", out, logits)
    of_rows = vectors(n, targets=targets, **{f"partials, {name}": stats.get(name) for name in ("max", "sum", "target")})
    of_rows += of_slopes(slopes, n)[:4]
    scalars, flags = transform_arguments(transform, n)
    if n == 0:
        return
    with on_device(logits):
        arguments = (
            logits, logits.stride(0), logits.stride(1), out, out.stride(0), out.stride(1), V, T, lo, *of_rows, *scalars,
        )  # fmt: skip
        run(_pull_kernel, functools.partial(choose, "visit", V, (logits, out)), lambda _: n, arguments, flags)


def fused(
    logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None,
    *, teacher: Teacher | None = None,
) -> FusedRows:  # fmt: skip
    """Per-token losses and, with `out`, d loss / d logits, in one visit of each row. Token-level objectives only."""
    if not objective.one_pass:
        raise ValueError(f"{objective} in one visit of each row: its slopes depend on other tokens.")
    if teacher is not None:
        n = rows.targets.numel()
        return two_visits(sys.modules[__name__], logits, rows, objective, transform, out, max(1, n), teacher)
    A, T, V = logits.shape
    n = A * T
    check_layout("logits", logits)
    if out is not None:
        check_layout("out", out, logits)
    of_rows = vectors(n, **{name: getattr(rows, name) for name in OF_ROWS})
    scalars, flags = transform_arguments(transform, n)
    formulas = {
        name: compiled_formula(value) if callable(value) else value for name, value in token_stage.formulas(objective).items()
    }
    logps, entropies, losses = torch.empty(3, n, dtype=torch.float32, device=logits.device).unbind(0)
    if n == 0:
        return FusedRows(logps, entropies, losses)
    with on_device(logits):
        gradient = logits if out is None else out  # without a gradient the strides are not used
        arguments = (
            logits, logits.stride(0), logits.stride(1), out, gradient.stride(0), gradient.stride(1), V, T, n, *of_rows, *scalars,
            *token_stage.scalars(objective).values(), logps, entropies, losses,
        )  # fmt: skip
        kind = fused_kind(logits.dtype, gradient.dtype, transform.softcap)
        grid = choice_of(kind).grid
        run(
            _fused_kernel, functools.partial(choose, kind, V, (logits, gradient)),
            lambda launch: min(n, launch.programs(round(grid * multiprocessors(logits.device)))) if grid else n,
            arguments, {"TERMS": compiled_formula(token_stage.token_terms), **formulas, **flags},
        )  # fmt: skip
    return FusedRows(logps, entropies, losses)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor, a 0-d tensor. The kernel reads the factor: a factor of 1 costs a launch only, and no host sync."""
    if gradient.numel() == 0:
        return
    view = gradient
    if (
        gradient.is_contiguous()
    ):  # one row, of any length; its stride is never used, and 0 keeps the length from selecting a kernel
        view = gradient.as_strided((1, 1, gradient.numel()), (0, 0, 1))
    else:
        check_layout("gradient", gradient)
    A, T, V = view.shape
    with on_device(gradient):
        run(
            _scale_kernel,
            functools.partial(choose, "scale", 2**31, (view,)),
            lambda launch: min(A * T * triton.cdiv(V, launch.size), SCALE_PROGRAMS),
            (view, view.stride(0), view.stride(1), V, T, A * T, factor),
            {},
        )
