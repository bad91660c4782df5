"""Sets of token ids, one for each row: candidate sets, a teacher's top-k, extra ids of a loss."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Any, NamedTuple

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
    require_shape,
    require_tensor,
    require_whole,
    values_are_checked,
)
from .sampler_filters import SamplerFilters

#: Logits that `TokenSets.from_logits` filters at a time: 16 MB in fp32. Temporaries take a few
#: times as much.
LOGITS_OF_CHUNK = 1 << 22

#: vLLM raises lower temperatures to this one.
LOWEST_TEMPERATURE = 0.01


@dataclass(frozen=True, eq=False, repr=False)
class TokenSets:
    """A set of token ids for each row of a batch, and optionally a number for each id.

    The sets have different sizes, so all ids are in one flat list, row after row.

        sets = TokenSets.from_counts(ids, counts)  # from_padded, from_lists, from_logits, whole
        sets[:256], TokenSets.cat([a, b]), sets.to("cuda")

    ids      int32 or int64 [nnz]: the ids of row 0, then of row 1, ... A row lists an id at most
             once, in any order, which is kept.
    offsets  int32 or int64 [rows + 1], kept as int64: row i has ids[offsets[i] : offsets[i + 1]].
    values   float [nnz], a number for each id (log-probs of a sampler or a teacher), or None.

    Rows are in the order of the flat rows of targets: row-major over [B, T], or packed [N]. A row
    without ids stands for the whole vocabulary: prompts, tools, tokens without a record.

    The constructor copies the offsets and the largest id to the host, and checks the ids. On a GPU
    it waits for the device once, and a second time if the ids of a row do not ascend. Slices,
    `cat`, `to` and the other methods do not wait, unless they say so. Sets that were made in
    inference mode can be used in training.

    Raises ValueError, with the argument and the row, if dtypes, shapes or devices disagree, if
    offsets do not rise from 0 to the number of ids, if an id is below 0 or twice in a row, and if a
    value is NaN.
    """

    ids: Tensor
    offsets: Tensor
    values: Tensor | None = None
    #: The offsets on the host.
    _host_offsets: array = field(init=False, repr=False)
    #: See `largest_id`.
    _largest_id: int = field(init=False, repr=False)
    __repr__ = describe

    def __post_init__(self) -> None:
        """Check the fields, and copy to the host what later methods need to know of them."""
        facts = check_sets_and_read_facts(self.ids, self.offsets, self.values)
        self._set_fields(self.ids, self.offsets, self.values, facts.offsets, facts.largest_id)

    def _set_fields(
        self,
        ids: Tensor,
        offsets: Tensor,
        values: Tensor | None,
        host_offsets: array,
        largest_id: int,
    ) -> None:
        """Set all fields. The dataclass is frozen, so they are written into its __dict__.

        ids, offsets, values   the ids of all rows in one list, where each row starts, and a number
                               for each id or None
        host_offsets           the offsets as numbers on the host
        largest_id             the largest id, or an upper bound; -1 if there is none
        """
        self.__dict__.update(
            ids=usable_in_backward(ids),
            offsets=usable_in_backward(offsets.long()),
            values=None if values is None else usable_in_backward(values),
            _host_offsets=host_offsets,
            _largest_id=largest_id,
        )

    @classmethod
    def _from_checked(
        cls,
        ids: Tensor,
        offsets: Tensor,
        values: Tensor | None,
        host_offsets: array,
        largest_id: int,
    ) -> TokenSets:
        """Make sets of fields that are known to be valid, without a check.

        The constructor would check them, for which the host waits for a GPU.

        host_offsets   the offsets as numbers on the host
        largest_id     the largest id, or an upper bound; -1 if there is none
        """
        sets = object.__new__(cls)  # without __post_init__, which checks the fields
        sets._set_fields(ids, offsets, values, host_offsets, largest_id)
        return sets

    # ---- constructors

    @classmethod
    def from_counts(cls, ids: Tensor, counts: Tensor, values: Tensor | None = None) -> TokenSets:
        """Make sets from ids [nnz] and the number of ids of each row.

        The first counts[0] ids belong to row 0, the next counts[1] to row 1, and so on.

        counts   int32 or int64 [rows]. 0 stands for the whole vocabulary. ids and values are as in
                 the fields.

        prime-rl sends sets in this form (`SamplingMask`): bytes of int32, which
        `torch.frombuffer(data, dtype=torch.int32)` reads. Its counts include the tokens of the
        prompt, so shift the sets as the targets are shifted (`shift_sets`).
        """
        offsets = offsets_from_counts(counts)
        facts = check_sets_and_read_facts(ids, offsets, values, offsets_name="counts")
        return cls._from_checked(ids, offsets, values, facts.offsets, facts.largest_id)

    @classmethod
    def from_padded(cls, ids: Tensor, fill: int = -1, values: Tensor | None = None) -> TokenSets:
        """Make sets from padded ids [rows, K] or [B, T, K], int32 or int64.

        fill     the id of padding, at any place. A row with nothing but padding stands for the
                 whole vocabulary.
        values   float, the shape of ids. Values of padding are dropped.

        Waits for the device. SkyRL records sets in this form, and prime-rl and TRL use it inside
        their trainers.
        """
        require_tensor("ids", ids, INTEGERS, "int32 or int64 [rows, K] or [B, T, K]")
        require(ids.dim() > 1, "ids", list(ids.shape), "pass padded sets, [rows, K] or [B, T, K].")
        is_id = ids != fill
        if values is not None:
            require_tensor("values", values, FLOATING, "floats, the shape of ids, or None")
            require_shape("values", values, ids.shape, "ids")
            values = values[is_id]
        counts = is_id.flatten(0, -2).sum(-1)
        return cls.from_counts(ids[is_id], counts, values)

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
        """Make sets from lists of ids, as inference engines return them. The ids become int32.

            TokenSets.from_lists([[5, 9], None, [3]])  # one list for each row
            targets, generated = shift_targets(ids, mask=completion_mask)
            TokenSets.from_lists([o.sampling_mask.token_ids for o in outputs], generated=generated)

        lists       without `generated`: the ids of each row. None or an empty list stands for the
                    whole vocabulary. With `generated`: for each sequence the list of its records,
                    which are such lists of ids, or None for a sequence without records.
        values      the same with a float for each id, or None.
        generated   bool [B, T] or packed [N], the shape of targets: True if the target of a row
                    was generated, as `shift_targets` returns it. The records of sequence b go to
                    its True rows in order. All other rows stand for the whole vocabulary.
        cu_seqlens  int32 or int64 [B + 1] of packed rows. For packed rows without it, `lists` holds
                    the records of all rows, one after another.
        device      the device of the sets. None: the device of `generated`, or the CPU.

        vLLM: `CompletionOutput.sampling_mask.token_ids`. SGLang:
        `meta_info["output_token_sampling_mask"]`, and with sampling_logprobs_mode="support"
        `output_token_sampling_logprobs` as values.

        Raises ValueError if a sequence has not as many records as generated tokens. Cut both alike,
        and add None for a token that was appended.
        """
        ids, counts = flatten_lists("lists", lists, generated, cu_seqlens)
        if ids.numel():
            require_tensor("lists", ids, INTEGERS, "lists of integer ids", "holds")
            # Not ids.abs().max(): the absolute value of -2^63 is -2^63 in int64.
            largest = max(int(ids.max()), -int(ids.min()))
            if largest > torch.iinfo(torch.int32).max:
                raise ValueError(f"lists holds ids up to {largest}: from lists ids become int32.")
        flat_values = None
        if values is not None:
            flat_values, value_counts = flatten_lists("values", values, generated, cu_seqlens)
            require_equal_counts(value_counts.tolist(), counts.tolist())
            flat_values = flat_values.float()
        if device is None:
            device = torch.device("cpu") if generated is None else generated.device
        return cls.from_counts(ids.to(torch.int32), counts, flat_values).to(device)

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
        """Return the ids that a sampler keeps of these logits, ascending, as int32.

        For samplers of your own, and for trainers that filter again (NeMo-RL). Prefer recorded sets
        if there are any: logits that differ in the last bit move ids at the edge of a set.

        logits       float [..., V], of any leading shape, after scale and softcap, before the
                     temperature.
        top_k        keeps the k largest, and all that equal the last of them. None, 0, -1 or >= V
                     keeps all.
        top_p        keeps the shortest run of largest probabilities that add up to it. Of equal
                     ones, those with lower ids come first. None or 1 keeps all.
        min_p        keeps probabilities of at least min_p times the largest. None or 0 keeps all.
        temperature  divides the logits first: a number > 0, or a tensor > 0 of the leading shape or
                     one for each sequence. The order "vllm" raises it to at least 0.01, as vLLM
                     does. A greedy sampler is top_k=1.
        order        "vllm": min_p, then top_k, then top_p, each applied to the renormalised ids
                     that the filter before it kept. "sglang" without min_p: top_k and top_p are
                     both applied to all probabilities. "sglang" with min_p: top_k, top_p and min_p
                     one after another, renormalised in between.
        targets      integers of the leading shape that are put into their sets. Ids outside of
                     [0, V) are ignored.

        If top_k, top_p and min_p all keep everything, all rows are empty. Otherwise no row is
        empty. Logits of -inf are never kept. Works in chunks of rows: no copy of all logits is
        made. Waits for the device. Raises ValueError for a row whose largest logit is not finite.
        """
        require_tensor("logits", logits, FLOATING, "a float tensor [..., V]")
        has_ids = logits.dim() > 0 and logits.shape[-1] > 0
        remedy = "pass a float tensor [..., V] of at least one id."
        require(has_ids, "logits.shape", list(logits.shape), remedy)
        leading_shape = logits.shape[:-1]
        vocab_size = logits.shape[-1]
        filters = SamplerFilters.from_options(
            vocab_size, top_k=top_k, top_p=top_p, min_p=min_p, order=order
        )
        if targets is not None:
            require_tensor("targets", targets, INTEGRAL, "integers of the logits' leading shape")
            require_shape("targets", targets, leading_shape, "the leading part of the logits")
            targets = targets.flatten()
        temperatures = temperature_of_rows(temperature, leading_shape, logits.device)
        if order == "vllm":
            temperatures = temperatures.clamp(min=LOWEST_TEMPERATURE)
        num_rows = len(temperatures)
        if not filters.filters or num_rows == 0:
            return cls.whole(num_rows, device=logits.device)

        is_one = isinstance(temperature, int | float) and temperature == 1
        all_ids: list[Tensor] = []
        all_counts: list[Tensor] = []
        start = 0
        for chunk in chunks_of_rows(logits.detach(), max(1, LOGITS_OF_CHUNK // vocab_size)):
            stop = start + len(chunk)
            scaled = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
            if not is_one:
                scaled = scaled / temperatures[start:stop, None]
            targets_of_chunk = None if targets is None else targets[start:stop]
            kept = filters.keep(scaled, targets_of_chunk, first_row=start)
            all_ids.append(kept.ids)
            all_counts.append(kept.counts)
            start = stop
        return cls.from_counts(torch.cat(all_ids), torch.cat(all_counts))

    @classmethod
    def whole(cls, rows: int, *, device: torch.device | str | None = None) -> TokenSets:
        """Make an empty set for each of `rows` tokens.

        An empty set stands for the whole vocabulary.

        rows     number of tokens, which is the number of rows of the sets
        device   device of the sets; None: the CPU
        """
        remedy = "the number of rows is a whole number of at least 0."
        require_whole("rows", rows, remedy, low=0)
        ids = torch.empty(0, dtype=torch.int32, device=device)
        offsets = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        host_offsets = array("q", [0]) * (rows + 1)
        return cls._from_checked(
            ids, offsets, values=None, host_offsets=host_offsets, largest_id=-1
        )

    @classmethod
    def cat(cls, parts: Sequence[TokenSets]) -> TokenSets:
        """Return the rows of all parts, one part after another.

        Raises ValueError if there is no part, if parts are on different devices, and if some have
        values and others do not.
        """
        are_sets = len(parts) > 0 and all(isinstance(part, TokenSets) for part in parts)
        types = [type(part).__name__ for part in parts]
        require(are_sets, "parts", types, "pass a list of TokenSets.")
        devices = [str(part.ids.device) for part in parts]
        remedy = "they are on different devices: move them to one."
        require(len(set(devices)) == 1, "parts", devices, remedy)
        all_values = [part.values for part in parts if part.values is not None]
        if 0 < len(all_values) < len(parts):
            first = next(i for i, part in enumerate(parts) if part.values is None)
            remedy = (
                "all parts have values or none: give it some (with_values), or drop the others'"
                " with with_values(None)."
            )
            raise ValueError(f"parts[{first}] has no values, but others have: {remedy}")

        host_counts = chain.from_iterable(part._host_counts for part in parts)
        return cls._from_checked(
            ids=torch.cat([part.ids for part in parts]),
            offsets=offsets_from_counts(torch.cat([part.counts for part in parts])),
            values=torch.cat(all_values) if all_values else None,
            host_offsets=array("q", accumulate(host_counts, initial=0)),
            largest_id=max(part._largest_id for part in parts),
        )

    # ---- facts that the host knows

    @property
    def rows(self) -> int:
        """Number of rows, empty ones included."""
        return self.offsets.shape[0] - 1

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.rows

    @cached_property
    def _host_counts(self) -> list[int]:
        """Number of ids of each row. Plain Python, so that fake tensors are not involved."""
        return [stop - start for start, stop in pairwise(self._host_offsets)]

    @property
    def longest(self) -> int:
        """Number of ids of the longest row, 0 if there is no row. Does not wait for the device."""
        return max(self._host_counts, default=0)

    @property
    def empty_rows(self) -> int:
        """Number of rows without ids (the whole vocabulary). Does not wait for the device."""
        return self._host_counts.count(0)

    @property
    def largest_id(self) -> int:
        """The largest id, -1 if there is none. Does not wait for the device.

        Slices and selections return the largest id of the sets that they were taken from, which is
        an upper bound.
        """
        return self._largest_id

    # ---- some of the rows

    def __getitem__(self, rows: Any) -> TokenSets:
        """Return the sets of some rows.

        rows   a slice `sets[a:b]`, integers in any order, negative ones too, or a bool mask of the
               shape of targets.

        A slice of step 1 does not wait for the device. For any other index the host reads `rows`,
        which waits if it is on a device. Raises ValueError if a row does not exist.
        """
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.rows)
            if step == 1:
                return self._rows_between(start, max(start, stop))
            rows = range(start, stop, step)
        # torch would make a tensor of floats from an empty list, which is no index.
        is_empty = not isinstance(rows, Tensor | int) and len(rows) == 0
        index = torch.as_tensor(rows, dtype=torch.int64 if is_empty else None)
        remedy = (
            "pass a slice, integers, or a bool of the shape of targets. For one row, sets[i : i"
            " + 1]."
        )
        if index.is_floating_point() or index.is_complex() or index.dim() == 0:
            raise ValueError(f"rows is {index.dtype} {list(index.shape)}: {remedy}")
        row_ids = torch.arange(self.rows)
        try:
            # torch resolves negative numbers and masks.
            selected = row_ids[index.flatten().cpu()]
        except IndexError as error:
            raise ValueError(f"there are {self.rows} rows, but {error}: {remedy}") from None
        return self.take(selected)

    def _rows_between(self, start: int, stop: int) -> TokenSets:
        """Return the sets of the rows from start to stop, stop excluded.

        The ids of these rows follow one another, so ids and values are views. The host knows the
        offsets and need not wait for a GPU.
        """
        first_id = self._host_offsets[start]
        last_id = self._host_offsets[stop]
        host_offsets = self._host_offsets[start : stop + 1]
        return self._from_checked(
            ids=self.ids[first_id:last_id],
            offsets=self.offsets[start : stop + 1] - first_id,
            values=None if self.values is None else self.values[first_id:last_id],
            host_offsets=array("q", [offset - first_id for offset in host_offsets]),
            largest_id=self._largest_id,
        )

    def take(self, index: Tensor) -> TokenSets:
        """Return sets whose row i is row index[i] of these, or empty if index[i] is -1.

        index   int64 [n] in [-1, rows). The host reads it, which waits if it is on a device.
        """
        index = index.cpu()
        all_offsets = torch.frombuffer(self._host_offsets, dtype=torch.int64)
        # Row i has the ids offsets[i] : offsets[i + 1]. For index -1 both are offsets[0], so that
        # the row is empty.
        starts = all_offsets[index.clamp(min=0)]
        stops = all_offsets[index + 1]
        counts = stops - starts
        offsets = offsets_from_counts(counts)

        device = self.ids.device
        num_ids = int(offsets[-1])
        # The ids of the new rows lie at these places among the ids of all rows: the place in the
        # result plus a shift, which is the same for all ids of a row.
        shifts = (starts - offsets[:-1]).to(device)
        shifts = shifts.repeat_interleave(counts.to(device), output_size=num_ids)
        places = shifts + torch.arange(num_ids, device=device)
        return self._from_checked(
            ids=self.ids[places],
            offsets=offsets.to(device),
            values=None if self.values is None else self.values[places],
            host_offsets=array("q", offsets.tolist()),
            largest_id=self._largest_id,
        )

    # ---- tensors. None of these waits for the device

    @property
    def counts(self) -> Tensor:
        """int64 [rows]: number of ids of each row, 0 for the whole vocabulary."""
        return self.offsets.diff()

    @property
    def row_of(self) -> Tensor:
        """int64 [nnz]: the row of each id. It is computed at each access."""
        # Given counts alone, repeat_interleave returns index i as many times as counts[i] says:
        # the counts [2, 1] give [0, 0, 1]. With output_size the host need not wait for their sum.
        return torch.repeat_interleave(self.counts, output_size=self.ids.shape[0])

    def padded(self, fill: int = -1) -> Tensor:
        """Return the ids of each row, padded to the longest row: [rows, longest], dtype of ids.

        A row has its ids in their order, then `fill`. `from_padded` is the inverse.
        """
        is_id = torch.arange(self.longest, device=self.ids.device) < self.counts[:, None]
        padding = torch.full_like(is_id, fill, dtype=self.ids.dtype)
        return padding.masked_scatter_(is_id, self.ids)  # the ids in their order, where is_id

    def mask(self, vocab: int) -> Tensor:
        """Return bool [rows, vocab]: True for the ids of a row, and everywhere in an empty row.

        For tests and small vocabularies: with 150,000 ids a row takes 150 kB.
        """
        require_whole("vocab", vocab, "the size of the vocabulary is a whole number.")
        check_ids("ids", self, vocab)
        is_empty = self.counts == 0
        is_in_set = is_empty[:, None].repeat(1, vocab)
        is_in_set[self.row_of, self.ids.long()] = True
        return is_in_set

    def contains(self, targets: Tensor) -> Tensor:
        """Return whether each target is in the set of its row, or the row is empty, bool [rows].

        targets   integers, one element for each row
        """
        _check_tokens(targets, self)
        is_target = self.ids == targets.flatten()[self.row_of]
        # Count the hits (ids that are the target) before each row. A row has a hit if this number
        # grows from its start to its end.
        hits_before_id = offsets_from_counts(is_target.long())
        hits_before_row = hits_before_id[self.offsets]
        has_hit = hits_before_row.diff() > 0
        return has_hit | (self.counts == 0)

    def holds(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return whether ids[i] is in the set of row rows[i], bool [k]. An empty row holds no id.

        rows   int64 [k], numbers of rows
        ids    integers [k]
        """
        queried_ids = ids.long()
        ids_of_sets = self.ids.long()
        # The zero makes the maximum exist if there is no id.
        largest_id = torch.cat([ids_of_sets, queried_ids, ids_of_sets.new_zeros(1)]).amax()
        num_ids = largest_id + 1  # a bound of all ids, which stays on the device
        # Join row and id into one number, row * num_ids + id, and search it among the pairs of the
        # sets.
        queries = rows * num_ids + queried_ids
        keys = self.row_of * num_ids + ids_of_sets
        return torch.isin(queries, keys)

    # ---- other devices, other values

    def _apply(self, change: Callable[[Tensor], Tensor]) -> TokenSets:
        """Return the sets with `change` applied to each tensor: ids, offsets and values.

        change   for example a copy to another device. It must not change the numbers.
        """
        return self._from_checked(
            ids=change(self.ids),
            offsets=change(self.offsets),
            values=None if self.values is None else change(self.values),
            host_offsets=self._host_offsets,
            largest_id=self._largest_id,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TokenSets:
        """Return the sets on another device.

        non_blocking   as in Tensor.to. From pinned memory, the host does not wait for the copy.
        """
        return self._apply(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TokenSets:
        """Return the sets in page-locked memory, for `to(device, non_blocking=True)`."""
        return self._apply(lambda x: x.pin_memory())

    def with_values(self, values: Tensor | None) -> TokenSets:
        """Return the same ids with other values.

        values   float [nnz] on the same device, which may require grad. None: no values.

        Raises ValueError for values of another form, and for NaN. On a GPU NaN is looked for only
        with GRPO_KERNELS_CHECK=1, because the host waits for the result.
        """
        if values is not None and values_are_checked(values):
            check_sets_and_read_facts(self.ids, self.offsets, values)
        else:
            check_form(self.ids, self.offsets, values)
        return self._from_checked(
            self.ids, self.offsets, values, self._host_offsets, self._largest_id
        )

    def same_ids(self, other: TokenSets) -> bool:
        """Return whether the other sets have the same ids in the same order.

        Values are not compared. Waits for the device, unless the ids of both are one tensor.
        """
        if self._host_offsets != other._host_offsets:  # rows of different sizes
            return False
        if self.ids is other.ids:
            return True
        return self.ids.shape == other.ids.shape and torch.equal(self.ids, other.ids)

    def __copy__(self) -> TokenSets:
        """Return new sets with the same tensors."""
        return self._apply(lambda x: x)

    def __reduce__(self) -> Any:
        """Support pickle and deepcopy.

        Slices store only their own ids. Values are stored without their autograd history.
        """
        sets = self._apply(lambda x: in_own_storage(x.detach()))
        fields = (sets.ids, sets.offsets, sets.values, sets._host_offsets, sets._largest_id)
        return TokenSets._from_checked, fields


# ---- sets of a batch


def check_sets(name: str, sets: Any, targets: Tensor, vocab: int | None = None) -> None:
    """Raise ValueError unless `sets` are TokenSets that fit `targets`.

    They must have one row for each target, and be on the device of the targets.

    name      the name of the argument `sets`, for messages
    sets      the value that is checked
    targets   integers, one element for each row
    vocab     the size of the vocabulary: all ids must be below it. None: ids are not checked.

    The host does not wait for a GPU, because it knows the number of rows and an upper bound of the
    ids. It waits only if that bound is not below `vocab`: because an id is not, or because these
    sets are a part of sets with such an id.
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
    """Raise ValueError unless `sets` have one row for each target, on the device of the targets.

    name   the name of the sets, for messages
    """
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
    """Raise ValueError if an id of the sets is outside of the vocabulary [0, vocab).

    The host waits for a GPU only if `largest_id`, an upper bound of the ids that it knows, is not
    below `vocab`.

    name    the name of the sets, for the message
    vocab   the size of the vocabulary
    """
    if sets.largest_id < vocab:
        return
    places = (sets.ids >= vocab).nonzero()[:, 0]
    if len(places) > 0:  # else only the upper bound was too large
        row = int(sets.row_of[places[0]])
        raise ValueError(
            f"{name} holds id {int(sets.ids[places[0]])} in row {row}: it is outside of the"
            f" vocabulary [0, {vocab})."
        )


# ---- a target that is not in its set


def rows_without_set(sets: TokenSets, targets: Tensor, missing: str | None) -> Tensor:
    """Return whether each row uses the whole vocabulary in place of its set, bool [rows].

    A row does so if its set is empty or, with missing="full", if its target is not in its set. With
    any other value of `missing`, the target has no effect.

    sets      the candidates of each row: the ids that top-k or top-p left
    targets   integers, one element for each row
    missing   what to do with a target that is not in its set
    """
    is_empty = sets.counts == 0
    if missing != "full":
        return is_empty
    return is_empty | ~sets.contains(targets)


def narrow_mask(
    sets: TokenSets, targets: Tensor, mask: Tensor | None, missing: str | None
) -> Tensor | None:
    """Return the mask without the rows that `missing` removes. None means that all rows are in it.

    missing="mask"    removes the rows whose target is not in their set
    missing="raise"   raises ValueError if there is such a row in the mask. The host waits for a GPU
                      to know. torch.compile leaves out this check.
    other values      remove no row

    sets      the candidates of each row: the ids that top-k or top-p left
    targets   integers, one element for each row
    mask      bool of the shape of targets, or None
    missing   what to do with a target that is not in its set
    """
    if missing not in ("mask", "raise"):
        return mask
    is_in_set = sets.contains(targets).view(targets.shape)
    if missing == "mask":
        return is_in_set if mask is None else mask & is_in_set
    if not torch.compiler.is_compiling():
        remedy = (
            " is not in its kept set, and missing='raise' (as in strict mode): keep what the"
            " sampler recorded, or pass missing='include' (the target joins its set), 'full' (the"
            " row runs over the whole vocabulary) or 'mask'."
        )
        is_missing = ~is_in_set if mask is None else mask & ~is_in_set
        refuse_where(is_missing, "targets", targets, remedy)
    return mask


# ---- other forms of sets


def offsets_from_counts(counts: Tensor) -> Tensor:
    """Return offsets from counts: row i has the ids offsets[i] : offsets[i + 1].

    counts   int32 or int64 [rows], the number of ids of each row

    The result is int64 [rows + 1]. Raises ValueError for counts of another form.
    """
    require_tensor(
        "counts", counts, INTEGERS, "int32 or int64 [rows], the number of ids of each row"
    )
    if counts.dim() != 1:
        raise ValueError(
            f"counts has shape {list(counts.shape)}: pass one number for each row, [rows]; of [B,"
            " T], counts.flatten()."
        )
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0, dtype=torch.int64)])


class FlatLists(NamedTuple):
    """Lists of numbers as tensors.

    numbers   [num_numbers]: the numbers of all rows, one row after another
    counts    int64 [rows]: how many numbers each row has
    """

    numbers: Tensor
    counts: Tensor


def flatten_lists(
    name: str, lists: Sequence[Any], generated: Tensor | None, cu_seqlens: Tensor | None
) -> FlatLists:
    """Return lists of numbers as tensors, for `TokenSets.from_lists`.

    name         the name of the argument `lists`, for messages
    lists        without `generated`: a list of numbers for each row, or None for no number. With
                 `generated`: for each sequence the list of its records, which are such lists.
    generated    bool [B, T] or packed [N], the rows that the records go to, or None
    cu_seqlens   int32 or int64 [B + 1], the sequences of packed rows, or None

    Raises ValueError for lists of another form.
    """
    if isinstance(lists, str | bytes | Tensor) or not isinstance(lists, Sequence):
        raise ValueError(f"{name} is a {type(lists).__name__}: pass a list of lists.")
    if generated is not None:
        records = join_records(name, lists, generated, cu_seqlens)
    elif cu_seqlens is None:
        records = [*lists]
    else:
        raise ValueError(
            "cu_seqlens is given without generated: pass the mask of the rows whose target was"
            " generated, [N]."
        )
    records = [() if record is None else record for record in records]
    try:
        numbers = torch.tensor(list(chain.from_iterable(records)))
        reason = None if numbers.dim() == 1 else "lists within lists within a list"
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error)
    if reason is not None:
        raise ValueError(
            f"{name} is not one list of numbers for each row ({reason}): records of sequences want"
            " generated=, the mask of the rows that they go to."
        )
    counts = torch.tensor([len(record) for record in records], dtype=torch.int64)
    if generated is not None:
        # The records belong to the generated rows in order. All other rows have no number.
        is_generated = generated.flatten().cpu() != 0
        counts = counts.new_zeros(len(is_generated)).masked_scatter_(is_generated, counts)
    return FlatLists(numbers=numbers, counts=counts)


def join_records(
    name: str, records: Sequence[Any], generated: Tensor, cu_seqlens: Tensor | None
) -> list[Any]:
    """Return the records of all generated tokens in order, None for a token without a record.

    name         the name of the argument `records`, for messages
    records      for each sequence the list of its records, or None; for packed rows without
                 cu_seqlens the records of all rows
    generated    bool [B, T] or packed [N]: rows whose target was generated
    cu_seqlens   int32 or int64 [B + 1], the sequences of packed rows, or None

    Raises ValueError unless each sequence has as many records as generated tokens, or None.
    """
    if not isinstance(generated, Tensor) or generated.dim() not in (1, 2):
        is_tensor = isinstance(generated, Tensor)
        what = f"shape {list(generated.shape)}" if is_tensor else type(generated).__name__
        raise ValueError(
            f"generated is {what}: pass a bool tensor of the shape of targets, [B, T] or packed"
            " [N]."
        )
    mask = as_mask("generated", generated, generated.shape)
    masks: Sequence[Tensor] = [*mask]  # of each sequence
    if cu_seqlens is not None:
        check_offsets("generated", generated, cu_seqlens)
        masks = mask.split(cu_seqlens.diff().tolist())
    elif mask.dim() == 1:
        masks = [mask]
        records = [records]
    if len(records) != len(masks):
        raise ValueError(
            f"{name} has {len(records)} sequences, but generated has {len(masks)}: pass the records"
            " of each sequence."
        )
    joined: list[Any] = []
    for b, (records_of_sequence, mask_of_sequence) in enumerate(zip(records, masks, strict=True)):
        num_generated = int(mask_of_sequence.sum())
        if records_of_sequence is None:
            joined += [None] * num_generated
            continue
        remedy = "pass for each sequence a list that has a list of ids for each generated token."
        has_length = hasattr(records_of_sequence, "__len__")
        require(has_length, f"{name}[{b}]", records_of_sequence, remedy)
        if len(records_of_sequence) != num_generated:
            raise ValueError(
                f"{name}[{b}] has {len(records_of_sequence)} records, but generated marks"
                f" {num_generated} tokens of sequence {b}: cut both alike, and add None for a token"
                " that was appended."
            )
        joined += records_of_sequence
    return joined


def require_equal_counts(value_counts: list[int], id_counts: list[int]) -> None:
    """Raise ValueError unless each row has as many values as ids.

    value_counts, id_counts   number of values and of ids of each row
    """
    if value_counts == id_counts:
        return
    pairs = zip_longest(value_counts, id_counts)
    row = next(i for i, (num_values, num_ids) in enumerate(pairs) if num_values != num_ids)
    raise ValueError(
        f"values has {len(value_counts)} rows, and lists {len(id_counts)}, of other lengths from"
        f" row {row} on: pass one number for each id."
    )


def usable_in_backward(x: Tensor) -> Tensor:
    """Return x as a contiguous tensor that autograd can save for a backward.

    Autograd cannot save a tensor that was made in inference mode, so such a tensor is copied.
    """
    if not x.is_inference():
        return x.contiguous()
    with torch.inference_mode(False):  # else the copy would be such a tensor, too
        return x.clone(memory_format=torch.contiguous_format)


def in_own_storage(x: Tensor) -> Tensor:
    """Return x, or a copy if x is a view of a larger storage.

    pickle would store the whole storage of a view.
    """
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


# ---- checks of new sets


class HostFacts(NamedTuple):
    """Facts about sets, on the host.

    offsets      the offsets of the rows, rows + 1 numbers
    largest_id   the largest id, -1 if there is none
    """

    offsets: array[int]
    largest_id: int


def check_form(
    ids: Tensor, offsets: Tensor, values: Tensor | None, offsets_name: str = "offsets"
) -> None:
    """Raise ValueError if ids, offsets or values have another type, dtype, shape or device.

    Their numbers are not read, so the host does not wait for a GPU.

    offsets_name   the name of the argument that the offsets come from, for messages
    """
    require_tensor(
        "ids", ids, INTEGERS, "int32 or int64 [nnz], the ids of all rows one after another"
    )
    remedy = "int32 or int64 [rows + 1], where each row starts, and the end"
    require_tensor("offsets", offsets, INTEGERS, remedy)
    if ids.dim() != 1:
        hint = " Padded sets [rows, K] go through TokenSets.from_padded." if ids.dim() > 1 else ""
        raise ValueError(
            f"ids has shape {list(ids.shape)}: pass the ids of all rows one after another,"
            f" [nnz].{hint}"
        )
    if offsets.dim() != 1 or offsets.numel() < 1:
        raise ValueError(
            f"offsets has shape {list(offsets.shape)}: pass [rows + 1], a single 0 for no row."
        )
    require_device(offsets_name, offsets, ids.device, "ids")
    if values is not None:
        require_tensor("values", values, FLOATING, "floats, one number for each id, or None")
        require_shape("values", values, ids.shape, "ids")
        require_device("values", values, ids.device, "ids")


def check_sets_and_read_facts(
    ids: Tensor, offsets: Tensor, values: Tensor | None, offsets_name: str = "offsets"
) -> HostFacts:
    """Check the fields of new sets, and return the facts that the host needs to know.

    ids            int [nnz], the ids of all rows, row after row
    offsets        int [rows + 1]: row i has ids[offsets[i] : offsets[i + 1]]
    values         float [nnz], a number for each id, or None
    offsets_name   the name of the argument that the offsets come from, "offsets" or "counts"

    On a GPU the host waits once, for one copy of all numbers that it needs. One of these says
    whether an id is below 0, a value is NaN, or the ids of a row do not ascend, so that an id may
    be there twice. If so, the host waits again to look for an error. Raises the errors of
    `TokenSets`.
    """
    check_form(ids, offsets, values, offsets_name)
    num_ids = ids.numel()
    offsets = offsets.long()
    is_bad = ids < 0
    if values is not None:
        is_bad = is_bad | values.isnan()
    # Ids must ascend within a row. An id that is the first of its row may be below the one before.
    starts_row = torch.zeros(num_ids + 1, dtype=torch.bool, device=ids.device)
    starts_row = starts_row.index_fill_(0, offsets.clamp(0, num_ids), True)
    descends = (ids[1:] <= ids[:-1]) & ~starts_row[1:-1]
    needs_look = is_bad.any() | descends.any()
    largest_id = ids.max() if num_ids > 0 else ids.new_full((), -1)

    # One copy to the host, for which it waits once.
    numbers = torch.cat([offsets, largest_id[None], needs_look[None]]).cpu()
    host_offsets = numbers[:-2]
    host_largest_id, host_needs_look = numbers[-2:].tolist()
    _check_offsets(host_offsets, num_ids, offsets_name)
    if host_needs_look:
        _check_ids_and_values(ids, offsets, values, is_bad)
    return HostFacts(offsets=array("q", host_offsets.tolist()), largest_id=host_largest_id)


def _check_offsets(offsets: Tensor, num_ids: int, offsets_name: str) -> None:
    """Raise ValueError unless the offsets rise from 0 to num_ids.

    offsets        int64 [rows + 1], on the host
    offsets_name   the name of the argument that they come from, for messages
    """
    if offsets[0] != 0:
        raise ValueError(
            f"offsets[0]={int(offsets[0])}: the ids of row 0 start at 0. (Of a part, subtract its"
            " first offset.)"
        )
    counts = offsets.diff()
    negative_rows = (counts < 0).nonzero()[:, 0]
    if len(negative_rows) > 0:
        row = int(negative_rows[0])
        raise ValueError(
            f"{offsets_name} give row {row} {int(counts[row])} ids: a row has at least 0."
        )
    end = int(offsets[-1])
    if end != num_ids:
        raise ValueError(
            f"{offsets_name} give the rows {end} ids in all, but there are {num_ids}: each id"
            " belongs to a row."
        )


def _check_ids_and_values(
    ids: Tensor, offsets: Tensor, values: Tensor | None, is_bad: Tensor
) -> None:
    """Raise ValueError for the first id that is below 0 or twice in its row, or whose value is NaN.

    ids       int [nnz], the ids of all rows, row after row
    offsets   int64 [rows + 1]: row i has ids[offsets[i] : offsets[i + 1]]
    values    float [nnz], a number for each id, or None
    is_bad    bool [nnz]: ids below 0, or whose value is NaN
    """
    # Given counts alone, repeat_interleave returns index i as many times as counts[i] says.
    row_of_id = torch.repeat_interleave(offsets.diff(), output_size=ids.numel())
    # A stable sort by id keeps the order of rows, so that repetitions in a row become neighbours.
    order = ids.argsort(stable=True)
    sorted_ids = ids[order]
    sorted_rows = row_of_id[order]
    repeats = (sorted_ids[1:] == sorted_ids[:-1]) & (sorted_rows[1:] == sorted_rows[:-1])
    is_bad = is_bad.index_fill(0, order[1:][repeats], True)
    bad_places = is_bad.nonzero()[:, 0].tolist()
    if not bad_places:
        return
    place = bad_places[0]
    row = int(row_of_id[place])
    if ids[place] >= 0 and values is not None and values[place].isnan():
        raise ValueError(
            f"values[{place}]={values[place].item()}, in row {row}: leave out ids without a number."
        )
    if ids[place] < 0:
        remedy = "ids are at least 0. Padded sets go through TokenSets.from_padded."
    else:
        remedy = "an id may occur only once in a set."
    raise ValueError(f"ids[{place}]={ids[place].item()}, in row {row}: {remedy}")


# ---- rows of logits


def temperature_of_rows(
    temperature: float | Tensor, shape: torch.Size, device: torch.device
) -> Tensor:
    """Return the temperature of each flat row of logits [*shape, V], fp32 [rows].

    temperature   a number, or a tensor of the leading shape or one for each sequence
    shape         leading shape of the logits

    Raises ValueError for a temperature that is not above 0 and finite, or does not fit the shape.
    """
    check_temperature(temperature)
    # Called to check the values of a tensor. Its result, 1 / temperature, is not needed.
    inverse_temperatures(temperature, shape, mask=None, cu_seqlens=None, device=device)
    return per_token("temperature", torch.as_tensor(temperature, device=device), shape)


def chunks_of_rows(logits: Tensor, max_rows: int) -> Iterator[Tensor]:
    """Yield the rows of logits [..., V] in order, as views [n, V] of at most max_rows rows."""
    if logits.dim() == 1:
        yield logits[None]
    elif logits.dim() == 2 or logits.is_contiguous():
        yield from logits.flatten(0, -2).split(max_rows)
    else:  # flatten would copy the logits, so split them along their first dimension
        for part in logits:
            yield from chunks_of_rows(part, max_rows)
