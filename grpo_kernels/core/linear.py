"""Losses of logits that are computed from hidden states, a chunk of rows at a time.

The logits [num_rows, V] never exist as a whole. `run_pass` is the main loop:

    for chunk in chunks_without_gradient:  # rows that the loss needs, but that get no gradient
        logits       = hidden[chunk] @ weight.T  # matmul 1
        formula.process_chunk(chunk, logits, None)
    for block in blocks:
        for chunk in block:
            logits      = hidden[chunk] @ weight.T  # matmul 1
            formula.process_chunk(chunk, logits, grad_logits)  # writes grad_logits
        row_scale    = formula.row_scale(block)
        grad_hidden  = row_scale * (grad_logits @ weight)  # matmul 2
        grad_weight += grad_logits.T @ (row_scale * hidden[block])  # matmul 3

A *chunk* is the rows whose fp32 logits are in memory at one time. A *block* is the rows whose
gradients of logits are in memory at one time: several chunks if gradients are 16-bit, one if they
are fp32. A frozen head skips matmul 3. Gradients of hidden states are written once for each row.
`HeadMatmuls.add_grad_weight` sums the gradient of the weight in fp32.

A loss that computes its gradient in the forward runs this loop once, and its backward runs no
matmul. Differentiable statistics, and losses of them, run it twice: in the forward with matmul 1
alone, in the backward with matmuls 1, 2 and 3. With a frozen head, if only log-probs have a
gradient, they run it once, in the forward, with matmuls 1 and 2 (`sources.FrozenHeadPass`; not
under torch.compile or torch.func).

For a token-level loss there is no `row_scale` (None). A sequence-level loss needs it: the gradient
of a row is

    d loss / d logits[row] = c[row] * (onehot(target) - softmax(logits[row]))

where the scalar c[row] depends on the log-probs of the whole sequence. The loop computes the
gradient with c = 1 while it has the logits, and multiplies by c = row_scale when it has seen the
whole sequence. A block therefore holds whole sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .backends import Backend
from .divergence import NO_DIVERGENCE, DivergenceKind
from .linear_memory import LinearMemory
from .matmuls import GradBuffer, HeadMatmuls, make_matmuls
from .softmax import GradientCoefficients, LogitRows, ReferenceRows, RowTransform, SoftmaxSums
from .vocab_parallel import VocabShard

# ---- what a pass over the rows reads


@dataclass(frozen=True, eq=False)
class Projection:
    """Logits that are computed on demand: transform(hidden @ weight.T + bias).

    hidden         [num_rows, H]
    weight         [V, H]
    bias           [V] or None
    transform      scale, softcap and temperature of each row
    matmul_dtype   the dtype that matmuls may use for their operands; their results are fp32
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    transform: RowTransform
    matmul_dtype: torch.dtype

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Projection:
        """Return the same projection with other tensors, those that autograd passes to a function.

        tensors   (hidden, weight, bias)
        """
        hidden, weight, bias = tensors
        assert hidden is not None and weight is not None
        return Projection(hidden, weight, bias, self.transform, self.matmul_dtype)

    def make_matmuls(self) -> HeadMatmuls:
        """Return the matmuls of a pass with this head: logits, and the gradients of both operands.

        This may copy the weight to `matmul_dtype`.
        """
        bias = None if self.bias is None else self.bias.detach()
        return make_matmuls(self.weight.detach(), bias, self.matmul_dtype)

    def has_head_of(self, other: Projection) -> bool:
        """Return whether the weight and bias of `other` are those of this projection, in memory.

        They are if policy and reference differ only in the body of the model, for example by LoRA
        adapters. One matmul can then compute the logits of both.
        """
        same_weight = is_same_tensor(self.weight, other.weight)
        same_bias = is_same_tensor(self.bias, other.bias)
        return same_weight and same_bias and self.matmul_dtype == other.matmul_dtype


@dataclass(frozen=True, eq=False)
class ReferenceProjection:
    """A frozen reference model, and which divergence of the policy from it is computed.

    A chunk of its logits becomes `ReferenceRows`.
    """

    projection: Projection
    kind: DivergenceKind


