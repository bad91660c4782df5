"""Streams of rows of logits, the policy's and a reference's alike: given logits, and (hidden.py) hidden states with a head.

A stream visits rows over the whole vocabulary (`stats`, `pull`, and `fused`, which is both with a token stage between them), and
knows its logits at single positions (`at`). What it collects of its gradient is a `Gradients`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from ..formulas.ops import times
from ..formulas.token_stage import JointStage, TokenStage
from ..layout import plain
from ..token_sets import TokenSets
from .backends import Backend, FusedRows
from .memory import empty, zeros
from .parallel import VocabShard
from .partials import OUTSIDE, LogitRows, Partials, RowTransform, Second, Slopes, partials_of
from .ragged import Ragged, Tokens, write_at
from .selection import Sparse
from .tokens import ChunkOfTokens

Tensor = torch.Tensor
Tensors = tuple[Any, ...]  # of tensors and None

#: Bytes of the rows that are taken at a time, as fp32, out of logits that are there, beside several second streams.
BLOCK_BYTES = {"cpu": 16 << 20, "cuda": 300 << 20}


# ---- gradients, which may be computed in the backward, once its factor is known, because they are sparse or come in parts


@dataclass(frozen=True, eq=False)
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


class LateGradient(Protocol):
    """A gradient that is computed in the backward."""

    def made(self, factor: Tensor | None = None) -> Tensor | None:
        """The gradient times `factor` (0-d); None if autograd gets none."""


@dataclass(eq=False)
class SlotGradient:
    """The gradient of logits that is 0 but at a few positions: `values` [m] at `at`, indices into a tensor of `shape`."""

    shape: torch.Size
    dtype: torch.dtype
    at: tuple[Tensor, ...]
    values: Tensor

    @classmethod
    def of(cls, logits: Tensor, slots: Ragged, values: Tensor) -> SlotGradient:
        """That of logits [A, T, V] whose gradient at slots is `values`; 0 where one is not in use."""
        used = torch.where(slots.ids >= 0, values, 0.0)
        return cls(logits.shape, logits.dtype, slots.positions(logits.shape[1]), used)

    def made(self, factor: Tensor | None = None) -> Tensor:
        return self.add_to(zeros(self.shape, self.dtype, self.values.device), factor)

    def add_to(self, out: Tensor, factor: Tensor | None = None) -> Tensor:
        values = self.values if factor is None else self.values * factor
        if self.shape[-1]:  # else of a rank without a part of the vocabulary
            # Slots that are not in use add 0: to leave them out, the host would have to know them.
            out.index_put_(self.at, values.to(self.dtype), accumulate=True)
        return out


@dataclass(eq=False)
class WeightGradient:
    """d_weight [V, H], the sum of two parts.

    dense   of rows over the whole vocabulary, None if there are none; `into.total` itself where it was added to that.
    into    what the gradient is added into; None: memory of its own.
    slots, values   of rows with sets, or columns that were drawn: `values` [m] is the gradient of the logits at `slots`, from
            which a few rows of d_weight follow with `hidden`. None if there are none.
    """

    backend: Backend
    shape: torch.Size
    dtype: torch.dtype  # of memory of its own for rows with sets alone
    dense: Tensor | None
    into: WeightMemory | None
    device: torch.device
    hidden: Tensor | None
    slots: Ragged | None
    values: Tensor | None

    def __post_init__(self) -> None:
        self._version = _version(self.hidden)

    def made(self, factor: Tensor | None = None) -> Tensor | None:
        """The gradient times `factor` (0-d), in the dtype of its sum; where it was added into `into`, what autograd gets then.
        RuntimeError if hidden states that are needed for it were written to."""
        dense, values = self.dense, self.values
        if values is not None and _version(self.hidden) != self._version:
            raise RuntimeError(
                "hidden was written to in place between the forward and the backward, which needs it for the gradient of weight: "
                "call backward first, or write to a copy."
            )
        total = None if self.into is None else self.into.total
        if factor is not None and dense is not None:
            if dense is total:
                raise RuntimeError("a factor of the gradient is known only after it was added to other gradients.")
            self.backend.scale_(dense, factor)
        if factor is not None and values is not None:
            values = values * factor
        out = dense
        if total is not None:
            out = total if dense is None or dense is total else total.add_(dense)
        elif out is None:  # only the rows of slots are touched
            touched = 0 if values is None else values.numel()
            out = zeros(self.shape, self.dtype, self.device, touched)
        if values is not None:
            assert self.slots is not None and self.hidden is not None
            self.backend.add_hidden_rows(values, self.slots, self.hidden, out)
        return out if self.into is None else self.into.left_to_autograd()


def _version(x: Tensor | None) -> int | None:
    return None if x is None or x.is_inference() else x._version


class Gradients(ABC):
    """The gradients of a stream's tensors, to which visits add."""

    @abstractmethod
    def add(self, slots: Ragged, values: Tensor) -> None:
        """Add the gradient of the logits at slots, fp32 [m], where they are in use."""

    @abstractmethod
    def made(self) -> tuple[Tensor | LateGradient | None, ...]:
        """One for each tensor of the stream, None where it is not wanted."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The same at once, where the factor of the backward is in them."""
        return tuple(g if g is None or isinstance(g, Tensor) else g.made() for g in self.made())


