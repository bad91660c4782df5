"""Arguments that many public functions share: `Head`, an output head, and `Options` of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .checks import Checked, describe, refuse_unknown, require
from .core import backends
from .core.vocab_parallel import VocabShard, check_shard
from .transform import LogitTransform


@dataclass(frozen=True, eq=False, repr=False)
class Head(Checked):
    """An output head with a bias or a transform. Pass it as `weight` to any `linear_*` function.

        head = Head(model.lm_head.weight, model.lm_head.bias, LogitTransform.of(model))
        out = linear_grpo_loss(hidden, head, batch, objective)

    weight      float [V, H], where V is the vocabulary size and H the hidden size
    bias        float [V], added to the logits before the transform; None: no bias
    transform   softcap, scale and temperature of the logits; None: none

    The function that takes the head checks the tensors. If you pass a `transform=` to that function
    too, it raises ValueError.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform | None = None
    __repr__ = describe


@dataclass(frozen=True, eq=False, repr=False)
class Options(Checked):
    """Options of a call, for the argument `options=` of loss, log-prob and divergence functions.

        options = Options(backend="eager", strict=True)
        out = linear_grpo_loss(hidden, weight, batch, objective, options=options)

    backend         "auto", "eager", "cpu" or "triton". `use` sets it for all calls of a process.
    strict          True: raise an error if the call would fall back to another backend, or if the
                    batch has a NaN at a trained token
    skip_inactive   True: a loss skips tokens that cannot contribute (zero advantage or weight, and
                    neither KL nor entropy bonus, at token level). out.logps and out.entropy are 0
                    there. Loss and gradient are the same.
    shard           the ids that this rank holds, if the vocabulary is sharded over a process group.
                    Logits, or weight and bias, and the same of a reference, then have only these
                    ids. See `distributed.VocabShard`.
    weight_grad     [V, H], fp32 or the dtype of the weight: the backward adds the gradient of the
                    weight to this memory. Autograd then gives the weight no gradient.
    grad_in_backward   True: a loss computes its gradient in the backward instead of the forward.
                       From logits this reads them twice. It is faster if the backward would
                       multiply the gradient by a factor that cannot be passed as `grad_scale`, such
                       as the scale of a GradScaler. From hidden states it costs one more matmul.
                       With a frozen head and neither an entropy bonus nor an exact divergence it
                       costs none: the forward computes the gradient of each log-prob, fp32
                       [num_rows, H], and the backward only multiplies it.

    Raises ValueError naming the field that is wrong.
    """

    backend: str = "auto"
    strict: bool = False
    skip_inactive: bool = False
    shard: VocabShard | None = None
    weight_grad: Tensor | None = None
    grad_in_backward: bool = False
    __repr__ = describe

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is wrong."""
        for name in ("skip_inactive", "strict", "grad_in_backward"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "pass True or False.")
        backends.check_name(self.backend)
        if self.shard is not None:
            check_shard(self.shard)


DEFAULT_OPTIONS = Options()


def as_options(options: Options | None) -> Options:
    """Return the argument `options=` of a call, or the default options for None.

    Raises ValueError for anything else.
    """
    if options is None:
        return DEFAULT_OPTIONS
    if not isinstance(options, Options):
        raise ValueError(
            f"options is a {type(options).__name__}: pass Options, for example"
            " Options(backend='eager')."
        )
    return options


# ---- unknown keyword arguments


def refuse_keywords(
    function: Callable[..., Any],
    keywords: dict[str, Any],
    known: Sequence[str] = (),
    remedy: str = "",
) -> None:
    """Raise TypeError if one of the keywords is not a parameter of a function.

    The message says how to pass the keyword instead, or suggests a similar name.

    function   the public function that got the keywords
    keywords   the keyword arguments to check
    known      the keywords that the function accepts; by default its parameters
    remedy     the end of the message for a keyword that no other argument accepts
    """
    if not known:
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    for name in keywords:
        if name not in known:
            how_to_pass = how_to_pass_keyword(name, known)
            refuse_unknown(function.__name__, [name], known, how_to_pass or remedy)


def how_to_pass_keyword(name: str, known: Sequence[str]) -> str:
    """Return how to pass a keyword to a function that does not accept it, as a sentence.

    For "strict" it is "Pass options=Options(strict=...)." Return "" if the keyword belongs to no
    argument of the function.

    known   the keywords that the function accepts
    """
    if name in ("bias", "weight_grad") and "logits" in known:  # a function of logits has no head
        return ""
    if name in (f.name for f in fields(Options)):
        return f"Pass options=Options({name}=...)."
    if name == "bias" and "weight" in known:
        return "Pass Head(weight, bias) as weight."
    if name in ("temperature", "softcap", "scale") and "transform" in known:
        return f"Pass transform=LogitTransform({name}=...)."
    return ""


# ---- calls under torch.compile and torch.func


def is_traced() -> bool:
    """Return whether torch.compile, torch.export or a transform of torch.func traces the caller."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def must_break_graph(options: Options, context_group: Any, *optional_arguments: Any) -> bool:
    """Return whether a call that is traced must break the graph and run eagerly.

    Under torch.compile it must if it uses a process group, `Options.weight_grad` or an optional
    argument, because the operators of a graph do not support them. Under torch.func it must not.

    context_group        process group of ranks that share sequences, or None
    optional_arguments   arguments of the call that a graph does not support, None if not used

    Raises ValueError for a process group or `weight_grad` under torch.func.
    """
    groups = {"shard": options.shard, "context_group": context_group}
    used_groups = [name for name, group in groups.items() if group is not None]
    if torch.compiler.is_compiling():
        has_optional = any(x is not None for x in (*optional_arguments, options.weight_grad))
        return bool(used_groups) or has_optional
    if used_groups:
        raise ValueError(
            f"{used_groups[0]} is given under torch.func, which does not support process groups:"
            " use torch.autograd."
        )
    remedy = "torch.func gives gradients as results: leave it out."
    require(options.weight_grad is None, "weight_grad", options.weight_grad, remedy)
    return False


def run_outside_graph(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a function eagerly while torch.compile traces, which breaks the graph here.

    With fullgraph=True torch.compile raises an error that names `run_outside_graph`.
    """
    return torch.compiler.disable(function)(*arguments, **keywords)


# torch.compiler.disable sets this attribute too. As a decorator it would import the whole compiler
# together with this package.
run_outside_graph._torchdynamo_disable = True  # type: ignore[attr-defined]
