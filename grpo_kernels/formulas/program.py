"""Formulas as straight-line programs for the kernels.

`Tracer` runs a formula once with symbols in place of tensors and records each operation. C++
interprets the program for one row after the other (csrc/kernels.h). For Triton it is printed as a
function of the fused kernel (core/backends/triton/launch.py).

A symbol is either a number of a row, fp32 (an input, or what is computed from one), or a number of
the whole call (a parameter, or what is computed from parameters alone). The latter is computed in
Python, in float64, as it is if the formula runs on tensors. So a program gives the results of the
formula in torch: each operation rounds alike, and only exp, log and tanh, which no two libraries
round alike, differ in their last bit.
"""

from __future__ import annotations

import functools
import operator
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .ops import ops

REMEDY = (
    "write it in arithmetic, comparisons and the names of `ops` (ops.where(condition, a, b) in"
    " place of `if`), with numbers as parameters"
)

#: Operations on numbers of a call, in Python.
NUMBER_OPERATIONS: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "abs": abs,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "min": min,
    "max": max,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}
#: Operations on numbers of rows, in torch. csrc/program.cpp has the same names.
ROW_OPERATIONS: dict[str, Callable[..., Any]] = {
    **NUMBER_OPERATIONS,
    "min": ops.minimum,
    "max": ops.maximum,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "reciprocal": torch.reciprocal,
    "and": lambda a, b: (a != 0) & (b != 0),
    "or": lambda a, b: (a != 0) | (b != 0),
    "not": lambda a: a == 0,
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
}
UNARY_OPERATIONS = {"neg", "abs", "exp", "log", "sqrt", "tanh", "reciprocal", "not"}
#: Operations whose result is a condition (for "where": if both values are conditions).
CONDITIONS = {"lt", "le", "eq", "ne", "and", "or", "not"}
#: Operations that may have conditions as operands. The others want a number among theirs.
TAKES_CONDITIONS = {"and", "or", "not", "where", "eq", "ne"}
#: The functions of torch that a formula may call, by way of `ops`.
TORCH_FUNCTIONS: dict[Callable[..., Any], str] = {
    torch.exp: "exp",
    torch.log: "log",
    torch.sqrt: "sqrt",
    torch.abs: "abs",
    torch.where: "where",
    torch.minimum: "min",
    torch.maximum: "max",
    torch.tanh: "tanh",
}


def num_operands(operation: str) -> int:
    """Return how many operands an operation has."""
    if operation == "where":
        return 3
    return 1 if operation in UNARY_OPERATIONS else 2


class FormulaRefused(ValueError):
    """A formula is written in a way that a kernel cannot run."""


# ---- programs


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A straight-line program, which computes its outputs for each row from its inputs.

    Registers are counted over the numbers of a call, then the inputs, then the instructions.

    name           the formulas in it, for messages
    inputs         names of the inputs, in the order of their registers
    steps          (operation, registers a, b, c) of each instruction; unused operands are 0
    outputs        registers of the outputs
    sources        how each number of a call is computed: ("constant", (value,)), ("parameter",
                   (index,)), or an operation with the indices of earlier numbers
    numbers_used   which of the numbers are in registers, as indices of `sources`
    """

    name: str
    inputs: tuple[str, ...]
    steps: tuple[tuple[str, int, int, int], ...]
    outputs: tuple[int, ...]
    sources: tuple[tuple[str, tuple[Any, ...]], ...]
    numbers_used: tuple[int, ...]

    def numbers(self, parameters: Sequence[float]) -> list[float]:
        """Return the values of the number registers in a call with these parameters."""
        values: list[Any] = []
        for source, operands in self.sources:
            if source == "constant":
                values.append(operands[0])
            elif source == "parameter":
                values.append(parameters[operands[0]])
            else:
                values.append(NUMBER_OPERATIONS[source](*(values[i] for i in operands)))
        return [float(values[i]) for i in self.numbers_used]

    def __call__(self, numbers: Sequence[float], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the program in torch.

        numbers   values of the number registers
        inputs    fp32 [num_rows] each
        returns   the outputs, fp32 [num_rows] each
        """
        registers: list[Any] = [*numbers, *inputs]
        for operation, *operands in self.steps:
            used = operands[: num_operands(operation)]
            registers.append(ROW_OPERATIONS[operation](*(registers[i] for i in used)))
        return [
            torch.as_tensor(registers[i], dtype=torch.float32).expand_as(inputs[0])
            for i in self.outputs
        ]


# ---- tracing


def _recorded(operation: str) -> Callable[..., Any]:
    """Return a method of symbols that records an operation: self, then the other operands."""

    def method(self: Symbol, *others: Any) -> Symbol:
        return self.tracer.apply(operation, self, *others)

    return method


