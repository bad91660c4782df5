"""TRL's trainer with our loss: the same numbers at every step, and the counts of the paths that computed them."""

from __future__ import annotations

import copy
import functools
import gc
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.16.0")

import test_parity_trl as parity
import transformers
import trl
from test_parity_trl import LOSS_TYPES, Case, make_trainer, plain, trainer  # noqa: F401 - three of them fixtures
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils

from grpo_kernels.head import FusedLMHead
from grpo_kernels.integrations import _trl_specs as specs
from grpo_kernels.integrations import trl_head
from grpo_kernels.integrations._slots import OVERRIDE
from grpo_kernels.integrations._trl_forward import Forward
from grpo_kernels.integrations.trl import FusedGRPOTrainer, FusedLoss, fused_lm_head, patch
from grpo_kernels.vocabulary.backends import cpu_products
from support import trl_cases
from support.cases import assert_no_worse
from support.trl_cases import assert_same_history, history

Tensor = torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """accelerate collects garbage before every training, which takes longer than the
    training while all that is imported takes part in it."""
    gc.freeze()
    yield
    gc.unfreeze()


# ---- one micro-batch, every combination of TRL's options


@pytest.fixture(scope="module")
def patched(trainer: GRPOTrainer) -> Iterator[FusedLoss]:  # noqa: F811
    fused = patch(trainer, strict=True)
    yield fused
    fused.undo()


def both(fused: FusedLoss, case: Case, data: Any) -> tuple[parity.Result, parity.Result]:
    """(TRL's, ours) in loss, gradients and metrics, of one trainer. The class still has TRL's method."""
    before = fused.counts["fused"]
    theirs = parity.trls(fused.trainer, case, data)
    assert fused.counts["fused"] == before
    ours = parity.trls(fused.trainer, case, data, lambda t, *args: t._compute_loss(*args))
    assert fused.counts["fused"] == before + 1
    return theirs, ours


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_combination(patched: FusedLoss, plain: Any, loss_type: str, level: str) -> None:  # noqa: F811
    """loss_type x level x (no KL, corrected KL, plain KL) x delta x tool mask, truncation, entropy quantile, off-policy mask,
    sampler weights, entropy bonus, advantages per token: loss, both gradients and all of TRL's metrics are TRL's."""
    for name, case, data in parity.cases(loss_type, level, plain):
        if loss_type == "vespo" and level == "sequence" and case.beta and case.corrected:
            with pytest.raises(RuntimeError, match="left to TRL's own code: VESPO's KL"):
                both(patched, case, data)
            continue
        theirs, ours = both(patched, case, data)
        what = f"{name}, {case}"
        size = float(theirs.d_hidden.abs().max())
        assert size > 1e-4, what
        assert abs(ours.loss - theirs.loss) <= 1e-5 * max(abs(theirs.loss), size), what
        for attribute in ("d_hidden", "d_head"):
            a, b = getattr(ours, attribute), getattr(theirs, attribute)
            assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max()), f"{attribute}, {what}"
        assert list(ours.metrics) == list(theirs.metrics), what
        for metric, value in theirs.metrics.items():
            assert ours.metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), f"{metric}, {what}"


def test_normalizers(patched: FusedLoss, plain: Any) -> None:  # noqa: F811
    """Training and evaluation, accumulation, steps per generation, processes."""
    for loss_type in LOSS_TYPES:
        for training, accumulation, per_generation, processes in ((True, 1, 1, 1), (True, 3, 6, 4), (False, 3, 6, 2)):
            case = Case(loss_type, training=training, accumulation=accumulation, per_generation=per_generation)
            theirs, ours = both(patched, replace(case, processes=processes, coef=0.2, beta=0.3), plain)
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-6), (loss_type, training)
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-6, nan_ok=True)


def test_nothing_is_trained(patched: FusedLoss, plain: Any) -> None:  # noqa: F811
    """A micro-batch of masked tokens has a loss of 0 with a graph: a rank without one would leave the others waiting."""
    data = replace(plain, completion_mask=torch.zeros_like(plain.completion_mask))
    for loss_type in LOSS_TYPES:
        _, ours = both(patched, Case(loss_type, beta=0.3, coef=0.2, share=0.4), data)
        assert ours.loss == 0 and not ours.d_hidden.any() and not ours.d_head.any()


