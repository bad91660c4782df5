"""Divergences from teachers that are known at some ids, by the formulas of the four tails."""

from __future__ import annotations

import torch

from grpo_kernels import Exact, TokenSets
from support import oracle

Tensor = torch.Tensor


def of_listed_ids(exact: Exact, log_p: Tensor, sets: TokenSets) -> Tensor:
    """[n] of log-probs [n, V], to those that `sets` has as values: from the formulas of the four tails. 0 of a row without ids."""
    row, place = sets.row_of.long(), torch.arange(sets.ids.numel()) - sets.offsets[sets.row_of.long()]
    listed = torch.zeros(len(log_p), max(sets.longest, 1), dtype=torch.bool).index_put((row, place), torch.tensor(True))
    used = listed.any(1)
    listed[~used, 0] = True  # any id, so that nothing is NaN
    ids = torch.zeros(listed.shape, dtype=torch.int64).index_put((row, place), sets.ids.long())
    lq = torch.zeros(listed.shape, dtype=log_p.dtype).index_put((row, place), sets.values.to(log_p.dtype))  # type: ignore[union-attr]
    lp, lq = (x.masked_fill(~listed, -torch.inf) for x in (log_p.gather(1, ids), lq))
    p, q = lp.exp().sum(1), lq.exp().sum(1)
    if exact.tail == "bin":
        outside = log_p.exp().masked_fill(sets.mask(log_p.shape[1]), 0.0).sum(1), 1 - q
        lp, lq = (torch.cat([x, mass.clamp(min=1e-7).log()[:, None]], 1) for x, mass in zip((lp, lq), outside, strict=True))
    elif exact.tail == "renormalise":
        lp, lq = lp.log_softmax(1), lq.log_softmax(1)
    value = oracle.divergence(lp, lq, exact.direction, exact.share)
    if exact.tail == "generalised" and exact.direction in ("reverse", "forward"):  # of the others the masses cancel
        value = value + {"reverse": 1, "forward": -1}[exact.direction] * (q - p)
    return torch.where(used, value, 0.0)
