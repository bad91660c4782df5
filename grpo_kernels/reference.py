"""The second streams of a loss: what `reference=` and `ref_logits=` may be, checked against the policy's rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .batch import TokenBatch
from .checks import LARGEST, require, require_number
from .formulas.divergence import Exact
from .formulas.token_stage import TokenRows
from .layout import per_token, plain, values_are_checked
from .objective import Objective
from .rows.partials import RowTransform
from .rows.stream import Known, Other, Seconds, Stream
from .specs import Head, LogitTransform, Options, as_transform
from .streams import hidden_stream, logits_stream
from .token_sets import TokenSets, check_sets

Tensor = torch.Tensor


class Policy(NamedTuple):
    """The policy's rows, which a second stream has to match."""

    shape: torch.Size
    device: torch.device
    transform: LogitTransform
    mask: Tensor | None
    cu_seqlens: Tensor | None
    stream: Stream
    options: Options

    @property
    def vocab(self) -> int:
        return self.stream.columns if self.stream.shard is None else self.stream.shard.vocab


HOW = "(hidden, weight), (hidden, weight, bias), (hidden, Head(...))"
HOW_EXACT = f"{HOW}, TokenSets whose values are a teacher's log-probs, or a list of pairs (one of these, weight)"


def seconds_of(name: str, given: Any, exact: Exact, policy: Policy) -> Seconds:
    """The second streams of a divergence. `name` of the argument: "reference", from hidden states, or "ref_logits"."""
    one = _from_hidden if name == "reference" else _from_logits
    if not isinstance(given, list):
        if isinstance(given, TokenSets):
            return Seconds(known=(Known(_checked_sets(name, given, exact, policy)),))
        return Seconds((Other(one(given, exact, policy).plain(), exact.direction, exact.share),))
    require(len(given) > 0, name, given, "a list of teachers holds at least one pair (teacher, weight).")
    others, known = [], []
    for i, pair in enumerate(given):
        if not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair[0], list):
            raise ValueError(f"{name}[{i}] is {type(pair).__name__}: a list of teachers holds pairs (teacher, weight).")
        alone = seconds_of(name, pair[0], exact, policy)
        weight = _weight(f"{name}[{i}][1]", pair[1], policy)
        others += [replace(other, weight=weight) for other in alone.others]
        known += [teacher._replace(weight=weight) for teacher in alone.known]
    return Seconds(tuple(others), tuple(known))


def reference_stream(reference: Any, policy: Policy) -> Stream:
    """Hidden states and head of the reference as a stream, under the transform of its Head, else the policy's."""
    if not isinstance(reference, tuple) or len(reference) not in (2, 3):
        raise ValueError(f"reference is {type(reference).__name__}: pass {HOW}.")
    hidden, weight, *rest = reference
    own = policy.stream.shard
    head = weight.beside(bias=rest[0] if rest else None) if isinstance(weight, Head) else Head(weight, *rest)
    if head.grad is not None:
        raise ValueError("grad is given in the Head of a reference, to which no gradient flows: leave it out.")
    if head.shard is not None:
        cut = (head.shard is None) == (own is None)
        require(cut, "shard", head.shard, "of a reference's Head: both heads are cut over the group, or none is.")
    transform = _for_rows(policy.transform if head.transform is None else as_transform(head.transform), policy)
    try:
        head = replace(head, shard=head.shard or own)
        stream = hidden_stream(hidden, head, policy.shape, policy.device, transform, policy.options)
    except ValueError as error:
        raise ValueError(f"reference: {error}") from error
    _check_vocab("reference", stream, policy)
    return stream


def _from_hidden(reference: Any, exact: Exact, policy: Policy) -> Stream:
    what = f"{exact} needs the whole distribution of a reference or teacher: pass {HOW_EXACT}."
    require(reference is not None, "reference", None, what)
    return reference_stream(reference, policy)


def _from_logits(ref_logits: Any, exact: Exact, policy: Policy) -> Stream:
    transform = policy.transform
    if isinstance(ref_logits, tuple) and len(ref_logits) == 2:
        ref_logits, transform = ref_logits[0], as_transform(ref_logits[1])
    if not isinstance(ref_logits, Tensor):
        got = "None" if ref_logits is None else f"a {type(ref_logits).__name__}"
        raise ValueError(
            f"ref_logits is {got}, but {exact} needs the whole distribution of a reference or teacher: pass its logits, "
            "(logits, LogitTransform(...)), TokenSets whose values are its log-probs, or a list of pairs (one of these, weight)."
        )
    of_rows, shard = _for_rows(transform, policy), policy.stream.shard
    try:
        stream = logits_stream(ref_logits.detach(), policy.shape, policy.device, of_rows, policy.options, shard=shard)
    except ValueError as error:
        raise ValueError(f"ref_logits: {error}") from error
    _check_vocab("ref_logits", stream, policy)
    return stream


