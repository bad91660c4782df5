"""The Triton kernels over rows of logits (softmax sums, gradients, fused loss) and over vectors.

There is one program per row, on grid axis 0; the other axes are limited to 65 535. Logits are
x [A, T, V]: row r of their A * T rows is x[r // T, r % T], V logits with unit stride. z are the
logits after scale, softcap and temperature, and z = u_to_z * u with the unscaled logits u of
`softmax_rows.Transform`.

Sums and coefficients are tables: a pointer to fp32 [num_names, num_rows], the stride of its rows,
and at compile time the names of these rows, as one string separated by spaces.
"""

import inspect
from typing import Any

import triton
import triton.language as tl

from ...softmax import COEFFICIENTS_OF_KERNELS, POLICY_SUMS
from .divergence_rows import (
    BothSoftmaxes,
    add_mixture_tile,
    compute_sums_of_both,
    divergence_gradient,
    fast_exp,
    finite_max,
    log_probability_ratio,
    write_gradient_of_both,
)
from .softmax_rows import (
    ENTROPY,
    LOWEST,
    Row,
    compute_softmax_sums,
    expm1,
    find_first_maximum,
    load_number,
    load_tile,
    load_unscaled_logit,
    row_fields,
    row_pointer,
    store_piece,
    thread_columns,
    transform_derivative,
    write_gradient,
    write_zero_row,
)

POLICY_NAMES = tl.constexpr(" ".join(POLICY_SUMS))
COEFFICIENT_NAMES = tl.constexpr(" ".join(COEFFICIENTS_OF_KERNELS))
NUM_COEFFICIENTS = tl.constexpr(len(COEFFICIENTS_OF_KERNELS))

#: Arguments whose alignment, or divisibility by 16, selects a compiled kernel.
SPECIALIZED = {"logits", "reference", "out", "V", "hidden", "weight", "partial_sums"}


