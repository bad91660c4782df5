"""Layer 2: the loss with its gradient computed in the forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import backends, library
from .backends import Backend, FusedRows, RowTransform
from .batch import TokenBatch
from .checks import require
from .distributed import VocabShard, check_shard, on_shard
from .layout import check_targets, logit_rows, per_token
from .linear import Engine, Gradients, Head, check_head, split_rows
from .objective import Denominators, Objective
from .ops import bounded_exp
from .token_stage import TokenRows, kl_of_rows
from .transform import LogitTransform, as_transform

Tensor = torch.Tensor

__all__ = ["LossOutput", "grpo_loss", "linear_grpo_loss", "objective_loss"]


@dataclass(eq=False)
class LossOutput:
    """What a fused loss returns.

    loss      0-d fp32, differentiable: the sum of all weighted per-token terms.
    logps     fp32, the shape of targets, detached; 0 where masked.
    entropy   likewise, in nats.
    metrics   computed on first use, see below.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    _objective: Objective = field(repr=False)
    _batch: TokenBatch = field(repr=False)
    _rows: TokenRows | Callable[[], TokenRows] = field(repr=False)
    _log_ratio: Tensor | None = field(default=None, repr=False)  # fp32 [n] at the objective's level, where a loss made it
    _metrics: dict[str, Tensor] | None = field(default=None, repr=False)

    @property
    def rows(self) -> TokenRows:
        """The batch's flat rows as the loss weighed them, for statistics of one's own."""
        if callable(self._rows):
            self._rows = self._rows()
        return self._rows

    @property
    def metrics(self) -> dict[str, Tensor]:
        """0-d fp32 tensors on the device of the data (reading one waits for it, making them does not), computed on first use,
        from the batch's tensors as they are then. Means are over the trained tokens of this batch; with skip_inactive=True,
        over those that were read.

        tokens           trained tokens
        ratio_mean, ratio_min, ratio_max     of the ratio at the objective's level (1 when on-policy), bounded at e^60
        clip_low         share of tokens with A < 0 and a ratio below the lower bound
        clip_high        share of tokens with A > 0 and a ratio above the upper bound
        ess              effective sample size of ratio * weights, as a share: (sum r)^2 / (tokens * sum r^2)
        zero_advantage   share of all trained tokens whose advantage is exactly 0
        entropy          mean entropy in nats
        kl               mean of the KL estimator, weighted as it is in the loss (only with beta != 0)
        kept             share of tokens that all filters of this process keep (only with filters)
        """
        if self._metrics is None:
            self._metrics = self._measured()
        return self._metrics

    def _measured(self) -> dict[str, Tensor]:
        rows, logps = self.rows, self.logps.reshape(-1)
        everywhere = torch.ones_like(logps, dtype=torch.bool)
        trained = everywhere if rows.trained is None else rows.trained
        read = everywhere if rows.read is None else rows.read
        count = read.sum().to(torch.float32)
        tokens = count.clamp(min=1.0)

        def mean(x: Tensor) -> Tensor:
            return torch.where(read, x, 0.0).sum() / tokens

        def extreme(x: Tensor, reduce: Any, start: float) -> Tensor:
            if x.numel() == 0:
                return x.new_ones(())
            return torch.where(count > 0, reduce(torch.where(read, x, start)), 1.0)

        x = self._objective.log_ratio(logps, rows, self._batch) if self._log_ratio is None else self._log_ratio
        ratio = bounded_exp(x)
        low, high = self._objective.surrogate.ratio_bounds
        weight = ratio if rows.weights is None or self._objective.surrogate.absorbs_weights else ratio * rows.weights
        weight = torch.where(read, weight, 0.0).to(torch.float64)  # the square of a runaway ratio is beyond fp32
        metrics = {
            "tokens": trained.sum().to(torch.float32),
            "ratio_mean": mean(ratio),
            "ratio_min": extreme(ratio, torch.amin, math.inf),
            "ratio_max": extreme(ratio, torch.amax, -math.inf),
            "clip_low": mean(((ratio < low) & (rows.advantages < 0)).to(torch.float32)),
            "clip_high": mean(((ratio > high) & (rows.advantages > 0)).to(torch.float32)),
            "ess": (weight.sum().square() / (tokens * weight.square().sum()).clamp(min=1e-30)).to(torch.float32),
            "zero_advantage": (trained & (rows.advantages == 0)).sum() / trained.sum().clamp(min=1),
            "entropy": mean(self.entropy.reshape(-1)),
        }
        if rows.ref_logps is not None:
            metrics["kl"] = mean(kl_of_rows(self._objective, logps, rows, x)[0])
        if self._objective.filters:
            kept = read
            for f in self._objective.filters:
                over_ranks = self._batch.context_group is not None and not f.one_pass
                if over_ranks or getattr(f, "process_group", None) is not None:
                    continue  # to look at metrics must not be a collective
                kept = kept & f.keep(logps, self.entropy.reshape(-1), rows, self._batch)
            metrics["kept"] = kept.sum() / tokens
        return metrics


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
                 where something else still needs their values; reading them afterwards gives the gradient, and nothing can
                 notice that. For the output of a model: a leaf that requires grad is refused.
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
    if library.is_traced():
        return library.grpo_loss(logits, batch, objective, transform, normalizer, skip_inactive, shard, backend, strict)
    shape, device = batch.targets.shape, batch.targets.device
    check_shard(shard)
    own = logits if shard is None else shard.local("logits", logits, -1)
    flat_logits = logit_rows(own, shape, device, inplace, shard is None)
    check_targets(batch.targets, batch.mask, flat_logits.shape[-1] if shard is None else shard.vocab)
    row_transform = as_transform(transform).for_rows(shape, batch.mask, batch.cu_seqlens, device)
    rows = objective.token_rows(batch, normalizer, skip_inactive)
    module = on_shard(backends.pick(backend, device, strict), shard)
    call = LossCall(batch, objective, rows, row_transform, module, inplace)
    loss, logps, entropy = _GrpoLoss.apply(flat_logits, call)
    return LossOutput(loss, logps.view(shape), entropy.view(shape), objective, batch, rows, call.log_ratio)


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
    if library.is_traced():
        return library.linear_grpo_loss(
            hidden, weight, bias, batch, objective, reference, transform, normalizer, skip_inactive, shard, backend, strict
        )
    shape, device = batch.targets.shape, batch.targets.device
    head = check_head(hidden, weight, bias, shape, device, shard)
    check_targets(batch.targets, batch.mask, head.vocab)
    row_transform = as_transform(transform).for_rows(shape, batch.mask, batch.cu_seqlens, device)
    module = on_shard(backends.pick(backend, device, strict), shard)
    if reference is not None:
        require(objective.beta != 0, "reference", type(reference).__name__, "with beta=0 nothing looks at it: leave it out.")
        batch = batch.with_ref_logps(_reference_logps(reference, batch, objective, row_transform, module, shard))
    rows = objective.token_rows(batch, normalizer, skip_inactive)
    call = LossCall(batch, objective, rows, row_transform, module)
    loss, logps, entropy = _LinearGrpoLoss.apply(head.hidden, head.weight, head.bias, head, call)
    return LossOutput(loss, logps.view(shape), entropy.view(shape), objective, batch, rows, call.log_ratio)


