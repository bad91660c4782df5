"""The limits: the least work that a contract needs, measured in the same run. This is one read and one write of the logits
(into other warm memory, or in place), one read, or the bare matrix products. For each of the three products the fastest of all
ways that are tried here counts: torch.mm, oneDNN (on a CPU), and the kernels of our engine, which keep logits and sums in fp32
and round gradients at the end. So an implementation that computes the same products cannot be faster than their sum. Rows of
zero advantage take part in the first product only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases import Cell, HiddenCase, LogitsCase
from benchmarks.divergence_cases import TeacherCase
from benchmarks.providers import Run, provider
from grpo_kernels.vocabulary.products import products_for

Tensor = torch.Tensor
Call = Callable[[], Any]


@provider("copy", "logits", limit=True)
def copy(case: LogitsCase) -> Call:
    return lambda: case.buffer.copy_(case.pristine)


@provider("in-place pass", "logits", limit=True)
def in_place(case: LogitsCase) -> Call:
    """On a CPU this moves fewer bytes than a copy, which reads its destination from memory before it writes it."""
    return lambda: case.buffer.neg_()


@provider("read", "logits-forward", limit=True)
def read(case: LogitsCase) -> Call:
    return lambda: case.pristine.sum()


class _Untimed:
    """A product of a tensor of the size of the logits. That tensor is made before each run, and a run returns it with the product,
    so that it is freed after the run: neither is timed (to free it takes a seventh of a small product), and other contenders can
    use the memory."""

    def __init__(self, made: Callable[[], Tensor], product: Callable[[Tensor], Tensor]) -> None:
        self.made, self.product = made, product
        self.held: list[Tensor] = []

    def make(self) -> None:
        self.held = [self.made()]

    def __call__(self) -> tuple[Tensor, Tensor]:
        operand = self.held.pop()
        return self.product(operand), operand


class _Torch:
    """torch.mm in the dtype of the operands."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t()

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        return d_logits @ self.weight

    def d_weight(self, d_logits: Tensor, hidden: Tensor) -> Tensor:
        return d_logits.t() @ hidden


class _OneDnn(_Torch):
    """oneDNN, which torch.mm does not use for fp32 operands."""

    def logits(self, hidden: Tensor) -> Tensor:
        return self._times_transposed(hidden, self.weight)

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        return self._times_transposed(d_logits, self.weight.t())

    def d_weight(self, d_logits: Tensor, hidden: Tensor) -> Tensor:
        return self._times_transposed(d_logits.t(), hidden.t())

    def _times_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


class _Ours(_Torch):
    """The products of the engine, in the precision in which it makes them on this device. They are made anew for each run: they
    hold the memory of a chunk, and of such memory the engine keeps a few blocks only, for whoever is measured beside this."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.products = lambda: products_for(weight, None, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        products = self.products()
        return products.logits(hidden.to(products.dtype))

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        products = self.products()
        return products.d_hidden(d_logits.to(products.dtype))

    def d_weight(self, d_logits: Tensor, hidden: Tensor) -> Tensor:
        products = self.products()
        return products.add_d_weight(None, d_logits.to(products.dtype), hidden.to(products.dtype), last=True)


def _logits(case: HiddenCase, way: type[_Torch]) -> Run:
    product, hidden = way(case.weight.detach(), case.hidden.dtype), case.hidden.detach()
    return Run(lambda: product.logits(hidden))


def _backward(case: HiddenCase, way: type[_Torch], of_weight: bool) -> Run:
    weight, rows = case.weight.detach(), case.hidden.detach()[case.active]
    product = way(weight, rows.dtype)
    of = (lambda gradient: product.d_weight(gradient, rows)) if of_weight else product.d_hidden
    run = _Untimed(lambda: rows @ weight.t(), of)
    return Run(run, run.make)


def _teacher(case: TeacherCase, way: type[_Torch]) -> Run:
    product = way(case.ref_weight, case.ref_hidden.dtype)
    return Run(lambda: product.logits(case.ref_hidden))


DIVERGENCES = ("divergence", "divergence-forward", "divergence-jsd")
BACKWARD = ("hidden", "hidden-frozen", "sparse", "cross-entropy", *DIVERGENCES)
PARTS: dict[str, tuple[tuple[str, ...], Callable[[Any, type[_Torch]], Run]]] = {
    "teacher logits": (DIVERGENCES, _teacher),
    "logits": ((*BACKWARD, "hidden-forward"), _logits),
    "d_hidden": (BACKWARD, lambda case, way: _backward(case, way, of_weight=False)),
    "d_weight": (("hidden", "sparse", "cross-entropy", *DIVERGENCES), lambda case, way: _backward(case, way, of_weight=True)),
}
WAYS: dict[str, tuple[type[_Torch], tuple[str, ...]]] = {
    "torch.mm": (_Torch, ("cpu", "cuda")),
    "oneDNN": (_OneDnn, ("cpu",)),
    "ours": (_Ours, ("cpu", "cuda")),
}


def _memory(cell: Cell) -> float:
    """Bytes of the logits in fp32 and of their gradient."""
    return 8.0 * cell.rows * cell.vocab


def _register(part: str, name: str) -> None:
    contracts, make = PARTS[part]
    way, devices = WAYS[name]
    decorate = provider(f"{part}, {name}", *contracts, devices=devices, limit=True, part=part, memory=_memory)
    decorate(lambda case: make(case, way))


for _part in PARTS:
    for _name in WAYS:
        _register(_part, _name)
