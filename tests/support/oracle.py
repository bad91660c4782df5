"""The expected results of every test of a loss: plain torch and autograd in float64.

Written from the papers (PPO 1707.06347, GRPO 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783,
INTELLECT-2 2505.07291, CISPO 2506.13585, GSPO 2507.18071, GMPO 2507.20673, SAPO 2511.20347, VESPO
2602.10693, FIPO 2603.19835, RLOO 2402.14740, A*-PO 2505.20686, Clip-Cov and KL-Cov 2505.22617, GKD 2306.13649, DPPO
2602.04879, DeepSeek-V3.2 2512.02556, 80/20 rule 2506.01939; KL estimators: Schulman 2020). It
imports nothing of the package under test.

Masked rows are left out by indexing, never multiplied by 0, so that their values, even NaN, cannot
reach a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
    delta: float | None = None
    cap: float = 5.0
    low: float = 0.0
    level: str = "token"  # token, sequence, sequence-token, sequence-sum
    #: token-mean, seq-mean-token-mean, seq-mean-token-sum, group-mean, token-sum, constant
    aggregate: str = "token-mean"
    beta: float = 0.0
    kl: str = "k3"  # k1, k2, k3, abs, distillation, sdar
    entropy_coef: float = 0.0
    max_tokens: int | None = None
    tau: tuple[float, float] = (1.0, 1.05)  # sapo: A > 0, else
    vespo: tuple[float, float, float, float] = (
        2.0,
        3.0,
        3.0,
        2.0,
    )  # k, lambda for A >= 0; k, lambda for A < 0
    pull: float = 1.0  # beta of dro and of the regression, coefficient of kl-cov
    share: float = 1.0  # of tokens selected by clip-cov and kl-cov
    band: tuple[float, float] = (1.0, 5.0)  # clip-cov: of covariances
    bounds: tuple[float, float] | None = None  # of the log-ratio
    kl_weighting: str = "none"  # none, ratio, detached-ratio, score
    straight_through: bool = False
    clamp_log: float = math.inf
    clamp: float = math.inf
    kl_aggregate: str | None = None
    entropy_aggregate: str | None = None
    count_empty: bool = True
    trust: tuple[str, float, float, str] | None = None  # kind, low, high, anchor
    entropy_floor: float | None = None
    entropy_share: float | None = None
    off_policy: float | None = None
    off_policy_by: str = "sequence"  # or "token": whose advantage must be negative
    #: the largest error of a sequence, and whether the denominators count only those below
    sampler_mismatch: tuple[float, bool] | None = None
    #: half-life, bounds of the weight, ratios from which on a token does not count, and is bounded
    future_kl: tuple[float, float, float, float, float] | None = None


@dataclass(frozen=True)
class Result:
    """Tensors are flat [N]; rows that are not trained hold 0 (from log_ratio on:

    trained rows only, in order).
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    kl: Tensor
    log_ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kept: Tensor
    #: The smallest distance between a number and a bound that it is compared with.
    margin: float


def sequences_of(targets: Tensor, cu_seqlens: Tensor | None) -> list[list[int]]:
    """Return the row indices of each sequence. Packed rows without offsets are one sequence."""
    if targets.dim() == 2:
        length = targets.shape[1]
        return [[b * length + t for t in range(length)] for b in range(targets.shape[0])]
    if cu_seqlens is None:
        return [list(range(targets.numel()))]
    offsets = cu_seqlens.tolist()
    return [list(range(offsets[b], offsets[b + 1])) for b in range(len(offsets) - 1)]


def to_rows(value: float | Tensor, sequences: list[list[int]], dtype: torch.dtype) -> Tensor:
    """Return a value per row [N].

    value       a number, one value per sequence ([B] or [B, 1]), or one per token
    sequences   the row indices of each sequence
    """
    rows = sum(len(s) for s in sequences)
    if not isinstance(value, Tensor) or value.dim() == 0:
        return torch.full((rows,), float(value), dtype=dtype)
    value = value.detach().to(dtype).reshape(-1)
    if value.numel() == rows:
        return value
    assert value.numel() == len(sequences)
    out = torch.zeros(rows, dtype=dtype)
    for b, sequence in enumerate(sequences):
        out[sequence] = value[b]
    return out


