"""SkyRL: policy losses for its registry, and log-probs and entropy on our kernels.

    from grpo_kernels.integrations import skyrl
    skyrl.register()  # for trainer.algorithm.policy_loss_type=fused_dapo; then sync_registries()
    skyrl.bind()  # in the worker

`register` adds our presets to `PolicyLossRegistry`, with their own constants. SkyRL divides the
advantages according to `loss_reduction` before the loss and expects a plain sum. So objectives that
are not linear in the advantage (Clip-Cov, KL-Cov, DRO, A2PO, distillation) are refused. SkyRL's
off-policy correction (`off_policy_correction`) is called for its weights and masks. KL and entropy
terms remain SkyRL's. With `trainer.algorithm.score_centering.enabled` they take the log-probs of
the sampler's head, under both policies, and add the centering of their own policy term:
`fused_reinforce`, `fused_rollout_is` and what else compares with the sampler.

`bind` replaces `logprobs_from_logits` and `chunked_entropy_from_logits` (FSDP), and with
megatron=True the head's dispatcher `_fused_lm_head_logprob_apply`, over any number of
tensor-parallel ranks. As in SkyRL, each rank then has only its own share of the gradient of the
hidden states; the gather of sequence parallelism before the head adds up the shares.

With replay=True `bind` also replaces the function that scores tokens over the sets that vLLM has
returned (`sample_support_scores`, or `sample_support_logprobs`, depending on the version). It takes
logits, or hidden states and the head's weight, and ids [.., K] padded with -1. From hidden states
only the pairs of a row and an id are projected, as in SkyRL, in fp32 and without atomics. Rows
without ids get 0; SkyRL scores the end token that it appends separately, over the vocabulary. A
call in which a sampled id is outside of its set, or an id stands in one twice, is left to SkyRL: it
leaves the first out of the sum and counts the second twice. For a loss of your own, `kept_sets`
turns either of SkyRL's records into the sets of a batch.

Tested with SkyRL 0.3.0 and 0.2.0 on a CPU: its losses, its functions of logits and its dispatcher
(on one rank and on two), from their files alone. Its workers and Megatron were not run. 0.3.0 has
no replay; ours follows SkyRL's branches of August 2026. Nor has it score centering; ours follows
pull request 2244 of September 2026, which is open.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..checks import require
from ..formulas.centering import ScoreCentering
from ..formulas.surrogates import A2po, Cispo, Clip, ClipCov, Dro, KlCov, PolicyGradient
from ..losses import objective_loss
from ..objective import NUMERICS, PRESETS, Objective
from ..token_sets import TokenSets
from ._swap import Adapter, NotCovered, Slots, Trial, adapt_arguments, with_trainer_names
from ._tensors import (
    LossAndMetrics,
    default_group,
    entropy_from_logits,
    entropy_mode,
    excluded_share,
    log_probs_of,
    logprobs_from_logits,
    response_sets,
    score_centering_term,
    scored_batch,
    sets_on_rows,
    to_floats,
)

SUPPORT = "skyrl.backends.skyrl_train.utils.sample_support_replay"
ADAPTER = Adapter(
    "SkyRL", "skyrl", ("0.2.0", "0.3.0"),
    {"logprobs_from_logits": "skyrl.backends.skyrl_train.utils.torch_utils.logprobs_from_logits",
     "chunked_entropy_from_logits": "skyrl.backends.skyrl_train.utils.torch_utils.chunked_entropy_from_logits",
     "fused_lm_head_logprobs": "skyrl.backends.skyrl_train.distributed.megatron.model_utils._fused_lm_head_logprob_apply",
     "sample_support_logprobs": "skyrl.backends.skyrl_train.utils.sample_support_replay.sample_support_logprobs",
     "sample_support_scores": "skyrl.backends.skyrl_train.utils.sample_support_replay.sample_support_scores"},
)  # fmt: skip
WITNESS = "ppo_policy_loss"
NOT_LINEAR = (ClipCov, KlCov, Dro, A2po)


def register(prefix: str = "fused_", *, any_version: bool = False) -> list[str]:
    """Add our presets to SkyRL's registry, and return their names there: `prefix` + the preset's
    name.

    Under a version of SkyRL that was not tested, the first call compares SkyRL's own clipped loss
    with ours of the same constants, unless any_version is True. Raises RuntimeError if they differ.
    """
    trial = Trial(ADAPTER.untested(any_version))
    from skyrl.backends.skyrl_train.utils import ppo_utils

    names = [
        n for n, o in PRESETS.items() if not isinstance(o.surrogate, NOT_LINEAR) and o.beta == 0
    ]
    for name in names:
        ours = adapt_arguments(policy_loss(name, trial), getattr(ppo_utils, WITNESS, None))
        ppo_utils.register_policy_loss(prefix + name)(ours)
    return [prefix + name for name in names]


def _compare_with_witness(trial: Trial, config: Any, *tensors: Tensor | None) -> None:
    """Compare SkyRL's "regular" loss with our clip of the same constants, because arguments,
    corrections and reduction are the same for every loss. Of a clipped loss nothing is centered.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss

    config = copy.copy(config)
    if hasattr(config, "score_centering"):
        config.score_centering = None
    config.policy_loss_type = "regular"
    clip = Clip(config.eps_clip_low, config.eps_clip_high)
    own = policy_loss(Objective.preset("grpo", surrogate=clip, beta=0.0, aggregate="token-sum"))
    trial.compare(
        WITNESS, own, ppo_policy_loss, ((*tensors[:3], config, *tensors[3:]), {}), itemgetter(0)
    )


