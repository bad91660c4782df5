"""Rows of logits from hidden states: product -> row kernel -> products, some rows at a time; `[N, V]` logits never exist.

A chunk of rows is projected to fp32 logits, the row kernel computes their gradient, and two products turn the gradients of a
block of chunks into d_hidden and d_weight. That is three products if the loss is known in the forward (`fused`). If the slopes
are known only later, it is one product in `forward`, and three in `backward` for rows with a gradient.

The gradient of a row is one slope times a vector that is known at once. So rows that wait for the log-probs of others get the one
for a slope of 1 (`fused_jointly`); their slopes multiply what the products make of a block, or what they take: three products.
Likewise `forward` makes the gradient of hidden states where the head is frozen (`Visit.ahead`), and `backward` multiplies it: two
products. Rows that are not visited are not projected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import versions_of
from ..formulas.token_stage import TokenStage
from .backends import WITH_ENTROPY, Backend
from .memory import zeros
from .partials import LogitRows, Partials, RowTransform, Second, Slopes, joined
from .products import Products, Work, d_hidden_parts, keeps_rows, products_for
from .ragged import Ragged
from .stream import AtIds, Block, Found, Gradients, LateGradient, Other, Parts, Stream, Visit, places_of


@dataclass(eq=False)
class WeightMemory:
    """Memory that the gradient of a weight is added into, instead of a gradient returned through autograd.

    total     [V, H].
    flagged   the weight whose `grad_added_to_main_grad` is to be set, as Megatron's own layers do where `total` is its main_grad.
    """

    total: Tensor
    flagged: Tensor | None

    @property
    def sum_of_chunks(self) -> Tensor | None:
        """`total` if products may add to it chunk by chunk; None if each sum would be rounded."""
        return self.total if self.total.dtype == torch.float32 else None

    def left_to_autograd(self) -> Tensor | None:
        """The gradient that autograd gets for the weight. Megatron's hook wants one, which it drops, or, with `zero_out_wgrad`
        (an embedding has the same weight), adds to main_grad."""
        weight = self.flagged
        if weight is None:
            return None
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if getattr(weight, "zero_out_wgrad", False):
            return zeros(weight.shape, weight.dtype, weight.device)
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


@dataclass(eq=False)
class WeightGradient:
    """d_weight [V, H], the sum of two parts.

    dense   of rows over the whole vocabulary, None if there are none; `into.total` itself where it was added to that.
    into    what the gradient is added into; None: memory of its own.
    few     of rows with sets: (values, slots, hidden), values [m] being the gradient of the logits at the slots, from which a few
            rows of d_weight follow with hidden states. None if there are none.
    """

    backend: Backend
    shape: torch.Size
    dtype: torch.dtype  # of memory of its own for rows with sets alone
    dense: Tensor | None
    into: WeightMemory | None
    device: torch.device
    few: tuple[Tensor, Ragged, Tensor] | None

    def __post_init__(self) -> None:
        self._versions = [] if self.few is None else versions_of([self.few[2]])

    def __call__(self, factor: Tensor | None) -> Tensor | None:
        """The gradient times `factor` (0-d), in the dtype of its sum; where it was added into `into`, what autograd gets then.
        RuntimeError if hidden states that are needed for it were written to."""
        dense, few = self.dense, self.few
        if few is not None and versions_of([few[2]]) != self._versions:
            raise RuntimeError(
                "hidden was written to in place between the forward and the backward, which needs it for the gradient of weight: "
                "call backward first, or write to a copy."
            )
        total = None if self.into is None else self.into.total
        if factor is not None and dense is not None:
            if dense is total:
                raise RuntimeError("a factor of the gradient is known only after it was added to other gradients.")
            self.backend.scale_(dense, factor)
        out = dense
        if total is not None:
            out = total if dense is None or dense is total else total.add_(dense)
        elif out is None:  # only the rows of slots are touched
            out = zeros(self.shape, self.dtype, self.device, 0 if few is None else few[0].numel())
        if few is not None:
            values, slots, hidden = few
            values = values if factor is None else values * factor
            self.backend.add_hidden_rows(values, slots, hidden, out)
        return out if self.into is None else self.into.left_to_autograd()


@dataclass(eq=False)
class Hidden(Stream):
    """Rows of logits that are computed from hidden states [n, H], weight [V, H] and bias [V] or None, some rows at a time.

    dtype  what the products run in.
    into   memory that the gradient of the weight is added into."""

    dtype: torch.dtype = torch.float32
    into: WeightMemory | None = None
    computed = True

    @property
    def hidden(self) -> Tensor:
        return self.tensors[0]

    @property
    def weight(self) -> Tensor:
        return self.tensors[1]

    @property
    def bias(self) -> Tensor | None:
        return self.tensors[2]

    @property
    def columns(self) -> int:
        return int(self.weight.shape[0])

    @property
    def n(self) -> int:
        return int(self.hidden.shape[0])

    def shares(self, other: Hidden) -> bool:
        """Whether the two heads are one, as those of a model with and without adapters in its body."""
        same = _same(self.weight, other.weight) and _same(self.bias, other.bias)
        return same and self.dtype == other.dtype

    def at(self, slots: Ragged) -> Tensor:
        if self.columns == 0:  # of a rank without a part of the vocabulary
            return torch.zeros(slots.ids.shape, device=self.hidden.device)
        logits = self.backend.slot_logits(self.hidden.detach(), self.weight.detach(), slots)
        return logits if self.bias is None else logits + self.bias.detach().float()[slots.ids.clamp(min=0)]

    def stats(self, visit: Visit) -> Found:
        return Engine(self, (visit.ahead, False, False), Parts(visit)).forward(visit)

    def check_there(self) -> None:
        """Raise RuntimeError where the weight was taken away after the forward."""
        emptied = self.shard is None if self.weight.numel() == 0 else self.weight.untyped_storage().nbytes() == 0
        if emptied:
            raise RuntimeError(
                "weight is gone before the backward, which computes the logits again: keep it gathered until after it (ZeRO-3: "
                "deepspeed.zero.GatheredParameters around both; FSDP: reshard_after_forward=False). docs/functions.md says which losses "
                "make their gradient in the forward."
            )

    def gradients(self, wanted: tuple[bool, ...], parts: Parts) -> Engine:
        if parts.slots or parts.whole is None:
            self.check_there()
        return Engine(self, wanted, parts)

    def pull(self, visit: Visit, found: Found, slopes: Slopes, gradients: Engine, at_ids: AtIds | None) -> None:
        if self.into is not None and gradients.d_weight is None:  # all factors are in the slopes
            gradients.d_weight = self.into.sum_of_chunks
        gradients.backward(visit, found, slopes, at_ids)

    def fused(self, visit: Visit, stage: TokenStage, gradients: Engine) -> Tensor:
        return gradients.fused(visit, stage)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Products in the dtypes of their operands. Where autocast is off, to say so again would take longer than a small product."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    place = x.data_ptr() == y.data_ptr() and x.device == y.device
    return place and x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()


#: What is done with a chunk: of its block, of where it is among the rows of the pass, and of memory for the gradient of its logits.
Step = Callable[[Block, slice, Tensor | None], Any]


class Engine(Gradients):
    """A pass over rows of hidden states, and the gradients that it collects.

    wanted  which: (hidden, weight, bias).
    parts   what adds to them."""

    def __init__(self, stream: Hidden, wanted: tuple[bool, ...], parts: Parts) -> None:
        self.stream, self.wanted, self.whole, self.backend = stream, wanted, parts.whole, stream.backend
        self.summed_later = parts.twice or (parts.whole is not None and parts.whole.ahead)
        self.rounded = not (parts.twice or parts.slots) and stream.into is None
        self.hidden = stream.hidden.detach()
        # The gradient of the logits stays fp32 if the bias needs its sum, or if the row kernel cannot narrow it in place.
        self.exact = wanted[2] or not self.backend.writes_behind_reads
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        self._of_second: Products | None = None
        self.is_last = True  # whether this pass is the last that adds to the gradients
        if wanted[0]:
            # fp32 for fp16: the loss scale is applied later, and fp16 would underflow before.
            narrow = not self.summed_later and self.hidden.dtype != torch.float16
            of_sum = self.hidden.dtype if narrow else torch.float32
            self.d_hidden = torch.zeros(self.hidden.shape, dtype=of_sum, device=self.hidden.device)
        if wanted[2]:
            self.d_bias = torch.zeros(stream.columns, device=self.hidden.device, dtype=torch.float32)

    @functools.cached_property
    def work(self) -> Work:
        """What this pass computes. A backward that has no product left does not look at the weight, which may be gone."""
        stream, visit, d_hidden = self.stream, self.whole, 0 if self.d_hidden is None else self.d_hidden.element_size()
        weight, dtype, others = stream.weight, stream.dtype, int(visit is not None and visit.other is not None)
        if visit is not None and others and (visit.apart or visit.at is not None):
            others += 2  # a gradient, and that of a divergence, which is added to it: see `Block.pull`
        return Work(
            stream.vocab, weight.shape[1], keeps_rows(dtype, self.hidden.device), d_hidden,
            weight.element_size() if self.wanted[1] else 0, self.rounded, 1 if stream.shard is None else stream.shard.ranks,
            others * stream.vocab, dtype == torch.float16, d_hidden_parts(weight, stream.vocab, dtype) if d_hidden else 0,
        )  # fmt: skip

    # ---- passes over rows

    def forward(self, visit: Visit) -> Found:
        """Partials [q, N]: computed for the rows that are visited; the others get the values of a row that is not read."""
        n, device = visit.targets.numel(), self.hidden.device

        def step(block: Block, _: slice, out: Tensor | None) -> Tensor:
            values = block.stats()
            if out is not None:
                block.pull_unit(values, out)
            return values

        active = visit.active if visit.ahead else None
        values = self._in_batch(visit, active, self._visited(visit, step, active), lambda: visit.not_read(n, device))
        return visit.found(values, self.d_hidden if visit.ahead else None)

    def fused(self, visit: Visit, stage: TokenStage) -> Tensor:
        """Losses of the rows of a token stage."""
        index, active = visit.rows(), visit.active
        if visit.tokens is not None:
            result = visit.no_losses()
            self._visited(visit, lambda block, _, out: block.add_tokens(result, stage, out), active)
            return result
        # Once, so that those of a chunk are slices: on a GPU each operation of a chunk is a launch.
        ordered = stage.at(index) if self._gathers(index[:active]) else stage
        parts = self._visited(visit, lambda block, own, out: block.fused(ordered.at(own), out), active)
        return self._in_batch(visit, active, parts, visit.no_losses)

    def _in_batch(self, visit: Visit, active: int | None, parts: list[Tensor], nothing: Callable[[], Tensor]) -> Tensor:
        """[q, n], from the values [q, r] of the chunks of a pass. `nothing` makes those of rows that are not visited."""
        index = visit.rows()
        if not parts:
            return nothing()
        if not self._gathers(index[:active]):
            return joined(parts, 1)
        in_batch = nothing()
        in_batch[:, index] = joined(parts, 1)
        return in_batch

    def fused_jointly(self, visit: Visit, factors: Callable[[Partials], Tensor], groups: tuple[int, ...]) -> None:
        """`fused` of rows whose gradient is one vector each, see `Visit.slopes`, times a factor that waits for other rows.

        factors  these factors, fp32 [n], from the partials of all rows: of each group for which they are there.
        groups   the number of rows of each group that can have a gradient; groups follow one another.

        Rows that have no gradient come first, as groups may wait for them too. A run of groups is one block, whose products wait
        for its factors; or it is too long for that, and the logits of its rows are computed again, once these are known."""
        visit = visit._replace(names=WITH_ENTROPY)
        index, n, wanted = visit.rows(), visit.targets.numel(), True in self.wanted
        active = index.numel() if visit.active is None else visit.active
        runs = self._runs(groups, active) if wanted else []
        partials = Partials.not_read(WITH_ENTROPY, n, self.hidden.device)

        def step(block: Block, _: slice, out: Tensor | None) -> None:
            partials.values[:, block.at] = values = block.stats()
            if out is not None:
                block.pull_unit(values, out)

        for i, (first, end, is_block) in enumerate([(active if wanted else 0, index.numel(), False), *runs]):
            some, self.is_last = index[first:end], i == len(runs)
            self._each(visit, some, step, is_block, slopes=lambda: factors(partials))
            if i and not is_block:
                of_run = visit._replace(visited=some, active=None)
                at_ids = None if visit.at is None else (visit.at, torch.zeros(visit.at.ids.shape, device=self.hidden.device))
                self.backward(of_run, visit.found(partials.values), visit.slopes(factors(partials)), at_ids)
        if not runs:
            factors(partials)

    def _runs(self, groups: tuple[int, ...], active: int) -> list[tuple[int, int, bool]]:
        """(the first row, the end, whether that is one block) of as many groups at a time as are one, or are none."""
        if not active:
            return []
        plan = self.work.plan(self.hidden.device.type, active, self._copies(active))
        limit = plan.chunk if not self.work.apart else 0 if self.work.scaled else plan.block
        runs: list[tuple[int, int, bool]] = []
        end = 0
        for rows in filter(None, groups):
            first, end = end, end + rows
            is_block = rows <= limit
            if runs and runs[-1][2] == is_block and not (is_block and end - runs[-1][0] > limit):
                first = runs.pop()[0]
            runs.append((first, end, is_block))
        return runs

    def backward(self, visit: Visit, found: Found, slopes: Slopes, at_ids: AtIds | None) -> None:
        """Add the gradients of the rows that are visited; their logits are computed again."""
        if found.ahead is not None and self.d_hidden is not None:
            self.d_hidden += _multiplied(found.ahead.clone(), visit.factors(found.partials, slopes))
            return
        self.stream.check_there()
        index, at_ids = visit.rows()[: visit.active], self.stream.own_ids(at_ids)
        if index.device.type == "cpu":
            nonzero = slopes.nonzero
            if at_ids is not None:  # slopes of several ids may cancel in the sum of their row
                slots, values = at_ids
                nonzero = nonzero.index_fill(0, slots.rows[values != 0], True)
            index = index[nonzero[index]]

        def step(block: Block, _: slice, out: Tensor | None) -> None:
            assert out is not None
            of_block = None if at_ids is None else block.at_slots(at_ids)
            block.pull(found.values[:, block.at], slopes.at(block.at), out, of_block)

        self._each(visit, index, step, True)

    # ---- logits of a chunk

    @functools.cached_property
    def products(self) -> Products:
        """Created with the first chunk: a call without rows touches nothing of the size of the weight."""
        return _products(self.stream)

    def _block(self, visit: Visit, at: slice | Tensor, hidden: Tensor, targets: Tensor, transform: RowTransform) -> Block:
        """The rows of a chunk, beside those of the one second stream that is read with them. With the same head (adapters in the
        body of a model), both are one product."""
        one, second = visit.one, None
        if one is None:
            logits = self.products.logits(hidden)
        elif isinstance(one.stream, Hidden) and one.stream.shares(self.stream):
            both = torch.cat([hidden, one.stream.hidden.detach()[at].to(self.products.dtype)])
            logits, of_second = self.products.logits(both).tensor_split([len(hidden)])
            second = one.second(of_second[None], one.stream.transform.at(at))
        else:
            logits = self.products.logits(hidden)
            second = self._second(one, at)
        rows = LogitRows(logits[None], targets, None, transform, second)
        return Block(self.stream, self.backend, visit, rows, at, lambda: self._second(visit.other, at))

    def _second(self, other: Other | None, at: slice | Tensor) -> Second:
        """The second stream beside the rows `at` of the batch."""
        assert other is not None and isinstance(other.stream, Hidden)
        if self._of_second is None:
            self._of_second = _products(other.stream)
        own, places = self._of_second, places_of(at, self.hidden.device)
        logits = own.logits(other.stream.hidden.detach()[places].to(own.dtype))
        return other.second(logits[None], other.stream.transform.at(places))

    def _visited(self, visit: Visit, step: Step, active: int | None) -> list[Any]:
        """What `step` makes of the chunks of the rows that are visited. The first `active` may have a gradient; None: all may."""
        index = visit.rows()
        found = self._each(visit, index[:active], step, True in self.wanted)
        return found if active is None else found + self._each(visit, index[active:], step, False, active)

    def _each(
        self, visit: Visit, index: Tensor, step: Step, wanted: bool, before: int = 0, slopes: Callable[[], Tensor] | None = None
    ) -> list[Any]:
        """What `step` makes of each chunk of these rows, `before` which the pass has had others: of its block, of where it is among
        the rows of the pass, and of memory for the gradient of its logits, or None unless that is `wanted`. Products take the
        gradients of a block, times `slopes` of [n], which are known when all of it is there."""
        rows, found = index.numel(), list[Any]()
        if rows == 0:
            return found
        targets, transform = visit.targets, self.stream.transform
        if self._gathers(index):  # once, so that those of a chunk are slices
            targets, transform = targets[index], transform.at(index)
        work = self.work if self.d_weight is None else self.work._replace(d_weight=0)
        plan = work.plan(self.hidden.device.type, rows, self._copies(rows))
        kept, first = None, 0  # the gradients of the block at hand, where they have memory of their own, and its first row
        with _without_autocast(self.hidden.device.type):
            for own in self._chunks(index, plan.chunk):
                at, hidden = self._hidden(index, own)
                block, out = self._block(visit, at, hidden, targets[own], transform.at(own)), None
                if wanted:
                    kept = self.products.gradient_rows(min(plan.block, rows - first)) if own.start == first else kept
                    out = self.products.gradient_buffer(block.rows.logits[0], self.exact, kept, own.start - first)
                in_pass = slice(before + own.start, before + own.stop)
                found.append(step(block, in_pass, None if out is None else out[None]))
                del block  # before the products of a block, or the next chunk, make theirs
                if out is None:
                    continue
                if self.d_bias is not None:
                    self.d_bias += out.sum(0, dtype=torch.float32)
                if kept is not None:
                    out = self.products.keep(out, kept, own.start - first)
                    if own.stop - first < len(kept):
                        continue
                    out, kept = kept, None
                if first < own.start:  # a block of several chunks
                    at, hidden = self._hidden(index, slice(first, own.stop))
                first = own.stop
                self._take(at, hidden, out, first == rows, slopes)
                del out
        return found

    def _chunks(self, index: Tensor, rows: int) -> Iterator[slice]:
        """Which of these rows are one chunk, of so many rows."""
        if index.device.type == "cpu" and not self.work.apart:
            # As few chunks as the memory allows, of nearly one size: a product of a few last rows reads the whole weight, too.
            parts = index.tensor_split(-(-index.numel() // rows))
        else:  # equal sizes except the last: a library chooses its kernel by the size
            parts = index.split(rows)
        end = 0
        for part in parts:
            first, end = end, end + part.numel()
            yield slice(first, end)

    def _hidden(self, index: Tensor, own: slice) -> tuple[slice | Tensor, Tensor]:
        """Where some rows of `index` are in the batch, and their hidden states as the products take them. If `index` has all rows
        there are, they are taken in the order of the batch, and nothing is copied."""
        at = index[own] if self._gathers(index) else own
        return at, self.hidden[at].to(self.products.dtype).contiguous()

    def _copies(self, rows: int) -> bool:
        """Whether the products take copies of so many rows of hidden states."""
        return rows < self.hidden.shape[0] or self.hidden.dtype != self.products.dtype

    def _gathers(self, index: Tensor) -> bool:
        return index.numel() < self.hidden.shape[0]

    def _take(
        self, at: slice | Tensor, hidden: Tensor, d_logits: Tensor, last: bool, slopes: Callable[[], Tensor] | None
    ) -> None:
        """Add what products make of the gradients of a block to d_hidden and d_weight, times the `slopes` of its rows, of [n],
        which are known by then. `last`: of the pass."""
        if slopes is not None and not last:
            assert self.stream.columns == 0, "the rows of a run are one block"
            return  # of a rank without a part of the vocabulary, whose gradients are 0
        factors = None if slopes is None else slopes()[at]
        if self.d_hidden is not None and self.summed_later:
            self.d_hidden.index_add_(
                0, places_of(at, self.hidden.device), _multiplied(self.products.d_hidden(d_logits), factors)
            )
        elif self.d_hidden is not None:
            self.d_hidden[at] = _multiplied(self.products.d_hidden(d_logits), factors).to(self.d_hidden.dtype)
        if self.wanted[1]:
            hidden = hidden if factors is None else _multiplied(hidden.clone(), factors)
            self.d_weight = self.products.add_d_weight(self.d_weight, d_logits, hidden, last and self.rounded and self.is_last)

    # ---- gradients

    def made(self) -> tuple[Tensor | LateGradient | None, ...]:
        stream, device = self.stream, self.hidden.device
        few = None
        if self.few is not None and stream.columns:  # a rank may have no column
            slots, values = self.few
            few = values, slots, self.hidden  # otherwise hidden states are not kept for the backward
            if self.d_hidden is not None:
                of_slots = torch.zeros_like(self.d_hidden) if self.summed_later else self.d_hidden
                self.backend.add_weight_rows(values, slots, stream.weight.detach(), of_slots)
                if self.summed_later:
                    self.d_hidden += of_slots
            if self.d_bias is not None:
                ones = torch.ones(self.hidden.shape[0], 1, device=device)
                self.backend.add_hidden_rows(values, slots, ones, self.d_bias[:, None])
        if self.d_hidden is not None and stream.shard is not None:
            self.d_hidden = stream.shard.sum_hidden(self.d_hidden)
        d_weight: Tensor | LateGradient | None = self.d_weight
        if self.wanted[1] and (d_weight is None or few is not None or stream.into is not None):
            like = (self.backend, stream.weight.shape, stream.weight.dtype)
            d_weight = WeightGradient(*like, self.d_weight, stream.into, device, few)
        return self.d_hidden, d_weight, self.d_bias


def _multiplied(rows: Tensor, factors: Tensor | None) -> Tensor:
    """Multiply rows [r, H] by a factor each, fp32 [r]; None: by none. A row with a factor of 0 is 0, whatever it holds."""
    return rows if factors is None else rows.mul_(factors[:, None]).masked_fill_((factors == 0)[:, None], 0.0)


def _products(stream: Hidden) -> Products:
    bias = None if stream.bias is None else stream.bias.detach()
    return products_for(stream.weight.detach(), bias, stream.dtype)
