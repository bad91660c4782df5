"""Bitwise comparison of tensors, and the largest errors that checks have measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shape, dtype and bits are equal. NaN equals itself, -0 does not equal 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def snapshot(**tensors: Tensor | None) -> Callable[[], None]:
    """Copy tensors, and return a function that asserts that their bits have not changed."""
    before = {k: v.detach().clone() for k, v in tensors.items() if isinstance(v, Tensor)}

    def check() -> None:
        for name, old in before.items():
            new = tensors[name]
            assert new is not None and same_bits(old, new.detach()), f"{name} was modified"

    return check


#: Errors against float64 that checks have seen, for the table of benchmarks/README.md.
LARGEST: dict[str, float] = {}


def note(what: str, errors: torch.Tensor) -> None:
    """Record the largest of these errors, if it is the largest so far under this name."""
    errors = errors[errors.isfinite()]
    if errors.numel():
        LARGEST[what] = max(LARGEST.get(what, 0.0), float(errors.max()))
