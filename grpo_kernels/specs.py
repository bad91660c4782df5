"""What a caller says about a head and a call: `LogitTransform`, `Head`, `Options`, and `Sparse`."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace
from typing import Any

import torch

from .architectures import language_model, logits_of
from .checks import LARGEST, SMALLEST, as_number, check_missing, describe, require, require_number, with_hints
from .layout import check_temperature, inverse_temperatures
from .rows import backends
from .rows.parallel import VocabShard
from .rows.partials import RowTransform
from .rows.selection import Sparse

Tensor = torch.Tensor


@with_hints
@dataclass(frozen=True, eq=False, repr=False)
class LogitTransform:
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

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.softcap is not None:
            remedy = "it must be a finite number above 0, or None for no softcap."
            require_number("softcap", self.softcap, remedy, SMALLEST, LARGEST)
        require_number("scale", self.scale, "it multiplies the logits and must be finite and not 0.", -LARGEST, LARGEST)
        for name in ("temperature", "softcap", "scale"):
            object.__setattr__(self, name, as_number(getattr(self, name)))
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
IDENTITY = RowTransform(1.0, 0.0, 1.0)  # the same, of rows


def as_transform(transform: LogitTransform | None) -> LogitTransform:
    if transform is not None and not isinstance(transform, LogitTransform):
        given = transform if isinstance(transform, numbers.Real) else f"a {type(transform).__name__}"
        temperature = transform if isinstance(transform, numbers.Real) else 0.7
        raise ValueError(f"transform is {given}: pass a LogitTransform, for example LogitTransform(temperature={temperature}).")
    return transform or AS_THEY_ARE


@with_hints
@dataclass(frozen=True, eq=False, repr=False)
class Head:
    """What every `linear_*` function takes in place of `weight`, so that the head is described once.

        head = Head(model.lm_head.weight, transform=LogitTransform.of(model), grad=main_grad)
        out = linear_grpo_loss(hidden, head, batch, objective)

    weight     [V, H].
    bias       [V] or None.
    transform  softcap, scale and temperature after the product.
    shard      which part of the vocabulary weight and bias are, see `VocabShard`.
    grad       memory that the gradient of weight is added into, the `weight_grad` of `linear_grpo_loss`.

    The function that takes it checks the tensors, and raises ValueError where one of these is given beside it again."""

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform | None = None
    shard: VocabShard | None = None
    grad: Tensor | None = None
    __repr__ = describe

    def beside(self, **given: Any) -> Head:
        """Self, where nothing is given beside it again. Raises ValueError with the remedy."""
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is given beside a Head: put it into the Head.")
        return self

    @classmethod
    def of(cls, weight: Any, *, bias: Any, transform: Any, shard: Any, weight_grad: Any) -> Head:
        """A caller's `weight` with what was given beside it by keyword."""
        if isinstance(weight, Head):
            return weight.beside(bias=bias, transform=transform, shard=shard, weight_grad=weight_grad)
        return cls(weight, bias, transform, shard, weight_grad)


OVER = ("kept", "vocabulary")

#: Why nothing is left out.
NO_PRODUCT = "logits that exist have no product to save: start from hidden states (linear_grpo_loss, linear_logprobs)"
NOT_BOUNDED = (
    "the gradient of an exact divergence has parts that the policy's probabilities do not bound (log q where q is small, or q "
    "itself), so that what is left out would have no bounded error"
)


@with_hints
@dataclass(frozen=True)
class Options:
    """How a call computes: `options=` of the loss and log-prob functions.

        out = linear_grpo_loss(hidden, weight, batch, objective, options=Options(entropy_over="vocabulary"))

    missing         of a target that its kept set lacks: "include" (it joins the set: finite, local, the ratio stays near 1),
                    "full" (the row runs over the whole vocabulary), "mask" (the row is masked) or "raise" (ValueError). None:
                    what the `missing` of a TokenBatch says; where that is None too, "include", and "raise" in strict mode.
                    "mask" changes the mask: with a normalizer of one's own say it in the TokenBatch, from which the normalizer
                    is made. "raise" is a host sync on a GPU.
    entropy_over    "kept": the entropy of a row with a set is that of its set. "vocabulary": that of the whole row, which can
                    be compared over runs with other sampling; it costs the product with the whole vocabulary, and with an
                    entropy bonus its backward too.
    reference_over  what ref_logps, or the log-probs of `reference`, run over in rows with a set: "kept" or "vocabulary". With
                    "vocabulary" the KL compares log-probs of the whole row, which costs what entropy_over="vocabulary" costs.
    sparse          `Sparse`: gradients from hidden states by few columns of each row, unbiased, for a third of the products. None:
                    all columns.
    skip_inactive, backend, strict    as the keywords of these names, in place of them.

    Without kept sets the first three change nothing. Raises ValueError naming the field that is wrong."""

    missing: str | None = None
    entropy_over: str = "kept"
    reference_over: str = "kept"
    skip_inactive: bool = False
    backend: str = "auto"
    strict: bool = False
    sparse: Sparse | None = None

    def __post_init__(self) -> None:
        if self.missing is not None:
            check_missing(self.missing)
        for name in ("entropy_over", "reference_over"):
            require(getattr(self, name) in OVER, name, getattr(self, name), 'it must be "kept" or "vocabulary".')
        for name in ("skip_inactive", "strict"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "pass True or False.")
        backends.check_name(self.backend)
        require(self.sparse is None or isinstance(self.sparse, Sparse), "sparse", self.sparse, "pass a Sparse, or None.")

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


def merged(options: Options | None, *, backend: str = "auto", strict: bool = False, skip_inactive: bool = False) -> Options:
    """The options of a call, of which the keywords are a part that may be written without them."""
    if options is None:
        if backend == "auto" and strict is False and skip_inactive is False:
            return DEFAULTS
        return Options(backend=backend, strict=strict, skip_inactive=skip_inactive)
    if not isinstance(options, Options):
        raise ValueError(f"options is a {type(options).__name__}: pass Options, for example Options(backend='eager').")
    given: dict[str, Any] = {"backend": backend, "strict": strict, "skip_inactive": skip_inactive}
    given = {name: value for name, value in given.items() if value != getattr(DEFAULTS, name)}
    for name, value in given.items():
        said = getattr(options, name)
        if said not in (getattr(DEFAULTS, name), value):
            raise ValueError(f"{name}={value!r}, but options has {name}={said!r}: say it in one place.")
    return replace(options, **given) if given else options
