"""The largest errors against float64 that checks have seen, for the table of docs/gpu.md."""

from __future__ import annotations

import torch

LARGEST: dict[str, float] = {}


def note(what: str, errors: torch.Tensor) -> None:
    """Remembers the largest of these, if it is the largest so far."""
    errors = errors[errors.isfinite()]
    if errors.numel():
        LARGEST[what] = max(LARGEST.get(what, 0.0), float(errors.max()))
