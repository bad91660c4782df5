"""The Triton kernels over rows of logits (softmax sums, gradients, fused loss) and over vectors.

There is one program (instance of a kernel) for each row of logits, on grid axis 0; the other axes
are limited to 65 535. Logits are x [A, T, V]: row r of their A * T rows is x[r // T, r % T], V
logits with unit stride. Row i of a call is row first_row + i of these; vectors are [num_rows].

z are the logits after scale, softcap and temperature. u is z without its last factor `u_to_z`, see
`softmax_rows.Transform`. Softmax sums (see `SUMS` in core/softmax.py) and coefficients are
tables: a pointer to fp32 [num_names, num_rows], the stride of its rows, and at compile time the
names of these rows, as one string separated by spaces. Upper-case arguments are compile-time
values. TILE is a `launch.Tile`: what a program processes of a row at a time.
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
    load_u,
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

    By default Triton compiles a kernel again if an integer becomes divisible by 16 or equal to 1,
    or if the alignment of a pointer changes. Here a new number of rows, for example, does not
    recompile it.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime_names = [x.name for x in parameters if x.annotation is not tl.constexpr]
    not_specialized = [name for name in runtime_names if name not in SPECIALIZED]
    return triton.jit(function, do_not_specialize=not_specialized)


# ---- optional arguments


@triton.jit
def load_or(x, i, default):
    """Return element i of a vector x, or the default if x is None. x is a pointer."""
    if x is None:
        return default
    else:
        return tl.load(x + i)


# ---- tables of sums and coefficients


@triton.constexpr_function
def row_of_name(names, all_names, k):
    """Return which row of a table has the k-th of all names, or -1 if no row has it.

    For example row_of_name("max_logit argmax", "max_logit sum_exp argmax", 2) is 1.

    names       names of the table's rows, separated by spaces
    all_names   all names that a table may have, separated by spaces
    k           index of a name in all_names
    """
    names = names.split()
    name = all_names.split()[k]
    return names.index(name) if name in names else -1


@triton.constexpr_function
def level_of(names, *names_by_level):
    """Return the level of computation that a table needs: the highest level of one of its names.

    Code for levels above it is not compiled, see `softmax_rows.ENTROPY`. For example
    level_of("target logp", "constant logp", "prob") is 1: the table has "logp", a name of level 1,
    and no name of level 2. Names of no level count as level 0.

    names            names of the table's rows, separated by spaces
    names_by_level   names of level 1, names of level 2, ..., each separated by spaces
    """
    table_names = set(names.split())
    levels = enumerate(names_by_level, 1)
    present = [level for level, level_names in levels if table_names & set(level_names.split())]
    return max(present, default=0)


@triton.jit
def store_policy_sums(table, stride, i, values, NAMES):
    """Store softmax sums of the policy's row i: table[index of name, i] = value of the name.

    table    fp32 [num_names, num_rows], with a row for each of NAMES
    stride   stride of the table's rows
    i        number of the row in the call
    values   a tuple of the values of max_logit, sum_exp, target_logit, ..., in the order of
             POLICY_SUMS; it may end early. A value whose name is not in NAMES is not stored.
    """
    for k in tl.static_range(len(values)):
        if row_of_name(NAMES, POLICY_NAMES, k) >= 0:
            tl.store(table + row_of_name(NAMES, POLICY_NAMES, k) * stride + i, values[k])


@triton.jit
def store_entries(table, stride, i, values):
    """Store table[k, i] = values[k] for each k; `stride` is the stride of the table's rows."""
    for k in tl.static_range(len(values)):
        tl.store(table + k * stride + i, values[k])


@triton.jit
def int_bits(x):
    """Convert x to int32 and return the fp32 number with the same bits.

    A table of fp32 numbers can so hold an int32 exactly. The reader takes the bits as int32 again.
    """
    return x.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_masked_sums(table, stride, i, NAMES):
    """Store constants as the softmax sums of a masked row i.

    sum_exp is 1, argmax is -1 (in the bits of an int32), and other sums are 0, as in MASKED_VALUES
    of core/softmax.py. Log-prob and entropy are then 0.
    """
    no_id = int_bits(tl.full((), -1, tl.int32))
    # In the order of POLICY_SUMS: max_logit, sum_exp, target_logit, sum_exp_shifted,
    # sum_exp_squared, argmax.
    values = (0.0, 1.0, 0.0, 0.0, 0.0, no_id)
    store_policy_sums(table, stride, i, values, NAMES)


