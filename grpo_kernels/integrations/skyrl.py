"""SkyRL: policy losses for its registry, and log-probs and entropy on our kernels.

    from grpo_kernels.integrations import skyrl
    skyrl.register()                # trainer.algorithm.policy_loss_type=fused_dapo; then sync_registries(), as for any loss
    skyrl.bind()                    # in the worker

`register` puts our presets into `PolicyLossRegistry`, with their own constants. SkyRL divides the advantages by the
reduction before the loss and wants a plain sum, so `loss_reduction` stays SkyRL's; objectives that are not linear in the
advantage (Clip-Cov, KL-Cov, DRO, A2PO, distillation) are refused for that reason. Its off-policy correction
(`off_policy_correction`) is called for the weights and masks that it makes. KL and entropy terms stay SkyRL's.

`bind` replaces `logprobs_from_logits` and `chunked_entropy_from_logits` (FSDP), and with megatron=True the head's
dispatcher `_fused_lm_head_logprob_apply`, over any number of tensor-parallel ranks. As in SkyRL, the gradient of the hidden
states is then a rank's own share: the gather of sequence parallelism in front of the head sums them up.

Tested with SkyRL 0.3.0 on a CPU: its losses, its functions of logits and its dispatcher (on one rank and on two), from their
files alone. Its workers and Megatron were not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..formulas.surrogates import A2po, Cispo, ClipCov, Dro, KlCov
from ..logprobs import linear_logprobs
from ..losses import objective_loss
from ..objective import Objective
from ..presets import NUMERICS, PRESETS
from ._shared import default_group, entropy_from_logits, even_shard, logprobs_from_logits, plain, scored_batch
from ._slots import Slots, check_version

Tensor = torch.Tensor

TESTED = ("0.3.0",)
NOT_LINEAR = (ClipCov, KlCov, Dro, A2po)


def register(prefix: str = "fused_", *, any_version: bool = False) -> list[str]:
    """Put our presets into SkyRL's registry, and return their names there: `prefix` and the preset's. Raises RuntimeError for
    a version that is not known, unless any_version."""
    check_version("skyrl", TESTED, any_version)
    from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss

    names = [n for n, o in PRESETS.items() if not isinstance(o.surrogate, NOT_LINEAR) and o.beta == 0]
    for name in names:
        register_policy_loss(prefix + name)(policy_loss(name))
    return [prefix + name for name in names]


def policy_loss(objective: str | Objective) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """A policy loss with SkyRL's signature, (log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs) ->
    (loss, metrics), tensors [B, T]: the sum over tokens, of advantages that SkyRL has divided already.

    objective   a preset's name (with SkyRL's numbers where it has that objective) or an Objective; its aggregate is the sum.
                Where rollout_logprobs are the anchor in SkyRL (dppo, rollout_is), they are here, if they are given.
    """
    name = objective if isinstance(objective, str) else None
    if isinstance(objective, str):
        numerics = "skyrl" if objective in NUMERICS["skyrl"] else None
        wanted = Objective.preset(objective, numerics=numerics, aggregate="token-sum", beta=0.0)
    else:
        wanted = objective
    if isinstance(wanted.surrogate, NOT_LINEAR):
        raise ValueError(
            f"objective={objective!r}: it is not linear in the advantage, which SkyRL has divided by its reduction."
        )
    if wanted.beta != 0 or wanted.needs_entropy or wanted.aggregate != "token-sum":
        raise ValueError(
            f"objective has beta={wanted.beta}, entropy_coef={wanted.entropy_coef} and aggregate={wanted.aggregate!r}: SkyRL adds "
            'KL and entropy itself, and divides: pass beta=0.0, entropy_coef=0.0 and aggregate="token-sum".'
        )

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction

        mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
        weights, mask, metrics = apply_off_policy_correction(
            torch.ones_like(log_probs), old_log_probs, rollout_logprobs, mask, config.off_policy_correction
        )
        anchored = name in ("dppo_tv", "dppo_kl", "rollout_is") and rollout_logprobs is not None
        cispo = isinstance(wanted.surrogate, Cispo) and not wanted.filters
        if cispo and getattr(getattr(config, "cispo", None), "cispo_anchor", "old") == "rollout":
            tis = getattr(config.off_policy_correction, "tis_ratio_type", None)
            if rollout_logprobs is None:
                raise ValueError('rollout_logprobs is None, but cispo_anchor="rollout" takes the ratio to them: pass them.')
            if tis is not None:
                raise ValueError(
                    f'tis_ratio_type={tis!r}: cispo_anchor="rollout" is the correction already, and this would double-count it: '
                    "set off_policy_correction.tis_ratio_type=None."
                )
            anchored = True
        old = rollout_logprobs if anchored else old_log_probs
        batch = scored_batch(mask, advantages, old_logps=old, weights=weights.detach().float())
        out = objective_loss(log_probs, batch, wanted)
        if cispo:  # over the tokens from before the correction, whatever their advantage is
            assert old is not None
            named = _ratios(log_probs.detach() - old, loss_mask, *wanted.surrogate.ratio_bounds)
        else:
            clipped = 1 - out.metrics["kept"] if wanted.filters else out.metrics["clip_low"] + out.metrics["clip_high"]
            named = {"clip_ratio": clipped}
        return out.loss, {**dict(zip(named, torch.stack([*named.values()]).tolist(), strict=True)), **metrics}

    loss.__name__ = f"fused_{name or 'objective'}"
    return loss


def _ratios(log_ratio: Tensor, mask: Tensor | None, low: float, high: float) -> dict[str, Tensor]:
    """SkyRL's metrics of CISPO; it bounds the exponent at 20. Without tokens the ratio is 1."""
    counted = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask != 0
    r = log_ratio.clamp(-20.0, 20.0).exp()[counted]
    r = r if r.numel() else r.new_ones(1)
    clamped = r.clamp(low, high)
    return {
        "clip_ratio": (clamped != r).float().mean(), "cispo/ratio_mean": r.mean(), "cispo/ratio_clamped_mean": clamped.mean(),
        "cispo/ratio_max": r.max(), "cispo/ratio_min": r.min(),
    }  # fmt: skip


