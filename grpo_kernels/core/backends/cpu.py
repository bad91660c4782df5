"""The CPU backend: C++ kernels (csrc/), with AVX-512 or AVX2, picked at run time.

The second part of the file turns tensors into arguments of the compiled module. Only there are
addresses taken, after a check of what C++ will read or write at them.

There are no formulas of reinforcement learning here. Those of token_loss.py are traced into a
program, which C++ runs on vectors (`evaluate_formula`) or between its two passes over a row
(`fused_loss`). A formula that cannot be traced runs in torch, which costs `fused_loss` a second
read of the logits. `strict` refuses it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...formulas.program import FormulaRefused, Program
from ...formulas.token_loss import TokenLossFormula
from ..divergence import DIRECTIONS
from ..softmax import (
    COEFFICIENTS_OF_KERNELS,
    MIXTURE_SUMS,
    SUMS_OF_KERNELS,
    GradientCoefficients,
    LogitRows,
    RowTransform,
    SoftmaxSums,
)
from . import Backend, FusedLossValues, eager, fall_back, native

if TYPE_CHECKING:
    import grpo_kernels._cpu as _cpu

    from ..pairs import Pairs

    _import_error: str
else:
    try:
        _cpu = native.load()
    except ImportError as error:
        _cpu = None
        _import_error = str(error)


#: The dtypes of C++, by number.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

NO_AVX2 = "the C++ kernels need AVX2, which this processor does not have"

#: Bytes of logits in a block of rows that is read twice. A block has a fixed cost of 100-200 us
#: (two parallel regions and the formula in torch), so it should be large, but no larger than the
#: last-level cache: on 2 cores that share 32 MiB, blocks of 8 / 16 / 32 MiB took 1.57 / 1.40 / 1.32
#: times a copy of the logits. Large servers have about 4 MiB of cache per thread.
BLOCK_BYTES_PER_THREAD = 4 << 20

#: The size of the last-level cache if the system does not say.
DEFAULT_CACHE_BYTES = 32 << 20


def available() -> str | None:
    """Return None if this backend can run, or else the reason."""
    if _cpu is None and native.unsupported_machine() is not None:
        return native.unsupported_machine()
    if _cpu is None:
        command = native.build_command(native.package())
        return (
            f"the compiled module is missing: {_import_error}. `{command}` builds it, with a C++17"
            " compiler"
        )
    return None if _cpu.isa() else NO_AVX2


@functools.cache
def last_level_cache() -> int:
    """Return the bytes of one last-level cache."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(size.removesuffix("K")) << 10
    except (OSError, ValueError):
        return DEFAULT_CACHE_BYTES


