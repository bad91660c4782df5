"""Triton backend: each program processes one row at a time, reading it once from device memory and then once from L2.

Row counts, strides, scalars and parameters are runtime values, so a new length or a new step of a schedule does not recompile.
Compile-time are the vocabulary's size class, dtypes, alignment, the names of partials and slopes, and the program of a loss, which
the fused kernel is compiled with. A kernel that does not fit or compile gets a smaller tile and then raises KernelFailure.

one_row.py and two_rows.py have what a program does with a row, kernels.py the kernels, launch.py how they are launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....formulas.program import FormulaRefused, Program
from ....formulas.token_stage import INPUTS, TokenStage
from ...partials import OF_STUDENT, LogitRows, Partials, Slopes, partials_of
from ...ragged import Ragged
from .. import Backend, eager, fall_back
from . import launch as launch
from .kernels import (
    _add_hidden_rows_kernel,
    _add_pieces_kernel,
    _add_weight_rows_kernel,
    _evaluate_kernel,
    _fused_kernel,
    _mixed_kernel,
    _pull_kernel,
    _scale_kernel,
    _slot_logits_kernel,
    _stats_kernel,
    _two_pull_kernel,
    _two_stats_kernel,
)
from .launch import Arguments, KernelFailure, available, check_layout, formula_of, run_blocks, serves, vectors

__all__ = ["Kernels", "OrEager", "available", "serves"]

WITH_TOP = partials_of(("top_id",))

#: A program sums up to twice as many slots of one id. Fewer would need more memory for the sums of pieces: 4 H bytes for each
#: piece that the slots could have, 64 MiB for two million slots with H = 4096.
PIECE = 512


class Kernels(Backend):
    """The kernels; one that cannot run raises KernelFailure. `strict`: a program is compared with torch before its first use."""

    writes_behind_reads = False  # many threads write at once, starting at the end of the row

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    # ---- rows of logits

    def stats(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        result, of = Partials.empty(names, rows.n, rows.logits.device, rows.second), Arguments(rows)
        arguments = (*of.rows, *of.vectors(targets=rows.targets, read=rows.read), *of.partials(result))
        own = " ".join(name for name in names if name in OF_STUDENT)
        if rows.second is None:
            of.run("visit", _stats_kernel, *arguments, NAMES=own)
            return result
        direction = "forward" if rows.second.kind == "forward" else "reverse"
        of.run("two", _two_stats_kernel, *arguments, NAMES=own, DIRECTION=direction)
        if "top" in names:  # rarely asked for beside a second stream, so it is a separate pass
            result["top"].copy_(self.stats(rows._replace(second=None), WITH_TOP)["top"])
        return result

    def mixed(self, rows: LogitRows, partials: Partials) -> Tensor:
        of, sums = Arguments(rows), torch.empty(2, rows.n, dtype=torch.float32, device=rows.logits.device)
        read, log_sums = of.vectors(read=rows.read, log_sums=partials.log_sums)
        assert rows.second is not None
        arguments = (*of.rows, read, *of.partials(partials), log_sums, of.shares, sums, sums.stride(0))
        of.run("mixed", _mixed_kernel, *arguments, DIRECTION=rows.second.kind)
        return sums

    def pull(self, rows: LogitRows, partials: Partials, slopes: Slopes, out: Tensor) -> None:
        second = None if slopes.get("divergence") is None else rows.second
        of = Arguments(rows._replace(second=second), out)
        arguments = (*of.rows, *of.vectors(targets=rows.targets), *of.partials(partials))
        tables, names = of.slopes(slopes), " ".join(slopes.names)
        if second is None:
            of.run("visit", _pull_kernel, *arguments, *tables, NAMES=names)
            return
        of_second = of.vectors(log_sums=partials.log_sums, center=partials.center)
        kind = launch.pull_kind(rows.transform.softcap, second.transform.softcap)
        of.run(kind, _two_pull_kernel, *arguments, *of_second, of.shares, *tables, NAMES=names, DIRECTION=second.kind)

    def fused(self, rows: LogitRows, stage: TokenStage, out: Tensor | None) -> Tensor:
        """In one visit of each row; beside a second stream in two."""
        found = None if rows.second is not None else self._one_visit(rows, stage, out)
        return super().fused(rows, stage, out) if found is None else found

    def _one_visit(self, rows: LogitRows, stage: TokenStage, out: Tensor | None) -> Tensor | None:
        assert rows.part is None
        if self.strict:
            stage.compare_once(Program.__call__)
        program, numbers = stage.program()
        formula, used = formula_of(program)
        of, given = Arguments(rows, out), stage.inputs(program)
        results = torch.empty(3, of.n, dtype=torch.float32, device=rows.logits.device)
        arguments = (
            *of.rows[:-1], *of.vectors(targets=rows.targets, read=rows.read), *of.vectors(**{name: given.get(name) for name in INPUTS}),
            tuple(numbers[i] for i in used), results, of.n,
        )  # fmt: skip
        kind = launch.fused_kind(rows.logits.dtype, rows.transform.softcap)
        of.run(kind, _fused_kernel, *arguments, FORMULA=formula)
        return results

    def evaluate(self, stage: TokenStage, logps: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.strict:
            stage.compare_once(Program.__call__)
        program, numbers = stage.program()
        formula, used = formula_of(program)
        n, given = logps.numel(), stage.inputs(program)
        losses, grad_logps = torch.empty(2, n, dtype=torch.float32, device=logps.device)
        grad_entropy = None if stage.rows.entropy_weight is None else torch.empty_like(losses)
        arguments = (
            *vectors(n, logps=logps, entropy=entropy, **{name: given.get(name) for name in INPUTS}),
            tuple(numbers[i] for i in used), n, losses, grad_logps, grad_entropy,
        )  # fmt: skip
        launch.run("vectors", _evaluate_kernel, (losses,), lambda rows: -(-n // rows), arguments, FORMULA=formula)
        return losses, grad_logps, grad_entropy

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """The kernel reads the factor: a factor of 1 costs a launch only, and no host sync."""
        if gradient.is_contiguous():
            # One row, of any length, whose stride is never used: 0 keeps the length from selecting a kernel.
            gradient = gradient.as_strided((1, 1, gradient.numel()), (0, 0, 1))
        else:
            check_layout("gradient", gradient)
        A, T, V = gradient.shape
        arguments = (gradient, gradient.stride(0), gradient.stride(1), V, T, A * T, factor)

        def programs(size: int) -> int:
            return min(A * T * -(-V // size), launch.SCALE_PROGRAMS)

        launch.run("scale", _scale_kernel, (gradient,), programs, arguments)

    # ---- products over slots

    def slot_logits(self, hidden: Tensor, weight: Tensor, slots: Ragged) -> Tensor:
        m = slots.ids.numel()
        logits = torch.empty(m, dtype=torch.float32, device=hidden.device)
        of_slots = vectors(m, **{"slots.ids": slots.ids, "slots.rows": slots.rows})
        arguments = (hidden, hidden.stride(0), weight, weight.stride(0), hidden.shape[1], *of_slots, logits)
        run_blocks("slots", _slot_logits_kernel, {"weight": weight, "hidden": hidden}, lambda _: m, *arguments)
        return logits

    def add_weight_rows(self, values: Tensor, slots: Ragged, weight: Tensor, out: Tensor) -> None:
        of_slots = vectors(slots.ids.numel(), values=values, **{"slots.ids": slots.ids})
        of_rows = vectors(out.shape[0] + 1, **{"slots.offsets": slots.offsets})
        arguments = (*of_slots, *of_rows, weight, weight.stride(0), out, out.stride(0), out.shape[1])
        matrices = {"weight": weight, "out": out}
        run_blocks("slots", _add_weight_rows_kernel, matrices, _blocks_of(out, out.shape[0]), *arguments)

    def add_hidden_rows(self, values: Tensor, slots: Ragged, hidden: Tensor, out: Tensor) -> None:
        m = slots.ids.numel()
        of_slots = vectors(m, values=values, **{"slots.rows": slots.rows})
        ids, order = slots.ids.masked_fill(values == 0, -1).to(torch.int32).sort(stable=True)
        places, begins = first_places(ids, min(m, out.shape[0])), pieces(ids)
        # Columns of the sums of pieces are those of out. Their memory is taken, and the second kernel launched, where an id may be
        # cut.
        parts = torch.empty(m // PIECE + 1 if len(begins) else 0, out.shape[1], dtype=torch.float32, device=out.device)
        n, matrices = len(places), {"hidden": hidden, "out": out}
        to = (out, out.stride(0), out.shape[1])
        arguments = (*of_slots, ids, order, m, places, n, begins, parts, hidden, hidden.stride(0), *to)
        run_blocks("slots", _add_hidden_rows_kernel, matrices, _blocks_of(out, n + len(begins)), *arguments, PIECE=PIECE)
        arguments = (ids, m, begins, parts, *to)
        run_blocks("slots", _add_pieces_kernel, matrices, _blocks_of(out, len(begins)), *arguments, PIECE=PIECE)


#: What runs in place of the fused kernel where it cannot run, or its formula cannot be traced.
SECOND_VISIT = "a second visit of the logits, with the formulas in PyTorch, which is slower"

#: The same where a formula runs on vectors.
IN_TORCH = "the formulas in PyTorch, which is slower"


def _or_eager(name: str) -> Any:
    """A method of the kernels, and eager's where it fails."""

    def method(self: Kernels, *arguments: Any) -> Any:
        try:
            return getattr(Kernels, name)(self, *arguments)
        except KernelFailure as failure:
            fall_back("eager PyTorch, which is slow", failure.reason)
        return getattr(eager.Kernels(), name)(*arguments)

    return method


