"""Log-probs at any (row, token id) pairs, and losses that depend on them.

Soft targets, score centering and top-k teachers need log-probs of further ids of a row, in addition
to the target's. Several tokens may be predicted by one row (`trees.py`), which is the same problem.

The softmax kernel leaves these ids out. It computes the log-sum-exp of the rest of each row, more
precisely the log-odds of the likeliest id y of the pairs against the rest. The others follow from
single logits z, at one dot product each from hidden states:

    d(id)     = z(id) - z(y)
    log p(id) = d(id) - log(sum over the ids of exp(d) + exp(-log_odds))

in float64. No log-prob is above 0, whatever the rounding of logits, and nothing cancels: neither in
1 - p of a confident row, nor in the probability of the rest, nor in gradients. The gradient of the
kernel is 0 at the ids that it leaves out. Theirs comes from the single logits in one piece.

Example:

    extra = TokenSets.from_padded(ids, values=coefficients)      # ids of each row, with numbers
    result = logprobs_with_extra_ids(source, targets, extra, names=("entropy",))
    terms = objective.extra_id_terms(batch)
    loss_of_tokens = auxiliary_loss(terms, result.extra_logps, advantages)      # [num_tokens]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_row_numbers
from .core.autograd import apply_function
from .core.sources import Reference, RowSource
from .formulas.extra_id_terms import ExtraIdTerms
from .formulas.ops import times
from .segments import (
    Segments,
    add_gradient_of,
    find_largest,
    replace_values,
    subtract_largest,
)
from .token_sets import TokenSets, check_sets

#: The statistics of a row that follow from those of the rest of the row.
STATISTICS_OF_PAIRS = ("entropy", "sum_squares")


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
    extra_logps   log-probs of the further ids, float64 [num_extra_ids], in their order
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
    if the head is frozen and no statistic has a gradient. Statistics that are not in
    STATISTICS_OF_PAIRS take a pass of their own, with as many matmuls.
    """
    if mask is not None:
        token_ids = torch.where(mask[row_ids], token_ids, -1)
    row_mask = mark_rows(row_ids, token_ids != -1, source.num_rows)
    result = pair_logprobs(source, row_ids, token_ids, row_mask=row_mask, names=names)
    return PairLogprobs(logps=result.logps.float(), statistics=result.statistics)


def pair_logprobs(
    source: RowSource,
    row_ids: Tensor,
    token_ids: Tensor,
    *,
    row_mask: Tensor | None,
    names: tuple[str, ...],
    detached: tuple[str, ...] = (),
    reference: Reference | None = None,
) -> PairLogprobs:
    """Compute `logprobs_at` in float64.

    row_mask   bool [num_rows]: rows to process. None processes all rows, also those without a pair,
               so that the source need not look at a mask.
    """
    is_outside = (token_ids < -1) | (token_ids >= source.vocab_size)
    pairs = DistinctPairs.from_pairs(row_ids, torch.where(is_outside, -1, token_ids), source)
    softmax = softmax_of_pairs(source, pairs, row_mask, names, detached)
    logps = pairs.spread(softmax.logps)
    is_nan = is_outside | (softmax.is_nan[row_ids] & (token_ids >= 0))
    logps = replace_values(logps, is_nan, torch.full_like(logps, torch.nan))
    if row_mask is not None:
        logps = torch.where(row_mask[row_ids], logps, 0.0)

    statistics = statistics_of_pairs(softmax, pairs, row_mask)
    other_names = tuple(name for name in names if name not in STATISTICS_OF_PAIRS)
    if other_names:
        statistics |= source.statistics(
            softmax.target_ids, row_mask, other_names, detached=detached, reference=reference
        )
    return PairLogprobs(logps=logps, statistics={name: statistics[name] for name in names})