def log_probs(
    logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the labels and the entropies, float64 [...].

    logits   [..., V]; logits of -inf are allowed
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
    """Return the policy loss of each token [n]. Autograd through it defines the gradient."""
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
        return -(advantage * logp - spec.pull / 2 * log_ratio**2)
    if spec.surrogate == "regression":
        return (spec.pull * log_ratio - advantage) ** 2
    if spec.surrogate == "kl-cov":
        assert selected is not None
        return -r * advantage + torch.where(selected, spec.pull * log_ratio.abs(), 0.0)
    assert spec.surrogate in ("clip", "clip-cov")
    unclipped = r if spec.delta is None else r.clamp(max=spec.delta)
    clipped = -torch.minimum(
        unclipped * advantage, r.clamp(1 - spec.eps_low, 1 + spec.eps_high) * advantage
    )
    return clipped if selected is None else torch.where(selected, 0.0, clipped)


def kl_estimate(name: str, logp: Tensor, ref: Tensor, clamp_log: float = math.inf) -> Tensor:
    """Return the KL estimate of each token, with log(ref / p) clamped to +-clamp_log."""
    d = (ref - logp).clamp(-clamp_log, clamp_log)
    if name == "sdar":
        return torch.sigmoid(5 * d).detach() * d
    return {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - d - 1, "abs": d.abs()}[name]


def kl_term(spec: Spec, logp: Tensor, old: Tensor, ref: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the KL term of each token times its weight. Autograd through it defines the gradient.

    old   the log-probs of the old policy, without gradient
    """
    if spec.kl == "distillation":
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
    # Where a clamp cuts the estimator's gradient it cuts that of the weight too (NeMo-RL).
    return torch.where(clamped, weight.detach(), weight) * value


def ratio_bounds(spec: Spec) -> tuple[float, float]:
    """Return the ratios from which the surrogate is clipped: (0, inf) if it has no clip."""
    if spec.surrogate in ("clip", "clip-cov"):
        return 1 - spec.eps_low, 1 + spec.eps_high
    if spec.surrogate == "cispo":
        return spec.low, spec.cap
    return 0.0, math.inf


class Margin:
    """The smallest distance between a number and a bound."""

    def __init__(self) -> None:
        self.smallest = math.inf

    def __call__(self, value: float, *bounds: float) -> None:
        """Take the distances between a number and these bounds into account."""
        for bound in bounds:
            if math.isfinite(bound):
                self.smallest = min(self.smallest, abs(value - bound))


@dataclass(frozen=True)
class Tokens:
    """The trained tokens as Python numbers, in order, and which of them make up each sequence."""

    logp: list[float]
    entropy: list[float]
    advantage: list[float]
    old: list[float] | None
    sampler: list[float] | None
    sequences: list[list[int]]


def trusts(
    kind: str, low: float, high: float, logp: float, anchor: float, advantage: float, margin: Margin
) -> bool:
    """Return whether the policy is near the anchor at a token.

    kind     the distance: "tv", "symmetric-tv", "kl" or "ratio"
    logp     the log-prob of the policy
    anchor   the log-prob of the old policy or of the sampler. NaN is never near.
    """
    if math.isnan(anchor):
        return False
    p, q = min(math.exp(logp), 1.0), math.exp(anchor)
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
    """Return which tokens stay in the policy term, and which stay in the entropy bonus."""
    n = len(tokens.logp)
    keep, high_entropy = [True] * n, [True] * n
    old = tokens.logp if tokens.old is None else tokens.old
    if spec.trust is not None:
        kind, low, high, anchor = spec.trust
        anchors = old if anchor == "old" else tokens.sampler
        assert anchors is not None
        for i in range(n):
            keep[i] &= trusts(
                kind, low, high, tokens.logp[i], anchors[i], tokens.advantage[i], margin
            )
    if spec.off_policy is not None:
        for at in tokens.sequences:
            moved = [
                (old if tokens.sampler is None else tokens.sampler)[i] - tokens.logp[i] for i in at
            ]
            mean = math.fsum(0.0 if math.isnan(d) else d for d in moved) / max(len(at), 1)
            margin(mean, spec.off_policy)
            advantages = [tokens.advantage[i] for i in at]
            whole = math.fsum(advantages)
            if at and min(advantages) < 0 < max(advantages):
                margin(whole, 0.0)
            for i in at:
                deciding = whole if spec.off_policy_by == "sequence" else tokens.advantage[i]
                keep[i] &= deciding >= 0 or mean <= spec.off_policy
    floor = spec.entropy_floor
    if spec.entropy_share is not None and n:
        values = sorted(tokens.entropy)
        position = (1 - spec.entropy_share) * (n - 1)
        below, above = values[math.floor(position)], values[math.ceil(position)]
        floor = below + (position - math.floor(position)) * (above - below)
    if floor is not None:
        for i in range(n):
            if tokens.entropy[i] != floor:
                margin(tokens.entropy[i], floor)
            high_entropy[i] = tokens.entropy[i] >= floor
            keep[i] &= high_entropy[i]
    return keep, high_entropy


def selection(spec: Spec, tokens: Tokens, margin: Margin) -> list[bool]:
    """Return which tokens Clip-Cov or KL-Cov selects.

    Of the tokens that qualify for Clip-Cov, the first ones are taken. The package draws them at
    random, so tests use share=1, which takes all.
    """
    n = len(tokens.logp)
    mean_a, mean_logp = (math.fsum(v) / max(n, 1) for v in (tokens.advantage, tokens.logp))
    cov = [
        (a - mean_a) * (logp - mean_logp)
        for a, logp in zip(tokens.advantage, tokens.logp, strict=True)
    ]
    if spec.surrogate == "kl-cov":
        order = sorted(range(n), key=lambda i: -cov[i])
        count = max(math.floor(spec.share * n), 1)
        if count < n:
            margin(cov[order[count - 1]], cov[order[count]])
        return [i in order[:count] for i in range(n)]
    low, high = ratio_bounds(spec)
    old = tokens.logp if tokens.old is None else tokens.old
    out = []
    for i in range(n):
        r, a = math.exp(tokens.logp[i] - old[i]), tokens.advantage[i]
        margin(cov[i], *spec.band)
        takes = (
            spec.band[0] < cov[i] < spec.band[1]
            and not (a > 0 and r > high)
            and not (a < 0 and r < low)
        )
        out.append(takes and sum(out) < max(math.floor(spec.share * n), 1))
    return out


def combine(
    spec: Spec,
    aggregate: str,
    terms: list[Tensor],
    groups: list[int] | None,
    normalizer: float | None,
    zero: Tensor,
    without: list[int],
) -> Tensor:
    """Return the aggregate of the terms of all trained tokens.

    terms        the terms of each sequence
    normalizer   the denominator. None: that of one process and one micro-batch, at least 1.
    zero         a 0 with a graph, the sum of no terms
    without      sequences that do not count. A normalizer is reduced by their share.
    """
    if without:
        rest = [i for i in range(len(terms)) if i not in without]
        left = [terms[i] for i in rest]
        of_left = None if groups is None else [groups[i] for i in rest]
        if normalizer is not None:
            counts = [
                denominator(spec, aggregate, x, g) for x, g in ((left, of_left), (terms, groups))
            ]
            normalizer = (float(normalizer) or 1.0) * max(counts[0], 1.0) / max(counts[1], 1.0)
        return combine(spec, aggregate, left, of_left, normalizer, zero, [])
    total, count = (
        zero,
        float(len(terms) if spec.count_empty else sum(t.numel() > 0 for t in terms)),
    )
    if aggregate == "group-mean":
        assert groups is not None
        joined = [
            torch.cat([t for t, g in zip(terms, groups, strict=True) if g == group])
            for group in sorted(set(groups))
        ]
        count = float(len(joined) if spec.count_empty else sum(t.numel() > 0 for t in joined))
        terms = joined
    for t in terms:
        if t.numel():
            total = total + (
                t.mean() if aggregate in ("seq-mean-token-mean", "group-mean") else t.sum()
            )
    if aggregate == "token-mean":
        count = float(sum(t.numel() for t in terms))
    elif aggregate == "token-sum":
        count = 1.0
    elif aggregate == "constant":
        assert spec.max_tokens is not None
        count *= spec.max_tokens
    return total / (max(count, 1.0) if normalizer is None else float(normalizer) or 1.0)


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
    """The loss of flat log-probs and entropies [N], sequence by sequence.

    normalizer: of the policy term, or of (policy term, KL, bonus); None is the policy term's for a
    term that shares its aggregate, and that of this batch for others. selected: bool [N], the
    tokens that Clip-Cov or KL-Cov take; None: see `selection`. kl_logps: [N], those that the KL
    compares; None: logps. divergences: [N], exact ones in place of a KL estimate. listed: [N],
    terms beside those of the policy, which a trust region does not drop.
    """
    dtype, rows = logps.dtype, logps.numel()
    trained = torch.ones(rows, dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
    kept_rows = trained.tolist()
    ids = [[i for i in s if kept_rows[i]] for s in sequences]
    order = [i for at in ids for i in at]
    advantage = to_rows(advantages, sequences, dtype)
    weight = to_rows(1.0 if weights is None else weights, sequences, dtype)
    nll = to_rows(0.0 if nll_weights is None else nll_weights, sequences, dtype)

    def given(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().reshape(-1).to(dtype)

    def numbers(x: Tensor | None) -> list[float] | None:
        return None if x is None else x.detach()[order].tolist()

    old, sampler, ref = given(old_logps), given(sampler_logps), given(ref_logps)
    if old is not None and on_policy is not None:
        is_marked = to_rows(on_policy, sequences, dtype) != 0
        old = torch.where(is_marked, logps.detach(), old)
    place = {i: j for j, i in enumerate(order)}
    tokens = Tokens(
        numbers(logps) or [],
        numbers(entropy) or [],
        numbers(advantage) or [],
        numbers(old),
        numbers(sampler),
        [[place[i] for i in at] for at in ids],
    )
    margin = Margin()
    keep = torch.zeros(3, rows, dtype=torch.bool)
    kept = *filters(spec, tokens, margin), filters(replace(spec, trust=None), tokens, margin)[0]
    keep[:, order] = torch.tensor(kept, dtype=torch.bool)
    if selected is None and spec.surrogate in ("clip-cov", "kl-cov"):
        selected = torch.zeros(rows, dtype=torch.bool)
        selected[order] = torch.tensor(selection(spec, tokens, margin), dtype=torch.bool)

    far = far_sequences(spec, tokens, margin)
    for b in far:
        keep[0][ids[b]] = False
    kl = torch.zeros(rows, dtype=dtype)
    log_ratio = torch.zeros(rows, dtype=dtype)
    policy_terms, kl_terms, entropy_terms = [], [], []
    nll_total = logps[:0].sum()
    for at in ids:
        logp, a, w = logps[at], advantage[at], weight[at]
        old_logp = logp.detach() if old is None else old[at]
        own = logp - old_logp
        x = in_sequence(spec, own, a, w, margin)
        if spec.level == "sequence" and at:
            x = x.mean().expand(len(at))
        elif spec.level == "sequence-token" and at:
            x = x.mean().detach() + logp - logp.detach()
        elif spec.level == "sequence-sum":
            x = x.sum().expand(len(at))
        log_ratio[at] = x.detach()
        for value, sign in zip(x.tolist(), a.tolist(), strict=True):
            margin(value, *(spec.bounds or ()))
            if sign != 0 and value != 0:  # on-policy it is 0 in every precision
                margin(math.exp(min(value, 700.0)), *ratio_bounds(spec), spec.delta or math.inf)
        if spec.surrogate == "kl-cov" and selected is not None:
            for value in x[selected[at] & (x != 0)].tolist():
                margin(value, 0.0)
        low, high = spec.bounds or (-math.inf, math.inf)
        term = surrogate(
            spec, x.clamp(low, high), logp, a, None if selected is None else selected[at]
        )
        if spec.future_kl is not None:
            w = w * future_weights(spec, own.detach(), a, at, margin)
        weighted = torch.where(w == 0, 0.0, (1.0 if spec.surrogate == "vespo" else w) * term)
        policy_terms.append(torch.where(keep[0][at], weighted, 0.0))
        if listed is not None:
            beside = torch.where(
                keep[2][at] & (w != 0), (1.0 if spec.surrogate == "vespo" else w) * listed[at], 0.0
            )
            policy_terms[-1] = policy_terms[-1] + beside
        if divergences is not None:
            kl_terms.append(divergences[at])
            kl[at] = kl_terms[-1].detach()
        elif ref is not None:
            # The product over a whole sequence would be far larger than the KL of a token, so the
            # token's own ratio is used there.
            kl_terms.append(
                kl_term(
                    spec,
                    logp if kl_logps is None else kl_logps[at],
                    old_logp,
                    ref[at],
                    own if spec.level == "sequence-sum" else x,
                )
            )
            kl[at] = kl_terms[-1].detach()
            for d, value in zip(
                (ref[at] - logp).tolist(), kl_estimate("k3", logp, ref[at]).tolist(), strict=True
            ):
                margin(d, -spec.clamp_log, spec.clamp_log, *((0.0,) if spec.kl == "abs" else ()))
                margin(value, spec.clamp)
        entropy_terms.append(entropy[at])
        if len(policy_terms) - 1 not in far:
            nll_total = nll_total - (nll[at] * logp).sum()

    where = groups.tolist() if groups is not None else None
    zero = logps[:0].sum()
    D, kl_D, entropy_D = normalizer if isinstance(normalizer, tuple) else (normalizer, None, None)
    for b in far:
        for terms in (policy_terms, kl_terms, entropy_terms):
            if terms:
                terms[b] = 0.0 * terms[b].detach()
    leave = far if spec.sampler_mismatch is not None and spec.sampler_mismatch[1] else []
    total = combine(spec, spec.aggregate, policy_terms, where, D, zero, leave) + nll_total
    if spec.beta != 0:
        own_mean = D if kl_D is None and not spec.kl_aggregate else kl_D
        total = total + spec.beta * combine(
            spec, spec.kl_aggregate or spec.aggregate, kl_terms, where, own_mean, zero, leave
        )
    if spec.entropy_coef != 0:
        if (
            spec.entropy_share is not None and spec.entropy_aggregate == "token-mean"
        ):  # a mean of what is left
            entropy_terms = [h[keep[1][at]] for h, at in zip(entropy_terms, ids, strict=True)]
            if entropy_D is not None:  # which counts all tokens: these stand for theirs
                entropy_D *= sum(h.numel() for h in entropy_terms) / max(len(order), 1)
        else:
            entropy_terms = [
                torch.where(keep[1][at], h, 0.0) for h, at in zip(entropy_terms, ids, strict=True)
            ]
        own_mean = D if entropy_D is None and not spec.entropy_aggregate else entropy_D
        bonus = combine(
            spec,
            spec.entropy_aggregate or spec.aggregate,
            entropy_terms,
            where,
            own_mean,
            zero,
            leave,
        )
        total = total - spec.entropy_coef * bonus
    low, high = ratio_bounds(spec)
    r = log_ratio[trained].exp()
    return Result(
        loss=total,
        logps=torch.where(trained, logps.detach(), 0.0),
        entropy=torch.where(trained, entropy.detach(), 0.0),
        kl=kl,
        log_ratio=log_ratio[trained],
        clipped_low=(r < low) & (advantage[trained] < 0),
        clipped_high=(r > high) & (advantage[trained] > 0),
        kept=keep[0][trained],
        margin=margin.smallest,
    )


def future_weights(
    spec: Spec, log_ratio: Tensor, advantage: Tensor, places: list[int], margin: Margin
) -> Tensor:
    """Return FIPO's weight (2603.19835) of each trained token of a sequence.

    places   the positions of the trained tokens
    """
    assert spec.future_kl is not None
    half_life, low, high, cutoff, safety = spec.future_kl
    weights = []
    for i, t in enumerate(places):
        total = 0.0
        for j in range(i, len(places)):
            x = float(log_ratio[j])
            margin(x, math.log(cutoff))
            if not x > math.log(cutoff):
                total += 0.5 ** ((places[j] - t) / half_life) * x
        weight = total if math.isnan(total) else min(max(math.exp(min(total, 700.0)), low), high)
        x = float(log_ratio[i])
        if float(advantage[i]) < 0:
            margin(x, math.log(safety))
            weight = min(max(weight, 0.8), 1.0) if x > math.log(safety) else weight
        weights.append(weight)
    return torch.tensor(weights, dtype=log_ratio.dtype)


def denominator(spec: Spec, aggregate: str, terms: list[Tensor], groups: list[int] | None) -> float:
    """Return the number that the terms of one batch are divided by."""
    if aggregate == "token-sum":
        return 1.0
    if aggregate == "token-mean":
        return float(sum(t.numel() for t in terms))
    if aggregate == "group-mean":
        assert groups is not None
        named = zip(terms, groups, strict=True)
        return float(len({g for t, g in named if spec.count_empty or t.numel()}))
    count = float(len(terms) if spec.count_empty else sum(t.numel() > 0 for t in terms))
    if aggregate == "constant":
        assert spec.max_tokens is not None
        count *= spec.max_tokens
    return count


def far_sequences(spec: Spec, tokens: Tokens, margin: Margin) -> list[int]:
    """Return the sequences whose mean of exp |log-prob - the sampler's| exceeds the threshold."""
    if spec.sampler_mismatch is None:
        return []
    assert tokens.sampler is not None
    far = []
    for b, at in enumerate(tokens.sequences):
        apart = [tokens.sampler[i] - tokens.logp[i] for i in at]
        errors = [1.0 if math.isnan(d) else math.exp(min(abs(d), 60.0)) for d in apart]
        error = math.fsum(errors) / max(len(errors), 1)
        margin(error, spec.sampler_mismatch[0])
        if error > spec.sampler_mismatch[0]:
            far.append(b)
    return far


def in_sequence(spec: Spec, x: Tensor, advantage: Tensor, weight: Tensor, margin: Margin) -> Tensor:
    """Return the log-ratios of the trained tokens of a sequence, as its mean or sum takes them."""
    if spec.surrogate == "gmpo":  # clipped on the side where the token would gain
        for value, a in zip(x.tolist(), advantage.tolist(), strict=True):
            margin(value, *([spec.eps_high] if a > 0 else [-spec.eps_low] if a < 0 else []))
        sign = advantage.sign()
        return sign * torch.minimum(sign * x, sign * x.clamp(-spec.eps_low, spec.eps_high))
    if (
        spec.surrogate == "vespo"
    ):  # sampler weights are factors of the sequence's ratio; 0 takes its token out
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

    def kl(a: Tensor, b: Tensor) -> Tensor:
        nothing = a == -math.inf
        a, b = a.masked_fill(nothing, 0.0), b.masked_fill(nothing, 0.0)
        return (a.exp() * (a - b)).masked_fill(nothing, 0.0).sum(-1)

    p, q = logps, teacher_logps
    if kind == "reverse":
        return kl(p, q)
    if kind == "forward":
        return kl(q, p)
    if kind == "tv":
        apart = p.exp() - q.exp()
        return (torch.where(apart.isnan(), apart, apart.sign()).detach() * apart).sum(-1) / 2.0
    nothing = (p == -math.inf) & (q == -math.inf)
    m = torch.logaddexp(
        p.masked_fill(nothing, 0.0) + math.log1p(-mixture),
        q.masked_fill(nothing, 0.0) + math.log(mixture),
    )
    m = m.masked_fill(nothing, -math.inf)
    return mixture * kl(q, m) + (1.0 - mixture) * kl(p, m)


# ---- the answer to a problem (see cases.py), and how far fp32 may be from it

EPS = 2.0**-23
#: Half a unit in the last place of the dtypes that gradients are stored in, relative and absolute.
ROUNDING = {
    torch.float32: (2.0**-24, 1.2e-38),
    torch.bfloat16: (2.0**-9, 1.2e-38),
    torch.float16: (2.0**-12, 2.0**-25),
}


def project(leaves: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the logits [rows, V] from hidden states, weight and bias, or from logits."""
    if "logits" in leaves:
        return leaves["logits"].reshape(-1, leaves["logits"].shape[-1]).to(dtype)
    hidden = leaves["hidden"].to(dtype)
    weight = leaves["weight"].to(dtype)
    bias = leaves["bias"].to(dtype) if "bias" in leaves else None
    return torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), weight, bias)


class Rows:
    """Softmaxes over the ids of `keep`.

    x           logits [N, V]
    ids         int64 [N], the targets
    transform   temperature, softcap and scale
    keep        bool [N, V], None: all ids
    noise       a seed for random errors of the size of fp32 rounding, or None

    Attributes: log_p and p [N, V], and chosen (the log-probs of the targets), entropy and
    sum_squares [N].
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
    """Return random signs of errors in the shape of a tensor.

    Seeds 2k and 2k + 1 differ in the sign of every second column. So two neighbours have different
    signs with one of these seeds.
    """
    g = torch.Generator().manual_seed(noise // 2)
    random = torch.where(torch.rand(like.shape, generator=g) < 0.5, -1.0, 1.0).to(like.dtype)
    alternating = 1 - 2 * (torch.arange(like.shape[-1]) % 2)
    return random * alternating ** (noise % 2)


def listed_divergence(
    log_p: Tensor, log_q: Tensor, ids: list[list[int]], kind: str, mixture: float, tail: str
) -> Tensor:
    """Return the divergence of each row [N] from a teacher that is known at some ids.

    log_p, log_q    log-probs of policy and teacher [N, V]
    ids             the ids of each row. Without ids the divergence is 0.
    kind, mixture   see `divergence`
    tail            how the other ids count: "bin", "ignore", "renormalise" or "generalised"
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
    """Return log-probs with one more entry for the probability of all other ids."""
    rest = 1 - log_p.exp().sum()
    return torch.cat([log_p, rest.clamp(min=1e-7).log()[None]])


@dataclass
class Answer:
    """The results of a call.

    values      log-probs and statistics by name, 0 in rows that are not trained
    gradients   of the tensors of the call, by name
    clear       whether no number is so near a bound that rounding may move it across
    of_logits   the gradient of the logits [rows, V]
    sizes       the sum of the absolute terms of that gradient [rows, V]
    """

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    clear: bool = True
    of_logits: Any = None
    sizes: Any = None


def answer(p: Problem, noise: int | None = None) -> Answer:
    """Return the results of a call in float64.

    noise   a seed for random errors of the size of fp32 rounding, or None
    """
    case = p.case
    num_tokens = len(p.ids)
    live = p.trained.nonzero()[:, 0]
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
        """Return the softmaxes of the trained rows of logits [N, V]."""
        temperatures = to_rows(transform["temperature"], p.sequences, torch.float64)
        return Rows(
            x[live],
            p.ids[live],
            {**transform, "temperature": temperatures[live]},
            [[i] for i in range(len(live))],
            keep=None if keep is None else keep[live],
            noise=None if noise is None else noise + noise_offset,
        )

    def to_all_rows(value: Tensor) -> Tensor:
        return torch.zeros(num_tokens, dtype=torch.float64).index_put((live,), value)

    sets = rows(token_logits, p.transform, p.keep)
    whole = sets if p.keep is None else rows(token_logits, p.transform, None)
    values = {"logps": to_all_rows(sets.chosen), "entropy": to_all_rows(sets.entropy)}
    divergences = None
    if p.other is not None:
        values["divergence"] = to_all_rows(_divergence(p, p.other, sets, rows, live))
        divergences = values["divergence"] * (temperature**2 if case.squared else 1.0)
        if case.function == "divergence":
            values["divergence"] = divergences
    total, clear = _total(p, values, divergences, sets, whole, live, noise)

    # The gradients of the leaves, and of the statistics on the way for the sizes of terms.
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
    sizes = _sizes(p, token_logits.detach(), live, softmaxes, grad_log_p, grad_divergence)
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
    live: Tensor,
    softmaxes: list[Rows],
    grad_log_p: list[Tensor],
    grad_divergence: Tensor | None,
) -> Tensor:
    """Return the sum of the absolute terms of the gradient of the logits, float64 [rows, V].

    token_logits      [N, V]
    live              int64 [n], the trained rows
    softmaxes         over candidate sets, and over the vocabulary if these are others
    grad_log_p        of each softmax: the absolute gradients of its log-probs [n, V]
    grad_divergence   the absolute gradients of the divergences [N], or None
    """
    case = p.case
    num_tokens, vocab = token_logits.shape
    p_sets = softmaxes[0].p.detach()
    temperature = to_rows(p.transform["temperature"], p.sequences, torch.float64)
    factor = abs(p.transform["scale"]) / temperature[live, None]
    sizes = torch.zeros(num_tokens, vocab, dtype=torch.float64)
    pair_sizes = torch.zeros(num_tokens, dtype=torch.float64)
    for softmax, grad in zip(softmaxes, grad_log_p, strict=True):
        grad_sum = grad.sum(1, keepdim=True)
        sizes[live] += (grad + softmax.p.detach() * grad_sum) * factor
        pair_sizes[live] += grad_sum[:, 0] * factor[:, 0]
    if grad_divergence is not None:
        # The log-ratios of two near rows cancel.
        sizes[live] += p_sets * grad_divergence[live, None] * factor
    has_further_ids = any(x is not None for x in (p.at, p.terms, p.rows))
    if case.source == "hidden" and (case.other == "listed" or has_further_ids):
        # Logits at further ids are computed again, with another rounding.
        grad_sum = grad_log_p[0].sum(1, keepdim=True)
        if grad_divergence is not None and case.other == "listed" and case.exact == "tv":
            # The gradient of a total variation is 0 where p = q, and jumps next to it.
            grad_sum = grad_sum + grad_divergence[live, None]
        largest_logit = token_logits[live].abs().amax(1, keepdim=True)
        sizes[live] += p_sets * grad_sum * factor**2 * largest_logit
    if case.extreme == "absent" and case.function == "logprobs":
        # A sum of nearly 1 is rounded, and this error is most of so small an entropy.
        sizes[live] += p_sets * p.upstream["entropy"].reshape(-1)[live, None].abs() * factor
    named = named_ids(p, vocab)
    if case.also in ("log_kept_mass", "all"):
        # It is the difference of two log-probs of the likeliest id of the set.
        likeliest = p_sets.argmax(1)
        upstream = p.upstream["log_kept_mass"].reshape(-1)[live].abs()
        sizes[live, likeliest] += upstream * factor[:, 0]
        named[live, softmaxes[0].log_p.detach().argmax(1)] = 1.0
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
    """Return float64 [N, V]: 1 at the target of each token and at its further ids, 0 elsewhere."""
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
    p: Problem, other: SecondDistribution, ours: Rows, rows: Callable[..., Rows], live: Tensor
) -> Tensor:
    """Return the divergence of each trained row [n] over its candidate set.

    ours   the softmaxes of the policy in the trained rows
    rows   makes the softmaxes of the trained rows from logits, transform, keep and a seed
    live   int64 [n], the trained rows
    """
    case = p.case
    kind, _, share = case.exact.partition(" ")
    mixture = float(share or 0.5) if kind == "jsd" else 0.0
    theirs = rows(other.rows, other.transform, p.keep, 200).log_p.detach()
    if other.ids is None:
        return divergence(ours.log_p, theirs, kind, mixture)
    listed = [other.ids[i] for i in live.tolist()]
    # The caller has the teacher's log-probs in fp32.
    theirs = theirs.float().double()
    return listed_divergence(ours.log_p, theirs, listed, kind, mixture, case.tail)


def _total(
    p: Problem,
    values: dict[str, Tensor],
    divergences: Tensor | None,
    sets: Rows,
    whole: Rows,
    live: Tensor,
    noise: int | None,
) -> tuple[Tensor, bool]:
    """Return the scalar whose gradient is compared, and whether it is clear (see Answer).

    Adds the further results of the call to `values`.

    divergences   [N], those of the loss, or None
    sets, whole   softmaxes of the trained rows over candidate sets and over the vocabulary
    live          int64 [n], the trained rows
    """
    function = p.case.function
    if function == "divergence":
        return (values["divergence"] * p.upstream["divergence"].reshape(-1)).sum(), True
    if function == "loss":
        seen = {name: x for name, x in p.seen.items() if name != "cu_seqlens"}
        if noise is not None:
            # The terms of a gradient may cancel, so errors of the advantages count too.
            error = 2 * EPS * signs(seen["advantages"], noise)
            seen["advantages"] = seen["advantages"] * (1 + error)
        result = objective(
            p.spec,
            values["logps"],
            values["entropy"],
            p.sequences,
            normalizer=p.case.normalizer,
            divergences=divergences,
            listed=_listed_terms(p, sets, live),
            **seen,
        )
        values["loss"] = result.loss
        return result.loss, result.margin > 1e-3
    return _total_of_statistics(p, values, sets, whole, live), True


def _total_of_statistics(
    p: Problem, values: dict[str, Tensor], sets: Rows, whole: Rows, live: Tensor
) -> Tensor:
    """Return the sum of log-probs and statistics times their upstream gradients, see `_total`."""
    also = p.case.also
    upstream = {name: x.reshape(-1) for name, x in p.upstream.items()}

    def to_all_rows(x: Tensor) -> Tensor:
        return torch.zeros_like(values["logps"]).index_put((live,), x)

    total = (values["logps"] * upstream["logps"]).sum()
    if also not in ("nothing", "detached"):
        total = total + (values["entropy"] * upstream["entropy"]).sum()
    if also in ("sum_squares", "all"):
        values["sum_squares"] = to_all_rows(sets.sum_squares)
        total = total + (values["sum_squares"] * upstream["sum_squares"]).sum()
    if also in ("log_kept_mass", "all"):
        values["log_kept_mass"] = to_all_rows(_log_kept_mass(p, sets, whole, live))
        total = total + (values["log_kept_mass"] * upstream["log_kept_mass"]).sum()
    if p.at is not None:
        values["at"], index = at_ids(p, p.at, sets, live)
        # Only there, a log-prob of -inf has no gradient.
        outside = torch.tensor(False) if p.keep is None else ~p.keep[index]
        total = total + (torch.where(outside, 0.0, values["at"]) * upstream["at"]).sum()
    return total


def _log_kept_mass(p: Problem, sets: Rows, whole: Rows, live: Tensor) -> Tensor:
    """Return the log-probability of each candidate set [n], 0 for trained rows without a set."""
    if p.keep is None:
        mass = 0.0 * sets.chosen
    else:
        mass = torch.logsumexp(torch.where(sets.keep, whole.log_p, -math.inf), 1)
    has_set = torch.zeros(len(p.ids), dtype=torch.bool)
    if p.sets:
        has_set = torch.tensor([bool(ids) for ids in p.sets])
    return torch.where(has_set[live], mass, 0.0)


def at_ids(
    p: Problem, lists: list[list[int]], softmax: Rows, live: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the log-probs [k] at the ids of each row, and the k rows and ids.

    The log-probs of rows that are not trained are 0.
    """
    rows = []
    ids = []
    for row, ids_of_row in enumerate(lists):
        rows += [row] * len(ids_of_row)
        ids += ids_of_row
    index = torch.tensor(rows, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64)
    log_p = torch.zeros(len(p.ids), softmax.log_p.shape[1], dtype=torch.float64)
    return log_p.index_put((live,), softmax.log_p)[index], index


def _listed_terms(p: Problem, sets: Rows, live: Tensor) -> Tensor | None:
    """Return the terms at further ids, the sum of c log p + r p of each row [N], or None."""
    if p.terms is None:
        return None
    lists, logp_values, prob_values = p.terms
    log_p, (rows, _) = at_ids(p, lists, sets, live)
    terms = logp_values * log_p + prob_values * log_p.exp()
    return torch.zeros(len(p.ids), dtype=torch.float64).index_add(0, rows, terms)


def tolerances(p: Problem, exact: Answer) -> Answer:
    """Return how far fp32 results may be from each number of `exact`.

    The sum of: the largest change when all logits and log-probs are moved by fp32 errors (several
    random draws), some fp32 roundings of the number and of the terms that it is a sum of, and one
    rounding to the dtype that a gradient is stored in.
    """
    case = p.case
    # The derivative of a total variation jumps where p = q. It takes more draws until both signs
    # have occurred at every such place.
    num_draws = 24 if case.exact == "tv" else 7
    noisy = [answer(p, noise) for noise in range(1, num_draws + 1)]

    def tolerance(x: Tensor, moved: list[Tensor], size: Tensor, dtype: torch.dtype) -> Tensor:
        """size: the sum of the absolute values of the terms of x."""
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
        sizes = products(p, exact.sizes)
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
    relative = 0.0
    if torch.bfloat16 in dtypes:
        relative = 1.1 * 2.0**-8
    elif torch.float16 in dtypes:
        relative = 2.0**-10
    # With several passes, each part is rounded before parts cancel.
    rounded = sizes if case.is_composed else products(p, exact.of_logits.abs())
    gradients = {name: x + relative * rounded[name] for name, x in gradients.items()}
    # The gradient of the weight is a sum of hidden states times coefficients of rows. If these
    # coefficients are known only after the logits, the products are rounded once more.
    has_late_coefficients = (
        p.spec.level != "token"
        or p.spec.surrogate.endswith("-cov")
        or (p.sets and case.rows + case.listed != "ownnone")
    )
    if case.function == "loss" and has_late_coefficients and "weight" in gradients:
        gradients["weight"] += relative * rounded["weight"]
    return Answer(values, gradients)


def products(p: Problem, of_logits: Tensor) -> dict[str, Tensor]:
    """Return gradients of hidden states and head in which no terms cancel: |operands| multiplied.

    of_logits   gradients of the logits, all at least 0
    """
    hidden, weight = p.clean["hidden"].double().abs(), p.clean["weight"].double().abs()
    of_weight = of_logits.T @ hidden.flatten(0, -2)
    return {
        "hidden": (of_logits @ weight).view(hidden.shape),
        "weight": of_weight,
        "bias": of_logits.sum(0),
    }
