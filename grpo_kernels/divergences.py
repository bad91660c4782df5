"""Layer 1: the exact divergence of each token's distribution to that of a reference or teacher, differentiable."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .checks import require
from .formulas.divergence import Exact, as_exact
from .layout import flat, mask_of_rows
from .rows.ragged import KeptRows
from .specs import (
    NOT_BOUNDED,
    Head,
    LogitTransform,
    Options,
    as_options,
    as_transform,
    refuse_keywords,
    refuse_product,
    refuse_sparse,
)
from .statistics import Asked, statistics_of
from .streams import Policy, hidden_stream, is_traced, leaves_the_graph, logits_stream, outside, seconds_of, squared
from .token_sets import TokenSets, check_sets

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
    options: Options | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """The exact divergence of each row of logits to the reference's or teacher's, for trainers that keep a loss of their own.

        kl = token_divergence(logits[:, :-1], teacher_logits[:, :-1], Exact("jsd"), mask=mask)
        loss = kl.sum() / mask.sum()

    logits      [B, T, V] or [N, V], fp32, bf16 or fp16, any strides: the policy or student, which gets the gradient.
    ref_logits  the same shape, any of these dtypes: the reference or teacher, under the same transform; (logits,
                LogitTransform) under one of their own; or `TokenSets` whose values are the log-probs of a teacher that is known
                at these ids only; or a list of pairs (one of these, weight), a number or a tensor [B] or [B, T]: the weighted sum.
    divergence  "reverse" (KL(policy || reference)), "forward", "jsd", "tv", or an `Exact` with its options.
    mask        bool [B, T] or [N]: rows where it is False are not read and give exactly 0, in value and gradient.
    kept        `TokenSets`, a set for each row: both sides are renormalised over it, and only the logits of its ids are read. A row
                without ids runs over the whole vocabulary.
    inplace, options   as in `token_logprobs`; the logits of both sides are cut over the group of a shard.

    Returns fp32, the leading shape of logits, in nats: at least 0, also for two nearly equal rows, whose KL of 1e-10 keeps its
    digits; infinite where the other side has no probability. Both rows are read twice in the forward and in the backward each
    (of "jsd" and "tv" three times in the forward). Raises ValueError naming the argument that is wrong."""
    if unknown:
        refuse_keywords(token_divergence, unknown)
    exact, options = as_exact(divergence), as_options(options)
    refuse_product(options)
    if is_traced() and leaves_the_graph(exact, options):
        given: dict[str, Any] = {"mask": mask, "transform": transform, "inplace": inplace, "kept": kept, "options": options}
        return outside(token_divergence, logits, ref_logits, exact, **given)
    shape, device = _leading("logits", logits)
    read = {"mask": mask, "transform": transform, "kept": kept}
    mask = mask_of_rows(mask, shape, device)
    of_rows = as_transform(transform).for_rows(shape, mask, None, device)
    stream = logits_stream(logits, shape, device, of_rows, options, inplace=inplace, read=read, ref_logits=ref_logits)
    policy = Policy(shape, device, as_transform(transform), mask, None, stream, options)
    return _divergence(policy, "ref_logits", ref_logits, exact, kept)


def linear_divergence(
    hidden: Tensor,
    weight: Tensor | Head,
    reference: tuple[Any, ...] | TokenSets | list[Any],
    divergence: str | Exact = "reverse",
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    kept: TokenSets | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """`token_divergence` from hidden states: the logits of neither side ever exist beyond a chunk of rows.

        kl = linear_divergence(hidden, lm_head.weight, (teacher_hidden, teacher.lm_head.weight), "forward", mask=mask)

    hidden     [B, T, H] or [N, H], and weight [V, H] or a `Head`, as in `linear_logprobs`.
    reference  (hidden, weight), (hidden, weight, bias) or (hidden, Head(...)) of the reference or teacher, as in
               `linear_grpo_loss`, with a hidden size and dtype of its own; or `TokenSets` whose values are the log-probs of a
               teacher known at these ids only; or a list of pairs (one of these, weight): six products for each.
    mask, kept, divergence  as in `token_divergence`; transform and options as in `linear_logprobs`.

    Masked rows take part in no product. On a GPU, selecting rows by a mask is a host sync. The forward is a product for each
    side; the backward, which cannot know the upstream gradient before it arrives, computes the logits of both again: six products
    in all. `linear_grpo_loss` with Objective.preset("distillation") takes four.
    Raises ValueError naming the argument that is wrong."""
    if unknown:
        refuse_keywords(linear_divergence, unknown)
    exact, head, options = as_exact(divergence), Head.of(weight, transform), as_options(options)
    refuse_sparse(options, NOT_BOUNDED)
    if is_traced() and leaves_the_graph(exact, options):
        given: dict[str, Any] = {"mask": mask, "kept": kept, "options": options}
        return outside(linear_divergence, hidden, head, reference, exact, **given)
    shape, device = _leading("hidden", hidden)
    read = {"reference": reference, "mask": mask, "transform": head.transform, "kept": kept}
    mask = mask_of_rows(mask, shape, device)
    of_rows = as_transform(head.transform).for_rows(shape, mask, None, device)
    stream = hidden_stream(hidden, head, shape, device, of_rows, options, read)
    policy = Policy(shape, device, as_transform(head.transform), mask, None, stream, options)
    return _divergence(policy, "reference", reference, exact, kept)


def _leading(name: str, x: Any) -> tuple[torch.Size, torch.device]:
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"{name} is {got}: pass a tensor [B, T, ..] or [N, ..], one row for each token.")
    return x.shape[:-1], x.device


def _divergence(policy: Policy, name: str, given: Any, exact: Exact, kept: TokenSets | None) -> Tensor:
    seconds, stream = seconds_of(name, given, exact, policy), policy.stream
    targets, read, sets = torch.zeros(policy.shape, dtype=torch.int64, device=policy.device), None, None
    if policy.mask is not None:
        read = flat(policy.mask)
    if kept is not None:
        check_sets("kept", kept, targets, stream.vocab)
        remedy = "a teacher known at some ids has no distribution over a kept set: leave one of them out."
        require(not seconds.known, "kept", kept, remedy)
        # The target of a row is the first id of its set, so that no set gets a further one.
        first = torch.cat([kept.ids, kept.ids.new_zeros(1)]).to(torch.int64)[kept.offsets[:-1].to(torch.int64)]
        targets = torch.where(kept.counts > 0, first, 0)
        sets = KeptRows.of(kept, targets, read)
    asked = Asked(kept=sets, seconds=seconds, exact=exact)
    value = statistics_of(stream, asked, flat(targets), read, policy.options).named["divergence"]
    if exact.temperature_squared:
        value = value / squared(stream.transform, read)
    return value.view(policy.shape)
