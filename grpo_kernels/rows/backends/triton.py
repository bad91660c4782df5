"""Triton backend: each program processes one row at a time, reading it once from device memory and then once from L2.

There are no RL formulas here: `fused` compiles those of token_stage.py into its kernel, see triton_formulas.py. Row
counts, strides, scalars and parameters are runtime values, so a new length or a new step of a schedule does not recompile.
Compile-time are the vocabulary's size class, dtypes, alignment and the presence of optional inputs.
A kernel that does not fit or compile gets a smaller tile and then raises KernelFailure, see triton_launch.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton

from ...formulas.program import FormulaRefused
from ...formulas.token_stage import TokenStage, token_terms
from ..partials import OF_STUDENT, LogitRows, Partials, RowTransform, Slopes, partials_of
from ..ragged import Ragged
from ..selection import Drawn, capacity, per_unit
from . import Backend, FusedRows, eager, fall_back
from .triton_choices import (  # noqa: F401
    LAUNCH,
    SCALE_PROGRAMS,
    available,
    choice_of,
    choose,
    fused_kind,
    multiprocessors,
    on_device,
    options,
    serves,
)
from .triton_divergence_kernels import _mixed_kernel, _two_pull_kernel, _two_stats_kernel
from .triton_formulas import compiled_formula
from .triton_kernels import _fused_kernel, _pull_kernel, _scale_kernel, _stats_kernel
from .triton_launch import KernelFailure, Launch, run
from .triton_select_kernels import _select_kernel
from .triton_sparse_kernels import (
    _add_hidden_rows_kernel,
    _add_pieces_kernel,
    _add_weight_rows_kernel,
    _slot_logits_kernel,
)

Tensor = torch.Tensor

WITH_TOP = partials_of(("top_id",))

#: What the fused kernel takes of `TokenRows` behind targets and the rows that are read, in the order of its parameters.
OF_ROWS = (
    "old_logps", "ref_logps", "sampler_logps", "advantages", "policy_weight", "kl_weight", "entropy_weight", "nll_weight",
)  # fmt: skip

#: Rows, and columns of a tile that may end behind the last one, are numbered by 32 bits.
LARGEST = 2**31 - 2**16

#: A program sums up to twice as many slots of one id. Fewer would need more memory for the sums of pieces: 4 H bytes for each piece
#: that the slots could have, 64 MiB for the two million of 8192 rows of a sparse gradient with H = 4096.
PIECE = 512


class Kernels(Backend):
    """The kernels; one that cannot run raises KernelFailure."""

    writes_behind_reads = False  # many threads write at once, starting at the end of the row

    def __init__(self, strict: bool = True) -> None:
        pass

    # ---- rows of logits

    def stats(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        A, T, V = rows.logits.shape
        lo, n, logits = *_part(rows), rows.logits
        check_layout("logits", logits)
        of_rows = vectors(n, targets=rows.targets, read=rows.read)
        result = Partials.empty(names, n, logits.device, rows.second)
        if rows.second is not None:
            of = _Streams(rows)
            made = ("max", "sum", "target", "weighted", "squares", "teacher_max", "teacher_sum", "cross", "excess")
            direction = "forward" if rows.second.kind == "forward" else "reverse"
            arguments = (*of.rows, *of.sizes, *of_rows, *of.transforms, *map(result.get, made))
            of.run("two", _two_stats_kernel, arguments, DIRECTION=direction)
            if "top" in names:  # rarely asked for beside a second stream, so it is a separate pass
                alone = self.stats(rows._replace(second=None), WITH_TOP)
                result.get("top").copy_(alone.get("top"))  # type: ignore[union-attr, arg-type]
            return result
        scalars, flags = transform_arguments(rows.transform, n)
        if n == 0:
            return result
        with on_device(logits):
            arguments = (
                logits, logits.stride(0), logits.stride(1), V, T, lo, *of_rows, *scalars, *map(result.get, OF_STUDENT),
            )  # fmt: skip
            run(_stats_kernel, functools.partial(choose, "visit", V, (logits,)), lambda _: n, arguments, flags)
        return result

    def mixed(self, rows: LogitRows, partials: Partials) -> Tensor:
        assert rows.second is not None
        of = _Streams(rows)
        (of_rows,), known = vectors(of.n, read=rows.read), _known(partials, of.n)
        result = torch.empty(2, of.n, dtype=torch.float32, device=rows.logits.device)
        arguments = (*of.rows, *of.sizes, of_rows, *of.transforms, *known, *_shares(rows), *result.unbind())
        of.run("mixed", _mixed_kernel, arguments)
        return result

    def pull(self, rows: LogitRows, partials: Partials, slopes: Slopes, out: Tensor) -> None:
        A, T, V = rows.logits.shape
        lo, n, logits = *_part(rows), rows.logits
        check_layout("logits", logits)
        check_layout("out", out, logits)
        of_slopes = vectors(n, **{f"slopes.{name}": slopes.get(name) for name in ("target", "constant", "log", "prob")})
        to = (out, out.stride(0), out.stride(1))
        if slopes.get("divergence") is not None:
            assert rows.second is not None
            of = _Streams(rows)
            given = {"targets": rows.targets, "target": partials.target, "center": partials.center}
            of_targets, target, center = vectors(n, **given)
            top, total, *of_second = _known(partials, n)
            arguments = (
                *of.rows, *to, *of.sizes, of_targets, top, total, target, *of_second, center, *_shares(rows), *of_slopes,
                *vectors(n, slope=slopes.get("divergence")), *of.transforms,
            )  # fmt: skip
            of.run("two", _two_pull_kernel, arguments, out, DIRECTION=rows.second.kind)
            return
        known = {f"partials, {name}": partials.get(name) for name in ("max", "sum", "target")}
        of_rows = vectors(n, targets=rows.targets, **known)
        scalars, flags = transform_arguments(rows.transform, n)
        if n == 0:
            return
        with on_device(logits):
            arguments = (
                logits, logits.stride(0), logits.stride(1), *to, V, T, lo, *of_rows, *of_slopes, *scalars,
            )  # fmt: skip
            run(_pull_kernel, functools.partial(choose, "visit", V, (logits, out)), lambda _: n, arguments, flags)

    def fused(self, rows: LogitRows, stage: TokenStage, out: Tensor | None) -> FusedRows:
        """In one visit of each row; beside a second stream in two."""
        if rows.second is not None:
            return self.two_visits(rows, stage, out, max(1, rows.n))
        A, T, V = rows.logits.shape
        n, logits = A * T, rows.logits
        check_layout("logits", logits)
        if out is not None:
            check_layout("out", out, logits)
        of_stage = {name: getattr(stage.rows, name) for name in OF_ROWS}
        of_rows = vectors(n, targets=rows.targets, read=rows.read, **of_stage)
        scalars, flags = transform_arguments(rows.transform, n)
        formulas = {name: compiled_formula(x) if callable(x) else x for name, x in stage.formula.chosen.items()}
        results = torch.empty(3, n, dtype=torch.float32, device=logits.device).unbind(0)
        if n == 0:
            return FusedRows(*results)
        with on_device(logits):
            gradient = logits if out is None else out  # without a gradient the strides are not used
            arguments = (
                logits, logits.stride(0), logits.stride(1), out, gradient.stride(0), gradient.stride(1), V, T, n, *of_rows,
                *scalars, *stage.formula.numbers.values(), *results,
            )  # fmt: skip
            kind = fused_kind(logits.dtype, gradient.dtype, rows.transform.softcap)
            grid = choice_of(kind).grid
            run(
                _fused_kernel, functools.partial(choose, kind, V, (logits, gradient)),
                lambda launch: min(n, launch.programs(round(grid * multiprocessors(logits.device)))) if grid else n,
                arguments, {"TERMS": compiled_formula(token_terms), **formulas, **flags},
            )  # fmt: skip
        return FusedRows(*results)

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """The kernel reads the factor: a factor of 1 costs a launch only, and no host sync."""
        if gradient.numel() == 0:
            return
        view = gradient
        if (
            gradient.is_contiguous()
        ):  # one row, of any length, whose stride is never used: 0 keeps the length from selecting a kernel
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

    # ---- products over slots

    def slot_logits(self, hidden: Tensor, weight: Tensor, slots: Ragged) -> Tensor:
        m = slots.ids.numel()
        logits = torch.empty(m, dtype=torch.float32, device=hidden.device)
        of_slots = vectors(m, **{"slots.ids": slots.ids, "slots.rows": slots.rows})
        arguments = (hidden, hidden.stride(0), weight, weight.stride(0), hidden.shape[1], *of_slots, logits)
        _run_slots(_slot_logits_kernel, {"weight": weight, "hidden": hidden}, lambda _: m, arguments)
        return logits

    def add_weight_rows(self, values: Tensor, slots: Ragged, weight: Tensor, out: Tensor) -> None:
        of_slots = vectors(slots.ids.numel(), values=values, **{"slots.ids": slots.ids})
        of_rows = vectors(out.shape[0] + 1, **{"slots.offsets": slots.offsets})
        arguments = (*of_slots, *of_rows, weight, weight.stride(0), out, out.stride(0), out.shape[1])
        programs = {"weight": weight, "out": out}, lambda block: out.shape[0] * triton.cdiv(out.shape[1], block)
        _run_slots(_add_weight_rows_kernel, *programs, arguments)

    def add_hidden_rows(self, values: Tensor, slots: Ragged, hidden: Tensor, out: Tensor) -> None:
        m = slots.ids.numel()
        of_slots = vectors(m, values=values, **{"slots.rows": slots.rows})
        used = (slots.ids >= 0) & (values != 0)
        ids, order = torch.where(used, slots.ids, -1).to(torch.int32).sort(stable=True)
        places, begins = first_places(ids, min(m, out.shape[0])), pieces(ids)
        # Columns of the sums of pieces are those of out. Their memory is taken, and the second kernel launched, where an id may be cut.
        parts = torch.empty(m // PIECE + 1 if len(begins) else 0, out.shape[1], dtype=torch.float32, device=out.device)
        n, flags = len(places), {"PIECE": PIECE}
        arguments = (
            *of_slots, ids, order, m, places, n, begins, parts,
            hidden, hidden.stride(0), out, out.stride(0), out.shape[1],
        )  # fmt: skip

        def programs(some: int) -> Callable[[int], int]:
            return lambda block: some * triton.cdiv(out.shape[1], block)

        matrices = {"hidden": hidden, "out": out}
        _run_slots(_add_hidden_rows_kernel, matrices, programs(n + len(begins)), arguments, flags)
        arguments = (ids, m, begins, parts, out, out.stride(0), out.shape[1])
        _run_slots(_add_pieces_kernel, matrices, programs(len(begins)), arguments, flags)

    # ---- columns of sparse gradients

    def masses(self, rows: LogitRows, partials: Partials, step: float) -> Tensor:
        found = torch.empty(rows.n, dtype=torch.int64, device=rows.logits.device)
        _select(rows, partials, step, None, found, None)
        return found

    def select(self, rows: LogitRows, partials: Partials, step: float, starts: Tensor) -> Drawn:
        drawn = Drawn.nothing(rows.n, step, rows.logits.device)
        _select(rows, partials, step, starts, None, drawn)
        return drawn


#: What runs in place of the fused kernel where its formulas cannot be compiled.
SECOND_VISIT = "a second visit of the logits, with the formulas in PyTorch, which is slower"


class OrEager(Backend):
    """What backend="auto" uses: a call whose kernel cannot run is computed by eager PyTorch, with a warning.

    Launch failures are detected before anything is written, so the logits are intact even when the gradient would overwrite them. The
    two backends agree to rounding, so one may compute the gradient from statistics of the other."""

    writes_behind_reads = Kernels.writes_behind_reads  # eager does not need it

    def __init__(self, strict: bool = False) -> None:
        self.kernels, self.eager = Kernels(), eager.Kernels()

    def fused(self, rows: LogitRows, stage: TokenStage, out: Tensor | None) -> FusedRows:
        """If the kernel that contains the formulas cannot run, kernels without them may: torch then computes the formulas."""
        try:
            if rows.second is None:  # there is no fused kernel of two streams
                return self.kernels.fused(rows, stage, out)
        except KernelFailure as failure:
            fall_back(SECOND_VISIT, failure.reason)
        except FormulaRefused as refusal:
            fall_back(SECOND_VISIT, str(refusal).rstrip("."))
        return self.two_visits(rows, stage, out, max(1, rows.n))

    def _either(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.kernels, name)(*arguments)
        except KernelFailure as failure:
            fall_back("eager PyTorch, which is slow", failure.reason)
        return getattr(self.eager, name)(*arguments)

    stats: Any = functools.partialmethod(_either, "stats")
    mixed: Any = functools.partialmethod(_either, "mixed")
    pull: Any = functools.partialmethod(_either, "pull")
    scale_: Any = functools.partialmethod(_either, "scale_")
    slot_logits: Any = functools.partialmethod(_either, "slot_logits")
    add_weight_rows: Any = functools.partialmethod(_either, "add_weight_rows")
    add_hidden_rows: Any = functools.partialmethod(_either, "add_hidden_rows")
    masses: Any = functools.partialmethod(_either, "masses")
    select: Any = functools.partialmethod(_either, "select")


# ---- tensors as arguments of the kernels


def _part(rows: LogitRows) -> tuple[int, int]:
    """(the first row, how many) of those of the logits that are meant."""
    lo, hi = rows.part or (0, rows.logits.shape[0] * rows.logits.shape[1])
    return lo, hi - lo


def check_layout(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Raise ValueError unless a kernel can read x as rows [A, T, V], or write to it as those of `like`."""
    plain = x.dim() == 3 and (like is None or x.shape == like.shape) and (x.stride(2) == 1 or x.shape[2] == 1)
    few = plain and x.shape[0] * x.shape[1] < LARGEST and 0 < x.shape[2] < LARGEST
    if not few or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        taken = "[A, T, V]" if like is None else list(like.shape)
        raise ValueError(
            f"{name} is {str(x.dtype).removeprefix('torch.')} {list(x.shape)} with strides {list(x.stride())}: the Triton kernels take "
            f"fp32, bf16 or fp16 {taken} with unit stride in V, of fewer than 2^31 rows and columns."
        )