class OrEager(Kernels):
    """What backend="auto" uses: a call whose kernel cannot run is computed by eager PyTorch, with a warning.

    Launch failures are detected before anything is written, so the logits are intact even when the gradient would overwrite them.
    The two backends agree to rounding, so one may compute the gradient from statistics of the other."""

    stats, mixed, pull, scale_ = map(_or_eager, ("stats", "mixed", "pull", "scale_"))
    slot_logits, add_weight_rows, add_hidden_rows = map(_or_eager, ("slot_logits", "add_weight_rows", "add_hidden_rows"))

    def evaluate(self, stage: TokenStage, logps: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        try:
            return super().evaluate(stage, logps, entropy)
        except (KernelFailure, FormulaRefused) as failure:
            fall_back(IN_TORCH, getattr(failure, "reason", str(failure).rstrip(".")))
        return eager.Kernels().evaluate(stage, logps, entropy)

    def _one_visit(self, rows: LogitRows, stage: TokenStage, out: Tensor | None) -> Tensor | None:
        """If the kernel that contains the formulas cannot run, kernels without them may: torch then computes the formulas."""
        try:
            return super()._one_visit(rows, stage, out)
        except (KernelFailure, FormulaRefused) as failure:
            fall_back(SECOND_VISIT, getattr(failure, "reason", str(failure).rstrip(".")))
        return None


def _blocks_of(out: Tensor, rows: int) -> Callable[[int], int]:
    """How many programs there are for so many rows of `out`, from the number of columns of a program."""
    return lambda columns: rows * -(-out.shape[1] // columns)


def first_places(ids: Tensor, most: int) -> Tensor:
    """int64 [most]: where each id that is not -1 occurs first in the sorted ids [m], then m. There are at most `most` of them: how
    many would have to be waited for, and slots that are padded to the maximum are many more."""
    first = ids != torch.nn.functional.pad(ids, (1, 0), value=-1)[:-1]
    return torch.searchsorted(first.cumsum(0), torch.arange(1, most + 1, device=ids.device))


def pieces(ids: Tensor) -> Tensor:
    """int64 [m // PIECE], none if no id can have two pieces: where the id begins that every PIECE of the sorted ids [m] ends with.
    From there it is cut, so that its sum does not depend on what other ids have."""
    if len(ids) < 2 * PIECE:
        return torch.empty(0, dtype=torch.int64, device=ids.device)
    return torch.searchsorted(ids, ids[PIECE - 1 :: PIECE].contiguous())
