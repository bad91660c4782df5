"""Matmuls of bf16 or fp32 operands with fp32 results on a CPU with AVX512_BF16.

The C++ is in csrc/matmuls*.cpp. This file chooses the engine, the set of instructions that computes
the matmuls. AMX (Advanced Matrix Extensions) are the tile instructions of Intel processors.

torch.mm rounds the results of bf16 operands to bf16. Converting the operands to fp32 first takes 2
to 4 times as long. For fp32 operands torch.mm takes twice as long on AMD (MKL), or allocates each
result anew (oneDNN).
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
from .cpu import _cpu, matrix_argument, vector_argument

#: The dtypes that operands may have.
OPERANDS = (torch.bfloat16, torch.float32)

#: How bf16 operands are multiplied:
#:
#:     amx          AMX tiles
#:     avx512bf16   vdpbf16ps
#:     fp32         fp32 FMA; the operands are converted while they are packed
#:     torch        torch.mm, in fp32; the functions of this file are not used
ENGINES = ("amx", "avx512bf16", "fp32", "torch")
#: The environment variable that names an engine. "auto" or empty: `fastest_engine` is used.
SETTING = "GRPO_KERNELS_PRODUCTS"

#: The engine in use. None until the first call chooses one.
_chosen: str | None = None
#: Held while a thread chooses the engine or compares AMX.
_lock = threading.RLock()


def _replace_lock() -> None:
    """Replace the lock in a forked process, where a thread of the parent may hold it forever."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)


def unavailable_reason() -> str | None:
    """Return the reason why the matmuls of this file cannot be used, or None if they can.

    They need AVX512_BF16, and an engine other than "torch".
    """
    if engine() != "torch":
        return None
    return _reason_without_avx512bf16() or f"{SETTING}=torch"


# ---- the choice of the engine


