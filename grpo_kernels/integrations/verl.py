"""verl: policy losses for its registry, and its log-probs and entropy on our kernels.

    # my_losses.py
    from grpo_kernels.integrations import verl
    verl.register()
    verl.bind()

    VERL_USE_EXTERNAL_MODULES=my_losses python -m verl.trainer.main_ppo \\
        actor_rollout_ref.actor.policy_loss.loss_mode=fused_vanilla \\
        actor_rollout_ref.model.use_fused_kernels=True \\
        actor_rollout_ref.model.fused_kernel_options.impl_backend=triton

verl imports the module in every worker (`actor_rollout_ref.model.external_lib=my_losses` does it too).

`register` puts one loss for every name of verl's own ("fused_vanilla", "fused_gspo", ...), which reads the same fields of
the actor's config, and one for every preset that verl has not ("fused_vespo", "fused_luspo", "fused_dapo", ...), with the
preset's constants. Value, gradient with respect to log-probs, denominators (`global_batch_info`) and metrics are verl's.
The token stage runs as one autograd function: the gradient is known in the forward. It is small beside the head.

`bind` takes verl's three functions over the vocabulary: `linear_cross_entropy`, from hidden states, which the fused
forward of impl_backend=triton calls (logits never exist); and, where the logits do, `logprobs_from_logits` and
`entropy_from_logits`. Everything else stays verl's: rolled labels, unpadding, entropy and KL terms, aggregation of those.

The fused forward of the Megatron engine calls `linear_cross_entropy` with a tensor-parallel group: several ranks are covered.
As in verl, the gradient of the hidden states is then a rank's own share, which the gather of sequence parallelism sums up.

Replay: verl has none. Where a rollout of yours puts the sets of its sampler beside the responses, in
`data.non_tensor_batch["sampling_mask"]`, `kept_sets(data)` makes them the `kept` of a TokenBatch for a loss of your own.

Not covered, and left to verl: Megatron's logits without the fused forward (`verl.utils.megatron.tensor_parallel`), and
`entropy_from_logits_with_chunking`.
"bypass_mode" is not registered: verl sets it itself when a rollout correction bypasses the old log-probs.

Tested with verl 0.9.1, 0.9.0, 0.8.0 and 0.7.1 on a CPU: the losses through its `ppo_loss`, the heads through its fused forward on
a tiny Qwen2.
Its trainer (Ray, vLLM), its Megatron engine and anything on a GPU were not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from ..batch import TokenBatch
from ..checks import require_one_of
from ..formulas.filters import TrustRegion
from ..formulas.surrogates import Cispo, Clip, ClipCov, Dro, Gmpo, KlCov, PolicyGradient, Sapo
from ..logprobs import linear_logprobs
from ..losses import LossOutput, objective_loss
from ..objective import Objective
from ..presets import NUMERICS, PRESETS
from ..specs import LogitTransform
from ..token_sets import TokenSets
from ._shared import at_least_one, entropy_from_logits, even_shard, logprobs_from_logits, plain, scored_batch
from ._slots import NotCovered, Ragged, Trial, untested
from ._verl_versions import gspo_by_sequence

Tensor = torch.Tensor
PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]

#: The versions that the tests ran with.
TESTED = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")

#: verl's names of its losses, and ours of the preset that has its formula.
LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "gpg": "reinforce",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "dro": "dro",
}
#: Those that leave out tokens by lot.
RANDOM = ("clip_cov",)
#: Presets whose old_logps are not those of verl's policy loss, which is given no reference.
WITHOUT = ("a2po", "distillation", "sampled_distillation")

#: verl's `loss_agg_mode` -> ours.
AGGREGATES = {
    "token-mean": "token-mean",
    "token-sum": "token-sum",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "constant",
}


# ---- policy losses


def register(prefix: str = "fused_", *, any_version: bool = False) -> list[str]:
    """Add our losses to verl's registry, and return their names: `prefix` with each name of LOSSES that this verl has, and of our
    presets.

    No function of verl is replaced, and names of ours that are there already stay. Under a version of verl that was not tested,
    unless any_version, the first call of a loss that verl has too is computed by verl's own beside it: RuntimeError where they
    differ."""
    trial = Trial(untested("verl", TESTED, any_version))
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    own = [name for name in LOSSES if name in POLICY_LOSS_REGISTRY]  # an older verl has fewer, and no constants of the others
    names = [*own, *(name for name in PRESETS if name not in LOSSES and name not in WITHOUT)]
    for name in names:
        ours, theirs = policy_loss(name), POLICY_LOSS_REGISTRY.get(name)
        if prefix + name in POLICY_LOSS_REGISTRY and hasattr(POLICY_LOSS_REGISTRY[prefix + name], "grpo_kernels"):
            continue
        if name in own and name not in RANDOM:
            ours = trial.beside(ours, theirs, itemgetter(0))
        ours.grpo_kernels = True  # type: ignore[attr-defined]
        register_policy_loss(prefix + name)(ours)
    return [prefix + name for name in names]


def policy_loss(objective: str | Objective) -> PolicyLoss:
    """A policy loss with verl's signature: (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
    rollout_is_weights) -> (loss, metrics), all tensors [B, T].

        verl.trainer.ppo.core_algos.register_policy_loss("mine")(policy_loss(Objective.preset("vespo", aggregate="constant")))

    objective   a name of verl's (LOSSES): constants from `config`, aggregation from `loss_agg_mode`, as verl's loss of that
                name has them. Another preset's name, or an Objective: its own constants and its own aggregate, and of
                verl's config only the denominators (and `loss_scale_factor`, or T, where its max_tokens is None).
    """
    name = objective if isinstance(objective, str) else None
    fixed: Objective | None = None
    if isinstance(objective, Objective):
        fixed = objective
    elif objective not in LOSSES:
        fixed = Objective.preset(objective, numerics="verl" if objective in NUMERICS["verl"] else None, beta=0.0)
    if fixed is not None and (fixed.beta != 0 or fixed.needs_entropy):
        raise ValueError(
            f"objective has beta={fixed.beta} and entropy_coef={fixed.entropy_coef}: verl adds KL and entropy itself: pass 0.0."
        )
    if fixed is not None and fixed.aggregate == "group-mean":
        raise ValueError("aggregate='group-mean': verl's policy loss is not told which prompt a row is of: pass another one.")

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        wanted = fixed or objective_of(str(name), config, loss_agg_mode)
        info = dict(getattr(config, "global_batch_info", None) or {})
        if wanted.aggregate == "constant" and wanted.max_tokens is None:
            wanted = replace(wanted, max_tokens=int(info.get("loss_scale_factor") or response_mask.shape[1]))
        mask = response_mask.bool()
        if name == "geo_mean":
            info = {}  # a plain mean over the sequences of the micro-batch
            rollout_is_weights = _geometric_mean(rollout_is_weights, mask)
        batch = scored_batch(mask, advantages, old_logps=old_log_prob, weights=rollout_is_weights)
        out = objective_loss(log_prob, batch, wanted, normalizer=_normalizer(wanted, info))
        return out.loss, _metrics(name, wanted, out, batch, log_prob)

    loss.__name__ = f"fused_{name or 'objective'}"
    return loss


def objective_of(name: str, config: Any, loss_agg_mode: str = "token-mean") -> Objective:
    """The objective of verl's loss `name` (LOSSES) under its actor's `config`, aggregated by loss_agg_mode. Raises ValueError
    for what ours cannot do."""
    if config is None:
        raise ValueError("config is None: verl's losses read clip_ratio and more from the actor's config.")
    require_one_of("loss_agg_mode", loss_agg_mode, AGGREGATES)
    options = config.policy_loss
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
    preset = Objective.preset(LOSSES[name], numerics="verl")
    changes: dict[str, Any] = {"aggregate": AGGREGATES[loss_agg_mode]}
    if name == "vanilla":
        if config.clip_ratio_c < 1 + high:
            raise ValueError(f"clip_ratio_c={config.clip_ratio_c}: below 1 + clip_ratio_high, {1 + high}, it is verl's own.")
        changes["surrogate"] = Clip(low, high, delta=config.clip_ratio_c)
    elif name == "gspo":
        changes = {"surrogate": Clip(low, high)} | ({} if gspo_by_sequence(config) else changes)
    elif name == "gpg":
        changes["surrogate"] = PolicyGradient()
    elif name == "clip_cov":
        changes["surrogate"] = ClipCov(low, high, options.clip_cov_ratio, options.clip_cov_lb, options.clip_cov_ub)
    elif name == "kl_cov":
        changes["surrogate"] = KlCov(options.ppo_kl_coef, options.kl_cov_ratio)
    elif name == "geo_mean":
        changes = {"surrogate": Gmpo(low, high)}
    elif name == "cispo":
        changes["surrogate"] = Cispo(cap=1 + high, low=1 - low)
    elif name == "sapo":
        changes = {"surrogate": Sapo(config.tau_pos, config.tau_neg)}
    elif name.startswith("dppo"):
        changes["surrogate"] = Cispo(config.clip_ratio_c)
        changes["filters"] = tuple(replace(f, low=low, high=high) for f in preset.filters if isinstance(f, TrustRegion))
    elif name == "dro":
        if options.dro_beta is None:
            raise ValueError("policy_loss.dro_beta is None: DRO needs the weight of its penalty.")
        changes["surrogate"] = Dro(options.dro_beta)
    return replace(preset, **changes)


def _normalizer(objective: Objective, info: dict[str, Any]) -> float | Tensor | None:
    """The denominator of verl's `agg_loss` from its `global_batch_info`; None: that of this micro-batch."""
    ranks = info.get("dp_size") or 1
    if objective.aggregate == "token-sum":
        return 1 / ranks
    key = "batch_num_tokens" if objective.aggregate == "token-mean" else "global_batch_size"
    total = info.get(key)
    if total is None:
        if ranks > 1:
            raise ValueError(f"{key} is None, but dp_size={ranks}: the denominator spans all ranks.")
        return None
    if objective.aggregate == "constant":
        total = total * objective.max_tokens
    return at_least_one(total) / ranks


