"""Eager PyTorch: the readable version of the vocabulary stage, and the fallback where no kernel runs.

Rows are processed in blocks, so temporaries stay within `block_bytes` (or two rows) for any batch. In one visit, each logit
costs one exponential: the gradient reuses those of the statistics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from .. import divergence
from ..rows import OF_BOTH, RowStats, RowTransform, Slopes, Teacher
from . import FusedRows, two_visits
from .eager_rows import block_bytes, row_sums
from .eager_select import masses, select  # noqa: F401
from .eager_sparse import add_hidden_rows, add_weight_rows, slot_logits  # noqa: F401

if TYPE_CHECKING:
    from ...formulas.token_stage import TokenRows
    from ...objective import Objective

Tensor = torch.Tensor

WRITES_BEHIND_READS = True  # a block is read completely before any of it is written


def available() -> str | None:
    return None


def _blocks(logits: Tensor, rows: tuple[int, int] | None, teacher: Teacher | None = None) -> Iterator[tuple[slice, Tensor]]:
    """(rows of the per-row vectors, their [r, V] view of the logits) such that the fp32 copies fit the budget."""
    A, T, _ = logits.shape
    lo, hi = (0, A * T) if rows is None else rows
    size = _block_rows(logits, teacher)
    start = lo
    while start < hi:
        a, t = divmod(start, T)  # a block stays within one outer index, where rows have one stride
        end = min(hi, start + size, (a + 1) * T)
        yield slice(start - lo, end - lo), logits[a, t : t + end - start]
        start = end


def _teacher_blocks(teacher: Teacher | None, rows: tuple[int, int] | None) -> Iterator[Tensor | None]:
    """The teacher's view of each of those blocks; None without a teacher."""
    return repeat(None) if teacher is None else (x for _, x in _blocks(teacher.logits, rows, teacher))


def _block_rows(logits: Tensor, teacher: Teacher | None) -> int:
    copies = 2 if teacher is None else 8
    return max(1, block_bytes(logits.device) // (4 * logits.shape[-1] * copies))


class Scratch:
    """fp32 memory that blocks reuse. Memory freed after each block would go back to the system, and new pages are slow."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], Tensor] = {}

    def like(self, x: Tensor, name: str, block: int = 0) -> Tensor:
        held = self.held.get((name, block))
        if held is None or held.numel() < x.numel():
            held = self.held[name, block] = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
        return held[: x.numel()].view(x.shape)


def _safe(targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """([r, 1] ids with 0 in place of those out of range, [r] whether an id is in range)."""
    valid = (targets >= 0) & (targets < vocab)
    return torch.where(valid, targets, 0)[:, None], valid


def looks_are_free(x: Tensor) -> bool:
    """Whether reading values of x on the host is free. On a GPU it would be a host sync."""
    return x.device.type == "cpu"


class Exponentials(NamedTuple):
    """fp32 [r, V] of a block, with d = z - max: values that statistics and gradient share."""

    e: Tensor  # exp(d)
    ed: Tensor | None  # exp(d) d, and 0 where exp(d) is 0; None where nothing needs it

    @staticmethod
    def of(z: Tensor, top: Tensor, weighted: bool, d: Tensor, e: Tensor | None) -> Exponentials:
        """Computed in the memory of `d`, which may be that of z, and with `weighted` also of `e`."""
        torch.sub(z, top[:, None], out=d)
        if not weighted:
            return Exponentials(d.exp_(), None)
        assert e is not None
        torch.exp(d, out=e)
        return Exponentials(e, d.clamp_(min=-1e4).mul_(e))  # no infinity times 0


def stats(
    logits: Tensor,
    targets: Tensor,
    read: Tensor | None,
    transform: RowTransform,
    names: tuple[str, ...],
    *,
    rows: tuple[int, int] | None = None,
    teacher: Teacher | None = None,
    keep: list[Exponentials] | None = None,
    scratch: Scratch | None = None,
) -> RowStats:
    """Partials of rows. `keep` collects the exponentials of each block for `pull` of the same rows; they are in `scratch`."""
    scratch, weighted = scratch or Scratch(), "weighted" in names
    result = RowStats.empty(names, targets.numel(), logits.device, teacher)
    for (r, x), w in zip(_blocks(logits, rows, teacher), _teacher_blocks(teacher, rows), strict=False):
        own = 0 if keep is None else len(keep)
        memory = scratch.like(x, "d", own)
        z, block = transform.at(r).of_rows(x, memory), result.at(r)
        ids, valid = _safe(targets[r], logits.shape[-1])
        block.target.copy_(torch.where(valid, z.gather(1, ids)[:, 0], torch.nan))
        top = z.amax(1)
        block.max.copy_(top)
        if "top" in names:
            block.get("top").copy_(_first(z == top[:, None]))  # type: ignore[union-attr]
        e = scratch.like(x, "e", own) if weighted else None
        second = None if teacher is None or w is None else _Second.of((z, top), (w, None), teacher, r, scratch)
        of = Exponentials.of(z, _finite(top), weighted, memory, e)
        block.sum.copy_(row_sums(of.e))
        if of.ed is not None:
            block.get("weighted").copy_(row_sums(of.ed))  # type: ignore[union-attr]
        if "squares" in names:
            block.get("squares").copy_(row_sums(of.e * of.e))  # type: ignore[union-attr]
        if second is not None:
            assert teacher is not None
            cross, excess = divergence.first_terms(teacher.kind, of.e, second.e, second.d)
            sums = (second.top, row_sums(second.e), row_sums(cross), row_sums(excess))
            for name, x in zip(OF_BOTH, sums, strict=True):
                block.get(name).copy_(x)  # type: ignore[union-attr]
        if keep is not None:
            keep.append(of)
    if read is not None:
        empty = RowStats.not_read(names, 1, logits.device)
        return result._replace(values=torch.where(read, result.values, empty.values))
    return result


class _Second(NamedTuple):
    """Of a block's rows w of the teacher: their largest, [r], and fp32 [r, V]."""

    top: Tensor
    e: Tensor  # exp(w - top)
    d: Tensor  # (z - the largest z) - (w - top)

    @staticmethod
    def of(
        student: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor | None], teacher: Teacher, rows: slice, scratch: Scratch
    ) -> _Second:
        """From (z, its largest) and (the teacher's logits, their largest once transformed, None: to be found)."""
        memory = scratch.like(w[0], "teacher")
        plain = teacher.transform.at(rows).of_rows(w[0], memory)
        top = plain.amax(1) if w[1] is None else w[1]
        finite = _finite(top)[:, None]
        d = divergence.differences(student[0], plain, _finite(student[1])[:, None], finite)
        return _Second(top, torch.sub(plain, finite, out=memory).exp_(), d)


