"""The Triton backend. Each instance (program) of a kernel over rows of logits processes one row.

The fused loss reads a row once from device memory, and a second time from the L2 cache.

Row counts, strides and scalars are runtime values, so a new length or a new step of a schedule does
not recompile a kernel. Compile-time values are the vocabulary's size class, dtypes, alignment, the
names of softmax sums and coefficients, and the traced formula of a loss. A kernel that does not
compile, or needs more than the GPU has, is retried with smaller tiles. If none works it raises
KernelFailure.

    softmax_rows.py      one row inside a kernel
    divergence_rows.py   a row and the reference's
    kernels.py           the kernels over rows
    pair_kernels.py      the kernels over pairs of hidden states and weight
    launch.py            how they are launched
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from ....formulas.program import FormulaRefused, Program
from ....formulas.token_inputs import PROGRAM_INPUTS, TOKEN_LEVEL_INPUTS
from ....formulas.token_loss import TokenLosses, TokenLossFormula
from ...softmax import POLICY_SUMS, GradientCoefficients, LogitRows, SoftmaxSums, sums_for
from .. import Backend, FusedLossValues, eager, fall_back
from . import launch as launch
from .kernels import (
    evaluate_formula_kernel,
    fused_loss_kernel,
    mixture_sums_kernel,
    reference_gradient_kernel,
    reference_sums_kernel,
    scale_kernel,
    softmax_gradient_kernel,
    softmax_sums_kernel,
)
from .launch import (
    KernelFailure,
    RowCall,
    check_layout,
    check_vectors,
    formula_function,
    run_over_columns,
    serves,
    unavailable_reason,
)
from .pair_kernels import (
    add_partial_sums_kernel,
    grad_hidden_of_pairs_kernel,
    grad_weight_of_pairs_kernel,
    pair_logits_kernel,
)

if TYPE_CHECKING:
    from ...pairs import Pairs

__all__ = ["Kernels", "OrEager", "serves", "unavailable_reason"]

SUMS_OF_TOP_ID = sums_for(("top_id",))

#: In the gradient of the weight, the (row, id) pairs of one id are divided into pieces of this many
#: pairs if there are at least twice as many, so that several Triton programs share a frequent id.
#: The sum of each piece takes 4 H bytes, so smaller pieces need more memory. With 512 it is 64 MiB
#: for two million pairs and H = 4096.
PIECE = 512

# What runs in place of a kernel, in warnings.
#: The fused loss kernel cannot run, or the loss formula cannot be traced.
TWO_PASSES = "a second pass over the logits, with the formulas in PyTorch, which is slower"
#: The kernel that evaluates a formula on vectors cannot run, or the formula cannot be traced.
FORMULA_IN_TORCH = "the formulas in PyTorch, which is slower"
#: Any other kernel cannot run.
EAGER = "eager PyTorch, which is slow"


class Kernels(Backend):
    """The Triton kernels. A method raises KernelFailure if its kernel cannot run on this GPU.

    strict   compare a traced loss formula with PyTorch before its first use
    """

    def __init__(self, strict: bool = False) -> None:
        """Choose whether traced formulas are compared with PyTorch."""
        self.strict = strict

    # ---- rows of logits

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums of each row, such as max_logit and sum_exp, from one kernel call.

        names   some of `softmax.SUMS`, which gives their formulas. MIXTURE_SUMS get memory only;
                `run_mixture_kernel` computes them.
        """
        call = RowCall(rows)
        sums = SoftmaxSums.empty(names, rows.num_rows, rows.logits.device, rows.reference)
        arguments = {
            **call.row_arguments,
            **call.vector_arguments(targets=rows.targets, mask=rows.mask),
            **call.sums_arguments(sums),
            "first_row": rows.first_row,
        }
        # Kernels take names as one string, separated by spaces.
        policy_names = " ".join(name for name in names if name in POLICY_SUMS)
        if rows.reference is None:
            call.launch("one_pass", softmax_sums_kernel, arguments, NAMES=policy_names)
            return sums
        # "jsd" and "tv" follow from the sums of "reverse" and a second pass.
        direction = "forward" if rows.reference.direction == "forward" else "reverse"
        call.launch(
            "reference",
            reference_sums_kernel,
            arguments,
            NAMES=policy_names,
            DIRECTION=direction,
        )
        if "argmax" in names:  # rarely needed with a reference, so it is a separate pass
            policy_rows = rows._replace(reference=None)
            sums["argmax"].copy_(self.run_sums_kernel(policy_rows, SUMS_OF_TOP_ID)["argmax"])
        return sums

    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return MIXTURE_SUMS of each row, fp32 [2, num_rows], in a second pass over the rows.

        They are the sums over the vocabulary from which the divergences "jsd" and "tv" follow.
        `Backend.run_mixture_kernel` has their formulas.

        sums   softmax sums of the first pass over the rows, which normalize policy and reference
        """
        assert rows.reference is not None
        call = RowCall(rows)
        result = torch.empty(2, rows.num_rows, dtype=torch.float32, device=rows.logits.device)
        arguments = {
            **call.row_arguments,
            **call.vector_arguments(mask=rows.mask, log_sum_ratio=sums.log_sum_ratio),
            **call.sums_arguments(sums),
            **call.table_arguments("mixture_sums", result),
            "first_row": rows.first_row,
            "mixture_weights": call.mixture_weights,
        }
        direction = rows.reference.direction
        call.launch("mixture", mixture_sums_kernel, arguments, DIRECTION=direction)
        return result

    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits of each row into the same row of `out`.

        The formula is in `GradientCoefficients`. The reference is read only if "divergence" is
        among the coefficients.

        sums           softmax sums of the rows, from `softmax_sums`
        coefficients   numbers of each row in the formula. A row whose coefficients are all 0 gets
                       the gradient 0.
        out            [A, T, V] like `rows.logits` (A * T rows of V logits); may be their memory
        """
        reference = rows.reference if "divergence" in coefficients.names else None
        call = RowCall(rows._replace(reference=reference), out)
        arguments = {
            **call.row_arguments,
            **call.gradient_arguments,
            **call.vector_arguments(targets=rows.targets),
            **call.sums_arguments(sums),
            **call.table_arguments("coefficients", coefficients.values),
            "first_row": rows.first_row,
        }
        # Kernels take names as one string, separated by spaces.
        names = " ".join(coefficients.names)
        if reference is None:
            call.launch("one_pass", softmax_gradient_kernel, arguments, NAMES=names)
            return
        # What the gradient of the divergence needs in addition, see `divergence_gradient`.
        arguments |= call.vector_arguments(
            log_sum_ratio=sums.log_sum_ratio, centers=sums.gradient_center
        )
        arguments["mixture_weights"] = call.mixture_weights
        # Threads and tile sizes depend on whether the kernel computes tanh.
        kind = launch.reference_gradient_kind(rows.transform.softcap, reference.transform.softcap)
        call.launch(
            kind, reference_gradient_kernel, arguments, NAMES=names, DIRECTION=reference.direction
        )

    def fused_loss(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues:
        """Return log-prob, entropy and loss of each row, and write d loss / d logits to `out`.

        Without a reference this is one kernel call. With a reference there are two passes over the
        logits, and the divergence of each row is returned as well.

        loss_formula   computes the loss of a row from its log-prob and entropy
        out            [A, T, V] like `rows.logits` (A * T rows of V logits): memory for the
                       gradient, possibly that of the logits. None: no gradient is computed.
        """
        if rows.reference is None:
            values = self.loss_in_one_call(rows, loss_formula, out)
            if values is not None:
                return values
        return super().fused_loss(rows, loss_formula, out)

    def loss_in_one_call(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues | None:
        """Return the result of `fused_loss` from one kernel call, for rows without a reference.

        Raises FormulaRefused if the loss formula cannot be traced, and KernelFailure if the kernel
        cannot run. The subclass `OrEager` returns None instead, in both cases.

        rows           all rows of the logits: `rows.row_range` is None
        loss_formula   computes the loss of a row from its log-prob and entropy
        out            as in `fused_loss`
        """
        assert rows.row_range is None
        if self.strict:
            # On the first use of a formula, run its traced program in PyTorch on random inputs.
            # Raise FormulaRefused if the outputs differ from the results of the formula itself.
            loss_formula.compare_with_torch(Program.run_in_torch)
        # program: the formula as a list of vector operations. numbers: all of its scalars, such as
        # clip bounds.
        program, numbers = loss_formula.program()
        # formula: the program as a Triton function. Some scalars are constants in its source. The
        # others, numbers[i] for i in argument_indices, are arguments of the kernel.
        formula, argument_indices = formula_function(program)
        inputs = loss_formula.program_inputs(program)
        call = RowCall(rows, out)
        num_values = FusedLossValues.num_values(has_reference=False)
        table = torch.empty(
            num_values, call.num_rows, dtype=torch.float32, device=rows.logits.device
        )
        arguments = {
            **call.row_arguments,
            **call.gradient_arguments,
            **call.vector_arguments(targets=rows.targets, mask=rows.mask),
            **call.vector_arguments(**{name: inputs.get(name) for name in TOKEN_LEVEL_INPUTS}),
            "numbers": tuple(numbers[i] for i in argument_indices),
            "loss_values": table,
            "num_rows": call.num_rows,
        }
        kind = launch.fused_kind(rows.logits.dtype, rows.transform.softcap)
        call.launch(kind, fused_loss_kernel, arguments, FORMULA=formula)
        return FusedLossValues(table)

    def evaluate_formula(
        self, loss_formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> TokenLosses:
        """Return the loss of each row and its gradients, fp32 [num_rows], from one kernel call.

        Raises FormulaRefused if the loss formula cannot be traced, and KernelFailure if the kernel
        cannot run.

        loss_formula     computes the loss of a row from its log-prob and entropy
        logps, entropy   fp32 [num_rows]
        """
        if self.strict:
            # On the first use of a formula: compare its program with the formula, see
            # `loss_in_one_call`, which also says what program, numbers and formula are.
            loss_formula.compare_with_torch(Program.run_in_torch)
        program, numbers = loss_formula.program()
        formula, argument_indices = formula_function(program)
        inputs = loss_formula.program_inputs(program)
        num_rows = logps.numel()
        num_outputs = len(program.outputs)
        outputs = torch.empty(num_outputs, num_rows, dtype=torch.float32, device=logps.device)
        vectors = {name: inputs.get(name) for name in PROGRAM_INPUTS}
        arguments = {
            **check_vectors(num_rows, logps=logps, entropy=entropy, **vectors),
            "numbers": tuple(numbers[i] for i in argument_indices),
            "num_rows": num_rows,
            "outputs": outputs,
        }
        launch.run(
            kind="vectors",
            kernel=evaluate_formula_kernel,
            tensors=(logps,),
            num_programs=lambda rows_per_program: triton.cdiv(num_rows, rows_per_program),
            arguments=arguments,
            FORMULA=formula,
            NUM_OUTPUTS=num_outputs,
        )
        return loss_formula.named_outputs(outputs.unbind())

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """Multiply a gradient [A, T, V] (A * T rows of V) by a 0-d factor in place.

        The factor is on the device of the gradient. The kernel reads it and returns at once if it
        is 1, so the host does not wait for it.
        """
        if gradient.is_contiguous():
            # A contiguous gradient is one row. The strides are never used; 0 counts as aligned, so
            # any length uses the same compiled kernel.
            gradient = gradient.as_strided((1, 1, gradient.numel()), (0, 0, 1))
        else:
            check_layout("gradient", gradient)
        num_groups, rows_per_group, num_columns = gradient.shape
        num_rows = num_groups * rows_per_group
        arguments = {
            "out": gradient,
            "stride_a": gradient.stride(0),
            "stride_t": gradient.stride(1),
            "num_columns": num_columns,
            "T": rows_per_group,
            "num_rows": num_rows,
            "factor": factor,
        }

        def num_programs(tile_columns: int) -> int:
            """Return the number of programs: one for each tile, at most SCALE_PROGRAMS."""
            num_tiles = num_rows * triton.cdiv(num_columns, tile_columns)
            return min(num_tiles, launch.SCALE_PROGRAMS)

        launch.run(
            kind="scale",
            kernel=scale_kernel,
            tensors=(gradient,),
            num_programs=num_programs,
            arguments=arguments,
        )

    # ---- pairs

    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return hidden[row] . weight[id] of each (row, id) pair, fp32 [num_pairs].

        The logit is -inf for the id -1.
        """
        num_pairs = pairs.ids.numel()
        logits = torch.empty(num_pairs, dtype=torch.float32, device=hidden.device)
        run_over_columns(
            pair_logits_kernel,
            matrices={"weight": weight, "hidden": hidden},
            num_programs=lambda _: num_pairs,
            arguments={
                **check_vectors(num_pairs, ids=pairs.ids, rows=pairs.rows),
                "logits": logits,
            },
        )
        return logits

    def write_grad_hidden_of_pairs(
        self, values: Tensor, pairs: Pairs, weight: Tensor, out: Tensor
    ) -> None:
        """Write to out[row] the sum of values[i] * weight[id] over all pairs i = (row, id).

        This is the gradient of hidden states from the gradients of `pair_logits`. A pair is unused
        if its id is -1 or its value 0. Rows without a used pair are not written.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        weight        [V, H]
        out           [num_rows, H]
        """
        num_rows, width = out.shape
        run_over_columns(
            grad_hidden_of_pairs_kernel,
            matrices={"weight": weight, "out": out},
            num_programs=programs_for_rows(num_rows, width),
            arguments={
                **check_vectors(pairs.ids.numel(), values=values, ids=pairs.ids),
                **check_vectors(num_rows + 1, offsets=pairs.offsets),
            },
        )

    def add_grad_weight_of_pairs(
        self, values: Tensor, pairs: Pairs, hidden: Tensor, out: Tensor
    ) -> None:
        """For each pair i = (row, id): out[id] += values[i] * hidden[row].

        This is the gradient of the weight from the gradients of `pair_logits`.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        hidden        [num_rows, H]
        out           [V, H]

        The pairs are sorted by id. The first kernel adds the sum of an id's pairs to `out`. If the
        id is frequent, its pairs are divided into pieces of PIECE pairs: the first kernel stores
        the sum of each piece in `partial_sums`, and the second kernel adds these sums to `out`.
        """
        num_pairs = pairs.ids.numel()
        vocab_size, width = out.shape
        vectors = check_vectors(num_pairs, values=values, rows=pairs.rows)
        # A pair whose value is 0 adds nothing, so it becomes unused.
        used_ids = pairs.ids.masked_fill(values == 0, -1)
        ids, order = used_ids.to(torch.int32).sort(stable=True)
        first_positions = positions_of_first_pairs(ids, min(num_pairs, vocab_size))
        window_id_begins = id_begins_of_windows(ids)
        num_windows = len(window_id_begins)
        # There are no windows if no id can have two pieces. Then partial sums are not needed, and
        # the second launch has 0 programs.
        num_partial_sums = num_pairs // PIECE + 1 if num_windows else 0
        partial_sums = torch.empty(num_partial_sums, width, dtype=torch.float32, device=out.device)
        windows = {
            "ids": ids,
            "num_pairs": num_pairs,
            "window_id_begins": window_id_begins,
            "partial_sums": partial_sums,
        }
        run_over_columns(
            grad_weight_of_pairs_kernel,
            matrices={"hidden": hidden, "out": out},
            num_programs=programs_for_rows(len(first_positions) + num_windows, width),
            arguments={
                **vectors,
                **windows,
                "order": order,
                "first_positions": first_positions,
                "num_firsts": len(first_positions),
            },
            PIECE=PIECE,
        )
        launch.run(
            kind="pairs",
            kernel=add_partial_sums_kernel,
            tensors=(hidden, out),
            num_programs=programs_for_rows(num_windows, width),
            arguments={**windows, "out": out, "out_stride": out.stride(0), "H": width},
            PIECE=PIECE,
        )


def programs_for_rows(num_rows: int, width: int) -> Callable[[int], int]:
    """Return the function columns_per_program -> number of programs, as a launch needs it.

    A program processes columns_per_program columns of one of num_rows rows. A row has `width`
    columns.
    """
    return lambda columns_per_program: num_rows * triton.cdiv(width, columns_per_program)


def positions_of_first_pairs(ids: Tensor, max_ids: int) -> Tensor:
    """Return where the pairs of each distinct id begin in sorted pairs, int64 [max_ids].

    For the ids [-1, 4, 4, 7] and max_ids 3 the result is [1, 3, 4]. The id -1 of unused pairs has
    no entry. If there are fewer distinct ids than max_ids, the last entries are num_pairs. The
    result is that long because the host would have to wait for a GPU to learn the number of
    distinct ids.

    ids       int32 [num_pairs], ascending
    max_ids   upper bound of the number of distinct ids
    """
    is_first = ids != torch.nn.functional.pad(ids, (1, 0), value=-1)[:-1]
    # The k-th distinct id begins where the number of first pairs so far reaches k.
    counts = torch.arange(1, max_ids + 1, device=ids.device)
    return torch.searchsorted(is_first.cumsum(0), counts)


def id_begins_of_windows(ids: Tensor) -> Tensor:
    """Return, for each window of PIECE sorted pairs, where the pairs of its last id begin.

    A window is the pairs k * PIECE to (k + 1) * PIECE, and its last id is the id of its last pair.
    The result is int64 [num_windows], positions in `ids`. The pairs of an id are divided into
    pieces from its first pair on, wherever the windows are, so that the sum of an id does not
    depend on how many pairs other ids have.

    The result is empty if there are too few pairs for an id with two pieces.

    ids   int32 [num_pairs], ascending
    """
    if len(ids) < 2 * PIECE:
        return torch.empty(0, dtype=torch.int64, device=ids.device)
    last_ids = ids[PIECE - 1 :: PIECE].contiguous()
    return torch.searchsorted(ids, last_ids)


class OrEager(Kernels):
    """The Triton kernels with a fallback: eager PyTorch computes a call whose kernel cannot run.

    backend="auto" chooses this class, unless the call is strict. There is one warning for each
    kernel. A kernel that cannot run has written nothing, so the logits are intact even if the
    gradient would have overwritten them. The results of the two backends are equal up to rounding,
    so one backend may compute the gradient from softmax sums of the other.
    """

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums of each row, in eager PyTorch if the kernel cannot run."""
        try:
            return super().run_sums_kernel(rows, names)
        except KernelFailure as failure:
            fall_back(EAGER, failure.reason)
        return eager.Kernels().run_sums_kernel(rows, names)

    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return MIXTURE_SUMS, fp32 [2, num_rows], in eager PyTorch if the kernel cannot run."""
        try:
            return super().run_mixture_kernel(rows, sums)
        except KernelFailure as failure:
            fall_back(EAGER, failure.reason)
        return eager.Kernels().run_mixture_kernel(rows, sums)

    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits to `out`, in eager PyTorch if the kernel cannot run."""
        try:
            return super().run_gradient_kernel(rows, sums, coefficients, out)
        except KernelFailure as failure:
            fall_back(EAGER, failure.reason)
        eager.Kernels().run_gradient_kernel(rows, sums, coefficients, out)

    def loss_in_one_call(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues | None:
        """Return the result of `fused_loss` from one kernel call, or None if it cannot run.

        `fused_loss` then takes two passes over the logits, with the formula between them.
        """
        try:
            return super().loss_in_one_call(rows, loss_formula, out)
        except (KernelFailure, FormulaRefused) as failure:
            fall_back(TWO_PASSES, reason_of(failure))
        return None

    def evaluate_formula(
        self, loss_formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> TokenLosses:
        """Return the loss of each row and its gradients, fp32 [num_rows].

        Eager PyTorch computes them if the formula cannot be traced or the kernel cannot run.

        loss_formula     computes the loss of a row from its log-prob and entropy
        logps, entropy   fp32 [num_rows]
        """
        try:
            return super().evaluate_formula(loss_formula, logps, entropy)
        except (KernelFailure, FormulaRefused) as failure:
            fall_back(FORMULA_IN_TORCH, reason_of(failure))
        return eager.Kernels().evaluate_formula(loss_formula, logps, entropy)

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """Multiply a gradient [A, T, V] (A * T rows of V) by a 0-d factor in place.

        Eager PyTorch computes it if the kernel cannot run.
        """
        try:
            return super().scale_(gradient, factor)
        except KernelFailure as failure:
            fall_back(EAGER, failure.reason)
        eager.Kernels().scale_(gradient, factor)

    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return hidden[row] . weight[id] of each (row, id) pair, fp32 [num_pairs].

        Eager PyTorch computes them if the kernel cannot run.
        """
        try:
            return super().pair_logits(hidden, weight, pairs)
        except KernelFailure as failure:
            fall_back(EAGER, failure.reason)
        return eager.Kernels().pair_logits(hidden, weight, pairs)

    def write_grad_hidden_of_pairs(
        self, values: Tensor, pairs: Pairs, weight: Tensor, out: Tensor
    ) -> None:
        """Write to out[row] the sum of values[i] * weight[id] over all pairs i = (row, id).

        Eager PyTorch computes it if the kernel cannot run.
        """
        try:
            return super().write_grad_hidden_of_pairs(values, pairs, weight, out)
        except KernelFailure as failure:
            fall_back(EAGER, failure.reason)
        eager.Kernels().write_grad_hidden_of_pairs(values, pairs, weight, out)

    def add_grad_weight_of_pairs(
        self, values: Tensor, pairs: Pairs, hidden: Tensor, out: Tensor
    ) -> None:
        """For each pair i = (row, id): out[id] += values[i] * hidden[row].

        Eager PyTorch computes it if the kernel cannot run.
        """
        try:
            return super().add_grad_weight_of_pairs(values, pairs, hidden, out)
        except KernelFailure as failure:
            fall_back(EAGER, failure.reason)
        eager.Kernels().add_grad_weight_of_pairs(values, pairs, hidden, out)


def reason_of(failure: KernelFailure | FormulaRefused) -> str:
    """Return the reason of a KernelFailure or FormulaRefused, in one line, for a warning."""
    if isinstance(failure, KernelFailure):
        return failure.reason
    return str(failure).rstrip(".")
