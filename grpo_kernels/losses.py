"""Losses of the GRPO family.

    grpo_loss          from logits
    linear_grpo_loss   from hidden states and the output head, without [num_tokens, V] logits
    objective_loss     from log-probs, whatever computed them

`grpo_loss` and `linear_grpo_loss` compute the gradient in the forward, while they have the logits,
if the gradient of a row is known by then (`core/linear.py`). Otherwise, and for batches with
candidate sets, further ids or shared rows, they compute differentiable statistics of the tokens
first and then the loss of these, which costs one more pass over the logits, or one more matmul.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from .batch import TokenBatch, sends_ahead
from .checks import (
    FLOATING,
    check_named,
    check_targets,
    flat,
    leading_shape,
    per_token,
    require,
    require_shape,
    require_tensor,
)
from .core.autograd import LossOfStatistics, apply_function
from .core.backends import is_strict
from .core.linear import RowOrder
from .core.loss_formulas import FormulaResult, sum_losses
from .core.sources import GivenLogits, KnownOrder, ProjectedLogits, Reference
from .divergences import reference_divergence_over_candidates
from .extra_ids import auxiliary_loss as auxiliary_loss_of_ids
from .formulas.ops import times
from .formulas.token_inputs import TokenInputs
from .formulas.token_loss import TokenLosses
from .inputs import RowLayout, RowSource, make_reference
from .logprobs import (
    TEACHER_WITH_SETS,
    composed_statistics,
    make_source,
    refuse_inplace,
    squared_inverse_temperature,
)
from .loss_checks import (
    check_batch_and_objective,
    check_reference,
    refuse_infinite_kl,
    refuse_infinite_terms,
    refuse_nan,
)
from .loss_output import LossOutput
from .objective import Denominators, Objective
from .options import (
    DEFAULT_OPTIONS,
    Head,
    Options,
    as_options,
    is_traced,
    leaves_the_graph,
    refuse_keywords,
    run_outside_graph,
)
from .teachers import check_teacher, logprobs_with_teacher, teacher_divergence
from .token_sets import TokenSets, check_ids, narrowed
from .transform import LogitTransform

__all__ = ["LossOutput", "grpo_loss", "linear_grpo_loss", "objective_loss"]


# ---- the public losses


def grpo_loss(
    logits: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    inplace: bool = False,
    ref_logits: Tensor | tuple[Tensor, LogitTransform] | TokenSets | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> LossOutput:
    """Compute the loss of `objective` over `batch` from logits, with its gradient in the same pass.

        batch = TokenBatch(ids[:, 1:], advantages, mask=mask, old_logps=old_logps)
        out = grpo_loss(logits[:, :-1], batch, Objective.preset("dapo"))
        out.loss.backward()

    logits       [B, T, V] or [N, V], fp32, bf16 or fp16, any strides. Row i predicts
                 batch.targets[i], unless batch.rows says otherwise.
    transform    temperature, softcap and scale of the logits, see `LogitTransform`
    normalizer   the denominator over all micro-batches and ranks, a number or 0-d tensor. None:
                 that of this batch alone, `objective.normalizer(batch)`, at least 1.
    inplace      whether the gradient overwrites the logits, so that no second [.., V] tensor
                 exists. Autograd raises if another operation still needs their values; code that
                 reads them afterwards gets the gradient, without an error. A leaf that requires
                 grad is refused, and so are candidate sets, further ids and shared rows.
    ref_logits   for kl=Exact(...): logits of the reference or teacher, like `logits`; (logits,
                 LogitTransform); or `TokenSets` whose values are the log-probs of a teacher that is
                 known at these ids only. No gradient flows to them.
    options      backend, strict mode, vocabulary shard, see `Options`

    An objective whose gradient is per token (`Objective.gradient_is_per_token`) reads each logit
    once and writes its gradient once; the others read the logits twice. fp16 logits form the
    gradient in the backward, where the loss scale is known. The gradient of one pass is handed over
    once: a second backward raises RuntimeError. A loss near 0 is normal on-policy (ratio 1,
    advantages that sum to 0); its gradient is not 0.

    Raises ValueError naming the argument that is wrong, before any work.
    """
    if unknown:
        refuse_keywords(grpo_loss, unknown)
    return compute_loss(
        logits, None, batch, objective, transform, ref_logits, normalizer, options, inplace
    )


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor | Head,
    batch: TokenBatch,
    objective: Objective,
    *,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    reference: tuple[Any, ...] | TokenSets | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> LossOutput:
    """Compute `grpo_loss` from hidden states and the weight of the output head, without logits.

    For a model of transformers, `loss_from_model` finds all arguments.

        hidden = model.model(input_ids=ids).last_hidden_state
        batch = TokenBatch(ids[:, 1:], advantages, mask=mask, old_logps=old_logps)
        out = linear_grpo_loss(
            hidden[:, :-1], model.lm_head.weight, batch, objective,
            transform=LogitTransform.of(model),
        )
        out.loss.backward()

    hidden       [B, T, H] or [N, H], fp32, bf16 or fp16, any strides. Row i predicts
                 batch.targets[i], unless batch.rows says otherwise.
    weight       [V, H], or `Head(weight, bias, transform)`; frozen, tied or trained; fp32, bf16 or
                 fp16. Matmuls run in the autocast dtype if autocast is on, else in that of hidden.
    transform    softcap and scale that the model applies after its head, and the temperature, see
                 `LogitTransform.of`
    normalizer   as in `grpo_loss`
    reference    (hidden, weight), (hidden, weight, bias) or (hidden, Head(...)) of the frozen
                 reference, instead of batch.ref_logps. It has the policy's transform unless its
                 Head has one; its hidden size and dtype may differ. With kl=Exact(...) also
                 `TokenSets` whose values are a teacher's log-probs.
    options      backend, strict mode, shard, memory for the gradient of the weight, see `Options`

    Costs three matmuls for a token that may have a gradient (two with a frozen head), one for the
    other trained tokens, none for masked tokens. Four matmuls: further ids, shared rows, and a
    sequence-level objective with a sequence longer than a block, an entropy bonus, an exact
    divergence, a bias that is trained, a `context_group`, or an fp16 head on a GPU. A token with a
    candidate set costs one dot product for each candidate. Logits are fp32, a chunk of rows at a
    time; the gradient of the weight is summed in fp32. The gradients are handed over once, as in
    `grpo_loss`.

    Raises ValueError naming the argument that is wrong.
    """
    if unknown:
        refuse_keywords(linear_grpo_loss, unknown)
    head, transform = Head.parts(weight, transform)
    return compute_loss(
        hidden, head, batch, objective, transform, reference, normalizer, options, False
    )


def objective_loss(
    logps: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    entropy: Tensor | None = None,
    divergence: Tensor | None = None,
    auxiliary_loss: Tensor | None = None,
    token_weights: Tensor | None = None,
    normalizer: float | Tensor | Denominators | None = None,
) -> LossOutput:
    """Compute the loss of `objective` from log-probs that were computed elsewhere.

    It is differentiable in all statistics that are passed, and the way to compose a loss that the
    other functions do not have.

        logps, entropy = token_logprobs(logits, batch.targets, mask=batch.mask, entropy=True)
        objective_loss(logps, batch, objective, entropy=entropy).loss.backward()

    logps            log-prob of each target, float, the shape of batch.targets, whose ids are not
                     read
    entropy          entropy of each token in nats, the same shape. Needed for an entropy bonus and
                     for filters of entropy. None: out.entropy is NaN.
    divergence       divergence of each token from a reference, the same shape, for example of
                     `token_divergence`. Needed with kl=Exact(...), and multiplied by its weight.
    auxiliary_loss   a loss of each token that is added to its policy term, and weighted, filtered
                     and averaged with it; the same shape
    token_weights    float [B] or the shape of targets: multiplies all terms of a token, also the
                     KL. Unlike a mask it changes no denominator.
    normalizer       as in `grpo_loss`

    Value and gradient are those of `grpo_loss`. Raises ValueError naming the argument that is
    wrong.
    """
    check_batch_and_objective(batch, objective)
    if batch.extra_ids is not None and auxiliary_loss is None:
        raise ValueError(
            "logp_terms and prob_terms need log-probs of their ids, which objective_loss does not "
            "have: leave them out and pass their sum for each token as auxiliary_loss, or use "
            "grpo_loss or linear_grpo_loss."
        )
    statistics = {
        "logps": logps,
        "entropy": entropy,
        "divergence": divergence,
        "auxiliary_loss": auxiliary_loss,
    }
    for name, x in statistics.items():
        if x is not None:
            require_tensor(name, x, FLOATING, "floats of targets' shape")
            require_shape(name, x, batch.targets.shape, "targets")
    filters_entropy = any(f.filters_entropy for f in objective.filters)
    if entropy is None and (objective.needs_entropy or filters_entropy):
        raise ValueError(
            "entropy is None, but the objective has an entropy bonus or a filter of entropy:"
            " pass it."
        )
    needs_divergence = objective.exact is not None
    if needs_divergence != (divergence is not None):
        remedy = "leave it out, or pass kl=Exact(...) with a beta."
        if needs_divergence:
            remedy = "pass the divergence of each token."
        raise ValueError(
            f"divergence is {'None' if divergence is None else 'given'}, but "
            f"kl={objective.kl!r}, beta={objective.beta}: {remedy}"
        )
    if auxiliary_loss is not None:
        batch = replace(batch, logp_terms=None, prob_terms=None)
        objective = replace(objective, listed=None)
    rows = objective.token_inputs(batch, normalizer)
    refuse_nan(rows, batch, DEFAULT_OPTIONS)
    if token_weights is not None:
        rows = rows.weighted(
            per_token("token_weights", token_weights, batch.targets.shape, batch.cu_seqlens)
        )
    flat_statistics = {
        name: flatten_and_mask(x, rows.loss_mask) for name, x in statistics.items() if x is not None
    }
    out = loss_of_statistics(flat_statistics, batch, objective, rows)
    refuse_infinite_kl(out, DEFAULT_OPTIONS)
    return out


# ---- from a row source to the loss


def compute_loss(
    x: Tensor,
    head: tuple[Any, Any] | None,
    batch: TokenBatch,
    objective: Objective,
    transform: LogitTransform | None,
    reference: Any,
    normalizer: float | Tensor | Denominators | None,
    options: Options | None,
    inplace: bool,
) -> LossOutput:
    """Compute the loss of logits x or, with the (weight, bias) of a head, of hidden states x.

    reference   what was passed as `ref_logits` or `reference`
    """
    reference_name = "ref_logits" if head is None else "reference"
    options = as_options(options, head)
    check_batch_and_objective(batch, objective)
    check_reference(reference, reference_name, batch, objective)
    exact = objective.exact
    if is_traced() and leaves_the_graph(
        options, batch.context_group, exact, batch.kept, batch.extra_ids, batch.rows
    ):
        return run_outside_graph(
            compute_loss,
            x,
            head,
            batch,
            objective,
            transform,
            reference,
            normalizer,
            options,
            inplace,
        )
    is_composed = (
        batch.kept is not None
        or batch.extra_ids is not None
        or batch.rows is not None
        or isinstance(reference, TokenSets)
    )
    refuse_inplace(inplace and is_composed, composed_features(batch, reference))
    layout = layout_of_batch(x, batch)
    source = make_source(
        x,
        head,
        layout,
        transform,
        options,
        inplace=inplace,
        other_arguments={"batch": batch, "transform": transform, "normalizer": normalizer},
        reference_arguments={reference_name: reference},
    )
    check_targets(batch.targets, batch.mask, source.vocab_size, logits=head is None)
    check_candidates(batch, options, source.vocab_size)
    if batch.rows is not None:
        check_named(batch.rows, batch.mask, source.num_rows)

    checked_reference = None
    needs_reference = reference is not None or exact is not None
    if needs_reference and not isinstance(reference, TokenSets):
        checked_reference = make_reference(reference, source, layout, transform, options, exact)
        if exact is None:
            ref_logps = reference_logprobs(checked_reference, batch, objective, normalizer, options)
            batch = batch.with_ref_logps(ref_logps)
            checked_reference = None
    rows = objective.token_inputs(batch, normalizer, options.skip_inactive)
    refuse_nan(rows, batch, options)
    if exact is not None and exact.temperature_squared:
        assert rows.divergence_weight is not None
        factor = squared_inverse_temperature(source.transform, rows.processed)
        rows = replace(rows, divergence_weight=rows.divergence_weight / factor)

    if is_composed:
        refuse_infinite_terms(batch, objective, rows, options)
        teacher = reference if isinstance(reference, TokenSets) else None
        statistics = statistics_of_composed_batch(
            source, batch, objective, rows, checked_reference, teacher
        )
        out = loss_of_statistics(statistics, batch, objective, rows)
    else:
        out = loss_of_source(source, batch, objective, rows, checked_reference)
    refuse_infinite_kl(out, options)
    return out


def loss_of_source(
    source: RowSource,
    batch: TokenBatch,
    objective: Objective,
    rows: TokenInputs,
    reference: Reference | None,
) -> LossOutput:
    """Compute the loss of one target a row over the whole vocabulary.

    The gradient is computed in the forward if it is known while the logits are there.
    """
    if is_traced():
        return loss_of_statistics(
            dense_statistics(source, objective, rows, reference, None), batch, objective, rows
        )
    if isinstance(source, GivenLogits):
        # An fp16 gradient is stored after it is multiplied by the loss scale, which arrives in the
        # backward. With a shard the ranks exchange statistics between two passes anyway.
        is_fp16 = source.logits.dtype == torch.float16 and torch.is_grad_enabled()
        if objective.gradient_is_per_token and not is_fp16 and source.shard is None:
            result = source.fused_loss(objective.loss_formula(rows), rows.processed, reference)
            return make_output(result, batch, objective, rows)
        statistics = dense_statistics(source, objective, rows, reference, None)
        return loss_of_statistics(statistics, batch, objective, rows)

    order, has_gradient = order_rows(batch, rows, objective)
    if objective.gradient_is_per_token:
        result = source.fused_loss(objective.loss_formula(rows), order, reference)
        return make_output(result, batch, objective, rows)
    _, weight, bias = source.tensors
    trains_weight = torch.is_grad_enabled() and weight.requires_grad
    trains_bias = bias is not None and bias.requires_grad
    # The gradient of a row must be one scalar times a vector that depends on this row only, and the
    # scalar must depend on the row's sequence only. With a
    # frozen head both ways take two matmuls, unless the entropy has a gradient.
    has_one_scalar = not objective.needs_entropy and reference is None and not trains_bias
    is_per_sequence = objective.gradient_is_per_sequence and batch.context_group is None
    if trains_weight and has_one_scalar and is_per_sequence:
        log_ratios: list[Tensor] = []

        def compute_losses(logps: Tensor, entropy: Tensor) -> TokenLosses:
            log_ratios[:] = [objective.log_ratio(logps, rows, batch)]
            return objective.token_losses(logps, entropy, rows, batch, log_ratios[0])

        result_of_sequences = source.fused_sequence_loss(
            rows.targets,
            compute_losses,
            order,
            batch.counts_by_sequence(objective.gradient_mask, has_gradient),
        )
        if result_of_sequences is not None:
            return make_output(result_of_sequences, batch, objective, rows, log_ratios[0])
    statistics = dense_statistics(source, objective, rows, reference, order)
    return loss_of_statistics(statistics, batch, objective, rows)


def composed_features(batch: TokenBatch, reference: Any) -> str:
    """Name the features of a call that are composed of several passes, for an error message."""
    if isinstance(reference, TokenSets):
        return "a teacher known at some ids"
    fields = ("kept", "logp_terms", "prob_terms", "rows")
    return "a batch with " + ", ".join(x for x in fields if getattr(batch, x) is not None)


def layout_of_batch(x: Any, batch: TokenBatch) -> RowLayout:
    """Return the rows that logits or hidden states x of a batch must have."""
    device = batch.targets.device
    if batch.rows is None:
        return RowLayout(batch.targets.shape, device, batch.mask, batch.cu_seqlens)
    return RowLayout(leading_shape(x, batch.targets), device, are_shared=True)


def dense_statistics(
    source: RowSource,
    objective: Objective,
    rows: TokenInputs,
    reference: Reference | None,
    order: RowOrder | None,
) -> dict[str, Tensor]:
    """Return differentiable log-probs, entropies and, with a reference, divergences of rows."""
    names = ("entropy",) if reference is None else ("entropy", "divergence")
    detached = () if objective.needs_entropy else ("entropy",)
    if order is not None and isinstance(source, ProjectedLogits):
        source = replace(source, known_order=KnownOrder(rows.processed, order))
    return source.statistics(
        rows.targets, rows.processed, names, detached=detached, reference=reference
    )


def statistics_of_composed_batch(
    source: RowSource,
    batch: TokenBatch,
    objective: Objective,
    rows: TokenInputs,
    reference: Reference | None,
    teacher: TokenSets | None,
) -> dict[str, Tensor]:
    """Return statistics of tokens with candidate sets, further ids, shared rows or such a teacher.

    reference   a whole distribution, for kl=Exact(...)
    teacher     a teacher that is known at some ids of each token, for kl=Exact(...)
    """
    flat_rows = None if batch.rows is None else flat(batch.rows).long()
    extra_ids = batch.extra_ids
    exact = objective.exact
    detached = () if objective.needs_entropy else ("entropy",)
    if batch.rows is None and isinstance(source, ProjectedLogits):
        # The batch has counted the rows of its mask, so that the host need not wait for them.
        order, _ = order_rows(batch, rows, objective)
        source = replace(source, known_order=KnownOrder(rows.processed, order))
    if teacher is not None:
        assert exact is not None
        name = "ref_logits" if isinstance(source, GivenLogits) else "reference"
        require(batch.kept is None, name, "TokenSets", TEACHER_WITH_SETS)
        check_teacher(name, teacher, batch.targets, exact, source.vocab_size)
        if extra_ids is None:  # then one pass serves both
            return logprobs_with_teacher(
                source,
                rows.targets,
                teacher,
                exact,
                mask=rows.processed,
                rows=flat_rows,
                names=("entropy",),
                detached=detached,
            )
    if extra_ids is not None:
        name = "prob_terms" if batch.logp_terms is None else "logp_terms"
        check_ids(name, extra_ids, source.vocab_size)
    # A reference's divergence is computed in the same pass, unless it is over candidate sets.
    is_dense_reference = reference is not None and batch.kept is None
    statistics = composed_statistics(
        source,
        rows.targets,
        rows.processed,
        ("entropy", "divergence") if is_dense_reference else ("entropy",),
        kept=batch.kept,
        missing=missing_of(batch),
        at=extra_ids,
        rows=flat_rows,
        detached=detached,
        reference=reference if is_dense_reference else None,
    )
    if extra_ids is not None:
        terms = objective.extra_id_terms(batch)
        statistics["auxiliary_loss"] = auxiliary_loss_of_ids(
            terms, statistics.pop("at"), rows.advantages
        )
    if teacher is not None:
        assert exact is not None
        statistics["divergence"] = teacher_divergence(
            source, teacher, exact, mask=rows.processed, rows=flat_rows
        )
    elif reference is not None and batch.kept is not None:
        assert exact is not None
        statistics["divergence"] = reference_divergence_over_candidates(
            source,
            reference,
            batch.kept,
            exact,
            targets=rows.targets,
            mask=rows.processed,
            rows=flat_rows,
            missing=missing_of(batch),
        )
    return statistics


def loss_of_statistics(
    statistics: dict[str, Tensor], batch: TokenBatch, objective: Objective, rows: TokenInputs
) -> LossOutput:
    """Compute the loss from differentiable statistics of tokens, fp32 [num_tokens] each.

    statistics   "logps", and if the loss needs them "entropy", "divergence" and "auxiliary_loss"
    """
    logps = statistics["logps"]
    entropy = statistics.get("entropy")
    divergence = statistics.get("divergence")
    auxiliary_loss = statistics.get("auxiliary_loss")

    constant_logps = logps.detach()
    constant_entropy = None if entropy is None else entropy.detach()
    log_ratio = None
    if not objective.gradient_is_per_token:
        log_ratio = objective.log_ratio(constant_logps, rows, batch)
    token_losses = objective.token_losses(
        constant_logps,
        constant_entropy,
        rows,
        batch,
        log_ratio,
        None if auxiliary_loss is None else auxiliary_loss.detach(),
    )
    grad_auxiliary_loss = None if auxiliary_loss is None else token_losses.grad_auxiliary_loss
    loss = apply_function(
        LossOfStatistics,
        token_losses.losses,
        logps,
        entropy,
        auxiliary_loss,
        token_losses.grad_logps,
        token_losses.grad_entropy,
        grad_auxiliary_loss,
    )
    if divergence is not None:
        assert rows.divergence_weight is not None
        loss = loss + sum_losses(times(rows.divergence_weight, divergence))
        divergence = divergence.detach()
    if constant_entropy is None:
        constant_entropy = torch.full_like(constant_logps, math.nan)
    result = FormulaResult(loss, constant_logps, constant_entropy, divergence)
    return make_output(result, batch, objective, rows, log_ratio)


def make_output(
    result: FormulaResult,
    batch: TokenBatch,
    objective: Objective,
    rows: TokenInputs,
    log_ratio: Tensor | None = None,
) -> LossOutput:
    """Return the loss with its statistics in the shape of targets.

    log_ratio   at the objective's level, fp32 [num_tokens], if it was computed
    """
    shape = batch.targets.shape
    divergence = None if result.divergence is None else result.divergence.view(shape)
    return LossOutput(
        result.loss,
        result.logps.view(shape),
        result.entropy.view(shape),
        objective,
        batch,
        rows,
        log_ratio,
        divergence,
    )


def flatten_and_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x as fp32 [num_tokens], 0 in masked tokens, which may hold anything."""
    x = x.flatten().float()
    return x if mask is None else torch.where(mask, x, 0.0)


