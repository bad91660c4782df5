"""Layer 1: log-probs and entropy of the chosen tokens, differentiable, from logits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from . import backends
from .backends import RowStats, RowTransform
from .batch import LogitTransform, as_mask, check_targets, logit_rows

Tensor = torch.Tensor


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    inplace: bool = False,
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
    inplace   True: the backward writes the gradient into the logits' memory (their version counter is bumped, so
              autograd raises if something else still needs their values).
    backend   "auto", "eager", "cpu" or "triton"; see `backends.pick`. strict=True makes a fallback an error.

    Returns (logps, entropy), fp32, the shape of targets, in nats. The softmax runs in fp32; nothing is rounded to the
    logits' dtype but the gradient. A row of only -inf gives NaN, as torch.log_softmax does.
    Raises ValueError on shapes, dtypes, devices or (on the CPU) ids that are wrong; on a GPU an id outside the
    vocabulary gives NaN, see GRPO_KERNELS_CHECK in `python -m grpo_kernels doctor`.
    """
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(f"targets is {got}: pass an int64 tensor of token ids, the leading shape of logits.")
    if entropy not in (False, True, "detached"):
        raise ValueError(f'entropy={entropy!r}: it must be False, True or "detached".')
    shape, device = targets.shape, targets.device
    if mask is not None:
        mask = as_mask("mask", mask, shape)
        if mask.device != device:
            raise ValueError(f"mask is on {mask.device}, but targets is on {device}: move it there.")
    rows = logit_rows(logits, shape, device, inplace)
    check_targets(targets, mask, rows.shape[-1])
    row_transform = (transform or LogitTransform()).for_rows(shape, mask, None, device)
    module = backends.pick(backend, device, strict)
    read = None if mask is None else mask.reshape(-1)
    logps, H = _TokenLogprobs.apply(rows, targets.reshape(-1).to(torch.int64), read, row_transform, module, entropy, inplace)
    return logps.view(shape), None if H is None else H.view(shape)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [A, T, V]
        targets: Tensor,  # [n]
        read: Tensor | None,
        transform: RowTransform,
        backend: ModuleType,
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
    @torch.autograd.function.once_differentiable
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
            _upstream(d_logps, read), None if d_entropy is None else _upstream(d_entropy, read), ctx.transform, out,
        )  # fmt: skip
        if ctx.inplace:
            torch.autograd.graph.increment_version(logits)
        return out, *(None,) * 6


def _upstream(gradient: Tensor, read: Tensor | None) -> Tensor:
    """An upstream gradient as contiguous fp32 [n], 0 where the row was not read (even if NaN arrives there)."""
    gradient = gradient.to(torch.float32)
    return (gradient if read is None else torch.where(read, gradient, 0.0)).contiguous()
