"""How a loss or log-probs are computed: the options of a call, and the source that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .checks import require, with_hints
from .layout import logit_rows, refuse_overlap
from .missing import check_missing
from .operators import TracedHidden, TracedLogits
from .sparsity import Sparse
from .vocabulary import backends
from .vocabulary.hidden import FlatHead
from .vocabulary.kept import KeptRows
from .vocabulary.rows import Teacher
from .vocabulary.sampled import SampledHidden
from .vocabulary.shard import VocabShard, check_shard, on_shard
from .vocabulary.sources import Hidden, Logits, Source
from .vocabulary.sparse import Slots
from .vocabulary.teachers import TeacherHead

Tensor = torch.Tensor

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


# ---- whether a call is traced, and the source that it reads: one that computes now, or one that puts operators into a graph


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


def checked_logits(
    logits: Tensor, shape: torch.Size, device: torch.device, inplace: bool, shard: VocabShard | None, read: dict[str, Any],
    ref_logits: Any = None,
) -> Tensor:  # fmt: skip
    """`logit_rows` of a caller's logits, or of this rank's part of them. `read`: what the call reads beside them, by name."""
    if shard is not None:
        check_shard(shard)
        logits = shard.local("logits", logits, -1)
    rows = logit_rows(logits, shape, device, inplace, shard is None)
    if inplace and not torch.compiler.is_compiling():  # in a graph nothing is written in place
        remedy = "the gradient would be written over it. Pass a copy, or inplace=False."
        refuse_overlap("inplace=True, but logits", logits, remedy, read, {"ref_logits": ref_logits})
    return rows


def logits_source(
    device: torch.device, inplace: bool, shard: VocabShard | None, options: Options, kept: KeptRows | None = None,
    at: Slots | None = None, teacher: Teacher | None = None,
) -> Source:  # fmt: skip
    """The source that reads checked logits."""
    if torch.compiler.is_compiling():
        return TracedLogits(options.backend, options.strict)
    backend = backends.pick(options.backend, device, options.strict)
    backend = backend if shard is None else on_shard(backend, shard)
    return Logits(backend, inplace, shard, kept, at, teacher=teacher)


def draws(options: Options, head: FlatHead) -> Sparse | None:
    """How columns are drawn for the gradient of a head; None where there is no gradient, or it is dense."""
    needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in head.tensors)
    in_func = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if options.sparse is None or not (needed or in_func):
        return None
    options.sparse.check(head.hidden.device)
    return options.sparse


def hidden_source(
    head: FlatHead, read: Tensor | None, options: Options, rows: tuple[Tensor, int] | None = None, kept: KeptRows | None = None,
    at: Slots | None = None, teacher: TeacherHead | None = None,
) -> Source:  # fmt: skip
    """The source for a checked head. `rows`: (index, active) of `Hidden`; None where the caller does not know them."""
    if torch.compiler.is_compiling():
        return TracedHidden(options.backend, options.strict, head.dtype, draws(options, head))
    backend = backends.pick(options.backend, head.hidden.device, options.strict)
    backend = backend if head.shard is None else on_shard(backend, head.shard)
    index, active = (None, None) if rows is None else rows
    given = (backend, head.dtype, head.shard, index, active, kept, head.into, at, teacher)
    source = Hidden(*given) if draws(options, head) is None else SampledHidden(*given, sparse=options.sparse)
    if index is not None or torch._C._are_functorch_transforms_active():
        return source
    return replace(source, index=source.rows_of(head.hidden.shape[0], read, head.hidden.device))
