"""`grpo_kernels.use` and the environment: the backend of calls that do not name one."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels import Objective, grpo_loss, token_logprobs
from grpo_kernels.vocabulary import backends
from support.cases import build

CPU = torch.device("cpu")
EAGER: ModuleType = backends.load("eager")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of backends whose statistics were asked for."""
    names: list[str] = []
    for name in ("eager", "cpu"):
        module = backends.load(name)

        def stats(*args: Any, right: Any = module.stats, name: str = name, **kwargs: Any) -> Any:
            names.append(name)
            return right(*args, **kwargs)

        monkeypatch.setattr(module, "stats", stats)
    monkeypatch.delenv("GRPO_KERNELS_BACKEND", raising=False)
    monkeypatch.delenv("GRPO_KERNELS_STRICT", raising=False)
    if backends.unavailable("cpu"):
        pytest.skip("needs two backends")
    return names


def call(**options: Any) -> torch.Tensor:
    case = build()
    return token_logprobs(case.logits, case.targets, **options)[0]


def test_a_block_says_what_runs_and_blocks_nest(ran: list[str]) -> None:
    call()
    with grpo_kernels.use(backend="eager"):
        call()
        with grpo_kernels.use(backend="cpu"):
            call()
            with grpo_kernels.use(strict=True):
                call()
        call()
        call(backend="cpu")  # the call's own goes first
    call()
    assert ran == ["cpu", "eager", "cpu", "cpu", "eager", "cpu", "cpu"]


def test_a_block_ends_with_an_error(ran: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), grpo_kernels.use(backend="eager"):
        1 / 0  # noqa: B018
    call()
    assert ran == ["cpu"]


def test_a_block_holds_in_its_own_thread(ran: list[str]) -> None:
    with grpo_kernels.use(backend="eager"):
        other = threading.Thread(target=call)
        other.start()
        other.join()
    assert ran == ["cpu"]


def test_the_environment_says_it_too_and_a_block_goes_first(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_KERNELS_BACKEND", "eager")
    call()
    with grpo_kernels.use(backend="auto"):
        call()
    monkeypatch.setenv("GRPO_KERNELS_BACKEND", "egaer")
    with pytest.raises(ValueError, match=r"backend='egaer': it must be one of auto, eager, cpu, triton"):
        call()
    assert ran == ["eager", "cpu"]


def test_strict_of_a_block_makes_a_fallback_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name == "eager" else "a made-up reason")
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    monkeypatch.setenv("GRPO_KERNELS_STRICT", "1")
    with grpo_kernels.use(strict=False):
        with pytest.warns(RuntimeWarning, match="a made-up reason"):
            call()
        with pytest.raises(RuntimeError, match="a made-up reason"):
            call(strict=True)
        with grpo_kernels.use(strict=True), pytest.raises(RuntimeError, match="a made-up reason"):
            call()


def test_a_loss_in_a_graph_and_its_backward(ran: list[str]) -> None:
    case, objective = build(), Objective()
    compiled = torch.compile(lambda x: grpo_loss(x, case.batch(), objective).loss, fullgraph=True, backend="aot_eager")
    with grpo_kernels.use(backend="eager"):
        compiled(case.logits.requires_grad_()).backward()
    assert ran == ["eager"]


@pytest.mark.parametrize(("options", "message"), [({"backend": "cuda"}, "backend='cuda'"), ({"strict": 1}, "strict=1")])
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), grpo_kernels.use(**options):
        pass
