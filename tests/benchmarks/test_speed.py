"""The C++ backend keeps its lead over plain PyTorch, and the eager backend is no slower: ratios within one process, never
absolute times.

The two take turns, and the best run of each counts: other work on the machine only adds to a time, and more to the longer one. The
factors are below the smallest ratio seen with twice as many busy processes as cores. From logits they are above the ratio that
remains if the eager backend runs instead or, in fp32, if the logits are copied once more (into fresh memory, as is every
allocation of this size on Linux)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import grad

from benchmarks.cases import Output
from grpo_kernels import Objective, TokenBatch, grpo_loss, linear_grpo_loss, token_logprobs

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed (extra dev)")

Tensor = torch.Tensor
BETA = 0.04
OBJECTIVE = Objective.preset("dapo", beta=BETA)
ROWS, VOCAB, HIDDEN = 64, 151936, 64
THREADS = torch.get_num_threads()  # before any test has set it


@pytest.fixture(autouse=True)
def native() -> None:
    pytest.importorskip("grpo_kernels._cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """All threads instead: here losses are timed as a user runs them."""
    torch.set_num_threads(THREADS)


@pytest.fixture
def poisoned_memory() -> None:
    """Switches the poisoning off, because filling new tensors with NaN would be timed."""


def batch() -> TokenBatch:
    noise = torch.randn(3, ROWS)
    return TokenBatch(torch.randint(VOCAB, (ROWS,)), noise[0], old_logps=noise[1] - 12, ref_logps=noise[2] - 12)


def naive_logps(logits: Tensor, b: TokenBatch) -> Tensor:
    return torch.log_softmax(logits.float(), -1).gather(1, b.targets[:, None])[:, 0]


def naive_loss(logits: Tensor, b: TokenBatch) -> Tensor:
    return loss_of(naive_logps(logits, b), b)


def loss_of(logps: Tensor, b: TokenBatch) -> Tensor:
    ratio, d = torch.exp(logps - b.old_logps), b.ref_logps - logps
    surrogate = torch.min(ratio * b.advantages, ratio.clamp(0.8, 1.28) * b.advantages)
    return (-surrogate + BETA * (torch.exp(d) - d - 1)).mean()


def assert_faster(
    factor: float,
    benchmark: Any,
    ours: Callable[[], Any],
    eager: Callable[[], Any],
    before: Callable[[], Any] = lambda: None,
    rounds: int = 15,
) -> None:
    """The best time of `eager` is more than `factor` times the best of `ours`; `before` runs untimed ahead of every run. A busy
    machine gets six times as many rounds, because more rounds can only lower the best time."""
    if benchmark.disabled:
        pytest.skip("timing is switched off (--benchmark-disable)")
    times: list[float] = []

    def baseline() -> None:
        before()
        start = time.perf_counter()
        result = eager()
        times.append(time.perf_counter() - start)
        del result
        before()

    benchmark.pedantic(ours, setup=baseline, rounds=rounds, warmup_rounds=1)
    del times[0]
    best = benchmark.stats.stats.min
    for _ in range(5 * rounds):
        if min(times) > factor * best:
            break
        baseline()
        start = time.perf_counter()
        result = ours()
        best = min(best, time.perf_counter() - start)
        del result
    benchmark.extra_info["times eager PyTorch"] = round(min(times) / best, 2)
    assert min(times) > factor * best


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 4.0), (torch.bfloat16, 7.0)], ids=("fp32", "bf16"))
def test_loss_and_gradient_of_logits_in_place(benchmark: Any, dtype: torch.dtype, factor: float) -> None:
    pristine, b = torch.randn(ROWS, VOCAB).to(dtype), batch()
    logits = pristine.clone().requires_grad_()

    def ours() -> Tensor:
        return grad(grpo_loss(Output.apply(logits), b, OBJECTIVE, inplace=True, backend="cpu").loss, logits)[0]

    def eager() -> Tensor:
        return grad(naive_loss(logits, b), logits)[0]

    def restore() -> None:
        with torch.no_grad():
            logits.copy_(pristine)

    assert_faster(factor, benchmark, ours, eager, restore)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
@pytest.mark.parametrize("way", ["in place", "new gradient", "log-probs"])
def test_the_eager_backend_is_not_slower_than_the_code_that_it_replaces(benchmark: Any, way: str, dtype: torch.dtype) -> None:
    pristine, b = torch.randn(ROWS, VOCAB).to(dtype), batch()
    logits = pristine.clone().requires_grad_()

    def ours() -> Tensor:
        if way == "log-probs":
            logps, _ = token_logprobs(logits, b.targets, backend="eager")
            return grad(loss_of(logps, b), logits)[0]
        x = Output.apply(logits) if way == "in place" else logits
        return grad(grpo_loss(x, b, OBJECTIVE, inplace=way == "in place", backend="eager").loss, logits)[0]

    def plain() -> Tensor:
        return grad(naive_loss(logits, b), logits)[0]

    def restore() -> None:
        with torch.no_grad():
            logits.copy_(pristine)

    assert_faster(1.0, benchmark, ours, plain, restore, rounds=7)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.4), (torch.bfloat16, 1.6)], ids=("fp32", "bf16"))
def test_loss_and_gradients_from_hidden_states(benchmark: Any, dtype: torch.dtype, factor: float) -> None:
    hidden = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5).to(dtype).requires_grad_()
    b = batch()

    def ours() -> tuple[Tensor, ...]:
        return grad(linear_grpo_loss(hidden, weight, b, OBJECTIVE, backend="cpu").loss, (hidden, weight))

    def eager() -> tuple[Tensor, ...]:
        return grad(naive_loss(hidden @ weight.t(), b), (hidden, weight))

    assert_faster(factor, benchmark, ours, eager, rounds=7)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 4.0), (torch.bfloat16, 6.0)], ids=("fp32", "bf16"))
def test_logprobs_alone(benchmark: Any, dtype: torch.dtype, factor: float) -> None:
    logits, b = torch.randn(ROWS, VOCAB).to(dtype), batch()

    def ours() -> Tensor:
        return token_logprobs(logits, b.targets, backend="cpu")[0]

    assert_faster(factor, benchmark, ours, lambda: naive_logps(logits, b))
