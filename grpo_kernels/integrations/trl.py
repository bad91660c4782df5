"""TRL's GRPOTrainer with a fused loss: log-probs, loss and gradient of the LM head in one call.

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    # in place of trl.GRPOTrainer, with the same arguments
    trainer = FusedGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=...)
    trainer.train()
    print(trainer.fused_loss.counts)  # Counter({'fused': 400, 'scored': 100})

For an existing trainer call `fused = patch(trainer)`, and `fused.undo()` to restore it.

How it works. TRL's own `_compute_loss` runs. Inside of it TRL's model forward calls an autograd
function with hidden states and the LM head. During that call this module replaces the function by
`linear_grpo_loss`, which computes the loss and the gradients of hidden states and head. The
model's forward and its wrappers (DDP, FSDP, PEFT, accelerate) are not changed, and the loss leaves
the model as one of its outputs. TRL's code gets log-probs and entropies without a graph. From them
it computes all of its metrics, its adaptive entropy coefficient and its own value of the loss,
which costs little on [B, T]. Strict mode compares this value, and its gradient with respect to
log-probs and entropies, with ours.

TRL computes the log-probs of the old policy and of the reference without gradients. These calls use
`linear_logprobs`, and are counted as "scored".

Replay. With top-k or top-p sampling, vLLM's log-probs are normalised over the candidate ids, but
TRL's over the whole vocabulary. `patch(trainer, replay=True)` uses the recorded candidate sets of
the generation (`sampling_mask`, from vLLM in this process or an extra field of a rollout_func) for
all log-probs: old policy, reference and loss. The logged entropies are then those over the sets.

Written for TRL 1.16.0 and tested with it, and with 1.15.0; transformers 5.23, PEFT 0.21.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..architectures import language_model
from ..batch import TokenBatch
from ..checks import nearest
from ..formulas.filters import EntropyQuantile, OffPolicySequences
from ..logprobs import linear_logprobs
from ..losses import linear_grpo_loss, objective_loss
from ..model import plain_head
from ..objective import Objective
from ..options import Head, Options
from ..token_sets import TokenSets
from ..transform import LogitTransform
from ._swap import (
    Adapter,
    NotCovered,
    Slots,
    Trial,
    adapt_arguments,
    parameters_of,
    temporarily_replaced,
)
from ._tensors import (
    BY_ITEMS,
    at_least_one,
    default_group,
    distillation_batch,
    divergence_of,
    log_probs_of,
    require_supported,
    surrogate_of,
)

__all__ = [
    "FusedGRPOTrainer",  # noqa: F822
    "FusedLoss",
    "fused_divergence",
    "fused_lm_head",
    "patch",
]


#: TRL's method that computes the loss.
LOSS = "GRPOTrainer._compute_loss"
#: TRL's method that computes log-probs.
SCORES = "_get_per_token_logps_and_entropies"
#: TRL's autograd function of the LM head, in trl.trainer.utils.
SLOT = "_ChunkedLogProbFunction"
#: Results that TRL's function of the head can return besides the log-probs.
EVERY_OUTPUT = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
#: The declaration for the loss and the head,
ADAPTER = Adapter(
    "TRL", "trl", ("1.15", "1.16"), {"log_probs": "trl.trainer.utils._ChunkedLogProbFunction"}
)
#: and for the distillation loss.
DISTILLATION = replace(
    ADAPTER, tested=("1.16",), replaces={"divergence_loss": "trl.trainer.distillation_trainer._chunked_divergence_loss"}
)  # fmt: skip


# ---- the whole loss in a trainer


def patch(
    trainer: Any,
    *,
    strict: bool = False,
    skip_inactive: bool = False,
    replay: bool = False,
    any_version: bool = False,
) -> FusedLoss:
    """Make one GRPOTrainer compute its loss with `linear_grpo_loss`.

    Call it after the trainer is made, and not while `train()` runs. Other trainers are not changed.
    The result, which is also `trainer.fused_loss`, has the call counts and `undo()`.

    strict         Whether an unsupported configuration raises RuntimeError at the first step.
                   Otherwise TRL's own code computes its loss, which is logged once and counted. A
                   strict trainer also compares each loss, and its gradient with respect to
                   log-probs and entropies, with TRL's arithmetic on the same log-probs, and raises
                   RuntimeError if they differ. In evaluation only the loss is compared.
    skip_inactive  Whether tokens without a gradient (advantage or weight 0, no KL, no entropy
                   bonus, token level) are left out of the forward matmul too, unless a micro-batch
                   has no other tokens. TRL's logged entropy is then the mean over the other tokens,
                   and a token of weight 0 counts as not clipped. No other metric changes. False:
                   such tokens are in the forward, for the metrics, but not in the backward.
    replay         Whether log-probs are over the candidate sets that vLLM in this process or a
                   rollout_func records. A generation without them raises RuntimeError, and so does
                   an unsupported configuration.
    any_version    Whether a version of TRL that was not tested is accepted without the comparison
                   below.

    Under a version that was not tested, TRL's own head (not with replay) and arithmetic also
    compute the first step. If log-probs, loss and gradients agree, one warning says so. Otherwise
    the patch is undone, and RuntimeError names the difference before any gradient is computed.

    Raises TypeError for an object that is not a GRPOTrainer, RuntimeError for a trainer that is
    patched already or overrides `_compute_loss`, and ValueError for a head that is not a plain
    Linear, such as one with a LoRA. If another package has replaced the model's forward, the first
    step raises RuntimeError.
    """
    function_of_head(log_probs)
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise TypeError(f"trainer is a {type(trainer).__name__}: pass a trl.GRPOTrainer.")
    if "fused_loss" in vars(trainer):
        raise RuntimeError("this trainer is patched already: call trainer.fused_loss.undo() first.")
    if (
        "_compute_loss" in vars(trainer)
        or type(trainer)._compute_loss is not GRPOTrainer._compute_loss
    ):
        raise RuntimeError(
            f"{type(trainer).__name__} has its own _compute_loss, which this patch would"
            " replace by GRPOTrainer's: for the log-probs of any trainer use"
            " integrations.trl.fused_lm_head."
        )
    return FusedLoss(trainer, strict, skip_inactive, replay, any_version)


class FusedLoss(Slots):
    """The patch of one trainer, as `patch` returns it.

    counts   Counter with
             "fused"          micro-batches whose loss `linear_grpo_loss` computed
             "scored"         forwards without gradients (old policy, reference) computed by
                              `linear_logprobs`
             "TRL: <reason>"  micro-batches whose loss TRL's own code computed
    """

    def __init__(
        self, trainer: Any, strict: bool, skip_inactive: bool, replay: bool, any_version: bool
    ) -> None:
        """Replace the methods of one GRPOTrainer of TRL by ours.

        trainer         the trainer
        strict          whether a loss that is not supported raises RuntimeError
        skip_inactive   whether tokens without a gradient are left out of the forward
        replay          whether log-probs are over the candidate sets that the generation recorded
        any_version     whether a TRL that was not tested is accepted without a comparison

        Raises ValueError if the head of the model or of the reference is not a plain Linear.
        """
        super().__init__(ADAPTER, strict, any_version)
        self.trainer = trainer
        self.skip_inactive = skip_inactive
        for model in (x for x in (trainer.model, trainer.ref_model) if x is not None):
            plain_head(self._language_model(model), _fp32_cast)
        self.replay = Replay(trainer) if replay else None
        # TRL's own methods of the loss and of log-probs, and its autograd function of the LM head.
        self._theirs = trainer._compute_loss
        self._their_log_probs = getattr(trainer, SCORES)
        self._their_head, _ = function_of_head(log_probs)
        self._paths = [LOSS]
        # What replaces the autograd function during a forward of the model.
        # One object for all calls: torch.compile recompiles for a new function object.
        head = torch.compiler.disable(adapt_arguments(self._head_outputs, self._their_head.apply))
        self._head = type("FusedHead", (), {"apply": staticmethod(head)})
        # The loss that the forward in progress computes; None if it only computes log-probs.
        self._loss: LossCall | None = None
        # With replay: the candidate sets of the positions that the head has not computed yet.
        self._next_sets: TokenSets | None = None
        # The language model of the forward in progress, without its wrappers.
        self._model = None
        # Whether the forward in progress has called `self._head`.
        self._head_called = False
        loss = self.counted(adapt_arguments(self._compute_loss, self._theirs), self._theirs)
        ours: dict[str, Any] = {
            "_compute_loss": loss,
            SCORES: self._log_probs,
            "fused_loss": self,
        }
        if self.replay is not None:
            ours |= self.replay.ours
        for name, value in ours.items():
            self.replace_attribute(trainer, name, value)

    def _language_model(self, model: Any) -> Any:
        """Return the language model inside of DDP, FSDP, PEFT and other wrappers."""
        return language_model(self.trainer.accelerator.unwrap_model(model))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of a micro-batch, 0-d, in place of `_compute_loss` of a TRL trainer.

        model    the model, with its wrappers (DDP, FSDP, PEFT)
        inputs   TRL's micro-batch

        TRL's own method runs too: it calls the model and computes TRL's metrics. While it runs,
        `self._loss` is set. The LM head in the forward of the model then computes our loss, which
        is returned. The loss that TRL's method returns is used for a comparison only.

        Raises NotCovered for a configuration that is not supported. The caller then runs TRL's
        method alone.
        """
        trainer = self.trainer
        try:
            objective = objective_of(trainer)
        except ValueError as reason:
            message = f"the loss of this configuration is left to TRL's own code: {reason}."
            if self.replay is not None:
                raise RuntimeError(f"replay=True, but {message}") from reason
            raise NotCovered(*reason.args) from reason

        batch = token_batch(trainer, inputs, objective)
        # True under a version of TRL that was not tested, until its loss and ours were compared.
        comparison_is_pending = self.trial.pending(LOSS)
        # Skipped tokens have no log-probs to compare. If no token has a gradient, none is skipped,
        # because the mean entropy that TRL logs needs at least one token.
        skip = (
            self.skip_inactive
            and not comparison_is_pending
            and objective.gradient_is_per_token
            and batch.count_in_mask(objective.gradient_mask) > 0
        )
        call = LossCall(
            batch,
            objective,
            normalizer=denominator(trainer, inputs, batch, objective),
            options=Options(skip_inactive=skip),
            compared=self.strict or comparison_is_pending,
        )
        self._loss = call
        try:
            theirs = self._theirs(model, inputs)
        finally:
            self._loss = None
        # This output of the model has our loss in element 0 and zeros elsewhere, see
        # `LossCall.compute`. The backward of DDP and FSDP begins at outputs of the model.
        loss = call.model_output.log_sum_sq_probs.sum()
        if call.aux_loss is not None:
            loss = loss + trainer.router_aux_loss_coef * call.aux_loss / accumulation(trainer)
        if call.compared:
            call.check(self.trial, loss, theirs)
        # Without gradients (evaluation), only values were compared: compare the next call too.
        if comparison_is_pending and theirs.requires_grad:
            self.trial.mark_compared(LOSS)
        return loss

    def _log_probs(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Return log-probs and entropies of the completions, in place of a method of a TRL trainer.

        TRL's method calls the model, whose forward ends in TRL's autograd function of the LM head.
        The head turns hidden states into log-probs and entropies. This function runs TRL's method,
        and replaces the head by `self._head`, which is ours, while it runs.

        There are three kinds of calls:

        - From `_compute_loss`, which has set `self._loss`. Our head also computes the loss, and the
          loss leaves the model in one of its outputs, from which `_compute_loss` takes it. TRL
          computes metrics from the results of this function, which are detached for that reason.
        - Without a loss and without gradients: log-probs of the old policy or of the reference.
        - Without a loss, but with gradients: no caller that is known. TRL's head computes it.

        model            the model, with its wrappers
        input_ids        int64 [B, S], prompts followed by completions
        attention_mask   [B, S], 0 for padding
        logits_to_keep   T: the last T positions of each row are the completion
        more, options    passed on to TRL's method

        Returns what TRL's method returns: (log-probs [B, T], entropies [B, T] or None, auxiliary
        loss of a mixture of experts or None).
        """
        from trl.trainer import utils

        loss = self._loss
        arguments = (input_ids, attention_mask, logits_to_keep, *more)
        if loss is None and torch.is_grad_enabled():
            return self._their_log_probs(model, *arguments, **options)
        is_completion = attention_mask[:, -logits_to_keep:] != 0
        # `_head_outputs` reads these two when the model calls it.
        self._model = self._language_model(model)
        self._next_sets = None
        if self.replay is not None:  # log-probs over the candidate sets of the generation
            self._next_sets = self.replay.sets_of(is_completion)

        def checked_model(**inputs: Any) -> Any:
            """Call the model, check that it has called our head, and store its output."""
            self._head_called = False
            out = model(**inputs)
            if not self._head_called:
                raise RuntimeError(
                    f"the forward of {type(self._model).__name__} is not TRL's fused LM head: it"
                    " was patched by another package, or this TRL is not known. Undo that patch"
                    " first."
                )
            if loss is not None:
                loss.model_output = out
            return out

        # The forward asks `_use_triton` whether to pass only the positions that have a label to the
        # head. The replacement says yes on every device. It switches no kernel on.
        replacements = {SLOT: self._head, "_use_triton": rows_with_a_label}
        try:
            with temporarily_replaced(utils, **replacements):
                results = self._their_log_probs(checked_model, *arguments, **options)
        except NotCovered as reason:  # from our head, which has computed nothing
            if loss is not None:  # the whole loss is left to TRL
                raise
            self.leave_to_trainer(reason, SCORES, self._their_log_probs)
            return self._their_log_probs(model, *arguments, **options)
        if loss is None:
            return results
        logps, entropies, aux_loss = results
        return loss.detach_for_trl(is_completion, logps, entropies, aux_loss)

    def _head_outputs(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int | None = None,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = EVERY_OUTPUT,
        sampling_mask: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return log-probs and entropies, in place of TRL's autograd function of the LM head.

        TRL's forward calls it with the hidden states of the N positions that have a label. The
        arguments are those of `log_probs`. The results are by position, as in TRL:

        - While `_compute_loss` runs, it also computes the loss, and returns (log-probs [N],
          entropies [N], loss in element 0 [N], None, None), see `LossCall.compute`.
        - Otherwise it returns (log-probs [N], entropies [N] or None, None, None, None). The
          entropies are None unless `outputs` has "entropy".

        With replay, the log-probs are over the candidate sets of the generation.
        """
        if self.replay is None:
            # TRL's own function computes the same, so the first call can be compared with it.
            arguments: tuple[Any, ...] = (
                hidden,
                weight,
                bias,
                targets,
                temperature,
                chunk_size,
                final_logit_softcapping,
                logit_scale,
                outputs,
            )
            if sampling_mask is not None:  # not every version of TRL has this argument
                arguments = (*arguments, sampling_mask)
            # No effect under a tested version of TRL.
            with torch.no_grad():
                self.trial.compare(LOSS, log_probs, self._their_head.apply, (arguments, {}))
        elif sampling_mask is not None:
            raise RuntimeError(
                "replay=True, but this TRL passes candidate sets itself (sampling_mask): pass"
                " replay=False."
            )
        # Raises ValueError if the head is not a plain Linear any more: only weight and bias count.
        plain_head(self._model, _fp32_cast)
        average_gathered(weight, bias)
        self._head_called = True
        head = Head(
            weight,
            bias,
            LogitTransform(float(temperature), final_logit_softcapping, float(logit_scale)),
        )
        sets = None if sampling_mask is None else TokenSets.from_padded(sampling_mask)
        entropies: Tensor | None
        if self._loss is not None:
            logps, entropies, loss = self._loss.compute(hidden, head, sets)
            return logps, entropies, loss, None, None
        self.counts["scored"] += 1
        with_entropy = "entropy" in outputs
        if sets is not None:
            logps, entropies = logprobs_over_sets(hidden, head, targets, sets, with_entropy)
            return logps, entropies, None, None, None
        recorded_sets = None
        if self._next_sets is not None:
            # TRL may split a batch into several forwards. Each takes the sets of the next rows.
            num_rows = len(targets)
            recorded_sets = self._next_sets[:num_rows]
            self._next_sets = self._next_sets[num_rows:]
        logps, entropies = linear_logprobs(
            hidden, head, targets, kept=recorded_sets, entropy=with_entropy
        )
        return logps, entropies, None, None, None