def engine() -> str:
    """Return the engine in use, one of ENGINES.

    The first call chooses it: the engine that the environment variable SETTING names, or
    `fastest_engine`. If AMX computes wrong results on this machine, the first call warns. Raises
    ValueError if the variable names an unknown engine, or one that cannot run here.
    """
    global _chosen
    if _chosen is not None:
        return _chosen
    mismatch = None
    with _lock:
        chosen = _chosen  # another thread may have chosen meanwhile
        if chosen is None:
            setting = os.environ.get(SETTING) or "auto"
            if setting == "auto":
                chosen = fastest_engine()
                mismatch = amx_mismatch()
            else:
                chosen = _check_engine(setting)
            _chosen = chosen
    # Warn after the lock is released: a warning filter may raise, or call this package.
    if mismatch is not None:
        warn_once(
            f"{mismatch}. Losses from hidden states use {SETTING}={chosen} instead, which may be"
            " slower. Please report this with the output of `python -m grpo_kernels doctor"
            " --json`."
        )
    return chosen


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use the engine `name` in a `with` block, in all threads. For tests and comparisons.

    Raises ValueError if the engine is unknown or cannot run here.
    """
    global _chosen
    before = _chosen
    _chosen = _check_engine(name)
    try:
        yield
    finally:
        _chosen = before


def fastest_engine() -> str:
    """Return the fastest engine that this process can use, one of ENGINES."""
    if _reason_without_avx512bf16() is not None:
        return "torch"
    return "amx" if _reason_unavailable("amx") is None else _best_without_amx()


def _best_without_amx() -> str:
    """Return the fastest engine without AMX: "fp32" on Intel, "avx512bf16" on AMD.

    vdpbf16ps has half the rate of fp32 FMA on Intel, and twice its rate on AMD.
    """
    vendor, _, _ = _cpu.processor()
    return "fp32" if vendor == "GenuineIntel" else "avx512bf16"


def engines() -> dict[str, str | None]:
    """Return, for each of ENGINES, the reason why it cannot run here, or None if it can."""
    return {name: _reason_unavailable(name) for name in ENGINES}


def amx_mismatch() -> str | None:
    """Return how results of AMX differ from those of another engine, in words.

    The result is None if they are equal, or if AMX cannot run here and nothing was compared.
    """
    if _reason_without_avx512bf16() is not None:
        return None
    amx = _amx()
    return amx.reason if amx.mismatch else None


def _reason_unavailable(name: str) -> str | None:
    """Return the reason why an engine cannot run on this machine, or None if it can.

    name   one of ENGINES, the sets of instructions for matmuls
    """
    if name == "torch":  # torch.mm runs anywhere
        return None
    reason = _reason_without_avx512bf16()
    if reason is None and name == "amx":  # the other engines need AVX512_BF16 only
        reason = _amx().reason
    return reason


def _reason_without_avx512bf16() -> str | None:
    """Return the reason why no engine but "torch" can run here, or None if one can."""
    reason = cpu.unavailable_reason()
    if reason is None and not _cpu.has_matmuls():
        return "this processor has no AVX512_BF16 instructions"
    return reason


def _check_engine(name: str) -> str:
    """Return `name`. Raises ValueError if it is no engine, or an engine that cannot run here."""
    if name not in ENGINES:
        raise ValueError(f"{SETTING}={name}: it is auto or one of {', '.join(ENGINES)}.")
    reason = _reason_unavailable(name)
    if reason is not None:
        able = ", ".join(other for other, why in engines().items() if why is None)
        raise ValueError(f"{SETTING}={name}: {reason}; leave it at auto, or take one of {able}.")
    return name


# ---- whether this process can use AMX

#: Bits of the register EDX of CPUID leaf 7: bf16 matmuls of AMX, and its tile registers.
AMX_BF16 = 1 << 22
AMX_TILE = 1 << 24
#: Bits of the register XCR0: the operating system saves the configuration and the contents of tile
#: registers.
TILE_STATE = 1 << 17 | 1 << 18
#: Why Linux refuses a process permission to use AMX, by errno.
REFUSALS = {
    errno.EINVAL: "Linux has it from version 5.16 on",
    errno.ENOSYS: "the sandbox has no arch_prctl",
    errno.EPERM: "a sandbox forbids it",
    errno.EOPNOTSUPP: "Linux runs without it here",
    errno.ENOSPC: "the alternate signal stack of a thread has no room for the AMX registers",
}


class Amx(NamedTuple):
    """Whether this process can use AMX.

    reason     why it cannot, in words; None if it can
    mismatch   True if the reason is that AMX computed wrong results
    """

    reason: str | None
    mismatch: bool = False


def _amx() -> Amx:
    """Return whether this process can use AMX.

    The first call examines the machine, under the lock, so that other threads wait for its result.
    """
    with _lock:
        return _examine_amx()


@functools.cache
def _examine_amx() -> Amx:
    """Find out whether this process can use AMX, and return the first obstacle.

    AMX needs a processor that has it, a C++ module that was compiled with it, a system that saves
    its registers, and permission for the process. Then its matmuls are compared with those of
    another engine. Each step is taken only if the steps before it succeeded, because permission
    cannot be given back. The result has the reason None if there is no obstacle.
    """
    _, features, saved_state = _cpu.processor()
    needed = AMX_BF16 | AMX_TILE
    if features & needed != needed:
        return Amx("this processor has no AMX with bf16")
    if "amx" not in _cpu.matmul_engines():
        return Amx("the C++ module was built by a compiler without AMX: GCC 11 or Clang 12 have it")
    if saved_state & TILE_STATE != TILE_STATE:
        return Amx("the system does not save the registers of AMX")
    refusal = _cpu.request_amx_permission()
    if refusal:
        reason = REFUSALS.get(refusal, os.strerror(refusal))
        return Amx(f"the system does not let this process use AMX: {reason}")
    difference = first_difference("amx", _best_without_amx())
    if difference is None:
        return Amx(reason=None)
    return Amx(f"the AMX matmuls are wrong on this machine: {difference}", mismatch=True)


# ---- the comparison of two engines
#
# The elements of all operands are integers, so small that every partial sum of a result is below
# 2^24 in absolute value. fp32 represents such sums exactly, in any order of the terms. Engines
# differ only in this order, so their results must be equal, without a tolerance. No element is 0,
# so a term that is missing, repeated or misplaced changes the result.

#: (N, H, V) of the matmuls that are compared: numbers of rows, hidden size and vocabulary size.
SHAPES = (
    (1, 1, 1),
    # Several blocks of H, of N (and of the rows of grad_hidden) and of V, with odd ends.
    (37, 515, 61),
    (513, 35, 59),
    (59, 61, 301),
    # More than 1,024 columns of grad_hidden.
    (3, 1025, 35),
    # Two parts of V that grad_hidden sums separately.
    (1, 1, 16385),
    # Rows that begin at cache lines, which are stored by other instructions.
    (33, 96, 240),
)
#: torch divides work on this many elements among threads. Starting threads takes longer than the
#: comparison, so torch computes only smaller tensors here.
DIVIDED = 32768
#: Bits of the elements of operands, which are integers from -2^bits to 2^bits. WIDE elements have
#: more than the 8 bits of bf16: an fp32 gradient is rounded to bf16, and AMX splits an fp32 operand
#: into two bf16 numbers. LARGE elements are added to a sum, which must then be held in fp32.
NARROW = 1
WIDE = 10
LARGE = 21
#: The value that results are filled with before a matmul. No sum of integers is 0.5, so the
#: comparison detects elements that are not written, and writes past the end.
UNWRITTEN = 0.5

#: (out, engine_name): writes a matmul to out [rows, columns], computed by the engine.
ComputeMatmul = Callable[[Tensor, str], None]


class Comparison(NamedTuple):
    """One matmul whose results of two engines are compared.

    operands        dtype of the operands, for messages
    matmul          name of the matmul, for messages
    rows, columns   shape of the result
    dtype           dtype of the result
    compute         (out, engine_name): writes the result to `out`
    """

    operands: str
    matmul: str
    rows: int
    columns: int
    dtype: torch.dtype
    compute: ComputeMatmul

    def difference(self, engine_name: str, reference: str) -> str | None:
        """Return how the results of two engines differ, in words, or None if they are equal.

        The memory around the results is compared as well, to detect writes past the end.

        engine_name   the engine that is examined, a set of instructions in ENGINES
        reference     the engine that it is compared with
        """
        result = Result(self.rows, self.columns, self.dtype)
        expected = Result(self.rows, self.columns, self.dtype)
        self.compute(result.matrix, engine_name)
        self.compute(expected.matrix, reference)
        if torch.equal(result.memory, expected.memory):
            return None
        count = int((result.memory != expected.memory).sum())
        return (
            f"{count} elements of {self.matmul} of {self.operands} operands differ from the engine"
            f" {reference}"
        )


@torch.no_grad()
def first_difference(engine_name: str, reference: str) -> str | None:
    """Compare the three matmuls of two engines, for bf16 and fp32 operands and several SHAPES.

    Returns the first difference in words, or None if all results are equal. An engine that runs out
    of memory or raises RuntimeError counts as a difference.

    engine_name   the engine that is examined, a set of instructions in ENGINES
    reference     the engine that it is compared with
    """
    try:
        for n, h, v in SHAPES:
            for comparison in _comparisons(n, h, v):
                difference = comparison.difference(engine_name, reference)
                if difference is not None:
                    return f"{difference} (N = {n}, H = {h}, V = {v})"
    except (MemoryError, RuntimeError) as error:
        return f"the comparison with {reference} failed: {type(error).__name__}: {error}"
    return None


def _comparisons(n: int, h: int, v: int) -> Iterator[Comparison]:
    """Yield the matmuls whose results two engines must agree on, as a `Comparison` each.

    For n rows of hidden size h and a vocabulary of v ids these are, with bf16 and fp32 operands,

        logits        [n, v]
        grad_hidden   [n, h]
        grad_weight   [v, h], also added to a sum, and rounded to bf16

    All engines run on one thread.
    """
    bf16 = torch.bfloat16
    fp32 = torch.float32
    hidden16 = integers(n, h, NARROW, bf16)
    weight16 = integers(v, h, NARROW, bf16)
    grad16 = integers(n, v, NARROW, bf16)
    hidden = integers(n, h, NARROW)
    weight = integers(v, h, NARROW)
    grad = integers(n, v, NARROW)
    wide_hidden = integers(n, h, WIDE)
    wide_weight = integers(v, h, WIDE)
    wide_grad = integers(n, v, WIDE)
    bias = integers(1, v, LARGE)[0]
    start = integers(v, h, LARGE)

    def compare_logits(
        operands: str, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Comparison:
        """Compare hidden @ weight.T + bias, [n, v].

        operands   dtype of hidden [n, h] and weight [v, h], for messages
        """

        def compute(out: Tensor, name: str) -> None:
            """Write the logits to `out`, computed by the engine `name`."""
            logits(hidden, weight, bias, out, engine_name=name, threads=1)

        return Comparison(operands, "logits", rows=n, columns=v, dtype=fp32, compute=compute)

    def compare_grad_hidden(operands: str, grad: Tensor, weight: Tensor) -> Comparison:
        """Compare grad @ weight, [n, h].

        operands   dtype of grad [n, v] and weight [v, h], for messages
        """

        def compute(out: Tensor, name: str) -> None:
            """Write grad @ weight to `out`, computed by the engine `name`."""
            grad_hidden(grad, weight, out, engine_name=name, threads=1)

        return Comparison(operands, "grad_hidden", rows=n, columns=h, dtype=fp32, compute=compute)

    def compare_grad_weight(
        operands: str,
        matmul: str,
        grad: Tensor,
        hidden: Tensor,
        *,
        start: Tensor | None = None,
        dtype: torch.dtype = fp32,
    ) -> Comparison:
        """Compare start + grad.T @ hidden, [v, h], rounded to `dtype`.

        operands   dtype of grad [n, v] and hidden [n, h], for messages
        matmul     name of this matmul, for messages
        start      fp32 [v, h], None for 0
        """

        def compute(out: Tensor, name: str) -> None:
            """Write start + grad.T @ hidden to `out`, computed by the engine `name`."""
            grad_weight(grad, hidden, start, out, engine_name=name, threads=1)

        return Comparison(operands, matmul, rows=v, columns=h, dtype=dtype, compute=compute)

    def compare_sum_in_place(operands: str, grad: Tensor, hidden: Tensor) -> Comparison:
        """Compare out += grad.T @ hidden, where `out` holds the sum `start` [v, h] before.

        operands   dtype of grad [n, v] and hidden [n, h], for messages
        """

        def compute(out: Tensor, name: str) -> None:
            """Write start + grad.T @ hidden over `start` in `out`, by the engine `name`."""
            out.copy_(start)
            total = out  # the sum so far, which is overwritten by the new sum
            grad_weight(grad, hidden, total, out, engine_name=name, threads=1)

        return Comparison(
            operands,
            "grad_weight, added to a sum",
            rows=v,
            columns=h,
            dtype=fp32,
            compute=compute,
        )

    yield compare_logits("bf16", hidden16, weight16, bias)
    yield compare_grad_hidden("bf16", grad16, weight16)
    yield compare_grad_hidden("bf16", wide_grad, weight16)
    # Each fp32 operand is wide once. Two wide operands in one matmul would differ, because AMX
    # leaves out the product of their low parts.
    yield compare_logits("fp32", wide_hidden, weight, bias)
    yield compare_logits("fp32", hidden, wide_weight, bias=None)
    yield compare_grad_hidden("fp32", wide_grad, weight)
    yield compare_grad_hidden("fp32", grad, wide_weight)
    if v * h >= DIVIDED:
        return
    yield compare_grad_weight("bf16", "grad_weight", grad16, hidden16)
    yield compare_grad_weight("bf16", "grad_weight", wide_grad, hidden16)
    yield compare_sum_in_place("bf16", grad16, hidden16)
    yield compare_grad_weight(
        "bf16", "grad_weight, rounded", grad16, hidden16, start=start, dtype=bf16
    )
    yield compare_grad_weight("fp32", "grad_weight", wide_grad, hidden)
    yield compare_sum_in_place("fp32", grad, wide_hidden)


def integers(rows: int, columns: int, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return pseudo-random integers [rows, columns] from -2^bits to 2^bits, without 0.

    They are the same at every call: a hash of the element's index, from 0 to 2^(bits + 1) - 1,
    minus 2^bits. All rows together take fewer than DIVIDED elements of memory: in a large matrix
    row i + 1 begins less than `columns` elements behind row i, so the two share memory.
    """
    stride = min(columns, (DIVIDED - 1 - columns) // rows)
    count = (rows - 1) * stride + columns
    # A hash of the indices, by two multiplications modulo 2^32.
    hashed = torch.arange(count, dtype=torch.int64, device="cpu").add_(bits).mul_(0x9E3779B1)
    hashed = hashed.bitwise_xor_(hashed >> 15).bitwise_and_(0xFFFFFFFF).mul_(0x2C1B3C6D) >> 12
    values = hashed.bitwise_and_((2 << bits) - 1).sub_(1 << bits)
    values.add_(values >= 0)  # moves 0, 1, 2, ... up by 1, so that 0 does not occur
    return values.to(dtype).as_strided((rows, columns), (stride, 1))


class Result:
    """Memory for a result of a matmul, with a margin that no engine may write.

    All memory is filled with UNWRITTEN. There is a margin behind the last row. If a row does not
    fill whole cache lines, there is also a margin of 3 elements behind each row.

    memory   1-d, with the margins
    matrix   [rows, columns], the view of `memory` for the result
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Allocate a result [rows, columns] and its margins, which no engine may write."""
        # 3 elements behind each row, unless rows fill whole cache lines of 16 fp32 numbers, which
        # are stored by other instructions. 16 elements behind the last row.
        stride = columns if columns == 1 or columns % 16 == 0 else columns + 3
        self.memory = torch.full((rows * stride + 16,), UNWRITTEN, dtype=dtype, device="cpu")
        self.matrix = self.memory[: rows * stride].view(rows, stride)[:, :columns]


# ---- the matmuls
#
# N is the number of rows, H the hidden size, V the vocabulary size. Two arguments are for tests:
#
#     engine_name   None: the engine in use for the dtype of the operands, see `_engine_for`
#     threads       0: as many as torch uses


def logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    engine_name: str | None = None,
    threads: int = 0,
) -> None:
    """Write logits = hidden @ weight.T + bias to `out`, never rounded to bf16.

    hidden        [N, H], N rows of hidden size H; bf16 or fp32
    weight        [V, H], V ids; the dtype of `hidden`
    bias          fp32 [V] or None
    out           fp32 [N, V]
    engine_name   for tests: the instructions to use, one of ENGINES. None: those in use.
    threads       for tests: number of threads. 0: as many as torch uses.
    """
    hidden_matrix = matrix_argument("hidden", hidden)
    weight_matrix = matrix_argument("weight", weight)
    _cpu.logits(
        engine_name or _engine_for(weight.dtype),
        hidden_matrix,
        weight_matrix,
        vector_argument("bias", bias, torch.float32, weight.shape[0]),
        matrix_argument("out", out),
        threads or torch.get_num_threads(),
    )


