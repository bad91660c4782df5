"""The three matrix products between hidden states and logits, in the precision that is fastest on each device.

logits   = hidden @ weight.T + bias      [c, H] x [V, H] -> fp32 [c, V], never rounded to 16 bits
d_hidden = d_logits @ weight             [c, V] x [V, H] -> [c, H]
d_weight += d_logits.T @ hidden          [c, V] x [c, H] -> [V, H], summed in fp32 over all chunks and rounded at the end at most
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import memory
from .backends import cpu_products

#: Rows of gradients of 16 bits begin at multiples of this many bytes: matrix libraries have slow kernels for others.
ROW_ALIGNMENT = 128
#: Gradients in fp16 are kept below 2^FULL; those of a row without an element of 2^SMALLEST as if it had one.
FULL, SMALLEST = 15, -100


def products_for(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Products:
    """The products for `weight` [V, H] on its device; `dtype` is what products may compute in."""
    if weight.shape[0] == 0:  # a rank without a part of the vocabulary
        return Products(weight, bias)
    if keeps_rows(dtype, weight.device):
        own = weight.to(dtype)
        return TensorCoreProducts(own, bias, weight.dtype) if dtype == torch.bfloat16 else HalfProducts(own, bias)
    native = _native(weight, dtype)
    if native is not None:
        return NativeProducts(weight, bias, native)
    return Products(weight, bias)  # no dtype is faster than fp32 here, so nothing is rounded, whatever `dtype` allows


def _native(weight: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """The type of the operands of our own products on a CPU; None: they are torch's."""
    if weight.device.type != "cpu" or cpu_products.available() is not None:
        return None
    if dtype == torch.bfloat16:
        return dtype
    return torch.float32 if weight.dtype == torch.float32 else None


def d_hidden_parts(weight: Tensor, vocab: int, dtype: torch.dtype) -> int:
    """How many sums of its size in fp32 the product of d_hidden makes beside its result; `vocab`: of all ranks."""
    native = _native(weight, dtype)
    return 0 if native is None else cpu_products.d_hidden_parts(native, weight.shape[1], vocab)


