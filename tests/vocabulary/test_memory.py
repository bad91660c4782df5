"""Large results on a CPU lie in large pages, where the system gives them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from grpo_kernels import Objective, TokenBatch, grpo_loss, linear_grpo_loss, linear_logprobs, token_logprobs
from grpo_kernels.vocabulary import memory
from support.cases import same_bits

Tensor = torch.Tensor
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20
ROWS, VOCAB, WIDTH = 40, 300_000, 64  # 48 MB of fp32 logits, 77 MB of fp32 weight


def large_bytes(x: Tensor) -> int:
    """Bytes in large pages of the mappings that x's memory lies in."""
    begin, end = x.untyped_storage().data_ptr(), x.untyped_storage().data_ptr() + x.untyped_storage().nbytes()
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and ":" not in first:
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low < end and begin < high
        elif inside and first == "AnonHugePages:":
            found += int(rest.split()[0]) << 10
    return found


def assert_large(x: Tensor) -> None:
    size = x.untyped_storage().nbytes()
    assert large_bytes(x) > size - 8 * MIB, (large_bytes(x), size)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Not here: what has been written to has its pages already."""


@pytest.fixture
def large_pages_on_request() -> None:
    """Skips where the system gives large pages to nobody, or has none free now."""
    if not SETTING.exists() or "[never]" in SETTING.read_text():
        pytest.skip("no transparent huge pages here")
    asked = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    asked.madvise(mmap.MADV_HUGEPAGE)
    if large_bytes(torch.frombuffer(asked, dtype=torch.uint8).fill_(1)) < 32 * MIB:
        pytest.skip("the system has no large pages free")


@pytest.mark.usefixtures("large_pages_on_request", "one_thread")
def test_new_gradients_of_logits_are_in_large_pages(backend: str) -> None:
    batch = TokenBatch(torch.randint(VOCAB, (ROWS,)), torch.randn(ROWS))
    leaf = torch.randn(ROWS, VOCAB).requires_grad_()
    (gradient,) = torch.autograd.grad(grpo_loss(leaf, batch, Objective.preset("dapo"), backend=backend).loss, leaf)
    assert_large(gradient)
    del gradient
    (gradient,) = torch.autograd.grad(token_logprobs(leaf, batch.targets, backend=backend)[0].sum(), leaf)
    assert_large(gradient)


@pytest.mark.usefixtures("large_pages_on_request", "one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_head_is_in_large_pages(dtype: torch.dtype, backend: str) -> None:
    batch = TokenBatch(torch.randint(VOCAB, (6,)), torch.randn(6))
    hidden, weight = (torch.randn(n, WIDTH).to(dtype).requires_grad_() for n in (6, VOCAB))
    loss = linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), backend=backend).loss
    assert_large(torch.autograd.grad(loss, weight)[0])
    logps, _ = linear_logprobs(hidden, weight, batch.targets, backend=backend)
    assert_large(torch.autograd.grad(logps.sum(), weight)[0])


def test_what_the_system_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []

    def refuse(*arguments: int) -> int:
        calls.append(arguments)
        return -1

    new = torch.empty(memory.LARGE_BYTES // 4)
    for function in (refuse, None):
        monkeypatch.setattr(memory, "_madvise", lambda function=function: function)
        assert memory.large_pages(new) is new
    (begin, size, _), start = calls[0], new.data_ptr()
    assert (
        len(calls) == 1 and start <= begin and begin + size <= start + memory.LARGE_BYTES and size > memory.LARGE_BYTES - 8192
    )
    monkeypatch.setattr(memory, "_madvise", lambda: refuse)
    memory.large_pages(torch.empty(memory.LARGE_BYTES // 4 - 1))
    assert len(calls) == 1


def test_conversion_keeps_values_and_layout() -> None:
    x = torch.randn(30, 7).t()
    assert memory.converted(x, torch.float32) is x
    y = memory.converted(x, torch.bfloat16)
    assert same_bits(y, x.to(torch.bfloat16)) and y.stride() == x.stride()
