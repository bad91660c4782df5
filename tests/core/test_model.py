"""loss_from_model against grpo_loss on the logits of the model's own forward, and LogitTransform.of
against what each architecture does to them: tiny models with random weights.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from grpo_kernels import (
    Exact,
    Head,
    LogitTransform,
    Objective,
    TokenBatch,
    grpo_loss,
    linear_logprobs,
    loss_from_model,
)
from grpo_kernels.architectures import language_model
from grpo_kernels.batch import shift_targets
from grpo_kernels.model import FusedLMHead
from grpo_kernels.trees import PrefixTree, unpacked
from support.heads import MODELS, SLOW, SPECIAL, VOCAB, build, take_gradients

transformers = pytest.importorskip("transformers")

B, T = 3, 9
OBJECTIVE = Objective.preset("dapo", beta=0.1, entropy_coef=0.01)
NAMES = [
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "PhiForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "GraniteForCausalLM",
    "CohereForCausalLM",
    "HyperCLOVAXForCausalLM",
    "MiniCPM3ForCausalLM",
    "GemmaForCausalLM",
    "OPTForCausalLM",
]


def make_inputs():
    """(inputs of a model, mask of the completions)"""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (B, T), generator=g)
    attention = torch.ones_like(ids)
    attention[1, 7:] = 0
    completion = (torch.arange(T) >= torch.tensor([3, 4, 2])[:, None]) & (attention != 0)
    return {"input_ids": ids, "attention_mask": attention}, completion


def make_batch(targets, mask, **more):
    g = torch.Generator().manual_seed(1)
    old, ref = (-4.0 + 0.3 * torch.randn(targets.shape, generator=g) for _ in range(2))
    advantages = torch.randn(targets.shape, generator=g)
    return TokenBatch(targets, advantages, mask=mask, old_logps=old, ref_logps=ref, **more)


def assert_same(mine, theirs, model, tolerance=1e-5):
    """Value, log-probs, entropy and the gradient of every parameter."""
    for name in ("loss", "logps", "entropy"):
        torch.testing.assert_close(
            getattr(mine, name), getattr(theirs, name), rtol=tolerance, atol=10 * tolerance
        )
    theirs.loss.backward()
    expected = take_gradients(model)
    mine.loss.backward()
    found = take_gradients(model)
    assert found.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        off = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
        assert off < 30 * tolerance, f"{name} is off by {off}"


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loss_of_the_models_own_logits(name):
    """Tied heads, a bias, softcaps, scales and a temperature are found without being passed."""
    model, (inputs, completion) = build(name), make_inputs()
    targets, mask = shift_targets(inputs["input_ids"], mask=completion)
    batch = make_batch(targets, mask)
    mine = loss_from_model(
        model, batch=batch, objective=OBJECTIVE, temperature=0.7, normalizer=20.0, **inputs
    )
    theirs = grpo_loss(
        model(**inputs).logits, batch, OBJECTIVE, transform=LogitTransform(0.7), normalizer=20.0
    )
    assert_same(mine, theirs, model)


@pytest.mark.parametrize(
    "names",
    [("Gemma2ForCausalLM", "LlamaForCausalLM"), ("LlamaForCausalLM", "GraniteForCausalLM")],
    ids=str,
)
def test_a_model_as_the_reference_has_its_own_head(names):
    """Its own softcap or scale, and the policy's temperature."""
    model, reference, (inputs, completion) = build(names[0]), build(names[1]), make_inputs()
    targets, mask = shift_targets(inputs["input_ids"], mask=completion)
    objective, temperature = (
        Objective.preset("dapo", beta=0.3, kl=Exact("jsd")),
        LogitTransform(0.7),
    )
    batch = TokenBatch(targets, torch.ones(B), mask=mask)
    mine = loss_from_model(
        model, batch=batch, objective=objective, temperature=0.7, reference=reference, **inputs
    )
    logits = reference(**inputs).logits.detach()
    theirs = grpo_loss(
        model(**inputs).logits, batch, objective, transform=temperature, ref_logits=logits
    )
    assert_same(mine, theirs, model)
    assert all(p.grad is None for p in reference.parameters())


