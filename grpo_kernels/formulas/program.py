"""Formulas as straight-line programs for the kernels.

A `Tracer` runs a formula once with symbols in place of tensors and records each operation as an
instruction of a `Program`. C++ interprets the program (csrc/program.cpp). For Triton the program is
printed as a function that the kernels call (core/backends/triton/launch.py).

A symbol stands for a number of one of two kinds:

per row   fp32: an input of the formula, such as the log-prob of a token, or a result that depends
          on an input. The kernel computes it.
scalar    float64: a constant, a parameter such as a clip width, or a result that depends on these
          alone. Python computes it once per call of the loss.

PyTorch treats tensors and Python numbers in the same way, so a program gives the results of the
formula in torch. Each operation rounds alike, except that the last bit of exp, log and tanh differs
between libraries.
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

#: Operations on scalars, in Python.
SCALAR_OPERATIONS: dict[str, Callable[..., Any]] = {
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
#: Operations with at least one operand per row, in torch. csrc/program.cpp has the same names.
#: Booleans are kept as numbers, of which any but 0 is true.
ROW_OPERATIONS: dict[str, Callable[..., Any]] = {
    **SCALAR_OPERATIONS,
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
#: Operations whose result is boolean. A "where" has a boolean result if both of its values are.
BOOLEAN_RESULTS = {"lt", "le", "eq", "ne", "and", "or", "not"}
#: Operations whose operands may all be boolean. Others, such as "add", need at least one number.
ACCEPTS_BOOLEANS = {"and", "or", "not", "where", "eq", "ne"}
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
    """Return how many operands an operation has, for example 2 for "add".

    operation   a name in ROW_OPERATIONS
    """
    if operation == "where":
        return 3
    return 1 if operation in UNARY_OPERATIONS else 2


class FormulaRefused(ValueError):
    """A formula is written in a way that a kernel cannot run."""


# ---- programs


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A traced formula as a list of instructions, which compute its outputs for each row.

    Every value that an instruction reads or writes has a register. The first registers hold
    scalars, the next ones the inputs, and each instruction writes the register after these.

    name           the formulas in the program, for error messages
    inputs         names of the inputs, in the order of their registers
    instructions   (operation, a, b, c) each: apply the operation to the registers a, b and c;
                   operands that it does not have are 0
    outputs        registers of the outputs
    scalars        how Python computes each scalar, in this order: ("constant", (value,)),
                   ("parameter", (index,)), or (operation, indices of earlier scalars)
    scalars_in_registers   indices in `scalars` of those that have a register, in register order.
                   The other scalars are only needed to compute these.
    """

    name: str
    inputs: tuple[str, ...]
    instructions: tuple[tuple[str, int, int, int], ...]
    outputs: tuple[int, ...]
    scalars: tuple[tuple[str, tuple[Any, ...]], ...]
    scalars_in_registers: tuple[int, ...]

    def scalar_values(self, parameters: Sequence[float]) -> list[float]:
        """Return the values of the scalars that have a register, in the order of the registers.

        Scalars are the numbers that are the same for all rows: constants, parameters, and results
        of operations on these. A register is a place for a value that the instructions of the
        program read or write. A scalar that only other scalars depend on has none.

        parameters   the values of the formula's parameters in this call of the loss, such as its
                     clip widths
        """
        values: list[Any] = []
        for source, operands in self.scalars:
            if source == "constant":
                values.append(operands[0])
            elif source == "parameter":
                values.append(parameters[operands[0]])
            else:  # an operation on scalars with smaller indices
                operand_values = [values[i] for i in operands]
                values.append(SCALAR_OPERATIONS[source](*operand_values))
        return [float(values[i]) for i in self.scalars_in_registers]

    def run_in_torch(self, scalars: Sequence[float], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the program in torch, and return its outputs, fp32 [num_rows] each.

        Each instruction reads up to three registers, and appends its result as the next register.

        scalars   the values of the scalars that have a register, from `scalar_values`
        inputs    fp32 [num_rows] each, in the order of `Program.inputs`
        """
        registers: list[Any] = [*scalars, *inputs]
        for operation, *operands in self.instructions:
            # The operands are indices of registers, padded with 0 to three.
            operand_registers = operands[: num_operands(operation)]
            values = [registers[i] for i in operand_registers]
            result = ROW_OPERATIONS[operation](*values)
            registers.append(result)
        return [
            torch.as_tensor(registers[i], dtype=torch.float32).expand_as(inputs[0])
            for i in self.outputs
        ]


# ---- tracing


def _recording_method(operation: str) -> Callable[..., Any]:
    """Return a method of `Symbol` that records an operation on (self, *others).

    A `Symbol` stands for a number while a formula is run to record its operations.

    operation   a name in ROW_OPERATIONS, such as "add" for the method __add__
    """

    def method(self: Symbol, *others: Any) -> Symbol:
        """Record the operation and return the symbol of its result."""
        return self.tracer.record(operation, self, *others)

    return method


def _swapped_recording_method(operation: str) -> Callable[..., Any]:
    """Return a method of `Symbol` that records an operation on (other, self).

    A `Symbol` stands for a number while a formula is run to record its operations. Python calls
    such a method for 1.0 - symbol, because a float cannot subtract a symbol.

    operation   a name in ROW_OPERATIONS, such as "sub" for the method __rsub__
    """

    def method(self: Symbol, other: Any) -> Symbol:
        """Record the operation and return the symbol of its result."""
        return self.tracer.record(operation, other, self)

    return method


class Symbol:
    """A placeholder for a number while a formula is traced. Operations on it are recorded.

    tracer       records the operations
    operation    the operation whose result the symbol stands for, or "input", "parameter" or
                 "constant"
    operands     the symbols that the operation is applied to; for an input its name, for a
                 parameter its index, for a constant its value
    is_per_row   True: each row has its own number, fp32. False: the number is a scalar.
    is_boolean   whether the number is True or False
    """

    __slots__ = ("is_boolean", "is_per_row", "operands", "operation", "tracer")

    def __init__(
        self, tracer: Tracer, operation: str, operands: tuple[Any, ...], is_per_row: bool
    ) -> None:
        """Make the symbol of a result, an input, a parameter or a constant.

        Only the tracer calls this.

        tracer       records the operations on the symbol
        operation    the operation that gives the result, or "input", "parameter" or "constant"
        operands     symbols; for an input its name, for a parameter its index, for a constant its
                     value
        is_per_row   True: each row has its own number. False: all rows have the same number.
        """
        self.tracer = tracer
        self.operation = operation
        self.operands = operands
        self.is_per_row = is_per_row
        self.is_boolean = operation in BOOLEAN_RESULTS

    __hash__ = object.__hash__

    __neg__ = _recording_method("neg")
    __abs__ = _recording_method("abs")
    __invert__ = _recording_method("not")
    __add__ = __radd__ = _recording_method("add")
    __mul__ = __rmul__ = _recording_method("mul")
    __and__ = __rand__ = _recording_method("and")
    __or__ = __ror__ = _recording_method("or")
    __sub__ = _recording_method("sub")
    __rsub__ = _swapped_recording_method("sub")
    __truediv__ = _recording_method("div")
    __rtruediv__ = _swapped_recording_method("div")
    __lt__ = _recording_method("lt")
    __gt__ = _swapped_recording_method("lt")
    __le__ = _recording_method("le")
    __ge__ = _swapped_recording_method("le")
    __eq__ = _recording_method("eq")
    __ne__ = _recording_method("ne")
    # Methods of tensors with the names of functions of `ops`.
    abs = _recording_method("abs")
    exp = _recording_method("exp")
    log = _recording_method("log")
    sqrt = _recording_method("sqrt")
    tanh = _recording_method("tanh")

    def clamp(self, min: Any = None, max: Any = None) -> Symbol:
        """Record a clamp of this symbol to [min, max], and return the symbol of the result.

        min, max   symbols or Python numbers, named as in `Tensor.clamp`. None: no bound on that
                   side.
        """
        return self.tracer.clamp(self, min, max)

    def __pow__(self, exponent: Any) -> Symbol:
        """Record a square or a cube as products, and return the symbol of the result.

        Raises FormulaRefused for any other exponent, because the kernels have no power function.
        """
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
        raise FormulaRefused("float() of a value: pass the number as a parameter instead.")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Symbol:
        """Record a call of a torch function on symbols, and return the symbol of its result.

        torch calls this method instead of `function` if an argument is a symbol, for example for
        torch.exp(symbol).

        function   the torch function that the formula calls
        types      not used; torch passes the classes of the arguments
        args       positional arguments of the call
        kwargs     keyword arguments of the call; None: no arguments

        Raises FormulaRefused unless the function is torch.clamp or one of TORCH_FUNCTIONS.
        """
        kwargs = kwargs or {}
        tracer = next(x.tracer for x in (*args, *kwargs.values()) if isinstance(x, Symbol))
        if function is torch.clamp:
            return tracer.clamp(*args, **kwargs)
        operation = TORCH_FUNCTIONS.get(function)
        if operation is None or kwargs:
            name = getattr(function, "__name__", function)
            raise FormulaRefused(f"torch.{name} does not exist in the kernels.")
        return tracer.record(operation, *args)


class Tracer:
    """Record the operations of a formula on symbols, and make a `Program` of them.

        tracer = Tracer()
        logp, old_logp = tracer.input("logps"), tracer.input("old_logps")
        program = tracer.program("ratio", [torch.exp(logp - old_logp)])

    An operation that is applied to the same operands twice is recorded once.
    """

    def __init__(self) -> None:
        """Make a tracer that has recorded nothing."""
        self._symbols: dict[Hashable, Symbol] = {}  # in the order in which they were made
        self._inputs: dict[str, Symbol] = {}
        self._num_parameters = 0

    def input(self, name: str) -> Symbol:
        """Return the symbol of an input, which has its own number for each row.

        name   name of the input, such as "logps"
        """
        self._inputs[name] = self._symbol("input", (name,), is_per_row=True)
        return self._inputs[name]

    def parameter(self) -> Symbol:
        """Return the symbol of a new parameter: a number that is the same for all rows.

        The first parameter has the index 0, the next one the index 1, and so on. Their values are
        passed to `Program.scalar_values` in this order.
        """
        index = self._num_parameters
        self._num_parameters += 1
        return self._symbol("parameter", (index,), is_per_row=False)

    def _symbol(self, operation: str, operands: tuple[Any, ...], is_per_row: bool) -> Symbol:
        """Return the symbol of an operation on these operands, and make it if it is new.

        A symbol stands for a number while a formula is run once to record its operations.

        operation    an operation, or "input", "parameter" or "constant"
        operands     symbols; for an input its name, for a parameter its index, for a constant its
                     value
        is_per_row   True: each row has its own number. False: all rows have the same number.
        """
        # Compare constants by repr, which distinguishes 1 from 1.0 and True, and 0.0 from -0.0.
        key = (operation, *(id(x) if isinstance(x, Symbol) else repr(x) for x in operands))
        new_symbol = Symbol(self, operation, operands, is_per_row)
        return self._symbols.setdefault(key, new_symbol)

    def as_symbol(self, x: Any) -> Symbol:
        """Return x if it is a symbol, or the symbol of a constant if it is a Python number.

        A symbol stands for a number while a formula is run once to record its operations.

        Raises FormulaRefused for a symbol of another tracer, a tensor, or any other object. The
        message of the exception becomes the end of a sentence: "{name of the formula} cannot run in
        the kernels: {message}".
        """
        if isinstance(x, Symbol):
            if x.tracer is not self:
                raise FormulaRefused("a number that the formula has kept from another call.")
            return x
        if isinstance(x, Tensor) and x.dim() == 0:
            # A 0-d tensor could be a parameter. A larger tensor gets the message below.
            raise FormulaRefused("a tensor that the formula holds: pass it as a parameter.")
        if not isinstance(x, (bool, int, float)):
            raise FormulaRefused(f"a {type(x).__name__} in place of a number.")
        symbol = self._symbol("constant", (x,), is_per_row=False)
        symbol.is_boolean = isinstance(x, bool)
        return symbol

    def record(self, operation: str, *symbols_or_numbers: Any) -> Symbol:
        """Record an operation, and return the symbol of its result.

        If an operand has its own number for each row, so has the result, and a kernel computes it.
        The operation must then be one of ROW_OPERATIONS. If all operands are scalars, the same for
        all rows, so is the result, and Python computes it once per call of the loss. The operation
        must then be one of SCALAR_OPERATIONS.

        operation            name of the operation, such as "add"
        symbols_or_numbers   its operands: symbols of this tracer, or Python numbers

        Raises FormulaRefused if the operation cannot be applied to these operands in torch or in a
        kernel.
        """
        operands = tuple(self.as_symbol(x) for x in symbols_or_numbers)
        if not any(x.is_per_row for x in operands):
            if operation not in SCALAR_OPERATIONS:
                raise FormulaRefused(f"{operation} of Python numbers, which torch refuses too.")
            return self._symbol(operation, operands, is_per_row=False)
        check_operand_types(operation, operands)
        if operation == "div" and not operands[0].is_per_row:
            # torch computes number / tensor in two steps too, which round twice: the reciprocal of
            # the tensor, times the number.
            reciprocal = self._symbol("reciprocal", operands[1:], is_per_row=True)
            return self.record("mul", reciprocal, operands[0])
        symbol = self._symbol(operation, operands, is_per_row=True)
        if operation == "where":
            symbol.is_boolean = operands[1].is_boolean and operands[2].is_boolean
        return symbol

    def clamp(self, x: Any, min: Any = None, max: Any = None) -> Symbol:
        """Record x.clamp(min, max) as a maximum and a minimum, and return the symbol of the result.

        The kernels have no clamp.

        x          symbol or Python number
        min, max   symbols or Python numbers; None: no bound on that side
        """
        if min is not None:
            x = self.record("max", x, min)
        return x if max is None else self.record("min", x, max)

    def program(self, name: str, outputs: Sequence[Any]) -> Program:
        """Return the program that computes these outputs.

        A program is a list of instructions, one for each operation that was recorded. Operations
        that no output needs are left out. Each value that an instruction reads or writes has a
        register. Registers of scalars come first, then those of all inputs, then those of the
        results of the instructions. A scalar is a number that is the same for all rows.

        name      the formulas in the program, for error messages
        outputs   symbols of this tracer, or Python numbers
        """
        output_symbols = [self.as_symbol(x) for x in outputs]
        needed = self._needed_symbols(output_symbols)
        scalars = [x for x in needed if not x.is_per_row]
        computed = [x for x in needed if x.is_per_row and x.operation != "input"]

        # Only a scalar that is an output, or that an instruction reads, needs a register. Python
        # computes the other scalars only to compute these.
        read_ids = {id(x) for x in output_symbols} | {id(y) for x in computed for y in x.operands}
        register_scalars = [x for x in scalars if id(x) in read_ids]
        in_registers = [*register_scalars, *self._inputs.values(), *computed]
        register = {id(x): i for i, x in enumerate(in_registers)}
        scalar_index = {id(x): i for i, x in enumerate(scalars)}

        instructions = []
        for x in computed:
            operands = [register[id(y)] for y in x.operands]
            a, b, c = operands + [0] * (3 - len(operands))  # pad with 0 to three operands
            instructions.append((x.operation, a, b, c))
        scalar_sources = []
        for x in scalars:
            # The operands of an operation are symbols. A constant has its value as operand, and a
            # parameter its index.
            sources = [scalar_index[id(y)] if isinstance(y, Symbol) else y for y in x.operands]
            scalar_sources.append((x.operation, tuple(sources)))
        return Program(
            name=name,
            inputs=tuple(self._inputs),
            instructions=tuple(instructions),
            outputs=tuple(register[id(x)] for x in output_symbols),
            scalars=tuple(scalar_sources),
            scalars_in_registers=tuple(scalar_index[id(x)] for x in register_scalars),
        )

    def _needed_symbols(self, outputs: list[Symbol]) -> list[Symbol]:
        """Return the symbols that the outputs depend on, the outputs included.

        A symbol stands for a number of the formula: an input, a constant, a parameter or the result
        of an operation. They are returned in the order in which they were made.
        """
        # Use id(x), because x == y of two symbols records a comparison.
        needed_ids = {id(x) for x in outputs}
        # A symbol is made after its operands. So one pass from the last symbol to the first finds
        # all operands of needed symbols.
        for x in reversed(self._symbols.values()):
            if id(x) in needed_ids:
                needed_ids |= {id(y) for y in x.operands}
        return [x for x in self._symbols.values() if id(x) in needed_ids]


def check_operand_types(operation: str, operands: tuple[Symbol, ...]) -> None:
    """Raise FormulaRefused if an operation cannot take numbers or booleans as these operands.

    The operands of "and", "or" and "not" and the condition of "where" must be boolean. Arithmetic
    and order comparisons, for example "add" and "lt", need at least one number. A boolean next to a
    number counts as 0 or 1, as in torch: x + (y > 0.0) is allowed.

    operation   a name in ROW_OPERATIONS
    operands    the symbols that it is applied to, which stand for the numbers of a formula
    """
    conditions: tuple[Symbol, ...] = ()  # the operands that must be boolean
    if operation in ("and", "or", "not"):
        conditions = operands
    elif operation == "where":
        conditions = operands[:1]
    if not all(x.is_boolean for x in conditions):
        raise FormulaRefused(f"{operation} of a number: it needs a condition, such as x > 0.0.")
    if operation not in ACCEPTS_BOOLEANS and all(x.is_boolean for x in operands):
        raise FormulaRefused(f"{operation} of conditions: it needs a number.")


# ---- programs are traced once for functions with the same keys


#: A function that runs a program: (program, values of its scalars, inputs) -> outputs.
RunProgram = Callable[[Program, list[float], list[Tensor]], list[Tensor]]


@dataclass(eq=False)
class TracedProgram:
    """The program of a formula, or the reason why the formula cannot be traced.

    It is kept in a cache, so it holds no function of the user, whose globals may be large.

    program       the program; None if the formula cannot be traced
    refusal       the error message if the formula cannot be traced, otherwise ""
    is_compared   whether `compare_with_torch` has found the program equal to the formula in torch
    """

    program: Program | None = None
    refusal: str = ""
    is_compared: bool = False

    def require_program(self) -> Program:
        """Return the program, the list of operations of the formula.

        Raises FormulaRefused, with the reason, if the operations could not be recorded.
        """
        if self.program is None:
            raise FormulaRefused(self.refusal)
        return self.program

    def compare_with_torch(
        self,
        run: RunProgram,
        scalars: list[float],
        make_inputs: Callable[[], list[Tensor]],
        compute_in_torch: Callable[[list[Tensor]], list[Any]],
        output_names: Sequence[str],
    ) -> None:
        """Raise FormulaRefused unless the program computes the same as the formula on tensors.

        The program was recorded by running the formula once on symbols. The outputs differ if the
        formula does something else with symbols than with tensors, for example if it tests
        isinstance(x, Tensor). Does nothing if an earlier comparison of this program succeeded.

        run                runs the program: (program, values of its scalars, inputs) -> outputs
        scalars            values of the program's scalars, from `Program.scalar_values`
        make_inputs        returns the inputs to compare on, fp32 [num_rows] each
        compute_in_torch   runs the formula on these inputs, and returns its outputs: tensors
                           [num_rows], or numbers
        output_names       names of the outputs, for the error message
        """
        if self.is_compared:
            return
        program = self.require_program()
        inputs = make_inputs()
        outputs = run(program, scalars, inputs)
        expected_outputs = compute_in_torch(inputs)
        for name, output, expected in zip(output_names, outputs, expected_outputs, strict=True):
            expected = torch.as_tensor(expected, dtype=torch.float32).expand_as(output)
            is_wrong = ~is_same_number(output, expected, tolerance=1e-4)
            if is_wrong.any():
                row = int(is_wrong.nonzero()[0])  # the first row that differs
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
    """Trace formulas into a program, or return the program that was traced for the same keys.

    To trace formulas is to run them once on symbols, which record the operations on them. The
    program is the list of these operations, which the kernels run.

    keys    keys of everything that the formulas depend on, from `formula_keys.key_of`. If one of
            them is None, a function has no key and may have changed, so the formulas are traced
            again at each call.
    name    the formulas in the program, for error messages
    trace   runs the formulas on symbols: (tracer) -> the outputs of the program, symbols or numbers

    Return a `TracedProgram`. If the formulas cannot be traced it has no program, but the reason.
    """
    traced = TracedProgram() if None in keys else _cached_program(keys)
    was_traced = traced.program is not None or traced.refusal != ""
    if not was_traced:
        tracer = Tracer()
        try:
            traced.program = tracer.program(name, trace(tracer))
        except Exception as error:  # a function of the user may do anything with a symbol
            # Keep the reason, too, so that the next call need not trace in vain.
            traced.refusal = refusal_message(name, error)
    return traced


@functools.lru_cache(maxsize=512)
def _cached_program(keys: tuple[Hashable, ...]) -> TracedProgram:
    """Return the `TracedProgram` of these keys, the same object at each call with equal keys.

    At the first call it is a new one without a program. The caller then sets its program, or the
    reason why there is none. So this function is the cache, and never makes a program.
    """
    return TracedProgram()


def refusal_message(name: str, error: Exception) -> str:
    """Return a message that says why a formula could not be traced, and at which line of it.

    name    name of the formula
    error   the exception that tracing raised
    """
    place = ""
    # The innermost frame outside of this file is in the formula.
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename != __file__:
            place = f" (line {line} of {frame.f_code.co_name})"
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, FormulaRefused):
        reason = str(error).rstrip(".")
    remedy = REMEDY[0].upper() + REMEDY[1:]
    return f"{name} cannot run in the kernels: {reason}{place}. {remedy}."


def is_same_number(x: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Return where x equals `expected` up to a tolerance, bool [num_rows].

        |x - expected| <= tolerance * (|expected| + median of all finite |expected| above 0)

    The median is 0 if there is no such number. With the median instead of a constant, a wrong
    output is found even if all its numbers are tiny. A NaN equals a NaN, and an infinity equals the
    same infinity.

    x           fp32 [num_rows]
    expected    fp32 [num_rows]
    tolerance   number, for example 1e-4
    """
    sizes = expected.abs()
    nonzero_sizes = sizes[sizes.isfinite() & (sizes > 0)]
    median = nonzero_sizes.median() if nonzero_sizes.numel() else torch.zeros(())
    is_near = sizes.isfinite() & ((x - expected).abs() <= tolerance * (sizes + median))
    return is_near | (x == expected) | (x.isnan() & expected.isnan())
