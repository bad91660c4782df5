"""Layer 1, differentiable, from logits or from hidden states: log-probs and entropy of the chosen tokens, and the exact divergence
of each token's distribution to that of a reference or teacher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from .checks import (
    DTYPES,
    INTEGERS,
    check_missing,
    check_rows,
    check_targets,
    describe,
    flat,
    leading_shape,
    mask_of_rows,
    require,
    require_tensor,
)
from .formulas.divergence import Exact, as_exact
from .rows.partials import DIFFERENTIABLE, OFFERED
from .rows.ragged import KeptRows, slots_of
from .statistics import Asked, kept_rows, statistics_of, tokens_of
from .streams import (
    Head,
    LogitTransform,
    Options,
    Policy,
    as_options,
    is_traced,
    leaves_the_graph,
    name_of_second,
    outside,
    refuse_keywords,
    squared,
    stream_of,
    teacher_of,
)
from .token_sets import TokenSets, check_sets, narrowed

ALSO = (*OFFERED, "log_kept_mass")


@dataclass(eq=False, repr=False)
class TokenLogprobs:
    """What `token_logprobs` and `linear_logprobs` return: `logps, entropy = token_logprobs(...)`, or by name.

    logps    fp32, the shape of targets, in nats; 0 where masked.
    entropy  likewise, or None where it was not asked for.
    also     a dict of what was asked for beside them: `also=` by name, each the shape of targets, and "at", fp32 [nnz].

    A pytree of all three, so that torch.func and DDP take them along."""

    logps: Tensor
    entropy: Tensor | None
    also: dict[str, Tensor] = field(default_factory=dict)
    __repr__ = describe

    def __iter__(self) -> Iterator[Any]:
        return iter((self.logps, self.entropy))

    def __getitem__(self, i: int) -> Any:
        return (self.logps, self.entropy)[i]

    def __len__(self) -> int:
        return 2


register_pytree_node(TokenLogprobs, lambda x: ([*x, x.also], None), lambda values, _: TokenLogprobs(*values))


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    also: tuple[str, ...] = (),
    inplace: bool = False,
    kept: TokenSets | None = None,
    missing: str | None = None,
    at: TokenSets | None = None,
    rows: Tensor | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> TokenLogprobs:
    """Log-prob of each target and, if asked, the entropy of its distribution.

        logps, entropy = token_logprobs(logits, targets, transform=LogitTransform(temperature=0.7), entropy=True)

    logits    [B, T, V] or [N, V], fp32, bf16 or fp16, any strides; row i predicts targets[i], nothing is shifted.
    targets   int64, the leading shape of logits.
    mask      bool, the shape of targets: rows where it is False are not read and give 0, in value and gradient.
    entropy   False, True (differentiable) or "detached" (value only).
    also      further statistics of each row's distribution p, in `also` of the result: "sum_squares" (sum of p^2, with gradient),
              "top_prob" (the largest p), "top_id" (its id, int64, the lowest of equal ones, -1 where masked; one more read of the
              logits), "log_kept_mass" (with gradient: log of the probability that the whole row gives to its kept set; it visits
              the whole row).
    inplace   True: the backward writes the gradient over the logits, as in `grpo_loss`.
    kept      `TokenSets`, a set for each target: log-prob and statistics are those of the softmax over the set, and only the
              logits of its ids are read. A row without ids runs over the whole vocabulary.
    missing   what to do with a target that is not in its set: "include" adds it to the set, "full" runs the row over the whole
              vocabulary, "mask" masks the row, "raise" raises ValueError (the host waits on a GPU). None: "include", in strict
              mode "raise".
    at        `TokenSets`, ids of each row whose log-probs are wanted too, with gradient: also["at"], in the order of at.ids. An id
              outside of a kept set has -inf, one of a masked row 0.
    rows      integer, the shape of targets: the flat row of logits that predicts each of them, several of which may share one. The
              logits then have any shape in front; mask, kept, at and results go by targets. See docs/trees.md.
    options   backend, strict mode, a shard of the vocabulary: see `Options`.

    Returns `TokenLogprobs`. The softmax runs in fp32; only the gradient is rounded to the logits' dtype. A row of only -inf gives
    NaN, as torch.log_softmax does. Raises ValueError on shapes, dtypes, devices or (on a CPU) ids that are wrong; on a GPU an id
    outside the vocabulary gives NaN."""
    if unknown:
        refuse_keywords(token_logprobs, unknown)
    return _logprobs(logits, None, targets, mask, transform, entropy, also, kept, missing, at, rows, options, inplace)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor | Head,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    also: tuple[str, ...] = (),
    kept: TokenSets | None = None,
    missing: str | None = None,
    at: TokenSets | None = None,
    rows: Tensor | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> TokenLogprobs:
    """`token_logprobs` from hidden states and the head's weight: the logits never exist.

        with torch.no_grad():
            old_logps, _ = linear_logprobs(h[:, :-1], model.lm_head.weight, ids[:, 1:], transform=LogitTransform.of(model))

    hidden     [B, T, H] or [N, H], fp32, bf16 or fp16, any strides; row i predicts targets[i].
    weight     [V, H], or `Head(weight, bias, transform)`. Products run in the autocast dtype if autocast is on, else in that of
               hidden.
    transform  softcap and scale that the model applies after its head, and the temperature: see `LogitTransform.of`.
    The rest is as in `token_logprobs`.

    Masked rows take part in no product. The forward is one product of the others; the backward, which cannot know the upstream
    gradient before it arrives, computes the logits again: three products of the rows whose upstream gradient is not zero. With a
    frozen head the forward takes two products and keeps [N, H] in fp32, the backward none, but for gradients of the entropy.
    Logits are fp32, and the gradient of the weight is summed in fp32.
    Rows with a kept set take part in no product with the whole weight. On a GPU, selecting rows by a mask is a host sync: pass
    only the rows that count (hidden[mask], targets[mask]) to avoid it. So is missing="full".
    Raises ValueError naming the argument that is wrong."""
    if unknown:
        refuse_keywords(linear_logprobs, unknown)
    head, transform = Head.parts(weight, transform)
    return _logprobs(hidden, head, targets, mask, transform, entropy, also, kept, missing, at, rows, options)


def _logprobs(
    x: Tensor, head: tuple[Any, Any] | None, targets: Tensor, mask: Tensor | None, transform: LogitTransform | None,
    entropy: bool | str, also: tuple[str, ...], kept: TokenSets | None, missing: str | None, at: TokenSets | None,
    rows: Tensor | None, options: Options | None, inplace: bool = False,
) -> TokenLogprobs:  # fmt: skip
    """Those of logits or, with the (weight, bias) of a head, of hidden states x."""
    options = as_options(options, head)
    if is_traced() and leaves_the_graph(options, None, kept, at, rows):
        return outside(_logprobs, x, head, targets, mask, transform, entropy, also, kept, missing, at, rows, options, inplace)
    remedy = "an int64 tensor of token ids, the leading shape of the logits or hidden states"
    require_tensor("targets", targets, INTEGERS, remedy)
    if entropy not in (False, True, "detached"):
        raise ValueError(f'entropy={entropy!r}: it must be False, True or "detached".')
    if also != ():
        known = isinstance(also, tuple) and len(set(also)) == len(also) and all(name in ALSO for name in also)
        require(known, "also", also, f"pass a tuple of {', '.join(map(repr, ALSO))}, each once at most.")
    read_too = {"targets": targets, "mask": mask, "transform": transform, "kept": kept, "at": at, "rows": rows}
    shape, device, leading = targets.shape, targets.device, targets.shape
    if rows is not None:
        check_rows(rows, targets)
        leading = leading_shape(x, targets)
    mask = mask_of_rows(mask, shape, device)
    if missing is not None:
        check_missing(missing)
    if kept is not None:
        check_sets("kept", kept, targets)
        mask = narrowed(kept, targets, mask, missing)
    policy = Policy(leading, device, transform, mask, None, options, rows is not None)
    stream = stream_of(x, head, policy, read_too, {}, inplace)
    vocab, sets, slots, whole, tokens = stream.vocab, None, None, False, None
    read, ids = None if mask is None else flat(mask), flat(targets).long()
    if kept is not None:
        sets = kept_rows(kept, targets, mask, read, vocab, missing, options)
    if at is not None:
        check_sets("at", at, targets, vocab)
        slots = slots_of(at)
    check_targets(targets, mask, vocab, logits=head is None)
    names, with_gradient = ("entropy",) if entropy else (), ("entropy",) if entropy is True else ()
    for name in also:
        if name == "log_kept_mass":
            if sets is None:
                continue
            name, whole = "lse", True
        names, with_gradient = (*names, name), (*with_gradient, *((name,) if name in DIFFERENTIABLE else ()))
    if rows is not None:
        tokens = tokens_of(rows, mask, ids, read, stream, slots)
    asked = Asked(ids, read, names, with_gradient, sets, whole, at=slots, tokens=tokens)
    found = statistics_of(stream, asked, options)
    if "log_kept_mass" in also and sets is None:
        found["log_kept_mass"] = torch.zeros_like(found["logps"])
    for name, x in found.items():
        found[name] = x if name == "at" else x.view(shape)
    return TokenLogprobs(found.pop("logps"), found.pop("entropy", None), found)


# ---- exact divergences


def token_divergence(
    logits: Tensor,
    ref_logits: Tensor | tuple[Tensor, LogitTransform] | TokenSets,
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
                at these ids only.
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
    return _divergence(logits, None, ref_logits, as_exact(divergence), mask, transform, kept, options, inplace)


def linear_divergence(
    hidden: Tensor,
    weight: Tensor | Head,
    reference: tuple[Any, ...] | TokenSets,
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
               teacher known at these ids only.
    mask, kept, divergence  as in `token_divergence`; transform and options as in `linear_logprobs`.

    Masked rows take part in no product. On a GPU, selecting rows by a mask is a host sync. The forward is a product for each
    side; the backward, which cannot know the upstream gradient before it arrives, computes the logits of both again: six products
    in all. `linear_grpo_loss` with Objective.preset("distillation") takes four.
    Raises ValueError naming the argument that is wrong."""
    if unknown:
        refuse_keywords(linear_divergence, unknown)
    exact, (head, transform) = as_exact(divergence), Head.parts(weight, transform)
    return _divergence(hidden, head, reference, exact, mask, transform, kept, options)


