"""Two streams of rows for divergences, with their results in float64 and by a careful fp32 computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from grpo_kernels import Exact, TokenSets
from grpo_kernels.vocabulary.hidden import FlatHead
from grpo_kernels.vocabulary.rows import RowTransform, Teacher
from grpo_kernels.vocabulary.stage import vocabulary_stage
from grpo_kernels.vocabulary.teachers import TeacherHead
from support import oracle
from support.largest import note

Tensor = torch.Tensor

KINDS = [("reverse", 0.0), ("forward", 0.0), ("jsd", 0.5), ("jsd", 0.1)]
PLAIN = RowTransform(1.0, 0.0, 1.0)
#: A negative scale with a softcap, and a temperature alone.
CAPPED, COOL = RowTransform(-0.7, 9.0, 1.3), RowTransform(1.0, 0.0, 0.8)


class Expected(NamedTuple):
    value: Tensor  # fp64 [n]
    gradient: Tensor  # fp64 [n, V], of the student's logits


def row_pairs(vocab: int) -> tuple[Tensor, Tensor]:
    """fp32 [n, vocab] twice: flat, peaked, nearly one-hot rows, nearly disjoint ones, equal ones, some far from 0, and a
    teacher that agrees but for one id."""
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


def streams(vocab: int, kind: str, mixture: float) -> Iterator[tuple[Tensor, Teacher, RowTransform]]:
    """(logits, teacher, transform) of row_pairs by dtypes and transforms of each stream; two maxima stand late in a row."""
    z, w = row_pairs(vocab)
    z[1, -1], w[2, -1] = z.max() + 3.0, w.max() + 3.0
    half, single = torch.bfloat16, torch.float32
    for dtypes, transforms in (
        ((single, single), (PLAIN, PLAIN)),
        ((half, torch.float16), (CAPPED, COOL)),
        ((single, half), (COOL, CAPPED)),
    ):
        yield z.to(dtypes[0]), Teacher(w.to(dtypes[1])[None], transforms[1], kind, mixture), transforms[0]


def transformed(x: Tensor, transform: RowTransform) -> Tensor:
    """z of rows x [n, V] in x's dtype."""
    t = transform.inv_temperature
    t = t.to(x.dtype)[:, None] if isinstance(t, Tensor) else t
    x = x * transform.scale
    return (transform.softcap * torch.tanh(x / transform.softcap) if transform.softcap else x) * t


def expected(
    logits: Tensor, teacher: Teacher, transform: RowTransform, upstream: Tensor, dtype: torch.dtype = torch.float64
) -> Expected:
    """The divergence of rows [n, V] and the gradient of its sum with weights `upstream`. With fp32 these are the lines of a careful
    trainer."""
    leaf = logits.detach().to(dtype).requires_grad_()
    rows = teacher.logits.reshape(logits.shape).to(dtype)
    logps, of_teacher = (x.log_softmax(-1) for x in (transformed(leaf, transform), transformed(rows, teacher.transform)))
    value = oracle.divergence(logps, of_teacher, teacher.kind, teacher.mixture)
    (gradient,) = torch.autograd.grad((value * upstream.to(dtype)).sum(), leaf)
    return Expected(value.detach().double(), gradient.double())


