"""Losses of the GRPO family.

    grpo_loss          from logits
    linear_grpo_loss   from hidden states and the output head, without [num_tokens, V] logits
    objective_loss     from log-probs, whatever computed them

`compute_loss` does the work of the first two, in one of two ways:

- A *fused loss* (`BatchLoss.with_gradient`) computes the gradient in the forward, while it has the
  logits of a row (`core/linear.py`, `core/sources.py`). The backward only multiplies it by the
  upstream gradient, and can run once.
- A *loss of statistics* (`BatchLoss.from_statistics`) first computes differentiable statistics of
  the tokens (log-prob, entropy, ...), and then the loss from them. The backward reads the logits a
  second time. From hidden states it computes them again, which is one more matmul. With a frozen
  head it does not, if only log-probs have a gradient (`sources.FrozenHeadPass`).

The way is chosen in three steps:

1. `composed_feature`: a batch with candidate sets, extra ids or shared rows, or with a teacher that
   is known at some ids, gets a loss of statistics (`composed_losses.py`).
2. `BatchLoss.may_compute_gradient_in_forward`: otherwise the loss is fused if the gradient of a
   token depends on this token alone, or from hidden states if it is a scalar of the sequence times
   a known vector (GSPO). It is not under torch.compile and torch.func, and in a few cases more.
3. `BatchLoss.with_gradient` returns None for a sequence that is longer than a block. Then the loss
   is one of statistics.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from .batch import TokenBatch, sends_counts_early
from .checks import (
    FLOATING,
    check_targets,
    per_token,
    require_shape,
    require_tensor,
)
from .composed_losses import (
    check_composed_batch,
    composed_feature,
    composed_loss_statistics,
    composed_reference_logprobs,
)
from .core.autograd import LossOfStatistics, apply_function
from .core.backends import Backend
from .core.linear import RowOrder
from .core.loss_formulas import FormulaResult, sum_losses
from .core.sources import GivenLogits, ProjectedLogits, Reference, RowSource
from .formulas.ops import times
from .formulas.token_inputs import TokenInputs
from .formulas.token_loss import TokenLosses, TokenLossFormula
from .inputs import LinearInput, LogitsInput, RowInput, RowLayout, make_reference, pick_kernels
from .logprobs import refuse_inplace, squared_inverse_temperature
from .loss_checks import (
    check_batch_and_objective,
    check_grad_scale,
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
    must_break_graph,
    refuse_keywords,
    run_outside_graph,
)
from .token_sets import TokenSets
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
    grad_scale: float | Tensor = 1.0,
    inplace: bool = False,
    ref_logits: Tensor | tuple[Tensor, LogitTransform] | TokenSets | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> LossOutput:
    """Compute the loss of `objective` over `batch` from logits.

        batch = TokenBatch(ids[:, 1:], advantages, mask=mask, old_logps=old_logps)
        out = grpo_loss(logits[:, :-1], batch, Objective.preset("dapo"))
        out.loss.backward()

    logits       [B, T, V] or [N, V], fp32, bf16 or fp16, any strides. Row i predicts
                 batch.targets[i], unless batch.rows says otherwise.
    transform    temperature, softcap and scale of the logits, see `LogitTransform`
    normalizer   the denominator over all micro-batches and ranks, a number or 0-d tensor. None:
                 that of this batch alone, `objective.normalizer(batch)`, at least 1.
    grad_scale   what you will multiply the loss by before `backward`, a number or 0-d tensor: 1 / 4
                 for `(out.loss / 4).backward()`. The value of the loss stays the same. The forward
                 then computes the gradient of the product, and the backward need not multiply it.
                 If you multiply by another factor, the backward multiplies the gradient, which
                 takes one more pass over it. A 16-bit gradient was rounded already, and is then
                 rounded again, unless factor / grad_scale is a power of two.
    inplace      whether the gradient overwrites the logits, so that no second [.., V] tensor
                 exists. Autograd raises if another operation still needs their values; code that
                 reads them afterwards gets the gradient, without an error. A leaf that requires
                 grad is refused, and so are candidate sets, extra ids and shared rows.
    ref_logits   for kl=Exact(...): logits of the reference or teacher, like `logits`; (logits,
                 LogitTransform); or `TokenSets` whose values are the log-probs of a teacher that is
                 known at these ids only. No gradient flows to them.
    options      backend, strict mode, vocabulary shard, see `Options`

    An objective whose gradient is per token (`Objective.gradient_is_per_token`) takes one pass over
    the logits, which also writes their gradient. Other objectives take two passes, the second in
    the backward. So do fp16 logits, because the loss scale is known in the backward only. A
    gradient that the forward computed exists once: a second backward raises RuntimeError. A loss
    near 0 is normal on-policy (ratio 1, advantages that sum to 0). Its gradient is not 0.

    Raises ValueError naming the argument that is wrong, before any work.
    """
    if unknown:
        refuse_keywords(grpo_loss, unknown)
    return compute_loss(
        LogitsInput(logits),
        batch,
        objective,
        transform=transform,
        reference=ref_logits,
        normalizer=normalizer,
        grad_scale=grad_scale,
        options=options,
        inplace=inplace,
    )


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor | Head,
    batch: TokenBatch,
    objective: Objective,
    *,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    grad_scale: float | Tensor = 1.0,
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
    normalizer, grad_scale   as in `grpo_loss`
    reference    (hidden, weight), (hidden, weight, bias) or (hidden, Head(...)) of the frozen
                 reference, instead of batch.ref_logps. It has the policy's transform unless its
                 Head has one; its hidden size and dtype may differ. With kl=Exact(...) also
                 `TokenSets` whose values are a teacher's log-probs.
    options      backend, strict mode, shard, memory for the gradient of the weight, see `Options`

    A token that may have a gradient takes part in three matmuls, or two with a frozen head. The
    other trained tokens take part in one, masked tokens in none. With a trained head there are four
    matmuls instead of three for

    - extra ids, shared rows, and filters and surrogates that choose among the whole batch
    - torch.compile and `Options(grad_in_backward=True)`
    - a sequence-level objective with a sequence longer than a block, an entropy bonus, an exact
      divergence, a trained bias, a `context_group`, or fp16 matmuls on a GPU

    A token with a candidate set takes one dot product for each candidate. Logits are fp32, a chunk
    of rows at a time. The gradient of the weight is summed in fp32. If the forward computed the
    gradient, a second backward raises RuntimeError, as for `grpo_loss`.

    Raises ValueError naming the argument that is wrong.
    """
    if unknown:
        refuse_keywords(linear_grpo_loss, unknown)
    inputs, transform = LinearInput.from_arguments(hidden, weight, transform)
    return compute_loss(
        inputs,
        batch,
        objective,
        transform=transform,
        reference=reference,
        normalizer=normalizer,
        grad_scale=grad_scale,
        options=options,
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
                     read here
    entropy          entropy of each token in nats, the same shape. Needed for an entropy bonus and
                     for filters of entropy. None: out.entropy is NaN.
    divergence       divergence of each token from a reference, the same shape, for example of
                     `token_divergence`. Needed with kl=Exact(...), and multiplied by its weight.
    auxiliary_loss   a loss of each token that is added to its policy term, and weighted, filtered
                     and averaged with it; the same shape
    token_weights    float [B] or the shape of targets: multiplies all terms of a token, also the
                     KL. Unlike a mask it changes no denominator.
    normalizer       as in `grpo_loss`

    Value and gradient are those of `grpo_loss`. The backend of `use` evaluates the formula, see
    `Custom`. Raises ValueError naming the argument that is wrong.
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
    check_statistics(statistics, batch, objective)
    if auxiliary_loss is not None:  # it replaces the terms of ids besides the target
        batch = replace(batch, logp_terms=None, prob_terms=None)
        objective = replace(objective, listed=None)
    tokens = objective.token_inputs(batch, normalizer)
    refuse_nan(tokens, batch, DEFAULT_OPTIONS)
    if token_weights is not None:
        tokens = tokens.weighted(
            per_token("token_weights", token_weights, batch.targets.shape, batch.cu_seqlens)
        )
    flat_statistics = {
        name: flatten_and_mask(x, tokens.loss_mask)
        for name, x in statistics.items()
        if x is not None
    }
    kernels = None if is_traced() else pick_kernels(DEFAULT_OPTIONS, batch.targets.device)
    out = BatchLoss(batch, objective, tokens, kernels).from_statistics(flat_statistics)
    refuse_infinite_kl(out, DEFAULT_OPTIONS)
    return out


def check_statistics(
    statistics: dict[str, Tensor | None], batch: TokenBatch, objective: Objective
) -> None:
    """Raise ValueError unless the statistics fit the batch and are those that the objective needs.

    Each statistic must be a float tensor of the shape of batch.targets. The entropy must be there
    for an entropy bonus or a filter of entropy. The divergence must be there with kl=Exact(...),
    and only then.

    statistics   "logps", "entropy", "divergence" and "auxiliary_loss" as the caller of
                 `objective_loss` passed them; None for an argument that was not passed
    batch        gives the shape of targets
    objective    says which statistics the loss needs
    """
    for name, x in statistics.items():
        if x is not None:
            require_tensor(name, x, FLOATING, "floats of targets' shape")
            require_shape(name, x, batch.targets.shape, "targets")
    entropy = statistics["entropy"]
    filters_entropy = any(f.filters_entropy for f in objective.filters)
    if entropy is None and (objective.needs_entropy or filters_entropy):
        raise ValueError(
            "entropy is None, but the objective has an entropy bonus or a filter of entropy:"
            " pass it."
        )
    divergence = statistics["divergence"]
    needs_divergence = objective.exact is not None
    if needs_divergence != (divergence is not None):
        remedy = "leave it out, or pass kl=Exact(...) with a beta."
        if needs_divergence:
            remedy = "pass the divergence of each token."
        raise ValueError(
            f"divergence is {'None' if divergence is None else 'given'}, but "
            f"kl={objective.kl!r}, beta={objective.beta}: {remedy}"
        )


# ---- from the arguments of a call to its loss


def compute_loss(
    inputs: RowInput,
    batch: TokenBatch,
    objective: Objective,
    *,
    transform: LogitTransform | None,
    reference: Any,
    normalizer: float | Tensor | Denominators | None,
    grad_scale: float | Tensor,
    options: Options | None,
    inplace: bool = False,
) -> LossOutput:
    """Compute `grpo_loss` or `linear_grpo_loss`: check the arguments, then compute the loss.

    inputs      the logits, or hidden states and head, as the caller passed them
    reference   what the caller passed as `ref_logits` (with logits) or `reference`

    The other arguments are those of the public functions.
    """
    options = as_options(options)
    inputs.check_options(options)
    check_batch_and_objective(batch, objective)
    check_reference(reference, inputs.reference_name, batch, objective)
    exact = objective.exact
    if is_traced() and must_break_graph(
        options, batch.context_group, exact, batch.kept, batch.extra_ids, batch.rows
    ):
        # The operators of a compiled graph do not support one of these arguments.
        return run_outside_graph(
            compute_loss,
            inputs,
            batch,
            objective,
            transform=transform,
            reference=reference,
            normalizer=normalizer,
            grad_scale=grad_scale,
            options=options,
            inplace=inplace,
        )
    scale = check_grad_scale(grad_scale, batch.targets.device)
    # What makes this a loss of composed statistics, as a text for error messages, for example
    # "a batch with kept". None for an ordinary batch.
    feature = composed_feature(batch, reference)
    if feature is not None:
        refuse_inplace(inplace, feature)
    layout = layout_of_batch(inputs, batch)
    source = inputs.make_source(
        layout,
        transform,
        options,
        inplace=inplace,
        other_arguments={"batch": batch, "transform": transform, "normalizer": normalizer},
        reference_arguments={inputs.reference_name: reference},
    )
    check_targets(batch.targets, batch.mask, source.vocab_size, isinstance(inputs, LogitsInput))
    if feature is not None:
        check_composed_batch(batch, options, source)

    checked_reference = None
    needs_reference = reference is not None or exact is not None
    if needs_reference and not isinstance(reference, TokenSets):
        checked_reference = make_reference(
            reference, inputs, source, layout, transform, options, exact
        )
        if exact is None:  # a KL estimator, which needs only the reference's log-probs
            ref_logps = reference_logprobs(checked_reference, batch, objective, normalizer, options)
            batch = batch.with_ref_logps(ref_logps)
            checked_reference = None
    tokens = objective.token_inputs(batch, normalizer, options.skip_inactive)
    refuse_nan(tokens, batch, options)
    if exact is not None and exact.temperature_squared:
        assert tokens.divergence_weight is not None
        # weight * temperature^2 = weight / inverse_temperature^2
        factor = squared_inverse_temperature(source.transform, tokens.processed)
        tokens = replace(tokens, divergence_weight=tokens.divergence_weight / factor)

    loss = BatchLoss(
        batch=batch,
        objective=objective,
        tokens=tokens,
        kernels=None if is_traced() else source.kernels,
        grad_scale=scale,
    )
    if feature is None:
        out = loss.compute(source, checked_reference, options)
    else:
        refuse_infinite_terms(batch, objective, tokens, options)
        statistics = composed_loss_statistics(
            source if batch.rows is not None else loss.with_known_order(source),
            batch,
            objective,
            tokens,
            reference=checked_reference,
            teacher=reference if isinstance(reference, TokenSets) else None,
            reference_name=inputs.reference_name,
        )
        out = loss.from_statistics(statistics)
    refuse_infinite_kl(out, options)
    return out


@dataclass(frozen=True, eq=False)
class BatchLoss:
    """The loss of a batch, and the ways to compute it. A row of logits predicts one token.

    batch        the tokens as the caller passed them
    objective    defines the loss
    tokens       the same tokens as flat tensors [num_tokens], with a weight for each loss term
                 (`Objective.token_inputs`)
    kernels      evaluate the formula of the loss on vectors. None: PyTorch does, so that
                 torch.compile and torch.func can trace the call.
    grad_scale   0-d, what the caller will multiply the loss by before `backward`; None for 1
    """

    batch: TokenBatch
    objective: Objective
    tokens: TokenInputs
    kernels: Backend | None = None
    grad_scale: Tensor | None = None

    def compute(
        self, source: RowSource, reference: Reference | None, options: Options
    ) -> LossOutput:
        """Compute the loss from rows of logits. Row i predicts token i, over the whole vocabulary.

        It is a fused loss if possible: the forward computes the gradient. Otherwise the forward
        computes differentiable statistics, and the backward the gradient (with a frozen head see
        `sources.FrozenHeadPass`).

        source      the policy's rows: given logits, or logits computed from hidden states
        reference   a frozen model, whose divergence from the policy is added to the loss; or None
        options     the options of the call; only `grad_in_backward` is read here
        """
        if self.may_compute_gradient_in_forward(source, reference, options):
            out = self.with_gradient(source, reference)
            if out is not None:
                return out
        return self.from_statistics(self.compute_statistics(source, reference))

    # ---- gradients that are computed in the forward

    def may_compute_gradient_in_forward(
        self, source: RowSource, reference: Reference | None, options: Options
    ) -> bool:
        """Return whether the forward computes the gradient too, while it has the logits of a row.

        Batches with candidate sets, extra ids or shared rows never get here: `compute_loss` takes
        their statistics from `composed_losses.py`.

        The answer is no if torch.compile or torch.func traces the call, or with
        `Options(grad_in_backward=True)`. The other conditions depend on the source:

        - Logits: the gradient of a token must depend on this token alone. There must be no
          vocabulary shard, whose ranks exchange sums between two kernel calls. The logits must not
          be fp16: their gradient is stored after it is multiplied by the loss scale, which the
          backward receives.
        - Hidden states: the gradient of a token must depend on this token alone, or be a scalar of
          its sequence times a known vector, see `gradient_is_scalar_of_sequence`. In the second
          case there must be no reference, whose divergence adds another vector, and a trained head,
          because with a frozen head both ways take two matmuls.
          `with_gradient` may still return None, for a sequence that is longer than a block or for
          fp16 matmuls on a GPU.
        """
        if is_traced() or options.grad_in_backward:
            return False
        is_per_token = self.objective.gradient_is_per_token
        if isinstance(source, GivenLogits):
            is_fp16 = source.logits.dtype == torch.float16 and torch.is_grad_enabled()
            return is_per_token and source.shard is None and not is_fp16
        assert isinstance(source, ProjectedLogits)
        if is_per_token:
            return True
        has_trained_weight = torch.is_grad_enabled() and source.projection.weight.requires_grad
        return (
            has_trained_weight
            and reference is None
            and self.gradient_is_scalar_of_sequence(source.projection.bias)
        )

    def gradient_is_scalar_of_sequence(self, bias: Tensor | None) -> bool:
        """Return whether the gradient of a row is a scalar of its sequence times a known vector:

            d loss / d logits[row] = c[row] * d log-prob[row] / d logits[row]

        The vector is known while the logits of the row exist. The scalar c is known only when the
        log-probs of the whole sequence are. Each condition below excludes a case in which this form
        does not hold:

        - A trained bias: its gradient sums rows over blocks before c is known.
        - An entropy bonus: the gradient of the entropy is a second vector.
        - A gradient that depends on other sequences (`Objective.gradient_is_per_sequence`).
        - A `context_group`: other ranks have a part of the sequence.

        bias   [V], the bias of the output head, or None
        """
        return (
            not (bias is not None and bias.requires_grad)
            and not self.objective.needs_entropy
            and self.objective.gradient_is_per_sequence
            and self.batch.context_group is None
        )

    def with_gradient(self, source: RowSource, reference: Reference | None) -> LossOutput | None:
        """Compute a fused loss: the loss, and its gradient in the same pass over the rows.

        Call this only if `may_compute_gradient_in_forward` returned True. Returns None for a
        sequence-level loss from hidden states whose gradient the forward cannot compute: a sequence
        is longer than a block of rows, or the matmuls are fp16 on a GPU. The caller then computes
        the loss from statistics.

        source      the policy's rows of logits
        reference   a frozen model, whose divergence from the policy is added to the loss; or None
        """
        tokens = self.scaled_tokens()
        if isinstance(source, GivenLogits):
            formula = self.objective.loss_formula(tokens)
            result = source.fused_loss(formula, tokens.processed, reference)
            return self.output_of_scaled(result)
        assert isinstance(source, ProjectedLogits)
        if self.objective.gradient_is_per_token:
            formula = self.objective.loss_formula(tokens)
            result = source.fused_loss(formula, self.row_order(), reference)
            return self.output_of_scaled(result)

        # A sequence-level loss (GSPO): the gradient of a row is the gradient of its log-prob, times
        # a scalar that follows from the log-probs of the whole sequence.
        compute_losses = functools.partial(
            self.objective.token_losses,
            inputs=tokens,
            batch=self.batch,
            evaluate=self.evaluate_formula,
        )
        # How many rows with a gradient each sequence has.
        rows_per_sequence = self.batch.counts_by_sequence(
            self.objective.gradient_mask, self.tokens_with_gradient
        )
        order = self.row_order(num_with_gradient=sum(rows_per_sequence))
        sequence_result = source.fused_sequence_loss(
            tokens.targets, compute_losses, order, rows_per_sequence
        )
        # None: the forward cannot compute the gradient of this batch.
        return None if sequence_result is None else self.output_of_scaled(sequence_result)

    def scaled_tokens(self) -> TokenInputs:
        """Return the tokens with every weight of a loss term multiplied by grad_scale.

        grad_scale is what the caller will multiply the loss by before `backward`. The gradient that
        the forward computes from these tokens is that of grad_scale * loss.
        """
        return self.tokens if self.grad_scale is None else self.tokens.weighted(self.grad_scale)

    def output_of_scaled(self, result: FormulaResult) -> LossOutput:
        """Return the output of a call, from a result whose loss is grad_scale times too large.

        The loss is divided by grad_scale. The backward of this division also divides the upstream
        gradient. If the caller multiplied the loss by grad_scale, the upstream gradient becomes
        exactly 1, and the gradient that the forward computed needs no multiplication.

        result   of a loss of `scaled_tokens`
        """
        if self.grad_scale is not None:
            result = result._replace(loss=result.loss / self.grad_scale)
        return self.output(result)

    # ---- the loss of differentiable statistics

    def compute_statistics(
        self, source: RowSource, reference: Reference | None
    ) -> dict[str, Tensor]:
        """Return "logps", "entropy" and, with a reference, "divergence", fp32 [num_tokens] each.

        They are differentiable, the entropy only if the objective has an entropy bonus.

        source      the policy's rows of logits
        reference   a frozen model that "divergence" is computed from; or None
        """
        tokens = self.tokens
        return self.with_known_order(source).statistics(
            tokens.targets,
            tokens.processed,
            ("entropy",) if reference is None else ("entropy", "divergence"),
            detached=() if self.objective.needs_entropy else ("entropy",),
            reference=reference,
        )

    def from_statistics(self, statistics: dict[str, Tensor]) -> LossOutput:
        """Compute a loss of statistics, which are differentiable, fp32 [num_tokens] each.

        The formula returns the loss of each token together with its derivatives with respect to
        logps, entropy and auxiliary_loss. `LossOfStatistics` passes these to autograd. The weighted
        divergence is added by ordinary operations of PyTorch.

        statistics   "logps" (log-prob of each target), and if the loss needs them "entropy",
                     "divergence" (from a reference) and "auxiliary_loss" (added to the policy
                     term). "entropy" needs a gradient only for an entropy bonus.
        """
        objective = self.objective
        tokens = self.tokens
        logps = statistics["logps"]
        entropy = statistics.get("entropy")
        divergence = statistics.get("divergence")
        auxiliary_loss = statistics.get("auxiliary_loss")

        # Autograd need not record the formula, which computes its own derivatives.
        constant_logps = logps.detach()
        if entropy is None:  # no term reads it. A NaN would show in the loss if one did.
            constant_entropy = torch.full_like(constant_logps, math.nan)
        else:
            constant_entropy = entropy.detach()
        token_losses = objective.token_losses(
            constant_logps,
            constant_entropy,
            tokens,
            self.batch,
            auxiliary_loss=None if auxiliary_loss is None else auxiliary_loss.detach(),
            evaluate=self.evaluate_formula,
        )
        loss = apply_function(
            LossOfStatistics,
            token_losses.losses,
            logps,
            entropy,
            auxiliary_loss,
            token_losses.grad_logps,
            token_losses.grad_entropy,
            token_losses.grad_auxiliary_loss,
        )
        if divergence is not None:
            assert tokens.divergence_weight is not None
            loss = loss + sum_losses(times(tokens.divergence_weight, divergence))
            divergence = divergence.detach()
        result = FormulaResult(
            loss=loss,
            logps=constant_logps,
            entropy=constant_entropy,
            divergence=divergence,
            log_ratios=token_losses.log_ratios,
        )
        return self.output(result)

    def evaluate_formula(
        self, formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> TokenLosses:
        """Return the loss of each token and its derivatives with respect to logps and entropy.

        The kernels evaluate the formula in one call. Without kernels, PyTorch does, operation by
        operation.

        formula          of the loss of a token, with the inputs of all tokens
        logps, entropy   fp32 [num_tokens]: log-prob of each target, and entropy in nats
        """
        if self.kernels is None:
            return formula.compute(logps, entropy)
        return self.kernels.evaluate_formula(formula, logps.contiguous(), entropy.contiguous())

    def output(self, result: FormulaResult) -> LossOutput:
        """Return what the caller of the loss gets: the loss, and statistics shaped like targets.

        result   the loss, and its flat statistics [num_tokens]
        """
        shape = self.batch.targets.shape
        return LossOutput(
            loss=result.loss,
            logps=result.logps.view(shape),
            entropy=result.entropy.view(shape),
            rows=self.tokens,
            divergence=None if result.divergence is None else result.divergence.view(shape),
            _objective=self.objective,
            _batch=self.batch,
            _log_ratio=result.log_ratios,
        )

    # ---- which rows are processed

    def with_known_order(self, source: RowSource) -> RowSource:
        """Return the source with the order in which a pass processes its rows, from `row_order`.

        A source that computes logits from hidden states gathers the rows that are processed. With a
        known order the host need not wait for a GPU to count them. Given logits are read in place
        and need no order. Under torch.compile or torch.func the host does not know the counts.

        source   the policy's rows of logits
        """
        if isinstance(source, GivenLogits) or is_traced():
            return source
        return source.with_known_order(self.tokens.processed, self.row_order())

    @functools.cached_property
    def tokens_with_gradient(self) -> Tensor | None:
        """The processed tokens that may have a gradient, bool [num_tokens]. None: all tokens.

        It is the tensor `tokens.processed` itself if all processed tokens may have one.
        """
        all_processed_have_one = self.objective.gradient_mask == "trained"
        # With Options(skip_inactive=True), `processed` is another mask than the loss mask: only
        # tokens that may have a gradient are processed.
        skips_inactive = self.tokens.processed is not self.tokens.loss_mask
        if all_processed_have_one or skips_inactive:
            return self.tokens.processed
        return self.batch.named_mask(self.objective.gradient_mask)

    def row_order(self, num_with_gradient: int | None = None) -> RowOrder:
        """Return the order of the rows to process: first those that may have a gradient.

        Rows that are not processed are left out. On a CUDA or XPU device, the batch sent the number
        of rows of each mask to the host when it was made. The host takes the numbers from there and
        does not wait for the device.

        num_with_gradient   number of `tokens_with_gradient`, if the caller has it from the batch
        """
        tokens = self.tokens
        batch = self.batch
        device = tokens.targets.device
        gradient_mask = self.tokens_with_gradient
        if gradient_mask is None:  # every token is processed and may have a gradient
            return RowOrder.of_all_rows(tokens.targets.numel(), device)
        if device.type == "cpu" and not sends_counts_early(device):
            # Counting on a CPU needs no wait. (Tests let batches on a CPU send counts as well.)
            return RowOrder.from_masks(gradient_mask, tokens.processed)
        if num_with_gradient is None:
            num_with_gradient = batch.count_in_mask(self.objective.gradient_mask, gradient_mask)
        num_processed = num_with_gradient
        if gradient_mask is not tokens.processed:  # there are processed rows without a gradient
            # Without skip_inactive, the processed tokens are the trained ones.
            num_processed = batch.count_in_mask("trained", tokens.processed)
        return RowOrder.from_counted_masks(
            has_gradient=gradient_mask,
            processed=tokens.processed,
            num_with_gradient=num_with_gradient,
            num_processed=num_processed,
        )


def layout_of_batch(inputs: RowInput, batch: TokenBatch) -> RowLayout:
    """Return the leading shape, device and mask that the logits or hidden states must fit.

    Without batch.rows, row i predicts target i, so the rows have the shape and the mask of targets.
    With batch.rows, several tokens may be predicted by the same row. The rows then have any leading
    shape, and no mask, because a mask of tokens is no mask of rows.

    inputs   the logits, or hidden states and head, as the caller passed them
    batch    its targets, mask and `rows` are read
    """
    device = batch.targets.device
    if batch.rows is None:
        return RowLayout(batch.targets.shape, device, batch.mask, batch.cu_seqlens)
    return RowLayout(inputs.leading_shape(batch.targets), device, are_shared=True)


def flatten_and_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x as fp32 [num_tokens], with 0 in masked tokens, even if x is NaN there.

    x      float, the shape of targets
    mask   bool [num_tokens]: tokens to keep; None keeps all
    """
    x = x.flatten().float()
    return x if mask is None else torch.where(mask, x, 0.0)


def reference_logprobs(
    reference: Reference,
    batch: TokenBatch,
    objective: Objective,
    normalizer: float | Tensor | Denominators | None,
    options: Options,
) -> Tensor:
    """Return the log-prob of each target under a reference model, fp32, the shape of targets.

    It has no gradient. Tokens whose logits the loss does not read have 0.

    reference    rows of logits of the frozen model
    batch        the tokens, still without ref_logps
    objective    has a KL estimate, for which the log-probs are
    normalizer   what the caller passed, see `grpo_loss`
    options      the options of the call; only `skip_inactive` is read
    """
    # `token_inputs` refuses a KL without ref_logps. It gets zeros here, because only its mask of
    # processed tokens is used, which does not depend on the values of ref_logps.
    placeholder = torch.zeros(batch.targets.shape, device=batch.targets.device)
    batch = batch.with_ref_logps(placeholder)
    tokens = objective.token_inputs(batch, normalizer, options.skip_inactive)
    with torch.no_grad():
        if batch.kept is not None or batch.rows is not None:
            logps = composed_reference_logprobs(reference.source, batch, tokens)
        else:
            source = BatchLoss(batch, objective, tokens).with_known_order(reference.source)
            logps = source.statistics(tokens.targets, tokens.processed)["logps"]
    return logps.view(batch.targets.shape)
