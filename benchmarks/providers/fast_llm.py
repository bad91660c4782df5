"""Fast-LLM: its Triton kernel for the clipped loss of given logits and their gradient, in one launch, between products of torch. It
has no KL, so it takes part from hidden states, where the loss here has none either."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import CLIP, Cell, HiddenCase, Result
from benchmarks.providers import peer, provider


def _logits(cell: Cell) -> float:
    return 2.0 * cell.rows * cell.vocab * cell.dtype.itemsize


@provider("Fast-LLM kernel + products", "hidden", "hidden-frozen", devices=("cuda",), memory=_logits)
def kernel(case: HiddenCase) -> Callable[[], Result]:
    loss_and_gradient = peer("fast_llm.functional.triton.grpo_loss", "fast_llm").triton_grpo_loss_forward_backward
    low, high = CLIP
    batch, of_rows = case.batch, (case.batch.targets, case.batch.advantages.float(), case.batch.old_logps)

    def run() -> Result:
        logits = case.hidden @ case.weight.t()
        loss, d_logits, _ = loss_and_gradient(
            logits, *(x.contiguous() for x in of_rows), grad_output=1.0, epsilon_low=low, epsilon_high=high,
            divisor=float(batch.targets.numel()),
        )  # fmt: skip
        found = {"loss": loss.reshape(())}
        if case.hidden.requires_grad:
            found["d_hidden"] = d_logits @ case.weight
        return found | ({"d_weight": d_logits.t() @ case.hidden} if case.weight.requires_grad else {})

    return torch.no_grad()(run)