def test_a_tree_of_rollouts_is_that_of_the_rollouts():
    """Several of which share prefixes of their completions, two of them everything."""
    model, prompts = build("LlamaForCausalLM"), ([1, 2, 3], [1, 2], [4])
    rollouts = [
        [*prompts[0], 5, 6, 7, 8],
        [*prompts[0], 5, 6, 9],
        [*prompts[0], 5, 6, 9],
        [*prompts[1], 5],
        [*prompts[2], 5, 6],
        [*prompts[0], 5, 6],
    ]
    lengths = [3, 3, 3, 2, 1, 3]
    tree = PrefixTree.of(rollouts, lengths)
    assert len(tree.ids) == 3 + 5 + 1 + 3 < sum(map(len, rollouts))
    for ids, length, cut in zip(rollouts, lengths, tree.cu_seqlens.tolist(), strict=False):
        for k in range(length, len(ids)):
            row = tree.rows[cut + k - length]
            assert (
                tree.ids[tree.attention[row]].tolist() == ids[:k]
                and tree.targets[cut + k - length] == ids[k]
            )
    batch = TokenBatch(
        tree.targets, torch.randn(len(rollouts), 1), rows=tree.rows, cu_seqlens=tree.cu_seqlens
    )
    inputs = {
        "position_ids": tree.positions[None],
        "attention_mask": torch.where(tree.attention, 0.0, -torch.inf)[None, None],
    }
    mine = loss_from_model(model, tree.ids, batch, Objective.preset("gspo"), **inputs)
    logits = torch.cat(
        [
            model(torch.tensor([x])).logits[0, n - 1 : -1]
            for x, n in zip(rollouts, lengths, strict=True)
        ]
    )
    index, plain = unpacked(batch)
    assert torch.equal(index, tree.rows)
    assert_same(mine, grpo_loss(logits, plain, Objective.preset("gspo")), model)


def test_targets_may_be_the_last_tokens():
    model, (inputs, completion) = build("GraniteForCausalLM"), make_inputs()
    batch = make_batch(inputs["input_ids"][:, -6:], completion[:, -6:])
    mine = loss_from_model(
        model, inputs["input_ids"], batch, OBJECTIVE, attention_mask=inputs["attention_mask"]
    )
    theirs = grpo_loss(model(**inputs).logits[:, -7:-1], batch, OBJECTIVE)
    assert_same(mine, theirs, model)


@pytest.mark.parametrize("flat", [False, True])
def test_packed_sequences(flat):
    """As in the two sequences alone."""
    model, g = build("LlamaForCausalLM"), torch.Generator().manual_seed(2)
    ids, offsets = torch.randint(3, VOCAB, (11,), generator=g), torch.tensor([0, 0, 5, 11])
    positions = torch.cat([torch.arange(5), torch.arange(6)])[None]
    targets, mask = shift_targets(ids, cu_seqlens=offsets)
    batch = make_batch(targets, mask, cu_seqlens=offsets)
    mine = loss_from_model(
        model, ids if flat else ids[None], batch, OBJECTIVE, position_ids=positions
    )
    logits = torch.cat([model(input_ids=part[None]).logits[0] for part in ids.split([5, 6])])
    assert_same(mine, grpo_loss(logits, batch, OBJECTIVE), model)


# ---- wrappers around a model


def lora(model, **options):
    peft = pytest.importorskip("peft")
    options = {
        "target_modules": ["q_proj", "v_proj"],
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
        **options,
    }
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def fused(model):
    FusedLMHead.install(model)
    return model


def prepared(model):
    """As accelerate's Accelerator prepares it, with its autocast and its cast of outputs in the
    model's forward.
    """
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(
        True
    )  # a trainer of this process may have set it up in another way
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    accelerate.state.AcceleratorState._reset_state(True)
    assert "forward" in vars(model)
    return model


def offloaded(model):
    """With accelerate's hooks in the forwards of the model and its layers."""
    accelerate = pytest.importorskip("accelerate")
    hook = accelerate.hooks.AlignDevicesHook(torch.device("cpu"), io_same_device=True)
    accelerate.hooks.add_hook_to_module(model, hook, append=True)
    assert "forward" in vars(model)
    return model


