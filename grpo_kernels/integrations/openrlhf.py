"""OpenRLHF: its policy loss, and log-probs and entropy of its actor on our kernels.

    from grpo_kernels.integrations import openrlhf

    openrlhf.bind()  # before the actor is called
    trainer.actor_loss_fn = openrlhf.PolicyLoss.like(trainer.actor_loss_fn)  # in its worker

`bind` replaces two functions that `openrlhf.models.actor` has imported. Log-probs and entropy then
read the fp32 logits once each and do not change them. OpenRLHF 0.11.0 divides the logits by the
temperature in place. With a temperature other than 1 and an entropy bonus its backward then fails.
Its entropy is taken at temperature 1, and so is ours, unless `entropy_temperature` is given.
OpenRLHF 0.11.2 divides the logits before it calls either function: leave `entropy_temperature` at
1. KL and entropy terms, denominators and metrics remain OpenRLHF's.

Tested with OpenRLHF 0.10.4 and 0.11.0 to 0.11.2 on a CPU: its loss and its functions of logits,
from their files alone (deepspeed replaced by an empty module). Its actor, trainer, ring attention
and anything on a GPU were not run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..checks import require, require_one_of
from ..losses import objective_loss
from ..objective import Objective
from ..rewards.corrections import importance_weights, rejection_mask
from ._swap import Adapter, Slots, adapt_arguments, unknown_option, with_trainer_names
from ._tensors import (
    at_least_one,
    bounded_clip,
    entropy_from_logits,
    excluded_share,
    log_probs_of,
    masked_mean,
    scored_batch,
)

ADAPTER = Adapter(
    "OpenRLHF", "openrlhf", ("0.10.4", "0.11.0", "0.11.1", "0.11.2"),
    {"log_probs_from_logits": "openrlhf.models.utils.log_probs_from_logits", "compute_entropy": "openrlhf.models.utils.compute_entropy"},
)  # fmt: skip
#: The arguments of OpenRLHF's `PolicyLoss`: those of both versions, of 0.11.0 alone, of 0.11.2.
FIELDS = ("clip_eps_low", "clip_eps_high", "dual_clip", "token_level_loss", "policy_loss_type")
BEFORE = ("enable_vllm_is_correction", "vllm_is_truncated_threshold", "vllm_is_correction_type")
SINCE = (
    "is_correction_level",
    "is_correction_mode",
    "is_correction_gating",
    "is_correction_threshold",
)
#: vllm_is_correction_type -> is_correction_level, is_correction_mode.
TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}


class PolicyLoss(torch.nn.Module):
    """`openrlhf.models.loss.PolicyLoss`: the same arguments, defaults and results, of 0.11.0,
    (loss, clip_ratio, ppo_kl, vllm_kl), or with is_correction_level of 0.11.2, (loss, clip_ratio,
    ppo_kl, vllm_kl, is_filter_ratio).

    Value, gradient and metrics equal OpenRLHF's, with two exceptions: the loss of a batch
    without tokens is 0 here and 0/0 in OpenRLHF, and rounding cannot make a divergence negative
    here.

    clip_eps_low, clip_eps_high, dual_clip   as in `Clip`, whose delta is dual_clip; None: without.
    policy_loss_type   "ppo", or "gspo": one ratio per sequence. token_level_loss   True: mean over
                       tokens. False: mean over sequences of their means; "gspo" always does this.
    enable_vllm_is_correction   True: weights against the sampler's log-probs, within
                                vllm_is_truncated_threshold (low, high): vllm_is_correction_type
                                "tis" clamps them, "icepop" drops tokens outside, "seq-mask-tis"
                                sequences. With "gspo" the ratio is to the sampler instead.
    is_correction_level   the same option since 0.11.2: "off", or whether is_correction_threshold
                          applies to a "token" or a "seq". is_correction_mode "mask" drops those
                          outside the threshold, "clip" clamps the weight (of tokens only).
                          is_correction_gating: what the threshold bounds. "ratio": the weight.
                          "binary_kl" or "tv": this distance between the sampler's and the old
                          policy's probability of the token, which has an upper bound only.

    Raises ValueError naming the option that is wrong.
    """

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        enable_vllm_is_correction: bool = False,
        vllm_is_truncated_threshold: list[float] | None = None,
        vllm_is_correction_type: str = "tis",
        *,
        is_correction_level: str | None = None,
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
    ) -> None:
        super().__init__()
        require_one_of("policy_loss_type", policy_loss_type, ("ppo", "gspo"))
        require_one_of("vllm_is_correction_type", vllm_is_correction_type, TYPES)
        self.reports_filter = is_correction_level is not None
        level = is_correction_level
        mode = is_correction_mode
        gating = is_correction_gating
        bounds = is_correction_threshold
        if level is None:
            level, mode = (
                TYPES[vllm_is_correction_type] if enable_vllm_is_correction else ("off", "mask")
            )
            gating = "ratio"
            bounds = vllm_is_truncated_threshold or (0.0, math.inf)
        elif enable_vllm_is_correction:
            raise ValueError(
                "enable_vllm_is_correction=True with is_correction_level: they are one option of"
                " two versions."
            )
        require_one_of("is_correction_level", level, ("off", "token", "seq"))
        require_one_of("is_correction_mode", mode, ("mask", "clip"))
        require_one_of("is_correction_gating", gating, ("ratio", "binary_kl", "tv"))
        remedy = (
            f"with is_correction_level={level!r} and is_correction_gating={gating!r} only the ratio"
            ' of a token can be clamped: take "mask".'
        )
        require(
            mode == "mask" or (level != "seq" and gating == "ratio"),
            "is_correction_mode",
            mode,
            remedy,
        )
        remedy = f"is_correction_gating={gating!r} has an upper bound only: pass (0, high)."
        right = gating == "ratio" or level == "off" or bounds[0] <= 0
        require(right, "is_correction_threshold", tuple(bounds), remedy)
        self.is_correction_level = level
        self.is_correction_mode = mode
        self.is_correction_gating = gating
        self.is_correction_threshold = bounds
        self.token_level_loss = token_level_loss and policy_loss_type != "gspo"
        self.policy_loss_type = policy_loss_type
        self.objective = Objective.preset(
            "gspo" if policy_loss_type == "gspo" else "grpo", numerics="openrlhf", count_empty=False,
            surrogate=bounded_clip("OpenRLHF", clip_eps_low, clip_eps_high, dual_clip, "dual_clip", "clip_eps_high"),
            aggregate="token-mean" if self.token_level_loss else "seq-mean-token-mean",
        )  # fmt: skip

    @classmethod
    def like(cls, theirs: Any) -> PolicyLoss:
        """This loss with the constants of `theirs`, an `openrlhf.models.loss.PolicyLoss`, returning
        what its version returns. Raises ValueError if its arguments are neither those of 0.11.0 nor
        those of 0.11.2.
        """
        for fields in (FIELDS + BEFORE, FIELDS + SINCE):
            missing = [name for name in fields if not hasattr(theirs, name)]
            if not missing:
                unknown = unknown_option(theirs, fields)
                if unknown is not None:
                    require(
                        False, *unknown, "this option is not known here: keep OpenRLHF's own loss."
                    )
                return cls(**{name: getattr(theirs, name) for name in fields})
        raise ValueError(
            f"{type(theirs).__name__} has no {', '.join(missing)}: the constants of OpenRLHF"
            f" {', '.join(ADAPTER.tested)} are known here: install one of them, or keep OpenRLHF's"
            " own loss."
        )

    @adapt_arguments
    @with_trainer_names(
        logps="log_probs",
        old_logps="old_log_probs",
        sampler_logps="rollout_log_probs",
        mask="action_mask",
        targets="action_mask",
    )
    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[Tensor | None, ...]:
        """(loss, clip_ratio, ppo_kl, vllm_kl), 0-d; the last is None without a correction, and for
        "gspo". As a fifth, if is_correction_level was given, the share of tokens, or sequences,
        outside the threshold; also None without a correction.

        log_probs, old_log_probs, advantages, rollout_log_probs   [B, T]
        action_mask        [B, T]; None: every token counts.
        batch_num_tokens   the denominator of a mean over tokens, over all ranks; None: this batch's
                           own.
        global_batch_size  the same of a mean over sequences.
        dp_size            the number of those ranks.
        """
        mask = (
            torch.ones_like(log_probs, dtype=torch.bool)
            if action_mask is None
            else action_mask != 0
        )
        corrected = self.is_correction_level != "off"
        gspo = self.policy_loss_type == "gspo"
        sampler: Any = rollout_log_probs
        old = old_log_probs
        vllm_kl = None
        filtered = None
        if corrected:
            if sampler is None:
                raise ValueError(
                    "rollout_log_probs is None, but the importance-sampling correction is on: pass"
                    " them."
                )
            old = sampler if gspo else old
        batch = scored_batch(mask, advantages, old_logps=old, sampler_logps=sampler)
        if corrected and not gspo:
            weights, outside = self._weights(batch, mask, sampler, old)
            batch = replace(batch, weights=weights)
            vllm_kl = masked_mean(sampler - old, mask)
            filtered = (
                outside.float().mean()
                if self.is_correction_level == "seq"
                else masked_mean(outside.float(), mask)
            )
        total = batch_num_tokens if self.token_level_loss else global_batch_size
        D = None if total is None else at_least_one(total) / dp_size
        out = objective_loss(log_probs, batch, self.objective, normalizer=D)
        ppo_kl = masked_mean(old_log_probs - log_probs.detach(), mask)
        results = (out.loss, excluded_share(out, self.objective), ppo_kl, vllm_kl)
        return (*results, filtered) if self.reports_filter else results

    def _weights(
        self, batch: TokenBatch, mask: Tensor, sampler: Any, old: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (importance weights, is_outside), see `is_correction_threshold`.

        The weights are [B, T]. is_outside marks tokens [B, T], or sequences [B] at the level "seq".

        mask         bool [B, T]
        sampler, old   [B, T], log-probs under the sampler and at the start of the update
        """
        low, high = self.is_correction_threshold
        by_sequence = self.is_correction_level == "seq"
        if self.is_correction_gating == "ratio":
            over = "mean" if by_sequence else "token"
            outside = rejection_mask(batch, metric="ratio", over=over, low=low, high=high) == 0
        else:
            # Divergence of two Bernoulli distributions: the sampled token, and all others.
            p = sampler.exp().clamp(1e-6, 1 - 1e-6)
            q = old.exp().clamp(1e-6, 1 - 1e-6)
            if self.is_correction_gating == "tv":
                divergence = (p - q).abs()
            else:
                divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            divergence = torch.where(mask, divergence, 0.0)
            if by_sequence:
                means = divergence.sum(1) / mask.sum(1).clamp(min=1)
                divergence = means[:, None].expand_as(divergence)
            outside = divergence > high
        weights = importance_weights(batch, high=math.inf)
        if self.is_correction_mode == "clip":
            weights = weights.clamp(low, high)
        else:
            weights = torch.where(outside, 0.0, weights)
        # A sequence without tokens has no mean and counts as outside the threshold.
        return weights, (outside | ~mask).all(1) if by_sequence else outside


def bind(*, entropy_temperature: float = 1.0, **how: bool) -> Slots:
    """Replace `log_probs_from_logits` and `compute_entropy` of openrlhf.models.utils by our
    functions, also in the actor that imported them; the result restores them, see `Slots`, which
    has the errors too.

    entropy_temperature   the temperature of the entropy, see above.
    how      strict and any_version of `Slots`.
    """
    slots = ADAPTER.bind(log_probs_from_logits, **how)
    slots.bind(
        compute_entropy, comparable=entropy_temperature == 1.0, temperature=entropy_temperature
    )
    return slots


@with_trainer_names(targets="labels")
def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probs of labels at temperature, fp32 in their shape. Logits [..., V] are kept."""
    return log_probs_of(logits, labels, temperature=temperature).logps


def compute_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy in nats, fp32, of logits [..., V]."""
    return entropy_from_logits(logits, temperature=temperature)
