"""The reference that everything else is measured against: plain torch and autograd, float64, slow and obvious.

Written from the papers (PPO 1707.06347, GRPO 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783, INTELLECT-2 2505.07291, CISPO
2506.13585, GSPO 2507.18071, GMPO 2507.20673, SAPO 2511.20347, VESPO 2602.10693, RLOO 2402.14740, A*-PO 2505.20686, Clip-Cov and
KL-Cov 2505.22617, GKD 2306.13649, DPPO 2602.04879, DeepSeek-V3.2 2512.02556, 80/20 rule 2506.01939; KL estimators: Schulman
2020). It imports nothing of the package under test.

Masked rows are left out by indexing, never multiplied by 0, so that their values, even NaN, cannot reach a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Spec:
    """The loss to compute: one field per choice."""

    #: clip, cispo, policy-gradient, importance-sampling, sapo, vespo, gmpo, dro, regression, clip-cov, kl-cov
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
    kl: str = "k3"  # k1, k2, k3, abs, distillation
    entropy_coef: float = 0.0
    max_tokens: int | None = None
    tau: tuple[float, float] = (1.0, 1.05)  # sapo: A > 0, else
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)  # k, lambda for A >= 0; k, lambda for A < 0
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


@dataclass(frozen=True)
class Transform:
    scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0


@dataclass(frozen=True)
class Result:
    """Tensors are flat [N]; rows that are not trained hold 0 (from log_ratio on: trained rows only, in order)."""

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
    """Row numbers of each sequence, row-major. Packed rows without offsets are one sequence."""
    if targets.dim() == 2:
        length = targets.shape[1]
        return [[b * length + t for t in range(length)] for b in range(targets.shape[0])]
    if cu_seqlens is None:
        return [list(range(targets.numel()))]
    offsets = cu_seqlens.tolist()
    return [list(range(offsets[b], offsets[b + 1])) for b in range(len(offsets) - 1)]


def to_rows(value: float | Tensor, sequences: list[list[int]], dtype: torch.dtype) -> Tensor:
    """[N]: a number, one value per sequence ([B], [B, 1]) or one per token."""
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
    logits: Tensor,
    targets: Tensor,
    transform: Transform | None = None,
    cu_seqlens: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All log-probs [n, V], log-probs of the targets [n] and entropies [n]; a row with p = 0 somewhere is fine. `keep`: bool, the
    shape of logits, the ids that the softmax runs over."""
    transform = transform or Transform()
    temperature = to_rows(transform.temperature, sequences_of(targets, cu_seqlens), logits.dtype)
    z = logits.reshape(-1, logits.shape[-1]) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    z = z / temperature[:, None]
    if keep is not None:
        z = z.masked_fill(~keep.reshape(z.shape), -math.inf)
    log_p = torch.log_softmax(z, dim=-1)
    chosen = log_p.gather(1, targets.reshape(-1, 1).to(torch.int64))[:, 0]
    finite = torch.where(log_p.detach() == -math.inf, 0.0, log_p)  # lim p log p = 0
    return log_p, chosen, -(log_p.exp() * finite).sum(1)


def by_sign(positive: Tensor, yes: float, no: float) -> Tensor:
    """Of two numbers, in float64 (torch.where of two numbers is fp32)."""
    return torch.where(positive, torch.tensor(yes, dtype=torch.float64), torch.tensor(no, dtype=torch.float64))


def surrogate(spec: Spec, log_ratio: Tensor, logp: Tensor, advantage: Tensor, selected: Tensor | None = None) -> Tensor:
    """Per-token policy loss; autograd through it is the definition of the slope."""
    r = torch.exp(log_ratio)
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
    clipped = -torch.minimum(unclipped * advantage, r.clamp(1 - spec.eps_low, 1 + spec.eps_high) * advantage)
    return clipped if selected is None else torch.where(selected, 0.0, clipped)


def kl_estimate(name: str, logp: Tensor, ref: Tensor, clamp_log: float = math.inf) -> Tensor:
    d = (ref - logp).clamp(-clamp_log, clamp_log)
    return {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - d - 1, "abs": d.abs()}[name]


