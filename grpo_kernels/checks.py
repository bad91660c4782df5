"""Refusals with one shape: the argument, the value got, the remedy."""

from __future__ import annotations

import math
import os
import sys

import torch

#: Bounds for "above 0" and "finite".
SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: {remedy}")


def require_number(name: str, value: object, remedy: str, low: float = -math.inf, high: float = math.inf) -> None:
    """A real number (no bool, no tensor, no string, not NaN) in [low, high]."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(is_number and low <= value <= high, name, value, remedy)  # type: ignore[operator]


def values_are_checked(tensor: torch.Tensor) -> bool:
    """Values (ids, temperatures, offsets) are checked on the CPU; on a GPU, where a look at them would stall the
    device, only with GRPO_KERNELS_CHECK=1 in the environment. Shapes, dtypes and devices are always checked. What
    torch.compile traces has no values; the operators look at them when they run."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" or os.environ.get("GRPO_KERNELS_CHECK", "0") == "1"
