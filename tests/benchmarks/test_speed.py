"""The C++ backend keeps its lead over plain PyTorch, and the eager backend is no slower: ratios within one process, never
absolute times.

The two take turns, and the best run of each counts: other work on the machine only adds to a time, and more to the longer one.
The factors are below the smallest ratio seen with twice as many busy processes as cores. From logits they are above the ratio
that remains if the eager backend runs instead or, in fp32, if the logits are copied once more (into fresh memory, as is every
allocation of this size on Linux)."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch.autograd import grad

from benchmarks.cases import Output, policy_loss
from grpo_kernels import Objective, Options, TokenBatch, grpo_loss, linear_grpo_loss, token_logprobs

FP32, BF16 = torch.float32, torch.bfloat16
ROWS, VOCAB, HIDDEN = 64, 151936, 64
ROUNDS = 10
THREADS = torch.get_num_threads()  # before any test has set it

pytestmark = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="beside another process of tests nothing is timed")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """All threads instead: here losses are timed as a user runs them."""
    pytest.importorskip("grpo_kernels._cpu")
    torch.set_num_threads(THREADS)


@pytest.fixture
def poisoned_memory() -> None:
    """Switches the poisoning off, because filling new tensors with NaN would be timed."""


@pytest.mark.parametrize(
    ("what", "backend", "dtype", "factor"),
    [
        ("in place", "cpu", FP32, 4.0), ("in place", "cpu", BF16, 7.0), ("from hidden states", "cpu", FP32, 1.4),
        ("from hidden states", "cpu", BF16, 1.6), ("log-probs alone", "cpu", FP32, 4.0), ("log-probs alone", "cpu", BF16, 6.0),
        *((what, "eager", dtype, 1.0) for what in ("in place", "new gradient", "log-probs and loss") for dtype in (FP32, BF16)),
    ],
)  # fmt: skip
def test_a_loss_and_its_gradient_is_faster_than_plain_pytorch(
    what: str, backend: Any, dtype: torch.dtype, factor: float
) -> None:
    """The eager backend is not slower than the code that it replaces. A busy machine gets six times as many rounds, because more
    rounds can only lower the best time."""
    noise, objective, options = torch.randn(3, ROWS), Objective.preset("dapo", beta=0.04), Options(backend=backend)
    b = TokenBatch(torch.randint(VOCAB, (ROWS,)), noise[0], old_logps=noise[1] - 12, ref_logps=noise[2] - 12)
    if what == "from hidden states":
        leaves = tuple((torch.randn(n, HIDDEN) / HIDDEN**0.25).to(dtype).requires_grad_() for n in (ROWS, VOCAB))
    else:
        leaves = (torch.randn(ROWS, VOCAB).to(dtype).requires_grad_(),)
    pristine = leaves[0].detach().clone()

    def eager() -> Any:
        logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].t()
        logps = torch.log_softmax(logits.float(), -1).gather(1, b.targets[:, None])[:, 0]
        return logps if what == "log-probs alone" else grad(policy_loss(logps, b, 0.04), leaves)

    def ours() -> Any:
        if "log-probs" in what:
            logps = token_logprobs(*leaves, b.targets, options=options).logps
            return logps if what == "log-probs alone" else grad(policy_loss(logps, b, 0.04), leaves)
        if len(leaves) == 2:
            return grad(linear_grpo_loss(*leaves, b, objective, options=options).loss, leaves)
        x = Output.apply(leaves[0]) if what == "in place" else leaves[0]
        return grad(grpo_loss(x, b, objective, inplace=what == "in place", options=options).loss, leaves)

    times: dict[Any, list[float]] = {ours: [], eager: []}
    for i in range(6 * ROUNDS):
        for run in times:
            with torch.no_grad():
                leaves[0].copy_(pristine)
            begin = time.perf_counter()
            result = run()
            times[run] += [time.perf_counter() - begin] if i else []  # the first is a warm-up
            del result
        if i >= ROUNDS and min(times[eager]) > factor * min(times[ours]):
            break
    assert min(times[eager]) > factor * min(times[ours])
