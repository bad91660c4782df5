"""The limits: the least work that a contract needs, measured in the same run. That is one read and one write of the logits
(into other warm memory, or in place), one read, or the bare matrix products into new memory. Rows of zero advantage take
part in the first product only. The products are made by torch.mm in the dtype of the operands, and by the kernels of our
engine (fp32 logits and sums, gradients rounded at the end)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases import HiddenCase, LogitsCase
from benchmarks.providers import Run, provider
from grpo_kernels.vocabulary.products import Products, products_for

Tensor = torch.Tensor
Call = Callable[[], Any]


@provider("copy", "logits", limit=True)
def copy(case: LogitsCase) -> Call:
    return lambda: case.buffer.copy_(case.pristine)


@provider("in-place pass", "logits", limit=True)
def in_place(case: LogitsCase) -> Call:
    """On a CPU this is less than a copy, which reads its destination from memory before it writes it."""
    return lambda: case.buffer.neg_()


@provider("read", "logits-forward", limit=True)
def read(case: LogitsCase) -> Call:
    return lambda: case.pristine.sum()


def _active(case: HiddenCase) -> Tensor:
    return case.batch.advantages.nonzero()[:, 0]


@provider(
    "products, torch.mm", "hidden", "hidden-frozen", "hidden-forward", limit=True,
    memory=lambda cell: 2.0 * cell.rows * cell.vocab * cell.dtype.itemsize,
)  # fmt: skip
def by_torch(case: HiddenCase) -> Run:
    hidden, weight = case.hidden.detach(), case.weight.detach()
    forward_only, frozen = not case.hidden.requires_grad, not case.weight.requires_grad
    rows = hidden[_active(case)]
    gradient = _Untimed(lambda: rows @ weight.t())

    def run() -> tuple[Tensor, ...]:
        found = (hidden @ weight.t(),)
        if not forward_only:
            logits = gradient.take()
            found += (logits @ weight,)
            found += () if frozen else (logits.t() @ rows,)
        return found

    return Run(run, None if forward_only else gradient.make)


class _Untimed:
    """A tensor of the size of the logits. It is made before each run and freed after it, so that other contenders can use
    the memory."""

    def __init__(self, made: Callable[[], Tensor]) -> None:
        self.made = made
        self.held: list[Tensor] = []

    def make(self) -> None:
        self.held = [self.made()]

    def take(self) -> Tensor:
        return self.held.pop()


def _gradient(products: Products, rows: Tensor) -> Tensor:
    """A stand-in for the gradient of the logits, in the memory and the dtype that the engine uses."""
    logits = products.logits(rows)
    values = logits.clone()
    return products.gradient_buffer(logits, exact=False).copy_(values)


@provider(
    "products, ours", "hidden", "hidden-frozen", "hidden-forward", limit=True,
    memory=lambda cell: 12.0 * cell.rows * cell.vocab,
)  # fmt: skip
def by_ours(case: HiddenCase) -> Run:
    hidden, weight = case.hidden.detach(), case.weight.detach()
    forward_only, frozen = not case.hidden.requires_grad, not case.weight.requires_grad
    products = products_for(weight, None, hidden.dtype)
    operand = hidden.to(products.dtype)
    rows = operand[_active(case)]
    gradient = _Untimed(lambda: _gradient(products_for(weight, None, hidden.dtype), rows))

    def run() -> tuple[Tensor, ...]:
        found = (products.logits(operand),)
        if not forward_only:
            d_logits = gradient.take()
            found += (products.d_hidden(d_logits).to(hidden.dtype),)
            found += () if frozen else (products.add_d_weight(None, d_logits, rows, last=True),)
        return found

    return Run(run, None if forward_only else gradient.make)
