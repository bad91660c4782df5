"""Refusals with one shape: the argument, the value got, the remedy."""

from __future__ import annotations

import math
import sys

#: Bounds for "above 0" and "finite".
SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: {remedy}")


def require_number(name: str, value: object, remedy: str, low: float = -math.inf, high: float = math.inf) -> None:
    """A real number (no bool, no tensor, no string, not NaN) in [low, high]."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(is_number and low <= value <= high, name, value, remedy)  # type: ignore[operator]
