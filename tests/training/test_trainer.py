"""The update of the reference trainer on a tiny model, and its command line."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers

from grpo_kernels import TokenBatch, linear_grpo_loss
from grpo_kernels.__main__ import main as command_line
from grpo_kernels.training.data import prompts_of_step
from grpo_kernels.training.trainer import TrainConfig, Trainer
from support.runs import config, gsm8k, lines, parameters, tiny, trainer

# ---- the update


def gradients(tok: Any, out: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    t = trainer(tok, out, max_grad_norm=float("inf"), **changes)
    t.optimizer.step = lambda: None
    t.optimizer.zero_grad = lambda: None
    metrics = t.train_step()
    return {name: p.grad.clone() for name, p in t.model.named_parameters()}, metrics


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_micro_batches_give_the_gradient_of_the_batch(tok: Any, tmp_path: Path, preset: str) -> None:
    whole, m1 = gradients(tok, tmp_path / "1", preset=preset)
    cut, m4 = gradients(tok, tmp_path / "4", preset=preset, micro_batch=5)  # 5 + 5 + 2
    assert max(g.abs().max().item() for g in whole.values()) > 1e-4
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6)
    for name in ("loss", "entropy", "grad_norm", "tokens", "ratio_max"):
        assert m4[name] == pytest.approx(m1[name], rel=1e-4, abs=1e-6)


def test_gradient_equals_policy_gradient_in_float64(tok: Any, tmp_path: Path) -> None:
    """On-policy GRPO is the plain policy gradient, written out here with the model's own log-softmax."""
    temperature = 0.7
    t = trainer(tok, tmp_path, temperature=temperature, max_grad_norm=float("inf"))
    exact = copy.deepcopy(t.model).double()
    rows = prompts_of_step(t.train_rows, 0, 3, 0)
    completions = t.sample(rows, 4, temperature, generator=torch.Generator().manual_seed(0))
    of_each = t.credit.advantages(rows, completions, t.score(rows, completions, 4))
    width, loss = completions.prompt_width, 0.0
    for i, ids in enumerate(completions.tokens):
        real = completions.attention[i]
        prompt = completions.ids[i, :width][real[:width]]
        whole = torch.cat([prompt, torch.tensor(ids)])[None]
        logps = (exact(input_ids=whole).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        loss = loss - of_each[i].double() * logps[torch.arange(len(ids)), ids].mean() / 12
    expected = torch.autograd.grad(loss, list(exact.parameters()))
    t.optimizer.step = t.optimizer.zero_grad = lambda: None
    t.update(completions, of_each)
    for p, gradient in zip(t.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.double(), gradient, rtol=1e-4, atol=1e-6)


def test_the_three_losses_give_the_same_step(tok: Any, tmp_path: Path) -> None:
    linear, _ = gradients(tok, tmp_path / "a", beta=0.1)
    for loss in ("logits", "eager"):
        other, _ = gradients(tok, tmp_path / loss, loss=loss, beta=0.1)
        for name in linear:
            torch.testing.assert_close(other[name], linear[name], rtol=1e-4, atol=1e-6)


def test_the_three_losses_give_the_same_curve(tok: Any, tmp_path: Path) -> None:
    curves = {}
    for loss in ("linear", "logits", "eager"):
        run = trainer(tok, tmp_path / loss, loss=loss, steps=20, lr=1e-3, num_updates=2, beta=0.05, eval_steps=10)
        assert run.train()
        curves[loss] = lines(tmp_path / loss)
    assert len({line["loss"] for line in curves["linear"] if "loss" in line}) > 10
    for loss in ("logits", "eager"):
        for expected, found in zip(curves["linear"], curves[loss], strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_linear_loss_refuses_a_head_it_does_not_know(tok: Any, tmp_path: Path) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny(tok)
    head = Doubled(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    with pytest.raises(ValueError, match=r"loss='linear' does not know .*Doubled.*use loss='logits'"):
        trainer(tok, tmp_path / "a", model=model)
    model.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    model.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match=r"its logits differ by up to .*use loss='logits'"):
        trainer(tok, tmp_path / "b", model=model)


def test_old_log_probs_are_those_before_the_first_update(tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(tok, tmp_path / "one", lr=1e-2)
    assert one.train_step()["ratio_max"] == 1.0

    old: list[Any] = []
    new: list[Any] = []

    def watched(hidden: torch.Tensor, weight: torch.Tensor, batch: TokenBatch, *args: Any, **kwargs: Any) -> Any:
        out = linear_grpo_loss(hidden, weight, batch, *args, **kwargs)
        old.append(batch.old_logps)
        new.append(out.logps)
        return out

    monkeypatch.setattr("grpo_kernels.training.losses.linear_grpo_loss", watched)
    three = trainer(tok, tmp_path / "three", lr=1e-2, num_updates=3)
    metrics = three.train_step()
    assert old[0] is None and torch.equal(old[1], new[0]) and torch.equal(old[2], new[0])
    assert (new[1] - new[0]).abs().max() > 1e-3 < (new[2] - new[1]).abs().max()
    assert metrics["ratio_max"] == pytest.approx((new[2] - new[0])[new[0] != 0].exp().max().item(), rel=1e-5)


def test_reference_is_kept_refreshed_and_pulled_to(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path, beta=0.5, ref_refresh_steps=2, lr=1e-2, steps=3)
    start = {k: v.clone() for k, v in t.reference.model.state_dict().items()}
    first = t.train_step()
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert all(torch.equal(v, start[k]) for k, v in t.reference.model.state_dict().items())
    second = t.train_step()
    assert second["kl"] > 1e-5
    assert all(torch.equal(v, t.model.state_dict()[k]) for k, v in t.reference.model.state_dict().items())
    assert t.train_step()["kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_gradient_that_is_not_finite_leaves_the_parameters(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path)
    before = parameters(t)
    t.model.lm_head.weight.register_hook(lambda g: g * float("nan"))
    assert t.train_step()["skipped"] == 1.0
    assert all(torch.equal(p, before[n]) for n, p in parameters(t).items())


def test_learning_rate_schedules() -> None:
    c = TrainConfig(steps=10, lr=1.0, warmup_steps=4)
    assert [c.lr_at(i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    c = TrainConfig(steps=10, lr=1.0, lr_schedule="linear", num_updates=2)
    assert c.lr_at(0) == 1.0 and c.lr_at(10) == 0.5 and c.lr_at(20) == 0.0
    assert TrainConfig(steps=10, lr=1.0, lr_schedule="cosine").lr_at(5) == pytest.approx(0.5)


def test_thirty_steps_raise_the_reward(tok: Any, tmp_path: Path, drawn: None) -> None:
    t = trainer(tok, tmp_path, steps=30, lr=1e-2, prompts_per_step=4, group_size=8)
    assert t.train()
    rewards = [line["reward"] for line in lines(tmp_path)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert (tmp_path / "curves.png").stat().st_size > 5000
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(p, parameters(t)[n]) for n, p in again.named_parameters())


# ---- the command line


def test_help_lists_every_field(capsys: Any) -> None:
    with pytest.raises(SystemExit) as done:
        command_line(["train", "--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0
    for f in fields(TrainConfig):
        assert f"--{f.name.replace('_', '-')}" in text
        assert f.metadata["help"]


def test_a_run_from_the_command_line(tok: Any, tmp_path: Path) -> None:
    tiny(tok).save_pretrained(tmp_path / "model")
    tok.save_pretrained(tmp_path / "model")
    data = gsm8k(tmp_path / "gsm8k")
    argv = (
        f"train --model {tmp_path}/model --dataset {data} --dataset-config main --rewards number exact --reward-weights 1 0.5"
    )
    argv += (
        f" --steps 2 --prompts-per-step 2 --group-size 2 --max-new-tokens 3 --eval-steps 1 --out {tmp_path}/run --no-progress"
    )
    argv += " --device cpu --dtype bfloat16 --betas 0.9 0.95 --gradient-checkpointing"
    assert command_line(argv.split()) == 0
    assert [line["step"] for line in lines(tmp_path / "run")] == [0, 1, 2]
    assert command_line(argv.split()) == 2  # the folder holds a run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0: it must be at least 1"),
        ({"preset": "pppo"}, "preset='pppo': it must be one of grpo"),
        ({"loss": "fused"}, "loss='fused': it must be one of linear, logits, eager"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"top_p": 0.0}, "top_p=0.0: it must be in"),
        ({"temperature": 0.0}, "temperature=0.0: .*eval_temperature=0"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"rewards": []}, "rewards=.*name a reward function"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights=.*each of the 1 rewards"),
        ({"ref_refresh_steps": 5}, "ref_refresh_steps=5: .*set beta above 0"),
        ({"prompt_template": "x"}, "prompt_template='x'"),
        ({"keep_checkpoints": 1}, "keep_checkpoints=1: keep at least 2"),
        ({"lr_schedule": "step"}, "lr_schedule='step'"),
        ({"parallel": "fsdp"}, "parallel='fsdp': it must be one of ddp, fsdp2"),
    ],
)
def test_bad_values_name_the_field_and_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"liger": True}, "liger=True: .*GPU"),
        ({"attn_implementation": "flash_attention_2", "model": "m", "dataset": "d"}, "flash_attention_2.*needs a CUDA device"),
        ({"device": "cuda"}, "device='cuda': torch sees no CUDA device"),
        ({"dataset": "d"}, "model='': name one"),
    ],
)
def test_what_this_machine_cannot_do(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(config(tmp_path, **({"device": "cpu"} | changes)))
