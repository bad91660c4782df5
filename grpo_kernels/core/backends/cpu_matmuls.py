"""Matrix products of bf16 or fp32 operands with fp32 results, for CPUs with AVX512_BF16
(csrc/matmuls*.cpp), and the choice of the engine that computes them.

torch.mm rounds results of bf16 operands to bf16; going through fp32 operands instead takes 2 to 4
times as long. Of fp32 operands torch.mm (MKL) takes twice as long on AMD, and oneDNN's results are
new memory each time.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import warn_once
from . import cpu
from .cpu import _cpu, matrix, vector

OPERANDS = (torch.bfloat16, torch.float32)

#: Ways to multiply bf16 operands: AMX tiles; vdpbf16ps; fp32 of operands that are widened while
#: they are packed; torch's, in fp32.
ENGINES = ("amx", "avx512bf16", "fp32", "torch")
#: One of them, in the environment of the process; "auto" or nothing: `automatic`.
SETTING = "GRPO_KERNELS_PRODUCTS"

_chosen: str | None = None  # the engine in use, once there is one
_lock = threading.RLock()  # held while the engine is chosen and while AMX is compared


def _replace_lock() -> None:
    """Give a forked process a lock of its own:

    another thread of its parent may have held the lock during the fork.
    """
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)


def available() -> str | None:
    """None if these products can run, else the reason in words."""
    if engine() != "torch":
        return None
    return _why_not_own() or f"{SETTING}=torch"


# ---- the choice


def engine() -> str:
    """Return the engine in use. The first call chooses it: the engine that the setting names, or
    `automatic`.

    Raises ValueError if the setting is not an engine, or is one that cannot run here.
    """
    global _chosen
    if _chosen is not None:
        return _chosen
    mismatch = None
    with _lock:
        chosen = _chosen
        if chosen is None:
            setting = os.environ.get(SETTING) or "auto"
            if setting == "auto":
                chosen = automatic()
                mismatch = amx_mismatch()
            else:
                chosen = _checked(setting)
            _chosen = chosen
    if (
        mismatch is not None
    ):  # after the choice and outside the lock: a filter may raise the warning, or call this package
        warn_once(
            f"{mismatch}. Losses from hidden states use {SETTING}={chosen} instead, which may be"
            " slower. Please report this with the output of `python -m grpo_kernels doctor"
            " --json`."
        )
    return chosen


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use another engine in this block, in all threads: for tests and to compare engines."""
    global _chosen
    before, _chosen = _chosen, _checked(name)
    try:
        yield
    finally:
        _chosen = before


def automatic() -> str:
    """Return the fastest engine that this process can use:

    AMX if its products pass the comparison below.
    """
    if _why_not_own() is not None:
        return "torch"
    return "amx" if _why_not("amx") is None else _best_without_amx()


def _best_without_amx() -> str:
    """Return the fastest engine without AMX.

    On Intel vdpbf16ps has half the rate of fp32 FMA, on AMD twice the rate.
    """
    return "fp32" if _cpu.processor()[0] == "GenuineIntel" else "avx512bf16"


def engines() -> dict[str, str | None]:
    """Return each engine and why it cannot run here; None if it can."""
    return {name: _why_not(name) for name in ENGINES}


def amx_mismatch() -> str | None:
    """Return what was wrong if this process can use AMX but its products failed the comparison;
    else None.
    """
    return _amx().reason if _why_not_own() is None and _amx().mismatch else None


def _why_not(name: str) -> str | None:
    if name == "torch":
        return None
    return _why_not_own() or (_amx().reason if name == "amx" else None)


def _why_not_own() -> str | None:
    reason = cpu.available()
    if reason is None and not _cpu.has_matmuls():
        return "this processor has no AVX512_BF16 instructions"
    return reason


def _checked(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"{SETTING}={name}: it is auto or one of {', '.join(ENGINES)}.")
    reason = _why_not(name)
    if reason is not None:
        able = ", ".join(other for other, why in engines().items() if why is None)
        raise ValueError(f"{SETTING}={name}: {reason}; leave it at auto, or take one of {able}.")
    return name


