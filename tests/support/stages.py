"""The token stage of an objective, what float64 says of it, and options of an objective, each with what the oracle calls it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.formulas.filters import EntropyFloor, EntropyQuantile, OffPolicySequences, TrustRegion
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import (
    A2po,
    Cispo,
    Clip,
    ClipCov,
    Dro,
    Gmpo,
    ImportanceSampling,
    KlCov,
    PolicyGradient,
    Sapo,
    Surrogate,
    Vespo,
)
from support import oracle
from support.oracle import Spec

Tensor = torch.Tensor
FIELDS = ("advantages", "mask", "old_logps", "ref_logps", "weights", "sampler_logps", "nll_weights", "groups")


def packed(n: int = 6, length: int = 3, **fields: Any) -> TokenBatch:
    """n tokens in packed sequences of this length."""
    fields.setdefault("advantages", torch.ones(n))
    return TokenBatch(torch.zeros(n, dtype=torch.int64), cu_seqlens=torch.arange(0, n + 1, length), **fields)


def run(
    objective: Objective, batch: TokenBatch, logps: Tensor, entropy: Tensor | None = None, normalizer: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(losses, slopes of the log-probs, slopes of the entropies) [n]."""
    return objective.token_stage(logps, entropy, objective.token_rows(batch, normalizer), batch)[:3]


def exact(
    spec: Spec, batch: TokenBatch, logps: Tensor, entropy: Tensor, normalizer: Any = None
) -> tuple[oracle.Result, Tensor, Tensor]:
    """The oracle's result and both gradients of flat fp32 log-probs and entropies."""
    x, h = logps.double().requires_grad_(), entropy.double().requires_grad_()
    sequences = oracle.sequences_of(batch.targets, batch.cu_seqlens)
    given = {name: getattr(batch, name) for name in FIELDS}
    result = oracle.objective(spec, x, h, sequences, normalizer=normalizer, **given)
    d_x, d_h = torch.autograd.grad(result.loss, [x, h], materialize_grads=True)
    return replace(result, loss=result.loss.detach()), d_x, d_h


def near(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Within fp32's rounding of sums of a few dozen terms."""
    if theirs.numel():
        error, scale = (ours.double() - theirs).abs().max(), theirs.abs().max()
        assert error <= 1e-5 * scale + 1e-6, f"{what}: {ours.tolist()} instead of {theirs.tolist()}"


def check(
    spec: Spec, objective: Objective, batch: TokenBatch, logps: Tensor, entropy: Tensor, normalizer: Any = None
) -> oracle.Result:
    """Loss and gradients are the oracle's, and a token that is not trained has none. Nothing is checked where a number lies on a
    bound, which the margin of the result tells."""
    result, d_x, d_h = exact(spec, batch, logps, entropy, normalizer)
    if result.margin < 1e-5:
        return result
    losses, slopes, d_entropy = run(objective, batch, logps, entropy, normalizer)
    assert losses.dtype == slopes.dtype == torch.float32
    near(losses.double().sum(), result.loss, "loss")
    near(slopes, d_x, "slopes")
    assert (d_entropy is None) == (spec.entropy_coef == 0)
    if d_entropy is not None:
        near(d_entropy, d_h, "slopes of the entropy")
    if batch.mask is not None:
        masked = ~batch.mask.reshape(-1)
        assert not any(x[masked].any() for x in (losses, slopes, d_entropy) if x is not None)
    return result


# ---- options


@dataclass(frozen=True)
class Option:
    """Some fields of an objective and of its specification."""

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]


def options(*rows: tuple[str, dict[str, Any], dict[str, Any]]) -> list[Option]:
    return [Option(*row) for row in rows]


SURROGATES: list[tuple[Surrogate, dict[str, Any]]] = [
    (Clip(0.2, 0.3), {"eps_high": 0.3}),
    (Clip(0.3, 0.9, delta=1.1), {"eps_low": 0.3, "eps_high": 0.9, "delta": 1.1}),
    (Cispo(1.3, 0.6), {"surrogate": "cispo", "cap": 1.3, "low": 0.6}),
    (PolicyGradient(), {"surrogate": "policy-gradient"}),
    (ImportanceSampling(), {"surrogate": "importance-sampling"}),
    (Sapo(1.0, 2.0), {"surrogate": "sapo", "tau": (1.0, 2.0)}),
    (Vespo(), {"surrogate": "vespo"}),
    (Gmpo(0.2, 0.25), {"surrogate": "gmpo", "eps_low": 0.2, "eps_high": 0.25}),
    (Dro(0.5), {"surrogate": "dro", "pull": 0.5}),
    (A2po(0.5), {"surrogate": "regression", "pull": 0.5}),
    (ClipCov(0.2, 0.3, share=1.0, low=0.1, high=0.6), {"surrogate": "clip-cov", "eps_high": 0.3, "band": (0.1, 0.6)}),
    (KlCov(0.7, share=0.4), {"surrogate": "kl-cov", "pull": 0.7, "share": 0.4}),
]
LEVELS = ("token", "sequence", "sequence-token", "sequence-sum")


