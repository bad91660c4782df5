"""Backends make partials of rows of logits, and the gradient that slopes give. This file says what they are, and decides which one
runs. They contain no RL formulas: what they get of a loss is a `TokenStage`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ...checks import require, require_one_of, warn_once
from ...formulas.token_stage import TokenStage
from ..partials import (
    ALWAYS,
    MIXED,
    OF_KERNELS,
    OF_SECOND_VISIT,
    SLOPES_OF_KERNELS,
    LogitRows,
    Partials,
    Slopes,
    joined,
    partials_of,
)
from ..ragged import Ragged, Tokens

WITH_ENTROPY = partials_of(("entropy",))


@functools.lru_cache(maxsize=256)
def others_than(known: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that kernels do not know, and that no second visit makes."""
    return tuple(name for name in names if name not in known and name not in OF_SECOND_VISIT)


class Backend(ABC):
    """Kernels over rows of logits, and products over slots.

    writes_behind_reads   rows are processed from first to last element, so that a narrower gradient may be written into the memory
                          of its row's logits, from the same address on.
    makes_all             whether `stats` and `pull` take all partials and slopes. The kernels of others know OF_KERNELS and
                          SLOPES_OF_KERNELS."""

    writes_behind_reads: bool
    makes_all = False

    # ---- rows of logits

    @abstractmethod
    def stats(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        """The partials `names`, some of PARTIALS in their order. Those that the kernels do not know are left alone, and so are
        MIXED, which `mixed` returns, and OUTSIDE, which the streams make."""

    @abstractmethod
    def mixed(self, rows: LogitRows, partials: Partials) -> Tensor:
        """The partials MIXED, fp32 [2, n], from those of whole rows."""

    @abstractmethod
    def pull(self, rows: LogitRows, partials: Partials, slopes: Slopes, out: Tensor) -> None:
        """Write the gradient that slopes give into the same rows of `out` [A, T, V], which may be the logits themselves or other
        memory. A row whose slopes are 0 becomes 0. The second stream is read where slopes have a "divergence"."""

    def fused(self, rows: LogitRows, stage: TokenStage, out: Tensor | None) -> Tensor:
        """Compute a token stage: log-probs, entropies and losses, whose sum is the loss, fp32 [3, n]; beside a second stream
        [4, n], with the divergence from it. 0 of a row that is not read. The gradient goes into `out`; None leaves it out."""
        return self.two_visits(rows, stage, out, max(1, rows.n))

    def fused_tokens(self, rows: LogitRows, tokens: Tokens, stage: TokenStage, out: Tensor | None) -> Tensor | None:
        """The same of tokens of the rows, which may share a row, or list ids: losses of tokens. None, and nothing was done,
        where the kernels do not do that in one visit."""
        return None

    @abstractmethod
    def evaluate(self, stage: TokenStage, logps: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the loss of each row of a token stage and its gradients: (losses, d loss / d log-prob, d loss / d entropy), fp32
        [n]; the last is None without an entropy bonus.

        logps, entropy   fp32 [n], in one piece: of the stage's rows.
        stage            without terms at listed ids."""

    @abstractmethod
    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """gradient *= factor (a 0-d tensor), without a pass over it when factor is 1."""

    # ---- products over slots: hidden states [n, H], a weight [V, H], one fp32 value a slot, [m]. Matrices have unit stride in the
    # last dimension and any in the first; each may be fp32, bf16 or fp16. Sums are fp32, go in the order of slots, and are rounded
    # once, on their way into `out`; a result depends on its own slots alone. Slots that are not used, or whose value is 0, read
    # nothing; rows of `out` without any other slot are left alone. Indices are trusted.

    @abstractmethod
    def slot_logits(self, hidden: Tensor, weight: Tensor, slots: Ragged) -> Tensor:
        """Dot products of a row of hidden and one of weight; -inf where a slot is not used."""

    @abstractmethod
    def add_weight_rows(self, values: Tensor, slots: Ragged, weight: Tensor, out: Tensor) -> None:
        """out[i] = sum of values * weight[id] over the slots of row i, out [n, H]."""

    @abstractmethod
    def add_hidden_rows(self, values: Tensor, slots: Ragged, hidden: Tensor, out: Tensor) -> None:
        """out[id] += sum of values * hidden[row] over the slots of id, out [V, H]."""

    # ---- what follows from these

    def first_visit(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        """All partials of `names` but those of a second visit. Eager makes what the kernels do not know."""
        partials, others = self.stats(rows, names), others_than(OF_KERNELS, names)
        if others and not self.makes_all:
            of_eager = load("eager").Kernels().stats(rows, (*names[:ALWAYS], *others))
            partials.put(others, of_eager.values[ALWAYS:])
        return partials

    def visit(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        """All partials of `names`: in one visit, or two for those that take both sums."""
        partials = self.first_visit(rows, names)
        if MIXED[0] in names:
            partials.put(MIXED, self.mixed(rows, partials))
        return partials

    def softmax_sums(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        """The name of `visit` in the new core."""
        return self.visit(rows, names)

    def gradient(self, rows: LogitRows, partials: Partials, slopes: Slopes, out: Tensor) -> None:
        """`pull`, by eager where the kernels do not know a slope."""
        known = self.makes_all or not others_than(SLOPES_OF_KERNELS, slopes.names)
        (self if known else load("eager").Kernels()).pull(rows, partials, slopes, out)

    def two_visits(self, rows: LogitRows, stage: TokenStage, out: Tensor | None, block_rows: int) -> Tensor:
        """`fused` by visiting `block_rows` rows at a time twice: statistics, token stage in torch, gradient. A block small enough
        for the cache makes the second visit nearly free."""
        n, second = rows.n, rows.second
        names = WITH_ENTROPY if second is None else partials_of(("entropy", "divergence"), second.kind)
        parts = []
        for lo in range(0, n, block_rows):
            hi = min(lo + block_rows, n)
            block, own = rows.cut(lo, hi), stage.at(slice(lo, hi))
            partials = self.visit(block, names)
            logps, entropy = partials.softmax(True)
            terms = own.terms(logps, entropy)
            losses, upstream = terms.losses, terms.upstream
            divergence, weight = None if second is None else partials.divergence, own.rows.divergence_weight
            if divergence is not None and weight is not None:
                losses = losses + torch.where(weight == 0, 0.0, weight * divergence)
                upstream["divergence"] = weight
            losses = losses if block.read is None else torch.where(block.read, losses, 0.0)
            parts.append(torch.stack([logps, entropy, losses] + ([] if divergence is None else [divergence])))
            if out is not None:
                self.pull(block, partials, Slopes.of({"entropy": entropy}, upstream, block.read), out)
        if not parts:
            return torch.zeros(3 if second is None else 4, n, dtype=torch.float32, device=rows.logits.device)
        return joined(parts, 1)


def coefficients_of(sums: Partials, grads: dict[str, Tensor], mask: Tensor | None, *, entropy: Tensor | None = None) -> Slopes:
    """Return the coefficients of d loss / d logits from d loss / d statistic by name.

    entropy   the entropy of each row, if the caller has it
    """
    values = {}
    if "entropy" in grads:
        values["entropy"] = sums.entropy if entropy is None else entropy
    if "sum_squares" in grads:
        values["sum_squares"] = sums.sum_squares
    return Slopes.of(values, grads, mask)


# ---- which backend runs

BACKENDS = ("eager", "cpu", "triton")


def native_backend(device: torch.device) -> tuple[str, str | None]:
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
    """The module of a backend, imported on first use: `import grpo_kernels` needs neither Triton nor a compiler. It has
    `available`,
    and `Kernels(strict)`, the backend."""
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

    backend   "auto", "eager", "cpu" or "triton"; None leaves it as it is outside. `Options(backend=)` of a call takes precedence.
    strict    True: a fallback to eager PyTorch raises RuntimeError. False: it warns, unless the call says
              `Options(strict=True)`. None leaves it as it is outside.

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


def pick(backend: str, device: torch.device, strict: bool = False) -> Backend:
    """The backend for data on `device`. "auto" is first replaced by what `use` or GRPO_KERNELS_BACKEND says.

    "auto" takes the native one (cpu on a CPU, triton on a device that Triton has a driver for) and falls back to eager with one
    warning per reason, also for a single call whose Triton kernel cannot run; strict=True, also of `use` or
    GRPO_KERNELS_STRICT, raises RuntimeError instead. A backend asked for by name never falls back: RuntimeError says why it
    cannot run. ValueError for an unknown name. (A Triton kernel that runs with a smaller tile gets one, with a warning, in
    every mode.)"""
    in_use, strict_in_use = _settings()
    backend, strict = in_use if backend == "auto" else backend, strict or strict_in_use
    if backend == "auto":
        name, reason = native_backend(device)
        if reason is None:
            return _made("triton_or_eager" if name == "triton" and not strict else name, strict)
        message = (
            f"grpo_kernels falls back to eager PyTorch, which is slow: {reason}. `python -m grpo_kernels doctor` says more."
        )
        if strict:
            raise RuntimeError(f"{message} (strict mode: no fallback)")
        warn_once(message)
        return _made("eager", strict)
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
    return _made(backend, strict)


@functools.cache
def _made(name: str, strict: bool) -> Backend:
    module = load("triton" if name == "triton_or_eager" else name)
    made: Backend = module.OrEager() if name == "triton_or_eager" else module.Kernels(strict)
    return made


def fall_back(instead: str, reason: str) -> None:
    """Warn once that a fallback runs in place of a kernel."""
    warn_once(f"grpo_kernels falls back to {instead}: {reason}. `python -m grpo_kernels doctor` says more.")