def _checked_sets(name: str, sets: TokenSets, exact: Exact, policy: Policy) -> TokenSets:
    if sets.values is None:
        raise ValueError(
            f"{name} is TokenSets without values: pass the teacher's log-probs of its ids, sets.with_values(logps)."
        )
    check_sets(name, sets, torch.empty(policy.shape, dtype=torch.int64, device=policy.device), policy.vocab)
    if exact.tail == "bin" and values_are_checked(sets.values):
        mass = torch.zeros(sets.rows, dtype=torch.float64, device=policy.device)
        mass = mass.index_add(0, sets.row_of, sets.values.detach().exp().to(torch.float64))
        if (mass > 1.001).any():
            at = int((mass > 1.001).nonzero()[0])
            raise ValueError(
                f"{name}: the values of row {at} are log-probs of {float(mass[at]):.4g} in all, more than 1. Log-probs at a temperature add "
                'up to at most 1; for weights that are no probabilities pass Exact("forward", tail="ignore") or tail="renormalise".'
            )
    return sets


def _weight(name: str, weight: Any, policy: Policy) -> Tensor:
    """That of a teacher in each row, fp32 [n]; 0 where the mask is not set."""
    if not isinstance(weight, Tensor):
        require_number(name, weight, "the weight of a teacher is a finite number >= 0, or a tensor of such.", 0, LARGEST)
        weight = torch.full((), float(weight), device=policy.device)
    if weight.device != policy.device:
        raise ValueError(f"{name} is on {weight.device}, but the policy's rows are on {policy.device}: move it there.")
    weights = per_token(name, weight, policy.shape, policy.cu_seqlens)
    weights = weights if policy.mask is None else torch.where(policy.mask.reshape(-1), weights, 0.0)
    if values_are_checked(weights):
        wrong = weights[~((weights >= 0) & (weights < torch.inf))]
        require(
            wrong.numel() == 0, name, float(wrong[0]) if wrong.numel() else None, "weights of teachers are finite and >= 0."
        )
    return plain(weights)


def check_given(given: str, value: Any, objective: Objective, batch: TokenBatch) -> None:
    """Raise ValueError where an objective and its second stream do not fit: `given` is the name of the argument, `value` what
    it is."""
    if objective.exact is not None:
        if batch.ref_logps is not None:
            raise ValueError(
                f"ref_logps are log-probs of the sampled tokens, but kl={objective.kl} compares whole distributions: leave them out, and "
                f"pass {given}=."
            )
        return
    if value is None:
        return
    require(objective.beta != 0, given, type(value).__name__, "with beta=0 nothing looks at it: leave it out.")
    if given == "ref_logits" or isinstance(value, TokenSets):
        raise ValueError(
            f"{given} is a whole distribution, but kl={objective.kl!r} is an estimate from the sampled token: pass kl=Exact(...), or the "
            "reference's log-probs as ref_logps of the batch."
        )
    if batch.ref_logps is not None:
        raise ValueError("reference and batch.ref_logps are both given: pass one of them.")


def squared(transform: RowTransform, read: Tensor | None) -> float | Tensor:
    """The square of the inverse temperature; 1 in rows that are not read, whose temperature may be anything."""
    inverse = transform.inv_temperature
    if isinstance(inverse, Tensor) and read is not None:
        inverse = torch.where(read, inverse, 1.0)
    return inverse * inverse


def _for_rows(transform: LogitTransform, policy: Policy) -> RowTransform:
    return transform.for_rows(policy.shape, policy.mask, policy.cu_seqlens, policy.device)


def _check_vocab(name: str, stream: Stream, policy: Policy) -> None:
    vocab, width = stream.columns if stream.shard is None else stream.shard.vocab, stream.columns
    if (vocab, width) == (policy.vocab, policy.stream.columns):
        return
    here = "" if stream.shard is None else f" ({width} and {policy.stream.columns} of them on this rank)"
    raise ValueError(
        f"{name} has a vocabulary of {vocab}, but the policy has {policy.vocab}{here}: they must be the same ids. Cut off what is padding "
        "of the longer one, weight[:vocab] or logits[..., :vocab]."
    )


def scaled_by_temperature(rows: TokenRows, exact: Exact, transform: RowTransform) -> TokenRows:
    """The rows with the square of the temperature in the weight of their divergence, where that is asked for."""
    if not exact.temperature_squared or rows.divergence_weight is None:
        return rows
    return replace(rows, divergence_weight=rows.divergence_weight / squared(transform, rows.read))
