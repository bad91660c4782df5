"""The C++ backend keeps its lead over plain PyTorch, and the eager backend is no slower: ratios within one process, never
absolute times.

The two take turns, and the best run of each counts: other work on the machine only adds to a time, and more to the longer one.
The factors are below the smallest ratio seen with twice as many busy processes as cores. From logits they are above the ratio
that remains if the eager backend runs instead or, in fp32, if the logits are copied once more (into fresh memory, as is every
allocation of this size on Linux)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import grad

from benchmarks.cases import Output, policy_loss
from grpo_kernels import Objective, Options, TokenBatch, grpo_loss, linear_grpo_loss, token_logprobs

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed (extra dev)")

Tensor = torch.Tensor
FP32, BF16 = torch.float32, torch.bfloat16
OBJECTIVE = Objective.preset("dapo", beta=0.04)
ROWS, VOCAB, HIDDEN = 64, 151936, 64
THREADS = torch.get_num_threads()  # before any test has set it


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """All threads instead: here losses are timed as a user runs them."""
    pytest.importorskip("grpo_kernels._cpu")
    torch.set_num_threads(THREADS)


@pytest.fixture
def poisoned_memory() -> None:
    """Switches the poisoning off, because filling new tensors with NaN would be timed."""


def batch() -> TokenBatch:
    noise = torch.randn(3, ROWS)
    return TokenBatch(torch.randint(VOCAB, (ROWS,)), noise[0], old_logps=noise[1] - 12, ref_logps=noise[2] - 12)


def naive_logps(logits: Tensor, b: TokenBatch) -> Tensor:
    return torch.log_softmax(logits.float(), -1).gather(1, b.targets[:, None])[:, 0]


def faster(benchmark: Any, factor: float, ours: Callable[[], Any], eager: Callable[[], Any], before: Any, rounds: int) -> None:
    """The best time of `eager` is more than `factor` times the best of `ours`; `before` runs untimed ahead of every run. A busy
    machine gets six times as many rounds, because more rounds can only lower the best time."""
    if benchmark.disabled:
        pytest.skip("timing is switched off (--benchmark-disable)")

    def spent(run: Callable[[], Any]) -> float:
        before()
        start = time.perf_counter()
        result = run()
        took = time.perf_counter() - start
        del result
        return took

    times: list[float] = []
    benchmark.pedantic(ours, setup=lambda: times.append(spent(eager)) or before(), rounds=rounds, warmup_rounds=1)
    best, slow = benchmark.stats.stats.min, min(times[1:])
    for _ in range(5 * rounds):
        if slow > factor * best:
            break
        slow, best = min(slow, spent(eager)), min(best, spent(ours))
    benchmark.extra_info["times eager PyTorch"] = round(slow / best, 2)
    assert slow > factor * best


@pytest.mark.parametrize(
    ("way", "backend", "dtype", "factor"),
    [
        ("in place", "cpu", FP32, 4.0), ("in place", "cpu", BF16, 7.0),
        *((way, "eager", dtype, 1.0) for way in ("in place", "new gradient", "log-probs") for dtype in (FP32, BF16)),
    ],
)  # fmt: skip
def test_loss_and_gradient_of_logits(way: str, backend: Any, dtype: torch.dtype, factor: float, benchmark: Any) -> None:
    """The eager backend is not slower than the code that it replaces."""
    pristine, b = torch.randn(ROWS, VOCAB).to(dtype), batch()
    logits = pristine.clone().requires_grad_()

    def ours() -> Tensor:
        if way == "log-probs":
            return grad(policy_loss(token_logprobs(logits, b.targets, options=Options(backend=backend))[0], b, 0.04), logits)[0]
        x = Output.apply(logits) if way == "in place" else logits
        return grad(grpo_loss(x, b, OBJECTIVE, inplace=way == "in place", options=Options(backend=backend)).loss, logits)[0]

    def restore() -> None:
        with torch.no_grad():
            logits.copy_(pristine)

    eager = lambda: grad(policy_loss(naive_logps(logits, b), b, 0.04), logits)[0]  # noqa: E731
    faster(benchmark, factor, ours, eager, restore, 15 if backend == "cpu" else 7)


@pytest.mark.parametrize(("dtype", "factor"), [(FP32, 1.4), (BF16, 1.6)])
def test_loss_and_gradients_from_hidden_states(dtype: torch.dtype, factor: float, benchmark: Any) -> None:
    hidden = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5).to(dtype).requires_grad_()
    head, b = (hidden, weight), batch()
    ours = lambda: grad(linear_grpo_loss(*head, b, OBJECTIVE, options=Options(backend="cpu")).loss, head)  # noqa: E731
    eager = lambda: grad(policy_loss(naive_logps(hidden @ weight.t(), b), b, 0.04), head)  # noqa: E731
    faster(benchmark, factor, ours, eager, lambda: None, 7)


@pytest.mark.parametrize(("dtype", "factor"), [(FP32, 4.0), (BF16, 6.0)])
def test_logprobs_alone(dtype: torch.dtype, factor: float, benchmark: Any) -> None:
    logits, b = torch.randn(ROWS, VOCAB).to(dtype), batch()
    ours = lambda: token_logprobs(logits, b.targets, options=Options(backend="cpu"))[0]  # noqa: E731
    faster(benchmark, factor, ours, lambda: naive_logps(logits, b), lambda: None, 15)
