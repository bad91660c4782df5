"""What a caller says about a head and a call (`LogitTransform`, `Head`, `Options`), and what was passed as a stream of rows:
logits, or hidden states with a head. The policy's and a reference's alike are checked here, once."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .architectures import language_model, logits_of
from .checks import (
    LARGEST,
    OF_PRODUCTS,
    SMALLEST,
    Checked,
    as_number,
    check_missing,
    check_temperature,
    describe,
    inverse_temperatures,
    logit_rows,
    overlaps_itself,
    per_token,
    plain,
    refuse_overlap,
    refuse_unknown,
    refuse_where,
    require,
    require_device,
    require_number,
    require_shape,
    require_tensor,
    values_are_checked,
    whole_rows,
)
from .formulas.divergence import Exact
from .rows import backends
from .rows.backends import Backend
from .rows.hidden import Hidden, WeightMemory
from .rows.parallel import VocabShard, check_shard, is_managed, on_shard, refuse_managed
from .rows.partials import TRANSFORMED, RowTransform
from .rows.selection import Sparse
from .rows.stream import Known, Logits, Other, Seconds, Stream
from .token_sets import TokenSets, check_sets

# ---- what a caller says about a head and a call


@dataclass(frozen=True, eq=False, repr=False)
class LogitTransform(Checked):
    """What the model does to its logits before the softmax: z = softcap * tanh(x * scale / softcap) / temperature.

    temperature: a number > 0, or a tensor > 0: 0-d, per sequence [B] or per token (the shape of targets).
    softcap: a number > 0, or None. scale: a finite number, not 0. The order is scale, softcap, temperature.
    Logits that come out of a model's own forward already carry its scale and softcap: pass the temperature only. Hidden states
    do not: `LogitTransform.of(model)` knows what its forward does after the head.
    """

    temperature: float | Tensor = 1.0
    softcap: float | None = None
    scale: float = 1.0
    __repr__ = describe
    ranges = (
        ("softcap", "it must be a finite number above 0, or None for no softcap.", SMALLEST, LARGEST),
        ("scale", "it multiplies the logits and must be finite and not 0.", -LARGEST, LARGEST),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.temperature)
        object.__setattr__(self, "temperature", as_number(self.temperature))
        require(self.scale != 0, "scale", self.scale, "it multiplies the logits and must be finite and not 0.")

    @classmethod
    def of(cls, model: Any, *, temperature: float | Tensor = 1.0) -> LogitTransform:
        """What the forward of a causal language model of transformers does to head(hidden), followed by the temperature.

            logps, _ = linear_logprobs(hidden, model.lm_head.weight, targets, transform=LogitTransform.of(model))

        model        the language model, also inside PEFT's, DDP's or torch.compile's wrappers; softcap and scale are those of its
                     config: Gemma-2, -3n and -4, Granite, Cohere, HyperCLOVA X, MiniCPM, Falcon-H1 and others have one.
        temperature  as in the fields.

        Raises ValueError for a model that is not known to have plain logits or one of these (see architectures.py)."""
        softcap, scale = logits_of(language_model(model))
        return cls(temperature, softcap, scale)

    def for_rows(self, shape: torch.Size, mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device) -> RowTransform:
        """The transform of the flat rows of targets of `shape` (packed: cut by `cu_seqlens`) on `device`; a temperature
        tensor becomes one inverse per row, checked where mask is set."""
        inverse = inverse_temperatures(self.temperature, shape, mask, cu_seqlens, device)
        return RowTransform(float(self.scale), float(self.softcap or 0.0), inverse)


AS_THEY_ARE = LogitTransform()


def as_transform(transform: LogitTransform | None) -> LogitTransform:
    if transform is not None and not isinstance(transform, LogitTransform):
        given = transform if isinstance(transform, numbers.Real) else f"a {type(transform).__name__}"
        temperature = transform if isinstance(transform, numbers.Real) else 0.7
        raise ValueError(f"transform is {given}: pass a LogitTransform, for example LogitTransform(temperature={temperature}).")
    return transform or AS_THEY_ARE


@dataclass(frozen=True, eq=False, repr=False)
class Head(Checked):
    """What every `linear_*` function takes in place of `weight`, so that the head is described once.

        head = Head(model.lm_head.weight, model.lm_head.bias, LogitTransform.of(model))
        out = linear_grpo_loss(hidden, head, batch, objective)

    weight     [V, H].
    bias       [V] or None, added to the logits before the transform.
    transform  softcap, scale and temperature after the product.

    The function that takes it checks the tensors, and raises ValueError where a transform is given beside it a second time."""

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform | None = None
    __repr__ = describe

    @staticmethod
    def parts(weight: Any, transform: LogitTransform | None) -> tuple[tuple[Any, Any], LogitTransform | None]:
        """((weight, bias), transform) of a caller's `weight`, a tensor or a Head, with the transform that was given beside it."""
        if not isinstance(weight, Head):
            return (weight, None), transform
        if transform is not None and weight.transform is not None:
            raise ValueError("transform is given, and the Head has one: pass one of them.")
        return (weight.weight, weight.bias), weight.transform if transform is None else transform


