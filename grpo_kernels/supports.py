"""Log-probs and statistics of rows with sets, over their sets and over the whole vocabulary, from one source of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from .vocabulary.kept import KeptRows
from .vocabulary.rows import RowTransform
from .vocabulary.sources import Source
from .vocabulary.stage import vocabulary_stage, with_sums

Tensor = torch.Tensor


class Statistics(NamedTuple):
    """Of each row [n], differentiable."""

    logps: Tensor  # over the set of a row that has one, else over the vocabulary
    named: dict[str, Tensor]
    whole_logps: Tensor | None = None  # over the vocabulary, None where nothing needs it


def statistics_of(
    source_of: Callable[[KeptRows | None], Source], kept: KeptRows | None, names: tuple[str, ...], with_gradient: tuple[str, ...],
    over_vocabulary: tuple[str, ...] | None, targets: Tensor, read: Tensor | None, transform: RowTransform,
    tensors: tuple[Tensor | None, ...],
) -> Statistics:  # fmt: skip
    """Statistics of the rows of `source_of(kept)`. `over_vocabulary`: those that are taken over the vocabulary in every row, for
    which, as for `whole_logps`, rows with sets are visited as a whole too; None: nothing is. "lse" among the names asks for
    "log_kept_mass" in its place: log of the probability that the whole row gives to its set, 0 of a row without a set."""
    if kept is None or over_vocabulary is None:
        source = source_of(kept)
        return Statistics(*vocabulary_stage(source, names, with_gradient, targets, read, transform, *tensors))
    tensors, own = with_sums(tensors), tuple(name for name in names if name not in over_vocabulary)
    slopes = tuple(name for name in with_gradient if name in own)
    alone = source_of(kept.alone())
    alone = alone if "divergence" in own or alone.teacher is None else replace(alone, teacher=None)  # type: ignore[type-var]
    sets, over_sets = vocabulary_stage(alone, own, slopes, targets, kept.read, transform, *tensors)
    source = source_of(None)
    whole, named = vocabulary_stage(source, names, with_gradient, targets, read, transform, *tensors)
    if "lse" in own:
        # Log-probs keep the digits of a mass near 1; those of a target without probability are both -inf.
        mass = torch.where(kept.several & (sets == -torch.inf), over_sets.pop("lse") - named.pop("lse"), whole - sets)
        named["log_kept_mass"] = torch.where(kept.has, mass, 0.0)
    for name in own:
        if name in over_sets:
            named[name] = torch.where(kept.has, over_sets[name], named[name])
    if source.at is not None and "at" not in over_vocabulary:
        named["at"] = torch.where(kept.has[source.at.rows], over_sets["at"], named["at"])
    return Statistics(torch.where(kept.has, sets, whole), named, whole)
