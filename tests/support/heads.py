"""A small model with a head, which is called in each of its ways, for tests of FusedLMHead; the
gradients of any model; and tiny models of real architectures, with random weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Objective, Options, TokenBatch
from grpo_kernels.model import FusedLMHead, HeadLogprobs, HeadLoss
from support import oracle

H, V = 8, 17
NORMALIZER, TEMPERATURE = 7.0, 0.8
OBJECTIVE = Objective.preset("dapo", beta=0.1, entropy_coef=0.02)


def make_batch(seed: int, lengths: list[int], masked: bool = False) -> TokenBatch:
    g = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths, default=3) + 1)
    mask = torch.arange(shape[1]) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    old, ref = (-2.8 + 0.3 * torch.randn(shape, generator=g) for _ in range(2))
    advantages, ids = torch.randn(len(lengths), generator=g), torch.randint(V, shape, generator=g)
    return TokenBatch(ids, advantages, mask=mask & (not masked), old_logps=old, ref_logps=ref)


@dataclass(frozen=True)
class Case:
    """What a model is like, and how its head is called."""

    kind: str = "loss"  # loss, log-probs, logits
    outside: bool = False  # the head is called after the model's forward, not in it
    tied: bool = False
    bias: bool = True
    #: what torch.utils.checkpoint runs again: "layers", "head" or "all"; reentrant or not
    recompute: str = ""
    reentrant: bool = False
    autocast: torch.dtype | None = None
    scaled: bool = False  # by a GradScaler


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.options = case, Options()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(V, H)
            self.embedding.weight.data *= 0.3
            self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
            self.norm = nn.LayerNorm(H)
            self.lm_head: nn.Linear = nn.Linear(H, V, bias=case.bias)
        if case.tied:
            self.lm_head.weight = self.embedding.weight

    def again(self, part: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
        if self.case.recompute != part:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=self.case.reentrant)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids.roll(1, 1))
        for layer in self.layers:
            x = self.again("layers", lambda x, layer=layer: x + torch.tanh(layer(x)), x)
        return self.norm(x)

    def call_head(self, hidden: Tensor, batch: TokenBatch) -> Any:
        """A tuple at least, which is what reentrant checkpoints leave of a named one."""
        return call_head(self.lm_head, hidden, batch, self.case.kind, options=self.options)

    def forward(self, batch: TokenBatch) -> Any:
        if self.case.outside:
            return self.hidden(batch.targets)
        if (
            self.case.recompute == "all"
        ):  # of something that needs a gradient, which reentrant checkpoints ask for
            one = torch.ones((), requires_grad=True)
            out = self.again(
                "all", lambda one: self.call_head(self.hidden(batch.targets) * one, batch), one
            )
        else:
            out = self.again("head", lambda h: self.call_head(h, batch), self.hidden(batch.targets))
        return OUTPUTS[self.case.kind](*out) if type(out) is tuple else out


def fused(case: Case) -> Model:
    model = Model(case)
    model.lm_head = FusedLMHead(model.lm_head)
    return model


OUTPUTS: dict[str, Callable[..., Any]] = {"loss": HeadLoss, "log-probs": HeadLogprobs}


def call_head(head: nn.Module, hidden: Tensor, batch: TokenBatch, kind: str, **how: Any) -> Any:
    if kind == "loss":
        return head(
            hidden,
            batch,
            OBJECTIVE,
            temperature=TEMPERATURE,
            normalizer=NORMALIZER,
            metrics=True,
            **how,
        )
    if kind == "log-probs":
        return head(
            hidden, batch.targets, mask=batch.mask, temperature=TEMPERATURE, entropy=True, **how
        )
    return head(hidden)


def value_of(out: Any, batch: TokenBatch) -> Tensor:
    """A loss of each kind of output, in which all of its differentiable parts take part."""
    if isinstance(out, HeadLoss):
        return out.loss
    if not isinstance(out, HeadLogprobs):
        logps, entropy = oracle.log_probs(out, batch.targets, TEMPERATURE)
        assert batch.mask is not None
        out = HeadLogprobs(
            torch.where(batch.mask, logps, 0.0), torch.where(batch.mask, entropy, 0.0)
        )
    return (batch.advantages[:, None] * out.logps - 0.1 * out.entropy).sum() / NORMALIZER


# ---- the gradients that a backward pass has stored in a model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients, whole where they are sharded, under the names that the model has
    without a wrapper for ranks.
    """
    found = {
        name.removeprefix("module."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {name: getattr(x, "full_tensor", lambda x=x: x)().clone() for name, x in found.items()}


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The same, and removes them from the model."""
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return found


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
    "InklingForCausalLM": {"logits_mup_width_multiplier": 3.0},
    "Inkling2ForCausalLM": {"final_logit_softcapping": 3.0, "unpadded_vocab_size": VOCAB},
    "Inkling2LoopForCausalLM": {"final_logit_softcapping": 3.0, "unpadded_vocab_size": VOCAB},
}

#: The most used architectures whose logits are plain.
COMMON = """
    Llama Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Gemma Phi Phi3 Olmo Olmo2 Olmoe StableLm Starcoder2 SmolLM3 Glm Glm4 GptOss
    GPTNeoX OPT Bloom Falcon Nemotron Helium Ernie4_5 HunYuanDenseV1 SeedOss Exaone4 Lfm2 Mamba
    Apertus1p5Text LaraMini
"""
#: A latent attention and its experts.
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    **SPECIAL,
    **{f"{name}ForCausalLM": {} for name in COMMON.split()},
    "GPT2LMHeadModel": {},
    **dict.fromkeys(("AXK1ForCausalLM", "AXK2ForCausalLM"), LATENT),
}
#: Architectures whose scan takes seconds in plain PyTorch.
SLOW = ("FalconH1ForCausalLM",)


def build(name: str) -> Any:
    """A tiny model in fp32, in eval mode; skipped where this transformers has no such class."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(7)
    fields = {**TINY, **MODELS[name]}
    known = inspect.signature(kind.config_class.__init__).parameters
    given = (
        fields
        if any(p.kind is p.VAR_KEYWORD for p in known.values())
        else {k: v for k, v in fields.items() if k in known}
    )
    return kind(kind.config_class(**given)).float().eval()
