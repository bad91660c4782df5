"""Filters, which drop tokens from the policy term by their log-prob or entropy under the policy.

If a token can be dropped before the policy is evaluated, for example by the mismatch of sampler and
trainer, use the weights of the batch instead: see rewards/corrections.py.

The policy term of a dropped token has loss 0 and gradient 0. The token still counts in the KL and
in the denominators, with two exceptions. An entropy bonus with entropy_aggregate="token-mean" is a
mean over the tokens that `EntropyQuantile` keeps. A sequence that `SamplerMismatch` drops counts as
masked. If a trust region drops a token, the terms at its listed ids stay.

A NaN is kept, so that the loss is NaN instead of hiding it:
- `TrustRegion` keeps a token whose log-prob, old log-prob or advantage is NaN.
- `EntropyFloor` and `EntropyQuantile` keep a token whose entropy is NaN.
- `OffPolicySequences` keeps a sequence with a NaN among its advantages or the log-probs that it
  compares.
- `SamplerMismatch` keeps a sequence with a NaN among the log-probs under the policy.
- A NaN in sampler_logps is no error: the sampler did not score the token.
  `TrustRegion(anchor="sampler")` drops this token, and the filters of sequences count a difference
  of 0 for it.
A token with a NaN can still be dropped for another reason, such as a low entropy. A filter that you
write should keep a NaN too.

In this file p and q are the probabilities of a token under the policy and under the anchor of a
trust region, and A is its advantage. A trust region is a function (logp, anchor_logp, advantage,
params) -> whether to keep the token, with params = (low, high).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..checks import LARGEST, Checked, require, require_one_of
from ..rewards.entropy import SHARE, entropy_threshold
from .ops import LOG_RATIO_BOUND, bounded_exp, ops
from .token_inputs import TokenInputs
from .token_loss import below_floor

#: The description and the range of `OffPolicySequences.delta`.
DELTA = ("the largest mean log-ratio is a finite number.", -LARGEST, LARGEST)
#: The values of `OffPolicySequences.advantage_of`.
ADVANTAGES_OF = ("sequence", "token")

# ---- trust regions


def trust_tv(logp, anchor_logp, advantage, params):
    """Return whether to keep each token: p - q <= high if A > 0, otherwise p - q >= -low.

    p = exp(logp), q = exp(anchor_logp) and A is the advantage.

    logp          log-prob of the token under the policy
    anchor_logp   log-prob of the token that p is compared with, for example under the old policy
    advantage     A of the token
    params        (low, high), two numbers

    The first three and the result are tensors [num_tokens]. For the kernels the function is called
    once with symbols in place of tensors: objects that record the operations on them.
    """
    low = params[0]
    high = params[1]
    difference = ops.exp(logp) - ops.exp(anchor_logp)
    return ops.where(advantage > 0.0, difference <= high, difference >= -low)


def trust_symmetric_tv(logp, anchor_logp, advantage, params):
    """Return whether to keep each token: -low <= p - q <= high.

    p = exp(logp) and q = exp(anchor_logp).

    logp          log-prob of the token under the policy
    anchor_logp   log-prob of the token that p is compared with, for example under the old policy
    advantage     not used: all trust regions have the same arguments
    params        (low, high), two numbers

    The log-probs and the result are tensors [num_tokens]. For the kernels the function is called
    once with symbols in place of tensors: objects that record the operations on them.
    """
    low = params[0]
    high = params[1]
    difference = ops.exp(logp) - ops.exp(anchor_logp)
    return (difference <= high) & (difference >= -low)


def trust_kl(logp, anchor_logp, advantage, params):
    """Return whether to keep each token: its KL is within a bound, or A moves p back towards q.

        KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p))     binary KL(q || p)

        A > 0   keep if KL <= high or p <= q, because the loss raises p
        A < 0   keep if KL <= low or p >= q, because the loss lowers p
        A = 0   keep unless the KL is NaN

    p = exp(logp), q = exp(anchor_logp) and A is the advantage. In the second logarithm 1e-8 is
    added to 1 - q and to 1 - p, so that it is finite for p or q = 1.

    logp          log-prob of the token under the policy
    anchor_logp   log-prob of the token that p is compared with, for example under the old policy
    advantage     A of the token
    params        (low, high), two numbers

    The first three and the result are tensors [num_tokens]. For the kernels the function is called
    once with symbols in place of tensors: objects that record the operations on them.
    """
    low = params[0]
    high = params[1]
    p = ops.exp(logp)
    q = ops.exp(anchor_logp)
    kl = q * (anchor_logp - logp) + (1.0 - q) * ops.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
    keep_if_positive = (kl <= high) | (p <= q)
    keep_if_negative = (kl <= low) | (p >= q)
    is_number = kl == kl  # False for NaN
    keep_unless_positive = ops.where(advantage < 0.0, keep_if_negative, is_number)
    return ops.where(advantage > 0.0, keep_if_positive, keep_unless_positive)


def trust_ratio(logp, anchor_logp, advantage, params):
    """Return whether to keep each token: 1 - low < r < 1 + high.

    r = exp(min(logp - anchor_logp, 60)). The bound of 60 keeps r finite in fp32.

    logp          log-prob of the token under the policy
    anchor_logp   log-prob of the token that logp is compared with, for example under the old policy
    advantage     not used: all trust regions have the same arguments
    params        (low, high), two numbers

    The log-probs and the result are tensors [num_tokens]. For the kernels the function is called
    once with symbols in place of tensors: objects that record the operations on them.
    """
    low = params[0]
    high = params[1]
    r = bounded_exp(logp - anchor_logp)
    return (r > 1.0 - low) & (r < 1.0 + high)


TRUST_REGIONS = {
    "tv": trust_tv,
    "symmetric-tv": trust_symmetric_tv,
    "kl": trust_kl,
    "ratio": trust_ratio,
}


class Filter(Checked):
    """The base class of filters, which choose the tokens of the policy term by a method `keep`.

    Subclasses are frozen dataclasses. The class attributes tell an `Objective` how to use a filter.
    """

    #: True: the decision for a token depends on the log-prob and entropy of this token alone, and
    #: `token_loss.token_loss` computes it. A filter that you write leaves it False.
    is_per_token: bool = False
    #: True: the decision for a token depends on the tokens of its sequence alone.
    is_per_sequence: bool = False
    #: True: dropped tokens have no entropy bonus either.
    filters_entropy: bool = False
    #: False: the decision does not depend on advantages, which a batch may then lack.
    reads_advantages: bool = True

    def keep(
        self, logps: Tensor, entropy: Tensor | None, inputs: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return which tokens to keep in the policy term, bool [num_tokens].

        Each subclass must define this method.

        logps     fp32 [num_tokens], log-prob of each token under the policy, detached
        entropy   fp32 [num_tokens] in nats, detached; may be None if the filter does not read it
        inputs    the other inputs of these tokens, such as old_logps and advantages
        batch     the batch of these tokens, which says which tokens form a sequence. It may be None
                  if the filter decides about each token alone (`is_per_token`).
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TrustRegion(Filter):
    """Keep a token if its probability p under the policy is near its probability q under an anchor.

    kind        the condition for keeping a token with advantage A:
                "tv"             p - q <= high if A > 0, otherwise p - q >= -low (DPPO, arXiv
                                 2602.04879)
                "symmetric-tv"   -low <= p - q <= high (prime-rl's IPO)
                "kl"             the binary KL(q || p) is at most high if A > 0, at most low if
                                 A < 0, or A moves p back towards q (DPPO)
                "ratio"          1 - low < p / q < 1 + high (rollout importance sampling in SkyRL)
    low, high   bounds of the condition, at least 0
    anchor      where q comes from: "old" for the old_logps of the batch, "sampler" for its
                sampler_logps. A token that the sampler did not score (NaN) is dropped.

    Raises ValueError naming the field that is wrong.
    """

    kind: str = "tv"
    low: float = 0.2
    high: float = 0.2
    anchor: str = "old"
    is_per_token = True
    ranges = (("low high", "the width of the region is a number >= 0.", 0),)

    def __post_init__(self) -> None:
        """Raise ValueError unless `kind` and `anchor` are known names and the bounds are >= 0."""
        super().__post_init__()
        require_one_of("kind", self.kind, TRUST_REGIONS)
        is_anchor = self.anchor in ("old", "sampler")
        require(is_anchor, "anchor", self.anchor, "it must be old or sampler.")

    @property
    def params(self) -> tuple[float, float]:
        """(low, high) as floats: the argument `params` of the functions in TRUST_REGIONS."""
        return (float(self.low), float(self.high))

    def keep(
        self, logps: Tensor, entropy: Tensor | None, inputs: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return which tokens are inside the trust region, bool [num_tokens].

        logps            fp32 [num_tokens], log-prob of each token under the policy
        entropy, batch   not used: `keep` of every filter has the same arguments
        inputs           of these tokens: advantages, and the log-probs to compare with
        """
        # `inputs` has sampler_logps only if anchor="sampler".
        anchor_logps = inputs.sampler_logps
        if anchor_logps is None:
            anchor_logps = inputs.old_or_current(logps)
        return self.keeps(logps, anchor_logps, inputs.advantages)

    def keeps(self, logps: Tensor, anchor_logps: Tensor, advantages: Tensor) -> Tensor:
        """Return which tokens are inside the trust region, bool [num_tokens].

        logps          float [num_tokens], log-prob of each token under the policy
        anchor_logps   float [num_tokens], log-prob of each token that `logps` is compared with
        advantages     float [num_tokens]
        """
        return TRUST_REGIONS[self.kind](logps, anchor_logps, advantages, self.params)


@dataclass(frozen=True)
class EntropyFloor(Filter):
    """Keep tokens with an entropy of at least `threshold` nats in policy term and entropy bonus.

    Pass the quantile of the previous step as threshold (`entropy.entropy_threshold`) for the 80/20
    rule of arXiv 2506.01939 in one pass over the logits. `EntropyQuantile` is the exact rule, in
    two passes.
    """

    threshold: float
    is_per_token = True
    filters_entropy = True
    reads_advantages = False
    ranges = (("threshold", "it is an entropy in nats.", -LARGEST, LARGEST),)

    def keep(
        self, logps: Tensor, entropy: Tensor | None, inputs: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return where the entropy is at least `threshold` or NaN, bool [num_tokens].

        A token with a NaN is kept, so that its loss is NaN instead of hiding the NaN.

        entropy                fp32 [num_tokens] in nats, not None
        logps, inputs, batch   not used: `keep` of every filter has the same arguments
        """
        assert entropy is not None
        return ~below_floor(entropy, self.threshold)  # "not below" is True for NaN


@dataclass(frozen=True, eq=False)
class EntropyQuantile(Filter):
    """Keep the trained tokens with the highest entropy in the policy term and the entropy bonus.

    share           share of the tokens to keep, in (0, 1] (0.2 in arXiv 2506.01939; TRL's
                    `top_entropy_quantile`)
    process_group   a process group: choose among the tokens of all its ranks. None: among the
                    tokens of this process.
    """

    share: float
    process_group: Any = None
    filters_entropy = True
    reads_advantages = False
    ranges = (("share", *SHARE),)

    def keep(
        self, logps: Tensor, entropy: Tensor | None, inputs: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return where the entropy is at least its quantile 1 - share or NaN, bool [num_tokens].

        The quantile is over the trained tokens, of all ranks of `process_group` if there is one. A
        token with a NaN is kept, so that its loss is NaN instead of hiding the NaN.

        entropy        fp32 [num_tokens] in nats, not None
        inputs         of these tokens; gives the loss mask
        logps, batch   not used: `keep` of every filter has the same arguments
        """
        assert entropy is not None
        threshold = entropy_threshold(entropy, inputs.mask, self.share, self.process_group)
        return ~below_floor(entropy, threshold)  # "not below" is True for NaN


@dataclass(frozen=True)
class OffPolicySequences(Filter):
    """Drop sequences with a negative advantage that have become unlikely under the policy.

    Source: DeepSeek-V3.2, arXiv 2512.02556.

    delta          a sequence has become unlikely if the mean of sampler_logp - logp over its
                   trained tokens exceeds `delta`. Without sampler_logps, old_logps take their
                   place.
    advantage_of   what has to be negative in such a sequence:
                   "sequence"   the sum of the advantages of its trained tokens. Then all tokens of
                                the sequence are dropped.
                   "token"      the advantage of a token. Then this token is dropped (TRL's
                                `off_policy_mask_threshold`).
                   Both are the same if all tokens of a sequence have the same advantage.

    Raises ValueError naming the field that is wrong.
    """

    delta: float = 0.5
    advantage_of: str = "sequence"
    is_per_sequence = True
    ranges = (("delta", *DELTA),)

    def __post_init__(self) -> None:
        """Raise ValueError unless `delta` is finite and `advantage_of` is in ADVANTAGES_OF."""
        super().__post_init__()
        require_one_of("advantage_of", self.advantage_of, ADVANTAGES_OF)

    def keep(
        self, logps: Tensor, entropy: Tensor | None, inputs: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return the tokens that are not dropped, bool [num_tokens].

        The tokens of a sequence are dropped if the mean of sampler_logp - logp over its trained
        tokens exceeds `delta` and its advantage is negative.

        A NaN in sampler_logps means that the sampler did not score the token. The token then has
        the difference 0. Any other NaN makes the mean of its sequence NaN, so the sequence is kept.

        logps             fp32 [num_tokens], log-prob of each token under the policy
        entropy, inputs   not used: `keep` of every filter has the same arguments
        batch             of these tokens: advantages, and sampler_logps or old_logps
        """
        assert batch is not None
        policy_logps, sampler_logps = _policy_and_sampler_logps(batch, logps)
        is_nan = policy_logps.isnan()
        if batch.sampler_logps is None:
            # `sampler_logps` are then the old_logps of the batch, where a NaN is an error.
            is_nan = is_nan | sampler_logps.isnan()
        # The difference is 0 where one of both is NaN. Put the NaN back if it is an error.
        differences = logp_difference(sampler_logps, policy_logps)
        differences = torch.where(is_nan, torch.nan, differences)
        return _keep_likely(batch, differences, self.delta, self.advantage_of)


@dataclass(frozen=True)
class SamplerMismatch(Filter):
    """Drop whole sequences whose log-probs are too far from the sampler's, as if they were masked.

    threshold   a sequence is dropped if the mean of exp |logp - sampler_logp| over its trained
                tokens exceeds the threshold (NeMo-RL's `seq_logprob_error_threshold`)
    normalize   True: the denominators count only the sequences of this batch that are left. False:
                they count all sequences. For a step of several batches pass False, and multiply the
                gradients by the ratio of two denominators: over all tokens or sequences, and over
                those that are left.

    Unlike with other filters, dropped sequences have no KL, no entropy bonus and no NLL either. The
    batch must have sampler_logps. A token that the sampler did not score (NaN) has the difference
    0. With kl=Exact(...) mask the sequences instead, see `corrections.sampler_mismatch_mask`.
    Raises ValueError naming the field that is wrong.
    """

    threshold: float = 2.0
    normalize: bool = True
    reads_advantages = False
    ranges = (("threshold", "the mean of exp |difference| is at least 1.", 1, LARGEST),)

    def __post_init__(self) -> None:
        """Check the fields, and set `is_per_sequence`. Raises ValueError naming a wrong field."""
        super().__post_init__()
        is_bool = isinstance(self.normalize, bool)
        require(is_bool, "normalize", self.normalize, "pass True or False.")
        # With normalize=True the weight of a token depends on how many sequences of the batch are
        # left, so on other sequences.
        object.__setattr__(self, "is_per_sequence", not self.normalize)

    def keep(
        self, logps: Tensor, entropy: Tensor | None, inputs: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return the tokens of the sequences that are not dropped, bool [num_tokens].

        A sequence is dropped if the mean of exp |logp - sampler_logp| over its trained tokens
        exceeds `threshold`.

        logps             fp32 [num_tokens], log-prob of each token under the policy
        entropy, inputs   not used: `keep` of every filter has the same arguments
        batch             of these tokens, with sampler_logps
        """
        assert batch is not None
        errors = sampler_errors(batch, logps)  # the mean of each sequence
        # "not above" keeps a sequence whose error is NaN, so that the loss becomes NaN.
        is_kept = ~(errors > self.threshold)
        return batch.spread(is_kept)  # the value of each token's sequence


def near_sampler(
    batch: TokenBatch, logps: Tensor, delta: float, advantage_of: str = "sequence"
) -> Tensor:
    """Return which tokens the filter `OffPolicySequences` would keep, bool [num_tokens].

    It drops sequences with a negative advantage whose log-probs are on average more than `delta`
    lower under the policy than under the sampler. Unlike the filter, this function counts the
    difference 0 for any token with a NaN among its log-probs.

    batch          has advantages, and sampler_logps or old_logps
    logps          fp32 [num_tokens], log-prob of each token under the policy
    delta          largest mean of sampler_logp - logp of a sequence that is kept in any case
    advantage_of   "sequence": drop all tokens of such a sequence if the sum of its advantages is
                   negative. "token": drop each of its tokens that has a negative advantage.

    Raises ValueError if the batch has no advantages.
    """
    policy_logps, sampler_logps = _policy_and_sampler_logps(batch, logps)
    differences = logp_difference(sampler_logps, policy_logps)
    return _keep_likely(batch, differences, delta, advantage_of)


def sampler_errors(batch: TokenBatch, logps: Tensor) -> Tensor:
    """Return the mean of exp |logp - sampler_logp| over each sequence's trained tokens.

    The result is fp64 [num_sequences]. It is at least 1, or 0 for a sequence without trained
    tokens. A token that the sampler did not score (NaN) has the difference 0, so exp 0 = 1. A NaN
    in logps makes the mean of its sequence NaN.

    batch   has sampler_logps
    logps   fp32 [num_tokens], log-prob of each token under the policy

    Raises ValueError if the batch has no sampler_logps.
    """
    if batch.sampler_logps is None:
        raise ValueError(
            "sampler_logps is None, but log-probs are compared with them: pass the sampler's"
            " log-probs."
        )
    sampler_logps = batch.table("sampler_logps")["sampler_logps"]
    trained = batch.trained
    trained_logps = torch.where(trained, logps, 0.0)
    # The difference is 0 if one of both log-probs is NaN. Put a NaN of logps back afterwards.
    distance = logp_difference(trained_logps, sampler_logps).abs()
    error = torch.where(logps.isnan(), math.nan, distance.exp())
    total = batch.sequence_sum(torch.where(trained, error, 0.0))
    num_trained = batch.lengths
    return total / num_trained.clamp(min=1.0)


def _policy_and_sampler_logps(batch: TokenBatch, logps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each token under the policy and under the sampler.

    The second result is, whichever comes first:
    1. sampler_logps, if the batch has them
    2. the log-prob under the policy, for a token that the batch marks as on-policy
    3. old_logps, if the batch has them
    4. the log-prob under the policy

    batch   may have sampler_logps, old_logps and `on_policy` (which tokens are on-policy)
    logps   fp32 [num_tokens], log-prob of each token under the policy

    Return (policy_logps, sampler_logps), fp32 [num_tokens] each, 0 in masked tokens.
    """
    tensors = batch.table("old_logps", "sampler_logps")
    policy_logps = torch.where(batch.trained, logps, 0.0)
    if "sampler_logps" in tensors:
        return policy_logps, tensors["sampler_logps"]
    old_logps = tensors.get("old_logps", policy_logps)
    if batch.on_policy is not None:
        old_logps = torch.where(batch.on_policy_tokens, policy_logps, old_logps)
    return policy_logps, old_logps


def _keep_likely(batch: TokenBatch, differences: Tensor, delta: float, advantage_of: str) -> Tensor:
    """Return which tokens the filter `OffPolicySequences` keeps, bool [num_tokens].

    A token is dropped if both conditions hold:
    1. the mean difference over the trained tokens of its sequence exceeds `delta`
    2. with advantage_of="token" its own advantage is negative, with "sequence" the mean advantage
       of its sequence is

    A comparison with a NaN is False, so the token is kept.

    batch          has advantages, and says which tokens form a sequence
    differences    fp64 [num_tokens], log-prob under the sampler minus log-prob under the policy, 0
                   in masked tokens
    delta          largest mean difference of a sequence that is kept in any case
    advantage_of   "token" or "sequence"

    Raises ValueError if the batch has no advantages.
    """
    if batch.advantages is None:
        raise ValueError(
            "advantages is None, but their signs decide which sequences are dropped: pass a float"
            " tensor [B] or [B, T]."
        )
    advantages = batch.table("advantages")["advantages"]
    # Compute both sums in one reduction, because with a context_group each one is a collective.
    sums = batch.sequence_sum(torch.stack([differences, advantages.double()], 1))
    num_trained = batch.lengths.clamp(min=1.0)
    means = sums / num_trained[:, None]  # [num_sequences, 2]
    mean_difference, mean_advantage = means.unbind(1)
    if advantage_of == "token":
        is_negative = advantages < 0
    else:
        is_negative = batch.spread(mean_advantage < 0)
    return ~(is_negative & batch.spread(mean_difference > delta))


def logp_difference(a_logps: Tensor, b_logps: Tensor) -> Tensor:
    """Return a_logps - b_logps clamped to [-60, 60] (LOG_RATIO_BOUND), fp64 [num_tokens].

    The difference is 0 if one of the log-probs is NaN, which means that a model did not score the
    token.

    a_logps, b_logps   float [num_tokens], log-probs of the same tokens under two models
    """
    difference = torch.nan_to_num(a_logps.double() - b_logps.double(), nan=0.0)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def check_filters(filters: Any, level: str) -> None:
    """Raise ValueError unless `filters` can be the filters of an objective with this `level`.

    `filters` must be a tuple of at most one filter of each class, and must not have both
    `EntropyFloor` and `EntropyQuantile`. A `TrustRegion` needs level="token".

    filters   the value of `Objective(filters=)`, of any type
    level     the `Objective.level`
    """
    remedy = (
        "pass a tuple of filters, for example (TrustRegion('tv'),), see"
        " grpo_kernels.formulas.filters."
    )
    are_filters = isinstance(filters, tuple) and all(isinstance(f, Filter) for f in filters)
    require(are_filters, "filters", filters, remedy)
    kinds = [type(f) for f in filters]
    require(len(set(kinds)) == len(kinds), "filters", filters, "give each kind of filter once.")
    has_both = EntropyFloor in kinds and EntropyQuantile in kinds
    remedy = "EntropyFloor and EntropyQuantile do the same thing: pass one of them."
    require(not has_both, "filters", filters, remedy)
    lacks_token_ratio = TrustRegion in kinds and level != "token"
    remedy = 'a TrustRegion compares probabilities of single tokens: it needs level="token".'
    require(not lacks_token_ratio, "level", level, remedy)
