"""Ids that go with each row of a batch:

the set that a token was sampled from, a teacher's top-k, several targets.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain, zip_longest
from operator import sub
from typing import Any

import torch
from torch import Tensor

from .checks import (
    FLOATING,
    INTEGERS,
    INTEGRAL,
    as_mask,
    check_offsets,
    check_temperature,
    describe,
    inverse_temperatures,
    per_token,
    refuse_where,
    require,
    require_device,
    require_number,
    require_shape,
    require_tensor,
    require_whole,
    values_are_checked,
)

Rule = partial[Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class TokenSets:
    """A set of token ids for each row of a batch, and optionally a number for each id.

        sets = TokenSets.from_counts(ids, counts)  # from_padded, from_lists, from_logits, whole
        sets[:256], TokenSets.cat([a, b]), sets.to("cuda")

    ids      int32 or int64 [nnz]: the ids of row 0, then of row 1, ...; in a row each id
             once, in the order given.
    offsets  int32 or int64 [rows + 1], kept as int64: row i holds ids[offsets[i] : offsets[i + 1]].
    values   float [nnz], a number for each id (log-probs of a sampler or a teacher), or None.

    Rows are in the order of the flat rows of targets: row-major over [B, T], or packed [N]. A row
    without ids stands for the whole vocabulary: prompts, tools, tokens without a record.

    Raises ValueError, with the argument and the row, on dtypes, shapes and devices that disagree,
    offsets that do not rise from 0 to the number of ids, ids below 0 or twice in a row, and values
    that are NaN. What the host has to know of the sets is read here: on a GPU the constructor waits
    for the device once, and once more where ids do not ascend in their rows. Slices, `cat`, `to`
    and the other methods do not, unless they say so. Sets that are made in inference mode can be
    trained on outside of it.
    """

    ids: Tensor
    offsets: Tensor
    values: Tensor | None = None
    _starts: array = field(init=False, repr=False)
    _largest: int = field(init=False, repr=False)
    __repr__ = describe

    def __post_init__(self) -> None:
        given = (self.ids, self.offsets, self.values)
        self._set(*given, *_read_facts(*given))

    def _set(
        self, ids: Tensor, offsets: Tensor, values: Tensor | None, starts: array, largest: int
    ) -> None:
        """The fields, and what the host knows: the offsets, (a bound of) the largest id."""
        given = {
            "ids": _saveable(ids),
            "offsets": _saveable(offsets.long()),
            "values": _saveable(values),
        }
        self.__dict__.update(given, _starts=starts, _largest=largest)

    @classmethod
    def _of(cls, *parts: Any) -> TokenSets:
        """Sets of parts that are known to be valid."""
        made = object.__new__(cls)
        made._set(*parts)
        return made

    # ---- constructors

    @classmethod
    def from_counts(cls, ids: Tensor, counts: Tensor, values: Tensor | None = None) -> TokenSets:
        """Make sets from ids [nnz] and the number of ids of each row.

        The first counts[0] ids belong to row 0, the next counts[1] to row 1, and so on.

        counts   int32 or int64 [rows]; 0 = the whole vocabulary. ids and values as in the fields.

        This is what prime-rl sends (`SamplingMask`): bytes of int32, `torch.frombuffer(data,
        dtype=torch.int32)`, a count for each token of the prompt too, so shift them as the targets
        are shifted (`shift_sets`).
        """
        given = (ids, _offsets_of(counts), values)
        return cls._of(*given, *_read_facts(*given, "counts"))

    @classmethod
    def from_padded(cls, ids: Tensor, fill: int = -1, values: Tensor | None = None) -> TokenSets:
        """Make sets from padded ids [rows, K] or [B, T, K], int32 or int64.

        fill     the id of padding, at any place; a row of padding only stands for the whole
                 vocabulary.
        values   float, the shape of ids; values at padding are dropped.

        Waits for the device. SkyRL pads so, and prime-rl and TRL inside their trainers.
        """
        require_tensor("ids", ids, INTEGERS, "int32 or int64 [rows, K] or [B, T, K]")
        require(ids.dim() > 1, "ids", list(ids.shape), "pass padded sets, [rows, K] or [B, T, K].")
        given = ids != fill
        if values is not None:
            require_tensor("values", values, FLOATING, "floats, the shape of ids, or None")
            require_shape("values", values, ids.shape, "ids")
            values = values[given]
        return cls.from_counts(ids[given], given.flatten(0, -2).sum(-1), values)

    @classmethod
    def from_lists(
        cls,
        lists: Sequence[Any],
        values: Sequence[Any] | None = None,
        *,
        generated: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> TokenSets:
        """Sets of lists of ids, as engines return them: one list for each generated token. ids
        become int32.

            TokenSets.from_lists([[5, 9], None, [3]])  # one list for each row
            targets, generated = shift_targets(ids, mask=completion_mask)
            TokenSets.from_lists([o.sampling_mask.token_ids for o in outputs], generated=generated)

        lists       without `generated`: the ids of each row; None or an empty list = the whole
                    vocabulary. With it: the records of each sequence, a list of such lists, or None
                    for a sequence without a record.
        values      the same with a float for each id, or None.
        generated   bool [B, T] or packed [N], the shape of targets: True where the target of a row
                    was generated, as `shift_targets` returns it. The records of sequence b go to
                    its True rows in their order, and all other rows stand for the whole vocabulary.
        cu_seqlens  int32 or int64 [B + 1] of packed rows. Packed without it, lists are the records
                    of all rows, one after another.
        device      the device of the sets; None: the device of `generated`, or the CPU.

        vLLM: `CompletionOutput.sampling_mask.token_ids`; SGLang:
        `meta_info["output_token_sampling_mask"]`, and with sampling_logprobs_mode="support"
        `output_token_sampling_logprobs` as values. Raises ValueError where a sequence has not as
        many records as generated tokens: cut both alike, and add None for a token that was
        appended.
        """
        (ids, counts), told = _listed("lists", lists, generated, cu_seqlens), None
        if ids.numel():
            require_tensor("lists", ids, INTEGERS, "lists of integer ids", "holds")
            largest = max(int(ids.max()), -int(ids.min()))  # -2^63 is its own absolute value
            if largest > torch.iinfo(torch.int32).max:
                raise ValueError(f"lists holds ids up to {largest}: from lists ids become int32.")
        if values is not None:
            told, value_counts = _listed("values", values, generated, cu_seqlens)
            pairs = enumerate(zip_longest(value_counts.tolist(), counts.tolist()))
            for row in [i for i, (x, y) in pairs if x != y][:1]:
                raise ValueError(
                    f"values has {len(value_counts)} rows, and lists {len(counts)}, of other lengths from"
                    f" row {row} on: pass one number for each id."
                )
            told = told.float()
        where = device if device is not None or generated is None else generated.device
        return cls.from_counts(ids.to(torch.int32), counts, told).to(where or "cpu")

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        temperature: float | Tensor = 1.0,
        order: str = "vllm",
        targets: Tensor | None = None,
    ) -> TokenSets:
        """The ids that a sampler keeps of these logits, ascending, as int32: for a sampler of your
        own, and for trainers that filter again (NeMo-RL). Recorded sets are better where there are
        any: logits that differ in the last bit move ids at the edge.

        logits       float [..., V], of any leading shape, after scale and softcap, before the
                     temperature.
        top_k        keeps the k largest, and all that equal the last of them; None, 0, -1 or >= V =
                     all.
        top_p        keeps the shortest run of largest probabilities that add up to it, of equal
                     ones those with small ids first; None or 1 = all.
        min_p        keeps probabilities of at least min_p times the largest; None or 0 = all.
        temperature  divides the logits first: a number > 0, or a tensor > 0 of the leading shape or
                     one for each sequence. The order "vllm" takes at least 0.01, as vLLM does. A
                     greedy sampler is top_k=1.
        order        "vllm": min_p, then top_k, then top_p of what is left, renormalised. "sglang":
                     top_k and top_p both of all probabilities; with a min_p top_k, top_p and min_p
                     one after another, each of what is left, renormalised.
        targets      integers of the leading shape that are put into their sets; ids outside of [0,
                     V) are passed over.

        No row is empty, unless nothing is asked for (top_k, top_p and min_p all keep everything):
        then all are. Logits of -inf are never kept. Works in chunks of rows: no copy of the logits
        is made. Waits for the device.
        """
        require_tensor("logits", logits, FLOATING, "a float tensor [..., V]")
        fine = logits.dim() > 0 and logits.shape[-1] > 0
        require(
            fine,
            "logits.shape",
            list(logits.shape),
            "pass a float tensor [..., V] of at least one id.",
        )
        shape, vocab = logits.shape[:-1], logits.shape[-1]
        rules, at_once = _rules(vocab, top_k, top_p, min_p, order)
        if targets is not None:
            require_tensor("targets", targets, INTEGRAL, "integers of the logits' leading shape")
            require_shape("targets", targets, shape, "the leading part of the logits")
        check_temperature(temperature)
        inverse_temperatures(
            temperature, shape, None, None, logits.device
        )  # refuses what is none for these rows
        t = per_token("temperature", torch.as_tensor(temperature, device=logits.device), shape)
        t = t.clamp(min=COLDEST) if order == "vllm" else t
        if not rules or not len(t):
            return cls.whole(len(t), device=logits.device)
        as_given = isinstance(temperature, int | float) and temperature == 1
        found, row = [], 0
        for chunk in _row_chunks(logits.detach(), max(1, CHUNK // vocab)):
            rows = slice(row, row + len(chunk))
            wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
            forced = None if targets is None else targets.flatten()[rows, None]
            found.append(
                _kept_of(wide if as_given else wide / t[rows, None], rules, at_once, forced, row)
            )
            row = rows.stop
        return cls.from_counts(*map(torch.cat, zip(*found, strict=True)))

    @classmethod
    def whole(cls, rows: int, *, device: torch.device | str | None = None) -> TokenSets:
        """Sets of `rows` rows that all stand for the whole vocabulary, on `device` (None = CPU)."""
        require_whole("rows", rows, "the number of rows is a whole number of at least 0.", 0)
        ids = torch.empty(0, dtype=torch.int32, device=device)
        offsets = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        return cls._of(ids, offsets, None, array("q", bytes(8 * (rows + 1))), -1)

    @classmethod
    def cat(cls, parts: Sequence[TokenSets]) -> TokenSets:
        """The rows of all parts, one part after another. All have values or none has."""
        fine = len(parts) > 0 and all(isinstance(part, TokenSets) for part in parts)
        require(fine, "parts", [type(part).__name__ for part in parts], "pass a list of TokenSets.")
        devices = [str(part.ids.device) for part in parts]
        require(
            len(set(devices)) == 1,
            "parts",
            devices,
            "they are on different devices: move them to one.",
        )
        without = [i for i, part in enumerate(parts) if part.values is None]
        if 0 < len(without) < len(parts):
            remedy = (
                "all parts have values or none: give it some (with_values), or drop the others'"
                " with with_values(None)."
            )
            raise ValueError(f"parts[{without[0]}] has no values, but others have: {remedy}")
        offsets = _offsets_of(torch.cat([part.counts for part in parts]))
        starts = array(
            "q", accumulate(chain.from_iterable(part._counts for part in parts), initial=0)
        )
        values = None if without else torch.cat([part.values for part in parts])  # type: ignore[misc]
        ids = torch.cat([part.ids for part in parts])
        return cls._of(ids, offsets, values, starts, max(part._largest for part in parts))

    # ---- what the host knows

    @property
    def rows(self) -> int:
        """Number of rows, empty ones included."""
        return self.offsets.shape[0] - 1

    def __len__(self) -> int:
        return self.rows

    @cached_property
    def _counts(self) -> list[int]:
        return [
            *map(sub, self._starts[1:], self._starts[:-1])
        ]  # Python numbers alone: under fake tensors they stay such

    @property
    def longest(self) -> int:
        """Number of ids of the longest row, 0 where there is none.

        A Python number, known without asking the device.
        """
        return max(self._counts, default=0)

    @property
    def empty_rows(self) -> int:
        """Number of rows without ids, which stand for the whole vocabulary.

        A Python number, known without asking the device.
        """
        return self._counts.count(0)

    @property
    def largest_id(self) -> int:
        """The largest id, -1 where there is none; of slices and selections that of the whole, an
        upper bound. A Python number, known without asking the device.
        """
        return self._largest

    # ---- rows cut out

    def __getitem__(self, rows: Any) -> TokenSets:
        """Sets of some rows: `sets[a:b]`, `sets[index]` with integers in any order, `sets[mask]`
        with a bool of the shape of targets. A slice waits for no device; of an index or a mask the
        host reads the values, which waits if they are on one.
        """
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.rows)
            if step == 1:
                stop = max(start, stop)
                first, last = self._starts[start], self._starts[stop]
                starts = array("q", [at - first for at in self._starts[start : stop + 1]])
                return self._changed(
                    lambda x: x[first:last], self.offsets[start : stop + 1] - first, starts
                )
            rows = range(start, stop, step)
        numbers = torch.as_tensor(
            rows, dtype=None if isinstance(rows, Tensor | int) or len(rows) else torch.int64
        )
        remedy = (
            "pass a slice, integers, or a bool of the shape of targets. For one row, sets[i : i"
            " + 1]."
        )
        if numbers.is_floating_point() or numbers.is_complex() or numbers.dim() == 0:
            raise ValueError(f"rows is {numbers.dtype} {list(numbers.shape)}: {remedy}")
        try:
            return self.take(torch.arange(self.rows)[numbers.flatten().cpu()])
        except IndexError as error:
            raise ValueError(f"there are {self.rows} rows, but {error}: {remedy}") from None

    def _changed(
        self, change: Callable[[Tensor], Tensor], offsets: Tensor, starts: array
    ) -> TokenSets:
        """Sets of ids and values that `change` makes of these, cut into rows at `offsets`."""
        values = None if self.values is None else change(self.values)
        return self._of(change(self.ids), offsets, values, starts, self._largest)

    def take(self, index: Tensor) -> TokenSets:
        """Row index[i] as row i; -1 is a row without ids.

        `index`: int64 [n] in [-1, rows), which the host reads.
        """
        index = index.cpu()
        starts = torch.frombuffer(self._starts, dtype=torch.int64)
        first, last = starts[index.clamp(min=0)], starts[index + 1]  # of -1: both 0
        counts = last - first
        offsets = _offsets_of(counts)
        device, nnz = self.ids.device, int(offsets[-1])
        shifts = (
            (first - offsets[:-1]).to(device).repeat_interleave(counts.to(device), output_size=nnz)
        )
        at = shifts + torch.arange(nnz, device=device)
        return self._changed(lambda x: x[at], offsets.to(device), array("q", offsets.tolist()))

    # ---- as tensors: nothing here waits for the device

    @property
    def counts(self) -> Tensor:
        """int64 [rows]: number of ids of each row, 0 for the whole vocabulary."""
        return self.offsets.diff()

    @property
    def row_of(self) -> Tensor:
        """int64 [nnz]: the row of each id. Made anew at each call."""
        return torch.repeat_interleave(self.counts, output_size=self.ids.shape[0])

    def padded(self, fill: int = -1) -> Tensor:
        """[rows, longest] of the dtype of ids:

        the ids of each row in their order, then `fill`. Undone by `from_padded`.
        """
        filled = torch.arange(self.longest, device=self.ids.device) < self.counts[:, None]
        return torch.full_like(filled, fill, dtype=self.ids.dtype).masked_scatter_(filled, self.ids)

    def mask(self, vocab: int) -> Tensor:
        """bool [rows, vocab]: True for the ids of a row, and all over a row without ids. For tests
        and small vocabularies: at 150,000 ids a row takes 150 kB.
        """
        require_whole("vocab", vocab, "the size of the vocabulary is a whole number.")
        check_ids("ids", self, vocab)
        held = (self.counts == 0)[:, None].repeat(1, vocab)
        held[self.row_of, self.ids.long()] = True
        return held

    def contains(self, targets: Tensor) -> Tensor:
        """bool [rows]: whether each of `targets`, integers with one element for each row, is in the
        set of its row. A row without ids holds everything.
        """
        _check_tokens(targets, self)
        row = self.row_of
        # The number of hits before each row; an id occurs once in a row.
        hits = _offsets_of((self.ids == targets.flatten()[row]).long())[self.offsets]
        return (hits.diff() > 0) | (self.counts == 0)

    def holds(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return whether each of `ids`, integers [k], is in the set of its row, int64 [k]: bool
        [k]. A row without ids holds nothing here.
        """
        keys = torch.stack([self.row_of, self.ids.long()])
        wanted = torch.stack([rows, ids.long()])
        width = torch.cat([keys[1], wanted[1], keys.new_zeros(1)]).amax() + 1
        return torch.isin(wanted[0] * width + wanted[1], keys[0] * width + keys[1])

    # ---- other places, other values

    def _apply(self, change: Callable[[Tensor], Tensor]) -> TokenSets:
        """The sets with each tensor changed in a way that keeps its numbers."""
        return self._changed(change, change(self.offsets), self._starts)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TokenSets:
        """The sets on another device.

        `non_blocking` as in Tensor.to: from pinned memory the host goes on at once.
        """
        return self._apply(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TokenSets:
        """The sets in page-locked memory, for `to(device, non_blocking=True)`."""
        return self._apply(lambda x: x.pin_memory())

    def with_values(self, values: Tensor | None) -> TokenSets:
        """These ids with other values: float [nnz] on the same device, a gradient may flow through
        them; None = without. NaN is refused; on a GPU, where that waits for the device, only with
        GRPO_KERNELS_CHECK=1.
        """
        checked = values is not None and values_are_checked(values)
        (_read_facts if checked else _check_form)(self.ids, self.offsets, values)
        return self._of(self.ids, self.offsets, values, self._starts, self._largest)

    def same_ids(self, other: TokenSets) -> bool:
        """Whether the sets of the other are the same, in the same order; waits for a device, unless
        their ids are one tensor.
        """
        same = self.ids is other.ids or (
            self.ids.shape == other.ids.shape and torch.equal(self.ids, other.ids)
        )
        return self._starts == other._starts and same

    def __copy__(self) -> TokenSets:
        return self._apply(lambda x: x)

    def __reduce__(self) -> Any:
        """For pickle and deepcopy:

        of a slice only the ids that are in it, and values without their history.
        """
        own = self._apply(lambda x: _alone(x.detach()))
        return TokenSets._of, (own.ids, own.offsets, own.values, own._starts, own._largest)


# ---- sets of a batch


def check_sets(name: str, sets: Any, targets: Tensor, vocab: int | None = None) -> None:
    """Raise ValueError unless `sets`, the argument `name`, are TokenSets on the device of targets,
    a row for each of them, all ids inside the vocabulary (if its size is given). The host knows
    what it takes: the device is only read to name what is wrong, and of a part of larger sets which
    has a large id elsewhere.
    """
    if not isinstance(sets, TokenSets):
        raise ValueError(
            f"{name} is a {type(sets).__name__}: pass TokenSets, for example"
            " TokenSets.from_padded(ids)."
        )
    _check_tokens(targets, sets, name)
    if vocab is not None:
        check_ids(name, sets, vocab)


def _check_tokens(targets: Tensor, sets: TokenSets, name: str = "these sets") -> None:
    require_tensor("targets", targets, INTEGRAL, "a tensor of integers")
    if targets.numel() != sets.rows:
        raise ValueError(
            f"targets of shape {list(targets.shape)} has {targets.numel()} tokens, but {name} have"
            f" {sets.rows} rows: there is one for each token, row-major, an empty one where nothing"
            " is known."
        )
    if targets.device != sets.ids.device:
        raise ValueError(
            f"{name} are on {sets.ids.device}, but targets is on {targets.device}: pass"
            f" sets.to({str(targets.device)!r})."
        )


def check_ids(name: str, sets: TokenSets, vocab: int) -> None:
    """Raise ValueError if an id is outside of [0, vocab)."""
    if sets.largest_id < vocab:
        return
    for at in (sets.ids >= vocab).nonzero()[:1, 0].tolist():
        row = int(sets.row_of[at])
        raise ValueError(
            f"{name} holds id {int(sets.ids[at])} in row {row}: it is outside of the vocabulary [0,"
            f" {vocab})."
        )


# ---- a target that is not in its set


def without_set(sets: TokenSets, targets: Tensor, missing: str | None) -> Tensor:
    """bool [rows]: rows that run over the whole vocabulary."""
    empty = sets.counts == 0
    return empty | ~sets.contains(targets) if missing == "full" else empty


def narrowed(
    sets: TokenSets, targets: Tensor, mask: Tensor | None, missing: str | None
) -> Tensor | None:
    """The mask without the rows that `missing` removes. Raises ValueError for missing="raise", for
    which the host waits on a GPU.
    """
    if missing not in ("mask", "raise"):
        return mask
    held = sets.contains(targets).view(targets.shape)
    if missing == "mask":
        return held if mask is None else mask & held
    if not torch.compiler.is_compiling():
        remedy = (
            " is not in its kept set, and missing='raise' (as in strict mode): keep what the"
            " sampler recorded, or pass missing='include' (the target joins its set), 'full' (the"
            " row runs over the whole vocabulary) or 'mask'."
        )
        refuse_where(~held if mask is None else mask & ~held, "targets", targets, remedy)
    return mask


# ---- what sets are made of


def _offsets_of(counts: Tensor) -> Tensor:
    """int64 [rows + 1]."""
    require_tensor(
        "counts", counts, INTEGERS, "int32 or int64 [rows], the number of ids of each row"
    )
    if counts.dim() != 1:
        raise ValueError(
            f"counts has shape {list(counts.shape)}: pass one number for each row, [rows]; of [B,"
            " T], counts.flatten()."
        )
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0, dtype=torch.int64)])