def of_listed_ids(exact: Exact, log_p: Tensor, sets: TokenSets) -> Tensor:
    """[n] of log-probs [n, V], to those that `sets` has as values: from the formulas of the four tails. 0 of a row without ids."""
    row, place = sets.row_of.long(), torch.arange(sets.ids.numel()) - sets.offsets[sets.row_of.long()]
    listed = torch.zeros(len(log_p), max(sets.longest, 1), dtype=torch.bool).index_put((row, place), torch.tensor(True))
    used = listed.any(1)
    listed[~used, 0] = True  # any id, so that nothing is NaN
    ids = torch.zeros(listed.shape, dtype=torch.int64).index_put((row, place), sets.ids.long())
    lq = torch.zeros(listed.shape, dtype=log_p.dtype).index_put((row, place), sets.values.to(log_p.dtype))  # type: ignore[union-attr]
    lp, lq = (x.masked_fill(~listed, -torch.inf) for x in (log_p.gather(1, ids), lq))
    p, q = lp.exp().sum(1), lq.exp().sum(1)
    if exact.tail == "bin":
        outside = log_p.exp().masked_fill(sets.mask(log_p.shape[1]), 0.0).sum(1), 1 - q
        lp, lq = (torch.cat([x, mass.clamp(min=1e-7).log()[:, None]], 1) for x, mass in zip((lp, lq), outside, strict=True))
    elif exact.tail == "renormalise":
        lp, lq = lp.log_softmax(1), lq.log_softmax(1)
    value = oracle.divergence(lp, lq, exact.direction, exact.share)
    if exact.tail == "generalised" and exact.direction != "jsd":  # the masses of a mixture cancel
        value = value + {"reverse": 1, "forward": -1}[exact.direction] * (q - p)
    return torch.where(used, value, 0.0)


def check(found: Tensor, gradient: Tensor, logits: Tensor, teacher: Teacher, transform: RowTransform, upstream: Tensor) -> None:
    """No row is further from float64 than a careful fp32 computation, but for a rounding or two."""
    exact, naive = (expected(logits, teacher, transform, upstream, dtype) for dtype in (torch.float64, torch.float32))
    found, gradient = found.detach().double(), gradient.double()
    assert (found >= 0).all()
    infinite = exact.value.isinf()
    assert torch.equal(found.isinf(), infinite)
    error, allowed = (found - exact.value).abs(), (naive.value - exact.value).abs() + 3e-6 * exact.value + 1e-12
    note("divergences", error / (1 + exact.value))
    assert (error <= allowed)[~infinite].all(), (error - allowed)[~infinite].max()
    rounding = 0.0 if logits.dtype == torch.float32 else torch.finfo(logits.dtype).eps
    error, scale = (gradient - exact.gradient).abs(), exact.gradient.abs()
    beyond = error - rounding * scale - (6e-8 if logits.dtype == torch.float16 else 0.0)
    note("divergence gradients", (beyond / (upstream.abs()[:, None] + scale.amax(-1, keepdim=True)))[~infinite])
    allowed = (naive.gradient - exact.gradient).abs().amax(-1, keepdim=True) + (3e-6 + rounding) * scale
    allowed = allowed + 1e-6 * scale.amax(-1, keepdim=True) + (6e-8 if logits.dtype == torch.float16 else 1e-12)
    allowed = allowed + 2e-7 * (exact.value * upstream.abs())[:, None]  # the divergence is taken off each log-ratio
    assert (error <= allowed)[~infinite].all(), (error - allowed)[~infinite].max()


def check_small_share(run: Callable[[Tensor, Teacher, Tensor], tuple[Tensor, Tensor]], mixture: float) -> None:
    """Checks the jsd with shares of one in a million. run(logits [1, n, V]) returns (divergences [n], gradients [1, n, V])."""
    z, w = 4.0 * torch.randn(2, 6, 131)
    z[0, 7], w[1, 9] = 8.0, 40.0
    teacher, weights = Teacher(w[None], PLAIN, "jsd", mixture), torch.linspace(0.5, 2.0, 6)
    found, gradient = run(z[None], teacher, weights)
    exact = expected(z, teacher, PLAIN, weights)
    torch.testing.assert_close(found.double(), exact.value, rtol=3e-6, atol=0.0)
    error = (gradient[0].double() - exact.gradient).norm(dim=-1) / exact.gradient.norm(dim=-1)
    assert error.max() <= 2e-5, error  # of a factor near log(1e6), from which its mean is taken


# ---- rows of both streams from hidden states

N, V, WIDTH, OTHER = 11, 61, 16, 10
WARM, COLD = RowTransform(0.9, 11.0, 1.2), RowTransform(1.0, 0.0, torch.linspace(0.5, 1.4, N))
READ = torch.tensor([True] * 4 + [False] * 2 + [True] * 5)


