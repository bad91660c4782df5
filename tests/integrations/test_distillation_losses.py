"""The distillation losses of TRL and Liger compared with ours under their names: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Tensor = torch.Tensor

B, T, V, H, H_TEACHER = 2, 7, 61, 16, 24


def inputs() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(hidden states, weight, bias of the student, likewise of the teacher, mask)"""
    g = torch.Generator().manual_seed(0)
    student = [torch.randn(B, T, H, generator=g), 0.4 * torch.randn(V, H, generator=g), torch.randn(V, generator=g)]
    teacher = [
        torch.randn(B, T, H_TEACHER, generator=g),
        0.4 * torch.randn(V, H_TEACHER, generator=g),
        torch.randn(V, generator=g),
    ]
    return student, teacher, torch.arange(T) < torch.tensor([[T], [T - 3]])


def value_and_gradients(loss: Callable[[list[Tensor]], Tensor], student: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in student]
    value = loss(leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_trls_loss(beta: float) -> None:
    theirs = pytest.importorskip("trl.trainer.distillation_trainer")._chunked_divergence_loss
    from grpo_kernels.integrations.trl_distillation import divergence_loss

    student, teacher, mask = inputs()
    for items, options in (
        (None, {}),
        (23, {"temperature": 0.7, "student_logit_scale": 0.5, "teacher_final_logit_softcapping": 4.0}),
        (torch.tensor(23), {"temperature": 1.5, "student_final_logit_softcapping": 6.0, "teacher_logit_scale": 1.2}),
    ):
        rest: list[tuple[Tensor, Tensor]] = []

        def loss(leaves: list[Tensor], function: Any, items: Any = items, options: Any = options, rest: Any = rest) -> Tensor:
            h, w, b = leaves
            value, *more = function(
                h,
                teacher[0],
                w,
                teacher[1],
                mask,
                beta,
                items,
                student_lm_head_bias=b,
                teacher_lm_head_bias=teacher[2],
                **options,
            )
            rest.append(tuple(more))
            return value

        mine = value_and_gradients(lambda leaves: loss(leaves, divergence_loss), student)
        assert_same(mine, value_and_gradients(lambda leaves: loss(leaves, theirs), student))
        torch.testing.assert_close(rest[0][0], rest[1][0], rtol=1e-5, atol=1e-5)  # entropies
        assert int(rest[0][1]) == int(rest[1][1]) == 11


def test_fp16_autocast_on_a_cpu_rounds_nothing() -> None:
    """TRL's own function rounds states, heads and logits to fp16; ours gives what it gives without autocast."""
    theirs = pytest.importorskip("trl.trainer.distillation_trainer")._chunked_divergence_loss
    from grpo_kernels.integrations.trl_distillation import divergence_loss

    student, (states, head, _), mask = inputs()

    def of(function: Any, autocast: bool) -> list[Tensor]:
        def loss(leaves: list[Tensor]) -> Tensor:
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                return function(leaves[0], states, leaves[1], head, mask, 0.3, student_lm_head_bias=leaves[2])[0]

        return value_and_gradients(loss, student)

    assert all(map(torch.equal, of(divergence_loss, True), of(divergence_loss, False)))
    rounded, plain = of(theirs, True), of(theirs, False)
    assert all((a - b).abs().max() > 1e-4 * b.abs().max() for a, b in zip(rounded[1:], plain[1:], strict=True))


def test_trls_slot_is_filled_and_restored() -> None:
    module = pytest.importorskip("trl.trainer.distillation_trainer")
    from grpo_kernels.integrations.trl_distillation import fused_divergence

    before, (student, teacher, mask) = module._chunked_divergence_loss, inputs()
    with fused_divergence() as slot:
        module._chunked_divergence_loss(student[0], teacher[0], student[1], teacher[1], mask, 1.0)
        with pytest.raises(RuntimeError, match=r"ours already|takes"):
            fused_divergence()
    assert dict(slot.counts) == {"fused": 1} and module._chunked_divergence_loss is before


def test_a_logit_of_minus_infinity_gives_no_nan() -> None:
    """An id that a head has masked, in both models: TRL's loss is NaN."""
    from grpo_kernels.integrations.trl_distillation import divergence_loss

    student, teacher, mask = inputs()
    for head in (student, teacher):
        head[2][5] = -torch.inf
    out = value_and_gradients(
        lambda leaves: divergence_loss(
            leaves[0],
            teacher[0],
            leaves[1],
            teacher[1],
            mask,
            0.5,
            student_lm_head_bias=leaves[2],
            teacher_lm_head_bias=teacher[2],
        )[0],
        student,
    )
    assert all(torch.isfinite(x).all() for x in out) and out[0] > 0


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_ligers_loss_by_its_name(beta: float) -> None:
    """Against Liger's loss in plain torch, whose fused kernel needs a GPU."""
    jsd = pytest.importorskip("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss
    from grpo_kernels.integrations.liger_jsd import LigerFusedLinearJSD

    student, teacher, mask = inputs()
    labels = torch.where(mask, 3, -100).reshape(-1)
    theirs = jsd(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=0.8, compiled=False)
    ours = LigerFusedLinearJSD(beta, temperature=0.8)
    flat = [student[0].reshape(-1, H), student[1]]
    rows = teacher[0].reshape(-1, H_TEACHER)

    def counted(leaves: list[Tensor]) -> Tensor:  # Liger's chunked loss masks its cross-entropy only
        keep = mask.reshape(-1)
        return theirs(leaves[0][keep], leaves[1], rows[keep], teacher[1], labels[keep])

    mine = value_and_gradients(lambda leaves: ours(*leaves, rows, teacher[1], labels), flat)
    assert_same(mine, value_and_gradients(counted, flat))


def test_ligers_beta_is_checked() -> None:
    from grpo_kernels.integrations.liger_jsd import LigerFusedLinearJSD

    with pytest.raises(ValueError, match=r"jsd_beta=1\.5"):
        LigerFusedLinearJSD(1.5)
