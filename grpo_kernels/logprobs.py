"""Layer 1: log-probs and entropy of the chosen tokens, differentiable, from logits or from hidden states."""

from __future__ import annotations

from typing import Any

import torch

from . import backends, library
from .backends import Backend, RowStats, RowTransform
from .distributed import VocabShard, check_shard, on_shard
from .layout import as_mask, check_targets, flat, logit_rows
from .linear import Engine, Head, check_head
from .transform import LogitTransform, as_transform

Tensor = torch.Tensor


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
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target and, if asked, the entropy of its distribution.

        logps, entropy = token_logprobs(logits, targets, transform=LogitTransform(temperature=0.7), entropy=True)

    logits    [B, T, V] or [N, V], fp32, bf16 or fp16, any strides; row i predicts targets[i], nothing is shifted.
    targets   int64, the leading shape of logits.
    mask      bool, the shape of targets: rows where it is False are not read and give exactly 0, in value and gradient,
              whatever they hold. None = all rows count.
    entropy   False: not computed, the second result is None. True: differentiable. "detached": value only.
    inplace   True: destroys the logits in the backward, which writes the gradient into their memory. Autograd raises where
              something else still needs their values; reading them afterwards gives the gradient, and nothing can notice
              that. For the output of a model: a leaf that requires grad is refused.
    shard     logits are [.., V / ranks], this rank's part of a vocabulary cut over a group: see `distributed.VocabShard`.
    backend   "auto", "eager", "cpu" or "triton"; see `backends.pick`. strict=True makes a fallback an error.

    Returns (logps, entropy), fp32, the shape of targets, in nats. The softmax runs in fp32; nothing is rounded to the
    logits' dtype but the gradient. A row of only -inf gives NaN, as torch.log_softmax does.
    Raises ValueError on shapes, dtypes, devices or (on the CPU) ids that are wrong; on a GPU an id outside the
    vocabulary gives NaN, see GRPO_KERNELS_CHECK in `python -m grpo_kernels doctor`.
    """
    mask = _check_targets(targets, mask, entropy)
    if library.is_traced():
        return library.token_logprobs(logits, targets, mask, transform, entropy, shard, backend, strict)
    shape, device = targets.shape, targets.device
    check_shard(shard)
    rows = logit_rows(logits if shard is None else shard.local("logits", logits, -1), shape, device, inplace, shard is None)
    check_targets(targets, mask, rows.shape[-1] if shard is None else shard.vocab)
    row_transform = as_transform(transform).for_rows(shape, mask, None, device)
    module = on_shard(backends.pick(backend, device, strict), shard)
    read = None if mask is None else flat(mask)
    logps, H = _TokenLogprobs.apply(rows, flat(targets).to(torch.int64), read, row_transform, module, entropy, inplace)
    return logps.view(shape), None if H is None else H.view(shape)


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
) -> tuple[Tensor, Tensor | None]:
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
    not zero. Nothing but three numbers a row is kept in between, and entropy costs no memory. Logits are fp32, never
    rounded to 16 bits; the gradient of the weight is summed in fp32. On a GPU, rows are picked by a mask that the host
    has to read: pass rows that are all wanted (hidden[mask], targets[mask]) to avoid that.
    Raises ValueError naming the argument that is wrong.
    """
    mask = _check_targets(targets, mask, entropy)
    if library.is_traced():
        return library.linear_logprobs(hidden, weight, bias, targets, mask, transform, entropy, shard, backend, strict)
    shape, device = targets.shape, targets.device
    head = check_head(hidden, weight, bias, shape, device, shard)
    check_targets(targets, mask, head.vocab)
    row_transform = as_transform(transform).for_rows(shape, mask, None, device)
    module = on_shard(backends.pick(backend, device, strict), shard)
    index = torch.arange(targets.numel(), device=device) if mask is None else flat(mask).nonzero()[:, 0]
    flat_targets = flat(targets).to(torch.int64)
    logps, H = _LinearLogprobs.apply(
        head.hidden, head.weight, head.bias, head, flat_targets, index, row_transform, module, entropy
    )
    return logps.view(shape), None if H is None else H.view(shape)


