"""The mean divergence to a frozen teacher, value and gradients: ours, and those of trainers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from grpo_kernels.options import Options

from benchmarks.cases import Cell, Result
from benchmarks.divergence_cases import EXACT, TeacherCase, TwoLogitsCase, mean_divergence
from benchmarks.providers import peer, provider
from benchmarks.providers.ours import native
from grpo_kernels import Objective, grpo_loss, linear_divergence, linear_grpo_loss

Tensor = torch.Tensor
Call = Callable[[], Result]

FROM_HIDDEN = ("divergence", "divergence-forward", "divergence-jsd")
FROM_LOGITS = "logits-divergence"
#: TRL's and Liger's parameter for the same divergence.
BETA = {"divergence-forward": 0.0, "divergence": 1.0, "divergence-jsd": 0.5}


def _objective(case: TeacherCase | TwoLogitsCase) -> Objective:
    return Objective.preset("distillation", kl=EXACT[case.cell.contract])


@provider("grpo_kernels", *FROM_HIDDEN)
def ours(case: TeacherCase) -> Call:
    backend, spec, reference = native(case), _objective(case), (case.ref_hidden, case.ref_weight)

    def run() -> Result:
        batch = replace(case.batch)
        return case.gradients(
            linear_grpo_loss(case.hidden, case.weight, batch, spec, reference=reference, backend=backend).loss
        )

    return run


@provider("grpo_kernels, layer 1 + mean", *FROM_HIDDEN)
def layer_1(case: TeacherCase) -> Call:
    options, exact = Options(backend=native(case)), EXACT[case.cell.contract]
    reference = (case.ref_hidden, case.ref_weight)
    return lambda: case.gradients(linear_divergence(case.hidden, case.weight, reference, exact, options=options).mean())


@provider("grpo_kernels, in place", FROM_LOGITS)
def in_place(case: TwoLogitsCase) -> Call:
    backend, spec = native(case), _objective(case)

    def run() -> Result:
        batch = replace(case.batch)
        loss = grpo_loss(case.output(), batch, spec, ref_logits=case.ref_logits, inplace=True, backend=backend).loss
        return case.gradients(loss)

    return run


def _logits(cell: Cell) -> float:
    return 30.0 * cell.rows * cell.vocab


@provider("eager PyTorch", *FROM_HIDDEN, memory=_logits)
def eager(case: TeacherCase) -> Call:
    exact = EXACT[case.cell.contract]

    def run() -> Result:
        with torch.no_grad():
            w = (case.ref_hidden @ case.ref_weight.t()).float()
        return case.gradients(mean_divergence(exact, (case.hidden @ case.weight.t()).float(), w))

    return run


@provider("eager PyTorch", FROM_LOGITS, memory=_logits)
def eager_logits(case: TwoLogitsCase) -> Call:
    exact = EXACT[case.cell.contract]
    return lambda: case.gradients(mean_divergence(exact, case.logits.float(), case.ref_logits.float()))


@provider("torch.compile", FROM_LOGITS, memory=_logits)
def compiled_logits(case: TwoLogitsCase) -> Call:
    compiled, exact = torch.compile(mean_divergence), EXACT[case.cell.contract]
    return lambda: case.gradients(compiled(exact, case.logits.float(), case.ref_logits.float()))


@provider("torch.compile", *FROM_HIDDEN, memory=_logits)
def compiled(case: TeacherCase) -> Call:
    compiled, exact = torch.compile(mean_divergence), EXACT[case.cell.contract]

    def run() -> Result:
        with torch.no_grad():
            w = (case.ref_hidden @ case.ref_weight.t()).float()
        return case.gradients(compiled(exact, (case.hidden @ case.weight.t()).float(), w))

    return run


@provider("TRL chunked divergence + mean", *FROM_HIDDEN)
def trl(case: TeacherCase) -> Call:
    """TRL's chunked loss: six products, eight for the jsd."""
    function = peer("trl.kernels.chunked_divergence", "trl").ChunkedDivergenceFunction
    teacher, beta = (case.ref_hidden, case.ref_weight, None), BETA[case.cell.contract]
    return lambda: case.gradients(function.apply(case.hidden, case.weight, None, *teacher, beta)[0].mean())


@provider("Liger fused linear JSD", *FROM_HIDDEN)
def liger(case: TeacherCase) -> Call:
    """Without its cross-entropy."""
    loss_of = peer("liger_kernel.chunked_loss", "liger-kernel").LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETA[case.cell.contract], compiled=False
    )
    targets, teacher = case.batch.targets, (case.ref_hidden, case.ref_weight)
    return lambda: case.gradients(loss_of(case.hidden, case.weight, *teacher, targets))


@provider("two reads and a write", FROM_LOGITS, limit=True)
def passes(case: TwoLogitsCase) -> Callable[[], Tensor]:
    """In place: the logits are read and written, the teacher's read."""
    return lambda: case.buffer.add_(case.ref_logits)