@dataclass(frozen=True, eq=False)
class DistinctPairs:
    """Pairs without repetitions, in the order of rows and ids.

    There are as many as pairs were given, so that the host need not know how many differ. The last
    ones are unused, and belong to the last row.

    row_ids     int64 [num_pairs]
    token_ids   int64 [num_pairs], -1 for unused pairs
    rows        the pairs of each row
    repeated    the given pairs that equal each of these
    """

    row_ids: Tensor
    token_ids: Tensor
    rows: Segments
    repeated: Segments

    @classmethod
    def from_pairs(cls, row_ids: Tensor, token_ids: Tensor, source: RowSource) -> DistinctPairs:
        """Return the distinct pairs of (row_ids[i], token_ids[i]).

        row_ids     int64 [num_pairs]
        token_ids   int64 [num_pairs], at least -1
        """
        num_pairs = len(row_ids)
        # One number for each pair, which sorts by row, then by id.
        ids_per_row = source.vocab_size + 1
        keys, order = (row_ids * ids_per_row + (token_ids + 1)).sort(stable=True)
        is_new = keys.diff(prepend=keys[:1] - 1) != 0
        index_of_sorted = is_new.cumsum(0) - 1
        indices = torch.arange(num_pairs + 1, device=row_ids.device)
        offsets = torch.searchsorted(index_of_sorted, indices)
        first_keys = F.pad(keys, (0, 1), value=source.num_rows * ids_per_row - 1)
        first_keys = first_keys[offsets[:-1]]
        is_pair = offsets[:-1] < num_pairs
        row_ids = first_keys // ids_per_row
        token_ids = first_keys % ids_per_row - 1
        return cls(
            row_ids=row_ids,
            token_ids=torch.where(is_pair, token_ids, -1),
            rows=Segments.from_ids(row_ids, source.num_rows),
            repeated=Segments(
                segment_ids=torch.empty_like(order).scatter_(0, order, index_of_sorted),
                order=order,
                offsets=offsets,
            ),
        )

    def spread(self, values: Tensor) -> Tensor:
        """Return the value of each of the given pairs, from those of the distinct ones."""
        return self.repeated.spread(values)


@dataclass(frozen=True, eq=False)
class PairSoftmax:
    """The softmax of each row, over its distinct pairs one by one and over all other ids as one.

    logps             float64 [num_pairs]: -inf for unused pairs
    rest_logps        float64 [num_rows]: log-prob of all other ids
    rest_statistics   those of STATISTICS_OF_PAIRS that were asked for, of the rest, fp32 [num_rows]
    target_ids        int64 [num_rows]: the likeliest id of the pairs, 0 if there is none
    is_nan            bool [num_rows]: rows without a finite softmax, whose numbers are placeholders
    """

    logps: Tensor
    rest_logps: Tensor
    rest_statistics: dict[str, Tensor]
    target_ids: Tensor
    is_nan: Tensor


def softmax_of_pairs(
    source: RowSource,
    pairs: DistinctPairs,
    row_mask: Tensor | None,
    names: tuple[str, ...],
    detached: tuple[str, ...],
) -> PairSoftmax:
    """Compute the softmax of each row. See the top of this file, and `pair_logprobs`."""
    rows = pairs.rows
    row_of_pair = pairs.row_ids
    is_used = pairs.token_ids >= 0
    logits = source.logits_at(row_of_pair, pairs.token_ids)
    largest = find_largest(logits, is_used, rows)
    target_ids = F.pad(pairs.token_ids, (0, 1))[largest]  # id 0 if a row has none
    rest_statistics = source.statistics_of_rest(
        target_ids,
        row_of_pair,
        pairs.token_ids,
        row_mask,
        tuple(name for name in names if name in STATISTICS_OF_PAIRS),
        detached=detached,
    )
    # The pass gives the log-odds a gradient in the rest only. That of z(y) is added here.
    log_odds = add_gradient_of(rest_statistics["logps"].double(), F.pad(logits, (0, 1))[largest])
    is_largest = torch.arange(len(logits), device=logits.device) == largest[row_of_pair]
    differences = subtract_largest(logits, is_used, rows, largest, equals_largest=is_largest)

    has_nan = rows.max((is_used & differences.isnan()).double()) > 0
    is_nan = log_odds.isnan() | has_nan
    log_odds = replace_values(log_odds, is_nan, torch.zeros_like(log_odds))
    is_nan_pair = is_nan[row_of_pair] & is_used
    differences = replace_values(differences, is_nan_pair, torch.zeros_like(differences))

    has_pair = has_nan | (largest < len(logits))
    log_odds = torch.where(has_pair, log_odds, 0.0)
    other_exps = torch.where(is_used & ~is_largest, differences.exp(), 0.0)
    log_sum = torch.logaddexp(torch.log1p(rows.sum(other_exps)), -log_odds)
    log_sum = torch.where(has_pair, log_sum, 0.0)
    return PairSoftmax(
        logps=torch.where(is_used, differences - rows.spread(log_sum), -torch.inf),
        rest_logps=-log_odds - log_sum,
        rest_statistics=rest_statistics,
        target_ids=target_ids,
        is_nan=is_nan,
    )


