"""The three matmuls between hidden states and logits, in the precision that is fastest on a device.

    logits       = hidden @ weight.T + bias    fp32 [rows, V], never rounded to 16 bits
    grad_hidden  = grad_logits @ weight        fp32 [rows, H]
    grad_weight += grad_logits.T @ hidden      [V, H], summed in fp32 over all blocks

H is the hidden size, V the vocabulary size, and the rows are tokens. `make_matmuls` chooses among

    HeadMatmuls         fp32 arithmetic on any device; 16-bit operands are converted, which is exact
    CpuMatmuls          our C++ kernels: bf16 or fp32 operands, fp32 results
    TensorCoreMatmuls   GPUs with bf16 operands and fp32 accumulators
    HalfMatmuls         GPUs with fp16 operands; rows of gradients are scaled into the fp16 range

The loop of linear.py computes logits in *chunks* of rows. A *block* is one or several chunks. The
gradients of the logits of a block are in memory together, as a `GradBuffer`, for the other two
matmuls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from . import memory
from .backends import cpu_matmuls

#: Rows of 16-bit gradients begin at multiples of this many bytes. Libraries have slow kernels for
#: others.
ROW_ALIGNMENT = 128

#: A matmul that needs temporary memory for the weight processes slices of its rows. The fp32 copy
#: of a slice has this many bytes.
WEIGHT_SLICE_BYTES = 64 << 20

HALF_DTYPES = (torch.bfloat16, torch.float16)

#: On a CPU a weight with fewer elements goes to torch.mm: a call of oneDNN takes 50 us longer.
ONEDNN_MIN_ELEMENTS = 1 << 16

#: The largest element of each row of an fp16 gradient is scaled below 2^FP16_EXPONENT.
FP16_EXPONENT = 15

#: The scale of a row whose largest element is below 2^MIN_EXPONENT is that of 2^MIN_EXPONENT, so
#: that scales are finite.
MIN_EXPONENT = -100

#: The exponent bias and the number of mantissa bits of fp32.
FP32_BIAS = 127
FP32_MANTISSA_BITS = 23


def make_matmuls(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> HeadMatmuls:
    """Return the matmuls of an output head (weight and bias) for its device.

    weight   [V, H], without gradient
    bias     [V] or None
    dtype    the dtype to which operands may be rounded: fp32, bf16 or fp16
    """
    if weight.shape[0] == 0:  # with a vocabulary shard for each rank, a rank may have no ids
        return MatmulsWithoutIds(weight, bias)
    if dtype in HALF_DTYPES and has_fp32_accumulators(weight.device):
        if dtype == torch.bfloat16:
            return TensorCoreMatmuls(weight.to(dtype), bias, weight.dtype)
        return HalfMatmuls(weight.to(dtype), bias)
    cpu_dtype = cpu_operand_dtype(weight, dtype)
    if cpu_dtype is not None:
        return CpuMatmuls(weight, bias, cpu_dtype)
    # No dtype is faster than fp32 here, so nothing is rounded, whatever `dtype` allows.
    return HeadMatmuls(weight, bias)


def has_grad_buffer(dtype: torch.dtype, device: torch.device, sums_bias: bool) -> bool:
    """Return whether the gradients of the logits of a block are stored in 16 bits.

    If so, they are in a separate buffer, and a block may have several chunks. If not, they
    overwrite the fp32 logits of a chunk, and a block is a chunk.

    A chunk is the rows whose logits exist at one time, a block the rows whose gradients of logits
    do. A rank of a vocabulary shard that has no ids gets the answer of the other ranks, because all
    of them process the same chunks and blocks.

    dtype       dtype of the operands of the matmuls
    device      their device
    sums_bias   whether the gradient of a bias is needed. On a CPU it is the sum over rows of fp32
                gradients, so they are not stored in bf16.
    """
    if dtype not in HALF_DTYPES:
        return False
    if has_fp32_accumulators(device):
        return True
    has_cpu_matmuls = device.type == "cpu" and cpu_matmuls.unavailable_reason() is None
    return has_cpu_matmuls and dtype == torch.bfloat16 and not sums_bias


def cpu_operand_dtype(weight: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of the operands of our C++ matmuls, or None if torch.mm has to be used.

    The C++ matmuls take bf16 operands if `dtype` is bf16, and otherwise fp32 operands if the weight
    is fp32. torch.mm is used for other weights, on other devices, and on CPUs for which there are
    no C++ matmuls.

    dtype   the dtype to which hidden states and weight may be rounded before the matmul
    """
    if weight.device.type != "cpu" or cpu_matmuls.unavailable_reason() is not None:
        return None
    if dtype == torch.bfloat16:
        return dtype
    return torch.float32 if weight.dtype == torch.float32 else None


