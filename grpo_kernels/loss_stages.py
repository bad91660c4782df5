"""A loss from a source of rows: in one visit with the gradient made in the forward, or as statistics, token stage, pull."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from .batch import TokenBatch
from .checks import require
from .formulas.surrogates import NoPolicyTerm
from .formulas.token_stage import TokenRows
from .loss_output import LossOutput
from .objective import Objective
from .options import Options, is_traced
from .reference import Teachers, TopK, divergence_of, knows_ids_only
from .supports import statistics_of
from .vocabulary.kept import KeptRows
from .vocabulary.memory import converted
from .vocabulary.rows import RowTransform
from .vocabulary.sources import Hidden, Logits, Source
from .vocabulary.stage import NO_SECOND, applied, gradient_once, with_sums
from .vocabulary.teachers import Several

Tensor = torch.Tensor


def total(losses: Tensor) -> Tensor:
    """The sum of the losses in fp64, rounded to fp32, so that it does not depend on how torch splits it among threads."""
    return losses.sum(dtype=torch.float64).to(torch.float32)


HANDED_OVER = (
    "the gradient of this loss was already handed over by an earlier backward. It exists once, to save memory: compute the "
    "loss again, or use token_logprobs (linear_logprobs) with your own loss, for a second backward."
)


class Call(NamedTuple):
    """The arguments of a loss besides its source."""

    batch: TokenBatch
    objective: Objective
    rows: TokenRows
    kept: KeptRows | None
    options: Options
    transform: RowTransform
    one_visit: bool
    teacher: Teachers | None = None  # of an exact divergence

    def at_once(self) -> bool:
        """Whether the gradient is made in the forward, in one visit of each row. No property: torch 2.9 does not trace those of
        a NamedTuple."""
        over = self.kept is not None and self.options.over_vocabulary is not None
        apart = isinstance(self.teacher, Several) and (self.kept is not None or self.teacher.cut)
        return self.one_visit and not (
            over or apart or is_traced() or (self.teacher is not None and knows_ids_only(self.teacher))
        )


class SourceOf(Protocol):
    """Makes the source of these rows beside this teacher, with these sets. `some`: of fewer rows than the batch has."""

    def __call__(self, rows: TokenRows, teacher: Any, kept: KeptRows | None, some: bool = False) -> Source: ...


def loss_of_source(call: Call, source_of: SourceOf, tensors: tuple[Tensor | None, ...]) -> LossOutput:
    """The loss of a source's rows: in one visit with the gradient made in the forward, or as statistics, token stage, pull."""
    batch, objective, rows, kept, options, transform, _, teacher = call
    over = options.over_vocabulary if kept is not None else None
    kl = objective.kl_spec
    if over is not None and objective.beta != 0 and options.reference_over == "vocabulary":
        refused = kl.weighting != "none" or kl.reads_old_logps
        remedy = "pass a Kl without a weighting, of an estimator of logp and ref_logp alone, or reference_over='kept'."
        remedy = f"{kl} weighs the KL by a ratio or reads old_logp, and both are over the sets: {remedy}"
        require(not refused, "reference_over", options.reference_over, remedy)
    if kept is not None and knows_ids_only(teacher):
        remedy = 'a teacher known at some ids has no distribution over a kept set: pass Options(reference_over="vocabulary").'
        require(options.reference_over == "vocabulary", "reference_over", options.reference_over, remedy)
    shape = batch.targets.shape
    if call.at_once():
        several = teacher if isinstance(teacher, Several) else None
        source = source_of(rows, None if several else teacher, kept)
        assert isinstance(source, (Logits, Hidden))
        visit = OneVisit(source, rows, objective, transform, several)
        loss, logps, entropy, divergence = _GradientInForward.apply(visit, *tensors)
        divergence = None if teacher is None else divergence.view(shape)
        return LossOutput(loss, logps.view(shape), entropy.view(shape), objective, batch, rows, divergence=divergence)
    if isinstance(teacher, Several):
        return _beside_several(call, teacher, source_of, tensors)
    top_k, exact = teacher if isinstance(teacher, TopK) else None, objective.exact
    whole: tuple[str, ...] = () if teacher is None else ("divergence",)
    if top_k is not None and exact is not None:
        whole = top_k.statistics(exact)
    with_gradient = (*(("entropy",) if objective.needs_entropy else ()), *whole)
    if over is not None and options.reference_over == "vocabulary":
        over = (*over, *whole, "at")
    names, of_kept = ("entropy", *whole), functools.partial(source_of, rows, teacher)
    statistics = statistics_of(of_kept, kept, names, with_gradient, over, rows.targets, rows.read, transform, tensors)
    entropy, divergence = statistics.named["entropy"], statistics.named.get("divergence")
    if top_k is not None and exact is not None:
        divergence = top_k.divergence(exact, statistics.named, rows.read)
    kl_apart = over is not None and options.reference_over == "vocabulary" and rows.kl_weight is not None
    own = replace(rows, ref_logps=None, kl_weight=None) if kl_apart else rows
    out = with_divergence(loss_of_logps(statistics.logps, entropy, batch, objective, own), divergence)
    if statistics.whole_logps is None:
        return out
    out = replace(out, rows=rows, whole_logps=statistics.whole_logps.detach().view(shape), kl_apart=kl_apart)
    return (
        replace(out, loss=out.loss + _kl_over_vocabulary(statistics.whole_logps, batch, objective, rows)) if kl_apart else out
    )