@dataclass(frozen=True, eq=False)
class PassInputs:
    """What a pass over num_rows rows reads.

    kernels     kernels over rows of logits
    shard       this rank's part of the vocabulary, None for the whole vocabulary
    policy      hidden states and head that may get gradients
    reference   a frozen model that the policy is compared with, or None
    targets     int64 [num_rows]
    """

    kernels: Backend
    shard: VocabShard | None
    policy: Projection
    reference: ReferenceProjection | None
    targets: Tensor

    @property
    def vocab_size(self) -> int:
        """Number of ids, on all ranks of a shard."""
        return self.policy.weight.shape[0] if self.shard is None else self.shard.vocab

    @property
    def divergence_kind(self) -> DivergenceKind:
        """Which divergence is computed, NO_DIVERGENCE without a reference."""
        return NO_DIVERGENCE if self.reference is None else self.reference.kind


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The rows that a pass processes: first the rows that may have a gradient, then the others.

    row_ids             int64 [num_processed], each row at most once; ascending among the rows that
                        may have a gradient, and among the others. So the rows of a sequence that
                        may have a gradient follow one another, in the order of the sequences.
    num_with_gradient   number of rows that may have a gradient: they are the first ones of row_ids
    num_rows            number of rows of the batch, processed or not
    """

    row_ids: Tensor
    num_with_gradient: int
    num_rows: int

    @classmethod
    def of_all_rows(cls, num_rows: int, device: torch.device) -> RowOrder:
        """Return the order 0 to num_rows - 1: every row is processed and may have a gradient."""
        row_ids = torch.arange(num_rows, device=device)
        return cls(row_ids, num_with_gradient=num_rows, num_rows=num_rows)

    @classmethod
    def of_mask(cls, mask: Tensor | None, num_rows: int, device: torch.device) -> RowOrder:
        """Return the order of the rows where a mask is True, all of which may have a gradient.

        On a GPU the host waits for the number of these rows.

        mask       bool [num_rows]; None: all rows
        num_rows   number of rows of the batch
        """
        if mask is None:
            return cls.of_all_rows(num_rows, device)
        row_ids = mask.nonzero().flatten()
        return cls(row_ids, num_with_gradient=row_ids.shape[0], num_rows=num_rows)

    @classmethod
    def from_masks(cls, has_gradient: Tensor, processed: Tensor | None) -> RowOrder:
        """Return the order of the processed rows: those that may have a gradient, then the others.

        On a GPU the host waits for the numbers of rows.

        has_gradient   bool [num_rows]: rows that may have a gradient
        processed      bool [num_rows]: rows to process, which include those of has_gradient; None:
                       all rows. Pass the tensor has_gradient itself if there are no other rows.
        """
        row_ids = has_gradient.nonzero().flatten()
        num_with_gradient = row_ids.shape[0]
        if processed is not has_gradient:
            # True > False, so this is True in the rows of `processed` alone.
            others = ~has_gradient if processed is None else processed > has_gradient
            row_ids = torch.cat([row_ids, others.nonzero().flatten()])
        return cls(row_ids, num_with_gradient, has_gradient.shape[0])

    @classmethod
    def from_counted_masks(
        cls,
        has_gradient: Tensor,
        processed: Tensor | None,
        num_with_gradient: int,
        num_processed: int,
    ) -> RowOrder:
        """Return the order of the processed rows: those that may have a gradient, then the others.

        The host knows the numbers of rows already, so it does not wait for a GPU. (`from_masks`
        makes the same order without them.)

        has_gradient        bool [num_rows]: rows that may have a gradient
        processed           bool [num_rows]: rows to process; None: all. The tensor has_gradient
                            itself if all processed rows may have a gradient.
        num_with_gradient   number of rows where has_gradient is True
        num_processed       number of rows where processed is True
        """
        # 2 for rows in both masks, 1 for rows of `processed` alone, 0 for rows in neither; with one
        # mask 1 and 0. A stable sort by falling rank leaves equal rows in ascending order. The rows
        # that are not processed come last and are cut off.
        rank = has_gradient.view(torch.uint8)
        if processed is not None and processed is not has_gradient:
            rank = rank + processed.view(torch.uint8)
        row_ids = torch.argsort(rank, stable=True, descending=True)
        return cls(row_ids[:num_processed], num_with_gradient, has_gradient.shape[0])

    @property
    def is_on_host(self) -> bool:
        """Whether the tensors are on a CPU, so that the host reads their values without a wait."""
        return self.row_ids.device.type == "cpu"

    def with_gradient(self) -> RowOrder:
        """Return the order without the rows that have no gradient, which come last in it."""
        row_ids = self.row_ids[: self.num_with_gradient]
        return RowOrder(row_ids, self.num_with_gradient, self.num_rows)

    @property
    def is_identity(self) -> bool:
        """Whether row_ids are 0 to num_rows - 1, so that a chunk is a slice and needs no gather."""
        num_processed = self.row_ids.shape[0]
        is_complete = num_processed == self.num_rows
        # row_ids are two ascending runs, the first of num_with_gradient rows. If one run is empty,
        # the other contains all rows in their own order.
        return is_complete and self.num_with_gradient in (0, num_processed)

    def gather(self, x: Tensor) -> Tensor:
        """Return the processed rows of x [num_rows, ...] in this order, [num_processed, ...]."""
        return x if self.is_identity else x.index_select(0, self.row_ids)

    def gather_chunk(self, x: Tensor, chunk: slice) -> Tensor:
        """Return the rows of x [num_rows, ...] that a chunk has, [num_chunk_rows, ...].

        chunk   slice of the positions in this order
        """
        if self.is_identity:
            return rows_of(x, chunk)
        return x.index_select(0, rows_of(self.row_ids, chunk))

    def scatter_chunk(self, out: Tensor, chunk: slice, values: Tensor) -> None:
        """Write values [num_chunk_rows, ...] to the rows of out [num_rows, ...] of a chunk.

        chunk   slice of the positions in this order
        """
        if self.is_identity:
            out[chunk] = values
        else:
            out.index_copy_(0, rows_of(self.row_ids, chunk), values)

    def gather_transform(self, transform: RowTransform) -> RowTransform:
        """Return the transform with the temperatures of the processed rows, in this order.

        transform   scale, softcap and temperature of the logits. The temperature is one number, or
                    fp32 [num_rows].
        """
        return transform if self.is_identity else transform.select(self.row_ids)

    def row_ids_at(self, chunk: slice) -> slice | Tensor:
        """Return which rows of the batch a chunk has, as an index of tensors [num_rows, ...].

        chunk   slice of the positions in this order
        """
        return chunk if self.is_identity else rows_of(self.row_ids, chunk)


class ChunkedLogits:
    """Compute the logits of a chunk of rows (matmul 1), and the reference's if there is one.

    inputs   hidden states, heads and targets
    order    the order in which the pass processes rows; chunks are slices of it
    """

    def __init__(self, inputs: PassInputs, order: RowOrder) -> None:
        """Bring the targets and temperatures of the rows into the order of the pass."""
        self.inputs = inputs
        self.order = order
        self.targets = order.gather(inputs.targets)
        self.transform = order.gather_transform(inputs.policy.transform)

    @functools.cached_property
    def matmuls(self) -> HeadMatmuls:
        """The policy's matmuls, made at the first use: a pass without rows reads no weight."""
        return self.inputs.policy.make_matmuls()

    @functools.cached_property
    def reference_matmuls(self) -> HeadMatmuls:
        """The reference's matmuls. They are the policy's if both have the same head in memory."""
        assert self.inputs.reference is not None
        projection = self.inputs.reference.projection
        if projection.has_head_of(self.inputs.policy):
            return self.matmuls
        return projection.make_matmuls()

    def policy_hidden(self, rows: slice) -> Tensor:
        """Return the policy's hidden states of a block or chunk, [num_rows, H], for the matmuls.

        They are copied if the rows are not consecutive or the matmuls have another dtype.

        rows   slice of the rows in the order of the pass
        """
        hidden = self.order.gather_chunk(self.inputs.policy.hidden.detach(), rows)
        return hidden.to(self.matmuls.dtype).contiguous()

    def compute(self, chunk: slice, hidden: Tensor) -> LogitRows:
        """Compute the logits of a chunk (matmul 1), and return its rows as kernels take them.

        The logits are hidden @ weight.T + bias, fp32 [1, num_chunk_rows, V]. The kernels apply the
        transform. If there is a reference, its logits are computed too.

        chunk    slice of the rows in the order of the pass
        hidden   [num_chunk_rows, H], their hidden states, from `policy_hidden`
        """
        reference = self.inputs.reference
        if reference is None:
            return self._make_rows(chunk, self.matmuls.logits(hidden), None)

        matmuls = self.reference_matmuls
        reference_hidden = self.order.gather_chunk(reference.projection.hidden.detach(), chunk)
        reference_hidden = reference_hidden.to(matmuls.dtype)
        has_shared_head = matmuls is self.matmuls
        if has_shared_head:
            # One matmul for both reads the weight once.
            both = matmuls.logits(torch.cat([hidden, reference_hidden]))
            logits, reference_logits = both.tensor_split([len(hidden)])
        else:
            logits = self.matmuls.logits(hidden)
            reference_logits = matmuls.logits(reference_hidden.contiguous())
        reference_rows = ReferenceRows(
            logits=reference_logits[None],
            transform=reference.projection.transform.select(self.order.row_ids_at(chunk)),
            kind=reference.kind,
        )
        return self._make_rows(chunk, logits, reference_rows)

    def _make_rows(
        self, chunk: slice, logits: Tensor, reference: ReferenceRows | None
    ) -> LogitRows:
        """Return the rows of a kernel call over the logits of a chunk.

        chunk       slice of the rows in the order of the pass
        logits      fp32 [num_chunk_rows, V], the policy's
        reference   the reference's logits of the same rows, or None
        """
        return LogitRows(
            logits=logits[None],
            targets=rows_of(self.targets, chunk),
            transform=self.transform.select(chunk),
            reference=reference,
            batch_rows=rows_of(self.order.row_ids, chunk),
        )


