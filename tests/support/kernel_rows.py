"""Rows of logits for tests of the kernels: the calls of a backend, and expected results in float64.

With GRPO_KERNELS_TEST_BACKENDS=triton the kernels are Triton's: in its interpreter, as compiled
(support/ptx), or on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Objective
from grpo_kernels.core import backends
from grpo_kernels.core.backends import Backend
from grpo_kernels.core.divergence import DivergenceKind
from grpo_kernels.core.pairs import Pairs
from grpo_kernels.core.softmax import (
    GradientCoefficients,
    LogitRows,
    ReferenceRows,
    RowTransform,
    SoftmaxSums,
    sums_for,
)
from grpo_kernels.formulas.surrogates import PolicyGradient, Surrogate
from grpo_kernels.formulas.token_inputs import TokenInputs
from grpo_kernels.formulas.token_loss import TokenLossFormula
from support import oracle
from support.bits import note
from support.inside import executor, executors

Found = tuple[
    dict[str, Tensor], Tensor
]  # statistics or values of a loss, [n] each, and the gradient of the logits

TRITON = "triton" in os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "").split()
KERNELS = ["triton"] if TRITON else executors()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: One unit in the last place of 1: Triton's interpreter truncates.
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
EPS = UNIT[torch.float32]
PLAIN, COOL, CAPPED = (
    RowTransform(1.0, 0.0, 1.0),
    RowTransform(1.0, 0.0, 0.8),
    RowTransform(-0.7, 9.0, 1.3),
)
TRANSFORMS = {
    "plain": PLAIN,
    "temperature": COOL,
    "softcap": RowTransform(1.0, 5.0, 1.0),
    "everything": CAPPED,
}
KINDS = [("reverse", 0.0), ("forward", 0.0), ("jsd", 0.5), ("jsd", 0.1), ("tv", 0.0)]


def in_cpp(kernels: Backend) -> bool:
    return type(kernels).__module__.endswith(".cpu")


@contextmanager
def kernels(name: str) -> Iterator[Backend]:
    """A backend, with one instruction set.

    Tiles of Triton are small, so that short rows have several.
    """
    with executor(name) as backend, pytest.MonkeyPatch.context() as patch:
        if backend == "triton":
            from grpo_kernels.core.backends.triton.launch import LAUNCH

            for kind in LAUNCH.keys() - {"pairs"}:
                patch.setitem(LAUNCH, kind, LAUNCH[kind]._replace(threads=32, accesses=1))
        yield backends.load(backend).Kernels()


def transformed(x: Tensor, transform: RowTransform) -> Tensor:
    """z of rows [n, V] in x's dtype, by the formula."""
    t = transform.inverse_temperature
    x = x * transform.scale
    x = transform.softcap * torch.tanh(x / transform.softcap) if transform.softcap else x
    return x * (t.to(x.dtype)[:, None] if isinstance(t, Tensor) else t)


@dataclass
class Rows:
    """The rows of a kernel call. Targets and upstream gradients are random.

    slopes   upstream gradients of the statistics by name, [num_rows] each, 0 in masked rows
    """

    logits: Tensor  # [A, T, V]
    transform: RowTransform = PLAIN
    reference: ReferenceRows | None = None
    mask: Tensor | None = None
    targets: Tensor = field(default_factory=lambda: torch.empty(0))
    slopes: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.slopes:
            n, vocab = self.count, self.logits.shape[-1]
            self.targets = (
                torch.randint(max(vocab, 1), (n,))
                if self.targets.dtype != torch.int64
                else self.targets
            )
            names = ("logps", "entropy", "sum_squares") + ("divergence",) * (
                self.reference is not None
            )
            live = torch.ones(n) if self.mask is None else self.mask.float()
            self.slopes = {name: torch.randn(n) * live for name in names}

    @property
    def count(self) -> int:
        return self.logits.shape[0] * self.logits.shape[1]

    def only(self, *names: str) -> Rows:
        """Return the rows with upstream gradients of these statistics alone."""
        return replace(self, slopes={name: self.slopes[name] for name in names})

    @property
    def divergence_alone(self) -> Rows:
        """The rows with an upstream gradient of the divergence alone, as for its loss."""
        return replace(
            self, slopes={"logps": torch.zeros(self.count), "divergence": self.slopes["divergence"]}
        )

    def at(self, lo: int, hi: int) -> Rows:
        """Return rows lo to hi as [hi - lo, 1, V], copied."""

        def alone(x: Tensor) -> Tensor:
            return x.reshape(self.count, 1, x.shape[-1])[rows].clone()

        rows = slice(lo, hi)
        second = (
            None
            if self.reference is None
            else self.reference.select(rows)._replace(logits=alone(self.reference.logits))
        )
        slopes, read = (
            {name: x[rows] for name, x in self.slopes.items()},
            None if self.mask is None else self.mask[rows],
        )
        return Rows(
            alone(self.logits),
            self.transform.select(rows),
            second,
            read,
            self.targets[rows],
            slopes,
        )


