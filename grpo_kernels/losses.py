"""Layer 2: the loss with its gradient computed in the forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .batch import TokenBatch
from .checks import require
from .formulas.token_stage import TokenRows
from .layout import check_targets, per_token, values_are_checked
from .loss_output import LossOutput
from .loss_stages import Call, loss_of_logps, loss_of_source, with_divergence
from .missing import check_kept, rows_with_sets
from .objective import Denominators, Objective
from .options import (
    DEFAULTS,
    NO_PRODUCT,
    NOT_BOUNDED,
    Options,
    checked_logits,
    draws,
    hidden_source,
    is_traced,
    leaves_the_graph,
    logits_source,
    merged,
    outside,
    refuse_sparse,
)
from .projection import Head
from .reference import (
    Policy,
    check_given,
    linear_teacher,
    logits_teacher,
    reference_head,
    scaled_by_temperature,
    second,
)
from .row_counts import split_rows
from .token_sets import TokenSets
from .transform import IDENTITY, LogitTransform, as_transform
from .vocabulary.backends import is_strict
from .vocabulary.hidden import FlatHead, check_head
from .vocabulary.kept import KeptRows
from .vocabulary.shard import VocabShard
from .vocabulary.sources import Source
from .vocabulary.stage import vocabulary_stage
from .vocabulary.teachers import Several

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
    ref_logits: Tensor | tuple[Tensor, LogitTransform] | TokenSets | list[Any] | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
    options: Options | None = None,
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
    ref_logits   for kl=Exact(...): logits of the reference or teacher, the shape of logits and any of the three dtypes, under
                 the same transform; (logits, LogitTransform) under one of their own; or `TokenSets` whose values are the
                 log-probs of a teacher that is known at these ids only (the logits are then read twice); or a list of pairs (one of
                 these, weight): the weighted sum of the divergences. No gradient flows to them.
    shard        logits are [.., V / ranks], this rank's part of a vocabulary cut over a group: see `distributed.VocabShard`.
                 The rows are then visited twice, with one all-gather in between.
    backend      "auto", "eager", "cpu" or "triton"; see `backends.pick`. strict=True makes a fallback an error.
    options      `Options`: the three before, and what kept sets (`TokenBatch.kept`) leave open.

    Over kept sets only the logits of their ids are read, and the gradient of all others is 0.

    Objectives of one pass (`Objective.one_pass`: token level) read each logit from memory once and write its gradient once;
    the others read twice.
    fp16 logits keep their values and form the gradient in the backward, where the loss scale is known: it would
    underflow here. On-policy (ratio 1, advantages that sum to 0) a loss near 0 is normal: its gradient is not.

    out.loss.backward() hands the stored gradient on, multiplied by the upstream scalar; no pass over it when that is 1
    and no host sync. The gradient is handed over once: a second backward raises RuntimeError (fp16: with
    retain_graph=True it works). Raises ValueError naming the argument that is wrong, before any work.
    """
    check_specs(batch, objective, "ref_logits", ref_logits)
    options = merged(options, backend=backend, strict=strict, skip_inactive=skip_inactive)
    refuse_sparse(options, NO_PRODUCT)
    sets = batch.kept if ref_logits is None else ref_logits
    if is_traced() and leaves_the_graph(sets, None, shard=shard, context_group=batch.context_group):
        given: dict[str, Any] = {"transform": transform, "normalizer": normalizer, "inplace": inplace, "shard": shard}
        return outside(grpo_loss, logits, batch, objective, ref_logits=ref_logits, options=options, **given)
    batch = batch if batch.kept is None else _with_options(batch, options)
    shape, device = batch.targets.shape, batch.targets.device
    read = {"batch": batch, "transform": transform, "normalizer": normalizer}
    flat_logits = checked_logits(logits, shape, device, inplace, shard, read, ref_logits)
    vocab = flat_logits.shape[-1] if shard is None else shard.vocab
    check_targets(batch.targets, batch.mask, vocab, logits=True)
    row_transform = IDENTITY
    if transform is not None:
        row_transform = as_transform(transform).for_rows(shape, batch.mask, batch.cu_seqlens, device)
    rows = _token_rows(batch, objective, normalizer, options)
    kept = _kept_rows(batch, rows, vocab, options)
    if inplace and kept is not None and options.over_vocabulary is not None:
        raise ValueError(f"inplace=True, but {options} needs the logits for two gradients: pass inplace=False.")
    teacher = None
    if objective.exact is not None:
        policy = Policy.of(batch, transform, vocab, flat_logits.shape[-1], shard)
        teacher = logits_teacher(ref_logits, objective.exact, policy)
        rows = scaled_by_temperature(rows, objective.exact, row_transform)

    def source_of(rows: TokenRows, teacher: Any, kept: KeptRows | None, some: bool = False) -> Source:
        return logits_source(device, inplace, shard, options, kept, *(() if teacher is None else second(teacher)))

    # A gradient in fp16 is stored only after the loss scale, which arrives with the backward, is in it. Rows of a shard are
    # visited twice anyway, with the exchange in between.
    late = shard is not None or (flat_logits.dtype == torch.float16 and torch.is_grad_enabled())
    call = Call(batch, objective, rows, kept, options, row_transform, objective.one_pass and not late, teacher)
    if inplace and isinstance(teacher, Several) and not call.at_once():
        raise ValueError(
            "inplace=True, but beside several teachers the logits are needed again for each (an objective of one pass over fp32 or bf16 "
            "logits, without sets, needs them once): pass inplace=False."
        )
    return loss_of_source(call, source_of, (flat_logits,))


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor | Head,
    batch: TokenBatch,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    reference: tuple[Any, ...] | TokenSets | list[Any] | None = None,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | Denominators | None = None,
    skip_inactive: bool = False,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
    weight_grad: Tensor | None = None,
    options: Options | None = None,
) -> LossOutput:
    """`grpo_loss` from hidden states and the head's weight: the logits never exist. For a model of transformers,
    `loss_from_model` finds all of this by itself.

        h = model.model(input_ids=ids).last_hidden_state
        batch = TokenBatch(ids[:, 1:], advantages, mask=mask, old_logps=old)
        out = linear_grpo_loss(h[:, :-1], model.lm_head.weight, batch, objective, transform=LogitTransform.of(model))
        out.loss.backward()

    hidden       [B, T, H] or [N, H], fp32, bf16 or fp16, any strides; row i predicts batch.targets[i].
    weight       [V, H], or a `Head` with all that belongs to it. It may be frozen (then neither its gradient nor a buffer for
                 it exists) or tied; fp32, bf16 or fp16. Products run in the autocast dtype if autocast is on, else in the dtype
                 of hidden; in fp32, which is more than asked for, where the device has no 16-bit products with fp32 results.
    bias         [V] or None, added to the logits before the transform.
    transform    softcap and scale that the model applies after its head, and the temperature: see `LogitTransform.of`.
    reference    (hidden, weight) or (hidden, weight, bias) of the frozen reference, in place of batch.ref_logps: its
                 log-probs come from a forward product of its own, and no gradient flows to it. (hidden, Head(...)) has a transform
                 of its own, else the policy's holds for both. Its hidden size and dtype may be others. With kl=Exact(...) it is the
                 second stream of the divergence, a fourth product (weight the policy's own tensor: hidden states of both in one
                 product), of which no more than a chunk of logits exists; or `TokenSets` whose values are the log-probs of a
                 teacher that is known at these ids only: no product for the teacher, but the policy's logits are computed
                 again. A list of pairs (one of these, weight) is the weighted sum of the divergences: a number >= 0, or a
                 tensor [B] or the shape of targets. With an objective of two passes, `TokenSets` among the teachers, kept sets or
                 a shard they are taken one by one, and on a GPU the host waits for the number of rows of each.
    shard        weight, bias and those of `reference` are this rank's part of a vocabulary cut over a group: see
                 `distributed.VocabShard`. One all-gather per chunk of rows, and one all-reduce of the gradient of hidden.
    weight_grad  [V, H], fp32 or the weight's dtype: the backward, whatever it is asked for, adds the gradient of weight into
                 it, and autograd gives weight none. For gradients that are summed over micro-batches in memory of one's own.
                 With kept sets only the rows of their ids are touched. `weight.main_grad` of a weight with Megatron's
                 `grad_added_to_main_grad`: that is set to True, and autograd gets the placeholder that Megatron's hooks drop.
                 Other hooks do not see weight_grad: FSDP2 and ZeRO-3, which gather the weight, are refused, and DDP reduces
                 zeros for it. docs/kept_sets.md has the remedies.
    The rest is as in `grpo_loss`.

    Some rows at a time are projected, turned into their gradient and multiplied back: three matrix products for rows that
    get a gradient, where a head that recomputes its logits has four. Masked rows take part in none. Rows that cannot
    contribute (zero advantage or weight, and neither KL nor entropy bonus) take part in the first only, for out.logps and
    the metrics, and with skip_inactive=True in none. Sequence levels need all log-probs of a sequence before any slope:
    they project active rows twice, four products. Logits are fp32, never rounded to 16 bits; the gradient of the weight
    is summed in fp32. Peak memory beyond the inputs: the gradients, and whatever the batch one chunk of logits. On a GPU in bf16,
    where one product takes the gradients of many chunks, that and those gradients are 1.2 GiB beside an fp32 sum of the weight's;
    more of them only where that sum is not needed, and then no more than it would take.

    Over kept sets (`TokenBatch.kept`) there is no product with the whole weight: a row costs a dot product for each id of its set,
    and as much again for each gradient. A row whose set is one id costs nothing.

    On a GPU, make the batch before the model's forward: its row counts are then on the host when they are needed here. (That is a
    new batch for each call where `options` say what the batch leaves open: write missing= into the batch.) A CUDA graph keeps the
    counts that it was captured with: see `TokenBatch`.
    As in `grpo_loss` the gradients are handed over once. Raises ValueError naming the argument that is wrong.
    """
    check_specs(batch, objective, "reference", reference)
    if isinstance(weight, Head):
        beside = {"bias": bias, "transform": transform, "shard": shard, "weight_grad": weight_grad}
        weight, bias, transform, shard, weight_grad = weight.parts(**beside)
    options = merged(options, backend=backend, strict=strict, skip_inactive=skip_inactive)
    exact = objective.exact
    if exact is not None:
        refuse_sparse(options, NOT_BOUNDED)
    if is_traced() and leaves_the_graph(exact or batch.kept, weight_grad, shard=shard, context_group=batch.context_group):
        given: dict[str, Any] = {"bias": bias, "reference": reference, "transform": transform, "normalizer": normalizer}
        given |= {"shard": shard, "weight_grad": weight_grad}
        return outside(linear_grpo_loss, hidden, weight, batch, objective, options=options, **given)
    batch = batch if batch.kept is None else _with_options(batch, options)
    shape, device = batch.targets.shape, batch.targets.device
    read = {"batch": batch, "reference": reference, "transform": transform, "normalizer": normalizer}
    head = check_head(hidden, weight, bias, shape, device, shard, weight_grad, read)
    check_targets(batch.targets, batch.mask, head.vocab)
    row_transform = IDENTITY
    if transform is not None:
        row_transform = as_transform(transform).for_rows(shape, batch.mask, batch.cu_seqlens, device)

    def source_of(rows: TokenRows, teacher: Any, kept: KeptRows | None, some: bool = False, of: FlatHead = head) -> Source:
        index = None if some or is_traced() else split_rows(batch, rows, objective, kept)
        streams = () if teacher is None else second(teacher)
        return hidden_source(of, rows.read, options, index, kept, *streams)

    teacher = ref_head = None
    if exact is not None:
        teacher = linear_teacher(reference, exact, Policy.of(batch, transform, head.vocab, head.weight.shape[0], shard))
    elif reference is not None:
        policy = Policy.of(batch, transform, head.vocab, head.weight.shape[0], shard)
        ref_head, ref_transform = reference_head(reference, policy)
        batch = batch.with_ref_logps(torch.zeros(shape, device=device))  # which rows are read does not depend on them
    rows = _token_rows(batch, objective, normalizer, options)
    kept = _kept_rows(batch, rows, head.vocab, options)
    if ref_head is not None:
        with torch.no_grad():
            source = source_of(rows, None, kept if options.reference_over == "kept" else None, of=ref_head)
            ref_logps, _ = vocabulary_stage(source, (), (), rows.targets, rows.read, ref_transform, *ref_head.tensors)
        batch = batch.with_ref_logps(ref_logps.view(shape))
        rows = _token_rows(batch, objective, normalizer, options)
    if exact is not None:
        rows = scaled_by_temperature(rows, exact, row_transform)
    one_visit = objective.one_pass and draws(options, head) is None
    call = Call(batch, objective, rows, kept, options, row_transform, one_visit, teacher)
    return loss_of_source(call, source_of, head.tensors)


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
    for name, x in (("logps", logps), ("entropy", entropy), ("divergence", divergence)):
        if x is not None and (x.shape != batch.targets.shape or not x.is_floating_point()):
            raise ValueError(
                f"{name} is {x.dtype} {list(x.shape)}: pass floats of targets' shape, {list(batch.targets.shape)}."
            )
    if entropy is None and (objective.needs_entropy or any(f.filters_entropy for f in objective.filters)):
        raise ValueError("entropy is None, but the objective has an entropy bonus or a filter of entropy: pass it.")
    exact = objective.exact is not None
    if exact != (divergence is not None):
        remedy = "pass the divergence of each token." if exact else "leave it out, or pass kl=Exact(...) with a beta."
        raise ValueError(
            f"divergence is {'None' if exact else 'given'}, but kl={objective.kl!r}, beta={objective.beta}: {remedy}"
        )
    rows = _token_rows(batch, objective, normalizer)
    if token_weights is not None:
        rows = rows.weighted(per_token("token_weights", token_weights, batch.targets.shape, batch.cu_seqlens))

    def flat_rows(x: Tensor) -> Tensor:
        x = x.reshape(-1).to(torch.float32)
        return x if rows.trained is None else torch.where(rows.trained, x, 0.0)

    out = loss_of_logps(flat_rows(logps), None if entropy is None else flat_rows(entropy), batch, objective, rows)
    return with_divergence(out, None if divergence is None else flat_rows(divergence))


