"""Log-probs at any (row, token id) pairs, and losses that depend on them.

A row is one position of logits. Soft targets, score centering and top-k teachers need log-probs of
*extra ids* of a row: token ids other than the target, which the batch lists for a token. Several
tokens may be predicted by one row (`trees.py`), which is the same problem.

The softmax kernel leaves the ids of the pairs out. It computes the softmax sums of the rest of each
row, which is all other ids. Single logits of the pairs, at one dot product each from hidden states,
complete them to the softmax of the row, in float64 (`softmax_of_pairs` has the formula). No
log-prob is above 0, whatever the rounding of logits, and nothing cancels: neither in 1 - p of a
confident row, nor in the probability of the rest, nor in gradients. The kernel gives the ids that
it leaves out the gradient 0. They get their whole gradient from the single logits.

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
    LOWEST_LOGP,
    Segments,
    SortedIndex,
    find_largest,
    log_softmax_with_rest,
    replace_values,
)
from .token_sets import TokenSets, check_sets

#: The statistics of a row that are combined from its pairs and the rest of its ids.
COMBINED_STATISTICS = ("entropy", "sum_squares")

#: The token id of a pair that is not used.
UNUSED_ID = -1


class PairLogprobs(NamedTuple):
    """Log-probs of (row, token id) pairs.

    logps        [num_pairs], in the order of the pairs
    statistics   other statistics of each row by name, fp32 [num_rows]
    """

    logps: Tensor
    statistics: dict[str, Tensor]


class ExtraLogprobs(NamedTuple):
    """Log-probs of tokens and of extra ids.

    statistics    statistics of each token by name, fp32 [num_tokens]. "logps" is the log-prob of
                  the token's target. The other statistics belong to the row that predicts the
                  token.
    extra_logps   log-probs of the extra ids, float64 [num_extra_ids], token after token
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
    """Return the log-prob of each (row, id) pair, and statistics of the rows.

    Pair i gets log p(token_ids[i]) of the softmax of row row_ids[i].

    source      the rows, as logits or as hidden states with a head
    row_ids     int64 [num_pairs] in [0, num_rows), in any order. Pairs may repeat.
    token_ids   int64 [num_pairs]. -1 marks an unused pair, whose log-prob is -inf without gradient.
    mask        bool [num_rows]: rows to process. None processes all rows.
    names       statistics of the rows, see `RowSource.statistics`

    Log-probs are fp32. Rows without a used pair are not processed. In rows that are not processed,
    log-probs and statistics are 0. A token id outside of the vocabulary gives NaN.

    From hidden states this takes one matmul in the forward and three in the backward, or two in all
    if the head is frozen and no statistic has a gradient. Statistics other than "entropy" and
    "sum_squares" take another pass over the rows, with as many matmuls.
    """
    if mask is not None:
        token_ids = torch.where(mask[row_ids], token_ids, UNUSED_ID)
    # Rows with a used pair.
    row_mask = mark_rows(row_ids, token_ids != UNUSED_ID, source.num_rows)
    result = pair_logprobs(source, row_ids, token_ids, row_mask=row_mask, names=names)
    logps = torch.where(row_mask[row_ids], result.logps, 0.0)
    return PairLogprobs(logps=logps.float(), statistics=result.statistics)


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
    """Return the log-prob of each (row, id) pair in float64, and statistics of the rows in fp32.

    Each distinct pair is computed once, by `softmax_of_pairs`. Equal pairs get the same result.

    source      the rows, as logits or as hidden states with a head
    row_ids     int64 [num_pairs] in [0, num_rows), in any order. Pairs may repeat.
    token_ids   int64 [num_pairs]. UNUSED_ID marks an unused pair, whose log-prob is -inf. Another
                id outside of the vocabulary gives NaN.
    row_mask    bool [num_rows]: rows to process. Statistics of other rows are 0, and log-probs of
                other rows are arbitrary. None processes all rows, even rows without a pair.
    names       statistics of the rows, see `RowSource.statistics`
    detached    the statistics that need no gradient
    reference   the model that the statistic "divergence" is computed from, or None
    """
    is_outside = token_ids.clamp(UNUSED_ID, source.vocab_size - 1) != token_ids
    valid_ids = token_ids.masked_fill(is_outside, UNUSED_ID)
    pairs = DistinctPairs.from_pairs(row_ids, valid_ids, source)
    combined_names = tuple(name for name in names if name in COMBINED_STATISTICS)
    softmax = softmax_of_pairs(source, pairs, row_mask, combined_names, detached)

    # From distinct pairs to the pairs of the caller.
    logps = pairs.originals.take(softmax.logps)
    is_used = token_ids != UNUSED_ID
    is_nan = is_outside | (softmax.is_nan[row_ids] & is_used)
    # Unlike torch.where, this also gives a pair the gradient NaN if the loss depends on it.
    logps = replace_values(logps, is_nan, torch.nan)
    statistics = combine_statistics(softmax, pairs, row_mask, detached)
    other_names = tuple(name for name in names if name not in COMBINED_STATISTICS)
    if other_names:
        # The other statistics need a pass over whole rows, which takes a target for each row. Its
        # log-prob is not used, so any id of the vocabulary can be the target.
        statistics |= source.statistics(
            softmax.likeliest_ids, row_mask, other_names, detached=detached, reference=reference
        )
    return PairLogprobs(logps=logps, statistics={name: statistics[name] for name in names})