def with_reference(
    r: Rows, logits: Tensor, second: tuple[str, float], transform: RowTransform = PLAIN
) -> Rows:
    """Return the rows with the logits of a reference, and new upstream gradients.

    second   (direction, mixture) of the divergence
    """
    return Rows(
        r.logits,
        r.transform,
        ReferenceRows(logits.view(r.logits.shape), transform, DivergenceKind(*second)),
        r.mask,
        r.targets,
    )


# ---- by the kernels


def to_logit_rows(r: Rows, part: tuple[int, int] | None = None) -> LogitRows:
    rows = LogitRows(r.logits, r.targets, r.mask, r.transform, r.reference)
    return rows.slice_rows(*part) if part else rows


def softmax_sums_of(kernels: Backend, r: Rows, part: tuple[int, int] | None = None) -> SoftmaxSums:
    kind = r.reference.direction if r.reference else ""
    statistics = ("entropy", "sum_squares", "top_id") + ("divergence",) * bool(kind)
    return kernels.softmax_sums(to_logit_rows(r, part), sums_for(statistics, kind))


def statistics_of(stats: SoftmaxSums, r: Rows) -> dict[str, Tensor]:
    names = ("logps", "entropy", "sum_squares", "top_prob") + ("divergence",) * (
        r.reference is not None
    )
    return {name: getattr(stats, name) for name in names}


def make_coefficients(stats: SoftmaxSums, slopes: dict[str, Tensor]) -> GradientCoefficients:
    return GradientCoefficients.from_gradients(stats, slopes, None)


def two_passes(
    kernels: Backend, r: Rows, out: Tensor | None = None, part: tuple[int, int] | None = None
) -> Found:
    """Return statistics and gradient of the logits, from a forward and a backward kernel call."""
    stats, of = softmax_sums_of(kernels, r, part), slice(*part) if part else slice(None)
    out = (
        torch.full_like(r.logits, torch.nan, memory_format=torch.contiguous_format)
        if out is None
        else out
    )
    kernels.softmax_gradient(
        to_logit_rows(r, part),
        stats,
        make_coefficients(stats, {name: x[of] for name, x in r.slopes.items()}),
        out,
    )
    return statistics_of(stats, r), out


def loss_formula_of(r: Rows, surrogate: Surrogate | None = None) -> TokenLossFormula:
    """Return a loss whose gradients of log-prob, entropy and divergence are r.slopes."""
    n, bonus = r.count, r.slopes.get("entropy")
    rows = TokenInputs(
        r.targets, r.mask, advantages=-r.slopes["logps"], policy_weight=torch.ones(n), divergence_weight=r.slopes.get("divergence"),
        entropy_weight=None if bonus is None else -bonus,
    )  # fmt: skip
    return Objective(
        surrogate or PolicyGradient(), entropy_coef=0.0 if bonus is None else 0.3
    ).loss_formula(rows)