class Kernels(Backend):
    """The C++ kernels.

    strict   refuse a formula that cannot be traced, and compare a program with torch before its
             first use
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    # ---- rows of logits

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums of each row, such as max_logit and sum_exp, in one call of C++.

        names   some of `softmax.SUMS`, which gives their formulas. C++ computes SUMS_OF_KERNELS;
                the values of the others are not set.
        """
        num_rows = count_rows(rows)
        sums = SoftmaxSums.empty(names, num_rows, rows.logits.device, rows.reference)
        policy, reference = policy_and_reference(rows)
        _cpu.softmax_sums(
            policy,
            reference,
            vector("targets", rows.targets, torch.int64, num_rows),
            vector("mask", rows.mask, torch.bool, num_rows),
            sums_argument(sums),
            torch.get_num_threads(),
        )
        return sums

    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return MIXTURE_SUMS of each row: two sums over the vocabulary, fp32 [2, num_rows].

        With p the policy's softmax, q the reference's, m = (1 - mixture) p + mixture q, and with
        direction and mixture from `rows.reference`:

            "jsd"   KL(p || m) and KL(q || m)
            "tv"    sum_j p_j sign(p_j - q_j) / 2 and sum_j |p_j - q_j| / 2

        sums   softmax sums of the first pass over the rows, which normalize p and q
        """
        num_rows = count_rows(rows)
        num_sums = len(MIXTURE_SUMS)
        mixture_sums = torch.empty(num_sums, rows.num_rows, dtype=torch.float32)
        sums_table = sums_argument(sums)  # checks the sums before anything follows from them
        log_sum_ratio = sums.log_sum_ratio
        policy, reference = policy_and_reference(rows, log_sum_ratio=log_sum_ratio)
        assert reference is not None
        _cpu.mixture_sums(
            policy,
            reference,
            vector("mask", rows.mask, torch.bool, num_rows),
            sums_table,
            table("mixture_sums", mixture_sums, all_bits(num_sums)),
            torch.get_num_threads(),
        )
        return mixture_sums

    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits of each row into the same row of `out`, [A, T, V].

        The formula is in `GradientCoefficients`. Rows whose coefficients are all 0 become 0.
        """
        num_rows = count_rows(rows)
        sums_table = sums_argument(sums)  # checks the sums before anything follows from them
        log_sum_ratio = None
        center = None
        if "divergence" in coefficients.names:
            log_sum_ratio = sums.log_sum_ratio
            center = sums.gradient_center
        else:
            rows = rows._replace(reference=None)
        name_bits = bits(coefficients.names, COEFFICIENTS_OF_KERNELS)
        policy, reference = policy_and_reference(rows, log_sum_ratio=log_sum_ratio, center=center)
        _cpu.softmax_gradient(
            policy,
            reference,
            vector("targets", rows.targets, torch.int64, num_rows),
            sums_table,
            table("coefficients", coefficients.values, name_bits),
            rows_argument("out", out, rows),
            torch.get_num_threads(),
        )

    def fused_loss(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues:
        """Return log-prob, entropy and loss of each row, and write d loss / d logits to `out`.

        With a reference the divergence of each row is returned as well. One thread computes the
        softmax sums of a row, then the formula, then the gradient. A formula that cannot be traced
        runs in torch, which takes a second read of the logits.

        loss_formula   computes the loss of a row from its log-prob and entropy
        out            [A, T, V], possibly the logits themselves. None: no gradient is computed.
        """
        traced = self.trace(loss_formula)
        if traced is None:
            return self.loss_in_two_passes(rows, loss_formula, out, rows_of_cached_block(rows))
        num_rows = count_rows(rows)
        num_values = FusedLossValues.num_values(rows.reference is not None)
        values = FusedLossValues(torch.empty(num_values, num_rows, dtype=torch.float32))
        inputs = loss_formula.program_inputs(traced.program)
        weight = None
        if rows.reference is not None and loss_formula.inputs.divergence_weight is not None:
            weight = loss_formula.inputs.divergence_weight.contiguous()
        policy, reference = policy_and_reference(rows, weight=weight)
        _cpu.fused_loss(
            traced.compiled,
            traced.numbers,
            [vector(name, x, torch.float32, num_rows) for name, x in inputs.items()],
            loss_formula.inputs.entropy_weight is not None,
            policy,
            reference,
            vector("targets", rows.targets, torch.int64, num_rows),
            vector("mask", rows.mask, torch.bool, num_rows),
            None if out is None else rows_argument("out", out, rows),
            table("values", values.table, all_bits(num_values)),
            torch.get_num_threads(),
        )
        return values

    def evaluate_formula(
        self, loss_formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (losses, d loss / d log-prob, d loss / d entropy), fp32 [num_rows] each.

        The last is None if the loss has no entropy bonus.

        logps, entropy   fp32 [num_rows]
        """
        traced = self.trace(loss_formula)
        if traced is None:
            return eager.Kernels().evaluate_formula(loss_formula, logps, entropy)
        values = {"logps": logps, "entropy": entropy, **loss_formula.program_inputs(traced.program)}
        inputs = [values[name] for name in traced.program.inputs]
        losses, grad_logps, grad_entropy = run_program(traced.program, traced.numbers, inputs)
        return (
            losses,
            grad_logps,
            None if loss_formula.inputs.entropy_weight is None else grad_entropy,
        )

    def trace(self, loss_formula: TokenLossFormula) -> TracedFormula | None:
        """Return a loss formula as C++ runs it: its operations on vectors, traced and compiled.

        If the formula cannot be traced, `strict` raises FormulaRefused. Otherwise it warns once and
        returns None.
        """
        if self.strict:
            loss_formula.compare_once(run_program)
        try:
            program, numbers = loss_formula.program()
            return TracedFormula(program, compile_program(program), numbers)
        except FormulaRefused as refusal:
            if self.strict:
                raise
            fall_back(
                "a second pass over the logits, with the formulas in PyTorch, which is slower",
                str(refusal).rstrip("."),
            )
            return None

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """Multiply a gradient [A, T, V] by a 0-d factor in place, in C++ if it is contiguous.

        A factor of 1 costs nothing.
        """
        number = float(factor)
        if number == 1.0:
            return
        if gradient.is_contiguous() and gradient.dtype in DTYPES and gradient.is_cpu:
            _cpu.scale(
                gradient.data_ptr(),
                DTYPES[gradient.dtype],
                gradient.numel(),
                number,
                torch.get_num_threads(),
            )
        else:
            gradient.mul_(number)

    # ---- pairs

    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return hidden[row] . weight[id] of each (row, id) pair, fp32 [num_pairs].

        It is -inf for an id of -1.
        """
        num_pairs = pairs.ids.numel()
        logits = torch.empty(num_pairs, dtype=torch.float32)
        _cpu.pair_logits(
            matrix("hidden", hidden),
            matrix("weight", weight),
            pairs_argument(pairs),
            vector("logits", logits, torch.float32, num_pairs),
            torch.get_num_threads(),
        )
        return logits

    def write_grad_hidden_of_pairs(
        self, values: Tensor, pairs: Pairs, weight: Tensor, out: Tensor
    ) -> None:
        """Write out[row] = sum of values[i] * weight[id] over the pairs i = (row, id) of each row.

        This is the gradient of hidden states from the gradients of `pair_logits`. A pair is unused
        if its id is -1 or its value 0. Rows without a used pair are not written.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        weight, out   [V, H] and [num_rows, H]
        """
        _cpu.add_grad_hidden_of_pairs(
            vector("values", values, torch.float32, pairs.ids.numel()),
            pairs_argument(pairs),
            matrix("weight", weight),
            matrix("out", out),
            torch.get_num_threads(),
        )

    def add_grad_weight_of_pairs(
        self, values: Tensor, pairs: Pairs, hidden: Tensor, out: Tensor
    ) -> None:
        """Add sum of values[i] * hidden[row] over the pairs i = (row, id) of each id to out[id].

        This is the gradient of the weight from the gradients of `pair_logits`.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        hidden, out   [num_rows, H] and [V, H]
        """
        _cpu.add_grad_weight_of_pairs(
            vector("values", values, torch.float32, pairs.ids.numel()),
            pairs_argument(pairs),
            matrix("hidden", hidden),
            matrix("out", out),
            torch.get_num_threads(),
        )


def rows_of_cached_block(rows: LogitRows) -> int:
    """Return how many rows of logits (and of the reference) fit the last-level cache.

    A second read of so many rows costs nearly nothing.
    """
    threads = torch.get_num_threads()
    row_bytes = rows.logits.shape[-1] * rows.logits.element_size()
    if rows.reference is not None:
        row_bytes *= 2
    cache_bytes = max(last_level_cache(), BLOCK_BYTES_PER_THREAD * threads)
    return max(cache_bytes // row_bytes, threads)


# ---- formulas


class TracedFormula(NamedTuple):
    """A loss formula as C++ runs it.

    program    the traced operations of the formula
    compiled   the same in C++
    numbers    values of the formula's parameters, such as clip bounds, which may change per call
    """

    program: Program
    compiled: _cpu.Program
    numbers: list[float]


@functools.lru_cache(maxsize=256)
def compile_program(program: Program) -> _cpu.Program:
    """Return the C++ object that runs a traced formula. Raises FormulaRefused if it is too long."""
    num_numbers = len(program.numbers_used)
    try:
        return _cpu.Program(
            program.name,
            num_numbers,
            len(program.inputs),
            list(program.steps),
            list(program.outputs),
        )
    except ValueError as error:
        raise FormulaRefused(str(error)) from None


def run_program(program: Program, numbers: list[float], inputs: list[Tensor]) -> list[Tensor]:
    """Run a traced formula in C++ on vectors, and return its outputs, fp32 [n] each.

    numbers   values of the formula's parameters
    inputs    fp32 [n] each, in the order of program.inputs
    """
    n = inputs[0].numel()
    outputs = [torch.empty(n, dtype=torch.float32) for _ in program.outputs]
    named_inputs = zip(program.inputs, inputs, strict=True)
    compile_program(program).run(
        numbers,
        [vector(name, x, torch.float32, n) for name, x in named_inputs],
        [vector("outputs", x, torch.float32, n) for x in outputs],
        n,
    )
    return outputs


# ---- tensors as arguments
#
# `name` is what an error calls the tensor. The caller keeps the tensor until the kernel is done.


def unsupported(name: str, x: Tensor, expected: str, reason: object = "") -> ValueError:
    """Return the error about a tensor that C++ would read or write as something else."""
    dtype = str(x.dtype).removeprefix("torch.")
    actual = f"{dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
    suffix = f" ({reason})" if reason else ""
    return ValueError(f"{name} is {actual}: the C++ kernels take {expected} on a CPU.{suffix}")


def vector(name: str, x: Tensor | None, dtype: torch.dtype, n: int) -> int:
    """Return the address of a contiguous vector [n], 0 for None.

    Raises ValueError if x has another dtype, shape or device.

    name   what the error calls x
    """
    if x is None:
        return 0
    if x.dtype != dtype or x.shape != (n,) or not x.is_contiguous() or not x.is_cpu:
        raise unsupported(name, x, f"{str(dtype).removeprefix('torch.')} [{n}] in one piece")
    return x.data_ptr()


def matrix(name: str, x: Tensor) -> _cpu.Matrix:
    """Return a matrix with unit stride in its last dimension as an argument of C++.

    Raises ValueError if x is anything else.

    name   what the error calls x
    """
    reason: object = ""
    try:
        if x.is_cpu:
            return _cpu.Matrix(x.data_ptr(), DTYPES[x.dtype], x.shape, x.stride())
    except (KeyError, TypeError, ValueError) as error:
        reason = error
    expected = "a matrix in fp32, bf16 or fp16 with unit stride in its last dimension"
    raise unsupported(name, x, expected, reason)


def table(name: str, x: Tensor, name_bits: int) -> _cpu.NamedRows:
    """Return a table fp32 [num_names, n] as an argument of C++: address, strides and names.

    Raises ValueError if x is anything else.

    name        what the error calls x
    name_bits   a bit for each name that the table has a row for, see `bits`
    """
    reason: object = ""
    try:
        if x.is_cpu and x.dtype == torch.float32:
            return _cpu.NamedRows(x.data_ptr(), x.shape, x.stride(), name_bits)
    except (TypeError, ValueError) as error:
        reason = error
    expected = "float32 [names, n] with unit stride in its last dimension"
    raise unsupported(name, x, expected, reason)


@functools.lru_cache(maxsize=256)
def bits(names: tuple[str, ...], known: tuple[str, ...]) -> int:
    """Return a number whose bit k is 1 if known[k] is among the names."""
    return sum(1 << known.index(name) for name in names if name in known)


def all_bits(num_names: int) -> int:
    """Return the `bits` of a table that has all of num_names names."""
    return (1 << num_names) - 1


def sums_argument(sums: SoftmaxSums) -> _cpu.NamedRows:
    """Return the rows of the table of sums that C++ computes, its first ones, as an argument."""
    name_bits = bits(sums.names, SUMS_OF_KERNELS)
    num_known = name_bits.bit_count()
    values = sums.values if num_known == len(sums.names) else sums.values[:num_known]
    return table("sums", values, name_bits)


def count_rows(rows: LogitRows) -> int:
    """Return the number of rows of a call, the length that vectors must have."""
    if rows.row_range is not None:
        return rows.row_range[1] - rows.row_range[0]
    shape = rows.logits.shape
    return shape[0] * shape[1]


def rows_argument(name: str, x: Tensor, rows: LogitRows) -> _cpu.Rows:
    """Return the rows of x [A, T, V] in the range of `rows` as an argument of C++.

    name   what an error calls x
    """
    reason: object = ""
    try:
        if x.is_cpu:
            return _cpu.Rows(
                x.data_ptr(),
                DTYPES[x.dtype],
                x.shape,
                x.stride(),
                rows.first_row,
                count_rows(rows),
            )
    except (KeyError, TypeError, ValueError) as error:
        reason = error
    raise unsupported_rows(name, x, rows, reason)


def logits_argument(
    name: str, x: Tensor, transform: RowTransform, rows: LogitRows
) -> _cpu.LogitRows:
    """Return the rows of logits x [A, T, V] in the range of `rows`, with their transform, for C++.

    name   what an error calls x
    """
    num_rows = count_rows(rows)
    inverse = transform.inverse_temperature
    number = 1.0 if isinstance(inverse, Tensor) else inverse
    per_row = inverse if isinstance(inverse, Tensor) else None
    address = vector("inverse_temperature", per_row, torch.float32, num_rows)
    reason: object = ""
    try:
        if x.is_cpu:
            return _cpu.LogitRows(
                x.data_ptr(),
                DTYPES[x.dtype],
                x.shape,
                x.stride(),
                rows.first_row,
                num_rows,
                transform.scale,
                transform.softcap,
                number,
                address,
            )
    except (KeyError, TypeError, ValueError) as error:
        reason = error
    raise unsupported_rows(name, x, rows, reason)


def unsupported_rows(name: str, x: Tensor, rows: LogitRows, reason: object) -> ValueError:
    """Return the error about rows that C++ would read or write as something else."""
    expected = f"rows {list(rows.logits.shape)} in fp32, bf16 or fp16 with unit stride in V"
    return unsupported(name, x, expected, reason)


def policy_and_reference(
    rows: LogitRows,
    *,
    weight: Tensor | None = None,
    log_sum_ratio: Tensor | None = None,
    center: Tensor | None = None,
) -> tuple[_cpu.LogitRows, _cpu.ReferenceRows | None]:
    """Return (policy's rows, reference's rows or None) as arguments of C++.

    weight          weight of the divergence in the loss, fp32 [num_rows]; None is 0
    log_sum_ratio   `SoftmaxSums.log_sum_ratio`, for kernels that follow the sums
    center          `SoftmaxSums.gradient_center`, for the gradient
    """
    num_rows = count_rows(rows)
    policy = logits_argument("logits", rows.logits, rows.transform, rows)
    reference = rows.reference
    if reference is None:
        return policy, None
    reference_logits = logits_argument(
        "reference.logits", reference.logits, reference.transform, rows
    )
    return policy, _cpu.ReferenceRows(
        reference_logits,
        DIRECTIONS.index(reference.direction),
        reference.mixture,
        vector("divergence_weight", weight, torch.float32, num_rows),
        vector("log_sum_ratio", log_sum_ratio, torch.float32, num_rows),
        vector("center", center, torch.float32, num_rows),
    )


def pairs_argument(pairs: Pairs) -> _cpu.RowIdPairs:
    """Return ids and rows of pairs. Their values are not checked."""
    num_pairs = pairs.ids.numel()
    ids = vector("pairs.ids", pairs.ids, torch.int64, num_pairs)
    return _cpu.RowIdPairs(ids, vector("pairs.rows", pairs.rows, torch.int64, num_pairs), num_pairs)
