"""Layer 1: the exact divergence of each token's distribution to that of a reference or teacher, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .checks import require
from .formulas.divergence import Exact, as_exact
from .layout import flat, mask_of_rows
from .options import (
    NO_PRODUCT,
    NOT_BOUNDED,
    Options,
    checked_logits,
    hidden_source,
    is_traced,
    leaves_the_graph,
    logits_source,
    merged,
    outside,
    refuse_sparse,
)
from .projection import Head
from .reference import Policy, Teachers, divergence_of, knows_ids_only, linear_teacher, logits_teacher, second, squared
from .token_sets import TokenSets, check_sets
from .transform import LogitTransform, as_transform
from .vocabulary.hidden import check_head
from .vocabulary.kept import KeptRows
from .vocabulary.rows import RowTransform
from .vocabulary.shard import VocabShard
from .vocabulary.sources import Source
from .vocabulary.teachers import Several

Tensor = torch.Tensor

__all__ = ["linear_divergence", "token_divergence"]


def token_divergence(
    logits: Tensor,
    ref_logits: Tensor | tuple[Tensor, LogitTransform] | TokenSets | list[Any],
    divergence: str | Exact = "reverse",
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    inplace: bool = False,
    kept: TokenSets | None = None,
    shard: VocabShard | None = None,
    options: Options | None = None,
) -> Tensor:
    """The exact divergence of each row of logits to the reference's or teacher's, for trainers that keep a loss of their own.

        kl = token_divergence(logits[:, :-1], teacher_logits[:, :-1], Exact("jsd"), mask=mask)
        loss = kl.sum() / mask.sum()

    logits      [B, T, V] or [N, V], fp32, bf16 or fp16, any strides: the policy or student, which gets the gradient.
    ref_logits  the same shape, any of these dtypes: the reference or teacher, under the same transform; (logits,
                LogitTransform) under one of their own; or `TokenSets` whose values are the log-probs of a teacher that is known
                at these ids only; or a list of pairs (one of these, weight), a number or a tensor [B] or [B, T]: the weighted sum.
    divergence  "reverse" (KL(policy || reference)), "forward", "jsd", or an `Exact` with its options.
    mask        bool [B, T] or [N]: rows where it is False are not read and give exactly 0, in value and gradient.
    kept        `TokenSets`, a set for each row: both sides are renormalised over it, and only the logits of its ids are read. A row
                without ids runs over the whole vocabulary.
    inplace, shard, options   as in `token_logprobs`; the logits of both sides are cut over the group of a shard.

    Returns fp32, the leading shape of logits, in nats: at least 0, also for two nearly equal rows, whose KL of 1e-10 keeps its
    digits; infinite where the other side has no probability. Both rows are read twice in the forward and in the backward each
    (the jsd: three times in the forward). Raises ValueError naming the argument that is wrong."""
    exact, options = as_exact(divergence), merged(options)
    refuse_sparse(options, NO_PRODUCT)
    if is_traced() and leaves_the_graph(exact, None, shard=shard):
        given: dict[str, Any] = {"mask": mask, "transform": transform, "inplace": inplace, "kept": kept, "shard": shard}
        return outside(token_divergence, logits, ref_logits, exact, options=options, **given)
    shape, device = _leading("logits", logits)
    read = {"mask": mask, "transform": transform, "kept": kept}
    rows = checked_logits(logits, shape, device, inplace, shard, read, ref_logits)
    vocab, mask = rows.shape[-1] if shard is None else shard.vocab, mask_of_rows(mask, shape, device)
    policy = Policy(shape, device, vocab, rows.shape[-1], as_transform(transform), mask, None, shard)
    teacher = logits_teacher(ref_logits, exact, policy)
    sets, targets = _kept(kept, policy, teacher)
    if inplace and isinstance(teacher, Several):
        raise ValueError("inplace=True, but each of several teachers needs the logits again: pass inplace=False.")

    def source_of(teacher: Any, read: Tensor | None) -> Source:
        return logits_source(device, inplace, shard, options, sets, *second(teacher))

    return _values(source_of, (rows,), targets, policy, teacher, exact)


def linear_divergence(
    hidden: Tensor,
    weight: Tensor | Head,
    reference: tuple[Any, ...] | TokenSets | list[Any],
    divergence: str | Exact = "reverse",
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    kept: TokenSets | None = None,
    shard: VocabShard | None = None,
    weight_grad: Tensor | None = None,
    options: Options | None = None,
) -> Tensor:
    """`token_divergence` from hidden states: the logits of neither side ever exist beyond a chunk of rows.

        kl = linear_divergence(hidden, lm_head.weight, (teacher_hidden, teacher.lm_head.weight), "forward", mask=mask)

    hidden     [B, T, H] or [N, H], and weight [V, H] or a `Head`, as in `linear_logprobs`.
    reference  (hidden, weight), (hidden, weight, bias) or (hidden, Head(...)) of the reference or teacher, as in
               `linear_grpo_loss`, with a hidden size and dtype of its own; or `TokenSets` whose values are the log-probs of a
               teacher known at these ids only; or a list of pairs (one of these, weight): six products for each.
    mask, kept, divergence  as in `token_divergence`; bias, transform, shard, weight_grad, options as in `linear_logprobs`.

    Masked rows take part in no product. On a GPU, selecting rows by a mask is a host sync, and so is each of several teachers,
    which is read in the rows where it has a weight. The forward is a product for each side; the backward, which cannot know the
    upstream gradient before it arrives, computes the logits of both again: six products in all. `linear_grpo_loss` with
    Objective.preset("distillation") takes four. Raises ValueError naming the argument that is wrong."""
    exact = as_exact(divergence)
    if isinstance(weight, Head):
        beside = {"bias": bias, "transform": transform, "shard": shard, "weight_grad": weight_grad}
        weight, bias, transform, shard, weight_grad = weight.parts(**beside)
    options = merged(options)
    refuse_sparse(options, NOT_BOUNDED)
    if is_traced() and leaves_the_graph(exact, weight_grad, shard=shard):
        given: dict[str, Any] = {"bias": bias, "mask": mask, "transform": transform, "kept": kept, "shard": shard}
        given["weight_grad"] = weight_grad
        return outside(linear_divergence, hidden, weight, reference, exact, options=options, **given)
    shape, device = _leading("hidden", hidden)
    read = {"reference": reference, "mask": mask, "transform": transform, "kept": kept}
    head = check_head(hidden, weight, bias, shape, device, shard, weight_grad, read)
    mask = mask_of_rows(mask, shape, device)
    policy = Policy(shape, device, head.vocab, head.weight.shape[0], as_transform(transform), mask, None, shard)
    teacher = linear_teacher(reference, exact, policy)
    sets, targets = _kept(kept, policy, teacher)

    def source_of(teacher: Any, read: Tensor | None) -> Source:
        return hidden_source(head, read, options, None, sets, *second(teacher))

    return _values(source_of, head.tensors, targets, policy, teacher, exact)


def _leading(name: str, x: Any) -> tuple[torch.Size, torch.device]:
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"{name} is {got}: pass a tensor [B, T, ..] or [N, ..], one row for each token.")
    return x.shape[:-1], x.device


def _kept(kept: TokenSets | None, policy: Policy, teacher: Any) -> tuple[KeptRows | None, Tensor]:
    """(rows with sets, a target for each row: the first id of its set, so that no set gets a further one)."""
    targets = torch.zeros(policy.shape, dtype=torch.int64, device=policy.device)
    if kept is None:
        return None, targets.reshape(-1)
    check_sets("kept", kept, targets, policy.vocab)
    require(
        not knows_ids_only(teacher),
        "kept",
        kept,
        "a teacher known at some ids has no distribution over a kept set: leave one of them out.",
    )
    first = torch.cat([kept.ids, kept.ids.new_zeros(1)]).to(torch.int64)[kept.offsets[:-1].to(torch.int64)]
    targets = torch.where(kept.counts > 0, first, 0)
    return KeptRows.of(kept, targets, None if policy.mask is None else flat(policy.mask)), targets


def _values(
    source_of: Callable[[Any, Tensor | None], Source], tensors: tuple[Tensor | None, ...], targets: Tensor, policy: Policy,
    teacher: Teachers, exact: Exact,
) -> Tensor:  # fmt: skip
    read = None if policy.mask is None else flat(policy.mask)
    transform: RowTransform = policy.transform.for_rows(policy.shape, policy.mask, None, policy.device)
    value = divergence_of(source_of, teacher, exact, targets, read, transform, tensors)
    if exact.temperature_squared:
        value = value / squared(transform, read)
    return value.view(policy.shape)
