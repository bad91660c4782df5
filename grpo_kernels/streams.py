"""What a caller passed as a stream of rows: logits, or hidden states with a head. The policy's and a reference's alike are checked
here, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from .checks import LARGEST, require, require_number
from .formulas.divergence import Exact
from .layout import logit_rows, overlaps_itself, per_token, plain, refuse_overlap, values_are_checked, whole_rows
from .rows import backends
from .rows.backends import Backend
from .rows.gradients import WeightMemory
from .rows.hidden import Hidden
from .rows.logits import Logits
from .rows.parallel import is_managed, on_shard, refuse_managed
from .rows.partials import RowTransform
from .rows.selection import Sparse
from .rows.stream import Known, Other, Seconds, Stream
from .specs import Head, LogitTransform, Options, as_transform, refuse_with_rows
from .token_sets import TokenSets, check_sets

Tensor = torch.Tensor


def is_traced() -> bool:
    """Whether torch.compile, torch.export or a transform of torch.func is tracing this call."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def leaves_the_graph(sets: Any, options: Options, context_group: Any = None) -> bool:
    """Whether a traced call has to break the graph, because the operators take no sets of ids, no memory to add to and no process
    groups. ValueError under torch.func for the latter two."""
    groups = {"shard": options.shard, "context_group": context_group}
    given = [name for name, value in groups.items() if value is not None]
    if torch.compiler.is_compiling():
        return bool(given or sets is not None or options.weight_grad is not None)
    if given:
        raise ValueError(f"{given[0]} is given under torch.func, which does not support process groups: use torch.autograd.")
    remedy = "torch.func gives gradients as results: leave it out."
    require(options.weight_grad is None, "weight_grad", options.weight_grad, remedy)
    return False


