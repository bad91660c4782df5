"""A custom objective in a dozen lines. It runs in eager PyTorch, in C++ and in the fused Triton
kernel.

    python -m examples.custom_objective

The surrogate below penalises the log-ratio of a token with a Huber loss, instead of clipping
the ratio. Without a GPU the Triton kernel runs in Triton's interpreter: slow, but the same source.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from grpo_kernels import Objective, Options, TokenBatch, grpo_loss
from grpo_kernels.core.backends import unavailable
from grpo_kernels.formulas.surrogates import Custom, check_surrogate, ops


def huber(logp, old_logp, advantage, params):
    """Return (loss, d loss / d logp) of a token.

    loss = -A logp + strength * huber(x) for x = logp - old_logp, where huber(x) is x^2 / 2 if
    |x| <= width, else width (|x| - width / 2).
    """
    width, strength = params
    x = logp - old_logp
    near = ops.abs(x) <= width
    penalty = ops.where(near, 0.5 * x * x, width * (ops.abs(x) - 0.5 * width))
    grad_penalty = ops.minimum(ops.maximum(x, -width), width)
    loss = -advantage * logp + strength * penalty
    grad_logp = -advantage + strength * grad_penalty
    return loss, grad_logp


def main() -> None:
    """Compute loss and gradient with each backend, and compare them with the eager backend."""
    surrogate = Custom(huber, (0.2, 2.0))
    check_surrogate(surrogate)  # compares the gradient with autograd, raises if they differ
    objective = Objective(surrogate, aggregate="seq-mean-token-mean", beta=0.04)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 1000, generator=g).to(device)
    targets = torch.randint(1000, (4, 6), generator=g).to(device)
    logps = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    batch = TokenBatch(
        targets,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5], device=device),
        old_logps=logps + 0.3 * torch.randn(4, 6, generator=g).to(device),
        ref_logps=logps + 0.3 * torch.randn(4, 6, generator=g).to(device),
    )
    expected: torch.Tensor | None = None
    for backend in ("eager", "cpu", "triton"):
        reason = unavailable(backend) or (
            "the data is on the GPU" if backend == "cpu" and device == "cuda" else None
        )
        if reason is not None:
            print(f"{backend:8} not here: {reason}")
            continue
        leaf = logits.clone().requires_grad_()
        out = grpo_loss(leaf, batch, objective, options=Options(backend=backend))
        out.loss.backward()
        assert leaf.grad is not None
        expected = leaf.grad if expected is None else expected
        error = float((leaf.grad - expected).norm() / expected.norm())
        print(
            f"{backend:8} loss {out.loss.item():.6f}, gradient differs from eager's by {error:.1e}"
        )
        assert error < 1e-5


if __name__ == "__main__":
    main()
