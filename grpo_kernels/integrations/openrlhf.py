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
#: Arguments of OpenRLHF's `PolicyLoss` in every version, only up to 0.11.1, and only from 0.11.2.
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
    """The policy loss of OpenRLHF, with the arguments, defaults and results of its `PolicyLoss`.

    Value, gradient and metrics equal OpenRLHF's, with two exceptions: the loss of a batch
    without tokens is 0 here and 0/0 in OpenRLHF, and rounding cannot make a divergence negative
    here.

    clip_eps_low, clip_eps_high
                       clip range of the ratio, [1 - clip_eps_low, 1 + clip_eps_high]
    dual_clip          upper bound of the ratio for negative advantages; None for none
    token_level_loss   True: the mean over tokens. False: the mean over sequences of the mean over
                       their tokens, which "gspo" always uses.
    policy_loss_type   "ppo", or "gspo" for one ratio per sequence

    The importance-sampling correction multiplies the loss of a token by the weight
    exp(old - sampler). With "gspo" it takes the ratio to the sampler instead. OpenRLHF up to 0.11.1
    configures it with

    enable_vllm_is_correction     whether there is a correction
    vllm_is_truncated_threshold   (low, high), the bounds of the weight
    vllm_is_correction_type       outside of the bounds "tis" clamps the weight, "icepop" drops the
                                  token and "seq-mask-tis" drops the sequence

    and OpenRLHF 0.11.2 with

    is_correction_level       "off", "token" or "seq": what the threshold applies to. None: the
                              three options above count.
    is_correction_mode        what happens outside of the threshold: "mask" drops the token or
                              sequence, "clip" clamps the weight (of tokens only)
    is_correction_gating      what the threshold bounds: "ratio" (the weight), or a distance between
                              the probabilities of the token under the sampler and the old policy,
                              "binary_kl" or "tv", which has an upper bound only
    is_correction_threshold   (low, high)

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
        # OpenRLHF returns a fifth result since 0.11.2.
        self.reports_filter = is_correction_level is not None
        level = is_correction_level
        mode = is_correction_mode
        gating = is_correction_gating
        bounds = is_correction_threshold
        if level is None:
            # Convert the options of older versions to those of 0.11.2.
            level = "off"
            mode = "mask"
            if enable_vllm_is_correction:
                level, mode = TYPES[vllm_is_correction_type]
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
        """Return our loss with the options of a loss of OpenRLHF. It returns the same results.

        theirs   an `openrlhf.models.loss.PolicyLoss`

        OpenRLHF renamed some options in 0.11.2. Raises ValueError if the loss has neither all
        options of the older nor all of the newer versions, or if it has an option set that is not
        known here.
        """
        for fields in (FIELDS + BEFORE, FIELDS + SINCE):
            missing = [name for name in fields if not hasattr(theirs, name)]
            if missing:
                continue
            unknown = unknown_option(theirs, fields)
            if unknown is not None:
                name, value = unknown
                remedy = "this option is not known here: keep OpenRLHF's own loss."
                require(False, name, value, remedy)
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
        """Return (loss, clip_ratio, ppo_kl, vllm_kl), or with is_filter_ratio as a fifth result.

        log_probs, old_log_probs, advantages
                           fp32 [B, T]
        action_mask        [B, T], nonzero for trained tokens; None if all are
        rollout_log_probs  fp32 [B, T], the sampler's log-probs, which a correction needs
        dp_size            number of data-parallel ranks
        batch_num_tokens   number of tokens of all ranks, the denominator of a mean over tokens.
                           None: the tokens of this batch.
        global_batch_size  number of sequences of all ranks, the denominator of a mean over
                           sequences. None: the sequences of this batch.

        All results are 0-d. clip_ratio is the share of clipped tokens, ppo_kl and vllm_kl are the
        mean differences old - current and sampler - old of the log-probs, and is_filter_ratio is
        the share of tokens, or sequences, outside of the threshold. The last two are None without a
        correction, and for "gspo". is_filter_ratio is returned if is_correction_level was given.
        """
        if action_mask is None:
            mask = torch.ones_like(log_probs, dtype=torch.bool)
        else:
            mask = action_mask != 0
        is_corrected = self.is_correction_level != "off"
        is_gspo = self.policy_loss_type == "gspo"
        sampler: Any = rollout_log_probs
        if is_corrected and sampler is None:
            raise ValueError(
                "rollout_log_probs is None, but the importance-sampling correction is on: pass"
                " them."
            )
        # Corrected GSPO has no weights. It takes the ratio to the sampler instead.
        anchor = sampler if is_corrected and is_gspo else old_log_probs
        batch = scored_batch(mask, advantages, old_logps=anchor, sampler_logps=sampler)
        vllm_kl = None
        is_filter_ratio = None
        if is_corrected and not is_gspo:
            weights, is_outside = self._weights(batch, mask, sampler, old_log_probs)
            batch = replace(batch, weights=weights)
            vllm_kl = masked_mean(sampler - old_log_probs, mask)
            if self.is_correction_level == "seq":
                is_filter_ratio = is_outside.float().mean()
            else:
                is_filter_ratio = masked_mean(is_outside.float(), mask)
        total = batch_num_tokens if self.token_level_loss else global_batch_size
        # Gradients are averaged over the ranks.
        normalizer = None if total is None else at_least_one(total) / dp_size
        out = objective_loss(log_probs, batch, self.objective, normalizer=normalizer)
        ppo_kl = masked_mean(old_log_probs - log_probs.detach(), mask)
        results = (out.loss, excluded_share(out, self.objective), ppo_kl, vllm_kl)
        return (*results, is_filter_ratio) if self.reports_filter else results

    def _weights(
        self, batch: TokenBatch, mask: Tensor, sampler: Tensor, old: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (importance weights [B, T], is_outside) of the correction.

        batch     log-probs and mask of the micro-batch
        mask      bool [B, T], the trained tokens
        sampler   fp32 [B, T], log-probs under the sampler
        old       fp32 [B, T], log-probs of the policy at the start of the update

        The weight of a token is exp(old - sampler), dropped or clamped if the token (or its
        sequence) is outside of `is_correction_threshold`. is_outside marks these tokens, bool
        [B, T], or at the level "seq" the sequences, bool [B].
        """
        low, high = self.is_correction_threshold
        by_sequence = self.is_correction_level == "seq"
        if self.is_correction_gating == "ratio":
            over = "mean" if by_sequence else "token"
            kept = rejection_mask(batch, metric="ratio", over=over, low=low, high=high)
            is_outside = kept == 0
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
            is_outside = divergence > high
        weights = importance_weights(batch, high=math.inf)
        if self.is_correction_mode == "clip":
            weights = weights.clamp(low, high)
        else:
            weights = torch.where(is_outside, 0.0, weights)
        if by_sequence:
            # A sequence without tokens has no mean and counts as outside of the threshold.
            return weights, (is_outside | ~mask).all(1)
        return weights, is_outside


