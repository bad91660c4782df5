"""Log-probs and entropy of random rows with their gradient: ours, and in float64."""

from __future__ import annotations

from typing import Any

import torch

from grpo_kernels import LogitTransform, token_logprobs
from support import oracle

Tensor = torch.Tensor
ALL = {"temperature": 0.7, "softcap": 12.0, "scale": 1.7}


def reference(
    logits: Tensor, targets: Tensor, d_logps: Tensor | None, d_entropy: Tensor | None, dtype: torch.dtype, **transform: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and the gradient of sum(d_logps logps + d_entropy entropy), by autograd in `dtype`."""
    leaf = logits.detach().to(torch.float64 if dtype == torch.float64 else logits.dtype).clone().requires_grad_()
    _, logps, entropy = oracle.log_probs(leaf.to(dtype), targets, oracle.Transform(**transform))
    logps, entropy = logps.view(targets.shape), entropy.view(targets.shape)
    total = logps.sum() * 0.0
    if d_logps is not None:
        total = total + (d_logps.to(dtype) * logps).sum()
    if d_entropy is not None:
        total = total + (d_entropy.to(dtype) * entropy).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return logps.detach(), entropy.detach(), gradient


def ours(
    logits: Tensor,
    targets: Tensor,
    d_logps: Tensor | None,
    d_entropy: Tensor | None,
    backend: str,
    *,
    transform: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    options.setdefault("entropy", d_entropy is not None)
    logps, entropy = token_logprobs(
        leaf, targets, transform=LogitTransform(**transform) if transform else None, backend=backend, **options
    )
    outputs = [(x, d) for x, d in ((logps, d_logps), (entropy, d_entropy)) if d is not None]
    torch.autograd.backward([x for x, _ in outputs], [d for _, d in outputs])
    assert leaf.grad is not None
    return logps.detach(), None if entropy is None else entropy.detach(), leaf.grad


def random_rows(
    n: int, vocab: int, dtype: torch.dtype = torch.float32, spread: float = 3.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = (spread * torch.randn(n, vocab)).to(dtype)
    return logits, torch.randint(vocab, (n,)), torch.randn(n), torch.randn(n)
