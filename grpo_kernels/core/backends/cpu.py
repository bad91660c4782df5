"""The CPU backend: C++ kernels (csrc/), with AVX-512 or AVX2, picked at run time.

The formulas of token_loss.py are traced into a `Program`, a list of vector operations. C++ runs the
program on vectors (`evaluate_formula`), or for one row, after its sums and before its gradient
(`fused_loss`). A formula that cannot be traced runs in PyTorch. `fused_loss` then reads the logits
a second time.

The second part of the file turns tensors into arguments of the compiled module. It checks dtype,
shape, strides and device before it passes an address.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...formulas.program import FormulaRefused, Program
from ...formulas.token_loss import TokenLosses, TokenLossFormula
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


#: The number of each dtype in C++.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

NO_AVX2 = "the C++ kernels need AVX2, which this processor does not have"

#: Bytes of logits in a block of rows that is read twice. A block has a fixed cost of 100-200 us
#: (two parallel regions and the formula in torch), so it should be large, but no larger than the
#: last-level cache: on 2 cores that share 32 MiB, blocks of 8 / 16 / 32 MiB took 1.57 / 1.40 / 1.32
#: times a copy of the logits. Large servers have about 4 MiB of cache per thread.
BLOCK_BYTES_PER_THREAD = 4 << 20

#: The size of the last-level cache if the system does not say.
DEFAULT_CACHE_BYTES = 32 << 20


def unavailable_reason() -> str | None:
    """Return the reason why this backend cannot run on this machine, or None if it can."""
    if _cpu is not None:
        has_avx2 = _cpu.isa() != ""
        return None if has_avx2 else NO_AVX2
    unsupported_reason = native.unsupported_machine()
    if unsupported_reason is not None:
        return unsupported_reason
    command = native.build_command(native.package())
    return (
        f"the compiled module is missing: {_import_error}. `{command}` builds it, with a C++17"
        " compiler"
    )


@functools.cache
def last_level_cache() -> int:
    """Return the size of the last-level cache of the first core, in bytes.

    Return DEFAULT_CACHE_BYTES if the system does not say.
    """
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(size.removesuffix("K")) << 10
    except (OSError, ValueError):
        return DEFAULT_CACHE_BYTES


class Kernels(Backend):
    """The C++ kernels.

    strict   raise FormulaRefused for a loss formula that cannot be traced, and compare the program
             of a traced formula with PyTorch before its first use
    """

    def __init__(self, strict: bool = False) -> None:
        """Choose whether formulas may fall back to PyTorch (strict=False)."""
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
            vector_argument("targets", rows.targets, torch.int64, num_rows),
            vector_argument("mask", rows.mask, torch.bool, num_rows),
            sums_argument(sums),
            torch.get_num_threads(),
        )
        return sums

    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return MIXTURE_SUMS of each row, fp32 [2, num_rows], in a second pass over the rows.

        They are the sums over the vocabulary from which the divergences "jsd" and "tv" follow.
        `Backend.run_mixture_kernel` has their formulas.

        sums   softmax sums of the first pass over the rows, which normalize policy and reference
        """
        num_rows = count_rows(rows)
        num_sums = len(MIXTURE_SUMS)
        mixture_sums = torch.empty(num_sums, rows.num_rows, dtype=torch.float32)
        sums_table = sums_argument(sums)  # raises for wrong sums before log_sum_ratio reads them
        log_sum_ratio = sums.log_sum_ratio
        policy, reference = policy_and_reference(rows, log_sum_ratio=log_sum_ratio)
        assert reference is not None  # these sums compare policy and reference
        _cpu.mixture_sums(
            policy,
            reference,
            vector_argument("mask", rows.mask, torch.bool, num_rows),
            sums_table,
            table_argument("mixture_sums", mixture_sums, all_bits(num_sums)),
            torch.get_num_threads(),
        )
        return mixture_sums

    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits of each row into the same row of `out`.

        The formula is in `GradientCoefficients`. Rows whose coefficients are all 0 become 0. The
        reference is read only if "divergence" is among the coefficients.

        sums   softmax sums of the rows, from `softmax_sums`
        out    [A, T, V] like `rows.logits` (A * T rows of V logits); may be their memory
        """
        num_rows = count_rows(rows)
        sums_table = sums_argument(sums)  # raises for wrong sums before the next lines read them
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
            vector_argument("targets", rows.targets, torch.int64, num_rows),
            sums_table,
            table_argument("coefficients", coefficients.values, name_bits),
            rows_argument("out", out, rows),
            torch.get_num_threads(),
        )

    def fused_loss(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues:
        """Return log-prob, entropy and loss of each row, and write d loss / d logits to `out`.

        With a reference the divergence of each row is returned as well. One thread computes the
        softmax sums of a row, then the formula, then the gradient, while the row is in its cache.

        For this the formula must be traced: it is run once on symbols in place of tensors, which
        record its operations for C++. A formula that branches on values cannot be traced. It runs
        in PyTorch, between two passes over blocks of rows.

        loss_formula   computes the loss of a row from its log-prob and entropy
        out            [A, T, V] like `rows.logits` (A * T rows of V logits): memory for the
                       gradient, possibly that of the logits. None: no gradient is computed.
        """
        traced = self.trace(loss_formula)
        if traced is None:  # the formula cannot be traced
            return self.loss_in_two_passes(
                rows, loss_formula, out, rows_per_block=rows_that_fit_cache(rows)
            )
        num_rows = count_rows(rows)
        num_values = FusedLossValues.num_values(has_reference=rows.reference is not None)
        values = FusedLossValues(torch.empty(num_values, num_rows, dtype=torch.float32))
        inputs = loss_formula.program_inputs(traced.program)
        weight = None  # of the divergence in the loss of each row
        if rows.reference is not None and loss_formula.inputs.divergence_weight is not None:
            weight = loss_formula.inputs.divergence_weight.contiguous()
        policy, reference = policy_and_reference(rows, weight=weight)
        _cpu.fused_loss(
            traced.compiled,
            traced.numbers,
            [vector_argument(name, x, torch.float32, num_rows) for name, x in inputs.items()],
            loss_formula.inputs.entropy_weight is not None,
            policy,
            reference,
            vector_argument("targets", rows.targets, torch.int64, num_rows),
            vector_argument("mask", rows.mask, torch.bool, num_rows),
            None if out is None else rows_argument("out", out, rows),
            table_argument("values", values.table, all_bits(num_values)),
            torch.get_num_threads(),
        )
        return values

    def evaluate_formula(
        self, loss_formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> TokenLosses:
        """Return the loss of each row, and its gradients in log-prob and entropy.

        C++ cannot call the Python functions of the formula. It runs a program: the list of the
        formula's operations, recorded by running it once on symbols in place of tensors. The
        formula itself computes the gradients as well as the loss, so the program does, too. A
        formula that branches on values, or that calls other functions than `formulas.ops`, cannot
        be recorded and runs in PyTorch.

        loss_formula     computes the loss of a row from its log-prob and entropy, and has the other
                         inputs of each row, such as its advantage
        logps, entropy   fp32 [num_rows], contiguous

        Return `TokenLosses`: losses and gradients, fp32 [num_rows] each.
        """
        traced = self.trace(loss_formula)
        if traced is None:  # the formula cannot be recorded
            return eager.Kernels().evaluate_formula(loss_formula, logps, entropy)
        program = traced.program
        vectors = {"logps": logps, "entropy": entropy, **loss_formula.program_inputs(program)}
        # The program has an order of its inputs.
        ordered_vectors = [vectors[name] for name in program.inputs]
        outputs = run_program(program, traced.numbers, ordered_vectors)
        return loss_formula.named_outputs(outputs)

    def trace(self, loss_formula: TokenLossFormula) -> TracedFormula | None:
        """Return a loss formula as a program that C++ can run.

        A program is the list of the formula's operations. To trace the formula is to run it once on
        symbols in place of tensors, which record the operations. It cannot be traced if it branches
        on values, or calls other functions than `formulas.ops`. Then return None after one warning,
        and the caller evaluates the formula in PyTorch. In strict mode raise FormulaRefused
        instead.

        In strict mode the first use of a formula also compares its program in C++ with PyTorch on
        random inputs. FormulaRefused is raised if they differ.
        """
        if self.strict:
            loss_formula.compare_with_torch(run_program)
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
        """Multiply a gradient [A, T, V] (A * T rows of V) by a 0-d factor in place.

        C++ does so if the gradient is contiguous, otherwise torch.
        """
        number = float(factor)
        if number == 1.0:  # the upstream gradient of a loss on which backward() is called
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

        This is the logit of a token id at one position, as a single dot product.

        hidden   [num_rows, H], the hidden states
        weight   [V, H], the weight of the output head
        pairs    the pairs, sorted by row. The id -1 marks an unused pair, whose logit is -inf.
        """
        num_pairs = pairs.ids.numel()
        logits = torch.empty(num_pairs, dtype=torch.float32)
        _cpu.pair_logits(
            matrix_argument("hidden", hidden),
            matrix_argument("weight", weight),
            pairs_argument(pairs),
            vector_argument("logits", logits, torch.float32, num_pairs),
            torch.get_num_threads(),
        )
        return logits

    def write_grad_hidden_of_pairs(
        self, values: Tensor, pairs: Pairs, weight: Tensor, out: Tensor
    ) -> None:
        """Write to out[row] the sum of values[i] * weight[id] over all pairs i = (row, id).

        This is the gradient of hidden states from the gradients of `pair_logits`. A pair is unused
        if its id is -1 or its value 0. Rows without a used pair are not written.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        pairs         the pairs, sorted by row
        weight        [V, H]
        out           [num_rows, H]
        """
        _cpu.write_grad_hidden_of_pairs(
            vector_argument("values", values, torch.float32, pairs.ids.numel()),
            pairs_argument(pairs),
            matrix_argument("weight", weight),
            matrix_argument("out", out),
            torch.get_num_threads(),
        )

    def add_grad_weight_of_pairs(
        self, values: Tensor, pairs: Pairs, hidden: Tensor, out: Tensor
    ) -> None:
        """For each pair i = (row, id): out[id] += values[i] * hidden[row].

        This is the gradient of the weight from the gradients of `pair_logits`. A pair is unused if
        its id is -1 or its value 0.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        pairs         the pairs, sorted by row
        hidden        [num_rows, H]
        out           [V, H]
        """
        _cpu.add_grad_weight_of_pairs(
            vector_argument("values", values, torch.float32, pairs.ids.numel()),
            pairs_argument(pairs),
            matrix_argument("hidden", hidden),
            matrix_argument("out", out),
            torch.get_num_threads(),
        )


