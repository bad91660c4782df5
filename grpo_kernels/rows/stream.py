"""Streams of rows of logits, the policy's and a reference's alike: given logits, hidden states with a head (hidden.py), and either
of them over sets of ids (sets.py).

A stream visits rows with three verbs: `stats`, `pull`, and `fused`, which is both with a token stage between them. The kinds differ
in how the logits of a block of rows come about; what is computed of a block is the same (`Block`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import plain
from ..formulas.ops import times
from ..formulas.token_stage import TokenStage
from .backends import Backend
from .memory import empty_like, zeros
from .parallel import VocabShard
from .partials import OUTSIDE, LogitRows, Partials, RowTransform, Second, Slopes, joined, partials_of
from .ragged import KeptRows, Ragged, Tokens, merged, write_at
from .tokens import LogitsAt, fused_tokens

Tensors = tuple[Any, ...]  # of tensors and None


@dataclass(eq=False)
class Other:
    """A second stream of the same rows, for the divergence from it."""

    stream: Stream
    kind: str
    mixture: float

    def second(self, logits: Tensor, transform: RowTransform) -> Second:
        return Second(logits, transform, self.kind, self.mixture)


class Visit(NamedTuple):
    """A visit of rows.

    read    bool [n]: the rows that are visited; None: all.
    names   of the partials that are made.
    other   the second stream.
    visited   the rows that are visited, [m] int64; None: found from `read`, a host sync on a GPU.
    active  how many of `visited`, from its first on, can have a slope; None: all. On a CPU, where it costs no wait, rows whose
            slopes are zero are left out of the products as well.
    at      further ids of rows, whose log-probs are wanted.
    tokens  those of the rows, where these may have several, or terms at listed ids. The likeliest of a row's ids, which are those
            `at` it, stands in for its target. Where the visit is over sets: whose sets these are.
    kept    the sets that the softmax of a row runs over; None: the vocabulary.
    all_rows  whether rows with sets are among those that are visited over the vocabulary.
    ahead   whether the gradient of hidden states is made in the forward, as if the slope of each log-prob were 1; the slope, which
            is known later, multiplies it.
    statistics, with_gradient   what is asked of it beside log-probs, see STATISTICS, and what of that has a gradient."""

    targets: Tensor
    read: Tensor | None
    names: tuple[str, ...]
    other: Other | None = None
    visited: Tensor | None = None
    active: int | None = None
    at: Ragged | None = None
    tokens: Tokens | None = None
    kept: KeptRows | None = None
    all_rows: bool = False
    ahead: bool = False
    statistics: tuple[str, ...] = ()
    with_gradient: tuple[str, ...] = ()

    @property
    def one(self) -> Other | None:
        """The second stream that is read beside the rows; None where it is read apart."""
        return None if self.apart else self.other

    @property
    def apart(self) -> bool:
        """Whether the second stream is read after the rows, as it is beside losses of tokens."""
        return self.other is not None and self.tokens is not None and self.at is None and self.kept is None

    def rows(self) -> Tensor:
        """int64 [m]: the rows that are visited."""
        if self.visited is not None:
            return self.visited
        n, device = self.targets.numel(), self.targets.device
        return torch.arange(n, device=device) if self.read is None else self.read.nonzero()[:, 0]

    def not_read(self, n: int, device: torch.device) -> Tensor:
        """fp32 [q, n]: the partials of rows that are not read."""
        return Partials.not_read(self.names, n, device).values

    def no_losses(self) -> Tensor:
        """What `Backend.fused` gives, fp32 [3, n] or [4, n], as zeros, of all rows or their tokens."""
        of = self.targets if self.tokens is None else self.tokens.rows
        return torch.zeros(3 if self.other is None else 4, of.numel(), dtype=torch.float32, device=of.device)

    def found(self, values: Tensor, ahead: Tensor | None = None) -> Found:
        """What partials fp32 [q, n] are."""
        one = self.one
        of = () if one is None else (one.kind, one.mixture)
        return Found(values, Partials(values, self.names, *of), ahead)

    def slopes(self, factor: Tensor) -> Slopes:
        """Those of rows whose gradient is one vector times `factor` [n]: that of the log-prob, or with further ids, whose gradient
        comes apart, the probabilities of all other columns."""
        return Slopes.stacked(
            {"target": factor} if self.at is None else {"target": torch.zeros_like(factor), "constant": factor}
        )

    def factors(self, partials: Partials, slopes: Slopes) -> Tensor:
        """`factor` of these slopes, NaN where it is one of a log-prob of NaN."""
        of = slopes.target if self.at is None else slopes.get("constant")
        assert of is not None
        return torch.where(partials.logps.isnan() & (of != 0), torch.nan, of)


class Found(NamedTuple):
    """What a visit has made: partials, a view of `values`, fp32 [q, n], and the gradient of hidden states of `Visit.ahead`, fp32
    [n, H]."""

    values: Tensor
    partials: Partials
    ahead: Tensor | None


class Parts(NamedTuple):
    """What adds to the gradients of a stream.

    whole  a visit over the vocabulary, whose second streams take memory beside a chunk of logits; None: there is none.
    twice  whether rows are visited more than once. Sums are then fp32, and rounded once at the end.
    slots  whether gradients of logits at slots come as well.
    wholes  how many visits are over the vocabulary."""

    whole: Visit | None
    twice: bool = False
    slots: bool = False
    wholes: int = 1


# ---- gradients of the tensors of a stream, which visits add to. Some are made in the backward, once its factor is known, because
# they have few rows or come in parts


#: A gradient that is computed in the backward, times a factor (0-d) unless that is None; it is None if autograd gets none.
LateGradient = Callable[[Tensor | None], Tensor | None]
#: Ids of rows, and the gradient of the logits there.
AtIds = tuple[Ragged, Tensor]


class Gradients(ABC):
    """The gradients of a stream's tensors, to which visits add.

    wanted  which of them.
    few     the gradient of the logits at slots, which is added when visits of whole rows have written theirs."""

    wanted: tuple[bool, ...]
    few: AtIds | None = None

    def add(self, slots: Ragged, values: Tensor) -> None:
        """Add the gradient of the logits at slots, fp32 [m], where they are in use."""
        self.few = (slots, values) if self.few is None else merged(*self.few, slots, values)

    @abstractmethod
    def made(self) -> tuple[Tensor | LateGradient | None, ...]:
        """One for each tensor of the stream, None where it is not wanted."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The same at once, where the factor of the backward is in them."""
        return tuple(g if g is None or isinstance(g, Tensor) else g(None) for g in self.made())


