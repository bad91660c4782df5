"""Ids that go with each row of a batch: the set that a token was sampled from, a teacher's top-k, several targets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from .checks import describe, require, require_whole, values_are_checked
from .token_set_formats import check_form, flat_lists, offsets_of, read_facts, unpadded

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class TokenSets:
    """A set of token ids for each row of a batch, and optionally a number for each id.

        sets = TokenSets.from_counts(ids, counts)            # or from_padded, from_lists, from_logits, whole
        sets[:256], TokenSets.cat([a, b]), sets.to("cuda")

    ids      int32 or int64 [nnz]: the ids of row 0, then those of row 1, ...; in a row each id once, in the order given.
    offsets  int32 or int64 [rows + 1], kept as int64: row i holds ids[offsets[i] : offsets[i + 1]].
    values   float [nnz], a number for each id (log-probs of a sampler or a teacher), or None.

    Rows are in the order of the flat rows of targets: row-major over [B, T], or packed [N]. A row without ids stands for the whole
    vocabulary: prompts, tools, tokens without a record.

    Raises ValueError, with the argument and the row, on dtypes, shapes and devices that disagree, offsets that do not rise from 0 to
    the number of ids, ids below 0 or twice in a row, and values that are NaN. What the host has to know of the sets is read here:
    on a GPU the constructor waits for the device once, and once more where ids do not ascend in their rows. Slices, `cat`, `to` and
    the other methods do not, unless they say so. Sets that are made in inference mode can be trained on outside of it.
    """

    ids: Tensor
    offsets: Tensor
    values: Tensor | None = None
    _starts: array[int] = field(init=False, repr=False)
    _largest: int = field(init=False, repr=False)
    _known_lengths: tuple[int, int] | None = field(init=False, repr=False)
    __repr__ = describe

    def __post_init__(self) -> None:
        self._accept(self.ids, self.offsets, self.values, "offsets")

    def _accept(self, ids: Tensor, offsets: Tensor, values: Tensor | None, given: str) -> None:
        check_form(ids, offsets, values, given)
        self._set(ids, offsets, values, *read_facts(ids, offsets, values, given))

    def _set(
        self,
        ids: Tensor,
        offsets: Tensor,
        values: Tensor | None,
        starts: array[int],
        largest: int,
        lengths: tuple[int, int] | None = None,
    ) -> None:
        """The fields, and what the host knows: the offsets, (a bound of) the largest id, (longest row, number of empty rows) or
        None where nobody has asked."""
        for name, value in (
            ("ids", saveable(ids.contiguous())),
            ("offsets", saveable(offsets.to(torch.int64).contiguous())),
            ("values", None if values is None else saveable(values.contiguous())),
            ("_starts", starts),
            ("_largest", largest),
            ("_known_lengths", lengths),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def _of(cls, *parts: Any) -> TokenSets:
        """Sets of parts that are known to be valid."""
        made = object.__new__(cls)
        made._set(*parts)
        return made

    # ---- constructors

    @classmethod
    def from_counts(cls, ids: Tensor, counts: Tensor, values: Tensor | None = None) -> TokenSets:
        """Sets of ids [nnz] of which the first counts[0] are those of row 0, the next counts[1] those of row 1, ...

        counts   int32 or int64 [rows]; 0 = the whole vocabulary. ids and values as in the fields.

        This is what prime-rl sends (`SamplingMask`): bytes of int32, `torch.frombuffer(data, dtype=torch.int32)`, a count for
        each token of the prompt too, so shift them as the targets are shifted (`shift_sets`)."""
        made = object.__new__(cls)
        made._accept(ids, offsets_of(counts), values, "counts")
        return made

    @classmethod
    def from_padded(cls, ids: Tensor, fill: int = -1, values: Tensor | None = None) -> TokenSets:
        """Sets of ids [rows, K] or [B, T, K], int32 or int64, in which `fill` is no id, wherever it stands.

        fill     the id of padding; a row that holds nothing else stands for the whole vocabulary.
        values   float, the shape of ids; what stands beside padding is dropped.

        Waits for the device. SkyRL pads so, and prime-rl and TRL inside their trainers."""
        return cls(*unpadded(ids, fill, values))

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
        """Sets of lists of ids, as engines return them: one list for each generated token. ids become int32.

            TokenSets.from_lists([[5, 9], None, [3]])                                       # rows as they are
            targets, generated = shift_targets(ids, mask=completion_mask)
            TokenSets.from_lists([o.sampling_mask.token_ids for o in outputs], generated=generated)

        lists       without `generated`: the ids of each row; None or an empty list = the whole vocabulary. With it: the records
                    of each sequence, a list of such lists, or None for a sequence without a record.
        values      the same with a float for each id, or None.
        generated   bool [B, T] or packed [N], the shape of targets: True where the target of a row was generated, as
                    `shift_targets` returns it. The records of sequence b go to its True rows in their order, and all other
                    rows stand for the whole vocabulary.
        cu_seqlens  int32 or int64 [B + 1] of packed rows. Packed without it, lists are the records of all rows, one after
                    another.
        device      where the sets are made; None = that of `generated`, or the CPU.

        vLLM: `CompletionOutput.sampling_mask.token_ids`; SGLang: `meta_info["output_token_sampling_mask"]`, and with
        sampling_logprobs_mode="support" `output_token_sampling_logprobs` as values. Raises ValueError where a sequence has not as
        many records as generated tokens: cut both alike, and add None for a token that was appended."""
        ids, offsets, numbers = flat_lists(lists, values, generated, cu_seqlens)
        where = device if device is not None or generated is None else generated.device
        return cls(ids, offsets, numbers).to(where or "cpu")

    @classmethod
    def whole(cls, rows: int, *, device: torch.device | str | None = None) -> TokenSets:
        """Sets of `rows` rows that all stand for the whole vocabulary, on `device` (None = CPU)."""
        require_whole("rows", rows, "the number of rows is a whole number of at least 0.", 0)
        ids = torch.empty(0, dtype=torch.int32, device=device)
        offsets = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        return cls._of(ids, offsets, None, array("q", bytes(8 * (rows + 1))), -1, (0, rows))

    @classmethod
    def cat(cls, parts: Sequence[TokenSets]) -> TokenSets:
        """The rows of all parts, one part after another. All have values or none has."""
        wrong = next((part for part in parts if not isinstance(part, TokenSets)), None)
        if len(parts) == 0 or wrong is not None:
            got = "an empty list" if wrong is None else f"a list with a {type(wrong).__name__}"
            raise ValueError(f"parts is {got}: pass a list of TokenSets.")
        devices = [str(part.ids.device) for part in parts]
        require(len(set(devices)) == 1, "parts", devices, "they are on different devices: move them to one.")
        with_values = [part.values is not None for part in parts]
        if any(with_values) and not all(with_values):
            remedy = "all parts have values or none: give it some (with_values), or drop the others' with with_values(None)."
            raise ValueError(f"parts[{with_values.index(False)}] has no values, but others have: {remedy}")
        offsets, starts = [parts[0].offsets], parts[0]._starts[:]
        for part in parts[1:]:
            base = starts[-1]
            offsets.append(part.offsets[1:] + base)
            starts.extend([start + base for start in part._starts[1:]])
        values = [part.values for part in parts if part.values is not None]
        largest = max(part._largest for part in parts)
        ids = torch.cat([part.ids for part in parts])
        return cls._of(ids, torch.cat(offsets), torch.cat(values) if values else None, starts, largest)

    # ---- what the host knows

    @property
    def rows(self) -> int:
        """Number of rows, empty ones included."""
        return self.offsets.shape[0] - 1

    def __len__(self) -> int:
        return self.rows

    def _lengths(self) -> tuple[int, int]:
        if self._known_lengths is None:
            counts = [end - start for start, end in pairwise(self._starts)]
            object.__setattr__(self, "_known_lengths", (max(counts, default=0), counts.count(0)))
        assert self._known_lengths is not None
        return self._known_lengths

    @property
    def longest(self) -> int:
        """Number of ids of the longest row, 0 where there is none. A Python number, known without asking the device."""
        return self._lengths()[0]

    @property
    def empty_rows(self) -> int:
        """Number of rows without ids, which stand for the whole vocabulary. A Python number, known without asking the device."""
        return self._lengths()[1]

    @property
    def largest_id(self) -> int:
        """The largest id, -1 where there is none; of slices and selections that of the whole, an upper bound. A Python number,
        known without asking the device."""
        return self._largest

    # ---- other places, other values

    def _apply(self, change: Callable[[Tensor], Tensor]) -> TokenSets:
        """The sets with each tensor changed in a way that keeps its numbers."""
        values = None if self.values is None else change(self.values)
        return self._of(change(self.ids), change(self.offsets), values, self._starts, self._largest, self._known_lengths)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TokenSets:
        """The sets on another device. `non_blocking` as in Tensor.to: from pinned memory the host goes on at once."""
        return self._apply(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TokenSets:
        """The sets in page-locked memory, for `to(device, non_blocking=True)`."""
        return self._apply(lambda x: x.pin_memory())

    def with_values(self, values: Tensor | None) -> TokenSets:
        """These ids with other values: float [nnz] on the same device, a gradient may flow through them; None = without. NaN is
        refused; on a GPU, where that waits for the device, only with GRPO_KERNELS_CHECK=1."""
        check_form(self.ids, self.offsets, values)
        if values is not None and values_are_checked(values):
            read_facts(self.ids, self.offsets, values, "offsets")
        return self._of(self.ids, self.offsets, values, self._starts, self._largest, self._known_lengths)

    def __reduce__(self) -> Any:
        """For pickle: of a slice only the ids that are in it."""
        values = None if self.values is None else alone(self.values.detach())
        return TokenSets._of, (alone(self.ids), alone(self.offsets), values, self._starts, self._largest, self._known_lengths)


def saveable(x: Tensor) -> Tensor:
    """`x` in a form that can be saved for a backward pass, which a tensor of inference mode cannot."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def alone(x: Tensor) -> Tensor:
    """`x` in a storage that holds nothing else."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()
