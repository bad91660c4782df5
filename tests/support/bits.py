"""Bitwise comparison of tensors, and the largest errors that checks have measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shape, dtype and bits are equal. NaN equals itself, -0 does not equal 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # Equal bits are equal integers, also for NaN.
    integer_types = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integer_type = integer_types[a.element_size()]
    return torch.equal(a.contiguous().view(integer_type), b.contiguous().view(integer_type))


def snapshot(**tensors: Tensor | None) -> Callable[[], None]:
    """Copy tensors, and return a function that asserts that their bits have not changed.

    tensors   by a name for the error message; None is ignored
    """
    copies = {name: x.detach().clone() for name, x in tensors.items() if isinstance(x, Tensor)}

    def assert_unchanged() -> None:
        """Assert that each of the tensors has the bits of its copy."""
        for name, copy in copies.items():
            tensor = tensors[name]
            assert tensor is not None and same_bits(copy, tensor.detach()), f"{name} was modified"

    return assert_unchanged


#: Errors against float64 that checks have seen, for the table of benchmarks/README.md.
LARGEST: dict[str, float] = {}


def note(what: str, errors: torch.Tensor) -> None:
    """Record the largest of these errors in LARGEST, if it is the largest so far under its name.

    what     the name: a statistic, or "gradients"
    errors   of any shape. NaN and infinite errors are left out.
    """
    errors = errors[errors.isfinite()]
    if errors.numel():
        LARGEST[what] = max(LARGEST.get(what, 0.0), float(errors.max()))