def grad_hidden(
    grad_logits: Tensor,
    weight: Tensor,
    out: Tensor,
    engine_name: str | None = None,
    threads: int = 0,
) -> None:
    """Write grad_hidden = grad_logits @ weight to `out`, summed in fp32.

    grad_logits   [N, V]; bf16 or fp32 with a bf16 weight (it is rounded to bf16 while it is
                  packed), fp32 with an fp32 weight
    weight        [V, H]
    out           fp32 [N, H]
    engine_name   for tests: the instructions to use, one of ENGINES. None: those in use.
    threads       for tests: number of threads. 0: as many as torch uses.
    """
    grad_matrix = matrix_argument("grad_logits", grad_logits)
    weight_matrix = matrix_argument("weight", weight)
    _cpu.grad_hidden(
        engine_name or _engine_for(weight.dtype),
        grad_matrix,
        weight_matrix,
        matrix_argument("out", out),
        threads or torch.get_num_threads(),
    )


def grad_weight(
    grad_logits: Tensor,
    hidden: Tensor,
    start: Tensor | None,
    out: Tensor,
    engine_name: str | None = None,
    threads: int = 0,
) -> None:
    """Write grad_weight = start + grad_logits.T @ hidden to `out`, summed in fp32.

    grad_logits   [N, V]; bf16 or fp32 with bf16 hidden states (it is rounded to bf16 while it is
                  packed), fp32 with fp32 hidden states
    hidden        [N, H], bf16 or fp32
    start         fp32 [V, H], possibly `out` itself; None is 0
    out           [V, H]; fp32, or bf16, to which the sum is rounded once
    engine_name   for tests: the instructions to use, one of ENGINES. None: those in use.
    threads       for tests: number of threads. 0: as many as torch uses.
    """
    grad_matrix = matrix_argument("grad_logits", grad_logits)
    hidden_matrix = matrix_argument("hidden", hidden)
    _cpu.grad_weight(
        engine_name or _engine_for(hidden.dtype),
        grad_matrix,
        hidden_matrix,
        None if start is None else matrix_argument("start", start),
        matrix_argument("out", out),
        threads or torch.get_num_threads(),
    )


