"""The files of the package that a call enters, forward and backward, from the second call on: those that have to be read to
understand it. If a plain call needs another file, add it here; if it no longer needs one, remove it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels import Objective, TokenBatch, grpo_loss, linear_grpo_loss, token_logprobs
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.backends import cpu_products

PACKAGE = Path(grpo_kernels.__file__).parent
SHAPE, V, H = (2, 8), 104, 16

#: A loss: the door, the specs and their rows, the way through the stages; its formulas as a program; the source and the backend.
LOSS = {
    "losses.py", "batch.py", "objective.py", "options.py", "layout.py", "loss_stages.py", "formulas/token_program.py",
    "vocabulary/sources.py", "vocabulary/backends/__init__.py", "vocabulary/backends/cpu.py", "vocabulary/backends/cpu_module.py",
}  # fmt: skip
#: For logits next to those of teachers.
LOGITS = {"vocabulary/teachers.py"}
#: What lies between hidden states and logits: which rows take part, the engine, how many it takes at a time, its products and their
#: memory, and the rows and the transform of a chunk.
ENGINE = {
    "row_counts.py",
    "vocabulary/hidden.py", "vocabulary/blocks.py", "vocabulary/products.py", "vocabulary/backends/cpu_products.py",
    "vocabulary/memory.py", "vocabulary/rows.py", "formulas/token_stage.py",
}  # fmt: skip
#: Log-probs whose gradient comes later: no batch, objective or program, but partials and an autograd Function.
LOGPROBS = {
    "logprobs.py", "supports.py", "options.py", "layout.py", "vocabulary/stage.py", "vocabulary/sources.py", "vocabulary/rows.py",
    "vocabulary/memory.py", "vocabulary/backends/__init__.py", "vocabulary/backends/cpu.py", "vocabulary/backends/cpu_module.py",
}  # fmt: skip


def entered(call: Callable[[], Any]) -> set[str]:
    files: set[str] = set()

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {str(Path(file).relative_to(PACKAGE)) for file in files if Path(file).is_relative_to(PACKAGE)}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def one_loss() -> Callable[[], Any]:
    ids, mask = torch.randint(V, SHAPE), torch.rand(SHAPE) < 0.8
    batch = TokenBatch(ids, torch.tensor([1.0, -1.0]), mask=mask, old_logps=torch.randn(SHAPE))
    objective, logits = Objective.preset("grpo"), leaf(*SHAPE, V)
    return lambda: grpo_loss(logits * 1, batch, objective, inplace=True).loss.backward()


def one_linear_loss() -> Callable[[], Any]:
    ids, mask = torch.randint(V, SHAPE), torch.rand(SHAPE) < 0.8
    batch = TokenBatch(ids, torch.tensor([1.0, -1.0]), mask=mask, old_logps=torch.randn(SHAPE))
    objective, hidden, weight = Objective.preset("grpo"), leaf(*SHAPE, H), leaf(V, H)
    return lambda: linear_grpo_loss(hidden, weight, batch, objective).loss.backward()


def some_logprobs() -> Callable[[], Any]:
    ids, mask, logits = torch.randint(V, SHAPE), torch.rand(SHAPE) < 0.8, leaf(*SHAPE, V)

    def call() -> None:
        logps, entropy = token_logprobs(logits, ids, mask=mask, entropy=True)
        assert entropy is not None
        (logps.sum() + entropy.sum()).backward()

    return call


@pytest.mark.skipif(backends.unavailable("cpu") is not None, reason="the compiled module is missing")
@pytest.mark.parametrize(
    "make, files",
    [(one_loss, LOSS | LOGITS), (one_linear_loss, LOSS | ENGINE), (some_logprobs, LOGPROBS)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_files_of_a_call(make: Callable[[], Callable[[], Any]], files: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRPO_KERNELS_BACKEND", "GRPO_KERNELS_STRICT"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    call = make()
    call()
    found = entered(call)
    assert sorted(found - files) == []
    if cpu_products.available() is None:  # else some of the products are torch's
        assert sorted(files - found) == []
    assert {file.rpartition("/")[0] for file in found} <= {"", "formulas", "vocabulary", "vocabulary/backends"}