@dataclass(frozen=True, eq=False)
class DistinctPairs:
    """(row, token id) pairs, sorted by row, then by id, of which only distinct ones count.

    Of equal pairs the first counts, and the others are marked as unused. They are not left out,
    because the host would have to wait for a GPU to learn their number.

    rows        which row each pair belongs to: a segment of the sorted pairs for each row
    token_ids   int64 [num_pairs], the id of each pair; UNUSED_ID for unused pairs
    originals   for each of the original pairs the position of the distinct pair that equals it
    """

    rows: Segments
    token_ids: Tensor
    originals: SortedIndex

    @classmethod
    def from_pairs(cls, row_ids: Tensor, token_ids: Tensor, source: RowSource) -> DistinctPairs:
        """Return the distinct pairs among (row_ids[i], token_ids[i]).

        row_ids     int64 [num_pairs], the original pairs
        token_ids   int64 [num_pairs], in [0, vocab_size) or UNUSED_ID
        source      gives the number of rows and the size of the vocabulary

        For example, the pairs (0, 7), (0, 5), (0, 7) become (0, 5), (0, 7) and an unused pair.
        """
        num_pairs = len(row_ids)
        device = row_ids.device
        # A key joins row and id into one number, which sorts by row, then by id. UNUSED_ID + 1 = 0.
        ids_per_row = source.vocab_size + 1
        keys = row_ids * ids_per_row + (token_ids + 1)
        sorted_keys, order = keys.sort(stable=True)

        # Equal keys are neighbours now. The key of a pair has the positions firsts to ends - 1.
        firsts = torch.searchsorted(sorted_keys, sorted_keys)
        ends = torch.searchsorted(sorted_keys, sorted_keys, right=True)
        is_repeat = firsts != torch.arange(num_pairs, device=device)
        sorted_ids = (sorted_keys % ids_per_row - 1).masked_fill_(is_repeat, UNUSED_ID)

        # Row r has the keys from r * ids_per_row on.
        keys_of_rows = torch.arange(source.num_rows + 1, device=device) * ids_per_row
        rows = Segments(
            segment_ids=sorted_keys // ids_per_row,
            offsets=torch.searchsorted(sorted_keys, keys_of_rows),
        )
        # All original pairs of a key take the first position of the key. The other positions are
        # taken by none: their part of `order` runs from the end of the key to the same end.
        originals = SortedIndex(
            index=torch.empty_like(order).scatter_(0, order, firsts),
            order=order,
            offsets=F.pad(ends, (1, 0)),
        )
        return cls(rows=rows, token_ids=sorted_ids, originals=originals)


