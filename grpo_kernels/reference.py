"""The second stream of a loss: what `reference=` and `ref_logits=` may be, checked against the policy's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .batch import TokenBatch
from .checks import LARGEST, describe, require, require_number
from .formulas.divergence import Exact, divergence_at
from .formulas.surrogates import NoPolicyTerm
from .formulas.token_stage import TokenRows
from .layout import logit_rows, per_token, values_are_checked
from .objective import Objective
from .projection import Head
from .token_sets import TokenSets, check_sets
from .transform import LogitTransform, as_transform
from .vocabulary.hidden import FlatHead, check_head
from .vocabulary.rows import RowTransform, Teacher
from .vocabulary.shard import VocabShard
from .vocabulary.sources import Source
from .vocabulary.sparse import Slots
from .vocabulary.stage import vocabulary_stage, with_sums
from .vocabulary.teachers import Several, TeacherHead, Weighted

Tensor = torch.Tensor


class Policy(NamedTuple):
    """The policy's rows, which a second stream has to match."""

    shape: torch.Size
    device: torch.device
    vocab: int
    width: int  # columns of this process
    transform: LogitTransform
    mask: Tensor | None
    cu_seqlens: Tensor | None
    shard: VocabShard | None

    @classmethod
    def of(
        cls, batch: TokenBatch, transform: LogitTransform | None, vocab: int, width: int, shard: VocabShard | None
    ) -> Policy:  # fmt: skip
        shape, device = batch.targets.shape, batch.targets.device
        return cls(shape, device, vocab, width, as_transform(transform), batch.mask, batch.cu_seqlens, shard)


@dataclass(frozen=True, eq=False, repr=False)
class TopK:
    """A teacher that is known at some ids of each row: sets with its log-probs as values."""

    sets: TokenSets
    __repr__ = describe

    @property
    def slots(self) -> Slots:
        return Slots(self.sets.ids.to(torch.int64), self.sets.offsets, self.sets.row_of).plain()

    @staticmethod
    def statistics(exact: Exact) -> tuple[str, ...]:
        """What the divergence needs of the policy's rows beside log-probs at the ids."""
        return ("outside",) if exact.tail == "bin" else ()

    def divergence(self, exact: Exact, found: dict[str, Tensor], read: Tensor | None) -> Tensor:
        """fp32 [n], from the policy's log-probs at the ids and those statistics; 0 of a row that is not read."""
        assert self.sets.values is not None
        value = divergence_at(exact, found["at"], self.sets.values, self.sets.offsets, found.get("outside"))
        return value if read is None else torch.where(read, value, 0.0)


def second(teacher: Any) -> tuple[Slots | None, Any]:
    """(`at`, `teacher`) of a source."""
    return (teacher.slots, None) if isinstance(teacher, TopK) else (None, teacher)


#: Second streams of a loss: one, or several with weights.
Teachers = Teacher | TeacherHead | TopK | Several


def knows_ids_only(teacher: Teachers | None) -> bool:
    """Whether a teacher, or one of several, is known at some ids."""
    return (
        any(isinstance(x.teacher, TopK) for x in teacher.parts) if isinstance(teacher, Several) else isinstance(teacher, TopK)
    )


def divergence_of(
    source_of: Callable[[Any, Tensor | None], Source], teacher: Teachers, exact: Exact, targets: Tensor, read: Tensor | None,
    transform: RowTransform, tensors: tuple[Tensor | None, ...],
) -> Tensor:  # fmt: skip
    """fp32 [n], differentiable: the divergence from a teacher, or the weighted sum of those from several, of which each is read
    in the rows where it has a weight. `source_of` makes the source of (teacher, the rows that are read)."""
    if isinstance(teacher, Several):
        tensors = with_sums(tensors)
        each = (
            (x, divergence_of(source_of, x.teacher, exact, targets, x.read(read), transform, tensors)) for x in teacher.parts
        )
        return torch.stack([part.times(value) for part, value in each]).sum(0)
    names = teacher.statistics(exact) if isinstance(teacher, TopK) else ("divergence",)
    _, statistics = vocabulary_stage(source_of(teacher, read), names, names, targets, read, transform, *tensors)
    return teacher.divergence(exact, statistics, read) if isinstance(teacher, TopK) else statistics["divergence"]


HOW = "(hidden, weight), (hidden, weight, bias), (hidden, Head(...))"
HOW_EXACT = f"{HOW}, TokenSets whose values are a teacher's log-probs, or a list of pairs (one of these, weight)"


