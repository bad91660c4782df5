"""Keys of functions, by which traced programs are cached.

A program or a kernel is traced from the functions of an objective, and used again while their keys
are equal. A user may define the same function again at each step, or change a global that it reads.
So the key of a user's function contains its code, its defaults, the values of its closure and the
values of the global names in it, including those of its helper functions. A key does not keep the
function itself alive, because its globals may be large.
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
#: Instructions that change what a global name means while the function runs.
REBINDING = {dis.opmap[name] for name in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")}


class _NoKey(Exception):
    """A function may depend on something that is known only by running it, so it has no key."""


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
    """Return the values that can be called and are not functions or classes of this package."""
    return [x for x in values if callable(x) and not is_own(x)]


def name_of_function(function: Any) -> str:
    """Return the qualified name of a function, or the repr of another object."""
    return getattr(function, "__qualname__", repr(function))


def key_of(x: object) -> Hashable | None:
    """Return a key of a function or value. Things with equal keys are traced into the same program.

    So a program that was traced before can be used again if the key is the same. Return None if
    there is no such key, for example for an object with methods: then the program must be traced
    again at each call.
    """
    try:
        return _key(x, {})
    except (_NoKey, RecursionError):  # RecursionError: a list that contains itself
        return None


def _key(x: Any, function_numbers: dict[int, int]) -> Hashable:
    """Return the key of a function or value x, which may be a part of a larger key.

    Raises _NoKey if x is of a kind that may behave differently at each call.

    function_numbers   the functions in the larger key so far, see `_key_of_function`
    """
    kind = type(x)
    if kind is types.FunctionType:
        return x if is_own(x) else _key_of_function(x, function_numbers)
    if x is None or isinstance(x, (bool, int, str)):
        return kind, x
    if isinstance(x, float):
        return kind, x.hex()  # distinguishes 0.0 from -0.0, and is equal for NaN
    parts = _parts_of(x)
    if parts is not None:
        return kind, *[_key(part, function_numbers) for part in parts]
    if isinstance(x, (type, types.BuiltinFunctionType)):
        if is_own(x) or x in PURE or _is_tensor_function(x):
            return x
    raise _NoKey


def _parts_of(x: Any) -> Iterable[Any] | None:
    """Return the parts of a container, from which its key is made, or None for another object.

    Containers are tuples, lists, dictionaries, `functools.partial` and dataclasses of this package.
    """
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


def _key_of_function(function: Any, function_numbers: dict[int, int]) -> Hashable:
    """Return a key of everything that the results of a user's function depend on.

    Two functions with equal keys compute the same from the same arguments, so a program that was
    traced from one of them can be used for the other. The key contains the code, the defaults, the
    attributes, the values of the closure and the values of the global names in the code. A helper
    function among these values adds its own key.

    function_numbers   id(function) -> its number, for the functions that are part of the larger
                       key already; the function is added. If a function occurs in a key a second
                       time (it is recursive, or two functions call it), its number stands for it.

    Raises _NoKey if a value that the function depends on has no key or is not known.
    """
    if id(function) in function_numbers:
        return "function of this key", function_numbers[id(function)]
    function_numbers[id(function)] = len(function_numbers)
    global_names = _global_names(function.__code__)
    if global_names is None:
        raise _NoKey
    key: list[Any] = [function.__code__]
    for values in (function.__defaults__, function.__kwdefaults__, function.__dict__):
        key.append(_key(values, function_numbers) if values else None)
    for cell in function.__closure__ or ():
        if cell == types.CellType():  # an empty cell: the variable has no value yet
            raise _NoKey
        key.append(_key(cell.cell_contents, function_numbers))
    for name in global_names:
        key.append(_key(_value_of_name(function, name), function_numbers))
    return tuple(key)


def _value_of_name(function: Any, name: tuple[str, ...]) -> Any:
    """Return the value of a global name in a function, such as ("math", "pi") for math.pi.

    The first part is looked up in the function's globals and then in its builtins. Attributes are
    followed only as long as the value is a module. Raises _NoKey if a module lacks the attribute.
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
    """Return the global names that a function and its inner functions read, with attributes.

    ("math", "pi") stands for math.pi. Return None if the code contains an import, or assigns to or
    deletes a global: then the values before the call do not tell what the function reads.
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
