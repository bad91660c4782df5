"""Liger Kernel: its two whole GRPO losses, with their defaults."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import CLIP, HiddenCase, LogitsCase, Result, StepCase
from benchmarks.providers import Run, peer, provider


@provider("Liger GRPO loss", "logits", devices=("cuda",))
def triton_loss(case: LogitsCase) -> Run:
    loss_of = peer("liger_kernel.transformers.grpo_loss", "liger-kernel").triton_grpo_loss
    cell, batch = case.cell, case.batch
    shape = (cell.sequences, cell.length)
    # It takes logits of one more position per sequence and does not read it. They are made here, untimed.
    longer = torch.zeros(shape[0], shape[1] + 1, cell.vocab, dtype=cell.dtype, device=case.logits.device, requires_grad=True)
    targets, advantages = batch.targets.view(shape), batch.advantages.view(shape)[:, 0].contiguous()
    assert batch.old_logps is not None and batch.ref_logps is not None
    old_logps, ref_logps = batch.old_logps.view(shape), batch.ref_logps.view(shape)

    def restore() -> None:
        with torch.no_grad():
            longer[:, :-1] = case.pristine.view(*shape, -1)

    def run() -> Result:
        loss, _ = loss_of(
            longer, old_logps, ref_logps, targets, advantages, temperature=1.0, beta=cell.beta, eps_low=CLIP[0], eps_high=CLIP[1],
            inplace=True, loss_type="dapo", reduce=True,
        )  # fmt: skip
        gradient = torch.autograd.grad(loss, longer)[0]
        return {"loss": loss.detach(), "d_logits": gradient[:, :-1]}

    return Run(run, restore)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _fused_linear(case: HiddenCase | StepCase) -> Loss:
    """The loss of hidden states [B, T, H] and a weight [V, H]. It takes one advantage per sequence only."""
    module = peer("liger_kernel.chunked_loss", "liger-kernel")
    loss_of = module.LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=CLIP[0], epsilon_high=CLIP[1], loss_type="dapo"
    )
    shape = (case.cell.sequences, case.cell.length)
    batch = case.batch
    assert batch.old_logps is not None
    targets, advantages = batch.targets.view(shape), batch.advantages.view(shape)[:, 0].contiguous()
    old_logps, mask = batch.old_logps.view(shape), torch.ones(shape, device=targets.device)
    given = {"old_per_token_logps": old_logps, "num_items_in_batch": case.cell.rows}
    return lambda hidden, weight: loss_of(hidden.view(*shape, -1), weight, targets, mask, advantages, **given)[0]


@provider("Liger fused linear GRPO", "hidden", "hidden-frozen")
def fused_linear(case: HiddenCase) -> Callable[[], Result]:
    loss = _fused_linear(case)
    return lambda: case.gradients(loss(case.hidden, case.weight))


@provider("Liger fused linear GRPO", "step")
def step(case: StepCase) -> Callable[[], Result]:
    loss = _fused_linear(case)
    return lambda: case.step(loss(case.hidden(), case.model.lm_head.weight))
