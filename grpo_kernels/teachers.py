"""Divergence from a teacher that is known at a few ids of each row, such as its top-k.

A served teacher gives the log-probs of its largest ids. They are passed as `TokenSets` with values,
and the log-probs of the policy at the same ids are computed (`extra_ids.py`). `Exact.tail` says how
all other ids count.

    statistics = logprobs_with_teacher(source, targets, teacher, Exact("forward"))
    objective_loss(statistics["logps"], batch, objective, divergence=statistics["divergence"])
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import require, values_are_checked
from .core.sources import RowSource
from .extra_ids import token_logprobs_in_float64
from .formulas.divergence import Exact, divergence_at
from .segments import Segments, replace_values
from .token_sets import TokenSets, check_sets

#: Log-probs of a teacher are rounded. The probabilities of a token may add up to this much.
LARGEST_MASS = 1.001

#: Least probability of all other ids whose logarithm is taken, so that no log is -inf or NaN.
#: `divergence_at` raises it to 1e-7.
LEAST_OUTSIDE = 1e-30


def logprobs_with_teacher(
    source: RowSource,
    targets: Tensor,
    teacher: TokenSets,
    exact: Exact,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    names: tuple[str, ...] = (),
    detached: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Return the log-prob of each target, "divergence", and the named statistics.

    With p the policy and q the teacher, the divergence is for example

        KL(p || q) = sum of p (log p - log q)

    over the teacher's ids. `exact.tail` says what all other ids add.

    targets    int64 [num_tokens]
    teacher    ids of each token with the teacher's log-probs as values, which get no gradient. A
               token without ids has the divergence 0.
    exact      which divergence. Its `temperature_squared` is left to the caller.
    mask       bool [num_tokens]: tokens to process. None processes all tokens. The others give 0.
    rows       int64 [num_tokens]: the row that predicts each token, any number where mask is False.
               Several tokens may have the same row. None: row i predicts token i.
    names      other statistics of the row that predicts a token, see `RowSource.statistics`
    detached   the statistics that need no gradient

    The results are fp32 [num_tokens] by name.

    Raises ValueError if the teacher has no values, an id outside of the vocabulary, not one set for
    each token or, with the tail "bin", probabilities of more than 1 for a token.

    Accuracy: log-probs at the ids come from fp32 logits and the fp32 log-odds of the likeliest id
    against all other ids, added in float64. The policy's probability P of all other ids is 1 minus
    a float64 sum. Its relative error is that of the log-odds, about 1e-7 (1 + |log P|), and so is
    that of the gradient through it. P below 1e-7 counts as 1e-7, as in TRL, and has no gradient.
    """
    check_teacher("teacher", teacher, targets, exact, source.vocab_size)
    result = token_logprobs_in_float64(
        source, targets, teacher, mask=mask, rows=rows, names=names, detached=detached
    )
    assert teacher.values is not None
    divergence = divergence_of_logprobs(
        exact,
        result.extra_logps,
        teacher.values.detach(),
        Segments.from_offsets(teacher.offsets, len(teacher.ids)),
    )
    statistics = result.statistics
    statistics["logps"] = statistics["logps"].float()
    statistics["divergence"] = divergence if mask is None else torch.where(mask, divergence, 0.0)
    return statistics