def _with_options(batch: TokenBatch, options: Options) -> TokenBatch:
    """The batch with what the options say of targets outside of their sets."""
    if options.missing in (None, batch.missing):
        return batch
    require(batch.missing is None, "missing", options.missing, f"the batch says missing={batch.missing!r}: leave it out here.")
    return replace(batch, missing=options.missing)


def _kept_rows(batch: TokenBatch, rows: TokenRows, vocab: int, options: Options) -> KeptRows | None:
    """The rows with sets, checked; None without kept sets."""
    if batch.kept is None:
        return None
    check_kept(batch.kept, batch.targets, batch.mask, vocab, batch.missing, options.strict)
    return rows_with_sets(batch.kept, rows.targets, rows.read, batch.missing)


def _token_rows(
    batch: TokenBatch, objective: Objective, normalizer: float | Tensor | Denominators | None, options: Options = DEFAULTS
) -> TokenRows:
    """`Objective.token_rows`. Raises ValueError in strict mode for a NaN in a row that is read, where values are checked; elsewhere
    the device stops the program. A graph knows of the call's own `strict` alone."""
    rows = objective.token_rows(batch, normalizer, options.skip_inactive)
    strict = options.strict if torch.compiler.is_compiling() else is_strict(options.strict)
    if not strict:
        return rows
    for name in ("advantages", "old_logps", "ref_logps", "weights", "nll_weight"):
        value = getattr(rows, name)
        if value is None:
            continue
        field = "nll_weights" if name == "nll_weight" else name
        bad = value.isnan() if rows.read is None else value.isnan() & rows.read
        if not values_are_checked(value):
            torch._assert_async(~bad.any(), f"{field} is NaN at a trained token, which strict mode refuses")
        elif bad.any():
            at = bad.view(batch.targets.shape).nonzero().tolist()
            first = ", ".join(map(str, at[:5])) + ", ..." * (len(at) > 5)
            trained = bad.numel() if rows.trained is None else int(rows.trained.sum())
            raise ValueError(
                f"{field} is NaN at {len(at)} of {trained} trained tokens, {first}: the loss would be NaN, which strict mode refuses. Mask "
                "these tokens, or find out where the NaN comes from."
            )
    return rows


def check_specs(batch: Any, objective: Any, second_stream: str = "", given: Any = None) -> None:
    """Raise ValueError unless batch and objective are what they are called, and the second stream goes with them."""
    if isinstance(batch, Objective) and isinstance(objective, TokenBatch):
        raise ValueError(
            "batch is an Objective and objective a TokenBatch: they changed places, pass them as batch, objective."
        )
    if not isinstance(batch, TokenBatch):
        raise ValueError(f"batch is a {type(batch).__name__}: pass a TokenBatch.")
    if not isinstance(objective, Objective):
        raise ValueError(f"objective is a {type(objective).__name__}: pass an Objective, for example Objective.preset('grpo').")
    if second_stream and (given is not None or objective.exact is not None):
        check_given(second_stream, given, objective, batch)
