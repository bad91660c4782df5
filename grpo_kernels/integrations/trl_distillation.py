"""TRL's distillation loss on our kernels: four matrix products where TRL's has six, and eight for the jsd.

    from grpo_kernels.integrations.trl_distillation import fused_divergence

    with fused_divergence() as slot:
        DistillationTrainer(...).train()
    print(slot.counts)          # Counter({'fused': 120})

`DistillationTrainer` calls a function of its module, `_chunked_divergence_loss`, with the hidden states and heads of student
and teacher. It is replaced for all trainers of the process, on request only, and put back by `undo()` or at the end of `with`.
beta, the temperature of both models, scale and softcap of each model and the denominator have the same effect as in TRL. Unlike in
TRL, a logit of -inf does not give NaN, and fp32 tensors under fp16 autocast on a CPU are multiplied as they are: fp16 products
are no faster there, and lose digits.

Written for and tested with TRL 1.16.0.
"""

from __future__ import annotations

import inspect

import torch

from ..batch import TokenBatch
from ..losses import linear_grpo_loss
from ..objective import Objective
from ..specs import Head, LogitTransform
from ._shared import divergence_of, plain
from ._slots import NotCovered, Ragged, untested
from .trl_head import gathered

Tensor = torch.Tensor

#: What this was tested with.
KNOWN = ("1.16",)
MODULE, SLOT = "trl.trainer.distillation_trainer", "_chunked_divergence_loss"


def fused_divergence(*, strict: bool = False, any_version: bool = False) -> Ragged:
    """Replace TRL's function of its distillation loss by `linear_grpo_loss`. The returned `Ragged` restores it, by `undo()` or
    as a context manager, and its `counts` tell which calls were "fused", and which ran in TRL and why.

    strict   True: a call that TRL's own function has to handle raises RuntimeError, and so does the end of a `with` block in
             which TRL did not call ours.
    any_version   True: under a version that was not tested, skip the comparison with TRL's own function, see `_slots.Trial`.
    Raises RuntimeError for a TRL whose function has other arguments, and in the first step if that comparison fails."""
    version = untested("trl", KNOWN, any_version)
    from trl.trainer import distillation_trainer as theirs

    arguments = list(inspect.signature(getattr(theirs, SLOT)).parameters)
    expected = list(inspect.signature(divergence_loss).parameters)
    if arguments != expected:
        raise RuntimeError(
            f"{MODULE}.{SLOT} takes ({', '.join(arguments)}), but ours takes ({', '.join(expected)}): install TRL {KNOWN[-1]}."
        )
    slots = Ragged("trl", strict, "TRL", version)
    slots.bind(MODULE, SLOT, divergence_loss)
    return slots


def divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, sum of the student's entropies, number of tokens), 0-d, of hidden states [B, K, H] that predict the completions.

    completion_mask      [B, K], not 0 where a token counts.
    beta                 0: KL(teacher, student). 1: KL(student, teacher). In between: the jsd, with the teacher's share beta.
    num_items_in_batch   the divisor of the sum over tokens; None: the number of tokens of this batch.
    *_lm_head_weight, *_lm_head_bias, *_logit_scale, *_final_logit_softcapping, temperature   of the two heads, see
    `LogitTransform`."""
    plain(student_hidden_states, teacher_hidden_states)
    if any(hasattr(x, "ds_id") for x in (student_lm_head_weight, teacher_lm_head_weight)):
        raise NotCovered("a head under DeepSpeed ZeRO-3 is gathered for TRL's own backward only")
    if 0 in (student_logit_scale, teacher_logit_scale):
        raise NotCovered("logit_scale is 0")
    student, teacher = gathered(student_lm_head_weight), gathered(teacher_lm_head_weight)
    biases = [None if b is None else gathered(b) for b in (student_lm_head_bias, teacher_lm_head_bias)]
    shape, device = completion_mask.shape, student_hidden_states.device
    nothing = torch.zeros(shape, device=device)
    batch = TokenBatch(nothing.long(), nothing, mask=completion_mask != 0)
    out = linear_grpo_loss(
        student_hidden_states.reshape(*shape, -1), student, batch, Objective.preset("distillation", kl=divergence_of(beta)),
        bias=biases[0], transform=LogitTransform(temperature, student_final_logit_softcapping, student_logit_scale),
        reference=(
            teacher_hidden_states.detach().reshape(*shape, -1),
            Head(
                teacher.detach(), biases[1] if biases[1] is None else biases[1].detach(),
                LogitTransform(temperature, teacher_final_logit_softcapping, teacher_logit_scale),
            ),
        ),
        normalizer=num_items_in_batch,
    )  # fmt: skip
    return out.loss, out.entropy.sum(), batch.mask.sum()  # type: ignore[union-attr]
