"""Heads of real models: how each architecture transforms its logits, and adapters requested in various ways. See
tests/README.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.head import FusedLMHead
from support.linear_cases import assert_near

transformers = pytest.importorskip("transformers")

Tensor = torch.Tensor
VOCAB = 61
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
#: architecture -> what its config says about its logits; some names mean the opposite elsewhere
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2": {"final_logit_softcapping": 3.0},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 2.5},
    "HyperCLOVAX": {"logits_scaling": 2.5},
    "MiniCPM3": {"dim_model_base": 16, **MLA},
    "NanoChat": {"final_logit_softcapping": 3.0},
    "Qwen3": {},
}


def build(name: str, **changes: Any) -> Any:
    kind = getattr(transformers, name + "Config", None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(kind(**{**COMMON, **MODELS.get(name, {}), **changes})).float().eval()


def own_logps(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("name", MODELS)
def test_installed_heads_give_the_models_own_log_probs(name: str) -> None:
    """Softcap and scale come from the config, without being told."""
    model = build(name)
    ids = torch.randint(3, VOCAB, (3, 9))
    with torch.no_grad():
        expected = own_logps(model, ids)
        head = FusedLMHead.install(model)
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state[:, :-1]
        assert expected.std() > 0.3
        assert_near(head(hidden, ids[:, 1:]).logps, expected, 3e-6, "logps")
        assert torch.equal(own_logps(model, ids), expected)
        if MODELS[name]:
            blind = torch.nn.functional.linear(hidden, head.weight, head.bias).log_softmax(-1)
            assert (blind.gather(-1, ids[:, 1:, None])[..., 0] - expected).abs().max() > 0.05


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q_proj|up_proj)", ["q_proj", "v_proj"]], ids=str)
def test_adapters_in_the_body_get_the_gradients_of_the_unfused_head(targets: Any) -> None:
    peft = pytest.importorskip("peft")
    ids, advantages = torch.randint(3, VOCAB, (3, 9)), torch.tensor([1.0, -0.7, 0.4])
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    found = []
    for fused in (False, True):
        torch.manual_seed(8)
        model = peft.get_peft_model(build("Qwen3", tie_word_embeddings=False), config)
        if fused:
            head = FusedLMHead.install(model)
            hidden = model.get_base_model().get_decoder()(input_ids=ids).last_hidden_state[:, :-1]
            head(hidden, TokenBatch(ids[:, 1:], advantages), Objective.preset("reinforce")).loss.backward()
        else:
            (-(own_logps(model, ids) * advantages[:, None]).mean()).backward()
        found.append({k: p.grad for k, p in model.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys() and all("lora" in name for name in found[0]) and len(found[0]) >= 4
    for name, gradient in found[0].items():
        assert gradient is not None and found[1][name] is not None, name
        assert_near(found[1][name], gradient, 2e-5, name)


@pytest.mark.parametrize("targets", [r".*(q_proj|lm_head)", "lm_head", ["q_proj", "lm_head"]], ids=str)
@pytest.mark.parametrize("kind", ["LoraConfig", "OFTConfig"])
def test_an_adapter_on_the_head_is_refused_however_it_was_named(kind: str, targets: Any) -> None:
    """By looking at the module, not at the names of a configuration."""
    peft = pytest.importorskip("peft")
    options = {"r": 2} if kind == "LoraConfig" else {"oft_block_size": 0, "r": 2}
    model = peft.get_peft_model(
        build("Qwen3", tie_word_embeddings=False), getattr(peft, kind)(target_modules=targets, **options)
    )
    with pytest.raises(ValueError, match="carries an adapter"):
        FusedLMHead.install(model)
