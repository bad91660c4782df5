"""Backends compute the two vocabulary stages and know no RL. Which one runs is decided here.

A backend is a module with these functions, over logits `[A, T, V]` (any strides in the first two dimensions, unit stride
in the last; fp32, bf16 or fp16) whose rows are counted in order, n = A * T, and per-row vectors `[n]`:

    row_stats(logits, targets, read, transform, entropy, *, rows) -> RowStats
    row_grads(logits, targets, stats, entropy, d_logps, d_entropy, transform, out, *, rows) -> None
    fused_loss(logits, rows, objective, transform, out) -> FusedRows
    scale_(gradient, factor) -> None            gradient *= factor (a 0-d tensor), without a pass over it when factor is 1
    WRITES_BEHIND_READS: bool       rows go from their first element to their last, so that a narrower gradient may lie in
                                    the memory of its row's logits, from the same address on

`rows` = (lo, hi) takes those flat rows of the logits alone; the per-row vectors are then [hi - lo]. None: all rows.
`out` may be the logits themselves, other memory, or that. `two_visits` below is the `fused_loss` of every backend that has no kernel for it.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from ..objective import Objective
    from ..token_stage import TokenRows

Tensor = torch.Tensor


class RowTransform(NamedTuple):
    """z = softcap * tanh(x * scale / softcap) * inv_temperature, row by row; softcap 0 means none."""

    scale: float
    softcap: float
    inv_temperature: float | Tensor  # a number, or fp32 [n]

    def at(self, rows: slice | Tensor) -> RowTransform:
        """The transform of these rows only."""
        t = self.inv_temperature
        return self if isinstance(t, float) else self._replace(inv_temperature=t[rows])


class RowStats(NamedTuple):
    """Mergeable partials of a row's softmax over transformed logits z, each fp32 [n].

    A row that is not read holds (0, 1, 0, 0), so that its log-prob and entropy are exactly 0.
    A row of only -inf holds (-inf, 0, 0); its log-prob and entropy are NaN, as torch's log_softmax has it. A NaN among the
    logits is a NaN in sum, whatever max is."""

    max: Tensor  # max_j z_j
    sum: Tensor  # sum_j exp(z_j - max)
    weighted: Tensor | None  # sum_j exp(z_j - max) (z_j - max), terms with exp = 0 counting 0; None if not asked for
    target: Tensor  # z of the target; NaN if its id is outside [0, V)

    @property
    def logps(self) -> Tensor:
        return (self.target - self.max) - torch.log(self.sum)

    @property
    def entropy(self) -> Tensor:
        assert self.weighted is not None
        # Rounding may take the entropy of a one-hot row a hair below 0. clamp keeps NaN.
        return (torch.log(self.sum) - self.weighted / self.sum).clamp(min=0.0)


class FusedRows(NamedTuple):
    """What `fused_loss` returns: per-row fp32 [n]; the gradient went into `out`."""

    logps: Tensor
    entropy: Tensor
    losses: Tensor  # weighted terms: their sum is the loss


class Backend(Protocol):
    """The functions above, as a module of this package or an object has them."""

    @property
    def WRITES_BEHIND_READS(self) -> bool: ...
    @property
    def row_stats(self) -> Callable[..., RowStats]: ...
    @property
    def row_grads(self) -> Callable[..., None]: ...
    @property
    def fused_loss(self) -> Callable[..., FusedRows]: ...
    @property
    def scale_(self) -> Callable[[Tensor, Tensor], None]: ...


def two_visits(
    backend: Backend,
    logits: Tensor,
    rows: TokenRows,
    objective: Objective,
    transform: RowTransform,
    out: Tensor | None,
    block_rows: int,
) -> FusedRows:
    """Token-level loss by visiting `block_rows` rows at a time twice: statistics, token stage, gradient.

    A block small enough for the cache makes the second visit nearly free. `out` None leaves out the gradient."""
    n = rows.targets.numel()
    result = FusedRows(*(torch.empty(n, dtype=torch.float32, device=logits.device) for _ in FusedRows._fields))
    for lo in range(0, n, block_rows):
        hi = min(lo + block_rows, n)
        block, block_transform = rows[lo:hi], transform.at(slice(lo, hi))
        stats = backend.row_stats(logits, block.targets, block.read, block_transform, True, rows=(lo, hi))
        logps, entropy = stats.logps, stats.entropy
        losses, d_logps, d_entropy = objective.token_stage(logps, entropy, block)
        for whole, part in zip(result, (logps, entropy, losses), strict=True):
            whole[lo:hi] = part
        if out is not None:
            backend.row_grads(logits, block.targets, stats, entropy, d_logps, d_entropy, block_transform, out, rows=(lo, hi))
    return result


# ---- which backend runs

BACKENDS = ("eager", "cpu", "triton")
_warned: set[str] = set()


def load(name: str) -> Any:
    """The backend module, imported on first use: `import grpo_kernels` needs neither Triton nor a compiler."""
    return importlib.import_module(f".{name}", __name__)


def unavailable(name: str) -> str | None:
    """Why a backend cannot run here, in words; None if it can."""
    try:
        return load(name).available()
    except ImportError as error:
        return f"it cannot be imported ({error})"


def pick(backend: str, device: torch.device, strict: bool = False) -> Backend:
    """The backend module for data on `device`.

    "auto" takes the native one (cpu on a CPU, triton on a GPU) and falls back to eager with one warning per reason, also
    for a single call whose Triton kernel cannot run; strict=True, or GRPO_KERNELS_STRICT=1 in the environment, raises
    RuntimeError instead. A backend asked for by name never falls back: RuntimeError says why it cannot run. ValueError for
    an unknown name. (A Triton kernel that only needs a smaller tile gets it, with a warning, whatever is asked for.)"""
    strict = strict or os.environ.get("GRPO_KERNELS_STRICT", "0") == "1"
    native = {"cpu": "cpu", "cuda": "triton"}.get(device.type)
    if backend == "auto":
        reason = f"no kernels for {device.type} tensors" if native is None else unavailable(native)
        if reason is None:
            assert native is not None
            return load("triton_or_eager" if native == "triton" and not strict else native)
        message = (
            f"grpo_kernels falls back to eager PyTorch, which is slow: {reason}. `python -m grpo_kernels doctor` says more."
        )
        if strict:
            raise RuntimeError(f"{message} (strict mode: no fallback)")
        warn_once(message)
        return load("eager")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: it must be auto or one of {', '.join(BACKENDS)}.")
    reason = unavailable(backend)
    if reason is None and backend == "cpu" and device.type != "cpu":
        reason = f"the data is on {device}"
    if reason is None and backend == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        reason = "the data is on the CPU"
    if reason is not None:
        raise RuntimeError(
            f'backend="{backend}" cannot run: {reason}. Use backend="auto", or see `python -m grpo_kernels doctor`.'
        )
    return load(backend)


def warn_once(message: str) -> None:
    """A RuntimeWarning at the caller of this package, the first time that the process has this to say."""
    if message not in _warned:
        _warned.add(message)
        inside, frame, level = (__name__.partition(".")[0], "torch"), sys._getframe(1), 2
        while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in inside:
            frame, level = frame.f_back, level + 1
        warnings.warn(message, RuntimeWarning, stacklevel=level)