def test_rows_that_are_projected(patched: FusedLoss, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Prompts, padding and tool tokens never; tokens of advantage 0 once, for the metrics, and never with skip_inactive."""
    from grpo_kernels.vocabulary.hidden import Engine

    data, rows = parity.with_tools(plain), []
    chunks = Engine._chunks
    monkeypatch.setattr(Engine, "_chunks", lambda self, index: rows.append(index.numel()) or chunks(self, index))
    idle = int(data.mask[data.advantages == 0].sum())
    assert idle > 0
    theirs, ours = both(patched, Case("dapo"), data)
    assert rows == [int(data.mask.sum()) - idle, idle]
    rows.clear()
    monkeypatch.setattr(patched, "skip_inactive", True)
    _, skipped = both(patched, Case("dapo"), data)
    assert rows == [int(data.mask.sum()) - idle, 0]
    assert torch.equal(skipped.d_hidden, ours.d_hidden) and torch.equal(skipped.d_head, ours.d_head)
    assert skipped.loss == ours.loss and list(skipped.metrics) == list(theirs.metrics)
    for name in set(theirs.metrics) - {"entropy"}:
        assert skipped.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-5, abs=1e-6), name
    assert abs(skipped.metrics["entropy"] - theirs.metrics["entropy"]) > 1e-4  # of the tokens that were projected
    case = Case("dapo", share=0.4)  # two visits: nothing can be skipped
    theirs, ours = both(patched, case, data)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-6)


def test_columns_of_the_head_are_drawn(patched: FusedLoss, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Values are those of all columns; the gradient has other columns in each micro-batch."""
    monkeypatch.setattr(patched, "sparse_step", 0.0)
    dense = both(patched, Case("dapo"), plain)[1]
    monkeypatch.setattr(patched, "sparse_step", 1 / 16)
    one, other = (both(patched, Case("dapo"), plain)[1] for _ in range(2))
    assert one.loss == pytest.approx(dense.loss, rel=1e-5) and other.loss == one.loss
    for x in (dense, other):
        assert (one.d_head - x.d_head).norm() > 0.01 * dense.d_head.norm()
    assert (one.d_head - dense.d_head).norm() < dense.d_head.norm()


def test_strict_compares_with_trls_arithmetic(patched: FusedLoss, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A denominator that is wrong by a factor, for example after a change in TRL, is noticed at the first step."""
    monkeypatch.setattr(specs, "accumulation", lambda _: 1.0)
    with pytest.raises(RuntimeError, match="TRL's own arithmetic"):
        both(patched, Case("grpo"), plain)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_strict_compares_gradients(patched: FusedLoss, plain: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str) -> None:  # noqa: F811
    """On-policy, with advantages that add up to 0, the loss is 0 whatever it is divided by."""
    advantages = torch.ones_like(plain.advantages)
    advantages[1::2] = -1
    mask = plain.completion_mask.clone()
    mask[:] = mask[0]
    data = replace(plain, advantages=advantages, completion_mask=mask)
    case = Case(loss_type, on_policy=True)
    both(patched, case, data)
    denominator = specs.denominator
    monkeypatch.setattr(specs, "denominator", lambda *args: 2 * denominator(*args))
    with pytest.raises(RuntimeError, match="strict=True, but the "):
        both(patched, case, data)
    if loss_type == "dapo":
        with pytest.raises(RuntimeError, match="gradient of the fused loss with respect to the log-probs"):
            both(patched, case, data)


def test_strict_compares_small_bonuses(patched: FusedLoss, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A wrong entropy bonus is noticed even if it hardly changes the loss."""
    case, objective = Case("dapo", coef=1e-5), specs.objective_of
    both(patched, case, plain)
    double = lambda settings: ("", replace(objective(settings)[1], entropy_coef=2e-5))  # noqa: E731
    monkeypatch.setattr(specs, "objective_of", double)
    with pytest.raises(RuntimeError, match="with respect to the entropies"):
        both(patched, case, plain)


def test_strict_does_not_let_a_nan_pass(patched: FusedLoss, plain: Any) -> None:  # noqa: F811
    """A NaN in the old log-prob of a trained token is one in TRL's loss."""
    old = plain.old.clone()
    old[plain.mask.nonzero()[0].unbind()] = torch.nan
    with pytest.raises(RuntimeError, match="gives nan"):
        both(patched, Case("dapo"), replace(plain, old=old))


def test_fallback_is_counted_and_warns_once(make_trainer: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    other = make_trainer()
    fused, case = patch(other), Case("vespo", "sequence", beta=0.3)
    with pytest.warns(UserWarning, match="left to TRL's own code: VESPO's KL"):
        first = parity.trls(other, case, plain, lambda t, *args: t._compute_loss(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = parity.trls(other, case, plain, lambda t, *args: t._compute_loss(*args))
    assert first.loss == again.loss == parity.trls(other, case, plain).loss
    assert fused.counts == {"TRL: VESPO's KL weighted by the ratio of the sequence": 2}
    monkeypatch.setattr(other, "loss_type", "ppo2")
    with pytest.warns(UserWarning, match="ppo2"), pytest.raises(ValueError, match="Unknown loss type"):
        other._compute_loss(other.model, parity.inputs_of(Case(), plain))


# ---- whole runs


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trl_cases.save_model(tmp_path_factory.mktemp("models") / "qwen2")


def train(path: str, output: Path, cls: Any = GRPOTrainer, evaluate: bool = False, **options: Any) -> Any:
    result = trl_cases.make_trainer(path, output, cls, **options)
    result.train()
    if evaluate:
        result.evaluate()
    return result


def compare(path: str, output: Path, micro_batches: int | None = None, **options: Any) -> tuple[Any, Any]:
    """The trainer of TRL and ours over the same steps: losses, gradient norms and all metrics. (TRL's, ours)"""
    keywords = options.pop("keywords", {})
    theirs = train(path, output, keywords=keywords, **options)
    ours = train(path, output, FusedGRPOTrainer, keywords={"strict": True, **keywords}, **options)
    assert_same_history(history(ours), history(theirs), 2e-4)
    counts, args = ours.fused_loss.counts, ours.args
    evaluations = len(ours.get_eval_dataloader()) if options.get("evaluate") else 0
    assert counts["fused"] - evaluations == (micro_batches or args.max_steps * args.gradient_accumulation_steps)
    assert not any(name.startswith("TRL") for name in counts)
    norms = [entry["grad_norm"] for entry in history(ours) if "grad_norm" in entry]
    assert len(norms) == ours.state.global_step and sum(norm > 1e-2 for norm in norms) > len(norms) / 2
    return theirs, ours


OFF_POLICY = {"num_iterations": 2, "epsilon": 0.1}


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_ten_steps(path: str, tmp_path: Path, loss_type: str, beta: float) -> None:
    """Every loss type, with and without KL, on the second iteration over the same completions as well."""
    options = {**OFF_POLICY, "loss_type": loss_type, "beta": beta}
    if loss_type == "cispo":
        options["epsilon_high"] = 1.2
    if beta:
        options |= {"gradient_accumulation_steps": 2, "mask_truncated_completions": True}
    if loss_type == "luspo":
        options |= {"importance_sampling_level": "sequence", "learning_rate": 1e-3}
    _, ours = compare(path, tmp_path, **options)
    assert ours.fused_loss.counts["scored"] > 0
    logged = history(ours)[:-1]
    if beta:
        assert max(entry["kl"] for entry in logged) > 1e-3
    if loss_type in parity.CLIPPED:
        assert max(entry["clip_ratio/region_mean"] for entry in logged) > 0.02


RUNS: dict[str, dict[str, Any]] = {
    "entropy quantile": {**OFF_POLICY, "top_entropy_quantile": 0.3, "gradient_accumulation_steps": 2},
    "entropy bonus": {**OFF_POLICY, "entropy_coef": 0.05, "gradient_accumulation_steps": 2},
    "both, and KL": {**OFF_POLICY, "top_entropy_quantile": 0.3, "entropy_coef": 0.05, "beta": 0.1},
    "adaptive entropy": {
        "use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_target": 3.05, "gradient_accumulation_steps": 2,
        "entropy_coef_delta": 0.01,
    },
    "accumulation over generations": {"gradient_accumulation_steps": 2, "steps_per_generation": 6, "beta": 0.1},
    # 128 answers in 16 micro-batches, the last of which is alone in its window
    "window cut short": {
        "gradient_accumulation_steps": 3, "steps_per_generation": 2, "steps": -1, "num_train_epochs": 1.0, "micro_batches": 16,
    },
    "off-policy mask": {**OFF_POLICY, "off_policy_mask_threshold": 0.02, "num_iterations": 3},
    "two-sided clip, plain KL": {**OFF_POLICY, "delta": 1.15, "beta": 0.1, "use_bias_correction_kl": False},
    "gspo": {**OFF_POLICY, "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "beta": 0.1},
    "gradient checkpointing": {**OFF_POLICY, "gradient_checkpointing": True, "beta": 0.1},
    "reentrant checkpointing": {
        **OFF_POLICY, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "truncated completions": {**OFF_POLICY, "mask_truncated_completions": True},
    "head in fp32": {"cast_lm_head_to_fp32": True, "beta": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_options(path: str, tmp_path: Path, name: str) -> None:
    compare(path, tmp_path, **RUNS[name])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "bnpo"])
def test_skipped_tokens_leave_trls_metrics_as_they_are(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    """Micro-batches in which no answer has an advantage, as of prompts that are too easy: entropy and clip ratios are logged
    as TRL does. And those in which some have: all but the entropy is TRL's."""
    kind = {**OFF_POLICY, "loss_type": loss_type, "steps": 4, "logging_steps": 2, "keywords": {}}
    if loss_type == "cispo":
        kind["epsilon_high"] = 1.2
    reward = trl_cases.reward
    for easy in (range(4), range(1)):  # all prompts, or one of four

        def some_equal(prompts: list[str], completions: list[str], easy: range = easy, **_: Any) -> list[float]:
            return [
                1.0 if trl_cases.PROMPTS.index(prompt) in easy else score
                for prompt, score in zip(prompts, reward(completions), strict=True)
            ]

        monkeypatch.setattr(trl_cases, "reward", some_equal)
        theirs = train(path, tmp_path, **kind)
        ours = train(path, tmp_path, FusedGRPOTrainer, **kind | {"keywords": {"strict": True, "skip_inactive": True}})
        got, want = history(ours), history(theirs)
        assert [list(entry) for entry in got] == [list(entry) for entry in want]
        assert all(entry["entropy"] > 2 for entry in got[:-1])
        if easy == range(1):
            assert any(abs(a["entropy"] - b["entropy"]) > 1e-4 for a, b in zip(got[:-1], want[:-1], strict=True))
            got, want = ([{k: v for k, v in entry.items() if k != "entropy"} for entry in x] for x in (got, want))
        assert_same_history(got, want, 2e-4)


def test_evaluation(path: str, tmp_path: Path) -> None:
    """Under no_grad and with TRL's other denominators; no gradient is made."""
    for loss_type in ("dapo", "grpo"):
        _, ours = compare(path, tmp_path, evaluate=True, steps=2, loss_type=loss_type, beta=0.1, gradient_accumulation_steps=2)
        assert "eval_loss" in history(ours)[-1] and history(ours)[-1]["eval_kl"] > 0


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied, with a bias": ("Phi", {"tie_word_embeddings": False, "num_key_value_heads": 2}),
    "softcap": ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16}),
    "scaled logits": ("Granite", {"logits_scaling": 4.0}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path: Path, name: str) -> None:
    kind, changes = MODELS[name]
    theirs, _ = compare(trl_cases.save_model(tmp_path / "model", kind, **changes), tmp_path, **OFF_POLICY, beta=0.1)
    head = theirs.model.get_output_embeddings()
    assert (head.bias is not None) == (name == "untied, with a bias")


def test_mixture_of_experts(tmp_path: Path) -> None:
    """The load-balancing loss is added with its gradient, as TRL does."""
    model = trl_cases.save_model(
        tmp_path / "model", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16,
        decoder_sparse_step=1, router_aux_loss_coef=0.1, norm_topk_prob=True,
    )  # fmt: skip
    theirs, ours = compare(model, tmp_path, **OFF_POLICY, beta=0.1, gradient_accumulation_steps=2)
    assert theirs.aux_loss_enabled and history(ours)[0]["aux_loss"] > 0.1
    without = train(model, tmp_path, **OFF_POLICY, beta=0.1, gradient_accumulation_steps=2, router_aux_loss_coef=0.0)
    assert abs(history(without)[0]["grad_norm"] - history(ours)[0]["grad_norm"]) > 1e-3


def test_images(patched: FusedLoss) -> None:
    """Other inputs of a model than tokens reach the backbone: loss and gradients of a model with images."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=39, vision_feature_layer=-1)
    model = LlavaForConditionalGeneration(config)
    utils.add_fused_lm_head(model, temperature=parity.TEMPERATURE, outputs=("log_probs", "entropy"))
    g = torch.Generator().manual_seed(1)
    prompt, ids = torch.full((4, 5), 39), torch.randint(2, 38, (4, 6), generator=g)
    prompt[:, 4] = 3
    inputs = {
        "prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": ids,
        "completion_mask": torch.ones_like(ids), "advantages": torch.tensor([1.0, -0.5, 0.3, -0.8]),
        "old_per_token_logps": -3.7 + 0.2 * torch.randn(ids.shape, generator=g), "num_items_in_batch": torch.tensor(24),
        "pixel_values": torch.randn(4, 3, 8, 8, generator=g), "num_images": [1] * 4,
    }  # fmt: skip
    results = []
    for loss_of in (functools.partial(GRPOTrainer._compute_loss, patched.trainer), patched.trainer._compute_loss):
        if results:
            Forward(model, patched.counts).install()
        model.zero_grad()
        loss = loss_of(model, dict(inputs))
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    patched.trainer._metrics["train"].clear()
    assert (
        len(results[0]) == len(results[1]) and model.model.vision_tower.embeddings.patch_embedding.weight.grad.abs().sum() > 0
    )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


def test_bf16_autocast(path: str, tmp_path: Path) -> None:
    """fp32 weights under autocast: hidden states arrive as bf16, and the first step is the same but for their rounding."""
    theirs = train(path, tmp_path, steps=2, bf16=True, beta=0.1)
    ours = train(path, tmp_path, FusedGRPOTrainer, keywords={"strict": True}, steps=2, bf16=True, beta=0.1)
    first, want = history(ours)[0], history(theirs)[0]
    assert ours.fused_loss.counts["fused"] == 2
    assert first["grad_norm"] == pytest.approx(want["grad_norm"], rel=3e-2)
    assert first["entropy"] == pytest.approx(want["entropy"], rel=1e-2)
    assert ours.model.get_output_embeddings().weight.dtype == torch.float32


# ---- PEFT


@pytest.mark.parametrize("trained_head", [False, True])
def test_lora(path: str, tmp_path: Path, trained_head: bool) -> None:
    """Adapters in the body, where the reference is the model without them; and a copy of the head that is trained whole."""
    peft = pytest.importorskip("peft")

    def config() -> Any:
        modules = ["lm_head"] if trained_head else None
        return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=modules, init_lora_weights="gaussian")

    untied = trl_cases.save_model(tmp_path / "model", tie_word_embeddings=False) if trained_head else path
    _, ours = compare(untied, tmp_path, **OFF_POLICY, beta=0.1, keywords={"peft_config": config()}, learning_rate=5e-2)
    weight = ours.model.get_base_model().get_output_embeddings().weight
    assert weight.requires_grad == trained_head and history(ours)[-2]["kl"] > 1e-4


def test_lora_on_the_head_is_refused(path: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain_trainer = trl_cases.make_trainer(path, tmp_path)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["lm_head"]), plain_trainer.model)
    with pytest.raises(ValueError, match=r"carries an adapter.*target_modules"):
        patch(plain_trainer)


def test_trainable_tokens_of_a_tied_head_are_refused(path: str, tmp_path: Path) -> None:
    """PEFT adds them to the head's weight as well, at each call: not the weight that an optimizer or FSDP knows."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5, 6])
    tuned = trl_cases.make_trainer(path, tmp_path, keywords={"peft_config": config})
    with pytest.raises(ValueError, match="without trainable_token_indices"):
        patch(tuned)
    assert "fused_loss" not in vars(tuned)


def test_a_fused_head_is_accepted(path: str, tmp_path: Path) -> None:
    fused = trl_cases.make_trainer(path, tmp_path, steps=1, prepare=lambda model: FusedLMHead.install(model) and model)
    patch(fused, strict=True)
    fused.train()
    assert fused.fused_loss.counts["fused"] == 1


def test_other_heads_are_refused(path: str, tmp_path: Path) -> None:
    """By looking at the module: an adapter around a Linear, a module that is no Linear, a forward of its own, a quantised
    weight."""
    plain_trainer = trl_cases.make_trainer(path, tmp_path)

    class Adapter(torch.nn.Module):
        def __init__(self, base_layer: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.weight = base_layer.weight
            self.forward = base_layer.forward

    class Normed(torch.nn.Module):
        weight = torch.nn.Parameter(torch.ones(4, 4))

    class Scaled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    rebound, quantised = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    rebound.forward = Scaled(4, 4).forward
    quantised.weight = torch.nn.Parameter(quantised.weight.to(torch.int8), requires_grad=False)
    linear = plain_trainer.model.lm_head
    for head, reason in (
        (Adapter(linear), "carries an adapter"), (Normed(), "not that of torch.nn.Linear"), (quantised, "int8"),
        (Scaled(4, 4), "not that of torch.nn.Linear"), (rebound, "not that of torch.nn.Linear"),
    ):  # fmt: skip
        plain_trainer.model.lm_head = head
        with pytest.raises(ValueError, match=reason):
            patch(plain_trainer)
        assert "fused_loss" not in vars(plain_trainer) and "_compute_loss" not in vars(plain_trainer)
    plain_trainer.model.lm_head = linear
    fused = patch(plain_trainer)
    plain_trainer.model.lm_head = Adapter(linear)  # and again at each call
    with pytest.raises(ValueError, match="carries an adapter"):
        plain_trainer.train()
    fused.undo()


# ---- patching and undoing


def test_undo(path: str, tmp_path: Path) -> None:
    """Before training and after it, nothing is left; the trainer then goes on as TRL's own."""
    theirs = train(path, tmp_path, **OFF_POLICY, beta=0.1)
    undone = trl_cases.make_trainer(path, tmp_path, **OFF_POLICY, beta=0.1)
    before = [dict(vars(undone)), undone.model.forward, undone.ref_model.forward]
    fused = patch(undone)
    assert undone.fused_loss is fused and undone.model.forward != before[1]
    fused.undo()
    assert [dict(vars(undone)), undone.model.forward, undone.ref_model.forward] == before
    undone.train()
    assert history(undone)[:-1] == history(theirs)[:-1] and not fused.counts
    with pytest.raises(RuntimeError, match="undone already"):
        fused.undo()
    fused = patch(undone)  # after train(), when accelerate has prepared the model
    undone.train()
    assert fused.counts["fused"] > 0
    fused.undo()
    assert undone.model.forward == before[1]


def test_undo_below_accelerates_forward(path: str, tmp_path: Path) -> None:
    """Under autocast accelerate wraps the forward that it finds, ours. Undone, ours hands everything on; and a patch that
    comes later finds TRL's forward below accelerate's."""
    early = train(path, tmp_path, FusedGRPOTrainer, bf16=True, steps=2)
    fused = early.fused_loss
    assert hasattr(early.model, "_original_forward") and fused.counts["fused"] == 2
    fused.undo()
    early.train()
    assert fused.counts["fused"] == 2 and "fused_loss" not in vars(early)
    late = train(path, tmp_path, bf16=True, steps=2)
    fused = patch(late, strict=True)
    late.train()
    assert fused.counts["fused"] == 2
    fused.undo()


def test_patched_again_below_accelerates_forward(path: str, tmp_path: Path) -> None:
    """accelerate goes on calling a forward of ours that was undone; the next patch looks through it for TRL's, any number of
    times, and does not take one that is still in use."""
    trained, steps = train(path, tmp_path, FusedGRPOTrainer, bf16=True, steps=1), []
    trained.fused_loss.undo()
    for _ in range(2):
        fused = patch(trained, strict=True)
        with pytest.raises(RuntimeError, match="not TRL's fused LM head"):
            Forward(trained.model, fused.counts)
        trained.train()
        steps.append(fused.counts["fused"])
        fused.undo()
    assert steps == [1, 1]


def test_what_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_trainer = trl_cases.make_trainer(path, tmp_path)
    fused = patch(plain_trainer)
    with pytest.raises(RuntimeError, match="patched already"):
        patch(plain_trainer)
    fused.undo()
    with pytest.raises(TypeError, match="GRPOTrainer"):
        patch(plain_trainer.model)
    with pytest.raises(RuntimeError, match="_compute_loss of its own"):
        patch(trl_cases.make_trainer(path, tmp_path, GMPOTrainer))
    other = trl_cases.make_trainer(path, tmp_path)
    other.model.forward = types.MethodType(type(other.model).forward, other.model)  # as another package's patch has it
    with pytest.raises(RuntimeError, match="not TRL's fused LM head"):
        patch(other)
    shared = trl_cases.make_trainer(path, tmp_path)
    shared.model = plain_trainer.model
    fused = patch(plain_trainer)
    with pytest.raises(RuntimeError, match="not TRL's fused LM head"):  # a model that another trainer has patched
        patch(shared)
    fused.undo()


def untested_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "1.99.0")
    monkeypatch.delenv(OVERRIDE, raising=False)


def test_a_version_that_was_not_tested_is_compared_on_the_first_step(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same arithmetic: one message, and the run is TRL's, dropout included. TRL's own head is called in the first step
    alone."""
    want = trl_cases.make_trainer(path, tmp_path, steps=3, beta=0.05)
    want.train()
    untested_trl(monkeypatch)
    one = trl_cases.make_trainer(path, tmp_path, steps=3, beta=0.05)
    fused, own = patch(one), []
    monkeypatch.setattr(fused, "_trls_own", lambda *args, theirs=fused._trls_own: own.append(theirs(*args)) or own[-1])
    with pytest.warns(UserWarning, match=r"trl 1\.99\.0 was not tested.*_compute_loss.*They agree, ours goes on") as said:
        one.train()
    assert len([w for w in said if "They agree" in str(w.message)]) == 1 and len(own) == 1
    trl_cases.assert_same_history(trl_cases.history(one), trl_cases.history(want), 2e-4)
    for options, variable in (({"any_version": True}, "0"), ({}, "1")):
        monkeypatch.setenv(OVERRIDE, variable)
        fused = patch(trl_cases.make_trainer(path, tmp_path), **options)
        assert not fused.trial.pending("GRPOTrainer._compute_loss")


@pytest.mark.parametrize("what", ["loss", "slopes", "log-probs"])
def test_other_arithmetic_of_a_version_that_was_not_tested_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    theirs, own_head = GRPOTrainer._compute_loss, utils._ChunkedLogProbFunction

    def changed(own: Any, model: Any, inputs: Any) -> Tensor:
        loss = theirs(own, model, inputs)
        return loss + 0.01 if what == "loss" else loss + 0.02 * (loss - loss.detach()) if what == "slopes" else loss

    class Head(own_head):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return own_head.forward(ctx, 1.01 * hidden, *args, **kwargs)

    untested_trl(monkeypatch)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", changed)
    if what == "log-probs":
        monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Head)
    one = trl_cases.make_trainer(path, tmp_path, steps=1, beta=0.05)
    before = [p.clone() for p in one.model.parameters()]
    patch(one)
    word = {"loss": "the fused loss is", "slopes": "the gradient of the fused loss", "log-probs": "log-probs and entropies"}[
        what
    ]
    with pytest.raises(RuntimeError, match=rf"trl 1\.99\.0 was not tested.*is not what it was: {word}.*any_version=True"):
        one.train()
    assert "fused_loss" not in vars(one) and "_compute_loss" not in vars(one)  # taken off
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, one.model.parameters(), strict=True))


def test_the_fused_head_of_a_version_that_was_not_tested(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untested_trl(monkeypatch)
    one = trl_cases.make_trainer(path, tmp_path, steps=2)
    with fused_lm_head(strict=True) as slot, pytest.warns(UserWarning, match="They agree"):
        one.train()
    assert slot.counts == {"fused": 2}


def test_another_fused_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own_head = utils._ChunkedLogProbFunction

    class Head(own_head):  # type: ignore[misc, valid-type]
        @staticmethod
        @functools.wraps(own_head.forward)
        def forward(ctx: Any, hidden: Tensor, *args: Any) -> Any:
            return own_head.forward(ctx, 1.01 * hidden, *args)

    untested_trl(monkeypatch)
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Head)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    given = hidden, weight, None, torch.arange(6), 0.9, 256, None, 1.0, ("entropy",)
    with (
        fused_lm_head() as slot,
        pytest.raises(RuntimeError, match=r"trl 1\.99\.0.*log_probs is not what it was: values, tensor 0"),
    ):
        utils._ChunkedLogProbFunction.apply(*given)
    assert utils._ChunkedLogProbFunction is Head and not slot.counts and hidden.grad is None


def test_generate_and_plain_calls_are_untouched(path: str, tmp_path: Path) -> None:
    plain_trainer = trl_cases.make_trainer(path, tmp_path)
    model, ids = plain_trainer.model, torch.tensor([[3, 4, 5, 6]])
    want = [model(ids).logits, model(ids, labels=ids).loss, model.generate(ids, do_sample=False, max_new_tokens=5)]
    fused = patch(plain_trainer)
    got = [model(ids).logits, model(ids, labels=ids).loss, model.generate(ids, do_sample=False, max_new_tokens=5)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="model_kwargs"):
        model.generate(ids, max_new_tokens=1, grpo_typo=1)
    assert not fused.counts
    fused.undo()


def test_scored_log_probs(path: str, tmp_path: Path) -> None:
    """Calls without gradients, and calls that TRL does not make: with gradients, or with shifted labels."""
    plain_trainer = trl_cases.make_trainer(path, tmp_path, beta=0.1)
    ids = torch.tensor([[0, 3, 4, 5, 6], [2, 3, 9, 5, 0]])
    labels = ids.masked_fill(ids == 0, -100)
    labels[:, 1] = -100
    calls = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels, "fused_lm_head": True}
    for model, entropy in ((plain_trainer.model, True), (plain_trainer.ref_model, False)):
        with torch.no_grad():
            want = model(**calls)
            fused = patch(plain_trainer)
            got = model(**calls)
        torch.testing.assert_close(got.log_probs, want.log_probs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.label_mask, want.label_mask)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
        assert (got.entropy is not None) == (want.entropy is not None) == entropy
        if entropy:
            torch.testing.assert_close(got.entropy, want.entropy, rtol=1e-5, atol=1e-6)
        assert fused.counts == {"scored": 1}
        model(**calls)  # with gradients
        with torch.no_grad():
            torch.testing.assert_close(model(**calls, num_items_in_batch=11).loss, want.loss * want.label_mask.sum() / 11)
            fused.counts["scored"] -= 1
            model(**{**calls, "labels": None, "shift_labels": labels})
        assert fused.counts == {"scored": 1}
        fused.undo()


# ---- the slot of the fused LM head


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*shape, generator=g) for shape in ((9, 16), (33, 16), (33,)))
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), torch.randint(0, 33, (9,), generator=g)


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy")])
@pytest.mark.parametrize("softcap, scale", [(None, 1.0), (1.5, 0.3)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_slot_is_trls_function(outputs: tuple[str, ...], softcap: float | None, scale: float, with_bias: bool) -> None:
    """Values and gradients, for each selection of outputs: as far from TRL's function in float64 as that in fp32 is, at most."""
    results = []
    with fused_lm_head(strict=True) as slot:
        for function, dtype in (
            (utils._ChunkedLogProbFunction, torch.float32),  # the slot
            (ChunkedLogProbFunction, torch.float32),
            (ChunkedLogProbFunction, torch.float64),
        ):
            hidden, weight, bias, targets = operands(dtype)
            of = [hidden, weight, bias] if with_bias else [hidden, weight]
            out = function.apply(hidden, weight, bias if with_bias else None, targets, 0.8, 7, softcap, scale, outputs)
            assert len(out) == 5 and out[2:] == (None, None, None) and (out[1] is not None) == ("entropy" in outputs)
            upstream = torch.linspace(-1, 1, 9)
            loss = (out[0] * upstream).sum() + (0 if out[1] is None else (out[1] * upstream.flip(0)).sum())
            results.append([*(x for x in out[:2] if x is not None), *torch.autograd.grad(loss, of)])
    for ours, theirs, exact in zip(*results, strict=True):
        assert_no_worse(ours, theirs, exact, "slot")
    assert slot.counts == {"fused": 1}


def test_slot_labels_dtypes_and_no_rows() -> None:
    apply = trl_head.log_probs
    hidden, weight, _, targets = operands()
    targets[3] = -100
    logps, entropy, *_ = apply(hidden, weight, None, targets, 1.0, 7, outputs=("log_probs", "entropy"))
    assert logps[3] == 0 and entropy[3] == 0
    (d_hidden,) = torch.autograd.grad(logps.sum() + entropy.sum(), hidden)
    assert not d_hidden[3].any() and d_hidden[2].any()

    with torch.autocast("cpu", torch.bfloat16):  # fp32 master weights
        logps = apply(hidden, weight, None, targets.clamp(min=0), 1.0, 7, outputs=("log_probs",))[0]
        d_weight = torch.autograd.grad(logps.sum(), weight)[0]
    exact = apply(hidden, weight, None, targets.clamp(min=0), 1.0, 7, outputs=("log_probs",))[0]
    assert logps.dtype == d_weight.dtype == torch.float32
    if cpu_products.available() is None:  # elsewhere fp32 is the fastest arithmetic, and nothing is rounded
        assert not torch.equal(logps, exact)
    torch.testing.assert_close(logps, exact, rtol=0, atol=0.1)

    none = apply(hidden[:0], weight, None, targets[:0], 1.0, 7, outputs=("log_probs",))[0]
    assert none.shape == (0,) and not torch.autograd.grad(none.sum(), weight)[0].any()


def test_slot_makes_the_statistics_of_sft_and_wpo() -> None:
    """`is_top1` feeds SFT's mean_token_accuracy, `log_sum_sq_probs` the weights of WPO; neither has a gradient."""
    hidden, weight, bias, targets = operands()
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "is_top1")
    logits = torch.nn.functional.linear(hidden, weight, bias).detach()
    targets = targets.clone()
    targets[:5] = logits[:5].argmax(-1)
    arguments = (hidden, weight, bias, targets, 0.8, 7, None, 1.0, outputs)
    want = ChunkedLogProbFunction.apply(*arguments)
    with fused_lm_head(strict=True) as slot:
        got = utils._ChunkedLogProbFunction.apply(*arguments)
    assert slot.counts == {"fused": 1} and got[3] is want[3] is None
    counted = targets >= 0
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(ours[counted], theirs[counted], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[4][counted], want[4][counted]) and got[4][:5][counted[:5]].all() and not got[4][~counted].any()
    assert not got[2].requires_grad and not got[4].requires_grad and not got[4][counted].all()
    gradients = [torch.autograd.grad((x[0] + x[1])[counted].sum(), hidden)[0] for x in (got, want)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_slot_hands_over_what_it_does_not_make() -> None:
    hidden, weight, bias, targets = operands()
    every = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    wide = [x.detach().double() for x in (hidden, weight, bias)]
    sharded = weight.detach().clone()
    sharded.ds_id = 3
    for arguments, reason in (
        ((hidden, weight, bias, targets, 0.8, 7, None, 1.0, every), "mean_logits asked for"),
        ((*wide, targets, 0.8, 7, None, 1.0, ("entropy",)), "float64"),
        ((hidden, weight, bias, targets, 0.8, 7, None, 0.0, ("entropy",)), "logit_scale is 0"),
        ((hidden, sharded, bias, targets, 0.8, 7, None, 1.0, ("entropy",)), "ZeRO-3"),
    ):
        with fused_lm_head() as slot:
            got = utils._ChunkedLogProbFunction.apply(*arguments)
        want = ChunkedLogProbFunction.apply(*arguments)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))
        ((name, count),) = slot.counts.items()
        assert name.startswith("TRL: ") and reason in name and count == 1
        with pytest.raises(RuntimeError, match=r"strict=True, but log_probs is left to TRL"), fused_lm_head(strict=True):
            utils._ChunkedLogProbFunction.apply(*arguments)


def test_slot_in_a_run(path: str, tmp_path: Path) -> None:
    """Under TRL's own loss, with all forwards through it; and under another trainer's, GMPO's."""
    for cls in (GRPOTrainer, GMPOTrainer):
        options = {**OFF_POLICY, "beta": 0.1, "loss_type": "grpo", "entropy_coef": 0.05}
        theirs = train(path, tmp_path, cls, **options)
        with fused_lm_head(strict=True) as slot:
            ours = train(path, tmp_path, cls, **options)
        assert_same_history(history(ours), history(theirs), 2e-4)
        assert slot.counts["fused"] == 10 + 5 * 2  # losses; old and reference of five generations
        assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction


def test_slot_projects_no_padding_on_a_cpu(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There TRL hands prompts and padding over as well, where a Triton device gets the completions' rows only."""
    rows, project = [], trl_head.linear_logprobs

    def counting(hidden: Tensor, *args: Any, **keywords: Any) -> Any:
        rows.append(hidden.shape[0])
        return project(hidden, *args, **keywords)

    monkeypatch.setattr(trl_head, "linear_logprobs", counting)
    model = trl_cases.make_trainer(path, tmp_path).model
    ids = torch.tensor([[0, 3, 4, 5, 6], [2, 3, 9, 5, 0]])
    labels = torch.tensor([[-100, -100, 4, 5, 6], [-100, -100, 9, -100, -100]])
    calls = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels, "fused_lm_head": True}
    found = []
    for context in (nullcontext, fused_lm_head):
        with context() as slot:
            out = model(**calls)
        out.log_probs.sum().backward()
        found.append([out.log_probs.detach(), out.entropy.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert rows == [4] and slot.counts == {"fused": 1}
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    rows.clear()
    assert torch.equal(model(**calls).log_probs, found[0][0]) and not rows  # TRL's own again, row by row as before


def test_slot_is_taken_once() -> None:
    slot = fused_lm_head()
    with pytest.raises(RuntimeError, match="ours already"):
        fused_lm_head()
    slot.undo()
    slot.undo()
    with fused_lm_head() as slot:
        slot.undo()
    assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction
    slot = fused_lm_head()
    ours = utils._ChunkedLogProbFunction
    for error, shown in ((None, pytest.raises(RuntimeError, match="not ours any more")), (ZeroDivisionError(), pytest.warns())):
        utils._ChunkedLogProbFunction = copy
        with shown:  # the body's error comes first
            slot.__exit__(error and type(error), error, None)
        with pytest.raises(RuntimeError, match="another package has taken the slot"):
            fused_lm_head()
    utils._ChunkedLogProbFunction = ours
    slot.undo()
    assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction


def test_a_strict_run_without_a_fused_call_is_an_error() -> None:
    """As with a TRL whose trainers imported the function under a name of their own before it was replaced."""
    with pytest.raises(RuntimeError, match=r"no call was fused in this block: TRL did not call trl\.trainer\.utils\._Chunked"):
        with fused_lm_head(strict=True):
            pass
    with pytest.raises(ZeroDivisionError), fused_lm_head(strict=True):  # the body's error, not this one
        1 / 0  # noqa: B018
    with fused_lm_head():
        pass
    assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction


class Older(torch.autograd.Function):
    """The arguments and results of TRL 1.14's function, in float64."""

    @staticmethod
    def forward(
        ctx, last_hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0
    ):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, temperature: float, _: int, softcap: float, scale: float
    ) -> tuple[Tensor, Tensor]:
        logits = scale * (hidden.double() @ weight.double().T + bias.double())
        logps = torch.log_softmax(softcap * torch.tanh(logits / softcap) / temperature, -1)
        return logps.gather(1, targets[:, None])[:, 0].float(), -(logps.exp() * logps).sum(-1).float()


def test_the_slot_of_trl_1_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two results, log-probs and entropies, both with slopes; compared in the first call under another version."""
    untested_trl(monkeypatch)
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Older)
    results = []
    with fused_lm_head(strict=True) as slot:
        for function in (Older, utils._ChunkedLogProbFunction):
            hidden, weight, bias, targets = operands()
            with pytest.warns(UserWarning, match="They agree") if function is not Older else nullcontext():
                logps, entropy = function.apply(hidden, weight, bias, targets, 0.8, 7, 1.5, 0.3)
            upstream = torch.linspace(-1, 1, 9)
            loss = (logps * upstream).sum() + (entropy * upstream.flip(0)).sum()
            results.append([logps, entropy, *torch.autograd.grad(loss, (hidden, weight, bias))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    assert slot.counts == {"fused": 1} and utils._ChunkedLogProbFunction is Older


def test_a_trl_without_the_fused_lm_head_names_the_obstacle(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any_version=True: a function of other arguments, and models without a fused head in their forward."""
    plain_trainer = trl_cases.make_trainer(path, tmp_path)

    class Unknown(torch.autograd.Function):
        @staticmethod
        def forward(ctx, last_hidden, weight, bias, targets, temperature):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    monkeypatch.setattr(trl, "__version__", "1.14.2")
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Unknown)
    with pytest.raises(
        RuntimeError, match=r"trl is 1\.14\.2.*takes \(last_hidden.*temperature\), but ours.*outputs.*TRL 1\.16"
    ):
        fused_lm_head(any_version=True)
    assert utils._ChunkedLogProbFunction is Unknown
    monkeypatch.delattr(utils, "add_fused_lm_head")
    for make in (lambda: patch(plain_trainer, any_version=True), lambda: FusedGRPOTrainer(any_version=True)):
        with pytest.raises(
            RuntimeError,
            match=r"trl is 1\.14\.2.*no fused LM head.*install TRL 1\.16.*1\.14.*trl_head\.fused_lm_head.*0\.17 to 1\.13",
        ):
            make()
    assert "fused_loss" not in vars(plain_trainer)


def test_nothing_is_imported_or_patched() -> None:
    """The core knows no integration, and importing one neither needs TRL nor touches it."""
    program = (
        "import sys, grpo_kernels, grpo_kernels.losses, grpo_kernels.distributed\n"
        "assert not any('integrations' in name for name in sys.modules)\n"
        "import grpo_kernels.integrations.trl\n"
        "assert 'trl' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert FusedGRPOTrainer.__module__ == "grpo_kernels.integrations.trl" and issubclass(FusedGRPOTrainer, GRPOTrainer)
    with pytest.raises(AttributeError, match="Trainer2"):
        from grpo_kernels.integrations import trl as module

        module.Trainer2  # noqa: B018
    assert transformers.__version__  # imported here, not there
