"""verl's distillation losses on our divergences, through verl's own registry and its two calls of a loss, on a CPU.

pip install --no-deps verl==0.9.1 && pip install ray tensordict omegaconf hydra-core codetiming orjson pylatexenc
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", minversion="0.9.0", exc_type=ImportError)

from tensordict import TensorDict
from verl.trainer.distillation import losses as theirs
from verl.trainer.distillation.fsdp import losses as of_forward
from verl.workers.config import ActorConfig, DistillationLossConfig

from grpo_kernels import Exact, TokenSets
from grpo_kernels.integrations import verl_distillation as ours
from grpo_kernels.integrations._slots import NotCovered
from support.divergences import of_listed_ids

Tensor = torch.Tensor

PROMPTS, RESPONSES, V, K = (2, 3), (4, 2), 23, 5
N = sum(PROMPTS) + sum(RESPONSES)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    ours.register()
    with ours.bind():
        yield


def nested(rows: Tensor) -> Tensor:
    lengths = torch.tensor([0, *(p + r for p, r in zip(PROMPTS, RESPONSES, strict=True))]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(rows, lengths)


class Step:
    """A micro-batch of two sequences, as verl's engine hands it to a loss."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.logits = 2.0 * torch.randn(1, N, V, generator=g)
        teacher = torch.log_softmax(2.0 * torch.randn(N, V, generator=g), -1)
        self.teacher, self.ids = teacher.topk(K)
        ids = torch.randint(V, (N,), generator=g)
        starts = torch.tensor([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]).cumsum(0).tolist()
        whole = [ids[: starts[0]], ids[starts[0] :]]
        prompts = torch.nested.nested_tensor([x[:p] for x, p in zip(whole, PROMPTS, strict=True)], layout=torch.jagged)
        responses = torch.nested.nested_tensor([x[p:] for x, p in zip(whole, PROMPTS, strict=True)], layout=torch.jagged)
        mask = torch.nested.nested_tensor([torch.ones(r, dtype=torch.bool) for r in RESPONSES], layout=torch.jagged)
        fields = {"prompts": prompts, "responses": responses, "response_mask": mask}
        fields |= {"teacher_logprobs": nested(self.teacher), "teacher_ids": nested(self.ids)}
        self.data = TensorDict(fields, batch_size=[2])
        for name, value in (("dp_size", 1), ("batch_num_tokens", sum(RESPONSES)), ("global_batch_size", 2)):
            self.data.set_non_tensor(name, value)

    def run(self, mode: str, leaf: Tensor, strategy: str = "fsdp", **options: Any) -> tuple[Tensor, dict[str, Any], Tensor]:
        """(loss, metrics, values of all rows) by verl's own two calls."""
        actor = ActorConfig(strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=1)
        given = {"use_task_rewards": False, "use_policy_gradient": False, "loss_max_clamp": None, "topk": K, **options}
        config: Any = SimpleNamespace(distillation_loss=DistillationLossConfig(loss_mode=mode, **given))
        out = theirs.distillation_ppo_loss(actor, config, data=self.data, student_logits=leaf)
        model_output = {name: nested(x.squeeze(0)) for name, x in out.items()}
        loss, metrics = theirs.distillation_ppo_loss(actor, config, model_output, self.data)
        return loss, metrics, out["distillation_losses"]

    def expected(self, exact: Exact, leaf: Tensor) -> Tensor:
        """[1, N], by the definition over the teacher's ids, which other tests compare with the formulas of the tails."""
        sets = TokenSets.from_padded(self.ids, values=self.teacher)
        return of_listed_ids(exact, torch.log_softmax(leaf.double(), -1)[0], sets).float()[None]


def test_a_configuration_without_a_mode_is_left_to_verl() -> None:
    """verl's own function of the logits does not read the mode."""
    step = Step()
    bare: Any = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None), use_chunked_topk=False)
    with pytest.raises(NotCovered, match="loss_mode=None"):
        ours.topk_divergence(step.logits, nested(step.teacher), nested(step.ids), bare, "thd")