def _listed(
    name: str, lists: Sequence[Any], generated: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(the numbers of all rows, one after another; int64 [rows]: how many each has)."""
    records = [
        () if record is None else record for record in _records(name, lists, generated, cu_seqlens)
    ]
    try:
        flat = torch.tensor(list(chain.from_iterable(records)))
        reason = None if flat.dim() == 1 else "lists within lists within a list"
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error)
    if reason is not None:
        raise ValueError(
            f"{name} is not one list of numbers for each row ({reason}): records of sequences want"
            " generated=, the mask of the rows that they go to."
        )
    counts = torch.tensor([*map(len, records)], dtype=torch.int64)
    if generated is not None:
        counts = counts.new_zeros(generated.numel()).masked_scatter_(
            generated.flatten().cpu() != 0, counts
        )
    return flat, counts


def _records(
    name: str, lists: Any, generated: Tensor | None, cu_seqlens: Tensor | None
) -> list[Any]:
    """The records of all rows in their order, of those that were generated if these are known."""
    if isinstance(lists, str | bytes | Tensor) or not isinstance(lists, Sequence):
        raise ValueError(f"{name} is a {type(lists).__name__}: pass a list of lists.")
    if generated is None:
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens is given without generated: pass the mask of the rows whose target was"
                " generated, [N]."
            )
        return [*lists]
    if not isinstance(generated, Tensor) or generated.dim() not in (1, 2):
        got = (
            f"shape {list(generated.shape)}"
            if isinstance(generated, Tensor)
            else type(generated).__name__
        )
        raise ValueError(
            f"generated is {got}: pass a bool tensor of the shape of targets, [B, T] or packed [N]."
        )
    mask = as_mask("generated", generated, generated.shape)
    parts: Sequence[Tensor] = [*mask]
    if cu_seqlens is not None:
        check_offsets("generated", generated, cu_seqlens)
        parts = mask.split(cu_seqlens.diff().tolist())
    elif mask.dim() == 1:
        parts, lists = [mask], [lists]
    if len(lists) != len(parts):
        raise ValueError(
            f"{name} has {len(lists)} sequences, but generated has {len(parts)}: pass the records"
            " of each sequence."
        )
    found: list[Any] = []
    for b, (records, part) in enumerate(zip(lists, parts, strict=True)):
        tokens = int(part.sum())
        records = [None] * tokens if records is None else records
        remedy = "pass for each sequence a list that has a list of ids for each generated token."
        require(hasattr(records, "__len__"), f"{name}[{b}]", records, remedy)
        if len(records) != tokens:
            raise ValueError(
                f"{name}[{b}] has {len(records)} records, but generated marks {tokens} tokens of"
                f" sequence {b}: cut both alike, and add None for a token that was appended."
            )
        found += records
    return found


def _saveable(x: Tensor | None) -> Tensor | None:
    """`x`, contiguous, in a form that can be saved for a backward pass, which a tensor of inference
    mode cannot.
    """
    if x is None or not x.is_inference():
        return x if x is None else x.contiguous()
    with torch.inference_mode(False):
        return x.clone(memory_format=torch.contiguous_format)


def _alone(x: Tensor) -> Tensor:
    """`x` in a storage that holds nothing else."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


# ---- what may be wrong with them


def _check_form(
    ids: Tensor, offsets: Tensor, values: Tensor | None, given: str = "offsets"
) -> None:
    """Raise ValueError on types, dtypes, shapes and devices.

    No value is looked at. `given` is what the offsets came as.
    """
    require_tensor(
        "ids", ids, INTEGERS, "int32 or int64 [nnz], the ids of all rows one after another"
    )
    require_tensor(
        "offsets",
        offsets,
        INTEGERS,
        "int32 or int64 [rows + 1], where each row starts, and the end",
    )
    if ids.dim() != 1:
        padded = " Padded sets [rows, K] go through TokenSets.from_padded." if ids.dim() > 1 else ""
        raise ValueError(
            f"ids has shape {list(ids.shape)}: pass the ids of all rows one after another,"
            f" [nnz].{padded}"
        )
    if offsets.dim() != 1 or offsets.numel() < 1:
        raise ValueError(
            f"offsets has shape {list(offsets.shape)}: pass [rows + 1], a single 0 for no row."
        )
    require_device(given, offsets, ids.device, "ids")
    if values is not None:
        require_tensor("values", values, FLOATING, "floats, one number for each id, or None")
        require_shape("values", values, ids.shape, "ids")
        require_device("values", values, ids.device, "ids")


def _read_facts(
    ids: Tensor, offsets: Tensor, values: Tensor | None, given: str = "offsets"
) -> tuple[array[int], int]:
    """(offsets as numbers, largest id or -1). Raises ValueError on forms and values that cannot be;
    `given`: the offsets came as "offsets" or "counts". The host reads one tensor, and a second if
    ids do not ascend in their rows.
    """
    _check_form(ids, offsets, values, given)
    nnz, offsets = ids.numel(), offsets.long()
    bad = ids < 0 if values is None else (ids < 0) | values.isnan()
    starts_row = torch.zeros(nnz + 1, dtype=torch.bool, device=ids.device).index_fill_(
        0, offsets.clamp(0, nnz), True
    )
    descends = (ids[1:] <= ids[:-1]) & ~starts_row[1:-1]
    most = ids.max() if nnz else ids.new_full((), -1)
    read = torch.cat([offsets, most[None], (bad.any() | descends.any())[None]]).cpu()
    host, (largest, suspect) = read[:-2], read[-2:].tolist()
    counts, end = host.diff(), int(host[-1])
    if host[0] != 0:
        raise ValueError(
            f"offsets[0]={int(host[0])}: the ids of row 0 start at 0. (Of a part, subtract its"
            " first offset.)"
        )
    for row in (counts < 0).nonzero()[:1, 0].tolist():
        raise ValueError(f"{given} give row {row} {int(counts[row])} ids: a row has at least 0.")
    if end != nnz:
        raise ValueError(
            f"{given} give the rows {end} ids in all, but there are {nnz}: each id belongs to a"
            " row."
        )
    if suspect:  # a stable sort by id leaves rows ascending, so that two of one row are neighbours
        rows, order = (
            torch.repeat_interleave(offsets.diff(), output_size=nnz),
            ids.argsort(stable=True),
        )
        twice = (ids[order[1:]] == ids[order[:-1]]) & (rows[order[1:]] == rows[order[:-1]])
        for at in bad.index_fill_(0, order[1:][twice], True).nonzero()[:1, 0].tolist():
            name, x, remedy = "ids", ids, "an id may occur only once in a set."
            if ids[at] < 0:
                remedy = "ids are at least 0. Padded sets go through TokenSets.from_padded."
            elif values is not None and values[at].isnan():
                name, x, remedy = "values", values, "leave out ids without a number."
            raise ValueError(f"{name}[{at}]={x[at].item()}, in row {int(rows[at])}: {remedy}")
    return array("q", host.tolist()), largest


# ---- which ids a sampler keeps of logits. A rule is a function from z [n, V], logits over the
# temperature in which -inf is what went before, to the bool [n, V] of what it keeps of that (-inf
# stays away whatever it says). Each knows only differences of z: what is left is renormalised by
# itself

#: Logits of a chunk: 16 MB in fp32; temporaries take a few times as much.
CHUNK = 1 << 22
#: vLLM's smallest temperature.
COLDEST = 0.01


def _rules(
    vocab: int, top_k: int | None, top_p: float | None, min_p: float | None, order: str
) -> tuple[list[Rule], bool]:
    """(rules, without those that keep everything; whether all see the same probabilities, or each
    what the ones before left).
    """
    top_k, top_p, min_p = (
        0 if top_k is None else top_k,
        1.0 if top_p is None else top_p,
        min_p or 0.0,
    )
    require_whole("top_k", top_k, "it is a number of ids; None, 0 or -1 keeps all.", -1)
    require_number(
        "top_p",
        top_p,
        "it is a probability above 0, at most 1; None keeps all. A greedy sampler is top_k=1.",
        1e-30,
        1,
    )
    require_number(
        "min_p", min_p, "it is a share of the largest probability in [0, 1]; None keeps all.", 0, 1
    )
    require(
        order in ("vllm", "sglang"),
        "order",
        order,
        'samplers truncate differently: pass "vllm" or "sglang".',
    )
    k: list[Rule] = [partial(_by_top_k, k=int(top_k))] * (0 < top_k < vocab)
    p: list[Rule] = [partial(_by_top_p, p=float(top_p))] * (top_p < 1)
    m: list[Rule] = [partial(_by_min_p, p=float(min_p))] * (min_p > 0)
    return m + k + p if order == "vllm" else k + p + m, order == "sglang" and not m


def _by_top_k(z: Tensor, k: int) -> Tensor:
    return z >= z.topk(k).values[:, -1:]


def _by_min_p(z: Tensor, p: float) -> Tensor:
    return z >= z.amax(-1, keepdim=True) + math.log(p)


def _by_top_p(z: Tensor, p: float) -> Tensor:
    """The largest, as long as the mass before one is below p.

    Sums are fp64; only as many are sorted as are needed.
    """
    top, vocab = z.amax(-1, keepdim=True), z.shape[-1]
    needed = p * (z - top).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    width = min(64, vocab)
    while True:
        largest = z.topk(width).values
        mass = (largest - top).exp().double()
        count = (mass.cumsum(-1) - mass < needed).sum(-1, keepdim=True)
        if width == vocab or bool((count < width).all()):
            break
        width = min(8 * width, vocab)
    last = largest.gather(-1, count - 1)
    equal, above = z == last, z > last
    room = count - above.sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) > room).any()):
        equal &= equal.cumsum(-1) <= room
    return above | equal


