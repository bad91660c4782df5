"""The reference that everything else is measured against: plain torch and autograd, float64, slow and obvious.

Written from the papers (PPO 1707.06347, GRPO 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783, INTELLECT-2 2505.07291, CISPO
2506.13585, GSPO 2507.18071; KL estimators: Schulman 2020). It imports nothing of the package under test.

Masked rows are left out by indexing, never multiplied by 0, so whatever they hold cannot reach a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Spec:
    """What to compute, in plain words: one field per choice."""

    surrogate: str = "clip"  # clip, cispo, policy-gradient
    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float | None = None
    cap: float = 5.0
    low: float = 0.0
    level: str = "token"  # token, sequence, sequence-token
    aggregate: str = "token-mean"  # token-mean, seq-mean-token-mean, seq-mean-token-sum, constant
    beta: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    max_tokens: int | None = None


@dataclass(frozen=True)
class Transform:
    scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0


@dataclass(frozen=True)
class Result:
    """Tensors are flat [N]; rows that are not trained hold 0 (log_ratio and sides: trained rows only, in order)."""

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    kl: Tensor
    log_ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


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
    logits: Tensor, targets: Tensor, transform: Transform | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """All log-probs [n, V], log-probs of the targets [n] and entropies [n]; a row with p = 0 somewhere is fine."""
    transform = transform or Transform()
    temperature = to_rows(transform.temperature, sequences_of(targets, cu_seqlens), logits.dtype)
    z = logits.reshape(-1, logits.shape[-1]) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    log_p = torch.log_softmax(z / temperature[:, None], dim=-1)
    chosen = log_p.gather(1, targets.reshape(-1, 1).to(torch.int64))[:, 0]
    finite = torch.where(log_p.detach() == -math.inf, 0.0, log_p)  # lim p log p = 0
    return log_p, chosen, -(log_p.exp() * finite).sum(1)


def surrogate(spec: Spec, log_ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
    """Per-token policy loss; autograd through it is the definition of the slope."""
    r = torch.exp(log_ratio)
    if spec.surrogate == "policy-gradient":
        return -advantage * logp
    if spec.surrogate == "cispo":
        return -(r.clamp(spec.low, spec.cap) * advantage).detach() * logp
    assert spec.surrogate == "clip"
    unclipped = r if spec.delta is None else r.clamp(max=spec.delta)
    return -torch.minimum(unclipped * advantage, r.clamp(1 - spec.eps_low, 1 + spec.eps_high) * advantage)


def kl_estimate(name: str, logp: Tensor, ref: Tensor) -> Tensor:
    d = ref - logp
    return {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - d - 1}[name]


def ratio_bounds(spec: Spec) -> tuple[float, float]:
    if spec.surrogate == "clip":
        return 1 - spec.eps_low, 1 + spec.eps_high
    return (spec.low, spec.cap) if spec.surrogate == "cispo" else (0.0, math.inf)


def denominator(spec: Spec, mask: Tensor, sequences: list[list[int]]) -> float:
    """Of one process and one micro-batch; a fully masked sequence counts in B."""
    if spec.aggregate == "token-mean":
        count = float(mask.sum())
    else:
        count = float(len(sequences))
        if spec.aggregate == "constant":
            assert spec.max_tokens is not None
            count *= spec.max_tokens
    return max(count, 1.0)


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
    normalizer: float | None = None,
) -> Result:
    """The loss of flat log-probs and entropies [N], sequence by sequence."""
    dtype, rows = logps.dtype, logps.numel()
    trained = torch.ones(rows, dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
    advantage = to_rows(advantages, sequences, dtype)
    weight = to_rows(1.0 if weights is None else weights, sequences, dtype)
    kept = trained.tolist()
    total = logps[:0].sum()
    kl = torch.zeros(rows, dtype=dtype)
    log_ratio = torch.zeros(rows, dtype=dtype)
    for sequence in sequences:
        at = [i for i in sequence if kept[i]]
        if not at:
            continue
        logp, a = logps[at], advantage[at]
        x = logp - (logp.detach() if old_logps is None else old_logps.detach().reshape(-1)[at].to(dtype))
        if spec.level == "sequence":
            x = x.mean().expand(len(at))
        elif spec.level == "sequence-token":
            x = x.mean().detach() + logp - logp.detach()
        terms = weight[at] * surrogate(spec, x, logp, a)
        if ref_logps is not None:
            k = kl_estimate(spec.kl, logp, ref_logps.detach().reshape(-1)[at].to(dtype))
            kl[at] = k.detach()
            if spec.beta != 0:
                terms = terms + spec.beta * k
        if spec.entropy_coef != 0:
            terms = terms - spec.entropy_coef * entropy[at]
        total = total + (terms.mean() if spec.aggregate == "seq-mean-token-mean" else terms.sum())
        log_ratio[at] = x.detach()
    d = denominator(spec, trained, sequences) if normalizer is None else float(normalizer)
    low, high = ratio_bounds(spec)
    r = log_ratio[trained].exp()
    return Result(
        loss=total / d,
        logps=torch.where(trained, logps.detach(), 0.0),
        entropy=torch.where(trained, entropy.detach(), 0.0),
        kl=kl,
        log_ratio=log_ratio[trained],
        clipped_low=(r < low) & (advantage[trained] < 0),
        clipped_high=(r > high) & (advantage[trained] > 0),
    )


def loss(
    spec: Spec,
    logits: Tensor,
    targets: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    transform: Transform | None = None,
    dtype: torch.dtype = torch.float64,
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
    _, chosen, h = log_probs(flat, targets.reshape(-1)[at], Transform(picked.scale, picked.softcap, temperature))
    logps = torch.zeros(rows, dtype=dtype).index_put((at,), chosen)
    entropy = torch.zeros(rows, dtype=dtype).index_put((at,), h)
    result = objective(spec, logps, entropy, sequences, mask=mask, **fields)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    return replace(result, loss=result.loss.detach()), gradient


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
