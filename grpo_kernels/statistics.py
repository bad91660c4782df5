"""Statistics of rows, from their stream: log-probs, entropy, divergences, over sets of ids and over the vocabulary."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_named, flat, plain
from .formulas.divergence import Exact, divergence_at
from .formulas.ops import times
from .rows.backends import is_strict
from .rows.compile import TracedRows
from .rows.hidden import Hidden
from .rows.partials import partials_of
from .rows.ragged import KeptRows, Ragged, Tokens
from .rows.run import Rows, of_tokens, statistics
from .rows.stream import Known, Logits, Seconds, Stream, Visit, one_of, read_beside
from .streams import Options
from .token_sets import TokenSets, check_ids, narrowed, without_set


class Asked(NamedTuple):
    """What is asked of the rows of a policy: of their targets [n] those that are `read`, bool [n], None: all.

    names, with_gradient   statistics beside log-probs, and those of them that have a gradient. "logsumexp" asks for "log_kept_mass" in
             its place: the log of the probability that the whole row gives to its set, 0 of a row without a set.
    kept     the rows that have a set, whose statistics are over it.
    over     statistics that are taken over the vocabulary in every row, for which rows with sets are visited as a whole too; None:
             nothing is.
    seconds  second streams. The divergence from them, all added up, is the statistic "divergence".
    exact    which divergence that is.
    at       further ids of rows, whose log-probs are wanted.
    rows     (visited, active) of `Visit`, where the caller knows them.
    tokens   the tokens of the rows, where a row may have several: targets, sets and `at` are then theirs, as are the results.
    kind     of the divergence from a second stream that is read in the same visit; "": there is none."""

    targets: Tensor
    read: Tensor | None
    names: tuple[str, ...] = ()
    with_gradient: tuple[str, ...] = ()
    kept: KeptRows | None = None
    over: tuple[str, ...] | None = None
    seconds: Seconds = Seconds()
    exact: Exact | None = None
    at: Ragged | None = None
    rows: tuple[Tensor, int] | None = None
    tokens: Tokens | None = None
    kind: str = ""

    def and_also(self, *names: str) -> Asked:
        """These statistics with gradient too."""
        return self._replace(names=(*self.names, *names), with_gradient=(*self.with_gradient, *names))

    @property
    def outside(self) -> tuple[str, ...]:
        """What the divergence from a teacher that is known at some ids needs beside log-probs at them."""
        return ("outside",) if self.exact is not None and self.exact.tail == "bin" else ()


def statistics_of(stream: Stream, asked: Asked, options: Options) -> dict[str, Tensor]:
    """Statistics of the rows of a stream by name, each [n], differentiable: "logps" over the set of a row that has one, else over
    the vocabulary, those of `Asked.names`, "at" [k] and, with `Asked.over`, "whole_logps" over the vocabulary."""
    if torch.compiler.is_compiling():
        traced = Visit(
            asked.targets, asked.read, partials_of(asked.names), statistics=asked.names, with_gradient=asked.with_gradient
        )
        return statistics(TracedRows((traced,), stream, options.backend, options.strict), stream.tensors)[0]
    if torch._C._are_functorch_transforms_active():  # they may have wrappers
        asked = asked._replace(targets=plain(asked.targets), read=None if asked.read is None else plain(asked.read))
    if isinstance(stream.transform.inv_temperature, Tensor):
        stream = stream.of(stream.tensors, stream.transform.plain())
    (others, known), kept, over = asked.seconds, asked.kept, asked.over
    if others:
        one = one_of(others)
        asked = asked.and_also("divergence")._replace(kind="" if one is None else one.kind)
    in_one = len(known) == 1 and known[0].weight is None and not others and asked.at is None  # the teacher, in the same visit
    if in_one:
        of_over = None if over is None else (*over, *asked.outside, "at")
        asked = asked.and_also(*asked.outside)._replace(at=known[0].slots, over=of_over)
    joined = kept is not None and (over is not None or not kept.has_all)
    again = "rows with a set are wanted over the vocabulary too, which" if kept is not None and over is not None else ""
    again = "each teacher that is known at some ids" if known and not in_one else again
    if again and isinstance(stream, Logits) and stream.inplace:
        raise ValueError(f"inplace=True, but {again} needs the logits for two gradients: pass inplace=False.")
    made = [] if kept is None else [over_sets(asked)]
    if kept is None or joined:
        made.append(_over_vocabulary(stream, asked, in_one))
    for teacher in () if in_one else known:
        made.append(_of_known(stream, asked, teacher))
    found = statistics(Rows(tuple(made), stream), stream.tensors)
    for i, visit in enumerate(made):
        if visit.kept is None and visit.tokens is not None:
            found[i] = of_tokens(found[i], visit.tokens)
    named = _joined(found[0], found[1], asked) if joined else found[0]
    if known and asked.exact is not None:
        parts = [named["divergence"]] if others else []
        for teacher, values in zip(known, [named] if in_one else found[-len(known) :], strict=True):
            assert teacher.sets.values is not None
            at = (values["at"], teacher.sets.values, teacher.sets.offsets, values.get("outside"))
            value = divergence_at(asked.exact, *at)
            parts.append(times(teacher.weight, value if asked.read is None else torch.where(asked.read, value, 0.0)))
        named["divergence"] = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    return named


# ---- the visits


def over_sets(asked: Asked) -> Visit:
    """The visit of rows with sets over these."""
    kept, over, at = asked.kept, asked.over or (), asked.at
    assert kept is not None
    names = tuple(name for name in asked.names if name not in over)
    others = () if "divergence" in over else asked.seconds.others
    at = None if at is None or "at" in over else at.only(kept.has).plain()
    with_gradient = tuple(name for name in asked.with_gradient if name in names)
    return Visit(
        asked.targets, kept.read, _partials(names, asked.kind), others, at=at, tokens=asked.tokens, kept=kept, statistics=names,
        with_gradient=with_gradient,
    )  # fmt: skip


def _over_vocabulary(stream: Stream, asked: Asked, in_one: bool) -> Visit:
    """The visit over the vocabulary, of rows without a set or of all. `in_one`: the ids are those of a teacher."""
    targets, read, kept, (others, known), at = asked.targets, asked.read, asked.kept, asked.seconds, asked.at
    tokens, all_rows = asked.tokens, kept is not None and asked.over is not None
    if kept is not None and not all_rows:
        read = plain(kept.others(read))
        at = None if at is None else at.only(~kept.has).plain()
    if tokens is not None:  # rows are read at the ids of all of their tokens, over the vocabulary and over sets
        tokens = replace(tokens, read=read, listed=at)
        read, all_rows = tokens.named(None), kept is not None
    elif at is not None and not in_one and isinstance(stream, Hidden):  # whose logits at ids are sums of another order
        tokens = Tokens.one_a_row(targets, read, at)
    beside_target = at is not None and tokens is None
    if tokens is not None:
        targets, at = tokens.of_any, tokens.pairs.slots
    sets = kept if asked.read is None and not all_rows else None
    index, active = asked.rows or (_indexed(stream, targets, read, sets), None)
    more = asked.with_gradient or others or known or all_rows or beside_target
    ahead = False
    if index is not None and torch.is_grad_enabled() and not more:  # log-probs alone, whose gradient the forward can make
        hidden, weight, bias = stream.tensors
        ahead = hidden.requires_grad and not (weight.requires_grad or (bias is not None and bias.requires_grad))
    names = _partials(asked.names, asked.kind)
    return Visit(
        targets, read, names, others, index, active, at, tokens, all_rows=all_rows, ahead=ahead,
        statistics=asked.names, with_gradient=asked.with_gradient,
    )  # fmt: skip


def _of_known(stream: Stream, asked: Asked, teacher: Known) -> Visit:
    """The visit of the rows where a teacher that is known at some ids has a weight."""
    read = read_beside(teacher.weight, asked.read)
    index = _indexed(stream, asked.targets, read)
    names = asked.outside
    partials = _partials(names, "")
    return Visit(asked.targets, read, partials, visited=index, at=teacher.slots, statistics=names, with_gradient=names)


@functools.lru_cache(maxsize=256)
def _partials(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """The partials of a visit: those of a divergence only beside a second stream that is read in the same visit, of this kind."""
    return partials_of(tuple(name for name in names if kind or name != "divergence"), kind)


def _indexed(stream: Stream, targets: Tensor, read: Tensor | None, others_of: KeptRows | None = None) -> Tensor | None:
    """The rows that are visited, which hidden states are gathered by: forward and backward share them. Under torch.func there are
    no values to look at. `others_of`: sets that all but these rows have."""
    if not isinstance(stream, Hidden) or torch._C._are_functorch_transforms_active():
        return None
    if others_of is not None and others_of.without is not None:  # a number that the host knows
        return others_of.has.argsort(stable=True)[: others_of.without]
    return torch.arange(targets.numel(), device=targets.device) if read is None else read.nonzero()[:, 0]


def _joined(sets: dict[str, Tensor], whole: dict[str, Tensor], asked: Asked) -> dict[str, Tensor]:
    """The values of all rows, from those over sets and those over the vocabulary."""
    kept, named = asked.kept, {}
    assert kept is not None
    if "logsumexp" in sets and asked.over is not None:
        # Log-probs keep the digits of a mass near 1; those of a target without probability are both -inf.
        lse, of_logps = sets.pop("logsumexp") - whole.pop("logsumexp"), whole["logps"] - sets["logps"]
        mass = torch.where(kept.several & (sets["logps"] == -torch.inf), lse, of_logps)
        named["log_kept_mass"] = torch.where(kept.has, mass, 0.0)
    if asked.over is not None:
        named["whole_logps"] = whole["logps"]
    for name, x in whole.items():
        has = kept.has if name != "at" or asked.at is None else kept.has[asked.at.rows]
        named[name] = torch.where(has, sets[name], x) if name in sets else x
    return named


# ---- sets of ids beside targets


def kept_rows(
    sets: TokenSets,
    targets: Tensor,
    mask: Tensor | None,
    read: Tensor | None,
    vocab: int,
    missing: str | None,
    options: Options,
) -> KeptRows:
    """The rows that have a set of kept ids. `read` bool [n]: those that are looked at. Raises ValueError for an id outside of the
    vocabulary, in strict mode also for a target that joins its set without anybody having said so."""
    check_ids("kept", sets, vocab)
    if missing is None and is_strict(options.strict):
        narrowed(sets, targets, mask, "raise")
    has = ~without_set(sets, targets, missing) if missing == "full" else None
    return KeptRows.of(sets, flat(targets).long(), read, has)


def tokens_of(rows: Tensor, mask: Tensor | None, ids: Tensor, read: Tensor | None, stream: Stream, at: Ragged | None) -> Tokens:
    """The tokens whose targets are `ids` [m], each in one of the `rows` of a stream, and further ids of them. Raises ValueError
    naming the first token of the mask whose row is none of these."""
    check_named(rows, mask, stream.n)
    return Tokens(plain(flat(rows).long()), plain(ids), read, stream.n, at)
