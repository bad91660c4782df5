"""What only chooses how a loss or log-probs are computed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from .checks import require
from .missing import check_missing
from .vocabulary.backends import check_name

OVER = ("kept", "vocabulary")


@dataclass(frozen=True)
class Options:
    """How a call computes: `options=` of the loss and log-prob functions.

        out = linear_grpo_loss(hidden, weight, batch, objective, options=Options(entropy_over="vocabulary"))

    missing         of a target that its kept set lacks: "include" (it joins the set: finite, local, the ratio stays near 1),
                    "full" (the row runs over the whole vocabulary), "mask" (the row is masked) or "raise" (ValueError). None:
                    what the `missing` of a TokenBatch says; where that is None too, "include", and "raise" in strict mode. "mask" changes the mask:
                    with a normalizer of one's own say it in the TokenBatch, from which the normalizer is made.
    entropy_over    "kept": the entropy of a row with a set is that of its set. "vocabulary": that of the whole row, which can
                    be compared over runs with other sampling; it costs the product with the whole vocabulary, and with an
                    entropy bonus its backward too.
    reference_over  what ref_logps, or the log-probs of `reference`, run over in rows with a set: "kept" or "vocabulary". With
                    "vocabulary" the KL compares log-probs of the whole row, which costs what entropy_over="vocabulary" costs.
    skip_inactive, backend, strict    as the keywords of these names, in place of them.

    Without kept sets the first three change nothing. Raises ValueError naming the field that is wrong."""

    missing: str | None = None
    entropy_over: str = "kept"
    reference_over: str = "kept"
    skip_inactive: bool = False
    backend: str = "auto"
    strict: bool = False

    def __post_init__(self) -> None:
        if self.missing is not None:
            check_missing(self.missing)
        for name in ("entropy_over", "reference_over"):
            require(getattr(self, name) in OVER, name, getattr(self, name), 'it must be "kept" or "vocabulary".')
        for name in ("skip_inactive", "strict"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "pass True or False.")
        check_name(self.backend)

    @property
    def over_vocabulary(self) -> tuple[str, ...] | None:
        """The statistics that are taken over the whole vocabulary in rows with sets; None: nothing there needs the vocabulary."""
        if self.entropy_over == "vocabulary":
            return ("entropy",)
        return () if self.reference_over == "vocabulary" else None


def merged(options: Options | None, *, backend: str = "auto", strict: bool = False, skip_inactive: bool = False) -> Options:
    """The options of a call, of which the keywords are a part that may be written without them."""
    given: dict[str, Any] = {"backend": backend, "strict": strict, "skip_inactive": skip_inactive}
    if options is None:
        return Options(**given)
    if not isinstance(options, Options):
        raise ValueError(f"options is a {type(options).__name__}: pass Options, for example Options(backend='eager').")
    plain = {f.name: f.default for f in fields(Options)}
    given = {name: value for name, value in given.items() if value != plain[name]}
    for name, value in given.items():
        said = getattr(options, name)
        if said not in (plain[name], value):
            raise ValueError(f"{name}={value!r}, but options has {name}={said!r}: say it in one place.")
    return replace(options, **given) if given else options
