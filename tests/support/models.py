"""Tiny models of real architectures, with random weights."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCAB = 97
#: Fields of tiny configs under the names of all architectures; each config takes those that it has.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.3,
}  # fmt: skip

#: class -> fields that scale or cap its logits.
SPECIAL: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {"final_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": {"final_logit_softcapping": 4.0},
    "VaultGemmaForCausalLM": {"final_logit_softcapping": 3.0},
    "NanoChatForCausalLM": {"final_logit_softcapping": 2.0},
    "RecurrentGemmaForCausalLM": {"logits_soft_cap": 3.0},
    "CohereForCausalLM": {"logit_scale": 0.3},
    "Cohere2ForCausalLM": {"logit_scale": 0.25},
    "GraniteForCausalLM": {"logits_scaling": 2.5},
    "GraniteMoeForCausalLM": {"logits_scaling": 2.5},
    "GraniteMoeSharedForCausalLM": {"logits_scaling": 0.4},
    "HyperCLOVAXForCausalLM": {"logits_scaling": 0.3},
    "MiniCPM3ForCausalLM": {"dim_model_base": 16, "num_key_value_heads": 4},
    "FalconH1ForCausalLM": {"lm_head_multiplier": 0.3},
    "GraniteMoeHybridForCausalLM": {"logits_scaling": 3.0, "mamba_n_heads": 8, "mamba_d_head": 8},
    "Cohere2MoeForCausalLM": {"logit_scale": 0.3},
    "BeamForCausalLM": {"final_logit_softcapping": 3.0},
    "Gemma4ForCausalLM": {"final_logit_softcapping": 3.0, "vocab_size_per_layer_input": VOCAB},
    "Gemma4UnifiedForCausalLM": {"final_logit_softcapping": 3.0},
    "GraniteSWAForCausalLM": {"logits_scaling": 3.0},
    "GraniteMoeSWAForCausalLM": {"logits_scaling": 3.0},
    "xLSTMForCausalLM": {"output_logit_soft_cap": 3.0},
}

#: The most used architectures whose logits are plain.
COMMON = """
    Llama Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Gemma Phi Phi3 Olmo Olmo2 Olmoe StableLm Starcoder2 SmolLM3 Glm Glm4 GptOss
    GPTNeoX OPT Bloom Falcon Nemotron Helium Ernie4_5 HunYuanDenseV1 SeedOss Exaone4 Lfm2 Mamba
"""
MODELS: dict[str, dict[str, Any]] = {
    **SPECIAL,
    **{f"{name}ForCausalLM": {} for name in COMMON.split()},
    "GPT2LMHeadModel": {},
}
#: Architectures whose scan takes seconds in plain PyTorch.
SLOW = ("FalconH1ForCausalLM",)


def build(name: str) -> Any:
    """A tiny model in fp32, in eval mode; skipped where this transformers has no such class."""
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(7)
    fields = {**TINY, **MODELS[name]}
    known = inspect.signature(kind.config_class.__init__).parameters
    given = fields if any(p.kind is p.VAR_KEYWORD for p in known.values()) else {k: v for k, v in fields.items() if k in known}
    return kind(kind.config_class(**given)).float().eval()
