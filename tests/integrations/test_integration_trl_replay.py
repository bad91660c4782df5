"""TRL's trainer over the sets that its tokens were sampled from: old policy, reference and loss, against float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.16.0")

import transformers

from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch
from support import trl_cases
from support.trl_cases import EOS, PAD

Tensor = torch.Tensor

TOP_K, TEMPERATURE = 4, 0.9


def sampled(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func that samples from the TOP_K largest logits of the policy, and records them. Completions of all lengths."""
    ids = trainer._tokenizer(prompts)["input_ids"]
    out: dict[str, Any] = {"prompt_ids": ids, "completion_ids": [], "logprobs": [], "sampling_mask": []}
    g = torch.Generator().manual_seed(7)
    for row, prompt in enumerate(ids):
        text, logprobs, kept = list(prompt), [], []
        for _ in range(2 + row % 5):
            with torch.no_grad():
                logits = trainer.model(input_ids=torch.tensor([text])).logits[0, -1] / TEMPERATURE
            top = logits.topk(TOP_K)
            at = int(torch.multinomial(top.values.softmax(0), 1, generator=g))
            text.append(int(top.indices[at]))
            logprobs.append(float(top.values.log_softmax(0)[at]))
            kept.append(top.indices.tolist())
            if text[-1] == EOS:
                break
        out["completion_ids"].append(text[len(prompt) :])
        out["logprobs"].append(logprobs)
        out["sampling_mask"].append(kept)
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trl_cases.save_model(tmp_path_factory.mktemp("replay") / "model")


def made(path: str, folder: Path, replay: bool = True, **options: Any) -> Any:
    """Two steps for each generation, so that old log-probs are scored."""
    keywords = {"rollout_func": options.pop("rollout_func", sampled)}
    cls = functools.partial(FusedGRPOTrainer, replay=replay, strict=True)
    return trl_cases.make_trainer(
        path, folder, cls, steps_per_generation=2, beta=options.pop("beta", 0.1), keywords=keywords, **options
    )


@pytest.fixture
def model_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    yield


def exact(model: Any, inputs: dict[str, Tensor], kept: Tensor | None) -> Tensor:
    """Log-probs of the completions in float64, over kept [B, T, K], whose padding is -1."""
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    T = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1].double() / TEMPERATURE
    if kept is not None:
        keep = torch.zeros(*logits.shape[:2], logits.shape[2] + 1, dtype=torch.bool)
        keep = keep.scatter(2, kept.long() % keep.shape[2], True)[..., :-1]
        logits = logits.masked_fill(~keep & keep.any(-1, keepdim=True), -torch.inf)
    return logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]


def test_log_probs_ratio_and_gradient(path: str, tmp_path: Path, model_outputs: None) -> None:
    trainer = made(path, tmp_path)
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": p} for p in ("ab", "bcd", "c", "dd") for _ in range(4)])
    mask, policy = inputs["completion_mask"].bool(), transformers.AutoModelForCausalLM.from_pretrained(path).double()
    record = sampled([p for p in ("ab", "bcd", "c", "dd") for _ in range(4)], trainer)
    for b, kept in enumerate(record["sampling_mask"]):
        assert inputs["completion_ids"][b, : len(kept)].tolist() == record["completion_ids"][b]
        assert inputs["kept_ids"][b, : len(kept)].tolist() == kept and (inputs["kept_ids"][b, len(kept) :] == -1).all()
    with torch.no_grad():
        over_sets, over_all = (exact(policy, inputs, kept)[mask] for kept in (inputs["kept_ids"], None))
    sampler = torch.tensor([x for row in record["logprobs"] for x in row]).double()
    old, ref = (inputs[f"{name}_per_token_logps"][mask].double() for name in ("old", "ref"))
    torch.testing.assert_close(old, over_sets, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(old, sampler, rtol=1e-5, atol=1e-5)  # ratio 1
    torch.testing.assert_close(ref, over_sets, rtol=1e-5, atol=1e-5)  # the reference is the same model still
    assert (over_all - sampler).abs().mean() > 0.1  # as it would be

    with torch.no_grad():  # the step that makes the samples off-policy
        for ours, theirs in zip(trainer.model.parameters(), policy.parameters(), strict=True):
            ours += 0.05 * torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
            theirs.copy_(ours)
    trainer.current_gradient_accumulation_steps = 1
    inputs["advantages"] = torch.linspace(-1, 1, 16)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    x = exact(policy, inputs, inputs["kept_ids"])
    d, e = x - inputs["old_per_token_logps"].double(), inputs["ref_per_token_logps"].double() - x
    A, r = inputs["advantages"].double()[:, None], d.exp()
    args = trainer.args
    terms = -torch.minimum(r * A, r.clamp(1 - args.epsilon, 1 + args.epsilon) * A)
    kl = (e.exp() - e - 1) * (r if args.use_bias_correction_kl else 1.0)
    want = torch.where(mask, terms + args.beta * kl, 0.0).sum() / (float(inputs["num_items_in_batch"]) / 2)
    want.backward()
    assert args.loss_type == "dapo" and float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-4)
    for (name, ours), theirs in zip(trainer.model.named_parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-5 * float(theirs.grad.abs().max()), msg=name
        )
    assert trainer.fused_loss.counts == {"scored": 4, "fused": 1}  # old policy and reference, in two batches each


