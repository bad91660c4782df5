"""Log-probs over candidate sets: the top-k, top-p or min-p support that a token was sampled from.

A sampler with top-k, top-p or min-p renormalises over the candidates that are left. The policy that
acted is therefore the softmax over this set:

    log p(target) = z(target) - log sum_{id in candidates} exp(z(id))

From hidden states, a token with candidates costs one dot product for each of them, and takes part
in no matmul with the whole weight. A token without candidates uses the whole vocabulary.

    statistics = candidate_logprobs(source, targets, candidates, names=("entropy",))
    loss = objective_loss(statistics["logps"], batch, objective, entropy=statistics["entropy"]).loss

The softmax over a set runs in float64, relative to its likeliest candidate:

    d(id) = z(id) - z(likeliest)
    log p(id) = d(id) - log1p(sum of exp(d) over the other candidates)

so that a log-prob near 0 and its gradient, 1 - p, keep their digits.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Return `candidate_logprobs`, and the log-probs of further ids over the same sets.

    extra   the further ids of each token. An id outside of its candidate set has the log-prob -inf
            without gradient. Log-probs of tokens that are not processed are 0.

    The other arguments are as in `candidate_logprobs`.
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
    if not plan.may_use_vocabulary:
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

    reference   rows of the reference, one for each row of `source`. They get no gradient.
    exact       which divergence. Its `tail` has no meaning here.
    targets     int64 [num_tokens]. None: the candidates alone decide, no target joins them.

    The other arguments are as in `candidate_logprobs`. The result is fp32 [num_tokens]. It is 0
    for tokens that are masked or use the whole vocabulary: those without candidates and, with
    missing="full", those whose target is missing. Raises the errors of `candidate_logprobs`.
    """
    if targets is None:
        targets = first_ids(candidates)
    plan = plan_candidates(source, targets, candidates, mask=mask, rows=rows, missing=missing)
    policy = softmax_over_candidates(source, plan)
    with torch.no_grad():
        reference_softmax = softmax_over_candidates(reference, plan)
    # Both sides add up to 1 over the set, so the terms q - p of "generalised" add up to 0.
    over_set = Exact(exact.direction, exact.mixture, tail="generalised")
    divergence = divergence_of_logprobs(
        over_set, policy.logps, reference_softmax.logps, plan.segments
    )
    return finish(divergence, plan, policy.is_nan | reference_softmax.is_nan)


# ---- which tokens use their candidates, and which candidates they have


@dataclass(frozen=True, eq=False)
class CandidatePlan:
    """The candidates of all tokens, and which tokens use them.

    Each token has one slot for each id of its set, and a last slot for its target, which is used
    only if the set lacks the target. So the number of slots is known without reading the targets,
    for which the host would wait for a GPU.

    has_candidates       bool [num_tokens]: tokens to process with their candidates
    uses_vocabulary      bool [num_tokens]: tokens to process with the whole vocabulary
    may_use_vocabulary   False if the host knows that no token uses the vocabulary
    segments             the slots of each token, sorted by token
    row_ids              int64 [num_slots]: the row that predicts the token
    token_ids            int64 [num_slots], vocab_size for a target outside of the vocabulary
    is_used              bool [num_slots]
    is_target            bool [num_slots]: used slots with the target of the token
    needs_logit          bool [num_slots]: used slots of tokens with several candidates. The
                         log-prob of a single candidate is 0 for any logit.
    """

    has_candidates: Tensor
    uses_vocabulary: Tensor
    may_use_vocabulary: bool
    segments: Segments
    row_ids: Tensor
    token_ids: Tensor
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
    """Decide which tokens use their candidates, and list the candidates of these tokens."""
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
    may_use_vocabulary = candidates.empty_rows > 0 or missing == "full"
    if may_use_vocabulary and targets.device.type == "cpu":
        may_use_vocabulary = bool(uses_vocabulary.any())

    num_tokens = len(targets)
    is_outside = (targets < 0) | (targets >= source.vocab_size)
    target_ids = torch.where(is_outside, source.vocab_size, targets)
    num_slots = len(candidates.ids) + num_tokens
    offsets = candidates.offsets + torch.arange(num_tokens + 1, device=targets.device)
    segments = Segments.from_offsets(offsets, num_slots)
    token_of_slot = segments.segment_ids
    slot_ids = torch.arange(num_slots, device=targets.device)
    is_last = slot_ids == offsets[1:][token_of_slot] - 1
    ids_of_sets = F.pad(candidates.ids.long(), (0, 1))  # the last slot of the last token reads it
    token_ids = ids_of_sets[slot_ids - token_of_slot]
    token_ids = torch.where(is_last, target_ids[token_of_slot], token_ids)

    is_target = token_ids == target_ids[token_of_slot]
    holds_target = segments.max((is_target & ~is_last).float()) > 0
    lacks_target = has_candidates & ~holds_target
    num_candidates = candidates.counts + lacks_target
    is_used = has_candidates[token_of_slot] & (~is_last | lacks_target[token_of_slot])
    return CandidatePlan(
        has_candidates=has_candidates,
        uses_vocabulary=uses_vocabulary,
        may_use_vocabulary=may_use_vocabulary,
        segments=segments,
        row_ids=row_of_token[token_of_slot],
        token_ids=token_ids,
        is_used=is_used,
        is_target=is_used & is_target,
        needs_logit=is_used & (num_candidates > 1)[token_of_slot],
    )


# ---- the softmax over candidates


