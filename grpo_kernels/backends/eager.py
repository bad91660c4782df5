"""Eager PyTorch: the readable version of the vocabulary stages, and the fallback where no kernel runs.

Rows go through in blocks, so the temporaries stay within `block_bytes` (or two rows) whatever the batch. A logit costs one
exponential: the gradient is made of those that the statistics were summed from, where both are made in one visit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from . import FusedRows, RowStats, RowTransform, two_visits

if TYPE_CHECKING:
    from ..objective import Objective
    from ..token_stage import TokenRows

Tensor = torch.Tensor

WRITES_BEHIND_READS = True  # all of a block is read before any of it is written


def block_bytes(device: torch.device) -> int:
    """What the cache of a CPU holds (and its allocator keeps, instead of faulting in fresh pages); enough to fill a GPU."""
    return 16 << 20 if device.type == "cpu" else 256 << 20


def available() -> str | None:
    return None


def _blocks(logits: Tensor, rows: tuple[int, int] | None) -> Iterator[tuple[slice, Tensor]]:
    """(rows of the per-row vectors, their [r, V] view of the logits) such that two fp32 copies fit the budget."""
    A, T, _ = logits.shape
    lo, hi = (0, A * T) if rows is None else rows
    size = _block_rows(logits)
    start = lo
    while start < hi:
        a, t = divmod(start, T)  # a block stays within one outer index, where rows have one stride
        end = min(hi, start + size, (a + 1) * T)
        yield slice(start - lo, end - lo), logits[a, t : t + end - start]
        start = end


def _block_rows(logits: Tensor) -> int:
    return max(1, block_bytes(logits.device) // (4 * logits.shape[-1] * 2))


def _column(x: float | Tensor, rows: slice) -> float | Tensor:
    return x if isinstance(x, float) else x[rows, None]


def _transformed(x: Tensor, transform: RowTransform, rows: slice) -> Tensor:
    """z [r, V] fp32: x itself where nothing is to be done, else a copy."""
    factor = _column(transform.inv_temperature, rows)
    plain = isinstance(factor, float) and factor * transform.scale == 1.0 and not transform.softcap
    if x.dtype == torch.float32 and plain:
        return x
    z = x.to(torch.float32, copy=True)
    if transform.softcap:
        return z.mul_(transform.scale / transform.softcap).tanh_().mul_(transform.softcap * factor)
    return z if plain else z.mul_(transform.scale * factor)


def _safe(targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """([r, 1] ids that can be gathered, [r] whether they are the real ones)."""
    valid = (targets >= 0) & (targets < vocab)
    return torch.where(valid, targets, 0)[:, None], valid


def _row_sums(x: Tensor) -> Tensor:
    """[r, V] -> [r]. A CPU cuts the sum of one long row up among its threads, that of a row among others it does not."""
    return x.sum(1) if x.shape[0] > 1 else x.expand(2, -1).sum(1)[:1]


class Exponentials(NamedTuple):
    """Of a block, fp32 [r, V], d = z - max: what both stages need of it."""

    e: Tensor  # exp(d)
    ed: Tensor | None  # exp(d) d, and 0 where exp(d) is 0; None without entropy

    @staticmethod
    def of(z: Tensor, top: Tensor, entropy: bool, overwrite: bool) -> Exponentials:
        """`overwrite`: z is a copy, whose memory may be used."""
        d = torch.sub(z, top[:, None], out=z if overwrite else None)
        if not entropy:
            return Exponentials(d.exp_(), None)
        e = torch.exp(d)
        return Exponentials(e, d.clamp_(min=-1e4).mul_(e))  # no infinity times 0


def row_stats(
    logits: Tensor,
    targets: Tensor,
    read: Tensor | None,
    transform: RowTransform,
    entropy: bool,
    *,
    rows: tuple[int, int] | None = None,
    keep: list[Exponentials] | None = None,
) -> RowStats:
    """`keep` collects the exponentials of each block, for `row_grads` of the same rows."""
    n = targets.numel()
    top, total, weighted, chosen = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(4))
    for r, x in _blocks(logits, rows):
        z = _transformed(x, transform, r)
        ids, valid = _safe(targets[r], logits.shape[-1])
        chosen[r] = torch.where(valid, z.gather(1, ids)[:, 0], torch.nan)
        top[r] = z.amax(1)
        block = Exponentials.of(z, top[r].masked_fill(top[r] == -torch.inf, 0.0), entropy, overwrite=z is not x)
        total[r] = _row_sums(block.e)
        if block.ed is not None:
            weighted[r] = _row_sums(block.ed)
        if keep is not None:
            keep.append(block)
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
    kept: list[Exponentials] | None = None,
) -> None:
    """d_logits = d_logp (onehot - p) - d_entropy p (log p + H), times dz/dx, written into `out`. `kept`: what `row_stats` has
    collected of these rows, with entropy; it is overwritten."""
    log_sum, logps = torch.log(stats.sum), stats.logps
    slope = transform.scale * transform.inv_temperature  # dz/dx, times 1 - tanh^2 with softcap
    constant, d_target = d_logps, -d_logps * torch.expm1(logps)  # expm1 is accurate where p is close to 1
    if d_entropy is not None:
        assert entropy is not None
        constant = d_logps + d_entropy * (entropy - log_sum)
        d_target = d_target - d_entropy * logps.exp() * (logps.clamp(min=-1e4) + entropy)
    idle = d_logps == 0 if d_entropy is None else (d_logps == 0) & (d_entropy == 0)
    per_e, per_ed = -constant * slope / stats.sum, None if d_entropy is None else -d_entropy * slope / stats.sum
    d_target = d_target * slope
    for i, ((r, x), (_, y)) in enumerate(zip(_blocks(logits, rows), _blocks(out, rows), strict=True)):
        if kept is None:
            z = _transformed(x, transform, r)
            e, ed = Exponentials.of(z, stats.max[r], d_entropy is not None, overwrite=z is not x)
        else:
            e, ed = kept[i]
        # fp32 gradients are made where they belong, others in the memory of the exponentials.
        g = y if y.dtype == torch.float32 and not transform.softcap else e
        torch.mul(e, per_e[r, None], out=g)
        if per_ed is not None:
            assert ed is not None
            g.addcmul_(ed, per_ed[r, None])
        ids, valid = _safe(targets[r], logits.shape[-1])
        # Where the target is none of these columns (it may be another rank's), they have no column of their own kind.
        g.scatter_(1, ids, torch.where(valid[:, None], d_target[r, None], g.gather(1, ids)))
        if transform.softcap:
            t = x.to(torch.float32, copy=True).mul_(transform.scale / transform.softcap).tanh_()
            g.mul_(t.square_().neg_().add_(1.0))
        if idle.device.type != "cpu" or idle[r].any():  # on a GPU to look would be to wait
            g.masked_fill_(idle[r, None], 0.0)
        if g is not y:
            y.copy_(g)


class _Remembering:
    """This backend, whose gradients start from the exponentials of the statistics made last."""

    def __init__(self) -> None:
        self.kept: list[Exponentials] = []

    def row_stats(self, *args: Any, **options: Any) -> RowStats:
        self.kept.clear()
        return row_stats(*args, **options, keep=self.kept)

    def row_grads(self, *args: Any, **options: Any) -> None:
        row_grads(*args, **options, kept=self.kept)


def fused_loss(logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None) -> FusedRows:
    return two_visits(cast(Any, _Remembering()), logits, rows, objective, transform, out, _block_rows(logits))


def scale_(gradient: Tensor, factor: Tensor) -> None:
    gradient.mul_(factor)