def _divergence(
    x: Tensor, head: tuple[Any, Any] | None, given: Any, exact: Exact, mask: Tensor | None, transform: LogitTransform | None,
    kept: TokenSets | None, options: Options | None, inplace: bool = False,
) -> Tensor:  # fmt: skip
    """That of logits or, with the (weight, bias) of a head, of hidden states x. `given`: the reference or teacher."""
    options = as_options(options, head)
    if is_traced() and leaves_the_graph(options, None, exact):
        return outside(_divergence, x, head, given, exact, mask, transform, kept, options, inplace)
    remedy, own = "a tensor [B, T, ..] or [N, ..], one row for each token", "logits" if head is None else "hidden"
    require_tensor(own, x, DTYPES, remedy)
    require(x.dim() > 1, f"{own}.shape", list(x.shape), f"pass {remedy}.")
    read_too = {"mask": mask, "transform": transform, "kept": kept}
    shape, device = x.shape[:-1], x.device
    policy = Policy(shape, device, transform, mask_of_rows(mask, shape, device), None, options)
    stream = stream_of(x, head, policy, read_too, {name_of_second(head is None): given}, inplace)
    (other, known), mask, sets = teacher_of(given, exact, policy, stream), policy.mask, None
    targets, read = torch.zeros(shape, dtype=torch.int64, device=device), None if mask is None else flat(mask)
    if kept is not None:
        check_sets("kept", kept, targets, stream.vocab)
        remedy = "a teacher known at some ids has no distribution over a kept set: leave one of them out."
        require(known is None, "kept", kept, remedy)
        # The target of a row is the first id of its set, so that no set gets a further one.
        first = torch.cat([kept.ids, kept.ids.new_zeros(1)]).long()[kept.offsets[:-1].long()]
        targets = torch.where(kept.counts > 0, first, 0)
        sets = KeptRows.of(kept, targets, read)
    asked = Asked(flat(targets), read, kept=sets, other=other, known=known, exact=exact)
    value = statistics_of(stream, asked, options)["divergence"]
    if exact.temperature_squared:
        value = value / squared(stream.transform, read)
    return value.view(shape)
