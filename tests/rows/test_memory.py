"""Large results on a CPU: which memory is reused, which is not, and in which pages new memory lies."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_kernels import Objective, Options, TokenBatch, grpo_loss, linear_grpo_loss, linear_logprobs, token_logprobs
from grpo_kernels.rows import memory
from support.bits import same_bits

Tensor = torch.Tensor
MIB = 1 << 20
ROWS, VOCAB, WIDTH = 40, 300_000, 64  # 48 MB of fp32 logits, 77 MB of fp32 weight


def asked_large_bytes(x: Tensor) -> int:
    """Bytes of x's memory for which the system was asked for large pages. Whether it has any then is its own affair."""
    begin, end = x.untyped_storage().data_ptr(), x.untyped_storage().data_ptr() + x.untyped_storage().nbytes()
    found = inside = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and ":" not in first:
            low, high = (int(part, 16) for part in first.split("-"))
            inside = max(0, min(high, end) - max(low, begin))
        elif first == "VmFlags:" and "hg" in rest.split():
            found += inside
    return found


def assert_large(x: Tensor) -> None:
    assert asked_large_bytes(x) == x.untyped_storage().nbytes() > memory.LARGE_BYTES


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    memory.release()
    yield
    memory.release()


@pytest.fixture
def large_pages_on_request() -> None:
    """Skips where the system knows no such request."""
    asked = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        asked.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as error:
        pytest.skip(f"no transparent huge pages here: {error}")
    if asked_large_bytes(torch.frombuffer(asked, dtype=torch.uint8)) == 0:
        pytest.skip("/proc/self/smaps does not tell")


@pytest.mark.usefixtures("large_pages_on_request")
@pytest.mark.parametrize("source", ["logits", "logits without the last position", "head", "bf16 head"])
def test_new_gradients_are_in_large_pages(source: str, backend: str) -> None:
    shape = (2, 3) if "head" in source else (2, ROWS // 2)
    batch, options = TokenBatch(torch.randint(VOCAB, shape), torch.randn(shape)), Options(backend=backend)
    if "head" in source:
        dtype = torch.bfloat16 if "bf16" in source else torch.float32
        front = [torch.randn(*rows, WIDTH, dtype=dtype).requires_grad_() for rows in (shape, (VOCAB,))]
        loss, logprobs = linear_grpo_loss, linear_logprobs
    else:
        last = "last" in source
        front, loss, logprobs = (
            [torch.randn(2, ROWS // 2 + last, VOCAB).requires_grad_()[:, : ROWS // 2]],
            grpo_loss,
            token_logprobs,
        )  # type: ignore[assignment]
    for value in (
        loss(*front, batch, Objective.preset("dapo"), options=options).loss,
        logprobs(*front, batch.targets, options=options).logps.sum(),
    ):
        (gradient,) = torch.autograd.grad(value, front[-1])
        assert_large(gradient)


def new(count: int = 16 * MIB) -> Tensor:
    return memory.empty((count,), torch.float32, torch.device("cpu"))


def test_memory_is_reused_once_no_tensor_holds_it() -> None:
    first = new()
    start, view = first.data_ptr(), first[5:].view(-1)
    other = new()
    assert other.data_ptr() != start
    del first
    assert new().data_ptr() != start  # a view lies in it
    del view
    again = new(10 * MIB)
    assert again.data_ptr() == start and again.shape == (10 * MIB,)
    del again
    assert new(17 * MIB).data_ptr() != start  # too small


def test_memory_of_a_live_gradient_is_not_reused(backend: str) -> None:
    """Held by a tensor's .grad, by numpy, or by a detached view, while further gradients are made."""
    batch = TokenBatch(torch.randint(VOCAB, (ROWS,)), torch.randn(ROWS))
    leaf, held = torch.randn(ROWS, VOCAB).requires_grad_(), []
    for i in range(memory.KEPT + 2):
        scaled = (i + 1.0) * grpo_loss(leaf, batch, Objective.preset("dapo"), options=Options(backend=backend)).loss
        (gradient,) = torch.autograd.grad(scaled, leaf)
        held.append((gradient.detach()[1:], gradient[1:].clone()))
        del gradient
    assert len({view.data_ptr() for view, _ in held}) == len(held)
    assert all(same_bits(view, values) and view.any() for view, values in held)
