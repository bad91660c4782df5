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
#: SkyRL's clipped policy loss in its `ppo_utils`, with which ours is compared under a version that
#: was not tested.
CLIPPED_LOSS = "ppo_policy_loss"
#: Surrogates whose loss is not linear in the advantage, which SkyRL has divided before the loss.
NOT_LINEAR = (ClipCov, KlCov, Dro, A2po)


def register(prefix: str = "fused_", *, any_version: bool = False) -> list[str]:
    """Add our presets to SkyRL's registry of policy losses, and return their names there.

    prefix        written in front of each preset's name
    any_version   whether a version of SkyRL that was not tested is accepted without a comparison.
                  If not, the first call compares SkyRL's own clipped loss with ours, and raises
                  RuntimeError if they differ.
    """
    # Compares the first call if the installed version was not tested, and does nothing otherwise.
    trial = Trial(ADAPTER.untested(any_version))
    from skyrl.backends.skyrl_train.utils import ppo_utils

    # SkyRL has divided the advantages by its denominators, so the loss must be linear in them. It
    # adds the KL itself.
    names = [
        name
        for name, preset in PRESETS.items()
        if not isinstance(preset.surrogate, NOT_LINEAR) and preset.beta == 0
    ]
    for name in names:
        # All policy losses of SkyRL have the same arguments.
        ours = adapt_arguments(policy_loss(name, trial), getattr(ppo_utils, CLIPPED_LOSS, None))
        ppo_utils.register_policy_loss(prefix + name)(ours)
    return [prefix + name for name in names]


