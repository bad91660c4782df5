"""What a caller says about a head (`Head`) and about how a call computes (`Options`)."""

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
    """An output head. Every `linear_*` function takes it instead of `weight`.

        head = Head(model.lm_head.weight, model.lm_head.bias, LogitTransform.of(model))
        out = linear_grpo_loss(hidden, head, batch, objective)

    weight      [V, H]
    bias        [V] or None, added to the logits before the transform
    transform   softcap, scale and temperature after the matmul

    The function that takes it checks the tensors. It raises ValueError if it also gets a
    `transform=`.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform | None = None
    __repr__ = describe


@dataclass(frozen=True, eq=False, repr=False)
class Options(Checked):
    """Options of a call: `options=` of the loss, log-prob and divergence functions.

        options = Options(backend="eager", strict=True)
        out = linear_grpo_loss(hidden, weight, batch, objective, options=options)

    backend         "auto", "eager", "cpu" or "triton". `use` sets it for all calls of a process.
    strict          whether a fallback to another backend, or a NaN in the batch at a trained token,
                    is an error
    skip_inactive   whether a loss skips tokens that cannot contribute (zero advantage or weight,
                    and neither KL nor entropy bonus, at token level). out.logps and out.entropy are
                    0 there. Loss and gradient are the same.
    shard           this rank's part of a vocabulary that is sharded over a group, of logits, or of
                    weight and bias, and of those of a reference: see `distributed.VocabShard`
    grad_in_backward   whether a loss computes its gradient in the backward instead of the forward.
                       From logits this reads them twice. It is faster if the backward would
                       multiply the gradient by a factor that `grad_scale` cannot say, such as the
                       scale of a GradScaler. From hidden states it costs a fourth matmul.
    weight_grad     [V, H], fp32 or the dtype of the weight: memory that the backward adds the
                    gradient of the weight to. Autograd then gives the weight none.

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
        for name in ("skip_inactive", "strict", "grad_in_backward"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "pass True or False.")
        backends.check_name(self.backend)
        if self.shard is not None:
            check_shard(self.shard)


DEFAULT_OPTIONS = Options()


def as_options(options: Options | None) -> Options:
    """Return the options of a call, the defaults for None."""
    if options is None:
        return DEFAULT_OPTIONS
    if not isinstance(options, Options):
        raise ValueError(
            f"options is a {type(options).__name__}: pass Options, for example"
            " Options(backend='eager')."
        )
    return options


# ---- keywords in the wrong place


def refuse_keywords(
    function: Callable[..., Any],
    keywords: dict[str, Any],
    known: Sequence[str] = (),
    remedy: str = "",
) -> None:
    """Raise TypeError for the first keyword that a function does not know.

    The message says where the keyword belongs, or suggests a similar name.

    known   the keywords that the function knows; its own parameters by default
    """
    if not known:
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    for name in keywords:
        if name not in known:
            refuse_unknown(
                function.__name__, [name], known, place_of_keyword(name, known) or remedy
            )


def place_of_keyword(name: str, known: Sequence[str]) -> str:
    """Return a sentence that says where a keyword belongs, "" if it belongs nowhere.

    known   the parameters of the function that got it
    """
    if name in ("bias", "weight_grad") and "logits" in known:  # logits come without a head
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
    """Return whether torch.compile, torch.export or a transform of torch.func traces this call."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def leaves_the_graph(options: Options, context_group: Any, *features: Any) -> bool:
    """Return whether a traced call must break the graph.

    The operators of a graph have no process groups, no memory to add to, and none of `features`,
    which are None if they are not used. Raises ValueError under torch.func for process groups and
    for memory.
    """
    groups = {"shard": options.shard, "context_group": context_group}
    used_groups = [name for name, group in groups.items() if group is not None]
    if torch.compiler.is_compiling():
        is_used = any(x is not None for x in (*features, options.weight_grad))
        return bool(used_groups) or is_used
    if used_groups:
        raise ValueError(
            f"{used_groups[0]} is given under torch.func, which does not support process groups:"
            " use torch.autograd."
        )
    remedy = "torch.func gives gradients as results: leave it out."
    require(options.weight_grad is None, "weight_grad", options.weight_grad, remedy)
    return False


def run_outside_graph(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a function eagerly, at a graph break.

    The error of fullgraph=True names this function.
    """
    return torch.compiler.disable(function)(*arguments, **keywords)


# The attribute that torch.compiler.disable sets. As a decorator it would import the whole compiler
# with this package.
run_outside_graph._torchdynamo_disable = True  # type: ignore[attr-defined]