OVER = ("kept", "vocabulary")

#: Why nothing is left out of a gradient.
NO_PRODUCT = "logits that exist have no product to save: start from hidden states (linear_grpo_loss, linear_logprobs)"
NOT_BOUNDED = (
    "the gradient of an exact divergence has parts that the policy's probabilities do not bound (log q where q is small, or q "
    "itself), so that what is left out would have no bounded error"
)


@dataclass(frozen=True, eq=False, repr=False)
class Options(Checked):
    """How a call computes: `options=` of the loss, log-prob and divergence functions, the one place where this is said.

        out = linear_grpo_loss(hidden, weight, batch, objective, options=Options(backend="eager", strict=True))

    backend         "auto", "eager", "cpu" or "triton"; see `backends.pick`, and `use` for all calls of a process.
    strict          True: a fallback to another backend is an error, and so are a NaN in numbers of a trained token, a log-prob of
                    -inf that a KL compares, and infinite values of listed ids.
    skip_inactive   True: a loss does not read rows that cannot contribute (zero advantage or weight, and neither KL nor entropy
                    bonus, at token level); out.logps and out.entropy hold 0 there. Loss and gradient are the same.
    sparse          `Sparse`: gradients from hidden states by few columns of each row, unbiased, for a third of the products.
    shard           logits, or weight and bias and those of a reference, are this rank's part of a vocabulary cut over a group:
                    see `distributed.VocabShard`.
    weight_grad     [V, H], fp32 or the weight's dtype: memory that the backward adds the gradient of weight into; autograd
                    gives weight none. docs/kept_sets.md says what Megatron, FSDP and DDP do with it.
    missing         of a target that its kept set lacks: "include" (it joins the set), "full" (the row runs over the whole
                    vocabulary), "mask" (the row is masked) or "raise" (ValueError; a host sync on a GPU). None: what the TokenBatch
                    says, else "include", and "raise" in strict mode.
    entropy_over    of rows with a set: "kept" or "vocabulary", which costs the product with the whole vocabulary.
    reference_over  what ref_logps, or the log-probs of `reference`, run over in rows with a set: likewise.

    Raises ValueError naming the field that is wrong."""

    backend: str = "auto"
    strict: bool = False
    skip_inactive: bool = False
    sparse: Sparse | None = None
    shard: VocabShard | None = None
    weight_grad: Tensor | None = None
    missing: str | None = None
    entropy_over: str = "kept"
    reference_over: str = "kept"
    __repr__ = describe

    def __post_init__(self) -> None:
        if self.missing is not None:
            check_missing(self.missing)
        for name in ("entropy_over", "reference_over"):
            require(getattr(self, name) in OVER, name, getattr(self, name), 'it must be "kept" or "vocabulary".')
        for name in ("skip_inactive", "strict"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "pass True or False.")
        backends.check_name(self.backend)
        require(self.sparse is None or isinstance(self.sparse, Sparse), "sparse", self.sparse, "pass a Sparse, or None.")
        if self.shard is not None:
            check_shard(self.shard)

    @property
    def over_vocabulary(self) -> tuple[str, ...] | None:
        """The statistics that are taken over the whole vocabulary in rows with sets; None: nothing there needs the vocabulary."""
        if self.entropy_over == "vocabulary":
            return ("entropy",)
        return () if self.reference_over == "vocabulary" else None


DEFAULTS = Options()


def refuse_sparse(options: Options, reason: str) -> None:
    """Raise ValueError where the gradient is to have few columns and cannot."""
    if options.sparse is not None:
        raise ValueError(f"sparse={options.sparse!r}: {reason}; leave it out of the options.")


