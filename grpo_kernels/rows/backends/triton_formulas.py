"""Compiles formulas written for torch into Triton functions: the same source, with another `ops`."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Hashable
from typing import Any

import triton
import triton.language as tl

from ...formulas.keys import key_of
from ...formulas.ops import ops
from ...formulas.program import FormulaRefused


class _Ops:
    """The `ops` that formulas get inside Triton."""

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def log(x):
        return tl.log(x)

    @triton.jit
    def sqrt(x):
        return tl.sqrt(x)

    @triton.jit
    def abs(x):
        return tl.abs(x)

    @triton.jit
    def sigmoid(x):
        return tl.sigmoid(x)

    @triton.jit
    def where(condition, a, b):
        return tl.where(condition, a, b)

    # By default Triton drops NaN, which would hide that a row is broken.

    @triton.jit
    def minimum(a, b):
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def maximum(a, b):
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


_ops = types.ModuleType("triton_ops")  # Triton looks attributes up in modules only
vars(_ops).update((name, f) for name, f in vars(_Ops).items() if name in vars(ops))


@functools.lru_cache(maxsize=256)
def _made_before(key: Hashable) -> list[Any]:
    """Where the formula with this key is kept; empty at the first call."""
    return []


def compiled_formula(function: Callable[..., Any]) -> Any:
    """A formula written with `ops` as a Triton function: the same source, with `ops` for the GPU.

    Plain functions that it calls are converted too, and numbers that it refers to; it is compiled again when they change. Raises
    FormulaRefused for what Triton cannot compile: lambdas, closures, callable objects, functions without a source file."""
    if isinstance(function, triton.runtime.jit.JITCallable):
        return function
    key = key_of(function)
    made = [] if key is None else _made_before(key)
    if not made:
        made.append(_compiled(function))
    return made[0]


def _compiled(function: Callable[..., Any]) -> Any:
    name = getattr(function, "__qualname__", repr(function))
    remedy = "a formula for the fused kernel is a module-level function, written in a file with the names of surrogates.ops."
    if not isinstance(function, types.FunctionType) or function.__name__ == "<lambda>":
        raise FormulaRefused(f"{name} cannot be compiled by Triton: {remedy}")
    if function.__closure__:
        free = ", ".join(function.__code__.co_freevars)
        raise FormulaRefused(f"{name} closes over {free}: pass numbers as parameters; {remedy}")
    try:
        source = inspect.getsource(function)
    except OSError:
        raise FormulaRefused(f"{name} has no source file: {remedy}") from None
    definition = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(definition, ast.FunctionDef)
    used = {node.id for statement in definition.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {"tl": tl}  # the interpreter reads it
    for used_name in sorted((used & function.__globals__.keys()).difference(function.__code__.co_varnames)):
        value = function.__globals__[used_name]
        if value is ops:
            names[used_name] = _ops
        elif value is function:
            raise FormulaRefused(f"{name} calls itself: {remedy}")
        elif isinstance(value, types.FunctionType):
            names[used_name] = compiled_formula(value)
        elif isinstance(value, (bool, int, float)):
            names[used_name] = tl.constexpr(value)
        else:
            raise FormulaRefused(f"{name} refers to {used_name}, a {type(value).__name__}: {remedy}")
    clone = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    clone.__module__, clone.__qualname__ = function.__module__, function.__qualname__
    compiled = triton.jit(clone)
    if isinstance(compiled, triton.runtime.JITFunction):  # the interpreter runs the function itself
        # Triton evaluates annotations, whose names (torch, Any) a kernel does not know.
        arguments = definition.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            argument.annotation = None
        definition.returns = None
        compiled._unsafe_update_src(ast.unparse(definition))
        # Triton 3.5 identifies a compiled kernel by the names of its formulas; two formulas may have the same name.
        clone.__qualname__ += f"_{compiled.cache_key[:16]}"
    return compiled
