"""Layer 2: the loss with its gradient computed in the forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .batch import TokenBatch
from .checks import require
from .formulas.token_stage import TokenRows
from .layout import check_targets, per_token
from .loss_output import LossOutput
from .objective import Denominators, Objective
from .operators import hidden_source, is_traced, leaves_the_graph, logits_source, outside
from .transform import LogitTransform, as_transform
from .vocabulary.hidden import Head, check_head
from .vocabulary.memory import converted
from .vocabulary.rows import RowTransform
from .vocabulary.shard import VocabShard
from .vocabulary.stage import Hidden, Logits, Source, gradient_once, vocabulary_stage, with_signature

Tensor = torch.Tensor

__all__ = ["LossOutput", "grpo_loss", "linear_grpo_loss", "objective_loss"]


def grpo_loss(
    logits: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    inplace: bool = False,
    skip_inactive: bool = False,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> LossOutput:
    """The loss of `objective` over `batch`, from logits, with the gradient computed in the same visit of each row.

        out = grpo_loss(logits[:, :-1], TokenBatch(ids[:, 1:], advantages, mask=mask, old_logps=old), Objective.preset("dapo"))
        out.loss.backward()

    logits       [B, T, V] or [N, V], fp32, bf16 or fp16, any strides; row i predicts batch.targets[i].
    transform    temperature, softcap and scale; see LogitTransform.
    normalizer   the denominator over all micro-batches and ranks, a number or 0-d tensor; None: that of this batch
                 alone, `objective.normalizer(batch)`, at least 1.
    inplace      True: destroys the logits. The gradient overwrites them, so that no second [.., V] tensor exists. Autograd raises
                 where another operation still needs their values. Code that reads the tensor afterwards gets the gradient,
                 without an error. For the output of a model: a leaf that requires grad is refused.
    skip_inactive  True: rows that cannot contribute (zero advantage or weight, and neither KL nor entropy bonus, at
                 token level) are not read either; out.logps and out.entropy hold 0 there. Loss and gradient are the same.
    shard        logits are [.., V / ranks], this rank's part of a vocabulary cut over a group: see `distributed.VocabShard`.
                 The rows are then visited twice, with one all-gather in between.
    backend      "auto", "eager", "cpu" or "triton"; see `backends.pick`. strict=True makes a fallback an error.

    Objectives of one pass (`Objective.one_pass`: token level) read each logit from memory once and write its gradient once;
    the others read twice.
    fp16 logits keep their values and form the gradient in the backward, where the loss scale is known: it would
    underflow here. On-policy (ratio 1, advantages that sum to 0) a loss near 0 is normal: its gradient is not.

    out.loss.backward() hands the stored gradient on, multiplied by the upstream scalar; no pass over it when that is 1
    and no host sync. The gradient is handed over once: a second backward raises RuntimeError (fp16: with
    retain_graph=True it works). Raises ValueError naming the argument that is wrong, before any work.
    """
    _check_specs(batch, objective)
    if leaves_the_graph(shard=shard, context_group=batch.context_group):
        options: dict[str, Any] = {"transform": transform, "normalizer": normalizer, "inplace": inplace, "shard": shard}
        options |= {"skip_inactive": skip_inactive, "backend": backend, "strict": strict}
        return outside(grpo_loss, logits, batch, objective, **options)
    shape, device = batch.targets.shape, batch.targets.device
    flat_logits, source = logits_source(logits, shape, device, inplace, shard, backend, strict)
    check_targets(batch.targets, batch.mask, flat_logits.shape[-1] if shard is None else shard.vocab, logits=True)
    row_transform = as_transform(transform).for_rows(shape, batch.mask, batch.cu_seqlens, device)
    rows = objective.token_rows(batch, normalizer, skip_inactive)
    # A gradient in fp16 is stored only after the loss scale, which arrives with the backward, is in it. Rows of a shard are
    # visited twice anyway, with the exchange in between.
    late = shard is not None or (flat_logits.dtype == torch.float16 and torch.is_grad_enabled())
    return _loss(batch, objective, rows, source, (flat_logits,), row_transform, one_visit=objective.one_pass and not late)


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    reference: tuple[Tensor, ...] | None = None,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    skip_inactive: bool = False,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> LossOutput:
    """`grpo_loss` from hidden states and the head's weight: the logits never exist. For a model of transformers,
    `loss_from_model` finds all of this by itself.

        h = model.model(input_ids=ids).last_hidden_state
        batch = TokenBatch(ids[:, 1:], advantages, mask=mask, old_logps=old)
        out = linear_grpo_loss(h[:, :-1], model.lm_head.weight, batch, objective, transform=LogitTransform.of(model))
        out.loss.backward()

    hidden       [B, T, H] or [N, H], fp32, bf16 or fp16, any strides; row i predicts batch.targets[i].
    weight       [V, H], may be frozen (then neither its gradient nor a buffer for it exists) or tied; fp32, bf16 or fp16.
                 Products run in the autocast dtype if autocast is on, else in the dtype of hidden; in fp32, which is more
                 than asked for, where the device has no 16-bit products with fp32 results.
    bias         [V] or None, added to the logits before the transform.
    transform    softcap and scale that the model applies after its head, and the temperature: see `LogitTransform.of`.
    reference    (hidden, weight) or (hidden, weight, bias) of the frozen reference, in place of batch.ref_logps: its
                 log-probs come from a forward product of its own, and no gradient flows to it.
    shard        weight, bias and those of `reference` are this rank's part of a vocabulary cut over a group: see
                 `distributed.VocabShard`. One all-gather per chunk of rows, and one all-reduce of the gradient of hidden.
    The rest is as in `grpo_loss`.

    Some rows at a time are projected, turned into their gradient and multiplied back: three matrix products for rows that
    get a gradient, where a head that recomputes its logits has four. Masked rows take part in none. Rows that cannot
    contribute (zero advantage or weight, and neither KL nor entropy bonus) take part in the first only, for out.logps and
    the metrics, and with skip_inactive=True in none. Sequence levels need all log-probs of a sequence before any slope:
    they project active rows twice, four products. Logits are fp32, never rounded to 16 bits; the gradient of the weight
    is summed in fp32. Peak memory beyond the inputs: the gradients, and one chunk of logits whatever the batch.

    On a GPU, make the batch before the model's forward: its row counts are then on the host when they are needed here.
    As in `grpo_loss` the gradients are handed over once. Raises ValueError naming the argument that is wrong.
    """
    _check_specs(batch, objective)
    if leaves_the_graph(shard=shard, context_group=batch.context_group):
        options: dict[str, Any] = {"bias": bias, "reference": reference, "transform": transform, "normalizer": normalizer}
        options |= {"skip_inactive": skip_inactive, "shard": shard, "backend": backend, "strict": strict}
        return outside(linear_grpo_loss, hidden, weight, batch, objective, **options)
    shape, device = batch.targets.shape, batch.targets.device
    head = check_head(hidden, weight, bias, shape, device, shard)
    check_targets(batch.targets, batch.mask, head.vocab)
    row_transform = as_transform(transform).for_rows(shape, batch.mask, batch.cu_seqlens, device)

    def source_of(a_head: Head, rows: TokenRows) -> Source:
        index, active = (None, None) if is_traced() else split_rows(batch, rows, objective)
        return hidden_source(a_head, rows.read, backend, strict, index, active)

    if reference is not None:
        ref_head = _reference_head(reference, batch, objective, shard)
        # Which rows are read does not depend on the reference's log-probs.
        rows = objective.token_rows(batch.with_ref_logps(torch.zeros(shape, device=device)), normalizer, skip_inactive)
        with torch.no_grad():
            source = source_of(ref_head, rows)
            ref_logps, _ = vocabulary_stage(source, (), (), rows.targets, rows.read, row_transform, *ref_head.tensors)
        batch = batch.with_ref_logps(ref_logps.view(shape))
    rows = objective.token_rows(batch, normalizer, skip_inactive)
    source = source_of(head, rows)
    return _loss(batch, objective, rows, source, head.tensors, row_transform, one_visit=objective.one_pass)


def objective_loss(
    logps: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    entropy: Tensor | None = None,
    token_weights: Tensor | None = None,
    normalizer: float | Tensor | Denominators | None = None,
) -> LossOutput:
    """The loss of `objective` over log-probs that were computed elsewhere: the token stage alone.

        logps, entropy = token_logprobs(logits, batch.targets, mask=batch.mask, entropy=True)
        objective_loss(logps, batch, objective, entropy=entropy).loss.backward()

    logps          float, the shape of batch.targets, whose ids are not read; gradients flow to it and to entropy.
    entropy        likewise, in nats; needed for an entropy bonus and by filters of entropy. None: out.entropy is NaN.
    token_weights  float [B] or the shape of targets: multiplies all terms of a token, the KL's too. For denominators that
                   no `aggregate` has; unlike a mask it takes nothing out of them.

    Value and gradient are those of `grpo_loss`. Raises ValueError naming the argument that is wrong."""
    _check_specs(batch, objective)
    for name, x in (("logps", logps), ("entropy", entropy)):
        if x is not None and (x.shape != batch.targets.shape or not x.is_floating_point()):
            raise ValueError(
                f"{name} is {x.dtype} {list(x.shape)}: pass floats of targets' shape, {list(batch.targets.shape)}."
            )
    if entropy is None and (objective.needs_entropy or any(f.filters_entropy for f in objective.filters)):
        raise ValueError("entropy is None, but the objective has an entropy bonus or a filter of entropy: pass it.")
    rows = objective.token_rows(batch, normalizer)
    if token_weights is not None:
        rows = rows.weighted(per_token("token_weights", token_weights, batch.targets.shape, batch.cu_seqlens))

    def flat_rows(x: Tensor) -> Tensor:
        x = x.reshape(-1).to(torch.float32)
        return x if rows.trained is None else torch.where(rows.trained, x, 0.0)

    return _loss_of_logps(flat_rows(logps), None if entropy is None else flat_rows(entropy), batch, objective, rows)


def split_rows(batch: TokenBatch, rows: TokenRows, objective: Objective) -> tuple[Tensor, int]:
    """(indices of the rows that are read, those that can have a gradient first, each kind in order; how many of them can),
    without waiting for the device."""
    marked = batch.marked(objective.active_rows) if rows.active is None else rows.active
    if rows.read is None and marked is None:
        return torch.arange(rows.targets.numel(), device=rows.targets.device), rows.targets.numel()
    rank = torch.full_like(rows.targets, 2)
    for value, mask in ((1, rows.read), (0, marked)):
        rank = torch.full_like(rank, value) if mask is None else torch.where(mask, value, rank)
    order = torch.argsort(rank, stable=True)
    active = batch.count(objective.active_rows, marked)
    read = active if rows.read is marked else batch.count("trained", rows.read)
    return order[:read], active


def _reference_head(
    reference: tuple[Tensor, ...], batch: TokenBatch, objective: Objective, shard: VocabShard | None
) -> Head:  # fmt: skip
    require(objective.beta != 0, "reference", type(reference).__name__, "with beta=0 nothing looks at it: leave it out.")
    if batch.ref_logps is not None:
        raise ValueError("reference and batch.ref_logps are both given: pass one of them.")
    if not isinstance(reference, tuple) or len(reference) not in (2, 3):
        raise ValueError(f"reference is {type(reference).__name__}: pass (hidden, weight) or (hidden, weight, bias).")
    bias = reference[2] if len(reference) == 3 else None
    head = check_head(reference[0], reference[1], bias, batch.targets.shape, batch.targets.device, shard)
    check_targets(batch.targets, batch.mask, head.vocab)
    return head


def _check_specs(batch: TokenBatch, objective: Objective) -> None:
    if not isinstance(batch, TokenBatch):
        raise ValueError(f"batch is a {type(batch).__name__}: pass a TokenBatch.")
    if not isinstance(objective, Objective):
        raise ValueError(f"objective is a {type(objective).__name__}: pass an Objective, for example Objective.preset('grpo').")


def total(losses: Tensor) -> Tensor:
    """Their sum in fp64, rounded to fp32: so the result does not depend on how torch splits the sum among threads."""
    return losses.sum(dtype=torch.float64).to(torch.float32)


HANDED_OVER = (
    "the gradient of this loss was already handed over by an earlier backward. It exists once, to save memory: compute the "
    "loss again, or use token_logprobs (linear_logprobs) with your own loss, for a second backward."
)


def _loss(
    batch: TokenBatch, objective: Objective, rows: TokenRows, source: Source, tensors: tuple[Tensor | None, ...],
    transform: RowTransform, one_visit: bool,
) -> LossOutput:  # fmt: skip
    """The loss of a source's rows: in one visit with the gradient made in the forward, or as statistics, token stage, pull."""
    if one_visit and not is_traced():
        assert isinstance(source, (Logits, Hidden))
        visit = OneVisit(source, rows, objective, transform)
        loss, logps, entropy = _GradientInForward.apply(visit, *tensors)
        shape = batch.targets.shape
        return LossOutput(loss, logps.view(shape), entropy.view(shape), objective, batch, rows)
    with_gradient = ("entropy",) if objective.needs_entropy else ()
    logps, also = vocabulary_stage(source, ("entropy",), with_gradient, rows.targets, rows.read, transform, *tensors)
    return _loss_of_logps(logps, also["entropy"], batch, objective, rows)


