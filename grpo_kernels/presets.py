"""Published objectives by name, and the constants with which the trainers compute them, as values of `Objective`'s fields.

PUBLISHED follows the papers. NUMERICS change what a trainer does differently: clip widths, clamps, denominators, the KL. A
name that a trainer does not have is refused for it, rather than guessed.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from .checks import refuse_unknown, require_one_of
from .formulas.divergence import Exact
from .formulas.filters import TrustRegion
from .formulas.kl import Kl
from .formulas.surrogates import (
    A2po,
    Cispo,
    Clip,
    ClipCov,
    Dro,
    Gmpo,
    ImportanceSampling,
    KlCov,
    NoPolicyTerm,
    PolicyGradient,
    Sapo,
    Vespo,
)

Changes = dict[str, Any]

_GRPO: Changes = {"aggregate": "seq-mean-token-mean"}

#: Published objectives. dapo and bnpo differ in the normaliser only: DAPO's is the token count of the whole batch (pass
#: `normalizer=` when it is split), BNPO's the count of the micro-batch at hand.
PUBLISHED: dict[str, Changes] = {
    "grpo": _GRPO,
    "dapo": {"surrogate": Clip(0.2, 0.28)},
    "bnpo": {},
    "dr_grpo": {"aggregate": "constant"},
    "ppo": {"surrogate": Clip(0.2, 0.2, delta=3.0)},
    "gspo": {**_GRPO, "surrogate": Clip(3e-4, 4e-4), "level": "sequence"},
    "gspo_token": {**_GRPO, "surrogate": Clip(3e-4, 4e-4), "level": "sequence-token"},
    "luspo": {"level": "sequence", "aggregate": "seq-mean-token-sum"},
    "gmpo": {**_GRPO, "surrogate": Gmpo(), "level": "sequence"},
    "cispo": {"surrogate": Cispo(5.0)},
    "sapo": {**_GRPO, "surrogate": Sapo()},
    "vespo": {"surrogate": Vespo(), "level": "sequence-sum"},
    "reinforce": {"surrogate": PolicyGradient()},
    "rloo": {**_GRPO, "level": "sequence-sum"},
    "importance_sampling": {"surrogate": ImportanceSampling(), "aggregate": "token-sum"},
    "dppo_tv": {"surrogate": ImportanceSampling(), "filters": (TrustRegion("tv"),)},
    "dppo_kl": {"surrogate": ImportanceSampling(), "filters": (TrustRegion("kl", 0.05, 0.05),)},
    "ipo": {"surrogate": ImportanceSampling(), "filters": (TrustRegion("symmetric-tv", 0.1, 0.1),)},
    "rollout_is": {"surrogate": Cispo(math.inf), "filters": (TrustRegion("ratio"),)},
    "clip_cov": {"surrogate": ClipCov()},
    "kl_cov": {"surrogate": KlCov()},
    "dro": {"surrogate": Dro()},
    "a2po": {**_GRPO, "surrogate": A2po(), "level": "sequence-sum"},
    "distillation": {"surrogate": NoPolicyTerm(), "beta": 1.0, "kl": Exact("reverse")},
    "sampled_distillation": {"surrogate": PolicyGradient(), "beta": 1.0, "kl": "distillation"},
}

#: What a trainer's KL is, where it has one in the loss; its weight is part of a trainer's numbers where the KL is on by default.
_VERL_KL = Kl("k3", clamp_log=20.0, clamp=10.0)


#: Bounds of log-ratios.
_WITHIN_20: Changes = {"log_ratio_bounds": (-20.0, 20.0)}
_BELOW_10: Changes = {"log_ratio_bounds": (-math.inf, 10.0)}


def _each(common: Changes, presets: dict[str, Changes]) -> dict[str, Changes]:
    return {name: {**common, **changes} for name, changes in presets.items()}


#: The loss types of TRL, which Liger and Unsloth have taken over, clip widths included.
_LOSS_TYPES: dict[str, Changes] = {
    "grpo": {},
    "dapo": {"surrogate": Clip(0.2, 0.2)},
    "bnpo": {},
    "dr_grpo": {},
    "gspo": {"surrogate": Clip(0.2, 0.2)},
    "cispo": {},
    "sapo": {},
    "vespo": {},
}

#: trainer -> its own names of presets -> changes to that preset. Versions: see integrations/README.md.
NUMERICS: dict[str, dict[str, Changes]] = {
    "trl": _each(
        {"kl": Kl("k3", weighting="ratio"), "entropy_aggregate": "token-mean"},
        {
            **_LOSS_TYPES,
            "luspo": {},
            "gmpo": {"kl": "k3"},
            "rloo": {},
            "a2po": {},
        },
    ),
    "liger": _each(
        {"beta": 0.04},
        {
            **_LOSS_TYPES,
            "luspo": {},
        },
    ),
    "unsloth": {**_LOSS_TYPES, "dr_grpo": {"max_tokens": 8192}},
    "verl": _each(
        {"kl": _VERL_KL, "count_empty": False},
        {
            "grpo": {"surrogate": Clip(0.2, 0.2, delta=3.0), "aggregate": "token-mean", **_WITHIN_20},
            "dapo": {"surrogate": Clip(0.2, 0.28, delta=3.0), **_WITHIN_20},
            "dr_grpo": {"surrogate": Clip(0.2, 0.2, delta=3.0), **_WITHIN_20},
            "ppo": _WITHIN_20,
            "gspo": {"surrogate": Clip(0.2, 0.2), "level": "sequence-token", **_BELOW_10},
            "gspo_token": {"surrogate": Clip(0.2, 0.2), **_BELOW_10},
            "sapo": _WITHIN_20,
            "gmpo": {"surrogate": Gmpo(0.2, 0.2), "count_empty": True},
            "cispo": {"surrogate": Cispo(cap=1.2, low=0.8), **_WITHIN_20},
            "reinforce": {},
            "dppo_tv": {"surrogate": Cispo(3.0), **_WITHIN_20},
            "dppo_kl": {
                "surrogate": Cispo(3.0),
                "filters": (TrustRegion("kl", 0.2, 0.2),),
                **_WITHIN_20,
            },
            "clip_cov": {},
            "kl_cov": {"surrogate": KlCov(0.1)},
            "dro": {},
        },
    ),
    "openrlhf": _each(
        {"kl": Kl("k1", clamp=10.0), "kl_aggregate": "token-mean", "entropy_aggregate": "token-mean"},
        {
            "grpo": {"aggregate": "token-mean", **_WITHIN_20},
            "dapo": _WITHIN_20,
            "gspo": {"surrogate": Clip(0.2, 0.2), "count_empty": False},
        },
    ),
    "slime": _each(
        {"kl": "k1"},
        {
            # A mean of its own for every rollout, unless it is told to calculate_per_token_loss, as DAPO wants it.
            "grpo": {},
            "dapo": {},
            "gspo": {"surrogate": Clip(0.2, 0.2)},
            "cispo": {"surrogate": Cispo(cap=1.2, low=0.8), "aggregate": "seq-mean-token-mean"},
        },
    ),
    "areal": {
        "grpo": {"aggregate": "token-mean"},
        "dapo": {},
        "gspo": {"surrogate": Clip(0.2, 0.2), "aggregate": "token-mean"},
        "sapo": {"aggregate": "token-mean"},
    },
    "nemo-rl": _each(
        {"beta": 0.01, "kl": Kl("k3", weighting="score", clamp_log=20.0, clamp=10.0)},
        {
            "grpo": {"aggregate": "token-mean"},
            "dapo": {},
            "gspo": {"surrogate": Clip(0.2, 0.2)},
            "cispo": {"surrogate": Cispo(cap=1.2, low=0.8)},
            "reinforce": {},
        },
    ),
    "skyrl": _each(
        {"beta": 1e-3, "kl": _VERL_KL, "kl_aggregate": "seq-mean-token-mean", "entropy_aggregate": "token-mean"},
        {
            "grpo": {"aggregate": "token-mean", **_WITHIN_20},
            "dapo": _WITHIN_20,
            "ppo": _WITHIN_20,
            "gspo": {"surrogate": Clip(0.2, 0.2), "level": "sequence-token", **_BELOW_10},
            "sapo": _WITHIN_20,
            "cispo": _WITHIN_20,
            "rollout_is": {},
            "dppo_tv": _WITHIN_20,
            "dppo_kl": _WITHIN_20,
            "importance_sampling": {},
            "clip_cov": {},
            "kl_cov": {"surrogate": KlCov(1.0, 0.2)},
        },
    ),
    "prime-rl": {
        # kappa (log r)^2 to the sampler, which is also the anchor of the ratio: pass its log-probs as old_logps and ref_logps.
        "dppo_tv": {"beta": 2e-3, "kl": "k2"},
        "ipo": {"beta": 2e-3, "kl": "k2"},
        "sampled_distillation": {},
    },
    "torchtitan": {
        "grpo": {"aggregate": "token-mean", "log_ratio_bounds": (-10.0, 10.0)},
        "dapo": {"surrogate": Clip(0.2, 0.2), "log_ratio_bounds": (-10.0, 10.0)},
    },
}


def preset_fields(name: str, numerics: str | None, changes: Changes, known: tuple[str, ...]) -> Changes:
    """The fields of `Objective.preset`; `known` are those that an Objective has. Raises ValueError for an unknown name or
    trainer, TypeError for a field that does not exist."""
    require_one_of("preset", name, PUBLISHED)
    unknown = [f for f in changes if f not in known]
    surrogate: Any = PUBLISHED[name].get("surrogate", Clip())  # the default of the field
    numbers = {f: changes[f] for f in unknown if f in {own.name for own in fields(surrogate)}}
    if numbers:
        remedy = f"pass surrogate={replace(surrogate, **numbers)!r}"
        raise ValueError(f"{', '.join(numbers)} is a number of the surrogate, not of the Objective: {remedy}.")
    if unknown:
        remedy = f"It has {', '.join(known)}. Clip bounds go into surrogate={surrogate!r}."
        refuse_unknown("Objective.preset", unknown, known, remedy)
    theirs: Changes = {}
    if numerics is not None:
        require_one_of("numerics", numerics, NUMERICS)
        if name not in NUMERICS[numerics]:
            raise ValueError(f"preset {name!r}: {numerics} has no such objective, only {', '.join(NUMERICS[numerics])}.")
        theirs = NUMERICS[numerics][name]
    return {**PUBLISHED[name], **theirs, **changes}
