"""Choose how many rows of hidden states a pass processes at a time, and how much memory that takes.

A *chunk* is the rows whose fp32 logits exist at one time. A *block* is the rows whose gradients of
logits exist at one time; its gradients of hidden states and weight are one matmul each.

fp32 gradients overwrite the logits of their chunk, which is then a block. 16-bit gradients have
their own buffer, so a block may have many chunks: a few large matmuls are faster than many small
ones, and the fp32 sum of the gradient of the weight is read and written once per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .matmuls import WEIGHT_SLICE_BYTES, grad_hidden_partial_sums, has_grad_buffer

#: Bytes of the fp32 logits of a chunk, by device type; other devices take the values of "cuda".
#: With a reference, whose logits are computed with those of a chunk, twice as many.
CHUNK_BYTES = {"cpu": 96 << 20, "cuda": 300 << 20}

#: The same for a chunk whose gradients overwrite its logits, so that it is a block of its own.
IN_PLACE_CHUNK_BYTES = {"cpu": 160 << 20, "cuda": 1200 << 20}

#: Rows of a chunk at least. With fewer, reading the weight limits the matmul.
MIN_CHUNK_ROWS = {"cpu": 64, "cuda": 512}

#: Bytes of the gradients of logits of a block, if the fp32 gradient of the weight exists at the
#: same time. A larger block means fewer additions to that gradient.
BLOCK_BYTES = {"cpu": 80 << 20, "cuda": 900 << 20}

#: The size of a chunk is a multiple of this, so that matmuls have full tiles. The last chunk may be
#: smaller. On a CPU without a buffer for gradients (`has_grad_buffer`), `linear.split_rows` instead
#: makes as many chunks of nearly equal size.
ROWS_PER_TILE = 64

#: With a sharded vocabulary each chunk costs an exchange among the ranks, and each rank holds only
#: its columns. So a chunk whose gradients have a buffer is larger by the number of ranks, at most
#: by this.
MAX_FACTOR_OF_RANKS = 4

#: Bytes of an element in fp32, and in bf16 or fp16.
FP32_BYTES = 4
HALF_BYTES = 2


class ChunkPlan(NamedTuple):
    """Number of rows of a chunk and of a block."""

    chunk: int
    block: int


@dataclass(frozen=True)
class LinearMemory:
    """A model of the memory that a pass from hidden states takes. It chooses chunks and blocks.

    vocab_size                 V, of all ranks of a shard, so that all choose the same chunks
    width                      H
    has_grad_buffer            whether 16-bit gradients of logits have their own buffer. Otherwise
                               they overwrite the fp32 logits.
    grad_hidden_bytes          bytes of an element of the gradient of hidden states, 0 if not wanted
    grad_weight_bytes          bytes of an element of the returned gradient of the weight. 0 if not
                               wanted, or added to memory of the caller.
    may_round_weight           whether a single block may write the gradient of the weight in that
                               size. Otherwise the sum is fp32.
    ranks                      number of ranks that share the vocabulary
    reference_columns          columns of a reference's logits, 0 without a reference
    scales_rows                whether the matmuls are fp16. Rows of fp16 gradients in a buffer are
                               scaled by powers of two, so that none underflows.
    grad_hidden_partial_sums   fp32 sums of the size of the gradient of hidden states that its
                               matmul makes in addition to its result (CPUs with AMX)
    """

    vocab_size: int
    width: int
    has_grad_buffer: bool
    grad_hidden_bytes: int
    grad_weight_bytes: int
    may_round_weight: bool = True
    ranks: int = 1
    reference_columns: int = 0
    scales_rows: bool = False
    grad_hidden_partial_sums: int = 0

    @classmethod
    def of_head(
        cls,
        weight: Tensor,
        *,
        matmul_dtype: torch.dtype,
        vocab_size: int,
        ranks: int,
        reference_columns: int,
        grad_hidden_bytes: int,
        grad_weight_bytes: int,
        may_round_weight: bool,
        sums_bias: bool,
    ) -> LinearMemory:
        """Return the memory model of a pass with an output head.

        weight         [V, H], the rows of the head that this rank has
        matmul_dtype   the dtype that matmuls may use for their operands
        sums_bias      whether the gradient of a bias is computed, which needs fp32 gradients of
                       logits

        The other arguments are fields of the class.
        """
        partial_sums = 0
        if grad_hidden_bytes:
            partial_sums = grad_hidden_partial_sums(weight, vocab_size, matmul_dtype)
        return cls(
            vocab_size=vocab_size,
            width=weight.shape[1],
            has_grad_buffer=has_grad_buffer(matmul_dtype, weight.device, sums_bias),
            grad_hidden_bytes=grad_hidden_bytes,
            grad_weight_bytes=grad_weight_bytes,
            may_round_weight=may_round_weight,
            ranks=ranks,
            reference_columns=reference_columns,
            scales_rows=matmul_dtype == torch.float16,
            grad_hidden_partial_sums=partial_sums,
        )

    def plan(self, device_type: str, num_rows: int, gathers_rows: bool = True) -> ChunkPlan:
        """Choose the sizes of chunk and block for `num_rows` rows with a gradient.

        A chunk has as many rows as fit into a fixed number of bytes. A block is one chunk if
        gradients overwrite the logits. Otherwise there are two candidates:

        - Blocks of a fixed number of bytes. Several blocks need an fp32 sum of the gradient of the
          weight.
        - One block of all rows, which needs no such sum. It is chosen if it takes no more memory.

        So the peak does not grow with the number of rows, except for the gradient of hidden states.

        device_type    the type of a torch.device
        num_rows       number of rows with a gradient, at least 1
        gathers_rows   whether hidden states are copied for the matmuls, to select or convert rows
        """
        chunk = self._chunk_rows(device_type)
        if not self.has_grad_buffer:
            return ChunkPlan(chunk, chunk)
        chunk_grad_bytes = HALF_BYTES * self.vocab_size * chunk
        chunks_per_block = max(1, round(of_device(BLOCK_BYTES, device_type) / chunk_grad_bytes))
        many_blocks = ChunkPlan(chunk, chunk * chunks_per_block)
        one_block = ChunkPlan(chunk, max(num_rows, many_blocks.block))
        # One row more than a block stands for any number of several blocks.
        bytes_of_many = self._bytes_without_grad_hidden(
            many_blocks, many_blocks.block + 1, gathers_rows
        )
        bytes_of_one = self._bytes_without_grad_hidden(one_block, num_rows, gathers_rows)
        return one_block if bytes_of_one <= bytes_of_many else many_blocks

    def peak(self, plan: ChunkPlan, num_rows: int, gathers_rows: bool = True) -> int:
        """Return the peak bytes that a loss over `num_rows` rows allocates, gradients included.

        Not counted are the inputs, vectors with one number a row, and a copy of the weight, which
        is made if the weight does not have the dtype of the matmuls.

        plan           number of rows of a chunk and of a block
        num_rows       number of rows with a gradient
        gathers_rows   whether hidden states are copied for the matmuls, to select or convert rows
        """
        grad_hidden = num_rows * self.width * self.grad_hidden_bytes
        return grad_hidden + self._bytes_without_grad_hidden(plan, num_rows, gathers_rows)

    def _chunk_rows(self, device_type: str) -> int:
        """Return the number of rows of a chunk: as many as fit into its bytes, in full tiles.

        A row takes its fp32 logits, those of the reference, and the partial sums of its gradient of
        hidden states. The result is a multiple of ROWS_PER_TILE, and at least MIN_CHUNK_ROWS.

        device_type   the type of a torch.device
        """
        chunk_bytes = of_device(IN_PLACE_CHUNK_BYTES, device_type)
        if self.has_grad_buffer:
            chunk_bytes = of_device(CHUNK_BYTES, device_type)
            # Each rank has a part of the columns, so a chunk takes less memory on each.
            chunk_bytes *= min(self.ranks, MAX_FACTOR_OF_RANKS)
        if self.reference_columns:
            # Smaller chunks would spend more time on adding up the gradient of the weight.
            chunk_bytes *= 2
        columns = self.vocab_size + self.reference_columns
        columns += self.grad_hidden_partial_sums * self.width
        rows_that_fit = chunk_bytes // (FP32_BYTES * columns)
        rows_in_full_tiles = rows_that_fit // ROWS_PER_TILE * ROWS_PER_TILE
        return max(of_device(MIN_CHUNK_ROWS, device_type), rows_in_full_tiles)

    def _bytes_without_grad_hidden(self, plan: ChunkPlan, num_rows: int, gathers_rows: bool) -> int:
        """Return the peak bytes of a pass, without the gradient of the hidden states of all rows.

        A pass runs three matmuls for each block. A block consists of chunks:

            matmul 1   logits       = hidden @ weight.T         fp32, a chunk at a time
            matmul 2   grad_hidden  = grad_logits @ weight      [num_block_rows, H]
            matmul 3   grad_weight += grad_logits.T @ hidden    [V, H], the sum over blocks

        The peak is the largest of four moments: during matmul 1, 2 or 3, or while the sum of
        grad_weight is rounded to the dtype in which it is returned.

        plan           number of rows of a chunk and of a block
        num_rows       number of rows with a gradient
        gathers_rows   whether hidden states are copied for the matmuls, to select or convert rows
        """
        block_rows = min(num_rows, plan.block)
        chunk_rows = min(num_rows, plan.chunk)
        has_several_blocks = num_rows > plan.block

        # The gradient of the weight, [V, H]: as it is returned, and its sum over blocks. The sum is
        # fp32 if it has several terms, if fp16 matmuls scale their fp32 results (`scales_rows`), or
        # if the caller does not want it rounded (`may_round_weight` is False).
        weight_elements = self.vocab_size * self.width
        returned_grad_weight = self.grad_weight_bytes * weight_elements
        needs_fp32_sum = has_several_blocks or self.scales_rows or not self.may_round_weight
        grad_weight_sum = returned_grad_weight
        if returned_grad_weight and needs_fp32_sum:
            grad_weight_sum = FP32_BYTES * weight_elements
        # The sum of earlier blocks exists throughout a block. The first block allocates it in
        # matmul 3.
        sum_of_earlier_blocks = grad_weight_sum if has_several_blocks else 0

        # The logits of a chunk, and the gradients of logits of a block.
        logits = FP32_BYTES * chunk_rows * (self.vocab_size + self.reference_columns)
        if self.has_grad_buffer:
            buffer = HALF_BYTES * block_rows * self.vocab_size
            grad_logits = buffer
        else:  # the gradients overwrite the logits
            buffer = 0
            grad_logits = logits
        # The copy of the hidden states of a block exists throughout the block.
        copied_row = HALF_BYTES * self.width if gathers_rows else 0
        hidden = block_rows * copied_row

        during_matmul_1 = sum_of_earlier_blocks + hidden + buffer + logits

        operands = grad_logits + hidden
        grad_hidden_of_block = 0
        if self.grad_hidden_bytes:
            # The result in fp32, its partial sums, and a copy if hidden states are not fp32.
            num_fp32 = 1 + self.grad_hidden_partial_sums
            copy_bytes = 0 if self.grad_hidden_bytes == FP32_BYTES else self.grad_hidden_bytes
            bytes_per_element = FP32_BYTES * num_fp32 + copy_bytes
            grad_hidden_of_block = bytes_per_element * block_rows * self.width
        during_matmul_2 = sum_of_earlier_blocks + operands + grad_hidden_of_block

        scaled_operands = 0
        if self.scales_rows:
            # fp16: hidden states with scaled rows, and the product, a slice of [V, H] at a time.
            scaled_hidden = HALF_BYTES * self.width * block_rows
            product_slice = min(FP32_BYTES * weight_elements, WEIGHT_SLICE_BYTES)
            scaled_operands = scaled_hidden + product_slice
        during_matmul_3 = grad_weight_sum + operands + scaled_operands

        # Rounding needs a second tensor, unless the sum has the dtype of the result.
        is_rounded = returned_grad_weight < grad_weight_sum
        during_rounding = grad_weight_sum + (returned_grad_weight if is_rounded else 0)
        return max(during_matmul_1, during_matmul_2, during_matmul_3, during_rounding)


def of_device(table: dict[str, int], device_type: str) -> int:
    """Return the entry of a device type in a table of sizes, that of "cuda" if it has none.

    table         sizes by the type of a torch.device
    device_type   "cpu", "cuda", "xpu", ...
    """
    return table.get(device_type, table["cuda"])