def refuse_with_rows(transform: LogitTransform | None, options: Options) -> None:
    """Raise ValueError for what several tokens of a row are not combined with."""
    refuse_sparse(options, "the columns of a row are drawn for one token, and with rows= it may have several")
    temperature = as_transform(transform).temperature
    remedy = "with rows= the tokens of a row share its softmax: pass one temperature, as a number."
    require(not isinstance(temperature, Tensor), "temperature", temperature, remedy)


def as_options(options: Options | None, head: object) -> Options:
    """The options of a call. Raises ValueError where those of a head are given beside logits, which have `head` None."""
    if options is None:
        return DEFAULTS
    if not isinstance(options, Options):
        raise ValueError(f"options is a {type(options).__name__}: pass Options, for example Options(backend='eager').")
    if head is None:
        refuse_sparse(options, NO_PRODUCT)
        if options.weight_grad is not None:
            raise ValueError("weight_grad is given, but logits come without the weight of a head: leave it out of the options.")
    return options


def refuse_keywords(function: Callable[..., Any], given: dict[str, Any], known: Sequence[str] = (), remedy: str = "") -> None:
    """Raise TypeError for the first keyword that a function does not know, with the place that it belongs to. `known`: its own
    parameters, unless given."""
    known = known or [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name in given:
        if name not in known:
            refuse_unknown(function.__name__, [name], known, _place_of(name, known) or remedy)


def _place_of(name: str, known: Sequence[str]) -> str:
    """Where a keyword belongs that a function with the parameters `known` does not have; "" where it belongs nowhere."""
    if name in ("bias", "weight_grad", "sparse") and "logits" in known:  # of a head, which logits are without
        return ""
    if name in (f.name for f in fields(Options)):
        return f"Pass options=Options({name}=...)."
    if name == "bias" and "weight" in known:
        return "Pass Head(weight, bias) as weight."
    if name in ("temperature", "softcap", "scale") and "transform" in known:
        return f"Pass transform=LogitTransform({name}=...)."
    return ""


def is_traced() -> bool:
    """Whether torch.compile, torch.export or a transform of torch.func is tracing this call."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def leaves_the_graph(options: Options, context_group: Any, *sets: Any) -> bool:
    """Whether a traced call has to break the graph, because the operators take no sets of ids, no memory to add to and no process
    groups. ValueError under torch.func for the latter two."""
    groups = {"shard": options.shard, "context_group": context_group}
    given = [name for name, value in groups.items() if value is not None]
    if torch.compiler.is_compiling():
        return bool(given) or any(x is not None for x in (*sets, options.weight_grad))
    if given:
        raise ValueError(f"{given[0]} is given under torch.func, which does not support process groups: use torch.autograd.")
    remedy = "torch.func gives gradients as results: leave it out."
    require(options.weight_grad is None, "weight_grad", options.weight_grad, remedy)
    return False


def outside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function eagerly, at a graph break; the error of fullgraph=True names this one."""
    return torch.compiler.disable(function)(*arguments)


# The attribute that torch.compiler.disable sets. Used as a decorator, it would import the whole compiler with this package.
outside._torchdynamo_disable = True  # type: ignore[attr-defined]


# ---- streams of rows


class Policy(NamedTuple):
    """The rows of a call, which each of its streams has to match.

    transform   of the policy, and of second streams without their own.
    shared      whether a row may have several tokens."""

    shape: torch.Size
    device: torch.device
    transform: LogitTransform | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    options: Options
    shared: bool = False


def stream_of(
    x: Tensor, head: tuple[Any, Any] | None, policy: Policy, read: dict[str, Any], second: dict[str, Any], inplace: bool = False
) -> Logits | Hidden:  # fmt: skip
    """Check logits or, with the (weight, bias) of a head, hidden states, or this rank's part of them, and return them as a stream
    of flat rows, each in one piece. `read`: what a call that writes into memory of the caller reads beside them, by name; `second`:
    likewise, of which logits are read row by row. Raises ValueError with the remedy."""
    options, device, transform = policy.options, policy.device, policy.transform
    shard, of_rows, compiling = options.shard, TRANSFORMED, torch.compiler.is_compiling()
    if policy.shared:
        refuse_with_rows(transform, options)
    if transform is not None:
        of_rows = as_transform(transform).for_rows(policy.shape, policy.mask, policy.cu_seqlens, device)
    backend = cast(Backend, None)  # in a graph it is picked when the graph runs
    if not compiling:
        backend = backends.pick(options.backend, device, options.strict)
        backend = backend if shard is None else on_shard(backend, shard)
    if head is None:
        x = x if shard is None else shard.local("logits", x, -1)
        rows = logit_rows(x, policy.shape, device, inplace, shard is None)
        if inplace and not compiling:  # in a graph nothing is written in place
            remedy = "the gradient would be written over it. Pass a copy, or inplace=False."
            refuse_overlap("inplace=True, but logits", x, remedy, read, second)
        return Logits((rows,), of_rows, backend, shard, inplace)
    hidden, weight, bias = _tensors_of(x, head, policy)
    into = None
    if options.weight_grad is not None:
        read = {"hidden": hidden, "weight": weight, "bias": bias, **read, **second}
        into = check_weight_grad(options.weight_grad, weight, read)
    tensors = (
        whole_rows(hidden.reshape(-1, hidden.shape[-1])),
        whole_rows(weight),
        None if bias is None else bias.contiguous(),
    )
    return Hidden(tensors, of_rows, backend, shard, compute_dtype(hidden), into)


def _tensors_of(hidden: Tensor, head: tuple[Any, Any], policy: Policy) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias that fit together, as local tensors."""
    shape, shard = policy.shape, policy.options.shard
    given: dict[str, Any] = {"hidden": hidden, "weight": head[0], "bias": head[1]}
    for name, x in given.items():
        if x is None and name == "bias":
            continue
        if isinstance(x, torch.nn.Module):
            tensor = "Head(lm_head.weight, lm_head.bias)" if getattr(x, "bias", None) is not None else "lm_head.weight"
            tensor = "the hidden states that the head gets" if name == "hidden" else f"its tensor, {tensor}"
            raise ValueError(f"{name} is the module {type(x).__name__}: pass {tensor}.")
        if not isinstance(x, Tensor) or x.dtype not in OF_PRODUCTS:
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            of = f", its {name}.last_hidden_state" if hasattr(x, "last_hidden_state") else ""
            raise ValueError(f"{name} is {got}: pass a float32, bfloat16 or float16 tensor{of}.")
        if x.device != policy.device:
            raise ValueError(f"{name} is on {x.device}, but targets is on {policy.device}: move one of them.")
        if shard is not None and name != "hidden":
            given[name] = shard.local(name, x, 0)
        elif getattr(x, "placements", None) is not None:
            given[name] = _local(name, x, partial=shard is not None and not shard.reduce_hidden)
    hidden, weight, bias = given.values()
    if weight.shape[:-1] == shape and hidden.shape[:-1] != shape:
        raise ValueError(f"weight has shape {list(weight.shape)} and hidden {list(hidden.shape)}: they changed places.")
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
    return hidden, weight, bias


def check_weight_grad(weight_grad: Tensor, weight: Tensor, read: dict[str, Any]) -> WeightMemory:
    """Raise ValueError unless the gradient of `weight` can be added into `weight_grad`, in a call that reads `read`, by name."""
    require_tensor("weight_grad", weight_grad, (torch.float32, weight.dtype), f"float32, or {weight.dtype}, that of weight")
    require_shape("weight_grad", weight_grad, weight.shape, "weight")
    require_device("weight_grad", weight_grad, weight.device, "weight")
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


def _local(name: str, x: Tensor, partial: bool) -> Tensor:
    """The local tensor of a replicated DTensor. `partial`: its gradient is this rank's share."""
    refuse_managed(name, x)
    placements = x.placements  # type: ignore[attr-defined]
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


def draws(sparse: Sparse, stream: Stream) -> Sparse | None:
    """How columns are drawn for the gradient of a head; None where there is no gradient."""
    needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in stream.tensors)
    if not needed and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()):
        return None
    sparse.check(stream.tensors[0].device)
    return sparse