def reference_head(reference: Any, policy: Policy) -> tuple[FlatHead, RowTransform]:
    """Hidden states and head of the reference, and the transform of its logits: that of its Head, else the policy's."""
    if not isinstance(reference, tuple) or len(reference) not in (2, 3):
        raise ValueError(f"reference is {type(reference).__name__}: pass {HOW}.")
    hidden, weight, *rest = reference
    bias, transform, shard = rest[0] if rest else None, policy.transform, policy.shard
    if isinstance(weight, Head):
        weight, bias, own, own_shard, grad = weight.parts(bias=bias)
        transform, shard = transform if own is None else own, shard if own_shard is None else own_shard
        if grad is not None:
            raise ValueError("grad is given in the Head of a reference, to which no gradient flows: leave it out.")
        cut = (shard is None) == (policy.shard is None)
        require(cut, "shard", shard, "of a reference's Head: both heads are cut over the group, or none is.")
    try:
        head = check_head(hidden, weight, bias, policy.shape, policy.device, shard)
    except ValueError as error:
        raise ValueError(f"reference: {error}") from error
    _check_vocab("reference", head.vocab, head.weight.shape[0], policy)
    return head, _for_rows(transform, policy)


def several(name: str, given: list[Any], one: Callable[[Any], Any], policy: Policy) -> Several:
    """The second streams of a list of pairs (stream, weight), of which `one` makes each."""
    parts = []
    for i, pair in enumerate(given):
        if not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair[0], list):
            raise ValueError(f"{name}[{i}] is {type(pair).__name__}: a list of teachers holds pairs (teacher, weight).")
        parts.append(Weighted(one(pair[0]), _weight(f"{name}[{i}][1]", pair[1], policy)))
    require(len(parts) > 0, name, given, "a list of teachers holds at least one pair (teacher, weight).")
    return Several(tuple(parts), Objective(NoPolicyTerm()))


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
    return weights


def linear_teacher(reference: Any, exact: Exact, policy: Policy) -> TeacherHead | TopK | Several:
    """The second stream of a divergence from hidden states, or several."""
    if isinstance(reference, list):
        return several("reference", reference, lambda x: linear_teacher(x, exact, policy), policy)
    if isinstance(reference, TokenSets):
        return top_k("reference", reference, exact, policy)
    require(
        reference is not None,
        "reference",
        None,
        f"{exact} needs the whole distribution of a reference or teacher: pass {HOW_EXACT}.",
    )
    head, transform = reference_head(reference, policy)
    return TeacherHead(head, transform, exact.direction, exact.share).plain()


def logits_teacher(ref_logits: Any, exact: Exact, policy: Policy) -> Teacher | TopK | Several:
    """The second stream of a divergence from logits, or several."""
    if isinstance(ref_logits, list):
        return several("ref_logits", ref_logits, lambda x: logits_teacher(x, exact, policy), policy)
    if isinstance(ref_logits, TokenSets):
        return top_k("ref_logits", ref_logits, exact, policy)
    transform = policy.transform
    if isinstance(ref_logits, tuple) and len(ref_logits) == 2:
        ref_logits, transform = ref_logits[0], as_transform(ref_logits[1])
    if not isinstance(ref_logits, Tensor):
        got = "None" if ref_logits is None else f"a {type(ref_logits).__name__}"
        raise ValueError(
            f"ref_logits is {got}, but {exact} needs the whole distribution of a reference or teacher: pass its logits, "
            "(logits, LogitTransform(...)), TokenSets whose values are its log-probs, or a list of pairs (one of these, weight)."
        )
    own = ref_logits if policy.shard is None else policy.shard.local("ref_logits", ref_logits, -1)
    try:
        logits = logit_rows(own.detach(), policy.shape, policy.device, False, policy.shard is None)
    except ValueError as error:
        raise ValueError(f"ref_logits: {error}") from error
    _check_vocab("ref_logits", logits.shape[-1] if policy.shard is None else policy.vocab, logits.shape[-1], policy)
    return Teacher(logits, _for_rows(transform, policy), exact.direction, exact.share).plain()


def top_k(name: str, sets: TokenSets, exact: Exact, policy: Policy) -> TopK:
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
    return TopK(sets)


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


def _check_vocab(name: str, vocab: int, width: int, policy: Policy) -> None:
    if (vocab, width) == (policy.vocab, policy.width):
        return
    here = "" if policy.shard is None else f" ({width} and {policy.width} of them on this rank)"
    raise ValueError(
        f"{name} has a vocabulary of {vocab}, but the policy has {policy.vocab}{here}: they must be the same ids. Cut off what is padding "
        "of the longer one, weight[:vocab] or logits[..., :vocab]."
    )


def scaled_by_temperature(rows: TokenRows, exact: Exact, transform: RowTransform) -> TokenRows:
    """The rows with the square of the temperature in the weight of their divergence, where that is asked for."""
    if not exact.temperature_squared or rows.divergence_weight is None:
        return rows
    return replace(rows, divergence_weight=rows.divergence_weight / squared(transform, rows.read))
