"""Models for tests of FusedLMHead, and the gradients of any model.

`Model` is a small model whose head is called in all ways that are supported. `build` makes tiny
models of the architectures of transformers, with random weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Objective, Options, TokenBatch
from grpo_kernels.model import FusedLMHead, HeadLogprobs, HeadLoss
from support import oracle

#: Width of the hidden states, and size of the vocabulary, of `Model`.
H = 8
V = 17
NORMALIZER = 7.0
TEMPERATURE = 0.8
OBJECTIVE = Objective.preset("dapo", beta=0.1, entropy_coef=0.02)


def make_batch(seed: int, lengths: list[int], masked: bool = False) -> TokenBatch:
    """Return a random batch [B, T] with one column of padding after the longest sequence.

    lengths   trained tokens of each sequence
    masked    whether all tokens are masked
    """
    g = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths, default=3) + 1)
    mask = torch.arange(shape[1]) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    if masked:
        mask = torch.zeros_like(mask)
    old_logps = -2.8 + 0.3 * torch.randn(shape, generator=g)
    ref_logps = -2.8 + 0.3 * torch.randn(shape, generator=g)
    advantages = torch.randn(len(lengths), generator=g)
    targets = torch.randint(V, shape, generator=g)
    return TokenBatch(targets, advantages, mask=mask, old_logps=old_logps, ref_logps=ref_logps)


@dataclass(frozen=True)
class Case:
    """A model, and how its head is called."""

    kind: str = "loss"  # what the head returns: "loss", "log-probs" or "logits"
    outside: bool = False  # whether the head is called after the model's forward, not in it
    tied: bool = False  # whether the head has the weight of the embedding
    bias: bool = True
    #: The part that torch.utils.checkpoint computes twice: "layers", "head", "all", or "" for none.
    recompute: str = ""
    reentrant: bool = False  # argument use_reentrant of torch.utils.checkpoint
    autocast: torch.dtype | None = None
    scaled: bool = False  # whether a GradScaler scales the loss


class Model(nn.Module):
    """An embedding, two layers, a norm and a head, with weights that are the same for each case."""

    def __init__(self, case: Case) -> None:
        """Draw the weights with seed 0, and leave the global random generator as it is.

        case   says whether the head is tied to the embedding and has a bias, and how it is called
        """
        super().__init__()
        self.case = case
        self.options = Options()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(V, H)
            self.embedding.weight.data *= 0.3
            self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
            self.norm = nn.LayerNorm(H)
            self.lm_head: nn.Linear = nn.Linear(H, V, bias=case.bias)
        if case.tied:
            self.lm_head.weight = self.embedding.weight

    def call_part(self, part: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Return function(*inputs), under torch.utils.checkpoint if the case recomputes this part.

        part   "layers", "head" or "all", see `Case.recompute`
        """
        if self.case.recompute != part:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=self.case.reentrant)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return hidden states [B, T, H] from the ids before each of the target ids [B, T]."""

        def residual_layer(x: Tensor, layer: nn.Module) -> Tensor:
            return x + torch.tanh(layer(x))

        x = self.embedding(ids.roll(1, 1))
        for layer in self.layers:
            x = self.call_part("layers", partial(residual_layer, layer=layer), x)
        return self.norm(x)

    def call_head(self, hidden: Tensor, batch: TokenBatch) -> Any:
        """Return what the head returns for hidden states [B, T, H]."""
        return call_head(self.lm_head, hidden, batch, self.case.kind, options=self.options)

    def forward(self, batch: TokenBatch) -> Any:
        """Return what the head returns for a batch with targets [B, T].

        This is a HeadLoss, HeadLogprobs or logits [B, T, V], by `Case.kind`. If the case calls the
        head outside of the model, the hidden states [B, T, H] are returned.
        """
        if self.case.outside:
            return self.hidden(batch.targets)

        def layers_and_head(factor: Tensor) -> Any:
            """Return what the head returns for the hidden states times a 0-d factor."""
            return self.call_head(self.hidden(batch.targets) * factor, batch)

        def head(hidden: Tensor) -> Any:
            """Return what the head returns for hidden states [B, T, H]."""
            return self.call_head(hidden, batch)

        if self.case.recompute == "all":
            # A reentrant checkpoint only records a gradient if one of its inputs requires one. The
            # ids do not, so a factor of 1 that does is its input.
            output = self.call_part("all", layers_and_head, torch.ones((), requires_grad=True))
        else:
            output = self.call_part("head", head, self.hidden(batch.targets))
        # A reentrant checkpoint returns a named tuple as a plain tuple.
        if type(output) is tuple:
            return OUTPUTS[self.case.kind](*output)
        return output


def fused(case: Case) -> Model:
    """Return the model of a case, with its head wrapped in a FusedLMHead."""
    model = Model(case)
    model.lm_head = FusedLMHead(model.lm_head)
    return model


#: {kind of a Case: the named tuple that the head returns}
OUTPUTS: dict[str, Callable[..., Any]] = {"loss": HeadLoss, "log-probs": HeadLogprobs}


def call_head(
    head: nn.Module, hidden: Tensor, batch: TokenBatch, kind: str, **keywords: Any
) -> HeadLoss | HeadLogprobs | Tensor:
    """Call a head on hidden states [B, T, H] for a loss, log-probs or logits.

    kind       "loss", "log-probs" or "logits", as in `Case.kind`
    keywords   further keywords of a call for a loss or log-probs; ignored for logits

    Returns a HeadLoss, a HeadLogprobs with entropies, or logits [B, T, V].
    """
    if kind == "loss":
        return head(
            hidden,
            batch,
            OBJECTIVE,
            temperature=TEMPERATURE,
            normalizer=NORMALIZER,
            metrics=True,
            **keywords,
        )
    if kind == "log-probs":
        return head(
            hidden,
            batch.targets,
            mask=batch.mask,
            temperature=TEMPERATURE,
            entropy=True,
            **keywords,
        )
    return head(hidden)


def value_of(out: HeadLoss | HeadLogprobs | Tensor, batch: TokenBatch) -> Tensor:
    """Return a 0-d loss that depends on all differentiable outputs of a head.

    For log-probs it is the sum of (advantage * log-prob - 0.1 * entropy) / NORMALIZER over unmasked
    tokens. Logits give the same loss, from log-probs in float64.

    out   what `call_head` returned, of any kind
    """
    if isinstance(out, HeadLoss):
        return out.loss
    if not isinstance(out, HeadLogprobs):
        logps, entropy = oracle.log_probs(out, batch.targets, TEMPERATURE)
        assert batch.mask is not None
        masked_logps = torch.where(batch.mask, logps, 0.0)
        out = HeadLogprobs(masked_logps, torch.where(batch.mask, entropy, 0.0))
    return (batch.advantages[:, None] * out.logps - 0.1 * out.entropy).sum() / NORMALIZER


# ---- the gradients that a backward pass has stored in a model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients of a model by the name of their parameter.

    Sharded gradients (DTensor) are gathered. Names are without the "module." of a DDP wrapper.
    """
    copies = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        copies[name.removeprefix("module.")] = gradient.clone()
    return copies


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients of a model, and remove them from it."""
    copies = gradients(model)
    model.zero_grad(set_to_none=True)
    return copies


VOCAB = 97
#: Fields of tiny configurations. `build` passes those that a configuration class has.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "initializer_range": 0.3,
}  # fmt: skip

#: {class: fields that scale or cap its logits}
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

#: The most used architectures that neither scale nor cap their logits.
COMMON = """
    Llama Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Gemma Phi Phi3 Olmo Olmo2 Olmoe StableLm
    Starcoder2 SmolLM3 Glm Glm4 GptOss
    GPTNeoX OPT Bloom Falcon Nemotron Helium Ernie4_5 HunYuanDenseV1 SeedOss Exaone4 Lfm2 Mamba
    Apertus1p5Text LaraMini
"""
#: Fields of models with latent attention and experts.
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
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
    """Return a tiny fp32 model of an architecture in eval mode, with random weights from seed 7.

    The test is skipped if the installed transformers has no such class.

    name   the name of its class in transformers, a key of MODELS
    """
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, name, None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(7)
    fields = {**TINY, **MODELS[name]}
    config_class = model_class.config_class
    parameters = inspect.signature(config_class.__init__).parameters
    takes_any_field = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any_field:
        fields = {name: value for name, value in fields.items() if name in parameters}
    return model_class(config_class(**fields)).float().eval()
