"""OpenRLHF: its policy loss, and log-probs and entropy of its actor on our kernels.

    from grpo_kernels.integrations import openrlhf

    openrlhf.bind()                                                             # before the actor is called
    trainer.actor_loss_fn = openrlhf.PolicyLoss.like(trainer.actor_loss_fn)     # in the actor's worker

`bind` replaces two names that `openrlhf.models.actor` imported: log-probs and entropy then read the fp32 logits once each,
and the logits keep their values: OpenRLHF divides them by the temperature in place, which with a temperature other than 1
and an entropy bonus fails in its backward. Its entropy is at temperature 1 whatever the log-probs have; so is ours, unless
`entropy_temperature` says otherwise. KL and entropy terms, denominators and metrics stay OpenRLHF's.

Tested with OpenRLHF 0.11.0 on a CPU: its loss and its functions of logits, from their files alone (deepspeed replaced by an
empty module). Its actor, trainer, ring attention and anything on a GPU were not run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ..batch import TokenBatch
from ..corrections import importance_weights, rejection_mask
from ..logprobs import token_logprobs
from ..losses import objective_loss
from ..objective import Objective
from ..surrogates import Clip
from ..transform import LogitTransform
from ._slots import Slots, at_least_one, check_version, plain

Tensor = torch.Tensor

TESTED = ("0.11.0",)
FIELDS = (
    "clip_eps_low", "clip_eps_high", "dual_clip", "token_level_loss", "policy_loss_type", "enable_vllm_is_correction",
    "vllm_is_truncated_threshold", "vllm_is_correction_type",
)  # fmt: skip


class PolicyLoss(torch.nn.Module):
    """`openrlhf.models.loss.PolicyLoss`: the same arguments, defaults and results, (loss, clip_ratio, ppo_kl, vllm_kl).

    Value, gradient and metrics are OpenRLHF's, but for a batch without tokens, which is 0 here and 0/0 there.

    clip_eps_low, clip_eps_high, dual_clip   as in `Clip`, whose delta is dual_clip; None: without.
    policy_loss_type   "ppo", or "gspo": one ratio a sequence. token_level_loss   True: mean over tokens, False: over sequences
                       of their means; "gspo" has the second whatever is said.
    enable_vllm_is_correction   True: weights against the sampler's log-probs, within vllm_is_truncated_threshold (low, high):
                       vllm_is_correction_type "tis" clamps them, "icepop" drops tokens outside, "seq-mask-tis" sequences.
                       With "gspo" the ratio is to the sampler instead.

    Raises ValueError naming the option that is wrong."""

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
    ) -> None:
        super().__init__()
        if policy_loss_type not in ("ppo", "gspo"):
            raise ValueError(f"policy_loss_type={policy_loss_type!r}: it must be ppo or gspo.")
        if vllm_is_correction_type not in ("tis", "icepop", "seq-mask-tis"):
            raise ValueError(f"vllm_is_correction_type={vllm_is_correction_type!r}: it must be tis, icepop or seq-mask-tis.")
        if dual_clip is not None and dual_clip < 1 + clip_eps_high:
            raise ValueError(f"dual_clip={dual_clip}: below 1 + clip_eps_high, {1 + clip_eps_high}, it is OpenRLHF's own.")
        self.clip_eps_low, self.clip_eps_high, self.dual_clip = clip_eps_low, clip_eps_high, dual_clip
        self.token_level_loss = token_level_loss and policy_loss_type != "gspo"
        self.policy_loss_type = policy_loss_type
        self.enable_vllm_is_correction = enable_vllm_is_correction
        self.vllm_is_truncated_threshold = vllm_is_truncated_threshold
        self.vllm_is_correction_type = vllm_is_correction_type
        self.objective = Objective.preset(
            "gspo" if policy_loss_type == "gspo" else "grpo",
            numerics="openrlhf",
            surrogate=Clip(clip_eps_low, clip_eps_high, math.inf if dual_clip is None else dual_clip),
            aggregate="token-mean" if self.token_level_loss else "seq-mean-token-mean",
            count_empty=False,
        )

    @classmethod
    def like(cls, theirs: Any) -> PolicyLoss:
        """With the constants of theirs, an `openrlhf.models.loss.PolicyLoss`."""
        return cls(**{name: getattr(theirs, name) for name in FIELDS})

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(loss, clip_ratio, ppo_kl, vllm_kl), 0-d; the last is None without a correction, and for "gspo".

        log_probs, old_log_probs, advantages, action_mask, rollout_log_probs   [B, T]; no mask: every token counts.
        batch_num_tokens, global_batch_size   the denominators of a mean over tokens, over sequences, of all ranks together;
                                              None: this batch's own. dp_size   the number of those ranks."""
        mask = torch.ones_like(log_probs, dtype=torch.bool) if action_mask is None else action_mask != 0
        corrected = self.enable_vllm_is_correction
        gspo = self.policy_loss_type == "gspo"
        if corrected and rollout_log_probs is None:
            raise ValueError("rollout_log_probs is None, but enable_vllm_is_correction is on: pass them.")
        old = rollout_log_probs if corrected and gspo else old_log_probs
        batch = TokenBatch(
            torch.zeros(mask.shape, dtype=torch.int64, device=mask.device), advantages, mask=mask, old_logps=old,
            sampler_logps=rollout_log_probs,
        )  # fmt: skip
        weights = self._weights(batch) if corrected and not gspo else None
        if weights is not None:
            batch = TokenBatch(batch.targets, advantages, mask=mask, old_logps=old, weights=weights)
        total = batch_num_tokens if self.token_level_loss else global_batch_size
        D = None if total is None else at_least_one(total) / dp_size
        out = objective_loss(log_probs, batch, self.objective, normalizer=D)

        def mean(x: Tensor) -> Tensor:
            return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)

        vllm_kl = None
        if corrected and not gspo:
            assert rollout_log_probs is not None
            vllm_kl = mean(rollout_log_probs - old_log_probs)
        return (
            out.loss,
            out.metrics["clip_low"] + out.metrics["clip_high"],
            mean(old_log_probs - log_probs.detach()),
            vllm_kl,
        )

    def _weights(self, batch: TokenBatch) -> Tensor:
        low, high = self.vllm_is_truncated_threshold or (0.0, math.inf)
        if self.vllm_is_correction_type == "seq-mask-tis":
            kept = rejection_mask(batch, metric="ratio", over="mean", low=low, high=high)
            return kept * importance_weights(batch, high=math.inf)
        return importance_weights(
            batch, mode="mask" if self.vllm_is_correction_type == "icepop" else "truncate", low=low, high=high
        )


