"""The softcap and the scale that language models of transformers apply to their logits.

Classes are listed by name. A class is listed if its forward is known to be base model, head, and
then nothing, or a scale or softcap from the config. The config alone does not decide, because two
classes may read the same entry differently, or ignore it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: Classes whose logits are head(hidden), without softcap or scale: <name>ForCausalLM ...
_CAUSAL = """
    AXK1 AXK2 Afmoe Apertus Apertus1p5Text Arcee AriaText BailingHybrid Bamba BioGpt BitNet Bloom CodeGen CpmAnt Cwm Dbrx DeepseekV2 DeepseekV3
    DeepseekV32 DeepseekV4 DiffLlama Doge Dots1 Emu3 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconMamba FlexOlmo
    Flint Fuyu Gemma Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GPTBigCode GPTJ GPTNeo GPTNeoX GPTNeoXJapanese GptOss Helium
    HrmText HunYuanDenseV1 HunYuanMoEV1 HYV3 HYV4 Jais2 Jamba JetMoe KimiLinear Kolibri1 Laguna LaraMini Lfm2 Lfm2Moe Lfm3 Llama
    Llama4 LongcatFlash Mamba Mamba2 Mellum MiMoV2Flash MiniMax MiniMaxM2 MiniMaxM3VL Ministral Ministral3 Mistral Mistral4
    Mixtral Mpt Nemotron NemotronH Olmo Olmo2 Olmo3 Olmoe OlmoHybrid OPT Persimmon Phi Phi3 Phi4Multimodal Phimoe Qwen2
    Qwen2Moe Qwen3 Qwen3_5 Qwen3_5Moe Qwen3Moe Qwen3Next Qwen4Exp Rwkv SeedOss SmolLM3 SolarOpen StableLm Starcoder2 XGLM
    Youtu Zamba Zamba2 Zaya
"""
#: ... <name>ForConditionalGeneration, of which the text model has the head ...
_CONDITIONAL = """
    Apertus1p5 Aria AyaVision Cohere2Vision DeepseekVL DeepseekVLHybrid Emu3 Ernie4_5_VLMoe Gemma3 Glm4v Glm4vMoe Glm46V GlmOcr GotOcr2
    HunYuanVL Idefics2 Idefics3 InternVL Kimi_K25 Lfm2Vl Llava LlavaNext LlavaNextVideo LlavaOnevision MiniCPMV4_6 Mistral3
    Mllama Ovis2 PaddleOCRVL PerceptionLM Qwen2_5_VL Qwen2VL Qwen3_5 Qwen3_5Moe Qwen3VL Qwen3VLMoe SmolVLM VideoLlava
    VipLlava Voxtral
