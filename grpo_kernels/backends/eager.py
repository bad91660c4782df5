"""Eager PyTorch: the readable version of the vocabulary stages, and the fallback where no kernel runs.

Rows go through in blocks, so the temporaries stay within `block_bytes` (or one row) whatever the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from . import FusedRows, RowStats, RowTransform, two_visits

if TYPE_CHECKING:
    from ..objective import Objective
    from ..token_stage import TokenRows

Tensor = torch.Tensor

WRITES_BEHIND_READS = True  # a block is copied before any of it is written


def block_bytes(device: torch.device) -> int:
    """What the cache of a CPU holds (and its allocator keeps, instead of faulting in fresh pages); enough to fill a GPU."""
    return 8 << 20 if device.type == "cpu" else 256 << 20


def available() -> str | None:
    return None


def _blocks(logits: Tensor, rows: tuple[int, int] | None, copies: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows of the per-row vectors, their [r, V] view of the logits) such that `copies` fp32 copies fit the budget."""
    A, T, V = logits.shape
    lo, hi = (0, A * T) if rows is None else rows
    size = max(1, block_bytes(logits.device) // (4 * V * copies))
    start = lo
    while start < hi:
        a, t = divmod(start, T)  # a block stays within one outer index, where rows have one stride
        end = min(hi, start + size, (a + 1) * T)
        yield slice(start - lo, end - lo), logits[a, t : t + end - start]
        start = end


def _column(x: float | Tensor, rows: slice) -> float | Tensor:
    return x if isinstance(x, float) else x[rows, None]


def _transformed(x: Tensor, transform: RowTransform, rows: slice) -> Tensor:
    """z [r, V] fp32: the only copy of the block."""
    z = x.to(torch.float32, copy=True)
    if transform.scale != 1.0:
        z.mul_(transform.scale)
    if transform.softcap:
        z.div_(transform.softcap).tanh_().mul_(transform.softcap)
    return z.mul_(_column(transform.inv_temperature, rows))


def _safe(targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """([r, 1] ids that can be gathered, [r] whether they are the real ones)."""
    valid = (targets >= 0) & (targets < vocab)
    return torch.where(valid, targets, 0)[:, None], valid


def _row_sums(x: Tensor) -> Tensor:
    """[r, V] -> [r]. A CPU cuts the sum of one long row up among its threads, that of a row among others it does not."""
    return x.sum(1) if x.shape[0] > 1 else x.expand(2, -1).sum(1)[:1]


def row_stats(
    logits: Tensor,
    targets: Tensor,
    read: Tensor | None,
    transform: RowTransform,
    entropy: bool,
    *,
    rows: tuple[int, int] | None = None,
) -> RowStats:
    n = targets.numel()
    top, total, weighted, chosen = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(4))
    for r, x in _blocks(logits, rows, copies=1):
        z = _transformed(x, transform, r)
        ids, valid = _safe(targets[r], logits.shape[-1])
        chosen[r] = torch.where(valid, z.gather(1, ids)[:, 0], torch.nan)
        top[r] = z.amax(1)
        z.sub_(top[r, None].masked_fill(top[r, None] == -torch.inf, 0.0)).exp_()
        total[r] = _row_sums(z)
        if entropy:
            weighted[r] = _row_sums(z.xlogy_(z))  # e^(z - max) (z - max), and 0 where e^(z - max) is 0
    if read is not None:
        chosen, top, weighted = (torch.where(read, x, 0.0) for x in (chosen, top, weighted))
        total = torch.where(read, total, 1.0)
    return RowStats(top, total, weighted if entropy else None, chosen)


def row_grads(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    entropy: Tensor | None,
    d_logps: Tensor,
    d_entropy: Tensor | None,
    transform: RowTransform,
    out: Tensor,
    *,
    rows: tuple[int, int] | None = None,
) -> None:
    """d_logits = d_logp (onehot - p) - d_entropy p (log p + H), times dz/dx, written into `out`."""
    idle = d_logps == 0 if d_entropy is None else (d_logps == 0) & (d_entropy == 0)
    for (r, x), (_, y) in zip(_blocks(logits, rows, copies=2), _blocks(out, rows, copies=2), strict=True):
        z = _transformed(x, transform, r)
        ids, valid = _safe(targets[r], logits.shape[-1])
        d_logp, logp = d_logps[r, None], stats.logps[r, None]
        # max and log(sum) go one after the other: their sum rounds where logits are large.
        z.sub_(stats.max[r, None]).sub_(torch.log(stats.sum[r, None]))
        d_target = -d_logp * torch.expm1(logp)  # accurate where p is close to 1
        if d_entropy is None:
            g = z.exp().mul_(-d_logp)
        else:
            assert entropy is not None
            H, dH = entropy[r, None], d_entropy[r, None]
            d_target = d_target - dH * logp.exp() * (logp.clamp(min=-1e4) + H)
            g = z.exp()
            g.mul_(z.clamp_(min=-1e4).add_(H).mul_(-dH).sub_(d_logp))  # the clamp keeps 0 * log 0 at 0
        # Where the target is none of these columns (it may be another rank's), they have no column of their own kind.
        g.scatter_(1, ids, torch.where(valid[:, None], d_target, g.gather(1, ids)))
        factor = _column(transform.inv_temperature, r)
        if transform.softcap:
            z.copy_(x).mul_(transform.scale).div_(transform.softcap).tanh_()
            g.mul_(z.square_().neg_().add_(1.0))
        g.mul_(factor).mul_(transform.scale)
        y.copy_(g.masked_fill_(idle[r, None], 0.0))


def fused_loss(logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None) -> FusedRows:
    block_rows = max(1, block_bytes(logits.device) // (4 * logits.shape[-1]))
    return two_visits(sys.modules[__name__], logits, rows, objective, transform, out, block_rows)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    gradient.mul_(factor)