def objective_loss(
    logps: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    entropy: Tensor | None = None,
    token_weights: Tensor | None = None,
    normalizer: float | Tensor | Denominators | None = None,
) -> LossOutput:
    """The loss of `objective` over log-probs that are there already: the token stage alone, for who makes them elsewhere.

        logps, entropy = token_logprobs(logits, batch.targets, mask=batch.mask, entropy=True)
        objective_loss(logps, batch, objective, entropy=entropy).loss.backward()

    logps          float, the shape of batch.targets, whose ids nobody reads; gradients flow to it and to entropy.
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

    L, H = flat_rows(logps), None if entropy is None else flat_rows(entropy)
    x = None if objective.one_pass else objective.log_ratio(L.detach(), rows, batch)
    loss = _ObjectiveLoss.apply(L, H, rows, batch, objective, x)
    L, H = L.detach(), torch.full_like(L, math.nan) if H is None else H.detach()
    return LossOutput(loss, L.view(logps.shape), H.view(logps.shape), objective, batch, rows, x)


@torch.no_grad()
def _reference_logps(
    reference: tuple[Tensor, ...],
    batch: TokenBatch,
    objective: Objective,
    transform: RowTransform,
    backend: Backend,
    shard: VocabShard | None,
) -> Tensor:
    if batch.ref_logps is not None:
        raise ValueError("reference and batch.ref_logps are both given: pass one of them.")
    if not isinstance(reference, tuple) or len(reference) not in (2, 3):
        raise ValueError(f"reference is {type(reference).__name__}: pass (hidden, weight) or (hidden, weight, bias).")
    shape, device = batch.targets.shape, batch.targets.device
    head = check_head(reference[0], reference[1], reference[2] if len(reference) == 3 else None, shape, device, shard)
    check_targets(batch.targets, batch.mask, head.vocab)
    rows = objective.token_rows(
        batch.with_ref_logps(torch.zeros(shape, device=device, dtype=torch.float32)), 1.0
    )  # weights play no part
    with torch.autocast(device.type, enabled=False):
        stats = Engine(head, backend).forward(torch.cat(split_rows(batch, rows, objective)), rows.targets, transform, False)
    return stats.logps.view(shape)


def _check_specs(batch: TokenBatch, objective: Objective) -> None:
    if not isinstance(batch, TokenBatch):
        raise ValueError(f"batch is a {type(batch).__name__}: pass a TokenBatch.")
    if not isinstance(objective, Objective):
        raise ValueError(f"objective is a {type(objective).__name__}: pass an Objective, for example Objective.preset('grpo').")


@dataclass(eq=False)
class LossCall:
    """The arguments of one call, as one object through autograd."""

    batch: TokenBatch
    objective: Objective
    rows: TokenRows
    transform: RowTransform
    backend: Backend
    inplace: bool = False
    # Inside the Function gradients are always off, and what an input needs is said as if they were on.
    gradients: bool = field(default_factory=torch.is_grad_enabled)
    log_ratio: Tensor | None = None

    def token_stage(self, logps: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """That of the objective, whose log-ratios are kept: of sequences they cost a sum, maybe over ranks."""
        if not self.objective.one_pass:
            self.log_ratio = self.objective.log_ratio(logps, self.rows, self.batch)
        return self.objective.token_stage(logps, entropy, self.rows, self.batch, self.log_ratio)


def total(losses: Tensor) -> Tensor:
    """Their sum in fp64, as fp32: how torch cuts a sum up, by thread count say, is then below its rounding."""
    return losses.sum(dtype=torch.float64).to(torch.float32)


HANDED_OVER = (
    "the gradient of this loss was already handed over by an earlier backward. It exists once, to save memory: compute the "
    "loss again, or use token_logprobs (linear_logprobs) with your own loss, for a second backward."
)


def loss_from_logits(call: LossCall, logits: Tensor, out: Tensor | None) -> FusedRows:
    """Losses of the rows of logits [A, T, V], their gradient written into `out` if that is there."""
    if call.objective.one_pass:
        return call.backend.fused_loss(logits, call.rows, call.objective, call.transform, out)
    stats = call.backend.row_stats(logits, call.rows.targets, call.rows.read, call.transform, True)
    logps, H = stats.logps, stats.entropy
    losses, d_logps, d_entropy = call.token_stage(logps, H)
    if out is not None:
        call.backend.row_grads(logits, call.rows.targets, stats, H, d_logps, d_entropy, call.transform, out)
    return FusedRows(logps, H, losses)


def loss_from_hidden(call: LossCall, head: Head, wanted: tuple[bool, bool, bool]) -> tuple[FusedRows, Gradients | None]:
    """Losses of the rows of a head, and the gradients of (hidden, weight, bias) that are wanted."""
    rows, objective, transform = call.rows, call.objective, call.transform
    engine, any_wanted, device = Engine(head, call.backend, wanted), any(wanted), head.hidden.device
    with torch.autocast(device.type, enabled=False):
        active, passive = split_rows(call.batch, rows, objective)
        if objective.one_pass:
            n = rows.targets.numel()
            result = FusedRows(*(torch.zeros(n, device=device, dtype=torch.float32) for _ in FusedRows._fields))
            engine.fused(active, rows, objective, transform, result, any_wanted)
            engine.fused(passive, rows, objective, transform, result, False)
        else:
            stats = engine.forward(torch.cat([active, passive]), rows.targets, transform, True)
            logps, H = stats.logps, stats.entropy
            losses, d_logps, d_entropy = call.token_stage(logps, H)
            result = FusedRows(logps, H, losses)
            if any_wanted:
                engine.backward(active, rows.targets, stats, H, d_logps, d_entropy, transform)
        return result, engine.gradients() if any_wanted else None


class _GrpoLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: LossCall) -> tuple[Tensor, Tensor, Tensor]:
        wanted = call.gradients and ctx.needs_input_grad[0]
        # A gradient in fp16 is stored only after the loss scale is in it.
        deferred = wanted and logits.dtype == torch.float16
        out = None
        if wanted and not deferred:
            out = logits.detach() if call.inplace else torch.empty_like(logits)
        if deferred:
            stats = call.backend.row_stats(logits, call.rows.targets, call.rows.read, call.transform, True)
            logps, H = stats.logps, stats.entropy
            losses, d_logps, d_entropy = call.token_stage(logps, H)
            fused = FusedRows(logps, H, losses)
            ctx.save_for_backward(logits)
            ctx.slopes = (stats, H, d_logps, d_entropy)
        else:
            fused = loss_from_logits(call, logits, out)
        if out is not None and call.inplace:
            torch.autograd.graph.increment_version(logits)
        ctx.call, ctx.gradient, ctx.deferred = call, out, deferred
        ctx.version = None if out is None else out._version  # in place, that of the logits
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(fused.logps, fused.entropy)
        return total(fused.losses), fused.logps, fused.entropy

    @staticmethod
    @library.first_derivative_only
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, None]:
        if d_loss is None:
            return None, None
        call: LossCall = ctx.call
        if ctx.deferred:
            (logits,) = ctx.saved_tensors
            stats, H, d_logps, d_entropy = ctx.slopes
            out = logits.detach() if call.inplace else torch.empty_like(logits)
            call.backend.row_grads(
                logits, call.rows.targets, stats, H,
                d_logps * d_loss, None if d_entropy is None else d_entropy * d_loss, call.transform, out,
            )  # fmt: skip
            if call.inplace:
                torch.autograd.graph.increment_version(logits)
            return out, None
        if ctx.gradient is None:
            raise RuntimeError(HANDED_OVER)
        gradient, ctx.gradient = ctx.gradient, None
        if gradient._version != ctx.version:
            raise RuntimeError(
                "the logits' memory holds the gradient of grpo_loss(inplace=True), and was written to before the backward. "
                "Call backward first, or pass inplace=False."
            )
        call.backend.scale_(gradient, d_loss)
        return gradient, None


class _LinearGrpoLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, call: LossCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        needed = ctx.needs_input_grad[:3] if call.gradients else (False, False, False)
        result, ctx.gradients = loss_from_hidden(call, head, needed)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(result.logps, result.entropy)
        ctx.dtypes, ctx.backend = [None if x is None else x.dtype for x in (hidden, weight, bias)], call.backend
        return total(result.losses), result.logps, result.entropy

    @staticmethod
    @library.first_derivative_only
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_loss is None:
            return (None,) * 5
        if ctx.gradients is None:
            raise RuntimeError(HANDED_OVER)
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                ctx.backend.scale_(gradient, d_loss)
        return *(None if g is None else g.to(t) for g, t in zip(gradients, ctx.dtypes, strict=True)), None, None


class _ObjectiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logps: Tensor,
        entropy: Tensor | None,
        rows: TokenRows,
        batch: TokenBatch,
        objective: Objective,
        log_ratio: Tensor | None,
    ) -> Tensor:
        losses, d_logps, d_entropy = objective.token_stage(logps, entropy, rows, batch, log_ratio)
        ctx.save_for_backward(d_logps, d_entropy)
        return total(losses)

    @staticmethod
    @library.first_derivative_only
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if slope is None else slope * d_loss for slope in ctx.saved_tensors), *(None,) * 4