def policy_loss(
    objective: str | Objective, trial: Trial | None = None
) -> Callable[..., LossAndMetrics]:
    """Make a policy loss with SkyRL's signature.

    objective   the name of a preset (with SkyRL's constants if SkyRL has that objective) or an
                Objective; its aggregate is the sum. If rollout_logprobs are passed, objectives for
                which SkyRL uses them as the anchor (dppo, rollout_is) do so too.
    trial       of `register`: a comparison before the first call under an untested version

    The result is a function (log_probs, old_log_probs, advantages, config, loss_mask,
    rollout_logprobs) -> (loss, metrics), with tensors [B, T]. The loss is the sum over tokens,
    because SkyRL has already divided the advantages. With score centering the function also takes
    rollout_topk_logprobs and topk_log_probs [B, T, K]: the log-probs of the ids of the sampler's
    head under the sampler, with -inf for padding, and under the policy.
    """
    spec = objective
    name = "objective"
    if isinstance(spec, str):
        name = spec
        spec = Objective.preset(
            name,
            numerics="skyrl" if name in NUMERICS["skyrl"] else None,
            aggregate="token-sum",
            beta=0.0,
        )
    remedy = "it is not linear in the advantage, which SkyRL has divided by its reduction."
    require(not isinstance(spec.surrogate, NOT_LINEAR), "objective", objective, remedy)
    remedy = (
        "SkyRL adds KL and entropy itself, and divides: pass beta=0.0, entropy_coef=0.0 and"
        ' aggregate="token-sum".'
    )
    require(
        spec.beta == 0 and not spec.needs_entropy and spec.aggregate == "token-sum",
        "objective",
        objective,
        remedy,
    )

    @adapt_arguments
    @with_trainer_names(
        logps="log_probs", old_logps="old_log_probs", mask="loss_mask", targets="loss_mask"
    )
    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
        rollout_topk_logprobs: Tensor | None = None,
        topk_log_probs: Tensor | None = None,
    ) -> LossAndMetrics:
        from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import (
            apply_off_policy_correction,
        )

        if trial is not None and trial.pending(WITNESS):
            _compare_with_witness(
                trial, config, log_probs, old_log_probs, advantages, loss_mask, rollout_logprobs
            )
        ones = torch.ones_like(log_probs)
        correction = config.off_policy_correction
        mask_before_correction = ones if loss_mask is None else loss_mask
        weights, mask, metrics = apply_off_policy_correction(
            ones, old_log_probs, rollout_logprobs, mask_before_correction, correction
        )
        # Whether the ratio is to the sampler.
        anchored = name in ("dppo_tv", "dppo_kl", "rollout_is") and rollout_logprobs is not None
        is_cispo = isinstance(spec.surrogate, Cispo) and not spec.filters
        if is_cispo and getattr(getattr(config, "cispo", None), "cispo_anchor", "old") == "rollout":
            remedy = 'cispo_anchor="rollout" takes the ratio to them: pass them.'
            require(rollout_logprobs is not None, "rollout_logprobs", None, remedy)
            tis = getattr(correction, "tis_ratio_type", None)
            remedy = 'cispo_anchor="rollout" is that correction already: set it to None.'
            require(tis is None, "tis_ratio_type", tis, remedy)
            anchored = True
        old_logps: Any = rollout_logprobs if anchored else old_log_probs
        batch = scored_batch(
            mask, advantages, old_logps=old_logps, weights=weights.detach().float()
        )
        out = objective_loss(log_probs, batch, spec)
        value = out.loss
        if getattr(getattr(config, "score_centering", None), "enabled", False):
            remedy = (
                "it compares with old_log_probs, which are not the sampler's: reinforce, rollout_is"
                " and dppo do not."
            )
            compares_with_sampler = anchored or isinstance(spec.surrogate, PolicyGradient)
            require(compares_with_sampler, "score_centering", objective, remedy)
            if rollout_topk_logprobs is None or topk_log_probs is None:
                raise ValueError(
                    "rollout_topk_logprobs and topk_log_probs are needed for score centering:"
                    " record the sampler's head."
                )
            value = value + score_centering_term(
                ScoreCentering.of(spec),
                topk_log_probs,
                rollout_topk_logprobs,
                advantages,
                mask != 0,
                weights,
            )
        if is_cispo:
            # SkyRL counts the tokens before the correction, with any advantage.
            log_ratios = (log_probs.detach() - old_logps)[mask_before_correction != 0]
            shares = _ratios(log_ratios, spec)
        else:
            shares = {"clip_ratio": excluded_share(out, spec)}
        return value, to_floats(shares) | metrics

    loss.__name__ = f"fused_{name}"
    return loss