def _recorded_swapped(operation: str) -> Callable[..., Any]:
    """Return a method of symbols that records a binary operation with self as second operand."""

    def method(self: Symbol, other: Any) -> Symbol:
        return self.tracer.apply(operation, other, self)

    return method


class Symbol:
    """A placeholder for a number while a formula is traced.

    operation      what computes it, or "input", "parameter", "constant"
    operands       symbols; of the last three a name, an index, a value
    is_of_row      whether it is a number of a row, not of the whole call
    is_condition   whether it is True or False
    """

    __slots__ = ("is_condition", "is_of_row", "operands", "operation", "tracer")

    def __init__(
        self, tracer: Tracer, operation: str, operands: tuple[Any, ...], is_of_row: bool
    ) -> None:
        self.tracer = tracer
        self.operation = operation
        self.operands = operands
        self.is_of_row = is_of_row
        self.is_condition = operation in CONDITIONS

    __hash__ = object.__hash__

    __neg__ = _recorded("neg")
    __abs__ = _recorded("abs")
    __invert__ = _recorded("not")
    __add__ = __radd__ = _recorded("add")
    __mul__ = __rmul__ = _recorded("mul")
    __and__ = __rand__ = _recorded("and")
    __or__ = __ror__ = _recorded("or")
    __sub__ = _recorded("sub")
    __rsub__ = _recorded_swapped("sub")
    __truediv__ = _recorded("div")
    __rtruediv__ = _recorded_swapped("div")
    __lt__ = _recorded("lt")
    __gt__ = _recorded_swapped("lt")
    __le__ = _recorded("le")
    __ge__ = _recorded_swapped("le")
    __eq__ = _recorded("eq")
    __ne__ = _recorded("ne")
    # Methods of tensors with the names of functions of `ops`.
    abs = _recorded("abs")
    exp = _recorded("exp")
    log = _recorded("log")
    sqrt = _recorded("sqrt")
    tanh = _recorded("tanh")

    def clamp(self, min: Any = None, max: Any = None) -> Symbol:
        """Record a clamp to [min, max], as tensors have it."""
        return self.tracer.clamp(self, min, max)

    def __pow__(self, exponent: Any) -> Symbol:
        """Record a square or a cube as products. Raises FormulaRefused for other exponents."""
        if exponent == 2:
            return self * self
        if exponent == 3:
            return self * self * self
        raise FormulaRefused(f"** {exponent!r}: write products, or ops.exp and ops.log.")

    def __bool__(self) -> bool:
        """Raise FormulaRefused, because a symbol has no value for a Python branch."""
        raise FormulaRefused("a branch on a value: write ops.where(condition, a, b).")

    def __float__(self) -> float:
        """Raise FormulaRefused, because a symbol has no value."""
        raise FormulaRefused(
            "a value as a float of Python: pass what is made of it as a parameter."
        )

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Symbol:
        """Record a call of a torch function with symbols among its arguments.

        torch calls this method instead of its function. Raises FormulaRefused for a function that
        the kernels do not have (TORCH_FUNCTIONS and torch.clamp).
        """
        kwargs = kwargs or {}
        tracer = next(x.tracer for x in (*args, *kwargs.values()) if isinstance(x, Symbol))
        if function is torch.clamp:
            return tracer.clamp(*args, **kwargs)
        operation = TORCH_FUNCTIONS.get(function)
        if operation is None or kwargs:
            name = getattr(function, "__name__", function)
            raise FormulaRefused(f"torch.{name} is no operation of the kernels.")
        return tracer.apply(operation, *args)