def vectors(n: int, **given: Tensor | None) -> tuple[Tensor | None, ...]:
    """Values of n rows by name, each in one piece."""
    for name, x in given.items():
        if x is not None and x.shape != (n,):
            raise ValueError(f"{name} has shape {list(x.shape)}: the Triton kernels take one value for each of {n} rows.")
    return tuple(None if x is None else x.contiguous() for x in given.values())


def transform_arguments(transform: RowTransform, n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inverse: Any = transform.inv_temperature
    per_row = isinstance(inverse, Tensor)
    shape = "softcap" if transform.softcap != 0 else "linear" if transform.scale >= 0 else "mirrored"
    values = (
        vectors(n, inv_temperature=inverse)[0] if per_row else float(inverse),
        float(transform.scale),
        float(transform.softcap),
    )
    return values, {"SHAPE": shape, "ROW_TEMPERATURE": per_row}


class _Streams:
    """Both streams of a call as arguments."""

    def __init__(self, rows: LogitRows) -> None:
        assert rows.second is not None
        A, T, self.vocab = rows.logits.shape
        first, self.n = _part(rows)
        check_layout("logits", rows.logits)
        check_layout("second.logits", rows.second.logits, rows.logits)
        self.tensors = (rows.logits, rows.second.logits)
        self.rows = tuple(x for t in self.tensors for x in (t, t.stride(0), t.stride(1)))
        self.sizes = (self.vocab, T, first)
        ours, flags = transform_arguments(rows.transform, self.n)
        of_second, second_flags = transform_arguments(rows.second.transform, self.n)
        self.transforms = (*ours, *of_second)
        self.flags = flags | {f"TEACHER_{name}": value for name, value in second_flags.items()}

    def run(self, kind: str, kernel: Any, arguments: tuple[Any, ...], *others: Tensor, **flags: Any) -> None:
        if self.n:
            tile = functools.partial(choose, kind, self.vocab, (*self.tensors, *others))
            with on_device(self.tensors[0]):
                run(kernel, tile, lambda _: self.n, arguments, self.flags | flags)


def _known(partials: Partials, n: int) -> tuple[Tensor | None, ...]:
    """What a second pass needs to know about both rows."""
    known = {f"partials, {name}": partials.get(name) for name in ("max", "sum", "teacher_max", "teacher_sum")}
    return vectors(n, **known, log_sums=partials.log_sums)


def _shares(rows: LogitRows) -> tuple[float, float]:
    """Weights of the second stream and of the first in their mixture."""
    assert rows.second is not None
    return float(rows.second.mixture), 1.0 - float(rows.second.mixture)


def _select(
    rows: LogitRows, partials: Partials, step: float, starts: Tensor | None, masses: Tensor | None, drawn: Drawn | None
) -> None:
    logits, n = rows.logits[0], rows.n
    check_layout("logits", rows.logits)
    known = {f"partials, {name}": partials.get(name) for name in ("max", "sum")}
    of_rows = vectors(n, targets=rows.targets, **known, starts=starts)
    scalars, flags = transform_arguments(rows.transform, n)
    if n == 0:
        return
    with on_device(logits):
        arguments = (
            logits, logits.stride(0), logits.shape[1], *of_rows, *scalars, per_unit(step),
            masses, *(drawn or (None, None)), capacity(step),
        )  # fmt: skip
        run(_select_kernel, functools.partial(_launch_select, logits), lambda _: n, arguments, flags)


def _launch_select(logits: Tensor, halvings: int) -> Launch:
    choice = LAUNCH["select"]
    lanes = choice.threads >> halvings
    flags = {"ALIGNED": logits.stride(0) % 16 == 0, "LANES": lanes, "ACCESSES": choice.accesses}
    flags["COLS"] = 16 // logits.element_size()
    return Launch(flags, options(lanes, choice.programs), choice.programs)


def first_places(ids: Tensor, most: int) -> Tensor:
    """int64 [most]: where each id that is not -1 occurs first in the sorted ids [m], then m. There are at most `most` of them: how
    many would have to be waited for, and slots that are padded to the maximum are many more."""
    first = ids >= 0
    first[1:] &= ids[1:] != ids[:-1]
    return torch.searchsorted(first.cumsum(0), torch.arange(1, most + 1, device=ids.device))


def pieces(ids: Tensor) -> Tensor:
    """int64 [m // PIECE], none if no id can have two pieces: where the id begins that every PIECE of the sorted ids [m] ends with.
    From there it is cut, so that its sum does not depend on what other ids have."""
    if len(ids) < 2 * PIECE:
        return torch.empty(0, dtype=torch.int64, device=ids.device)
    return torch.searchsorted(ids, ids[PIECE - 1 :: PIECE].contiguous())


def _run_slots(
    kernel: Any,
    given: dict[str, Tensor],
    programs: Any,
    arguments: tuple[Any, ...],
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """`programs` gives the grid for a number of columns per block. The first matrix sets the width of an access."""
    matrices = tuple(given.values())
    for name, x in given.items():
        width = matrices[0].shape[1]
        plain = x.shape[1] == width and (x.stride(1) == 1 or width <= 1 or x.numel() == 0) and max(x.shape) < LARGEST
        if not plain:
            raise ValueError(
                f"{name} has shape {list(x.shape)} and strides {list(x.stride())}: the Triton kernels take rows of {width} in one piece."
            )
    if programs(1) == 0:
        return
    with on_device(matrices[0]):
        run(
            kernel,
            functools.partial(_launch_slots, matrices),
            lambda launch: programs(launch.flags["LANES"] * launch.flags["ACCESSES"] * launch.flags["COLS"]),
            arguments,
            flags,
        )


def _launch_slots(matrices: tuple[Tensor, ...], halvings: int) -> Launch:
    aligned = all(x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 for x in matrices)
    choice = LAUNCH["slots"]
    lanes = choice.threads >> halvings
    flags = {"ALIGNED": aligned, "LANES": lanes, "ACCESSES": choice.accesses, "COLS": 16 // matrices[0].element_size()}
    return Launch(flags, options(lanes, choice.programs), choice.programs)
