"""Sets of ids as samplers and trainers hold them, as (ids, offsets, values)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, pairwise
from operator import sub
from typing import Any

import torch

from .layout import as_mask, check_offsets

Tensor = torch.Tensor
Flat = tuple[Tensor, Tensor, Tensor | None]


def offsets_of(counts: Tensor) -> Tensor:
    """int64 [rows + 1]."""
    check_integers("counts", counts, "[rows], the number of ids of each row")
    if counts.dim() != 1:
        raise ValueError(
            f"counts has shape {list(counts.shape)}: pass one number for each row, [rows]; of [B, T], counts.flatten()."
        )
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0, dtype=torch.int64)])


def unpadded(ids: Tensor, fill: int, values: Tensor | None) -> Flat:
    """Of ids [..., K], those that are not `fill`."""
    check_integers("ids", ids, "[rows, K] or [B, T, K]")
    if ids.dim() < 2:
        raise ValueError(f"ids has shape {list(ids.shape)}: pass padded sets, [rows, K] or [B, T, K].")
    if values is not None and (not isinstance(values, Tensor) or values.shape != ids.shape):
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"values has shape {got}, but ids has {list(ids.shape)}: they must be the same.")
    given = ids != fill
    return ids[given], offsets_of(given.flatten(0, -2).sum(-1)), None if values is None else values[given]


def flat_lists(lists: Sequence[Any], values: Sequence[Any] | None, generated: Tensor | None, cu_seqlens: Tensor | None) -> Flat:
    """On the CPU, ids int32 and values float32."""
    rows = placed("lists", lists, generated, cu_seqlens)
    ids = numbers("lists", rows)
    if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise ValueError(f"lists holds {ids.dtype}: pass lists of integer ids.")
    info = torch.iinfo(torch.int32)
    if ids.numel() and not (info.min <= int(ids.min()) and int(ids.max()) <= info.max):
        raise ValueError(f"lists holds ids up to {int(ids.max())}: from lists ids become int32.")
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    told = None
    if values is not None:
        beside = placed("values", values, generated, cu_seqlens)
        if len(beside) != len(rows):
            raise ValueError(
                f"values has {len(beside)} rows, but lists has {len(rows)}: pass one list of numbers for each list of ids."
            )
        for row, (own, of) in enumerate(zip(beside, rows, strict=True)):
            if len(own) != len(of):
                raise ValueError(
                    f"values has {len(own)} numbers in row {row}, but lists has {len(of)} ids there: pass one for each id."
                )
        told = numbers("values", beside).to(torch.float32)
    return ids.to(torch.int32), offsets_of(counts), told


def numbers(name: str, rows: list[Any]) -> Tensor:
    """Those of all rows, one after another."""
    try:
        flat = torch.tensor(list(chain.from_iterable(rows)))
        reason = None if flat.dim() == 1 else "lists within lists within a list"
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error)
    if reason is not None:
        raise ValueError(
            f"{name} is not one list of numbers for each row ({reason}): records of sequences want generated=, the mask of the "
            "rows that they go to."
        )
    return flat


def placed(name: str, lists: Sequence[Any], generated: Tensor | None, cu_seqlens: Tensor | None) -> list[Any]:
    """One list for each row, empty where there is no record."""
    if isinstance(lists, str | bytes | Tensor) or not isinstance(lists, Sequence):
        raise ValueError(f"{name} is a {type(lists).__name__}: pass a list of lists.")
    if generated is None:
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens is given without generated: pass the mask of the rows whose target was generated, [N]."
            )
        return [() if row is None else row for row in lists]
    if not isinstance(generated, Tensor) or generated.dim() not in (1, 2):
        got = f"shape {list(generated.shape)}" if isinstance(generated, Tensor) else type(generated).__name__
        raise ValueError(f"generated is {got}: pass a bool tensor of the shape of targets, [B, T] or packed [N].")
    mask = as_mask("generated", generated, generated.shape)
    if cu_seqlens is not None:
        check_offsets("generated", generated, cu_seqlens)
        cuts = cu_seqlens.tolist()
        parts = [mask[a:b] for a, b in pairwise(cuts)]
    else:
        parts = [*mask] if mask.dim() == 2 else [mask]
        lists = lists if mask.dim() == 2 else [lists]
    if len(lists) != len(parts):
        raise ValueError(
            f"{name} has {len(lists)} sequences, but generated has {len(parts)}: pass the records of each sequence."
        )
    rows: list[Any] = []
    for b, (records, part) in enumerate(zip(lists, parts, strict=True)):
        places = part.nonzero()[:, 0].tolist()
        own: list[Any] = [()] * len(part)
        if records is not None:
            if len(records) != len(places):
                raise ValueError(
                    f"{name}[{b}] has {len(records)} records, but generated marks {len(places)} tokens of sequence {b}: cut both "
                    "alike, and add None for a token that was appended."
                )
            for place, record in zip(places, records, strict=True):
                own[place] = () if record is None else record
        rows += own
    return rows


# ---- rows, storages


def row_numbers(rows: Any, count: int) -> Tensor:
    """int64 on the CPU: the rows, of `count`, that an index or a mask means."""
    numbers = torch.as_tensor(rows, dtype=None if isinstance(rows, Tensor | int) or len(rows) else torch.int64)
    remedy = "pass a slice, integers, or a bool of the shape of targets. For one row, sets[i : i + 1]."
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dim() == 0:
        raise ValueError(f"rows is {numbers.dtype} {list(numbers.shape)}: {remedy}")
    numbers = numbers.reshape(-1).cpu()
    if numbers.dtype == torch.bool:
        if len(numbers) != count:
            raise ValueError(f"the mask has {len(numbers)} elements, but there are {count} rows: {remedy}")
        return numbers.nonzero()[:, 0]
    numbers = numbers.to(torch.int64)
    outside = (numbers < -count) | (numbers >= count)
    if outside.any():
        raise ValueError(f"row {int(numbers[outside][0])} is asked for, but there are {count}.")
    return torch.where(numbers < 0, numbers + count, numbers)


def lengths_of(starts: array) -> tuple[int, int]:
    """(longest row, number of empty rows) of offsets. Python numbers alone: under fake tensors and torch.compile they stay such."""
    counts = [*map(sub, starts[1:], starts[:-1])]
    return max(counts, default=0), counts.count(0)


def saveable(x: Tensor) -> Tensor:
    """`x` in a form that can be saved for a backward pass, which a tensor of inference mode cannot."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def alone(x: Tensor) -> Tensor:
    """`x` in a storage that holds nothing else."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


# ---- what may be wrong with them

INTEGERS = (torch.int32, torch.int64)


def check_integers(name: str, tensor: Any, remedy: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in INTEGERS:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} is {got}: pass int32 or int64 {remedy}.")


def check_form(ids: Tensor, offsets: Tensor, values: Tensor | None, given: str = "offsets") -> None:
    """Raise ValueError on types, dtypes, shapes and devices. No value is looked at. `given` is what the offsets came as."""
    check_integers("ids", ids, "[nnz], the ids of all rows one after another")
    check_integers("offsets", offsets, "[rows + 1], where each row starts, and the end")
    if ids.dim() != 1:
        padded = " Padded sets [rows, K] go through TokenSets.from_padded." if ids.dim() > 1 else ""
        raise ValueError(f"ids has shape {list(ids.shape)}: pass the ids of all rows one after another, [nnz].{padded}")
    if offsets.dim() != 1 or offsets.numel() < 1:
        raise ValueError(f"offsets has shape {list(offsets.shape)}: pass [rows + 1], a single 0 for no row.")
    if offsets.device != ids.device:
        raise ValueError(f"{given} is on {offsets.device}, but ids is on {ids.device}: move one of them.")
    if values is None:
        return
    if not isinstance(values, Tensor) or not values.is_floating_point():
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"values is {got}: pass a float tensor, one number for each id, or None.")
    if values.shape != ids.shape:
        raise ValueError(f"values has shape {list(values.shape)}, but ids has {list(ids.shape)}: they must be the same.")
    if values.device != ids.device:
        raise ValueError(f"values is on {values.device}, but ids is on {ids.device}: move one of them.")


def read_facts(ids: Tensor, offsets: Tensor, values: Tensor | None, given: str) -> tuple[array[int], int, tuple[int, int]]:
    """(offsets as numbers, largest id or -1, (longest row, number of empty rows)). Raises ValueError on values that cannot be; the
    offsets came as "offsets" or "counts" (`given`). The host reads one tensor, and a second if ids do not ascend in their rows."""
    nnz, offsets = ids.numel(), offsets.to(torch.int64)
    starts_row = torch.zeros(nnz + 1, dtype=torch.bool, device=ids.device).index_fill_(0, offsets.clamp(0, nnz), True)
    ascending = ((ids[1:] > ids[:-1]) | starts_row[1:-1]).all()
    bounds = [ids.min(), ids.max()] if nnz else [ascending.new_full((), -1, dtype=torch.int64)] * 2
    nan = ascending.new_zeros(()) if values is None else values.isnan().any()
    read = torch.cat([offsets, torch.stack([x.to(torch.int64) for x in (*bounds, ascending, nan)])]).cpu()
    host = read[:-4]
    smallest, largest, ordered, has_nan = read[-4:].tolist()
    counts = host.diff()
    check_rising(host, counts, nnz, given)
    if nnz and smallest < 0:
        row, at = first(ids < 0, host)
        raise ValueError(
            f"ids is {int(ids[at])} in row {row} (ids[{at}]): ids are at least 0. Padded sets go through TokenSets.from_padded."
        )
    if not ordered:
        check_unique(ids, offsets, host)
    if has_nan:
        assert values is not None
        row, at = first(values.isnan(), host)
        raise ValueError(f"values is NaN in row {row} (values[{at}], id {int(ids[at])}): leave out ids without a number.")
    longest = int(counts.max()) if counts.numel() else 0
    return array("q", host.tolist()), largest, (longest, int((counts == 0).sum()))


def first(bad: Tensor, host: Tensor) -> tuple[int, int]:
    """(row, position) of the first id that `bad` [nnz] marks."""
    at = int(bad.nonzero()[0])
    return int(torch.searchsorted(host, at, right=True)) - 1, at


def check_rising(host: Tensor, counts: Tensor, nnz: int, given: str) -> None:
    """Raise ValueError unless `host`, offsets on the CPU, rise from 0 to nnz."""
    falls = (counts < 0).nonzero()
    row = int(falls[0]) if len(falls) else -1
    end = int(host[-1])
    if given == "counts":
        if row >= 0:
            raise ValueError(f"counts is {int(counts[row])} in row {row}: a number of ids is at least 0.")
        if end != nnz:
            raise ValueError(f"counts adds up to {end}, but there are {nnz} ids: pass one count for each row of the batch.")
        return
    if host[0] != 0:
        raise ValueError(f"offsets[0]={int(host[0])}: the ids of row 0 start at 0. (Of a part, subtract its first offset.)")
    if row >= 0:
        pair = f"offsets[{row}]={int(host[row])}, offsets[{row + 1}]={int(host[row + 1])}"
        raise ValueError(f"{pair}: row {row} ends before it starts. Offsets rise from 0 to the number of ids, {nnz}.")
    if end != nnz:
        raise ValueError(f"offsets[{len(host) - 1}]={end}, but there are {nnz} ids: the last row ends where the ids end.")


def check_unique(ids: Tensor, offsets: Tensor, host: Tensor) -> None:
    """Raise ValueError if an id stands twice in a row. A stable sort by id leaves rows ascending, so that the two are
    neighbours."""
    rows = torch.repeat_interleave(offsets.diff(), output_size=ids.numel())
    order = ids.argsort(stable=True)
    twice = (ids[order[1:]] == ids[order[:-1]]) & (rows[order[1:]] == rows[order[:-1]])
    if twice.any():
        at = int(order[1:][twice].min())
        row = int(rows[at])
        raise ValueError(
            f"ids is {int(ids[at])} twice in row {row} (offsets {int(host[row])} to {int(host[row + 1])}): once is a set."
        )