def _ratios(log_ratio: Tensor, objective: Objective) -> dict[str, Tensor]:
    """SkyRL's metrics of CISPO; it bounds the exponent at 20. Without tokens the ratio is 1."""
    r = log_ratio.clamp(-20.0, 20.0).exp() if log_ratio.numel() else log_ratio.new_ones(1)
    clamped = r.clamp(*objective.surrogate.ratio_bounds)
    return {
        "clip_ratio": (clamped != r).float().mean(), "cispo/ratio_mean": r.mean(), "cispo/ratio_clamped_mean": clamped.mean(),
        "cispo/ratio_max": r.max(), "cispo/ratio_min": r.min(),
    }  # fmt: skip


def bind(*, megatron: bool = False, replay: bool = False, **how: bool) -> Slots:
    """Replace SkyRL's functions by ours; the result restores them, see `Slots`, which has the
    errors too. Bind before `HFModelWrapper` is created, because it stores the entropy function of
    that time.

    megatron   True: the fused head of SkyRL's Megatron worker too.
    replay     True: the scores over recorded sets too.
    how        strict and any_version of `Slots`.
    """
    slots = ADAPTER.bind(logprobs_from_logits, chunked_entropy_from_logits, **how)
    if megatron:
        slots.bind(fused_lm_head_logprobs)
    if replay:
        newer = hasattr(importlib.import_module(SUPPORT), "sample_support_scores")
        slots.bind(sample_support_scores if newer else sample_support_logprobs)
    return slots