# ---- the loss, as the loop sees it


class Formula(Protocol):
    """A loss of rows of logits, as `run_pass` calls it.

    The loop first calls `process_chunk` for the chunks of rows without a gradient. Then, for each
    block of rows with a gradient, it calls `process_chunk` for each chunk of the block, and
    `row_scale` for the block. Chunks and blocks are slices of a `RowOrder`.
    """

    def process_chunk(self, chunk: slice, rows: LogitRows, grad_logits: Tensor | None) -> None:
        """Record what the loss needs from a chunk, and write d loss / d logits of its rows.

        If the loss has a `row_scale`, the gradient is written without this factor. A chunk is the
        rows whose logits exist at one time.

        chunk         slice of the rows in the order of the pass
        rows          their logits and targets
        grad_logits   [1, num_chunk_rows, V]: where to write the gradient, possibly the memory of
                      the logits. None: the rows have no gradient.
        """

    def row_scale(self, block: slice) -> Tensor | None:
        """Return the factor that the gradient of each row still lacks, fp32 [num_block_rows].

        None means 1. The loop calls it when all chunks of the block have been processed: the factor
        of a sequence-level loss depends on the log-probs of the whole sequence.

        block   slice of the rows in the order of the pass
        """


# ---- the gradients of the policy's hidden states, weight and bias


