"""The loss of a language model in one call, which finds base model, hidden states, head, bias, softcap and scale."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from .architectures import language_model
from .batch import TokenBatch
from .checks import refuse_unknown
from .head import CALL_HOOKS, forward_of, plain_head
from .layout import values_are_checked
from .losses import LossOutput, check_specs, linear_grpo_loss
from .objective import Denominators, Objective
from .specs import Head, LogitTransform, Options

Tensor = torch.Tensor

__all__ = ["loss_from_model"]


def loss_from_model(
    model: Any,
    input_ids: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    temperature: float | Tensor = 1.0,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    skip_inactive: bool = False,
    backend: str = "auto",
    strict: bool = False,
    reference: Any = None,
    weight_grad: Tensor | None = None,
    options: Options | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **inputs: Any,
) -> LossOutput:
    """The loss of a causal language model of transformers: `linear_grpo_loss` on its hidden states and its head.

        targets, mask = shift_targets(ids, mask=completion_mask)      # grpo_kernels.batch
        batch = TokenBatch(targets, advantages, mask=mask, old_logps=old_logps)
        out = loss_from_model(model, ids, batch, Objective.preset("dapo"), attention_mask=attention, normalizer=total_tokens)
        out.loss.backward()

    model        the language model, or PEFT's wrapper of it. What runs is its base model, so that LoRA in the body, gradient
                 checkpointing, tied embeddings and autocast work as in its own forward (accelerate puts its autocast around that
                 one: use accelerator.autocast()); the head is a product with its weight.
    input_ids    int64 [B, T], or [1, N] (also [N]) of packed sequences.
    batch        its targets are the tokens that follow: the shape of input_ids, as `shift_targets` makes them (row t predicts
                 input_ids[t + 1], the last row nothing: it is masked), or [B, K], the last K tokens of input_ids. Packed: [N].
                 This is checked where the mask is set: on a CPU with a ValueError, on a GPU with an asynchronous assertion,
                 which stops the program without a host sync. old_logps and the others have the shape of the targets.
    temperature  divides the logits: a number or a tensor, see `LogitTransform`.
    transform    in place of `LogitTransform.of(model, temperature=temperature)`, for a model that it does not know.
    reference    the reference or teacher, a causal language model of the same vocabulary: it runs on the same inputs, without
                 gradient, under its own softcap and scale and the same temperature. Or what `linear_grpo_loss` takes; in a list of
                 pairs (teacher, weight), too. Needed with kl=Exact(...); else in place of batch.ref_logps.
    inputs       what else the base model's forward names: attention_mask, position_ids (packed sequences need their own),
                 pixel_values. Raises TypeError for a keyword that neither it nor this function names.
    model_kwargs  what the base model gets beside them, as it is: for what its forward takes without naming it.
    backend      as in `grpo_loss`, like all that is not here: normalizer, skip_inactive, strict. weight_grad, options:
                 `linear_grpo_loss`.

    A router's auxiliary loss is not included. Raises ValueError naming the argument that is wrong, and where calling the base
    model would skip something: an adapter, a hook, a patch or quantised numbers on the head, a hook or another forward on
    the model, prompt tuning, an encoder, a wrapper whose forward must be called (DDP, FSDP, torch.compile)."""
    check_specs(batch, objective)
    _check_wrappers(model)
    inner = language_model(model)
    if transform is None:
        transform = LogitTransform.of(inner, temperature=temperature)
    elif isinstance(temperature, Tensor) or temperature != 1.0:
        raise ValueError("temperature and transform are both given: put the temperature into the transform.")
    _check_alignment(input_ids, batch)
    model_kwargs = {} if model_kwargs is None else model_kwargs
    if not isinstance(model_kwargs, dict):
        raise ValueError(f"model_kwargs is a {type(model_kwargs).__name__}: pass a dictionary of arguments of the base model.")
    for name in ("labels", "logits_to_keep", "inputs_embeds", "return_dict"):
        if name in inputs or name in model_kwargs:
            raise ValueError(
                f"{name} is given, but it is not used here: leave it out. Targets and mask are those of the batch."
            )
    hidden, weight, bias = _projected(inner, input_ids, batch, inputs, model_kwargs)

    def second(reference: Any) -> Any:
        if not isinstance(reference, nn.Module):
            return reference
        _check_wrappers(reference)
        inner = language_model(reference)
        with torch.no_grad():
            ref_hidden, ref_weight, ref_bias = _projected(inner, input_ids, batch, inputs, model_kwargs)
        return ref_hidden, Head(ref_weight.detach(), ref_bias, LogitTransform.of(inner, temperature=transform.temperature))

    if isinstance(reference, list):  # pairs (teacher, weight)
        reference = [(second(x[0]), *x[1:]) if isinstance(x, tuple) and x else x for x in reference]
    reference = second(reference)
    return linear_grpo_loss(
        hidden, weight, batch, objective, bias=bias, transform=transform, normalizer=normalizer, reference=reference,
        skip_inactive=skip_inactive, backend=backend, strict=strict, weight_grad=weight_grad, options=options,
    )  # fmt: skip


#: Its own keywords, which a misspelt one may mean.
_OWN = [p.name for p in inspect.signature(loss_from_model).parameters.values() if p.kind is p.KEYWORD_ONLY]


# ---- the model


def _projected(
    model: Any, input_ids: Tensor, batch: TokenBatch, inputs: dict[str, Any], model_kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(the hidden states that predict the targets, weight and bias of the head that they go through)."""
    head, base = _head(model), _base_model(model)
    named = [
        p.name for p in inspect.signature(base.forward).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    remedy = f"What a {type(base).__name__} takes without naming it goes into model_kwargs={{...}}."
    refuse_unknown("loss_from_model", inputs, [*_OWN, *named], remedy)
    if "use_cache" in named and "use_cache" not in model_kwargs:
        inputs = {"use_cache": False, **inputs}
    hidden = base(input_ids=input_ids if input_ids.dim() > 1 else input_ids[None], **inputs, **model_kwargs)[0]
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.promote_types(hidden.dtype, head.weight.dtype))  # a head kept in fp32 is used in fp32
    return _rows(hidden, input_ids, batch), head.weight, getattr(head, "bias", None)


