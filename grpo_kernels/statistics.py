"""Statistics of rows, from their stream: log-probs, entropy, divergences, over sets of ids and over the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from .formulas.divergence import Exact, divergence_at
from .formulas.ops import times
from .layout import flat, plain
from .rows.backends import is_strict
from .rows.compile import TracedRows
from .rows.hidden import Hidden
from .rows.logits import Logits
from .rows.partials import partials_of
from .rows.ragged import KeptRows, Ragged, Tokens
from .rows.run import Read, Rows, of_tokens, statistics
from .rows.selection import Sparse
from .rows.stream import Known, Other, Seconds, Stream, Visit, one_of, read_beside
from .specs import Options
from .token_sets import TokenSets, check_sets, narrowed, without_set

Tensor = torch.Tensor


class Asked(NamedTuple):
    """What is asked of the rows of a policy.

    names, with_gradient   statistics beside log-probs, and those of them that have a gradient.
    kept     the rows that have a set.
    over     statistics that are taken over the vocabulary in every row, for which rows with sets are visited as a whole too; None:
             nothing is.
    seconds  second streams. The divergence from them, all added up, is the statistic "divergence".
    exact    which divergence that is.
    at       further ids of rows, whose log-probs are wanted.
    rows     (index, active) of `Visit`, where the caller knows them.
    sparse   how columns are drawn for the gradient.
    tokens   the tokens of the rows, where a row may have several: targets, sets and `at` are then theirs, as are the results."""

    names: tuple[str, ...] = ()
    with_gradient: tuple[str, ...] = ()
    kept: KeptRows | None = None
    over: tuple[str, ...] | None = None
    seconds: Seconds = Seconds()
    exact: Exact | None = None
    at: Ragged | None = None
    rows: tuple[Tensor, int] | None = None
    sparse: Sparse | None = None
    tokens: Tokens | None = None


class Statistics(NamedTuple):
    """Of each row [n], differentiable."""

    logps: Tensor  # over the set of a row that has one, else over the vocabulary
    named: dict[str, Tensor]
    whole_logps: Tensor | None = None  # over the vocabulary, None where nothing needs it


def statistics_of(stream: Stream, asked: Asked, targets: Tensor, read: Tensor | None, options: Options) -> Statistics:
    """Statistics of the rows of a stream. The name "lse" asks for "log_kept_mass" in its place: the log of the probability that
    the whole row gives to its set, 0 of a row without a set."""
    names, with_gradient, kept, over, (others, known), exact, at, _, sparse, tokens = asked
    if kept is not None and over is not None and isinstance(stream, Logits) and stream.inplace:
        raise ValueError(
            "inplace=True, but rows with a set are wanted over the vocabulary too, which needs the logits for two gradients: pass "
            "inplace=False."
        )
    if torch.compiler.is_compiling():
        dtype = stream.dtype if isinstance(stream, Hidden) else None
        asked_of = Read(Visit(targets, read, partials_of(names), sparse=sparse), names, with_gradient)
        (named,) = statistics(TracedRows((asked_of,), stream.transform, options.backend, options.strict, dtype), stream.tensors)
        return Statistics(named.pop("logps"), named)
    targets, read = plain(targets), None if read is None else plain(read)  # under torch.func they may have wrappers
    if isinstance(stream.transform.inv_temperature, Tensor):
        stream = stream.of(stream.tensors, stream.transform.plain())
    if others:
        names, with_gradient = (*names, "divergence"), (*with_gradient, "divergence")
    alone = len(known) == 1 and known[0].weight is None and not others and at is None
    beside = known[0] if alone else None  # in the same visit
    if known and beside is None and isinstance(stream, Logits) and stream.inplace:
        raise ValueError("inplace=True, but each teacher that is known at some ids needs the logits again: pass inplace=False.")
    if beside is not None:
        at, outside = beside.slots, _outside(exact)
        names, with_gradient = (*names, *outside), (*with_gradient, *outside)
        over = None if over is None else (*over, *outside, "at")
    reads, sets = [], None
    if kept is not None:
        own = tuple(name for name in names if over is None or name not in over)
        sets = Visit(
            targets, kept.read, _partials(own, others), others if "divergence" in own else (), kept=kept, tokens=tokens,
            at=None if at is None or (over is not None and "at" in over) else at.only(kept.has).plain(),
        )  # fmt: skip
        reads.append(Read(sets, own, tuple(name for name in with_gradient if name in own)))
    if kept is None or over is not None or not kept.has_all:
        some = read if kept is None or over is not None else plain(kept.others(read))
        whole = Visit(
            targets,
            some,
            _partials(names, others),
            others,
            at=at,
            sparse=sparse,
            all_rows=kept is not None and over is not None,
        )
        whole = replace(whole, at=at.only(~kept.has).plain()) if at is not None and kept is not None and over is None else whole
        if tokens is not None:  # rows are read at the ids of all of their tokens, over the vocabulary and over sets
            tokens = replace(tokens, read=some)
            whole = replace(whole, read=tokens.named(None), all_rows=kept is not None)
        elif at is not None and beside is None and isinstance(stream, Hidden):  # whose logits at ids are sums of another order
            tokens = Tokens.one_a_row(targets, some)
        if tokens is not None:
            tokens = replace(tokens, listed=whole.at)
            whole = replace(whole, targets=tokens.of_any, at=tokens.pairs.slots, tokens=tokens)
        whole = _indexed(stream, whole, asked, read)
        beside_target = at is not None and tokens is None
        if not (with_gradient or others or known or whole.all_rows or sparse is not None or beside_target):
            whole = replace(whole, ahead=_with_frozen_head(stream))
        reads.append(Read(whole, names, with_gradient))
    for teacher in () if beside is not None else known:
        reads.append(_of_known(stream, teacher, exact, targets, read))
    found = statistics(Rows(tuple(reads), stream), stream.tensors)
    found = [
        of_tokens(x, visit.tokens) if visit.kept is None and visit.tokens is not None else x
        for x, (visit, *_) in zip(found, reads, strict=True)
    ]
    of_known = found[len(found) - (0 if beside is not None else len(known)) :]
    logps, named, whole_logps = _joined(found, kept, over, at)
    if beside is not None:
        of_known, known = [named], (beside,)
    if exact is not None and known:
        named["divergence"] = _divergence(exact, named.get("divergence"), known, of_known, read)
    return Statistics(logps, named, whole_logps)


def _with_frozen_head(stream: Stream) -> bool:
    """Whether the hidden states alone have a gradient. Where it is one of log-probs alone, the forward can make it."""
    if not isinstance(stream, Hidden) or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    hidden, *head = stream.tensors
    return hidden.requires_grad and not any(x is not None and x.requires_grad for x in head)


def _partials(names: tuple[str, ...], others: tuple[Other, ...]) -> tuple[str, ...]:
    """The partials of a visit: those of a divergence only beside a second stream that is read in the same visit."""
    one = one_of(others)
    return partials_of(tuple(name for name in names if one or name != "divergence"), "" if one is None else one.kind)


def _indexed(stream: Stream, whole: Visit, asked: Asked, read: Tensor | None) -> Visit:
    """With the rows that are visited, which hidden states are gathered by: forward and backward share them. Under torch.func there
    are no values to look at."""
    if not isinstance(stream, Hidden) or torch._C._are_functorch_transforms_active():
        return whole
    if asked.rows is not None:
        return replace(whole, index=asked.rows[0], active=asked.rows[1])
    kept = None if whole.all_rows else asked.kept
    if kept is not None and read is None and kept.without is not None:  # a number that the host knows
        return replace(whole, index=kept.has.argsort(stable=True)[: kept.without])
    return replace(whole, index=whole.rows())


def _outside(exact: Exact | None) -> tuple[str, ...]:
    """What the divergence from a teacher that is known at some ids needs beside log-probs at them."""
    return ("outside",) if exact is not None and exact.tail == "bin" else ()


def _of_known(stream: Stream, teacher: Known, exact: Exact | None, targets: Tensor, read: Tensor | None) -> Read:
    """The visit of the rows where this teacher has a weight."""
    read, outside = read_beside(teacher.weight, read), _outside(exact)
    whole = Visit(targets, read, partials_of(outside), at=teacher.slots)
    return Read(_indexed(stream, whole, Asked(), read), outside, outside)


def _joined(
    found: list[dict[str, Tensor]], kept: KeptRows | None, over: tuple[str, ...] | None, at: Ragged | None
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """(log-probs, statistics by name, log-probs over the vocabulary) of all rows, from those over sets and those over the
    vocabulary."""
    first = dict(found[0])
    if kept is None or (over is None and kept.has_all):
        return first.pop("logps"), first, None
    sets, whole = first, dict(found[1])
    mass = None
    if "lse" in sets and over is not None:
        # Log-probs keep the digits of a mass near 1; those of a target without probability are both -inf.
        lse, of_logps = sets.pop("lse") - whole.pop("lse"), whole["logps"] - sets["logps"]
        mass = torch.where(kept.has, torch.where(kept.several & (sets["logps"] == -torch.inf), lse, of_logps), 0.0)
    whole_logps = whole["logps"]
    for name, x in sets.items():
        has = kept.has if name != "at" or at is None else kept.has[at.rows]
        whole[name] = torch.where(has, x, whole[name])
    if mass is not None:
        whole["log_kept_mass"] = mass
    return whole.pop("logps"), whole, None if over is None else whole_logps


def _divergence(
    exact: Exact, of_others: Tensor | None, known: tuple[Known, ...], found: list[dict[str, Tensor]], read: Tensor | None
) -> Tensor:
    """fp32 [n]: the divergences from all second streams."""
    parts = [] if of_others is None else [of_others]
    for teacher, values in zip(known, found, strict=True):
        assert teacher.sets.values is not None
        value = divergence_at(exact, values["at"], teacher.sets.values, teacher.sets.offsets, values.get("outside"))
        value = value if read is None else torch.where(read, value, 0.0)
        parts.append(times(teacher.weight, value))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


# ---- sets of ids beside targets


def check_kept(sets: TokenSets, targets: Tensor, mask: Tensor | None, vocab: int, missing: str | None, strict: bool) -> None:
    """Raise ValueError unless `sets` can be the kept sets of targets; in strict mode also for a target that joins its set without
    anybody having said so."""
    check_sets("kept", sets, targets, vocab)
    if missing is None and is_strict(strict):
        narrowed(sets, targets, mask, "raise")


def rows_with_sets(sets: TokenSets, targets: Tensor, read: Tensor | None, missing: str | None) -> KeptRows:
    """The rows that have a set. `targets` of any shape, `read` bool [rows]: those that are looked at."""
    has = ~without_set(sets, targets, missing) if missing == "full" else None
    return KeptRows.of(sets, flat(targets).to(torch.int64), read, has)