def fused_loss_call(
    kernels: Backend, r: Rows, out: Tensor | None = None, part: tuple[int, int] | None = None
) -> Found:
    """Return statistics, losses and gradient of the logits, from one kernel call."""
    out = (
        torch.full_like(r.logits, torch.nan, memory_format=torch.contiguous_format)
        if out is None
        else out
    )
    values = kernels.fused_loss(
        to_logit_rows(r, part),
        loss_formula_of(r).select(slice(*part)) if part else loss_formula_of(r),
        out,
    )
    found = {"logps": values.logps, "entropy": values.entropy, "losses": values.losses}
    if values.divergence is not None:
        found["divergence"] = values.divergence
    return found, out


def ways_to_compute(r: Rows) -> list[tuple[Callable[..., Found], Rows]]:
    """What kernels make of rows, each with the slopes that it takes: all statistics in two visits;
    losses in one call, with an entropy bonus and without, of the divergence alone where there is
    one.
    """
    names = ("logps", "entropy") + ("divergence",) * (r.reference is not None)
    return [
        (two_passes, r),
        (fused_loss_call, r.only(*names)),
        (fused_loss_call, r.only("logps") if r.reference is None else r.divergence_alone),
    ]


# ---- in float64


def exact(r: Rows, dtype: torch.dtype = torch.float64) -> Found:
    """Statistics and losses, and the gradient [n, V], by autograd in a dtype: NaN of a target that
    is no id, 0 where a row is not read.
    """
    live = torch.ones(r.count, dtype=torch.bool) if r.mask is None else r.mask
    leaf = r.logits.detach().reshape(r.count, r.logits.shape[-1])[live].to(dtype).requires_grad_()
    log_p = transformed(leaf, r.transform.select(live)).log_softmax(-1)
    p, targets = log_p.exp(), r.targets[live]
    finite, no_id = (
        log_p.masked_fill(p == 0, 0.0),
        torch.where((targets < 0) | (targets >= leaf.shape[-1]), torch.nan, 1.0),
    )
    found = {
        "logps": log_p.gather(1, torch.where(no_id.isnan(), 0, targets)[:, None])[:, 0] * no_id.to(dtype),
        "entropy": -(p * finite).sum(-1), "sum_squares": p.square().sum(-1), "top_prob": p.amax(-1),
    }  # fmt: skip
    if r.reference is not None:
        w = r.reference.logits.reshape(r.count, leaf.shape[-1])[live].to(dtype)
        log_q = transformed(w, r.reference.transform.select(live)).log_softmax(-1)
        found["divergence"] = oracle.divergence(
            log_p, log_q, r.reference.direction, r.reference.mixture
        )
    slopes = {name: x[live].to(dtype) for name, x in r.slopes.items()}
    found["losses"] = torch.zeros(len(leaf), dtype=dtype)
    for name in slopes.keys() - {"sum_squares"}:
        left_out = (slopes[name] == 0) & (name == "divergence")
        found["losses"] = found["losses"] + torch.where(left_out, 0.0, slopes[name] * found[name])
    (gradient,) = torch.autograd.grad(
        sum((x * found[name]).sum() for name, x in slopes.items()), leaf
    )  # type: ignore[union-attr]

    def spread(x: Tensor, elsewhere: float = 0.0) -> Tensor:
        return torch.full((r.count, *x.shape[1:]), elsewhere, dtype=torch.float64).masked_scatter(
            live.view(-1, *[1] * (x.dim() - 1)), x.detach().double()
        )

    return {name: spread(x, float(name == "top_prob")) for name, x in found.items()}, spread(
        gradient
    )


