"""The loss of a language model in one call, which finds hidden states, head, bias, softcap and
scale; and a head that computes log-probs and losses in its own forward, so that hooks on it fire.
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
    given = (input_ids, batch, inputs, model_kwargs)
    hidden, head = _projected(model, temperature if transform is None else transform, *given)

    def second(reference: Any) -> Any:
        if not isinstance(reference, nn.Module):
            return reference
        with torch.no_grad():
            return _projected(
                reference, temperature if transform is None else transform.temperature, *given
            )

    reference = second(reference)
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


#: Its own keywords, which a misspelt one may mean.
_OWN = [
    p.name
    for p in inspect.signature(loss_from_model).parameters.values()
    if p.kind is p.KEYWORD_ONLY
]


# ---- the model


def _projected(
    model: Any,
    transform: Any,
    input_ids: Tensor,
    batch: TokenBatch,
    inputs: dict[str, Any],
    model_kwargs: dict[str, Any],
) -> tuple[Tensor, Head]:
    """(the hidden states that predict the targets, the head that they go through). `transform`:
    what follows it, or the temperature alone, where the model is one that is known.
    """
    _check_wrappers(model)
    model = language_model(model)
    if not isinstance(transform, LogitTransform):
        transform = LogitTransform.of(model, temperature=transform)
    head, base = _head(model), _base_model(model)
    named = [
        p.name
        for p in inspect.signature(base.forward).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    remedy = f"What a {type(base).__name__} takes without naming it goes into model_kwargs={{...}}."
    refuse_keywords(loss_from_model, inputs, [*_OWN, *named], remedy)
    if "use_cache" in named and "use_cache" not in model_kwargs:
        inputs = {"use_cache": False, **inputs}
    hidden = base(
        input_ids=input_ids if input_ids.dim() > 1 else input_ids[None], **inputs, **model_kwargs
    )[0]
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(
            torch.promote_types(hidden.dtype, head.weight.dtype)
        )  # a head kept in fp32 is used in fp32
    return _rows(hidden, input_ids, batch), Head(
        head.weight, getattr(head, "bias", None), transform
    )


def _check_wrappers(model: Any) -> None:
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"model has a {type(config).__name__}, whose prompt is put in front by PEFT's own"
            " forward: compute its logits, and call grpo_loss."
        )
    if hasattr(model, "get_base_model"):
        for wrapper in (model, model.base_model):
            _check_untouched("model", wrapper)
        return
    for name in ("module", "_orig_mod"):
        if isinstance(getattr(model, name, None), nn.Module):
            raise ValueError(
                f"model is a {type(model).__name__}, whose forward must be called: make"
                f" loss_from_model(model.{name}, ...) the forward of a module of yours and wrap (or"
                " compile) that, or install a FusedLMHead (grpo_kernels.model)."
            )


def _check_untouched(what: str, module: nn.Module) -> None:
    """Raise ValueError where somebody has put something into a call of the module, which is not
    called here.
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
    for module in head.modules():  # PEFT's modules_to_save holds two
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
    """The module that makes the hidden states that the head is applied to."""
    base = getattr(model, "base_model", None)
    base = getattr(model, "model", None) if base is model else base
    if not isinstance(base, nn.Module):
        raise ValueError(
            f"the base model of {type(model).__name__} is not known: call it yourself, and"
            " linear_grpo_loss."
        )
    return base


# ---- which row predicts what


def _rows(hidden: Tensor, input_ids: Tensor, batch: TokenBatch) -> Tensor:
    """The rows of hidden states [B, T, H] that predict the targets."""
    if hidden.shape[:-1] != (input_ids.shape if input_ids.dim() > 1 else (1, *input_ids.shape)):
        raise ValueError(
            f"the base model made hidden states {list(hidden.shape)} of input_ids"
            f" {list(input_ids.shape)}: their positions must be the same. Call it yourself, and"
            " linear_grpo_loss."
        )
    if batch.rows is not None:
        return hidden
    hidden = hidden[0] if batch.targets.dim() == 1 else hidden
    return hidden[..., _places(input_ids, batch), :]


def _places(input_ids: Tensor, batch: TokenBatch) -> slice:
    """Which tokens of input_ids the targets follow: all, or those before the last ones."""
    total, count = input_ids.shape[-1], batch.targets.shape[-1]
    return slice(None) if count == total else slice(total - 1 - count, total - 1)


