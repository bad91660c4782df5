"""LogitTransform.of against what each architecture's own forward does to its logits: tiny models with random weights."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from grpo_kernels import Head, LogitTransform, linear_logprobs
from grpo_kernels.architectures import PLAIN, RULES
from support.models import MODELS, SLOW, SPECIAL, VOCAB, build

transformers = pytest.importorskip("transformers")

Tensor = torch.Tensor


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS])
@torch.no_grad()
def test_log_probs_of_hidden_states_are_those_of_the_models_own_forward(name: str) -> None:
    """Hidden states and the head's weight, as the README has it, on models with a softcap or a scale and on plain ones."""
    model, ids = build(name), torch.randint(3, VOCAB, (2, 7))
    log_p = (model(input_ids=ids, use_cache=False).logits[:, :-1].float() / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, ids[:, 1:, None])[..., 0]
    hidden, head = model.base_model(input_ids=ids, use_cache=False)[0][:, :-1], model.get_output_embeddings()
    transform = LogitTransform.of(model, temperature=0.7)
    logps, _ = linear_logprobs(hidden, Head(head.weight, head.bias), ids[:, 1:], transform=transform)
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    without, _ = linear_logprobs(hidden, Head(head.weight, head.bias), ids[:, 1:], transform=LogitTransform(0.7))
    assert ((without - expected).abs().max() > 0.01) == (name in SPECIAL), "the transform decides nothing here"


def statements(forward: Any, name: str) -> list[str]:
    """What a forward assigns to `name`, the part of a condition or a loop aside."""
    source = re.sub(r'r?""".*?"""', "", textwrap.dedent(inspect.getsource(inspect.unwrap(forward))), flags=re.DOTALL)
    return [found.strip() for found in re.findall(rf"^\s+{name}(?:\[.*\])? [-+*/]?= (.*)$", source, re.MULTILINE)]


def test_classes_that_are_listed_as_plain_do_nothing_to_their_logits() -> None:
    """By their source, in whatever version of transformers is here: a new one may start to scale."""
    kinds = [kind for kind in (getattr(transformers, name, None) for name in sorted(PLAIN)) if kind is not None]
    assert len(kinds) > 20
    plain = re.compile(
        r"self\.\w+\((hidden_states|hidden_states\.to\((dtype=)?self\.lm_head\.weight\.dtype\)|hidden_states\[:, slice_indices, :\])\)(\.float\(\)|\.contiguous\(\))?$"
    )
    states = re.compile(r"(\w*outputs?(\[0\]|\.last_hidden_state)( if return_dict else \w+\[0\])?|slice_logits_to_keep\(.*\))$")
    for kind in kinds:
        logits = statements(kind.forward, "(?:lm_)?logits")
        odd = [x for x in logits if not plain.match(x)] + [
            x for x in statements(kind.forward, "hidden_states") if not states.match(x)
        ]
        assert len(logits) == 1 and not odd, (kind.__name__, logits, odd)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_a_softcap_of_none_is_none(name: str) -> None:
    model = build(name)
    assert LogitTransform.of(model).softcap == SPECIAL[name]["final_logit_softcapping"]
    model.config.final_logit_softcapping = None
    assert LogitTransform.of(model).softcap is None


class Unknown(nn.Module):
    """Of one's own: its forward may do anything."""

    def forward(self, ids: Tensor) -> Tensor:
        return ids


def test_a_model_that_is_not_known_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"Unknown.*its class is not listed.*LogitTransform\(softcap"):
        LogitTransform.of(Unknown())
    base = transformers.LlamaForCausalLM

    class Scaled(base):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = 2 * out.logits
            return out

    class Renamed(base):  # type: ignore[misc, valid-type]
        pass

    config = build("LlamaForCausalLM").config
    with pytest.raises(ValueError, match=r"Scaled.*its class is not listed"):
        LogitTransform.of(Scaled(config))
    assert LogitTransform.of(Renamed(config)).scale == 1.0


def test_a_config_that_lacks_the_entry_is_refused() -> None:
    model = build("GraniteForCausalLM")
    model.config = transformers.LlamaConfig()
    with pytest.raises(ValueError, match=r"GraniteForCausalLM.*lacks an entry.*logits_scaling"):
        LogitTransform.of(model)


def test_it_is_found_inside_wrappers() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    for wrap in (torch.compile, nn.DataParallel, lambda model: peft.get_peft_model(model, config)):
        assert LogitTransform.of(wrap(build("CohereForCausalLM"))).scale == 0.3


def test_remote_code_of_minicpm() -> None:
    """Which divides hidden states by hidden_size / dim_model_base; its class is loaded from a model's repository."""

    class MiniCPMForCausalLM(nn.Module):
        __module__ = "transformers_modules.openbmb.MiniCPM.modeling_minicpm"
        forward = Unknown.forward

    model = MiniCPMForCausalLM()
    model.config = transformers.PretrainedConfig()
    model.config.hidden_size, model.config.dim_model_base = 32, 8
    hidden, weight, ids = torch.randn(1, 5, 32), torch.randn(VOCAB, 32), torch.arange(5)[None]
    expected = (hidden / (32 / 8) @ weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(linear_logprobs(hidden, weight, ids, transform=LogitTransform.of(model))[0], expected)


def test_no_class_is_listed_twice() -> None:
    assert not PLAIN & RULES.keys()
