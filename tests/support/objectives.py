"""Objectives of the package, each with the Spec that the oracle computes from the papers.

These are presets, objectives as a user writes them, and single options. Functions of this module
compare the losses of tokens with the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import Exact, Objective, TokenBatch
from grpo_kernels.formulas.filters import (
    EntropyFloor,
    EntropyQuantile,
    OffPolicySequences,
    SamplerMismatch,
    TrustRegion,
)
from grpo_kernels.formulas.future_kl import FutureKl
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

MEAN = "seq-mean-token-mean"
SUM = "seq-mean-token-sum"
CLIP = Spec()
ISAMPLE = Spec("importance-sampling")
TV = replace(ISAMPLE, trust=("tv", 0.2, 0.2, "old"))
KL = replace(ISAMPLE, trust=("kl", 0.05, 0.05, "old"))
IPO = replace(ISAMPLE, trust=("symmetric-tv", 0.1, 0.1, "old"))
CLIP_COV = Spec("clip-cov", share=2e-4)
KL_COV = Spec("kl-cov", share=2e-4)
#: Presets, as the papers have them.
PAPERS: dict[str, Spec] = {
    "grpo": Spec(aggregate=MEAN),
    "dapo": Spec(eps_high=0.28),
    "bnpo": CLIP,
    "dr_grpo": Spec(aggregate="constant"),
    "ppo": Spec(delta=3.0),
    "gspo": Spec(eps_low=3e-4, eps_high=4e-4, level="sequence", aggregate=MEAN),
    "gspo_token": Spec(eps_low=3e-4, eps_high=4e-4, level="sequence-token", aggregate=MEAN),
    "luspo": Spec(level="sequence", aggregate=SUM),
    "gmpo": Spec("gmpo", 0.4, 0.4, level="sequence", aggregate=MEAN),
    "cispo": Spec("cispo", cap=5.0),
    "sapo": Spec("sapo", aggregate=MEAN),
    "vespo": Spec("vespo", level="sequence-sum"),
    "fipo": Spec(eps_high=0.28, delta=10.0, future_kl=(32.0, 1.0, 1.2, 10.0, 10.0)),
    "reinforce": Spec("policy-gradient"),
    "rloo": Spec(level="sequence-sum", aggregate=MEAN),
    "importance_sampling": replace(ISAMPLE, aggregate="token-sum"),
    "dppo_tv": TV,
    "dppo_kl": KL,
    "ipo": IPO,
    "rollout_is": Spec("cispo", cap=math.inf, trust=("ratio", 0.2, 0.2, "old")),
    "clip_cov": CLIP_COV,
    "kl_cov": KL_COV,
    "dro": Spec("dro"),
    "a2po": Spec("regression", coefficient=1e-3, level="sequence-sum", aggregate=MEAN),
    "sampled_distillation": Spec("policy-gradient", beta=1.0, kl="distillation"),
}

#: name -> (the objective as a user writes it, what the papers say it is)
OBJECTIVES: dict[str, tuple[Callable[[], Objective], Spec]] = {
    **{
        name: (partial(Objective.preset, name), PAPERS[name])
        for name in (
            "grpo",
            "dapo",
            "bnpo",
            "gspo",
            "cispo",
            "reinforce",
            "sapo",
            "gmpo",
            "vespo",
            "fipo",
            "rloo",
            "importance_sampling",
            "dppo_tv",
        )
    },
    "dr_grpo": (
        lambda: Objective.preset("dr_grpo", max_tokens=9),
        replace(PAPERS["dr_grpo"], max_tokens=9),
    ),
    "means of groups": (lambda: Objective(aggregate="group-mean"), Spec(aggregate="group-mean")),
    "empty sequences do not count": (
        lambda: Objective(aggregate=MEAN, count_empty=False),
        Spec(aggregate=MEAN, count_empty=False),
    ),
    "delta": (lambda: Objective(Clip(0.2, 0.28, delta=3.0)), Spec(eps_high=0.28, delta=3.0)),
    "delta below 1 + eps_high": (
        lambda: Objective(Clip(0.2, 0.28, delta=1.1)),
        Spec(eps_high=0.28, delta=1.1),
    ),
    "grpo, k1": (
        lambda: Objective.preset("grpo", beta=0.3, kl="k1"),
        Spec(aggregate=MEAN, beta=0.3, kl="k1"),
    ),
    "dapo, k2": (
        lambda: Objective.preset("dapo", beta=0.3, kl="k2"),
        Spec(eps_high=0.28, beta=0.3, kl="k2"),
    ),
    "dapo, k3": (lambda: Objective.preset("dapo", beta=0.04), Spec(eps_high=0.28, beta=0.04)),
    "dapo, entropy": (
        lambda: Objective.preset("dapo", entropy_coef=0.1),
        Spec(eps_high=0.28, entropy_coef=0.1),
    ),
    "grpo, k3 and entropy": (
        lambda: Objective.preset("grpo", beta=0.1, entropy_coef=-0.05),
        Spec(aggregate=MEAN, beta=0.1, entropy_coef=-0.05),
    ),
    "gspo-token": (
        lambda: Objective(Clip(0.2, 0.2), level="sequence-token", aggregate=MEAN),
        Spec(level="sequence-token", aggregate=MEAN),
    ),
    "luspo": (
        lambda: Objective(Clip(0.2, 0.2), level="sequence", aggregate=SUM),
        Spec(level="sequence", aggregate=SUM),
    ),
    "sequence, token-mean, k3 and entropy": (
        lambda: Objective(Clip(0.2, 0.28), level="sequence", beta=0.1, entropy_coef=0.02),
        Spec(eps_high=0.28, level="sequence", beta=0.1, entropy_coef=0.02),
    ),
    "cispo, two-sided": (
        lambda: Objective(Cispo(cap=1.28, low=0.8)),
        Spec("cispo", cap=1.28, low=0.8),
    ),
    "cispo, sequence": (
        lambda: Objective(Cispo(cap=1.3), level="sequence"),
        Spec("cispo", cap=1.3, level="sequence"),
    ),
    "reinforce, k2, sequence-sum": (
        lambda: Objective(PolicyGradient(), aggregate=SUM, beta=0.2, kl="k2"),
        Spec("policy-gradient", aggregate=SUM, beta=0.2, kl="k2"),
    ),
    "fipo, wide and near": (
        lambda: Objective(
            Sapo(), aggregate=MEAN, beta=0.1, future_kl=FutureKl(1.5, 0.3, 2.5, 1.4, 1.2)
        ),
        Spec("sapo", aggregate=MEAN, beta=0.1, future_kl=(1.5, 0.3, 2.5, 1.4, 1.2)),
    ),
    "fipo, filters": (
        lambda: Objective(
            filters=(OffPolicySequences(0.1), EntropyFloor(1.2)),
            entropy_coef=0.1,
            future_kl=FutureKl(4.0, 0.0, 3.0, math.inf, math.inf),
        ),
        Spec(
            off_policy=0.1,
            entropy_floor=1.2,
            entropy_coef=0.1,
            future_kl=(4.0, 0.0, 3.0, math.inf, math.inf),
        ),
    ),
    "far from the sampler": (
        lambda: Objective.preset(
            "grpo", beta=0.1, entropy_coef=0.1, filters=(SamplerMismatch(1.7),)
        ),
        Spec(aggregate=MEAN, beta=0.1, entropy_coef=0.1, sampler_mismatch=(1.7, True)),
    ),
    "far from the sampler, groups": (
        lambda: Objective(
            aggregate="group-mean",
            beta=0.1,
            kl_aggregate="token-mean",
            filters=(SamplerMismatch(1.7),),
        ),
        Spec(
            aggregate="group-mean",
            beta=0.1,
            kl_aggregate="token-mean",
            sampler_mismatch=(1.7, True),
        ),
    ),
    "far from the sampler, gspo, all counted": (
        lambda: Objective(
            Clip(0.3, 0.4),
            level="sequence",
            count_empty=False,
            aggregate=MEAN,
            filters=(SamplerMismatch(1.7, normalize=False),),
        ),
        Spec(
            eps_low=0.3,
            eps_high=0.4,
            level="sequence",
            count_empty=False,
            aggregate=MEAN,
            sampler_mismatch=(1.7, False),
        ),
    ),
    # ---- other surrogates
    "sapo, sequence-token": (
        lambda: Objective(Sapo(2.0, 3.0), level="sequence-token"),
        Spec("sapo", tau=(2.0, 3.0), level="sequence-token"),
    ),
    "gmpo, k3 by the ratio": (
        lambda: Objective(
            Gmpo(0.2, 0.3), level="sequence", beta=0.3, kl=Kl("k3", weighting="ratio")
        ),
        Spec("gmpo", eps_low=0.2, eps_high=0.3, level="sequence", beta=0.3, kl_weighting="ratio"),
    ),
    "dro": (lambda: Objective(Dro(0.7)), Spec("dro", coefficient=0.7)),
    "a2po": (
        lambda: Objective(A2po(0.3), level="sequence-sum", aggregate=MEAN),
        Spec("regression", coefficient=0.3, level="sequence-sum", aggregate=MEAN),
    ),
    "clip-cov": (
        lambda: Objective(ClipCov(share=1.0)),
        Spec("clip-cov", band=(1.0, 5.0)),
    ),
    "kl-cov": (
        lambda: Objective(KlCov(0.5, share=0.15)),
        Spec("kl-cov", coefficient=0.5, share=0.15),
    ),
    # ---- filters, bounds
    "dppo-tv, numerics of verl": (
        lambda: Objective.preset("dppo_tv", numerics="verl"),
        Spec(
            "cispo", cap=3.0, trust=("tv", 0.2, 0.2, "old"), bounds=(-20.0, 20.0), count_empty=False
        ),
    ),
    "dppo-kl to the sampler, k3": (
        lambda: Objective(
            ImportanceSampling(), filters=(TrustRegion("kl", 0.05, 0.05, "sampler"),), beta=0.1
        ),
        Spec("importance-sampling", trust=("kl", 0.05, 0.05, "sampler"), beta=0.1),
    ),
    "ipo, k2": (
        lambda: Objective.preset("ipo", numerics="prime-rl", beta=0.2),
        Spec("importance-sampling", trust=("symmetric-tv", 0.1, 0.1, "old"), beta=0.2, kl="k2"),
    ),
    "ratio region of the sampler": (
        lambda: Objective(Clip(), filters=(TrustRegion("ratio", 0.4, 0.5, "sampler"),)),
        Spec(trust=("ratio", 0.4, 0.5, "sampler")),
    ),
    "entropy floor and bonus": (
        lambda: Objective(filters=(EntropyFloor(1.2),), entropy_coef=0.2),
        Spec(entropy_floor=1.2, entropy_coef=0.2),
    ),
    "entropy quantile, bonus of its own": (
        lambda: Objective(
            aggregate=MEAN,
            filters=(EntropyQuantile(0.6),),
            entropy_coef=0.1,
            entropy_aggregate="token-mean",
        ),
        Spec(aggregate=MEAN, entropy_share=0.6, entropy_coef=0.1, entropy_aggregate="token-mean"),
    ),
    "off-policy sequences": (
        lambda: Objective(Clip(0.4, 0.5), level="sequence", filters=(OffPolicySequences(0.1),)),
        Spec(eps_low=0.4, eps_high=0.5, level="sequence", off_policy=0.1),
    ),
    "bounded log-ratio": (
        lambda: Objective(
            Clip(delta=3.0), log_ratio_bounds=(-0.7, 0.5), entropy_coef=0.02, count_empty=False
        ),
        Spec(delta=3.0, bounds=(-0.7, 0.5), entropy_coef=0.02, count_empty=False),
    ),
    "bounded log-ratio, sequence": (
        lambda: Objective(Clip(0.5, 0.9), level="sequence", log_ratio_bounds=(-0.4, 0.45)),
        Spec(eps_low=0.5, eps_high=0.9, level="sequence", bounds=(-0.4, 0.45)),
    ),
    # ---- KL
    "grpo, numerics of trl": (
        lambda: Objective.preset("grpo", numerics="trl", beta=0.3),
        Spec(aggregate=MEAN, beta=0.3, kl_weighting="ratio"),
    ),
    "gspo, k3 by the ratio": (
        lambda: Objective(Clip(), level="sequence", beta=0.3, kl=Kl("k3", weighting="ratio")),
        Spec(level="sequence", beta=0.3, kl_weighting="ratio"),
    ),
    "dapo, k1 by the score, clamped": (
        lambda: Objective.preset(
            "dapo", beta=0.3, kl=Kl("k1", weighting="score", clamp_log=1.1, clamp=0.9)
        ),
        Spec(eps_high=0.28, beta=0.3, kl="k1", kl_weighting="score", clamp_log=1.1, clamp=0.9),
    ),
    "dapo, k3+ of its own": (
        lambda: Objective.preset("dapo", beta=0.3, kl="k3+", kl_aggregate=MEAN),
        Spec(eps_high=0.28, beta=0.3, straight_through=True, kl_aggregate=MEAN),
    ),
    "dapo, abs by the detached ratio": (
        lambda: Objective.preset("dapo", beta=0.3, kl=Kl("abs", weighting="detached-ratio")),
        Spec(eps_high=0.28, beta=0.3, kl="abs", kl_weighting="detached-ratio"),
    ),
    "distillation": (
        lambda: Objective.preset("sampled_distillation"),
        Spec("policy-gradient", beta=1.0, kl="distillation"),
    ),
    "grpo, sdar": (
        lambda: Objective.preset("grpo", beta=0.3, kl="sdar", kl_aggregate="token-mean"),
        Spec(aggregate=MEAN, beta=0.3, kl="sdar", kl_aggregate="token-mean"),
    ),
    # ---- exact divergences. `make_objective` (public_functions.py) replaces Exact() by others
    "dapo, exact": (
        lambda: Objective.preset("dapo", beta=0.3, kl=Exact()),
        Spec(eps_high=0.28, beta=0.3, kl="exact"),
    ),
    "gspo, exact": (
        lambda: Objective.preset("gspo", beta=0.3, kl=Exact()),
        Spec(eps_low=3e-4, eps_high=4e-4, level="sequence", aggregate=MEAN, beta=0.3, kl="exact"),
    ),
    "distillation, exact": (
        lambda: Objective.preset("distillation", kl=Exact()),
        Spec("none", beta=1.0, kl="exact"),
    ),
}

FIELDS = (
    "advantages",
    "mask",
    "old_logps",
    "ref_logps",
    "weights",
    "sampler_logps",
    "nll_weights",
    "groups",
)


def packed(n: int = 6, length: int = 3, **fields: Any) -> TokenBatch:
    """Return a batch of n tokens in packed sequences of this length, with targets 0.

    n        a multiple of `length`
    fields   further fields of the batch. Advantages are 1 if they are not given.
    """
    fields.setdefault("advantages", torch.ones(n))
    return TokenBatch(
        torch.zeros(n, dtype=torch.int64), cu_seqlens=torch.arange(0, n + 1, length), **fields
    )


def package_losses(
    objective: Objective,
    batch: TokenBatch,
    logps: Tensor,
    entropy: Tensor | None = None,
    normalizer: Any = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the package's loss of each token and its gradients in log-prob and entropy, fp32 [n].

    The gradient in entropy is None without an entropy bonus.

    objective, batch   of the package, with n tokens
    logps, entropy     fp32 [n], of the policy
    normalizer         see `Objective.token_inputs`
    """
    inputs = objective.token_inputs(batch, normalizer)
    result = objective.token_losses(logps, entropy, inputs, batch)
    return result.losses, result.grad_logps, result.grad_entropy


