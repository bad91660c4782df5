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
import torch.nn.functional as F
from torch import Tensor

from .checks import check_missing, check_row_numbers, require
from .core.sources import RowSource
from .extra_ids import ExtraLogprobs, logprobs_with_extra_ids
from .formulas.divergence import Exact
from .segments import Segments, find_largest, replace_values, subtract_largest
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
    extra        further ids of each token, whose log-probs are wanted too. An id that is not a
                 candidate has the log-prob -inf without gradient. Masked tokens give 0.
    mask         bool [num_tokens]: tokens to process. None processes all tokens.
    rows         int64 [num_tokens]: the row that predicts each token. None: row i predicts token i.
    names        some of STATISTICS
    detached     the statistics that need no gradient

    `candidate_logprobs` describes the statistics, `missing` and the errors. Tokens that use the
    whole vocabulary are computed apart, and the two results are merged.
    """
    check_sets("extra", extra, targets, source.vocab_size)
    is_known = all(name in STATISTICS for name in names)
    require(is_known, "names", names, f"pass some of {', '.join(map(repr, STATISTICS))}.")
    plan = plan_candidates(source, targets, candidates, mask=mask, rows=rows, missing=missing)
    softmax = softmax_over_candidates(source, plan)
    over_candidates = ExtraLogprobs(
        statistics=statistics_over_candidates(softmax, plan, names),
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

    `CandidateEntries` describes the list: the ids of each token's set, then the token's target. The
    entry of the target is used only if the set lacks the target.

    has_candidates       bool [num_tokens]: tokens to process with their candidates
    uses_vocabulary      bool [num_tokens]: tokens to process with the whole vocabulary
    may_use_vocabulary   False if the host knows that no token uses the vocabulary
    segments             the entries of each token, sorted by token
    row_ids              int64 [num_entries]: the row that predicts the token
    token_ids            int64 [num_entries], vocab_size for a target outside of the vocabulary
    is_outside           bool [num_entries]: targets outside of the vocabulary
    is_used              bool [num_entries]: entries that are candidates of a processed token
    is_target            bool [num_entries]: used entries with the target of their token
    needs_logit          bool [num_entries]: used entries of tokens with several candidates. The
                         log-prob of a single candidate is 0 for any logit.
    """

    has_candidates: Tensor
    uses_vocabulary: Tensor
    may_use_vocabulary: bool
    segments: Segments
    row_ids: Tensor
    token_ids: Tensor
    is_outside: Tensor
    is_used: Tensor
    is_target: Tensor
    needs_logit: Tensor


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
    if rows is None:
        row_of_token = torch.arange(len(targets), device=targets.device)
    else:
        check_row_numbers(rows, mask, source.num_rows)
        row_of_token = torch.where(is_processed, rows, 0)

    lacks_candidates = rows_without_set(candidates, targets, missing)
    has_candidates = is_processed & ~lacks_candidates
    uses_vocabulary = is_processed & lacks_candidates
    # The host knows which sets are empty. Targets and mask may be on a GPU, which the host would
    # have to wait for, so it reads them on a CPU only.
    may_use_vocabulary = candidates.empty_rows > 0 or missing == "full"
    if may_use_vocabulary and targets.device.type == "cpu":
        may_use_vocabulary = bool(uses_vocabulary.any())

    is_outside = (targets < 0) | (targets >= source.vocab_size)
    target_ids = torch.where(is_outside, source.vocab_size, targets)
    entries = list_entries(candidates, target_ids)
    segments = entries.segments
    token_of_entry = segments.segment_ids

    # Each token has an entry for each id of its set, and a last entry for its target. The last
    # entry is used if the target joins its set, because the set lacks it. (With missing="full" or
    # "mask" a token whose set lacks the target has no candidates, see `has_candidates`.)
    is_target = entries.token_ids == target_ids[token_of_entry]
    set_has_target = segments.max((is_target & ~entries.is_last).float()) > 0
    target_joins = has_candidates & ~set_has_target
    num_candidates = candidates.counts + target_joins
    is_candidate = ~entries.is_last | target_joins[token_of_entry]
    is_used = has_candidates[token_of_entry] & is_candidate
    return CandidatePlan(
        has_candidates=has_candidates,
        uses_vocabulary=uses_vocabulary,
        may_use_vocabulary=may_use_vocabulary,
        segments=segments,
        row_ids=row_of_token[token_of_entry],
        token_ids=entries.token_ids,
        is_outside=is_outside[token_of_entry] & entries.is_last,
        is_used=is_used,
        is_target=is_used & is_target,
        needs_logit=is_used & (num_candidates > 1)[token_of_entry],
    )