# ---- what is computed of a block of rows


@dataclass(eq=False)
class Block:
    """Rows of a visit whose logits are there.

    rows       [1, r, V]; of given logits all rows [A, T, V] as they lie, where nothing needs them apart.
    at         which rows of the visit they are.
    second_of  makes the second stream beside these rows, where it is read apart; None: it is read beside them, or there is none."""

    stream: Stream
    backend: Backend
    visit: Visit
    rows: LogitRows
    at: slice | Tensor
    second_of: Callable[[], Second] | None = None

    @property
    def places(self) -> Tensor:
        """int64 [r]: which rows of the visit they are."""
        return places_of(self.at, self.rows.targets.device)

    def at_slots(self, at: AtIds) -> AtIds:
        """The slots of these rows with their values, the rows counted in the block."""
        own, which = at[0].in_chunk(self.places, self.visit.targets.numel())
        return own, at[1][which]

    def _put(self, out: Tensor, value: float) -> None:
        """Write a number at the ids of the visit."""
        at = self.visit.at
        assert at is not None
        write_at(out, *self.at_slots((self.stream.own(at), torch.full(at.ids.shape, value, device=out.device))))

    def stats(self) -> Tensor:
        """fp32 [q, r]: the partials of a visit, see `Visit.found`. Sums outside of ids take computed logits as their memory."""
        visit, rows = self.visit, self.rows
        part = self.backend.visit(rows, visit.names)
        if OUTSIDE[0] in visit.names:
            part.put(OUTSIDE, self._outside())
        return part.values

    def pull(self, values: Tensor, slopes: Slopes, out: Tensor, at_ids: AtIds | None = None) -> None:
        """Write the gradient of the logits, which may be `out`, from partials fp32 [q, r] and slopes of these rows. `at_ids`: what
        it is at some ids of these rows, see `LogitsAt.gradients`, but for that of divergences, which is added."""
        found, of_divergence = self.visit.found(values), slopes.get("divergence")
        if at_ids is not None and of_divergence is not None:  # before the kernels write over the logits
            memory = self._of_divergence(self.rows, found.partials, of_divergence)
            slots, at = at_ids
            at_ids = slots, at + memory[slots.positions(memory.shape[1])] if memory.numel() else at
        self.backend.gradient(self.rows, found.partials, slopes, out)
        if at_ids is not None:
            write_at(out, *at_ids)

    def _of_divergence(self, rows: LogitRows, partials: Partials, slope: Tensor) -> Tensor:
        """The gradient of a divergence alone, fp32."""
        memory = torch.empty_like(rows.logits, dtype=torch.float32)
        rows = rows._replace(targets=torch.full_like(rows.targets, -1))  # the partials may have the target of the likeliest id
        self.backend.pull(rows, partials, Slopes.of_divergence(slope), memory)
        return memory

    def pull_unit(self, values: Tensor, out: Tensor) -> None:
        """Write the gradient of a factor of 1, see `Visit.slopes`. Of a log-prob of NaN it is 0, so that the factor says whether it
        is one."""
        partials = self.visit.found(values).partials
        self.backend.gradient(self.rows, partials, self.visit.slopes((~partials.logps.isnan()).float()), out)
        if self.visit.at is not None:
            self._put(out, 0.0)

    def fused(self, stage: TokenStage, out: Tensor | None) -> Tensor:
        """Losses of a token stage of these rows, see `Backend.fused`, and their gradient into `out`, which may be the logits."""
        return self.backend.fused(self.rows, stage, out)

    def add_tokens(self, result: Tensor, stage: TokenStage, out: Tensor | None) -> None:
        """`fused` of the tokens of these rows, into the results of all tokens, whose stage it is."""
        assert self.visit.tokens is not None
        gradient = out if out is None or not self.visit.apart else torch.empty_like(self.rows.logits)
        tokens, which, of_listed = self.visit.tokens.at(self.places)
        stage = stage.at(which)
        if of_listed is not None and stage.listed is not None and tokens.listed is not None:
            stage = stage._replace(listed=stage.listed.taken(of_listed, tokens.listed.offsets))
        result[:, which] += self._fused_tokens(tokens, stage, gradient)  # the others are 0
        if out is not None and gradient is not None and gradient is not out:
            out.copy_(gradient)

    def _fused_tokens(self, tokens: Tokens, stage: TokenStage, gradient: Tensor | None) -> Tensor:
        part = self.backend.fused_tokens(self.rows, tokens, stage, gradient)
        if part is None:
            own, z, shard = self.stream.own(tokens.pairs.slots), self.rows.logits[0], self.stream.shard
            logits = torch.zeros(own.ids.shape, device=z.device)
            if self.stream.columns:  # else of a rank without a part of the vocabulary
                logits = torch.where(own.ids >= 0, z[own.rows, own.ids.clamp(min=0)].float(), 0.0)
            logits = logits if shard is None else shard.sum_over_ranks(logits)
            part = fused_tokens(self.backend, self.rows, tokens, stage, logits, gradient, own)
        if not self.visit.apart:
            return part
        (logps, entropy, losses), weight = part, stage.rows.divergence_weight
        of_rows = None if weight is None else tokens.to_rows(torch.where(tokens.used, weight, 0.0))
        divergence = tokens.of_rows(self._divergence(of_rows, gradient))
        losses = losses if weight is None else losses + times(weight, divergence)
        return torch.stack([logps, entropy, losses, divergence])

    def _divergence(self, weight: Tensor | None, gradient: Tensor | None) -> Tensor:
        """The divergence of each row, fp32 [r], from the second stream that is read apart, of this weight in the loss. Its gradient
        is added."""
        assert self.second_of is not None
        rows = self.rows._replace(second=self.second_of())
        memory = None if gradient is None else torch.empty_like(rows.logits)
        weight = torch.zeros(rows.n, device=rows.logits.device) if weight is None else weight
        divergence = self.backend.fused(rows, TokenStage.divergence_alone(rows.targets, weight), memory)[3]
        if gradient is not None and memory is not None:
            gradient.add_(memory)
        return divergence

    def _outside(self) -> Tensor:
        """fp32 [2, r]: max and sum of transformed rows without the columns of `Visit.at`, which -inf replaces. 1 minus the
        probability of these columns would be the rounding of that, where they have nearly all of it."""
        x = self.rows.logits[0]
        x = x if self.stream.computed else x.to(torch.float32, copy=True)
        z = self.rows.transform.of_rows(x, x)
        self._put(z[None], -torch.inf)
        return self.backend.stats(LogitRows(z[None], self.rows.targets, self.rows.read), partials_of(())).values[:2]


