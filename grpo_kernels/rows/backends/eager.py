"""Eager PyTorch: the readable version of every kernel, and the fallback where none runs.

Rows and slots are taken in blocks, so that temporaries stay within `block_bytes` (or one row) for any batch. Nothing waits for a
GPU: what is not used is computed with placeholder values and discarded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...formulas.token_stage import TokenStage
from .. import divergence
from ..partials import OF_BOTH, LogitRows, Partials, RowTransform, Slopes
from ..ragged import Ragged
from . import Backend


def available() -> str | None:
    return None


def block_bytes(device: torch.device) -> int:
    """On a CPU, a size that fits its cache and that the allocator keeps for reuse; on a GPU, enough to fill it."""
    return 16 << 20 if device.type == "cpu" else 256 << 20


def row_sums(x: Tensor) -> Tensor:
    """[r, V] -> [r]. On a CPU the sum of a single row is split among threads, which rounds differently: so sum it twice."""
    return x.sum(1) if x.shape[0] > 1 else x.expand(2, -1).sum(1)[:1]


class Kernels(Backend):
    makes_all = True
    writes_behind_reads = True  # a block is read completely before any of it is written

    def __init__(self, strict: bool = False, space: Tensor | None = None) -> None:
        """`space`: memory for calls of one block at a time, of which each `pull` comes right after the `stats` of the same block:
        it finds the exponentials there."""
        self.space = space

    # ---- rows of logits

    def stats(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        result = Partials.empty(names, rows.n, rows.logits.device, rows.second)
        space = _space(rows) if self.space is None else self.space
        for r, block in _blocks(rows, rows.logits):
            z = _transformed(block, rows.transform.at(r), space[0])
            d, e, terms = space[1:, : len(block)]
            ids, valid = _safe(rows.targets[r], z.shape[1])
            top = z.amax(1)
            torch.exp(torch.sub(z, _finite(top)[:, None], out=d), out=e)
            found = {"max": top, "sum": row_sums(e), "target": torch.where(valid, z.gather(1, ids)[:, 0], torch.nan)}
            if "weighted" in names:
                found["weighted"] = row_sums(torch.mul(d.clamp_(min=-1e4), e, out=terms))  # no infinity times 0
            if "squares" in names:
                found["squares"] = row_sums(e * e)
            if "top" in names:
                at_top = z == top[:, None]
                found["top"] = torch.where(at_top.any(1), at_top.to(torch.uint8).argmax(1), -1).to(torch.int32)
            if rows.second is not None:
                w = _second(rows, r)
                w_top = w.amax(1)
                q = (w - _finite(w_top)[:, None]).exp()
                differences = divergence.differences(z, w, _finite(top)[:, None], _finite(w_top)[:, None])
                cross, excess = divergence.first_terms(rows.second.kind, e, q, differences)
                found |= dict(zip(OF_BOTH, (w_top, row_sums(q), row_sums(cross), row_sums(excess)), strict=True))
            for name in names:
                if name in found:
                    result.at(r)[name].copy_(found[name])
        if rows.read is not None:
            empty = Partials.not_read(names, 1, rows.logits.device)
            return replace(result, values=torch.where(rows.read, result.values, empty.values))
        return result

    def mixed(self, rows: LogitRows, partials: Partials) -> Tensor:
        assert rows.second is not None
        result = torch.empty(2, rows.n, dtype=torch.float32, device=rows.logits.device)
        for r, block in _blocks(rows, rows.logits):
            z, own = _transformed(block, rows.transform.at(r)), partials.at(r)
            p = (z - _finite(own.max)[:, None]).exp() / own.sum[:, None]
            q, log_ratio = _against(z, _second(rows, r), own)
            terms = divergence.mixed_terms(rows.second.kind, p, q, log_ratio, rows.second.mixture)
            result[:, r] = torch.stack([row_sums(x) for x in terms])
        return result if rows.read is None else torch.where(rows.read, result, 0.0)

    def pull(self, rows: LogitRows, partials: Partials, slopes: Slopes, out: Tensor) -> None:
        transform, (constant, log, prob) = rows.transform, map(slopes.get, ("constant", "log", "prob"))
        log_sum, logps = torch.log(partials.sum), partials.logps
        dz_dx = transform.scale * transform.inv_temperature  # times 1 - tanh^2 with softcap
        # At column j, with e = exp(d): e (per_e + per_ed d + per_ee e). The target's column is computed separately, because expm1
        # is accurate where p is close to 1.
        per_e, at_target, probs = -slopes.target, -slopes.target * torch.expm1(logps), logps.exp()
        per_ed = per_ee = None
        if constant is not None:
            per_e, at_target = per_e + constant, at_target + probs * constant
        if log is not None:
            per_e, at_target = per_e - log * log_sum, at_target + log * probs * logps.clamp(min=-1e4)
            per_ed = log * dz_dx / partials.sum
        if prob is not None:
            at_target, per_ee = at_target + prob * probs * probs, prob * dz_dx / (partials.sum * partials.sum)
        per_e, at_target, idle = per_e * dz_dx / partials.sum, at_target * dz_dx, ~slopes.nonzero
        of_divergence = slopes.get("divergence")
        space = _space(rows) if self.space is None else self.space
        for (r, block), (_, to) in zip(_blocks(rows, rows.logits), _blocks(rows, out), strict=True):
            own, (d, e, g) = partials.at(r), space[1:, : len(block)]
            if self.space is None:
                z = _transformed(block, transform.at(r), space[0])
                torch.exp(torch.sub(z, own.max[:, None], out=d), out=e)
            if of_divergence is None and to.dtype == torch.float32 and not transform.softcap:
                g = to  # in place this is the block, which is not read again
            torch.mul(e, per_e[r, None] if per_ee is None else per_ee[r, None] * e + per_e[r, None], out=g)
            if per_ed is not None:
                g.addcmul_(d.clamp_(min=-1e4).mul_(e), per_ed[r, None])
            ids, valid = _safe(rows.targets[r], g.shape[1])
            # A target outside these columns (it may belong to another rank) changes none of them.
            g.scatter_(1, ids, torch.where(valid[:, None], at_target[r, None], g.gather(1, ids)))
            if of_divergence is not None:
                assert rows.second is not None
                z = _transformed(block, transform.at(r), space[0])
                q, log_ratio = _against(z, _second(rows, r), own)
                of = (e / own.sum[:, None], q, log_ratio, own.center[:, None])
                of_columns = divergence.gradient(rows.second.kind, *of, rows.second.mixture)
                g.add_(of_columns.mul_((of_divergence * dz_dx)[r, None]))
            if transform.softcap:
                g.mul_(1.0 - (block.float() * (transform.scale / transform.softcap)).tanh_().square_())
            _zero(g, idle[r])
            if g is not to:
                to.copy_(g)

    def fused(self, rows: LogitRows, stage: TokenStage, out: Tensor | None) -> Tensor:
        result = torch.zeros(3 if rows.second is None else 4, rows.n, dtype=torch.float32, device=rows.logits.device)
        of_block = Kernels(space=_space(rows))
        for r, _ in _blocks(rows, rows.logits):
            block = rows.cut(r.start, r.stop)
            result[:, r] = of_block.two_visits(block, stage.at(r), out, block.n)
        return result

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        gradient.mul_(factor)

    def evaluate(self, stage: TokenStage, logps: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        terms = stage.terms(logps, entropy)
        return terms.losses, terms.d_logps, terms.d_entropy

    # ---- products over slots

    def slot_logits(self, hidden: Tensor, weight: Tensor, slots: Ragged) -> Tensor:
        logits = torch.empty(slots.ids.shape, dtype=torch.float32, device=hidden.device)
        for at in _slot_blocks(slots.ids.numel(), hidden):
            ids = slots.ids[at]
            products = hidden[slots.rows[at]].float().mul_(weight[ids.clamp(min=0)])
            logits[at] = row_sums(products).masked_fill_(ids < 0, -torch.inf)
        return logits

    def add_weight_rows(self, values: Tensor, slots: Ragged, weight: Tensor, out: Tensor) -> None:
        _sum_by_key(slots.rows, slots.ids, _used(values, slots), values, weight, out, keep=False)

    def add_hidden_rows(self, values: Tensor, slots: Ragged, hidden: Tensor, out: Tensor) -> None:
        _sum_by_key(slots.ids, slots.rows, _used(values, slots), values, hidden, out, keep=True)


# ---- rows of logits


def _block_rows(rows: LogitRows) -> int:
    copies = 4 if rows.second is None else 10
    return max(1, block_bytes(rows.logits.device) // (4 * rows.logits.shape[-1] * copies))


def _blocks(rows: LogitRows, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows of the per-row vectors, their [r, V] view of these logits) such that the fp32 copies fit the budget."""
    A, T, _ = logits.shape
    lo, hi = rows.part or (0, A * T)
    size, start = _block_rows(rows), lo
    while start < hi:
        a, t = divmod(start, T)  # a block stays within one outer index, where rows have one stride
        end = min(hi, start + size, (a + 1) * T)
        yield slice(start - lo, end - lo), logits[a, t : t + end - start]
        start = end


