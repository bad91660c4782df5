"""Layer 1: log-probs and entropy of the chosen tokens, differentiable, from logits or from hidden states."""

from __future__ import annotations

from typing import Any, overload

import torch

from .checks import require
from .layout import as_mask, check_targets, flat
from .operators import hidden_source, leaves_the_graph, logits_source, outside
from .transform import LogitTransform, as_transform
from .vocabulary.hidden import check_head
from .vocabulary.shard import VocabShard
from .vocabulary.stage import Source, vocabulary_stage

Tensor = torch.Tensor

ALSO = ("sum_squares", "top_prob", "top_id")


@overload
def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    inplace: bool = False,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> tuple[Tensor, Tensor | None]: ...
@overload
def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    also: tuple[str, ...],
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    inplace: bool = False,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
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
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
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
    inplace   True: destroys the logits in the backward, which writes the gradient into their memory. Autograd raises where
              another operation still needs their values. Code that reads the tensor afterwards gets the gradient, without
              an error. For the output of a model: a leaf that requires grad is refused.
    shard     logits are [.., V / ranks], this rank's part of a vocabulary cut over a group: see `distributed.VocabShard`.
    backend   "auto", "eager", "cpu" or "triton"; see `backends.pick`. strict=True makes a fallback an error.

    Returns (logps, entropy), with `also` (logps, entropy, dict), fp32, the shape of targets, in nats. The softmax runs in
    fp32; only the gradient is rounded to the logits' dtype. A row of only -inf gives NaN, as torch.log_softmax does.
    Raises ValueError on shapes, dtypes, devices or (on the CPU) ids that are wrong; on a GPU an id outside the
    vocabulary gives NaN, see GRPO_KERNELS_CHECK in `python -m grpo_kernels doctor`.
    """
    if leaves_the_graph(shard=shard):
        options: dict[str, Any] = {"mask": mask, "transform": transform, "entropy": entropy, "inplace": inplace, "shard": shard}
        options["also"] = also
        return outside(token_logprobs, logits, targets, backend=backend, strict=strict, **options)
    mask = _check_targets(targets, mask, entropy, also)
    rows, source = logits_source(logits, targets.shape, targets.device, inplace, shard, backend, strict)
    check_targets(targets, mask, rows.shape[-1] if shard is None else shard.vocab, logits=True)
    return _stage(source, (rows,), targets, mask, transform, entropy, also)


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> tuple[Tensor, Tensor | None]: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    also: tuple[str, ...],
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]: ...
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    also: tuple[str, ...] = (),
    shard: VocabShard | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> Any:
    """`token_logprobs` from hidden states and the head's weight: the logits never exist.

        with torch.no_grad():
            old_logps, _ = linear_logprobs(
                h[:, :-1], model.lm_head.weight, ids[:, 1:], mask=mask, transform=LogitTransform.of(model)
            )

    hidden    [B, T, H] or [N, H], fp32, bf16 or fp16, any strides; row i predicts targets[i].
    weight    [V, H]; bias [V] or None. Products run in the autocast dtype if autocast is on, else in that of hidden.
    transform softcap and scale that the model applies after its head, and the temperature: see `LogitTransform.of`.
    shard     weight and bias are this rank's part of a vocabulary cut over a group: see `distributed.VocabShard`.
    The rest is as in `token_logprobs`.

    Masked rows take part in no product. The forward is one product of the others; the backward, which cannot know the
    upstream gradient before it arrives, computes the logits again: three products of the rows whose upstream gradient is
    not zero. Between forward and backward three numbers per row are kept, and entropy costs no further memory. Logits are fp32,
    never rounded to 16 bits; the gradient of the weight is summed in fp32. On a GPU, selecting rows by a mask is a
    host sync: pass only the rows that count (hidden[mask], targets[mask]) to avoid it.
    Raises ValueError naming the argument that is wrong.
    """
    if leaves_the_graph(shard=shard):
        options: dict[str, Any] = {"bias": bias, "mask": mask, "transform": transform, "entropy": entropy, "shard": shard}
        options["also"] = also
        return outside(linear_logprobs, hidden, weight, targets, backend=backend, strict=strict, **options)
    mask = _check_targets(targets, mask, entropy, also)
    head = check_head(hidden, weight, bias, targets.shape, targets.device, shard)
    check_targets(targets, mask, head.vocab)
    source = hidden_source(head, None if mask is None else flat(mask), backend, strict)
    return _stage(source, head.tensors, targets, mask, transform, entropy, also)


def _check_targets(targets: Tensor, mask: Tensor | None, entropy: bool | str, also: tuple[str, ...]) -> Tensor | None:
    """Check the arguments that do not depend on the logits, and return the mask as bool."""
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(
            f"targets is {got}: pass an int64 tensor of token ids, the leading shape of the logits or hidden states."
        )
    if entropy not in (False, True, "detached"):
        raise ValueError(f'entropy={entropy!r}: it must be False, True or "detached".')
    known = isinstance(also, tuple) and len(set(also)) == len(also) and all(name in ALSO for name in also)
    require(known, "also", also, f"pass a tuple of {', '.join(map(repr, ALSO))}, each once at most.")
    if mask is None:
        return None
    mask = as_mask("mask", mask, targets.shape)
    if mask.device != targets.device:
        raise ValueError(f"mask is on {mask.device}, but targets is on {targets.device}: move it there.")
    return mask


def _stage(
    source: Source, tensors: tuple[Tensor | None, ...], targets: Tensor, mask: Tensor | None, transform: LogitTransform | None,
    entropy: bool | str, also: tuple[str, ...],
) -> Any:  # fmt: skip
    shape = targets.shape
    rows = as_transform(transform).for_rows(shape, mask, None, targets.device)
    statistics = (*(("entropy",) if entropy else ()), *also)
    with_gradient = tuple(name for name in statistics if name == "sum_squares" or (name == "entropy" and entropy is True))
    read = None if mask is None else flat(mask)
    logps, found = vocabulary_stage(source, statistics, with_gradient, flat(targets).to(torch.int64), read, rows, *tensors)
    found = {name: x.view(shape) for name, x in found.items()}
    H = found.pop("entropy", None)
    return (logps.view(shape), H, found) if also else (logps.view(shape), H)