def _finite(top: Tensor) -> Tensor:
    """Maxima with 0 in place of those of rows of only -inf."""
    return top.masked_fill(top == -torch.inf, 0.0)


class _Whole:
    """The teacher's probabilities and log-ratios to it, from statistics of whole rows."""

    def __init__(self, stats: RowStats, teacher: Teacher, scratch: Scratch) -> None:
        self.stats, self.teacher, self.scratch = stats, teacher, scratch
        self.top, self.sum = stats.get("teacher_max"), stats.get("teacher_sum")
        self.log_sums = stats.log_sums

    def of(self, z: Tensor, w: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """(q, log p - log q) [r, V], from transformed z and the teacher's logits as they are."""
        assert self.top is not None and self.sum is not None, self.stats.names
        second = _Second.of((z, self.stats.max[rows]), (w, self.top[rows]), self.teacher, rows, self.scratch)
        return second.e.div_(self.sum[rows, None]), second.d.add_(self.log_sums[rows, None])


def mixed(
    logits: Tensor,
    stats: RowStats,
    transform: RowTransform,
    teacher: Teacher,
    read: Tensor | None,
    *,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """[2, n]: KL(p||m) and KL(q||m) of p, the teacher's q and their mixture m, from statistics of whole rows. Of a part of the
    columns, its part of these sums."""
    scratch = Scratch()
    whole = _Whole(stats, teacher, scratch)
    result = torch.empty(2, stats.max.numel(), dtype=torch.float32, device=logits.device)
    for (r, x), w in zip(_blocks(logits, rows, teacher), _teacher_blocks(teacher, rows), strict=True):
        assert w is not None
        memory = scratch.like(x, "d")
        z = transform.at(r).of_rows(x, memory)
        q, log_ratio = whole.of(z, w, r)
        p = Exponentials.of(z, _finite(stats.max[r]), False, memory, None).e.div_(stats.sum[r, None])
        for sums, terms in zip(result, divergence.mixed_terms(p, q, log_ratio, teacher.mixture), strict=True):
            sums[r] = row_sums(terms)
    return result if read is None else torch.where(read, result, 0.0)


def _first(found: Tensor) -> Tensor:
    """[r, V] bool -> int32 [r]: the first column that is set, -1 where none is."""
    return torch.where(found.any(1), found.to(torch.uint8).argmax(1), -1).to(torch.int32)


def pull(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    slopes: Slopes,
    transform: RowTransform,
    out: Tensor,
    *,
    rows: tuple[int, int] | None = None,
    teacher: Teacher | None = None,
    kept: list[Exponentials] | None = None,
) -> None:
    """Write the gradient that `slopes` give, times dz/dx, into `out`. `kept`: the exponentials that `stats` collected for these
    rows, which are overwritten."""
    teacher = None if slopes.teacher is None else teacher
    log_sum, logps = torch.log(stats.sum), stats.logps
    dz_dx = transform.scale * transform.inv_temperature  # times 1 - tanh^2 with softcap
    # At column j, with e = exp(d): e (per_e + per_ed d + per_ee e). The target's column is computed separately, because expm1
    # is accurate where p is close to 1.
    per_e, at_target, probs = -slopes.target, -slopes.target * torch.expm1(logps), logps.exp()
    per_ed = per_ee = None
    if slopes.constant is not None:
        per_e, at_target = per_e + slopes.constant, at_target + probs * slopes.constant
    if slopes.log is not None:
        per_e, at_target = per_e - slopes.log * log_sum, at_target + slopes.log * probs * logps.clamp(min=-1e4)
        per_ed = slopes.log * dz_dx / stats.sum
    if slopes.prob is not None:
        at_target = at_target + slopes.prob * probs * probs
        per_ee = slopes.prob * dz_dx / (stats.sum * stats.sum)
    per_e, at_target, idle = per_e * dz_dx / stats.sum, at_target * dz_dx, ~slopes.nonzero
    scratch = Scratch()
    whole = None if teacher is None else _Whole(stats, teacher, scratch)
    center = None if teacher is None else stats.center
    pairs = zip(_blocks(logits, rows, teacher), _blocks(out, rows, teacher), strict=True)
    for i, (((r, x), (_, y)), w) in enumerate(zip(pairs, _teacher_blocks(teacher, rows), strict=False)):
        to_teacher = None
        if kept is None:
            memory = scratch.like(x, "d")
            second = scratch.like(x, "e") if per_ed is not None else None
            z = transform.at(r).of_rows(x, memory)
            two = None if whole is None or w is None else whole.of(z, w, r)
            e, ed = Exponentials.of(z, stats.max[r], per_ed is not None, memory, second)
            if two is not None:
                assert teacher is not None and slopes.teacher is not None and center is not None
                of = (e / stats.sum[r, None], *two, center[r, None])
                to_teacher = divergence.gradient(teacher.kind, *of, teacher.mixture)
                to_teacher.mul_((slopes.teacher * dz_dx)[r, None])
        else:
            e, ed = kept[i]
        # fp32 gradients are computed in `out`, others in the memory of the exponentials.
        g = y if y.dtype == torch.float32 and not transform.softcap and per_ee is None else e
        if per_ee is None:
            torch.mul(e, per_e[r, None], out=g)
        else:
            torch.mul(e, per_ee[r, None] * e + per_e[r, None], out=g)
        if per_ed is not None:
            assert ed is not None
            g.addcmul_(ed, per_ed[r, None])
        ids, valid = _safe(targets[r], logits.shape[-1])
        # A target outside these columns (it may belong to another rank) changes none of them.
        g.scatter_(1, ids, torch.where(valid[:, None], at_target[r, None], g.gather(1, ids)))
        if to_teacher is not None:
            g.add_(to_teacher)
        if transform.softcap:
            t = x.to(torch.float32, copy=True).mul_(transform.scale / transform.softcap).tanh_()
            g.mul_(t.square_().neg_().add_(1.0))
        if looks_are_free(idle):
            g.index_fill_(0, idle[r].nonzero()[:, 0], 0.0)
        else:  # finding the indices would be a host sync
            g.masked_fill_(idle[r, None], 0.0)
        if g is not y:
            y.copy_(g)


class _Remembering:
    """This backend, with a `pull` that reuses the exponentials of the last `stats`."""

    def __init__(self) -> None:
        self.kept: list[Exponentials] = []
        self.scratch = Scratch()

    def stats(self, *args: Any, **options: Any) -> RowStats:
        self.kept.clear()
        return stats(*args, **options, keep=self.kept, scratch=self.scratch)

    def pull(self, *args: Any, **options: Any) -> None:
        pull(*args, **options, kept=self.kept)


def fused(
    logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out: Tensor | None,
    *, teacher: Teacher | None = None,
) -> FusedRows:  # fmt: skip
    backend = cast(Any, _Remembering() if teacher is None else sys.modules[__name__])
    return two_visits(backend, logits, rows, objective, transform, out, _block_rows(logits, teacher), teacher)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    gradient.mul_(factor)