def test_training_runs_and_can_be_undone(path: str, tmp_path: Path, model_outputs: None) -> None:
    """Several micro-batches of one generation, shuffled by TRL; strict mode compares each with TRL's arithmetic."""
    trainer = made(path, tmp_path, steps=4, num_iterations=2)
    trainer.train()
    assert trainer.fused_loss.counts["fused"] == 4
    first = trainer.state.log_history[0]
    assert first["clip_ratio/region_mean"] == 0 and 0 < first["entropy"] <= torch.tensor(float(TOP_K)).log() + 1e-6
    trainer.fused_loss.undo()
    assert not {"_generate", "_generate_and_score_completions", "_get_per_token_logps_and_entropies"} & set(vars(trainer))
    patch(trainer).undo()


def test_records_that_do_not_fit(path: str, tmp_path: Path, model_outputs: None) -> None:
    def without(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {name: x for name, x in sampled(prompts, trainer).items() if name != "sampling_mask"}

    def shorter(prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = sampled(prompts, trainer)
        found["sampling_mask"][2] = found["sampling_mask"][2][:-1]
        return found

    prompts = [{"prompt": "ab"}] * 8
    trainer = made(path, tmp_path, rollout_func=without)
    with pytest.raises(RuntimeError, match="replay=True, but the completions came without their sets"):
        trainer._generate_and_score_completions(prompts)
    trainer.rollout_func = shorter
    with pytest.raises(ValueError, match=r"lists\[2\] has \d records, but generated marks \d tokens of sequence 2"):
        trainer._generate_and_score_completions(prompts)
    trainer.rollout_func, trainer.importance_sampling_level = sampled, "mine"
    inputs = trainer._generate_and_score_completions(prompts)
    trainer.fused_loss.strict = False
    with pytest.raises(RuntimeError, match="replay=True, but the loss of this configuration is left to TRL"):
        trainer._compute_loss(trainer.model, inputs)


def test_what_vllm_returns_in_this_process(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own code around vLLM reads its outputs through `extract_logprobs`: stand-ins for the outputs."""
    from trl.generation import vllm_generation

    trainer = made(path, tmp_path, beta=0.0, rollout_func=None)
    texts, masks = [[5, 6], [7]] * 4, [[[5, 9], [6]], [[7, 3, 2]]] * 4
    monkeypatch.setattr(vllm_generation, "extract_logprobs", lambda outputs: ([], []))
    before = vllm_generation.extract_logprobs

    def generated(self_prompts: Any, *_: Any) -> Any:
        outputs = [SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=mask)) for mask in masks]
        vllm_generation.extract_logprobs([SimpleNamespace(outputs=outputs[:4]), SimpleNamespace(outputs=outputs[4:])])
        return texts, None

    monkeypatch.setattr(trainer, "_generate_single_turn", generated)
    inputs = trainer._generate_and_score_completions([{"prompt": "ab"}] * 8)
    assert inputs["completion_ids"].tolist() == [[5, 6], [7, PAD]] * 4
    assert inputs["kept_ids"].tolist() == [[[5, 9, -1], [6, -1, -1]], [[7, 3, 2], [-1, -1, -1]]] * 4
    assert vllm_generation.extract_logprobs is before
