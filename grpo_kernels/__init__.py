"""grpo_kernels: the GRPO loss at the speed of the hardware, in any trainer."""

__version__ = "0.2.0.dev0"  # before the imports, some of which read it

from .batch import TokenBatch
from .core.backends import use
from .formulas.divergence import Exact
from .formulas.filters import EntropyFloor, EntropyQuantile, OffPolicySequences, TrustRegion
from .formulas.kl import Kl, check_kl
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
from .logprobs import TokenLogprobs, linear_divergence, linear_logprobs, token_divergence, token_logprobs
from .losses import LossOutput, grpo_loss, linear_grpo_loss
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
    "Dro",
    "EntropyFloor",
    "EntropyQuantile",
    "Exact",
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
    "Sapo",
    "TokenBatch",
    "TokenLogprobs",
    "TokenSets",
    "TrustRegion",
    "Vespo",
    "check_kl",
    "check_surrogate",
    "group_advantages",
    "grpo_loss",
    "linear_divergence",
    "linear_grpo_loss",
    "linear_logprobs",
    "loss_from_model",
    "token_divergence",
    "token_logprobs",
    "use",
]
