"""The loss of a language model in one call (`loss_from_model`), and a head that computes log-probs
and losses in its forward (`FusedLMHead`), so that hooks on the head run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .architectures import language_model
from .batch import TokenBatch, shift_targets
from .checks import (
    INTEGRAL,
    MATMUL_DTYPES,
    describe,
    refuse_where,
    require_tensor,
    values_are_checked,
)
from .logprobs import linear_logprobs
from .loss_checks import check_batch_and_objective
from .losses import LossOutput, linear_grpo_loss
from .objective import Denominators, Objective
from .options import Head, Options, refuse_keywords
from .transform import LogitTransform, as_transform

__all__ = ["FusedLMHead", "HeadLogprobs", "HeadLoss", "loss_from_model"]


def loss_from_model(
    model: Any,
    input_ids: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    temperature: float | Tensor = 1.0,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    grad_scale: float | Tensor = 1.0,
    reference: Any = None,
    options: Options | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **inputs: Any,
) -> LossOutput:
    """Compute `linear_grpo_loss` of a causal language model of transformers, from its hidden states
    and head.

        targets, mask = shift_targets(ids, mask=completion_mask)  # of grpo_kernels.batch
        batch = TokenBatch(targets, advantages, mask=mask, old_logps=old_logps)
        objective = Objective.preset("dapo")
        out = loss_from_model(
            model, ids, batch, objective, attention_mask=attention, normalizer=total_tokens
        )
        out.loss.backward()

    model        the language model, or PEFT's wrapper of it. The function calls its base model, and
                 multiplies by the head's weight. LoRA in the body, gradient checkpointing, tied
                 embeddings and autocast work as in the model's forward. accelerate applies its
                 autocast to that forward only: use accelerator.autocast() here.
    input_ids    int64 [B, T], or [1, N] (also [N]) of packed sequences
    batch        Its targets are the next tokens: either the shape of input_ids, as `shift_targets`
                 makes them, or [B, K], the last K tokens of input_ids. Trained targets are compared
                 with input_ids: a difference raises ValueError, on a GPU an asynchronous assertion.
                 With `rows` targets have any shape and are not compared, see docs/token_sets.md.
    temperature  divides the logits: a number or a tensor, see `LogitTransform`
    transform    used instead of `LogitTransform.of(model, temperature=temperature)`, which does not
                 know every model
    reference    a causal language model with the same vocabulary, which runs on the same inputs
                 without gradient; or a reference as in `linear_grpo_loss`
    normalizer, grad_scale, options  as in `linear_grpo_loss`
    model_kwargs  arguments that the forward of the base model accepts as **kwargs
    inputs       named arguments of the forward of the base model: attention_mask, position_ids
                 (needed for packed sequences), pixel_values

    A router's auxiliary loss is not included. Raises TypeError for a keyword that neither the base
    model nor this function names, and ValueError for a wrong argument. Also raises ValueError if a
    call of the base model would skip something: an adapter, a hook or a patch on the head or the
    model, prompt tuning, an encoder, or a wrapper whose forward must be called (DDP, FSDP,
    torch.compile).
    """
    check_batch_and_objective(batch, objective)
    if transform is not None and (isinstance(temperature, Tensor) or temperature != 1.0):
        raise ValueError(
            "temperature and transform are both given: put the temperature into the transform."
        )
    as_transform(transform)
    _check_alignment(input_ids, batch)
    model_kwargs = {} if model_kwargs is None else model_kwargs
    if not isinstance(model_kwargs, dict):
        raise ValueError(
            f"model_kwargs is a {type(model_kwargs).__name__}: pass a dictionary of arguments of"
            " the base model."
        )
    for name in ("labels", "logits_to_keep", "inputs_embeds", "return_dict"):
        if name in inputs or name in model_kwargs:
            raise ValueError(
                f"{name} is given, but it is not used here: leave it out. Targets and mask are"
                " in the batch."
            )
    hidden, head = _hidden_and_head(
        model, temperature, transform, input_ids, batch, inputs, model_kwargs
    )
    if isinstance(reference, nn.Module):
        # Both use the same temperature. The reference may have another softcap and scale.
        if transform is not None:
            temperature = transform.temperature
        with torch.no_grad():
            reference = _hidden_and_head(
                reference, temperature, None, input_ids, batch, inputs, model_kwargs
            )
    return linear_grpo_loss(
        hidden,
        head,
        batch,
        objective,
        normalizer=normalizer,
        grad_scale=grad_scale,
        reference=reference,
        options=options,
    )


#: Keywords of `loss_from_model`, which an error suggests in place of a misspelt one.
_KEYWORDS = [
    p.name
    for p in inspect.signature(loss_from_model).parameters.values()
    if p.kind is p.KEYWORD_ONLY
]


# ---- the model


def _hidden_and_head(
    model: Any,
    temperature: float | Tensor,
    transform: LogitTransform | None,
    input_ids: Tensor,
    batch: TokenBatch,
    inputs: dict[str, Any],
    model_kwargs: dict[str, Any],
) -> tuple[Tensor, Head]:
    """Run the base model. Return (hidden states at the positions that predict the targets, head).

    temperature    divides the logits, if `transform` is None
    transform      temperature, softcap and scale of the logits. None: the temperature, and the
                   softcap and scale of a known model.
    input_ids      int64 [B, T], [1, N] or [N]
    inputs         named arguments of the base model, see `loss_from_model`
    model_kwargs   arguments that the base model accepts as **kwargs

    The hidden states are float [B, T, H], or fewer if there are fewer targets, or [N, H] for packed
    targets.

    Raises ValueError if the model has a wrapper, hook or patch that this call would skip.
    """
    _check_wrappers(model)
    model = language_model(model)
    if transform is None:
        transform = LogitTransform.of(model, temperature=temperature)
    head = _head(model)
    base = _base_model(model)
    parameter_names = [
        p.name
        for p in inspect.signature(base.forward).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    remedy = f"What a {type(base).__name__} takes without naming it goes into model_kwargs={{...}}."
    refuse_keywords(loss_from_model, inputs, [*_KEYWORDS, *parameter_names], remedy)
    if "use_cache" in parameter_names and "use_cache" not in model_kwargs:
        # A cache of keys and values would take memory, and nothing reads it. The caller may pass
        # another value.
        inputs = {"use_cache": False, **inputs}
    batch_of_ids = input_ids if input_ids.dim() > 1 else input_ids[None]
    hidden = base(input_ids=batch_of_ids, **inputs, **model_kwargs)[0]
    if not torch.is_autocast_enabled(hidden.device.type):
        # A head in fp32 is used in fp32.
        hidden = hidden.to(torch.promote_types(hidden.dtype, head.weight.dtype))
    bias = getattr(head, "bias", None)
    return _predicting_rows(hidden, input_ids, batch), Head(head.weight, bias, transform)


def _check_wrappers(model: Any) -> None:
    """Raise ValueError if a wrapper around the model does something that is skipped here.

    The base model is called directly. PEFT's prompt tuning, DDP, FSDP1 and torch.compile act in the
    forward of their wrapper.
    """
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"model has a {type(config).__name__}, whose prompt is put in front by PEFT's own"
            " forward: compute its logits, and call grpo_loss."
        )
    if hasattr(model, "get_base_model"):  # PEFT, whose adapters act in the base model
        for wrapper in (model, model.base_model):
            _check_untouched("model", wrapper)
        return
    # DDP and FSDP1 have the model as `module`, torch.compile as `_orig_mod`.
    for name in ("module", "_orig_mod"):
        if isinstance(getattr(model, name, None), nn.Module):
            raise ValueError(
                f"model is a {type(model).__name__}, whose forward must be called: make"
                f" loss_from_model(model.{name}, ...) the forward of a module of yours and wrap (or"
                " compile) that, or install a FusedLMHead (grpo_kernels.model)."
            )


def _check_untouched(what: str, module: nn.Module) -> None:
    """Raise ValueError if the module has hooks or another forward, which would not run here.

    The caller computes what the module does without calling it.

    what     "model" or "head", for the error
    module   the model or its head
    """
    if forward_of(module) is not type(module).forward:
        raise ValueError(
            f"{what} is a {type(module).__name__} whose forward was replaced on the instance, and"
            f" would not run here: take it off (del {what}.forward), or call the base model"
            " yourself and linear_grpo_loss, or compute its logits and call grpo_loss."
        )
    if any(getattr(module, hooks) for hooks in CALL_HOOKS):
        raise ValueError(
            f"the {what}, a {type(module).__name__}, has hooks, which would not fire here: remove"
            " them, or install a FusedLMHead (grpo_kernels.model), whose calls they see."
        )


def _head(model: Any) -> Any:
    """Return the output embeddings of a language model, whose weight and bias make the logits.

    Raises ValueError if the model has none, if they do more than a product with the weight, or if
    the weight is sharded.
    """
    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"model is a {type(model).__name__}, not a language model of transformers: call"
            " linear_grpo_loss."
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"model is a {type(model).__name__}, an encoder and a decoder: compute its logits, and"
            " call grpo_loss."
        )
    _check_untouched("model", model)
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"model is a {type(model).__name__}, which has no head: pass the causal language model."
        )
    head = plain_head(model)
    for module in head.modules():  # a head in PEFT's modules_to_save has two modules
        _check_untouched("head", module)
    if any(not p.is_replicate() for p in getattr(head.weight, "placements", ())):
        raise ValueError(
            "the weight of the head is a DTensor in shards: install a FusedLMHead"
            " (grpo_kernels.model) before fully_shard, or take the hidden states and call"
            " linear_grpo_loss with Options(shard=VocabShard.of(weight)) where ranks share the"
            " vocabulary."
        )
    return head


def _base_model(model: Any) -> Any:
    """Return the module that computes the hidden states, the input of the head.

    model   a causal language model of transformers

    Raises ValueError if it is not known.
    """
    base = getattr(model, "base_model", None)
    if base is model:  # transformers returns the model itself if it has no attribute of that name
        base = getattr(model, "model", None)
    if not isinstance(base, nn.Module):
        raise ValueError(
            f"the base model of {type(model).__name__} is not known: call it yourself, and"
            " linear_grpo_loss."
        )
    return base


# ---- which row predicts what


def _predicting_rows(hidden: Tensor, input_ids: Tensor, batch: TokenBatch) -> Tensor:
    """Return the hidden states at the positions that predict the targets.

    hidden      float [B, T, H], of all positions; B is 1 for packed sequences
    input_ids   int64 [B, T], [1, N] or [N]

    The result has the shape of targets, and H. It is all of `hidden` if the batch chooses the rows
    itself (`batch.rows`).

    Raises ValueError if the base model changes the number of positions.
    """
    expected_shape = input_ids.shape if input_ids.dim() > 1 else (1, *input_ids.shape)
    if hidden.shape[:-1] != expected_shape:
        raise ValueError(
            f"the base model made hidden states {list(hidden.shape)} of input_ids"
            f" {list(input_ids.shape)}: their positions must be the same. Call it yourself, and"
            " linear_grpo_loss."
        )
    if batch.rows is not None:
        return hidden
    if batch.targets.dim() == 1:  # packed sequences, a batch of one for the model
        hidden = hidden[0]
    return hidden[..., _predicting_positions(input_ids, batch), :]


def _predicting_positions(input_ids: Tensor, batch: TokenBatch) -> slice:
    """Return the positions of input_ids whose next tokens are the targets.

    input_ids   int64 [B, T], or packed [N]
    batch       its targets are the next tokens of all positions, or of the last ones

    If there are as many targets as positions (T), these are all positions. If the targets are the
    last K tokens, these are the K positions before them, T - K - 1 to T - 2.
    """
    total = input_ids.shape[-1]
    count = batch.targets.shape[-1]
    if count == total:
        return slice(None)
    return slice(total - 1 - count, total - 1)


def _check_alignment(input_ids: Tensor, batch: TokenBatch) -> None:
    """Raise ValueError unless the targets of trained tokens are the next tokens of input_ids.

    On a GPU the tokens are compared by an asynchronous assertion, unless `values_are_checked`.

    input_ids   what the caller passed: int64 [B, T], [1, N] or [N]
    batch       has the targets and their mask
    """
    require_tensor("input_ids", input_ids, INTEGRAL, "an int64 tensor of token ids, [B, T]")
    if batch.context_group is not None:
        raise ValueError(
            "batch has a context_group, but a rank's input_ids do not show what follows its last"
            " token: call the base model yourself, and linear_grpo_loss."
        )
    if batch.rows is not None:  # the caller says which row predicts each target
        return
    ids = input_ids
    # A model takes packed sequences [1, N] as a batch of one.
    if batch.targets.dim() == 1 and input_ids.dim() == 2 and input_ids.shape[0] == 1:
        ids = input_ids[0]
    _check_target_shape(input_ids, ids, batch)
    if torch.compiler.is_compiling() or batch.targets.numel() == 0:
        return
    _check_next_tokens(ids, batch)


def _check_target_shape(input_ids: Tensor, ids: Tensor, batch: TokenBatch) -> None:
    """Raise ValueError unless there is a target for each position, or for each of the last ones.

    input_ids   what the caller passed, for messages
    batch       has the targets
    ids         the same ids with the number of dimensions that targets have
    """
    targets = batch.targets
    if (
        ids.dim() != targets.dim()
        or ids.shape[:-1] != targets.shape[:-1]
        or targets.shape[-1] > ids.shape[-1]
    ):
        raise ValueError(
            f"batch.targets has shape {list(targets.shape)} and input_ids {list(input_ids.shape)}:"
            " targets are of the same shape, as grpo_kernels.batch.shift_targets makes them, or"
            " the last tokens of input_ids."
        )
    has_all_positions = targets.shape == ids.shape
    if batch.cu_seqlens is not None and not has_all_positions:
        raise ValueError(
            f"batch.targets has {len(targets)} packed tokens and input_ids {len(ids)}: pass one for"
            " each, see shift_targets."
        )
    if has_all_positions and batch.mask is None:
        raise ValueError(
            "batch.mask is None, but the last token of input_ids predicts nothing: pass the mask of"
            " shift_targets."
        )


def _check_next_tokens(ids: Tensor, batch: TokenBatch) -> None:
    """Raise ValueError if a trained target is not the token that follows in the sequence.

    A model predicts token t + 1 at position t, so the target of position t must be ids[t + 1].
    Targets that are not shifted are the usual mistake.

    ids     int64 [B, T], or [N] for packed sequences, like batch.targets
    batch   has a target for each position of ids, or only for the last K tokens: targets [B, K],
            or [N]

    On a GPU the host would have to wait for the result. There an asynchronous assertion of the
    device reports it, unless GRPO_KERNELS_CHECK=1 is set (`values_are_checked`).
    """
    targets = batch.targets
    # has_next is False at the last token of a sequence, which predicts nothing.
    next_ids, has_next = shift_targets(ids, cu_seqlens=batch.cu_seqlens)
    # The positions whose next tokens are the targets: all, or the K positions before the last.
    positions = _predicting_positions(ids, batch)
    next_ids = next_ids[..., positions].to(targets.device)
    has_next = has_next[..., positions].to(targets.device)
    is_wrong = (targets != next_ids) | ~has_next
    if batch.mask is not None:  # targets of masked tokens may be anything
        is_wrong = is_wrong & batch.mask
    if not values_are_checked(targets):
        torch._assert_async(
            ~is_wrong.any(),
            "loss_from_model: batch.targets are not the tokens that follow in input_ids",
        )
        return
    # The message begins with the first wrong target: "batch.targets[0, 3]=17 is not ...".
    rest_of_message = (
        " is not the token that follows in input_ids (at the end of a sequence nothing follows):"
        " row t of a model predicts token t + 1. grpo_kernels.batch.shift_targets makes targets and"
        " mask; mask what is not trained on."
    )
    refuse_where(is_wrong, "batch.targets", targets, rest_of_message)


# ---- the head as a module


class HeadLogprobs(NamedTuple):
    """The result of `FusedLMHead` for log-probs.

    logps     fp32, the shape of targets, in nats; 0 in masked tokens
    entropy   the same; None unless entropy= was passed
    """

    logps: Tensor
    entropy: Tensor | None

    def __repr__(self) -> str:
        return describe(self)


class HeadLoss(NamedTuple):
    """The result of `FusedLMHead` for a loss: a tuple, so that DDP and FSDP find its tensors.

    loss, logps, entropy   as in `LossOutput`
    metrics                as in `LossOutput` with metrics=True, else None
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    metrics: dict[str, Tensor] | None

    def __repr__(self) -> str:
        return describe(self)


