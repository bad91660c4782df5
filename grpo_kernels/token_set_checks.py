"""What may be wrong with sets of ids: by themselves, and beside a batch."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .token_sets import TokenSets

Tensor = torch.Tensor

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


# ---- beside a batch


def check_rows(name: str, targets: Tensor, sets: TokenSets, of: str = "these sets") -> None:
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(f"{name} is {got}: pass a tensor of integers.")
    if targets.numel() != sets.rows:
        raise ValueError(
            f"{name} of shape {list(targets.shape)} has {targets.numel()} tokens, but {of} have {sets.rows} rows: there is one for each "
            "token, row-major, an empty one where nothing is known."
        )
    if targets.device != sets.ids.device:
        raise ValueError(
            f"{of} are on {sets.ids.device}, but {name} is on {targets.device}: pass sets.to({str(targets.device)!r})."
        )


def check_ids(name: str, sets: TokenSets, vocab: int) -> None:
    """Raise ValueError if an id is outside of [0, vocab)."""
    if sets.largest_id < vocab:
        return
    outside = (sets.ids >= vocab).nonzero()
    if len(outside):
        at = int(outside[0])
        row = int(sets.row_of[at])
        raise ValueError(f"{name} holds id {int(sets.ids[at])} in row {row}: it is outside of the vocabulary [0, {vocab}).")