def places_of(at: slice | Tensor, device: torch.device) -> Tensor:
    """Return the rows `at` as numbers, int64 [r]."""
    return torch.arange(at.start, at.stop, device=device) if isinstance(at, slice) else at


# ---- streams


@dataclass(eq=False)
class Stream(ABC):
    """tensors    those that may get a gradient.
    transform  of the rows.
    backend    of the kernels; of a shard with the exchange among ranks.
    shard      which part of a cut vocabulary the columns are."""

    tensors: Tensors
    transform: RowTransform
    backend: Backend
    shard: VocabShard | None

    #: Whether logits are computed for a visit: rows that need none are left out, and the memory is the visit's.
    computed = False

    def of(self, tensors: Tensors, transform: RowTransform) -> Stream:
        """The same of other tensors."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), tensors=tensors, transform=transform)
        return other

    def plain(self) -> Stream:
        """Without gradients and the wrappers of torch.func, as a second stream is."""
        return self.of(tuple(None if x is None else plain(x.detach()) for x in self.tensors), self.transform.plain())

    @property
    @abstractmethod
    def columns(self) -> int:
        """Of this process."""

    @property
    @abstractmethod
    def n(self) -> int:
        """Number of rows."""

    @property
    def vocab(self) -> int:
        """Ids that a target may have."""
        return self.columns if self.shard is None else self.shard.vocab

    @property
    def kernels(self) -> Backend:
        """The backend without an exchange."""
        return getattr(self.backend, "backend", self.backend)

    def own(self, slots: Ragged) -> Ragged:
        """Slots as this process's columns."""
        return slots.columns(0 if self.shard is None else self.shard.start, self.columns)

    def own_ids(self, at_ids: AtIds | None) -> AtIds | None:
        """The same with their values."""
        return None if at_ids is None else (self.own(at_ids[0]), at_ids[1])

    @abstractmethod
    def at(self, slots: Ragged) -> Tensor:
        """fp32 [m]: this process's logits at its own slots; arbitrary values where a slot is not in use."""

    def at_all_ranks(self, slots: Ragged) -> Tensor:
        """fp32 [k]: logits at slots, whichever rank has them; 0 where a slot is not in use."""
        own = self.own(slots)
        logits = torch.where(own.ids >= 0, self.at(own), 0.0)
        return logits if self.shard is None else self.shard.sum_over_ranks(logits)

    def logits_at(self, visit: Visit) -> LogitsAt:
        """The logits at the further ids of a visit."""
        slots = visit.at
        assert slots is not None
        at = LogitsAt(slots, self.at_all_ranks(slots), (slots.ids >= 0) & (slots.ids < self.vocab))
        return at if visit.tokens is None else at.with_likeliest(self.transform)

    @abstractmethod
    def stats(self, visit: Visit) -> Found:
        """Partials of all rows; a row that is not read has log-prob and entropy 0."""

    @abstractmethod
    def gradients(self, wanted: tuple[bool, ...], parts: Parts) -> Any:
        """Memory for the gradients of `tensors`, with `wanted` for each."""

    @abstractmethod
    def pull(self, visit: Visit, found: Found, slopes: Slopes, gradients: Any, at_ids: AtIds | None) -> None:
        """Add the gradients that slopes give; those of rows that are not read are 0. `at_ids`: the gradient of the logits at
        ids of rows but for that of divergences, in place of what the other slopes say there."""

    @abstractmethod
    def fused(self, visit: Visit, stage: TokenStage, gradients: Any) -> Tensor:
        """Losses of all rows of a token stage, see `Backend.fused`, and their gradients where these are wanted."""