# ---- references


def reference_logprobs(
    reference: Reference,
    batch: TokenBatch,
    objective: Objective,
    normalizer: float | Tensor | Denominators | None,
    options: Options,
) -> Tensor:
    """Return the log-prob of each target under a reference, the shape of targets."""
    # Which rows are processed does not depend on the values of ref_logps.
    placeholder = torch.zeros(batch.targets.shape, device=batch.targets.device)
    batch = batch.with_ref_logps(placeholder)
    rows = objective.token_inputs(batch, normalizer, options.skip_inactive)
    source = reference.source
    with torch.no_grad():
        if batch.kept is not None or batch.rows is not None:
            statistics = composed_statistics(
                source,
                rows.targets,
                rows.processed,
                (),
                kept=batch.kept,
                missing=missing_of(batch),
                at=None,
                rows=None if batch.rows is None else flat(batch.rows).long(),
            )
        elif isinstance(source, GivenLogits):
            statistics = source.statistics(rows.targets, rows.processed)
        else:
            order, _ = order_rows(batch, rows, objective)
            source = replace(source, known_order=KnownOrder(rows.processed, order))
            statistics = source.statistics(rows.targets, rows.processed)
    return statistics["logps"].view(batch.targets.shape)


def check_candidates(batch: TokenBatch, options: Options, vocab_size: int) -> None:
    """Raise ValueError for a candidate outside of the vocabulary.

    Strict mode also refuses a target that its set does not contain, unless batch.missing says what
    to do with it.
    """
    if batch.kept is not None:
        check_ids("kept", batch.kept, vocab_size)
        if batch.missing is None and is_strict(options.strict):
            narrowed(batch.kept, batch.targets, batch.mask, "raise")


