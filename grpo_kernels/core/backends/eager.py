"""Eager PyTorch: the readable version of every kernel, and the fallback if no kernel runs.

Rows and pairs are processed in blocks, so that temporaries stay within `block_bytes` (or one row)
for any batch. No function copies a value to the host, so the host never waits for a GPU: unused
rows and pairs are computed with placeholder values and discarded.

In this file r is the number of rows of a block and V the vocabulary size. z and w are the logits of
policy and reference after scale, softcap and temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...formulas.token_loss import TokenLosses, TokenLossFormula
from ..divergence import (
    divergence_gradient,
    log_ratio_terms,
    logit_differences,
    mixture_terms,
)
from ..softmax import (
    MIN_LOGP,
    GradientCoefficients,
    LogitRows,
    ReferenceRows,
    RowTransform,
    SoftmaxSums,
)
from . import Backend, FusedLossValues

if TYPE_CHECKING:
    from ..pairs import Pairs

#: fp32 copies of a block of rows that exist at a time, without and with a reference.
COPIES = 4
COPIES_WITH_REFERENCE = 10

#: fp32 rows that exist at a time for each pair of a block.
ROWS_PER_PAIR = 4


def unavailable_reason() -> str | None:
    """Return None: eager PyTorch runs on every machine."""
    return None


def block_bytes(device: torch.device) -> int:
    """Return how many bytes the temporaries of a block of rows may take.

    On a CPU so many bytes fit the cache, and the allocator keeps memory of that size for reuse. On
    a GPU the block must be large enough to occupy all multiprocessors.
    """
    return 16 << 20 if device.type == "cpu" else 256 << 20


class Kernels(Backend):
    """All kernels in eager PyTorch.

    strict      ignored: every backend takes it, and eager PyTorch never falls back
    workspace   None: each call allocates its memory. `fused_loss` creates kernels with a workspace
                and calls them for one block at a time: `run_sums_kernel` leaves exponentials in the
                workspace, and `run_gradient_kernel` of the same block reads them.
    """

    computes_all_sums = True

    def __init__(self, strict: bool = False, workspace: Workspace | None = None) -> None:
        """Use the memory of a workspace, or allocate memory in each call."""
        self.workspace = workspace

    # ---- rows of logits

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums of each row, such as max_logit and sum_exp, in eager PyTorch.

        names   some of `softmax.SUMS`, which gives their formulas. MIXTURE_SUMS get memory only;
                `run_mixture_kernel` computes them.
        """
        sums = SoftmaxSums.empty(names, rows.num_rows, rows.logits.device, rows.reference)
        workspace = self.workspace or Workspace.for_rows(rows)
        for block, logits in blocks_of(rows, rows.logits):
            z = workspace.transformed(logits, rows.transform.select(block))
            values = policy_sums(z, rows.targets[block], names, workspace)
            if rows.reference is not None:
                exps = workspace.exps[: len(logits)]
                values |= reference_sums(rows, block, z, exps, values["max_logit"])
            # MIXTURE_SUMS may be among the names, but not among the values. The policy's basic sums
            # are always among the values.
            for name in names:
                if name in values:
                    sums.select(block)[name].copy_(values[name])  # into a view of `sums`
        if rows.mask is None:
            return sums
        # Masked rows get constants instead, with which their statistics are 0. All rows were
        # computed, because a selection by the mask would make the host wait for a GPU.
        values_if_masked = SoftmaxSums.masked(names, 1, rows.logits.device).values
        return replace(sums, values=torch.where(rows.mask, sums.values, values_if_masked))

    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return MIXTURE_SUMS of each row, fp32 [2, num_rows], in a second pass over the rows.

        They are the sums over the vocabulary from which the divergences "jsd" and "tv" follow.
        `Backend.run_mixture_kernel` has their formulas.

        sums   softmax sums of the first pass over the rows, which normalize policy and reference
        """
        reference = rows.reference
        assert reference is not None
        mixture_sums = torch.empty(2, rows.num_rows, dtype=torch.float32, device=rows.logits.device)
        for block, logits in blocks_of(rows, rows.logits):
            policy_logits = transform_block(logits, rows.transform.select(block))
            reference_logits = reference_block(rows, reference, block)
            block_sums = sums.select(block)
            max_logit = finite(block_sums.max_logit)[:, None]
            policy_probs = (policy_logits - max_logit).exp() / block_sums.sum_exp[:, None]
            reference_probs, log_ratio = compare_with_reference(
                policy_logits, reference_logits, block_sums
            )
            policy_terms, reference_terms = mixture_terms(
                reference.direction, policy_probs, reference_probs, log_ratio, reference.mixture
            )
            mixture_sums[0, block] = sum_rows(policy_terms)
            mixture_sums[1, block] = sum_rows(reference_terms)
        return mixture_sums if rows.mask is None else torch.where(rows.mask, mixture_sums, 0.0)

    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits of each row into the same row of `out`.

        Rows are processed in blocks, so that temporaries stay small. For each block
        `GradientFactors` computes d loss / d logits from exp(z - max_logit), by the formula of
        `GradientCoefficients`. Then the gradient of a divergence from a reference is added.

        sums           softmax sums of the rows, from `softmax_sums`
        coefficients   numbers of each row in the formula. A row whose coefficients are all 0 gets
                       the gradient 0.
        out            [A, T, V] like `rows.logits` (A * T rows of V logits); may be their memory
        """
        transform = rows.transform
        factors = GradientFactors.from_coefficients(sums, coefficients, transform)
        is_zero = ~coefficients.nonzero
        divergence_weight = coefficients.get("divergence")
        workspace = self.workspace or Workspace.for_rows(rows)
        input_blocks = blocks_of(rows, rows.logits)
        output_blocks = blocks_of(rows, out)
        for (block, logits), (_, grad_logits) in zip(input_blocks, output_blocks, strict=True):
            differences = workspace.differences[: len(logits)]
            exps = workspace.exps[: len(logits)]
            if self.workspace is None:  # else run_sums_kernel has left both in the workspace
                z = workspace.transformed(logits, transform.select(block))
                torch.sub(z, sums.max_logit[block, None], out=differences)
                torch.exp(differences, out=exps)
            # The memory in which the gradient of the block is computed: `out` if possible, so that
            # no copy is needed, else a temporary.
            grad = workspace.terms[: len(logits)]
            is_fp32 = grad_logits.dtype == torch.float32
            if divergence_weight is None and is_fp32 and not transform.softcap:
                # The code below does not read the logits again, so `out` may be their memory.
                grad = grad_logits
            factors.write_gradient(block, rows.targets, exps, differences, grad)
            if divergence_weight is not None:
                assert rows.reference is not None
                add_divergence_gradient(
                    grad,
                    factor=(divergence_weight * factors.dz_dx)[block, None],
                    z=workspace.transformed(logits, transform.select(block)),
                    w=reference_block(rows, rows.reference, block),
                    exps=exps,
                    sums=sums.select(block),
                    reference=rows.reference,
                )
            if transform.softcap:
                # z = softcap * tanh(x * scale / softcap) / temperature, so the softcap cancels in
                # dz / dx = (scale / temperature) * (1 - tanh^2(x * scale / softcap)). The factors
                # contain scale / temperature.
                scaled = logits.float() * (transform.scale / transform.softcap)
                grad.mul_(1.0 - scaled.tanh_().square_())
            zero_rows(grad, is_zero[block])
            if grad is not grad_logits:
                grad_logits.copy_(grad)

    def fused_loss(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues:
        """Return log-prob, entropy and loss of each row, and write d loss / d logits to `out`.

        With a reference the divergence of each row is returned as well. Rows are processed in
        blocks that share temporary memory, the workspace. The gradient of a block reuses the
        exponentials that its softmax sums left there.

        loss_formula   computes the loss of a row from its log-prob and entropy
        out            [A, T, V] like `rows.logits` (A * T rows of V logits): memory for the
                       gradient, possibly that of the logits. None: no gradient is computed.
        """
        num_values = FusedLossValues.num_values(has_reference=rows.reference is not None)
        table = torch.zeros(
            num_values, rows.num_rows, dtype=torch.float32, device=rows.logits.device
        )
        kernels = Kernels(workspace=Workspace.for_rows(rows))
        for block, _logits in blocks_of(rows, rows.logits):
            block_rows = rows.slice_rows(block.start, block.stop)
            # `out` is passed whole: `block_rows.row_range` says which of its rows to write.
            values = kernels.loss_in_two_passes(
                block_rows, loss_formula.select(block), out, rows_per_block=block_rows.num_rows
            )
            table[:, block] = values.table
        return FusedLossValues(table)

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """Multiply a gradient [A, T, V] (A * T rows of V) by a 0-d factor in place."""
        gradient.mul_(factor)

    def evaluate_formula(
        self, loss_formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> TokenLosses:
        """Return the loss of each row, and its gradients in log-prob and entropy.

        loss_formula     computes the loss of a row from its log-prob and entropy
        logps, entropy   fp32 [num_rows]

        Return `TokenLosses`: losses and gradients, fp32 [num_rows] each.
        """
        return loss_formula.compute(logps, entropy)

    # ---- pairs

    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return hidden[row] . weight[id] of each (row, id) pair, fp32 [num_pairs].

        This is the logit of a token id at one position, as a single dot product.

        hidden   [num_rows, H], the hidden states
        weight   [V, H], the weight of the output head
        pairs    the pairs, sorted by row. The id -1 marks an unused pair, whose logit is -inf.
        """
        logits = torch.empty(pairs.ids.shape, dtype=torch.float32, device=hidden.device)
        for block in pair_blocks(pairs.ids.numel(), hidden):
            ids = pairs.ids[block]
            products = hidden[pairs.rows[block]].float().mul_(weight[ids.clamp(min=0)])
            logits[block] = sum_rows(products).masked_fill_(ids < 0, -torch.inf)
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
        is_used = (pairs.ids >= 0) & (values != 0)
        sum_by_key(
            keys=pairs.rows,
            index=pairs.ids,
            is_used=is_used,
            values=values,
            source=weight,
            out=out,
            adds_to_out=False,
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
        is_used = (pairs.ids >= 0) & (values != 0)
        sum_by_key(
            keys=pairs.ids,
            index=pairs.rows,
            is_used=is_used,
            values=values,
            source=hidden,
            out=out,
            adds_to_out=True,
        )


# ---- blocks of rows


class Workspace(NamedTuple):
    """Temporary memory of a block of rows, which all blocks of a call share.

    Allocating it for each block would take longer than the arithmetic. Each tensor is fp32
    [rows_per_block, V].

    logits        z, the logits after scale, softcap and temperature
    differences   z - max_logit
    exps          exp(z - max_logit)
    terms         terms of a sum, or the gradient
    """

    logits: Tensor
    differences: Tensor
    exps: Tensor
    terms: Tensor

    @classmethod
    def for_rows(cls, rows: LogitRows) -> Workspace:
        """Return uninitialized memory for the largest block of a call.

        rows   the rows of the call, which are processed in blocks of `rows_per_block` rows
        """
        shape = (min(rows_per_block(rows), rows.num_rows), rows.logits.shape[-1])
        num_tensors = len(cls._fields)
        memory = torch.empty(num_tensors, *shape, dtype=torch.float32, device=rows.logits.device)
        return cls(*memory)

    def transformed(self, logits: Tensor, transform: RowTransform) -> Tensor:
        """Return z, the logits of a block after `transform`, fp32 [r, V].

        z is written to the memory `self.logits`. If the transform is the identity and `logits` are
        fp32 already, `logits` are returned without a copy.

        logits   [r, V], any dtype
        """
        return transform.transform_rows(logits, self.logits[: len(logits)])


def rows_per_block(rows: LogitRows) -> int:
    """Return how many rows a block has: as many as fit `block_bytes`, at least one.

    A row takes COPIES fp32 copies of its V logits, or COPIES_WITH_REFERENCE with a reference.
    """
    copies = COPIES if rows.reference is None else COPIES_WITH_REFERENCE
    row_bytes = 4 * rows.logits.shape[-1] * copies
    return max(1, block_bytes(rows.logits.device) // row_bytes)


def blocks_of(rows: LogitRows, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (block, logits of the block [r, V]) for consecutive blocks of the rows of a call.

    The block is a slice of the rows of the call, which selects from vectors [num_rows].

    rows     the call. Only its rows `rows.row_range` are yielded, or all if that is None.
    logits   [A, T, V]: the logits of the call, or a tensor of this shape, such as their gradient
    """
    num_groups, rows_per_group, _ = logits.shape
    # The rows of the call among the A * T rows of logits.
    first, last = rows.row_range or (0, num_groups * rows_per_group)
    size = rows_per_block(rows)
    start = first
    while start < last:
        # A block ends with its group (an index of A) at the latest, so that it is a slice of
        # logits[group].
        group, row = divmod(start, rows_per_group)
        stop = min(last, start + size, (group + 1) * rows_per_group)
        yield slice(start - first, stop - first), logits[group, row : row + stop - start]
        start = stop


def transform_block(logits: Tensor, transform: RowTransform) -> Tensor:
    """Return logits [r, V] after `transform`, fp32 [r, V], in new memory."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    return transform.transform_rows(logits, out)


def reference_block(rows: LogitRows, reference: ReferenceRows, block: slice) -> Tensor:
    """Return w, the reference's logits of a block after the reference's transform, fp32 [r, V].

    block   slice of the rows of the call, from `blocks_of`, so it lies in one group
    """
    # Logits are [A, T, V]: row number a * T + t is logits[a, t].
    group, row = divmod(rows.first_row + block.start, rows.logits.shape[1])
    logits = reference.logits[group, row : row + block.stop - block.start]
    return transform_block(logits, reference.transform.select(block))


def finite(max_logit: Tensor) -> Tensor:
    """Return max_logit [r] with 0 in place of -inf.

    If all logits z of a row are -inf, z - max_logit would be NaN. With 0 in place of max_logit
    exp(z - max_logit) is 0.
    """
    return max_logit.masked_fill(max_logit == -torch.inf, 0.0)


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of each row of x [r, V].

    A single row is expanded to two equal rows: on a CPU torch splits the sum of a single row among
    threads, which rounds differently from the sums of several rows.
    """
    return x.sum(1) if x.shape[0] > 1 else x.expand(2, -1).sum(1)[:1]


def zero_rows(grad: Tensor, is_zero: Tensor) -> None:
    """Write 0 into the rows of grad [r, V] where is_zero, bool [r], is True.

    On a CPU only these rows are written. On a GPU masked_fill_ passes over all rows, because
    nonzero() would make the host wait.
    """
    if grad.device.type == "cpu":
        grad.index_fill_(0, is_zero.nonzero()[:, 0], 0.0)
    else:
        grad.masked_fill_(is_zero[:, None], 0.0)


def find_targets(targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (ids, is_in_range) of targets [r], for gather and scatter.

    ids           int64 [r, 1]: the targets. A target outside of the vocabulary is replaced by 0,
                  because gather and scatter would fail.
    is_in_range   bool [r]: whether 0 <= target < vocab_size
    """
    is_in_range = (targets >= 0) & (targets < vocab_size)
    return torch.where(is_in_range, targets, 0)[:, None], is_in_range


# ---- sums of a block


def policy_sums(
    z: Tensor, targets: Tensor, names: tuple[str, ...], workspace: Workspace
) -> dict[str, Tensor]:
    """Return softmax sums of a block of r rows by name, [r] each.

        max_logit         max_j z_j
        sum_exp           sum_j exp(z_j - max_logit)
        target_logit      z of the target, NaN if the target is outside of the vocabulary
        sum_exp_shifted   sum_j exp(z_j - max_logit) (z_j - max_logit)
        sum_exp_squared   sum_j exp(2 (z_j - max_logit))
        argmax            the first id whose z is the maximum, -1 if there is none

    The first three are always computed. z - max_logit (with sum_exp_shifted at least MIN_LOGP) and
    exp(z - max_logit) are left in the workspace, where the gradient of the block may read them.

    z           transformed logits, fp32 [r, V]
    targets     int64 [r]
    names       which of sum_exp_shifted, sum_exp_squared and argmax are computed as well
    workspace   temporary memory for at least r rows
    """
    differences = workspace.differences[: len(z)]
    exps = workspace.exps[: len(z)]
    max_logit = z.amax(1)
    torch.sub(z, finite(max_logit)[:, None], out=differences)
    torch.exp(differences, out=exps)
    ids, is_in_range = find_targets(targets, z.shape[1])
    sums = {
        "max_logit": max_logit,
        "sum_exp": sum_rows(exps),
        "target_logit": torch.where(is_in_range, z.gather(1, ids)[:, 0], torch.nan),
    }
    if "sum_exp_shifted" in names:
        # The clamp turns a difference of -inf into a finite one: 0 * -inf would be NaN.
        terms = workspace.terms[: len(z)]
        torch.mul(differences.clamp_(min=MIN_LOGP), exps, out=terms)
        sums["sum_exp_shifted"] = sum_rows(terms)
    if "sum_exp_squared" in names:
        sums["sum_exp_squared"] = sum_rows(exps * exps)
    if "argmax" in names:
        is_max = z == max_logit[:, None]
        first = is_max.to(torch.uint8).argmax(1)  # of equal numbers the first
        sums["argmax"] = torch.where(is_max.any(1), first, -1).to(torch.int32)
    return sums


def reference_sums(
    rows: LogitRows, block: slice, z: Tensor, exps: Tensor, max_logit: Tensor
) -> dict[str, Tensor]:
    """Return the sums of a block that compare policy and reference, by name, [r] each.

    With w the transformed logits of the reference, p_j = exp(z_j - max z), q_j = exp(w_j - max w),
    d_j = log(p_j / q_j) and psi(x) = exp(x) - 1 - x they are

        reference_max_logit    max_j w_j
        reference_sum_exp      sum_j q_j
        sum_log_ratio          sum_j p_j d_j
        sum_log_ratio_excess   sum_j p_j psi(-d_j)

    For the direction "forward" p and q are swapped in the last two. KL divergences follow from
    them.

    rows        the rows of the call, with a reference
    block       slice of the rows of the call
    z, exps     transformed logits of the policy and exp(z - max_logit), [r, V]
    max_logit   maximum of each row of z, [r]
    """
    assert rows.reference is not None
    w = reference_block(rows, rows.reference, block)
    reference_max_logit = w.amax(1)
    base = finite(max_logit)[:, None]  # 0 in place of -inf
    reference_base = finite(reference_max_logit)[:, None]
    reference_exps = (w - reference_base).exp()
    d = logit_differences(z, w, base, reference_base)
    log_ratio, excess = log_ratio_terms(rows.reference.direction, exps, reference_exps, d)
    return {
        "reference_max_logit": reference_max_logit,
        "reference_sum_exp": sum_rows(reference_exps),
        "sum_log_ratio": sum_rows(log_ratio),
        "sum_log_ratio_excess": sum_rows(excess),
    }


def compare_with_reference(z: Tensor, w: Tensor, sums: SoftmaxSums) -> tuple[Tensor, Tensor]:
    """Return (q, log p - log q), [r, V] each, with p the policy's softmax and q the reference's.

    z, w   transformed logits of policy and reference, [r, V]
    sums   softmax sums of these rows, which normalize p and q
    """
    base = finite(sums.max_logit)[:, None]
    reference_base = finite(sums["reference_max_logit"])[:, None]
    q = (w - reference_base).exp() / sums["reference_sum_exp"][:, None]
    log_ratio = logit_differences(z, w, base, reference_base) + sums.log_sum_ratio[:, None]
    return q, log_ratio


# ---- the gradient of a block


class GradientFactors(NamedTuple):
    """Factors of d loss / d logits of each row, for losses without a divergence.

    With d_j = z_j - max_logit and e_j = exp(d_j), the gradient at column j is

        e_j * (per_exp + per_exp_shifted * d_j + per_exp_squared * e_j)

    So the three factors multiply e_j, e_j d_j and e_j^2. Their names are those of the sums of these
    terms over a row: sum_exp, sum_exp_shifted and sum_exp_squared.

    At the column of the target the gradient is at_target, which is computed with expm1 to be
    accurate even if the target's probability is close to 1.

    per_exp           [num_rows]
    per_exp_shifted   [num_rows]; None means 0
    per_exp_squared   [num_rows]; None means 0
    at_target         [num_rows]
    dz_dx             scale * inverse_temperature, a number or [num_rows]. The other fields are
                      multiplied by it already. The derivative of a softcap is not included.
    """

    per_exp: Tensor
    per_exp_shifted: Tensor | None
    per_exp_squared: Tensor | None
    at_target: Tensor
    dz_dx: float | Tensor

    @classmethod
    def from_coefficients(
        cls, sums: SoftmaxSums, coefficients: GradientCoefficients, transform: RowTransform
    ) -> GradientFactors:
        """Return the factors of the gradient, without the divergence.

        A row has the coefficients target, constant, logp and prob. With p_j = e_j / sum_exp and
        log p_j = d_j - log(sum_exp), the gradient with respect to z is, except at the target,

            p_j * (constant - target + logp * (d_j - log(sum_exp)) + prob * p_j)

        Sorted by powers of d_j and e_j this is the formula of the class. At the target, whose
        probability is p, the gradient is

            target * (1 - p) + p * (constant + logp * log p + prob * p)

        where 1 - p is computed as -expm1(log p). In p * log p a log-prob of -inf counts as
        MIN_LOGP, because 0 * -inf would be NaN.

        sums           softmax sums of the rows
        coefficients   coefficients of the rows; one that is not in the table is 0 in all rows
        transform      scale, softcap and temperature, from which dz_dx follows
        """
        sum_exp = sums.sum_exp
        logps = sums.logps
        probs = logps.exp()
        constant = coefficients.get("constant")
        logp = coefficients.get("logp")
        prob = coefficients.get("prob")
        dz_dx = transform.scale * transform.inverse_temperature
        per_exp = -coefficients.target
        per_exp_shifted = None
        per_exp_squared = None
        at_target = -coefficients.target * torch.expm1(logps)
        if constant is not None:
            per_exp = per_exp + constant
            at_target = at_target + probs * constant
        if logp is not None:
            per_exp = per_exp - logp * torch.log(sum_exp)
            per_exp_shifted = logp * dz_dx / sum_exp
            at_target = at_target + logp * probs * logps.clamp(min=MIN_LOGP)
        if prob is not None:
            per_exp_squared = prob * dz_dx / (sum_exp * sum_exp)
            at_target = at_target + prob * probs * probs
        per_exp = per_exp * dz_dx / sum_exp
        return cls(per_exp, per_exp_shifted, per_exp_squared, at_target * dz_dx, dz_dx)

    def write_gradient(
        self, block: slice, targets: Tensor, exps: Tensor, differences: Tensor, out: Tensor
    ) -> None:
        """Write the gradient of a block of rows into out, fp32 [r, V], by the formula of the class.

        Differences of -inf count as MIN_LOGP, because e_j = 0 times -inf would be NaN.

        block         slice of the rows of the call
        targets       int64 [num_rows], of all rows of the call
        exps          exp(z - max_logit) of the block, [r, V]
        differences   z - max_logit of the block, [r, V]; overwritten
        """
        per_exp = self.per_exp[block, None]
        if self.per_exp_squared is not None:
            per_exp = self.per_exp_squared[block, None] * exps + per_exp
        torch.mul(exps, per_exp, out=out)
        if self.per_exp_shifted is not None:
            terms = differences.clamp_(min=MIN_LOGP).mul_(exps)
            out.addcmul_(terms, self.per_exp_shifted[block, None])
        # Replace the value at the target's column by at_target. A target outside of these columns
        # (its column may belong to another rank) changes none: scatter then writes the value that
        # column 0 has already.
        ids, is_in_range = find_targets(targets[block], out.shape[1])
        at_target = self.at_target[block, None]
        out.scatter_(1, ids, torch.where(is_in_range[:, None], at_target, out.gather(1, ids)))


def add_divergence_gradient(
    grad: Tensor,
    factor: Tensor,
    z: Tensor,
    w: Tensor,
    exps: Tensor,
    sums: SoftmaxSums,
    reference: ReferenceRows,
) -> None:
    """Add factor * d divergence / d z to grad, fp32 [r, V], in place.

    factor      [r, 1]
    z, w        transformed logits of policy and reference, [r, V]
    exps        exp(z - max_logit), [r, V]
    sums        softmax sums of these rows
    reference   which divergence from the reference: its direction and mixture
    """
    q, log_ratio = compare_with_reference(z, w, sums)
    gradient = divergence_gradient(
        reference.direction,
        p=exps / sums.sum_exp[:, None],
        q=q,
        log_ratio=log_ratio,
        center=sums.gradient_center[:, None],
        mixture=reference.mixture,
    )
    grad.add_(gradient.mul_(factor))


# ---- sums over pairs


def pair_blocks(num_pairs: int, rows: Tensor) -> Iterator[slice]:
    """Return consecutive slices of num_pairs pairs, each small enough to process at once.

    A pair takes ROWS_PER_PAIR temporaries fp32 [H]. The temporaries of a slice fit `block_bytes`.

    rows   a matrix with H columns, on the device of the computation
    """
    size = max(1, block_bytes(rows.device) // (4 * ROWS_PER_PAIR * rows.shape[1]))
    return (slice(start, min(start + size, num_pairs)) for start in range(0, num_pairs, size))


def sum_by_key(
    keys: Tensor,
    index: Tensor,
    is_used: Tensor,
    values: Tensor,
    source: Tensor,
    out: Tensor,
    *,
    adds_to_out: bool,
) -> None:
    """Write out[k] = sum of values[i] * source[index[i]] over the used pairs i with keys[i] = k.

    For example, the gradient of hidden states has the key row, the source weight and the index id.
    Sums are fp32, in the order of the pairs, and are rounded once. The pairs are sorted by key, so
    that the pairs of a key are neighbours, and are summed in blocks of pairs.

    keys          int64 [num_pairs]: a row of `out` for each pair
    index         int64 [num_pairs]: a row of `source` for each pair
    is_used       bool [num_pairs]: the other pairs add nothing; their keys and index may be -1
    values        fp32 [num_pairs]
    source        [num_source_rows, H], any dtype
    out           [num_keys, H], any dtype; rows without a used pair are not written
    adds_to_out   True: the sum is added to the value in `out`; False: it replaces the value
    """
    num_pairs = keys.numel()
    no_key = out.shape[0]
    if num_pairs == 0:
        return
    # Unused pairs get the largest key, so they come last.
    keys, order = torch.where(is_used, keys, no_key).sort(stable=True)
    # A group is the pairs of one key in a block. A key may continue in the next block, so the
    # partial sum of the last group is carried over: it is the first term of the next block. The
    # first block begins with the sum 0 for the first key.
    carried_sum = torch.zeros(1, out.shape[1], dtype=torch.float32, device=out.device)
    carried_key = keys[:1]
    for block in pair_blocks(num_pairs, out):
        pair_ids = order[block]
        block_keys = torch.cat([carried_key, keys[block]])
        terms = source[index[pair_ids].clamp(min=0)].float().mul_(values[pair_ids, None])
        terms = torch.where(is_used[pair_ids, None], terms, 0.0)
        # Number the groups of the block 0, 1, 2, ...: `groups` has the number for each term.
        group_changes = (block_keys[1:] != block_keys[:-1]).cumsum(0)
        groups = torch.cat([torch.zeros_like(carried_key), group_changes])
        sums = sum_groups(torch.cat([carried_sum, terms]), groups)
        # group_keys[g] is the key of group g, or no_key for numbers that no group has.
        group_keys = torch.full_like(block_keys, no_key).scatter_(0, groups, block_keys)
        carried_sum = sums.index_select(0, groups[-1:])
        carried_key = block_keys[-1:]
        is_complete = group_keys < no_key
        has_next_block = block.stop < num_pairs
        if has_next_block:
            group_ids = torch.arange(len(group_keys), device=out.device)
            is_complete &= group_ids != groups[-1]  # the next block may continue the last group
        write_complete_sums(sums, group_keys, is_complete, out, adds_to_out)


def sum_groups(terms: Tensor, groups: Tensor) -> Tensor:
    """Return sums[g] = sum of terms[i] over all i with groups[i] = g, in the order of i.

    terms    fp32 [n, H]
    groups   int64 [n], ascending: 0, 1, 2, ... without gaps

    The result is fp32 [n, H]. There are at most n groups, and the rows after the last one are 0.
    """
    sums = torch.zeros_like(terms)
    if terms.device.type == "cpu":
        return sums.index_add_(0, groups, terms)
    # On a GPU index_add_ uses atomics, which sum in any order; index_put_ sorts.
    return sums.index_put_((groups,), terms, accumulate=True)


def write_complete_sums(
    sums: Tensor, keys: Tensor, is_complete: Tensor, out: Tensor, adds_to_out: bool
) -> None:
    """Write sums[g] to out[keys[g]] for each complete group g, or add it to the value there.

    All n groups are written by one index_copy_, because selecting the complete groups would make
    the host wait for a GPU. An incomplete group repeats the write of the first complete group,
    which changes nothing. If no group is complete, all groups write the value that a row of `out`
    has already.

    sums          fp32 [n, H]
    keys          int64 [n]: a row of `out` for each complete group
    is_complete   bool [n]: the groups to write. The sum of another group may not be complete, or
                  the group has no key.
    adds_to_out   True: sums are added to the values in `out`; False: they replace the values
    """
    group_ids = torch.arange(len(keys), device=out.device)
    first_complete = is_complete.to(torch.uint8).argmax()
    written = torch.where(is_complete, group_ids, first_complete)
    rows = keys[written].clamp(max=out.shape[0] - 1)
    before = out[rows]
    after = sums[written] + before if adds_to_out else sums[written]
    after = torch.where(is_complete[written, None], after.to(out.dtype), before)
    out.index_copy_(0, rows, after)