class Tracer:
    """Make symbols, and programs that compute some of them.

    An operation on the same operands is recorded once.
    """

    def __init__(self) -> None:
        self._symbols: dict[Hashable, Symbol] = {}  # in the order in which they were made
        self._inputs: dict[str, Symbol] = {}
        self._num_parameters = 0

    def input(self, name: str) -> Symbol:
        """Return the symbol of an input, a number of each row."""
        self._inputs[name] = self._symbol("input", (name,), is_of_row=True)
        return self._inputs[name]

    def parameter(self) -> Symbol:
        """Return the symbol of the next parameter, a number of the call."""
        index = self._num_parameters
        self._num_parameters += 1
        return self._symbol("parameter", (index,), is_of_row=False)

    def _symbol(self, operation: str, operands: tuple[Any, ...], is_of_row: bool) -> Symbol:
        """Return the symbol of an operation on these operands, the same one for each call."""
        # repr distinguishes 1 from 1.0 and from True, and 0.0 from -0.0.
        key = (operation, *(id(x) if isinstance(x, Symbol) else repr(x) for x in operands))
        return self._symbols.setdefault(key, Symbol(self, operation, operands, is_of_row))

    def number(self, x: Any) -> Symbol:
        """Return x if it is a symbol, or a constant symbol for a number of Python.

        Raises FormulaRefused for a symbol of another tracer, a tensor, or any other object.
        """
        if isinstance(x, Symbol):
            if x.tracer is not self:
                raise FormulaRefused("a number that the formula has kept from another call.")
            return x
        if isinstance(x, Tensor) and x.dim() == 0:
            raise FormulaRefused("a tensor that the formula holds: pass it as a parameter.")
        if not isinstance(x, (bool, int, float)):
            raise FormulaRefused(f"a {type(x).__name__} among its numbers.")
        symbol = self._symbol("constant", (x,), is_of_row=False)
        symbol.is_condition = isinstance(x, bool)
        return symbol

    def apply(self, operation: str, *symbols_or_numbers: Any) -> Symbol:
        """Record an operation on symbols or numbers of Python, and return the symbol of its result.

        operation   a name in ROW_OPERATIONS. If no operand is a number of a row, it must be in
                    NUMBER_OPERATIONS, and Python computes it once per call.

        Raises FormulaRefused if torch or a kernel cannot apply it to these operands.
        """
        operands = tuple(self.number(x) for x in symbols_or_numbers)
        if not any(x.is_of_row for x in operands):
            if operation not in NUMBER_OPERATIONS:
                raise FormulaRefused(f"{operation} of numbers alone, which torch refuses too.")
            return self._symbol(operation, operands, is_of_row=False)
        refuse_conditions(operation, operands)
        if operation == "div" and not operands[0].is_of_row:
            # torch divides a number by a tensor in these two steps.
            reciprocal = self._symbol("reciprocal", operands[1:], is_of_row=True)
            return self.apply("mul", reciprocal, operands[0])
        symbol = self._symbol(operation, operands, is_of_row=True)
        if operation == "where":
            symbol.is_condition = operands[1].is_condition and operands[2].is_condition
        return symbol

    def clamp(self, x: Any, min: Any = None, max: Any = None) -> Symbol:
        """Record x.clamp(min, max)."""
        if min is not None:
            x = self.apply("max", x, min)
        return x if max is None else self.apply("min", x, max)

    def program(self, name: str, outputs: Sequence[Any]) -> Program:
        """Return a program that computes these symbols or numbers."""
        results = [self.number(x) for x in outputs]
        needed = self._needed_symbols(results)
        numbers = [x for x in needed if not x.is_of_row]
        computed = [x for x in needed if x.is_of_row and x.operation != "input"]

        number_index = {id(x): i for i, x in enumerate(numbers)}
        read_ids = {id(x) for x in results} | {id(y) for x in computed for y in x.operands}
        in_registers = [x for x in numbers if id(x) in read_ids]
        in_order = [*in_registers, *self._inputs.values(), *computed]
        register = {id(x): i for i, x in enumerate(in_order)}

        steps = []
        for x in computed:
            operands = [register[id(y)] for y in x.operands]
            a, b, c = operands + [0] * (3 - len(operands))
            steps.append((x.operation, a, b, c))
        sources = []
        for x in numbers:
            indices = [number_index[id(y)] if isinstance(y, Symbol) else y for y in x.operands]
            sources.append((x.operation, tuple(indices)))
        return Program(
            name=name,
            inputs=tuple(self._inputs),
            steps=tuple(steps),
            outputs=tuple(register[id(x)] for x in results),
            sources=tuple(sources),
            numbers_used=tuple(number_index[id(x)] for x in in_registers),
        )

    def _needed_symbols(self, results: list[Symbol]) -> list[Symbol]:
        """Return the symbols that the results depend on, in the order in which they were made."""
        needed_ids = {id(x) for x in results}
        # A symbol is made after its operands.
        for x in reversed(self._symbols.values()):
            if id(x) in needed_ids:
                needed_ids |= {id(y) for y in x.operands}
        return [x for x in self._symbols.values() if id(x) in needed_ids]


def refuse_conditions(operation: str, operands: tuple[Symbol, ...]) -> None:
    """Raise FormulaRefused if an operand is a number where a condition is needed, or the reverse.

    and, or, not, and the first operand of where need conditions. Other operations than those in
    TAKES_CONDITIONS need at least one number.
    """
    if operation in ("and", "or", "not"):
        conditions = operands
    else:
        conditions = operands[:1] if operation == "where" else ()
    if not all(x.is_condition for x in conditions):
        raise FormulaRefused(f"{operation} of what is no condition.")
    if operation not in TAKES_CONDITIONS and all(x.is_condition for x in operands):
        raise FormulaRefused(f"{operation} of conditions alone.")