@dataclass(frozen=True, eq=False)
class PairSoftmax:
    """The softmax of each row, as the probabilities of its distinct pairs and of the rest.

    The rest of a row is all ids that are in none of its pairs, taken as one outcome.

    logps             float64 [num_pairs]: log-prob of each distinct pair, -inf for unused pairs
    rest_logps        float64 [num_rows]: log-prob of the rest
    rest_statistics   statistics of the softmax over the rest alone, fp32 [num_rows] by name: those
                      of COMBINED_STATISTICS that were requested
    likeliest_ids     int64 [num_rows]: the likeliest id of the row's pairs, 0 if it has no pair
    is_nan            bool [num_rows]: rows without a finite softmax, whose other fields hold
                      finite placeholders
    """

    logps: Tensor
    rest_logps: Tensor
    rest_statistics: dict[str, Tensor]
    likeliest_ids: Tensor
    is_nan: Tensor


def softmax_of_pairs(
    source: RowSource,
    pairs: DistinctPairs,
    row_mask: Tensor | None,
    names: tuple[str, ...],
    detached: tuple[str, ...],
) -> PairSoftmax:
    """Return the log-softmax of each row at its pairs, in float64.

    For one row let z be the logits, y the id with the largest logit among the ids of the row's
    pairs, and the rest all other ids. A pass of the softmax kernel over the rest gives

        log_odds = z[y] - logsumexp(z[rest])

    which complete the single logits of the pairs to a softmax (`log_softmax_with_rest`).

    source     the rows, as logits or as hidden states with a head
    pairs      the pairs whose log-probs are computed
    row_mask   bool [num_rows]: rows to process. None processes all rows.
    names      statistics of the rest, some of COMBINED_STATISTICS
    detached   the statistics that need no gradient
    """
    rows = pairs.rows  # a segment of the pairs for each row
    row_of_pair = rows.segment_ids
    logits = source.logits_at(row_of_pair, pairs.token_ids)
    largest = find_largest(logits, rows)  # of the pairs of each row
    # The position is inf for a row without a pair. It then reads the element that F.pad appends,
    # the id 0.
    positions = largest.positions.clamp(max=len(logits)).long()
    likeliest_ids = F.pad(pairs.token_ids, (0, 1))[positions]
    rest_statistics = source.statistics_of_rest(
        likeliest_ids,
        row_of_pair,
        pairs.token_ids,
        row_mask,
        names,
        detached=detached,
    )
    log_odds = rest_statistics["logps"].double()
    is_finite = (largest.maxima < torch.inf) & (log_odds == log_odds)  # False for NaN
    # If a row has no pair, or only pairs of probability 0, the rest has the probability 1.
    log_odds = log_odds.masked_fill(largest.maxima == -torch.inf, -torch.inf)
    softmax = log_softmax_with_rest(logits, log_odds, largest, rows)
    return PairSoftmax(
        # Unused pairs have the log-prob -inf already. This stops their gradient.
        logps=softmax.logps.masked_fill(pairs.token_ids < 0, -torch.inf),
        rest_logps=softmax.rest_logps,
        rest_statistics=rest_statistics,
        likeliest_ids=likeliest_ids,
        is_nan=~is_finite,
    )


def combine_statistics(
    softmax: PairSoftmax,
    pairs: DistinctPairs,
    row_mask: Tensor | None,
    detached: tuple[str, ...],
) -> dict[str, Tensor]:
    """Return statistics of whole rows, fp32 [num_rows] by name, from the pairs and the rest.

    The rest of a row is all ids that are in none of its pairs. With p the probabilities of the
    row's pairs and P the probability of the rest:

        entropy      = -sum of p log p + P (entropy of the rest - log P)
        sum_squares  =  sum of p^2 + P^2 (sum_squares of the rest)

    The result has the statistics that `softmax.rest_statistics` has. They are NaN in rows without a
    finite softmax.

    softmax    log-probs of the pairs and of the rest of each row, and the statistics of the rest
    pairs      says which pairs belong to each row
    row_mask   bool [num_rows]: rows to process. The others give 0. None processes all rows.
    detached   the statistics that need no gradient
    """
    statistics = {}
    for name in COMBINED_STATISTICS:
        if name not in softmax.rest_statistics:
            continue
        logps = softmax.logps
        rest_logps = softmax.rest_logps
        if name in detached:
            logps = logps.detach()
            rest_logps = rest_logps.detach()
        rest_probs = rest_logps.exp()
        # A rest of probability 0 may have statistics that are not finite.
        rest_values = torch.where(rest_probs > 0, softmax.rest_statistics[name], 0.0).double()
        if name == "entropy":
            # Where a probability is 0, its logarithm is replaced: 0 * -inf would be NaN.
            pair_sums = pairs.rows.sum(logps.exp() * logps.clamp(min=LOWEST_LOGP))
            values = rest_probs * (rest_values - rest_logps.clamp(min=LOWEST_LOGP)) - pair_sums
        else:
            pair_sums = pairs.rows.sum(logps.exp().square())
            values = pair_sums + rest_probs.square() * rest_values
        values = replace_values(values, softmax.is_nan, torch.nan)
        if row_mask is not None:
            values = torch.where(row_mask, values, 0.0)
        statistics[name] = values.float()
    return statistics