AROUND = {
    "accelerate": lambda model: offloaded(prepared(model)),
    "accelerate around LoRA": lambda model: prepared(lora(model)),
    "LoRA in the body": lora,
    "LoRA, and a head that is trained": lambda model: lora(model, modules_to_save=["lm_head"]),
    "gradient checkpointing": checkpointed,
    "both": lambda model: checkpointed(lora(model)),
    "FusedLMHead": fused,
    "frozen head": lambda model: (model.lm_head.requires_grad_(False), model)[1],
}


@pytest.mark.parametrize("around", AROUND)
def test_what_people_put_around_a_model(around):
    model, (inputs, completion) = AROUND[around](build("GraniteForCausalLM")), make_inputs()
    targets, mask = shift_targets(inputs["input_ids"], mask=completion)
    batch = make_batch(targets, mask)
    mine = loss_from_model(model, batch=batch, objective=OBJECTIVE, **inputs)
    replaced = [
        vars(module).pop("forward", None) for module in (model, language_model(model))
    ]  # autocast rounds to bf16
    assert any(replaced) == around.startswith("accelerate")
    assert_same(mine, grpo_loss(model(**inputs).logits, batch, OBJECTIVE), model)


@pytest.mark.parametrize("how", ["autocast", "bf16", "bf16 with an fp32 head"])
def test_sixteen_bits(how):
    """Against fp32: within what rounding to 16 bits moves the model's own forward by."""
    inputs, completion = make_inputs()
    targets, mask = shift_targets(inputs["input_ids"], mask=completion)
    model, batch = build("LlamaForCausalLM"), make_batch(targets, mask)
    exact = loss_from_model(model, batch=batch, objective=OBJECTIVE, **inputs).logps
    if how != "autocast":
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        naive = grpo_loss(model(**inputs).logits.float(), batch, OBJECTIVE).logps
        if how == "bf16 with an fp32 head":
            model.lm_head = build("LlamaForCausalLM").lm_head
        mine = loss_from_model(model, batch=batch, objective=OBJECTIVE, **inputs)
    error = (naive - exact).abs().max()
    assert error > 1e-4 and (mine.logps - exact).abs().max() <= 1.5 * error
    if how == "bf16 with an fp32 head":  # in whose products nothing is rounded
        logits = model.model(**inputs)[0].float() @ model.lm_head.weight.t()
        torch.testing.assert_close(
            mine.logps, grpo_loss(logits, batch, OBJECTIVE).logps, rtol=1e-5, atol=1e-5
        )
    mine.loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


# ---- refusals: never a number that means something else


def aligned(**changes):
    inputs, completion = make_inputs()
    targets, mask = shift_targets(inputs["input_ids"], mask=completion)
    fields = {
        "targets": targets,
        "mask": mask,
        **{k: v for k, v in changes.items() if k in ("targets", "mask")},
    }
    batch = TokenBatch(fields["targets"], torch.ones(fields["targets"].shape), mask=fields["mask"])
    return {
        "batch": batch,
        "objective": Objective(),
        **inputs,
        **{k: v for k, v in changes.items() if k not in fields},
    }


IDS, COMPLETION = make_inputs()[0]["input_ids"], make_inputs()[1]
UNSHIFTED = {"targets": IDS, "mask": COMPLETION}

BATCHES = {
    "targets that were not shifted": (
        UNSHIFTED,
        r"batch.targets\[0, 3\]=.* follows in input_ids.*shift_targets",
    ),
    "the first tokens, not the last": (
        {"targets": IDS[:, :4], "mask": None},
        r"batch.targets\[0, 0\]=.* follows",
    ),
    "a last token that is trained on": (
        {"targets": IDS.roll(-1, 1), "mask": torch.ones(B, T, dtype=torch.bool)},
        r"batch.targets\[0, 8\]=.*nothing follows",
    ),
    "other sequences": ({"targets": IDS[:2], "mask": None}, r"\[2, 9\] and input_ids \[3, 9\]"),
    "hidden states": ({"input_ids": torch.ones(B, T)}, "input_ids is torch.float32"),
    "labels": ({"labels": IDS}, "labels is given, but it is not used here"),
    "two temperatures": (
        {"temperature": 0.7, "transform": LogitTransform()},
        "temperature and transform are both given",
    ),
}


@pytest.mark.parametrize("what", BATCHES)
def test_a_batch_that_does_not_fit_is_refused(what):
    changes, message = BATCHES[what]
    with pytest.raises(ValueError, match=message):
        loss_from_model(build("LlamaForCausalLM"), **aligned(**changes))