class _NotCast:
    """Holds an argument of a call of the head, so that hooks of the head do not cast it.

    FSDP's mixed precision casts all floating-point tensors among the arguments to 16 bits, in
    dataclasses and lists too. Old log-probs in 16 bits make ratios wrong by percents.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def wrap(cls, x: Any) -> Any:
        """Return x in a holder, a tensor of integers unchanged."""
        is_integer_tensor = isinstance(x, Tensor) and not x.is_floating_point()
        return x if is_integer_tensor else cls(x)

    @classmethod
    def unwrap(cls, x: Any) -> Any:
        """Return the argument that `wrap` was called with."""
        return x.value if isinstance(x, cls) else x


class FusedLMHead(nn.Linear):
    """A linear layer with the parameters of `head`, which also computes log-probs and losses.

        head = FusedLMHead.install(model)  # or FusedLMHead(linear) for a module of yours

        head(hidden)  # logits, as before
        head(hidden, targets, entropy=True)  # HeadLogprobs(logps, entropy)
        head(hidden, batch, objective, normalizer=tokens)  # HeadLoss(loss, logps, entropy, metrics)

    FSDP, ZeRO-3 and offloading gather a module's weight during its forward only. Code that reads
    the attribute `lm_head.weight` elsewhere gets a shard. With FSDP2's `full_tensor()` it gets a
    gradient that is not averaged over the ranks. Neither raises an error. A call of the head runs
    the hooks that gather the weight. This also works in the forward of a model that DDP or FSDP
    wraps as a whole.

    Parameters are the same objects and keep their names, so optimizers, tied embeddings and
    checkpoints are not affected. Install the head before fully_shard, DDP or deepspeed.initialize,
    and before PEFT wraps the head.

    head       a plain nn.Linear [V, H]. Raises ValueError for any other head (LoRA, quantised,
               sharded, hooked, installed twice).
    transform  softcap and scale that the model applies to the logits of its head, for log-probs and
               losses. `head(hidden)` does not apply it. None: there is none. `install` uses
               LogitTransform.of(model). The temperature is an argument of the calls.
    """

    def __init__(self, head: nn.Linear, *, transform: LogitTransform | None = None) -> None:
        """Take over the parameters of a plain linear head.

        head        an nn.Linear [V, H]
        transform   softcap and scale of the logits, for log-probs and losses; None: there is none
        """
        _check_plain(head)
        nn.Module.__init__(self)
        # The same parameters, and attributes that libraries have set on the head.
        for name, x in vars(head).items():
            self.__dict__[name] = x.copy() if isinstance(x, dict) else x
        self.transform = as_transform(transform)

    def __call__(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Call the hooks and `forward`, with arguments that hooks do not cast.

        hidden      [..., H]. It may be cast, as the input of any linear layer.
        arguments, keywords
                    of `forward`. Mixed precision of FSDP would cast their tensors to 16 bits, in
                    which log-probs are too coarse. Each is passed in a holder, `_NotCast`.
        """
        wrapped_arguments = [_NotCast.wrap(x) for x in arguments]
        wrapped_keywords = {name: _NotCast.wrap(x) for name, x in keywords.items()}
        out = super().__call__(hidden, *wrapped_arguments, **wrapped_keywords)
        if isinstance(out, HeadLogprobs) and out.logps.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"the head's log-probs were cast to {out.logps.dtype} on their way out: give the"
                " group of the head FSDP2's MixedPrecisionPolicy with output_dtype=None"
                " (accelerate sets one): log-probs of 16 bits make wrong ratios."
            )
        return out

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | TokenBatch | None = None,
        objective: Objective | None = None,
        *,
        temperature: float | Tensor = 1.0,
        metrics: bool = False,
        **others: Any,
    ) -> Tensor | HeadLogprobs | tuple[Any, ...] | HeadLoss:
        """Return logits, `HeadLogprobs` or `HeadLoss`, depending on the arguments.

        hidden       [..., H]. Without targets the result is logits [..., V].
        targets      int64, the leading shape of hidden: returns HeadLogprobs. A TokenBatch together
                     with an `objective`: returns HeadLoss.
        temperature  a number or a tensor, see `LogitTransform`, for log-probs and losses
        metrics      whether the result of a loss has the metrics of `LossOutput`
        others       arguments of `linear_logprobs` (mask, entropy, options, ...) or
                     `linear_grpo_loss` (normalizer, reference, ...). weight, bias and transform
                     raise ValueError, because the head has them. With also= or at= the result is
                     (logps, entropy, dict).
        """
        # `__call__` has put the arguments into holders, so that hooks of FSDP do not cast them.
        targets = _NotCast.unwrap(targets)
        objective = _NotCast.unwrap(objective)
        temperature = _NotCast.unwrap(temperature)
        metrics = _NotCast.unwrap(metrics)
        others = {name: _NotCast.unwrap(x) for name, x in others.items()}
        for name in ("weight", "bias", "transform"):
            if name in others:
                raise ValueError(
                    f"{name} is an option of this call, but the head has its own: leave it out"
                    " (softcap and scale are given to FusedLMHead(head, transform=...), the"
                    " temperature to the call)."
                )
        if targets is None:
            if objective is not None or others or metrics:
                raise ValueError(
                    "targets is None, so the head gives logits: objective and options want targets"
                    " or a TokenBatch."
                )
            return super().forward(hidden)
        if isinstance(objective, TokenBatch):  # the two may have been passed in the wrong order
            check_batch_and_objective(targets, objective)
        if isinstance(targets, TokenBatch) != (objective is not None):
            raise ValueError(
                f"targets is a {type(targets).__name__} and objective a {type(objective).__name__}:"
                " pass a TokenBatch with an Objective for a loss, or ids alone for log-probs."
            )
        head = Head(self.weight, self.bias, replace(self.transform, temperature=temperature))
        if not isinstance(targets, TokenBatch):
            if metrics:
                raise ValueError(
                    "metrics=True: only a loss has them, pass a TokenBatch and an Objective."
                )
            return self._logprobs(hidden, head, targets, others)
        assert objective is not None
        self._check_not_cast(targets, others.get("normalizer"))
        out = linear_grpo_loss(hidden, head, targets, objective, **others)
        return HeadLoss(out.loss, out.logps, out.entropy, dict(out.metrics) if metrics else None)

    @staticmethod
    def _logprobs(
        hidden: Tensor, head: Head, targets: Tensor, options: dict[str, Any]
    ) -> HeadLogprobs | tuple[Any, ...]:
        """Return `HeadLogprobs`, or (logps, entropy, dict) if `linear_logprobs` has more results.

        hidden    [..., H]
        head      weight, bias and logit transform
        targets   int64, the leading shape of hidden
        options   keyword arguments of `linear_logprobs`
        """
        results = linear_logprobs(hidden, head, targets, **options)
        # Copies, not views: FSDP2 loses its hook on a view when the caller writes to it in
        # place, and warns of it.
        logps = results.logps.clone()
        entropy = None if results.entropy is None else results.entropy.clone()
        # `also` has further statistics, if the options ask for them. Hooks look for tensors in
        # plain tuples and dicts.
        if results.also:
            return logps, entropy, {name: x.clone() for name, x in results.also.items()}
        return HeadLogprobs(logps, entropy)

    def _check_not_cast(self, batch: TokenBatch, normalizer: Any) -> None:
        """Raise ValueError if FSDP has cast a tensor of the batch, or the normalizer, to 16 bits.

        Mixed precision of a wrapper around the whole model does this before the head is called.

        batch        the batch of a loss
        normalizer   its denominator: a number, a tensor or a tuple of them
        """
        # FSDP sets this attribute on the modules that it manages.
        if not getattr(self, "_is_fsdp_managed_module", False):
            return
        tensors = [(f.name, getattr(batch, f.name)) for f in fields(batch)]
        normalizers = normalizer if isinstance(normalizer, tuple) else (normalizer,)
        tensors += [("normalizer", x) for x in normalizers]
        for name, x in tensors:
            if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{name} is {x.dtype}: FSDP's mixed precision casts the arguments of a wrapped"
                    " model's forward, and log-probs of 16 bits make wrong ratios. Give the root"
                    " MixedPrecisionPolicy(..., cast_forward_inputs=False), and pass float32;"
                    " token ids need no cast."
                )

    def plain(self) -> nn.Linear:
        """Return an nn.Linear with the same parameters."""
        with torch.device("meta"):  # allocates no parameters: they are replaced below
            linear = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        linear.weight = self.weight
        linear.register_parameter("bias", self.bias)
        linear.training = self.training
        return linear

    @classmethod
    def install(cls, model: Any, *, transform: LogitTransform | None = None) -> FusedLMHead:
        """Replace the head of a Hugging Face model by a FusedLMHead, and return it.

        transform   softcap and scale of the model's logits. None: `LogitTransform.of(model)`

        Raises ValueError if the head is not a plain linear layer, or if `LogitTransform.of` does
        not know the model. The model is then unchanged.
        """
        if transform is None:
            transform = LogitTransform.of(model)
        head = cls(model.get_output_embeddings(), transform=transform)
        model.set_output_embeddings(head)
        return head

    @staticmethod
    def undo(model: Any) -> nn.Linear:
        """Replace the FusedLMHead of a model by a plain nn.Linear with the same parameters.

        Raises ValueError if the head is not a FusedLMHead.
        """
        head = model.get_output_embeddings()
        if not isinstance(head, FusedLMHead):
            raise ValueError(
                f"the head of the model is a {type(head).__name__}, not a FusedLMHead: there is"
                " nothing to undo."
            )
        linear = head.plain()
        model.set_output_embeddings(linear)
        return linear


