"""Fused loss kernels for RL post-training of language models."""

__version__ = "0.2.0.dev0"  # before the imports, some of which read it

from typing import TYPE_CHECKING, Any

from .batch import TokenBatch
from .checks import nearest
from .core.backends import use
from .draft_heads import draft_head_loss
from .formulas.divergence import Exact
from .formulas.filters import (
    EntropyFloor,
    EntropyQuantile,
    OffPolicySequences,
    SamplerMismatch,
    TrustRegion,
)
from .formulas.future_kl import FutureKl
from .formulas.kl import DetachedWeight, Kl, check_kl
from .formulas.surrogates import (
    A2po,
    Cispo,
    Clip,
    ClipCov,
    Custom,
    Dro,
    Gmpo,
    ImportanceSampling,
    KlCov,
    NoPolicyTerm,
    PolicyGradient,
    Sapo,
    Vespo,
    check_surrogate,
)
from .logprobs import (
    TokenLogprobs,
    linear_divergence,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from .losses import LossOutput, grpo_loss, linear_grpo_loss, objective_loss
from .model import loss_from_model
from .objective import Denominators, Objective
from .options import Head, Options
from .rewards.advantages import group_advantages
from .token_sets import TokenSets
from .transform import LogitTransform

__all__ = [
    "A2po",
    "Cispo",
    "Clip",
    "ClipCov",
    "Custom",
    "Denominators",
    "DetachedWeight",
    "Dro",
    "EntropyFloor",
    "EntropyQuantile",
    "Exact",
    "FutureKl",
    "Gmpo",
    "Head",
    "ImportanceSampling",
    "Kl",
    "KlCov",
    "LogitTransform",
    "LossOutput",
    "NoPolicyTerm",
    "Objective",
    "OffPolicySequences",
    "Options",
    "PolicyGradient",
    "SamplerMismatch",
    "Sapo",
    "TokenBatch",
    "TokenLogprobs",
    "TokenSets",
    "TrustRegion",
    "Vespo",
    "check_kl",
    "check_surrogate",
    "draft_head_loss",
    "group_advantages",
    "grpo_loss",
    "linear_divergence",
    "linear_grpo_loss",
    "linear_logprobs",
    "loss_from_model",
    "objective_loss",
    "token_divergence",
    "token_logprobs",
    "use",
]

#: Public names that this module does not have, and the modules that have them.
_ELSEWHERE = {
    "FusedGRPOTrainer": "integrations.trl",
    "FusedLMHead": "model",
    "ScoreCentering": "formulas.centering",
    "fused_lm_head": "integrations.trl",
    "global_normalizer": "distributed",
    "group_metrics": "rewards.advantages",
    "importance_weights": "rewards.corrections",
    "ops": "formulas.ops",
    "shift_sets": "batch",
    "shift_targets": "batch",
}

if not TYPE_CHECKING:  # with a __getattr__ type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name in _ELSEWHERE:
            # An AttributeError would reach `from grpo_kernels import ...` without its message.
            home = f"{__name__}.{_ELSEWHERE[name]}"
            raise ImportError(f"{__name__} has no {name}. Did you mean: from {home} import {name}")
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}.{nearest(name, __all__)}"
        )