def compile_kernel(function: Any) -> Any:
    """Return a Triton kernel that is specialized for the arguments in SPECIALIZED only.

    Calls with another number of rows, or with vectors of another alignment, do not recompile it.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime = [x.name for x in parameters if x.annotation is not tl.constexpr]
    others = [name for name in runtime if name not in SPECIALIZED]
    return triton.jit(function, do_not_specialize=others)


# ---- optional arguments


@triton.jit
def load_or(x, i, default):
    """Return x[i] of a vector, or the default if x is None."""
    if x is None:
        return default
    else:
        return tl.load(x + i)


# ---- tables of sums and coefficients


@triton.constexpr_function
def row_of_name(names, all_names, k):
    """Return which row of a table holds the k-th of all names, -1 if the table does not have it.

    names       the names of the table's rows, separated by spaces
    all_names   all names that a table may have, in their order
    """
    names = names.split()
    name = all_names.split()[k]
    return names.index(name) if name in names else -1


@triton.constexpr_function
def level_of(names, *names_by_level):
    """Return the highest level of the names of a table, 0 if none of them has a level.

    level_of("target logp", "constant logp", "prob") is 1: "logp" is among the names of level 1, and
    no name of level 2 is in the table. See `softmax_rows.ENTROPY`.

    names            the names of the table's rows, separated by spaces
    names_by_level   the names of level 1, those of level 2, ...
    """
    table_names = set(names.split())
    levels = enumerate(names_by_level, 1)
    present = [level for level, level_names in levels if table_names & set(level_names.split())]
    return max(present, default=0)


@triton.jit
def store_policy_sums(table, stride, i, values, NAMES):
    """Store values of row i in the table's rows of their names. Others are dropped.

    values   of the first names of POLICY_SUMS, in their order
    """
    for k in tl.static_range(len(values)):
        if row_of_name(NAMES, POLICY_NAMES, k) >= 0:
            tl.store(table + row_of_name(NAMES, POLICY_NAMES, k) * stride + i, values[k])


@triton.jit
def store_entries(table, stride, i, values):
    """Store values[k] as entry i of row k of a table."""
    for k in tl.static_range(len(values)):
        tl.store(table + k * stride + i, values[k])


@triton.jit
def int_bits(x):
    """Return a whole number as an fp32 number with the same bits as its int32."""
    return x.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_masked_sums(table, stride, i, NAMES):
    """Store the sums of a masked row, see MASKED_VALUES in core/softmax.py."""
    no_id = int_bits(tl.full((), -1, tl.int32))
    store_policy_sums(table, stride, i, (0.0, 1.0, 0.0, 0.0, 0.0, no_id), NAMES)


@triton.jit
def load_coefficients(table, stride, i, NAMES):
    """Return (coefficients of row i, whether any of them is not 0).

    The coefficients are a tuple in the order of COEFFICIENTS, 0 for those that are not in NAMES.
    """
    values = (tl.load(table + i),)
    for k in tl.static_range(1, NUM_COEFFICIENTS):
        x = values[0] * 0.0
        if row_of_name(NAMES, COEFFICIENT_NAMES, k) > 0:
            x = tl.load(table + row_of_name(NAMES, COEFFICIENT_NAMES, k) * stride + i)
        values = values + (x,)  # type: ignore[assignment]  # noqa: RUF005
    has_gradient = values[0] != 0.0
    for k in tl.static_range(1, NUM_COEFFICIENTS):
        if row_of_name(NAMES, COEFFICIENT_NAMES, k) > 0:
            has_gradient = has_gradient | (values[k] != 0.0)
    return values, has_gradient


# ---- rows of the policy


@compile_kernel
def softmax_sums_kernel(
    # logits [A, T, V] and their transform; inverse_temperature is a number or [num_rows]
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    inverse_temperature,
    transform,
    V,
    T,
    first_row: tl.int64,
    # [num_rows]; the mask may be None
    targets,
    mask,
    # [num_names, num_rows]
    sums,
    sums_stride: tl.int64,
    NAMES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the softmax sums NAMES, some of POLICY_SUMS, of each row; masked rows get constants.

    With z the logits of the row after its transform: max_j z_j, sum_j exp(z_j - max z), z of the
    target, sum_j exp(z_j - max z) (z_j - max z), sum_j exp(2 (z_j - max z)) and argmax_j z_j.
    """
    i = tl.program_id(0).to(tl.int64)
    if load_or(mask, i, True):
        fields = row_fields(
            logits, stride_a, stride_t, inverse_temperature, transform, V, T, first_row, i, TILE
        )
        row = Row(*fields, *transform)
        target_u = load_unscaled_logit(row, tl.load(targets + i))
        LEVEL: tl.constexpr = level_of(NAMES, "sum_exp_shifted", "sum_exp_squared")
        max_u, sum_exp, shifted, squared, _ = compute_softmax_sums(row, LEVEL, 0, TILE)
        argmax = max_u  # any number: it is not stored if NAMES has no argmax
        if level_of(NAMES, "argmax") > 0:
            argmax = int_bits(find_first_maximum(row, max_u, TILE))
        max_logit = row.u_to_z * max_u
        target_logit = row.u_to_z * target_u
        values = (max_logit, sum_exp, target_logit, shifted, squared, argmax)
        store_policy_sums(sums, sums_stride, i, values, NAMES)
    else:
        store_masked_sums(sums, sums_stride, i, NAMES)