# ---- logits that are given


#: Bytes of the rows that are taken at a time, as fp32, where they are not taken as they lie.
BLOCK_BYTES = {"cpu": 16 << 20, "cuda": 300 << 20}


class LogitsGradient(Gradients):
    """The gradient of logits [A, T, V]: in their memory or other, or of a few positions."""

    def __init__(self, logits: Tensor, inplace: bool, wanted: tuple[bool, ...], parts: Parts) -> None:
        self.logits, self.inplace, self.wanted, self.twice = logits, inplace, wanted, parts.twice
        self.dtype = torch.float32 if parts.wholes > 1 else logits.dtype
        self.out: Tensor | None = None

    def rows(self) -> Tensor:
        """Memory, all of which the first caller is going to write, and others are to add to."""
        if self.out is None:
            x = self.logits
            self.out = x.detach() if self.inplace else empty_like(x.detach(), self.dtype)
        return self.out

    def made(self) -> tuple[Tensor | LateGradient | None, ...]:
        if not self.wanted[0]:
            return (None,)
        if self.few is not None:
            x, few = self.logits.detach(), self.few
            if self.out is None and not self.inplace:  # the only part
                shape, dtype, device = x.shape, x.dtype, x.device
                return (lambda factor: _added(zeros(shape, dtype, device), *few, factor),)
            self.out = _added(x.zero_() if self.out is None else self.out, *few)
        if self.inplace:
            torch.autograd.graph.increment_version(self.logits)
        return (self.out,)


