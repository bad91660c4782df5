"""Ids that the token of a row lists, inside the fused kernel.

Sums over them are fp64: at one of them may arrive far more than at all others."""

from collections import namedtuple

import triton
import triton.language as tl

from .one_row import _store_at, _target_u

#: What the fused kernel gets of the k ids that the tokens of n rows list.
#:   token         [n]: the token of each row
#:   offsets, ids  [m + 1], [k]: the ids of each token
#:   us, slopes    [k], memory: u of each id, what arrives at its log-prob
#:   inputs        each [k], of their formula
#:   numbers       of their formula
OfListed = namedtuple("OfListed", "token offsets ids us slopes inputs numbers")


@triton.jit
def _at_ids(
    listed, t, of_row, sums, d_term, LISTED: tl.constexpr, PHASE: tl.constexpr, SHAPE: tl.constexpr, LANES: tl.constexpr
):
    """The sum over the ids of token t of what the formula has in a phase. In the last these are slopes: times `d_term` they arrive
    at log-probs, and are kept like the logits, which the gradient may overwrite."""
    row, V, k, top, log_s, scale, softcap = of_row
    total = tl.zeros((LANES,), tl.float64)
    end = tl.load(listed.offsets + t + 1)
    for start in range(tl.load(listed.offsets + t), end, LANES):
        at = start + tl.arange(0, LANES)
        here = at < end
        u = _target_u(row, tl.load(listed.ids + at, mask=here, other=-1), V, scale, softcap, SHAPE)
        x = LISTED(((k * u - top) - log_s,), tl.where(here, at, start), listed.inputs, listed.numbers, sums, PHASE)
        if d_term is not None:
            x = tl.where(d_term == 0.0, 0.0, d_term * x)
            tl.store(listed.us + at, u, mask=here)
            tl.store(listed.slopes + at, x, mask=here)
        total += tl.where(here, x, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _write_at_ids(
    listed, t, of_row, out, target, u, logp, d_logp, total, d_constant, d_log, inv_t, SHAPE: tl.constexpr, LANES: tl.constexpr
):
    """The gradient of the logits at the target and at the ids of token t, among which the target may be: combined before it is
    rounded, and stored last."""
    _, V, k, top, log_s, scale, _ = of_row
    _store_at(out, target, V, u, logp, d_logp, d_constant + (d_logp - total), d_log, 0.0, scale, inv_t, SHAPE, 1)
    end = tl.load(listed.offsets + t + 1)
    for start in range(tl.load(listed.offsets + t), end, LANES):
        at = start + tl.arange(0, LANES)
        id = tl.load(listed.ids + at, mask=at < end, other=-1)
        v = tl.load(listed.us + at, mask=at < end, other=0.0)
        x = tl.load(listed.slopes + at, mask=at < end, other=0.0).to(tl.float64) + tl.where(id == target, d_logp, 0.0)
        _store_at(out, id, V, v, (k * v - top) - log_s, x, d_constant + (x - total), d_log, 0.0, scale, inv_t, SHAPE, 1)