# ---- programs that are made once


#: Runs a program: (program, values of its number registers, inputs) -> outputs.
Run = Callable[[Program, list[float], list[Tensor]], list[Tensor]]


@dataclass(eq=False)
class TracedProgram:
    """The program of a formula, or the reason why there is none.

    It holds no function of the user, whose globals may be large.

    program       None if the formula cannot be traced
    refusal       the message of the error then
    is_compared   whether `compare_once` has found the program right
    """

    program: Program | None = None
    refusal: str = ""
    is_compared: bool = False

    def require_program(self) -> Program:
        """Return the program. Raises FormulaRefused if there is none."""
        if self.program is None:
            raise FormulaRefused(self.refusal)
        return self.program

    def compare_once(
        self,
        run: Run,
        numbers: list[float],
        make_inputs: Callable[[], list[Tensor]],
        compute_in_torch: Callable[[list[Tensor]], list[Any]],
        output_names: Sequence[str],
    ) -> None:
        """Compare the outputs of the program in a kernel with those of the formula in torch.

        Do nothing if an earlier comparison succeeded. Raises FormulaRefused if an output differs:
        then the formula does something with tensors that it does not do with symbols.

        run                runs the program in a kernel, see `Run`
        numbers            values of the program's number registers
        make_inputs        returns the inputs to compare on, fp32 [num_rows] each
        compute_in_torch   returns the outputs of the formula for these inputs
        output_names       names of the outputs, for the message
        """
        if self.is_compared:
            return
        program = self.require_program()
        inputs = make_inputs()
        outputs = run(program, numbers, inputs)
        expected_outputs = compute_in_torch(inputs)
        for name, output, expected in zip(output_names, outputs, expected_outputs, strict=True):
            expected = torch.as_tensor(expected, dtype=torch.float32).expand_as(output)
            is_wrong = ~is_same_number(output, expected, 1e-4)
            if is_wrong.any():
                row = int(is_wrong.nonzero()[0])
                values = zip(program.inputs, inputs, strict=True)
                place = ", ".join(f"{name}={float(x[row]):.6g}" for name, x in values)
                raise FormulaRefused(
                    f"{program.name} gives {name} {float(output[row]):.6g} in the kernels and"
                    f" {float(expected[row]):.6g} in torch, at {place}: it must do the same with"
                    " every kind of number that it is given."
                )
        self.is_compared = True


def traced_program(
    keys: tuple[Hashable, ...], name: str, trace: Callable[[Tracer], Sequence[Any]]
) -> TracedProgram:
    """Return the program of formulas, which is traced once for the same keys.

    keys    what the formulas depend on (`key_of`). If one is None, they are traced again.
    name    of the program, for messages
    trace   (tracer) -> the outputs of the program
    """
    traced = TracedProgram() if None in keys else _traced_before(keys)
    if traced.program is None and not traced.refusal:
        tracer = Tracer()
        try:
            traced.program = tracer.program(name, trace(tracer))
        except Exception as error:  # a formula may do anything with a symbol
            traced.refusal = refusal(name, error)
    return traced


@functools.lru_cache(maxsize=512)
def _traced_before(keys: tuple[Hashable, ...]) -> TracedProgram:
    """Return the `TracedProgram` of these keys from the cache, empty at the first call.

    `traced_program` fills it.
    """
    return TracedProgram()


def refusal(name: str, error: Exception) -> str:
    """Return why a formula could not be traced, with the line that caused it."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename != __file__:
            place = f" (line {line} of {frame.f_code.co_name})"
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, FormulaRefused):
        reason = str(error).rstrip(".")
    remedy = REMEDY[0].upper() + REMEDY[1:]
    return f"{name} cannot run in the kernels: {reason}{place}. {remedy}."


def is_same_number(x: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Return bool [num_rows]: where x is expected, NaN and infinities included.

    The allowed distance is `tolerance` times the sum of two sizes: that of the expected number, and
    the median of those that are not 0. So a wrong output is found even if all its numbers are tiny.
    """
    sizes = expected.abs()
    nonzero_sizes = sizes[sizes.isfinite() & (sizes > 0)]
    typical = nonzero_sizes.median() if nonzero_sizes.numel() else torch.zeros(())
    is_near = sizes.isfinite() & ((x - expected).abs() <= tolerance * (typical + sizes))
    return is_near | (x == expected) | (x.isnan() & expected.isnan())
