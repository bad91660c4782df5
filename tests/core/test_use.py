"""Where a call runs: the backend that it names, `grpo_kernels.use`, the environment, and DTensors as their local parts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels import Head, Objective, Options, TokenBatch, linear_grpo_loss, linear_logprobs, token_logprobs
from support.bits import same_bits
from support.inside import backends_that_run, only_eager

Tensor = torch.Tensor
IDS = torch.arange(12).view(3, 4)
LOGITS, HIDDEN, WEIGHT, BIAS = torch.randn(3, 4, 13), torch.randn(3, 4, 8), torch.randn(13, 8), torch.randn(13)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BACKEND", "STRICT"):
        monkeypatch.delenv(f"GRPO_KERNELS_{name}", raising=False)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return backends_that_run(monkeypatch)


def call(**options: Any) -> Tensor:
    return token_logprobs(LOGITS, IDS, options=Options(**options)).logps


def test_a_block_says_what_runs_and_blocks_nest(ran: list[str]) -> None:
    """A call's own choice goes first; a block ends with an error, and holds in its own thread."""
    call()
    with grpo_kernels.use(backend="eager"):
        call()
        with grpo_kernels.use(backend="cpu"):
            call()
            with grpo_kernels.use(strict=True):
                call()
        call()
        call(backend="cpu")
        other = threading.Thread(target=call)
        other.start()
        other.join()
    with pytest.raises(ZeroDivisionError), grpo_kernels.use(backend="eager"):
        1 / 0  # noqa: B018
    call()
    assert ran == ["cpu", "eager", "cpu", "cpu", "eager", "cpu", "cpu", "cpu"]


def test_the_environment_says_it_too_and_a_block_goes_first(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_KERNELS_BACKEND", "eager")
    call()
    with grpo_kernels.use(backend="auto"):
        call()
    monkeypatch.setenv("GRPO_KERNELS_BACKEND", "egaer")
    with pytest.raises(ValueError, match=r"backend='egaer': it must be one of auto, eager, cpu, triton"):
        call()
    assert ran == ["eager", "cpu"]


def test_a_backend_that_is_asked_for_never_falls_back() -> None:
    """RuntimeError, because the input is right and the machine is not; with the reason and the way out."""
    with pytest.raises(RuntimeError, match=r'backend="triton" cannot run: .*backend="auto"'):
        call(backend="triton")


def test_a_fallback_warns_once_and_is_an_error_in_strict_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    only_eager(monkeypatch, "a made-up reason")
    with pytest.warns(RuntimeWarning, match="a made-up reason") as caught:
        first = call(backend="auto")
        call(backend="auto")
    assert len(caught) == 1 and caught[0].filename == __file__ and torch.equal(first, call(backend="eager"))
    with pytest.raises(RuntimeError, match="a made-up reason"):
        call(strict=True)
    monkeypatch.setenv("GRPO_KERNELS_STRICT", "1")
    with pytest.raises(RuntimeError, match="strict"):
        call()
    with grpo_kernels.use(strict=False):
        call()
        for strict in (call, lambda: call(strict=True)):
            with grpo_kernels.use(strict=strict is call), pytest.raises(RuntimeError, match="a made-up reason"):
                strict()


# ---- DTensors


def value(hidden: Any, weight: Any, bias: Any) -> Tensor:
    """Of both functions from hidden states."""
    head = Head(weight, bias)
    loss = linear_grpo_loss(hidden, head, TokenBatch(IDS, torch.ones(3)), Objective()).loss
    return loss + linear_logprobs(hidden, head, IDS)[0].square().sum()


def test_replicated_dtensors_are_taken_as_their_local_tensors(mesh: Any, backend: str) -> None:
    """Plain, one of them or all: the same values, and gradients of the kind of their tensor."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    def gradients(*distributed: int) -> list[Tensor]:
        leaves: list[Any] = [x.clone() for x in (HIDDEN, WEIGHT, BIAS)]
        for i in distributed:
            leaves[i] = distribute_tensor(leaves[i], mesh, [Replicate()])
        leaves = [x.requires_grad_() for x in leaves]
        with grpo_kernels.use(backend=backend):
            value(*leaves).backward()
        assert all(isinstance(x.grad, DTensor) == (i in distributed) for i, x in enumerate(leaves))
        return [x.grad.full_tensor() if i in distributed else x.grad for i, x in enumerate(leaves)]

    expected = gradients()
    for distributed in ((0,), (1, 2), (0, 1, 2)):
        assert all(map(same_bits, gradients(*distributed), expected)) and all(x.any() for x in expected), distributed


def test_sharded_dtensors_are_refused_and_the_remedy_works(mesh: Any) -> None:
    """With a gradient that lands in the shards."""
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    weight = distribute_tensor(WEIGHT.clone(), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(
        ValueError, match=r"weight is a DTensor.*Shard\(dim=0\).*full_tensor\(grad_placements=\[Partial\(\)\]\)"
    ):
        value(HIDDEN, weight, BIAS)
    value(HIDDEN, weight.full_tensor(grad_placements=[Partial()]), BIAS).backward()
    assert weight.grad is not None and weight.grad.placements == (Shard(0),) and weight.grad.to_local().any()