@compile_kernel
def softmax_gradient_kernel(
    # x and d loss / dx, [A, T, V]: A * T rows of V logits, with strides stride_a and stride_t in A
    # and T and unit stride in V; out may be the memory of the logits
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    out,
    out_stride_a: tl.int64,
    out_stride_t: tl.int64,
    # scale, softcap and temperature, which make z of x; inverse_temperature: a number or [num_rows]
    inverse_temperature,
    transform,
    V,
    T,
    # row i of the call is row first_row + i of the A * T rows of logits
    first_row: tl.int64,
    # int64 [num_rows]
    targets,
    # fp32 [num_sums, num_rows]; its first rows are max_j z_j, sum_j exp(z_j - max z), z[target]
    sums,
    sums_stride: tl.int64,
    # fp32 [num_coefficients, num_rows], with a row for each of NAMES
    coefficients,
    coefficients_stride: tl.int64,
    NAMES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the gradient of a loss with respect to the logits x of each row, one program per row.

    With p = softmax(z), and a row's coefficients target, constant, logp and prob (0 without a name
    in NAMES), see `GradientCoefficients`, it is dz_j / dx_j times

        d loss / d z_j = target * (1[j = targets[i]] - p_j)
                       + p_j * (constant + logp * log p_j + prob * p_j)

    A row whose coefficients are all 0 becomes 0, and its logits are not read. In names u are the
    logits before scale and temperature (tanh(x * scale / softcap), x or -x), so z = u_to_z * u.
    """
    i = tl.program_id(0).to(tl.int64)
    values, has_gradient = load_coefficients(coefficients, coefficients_stride, i, NAMES)
    out_row = row_pointer(out, first_row + i, T, out_stride_a, out_stride_t, TILE)
    if has_gradient:
        fields = row_fields(
            logits, stride_a, stride_t, inverse_temperature, transform, V, T, first_row, i, TILE
        )
        row = Row(*fields, *transform)
        max_logit = tl.load(sums + i)
        sum_exp = tl.load(sums + sums_stride + i)
        target_logit = tl.load(sums + 2 * sums_stride + i)
        # Terms that are 0 are not compiled: level 0 has `target` only, 1 also constant and logp, 2
        # also prob.
        LEVEL: tl.constexpr = level_of(NAMES, "constant logp", "prob")
        target_id = tl.load(targets + i)
        target_u = tl.div_rn(target_logit, row.u_to_z)
        target_logp = (target_logit - max_logit) - tl.log(sum_exp)
        # In `write_gradient` p is exp(v_to_z * (v - max_v)) / sum_exp with v = u_to_v * u. Here v
        # is z, whose maximum is stored. Divided by u_to_z it might not be the maximum of u.
        write_gradient(
            row,
            out_row,
            None,  # no tile of the row is in registers
            target_id,
            target_u,
            target_logp,
            row.u_to_z,  # u_to_v
            1.0,  # v_to_z
            max_logit,
            sum_exp,
            LEVEL,
            values[:4],
            TILE,
        )
    else:
        write_zero_row(out_row, V, TILE)


@compile_kernel
def fused_loss_kernel(
    # logits [A, T, V], and their gradient, which may overwrite them; None: no gradient
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    out,
    out_stride_a: tl.int64,
    out_stride_t: tl.int64,
    # the transform of the logits; inverse_temperature is a number or [num_rows]
    inverse_temperature,
    transform,
    V,
    T,
    # [num_rows]; the mask may be None
    targets,
    mask,
    # inputs of the formula, [num_rows] or None
    old_logps,
    ref_logps,
    sampler_logps,
    advantages,
    policy_weight,
    kl_weight,
    entropy_weight,
    nll_weight,
    # numbers of the formula, a tuple
    numbers,
    # [3, num_rows]: log-probs, entropies, losses, see `FusedLossValues`
    loss_values,
    num_rows,
    FORMULA: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute log-prob, entropy and loss of each row, and write d loss / d logits.

    Each program computes the softmax sums of its row, then FORMULA from the log-prob of the target
    and the entropy, then the gradient of the row from d loss / d log-prob and d loss / d entropy.
    Masked rows get 0 in all results.

    FORMULA   ((logp, entropy), i, inputs, numbers) -> (loss, d loss / d logp, d loss / d entropy)
    """
    LEVEL: tl.constexpr = 1 if entropy_weight is not None else 0
    i = tl.program_id(0).to(tl.int64)
    # All are loaded before the first is used, so that the program waits once.
    target = tl.load(targets + i)
    temperature = load_number(inverse_temperature, i)
    is_processed = load_or(mask, i, True)
    if is_processed:
        fields = row_fields(logits, stride_a, stride_t, temperature, transform, V, T, 0, i, TILE)
        row = Row(*fields, *transform)
        # Loaded before the first store, since the gradient may overwrite the logits. The reductions
        # below act as the barrier.
        target_u = load_unscaled_logit(row, target)
        max_u, sum_exp, shifted, _, kept = compute_softmax_sums(row, ENTROPY, TILE.KEPT, TILE)
        log_sum = tl.log(sum_exp)
        # The order of operations gives the bits of `SoftmaxSums.logps`.
        logp = (row.u_to_z * target_u - row.u_to_z * max_u) - log_sum
        entropy = log_sum - shifted / sum_exp
        entropy = tl.where(entropy < 0.0, 0.0, entropy)  # unlike maximum, keeps NaN
        inputs = (
            old_logps,
            ref_logps,
            sampler_logps,
            advantages,
            policy_weight,
            kl_weight,
            entropy_weight,
            nll_weight,
        )
        loss_and_gradients = FORMULA((logp, entropy), i, inputs, numbers)
        grad_logp = loss_and_gradients[1]
        grad_entropy = loss_and_gradients[2]
        tl.store(loss_values + i, logp)
        tl.store(loss_values + i + num_rows, entropy)
        tl.store(loss_values + i + num_rows + num_rows, loss_and_gradients[0])
        if out is not None:
            out_row = row_pointer(out, i, T, out_stride_a, out_stride_t, TILE)
            if (grad_logp != 0.0) | (grad_entropy != 0.0):
                # (target, constant, logp, prob): d entropy / d z_j = -p_j (log p_j + entropy)
                coefficients = (
                    grad_logp.to(tl.float32),
                    -grad_entropy * entropy,
                    -grad_entropy,
                    0.0,
                )
                write_gradient(
                    row,
                    out_row,
                    kept if TILE.KEPT > 0 else None,
                    target,
                    target_u,
                    logp,
                    1.0,  # u_to_v: the sums are relative to max u, so v is u
                    row.u_to_z,  # v_to_z
                    max_u,
                    sum_exp,
                    LEVEL,
                    coefficients,
                    TILE,
                )
            else:
                write_zero_row(out_row, V, TILE)
    else:
        tl.store(loss_values + i, 0.0)
        tl.store(loss_values + i + num_rows, 0.0)
        tl.store(loss_values + i + num_rows + num_rows, 0.0)
        if out is not None:
            write_zero_row(row_pointer(out, i, T, out_stride_a, out_stride_t, TILE), V, TILE)