def _refuse(head: Any, reason: str, remedy: str) -> NoReturn:
    """Raise ValueError that names the class of the head, the reason and the remedy."""
    raise ValueError(f"head is a {type(head).__module__}.{type(head).__name__}, {reason}: {remedy}")


#: Modules whose wrappers of a forward change only dtypes and devices: accelerate's, and the
#: autocast inside them.
_HARMLESS_WRAPPERS = ("accelerate.hooks", "accelerate.utils.operations", "torch.amp.autocast_mode")


def forward_of(module: nn.Module) -> Any:
    """Return the function that computes the result of a call of the module.

    This is the forward of its class, or a function that replaces it on the instance. Wrappers by
    accelerate are removed: autocast, the cast of outputs to fp32, and its own hooks, which move
    weights. They are not removed if the module has a hook of accelerate's kind that another library
    defines, because it may do anything.
    """
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # a SequentialHook has several
    has_foreign_hook = any(
        type(one_hook).__module__ != "accelerate.hooks"
        for one_hook in hooks
        if one_hook is not None
    )
    class_forward = type(module).forward
    forward = vars(module).get("forward", class_forward)
    while True:
        forward = getattr(forward, "__func__", forward)  # the function of a bound method
        defined_in = _defining_module(forward)
        is_wrapper = (
            forward is not class_forward
            and defined_in in _HARMLESS_WRAPPERS
            and hasattr(forward, "__wrapped__")
        )
        runs_foreign_hook = has_foreign_hook and defined_in == "accelerate.hooks"
        if not is_wrapper or runs_foreign_hook:
            return forward
        forward = forward.__wrapped__


