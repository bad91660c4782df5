"""Log-probs at any (row, token id) pairs, and losses that depend on them.

Soft targets, score centering and top-k teachers need log-probs of further ids of a row, beside that
of its target. Several tokens may be predicted by one row (`trees.py`), which is the same problem.

One log-prob of each row comes from the softmax kernel. The others follow from single logits z, at
one dot product each from hidden states:

    log p(id) = log p(largest) + z(id) - z(largest)

`largest` is the likeliest id that the caller asked for in the row. It is the target of the kernel
for two reasons. No log-prob is above 0, whatever the rounding of logits. And gradients keep their
digits: that of log p(id) is onehot(id) - p, which is nearly 0 for an id with p close to 1. The
kernel computes this 1 - p directly. With another target, autograd would add two gradients of size 1
that nearly cancel.

Example:

    extra = TokenSets.from_padded(ids, values=coefficients)      # ids of each row, with numbers
    result = logprobs_with_extra_ids(source, targets, extra, names=("entropy",))
    terms = objective.extra_id_terms(batch)
    loss_of_tokens = auxiliary_loss(terms, result.extra_logps, advantages)      # [num_tokens]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_named
from .core.autograd import apply_function
from .core.sources import Reference, RowSource
from .formulas.extra_id_terms import LEAST_OUTSIDE, ExtraIdTerms
from .formulas.ops import times
from .segments import Segments, find_largest, replace_values, subtract_largest
from .token_sets import TokenSets, check_sets


class PairLogprobs(NamedTuple):
    """Log-probs of (row, token id) pairs.

    logps        [num_pairs], in the order of the pairs
    statistics   other statistics of each row by name, fp32 [num_rows]
    """

    logps: Tensor
    statistics: dict[str, Tensor]


class ExtraLogprobs(NamedTuple):
    """Log-probs of tokens and of further ids.

    statistics    statistics of each token by name, fp32 [num_tokens]. "logps" is the log-prob of
                  its target. The others are those of the row that predicts it.
    extra_logps   log-probs of the further ids, fp32 [num_extra_ids], in their order
    """

    statistics: dict[str, Tensor]
    extra_logps: Tensor


def logprobs_at(
    source: RowSource,
    row_ids: Tensor,
    token_ids: Tensor,
    *,
    mask: Tensor | None = None,
    names: tuple[str, ...] = ("entropy",),
) -> PairLogprobs:
    """Return log p(token_ids[i]) in row row_ids[i] for each pair i, and statistics of the rows.

    row_ids     int64 [num_pairs] in [0, num_rows), in any order. Pairs may repeat.
    token_ids   int64 [num_pairs]. -1 marks an unused pair, whose log-prob is -inf without gradient.
    mask        bool [num_rows]: rows to process. None processes all rows.
    names       statistics of the rows, see `RowSource.statistics`

    Log-probs are fp32. Rows without a used pair are not processed. In rows that are not processed,
    log-probs and statistics are 0. A token id outside of the vocabulary gives NaN.

    From hidden states this takes one matmul in the forward and three in the backward, or two in all
    if the head is frozen and no statistic has a gradient. Gradients of a row reach the source from
    the kernel and from single logits. If the source is 16-bit, both are rounded before they are
    added, so that an element in which they nearly cancel can be wrong by 1 %.
    """
    if mask is not None:
        token_ids = torch.where(mask[row_ids], token_ids, -1)
    segments = Segments.from_ids(row_ids, source.num_rows)
    row_mask = mark_rows(row_ids, token_ids != -1, source.num_rows)
    result = pair_logprobs(source, segments, token_ids, row_mask=row_mask, names=names)
    return PairLogprobs(logps=result.logps.float(), statistics=result.statistics)


def pair_logprobs(
    source: RowSource,
    segments: Segments,
    token_ids: Tensor,
    *,
    row_mask: Tensor | None,
    names: tuple[str, ...],
    detached: tuple[str, ...] = (),
    reference: Reference | None = None,
) -> PairLogprobs:
    """Compute `logprobs_at` in float64, for pairs that are grouped by row.

    segments   the pairs of each row
    row_mask   bool [num_rows]: rows to process. None processes all rows, also those without a pair,
               so that the source need not look at a mask.
    """
    is_outside = (token_ids < -1) | (token_ids >= source.vocab_size)
    token_ids = torch.where(is_outside, -1, token_ids)
    is_used = token_ids >= 0
    pair_logits = source.logits_at(segments.segment_ids, token_ids)

    largest = find_largest(pair_logits, is_used, segments)
    target_ids = F.pad(token_ids, (0, 1))[largest]  # id 0 if a row has none
    statistics = source.statistics(
        target_ids, row_mask, names, detached=detached, reference=reference
    )
    differences = subtract_largest(
        pair_logits,
        is_used,
        segments,
        largest=largest,
        equals_largest=token_ids == target_ids[segments.segment_ids],
    )
    logps = segments.spread(statistics["logps"].double()) + differences

    is_nan = is_outside | (is_used & logps.isnan())
    logps = replace_values(logps, is_nan, torch.full_like(logps, torch.nan))
    if row_mask is not None:
        logps = torch.where(row_mask[segments.segment_ids], logps, 0.0)
    return PairLogprobs(logps=logps, statistics={name: statistics[name] for name in names})


# ---- tokens with further ids


def logprobs_with_extra_ids(
    source: RowSource,
    targets: Tensor,
    extra: TokenSets,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    names: tuple[str, ...] = (),
    detached: tuple[str, ...] = (),
    reference: Reference | None = None,
) -> ExtraLogprobs:
    """Return the log-prob of each target and of the further ids of each token.

    targets   int64 [num_tokens]
    extra     the further ids of each token
    mask      bool [num_tokens]: tokens to process. None processes all tokens. The others give 0.
    rows      int64 [num_tokens]: the row that predicts each token, any number where mask is False.
              Several tokens may have the same row. None: row i predicts token i.
    names, detached, reference   other statistics, see `RowSource.statistics`

    Raises ValueError if an extra id is outside of the vocabulary, if `extra` has not one set for
    each token, or (on a CPU) if a row does not exist.
    """
    check_sets("extra", extra, targets, source.vocab_size)
    result = token_logprobs_in_float64(
        source,
        targets,
        extra,
        mask=mask,
        rows=rows,
        names=names,
        detached=detached,
        reference=reference,
    )
    statistics = result.statistics
    statistics["logps"] = statistics["logps"].float()
    return ExtraLogprobs(statistics=statistics, extra_logps=result.extra_logps.float())


def token_logprobs_in_float64(
    source: RowSource,
    targets: Tensor,
    extra: TokenSets,
    *,
    mask: Tensor | None,
    rows: Tensor | None,
    names: tuple[str, ...],
    detached: tuple[str, ...] = (),
    reference: Reference | None = None,
) -> ExtraLogprobs:
    """Compute `logprobs_with_extra_ids` with log-probs in float64."""
    num_tokens = len(targets)
    num_rows = source.num_rows
    is_processed = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    if rows is None:
        row_ids = torch.arange(num_tokens, device=targets.device)
        row_mask = mask
    else:
        check_named(rows, mask, num_rows)
        row_ids = torch.where(is_processed, rows, 0)
        row_mask = mark_rows(row_ids, is_processed, num_rows)

    token_of_extra = extra.row_of
    pair_rows = torch.cat([row_ids, row_ids[token_of_extra]])
    is_used = torch.cat([is_processed, is_processed[token_of_extra]])
    targets = torch.where(targets < 0, source.vocab_size, targets)  # -1 would be an unused pair
    token_ids = torch.cat([targets, extra.ids.long()])
    result = pair_logprobs(
        source,
        Segments.from_ids(pair_rows, num_rows),
        torch.where(is_used, token_ids, -1),
        row_mask=row_mask,
        names=names,
        detached=detached,
        reference=reference,
    )
    logps = torch.where(is_used, result.logps, 0.0)
    target_logps, extra_logps = logps.split([num_tokens, len(extra.ids)])
    statistics = result.statistics
    if rows is not None:
        statistics = give_to_tokens(statistics, row_ids, is_processed, num_rows)
    return ExtraLogprobs(statistics={"logps": target_logps, **statistics}, extra_logps=extra_logps)


def mark_rows(row_ids: Tensor, is_processed: Tensor, num_rows: int) -> Tensor:
    """Return bool [num_rows]: rows that predict a token which is processed.

    row_ids        int64 [num_tokens]
    is_processed   bool [num_tokens]
    """
    marked_ids = torch.where(is_processed, row_ids, num_rows)
    is_marked = torch.zeros(num_rows + 1, dtype=torch.bool, device=row_ids.device)
    return is_marked.index_fill(0, marked_ids, True)[:num_rows]


def give_to_tokens(
    statistics: dict[str, Tensor],
    row_ids: Tensor,
    is_processed: Tensor,
    num_rows: int,
) -> dict[str, Tensor]:
    """Give each token the statistics of its row. The gradient of a row is the sum over its tokens.

    statistics     each [num_rows]
    row_ids        int64 [num_tokens]
    is_processed   bool [num_tokens]. The other tokens get 0, and -1 for "top_id".
    """
    segments = Segments.from_ids(row_ids, num_rows)
    given = {}
    for name, values in statistics.items():
        if name == "top_id":
            given[name] = torch.where(is_processed, values[row_ids], -1)
        else:
            given[name] = torch.where(is_processed, segments.spread(values), 0.0)
    return given


# ---- losses of further ids


def auxiliary_loss(terms: ExtraIdTerms, extra_logps: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss of each token that depends on the log-probs of its further ids.

    terms         functions of log-probs with their values, from `Objective.extra_id_terms(batch)`:
                  the terms of `TokenBatch(logp_terms=, prob_terms=)`, or score centering. Each
                  returns the term of each id, and the derivative of the loss of a token with
                  respect to each log-prob. This derivative is the gradient here. It need not be
                  that of the term: score centering has constant coefficients.
    extra_logps   fp32 [num_extra_ids], from `logprobs_with_extra_ids`
    advantages    fp32 [num_tokens]
    returns       fp32 [num_tokens], differentiable in extra_logps. A token whose loss gets the
                  gradient 0 gives its ids the gradient 0, even if a derivative is infinite or NaN.
    """
    logps = extra_logps.detach()
    token_of_id = terms.token_of_id()
    result = terms.compute(logps, advantages)
    gradients = result.grad_logps
    if result.grad_outside is not None:
        # d log P = -sum_v p_v / P d log p_v over the further ids v.
        factor = result.grad_outside / prob_outside(logps, terms.offsets)
        gradients = gradients - factor[token_of_id] * logps.exp()
    return apply_function(_AuxiliaryLoss, extra_logps, result.losses, gradients, token_of_id)


