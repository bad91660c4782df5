"""Keys of functions: whatever was made of a function serves as long as its key is the same.

A program or a kernel is made of the functions of an objective. Functions of the user may be defined
again at each step, or read globals that change. The key of such a function contains its code, its
defaults, the values that it closes over and those of the global names in it, its helpers included.
A key holds no function of the user, whose globals may be large.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import math
import operator
import types
from collections.abc import Hashable, Iterable
from typing import Any

import torch

BUILTIN_FUNCTIONS_OF_MODULES = {
    function
    for module in (math, operator)
    for function in vars(module).values()
    if isinstance(function, types.BuiltinFunctionType)
}
#: Functions and types whose results depend on their arguments alone.
PURE = frozenset(
    {
        abs,
        all,
        any,
        bool,
        dict,
        divmod,
        enumerate,
        float,
        functools.partial,
        functools.reduce,
        int,
        isinstance,
        len,
        list,
        map,
        max,
        min,
        pow,
        range,
        reversed,
        round,
        sorted,
        str,
        sum,
        tuple,
        type,
        zip,
        torch.Tensor,
        torch.arange,
        torch.full_like,
        torch.ones_like,
        torch.zeros_like,
    }
    | BUILTIN_FUNCTIONS_OF_MODULES
)
PACKAGE = __name__.removesuffix("formulas.formula_keys")
#: Instructions after which a name is not what the globals of a function have under it.
REBINDING = {dis.opmap[name] for name in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")}


class _NoKey(Exception):
    """What a function depends on cannot be told without running it."""


class _Undefined:
    """Stands for the value of a global name that has none."""


def is_own(x: object) -> bool:
    """Return whether x is a function or class of this package, which is never defined again."""
    return (
        isinstance(x, (types.FunctionType, type))
        and str(x.__module__).startswith(PACKAGE)
        and not getattr(x, "__closure__", None)
    )


def users_functions(values: Iterable[Any]) -> list[Any]:
    """Return those of the values that are functions of the user."""
    return [x for x in values if callable(x) and not is_own(x)]


def name_of_function(function: Any) -> str:
    """Return the qualified name of a function, or the repr of another object."""
    return getattr(function, "__qualname__", repr(function))


def key_of(x: object) -> Hashable | None:
    """Return a key that is equal for functions, and for values, that give the same program.

    None if this cannot be told, for example for an object with methods.
    """
    try:
        return _key(x, {})
    except (_NoKey, RecursionError):  # RecursionError: a list that contains itself
        return None


def _key(x: Any, places: dict[int, int]) -> Hashable:
    """Return the key of a function or a value.

    places   the functions whose keys are part of the same key already: id -> how many were before
    """
    kind = type(x)
    if kind is types.FunctionType:
        return x if is_own(x) else _key_of_function(x, places)
    if x is None or isinstance(x, (bool, int, str)):
        return kind, x
    if isinstance(x, float):
        return kind, x.hex()  # distinguishes 0.0 from -0.0, and is equal for NaN
    parts = _parts_of(x)
    if parts is not None:
        return kind, *[_key(part, places) for part in parts]
    if isinstance(x, (type, types.BuiltinFunctionType)):
        if is_own(x) or x in PURE or _is_tensor_function(x):
            return x
    raise _NoKey


def _parts_of(x: Any) -> Iterable[Any] | None:
    """Return the parts that make up a container, None if x is none whose parts are known."""
    kind = type(x)
    if kind is tuple or kind is list:
        return x
    if kind is dict:
        return x.items()
    if kind is functools.partial:
        return x.func, x.args, x.keywords
    if dataclasses.is_dataclass(x) and is_own(kind):
        return [getattr(x, field.name) for field in dataclasses.fields(x)]
    return None


def _is_tensor_function(x: Any) -> bool:
    """Return whether x is a function of torch that tensors have as a method.

    Random numbers, for example, are not among these functions.
    """
    name = x.__name__
    return hasattr(torch.Tensor, name) and getattr(torch, name, None) is x


def _key_of_function(function: Any, places: dict[int, int]) -> Hashable:
    """Return the key of a function of the user."""
    if id(function) in places:
        return "again", places[id(function)]
    places[id(function)] = len(places)
    names = _global_names(function.__code__)
    if names is None:
        raise _NoKey
    key: list[Any] = [function.__code__]
    for values in (function.__defaults__, function.__kwdefaults__, function.__dict__):
        key.append(_key(values, places) if values else None)
    for cell in function.__closure__ or ():
        if cell == types.CellType():  # a name that has no value yet
            raise _NoKey
        key.append(_key(cell.cell_contents, places))
    for name in names:
        key.append(_key(_value_of_name(function, name), places))
    return tuple(key)


def _value_of_name(function: Any, name: tuple[str, ...]) -> Any:
    """Return the value of a global name, such as ("math", "pi"), as a function sees it.

    Attributes are followed through modules only.
    """
    first, *attributes = name
    if first in function.__globals__:
        value = function.__globals__[first]
    else:
        value = function.__builtins__.get(first, _Undefined)
    for attribute in attributes:
        if type(value) is not types.ModuleType:
            break
        if attribute not in vars(value):
            raise _NoKey
        value = vars(value)[attribute]
    return value


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[tuple[str, ...], ...] | None:
    """Return the global names in a function and its inner functions, with their attributes.

    ("math", "pi") stands for math.pi. None if the function changes what a name means.
    """
    names: dict[tuple[str, ...], None] = {}
    name: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opcode in REBINDING:
            return None
        if step.opname in ("EXTENDED_ARG", "CACHE"):
            continue
        if name and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = (*name, step.argval)
            continue
        if name:
            names[name] = None
        name = (step.argval,) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inner_names = _global_names(inner)
            if inner_names is None:
                return None
            names.update(dict.fromkeys(inner_names))
    return tuple(names)