@with_trainer_names(mask="attention_mask", targets="logits")
def chunked_entropy_from_logits(
    logits: Tensor,
    requires_grad: bool = False,
    attention_mask: Tensor | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Return the entropy in nats, fp32 [B, S], of logits [B, S, V]; 0 where attention_mask is 0. It
    has no gradient unless requires_grad is True. chunk_size is not needed.
    """
    return entropy_from_logits(
        logits, mask=None if attention_mask is None else attention_mask != 0, gradient=requires_grad
    )


@with_trainer_names(targets="target")
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
    """Return log-probs fp32 [B, S] of target [B, S]; hidden [B, S, H], weight [V, H], already
    divided by the temperature. No gradient if inference_only.

    With a tp_group of several ranks (None: the default group of torch.distributed, if there is one)
    weight is [V / ranks, H], this rank's part, and the gradient of hidden is this rank's share,
    which SkyRL's layers before the head add up. vocab_start_index and vocab_end_index are the
    bounds of that part. backend and chunk_size choose among SkyRL's own implementations and have no
    effect here. Raises ValueError if the bounds are not those of this rank's part.
    """
    group = tp_group or default_group()
    _check_part(weight.shape[0], (vocab_start_index, vocab_end_index), group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return log_probs_of(hidden, target, head=weight, group=group).logps


def _check_part(width: int, bounds: tuple[int, int], group: Any) -> None:
    """Raise ValueError if SkyRL's bounds are not those of this rank's part of the vocabulary, of
    `width` ids.
    """
    start = 0 if group is None else torch.distributed.get_rank(group) * width
    if bounds != (start, start + width):
        raise ValueError(
            f"vocab_start_index={bounds[0]} and vocab_end_index={bounds[1]}, but the part of this"
            f" rank of tp_group, by its {width} rows or columns, is [{start}, {start + width}):"
            " pass the group that the head is cut over."
        )


# ---- over recorded sets


def sample_support_logprobs(
    logits_or_hidden: Tensor,
    sampled_ids: Tensor,
    support_ids: Tensor,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    lm_head_weight: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log-probs fp32 over the sets, bool: rows with a set), in the shape of sampled_ids.

    Rows without a set have 0 and False.

    logits_or_hidden   [.., V / ranks], or [.., H] with lm_head_weight [V / ranks, H]. Only the rows
                       of the weight that are in the sets are read.
    sampled_ids        int64 [..]
    support_ids        int32 [.., K], ids of the whole vocabulary, padded with -1. If a set does not
                       contain its sampled id, or lists an id twice, SkyRL computes the call: its
                       sum over the listed ids is then not a softmax.
    vocab_start_index, vocab_end_index   keyword arguments, as in `fused_lm_head_logprobs`
    tp_group           keyword argument, the same; None is one rank
    temperature        divides the logits

    chunk_size has no effect.
    """
    logps, _, scored = _over_support(
        logits_or_hidden,
        sampled_ids,
        support_ids,
        vocab_start_index,
        vocab_end_index,
        tp_group,
        lm_head_weight,
        temperature,
    )
    return logps, scored


def sample_support_scores(
    logits_or_hidden: Tensor,
    sampled_ids: Tensor,
    support_ids: Tensor,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    lm_head_weight: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    compute_entropy: bool = False,
    entropy_requires_grad: bool = False,
) -> Any:
    """Compute `sample_support_logprobs` of newer versions of SkyRL, with their type of result.

    compute_entropy   True: also the entropy over the sets, fp32, 0 in rows without a set. It has a
                      gradient if entropy_requires_grad is True.
    """
    from skyrl.backends.skyrl_train.utils.sample_support_replay import SampleSupportScores

    logps, H, scored = _over_support(
        logits_or_hidden, sampled_ids, support_ids, vocab_start_index, vocab_end_index, tp_group, lm_head_weight, temperature,
        entropy_mode(compute_entropy, entropy_requires_grad),
    )  # fmt: skip
    return SampleSupportScores(logprobs=logps, entropy=H, valid_mask=scored)


@with_trainer_names(
    targets="sampled_ids",
    hidden="logits_or_hidden",
    logits="logits_or_hidden",
    weight="lm_head_weight",
)
def _over_support(
    source: Tensor, sampled: Tensor, support: Tensor, vocab_start_index: int, vocab_end_index: int, tp_group: Any,
    lm_head_weight: Tensor | None, temperature: float, entropy: bool | str = False,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(log-probs, entropy or None, rows with a set)."""
    if support.shape[:-1] != sampled.shape:
        raise ValueError(
            f"support_ids has shape {list(support.shape)}, but sampled_ids has"
            f" {list(sampled.shape)}: pass one set for each."
        )
    in_order = support.sort(-1).values
    scored = (support >= 0).any(-1)
    lacking = scored & ~(support == sampled[..., None]).any(-1)
    twice = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
    if lacking.any() or twice.any():  # on every rank of the group alike
        raise NotCovered(
            "a sampled id outside of its set" if lacking.any() else "a set that lists an id twice"
        )
    width = source.shape[-1] if lm_head_weight is None else lm_head_weight.shape[0]
    _check_part(width, (vocab_start_index, vocab_end_index), tp_group)
    logps, H = log_probs_of(  # SkyRL's rows may have any leading shape
        source.flatten(0, -2), sampled.flatten(), head=lm_head_weight, temperature=temperature, group=tp_group, entropy=entropy,
        mask=scored.flatten(), kept=TokenSets.from_padded(in_order),
    )  # fmt: skip
    return logps.view(sampled.shape), None if H is None else H.view(sampled.shape), scored


def kept_sets(
    support: Tensor | tuple[Tensor, Tensor], loss_mask: Tensor, response_mask: Tensor | None = None
) -> TokenSets:  # fmt: skip
    """Return the sets of [B, A] response tokens, for a TokenBatch whose targets are these tokens.

    support        int32 [B, A, K], padded with -1; or (ids, offsets) of the response tokens of all
                   samples, concatenated.
    loss_mask      [B, A]: trained tokens. One of them per sample may have no ids: the end token
                   that SkyRL appends. Its row stands for the whole vocabulary, and so do rows that
                   are not trained.
    response_mask  [B, A]: the tokens that have sets in (ids, offsets); None = loss_mask.

    Raises ValueError, naming the sample, if more tokens lack a set, or if there is not one set for
    each token.
    """
    mask = loss_mask != 0
    if isinstance(support, Tensor):
        if support.shape[:-1] != mask.shape:
            raise ValueError(
                f"support has shape {list(support.shape)}, but loss_mask has {list(mask.shape)}:"
                " pass [B, A, K]."
            )
        sets = TokenSets.from_padded(support)
    else:
        given = mask if response_mask is None else response_mask != 0
        sets = sets_on_rows(response_sets("support", support, int(given.sum())), given)
    lacking = (sets.counts == 0).view(mask.shape) & mask
    for b in (lacking.sum(1) > 1).nonzero()[:1, 0].tolist():
        raise ValueError(
            f"support has no ids for tokens {lacking[b].nonzero()[:, 0].tolist()} of sample {b},"
            " which are trained on: only an appended end token may lack them."
        )
    return sets
