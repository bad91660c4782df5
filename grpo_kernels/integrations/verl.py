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
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any

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

#: verl's names of its losses -> ours of the preset that has its formula, the surrogate, and what it
#: is made of: fields of verl's config, or clip widths (low, high) and the ratios that they are
#: (from, to).
LOSSES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "vanilla": ("ppo", functools.partial(bounded_clip, "verl", name="clip_ratio_c", name_of_high="clip_ratio_high"), "low high clip_ratio_c"),
    "gspo": ("gspo", Clip, "low high"), "gpg": ("reinforce", PolicyGradient, ""), "geo_mean": ("gmpo", Gmpo, "low high"),
    "cispo": ("cispo", Cispo, "to from"), "sapo": ("sapo", Sapo, "tau_pos tau_neg"), "dro": ("dro", Dro, "policy_loss.dro_beta"),
    "clip_cov": ("clip_cov", ClipCov, "low high policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub"),
    "kl_cov": ("kl_cov", KlCov, "policy_loss.ppo_kl_coef policy_loss.kl_cov_ratio"),
    "dppo_tv": ("dppo_tv", Cispo, "clip_ratio_c"), "dppo_kl": ("dppo_kl", Cispo, "clip_ratio_c"),
}  # fmt: skip
#: Those that leave out tokens by lot.
RANDOM = ("clip_cov",)
#: Presets whose old_logps are not those of verl's policy loss, which is given no reference.
WITHOUT = ("a2po", "distillation", "sampled_distillation")

#: The metrics of tokens that are clipped, and of those at the other end.
CLIPPED_SHARES = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")

#: verl's `loss_agg_mode` -> ours.
AGGREGATES = {
    "token-mean": "token-mean", "token-sum": "token-sum", "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean", "seq-mean-token-sum-norm": "constant",
}  # fmt: skip


# ---- policy losses


def register(prefix: str = "fused_", *, any_version: bool = False) -> list[str]:
    """Add our losses to verl's registry, and return their names: `prefix` with each name of LOSSES
    that this verl has, and of our presets.

    No function of verl is replaced, and names that are registered already stay. Under an untested
    version of verl, unless any_version, the first call of a loss that verl has too is compared with
    verl's own: RuntimeError if they differ.
    """
    trial = Trial(ADAPTER.untested(any_version))
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    own = [
        name for name in LOSSES if name in POLICY_LOSS_REGISTRY
    ]  # an older verl has fewer, and no constants of the others
    names = [*own, *(name for name in PRESETS if name not in LOSSES and name not in WITHOUT)]
    for name in names:
        if hasattr(POLICY_LOSS_REGISTRY.get(prefix + name), "grpo_kernels"):
            continue
        ours = adapt_arguments(
            policy_loss(name), POLICY_LOSS_REGISTRY.get(name) or POLICY_LOSS_REGISTRY.get("vanilla")
        )
        if name in own and name not in RANDOM:
            ours = trial.compare_first_calls(ours, POLICY_LOSS_REGISTRY[name], itemgetter(0))
        vars(ours)["grpo_kernels"] = True
        register_policy_loss(prefix + name)(ours)
    return [prefix + name for name in names]


def policy_loss(objective: str | Objective) -> Callable[..., LossAndMetrics]:
    """Make a policy loss with verl's signature: (old_log_prob, log_prob, advantages, response_mask,
    loss_agg_mode, config, rollout_is_weights) -> (loss, metrics), all tensors [B, T].

        from verl.trainer.ppo.core_algos import register_policy_loss

        objective = Objective.preset("vespo", aggregate="constant")
        register_policy_loss("mine")(policy_loss(objective))

    objective   a name of verl's (LOSSES): constants from `config`, aggregation from
                `loss_agg_mode`, as verl's loss of that name has them. Another preset's name, or an
                Objective: its own constants and its own aggregate, and of verl's config only the
                denominators (and `loss_scale_factor`, or T, where its max_tokens is None).
    """
    name, fixed = (objective, None) if isinstance(objective, str) else ("objective", objective)
    if fixed is None and name not in LOSSES:
        fixed = Objective.preset(
            name, numerics="verl" if name in NUMERICS["verl"] else None, beta=0.0
        )
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
        wanted = fixed or objective_of(name, config, loss_agg_mode)
        info = dict(getattr(config, "global_batch_info", None) or {})
        if wanted.aggregate == "constant" and wanted.max_tokens is None:
            wanted = replace(
                wanted, max_tokens=int(info.get("loss_scale_factor") or response_mask.shape[1])
            )
        mask = response_mask.bool()
        weights = rollout_is_weights
        if name == "geo_mean":
            # a plain mean over the sequences of the micro-batch, weighted with the geometric means
            # of their weights
            info = {}
            if weights is not None:
                logs = torch.where(mask, (weights + 1e-10).log(), 0.0)
                weights = (logs.sum(1) / mask.sum(1).clamp(min=1)).exp()
        batch = scored_batch(mask, advantages, old_logps=old_log_prob, weights=weights)
        out = objective_loss(log_prob, batch, wanted, normalizer=_normalizer(wanted, info))
        return out.loss, to_floats(_metrics(name, wanted, out, batch, log_prob))

    loss.__name__ = f"fused_{name}"
    return loss