@dataclass(frozen=True)
class GradientsWanted:
    """Which of the policy's tensors need a gradient."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        """Whether any of the three needs a gradient."""
        return self.hidden or self.weight or self.bias


@dataclass(frozen=True, eq=False)
class LinearGradients:
    """The gradients of the policy's tensors. None if a gradient was not wanted.

    hidden   [num_rows, H], 0 for rows that are in no block
    weight   [V, H], fp32 or the dtype of the weight, or memory of the caller that it was added to;
             None also if no row had a gradient and there is no such memory
    bias     fp32 [V]
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class GradientAccumulator:
    """Compute the gradients of blocks (matmuls 2 and 3) and collect them.

    The gradient of hidden states is written row by row. The gradients of weight and bias are summed
    over the blocks in fp32.

    logits              the chunks of logits, which have the hidden states and the matmuls
    wanted              the tensors that get a gradient
    grad_hidden_dtype   fp32, or the dtype of the hidden states: each row is written once
    weight_total        fp32 [V, H] that the gradient of the weight is added to; None: a new sum
    may_round_weight    whether the last block may round the sum to the dtype of the weight
    """

    def __init__(
        self,
        logits: ChunkedLogits,
        wanted: GradientsWanted,
        *,
        grad_hidden_dtype: torch.dtype,
        weight_total: Tensor | None,
        may_round_weight: bool,
    ) -> None:
        """Allocate the gradients of hidden states and bias as zeros, if they are wanted.

        The first block allocates the gradient of the weight.

        logits              the chunks of logits, which have the hidden states and the matmuls
        wanted              the tensors that get a gradient
        grad_hidden_dtype   dtype of the gradient of hidden states
        weight_total        fp32 [V, H] that the gradient of the weight is added to; None: a new sum
        may_round_weight    whether the sum may be rounded to the dtype of the weight at the end
        """
        policy = logits.inputs.policy
        self.logits = logits
        self.wanted = wanted
        self.may_round_weight = may_round_weight
        self.grad_hidden: Tensor | None = None
        self.grad_weight = weight_total
        self.grad_bias: Tensor | None = None
        if wanted.hidden:
            self.grad_hidden = torch.zeros(
                policy.hidden.shape, dtype=grad_hidden_dtype, device=policy.hidden.device
            )
        if wanted.bias:
            self.grad_bias = torch.zeros(len(policy.weight), device=policy.hidden.device)

    def add_block(
        self,
        block: slice,
        hidden: Tensor,
        grad_logits: Tensor,
        row_scale: Tensor | None,
        is_last: bool,
    ) -> None:
        """Compute the gradients of hidden states and weight that come from the rows of a block.

            grad_hidden[block]  = row_scale * (grad_logits @ weight)   # matmul 2
            grad_weight        += grad_logits.T @ (row_scale * hidden)  # matmul 3

        block         slice of the rows in the order of the pass
        hidden        [num_block_rows, H], their hidden states in the dtype of the matmuls
        grad_logits   [num_block_rows, V]: d loss / d logits, without the factor row_scale
        row_scale     fp32 [num_block_rows]: a factor of the gradient of each row; None for 1
        is_last       whether this is the last block, after which the sum may be rounded
        """
        matmuls = self.logits.matmuls
        if self.grad_hidden is not None:
            grad_hidden = scale_rows(matmuls.grad_hidden(grad_logits), row_scale)
            grad_hidden = grad_hidden.to(self.grad_hidden.dtype)
            self.logits.order.scatter_chunk(self.grad_hidden, block, grad_hidden)
            del grad_hidden  # fp32, before matmul 3 allocates its result
        if self.wanted.weight:
            # The rows of hidden are scaled instead of those of grad_logits. The product is the
            # same, and hidden [., H] is much smaller than grad_logits [., V].
            self.grad_weight = matmuls.add_grad_weight(
                total=self.grad_weight,
                grad_logits=grad_logits,
                hidden=scale_rows(hidden, row_scale),
                may_round=is_last and self.may_round_weight,
            )

    def add_bias_of_chunk(self, grad_logits: Tensor) -> None:
        """Add the gradient of the bias from a chunk: the sum of grad_logits over its rows.

        With a sequence-level loss each row of grad_logits still lacks a factor, which is known only
        after the block (`Formula.row_scale`). So such a loss must not be run if the gradient of a
        bias is wanted.

        grad_logits   [num_chunk_rows, V]
        """
        if self.grad_bias is not None:
            self.grad_bias += grad_logits.sum(0, dtype=torch.float32)

    def result(self) -> LinearGradients:
        """Return the gradients of hidden states, weight and bias from all added blocks."""
        return LinearGradients(
            hidden=self.grad_hidden, weight=self.grad_weight, bias=self.grad_bias
        )