# ---- second streams. The weight of one in each row is fp32 [n], at least 0; None: 1


def read_beside(weight: Tensor | None, read: Tensor | None) -> Tensor | None:
    """bool [n]: the rows of `read` where a second stream has a weight. The others it adds nothing to, and is not read in."""
    if weight is None:
        return read
    return plain(weight != 0 if read is None else read & (weight != 0))


def one_of(others: tuple[Other, ...]) -> Other | None:
    """The second stream that is read in the same visit: the only one, if it has no weight. The others are visited apart."""
    return others[0] if len(others) == 1 and others[0].weight is None else None


@dataclass(frozen=True, eq=False)
class Other:
    """A second stream of the same rows, for the divergence from it, and its weight in each row, see `times` and `read_beside`."""

    stream: Stream
    kind: str
    mixture: float
    weight: Tensor | None = None

    def second(self, logits: Tensor, transform: RowTransform) -> Second:
        return Second(logits, transform, self.kind, self.mixture)

    @property
    def names(self) -> tuple[str, ...]:
        """The partials that the divergence needs."""
        return partials_of(("divergence",), self.kind)


def slots_of(sets: TokenSets) -> Ragged:
    """The ids of sets, all of them in use."""
    return Ragged(sets.ids.to(torch.int64), sets.offsets, sets.row_of).plain()


class Known(NamedTuple):
    """A teacher that is known at some ids of each row: sets with its log-probs as values; and its weight in each row."""

    sets: TokenSets
    weight: Tensor | None = None

    @property
    def slots(self) -> Ragged:
        return slots_of(self.sets)


class Seconds(NamedTuple):
    """All second streams of a loss, whose divergences add up."""

    others: tuple[Other, ...] = ()
    known: tuple[Known, ...] = ()


@dataclass(frozen=True, eq=False)
class Whole:
    """A visit of rows over the vocabulary.

    read    bool [n]: the rows that are visited; None: all.
    names   of the partials that are made.
    others  second streams. One without a weight is read in the same visit; its partials are among the others.
    index   the rows that are visited, [m] int64; None: found from `read`, a host sync on a GPU.
    active  how many of `index`, from its first on, can have a slope; None: all. On a CPU, where it costs no wait, rows whose slopes
            are zero are left out of the products as well.
    at      further ids of rows, whose log-probs are wanted.
    sparse  how columns are drawn for the gradient; None: it has all. `padded`: see `selection.Draws`.
    all_rows  whether rows with sets are among them, which are visited over their sets as well.
    tokens  those of the rows, where these may have several, or terms at listed ids. The likeliest of a row's ids, which are those
            `at` it, stands in for its target.
    ahead   whether the gradient of hidden states is made in the forward, as if the slope of each log-prob were 1; the slope, which
            is known later, multiplies it."""

    targets: Tensor
    read: Tensor | None
    names: tuple[str, ...]
    others: tuple[Other, ...] = ()
    index: Tensor | None = None
    active: int | None = None
    at: Ragged | None = None
    tokens: Tokens | None = None
    sparse: Sparse | None = None
    padded: bool = False
    all_rows: bool = False
    ahead: bool = False

    @property
    def one(self) -> Other | None:
        """The second stream that is read in the same visit."""
        return one_of(self.others)

    @property
    def apart(self) -> tuple[Other, ...]:
        """Those that are visited after one another."""
        return () if self.one is not None else self.others

    def rows(self) -> Tensor:
        """int64 [m]: the rows that are visited."""
        if self.index is not None:
            return self.index
        n, device = self.targets.numel(), self.targets.device
        return torch.arange(n, device=device) if self.read is None else self.read.nonzero()[:, 0]


class Parts(NamedTuple):
    """What adds to the gradients of a stream.

    whole  a visit over the vocabulary, whose second streams take memory beside a chunk of logits; None: there is none.
    twice  whether rows are visited more than once. Sums are then fp32, and rounded once at the end.
    slots  whether gradients of logits at slots come as well."""

    whole: Whole | None
    twice: bool = False
    slots: bool = False