class CandidateEntries(NamedTuple):
    """The ids of each token's set, followed by the token's target, for one token after another.

    The target has an entry even if the set contains it too. So the host knows the number of
    entries, num_ids + num_tokens, without waiting for a GPU to compare targets and sets.

    segments    the entries of each token, sorted by token
    token_ids   int64 [num_entries]
    is_last     bool [num_entries]: the last entry of each token, which is its target
    """

    segments: Segments
    token_ids: Tensor
    is_last: Tensor


def list_entries(sets: TokenSets, target_ids: Tensor) -> CandidateEntries:
    """Return a list of all ids: the set of token 0, its target, the set of token 1, its target, ...

    For the sets [5, 9] and [3] with the targets 9 and 4 the ids are 5, 9, 9, 3, 4.

    sets         the candidates of each token

    target_ids   int64 [num_tokens]
    """
    num_tokens = len(target_ids)
    num_entries = len(sets.ids) + num_tokens
    # Each token before token i adds one entry to the ids before its set.
    offsets = sets.offsets + torch.arange(num_tokens + 1, device=target_ids.device)
    segments = Segments.from_offsets(offsets, num_entries)
    token_of_entry = segments.segment_ids
    positions = torch.arange(num_entries, device=target_ids.device)
    is_last = positions == offsets[1:][token_of_entry] - 1
    # The last entry of a token reads an id that is replaced by the target. For the last token this
    # is an id beyond the end, so append one.
    padded_ids = F.pad(sets.ids.long(), (0, 1))
    set_ids = padded_ids[positions - token_of_entry]
    token_ids = torch.where(is_last, target_ids[token_of_entry], set_ids)
    return CandidateEntries(segments=segments, token_ids=token_ids, is_last=is_last)


# ---- the softmax over candidates


@dataclass(frozen=True, eq=False)
class CandidateSoftmax:
    """The softmax of each token over its candidates, float64.

    logps           [num_entries], in the order of the entries of a `CandidatePlan`: log-probs of
                    the candidates, -inf for unused entries
    largest_logps   [num_tokens]: log-prob of the likeliest candidate
    largest_ids     int64 [num_tokens]: the id of the likeliest candidate, the lowest if several are
                    equal, NO_ID if there is none
    is_nan          bool [num_tokens]: tokens without a finite softmax. Their log-probs are those of
                    equal logits, so that no NaN arises in a backward. `mask_token_values` makes
                    their results NaN.
    """

    logps: Tensor
    largest_logps: Tensor
    largest_ids: Tensor
    is_nan: Tensor


def softmax_over_candidates(source: RowSource, plan: CandidatePlan) -> CandidateSoftmax:
    """Return the log-softmax of each token's logits z over its candidates, in float64.

    With `largest` the candidate with the largest logit, and d(id) = z(id) - z(largest):

        log p(id) = d(id) - log1p(sum of exp(d) over the candidates other than `largest`)

    The term of `largest` itself is exp(0) = 1. So a log-prob near 0 and its gradient, 1 - p, keep
    their digits.

    A token is marked in `is_nan` if one of its logits is NaN or +inf, if all are -inf, or if its
    target joins the candidates and is outside of the vocabulary.

    source   the rows, as logits or as hidden states with a head
    plan     the candidates of each token, as one list of entries
    """
    segments = plan.segments
    token_of_entry = segments.segment_ids
    is_used = plan.is_used
    logits = logits_of_candidates(source, plan)

    # If the largest logit of a token is not finite, there is no softmax: mark the token, and
    # replace its logits by 0, so that no NaN arises in the backward.
    maxima = segments.max(torch.where(is_used, logits.detach(), -torch.inf))
    is_nan = plan.has_candidates & ~maxima.isfinite()
    logits = replace_values(logits, is_nan[token_of_entry], torch.zeros_like(logits))

    largest_positions = find_largest(logits, is_used, segments)
    positions = torch.arange(segments.num_values, device=logits.device)
    is_largest = positions == largest_positions[token_of_entry]
    differences = subtract_largest(
        logits, is_used, segments, largest_positions, equals_largest=is_largest
    )
    other_exps = torch.where(is_used & ~is_largest, differences.exp(), 0.0)
    log_sums = torch.log1p(segments.sum(other_exps))

    # If several candidates are equally likely, `largest_ids` has the lowest of their ids.
    is_likeliest = differences == 0.0
    no_candidate = torch.iinfo(torch.int64).max
    lowest_ids = segments.lowest(plan.token_ids, is_likeliest, otherwise=no_candidate)
    has_no_id = is_nan | (lowest_ids == no_candidate)
    return CandidateSoftmax(
        logps=differences - segments.spread(log_sums),
        largest_logps=-log_sums,
        largest_ids=torch.where(has_no_id, NO_ID, lowest_ids),
        is_nan=is_nan,
    )


