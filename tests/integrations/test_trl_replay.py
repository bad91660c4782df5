"""TRL's trainer over the sets that its tokens were sampled from: old policy, reference and loss, against float64."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl", minversion="1.16.0")

import transformers

from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch
from support import oracle, trl_cases
from support.trainers import exact
from support.trl_cases import EOS, PAD

TOP_K, TEMPERATURE = 4, 0.9
PROMPTS = [{"prompt": p} for p in trl_cases.PROMPTS for _ in range(4)]


def sampled(prompts, trainer):
    """A rollout_func that samples from the TOP_K largest logits of the policy, and records them. Completions of all lengths."""
    ids, g = trainer._tokenizer(prompts)["input_ids"], torch.Generator().manual_seed(7)
    out = {"prompt_ids": ids, "completion_ids": [], "logprobs": [], "sampling_mask": []}
    for row, prompt in enumerate(ids):
        text, logprobs, kept = [*prompt], [], []
        while len(kept) < 2 + row % 5 and text[-1] != EOS:
            with torch.no_grad():
                top = (trainer.model(input_ids=torch.tensor([text])).logits[0, -1] / TEMPERATURE).topk(TOP_K)
            at = int(torch.multinomial(top.values.softmax(0), 1, generator=g))
            text.append(int(top.indices[at]))
            logprobs.append(float(top.values.log_softmax(0)[at]))
            kept.append(top.indices.tolist())
        for name, found in (("completion_ids", text[len(prompt) :]), ("logprobs", logprobs), ("sampling_mask", kept)):
            out[name].append(found)
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return trl_cases.save_model(tmp_path_factory.mktemp("replay") / "model")


@pytest.fixture
def make(path, tmp_path, monkeypatch):
    """Makes trainers with two steps for each generation, so that old log-probs are scored."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    cls = functools.partial(FusedGRPOTrainer, replay=True, strict=True)

    def made(rollout_func=sampled, beta=0.1, **options):
        return trl_cases.make_trainer(
            path, tmp_path, cls, steps_per_generation=2, beta=beta, keywords={"rollout_func": rollout_func}, **options
        )

    return made


def logps_of(model, inputs, kept=None):
    """Log-probs [B, T] of the completions over kept [B, T, K], whose padding is -1; over all where there are none."""
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    T = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1] / TEMPERATURE
    if kept is not None:
        V = logits.shape[-1]
        keep = torch.zeros(*kept.shape[:2], V + 1, dtype=torch.bool).scatter(2, kept.long() % (V + 1), True)[..., :-1]
        logits = logits.masked_fill(~(keep | ~keep.any(-1, keepdim=True)), -torch.inf)
    return logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]


def test_log_probs_ratio_and_gradient(make, path):
    trainer = make()
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(PROMPTS)
    mask, policy = inputs["completion_mask"].bool(), transformers.AutoModelForCausalLM.from_pretrained(path).double()
    record, sets = sampled([p["prompt"] for p in PROMPTS], trainer), inputs["kept_ids"]
    for b, kept in enumerate(record["sampling_mask"]):
        assert inputs["completion_ids"][b, : len(kept)].tolist() == record["completion_ids"][b]
        assert sets[b, : len(kept)].tolist() == kept and (sets[b, len(kept) :] == -1).all()
    with torch.no_grad():
        over_sets, over_all = (logps_of(policy, inputs, kept)[mask] for kept in (sets, None))
    sampler = torch.tensor([x for row in record["logprobs"] for x in row]).double()
    for name in ("old", "ref"):  # ratio 1; the reference is the same model still
        assert_close(inputs[f"{name}_per_token_logps"][mask].double(), over_sets, rtol=1e-5, atol=1e-5)
    assert_close(over_sets, sampler, rtol=1e-5, atol=1e-5)
    assert (over_all - sampler).abs().mean() > 0.1  # as it would be

    with torch.no_grad():  # the step that makes the samples off-policy
        for ours, theirs in zip(trainer.model.parameters(), policy.parameters(), strict=True):
            ours += 0.05 * torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
            theirs.copy_(ours)
    trainer.current_gradient_accumulation_steps, args = 1, trainer.args
    inputs["advantages"] = torch.linspace(-1, 1, 16)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    old, ref = (inputs[f"{name}_per_token_logps"].double() for name in ("old", "ref"))
    weighting = "ratio" if args.use_bias_correction_kl else "none"
    spec = oracle.Spec(eps_low=args.epsilon, eps_high=args.epsilon, beta=args.beta, kl_weighting=weighting)
    want = exact(
        spec, logps_of(policy, inputs, sets), advantages=inputs["advantages"], mask=mask, old_logps=old, ref_logps=ref,
        normalizer=float(inputs["num_items_in_batch"]) / 2,
    ).loss  # fmt: skip
    want.backward()
    assert args.loss_type == "dapo" and float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-4)
    for (name, ours), theirs in zip(trainer.model.named_parameters(), policy.parameters(), strict=True):
        assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-5 * float(theirs.grad.abs().max()), msg=name)
    assert trainer.fused_loss.counts == {"scored": 4, "fused": 1}  # old policy and reference, in two batches each