class Found(NamedTuple):
    """What a visit has made: partials, those beside each of `Whole.apart`, columns that were drawn, see `Draws.tensors`, and the
    gradient of hidden states of `Whole.ahead`, fp32 [n, H]."""

    partials: Partials
    apart: tuple[Partials, ...] = ()
    draws: tuple[Tensor, ...] = ()
    ahead: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Stream(ABC):
    """tensors    those that may get a gradient.
    transform  of the rows.
    backend    of the kernels; of a shard with the exchange among ranks.
    shard      which part of a cut vocabulary the columns are."""

    tensors: Tensors
    transform: RowTransform
    backend: Backend
    shard: VocabShard | None

    def of(self, tensors: Tensors, transform: RowTransform) -> Stream:
        """The same of other tensors."""
        return replace(self, tensors=tensors, transform=transform)

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

    @abstractmethod
    def at(self, slots: Ragged) -> Tensor:
        """fp32 [m]: this process's logits at its own slots; arbitrary values where a slot is not in use."""

    @abstractmethod
    def rows(self, at: Tensor) -> Tensor:
        """[c, V]: the logits of these rows."""

    @abstractmethod
    def stats(self, whole: Whole) -> Found:
        """Partials of all rows; a row that is not read has log-prob and entropy 0."""

    @abstractmethod
    def gradients(self, wanted: tuple[bool, ...], parts: Parts) -> Any:
        """Memory for the gradients of `tensors`, with `wanted` for each."""

    @abstractmethod
    def pull(self, whole: Whole, found: Found, slopes: Slopes, gradients: Any, at_ids: Tensor | None) -> None:
        """Add the gradients that slopes give; those of rows that are not read are 0. `at_ids`: the gradient of the logits at
        `whole.at`, in place of what the slopes say there."""

    @abstractmethod
    def fused(self, whole: Whole, stage: TokenStage | JointStage, gradients: Any) -> FusedRows:
        """Losses of all rows of a token stage, and their gradients; `gradients` None leaves these out. Logits take no JointStage:
        they are there, and cost no product to read again."""


def at_all_ranks(stream: Stream, slots: Ragged) -> Tensor:
    """fp32 [k]: logits at slots, whichever rank has them; 0 where a slot is not in use."""
    own = stream.own(slots)
    logits = torch.where(own.ids >= 0, stream.at(own), 0.0)
    return logits if stream.shard is None else stream.shard.sum_over_ranks(logits)


# ---- several second streams, one after the other


def beside(
    rows: LogitRows, at: Tensor, others: tuple[Other, ...], logits_of: Any
) -> Iterator[tuple[int, Tensor | None, LogitRows, Tensor]]:
    """For each second stream: (its place, which rows of a block have it or None for all, these rows beside it, their weights).

    rows  [1, c, V] in fp32, which are rows `at` of the batch. logits_of(stream, at): the logits of these rows of a stream."""
    for i, other in enumerate(others):
        weight = torch.ones_like(at, dtype=torch.float32) if other.weight is None else other.weight[at]
        read = weight != 0 if rows.read is None else rows.read & (weight != 0)
        # On devices other than a CPU this would synchronise the host.
        here = read.nonzero()[:, 0] if at.device.type == "cpu" else None
        if here is not None and here.numel() == 0:
            continue
        own = rows._replace(read=read)
        if here is not None and here.numel() < at.numel():
            at_here, weight = at[here], weight[here]
            own = LogitRows(rows.logits[:, here], rows.targets[here], None, rows.transform.at(here))
        else:
            here, at_here = None, at
        logits = logits_of(other.stream, at_here)[None]
        yield i, here, own._replace(second=other.second(logits, other.stream.transform.at(at_here))), weight


def _add(total: Tensor, here: Tensor | None, x: Tensor, dim: int = 0) -> None:
    """total += x, which are the places `here` of it, or all."""
    if here is None:
        total.add_(x)
    else:
        total.index_add_(dim, here, x)