def _defining_module(forward: Any) -> str:
    """Return the name of the Python module that defines a function, or the class of a callable."""
    function = getattr(forward, "func", forward)  # the function of a functools.partial
    # The attribute __module__ does not serve: functools.wraps copies it from the wrapped function.
    namespace = getattr(function, "__globals__", {})
    return namespace.get("__name__", type(function).__module__)


def check_linear(head: Any, known_forward: Any = None) -> None:
    """Raise ValueError unless a call of the module computes x W^T + b and nothing else.

    W and b are its own weight and bias. A FusedLMHead passes, and so does a head that FSDP2 or
    ZeRO-3 has sharded or that accelerate has hooked.

    head            the output embeddings of a language model
    known_forward   a function on the instance that may replace the forward, because the caller
                    knows that it computes the same; None: no such function
    """
    if hasattr(head, "token_adapter"):
        remedy = "without trainable_token_indices, or with modules_to_save for the embeddings."
        _refuse(head, "PEFT's trainable tokens", remedy)
    if hasattr(head, "base_layer"):  # a layer of PEFT such as LoRA
        remedy = (
            "take it out of the adapter's target_modules, or merge the adapter (merge_and_unload)."
        )
        _refuse(head, "which carries an adapter", remedy)
    linear_forwards = (nn.Linear.forward, FusedLMHead.forward)
    is_linear = isinstance(head, nn.Linear) and type(head).forward in linear_forwards
    if not is_linear or forward_of(head) not in (*linear_forwards, known_forward):
        remedy = "its logits may be more than hidden @ weight.T."
        _refuse(head, "whose forward is not torch.nn.Linear.forward", remedy)
    has_children = any(True for _ in head.children())
    has_other_parameters = bool(set(head._parameters) - {"weight", "bias"})
    if has_children or has_other_parameters or head._buffers:
        reason = "with parameters or modules besides weight and bias"
        _refuse(head, reason, "a parametrised layer has to be made plain first.")
    weight_type = type(head.weight.data)
    is_dtensor = hasattr(head.weight, "placements")
    if weight_type is not torch.Tensor and not is_dtensor:
        reason = f"whose weight is a {weight_type.__module__}.{weight_type.__name__}"
        _refuse(head, reason, "a quantised weight has to be made plain first.")


