"""Hidden states and heads of real architectures, with what each does to its logits: tiny models with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, Objective, TokenBatch, linear_grpo_loss, linear_logprobs
from support.cases import assert_no_worse
from support.gradients import take_gradients

transformers = pytest.importorskip("transformers")

Tensor = torch.Tensor
VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # logits that reach the softcap
    "attn_implementation": "eager",
}

#: name -> its config's own fields
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "Gemma3Text": {"final_logit_softcapping": 4.0, "query_pre_attn_scalar": 8},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 2.5},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3, untied": {"tie_word_embeddings": False},
    "Qwen3, head with a bias": {"tie_word_embeddings": False},
}


def build(name: str) -> Any:
    """The model in fp32."""
    torch.manual_seed(7)
    config = getattr(transformers, name.split(",")[0] + "Config")(**COMMON, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    if "bias" in name:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    return model


def own_log_probs(model: Any, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of the next tokens and the entropies, by log_softmax of the model's own logits."""
    log_p = (model(input_ids=ids).logits[:, :-1] / temperature).log_softmax(-1)
    return log_p.gather(-1, ids[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_models_own_forward(name: str, layer: int, backend: str) -> None:
    """Log-probs, entropy and the gradient of every parameter, at least as close to the model in float64 as autograd through
    the model's own logits."""
    model = build(name)
    ids = torch.randint(3, VOCAB, (3, 9))
    advantages, temperature = torch.tensor([1.0, -0.7, 0.4]), 0.8
    mask = torch.rand(3, 8) < 0.8
    d = advantages[:, None].expand(3, 8) * mask / mask.sum()

    def loss_of(logps: Tensor, entropy: Tensor) -> Tensor:
        return -(d * logps + 0.05 * mask / mask.sum() * entropy).sum()

    naive_logps, naive_entropy = own_log_probs(model, ids, temperature)
    loss_of(naive_logps, naive_entropy).backward()
    naive = take_gradients(model)
    model.double()
    logps, entropy = own_log_probs(model, ids, temperature)
    loss_of(logps, entropy).backward()
    exact = take_gradients(model)
    model.float()

    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    options: dict[str, Any] = {
        "bias": model.lm_head.bias,
        "transform": LogitTransform.of(model, temperature=temperature),
        "backend": backend,
    }
    if layer == 1:
        mine, my_entropy = linear_logprobs(hidden, model.lm_head.weight, ids[:, 1:], entropy=True, **options)
        assert my_entropy is not None
        loss_of(mine, my_entropy).backward()
        keep = torch.ones_like(mask)
    else:
        out = linear_grpo_loss(
            hidden, model.lm_head.weight, TokenBatch(ids[:, 1:], advantages, mask=mask),
            Objective.preset("reinforce", entropy_coef=0.05), **options,
        )  # fmt: skip
        out.loss.backward()
        mine, my_entropy, keep = out.logps, out.entropy, mask
    assert logps.std() > 0.3
    assert_no_worse(mine[keep], naive_logps[keep], logps[keep], "logps", tiny=2e-6)
    assert_no_worse(my_entropy[keep], naive_entropy[keep], entropy[keep], "entropy", tiny=2e-6)
    found = take_gradients(model)
    assert found.keys() == naive.keys() == exact.keys() == dict(model.named_parameters()).keys()
    for key, gradient in found.items():
        assert_no_worse(gradient, naive[key], exact[key], f"gradient of {key}", tiny=2e-5)


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3Text", "Cohere", "Granite"])
def test_the_transform_matters(name: str, backend: str) -> None:
    """Without it the log-probs are others: what the test above compares is not 1.0 twice."""
    model = build(name)
    ids = torch.randint(3, VOCAB, (3, 9))
    with torch.no_grad():
        logps, _ = own_log_probs(model, ids)
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        mine, _ = linear_logprobs(hidden, model.lm_head.weight, ids[:, 1:], backend=backend)
    assert (mine - logps).abs().max() > 0.1
