"""Ids that stand in a row more than once, as trainers' own tests have them: each adapter gives what its trainer's formula gives."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import verl_distillation
from support.trainers import assert_same, stand_in, value_and_gradient

Tensor = torch.Tensor

B, S, V, K = 3, 6, 29, 5


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, S, V], ids [B, S, K] and numbers for them, any; in one row all ids are the same, in one none repeats."""
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(V, (B, S, K), generator=g)
    ids[..., 3] = ids[..., 1]
    ids[0, 1], ids[0, 2] = 7, torch.arange(K)
    return 2.0 * torch.randn(B, S, V, generator=g), ids, 2.0 * torch.randn(B, S, K, generator=g)


# ---- NeMo-RL


@pytest.mark.parametrize("outside", [False, True], ids=["renormalised", "zero outside"])
@pytest.mark.parametrize("kl_type", ["forward", "reverse", "mixed"])
@pytest.mark.usefixtures("stand_ins")
def test_nemo_rl_counts_an_id_as_often_as_it_is_listed(kl_type: str, outside: bool) -> None:
    stand_in(
        "nemo_rl.algorithms.loss.interfaces",
        LossType=enum.Enum("LossType", ["TOKEN_LEVEL", "SEQUENCE_LEVEL"]),
        LossInputType=enum.Enum("LossInputType", ["LOGIT", "LOGPROB", "DISTILLATION"]),
    )
    from grpo_kernels.integrations.nemo_rl_distillation import DistillationLoss

    logits, ids, teacher = drawn()
    data = {"input_ids": ids[..., 0], "teacher_topk_logits": teacher, "teacher_topk_indices": ids}
    counts = torch.tensor(B), torch.tensor(B * (S - 1))

    def theirs(z: Tensor) -> Tensor:
        q, whole = torch.log_softmax(teacher.double(), -1)[:, :-1], torch.log_softmax(z, -1)
        p = (whole.gather(-1, ids) if outside else torch.log_softmax(z.gather(-1, ids), -1))[:, :-1]
        forward, reverse = (q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)
        if outside:
            rest = (whole.exp() * whole).sum(-1)[:, :-1] - (p.exp() * p).sum(-1)
            reverse = reverse + rest + 100 * (1 - p.exp().sum(-1))
        share = {"forward": 1.0, "reverse": 0.0}.get(kl_type, 0.3)
        return (share * forward + (1 - share) * reverse).mean()

    loss = DistillationLoss(kl_type, 0.3, outside)
    want = value_and_gradient(theirs, logits, torch.float64)
    assert_same(value_and_gradient(lambda z: loss(z, data, *counts)[0], logits, torch.float32), want)


# ---- verl


def forward_kl_topk(logits: Tensor, values: Tensor, ids: Tensor, config: Any, data_format: str) -> dict[str, Tensor]:
    """verl's formula without its clamps, in the dtype of the logits."""
    values, ids = (x.values()[None] for x in (values, ids))
    logps = torch.log_softmax(logits, -1).gather(-1, ids)
    losses = (values.exp() * (values - logps)).sum(-1)
    return {"distillation_losses": losses, "student_mass": logps.exp().sum(-1), "teacher_mass": values.exp().sum(-1)}


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for verl's distillation losses from logits, which has ours in its registry."""

    def modules() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "verl"]

    for name in modules():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(metadata, "version", lambda _: "0.9.1")
    monkeypatch.setattr(verl_distillation, "_registered", {})
    stand_in("verl.utils.ulysses", get_ulysses_sequence_parallel_world_size=lambda: 1, slice_input_tensor=None)
    stand_in(
        "verl.trainer.distillation.losses",
        DistillationLossSettings=SimpleNamespace,
        register_distillation_loss=lambda settings: lambda function: function,
    )
    verl_distillation.register()
    yield stand_in(verl_distillation.HOME, compute_forward_kl_topk=forward_kl_topk)
    for name in modules():
        del sys.modules[name]


def jagged(rows: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 4, len(rows)]))


def test_verl_counts_an_id_as_often_as_it_is_listed(verl: Any) -> None:
    logits, ids, values = (x.flatten(0, 1) for x in drawn())
    logits, values = logits[None], torch.log_softmax(values, -1)
    up = torch.linspace(-1, 2, B * S)

    def run(call: Callable[..., Any]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        def total(z: Tensor) -> tuple[Tensor, ...]:
            out = call(z, jagged(values.to(z)), jagged(ids), config, "thd")
            masses = [out[name].detach() for name in ("student_mass", "teacher_mass")]
            return ((out["distillation_losses"] * up).sum(), *masses)

        return total

    config = SimpleNamespace(distillation_loss=SimpleNamespace(loss_mode="fused_forward_kl_topk"))
    want = value_and_gradient(run(forward_kl_topk), logits, torch.float64)
    with verl_distillation.bind(strict=True):
        got = value_and_gradient(run(verl.compute_forward_kl_topk), logits, torch.float32)
    assert_same(got, want)
    for mine, theirs in zip(got[0][1:], want[0][1:], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, exact in verl_distillation.LOSSES.items() if exact.tail != "ignore"])
def test_with_a_tail_such_a_row_of_verls_is_padding(verl: Any, name: str) -> None:
    """A distribution has each id once: 0 in value, gradient and masses. Rows without a repetition are what they were."""
    logits, ids, values = (x.flatten(0, 1) for x in drawn())
    values = torch.log_softmax(values, -1)
    config = SimpleNamespace(distillation_loss=SimpleNamespace(loss_mode="fused_" + name))
    leaf = logits[None].clone().requires_grad_()
    with verl_distillation.bind(strict=True):
        out = verl.compute_forward_kl_topk(leaf, jagged(values), jagged(ids), config, "thd")
    out["distillation_losses"].sum().backward()
    distinct = torch.arange(B * S) == 2
    for x in (*out.values(), leaf.grad.abs().sum(-1)):  # type: ignore[union-attr]
        assert ((x[0] != 0) == distinct).all()


def test_a_configuration_without_the_field_is_left_to_verl(verl: Any) -> None:
    """verl's own function does not read loss_mode, and its callers need not have it."""
    logits, ids, values = (x.flatten(0, 1) for x in drawn())
    with verl_distillation.bind() as slots:
        out = verl.compute_forward_kl_topk(
            logits[None], jagged(values), jagged(ids), SimpleNamespace(distillation_loss=SimpleNamespace()), "thd"
        )
    assert out.keys() == {"distillation_losses", "student_mass", "teacher_mass"} and slots.counts == {"verl: loss_mode=None": 1}