def _zero(g: Tensor, idle: Tensor) -> None:
    """Write 0 into the rows of g [r, V] that are `idle`, bool [r]; into these alone where the host knows them."""
    if g.device.type == "cpu":
        g.index_fill_(0, idle.nonzero()[:, 0], 0.0)
    else:
        g.masked_fill_(idle[:, None], 0.0)


def _space(rows: LogitRows) -> Tensor:
    """Four fp32 copies of a block, for all blocks: on a CPU fresh memory of this size costs more than the arithmetic."""
    return torch.empty(4, min(_block_rows(rows), rows.n), rows.logits.shape[-1], dtype=torch.float32, device=rows.logits.device)


def _transformed(x: Tensor, transform: RowTransform, space: Tensor | None = None) -> Tensor:
    """The transformed rows x [r, V] in fp32: x itself where nothing changes it, else in the first rows of `space`."""
    if space is None:
        space = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return transform.of_rows(x, space[: len(x)])


def _second(rows: LogitRows, r: slice) -> Tensor:
    """The transformed rows of the second stream in a block."""
    assert rows.second is not None
    first = r.start + (0 if rows.part is None else rows.part[0])
    a, t = divmod(first, rows.logits.shape[1])
    return _transformed(rows.second.logits[a, t : t + r.stop - r.start], rows.second.transform.at(r))


def _against(z: Tensor, w: Tensor, partials: Partials) -> tuple[Tensor, Tensor]:
    """(q, log p - log q) [r, V], from transformed rows and their statistics."""
    tops = _finite(partials.max)[:, None], _finite(partials["teacher_max"])[:, None]
    q = (w - tops[1]).exp() / partials["teacher_sum"][:, None]
    return q, divergence.differences(z, w, *tops) + partials.log_sums[:, None]


def _safe(targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """([r, 1] ids with 0 in place of those out of range, [r] whether an id is in range)."""
    valid = (targets >= 0) & (targets < vocab)
    return torch.where(valid, targets, 0)[:, None], valid


def _finite(top: Tensor) -> Tensor:
    """Maxima with 0 in place of those of rows of only -inf."""
    return top.masked_fill(top == -torch.inf, 0.0)


# ---- products over slots


def _used(values: Tensor, slots: Ragged) -> Tensor:
    return (slots.ids >= 0) & (values != 0)


def _slot_blocks(m: int, width_of: Tensor) -> Iterator[slice]:
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
    for at in _slot_blocks(m, out):
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
