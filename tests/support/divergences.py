"""Two streams of rows for divergences, and what float64 and a careful fp32 computation make of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from grpo_kernels.vocabulary.rows import RowTransform, Teacher
from support import oracle

Tensor = torch.Tensor

KINDS = [("reverse", 0.0), ("forward", 0.0), ("jsd", 0.5), ("jsd", 0.1)]
PLAIN = RowTransform(1.0, 0.0, 1.0)


class Exact(NamedTuple):
    value: Tensor  # fp64 [n]
    gradient: Tensor  # fp64 [n, V], of the student's logits


def row_pairs(vocab: int) -> tuple[Tensor, Tensor]:
    """fp32 [n, vocab] twice: flat, peaked, nearly one-hot rows, nearly disjoint ones, equal ones, some far from 0, and a teacher that
    agrees but for one id."""
    flat, peaked = torch.randn(2, vocab) * 0.1, torch.randn(2, vocab) * 6.0
    one_hot, other = torch.zeros(vocab), torch.zeros(vocab)
    one_hot[vocab // 2], other[vocab - 1] = 25.0, 25.0
    half = torch.arange(vocab) < vocab // 2
    rows = [
        (flat[0], flat[1]),
        (peaked[0], peaked[1]),
        (flat[0], peaked[1]),
        (one_hot, flat[0]),
        (peaked[0], one_hot),
        (one_hot, other),
        (torch.where(half, 0.0, -60.0), torch.where(half, -60.0, 0.0)),
        (peaked[0], peaked[0]),
        (peaked[0] + 80.0, peaked[0] - 3.0 + 10.0 * flat[1]),
        (peaked[1], torch.where(torch.arange(vocab) == int(peaked[1].argmax()), peaked[1] + 2.0, peaked[1])),
    ]
    return torch.stack([z for z, _ in rows]), torch.stack([w for _, w in rows])


def transformed(x: Tensor, transform: RowTransform) -> Tensor:
    """z of rows x [n, V] in x's dtype."""
    t = transform.inv_temperature
    t = t.to(x.dtype)[:, None] if isinstance(t, Tensor) else t
    x = x * transform.scale
    return (transform.softcap * torch.tanh(x / transform.softcap) if transform.softcap else x) * t


def expected(
    logits: Tensor, teacher: Teacher, transform: RowTransform, upstream: Tensor, dtype: torch.dtype = torch.float64
) -> Exact:
    """The divergence of rows [n, V] and the gradient of its sum with weights `upstream`. With fp32 these are the lines of a careful
    trainer."""
    leaf = logits.detach().to(dtype).requires_grad_()
    rows = teacher.logits.reshape(logits.shape).to(dtype)
    logps, of_teacher = (x.log_softmax(-1) for x in (transformed(leaf, transform), transformed(rows, teacher.transform)))
    value = oracle.divergence(logps, of_teacher, teacher.kind, teacher.mixture)
    (gradient,) = torch.autograd.grad((value * upstream.to(dtype)).sum(), leaf)
    return Exact(value.detach().double(), gradient.double())