def statistics_of_pairs(
    softmax: PairSoftmax, pairs: DistinctPairs, row_mask: Tensor | None
) -> dict[str, Tensor]:
    """Return statistics of rows from those of the rest and log-probs of pairs, fp32 [num_rows]."""
    has_prob = softmax.logps != -torch.inf
    logps = torch.where(has_prob, softmax.logps, 0.0)
    probs = torch.where(has_prob, logps.exp(), 0.0)
    rest_probs = softmax.rest_logps.exp()
    has_rest = rest_probs > 0
    rest_logps = torch.where(has_rest, softmax.rest_logps, 0.0)

    statistics = {}
    for name in STATISTICS_OF_PAIRS:
        if name not in softmax.rest_statistics:
            continue
        of_rest = torch.where(has_rest, softmax.rest_statistics[name], 0.0).double()
        if name == "entropy":
            of_pairs = pairs.rows.sum(-probs * logps)
            of_row = of_pairs + rest_probs * (of_rest - rest_logps)
        else:
            of_pairs = pairs.rows.sum(probs.square())
            of_row = of_pairs + rest_probs.square() * of_rest
        of_row = replace_values(of_row, softmax.is_nan, torch.full_like(of_row, torch.nan))
        if row_mask is not None:
            of_row = torch.where(row_mask, of_row, 0.0)
        statistics[name] = of_row.float()
    return statistics


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
    return ExtraLogprobs(statistics=statistics, extra_logps=result.extra_logps)


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
        check_row_numbers(rows, mask, num_rows)
        row_ids = torch.where(is_processed, rows, 0)
        row_mask = mark_rows(row_ids, is_processed, num_rows)

    token_of_extra = extra.row_of
    pair_rows = torch.cat([row_ids, row_ids[token_of_extra]])
    is_used = torch.cat([is_processed, is_processed[token_of_extra]])
    targets = torch.where(targets < 0, source.vocab_size, targets)  # -1 would be an unused pair
    token_ids = torch.cat([targets, extra.ids.long()])
    result = pair_logprobs(
        source,
        pair_rows,
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
    token_statistics = {}
    for name, values in statistics.items():
        if name == "top_id":
            token_statistics[name] = torch.where(is_processed, values[row_ids], -1)
        else:
            token_statistics[name] = torch.where(is_processed, segments.spread(values), 0.0)
    return token_statistics


# ---- losses of further ids


def auxiliary_loss(terms: ExtraIdTerms, extra_logps: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss of each token that depends on the log-probs of its further ids.

    terms         functions of log-probs with their values, from `Objective.extra_id_terms(batch)`:
                  the terms of `TokenBatch(logp_terms=, prob_terms=)`, or score centering. Each
                  returns the term of each id, and the derivative of the loss of a token with
                  respect to each log-prob. This derivative is the gradient here. It need not be
                  that of the term: score centering has constant coefficients.
    extra_logps   float64 [num_extra_ids], from `logprobs_with_extra_ids`
    advantages    fp32 [num_tokens]
    returns       fp32 [num_tokens], differentiable in extra_logps. A token whose loss gets the
                  gradient 0 gives its ids the gradient 0, even if a derivative is infinite or NaN.
    """
    logps = extra_logps.detach()
    token_of_id = terms.token_of_id()
    result = terms.compute(logps, advantages)
    losses = result.losses.float()
    return apply_function(_AuxiliaryLoss, extra_logps, losses, result.grad_logps, token_of_id)


class _AuxiliaryLoss(torch.autograd.Function):
    """Return the losses of tokens, whose gradient at each id is given."""

    @staticmethod
    def forward(logps: Tensor, losses: Tensor, grad_logps: Tensor, token_of_id: Tensor) -> Tensor:
        return losses.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, _, grad_logps, token_of_id = inputs
        ctx.save_for_backward(grad_logps, token_of_id)

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        grad_logps, token_of_id = ctx.saved_tensors
        return times(grad_losses[token_of_id], grad_logps), None, None, None