def _check_alignment(input_ids: Tensor, batch: TokenBatch) -> None:
    """Raise ValueError unless batch.targets are the tokens that follow in input_ids, where the mask
    is set.
    """
    require_tensor("input_ids", input_ids, INTEGRAL, "an int64 tensor of token ids, [B, T]")
    if batch.context_group is not None:
        raise ValueError(
            "batch has a context_group, but a rank's input_ids do not show what follows its last"
            " token: call the base model yourself, and linear_grpo_loss."
        )
    if batch.rows is not None:
        return
    targets, mask = batch.targets, batch.mask
    # A model takes packed sequences [1, N] as a batch of one.
    ids = (
        input_ids[0]
        if targets.dim() == 1 and input_ids.dim() == 2 and input_ids.shape[0] == 1
        else input_ids
    )
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
    whole = targets.shape == ids.shape
    if batch.cu_seqlens is not None and not whole:
        raise ValueError(
            f"batch.targets has {len(targets)} packed tokens and input_ids {len(ids)}: pass one for"
            " each, see shift_targets."
        )
    if whole and mask is None:
        raise ValueError(
            "batch.mask is None, but the last token of input_ids predicts nothing: pass the mask of"
            " shift_targets."
        )
    if torch.compiler.is_compiling() or targets.numel() == 0:
        return
    following, known = (
        x[..., _places(ids, batch)].to(targets.device)
        for x in shift_targets(ids, cu_seqlens=batch.cu_seqlens)
    )
    wrong = (targets != following) | ~known
    wrong = wrong if mask is None else wrong & mask
    if not values_are_checked(targets):
        torch._assert_async(
            ~wrong.any(),
            "loss_from_model: batch.targets are not the tokens that follow in input_ids",
        )
        return
    remedy = (
        " is not the token that follows in input_ids (at the end of a sequence nothing follows):"
        " row t of a model predicts token t + 1. grpo_kernels.batch.shift_targets makes targets and"
        " mask; mask what is not trained on."
    )
    refuse_where(wrong, "batch.targets", targets, remedy)


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


