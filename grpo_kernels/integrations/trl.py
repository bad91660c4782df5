"""TRL's GRPOTrainer with its loss in one pass: log-probs, loss and gradient in one visit of the head, inside the model's forward.

    from grpo_kernels.integrations.trl import FusedGRPOTrainer     # in place of trl.GRPOTrainer, same arguments

    trainer = FusedGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=...)
    trainer.train()
    print(trainer.fused_loss.counts)                               # Counter({'fused': 400, 'scored': 100})

or, for a trainer that exists, `fused = patch(trainer)` and, to take it off again, `fused.undo()`.

How. TRL's own `_compute_loss` still runs. The model that it calls hands one more argument, the batch and its objective, through
DDP, FSDP, PEFT and accelerate down to the model's forward, where `linear_grpo_loss` makes loss and gradient of the head at
once. TRL gets log-probs and entropies back without a graph, so its arithmetic on [B, T] costs nothing and gives what it always
gives: all of its metrics by name, the adaptive entropy coefficient, and its value of the loss. Strict mode compares that, and
its gradient on [B, T], with ours.

Log-probs of the old policy and of the reference, which TRL computes without gradients, are "scored" by `linear_logprobs`.

Written for and tested with TRL 1.16.0, transformers 5.23 and PEFT 0.21.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from ..architectures import language_model
from ..batch import TokenBatch
from ..filters import EntropyQuantile, Filter, OffPolicySequences
from ..head import plain_head
from ..logprobs import linear_logprobs
from ..losses import LossOutput, linear_grpo_loss
from ..objective import Objective
from ..surrogates import Cispo, Clip, Sapo, Surrogate, Vespo
from ..token_stage import TokenRows
from ..transform import LogitTransform
from ._slots import check_version
from .trl_head import TESTED, fused_lm_head, gathered

__all__ = ["FusedGRPOTrainer", "FusedLoss", "fused_lm_head", "patch"]  # noqa: F822

Tensor = torch.Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
BY_ITEMS = ("dapo", "cispo", "vespo")
#: Below this TRL's VESPO does not let a sampler's weight fall.
LEAST_WEIGHT = 1e-8


def patch(trainer: Any, *, strict: bool = False, skip_inactive: bool = False, any_version: bool = False) -> FusedLoss:
    """Give this GRPOTrainer, and no other, the loss in one pass. Call it after the trainer is made, before or between
    `train()`. The result, which is also `trainer.fused_loss`, counts paths and undoes the patch.

    strict         True: a configuration that has to be left to TRL's own loss raises RuntimeError, at the first step, and so
                   does a step whose loss, or its gradient with respect to log-probs and entropies, differs from TRL's own
                   arithmetic on the same log-probs (an evaluation: whose loss). False: such a configuration runs in TRL's
                   code, warns once and is counted.
    skip_inactive  True: tokens that cannot have a gradient (advantage or weight 0, neither KL nor entropy bonus, token level)
                   are not projected at all, unless a micro-batch has no others: the entropy that TRL logs is then the mean
                   over the others, and a token of weight 0 counts as one that is not clipped. All else that TRL logs stays.
                   False: they are projected once, for the metrics, and have no part in the backward.
    any_version    True: go on with a version of TRL that this was not tested with.

    Raises TypeError for an object that is not a GRPOTrainer, RuntimeError for one that is patched already or has another
    loss or forward than TRL's, and ValueError for a head that is not a plain Linear, such as one with a LoRA.
    """
    check_trl(any_version)
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise TypeError(f"trainer is a {type(trainer).__name__}: pass a trl.GRPOTrainer.")
    if "fused_loss" in vars(trainer):
        raise RuntimeError("this trainer is patched already: call trainer.fused_loss.undo() first.")
    if "_compute_loss" in vars(trainer) or type(trainer)._compute_loss is not GRPOTrainer._compute_loss:
        raise RuntimeError(
            f"{type(trainer).__name__} has a _compute_loss of its own, which this patch would replace by GRPOTrainer's: for the "
            "log-probs of any trainer use integrations.trl.fused_lm_head."
        )
    return FusedLoss(trainer, strict, skip_inactive)


def check_trl(any_version: bool = False) -> None:
    """Raise RuntimeError for a TRL that this was not tested with, unless any_version, and for one that it cannot work with."""
    check_version("trl", TESTED, any_version)
    import trl
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        raise RuntimeError(
            f"trl is {trl.__version__}, which has no fused LM head in the forward of its models (trl.trainer.utils.add_fused_lm_head), "
            f"so that there is no place for the loss: install TRL {TESTED[0]}."
        )


class FusedLoss:
    """What `patch` returns.

    counts   Counter of micro-batches and calls:
             "fused"          losses in one pass
             "scored"         forwards without gradients (old policy, reference) through `linear_logprobs`
             "TRL: <reason>"  losses left to TRL's own code
    """

    def __init__(self, trainer: Any, strict: bool, skip_inactive: bool) -> None:
        self.trainer, self.strict, self.skip_inactive = trainer, strict, skip_inactive
        self.counts: Counter[str] = Counter()
        models = [trainer.model] + [trainer.ref_model] * (trainer.ref_model is not None)
        self._forwards = [_Forward(_language_model(trainer, model), self.counts) for model in models]
        for forward in self._forwards:
            forward.install()
        self._theirs = trainer._compute_loss
        trainer._compute_loss = self._compute_loss
        trainer.fused_loss = self

    def undo(self) -> None:
        """Give the trainer and its models back what they had. Raises RuntimeError if it was done before."""
        if vars(self.trainer).get("fused_loss") is not self:
            raise RuntimeError("this patch was undone already.")
        for forward in self._forwards:
            forward.remove()
        del self.trainer._compute_loss, self.trainer.fused_loss

    # ---- the loss of a micro-batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        trainer = self.trainer
        reason, objective = self._objective()
        if objective is None:
            self.counts[f"TRL: {reason}"] += 1
            message = f"the loss of this configuration is left to TRL's own code: {reason}."
            if self.strict:
                raise RuntimeError(f"strict=True, but {message}")
            if self.counts[f"TRL: {reason}"] == 1:
                warnings.warn(message, stacklevel=2)
            return self._theirs(model, inputs)

        batch = self._batch(inputs, objective)
        # Where nothing is active all is projected after all: TRL logs an entropy, which has to be that of some tokens.
        skip = self.skip_inactive and objective.one_pass and batch.count(objective.active_rows) > 0
        call = _LossCall(batch, objective, self._normalizer(inputs, batch), skip, with_graph=self.strict)
        theirs = self._theirs(call.through(model), inputs)
        assert call.output is not None and call.rows is not None
        loss, aux_loss = call.output.loss, call.output.aux_loss
        self.counts["fused"] += 1
        if aux_loss is not None:
            loss = loss + trainer.router_aux_loss_coef * aux_loss / self._accumulation
        if self.strict:
            _check_value(loss.detach(), theirs.detach(), call.rows)
            if theirs.requires_grad:
                _check_slopes(call, theirs)
        return loss

    @property
    def _accumulation(self) -> float:
        """Micro-batches of this optimiser step; TRL divides by them itself, and not in evaluation."""
        return self.trainer.current_gradient_accumulation_steps if self.trainer.model.training else 1.0

    def _objective(self) -> tuple[str, Objective | None]:
        """TRL's configuration as an Objective, or the reason why it is not. Never from data: ranks have to agree."""
        trainer, args = self.trainer, self.trainer.args
        loss_type, level = trainer.loss_type, trainer.importance_sampling_level
        kl: dict[str, Any] = {} if args.use_bias_correction_kl else {"kl": "k3"}
        if loss_type == "vespo":
            if level == "sequence" and trainer.beta != 0 and args.use_bias_correction_kl:
                return "VESPO's KL weighted by the ratio of the sequence", None
            low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
            corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
            if corrected and not ((low is None or low <= 1) and (high is None or high >= 1)):
                return "VESPO with a clip range without 1, in which the weights of padding count", None
        elif level not in ("token", "sequence"):
            return f"importance_sampling_level={level!r}", None
        if trainer.aux_loss_enabled and not _router(trainer.model.config.get_text_config()):
            return "the auxiliary loss of this mixture of experts", None
        if len({*(getattr(trainer.model, "hf_device_map", None) or {}).values()}) > 1:
            return "a model split over devices", None
        filters: tuple[Filter, ...] = ()
        if trainer.top_entropy_quantile < 1.0:
            ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
            group = torch.distributed.group.WORLD if ranks else None
            filters += (EntropyQuantile(trainer.top_entropy_quantile, group),)
        if trainer.off_policy_mask_threshold is not None:
            filters += (OffPolicySequences(trainer.off_policy_mask_threshold),)
        coef = trainer.entropy_coef
        if not trainer._entropy_bonus_enabled or (
            trainer.use_adaptive_entropy and trainer._last_world_entropy > args.entropy_target
        ):
            coef = 0.0
        try:
            return "", Objective.preset(
                loss_type, numerics="trl", surrogate=self._surrogate(), beta=trainer.beta, filters=filters,
                entropy_coef=coef / self._accumulation, **({} if loss_type == "vespo" else {"level": level}), **kl,
            )  # fmt: skip
        except ValueError as error:
            return str(error), None

    def _surrogate(self) -> Surrogate:
        trainer, args = self.trainer, self.trainer.args
        if trainer.loss_type == "cispo":
            return Cispo(trainer.epsilon_high)
        if trainer.loss_type == "sapo":
            return Sapo(args.sapo_temperature_pos, args.sapo_temperature_neg)
        if trainer.loss_type == "vespo":
            pos, neg = max(args.vespo_lambda_pos, 1e-4), max(args.vespo_lambda_neg, 1e-4)
            return Vespo(args.vespo_k_pos, pos, args.vespo_k_neg, neg)
        if trainer.loss_type not in CLIPPED:
            raise ValueError(f"loss_type={trainer.loss_type!r}")
        return Clip(trainer.epsilon_low, trainer.epsilon_high, math.inf if args.delta is None else args.delta)

    def _batch(self, inputs: dict[str, Any], objective: Objective) -> TokenBatch:
        trainer = self.trainer
        mask = inputs["completion_mask"]
        weights = inputs.get("importance_sampling_ratio")
        if trainer.loss_type == "vespo":
            # TRL keeps a token that the sampler's mask took out, at the least weight that there is.
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
        )

    def _normalizer(self, inputs: dict[str, Any], batch: TokenBatch) -> float | Tensor:
        """TRL's denominator of this micro-batch."""
        trainer = self.trainer
        if trainer.loss_type in BY_ITEMS:
            # The items of a whole generation batch on all ranks; the gradient is the mean over ranks.
            items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
            return items * self._accumulation / trainer.args.steps_per_generation if trainer.model.training else items
        if trainer.loss_type == "bnpo":
            assert batch.mask is not None
            return batch.mask.sum().clamp(min=1.0) * self._accumulation
        sequences = batch.targets.shape[0] * self._accumulation
        return sequences * trainer.max_completion_length if trainer.loss_type == "dr_grpo" else sequences