def objective_of(name: str, config: Any, loss_agg_mode: str = "token-mean") -> Objective:
    """Return the objective of verl's loss `name` (LOSSES) under its actor's `config`, aggregated by
    loss_agg_mode. Raises ValueError for what ours cannot do.
    """
    require(
        config is not None,
        "config",
        config,
        "verl's losses read clip_ratio and more from the actor's config.",
    )
    require_one_of("loss_agg_mode", loss_agg_mode, AGGREGATES)
    low, high = (
        config.clip_ratio if x is None else x
        for x in (config.clip_ratio_low, config.clip_ratio_high)
    )
    given = {"low": low, "high": high, "from": 1 - low, "to": 1 + high}
    ours, kind, fields = LOSSES[name]
    preset = Objective.preset(ours, numerics="verl")
    values = [
        given[field] if field in given else attrgetter(field)(config) for field in fields.split()
    ]
    with trainer_names(
        **dict(
            zip(inspect.signature(kind).parameters, map(_field_name, fields.split()), strict=False)
        )
    ):
        changes: Any = {"surrogate": kind(*values)}
    if name not in ("geo_mean", "sapo") and not (name == "gspo" and _gspo_by_sequence()):
        changes["aggregate"] = AGGREGATES[loss_agg_mode]
    if name.startswith("dppo"):
        changes["filters"] = tuple(
            replace(f, low=low, high=high) for f in preset.filters if isinstance(f, TrustRegion)
        )
    return replace(preset, **changes)


def _field_name(field: str) -> str:
    """The name of a field of LOSSES in verl's config."""
    return {
        "low": "clip_ratio_low",
        "high": "clip_ratio_high",
        "from": "clip_ratio_low",
        "to": "clip_ratio_high",
    }.get(field, field)


@functools.cache
def _gspo_by_sequence() -> bool:
    """Whether verl's GSPO takes the mean of its sequences' means whatever loss_agg_mode is, as it
    does before 0.9.1.
    """
    return matches_version(ADAPTER.installed(), (*(f"0.{minor}" for minor in range(9)), "0.9.0"))


