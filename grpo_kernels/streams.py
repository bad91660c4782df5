"""What a caller passed as a stream of rows: logits, or hidden states with a head. The policy's and a reference's alike are checked
here, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from .checks import require
from .layout import logit_rows, refuse_overlap, whole_rows
from .rows import backends
from .rows.backends import Backend
from .rows.hidden import Hidden
from .rows.parallel import VocabShard, check_shard, on_shard, refuse_managed
from .rows.partials import RowTransform
from .rows.selection import Sparse
from .rows.stream import Logits
from .rows.weight_gradient import check_weight_grad
from .specs import Head, Options

Tensor = torch.Tensor


def is_traced() -> bool:
    """Whether torch.compile, torch.export or a transform of torch.func is tracing this call."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def leaves_the_graph(sets: Any, weight_grad: Any, **groups: Any) -> bool:
    """Whether a traced call has to break the graph, because the operators take no sets of ids, no memory to add to and no process
    groups. ValueError under torch.func for the latter two."""
    given = [name for name, value in groups.items() if value is not None]
    if torch.compiler.is_compiling():
        return bool(given or sets is not None or weight_grad is not None)
    if given:
        raise ValueError(f"{given[0]} is given under torch.func, which does not support process groups: use torch.autograd.")
    require(weight_grad is None, "weight_grad", weight_grad, "torch.func gives gradients as results: leave it out.")
    return False


def outside(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a public function eagerly, at a graph break; the error of fullgraph=True names this function."""
    return torch.compiler.disable(function)(*arguments, **options)


# The attribute that torch.compiler.disable sets. Used as a decorator, it would import the whole compiler with this package.
outside._torchdynamo_disable = True  # type: ignore[attr-defined]


def _picked(options: Options, device: torch.device, shard: VocabShard | None) -> Backend:
    """The backend of a stream. In a graph it is picked when the graph runs."""
    if torch.compiler.is_compiling():
        return cast(Backend, None)
    return on_shard(backends.pick(options.backend, device, options.strict), shard)


def logits_stream(
    logits: Tensor, shape: torch.Size, device: torch.device, transform: RowTransform, options: Options, *,
    shard: VocabShard | None = None, inplace: bool = False, read: dict[str, Any] | None = None, ref_logits: Any = None,
) -> Logits:  # fmt: skip
    """Check logits, or this rank's part of them, and return them as a stream. `read`: what a call with inplace=True reads beside
    them, by name. Raises ValueError with the remedy."""
    if shard is not None:
        check_shard(shard)
        logits = shard.local("logits", logits, -1)
    rows = logit_rows(logits, shape, device, inplace, shard is None)
    if inplace and not torch.compiler.is_compiling():  # in a graph nothing is written in place
        remedy = "the gradient would be written over it. Pass a copy, or inplace=False."
        refuse_overlap("inplace=True, but logits", logits, remedy, read or {}, {"ref_logits": ref_logits})
    return Logits((rows,), transform, _picked(options, device, shard), shard, inplace)


def hidden_stream(
    hidden: Tensor, head: Head, shape: torch.Size, device: torch.device, transform: RowTransform, options: Options,
    read: dict[str, Any] | None = None,
) -> Hidden:  # fmt: skip
    """Check hidden states and head, and return them as a stream of flat rows and local tensors, each row in one piece. `read`: what
    a call with `head.grad` reads beside them, by name. Raises ValueError with the remedy."""
    weight, bias, shard, weight_grad = head.weight, head.bias, head.shard, head.grad
    if shard is not None:
        check_shard(shard)
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is None and name == "bias":
            continue
        if isinstance(x, torch.nn.Module):
            raise ValueError(
                f"{name} is the module {type(x).__name__}: pass its tensor, {name}=lm_head.{name if name != 'hidden' else 'weight'}."
            )
        if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} is {got}: pass a float32, bfloat16 or float16 tensor.")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, but targets is on {device}: move one of them.")
    hidden = _local("hidden", hidden, partial=shard is not None and not shard.reduce_hidden)
    if shard is None:
        weight, bias = _local("weight", weight), None if bias is None else _local("bias", bias)
    else:
        weight, bias = shard.local("weight", weight, 0), None if bias is None else shard.local("bias", bias, 0)
    if weight.dim() != 2 or (weight.numel() == 0 and (shard is None or weight.shape[1] == 0)):
        raise ValueError(
            f"weight has shape {list(weight.shape)}, not [V, H]: it looks sharded. DeepSpeed ZeRO-3: call inside "
            "deepspeed.zero.GatheredParameters([lm_head.weight]), and keep it gathered until after the backward. FSDP: call "
            "inside the forward of the module that owns the head, or pass weight.full_tensor()."
        )
    if hidden.dim() != len(shape) + 1 or hidden.shape[:-1] != shape:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, but targets has {list(shape)}: hidden must be targets' shape plus the "
            "hidden size, row i predicting targets[i] (for a model's output usually hidden[:, :-1] against ids[:, 1:])."
        )
    vocab, width = weight.shape
    if hidden.shape[-1] != width:
        hint = " hidden looks like logits (for those use grpo_loss or token_logprobs), or weight is transposed (pass weight.T)."
        hint = hint if hidden.shape[-1] == vocab else ""
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}: the last dimensions must agree, "
            f"[..., H] and [V, H].{hint}"
        )
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias has shape {list(bias.shape)}, but weight has {list(weight.shape)}: it must be [{vocab}].")
    into = None
    if weight_grad is not None:
        into = check_weight_grad(weight_grad, weight, {"hidden": hidden, "weight": weight, "bias": bias, **(read or {})})
    bias = None if bias is None else bias.contiguous()
    tensors = (whole_rows(hidden.reshape(-1, width)), whole_rows(weight), bias)
    return Hidden(tensors, transform, _picked(options, device, shard), shard, compute_dtype(hidden), into)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """What products may run in: the autocast dtype if autocast is on, else that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _local(name: str, x: Tensor, partial: bool = False) -> Tensor:
    """The local tensor of a replicated DTensor; a plain tensor as it is. `partial`: its gradient is this rank's share."""
    placements = getattr(x, "placements", None)
    if placements is None:
        return x
    refuse_managed(name, x)
    if not all(p.is_replicate() for p in placements):
        remedy = "pass the rows of this rank as a plain tensor, hidden.to_local()."
        if name != "hidden":
            remedy = (
                f"pass {name}.full_tensor(grad_placements=[Partial()]) and divide its gradient by the number of ranks. If it is "
                "the vocabulary-sharded head of a tensor-parallel group, whose ranks have the same rows, pass "
                "shard=VocabShard.of(weight)."
            )
        raise ValueError(f"{name} is a DTensor with placements {placements}, not replicated: {remedy}")
    from torch.distributed.tensor import Partial

    return x.to_local(grad_placements=[Partial()] * len(placements) if partial else None)  # type: ignore[attr-defined]


def draws(options: Options, stream: Hidden) -> Sparse | None:
    """How columns are drawn for the gradient of a head; None where there is no gradient, or it is dense."""
    needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in stream.tensors)
    in_func = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if options.sparse is None or not (needed or in_func):
        return None
    options.sparse.check(stream.hidden.device)
    return options.sparse