def grad_hidden_partial_sums(weight: Tensor, vocab_size: int, dtype: torch.dtype) -> int:
    """Return how many temporaries fp32 [num_rows, H] the matmul of grad_hidden allocates.

    Only the AMX engine allocates some: it splits the sum over a large vocabulary into parts.

    weight       [V, H], which gives the device and H
    vocab_size   the size of the vocabulary; of all ranks together if `weight` is a shard of it
    dtype        the dtype to which hidden states and weight may be rounded
    """
    cpu_dtype = cpu_operand_dtype(weight, dtype)
    if cpu_dtype is None:
        return 0
    return cpu_matmuls.num_vocab_splits(cpu_dtype, weight.shape[1], vocab_size)


@functools.cache
def has_fp32_accumulators(device: torch.device) -> bool:
    """Return whether torch.mm can multiply 16-bit matrices and return the fp32 sums unrounded.

    On a GPU this runs a small bf16 matmul with the option `out_dtype`, once for each device. fp16
    has the same option.
    """
    # A CPU has the C++ matmuls instead, and a meta tensor has no data to multiply.
    if device.type in ("cpu", "meta"):
        return False
    try:
        operand = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        result = torch.zeros(16, 16, dtype=torch.float32, device=device)
        torch.mm(operand, operand, out_dtype=torch.float32, out=result)
    except (RuntimeError, TypeError):
        return False
    return True


@functools.cache
def can_add_to_fp32(device: torch.device) -> bool:
    """Return whether torch.addmm can add a product of 16-bit operands to an fp32 tensor.

    This runs a small matmul, once for each device. torch 2.9 raises RuntimeError, because the
    dtypes differ.
    """
    operand = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