# ---- second streams: what `reference=` and `ref_logits=` may be, checked against the policy's rows


def name_of_second(logits: bool) -> str:
    """The argument that says what is beside the policy's logits, or hidden states."""
    return "ref_logits" if logits else "reference"


HOW = "(hidden, weight), (hidden, weight, bias), (hidden, Head(...))"
HOW_EXACT = f"{HOW}, TokenSets whose values are a teacher's log-probs, or a list of pairs (one of these, weight)"


def seconds_of(given: Any, exact: Exact, policy: Policy, stream: Stream) -> Seconds:
    """The second streams of a divergence, beside the policy's: what was given as `reference` or `ref_logits`."""
    name, several = name_of_second(not stream.computed), isinstance(given, list)
    if policy.shared:
        remedy = f"with rows= a teacher's rows are those of the policy: pass its whole distribution as {name}, without a list or TokenSets."
        require(not isinstance(given, (list, TokenSets)), name, type(given).__name__, remedy)
    require(not several or len(given) > 0, name, given, "a list of teachers holds at least one pair (teacher, weight).")
    others, known = [], []
    for i, pair in enumerate(given if several else [(given, None)]):
        if not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair[0], list):
            raise ValueError(f"{name}[{i}] is {type(pair).__name__}: a list of teachers holds pairs (teacher, weight).")
        teacher, weight = pair
        of_sets = isinstance(teacher, TokenSets)
        checked: Any = _checked_sets if of_sets else second_stream
        own = f"{name}[{i}]" if several else name
        checked = checked(own, teacher, policy, stream, exact)
        weight = _weight(f"{own}.weight", weight, policy) if several else None
        if of_sets:
            known.append(Known(checked, weight))
        else:
            others.append(Other(checked.plain(), exact.direction, exact.share, weight))
    return Seconds(tuple(others), tuple(known))