def oracle_losses(
    spec: Spec, batch: TokenBatch, logps: Tensor, entropy: Tensor, normalizer: Any = None
) -> tuple[oracle.Result, Tensor, Tensor]:
    """Return the result of the oracle, and the gradients of its loss in log-probs and entropies.

    The gradients are float64 [n], 0 for what the loss does not depend on.

    spec             the loss
    batch            advantages, mask and the other FIELDS of n tokens
    logps, entropy   fp32 [n], of the policy
    normalizer       see `oracle.objective`
    """
    wide_logps = logps.double().requires_grad_()
    wide_entropy = entropy.double().requires_grad_()
    sequences = oracle.sequences_of(batch.targets, batch.cu_seqlens)
    fields = {name: getattr(batch, name) for name in FIELDS}
    result = oracle.objective(
        spec, wide_logps, wide_entropy, sequences, normalizer=normalizer, **fields
    )
    grad_logps, grad_entropy = torch.autograd.grad(
        result.loss, [wide_logps, wide_entropy], materialize_grads=True
    )
    return replace(result, loss=result.loss.detach()), grad_logps, grad_entropy


def _assert_near(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Assert equality up to the fp32 rounding of sums of a few dozen terms.

    ours     of the package
    theirs   of the oracle, float64 in the same shape
    what     for the error message
    """
    if theirs.numel():
        error = (ours.double() - theirs).abs().max()
        size = theirs.abs().max()
        assert error <= 1e-5 * size + 1e-6, f"{what}: {ours.tolist()} instead of {theirs.tolist()}"


def assert_matches_oracle(
    spec: Spec,
    objective: Objective,
    batch: TokenBatch,
    logps: Tensor,
    entropy: Tensor,
    normalizer: Any = None,
) -> oracle.Result:
    """Assert that the package has the oracle's loss and gradients. Return the oracle's result.

    Masked tokens must have a loss and gradients of 0. Nothing is asserted if a number is so near a
    bound (see Result.margin) that rounding may move it across.

    spec             what `objective` is by the papers
    logps, entropy   fp32 [n], of the policy
    normalizer       of the loss, see `oracle.objective`
    """
    result, exact_grad_logps, exact_grad_entropy = oracle_losses(
        spec, batch, logps, entropy, normalizer
    )
    if result.margin < 1e-5:
        return result
    losses, grad_logps, grad_entropy = package_losses(objective, batch, logps, entropy, normalizer)
    assert losses.dtype == grad_logps.dtype == torch.float32
    _assert_near(losses.double().sum(), result.loss, "loss")
    _assert_near(grad_logps, exact_grad_logps, "gradient of the log-probs")
    assert (grad_entropy is None) == (spec.entropy_coef == 0)
    if grad_entropy is not None:
        _assert_near(grad_entropy, exact_grad_entropy, "gradient of the entropy")
    if batch.mask is not None:
        masked = ~batch.mask.reshape(-1)
        for x in (losses, grad_logps, grad_entropy):
            assert x is None or not x[masked].any()
    return result


# ---- options


@dataclass(frozen=True)
class Option:
    """An option of an objective.

    name     for the names of test cases
    ours     the fields of the package's Objective that switch it on
    theirs   the fields of the oracle's Spec that do so
    """

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]


def options(*rows: tuple[str, dict[str, Any], dict[str, Any]]) -> list[Option]:
    """Return options from rows (name, ours, theirs), see `Option`."""
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
    (Dro(0.5), {"surrogate": "dro", "coefficient": 0.5}),
    (A2po(0.5), {"surrogate": "regression", "coefficient": 0.5}),
    (
        ClipCov(0.2, 0.3, share=1.0, low=0.1, high=0.6),
        {"surrogate": "clip-cov", "eps_high": 0.3, "band": (0.1, 0.6)},
    ),
    (KlCov(0.7, share=0.4), {"surrogate": "kl-cov", "coefficient": 0.7, "share": 0.4}),
]
LEVELS = ("token", "sequence", "sequence-token", "sequence-sum")


def trust(
    kind: str, low: float, high: float, anchor: str
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the row (name, fields of Objective, fields of Spec) of a trust region for `options`.

    kind        the distance: "tv", "symmetric-tv", "kl" or "ratio"
    low, high   bounds of the distance, for a fallen and a risen probability
    anchor      from which policy the distance is measured: "old" or "sampler"
    """
    ours = {"filters": (TrustRegion(kind, low, high, anchor),)}
    theirs = {"trust": (kind, low, high, anchor)}
    return f"{kind} to {anchor}", ours, theirs


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
        "off-policy by token",
        {"filters": (OffPolicySequences(0.05, "token"),)},
        {"off_policy": 0.05, "off_policy_by": "token"},
    ),
    (
        "tv and quantile",
        {"filters": (TrustRegion("tv", 0.15, 0.15), EntropyQuantile(0.73))},
        {"trust": ("tv", 0.15, 0.15, "old"), "entropy_share": 0.73},
    ),
    (
        "sampler",
        {"filters": (SamplerMismatch(1.4),)},
        {"sampler_mismatch": (1.4, True)},
    ),
    (
        "sampler, all counted",
        {"filters": (SamplerMismatch(1.4, normalize=False),)},
        {"sampler_mismatch": (1.4, False)},
    ),
    (
        "sampler and off-policy",
        {"filters": (OffPolicySequences(0.05), SamplerMismatch(1.5))},
        {"sampler_mismatch": (1.5, True), "off_policy": 0.05},
    ),
    (
        "floor and off-policy",
        {"filters": (OffPolicySequences(0.05), EntropyFloor(0.6))},
        {"entropy_floor": 0.6, "off_policy": 0.05},
    ),
)


