"""Which ids a sampler keeps of logits: top-k, top-p and min-p, in the orders of vLLM and SGLang.

A rule is a function from z [n, V], logits over the temperature in which -inf is what went before, to the bool [n, V] of what it
keeps of that (-inf stays away whatever it says). Each knows only differences of z: what is left is renormalised by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from .checks import check_temperature, require, require_number, require_whole
from .layout import FLOATING, INTEGRAL, inverse_temperatures, per_token, require_shape, require_tensor

Tensor = torch.Tensor
Rule = Callable[[Tensor], Tensor]

#: Logits of a chunk: 16 MB in fp32, and a few times that for what is made beside it.
CHUNK = 1 << 22
#: vLLM's smallest temperature.
COLDEST = 0.01


def by_top_k(z: Tensor, k: int) -> Tensor:
    return z >= z.topk(k).values[:, -1:]


def by_min_p(z: Tensor, p: float) -> Tensor:
    return z >= z.amax(-1, keepdim=True) + math.log(p)


def by_top_p(z: Tensor, p: float) -> Tensor:
    """The largest, as long as the mass before one is below p. Sums are fp64; only as many are sorted as are needed."""
    top, vocab = z.amax(-1, keepdim=True), z.shape[-1]
    needed = p * (z - top).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    width = min(64, vocab)
    while True:
        largest = z.topk(width).values
        mass = (largest - top).exp().to(torch.float64)
        count = (mass.cumsum(-1) - mass < needed).sum(-1, keepdim=True)
        if width == vocab or bool((count < width).all()):
            break
        width = min(8 * width, vocab)
    last = largest.gather(-1, count - 1)
    equal, above = z == last, z > last
    room = count - above.sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) > room).any()):
        equal &= equal.cumsum(-1) <= room
    return above | equal


def stages(order: str, top_k: int, top_p: float, min_p: float) -> list[list[Rule]]:
    """Rules of one stage see the same probabilities, those of the next what is left. A rule that keeps everything is left out."""
    k = [partial(by_top_k, k=top_k)] * (top_k > 0)
    p = [partial(by_top_p, p=top_p)] * (top_p < 1)
    m = [partial(by_min_p, p=min_p)] * (min_p > 0)
    if order == "vllm":
        order_of_rules: list[list[Rule]] = [[*m], [*k], [*p]]
    else:
        order_of_rules = [[*k], [*p], [*m]] if m else [[*k, *p]]
    return [stage for stage in order_of_rules if stage]


def kept_ids(
    logits: Tensor,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    temperature: float | Tensor,
    order: str,
    targets: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """(ids, number of ids of each row), or None if no rule leaves anything out. Arguments as in TokenSets.from_logits."""
    require_tensor("logits", logits, FLOATING, "a float tensor [..., V]")
    fine = logits.dim() > 0 and logits.shape[-1] > 0
    require(fine, "logits.shape", list(logits.shape), "pass a float tensor [..., V] of at least one id.")
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    top_k, top_p, min_p = 0 if top_k is None else top_k, 1.0 if top_p is None else top_p, min_p or 0.0
    require_whole("top_k", top_k, "it is a number of ids; None, 0 or -1 keeps all.", -1)
    require_number(
        "top_p", top_p, "it is a probability above 0, at most 1; None keeps all. A greedy sampler is top_k=1.", 1e-30, 1
    )
    require_number("min_p", min_p, "it is a share of the largest probability in [0, 1]; None keeps all.", 0, 1)
    require(order in ("vllm", "sglang"), "order", order, 'samplers truncate differently: pass "vllm" or "sglang".')
    if targets is not None:
        require_tensor("targets", targets, INTEGRAL, "integers of the logits' leading shape")
        require_shape("targets", targets, shape, "the leading part of the logits")
    check_temperature(temperature)
    inverse_temperatures(temperature, shape, None, None, logits.device)  # refuses what is none for these rows
    t = per_token("temperature", torch.as_tensor(temperature, device=logits.device), shape)
    t = t.clamp(min=COLDEST) if order == "vllm" else t
    rules = stages(order, int(top_k) if top_k < vocab else 0, float(top_p), float(min_p))
    if not rules:
        return None
    only_k = len(rules) == len(rules[0]) == 1 and 0 < top_k < vocab and targets is None
    as_given = isinstance(temperature, (int, float)) and temperature == 1
    ids, counts, row = [], [], 0
    for chunk in row_chunks(logits.detach(), max(1, CHUNK // vocab)):
        rows = slice(row, row + len(chunk))
        wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        ids_of_top_k = None
        if only_k:
            ids_of_top_k = largest_ids(wide if as_given else wide / t[rows, None], int(top_k), row)
        if ids_of_top_k is None:
            z = wide / t[rows, None]
            refuse_endless(z.amax(-1), row)
            kept = kept_of(z, rules)
            if targets is not None:
                force(kept, targets.reshape(-1)[rows, None])
            ids.append(kept.nonzero()[:, 1].to(torch.int32))
            counts.append(kept.sum(-1))
        else:
            ids.append(ids_of_top_k.flatten())
            counts.append(torch.full((len(chunk),), int(top_k), device=chunk.device))
        row = rows.stop
    if row == 0:
        return None
    return torch.cat(ids), torch.cat(counts)


def refuse_endless(largest: Tensor, row: int) -> None:
    """Raise ValueError where the largest logit of a row is no finite number. `row`: where the chunk starts, for messages."""
    wrong = ~largest.isfinite()
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise ValueError(f"logits are NaN, +inf or all -inf in row {row + at}: there is nothing to sample from.")


def largest_ids(z: Tensor, k: int, row: int) -> Tensor | None:
    """int32 [n, k]: what `by_top_k` keeps, ascending, in one look at each id; None where the last of a row equals the next, -inf
    included, so that its set is another size. A NaN is the largest of its row."""
    values, ids = z.topk(k + 1)
    refuse_endless(values[:, 0], row)
    if bool((values[:, k - 1] == values[:, k]).any()):
        return None
    return ids[:, :k].sort(-1).values.to(torch.int32)


def kept_of(z: Tensor, rules: list[list[Rule]]) -> Tensor:
    """bool [n, V]; z is overwritten."""
    for stage in rules:
        kept = stage[0](z)
        for rule in stage[1:]:
            kept &= rule(z)
        z.masked_fill_(~kept, -math.inf)
    return z > -math.inf


def force(kept: Tensor, targets: Tensor) -> None:
    """Put targets [n, 1] into the sets, except those that are no id."""
    at = targets.to(torch.int64).clamp(0, kept.shape[-1] - 1)
    kept.scatter_(-1, at, kept.gather(-1, at) | (at == targets))


def row_chunks(logits: Tensor, size: int) -> Iterator[Tensor]:
    """Views [n, V] of at most `size` rows, in order, whatever the strides."""
    if logits.dim() == 1:
        yield logits[None]
    elif logits.dim() == 2 or logits.is_contiguous():
        yield from logits.flatten(0, -2).split(size) if logits.numel() else ()
    else:
        for part in logits:
            yield from row_chunks(part, size)
