"""A TRL trainer's configuration and inputs as an Objective, a TokenBatch and a denominator."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from ..batch import TokenBatch
from ..formulas.filters import EntropyQuantile, Filter, OffPolicySequences
from ..formulas.surrogates import Cispo, Clip, Sapo, Surrogate, Vespo
from ..objective import Objective
from ._trl_replay import sets_of

Tensor = torch.Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
BY_ITEMS = ("dapo", "cispo", "vespo")
#: The least weight of a token in TRL's VESPO.
LEAST_WEIGHT = 1e-8


class Settings(NamedTuple):
    """The settings of a trainer that determine the Objective."""

    loss_type: str
    level: str
    epsilons: tuple[float, float]  # low, high
    delta: float | None
    sapo: tuple[float, float]  # temperature for A > 0, for the others
    vespo: tuple[float, float, float, float]  # k and lambda for A >= 0, then for the others
    beta: float
    corrected_kl: bool
    entropy_coef: float  # 0 where the bonus is off at this step
    quantile: float
    off_policy: float | None
    sampler_range: tuple[float | None, float | None]  # of the sampler's weights; (None, None) without a correction
    ranks: Any  # group of all ranks, None without one
    obstacle: str  # of the model: "", or why TRL's own loss has to run

    @classmethod
    def of(cls, trainer: Any) -> Settings:
        args = trainer.args
        corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        on = trainer._entropy_bonus_enabled and not (
            trainer.use_adaptive_entropy and trainer._last_world_entropy > args.entropy_target
        )
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        return cls(
            loss_type=trainer.loss_type,
            level=trainer.importance_sampling_level,
            epsilons=(trainer.epsilon_low, trainer.epsilon_high),
            delta=args.delta,
            sapo=(args.sapo_temperature_pos, args.sapo_temperature_neg),
            vespo=(args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg),
            beta=trainer.beta,
            corrected_kl=args.use_bias_correction_kl,
            entropy_coef=trainer.entropy_coef / accumulation(trainer) if on else 0.0,
            quantile=trainer.top_entropy_quantile,
            off_policy=trainer.off_policy_mask_threshold,
            sampler_range=(trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max)
            if corrected
            else (None, None),
            ranks=torch.distributed.group.WORLD if ranks else None,
            obstacle=_obstacle(trainer),
        )


def _obstacle(trainer: Any) -> str:
    if trainer.aux_loss_enabled and not router(trainer.model.config.get_text_config()):
        return "the auxiliary loss of this mixture of experts"
    if len({*(getattr(trainer.model, "hf_device_map", None) or {}).values()}) > 1:
        return "a model split over devices"
    return ""


def router(config: Any) -> tuple[int, int] | None:
    """(experts, experts per token) of a model whose load-balancing loss is Mixtral's."""
    if not hasattr(config, "num_experts") or not hasattr(config, "num_experts_per_tok"):
        return None
    return config.num_experts, config.num_experts_per_tok


@functools.lru_cache(maxsize=16)
def objective_of(settings: Settings) -> tuple[str, Objective | None]:
    """("", the Objective), or (the reason why there is none, None). It depends on settings only, so all ranks get the same."""
    s = settings
    if s.loss_type == "vespo":
        if s.level == "sequence" and s.beta != 0 and s.corrected_kl:
            return "VESPO's KL weighted by the ratio of the sequence", None
        low, high = s.sampler_range
        if not ((low is None or low <= 1) and (high is None or high >= 1)):
            return "VESPO with a clip range without 1, in which the weights of padding count", None
    elif s.level not in ("token", "sequence"):
        return f"importance_sampling_level={s.level!r}", None
    if s.obstacle:
        return s.obstacle, None
    filters: tuple[Filter, ...] = ()
    if s.quantile < 1.0:
        filters += (EntropyQuantile(s.quantile, s.ranks),)
    if s.off_policy is not None:
        filters += (OffPolicySequences(s.off_policy),)
    changes: dict[str, Any] = {} if s.corrected_kl else {"kl": "k3"}
    if s.loss_type != "vespo":
        changes["level"] = s.level
    try:
        return "", Objective.preset(
            s.loss_type, numerics="trl", surrogate=_surrogate(s), beta=s.beta, filters=filters, entropy_coef=s.entropy_coef,
            **changes,
        )  # fmt: skip
    except ValueError as error:
        return str(error), None


def _surrogate(s: Settings) -> Surrogate:
    if s.loss_type == "cispo":
        return Cispo(s.epsilons[1])
    if s.loss_type == "sapo":
        return Sapo(*s.sapo)
    if s.loss_type == "vespo":
        k_pos, lambda_pos, k_neg, lambda_neg = s.vespo
        return Vespo(k_pos, max(lambda_pos, 1e-4), k_neg, max(lambda_neg, 1e-4))
    if s.loss_type not in CLIPPED:
        raise ValueError(f"loss_type={s.loss_type!r}")
    return Clip(*s.epsilons, math.inf if s.delta is None else s.delta)


def accumulation(trainer: Any) -> float:
    """Micro-batches of this optimiser step; TRL divides by them itself, and not in evaluation."""
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 1.0


def token_batch(trainer: Any, inputs: dict[str, Any], objective: Objective) -> TokenBatch:
    """TRL's tensors of a micro-batch."""
    mask = inputs["completion_mask"]
    weights = inputs.get("importance_sampling_ratio")
    if trainer.loss_type == "vespo":
        # TRL keeps a token that the sampler's mask leaves out, with the least weight.
        weights = None if weights is None else weights.clamp(min=LEAST_WEIGHT)
    elif not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        weights = None
    advantages = inputs["advantages"]
    return TokenBatch(
        inputs["completion_ids"],
        advantages,
        mask=mask * inputs["tool_mask"] if "tool_mask" in inputs else mask,
        old_logps=inputs.get("old_per_token_logps"),
        ref_logps=inputs["ref_per_token_logps"] if objective.beta != 0 else None,
        weights=weights,
        sampler_logps=inputs.get("sampling_per_token_logps") if trainer.off_policy_mask_threshold is not None else None,
        kept=sets_of(inputs),
    )


def denominator(trainer: Any, inputs: dict[str, Any], batch: TokenBatch) -> float | Tensor:
    """TRL's denominator of this micro-batch."""
    if trainer.loss_type in BY_ITEMS:
        # The items of a whole generation batch on all ranks; the gradient is the mean over ranks.
        items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        return items * accumulation(trainer) / trainer.args.steps_per_generation if trainer.model.training else items
    if trainer.loss_type == "bnpo":
        assert batch.mask is not None
        return batch.mask.sum().clamp(min=1.0) * accumulation(trainer)
    sequences = batch.targets.shape[0] * accumulation(trainer)
    return sequences * trainer.max_completion_length if trainer.loss_type == "dr_grpo" else sequences