def plain_head(model: Any, known_forward: Callable[[Any], Any] | None = None) -> Any:
    """Return the output embeddings of a language model, whose weight and bias make the logits.

    model           a causal language model of transformers
    known_forward   the caller may have replaced the forward of the head by a function of its own.
                    known_forward(head) returns this function, so that it is not taken for a
                    forward that does more. None: any replaced forward is refused.

    Raises ValueError if a call of the head does more than multiply with its weight and add its
    bias.
    """
    head = model.get_output_embeddings()
    # PEFT's modules_to_save wraps the head. The attribute `weight` of the wrapper is the weight of
    # the copy that is trained. The original module tells what a call computes.
    inner = head.original_module if hasattr(head, "modules_to_save") else head
    check_linear(inner, None if known_forward is None else known_forward(inner))
    require_tensor(
        "the weight of the head",
        head.weight,
        MATMUL_DTYPES,
        "a model whose head is float32, bfloat16 or float16",
    )
    return head


#: Attributes with the hooks of a module: those of its calls, and all, with those of checkpoints.
CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS = (
    *CALL_HOOKS, "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _check_plain(head: Any) -> None:
    """Raise ValueError unless a FusedLMHead with the same parameters can replace the head.

    The head must be plain (see `check_linear`), without hooks, not sharded, and no FusedLMHead.
    """
    if isinstance(head, FusedLMHead):
        _refuse(head, "installed already", "use it as it is.")
    check_linear(head)
    if "forward" in vars(head) or any(getattr(head, hooks) for hooks in HOOKS):
        remedy = "install the fused head first, and register them on it."
        _refuse(head, "with hooks, which would be lost", remedy)
    if hasattr(head.weight, "placements"):
        remedy = (
            "install before fully_shard. A head that a tensor-parallel plan has cut:"
            " linear_grpo_loss(..., options=Options(shard=VocabShard.of(weight)))."
        )
        _refuse(head, "whose weight is a DTensor", remedy)
    # ZeRO-3 leaves an empty weight, FSDP1 a view that is not a parameter.
    if head.weight.dim() != 2 or "weight" not in head._parameters:
        reason = f"whose weight has shape {list(head.weight.shape)}"
        _refuse(head, reason, "install before ZeRO-3 or FSDP shards it.")
