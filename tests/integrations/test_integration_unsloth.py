"""Unsloth: its chunked helper from hidden states, compared with a float64 transcription, and with its own code if that is on
the path."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import unsloth
from grpo_kernels.vocabulary.backends import cpu_products
from support.trainers import MASK, B, H, T, V, assert_same, log_softmax_of, stand_in, their_file, value_and_gradient

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


def test_unsloth() -> None:
    """A stand-in for the module that Unsloth generates."""

    def theirs(hidden_states: Tensor, lm_head: Tensor, index: Tensor, chunks: int = 4, logit_scale_multiply: float = 0.0,
               logit_scale_divide: float = 0.0, logit_softcapping: float = 0.0, temperature: float = 1.0) -> Tensor:  # fmt: skip
        z = hidden_states.double() @ lm_head.double().T * (logit_scale_multiply or 1.0) / (logit_scale_divide or 1.0)
        z = logit_softcapping * torch.tanh(z / logit_softcapping) if logit_softcapping else z
        return log_softmax_of(z, index, temperature)[0]

    made = stand_in("unsloth_made", chunked_hidden_states_selective_log_softmax=theirs)
    trainer = type("UnslothGRPOTrainer", (), {"__module__": "unsloth_made"})
    hidden, weight, index = torch.randn(B, T, H), torch.randn(V, H), torch.randint(V, (B, T))
    for options in ({}, {"temperature": 0.7}, {"logit_scale_multiply": 0.5, "logit_softcapping": 2.0, "temperature": 1.3},
                    {"logit_scale_divide": 3.0, "chunks": 2}):  # fmt: skip

        def use(x: Tensor, options: Any = options) -> Tensor:
            return (made.chunked_hidden_states_selective_log_softmax(x, weight.to(x.dtype), index, **options) * MASK).sum()

        want = value_and_gradient(use, hidden, torch.float64)
        with unsloth.bind(trainer, strict=True) as slots:
            assert_same(value_and_gradient(use, hidden, torch.float32), want)
            assert slots.counts == {"fused": 1}
    assert made.chunked_hidden_states_selective_log_softmax is theirs
    with pytest.raises(AttributeError):
        unsloth.bind(type("Other", (), {"__module__": __name__}))


def new_zoo(**counted: Any) -> ModuleType:
    """A stand-in for unsloth_zoo since 2026.9: what the loss and the scoring import on each call."""

    def scored(h: Tensor, lm_head: Tensor, index: Tensor, chunks: int = 4, multiply: float = 0.0, divide: float = 0.0,
               softcap: float = 0.0, temperature: float = 1.0, *, lm_head_bias: Any = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        z = torch.nn.functional.linear(h.double(), lm_head.double(), None if lm_head_bias is None else lm_head_bias.double())
        z = z * (multiply or 1.0) / (divide or 1.0)
        z = softcap * torch.tanh(z / softcap) if softcap else z
        return log_softmax_of(z, index, temperature)

    def grpo_chunked_hidden_states_logprobs(*args: Any, max_rows_per_chunk: Any = None, **kwargs: Any) -> Tensor:
        counted["calls"].append(kwargs.pop("support_top_k", 0))
        return scored(*args, **kwargs)[0]

    def chunked_hidden_states_selective_log_softmax_recompute(
        *args: Any, return_entropy: bool = False, entropy_requires_grad: bool = True, **kwargs: Any
    ) -> Any:
        logps, entropy = scored(*args, **kwargs)
        return (logps, entropy if entropy_requires_grad else entropy.detach()) if return_entropy else logps

    return stand_in(
        unsloth.ZOO,
        grpo_chunked_hidden_states_logprobs=grpo_chunked_hidden_states_logprobs,
        chunked_hidden_states_selective_log_softmax_recompute=chunked_hidden_states_selective_log_softmax_recompute,
    )


TRAINER = type("UnslothGRPOTrainer", (), {"__module__": "unsloth_made"})


def test_a_bias_of_the_head_is_in_the_log_probs_of_a_new_unsloth() -> None:
    """Its loss passes lm_head_bias, and imports its functions from unsloth_zoo on each call."""
    zoo = new_zoo(calls=[])
    hidden, weight, bias, index = torch.randn(B, T, H), torch.randn(V, H), 3 * torch.randn(V), torch.randint(V, (B, T))
    leaves = torch.cat([hidden.flatten(), weight.flatten(), bias])

    def use(x: Tensor, with_entropy: bool) -> Tensor:
        h, w, b = x.split([hidden.numel(), weight.numel(), V])
        args = h.view(B, T, H), w.view(V, H), index, 4, 0.5, 0.0, 2.0, 0.7
        if not with_entropy:
            return (zoo.grpo_chunked_hidden_states_logprobs(*args, lm_head_bias=b, max_rows_per_chunk=3) * MASK).sum()
        both = zoo.chunked_hidden_states_selective_log_softmax_recompute(*args, lm_head_bias=b, return_entropy=True)
        return ((both[0] - 0.3 * both[1]) * MASK).sum()

    want = [value_and_gradient(lambda x, e=e: use(x, e), leaves, torch.float64) for e in (False, True)]
    with unsloth.bind(TRAINER, strict=True) as slots:
        for with_entropy in (False, True):
            assert_same(value_and_gradient(lambda x, e=with_entropy: use(x, e), leaves, torch.float32), want[with_entropy])
        assert slots.counts == {"fused": 2}
        both = zoo.chunked_hidden_states_selective_log_softmax_recompute(
            hidden.requires_grad_(), weight, index, return_entropy=True, entropy_requires_grad=False
        )
        assert both[0].requires_grad and not both[1].requires_grad
    assert zoo.grpo_chunked_hidden_states_logprobs.__module__ == __name__


def test_a_kept_set_of_tokens_is_left_to_unsloth() -> None:
    zoo = new_zoo(calls=(calls := []))
    hidden, weight, index = torch.randn(B, T, H), torch.randn(V, H), torch.randint(V, (B, T))
    with unsloth.bind(TRAINER) as slots:
        zoo.grpo_chunked_hidden_states_logprobs(hidden, weight, index, support_top_k=5)
    assert calls == [5] and list(slots.counts) == ["unsloth_zoo: a softmax over a kept set of tokens (support_top_k, ...)"]
    with pytest.raises(RuntimeError, match="kept set of tokens"), unsloth.bind(TRAINER, strict=True):
        zoo.grpo_chunked_hidden_states_logprobs(hidden, weight, index, support_top_k=5)


def test_a_head_in_fp32_is_multiplied_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16-bit hidden states too, and under autocast if Unsloth is told so."""
    hidden, weight, index = torch.randn(B, T, H).bfloat16(), torch.randn(V, H), torch.randint(V, (B, T))
    want = log_softmax_of(hidden.double() @ weight.double().T, index)[0].float()
    torch.testing.assert_close(unsloth.selective_log_softmax(hidden, weight, index), want, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            unsloth.selective_log_softmax(hidden, weight, index, fp32_lm_head=True), want, rtol=1e-5, atol=1e-5
        )
        if cpu_products.available() is None:  # elsewhere fp32 is the fastest arithmetic, and nothing is rounded
            assert (unsloth.selective_log_softmax(hidden, weight, index) - want).abs().max() > 1e-4
        monkeypatch.setenv("UNSLOTH_VLLM_FP32_LM_HEAD", "1")
        torch.testing.assert_close(unsloth.selective_log_softmax(hidden, weight, index), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_large_gradient_comes_back_in_the_dtype_of_the_hidden_states(dtype: torch.dtype) -> None:
    """bf16 states beside an fp16 head, with a loss scaler's factor: products in the head's dtype, and a gradient above 65,504."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(B, T, H, generator=g).bfloat16(), torch.randn(V, H, generator=g).to(dtype)
    index, up = torch.randint(V, (B, T), generator=g), 2.0**18
    wide, leaf = hidden.double().requires_grad_(), hidden.clone().requires_grad_()
    want = log_softmax_of(wide @ weight.double().T, index)[0]
    got = unsloth.selective_log_softmax(leaf, weight, index)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    (got * up).sum().backward()
    (want * up).sum().backward()
    assert leaf.grad.dtype == torch.bfloat16 and wide.grad.abs().max() > 65504  # type: ignore[union-attr]
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-2, atol=2e-3 * up)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name", ["chunked_hidden_states_selective_log_softmax", "chunked_hidden_states_selective_log_softmax_recompute"]
)
def test_unsloth_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helpers of unsloth_zoo, in fp32, as an oracle: the second, which a new one has, with a bias and the entropy."""
    zoo = their_file(
        "unsloth_zoo.rl_replacements", monkeypatch, unsloth_zoo__device_type={"DEVICE_TYPE": "cpu", "device_synchronize": None},
        unsloth_zoo__temporary_patches__common={"torch_compile_options": {}, "_maybe_compile": lambda **_: lambda f: f},
        unsloth_zoo__dataset_utils={"sft_prepare_dataset": None}, unsloth_zoo__log={"logger": None},
        unsloth_zoo__fused_losses__chunked_logprob={"_FUSED_LINEAR": False},
    )  # fmt: skip
    if not hasattr(zoo, name):
        pytest.skip("this unsloth_zoo has no such helper")
    theirs, ours = getattr(zoo, name), unsloth.selective_log_softmax
    hidden, weight, index = torch.randn(B, T, H), torch.randn(V, H), torch.randint(V, (B, T))
    more: dict[str, Any] = {}
    if name.endswith("recompute"):
        ours, more = unsloth.log_softmax_and_entropy, {"lm_head_bias": torch.randn(V), "return_entropy": True}

    def use(f: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
        out = f(x, weight, index, **options, **more)
        return (out * MASK).sum() if not more else ((out[0] - 0.3 * out[1]) * MASK).sum()

    for options in ({}, {"temperature": 0.7}, {"logit_scale_multiply": 0.5, "logit_softcapping": 2.0, "temperature": 1.3},
                    {"logit_scale_divide": 3.0, "chunks": 2}):  # fmt: skip
        mine, want = (value_and_gradient(lambda x, f=f, o=options: use(f, x, o), hidden, torch.float32) for f in (ours, theirs))
        assert_same(mine, want)
