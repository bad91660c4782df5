"""The engine from hidden states: product -> row kernel -> products, some rows at a time; `[N, V]` logits never exist.

A chunk of rows is projected to fp32 logits, the row kernel computes their gradient, and two products turn the gradients of a
block of chunks into d_hidden and d_weight. That is three products if the loss is known in the forward (`fused`). If the slopes
are known only later, it is one product in `forward`, and three in `backward` for rows with a gradient. Rows outside `index`
are not projected.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..layout import whole_rows
from .backends import Backend, FusedRows, visit
from .blocks import Work
from .products import Products, d_hidden_parts, keeps_rows, products_for
from .rows import OUTSIDE, RowStats, RowTransform, Slopes, Teacher
from .selection import Draws
from .several import sums_outside
from .shard import VocabShard, check_shard, refuse_managed
from .sparse import Slots, write_at
from .teachers import Several, TeacherHead, in_one_visit
from .weight_gradient import WeightMemory, check_weight_grad

if TYPE_CHECKING:
    from ..formulas.token_stage import TokenRows
    from ..objective import Objective

Tensor = torch.Tensor


@dataclass(eq=False)
class FlatHead:
    """Flat hidden states [N, H] and the projection to logits, checked by `check_head`."""

    hidden: Tensor
    weight: Tensor  # [V, H], or this rank's part of it
    bias: Tensor | None  # [V]
    dtype: torch.dtype  # to compute in
    shard: VocabShard | None = None
    into: WeightMemory | None = None  # what the gradient of the weight is added into

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those that may get a gradient."""
        return self.hidden, self.weight, self.bias

    @property
    def vocab(self) -> int:
        """Ids that a target may have."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab


def check_head(
    hidden: Tensor,
    weight: Any,  # what a caller gave
    bias: Tensor | None,
    shape: torch.Size,
    device: torch.device,
    shard: VocabShard | None = None,
    weight_grad: Tensor | None = None,
    read: dict[str, Any] | None = None,
) -> FlatHead:
    """Check hidden states and head, and return them as flat rows and local tensors, each row in one piece. `read`: what a call
    with `weight_grad` reads beside them, by name. Raises ValueError with the remedy."""
    if shard is not None:
        check_shard(shard)
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is None and name == "bias":
            continue
        if isinstance(x, torch.nn.Module):
            raise ValueError(
                f"{name} is the module {type(x).__name__}: pass its tensor, {name}=lm_head.{name if name != 'hidden' else 'weight'}."
            )
        if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} is {got}: pass a float32, bfloat16 or float16 tensor.")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, but targets is on {device}: move one of them.")
    hidden = _local("hidden", hidden, partial=shard is not None and not shard.reduce_hidden)
    if shard is None:
        weight, bias = _local("weight", weight), None if bias is None else _local("bias", bias)
    else:
        weight, bias = shard.local("weight", weight, 0), None if bias is None else shard.local("bias", bias, 0)
    if weight.dim() != 2 or (weight.numel() == 0 and (shard is None or weight.shape[1] == 0)):
        raise ValueError(
            f"weight has shape {list(weight.shape)}, not [V, H]: it looks sharded. DeepSpeed ZeRO-3: call inside "
            "deepspeed.zero.GatheredParameters([lm_head.weight]), and keep it gathered until after the backward. FSDP: call "
            "inside the forward of the module that owns the head, or pass weight.full_tensor()."
        )
    if hidden.dim() != len(shape) + 1 or hidden.shape[:-1] != shape:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, but targets has {list(shape)}: hidden must be targets' shape plus the "
            "hidden size, row i predicting targets[i] (for a model's output usually hidden[:, :-1] against ids[:, 1:])."
        )
    vocab, width = weight.shape
    if hidden.shape[-1] != width:
        hint = " hidden looks like logits (for those use grpo_loss or token_logprobs), or weight is transposed (pass weight.T)."
        hint = hint if hidden.shape[-1] == vocab else ""
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}: the last dimensions must agree, "
            f"[..., H] and [V, H].{hint}"
        )
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias has shape {list(bias.shape)}, but weight has {list(weight.shape)}: it must be [{vocab}].")
    into = None
    if weight_grad is not None:
        into = check_weight_grad(weight_grad, weight, {"hidden": hidden, "weight": weight, "bias": bias, **(read or {})})
    bias = None if bias is None else bias.contiguous()
    return FlatHead(whole_rows(hidden.reshape(-1, width)), whole_rows(weight), bias, compute_dtype(hidden), shard, into)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """What products may run in: the autocast dtype if autocast is on, else that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _local(name: str, x: Tensor, partial: bool = False) -> Tensor:
    """The local tensor of a replicated DTensor; a plain tensor as it is. `partial`: its gradient is this rank's share."""
    placements = getattr(x, "placements", None)
    if placements is None:
        return x
    refuse_managed(name, x)
    if not all(p.is_replicate() for p in placements):
        remedy = "pass the rows of this rank as a plain tensor, hidden.to_local()."
        if name != "hidden":
            remedy = (
                f"pass {name}.full_tensor(grad_placements=[Partial()]) and divide its gradient by the number of ranks. If it is "
                "the vocabulary-sharded head of a tensor-parallel group, whose ranks have the same rows, pass "
                "shard=VocabShard.of(weight)."
            )
        raise ValueError(f"{name} is a DTensor with placements {placements}, not replicated: {remedy}")
    from torch.distributed.tensor import Partial

    return x.to_local(grad_placements=[Partial()] * len(placements) if partial else None)  # type: ignore[attr-defined]