def logprobs_over_sets(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    sets: TokenSets,
    entropy: bool | str,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs over candidate sets and, as in TRL, entropies over the vocabulary.

    hidden    [N, H]
    head      the output head
    targets   int64 [N]
    sets      the candidate set of each row: the ids that top-k or top-p left
    entropy   whether the entropy is computed: False, True or "detached", as in `linear_logprobs`
    mask      bool [N], rows to compute; None for all

    The results are fp32 [N] each, 0 where mask is False. Without entropy the second is None.
    """
    logps = linear_logprobs(hidden, head, targets, mask=mask, kept=sets).logps
    if not entropy:
        return logps, None
    # A second pass, because one call has the same ids for log-probs and entropy.
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy is True):
        entropies = linear_logprobs(hidden, head, targets, mask=mask, entropy=entropy).entropy
    return logps, entropies


# ---- the subclass, made at first use, because this module is imported without TRL too


@functools.cache
def _trainer_class() -> type:
    """Return the class FusedGRPOTrainer. It is made here, because its base class is TRL's."""
    from trl import GRPOTrainer

    class FusedGRPOTrainer(GRPOTrainer):
        """A trl.GRPOTrainer to which `patch` is applied.

        It takes the arguments of trl.GRPOTrainer, and those of `patch`: strict, skip_inactive,
        replay, any_version.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            options = {
                name: kwargs.pop(name)
                for name in inspect.signature(patch).parameters
                if name in kwargs
            }
            # Raises RuntimeError for a TRL that is not supported, whose own __init__ would raise a
            # TypeError for arguments that it does not have.
            function_of_head(log_probs)
            super().__init__(*args, **kwargs)
            patch(self, **options)

    FusedGRPOTrainer.__module__ = __name__
    FusedGRPOTrainer.__qualname__ = "FusedGRPOTrainer"
    return FusedGRPOTrainer


def __getattr__(name: str) -> Any:
    """Return FusedGRPOTrainer, which is made at first use, because its base class is TRL's.

    Python calls this function for a name that the module does not define.
    """
    if name == "FusedGRPOTrainer":
        return _trainer_class()
    if name == "GRPOTrainer":
        # `from ... import GRPOTrainer` would drop the message of an AttributeError
        raise ImportError(
            f"{__name__} has no GRPOTrainer. Did you mean FusedGRPOTrainer? TRL's own is"
            " trl.GRPOTrainer."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{nearest(name, __all__)}")


# ---- a trainer's configuration and inputs as an Objective, a TokenBatch and a denominator

#: The least weight of a token in TRL's VESPO.
LEAST_WEIGHT = 1e-8


def _corrected(trainer: Any) -> bool:
    """Return whether TRL multiplies the loss by importance weights, policy over sampler (vLLM)."""
    return trainer.use_vllm and trainer.vllm_importance_sampling_correction


def objective_of(trainer: Any) -> Objective:
    """Return the objective of a trainer's configuration at this step.

    trainer   a GRPOTrainer. The coefficient of its entropy bonus may change from step to step.

    Raises ValueError with the reason if the configuration is not supported.
    """
    # TRL copies some options from args to the trainer. The copy counts.
    options: Any = types.SimpleNamespace(**vars(trainer.args) | vars(trainer))
    is_vespo = options.loss_type == "vespo"
    device_map = getattr(options.model, "hf_device_map", None) or {}  # {module: device}
    if len(set(device_map.values())) > 1:
        raise NotCovered("a model split over devices")
    if is_vespo and _corrected(options):
        low = options.vllm_importance_sampling_clip_min
        high = options.vllm_importance_sampling_clip_max
        # TRL multiplies the weights of padding, which are 1, into the ratio of a sequence. Clipped
        # to a range without 1, they change it.
        if (low or 0) > 1 or (high is not None and high < 1):
            raise NotCovered(
                "VESPO with a clip range without 1, in which the weights of padding count"
            )
    has_weighted_kl = options.beta != 0 and options.use_bias_correction_kl
    if is_vespo and options.importance_sampling_level == "sequence" and has_weighted_kl:
        raise NotCovered("VESPO's KL weighted by the ratio of the sequence")

    # Filters drop tokens from the policy term: those of low entropy, and those of sequences that
    # the policy has moved away from.
    filters: list[Any] = []
    if options.top_entropy_quantile < 1.0:
        filters.append(EntropyQuantile(options.top_entropy_quantile, default_group()))
    if options.off_policy_mask_threshold is not None:
        threshold = options.off_policy_mask_threshold
        filters.append(OffPolicySequences(threshold, advantage_of="token"))
    changes: dict[str, Any] = {}
    if not options.use_bias_correction_kl:
        changes["kl"] = "k3"
    if not is_vespo:
        changes["level"] = options.importance_sampling_level
    entropy_coef = 0.0
    if options._entropy_bonus_enabled:
        # TRL's adaptive bonus is off while the entropy is above its target.
        is_above_target = (
            options.use_adaptive_entropy and options._last_world_entropy > options.entropy_target
        )
        if not is_above_target:
            entropy_coef = options.entropy_coef / accumulation(trainer)
    return Objective.preset(
        options.loss_type,
        numerics="trl",
        surrogate=surrogate_of(options),
        beta=options.beta,
        filters=tuple(filters),
        entropy_coef=entropy_coef,
        max_tokens=options.max_completion_length,
        **changes,
    )


def accumulation(trainer: Any) -> float:
    """Return the number of micro-batches of this optimiser step, 1 in evaluation.

    TRL divides its loss by it.
    """
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 1.0


def token_batch(trainer: Any, inputs: dict[str, Any], objective: Objective) -> TokenBatch:
    """Return TRL's micro-batch as a packed batch of the tokens with completion_mask.

    trainer     a GRPOTrainer
    inputs      TRL's micro-batch, with values per token [B, T] or per sequence [B]
    objective   the objective of the loss
    """
    is_completion = inputs["completion_mask"] != 0
    places = is_completion.flatten().nonzero()[:, 0]  # flat positions of the N tokens

    def packed(name: str) -> Any:
        """Return an input for completion tokens [N], or None if TRL has no such input.

        It may have one value per token [B, T] or per sequence [B].
        """
        x = inputs.get(name)
        if x is None:
            return None
        if x.dim() == 1:
            x = x[:, None]
        return x.expand(is_completion.shape).flatten()[places]

    weights = packed("importance_sampling_ratio")
    if trainer.loss_type == "vespo":
        # TRL's VESPO gives a token of weight 0 the least weight instead.
        weights = None if weights is None else weights.clamp(min=LEAST_WEIGHT)
    elif not _corrected(trainer):
        weights = None
    needs_sampler = trainer.off_policy_mask_threshold is not None
    # With replay, the candidate ids of each token, which `Replay` has added to the inputs.
    kept = None
    if KEY in inputs:
        kept = TokenSets.from_padded(inputs[KEY].flatten(0, 1)[places])
    return TokenBatch(
        packed("completion_ids"),
        packed("advantages"),
        mask=packed("tool_mask"),
        weights=weights,
        old_logps=packed("old_per_token_logps"),
        ref_logps=packed("ref_per_token_logps") if objective.beta != 0 else None,
        sampler_logps=packed("sampling_per_token_logps") if needs_sampler else None,
        kept=kept,
        cu_seqlens=offsets_of(is_completion.sum(1)),
    )


def offsets_of(lengths: Tensor) -> Tensor:
    """Return cu_seqlens of sequences of these lengths: [0, l_0, l_0 + l_1, ...]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def denominator(
    trainer: Any, inputs: dict[str, Any], batch: TokenBatch, objective: Objective
) -> float | Tensor:
    """Return the denominator of this micro-batch's loss in TRL, a number or 0-d.

    trainer     a GRPOTrainer
    inputs      TRL's micro-batch
    batch       the same as a `TokenBatch`
    objective   the objective of the loss
    """
    if trainer.loss_type not in BY_ITEMS:
        return at_least_one(objective.normalizer(batch)) * accumulation(trainer)
    # num_items_in_batch counts the tokens of a generation batch on all ranks, and gradients are
    # averaged over ranks.
    items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    if not trainer.model.training:
        return items
    # A generation batch has the tokens of steps_per_generation micro-batches, an optimiser step
    # those of accumulation(trainer).
    return items * accumulation(trainer) / trainer.args.steps_per_generation


def tree_batch(inputs: dict[str, Tensor]) -> TokenBatch:
    """Return the batch of the rollouts that AsyncGRPOTrainer packs for one rank.

        ids = inputs["input_ids"][inputs["attention_mask"].bool()]  # [N], one id for each row
        out = linear_grpo_loss(hidden, weight, tree_batch(inputs), objective)  # hidden [N, H]

    inputs   the argument of AsyncGRPOTrainer.compute_loss

    Rollouts with a common prefix share the rows of the prefix, so one row of hidden states may
    predict a token of several rollouts.
    """
    # token_index has the row that predicts each token, and -1 for padding.
    is_token = inputs["token_index"] >= 0
    rows = inputs["token_index"][is_token]
    row_labels = inputs["shift_labels"][inputs["attention_mask"].bool()]  # one for each row
    # The tokens of one rollout are contiguous.
    tokens_per_rollout = inputs["segment_id"][is_token].bincount()
    return TokenBatch(
        row_labels[rows],
        inputs["advantages"][is_token],
        old_logps=inputs["old_log_probs"][is_token],
        rows=rows,
        cu_seqlens=offsets_of(tokens_per_rollout),
    )


# ---- the state of one loss while TRL's code runs


@dataclass(eq=False)
class LossCall:
    """The state of one loss, from TRL's call of the model to its result.

    batch       the micro-batch, packed
    objective   what is minimised
    normalizer  the denominator of the loss
    options     backend and skip_inactive
    compared    whether `check` will compare our loss with TRL's in value and gradient

    The forward of the model sets

    out            LossOutput of our loss
    model_output   output of the outermost model wrapper: DDP and FSDP put hooks on its tensors
    trl_logps, trl_entropies
                   log-probs and entropies as TRL's code gets them, [B, T] each, without the graph
                   of the model. They require a gradient if `compared`.
    is_completion  bool [B, T], tokens of the completions
    aux_loss       auxiliary loss of a mixture of experts with its graph, 0-d, or None
    """

    batch: TokenBatch
    objective: Objective
    normalizer: float | Tensor
    options: Options
    compared: bool
    out: Any = None
    model_output: Any = None
    trl_logps: Any = None
    trl_entropies: Any = None
    is_completion: Any = None
    aux_loss: Tensor | None = None

    def compute(
        self, hidden: Tensor, head: Head, kept: TokenSets | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss from hidden states, and return what TRL's LM head has to return.

        hidden   [N, H], the hidden states of the tokens of `self.batch`
        head     weight, bias and logit transform of the LM head
        kept     the candidate set of each token (the ids left by top-k or top-p), over which
                 log-probs are normalised. None: over the vocabulary.

        Returns (log-probs, entropies, loss), fp32 [N] each. Entropies are over the vocabulary, also
        with candidate sets, as in TRL. The third has the loss in element 0 and zeros elsewhere, and
        only it has a graph. It is [N] because it replaces a statistic of each token that TRL's GRPO
        loss does not use. So the loss becomes an output of the model, whose wrappers (DDP, FSDP)
        begin their backward at its outputs.
        """
        if kept is None:
            out = linear_grpo_loss(
                hidden,
                head,
                self.batch,
                self.objective,
                normalizer=self.normalizer,
                options=self.options,
            )
        else:
            batch = self.batch
            # TRL logs the entropy of every loss. It gets a gradient if the loss contains it.
            with_entropy: bool | str = True if self.objective.needs_entropy else "detached"
            logps, entropies = logprobs_over_sets(
                hidden, head, batch.targets, kept, with_entropy, mask=batch.mask
            )
            out = objective_loss(
                logps, batch, self.objective, entropy=entropies, normalizer=self.normalizer
            )
        self.out = out  # for `check`
        logps = out.logps
        entropy = out.entropy
        # The tokens that are not skipped; None for all.
        computed = self.batch.named_mask(self.objective.gradient_mask)
        if self.options.skip_inactive and computed is not None:
            # Skipped tokens have no values. TRL averages over all tokens in its metrics, so they
            # get ratio 1, which counts as not clipped, and the mean entropy of the others.
            old_logps = self.batch.old_logps
            if old_logps is None:
                old_logps = torch.zeros_like(logps)
            logps = torch.where(computed, logps, old_logps)
            mean_entropy = (entropy * computed).sum() / computed.sum()
            entropy = torch.where(computed, entropy, mean_entropy)
        loss_in_first_element = torch.nn.functional.pad(out.loss[None], (0, len(logps) - 1))
        return logps, entropy, loss_in_first_element

    def detach_for_trl(
        self, is_completion: Tensor, logps: Tensor, entropies: Tensor, aux_loss: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs, entropies and auxiliary loss without their graphs, and store them.

        TRL computes its metrics and its own value of the loss from the results. They are detached,
        because `compute` has computed our loss, whose gradient is the one that trains the model.
        The stored values are for `check` and for the caller.

        is_completion      bool [B, T], True for tokens of the completions
        logps, entropies   fp32 [B, T]
        aux_loss           the auxiliary loss of a mixture of experts, 0-d, or None
        """
        self.is_completion = is_completion
        # The caller adds the auxiliary loss to our loss, so the stored one keeps its graph.
        self.aux_loss = aux_loss
        self.trl_logps = logps.detach()
        self.trl_entropies = entropies.detach()
        if self.compared:
            # `check` takes the gradient of TRL's loss with respect to these two.
            self.trl_logps.requires_grad_()
            self.trl_entropies.requires_grad_()
        detached_aux_loss = None if aux_loss is None else aux_loss.detach()
        return self.trl_logps, self.trl_entropies, detached_aux_loss

    def check(self, trial: Trial, loss: Tensor, theirs: Tensor) -> None:
        """Raise RuntimeError unless TRL's loss of the same log-probs agrees in value and gradient.

        Gradients are compared too, because an on-policy loss is near 0 for any denominator. The
        tolerance is relative to the sum of absolute terms, because terms of opposite sign cancel.
        Differences are summed over tokens, so that one token whose ratio crosses the edge of the
        clip range by rounding does not raise.

        trial    the comparison with TRL, whose `require_close` raises the error
        loss     our loss, 0-d
        theirs   TRL's loss, 0-d
        """
        rows = self.out.rows  # weights and advantages of each token, fp32 [N]
        size_of_terms = (rows.policy_weight * rows.advantages).abs().sum()
        if rows.kl_weight is not None:
            size_of_terms = size_of_terms + rows.kl_weight.sum()
        floor = 1e-3 * size_of_terms
        # LOSS is the name of TRL's method in the error, 1e-3 the relative tolerance.
        trial.require_close(LOSS, "the fused loss", [loss], [theirs], 1e-3, floor)
        if not theirs.requires_grad:  # evaluation
            return
        grad_logps, grad_entropies = torch.autograd.grad(
            theirs, [self.trl_logps, self.trl_entropies], allow_unused=True, materialize_grads=True
        )
        ours = self.objective.token_losses(
            self.trl_logps.detach()[self.is_completion],
            self.trl_entropies.detach()[self.is_completion],
            rows,
            self.batch,
        )

        def require_close(name: str, our_gradient: Any, gradient: Tensor, floor: Any) -> None:
            """Raise RuntimeError unless two gradients of the same log-probs or entropies agree.

            name           "log_probs" or "entropy", for the error
            our_gradient   fp32 [N], a number for all tokens, or None for 0
            gradient       TRL's, fp32 [B, T], of which the N tokens of completions count
            floor          absolute tolerance of the sum over all tokens
            """
            gradient = gradient[self.is_completion]
            # None stands for no gradient, a scalar for the same gradient of all tokens.
            if our_gradient is None:
                our_gradient = torch.zeros_like(gradient)
            our_gradient = our_gradient.expand_as(gradient)
            what = f"the gradient with respect to the {name}"
            floor_per_token = floor / max(gradient.numel(), 1)
            trial.require_close(LOSS, what, [our_gradient], [gradient], 1e-3, floor_per_token)

        require_close("log_probs", ours.grad_logps, grad_logps, floor)
        # Gradients of the entropy have one sign, so nothing cancels: no absolute tolerance.
        require_close("entropy", ours.grad_entropy, grad_entropies, 0.0)


def _fp32_cast(head: Any) -> Any:
    """Return the forward that TRL's option cast_lm_head_to_fp32 sets on a head, or None.

    TRL replaces the `forward` of the module by a function that casts to fp32 first. A forward that
    another package has set is not returned, and `plain_head` refuses it.

    head   the module of the LM head
    """
    cast = vars(head).get("forward")
    return cast if getattr(cast, "__module__", "") == "trl.trainer.grpo_trainer" else None


# ---- replay: candidate sets, from the generation to log-probs and loss

#: The extra field of a rollout_func: for each completion one list of ids per generated token.
FIELD = "sampling_mask"
#: The key of the sets in TRL's batch of completions, int32 [B, T, K] padded with -1. TRL shuffles
#: and splits this tensor like the others.
KEY = "kept_ids"


class Replay:
    """The candidate sets of one trainer's generations, which it adds to TRL's batches.

    It replaces two methods of the trainer: `_generate`, whose candidate sets it stores, and
    `_generate_and_score_completions`, to whose result it adds them.
    """

    def __init__(self, trainer: Any) -> None:
        """Prepare the replacements of two methods of a trainer; `self.ours` has them by name."""
        self.trainer = trainer
        self.ours = {"_generate": self._generate, "_generate_and_score_completions": self._complete}
        self._theirs = {name: getattr(trainer, name) for name in self.ours}
        # (ids of each generated token of each completion, 1 / 0 list of each completion that marks
        # generated tokens); None outside of a generation
        self._record: Any = None

    def sets_of(self, is_completion: Tensor) -> TokenSets | None:
        """Return the candidate sets of the tokens of completions, row by row.

        The candidate set of a token has the ids that top-k and top-p left when it was sampled.

        is_completion   bool [B, T], True for tokens of the completions

        Returns None if no generation is in progress (`self._record` is None). A loss, for example,
        has its sets in its micro-batch.
        """
        if self._record is None:
            return None
        return self._sets(is_completion.shape[1])[is_completion]

    def _generate(self, prompts: list[Any], *more: Any, **options: Any) -> Any:
        """Call `_generate` of a TRL trainer, and store the candidate sets of its completions.

        The candidate set of a token has the ids that top-k and top-p left when it was sampled. The
        sets come from the field `FIELD` that a rollout_func returns, or from the outputs of vLLM,
        which TRL passes to `extract_logprobs`. They are stored in `self._record`.

        Raises RuntimeError if there are none.
        """
        from trl.generation import vllm_generation

        # Call TRL's method, and look at what vLLM returns to it.
        masks_by_call: list[list[Any]] = []  # vLLM's sampling mask of each completion, or None
        theirs = vllm_generation.extract_logprobs

        def extract(outputs: Any) -> Any:
            masks_by_call.append(
                [getattr(output, FIELD, None) for request in outputs for output in request.outputs]
            )
            return theirs(outputs)

        with temporarily_replaced(vllm_generation, extract_logprobs=extract):
            result = self._theirs["_generate"](prompts, *more, **options)
        # TRL's results by position: 1 is the token ids of the completions, 2 their lists that mark
        # generated tokens (None if all are), 5 the extra fields of a rollout_func.
        completions = result[1]
        is_generated = result[2]
        extra_fields = result[5]
        record = extra_fields.pop(FIELD, None)
        # With tools vLLM generates several times, and the parts of a completion are not matched.
        if record is None and len(masks_by_call) == 1 and None not in masks_by_call[0]:
            record = [mask.token_ids for mask in masks_by_call[0]]
        if record is None:
            raise RuntimeError(
                f"replay=True, but the generation has no candidate sets: return {FIELD!r} from"
                " rollout_func, a list of ids for each generated token, or let vLLM run in this"
                " process (vllm_mode='colocate') with return_sampling_mask and a top_k, and"
                " without tools."
            )
        if is_generated is None:
            is_generated = [[1] * len(ids) for ids in completions]
        self._record = ([*record], is_generated)
        return result

    def _sets(self, num_positions: int) -> TokenSets:
        """Return the recorded candidate sets of all completions of the generation.

        `_generate` has stored them in `self._record`: ids of each generated token of each
        completion, and for each completion a list of 1 and 0 that marks its generated tokens.

        num_positions   T, the length to which the completions are padded

        The result has B * T sets. Positions without a recorded set (padding, and tokens that a tool
        returned) have an empty one.
        """
        record, marks = self._record
        generated = torch.zeros(len(marks), num_positions, dtype=torch.bool)
        for row, is_generated in zip(generated, marks, strict=True):
            row[: len(is_generated)] = torch.as_tensor(is_generated) != 0
        return TokenSets.from_lists(record, generated=generated).to(self.trainer.accelerator.device)

    def _complete(self, inputs: list[Any], *more: Any, **options: Any) -> dict[str, Any]:
        """Call `_generate_and_score_completions` of a TRL trainer, and add candidate sets.

        TRL's method calls `_generate`, which stores the sets of the completions in `self._record`.
        Its result is the batch of completions, to which they are added under `KEY`.
        """
        try:
            output = self._theirs["_generate_and_score_completions"](inputs, *more, **options)
            batch, tokens = output["completion_ids"].shape
            output[KEY] = self._sets(tokens).padded().view(batch, tokens, -1)
        finally:
            # The record belongs to this generation only.
            self._record = None
        return output


# ---- the fused LM head that every TRL trainer is built on

#: Arguments that TRL's function of the head has in every version.
NEEDED = ("weight", "bias", "targets", "temperature")
#: TRL's names of outputs -> the statistic of `linear_logprobs(also=)` from which they are computed.
FUSED_OUTPUTS = {"entropy": None, "log_sum_sq_probs": "sum_squares", "is_top1": "top_id"}


def fused_lm_head(*, strict: bool = False, any_version: bool = False) -> Slots:
    """Replace TRL's autograd function of the LM head by `linear_logprobs`, in all trainers.

        with fused_lm_head() as slots:
            trainer.train()
        print(slots.counts)  # Counter({'fused': 120})

    The result restores TRL's function, by `undo()` or at the end of the `with` block. Its `counts`
    say how many calls were "fused", and why others ran in TRL.

    TRL has the function in a module global, so it cannot be replaced for a single trainer. Masks,
    label shifts, gathers, PEFT, images and mixtures of experts are handled by TRL's own code, which
    calls the function. Two things differ:

    - The gradient of a head that FSDP2 shards is averaged over the ranks. In calls left to TRL each
      rank keeps its own, see `average_gathered`.
    - On a CPU TRL also passes padding and prompts to its function, to keep the shapes constant.
      While the function is replaced, TRL passes only the positions that it needs, as on a GPU.

    TRL 1.14 has a function with log-probs and entropy alone, which trainers call with
    use_liger_kernel=True.

    strict        True: a call that ours does not support raises RuntimeError. False: TRL's own
                  function computes it.
    any_version   False: under a version of TRL that was not tested, the first calls are compared
                  with TRL's own functions, and RuntimeError is raised if they differ. True: they
                  are not compared.

    Raises RuntimeError if TRL's function has other arguments or is replaced already.
    """
    from trl.trainer import utils

    slots = Slots(ADAPTER, strict, any_version)
    _, ours = function_of_head(log_probs, log_probs_and_entropy, log_probs_and_statistics)
    slots.bind(ours, "trl.trainer.utils._ChunkedLogProbFunction", attribute="apply")
    if hasattr(utils, "_use_triton"):  # from 1.16 on
        slots.replace_attribute(utils, "_use_triton", rows_with_a_label)
    return slots


def rows_with_a_label(device: torch.device) -> bool:
    """Return True, in place of TRL's `_use_triton`.

    TRL's forward of a model calls `_use_triton(device)` to decide which positions it passes to its
    function of the LM head: only those that have a label (True), or all (False, on a CPU). Our
    function needs only those with a label. TRL's kernels are not switched by this function.
    """
    return True


def function_of_head(*ours: Any) -> tuple[Any, Any]:
    """Return (TRL's autograd function of the LM head, our function with the same results).

    Versions of TRL differ in the results of this function. Its arguments tell which it has.

    ours   our functions that the caller supports, some of `log_probs`, `log_probs_and_entropy` and
           `log_probs_and_statistics`

    Raises RuntimeError if the function of the installed TRL has the results of none of them, or
    does not have the arguments that ours need.
    """
    import trl
    from trl.trainer import utils

    # SLOT is the name of the autograd function. If ours has replaced it, the replacement has TRL's
    # own as an attribute.
    current = getattr(utils, SLOT, None)
    theirs = getattr(current, "theirs", current)
    their_names = [p.name for p in parameters_of(theirs) or ()]
    function: Any = log_probs
    if "outputs" not in their_names:
        # TRL 1.14 has two results, a version without chunk_size has four.
        has_two = "chunk_size" in their_names
        function = log_probs_and_entropy if has_two else log_probs_and_statistics
    # NEEDED are the names of the arguments that ours cannot do without.
    if function in ours and {*NEEDED} <= {*their_names}:
        return theirs, function
    our_names = inspect.signature(function).parameters
    raise RuntimeError(
        f"trl is {trl.__version__}, where trl.trainer.utils.{SLOT} is {theirs!r} and takes"
        f" ({', '.join(their_names)}), but ours takes ({', '.join(our_names)}): another package has"
        f" replaced it (undo that), or install TRL {ADAPTER.tested[-1]}. With an older one and"
        " use_liger_kernel=True, TRL 1.14 takes our log-probs by integrations.trl.fused_lm_head(),"
        " TRL 0.17 to 1.13 our loss by integrations.liger.patch(trainer)."
    )


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int | None = None,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = EVERY_OUTPUT,
    sampling_mask: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return (log-probs, entropy, log sum of squared probabilities, None, is_top1), each [N].

    Arguments and results are those of `apply` of TRL's autograd function of the LM head, which it
    replaces. is_top1 is bool, the others fp32.

    hidden         [N, H]
    weight, bias   [V, H], [V] or None
    targets        int64 [N]; -100 stands for no target, and gives 0
    temperature, final_logit_softcapping, logit_scale   as in `LogitTransform`
    chunk_size     not used
    outputs        the results that TRL asks for besides the log-probs: "entropy",
                   "log_sum_sq_probs", "is_top1" (whether the target has the largest logit). The
                   others are None. TRL computes a call that asks for "mean_logits".
    sampling_mask  [N, K] ids padded with -1: the log-prob of a position is then over these ids and
                   its target. The other results are over the vocabulary.

    Raises NotCovered, so that TRL computes the call, for results, dtypes or sharded heads that are
    not supported.
    """
    unsupported = sorted(set(outputs) - {"log_probs", *FUSED_OUTPUTS})
    if unsupported:
        raise NotCovered(f"{', '.join(unsupported)} asked for")
    covered(weight, scales=(logit_scale,))
    require_supported(hidden, weight)
    average_gathered(weight, bias)
    # The statistics of `linear_logprobs` from which the outputs are computed below.
    also = tuple(
        statistic for output, statistic in FUSED_OUTPUTS.items() if statistic and output in outputs
    )
    ids = targets.clamp(min=0)  # any id for -100, whose results become 0 below
    head = Head(
        weight,
        bias,
        LogitTransform(float(temperature), final_logit_softcapping, float(logit_scale)),
    )
    if sampling_mask is None:
        results = log_probs_of(hidden, ids, head=head, entropy="entropy" in outputs, also=also)
        statistics = results.also
    else:
        sets = TokenSets.from_padded(sampling_mask)
        results = log_probs_of(
            hidden,
            ids,
            head=head,
            entropy="entropy" in outputs,
            kept=sets,
            entropy_over="vocabulary",
        )
        # A call with candidate sets has its statistics over them. TRL's are over the vocabulary.
        with torch.no_grad():
            statistics = log_probs_of(hidden, ids, head=head, also=also).also if also else {}
    sum_squares = statistics.get("sum_squares")  # of the probabilities
    top_id = statistics.get("top_id")
    counted = targets >= 0

    def zero_unless_counted(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(counted, x, 0.0)

    return (
        zero_unless_counted(results.logps),
        zero_unless_counted(results.entropy),
        None if sum_squares is None else zero_unless_counted(sum_squares.detach().log()),
        None,  # TRL's mean_logits, which is not supported
        None if top_id is None else (top_id == targets) & counted,
    )


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor | None, ...]:
    """Return (log-probs, entropy), fp32 [N] each, as TRL's function of the LM head does in 1.14.

    hidden         [N, H]
    weight, bias   [V, H], [V] or None
    targets        int64 [N]; -100 stands for no target, and gives 0
    temperature, final_logit_softcapping, logit_scale   as in `LogitTransform`
    chunk_size     not used
    """
    logps, entropy, *_ = log_probs(
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        final_logit_softcapping,
        logit_scale,
        outputs=("entropy",),
    )
    return logps, entropy


def log_probs_and_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor | None, ...]:
    """Return (log-probs, entropy, log sum of squared probabilities, is_top1), [N] each.

    These are the results of TRL's function of the LM head in a version without chunk_size.

    hidden         [N, H]
    weight, bias   [V, H], [V] or None
    targets        int64 [N]; -100 stands for no target, and gives 0
    temperature, final_logit_softcapping, logit_scale   as in `LogitTransform`
    """
    logps, entropy, log_sum_squares, _, is_top1 = log_probs(
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size=None,
        final_logit_softcapping=final_logit_softcapping,
        logit_scale=logit_scale,
        outputs=tuple(FUSED_OUTPUTS),
    )
    return logps, entropy, log_sum_squares, is_top1


def covered(*weights: Tensor, scales: tuple[float, ...]) -> None:
    """Raise NotCovered for a head or a scale that our functions do not support.

    weights   weights of output heads. Weights that DeepSpeed ZeRO-3 shards are not supported in
              training.
    scales    factors of the logits. 0 is not supported.
    """
    # DeepSpeed gives the parameters that it shards an attribute `ds_id`.
    if torch.is_grad_enabled() and any(hasattr(weight, "ds_id") for weight in weights):
        raise NotCovered("a head under DeepSpeed ZeRO-3 is gathered for TRL's own backward only")
    if 0 in scales:
        raise NotCovered("logit_scale is 0")


def gathered(parameter: Any) -> Any:
    """Return the full tensor of a parameter that FSDP2 shards; any other argument unchanged.

    The gradient is averaged over the ranks, as FSDP does for other parameters, and scattered to
    their shards.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh
    # Partial: each rank has a summand of the gradient. The backward sums them over the ranks.
    full_parameter = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full_parameter.requires_grad:  # divide the sum, for the average
        full_parameter.register_hook(lambda gradient: gradient / mesh.size())
    return full_parameter


def average_gathered(*parameters: Tensor | None) -> None:
    """Average the gradient over ranks for parameters that TRL gathered by `full_tensor()`.

    FSDP2 shards a parameter over ranks, and TRL gathers the shards of the LM head before its
    matmul. The backward of `full_tensor()` without grad_placements assumes equal gradients on all
    ranks: each rank keeps the part of its own gradient that belongs to its shard. A hook averages
    the gradient before that. Calls that TRL's own function computes keep TRL's gradient.

    parameters   weight and bias of the head. None, and any other tensor, is left alone.
    """

    def average(gradient: Tensor, mesh: Any) -> Tensor:
        gradient = gradient / mesh.size()
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(gradient, group=mesh.get_group(dim))
        return gradient

    for parameter in parameters:
        # The autograd node of `full_tensor()` has these two attributes.
        node = getattr(parameter, "grad_fn", None)
        spec = getattr(node, "dtensor_spec", None)
        if (
            parameter is not None
            and spec is not None
            and getattr(node, "grad_placements", None) is None
        ):
            parameter.register_hook(functools.partial(average, mesh=spec.mesh))


# ---- the distillation loss


def fused_divergence(*, strict: bool = False, any_version: bool = False) -> Slots:
    """Replace TRL's function of the distillation loss by `linear_grpo_loss`, in all trainers.

        with fused_divergence() as slots:
            DistillationTrainer(...).train()

    It takes four matmuls; TRL's function takes six, and eight for the JSD. The result restores
    TRL's function, by `undo()` or at the end of the `with` block. Its `counts` say how many calls
    were "fused", and why others ran in TRL.

    beta, temperature, scale and softcap of both models and the denominator have the same meaning as
    in TRL. Two things differ: a logit of -inf does not give NaN, and fp32 tensors under fp16
    autocast on a CPU are multiplied in fp32, because fp16 matmuls are not faster there.

    strict        True: a call that ours does not support raises RuntimeError. False: TRL's own
                  function computes it.
    any_version   False: under a version of TRL that was not tested, the first calls are compared
                  with TRL's own functions, and RuntimeError is raised if they differ. True: they
                  are not compared.

    Raises RuntimeError if TRL's function has other arguments or is replaced already.
    """
    return DISTILLATION.bind(divergence_loss, strict=strict, any_version=any_version)


def divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, sum of the student's entropies, number of tokens), 0-d each.

    student_hidden_states, teacher_hidden_states    [B, K, H], positions that predict completions
    student_lm_head_weight, teacher_lm_head_weight  [V, H]
    student_lm_head_bias, teacher_lm_head_bias      [V] or None
    completion_mask      [B, K], nonzero for counted tokens
    beta                 0: KL(teacher || student). 1: KL(student || teacher). Between: the JSD
                         whose mixture has the teacher with weight beta.
    num_items_in_batch   the denominator of the sum over tokens; None for the number of counted
                         tokens
    *_logit_scale, *_final_logit_softcapping, temperature   as in `LogitTransform`

    Arguments and results are those of TRL's function.
    """
    require_supported(student_hidden_states, teacher_hidden_states)
    covered(
        student_lm_head_weight,
        teacher_lm_head_weight,
        scales=(student_logit_scale, teacher_logit_scale),
    )
    mask = completion_mask != 0
    student_head = Head(gathered(student_lm_head_weight), gathered(student_lm_head_bias))
    teacher_head = Head(
        gathered(teacher_lm_head_weight),
        gathered(teacher_lm_head_bias),
        LogitTransform(temperature, teacher_final_logit_softcapping, teacher_logit_scale),
    )
    out = linear_grpo_loss(
        student_hidden_states.reshape(*mask.shape, -1),
        student_head,
        distillation_batch(mask, like=mask),
        Objective.preset("distillation", kl=divergence_of(beta)),
        transform=LogitTransform(temperature, student_final_logit_softcapping, student_logit_scale),
        reference=(teacher_hidden_states.reshape(*mask.shape, -1), teacher_head),
        normalizer=num_items_in_batch,
    )
    return out.loss, out.entropy.sum(), mask.sum()