# ---- AMX: whether this process can use it

#: Bits of EDX of CPUID leaf 7: the bf16 products of AMX, and its tile registers.
AMX_BF16, AMX_TILE = 1 << 22, 1 << 24
#: Bits of XCR0: the operating system saves the configuration and the contents of the tile
#: registers.
TILE_STATE = 1 << 17 | 1 << 18
#: Why Linux refuses permission, by errno.
REFUSALS = {
    errno.EINVAL: "Linux has it from version 5.16 on",
    errno.ENOSYS: "the sandbox has no arch_prctl",
    errno.EPERM: "a sandbox forbids it",
    errno.EOPNOTSUPP: "Linux runs without it here",
    errno.ENOSPC: "the alternate signal stack of a thread has no room for the AMX registers",
}


class Amx(NamedTuple):
    """Whether this process can use the AMX products."""

    reason: str | None  # why not; None if it can
    mismatch: bool = False  # the reason is a failed comparison


def _amx() -> Amx:
    """Ask and compare once per process, in whichever thread comes first; the other threads wait for
    the answer.
    """
    with _lock:
        return _examine_amx()


@functools.cache
def _examine_amx() -> Amx:
    """Each step is taken only if those before it succeeded.

    So without AMX the process is not changed and nothing is compared.
    """
    _, features, saved = _cpu.processor()
    wanted = AMX_BF16 | AMX_TILE
    if features & wanted != wanted:
        return Amx("this processor has no AMX with bf16")
    if "amx" not in _cpu.matmul_engines():
        return Amx("the C++ module was built by a compiler without AMX: GCC 11 or Clang 12 have it")
    if saved & TILE_STATE != TILE_STATE:
        return Amx("the system does not save the registers of AMX")
    refusal = _cpu.request_amx_permission()
    if refusal:
        return Amx(
            "the system does not let this process use AMX:"
            f" {REFUSALS.get(refusal, os.strerror(refusal))}"
        )
    difference = first_difference("amx", _best_without_amx())
    return (
        Amx(None)
        if difference is None
        else Amx(f"the AMX products are wrong on this machine: {difference}", mismatch=True)
    )


# ---- the comparison of two engines
#
# Operands are integers, so small that every partial sum of a result is below 2^24 in absolute
# value. A product of two bf16 numbers is exact in fp32, and so are these sums, in any order of
# summation. Engines differ in that order only, so their results must be equal, and no tolerance is
# needed. No operand is 0, so a term that is missing, repeated or misplaced shows.

#: N, H, V: one element; odd ends with several blocks of H, of N (and of the rows of d_hidden) and
#: of V; more than 1,024 columns of d_hidden; V in two parts that d_hidden sums separately; and rows
#: that begin at cache lines, which other instructions store.
SHAPES = (
    (1, 1, 1),
    (37, 515, 61),
    (513, 35, 59),
    (59, 61, 301),
    (3, 1025, 35),
    (1, 1, 16385),
    (33, 96, 240),
)
#: torch divides work on this many elements among threads. Starting threads would take longer than
#: the comparison, so its products run on one thread, and what torch computes is smaller.
DIVIDED = 32768
#: Operands are -2^bits to 2^bits without 0. WIDE ones need more than the 8 bits of bf16: a gradient
#: in fp32 is rounded to bf16, and an fp32 operand is split into two bf16 numbers. LARGE ones, which
#: are added to a sum, show whether it is held in fp32.
NARROW, WIDE, LARGE = 1, 10, 21
#: No sum of integers is this number: outputs are filled with it, so an element that is not written,
#: or is past the end, shows.
UNWRITTEN = 0.5


class Comparison(NamedTuple):
    """A product that two engines compute."""

    operands: str
    product: str
    rows: int  # of the result
    columns: int
    dtype: torch.dtype
    call: Callable[[Tensor, str], None]  # with the result's memory and an engine

    def difference(self, engine: str, reference: str) -> str | None:
        """Return how the results of two engines differ, in words; None if all of their memory is
        equal.
        """
        ours, theirs = (Result(self.rows, self.columns, self.dtype) for _ in range(2))
        self.call(ours.matrix, engine)
        self.call(theirs.matrix, reference)
        if torch.equal(ours.memory, theirs.memory):
            return None
        count = int((ours.memory != theirs.memory).sum())
        return (
            f"{count} elements of {self.product} of {self.operands} operands differ from the engine"
            f" {reference}"
        )


