"""What a formula depends on, as a key: what was made of a formula (a program, a kernel) serves as long as the key is the same."""

from __future__ import annotations

import dataclasses
import dis
import functools
import math
import operator
import types
from collections.abc import Hashable
from typing import Any

import torch

#: Functions and types whose results follow from what they are given.
PURE = frozenset(
    {abs, all, any, bool, dict, divmod, enumerate, float, functools.partial, functools.reduce, int, isinstance, len, list, map, max,
     min, pow, range, reversed, round, sorted, str, sum, tuple, type, zip, torch.Tensor}
    | {f for module in (math, operator) for f in vars(module).values() if isinstance(f, types.BuiltinFunctionType)}
)  # fmt: skip
PACKAGE = __name__.removesuffix("formulas.keys")
#: Instructions after which a name is not what the globals of a function have under it.
REBINDING = {dis.opmap[name] for name in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")}
_names: dict[int, tuple[types.CodeType, tuple[tuple[str, ...], ...] | None]] = {}


class _Unknown(Exception):
    """What a formula depends on cannot be told without running it."""


def is_own(x: object) -> bool:
    """Whether x is a function or a class of this package, which nobody defines again."""
    return (
        isinstance(x, (types.FunctionType, type))
        and str(x.__module__).startswith(PACKAGE)
        and not getattr(x, "__closure__", None)
    )


def key_of(x: object) -> Hashable | None:
    """Equal for formulas, and for what they keep, that give the same program: a function made anew has the same key while its
    code, its defaults, what it closes over and the values of the global names in it, those of its helpers included, are the same.
    None where this cannot be told, as of an object with methods. A key holds no function of the user."""
    try:
        return _key(x, {})
    except (_Unknown, RecursionError):  # a list that contains itself
        return None


def _key(x: Any, seen: dict[int, int]) -> Hashable:
    """`seen`: which functions have their key further to the left already, and where."""
    kind = type(x)
    if kind is types.FunctionType:
        return x if is_own(x) else _key_of_function(x, seen)
    if x is None or isinstance(x, (bool, int, str)):
        return kind, x
    if isinstance(x, float):
        return kind, x.hex()  # tells 0.0 from -0.0, and is equal for NaN
    if kind is tuple or kind is list:
        return kind, *[_key(y, seen) for y in x]
    if kind is dict:
        return kind, *[(_key(name, seen), _key(y, seen)) for name, y in x.items()]
    if kind is functools.partial:
        return kind, _key(x.func, seen), _key(x.args, seen), _key(x.keywords, seen)
    if dataclasses.is_dataclass(x) and is_own(kind):
        return kind, *[_key(getattr(x, field.name), seen) for field in dataclasses.fields(x)]
    if isinstance(x, (type, types.BuiltinFunctionType)) and (is_own(x) or x in PURE or _is_of_tensors(x)):
        return x
    raise _Unknown


def _is_of_tensors(x: Any) -> bool:
    """Whether it is a function of torch that is a method of tensors too, so not a random number, for example."""
    name = x.__name__
    return hasattr(torch.Tensor, name) and getattr(torch, name, None) is x


def _key_of_function(x: Any, seen: dict[int, int]) -> Hashable:
    if id(x) in seen:
        return "again", seen[id(x)]
    seen[id(x)] = len(seen)
    code, globals_, names = x.__code__, x.__globals__, _names_in(x.__code__)
    if names is None:
        raise _Unknown
    kept: list[Any] = [code, *[_key(y, seen) if y else None for y in (x.__defaults__, x.__kwdefaults__, x.__dict__)]]
    for cell in x.__closure__ or ():
        if cell == types.CellType():  # a name that has no value yet
            raise _Unknown
        kept.append(_key(cell.cell_contents, seen))
    for name, *attributes in names:
        value = globals_[name] if name in globals_ else x.__builtins__.get(name, _Unknown)
        for attribute in attributes:
            if type(value) is not types.ModuleType:
                break
            if attribute not in vars(value):
                raise _Unknown
            value = vars(value)[attribute]
        kept.append(_key(value, seen))
    return tuple(kept)


def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], ...] | None:
    """The global names in a function and in the functions inside of it, each with the attributes that are asked of it. None if it
    changes what they mean."""
    known = _names.get(id(code))
    if known is None:  # an id is not given again while its code is kept here
        if len(_names) >= 1024:
            _names.clear()
        known = _names[id(code)] = code, _read(code)
    return known[1]


def _read(code: types.CodeType) -> tuple[tuple[str, ...], ...] | None:
    found: dict[tuple[str, ...], None] = {}
    path: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opcode in REBINDING:
            return None
        if step.opname in ("EXTENDED_ARG", "CACHE"):
            continue
        if path and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, step.argval)
            continue
        if path:
            found[path] = None
        path = (step.argval,) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names = _read(inner)
            if names is None:
                return None
            found.update(dict.fromkeys(names))
    return tuple(found)