def missing_of(batch: TokenBatch) -> str:
    """Return what to do with a target that its candidate set does not contain.

    The batch has masked it with "mask", and refused it with "raise".
    """
    return "full" if batch.missing == "full" else "include"


# ---- which rows are processed


def order_rows(
    batch: TokenBatch, rows: TokenInputs, objective: Objective
) -> tuple[RowOrder, Tensor | None]:
    """Return the rows to process, those that can have a gradient first, and a mask of the latter.

    The mask is bool [num_tokens], None for all rows. The host does not wait for the device: the
    batch has sent its row counts ahead.
    """
    device = rows.targets.device
    num_rows = rows.targets.numel()
    mask_name = objective.gradient_mask
    all_have_gradient = rows.processed is not rows.loss_mask or mask_name == "trained"
    has_gradient = rows.processed if all_have_gradient else batch.named_mask(mask_name)
    if has_gradient is None:  # then no row is masked either
        return RowOrder.of_all_rows(num_rows, device), None

    if device.type == "cpu" and not sends_ahead(device):
        # Nothing waits there, and `nonzero` is faster than sorting a few rows.
        first = has_gradient.nonzero()[:, 0]
        row_ids = first
        if not all_have_gradient:
            others = ~has_gradient if rows.processed is None else rows.processed & ~has_gradient
            row_ids = torch.cat([first, others.nonzero()[:, 0]])
        return RowOrder(row_ids, len(first), num_rows), has_gradient

    rank = has_gradient.view(torch.uint8)
    if not all_have_gradient and rows.processed is not None:
        rank = rank + rows.processed.view(torch.uint8)
    row_ids = torch.argsort(rank, stable=True, descending=True)
    num_with_gradient = batch.count_in_mask(mask_name, has_gradient)
    num_processed = num_with_gradient
    if not all_have_gradient:
        num_processed = batch.count_in_mask("trained", rows.processed)
    return RowOrder(row_ids[:num_processed], num_with_gradient, num_rows), has_gradient