def _compare_clipped_losses(
    trial: Trial,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None,
    rollout_logprobs: Tensor | None,
) -> None:
    """Compare SkyRL's own clipped loss with ours on the arguments of a policy loss.

    All policy losses of SkyRL share arguments, off-policy correction and reduction. If the clipped
    losses agree, the installed version handles these as a tested version does.

    trial   compares values and gradients of two functions, and raises RuntimeError if they differ
    log_probs, old_log_probs, advantages
            fp32 [B, T]
    config  SkyRL's algorithm config
    loss_mask, rollout_logprobs
            [B, T], or None: trained tokens, and the sampler's log-probs
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss

    config = copy.copy(config)
    config.policy_loss_type = "regular"  # SkyRL's name of its clipped loss
    if hasattr(config, "score_centering"):
        config.score_centering = None  # a clipped loss does not support it
    clip = Clip(config.eps_clip_low, config.eps_clip_high)
    ours = policy_loss(Objective.preset("grpo", surrogate=clip, beta=0.0, aggregate="token-sum"))
    arguments = (log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)

    def loss_without_metrics(result: LossAndMetrics) -> Tensor:
        loss, _ = result
        return loss

    trial.compare(
        CLIPPED_LOSS, ours, ppo_policy_loss, call=(arguments, {}), part=loss_without_metrics
    )


def policy_loss(
    objective: str | Objective, trial: Trial | None = None
) -> Callable[..., LossAndMetrics]:
    """Return a policy loss with SkyRL's arguments and results.

    objective   the name of a preset (with SkyRL's constants if SkyRL has that objective), or an
                Objective with aggregate="token-sum", beta=0 and entropy_coef=0
    trial       compares SkyRL's clipped loss with ours before the first call, as `register` says;
                None for no comparison

    The arguments of the result are SkyRL's:

    log_probs, old_log_probs, advantages
                       fp32 [B, T]
    config             SkyRL's algorithm config
    loss_mask          [B, T], nonzero for trained tokens; None if all are
    rollout_logprobs   fp32 [B, T], the sampler's log-probs, or None. If given, the presets dppo_tv,
                       dppo_kl and rollout_is take the ratio to them, as SkyRL does, and not to
                       old_log_probs.
    rollout_topk_logprobs, topk_log_probs
                       fp32 [B, T, K], needed for score centering: the log-probs of the sampler's
                       likeliest ids under the sampler (-inf for padding) and under the policy

    The loss is the sum over tokens, 0-d, because SkyRL has already divided the advantages. The
    metrics are floats under SkyRL's names. Raises ValueError naming the argument that is not
    supported.
    """
    name = "objective"
    if isinstance(objective, str):
        name = objective
        numerics = "skyrl" if name in NUMERICS["skyrl"] else None
        spec = Objective.preset(name, numerics=numerics, aggregate="token-sum", beta=0.0)
    else:
        spec = objective
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

        if trial is not None and trial.pending(CLIPPED_LOSS):
            _compare_clipped_losses(
                trial, log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs
            )
        # SkyRL's function multiplies a loss by its weights. A loss of 1 gives the weights.
        ones = torch.ones_like(log_probs)
        correction = config.off_policy_correction
        mask_before_correction = ones if loss_mask is None else loss_mask
        weights, mask, metrics = apply_off_policy_correction(
            ones, old_log_probs, rollout_logprobs, mask_before_correction, correction
        )
        # Whether the ratio is to the sampler, and not to the old policy.
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
            ratio_metrics = _cispo_metrics(log_ratios, spec)
        else:
            ratio_metrics = {"clip_ratio": excluded_share(out, spec)}
        return value, to_floats(ratio_metrics) | metrics

    loss.__name__ = f"fused_{name}"
    return loss


def _cispo_metrics(log_ratios: Tensor, objective: Objective) -> dict[str, Tensor]:
    """Return SkyRL's metrics of CISPO under SkyRL's names, 0-d tensors.

    log_ratios   fp32 [num_tokens], of the trained tokens
    objective    has the bounds of the clamped ratio
    """
    ratios = log_ratios.clamp(-20.0, 20.0).exp()  # SkyRL's bounds
    if ratios.numel() == 0:
        ratios = log_ratios.new_ones(1)  # as in SkyRL; a mean of no ratios would be NaN
    clamped = ratios.clamp(*objective.surrogate.ratio_bounds)
    return {
        "clip_ratio": (clamped != ratios).float().mean(),
        "cispo/ratio_mean": ratios.mean(),
        "cispo/ratio_clamped_mean": clamped.mean(),
        "cispo/ratio_max": ratios.max(),
        "cispo/ratio_min": ratios.min(),
    }


def bind(
    *,
    megatron: bool = False,
    replay: bool = False,
    strict: bool = False,
    any_version: bool = False,
) -> Slots:
    """Replace SkyRL's functions of log-probs and entropy by ours, until `undo()` of the result.

    Call it before `HFModelWrapper` is created, because that stores the entropy function.

    megatron      whether the fused head of SkyRL's Megatron worker is also replaced
    replay        whether the function of log-probs over recorded candidate sets (the ids that top-k
                  or top-p left when a token was sampled) is also replaced
    strict        True: a call that ours does not support raises RuntimeError. False: SkyRL's own
                  function computes it.
    any_version   False: under a version of SkyRL that was not tested, the first calls are compared
                  with SkyRL's own functions, and RuntimeError is raised if they differ. True: they
                  are not compared.

    Returns `Slots`: `undo()` restores SkyRL's functions, and `counts` has the number of calls.
    Raises RuntimeError if a function is replaced already or has other arguments.
    """
    slots = ADAPTER.bind(
        logprobs_from_logits, chunked_entropy_from_logits, strict=strict, any_version=any_version
    )
    if megatron:
        slots.bind(fused_lm_head_logprobs)
    if replay:
        # Newer versions of SkyRL have another function, which also returns the entropy.
        has_scores = hasattr(importlib.import_module(SUPPORT), "sample_support_scores")
        slots.bind(sample_support_scores if has_scores else sample_support_logprobs)
    return slots


@with_trainer_names(mask="attention_mask", targets="logits")
def chunked_entropy_from_logits(
    logits: Tensor,
    requires_grad: bool = False,
    attention_mask: Tensor | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Return the entropy of each row of logits in nats, fp32 [B, S].

    logits           [B, S, V]
    requires_grad    whether the entropy is differentiable
    attention_mask   [B, S]: the entropy is 0 where it is 0. None: all rows are computed.
    chunk_size       not used

    The decorator makes errors use the names of these arguments.
    """
    mask = None if attention_mask is None else attention_mask != 0
    return entropy_from_logits(logits, mask=mask, gradient=requires_grad)


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
    """Return the log-probs of target, fp32 [B, S], from hidden states.

    backend          not used: it chooses among SkyRL's own implementations
    hidden           [B, S, H], already divided by the temperature. Its gradient is this rank's
                     share of the sum, which SkyRL's layers before the head add up.
    weight           [V, H], or this rank's [V / ranks, H]
    target           int64 [B, S]
    vocab_start_index, vocab_end_index
                     the ids of this rank's rows of the weight
    chunk_size       not used
    tp_group         the tensor-parallel group; None for the default group of torch.distributed, or
                     for one rank if torch.distributed is not initialised
    inference_only   whether the result has no gradient

    Raises ValueError if the ids are not those of this rank.

    The decorator makes errors use the names of these arguments.
    """
    # None is the group of all ranks in SkyRL. Here it would mean a single rank.
    group = tp_group or default_group()
    _check_ids_of_rank(weight.shape[0], vocab_start_index, vocab_end_index, group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return log_probs_of(hidden, target, head=weight, group=group).logps


def _check_ids_of_rank(
    width: int, vocab_start_index: int, vocab_end_index: int, group: Any
) -> None:
    """Raise ValueError if this rank does not have the ids [vocab_start_index, vocab_end_index).

    width   number of ids per rank; rank r has the ids from r * width on
    group   the tensor-parallel group; None for one rank
    """
    start = 0 if group is None else torch.distributed.get_rank(group) * width
    if (vocab_start_index, vocab_end_index) != (start, start + width):
        raise ValueError(
            f"vocab_start_index={vocab_start_index} and vocab_end_index={vocab_end_index}, but the"
            " part of this"
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
    """Return (log-probs of the sampled ids over their candidate sets, rows that have a set).

    logits_or_hidden   [..., V / ranks], or [..., H] with lm_head_weight
    sampled_ids        int64 [...]
    support_ids        int32 [..., K], the candidate set of each row: ids of the whole vocabulary,
                       padded with -1
    vocab_start_index, vocab_end_index
                       the ids of this rank's logits or rows of the weight
    tp_group           the tensor-parallel group; None for one rank
    lm_head_weight     [V / ranks, H]. Only the rows in the sets are read.
    temperature        divides the logits
    chunk_size         not used

    The results are fp32 and bool, both in the shape of sampled_ids. A row without a set has 0 and
    False. If a set does not contain its sampled id, or lists an id twice, SkyRL computes the call:
    its sum over the listed ids is then not a softmax.
    """
    logps, _, has_set = _log_probs_over_support(
        logits_or_hidden,
        sampled_ids,
        support_ids,
        vocab_start_index=vocab_start_index,
        vocab_end_index=vocab_end_index,
        tp_group=tp_group,
        lm_head_weight=lm_head_weight,
        temperature=temperature,
        entropy=False,
    )
    return logps, has_set


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
    """Return log-probs, entropy and the rows that have a set, as SkyRL's SampleSupportScores.

    logits_or_hidden        [..., V / ranks], or [..., H] with lm_head_weight
    sampled_ids             int64 [...]
    support_ids             int32 [..., K], the candidate set of each row (the ids that the sampler
                            could draw), padded with -1
    vocab_start_index, vocab_end_index
                            the ids of this rank's logits or rows of the weight
    tp_group                the tensor-parallel group; None for one rank
    lm_head_weight          [V / ranks, H], or None for logits
    temperature             divides the logits
    chunk_size              not used
    compute_entropy         whether the entropy over the sets is computed: fp32 in the shape of
                            sampled_ids, 0 in rows without a set. If not, it is None.
    entropy_requires_grad   whether the entropy is differentiable

    Log-probs are over the sets, fp32, and 0 in rows without a set. Newer versions of SkyRL have
    this function in place of `sample_support_logprobs`.
    """
    from skyrl.backends.skyrl_train.utils.sample_support_replay import SampleSupportScores

    logps, entropies, has_set = _log_probs_over_support(
        logits_or_hidden,
        sampled_ids,
        support_ids,
        vocab_start_index=vocab_start_index,
        vocab_end_index=vocab_end_index,
        tp_group=tp_group,
        lm_head_weight=lm_head_weight,
        temperature=temperature,
        entropy=entropy_mode(compute_entropy, entropy_requires_grad),
    )
    return SampleSupportScores(logprobs=logps, entropy=entropies, valid_mask=has_set)


@with_trainer_names(
    targets="sampled_ids",
    hidden="logits_or_hidden",
    logits="logits_or_hidden",
    weight="lm_head_weight",
)
def _log_probs_over_support(
    logits_or_hidden: Tensor,
    sampled_ids: Tensor,
    support_ids: Tensor,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    lm_head_weight: Tensor | None,
    temperature: float,
    entropy: bool | str,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (log-probs, entropies or None, rows that have a set), each in sampled_ids' shape.

    logits_or_hidden   [..., V / ranks], or [..., H] with lm_head_weight
    sampled_ids        int64 [...]
    support_ids        int32 [..., K], the candidate set of each row (the ids that the sampler could
                       draw), padded with -1
    vocab_start_index, vocab_end_index
                       the ids of this rank's logits or rows of the weight
    tp_group           the tensor-parallel group; None for one rank
    lm_head_weight     [V / ranks, H], or None for logits
    temperature        divides the logits
    entropy            whether the entropy over the sets is computed: False, True or "detached"

    The decorator makes errors use the names of these arguments. Raises NotCovered for a set without
    its sampled id and for one that lists an id twice, which SkyRL has to compute.
    """
    if support_ids.shape[:-1] != sampled_ids.shape:
        raise ValueError(
            f"support_ids has shape {list(support_ids.shape)}, but sampled_ids has"
            f" {list(sampled_ids.shape)}: pass one set for each."
        )
    # The ids are the same on every rank of tp_group, so all ranks decide the same.
    has_set = (support_ids >= 0).any(-1)
    has_sampled_id = (support_ids == sampled_ids[..., None]).any(-1)
    if (has_set & ~has_sampled_id).any():
        raise NotCovered("a sampled id outside of its set")
    sorted_ids = support_ids.sort(-1).values
    is_repeated = (sorted_ids[..., 1:] == sorted_ids[..., :-1]) & (sorted_ids[..., 1:] >= 0)
    if is_repeated.any():
        raise NotCovered("a set that lists an id twice")
    # Number of ids on each rank.
    width = logits_or_hidden.shape[-1] if lm_head_weight is None else lm_head_weight.shape[0]
    _check_ids_of_rank(width, vocab_start_index, vocab_end_index, tp_group)
    logps, entropies = log_probs_of(
        logits_or_hidden.flatten(0, -2),
        sampled_ids.flatten(),
        head=lm_head_weight,
        temperature=temperature,
        group=tp_group,
        entropy=entropy,
        mask=has_set.flatten(),
        kept=TokenSets.from_padded(sorted_ids),
    )
    if entropies is not None:
        entropies = entropies.view(sampled_ids.shape)
    return logps.view(sampled_ids.shape), entropies, has_set


def kept_sets(
    support: Tensor | tuple[Tensor, Tensor], loss_mask: Tensor, response_mask: Tensor | None = None
) -> TokenSets:  # fmt: skip
    """Return the candidate sets of response tokens, for a `TokenBatch` with targets [B, A].

    The candidate set of a token has the ids that the sampler could draw. SkyRL records them.

    support        the recorded sets: int32 [B, A, K] padded with -1, or (ids, offsets) in CSR form
                   of the response tokens of all samples
    loss_mask      [B, A], nonzero for trained tokens
    response_mask  [B, A], nonzero for the tokens that have a set in (ids, offsets); None for
                   loss_mask

    A token without recorded ids gets an empty set, which stands for the whole vocabulary. One
    trained token per sample may have no ids, because SkyRL appends an end token. Raises ValueError
    naming the sample if more trained tokens have none, and ValueError if the number of sets is not
    the number of tokens.
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
        has_set = mask if response_mask is None else response_mask != 0
        sets = response_sets("support", support, tokens=int(has_set.sum()))
        sets = sets_on_rows(sets, has_set)
    lacks_ids = (sets.counts == 0).view(mask.shape) & mask
    wrong_samples = (lacks_ids.sum(1) > 1).nonzero()[:, 0].tolist()
    if wrong_samples:
        b = wrong_samples[0]
        raise ValueError(
            f"support has no ids for tokens {lacks_ids[b].nonzero()[:, 0].tolist()} of sample {b},"
            " which are trained on: only an appended end token may lack them."
        )
    return sets