def _check_targets(targets: Tensor, mask: Tensor | None, entropy: bool | str) -> Tensor | None:
    """The mask as bool, after a look at what needs no logits."""
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(
            f"targets is {got}: pass an int64 tensor of token ids, the leading shape of the logits or hidden states."
        )
    if entropy not in (False, True, "detached"):
        raise ValueError(f'entropy={entropy!r}: it must be False, True or "detached".')
    if mask is None:
        return None
    mask = as_mask("mask", mask, targets.shape)
    if mask.device != targets.device:
        raise ValueError(f"mask is on {mask.device}, but targets is on {targets.device}: move it there.")
    return mask


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [A, T, V]
        targets: Tensor,  # [n]
        read: Tensor | None,
        transform: RowTransform,
        backend: Backend,
        entropy: bool | str,
        inplace: bool,
    ) -> tuple[Tensor, Tensor | None]:
        stats = backend.row_stats(logits, targets, read, transform, bool(entropy))
        logps = stats.logps
        H = stats.entropy if entropy else None
        ctx.set_materialize_grads(False)
        if entropy == "detached":
            ctx.mark_non_differentiable(H)
        if ctx.needs_input_grad[0]:
            # The statistics, three numbers a row, are all that the backward needs beside the logits.
            ctx.save_for_backward(logits, targets, read, stats.max, stats.sum, stats.target, H)
            ctx.transform, ctx.backend, ctx.inplace = transform, backend, inplace
        return logps, H

    @staticmethod
    @library.first_derivative_only
    def backward(ctx: Any, d_logps: Tensor | None, d_entropy: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if d_logps is None and d_entropy is None:
            return (None,) * 7
        logits, targets, read, top, total, chosen, H = ctx.saved_tensors
        if d_logps is None:
            assert d_entropy is not None
            d_logps = torch.zeros_like(d_entropy)
        out = logits.detach() if ctx.inplace else torch.empty_like(logits)
        ctx.backend.row_grads(
            logits, targets, RowStats(top, total, None, chosen), H,
            upstream(d_logps, read), None if d_entropy is None else upstream(d_entropy, read), ctx.transform, out,
        )  # fmt: skip
        if ctx.inplace:
            torch.autograd.graph.increment_version(logits)
        return out, *(None,) * 6


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,
        head: Head,
        targets: Tensor,  # [N]
        index: Tensor,  # rows that count
        transform: RowTransform,
        backend: Backend,
        entropy: bool | str,
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            stats = Engine(head, backend).forward(index, targets, transform, bool(entropy))
        logps = stats.logps
        H = stats.entropy if entropy else None
        ctx.set_materialize_grads(False)
        if entropy == "detached":
            ctx.mark_non_differentiable(H)
        ctx.save_for_backward(hidden, weight, bias, targets, index, stats.max, stats.sum, stats.target, H)
        ctx.dtype, ctx.shard, ctx.transform, ctx.backend = head.dtype, head.shard, transform, backend
        return logps, H

    @staticmethod
    @library.first_derivative_only
    def backward(ctx: Any, d_logps: Tensor | None, d_entropy: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if d_logps is None and d_entropy is None:
            return (None,) * 9
        hidden, weight, bias, targets, index, top, total, chosen, H = ctx.saved_tensors
        if d_logps is None:
            assert d_entropy is not None
            d_logps = torch.zeros_like(d_entropy)
        d_logps = upstream(d_logps, None)
        wanted = d_logps[index] != 0
        if d_entropy is not None:
            d_entropy = upstream(d_entropy, None)
            wanted |= d_entropy[index] != 0
        emptied = ctx.shard is None if weight.numel() == 0 else weight.untyped_storage().nbytes() == 0
        if emptied:
            raise RuntimeError(
                "weight is gone before the backward, which computes the logits again: keep it gathered until after it (ZeRO-3: "
                "deepspeed.zero.GatheredParameters around both; FSDP: reshard_after_forward=False), or use linear_grpo_loss."
            )
        engine = Engine(Head(hidden, weight, bias, ctx.dtype, ctx.shard), ctx.backend, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            stats = RowStats(top, total, None, chosen)
            engine.backward(index[wanted], targets, stats, H, d_logps, d_entropy, ctx.transform)
        of = (hidden, weight, bias)
        return *(None if g is None else g.to(x.dtype) for g, x in zip(engine.gradients(), of, strict=True)), *(None,) * 6


def upstream(gradient: Tensor, read: Tensor | None) -> Tensor:
    """An upstream gradient as contiguous fp32 [n], 0 where the row was not read (even if NaN arrives there)."""
    gradient = gradient.to(torch.float32)
    return (gradient if read is None else torch.where(read, gradient, 0.0)).contiguous()