def outside(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a public function eagerly, at a graph break; the error of fullgraph=True names this function."""
    return torch.compiler.disable(function)(*arguments, **options)


# The attribute that torch.compiler.disable sets. Used as a decorator, it would import the whole compiler with this package.
outside._torchdynamo_disable = True  # type: ignore[attr-defined]


def _picked(options: Options, device: torch.device) -> Backend:
    """The backend of a stream. In a graph it is picked when the graph runs."""
    if torch.compiler.is_compiling():
        return cast(Backend, None)
    backend = backends.pick(options.backend, device, options.strict)
    return backend if options.shard is None else on_shard(backend, options.shard)


def logits_stream(
    logits: Tensor, shape: torch.Size, device: torch.device, transform: RowTransform, options: Options, *,
    inplace: bool = False, read: dict[str, Any] | None = None, ref_logits: Any = None,
) -> Logits:  # fmt: skip
    """Check logits, or this rank's part of them, and return them as a stream. `read`: what a call with inplace=True reads beside
    them, by name. Raises ValueError with the remedy."""
    shard = options.shard
    if shard is not None:
        logits = shard.local("logits", logits, -1)
    rows = logit_rows(logits, shape, device, inplace, shard is None)
    if inplace and not torch.compiler.is_compiling():  # in a graph nothing is written in place
        remedy = "the gradient would be written over it. Pass a copy, or inplace=False."
        refuse_overlap("inplace=True, but logits", logits, remedy, read or {}, {"ref_logits": ref_logits})
    return Logits((rows,), transform, _picked(options, device), shard, inplace)


def hidden_stream(
    hidden: Tensor, head: Head, shape: torch.Size, device: torch.device, transform: RowTransform, options: Options,
    read: dict[str, Any] | None = None,
) -> Hidden:  # fmt: skip
    """Check hidden states and head, and return them as a stream of flat rows and local tensors, each row in one piece. `read`: what
    a call with weight_grad reads beside them, by name. Raises ValueError with the remedy."""
    weight, bias, shard, weight_grad = head.weight, head.bias, options.shard, options.weight_grad
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is None and name == "bias":
            continue
        if isinstance(x, torch.nn.Module):
            tensor = "Head(lm_head.weight, lm_head.bias)" if getattr(x, "bias", None) is not None else "lm_head.weight"
            raise ValueError(f"{name} is the module {type(x).__name__}: pass its tensor, {tensor}.")
        if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            of = f", its {name}.last_hidden_state" if hasattr(x, "last_hidden_state") else ""
            raise ValueError(f"{name} is {got}: pass a float32, bfloat16 or float16 tensor{of}.")
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
    return Hidden(tensors, transform, _picked(options, device), shard, compute_dtype(hidden), into)


def check_weight_grad(weight_grad: Tensor, weight: Tensor, read: dict[str, Any]) -> WeightMemory:
    """Raise ValueError unless the gradient of `weight` can be added into `weight_grad`, in a call that reads `read`, by name."""
    if not isinstance(weight_grad, Tensor) or weight_grad.shape != weight.shape or weight_grad.device != weight.device:
        got = (
            f"{list(weight_grad.shape)} on {weight_grad.device}"
            if isinstance(weight_grad, Tensor)
            else type(weight_grad).__name__
        )
        raise ValueError(f"weight_grad is {got}: pass a tensor like weight, {list(weight.shape)} on {weight.device}.")
    if weight_grad.dtype not in (torch.float32, weight.dtype):
        raise ValueError(f"weight_grad has dtype {weight_grad.dtype}: pass float32, or {weight.dtype}, that of weight.")
    if weight_grad.requires_grad or weight_grad.stride(-1) != 1 or overlaps_itself(weight_grad):
        raise ValueError(
            "weight_grad must not require grad, have unit stride in its last dimension, and no two rows in one memory."
        )
    refuse_overlap("weight_grad", weight_grad, "the gradient would be added to it. Pass memory of its own.", read, {})
    if not weight.requires_grad:
        raise ValueError("weight_grad is given, but weight does not require grad: leave it out for a frozen head.")
    if hasattr(weight, "ds_id") or is_managed(weight):
        owner = "ZeRO-3" if hasattr(weight, "ds_id") else "FSDP"
        raise ValueError(
            f"weight_grad is given, but {owner} gathers this weight for a moment and reduces the gradient that autograd gives it, so "
            "that nobody would see weight_grad: leave it out, or keep the head out of what is sharded."
        )
    flagged = getattr(weight, "main_grad", None) is weight_grad and hasattr(weight, "grad_added_to_main_grad")
    return WeightMemory(weight_grad, weight if flagged else None)


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
                "Options(shard=VocabShard.of(weight))."
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


# ---- second streams: what `reference=` and `ref_logits=` may be, checked against the policy's rows


class Policy(NamedTuple):
    """The policy's rows, which a second stream has to match."""

    shape: torch.Size
    device: torch.device
    transform: LogitTransform
    mask: Tensor | None
    cu_seqlens: Tensor | None
    stream: Stream
    options: Options
    shared: bool = False  # whether a row may have several tokens


HOW = "(hidden, weight), (hidden, weight, bias), (hidden, Head(...))"
HOW_EXACT = f"{HOW}, TokenSets whose values are a teacher's log-probs, or a list of pairs (one of these, weight)"


def seconds_of(name: str, given: Any, exact: Exact, policy: Policy) -> Seconds:
    """The second streams of a divergence. `name` of the argument: "reference", from hidden states, or "ref_logits"."""
    one = _from_hidden if name == "reference" else _from_logits
    if not isinstance(given, list):
        if isinstance(given, TokenSets):
            return Seconds(known=(Known(_checked_sets(name, given, exact, policy)),))
        return Seconds((Other(one(given, exact, policy).plain(), exact.direction, exact.share),))
    require(len(given) > 0, name, given, "a list of teachers holds at least one pair (teacher, weight).")
    others, known = [], []
    for i, pair in enumerate(given):
        if not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair[0], list):
            raise ValueError(f"{name}[{i}] is {type(pair).__name__}: a list of teachers holds pairs (teacher, weight).")
        alone = seconds_of(name, pair[0], exact, policy)
        weight = _weight(f"{name}[{i}][1]", pair[1], policy)
        others += [replace(other, weight=weight) for other in alone.others]
        known += [teacher._replace(weight=weight) for teacher in alone.known]
    return Seconds(tuple(others), tuple(known))


def reference_stream(reference: Any, policy: Policy) -> Stream:
    """Hidden states and head of the reference as a stream, under the transform of its Head, else the policy's."""
    if not isinstance(reference, tuple) or len(reference) not in (2, 3):
        raise ValueError(f"reference is {type(reference).__name__}: pass {HOW}.")
    hidden, weight, *rest = reference
    if isinstance(weight, Head) and rest:
        raise ValueError("reference has a bias beside a Head: put it into the Head.")
    head = weight if isinstance(weight, Head) else Head(weight, *rest)
    options = policy.options if policy.options.weight_grad is None else replace(policy.options, weight_grad=None)
    transform = _for_rows(policy.transform if head.transform is None else as_transform(head.transform), policy)
    try:
        stream = hidden_stream(hidden, head, policy.shape, policy.device, transform, options)
    except ValueError as error:
        raise ValueError(f"reference: {error}") from error
    _check_vocab("reference", stream, policy)
    return stream