def second_stream(name: str, given: Any, policy: Policy, stream: Stream, exact: Exact | None = None) -> Stream:
    """A second stream beside the policy's, of hidden states or of logits as that is, under a transform of its own, else the
    policy's. `name`: of the argument, or its place in a list. `exact`: the divergence from it, which may be that from TokenSets or
    a list in its place."""
    x, head, transform = given, None, policy.transform
    if not stream.computed:
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], LogitTransform | None):
            x, transform = given[0], as_transform(given[1])
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{name} is {'None' if x is None else f'a {type(x).__name__}'}, but {exact} needs the whole distribution of a reference "
                "or teacher: pass its logits, (logits, LogitTransform(...)), TokenSets whose values are its log-probs, or a list of pairs "
                "(one of these, weight)."
            )
    else:
        what = f"{exact} needs the whole distribution of a reference or teacher: pass {HOW_EXACT}."
        require(exact is None or given is not None, name, given, what)
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise ValueError(f"{name} is {type(given).__name__}: pass {HOW}.")
        x, weight, *bias = given
        if isinstance(weight, Head) and bias:
            raise ValueError(f"{name} has a bias beside a Head: put it into the Head.")
        head, own = Head.parts(weight, None)
        head, transform = (head[0], bias[0]) if bias else head, transform if own is None else own
    options = policy.options if policy.options.weight_grad is None else replace(policy.options, weight_grad=None)
    try:
        second = stream_of(x, head, policy._replace(transform=transform, options=options), {}, {})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if (second.vocab, second.columns) != (stream.vocab, stream.columns):
        here = "" if second.shard is None else f" ({second.columns} and {stream.columns} of them on this rank)"
        raise ValueError(
            f"{name} has a vocabulary of {second.vocab}, but the policy has {stream.vocab}{here}: they must be the same ids. Cut off what is "
            "padding of the longer one, weight[:vocab] or logits[..., :vocab]."
        )
    return second


def _checked_sets(name: str, sets: TokenSets, policy: Policy, stream: Stream, exact: Exact) -> TokenSets:
    if sets.values is None:
        raise ValueError(
            f"{name} is TokenSets without values: pass the teacher's log-probs of its ids, sets.with_values(logps)."
        )
    check_sets(name, sets, torch.empty(policy.shape, dtype=torch.int64, device=policy.device), stream.vocab)
    if exact.tail == "bin" and values_are_checked(sets.values):
        mass = torch.zeros(sets.rows, dtype=torch.float64, device=policy.device)
        mass = mass.index_add(0, sets.row_of, sets.values.detach().exp().double())
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
    require_device(name, weight, policy.device, "the tensor of targets")
    weights = per_token(name, weight, policy.shape, policy.cu_seqlens)
    weights = weights if policy.mask is None else torch.where(policy.mask.flatten(), weights, 0.0)
    if values_are_checked(weights):
        wrong = ~((weights >= 0) & (weights < torch.inf))
        refuse_where(wrong, name, weights, ": weights of teachers are finite and >= 0.")
    return plain(weights)


def squared(transform: RowTransform, read: Tensor | None) -> float | Tensor:
    """The square of the inverse temperature; 1 in rows that are not read, whose temperature may be anything."""
    inverse = transform.inv_temperature
    if isinstance(inverse, Tensor) and read is not None:
        inverse = torch.where(read, inverse, 1.0)
    return inverse * inverse