def _added(out: Tensor, slots: Ragged, values: Tensor, factor: Tensor | None = None) -> Tensor:
    """Logits [A, T, V] with values [m], times a factor, added at slots."""
    if out.shape[-1]:  # else of a rank without a part of the vocabulary
        # Slots that are not in use add 0: to leave them out, the host would have to know them.
        used = torch.where(slots.ids >= 0, values, 0.0)
        used = used if factor is None else used * factor
        out.index_put_(slots.positions(out.shape[1]), used.to(out.dtype), accumulate=True)
    return out


@dataclass(eq=False)
class Logits(Stream):
    """Rows of given logits [A, T, V]. `inplace`: their gradient goes into their memory."""

    inplace: bool = False

    @property
    def logits(self) -> Tensor:
        return self.tensors[0]

    @property
    def columns(self) -> int:
        return int(self.logits.shape[-1])

    @property
    def n(self) -> int:
        return self.logits.shape[:2].numel()

    def at(self, slots: Ragged) -> Tensor:
        if self.columns == 0:  # of a rank without a part of the vocabulary
            return torch.zeros(slots.ids.shape, device=self.logits.device)
        return self.logits[slots.positions(self.logits.shape[1])].float()

    def stats(self, visit: Visit) -> Found:
        if OUTSIDE[0] not in visit.names:  # as they lie, without the cost of a block
            return visit.found(self.backend.visit(self._rows(visit), visit.names).values)
        return visit.found(joined([block.stats() for block, _ in self._blocks(visit, None)], 1))

    def gradients(self, wanted: tuple[bool, ...], parts: Parts) -> LogitsGradient:
        return LogitsGradient(self.logits, self.inplace, wanted, parts)

    def pull(self, visit: Visit, found: Found, slopes: Slopes, gradients: LogitsGradient, at_ids: AtIds | None) -> None:
        is_first, twice, out, at = gradients.out is None, gradients.twice, gradients.rows(), self.own_ids(at_ids)
        if not twice and (at is None or slopes.get("divergence") is None):  # as they lie
            self.backend.gradient(self._rows(visit), found.partials, slopes, out)
            if at is not None:
                write_at(out, *at)
            return
        few, gradients.few, part = gradients.few, None, torch.empty(0)
        for block, to in self._blocks(visit, out):
            assert to is not None
            if not twice or (is_first and to.dtype == torch.float32):
                part = to
            elif part.shape != to.shape:
                part = torch.empty_like(to, dtype=torch.float32)
            block.pull(found.values[:, block.at], slopes.at(block.at), part, None if at is None else block.at_slots(at))
            part = part if few is None else _added(part, *block.at_slots(few))  # before it is rounded
            to.copy_(part if is_first else part.add_(to))

    def fused(self, visit: Visit, stage: TokenStage, gradients: LogitsGradient) -> Tensor:
        out, rows = gradients.rows() if gradients.wanted[0] else None, self._rows(visit)
        if not visit.apart:
            tokens = visit.tokens
            at_once = (
                self.backend.fused(rows, stage, out) if tokens is None else self.backend.fused_tokens(rows, tokens, stage, out)
            )
            if at_once is not None:
                return at_once
        result = visit.no_losses()
        for block, to in self._blocks(visit, out):
            if visit.tokens is None:
                result[:, block.at] = block.fused(stage.at(block.at), to)
            else:
                block.add_tokens(result, stage, to)
        return result

    def _rows(self, visit: Visit) -> LogitRows:
        second = None if visit.one is None else self._second(visit.one)
        return LogitRows(self.logits, visit.targets, visit.read, self.transform, second)

    @staticmethod
    def _second(other: Other) -> Second:
        assert isinstance(other.stream, Logits)
        return other.second(other.stream.logits, other.stream.transform)

    def _blocks(self, visit: Visit, out: Tensor | None) -> Iterator[tuple[Block, Tensor | None]]:
        """Blocks [1, r, V] of the rows of a visit that have one stride, in fp32 where the second stream is read apart, and of `out`
        the same rows. The ranks of a shard take the same blocks, whatever the widths of their parts: each block has an
        exchange."""
        rows, x = self._rows(visit), self.logits
        A, T, V = x.shape
        limit = BLOCK_BYTES.get(x.device.type, BLOCK_BYTES["cuda"])
        size = max(1, limit // (4 * (V if self.shard is None else self.shard.vocab)))
        for a, t in product(range(A), range(0, T, size)):
            of = (slice(a, a + 1), slice(t, min(t + size, T)))
            at = slice(a * T + of[1].start, a * T + of[1].stop)

            def second_of(of: Any = of, at: slice = at) -> Second:
                assert visit.other is not None
                second = self._second(visit.other).at(at)
                return second._replace(logits=second.logits[of])

            own = rows.cut(at.start, at.stop)._replace(logits=x[of].float() if visit.apart else x[of], part=None)
            if own.second is not None:
                own = own._replace(second=own.second._replace(logits=own.second.logits[of]))
            yield Block(self, self.backend, visit, own, at, second_of), None if out is None else out[of]
