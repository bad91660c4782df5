"""How many rows at a time the engine takes from hidden states, and how much memory they need.

A chunk is the rows whose fp32 logits exist at one time; a block is the rows whose gradients of logits do. d_hidden and d_weight
of a block are one product each. On a CPU a block is a chunk, and its gradients overwrite its logits. On a GPU the 16-bit
gradients have memory of their own, so a block may have many chunks: few large products are faster than many small ones, and
the fp32 sum of d_weight is read and written once per block."""

from __future__ import annotations

from typing import NamedTuple

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