@torch.no_grad()
def first_difference(engine: str, reference: str) -> str | None:
    """Compare all products of two engines, of bf16 and of fp32 operands.

    Return the first difference in words, or None.
    """
    try:
        for n, h, v in SHAPES:
            for comparison in _comparisons(n, h, v):
                difference = comparison.difference(engine, reference)
                if difference is not None:
                    return f"{difference} (N = {n}, H = {h}, V = {v})"
    except (MemoryError, RuntimeError) as error:
        return f"the comparison with {reference} failed: {type(error).__name__}: {error}"
    return None


def _comparisons(n: int, h: int, v: int) -> Iterator[Comparison]:
    bf16, fp32 = torch.bfloat16, torch.float32
    hidden16, weight16, gradient16 = (
        integers(n, h, NARROW, bf16),
        integers(v, h, NARROW, bf16),
        integers(n, v, NARROW, bf16),
    )
    hidden, weight, gradient = (
        integers(n, h, NARROW),
        integers(v, h, NARROW),
        integers(n, v, NARROW),
    )
    wide_hidden, wide_weight, wide_gradient = (
        integers(n, h, WIDE),
        integers(v, h, WIDE),
        integers(n, v, WIDE),
    )
    bias, start = integers(1, v, LARGE)[0], integers(v, h, LARGE)

    def logits_of(
        hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor, str], None]:
        return lambda out, engine: logits(hidden, weight, bias, out, by=engine, threads=1)

    def d_hidden_of(gradient: Tensor, weight: Tensor) -> Callable[[Tensor, str], None]:
        return lambda out, engine: d_hidden(gradient, weight, out, by=engine, threads=1)

    def d_weight_of(
        gradient: Tensor, hidden: Tensor, start: Tensor | None
    ) -> Callable[[Tensor, str], None]:
        return lambda out, engine: d_weight(gradient, hidden, start, out, by=engine, threads=1)

    def d_weight_added(gradient: Tensor, hidden: Tensor) -> Callable[[Tensor, str], None]:
        return lambda out, engine: d_weight(
            gradient, hidden, out.copy_(start), out, by=engine, threads=1
        )

    yield Comparison("bf16", "logits", n, v, fp32, logits_of(hidden16, weight16, bias))
    yield Comparison("bf16", "d_hidden", n, h, fp32, d_hidden_of(gradient16, weight16))
    yield Comparison("bf16", "d_hidden", n, h, fp32, d_hidden_of(wide_gradient, weight16))
    # Each fp32 operand is wide once, but never two: the product of the low parts of both is left
    # out.
    yield Comparison("fp32", "logits", n, v, fp32, logits_of(wide_hidden, weight, bias))
    yield Comparison("fp32", "logits", n, v, fp32, logits_of(hidden, wide_weight, None))
    yield Comparison("fp32", "d_hidden", n, h, fp32, d_hidden_of(wide_gradient, weight))
    yield Comparison("fp32", "d_hidden", n, h, fp32, d_hidden_of(gradient, wide_weight))
    if v * h < DIVIDED:
        yield Comparison("bf16", "d_weight", v, h, fp32, d_weight_of(gradient16, hidden16, None))
        yield Comparison("bf16", "d_weight", v, h, fp32, d_weight_of(wide_gradient, hidden16, None))
        yield Comparison(
            "bf16", "d_weight, added to a sum", v, h, fp32, d_weight_added(gradient16, hidden16)
        )
        yield Comparison(
            "bf16", "d_weight, rounded", v, h, bf16, d_weight_of(gradient16, hidden16, start)
        )
        yield Comparison("fp32", "d_weight", v, h, fp32, d_weight_of(wide_gradient, hidden, None))
        yield Comparison(
            "fp32", "d_weight, added to a sum", v, h, fp32, d_weight_added(gradient, wide_hidden)
        )