def fused_beside(
    backend: Backend, rows: LogitRows, stage: TokenStage, out: Tensor | None, at: Tensor, others: tuple[Other, ...], logits_of: Any
) -> FusedRows:  # fmt: skip
    """`fused` of a backend for a block, as `beside` takes it, with several second streams: each adds weight * divergence. `out` may
    be the logits."""
    gradient = None if out is None else torch.empty_like(rows.logits)
    result = backend.fused(rows, stage, gradient)
    losses, divergence = result.losses.clone(), torch.zeros_like(result.losses)
    of_loss = stage.rows.divergence_weight
    for _, here, own, weight in beside(rows, at, others, logits_of):
        of_part = torch.zeros_like(weight) if of_loss is None else weight * (of_loss if here is None else of_loss[here])
        memory = None if gradient is None else torch.empty_like(own.logits)
        part = backend.fused(own, TokenStage.divergence_alone(own.targets, of_part), memory)
        assert part.divergence is not None
        _add(losses, here, part.losses)
        _add(divergence, here, times(weight, part.divergence))
        if gradient is not None and memory is not None:
            _add(gradient, here, memory, 1)
    if out is not None and gradient is not None:
        out.copy_(gradient)
    return FusedRows.of(result.logps, result.entropy, losses, divergence)


def pull_beside(
    backend: Backend, rows: LogitRows, found: Found, slopes: Slopes, out: Tensor, at: Tensor, others: tuple[Other, ...],
    logits_of: Any,
) -> None:  # fmt: skip
    """`pull` of a backend for a block, likewise. `found` and slopes are those of the block."""
    gradient, of_divergence = torch.empty_like(rows.logits), slopes.get("divergence")
    backend.gradient(rows, found.partials, slopes.without("divergence"), gradient)
    if of_divergence is not None:
        for i, here, own, weight in beside(rows, at, others, logits_of):
            partials, slope = found.apart[i], of_divergence
            if here is not None:
                partials, slope = partials.at(here), slope[here]
            memory, slope = torch.empty_like(own.logits), times(weight, slope)
            backend.pull(own, partials, Slopes.stacked({"target": torch.zeros_like(slope), "divergence": slope}), memory)
            _add(gradient, here, memory, 1)
    out.copy_(gradient)


def sums_outside(backend: Backend, z: Tensor, slots: Ragged, rows: LogitRows) -> Tensor:
    """fp32 [2, r]: max and sum of transformed rows z [r, V] without the columns of `slots`, which -inf replaces. 1 minus the
    probability of these columns would be the rounding of that, where they have nearly all of it."""
    below = torch.full((), -torch.inf, device=z.device).expand(slots.ids.shape)
    write_at(z, (slots.rows, slots.ids.clamp(min=0)), below, slots.ids >= 0)
    return backend.stats(LogitRows(z[None], rows.targets, rows.read), partials_of(())).values[:2]


# ---- logits that are there


class LogitsGradient(Gradients):
    """The gradient of logits [A, T, V]: in their memory or other, or of a few positions."""

    def __init__(self, logits: Tensor, inplace: bool, wanted: bool) -> None:
        self.logits, self.inplace, self.wanted = logits, inplace, wanted
        self.out: Tensor | None = None
        self.before: list[Tensor] = []  # of earlier visits
        self.few: SlotGradient | None = None

    def rows(self) -> Tensor:
        """Memory, all of which the caller is going to write."""
        if self.out is not None:
            self.before.append(self.out)
        x = self.logits
        self.out = x.detach() if self.inplace else empty(x.shape, x.dtype, x.device)
        return self.out

    def add(self, slots: Ragged, values: Tensor) -> None:
        few = SlotGradient.of(self.logits, slots, values)
        if self.out is None and not self.inplace and self.few is None:
            self.few = few  # the only part so far
            return
        if self.out is None:
            x = self.logits
            self.out = x.detach().zero_() if self.inplace else zeros(x.shape, x.dtype, x.device)
        few.add_to(self.out)

    def made(self) -> tuple[Tensor | LateGradient | None, ...]:
        if not self.wanted:
            return (None,)
        if self.out is not None:
            for x in self.before:
                self.out.add_(x)
        if self.inplace:
            torch.autograd.graph.increment_version(self.logits)
        return (self.few if self.out is None else self.out,)


