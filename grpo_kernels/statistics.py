"""Statistics of rows, from their stream: log-probs, entropy, divergences, over sets of ids and over the vocabulary."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_named, flat, plain
from .formulas.divergence import Exact, divergence_at
from .rows.backends import is_strict
from .rows.compile import TracedRows
from .rows.hidden import Hidden
from .rows.partials import partials_of
from .rows.ragged import KeptRows, Ragged, Tokens, slots_of
from .rows.run import Rows, of_tokens, statistics
from .rows.stream import Logits, Other, Stream, Visit
from .streams import Options
from .token_sets import TokenSets, check_ids, narrowed, without_set


class Asked(NamedTuple):
    """What is asked of the rows of a policy: of their targets [n] those that are `read`, bool [n], None: all.

    names, with_gradient   statistics beside log-probs, and those of them that have a gradient. "lse" asks for "log_kept_mass" in
             its place: the log of the probability that the whole row gives to its set, 0 of a row without a set.
    kept     the rows that have a set, whose statistics are over it.
    whole    whether rows with sets are visited over the vocabulary too, as "log_kept_mass" needs it.
    other    the second stream. The divergence from it is the statistic "divergence".
    known    a teacher that is known at some ids of each row: sets with its log-probs as values; likewise.
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
    whole: bool = False
    other: Other | None = None
    known: TokenSets | None = None
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
    the vocabulary, those of `Asked.names`, and "at" [k]."""
    if torch.compiler.is_compiling():
        traced = Visit(
            asked.targets, asked.read, partials_of(asked.names), statistics=asked.names, with_gradient=asked.with_gradient
        )
        return statistics(TracedRows((traced,), stream, options.backend, options.strict), stream.tensors)[0]
    if torch._C._are_functorch_transforms_active():  # they may have wrappers
        asked = asked._replace(targets=plain(asked.targets), read=None if asked.read is None else plain(asked.read))
    if isinstance(stream.transform.inv_temperature, Tensor):
        stream = stream.of(stream.tensors, stream.transform.plain())
    known, kept = asked.known, asked.kept
    if asked.other is not None:
        asked = asked.and_also("divergence")._replace(kind=asked.other.kind)
    in_one = known is not None and asked.at is None  # the teacher, in the same visit
    if known is not None and in_one:
        asked = asked.and_also(*asked.outside)._replace(at=slots_of(known))
    joined = kept is not None and (asked.whole or not kept.has_all)
    again = "rows with a set are wanted over the vocabulary too, which" if kept is not None and asked.whole else ""
    again = "a teacher that is known at some ids, beside terms at other ids," if known is not None and not in_one else again
    if again and isinstance(stream, Logits) and stream.inplace:
        raise ValueError(f"inplace=True, but {again} needs the logits for two gradients: pass inplace=False.")
    made = [] if kept is None else [over_sets(asked)]
    if kept is None or joined:
        made.append(_over_vocabulary(stream, asked, in_one))
    if known is not None and not in_one:
        made.append(_of_known(stream, asked, known))
    found = statistics(Rows(tuple(made), stream), stream.tensors)
    for i, visit in enumerate(made):
        if visit.kept is None and visit.tokens is not None:
            found[i] = of_tokens(found[i], visit.tokens)
    named = _joined(found[0], found[1], asked) if joined else found[0]
    if known is not None and asked.exact is not None:
        of_known = named if in_one else found[-1]
        assert known.values is not None
        value = divergence_at(asked.exact, of_known["at"], known.values, known.offsets, of_known.get("outside"))
        named["divergence"] = value if asked.read is None else torch.where(asked.read, value, 0.0)
    return named


# ---- the visits


def over_sets(asked: Asked) -> Visit:
    """The visit of rows with sets over these."""
    kept, at = asked.kept, asked.at
    assert kept is not None
    at = None if at is None else at.only(kept.has).plain()
    return Visit(
        asked.targets, kept.read, _partials(asked.names, asked.kind), asked.other, at=at, tokens=asked.tokens, kept=kept,
        statistics=asked.names, with_gradient=asked.with_gradient,
    )  # fmt: skip


def _over_vocabulary(stream: Stream, asked: Asked, in_one: bool) -> Visit:
    """The visit over the vocabulary, of rows without a set or of all. `in_one`: the ids are those of a teacher."""
    targets, read, kept, at = asked.targets, asked.read, asked.kept, asked.at
    tokens, all_rows = asked.tokens, kept is not None and asked.whole
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
    more = asked.with_gradient or asked.other is not None or asked.known is not None or all_rows or beside_target
    ahead = False
    if index is not None and torch.is_grad_enabled() and not more:  # log-probs alone, whose gradient the forward can make
        hidden, weight, bias = stream.tensors
        ahead = hidden.requires_grad and not (weight.requires_grad or (bias is not None and bias.requires_grad))
    names = _partials(asked.names, asked.kind)
    return Visit(
        targets, read, names, asked.other, index, active, at, tokens, all_rows=all_rows, ahead=ahead,
        statistics=asked.names, with_gradient=asked.with_gradient,
    )  # fmt: skip


def _of_known(stream: Stream, asked: Asked, teacher: TokenSets) -> Visit:
    """The visit of the ids that a teacher is known at."""
    index, names, at = _indexed(stream, asked.targets, asked.read), asked.outside, slots_of(teacher)
    partials = _partials(names, "")
    return Visit(asked.targets, asked.read, partials, visited=index, at=at, statistics=names, with_gradient=names)


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
    if asked.whole:
        # Log-probs keep the digits of a mass near 1; those of a target without probability are both -inf.
        lse, of_logps = sets.pop("lse") - whole.pop("lse"), whole["logps"] - sets["logps"]
        mass = torch.where(kept.several & (sets["logps"] == -torch.inf), lse, of_logps)
        named["log_kept_mass"] = torch.where(kept.has, mass, 0.0)
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