def _check_value(ours: Tensor, theirs: Tensor, rows: TokenRows) -> None:
    """TRL's loss, from the same log-probs, has to be the same number; its formulas may change with a version."""
    if not (ours - theirs).abs() <= 1e-3 * (_size(rows) + theirs.abs()):  # nor is a NaN
        _differs(f"the fused loss is {float(ours):.6g} and TRL's own arithmetic on its log-probs gives {float(theirs):.6g}")


def _check_slopes(call: _LossCall, theirs: Tensor) -> None:
    """And the same gradient: on-policy the loss is near 0 whatever it is divided by. The sizes of all differences are added
    up, which a token whose ratio is rounded over the edge of its clip range does not upset."""
    assert call.rows is not None and call.read is not None
    found = torch.autograd.grad(theirs, call.read, allow_unused=True)
    logps, entropy = (x.detach().reshape(-1) for x in call.read)
    ours = call.objective.token_stage(logps, entropy, call.rows, call.batch)[1:]
    for name, mine, want in zip(("log-probs", "entropies"), ours, found, strict=True):
        a, b = (torch.zeros_like(logps) if x is None else x.reshape(-1) for x in (mine, want))
        apart, size = (a - b).abs().sum(), b.abs().sum()
        terms = _size(call.rows) if name == "log-probs" else 0.0  # the others are weights and no more
        if not apart <= 1e-3 * (terms + size):
            _differs(
                f"the gradient of the fused loss with respect to the {name} is {float(apart):.6g} away, in sum, from "
                f"that of TRL's own arithmetic, which is {float(size):.6g}"
            )


