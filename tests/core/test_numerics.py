"""Presets, as the papers have them, and `numerics=trainer`, as the trainers' code has them, against
the float64 oracle.

TRL, verl and Liger are also run themselves, in tests/integrations; the others cannot be installed
next to this package. Each row says what a paper or a trainer computes. Log-ratios reach beyond
every clamp; a masked sequence and a zero advantage are there.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import Exact, NoPolicyTerm, Objective, TokenBatch
from grpo_kernels.objective import NUMERICS, PRESETS
from support import objectives as stages
from support.objectives import KL_COV, MEAN, PAPERS
from support.oracle import Spec
from support.trainers import MASK, B, T, drawn

INF = math.inf
WIDE, LOW10, BUDGET = (-20.0, 20.0), (-INF, 10.0), 9


def of_papers(names, **changes):
    """Rows of PAPERS, the ratio of GSPO clipped as tokens are, with what a trainer has of its
    own.
    """
    ours = PAPERS | {"gspo": Spec(level="sequence", aggregate=MEAN)}
    return {name: replace(ours[name], **changes) for name in names.split()}


TRL = {"kl_weighting": "ratio", "entropy_aggregate": "token-mean"}
VERL = {"clamp_log": 20.0, "clamp": 10.0, "count_empty": False}
OPENRLHF = {
    "kl": "k1",
    "clamp": 10.0,
    "kl_aggregate": "token-mean",
    "entropy_aggregate": "token-mean",
}
NEMO = {"kl_weighting": "score", "clamp_log": 20.0, "clamp": 10.0, "beta": 0.01}
SKYRL = {
    "clamp_log": 20.0, "clamp": 10.0, "kl_aggregate": MEAN, "entropy_aggregate": "token-mean", "beta": 1e-3
}  # fmt: skip
TWO_SIDED = Spec("cispo", cap=1.2, low=0.8)
FAMILY = "grpo dapo bnpo dr_grpo gspo cispo sapo vespo"
SYMMETRIC = {"eps_high": 0.2}  # of dapo: its upper bound is the user's

TRAINERS = {
    "trl": (
        of_papers(f"{FAMILY} luspo rloo a2po", **TRL)
        | of_papers("dapo", **SYMMETRIC, **TRL)
        | of_papers("gmpo", entropy_aggregate="token-mean")
    ),
    "liger": of_papers(f"{FAMILY} luspo", beta=0.04) | of_papers("dapo", **SYMMETRIC, beta=0.04),
    "unsloth": (
        of_papers(FAMILY) | of_papers("dapo", **SYMMETRIC) | of_papers("dr_grpo", max_tokens=8192)
    ),
    "verl": (
        of_papers("dr_grpo ppo", delta=3.0, bounds=WIDE, **VERL)
        | {
            "grpo": Spec(delta=3.0, bounds=WIDE, **VERL),
            "dapo": Spec(eps_high=0.28, delta=3.0, bounds=WIDE, **VERL),
            "gspo": Spec(level="sequence-token", aggregate=MEAN, bounds=LOW10, **VERL),
            "gspo_token": Spec(level="sequence-token", aggregate=MEAN, bounds=LOW10, **VERL),
            "sapo": replace(PAPERS["sapo"], bounds=WIDE, **VERL),
            "gmpo": Spec("gmpo", level="sequence", aggregate=MEAN, **{**VERL, "count_empty": True}),
            "cispo": replace(TWO_SIDED, bounds=WIDE, **VERL),
            "dppo_tv": Spec("cispo", cap=3.0, trust=("tv", 0.2, 0.2, "old"), bounds=WIDE, **VERL),
            "dppo_kl": Spec("cispo", cap=3.0, trust=("kl", 0.2, 0.2, "old"), bounds=WIDE, **VERL),
            "kl_cov": replace(KL_COV, coefficient=0.1, **VERL),
        }
        | of_papers("reinforce clip_cov dro", **VERL)
    ),
    "openrlhf": {
        "grpo": Spec(bounds=WIDE, **OPENRLHF),
        "dapo": Spec(eps_high=0.28, bounds=WIDE, **OPENRLHF),
        "gspo": Spec(level="sequence", aggregate=MEAN, count_empty=False, **OPENRLHF),
    },
    "slime": (
        of_papers("grpo dapo gspo", kl="k1")
        | {"cispo": replace(TWO_SIDED, aggregate=MEAN, kl="k1")}
    ),
    "areal": of_papers("dapo") | of_papers("grpo gspo sapo", aggregate="token-mean"),
    "nemo-rl": (
        of_papers("dapo gspo reinforce", **NEMO)
        | {
            "grpo": Spec(**NEMO),
            "cispo": replace(TWO_SIDED, **NEMO),
        }
    ),
    "skyrl": (
        of_papers("dapo sapo cispo dppo_tv dppo_kl", bounds=WIDE, **SKYRL)
        | of_papers("importance_sampling rollout_is clip_cov", **SKYRL)
        | {
            "grpo": Spec(bounds=WIDE, **SKYRL),
            "ppo": Spec(delta=3.0, bounds=WIDE, **SKYRL),
            "gspo": Spec(level="sequence-token", aggregate=MEAN, bounds=LOW10, **SKYRL),
            "kl_cov": Spec("kl-cov", share=0.2, **SKYRL),
        }
    ),
    # kappa (log r)^2 with kappa = 1e-3, and k2 has a half in it.
    "prime-rl": of_papers("dppo_tv ipo", beta=2e-3, kl="k2") | of_papers("sampled_distillation"),
    "torchtitan": dict.fromkeys(("grpo", "dapo"), Spec(bounds=(-10.0, 10.0))),
}
ALL = {"the paper": PAPERS, **TRAINERS}
WITHOUT_KL = ("areal", "torchtitan")


# ---- the batch

Data = dict[str, Tensor]


def data():
    """fp32 [B, T], as adapters have it: ratios around the clip ranges and a KL within its clamps;
    log-ratios beyond 10 and 20; a KL beyond its clamps; advantages of whole sequences; ratios
    around the bounds of GSPO.
    """
    x, far, g = drawn(), drawn(far=True), torch.Generator().manual_seed(21)
    near = {
        "logps": x.logps,
        "old_logps": x.old,
        "ref_logps": x.ref,
        "advantages": x.advantages,
        "entropy": torch.rand(B, T, generator=g) + 0.5,
    }
    yield "near", near
    yield "far", near | {"logps": far.logps, "old_logps": far.old, "ref_logps": far.ref}
    beyond = torch.tensor([2.7, -25.0, 4.0, -12.0]).repeat(3) * (torch.arange(B) % 3 == 0)[:, None]
    yield "far reference", near | {"ref_logps": x.ref + beyond}
    yield "advantages of sequences", near | {"advantages": x.advantages[:, :1].expand(B, T)}
    moved = 1e-4 * torch.tensor([3.0, -3.0, -2.0, 0.0, 1.0, 1.0, 0.0, 2.0])[:, None]
    yield "hardly moved", near | {"old_logps": x.logps - moved}


DATA = dict(data())


def within_reach(spec, x):
    """Where no clamp bounds a ratio, e^21 would hide everything else; a trust region compares
    probabilities.
    """
    if spec.trust is not None:
        x = x | {"old_logps": x["old_logps"].clamp(max=-0.01)}
    free = spec.bounds is None and spec.surrogate != "vespo"
    return (
        x
        | {
            "old_logps": torch.maximum(
                x["old_logps"], x["logps"] - (2.5 if spec.level == "sequence-sum" else 9.5)
            )
        }
        if free
        else x
    )


@pytest.mark.usefixtures("lots_in_order")
@pytest.mark.parametrize(
    "trainer, name", [(trainer, name) for trainer, rows in ALL.items() for name in rows]
)
def test_numbers(trainer, name):
    """With the weights of KL and bonus that the preset has, and with some of ours; masked tokens
    hold NaN.
    """
    spec, numerics = ALL[trainer][name], {} if trainer == "the paper" else {"numerics": trainer}
    budget = (
        {"max_tokens": BUDGET} if spec.aggregate == "constant" and spec.max_tokens is None else {}
    )
    assert Objective.preset(name, **numerics).beta == spec.beta
    for changes in (
        {},
        {"beta": spec.beta if trainer in WITHOUT_KL else 0.3, "entropy_coef": 0.02},
    ):
        objective, theirs = (
            Objective.preset(name, **numerics, **budget, **changes),
            replace(spec, **budget, **changes),
        )
        margins = []
        for given in DATA.values():
            x = within_reach(spec, given)
            fields = {
                key: torch.where(MASK, value, math.nan)
                for key, value in x.items()
                if key not in ("logps", "entropy")
            }
            batch = TokenBatch(torch.zeros(B, T, dtype=torch.int64), mask=MASK, **fields)
            logps, entropy = (x[name].reshape(-1) for name in ("logps", "entropy"))
            margins.append(
                stages.assert_matches_oracle(theirs, objective, batch, logps, entropy).margin
            )
        assert sorted(margins)[1] > 1e-5, "too few were compared: a number lies at a bound"


def test_every_preset_and_every_numerics_is_here():
    assert {*PRESETS} == {*PAPERS, "distillation"}
    assert Objective.preset("distillation") == Objective(
        NoPolicyTerm(), beta=1.0, kl=Exact("reverse")
    )
    assert {t: {*rows} for t, rows in NUMERICS.items()} == {
        t: {*rows} for t, rows in TRAINERS.items()
    }
