"""Liger's fused linear Jensen-Shannon divergence by its own name, on our kernels and also on a CPU:

    from grpo_kernels.integrations.liger_jsd import LigerFusedLinearJSD     # for liger_kernel.transformers

Values are Liger's. Logits are fp32 where Liger's may be rounded to 16 bits, and the gradient of the weight is summed in fp32.

Written for and tested with liger-kernel 0.8.5.
"""

from __future__ import annotations

import torch

from ..batch import TokenBatch
from ..checks import require_number
from ..losses import linear_grpo_loss
from ..objective import Objective
from ..specs import LogitTransform
from ._shared import divergence_of

Tensor = torch.Tensor


class LigerFusedLinearJSD(torch.nn.Module):
    """The mean divergence of a student's tokens to a teacher's, from hidden states and weights of both.

    jsd_beta      0: KL(teacher, student). 1: KL(student, teacher). In between: the jsd, with the teacher's share jsd_beta.
    ignore_index  the label of tokens that do not count.
    temperature   divides the logits of both.
    accum_dtype   not needed: sums are fp32.

    Raises ValueError naming the argument that is wrong."""

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_number("jsd_beta", jsd_beta, "the teacher's share is a number in [0, 1].", 0.0, 1.0)
        self.jsd_beta, self.temperature, self.ignore_index, self.accum_dtype = jsd_beta, temperature, ignore_index, accum_dtype
        self.objective = Objective.preset("distillation", kl=divergence_of(float(jsd_beta)))
        self.transform = LogitTransform(temperature)

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """The mean over the tokens whose label counts, 0-d fp32.

        student_input, teacher_input    [N, H], with hidden sizes of their own; student_weight, teacher_weight  [V, H].
        shift_labels                    int64 [N], of which only `ignore_index` is looked at; None: all tokens count."""
        zeros = torch.zeros(student_input.shape[:-1], device=student_input.device)
        mask = None if shift_labels is None else shift_labels != self.ignore_index
        batch = TokenBatch(zeros.long(), zeros, mask=mask)
        reference = (teacher_input.detach(), teacher_weight.detach())
        return linear_grpo_loss(
            student_input, student_weight, batch, self.objective, reference=reference, transform=self.transform
        ).loss
