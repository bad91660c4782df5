"""Liger Kernel: its whole GRPO losses, with their defaults, and its fused JSD."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import CLIP, OF_SEQUENCES, Case, Result
from benchmarks.providers import BETAS, Run, peer, provider

Call = Callable[[], Result]


@provider("Liger GRPO loss", "logits", devices=("cuda",))
def triton_loss(case: Case) -> Run:
    loss_of = peer("liger_kernel.transformers.grpo_loss", "liger-kernel").triton_grpo_loss
    cell, batch = case.cell, case.batch
    shape = (cell.sequences, cell.length)
    # It takes logits of one more position per sequence and does not read it. They are made here,
    # untimed.
    longer = torch.zeros(
        shape[0],
        shape[1] + 1,
        cell.vocab,
        dtype=cell.dtype,
        device=case.logits.device,
        requires_grad=True,
    )
    assert batch.old_logps is not None and batch.ref_logps is not None
    old_logps, ref_logps, targets = (
        x.view(shape) for x in (batch.old_logps, batch.ref_logps, batch.targets)
    )
    advantages = batch.advantages.view(shape)[:, 0].contiguous()

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


@provider("Liger fused linear GRPO", "hidden", "hidden-frozen", *OF_SEQUENCES, "step")
def fused_linear(case: Case) -> Call:
    """It takes one advantage per sequence only."""
    module = peer("liger_kernel.chunked_loss", "liger-kernel")
    level = "sequence" if case.cell.contract in ("gspo", "gspo-frozen") else "token"
    loss_of = module.LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        epsilon_low=CLIP[0],
        epsilon_high=CLIP[1],
        importance_sampling_level=level,
        loss_type="vespo" if case.cell.contract == "vespo" else "dapo",
    )
    shape, batch = (case.cell.sequences, case.cell.length), case.batch
    assert batch.old_logps is not None
    targets, advantages = batch.targets.view(shape), batch.advantages.view(shape)[:, 0].contiguous()
    mask = torch.ones(shape, device=targets.device)
    given = {
        "old_per_token_logps": batch.old_logps.view(shape),
        "num_items_in_batch": case.cell.rows,
    }

    def run() -> Result:
        hidden, weight = case.inputs()
        return case.gradients(
            loss_of(hidden.view(*shape, -1), weight, targets, mask, advantages, **given)[0]
        )

    return run


@provider("Liger fused linear JSD", *BETAS)
def divergence(case: Case) -> Call:
    """Without its cross-entropy."""
    loss_of = peer("liger_kernel.chunked_loss", "liger-kernel").LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETAS[case.cell.contract], compiled=False
    )
    teacher, targets = (case.ref_hidden, case.ref_weight), case.batch.targets
    return lambda: case.gradients(loss_of(case.hidden, case.weight, *teacher, targets))