def _geometric_mean(weights: Tensor | None, mask: Tensor) -> Tensor | None:
    """verl's importance weights of GMPO: of a sequence's, the geometric mean [B]."""
    if weights is None:
        return None
    logs = torch.where(mask, (weights + 1e-10).log(), 0.0)
    return (logs.sum(1) / mask.sum(1).clamp(min=1)).exp()


def _metrics(name: str | None, objective: Objective, out: LossOutput, batch: TokenBatch, log_prob: Tensor) -> dict[str, float]:
    """verl's metrics under verl's names, in one trip to the host."""
    if name == "gpg":
        return {}
    mask, A = batch.mask, batch.advantages
    assert mask is not None and batch.old_logps is not None
    x = torch.where(mask, out.logps - batch.old_logps, 0.0)
    tokens = mask.sum() + 1e-8

    def share(marked: Tensor) -> Tensor:
        return (marked & mask).sum() / tokens

    bounds = objective.log_ratio_bounds or (-math.inf, math.inf)
    bounded = x if objective.level != "token" else x.clamp(*bounds)
    low, high = (math.log(r) if r > 0 else -math.inf for r in objective.surrogate.ratio_bounds)
    below, above = bounded < low, bounded > high
    clipped: Tensor | None = x.new_zeros(())
    lower: Tensor | None = x.new_zeros(())
    if name == "cispo":
        clipped = share(below | above)
    elif name in ("dppo_tv", "dppo_kl"):
        # In verl an advantage of 0 counts as negative.
        rows = replace(out.rows, advantages=torch.where(out.rows.advantages == 0, -1.0, out.rows.advantages))
        keep = objective.filters[0].keep(out.logps.reshape(-1), None, rows, batch).view(mask.shape)
        clipped, lower = share(~keep), share(above & keep)
    elif name == "geo_mean":
        assert isinstance(objective.surrogate, Gmpo)
        beyond = (x < -objective.surrogate.eps_low) | (x > objective.surrogate.eps_high)
        clipped, lower = share(beyond & (A > 0)), share(beyond & (A < 0))
    elif name == "clip_cov":
        # Tokens that were drawn have no slope. All others have one, except those that are clipped.
        slopes = torch.autograd.grad(out.loss, log_prob, retain_graph=True)[0] if out.loss.requires_grad else x
        beyond = torch.logical_or(*objective.surrogate.clipped(bounded.exp(), A)) | (A == 0)
        beyond = beyond if batch.weights is None else beyond | (batch.weights == 0)
        clipped, lower = share((slopes == 0) & ~beyond), None
    elif name in ("kl_cov", "dro"):
        clipped = lower = None
    elif objective.level != "token":
        clipped = out.metrics["clip_low"] + out.metrics["clip_high"]
    elif name != "sapo":
        clipped = share(torch.logical_or(*objective.surrogate.clipped(bounded.exp(), A)))
        if name == "vanilla":
            assert isinstance(objective.surrogate, Clip)
            lower = share((bounded > math.log(objective.surrogate.delta)) & (A < 0))
    moved = x.abs() if name == "kl_cov" else -bounded
    named = {"actor/pg_clipfrac": clipped, "actor/ppo_kl": moved.sum() / tokens, "actor/pg_clipfrac_lower": lower}
    kept = {key: value for key, value in named.items() if value is not None}
    return dict(zip(kept, torch.stack([v.detach().to(torch.float32) for v in kept.values()]).tolist(), strict=True))


