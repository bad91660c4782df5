"""The expected results of every test of a loss: plain torch and autograd in float64.

Written from the papers (PPO 1707.06347, GRPO 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783,
INTELLECT-2 2505.07291, CISPO 2506.13585, GSPO 2507.18071, GMPO 2507.20673, SAPO 2511.20347, VESPO
2602.10693, FIPO 2603.19835, RLOO 2402.14740, A*-PO 2505.20686, Clip-Cov and KL-Cov 2505.22617,
GKD 2306.13649, DPPO 2602.04879, DeepSeek-V3.2 2512.02556, 80/20 rule 2506.01939; KL estimators:
Schulman 2020). It
imports nothing of the package under test.

Masked rows are left out by indexing, never multiplied by 0, so that their values, even NaN, cannot
reach a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from support.call_cases import Problem, SecondDistribution


@dataclass(frozen=True)
class Spec:
    """The loss to compute: one field per choice."""

    #: clip, cispo, policy-gradient, importance-sampling, sapo, vespo, gmpo, dro, regression,
    #: clip-cov, kl-cov
    surrogate: str = "clip"
    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float | None = None  # clip: upper bound of the unclipped ratio (dual clip)
    cap: float = 5.0  # cispo: upper bound of the ratio
    low: float = 0.0  # cispo: lower bound of the ratio
    level: str = "token"  # token, sequence, sequence-token, sequence-sum
    #: token-mean, seq-mean-token-mean, seq-mean-token-sum, group-mean, token-sum, constant
    aggregate: str = "token-mean"
    beta: float = 0.0
    kl: str = "k3"  # k1, k2, k3, abs, distillation, sdar
    entropy_coef: float = 0.0
    max_tokens: int | None = None  # of a sequence, for the aggregate "constant"
    tau: tuple[float, float] = (1.0, 1.05)  # sapo: for A > 0, for other A
    #: (k, lambda) for A >= 0, then (k, lambda) for A < 0
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)
    coefficient: float = 1.0  # beta of dro and of the regression, coefficient of kl-cov
    share: float = 1.0  # share of the tokens that clip-cov and kl-cov select
    band: tuple[float, float] = (1.0, 5.0)  # clip-cov: bounds of the covariances
    bounds: tuple[float, float] | None = None  # of the log-ratio
    kl_weighting: str = "none"  # none, ratio, detached-ratio, score
    straight_through: bool = False  # whether the KL estimate has the gradient of k2
    clamp_log: float = math.inf  # bound of |log(ref / p)| in KL estimates
    clamp: float = math.inf  # bound of KL estimates
    kl_aggregate: str | None = None  # None: `aggregate`
    entropy_aggregate: str | None = None  # None: `aggregate`
    count_empty: bool = True  # whether sequences without trained tokens count in means
    #: trust region: (kind, low, high, anchor), see `trusts`. The anchor is "old" or "sampler"
    trust: tuple[str, float, float, str] | None = None
    entropy_floor: float | None = None  # least entropy of tokens in the policy term
    entropy_share: float | None = None  # share of the tokens, those with the highest entropy
    off_policy: float | None = None  # most mean of log(sampler / p) of a sequence, see `filters`
    off_policy_by: str = "sequence"  # or "token": whose advantage must be negative
    #: (largest error of a sequence, whether denominators leave out sequences above it)
    sampler_mismatch: tuple[float, bool] | None = None
    #: fipo: (half-life, lower and upper bound of the weight, ratio above which a later token does
    #: not count, ratio above which the weight of a token with A < 0 is in [0.8, 1])
    future_kl: tuple[float, float, float, float, float] | None = None


@dataclass(frozen=True)
class Result:
    """The result of `objective` for N rows, of which n are trained.

    loss             0-d, with an autograd graph
    logps, entropy   [N], 0 in rows that are not trained
    kl               [N], the KL term of each row without beta, 0 in rows that are not trained
    log_ratio        [n], the log-ratio that the surrogate gets, by `Spec.level`
    clipped_low      bool [n]: the ratio is below the clip range, and the advantage is negative
    clipped_high     bool [n]: the ratio is above the clip range, and the advantage is positive
    kept             bool [n]: no filter drops the token from the policy term
    margin           the smallest distance between a number and a bound that it is compared with. If
                     it is tiny, rounding may decide differently in fp32.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    kl: Tensor
    log_ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kept: Tensor
    margin: float


def sequences_of(targets: Tensor, cu_seqlens: Tensor | None) -> list[list[int]]:
    """Return the row indices of each sequence. Packed rows without offsets are one sequence.

    targets      [B, T], whose token t of sequence b is row b * T + t, or packed [N]
    cu_seqlens   [B + 1], the boundaries of packed sequences, or None
    """
    if targets.dim() == 2:
        length = targets.shape[1]
        return [[b * length + t for t in range(length)] for b in range(targets.shape[0])]
    if cu_seqlens is None:
        return [list(range(targets.numel()))]
    offsets = cu_seqlens.tolist()
    return [list(range(offsets[b], offsets[b + 1])) for b in range(len(offsets) - 1)]


def to_rows(value: float | Tensor, sequences: list[list[int]], dtype: torch.dtype) -> Tensor:
    """Return a value per row [N], without gradient.

    value       a number, one value per sequence ([B] or [B, 1]), or one per token in any shape
    sequences   the row indices of each sequence
    dtype       of the result
    """
    num_rows = sum(len(sequence) for sequence in sequences)
    if not isinstance(value, Tensor) or value.dim() == 0:
        return torch.full((num_rows,), float(value), dtype=dtype)
    value = value.detach().to(dtype).reshape(-1)
    if value.numel() == num_rows:
        return value
    assert value.numel() == len(sequences)
    out = torch.zeros(num_rows, dtype=dtype)
    for b, sequence in enumerate(sequences):
        out[sequence] = value[b]
    return out


