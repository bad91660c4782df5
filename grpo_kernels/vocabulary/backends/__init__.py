"""Backends compute the vocabulary stage and contain no RL formulas. This file decides which one runs.

A backend is a module with these functions, over logits `[A, T, V]` (any strides in the first two dimensions, unit stride
in the last; fp32, bf16 or fp16) whose rows are counted in order, n = A * T, and per-row vectors `[n]`:

    stats(logits, targets, read, transform, names, *, rows, teacher) -> RowStats
    mixed(logits, stats, transform, teacher, read, *, rows) -> Tensor
    pull(logits, targets, stats, slopes, transform, out, *, rows, teacher) -> None
    fused(logits, rows, objective, transform, out, *, teacher) -> FusedRows
    scale_(gradient, factor) -> None            gradient *= factor (a 0-d tensor), without a pass over it when factor is 1
    WRITES_BEHIND_READS: bool       rows are processed from first to last element, so that a narrower gradient may be written
                                    into the memory of its row's logits, from the same address on

`names` are the partials to make, see `vocabulary/rows.py`. `rows` = (lo, hi) takes those flat rows of the logits alone; the
per-row vectors are then [hi - lo]. None: all rows. `out` may be the logits themselves or other memory. `two_visits`
below is the `fused` of every backend that has no kernel for it.

`teacher`, None or a second stream of rows, is read beside the logits where `names` has partials of both and where slopes have a
`teacher`. `stats` leaves the partials MIXED alone: they are what `mixed` returns, fp32 [2, n], from statistics of whole rows.
`visit` does both. It leaves OUTSIDE alone, too, for the sources to make (`several.sums_outside`).

For losses over kept sets, over hidden states `[n, H]`, a weight `[V, H]` and slots (`vocabulary/sparse.py`), with one fp32
value a slot, `[m]`:

    slot_logits(hidden, weight, slots) -> values         dot products of a row of hidden and one of weight; -inf where not used
    add_weight_rows(values, slots, weight, out) -> None  out[i] = sum of values * weight[id] over the slots of row i, out [n, H]
    add_hidden_rows(values, slots, hidden, out) -> None  out[id] += sum of values * hidden[row] over the slots of id, out [V, H]

Matrices have unit stride in the last dimension and any in the first; each may be fp32, bf16 or fp16. Sums are fp32, go in the
order of slots, and are rounded once, on their way into `out`; a result depends on its own slots alone. Slots that are not used,
or whose value is 0, read nothing; rows of `out` without any other slot are left alone. Indices are trusted.

For sparse gradients (`vocabulary/selection.py`), over logits `[n, V]`, with partials of whole rows in `stats`:

    masses(logits, targets, stats, transform, step) -> Tensor             int64 [n]: units of mass of the columns that are sampled
    select(logits, targets, stats, transform, step, starts) -> Drawn      columns of each row, whose running sum begins at `starts`

The probability of a column is e * (1 / sum), e = exp(z - max), both roundings in fp32, and times `per_unit(step)` in fp32 a number
of units. From 2^BITS on the column is taken; below that, cut to a whole number, it is its mass. A target that is in none of the
columns (it may be another rank's) changes nothing. In a row whose max or 1 / sum is not finite the target alone is taken."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ...checks import require, require_one_of, warn_once
from ..rows import MIXED, RowStats, RowTransform, Slopes, Teacher, partials_of
from ..selection import Drawn
from ..sparse import Slots

if TYPE_CHECKING:
    from ...formulas.token_stage import TokenRows
    from ...objective import Objective

Tensor = torch.Tensor

WITH_ENTROPY = partials_of(("entropy",))


class FusedRows(NamedTuple):
    """What `fused` returns: per-row fp32 [n]; the gradient went into `out`."""

    logps: Tensor
    entropy: Tensor
    losses: Tensor  # weighted terms: their sum is the loss
    divergence: Tensor | None = None  # of the teacher, where there is one

    @classmethod
    def zeros(cls, n: int, device: torch.device, teacher: object) -> FusedRows:
        """Of n rows, to be put together. `teacher`: None for results without a divergence."""
        return cls(*torch.zeros(3 if teacher is None else 4, n, dtype=torch.float32, device=device).unbind())

    def put(self, rows: slice | Tensor, part: FusedRows) -> None:
        """Set those of these rows."""
        for whole, piece in zip(self, part, strict=True):
            if whole is not None and piece is not None:
                whole[rows] = piece


class Backend(Protocol):
    """The functions over logits above: a backend is a module or an object that has them."""

    @property
    def WRITES_BEHIND_READS(self) -> bool: ...
    @property
    def stats(self) -> Callable[..., RowStats]: ...
    @property
    def mixed(self) -> Callable[..., Tensor]: ...
    @property
    def pull(self) -> Callable[..., None]: ...
    @property
    def fused(self) -> Callable[..., FusedRows]: ...
    @property
    def scale_(self) -> Callable[[Tensor, Tensor], None]: ...


class SparseBackend(Backend, Protocol):
    """With the sparse products and the selection of columns, which every module of BACKENDS has."""

    @property
    def slot_logits(self) -> Callable[[Tensor, Tensor, Slots], Tensor]: ...
    @property
    def add_weight_rows(self) -> Callable[[Tensor, Slots, Tensor, Tensor], None]: ...
    @property
    def add_hidden_rows(self) -> Callable[[Tensor, Slots, Tensor, Tensor], None]: ...
    @property
    def masses(self) -> Callable[[Tensor, Tensor, RowStats, RowTransform, float], Tensor]: ...
    @property
    def select(self) -> Callable[[Tensor, Tensor, RowStats, RowTransform, float, Tensor], Drawn]: ...


def visit(
    backend: Backend, logits: Tensor, targets: Tensor, read: Tensor | None, transform: RowTransform, names: tuple[str, ...],
    teacher: Teacher | None, rows: tuple[int, int] | None = None,
) -> RowStats:  # fmt: skip
    """All partials of `names`: in one visit, or two for those of a mixture."""
    stats = backend.stats(logits, targets, read, transform, names, rows=rows, teacher=teacher)
    if MIXED[0] in names:  # and the teacher knows all ids, so that MIXED come last
        stats.values[-len(MIXED) :] = backend.mixed(logits, stats, transform, teacher, read, rows=rows)
    return stats


def two_visits(
    backend: Backend,
    logits: Tensor,
    rows: TokenRows,
    objective: Objective,
    transform: RowTransform,
    out: Tensor | None,
    block_rows: int,
    teacher: Teacher | None = None,
) -> FusedRows:
    """Token-level loss by visiting `block_rows` rows at a time twice: statistics, token stage, gradient.

    A block small enough for the cache makes the second visit nearly free. `out` None leaves out the gradient. The divergence of a
    teacher counts with the rows' `divergence_weight`."""
    n = rows.targets.numel()
    names = WITH_ENTROPY if teacher is None else partials_of(("entropy", "divergence"), teacher.kind)
    result = FusedRows.zeros(n, logits.device, teacher)
    for lo in range(0, n, block_rows):
        hi = min(lo + block_rows, n)
        block, block_transform, block_teacher = rows, transform, teacher
        if hi - lo < n:  # for small batches, slicing a dozen vectors would take longer than the rows
            of = slice(lo, hi)
            block, block_transform = rows[of], transform.at(of)
            block_teacher = None if teacher is None else teacher.at(of)
        stats = visit(backend, logits, block.targets, block.read, block_transform, names, block_teacher, (lo, hi))
        logps, entropy = stats.logps, stats.entropy
        losses, d_logps, d_entropy = objective.token_stage(logps, entropy, block)
        upstream = {"logps": d_logps} if d_entropy is None else {"logps": d_logps, "entropy": d_entropy}
        divergence = None if teacher is None else stats.divergence
        weight = block.divergence_weight
        if divergence is not None and weight is not None:
            losses = losses + torch.where(weight == 0, 0.0, weight * divergence)
            upstream["divergence"] = weight
        result.put(slice(lo, hi), FusedRows(logps, entropy, losses, divergence))
        if out is not None:
            slopes = Slopes.of({"entropy": entropy}, upstream)
            backend.pull(logits, block.targets, stats, slopes, block_transform, out, rows=(lo, hi), teacher=block_teacher)
    return result