class _AsGiven:
    """Hides an argument, unless it is a tensor of ids, from the hooks of the head. FSDP's mixed
    precision casts all floats among the arguments, in dataclasses and lists too, and an old
    log-prob in 16 bits makes the ratio wrong by percents.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def wrap(cls, x: Any) -> Any:
        return x if isinstance(x, Tensor) and not x.is_floating_point() else cls(x)

    @classmethod
    def unwrap(cls, x: Any) -> Any:
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
        _check_plain(head)
        nn.Module.__init__(self)
        # Parameters, and the attributes that libraries have set on it.
        self.__dict__.update(
            {name: x.copy() if isinstance(x, dict) else x for name, x in vars(head).items()}
        )
        self.transform = as_transform(transform)

    def __call__(self, hidden: Tensor, *arguments: Any, **named: Any) -> Any:
        wrapped = {name: _AsGiven.wrap(x) for name, x in named.items()}
        out = super().__call__(hidden, *map(_AsGiven.wrap, arguments), **wrapped)
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
        targets, objective, temperature = map(_AsGiven.unwrap, (targets, objective, temperature))
        others = {name: _AsGiven.unwrap(x) for name, x in others.items()}
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
        if isinstance(objective, TokenBatch):
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
            found = linear_logprobs(hidden, head, targets, **others)
            # Copies, not views: FSDP2 loses its hook on a view when the caller writes to it in
            # place, and warns of it.
            logps, entropy = (
                found.logps.clone(),
                None if found.entropy is None else found.entropy.clone(),
            )
            if found.also:  # hooks look for tensors in plain tuples and dicts
                return logps, entropy, {name: x.clone() for name, x in found.also.items()}
            return HeadLogprobs(logps, entropy)
        assert objective is not None
        self._check_not_cast(targets, others.get("normalizer"))
        out = linear_grpo_loss(hidden, head, targets, objective, **others)
        return HeadLoss(out.loss, out.logps, out.entropy, dict(out.metrics) if metrics else None)

    def _check_not_cast(self, batch: TokenBatch, normalizer: Any) -> None:
        """Raise ValueError if FSDP has cast the tensors of the batch to 16 bits before they reached
        the head.
        """
        if not getattr(self, "_is_fsdp_managed_module", False):
            return
        given = [(f.name, getattr(batch, f.name)) for f in fields(batch)]
        given += [
            ("normalizer", x)
            for x in (normalizer if isinstance(normalizer, tuple) else (normalizer,))
        ]
        for name, x in given:
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
        old = model.get_output_embeddings()
        transform = LogitTransform.of(model) if transform is None else transform
        head = cls(old, transform=transform)
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
    raise ValueError(f"head is a {type(head).__module__}.{type(head).__name__}, {reason}: {remedy}")


#: Where the wrappers are made that change nothing but dtypes and places: accelerate's, and the
#: autocast that it puts in them.
_PASSES_ON = ("accelerate.hooks", "accelerate.utils.operations", "torch.amp.autocast_mode")


def forward_of(module: nn.Module) -> Any:
    """The function that makes what a call of the module returns: its class's forward, or what was
    put in its place on the instance.

    Accelerate's wrappers are passed through: autocast, the cast of outputs to fp32, and its own
    hooks that move weights.
    """
    hook = getattr(module, "_hf_hook", None)
    foreign = any(
        type(one).__module__ != "accelerate.hooks"
        for one in getattr(hook, "hooks", (hook,))
        if one is not None
    )
    forward = vars(module).get("forward", type(module).forward)
    while True:
        forward = getattr(forward, "__func__", forward)
        inner = getattr(forward, "func", forward)  # of a functools.partial
        made_in = getattr(inner, "__globals__", {}).get("__name__", type(inner).__module__)
        plain = (
            forward is type(module).forward
            or made_in not in _PASSES_ON
            or not hasattr(forward, "__wrapped__")
        )
        if plain or (foreign and made_in == "accelerate.hooks"):
            return forward
        forward = forward.__wrapped__


def check_linear(head: Any, known: Any = None) -> None:
    """Raise ValueError unless a call of the module is x W^T + b with its own weight and bias, and
    nothing else.

    A FusedLMHead is such a module, and so is a head that FSDP2 or ZeRO-3 has sharded or accelerate
    has hooked.
    known   a forward that the caller knows to be the same thing, where the instance has been given
            one.
    """
    if hasattr(head, "token_adapter"):
        _refuse(
            head,
            "PEFT's trainable tokens",
            "without trainable_token_indices, or with modules_to_save for the embeddings.",
        )
    if hasattr(head, "base_layer"):
        remedy = (
            "take it out of the adapter's target_modules, or merge the adapter (merge_and_unload)."
        )
        _refuse(head, "which carries an adapter", remedy)
    plain = (nn.Linear.forward, FusedLMHead.forward)
    if (
        not isinstance(head, nn.Linear)
        or type(head).forward not in plain
        or forward_of(head) not in (*plain, known)
    ):
        _refuse(
            head,
            "whose forward is not torch.nn.Linear.forward",
            "its logits may be more than hidden @ weight.T.",
        )
    if [*head.children()] or set(head._parameters) - {"weight", "bias"} or head._buffers:
        _refuse(
            head,
            "with parameters or modules besides weight and bias",
            "a parametrised layer has to be made plain first.",
        )
    kind = type(head.weight.data)
    if kind is not torch.Tensor and not hasattr(head.weight, "placements"):
        _refuse(
            head,
            f"whose weight is a {kind.__module__}.{kind.__name__}",
            "a quantised weight has to be made plain first.",
        )


def plain_head(model: Any, known: Callable[[Any], Any] = lambda head: None) -> Any:
    """The output embeddings of a language model, whose weight (and bias, if it has one) make the
    logits. Raises ValueError where a call of them is more than a product with these.

    known   of a head, the forward on its instance that the caller knows to be the same thing, see
            `check_linear`.
    """
    head = model.get_output_embeddings()
    # PEFT's modules_to_save: a copy that is trained, whose weight it hands out.
    inner = head.original_module if hasattr(head, "modules_to_save") else head
    check_linear(inner, known(inner))
    weight = head.weight
    require_tensor(
        "the weight of the head",
        weight,
        MATMUL_DTYPES,
        "a model whose head is float32, bfloat16 or float16",
    )
    return head


#: Hooks of a module that would be lost with it: those of its calls, and those of its checkpoints.
CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS = (
    *CALL_HOOKS, "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _check_plain(head: Any) -> None:
    """Raise ValueError unless the head can be replaced by one that computes x W^T + b from its
    parameters, all here.
    """
    if isinstance(head, FusedLMHead):
        _refuse(head, "installed already", "use it as it is.")
    check_linear(head)
    if "forward" in vars(head) or any(getattr(head, hooks) for hooks in HOOKS):
        _refuse(
            head,
            "with hooks, which would be lost",
            "install the fused head first, and register them on it.",
        )
    if hasattr(head.weight, "placements"):
        _refuse(
            head, "whose weight is a DTensor",
            "install before fully_shard. A head that a tensor-parallel plan has cut: linear_grpo_loss(..., options=Options(shard=VocabShard.of(weight))).",
        )  # fmt: skip
    if head.weight.dim() != 2 or "weight" not in head._parameters:  # FSDP1 leaves a view of its own
        _refuse(
            head,
            f"whose weight has shape {list(head.weight.shape)}",
            "install before ZeRO-3 or FSDP shards it.",
        )