def log_probs(
    logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the labels and the entropies, float64 [...].

    logits        [..., V]; logits of -inf are allowed
    labels        int64 [...]
    temperature   a number, or a tensor that broadcasts with the logits
    """
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    finite = torch.where(log_p == -torch.inf, 0.0, log_p)
    logps = log_p.gather(-1, labels[..., None])[..., 0]
    return logps, -(log_p.exp() * finite).sum(-1)


def by_sign(positive: Tensor, yes: float, no: float) -> Tensor:
    """Return `yes` where `positive` is True and `no` elsewhere, in float64."""
    # torch.where of two Python numbers would be fp32.
    return torch.where(
        positive, torch.tensor(yes, dtype=torch.float64), torch.tensor(no, dtype=torch.float64)
    )


def surrogate(
    spec: Spec, log_ratio: Tensor, logp: Tensor, advantage: Tensor, selected: Tensor | None = None
) -> Tensor:
    """Return the policy loss of each of n tokens. Autograd through it defines the gradient.

    log_ratio   [n], log(p / old) of the token or of its sequence, with the gradient of the ratio
    logp        [n], log p of the token
    advantage   [n]
    selected    bool [n], the tokens that Clip-Cov or KL-Cov has selected; None for other surrogates
    """
    r = torch.exp(log_ratio)
    if spec.surrogate == "none":
        return 0.0 * logp
    if spec.surrogate == "policy-gradient":
        return -advantage * logp
    if spec.surrogate == "cispo":
        return -(r.clamp(spec.low, spec.cap) * advantage).detach() * logp
    if spec.surrogate in ("importance-sampling", "gmpo"):
        return -r * advantage
    if spec.surrogate == "sapo":
        tau = by_sign(advantage > 0, *spec.tau)
        return -4 / tau * torch.sigmoid(tau * (r - 1)) * advantage
    if spec.surrogate == "vespo":
        k = by_sign(advantage >= 0, spec.vespo[0], spec.vespo[2])
        rate = by_sign(advantage >= 0, spec.vespo[1], spec.vespo[3])
        log_w = log_ratio.clamp(math.log(1e-8), 20.0)
        return -torch.exp(rate + k * log_w - rate * log_w.exp()).detach() * advantage * logp
    if spec.surrogate == "dro":
        return -(advantage * logp - spec.coefficient / 2 * log_ratio**2)
    if spec.surrogate == "regression":
        return (spec.coefficient * log_ratio - advantage) ** 2
    if spec.surrogate == "kl-cov":
        assert selected is not None
        return -r * advantage + torch.where(selected, spec.coefficient * log_ratio.abs(), 0.0)
    assert spec.surrogate in ("clip", "clip-cov")
    unclipped = r if spec.delta is None else r.clamp(max=spec.delta)
    clipped = -torch.minimum(
        unclipped * advantage, r.clamp(1 - spec.eps_low, 1 + spec.eps_high) * advantage
    )
    return clipped if selected is None else torch.where(selected, 0.0, clipped)


def kl_estimate(name: str, logp: Tensor, ref: Tensor, clamp_log: float = math.inf) -> Tensor:
    """Return the estimate of KL(policy, reference) at each token, in the shape of logp.

    name        "k1", "k2", "k3", "abs" or "sdar"
    logp, ref   log-probs of the policy p and of the reference
    clamp_log   bound of |log(ref / p)|, which is clamped to it
    """
    d = (ref - logp).clamp(-clamp_log, clamp_log)
    if name == "sdar":
        return torch.sigmoid(5 * d).detach() * d
    return {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - d - 1, "abs": d.abs()}[name]


def kl_term(spec: Spec, logp: Tensor, old: Tensor, ref: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the KL term of each of n tokens. Autograd through it defines the gradient.

    It is the KL estimate times the weight that `spec.kl_weighting` names.

    logp, old, ref   [n], log-probs of the policy, the old policy (without gradient) and the
                     reference
    log_ratio        [n], for the weights "ratio" and "detached-ratio"
    """
    if spec.kl == "distillation":
        # The policy gradient with the advantage log(ref / p). Tokens whose probability has fallen
        # by more than 0.2 are dropped. A small penalty keeps the policy near the old one.
        x = logp - old
        keep = logp.detach().exp() - old.exp() >= -0.2
        return -torch.where(keep, (ref - logp).detach() * x.exp(), 0.0) + 1e-3 * x**2
    estimate = kl_estimate(spec.kl, logp, ref, spec.clamp_log)
    value = estimate.clamp(-spec.clamp, spec.clamp)
    clamped = ((ref - logp).abs() > spec.clamp_log) | (estimate.abs() > spec.clamp)
    if spec.straight_through:
        k2 = kl_estimate("k2", logp, ref)
        value = value.detach() + k2 - k2.detach()
    weight = {
        "none": torch.ones_like(value),
        "ratio": log_ratio.exp(),
        "detached-ratio": log_ratio.detach().exp(),
        "score": torch.exp(logp - logp.detach()),
    }[spec.kl_weighting]
    # If a clamp cuts the gradient of the estimate, it also cuts the gradient of the weight
    # (NeMo-RL).
    return torch.where(clamped, weight.detach(), weight) * value


def ratio_bounds(spec: Spec) -> tuple[float, float]:
    """Return the (lowest, highest) ratio that the surrogate does not clip.

    It is (0, inf) if the surrogate has no clip.
    """
    if spec.surrogate in ("clip", "clip-cov"):
        return 1 - spec.eps_low, 1 + spec.eps_high
    if spec.surrogate == "cispo":
        return spec.low, spec.cap
    return 0.0, math.inf


class Margin:
    """The smallest distance between a number and a bound that a computation has compared.

    Call it with each number and its bounds. Then `smallest` says how small an error could have
    changed the result of a comparison.
    """

    def __init__(self) -> None:
        self.smallest = math.inf

    def __call__(self, value: float, *bounds: float) -> None:
        """Take the distances between a number and these bounds into account, if they are finite."""
        for bound in bounds:
            if math.isfinite(bound):
                self.smallest = min(self.smallest, abs(value - bound))


@dataclass(frozen=True)
class Tokens:
    """The trained tokens as Python numbers, in order.

    old, sampler   log-probs of the old policy and of the sampler, None if not given
    sequences      the tokens of each sequence, as indices into these lists
    """

    logp: list[float]
    entropy: list[float]
    advantage: list[float]
    old: list[float] | None
    sampler: list[float] | None
    sequences: list[list[int]]

    @property
    def old_or_current(self) -> list[float]:
        """The log-probs of the old policy, which is the policy itself if they are not given."""
        return self.logp if self.old is None else self.old


def trusts(
    kind: str, low: float, high: float, logp: float, anchor: float, advantage: float, margin: Margin
) -> bool:
    """Return whether the policy is near the anchor at a token.

    kind        the distance: "tv", "symmetric-tv", "kl" or "ratio"
    low, high   bounds of the distance where the probability has fallen and risen. With "tv" and
                "kl" only moves that the advantage asks for are bounded.
    logp        the log-prob of the policy
    anchor      the log-prob of the old policy or of the sampler. NaN is never near.
    margin      gets the distances to the bounds
    """
    if math.isnan(anchor):
        return False
    p = min(math.exp(logp), 1.0)
    q = math.exp(anchor)
    if kind == "tv":
        margin(p - q, high if advantage > 0 else -low)
        return p - q <= high if advantage > 0 else p - q >= -low
    if kind == "symmetric-tv":
        margin(p - q, -low, high)
        return -low <= p - q <= high
    if kind == "kl":
        divergence = q * (anchor - logp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        margin(divergence, high if advantage > 0 else low)
        return not (
            (advantage > 0 and divergence > high and p > q)
            or (advantage < 0 and divergence > low and p < q)
        )
    assert kind == "ratio"
    margin(p / q, 1 - low, 1 + high)
    return 1 - low < p / q < 1 + high


def filters(spec: Spec, tokens: Tokens, margin: Margin) -> tuple[list[bool], list[bool]]:
    """Apply the filters of a loss: trust region, off-policy sequences and least entropy.

    Returns (which tokens stay in the policy term, which stay in the entropy bonus), a bool for each
    trained token.

    margin   gets the distances to the bounds of the filters
    """
    n = len(tokens.logp)
    keep = [True] * n
    has_high_entropy = [True] * n
    if spec.trust is not None:
        kind, low, high, anchor = spec.trust
        anchors = tokens.old_or_current if anchor == "old" else tokens.sampler
        assert anchors is not None
        for i in range(n):
            logp = tokens.logp[i]
            advantage = tokens.advantage[i]
            keep[i] &= trusts(kind, low, high, logp, anchors[i], advantage, margin)
    if spec.off_policy is not None:
        for sequence in tokens.sequences:
            kept_tokens = _near_sampler(spec, tokens, sequence, margin)
            for i in sequence:
                keep[i] &= i in kept_tokens
    floor = _entropy_floor(spec, tokens)
    if floor is not None:
        for i in range(n):
            if tokens.entropy[i] != floor:
                margin(tokens.entropy[i], floor)
            has_high_entropy[i] = tokens.entropy[i] >= floor
            keep[i] &= has_high_entropy[i]
    return keep, has_high_entropy


def _near_sampler(spec: Spec, tokens: Tokens, sequence: list[int], margin: Margin) -> list[int]:
    """Return the tokens of a sequence that the off-policy mask keeps (DeepSeek-V3.2, 2512.02556).

    It drops tokens with A < 0 if the policy has moved away from the sampler: if the mean of
    log(sampler / p) over the sequence is above `off_policy`. A is the advantage of the token or,
    with off_policy_by="sequence", the sum over the sequence.

    sequence   the tokens of the sequence, as indices into the lists of `tokens`
    margin     gets the distances of the mean, and of a sum A of both signs, to their bounds
    """
    assert spec.off_policy is not None
    sampler = tokens.old_or_current if tokens.sampler is None else tokens.sampler
    log_ratios = [sampler[i] - tokens.logp[i] for i in sequence]
    # Tokens that the sampler did not score are NaN, and count as 0.
    total_log_ratio = math.fsum(0.0 if math.isnan(x) else x for x in log_ratios)
    mean_log_ratio = total_log_ratio / max(len(sequence), 1)
    margin(mean_log_ratio, spec.off_policy)
    advantages = [tokens.advantage[i] for i in sequence]
    total_advantage = math.fsum(advantages)
    if sequence and min(advantages) < 0 < max(advantages):
        margin(total_advantage, 0.0)
    if mean_log_ratio <= spec.off_policy:
        return sequence
    if spec.off_policy_by == "sequence":
        return sequence if total_advantage >= 0 else []
    return [i for i in sequence if tokens.advantage[i] >= 0]


def _entropy_floor(spec: Spec, tokens: Tokens) -> float | None:
    """Return the least entropy of tokens that stay in the policy term; None: no entropy is too low.

    With `entropy_share` it is the quantile above which this share of the trained tokens lies,
    interpolated linearly between two tokens.
    """
    n = len(tokens.entropy)
    if spec.entropy_share is None or n == 0:
        return spec.entropy_floor
    values = sorted(tokens.entropy)
    position = (1 - spec.entropy_share) * (n - 1)
    below = values[math.floor(position)]
    above = values[math.ceil(position)]
    return below + (position - math.floor(position)) * (above - below)


def selection(spec: Spec, tokens: Tokens, margin: Margin) -> list[bool]:
    """Return which tokens Clip-Cov or KL-Cov selects (2505.22617), a bool for each trained token.

    Both look at (A - mean A) * (log p - mean log p), whose mean is the covariance of advantages and
    log-probs. KL-Cov selects the tokens with the largest values. Clip-Cov selects tokens whose
    value is in `spec.band` and whose ratio is not clipped. Of these, the first ones are taken here.
    The package draws them at random, so tests use share=1, which takes all.

    margin   gets the distances to the bounds
    """
    n = len(tokens.logp)
    mean_advantage = math.fsum(tokens.advantage) / max(n, 1)
    mean_logp = math.fsum(tokens.logp) / max(n, 1)
    covariances = [
        (advantage - mean_advantage) * (logp - mean_logp)
        for advantage, logp in zip(tokens.advantage, tokens.logp, strict=True)
    ]
    count = max(math.floor(spec.share * n), 1)
    if spec.surrogate == "kl-cov":
        # The tokens with the largest covariances.
        order = sorted(range(n), key=lambda i: -covariances[i])
        if count < n:
            margin(covariances[order[count - 1]], covariances[order[count]])
        return [i in order[:count] for i in range(n)]
    low, high = ratio_bounds(spec)
    selected: list[bool] = []
    for i in range(n):
        ratio = math.exp(tokens.logp[i] - tokens.old_or_current[i])
        advantage = tokens.advantage[i]
        margin(covariances[i], *spec.band)
        is_clipped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
        qualifies = spec.band[0] < covariances[i] < spec.band[1] and not is_clipped
        selected.append(qualifies and sum(selected) < count)
    return selected


def combine(
    spec: Spec,
    aggregate: str,
    terms: list[Tensor],
    groups: list[int] | None,
    normalizer: float | None,
    zero: Tensor,
    without: list[int],
) -> Tensor:
    """Return the aggregate of the terms of all trained tokens, 0-d.

    aggregate    see `Spec.aggregate`
    terms        a vector for each sequence, with the terms of its trained tokens
    groups       the group of each sequence, for the aggregate "group-mean"
    normalizer   the denominator, for which 0 counts as 1. None: `denominator`, at least 1
    zero         0-d 0 with an autograd graph, the sum of no terms
    without      indices of sequences that do not count. A normalizer is reduced by their share.
    """
    if without:
        counted = [i for i in range(len(terms)) if i not in without]
        counted_terms = [terms[i] for i in counted]
        counted_groups = None if groups is None else [groups[i] for i in counted]
        if normalizer is not None:
            counted_divisor = denominator(spec, aggregate, counted_terms, counted_groups)
            full_divisor = denominator(spec, aggregate, terms, groups)
            normalizer = float(normalizer) or 1.0
            normalizer = normalizer * max(counted_divisor, 1.0) / max(full_divisor, 1.0)
        return combine(spec, aggregate, counted_terms, counted_groups, normalizer, zero, [])

    if normalizer is None:
        divisor = max(denominator(spec, aggregate, terms, groups), 1.0)
    else:
        divisor = float(normalizer) or 1.0
    if aggregate == "group-mean":
        assert groups is not None
        # From here on the terms of each group instead of each sequence.
        terms = [
            torch.cat([x for x, g in zip(terms, groups, strict=True) if g == group])
            for group in sorted(set(groups))
        ]
    total = zero
    for x in terms:
        if x.numel() == 0:
            continue
        if aggregate in ("seq-mean-token-mean", "group-mean"):
            total = total + x.mean()
        else:
            total = total + x.sum()
    return total / divisor


def objective(
    spec: Spec,
    logps: Tensor,
    entropy: Tensor,
    sequences: list[list[int]],
    *,
    advantages: Tensor,
    mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    weights: Tensor | None = None,
    sampler_logps: Tensor | None = None,
    nll_weights: Tensor | None = None,
    groups: Tensor | None = None,
    on_policy: Tensor | None = None,
    selected: Tensor | None = None,
    kl_logps: Tensor | None = None,
    divergences: Tensor | None = None,
    listed: Tensor | None = None,
    normalizer: float | tuple[float | None, float | None, float | None] | None = None,
) -> Result:
    """Compute the loss `spec` of N tokens, sequence by sequence.

    Gradients flow to the log-probs and entropies, and to `kl_logps`, `divergences` and `listed`.
    Advantages, weights and nll_weights are a number, one number per sequence, or one per token. The
    other tensors have N elements in any shape.

    logps, entropy   [N], of the policy, in the dtype in which everything is computed

    sequences        the row indices of each sequence
    mask             trained tokens; None: all
    old_logps        of the old policy; None: on-policy
    ref_logps        of the reference model; None: there is no KL estimate
    sampler_logps    of the sampler, NaN for tokens that it did not score
    weights          factors of the policy term
    nll_weights      factors of -log p, which are added to the loss without a denominator
    groups           the group of each sequence, for the aggregate "group-mean"
    on_policy        tokens or sequences whose old log-probs are the current ones
    selected         bool [N], the tokens that Clip-Cov or KL-Cov takes; None: see `selection`
    kl_logps         [N], the log-probs in the KL estimate; None: logps
    divergences      [N], exact divergences in place of a KL estimate
    listed           [N], terms that are added to the policy term, except where the weight is 0. A
                     trust region does not drop them
    normalizer       of the policy term, or of (policy term, KL, entropy bonus). None: for a KL or
                     bonus without its own aggregate the normalizer of the policy term, otherwise
                     see `combine`
    """
    dtype = logps.dtype
    num_rows = logps.numel()
    trained = torch.ones(num_rows, dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
    is_trained = trained.tolist()
    # The trained rows of each sequence, and of all sequences.
    trained_rows = [[i for i in rows if is_trained[i]] for rows in sequences]
    all_trained_rows = [i for rows in trained_rows for i in rows]

    def flat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().reshape(-1).to(dtype)

    def per_row(x: Tensor | float) -> Tensor:
        return to_rows(x, sequences, dtype)

    old = flat(old_logps)
    if old is not None and on_policy is not None:
        old = torch.where(per_row(on_policy) != 0, logps.detach(), old)
    batch = _Batch(
        logps=logps,
        entropy=entropy,
        advantage=per_row(advantages),
        weight=per_row(1.0 if weights is None else weights),
        old=logps.detach() if old is None else old,
        ref=flat(ref_logps),
        kl_logps=logps if kl_logps is None else kl_logps,
        selected=selected,
        divergences=divergences,
        listed=listed,
    )
    nll_weight = per_row(0.0 if nll_weights is None else nll_weights)
    tokens = _as_numbers(batch, old, flat(sampler_logps), trained_rows)
    margin = Margin()
    keep = _kept_rows(spec, tokens, all_trained_rows, num_rows, margin)
    if selected is None and spec.surrogate in ("clip-cov", "kl-cov"):
        is_selected = torch.zeros(num_rows, dtype=torch.bool)
        is_selected[all_trained_rows] = torch.tensor(
            selection(spec, tokens, margin), dtype=torch.bool
        )
        batch = replace(batch, selected=is_selected)
    # Sequences that are too far from the sampler have a loss of 0.
    far = far_sequences(spec, tokens, margin)
    for b in far:
        keep.policy[trained_rows[b]] = False

    has_kl = divergences is not None or batch.ref is not None
    kl = torch.zeros(num_rows, dtype=dtype)
    log_ratio = torch.zeros(num_rows, dtype=dtype)
    terms = _Terms([], [], [])
    nll_total = logps[:0].sum()  # 0 with a graph
    for b, rows in enumerate(trained_rows):
        token_log_ratio = logps[rows] - batch.old[rows]
        x = _log_ratio_of_level(spec, batch, rows, token_log_ratio, margin)
        log_ratio[rows] = x.detach()
        terms.policy.append(_policy_terms(spec, batch, rows, token_log_ratio, x, keep, margin))
        if has_kl:
            # The ratio of a whole sequence would be far larger than the KL of a token, so the KL
            # has the token's own ratio.
            kl_log_ratio = token_log_ratio if spec.level == "sequence-sum" else x
            terms.kl.append(_kl_terms(spec, batch, rows, kl_log_ratio, margin))
            kl[rows] = terms.kl[b].detach()
        terms.entropy.append(entropy[rows])
        if b not in far:
            nll_total = nll_total - (nll_weight[rows] * logps[rows]).sum()
    for b in far:
        for terms_of_part in terms:
            if terms_of_part:
                terms_of_part[b] = 0.0 * terms_of_part[b].detach()
    is_left_out = spec.sampler_mismatch is not None and spec.sampler_mismatch[1]
    loss = nll_total + _loss_of_terms(
        spec,
        terms,
        has_entropy_bonus=[keep.entropy[rows] for rows in trained_rows],
        groups=None if groups is None else groups.tolist(),
        normalizer=normalizer,
        zero=logps[:0].sum(),
        without=far if is_left_out else [],
    )

    low, high = ratio_bounds(spec)
    ratio = log_ratio[trained].exp()
    advantage = batch.advantage[trained]
    return Result(
        loss=loss,
        logps=torch.where(trained, logps.detach(), 0.0),
        entropy=torch.where(trained, entropy.detach(), 0.0),
        kl=kl,
        log_ratio=log_ratio[trained],
        clipped_low=(ratio < low) & (advantage < 0),
        clipped_high=(ratio > high) & (advantage > 0),
        kept=keep.policy[trained],
        margin=margin.smallest,
    )


@dataclass(frozen=True)
class _Batch:
    """The arguments of `objective`, flat [N]. None: not given."""

    logps: Tensor
    entropy: Tensor
    advantage: Tensor
    weight: Tensor
    old: Tensor
    ref: Tensor | None
    kl_logps: Tensor
    selected: Tensor | None
    divergences: Tensor | None
    listed: Tensor | None


class _Keep(NamedTuple):
    """The rows that count in a part of the loss, bool [N] each."""

    policy: Tensor  # in the policy term
    entropy: Tensor  # in the entropy bonus
    listed: Tensor  # in the listed terms, which a trust region does not drop


class _Terms(NamedTuple):
    """The terms of the trained tokens of each sequence, in the parts of the loss."""

    policy: list[Tensor]
    kl: list[Tensor]  # empty without a reference
    entropy: list[Tensor]


def _loss_of_terms(
    spec: Spec,
    terms: _Terms,
    *,
    has_entropy_bonus: list[Tensor],
    groups: list[int] | None,
    normalizer: float | tuple[float | None, float | None, float | None] | None,
    zero: Tensor,
    without: list[int],
) -> Tensor:
    """Return policy term + beta * KL - entropy_coef * entropy, 0-d.

    Each of the three is aggregated over all trained tokens, with its own aggregate and denominator.

    terms               the terms of the three parts
    has_entropy_bonus   for each sequence a bool vector, whether a trained token counts in the bonus
    normalizer          see `objective`
    groups              see `combine`
    zero                see `combine`
    without             see `combine`
    """

    def aggregated(aggregate: str, terms: list[Tensor], denominator: float | None) -> Tensor:
        """Return `combine` of one of the three parts."""
        return combine(spec, aggregate, terms, groups, denominator, zero, without)

    if isinstance(normalizer, tuple):
        policy_denominator, kl_denominator, entropy_denominator = normalizer
    else:
        policy_denominator = normalizer
        kl_denominator = None
        entropy_denominator = None
    loss = aggregated(spec.aggregate, terms.policy, policy_denominator)
    if spec.beta != 0:
        if kl_denominator is None and not spec.kl_aggregate:
            kl_denominator = policy_denominator
        kl_aggregate = spec.kl_aggregate or spec.aggregate
        loss = loss + spec.beta * aggregated(kl_aggregate, terms.kl, kl_denominator)
    if spec.entropy_coef != 0:
        pairs = list(zip(terms.entropy, has_entropy_bonus, strict=True))
        if spec.entropy_share is not None and spec.entropy_aggregate == "token-mean":
            # The mean over the tokens that count.
            entropy_terms = [x[counts] for x, counts in pairs]
            if entropy_denominator is not None:
                # It includes all tokens, so it is reduced to the share of those that count.
                num_tokens = sum(x.numel() for x in terms.entropy)
                num_counted = sum(x.numel() for x in entropy_terms)
                entropy_denominator *= num_counted / max(num_tokens, 1)
        else:
            entropy_terms = [torch.where(counts, x, 0.0) for x, counts in pairs]
        if entropy_denominator is None and not spec.entropy_aggregate:
            entropy_denominator = policy_denominator
        entropy_aggregate = spec.entropy_aggregate or spec.aggregate
        bonus = aggregated(entropy_aggregate, entropy_terms, entropy_denominator)
        loss = loss - spec.entropy_coef * bonus
    return loss


def _as_numbers(
    batch: _Batch, old: Tensor | None, sampler: Tensor | None, trained_rows: list[list[int]]
) -> Tokens:
    """Return the trained tokens as Python numbers, sequence after sequence.

    old, sampler   [N], log-probs of the old policy and of the sampler; None: not given
    trained_rows   for each sequence the indices of its trained rows, 0 to N - 1
    """
    all_rows = [i for rows in trained_rows for i in rows]

    def numbers(x: Tensor) -> list[float]:
        """Return the numbers of the trained rows of x [N]."""
        return x.detach()[all_rows].tolist()

    place_of_row = {row: place for place, row in enumerate(all_rows)}
    return Tokens(
        logp=numbers(batch.logps),
        entropy=numbers(batch.entropy),
        advantage=numbers(batch.advantage),
        old=None if old is None else numbers(old),
        sampler=None if sampler is None else numbers(sampler),
        sequences=[[place_of_row[row] for row in rows] for rows in trained_rows],
    )


def _kept_rows(
    spec: Spec, tokens: Tokens, trained_rows: list[int], num_rows: int, margin: Margin
) -> _Keep:
    """Return which of the N rows the filters keep in each part of the loss.

    Rows that are not trained are False in all parts.

    tokens         the trained tokens
    trained_rows   the row of each of them, 0 to N - 1
    num_rows       N
    margin         gets the distances to the bounds of the filters
    """
    policy, entropy = filters(spec, tokens, margin)
    listed, _ = filters(replace(spec, trust=None), tokens, margin)

    def row_mask(kept: list[bool]) -> Tensor:
        """Return bool [N] from a bool for each trained token."""
        is_kept = torch.zeros(num_rows, dtype=torch.bool)
        is_kept[trained_rows] = torch.tensor(kept, dtype=torch.bool)
        return is_kept

    return _Keep(row_mask(policy), row_mask(entropy), row_mask(listed))


def _log_ratio_of_level(
    spec: Spec, batch: _Batch, rows: list[int], token_log_ratio: Tensor, margin: Margin
) -> Tensor:
    """Return the log-ratio that the surrogate gets for each of n trained tokens of a sequence, [n].

    At the level "token" it is the token's own. At the other levels it is the sum or mean over the
    sequence. "sequence-token" has the value of this mean and the gradient of the token.

    rows              the trained rows of the sequence
    token_log_ratio   [n], log(p / old) of each of them
    margin            gets the distances of log-ratios to the bounds of the surrogate
    """
    x = in_sequence(spec, token_log_ratio, batch.advantage[rows], batch.weight[rows], margin)
    if spec.level == "sequence-sum":
        return x.sum().expand(len(rows))
    if spec.level == "sequence" and rows:
        return x.mean().expand(len(rows))
    if spec.level == "sequence-token" and rows:
        # The value is the mean of the sequence, the gradient is the token's own.
        logp = batch.logps[rows]
        return x.mean().detach() + logp - logp.detach()
    return x


def _policy_terms(
    spec: Spec,
    batch: _Batch,
    rows: list[int],
    token_log_ratio: Tensor,
    log_ratio: Tensor,
    keep: _Keep,
    margin: Margin,
) -> Tensor:
    """Return the policy term of each of n trained tokens of a sequence, [n], with the listed terms.

    Tokens that a filter or a weight of 0 drops have 0.

    rows              the trained rows of the sequence
    token_log_ratio   [n], log(p / old) of each of them
    log_ratio         [n], see `_log_ratio_of_level`
    keep              which rows the filters keep
    margin            gets the distances of ratios and log-ratios to the bounds of the surrogate
    """
    advantage = batch.advantage[rows]
    weight = batch.weight[rows]
    selected = None if batch.selected is None else batch.selected[rows]
    for x, a in zip(log_ratio.tolist(), advantage.tolist(), strict=True):
        margin(x, *(spec.bounds or ()))
        if a != 0 and x != 0:  # on-policy x is 0 in every precision
            margin(math.exp(min(x, 700.0)), *ratio_bounds(spec), spec.delta or math.inf)
    if spec.surrogate == "kl-cov" and selected is not None:
        for x in log_ratio[selected & (log_ratio != 0)].tolist():
            margin(x, 0.0)

    low, high = spec.bounds or (-math.inf, math.inf)
    terms = surrogate(spec, log_ratio.clamp(low, high), batch.logps[rows], advantage, selected)
    if spec.future_kl is not None:
        weight = weight * future_weights(spec, token_log_ratio.detach(), advantage, rows, margin)
    # The weights of vespo are part of its ratio, see `in_sequence`. A weight of 0 drops a token.
    factor = torch.ones_like(weight) if spec.surrogate == "vespo" else weight
    has_weight = weight != 0
    policy = torch.where(keep.policy[rows] & has_weight, factor * terms, 0.0)
    if batch.listed is None:
        return policy
    listed = factor * batch.listed[rows]
    return policy + torch.where(keep.listed[rows] & has_weight, listed, 0.0)


def _kl_terms(
    spec: Spec, batch: _Batch, rows: list[int], log_ratio: Tensor, margin: Margin
) -> Tensor:
    """Return the KL term of each of n trained tokens of a sequence, [n], without beta.

    It is the exact divergence if there is one, otherwise a KL estimate from the log-probs.

    rows        the trained rows of the sequence
    log_ratio   [n], the log-ratio of each of them, for the weight of an estimate
    margin      gets the distances to the bounds of an estimate
    """
    if batch.divergences is not None:
        return batch.divergences[rows]
    assert batch.ref is not None
    logp = batch.logps[rows]
    ref = batch.ref[rows]
    estimates = kl_estimate("k3", logp, ref)
    for difference, estimate in zip((ref - logp).tolist(), estimates.tolist(), strict=True):
        margin(difference, -spec.clamp_log, spec.clamp_log)
        if spec.kl == "abs":  # which has no derivative at 0
            margin(difference, 0.0)
        margin(estimate, spec.clamp)
    return kl_term(spec, batch.kl_logps[rows], batch.old[rows], ref, log_ratio)


def future_weights(
    spec: Spec, log_ratio: Tensor, advantage: Tensor, places: list[int], margin: Margin
) -> Tensor:
    """Return FIPO's weight (2603.19835) of each of n trained tokens of a sequence, [n].

    It is exp of the sum of the log-ratios of the token and of all later ones, clamped to bounds. A
    log-ratio counts half after each half-life, a number of positions. See `Spec.future_kl`.

    log_ratio   [n], log(p / old) of each token
    advantage   [n]
    places      the positions of the n tokens in the sequence
    margin      gets the distances of log-ratios to the cutoffs
    """
    assert spec.future_kl is not None
    half_life, low, high, cutoff, safety = spec.future_kl
    log_cutoff = math.log(cutoff)
    log_safety = math.log(safety)
    log_ratios = log_ratio.tolist()
    weights = []
    for i, place in enumerate(places):
        total = 0.0
        for j in range(i, len(places)):
            margin(log_ratios[j], log_cutoff)
            if not log_ratios[j] > log_cutoff:  # a NaN counts
                total += 0.5 ** ((places[j] - place) / half_life) * log_ratios[j]
        if math.isnan(total):
            weight = total
        else:
            weight = min(max(math.exp(min(total, 700.0)), low), high)
        if float(advantage[i]) < 0:
            margin(log_ratios[i], log_safety)
            if log_ratios[i] > log_safety:
                weight = min(max(weight, 0.8), 1.0)
        weights.append(weight)
    return torch.tensor(weights, dtype=log_ratio.dtype)


def denominator(spec: Spec, aggregate: str, terms: list[Tensor], groups: list[int] | None) -> float:
    """Return the number that the terms of one batch are divided by.

    It is 1, or the number of tokens, sequences or groups, by `aggregate`. For "constant" it is the
    number of sequences times `max_tokens`. It may be 0 for an empty batch.

    terms    a vector for each sequence, with the terms of its trained tokens
    groups   the group of each sequence, for the aggregate "group-mean"
    """
    if aggregate == "token-sum":
        return 1.0
    if aggregate == "token-mean":
        return float(sum(x.numel() for x in terms))
    if aggregate == "group-mean":
        assert groups is not None
        counted_groups = set()
        for x, group in zip(terms, groups, strict=True):
            if spec.count_empty or x.numel() > 0:
                counted_groups.add(group)
        return float(len(counted_groups))
    num_sequences = len(terms) if spec.count_empty else sum(x.numel() > 0 for x in terms)
    count = float(num_sequences)
    if aggregate == "constant":
        assert spec.max_tokens is not None
        count *= spec.max_tokens
    return count


def far_sequences(spec: Spec, tokens: Tokens, margin: Margin) -> list[int]:
    """Return the indices of the sequences that are too far from the sampler.

    These are sequences whose mean of exp |log sampler - log p| exceeds the threshold of
    `spec.sampler_mismatch`. Tokens that the sampler did not score count as 1.

    margin   gets the distances of the means to the threshold
    """
    if spec.sampler_mismatch is None:
        return []
    assert tokens.sampler is not None
    threshold, _ = spec.sampler_mismatch
    far = []
    for b, places in enumerate(tokens.sequences):
        differences = [tokens.sampler[i] - tokens.logp[i] for i in places]
        errors = [1.0 if math.isnan(x) else math.exp(min(abs(x), 60.0)) for x in differences]
        mean_error = math.fsum(errors) / max(len(errors), 1)
        margin(mean_error, threshold)
        if mean_error > threshold:
            far.append(b)
    return far


def in_sequence(spec: Spec, x: Tensor, advantage: Tensor, weight: Tensor, margin: Margin) -> Tensor:
    """Return the log-ratios [n] of which the mean or sum over a sequence is taken.

    They are the given ones, except for GMPO, which clips them, and VESPO, which adds the logarithms
    of the importance weights.

    x           [n], log(p / old) of each trained token of the sequence
    advantage   [n]
    weight      [n], importance weights
    margin      gets the distances of log-ratios to GMPO's clip range
    """
    if spec.surrogate == "gmpo":
        # Each token's log-ratio is clipped on the side where the token would gain.
        for value, a in zip(x.tolist(), advantage.tolist(), strict=True):
            if a > 0:
                margin(value, spec.eps_high)
            elif a < 0:
                margin(value, -spec.eps_low)
        sign = advantage.sign()
        return sign * torch.minimum(sign * x, sign * x.clamp(-spec.eps_low, spec.eps_high))
    if spec.surrogate == "vespo":
        # Importance weights are factors of the sequence's ratio. A weight of 0 drops the token from
        # the policy term, but not from the ratio, where it counts as 1.
        logs = torch.where(weight == 0, 1.0, weight).log().clamp(math.log(1e-8), 20.0)
        return x.clamp(-20.0, 20.0) + logs
    return x


def divergence(logps: Tensor, teacher_logps: Tensor, kind: str, mixture: float = 0.0) -> Tensor:
    """Return the divergence of each row [n], by its definition.

    logps, teacher_logps   log-probs [n, V] of policy p and teacher q
    kind                   "reverse": KL(p, q). "forward": KL(q, p). "tv": total variation. "jsd":
                           to the mixture (1 - mixture) p + mixture q (TRL's beta; GKD, 2306.13649)

    In KL(a, b), ids with a probability of 0 under a add nothing.
    """

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        """Return KL(a, b) of each row, [n], from the log-probs log_a and log_b [n, V]."""
        # Filled before the subtraction, because the gradient of -inf - (-inf) is NaN.
        is_absent = log_a == -math.inf
        log_a = log_a.masked_fill(is_absent, 0.0)
        log_b = log_b.masked_fill(is_absent, 0.0)
        return (log_a.exp() * (log_a - log_b)).masked_fill(is_absent, 0.0).sum(-1)

    if kind == "reverse":
        return kl(logps, teacher_logps)
    if kind == "forward":
        return kl(teacher_logps, logps)
    if kind == "tv":
        difference = logps.exp() - teacher_logps.exp()
        # torch.sign of NaN is not NaN on every device.
        sign = torch.where(difference.isnan(), difference, difference.sign())
        return (sign.detach() * difference).sum(-1) / 2.0
    is_absent = (logps == -math.inf) & (teacher_logps == -math.inf)
    log_mixture = torch.logaddexp(
        logps.masked_fill(is_absent, 0.0) + math.log1p(-mixture),
        teacher_logps.masked_fill(is_absent, 0.0) + math.log(mixture),
    )
    log_mixture = log_mixture.masked_fill(is_absent, -math.inf)
    return mixture * kl(teacher_logps, log_mixture) + (1.0 - mixture) * kl(logps, log_mixture)


# ---- the answer to a problem (see call_cases.py), and how far fp32 may be from it

#: The distance from 1 to the next fp32 number, twice the largest relative rounding error.
EPS = 2.0**-23
#: Half a unit in the last place of the dtypes that gradients are stored in, relative and absolute.
ROUNDING = {
    torch.float32: (2.0**-24, 1.2e-38),
    torch.bfloat16: (2.0**-9, 1.2e-38),
    torch.float16: (2.0**-12, 2.0**-25),
}


def project(leaves: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the logits [rows, V] in `dtype`.

    leaves   "logits" [..., V], or "hidden" [..., H], "weight" [V, H] and optionally "bias" [V]
    dtype    of the matmul and of the result
    """
    if "logits" in leaves:
        return leaves["logits"].reshape(-1, leaves["logits"].shape[-1]).to(dtype)
    hidden = leaves["hidden"].to(dtype)
    weight = leaves["weight"].to(dtype)
    bias = leaves["bias"].to(dtype) if "bias" in leaves else None
    return torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), weight, bias)


class Rows:
    """The softmax of each of N rows of logits over the ids of its candidate set, with gradients.

    log_p         [N, V], log-probs, -inf outside of the candidate set
    p             [N, V], probabilities
    chosen        [N], the log-probs of the targets
    entropy       [N]
    sum_squares   [N], the sum of the squared probabilities
    keep          bool [N, V], the ids with a log-prob above -inf
    """

    def __init__(
        self,
        x: Tensor,
        ids: Tensor,
        transform: dict[str, Any],
        sequences: list[list[int]],
        *,
        keep: Tensor | None = None,
        noise: int | None = None,
    ) -> None:
        """Transform the logits, and compute the softmaxes.

        x           logits [N, V], before the transform
        ids         int64 [N], the targets
        transform   temperature (as `to_rows` takes it), softcap (or None) and scale
        sequences   the rows of each sequence, for a temperature per sequence
        keep        bool [N, V], the candidate set of each row; None: all ids
        noise       a seed for random errors of the size of fp32 rounding, which are added to logits
                    and log-probs; None: no errors
        """
        softcap = transform["softcap"]
        z = x * transform["scale"]
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        z = z / to_rows(transform["temperature"], sequences, x.dtype)[:, None]
        if keep is not None:
            z = z.masked_fill(~keep, -math.inf)
        if noise is None:
            self.log_p = torch.log_softmax(z, -1)
        else:
            # Errors of each logit, and of the log-sum-exp of the row.
            size = torch.where(z.isfinite(), z.detach().abs(), 0.0)
            logit_error = EPS * (1 + size) * signs(z, noise)
            row_size = 2 + 2 * size.amax(1, keepdim=True) + math.log(x.shape[1])
            row_error = EPS * row_size * signs(row_size, noise)
            self.log_p = torch.log_softmax(z + logit_error, -1) + row_error
        self.keep = self.log_p.detach() > -math.inf
        self.chosen = self.log_p.gather(1, ids[:, None])[:, 0]
        finite = torch.where(self.keep, self.log_p, 0.0)
        self.p = torch.where(self.keep, finite.exp(), 0.0)
        self.entropy = -(self.p * finite).sum(1)
        self.sum_squares = self.p.square().sum(1)


def signs(like: Tensor, noise: int) -> Tensor:
    """Return random signs of errors, -1 or 1, in the shape and dtype of a tensor.

    Seeds 2k and 2k + 1 differ in the sign of every second column. So two neighbours have different
    signs with one of these seeds.

    noise   the seed
    """
    g = torch.Generator().manual_seed(noise // 2)
    random = torch.where(torch.rand(like.shape, generator=g) < 0.5, -1.0, 1.0).to(like.dtype)
    alternating = 1 - 2 * (torch.arange(like.shape[-1]) % 2)  # 1, -1, 1, -1, ...
    return random * alternating ** (noise % 2)


def listed_divergence(
    log_p: Tensor, log_q: Tensor, ids: list[list[int]], kind: str, mixture: float, tail: str
) -> Tensor:
    """Return the divergence of each row [N] from a teacher that is known at some ids.

    log_p, log_q    log-probs of policy and teacher [N, V]
    ids             the ids of each row at which the teacher is known. Without ids the divergence is
                    0.
    kind, mixture   see `divergence`
    tail            how the other ids count. "bin": as one more id, which has their probability.
                    "ignore": not at all. "renormalise": the probabilities of the listed ids are
                    divided by their sum. "generalised": not at all, but a KL gets the difference of
                    the sums of both distributions, which makes it non-negative.
    """
    values = []
    for p_row, q_row, listed in zip(log_p, log_q, ids, strict=True):
        log_p_listed = p_row[listed]
        log_q_listed = q_row[listed]
        if tail == "bin":
            log_p_listed = _with_tail_bin(log_p_listed)
            log_q_listed = _with_tail_bin(log_q_listed)
        elif tail == "renormalise":
            log_p_listed = log_p_listed.log_softmax(0)
            log_q_listed = log_q_listed.log_softmax(0)
        value = divergence(log_p_listed[None], log_q_listed[None], kind, mixture)[0]
        # The generalised KL of two measures. For the other kinds the masses cancel.
        if tail != "ignore" and kind in ("reverse", "forward"):
            sign = {"reverse": 1, "forward": -1}[kind]
            value = value + sign * (log_q_listed.exp().sum() - log_p_listed.exp().sum())
        values.append(value)
    return torch.stack(values) if values else log_p.sum(1)


def _with_tail_bin(log_p: Tensor) -> Tensor:
    """Return log-probs [k + 1]: those of k ids, and one for the probability of all other ids.

    This probability is at least 1e-7, so that its logarithm is finite.
    """
    rest = 1 - log_p.exp().sum()
    return torch.cat([log_p, rest.clamp(min=1e-7).log()[None]])


@dataclass
class Answer:
    """The results of a call.

    values      log-probs, statistics and losses by name, 0 in rows that are not trained
    gradients   of the tensors of the call, by name
    clear       whether no number is so near a bound that rounding may move it across
    of_logits   the gradient of the logits [rows, V]; None in results of the package
    sizes       the sum of the absolute terms of that gradient [rows, V]; None in such results
    """

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    clear: bool = True
    of_logits: Tensor | None = None
    sizes: Tensor | None = None


def answer(p: Problem, noise: int | None = None) -> Answer:
    """Compute the results of a call in float64: values, and gradients by autograd.

    noise   a seed for random errors of the size of fp32 rounding in logits, log-probs and
            advantages; None: no errors
    """
    case = p.case
    num_tokens = len(p.ids)
    trained_rows = p.trained.nonzero()[:, 0]
    leaves = {name: x.detach().double().requires_grad_() for name, x in p.clean.items()}
    logits = project(leaves, torch.float64)
    if noise is not None and case.source == "hidden":
        sizes = project({name: leaf.detach().abs() for name, leaf in leaves.items()}, torch.float64)
        logits = logits + 8 * EPS * sizes * signs(sizes, noise + 100)
    token_logits = logits if p.rows is None else logits[p.rows]
    temperature = to_rows(p.transform["temperature"], p.sequences, torch.float64)

    def rows(
        x: Tensor, transform: dict[str, Any], keep: Tensor | None, noise_offset: int = 0
    ) -> Rows:
        """Return the softmaxes of the n trained rows of logits x [N, V].

        transform, keep   of all N rows, see `Rows`
        noise_offset      added to the seed, so that other logits get other errors
        """
        temperatures = to_rows(transform["temperature"], p.sequences, torch.float64)
        return Rows(
            x[trained_rows],
            p.ids[trained_rows],
            {**transform, "temperature": temperatures[trained_rows]},
            [[i] for i in range(len(trained_rows))],
            keep=None if keep is None else keep[trained_rows],
            noise=None if noise is None else noise + noise_offset,
        )

    def to_all_rows(value: Tensor) -> Tensor:
        """Return [N] from a value of each trained row [n], with 0 in other rows."""
        return torch.zeros(num_tokens, dtype=torch.float64).index_put((trained_rows,), value)

    sets = rows(token_logits, p.transform, p.keep)
    whole = sets if p.keep is None else rows(token_logits, p.transform, None)
    values = {"logps": to_all_rows(sets.chosen), "entropy": to_all_rows(sets.entropy)}
    divergences = None
    if p.other is not None:
        values["divergence"] = to_all_rows(_divergence(p, p.other, sets, rows, trained_rows))
        divergences = values["divergence"] * (temperature**2 if case.squared else 1.0)
        if case.function == "divergence":
            values["divergence"] = divergences
    total, clear = _scalar_to_differentiate(
        p, values, divergences, sets, whole, trained_rows, noise
    )

    # The gradients of the leaves. `_sizes` also needs those of log-probs and divergences.
    wanted = {name: leaf for name, leaf in leaves.items() if name != case.frozen}
    softmaxes = list(dict.fromkeys((sets, whole)))
    inner = [softmax.log_p for softmax in softmaxes]
    if p.other is not None:
        inner.append(values["divergence"])
    grad_logits, *grads = torch.autograd.grad(
        total * case.upstream,
        [logits, *wanted.values(), *inner],
        materialize_grads=True,
        allow_unused=True,
    )
    gradients = dict(zip(wanted, grads, strict=False))
    grad_log_p = [x.abs() for x in grads[len(wanted) : len(wanted) + len(softmaxes)]]
    grad_divergence = grads[-1].abs() if p.other is not None else None
    sizes = _sizes(p, token_logits.detach(), trained_rows, softmaxes, grad_log_p, grad_divergence)
    return Answer(
        values={name: value.detach() for name, value in values.items()},
        gradients=gradients,
        clear=clear,
        of_logits=grad_logits,
        sizes=sizes,
    )


def _sizes(
    p: Problem,
    token_logits: Tensor,
    trained_rows: Tensor,
    softmaxes: list[Rows],
    grad_log_p: list[Tensor],
    grad_divergence: Tensor | None,
) -> Tensor:
    """Return the sum of the absolute terms of the gradient of the logits, float64 [rows, V].

    token_logits      [N, V]
    trained_rows      int64 [n], the indices of the trained rows
    softmaxes         over candidate sets, and over the vocabulary if these are others
    grad_log_p        of each softmax: the absolute gradients of its log-probs [n, V]
    grad_divergence   the absolute gradients of the divergences [N], or None
    """
    case = p.case
    num_tokens, vocab = token_logits.shape
    p_sets = softmaxes[0].p.detach()
    temperature = to_rows(p.transform["temperature"], p.sequences, torch.float64)
    factor = abs(p.transform["scale"]) / temperature[trained_rows, None]
    sizes = torch.zeros(num_tokens, vocab, dtype=torch.float64)
    pair_sizes = torch.zeros(num_tokens, dtype=torch.float64)
    for softmax, grad in zip(softmaxes, grad_log_p, strict=True):
        grad_sum = grad.sum(1, keepdim=True)
        sizes[trained_rows] += (grad + softmax.p.detach() * grad_sum) * factor
        pair_sizes[trained_rows] += grad_sum[:, 0] * factor[:, 0]
    if grad_divergence is not None:
        # The log-ratios of two near rows cancel.
        sizes[trained_rows] += p_sets * grad_divergence[trained_rows, None] * factor
    has_extra_ids = any(x is not None for x in (p.at, p.terms, p.rows))
    if case.source == "hidden" and (case.other == "listed" or has_extra_ids):
        # Logits at extra ids are computed again, with another rounding.
        grad_sum = grad_log_p[0].sum(1, keepdim=True)
        if grad_divergence is not None and case.other == "listed" and case.exact == "tv":
            # The gradient of a total variation is 0 where p = q, and jumps next to it.
            grad_sum = grad_sum + grad_divergence[trained_rows, None]
        largest_logit = token_logits[trained_rows].abs().amax(1, keepdim=True)
        sizes[trained_rows] += p_sets * grad_sum * factor**2 * largest_logit
    if case.extreme == "absent" and case.function == "logprobs":
        # A sum of nearly 1 is rounded, and this error is most of so small an entropy.
        sizes[trained_rows] += (
            p_sets * p.upstream["entropy"].reshape(-1)[trained_rows, None].abs() * factor
        )
    named = named_ids(p, vocab)
    if case.also in ("log_kept_mass", "all"):
        # It is the difference of two log-probs of the likeliest id of the set.
        likeliest = p_sets.argmax(1)
        upstream = p.upstream["log_kept_mass"].reshape(-1)[trained_rows].abs()
        sizes[trained_rows, likeliest] += upstream * factor[:, 0]
        named[trained_rows, softmaxes[0].log_p.detach().argmax(1)] = 1.0
    if p.rows is not None:
        num_rows = p.leading.numel()
        zeros = torch.zeros(num_rows, vocab, dtype=torch.float64)
        sizes = zeros.index_add(0, p.rows, sizes)
        named = zeros.index_add(0, p.rows, named)
        pair_sizes = torch.zeros(num_rows, dtype=torch.float64).index_add(0, p.rows, pair_sizes)
    if case.is_composed:
        # The likeliest id of a row gets the gradients of all its ids twice, with both signs.
        sizes = sizes + (named > 0) * pair_sizes[:, None]
    return sizes


def named_ids(p: Problem, vocab: int) -> Tensor:
    """Return float64 [N, V]: 1 at the target of each token and at its extra ids, 0 elsewhere.

    Extra ids are those of `Problem.at`, of `Problem.terms` and of a teacher that is known at some
    ids.
    """
    named = torch.zeros(len(p.ids), vocab, dtype=torch.float64)
    named[torch.arange(len(p.ids)), p.ids] = 1.0
    lists = [
        p.at,
        None if p.terms is None else p.terms[0],
        None if p.other is None else p.other.ids,
    ]
    for ids_of_tokens in lists:
        for token, ids in enumerate(ids_of_tokens or []):
            named[token, ids] = 1.0
    return named


def _divergence(
    p: Problem,
    other: SecondDistribution,
    ours: Rows,
    rows: Callable[..., Rows],
    trained_rows: Tensor,
) -> Tensor:
    """Return the divergence of policy and reference in each of n trained rows, [n].

    Both are renormalised over the candidate set of the row.

    other          the reference or teacher
    ours           the softmaxes of the policy in the trained rows
    rows           makes the softmaxes of the trained rows from (logits [N, V], transform, keep, an
                   offset of the seed), see `answer`
    trained_rows   int64 [n], the indices of the trained rows
    """
    case = p.case
    kind, _, share = case.exact.partition(" ")
    mixture = float(share or 0.5) if kind == "jsd" else 0.0
    theirs = rows(other.rows, other.transform, p.keep, 200).log_p.detach()
    if other.ids is None:
        return divergence(ours.log_p, theirs, kind, mixture)
    listed = [other.ids[i] for i in trained_rows.tolist()]
    # The caller has the teacher's log-probs in fp32.
    theirs = theirs.float().double()
    return listed_divergence(ours.log_p, theirs, listed, kind, mixture, case.tail)


def _scalar_to_differentiate(
    p: Problem,
    values: dict[str, Tensor],
    divergences: Tensor | None,
    sets: Rows,
    whole: Rows,
    trained_rows: Tensor,
    noise: int | None,
) -> tuple[Tensor, bool]:
    """Return (scalar, clear): the scalar whose gradient is compared, and whether it can be.

    The scalar is the loss or, for other functions, the sum of all results times their upstream
    gradients. Adds the loss, or the further statistics of the call, to `values`.

    A loss is not clear if a number is so near a bound that it is compared with, such as a ratio
    near a clip bound, that rounding may move it across. Its gradient would then be another one.

    values         results by name, [N] each, with "logps" and "entropy"
    divergences    [N], those of the loss, or None
    sets, whole    softmaxes of the trained rows over candidate sets and over the vocabulary
    trained_rows   int64 [n], the indices of the trained rows
    noise          a seed for errors of the advantages, see `answer`; None: no errors
    """
    function = p.case.function
    if function == "divergence":
        return (values["divergence"] * p.upstream["divergence"].reshape(-1)).sum(), True
    if function == "loss":
        # `p.sequences` says already which tokens form a sequence.
        inputs = {name: x for name, x in p.seen.items() if name != "cu_seqlens"}
        if noise is not None:
            # The terms of a gradient may cancel, so errors of the advantages count too.
            error = 2 * EPS * signs(inputs["advantages"], noise)
            inputs["advantages"] = inputs["advantages"] * (1 + error)
        result = objective(
            p.spec,
            values["logps"],
            values["entropy"],
            p.sequences,
            normalizer=p.case.normalizer,
            divergences=divergences,
            listed=_listed_terms(p, sets, trained_rows),
            **inputs,
        )
        values["loss"] = result.loss
        clear = result.margin > 1e-3  # far above the rounding of fp32
        return result.loss, clear
    return _total_of_statistics(p, values, sets, whole, trained_rows), True


def _total_of_statistics(
    p: Problem, values: dict[str, Tensor], sets: Rows, whole: Rows, trained_rows: Tensor
) -> Tensor:
    """Return the sum of log-probs and statistics times their upstream gradients, 0-d.

    Adds the statistics that the call asks for to `values`. The arguments are those of
    `_scalar_to_differentiate`.
    """
    also = p.case.also
    upstream = {name: x.reshape(-1) for name, x in p.upstream.items()}

    def to_all_rows(x: Tensor) -> Tensor:
        """Return [N] from a value of each trained row [n], with 0 in other rows."""
        return torch.zeros_like(values["logps"]).index_put((trained_rows,), x)

    total = (values["logps"] * upstream["logps"]).sum()
    if also not in ("nothing", "detached"):
        total = total + (values["entropy"] * upstream["entropy"]).sum()
    if also in ("sum_squares", "all"):
        values["sum_squares"] = to_all_rows(sets.sum_squares)
        total = total + (values["sum_squares"] * upstream["sum_squares"]).sum()
    if also in ("log_kept_mass", "all"):
        values["log_kept_mass"] = to_all_rows(_log_kept_mass(p, sets, whole, trained_rows))
        total = total + (values["log_kept_mass"] * upstream["log_kept_mass"]).sum()
    if p.at is not None:
        values["at"], index = at_ids(p, p.at, sets, trained_rows)
        # Ids outside of their candidate set have a log-prob of -inf, and no gradient.
        outside = torch.tensor(False) if p.keep is None else ~p.keep[index]
        total = total + (torch.where(outside, 0.0, values["at"]) * upstream["at"]).sum()
    return total


def _log_kept_mass(p: Problem, sets: Rows, whole: Rows, trained_rows: Tensor) -> Tensor:
    """Return the log of the probability that the whole softmax has in each candidate set, [n].

    It is 0 for trained rows without a set.

    sets, whole    softmaxes of the n trained rows over candidate sets and over the vocabulary
    trained_rows   int64 [n], the indices of the trained rows
    """
    if p.keep is None:
        mass = 0.0 * sets.chosen
    else:
        mass = torch.logsumexp(torch.where(sets.keep, whole.log_p, -math.inf), 1)
    has_set = torch.zeros(len(p.ids), dtype=torch.bool)
    if p.sets:
        has_set = torch.tensor([bool(ids) for ids in p.sets])
    return torch.where(has_set[trained_rows], mass, 0.0)


def at_ids(
    p: Problem, lists: list[list[int]], softmax: Rows, trained_rows: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the log-probs at extra ids of all rows, row after row, and where they are.

    lists          the ids of each of N rows, k in all
    softmax        of the n trained rows
    trained_rows   int64 [n], the indices of the trained rows

    Returns (log-probs [k], (rows int64 [k], ids int64 [k])). The log-probs of rows that are not
    trained are 0.
    """
    rows = []
    ids = []
    for row, ids_of_row in enumerate(lists):
        rows += [row] * len(ids_of_row)
        ids += ids_of_row
    index = (torch.tensor(rows, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64))
    log_p = torch.zeros(len(p.ids), softmax.log_p.shape[1], dtype=torch.float64)
    log_p = log_p.index_put((trained_rows,), softmax.log_p)
    return log_p[index], index


def _listed_terms(p: Problem, sets: Rows, trained_rows: Tensor) -> Tensor | None:
    """Return the terms of the loss at extra ids, [N], or None if the case has none.

    The term of a row is the sum of c log p + r p over its ids, with the values c of logp_terms and
    r of prob_terms.

    sets           softmaxes of the trained rows over candidate sets
    trained_rows   int64 [n], the indices of the trained rows
    """
    if p.terms is None:
        return None
    lists, logp_values, prob_values = p.terms
    log_p, index = at_ids(p, lists, sets, trained_rows)
    rows, _ = index
    terms = logp_values * log_p + prob_values * log_p.exp()
    return torch.zeros(len(p.ids), dtype=torch.float64).index_add(0, rows, terms)


def tolerances(p: Problem, exact: Answer) -> Answer:
    """Return how far fp32 results may be from each number of `exact`, in tensors of its shapes.

    A tolerance is the sum of
    - the largest change when all logits and log-probs are moved by fp32 errors, in several random
      draws
    - some fp32 roundings of the number and of the terms that it is a sum of
    - one rounding to the dtype that a gradient is stored in
    """
    case = p.case
    # The derivative of a total variation jumps where p = q. It takes more draws until both signs
    # have occurred at every such place.
    num_draws = 24 if case.exact == "tv" else 7
    noisy = [answer(p, noise) for noise in range(1, num_draws + 1)]

    def tolerance(x: Tensor, moved: list[Tensor], size: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tolerance of each number of a result, in its shape.

        x       the exact result
        moved   the same result in each draw of errors
        size    the sum of the absolute values of the terms that x is a sum of
        dtype   in which the package stores the result
        """
        changes = [torch.where(y.isfinite() & x.isfinite(), y - x, 0.0).abs() for y in moved]
        largest_change = torch.stack(changes).amax(0)
        magnitude = torch.where(x.isfinite(), x, 0.0).abs()
        if case.rounds_twice:
            magnitude = magnitude + size
        relative, absolute = ROUNDING[dtype]
        # 16-bit gradients are stored before they are multiplied by the upstream gradient.
        stored = relative * magnitude + absolute * max(1.0, case.upstream)
        return 16 * largest_change + 12 * EPS * (magnitude + size) + 2.2 * stored + 1e-12

    values = {}
    for name, x in exact.values.items():
        moved = [other.values[name] for other in noisy]
        values[name] = tolerance(x, moved, torch.zeros_like(x), torch.float32)
    if "logits" in p.clean:
        sizes = {"logits": exact.sizes.view(p.clean["logits"].shape)}
    else:
        sizes = _gradient_term_sizes(p, exact.sizes)
    gradients = {}
    for name, x in exact.gradients.items():
        moved = [other.gradients[name] for other in noisy]
        gradients[name] = tolerance(x, moved, sizes[name], p.clean[name].dtype)
    if case.weight_grad == "of weight":
        # It is added to 16-bit memory twice, and half of that is compared.
        gradients["weight"] *= 1.5
    if "hidden" not in p.clean:
        return Answer(values, gradients)

    # Matmuls with 16-bit operands round the gradient of the logits.
    dtypes = {x.dtype for x in p.clean.values()}
    # At least twice the largest relative rounding error of the dtype.
    relative = 0.0
    if torch.bfloat16 in dtypes:
        relative = 1.1 * 2.0**-8
    elif torch.float16 in dtypes:
        relative = 2.0**-10
    # With several passes, each part is rounded before parts cancel.
    rounded = sizes if case.is_composed else _gradient_term_sizes(p, exact.of_logits.abs())
    gradients = {name: x + relative * rounded[name] for name, x in gradients.items()}
    # The gradient of the weight is a sum of hidden states times coefficients of rows. If these
    # coefficients are known only after the logits, the products are rounded once more.
    has_late_coefficients = (
        p.spec.level != "token"
        or p.spec.surrogate.endswith("-cov")
        or (p.sets and (case.rows != "own" or case.listed != "none"))
    )
    if case.function == "loss" and has_late_coefficients and "weight" in gradients:
        gradients["weight"] += relative * rounded["weight"]
    return Answer(values, gradients)


def _gradient_term_sizes(p: Problem, of_logits: Tensor) -> dict[str, Tensor]:
    """Return the sums of the absolute terms of the gradients of hidden states and head.

    These are the matmuls of the backward with the absolute values of both operands, so that no
    terms cancel.

    of_logits   the absolute gradients of the logits [rows, V]

    Returns {"hidden": in its shape, "weight": [V, H], "bias": [V]}, float64.
    """
    hidden = p.clean["hidden"].double().abs()
    weight = p.clean["weight"].double().abs()
    return {
        "hidden": (of_logits @ weight).view(hidden.shape),
        "weight": of_logits.T @ hidden.flatten(0, -2),
        "bias": of_logits.sum(0),
    }