def _kept_of(
    z: Tensor, rules: list[Rule], at_once: bool, targets: Tensor | None, row: int
) -> tuple[Tensor, Tensor]:
    """(ids of all rows, int32; how many each has) of a chunk z [n, V] that starts at `row`, with
    targets [n, 1] among them.
    """
    first, *more = rules
    if first.func is _by_top_k and not more and targets is None:
        k = first.keywords["k"]
        values, ids = z.topk(k + 1)  # one look at each id
        _refuse_endless(values[:, 0], row)  # a NaN is the largest of its row
        if not bool(
            (values[:, k - 1] == values[:, k]).any()
        ):  # else a set is of another size, as where both are -inf
            return ids[:, :k].sort(-1).values.to(torch.int32).flatten(), torch.full(
                (len(z),), k, device=z.device
            )
    _refuse_endless(z.amax(-1), row)
    kept = z > -math.inf
    for rule in rules:
        kept &= rule(z if at_once or rule is first else z.masked_fill(~kept, -math.inf))
    if targets is not None:
        at = targets.long().clamp(0, z.shape[-1] - 1)
        kept.scatter_(-1, at, kept.gather(-1, at) | (at == targets))
    return kept.nonzero()[:, 1].to(torch.int32), kept.sum(-1)


def _refuse_endless(largest: Tensor, row: int) -> None:
    """Raise ValueError where the largest logit of a row is no finite number.

    `row`: where the chunk starts, for messages.
    """
    for at in (~largest.isfinite()).nonzero()[:1, 0].tolist():
        raise ValueError(
            f"logits are NaN, +inf or all -inf in row {row + at}: there is nothing to sample from."
        )


def _row_chunks(logits: Tensor, size: int) -> Iterator[Tensor]:
    """Views [n, V] of at most `size` rows, in order, whatever the strides."""
    if logits.dim() == 1:
        yield logits[None]
    elif logits.dim() == 2 or logits.is_contiguous():
        yield from logits.flatten(0, -2).split(size)
    else:
        for part in logits:
            yield from _row_chunks(part, size)