def _check_wrappers(model: Any) -> None:
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"model has a {type(config).__name__}, whose prompt is put in front by PEFT's own forward: compute its logits, and call "
            "grpo_loss."
        )
    if hasattr(model, "get_base_model"):
        for wrapper in (model, model.base_model):
            _check_untouched("model", wrapper)
        return
    for name in ("module", "_orig_mod"):
        if isinstance(getattr(model, name, None), nn.Module):
            raise ValueError(
                f"model is a {type(model).__name__}, whose forward must be called: make loss_from_model(model.{name}, ...) the "
                "forward of a module of yours and wrap (or compile) that, or install a FusedLMHead (grpo_kernels.head)."
            )


def _check_untouched(what: str, module: nn.Module) -> None:
    """Raise ValueError where somebody has put something into a call of the module, which is not called here."""
    if forward_of(module) is not type(module).forward:
        raise ValueError(
            f"{what} is a {type(module).__name__} whose forward was replaced on the instance, and would not run here: take it off (del "
            f"{what}.forward), or call the base model yourself and linear_grpo_loss, or compute its logits and call grpo_loss."
        )
    if any(getattr(module, hooks) for hooks in CALL_HOOKS):
        raise ValueError(
            f"the {what}, a {type(module).__name__}, has hooks, which would not fire here: remove them, or install a FusedLMHead "
            "(grpo_kernels.head), whose calls they see."
        )


def _head(model: Any) -> Any:
    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"model is a {type(model).__name__}, not a language model of transformers: call linear_grpo_loss.")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"model is a {type(model).__name__}, an encoder and a decoder: compute its logits, and call grpo_loss."
        )
    _check_untouched("model", model)
    if model.get_output_embeddings() is None:
        raise ValueError(f"model is a {type(model).__name__}, which has no head: pass the causal language model.")
    head = plain_head(model)
    for module in head.modules():  # PEFT's modules_to_save holds two
        _check_untouched("head", module)
    if any(not p.is_replicate() for p in getattr(head.weight, "placements", ())):
        raise ValueError(
            "the weight of the head is a DTensor in shards: install a FusedLMHead (grpo_kernels.head) before fully_shard, or take the "
            "hidden states and call linear_grpo_loss with shard=VocabShard.of(weight) where ranks share the vocabulary."
        )
    return head