def keeps_rows(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the products in `dtype` take the gradients of many chunks of logits at once, as rows of 16 bits."""
    return dtype in (torch.bfloat16, torch.float16) and widens(device)


@functools.cache
def widens(device: torch.device) -> bool:
    """Whether torch.mm gives fp32 results of 16-bit operands on this device, straight from the accumulators. Tests a small
    product."""
    if device.type in ("cpu", "meta"):
        return False
    try:
        a, out = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
        torch.mm(a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return False
    return True


@functools.cache
def adds_widened(device: torch.device) -> bool:
    """Whether torch.addmm adds such a product to an fp32 sum. torch 2.9 refuses a sum that has not the dtype of the operands."""
    a, total = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


class Products:
    """fp32 arithmetic, on any device: 16-bit operands are converted, which is exact. On a GPU products use TF32 only if
    torch.backends.cuda.matmul allows it to all fp32 products of the process. The gradient of a chunk of logits is
    written into the memory of the logits."""

    dtype = torch.float32  # of the hidden states that the products take

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def logits(self, hidden: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32:
            out = _times_transposed(hidden, self.weight)
        else:
            out = torch.empty(hidden.shape[0], self.weight.shape[0], device=hidden.device, dtype=torch.float32)
            for block in self._blocks_of_ids():
                out[:, block] = _times_transposed(hidden, self.weight[block].float())
        return out if self.bias is None else out.add_(self.bias)

    def gradient_buffer(self, logits: Tensor, exact: bool, block: Tensor | None, first: int) -> Tensor:
        """Where the row kernel writes d_logits: in the rows of a block from the `first` on, or in the memory of the logits.
        `exact` asks for fp32 where that takes no memory of its own."""
        return logits if block is None else block[first : first + logits.shape[0]]

    def gradient_rows(self, rows: int) -> Tensor | None:
        """Memory for d_logits of the chunks of a block of `rows` rows. None: that of the logits, one chunk after the other."""
        return None

    def keep(self, d_logits: Tensor, block: Tensor, first: int) -> Tensor:
        """The d_logits of a chunk, in the rows of the block from the `first` on."""
        return d_logits

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32:
            return _times_transposed(d_logits, self.weight.t())
        out = torch.zeros(d_logits.shape[0], self.weight.shape[1], device=d_logits.device, dtype=torch.float32)
        for block in self._blocks_of_ids():
            out += _times_transposed(d_logits[:, block], self.weight[block].float().t())
        return out

    def add_d_weight(self, total: Tensor | None, d_logits: Tensor, hidden: Tensor, last: bool) -> Tensor:
        """`total` [V, H] plus the product of this chunk; None starts the sum. Of the `last` chunk the sum may be rounded."""
        if total is not None:
            return total.addmm_(d_logits.t(), hidden)
        out = memory.empty(self.weight.shape, torch.float32, hidden.device)
        return torch.mm(d_logits.t(), hidden, out=out)

    def _blocks_of_ids(self) -> Iterator[slice]:
        vocab, width = self.weight.shape
        step = max(1, WEIGHT_BLOCK_BYTES // (4 * width))
        for lo in range(0, vocab, step):
            yield slice(lo, lo + step)


class NativeProducts(Products):
    """CPUs with AVX512_BF16 or AMX: bf16 or fp32 operands, fp32 results, by our own kernels. Libraries round results of bf16
    operands, and are slow at the transposed product for the gradient of the weight.

    With bf16 operands d_logits is bf16 as well, each row in the memory of its fp32 logits: row kernels write where they have
    already read."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight.to(dtype), None if bias is None else bias.float())
        self.dtype, self._gradient_dtype = dtype, weight.dtype if weight.dtype in cpu_products.OPERANDS else torch.float32
        self._logits = torch.empty(0, weight.shape[0], dtype=torch.float32)  # used again by the next chunk

    def logits(self, hidden: Tensor) -> Tensor:
        if self._logits.shape[0] < hidden.shape[0]:
            self._logits = memory.empty((hidden.shape[0], self.weight.shape[0]), torch.float32, hidden.device)
        out = self._logits[: hidden.shape[0]]
        cpu_products.logits(hidden, self.weight, self.bias, out)
        return out

    def gradient_buffer(self, logits: Tensor, exact: bool, block: Tensor | None, first: int) -> Tensor:
        return logits if exact or self.dtype == torch.float32 else logits.view(torch.bfloat16)[:, : logits.shape[1]]

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        out = torch.empty(d_logits.shape[0], self.weight.shape[1], dtype=torch.float32)
        cpu_products.d_hidden(d_logits, self.weight, out)
        return out

    def add_d_weight(self, total: Tensor | None, d_logits: Tensor, hidden: Tensor, last: bool) -> Tensor:
        dtype = self._gradient_dtype if last else torch.float32
        out = total
        if out is None or out.dtype != dtype:
            out = memory.empty(self.weight.shape, dtype, hidden.device)
        cpu_products.d_weight(d_logits, hidden, total, out)
        return out


class TensorCoreProducts(Products):
    """GPUs, bf16: operands bf16, results fp32 straight from the tensor cores' accumulators. d_logits is kept in bf16.

    d_hidden is asked for in fp32: its sum runs over the whole vocabulary, and of a bf16 result a library may round partial sums.
    d_weight is rounded at once where one product makes all of it."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, bias: Tensor | None, gradient_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(weight, bias)
        self._gradient_dtype = gradient_dtype

    def logits(self, hidden: Tensor) -> Tensor:
        out = _aligned_rows(hidden.shape[0], self.weight.shape[0], torch.float32, hidden.device)
        torch.mm(hidden, self.weight.t(), out_dtype=torch.float32, out=out)
        return out if self.bias is None else out.add_(self.bias)

    def gradient_rows(self, rows: int) -> Tensor | None:
        return _aligned_rows(rows, self.weight.shape[0], self.dtype, self.weight.device)

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        return torch.mm(d_logits, self.weight, out_dtype=torch.float32)

    def add_d_weight(self, total: Tensor | None, d_logits: Tensor, hidden: Tensor, last: bool) -> Tensor:
        if total is None:
            rounded = last and self._gradient_dtype == self.dtype
            return torch.mm(d_logits.t(), hidden, out_dtype=self.dtype if rounded else torch.float32)
        if adds_widened(hidden.device):
            return torch.addmm(total, d_logits.t(), hidden, out_dtype=torch.float32, out=total)
        for block in self._blocks_of_ids():
            total[block] += torch.mm(d_logits[:, block].t(), hidden, out_dtype=torch.float32)
        return total


class HalfProducts(TensorCoreProducts):
    """GPUs, fp16: as in bf16, but gradients may leave fp16's range: they come before the loss scale and after any ratio. So the
    row kernel writes them in fp32, and each row is scaled by a power of two that brings its largest element into range. The fp32
    results of the products are scaled back, which is exact: only fp16's rounding is left, eight times finer than bf16's.

    d_weight sums over rows, so there the hidden states carry the differences of scale: rows with the largest gradient are taken
    as they are, the others times a power of two below 1."""

    dtype = torch.float16

    def gradient_rows(self, rows: int) -> Tensor | None:
        self._exponents = torch.zeros(rows, dtype=torch.int32, device=self.weight.device)
        return super().gradient_rows(rows)

    def gradient_buffer(self, logits: Tensor, exact: bool, block: Tensor | None, first: int) -> Tensor:
        return logits  # `keep` takes it to the block

    def keep(self, d_logits: Tensor, block: Tensor, first: int) -> Tensor:
        rows = slice(first, first + d_logits.shape[0])
        largest = torch.linalg.vector_norm(d_logits, torch.inf, dim=1)
        exponents = ((largest.view(torch.int32) >> 23) - 126).clamp_(min=SMALLEST)
        self._exponents[rows] = exponents
        return torch.mul(d_logits, _power(FULL - exponents)[:, None], out=block[rows])

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        return super().d_hidden(d_logits).mul_(_power(self._exponents - FULL)[:, None])

    def add_d_weight(self, total: Tensor | None, d_logits: Tensor, hidden: Tensor, last: bool) -> Tensor:
        largest = self._exponents.amax()
        hidden = torch.mul(hidden, _power(self._exponents - largest)[:, None], out=torch.empty_like(hidden))
        out = memory.empty(self.weight.shape, torch.float32, hidden.device) if total is None else total
        factor = _power(largest - FULL)
        for block in self._blocks_of_ids():
            part = torch.mm(d_logits[:, block].t(), hidden, out_dtype=torch.float32)
            if total is None:
                torch.mul(part, factor, out=out[block])
            else:
                out[block].addcmul_(part, factor)
        return out


def _power(exponents: Tensor) -> Tensor:
    """2^exponents in fp32, exact, made from its bits. 0 below the normal range."""
    return ((exponents + 127).clamp_(min=0) << 23).view(torch.float32)


def _aligned_rows(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, length] whose rows begin at multiples of ROW_ALIGNMENT, whatever the length."""
    step = ROW_ALIGNMENT // dtype.itemsize
    return torch.empty(rows, -(-length // step) * step, dtype=dtype, device=device)[:, :length]


def _times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """fp32 a @ b.T. On a CPU by oneDNN, which is twice as fast on AMD as MKL, which torch.mm uses."""
    if a.device.type == "cpu" and a.numel() and b.numel() and torch.backends.mkldnn.is_available():
        two = a if a.shape[0] > 1 else a.expand(2, -1)  # oneDNN uses another kernel for one row, which rounds differently
        return torch.ops.mkldnn._linear_pointwise(two, b, None, "none", [], "")[: a.shape[0]]
    return a @ b.t()


# ---- How many rows at a time the engine takes from hidden states, and how much memory they need.
#
# A chunk is the rows whose fp32 logits exist at one time; a block is the rows whose gradients of logits do. d_hidden and d_weight
# of a block are one product each. On a CPU a block is a chunk, and its gradients overwrite its logits. On a GPU the 16-bit
# gradients have memory of their own, so a block may have many chunks: few large products are faster than many small ones, and
# the fp32 sum of d_weight is read and written once per block.

#: Bytes of the fp32 logits of a chunk, by the type of the device; for others as for "cuda". Twice as much with those of a teacher.
CHUNK_BYTES = {"cpu": 160 << 20, "cuda": 300 << 20}
#: Minimum number of rows of a chunk: with fewer, reading the weight limits the product.
CHUNK_ROWS = {"cpu": 64, "cuda": 512}
#: Bytes of the gradients of a block where a sum of d_weight lies beside them: the more, the fewer sums. Where gradients lie in the
#: memory of the logits, chunks have that much more.
BLOCK_BYTES = {"cpu": 0, "cuda": 900 << 20}
#: A product that does not take the whole weight at once takes this many bytes of it, in fp32.
WEIGHT_BLOCK_BYTES = 64 << 20
#: How many times as large a chunk may be where ranks share the vocabulary.
MORE_FOR_RANKS = 4


class Plan(NamedTuple):
    """Rows of a chunk, and of a block."""

    chunk: int
    block: int


class Work(NamedTuple):
    """What a pass over the rows of a head computes; its memory depends on this.

    vocab, width   V and H; of the whole vocabulary if ranks share it, so that all choose the same chunks.
    apart          whether gradients of logits are rows of 16 bits in memory of their own; False: fp32 in that of the logits.
    d_hidden       bytes of an element of d_hidden, 0 where it is not wanted.
    d_weight       bytes of an element of d_weight as it is handed over; 0 where it is not wanted, or added to memory that is there.
    rounded        whether a product of all rows may write d_weight in that size; False: in fp32, for more to be added.
    ranks          that share the vocabulary.
    beside         columns of a teacher's logits, which are made with those of a chunk.
    scaled         whether rows of 16 bits are times powers of two (fp16): the gradient is fp32 in the memory of the logits
                   before, the products of d_weight are parts of it in fp32, of hidden states that are scaled too.
    parts          sums in fp32 that the product of d_hidden makes beside its result, each of its size: CPUs with AMX.
    """

    vocab: int
    width: int
    apart: bool
    d_hidden: int
    d_weight: int
    rounded: bool = True
    ranks: int = 1
    beside: int = 0
    scaled: bool = False
    parts: int = 0

    def plan(self, device: str, rows: int, gathered: bool = True) -> Plan:
        """For `rows` rows on a type of device; `gathered` as in `peak`. The chunk does not depend on the number of rows. All
        rows are one block where that takes no more memory than many blocks and the fp32 sum of d_weight, which one block does
        without: so the peak does not grow with the number of rows, but for d_hidden."""
        least, chunk_bytes, block_bytes = (x.get(device, x["cuda"]) for x in (CHUNK_ROWS, CHUNK_BYTES, BLOCK_BYTES))
        # Each chunk costs an exchange among ranks, and each rank holds only its part of the columns.
        size = chunk_bytes * min(self.ranks, MORE_FOR_RANKS) if self.apart else chunk_bytes + block_bytes
        if self.beside:  # with chunks half as large, adding up d_weight would cost more time, and of few rows more memory
            size *= 2
        chunk = max(least, size // (4 * (self.vocab + self.beside + self.parts * self.width)) // 64 * 64)
        if not self.apart:
            return Plan(chunk, chunk)
        many = Plan(chunk, chunk * max(1, round(block_bytes / (2 * self.vocab * chunk))))
        one = Plan(chunk, max(rows, many.block))
        fits = self._held(one, rows, gathered) <= self._held(many, many.block + 1, gathered)
        return one if fits else many

    def peak(self, plan: Plan, rows: int, gathered: bool = True) -> int:
        """Bytes beyond the inputs, gradients among them, of a loss over `rows` rows: the peak. `gathered`:
        rows are copied out of the hidden states, or into another dtype, for the products. Left out are vectors of a number a
        row, and a copy of a weight that is not in the dtype of the products."""
        return rows * self.width * self.d_hidden + self._held(plan, rows, gathered)

    def _held(self, plan: Plan, rows: int, gathered: bool) -> int:
        """The same without d_hidden."""
        block, chunk, several = min(rows, plan.block), min(rows, plan.chunk), rows > plan.block
        weight = self.vocab * self.width
        handed = self.d_weight * weight
        own = 4 * weight if handed and (several or self.scaled or not self.rounded) else handed
        logits, gradients = 4 * chunk * (self.vocab + self.beside), 2 * block * self.vocab if self.apart else 0
        hidden = 2 * self.width if gathered else 0  # of a row
        kept = (gradients or logits) + (block + chunk) * hidden  # what the products of a block are made of
        # d_hidden in fp32, then as it is wanted
        widened = (4 * (1 + self.parts) + self.d_hidden % 4) * block * self.width if self.d_hidden else 0
        before = own if several else 0  # what earlier blocks have left
        rounding = handed if handed < own else 0
        parts = 2 * self.width * block + min(4 * weight, WEIGHT_BLOCK_BYTES) if self.scaled else 0
        return max(before + gradients + logits + chunk * hidden, before + kept + widened, own + kept + parts, own + rounding)