class HeadMatmuls:
    """The three matmuls of an output head in fp32 arithmetic, on any device.

    Subclasses use other arithmetic. On a GPU TF32 is used only if torch.backends.cuda.matmul allows
    TF32 for the whole process.

    weight   [V, H]; a 16-bit weight is converted to fp32, slice by slice
    bias     [V] or None
    """

    #: The dtype of the hidden states that the methods take.
    dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep the weight and bias, which are not copied."""
        self.weight = weight
        self.bias = bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Return hidden @ weight.T + bias, fp32 [num_rows, V].

        A subclass may return the same memory in each call, so use the result before the next call.

        hidden   [num_rows, H] in self.dtype
        """
        is_fp32 = self.weight.dtype == torch.float32
        if is_fp32 or 4 * self.weight.numel() <= WEIGHT_SLICE_BYTES:
            out = matmul_transposed(hidden, self.weight.float())
        else:
            # Convert a slice of the weight at a time: an fp32 copy of all of it may not fit.
            shape = (len(hidden), len(self.weight))
            # Not in reused memory, which would stay allocated while the backward needs more.
            out = torch.empty(shape, dtype=torch.float32, device=hidden.device)
            for ids, weight in self.fp32_weight_slices():
                out[:, ids] = matmul_transposed(hidden, weight)
        return out if self.bias is None else out.add_(self.bias)

    def make_grad_buffer(self, num_rows: int, sums_bias: bool) -> GradBuffer:
        """Return memory for d loss / d logits of a block of at most `num_rows` rows.

        Here the gradient overwrites the fp32 logits, so no memory is allocated.

        sums_bias   whether the gradient of a bias is needed, see `has_grad_buffer`
        """
        return GradBuffer()

    def grad_hidden(self, grad_logits: Tensor) -> Tensor:
        """Return grad_logits @ weight, fp32 [num_rows, H].

        grad_logits   [num_rows, V], from `GradBuffer.all_rows`
        """
        if self.weight.dtype == torch.float32:
            return matmul_transposed(grad_logits, self.weight.t())
        # Convert a slice of the weight at a time, as in `logits`, and add up the products.
        shape = (len(grad_logits), self.weight.shape[1])
        out = torch.zeros(shape, dtype=torch.float32, device=grad_logits.device)
        for ids, weight in self.fp32_weight_slices():
            out += matmul_transposed(grad_logits[:, ids], weight.t())
        return out

    def add_grad_weight(
        self, total: Tensor | None, grad_logits: Tensor, hidden: Tensor, may_round: bool
    ) -> Tensor:
        """Return total + grad_logits.T @ hidden, [V, H]: the gradient of the weight so far.

        All blocks are summed in fp32. The result is fp32, except that with `may_round` it may be in
        the dtype of the weight, rounded once:

            HeadMatmuls, HalfMatmuls   never
            CpuMatmuls                 if the weight is bf16
            TensorCoreMatmuls          if the weight is bf16, and this block is the only one

        An fp32 result for a 16-bit weight is rounded when the backward returns it to autograd
        (`PrecomputedGradients.hand_over`, `LinearPass.gradients_of_coefficients`), or when it is
        added to 16-bit memory of the caller (`WeightGradMemory.add`).

        The result is written to `total` if that has its dtype.

        total         fp32 [V, H]: the result of earlier blocks; None for the first block
        grad_logits   [num_rows, V] of this block
        hidden        [num_rows, H] of this block
        may_round     whether this is the last block, and its result is for autograd instead of
                      memory of the caller
        """
        if total is not None:
            return total.addmm_(grad_logits.t(), hidden)
        out = memory.empty(self.weight.shape, torch.float32, hidden.device)
        return torch.mm(grad_logits.t(), hidden, out=out)

    def weight_slices(self) -> Iterator[slice]:
        """Yield consecutive slices of the vocabulary, for a loop over parts of the weight.

        A part has as many ids as take WEIGHT_SLICE_BYTES in fp32, H numbers for each id.
        """
        vocab_size, width = self.weight.shape
        ids_per_slice = max(1, WEIGHT_SLICE_BYTES // (4 * width))
        for start in range(0, vocab_size, ids_per_slice):
            yield slice(start, start + ids_per_slice)

    def fp32_weight_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield consecutive slices of the vocabulary, each with its part of the weight in fp32.

        The parts, fp32 [num_ids, H], are in the same memory, so use one before taking the next. A
        new tensor for each part would take several times as long on a CPU, because the operating
        system has to map its pages (`memory.empty`).
        """
        buffer = None
        for ids in self.weight_slices():
            weight = self.weight[ids]
            if buffer is None:  # the first part is the largest
                buffer = memory.empty(weight.shape, torch.float32, weight.device)
            yield ids, buffer[: len(weight)].copy_(weight)


class MatmulsWithoutIds(HeadMatmuls):
    """The matmuls of a head without ids, V = 0, which a rank of a vocabulary shard may have.

    All ranks must process the same chunks and blocks, so its blocks have several chunks if the
    other ranks store 16-bit gradients.
    """

    def make_grad_buffer(self, num_rows: int, sums_bias: bool) -> GradBuffer:
        """Return memory [num_rows, 0] for the gradients of logits of a block of several chunks."""
        return SeparateGradBuffer(torch.empty(num_rows, 0, device=self.weight.device))


class CpuMatmuls(HeadMatmuls):
    """The matmuls by our C++ kernels, for CPUs with AVX512_BF16 (and AMX, if there is).

    torch.mm would round the results of bf16 operands to bf16, and is slow for grad_weight, whose
    left operand is transposed. With bf16 operands the gradients of logits are bf16 as well, unless
    the gradient of a bias is needed (`has_grad_buffer`).

    dtype   bf16 or fp32, the dtype of the operands
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Convert the weight to `dtype`. See `make_matmuls` for weight and bias."""
        super().__init__(weight.to(dtype), None if bias is None else bias.float())
        self.dtype = dtype
        # The dtype that the gradient of the weight may be rounded to.
        self.rounded_dtype = torch.float32
        if weight.dtype in cpu_matmuls.OPERANDS:
            self.rounded_dtype = weight.dtype
        self.logits_memory = torch.empty(0, len(weight), dtype=torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return hidden @ weight.T + bias, fp32 [num_rows, V].

        The next call overwrites the result.
        """
        if len(self.logits_memory) < len(hidden):
            shape = (len(hidden), len(self.weight))
            self.logits_memory = memory.empty(shape, torch.float32, hidden.device)
        out = self.logits_memory[: len(hidden)]
        cpu_matmuls.logits(hidden, self.weight, self.bias, out)
        return out

    def make_grad_buffer(self, num_rows: int, sums_bias: bool) -> GradBuffer:
        """Return memory for d loss / d logits of a block of at most `num_rows` rows.

        It is a bf16 buffer [num_rows, V], or, if `has_grad_buffer` says that bf16 will not do, the
        memory of the fp32 logits themselves, which the gradient overwrites.

        sums_bias   whether the gradient of a bias is needed. It is a sum of fp32 gradients.
        """
        if not has_grad_buffer(self.dtype, self.weight.device, sums_bias):
            return GradBuffer()
        rows = memory.empty((num_rows, len(self.weight)), self.dtype, self.weight.device)
        return SeparateGradBuffer(rows)

    def grad_hidden(self, grad_logits: Tensor) -> Tensor:
        """Return grad_logits @ weight, fp32 [num_rows, H].

        grad_logits   [num_rows, V], from `GradBuffer.all_rows`
        """
        if grad_logits.dtype == torch.bfloat16:
            # bf16 gradients have a separate buffer, so the logits are not needed any more. Free
            # their memory before the result is allocated. fp32 gradients are in this memory.
            self.logits_memory = self.logits_memory[:0].clone()
        out = torch.empty(len(grad_logits), self.weight.shape[1], dtype=torch.float32)
        cpu_matmuls.grad_hidden(grad_logits, self.weight, out)
        return out

    def add_grad_weight(
        self, total: Tensor | None, grad_logits: Tensor, hidden: Tensor, may_round: bool
    ) -> Tensor:
        """Return total + grad_logits.T @ hidden, [V, H].

        The sum is in fp32. With `may_round` it is rounded once, to the weight's dtype (not to
        fp16). It is written to `total` if that has the dtype of the result.
        """
        dtype = self.rounded_dtype if may_round else torch.float32
        out = total
        if out is None or out.dtype != dtype:
            out = memory.empty(self.weight.shape, dtype, hidden.device)
        cpu_matmuls.grad_weight(grad_logits, hidden, total, out)
        return out


class TensorCoreMatmuls(HeadMatmuls):
    """The matmuls of bf16 operands on a GPU, with the fp32 results that tensor cores accumulate.

    grad_hidden is fp32 because its sum runs over the whole vocabulary, and a library may round
    partial sums of a bf16 result.

    weight         bf16 [V, H]
    weight_dtype   the dtype of the weight before its conversion to bf16. The gradient of a bf16
                   weight may be rounded to bf16. That of other weights stays fp32.
    """

    dtype = torch.bfloat16

    def __init__(
        self, weight: Tensor, bias: Tensor | None, weight_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Keep a bf16 weight, and the dtype that its gradient may be rounded to."""
        super().__init__(weight, bias)
        is_bf16 = weight_dtype == torch.bfloat16
        self.rounded_dtype = torch.bfloat16 if is_bf16 else torch.float32

    def logits(self, hidden: Tensor) -> Tensor:
        """Return hidden @ weight.T + bias, fp32 [num_rows, V], never rounded to bf16."""
        out = empty_aligned_rows(len(hidden), len(self.weight), torch.float32, hidden.device)
        torch.mm(hidden, self.weight.t(), out_dtype=torch.float32, out=out)
        return out if self.bias is None else out.add_(self.bias)

    def make_grad_buffer(self, num_rows: int, sums_bias: bool) -> GradBuffer:
        """Return memory for d loss / d logits of a block: a bf16 buffer [num_rows, V].

        The chunks of the block, whose logits are computed one after the other, fill its rows.
        """
        rows = empty_aligned_rows(num_rows, len(self.weight), self.dtype, self.weight.device)
        return SeparateGradBuffer(rows)

    def grad_hidden(self, grad_logits: Tensor) -> Tensor:
        """Return grad_logits @ weight, fp32 [num_rows, H]."""
        return torch.mm(grad_logits, self.weight, out_dtype=torch.float32)

    def add_grad_weight(
        self, total: Tensor | None, grad_logits: Tensor, hidden: Tensor, may_round: bool
    ) -> Tensor:
        """Return total + grad_logits.T @ hidden, [V, H].

        The result is fp32, and overwrites `total` if there is one. If there is one block only and
        the weight is bf16, the result is bf16: no fp32 sum of blocks is needed.

        total       fp32 [V, H], the sum of the blocks before this one; None for the first block
        may_round   whether this is the last block, and a bf16 result is allowed
        """
        if total is None:
            out_dtype = self.rounded_dtype if may_round else torch.float32
            return torch.mm(grad_logits.t(), hidden, out_dtype=out_dtype)
        if can_add_to_fp32(hidden.device):
            return torch.addmm(total, grad_logits.t(), hidden, out_dtype=torch.float32, out=total)
        for ids in self.weight_slices():  # so that there is no second fp32 [V, H] tensor
            total[ids] += torch.mm(grad_logits[:, ids].t(), hidden, out_dtype=torch.float32)
        return total


class HalfMatmuls(TensorCoreMatmuls):
    """The matmuls of fp16 operands on a GPU, with rows of gradients scaled by powers of two.

    Gradients of logits may be too large or too small for fp16. So the row kernel writes them in
    fp32, and `ScaledGradBuffer` stores row i times 2^(FP16_EXPONENT - exponents[i]), whose largest
    element is below 2^FP16_EXPONENT. The fp32 results of the matmuls are scaled back, which is
    exact.

    exponents   int32 [num_rows] of the buffer that `make_grad_buffer` returned last
    """

    dtype = torch.float16

    def make_grad_buffer(self, num_rows: int, sums_bias: bool) -> GradBuffer:
        """Return memory for d loss / d logits of a block: an fp16 buffer [num_rows, V].

        It scales each row by a power of two to fit fp16. The exponents are kept, because the other
        two matmuls scale their results back.
        """
        rows = empty_aligned_rows(num_rows, len(self.weight), self.dtype, self.weight.device)
        buffer = ScaledGradBuffer(rows)
        self.exponents = buffer.exponents
        return buffer

    def grad_hidden(self, grad_logits: Tensor) -> Tensor:
        """Return g @ weight, fp32 [num_rows, H], where g is d loss / d logits.

        The rows of g were scaled to fit fp16: row i of `grad_logits` is g[i] times
        2^(FP16_EXPONENT - exponents[i]). Row i of the product has the same factor, so it is
        multiplied by the inverse.

        grad_logits   fp16 [num_rows, V]: the scaled rows of g
        """
        scale = power_of_two(self.exponents - FP16_EXPONENT)
        return super().grad_hidden(grad_logits).mul_(scale[:, None])

    def add_grad_weight(
        self, total: Tensor | None, grad_logits: Tensor, hidden: Tensor, may_round: bool
    ) -> Tensor:
        """Return total + g.T @ hidden, fp32 [V, H], where g is d loss / d logits.

        The rows of g were scaled to fit fp16: row i of `grad_logits` is g[i] times
        2^(FP16_EXPONENT - exponents[i]). The product is a sum over rows with different scales. So
        row i of `hidden` is multiplied by 2^(exponents[i] - largest), which is at most 1, and the
        sum by 2^(largest - FP16_EXPONENT), where `largest` is the largest exponent. The product of
        all three factors is 1.

        total         fp32 [V, H], the sum of the blocks before this one; None for the first block
        grad_logits   fp16 [num_rows, V]: the scaled rows of g
        hidden        fp16 [num_rows, H]
        may_round     not used: the result is fp32
        """
        largest = self.exponents.amax()
        row_scale = power_of_two(self.exponents - largest)
        hidden = torch.mul(hidden, row_scale[:, None], out=torch.empty_like(hidden))
        scale = power_of_two(largest - FP16_EXPONENT)
        out = total
        if out is None:
            out = memory.empty(self.weight.shape, torch.float32, hidden.device)
        # The product before it is scaled back is a temporary: compute a slice of it at a time.
        for ids in self.weight_slices():
            part = torch.mm(grad_logits[:, ids].t(), hidden, out_dtype=torch.float32)
            if total is None:
                torch.mul(part, scale, out=out[ids])
            else:
                out[ids].addcmul_(part, scale)
        return out


# ---- memory for the gradient of the logits of a block


class GradBuffer:
    """Memory for d loss / d logits of a block of rows.

    A chunk is the rows whose logits exist at one time, a block the rows whose gradients of logits
    do. For each chunk of the block, write the gradient to the result of `memory_for` and pass it to
    `store`. Then `all_rows` returns the gradient of the block. In this class a block is one chunk,
    whose gradient overwrites its fp32 logits.
    """

    def __init__(self) -> None:
        """Start a block without any gradient."""
        self.rows: Tensor | None = None

    def memory_for(self, logits: Tensor) -> Tensor:
        """Return the memory to write the gradient of the next chunk to, [num_chunk_rows, V].

        logits   the logits of the chunk, fp32 [num_chunk_rows, V]
        """
        return logits

    def store(self, grad_logits: Tensor) -> None:
        """Take the gradient of a chunk, after it was written to the result of `memory_for`.

        Here a block is one chunk, so the gradient of the chunk is the gradient of the block.

        grad_logits   [num_chunk_rows, V]: d loss / d logits
        """
        self.rows = grad_logits

    def all_rows(self) -> Tensor:
        """Return the gradient of all chunks of the block, [num_rows, V]."""
        assert self.rows is not None
        return self.rows


class SeparateGradBuffer(GradBuffer):
    """A 16-bit buffer, whose rows the chunks of a block fill one after another.

    rows         [num_rows, V], num_rows of the whole block
    num_filled   number of rows that the chunks so far have filled
    """

    def __init__(self, rows: Tensor) -> None:
        """Use the memory `rows` for the gradients of a block."""
        super().__init__()
        self.rows = rows
        self.num_filled = 0

    def memory_for(self, logits: Tensor) -> Tensor:
        """Return the memory to write the gradient of the next chunk to, [num_chunk_rows, V].

        It is the next rows of the buffer that are not filled.

        logits   the logits of the chunk, fp32 [num_chunk_rows, V]
        """
        assert self.rows is not None
        return self.rows[self.num_filled : self.num_filled + len(logits)]

    def store(self, grad_logits: Tensor) -> None:
        """Count the rows of a chunk as filled.

        grad_logits   [num_chunk_rows, V]: the rows of the buffer that `memory_for` returned, with
                      the gradient written to them
        """
        self.num_filled += len(grad_logits)


class ScaledGradBuffer(SeparateGradBuffer):
    """An fp16 buffer [num_rows, V] whose rows are scaled by powers of two to fit fp16.

    exponents   int32 [num_rows]: the largest absolute value of a row, before it is scaled, is below
                2^exponent
    """

    def __init__(self, rows: Tensor) -> None:
        """Use the memory `rows`, fp16 [num_rows, V], for the gradients of a block."""
        super().__init__(rows)
        self.exponents = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)

    def memory_for(self, logits: Tensor) -> Tensor:
        """Return the memory to write the gradient of the next chunk to: the logits themselves.

        The gradient is fp32 there. `store` then scales it and copies it to the fp16 buffer.

        logits   the logits of the chunk, fp32 [num_chunk_rows, V]
        """
        return logits

    def store(self, grad_logits: Tensor) -> None:
        """Copy the fp32 gradient of a chunk to the next rows of the buffer, scaled to fit fp16.

        Row i is multiplied by 2^(FP16_EXPONENT - exponents[i]), so that its largest absolute value
        is below 2^FP16_EXPONENT.

        grad_logits   fp32 [num_chunk_rows, V]
        """
        assert self.rows is not None
        chunk = slice(self.num_filled, self.num_filled + len(grad_logits))
        self.num_filled = chunk.stop
        largest = torch.linalg.vector_norm(grad_logits, torch.inf, dim=1)
        # The bits of an fp32 number above the mantissa are floor(log2(x)) + FP32_BIAS.
        biased_exponents = largest.view(torch.int32) >> FP32_MANTISSA_BITS
        exponents = (biased_exponents - (FP32_BIAS - 1)).clamp_(min=MIN_EXPONENT)
        self.exponents[chunk] = exponents
        scale = power_of_two(FP16_EXPONENT - exponents)
        torch.mul(grad_logits, scale[:, None], out=self.rows[chunk])


# ---- helpers


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^exponents as exact fp32 numbers, or 0 for exponents below -126.

    The exponent is written into the bits of the fp32 number.

    exponents   int32, at most 127
    """
    biased = (exponents + FP32_BIAS).clamp_(min=0)
    return (biased << FP32_MANTISSA_BITS).view(torch.float32)


def empty_aligned_rows(
    num_rows: int, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return uninitialized memory [num_rows, length], each row aligned to ROW_ALIGNMENT bytes.

    Libraries have slow matmul kernels for rows that are not aligned. Rows are padded to a multiple
    of ROW_ALIGNMENT bytes. The result is a view without the padding.
    """
    elements = ROW_ALIGNMENT // dtype.itemsize
    stride = -(-length // elements) * elements  # length, rounded up
    return torch.empty(num_rows, stride, dtype=dtype, device=device)[:, :length]


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.T of fp32 matrices a [m, k] and b [n, k].

    On a CPU a large b goes to oneDNN, which is twice as fast as MKL on AMD.
    """
    is_large = a.shape[0] > 0 and b.numel() >= ONEDNN_MIN_ELEMENTS
    if not a.is_cpu or not is_large or not torch.backends.mkldnn.is_available():
        return a @ b.t()
    # oneDNN has another kernel for a single row, which rounds differently. A row must have the same
    # result alone and among others, so a single row is expanded to two equal rows.
    rows = a if a.shape[0] > 1 else a.expand(2, -1)
    return torch.ops.mkldnn._linear_pointwise(rows, b, None, "none", [], "")[: a.shape[0]]
