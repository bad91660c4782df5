"""Layer 1: log-probs and entropy of the chosen tokens, differentiable, from logits or from hidden states."""

from __future__ import annotations

from typing import Any, overload

import torch

from .checks import require
from .layout import check_targets, flat, mask_of_rows
from .rows.hidden import Hidden
from .rows.parallel import VocabShard
from .rows.ragged import Ragged
from .rows.sets import KeptRows
from .rows.stream import Logits
from .specs import IDENTITY, NO_PRODUCT, Head, LogitTransform, Options, as_transform, merged, refuse_sparse
from .statistics import Asked, check_kept, rows_with_sets, statistics_of
from .streams import draws, hidden_stream, is_traced, leaves_the_graph, logits_stream, outside
from .token_sets import TokenSets, check_sets, narrowed

Tensor = torch.Tensor

ALSO = ("sum_squares", "top_prob", "top_id", "log_kept_mass")


@overload
def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    inplace: bool = False,
    kept: TokenSets | None = None,
    at: None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
    options: Options | None = None,
) -> tuple[Tensor, Tensor | None]: ...
@overload
def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    also: tuple[str, ...] = (),
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    inplace: bool = False,
    kept: TokenSets | None = None,
    at: TokenSets | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
    options: Options | None = None,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]: ...
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
    at: TokenSets | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
    options: Options | None = None,
) -> Any:
    """Log-prob of each target and, if asked, the entropy of its distribution.

        logps, entropy = token_logprobs(logits, targets, transform=LogitTransform(temperature=0.7), entropy=True)

    logits    [B, T, V] or [N, V], fp32, bf16 or fp16, any strides; row i predicts targets[i], nothing is shifted.
    targets   int64, the leading shape of logits.
    mask      bool, the shape of targets: rows where it is False are not read and give exactly 0, in value and gradient,
              whatever they hold. None = all rows count.
    entropy   False: not computed, the second result is None. True: differentiable. "detached": value only.
    also      further statistics of each row's distribution p: "sum_squares" (sum of p^2, with gradient), "top_prob" (the largest
              p) and "top_id" (its id, int64, the lowest where several are equal; -1 where masked), both without. They come
              as a third result, a dict of tensors of the shape of targets. "top_id" costs one more read of the logits.
              "log_kept_mass", with gradient: log of the probability that the whole row gives to its kept set, 0 without one.
              It costs the visit of the whole row that the set saves.
    kept      `TokenSets`, a set for each target: log-prob and statistics are those of the softmax over the set, and only the
              logits of its ids are read; the gradient of all others is 0. A row without ids runs over the whole vocabulary.
    inplace   True: destroys the logits in the backward, which writes the gradient into their memory. Autograd raises where
              another operation still needs their values. Code that reads the tensor afterwards gets the gradient, without
              an error. For the output of a model: a leaf that requires grad is refused.
    shard     logits are [.., V / ranks], this rank's part of a vocabulary cut over a group: see `distributed.VocabShard`.
    backend   "auto", "eager", "cpu" or "triton"; see `backends.pick`. strict=True makes a fallback an error.
    at        `TokenSets`, ids of each row whose log-probs are wanted too, with gradient: of a teacher's top-k, an engine's
              `logprobs`, several branches. They come in the dict of `also` as "at", fp32 [nnz] in the order of at.ids. One
              log-sum-exp serves all ids of a row. An id outside of a kept set has -inf, one of a masked row 0.
    options   `Options`: backend and strict, and what kept sets leave open.

    Returns (logps, entropy), with `also` or `at` (logps, entropy, dict), fp32, the shape of targets, in nats. The softmax runs in
    fp32; only the gradient is rounded to the logits' dtype. A row of only -inf gives NaN, as torch.log_softmax does.
    Raises ValueError on shapes, dtypes, devices or (on the CPU) ids that are wrong; on a GPU an id outside the
    vocabulary gives NaN, see GRPO_KERNELS_CHECK in `python -m grpo_kernels doctor`.
    """
    options = merged(options, backend=backend, strict=strict)
    refuse_sparse(options, NO_PRODUCT)
    if is_traced() and leaves_the_graph(at if kept is None else kept, None, shard=shard):
        given: dict[str, Any] = {"mask": mask, "transform": transform, "entropy": entropy, "inplace": inplace, "shard": shard}
        return outside(token_logprobs, logits, targets, also=also, kept=kept, at=at, options=options, **given)
    mask = _check_targets(targets, mask, entropy, also)
    if inplace and kept is not None and (options.over_vocabulary is not None or "log_kept_mass" in also):
        raise ValueError("inplace=True, but what is asked for needs the logits for two gradients: pass inplace=False.")
    read = {"targets": targets, "mask": mask, "transform": transform, "kept": kept, "at": at}
    of_rows = _for_rows(transform, targets, mask)
    given = {"shard": shard, "inplace": inplace, "read": read}
    stream = logits_stream(logits, targets.shape, targets.device, of_rows, options, **given)
    return _logprobs(stream, targets, mask, entropy, also, kept, at, options)


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor | Head,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    kept: TokenSets | None = None,
    at: None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
    weight_grad: Tensor | None = None,
    options: Options | None = None,
) -> tuple[Tensor, Tensor | None]: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor | Head,
    targets: Tensor,
    *,
    also: tuple[str, ...] = (),
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    kept: TokenSets | None = None,
    at: TokenSets | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
    weight_grad: Tensor | None = None,
    options: Options | None = None,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]: ...
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor | Head,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    also: tuple[str, ...] = (),
    kept: TokenSets | None = None,
    at: TokenSets | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
    weight_grad: Tensor | None = None,
    options: Options | None = None,
) -> Any:
    """`token_logprobs` from hidden states and the head's weight: the logits never exist.

        with torch.no_grad():
            old_logps, _ = linear_logprobs(
                h[:, :-1], model.lm_head.weight, ids[:, 1:], mask=mask, transform=LogitTransform.of(model)
            )

    hidden    [B, T, H] or [N, H], fp32, bf16 or fp16, any strides; row i predicts targets[i].
    weight    [V, H], or a `Head` with all that belongs to it; bias [V] or None. Products run in the autocast dtype if autocast
              is on, else in that of hidden.
    transform softcap and scale that the model applies after its head, and the temperature: see `LogitTransform.of`.
    shard     weight and bias are this rank's part of a vocabulary cut over a group: see `distributed.VocabShard`.
    weight_grad  memory that the backward adds the gradient of weight into, as in `linear_grpo_loss`.
    The rest is as in `token_logprobs`. Rows with a kept set take part in no product with the whole weight; see
    `linear_grpo_loss`.

    Masked rows take part in no product. The forward is one product of the others; the backward, which cannot know the
    upstream gradient before it arrives, computes the logits again: three products of the rows whose upstream gradient is
    not zero. Between forward and backward three numbers per row are kept, and entropy costs no further memory. Logits are fp32,
    never rounded to 16 bits; the gradient of the weight is summed in fp32. On a GPU, selecting rows by a mask is a
    host sync: pass only the rows that count (hidden[mask], targets[mask]) to avoid it. So is Options(missing="full").
    Raises ValueError naming the argument that is wrong.
    """
    head = Head.of(weight, bias=bias, transform=transform, shard=shard, weight_grad=weight_grad)
    options = merged(options, backend=backend, strict=strict)
    if at is not None:
        refuse_sparse(options, "the gradients of ids of at= would be among the columns drawn once more")
    if is_traced() and leaves_the_graph(at if kept is None else kept, head.grad, shard=head.shard):
        given: dict[str, Any] = {"mask": mask, "entropy": entropy, "also": also, "kept": kept, "at": at, "options": options}
        return outside(linear_logprobs, hidden, head, targets, **given)
    mask = _check_targets(targets, mask, entropy, also)
    read = {"targets": targets, "mask": mask, "transform": head.transform, "kept": kept, "at": at}
    of_rows = _for_rows(head.transform, targets, mask)
    stream = hidden_stream(hidden, head, targets.shape, targets.device, of_rows, options, read)
    return _logprobs(stream, targets, mask, entropy, also, kept, at, options)