def trust(*args: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    kind, low, high, anchor = args
    return f"{kind} to {anchor}", {"filters": (TrustRegion(kind, low, high, anchor),)}, {"trust": args}


FILTERS = options(
    ("no filter", {}, {}),
    trust("tv", 0.1, 0.12, "old"),
    trust("symmetric-tv", 0.1, 0.12, "sampler"),
    trust("kl", 0.02, 0.03, "old"),
    trust("ratio", 0.3, 0.4, "sampler"),
    ("floor", {"filters": (EntropyFloor(0.8),)}, {"entropy_floor": 0.8}),
    ("quantile", {"filters": (EntropyQuantile(0.57),)}, {"entropy_share": 0.57}),
    ("off-policy", {"filters": (OffPolicySequences(0.05),)}, {"off_policy": 0.05}),
    (
        "tv and quantile",
        {"filters": (TrustRegion("tv", 0.15, 0.15), EntropyQuantile(0.73))},
        {"trust": ("tv", 0.15, 0.15, "old"), "entropy_share": 0.73},
    ),
    (
        "floor and off-policy",
        {"filters": (OffPolicySequences(0.05), EntropyFloor(0.6))},
        {"entropy_floor": 0.6, "off_policy": 0.05},
    ),
)


def kl(name: str, **fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    theirs = {"kl_weighting" if k == "weighting" else k: v for k, v in fields.items()}
    return f"{name} {fields}", {"beta": 0.3, "kl": Kl(name, **fields)}, {"beta": 0.3, "kl": name, **theirs}


KLS = options(
    ("no KL", {}, {}),
    kl("k3"),
    kl("k3", weighting="ratio"),
    kl("abs", weighting="detached-ratio", clamp_log=0.9),
    kl("k1", weighting="score", clamp=0.8),
    kl("k1", weighting="ratio", straight_through=True),
    kl("k2", weighting="score"),
    kl("k3", weighting="ratio", clamp_log=0.9, clamp=0.2),
    kl("k3", straight_through=True, clamp=0.7),
    kl("abs"),
    kl("distillation"),
)
AGGREGATES = options(
    *(
        (name, {"aggregate": name, "max_tokens": 9}, {"aggregate": name, "max_tokens": 9})
        for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "group-mean", "token-sum", "constant")
    ),
    ("not empty", {"aggregate": "seq-mean-token-mean", "count_empty": False}, {"aggregate": "seq-mean-token-mean", "count_empty": False}),
    ("groups, not empty", {"aggregate": "group-mean", "count_empty": False}, {"aggregate": "group-mean", "count_empty": False}),
    ("KL by group", {"kl_aggregate": "group-mean"}, {"kl_aggregate": "group-mean"}),
    ("KL by sequence", {"aggregate": "token-sum", "kl_aggregate": "seq-mean-token-mean"}, {"aggregate": "token-sum", "kl_aggregate": "seq-mean-token-mean"}),
)  # fmt: skip
BONUSES = options(
    ("no bonus", {}, {}),
    ("bonus", {"entropy_coef": 0.2}, {"entropy_coef": 0.2}),
    (
        "bonus of its own",
        {"entropy_coef": -0.1, "entropy_aggregate": "token-mean"},
        {"entropy_coef": -0.1, "entropy_aggregate": "token-mean"},
    ),
    (
        "bonus by sequence",
        {"entropy_coef": 0.1, "entropy_aggregate": "seq-mean-token-sum"},
        {"entropy_coef": 0.1, "entropy_aggregate": "seq-mean-token-sum"},
    ),
)
BOUNDS = options(
    ("no bounds", {}, {}),
    ("bounds", {"log_ratio_bounds": (-0.35, 0.3)}, {"bounds": (-0.35, 0.3)}),
    ("no bounds", {}, {}),
)