def bind(*, megatron: bool = False, strict: bool = False, any_version: bool = False) -> Slots:
    """Put our functions in the place of SkyRL's; the result undoes it, by `undo()` or as a context manager. Bind before
    `HFModelWrapper` is made: it keeps the function of the entropy that it found then.

    megatron   True: the fused head of SkyRL's Megatron worker too.
    strict     True: a call that has to be left to SkyRL raises RuntimeError instead.
    Raises RuntimeError for a version that is not known, unless any_version, and where it is bound already."""
    check_version("skyrl", TESTED, any_version)
    slots = Slots("skyrl", strict)
    home = "skyrl.backends.skyrl_train"
    slots.bind(f"{home}.utils.torch_utils", "logprobs_from_logits", logprobs_from_logits)
    slots.bind(f"{home}.utils.torch_utils", "chunked_entropy_from_logits", chunked_entropy_from_logits)
    if megatron:
        slots.bind(f"{home}.distributed.megatron.model_utils", "_fused_lm_head_logprob_apply", fused_lm_head_logprobs)
    return slots


def chunked_entropy_from_logits(
    logits: Tensor, requires_grad: bool = False, attention_mask: Tensor | None = None, chunk_size: int = 1024
) -> Tensor:
    """Entropy in nats, fp32 [B, S], of logits [B, S, V]; 0 where attention_mask is. Without a gradient unless requires_grad;
    chunk_size is not needed."""
    return entropy_from_logits(logits, mask=None if attention_mask is None else attention_mask != 0, gradient=requires_grad)


def fused_lm_head_logprobs(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool,
) -> Tensor:
    """Log-probs fp32 [B, S] of target [B, S]; hidden [B, S, H], weight [V, H], already divided by the temperature. No gradient
    if inference_only.

    With a tp_group of several ranks (None: the default group of torch.distributed, where there is one) weight is
    [V / ranks, H], this rank's part, and the gradient of hidden its share: SkyRL's layers in front sum it up.
    vocab_start_index and vocab_end_index are the bounds of that part. backend and chunk_size choose among SkyRL's own ways,
    and nothing here. Raises ValueError where the bounds are not those of this rank's part."""
    plain(hidden, weight)
    shard = even_shard(weight.shape[0], default_group(tp_group), reduce_hidden=False)
    start = 0 if shard is None else shard.start
    if (vocab_start_index, vocab_end_index) != (start, start + weight.shape[0]):
        raise ValueError(
            f"vocab_start_index={vocab_start_index} and vocab_end_index={vocab_end_index}, but the part of this rank of tp_group, "
            f"by its weight of {weight.shape[0]} rows, is [{start}, {start + weight.shape[0]}): pass the group that the head is cut over."
        )
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return linear_logprobs(hidden, weight, target, shard=shard)[0]
