"""Log-probs over candidate sets: the top-k, top-p or min-p support that a token was sampled from.

The candidates of a token are the ids that the filter of the sampler left for it. The sampler
renormalises over them. The policy that acted is therefore the softmax over this set:

    log p(target) = z(target) - log sum_{id in candidates} exp(z(id))

From hidden states, a token with candidates costs one dot product for each of them, and takes part
in no matmul with the whole weight. A token without candidates uses the whole vocabulary.

    statistics = candidate_logprobs(source, targets, candidates, names=("entropy",))
    loss = objective_loss(statistics["logps"], batch, objective, entropy=statistics["entropy"]).loss

`softmax_over_candidates` computes it in float64, relative to the largest logit of the set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_missing, check_row_numbers, require
from .core.sources import RowSource
from .extra_ids import DistinctPairs, ExtraLogprobs, logprobs_with_extra_ids
from .formulas.divergence import Exact
from .segments import (
    LOWEST_LOGP,
    LargestValues,
    Segments,
    find_largest,
    log_softmax,
    replace_values,
)
from .teachers import divergence_of_logprobs, first_ids
from .token_sets import TokenSets, check_sets, narrow_mask, rows_without_set

#: Statistics of a token over its candidate set, in addition to its log-prob.
STATISTICS = ("entropy", "sum_squares", "top_prob", "top_id", "log_kept_mass")

#: `RowSource.logits_at` computes no dot product for this id. As "top_id" it marks a token without
#: a likeliest candidate.
NO_ID = -1

#: Token ids, and the size of a vocabulary, are below 2^ID_BITS.
ID_BITS = 31


def candidate_logprobs(
    source: RowSource,
    targets: Tensor,
    candidates: TokenSets,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    missing: str = "include",
    names: tuple[str, ...] = (),
    detached: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Return the log-prob of each target over its candidate set, and the named statistics.

        log p(target) = z(target) - log(sum of exp(z) over the token's candidates)

    source       the rows, as logits or as hidden states with a head; z are its transformed logits
    targets      int64 [num_tokens]
    candidates   the candidates of each token. An empty set stands for the whole vocabulary.
    mask         bool [num_tokens]: tokens to process. None processes all tokens. The others give 0.
    rows         int64 [num_tokens]: the row that predicts each token, any number where mask is
                 False. Several tokens may have the same row. None: row i predicts token i.
    missing      what to do if a target is not in its set. "include": it joins the set. "full": the
                 token uses the whole vocabulary. "mask": the token is masked. "raise": ValueError,
                 for which the host waits for a GPU.
    names        further statistics of the softmax p over the set:
                 "entropy"         in nats
                 "sum_squares"     sum of p^2
                 "log_kept_mass"   log of the probability that the whole row gives to the set, 0 for
                                   tokens without a set. Processes the whole row.
                 "top_prob"        largest p (not differentiable)
                 "top_id"          its id, int64, the lowest if several are equal, -1 for tokens
                                   that are not processed (not differentiable)

    detached     the statistics that need no gradient

    The results are "logps" and the named statistics, fp32 [num_tokens] unless stated otherwise. A
    set of one id has the log-prob 0, and its logit is not computed. A set with a logit of NaN or
    +inf, or with logits of -inf only, gives NaN. Raises ValueError if an id is outside of the
    vocabulary, if there is not one set for each token, or (on a CPU) if a row does not exist.
    """
    result = candidate_logprobs_with_extra_ids(
        source,
        targets,
        candidates,
        extra=TokenSets.whole(len(targets), device=targets.device),
        mask=mask,
        rows=rows,
        missing=missing,
        names=names,
        detached=detached,
    )
    return result.statistics


