"""Kernels over rows of logits, and beside a second stream, of every backend and instruction set,
against float64: statistics, what is pulled through them, and both in one call. What only
divergences have: test_two_row_kernels.py. support/ptx/runs.py runs the same for the Triton kernels
as compiled, benchmarks/gpu_kit.py on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from support.kernel_rows import (
    COOL,
    DTYPES,
    KERNELS,
    KINDS,
    PLAIN,
    TRANSFORMS,
    TRITON,
    UNIT,
    Rows,
    assert_equal_results,
    assert_near_float64,
    in_cpp,
    kernels,
    two_passes,
    ways_to_compute,
    with_reference,
)

V = 531 if TRITON else 5003
#: Each dtype is a kernel of its own to compile.
SOME = DTYPES[1:2] if TRITON else DTYPES
#: No second stream, or one: (kind, mixture) of the divergence.
STREAMS = [None, *(KINDS[:2] + KINDS[3:] if TRITON else KINDS)]
each_stream = pytest.mark.parametrize("second", STREAMS, ids=str)


@pytest.fixture(params=KERNELS)
def module(request):
    with kernels(request.param) as module:
        yield module


def drawn(vocab=V, dtype=torch.float32, shape=(2, 3), reference=None, **fields):
    r = Rows((4 * torch.randn(*shape, vocab)).clamp(-6e4, 6e4).to(dtype), **fields)
    return (
        with_reference(r, r.logits.float() + torch.randn(*shape, vocab), reference, COOL)
        if reference
        else r
    )


def check_each_way(module, r):
    for way, one in ways_to_compute(r):
        assert_near_float64(one, way(module, one))


SIZES = (
    (7, 257, 1, 531) if TRITON else (*range(1, 68, 3), 16, 64, 127, 128, 129, 1000, 4111, 32_001)
)
BOTH = (
    []
    if TRITON
    else [(vocab, dtype, name) for vocab in (65, 1003) for dtype in DTYPES for name in TRANSFORMS]
)


def test_values_and_gradients(module):
    """Rows that end anywhere in a vector, a step or a tile; every dtype with every transform; a
    temperature for each row.
    """
    for vocab, dtype, name in (*zip(SIZES, cycle(DTYPES), cycle(TRANSFORMS), strict=False), *BOTH):
        check_each_way(module, drawn(vocab, dtype, transform=TRANSFORMS[name]))
    for name in list(TRANSFORMS)[-1:] if TRITON else TRANSFORMS:
        t = torch.tensor([0.5, 1.0, 2.0, 0.1, 1.0, 3.0])
        check_each_way(module, drawn(V, transform=TRANSFORMS[name]._replace(inverse_temperature=t)))


def rise(by):
    return lambda x, _: x.copy_(by * torch.arange(float(x.shape[-1])))


def gone(x, targets, columns, what=-math.inf):
    kept = x.gather(-1, targets[:, None])
    x[:, columns] = what
    x.scatter_(-1, targets[:, None], kept)


def sure(x, targets):
    """p close to 1:

    the gradient at a target is 1 - p, which no subtraction from a rounded p survives.
    """
    height = torch.tensor([14.0, 16.0, 18.0, 22.0, 30.0, 300.0])
    x.mul_(0.01).scatter_(-1, targets[:, None], height[:, None])


LOWEST = torch.finfo(torch.float32).min
LATE = V - V % 64  # behind the steps of the widest instruction set
HARD = {
    "confident": sure,
    "far up": lambda x, _: x.add_(1e4),
    "far down": lambda x, _: x.sub_(1e4),
    "further apart than an exponent reaches": lambda x, _: x.mul_(1e4),
    "rising slowly": rise(1e-3),
    "rising by more than 1 a step": rise(0.05),
    "rising by much": rise(0.5),
    "falling": rise(-0.01),
    "from the lowest number": lambda x, targets: gone(x, targets, slice(0, V // 5), LOWEST),
    "all but the end lowest": lambda x, targets: gone(x, targets, slice(0, V - 9), LOWEST),
    "from minus infinity": lambda x, targets: gone(x, targets, slice(0, V // 5)),
    "a third minus infinity": lambda x, targets: gone(x, targets, slice(0, V, 3)),
    "all but one minus infinity": lambda x, targets: gone(x, targets, slice(0, V)),
    "largest last": lambda x, _: x[:, -1].fill_(30.0),
    "largest behind the steps": lambda x, _: x[:, LATE].fill_(40.0),
    "largest within a step": lambda x, _: x[:, V // 2 + 37].fill_(25.0),
    "flat": lambda x, _: x.fill_(1.5),
    "likely and absurd targets": (
        lambda x, targets: x[1::2].scatter_(-1, targets[1::2, None], -700.0)
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_rows(module, name):
    """Exponentials are kept relative to the maximum so far, which the second visit makes up for."""
    for dtype in SOME:
        r = drawn()
        HARD[name](r.logits.view(6, V), r.targets)
        held = torch.where(
            r.logits == -math.inf,
            r.logits,
            r.logits.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max),
        )
        check_each_way(module, replace(r, logits=held.to(dtype)))


VIEWS = {
    "all but the last token": lambda x: x[:, :-1],
    "every second row": lambda x: x[:, ::2],
    "a column of sequences": lambda x: x.transpose(0, 1),
    "a padded vocabulary": lambda x: x[..., 1 : x.shape[-1] - 3],
}


@pytest.mark.parametrize("view", VIEWS)
@each_stream
def test_where_rows_lie(module, view, second):
    """The bits do not depend on strides, of either stream; a gradient goes over its logits, or
    narrower into their memory, and nothing beside it is written.
    """
    for dtype in SOME if second is None else (torch.bfloat16,):
        whole = torch.randn(3, 4, V if second is None else 291).to(dtype)
        logits = VIEWS[view](whole)
        moved = (
            TRITON and view == "a padded vocabulary"
        )  # threads take other columns there, and sums have another order
        dense = Rows(
            VIEWS[view](whole.clone())
            if moved
            else logits.clone(memory_format=torch.contiguous_format)
        )
        if second:
            of_second = VIEWS[view](torch.randn_like(whole))
            dense = with_reference(
                dense, of_second if moved else of_second.contiguous(), second, COOL
            )
        for way, one in ways_to_compute(dense):
            expected, around = way(module, one), whole.clone()
            of_view = replace(one, logits=logits)
            if second:
                of_view.reference = one.reference._replace(logits=of_second)
            assert_equal_results(way(module, of_view), expected, dtype)
            before = whole.clone()
            assert_equal_results(way(module, of_view, out=logits), expected, "in place")
            VIEWS[view](around).copy_(expected[1])
            assert torch.equal(whole, around), "beside the rows"
            whole.copy_(before)


@each_stream
def test_a_row_depends_on_nothing_but_itself(module, second):
    """Bit by bit: not on threads, on the range of rows, on the rows beside it."""
    for dtype in SOME if second is None else SOME[:1]:
        vocab = 2085 if second and not TRITON else 20_011 if in_cpp(module) else V
        r = drawn(
            vocab,
            dtype,
            (3, 4),
            second,
            transform=PLAIN._replace(inverse_temperature=torch.linspace(0.5, 2.0, 12)),
        )
        for way, one in ways_to_compute(r):
            values, gradient = way(module, one)
            torch.set_num_threads(3)
            assert_equal_results(way(module, one), (values, gradient), "threads")
            torch.set_num_threads(1)
            out = torch.full_like(r.logits, math.nan)
            for lo, hi in ((0, 1), (1, 6), (6, 12)):
                if way is two_passes:  # what runs in one visit takes whole logits
                    part, _ = way(module, one, out, (lo, hi))
                    assert all(torch.equal(x, values[name][lo:hi]) for name, x in part.items())
                    assert out.view(12, -1)[hi:].isnan().all(), "rows that were not asked for"
                found, alone = way(module, one.at(lo, hi))
                assert all(torch.equal(x, values[name][lo:hi]) for name, x in found.items())
                assert torch.equal(alone.view(hi - lo, -1), gradient.view(12, -1)[lo:hi])
            assert way is not two_passes or torch.equal(out, gradient)


@each_stream
def test_rows_that_are_not_read(module, second):
    """Whatever they, their targets, their temperatures and their second stream hold, they are 0."""
    read = torch.tensor([True, False, True, True, False, True])
    t = torch.tensor([0.8, math.nan, 1.0, 1.2, math.inf, 1.0])
    for dtype in SOME:
        fine = PLAIN._replace(inverse_temperature=torch.where(read, t, 1.0))
        for way, one in ways_to_compute(
            drawn(1000, dtype, reference=second, mask=read, transform=fine)
        ):
            bad = replace(
                one,
                logits=one.logits.clone(),
                targets=one.targets.clone(),
                transform=PLAIN._replace(inverse_temperature=t),
            )
            bad.logits.view(6, -1)[~read] = torch.tensor([math.nan, math.inf])[:, None].to(dtype)
            bad.targets[~read] = torch.tensor([2**40, -100])
            expected = way(module, one)
            if bad.reference is not None:
                bad.reference = bad.reference._replace(logits=bad.reference.logits.clone())
                bad.reference.logits.view(6, -1)[~read] = math.nan
            assert_equal_results(way(module, bad), expected)
            for name, x in expected[0].items():
                assert name == "top_prob" or (not x[~read].any() and x[read].all()), name
            assert expected[1].view(6, -1).any(1).tolist() == read.tolist()


@pytest.mark.parametrize("at", [0, 500, 1002])
def test_what_cannot_be_computed_shows_in_its_row(module, at):
    """NaN, +inf, a row of only -inf, a target that is no id; rows beside it keep their bits, and
    memory around is not written.
    """
    for dtype in SOME:
        r = drawn(1003, dtype, (1, 6))
        bad = replace(r, logits=r.logits.clone(), targets=r.targets.clone())
        bad.logits[0, 1, at], bad.logits[0, 2, at], bad.logits[0, 3] = math.nan, math.inf, -math.inf
        bad.targets[4] = (-1, 1003, 1 << 60)[(at + 1) % 3]
        for (way, one), (_, spoiled) in zip(ways_to_compute(r), ways_to_compute(bad), strict=True):
            (values, gradient), around = way(module, one), torch.full((3, 6, 1003), 7.0).to(dtype)
            found, out = way(module, spoiled, around[1:2])
            assert_near_float64(spoiled, (found, out))
            fine = [0, 5]
            assert_equal_results(
                ({name: x[fine] for name, x in found.items()}, out[0, fine]),
                ({k: x[fine] for k, x in values.items()}, gradient[0, fine]),
            )
            assert (
                found["logps"][1:5].isnan().all()
                and out[0, 1:3].isnan().all()
                and (around[[0, 2]] == 7.0).all()
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale(module, dtype):
    for shape in ((37,), (2, 3, 531 if TRITON else 40_000)):
        for factor in (0.3, 0.0, -2.0):
            x = torch.randn(shape).to(dtype)
            x.view(-1)[0] = math.nan
            want = x.double() * factor
            module.scale_(x, torch.tensor(factor))
            off = (x - want).abs() - UNIT[dtype] * want.abs() - 2.0**-24
            assert torch.equal(x.isnan(), want.isnan()) and off.nan_to_num(-1.0).max() <= 0
    x = torch.randn(2, 4, 77).to(dtype)
    before = x.clone()
    module.scale_(x[:, :-1], torch.tensor(0.5))
    assert torch.equal(x[:, :-1], before[:, :-1] * 0.5) and torch.equal(x[:, -1], before[:, -1])
