"""The random numbers of a process that everybody in it shares: torch's, Python's and NumPy's. A model may use them, and reward
functions do; sampling and the order of the data have generators of their own."""

from __future__ import annotations

import random
import sys
from typing import Any, cast

import torch

try:
    import numpy
except ModuleNotFoundError:  # torch works without
    numpy = None  # type: ignore[assignment]


def seed(value: int) -> None:
    """Seed all of them."""
    torch.manual_seed(value)
    random.seed(value)
    if numpy is not None:
        numpy.random.seed(value % 2**32)


def state(device: torch.device) -> dict[str, Any]:
    """Plain numbers and tensors, which a checkpoint can hold."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy is not None:
        kind, keys, *rest = cast(Any, numpy.random.get_state())
        states["numpy"] = (kind, keys.tolist(), *rest)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_state(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        if numpy is None:
            print("the checkpoint has a random state of NumPy, which is not installed here", file=sys.stderr)
        else:
            numpy.random.set_state(tuple(states["numpy"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