def _from_hidden(reference: Any, exact: Exact, policy: Policy) -> Stream:
    what = f"{exact} needs the whole distribution of a reference or teacher: pass {HOW_EXACT}."
    require(reference is not None, "reference", None, what)
    return reference_stream(reference, policy)


def _from_logits(ref_logits: Any, exact: Exact, policy: Policy) -> Stream:
    transform = policy.transform
    if isinstance(ref_logits, tuple) and len(ref_logits) == 2:
        ref_logits, transform = ref_logits[0], as_transform(ref_logits[1])
    if not isinstance(ref_logits, Tensor):
        got = "None" if ref_logits is None else f"a {type(ref_logits).__name__}"
        raise ValueError(
            f"ref_logits is {got}, but {exact} needs the whole distribution of a reference or teacher: pass its logits, "
            "(logits, LogitTransform(...)), TokenSets whose values are its log-probs, or a list of pairs (one of these, weight)."
        )
    of_rows = _for_rows(transform, policy)
    try:
        stream = logits_stream(ref_logits.detach(), policy.shape, policy.device, of_rows, policy.options)
    except ValueError as error:
        raise ValueError(f"ref_logits: {error}") from error
    _check_vocab("ref_logits", stream, policy)
    return stream


def _checked_sets(name: str, sets: TokenSets, exact: Exact, policy: Policy) -> TokenSets:
    if sets.values is None:
        raise ValueError(
            f"{name} is TokenSets without values: pass the teacher's log-probs of its ids, sets.with_values(logps)."
        )
    check_sets(name, sets, torch.empty(policy.shape, dtype=torch.int64, device=policy.device), policy.stream.vocab)
    if exact.tail == "bin" and values_are_checked(sets.values):
        mass = torch.zeros(sets.rows, dtype=torch.float64, device=policy.device)
        mass = mass.index_add(0, sets.row_of, sets.values.detach().exp().to(torch.float64))
        if (mass > 1.001).any():
            at = int((mass > 1.001).nonzero()[0])
            raise ValueError(
                f"{name}: the values of row {at} are log-probs of {float(mass[at]):.4g} in all, more than 1. Log-probs at a temperature add "
                'up to at most 1; for weights that are no probabilities pass Exact("forward", tail="ignore") or tail="renormalise".'
            )
    return sets


def _weight(name: str, weight: Any, policy: Policy) -> Tensor:
    """That of a teacher in each row, fp32 [n]; 0 where the mask is not set."""
    if not isinstance(weight, Tensor):
        require_number(name, weight, "the weight of a teacher is a finite number >= 0, or a tensor of such.", 0, LARGEST)
        weight = torch.full((), float(weight), device=policy.device)
    if weight.device != policy.device:
        raise ValueError(f"{name} is on {weight.device}, but the policy's rows are on {policy.device}: move it there.")
    weights = per_token(name, weight, policy.shape, policy.cu_seqlens)
    weights = weights if policy.mask is None else torch.where(policy.mask.reshape(-1), weights, 0.0)
    if values_are_checked(weights):
        wrong = weights[~((weights >= 0) & (weights < torch.inf))]
        require(
            wrong.numel() == 0, name, float(wrong[0]) if wrong.numel() else None, "weights of teachers are finite and >= 0."
        )
    return plain(weights)


def squared(transform: RowTransform, read: Tensor | None) -> float | Tensor:
    """The square of the inverse temperature; 1 in rows that are not read, whose temperature may be anything."""
    inverse = transform.inv_temperature
    if isinstance(inverse, Tensor) and read is not None:
        inverse = torch.where(read, inverse, 1.0)
    return inverse * inverse


def _for_rows(transform: LogitTransform, policy: Policy) -> RowTransform:
    if policy.shared:
        refuse_with_rows(transform, policy.options)
    return transform.for_rows(policy.shape, policy.mask, policy.cu_seqlens, policy.device)


def _check_vocab(name: str, stream: Stream, policy: Policy) -> None:
    vocab, width = stream.vocab, stream.columns
    if (vocab, width) == (policy.stream.vocab, policy.stream.columns):
        return
    here = "" if stream.shard is None else f" ({width} and {policy.stream.columns} of them on this rank)"
    raise ValueError(
        f"{name} has a vocabulary of {vocab}, but the policy has {policy.stream.vocab}{here}: they must be the same ids. Cut off what is padding "
        "of the longer one, weight[:vocab] or logits[..., :vocab]."
    )