def _normalizer(objective: Objective, info: dict[str, Any]) -> float | Tensor | None:
    """The denominator of verl's `agg_loss` from its `global_batch_info`; None:

    that of this micro-batch.
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
    """Return verl's metrics of a loss under verl's names, 0-d tensors.

    name       the name of verl's loss
    log_prob   the policy's log-probs that the loss was computed from
    """
    if name == "gpg":
        return {}
    mask = batch.mask
    advantages = batch.advantages
    surrogate = objective.surrogate
    log_ratio = torch.where(mask, out.logps - batch.old_logps, 0.0)
    if objective.log_ratio_bounds is not None and objective.level == "token":
        log_ratio = log_ratio.clamp(*objective.log_ratio_bounds)
    ratio = log_ratio.exp()
    none = torch.zeros_like(mask)
    low, high = surrogate.ratio_bounds
    # Tokens that are clipped, and tokens that are clipped at the other end, as far as verl reports
    # them for this loss.
    marks: tuple[Tensor, ...] = ()
    if name == "cispo":
        marks = ((ratio < low) | (ratio > high), none)
    elif name in ("dppo_tv", "dppo_kl"):
        # In verl an advantage of 0 counts as negative.
        signs = torch.where(advantages == 0, -1.0, advantages)
        is_kept = objective.filters[0].keeps(out.logps, batch.old_logps, signs)
        marks = (~is_kept, (ratio > high) & is_kept)
    elif name == "geo_mean":
        is_clipped = (log_ratio < -surrogate.eps_low) | (log_ratio > surrogate.eps_high)
        marks = (is_clipped & (advantages > 0), is_clipped & (advantages < 0))
    elif name == "clip_cov":
        # Tokens that were drawn have no gradient. All others have one, unless they are clipped or
        # have no weight.
        gradient = log_ratio
        if out.loss.requires_grad:
            (gradient,) = torch.autograd.grad(out.loss, log_prob, retain_graph=True)
        has_no_term = torch.logical_or(*surrogate.clipped(ratio, advantages)) | (advantages == 0)
        if batch.weights is not None:
            has_no_term = has_no_term | (batch.weights == 0)
        marks = ((gradient == 0) & ~has_no_term,)
    elif name == "sapo":
        marks = (none, none)
    elif name not in ("kl_cov", "dro"):
        _, is_clipped, _ = ratio_terms(objective, out.logps, out.rows, batch)
        is_dual_clipped = none
        if name == "vanilla":
            is_dual_clipped = (ratio > surrogate.delta) & (advantages < 0)
        marks = (is_clipped.view(mask.shape), is_dual_clipped)
    kl = log_ratio.abs() if name == "kl_cov" else -log_ratio
    metrics = {"actor/ppo_kl": masked_mean(kl, mask)}
    for key, mark in zip(CLIPPED_SHARES, marks, strict=False):
        metrics[key] = masked_mean(mark.float(), mask)
    return metrics


# ---- log-probs and entropy


def bind(*, hidden: bool = True, logits: bool = True, megatron: bool = False, **how: bool) -> Slots:
    """Replace verl's functions by ours in this process; the result restores them, see `Slots`,
    which has the errors too.

    hidden   for use_fused_kernels: `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy`,
             which impl_backend=triton calls, and `FusedLinearForPPO.forward` of
             verl.utils.experimental.torch_functional, which impl_backend=torch (the default) and
             liger call.
    logits   `logprobs_from_logits` and `entropy_from_logits` of verl.utils.torch_functional and of
             the engines that imported them. Bind before the engine is built, because the engine
             keeps the entropy function of that time.
    megatron  True: also `fused_output_processor` of verl.models.mcore.model_forward_fused, which
              the Megatron engine passes to megatron-core 0.18 and later. It needs any_version=True
              with a version that was not tested.
    how      strict and any_version of `Slots`.
    """
    ours: list[Callable[..., Any]] = [linear_cross_entropy] * hidden
    ours += [logprobs_from_logits, entropy_from_logits] * logits
    slots = ADAPTER.bind(*ours, **how)
    if hidden:
        slots.bind(fused_linear_for_ppo, attribute="forward", method=True)
    if megatron:
        # The backward adds to main_grad, so it must run once: no comparison.
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
    """Compute log-probs and entropy of labels, fp32 [B, S], in the fields of verl's output.

    context   verl's FusedOutputProcessorContext; padding ids are in the softmax, as in verl

    The other arguments are those of megatron-core's hook, see `megatron.logprobs_processor`; the
    inputs of the model are not read. Unlike verl's function it applies the model's muP scale, sums
    the gradient of the hidden states over the tensor-parallel ranks without sequence parallelism
    too, and adds the gradient of the weight to main_grad if Megatron does. It writes nothing for
    Megatron's config logger.
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
    """
    if reduction != "none":
        raise NotCovered(f"reduction={reduction!r}")
    rows = hidden.reshape(-1, hidden.shape[-1])
    ids = labels.flatten()
    found = log_probs_of(
        rows,
        ids,
        head=weight,
        temperature=_per_token(temperature, ids),
        group=dist_process_group,
        entropy=True,
    )
    return found.logps, found.entropy


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
    """
    unknown = unknown_option(module, ("chunk_size", "impl_backend"))
    if unknown is not None:
        raise NotCovered(f"option {unknown[0]}={unknown[1]!r}, which grpo_kernels does not know")
    ids = input_ids.to(torch.int64)
    found = log_probs_of(
        hidden_states,
        ids,
        head=vocab_weights,
        temperature=_per_token(temperature, ids),
        entropy=True,
    )
    return found.logps, found.entropy


def _per_token(temperature: float | Tensor, ids: Tensor) -> float | Tensor:
    """Give a temperature tensor the shape of ids, or no dimension if it has one element.

    verl passes one temperature, or one for each token of a flat row, also if ids are [1, N].
    """
    if not isinstance(temperature, Tensor):
        return temperature
    if temperature.numel() == 1:
        return temperature.reshape(())
    return temperature.reshape(ids.shape) if temperature.numel() == ids.numel() else temperature


# ---- sets of a sampler


def kept_sets(data: Any, field: str = "sampling_mask") -> TokenSets | None:
    """Return the sets of the response tokens [B, T] of a DataProto, for a TokenBatch of
    `data.batch["responses"]`; None where the batch has no such field.

        batch = TokenBatch(data.batch["responses"], advantages, mask=data.batch["response_mask"],
        kept=verl.kept_sets(data))

    field   of data.non_tensor_batch, an object for each sample: the ids of each token that was
            sampled, a list of lists as vLLM's `sampling_mask.token_ids` has them, or None. They go
            to the tokens of response_mask in their order; tools' tokens and padding stand for the
            whole vocabulary. Raises ValueError, with the sample, where it has not a list for each
            token.
    """
    record = data.non_tensor_batch.get(field)
    return (
        None
        if record is None
        else TokenSets.from_lists([*record], generated=data.batch["response_mask"] != 0)
    )