def _beside_several(
    call: Call, several: Several, source_of: SourceOf, tensors: tuple[Tensor | None, ...]
) -> LossOutput:  # fmt: skip
    """The loss where the divergences of several teachers are computed apart from the rest, and one after the other."""
    rows, exact = call.rows, call.objective.exact
    assert exact is not None
    kept = call.kept if call.options.reference_over == "kept" else None

    def of_some(teacher: Any, read: Tensor | None) -> Source:
        return source_of(replace(rows, read=read), teacher, kept, some=True)

    tensors = with_sums(tensors)
    out = loss_of_source(call._replace(teacher=None), source_of, tensors)
    return with_divergence(out, divergence_of(of_some, several, exact, rows.targets, rows.read, call.transform, tensors))


def _kl_over_vocabulary(logps: Tensor, batch: TokenBatch, objective: Objective, rows: TokenRows) -> Tensor:
    """The KL term alone, of log-probs over the whole vocabulary."""
    alone = Objective(NoPolicyTerm(), beta=objective.beta, kl=objective.kl)
    nothing = torch.zeros_like(rows.policy_weight)
    rows = TokenRows(
        rows.targets, rows.read, nothing, nothing, ref_logps=rows.ref_logps, kl_weight=rows.kl_weight, trained=rows.trained
    )
    return loss_of_logps(logps, None, batch, alone, rows).loss


def with_divergence(out: LossOutput, divergence: Tensor | None) -> LossOutput:
    """The loss with the exact divergence [n] of its rows, weighted; None: there is none."""
    if divergence is None:
        return out
    weight = out.rows.divergence_weight
    assert weight is not None
    terms = torch.where(weight == 0, 0.0, weight * divergence)
    return replace(out, loss=out.loss + total(terms), divergence=divergence.detach().view(out.logps.shape))


def loss_of_logps(
    logps: Tensor, entropy: Tensor | None, batch: TokenBatch, objective: Objective, rows: TokenRows
) -> LossOutput:
    """The loss of flat log-probs and entropy [n]: the token stage alone."""
    L, H = logps.detach(), None if entropy is None else entropy.detach()
    x = None if objective.one_pass else objective.log_ratio(L, rows, batch)
    losses, d_logps, d_entropy = objective.token_stage(L, H, rows, batch, x)
    loss = applied(_TokenStage, logps, entropy, losses, d_logps, d_entropy)
    H = torch.full_like(L, math.nan) if H is None else H
    shape = batch.targets.shape
    return LossOutput(loss, L.view(shape), H.view(shape), objective, batch, rows, x)


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
    several: Several | None = None  # teachers, in place of the one of the source
    gradients: bool = field(default_factory=torch.is_grad_enabled)


class _GradientInForward(torch.autograd.Function):
    """Loss, log-probs and entropy of a source's rows. The gradient is computed in the forward; the backward only scales it."""

    @staticmethod
    def forward(ctx: Any, visit: OneVisit, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = tuple(visit.gradients and needed for needed in ctx.needs_input_grad[1:])
        of_rows = (visit.rows, visit.objective, visit.transform, visit.several)
        result, ctx.gradients = visit.source.fused(tensors, wanted, *of_rows)
        ctx.versions = [g._version if isinstance(g, Tensor) else None for g in ctx.gradients]
        ctx.dtypes, ctx.backend = [None if x is None else x.dtype for x in tensors], visit.source.backend
        ctx.set_materialize_grads(False)
        found = (result.logps, result.entropy, result.divergence)
        ctx.mark_non_differentiable(*(x for x in found if x is not None))
        return total(result.losses), *found

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_loss is None:
            return (None,) * (1 + len(ctx.dtypes))
        if torch.is_grad_enabled():  # torch.func does not get here
            raise RuntimeError(f"{NO_SECOND} Call backward without create_graph=True.")
        return None, *_hand_over(ctx, d_loss)


def _hand_over(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.gradients is None:
        raise RuntimeError(HANDED_OVER)
    gradients, ctx.gradients = list(ctx.gradients), None
    for i, (gradient, version) in enumerate(zip(gradients, ctx.versions, strict=True)):
        if gradient is None:
            continue
        if not isinstance(gradient, Tensor):  # a LateGradient
            gradients[i] = gradient.made(d_loss)
            continue
        if gradient._version != version:  # in place, that of the logits
            raise RuntimeError(
                "the logits' memory holds the gradient of grpo_loss(inplace=True), and was written to before the backward. "
                "Call backward first, or pass inplace=False."
            )
        ctx.backend.scale_(gradient, d_loss)
    return tuple(
        g if g is None or g.dtype == dtype else converted(g, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)
    )