def prob_outside(logps: Tensor, offsets: Tensor) -> Tensor:
    """Return the probability P of all ids that a token does not list, fp64 [num_tokens].

    It is (1 - p of the likeliest id) - sum of the other p, the first by expm1 as in the softmax
    kernel: so the gradients of log P at the listed ids cancel as they should, even if P is small. P
    is at least LEAST_OUTSIDE.

    logps     fp32 [num_ids]
    offsets   int64 [num_tokens + 1], where the ids of each token begin
    """
    segments = Segments.from_offsets(offsets, logps.numel())
    logps = logps.double()
    largest = find_largest(logps, torch.ones_like(logps, dtype=torch.bool), segments)
    ids = torch.arange(logps.numel(), device=logps.device)
    is_largest = ids == largest[segments.segment_ids]
    parts = torch.where(is_largest, -torch.expm1(logps), -logps.exp())
    return segments.sum(parts).clamp(min=LEAST_OUTSIDE)


class _AuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(logps: Tensor, losses: Tensor, slopes: Tensor, token_of_id: Tensor) -> Tensor:
        return losses.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, _, slopes, token_of_id = inputs
        ctx.save_for_backward(slopes, token_of_id)

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        slopes, token_of_id = ctx.saved_tensors
        return times(grad_losses[token_of_id], slopes), None, None, None