def scale_rows(x: Tensor, row_scale: Tensor | None) -> Tensor:
    """Return x [num_rows, H] with each row multiplied by its row_scale, in the dtype of x.

    A row whose scale is 0 becomes exactly 0, even if it contains inf or NaN.

    row_scale   fp32 [num_rows]; None for 1
    """
    if row_scale is None:
        return x
    scale = row_scale.unsqueeze(1)
    return (x * scale).masked_fill_(scale == 0, 0.0).to(x.dtype)


# ---- the loops


def run_pass(
    inputs: PassInputs,
    formula: Formula,
    order: RowOrder,
    wanted: GradientsWanted,
    *,
    blocks: Sequence[slice] | None = None,
    grad_hidden_dtype: torch.dtype | None = None,
    weight_total: Tensor | None = None,
    may_round_weight: bool = True,
) -> LinearGradients:
    """Run a formula over all rows, chunk by chunk, and return the gradients.

    This is the loop that the module describes. A chunk is the rows whose logits exist at one time.
    The formula gets the logits of each chunk, and afterwards holds the loss or the statistics.

    inputs              hidden states, heads, targets and kernels
    formula             computes the loss or statistics, and d loss / d logits
    order               the rows to process: first those that may have a gradient
    wanted              which gradients to compute
    blocks              slices of `order` that cover its rows with a gradient, each at most as long
                        as `LinearMemory.plan` allows. None: as few as memory allows.
    grad_hidden_dtype   dtype of the gradient of hidden states; None: `accumulation_dtype` of theirs
    weight_total        fp32 [V, H]: memory that the gradient of the weight is added to
    may_round_weight    whether the gradient of the weight may be rounded to the weight's dtype
    """
    if grad_hidden_dtype is None:
        grad_hidden_dtype = accumulation_dtype(inputs.policy.hidden.dtype)
    memory = make_memory_model(
        inputs,
        wanted,
        grad_hidden_dtype=grad_hidden_dtype,
        may_round_weight=may_round_weight,
        has_weight_total=weight_total is not None,
    )
    plan = plan_rows(inputs, order, wanted, memory, blocks)
    logits = ChunkedLogits(inputs, order)
    accumulator = GradientAccumulator(
        logits,
        wanted,
        grad_hidden_dtype=grad_hidden_dtype,
        weight_total=weight_total,
        # Memory of the caller keeps its dtype.
        may_round_weight=may_round_weight and weight_total is None,
    )
    with without_autocast(inputs.targets.device.type):
        # First, because a sequence-level loss needs the log-probs of all rows of a sequence.
        for chunk in plan.chunks_without_gradient:
            formula.process_chunk(chunk, logits.compute(chunk, logits.policy_hidden(chunk)), None)
        for chunks in plan.blocks:
            block = slice(chunks[0].start, chunks[-1].stop)
            hidden = logits.policy_hidden(block)
            grad_logits = gradient_of_block(chunks, hidden, formula, logits, accumulator)
            is_last = chunks is plan.blocks[-1]
            accumulator.add_block(block, hidden, grad_logits, formula.row_scale(block), is_last)
            del hidden, grad_logits  # before the next block allocates its own
    return accumulator.result()