def candidate_logprobs_with_extra_ids(
    source: RowSource,
    targets: Tensor,
    candidates: TokenSets,
    extra: TokenSets,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    missing: str = "include",
    names: tuple[str, ...] = (),
    detached: tuple[str, ...] = (),
) -> ExtraLogprobs:
    """Return the log-probs of targets and of extra ids over candidate sets, and statistics.

        log p(id) = z(id) - log(sum of exp(z) over the token's candidates)

    source       the rows, as logits or as hidden states with a head; z are its transformed logits
    targets      int64 [num_tokens]
    candidates   the candidates of each token. An empty set stands for the whole vocabulary.
    extra        extra ids of each token, whose log-probs are wanted too. An id that is not a
                 candidate has the log-prob -inf without gradient. Masked tokens give 0.
    mask         bool [num_tokens]: tokens to process. None processes all tokens.
    rows         int64 [num_tokens]: the row that predicts each token. None: row i predicts token i.
    missing      what to do if a target is not in its set. "include": it joins the set. "full": the
                 token uses the whole vocabulary. "mask": the token is masked. "raise": ValueError.
    names        some of STATISTICS, which `candidate_logprobs` describes
    detached     the statistics that need no gradient

    Tokens that use the whole vocabulary are computed in a separate pass, and the two results are
    merged. Raises the errors of `candidate_logprobs`.
    """
    check_sets("extra", extra, targets, source.vocab_size)
    is_known = all(name in STATISTICS for name in names)
    require(is_known, "names", names, f"pass some of {', '.join(map(repr, STATISTICS))}.")
    plan = plan_candidates(source, targets, candidates, mask=mask, rows=rows, missing=missing)
    softmax = softmax_over_candidates(source, plan)
    over_candidates = ExtraLogprobs(
        statistics=statistics_over_candidates(softmax, plan, names, detached),
        extra_logps=extra_logps_over_candidates(softmax, plan, extra),
    )
    if "log_kept_mass" in names:
        over_candidates.statistics["log_kept_mass"] = log_kept_mass(
            source,
            softmax,
            plan,
            rows=rows,
        )
    if not plan.may_use_vocabulary:  # no token uses the whole vocabulary
        return over_candidates

    over_vocabulary = logprobs_over_vocabulary(
        source,
        targets,
        extra,
        mask=plan.uses_vocabulary,
        rows=rows,
        names=tuple(name for name in names if name != "log_kept_mass"),
        detached=detached,
    )
    return merge_logprobs(over_candidates, over_vocabulary, plan, extra)


def candidate_divergence(
    source: RowSource,
    reference: RowSource,
    candidates: TokenSets,
    exact: Exact,
    *,
    targets: Tensor | None = None,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    missing: str = "include",
) -> Tensor:
    """Return the divergence of each token from a reference, both renormalised over its candidates.

    With p and q the softmax of policy and reference over the candidates of a token, this is for
    example KL(p || q) = sum of p (log p - log q) over the candidates.

    source       rows of the policy
    reference    rows of the reference, one for each row of `source`. They get no gradient.
    candidates   the candidates of each token
    exact        which divergence. Its `tail`, which says how ids outside of a set count, is
                 ignored: p and q are 0 there.
    targets      int64 [num_tokens], of which `missing` decides whether they join their sets. None:
                 no id joins a set.
    mask         bool [num_tokens]: tokens to process. None processes all tokens.
    rows         int64 [num_tokens]: the row that predicts each token. None: row i predicts token i.
    missing      what to do if a target is not in its set, see `candidate_logprobs`

    The result is fp32 [num_tokens]. It is 0 for masked tokens, and for tokens that use the whole
    vocabulary, whose divergence the caller computes from whole rows: tokens with an empty set and,
    with missing="full", tokens whose target is not in their set. Raises the errors of
    `candidate_logprobs`.
    """
    if targets is None:
        # The plan needs targets. An id that is in the set already does not change the set.
        targets = first_ids(candidates)
    plan = plan_candidates(source, targets, candidates, mask=mask, rows=rows, missing=missing)
    policy_softmax = softmax_over_candidates(source, plan)
    with torch.no_grad():
        reference_softmax = softmax_over_candidates(reference, plan)
    # tail="generalised" sums over the candidates only. This is the divergence, because p and q are
    # 0 at all other ids.
    over_candidates = Exact(exact.direction, exact.mixture, tail="generalised")
    divergence = divergence_of_logprobs(
        over_candidates, policy_softmax.logps, reference_softmax.logps, plan.segments
    )
    is_nan = policy_softmax.is_nan | reference_softmax.is_nan
    return mask_token_values(divergence, plan, is_nan)


# ---- which tokens use their candidates, and which candidates they have