MISSPELT = {
    "normaliser": "normalizer", "attention": "attention_mask", "inplace": "", "pixel_values": "",
}  # fmt: skip


@pytest.mark.parametrize("name", MISSPELT)
def test_a_keyword_that_the_model_does_not_name_is_refused(name):
    """Those of transformers take anything, and do nothing with it."""
    hint = f"Did you mean {MISSPELT[name]}\\?.*" if MISSPELT[name] else ""
    with pytest.raises(
        TypeError,
        match=f"'{name}' is no argument of loss_from_model.*{hint}LlamaModel.*model_kwargs",
    ):
        loss_from_model(build("LlamaForCausalLM"), **aligned(**{name: torch.ones(B, T)}))


def prompted(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        model, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )


def hooked_above(model):
    model.register_forward_hook(lambda module, args, out: out)
    return model


def replaced(model):
    """With a forward as people put it on a model, which says that it wraps the other one."""
    forward = model.forward

    @functools.wraps(forward)
    def doubled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    model.forward = doubled
    return prepared(model)


class Mine(nn.Module):
    """Of one's own: its forward may do anything."""

    def forward(self, ids):
        return ids


REFUSED = {
    "LoRA on the head": (
        lambda model: lora(model, target_modules=["lm_head"]),
        "carries an adapter",
    ),
    "prompt tuning": (prompted, "PromptTuningConfig, whose prompt"),
    "a hooked model": (hooked_above, "the model, a LlamaForCausalLM, has hooks"),
    "a replaced forward, under accelerate": (
        replaced,
        "LlamaForCausalLM whose forward was replaced .*del model.forward",
    ),
    "DataParallel": (nn.DataParallel, r"DataParallel, whose forward must be called.*FusedLMHead"),
    "torch.compile": (torch.compile, r"OptimizedModule, whose forward must be called.*FusedLMHead"),
    "a model of one's own": (lambda model: Mine(), "Mine.*its class is not listed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_does_not_know_is_refused(what):
    make, message = REFUSED[what]
    model = make(build("LlamaForCausalLM"))
    with pytest.raises(ValueError, match=message):
        loss_from_model(model, **aligned())


# ---- what each architecture does to its logits


def test_a_model_that_drops_logits_of_its_head_is_refused():
    """Inkling, whose head has rows for padding:

    the error says which rows to pass, and these are right.
    """
    model, ids = build("InklingForCausalLM"), torch.randint(3, 90, (2, 7))
    model.config.unpadded_vocab_size = 90
    with pytest.raises(
        ValueError,
        match=(
            r"unpadded_vocab_size=90: .*Head\(lm_head.weight\[:90\],"
            r" transform=LogitTransform\(scale=1 / 3"
        ),
    ):
        LogitTransform.of(model)
    with torch.no_grad():
        expected = (
            model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        )
        head = Head(model.lm_head.weight[:90], transform=LogitTransform(scale=1 / 3))
        logps, _ = linear_logprobs(model.base_model(input_ids=ids)[0][:, :-1], head, ids[:, 1:])
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    model.config.unpadded_vocab_size = VOCAB
    assert LogitTransform.of(model).scale == 1 / 3


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS],
)
@torch.no_grad()
def test_log_probs_of_hidden_states_are_those_of_the_models_own_forward(name):
    """Hidden states and the head's weight, as the README has it, on models with a softcap or a
    scale and on plain ones.
    """
    model, ids = build(name), torch.randint(3, VOCAB, (2, 7))
    log_p = (model(input_ids=ids, use_cache=False).logits[:, :-1].float() / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, ids[:, 1:, None])[..., 0]
    hidden, head = (
        model.base_model(input_ids=ids, use_cache=False)[0][:, :-1],
        model.get_output_embeddings(),
    )
    transform = LogitTransform.of(model, temperature=0.7)
    logps, _ = linear_logprobs(
        hidden, Head(head.weight, head.bias), ids[:, 1:], transform=transform
    )
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    without, _ = linear_logprobs(
        hidden, Head(head.weight, head.bias), ids[:, 1:], transform=LogitTransform(0.7)
    )
    assert ((without - expected).abs().max() > 0.01) == (name in SPECIAL), (
        "the transform decides nothing here"
    )
