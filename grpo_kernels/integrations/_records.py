"""Records of what a sampler kept, as trainers hold them for responses, on the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ..layout import as_mask
from ..token_sets import TokenSets

Tensor = torch.Tensor


def response_sets(name: str, record: tuple[Any, Any], tokens: int, *, device: torch.device | str = "cpu") -> TokenSets:
    """The sets of one response of so many tokens, of (ids, offsets), each a list or a tensor of integers. `name` is what the record
    is called in errors. Raises ValueError where the offsets are not those of so many tokens, and as TokenSets does."""
    ids, offsets = (
        x.to(device) if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64, device=device) for x in record
    )  # fmt: skip
    try:
        sets = TokenSets(ids, offsets)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if sets.rows != tokens:
        raise ValueError(
            f"{name} has sets for {sets.rows} tokens, but the response has {tokens}: cut both alike, and record every token."
        )
    return sets


def on_rows(name: str, records: Sequence[TokenSets], generated: Tensor, cuts: Sequence[int] | None = None) -> TokenSets:
    """The sets of responses on the rows of `generated`, bool [B, T] or packed [N]: those of record b go to the True rows of
    sequence b in their order, all other rows get none.

    cuts   where the sequences of packed rows start, and the end. Raises ValueError where a sequence has not as many sets as
           rows."""
    mask = as_mask("generated", generated, generated.shape)
    parts = [*mask] if mask.dim() == 2 else [mask[a:b] for a, b in pairwise(cuts or (0, mask.numel()))]
    if len(parts) != len(records):
        raise ValueError(f"{name} has {len(records)} records, but there are {len(parts)} sequences: pass one for each.")
    for b, (part, sets) in enumerate(zip(parts, records, strict=True)):
        if int(part.sum()) != sets.rows:
            raise ValueError(
                f"{name}[{b}] has sets for {sets.rows} tokens, but {int(part.sum())} of sequence {b} were generated: cut both alike."
            )
    flat = mask.reshape(-1)
    index = torch.where(flat, flat.cumsum(0) - 1, -1)
    return TokenSets.cat(records).take(index) if records else TokenSets.whole(0, device=mask.device)


def predicting(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> tuple[Tensor, list[int]]:
    """(bool [sum of the lengths]: rows that predict a response token; where the sequences start, and the end), of texts packed one
    after another: each response is the end of its text."""
    cuts = [0]
    rows = torch.zeros(sum(total_lengths), dtype=torch.bool)
    for total, tokens in zip(total_lengths, response_lengths, strict=True):
        end = cuts[-1] + total
        rows[end - 1 - tokens : end - 1] = True
        cuts.append(end)
    return rows, cuts


def first_empty(sets: TokenSets, among: Tensor | None = None) -> int | None:
    """The first row without ids, of those that `among`, bool [rows], marks; None if there is none."""
    empty = sets.counts == 0 if among is None else (sets.counts == 0) & among.reshape(-1)
    return int(empty.nonzero()[0]) if empty.any() else None


def refiltered(logits: Tensor, targets: Tensor, *, top_k: int | None, top_p: float | None) -> tuple[TokenSets, Tensor]:
    """What a filter in vLLM's order keeps of a trainer's own logits [.., V], and where it drops the target, bool of the shape of
    targets. There the set is the target alone: log-prob 0, no gradient."""
    sets, flat = TokenSets.from_logits(logits, top_k=top_k, top_p=top_p, order="vllm"), targets.reshape(-1)
    lacking = ~sets.contains(flat)
    alone = TokenSets.from_counts(flat.to(sets.ids.dtype), torch.ones_like(flat))
    own = torch.arange(len(flat), device=flat.device)
    return TokenSets.cat([sets, alone]).take(own + lacking * len(flat)), lacking.view(targets.shape)