@dataclass(frozen=True, eq=False)
class CandidatePlan:
    """The candidates of all tokens in one list of entries, and which tokens use them.

    An entry is one id of one token: the entries of a token are the ids of its set and then its
    target (`CandidateEntries`). An id of the set that equals the target is not used, so that the
    target counts once. Thus a target that its set lacks joins the set.

    has_candidates       bool [num_tokens]: tokens to process with their candidates
    uses_vocabulary      bool [num_tokens]: tokens to process with the whole vocabulary
    may_use_vocabulary   False if the host knows that no token uses the vocabulary
    is_outside           bool [num_tokens]: tokens whose target is outside of the vocabulary
    entries              the entries of each token
    row_ids              int64 [num_entries]: the row that predicts the token
    shares_rows          whether a row may predict several tokens
    is_repeat            bool [num_entries]: ids of a set that equal the target of their token
    is_single            bool [num_entries]: targets whose logit is not needed, because their token
                         has no other candidate or does not use candidates
    needs_logit          bool [num_entries]: the candidates of tokens that have several. The
                         log-prob of a single candidate is 0 for any logit.
    """

    has_candidates: Tensor
    uses_vocabulary: Tensor
    may_use_vocabulary: bool
    is_outside: Tensor
    entries: CandidateEntries
    row_ids: Tensor
    shares_rows: bool
    is_repeat: Tensor
    is_single: Tensor
    needs_logit: Tensor

    @property
    def segments(self) -> Segments:
        """Which token each entry of the list belongs to: one segment of the list for each token."""
        return self.entries.segments


def plan_candidates(
    source: RowSource,
    targets: Tensor,
    candidates: TokenSets,
    *,
    mask: Tensor | None,
    rows: Tensor | None,
    missing: str,
) -> CandidatePlan:
    """Decide which tokens use their candidates, and list the candidates of these tokens.

    The result has one list of entries for all tokens: for each token the ids of its set, and then
    its target. A row is one position of logits, which predicts a token, or with `rows` several.

    source       gives the sizes of rows and vocabulary. No logit is computed.
    targets      int64 [num_tokens]
    candidates   the candidates of each token. An empty set stands for the whole vocabulary.
    mask         bool [num_tokens]: tokens to process. None processes all tokens.
    rows         int64 [num_tokens]: the row that predicts each token. None: row i predicts token i.
    missing      what to do if a target is not in its set, see `candidate_logprobs`

    Raises the errors of `candidate_logprobs`.
    """
    check_missing(missing)
    check_sets("candidates", candidates, targets, source.vocab_size)
    mask = narrow_mask(candidates, targets, mask, missing)
    is_processed = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    lacks_candidates = rows_without_set(candidates, targets, missing)
    has_candidates = is_processed & ~lacks_candidates
    uses_vocabulary = is_processed & lacks_candidates
    # The host knows which sets are empty. Targets and mask may be on a GPU, which the host would
    # have to wait for, so it reads them on a CPU only.
    may_use_vocabulary = candidates.empty_rows > 0 or missing == "full"
    if may_use_vocabulary and targets.device.type == "cpu":
        may_use_vocabulary = bool(uses_vocabulary.any())

    is_outside = targets.clamp(0, source.vocab_size - 1) != targets
    entries = list_entries(candidates, targets.masked_fill(is_outside, NO_ID))
    token_of_entry = entries.segments.segment_ids
    if rows is None:
        row_ids = token_of_entry
    else:
        check_row_numbers(rows, mask, source.num_rows)
        # The row number of a masked token may be any number.
        row_ids = torch.where(is_processed, rows, 0)[token_of_entry]

    # A token has several candidates if an entry of it differs from its target. The log-prob of a
    # single candidate is 0, for which no logit is needed.
    is_other = entries.token_ids != entries.target_ids
    has_several = has_candidates & (entries.segments.max(is_other.float()) > 0)
    needs_logits = has_several.index_select(0, token_of_entry)  # of the entry's token
    is_repeat = entries.is_of_set & ~is_other
    return CandidatePlan(
        has_candidates=has_candidates,
        uses_vocabulary=uses_vocabulary,
        may_use_vocabulary=may_use_vocabulary,
        is_outside=is_outside,
        entries=entries,
        row_ids=row_ids,
        shares_rows=rows is not None,
        is_repeat=is_repeat,
        is_single=~(needs_logits | entries.is_of_set),
        needs_logit=needs_logits & ~is_repeat,
    )


class CandidateEntries(NamedTuple):
    """The ids of each token's set, followed by the token's target, for one token after another.

    Each id in this list is an entry. The target has an entry even if the set contains it too. So
    the host knows the number of entries, num_ids + num_tokens, without waiting for a GPU to compare
    targets and sets.

    segments     which token each entry belongs to
    token_ids    int64 [num_entries], NO_ID for a target outside of the vocabulary
    target_ids   int64 [num_entries]: the target of the entry's token, or NO_ID
    is_of_set    bool [num_entries]: True for the ids of sets, False for targets
    last         int64 [num_tokens]: the last entry of each token, which is its target
    """

    segments: Segments
    token_ids: Tensor
    target_ids: Tensor
    is_of_set: Tensor
    last: Tensor