def kl_term(spec: Spec, logp: Tensor, old: Tensor, ref: Tensor, log_ratio: Tensor) -> Tensor:
    """Per-token KL with its weight; autograd through it is the definition of the slope. old is detached."""
    if spec.kl == "distillation":
        x = logp - old
        keep = logp.detach().exp() - old.exp() >= -0.2
        return -torch.where(keep, (ref - logp).detach() * x.exp(), 0.0) + 1e-3 * x**2
    estimate = kl_estimate(spec.kl, logp, ref, spec.clamp_log)
    value = estimate.clamp(-spec.clamp, spec.clamp)
    clamped = ((ref - logp).abs() > spec.clamp_log) | (estimate.abs() > spec.clamp)
    if spec.straight_through:
        other = kl_estimate("k2", logp, ref)
        value = value.detach() + other - other.detach()
    weight = {
        "none": torch.ones_like(value),
        "ratio": log_ratio.exp(),
        "detached-ratio": log_ratio.detach().exp(),
        "score": torch.exp(logp - logp.detach()),
    }[spec.kl_weighting]
    # Where a clamp cuts the estimator's gradient it cuts that of the weight too (NeMo-RL).
    return torch.where(clamped, weight.detach(), weight) * value


def ratio_bounds(spec: Spec) -> tuple[float, float]:
    if spec.surrogate in ("clip", "clip-cov"):
        return 1 - spec.eps_low, 1 + spec.eps_high
    return (spec.low, spec.cap) if spec.surrogate == "cispo" else (0.0, math.inf)


class Margin:
    """The smallest distance between a number and a bound."""

    def __init__(self) -> None:
        self.smallest = math.inf

    def __call__(self, value: float, *bounds: float) -> None:
        self.smallest = min([self.smallest, *(abs(value - b) for b in bounds if math.isfinite(b))])


@dataclass(frozen=True)
class Tokens:
    """The trained tokens as Python numbers, in order, and which of them make up each sequence."""

    logp: list[float]
    entropy: list[float]
    advantage: list[float]
    old: list[float] | None
    sampler: list[float] | None
    sequences: list[list[int]]