# ---- log-probs and entropy


def bind(*, hidden: bool = True, logits: bool = True, strict: bool = False, any_version: bool = False) -> Ragged:
    """Replace verl's functions by ours in this process. The returned `Ragged` restores them, by `undo()` or as a context
    manager.

    hidden   `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy`, for use_fused_kernels with impl_backend=triton.
    logits   `logprobs_from_logits` and `entropy_from_logits` of verl.utils.torch_functional and of the engines that imported
             them. Bind before the engine is built, because the engine keeps the entropy function of that time.
    strict   True: a call that verl's own function has to handle raises RuntimeError.
    any_version   True: no comparison under a version that was not tested; else the first call of each function runs verl's own
             beside it, and RuntimeError says where they differ.
    Raises RuntimeError where a function is replaced already."""
    version = untested("verl", TESTED, any_version)
    slots = Ragged("verl", strict, version=version)
    if hidden:
        slots.bind("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy", linear_cross_entropy)
    if logits:
        slots.bind("verl.utils.torch_functional", "logprobs_from_logits", logprobs_from_logits)
        slots.bind("verl.utils.torch_functional", "entropy_from_logits", entropy_from_logits)
    return slots


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) of labels, fp32 [N] for N of them in any shape, as verl's, at temperature; hidden [..., H] in as
    many rows, weight [V, H].

    With a dist_process_group of several ranks weight is [V / ranks, H], this rank's part, and the gradient of hidden its
    share: verl's layers in front sum it up. A reduction other than "none" runs in verl."""
    if reduction != "none":
        raise NotCovered(f"reduction={reduction!r}")
    plain(hidden, weight)
    shard = even_shard(weight.shape[0], dist_process_group, reduce_hidden=False)
    transform = LogitTransform(temperature=temperature)
    rows = hidden.reshape(-1, hidden.shape[-1])
    logps, entropy = linear_logprobs(rows, weight, labels.reshape(-1), transform=transform, entropy=True, shard=shard)
    assert entropy is not None
    return logps, entropy


# ---- sets of a sampler


def kept_sets(data: Any, field: str = "sampling_mask") -> TokenSets | None:
    """The sets of the response tokens [B, T] of a DataProto, for a TokenBatch of `data.batch["responses"]`; None where the
    batch has no such field.

        batch = TokenBatch(data.batch["responses"], advantages, mask=data.batch["response_mask"], kept=verl.kept_sets(data))

    field   of data.non_tensor_batch, an object for each sample: the ids of each token that was sampled, a list of lists as vLLM's
            `sampling_mask.token_ids` has them, or None. They go to the tokens of response_mask in their order; tools' tokens and
            padding stand for the whole vocabulary. Raises ValueError, with the sample, where it has not a list for each token."""
    record = data.non_tensor_batch.get(field)
    if record is None:
        return None
    return TokenSets.from_lists([*record], generated=data.batch["response_mask"] != 0)