def list_entries(sets: TokenSets, targets: Tensor) -> CandidateEntries:
    """Return a list of all ids: the set of token 0, its target, the set of token 1, its target, ...

    For the sets [5, 9] and [3] with the targets 9 and 4 the ids are 5, 9, 9, 3, 4.

    sets      the candidates of each token
    targets   int64 [num_tokens]
    """
    num_tokens = len(targets)
    num_entries = len(sets.ids) + num_tokens
    positions = torch.arange(num_entries + 1, device=targets.device)
    # Token i has the entries offsets[i] : offsets[i + 1]. Before them are the sets and targets of
    # the i tokens before it.
    offsets = sets.offsets + positions[: num_tokens + 1]
    # The number of tokens whose entries end at or before this position.
    token_of_entry = torch.searchsorted(offsets[1:], positions[:-1], right=True)
    last = offsets[1:] - 1  # the last entry of each token is its target
    is_of_set = torch.ones(num_entries, dtype=torch.bool, device=targets.device)
    is_of_set.index_fill_(0, last, False)
    target_ids = targets.index_select(0, token_of_entry)
    return CandidateEntries(
        segments=Segments(segment_ids=token_of_entry, offsets=offsets),
        # Where is_of_set, the ids of all sets replace the target, in their order.
        token_ids=target_ids.masked_scatter(is_of_set, sets.ids.long()),
        target_ids=target_ids,
        is_of_set=is_of_set,
        last=last,
    )


# ---- the softmax over candidates


class CandidateSoftmax(NamedTuple):
    """The softmax of each token over its candidates.

    The entries of a token, in one list for all tokens, are the ids of its candidate set and then
    its target (`CandidateEntries`).

    logps     float64 [num_entries]: log-prob of each candidate, -inf for entries that are not used,
              such as an id of the set that equals the target
    largest   the likeliest candidate of each token, and the logits relative to its logit
    is_nan    bool [num_tokens]: tokens without a finite softmax. Their log-probs are finite
              placeholders, so that no NaN arises in a backward. `mask_token_values` makes their
              results NaN.
    """

    logps: Tensor
    largest: LargestValues
    is_nan: Tensor


def softmax_over_candidates(source: RowSource, plan: CandidatePlan) -> CandidateSoftmax:
    """Return the log-softmax of each token's logits over its candidates, in float64.

    A token is marked in `is_nan` if one of its logits is NaN or +inf, if all are -inf, or if its
    target joins the candidates and is outside of the vocabulary.

    source   the rows, as logits or as hidden states with a head
    plan     the candidates of all tokens in one list of entries: for each token the ids of its set,
             and then its target
    """
    # `logits_at` returns -inf for NO_ID, so entries that are not used have the probability 0. The
    # logit of a single candidate can be any finite number.
    ids = torch.where(plan.needs_logit, plan.entries.token_ids, NO_ID)
    if plan.shares_rows:
        # `logits_at` takes distinct (row, id) pairs. Two tokens with the same row may both have a
        # candidate, so compute its logit once and give it to both entries.
        pairs = DistinctPairs.from_pairs(plan.row_ids, ids, source)
        distinct_logits = source.logits_at(pairs.rows.segment_ids, pairs.token_ids)
        logits = pairs.originals.take(distinct_logits)  # of each entry
    else:
        logits = source.logits_at(plan.row_ids, ids)
    logits = logits.masked_fill(plan.is_single, 0.0)
    largest = find_largest(logits, plan.segments)
    is_finite = largest.maxima - largest.maxima == 0.0  # False for NaN, inf and -inf
    return CandidateSoftmax(
        logps=log_softmax(logits, largest, plan.segments),
        largest=largest,
        is_nan=plan.is_outside | ~is_finite,
    )