# ---- which backend runs

BACKENDS = ("eager", "cpu", "triton")


def native(device: torch.device) -> tuple[str, str | None]:
    """(the backend with kernels for tensors on a device, why it cannot run them or None): "cpu" on a CPU, "triton" on any
    device that Triton's own driver serves."""
    if device.type == "cpu":
        return "cpu", unavailable("cpu")
    reason = unavailable("triton")
    if reason is None and not load("triton").serves(device):
        reason = f"no kernels for {device.type} tensors"
    return "triton", reason


@functools.cache
def load(name: str) -> Any:
    """The backend module, imported on first use: `import grpo_kernels` needs neither Triton nor a compiler."""
    return importlib.import_module(f".{name}", __name__)


def unavailable(name: str) -> str | None:
    """Why a backend cannot run here, in words; None if it can."""
    try:
        return load(name).available()
    except ImportError as error:
        return f"it cannot be imported ({error})"


#: (backend, strict) of the innermost block of `use`, if there is one.
_in_use: ContextVar[tuple[str, bool] | None] = ContextVar("grpo_kernels.use", default=None)


@contextlib.contextmanager
def use(*, backend: str | None = None, strict: bool | None = None) -> Iterator[None]:
    """Inside the block, calls that leave `backend` at "auto" run on this one, and `strict` makes a fallback an error.

        with grpo_kernels.use(backend="eager"):
            out = linear_grpo_loss(hidden, weight, batch, objective)

    backend   "auto", "eager", "cpu" or "triton"; None leaves it as it is outside. A call's own `backend=` takes precedence.
    strict    True: a fallback to eager PyTorch raises RuntimeError. False: it warns, unless the call says strict=True. None
              leaves it as it is outside.

    Blocks nest, and hold in their own thread or task. In the environment of a process GRPO_KERNELS_BACKEND and
    GRPO_KERNELS_STRICT=1 say the same; a block takes precedence over them. The backward of a loss runs where its forward ran.
    Raises ValueError for an unknown name."""
    if backend is not None:
        check_name(backend)
    require(strict is None or isinstance(strict, bool), "strict", strict, "pass True, False or None.")
    outer = _settings()
    token = _in_use.set((outer[0] if backend is None else backend, outer[1] if strict is None else strict))
    try:
        yield
    finally:
        _in_use.reset(token)