def teacher_divergence(
    source: RowSource,
    teacher: TokenSets,
    exact: Exact,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the divergence of each token from the teacher, fp32 [num_tokens].

    teacher   ids of each token with the teacher's log-probs as values. A token without ids has the
              divergence 0 and is not processed.
    exact     which divergence
    mask      bool [num_tokens]: tokens to process. None processes all tokens. The others give 0.
    rows      int64 [num_tokens]: the row that predicts each token. None: row i predicts token i.

    `logprobs_with_teacher` describes the divergence, its accuracy, and the errors.
    """
    if teacher.empty_rows > 0:
        has_ids = teacher.counts > 0
        mask = has_ids if mask is None else mask & has_ids
    statistics = logprobs_with_teacher(
        source,
        # Targets, whose log-probs are not used. Their logits are computed for the teacher anyway.
        first_ids(teacher),
        teacher,
        exact,
        mask=mask,
        rows=rows,
    )
    return statistics["divergence"]


def divergence_of_logprobs(
    exact: Exact,
    logps: Tensor,
    other_logps: Tensor,
    segments: Segments,
) -> Tensor:
    """Return the divergence of each token's policy from its teacher, fp32 [num_tokens].

    exact         which divergence, and what ids without a log-prob add to it
    logps         float64 [num_ids]: log-probs of the policy, differentiable
    other_logps   float [num_ids]: log-probs of the teacher or reference at the same ids
    segments      the ids of each token, sorted by token

    A divergence that is infinite or NaN gets the gradient NaN if the loss depends on it, else 0. A
    backward through its logarithms would give NaN in both cases. So its log-probs are replaced by
    0, and its value is put back afterwards.
    """
    with torch.no_grad():
        values = divergence_with_infinities(exact, logps, other_logps, segments)
    is_replaced = ~values.isfinite()
    is_replaced_id = is_replaced[segments.segment_ids]
    finite_logps = replace_values(logps, is_replaced_id, 0.0)
    finite_other_logps = torch.where(is_replaced_id, 0.0, other_logps)
    finite_values = divergence_with_infinities(exact, finite_logps, finite_other_logps, segments)
    return replace_values(finite_values, is_replaced, values)


def divergence_with_infinities(
    exact: Exact, logps: Tensor, other_logps: Tensor, segments: Segments
) -> Tensor:
    """Return the divergence of each token, which may be infinite or NaN, fp32 [num_tokens].

    The policy's probability of the ids that a token does not list is 1 minus a float64 sum. Only
    the tail "bin" uses it.

    exact                which divergence, and what ids without a log-prob add to it
    logps, other_logps   float [num_ids]: log-probs of the policy and of the teacher
    segments             which token each id belongs to; the ids are sorted by token
    """
    prob_outside = 1.0 - segments.sum(logps.exp())  # of each token
    log_outside = prob_outside.clamp(min=LEAST_OUTSIDE).log()
    return divergence_at(exact, logps, other_logps, segments.offsets, log_outside)


def first_ids(sets: TokenSets) -> Tensor:
    """Return the first id of each set, int64 [num_tokens], 0 for an empty set.

    sets   the ids of each token in one flat list: token i has ids[offsets[i] : offsets[i + 1]]
    """
    # If the last set is empty, its offset is the length of the list. So add an id to the end.
    padded_ids = torch.cat([sets.ids.long(), sets.ids.new_zeros(1, dtype=torch.int64)])
    return torch.where(sets.counts > 0, padded_ids[sets.offsets[:-1]], 0)


def check_teacher(
    name: str,
    teacher: TokenSets,
    targets: Tensor,
    exact: Exact,
    vocab_size: int,
) -> None:
    """Raise ValueError unless `teacher` can be the teacher of these tokens.

    It must be TokenSets with values, one set for each target, and ids in the vocabulary. With the
    tail "bin", the probabilities exp(values) of a token must not add up to more than 1.

    name      the name of the argument, for messages
    targets   int64 [num_tokens]

    The values are read on a CPU, and on a GPU only with GRPO_KERNELS_CHECK=1, because the host
    waits for them.
    """
    check_sets(name, teacher, targets, vocab_size)
    remedy = "it has no values: pass the teacher's log-probs of its ids, sets.with_values(logps)."
    require(teacher.values is not None, name, teacher, remedy)
    assert teacher.values is not None
    if exact.tail != "bin" or not values_are_checked(teacher.values):
        return
    segments = Segments.from_offsets(teacher.offsets, len(teacher.ids))
    mass = segments.sum(teacher.values.detach().double().exp())
    if (mass > LARGEST_MASS).any():
        token = int((mass > LARGEST_MASS).nonzero()[0])  # the first of them
        raise ValueError(
            f"{name}: the values of row {token} are log-probs of {float(mass[token]):.4g} in all, "
            "more than 1. Log-probs at a temperature add up to at most 1. For weights that are no "
            'probabilities pass Exact("forward", tail="ignore") or tail="renormalise".'
        )