def statistics_over_candidates(
    softmax: CandidateSoftmax,
    plan: CandidatePlan,
    names: tuple[str, ...],
    detached: tuple[str, ...],
) -> dict[str, Tensor]:
    """Return statistics of the softmax p of each token over its candidates, [num_tokens] by name.

        name            value
        "logps"         log p(target)
        "entropy"       -sum of p log p, where 0 log 0 is 0
        "sum_squares"   sum of p^2
        "top_prob"      largest p
        "top_id"        id of the largest p, int64

    softmax    the softmax over the candidates of each token
    plan       the candidates of all tokens in one list, with a segment for each token, whose last
               entry is the target
    names      which of the others to compute in addition to "logps". "log_kept_mass" is skipped
               here, because the function `log_kept_mass` computes it.
    detached   the statistics that get no gradient
    """
    segments = plan.segments
    target_logps = softmax.logps.index_select(0, plan.entries.last)
    statistics = {"logps": mask_token_values(target_logps, plan, softmax.is_nan)}
    for name in names:
        logps = softmax.logps.detach() if name in detached else softmax.logps
        if name == "entropy":
            # Where p is 0, replace log p = -inf by a finite number: the product would be NaN.
            products = logps.exp() * logps.clamp(min=LOWEST_LOGP)
            statistics[name] = mask_token_values(-segments.sum(products), plan, softmax.is_nan)
        elif name == "sum_squares":
            sum_squares = segments.sum(logps.exp().square())
            statistics[name] = mask_token_values(sum_squares, plan, softmax.is_nan)
        elif name == "top_prob":
            top_prob = largest_logps(softmax, plan).detach().exp()
            statistics[name] = mask_token_values(top_prob, plan, softmax.is_nan)
        elif name == "top_id":
            statistics[name] = likeliest_ids(softmax, plan)
    return statistics


def largest_logps(softmax: CandidateSoftmax, plan: CandidatePlan) -> Tensor:
    """Return the log-prob of the likeliest candidate of each token, float64 [num_tokens].

    softmax   the log-prob of each candidate
    plan      the candidates of all tokens in one list, with a segment for each token
    """
    # `is_largest` marks one candidate of each token, whose log-prob is the only term of its sum.
    return plan.segments.sum(torch.where(softmax.largest.is_largest, softmax.logps, 0.0))


def likeliest_ids(softmax: CandidateSoftmax, plan: CandidatePlan) -> Tensor:
    """Return the id of the likeliest candidate of each token, int64 [num_tokens].

    It is the lowest id if several are equally likely. It is NO_ID for a token whose softmax is NaN,
    and for a token that uses the whole vocabulary instead of candidates.

    softmax   the softmax over the candidates of each token. `softmax.largest.differences` are the
              logits of all candidates minus the largest logit of their token.
    plan      the candidates of all tokens in one list of entries (token, id). A segment of this
              list has the entries of one token.
    """
    is_likeliest = softmax.largest.differences == 0.0
    # The lowest likeliest id of each token, inf if there is none.
    lowest_ids = plan.segments.lowest(plan.entries.token_ids, is_likeliest)
    has_id = plan.has_candidates & ~softmax.is_nan
    return torch.where(has_id, lowest_ids, NO_ID).long()


def extra_logps_over_candidates(
    softmax: CandidateSoftmax,
    plan: CandidatePlan,
    extra: TokenSets,
) -> Tensor:
    """Return the log-prob of each extra id over the candidates of its token.

    An extra id is an id besides the target whose log-prob the caller wants.

    softmax   the log-prob of each candidate
    plan      the candidates of all tokens in one list of entries (token, id)
    extra     the extra ids of each token, [num_extra_ids] in all

    The result is float64 [num_extra_ids]. It is -inf for an id that is not a candidate, NaN if the
    token of the id has no finite softmax, and 0 if the token does not use candidates.
    """
    if len(extra.ids) == 0:
        return torch.empty(0, dtype=torch.float64, device=extra.ids.device)

    # Search each (token, extra id) among the (token, candidate) entries. A key joins the two
    # numbers into one, so that sorted keys can be searched.
    token_of_extra = extra.row_of
    entry_keys = (plan.segments.segment_ids << ID_BITS) + plan.entries.token_ids
    entry_keys = torch.where(plan.is_repeat, -1, entry_keys)  # equal to no key of an extra id
    extra_keys = (token_of_extra << ID_BITS) + extra.ids
    sorted_keys, entry_of_key = entry_keys.sort()
    places = torch.searchsorted(sorted_keys, extra_keys).clamp(max=len(entry_keys) - 1)
    is_candidate = sorted_keys[places] == extra_keys

    logps = torch.where(is_candidate, softmax.logps[entry_of_key[places]], -torch.inf)
    is_nan = softmax.is_nan[token_of_extra]
    logps = replace_values(logps, is_nan, torch.nan)
    return torch.where(plan.has_candidates[token_of_extra], logps, 0.0)