@dataclass(frozen=True, eq=False)
class CandidateSoftmax:
    """The softmax of each token over its candidates, float64.

    logps           [num_slots]: log-probs of the candidates, -inf in unused slots
    largest_logps   [num_tokens]: log-prob of the likeliest candidate
    largest_ids     int64 [num_tokens]: its id, the lowest if several are equal, -1 if there is none
    is_nan          bool [num_tokens]: tokens without a finite softmax. Their log-probs are those of
                    logits of 0, so that no NaN arises in a backward. `finish` marks their results.
    """

    logps: Tensor
    largest_logps: Tensor
    largest_ids: Tensor
    is_nan: Tensor


def softmax_over_candidates(source: RowSource, plan: CandidatePlan) -> CandidateSoftmax:
    """Compute the softmax of each token over its candidates. See the top of this file."""
    segments = plan.segments
    token_of_slot = segments.segment_ids
    is_outside = plan.token_ids == source.vocab_size
    is_computed = plan.needs_logit & ~is_outside
    logits = source.logits_at(plan.row_ids, torch.where(is_computed, plan.token_ids, -1))
    logits = torch.where(is_computed, logits, 0.0)
    logits = torch.where(plan.needs_logit & is_outside, torch.nan, logits)

    is_used = plan.is_used
    maxima = segments.max(torch.where(is_used, logits.detach(), -torch.inf))
    is_nan = plan.has_candidates & ~maxima.isfinite()
    logits = replace_values(logits, is_nan[token_of_slot], torch.zeros_like(logits))

    largest = find_largest(logits, is_used, segments)
    slot_ids = torch.arange(segments.num_values, device=logits.device)
    is_largest = slot_ids == largest[token_of_slot]
    differences = subtract_largest(logits, is_used, segments, largest, equals_largest=is_largest)
    other_exps = torch.where(is_used & ~is_largest, differences.exp(), 0.0)
    log_sums = torch.log1p(segments.sum(other_exps))

    no_id = torch.iinfo(torch.int64).max
    largest_ids = segments.lowest(plan.token_ids, differences == 0.0, otherwise=no_id)
    return CandidateSoftmax(
        logps=differences - segments.spread(log_sums),
        largest_logps=-log_sums,
        largest_ids=torch.where(is_nan | (largest_ids == no_id), -1, largest_ids),
        is_nan=is_nan,
    )


def statistics_over_candidates(
    softmax: CandidateSoftmax,
    plan: CandidatePlan,
    names: tuple[str, ...],
) -> dict[str, Tensor]:
    """Return "logps" and the named statistics but for "log_kept_mass", [num_tokens] each."""
    segments = plan.segments
    probs = softmax.logps.exp()
    finite_logps = torch.where(softmax.logps == -torch.inf, 0.0, softmax.logps)
    target_logps = segments.sum(torch.where(plan.is_target, softmax.logps, 0.0))

    statistics = {"logps": finish(target_logps, plan, softmax.is_nan)}
    if "entropy" in names:
        entropy = segments.sum(probs * -finite_logps)
        statistics["entropy"] = finish(entropy, plan, softmax.is_nan)
    if "sum_squares" in names:
        sum_squares = segments.sum(probs.square())
        statistics["sum_squares"] = finish(sum_squares, plan, softmax.is_nan)
    if "top_prob" in names:
        top_prob = softmax.largest_logps.detach().exp()
        statistics["top_prob"] = finish(top_prob, plan, softmax.is_nan)
    if "top_id" in names:
        statistics["top_id"] = softmax.largest_ids
    return statistics


def extra_logps_over_candidates(
    softmax: CandidateSoftmax,
    plan: CandidatePlan,
    extra: TokenSets,
) -> Tensor:
    """Return the log-probs of further ids, float64 [num_extra_ids], -inf for no candidates."""
    if len(extra.ids) == 0:
        return torch.zeros(0, dtype=torch.float64, device=extra.ids.device)

    token_of_extra = extra.row_of
    # One number for each (token, id). Ids are at most vocab_size, which is below 2^31.
    slot_keys = (plan.segments.segment_ids << 31) + plan.token_ids
    slot_keys = torch.where(plan.is_used, slot_keys, -1)
    extra_keys = (token_of_extra << 31) + extra.ids
    sorted_keys, slot_of_key = slot_keys.sort()
    place = torch.searchsorted(sorted_keys, extra_keys).clamp(max=len(slot_keys) - 1)
    is_candidate = sorted_keys[place] == extra_keys

    logps = torch.where(is_candidate, softmax.logps[slot_of_key[place]], -torch.inf)
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
    """Return the log of the probability that the whole row gives to the candidates of each token.

    It is log p(likeliest candidate) over the vocabulary, minus the same over the candidates. Where
    the set has nearly all of the probability, both are near 0 for a confident row, so that the
    result keeps its digits.
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
    return finish(log_mass, plan, softmax.is_nan)


def finish(values: Tensor, plan: CandidatePlan, is_nan: Tensor) -> Tensor:
    """Return values [num_tokens] as fp32: NaN where is_nan, 0 for tokens without candidates."""
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
    """Compute `logprobs_with_extra_ids`, directly if each row has nothing but its target."""
    if rows is None and len(extra.ids) == 0:
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
    """Take the numbers of each token from the softmax that it uses.

    A statistic that the vocabulary lacks is 0 for tokens that use the vocabulary.
    """
    statistics = dict(over_candidates.statistics)
    for name, values in over_vocabulary.statistics.items():
        statistics[name] = torch.where(plan.uses_vocabulary, values, statistics[name])
    uses_vocabulary = plan.uses_vocabulary[extra.row_of]
    extra_logps = torch.where(
        uses_vocabulary,
        over_vocabulary.extra_logps,
        over_candidates.extra_logps,
    )
    return ExtraLogprobs(statistics=statistics, extra_logps=extra_logps)
