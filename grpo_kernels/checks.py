"""Checks of arguments. Every message names the argument, its value and the remedy."""

from __future__ import annotations

import difflib
import math
import numbers
import sys
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

import torch

#: Bounds for "above 0" and "finite".
SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: {remedy}")


def require_number(name: str, value: object, remedy: str, low: float = -math.inf, high: float = math.inf) -> None:
    """A real number (of Python or NumPy; no bool, no tensor, no string, not NaN) in [low, high]."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(is_number and low <= as_number(value) <= high, name, value, remedy)


def require_one_of(name: str, value: object, known: Collection[str]) -> None:
    """One of the names that are known; the message has the nearest of them."""
    if value in known:
        return
    require(False, name, value, f"it must be one of {', '.join(known)}.{nearest(value, known)}")


def nearest(value: object, known: Iterable[str]) -> str:
    """ " Did you mean ...?", or "" where no name is near."""
    near = difflib.get_close_matches(str(value).lower(), list(known), 1)
    return f" Did you mean {near[0]}?" if near else ""


def as_number(value: Any) -> Any:
    """A number of NumPy as Python's; anything else as it is."""
    return value.item() if isinstance(value, numbers.Real) and hasattr(value, "item") else value


def require_whole(name: str, value: object, remedy: str, low: int = 1) -> None:
    """A whole number (of Python or NumPy; no bool) of at least `low`."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(whole and value >= low, name, value, remedy)  # type: ignore[operator]


def require_clip_widths(eps_low: float, eps_high: float) -> None:
    """Those of a ratio that is clipped to [1 - eps_low, 1 + eps_high]."""
    require_number("eps_low", eps_low, "the lower clip width is a number in [0, 1].", 0, 1)
    require_number("eps_high", eps_high, "the upper clip width is a finite number >= 0.", 0, LARGEST)


def describe(spec: Any) -> str:
    """The repr of a dataclass or named tuple that holds tensors: their dtypes and shapes, not their values; fields of None are left
    out."""
    names = getattr(spec, "_fields", None) or [f.name for f in fields(spec) if f.repr]
    given = {name: getattr(spec, name) for name in names if getattr(spec, name) is not None}

    def text(x: Any) -> str:
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

    return f"{type(spec).__name__}({', '.join(f'{name}={text(x)}' for name, x in given.items())})"