class Engine:
    """One pass over the rows of a head. `wanted` says which gradients it accumulates: (hidden, weight, bias). `rounded`: d_weight
    may end in the dtype of the weight; without it it is fp32, for more to be added, and with `summed_later` so is d_hidden. The
    logits of a `teacher` are made beside the student's, one more product, and are gone with them."""

    def __init__(
        self, head: FlatHead, backend: Backend, wanted: tuple[bool, bool, bool] = (False, False, False), rounded: bool = True,
        teacher: TeacherHead | Several | None = None, summed_later: bool = False,
    ) -> None:  # fmt: skip
        self.head, self.backend, self.wanted, self.teacher = head, backend, wanted, teacher
        self.rounded, self.summed_later = rounded and not summed_later, summed_later
        self._of_teachers: dict[int, Products | None] = {}
        self.hidden = head.hidden.detach()
        # The gradient of the logits stays fp32 if the bias needs its sum, or if the row kernel cannot narrow it in place.
        self.exact = wanted[2] or not backend.WRITES_BEHIND_READS
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        self.summed = 0  # rows that the products have taken
        if wanted[0]:
            # fp32 for fp16: the loss scale is applied later, and fp16 would underflow before.
            dtype = torch.float32 if summed_later or self.hidden.dtype == torch.float16 else self.hidden.dtype
            self.d_hidden = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
        if wanted[2]:
            self.d_bias = torch.zeros(head.weight.shape[0], device=self.hidden.device, dtype=torch.float32)
        self.work = Work(
            head.vocab, head.weight.shape[1], keeps_rows(head.dtype, self.hidden.device),
            0 if self.d_hidden is None else self.d_hidden.element_size(), head.weight.element_size() if wanted[1] else 0,
            self.rounded, 1 if head.shard is None else head.shard.ranks, 0 if teacher is None else teacher.columns,
            head.dtype == torch.float16, d_hidden_parts(head.weight, head.vocab, head.dtype) if wanted[0] else 0,
        )  # fmt: skip
        self.chunk_rows = self.work.plan(self.hidden.device.type, 0).chunk
        self.block_rows = 0  # the most rows that a block of this pass has
        self._block: Tensor | None = None  # the gradients of the block at hand, where they have memory of their own,
        self._filled = 0  # and of how many of its rows they are there

    @functools.cached_property
    def products(self) -> Products:
        """Created with the first chunk: a call without rows touches nothing of the size of the weight."""
        return _products(self.head)

    def _of_teacher(self, teacher: TeacherHead) -> Products | None:
        """The products of a teacher's own head; None if the head is the student's and there are not several teachers."""
        if id(teacher) not in self._of_teachers:
            shared = teacher is self.teacher and teacher.shares(self.head)
            self._of_teachers[id(teacher)] = None if shared else _products(teacher.head)
        return self._of_teachers[id(teacher)]

    def _logits(self, at: Tensor, hidden: Tensor) -> tuple[Tensor, Teacher | None]:
        """The logits of a chunk of rows, [c, V], and those of the teacher if there is only one."""
        if not isinstance(self.teacher, TeacherHead):
            return self.products.logits(hidden), None
        second, own = self.teacher.head.hidden.detach()[at], self._of_teacher(self.teacher)
        if own is None:
            both = self.products.logits(torch.cat([hidden, second.to(self.products.dtype)]))
            logits, of_teacher = both[: at.numel()], both[at.numel() :]
        else:
            logits, of_teacher = self.products.logits(hidden), own.logits(second.to(own.dtype))
        return logits, self.teacher.of(of_teacher, at)

    def _one_of_several(self, at: Tensor, teacher: TeacherHead, here: Tensor | None) -> Teacher:
        """A teacher's rows of a chunk, or of these places of it."""
        at, own = at if here is None else at[here], self._of_teacher(teacher) or self.products
        return teacher.of(own.logits(teacher.head.hidden.detach()[at].to(own.dtype)), at)

    def forward(
        self, index: Tensor, targets: Tensor, transform: RowTransform, names: tuple[str, ...], draws: Draws | None = None,
        slots: Slots | None = None,
    ) -> RowStats:  # fmt: skip
        """Partials [q, N]: computed for the rows of `index`; the other rows get the values of a row that is not read. `draws` takes
        columns of each chunk while its logits are there. `slots`: what the partials OUTSIDE leave out."""
        stats = RowStats.not_read(names, targets.numel(), self.hidden.device, self.teacher)
        for at, hidden in self._chunks(index):
            logits, teacher = self._logits(at, hidden)
            part = visit(self.backend, logits[None], targets[at], None, transform.at(at), names, teacher)
            stats.values[:, at] = part.values
            if draws is not None:
                draws.take(logits, at, targets[at], part, transform.at(at))
            if slots is not None and OUTSIDE[0] in names:  # the last thing that the logits are needed for
                z = transform.at(at).of_rows(logits, logits)
                here = slots.in_chunk(at, targets.numel())
                stats.values[-len(OUTSIDE) :, at] = sums_outside(self.backend, z, here, targets[at], None)
            del logits, teacher  # before the next chunk's are made
        return stats

    def fused(
        self,
        index: Tensor,
        rows: TokenRows,
        objective: Objective,
        transform: RowTransform,
        result: FusedRows,
        gradients: bool,
    ) -> None:
        """Token-level loss of the rows of `index`, written into `result` [N], with `gradients` collected or not."""
        for at, hidden in self._chunks(index):
            logits, teacher = self._logits(at, hidden)
            d_logits = self._gradient(logits, index) if gradients else None
            of_rows = (logits[None], rows[at], objective, transform.at(at), None if d_logits is None else d_logits[None])
            if isinstance(self.teacher, Several):
                each = functools.partial(self._one_of_several, at)
                part = in_one_visit(self.backend, *of_rows, self.teacher.at(at), each)
            else:
                part = self.backend.fused(*of_rows, teacher=teacher)
            result.put(at, part)
            del logits, teacher, of_rows  # before the products of a block make theirs
            if d_logits is not None:
                d_logits = self._kept(d_logits)
                self._accumulate(at, hidden, d_logits, index)
            del d_logits

    def backward(
        self, index: Tensor, targets: Tensor, stats: RowStats, slopes: Slopes, transform: RowTransform,
        slots: Slots | None = None, at_slots: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Accumulate the gradients of the rows of `index`; their logits are computed again. All vectors cover all rows, [N].
        `at_slots`: the gradient of the logits at `slots`, in place of what the slopes say there."""
        for at, hidden in self._chunks(index):
            logits, teacher = self._logits(at, hidden)
            d_logits = self._gradient(logits, index)
            of_rows = (targets[at], stats.at(at), slopes.at(at), transform.at(at))
            self.backend.pull(logits[None], *of_rows, d_logits[None], teacher=teacher)
            if slots is not None and at_slots is not None:
                here = slots.in_chunk(at, targets.numel())
                write_at(d_logits, (here.rows, here.ids.clamp(min=0)), at_slots, here.ids >= 0)
            del logits, teacher
            d_logits = self._kept(d_logits)
            self._accumulate(at, hidden, d_logits, index)
            del d_logits

    def _chunks(self, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each chunk: the positions of its rows in the batch, and their hidden states."""
        if index.numel() == 0:
            return
        if index.device.type == "cpu" and not self.work.apart:
            # As few chunks as the memory allows, of nearly one size: a product of a few last rows reads the whole weight, too.
            parts = index.tensor_split(-(-index.numel() // self.chunk_rows))
        else:  # equal sizes except the last: a library chooses its kernel by the size
            parts = index.split(self.chunk_rows)
        lo = 0
        for part in parts:
            yield self._rows(index, lo, lo + part.numel())
            lo += part.numel()

    def _rows(self, index: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Where rows lo to hi of `index` are in the batch, and their hidden states as the products take them. If `index` has all
        rows there are, they are taken in the order of the batch, and nothing is copied."""
        if self._gathers(index):
            at = index[lo:hi]
            hidden = self.hidden[at]
        else:
            at, hidden = torch.arange(lo, hi, device=index.device), self.hidden[lo:hi]
        return at, hidden.to(self.products.dtype).contiguous()

    def _gathers(self, index: Tensor) -> bool:
        return index.numel() < self.hidden.shape[0]

    def _gradient(self, logits: Tensor, index: Tensor) -> Tensor:
        """Where the row kernel writes the gradient of the logits of the chunk at hand."""
        if self.summed == self._filled == 0:
            work = self.work if self.d_weight is None else self.work._replace(d_weight=0)
            copied = self._gathers(index) or self.hidden.dtype != self.products.dtype
            self.block_rows = work.plan(self.hidden.device.type, index.numel(), copied).block
        if self._block is None:
            self._block = self.products.gradient_rows(min(self.block_rows, index.numel() - self.summed))
        if self._block is None or self.work.scaled:
            return self.products.gradient_buffer(logits, self.exact)
        return self._block[self._filled : self._filled + logits.shape[0]]

    def _kept(self, d_logits: Tensor) -> Tensor:
        """The gradients of a finished chunk as the products take them."""
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0, dtype=torch.float32)
        return d_logits if self._block is None else self.products.keep(d_logits, self._block, self._filled)

    def _accumulate(self, at: Tensor, hidden: Tensor, d_logits: Tensor, index: Tensor) -> None:
        """Called when the gradients of a chunk are complete. Those of a whole block go into d_hidden and d_weight."""
        if self._block is not None:
            self._filled += at.numel()
            if self._filled < self._block.shape[0]:
                return
            d_logits, self._block, self._filled = self._block, None, 0
            at, hidden = self._rows(index, self.summed, self.summed + d_logits.shape[0])
        self.summed += at.numel()
        if self.d_hidden is not None:
            self.d_hidden[at] = self.products.d_hidden(d_logits).to(self.d_hidden.dtype)
        if self.wanted[1]:
            last = self.rounded and self.summed == index.numel()
            self.d_weight = self.products.add_d_weight(self.d_weight, d_logits, hidden, last)

    def whole_d_hidden(self) -> Tensor | None:
        """d_hidden, in the dtype of its sum, over all ranks that share the vocabulary; None if it is not wanted."""
        if self.d_hidden is not None and self.head.shard is not None:
            self.d_hidden = self.head.shard.sum_hidden(self.d_hidden)
        return self.d_hidden


def _products(head: FlatHead) -> Products:
    return products_for(head.weight.detach(), None if head.bias is None else head.bias.detach(), head.dtype)