def _check_targets(targets: Tensor, mask: Tensor | None, entropy: bool | str, also: tuple[str, ...]) -> Tensor | None:
    """Check the arguments that do not depend on the logits, and return the mask as bool."""
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(
            f"targets is {got}: pass an int64 tensor of token ids, the leading shape of the logits or hidden states."
        )
    if entropy not in (False, True, "detached"):
        raise ValueError(f'entropy={entropy!r}: it must be False, True or "detached".')
    if also != ():
        known = isinstance(also, tuple) and len(set(also)) == len(also) and all(name in ALSO for name in also)
        require(known, "also", also, f"pass a tuple of {', '.join(map(repr, ALSO))}, each once at most.")
    return mask_of_rows(mask, targets.shape, targets.device)


def _for_rows(transform: LogitTransform | None, targets: Tensor, mask: Tensor | None) -> Any:
    return IDENTITY if transform is None else as_transform(transform).for_rows(targets.shape, mask, None, targets.device)


def _kept(
    kept: TokenSets | None, targets: Tensor, mask: Tensor | None, vocab: int, options: Options
) -> tuple[Tensor | None, KeptRows | None]:  # fmt: skip
    """(the mask, the rows with sets)."""
    if kept is None:
        return mask, None
    check_kept(kept, targets, mask, vocab, options.missing, options.strict)
    mask = narrowed(kept, targets, mask, options.missing)
    return mask, rows_with_sets(kept, targets, None if mask is None else flat(mask), options.missing)


def _logprobs(
    stream: Logits | Hidden, targets: Tensor, mask: Tensor | None, entropy: bool | str, also: tuple[str, ...],
    kept: TokenSets | None, at: TokenSets | None, options: Options,
) -> Any:  # fmt: skip
    shape, vocab = targets.shape, stream.vocab
    mask, sets = _kept(kept, targets, mask, vocab, options)
    slots = None
    if at is not None:
        check_sets("at", at, targets, vocab)
        slots = Ragged(at.ids.to(torch.int64), at.offsets, at.row_of).plain()
    check_targets(targets, mask, vocab, logits=isinstance(stream, Logits))
    mass = "log_kept_mass" in also
    names = (*(("entropy",) if entropy else ()), *(name for name in also if name != "log_kept_mass"))
    with_gradient = tuple(name for name in names if name == "sum_squares" or (name == "entropy" and entropy is True))
    over = options.over_vocabulary if sets is not None else None
    if mass and sets is not None:
        names, with_gradient, over = (*names, "lse"), (*with_gradient, "lse"), over or ()
    sparse = draws(options, stream) if isinstance(stream, Hidden) else None
    asked = Asked(names, with_gradient, sets, over, at=slots, sparse=sparse)
    read = None if mask is None else flat(mask)
    found = statistics_of(stream, asked, flat(targets).to(torch.int64), read, options)
    named = {name: x if name == "at" else x.view(shape) for name, x in found.named.items()}
    if mass and sets is None:
        named["log_kept_mass"] = torch.zeros_like(found.logps).view(shape)
    H = named.pop("entropy", None)
    return (found.logps.view(shape), H, named) if named or also else (found.logps.view(shape), H)
