"""What happens to a target that is not in its set of kept ids."""

from __future__ import annotations

import torch

from .checks import require
from .layout import flat
from .rows.backends import is_strict
from .rows.sets import KeptRows
from .token_sets import TokenSets, check_sets

Tensor = torch.Tensor

#: What to do with a target outside of its set: put it in, take the whole vocabulary, mask the row, or refuse.
MISSING = ("include", "full", "mask", "raise")


def check_missing(missing: object) -> None:
    require(missing in MISSING, "missing", missing, f"it must be one of {', '.join(map(repr, MISSING))}.")


def outside(sets: TokenSets, targets: Tensor) -> Tensor:
    """bool [rows]: rows with a set that lacks the row's target."""
    return ~sets.contains(targets)


def without_set(sets: TokenSets, targets: Tensor, missing: str | None) -> Tensor:
    """bool [rows]: rows that run over the whole vocabulary."""
    empty = sets.counts == 0
    return empty | outside(sets, targets) if missing == "full" else empty


def narrowed(sets: TokenSets, targets: Tensor, mask: Tensor | None, missing: str | None) -> Tensor | None:
    """The mask without the rows that `missing` removes. Raises ValueError for missing="raise", for which the host waits on a
    GPU."""
    if missing not in ("mask", "raise"):
        return mask
    lacking = outside(sets, targets).view(targets.shape)
    if missing == "mask":
        return ~lacking if mask is None else mask & ~lacking
    lacking = lacking if mask is None else mask & lacking
    if not torch.compiler.is_compiling() and lacking.any():
        at = lacking.nonzero()[0].tolist()
        raise ValueError(
            f"targets{at}={int(targets[tuple(at)])} is not in its kept set, and missing='raise' (as in strict mode): keep what the sampler recorded, or pass "
            "missing='include' (the target joins its set), 'full' (the row runs over the whole vocabulary) or 'mask'."
        )
    return mask


def check_kept(sets: TokenSets, targets: Tensor, mask: Tensor | None, vocab: int, missing: str | None, strict: bool) -> None:
    """Raise ValueError unless `sets` can be the kept sets of targets; in strict mode also for a target that joins its set without
    anybody having said so."""
    check_sets("kept", sets, targets, vocab)
    if missing is None and is_strict(strict):
        narrowed(sets, targets, mask, "raise")


def rows_with_sets(sets: TokenSets, targets: Tensor, read: Tensor | None, missing: str | None) -> KeptRows:
    """The rows of a vocabulary stage that have a set. `targets` of any shape, `read` bool [rows]: those that are looked at."""
    has = ~without_set(sets, targets, missing) if missing == "full" else None
    return KeptRows.of(sets, flat(targets).to(torch.int64), read, has)