def _loss_of_logps(
    logps: Tensor, entropy: Tensor | None, batch: TokenBatch, objective: Objective, rows: TokenRows
) -> LossOutput:  # fmt: skip
    """The loss of flat log-probs and entropy [n]: the token stage alone."""
    L, H = logps.detach(), None if entropy is None else entropy.detach()
    x = None if objective.one_pass else objective.log_ratio(L, rows, batch)
    losses, d_logps, d_entropy = objective.token_stage(L, H, rows, batch, x)
    loss = _TokenStage.apply(logps, entropy, losses, d_logps, d_entropy)
    H = torch.full_like(L, math.nan) if H is None else H
    shape = batch.targets.shape
    return LossOutput(loss, L.view(shape), H.view(shape), objective, batch, rows, x)


@with_signature
class _TokenStage(torch.autograd.Function):
    """The sum of per-token losses, differentiable in log-probs and entropy: their slopes were computed beside the losses."""

    @staticmethod
    def forward(logps: Tensor, entropy: Tensor | None, losses: Tensor, d_logps: Tensor, d_entropy: Tensor | None) -> Tensor:
        return total(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        return *gradient_once(_times, d_loss, *ctx.saved_tensors), None, None, None


def _times(d_loss: Tensor, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if slope is None else slope * d_loss for slope in slopes)


@dataclass(eq=False)
class OneVisit:
    """What a one-visit loss needs beside its tensors. Inside forward, grad mode is off: `gradients` records that of
    the caller."""

    source: Logits | Hidden
    rows: TokenRows
    objective: Objective
    transform: RowTransform
    gradients: bool = field(default_factory=torch.is_grad_enabled)


class _GradientInForward(torch.autograd.Function):
    """Loss, log-probs and entropy of a source's rows. The gradient is computed in the forward; the backward only scales it."""

    @staticmethod
    def forward(ctx: Any, visit: OneVisit, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        wanted = tuple(visit.gradients and needed for needed in ctx.needs_input_grad[1:])
        result, ctx.gradients = visit.source.fused(tensors, wanted, visit.rows, visit.objective, visit.transform)
        ctx.versions = [None if g is None else g._version for g in ctx.gradients]
        ctx.dtypes, ctx.backend = [None if x is None else x.dtype for x in tensors], visit.source.backend
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(result.logps, result.entropy)
        return total(result.losses), result.logps, result.entropy

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_loss is None:
            return (None,) * (1 + len(ctx.dtypes))
        return None, *gradient_once(_hand_over, ctx, d_loss)


def _hand_over(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.gradients is None:
        raise RuntimeError(HANDED_OVER)
    gradients, ctx.gradients = ctx.gradients, None
    for gradient, version in zip(gradients, ctx.versions, strict=True):
        if gradient is None:
            continue
        if gradient._version != version:  # in place, that of the logits
            raise RuntimeError(
                "the logits' memory holds the gradient of grpo_loss(inplace=True), and was written to before the backward. "
                "Call backward first, or pass inplace=False."
            )
        ctx.backend.scale_(gradient, d_loss)
    return tuple(None if g is None else converted(g, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))
