"""Log-probs and statistics of rows with sets, over their sets and over the whole vocabulary, from one source of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .vocabulary.kept import KeptRows
from .vocabulary.rows import RowTransform
from .vocabulary.sources import Source
from .vocabulary.stage import vocabulary_stage

Tensor = torch.Tensor


class Statistics(NamedTuple):
    """Of each row [n], differentiable."""

    logps: Tensor  # over the set of a row that has one, else over the vocabulary
    named: dict[str, Tensor]
    whole_logps: Tensor | None = None  # over the vocabulary, None where nothing needs it

    @property
    def log_kept_mass(self) -> Tensor | None:
        """log of the probability that the whole row gives to its set, 0 of a row without a set; None if it is not known."""
        return None if self.whole_logps is None else self.whole_logps - self.logps


def statistics_of(
    source_of: Callable[[KeptRows | None], Source], kept: KeptRows | None, names: tuple[str, ...], with_gradient: tuple[str, ...],
    over_vocabulary: tuple[str, ...] | None, targets: Tensor, read: Tensor | None, transform: RowTransform,
    tensors: tuple[Tensor | None, ...],
) -> Statistics:  # fmt: skip
    """Statistics of the rows of `source_of(kept)`. `over_vocabulary`: those that are taken over the vocabulary in every row, for
    which, as for `whole_logps`, rows with sets are visited as a whole too; None: nothing is."""
    if kept is None or over_vocabulary is None:
        source = source_of(kept)
        return Statistics(*vocabulary_stage(source, names, with_gradient, targets, read, transform, *tensors))
    sets, over_sets = vocabulary_stage(source_of(kept.alone()), names, with_gradient, targets, kept.read, transform, *tensors)
    whole, over_all = vocabulary_stage(source_of(None), names, with_gradient, targets, read, transform, *tensors)
    named = {
        name: over_all[name] if name in over_vocabulary else torch.where(kept.has, over_sets[name], over_all[name])
        for name in names
    }
    slots = source_of(None).at
    if slots is not None:
        named["at"] = torch.where(kept.has[slots.rows], over_sets["at"], over_all["at"])
    return Statistics(torch.where(kept.has, sets, whole), named, whole)