# ---- tokens with extra ids


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
    """Return the log-prob of each target and of the extra ids of each token.

    source      the rows, as logits or as hidden states with a head
    targets     int64 [num_tokens]
    extra       the extra ids of each token: ids besides the target, whose log-probs are wanted
    mask        bool [num_tokens]: tokens to process. None processes all tokens. The others give 0.
    rows        int64 [num_tokens]: the row that predicts each token, any number where mask is
                False. Several tokens may have the same row. None: row i predicts token i.
    names       other statistics of the row that predicts a token, see `RowSource.statistics`
    detached    the statistics that need no gradient
    reference   the model that the statistic "divergence" is computed from, or None

    Log-probs of targets are fp32, those of extra ids float64.

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
    """Return the log-prob of each target and of the extra ids of each token, all in float64.

    Extra ids are ids besides the target whose log-probs are wanted. A target or extra id of a token
    becomes a (row, id) pair, with the row of logits that predicts the token.

    source      the rows, as logits or as hidden states with a head
    targets     int64 [num_tokens]. A target outside of the vocabulary gives NaN.
    extra       the extra ids of each token
    mask        bool [num_tokens]: tokens to process. None processes all tokens. The others give 0.
    rows        int64 [num_tokens]: the row that predicts each token. None: row i predicts token i.
    names       other statistics of the row that predicts a token, see `RowSource.statistics`
    detached    the statistics that need no gradient
    reference   the model that the statistic "divergence" is computed from, or None

    Raises ValueError on a CPU if a row does not exist.
    """
    num_tokens = len(targets)
    num_rows = source.num_rows
    is_processed = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    # The pairs of all targets, then the pairs of all extra ids.
    tokens = torch.arange(num_tokens, device=targets.device)
    token_of_pair = torch.cat([tokens, extra.row_of])
    is_used = is_processed.index_select(0, token_of_pair)
    if rows is None:
        row_of_token = tokens
        row_mask = mask
        pair_rows = token_of_pair
    else:
        check_row_numbers(rows, mask, num_rows)
        # The row number of a masked token may be any number.
        row_of_token = torch.where(is_processed, rows, 0)
        row_mask = mark_rows(row_of_token, is_processed, num_rows)
        pair_rows = row_of_token.index_select(0, token_of_pair)
    # A target of -1 must give NaN, but the id -1 would mark its pair as unused. Use another id
    # outside of the vocabulary.
    target_ids = torch.where(targets < 0, source.vocab_size, targets)
    pair_ids = torch.cat([target_ids, extra.ids.long()])
    result = pair_logprobs(
        source,
        pair_rows,
        torch.where(is_used, pair_ids, UNUSED_ID),
        row_mask=row_mask,
        names=names,
        detached=detached,
        reference=reference,
    )
    logps = torch.where(is_used, result.logps, 0.0)
    target_logps, extra_logps = logps.split([num_tokens, len(extra.ids)])
    statistics = result.statistics
    if rows is not None:
        statistics = give_to_tokens(statistics, row_of_token, is_processed, num_rows)
    return ExtraLogprobs(statistics={"logps": target_logps, **statistics}, extra_logps=extra_logps)


def mark_rows(row_ids: Tensor, is_processed: Tensor, num_rows: int) -> Tensor:
    """Return whether each row predicts a token that is processed, bool [num_rows].

    row_ids        int64 [num_tokens]: the row that predicts each token. Several tokens may have the
                   same row.
    is_processed   bool [num_tokens]: tokens to process
    num_rows       number of rows
    """
    # Tokens that are not processed mark an additional row at the end, which is cut off.
    marked_ids = torch.where(is_processed, row_ids, num_rows)
    is_marked = torch.zeros(num_rows + 1, dtype=torch.bool, device=row_ids.device)
    return is_marked.index_fill(0, marked_ids, True)[:num_rows]


def give_to_tokens(
    statistics: dict[str, Tensor],
    row_ids: Tensor,
    is_processed: Tensor,
    num_rows: int,
) -> dict[str, Tensor]:
    """Return the statistics of each token, [num_tokens] by name, from the row that predicts it.

    The gradient of a row's statistic is the sum over the tokens that it predicts, in a fixed order.

    statistics     statistics of rows by name, [num_rows] each
    row_ids        int64 [num_tokens]: the row that predicts each token
    is_processed   bool [num_tokens]. The other tokens get 0, and -1 for "top_id".
    """
    row_of_token = SortedIndex.from_index(row_ids, num_rows)
    token_statistics = {}
    for name, values in statistics.items():
        if name == "top_id":  # int64, without gradient
            token_statistics[name] = torch.where(is_processed, values[row_ids], -1)
        else:
            token_statistics[name] = torch.where(is_processed, row_of_token.take(values), 0.0)
    return token_statistics


# ---- losses of extra ids


def auxiliary_loss(terms: ExtraIdTerms, extra_logps: Tensor, advantages: Tensor) -> Tensor:
    """Return what the extra ids of each token add to its loss, fp32 [num_tokens].

    Extra ids are ids besides the target, which the batch lists for a token. `terms.compute` gives
    the auxiliary loss of each token, the sum of the terms of its extra ids, and the derivative
    with respect to each log-prob. Autograd uses these derivatives and does not differentiate the
    functions, because some return another derivative on purpose: in score centering the factor of a
    log-prob counts as a constant. If the upstream gradient of a token is 0, its ids get the
    gradient 0, even if a derivative is infinite or NaN.

    terms         the functions of the objective and the values of the ids, from
                  `Objective.extra_id_terms(batch)`
    extra_logps   float64 [num_extra_ids]: log-prob of each extra id, token after token, from
                  `logprobs_with_extra_ids`
    advantages    fp32 [num_tokens], which the functions may read

    The result is differentiable in extra_logps.
    """
    result = terms.compute(extra_logps.detach(), advantages)
    losses = result.losses.float()  # [num_tokens]
    grad_logps = result.grad_logps  # [num_extra_ids]
    return apply_function(_AuxiliaryLoss, extra_logps, losses, grad_logps, result.token_of_id)


class _AuxiliaryLoss(torch.autograd.Function):
    """Return losses that are computed already, with a derivative that is computed already.

    logps         float64 [num_ids], which get the gradient
    losses        fp32 [num_tokens], computed from logps
    grad_logps    float64 [num_ids]: d loss / d log-prob of each id, for the loss of its token
    token_of_id   int64 [num_ids]: the token that lists each id
    """

    @staticmethod
    def forward(logps: Tensor, losses: Tensor, grad_logps: Tensor, token_of_id: Tensor) -> Tensor:
        """Return a copy of the losses, fp32 [num_tokens].

        The losses and their derivatives were computed before. This function only tells autograd
        that the losses depend on logps: autograd wants a new tensor as the output.

        logps         float64 [num_ids], not read
        losses        fp32 [num_tokens]
        grad_logps    float64 [num_ids]: d loss / d log-prob of each id, for the backward
        token_of_id   int64 [num_ids]: the token that lists each id, for the backward
        """
        return losses.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save the derivative of each id, and its token."""
        _, _, grad_logps, token_of_id = inputs
        ctx.save_for_backward(grad_logps, token_of_id)

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of logps: the derivative times the upstream gradient of the token.

        It is 0 where the upstream gradient is 0, even if the derivative is infinite or NaN.

        grad_losses   fp32 [num_tokens], the upstream gradients
        """
        grad_logps, token_of_id = ctx.saved_tensors
        return times(grad_losses[token_of_id], grad_logps), None, None, None