# ---- distillation from a teacher's top-k

#: Names that are registered, with a prefix in front, and their divergences.
DISTILLATION_LOSSES: Mapping[str, Exact] = {
    "forward_kl_topk": Exact("forward", tail="ignore"),
    "forward_kl_topk_bin": Exact("forward"),
    "forward_kl_topk_renormalised": Exact("forward", tail="renormalise"),
    "reverse_kl_topk": Exact("reverse"),
    "reverse_kl_topk_generalised": Exact("reverse", tail="generalised"),
    "jsd_topk": Exact("jsd"),
    "tv_topk": Exact("tv"),
}

_registered: dict[str, Exact] = {}


def register_distillation(
    losses: Mapping[str, Exact] | None = None, prefix: str = "fused_", *, any_version: bool = False
) -> list[str]:
    """Add losses to verl's registry of distillation losses, and return their names: `prefix` with
    each name of `losses` (None: DISTILLATION_LOSSES). `bind_distillation` has them computed.

        distillation.distillation_loss.loss_mode=fused_reverse_kl_topk
        distillation.distillation_loss.use_policy_gradient=False

    A module that is imported twice may register the same again; another divergence under a name
    raises ValueError. Raises RuntimeError for a version of verl that was not tested, unless
    any_version.
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
    """Replace verl's function of top-k losses from logits by ours, for losses that
    `register_distillation` has added; verl's own `forward_kl_topk` is still computed by verl. The
    result restores it, see `Slots`. strict: a call of another loss raises RuntimeError. Raises
    RuntimeError for a version of verl that was not tested, unless any_version, and where it is
    replaced already.

    verl computes all top-k losses by one function, which is called in the forward, where the logits
    are. Our log-probs at the teacher's ids come from one log-sum-exp over the logits, while verl
    writes a log-softmax of all logits in their dtype. `fused_forward_kl_topk` is verl's formula,
    the sum over the ids alone, without two clamps: that of log-probs at `log_prob_min_clamp`, which
    stops their gradient, and that of the value at 0, which stops the gradient of the whole token.
    `loss_max_clamp` is applied by verl, in both directions. Metrics equal verl's, except for
    the overlap of both top-k sets, which is not measured. The estimators from the sampled token
    (k1, k3, ...) remain verl's: they do not use the vocabulary.

    The strategies fsdp and fsdp2 are supported, also with sequence parallelism. Megatron and
    VeOmni's fused loss do not pass logits to this function, and are refused.
    """
    _require_tested(any_version)
    return DISTILLATION.bind(topk_divergence, strict=strict, any_version=True)


def _require_tested(any_version: bool) -> None:
    """verl has none of these losses, so a first step cannot be compared with verl's own."""
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
    """Return "distillation_losses", "student_mass" and "teacher_mass", fp32 [1, n].

    student_logits           [1, n, V]
    teacher_topk_log_probs   nested [n, K]
    teacher_topk_ids         nested [n, K]
    config                   verl's DistillationConfig, whose loss_mode is one of ours
    data_format              not used

    The arguments are those of verl's own function. In a sum over the ids alone an id counts as
    often as it is listed, as in verl. A divergence with a tail counts each id once. A row in which
    an id repeats is padding there, and gets 0.
    """
    from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor

    # verl's own function does not read loss_mode.
    mode: Any = getattr(config.distillation_loss, "loss_mode", None)
    exact = _registered.get(mode)
    if exact is None:
        raise NotCovered(f"loss_mode={mode!r}")
    ids = teacher_topk_ids.values().unsqueeze(0)
    teacher_logps = teacher_topk_log_probs.values().unsqueeze(0)
    if get_ulysses_sequence_parallel_world_size() > 1:
        ids = slice_input_tensor(ids, dim=1)
        teacher_logps = slice_input_tensor(teacher_logps, dim=1)
    teacher_logps = teacher_logps.float()
    is_sum_over_ids = exact.tail == "ignore"
    with torch.set_grad_enabled(is_sum_over_ids and torch.is_grad_enabled()):
        logps, _, num_distinct = logps_at_ids(student_logits, ids)
    is_counted = (num_distinct == ids.shape[-1]) | is_sum_over_ids
    if is_sum_over_ids:
        losses = divergence_over_ids(exact, logps, teacher_logps)
    else:
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
    """verl's contract of a registered loss:

    (losses [B, R], metrics), from what the forward has computed.
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
    _, metrics = theirs.compute_forward_kl_topk(config, distillation_config, model_output, data)
    return no_padding_2_padding(model_output["distillation_losses"], data), metrics
