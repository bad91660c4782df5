"""SkyRL: the soft cross-entropy of its draft heads, from logits of all positions on both sides."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import Case, Result
from benchmarks.providers import peer, provider

#: `mtp_loss_chunk_size` of its configuration: positions of a sequence at a time.
CHUNK_SIZE = 1024


@provider("SkyRL soft cross-entropy", "draft", memory=lambda cell: 30.0 * cell.rows * cell.vocab)
def draft_head(case: Case) -> Callable[[], Result]:
    module = peer("skyrl.backends.skyrl_train.mtp.soft_ce", "skyrl")
    shape = (case.cell.sequences, case.cell.length, -1)
    mask = torch.ones(shape[:2], device=case.hidden.device)

    def run() -> Result:
        student = (case.hidden @ case.weight.t()).view(shape)
        with torch.no_grad():
            policy = (case.ref_hidden @ case.weight.t()).view(shape)
        teacher = module.build_teacher_logits(policy)
        loss = module.draft_soft_ce(
            student, teacher, module.shift_mask_for_mtp(mask), chunk_size=CHUNK_SIZE
        )
        return case.gradients(loss)

    return run
