"""Formulas for the kernels: a formula is run once with symbols in place of tensors, and what it did
becomes a straight-line program. C++ evaluates it for one row after the other (csrc/kernels.h); for
a GPU it is printed as a function of the fused kernel (core/backends/triton/launch.py).

A symbol is a number of a row (an input, or what follows from one), fp32, or a number of the whole
call (a parameter, or what follows from parameters alone), which stays a Python number, as it does
beside tensors. So a program gives what the formula gives in torch: each operation rounds alike, and
exp, log and tanh, which no two libraries round alike, differ by their last bit.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import math
import operator
import traceback
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .ops import ops

REMEDY = (
    "write it in arithmetic, comparisons and the names of `ops` (ops.where(condition, a, b) in"
    " place of `if`), with numbers as parameters"
)

#: Functions of numbers of the call, which are computed in Python. Those of rows have the same
#: names, see csrc/program.cpp.
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "neg": operator.neg, "abs": abs, "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "min": min, "max": max, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
#: The operations of rows in torch.
OF_ROWS: dict[str, Callable[..., Any]] = {
    **OF_NUMBERS, "min": ops.minimum, "max": ops.maximum, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "tanh": torch.tanh,
    "reciprocal": torch.reciprocal,
    "and": lambda a, b: (a != 0) & (b != 0), "or": lambda a, b: (a != 0) | (b != 0), "not": lambda a: a == 0,
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
}  # fmt: skip
#: How many operands an operation has, if not two.
OPERANDS = {
    **dict.fromkeys(("neg", "abs", "exp", "log", "sqrt", "tanh", "reciprocal", "not"), 1),
    "where": 3,
}
CONDITIONS = {"lt", "le", "eq", "ne", "and", "or", "not"}
OF_CONDITIONS = {"and", "or", "not", "where", "eq", "ne"}


class FormulaRefused(ValueError):
    """A formula is written in a way that a kernel cannot run."""


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """What `Tracer.program` makes.

    name      of the formulas in it.
    inputs    the names of its inputs, in the order of their registers.
    steps     (operation, registers a, b, c) of each instruction, 0 where it has fewer operands.
              Registers are counted over the numbers of a call, the inputs and the instructions.
    outputs   registers.
    sources   (operation, places) of each number of a call: a constant, a parameter, or what follows
              from the places of others.
    numbers_used  the places of those that are in registers.
    """

    name: str
    inputs: tuple[str, ...]
    steps: tuple[tuple[str, int, int, int], ...]
    outputs: tuple[int, ...]
    sources: tuple[tuple[str, tuple[Any, ...]], ...]
    numbers_used: tuple[int, ...]

    def numbers(self, parameters: Sequence[float]) -> list[float]:
        """The values of the number registers in a call with these parameters."""
        values: list[Any] = []
        for what, of in self.sources:
            if what == "constant":
                values.append(of[0])
            elif what == "parameter":
                values.append(parameters[of[0]])
            else:
                values.append(OF_NUMBERS[what](*(values[i] for i in of)))
        return [float(values[i]) for i in self.numbers_used]

    def __call__(
        self, numbers: Sequence[float], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Its outputs in torch."""
        registers: list[Any] = [*numbers, *inputs]
        for operation, *of in self.steps:
            registers.append(
                OF_ROWS[operation](*(registers[r] for r in of[: OPERANDS.get(operation, 2)]))
            )
        return [
            torch.as_tensor(registers[r], dtype=torch.float32).expand_as(inputs[0])
            for r in self.outputs
        ]


def _recorded(operation: str, swapped: bool = False) -> Callable[..., Any]:
    """A method of symbols:

    the operation of a symbol and, where it has two operands, another number, or of these `swapped`.
    """

    def method(self: Symbol, *other: Any) -> Symbol:
        return self.tracer.apply(operation, *(*other, self) if swapped else (self, *other))

    return method


