"""Matrix products of bf16 or fp32 tensors with fp32 results, for processors with AVX512_BF16 (csrc/products*.cpp), and which of
several ways to multiply this process takes.

torch.mm rounds results of bf16 operands to bf16; going through fp32 operands instead takes 2 to 4 times as long. Of fp32 operands
torch.mm (MKL) takes twice as long on AMD, and oneDNN's results are new memory each time."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import cpu
from .cpu import _cpu, matrix, vector

OPERANDS = (torch.bfloat16, torch.float32)

#: Ways to multiply bf16 operands: tiles; vdpbf16ps; fp32 of operands that are widened while they are packed; torch's, in fp32 too.
ENGINES = ("amx", "avx512bf16", "fp32", "torch")
#: One of them, in the environment of the process; "auto" or nothing: `automatic`.
SETTING = "GRPO_KERNELS_PRODUCTS"

#: Whether the tests have run on a processor with AMX. Until then tiles are taken only where the setting names them: an emulator
#: of their instructions shows neither their speed nor that no fault of theirs ends the process.
TILES_HAVE_RUN = False

_chosen: str | None = None  # the engine in use, once there is one


def available() -> str | None:
    """None if these products can run, else the reason in words."""
    if engine() != "torch":
        return None
    return _why_not_own() or f"{SETTING}=torch"


# ---- the choice


def engine() -> str:
    """The engine in use, chosen at the first call. ValueError if the setting names none, or one that cannot run here."""
    global _chosen
    if _chosen is None:
        name = os.environ.get(SETTING) or "auto"
        _chosen = automatic() if name == "auto" else _checked(name)
    return _chosen


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
    """The fastest engine of this processor of those that have run on one like it. Never vdpbf16ps on Intel: there it has half
    the rate of fp32, on AMD twice."""
    if _why_not_own() is not None:
        return "torch"
    if TILES_HAVE_RUN and _why_not("amx") is None:
        return "amx"
    return "fp32" if _cpu.processor()[0] == "GenuineIntel" else "avx512bf16"


def engines() -> dict[str, str | None]:
    """Each engine, and why it cannot run here; None: it can."""
    return {name: _why_not(name) for name in ENGINES}


@functools.cache
def _why_not(name: str) -> str | None:
    """Of one engine, so that tiles are tried only where somebody asks about them."""
    if name == "torch":
        return None
    return _why_not_own() or (_why_no_amx() if name == "amx" else None)


def _why_not_own() -> str | None:
    reason = cpu.available()
    if reason is None and not _cpu.has_products():
        return "this processor has no AVX512_BF16 instructions"
    return reason


def _checked(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"{SETTING}={name}: it is auto or one of {', '.join(ENGINES)}.")
    reason = _why_not(name)
    if reason is not None:
        raise ValueError(f"{SETTING}={name}: {reason}; leave it at auto, or take one of {_names(engines())}.")
    return name


def _names(found: dict[str, str | None]) -> str:
    return ", ".join(name for name, reason in found.items() if reason is None)


def _why_no_amx() -> str | None:
    """None if this process may use bf16 tiles and they give what AVX512_BF16 gives. Asks in an order in which each answer matters
    only after the ones before: emulators and virtual machines hide the first."""
    _, features, saved = _cpu.processor()
    bf16, tiles, state = 1 << 22, 1 << 24, 1 << 17 | 1 << 18
    if features & (bf16 | tiles) != bf16 | tiles:
        return "this processor has no AMX with bf16"
    if "amx" not in _cpu.products():
        return "the C++ module was built by a compiler without AMX: GCC 11 or Clang 12 have it"
    if saved & state != state:
        return "the system does not save the tiles of AMX"
    if not _cpu.ask_for_tiles():
        return "the system does not let this process use AMX"
    return None if _tiles_agree() else "the products by AMX differ from those by AVX512_BF16 on this machine"


@torch.no_grad()
def _tiles_agree() -> bool:
    """Whether products by tiles are those by AVX512_BF16 to rounding: ragged at every end, over several blocks and parts. One term
    too many or too few would be far outside."""
    for dtype, error in ((torch.bfloat16, 1e-6), (torch.float32, 1e-4)):  # of each term, at most 1
        for n, h, v in ((37, 545, 67), (549, 35, 67), (5, 33, 16387)):
            hidden, weight, gradient = _waves(n, h).to(dtype), _waves(v, h).to(dtype), _waves(n, v)
            for rows, columns, inner, product in (
                (n, v, h, functools.partial(logits, hidden, weight, None)),
                (n, h, v, functools.partial(d_hidden, gradient, weight)),
                (v, h, n, functools.partial(d_weight, gradient, hidden, None)),
            ):
                ours, theirs = (torch.full((rows, columns), torch.nan, dtype=torch.float32, device="cpu") for _ in range(2))
                product(ours, by="amx")
                product(theirs, by="avx512bf16")
                if not torch.allclose(ours, theirs, rtol=0, atol=error * inner):
                    return False
    return True


def _waves(rows: int, columns: int) -> Tensor:
    """Numbers that look random, without a generator."""
    return torch.arange(rows * columns, dtype=torch.float32, device="cpu").mul_(1.618).sin_().view(rows, columns)


# ---- the products. `by`: the engine; None: the one in use.


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, by: str | None = None) -> None:
    """out [N, V] fp32 = hidden [N, H] @ weight [V, H]^T + bias [V] fp32. Hidden states and weight are bf16 or fp32, both."""
    operands, of_bias = (
        (matrix("hidden", hidden), matrix("weight", weight)),
        vector("bias", bias, torch.float32, weight.shape[0]),
    )
    _cpu.logits_product(by or _engine_for(weight.dtype), *operands, of_bias, matrix("out", out), torch.get_num_threads())


def d_hidden(gradient: Tensor, weight: Tensor, out: Tensor, by: str | None = None) -> None:
    """out [N, H] fp32 = gradient [N, V] @ weight [V, H], bf16 or fp32. With a bf16 weight a gradient in fp32 is rounded to bf16
    on the way; with one in fp32 the gradient is fp32."""
    operands = matrix("gradient", gradient), matrix("weight", weight)
    _cpu.d_hidden(by or _engine_for(weight.dtype), *operands, matrix("out", out), torch.get_num_threads())


def d_weight(gradient: Tensor, hidden: Tensor, start: Tensor | None, out: Tensor, by: str | None = None) -> None:
    """out [V, H] = start [V, H] fp32 + gradient [N, V]^T @ hidden [N, H], bf16 or fp32, summed in fp32. out is fp32, and may be
    `start`, or bf16, rounded once. Without `start` the sum begins at 0, whatever out holds. The gradient is as in `d_hidden`."""
    operands, begin = (
        (matrix("gradient", gradient), matrix("hidden", hidden)),
        None if start is None else matrix("start", start),
    )
    _cpu.d_weight(by or _engine_for(hidden.dtype), *operands, begin, matrix("out", out), torch.get_num_threads())


def d_hidden_parts(dtype: torch.dtype, width: int, vocab: int) -> int:
    """How many sums of its size in fp32 one product makes beside its result, to add them up; 0: none."""
    parts = _cpu.d_hidden_parts(_engine_for(dtype), width, vocab)
    return parts if parts > 1 else 0


def _engine_for(dtype: torch.dtype) -> str:
    """The engine in use for operands of this type. Tiles take fp32 as two bf16 numbers, which keep 16 of the 24 bits: only where
    torch may use less than fp32 for fp32, too."""
    name = engine()
    return "avx512bf16" if name == "amx" and dtype == torch.float32 and not less_than_fp32() else name


def less_than_fp32() -> bool:
    """Whether the user allows it to products of fp32 operands."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # newer settings say it for each library, and ours is none of them
        return False
