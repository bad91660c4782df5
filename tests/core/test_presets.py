"""Presets and the trainers' numerics, with values typed from the papers and the trainers' code, and the refusals of a preset."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from grpo_kernels import Exact, NoPolicyTerm, Objective, TokenBatch
from grpo_kernels.formulas.filters import TrustRegion
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
    check_surrogate,
)
from grpo_kernels.presets import NUMERICS, PRESETS

MEAN, SUM = "seq-mean-token-mean", "seq-mean-token-sum"

#: Surrogate, level and aggregate of each preset, typed from the papers, and what else it has.
PINNED: dict[str, tuple[Surrogate, str, str, dict[str, Any]]] = {
    "grpo": (Clip(0.2, 0.2), "token", MEAN, {}),
    "dapo": (Clip(0.2, 0.28), "token", "token-mean", {}),
    "bnpo": (Clip(0.2, 0.2), "token", "token-mean", {}),
    "dr_grpo": (Clip(0.2, 0.2), "token", "constant", {}),
    "ppo": (Clip(0.2, 0.2, 3.0), "token", "token-mean", {}),
    "gspo": (Clip(3e-4, 4e-4), "sequence", MEAN, {}),
    "gspo_token": (Clip(3e-4, 4e-4), "sequence-token", MEAN, {}),
    "luspo": (Clip(0.2, 0.2), "sequence", SUM, {}),
    "gmpo": (Gmpo(0.4, 0.4), "sequence", MEAN, {}),
    "cispo": (Cispo(5.0, 0.0), "token", "token-mean", {}),
    "sapo": (Sapo(1.0, 1.05), "token", MEAN, {}),
    "vespo": (Vespo(2.0, 3.0, 3.0, 2.0), "sequence-sum", "token-mean", {}),
    "reinforce": (PolicyGradient(), "token", "token-mean", {}),
    "rloo": (Clip(0.2, 0.2), "sequence-sum", MEAN, {}),
    "importance_sampling": (ImportanceSampling(), "token", "token-sum", {}),
    "dppo_tv": (ImportanceSampling(), "token", "token-mean", {"filters": (TrustRegion("tv", 0.2, 0.2),)}),
    "dppo_kl": (ImportanceSampling(), "token", "token-mean", {"filters": (TrustRegion("kl", 0.05, 0.05),)}),
    "ipo": (ImportanceSampling(), "token", "token-mean", {"filters": (TrustRegion("symmetric-tv", 0.1, 0.1),)}),
    "rollout_is": (Cispo(math.inf, 0.0), "token", "token-mean", {"filters": (TrustRegion("ratio", 0.2, 0.2),)}),
    "clip_cov": (ClipCov(0.2, 0.2, 2e-4, 1.0, 5.0), "token", "token-mean", {}),
    "kl_cov": (KlCov(1.0, 2e-4), "token", "token-mean", {}),
    "dro": (Dro(1.0), "token", "token-mean", {}),
    "a2po": (A2po(1e-3), "sequence-sum", MEAN, {}),
    "distillation": (NoPolicyTerm(), "token", "token-mean", {"beta": 1.0, "kl": Exact("reverse")}),
    "sampled_distillation": (PolicyGradient(), "token", "token-mean", {"beta": 1.0, "kl": "distillation"}),
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name: str) -> None:
    surrogate, level, aggregate, rest = PINNED[name]
    objective = Objective.preset(name)
    assert objective == Objective(surrogate=surrogate, level=level, aggregate=aggregate, **rest)
    changed = Objective.preset(name, beta=0.04, kl="k2")
    assert changed == replace(objective, beta=0.04, kl="k2") and Objective.preset(name) == objective
    check_surrogate(objective.surrogate)


def test_every_preset_is_pinned() -> None:
    assert set(PRESETS) == set(PINNED)


# ---- numerics

BY_RATIO = Kl("k3", "ratio")
VERL_KL = Kl("k3", clamp_log=20.0, clamp=10.0)
NEMO_KL = Kl("k3", "score", clamp_log=20.0, clamp=10.0)
LOW, WIDE, TEN = (-math.inf, 10.0), (-20.0, 20.0), (-10.0, 10.0)
HIGHER, DUAL, TWO_SIDED = Clip(0.2, 0.28), Clip(0.2, 0.2, 3.0), Cispo(1.2, 0.8)

#: What each preset is, less what Objective() has anyway: (fields that all of a trainer's share, fields of each).
THEIRS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "trl": (
        {"kl": BY_RATIO, "entropy_aggregate": "token-mean"},
        {
            "grpo": {"aggregate": MEAN},
            "dapo": {},
            "bnpo": {},
            "dr_grpo": {"aggregate": "constant"},
            "gspo": {"level": "sequence", "aggregate": MEAN},
            "luspo": {"level": "sequence", "aggregate": SUM},
            "cispo": {"surrogate": Cispo(5.0)},
            "sapo": {"surrogate": Sapo(1.0, 1.05), "aggregate": MEAN},
            "vespo": {"surrogate": Vespo(2.0, 3.0, 3.0, 2.0), "level": "sequence-sum"},
            "gmpo": {"surrogate": Gmpo(0.4, 0.4), "level": "sequence", "aggregate": MEAN, "kl": "k3"},
            "rloo": {"level": "sequence-sum", "aggregate": MEAN},
            "a2po": {"surrogate": A2po(1e-3), "level": "sequence-sum", "aggregate": MEAN},
        },
    ),
    "liger": (
        {"beta": 0.04},
        {
            "grpo": {"aggregate": MEAN},
            "dapo": {},
            "bnpo": {},
            "dr_grpo": {"aggregate": "constant"},
            "gspo": {"level": "sequence", "aggregate": MEAN},
            "luspo": {"level": "sequence", "aggregate": SUM},
            "cispo": {"surrogate": Cispo(5.0)},
            "sapo": {"surrogate": Sapo(1.0, 1.05), "aggregate": MEAN},
            "vespo": {"surrogate": Vespo(2.0, 3.0, 3.0, 2.0), "level": "sequence-sum"},
        },
    ),
    "unsloth": (
        {},
        {
            "grpo": {"aggregate": MEAN},
            "dapo": {},
            "bnpo": {},
            "dr_grpo": {"aggregate": "constant", "max_tokens": 8192},
            "gspo": {"level": "sequence", "aggregate": MEAN},
            "cispo": {"surrogate": Cispo(5.0)},
            "sapo": {"surrogate": Sapo(1.0, 1.05), "aggregate": MEAN},
            "vespo": {"surrogate": Vespo(2.0, 3.0, 3.0, 2.0), "level": "sequence-sum"},
        },
    ),
    "verl": (
        {"kl": VERL_KL, "count_empty": False},
        {
            "grpo": {"surrogate": DUAL, "log_ratio_bounds": WIDE},
            "dapo": {"surrogate": Clip(0.2, 0.28, 3.0), "log_ratio_bounds": WIDE},
            "dr_grpo": {"surrogate": DUAL, "aggregate": "constant", "log_ratio_bounds": WIDE},
            "ppo": {"surrogate": DUAL, "log_ratio_bounds": WIDE},
            "gspo": {"level": "sequence-token", "aggregate": MEAN, "log_ratio_bounds": LOW},
            "gspo_token": {"level": "sequence-token", "aggregate": MEAN, "log_ratio_bounds": LOW},
            "sapo": {"surrogate": Sapo(1.0, 1.05), "aggregate": MEAN, "log_ratio_bounds": WIDE},
            "gmpo": {"surrogate": Gmpo(0.2, 0.2), "level": "sequence", "aggregate": MEAN, "count_empty": True},
            "cispo": {"surrogate": TWO_SIDED, "log_ratio_bounds": WIDE},
            "reinforce": {"surrogate": PolicyGradient()},
            "dppo_tv": {"surrogate": Cispo(3.0), "filters": (TrustRegion("tv", 0.2, 0.2),), "log_ratio_bounds": WIDE},
            "dppo_kl": {"surrogate": Cispo(3.0), "filters": (TrustRegion("kl", 0.2, 0.2),), "log_ratio_bounds": WIDE},
            "clip_cov": {"surrogate": ClipCov(0.2, 0.2, 2e-4, 1.0, 5.0)},
            "kl_cov": {"surrogate": KlCov(0.1, 2e-4)},
            "dro": {"surrogate": Dro(1.0)},
        },
    ),
    "openrlhf": (
        {"kl": Kl("k1", clamp=10.0), "kl_aggregate": "token-mean", "entropy_aggregate": "token-mean"},
        {
            "grpo": {"log_ratio_bounds": WIDE},
            "dapo": {"surrogate": HIGHER, "log_ratio_bounds": WIDE},
            "gspo": {"level": "sequence", "aggregate": MEAN, "count_empty": False},
        },
    ),
    "slime": (
        {"kl": "k1"},
        {
            "grpo": {"aggregate": MEAN},
            "dapo": {"surrogate": HIGHER},
            "gspo": {"level": "sequence", "aggregate": MEAN},
            "cispo": {"surrogate": TWO_SIDED, "aggregate": MEAN},
        },
    ),
    "areal": (
        {},
        {
            "grpo": {},
            "dapo": {"surrogate": HIGHER},
            "gspo": {"level": "sequence"},
            "sapo": {"surrogate": Sapo(1.0, 1.05)},
        },
    ),
    "nemo-rl": (
        {"beta": 0.01, "kl": NEMO_KL},
        {
            "grpo": {},
            "dapo": {"surrogate": HIGHER},
            "gspo": {"level": "sequence", "aggregate": MEAN},
            "cispo": {"surrogate": TWO_SIDED},
            "reinforce": {"surrogate": PolicyGradient()},
        },
    ),
    "skyrl": (
        {"beta": 1e-3, "kl": VERL_KL, "kl_aggregate": MEAN, "entropy_aggregate": "token-mean"},
        {
            "grpo": {"log_ratio_bounds": WIDE},
            "dapo": {"surrogate": HIGHER, "log_ratio_bounds": WIDE},
            "ppo": {"surrogate": DUAL, "log_ratio_bounds": WIDE},
            "gspo": {"level": "sequence-token", "aggregate": MEAN, "log_ratio_bounds": LOW},
            "sapo": {"surrogate": Sapo(1.0, 1.05), "aggregate": MEAN, "log_ratio_bounds": WIDE},
            "cispo": {"surrogate": Cispo(5.0), "log_ratio_bounds": WIDE},
            "rollout_is": {"surrogate": Cispo(math.inf), "filters": (TrustRegion("ratio", 0.2, 0.2),)},
            "dppo_tv": {"surrogate": ImportanceSampling(), "filters": (TrustRegion("tv", 0.2, 0.2),), "log_ratio_bounds": WIDE},
            "dppo_kl": {
                "surrogate": ImportanceSampling(),
                "filters": (TrustRegion("kl", 0.05, 0.05),),
                "log_ratio_bounds": WIDE,
            },
            "importance_sampling": {"surrogate": ImportanceSampling(), "aggregate": "token-sum"},
            "clip_cov": {"surrogate": ClipCov(0.2, 0.2, 2e-4, 1.0, 5.0)},
            "kl_cov": {"surrogate": KlCov(1.0, 0.2)},
        },
    ),
    "prime-rl": (
        {},
        {
            # kappa (log r)^2 with kappa = 1e-3, and k2 has a half in it.
            "dppo_tv": {"surrogate": ImportanceSampling(), "filters": (TrustRegion("tv", 0.2, 0.2),), "beta": 2e-3, "kl": "k2"},
            "ipo": {
                "surrogate": ImportanceSampling(),
                "filters": (TrustRegion("symmetric-tv", 0.1, 0.1),),
                "beta": 2e-3,
                "kl": "k2",
            },
            "sampled_distillation": {"surrogate": PolicyGradient(), "beta": 1.0, "kl": "distillation"},
        },
    ),
    "torchtitan": (
        {"log_ratio_bounds": TEN},
        {"grpo": {}, "dapo": {}},
    ),
}


@pytest.mark.parametrize("trainer, name", [(t, n) for t in NUMERICS for n in NUMERICS[t]])
def test_numerics(trainer: str, name: str) -> None:
    shared, each = THEIRS[trainer]
    objective = Objective.preset(name, numerics=trainer)
    expected = Objective(**{**shared, **each[name]})
    assert {f.name: (getattr(objective, f.name), getattr(expected, f.name)) for f in fields(Objective)} == {
        f.name: (getattr(expected, f.name),) * 2 for f in fields(Objective)
    }
    changed = Objective.preset(name, numerics=trainer, beta=0.7, max_tokens=5)
    assert changed == replace(expected, beta=0.7, max_tokens=5), "what the caller says comes last"


def test_every_numerics_is_pinned() -> None:
    assert {t: set(p) for t, p in NUMERICS.items()} == {t: set(p) for t, (_, p) in THEIRS.items()}


@pytest.mark.parametrize("trainer", [None, *NUMERICS])
def test_presets_run(trainer: str | None) -> None:
    """Every preset, on three sequences of which one is masked: a finite loss, and a slope for somebody."""
    g = torch.Generator().manual_seed(0)
    shape = (3, 4)
    logps = -0.2 - torch.rand(shape, generator=g)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]])
    batch = TokenBatch(
        torch.zeros(shape, dtype=torch.int64),
        torch.tensor([1.0, -0.5, 2.0]),
        mask=mask,
        old_logps=logps - 1e-4 * torch.randn(shape, generator=g),
        ref_logps=logps + torch.randn(shape, generator=g),
    )
    for name in PRESETS if trainer is None else NUMERICS[trainer]:
        if name == "distillation":  # of a whole distribution: tests/core/test_divergences.py
            continue
        objective = Objective.preset(name, numerics=trainer, beta=0.1, entropy_coef=0.01, max_tokens=8)
        flat = torch.where(batch.mask, logps, 0.0).reshape(-1)  # type: ignore[arg-type]
        entropy = torch.where(batch.mask, 1.0, 0.0).reshape(-1)  # type: ignore[arg-type]
        losses, slopes, d_entropy = objective.token_stage(flat, entropy, objective.token_rows(batch), batch)
        assert torch.isfinite(losses).all() and torch.isfinite(slopes).all() and slopes.any(), name
        assert d_entropy is not None and d_entropy.any() and not slopes.view(shape)[2].any(), name


# ---- refusals


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"preset='xyz': it must be one of grpo, dapo, [^?]*$"):
        Objective.preset("xyz")
    for name in ("dapoo", "DAPO"):
        with pytest.raises(ValueError, match=rf"preset='{name}': .* Did you mean dapo\?"):
            Objective.preset(name)
    with pytest.raises(ValueError, match=r"numerics='trl2': it must be one of trl, liger"):
        Objective.preset("grpo", numerics="trl2")
    with pytest.raises(
        TypeError,
        match=r"'epsilon' is no argument of Objective.preset. It has surrogate, level.* surrogate=Clip\(eps_low=0.2, ",
    ):
        Objective.preset("grpo", epsilon=0.2)


@pytest.mark.parametrize("trainer", NUMERICS)
def test_what_a_trainer_does_not_have_is_refused(trainer: str) -> None:
    missing = [name for name in PRESETS if name not in NUMERICS[trainer]]
    assert missing
    for name in missing:
        with pytest.raises(ValueError, match=rf"preset '{name}': {trainer} has no such objective, only "):
            Objective.preset(name, numerics=trainer)
