"""Options: how a loss or log-probs are computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .checks import require, with_hints
from .rows import backends
from .rows.selection import Sparse
from .token_sets import check_missing

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
