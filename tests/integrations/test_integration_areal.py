"""AReaL: its two functions of packed logits, compared with a float64 transcription, and with its own code if that is on the
path."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import areal
from support.trainers import V, assert_same, log_softmax_of, stand_in, their_file, value_and_gradient

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


def test_areal_functions() -> None:
    def gather_logprobs(logits: Any, labels: Any, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1) -> Any:
        return log_softmax_of(logits, labels, temperature)[0]

    def gather_logprobs_entropy(logits: Any, labels: Any, temperature: float = 1.0, tp_group: Any = None) -> Any:
        return log_softmax_of(logits, labels, temperature)

    names = {"gather_logprobs": gather_logprobs, "gather_logprobs_entropy": gather_logprobs_entropy}
    stand_in("areal.utils.functional.vocab_parallel", **names)
    check_areal(stand_in("areal.engine.fsdp_engine", **names))


def check_areal(engine: ModuleType) -> None:
    labels, logits, up = torch.randint(V, (11,)), torch.randn(11, V), torch.linspace(-1, 1, 11)

    def both(x: Tensor) -> Tensor:
        logps, entropy = engine.gather_logprobs_entropy(x, labels, temperature=0.8, tp_group=None)
        return (logps * up).sum() + 0.1 * entropy.sum() + engine.gather_logprobs(x, labels, temperature=1.3).square().sum()

    want = value_and_gradient(both, logits, torch.float64)
    theirs = engine.gather_logprobs
    with areal.bind(strict=True) as slots:
        assert_same(value_and_gradient(both, logits, torch.float32), want)
        assert slots.counts == {"fused": 2}
    assert engine.gather_logprobs is theirs
    with areal.bind() as slots:
        assert engine.gather_logprobs(logits.double(), labels).dtype.is_floating_point
        assert slots.counts == {"areal: dtype torch.float64": 1}


def test_areal_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    check_areal(
        their_file("areal.utils.functional.vocab_parallel", monkeypatch, areal__infra__platforms={"is_npu_available": False})
    )
