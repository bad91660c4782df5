"""Unsloth: its chunked helper from hidden states, each against the trainer's own function where its
package is on the path, and against a float64 transcription always."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainers import (
    MASK,
    B,
    H,
    T,
    V,
    assert_same,
    log_softmax_of,
    stand_in,
    their_file,
    value_and_gradient,
)

from grpo_kernels.integrations import unsloth

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


def test_unsloth_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper of unsloth_zoo, in fp32, as an oracle."""
    theirs = their_file(
        "unsloth_zoo.rl_replacements", monkeypatch, unsloth_zoo__device_type={"DEVICE_TYPE": "cpu", "device_synchronize": None},
        unsloth_zoo__temporary_patches__common={"torch_compile_options": {}, "_maybe_compile": lambda **_: lambda f: f},
        unsloth_zoo__dataset_utils={"sft_prepare_dataset": None},
    ).chunked_hidden_states_selective_log_softmax  # fmt: skip
    hidden, weight, index = torch.randn(B, T, H), torch.randn(V, H), torch.randint(V, (B, T))
    for options in ({}, {"temperature": 0.7}, {"logit_scale_multiply": 0.5, "logit_softcapping": 2.0, "temperature": 1.3},
                    {"logit_scale_divide": 3.0, "chunks": 2}):  # fmt: skip
        mine, want = (
            value_and_gradient(lambda x, f=f, o=options: (f(x, weight, index, **o) * MASK).sum(), hidden, torch.float32)
            for f in (unsloth.selective_log_softmax, theirs)
        )
        assert_same(mine, want)
