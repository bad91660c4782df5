"""Filters, which drop tokens from the policy term by their log-prob or entropy under the policy.

If a token can be dropped before the policy is evaluated, for example by the mismatch of sampler and
trainer, use the weights of the batch instead: see rewards/corrections.py. A dropped token has loss
0 and slope 0 in the policy term. It still counts in the KL and in the denominators, with two
exceptions: an entropy
bonus with entropy_aggregate="token-mean" is a mean over the tokens that `EntropyQuantile` keeps,
and a sequence that `SamplerMismatch` drops counts as masked. If a trust region drops a token, the
terms at its listed ids stay.

Comparisons with NaN are False, and no filter of this module drops a token for that reason, so the
loss is NaN. `TrustRegion` keeps a token whose log-prob, old log-prob or advantage is NaN, filters
of entropy one whose entropy is NaN, `OffPolicySequences` a sequence with a NaN among the log-probs
that it compares, or a NaN advantage, and `SamplerMismatch` one with a NaN among the log-probs of
the policy. A token that is dropped for another reason, such as a low entropy, takes its NaN along.
A NaN in sampler_logps means that the sampler did not score the token:
`TrustRegion(anchor="sampler")` drops it, and filters of sequences count a difference of 0. A filter
that you write decides itself: let it keep a NaN.

A trust region is (logp, anchor_logp, advantage, params) -> keep, with params = (low, high); p and q
are the probabilities under the policy and under the anchor, A is the advantage.
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
from .ops import bounded_exp, ops
from .token_inputs import TokenInputs
from .token_loss import below_floor

#: Bound of log-ratios in nats. e^60 is finite in fp32, as in ops.bounded_exp.
LOG_RATIO_BOUND = 60.0
#: The description and the range of `OffPolicySequences.delta`.
DELTA = ("the largest mean log-ratio is a finite number.", -LARGEST, LARGEST)
#: The values of `OffPolicySequences.advantage_of`.
ADVANTAGES_OF = ("sequence", "token")

# ---- trust regions


def trust_tv(logp, anchor_logp, advantage, params):
    """Return whether p - q <= high if A > 0, and whether p - q >= -low otherwise.

    p = exp(logp), q = exp(anchor_logp), A is the advantage and params is (low, high).
    """
    low = params[0]
    high = params[1]
    difference = ops.exp(logp) - ops.exp(anchor_logp)
    return ops.where(advantage > 0.0, difference <= high, difference >= -low)


def trust_symmetric_tv(logp, anchor_logp, advantage, params):
    """Return whether -low <= p - q <= high. The advantage is not used.

    p = exp(logp), q = exp(anchor_logp), and params is (low, high).
    """
    low = params[0]
    high = params[1]
    difference = ops.exp(logp) - ops.exp(anchor_logp)
    return (difference <= high) & (difference >= -low)


def trust_kl(logp, anchor_logp, advantage, params):
    """Return whether the binary KL(q || p) is within its bound, or A moves p back towards q.

    The KL is that of two outcomes: the token, of probability p = exp(logp) under the policy and
    q = exp(anchor_logp) under the anchor, and all other tokens. For A > 0, which raises p, the
    token is kept if KL <= high or p <= q. For A < 0 it is kept if KL <= low or p >= q. For A = 0 it
    is kept unless the KL is NaN. params is (low, high).
    """
    low = params[0]
    high = params[1]
    p = ops.exp(logp)
    q = ops.exp(anchor_logp)
    kl = q * (anchor_logp - logp) + (1.0 - q) * ops.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
    keep_if_positive = (kl <= high) | (p <= q)
    keep_if_negative = (kl <= low) | (p >= q)
    is_number = kl == kl
    keep_unless_positive = ops.where(advantage < 0.0, keep_if_negative, is_number)
    return ops.where(advantage > 0.0, keep_if_positive, keep_unless_positive)


def trust_ratio(logp, anchor_logp, advantage, params):
    """Return whether 1 - low < r < 1 + high. The advantage is not used.

    r = exp(logp - anchor_logp), and params is (low, high).
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
    """The base of all filters, which are frozen dataclasses with a method `keep`."""

    #: True: the decision for a token depends on the log-prob and entropy of this token alone, and
    #: `token_loss.token_loss` computes it. A filter that you write leaves it False.
    is_per_token: bool = False
    #: True: the decision for a token depends on the tokens of its sequence alone.
    is_per_sequence: bool = False
    #: True: tokens that are left out of the policy term are left out of the entropy bonus too.
    filters_entropy: bool = False
    #: False: the decision does not depend on advantages, which a batch may then lack.
    reads_advantages: bool = True

    def keep(
        self, logps: Tensor, entropy: Tensor | None, rows: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return which tokens to keep in the policy term, bool [num_tokens].

        logps     fp32 [num_tokens], log-prob of each token under the policy, detached
        entropy   fp32 [num_tokens] in nats, detached
        rows      the other inputs of these tokens, such as old_logps and advantages
        batch     the batch of these tokens; None if `is_per_token`
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TrustRegion(Filter):
    """Keep a token while the policy's probability p of it is near the anchor's, q.

    kind     "tv": p - q <= high for A > 0, p - q >= -low otherwise (DPPO, arXiv 2602.04879).
             "symmetric-tv": both bounds for every A (prime-rl's IPO). "kl": the binary KL of q and
             p instead (DPPO). "ratio": 1 - low < p / q < 1 + high (a hard zero outside, as for
             rollout importance sampling in SkyRL).
    anchor   "old": the batch's old_logps. "sampler": its sampler_logps; a token that it did not
             score (NaN) is dropped.
    """

    kind: str = "tv"
    low: float = 0.2
    high: float = 0.2
    anchor: str = "old"
    is_per_token = True
    ranges = (("low high", "the width of the region is a number >= 0.", 0),)

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is wrong."""
        super().__post_init__()
        require_one_of("kind", self.kind, TRUST_REGIONS)
        is_anchor = self.anchor in ("old", "sampler")
        require(is_anchor, "anchor", self.anchor, "it must be old or sampler.")

    @property
    def params(self) -> tuple[float, float]:
        """The bounds (low, high) as floats, the last argument of a trust region."""
        return (float(self.low), float(self.high))

    def keep(
        self, logps: Tensor, entropy: Tensor | None, rows: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return which tokens are inside the trust region, bool [num_tokens], see `Filter.keep`."""
        anchor_logps = rows.sampler_logps
        if anchor_logps is None:
            anchor_logps = rows.old_or_current(logps)
        return self.keeps(logps, anchor_logps, rows.advantages)

    def keeps(self, logps: Tensor, anchor_logps: Tensor, advantages: Tensor) -> Tensor:
        """Return whether tokens are kept, bool, from their log-probs and advantages.

        logps and anchor_logps are log-probs under the policy and the anchor. All have one shape.
        """
        return TRUST_REGIONS[self.kind](logps, anchor_logps, advantages, self.params)


@dataclass(frozen=True)
class EntropyFloor(Filter):
    """Keep tokens whose entropy is at least `threshold` nats, in the policy term and the entropy
    bonus.

    With the quantile of the previous step (`entropy.entropy_threshold`) this is the 80/20 rule of
    arXiv 2506.01939 in one pass over the logits; `EntropyQuantile` is the exact rule in two passes.
    """

    threshold: float
    is_per_token = True
    filters_entropy = True
    reads_advantages = False
    ranges = (("threshold", "it is an entropy in nats.", -LARGEST, LARGEST),)

    def keep(
        self, logps: Tensor, entropy: Tensor | None, rows: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return where the entropy is at least `threshold` or NaN, bool [num_tokens]."""
        assert entropy is not None
        return ~below_floor(entropy, self.threshold)


@dataclass(frozen=True, eq=False)
class EntropyQuantile(Filter):
    """Keep the `share` of trained tokens with the highest entropy, in the policy term and the
    entropy bonus (0.2 in arXiv 2506.01939; TRL's `top_entropy_quantile`). `process_group`: the
    quantile is over the tokens of all its ranks.
    """

    share: float
    process_group: Any = None
    filters_entropy = True
    reads_advantages = False
    ranges = (("share", *SHARE),)

    def keep(
        self, logps: Tensor, entropy: Tensor | None, rows: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return where the entropy is at least its quantile or NaN, bool [num_tokens]."""
        assert entropy is not None
        threshold = entropy_threshold(entropy, rows.mask, self.share, self.process_group)
        return ~below_floor(entropy, threshold)


@dataclass(frozen=True)
class OffPolicySequences(Filter):
    """Drop sequences with a negative advantage that have become unlikely under the policy.

    Source: DeepSeek-V3.2, arXiv 2512.02556.

    delta          a sequence is dropped if its mean of (log-prob under the sampler - log-prob now)
                   exceeds `delta`. Without sampler_logps, old_logps are used.
    advantage_of   decides where the advantages of the tokens of a sequence have different signs.
                   "sequence": the sequence is dropped or kept as a whole, by the sign of the sum of
                   its trained tokens' advantages. "token": in a sequence beyond `delta`, only
                   tokens whose own advantage is negative are dropped (TRL's
                   `off_policy_mask_threshold`). With one advantage per sequence both are the same.
    """

    delta: float = 0.5
    advantage_of: str = "sequence"
    is_per_sequence = True
    ranges = (("delta", *DELTA),)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("advantage_of", self.advantage_of, ADVANTAGES_OF)

    def keep(
        self, logps: Tensor, entropy: Tensor | None, rows: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return the tokens that are not dropped, bool [num_tokens], see `Filter.keep`.

        A NaN in sampler_logps counts as no difference. Any other NaN makes the mean of its sequence
        NaN, so the sequence is kept.
        """
        assert batch is not None
        now, sampler = _policy_and_sampler_logps(batch, logps)
        compared = torch.minimum(now, sampler) if batch.sampler_logps is None else now
        log_ratios = torch.where(compared.isnan(), torch.nan, log_ratio(sampler, now))
        return _keep_near(batch, log_ratios, self.delta, self.advantage_of)


@dataclass(frozen=True)
class SamplerMismatch(Filter):
    """Drop whole sequences whose log-probs are too far from the sampler's, as if they were masked.

    threshold   a sequence is dropped if the mean of exp |log-prob - sampler_logp| over its trained
                tokens exceeds it (NeMo-RL's `seq_logprob_error_threshold`)
    normalize   True: the denominators count only the sequences of this batch that are left. False:
                they count all; for a step of several batches, multiply the gradients by the
                denominator of all tokens or sequences over the denominator of those that are left.

    Unlike with other filters, dropped sequences have no KL, no entropy bonus and no NLL either. The
    batch must have sampler_logps; a token that the sampler did not score counts as equal. With
    kl=Exact(...) mask the sequences instead, see `corrections.sampler_mismatch_mask`.
    """

    threshold: float = 2.0
    normalize: bool = True
    reads_advantages = False
    ranges = (("threshold", "the mean of exp |difference| is at least 1.", 1, LARGEST),)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_bool = isinstance(self.normalize, bool)
        require(is_bool, "normalize", self.normalize, "pass True or False.")
        # The denominators depend on all sequences.
        object.__setattr__(self, "is_per_sequence", not self.normalize)

    def keep(
        self, logps: Tensor, entropy: Tensor | None, rows: TokenInputs, batch: TokenBatch | None
    ) -> Tensor:
        """Return the tokens of the sequences that are not dropped, bool [num_tokens]."""
        assert batch is not None
        # A comparison with NaN is False: the sequence is kept and the loss becomes NaN.
        return batch.spread(~(sampler_errors(batch, logps) > self.threshold))


def near_sampler(
    batch: TokenBatch, logps: Tensor, delta: float, advantage_of: str = "sequence"
) -> Tensor:
    """Return which tokens `OffPolicySequences` would keep, bool [num_tokens].

    batch                 has the log-probs of the sampler and the advantages
    logps                 fp32 [num_tokens], log-prob of each token under the policy
    delta, advantage_of   as in `OffPolicySequences`

    A token with a NaN among its two log-probs counts as 0 in the mean of its sequence.
    """
    now, sampler = _policy_and_sampler_logps(batch, logps)
    return _keep_near(batch, log_ratio(sampler, now), delta, advantage_of)


def sampler_errors(batch: TokenBatch, logps: Tensor) -> Tensor:
    """Return the mean of exp |logp - sampler_logp| over each sequence's trained tokens, fp64 [B].

    It is at least 1, or 0 for a sequence without trained tokens. A token that the sampler did not
    score (NaN) counts as equal, exp 0 = 1. A NaN in logps makes the mean of its sequence NaN.

    batch   has the sampler_logps
    logps   fp32 [num_tokens], log-prob of each token under the policy
    """
    if batch.sampler_logps is None:
        raise ValueError(
            "sampler_logps is None, but log-probs are compared with them: pass the sampler's"
            " log-probs."
        )
    sampler = batch.table("sampler_logps")["sampler_logps"]
    trained = batch.trained
    distance = log_ratio(torch.where(trained, logps, 0.0), sampler).abs()
    error = torch.where(logps.isnan(), math.nan, distance.exp())
    total = batch.sequence_sum(torch.where(trained, error, 0.0))
    return total / batch.lengths.clamp(min=1.0)


def _policy_and_sampler_logps(batch: TokenBatch, logps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probs of a batch under the policy and under the sampler, fp32 [num_tokens].

    The log-prob under the policy is 0 in masked tokens. Without sampler_logps, the old_logps of the
    batch take their place. Without old_logps, and for on-policy tokens, both results are equal.

    batch   may have sampler_logps, old_logps and a mark of on-policy tokens
    logps   fp32 [num_tokens], log-prob of each token under the policy
    """
    tensors = batch.table("old_logps", "sampler_logps")
    now = torch.where(batch.trained, logps, 0.0)
    if "sampler_logps" in tensors:
        return now, tensors["sampler_logps"]
    old = tensors.get("old_logps", now)
    if batch.on_policy is not None:
        old = torch.where(batch.on_policy_tokens, now, old)
    return now, old


def _keep_near(batch: TokenBatch, log_ratios: Tensor, delta: float, advantage_of: str) -> Tensor:
    """Return False for the tokens that `OffPolicySequences` drops, bool [num_tokens].

    A token is dropped if the mean of the log-ratios over its sequence exceeds delta, and its
    advantage (advantage_of="token") or the sum of advantages over its sequence ("sequence") is
    negative.

    log_ratios   fp64 [num_tokens], log-prob under the sampler minus log-prob under the policy, 0 in
                 masked tokens
    """
    if batch.advantages is None:
        raise ValueError(
            "advantages is None, but their signs decide which sequences are dropped: pass a float"
            " tensor [B] or [B, T]."
        )
    advantages = batch.table("advantages")["advantages"]
    # One reduction for both sums: with a context_group each is a collective.
    sums = batch.sequence_sum(torch.stack([log_ratios, advantages.double()], 1))
    mean_ratio, advantage_sum = (sums / batch.lengths.clamp(min=1.0)[:, None]).unbind(1)
    is_negative = advantages < 0 if advantage_of == "token" else batch.spread(advantage_sum < 0)
    return ~(is_negative & batch.spread(mean_ratio > delta))


def log_ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return above - below in fp64, clamped to [-60, 60] (LOG_RATIO_BOUND), and 0 in place of NaN.

    A NaN log-prob means that one of the two models did not score the token.
    """
    return torch.nan_to_num(above.double() - below.double(), nan=0.0).clamp(
        -LOG_RATIO_BOUND, LOG_RATIO_BOUND
    )


def check_filters(filters: Any, level: str) -> None:
    """Raise ValueError unless `filters` can be the filters of an objective with this `level`.

    They must be a tuple of filters, at most one of each class, and not both filters of entropy. A
    `TrustRegion` needs level="token".
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