"""
#: ... and others.
_OTHERS = "CTRLLMHeadModel GPT2LMHeadModel OpenAIGPTLMHeadModel"


def _classes(suffix: str, names: str) -> list[str]:
    """Return class names: each of the names, which are separated by spaces, with the suffix."""
    return [name + suffix for name in names.split()]


CAUSAL, CONDITIONAL = "ForCausalLM", "ForConditionalGeneration"
PLAIN = frozenset(_classes(CAUSAL, _CAUSAL) + _classes(CONDITIONAL, _CONDITIONAL) + _OTHERS.split())


class Logits(NamedTuple):
    """What a model does to its logits: softcap and scale, as in `LogitTransform`."""

    softcap: float | None = None
    scale: float = 1.0


#: Takes the config of a text model, and returns what the model does to its logits.
Rule = Callable[[Any], Logits]


def _scaled_by(entry: str) -> Rule:
    """Return the rule of models that multiply their logits by an entry of the config."""

    def rule(config: Any) -> Logits:
        factor = getattr(config, entry)
        return Logits(scale=1.0 if factor is None else factor)

    return rule


def _inkling(config: Any) -> Logits:
    """Return the scale of Inkling, which divides its hidden states by an entry of the config.

    Raises ValueError if the head has padding rows: the model drops their logits, so the softmax
    must not contain them.
    """
    num_ids = config.unpadded_vocab_size
    if num_ids is not None and num_ids < config.vocab_size:
        raise ValueError(
            f"unpadded_vocab_size={num_ids}: the model drops the logits of the ids from"
            f" {num_ids} on. Pass Head(lm_head.weight[:{num_ids}], transform=LogitTransform(scale=1 /"
            f" {config.logits_mup_width_multiplier})) to a linear_* function instead of the model."
        )
    return Logits(scale=1.0 / config.logits_mup_width_multiplier)


#: The rules of all other classes.
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        _classes(
            CAUSAL,
            "Beam Gemma2 Gemma3 Gemma3n Gemma4 Gemma4Unified Inkling2 Inkling2Loop NanoChat"
            " VaultGemma",
        )
        + _classes(CONDITIONAL, "Gemma3n Gemma4 Gemma4Unified Inkling2 Inkling2Loop MistralLarge4"),
        lambda config: Logits(config.final_logit_softcapping),
    ),
    # Its text model may be a Gemma without softcap.
    "PaliGemmaForConditionalGeneration": lambda config: Logits(
        getattr(config, "final_logit_softcapping", None)
    ),
    "RecurrentGemmaForCausalLM": lambda config: Logits(config.logits_soft_cap),
    "xLSTMForCausalLM": lambda config: Logits(config.output_logit_soft_cap),
    **dict.fromkeys(
        _classes(CAUSAL, "Cohere Cohere2 Cohere2Moe CohereCompass")
        + _classes(CONDITIONAL, "CohereCompass"),
        _scaled_by("logit_scale"),
    ),
    "FalconH1ForCausalLM": _scaled_by("lm_head_multiplier"),
    **dict.fromkeys(
        _classes(CAUSAL, "HyperCLOVAX") + _classes(CONDITIONAL, "HyperCLOVAXVisionV2"),
        _scaled_by("logits_scaling"),
    ),
    **dict.fromkeys(
        _classes(
            CAUSAL,
            "Granite GraniteMoe GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA GraniteSWA"
            " MiniCPM3",
        )
        + _classes(CONDITIONAL, "Granite4Vision GraniteDocling"),
        lambda config: Logits(scale=1.0 / config.logits_scaling),
    ),
    **dict.fromkeys(_classes(CAUSAL, "Inkling") + _classes(CONDITIONAL, "Inkling"), _inkling),
    "MiniCPMForCausalLM": lambda config: Logits(scale=config.dim_model_base / config.hidden_size),
    **dict.fromkeys(
        _classes(CONDITIONAL, "MuseGlimmer MuseSpark"),
        lambda config: Logits(config.final_logit_softcapping, config.output_multiplier),
    ),
}


def language_model(model: Any) -> Any:
    """Return the model that has the head, without wrappers around it.

    Removes the wrappers of PEFT and torch.compile, and those that have the model as an attribute
    `module`, such as DDP.
    """
    while True:
        if hasattr(model, "get_base_model"):  # PEFT
            inner = model.get_base_model()
        else:
            inner = getattr(model, "_orig_mod", None)  # torch.compile
        if inner is None:
            inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module) or inner is model:
            return model
        model = inner


def logits_of(model: Any) -> Logits:
    """Return the softcap and scale that a language model applies to head(hidden).

    Raises ValueError for a class that is not listed here, for one that overrides the forward of a
    listed class, and if the config lacks an entry.
    """
    # A subclass that inherits its forward counts as the class that defines it. FSDP2 makes such
    # subclasses.
    owner = next((kind for kind in type(model).__mro__ if "forward" in vars(kind)), type(model))
    name = owner.__name__
    package = owner.__module__.split(".")[0]
    is_from_transformers = package in ("transformers", "transformers_modules")
    if is_from_transformers and name in PLAIN:
        return Logits()
    if is_from_transformers and name in RULES:
        config = model.config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        try:
            return RULES[name](config)
        except AttributeError as error:
            reason = f"its config lacks an entry ({error})"
    else:
        reason = "its class is not listed"
    raise ValueError(
        f"what {type(model).__module__}.{type(model).__name__} does to its logits is not known:"
        f" {reason}. Look at its forward, and pass transform=LogitTransform(softcap=..., scale=...)"
        " yourself; if it returns head(hidden) unchanged, LogitTransform()."
    )