class Symbol:
    """A placeholder for a number while a formula is traced."""

    __slots__ = ("condition", "in_row", "of", "operation", "tracer")

    def __init__(self, tracer: Tracer, operation: str, of: tuple[Any, ...], in_row: bool) -> None:
        self.tracer, self.operation, self.of, self.in_row = tracer, operation, of, in_row
        self.condition = operation in CONDITIONS

    __hash__ = object.__hash__

    __neg__, __abs__, __invert__ = map(_recorded, ("neg", "abs", "not"))
    __add__ = __radd__ = _recorded("add")
    __mul__ = __rmul__ = _recorded("mul")
    __and__ = __rand__ = _recorded("and")
    __or__ = __ror__ = _recorded("or")
    __sub__, __rsub__ = _recorded("sub"), _recorded("sub", swapped=True)
    __truediv__, __rtruediv__ = _recorded("div"), _recorded("div", swapped=True)
    __lt__, __gt__ = _recorded("lt"), _recorded("lt", swapped=True)
    __le__, __ge__ = _recorded("le"), _recorded("le", swapped=True)
    __eq__, __ne__ = _recorded("eq"), _recorded("ne")
    # Methods of tensors that functions of `ops` stand for.
    abs, exp, log, sqrt, tanh = map(_recorded, ("abs", "exp", "log", "sqrt", "tanh"))

    def clamp(self, min: Any = None, max: Any = None) -> Symbol:
        return self.tracer.clamped(self, min, max)

    def __pow__(self, exponent: Any) -> Symbol:
        if exponent not in (2, 3):
            raise FormulaRefused(f"** {exponent!r}: write products, or ops.exp and ops.log.")
        return self * self if exponent == 2 else self * self * self

    def __bool__(self) -> bool:
        raise FormulaRefused("a branch on a value: write ops.where(condition, a, b).")

    def __float__(self) -> float:
        raise FormulaRefused(
            "a value as a float of Python: pass what is made of it as a parameter."
        )

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        kinds: Any,
        given: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Symbol:
        named = dict(named or {})
        tracer = next(x.tracer for x in (*given, *named.values()) if isinstance(x, Symbol))
        if function is torch.clamp:
            return tracer.clamped(*given, **named)
        name = OF_TORCH.get(function)
        if name is None or named:
            raise FormulaRefused(
                f"torch.{getattr(function, '__name__', function)} is no operation of the kernels."
            )
        return tracer.apply(name, *given)


#: The functions of torch that `ops` stands for.
OF_TORCH: dict[Callable[..., Any], str] = {
    torch.exp: "exp", torch.log: "log", torch.sqrt: "sqrt", torch.abs: "abs", torch.where: "where", torch.minimum: "min",
    torch.maximum: "max", torch.tanh: "tanh",
}  # fmt: skip


