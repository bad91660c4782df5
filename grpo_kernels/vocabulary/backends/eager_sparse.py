"""Sparse products in eager PyTorch. Slots are processed in blocks, so temporaries stay within `block_bytes`. There is no host
synchronisation: slots that are not used are computed with placeholder values and then discarded."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..sparse import Slots
from .eager_rows import block_bytes, row_sums

Tensor = torch.Tensor


def slot_logits(hidden: Tensor, weight: Tensor, slots: Slots) -> Tensor:
    logits = torch.empty(slots.ids.shape, dtype=torch.float32, device=hidden.device)
    for at in _blocks(slots.ids.numel(), hidden):
        ids = slots.ids[at]
        products = hidden[slots.rows[at]].float().mul_(weight[ids.clamp(min=0)])
        logits[at] = row_sums(products).masked_fill_(ids < 0, -torch.inf)
    return logits


def add_weight_rows(values: Tensor, slots: Slots, weight: Tensor, out: Tensor) -> None:
    _sum_by_key(slots.rows, slots.ids, _used(values, slots), values, weight, out, keep=False)


def add_hidden_rows(values: Tensor, slots: Slots, hidden: Tensor, out: Tensor) -> None:
    _sum_by_key(slots.ids, slots.rows, _used(values, slots), values, hidden, out, keep=True)


def _used(values: Tensor, slots: Slots) -> Tensor:
    return (slots.ids >= 0) & (values != 0)


def _blocks(m: int, width_of: Tensor) -> Iterator[slice]:
    """Ranges of m slots such that four fp32 rows for each fit the budget."""
    size = max(1, block_bytes(width_of.device) // (16 * width_of.shape[1]))
    return (slice(lo, min(lo + size, m)) for lo in range(0, m, size))


def _sum_by_key(keys: Tensor, index: Tensor, used: Tensor, values: Tensor, source: Tensor, out: Tensor, *, keep: bool) -> None:
    """out[k] = sum of values * source[index] over the used places whose key is k, in their order; with `keep` plus out[k]."""
    m, limit = keys.numel(), out.shape[0]
    if m == 0:
        return
    keys, order = torch.where(used, keys, limit).sort(stable=True)  # unused places come last
    carried = torch.zeros(1, out.shape[1], dtype=torch.float32, device=out.device)
    carried_key = keys[:1]
    for at in _blocks(m, out):
        # The first group continues from the previous block's partial sum; the last one is carried over to the next block.
        places, block_keys = order[at], torch.cat([carried_key, keys[at]])
        terms = source[index[places].clamp(min=0)].float().mul_(values[places, None])
        terms = torch.cat([carried, torch.where(used[places, None], terms, 0.0)])
        groups = torch.cat([torch.zeros_like(carried_key), (block_keys[1:] != block_keys[:-1]).cumsum(0)])
        sums = _grouped_sums(terms, groups)
        targets = torch.full_like(block_keys, limit).scatter_(0, groups, block_keys)
        carried, carried_key = sums.index_select(0, groups[-1:]), block_keys[-1:]
        complete = targets < limit
        if at.stop < m:
            complete &= torch.arange(len(targets), device=out.device) != groups[-1]
        _write(sums, targets, complete, out, keep)


def _grouped_sums(terms: Tensor, groups: Tensor) -> Tensor:
    """The sum of the terms of each group, in their order. Groups are numbered 0, 1, .. without gaps."""
    sums = torch.zeros_like(terms)
    if terms.device.type == "cpu":
        return sums.index_add_(0, groups, terms)
    return sums.index_put_((groups,), terms, accumulate=True)  # sorted on a GPU, where index_add_ uses atomics


def _write(sums: Tensor, targets: Tensor, complete: Tensor, out: Tensor, keep: bool) -> None:
    """The sums of complete groups into their rows of out. In place of another group, a complete one is written once more."""
    groups = torch.where(complete, torch.arange(len(targets), device=out.device), complete.to(torch.uint8).argmax())
    rows = targets[groups].clamp(max=out.shape[0] - 1)
    before = out[rows]
    after = sums[groups] + before if keep else sums[groups]
    out.index_copy_(0, rows, torch.where(complete[groups, None], after.to(out.dtype), before))