def num_vocab_splits(dtype: torch.dtype, width: int, vocab_size: int) -> int:
    """Return how many temporaries fp32 [N, H] `grad_hidden` allocates, 0 for most engines.

    The AMX engine splits a large vocabulary into parts, sums each part in a temporary, and adds the
    temporaries. If there is only one part, the sum needs no temporary.

    dtype        dtype of the operands
    width        hidden size H
    vocab_size   number of ids V
    """
    num_splits = _cpu.num_vocab_splits(_engine_for(dtype), width, vocab_size)
    return num_splits if num_splits > 1 else 0


def _engine_for(dtype: torch.dtype) -> str:
    """Return the engine that multiplies operands of a dtype.

    AMX splits an fp32 operand into two bf16 numbers, which keep 16 of its 24 bits. So AMX takes
    fp32 operands only if the user allows torch reduced precision. If not, "avx512bf16" takes them,
    which multiplies fp32 operands in full precision.
    """
    name = engine()
    if name == "amx" and dtype == torch.float32 and not less_than_fp32():
        return "avx512bf16"
    return name


def less_than_fp32() -> bool:
    """Return whether the user allows reduced precision for matmuls of fp32 operands.

    The user does so by torch.set_float32_matmul_precision("high") or "medium".
    """
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        # The user has set a precision for each library of torch instead.
        return False