def trusts(kind: str, low: float, high: float, logp: float, anchor: float, advantage: float, margin: Margin) -> bool:
    """Whether the policy has stayed near the anchor; a token without one is not trusted."""
    if math.isnan(anchor):
        return False
    p, q = math.exp(logp), math.exp(anchor)
    if kind == "tv":
        margin(p - q, high if advantage > 0 else -low)
        return p - q <= high if advantage > 0 else p - q >= -low
    if kind == "symmetric-tv":
        margin(p - q, -low, high)
        return -low <= p - q <= high
    if kind == "kl":
        divergence = q * (anchor - logp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        margin(divergence, high if advantage > 0 else low)
        return not ((advantage > 0 and divergence > high and p > q) or (advantage < 0 and divergence > low and p < q))
    assert kind == "ratio"
    margin(p / q, 1 - low, 1 + high)
    return 1 - low < p / q < 1 + high


def filters(spec: Spec, tokens: Tokens, margin: Margin) -> tuple[list[bool], list[bool]]:
    """(tokens that stay in the policy term, tokens that stay in the entropy bonus)"""
    n = len(tokens.logp)
    keep, high_entropy = [True] * n, [True] * n
    old = tokens.logp if tokens.old is None else tokens.old
    if spec.trust is not None:
        kind, low, high, anchor = spec.trust
        anchors = old if anchor == "old" else tokens.sampler
        assert anchors is not None
        for i in range(n):
            keep[i] &= trusts(kind, low, high, tokens.logp[i], anchors[i], tokens.advantage[i], margin)
    if spec.off_policy is not None:
        for at in tokens.sequences:
            moved = [(old if tokens.sampler is None else tokens.sampler)[i] - tokens.logp[i] for i in at]
            mean = math.fsum(0.0 if math.isnan(d) else d for d in moved) / max(len(at), 1)
            margin(mean, spec.off_policy)
            for i in at:
                keep[i] &= tokens.advantage[i] >= 0 or mean <= spec.off_policy
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
    """Clip-Cov with share=1 (all that qualify, so that nothing is drawn by lot) and KL-Cov, token by token."""
    n = len(tokens.logp)
    mean_a, mean_logp = (math.fsum(v) / max(n, 1) for v in (tokens.advantage, tokens.logp))
    cov = [(a - mean_a) * (logp - mean_logp) for a, logp in zip(tokens.advantage, tokens.logp, strict=True)]
    if spec.surrogate == "kl-cov":
        order = sorted(range(n), key=lambda i: -cov[i])
        count = max(math.floor(spec.share * n), 1)
        if count < n:
            margin(cov[order[count - 1]], cov[order[count]])
        return [i in order[:count] for i in range(n)]
    assert spec.share == 1
    low, high = ratio_bounds(spec)
    old = tokens.logp if tokens.old is None else tokens.old
    out = []
    for i in range(n):
        r, a = math.exp(tokens.logp[i] - old[i]), tokens.advantage[i]
        margin(cov[i], *spec.band)
        out.append(spec.band[0] < cov[i] < spec.band[1] and not (a > 0 and r > high) and not (a < 0 and r < low))
    return out


def combine(
    spec: Spec, aggregate: str, terms: list[Tensor], groups: list[int] | None, normalizer: float | None, zero: Tensor
) -> Tensor:
    """One number from the terms of the trained tokens of each sequence.

    Without a normalizer the denominator is that of one process and one micro-batch, at least 1."""
    total, count = zero, float(len(terms) if spec.count_empty else sum(t.numel() > 0 for t in terms))
    if aggregate == "group-mean":
        assert groups is not None
        joined = [torch.cat([t for t, g in zip(terms, groups, strict=True) if g == group]) for group in sorted(set(groups))]
        count = float(len(joined) if spec.count_empty else sum(t.numel() > 0 for t in joined))
        terms = joined
    for t in terms:
        if t.numel():
            total = total + (t.mean() if aggregate in ("seq-mean-token-mean", "group-mean") else t.sum())
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
    selected: Tensor | None = None,
    normalizer: float | tuple[float | None, float | None, float | None] | None = None,
) -> Result:
    """The loss of flat log-probs and entropies [N], sequence by sequence.

    normalizer: of the policy term, or of (policy term, KL, bonus); None is the policy term's for a term that shares its
    aggregate, and that of this batch for others.
    selected: bool [N], the tokens that Clip-Cov or KL-Cov take; None: see `selection`."""
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
    keep = torch.zeros(2, rows, dtype=torch.bool)
    keep[:, order] = torch.tensor(filters(spec, tokens, margin), dtype=torch.bool)
    if selected is None and spec.surrogate in ("clip-cov", "kl-cov"):
        selected = torch.zeros(rows, dtype=torch.bool)
        selected[order] = torch.tensor(selection(spec, tokens, margin), dtype=torch.bool)

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
            if sign != 0:
                margin(math.exp(min(value, 700.0)), *ratio_bounds(spec), spec.delta or math.inf)
        if spec.surrogate == "kl-cov" and selected is not None:
            for value in x[selected[at] & (x != 0)].tolist():
                margin(value, 0.0)
        low, high = spec.bounds or (-math.inf, math.inf)
        term = surrogate(spec, x.clamp(low, high), logp, a, None if selected is None else selected[at])
        weighted = torch.where(w == 0, 0.0, (1.0 if spec.surrogate == "vespo" else w) * term)
        policy_terms.append(torch.where(keep[0][at], weighted, 0.0))
        if ref is not None:
            # The product over a whole sequence would be far larger than the KL of a token, so the token's own ratio is used there.
            kl_terms.append(kl_term(spec, logp, old_logp, ref[at], own if spec.level == "sequence-sum" else x))
            kl[at] = kl_terms[-1].detach()
            for d, value in zip((ref[at] - logp).tolist(), kl_estimate("k3", logp, ref[at]).tolist(), strict=True):
                margin(d, -spec.clamp_log, spec.clamp_log, *((0.0,) if spec.kl == "abs" else ()))
                margin(value, spec.clamp)
        entropy_terms.append(entropy[at])
        nll_total = nll_total - (nll[at] * logp).sum()

    where = groups.tolist() if groups is not None else None
    zero = logps[:0].sum()
    D, kl_D, entropy_D = normalizer if isinstance(normalizer, tuple) else (normalizer, None, None)
    total = combine(spec, spec.aggregate, policy_terms, where, D, zero) + nll_total
    if spec.beta != 0:
        own_mean = D if kl_D is None and not spec.kl_aggregate else kl_D
        total = total + spec.beta * combine(spec, spec.kl_aggregate or spec.aggregate, kl_terms, where, own_mean, zero)
    if spec.entropy_coef != 0:
        if spec.entropy_share is not None and spec.entropy_aggregate == "token-mean":  # a mean of what is left
            entropy_terms = [h[keep[1][at]] for h, at in zip(entropy_terms, ids, strict=True)]
            if entropy_D is not None:  # which counts all tokens: these stand for theirs
                entropy_D *= sum(h.numel() for h in entropy_terms) / max(len(order), 1)
        else:
            entropy_terms = [torch.where(keep[1][at], h, 0.0) for h, at in zip(entropy_terms, ids, strict=True)]
        own_mean = D if entropy_D is None and not spec.entropy_aggregate else entropy_D
        bonus = combine(spec, spec.entropy_aggregate or spec.aggregate, entropy_terms, where, own_mean, zero)
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