def rows_that_fit_cache(rows: LogitRows) -> int:
    """Return how many rows of logits fit the last-level cache, at least one for each thread.

    With a reference a row takes twice the memory. The cache counts as at least
    BLOCK_BYTES_PER_THREAD for each thread.
    """
    threads = torch.get_num_threads()
    row_bytes = rows.logits.shape[-1] * rows.logits.element_size()
    if rows.reference is not None:
        row_bytes *= 2  # the logits of the reference, of about the same size
    cache_bytes = max(last_level_cache(), BLOCK_BYTES_PER_THREAD * threads)
    return max(cache_bytes // row_bytes, threads)


# ---- formulas


class TracedFormula(NamedTuple):
    """A loss formula that C++ can evaluate.

    program    the list of the formula's operations, recorded by running it once on symbols
    compiled   the C++ object that runs the program
    numbers    numbers that are the same for all rows, such as clip widths. The program receives
               them at each call.
    """

    program: Program
    compiled: _cpu.Program
    numbers: list[float]


@functools.lru_cache(maxsize=256)
def compile_program(program: Program) -> _cpu.Program:
    """Return the C++ object that runs a program, the list of operations of a loss formula.

    Raises FormulaRefused if the program is too long for C++.
    """
    # The values of these scalars, such as clip widths, are passed at each call.
    num_numbers = len(program.scalars_in_registers)
    try:
        return _cpu.Program(
            program.name,
            num_numbers,
            len(program.inputs),
            list(program.instructions),
            list(program.outputs),
        )
    except ValueError as error:
        raise FormulaRefused(str(error)) from None


def run_program(program: Program, numbers: list[float], inputs: list[Tensor]) -> list[Tensor]:
    """Run a program, the list of operations of a loss formula, in C++ on vectors.

    numbers   the numbers that are the same for all rows, such as clip widths
    inputs    fp32 [n] each, in the order of program.inputs

    Returns a tensor fp32 [n] for each of program.outputs.
    """
    n = inputs[0].numel()
    outputs = torch.empty(len(program.outputs), n, dtype=torch.float32).unbind()
    named_inputs = zip(program.inputs, inputs, strict=True)
    compile_program(program).run(
        numbers,
        [vector_argument(name, x, torch.float32, n) for name, x in named_inputs],
        [x.data_ptr() for x in outputs],
        n,
    )
    return list(outputs)


# ---- tensors as arguments of C++
#
# An argument of C++ holds the address of a tensor, which the caller must keep alive until the
# kernel is done. `name` is the name of the tensor in error messages.


def unsupported(name: str, x: Tensor, expected: str, reason: object = "") -> ValueError:
    """Return the ValueError for a tensor x that C++ cannot take as an argument.

    name       name of x in the message
    expected   dtype, shape and strides that C++ takes, in words
    reason     what is wrong, if a check of C++ says it
    """
    dtype = str(x.dtype).removeprefix("torch.")
    actual = f"{dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
    suffix = f" ({reason})" if reason else ""
    return ValueError(f"{name} is {actual}: the C++ kernels take {expected} on a CPU.{suffix}")


def vector_argument(name: str, x: Tensor | None, dtype: torch.dtype, n: int) -> int:
    """Return the address of a contiguous vector x [n] for C++, or 0 if x is None.

    C++ reads memory without a check, so this raises ValueError if x has another dtype or shape, is
    not contiguous or is not on a CPU. The caller must keep x alive until C++ is done.

    name    name of x in the message
    dtype   the dtype that C++ expects
    n       the length that C++ expects
    """
    if x is None:
        return 0
    if x.dtype != dtype or x.shape != (n,) or not x.is_contiguous() or not x.is_cpu:
        raise unsupported(name, x, f"{str(dtype).removeprefix('torch.')} [{n}] in one piece")
    return x.data_ptr()


def matrix_argument(name: str, x: Tensor) -> _cpu.Matrix:
    """Describe a matrix x [m, n] for C++, in fp32, bf16 or fp16, with unit stride in n.

    The description has the address, dtype, shape and strides. Raises ValueError if x is anything
    else.

    name   name of x in the message
    """
    reason: object = ""  # why C++ refuses x
    try:
        if x.is_cpu:
            return _cpu.Matrix(x.data_ptr(), DTYPES[x.dtype], x.shape, x.stride())
    except (KeyError, TypeError, ValueError) as error:
        reason = error
    expected = "a matrix in fp32, bf16 or fp16 with unit stride in its last dimension"
    raise unsupported(name, x, expected, reason)


def table_argument(name: str, x: Tensor, name_bits: int) -> _cpu.NamedRows:
    """Describe a table x, fp32 [num_names, n], for C++. It has a row for each of some names.

    For example, a table of softmax sums has a row for "max_logit" and a row for "sum_exp". Raises
    ValueError if x is anything else.

    name        name of x in the message
    name_bits   the names of the rows, encoded by `bits`
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
    """Encode names as an integer: bit k is 1 if known[k] is one of the names.

    A table has a row for each of some names, in the order of `known`. By these bits C++ knows which
    row belongs to which name. A name that is not among `known` has no bit.
    """
    return sum(1 << known.index(name) for name in names if name in known)


def all_bits(num_names: int) -> int:
    """Return the `bits` of a table that has a row for each known name: num_names bits of 1."""
    return (1 << num_names) - 1


def sums_argument(sums: SoftmaxSums) -> _cpu.NamedRows:
    """Describe a table of softmax sums for C++, without the sums that C++ does not compute.

    The table is fp32 [num_names, num_rows] and has a row for each sum, such as max_logit. C++
    computes SUMS_OF_KERNELS. Their rows come first, because these sums come first in SUMS.
    """
    name_bits = bits(sums.names, SUMS_OF_KERNELS)
    num_supported = name_bits.bit_count()
    values = sums.values
    if num_supported < len(sums.names):
        values = values[:num_supported]
    return table_argument("sums", values, name_bits)


def count_rows(rows: LogitRows) -> int:
    """Return the number of rows of a kernel call, computed from the shape of the logits.

    `LogitRows.num_rows` is the length of the targets. It is not used here, because the length of
    targets and other vectors is checked against the result before C++ reads them.
    """
    if rows.row_range is not None:  # the call processes only some rows of the logits
        start, stop = rows.row_range
        return stop - start
    num_groups, rows_per_group, _ = rows.logits.shape
    return num_groups * rows_per_group


def rows_argument(name: str, x: Tensor, rows: LogitRows) -> _cpu.Rows:
    """Describe the rows of x [A, T, V] of a kernel call for C++: address, dtype, strides, range.

    Raises ValueError if x is not on a CPU, has another dtype than fp32, bf16 and fp16, or has a
    shape or strides that C++ refuses.

    name   name of x in the message
    x      A * T rows of V, the shape of `rows.logits`: for example the gradient
    rows   the call. It processes the rows `rows.row_range` of x, or all if that is None.
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
    """Describe the rows of logits that a kernel call reads, and their transform, for C++.

    Raises ValueError if x is not on a CPU, has another dtype than fp32, bf16 and fp16, or has a
    shape or strides that C++ refuses.

    name        name of x in the message
    x           logits [A, T, V] of the policy or the reference, A * T rows of V
    transform   scale, softcap and inverse temperature of these logits
    rows        the call. It reads the rows `rows.row_range` of x, or all if that is None.
    """
    num_rows = count_rows(rows)
    inverse = transform.inverse_temperature
    # C++ reads either one number for all rows, or a vector with a number per row if its address is
    # not 0. The number is then ignored.
    number = 1.0 if isinstance(inverse, Tensor) else inverse
    per_row = inverse if isinstance(inverse, Tensor) else None
    address = vector_argument("inverse_temperature", per_row, torch.float32, num_rows)
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
    """Return the ValueError for a tensor x that C++ cannot take as A * T rows of V, [A, T, V].

    name     name of x in the message
    rows     the kernel call, whose logits have the shape that x must have
    reason   what is wrong, if a check of C++ says it
    """
    expected = f"rows {list(rows.logits.shape)} in fp32, bf16 or fp16 with unit stride in V"
    return unsupported(name, x, expected, reason)


def policy_and_reference(
    rows: LogitRows,
    *,
    weight: Tensor | None = None,
    log_sum_ratio: Tensor | None = None,
    center: Tensor | None = None,
) -> tuple[_cpu.LogitRows, _cpu.ReferenceRows | None]:
    """Describe the rows of policy and reference for C++. Without a reference its part is None.

    The vectors below belong to the reference, fp32 [num_rows] each. They are None for a kernel that
    does not read them.

    weight          weight of the divergence in the loss; None: all weights are 0
    log_sum_ratio   `SoftmaxSums.log_sum_ratio`, for kernels that read softmax sums
    center          `SoftmaxSums.gradient_center`, for kernels that write a gradient
    """
    num_rows = count_rows(rows)
    policy = logits_argument("logits", rows.logits, rows.transform, rows)
    reference = rows.reference
    if reference is None:
        return policy, None
    reference_logits = logits_argument(
        "reference.logits", reference.logits, reference.transform, rows
    )
    reference_rows = _cpu.ReferenceRows(
        reference_logits,
        DIRECTIONS.index(reference.direction),
        reference.mixture,
        vector_argument("divergence_weight", weight, torch.float32, num_rows),
        vector_argument("log_sum_ratio", log_sum_ratio, torch.float32, num_rows),
        vector_argument("center", center, torch.float32, num_rows),
    )
    return policy, reference_rows


def pairs_argument(pairs: Pairs) -> _cpu.RowIdPairs:
    """Describe (row, id) pairs for C++.

    Raises ValueError if their tensors are not int64 [num_pairs] on a CPU. The values are not
    checked.
    """
    num_pairs = pairs.ids.numel()
    ids = vector_argument("pairs.ids", pairs.ids, torch.int64, num_pairs)
    rows = vector_argument("pairs.rows", pairs.rows, torch.int64, num_pairs)
    return _cpu.RowIdPairs(ids, rows, num_pairs)