def first_order(r: Rows) -> tuple[Any, Any]:
    """How far the value [n] and the gradient [n, V] of a total variation may be off, which a
    log-ratio off by its rounding in fp32 is of first order in: of columns whose log-ratio is no
    larger than that, either sign is right. 0 of other divergences.
    """
    if r.reference is None or r.reference.direction != "tv" or "divergence" not in r.slopes:
        return 0.0, 0.0
    transforms = (r.transform, r.reference.transform)
    z, w = (
        transformed(x.double().flatten(0, 1), t)
        for x, t in zip((r.logits, r.reference.logits), transforms, strict=True)
    )
    (top, top_w), (p, q) = (
        (x.amax(-1, keepdim=True) for x in (z, w)),
        (x.softmax(-1) for x in (z, w)),
    )
    log_ratio, d, apart = (
        z.log_softmax(-1) - w.log_softmax(-1),
        (z - top) - (w - top_w),
        (top - top_w).abs(),
    )
    size = (
        (z - w).abs()
        + apart
        + (log_ratio - d).abs()
        + (p * d.abs()).nan_to_num(0.0).sum(-1, keepdim=True)
    )
    of_each = z.abs() + w.abs() + top.abs() + top_w.abs() + 1.0
    near_and_plain = (apart <= 4.0) & all(t is PLAIN for t in transforms)
    rounding = 4 * EPS * torch.where(near_and_plain, size, size + of_each)
    rounding = torch.where(log_ratio.isfinite(), rounding, 0.0)
    near = ((log_ratio != 0) & (log_ratio.abs() <= rounding)).double()
    t = r.transform.inverse_temperature
    steep = (
        abs(r.transform.scale)
        * (t if isinstance(t, Tensor) else torch.tensor(t)).double().view(-1, 1).abs()
    )
    steep = steep * r.slopes["divergence"].double().abs()[:, None]
    of_value = (torch.maximum(p, q) * rounding).sum(-1) / 2.0
    of_gradient = p * (near + (p * near).sum(-1, keepdim=True))
    return of_value.nan_to_num(0.0), (of_gradient * steep).nan_to_num(0.0)


def check(r: Rows, *found: Found) -> None:
    """None of them is further from float64 than a careful computation in fp32, but for a rounding
    or two. NaN shows, but in losses without a slope.
    """
    (right, exactly), (naive, theirs), (of_value, of_gradient) = (
        exact(r),
        exact(r, torch.float32),
        first_order(r),
    )
    z = transformed(r.logits.double().reshape(exactly.shape), r.transform)
    counts = z.isfinite() & (
        z > z.nan_to_num(neginf=-1e300).amax(-1, keepdim=True) - 200.0
    )  # others have no probability
    size = torch.where(counts, z.abs(), 0.0).amax(-1, keepdim=True).clamp(min=1.0)
    rounded = 0.0 if r.transform is PLAIN else 0.5 * EPS * size[:, 0]  # of transformed logits
    for values, _ in found:
        for name, x in values.items():
            y, off = right[name], (naive[name] - right[name]).abs()
            known, broken = y.isfinite(), y.isnan()
            assert torch.equal(x[~broken].isinf(), y[~broken].isinf()), name
            assert name == "losses" or not x[broken].isfinite().any(), name
            slack = 1.5 * off[known].amax() if known.any() else 0.0
            room = (
                slack + 8 * EPS * (1 + y.abs()) + rounded
                if name != "divergence"
                else off + 3e-6 * y + 1e-12 + of_value + rounded * y.abs().sqrt()
            )
            error = (x.double() - y).abs()
            assert (error <= room)[known].all(), (
                f"{name}: off by {(error - room)[known].max():.3g} beyond the room"
            )
            assert name not in ("divergence", "entropy", "sum_squares") or (x[known] >= 0).all()
            note(name, (error / (1 + y.abs()))[known])
    t = r.transform.inverse_temperature
    t = (t if isinstance(t, Tensor) else torch.tensor(t)).double().view(-1, 1).abs()
    of_slopes = torch.zeros(r.count, 1, dtype=torch.float64)
    for name, slope in r.slopes.items():
        size_of = 1.0 if name == "logps" else 1 + right[name].abs()
        of_slopes[:, 0] += torch.where(slope == 0, 0.0, slope.double().abs() * size_of)
    steepest, fine = exactly.abs().amax(-1, keepdim=True), exactly.isfinite().all(-1)
    room = (theirs - exactly).abs().amax(-1, keepdim=True) + EPS * (4 + size) * of_slopes * abs(
        r.transform.scale
    ) * t
    if (
        r.reference is not None
    ):  # the divergence is taken off each log-ratio, which cancels where it is large
        room = room + 1e-6 * steepest + of_gradient
    for _, gradient in found:
        gradient = gradient.reshape(exactly.shape)
        stored = UNIT[gradient.dtype] * exactly.abs() + (
            2.0**-24 if gradient.dtype == torch.float16 else 0.0
        )
        error = (gradient.double() - exactly).abs() - stored
        note("gradients", (error / (of_slopes + 1e-30))[fine])
        room = room.expand_as(error)
        assert (error <= room)[fine].all(), (
            f"gradient: {(error - room)[fine].max():.3g} beyond the room"
        )


