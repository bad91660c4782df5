"""Sampling, old log-probs, reference and gradient use the same network, even if the model has dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers

from grpo_kernels.training.losses import Losses, LossParts
from grpo_kernels.training.sampling import completion_logits
from support.runs import tiny, trainer


def gpt2(tok: Any, dropout: float) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tok), n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, eos_token_id=tok.eos_token_id, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


MODELS = {"qwen3": lambda tok: tiny(tok, attention_dropout=0.5), "gpt2": lambda tok: gpt2(tok, 0.3)}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_dropout_has_ratio_1_before_any_step(
    tok: Any,
    tmp_path: Path,
    name: str,
    checkpointing: bool,
) -> None:
    """Without a learning rate no update moves the policy: the second has ratio 1 to the first, and no KL to the reference."""
    t = trainer(
        tok, tmp_path, model=MODELS[name](tok).train(), lr=0.0, num_updates=2, beta=0.1, gradient_checkpointing=checkpointing
    )
    metrics = t.train_step()
    assert metrics["grad_norm"] > 1e-4
    for found in (metrics["ratio_max"], metrics["ratio_mean"], metrics["ess"]):
        assert found == pytest.approx(1.0, abs=1e-6)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_log_probs_that_are_trained_are_those_that_were_sampled(
    tok: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained: list[tuple[Any, torch.Tensor]] = []
    loss = Losses.loss

    def watched(self: Losses, model: Any, completions: Any, *args: Any) -> LossParts:
        out = loss(self, model, completions, *args)
        trained.append((completions, out.logps))
        return out

    monkeypatch.setattr(Losses, "loss", watched)
    t = trainer(tok, tmp_path, model=MODELS["qwen3"](tok).train(), lr=0.0)
    t.train_step()
    ((completions, logps),) = trained
    sampled = completion_logits(t.model.eval(), completions).log_softmax(-1)
    expected = sampled.gather(-1, completions.targets[..., None])[..., 0] * completions.mask
    torch.testing.assert_close(logps, expected.detach())


def test_recomputed_layers_run_twice_and_give_the_same_gradient(tok: Any, tmp_path: Path) -> None:
    """Once in the forward and once in the backward pass."""
    gradients, runs = [], []
    for checkpointing in (False, True):
        t = trainer(tok, tmp_path / str(checkpointing), gradient_checkpointing=checkpointing, max_grad_norm=float("inf"))
        completions = t.sample(t.train_rows[:3], 4, 1.0, generator=torch.Generator().manual_seed(0))
        calls: list[int] = []
        t.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        t.optimizer.step = t.optimizer.zero_grad = lambda: None
        t.update(completions, torch.linspace(-1, 1, 12))
        gradients.append([p.grad.clone() for p in t.model.parameters()])
        runs.append(len(calls))
        assert not any(module.training for module in t.model.modules())
    assert runs == [1, 2]
    assert max(g.abs().max().item() for g in gradients[0]) > 1e-4
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_a_layer_whose_dropout_recomputing_switches_on_is_refused(tok: Any, tmp_path: Path) -> None:
    """OPT's layers draw their dropout themselves, by their own training flag."""

    def opt(dropout: float) -> Any:
        torch.manual_seed(0)
        config = transformers.OPTConfig(
            vocab_size=len(tok), hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32,
            max_position_embeddings=64, dropout=dropout, eos_token_id=tok.eos_token_id, pad_token_id=tok.eos_token_id,
            bos_token_id=None, init_std=0.1,
        )  # fmt: skip
        return transformers.OPTForCausalLM(config)

    with pytest.raises(ValueError, match="gradient_checkpointing=True switches on the dropout of OPTForCausalLM"):
        trainer(tok, tmp_path / "a", model=opt(0.3), gradient_checkpointing=True)
    metrics = trainer(tok, tmp_path / "b", model=opt(0.3), lr=0.0, num_updates=2).train_step()
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-6)
