"""Fast-LLM: its Triton kernel for the clipped loss of given logits and their gradient, in one launch, between products of
torch. It has no KL, so it takes part from hidden states, where the loss here has none either."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import CLIP, Case, Result
from benchmarks.providers import peer, provider


@provider(
    "Fast-LLM kernel + products",
    "hidden",
    "hidden-frozen",
    devices=("cuda",),
    memory=lambda cell: 2.0 * cell.rows * cell.vocab * cell.dtype.itemsize,
)
def kernel(case: Case) -> Callable[[], Result]:
    loss_and_gradient = peer("fast_llm.functional.triton.grpo_loss", "fast_llm").triton_grpo_loss_forward_backward
    batch, of_rows = case.batch, (case.batch.targets, case.batch.advantages.float(), case.batch.old_logps)
    how = {"grad_output": 1.0, "epsilon_low": CLIP[0], "epsilon_high": CLIP[1], "divisor": float(batch.targets.numel())}

    def run() -> Result:
        logits = case.hidden @ case.weight.t()
        loss, d_logits, _ = loss_and_gradient(logits, *(x.contiguous() for x in of_rows), **how)  # type: ignore[union-attr]
        gradients = {"d_hidden": lambda: d_logits @ case.weight, "d_weight": lambda: d_logits.t() @ case.hidden}
        return {"loss": loss.reshape(())} | {name: gradients[name]() for name in case.leaves}

    return torch.no_grad()(run)