def same(found: Found, expected: Found, what: object = "") -> None:
    """The same bits, NaN as NaN."""
    theirs = {**expected[0], "gradient": expected[1]}
    for name, x in {**found[0], "gradient": found[1]}.items():
        assert torch.equal(x.nan_to_num(7e30), theirs[name].nan_to_num(7e30)), (what, name)


def row_pairs(vocab: int) -> tuple[Tensor, Tensor]:
    """fp32 [10, vocab] twice: flat, peaked, nearly one-hot rows, nearly disjoint ones, equal ones,
    some far from 0, and a teacher that agrees but for one id; two maxima stand late in a row.
    """
    flat, peaked = torch.randn(2, vocab) * 0.1, torch.randn(2, vocab) * 6.0
    one_hot, other, half = torch.zeros(vocab), torch.zeros(vocab), torch.arange(vocab) < vocab // 2
    one_hot[vocab // 2], other[vocab - 1] = 25.0, 25.0
    best = torch.where(torch.arange(vocab) == int(peaked[1].argmax()), 2.0, 0.0)
    z = [flat[0], peaked[0], flat[0], one_hot, peaked[0], one_hot, torch.where(half, 0.0, -60.0)]
    w = [flat[1], peaked[1], peaked[1], flat[0], one_hot, other, torch.where(half, -60.0, 0.0)]
    z, w = (
        torch.stack([*z, peaked[0], peaked[0] + 80.0, peaked[1]]),
        torch.stack([*w, peaked[0], peaked[0] - 3 + flat[1], peaked[1] + best]),
    )
    z[1, -1], w[2, -1] = z.max() + 3.0, w.max() + 3.0
    return z, w


# ---- slots of sparse products, and matrices for them


def slots_of(lists: Sequence[Sequence[int]]) -> Pairs:
    """Pairs from the ids of each row; -1: a slot that is not used."""
    counts = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
    ids = torch.tensor([i for ids in lists for i in ids], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Pairs(ids, offsets, torch.repeat_interleave(torch.arange(len(lists)), counts))


def random_slots(n: int, vocab: int) -> Pairs:
    """Rows of 0 to 9 slots with repeated ids and some that are not used; id 0 is in every third
    row, id 1 in none.
    """
    g = torch.Generator().manual_seed(0)
    lists = []
    for i in range(n):
        count = int(torch.randint(0, 10, (), generator=g)) if i % 5 else 0
        ids = torch.randint(2, vocab, (count,), generator=g).tolist()
        lists.append([-1 if k % 4 == 3 else x for k, x in enumerate(ids)] + [0] * (i % 3 == 0))
    return slots_of(lists)


def values_for(slots: Pairs) -> Tensor:
    """Every seventh value is 0."""
    values = torch.randn(slots.ids.shape, generator=torch.Generator().manual_seed(1))
    values[::7] = 0.0
    return values


def matrix(rows: int, width: int, dtype: torch.dtype, seed: int, gap: int = 0) -> Tensor:
    """Random numbers; with `gap` the rows lie further apart than they are wide."""
    numbers = torch.randn(rows, width + gap, generator=torch.Generator().manual_seed(seed)) / 2
    return numbers.to(dtype)[:, gap // 2 : gap // 2 + width]