def accumulation_dtype(hidden_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the forward stores the gradient of hidden states.

    It is the dtype of the hidden states, but fp32 for fp16. The backward multiplies the gradient by
    the loss scale, before which it would underflow in fp16.
    """
    return torch.float32 if hidden_dtype == torch.float16 else hidden_dtype


def gradient_of_block(
    chunks: Sequence[slice],
    hidden: Tensor,
    formula: Formula,
    logits: ChunkedLogits,
    accumulator: GradientAccumulator,
) -> Tensor:
    """Return d loss / d logits of the rows of a block, [num_block_rows, V].

    For a sequence-level loss each row still lacks a factor, which is known only after the block
    (`Formula.row_scale`). The formula processes the logits of one chunk after the other: a chunk is
    the rows whose logits exist at one time. The result is in the dtype in which the matmuls of the
    gradients of hidden states and weight read it: fp32 in the memory of the logits, or 16-bit in a
    buffer.

    chunks        the chunks of the block, consecutive slices of the rows in the order of the pass
    hidden        [num_block_rows, H], their hidden states
    formula       computes the loss, and writes the gradient of a chunk
    logits        computes the logits of a chunk
    accumulator   adds the gradient of the bias, if it is wanted
    """
    start = chunks[0].start
    num_rows = chunks[-1].stop - start
    buffer = logits.matmuls.make_grad_buffer(num_rows, sums_bias=accumulator.wanted.bias)
    for chunk in chunks:
        hidden_of_chunk = rows_of(hidden, slice(chunk.start - start, chunk.stop - start))
        write_gradient_of_chunk(chunk, hidden_of_chunk, formula, logits, accumulator, buffer)
    return buffer.all_rows()


def write_gradient_of_chunk(
    chunk: slice,
    hidden: Tensor,
    formula: Formula,
    logits: ChunkedLogits,
    accumulator: GradientAccumulator,
    buffer: GradBuffer,
) -> None:
    """Compute the logits of a chunk and write their gradient to the buffer of its block.

    A chunk is the rows whose logits exist at one time. A block is the rows whose gradients of
    logits exist at one time: one or several chunks.

    This is a separate function, so that its local variables are gone, and with them the logits,
    when the next chunk computes its logits.

    chunk         slice of the rows in the order of the pass
    hidden        [num_chunk_rows, H], their hidden states
    formula       computes the loss, and writes the gradient
    logits        computes the logits of the chunk
    accumulator   adds the gradient of the bias, if it is wanted
    buffer        keeps the gradients of the block for the matmuls of the gradients of hidden states
                  and weight
    """
    rows = logits.compute(chunk, hidden)
    # Where the formula writes the gradient: over the logits, or into a 16-bit buffer.
    grad_logits = buffer.memory_for(rows.logits[0])
    formula.process_chunk(chunk, rows, grad_logits[None])
    accumulator.add_bias_of_chunk(grad_logits)
    buffer.store(grad_logits)


def linear_softmax_sums(inputs: PassInputs, order: RowOrder, names: tuple[str, ...]) -> SoftmaxSums:
    """Compute the softmax sums of all rows, fp32 [num_names, num_rows], without any gradient.

    The logits are computed a chunk at a time (matmul 1). Rows that are not processed get the sums
    of masked rows.

    inputs   hidden states, heads, targets and kernels
    order    the rows to process
    names    of the sums, some of `softmax.SUMS`
    """
    recorder = SumsRecorder(inputs, order, names)
    run_pass(inputs, recorder, order, GradientsWanted(hidden=False, weight=False, bias=False))
    return recorder.result()


class SumsRecorder:
    """A `Formula` without a loss that records the softmax sums of the rows.

    The gradient of a row, if it is wanted, is d log-prob / d logits.

    inputs   what the pass reads
    order    the rows that the pass processes
    names    the sums, see `softmax.SUMS`
    """

    def __init__(self, inputs: PassInputs, order: RowOrder, names: tuple[str, ...]) -> None:
        """Begin with no sums.

        inputs   what the pass reads: hidden states, heads, targets and kernels
        order    the rows that the pass processes, in its order
        names    of the sums, for example "sum_exp"
        """
        self.inputs = inputs
        self.order = order
        self.names = names
        self.chunks = ChunkValues(order)

    def process_chunk(self, chunk: slice, rows: LogitRows, grad_logits: Tensor | None) -> None:
        """Record the softmax sums of a chunk, and write d log-prob / d logits of each row.

        That is the gradient for an upstream gradient of 1. The caller later multiplies each row by
        its upstream gradient. A chunk is the rows whose logits exist at one time.

        chunk         slice of the rows in the order of the pass
        rows          their logits and targets
        grad_logits   [1, num_chunk_rows, V]: where to write the gradient; None: none is needed
        """
        kernels = self.inputs.kernels
        sums = kernels.softmax_sums(rows, self.names)
        self.chunks.add(chunk, sums.values)
        if grad_logits is not None:
            write_unit_gradient(kernels, rows, sums, sums.logps, grad_logits)

    def row_scale(self, block: slice) -> None:
        """Return None, a factor of 1 for the gradient: `process_chunk` wrote all of it.

        A sequence-level loss returns here what it knows only after all chunks of a block.
        """

    def result(self) -> SoftmaxSums:
        """Return the sums of all rows, [num_names, num_rows], in the order of the batch.

        Rows that were not processed have the sums of masked rows, whose log-prob is 0.
        """
        values = self.chunks.in_batch_order(self._masked_values)
        return SoftmaxSums(values, self.names, self.inputs.divergence_kind)

    def _masked_values(self) -> Tensor:
        """Return the sums of masked rows for each row of the batch, fp32 [num_names, num_rows]."""
        device = self.inputs.targets.device
        return SoftmaxSums.masked(self.names, self.order.num_rows, device).values


def write_unit_gradient(
    kernels: Backend, rows: LogitRows, sums: SoftmaxSums, logps: Tensor, grad_logits: Tensor
) -> None:
    """Write d log-prob / d logits of each row, the gradient for an upstream gradient of 1.

        d log-prob / d x_j = (1[j = target] - p_j) * d z_j / d x_j

    where z_j is the logit x_j after scale, softcap and temperature, and p = softmax(z). Rows whose
    log-prob is NaN get 0. The caller later multiplies each row by its upstream gradient. Only then
    does it know whether the loss depends on such a row, whose gradient becomes NaN if so.

    kernels       write the gradient
    rows          the logits and targets
    sums          their softmax sums
    logps         fp32 [num_rows], their log-probs, which the caller has computed from `sums`
    grad_logits   where to write the gradient, [1, num_rows, V]
    """
    is_number = (logps == logps).float()  # 0 for NaN
    # The coefficient "target" is d loss / d log-prob: 1, or 0 where the log-prob is NaN.
    coefficients = GradientCoefficients.stack({"target": is_number})
    kernels.softmax_gradient(rows, sums, coefficients, grad_logits)


class ChunkValues:
    """Collect a table of k values a row, [k, num_rows], that a pass computes chunk by chunk.

    A pass processes the rows in an order of its own, and may leave some out.

    order   the order in which the pass processes rows
    """

    def __init__(self, order: RowOrder) -> None:
        """Begin with an empty table."""
        self.order = order
        self.chunks: list[tuple[int, Tensor]] = []

    def add(self, chunk: slice, values: Tensor) -> None:
        """Record the values of a chunk, fp32 [k, num_chunk_rows].

        chunk   slice of the rows in the order of the pass
        """
        self.chunks.append((chunk.start, values))

    def in_batch_order(self, make_default: Callable[[], Tensor]) -> Tensor:
        """Return the values of all rows, fp32 [k, num_rows], in the order of the batch.

        make_default   makes a table [k, num_rows] with the values of rows that were not processed.
                       It is called only if there are such rows. The others are overwritten.
        """
        if not self.chunks:
            return make_default()
        # Sort by the first row of each chunk: chunks without a gradient are processed first,
        # although they come last in the order of the pass.
        chunks = [values for _, values in sorted(self.chunks, key=lambda chunk: chunk[0])]
        values = chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)
        if self.order.is_identity:
            return values
        table = make_default()
        return table.index_copy_(1, self.order.row_ids, values)


class KnownGradients:
    """A `Formula` for the backward of statistics, whose upstream gradients autograd has passed.

    It computes no statistics and only writes d loss / d logits.

    kernels        write the gradients
    sums           the softmax sums of all rows, from the forward
    coefficients   of d loss / d logits of all rows, from the upstream gradients
    order          the rows that the pass processes
    """

    def __init__(
        self,
        kernels: Backend,
        sums: SoftmaxSums,
        coefficients: GradientCoefficients,
        order: RowOrder,
    ) -> None:
        """Bring the columns of sums and coefficients, one a row, into the order of the pass."""
        self.kernels = kernels
        self.sums = sums
        self.coefficients = coefficients
        if not order.is_identity:
            self.sums = sums.select(order.row_ids)
            self.coefficients = coefficients.select(order.row_ids)

    def process_chunk(self, chunk: slice, rows: LogitRows, grad_logits: Tensor | None) -> None:
        """Write d loss / d logits of a chunk, from the softmax sums and coefficients of its rows.

        The forward has computed the sums. The coefficients follow from the upstream gradients.

        chunk         slice of the rows in the order of the pass
        rows          their logits and targets
        grad_logits   [1, num_chunk_rows, V]: where to write it. All rows of this formula have a
                      gradient, so it is never None.
        """
        assert grad_logits is not None
        sums = self.sums.select(chunk)
        self.kernels.softmax_gradient(rows, sums, self.coefficients.select(chunk), grad_logits)

    def row_scale(self, block: slice) -> None:
        """Return None, a factor of 1 for the gradient: `process_chunk` wrote all of it.

        A sequence-level loss returns here what it knows only after all chunks of a block.
        """


# ---- chunks and blocks


class RowPlan(NamedTuple):
    """The chunks of a pass, as slices of a `RowOrder`.

    chunks_without_gradient   chunks of the rows without a gradient, which are processed first
    blocks                    a list of chunks for each block of rows with a gradient
    """

    chunks_without_gradient: list[slice]
    blocks: list[list[slice]]


def plan_rows(
    inputs: PassInputs,
    order: RowOrder,
    wanted: GradientsWanted,
    memory: LinearMemory,
    blocks: Sequence[slice] | None,
) -> RowPlan:
    """Split the rows of a pass into chunks and blocks.

    A chunk is the rows whose logits exist at one time. A block is the chunks whose gradients of
    logits exist at one time. Rows without a gradient are in chunks, but in no block.

    inputs   hidden states, heads and targets
    order    the rows to process: first those that may have a gradient
    wanted   the gradients to compute; if there are none, no row has a gradient
    memory   chooses the sizes of chunks and blocks
    blocks   the blocks as slices of `order`, if the caller has chosen them (a sequence-level loss:
             whole sequences); None: as few as memory allows
    """
    device_type = inputs.targets.device.type
    num_with_gradient = order.num_with_gradient if wanted.any else 0
    sizes = memory.plan(
        device_type,
        num_rows=max(num_with_gradient, 1),
        gathers_rows=gathers_rows(inputs.policy, num_with_gradient),
    )
    # On a CPU without a buffer, all three matmuls of a chunk read or write [V, H]. So a short last
    # chunk would cost nearly as much as a long one.
    evenly = device_type == "cpu" and not memory.has_grad_buffer
    if blocks is None:
        blocks_are_chunks = sizes.block == sizes.chunk
        rows_with_gradient = slice(0, num_with_gradient)
        blocks = split_rows(rows_with_gradient, sizes.block, evenly=evenly and blocks_are_chunks)
    others = slice(num_with_gradient, order.row_ids.shape[0])
    return RowPlan(
        chunks_without_gradient=split_rows(others, sizes.chunk, evenly),
        blocks=[split_rows(block, sizes.chunk, evenly) for block in blocks],
    )


def make_memory_model(
    inputs: PassInputs,
    wanted: GradientsWanted,
    *,
    grad_hidden_dtype: torch.dtype,
    may_round_weight: bool = True,
    has_weight_total: bool = False,
) -> LinearMemory:
    """Return the memory model of a pass, which chooses the sizes of chunks and blocks.

    inputs              the heads, whose sizes and dtypes count
    wanted              the gradients that the pass computes
    grad_hidden_dtype   dtype of the gradient of hidden states
    may_round_weight    whether the gradient of the weight may be rounded to the weight's dtype
    has_weight_total    whether the gradient of the weight is added to memory of the caller
    """
    policy = inputs.policy
    returns_weight = wanted.weight and not has_weight_total
    return LinearMemory.of_head(
        policy.weight,
        matmul_dtype=policy.matmul_dtype,
        vocab_size=inputs.vocab_size,
        ranks=1 if inputs.shard is None else inputs.shard.ranks,
        reference_columns=0 if inputs.reference is None else inputs.vocab_size,
        grad_hidden_bytes=grad_hidden_dtype.itemsize if wanted.hidden else 0,
        grad_weight_bytes=policy.weight.element_size() if returns_weight else 0,
        may_round_weight=may_round_weight,
        sums_bias=wanted.bias,
    )


def gathers_rows(policy: Projection, num_rows: int) -> bool:
    """Return whether a pass copies hidden states before its matmuls, which takes memory.

    It does if it processes only some of the rows, or if the matmuls have another dtype.

    policy     has the hidden states of all rows
    num_rows   number of rows that the pass processes
    """
    return num_rows < policy.hidden.shape[0] or policy.hidden.dtype != policy.matmul_dtype


def split_rows(rows: slice, max_rows: int, evenly: bool) -> list[slice]:
    """Split rows into as few consecutive slices of at most max_rows rows as possible.

    Returns an empty list if there are no rows.

    rows     slice of the rows in the order of a pass
    evenly   True: slices of nearly equal size. A short last slice would read the whole weight for
             few rows.
             False: slices of max_rows rows, and the rest. Libraries choose their kernels by the
             size, so most slices run the same kernels.
    """
    num_rows = rows.stop - rows.start
    num_slices = -(-num_rows // max_rows)  # rounded up
    if num_slices == 0:
        return []
    if not evenly:
        starts = range(rows.start, rows.stop, max_rows)
        return [slice(start, min(start + max_rows, rows.stop)) for start in starts]
    smaller, remainder = divmod(num_rows, num_slices)
    slices = []
    start = rows.start
    for i in range(num_slices):
        stop = start + smaller + (1 if i < remainder else 0)
        slices.append(slice(start, stop))
        start = stop
    return slices


def split_sequences(rows_per_sequence: Sequence[int], max_rows: int) -> list[slice] | None:
    """Split rows into blocks of whole sequences, each of at most max_rows rows.

    A block takes sequences until the next one does not fit. Returns None if a sequence alone has
    more than max_rows rows, and an empty list if no sequence has a row.

    rows_per_sequence   number of rows of each sequence that may have a gradient, in the order of
                        `RowOrder`, where the rows of a sequence follow one another
    """
    blocks: list[slice] = []
    start = 0
    stop = 0
    for num_rows in rows_per_sequence:
        if num_rows > max_rows:
            return None
        if stop + num_rows - start > max_rows:
            blocks.append(slice(start, stop))
            start = stop
        stop += num_rows
    if stop > start:
        blocks.append(slice(start, stop))
    return blocks


# ---- helpers


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """Return x[rows], or x itself if these are all of its rows, which takes less time.

    rows   slice with a start and a stop, and a step of 1
    """
    return x if rows.start == 0 and rows.stop == x.shape[0] else x[rows]


def is_same_tensor(x: Tensor | None, y: Tensor | None) -> bool:
    """Return whether x and y are the same elements of the same memory, or both None."""
    if x is None or y is None:
        return x is y
    same_memory = x.data_ptr() == y.data_ptr() and x.device == y.device
    same_layout = x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
    return same_memory and same_layout


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which matmuls keep the dtypes of their operands.

    device_type   the type of a torch.device
    """
    # Entering torch.autocast takes longer than a small matmul, so it is skipped if autocast is off.
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