def _settings() -> tuple[str, bool]:
    """(backend, strict) of the innermost block of `use`, else of the environment."""
    in_use = _in_use.get()
    if in_use is not None:
        return in_use
    return os.environ.get("GRPO_KERNELS_BACKEND", "auto"), os.environ.get("GRPO_KERNELS_STRICT", "0") == "1"


def is_strict(strict: bool) -> bool:
    """Whether a call is strict: by its own `strict`, by `use` or by the environment."""
    return strict or _settings()[1]


def check_name(backend: object) -> None:
    known = ("auto", *BACKENDS)
    require_one_of("backend", backend, known)


def pick(backend: str, device: torch.device, strict: bool = False) -> SparseBackend:
    """The backend module for data on `device`. "auto" is first replaced by what `use` or GRPO_KERNELS_BACKEND says.

    "auto" takes the native one (cpu on a CPU, triton on a device that Triton has a driver for) and falls back to eager with one
    warning per reason, also for a single call whose Triton kernel cannot run; strict=True, also of `use` or
    GRPO_KERNELS_STRICT, raises RuntimeError instead. A backend asked for by name never falls back: RuntimeError says why it
    cannot run. ValueError for an unknown name. (A Triton kernel that runs with a smaller tile gets one, with a warning, in
    every mode.)"""
    in_use, strict_in_use = _settings()
    backend, strict = in_use if backend == "auto" else backend, strict or strict_in_use
    if backend == "auto":
        name, reason = native(device)
        if reason is None:
            return load("triton_or_eager") if name == "triton" and not strict else _module(name, strict)
        message = (
            f"grpo_kernels falls back to eager PyTorch, which is slow: {reason}. `python -m grpo_kernels doctor` says more."
        )
        if strict:
            raise RuntimeError(f"{message} (strict mode: no fallback)")
        warn_once(message)
        return load("eager")
    check_name(backend)
    reason = unavailable(backend)
    if reason is None and backend == "cpu" and device.type != "cpu":
        reason = f"the data is on {device}"
    if reason is None and backend == "triton" and not load(backend).serves(device):
        reason = "the data is on the CPU" if device.type == "cpu" else f"no kernels for {device.type} tensors"
    if reason is not None:
        raise RuntimeError(
            f'backend="{backend}" cannot run: {reason}. Use backend="auto", or see `python -m grpo_kernels doctor`.'
        )
    return _module(backend, strict)


def _module(name: str, strict: bool) -> SparseBackend:
    return load(name).strict if strict and name == "cpu" else load(name)


def fall_back(instead: str, reason: str) -> None:
    """Warn once that a fallback runs in place of a kernel."""
    warn_once(f"grpo_kernels falls back to {instead}: {reason}. `python -m grpo_kernels doctor` says more.")