def logits_of_candidates(source: RowSource, plan: CandidatePlan) -> Tensor:
    """Return the logit of each entry of the plan, fp32 [num_entries], differentiable.

    It is 0 where it is not needed: for unused entries, and for a candidate that is the only one of
    its token, whose log-prob is 0 for any logit. It is NaN for a target outside of the vocabulary.
    """
    is_computed = plan.needs_logit & ~plan.is_outside
    logits = source.logits_at(plan.row_ids, torch.where(is_computed, plan.token_ids, NO_ID))
    logits = torch.where(is_computed, logits, 0.0)
    return torch.where(plan.needs_logit & plan.is_outside, torch.nan, logits)


def statistics_over_candidates(
    softmax: CandidateSoftmax,
    plan: CandidatePlan,
    names: tuple[str, ...],
) -> dict[str, Tensor]:
    """Return statistics of the softmax p of each token over its candidates, [num_tokens] by name.

        name            value
        "logps"         log p(target)
        "entropy"       -sum of p log p, where 0 log 0 is 0
        "sum_squares"   sum of p^2
        "top_prob"      largest p
        "top_id"        id of the largest p, int64

    "logps" is always computed, the others if they are among `names`. "log_kept_mass" is computed by
    `log_kept_mass`.
    """
    segments = plan.segments
    probs = softmax.logps.exp()
    # Where p is 0, replace log p = -inf by 0: the product would be NaN.
    finite_logps = torch.where(softmax.logps == -torch.inf, 0.0, softmax.logps)
    target_logps = segments.sum(torch.where(plan.is_target, softmax.logps, 0.0))

    statistics = {"logps": mask_token_values(target_logps, plan, softmax.is_nan)}
    if "entropy" in names:
        entropy = segments.sum(probs * -finite_logps)
        statistics["entropy"] = mask_token_values(entropy, plan, softmax.is_nan)
    if "sum_squares" in names:
        sum_squares = segments.sum(probs.square())
        statistics["sum_squares"] = mask_token_values(sum_squares, plan, softmax.is_nan)
    if "top_prob" in names:
        top_prob = softmax.largest_logps.detach().exp()
        statistics["top_prob"] = mask_token_values(top_prob, plan, softmax.is_nan)
    if "top_id" in names:
        statistics["top_id"] = softmax.largest_ids
    return statistics


def extra_logps_over_candidates(
    softmax: CandidateSoftmax,
    plan: CandidatePlan,
    extra: TokenSets,
) -> Tensor:
    """Return the log-prob of each extra id over the candidates of its token.

    softmax   the log-prob of each candidate
    plan      the candidates of each token, as one list of entries
    extra     the extra ids of each token, [num_extra_ids] in all

    The result is float64 [num_extra_ids]. It is -inf for an id that is not a candidate, NaN if the
    token of the id has no finite softmax, and 0 if the token does not use candidates.
    """
    if len(extra.ids) == 0:
        return torch.zeros(0, dtype=torch.float64, device=extra.ids.device)

    # Search each (token, extra id) among the (token, candidate) entries. A key joins the two
    # numbers into one, so that sorted keys can be searched.
    token_of_extra = extra.row_of
    entry_keys = (plan.segments.segment_ids << ID_BITS) + plan.token_ids
    entry_keys = torch.where(plan.is_used, entry_keys, -1)  # equal to no key of an extra id
    extra_keys = (token_of_extra << ID_BITS) + extra.ids
    sorted_keys, entry_of_key = entry_keys.sort()
    places = torch.searchsorted(sorted_keys, extra_keys).clamp(max=len(entry_keys) - 1)
    is_candidate = sorted_keys[places] == extra_keys

    logps = torch.where(is_candidate, softmax.logps[entry_of_key[places]], -torch.inf)
    is_nan = softmax.is_nan[token_of_extra]
    logps = replace_values(logps, is_nan, torch.full_like(logps, torch.nan))
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
    targets = softmax.largest_ids.clamp(min=0)
    no_extra_ids = TokenSets.whole(len(targets), device=targets.device)
    over_vocabulary = logprobs_over_vocabulary(
        source,
        targets,
        no_extra_ids,
        mask=plan.has_candidates,
        rows=rows,
        names=(),
    )
    log_mass = over_vocabulary.statistics["logps"].double() - softmax.largest_logps
    return mask_token_values(log_mass, plan, softmax.is_nan)


def mask_token_values(values: Tensor, plan: CandidatePlan, is_nan: Tensor) -> Tensor:
    """Return values as fp32, but 0 for tokens that do not use candidates, and NaN where is_nan.

    values   float64 or fp32 [num_tokens]. Where is_nan they are finite placeholders. Such a token
             gets the gradient NaN if the loss depends on it, otherwise 0.
    plan     which tokens use their candidates
    is_nan   bool [num_tokens]: tokens without a finite softmax
    """
    values = replace_values(values, is_nan, torch.full_like(values, torch.nan))
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
        no_logps = torch.zeros(0, dtype=torch.float64, device=targets.device)
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