def _base_model(model: Any) -> Any:
    """The module that makes the hidden states that the head is applied to."""
    base = getattr(model, "base_model", None)
    base = getattr(model, "model", None) if base is model else base
    if not isinstance(base, nn.Module):
        raise ValueError(f"the base model of {type(model).__name__} is not known: call it yourself, and linear_grpo_loss.")
    return base


# ---- which row predicts what


def _flat(input_ids: Tensor, batch: TokenBatch) -> bool:
    """Whether input_ids [1, N] are packed sequences of a batch [N]: a model takes them as a batch of one."""
    return batch.targets.dim() == 1 and input_ids.dim() == 2 and input_ids.shape[0] == 1


def _rows(hidden: Tensor, input_ids: Tensor, batch: TokenBatch) -> Tensor:
    """The rows of hidden states [B, T, H] that predict the targets."""
    if hidden.shape[:-1] != (input_ids.shape if input_ids.dim() > 1 else (1, *input_ids.shape)):
        raise ValueError(
            f"the base model made hidden states {list(hidden.shape)} of input_ids {list(input_ids.shape)}: their positions must be the "
            "same. Call it yourself, and linear_grpo_loss."
        )
    hidden = hidden[0] if batch.targets.dim() == 1 else hidden
    total, count = input_ids.shape[-1], batch.targets.shape[-1]
    return hidden if count == total else hidden[..., total - 1 - count : total - 1, :]


def _check_alignment(input_ids: Tensor, batch: TokenBatch) -> None:
    """Raise ValueError unless batch.targets are the tokens that follow in input_ids, where the mask is set."""
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids is {got}: pass an int64 tensor of token ids, [B, T].")
    if batch.context_group is not None:
        raise ValueError(
            "batch has a context_group, but a rank's input_ids do not show what follows its last token: call the base model "
            "yourself, and linear_grpo_loss."
        )
    targets, mask = batch.targets, batch.mask
    ids = input_ids[0] if _flat(input_ids, batch) else input_ids
    count, total = (x.shape[-1] if x.dim() else 0 for x in (targets, ids))
    if ids.shape[:-1] != targets.shape[:-1] or ids.dim() != targets.dim() or count > total:
        raise ValueError(
            f"batch.targets has shape {list(targets.shape)} and input_ids {list(input_ids.shape)}: targets are of the same shape, as "
            "grpo_kernels.batch.shift_targets makes them, or the last tokens of input_ids."
        )
    whole = count == total
    if batch.cu_seqlens is not None and not whole:
        raise ValueError(
            f"batch.targets has {count} packed tokens and input_ids {total}: pass one for each, see shift_targets."
        )
    if whole and mask is None:
        raise ValueError(
            "batch.mask is None, but the last token of input_ids predicts nothing: pass the mask of shift_targets."
        )
    if torch.compiler.is_compiling() or targets.numel() == 0:
        return
    following = ids.roll(-1, -1) if whole else ids[..., total - count :]
    wrong = targets != following.to(targets.device)
    if whole:  # the last row of a sequence has no next token
        wrong[..., -1:] = True
        if batch.cu_seqlens is not None:
            wrong[batch.cu_seqlens[1:].long() - 1] = True  # an empty first sequence gives -1: the last row, set already
    wrong = wrong if mask is None else wrong & mask
    if not values_are_checked(targets):
        torch._assert_async(~wrong.any(), "loss_from_model: batch.targets are not the tokens that follow in input_ids")
    elif wrong.any():
        at = wrong.nonzero()[0].tolist()
        last = at[-1] + 1 == total or (batch.cu_seqlens is not None and at[-1] + 1 in batch.cu_seqlens.tolist())
        there = "nothing follows" if whole and last else f"{int(following[tuple(at)])} follows"
        raise ValueError(
            f"batch.targets{at}={int(targets[tuple(at)])}, but there {there} in input_ids: row t of a model predicts token t + 1. "
            "grpo_kernels.batch.shift_targets makes targets and mask; mask what is not trained on."
        )
