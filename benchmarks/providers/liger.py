"""Liger Kernel: its whole GRPO losses, with their defaults, and its fused JSD."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import CLIP, OF_SEQUENCES, Case, Result
from benchmarks.providers import BETAS, Run, peer, provider

Call = Callable[[], Result]


@provider("Liger GRPO loss", "logits", devices=("cuda",))
def triton_loss(case: Case) -> Run:
    """Return the run of Liger's Triton kernel for given logits. It overwrites them.

    The run fills its own logits from the case before each call, which is not timed.
    """
    grpo_loss = peer("liger_kernel.transformers.grpo_loss", "liger-kernel").triton_grpo_loss
    cell = case.cell
    batch = case.batch
    shape = (cell.sequences, cell.length)
    # The kernel takes logits [B, T + 1, V] and ignores the last position. They are allocated here,
    # so that this is not timed.
    logits = torch.zeros(
        cell.sequences,
        cell.length + 1,
        cell.vocab,
        dtype=cell.dtype,
        device=case.logits.device,
        requires_grad=True,
    )
    assert batch.old_logps is not None and batch.ref_logps is not None
    old_logps = batch.old_logps.view(shape)
    ref_logps = batch.ref_logps.view(shape)
    targets = batch.targets.view(shape)
    advantages = batch.advantages.view(shape)[:, 0].contiguous()  # one for each sequence
    clip_low, clip_high = CLIP

    def restore() -> None:
        """Copy the logits of the case [N, V] to the first T positions of each sequence."""
        with torch.no_grad():
            logits[:, :-1] = case.pristine.view(*shape, -1)

    def call() -> Result:
        """Return {"loss": scalar, "d_logits": [B, T, V]}."""
        loss, _ = grpo_loss(
            logits,
            old_logps,
            ref_logps,
            targets,
            advantages,
            temperature=1.0,
            beta=cell.beta,
            eps_low=clip_low,
            eps_high=clip_high,
            inplace=True,
            loss_type="dapo",
            reduce=True,
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        return {"loss": loss.detach(), "d_logits": gradient[:, :-1]}

    return Run(call, restore)


@provider("Liger fused linear GRPO", "hidden", "hidden-frozen", *OF_SEQUENCES, "step")
def fused_linear(case: Case) -> Call:
    """Return a function that computes the policy loss of a case, and its gradients, with Liger.

    Liger's loss supports only one advantage per sequence.
    """
    module = peer("liger_kernel.chunked_loss", "liger-kernel")
    contract = case.cell.contract
    clip_low, clip_high = CLIP
    fused_loss = module.LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        importance_sampling_level="sequence" if contract in ("gspo", "gspo-frozen") else "token",
        loss_type="vespo" if contract == "vespo" else "dapo",
    )
    batch = case.batch
    shape = (case.cell.sequences, case.cell.length)
    assert batch.old_logps is not None
    old_logps = batch.old_logps.view(shape)
    targets = batch.targets.view(shape)
    advantages = batch.advantages.view(shape)[:, 0].contiguous()
    mask = torch.ones(shape, device=targets.device)

    def call() -> Result:
        """Return the loss and the gradients of the inputs, see `Case.gradients`."""
        hidden, weight = case.inputs()
        loss, *_ = fused_loss(
            hidden.view(*shape, -1),
            weight,
            targets,
            mask,
            advantages,
            old_per_token_logps=old_logps,
            num_items_in_batch=case.cell.rows,
        )
        return case.gradients(loss)

    return call


@provider("Liger fused linear JSD", *BETAS)
def divergence(case: Case) -> Call:
    """Return a function that computes the mean divergence of a case, and its gradients, with Liger.

    Liger's loss also has a cross-entropy with the targets, which gets the weight 0 here.
    """
    module = peer("liger_kernel.chunked_loss", "liger-kernel")
    fused_loss = module.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=BETAS[case.cell.contract],
        compiled=False,
    )

    def call() -> Result:
        loss = fused_loss(
            case.hidden, case.weight, case.ref_hidden, case.ref_weight, case.batch.targets
        )
        return case.gradients(loss)

    return call