def _size(rows: TokenRows) -> Tensor:
    """Of all terms, of either sign, before they cancel: what rounding errors are relative to."""
    size = (rows.policy_weight * rows.advantages).abs().sum()
    return size if rows.kl_weight is None else size + rows.kl_weight.sum()


def _differs(what: str) -> NoReturn:
    raise RuntimeError(f"strict=True, but {what}: this is a bug of the adapter, or a TRL that it does not know.")


class _LossCall:
    """One loss on its way through the wrappers of a model. Not a dataclass, whose tensors FSDP would cast."""

    def __init__(
        self, batch: TokenBatch, objective: Objective, normalizer: float | Tensor, skip_inactive: bool, with_graph: bool = False
    ) -> None:
        self.batch, self.objective, self.normalizer, self.skip_inactive = batch, objective, normalizer, skip_inactive
        self.with_graph = with_graph
        self.read: tuple[Tensor, Tensor] | None = None  # log-probs and entropies as TRL got them
        self.output: Any = None  # of the outermost wrapper: DDP and FSDP have hooked into its tensors
        self.rows: TokenRows | None = None

    def through(self, model: Any) -> Any:
        """The model as TRL calls it, with this call in its arguments and a result without the loss and without a graph; or
        with one that begins at the result."""

        def call(**kwargs: Any) -> Any:
            self.output = out = model(**kwargs, grpo=self)
            detached = {name: x.detach() for name, x in out.items() if name != "loss"}
            if self.skip_inactive:
                detached |= self.filled(detached["log_probs"], detached["entropy"])
            self.read = detached["log_probs"], detached["entropy"]
            if self.with_graph and torch.is_grad_enabled():
                for x in self.read:
                    x.requires_grad_()
            return type(out)(**detached)

        return call

    def filled(self, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
        """What TRL gets for tokens that were not projected: a ratio of 1, and the mean entropy of those that were."""
        batch = self.batch
        read = batch.marked(self.objective.active_rows)
        assert read is not None
        read = read.view(entropy.shape)
        mean = (entropy * read).sum() / read.sum()
        others = torch.zeros_like(log_probs) if batch.old_logps is None else batch.old_logps
        return {"log_probs": torch.where(read, log_probs, others), "entropy": torch.where(read, entropy, mean)}

    def loss(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> LossOutput:
        out = linear_grpo_loss(
            hidden, weight, self.batch, self.objective, bias=bias, transform=transform, normalizer=self.normalizer,
            skip_inactive=self.skip_inactive,
        )  # fmt: skip
        self.rows = out.rows
        return out


# ---- the model


def _language_model(trainer: Any, model: Any) -> Any:
    """The module with the head, from below the wrappers of accelerate and PEFT."""
    return language_model(trainer.accelerator.unwrap_model(model))


def _fp32_cast(head: Any) -> Any:
    """The forward that TRL's cast_lm_head_to_fp32 has given a head."""
    cast = vars(head).get("forward")
    return cast if getattr(cast, "__module__", "") == "trl.trainer.grpo_trainer" else None


def _router(config: Any) -> tuple[int, int] | None:
    """(experts, experts per token) of a model whose load-balancing loss is Mixtral's."""
    if not hasattr(config, "num_experts") or not hasattr(config, "num_experts_per_tok"):
        return None
    return config.num_experts, config.num_experts_per_tok


class _Forward:
    """A forward with two more branches: `grpo=` gives the loss, and TRL's `fused_lm_head=True` without gradients gives
    log-probs. All other calls go to the forward that was there."""

    def __init__(self, model: Any, counts: Counter[str]) -> None:
        self.model, self.counts, self.active = model, counts, True
        # Once accelerate has prepared a model, its own forward is around TRL's.
        self.previous = model.forward
        trls = vars(model).get("_original_forward", self.previous)
        found = [getattr(forward, "grpo_kernels", None) for forward in (self.previous, trls)]
        if any(ours is not None and ours.active for ours in found):
            raise RuntimeError(
                f"the forward of {type(model).__name__} is not TRL's fused LM head, but ours already: undo() that."
            )
        if found[1] is not None:
            trls = found[1].trls  # accelerate still calls what was undone, which hands on to it
        self.trls = trls
        theirs = inspect.getclosurevars(trls).nonlocals
        names = ("temperature", "final_logit_softcapping", "logit_scale", "cast_lm_head_to_fp32", "backbone_attr", "outputs")
        missing = [name for name in names if name not in theirs]
        if missing:
            raise RuntimeError(
                f"the forward of {type(model).__name__} is not TRL's fused LM head (it does not know {', '.join(missing)}): it was "
                "patched by another package, or this TRL is not known. Undo that patch first."
            )
        self.transform = LogitTransform(
            float(theirs["temperature"]), theirs["final_logit_softcapping"], float(theirs["logit_scale"])
        )
        self.fp32_head: bool = theirs["cast_lm_head_to_fp32"]
        self.backbone: str = theirs["backbone_attr"]
        self.outputs = set(theirs["outputs"])
        plain_head(model, _fp32_cast)

    def install(self) -> None:
        @functools.wraps(type(self.model).forward)  # generate() validates its arguments against this signature
        def forward(model: Any, *args: Any, grpo: _LossCall | None = None, **kwargs: Any) -> Any:
            if grpo is not None:
                return self.loss(grpo, args, kwargs)
            if self.active and self.scores(kwargs):
                return self.log_probs(args, kwargs)
            return self.previous(*args, **kwargs)

        forward.grpo_kernels = self  # type: ignore[attr-defined]
        self.model.forward = self.ours = types.MethodType(forward, self.model)

    def remove(self) -> None:
        self.active = False
        if vars(self.model).get("forward") is self.ours:
            self.model.forward = self.previous
        # Otherwise accelerate's forward is around ours, which from now on only hands on.

    def scores(self, kwargs: dict[str, Any]) -> bool:
        return (
            kwargs.get("fused_lm_head", False)
            and not torch.is_grad_enabled()
            and kwargs.get("labels") is not None
            and kwargs.get("shift_labels") is None
            and not kwargs.get("output_router_logits")
            and self.outputs <= {"log_probs", "entropy"}
        )

    def loss(self, call: _LossCall, args: Any, kwargs: dict[str, Any]) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        tokens = call.batch.targets.shape[1]
        states, router_logits, attention_mask = self.hidden(args, kwargs)
        states = states[:, -tokens - 1 : -1]
        out = self.head(states, functools.partial(call.loss, transform=self.transform))
        aux_loss: Any = None
        if kwargs.get("output_router_logits"):
            from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

            router = _router(self.model.config.get_text_config())
            assert router is not None
            aux_loss = load_balancing_loss_func(router_logits, *router, attention_mask)
        return FusedCausalLMOutput(loss=out.loss, log_probs=out.logps, entropy=out.entropy, aux_loss=aux_loss)

    def log_probs(self, args: Any, kwargs: dict[str, Any]) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        labels = kwargs["labels"][:, 1:]
        mask = labels != -100
        states = self.hidden(args, kwargs)[0][:, :-1]

        def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
            entropy = "entropy" in self.outputs
            return linear_logprobs(hidden, weight, labels, bias=bias, mask=mask, transform=self.transform, entropy=entropy)

        log_probs, entropy = self.head(states, score)
        self.counts["scored"] += 1
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, label_mask=mask)

    def hidden(self, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Any, Any]:
        """([B, L, H], router logits, attention mask): what the backbone makes of TRL's arguments."""
        ours = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")
        kwargs = {name: value for name, value in kwargs.items() if name not in ours} | {"use_cache": False}
        states = getattr(self.model, self.backbone)(*args, **kwargs)
        return states.last_hidden_state, getattr(states, "router_logits", None), kwargs.get("attention_mask")

    def head(self, states: Tensor, function: Any) -> Any:
        """function(hidden, weight, bias) with a head that is whole on this rank."""
        from trl.trainer.utils import maybe_gather_lm_head_ctx  # DeepSpeed ZeRO-3

        head = plain_head(self.model, _fp32_cast)
        weight, bias = head.weight, head.bias
        precision: Any = nullcontext()
        if self.fp32_head:
            states, precision = states.float(), torch.autocast(states.device.type, enabled=False)
        with precision, maybe_gather_lm_head_ctx(weight, bias):
            return function(states, gathered(weight), None if bias is None else gathered(bias))


# ---- the subclass, made when it is asked for: the core and its tests run without TRL


@functools.cache
def _trainer_class() -> type:
    from trl import GRPOTrainer

    class FusedGRPOTrainer(GRPOTrainer):
        """trl.GRPOTrainer, patched as `patch` does it; `strict`, `skip_inactive` and `any_version` go there, args and kwargs to TRL."""

        def __init__(
            self, *args: Any, strict: bool = False, skip_inactive: bool = False, any_version: bool = False, **kwargs: Any
        ) -> None:
            check_trl(any_version)
            super().__init__(*args, **kwargs)
            patch(self, strict=strict, skip_inactive=skip_inactive, any_version=any_version)

    FusedGRPOTrainer.__module__, FusedGRPOTrainer.__qualname__ = __name__, "FusedGRPOTrainer"
    return FusedGRPOTrainer


def __getattr__(name: str) -> Any:
    if name == "FusedGRPOTrainer":
        return _trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