def log_kept_mass(
    source: RowSource,
    softmax: CandidateSoftmax,
    plan: CandidatePlan,
    *,
    rows: Tensor | None,
) -> Tensor:
    """Return the log of the probability that the whole row gives to a token's candidates.

    A candidate's probability over the vocabulary is its probability over the candidates times this
    kept mass. So, with `largest` the likeliest candidate,

        log_kept_mass = log p(largest) over the vocabulary - log p(largest) over the candidates

    For a confident row both log-probs are near 0. So the result keeps its digits even if the
    candidates have nearly all of the probability.

    source    the rows, as logits or as hidden states with a head; whole rows are processed
    softmax   the softmax over the candidates
    plan      which tokens use their candidates
    rows      int64 [num_tokens]: the row that predicts each token. None: row i predicts token i.

    The result is fp32 [num_tokens], 0 for tokens that do not use candidates.
    """
    targets = likeliest_ids(softmax, plan).clamp(min=0)  # -1 marks a token that is masked below
    no_extra_ids = TokenSets.whole(len(targets), device=targets.device)
    over_vocabulary = logprobs_over_vocabulary(
        source,
        targets,
        no_extra_ids,
        mask=plan.has_candidates,
        rows=rows,
        names=(),
    )
    log_mass = over_vocabulary.statistics["logps"].double() - largest_logps(softmax, plan)
    return mask_token_values(log_mass, plan, softmax.is_nan)


def mask_token_values(values: Tensor, plan: CandidatePlan, is_nan: Tensor) -> Tensor:
    """Return values as fp32, but 0 for tokens that do not use candidates, and NaN where is_nan.

    values   float64 or fp32 [num_tokens]. Where is_nan they are finite placeholders.
    plan     which tokens use their candidates
    is_nan   bool [num_tokens]: tokens without a finite softmax
    """
    # Unlike torch.where, this also gives a token the gradient NaN if the loss depends on it.
    values = replace_values(values, is_nan, torch.nan)
    return torch.where(plan.has_candidates, values, 0.0).float()


# ---- tokens that use the whole vocabulary


def logprobs_over_vocabulary(
    source: RowSource,
    targets: Tensor,
    extra: TokenSets,
    *,
    mask: Tensor,
    rows: Tensor | None,
    names: tuple[str, ...],
    detached: tuple[str, ...] = (),
) -> ExtraLogprobs:
    """Return log-probs and statistics of the softmax over the whole vocabulary.

    The result has the log-prob of each target, as the statistic "logps", the other named statistics
    of the row that predicts the token, and the log-prob of each extra id.

    source     the rows, as logits or as hidden states with a head
    targets    int64 [num_tokens]
    extra      extra ids of each token: ids besides the target, whose log-probs are wanted
    mask       bool [num_tokens]: tokens to process. The others give 0.
    rows       int64 [num_tokens]: the row that predicts each token. None: row i predicts token i.
    names      statistics of the row, see `RowSource.statistics`
    detached   the statistics that need no gradient

    If `rows` is None and there is no extra id, each row has one id. Then one pass of the softmax
    kernel computes everything, and extra_logps is empty.
    """
    if rows is None and len(extra.ids) == 0:
        # source.statistics returns "logps", the log-probs of the targets, and the named statistics.
        statistics = dict(source.statistics(targets, mask, names, detached=detached))
        no_logps = torch.empty(0, dtype=torch.float64, device=targets.device)
        return ExtraLogprobs(statistics=statistics, extra_logps=no_logps)
    return logprobs_with_extra_ids(
        source, targets, extra, mask=mask, rows=rows, names=names, detached=detached
    )


def merge_logprobs(
    over_candidates: ExtraLogprobs,
    over_vocabulary: ExtraLogprobs,
    plan: CandidatePlan,
    extra: TokenSets,
) -> ExtraLogprobs:
    """Merge two results: over the vocabulary for tokens that use it, over candidates for others.

    over_candidates   log-probs and statistics over the candidates of each token
    over_vocabulary   the same over the whole vocabulary. A statistic that is missing here, such as
                      "log_kept_mass", is taken from `over_candidates` for all tokens, where it is 0
                      for tokens that use the vocabulary.
    plan              which tokens use the vocabulary
    extra             the extra ids of each token, whose log-probs are in both results
    """
    statistics = dict(over_candidates.statistics)
    for name, values in over_vocabulary.statistics.items():
        statistics[name] = torch.where(plan.uses_vocabulary, values, statistics[name])
    token_uses_vocabulary = plan.uses_vocabulary[extra.row_of]
    extra_logps = torch.where(
        token_uses_vocabulary,
        over_vocabulary.extra_logps,
        over_candidates.extra_logps,
    )
    return ExtraLogprobs(statistics=statistics, extra_logps=extra_logps)
