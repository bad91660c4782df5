"""SkyRL: the soft cross-entropy of its draft heads, from the logits of draft and policy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import Case, Cell, Result
from benchmarks.providers import peer, provider

#: Positions of a sequence that are processed at a time: SkyRL's `mtp_loss_chunk_size`.
CHUNK_SIZE = 1024


def logits_memory(cell: Cell) -> float:
    """Return the bytes of seven and a half fp32 tensors [N, V], which SkyRL's loss needs."""
    bytes_per_logit = 7.5 * 4
    return bytes_per_logit * cell.rows * cell.vocab


@provider("SkyRL soft cross-entropy", "draft", memory=logits_memory)
def draft_head(case: Case) -> Callable[[], Result]:
    """Return a function that computes SkyRL's loss of a draft head, and its gradients.

    Draft and policy share the head of the case. Only the draft's hidden states get a gradient.
    """
    module = peer("skyrl.backends.skyrl_train.mtp.soft_ce", "skyrl")
    shape = (case.cell.sequences, case.cell.length)
    mask = torch.ones(shape, device=case.hidden.device)

    def call() -> Result:
        """Return {"loss": scalar, "d_hidden": [N, H]}."""
        student_logits = (case.hidden @ case.weight.t()).view(*shape, -1)
        with torch.no_grad():
            policy_logits = (case.ref_hidden @ case.weight.t()).view(*shape, -1)
        teacher_logits = module.build_teacher_logits(policy_logits)
        shifted_mask = module.shift_mask_for_mtp(mask)
        loss = module.draft_soft_ce(
            student_logits, teacher_logits, shifted_mask, chunk_size=CHUNK_SIZE
        )
        return case.gradients(loss)

    return call