def test_the_forward_kl_is_verls_but_for_its_clamps() -> None:
    """Value, gradient and masses of verl's own function, where nothing is clamped; with its clamps both lose gradient."""
    step = Step()
    for chunked in (False, True):
        mine, own = (step.logits.clone().requires_grad_() for _ in range(2))
        loss, metrics, values = step.run("fused_forward_kl_topk", mine)
        options = {"log_prob_min_clamp": None, "use_chunked_topk": chunked}
        _, their_metrics, their_values = step.run("forward_kl_topk", own, **options)
        torch.testing.assert_close(values, their_values, rtol=1e-5, atol=1e-6)
        values.sum().backward()
        their_values.sum().backward()
        torch.testing.assert_close(mine.grad, own.grad, rtol=1e-5, atol=1e-6)
        for name in ("distillation/student_mass", "distillation/teacher_mass"):
            assert metrics[name] == pytest.approx(their_metrics[name], rel=1e-5)
        of_responses = torch.cat([values[0, 1:5], values[0, 8:10]])
        torch.testing.assert_close(loss, of_responses.mean(), rtol=1e-5, atol=1e-6)
    clamped = step.logits.clone().requires_grad_()
    step.run("forward_kl_topk", clamped, log_prob_min_clamp=-1.0)[2].sum().backward()
    assert (clamped.grad - mine.grad).abs().max() > 0.05  # type: ignore[operator]


def test_a_value_below_0_keeps_its_gradient() -> None:
    """A policy with more mass on the ids than the teacher: verl's loss is 0 there, and does not move."""
    step = Step()
    step.logits = torch.full((1, N, V), -20.0).scatter(-1, step.ids[None], step.teacher[None])
    step.logits.scatter_add_(-1, step.ids[None, :, :1], torch.full((1, N, 1), 0.1))
    mine, own = (step.logits.clone().requires_grad_() for _ in range(2))
    loss, theirs_loss = step.run("fused_forward_kl_topk", mine)[0], step.run("forward_kl_topk", own)[0]
    assert theirs_loss == 0 and loss < 0
    loss.backward()
    theirs_loss.backward()
    assert own.grad.abs().max() == 0 and mine.grad.abs().max() > 1e-3  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ours.LOSSES)
def test_each_loss_is_its_divergence(name: str) -> None:
    step, exact = Step(), ours.LOSSES[name]
    leaf, wide = step.logits.clone().requires_grad_(), step.logits.double().requires_grad_()
    loss, metrics, values = step.run("fused_" + name, leaf)
    expected = step.expected(exact, wide)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    rows = torch.cat([expected[0, 1:5], expected[0, 8:10]])
    rows.mean().backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]
    assert metrics["distillation/loss_max"].aggregate() == pytest.approx(float(rows.max().detach()), rel=1e-5)


def test_padding_adds_nothing() -> None:
    """verl fills the teacher's ids of an empty sample with one id, and its log-probs with 0."""
    step = Step()
    step.ids[3], step.teacher[3] = 7, 0.0
    step.data["teacher_ids"], step.data["teacher_logprobs"] = nested(step.ids), nested(step.teacher)
    leaf = step.logits.clone().requires_grad_()
    values = step.run("fused_reverse_kl_topk", leaf)[2]
    values.sum().backward()
    assert values[0, 3] == 0 and (leaf.grad[0, 3] == 0).all() and values[0, 2] > 0  # type: ignore[index]


def test_what_is_not_ours_is_left_to_verl_or_refused() -> None:
    step = Step()
    with pytest.raises(RuntimeError, match=r"compute_forward_kl_topk is ours already"):
        ours.bind()
    with pytest.raises(ValueError, match=r"strategy='veomni': ours are for fsdp"):
        step.run("fused_jsd_topk", step.logits, strategy="veomni")
    assert ours.register({"jsd_topk": Exact("jsd")}) == ["fused_jsd_topk"]  # a second import registers the same again
    with pytest.raises(ValueError, match=r"losses\['fused_jsd_topk'\]=.*is registered under that name"):
        ours.register({"jsd_topk": Exact("jsd", mixture=0.1)})
    with pytest.raises(ValueError, match=r"losses\['fused_k9'\] is a str: pass an Exact"):
        ours.register({"k9": "reverse"})  # type: ignore[dict-item]


def test_without_bind_a_registered_name_is_refused() -> None:
    step, bound = Step(), getattr(of_forward, ours.SLOT)
    setattr(of_forward, ours.SLOT, bound.theirs)
    try:
        with pytest.raises(RuntimeError, match=r"call verl_distillation\.bind\(\) in the same module"):
            step.run("fused_jsd_topk", step.logits)
    finally:
        setattr(of_forward, ours.SLOT, bound)