def integers(rows: int, columns: int, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [rows, columns] of integers from -2^bits to 2^bits without 0 that look random, the
    same at every call. The rows of a large matrix overlap in memory.
    """
    stride = min(columns, (DIVIDED - 1 - columns) // rows)
    hashed = (
        torch.arange((rows - 1) * stride + columns, dtype=torch.int64, device="cpu")
        .add_(bits)
        .mul_(0x9E3779B1)
    )
    hashed = hashed.bitwise_xor_(hashed >> 15).bitwise_and_(0xFFFFFFFF).mul_(0x2C1B3C6D) >> 12
    values = hashed.bitwise_and_((2 << bits) - 1).sub_(1 << bits)
    return values.add_(values >= 0).to(dtype).as_strided((rows, columns), (stride, 1))


class Result:
    """Memory for a result, with memory behind its end, and behind its rows unless they begin at
    cache lines.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        stride = columns if columns == 1 or columns % 16 == 0 else columns + 3
        self.memory = torch.full((rows * stride + 16,), UNWRITTEN, dtype=dtype, device="cpu")
        self.matrix = self.memory[: rows * stride].view(rows, stride)[:, :columns]


# ---- the products. `by`: the engine; None: the one in use. `threads`: 0 for as many as torch uses.


def logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    by: str | None = None,
    threads: int = 0,
) -> None:
    """out [N, V] fp32 = hidden [N, H] @ weight [V, H]^T + bias [V] fp32.

    Hidden states and weight are bf16 or fp32, both.
    """
    operands, of_bias = (
        (matrix("hidden", hidden), matrix("weight", weight)),
        vector("bias", bias, torch.float32, weight.shape[0]),
    )
    _cpu.logits(
        by or _engine_for(weight.dtype),
        *operands,
        of_bias,
        matrix("out", out),
        threads or torch.get_num_threads(),
    )


def d_hidden(
    gradient: Tensor, weight: Tensor, out: Tensor, by: str | None = None, threads: int = 0
) -> None:
    """out [N, H] fp32 = gradient [N, V] @ weight [V, H], bf16 or fp32. With a bf16 weight a
    gradient in fp32 is rounded to bf16 on the way; with one in fp32 the gradient is fp32.
    """
    operands = matrix("gradient", gradient), matrix("weight", weight)
    _cpu.grad_hidden(
        by or _engine_for(weight.dtype),
        *operands,
        matrix("out", out),
        threads or torch.get_num_threads(),
    )


def d_weight(
    gradient: Tensor,
    hidden: Tensor,
    start: Tensor | None,
    out: Tensor,
    by: str | None = None,
    threads: int = 0,
) -> None:
    """out [V, H] = start [V, H] fp32 + gradient [N, V]^T @ hidden [N, H], bf16 or fp32, summed in
    fp32. out is fp32, and may be `start`, or bf16, rounded once. Without `start` the sum begins at
    0, whatever out holds. The gradient is as in `d_hidden`.
    """
    operands, begin = (
        (matrix("gradient", gradient), matrix("hidden", hidden)),
        None if start is None else matrix("start", start),
    )
    _cpu.grad_weight(
        by or _engine_for(hidden.dtype),
        *operands,
        begin,
        matrix("out", out),
        threads or torch.get_num_threads(),
    )


def d_hidden_parts(dtype: torch.dtype, width: int, vocab: int) -> int:
    """How many sums of its size in fp32 one product makes beside its result, to add them up; 0:

    none.
    """
    parts = _cpu.num_vocab_splits(_engine_for(dtype), width, vocab)
    return parts if parts > 1 else 0


def _engine_for(dtype: torch.dtype) -> str:
    """The engine in use for operands of this type. Tiles take fp32 as two bf16 numbers, which keep
    16 of the 24 bits: only where torch may use less than fp32 for fp32, too.
    """
    name = engine()
    return (
        "avx512bf16" if name == "amx" and dtype == torch.float32 and not less_than_fp32() else name
    )


def less_than_fp32() -> bool:
    """Whether the user allows it to products of fp32 operands."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # newer settings say it for each library, and ours is none of them
        return False