def test_training_runs_and_can_be_undone(make):
    """Several micro-batches of one generation, shuffled by TRL; strict mode compares each with TRL's arithmetic."""
    trainer = make(steps=4, num_iterations=2)
    trainer.train()
    first = trainer.state.log_history[0]
    assert trainer.fused_loss.counts["fused"] == 4 and first["clip_ratio/region_mean"] == 0
    assert 0 < first["entropy"] <= torch.tensor(float(TOP_K)).log() + 1e-6
    trainer.fused_loss.undo()
    assert not {"_generate", "_generate_and_score_completions", "_get_per_token_logps_and_entropies"} & {*vars(trainer)}
    patch(trainer).undo()


def test_records_that_do_not_fit(make):
    def without(prompts, trainer):
        return {name: x for name, x in sampled(prompts, trainer).items() if name != "sampling_mask"}

    def shorter(prompts, trainer):
        found = sampled(prompts, trainer)
        found["sampling_mask"][2].pop()
        return found

    trainer = make()
    for function, error, message in (
        (without, RuntimeError, "replay=True, but the completions came without their sets"),
        (shorter, ValueError, r"lists\[2\] has \d records, but generated marks \d tokens of sequence 2"),
    ):
        trainer.rollout_func = function
        with pytest.raises(error, match=message):
            trainer._generate_and_score_completions(PROMPTS[:8])
    trainer.rollout_func, trainer.importance_sampling_level = sampled, "mine"
    inputs = trainer._generate_and_score_completions(PROMPTS[:8])
    trainer.fused_loss.strict = False
    with pytest.raises(RuntimeError, match="replay=True, but the loss of this configuration is left to TRL"):
        trainer._compute_loss(trainer.model, inputs)


def test_tokens_of_tools_have_no_sets(make):
    def fixed(prompts, trainer):
        one = {
            "prompt_ids": [2],
            "completion_ids": [5, 6, 7],
            "logprobs": [-1.0] * 3,
            "env_mask": [1, 0, 1],
            "sampling_mask": [[5, 9], [7]],
        }
        return {name: [value] * len(prompts) for name, value in one.items()}

    inputs = make(fixed, beta=0.0)._generate_and_score_completions(PROMPTS[:8])
    assert inputs["kept_ids"].tolist() == [[[5, 9], [-1, -1], [7, -1]]] * 8


def test_what_vllm_returns_in_this_process(make, monkeypatch):
    """TRL's own code around vLLM reads its outputs through `extract_logprobs`: stand-ins for the outputs."""
    from trl.generation import vllm_generation

    trainer, masks = make(beta=0.0, rollout_func=None), [[[5, 9], [6]], [[7, 3, 2]]] * 4
    monkeypatch.setattr(vllm_generation, "extract_logprobs", lambda outputs: ([], []))
    before = vllm_generation.extract_logprobs

    def generated(*_):
        outputs = [SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=mask)) for mask in masks]
        vllm_generation.extract_logprobs([SimpleNamespace(outputs=outputs[:4]), SimpleNamespace(outputs=outputs[4:])])
        return [[5, 6], [7]] * 4, None

    monkeypatch.setattr(trainer, "_generate_single_turn", generated)
    inputs = trainer._generate_and_score_completions(PROMPTS[:8])
    assert inputs["completion_ids"].tolist() == [[5, 6], [7, PAD]] * 4
    assert inputs["kept_ids"].tolist() == [[[5, 9, -1], [6, -1, -1]], [[7, 3, 2], [-1, -1, -1]]] * 4
    assert vllm_generation.extract_logprobs is before