class Tracer:
    """Makes symbols, records how each is computed, and makes a program that computes the requested
    ones.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Symbol] = {}
        self._inputs: dict[str, Symbol] = {}
        self._parameters = 0

    def input(self, name: str) -> Symbol:
        self._inputs[name] = self._symbol("input", (name,), True)
        return self._inputs[name]

    def parameter(self) -> Symbol:
        self._parameters += 1
        return self._symbol("parameter", (self._parameters - 1,), False)

    def _symbol(self, operation: str, of: tuple[Any, ...], in_row: bool) -> Symbol:
        key = (operation, *(id(x) if isinstance(x, Symbol) else repr(x) for x in of))
        return self._made.setdefault(key, Symbol(self, operation, of, in_row))

    def number(self, x: Any) -> Symbol:
        """A constant as a symbol."""
        if isinstance(x, Symbol):
            if x.tracer is not self:
                raise FormulaRefused("a number that the formula has kept from another call.")
            return x
        if isinstance(x, torch.Tensor) and x.dim() == 0:
            raise FormulaRefused("a tensor that the formula holds: pass it as a parameter.")
        if not isinstance(x, (bool, int, float)):
            raise FormulaRefused(f"a {type(x).__name__} among its numbers.")
        symbol = self._symbol("constant", (x,), False)
        symbol.condition = isinstance(x, bool)
        return symbol

    def apply(self, operation: str, *given: Any) -> Symbol:
        of = tuple(map(self.number, given))
        if not any(x.in_row for x in of):
            if operation not in OF_NUMBERS:
                raise FormulaRefused(f"{operation} of numbers alone, which torch refuses too.")
            return self._symbol(operation, of, False)
        conditions = {"and": of, "or": of, "not": of, "where": of[:1]}.get(operation, ())
        if not all(x.condition for x in conditions):
            raise FormulaRefused(f"{operation} of what is no condition.")
        if operation not in OF_CONDITIONS and all(x.condition for x in of):
            raise FormulaRefused(f"{operation} of conditions alone.")
        if operation == "div" and not of[0].in_row:  # as torch divides a number by a tensor
            return self.apply("mul", self._symbol("reciprocal", of[1:], True), of[0])
        symbol = self._symbol(operation, of, True)
        if operation == "where":
            symbol.condition = of[1].condition and of[2].condition
        return symbol

    def clamped(self, x: Any, min: Any = None, max: Any = None) -> Symbol:
        if min is not None:
            x = self.apply("max", x, min)
        return x if max is None else self.apply("min", x, max)

    def program(self, name: str, outputs: Sequence[Any]) -> Program:
        """The program that gives these symbols or numbers."""
        results = [self.number(x) for x in outputs]
        needed = {*map(id, results)}
        for x in reversed(self._made.values()):  # each was made after what it is of
            needed |= {*map(id, x.of)} if id(x) in needed else set()
        order = [x for x in self._made.values() if id(x) in needed]
        rows = [x for x in order if x.in_row and x.operation != "input"]
        numbers = [x for x in order if not x.in_row]
        place = {id(x): i for i, x in enumerate(numbers)}
        sources = [
            (x.operation, tuple(place[id(y)] if isinstance(y, Symbol) else y for y in x.of))
            for x in numbers
        ]
        read = {*map(id, results), *(id(y) for x in rows for y in x.of)}
        used = [x for x in numbers if id(x) in read]
        registers = {id(x): r for r, x in enumerate([*used, *self._inputs.values(), *rows])}
        steps = []
        for x in rows:
            a, b, c, *_ = *(registers[id(y)] for y in x.of), 0, 0, 0
            steps.append((x.operation, a, b, c))
        result_registers = tuple(registers[id(x)] for x in results)
        places = tuple(place[id(x)] for x in used)
        return Program(
            name, tuple(self._inputs), tuple(steps), result_registers, tuple(sources), places
        )


def refusal(name: str, error: Exception) -> str:
    """Why a formula could not be traced, with the line that caused it."""
    lines = ((line, frame.f_code) for frame, line in traceback.walk_tb(error.__traceback__))
    *_, where = (
        "",
        *(
            f" (line {line} of {code.co_name})"
            for line, code in lines
            if code.co_filename != __file__
        ),
    )
    said = (
        str(error).rstrip(".")
        if isinstance(error, FormulaRefused)
        else f"{type(error).__name__}: {error}"
    )
    return f"{name} cannot run in the kernels: {said}{where}. {REMEDY[0].upper()}{REMEDY[1:]}."


def same_numbers(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    """bool [n]: where both are NaN, the same infinity, or no further apart than `tolerance` times
    the expected size and the median size of those that are not 0. So the numbers of a tiny output
    are told apart like those of a large one.
    """
    sizes = expected.abs()
    some = sizes[sizes.isfinite() & (sizes > 0)]
    typical = some.median() if some.numel() else torch.zeros(())
    near = sizes.isfinite() & ((found - expected).abs() <= tolerance * (typical + sizes))
    return near | (found == expected) | (found.isnan() & expected.isnan())


#: What evaluates a program, with its numbers, on inputs.
Run = Callable[[Program, list[float], list[torch.Tensor]], list[torch.Tensor]]
#: Inputs to try formulas on, and what gives their outputs in torch, by name.
Trial = tuple[list[torch.Tensor], Callable[[], dict[str, Any]]]


@dataclass(eq=False)
class Made:
    """What was made of formulas: a program, or the reason why there is none. It holds none of them:
    a function of the user has globals, which may be large.
    """

    program: Program | str | None = None
    compared: bool = False  # with torch

    @classmethod
    def of(
        cls, keys: tuple[Hashable, ...], name: str, build: Callable[[Tracer], Sequence[Any]]
    ) -> Made:
        """That of formulas with these keys, made once unless one of them is None. `build`: (tracer)
        -> the outputs of the program `name`.
        """
        made = cls() if None in keys else _made_before(keys)
        if made.program is None:
            tracer = Tracer()
            try:
                made.program = tracer.program(name, build(tracer))
            except Exception as error:  # a formula may do anything with a symbol
                made.program = refusal(name, error)
        return made

    def checked(self) -> Program:
        """The program. Raises FormulaRefused where there is none."""
        assert self.program is not None
        if isinstance(self.program, str):
            raise FormulaRefused(self.program)
        return self.program

    def compare_once(self, run: Run, numbers: list[float], trial: Callable[[], Trial]) -> None:
        """Compare what `run` makes of the program with torch, unless it was before. Raises
        FormulaRefused where they differ: the formula does something with tensors that it does not
        do with symbols.
        """
        if self.compared:
            return
        program = self.checked()
        inputs, in_torch = trial()
        found = run(program, numbers, inputs)
        for (what, y), x in zip(in_torch().items(), found, strict=True):
            y = torch.as_tensor(y, dtype=torch.float32).expand_as(x)
            off = ~same_numbers(x, y, 1e-4)
            if off.any():
                i = int(off.nonzero()[0])
                at = ", ".join(
                    f"{name}={float(v[i]):.6g}"
                    for name, v in zip(program.inputs, inputs, strict=True)
                )
                raise FormulaRefused(
                    f"{program.name} gives {what} {float(x[i]):.6g} in the kernels and"
                    f" {float(y[i]):.6g} in torch, at {at}: it must do the same with every kind of"
                    " number that it is given."
                )
        self.compared = True


@functools.lru_cache(maxsize=512)
def _made_before(keys: tuple[Hashable, ...]) -> Made:
    """Empty at the first call with these keys."""
    return Made()


# ---- what a formula depends on, as a key: what was made of it (a program, a kernel) serves as long
# as the key is the same

#: Functions and types whose results follow from what they are given.
PURE = frozenset(
    {abs, all, any, bool, dict, divmod, enumerate, float, functools.partial, functools.reduce, int, isinstance, len, list, map, max,
     min, pow, range, reversed, round, sorted, str, sum, tuple, type, zip, torch.Tensor, torch.arange, torch.full_like,
     torch.ones_like, torch.zeros_like}
    | {f for module in (math, operator) for f in vars(module).values() if isinstance(f, types.BuiltinFunctionType)}
)  # fmt: skip
PACKAGE = __name__.removesuffix("formulas.program")
#: Instructions after which a name is not what the globals of a function have under it.
REBINDING = {dis.opmap[name] for name in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")}


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
    """Equal for formulas, and for what they keep, that give the same program: a function made anew
    has the same key while its code, its defaults, what it closes over and the values of the global
    names in it, those of its helpers included, are the same. None where this cannot be told, as of
    an object with methods. A key holds no function of the user.
    """
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
    parts = x if kind is tuple or kind is list else None
    if kind is dict:
        parts = x.items()
    elif kind is functools.partial:
        parts = x.func, x.args, x.keywords
    elif dataclasses.is_dataclass(x) and is_own(kind):
        parts = (getattr(x, field.name) for field in dataclasses.fields(x))
    if parts is not None:
        return kind, *[_key(y, seen) for y in parts]
    if isinstance(x, (type, types.BuiltinFunctionType)) and (
        is_own(x) or x in PURE or _is_of_tensors(x)
    ):
        return x
    raise _Unknown


def _is_of_tensors(x: Any) -> bool:
    """Whether it is a function of torch that is a method of tensors too, so not a random number,
    for example.
    """
    name = x.__name__
    return hasattr(torch.Tensor, name) and getattr(torch, name, None) is x


def _key_of_function(x: Any, seen: dict[int, int]) -> Hashable:
    if id(x) in seen:
        return "again", seen[id(x)]
    seen[id(x)] = len(seen)
    code, globals_, names = x.__code__, x.__globals__, _names_in(x.__code__)
    if names is None:
        raise _Unknown
    kept: list[Any] = [
        code,
        *[_key(y, seen) if y else None for y in (x.__defaults__, x.__kwdefaults__, x.__dict__)],
    ]
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


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], ...] | None:
    """The global names in a function and in the functions inside of it, each with the attributes
    that are asked of it. None if it changes what they mean.
    """
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
            names = _names_in(inner)
            if names is None:
                return None
            found.update(dict.fromkeys(names))
    return tuple(found)
