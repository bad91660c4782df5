"""verl: policy losses for its registry, and its log-probs and entropy on our kernels.

    # my_losses.py
    from grpo_kernels.integrations import verl
    verl.register()
    verl.bind()

    VERL_USE_EXTERNAL_MODULES=my_losses python -m verl.trainer.main_ppo \\
        actor_rollout_ref.actor.policy_loss.loss_mode=fused_vanilla \\
        actor_rollout_ref.model.use_fused_kernels=True

verl imports the module in every worker (`actor_rollout_ref.model.external_lib=my_losses` does it
too).

`register` puts one loss for every name of verl's own ("fused_vanilla", "fused_gspo", ...), which
reads the same fields of the actor's config, and one for every preset that verl has not
("fused_vespo", "fused_luspo", "fused_dapo", ...), with the preset's constants. Value, gradient with
respect to log-probs, denominators (`global_batch_info`) and metrics are verl's. The formula runs as
one autograd function, whose gradient is known in the forward. It costs little compared with the
head.

`bind` replaces verl's functions over the vocabulary. From hidden states, where logits never exist:
`linear_cross_entropy`, which the fused forward of impl_backend=triton calls, and the `forward` of
`FusedLinearForPPO`, which impl_backend=torch (the default) and liger call. From logits:
`logprobs_from_logits` and `entropy_from_logits`. Everything else stays verl's: rolled labels,
unpadding, entropy and KL terms, aggregation of those.

The fused forward of the Megatron engine calls `linear_cross_entropy` with a tensor-parallel group:
several ranks are covered. As in verl, the gradient of the hidden states is then a rank's own share,
which the gather of sequence parallelism sums up. With megatron-core 0.18 and later, verl passes
`fused_output_processor` to the model; `bind(megatron=True)` replaces it.

Replay: verl has none. If your rollout writes candidate sets of its sampler to
`data.non_tensor_batch["sampling_mask"]`, `kept_sets(data)` makes them the `kept` of a TokenBatch
for your own loss.

Not covered, and left to verl: Megatron's logits without the fused forward
(`verl.utils.megatron.tensor_parallel`), and `entropy_from_logits_with_chunking`. "bypass_mode" is
not registered: verl sets it itself when a rollout correction bypasses the old log-probs.

Tested with verl 0.9.1, 0.9.0, 0.8.0 and 0.7.1 on a CPU: the losses against its own, the
heads through its fused forward on a tiny Qwen2. Its trainer (Ray, vLLM), its Megatron engine and
anything on a GPU were not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import require, require_one_of
from ..formulas.divergence import Exact
from ..formulas.filters import TrustRegion
from ..formulas.surrogates import Cispo, Clip, ClipCov, Dro, Gmpo, KlCov, PolicyGradient, Sapo
from ..logprobs import token_divergence
from ..losses import LossOutput, objective_loss
from ..objective import NUMERICS, PRESETS, Objective
from ..token_sets import TokenSets
from ._swap import (
    Adapter,
    NotCovered,
    Slots,
    Trial,
    adapt_arguments,
    matches_version,
    trainer_names,
    unknown_option,
    with_trainer_names,
)
from ._tensors import (
    LossAndMetrics,
    at_least_one,
    bounded_clip,
    divergence_over_ids,
    entropy_from_logits,
    log_probs_of,
    logprobs_from_logits,
    logps_at_ids,
    masked_mean,
    ratio_terms,
    scored_batch,
    to_floats,
)
from .megatron import FusedOutput, logprobs_processor

ADAPTER = Adapter(
    "verl", "verl", ("0.7.1", "0.8.0", "0.9.0", "0.9.1"),
    {"linear_cross_entropy": "verl.utils.kernel.linear_cross_entropy.linear_cross_entropy",
     "fused_linear_for_ppo": "verl.utils.experimental.torch_functional.FusedLinearForPPO",
     "logprobs_from_logits": "verl.utils.torch_functional.logprobs_from_logits",
     "entropy_from_logits": "verl.utils.torch_functional.entropy_from_logits",
     "fused_output_processor": "verl.models.mcore.model_forward_fused.fused_output_processor"},
    {"nothing; then `actor_rollout_ref.actor.policy_loss.loss_mode=fused_vanilla`": "policy losses in its registry, in every process",
     "`actor_rollout_ref.model.external_lib=grpo_kernels.plugins.verl_head`":
     "log-probs and entropy, from hidden states with `use_fused_kernels`"},
)  # fmt: skip
#: Its distillation losses, older ones of which were not tested.
DISTILLATION = replace(
    ADAPTER, tested=("0.9.0", "0.9.1"), configured={},
    replaces={"topk_divergence": "verl.trainer.distillation.fsdp.losses.compute_forward_kl_topk"},
)  # fmt: skip


def _cispo_of_widths(cap: float, low: float) -> Cispo:
    """Return CISPO with the ratio clamped to [1 - low, 1 + cap], from clip widths as in verl."""
    return Cispo(cap=1 + cap, low=1 - low)


class _VerlLoss(NamedTuple):
    """Our equivalent of a policy loss of verl.

    preset      our preset that has the formula of the loss
    surrogate   makes the surrogate
    fields      {argument of `surrogate`: field of verl's actor config that has its value}
    """

    preset: str
    surrogate: Callable[..., Any]
    fields: Mapping[str, str]


_CLIP_WIDTHS = {"eps_low": "clip_ratio_low", "eps_high": "clip_ratio_high"}
#: verl's names of its policy losses -> our equivalents.
LOSSES: dict[str, _VerlLoss] = {
    "vanilla": _VerlLoss(
        "ppo",
        functools.partial(
            bounded_clip, "verl", name="clip_ratio_c", name_of_high="clip_ratio_high"
        ),
        {"low": "clip_ratio_low", "high": "clip_ratio_high", "delta": "clip_ratio_c"},
    ),
    "gspo": _VerlLoss("gspo", Clip, _CLIP_WIDTHS),
    "gpg": _VerlLoss("reinforce", PolicyGradient, {}),
    "geo_mean": _VerlLoss("gmpo", Gmpo, _CLIP_WIDTHS),
    "cispo": _VerlLoss(
        "cispo", _cispo_of_widths, {"cap": "clip_ratio_high", "low": "clip_ratio_low"}
    ),
    "sapo": _VerlLoss("sapo", Sapo, {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}),
    "dro": _VerlLoss("dro", Dro, {"beta": "policy_loss.dro_beta"}),
    "clip_cov": _VerlLoss(
        "clip_cov",
        ClipCov,
        {
            **_CLIP_WIDTHS,
            "share": "policy_loss.clip_cov_ratio",
            "low": "policy_loss.clip_cov_lb",
            "high": "policy_loss.clip_cov_ub",
        },
    ),
    "kl_cov": _VerlLoss(
        "kl_cov", KlCov, {"coef": "policy_loss.ppo_kl_coef", "share": "policy_loss.kl_cov_ratio"}
    ),
    "dppo_tv": _VerlLoss("dppo_tv", Cispo, {"cap": "clip_ratio_c"}),
    "dppo_kl": _VerlLoss("dppo_kl", Cispo, {"cap": "clip_ratio_c"}),
}
#: Losses that drop random tokens, so that two calls cannot be compared.
RANDOM = ("clip_cov",)
#: Presets that need inputs which verl does not pass to a policy loss, such as a reference.
WITHOUT = ("a2po", "distillation", "sampled_distillation")

#: verl's metrics: the share of clipped tokens, and of tokens clipped at the other bound.
CLIPPED_SHARE = "actor/pg_clipfrac"
LOWER_CLIPPED_SHARE = "actor/pg_clipfrac_lower"

#: verl's `loss_agg_mode` -> ours.
AGGREGATES = {
    "token-mean": "token-mean", "token-sum": "token-sum", "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean", "seq-mean-token-sum-norm": "constant",
}  # fmt: skip


# ---- policy losses


def register(prefix: str = "fused_", *, any_version: bool = False) -> list[str]:
    """Add our policy losses to verl's registry, and return their names there.

    prefix        written in front of each name: of verl's own losses (`LOSSES`) and of our presets
    any_version   whether a version of verl that was not tested is accepted without a comparison.
                  If not, the first call of a loss that verl has too is compared with verl's own,
                  and RuntimeError is raised if they differ.

    verl's own losses stay registered under their names. A second call registers nothing again.
    """
    # Compares first calls if the installed version was not tested, and does nothing otherwise.
    trial = Trial(ADAPTER.untested(any_version))
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    # An older verl has fewer losses, and its config lacks the constants of the others.
    in_verl = [name for name in LOSSES if name in POLICY_LOSS_REGISTRY]
    # WITHOUT: presets that need inputs which verl does not pass to a policy loss.
    presets = [name for name in PRESETS if name not in LOSSES and name not in WITHOUT]
    for name in (*in_verl, *presets):
        if hasattr(POLICY_LOSS_REGISTRY.get(prefix + name), "grpo_kernels"):
            continue  # an earlier call has registered it
        # All losses of verl have the same arguments. "vanilla" shows those of a preset.
        theirs = POLICY_LOSS_REGISTRY.get(name) or POLICY_LOSS_REGISTRY.get("vanilla")
        ours = adapt_arguments(policy_loss(name), theirs)
        if name in in_verl and name not in RANDOM:  # a random loss differs from call to call
            # Compare the loss, the first result, but not the metrics.
            ours = trial.compare_first_calls(ours, theirs, part=itemgetter(0))
        vars(ours)["grpo_kernels"] = True  # marks it as ours, for a later call
        register_policy_loss(prefix + name)(ours)
    return [prefix + name for name in (*in_verl, *presets)]


def policy_loss(objective: str | Objective) -> Callable[..., LossAndMetrics]:
    """Return a policy loss with verl's arguments and results.

        from verl.trainer.ppo.core_algos import register_policy_loss

        objective = Objective.preset("vespo", aggregate="constant")
        register_policy_loss("mine")(policy_loss(objective))

    objective   the name of a loss of verl (`LOSSES`): constants are read from verl's config, and
                the aggregation from loss_agg_mode. Or the name of one of our presets, or an
                Objective: constants and aggregate are its own, and verl's config gives only the
                denominators.

    The arguments of the result are verl's:

    old_log_prob, log_prob, advantages
                         fp32 [B, T]
    response_mask        [B, T], nonzero for trained tokens
    loss_agg_mode        verl's name of the aggregation, a key of `AGGREGATES`
    config               verl's actor config
    rollout_is_weights   fp32 [B, T], weights of the policy term, or None

    The loss is 0-d fp32, and the metrics are floats under verl's names. With the aggregate
    "constant", an objective without max_tokens takes verl's loss_scale_factor, or else T.
    """
    # The objective of every call. None: each call makes it from verl's config.
    fixed: Objective | None = None
    name = "objective"
    if not isinstance(objective, str):
        fixed = objective
    else:
        name = objective
        if name not in LOSSES:
            numerics = "verl" if name in NUMERICS["verl"] else None
            fixed = Objective.preset(name, numerics=numerics, beta=0.0)
    if fixed is not None:
        remedy = (
            f"beta={fixed.beta} and entropy_coef={fixed.entropy_coef}: verl adds KL and entropy"
            " itself: pass 0.0."
        )
        require(fixed.beta == 0 and not fixed.needs_entropy, "objective", objective, remedy)

    @adapt_arguments
    @with_trainer_names(
        logps="log_prob",
        old_logps="old_log_prob",
        mask="response_mask",
        targets="response_mask",
        weights="rollout_is_weights",
    )
    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> LossAndMetrics:
        """Return (loss, metrics) of a micro-batch.

        old_log_prob, log_prob, advantages
                             fp32 [B, T]
        response_mask        [B, T], nonzero for trained tokens
        loss_agg_mode        verl's name of the aggregation
        config               verl's actor config
        rollout_is_weights   fp32 [B, T], importance weights, or None
        """
        spec = fixed or objective_of(name, config, loss_agg_mode)
        info = dict(getattr(config, "global_batch_info", None) or {})
        if spec.aggregate == "constant" and spec.max_tokens is None:
            max_tokens = info.get("loss_scale_factor") or response_mask.shape[1]
            spec = replace(spec, max_tokens=int(max_tokens))
        mask = response_mask.bool()
        weights = rollout_is_weights
        if name == "geo_mean":
            # verl takes the mean over the sequences of the micro-batch, whatever the global counts
            # are. The weight of a sequence is the geometric mean of its tokens' weights.
            info = {}
            if weights is not None:
                logs = torch.where(mask, (weights + 1e-10).log(), 0.0)
                weights = (logs.sum(1) / mask.sum(1).clamp(min=1)).exp()
        batch = scored_batch(mask, advantages, old_logps=old_log_prob, weights=weights)
        out = objective_loss(log_prob, batch, spec, normalizer=_normalizer(spec, info))
        return out.loss, to_floats(_metrics(name, spec, out, batch, log_prob))

    loss.__name__ = f"fused_{name}"
    return loss


def objective_of(name: str, config: Any, loss_agg_mode: str = "token-mean") -> Objective:
    """Return the objective of one of verl's policy losses.

    name            the name of the loss in verl, a key of `LOSSES`
    config          verl's actor config, whose fields are the constants of the loss
    loss_agg_mode   verl's name of the aggregation, a key of `AGGREGATES`

    Raises ValueError naming the argument or the field that is not supported.
    """
    remedy = "verl's losses read clip_ratio and more from the actor's config."
    require(config is not None, "config", config, remedy)
    require_one_of("loss_agg_mode", loss_agg_mode, AGGREGATES)
    # Our equivalent: a preset, its surrogate, and the fields of the config that are its arguments.
    loss = LOSSES[name]

    def field_value(field: str) -> Any:
        value = attrgetter(field)(config)  # the field may be nested, as policy_loss.dro_beta
        is_width = field in ("clip_ratio_low", "clip_ratio_high")
        # In verl clip_ratio is the default of both widths.
        return config.clip_ratio if is_width and value is None else value

    arguments = {argument: field_value(field) for argument, field in loss.fields.items()}
    with trainer_names(**loss.fields):  # errors of the surrogate name verl's fields
        changes: dict[str, Any] = {"surrogate": loss.surrogate(**arguments)}
    preset = Objective.preset(loss.preset, numerics="verl")
    # These losses of verl ignore loss_agg_mode.
    is_fixed = name in ("geo_mean", "sapo") or (name == "gspo" and _gspo_by_sequence())
    if not is_fixed:
        changes["aggregate"] = AGGREGATES[loss_agg_mode]
    if name.startswith("dppo"):
        # The clip widths of verl's config bound the trust region, a filter of tokens.
        low = field_value("clip_ratio_low")
        high = field_value("clip_ratio_high")
        regions = [f for f in preset.filters if isinstance(f, TrustRegion)]
        changes["filters"] = tuple(replace(region, low=low, high=high) for region in regions)
    return replace(preset, **changes)


@functools.cache
def _gspo_by_sequence() -> bool:
    """Return whether the GSPO of the installed verl ignores loss_agg_mode, as before 0.9.1.

    It then takes the mean over sequences of the mean over their tokens.
    """
    return matches_version(ADAPTER.installed(), (*(f"0.{minor}" for minor in range(9)), "0.9.0"))


def _normalizer(objective: Objective, info: dict[str, Any]) -> float | Tensor | None:
    """Return the denominator of a loss over all micro-batches and ranks, as in verl's `agg_loss`.

    objective   the objective of the loss, whose aggregate decides what is counted
    info        verl's `global_batch_info`: the number of data-parallel ranks, and global counts

    None stands for the denominator of this micro-batch alone. verl averages gradients over the
    ranks, so a global count is divided by the number of ranks.
    """
    ranks = info.get("dp_size") or 1
    if objective.aggregate == "token-sum":
        return 1 / ranks
    key = "batch_num_tokens" if objective.aggregate == "token-mean" else "global_batch_size"
    total = info.get(key)
    if total is None:
        require(ranks == 1, key, None, f"with dp_size={ranks} the denominator spans all ranks.")
        return None
    if objective.aggregate == "constant":
        total = total * objective.max_tokens
    return at_least_one(total) / ranks


def _metrics(
    name: str, objective: Any, out: LossOutput, batch: Any, log_prob: Tensor
) -> dict[str, Tensor]:
    """Return verl's metrics of a policy loss under verl's names, 0-d tensors.

    name        the name of verl's loss
    objective   the objective of the loss
    out         the result of the loss
    batch       its batch, with tensors [B, T]
    log_prob    [B, T], the policy's log-probs that the loss was computed from
    """
    if name == "gpg":  # verl reports no metrics of it
        return {}
    log_ratio = torch.where(batch.mask, out.logps - batch.old_logps, 0.0)
    if objective.log_ratio_bounds is not None and objective.level == "token":
        log_ratio = log_ratio.clamp(*objective.log_ratio_bounds)
    kl = log_ratio.abs() if name == "kl_cov" else -log_ratio
    metrics = {"actor/ppo_kl": masked_mean(kl, batch.mask)}
    clipped_tokens = _clipped_tokens(name, objective, out, batch, log_prob, log_ratio)
    for metric, is_clipped in clipped_tokens.items():
        metrics[metric] = masked_mean(is_clipped.float(), batch.mask)
    return metrics


def _clipped_tokens(
    name: str, objective: Any, out: LossOutput, batch: Any, log_prob: Tensor, log_ratio: Tensor
) -> dict[str, Tensor]:
    """Return {metric: the tokens that it counts, bool [B, T]}: what verl calls clipped in a loss.

    verl has two such metrics, pg_clipfrac (CLIPPED_SHARE) and pg_clipfrac_lower
    (LOWER_CLIPPED_SHARE). Each of its losses defines both in its own way, whatever their names say,
    or does not report them. This function follows the definition of each loss, so that a run
    reports the same numbers with our losses.

    name        the name of verl's loss
    objective   the objective of the loss
    out         the result of the loss
    batch       its batch, with tensors [B, T]
    log_prob    [B, T], the policy's log-probs that the loss was computed from
    log_ratio   fp32 [B, T], the log-ratio of each token, 0 where masked

    The result has only the metrics that verl reports for this loss.
    """
    advantages = batch.advantages
    surrogate = objective.surrogate
    ratio = log_ratio.exp()
    low, high = surrogate.ratio_bounds
    no_token = torch.zeros_like(batch.mask)
    if name in ("kl_cov", "dro"):  # verl reports neither metric
        return {}
    if name == "sapo":  # its gate is smooth, so nothing is clipped
        return {CLIPPED_SHARE: no_token, LOWER_CLIPPED_SHARE: no_token}
    if name == "cispo":
        is_clipped = (ratio < low) | (ratio > high)
        return {CLIPPED_SHARE: is_clipped, LOWER_CLIPPED_SHARE: no_token}
    if name in ("dppo_tv", "dppo_kl"):
        # These losses drop tokens by a trust region, which is the only filter of the objective. In
        # verl an advantage of 0 counts as negative.
        (trust_region,) = objective.filters
        signs = torch.where(advantages == 0, -1.0, advantages)
        is_kept = trust_region.keeps(out.logps, batch.old_logps, signs)
        return {CLIPPED_SHARE: ~is_kept, LOWER_CLIPPED_SHARE: (ratio > high) & is_kept}
    if name == "geo_mean":
        is_clipped = (log_ratio < -surrogate.eps_low) | (log_ratio > surrogate.eps_high)
        return {
            CLIPPED_SHARE: is_clipped & (advantages > 0),
            LOWER_CLIPPED_SHARE: is_clipped & (advantages < 0),
        }
    if name == "clip_cov":
        # verl reports the tokens that this loss dropped at random. The loss does not return which
        # they are, but they have no gradient. Other tokens have one, unless they are clipped or
        # have an advantage or a weight of 0.
        gradient = log_ratio  # without gradients the metric has no meaning, but must have a value
        if out.loss.requires_grad:
            (gradient,) = torch.autograd.grad(out.loss, log_prob, retain_graph=True)
        is_clipped_low, is_clipped_high = surrogate.clipped(ratio, advantages)
        has_no_term = is_clipped_low | is_clipped_high | (advantages == 0)
        if batch.weights is not None:
            has_no_term = has_no_term | (batch.weights == 0)
        return {CLIPPED_SHARE: (gradient == 0) & ~has_no_term}
    _, is_clipped, _ = ratio_terms(objective, out.logps, out.rows, batch)
    is_dual_clipped = no_token
    if name == "vanilla":
        is_dual_clipped = (ratio > surrogate.delta) & (advantages < 0)
    return {CLIPPED_SHARE: is_clipped.view_as(ratio), LOWER_CLIPPED_SHARE: is_dual_clipped}


# ---- log-probs and entropy


def bind(
    *,
    hidden: bool = True,
    logits: bool = True,
    megatron: bool = False,
    strict: bool = False,
    any_version: bool = False,
) -> Slots:
    """Replace verl's functions by ours in this process, until `undo()` of the result.

    hidden     whether the functions of hidden states are replaced, which use_fused_kernels calls:
               `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy` (impl_backend=triton),
               and `FusedLinearForPPO.forward` of verl.utils.experimental.torch_functional
               (impl_backend=torch, the default, and liger)
    logits     whether `logprobs_from_logits` and `entropy_from_logits` of
               verl.utils.torch_functional are replaced, also in the engines that imported them.
               Bind before the engine is built, because it stores the entropy function.
    megatron   whether `fused_output_processor` of verl.models.mcore.model_forward_fused is
               replaced, which the Megatron engine passes to megatron-core 0.18 and later. A
               version of verl that was not tested then needs any_version=True.
    strict     True: a call that ours does not support raises RuntimeError. False: verl's own
               function computes it.
    any_version
               False: under a version of verl that was not tested, the first calls are compared
               with verl's own functions, and RuntimeError is raised if they differ. True: they are
               not compared.

    Returns `Slots`: `undo()` restores verl's functions, and `counts` has the number of calls.
    Raises RuntimeError if a function is replaced already or has other arguments.
    """
    slots = Slots(ADAPTER, strict, any_version)
    if hidden:
        slots.bind(linear_cross_entropy)
        slots.bind(fused_linear_for_ppo, attribute="forward", method=True)
    if logits:
        slots.bind(logprobs_from_logits)
        slots.bind(entropy_from_logits)
    if megatron:
        # The backward adds to main_grad. A comparison would run it twice.
        slots.bind(fused_output_processor, comparable=False)
    return slots


def fused_output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    context: Any,
    config: Any,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    loss_mask: Tensor | None = None,
    input_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    decoder_input: Tensor | None = None,
    inference_context: Any = None,
    packed_seq_params: Any = None,
    runtime_gather_output: bool | None = None,
    compute_language_model_loss: Any = None,
) -> FusedOutput:
    """Return log-probs and entropy of labels, fp32 [B, S], in the fields of verl's output.

    hidden_states   [S, B, H], or [S / ranks, B, H] with sequence parallelism
    output_layer    Megatron's output layer
    output_weight   the shared embedding [V / ranks, H], or None for the layer's own weight
    labels          int64 [B, S], shifted
    context         verl's FusedOutputProcessorContext, whose temperature is used
    config          the TransformerConfig of the model
    scale_logits    what the model does to its logits (muP), or None
    loss_mask       [B, S], 0 for positions that are not computed

    megatron-core calls it in place of the output layer, with more arguments than are used. Ids that
    pad the vocabulary are in the softmax, as in verl. Three things differ from verl's function: the
    muP scale of the model is applied, the gradient of the hidden states is summed over the
    tensor-parallel ranks without sequence parallelism too, and the gradient of the weight is added
    to main_grad if Megatron does so for other weights.
    """
    return logprobs_processor(
        hidden_states=hidden_states,
        output_layer=output_layer,
        output_weight=output_weight,
        labels=labels,
        context=context,
        config=config,
        scale_logits=scale_logits,
        loss_mask=loss_mask,
    )


@with_trainer_names(targets="labels")
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probs of labels and the entropies, fp32 [N] each.

    hidden              [..., H], N rows in all
    weight              [V, H]; with a dist_process_group of several ranks this rank's shard,
                        [V / ranks, H]
    labels              int64, N ids in any shape
    temperature         a number, or a tensor with 1 or N elements
    reduction           only "none"; verl computes any other
    dist_process_group  the tensor-parallel group. The gradient of hidden is then this rank's share
                        of the sum, which verl's sequence-parallel layers before the head add up.

    It has the arguments and results of verl's function of this name.

    The decorator makes errors use the names of these arguments.
    """
    if reduction != "none":
        raise NotCovered(f"reduction={reduction!r}")
    rows = hidden.reshape(-1, hidden.shape[-1])
    ids = labels.flatten()
    results = log_probs_of(
        rows,
        ids,
        head=weight,
        temperature=_per_token(temperature, ids),
        group=dist_process_group,
        entropy=True,
    )
    return results.logps, results.entropy


@with_trainer_names(hidden="hidden_states", weight="vocab_weights", targets="input_ids")
def fused_linear_for_ppo(
    module: Any,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probs of input_ids and the entropies, fp32 in the shape of input_ids.

    module         verl's FusedLinearForPPO. chunk_size and impl_backend choose among verl's own
                   implementations and have no effect here. If another option of the module is set,
                   verl computes the call.
    hidden_states  [..., H]
    vocab_weights  [V, H]
    input_ids      [...], the ids that are predicted: verl shifts them
    temperature    a number, or a tensor with one element or one for each id

    It has the arguments and results of the method that it replaces, `FusedLinearForPPO.forward`.

    The decorator makes errors use the names of these arguments.
    """
    unknown = unknown_option(module, ("chunk_size", "impl_backend"))
    if unknown is not None:
        raise NotCovered(f"option {unknown[0]}={unknown[1]!r}, which grpo_kernels does not know")
    ids = input_ids.to(torch.int64)
    results = log_probs_of(
        hidden_states,
        ids,
        head=vocab_weights,
        temperature=_per_token(temperature, ids),
        entropy=True,
    )
    return results.logps, results.entropy


def _per_token(temperature: float | Tensor, ids: Tensor) -> float | Tensor:
    """Give a temperature tensor the shape of ids, or no dimension if it has one element.

    verl passes one temperature, or one for each token of a flat row, also if ids are [1, N].
    """
    if not isinstance(temperature, Tensor):
        return temperature
    if temperature.numel() == 1:
        return temperature.reshape(())
    # Of any other size it is returned unchanged. The caller refuses it with both shapes.
    return temperature.reshape(ids.shape) if temperature.numel() == ids.numel() else temperature


# ---- sets of a sampler


def kept_sets(data: Any, field: str = "sampling_mask") -> TokenSets | None:
    """Return the candidate sets of the response tokens [B, T] of a batch, or None without them.

    The candidate set of a token has the ids that top-k or top-p left when it was sampled.

        batch = TokenBatch(
            data.batch["responses"], advantages, mask=data.batch["response_mask"] != 0,
            kept=verl.kept_sets(data),
        )

    data    verl's DataProto
    field   the name of the record in data.non_tensor_batch. It has one element per sample: a list
            of ids for each sampled token, as in vLLM's `sampling_mask.token_ids`, or None.

    The lists of a sample belong to its tokens in response_mask, in order. Other tokens (of tools,
    and padding) get an empty set, which stands for the whole vocabulary. Raises ValueError naming
    the sample if the number of lists is not the number of tokens in its response_mask.
    """
    record = data.non_tensor_batch.get(field)
    if record is None:
        return None
    return TokenSets.from_lists([*record], generated=data.batch["response_mask"] != 0)


# ---- distillation from a teacher's top-k

#: The losses that `register_distillation` adds by default: {name without prefix: divergence}.
DISTILLATION_LOSSES: Mapping[str, Exact] = {
    "forward_kl_topk": Exact("forward", tail="ignore"),
    "forward_kl_topk_bin": Exact("forward"),
    "forward_kl_topk_renormalised": Exact("forward", tail="renormalise"),
    "reverse_kl_topk": Exact("reverse"),
    "reverse_kl_topk_generalised": Exact("reverse", tail="generalised"),
    "jsd_topk": Exact("jsd"),
    "tv_topk": Exact("tv"),
}

#: The losses that `register_distillation` has added in this process: {name: divergence}.
_registered: dict[str, Exact] = {}


def register_distillation(
    losses: Mapping[str, Exact] | None = None, prefix: str = "fused_", *, any_version: bool = False
) -> list[str]:
    """Add losses to verl's registry of distillation losses, and return their names there.

    Also call `bind_distillation`, which makes verl compute them. Then verl can be configured with

        distillation.distillation_loss.loss_mode=fused_reverse_kl_topk
        distillation.distillation_loss.use_policy_gradient=False

    losses        {name: divergence}; None for `DISTILLATION_LOSSES`
    prefix        written in front of each name
    any_version   whether a version of verl that was not tested is accepted

    The same losses may be registered again, because a module may be imported twice. Raises
    ValueError if a name is registered with another divergence, and RuntimeError for a version of
    verl that was not tested, unless any_version=True.
    """
    _require_tested(any_version)
    from verl.trainer.distillation.losses import (
        DistillationLossSettings,
        register_distillation_loss,
    )

    named = {
        prefix + name: exact
        for name, exact in (DISTILLATION_LOSSES if losses is None else losses).items()
    }
    for name, exact in named.items():
        require(
            isinstance(exact, Exact),
            f"losses[{name!r}]",
            exact,
            "pass an Exact, for example Exact('reverse').",
        )
        known = _registered.get(name, exact)
        require(
            known == exact,
            f"losses[{name!r}]",
            exact,
            f"{known} is registered under that name: pass another prefix.",
        )
        if name not in _registered:
            register_distillation_loss(DistillationLossSettings(names=[name], use_topk=True))(
                _distillation_loss
            )
            _registered[name] = exact
    return list(named)


def bind_distillation(*, strict: bool = False, any_version: bool = False) -> Slots:
    """Replace verl's function of top-k distillation losses by `topk_divergence`.

    verl calls this one function for every top-k loss, in the forward of the model, where the logits
    are. Ours computes the losses that `register_distillation` has added, and passes calls for any
    other loss, such as verl's `forward_kl_topk`, on to verl's function.

    strict        whether a call for a loss that was not added raises RuntimeError instead
    any_version   whether a version of verl that was not tested is accepted

    Returns `Slots`, whose `undo()` restores verl's function. Raises RuntimeError for a version of
    verl that was not tested, unless any_version=True, and if the function is replaced already.

    `fused_forward_kl_topk` has the formula of verl's `forward_kl_topk`, the sum over the teacher's
    ids alone. It does not apply two clamps that stop gradients in verl: log-probs are not clamped
    to `log_prob_min_clamp`, and the value of a token is not clamped to at least 0. verl itself
    applies `loss_max_clamp` to the result, to values of either sign. Metrics equal verl's, but the
    overlap of the teacher's and the student's top-k ids is not measured.

    The strategies fsdp and fsdp2 are supported, also with sequence parallelism. Megatron and
    VeOmni's fused loss do not pass logits to this function, and are refused. verl's estimators from
    the sampled token (k1, k3, ...) do not use this function.
    """
    _require_tested(any_version)
    # The version is checked above. Without any_version=True, `Slots` would compare the first call
    # with verl's function under an untested version, but verl has none of these losses.
    return DISTILLATION.bind(topk_divergence, strict=strict, any_version=True)


def _require_tested(any_version: bool) -> None:
    """Raise RuntimeError if the distillation losses were not tested with the installed verl.

    any_version   accept every version
    """
    # A sentence that names the installed version, or None if it was tested.
    version = DISTILLATION.untested(any_version)
    if version is not None:
        raise RuntimeError(
            f"{version}: install verl {DISTILLATION.tested[-1]}, or pass any_version=True."
        )


def topk_divergence(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str,
) -> dict[str, Tensor]:
    """Return the distillation loss of each of n packed tokens, fp32 [1, n], and two statistics.

    student_logits           [1, n, V], the rows of this sequence-parallel rank
    teacher_topk_log_probs   nested [n, K] of all ranks, the teacher's log-probs of its K top ids
    teacher_topk_ids         nested [n, K], these ids
    config                   verl's DistillationConfig. Its loss_mode names a registered loss;
                             verl computes any other.
    data_format              not used

    The result has "distillation_losses", differentiable, and "student_mass" and "teacher_mass": the
    probability that student and teacher give to the K ids.

    Padding has rows in which an id repeats. If the divergence has a tail (all ids outside of the
    K), such a row gets 0. If it is a sum over the K ids alone, it counts an id as often as it is
    listed, as verl does.
    """
    from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor

    # verl's own function does not read loss_mode.
    mode: Any = getattr(config.distillation_loss, "loss_mode", None)
    exact = _registered.get(mode)  # the divergence of a loss that `register_distillation` added
    if exact is None:
        raise NotCovered(f"loss_mode={mode!r}")
    # The values of a nested tensor are packed: [n, K] over all sequences.
    ids = teacher_topk_ids.values().unsqueeze(0)
    teacher_logps = teacher_topk_log_probs.values().unsqueeze(0)
    if get_ulysses_sequence_parallel_world_size() > 1:  # take the tokens of this rank
        ids = slice_input_tensor(ids, dim=1)
        teacher_logps = slice_input_tensor(teacher_logps, dim=1)
    teacher_logps = teacher_logps.float()
    is_sum_over_ids = exact.tail == "ignore"
    # With a tail, these log-probs are for the statistic only. `token_divergence` reads the logits.
    with torch.set_grad_enabled(is_sum_over_ids and torch.is_grad_enabled()):
        logps, _, num_distinct = logps_at_ids(student_logits, ids)
    is_counted = (num_distinct == ids.shape[-1]) | is_sum_over_ids
    if is_sum_over_ids:
        losses = divergence_over_ids(exact, logps, teacher_logps)
    else:
        # A row that is not counted gets -1, which is padding: no ids of the teacher, so loss 0.
        known_ids = torch.where(is_counted[..., None], ids, -1).flatten(0, 1)
        teacher = TokenSets.from_padded(known_ids, values=teacher_logps.flatten(0, 1))
        losses = token_divergence(student_logits, teacher, exact)

    def mass(log_probs: Tensor) -> Tensor:
        return log_probs.detach().exp().sum(-1).masked_fill(~is_counted, 0.0)

    return {
        "distillation_losses": losses,
        "student_mass": mass(logps),
        "teacher_mass": mass(teacher_logps),
    }


def _distillation_loss(
    config: Any, distillation_config: Any, model_output: Any, data: Any
) -> LossAndMetrics:
    """Return (loss of each response token [B, R], metrics), as verl requires of a registered loss.

    config                verl's actor config
    distillation_config   verl's DistillationConfig
    model_output          the results of the forward, in which `topk_divergence` has already
                          computed the losses
    data                  verl's batch

    Raises ValueError for a strategy that is not supported, and RuntimeError without
    `bind_distillation`.
    """
    from verl.trainer.distillation import losses as theirs
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
    from verl.workers.utils.padding import no_padding_2_padding

    mode = distillation_config.distillation_loss.loss_mode
    if config.strategy not in ("fsdp", "fsdp2"):
        raise ValueError(
            f"loss_mode={mode!r} with strategy={config.strategy!r}: ours are for fsdp and fsdp2."
            " Take forward_kl_topk."
        )
    if not getattr(compute_forward_kl_topk, "grpo_kernels", False):
        raise RuntimeError(
            f"loss_mode={mode!r}, but verl's own function computed it: call"
            " verl.bind_distillation() in the same module."
        )
    # verl's function for its own top-k loss also computes the metrics of ours.
    _, metrics = theirs.compute_forward_kl_topk(config, distillation_config, model_output, data)
    return no_padding_2_padding(model_output["distillation_losses"], data), metrics