@triton.jit
def load_coefficients(table, stride, i, NAMES):
    """Return (coefficients of row i, whether any of them is not 0).

    The coefficients are a tuple in the order of COEFFICIENTS_OF_KERNELS of core/softmax.py: target,
    constant, logp, prob, divergence. They are 0 for names that are not in NAMES.
    """
    values = (tl.load(table + i),)  # "target" is the first row of every table
    for k in tl.static_range(1, NUM_COEFFICIENTS):
        x = values[0] * 0.0  # 0 in the type that the table has
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
    # logits [A, T, V] (A * T rows of V) and their transform; inverse_temperature is a number or
    # [num_rows]
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    inverse_temperature,
    transform,
    V,
    T,
    # row i of the call is row first_row + i of the A * T rows of logits
    first_row: tl.int64,
    # int64 [num_rows], and bool [num_rows] or None: rows to process
    targets,
    mask,
    # the results, fp32 [num_names, num_rows], with a row for each of NAMES
    sums,
    sums_stride: tl.int64,
    NAMES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute softmax sums of each row of logits x, one program for each row.

    z are the logits x after scale, softcap and temperature. NAMES are some of

        max_logit         max_j z_j
        sum_exp           sum_j exp(z_j - max z)
        target_logit      z of the target
        sum_exp_shifted   sum_j exp(z_j - max z) (z_j - max z)
        sum_exp_squared   sum_j exp(2 (z_j - max z))
        argmax            argmax_j z_j, as the bits of an int32

    Masked rows get constants, see `store_masked_sums`.

    In the code u is z without its last factor `u_to_z`: tanh(x * scale / softcap) with a softcap,
    else x, or -x for a negative scale. z = u_to_z * u with u_to_z > 0. The sums are computed from
    u, which saves a multiplication for each logit.
    """
    i = tl.program_id(0).to(tl.int64)
    if load_or(mask, i, default=True):
        fields = row_fields(
            logits, stride_a, stride_t, inverse_temperature, transform, V, T, first_row, i, TILE
        )
        # `row_fields` cannot return the fields of the transform, which may be None.
        row = Row(*fields, *transform)
        target_u = load_u(row, tl.load(targets + i))
        # Level 0 computes no sum_exp_shifted, level 1 no sum_exp_squared. KEPT=0: no tile of the
        # row stays in registers, because this kernel reads the row once.
        LEVEL: tl.constexpr = level_of(NAMES, "sum_exp_shifted", "sum_exp_squared")
        max_u, sum_exp, shifted, squared, _ = compute_softmax_sums(row, LEVEL, KEPT=0, TILE=TILE)
        argmax = max_u  # a placeholder, which is not stored if NAMES has no argmax
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
    # scale, softcap and temperature, which turn x into z; inverse_temperature: a number or
    # [num_rows]
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

    A row has coefficients target, constant, logp and prob, see `GradientCoefficients`; a
    coefficient whose name is not in NAMES is 0. With p = softmax(z) the gradient at column j is
    dz_j / dx_j times

        d loss / d z_j = target * (1[j = targets[i]] - p_j)
                       + p_j * (constant + logp * log p_j + prob * p_j)

    If all coefficients of a row are 0, its gradient is 0 and its logits are not read.

    In the code u is z without its last factor `u_to_z`: tanh(x * scale / softcap) with a softcap,
    else x, or -x for a negative scale. z = u_to_z * u with u_to_z > 0.
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
        # `write_gradient` computes p as exp(v_to_z * (v - max_v)) / sum_exp with v = u_to_v * u.
        # Here v is z, because the table has the maximum of z: divided by u_to_z it might differ
        # from the maximum of u by a rounding.
        write_gradient(
            row,
            out_row,
            kept=None,  # no tile of the row is in registers
            target_id=target_id,
            target_u=target_u,
            target_logp=target_logp,
            u_to_v=row.u_to_z,
            v_to_z=1.0,
            max_v=max_logit,
            sum_exp=sum_exp,
            LEVEL=LEVEL,
            coefficients=values[:4],  # without "divergence"
            TILE=TILE,
        )
    else:
        write_zero_row(out_row, V, TILE)


@compile_kernel
def fused_loss_kernel(
    # logits [A, T, V] (A * T rows of V), and their gradient, which may overwrite them; None: no
    # gradient
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    out,
    out_stride_a: tl.int64,
    out_stride_t: tl.int64,
    # scale, softcap and temperature of the logits; inverse_temperature is a number or [num_rows]
    inverse_temperature,
    transform,
    V,
    T,
    # int64 [num_rows], and bool [num_rows] or None: rows to process
    targets,
    mask,
    # inputs of the loss formula, fp32 [num_rows], or None if the formula does not read them
    old_logps,
    ref_logps,
    sampler_logps,
    advantages,
    policy_weight,
    kl_weight,
    entropy_weight,
    nll_weight,
    # scalars of the formula that are not constants in its source, such as clip bounds: a tuple
    numbers,
    # fp32 [3, num_rows]: log-probs, entropies, losses, see `FusedLossValues`
    loss_values,
    num_rows,
    FORMULA: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute log-prob, entropy and loss of each row, and write d loss / d logits.

    Each program (one for each row of logits) computes the softmax sums of its row, then the loss
    formula from the log-prob of the target and the entropy, then the gradient of the row from
    d loss / d log-prob and d loss / d entropy. Masked rows get 0 in all results.

    FORMULA   the loss formula as a Triton function ((logp, entropy), i, inputs, numbers) ->
              (loss, d loss / d logp, d loss / d entropy), see `launch.formula_function`

    In the code z are the logits after scale, softcap and temperature, and u is z without its last
    factor `u_to_z`: tanh(x * scale / softcap) with a softcap, else x, or -x for a negative scale.
    """
    LEVEL: tl.constexpr = 1 if entropy_weight is not None else 0
    i = tl.program_id(0).to(tl.int64)
    # All three are loaded before the first one is used, so that the program waits once.
    target = tl.load(targets + i)
    inverse_of_row = load_number(inverse_temperature, i)  # its inverse temperature
    is_processed = load_or(mask, i, default=True)
    if is_processed:
        fields = row_fields(logits, stride_a, stride_t, inverse_of_row, transform, V, T, 0, i, TILE)
        row = Row(*fields, *transform)
        # Load the target's logit before any store, because the gradient may overwrite the logits.
        # No barrier is needed: the reductions of compute_softmax_sums synchronize the threads.
        target_u = load_u(row, target)
        max_u, sum_exp, shifted, _, kept = compute_softmax_sums(
            row, LEVEL=ENTROPY, KEPT=TILE.KEPT, TILE=TILE
        )
        log_sum = tl.log(sum_exp)
        # This order of operations gives the same bits as `SoftmaxSums.logps`, which computes the
        # log-prob in losses of two passes.
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
                # (target, constant, logp, prob) of `GradientCoefficients`. The entropy adds to
                # constant and logp, because d entropy / d z_j = -p_j (log p_j + entropy).
                coefficients = (
                    grad_logp.to(tl.float32),
                    -grad_entropy * entropy,
                    -grad_entropy,
                    0.0,
                )
                # The sums are relative to max u, so the v of `write_gradient` is u.
                write_gradient(
                    row,
                    out_row,
                    kept=kept if TILE.KEPT > 0 else None,
                    target_id=target,
                    target_u=target_u,
                    target_logp=logp,
                    u_to_v=1.0,
                    v_to_z=row.u_to_z,
                    max_v=max_u,
                    sum_exp=sum_exp,
                    LEVEL=LEVEL,
                    coefficients=coefficients,
                    TILE=TILE,
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
    # fp32 [num_rows]
    logps,
    entropy,
    # inputs of the loss formula, fp32 [num_rows], or None if the formula does not read them
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
    # scalars of the formula that are not constants in its source, such as clip bounds: a tuple
    numbers,
    num_rows,
    # the results, fp32 [NUM_OUTPUTS, num_rows], contiguous
    outputs,
    FORMULA: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the loss of each row and its gradients from the log-prob and entropy of the row.

    Each program (instance of the kernel) computes TILE.BLOCK rows.

    FORMULA   the loss formula as a Triton function ((logp, entropy), i, inputs, numbers) -> outputs
              of row i, a tuple of NUM_OUTPUTS, see `launch.formula_function`
    """
    rows = tl.program_id(0).to(tl.int64) * TILE.BLOCK + tl.arange(0, TILE.BLOCK)
    is_inside = rows < num_rows
    # A formula loads its inputs without a mask. So rows behind the last row compute the last row
    # again, and are not stored.
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

    PIECES   number of pieces (one access of each thread) of the tile
    END      whether the tile may reach beyond the end of the row
    """
    xs = load_tile(row, start, PIECES, END, HINT="")
    for i in tl.static_range(PIECES):
        product = xs[i].to(tl.float32) * factor
        store_piece(row.start, start, i, row, product, END, HINT="")


@compile_kernel
def scale_kernel(
    # [A, T, num_columns], num_rows = A * T rows
    out,
    stride_a: tl.int64,
    stride_t: tl.int64,
    num_columns: tl.int64,
    T: tl.int64,
    num_rows: tl.int64,
    # pointer to a single number
    factor,
    TILE: tl.constexpr,
):
    """Multiply `out` by a factor in place. Write nothing if the factor is 1.

    The rows are divided into tiles. Of N programs, program n takes tiles n, n + N, n + 2 N, ...
    """
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        columns = thread_columns(TILE, TILE.ALIGNED)
        tiles_per_row = tl.cdiv(num_columns, TILE.BLOCK)
        first_tile = tl.program_id(0).to(tl.int64)
        for tile in range(first_tile, num_rows * tiles_per_row, tl.num_programs(0)):
            start = (tile % tiles_per_row) * TILE.BLOCK
            pointer = row_pointer(out, tile // tiles_per_row, T, stride_a, stride_t, TILE)
            # Only its first three fields are used here: there is no transform.
            row = Row(pointer, num_columns, columns, None, None, None, None, None)
            if start + TILE.BLOCK <= num_columns:
                scale_tile(row, start, scale, PIECES=TILE.ACCESSES, END=False)
            else:
                scale_tile(row, start, scale, PIECES=TILE.ACCESSES, END=True)


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
    """Return (policy fields, reference fields) of row i of a call, see `row_fields`.

    logits, reference   logits [A, T, V] of policy and reference, each with strides and a transform
    """
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
# `reference_sums` is a pointer to row "reference_max_logit" of the table `sums`. The rows
# "reference_sum_exp", "sum_log_ratio" and "sum_log_ratio_excess" follow.


@triton.jit
def load_softmaxes(sums, reference_sums, stride, log_sum_ratio, i):
    """Load what turns the logits of row i into probabilities, from the sums of a first pass.

    Returns (softmaxes, sum_exp): the numbers of both softmaxes as `BothSoftmaxes`, and the policy's
    sum_exp, of which that has the inverse only.

    sums             pointer to a table fp32 [num_names, num_rows]: its row 0 is max_logit of the
                     policy, and row 1 sum_exp
    reference_sums   pointer to row "reference_max_logit" of this table, which is followed by
                     row "reference_sum_exp"
    stride           stride of the table's rows
    log_sum_ratio    fp32 [num_rows]: log(reference_sum_exp / sum_exp), computed more accurately
                     than from the two sums
    """
    max_logit = tl.load(sums + i)
    sum_exp = tl.load(sums + stride + i)
    reference_max_logit = tl.load(reference_sums + i)
    reference_sum_exp = tl.load(reference_sums + stride + i)
    base = finite_max(max_logit)  # 0 in place of -inf
    reference_base = finite_max(reference_max_logit)
    inverse_sum = 1.0 / sum_exp
    reference_inverse_sum = 1.0 / reference_sum_exp
    softmaxes = BothSoftmaxes(
        base, reference_base, inverse_sum, reference_inverse_sum, tl.load(log_sum_ratio + i)
    )
    return softmaxes, sum_exp


@compile_kernel
def reference_sums_kernel(
    # logits of policy and reference, [A, T, V] each: A * T rows of V
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    reference,
    reference_stride_a: tl.int64,
    reference_stride_t: tl.int64,
    # transforms of policy and reference; an inverse temperature is a number or [num_rows]
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
    """Compute softmax sums of each row of policy and reference, one program for each row.

    They are the policy's sums NAMES, and reference_max_logit, reference_sum_exp, sum_log_ratio and
    sum_log_ratio_excess. `SUMS` in core/softmax.py has their formulas. Masked rows get constants.

    DIRECTION   "forward" for KL(reference || policy), or "reverse" for all other divergences
    """
    i = tl.program_id(0).to(tl.int64)
    if load_or(mask, i, default=True):
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
        target_u = load_u(row, tl.load(targets + i))
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
        ) = compute_sums_of_both(
            row, reference_row, FORWARD=DIRECTION == "forward", LEVEL=LEVEL, TILE=TILE
        )
        policy_values = (max_logit, sum_exp, row.u_to_z * target_u, shifted, squared)
        store_policy_sums(sums, sums_stride, i, policy_values, NAMES)
        reference_values = (reference_max_logit, reference_sum_exp, log_ratio, excess)
        store_entries(reference_sums, sums_stride, i, reference_values)
    else:
        store_masked_sums(sums, sums_stride, i, NAMES)
        store_entries(reference_sums, sums_stride, i, (0.0, 1.0, 0.0, 0.0))


@compile_kernel
def mixture_sums_kernel(
    # logits of policy and reference, [A, T, V] each: A * T rows of V
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    reference,
    reference_stride_a: tl.int64,
    reference_stride_t: tl.int64,
    # transforms of policy and reference; an inverse temperature is a number or [num_rows]
    inverse_temperature,
    transform,
    reference_inverse_temperature,
    reference_transform,
    V,
    T,
    first_row: tl.int64,
    # [num_rows] or None
    mask,
    # the sums of the first pass, fp32 [num_sums, num_rows], and its rows from reference_max_logit
    # on
    sums,
    reference_sums,
    sums_stride: tl.int64,
    # fp32 [num_rows], log(reference_sum_exp / sum_exp)
    log_sum_ratio,
    # (b, 1 - b), the weights of the reference and of the policy in the mixture
    mixture_weights,
    # the results, fp32 [2, num_rows]
    mixture_sums,
    mixture_sums_stride: tl.int64,
    DIRECTION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the two sums over the vocabulary that the divergences "jsd" and "tv" follow from.

    With p the policy's softmax, q the reference's and m = (1 - b) p + b q, `mixture_sums` has

        DIRECTION   row 0                            row 1
        "jsd"       KL(p || m)                       KL(q || m)
        "tv"        sum_j p_j sign(p_j - q_j) / 2    sum_j |p_j - q_j| / 2

    for each row of logits, one program for each. Masked rows get 0. For "tv" row 1 is the
    divergence. In both directions the gradient needs row 0, see `SoftmaxSums.gradient_center`.
    """
    i = tl.program_id(0).to(tl.int64)
    if load_or(mask, i, default=True):
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
        # The first column of the last tile, which may reach beyond the end of the row.
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
                PIECES=TILE.ACCESSES,
                END=False,
            )
        lane_sums = add_mixture_tile(
            lane_sums,
            row,
            reference_row,
            end,
            softmaxes,
            mixture_weights,
            DIRECTION,
            PIECES=TILE.ACCESSES,
            END=True,
        )
        # Both sums must be NaN if a row has a NaN or only logits of -inf. Then log_sum_ratio is NaN
        # or infinite, and 0 times it is NaN. For other rows it is 0.
        nan_without_divergence = 0.0 * softmaxes.log_sum_ratio
        for k in tl.static_range(2):
            total = tl.sum(tl.sum(lane_sums[k], axis=1), axis=0)
            tl.store(mixture_sums + k * mixture_sums_stride + i, total + nan_without_divergence)
    else:
        tl.store(mixture_sums + i, 0.0)
        tl.store(mixture_sums + mixture_sums_stride + i, 0.0)


@compile_kernel
def reference_gradient_kernel(
    # logits of policy and reference, [A, T, V] each (A * T rows of V), and the gradient, which may
    # overwrite either of them
    logits,
    stride_a: tl.int64,
    stride_t: tl.int64,
    reference,
    reference_stride_a: tl.int64,
    reference_stride_t: tl.int64,
    out,
    out_stride_a: tl.int64,
    out_stride_t: tl.int64,
    # transforms of policy and reference; an inverse temperature is a number or [num_rows]
    inverse_temperature,
    transform,
    reference_inverse_temperature,
    reference_transform,
    V,
    T,
    first_row: tl.int64,
    # int64 [num_rows]
    targets,
    # softmax sums, fp32 [num_sums, num_rows], and its rows from reference_max_logit on
    sums,
    reference_sums,
    sums_stride: tl.int64,
    # fp32 [num_rows], see `SoftmaxSums.log_sum_ratio` and `SoftmaxSums.gradient_center`
    log_sum_ratio,
    centers,
    # (b, 1 - b), the weights of the reference and of the policy in the mixture of "jsd"
    mixture_weights,
    # fp32 [num_coefficients, num_rows], with a row for each of NAMES
    coefficients,
    coefficients_stride: tl.int64,
    NAMES: tl.constexpr,
    DIRECTION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write d loss / d logits of each row, for a loss with a divergence from the reference.

    It is the gradient that `softmax_gradient_kernel` writes, plus the coefficient "divergence"
    times the gradient of the divergence DIRECTION ("reverse", "forward", "jsd" or "tv"), see
    `divergence_gradient` in core/divergence.py. If all coefficients of a row are 0, its gradient is
    0. There is one program for each row.

    In the code z are the logits x after scale, softcap and temperature, and u is z without its last
    factor `u_to_z`: tanh(x * scale / softcap) with a softcap, else x, or -x for a negative scale. w
    are the transformed logits of the reference.
    """
    LEVEL: tl.constexpr = level_of(NAMES, "logp", "prob")
    i = tl.program_id(0).to(tl.int64)
    values, has_gradient = load_coefficients(coefficients, coefficients_stride, i, NAMES)
    target, constant, logp, prob, divergence = values
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
        # (coefficient, center, b, 1 - b), the arguments of `divergence_gradient` for a row
        divergence_arguments = (
            divergence,
            tl.load(centers + i),
            mixture_weights[0],
            mixture_weights[1],
        )
        # (per_exp, per_exp_shifted, per_exp_squared) of `write_gradient_of_both`. It multiplies the
        # second by z_j - max z, which is log p_j + log_sum, so the first corrects for log_sum.
        factors = ((constant - target) - logp * log_sum, logp, prob)
        target_id = tl.load(targets + i)
        target_w = reference_row.u_to_z * load_u(reference_row, target_id)
        # The target's logit must be loaded before the first store of any thread, because the
        # gradient may overwrite the reference's row. `end` is the first column of the last tile,
        # which may reach beyond the end of the row.
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
                divergence_arguments,
                DIRECTION,
                LEVEL,
                PIECES=TILE.ACCESSES,
                END=False,
            )
        write_gradient_of_both(
            row,
            reference_row,
            out_row,
            end,
            softmaxes,
            factors,
            divergence_arguments,
            DIRECTION,
            LEVEL,
            PIECES=TILE.ACCESSES,
            END=True,
        )
        # The gradient at the target is computed separately, see `store_target_gradient`.
        target_z = tl.load(sums + 2 * sums_stride + i)
        target_logp = (target_z - softmaxes.base) - log_sum
        # fast_exp as in `write_gradient_of_both`: both probabilities must be 0 or neither.
        target_prob = fast_exp(target_z - softmaxes.base) * softmaxes.inverse_sum
        factor = constant + logp * tl.maximum(target_logp, LOWEST) + prob * target_prob
        grad = -target * expm1(target_logp) + target_prob * factor
        d = log_probability_ratio(target_z, target_w, softmaxes)
        grad += divergence_gradient(
            target_prob, target_w, d, softmaxes, *divergence_arguments, DIRECTION
        )
        grad *= transform_derivative(tl.div_rn(target_z, row.u_to_z), row)
        # A tile above has stored a gradient of this column, which this store must overwrite.
        tl.debug_barrier()
        is_inside = (target_id >= 0) & (target_id < V)
        tl.store(out_row + target_id, grad.to(out.dtype.element_ty), mask=is_inside)
    else:
        write_zero_row(out_row, V, TILE)
