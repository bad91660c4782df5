"""What the language models of transformers do to their logits, by the names of their classes.

A class is listed if its forward is known to be base model, head, and then nothing, a scale or a
softcap whose value is in the config. Nothing is guessed from a config alone, because two classes
may read one entry differently, or ignore it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: Classes whose logits are head(hidden), as they are: <name>ForCausalLM ...
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


def _classes(kind: str, names: str) -> list[str]:
    return [name + kind for name in names.split()]


CAUSAL, CONDITIONAL = "ForCausalLM", "ForConditionalGeneration"
PLAIN = frozenset(_classes(CAUSAL, _CAUSAL) + _classes(CONDITIONAL, _CONDITIONAL) + _OTHERS.split())


class Logits(NamedTuple):
    """softcap and scale as `LogitTransform` has them."""

    softcap: float | None = None
    scale: float = 1.0


Rule = Callable[[Any], Logits]


def _times(entry: str) -> Rule:
    def rule(config: Any) -> Logits:
        factor = getattr(config, entry)
        return Logits(scale=1.0 if factor is None else factor)

    return rule


def _inkling(config: Any) -> Logits:
    """Inkling divides the hidden states, and drops the logits of the padding of its head."""
    kept = config.unpadded_vocab_size
    if kept is not None and kept < config.vocab_size:
        raise ValueError(
            f"unpadded_vocab_size={kept}: the model drops the logits of the ids from {kept} on."
            f" Pass Head(lm_head.weight[:{kept}], transform=LogitTransform(scale=1 /"
            f" {config.logits_mup_width_multiplier})) to a linear_* function instead of the model."
        )
    return Logits(scale=1.0 / config.logits_mup_width_multiplier)


#: What the others do, from the config of their text model.
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
    # whose text model may be a Gemma that has none
    "PaliGemmaForConditionalGeneration": lambda config: Logits(
        getattr(config, "final_logit_softcapping", None)
    ),
    "RecurrentGemmaForCausalLM": lambda config: Logits(config.logits_soft_cap),
    "xLSTMForCausalLM": lambda config: Logits(config.output_logit_soft_cap),
    **dict.fromkeys(
        _classes(CAUSAL, "Cohere Cohere2 Cohere2Moe CohereCompass")
        + _classes(CONDITIONAL, "CohereCompass"),
        _times("logit_scale"),
    ),
    "FalconH1ForCausalLM": _times("lm_head_multiplier"),
    **dict.fromkeys(
        _classes(CAUSAL, "HyperCLOVAX") + _classes(CONDITIONAL, "HyperCLOVAXVisionV2"),
        _times("logits_scaling"),
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
    """The model with the head, without the wrappers of PEFT, torch.compile, and those that keep the
    model as `module`.
    """
    while True:
        inner = (
            model.get_base_model()
            if hasattr(model, "get_base_model")
            else getattr(model, "_orig_mod", None)
        )
        inner = getattr(model, "module", None) if inner is None else inner
        if not isinstance(inner, torch.nn.Module) or inner is model:
            return model
        model = inner


def logits_of(model: Any) -> Logits:
    """What a language model's forward does to head(hidden). Raises ValueError for a class that is
    not listed, or that overrides the forward of a listed one.
    """
    # A subclass that does not override the forward (FSDP2 makes one) counts as the class it
    # inherits from.
    owner = next((kind for kind in type(model).__mro__ if "forward" in vars(kind)), type(model))
    name, known = (
        owner.__name__,
        owner.__module__.split(".")[0] in ("transformers", "transformers_modules"),
    )
    if known and name in PLAIN:
        return Logits()
    if known and name in RULES:
        config = model.config
        try:
            return RULES[name](
                config.get_text_config() if hasattr(config, "get_text_config") else config
            )
        except AttributeError as error:
            reason = f"its config lacks an entry ({error})"
    else:
        reason = "its class is not listed"
    raise ValueError(
        f"what {type(model).__module__}.{type(model).__name__} does to its logits is not known:"
        f" {reason}. Look at its forward, and pass transform=LogitTransform(softcap=..., scale=...)"
        " yourself; where it returns head(hidden) as it is, LogitTransform()."
    )
