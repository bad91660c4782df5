"""Presets, and objectives as a user writes them, each with what the papers say it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from grpo_kernels import Exact, Objective
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
)
from support.oracle import Spec

MEAN, SUM = "seq-mean-token-mean", "seq-mean-token-sum"
CLIP, ISAMPLE = Spec(), Spec("importance-sampling")
TV, KL = replace(ISAMPLE, trust=("tv", 0.2, 0.2, "old")), replace(ISAMPLE, trust=("kl", 0.05, 0.05, "old"))
IPO = replace(ISAMPLE, trust=("symmetric-tv", 0.1, 0.1, "old"))
CLIP_COV, KL_COV = Spec("clip-cov", share=2e-4), Spec("kl-cov", share=2e-4)
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
    "a2po": Spec("regression", pull=1e-3, level="sequence-sum", aggregate=MEAN),
    "sampled_distillation": Spec("policy-gradient", beta=1.0, kl="distillation"),
}

#: name -> (the objective as a user writes it, what the papers say it is)
OBJECTIVES: dict[str, tuple[Callable[[], Objective], Spec]] = {
    **{
        name: (partial(Objective.preset, name), PAPERS[name])
        for name in "grpo dapo bnpo gspo cispo reinforce sapo gmpo vespo rloo importance_sampling dppo_tv".split()
    },
    "dr_grpo": (lambda: Objective.preset("dr_grpo", max_tokens=9), replace(PAPERS["dr_grpo"], max_tokens=9)),
    "means of groups": (lambda: Objective(aggregate="group-mean"), Spec(aggregate="group-mean")),
    "empty sequences do not count": (
        lambda: Objective(aggregate=MEAN, count_empty=False),
        Spec(aggregate=MEAN, count_empty=False),
    ),
    "delta": (lambda: Objective(Clip(0.2, 0.28, delta=3.0)), Spec(eps_high=0.28, delta=3.0)),
    "delta below 1 + eps_high": (lambda: Objective(Clip(0.2, 0.28, delta=1.1)), Spec(eps_high=0.28, delta=1.1)),
    "grpo, k1": (lambda: Objective.preset("grpo", beta=0.3, kl="k1"), Spec(aggregate=MEAN, beta=0.3, kl="k1")),
    "dapo, k2": (lambda: Objective.preset("dapo", beta=0.3, kl="k2"), Spec(eps_high=0.28, beta=0.3, kl="k2")),
    "dapo, k3": (lambda: Objective.preset("dapo", beta=0.04), Spec(eps_high=0.28, beta=0.04)),
    "dapo, entropy": (lambda: Objective.preset("dapo", entropy_coef=0.1), Spec(eps_high=0.28, entropy_coef=0.1)),
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
    "cispo, two-sided": (lambda: Objective(Cispo(cap=1.28, low=0.8)), Spec("cispo", cap=1.28, low=0.8)),
    "cispo, sequence": (lambda: Objective(Cispo(cap=1.3), level="sequence"), Spec("cispo", cap=1.3, level="sequence")),
    "reinforce, k2, sequence-sum": (
        lambda: Objective(PolicyGradient(), aggregate=SUM, beta=0.2, kl="k2"),
        Spec("policy-gradient", aggregate=SUM, beta=0.2, kl="k2"),
    ),
    # ---- other surrogates
    "sapo, sequence-token": (
        lambda: Objective(Sapo(2.0, 3.0), level="sequence-token"),
        Spec("sapo", tau=(2.0, 3.0), level="sequence-token"),
    ),
    "gmpo, k3 by the ratio": (
        lambda: Objective(Gmpo(0.2, 0.3), level="sequence", beta=0.3, kl=Kl("k3", weighting="ratio")),
        Spec("gmpo", eps_low=0.2, eps_high=0.3, level="sequence", beta=0.3, kl_weighting="ratio"),
    ),
    "dro": (lambda: Objective(Dro(0.7)), Spec("dro", pull=0.7)),
    "a2po": (
        lambda: Objective(A2po(0.3), level="sequence-sum", aggregate=MEAN),
        Spec("regression", pull=0.3, level="sequence-sum", aggregate=MEAN),
    ),
    "clip-cov": (
        lambda: Objective(ClipCov(share=1.0)),
        Spec("clip-cov", band=(1.0, 5.0)),
    ),
    "kl-cov": (lambda: Objective(KlCov(0.5, share=0.15)), Spec("kl-cov", pull=0.5, share=0.15)),
    # ---- filters, bounds
    "dppo-tv, numerics of verl": (
        lambda: Objective.preset("dppo_tv", numerics="verl"),
        Spec("cispo", cap=3.0, trust=("tv", 0.2, 0.2, "old"), bounds=(-20.0, 20.0), count_empty=False),
    ),
    "dppo-kl to the sampler, k3": (
        lambda: Objective(ImportanceSampling(), filters=(TrustRegion("kl", 0.05, 0.05, "sampler"),), beta=0.1),
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
        lambda: Objective(aggregate=MEAN, filters=(EntropyQuantile(0.6),), entropy_coef=0.1, entropy_aggregate="token-mean"),
        Spec(aggregate=MEAN, entropy_share=0.6, entropy_coef=0.1, entropy_aggregate="token-mean"),
    ),
    "off-policy sequences": (
        lambda: Objective(Clip(0.4, 0.5), level="sequence", filters=(OffPolicySequences(0.1),)),
        Spec(eps_low=0.4, eps_high=0.5, level="sequence", off_policy=0.1),
    ),
    "bounded log-ratio": (
        lambda: Objective(Clip(delta=3.0), log_ratio_bounds=(-0.7, 0.5), entropy_coef=0.02, count_empty=False),
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
        lambda: Objective.preset("dapo", beta=0.3, kl=Kl("k1", weighting="score", clamp_log=1.1, clamp=0.9)),
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
    # ---- exact divergences; `exact_of` puts in another than the reverse KL
    "dapo, exact": (lambda: Objective.preset("dapo", beta=0.3, kl=Exact()), Spec(eps_high=0.28, beta=0.3, kl="exact")),
    "gspo, exact": (
        lambda: Objective.preset("gspo", beta=0.3, kl=Exact()),
        Spec(eps_low=3e-4, eps_high=4e-4, level="sequence", aggregate=MEAN, beta=0.3, kl="exact"),
    ),
    "distillation, exact": (lambda: Objective.preset("distillation", kl=Exact()), Spec("none", beta=1.0, kl="exact")),
}