def kl(name: str, **fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the row (name, fields of Objective, fields of Spec) of a KL estimate for `options`.

    name     the estimator, such as "k3"
    fields   of `Kl`. Spec has the same names, except for `kl_weighting`.
    """
    ours = {"beta": 0.3, "kl": Kl(name, **fields)}
    theirs = {"beta": 0.3, "kl": name, **fields}
    if "weighting" in theirs:
        theirs["kl_weighting"] = theirs.pop("weighting")
    return f"{name} {fields}", ours, theirs


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
    kl("sdar"),
    kl("sdar", weighting="ratio", clamp=0.8),
)


def same_fields(name: str, **fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the row (name, fields of Objective, fields of Spec) of fields that both have alike."""
    return name, dict(fields), dict(fields)


AGGREGATES = options(
    same_fields("token-mean", aggregate="token-mean", max_tokens=9),
    same_fields(MEAN, aggregate=MEAN, max_tokens=9),
    same_fields(SUM, aggregate=SUM, max_tokens=9),
    same_fields("group-mean", aggregate="group-mean", max_tokens=9),
    same_fields("token-sum", aggregate="token-sum", max_tokens=9),
    same_fields("constant", aggregate="constant", max_tokens=9),
    same_fields("not empty", aggregate=MEAN, count_empty=False),
    same_fields("groups, not empty", aggregate="group-mean", count_empty=False),
    same_fields("KL by group", kl_aggregate="group-mean"),
    same_fields("KL by sequence", aggregate="token-sum", kl_aggregate=MEAN),
)
BONUSES = options(
    same_fields("no bonus"),
    same_fields("bonus", entropy_coef=0.2),
    same_fields("bonus of its own", entropy_coef=-0.1, entropy_aggregate="token-mean"),
    same_fields("bonus by sequence", entropy_coef=0.1, entropy_aggregate=SUM),
)
BOUNDS = options(
    ("no bounds", {}, {}),
    ("bounds", {"log_ratio_bounds": (-0.35, 0.3)}, {"bounds": (-0.35, 0.3)}),
    ("no bounds", {}, {}),
)