class Rows:
    """Hidden states and heads of both streams. `shared`: one head for both; `student`: its leaves, in fp64 for the oracle."""

    def __init__(self, dtype: torch.dtype = torch.float32, shared: bool = False, bias: bool = True) -> None:
        self.hidden = torch.randn(N, WIDTH).to(dtype)
        self.weight = (2.0 * WIDTH**-0.5 * torch.randn(V, WIDTH)).to(dtype)
        self.bias = torch.randn(V).to(dtype) if bias else None
        if shared:
            self.teacher = FlatHead((self.hidden + 0.3 * torch.randn(N, WIDTH)).to(dtype), self.weight, self.bias, dtype)
        else:
            own = torch.randn(N, OTHER), OTHER**-0.5 * torch.randn(V, OTHER), torch.randn(V)
            self.teacher = FlatHead(*(x.to(torch.bfloat16) for x in own), torch.bfloat16)

    @property
    def leaves(self) -> list[Tensor | None]:
        given = (self.hidden, self.weight, self.bias)
        return [None if x is None else x.detach().clone().requires_grad_() for x in given]

    def heads(self, kind: str, mixture: float, leaves: list[Any]) -> TeacherHead:
        """The head of the second stream; if it is shared, the one of these leaves."""
        own = self.teacher
        if own.weight is self.weight:
            own = replace(own, weight=leaves[1], bias=leaves[2])
        return TeacherHead(own, COLD, kind, mixture)

    def log_probs(self, leaves: list[Any], keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of both streams in fp64, over the ids of `keep` bool [N, V]."""
        logits = torch.nn.functional.linear(*leaves)
        of_teacher = torch.nn.functional.linear(*(None if x is None else x.double() for x in self.teacher.tensors))
        z, w = transformed(logits, WARM), transformed(of_teacher, COLD)
        if keep is not None:
            z, w = z.masked_fill(~keep, -torch.inf), w.masked_fill(~keep, -torch.inf)
        return z.log_softmax(-1), w.log_softmax(-1)

    def expected(self, kind: str, mixture: float, upstream: Tensor, keep: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Divergences, 0 where not read, and the gradients of their sum with weights `upstream`."""
        leaves: list[Any] = [None if x is None else x.double().requires_grad_() for x in (self.hidden, self.weight, self.bias)]
        value = torch.where(READ, oracle.divergence(*self.log_probs(leaves, keep), kind, mixture), 0.0)
        wanted = [x for x in leaves if x is not None]
        return value.detach(), list(torch.autograd.grad((value * upstream).sum(), wanted))


def near(found: list[Tensor], exact: list[Tensor], relative: float = 2e-5) -> None:
    assert len(found) == len(exact)
    for x, y in zip(found, exact, strict=True):
        scale = float(y.abs().max())
        assert scale > 0 and float((x.double() - y).abs().max()) <= relative * scale


def through_stage(
    source: Any, leaves: list[Any], upstream: Tensor, targets: Tensor | None = None, at: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Divergences, and the gradients of their sum with weights `upstream`, plus that of the log-probs at ids with weights `at`."""
    targets = torch.zeros(N, dtype=torch.int64) if targets is None else targets
    _, found = vocabulary_stage(source, ("divergence",), ("divergence",), targets, READ, WARM, *leaves)
    value, total = found["divergence"], (found["divergence"] * upstream).sum()
    if at is not None:
        total = total + (found["at"] * at).sum()
    return value.detach(), list(torch.autograd.grad(total, [x for x in leaves if x is not None]))


def keep_of(lists: list[list[int]]) -> Tensor:
    keep = torch.ones(N, V, dtype=torch.bool)
    for i, ids in enumerate(lists):
        if ids:
            keep[i] = False
            keep[i, ids] = True
    return keep


SETS = [[3], [5, 60, 2], list(range(1, 61, 2)), [], [9, 8], [4], [0, 1, 2, 3], [], [59, 60], [7, 8, 9], [30]]
