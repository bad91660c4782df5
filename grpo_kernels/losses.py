"""Layer 2: the loss with its gradient computed in the forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from .batch import WHOLE, TokenBatch, sends_ahead
from .checks import (
    FLOATING,
    check_targets,
    describe,
    leading_shape,
    near_name,
    nearest,
    per_token,
    require,
    require_shape,
    require_tensor,
    values_are_checked,
)
from .formulas.ops import bounded_exp, times
from .formulas.token_stage import JointStage, ListedTerms, Terms, TokenRows, TokenStage
from .objective import Denominators, Objective
from .rows.backends import is_strict
from .rows.hidden import Hidden
from .rows.ragged import KeptRows, Tokens, slots_of
from .rows.run import OneVisit, applied, fused_loss, gradient_once, total
from .rows.stream import Logits, Seconds, Visit
from .set_alignment import warn_of_misaligned_sets
from .statistics import Asked, kept_rows, over_sets, statistics_of, tokens_of
from .streams import (
    DEFAULTS,
    NOT_BOUNDED,
    Head,
    LogitTransform,
    Options,
    Policy,
    as_options,
    draws,
    is_traced,
    leaves_the_graph,
    name_of_second,
    outside,
    refuse_keywords,
    refuse_sparse,
    second_stream,
    seconds_of,
    squared,
    stream_of,
)
from .token_sets import TokenSets, check_ids

__all__ = ["LossOutput", "grpo_loss", "linear_grpo_loss", "objective_loss"]


# ---- what a loss returns


class Metrics(dict[str, Tensor]):
    """A dictionary whose KeyError names what it has."""

    def __missing__(self, name: str) -> Tensor:
        if name in ABSENT_UNLESS:
            raise KeyError(f"there is no metric {name!r}: it needs {ABSENT_UNLESS[name]}. This loss has {', '.join(self)}.")
        raise KeyError(f"there is no metric {name!r}.{metric_meant_by(name, self)} This loss has {', '.join(self)}.")


#: Metrics that only some losses have, and what they need.
ABSENT_UNLESS = {
    "kl": "an objective with beta != 0",
    "outside_set": "a batch with candidate sets (kept=)",
    "kept_mass": "candidate sets, and Options(entropy_over=) or Options(reference_over=) over the vocabulary",
    "kept": "an objective with filters",
}
#: All metrics; see `LossOutput.metrics`.
METRICS = (
    "tokens", "ratio_mean", "ratio_min", "ratio_max", "clip_low", "clip_high", "ess", "zero_advantage", "entropy", *ABSENT_UNLESS
)  # fmt: skip


def metric_meant_by(name: str, known: Iterable[str], form: str = "{}") -> str:
    """Return " Did you mean ...?" for a name that is near one or several of the known metrics, else "". `form` is how a metric is
    written."""
    near = near_name(name, known)
    names = [near] if near else []
    if "clip" in name.lower():  # clip_frac, pg_clipfrac: the share of both sides together
        names = ["clip_low", "clip_high"]
    elif name == "ratio":
        names = ["ratio_mean", "ratio_min", "ratio_max"]
    return f" Did you mean {' and '.join(form.format(x) for x in names)}?" if names else ""


@dataclass(eq=False, repr=False)
class LossOutput:
    """What a fused loss returns.

    loss      0-d fp32, differentiable: the sum of all weighted per-token terms.
    logps     fp32, the shape of targets, detached; 0 where masked.
    entropy   likewise, in nats.
    rows      the batch's flat rows as the loss weighed them, for statistics of one's own.
    divergence   of an exact KL (`Exact`), fp32 in nats (a total variation: a probability), the shape of targets, detached; 0
                 where masked. Else None.
    whole_logps  with kept sets, log-probs over the whole vocabulary, where an option needs them; else None.
    kl_apart  whether the KL is that of whole_logps.
    metrics   computed on first use, see below.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    _objective: Objective = field(repr=False)
    _batch: TokenBatch = field(repr=False)
    rows: TokenRows = field(repr=False)
    _log_ratio: Tensor | None = field(default=None, repr=False)  # fp32 [n] at the objective's level, if the loss computed it
    divergence: Tensor | None = field(default=None, repr=False)
    whole_logps: Tensor | None = field(default=None, repr=False)
    kl_apart: bool = field(default=False, repr=False)
    __repr__ = describe

    def __getattr__(self, name: str) -> Any:
        known = [*(f.name for f in fields(self) if not f.name.startswith("_")), "metrics"]
        remedy = f" out.loss.{name} is that of the loss." if hasattr(Tensor, name) else nearest(name, known)
        if name in METRICS or not remedy:
            remedy = metric_meant_by(name, METRICS, 'out.metrics["{}"]')
        raise AttributeError(f"a LossOutput has no {name!r}.{remedy}")

    def __iter__(self) -> NoReturn:
        raise TypeError("a LossOutput is no tuple: take out.loss, out.metrics, out.logps and out.entropy.")

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """0-d fp32 tensors on the device of the data, computed on first use from the batch's tensors as they are then.
        Computing them is no host sync, reading one is. Means are over the trained tokens of this batch; with
        skip_inactive=True, over those that were read.

        tokens           trained tokens
        ratio_mean, ratio_min, ratio_max     of the ratio at the objective's level (1 when on-policy), bounded at e^60
        clip_low         share of tokens with A < 0 and a ratio below the lower bound
        clip_high        share of tokens with A > 0 and a ratio above the upper bound
        ess              effective sample size of ratio * weights, as a share: (sum r)^2 / (tokens * sum r^2)
        zero_advantage   share of all trained tokens whose advantage is exactly 0
        entropy          mean entropy in nats
        kl               mean of the KL estimator, weighted as it is in the loss, or of the exact divergence (only with beta != 0)
        outside_set      share of tokens that their kept set lacks (only with kept sets); above 5 % a later call warns once
        kept_mass        mean probability that rows with a set give to it (only where whole_logps is there)
        kept             share of tokens that all filters of this process keep (only with filters)
        """
        rows, logps = self.rows, self.logps.flatten()
        trained = rows.mask
        read = trained if rows.read is None else rows.read
        count = read.sum().float()
        tokens = count.clamp(min=1.0)

        def mean(x: Tensor) -> Tensor:
            return torch.where(read, x, 0.0).sum() / tokens

        def extreme(x: Tensor, reduce: Any, start: float) -> Tensor:
            if x.numel() == 0:
                return x.new_ones(())
            return torch.where(count > 0, reduce(torch.where(read, x, start)), 1.0)

        x = self._objective.log_ratio(logps, rows, self._batch) if self._log_ratio is None else self._log_ratio
        ratio = bounded_exp(x)
        low, high = self._objective.surrogate.clipped(ratio, rows.advantages)
        weight = ratio if rows.weights is None or self._objective.surrogate.absorbs_weights else ratio * rows.weights
        weight = torch.where(read, weight, 0.0).double()  # the square of a runaway ratio is beyond fp32
        metrics = Metrics(
            {
                "tokens": trained.sum().float(),
                "ratio_mean": mean(ratio),
                "ratio_min": extreme(ratio, torch.amin, math.inf),
                "ratio_max": extreme(ratio, torch.amax, -math.inf),
                "clip_low": mean(low.float()),
                "clip_high": mean(high.float()),
                "ess": (weight.sum().square() / (tokens * weight.square().sum()).clamp(min=1e-30)).float(),
                "zero_advantage": (trained & (rows.advantages == 0)).sum() / trained.sum().clamp(min=1).float(),
                "entropy": mean(self.entropy.flatten()),
            }
        )
        if rows.ref_logps is not None:
            of_kl = self.whole_logps.flatten() if self.kl_apart and self.whole_logps is not None else logps
            metrics["kl"] = mean(self._objective.kl_terms(of_kl, rows, x)[0])
        elif self.divergence is not None:
            metrics["kl"] = mean(self.divergence.flatten())
        sets = self._batch.kept
        if sets is not None:
            metrics["outside_set"] = self._batch.outside_set
            warn_of_misaligned_sets(metrics["outside_set"], metrics["tokens"])
            if self.whole_logps is not None:
                has = read & (sets.counts > 0)
                mass = torch.where(has, (self.whole_logps.flatten() - logps).exp(), 0.0).sum()
                metrics["kept_mass"] = torch.where(has.any(), mass / has.sum().clamp(min=1), 1.0)
        if self._objective.filters:
            kept = read
            for f in self._objective.filters:
                over_ranks = self._batch.context_group is not None and not f.one_pass
                if over_ranks or getattr(f, "process_group", None) is not None:
                    continue  # reading metrics must not start a collective
                kept = kept & f.keep(logps, self.entropy.flatten(), rows, self._batch)
            metrics["kept"] = kept.sum() / tokens
        return metrics