def in_sequence(spec: Spec, x: Tensor, advantage: Tensor, weight: Tensor, margin: Margin) -> Tensor:
    """Log-ratios of a sequence's trained tokens as they enter its mean or sum."""
    if spec.surrogate == "gmpo":  # clipped on the side where the token would gain
        for value, a in zip(x.tolist(), advantage.tolist(), strict=True):
            margin(value, *([spec.eps_high] if a > 0 else [-spec.eps_low] if a < 0 else []))
        sign = advantage.sign()
        return sign * torch.minimum(sign * x, sign * x.clamp(-spec.eps_low, spec.eps_high))
    if spec.surrogate == "vespo":  # sampler weights are factors of the sequence's ratio; 0 takes its token out
        logs = torch.where(weight == 0, 1.0, weight).log().clamp(math.log(1e-8), 20.0)
        return x.clamp(-20.0, 20.0) + logs
    return x


def loss(
    spec: Spec,
    logits: Tensor,
    targets: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    transform: Transform | None = None,
    dtype: torch.dtype = torch.float64,
    keep: Tensor | None = None,
    **fields: Tensor | float | None,
) -> tuple[Result, Tensor]:
    """The loss of logits and its gradient with respect to them, in the logits' shape.

    With dtype=torch.float32 the same lines are what a careful trainer would write, and the gradient is rounded to the
    logits' dtype: the naive computation whose error ours must not exceed."""
    leaf = logits.detach().to(torch.float64 if dtype == torch.float64 else logits.dtype).clone().requires_grad_()
    sequences = sequences_of(targets, cu_seqlens)
    rows = targets.numel()
    at = torch.arange(rows) if mask is None else (mask.reshape(-1) != 0).nonzero()[:, 0]
    flat = leaf.reshape(rows, logits.shape[-1])[at].to(dtype)
    picked = Transform() if transform is None else transform
    temperature = to_rows(picked.temperature, sequences, dtype)[at]
    kept = None if keep is None else keep.reshape(rows, -1)[at]
    own = Transform(picked.scale, picked.softcap, temperature)
    _, chosen, h = log_probs(flat, targets.reshape(-1)[at], own, keep=kept)
    logps = torch.zeros(rows, dtype=dtype).index_put((at,), chosen)
    entropy = torch.zeros(rows, dtype=dtype).index_put((at,), h)
    result = objective(spec, logps, entropy, sequences, mask=mask, **fields)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    return replace(result, loss=result.loss.detach()), gradient


def divergence(logps: Tensor, teacher_logps: Tensor, kind: str, mixture: float = 0.0) -> Tensor:
    """[n]: the KL or JSD of rows of log-probs [n, V], by the definition of each. "jsd" has the mixture (1 - mixture) p +
    mixture q (TRL's beta; GKD, 2306.13649). A column counts nothing where the distribution in front has probability 0 there."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        nothing = a == -math.inf
        a, b = a.masked_fill(nothing, 0.0), b.masked_fill(nothing, 0.0)
        return (a.exp() * (a - b)).masked_fill(nothing, 0.0).sum(-1)

    p, q = logps, teacher_logps
    if kind == "reverse":
        return kl(p, q)
    if kind == "forward":
        return kl(q, p)
    nothing = (p == -math.inf) & (q == -math.inf)
    m = torch.logaddexp(p.masked_fill(nothing, 0.0) + math.log1p(-mixture), q.masked_fill(nothing, 0.0) + math.log(mixture))
    m = m.masked_fill(nothing, -math.inf)
    return mixture * kl(q, m) + (1.0 - mixture) * kl(p, m)


def group_advantages(
    rewards: list[float], groups: list[int], *, scale: str = "group", unbiased: bool = True, eps: float = 1e-4
) -> list[float]:
    """(reward - mean of its group) / (std + eps) in Python floats; equal rewards and groups of one give 0."""

    def std(values: list[float]) -> float:
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - unbiased, 1))

    out = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if max(peers) == min(peers):
            out.append(0.0)
            continue
        centred = reward - math.fsum(peers) / len(peers)
        if scale == "none":
            out.append(centred)
        else:
            out.append(centred / (std(peers if scale == "group" else rewards) + eps))
    return out