def bind(
    *, entropy_temperature: float = 1.0, strict: bool = False, any_version: bool = False
) -> Slots:
    """Replace OpenRLHF's functions of log-probs and entropy by ours, until `undo()` of the result.

    They are `log_probs_from_logits` and `compute_entropy` of openrlhf.models.utils, also in the
    actor that imported them.

    entropy_temperature   divides the logits before the entropy. OpenRLHF has no such option: its
                          entropy is at temperature 1 up to 0.11.1.
    strict                True: a call that ours does not support raises RuntimeError. False:
                          OpenRLHF's own function computes it.
    any_version           False: under a version of OpenRLHF that was not tested, the first calls
                          are compared with OpenRLHF's own functions, and RuntimeError is raised if
                          they differ. True: they are not compared.

    Returns `Slots`: `undo()` restores OpenRLHF's functions, and `counts` has the number of calls.
    Raises RuntimeError if a function is replaced already or has other arguments.
    """
    slots = ADAPTER.bind(log_probs_from_logits, strict=strict, any_version=any_version)
    # At another temperature the entropy differs from OpenRLHF's on purpose.
    slots.bind(
        compute_entropy, comparable=entropy_temperature == 1.0, temperature=entropy_temperature
    )
    return slots


@with_trainer_names(targets="labels")
def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probs of labels, fp32 [...], in place of OpenRLHF's function of this name.

    The logits are not changed.

    logits        [..., V]
    labels        int64 [...]
    temperature   divides the logits

    The decorator makes errors use the names of these arguments.
    """
    return log_probs_of(logits, labels, temperature=temperature).logps


def compute_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy of each row of logits in nats, fp32 [...].

    It replaces OpenRLHF's function of this name, which has no temperature.

    logits        [..., V]
    temperature   divides the logits
    """
    return entropy_from_logits(logits, temperature=temperature)
