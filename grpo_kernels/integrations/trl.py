"""TRL's GRPOTrainer with its loss in one pass: log-probs, loss and gradient are computed together
in the head, inside the model's forward.

    from grpo_kernels.integrations.trl import FusedGRPOTrainer  # was: from trl import GRPOTrainer

    trainer = FusedGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=...)
    trainer.train()
    print(trainer.fused_loss.counts)  # Counter({'fused': 400, 'scored': 100})

or, for an existing trainer, `fused = patch(trainer)`, and `fused.undo()` to restore it.

How it works. TRL's own `_compute_loss` runs. While it does, our function stands in the place of the
one that TRL's forward calls with hidden states and head: there `linear_grpo_loss` computes the loss
and the gradient of the head in one call. TRL's forward and what wraps the model (DDP, FSDP, PEFT,
accelerate) are untouched, and the loss leaves the model among its outputs. TRL gets log-probs and
entropies without a graph, so its arithmetic on [B, T] costs almost nothing and still gives all of
its metrics, the adaptive entropy coefficient and its value of the loss. Strict mode compares this
value, and its gradient on [B, T], with ours.

Log-probs of the old policy and of the reference, which TRL computes without gradients, are "scored"
by `linear_logprobs`.

Replay. vLLM's log-probs are over the tokens that top-k and top-p kept, but TRL scores over the
whole vocabulary. With `patch(trainer, replay=True)` the sets of the generation (`sampling_mask`:
from vLLM in this process, or an extra field of a rollout_func) are used for every log-prob of the
run: old policy, reference and loss. The entropies that TRL logs are then those over the sets.

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
from ._swap import Adapter, NotCovered, Slots, Trial, fitted, parameters_of, replaced_inside
from ._tensors import (
    BY_ITEMS,
    at_least_one,
    divergence_of,
    log_probs_of,
    plain,
    surrogate_of,
    teaching,
    world,
)

__all__ = [
    "FusedGRPOTrainer",  # noqa: F822
    "FusedLoss",
    "fused_divergence",
    "fused_lm_head",
    "patch",
]


#: TRL's method of the loss, that of log-probs, and the function in the head of its models.
LOSS = "GRPOTrainer._compute_loss"
SCORES = "_get_per_token_logps_and_entropies"
SLOT = "_ChunkedLogProbFunction"
#: What TRL's function of the head can give besides the log-probs.
EVERY_OUTPUT = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
#: The loss and the head were tested with these versions,
ADAPTER = Adapter(
    "TRL", "trl", ("1.15", "1.16"), {"log_probs": "trl.trainer.utils._ChunkedLogProbFunction"}
)
#: and the distillation loss with this one.
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
    """Make this GRPOTrainer, and no other, compute its loss in one pass. Call it after the trainer
    is made, before `train()` or between two calls of it. The result, which is also
    `trainer.fused_loss`, counts the paths and can undo the patch.

    strict         True: a configuration that needs TRL's own loss raises RuntimeError at the first
                   step. So does a step whose loss, or its gradient with respect to log-probs and
                   entropies, differs from TRL's arithmetic on the same log-probs (in evaluation
                   only the loss is compared). False: such a configuration runs in TRL's code, is
                   logged once and counted.
    skip_inactive  True: tokens that cannot have a gradient (advantage or weight 0, neither KL nor
                   entropy bonus, token level) are not projected, unless a micro-batch has no other
                   tokens. The entropy that TRL logs is then the mean over the projected tokens, and
                   a token of weight 0 counts as not clipped. Nothing else in TRL's log changes.
                   False: they are projected in the forward, for the metrics, but not in the
                   backward.
    replay         True: completions are scored and trained over the sets that their tokens were
                   sampled from, as vLLM in this process or a rollout_func returns them; generation
                   without them raises RuntimeError, and so does a configuration that has to be left
                   to TRL's own loss.
    any_version    True: accept a version of TRL that was not tested, without the comparison below.

    Under a version that was not tested, the first step is also computed by TRL's own head (not with
    replay) and arithmetic. If log-probs, loss and slopes agree, one warning says so. Otherwise the
    patch is undone, and RuntimeError names the difference before any gradient is computed.

    Raises TypeError for an object that is not a GRPOTrainer, RuntimeError for one that is patched
    already or has another loss than TRL's, and ValueError for a head that is not a plain Linear,
    such as one with a LoRA. A model whose forward another package has replaced raises RuntimeError
    in the first step.
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
    """What `patch` returns: `Slots` of one trainer.

    counts   of micro-batches and calls:
             "fused"          losses in one pass
             "scored"         forwards without gradients (old policy, reference) through
                              `linear_logprobs`
             "TRL: <reason>"  losses left to TRL's own code
    """

    def __init__(
        self, trainer: Any, strict: bool, skip_inactive: bool, replay: bool, any_version: bool
    ) -> None:
        super().__init__(ADAPTER, strict, any_version)
        self.trainer = trainer
        self.skip_inactive = skip_inactive
        for model in (x for x in (trainer.model, trainer.ref_model) if x is not None):
            plain_head(self._language_model(model), _fp32_cast)
        self.replay = Replay(trainer) if replay else None
        self._theirs = trainer._compute_loss
        self._scores = getattr(trainer, SCORES)
        self._paths = [LOSS]
        self._own, _ = function_of_head(log_probs)
        # Ours is one object for all calls, because torch.compile takes another one for another
        # function.
        head = torch.compiler.disable(fitted(self._of_rows, self._own.apply))
        self._head = type("FusedHead", (), {"apply": staticmethod(head)})
        # What it computes now: a loss, or log-probs over the sets that are left; of this model, and
        # whether that has asked.
        self._loss: LossCall | None = None
        self._kept: TokenSets | None = None
        self._model = None
        self._asked = False
        loss = self.counted(fitted(self._compute_loss, self._theirs), self._theirs)
        ours = {"_compute_loss": loss, SCORES: self._log_probs, "fused_loss": self}
        for name, value in (ours | (self.replay.ours if self.replay else {})).items():
            self.put(trainer, name, value)

    def _language_model(self, model: Any) -> Any:
        return language_model(self.trainer.accelerator.unwrap_model(model))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        trainer = self.trainer
        try:
            objective = objective_of(trainer)
        except ValueError as reason:
            message = f"the loss of this configuration is left to TRL's own code: {reason}."
            if self.replay is not None:
                raise RuntimeError(f"replay=True, but {message}") from reason
            raise NotCovered(*reason.args) from reason

        batch = token_batch(trainer, inputs, objective)
        first = self.trial.pending(LOSS)
        # If no token is active, all are projected: the mean entropy that TRL logs needs some
        # tokens.
        skip = (
            self.skip_inactive
            and not first
            and objective.gradient_is_per_token
            and batch.count_in_mask(objective.gradient_mask) > 0
        )
        options = Options(skip_inactive=skip)
        self._loss = call = LossCall(
            batch,
            objective,
            denominator(trainer, inputs, batch, objective),
            options,
            self.strict or first,
        )
        try:
            theirs = self._theirs(model, inputs)
        finally:
            self._loss = None
        loss = call.output.log_sum_sq_probs.sum()
        if call.aux_loss is not None:
            loss = loss + trainer.router_aux_loss_coef * call.aux_loss / accumulation(trainer)
        if call.compared:
            call.check(self.trial, loss, theirs)
        if first and theirs.requires_grad:
            self.trial.passed(LOSS)
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
        """TRL's method of this name with our function in the head:

        in a loss that is ours, and where there are no gradients.
        """
        from trl.trainer import utils

        loss = self._loss
        given = (input_ids, attention_mask, logits_to_keep, *more)
        if loss is None and torch.is_grad_enabled():
            return self._scores(model, *given, **options)
        scored = attention_mask[:, -logits_to_keep:] != 0
        self._model = self._language_model(model)
        self._kept = None if self.replay is None else self.replay.kept(scored)

        def through(**inputs: Any) -> Any:
            self._asked = False
            out = model(**inputs)
            if not self._asked:
                raise RuntimeError(
                    f"the forward of {type(self._model).__name__} is not TRL's fused LM head: it"
                    " was patched by another package, or this TRL is not known. Undo that patch"
                    " first."
                )
            if loss is not None:
                loss.output = out
            return out

        try:
            with replaced_inside(utils, **{SLOT: self._head, "_use_triton": rows_with_a_label}):
                found = self._scores(through, *given, **options)
        except NotCovered as reason:
            if loss is not None:  # the whole loss is left to TRL
                raise
            self.left(reason, SCORES, self._scores)
            return self._scores(model, *given, **options)
        return found if loss is None else loss.seen(scored, *found)

    def _of_rows(
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
        """What TRL's function of the head gives, of the rows that have a label; arguments as in
        `log_probs`.
        """
        if self.replay is None:  # TRL scores over the vocabulary, or over its own sets
            given = (
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
            named = {} if sampling_mask is None else {"sampling_mask": sampling_mask}
            with torch.no_grad():
                self.trial.compare(
                    LOSS, log_probs, self._own.apply, ((*given, *named.values()), {})
                )
        elif sampling_mask is not None:
            raise RuntimeError(
                "replay=True, but this TRL replays the sets of its sampler itself: pass"
                " replay=False."
            )
        plain_head(self._model, _fp32_cast)
        average_gathered(weight, bias)
        self._asked = True
        head = Head(
            weight,
            bias,
            LogitTransform(float(temperature), final_logit_softcapping, float(logit_scale)),
        )
        sets = None if sampling_mask is None else TokenSets.from_padded(sampling_mask)
        if self._loss is not None:
            return *self._loss.of_rows(hidden, head, sets), None, None
        self.counts["scored"] += 1
        entropy = "entropy" in outputs
        if sets is not None:
            return *logprobs_over_sets(hidden, head, targets, sets, entropy), None, None, None
        kept = self._kept
        if kept is not None:
            rows = len(targets)
            kept, self._kept = kept[:rows], kept[rows:]
        scored = linear_logprobs(hidden, head, targets, kept=kept, entropy=entropy)
        return *scored, None, None, None


def logprobs_over_sets(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    sets: TokenSets,
    entropy: bool | str,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs over candidate sets and, as in TRL, entropies over the vocabulary.

    entropy   as in `linear_logprobs`
    """
    logps = linear_logprobs(hidden, head, targets, mask=mask, kept=sets).logps
    if not entropy:
        return logps, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy is True):
        entropies = linear_logprobs(hidden, head, targets, mask=mask, entropy=entropy).entropy
    return logps, entropies


# ---- the subclass, made at first use, because the core and its tests run without TRL


@functools.cache
def _trainer_class() -> type:
    from trl import GRPOTrainer

    class FusedGRPOTrainer(GRPOTrainer):
        """trl.GRPOTrainer, patched as `patch` does it; `strict`, `skip_inactive`, `replay` and
        `any_version` go there, args and kwargs to TRL.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            options = {
                name: kwargs.pop(name)
                for name in inspect.signature(patch).parameters
                if name in kwargs
            }
            function_of_head(log_probs)  # an older TRL may not know all arguments
            super().__init__(*args, **kwargs)
            patch(self, **options)

    FusedGRPOTrainer.__module__ = __name__
    FusedGRPOTrainer.__qualname__ = "FusedGRPOTrainer"
    return FusedGRPOTrainer


def __getattr__(name: str) -> Any:
    if name == "FusedGRPOTrainer":
        return _trainer_class()
    if (
        name == "GRPOTrainer"
    ):  # an AttributeError would reach `from ... import GRPOTrainer` without its message
        raise ImportError(
            f"{__name__} has no GRPOTrainer. Did you mean FusedGRPOTrainer? TRL's own is"
            " trl.GRPOTrainer."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{nearest(name, __all__)}")


# ---- a trainer's configuration and inputs as an Objective, a TokenBatch and a denominator

#: The least weight of a token in TRL's VESPO.
LEAST_WEIGHT = 1e-8


def _corrected(trainer: Any) -> bool:
    """Whether a sampler's weights are in the loss."""
    return trainer.use_vllm and trainer.vllm_importance_sampling_correction


def objective_of(trainer: Any) -> Objective:
    """The objective of a trainer at this step.

    Raises ValueError with the reason why there is none.
    """
    # What TRL has not copied into the trainer, it reads from its arguments.
    s: Any = types.SimpleNamespace(**vars(trainer.args) | vars(trainer))
    vespo = s.loss_type == "vespo"
    low = s.vllm_importance_sampling_clip_min
    high = s.vllm_importance_sampling_clip_max
    if len({*(getattr(s.model, "hf_device_map", None) or {}).values()}) > 1:
        raise NotCovered("a model split over devices")
    if vespo and _corrected(s) and ((low or 0) > 1 or (high is not None and high < 1)):
        raise NotCovered("VESPO with a clip range without 1, in which the weights of padding count")
    if (
        vespo
        and s.importance_sampling_level == "sequence"
        and s.beta != 0
        and s.use_bias_correction_kl
    ):
        raise NotCovered("VESPO's KL weighted by the ratio of the sequence")
    filters: list[Any] = (
        [] if s.top_entropy_quantile >= 1.0 else [EntropyQuantile(s.top_entropy_quantile, world())]
    )
    if s.off_policy_mask_threshold is not None:
        filters.append(OffPolicySequences(s.off_policy_mask_threshold, advantage_of="token"))
    changes: dict[str, Any] = {} if s.use_bias_correction_kl else {"kl": "k3"}
    if not vespo:
        changes["level"] = s.importance_sampling_level
    bonus = s._entropy_bonus_enabled and not (
        s.use_adaptive_entropy and s._last_world_entropy > s.entropy_target
    )
    return Objective.preset(
        s.loss_type, numerics="trl", surrogate=surrogate_of(s), beta=s.beta, filters=tuple(filters),
        entropy_coef=s.entropy_coef / accumulation(trainer) if bonus else 0.0, max_tokens=s.max_completion_length, **changes,
    )  # fmt: skip


def accumulation(trainer: Any) -> float:
    """Micro-batches of this optimiser step; TRL divides by them itself, and not in evaluation."""
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 1.0


def token_batch(trainer: Any, inputs: dict[str, Any], objective: Objective) -> TokenBatch:
    """TRL's tensors of a micro-batch, packed:

    the tokens that its head scores, one after the other.
    """
    scored = inputs["completion_mask"] != 0
    rows = scored.flatten().nonzero()[:, 0]

    def packed(name: str) -> Any:
        x = inputs.get(name)
        return (
            x
            if x is None
            else (x[:, None] if x.dim() == 1 else x).expand(scored.shape).flatten()[rows]
        )

    weights = packed("importance_sampling_ratio")
    tools = packed("tool_mask")
    if trainer.loss_type == "vespo":
        # TRL keeps a token that the sampler's mask leaves out, with the least weight.
        weights = None if weights is None else weights.clamp(min=LEAST_WEIGHT)
    elif not _corrected(trainer):
        weights = None
    return TokenBatch(
        packed("completion_ids"), packed("advantages"), weights=weights, old_logps=packed("old_per_token_logps"), mask=tools,
        ref_logps=packed("ref_per_token_logps") if objective.beta != 0 else None,
        sampler_logps=None if trainer.off_policy_mask_threshold is None else packed("sampling_per_token_logps"),
        kept=TokenSets.from_padded(inputs[KEY].flatten(0, 1)[rows]) if KEY in inputs else None, cu_seqlens=offsets_of(scored.sum(1)),
    )  # fmt: skip


def offsets_of(lengths: Tensor) -> Tensor:
    """Where each of the sequences of these lengths begins, and the end."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def denominator(
    trainer: Any, inputs: dict[str, Any], batch: TokenBatch, objective: Objective
) -> float | Tensor:
    """TRL's denominator of this micro-batch."""
    if trainer.loss_type not in BY_ITEMS:
        return at_least_one(objective.normalizer(batch)) * accumulation(trainer)
    # The items of a whole generation batch on all ranks; the gradient is the mean over ranks.
    items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    return (
        items * accumulation(trainer) / trainer.args.steps_per_generation
        if trainer.model.training
        else items
    )


def tree_batch(inputs: dict[str, Tensor]) -> TokenBatch:
    """Make a batch of the rollouts that AsyncGRPOTrainer packs for one rank, from the inputs of its
    compute_loss. A shared prefix occurs once; its rows predict tokens of all rollouts that share
    it.

        ids = inputs["input_ids"][inputs["attention_mask"].bool()]  # [N], one id for each row
        out = linear_grpo_loss(hidden, weight, tree_batch(inputs), objective)  # hidden [N, H]
    """
    scored = inputs["token_index"] >= 0
    labels = inputs["shift_labels"][inputs["attention_mask"].bool()]
    rows, advantages, old_logps, owner = (
        inputs[name][scored]
        for name in ("token_index", "advantages", "old_log_probs", "segment_id")
    )
    # The rollouts stand one after the other.
    return TokenBatch(
        labels[rows],
        advantages,
        old_logps=old_logps,
        rows=rows,
        cu_seqlens=offsets_of(owner.bincount()),
    )


# ---- a loss on its way through TRL's code


@dataclass(eq=False)
class LossCall:
    """One loss, and what TRL makes of its log-probs.

    compared  whether TRL's loss has a graph, for `check`, that begins at log-probs and entropies as
              it `read` them
    output    of the outermost wrapper, because DDP and FSDP put hooks on its tensors; out: of our
              loss
    scored    bool [B, T], the tokens whose rows these are
    """

    batch: TokenBatch
    objective: Objective
    normalizer: float | Tensor
    options: Options
    compared: bool
    out: Any = None
    output: Any = None
    read: Any = ()
    scored: Any = None
    aux_loss: Tensor | None = None

    def of_rows(
        self, hidden: Tensor, head: Head, kept: TokenSets | None = None
    ) -> tuple[Tensor, ...]:
        """(log-probs, entropies without a graph, the loss among zeros), each [N]: TRL's loss does
        not read the third output.

        kept   the sets that TRL passes to its head; as in TRL, the entropy is over the vocabulary.
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
            mode: bool | str = True if self.objective.needs_entropy else "detached"
            logps, entropies = logprobs_over_sets(
                hidden, head, batch.targets, kept, mode, mask=batch.mask
            )
            out = objective_loss(
                logps, batch, self.objective, entropy=entropies, normalizer=self.normalizer
            )
        self.out = out
        logps = out.logps
        entropy = out.entropy
        read = self.batch.named_mask(self.objective.gradient_mask)
        # Tokens that were not projected have a ratio of 1, and the mean entropy of the others.
        if self.options.skip_inactive and read is not None:
            others = (
                torch.zeros_like(logps) if self.batch.old_logps is None else self.batch.old_logps
            )
            logps = torch.where(read, logps, others)
            entropy = torch.where(read, entropy, (entropy * read).sum() / read.sum())
        return logps, entropy, torch.nn.functional.pad(out.loss[None], (0, len(logps) - 1))

    def seen(
        self, scored: Tensor, logps: Tensor, entropies: Tensor, aux_loss: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """What TRL gets of its method's results."""
        self.scored = scored
        self.aux_loss = aux_loss
        self.read = [x.detach().requires_grad_(self.compared) for x in (logps, entropies)]
        return *self.read, aux_loss if aux_loss is None else aux_loss.detach()

    def check(self, trial: Trial, loss: Tensor, theirs: Tensor) -> None:
        """Refuse a loss unless TRL's arithmetic gives the same loss for the same log-probs, and the
        same slopes, because on-policy the loss is near 0 for any denominator. Rounding errors are
        relative to the sum of the absolute values of all terms, because terms of different sign
        cancel; those of entropies are plain weights. Differences of all tokens are summed, so that
        a single token whose ratio rounding moves across the edge of the clip range does not raise.
        """
        rows = self.out.rows
        terms = (rows.policy_weight * rows.advantages).abs().sum()
        terms = 1e-3 * (terms if rows.kl_weight is None else terms + rows.kl_weight.sum())
        trial.alike(LOSS, "the fused loss", [loss], [theirs], 1e-3, terms)
        if theirs.requires_grad:
            gradients = torch.autograd.grad(
                theirs, self.read, allow_unused=True, materialize_grads=True
            )
            (logps, entropy), gradients = (
                [x.detach()[self.scored] for x in of] for of in (self.read, gradients)
            )
            ours = self.objective.token_losses(logps, entropy, rows, self.batch)[1:3]
            for name, mine, want, floor in zip(
                ("log_probs", "entropy"), ours, gradients, (terms, 0.0), strict=True
            ):
                mine = torch.zeros_like(want) if mine is None else mine.expand_as(want)
                what = f"the gradient with respect to the {name}"
                trial.alike(LOSS, what, [mine], [want], 1e-3, floor / max(want.numel(), 1))


def _fp32_cast(head: Any) -> Any:
    """The forward that TRL's cast_lm_head_to_fp32 put on a head; None where it did not."""
    cast = vars(head).get("forward")
    return cast if getattr(cast, "__module__", "") == "trl.trainer.grpo_trainer" else None


# ---- the sets that the sampler kept: from the generation to the rows that are scored and trained

#: The extra field of a rollout_func: of each completion a list of ids for each token that was
#: generated.
FIELD = "sampling_mask"
#: Under this name the sets travel in TRL's batch of completions, int32 [B, T, K] padded with -1:
#: TRL shuffles and splits tensors.
KEY = "kept_ids"


class Replay:
    """Keeps the record of a generation until its completions are scored, and puts it into TRL's
    batch.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.ours = {"_generate": self._generate, "_generate_and_score_completions": self._complete}
        self._theirs = {name: getattr(trainer, name) for name in self.ours}
        self._record: Any = None  # lists of ids, and of each completion which tokens they are of

    def kept(self, scored: Tensor) -> TokenSets | None:
        """The sets of a generation's tokens that are `scored`, bool [B, T], in their order; None
        where it is over.
        """
        return None if self._record is None else self._sets(scored.shape[1])[scored]

    def _generate(self, prompts: list[Any], *more: Any, **options: Any) -> Any:
        from trl.generation import vllm_generation

        seen: list[list[Any]] = []
        theirs = vllm_generation.extract_logprobs

        def extract(outputs: Any) -> Any:
            seen.append(
                [getattr(output, FIELD, None) for request in outputs for output in request.outputs]
            )
            return theirs(outputs)

        with replaced_inside(vllm_generation, extract_logprobs=extract):
            result = self._theirs["_generate"](prompts, *more, **options)
        completions = result[1]
        environment = result[2]
        extra = result[5]
        record = extra.pop(FIELD, None)
        if record is None and len(seen) == 1 and None not in seen[0]:
            record = [mask.token_ids for mask in seen[0]]
        if record is None:
            raise RuntimeError(
                f"replay=True, but the completions came without their sets: return {FIELD!r} from"
                " rollout_func, a list of ids for each generated token, or let vLLM run in this"
                " process (vllm_mode='colocate') with return_sampling_mask and a top_k, and"
                " without tools."
            )
        self._record = (
            [*record],
            [[1] * len(ids) for ids in completions] if environment is None else environment,
        )
        return result

    def _sets(self, tokens: int) -> TokenSets:
        """Those of each completion, padded to so many tokens."""
        record, own = self._record
        generated = torch.zeros(len(own), tokens, dtype=torch.bool)
        for row, is_generated in zip(generated, own, strict=True):
            row[: len(is_generated)] = torch.as_tensor(is_generated) != 0
        return TokenSets.from_lists(record, generated=generated).to(self.trainer.accelerator.device)

    def _complete(self, inputs: list[Any], *more: Any, **options: Any) -> dict[str, Any]:
        try:
            output = self._theirs["_generate_and_score_completions"](inputs, *more, **options)
            batch, tokens = output["completion_ids"].shape
            output[KEY] = self._sets(tokens).padded().view(batch, tokens, -1)
        finally:
            self._record = None
        return output


# ---- the fused LM head that every TRL trainer is built on

#: Arguments of TRL's function of the head that every version has.
NEEDED = ("weight", "bias", "targets", "temperature")
#: TRL's names of outputs -> the statistic of `linear_logprobs(also=)` from which they are computed.
FUSED_OUTPUTS = {"entropy": None, "log_sum_sq_probs": "sum_squares", "is_top1": "top_id"}


def fused_lm_head(**how: bool) -> Slots:
    """Replace TRL's function of its fused head by `linear_logprobs`, in all trainers of the
    process. The returned `Slots` restores it, by `undo()` or as a context manager, and its `counts`
    tell which calls were "fused", and which ran in TRL and why.

        with fused_lm_head() as slot:
            trainer.train()
        print(slot.counts)          # Counter({'fused': 120})

    TRL looks its function up in a module global, which cannot be replaced for a single trainer.
    Masks, label shifts, gathers, PEFT, images and mixtures of experts are handled above it and
    remain TRL's. There are two exceptions. First, for a head that FSDP2 shards the gradient is
    averaged over the ranks; in calls left to TRL each rank keeps its own, see `average_gathered`.
    Second, on a CPU TRL also passes padding and prompts to its function, to keep the shapes of its
    tiles. While it is replaced, TRL passes only the rows that it needs, as it does on a GPU. TRL
    1.14 has the function too, with log-probs and entropy alone: there trainers call it with
    use_liger_kernel=True.

    how   strict and any_version of `Slots`.
    Raises RuntimeError for a TRL whose function has other arguments, if the function is replaced
    already, and in the first step if that comparison fails.
    """
    from trl.trainer import utils

    slots = Slots(ADAPTER, **how)
    _, ours = function_of_head(log_probs, log_probs_and_entropy, log_probs_and_statistics)
    slots.bind(ours, "trl.trainer.utils._ChunkedLogProbFunction", attribute="apply")
    if hasattr(utils, "_use_triton"):  # from 1.16 on
        slots.put(utils, "_use_triton", rows_with_a_label)
    return slots


def rows_with_a_label(device: torch.device) -> bool:
    """TRL's forward asks this whether to pass these rows alone.

    Its kernels use another name for it.
    """
    return True


def function_of_head(*ours: Any) -> tuple[Any, Any]:
    """(TRL's function of its head, the one of ours that has its results).

    Raises RuntimeError if there is none among `ours`.
    """
    import trl
    from trl.trainer import utils

    theirs = getattr(utils, SLOT, None)
    known = getattr(theirs, "theirs", theirs)  # of what is ours already
    given = [p.name for p in parameters_of(known) or ()]
    function: Any = log_probs
    if (
        "outputs" not in given
    ):  # TRL 1.14 has two results; a version that chooses the chunks itself has four
        function = log_probs_and_entropy if "chunk_size" in given else log_probs_and_statistics
    if function in ours and {*NEEDED} <= {*given}:
        return known, function
    taken = inspect.signature(function).parameters
    raise RuntimeError(
        f"trl is {trl.__version__}, where trl.trainer.utils.{SLOT} is {known!r} and takes"
        f" ({', '.join(given)}), but ours takes ({', '.join(taken)}): another package has taken the"
        f" slot (undo that), or install TRL {ADAPTER.tested[-1]}. With an older one and"
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
    """(log-probs, entropy, log of the sum of squared probabilities, None, whether the target is the
    largest logit), fp32 and bool [N], of hidden [N, H], weight [V, H], bias [V] and targets [N]:
    what `apply` of TRL's autograd function gives, with None for what `outputs` does not ask for. A
    row whose target is -100 gives 0.

    temperature, final_logit_softcapping, logit_scale   as in `LogitTransform`.
    outputs      what TRL asks for besides the log-probs: "entropy", "log_sum_sq_probs", "is_top1";
                 "mean_logits" is left to TRL.
    sampling_mask   [N, K], ids padded with -1: the log-prob of a row is over these ids and its
                    target. All other outputs are over the vocabulary.
    chunk_size   not needed.
    """
    others = sorted(set(outputs) - {"log_probs", *FUSED_OUTPUTS})
    if others:
        raise NotCovered(f"{', '.join(others)} asked for")
    covered(weight, scales=(logit_scale,))
    plain(hidden, weight)
    average_gathered(weight, bias)
    also = tuple(
        statistic for output, statistic in FUSED_OUTPUTS.items() if statistic and output in outputs
    )
    ids = targets.clamp(min=0)
    head = Head(
        weight,
        bias,
        LogitTransform(float(temperature), final_logit_softcapping, float(logit_scale)),
    )
    if sampling_mask is None:
        found = log_probs_of(hidden, ids, head=head, entropy="entropy" in outputs, also=also)
        statistics = found.also
    else:
        sets = TokenSets.from_padded(sampling_mask)
        found = log_probs_of(
            hidden,
            ids,
            head=head,
            entropy="entropy" in outputs,
            kept=sets,
            entropy_over="vocabulary",
        )
        with torch.no_grad():  # of the vocabulary too, and they have no gradient
            statistics = log_probs_of(hidden, ids, head=head, also=also).also if also else {}
    squares = statistics.get("sum_squares")
    top = statistics.get("top_id")
    counted = targets >= 0
    log_squares = None if squares is None else squares.detach().log()
    shown = [None if x is None else torch.where(counted, x, 0.0) for x in (*found, log_squares)]
    return *shown, None, None if top is None else (top == targets) & counted


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
    """What `apply` gives in TRL 1.14: the first two results of `log_probs`, with its arguments."""
    given = (
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        final_logit_softcapping,
        logit_scale,
    )
    return log_probs(*given, outputs=("entropy",))[:2]


def log_probs_and_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor | None, ...]:
    """What `apply` gives in a TRL that chooses the size of its chunks itself: log-probs, entropy,
    log of the sum of squared probabilities and whether the target is the largest logit, as in
    `log_probs`.
    """
    found = log_probs(
        hidden,
        weight,
        bias,
        targets,
        temperature,
        None,
        final_logit_softcapping,
        logit_scale,
        tuple(FUSED_OUTPUTS),
    )
    return *found[:3], found[4]


def covered(*weights: Tensor, scales: tuple[float, ...]) -> None:
    """Raise NotCovered for heads and scales that have to be left to TRL."""
    if torch.is_grad_enabled() and any(hasattr(weight, "ds_id") for weight in weights):
        raise NotCovered("a head under DeepSpeed ZeRO-3 is gathered for TRL's own backward only")
    if 0 in scales:
        raise NotCovered("logit_scale is 0")


def gathered(parameter: Any) -> Any:
    """The full tensor of a parameter that FSDP2 shards; a plain parameter, or None, is returned as
    it is. Its gradient is averaged over the ranks, as FSDP does for all other parameters, and
    scattered back.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh
    whole = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)  # summed over ranks
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


def average_gathered(*parameters: Tensor | None) -> None:
    """A parameter may come from TRL's plain `full_tensor()`, whose backward expects the same
    gradient on all ranks: from its own gradient each rank would keep the part for its shard. So the
    gradient is averaged over the ranks here.

    This holds for calls of our function only: calls that run in TRL (counted "TRL: ...") keep TRL's
    gradient.
    """

    def average(gradient: Tensor, mesh: Any) -> Tensor:
        gradient = gradient / mesh.size()
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(gradient, group=mesh.get_group(dim))
        return gradient

    for whole in parameters:
        made = getattr(whole, "grad_fn", None)
        spec = getattr(made, "dtensor_spec", None)
        if (
            whole is not None
            and spec is not None
            and getattr(made, "grad_placements", None) is None
        ):
            whole.register_hook(functools.partial(average, mesh=spec.mesh))


# ---- the distillation loss


def fused_divergence(**how: bool) -> Slots:
    """Replace TRL's function of its distillation loss by `linear_grpo_loss`: four matrix products
    where TRL's has six, and eight for the jsd. The returned `Slots` restores it, by `undo()` or as
    a context manager, and its `counts` tell which calls were "fused", and which ran in TRL and why.

        with fused_divergence() as slot:
            DistillationTrainer(...).train()

    It is replaced for all trainers of the process. beta, the temperature of both models, scale and
    softcap of each model and the denominator have the same effect as in TRL. Unlike in TRL, a logit
    of -inf does not give NaN, and fp32 tensors under fp16 autocast on a CPU are multiplied as they
    are: fp16 products are no faster there, and lose digits.

    how   strict and any_version of `Slots`.
    Raises RuntimeError in the first step if that comparison fails.
    """
    return DISTILLATION.bind(divergence_loss, **how)


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
    """(loss, sum of the student's entropies, number of tokens), 0-d, of hidden states [B, K, H]
    that predict the completions.

    completion_mask      [B, K], not 0 where a token counts.
    beta                 0: KL(teacher, student). 1: KL(student, teacher). In between: the jsd, with
                         the teacher's share beta.
    num_items_in_batch   the divisor of the sum over tokens; None: the number of tokens of this
                         batch.
    *_lm_head_weight, *_lm_head_bias   of the student's and of the teacher's head
    *_logit_scale, *_final_logit_softcapping, temperature   see `LogitTransform`
    """
    plain(student_hidden_states, teacher_hidden_states)
    covered(
        student_lm_head_weight,
        teacher_lm_head_weight,
        scales=(student_logit_scale, teacher_logit_scale),
    )
    mask = completion_mask != 0
    out = linear_grpo_loss(
        student_hidden_states.reshape(*completion_mask.shape, -1), Head(gathered(student_lm_head_weight), gathered(student_lm_head_bias)), teaching(mask, mask),
        Objective.preset("distillation", kl=divergence_of(beta)),
        transform=LogitTransform(temperature, student_final_logit_softcapping, student_logit_scale),
        reference=(
            teacher_hidden_states.reshape(*completion_mask.shape, -1),
            Head(
                gathered(teacher_lm_head_weight), gathered(teacher_lm_head_bias),
                LogitTransform(temperature, teacher_final_logit_softcapping, teacher_logit_scale),
            ),
        ),
        normalizer=num_items_in_batch,
    )  # fmt: skip
    return out.loss, out.entropy.sum(), mask.sum()