@dataclass(frozen=True, eq=False)
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
        return self.logits[slots.positions(self.logits.shape[1])].to(torch.float32)

    def rows(self, at: Tensor) -> Tensor:
        T = self.logits.shape[1]
        return self.logits[at // T, at % T]

    def stats(self, whole: Whole) -> Found:
        rows, n = self._rows(whole), whole.targets.numel()
        partials = self.backend.visit(rows, whole.names)
        apart = []
        for other in whole.apart:
            read = read_beside(other.weight, whole.read)
            apart.append(self.backend.visit(rows._replace(read=read, second=self._second(other)), other.names))
        if OUTSIDE[0] in whole.names:
            for lo, hi, block in self._blocks(n):
                z = rows.cut(lo, hi).transform.of_rows(block, torch.empty(block.shape, device=block.device))
                assert whole.at is not None
                slots = self.own(whole.at).of_rows(lo, hi)
                z = z.clone() if z is block else z
                partials.put(OUTSIDE, sums_outside(self.backend, z, slots, rows.cut(lo, hi)), slice(lo, hi))
        return Found(partials, tuple(apart))

    def gradients(self, wanted: tuple[bool, ...], parts: Parts) -> LogitsGradient:
        return LogitsGradient(self.logits, self.inplace, wanted[0])

    def pull(self, whole: Whole, found: Found, slopes: Slopes, gradients: LogitsGradient, at_ids: Tensor | None) -> None:
        rows, out, n = self._rows(whole), gradients.rows(), whole.targets.numel()
        if not whole.apart:
            self.backend.gradient(rows, found.partials, slopes, out)
        for lo, hi, _ in self._blocks(n) if whole.apart else ():
            of = slice(lo, hi)
            own = Found(found.partials.at(of), tuple(x.at(of) for x in found.apart))
            block, to, at = self._block(rows, lo, hi), self._block(rows, lo, hi, out).logits, self._places(lo, hi)
            pull_beside(self.backend, block, own, slopes.at(of), to, at, whole.apart, _rows_of)
        if at_ids is not None:
            assert whole.at is not None
            here = self.own(whole.at)
            used = here.ids >= 0 if whole.read is None else (here.ids >= 0) & whole.read[here.rows]
            write_at(out, here.positions(out.shape[1]), at_ids, used)

    def fused(self, whole: Whole, stage: TokenStage | JointStage, gradients: LogitsGradient | None) -> FusedRows:
        assert isinstance(stage, TokenStage)
        rows, out, n = self._rows(whole), None if gradients is None else gradients.rows(), whole.targets.numel()
        if not whole.apart and whole.tokens is None:
            return self.backend.fused(rows, stage, out)
        if whole.tokens is not None:
            at_once = self.backend.fused_tokens(rows, whole.tokens, stage, out)
            if at_once is not None:
                return at_once
        result = FusedRows.zeros(stage.rows.targets.numel(), self.logits.device, whole.apart or None)
        for lo, hi, _ in self._blocks(n):
            of, at = slice(lo, hi), self._places(lo, hi)
            if whole.tokens is not None:
                chunk = ChunkOfTokens.of(whole.tokens, stage, at)
                slots = chunk.slots._replace(rows=at[chunk.slots.rows])
                logits = at_all_ranks(self, slots)
                chunk.add_to(result, chunk.fused(self.backend, rows.cut(lo, hi), logits, out, self.own(slots)))
                continue
            block, to = self._block(rows, lo, hi), None if out is None else self._block(rows, lo, hi, out).logits
            result.put(of, fused_beside(self.backend, block, stage.at(of), to, at, whole.apart, _rows_of))
        return result

    def _rows(self, whole: Whole) -> LogitRows:
        second = None if whole.one is None else self._second(whole.one)
        return LogitRows(self.logits, whole.targets, whole.read, self.transform, second)

    @staticmethod
    def _second(other: Other) -> Second:
        assert isinstance(other.stream, Logits)
        return other.second(other.stream.logits, other.stream.transform)

    def _blocks(self, n: int) -> Iterator[tuple[int, int, Tensor]]:
        """(the first row, the end, the rows [r, V]) of blocks of rows in one stride. The ranks of a shard take the same blocks,
        whatever the widths of their parts: each block has an exchange."""
        A, T, V = self.logits.shape
        limit = BLOCK_BYTES.get(self.logits.device.type, BLOCK_BYTES["cuda"])
        size = max(1, limit // (4 * (V if self.shard is None else self.shard.vocab)))
        for a in range(A):
            for t in range(0, T, size):
                end = min(t + size, T)
                yield a * T + t, a * T + end, self.logits[a, t:end]

    def _block(self, rows: LogitRows, lo: int, hi: int, of: Tensor | None = None) -> LogitRows:
        """Rows lo to hi, which have one stride, as rows of their own: of the logits in fp32, or of `of` as it lies."""
        (a, t), x = divmod(lo, self.logits.shape[1]), self.logits if of is None else of
        logits = x[a : a + 1, t : t + hi - lo]
        return rows.cut(lo, hi)._replace(logits=logits.to(torch.float32) if of is None else logits, part=None)

    def _places(self, lo: int, hi: int) -> Tensor:
        return torch.arange(lo, hi, device=self.logits.device)


def _rows_of(stream: Stream, at: Tensor) -> Tensor:
    return stream.rows(at)