def bind(*, entropy_temperature: float = 1.0, strict: bool = False, any_version: bool = False) -> Slots:
    """Put our functions in the place of `log_probs_from_logits` and `compute_entropy` of openrlhf.models.utils, and of the
    actor that imported them; the result undoes it, by `undo()` or as a context manager.

    strict   True: a call that has to be left to OpenRLHF raises RuntimeError instead.
    Raises RuntimeError for a version that is not known, unless any_version, and where it is bound already."""
    check_version("openrlhf", TESTED, any_version)
    slots = Slots("openrlhf", strict)
    slots.bind("openrlhf.models.utils", "log_probs_from_logits", log_probs_from_logits)
    entropy = functools.wraps(compute_entropy)(functools.partial(compute_entropy, temperature=entropy_temperature))
    slots.bind("openrlhf.models.utils", "compute_entropy", entropy)
    return slots


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs of labels at temperature, fp32 in their shape; logits [..., V] keep their values."""
    plain(logits)
    return token_logprobs(logits, labels, transform=LogitTransform(temperature=temperature))[0]


def compute_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats, fp32, of logits [..., V]."""
    plain(logits)
    anything = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    entropy = token_logprobs(logits, anything, transform=LogitTransform(temperature=temperature), entropy=True)[1]
    assert entropy is not None
    return entropy
