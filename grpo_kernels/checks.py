"""Checks of arguments. Every message names the argument, its value and the remedy."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import sys
import warnings
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import torch

C = TypeVar("C", bound="Checked")

#: Bounds for "above 0" and "finite".
SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max

_warned: set[str] = set()


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


def near_name(value: object, known: Iterable[str]) -> str:
    """The known name that a misspelt one is likely to mean; "" where none is near or one of its words."""
    text, names = str(value).lower(), list(known)
    near = difflib.get_close_matches(text, names, 1) or [name for name in names if name in text.split("_")]
    return near[0] if near else ""


def nearest(value: object, known: Iterable[str]) -> str:
    """ " Did you mean ...?", or "" where no name is near."""
    name = near_name(value, known)
    return f" Did you mean {name}?" if name else ""


def refuse_unknown(owner: str, given: Iterable[str], known: Collection[str], remedy: str = "") -> None:
    """Raise TypeError for the first of the keywords `given` that `owner` does not know; the message has the nearest it knows."""
    for name in given:
        if name not in known:
            remedy = remedy or f"It has {', '.join(known) or 'none'}."
            raise TypeError(f"{name!r} is no argument of {owner}.{nearest(name, known)} {remedy}")


class Checked:
    """The base of dataclasses. The constructor says which field a misspelt keyword means, and checks fields that are numbers in a
    range, or what their default is; NumPy's become Python's."""

    #: (fields, remedy, lowest, highest).
    ranges: ClassVar[tuple[tuple[Any, ...], ...]] = ()

    def __new__(cls: type[C], *values: Any, **named: Any) -> C:
        # The constructor of a user's subclass may take other names than the fields.
        code: Any = getattr(cls.__init__, "__code__", None)
        if named and code is not None and not code.co_flags & inspect.CO_VARKEYWORDS:
            refuse_unknown(cls.__name__, named, list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for names, remedy, *bounds in self.ranges:
            for name in names.split():
                value = getattr(self, name)
                if value is not getattr(type(self), name, self):
                    require_number(name, value, remedy, *bounds)
                    object.__setattr__(self, name, as_number(value))


def warn_once(message: str) -> None:
    """Issue a RuntimeWarning once per process and message, at the line that called this package."""
    if message not in _warned:
        _warned.add(message)
        inside, frame, level = (__name__.partition(".")[0], "torch"), sys._getframe(1), 2
        while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in inside:
            frame, level = frame.f_back, level + 1
        warnings.warn(message, RuntimeWarning, stacklevel=level)


def as_number(value: Any) -> Any:
    """A number of NumPy as Python's; anything else as it is."""
    return value.item() if isinstance(value, numbers.Real) and hasattr(value, "item") else value


def require_whole(name: str, value: object, remedy: str, low: int = 1) -> None:
    """A whole number (of Python or NumPy; no bool) of at least `low`."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(whole and value >= low, name, value, remedy)  # type: ignore[operator]


def check_temperature(t: Any) -> None:
    """Raise ValueError unless t can be a temperature: a finite number above 0, or a tensor of floats without gradient."""
    if not isinstance(t, torch.Tensor):
        require_number("temperature", t, "it divides the logits and must be a finite number above 0.", SMALLEST, LARGEST)
        return
    if not t.is_floating_point():
        raise ValueError(f"temperature has dtype {t.dtype}: pass a floating-point tensor.")
    if t.requires_grad:
        raise ValueError("temperature requires grad, but no gradient flows to it: pass temperature.detach().")


def describe(spec: Any) -> str:
    """The repr of a dataclass or named tuple that holds tensors: their dtypes and shapes, not their values; fields of None are left
    out."""
    names = getattr(spec, "_fields", None) or [f.name for f in fields(spec) if f.repr]
    given = {name: getattr(spec, name) for name in names if getattr(spec, name) is not None}

    def text(x: Any) -> str:
        if isinstance(x, dict):
            return f"{{{', '.join(f'{name}: {text(value)}' for name, value in x.items())}}}"
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

    return f"{type(spec).__name__}({', '.join(f'{name}={text(x)}' for name, x in given.items())})"


#: What to do with a target outside of its set: put it in, take the whole vocabulary, mask the row, or refuse.
MISSING = ("include", "full", "mask", "raise")


def check_missing(missing: object) -> None:
    require(missing in MISSING, "missing", missing, f"it must be one of {', '.join(map(repr, MISSING))}.")