# ---- vectors


@compile_kernel
def evaluate_formula_kernel(
    # [num_rows]
    logps,
    entropy,
    # inputs of the formula, [num_rows] or None
    old_logps,
    ref_logps,
    sampler_logps,
    advantages,
    policy_weight,
    kl_weight,
    entropy_weight,
    nll_weight,
    log_ratios,
    auxiliary_loss,
    # numbers of the formula, a tuple
    numbers,
    num_rows,
    # [NUM_OUTPUTS, num_rows], contiguous
    outputs,
    FORMULA: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the loss of each row and its gradients from logps and entropy, all [num_rows].

    A program takes TILE.BLOCK rows.

    FORMULA   ((logp, entropy), i, inputs, numbers) -> the outputs of row i, a tuple
    """
    rows = tl.program_id(0).to(tl.int64) * TILE.BLOCK + tl.arange(0, TILE.BLOCK)
    is_inside = rows < num_rows
    # A formula loads its inputs without a mask, so rows behind the last compute the last one.
    i = tl.minimum(rows, num_rows - 1)
    inputs = (
        old_logps,
        ref_logps,
        sampler_logps,
        advantages,
        policy_weight,
        kl_weight,
        entropy_weight,
        nll_weight,
        log_ratios,
        auxiliary_loss,
    )
    statistics = (tl.load(logps + i), tl.load(entropy + i))
    loss_and_gradients = FORMULA(statistics, i, inputs, numbers)
    output = outputs + i
    for k in tl.static_range(NUM_OUTPUTS):
        tl.store(output, loss_and_gradients[k], mask=is_inside)
        output += num_rows


@triton.jit
def scale_tile(row, start, factor, PIECES, END):
    """Multiply the tile of a row at column `start` by a factor in place.

    END   whether the tile may reach beyond the end of the row
    """
    xs = load_tile(row, start, PIECES, END, "")
    for i in tl.static_range(PIECES):
        store_piece(row.start, start, i, row, xs[i].to(tl.float32) * factor, END, "")


@compile_kernel
def scale_kernel(
    # [A, T, num_columns] with num_rows = A * T
    out,
    stride_a: tl.int64,
    stride_t: tl.int64,
    num_columns: tl.int64,
    T: tl.int64,
    num_rows: tl.int64,
    # 0-d
    factor,
    TILE: tl.constexpr,
):
    """Multiply `out` by a 0-d factor in place, unless it is 1.

    Of N programs, program n takes tiles n, n + N, n + 2 N, ... of all rows.
    """
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        columns = thread_columns(TILE, TILE.ALIGNED)
        tiles_per_row = tl.cdiv(num_columns, TILE.BLOCK)
        first_tile = tl.program_id(0).to(tl.int64)
        for tile in range(first_tile, num_rows * tiles_per_row, tl.num_programs(0)):
            start = (tile % tiles_per_row) * TILE.BLOCK
            pointer = row_pointer(out, tile // tiles_per_row, T, stride_a, stride_t, TILE)
            row = Row(pointer, num_columns, columns, None, None, None, None, None)
            if start + TILE.BLOCK <= num_columns:
                scale_tile(row, start, scale, TILE.ACCESSES, False)
            else:
                scale_tile(row, start, scale, TILE.ACCESSES, True)


# ---- rows of the policy and a reference


@triton.jit
def fields_of_both_rows(
    logits,
    stride_a,
    stride_t,
    reference,
    reference_stride_a,
    reference_stride_t,
    inverse_temperature,
    transform,
    reference_inverse_temperature,
    reference_transform,
    V,
    T,
    first_row,
    i,
    TILE,
):
    """Return the `row_fields` of row i of the policy's logits, and of the reference's."""
    fields = row_fields(
        logits, stride_a, stride_t, inverse_temperature, transform, V, T, first_row, i, TILE
    )
    reference_fields = row_fields(
        reference,
        reference_stride_a,
        reference_stride_t,
        reference_inverse_temperature,
        reference_transform,
        V,
        T,
        first_row,
        i,
        TILE,
    )
    return fields, reference_fields


# ---- sums and gradients with a reference
#
# reference_sums are the rows of the table `sums` from reference_max_logit on, with the same stride.


@triton.jit
def load_softmaxes(sums, reference_sums, stride, log_sum_ratio, i):
    """Return (`BothSoftmaxes` of row i, the policy's sum_exp) from the tables of sums."""
    base = finite_max(tl.load(sums + i))
    reference_base = finite_max(tl.load(reference_sums + i))
    sum_exp = tl.load(sums + stride + i)
    inverse_sum = 1.0 / sum_exp
    reference_inverse_sum = 1.0 / tl.load(reference_sums + stride + i)
    softmaxes = BothSoftmaxes(
        base, reference_base, inverse_sum, reference_inverse_sum, tl.load(log_sum_ratio + i)
    )
    return softmaxes, sum_exp


@compile_kernel
def reference_sums_kernel(
    # logits of both [A, T, V]
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    reference,
    reference_stride_a: tl.int64,
    reference_stride_t: tl.int64,
    # transforms of both; an inverse temperature is a number or [num_rows]
    inverse_temperature,
    transform,
    reference_inverse_temperature,
    reference_transform,
    V,
    T,
    first_row: tl.int64,
    # [num_rows]; the mask may be None
    targets,
    mask,
    # [num_names, num_rows], and its rows from reference_max_logit on, [4, num_rows]
    sums,
    reference_sums,
    sums_stride: tl.int64,
    NAMES: tl.constexpr,
    DIRECTION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the policy's softmax sums NAMES, and all REFERENCE_SUMS, of each row.

    `SUMS` in core/softmax.py has their formulas. Masked rows get constants.

    DIRECTION   "forward", or "reverse", whose sums serve all other directions
    """
    i = tl.program_id(0).to(tl.int64)
    if load_or(mask, i, True):
        fields, reference_fields = fields_of_both_rows(
            logits,
            stride_a,
            stride_t,
            reference,
            reference_stride_a,
            reference_stride_t,
            inverse_temperature,
            transform,
            reference_inverse_temperature,
            reference_transform,
            V,
            T,
            first_row,
            i,
            TILE,
        )
        row = Row(*fields, *transform)
        reference_row = Row(*reference_fields, *reference_transform)
        target_u = load_unscaled_logit(row, tl.load(targets + i))
        LEVEL: tl.constexpr = level_of(NAMES, "sum_exp_shifted", "sum_exp_squared")
        (
            max_logit,
            reference_max_logit,
            sum_exp,
            reference_sum_exp,
            log_ratio,
            excess,
            shifted,
            squared,
        ) = compute_sums_of_both(row, reference_row, DIRECTION == "forward", LEVEL, TILE)
        policy_values = (max_logit, sum_exp, row.u_to_z * target_u, shifted, squared)
        store_policy_sums(sums, sums_stride, i, policy_values, NAMES)
        reference_values = (reference_max_logit, reference_sum_exp, log_ratio, excess)
        store_entries(reference_sums, sums_stride, i, reference_values)
    else:
        store_masked_sums(sums, sums_stride, i, NAMES)
        store_entries(reference_sums, sums_stride, i, (0.0, 1.0, 0.0, 0.0))


@compile_kernel
def mixture_sums_kernel(
    # logits of both [A, T, V]
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    reference,
    reference_stride_a: tl.int64,
    reference_stride_t: tl.int64,
    # transforms of both; an inverse temperature is a number or [num_rows]
    inverse_temperature,
    transform,
    reference_inverse_temperature,
    reference_transform,
    V,
    T,
    first_row: tl.int64,
    # [num_rows] or None
    mask,
    # [num_sums, num_rows], its rows from reference_max_logit on, and [num_rows]
    sums,
    reference_sums,
    sums_stride: tl.int64,
    log_sum_ratio,
    # weights of the reference and of the policy in the mixture, a tuple of two numbers
    mixture_weights,
    # [2, num_rows]
    mixture_sums,
    mixture_sums_stride: tl.int64,
    DIRECTION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute two sums over the vocabulary of each row, see `mixture_terms` in core/divergence.py.

    With p the policy's softmax, q the reference's and m = (1 - b) p + b q they are

        DIRECTION "jsd"   KL(p || m) and KL(q || m)
        DIRECTION "tv"    sum_j p_j sign(p_j - q_j) / 2 and sum_j |p_j - q_j| / 2
    """
    i = tl.program_id(0).to(tl.int64)
    if load_or(mask, i, True):
        fields, reference_fields = fields_of_both_rows(
            logits,
            stride_a,
            stride_t,
            reference,
            reference_stride_a,
            reference_stride_t,
            inverse_temperature,
            transform,
            reference_inverse_temperature,
            reference_transform,
            V,
            T,
            first_row,
            i,
            TILE,
        )
        row = Row(*fields, *transform)
        reference_row = Row(*reference_fields, *reference_transform)
        softmaxes, _ = load_softmaxes(sums, reference_sums, sums_stride, log_sum_ratio, i)
        zeros = tl.zeros(row.columns.shape, tl.float32)
        lane_sums = (zeros, zeros)
        end = (V - 1) // TILE.BLOCK * TILE.BLOCK
        for start in range(0, end, TILE.BLOCK):
            lane_sums = add_mixture_tile(
                lane_sums,
                row,
                reference_row,
                start,
                softmaxes,
                mixture_weights,
                DIRECTION,
                TILE.ACCESSES,
                False,
            )
        lane_sums = add_mixture_tile(
            lane_sums,
            row,
            reference_row,
            end,
            softmaxes,
            mixture_weights,
            DIRECTION,
            TILE.ACCESSES,
            True,
        )
        # 0, or NaN if log_sum_ratio is NaN or infinite: a row has a NaN or only -inf.
        nan_without_divergence = 0.0 * softmaxes.log_sum_ratio
        for k in tl.static_range(2):
            total = tl.sum(tl.sum(lane_sums[k], axis=1), axis=0)
            tl.store(mixture_sums + k * mixture_sums_stride + i, total + nan_without_divergence)
    else:
        tl.store(mixture_sums + i, 0.0)
        tl.store(mixture_sums + mixture_sums_stride + i, 0.0)


@compile_kernel
def reference_gradient_kernel(
    # logits of both [A, T, V], and the gradient, which may overwrite either of them
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    reference,
    reference_stride_a: tl.int64,
    reference_stride_t: tl.int64,
    out,
    out_stride_a: tl.int64,
    out_stride_t: tl.int64,
    # transforms of both; an inverse temperature is a number or [num_rows]
    inverse_temperature,
    transform,
    reference_inverse_temperature,
    reference_transform,
    V,
    T,
    first_row: tl.int64,
    # [num_rows], then [num_sums, num_rows], and its rows from reference_max_logit on
    targets,
    sums,
    reference_sums,
    sums_stride: tl.int64,
    # [num_rows], see `SoftmaxSums`
    log_sum_ratio,
    centers,
    # weights of the reference and of the policy in the mixture, a tuple of two numbers
    mixture_weights,
    # [num_coefficients, num_rows]
    coefficients,
    coefficients_stride: tl.int64,
    NAMES: tl.constexpr,
    DIRECTION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write d loss / d logits of each row, for a loss with a divergence from the reference.

    It is the gradient of `softmax_gradient_kernel` plus the coefficient "divergence" times the
    gradient of the divergence, see `divergence_gradient` in core/divergence.py.
    """
    LEVEL: tl.constexpr = level_of(NAMES, "logp", "prob")
    i = tl.program_id(0).to(tl.int64)
    values, has_gradient = load_coefficients(coefficients, coefficients_stride, i, NAMES)
    per_target, constant, per_logp, per_prob, per_divergence = values
    out_row = row_pointer(out, first_row + i, T, out_stride_a, out_stride_t, TILE)
    if has_gradient:
        fields, reference_fields = fields_of_both_rows(
            logits,
            stride_a,
            stride_t,
            reference,
            reference_stride_a,
            reference_stride_t,
            inverse_temperature,
            transform,
            reference_inverse_temperature,
            reference_transform,
            V,
            T,
            first_row,
            i,
            TILE,
        )
        row = Row(*fields, *transform)
        reference_row = Row(*reference_fields, *reference_transform)
        softmaxes, sum_exp = load_softmaxes(sums, reference_sums, sums_stride, log_sum_ratio, i)
        log_sum = tl.log(sum_exp)
        divergence = (per_divergence, tl.load(centers + i), mixture_weights[0], mixture_weights[1])
        factors = ((constant - per_target) - per_logp * log_sum, per_logp, per_prob)
        target = tl.load(targets + i)
        target_w = reference_row.u_to_z * load_unscaled_logit(reference_row, target)
        # Between this load and the first store: the gradient may overwrite the reference's row.
        tl.debug_barrier()
        end = (V - 1) // TILE.BLOCK * TILE.BLOCK
        for start in range(0, end, TILE.BLOCK):
            write_gradient_of_both(
                row,
                reference_row,
                out_row,
                start,
                softmaxes,
                factors,
                divergence,
                DIRECTION,
                LEVEL,
                TILE.ACCESSES,
                False,
            )
        write_gradient_of_both(
            row,
            reference_row,
            out_row,
            end,
            softmaxes,
            factors,
            divergence,
            DIRECTION,
            LEVEL,
            TILE.ACCESSES,
            True,
        )
        # The target's gradient is computed separately, see `store_target_gradient`.
        target_z = tl.load(sums + 2 * sums_stride + i)
        logp = (target_z - softmaxes.base) - log_sum
        # As in `write_gradient_of_both`, so that it is 0 if it is 0 there.
        prob = fast_exp(target_z - softmaxes.base) * softmaxes.inverse_sum
        factor = constant + per_logp * tl.maximum(logp, LOWEST) + per_prob * prob
        grad = -per_target * expm1(logp) + prob * factor
        d = log_probability_ratio(target_z, target_w, softmaxes)
        grad += divergence_gradient(prob, target_w, d, softmaxes, *divergence, DIRECTION)
        grad *= transform_derivative(tl.div_rn(target_z, row.u_to_z), row)
        tl.debug_barrier()  # the store follows those of the row's tiles
        is_inside = (target >= 0) & (target < V)
        tl.store(out_row + target, grad.to(out.dtype.element_ty), mask=is_inside)
    else:
        write_zero_row(out_row, V, TILE)