# ---- the loss


def grpo_loss(
    logits: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    inplace: bool = False,
    ref_logits: Tensor | tuple[Tensor, LogitTransform] | TokenSets | list[Any] | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> LossOutput:
    """The loss of `objective` over `batch`, from logits, with the gradient computed in the same visit of each row.

        out = grpo_loss(logits[:, :-1], TokenBatch(ids[:, 1:], advantages, mask=mask, old_logps=old), Objective.preset("dapo"))
        out.loss.backward()

    logits       [B, T, V] or [N, V], fp32, bf16 or fp16, any strides; row i predicts batch.targets[i], but with batch.rows.
    transform    temperature, softcap and scale; see `LogitTransform`.
    normalizer   the denominator over all micro-batches and ranks, a number or 0-d tensor; None: that of this batch
                 alone, `objective.normalizer(batch)`, at least 1.
    inplace      True: the gradient overwrites the logits, so that no second [.., V] tensor exists. Autograd raises where another
                 operation still needs their values; code that reads them afterwards gets the gradient, without an error. A
                 leaf that requires grad is refused.
    ref_logits   for kl=Exact(...): logits of the reference or teacher, like `logits`; (logits, LogitTransform); `TokenSets` with
                 the log-probs of a teacher that is known at these ids only; or a list of pairs (one of these, weight). No
                 gradient flows to them. See docs/divergences.md.
    options      backend, strict mode, a shard of the vocabulary, rows and sets: see `Options`.

    Objectives of one pass (`Objective.one_pass`) read each logit once and write its gradient once; the others read twice. fp16
    logits form the gradient in the backward, where the loss scale is known. The gradient of one pass is handed over once: a second
    backward raises RuntimeError. On-policy (ratio 1, advantages that sum to 0) a loss near 0 is normal: its gradient is not.
    Raises ValueError naming the argument that is wrong, before any work."""
    if unknown:
        refuse_keywords(grpo_loss, unknown)
    return _loss(logits, None, batch, objective, transform, ref_logits, normalizer, options, inplace)


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor | Head,
    batch: TokenBatch,
    objective: Objective,
    *,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    reference: tuple[Any, ...] | TokenSets | list[Any] | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> LossOutput:
    """`grpo_loss` from hidden states and the head's weight: the logits never exist. For a model of transformers,
    `loss_from_model` finds all of this by itself.

        h = model.model(input_ids=ids).last_hidden_state
        batch = TokenBatch(ids[:, 1:], advantages, mask=mask, old_logps=old)
        out = linear_grpo_loss(h[:, :-1], model.lm_head.weight, batch, objective, transform=LogitTransform.of(model))
        out.loss.backward()

    hidden       [B, T, H] or [N, H], fp32, bf16 or fp16, any strides; row i predicts batch.targets[i], but with batch.rows.
    weight       [V, H], or `Head(weight, bias, transform)`; frozen, tied or trained; fp32, bf16 or fp16. Products run in the
                 autocast dtype if autocast is on, else in the dtype of hidden.
    transform    softcap and scale that the model applies after its head, and the temperature: see `LogitTransform.of`.
    normalizer   as in `grpo_loss`.
    reference    (hidden, weight), (hidden, weight, bias) or (hidden, Head(...)) of the frozen reference, in place of
                 batch.ref_logps, under the policy's transform where its Head has none; its hidden size and dtype may be others.
                 With kl=Exact(...) also `TokenSets` with a teacher's log-probs, or a list of pairs (one of these, weight).
    options      backend, strict mode, a shard, memory for the gradient of weight, sparse gradients, sets: see `Options`.

    Three products for rows that get a gradient (two with a frozen head; four of a sequence that is longer than a block, at a
    sequence level), one for other trained rows, none for masked ones. Logits are fp32, a chunk of rows at a time; the gradient
    of the weight is summed in fp32. Over kept sets a row costs a dot product for each id of its set. docs/functions.md has costs
    and memory. The gradients are handed over once, as in `grpo_loss`.
    Raises ValueError naming the argument that is wrong."""
    if unknown:
        refuse_keywords(linear_grpo_loss, unknown)
    head, transform = Head.parts(weight, transform)
    return _loss(hidden, head, batch, objective, transform, reference, normalizer, options)


def _loss(
    x: Tensor, head: tuple[Any, Any] | None, batch: TokenBatch, objective: Objective, transform: LogitTransform | None, given: Any,
    normalizer: float | Tensor | Denominators | None, options: Options | None, inplace: bool = False,
) -> LossOutput:  # fmt: skip
    """The loss of logits or, with the (weight, bias) of a head, of hidden states x: checked here, before any work. `given`: the
    second stream."""
    options, name = as_options(options, head), name_of_second(head is None)
    check_specs(batch, objective, name, given)
    if objective.exact is not None:
        refuse_sparse(options, NOT_BOUNDED)
    if is_traced() and leaves_the_graph(options, batch.context_group, objective.exact, batch.kept, batch.listed, batch.rows):
        return outside(_loss, x, head, batch, objective, transform, given, normalizer, options, inplace)
    if batch.kept is not None and options.missing not in (None, batch.missing):
        remedy = f"the batch says missing={batch.missing!r}: leave it out here."
        require(batch.missing is None, "missing", options.missing, remedy)
        batch = batch.with_missing(options.missing)
    targets, mask, own_rows = batch.targets, batch.mask, batch.rows
    shape = targets.shape if own_rows is None else leading_shape(x, targets)
    policy = Policy(shape, targets.device, transform, mask, batch.cu_seqlens, options, own_rows is not None)
    read = {"batch": batch, "transform": transform, "normalizer": normalizer}
    stream = stream_of(x, head, policy, read, {name: given}, inplace)
    check_targets(targets, mask, stream.vocab, logits=head is None)
    out = _loss_of(stream, policy, batch, objective, given, normalizer)
    _refuse_infinite(out, options)
    return out


def _loss_of(
    stream: Logits | Hidden, policy: Policy, batch: TokenBatch, objective: Objective, given: Any,
    normalizer: float | Tensor | Denominators | None,
) -> LossOutput:  # fmt: skip
    """The loss of a stream's rows: in one visit with the gradient made in the forward, or as statistics, token stage, pull."""
    shape, exact, options, traced = batch.targets.shape, objective.exact, policy.options, is_traced()
    seconds, reference, kept, over, listed, at, tokens = Seconds(), None, None, None, None, None, None
    visited, marked = None, None
    if exact is not None:
        seconds = seconds_of(given, exact, policy, stream)
    elif given is not None:
        reference = second_stream("reference", given, policy, stream)
        batch = batch.with_ref_logps(torch.zeros(shape, device=policy.device))  # which rows are read does not depend on them
    rows = objective.token_rows(batch, normalizer, options.skip_inactive)
    _refuse_nan(rows, batch, options)
    if batch.kept is not None:
        kept = kept_rows(batch.kept, batch.targets, batch.mask, rows.read, stream.vocab, batch.missing, options)
        over = _over(objective, options, seconds)
    if batch.listed is not None:
        refuse_sparse(options, "the gradients of ids of logp_terms and prob_terms would be among the columns drawn once more")
        check_ids("prob_terms" if batch.logp_terms is None else "logp_terms", batch.listed, stream.vocab)
        _refuse_values(batch, objective, rows, options)
        listed, at = objective.listed_terms(batch), slots_of(batch.listed)
    if batch.rows is not None:
        tokens = tokens_of(batch.rows, batch.mask, rows.targets, rows.read, stream, at)
    sparse = None if options.sparse is None else draws(options.sparse, stream)
    # The rows that are visited as a whole: those without a set, or all.
    if stream.computed and not traced:
        visited, marked = _split_rows(batch, rows, objective, kept if over is None else None, tokens)
    if reference is not None:
        of_sets = kept if options.reference_over == "kept" else None
        index = visited
        if visited is not None and over is not None and of_sets is not None:
            index, _ = _split_rows(batch, rows, objective, kept, tokens)
        with torch.no_grad():
            own = Asked(rows.targets, rows.read, kept=of_sets, rows=index, tokens=tokens)
            ref_logps = statistics_of(reference, own, options)["logps"]
        batch, rows = batch.with_ref_logps(ref_logps.view(shape)), replace(rows, ref_logps=ref_logps)
        _refuse_nan(rows, batch, options)
    if exact is not None and exact.temperature_squared:
        assert rows.divergence_weight is not None
        rows = replace(rows, divergence_weight=rows.divergence_weight / squared(stream.transform, rows.read))
    with_gradient = ("entropy",) if objective.needs_entropy else ()
    of_rows = (rows.targets, rows.read, ("entropy",), with_gradient)
    asked = Asked(*of_rows, kept, over, seconds, exact, at, visited, sparse, tokens)
    at_once = objective.one_pass and (kept is None or (tokens is None and listed is None))
    if not traced and _made_in_forward(stream, objective, asked, at_once):
        return _in_one_visit(stream, batch, objective, rows, listed, asked, marked, at_once)
    found = statistics_of(stream, asked, options)
    whole_logps = found.get("whole_logps")
    kl_apart = whole_logps is not None and options.reference_over == "vocabulary" and rows.kl_weight is not None
    weighed = replace(rows, ref_logps=None, kl_weight=None) if kl_apart else rows
    beside = None if listed is None else (listed, found["at"])
    out = _loss_of_logps(found["logps"], found["entropy"], batch, objective, weighed, beside, found.get("divergence"))
    if whole_logps is None:
        return out
    loss = out.loss + _kl_over_vocabulary(whole_logps, objective, rows) if kl_apart else out.loss
    return replace(out, loss=loss, rows=rows, whole_logps=whole_logps.detach().view(shape), kl_apart=kl_apart)


def _made_in_forward(stream: Logits | Hidden, objective: Objective, asked: Asked, at_once: bool) -> bool:
    """Whether the gradient is made in the forward. That of rows that wait for each other is a slope times a vector that does not
    depend on other rows, and products wait for slopes. With a frozen head none do, see `Visit.ahead`; over sets there are none."""
    (others, known), kept = asked.seconds, asked.kept
    if asked.over is not None or asked.sparse is not None or known:
        return False
    if kept is not None and others and (asked.tokens is not None or asked.at is not None):
        return False
    if isinstance(stream, Logits):
        # A gradient in fp16 is stored only after the loss scale, which arrives with the backward, is in it. Rows of a shard are
        # visited twice anyway, with the exchange in between.
        scaled = stream.logits.dtype == torch.float16 and torch.is_grad_enabled()
        return at_once and not scaled and stream.shard is None
    if at_once or others or objective.needs_entropy:
        return at_once
    waits = torch.is_grad_enabled() and stream.weight.requires_grad and not (kept is not None and kept.has_all)
    return waits and not (stream.bias is not None and stream.bias.requires_grad)


def _in_one_visit(
    stream: Logits | Hidden, batch: TokenBatch, objective: Objective, rows: TokenRows, listed: ListedTerms | None, asked: Asked,
    marked: Tensor | None, at_once: bool,
) -> LossOutput:  # fmt: skip
    """The loss of rows in one visit; `at_once`: of rows that wait for no other one."""
    targets, kept, at, of_rows = asked.targets, asked.kept, asked.at, asked.tokens
    others, (index, active), whole, of_sets = asked.seconds.others, asked.rows or (None, None), None, None
    if kept is None or not kept.has_all:
        read, of_any, slots = asked.read if kept is None else kept.others(asked.read), targets, None
        if asked.tokens is not None:
            of_rows = replace(asked.tokens, read=read)
            read = of_rows.named(None)
        elif at is not None:
            of_rows = Tokens.one_a_row(targets, read, at)
        if of_rows is not None:  # the likeliest of a row's ids stands in for them
            of_any, slots = targets.new_zeros(of_rows.n), None if at_once else of_rows.pairs.slots
        whole = Visit(of_any, read, (), others, index, active, slots, of_rows)
    if kept is not None:
        of_sets = over_sets(asked)
    log_ratio: Tensor | None = None

    def terms(logps: Tensor, entropy: Tensor, of_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        nonlocal log_ratio
        beside = None if listed is None or of_ids is None else (listed, of_ids)
        made, log_ratio, d_ids = _token_stage(logps, entropy, batch, objective, rows, beside)
        return made.losses, made.d_logps, d_ids

    stage: TokenStage | JointStage
    if at_once:
        stage = objective.stage(rows, listed)
    else:
        stage = JointStage(terms, _groups(batch, objective, active, asked.tokens, marked))
    visit = OneVisit(batch.targets.shape, stream, whole, of_sets, stage, torch.is_grad_enabled())
    loss, logps, entropy, *divergence = fused_loss(visit, stream.tensors)
    return LossOutput(loss, logps, entropy, objective, batch, rows, log_ratio, divergence[0] if divergence else None)


def _groups(
    batch: TokenBatch, objective: Objective, active: int | None, tokens: Tokens | None, marked: Tensor | None
) -> tuple[int, ...]:
    """The rows of `JointStage.groups`: each alone, sequences, or those that share rows, or all rows where slopes wait for more, or
    for other ranks."""
    assert active is not None
    if objective.one_pass:
        return (1,) * active
    if objective.by_sequence and batch.context_group is None and (tokens is None or batch.kept is None):
        if tokens is not None and batch.sequences is not None:
            sequences = batch.spread(torch.arange(batch.sequences, device=batch.targets.device))
            return tokens.groups(batch.marked(objective.active_rows), sequences, batch.sequences)
        return batch.counts(objective.active_rows + ("" if batch.kept is None else WHOLE), marked)
    return (active,)


def _over(objective: Objective, options: Options, seconds: Seconds) -> tuple[str, ...] | None:
    """The statistics that rows with sets have over the vocabulary; None: none. Raises ValueError for what sets do not go with."""
    kl, whole_reference = objective.kl_spec, options.reference_over == "vocabulary"
    if seconds.known:
        remedy = 'a teacher known at some ids has no distribution over a kept set: pass Options(reference_over="vocabulary").'
        require(whole_reference, "reference_over", options.reference_over, remedy)
    over = options.over_vocabulary
    if over is None or not whole_reference:
        return over
    if objective.beta != 0:
        remedy = (
            f"{kl} weighs the KL by a ratio or reads old_logp, and both are over the sets: pass a Kl without a weighting, of an estimator "
            "of logp and ref_logp alone, or reference_over='kept'."
        )
        fine = kl.weighting == "none" and not kl.reads_old_logps
        require(fine, "reference_over", options.reference_over, remedy)
    return (*over, "divergence")


def _kl_over_vocabulary(logps: Tensor, objective: Objective, rows: TokenRows) -> Tensor:
    """The KL term alone, of log-probs over the whole vocabulary."""
    value, _, _, slope = objective.kl_terms(logps.detach(), replace(rows, old_logps=None), torch.zeros_like(logps))
    weight = rows.kl_weight
    assert weight is not None
    return applied(_TokenStage, weight * value, logps, weight * slope)


def _loss_of_logps(
    logps: Tensor,
    entropy: Tensor | None,
    batch: TokenBatch,
    objective: Objective,
    rows: TokenRows,
    listed: tuple[ListedTerms, Tensor] | None = None,
    divergence: Tensor | None = None,
) -> LossOutput:
    """The loss of flat log-probs, entropy and exact divergence [n], and of the log-probs [k] of listed ids: the token stage."""
    L, H = logps.detach(), None if entropy is None else entropy.detach()
    made, x, d_at = _token_stage(L, H, batch, objective, rows, listed)
    at = None if listed is None else listed[1]
    loss = applied(_TokenStage, made.losses, logps, entropy, at, made.d_logps, made.d_entropy, d_at)
    H = torch.full_like(L, math.nan) if H is None else H
    shape = batch.targets.shape
    if divergence is not None:
        assert rows.divergence_weight is not None
        loss = loss + total(times(rows.divergence_weight, divergence))
        divergence = divergence.detach().view(shape)
    return LossOutput(loss, L.view(shape), H.view(shape), objective, batch, rows, x, divergence)


def _token_stage(
    logps: Tensor, entropy: Tensor | None, batch: TokenBatch, objective: Objective, rows: TokenRows,
    listed: tuple[ListedTerms, Tensor] | None,
) -> tuple[Terms, Tensor | None, Tensor | None]:  # fmt: skip
    """(the terms of flat rows, the log-ratio where slopes wait for other rows, d loss / d log-prob of listed ids)."""
    x = None if objective.one_pass else objective.log_ratio(logps, rows, batch)
    if listed is None:
        return objective.token_stage(logps, entropy, rows, batch, x), x, None
    terms, at = listed
    of_rows = terms.of(at.detach(), rows.advantages)
    made = objective.token_stage(logps, entropy, rows, batch, x, of_rows.term)
    return made, x, times(made.d_listed[terms.rows], of_rows.slopes_of_ids(at.detach(), terms.rows))


class _TokenStage(torch.autograd.Function):
    """The sum of per-token losses, differentiable in the values that come first (log-probs, entropy, log-probs of listed ids): as
    many slopes, which were computed beside the losses, follow."""

    @staticmethod
    def forward(losses: Tensor, *values_and_slopes: Tensor | None) -> Tensor:
        return total(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1 + len(inputs) // 2 :])

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        slopes = ctx.saved_tensors
        return None, *gradient_once(_times, d_loss, *slopes), *(None for _ in slopes)


def _times(d_loss: Tensor, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if slope is None else slope * d_loss for slope in slopes)


def _split_rows(
    batch: TokenBatch, rows: TokenRows, objective: Objective, kept: KeptRows | None, tokens: Tokens | None
) -> tuple[tuple[Tensor, int], Tensor | None]:
    """((indices of the rows that are read over the whole vocabulary, those that can have a gradient first, each kind in order;
    how many of them can), bool [n]: these), without waiting for the device. Only where several tokens share a row does the host
    wait."""
    device, kind = rows.targets.device, objective.active_rows
    same = rows.read is not rows.trained or kind == "trained"
    masks = [rows.read] if same else [batch.marked(kind), rows.read]  # the first of which ranks make together
    if kept is not None and kept.has_all:
        return (torch.empty(0, dtype=torch.int64, device=device), 0), None
    if kept is not None:
        masks = [kept.others(x) for x in masks]
    if tokens is not None:
        masks = [tokens.named(x) for x in masks]
    active, read = masks[0], masks[-1]
    if active is None:  # nor is a row left out of `read`
        n = rows.targets.numel()
        return (torch.arange(n, device=device), n), None
    # Nothing waits for it on a CPU, and few rows are sorted sooner this way.
    if tokens is not None or (device.type == "cpu" and not sends_ahead(device)):
        first = active.nonzero()[:, 0]
        if same:
            return (first, first.numel()), active
        others = ~active if read is None else read & ~active
        return (torch.cat([first, others.nonzero()[:, 0]]), first.numel()), active
    rank = active.view(torch.uint8) if same or read is None else read.view(torch.uint8) + active.view(torch.uint8)
    order = torch.argsort(rank, stable=True, descending=True)
    of_kind = "" if kept is None else WHOLE
    can_have = batch.count(kind + of_kind, active)
    return (order[: can_have if same else batch.count("trained" + of_kind, read)], can_have), active


def objective_loss(
    logps: Tensor,
    batch: TokenBatch,
    objective: Objective,
    *,
    entropy: Tensor | None = None,
    divergence: Tensor | None = None,
    token_weights: Tensor | None = None,
    normalizer: float | Tensor | Denominators | None = None,
) -> LossOutput:
    """The loss of `objective` over log-probs that were computed elsewhere: the token stage alone.

        logps, entropy = token_logprobs(logits, batch.targets, mask=batch.mask, entropy=True)
        objective_loss(logps, batch, objective, entropy=entropy).loss.backward()

    logps          float, the shape of batch.targets, whose ids are not read; gradients flow to it and to entropy.
    entropy        likewise, in nats; needed for an entropy bonus and by filters of entropy. None: out.entropy is NaN.
    divergence     likewise, of `token_divergence` or `linear_divergence`, needed with kl=Exact(...), whose weight it gets.
    token_weights  float [B] or the shape of targets: multiplies all terms of a token, the KL's too. For denominators that
                   no `aggregate` has; unlike a mask it takes nothing out of them.

    Value and gradient are those of `grpo_loss`. Raises ValueError naming the argument that is wrong."""
    check_specs(batch, objective)
    if batch.listed is not None:
        raise ValueError(
            "logp_terms and prob_terms need log-probs of their ids, which objective_loss does not have: leave them out, or use "
            "grpo_loss or linear_grpo_loss."
        )
    for name, x in (("logps", logps), ("entropy", entropy), ("divergence", divergence)):
        if x is not None:
            require_tensor(name, x, FLOATING, "floats of targets' shape")
            require_shape(name, x, batch.targets.shape, "targets")
    if entropy is None and (objective.needs_entropy or any(f.filters_entropy for f in objective.filters)):
        raise ValueError("entropy is None, but the objective has an entropy bonus or a filter of entropy: pass it.")
    exact = objective.exact is not None
    if exact != (divergence is not None):
        remedy = "pass the divergence of each token." if exact else "leave it out, or pass kl=Exact(...) with a beta."
        raise ValueError(
            f"divergence is {'None' if exact else 'given'}, but kl={objective.kl!r}, beta={objective.beta}: {remedy}"
        )
    rows = objective.token_rows(batch, normalizer)
    _refuse_nan(rows, batch, DEFAULTS)
    if token_weights is not None:
        rows = rows.weighted(per_token("token_weights", token_weights, batch.targets.shape, batch.cu_seqlens))

    def flat_rows(x: Tensor) -> Tensor:
        x = x.flatten().float()
        return x if rows.trained is None else torch.where(rows.trained, x, 0.0)

    L, H, D = (None if x is None else flat_rows(x) for x in (logps, entropy, divergence))
    assert L is not None
    out = _loss_of_logps(L, H, batch, objective, rows, divergence=D)
    _refuse_infinite(out, DEFAULTS)
    return out


def _refuse_nan(rows: TokenRows, batch: TokenBatch, options: Options) -> None:
    """Raise ValueError in strict mode for a NaN in a row that is read, where values are checked; elsewhere the device stops the
    program. A graph knows of the call's own `strict` alone."""
    if not _refuses_values(options):
        return
    for name in ("advantages", "old_logps", "ref_logps", "weights", "nll_weight"):
        value = getattr(rows, name)
        if value is None:
            continue
        field = "nll_weights" if name == "nll_weight" else name
        remedy = "the loss would be NaN, which strict mode refuses. Mask these tokens, or find out where the NaN comes from."
        _refuse_tokens(value.isnan(), f"{field} is NaN", remedy, rows, batch)


def _refuses_values(options: Options) -> bool:
    """Return whether a call is strict. A graph knows of the call's own `strict` alone."""
    return options.strict if torch.compiler.is_compiling() else is_strict(options.strict)


def _refuse_tokens(bad: Tensor, what: str, remedy: str, rows: TokenRows, batch: TokenBatch) -> None:
    """Raise ValueError where `bad`, bool [n], holds for a row that is read. Where values are not checked, stop the program on the
    device instead."""
    bad = bad if rows.read is None else bad & rows.read
    if not values_are_checked(bad):
        torch._assert_async(~bad.any(), f"{what} at a trained token, which strict mode refuses")
    elif bad.any():
        at = bad.view(batch.targets.shape).nonzero().tolist()
        first = ", ".join(map(str, at[:5])) + ", ..." * (len(at) > 5)
        trained = bad.numel() if rows.trained is None else int(rows.trained.sum())
        raise ValueError(f"{what} at {len(at)} of {trained} trained tokens, {first}: {remedy}")


def _refuse_infinite(out: LossOutput, options: Options) -> None:
    """Raise ValueError in strict mode for a log-prob of -inf, of the policy or the reference, that a KL compares."""
    if out.rows.kl_weight is None or out.rows.ref_logps is None or not _refuses_values(options):
        return
    whole = out.whole_logps if out.kl_apart else None
    logps = out.logps if whole is None else whole
    remedy = (
        "the KL would be made of a log-prob of -1e4 in its place, which strict mode refuses. Mask these tokens, or leave the KL out, "
        "beta=0."
    )
    for name, x in (("the log-prob of the target", logps), ("ref_logps", out.rows.ref_logps)):
        _refuse_tokens(x.flatten() == -math.inf, f"{name} is -inf", remedy, out.rows, out._batch)


def _refuse_values(batch: TokenBatch, objective: Objective, rows: TokenRows, options: Options) -> None:
    """Raise ValueError in strict mode for values of listed ids that make a term infinite: an infinite value, or, of `logp_terms`, a
    value other than 0 of an id that the row's kept set lacks. `Objective(listed=)` may give any value a meaning."""
    if not _refuses_values(options):
        return
    terms = {"logp_terms": None if objective.listed is not None else batch.logp_terms, "prob_terms": batch.prob_terms}
    for name, sets in terms.items():
        if sets is None or sets.values is None:
            continue
        row_of = sets.row_of

        def row_has(bad: Tensor, row_of: Tensor = row_of) -> Tensor:
            return torch.zeros(batch.tokens, dtype=torch.bool, device=bad.device).index_put((row_of,), bad, accumulate=True)

        remedy = (
            "the loss would be infinite or NaN, which strict mode refuses. Pass finite values, and 0 for an id without one."
        )
        _refuse_tokens(row_has(sets.values.isinf()), f"{name} has an infinite value", remedy, rows, batch)
        if name == "logp_terms" and batch.kept is not None:
            lacks = ~batch.kept.holds(row_of, sets.ids) & (sets.ids != rows.targets[row_of]) & ~batch.without_set[row_of]
            remedy = (
                "its log-prob is -inf there, and the loss would be infinite, which strict mode refuses. List ids of the set, or give "
                "the others the value 0."
            )
            bad = row_has(lacks & (sets.values != 0))
            _refuse_tokens(bad, "logp_terms lists an id that the kept set lacks", remedy, rows, batch)


def check_specs(batch: Any, objective: Any, name: str = "", given: Any = None) -> None:
    """Raise ValueError unless batch and objective are what they are called, and the second stream `given`, the argument `name`,
    goes with them."""
    if isinstance(batch, Objective) and isinstance(objective, TokenBatch):
        raise ValueError(
            "batch is an Objective and objective a TokenBatch: they changed places, pass them as batch, objective."
        )
    if not isinstance(batch, TokenBatch):
        raise ValueError(f"batch is a {type(batch).__name__}: pass a TokenBatch.")
    if not isinstance(objective, Objective):
        raise ValueError(f"objective is a {type(objective).__name__}: pass an Objective, for example Objective.preset('grpo').")
    if objective.exact is not None:
        if name and batch.ref_logps is not None:
            raise ValueError(
                f"ref_logps are log-probs of the sampled tokens, but kl={objective.kl} compares whole distributions: leave them out, and "
                f"pass {name}=."
            )
        return
    if given is None:
        return
    require(objective.beta != 0, name, type(given).__name__, "with beta=0 nothing looks at it: leave it out.")
    if name == "ref_logits" or isinstance(given, TokenSets):
        raise ValueError(
            f"{name} is a whole distribution, but kl={objective.kl!r} is an estimate from the sampled token: pass kl=Exact(...), or the "
            "reference's log-probs as ref_logps of the batch."
        )
    if batch.ref_logps is not None:
        raise ValueError("reference and batch.ref_logps are both given: pass one of them.")
