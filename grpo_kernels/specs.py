"""What a caller says about a head and a call: `LogitTransform`, `Head`, `Options`, and `Sparse`."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from .architectures import language_model, logits_of
from .checks import (
    LARGEST,
    SMALLEST,
    Checked,
    as_number,
    check_missing,
    check_temperature,
    describe,
    refuse_unknown,
    require,
)
from .layout import inverse_temperatures
from .rows import backends
from .rows.parallel import VocabShard, check_shard
from .rows.partials import RowTransform
from .rows.selection import Sparse

Tensor = torch.Tensor


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
    strict          True: a fallback to another backend is an error, and so is a NaN in numbers of a trained token.
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


def refuse_product(options: Options) -> None:
    """Raise ValueError where options of a head are given beside logits."""
    refuse_sparse(options, NO_PRODUCT)
    if options.weight_grad is not None:
        raise ValueError("weight_grad is given, but logits come without the weight of a head: leave it out of the options.")


def refuse_with_rows(transform: LogitTransform | None, options: Options) -> None:
    """Raise ValueError for what several tokens of a row are not combined with."""
    refuse_sparse(options, "the columns of a row are drawn for one token, and with rows= it may have several")
    temperature = as_transform(transform).temperature
    remedy = "with rows= the tokens of a row share its softmax: pass one temperature, as a number."
    require(not isinstance(temperature, Tensor), "temperature", temperature, remedy)


def as_options(options: Options | None) -> Options:
    if options is not None and not isinstance(options, Options):
        raise ValueError(f"options is a {type(options).__name__}: pass Options, for example Options(backend='eager').")
    return options or DEFAULTS


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
