"""NeMo-RL's distillation loss from logits, against a float64 transcription of its own."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.trainers import stand_in

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins", "nemo")

B, S, V, K = 3, 6, 29, 5


@pytest.fixture
def nemo() -> Iterator[None]:
    stand_in(
        "nemo_rl.algorithms.loss.interfaces",
        LossType=enum.Enum("LossType", ["TOKEN_LEVEL", "SEQUENCE_LEVEL"]),
        LossInputType=enum.Enum("LossInputType", ["LOGIT", "LOGPROB", "DISTILLATION"]),
    )
    yield


class Step:
    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self.logits = 2.0 * torch.randn(B, S, V, generator=g)
        top, ids = (2.0 * torch.randn(B, S, V, generator=g)).topk(K)
        token_mask = (torch.rand(B, S, generator=g) < 0.7).float()
        self.data = {
            "input_ids": torch.randint(V, (B, S), generator=g),
            "token_mask": token_mask,
            "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
            "teacher_topk_logits": top,
            "teacher_topk_indices": ids,
        }
        self.counts = (torch.tensor(5.0), torch.tensor(17.0))


def transcribed(step: Step, logits: Tensor, kl_type: str, weight: float, outside: bool) -> Tensor:
    """NeMo-RL's lines, in the dtype of the logits."""
    data, ids = step.data, step.data["teacher_topk_indices"]
    q = torch.log_softmax(data["teacher_topk_logits"].to(logits.dtype), -1)[:, :-1]
    whole = torch.log_softmax(logits, -1)
    p = (whole.gather(-1, ids) if outside else torch.log_softmax(logits.gather(-1, ids), -1))[:, :-1]
    forward, reverse = (q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)
    if outside:
        rest = (whole.exp() * whole).sum(-1)[:, :-1] - (p.exp() * p).sum(-1)
        reverse = reverse + rest + 100 * (1 - p.exp().sum(-1))
    share = {"forward": 1.0, "reverse": 0.0}.get(kl_type, weight)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return ((share * forward + (1 - share) * reverse) * mask).sum() / (step.counts[1] + 1e-8)


@pytest.mark.parametrize("outside", [False, True], ids=["renormalised", "zero outside"])
@pytest.mark.parametrize("kl_type", ["forward", "reverse", "mixed"])
def test_value_and_gradient_are_those_of_its_loss(kl_type: str, outside: bool) -> None:
    from grpo_kernels.integrations.nemo_rl_distillation import DistillationLoss

    step = Step()
    wide, leaf = step.logits.double().requires_grad_(), step.logits.clone().requires_grad_()
    expected = transcribed(step, wide, kl_type, 0.3, outside)
    theirs = SimpleNamespace(kl_type=kl_type, mixed_kl_weight=0.3, zero_outside_topk=outside)
    loss_fn = DistillationLoss.like(theirs)
    assert loss_fn.input_type.name == "LOGIT"
    loss, metrics = loss_fn(leaf, step.data, *step.counts)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert metrics == {"loss": float(loss.detach()), "num_valid_samples": B}
    loss.backward()
    expected.backward()
    scale = float(wide.grad.abs().max())  # type: ignore[union-attr]
    assert float((leaf.grad.double() - wide.grad).abs().max()) <= 2e-6 * scale  # type: ignore[operator, union-attr]
    # Rows that do not count may hold anything.
    step.logits[1], step.logits[:, -1] = torch.nan, torch.inf
    again = step.logits.clone().requires_grad_()
    other = loss_fn(again, step.data, *step.counts)[0]
    other.backward()
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(again.grad, leaf.grad)


def test_without_masks_it_is_the_mean_over_all_rows_but_the_last() -> None:
    from grpo_kernels.integrations.nemo_rl_distillation import DistillationLoss

    step = Step()
    expected_data: dict[str, Any] = dict(step.data, token_mask=torch.ones(B, S), sample_mask=torch.ones(B))
    step.data, step.counts = expected_data, (torch.tensor(B), torch.tensor(B * (S - 1)))
    expected = transcribed(step, step.logits.double(), "mixed", 0.5, False)
    bare = {name: x for name, x in step.data.items() if "mask" not in name}
    loss = DistillationLoss()(step.logits, bare, *step.counts)[0]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_bad_settings_are_refused() -> None:
    from grpo_kernels.integrations.nemo_rl_distillation import DistillationLoss

    with pytest.raises(ValueError, match=r"kl_type='jsd': it must be one of forward"):
        DistillationLoss("jsd")
    with pytest.raises(ValueError, match=r"mixed_kl_weight=1\.5"):
        DistillationLoss("mixed", 1.5)
    step = Step()
    step.data["teacher_topk_indices"] = step.data["teacher_topk_indices"][..., :0]
    with pytest.raises(ValueError, match=r"topk must be positive"):
        DistillationLoss()(step.logits, step.data, *step.counts)
