"""Keys of functions, by which traced programs are cached.

Tracing the functions of an objective into a program takes time, so the program is cached under a
key of these functions. A user may define the same function again at each step, which gives the same
key, or change a global that the function reads, which gives another key. So the key of a user's
function contains its code, its defaults, the values of its closure and the values of the global
names in it, and the same of its helper functions. A key does not keep the function itself alive,
because the globals of the function may be large.
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
    """Raised for a function without a key: what it depends on is known only by running it."""


class _Undefined:
    """Stands for the value of a global name that is not defined."""


def is_of_package(x: object) -> bool:
    """Return whether x is a function or a class of this package, and not a closure.

    Such an object does not change while a process runs, and it is not defined again. A closure is
    defined again at each call of the function around it.
    """
    return (
        isinstance(x, (types.FunctionType, type))
        and str(x.__module__).startswith(PACKAGE)
        and not getattr(x, "__closure__", None)
    )


def users_functions(values: Iterable[Any]) -> list[Any]:
    """Return the callables among `values` that a user wrote, which are not of this package.

    values   a mixture of functions, numbers, strings and None, from which a loss formula is made
    """
    return [x for x in values if callable(x) and not is_of_package(x)]


def name_of_function(function: Any) -> str:
    """Return the qualified name of a function, or the repr of another object."""
    return getattr(function, "__qualname__", repr(function))


def key_of(x: object) -> Hashable | None:
    """Return the cache key of a function, or of a value such as a number or a tuple.

    Kernel code is generated from the functions of a loss. Functions with equal keys give the same
    code, so the code is cached by these keys.

    Return None if x has no key. An example is an instance of a class of the user, which may behave
    differently at each call. The code must then be generated at each call.
    """
    try:
        return _key(x, {})
    except (_NoKey, RecursionError):  # RecursionError: a list that contains itself
        return None


def _key(x: Any, function_numbers: dict[int, int]) -> Hashable:
    """Return the key of x: a function, or a value that a function depends on.

    A function's key contains the keys of all values that the function depends on, so this function
    calls itself through `_key_of_function` and for the parts of containers.

    function_numbers   id(function) -> number, for each function of the user that is in the key
                       which is being made. Functions in the key of x are added.

    Raises _NoKey if x has no key.
    """
    kind = type(x)
    if kind is types.FunctionType:
        # A function of this package never changes, so it is its own key.
        return x if is_of_package(x) else _key_of_function(x, function_numbers)
    if x is None or isinstance(x, (bool, int, str)):
        return kind, x  # with its type, because 1 == True
    if isinstance(x, float):
        # Unlike x itself, the text distinguishes 0.0 from -0.0, and is equal for two NaNs.
        return kind, x.hex()
    parts = _parts_of(x)
    if parts is not None:
        return kind, *[_key(part, function_numbers) for part in parts]
    if isinstance(x, (type, types.BuiltinFunctionType)):
        # A class of this package, a function such as max or math.exp, or a function of torch such
        # as torch.exp. Its results depend on its arguments alone, so it is its own key.
        if is_of_package(x) or x in PURE or _is_tensor_function(x):
            return x
    raise _NoKey  # for example a tensor, or an instance of a class of the user


def _parts_of(x: Any) -> Iterable[Any] | None:
    """Return the parts of a container, whose keys make up the key of the container.

        tuple or list                   its elements
        dictionary                      its items, which are pairs (key, value)
        functools.partial               its function, arguments and keyword arguments
        a dataclass of this package     the values of its fields

    Return None if x is no such container. A subclass of tuple, list or dict is none, because it may
    have data or methods of its own.
    """
    kind = type(x)
    if kind is tuple or kind is list:
        return x
    if kind is dict:
        return x.items()
    if kind is functools.partial:
        return x.func, x.args, x.keywords
    if dataclasses.is_dataclass(x) and is_of_package(kind):
        return [getattr(x, field.name) for field in dataclasses.fields(x)]
    return None


def _is_tensor_function(x: Any) -> bool:
    """Return whether x is a function of torch that is also a method of tensors, such as torch.exp.

    The results of such a function are taken to depend on its arguments alone. Functions without a
    tensor argument, such as torch.rand, are no methods of tensors.

    x   a class or a builtin function
    """
    name = x.__name__
    return hasattr(torch.Tensor, name) and getattr(torch, name, None) is x


def _key_of_function(function: Any, function_numbers: dict[int, int]) -> Hashable:
    """Return a key of everything that the results of a user's function depend on.

    The key contains the code of the function, its defaults, its attributes, the values in its
    closure, and the values of the global names in its code. If one of these values is a function,
    such as a helper, its key is made in the same way, and becomes a part of this key.

    function_numbers   id(function) -> number, for each function that the whole key contains so far.
                       This function is added. If a function occurs a second time, because it is
                       recursive or because two functions call it, its number is its key. So the key
                       of a recursive function is finite.

    Raises _NoKey if a value that the function depends on has no key or is not known.
    """
    if id(function) in function_numbers:
        return "function that occurred before", function_numbers[id(function)]
    function_numbers[id(function)] = len(function_numbers)
    global_names = _global_names(function.__code__)
    if global_names is None:  # the function itself changes what a name means
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
    """Return the value that a global name has in a function.

    The first part of the name is looked up in the function's globals and then in its builtins. If
    neither has it, the value is `_Undefined`. The other parts are attributes. They are followed as
    long as the value is a module: the value of ("CONFIG", "width") is the object CONFIG.

    name   the global name and the attributes that follow it: ("math", "pi") for math.pi

    Raises _NoKey if a module lacks the attribute.
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
    """Return the global names that a function and its inner functions read, without duplicates.

    A name is returned with the attributes that follow it: ("math", "pi") for math.pi. In the
    bytecode it is a LOAD_GLOBAL instruction, directly followed by a LOAD_ATTR for each attribute.

    Return None if the code contains an import, or assigns to or deletes a global. A name may then
    have another value while the function runs than it had before the call.

    code   the code object of a function
    """
    names: dict[tuple[str, ...], None] = {}  # an ordered set
    name: tuple[str, ...] = ()  # the name that the last instructions have loaded; () for none
    for instruction in dis.get_instructions(code):
        if instruction.opcode in REBINDING:
            return None
        if instruction.opname in ("EXTENDED_ARG", "CACHE"):  # part of another instruction
            continue
        if name and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = (*name, instruction.argval)
            continue
        if name:  # any other instruction ends the name
            names[name] = None
        name = ()
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            name = (instruction.argval,)
    for inner in code.co_consts:  # code objects among the constants are inner functions
        if isinstance(inner, types.CodeType):
            inner_names = _global_names(inner)
            if inner_names is None:
                return None
            names.update(dict.fromkeys(inner_names))
    return tuple(names)
