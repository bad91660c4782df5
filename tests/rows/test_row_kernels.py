"""Kernels over rows of logits, and beside a second stream, of every backend and instruction set, against float64: statistics, what
is pulled through them, and both in one call. What only divergences have: test_two_row_kernels.py. support/ptx/runs.py runs the
same for the Triton kernels as compiled, benchmarks/gpu_kit.py on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from grpo_kernels.formulas.surrogates import Custom
from grpo_kernels.rows.backends import Backend
from grpo_kernels.rows.partials import partials_of
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
    beside,
    check,
    exact,
    fused,
    given,
    in_cpp,
    kernels,
    same,
    slopes_of,
    stage_of,
    stats_of,
    visited,
    ways,
)

Tensor = torch.Tensor
V = 531 if TRITON else 5003
#: Each dtype is a kernel of its own to compile.
SOME = DTYPES[1:2] if TRITON else DTYPES
#: No second stream, or one: (kind, mixture) of the divergence.
STREAMS = [None, *(KINDS[:2] + KINDS[3:] if TRITON else KINDS)]
each_stream = pytest.mark.parametrize("second", STREAMS, ids=str)


@pytest.fixture(params=KERNELS)
def module(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with kernels(request.param) as module:
        yield module


def drawn(
    vocab: int = V, dtype: torch.dtype = torch.float32, shape: tuple[int, int] = (2, 3), second: Any = None, **fields: Any
) -> Rows:
    r = Rows((4 * torch.randn(*shape, vocab)).clamp(-6e4, 6e4).to(dtype), **fields)
    return beside(r, r.logits.float() + torch.randn(*shape, vocab), second, COOL) if second else r


def check_each_way(module: Backend, r: Rows) -> None:
    for way, one in ways(r):
        check(one, way(module, one))


SIZES = (7, 257, 1, 531) if TRITON else (*range(1, 68), 127, 128, 129, 1000, 4111, 32_001)
BOTH = [] if TRITON else [(vocab, dtype, name) for vocab in (65, 1003) for dtype in DTYPES for name in TRANSFORMS]


def test_values_and_gradients(module: Backend) -> None:
    """Rows that end anywhere in a vector, a step or a tile; every dtype with every transform; a temperature for each row."""
    for vocab, dtype, name in (*zip(SIZES, cycle(DTYPES), cycle(TRANSFORMS), strict=False), *BOTH):
        check_each_way(module, drawn(vocab, dtype, transform=TRANSFORMS[name]))
    for name in list(TRANSFORMS)[-1:] if TRITON else TRANSFORMS:
        t = torch.tensor([0.5, 1.0, 2.0, 0.1, 1.0, 3.0])
        check_each_way(module, drawn(V, transform=TRANSFORMS[name]._replace(inv_temperature=t)))


def rise(by: float) -> Callable[[Tensor, Tensor], Any]:
    return lambda x, _: x.copy_(by * torch.arange(float(x.shape[-1])))


def gone(x: Tensor, targets: Tensor, columns: slice, what: float = -math.inf) -> None:
    kept = x.gather(-1, targets[:, None])
    x[:, columns] = what
    x.scatter_(-1, targets[:, None], kept)


def sure(x: Tensor, targets: Tensor) -> None:
    """p close to 1: the gradient at a target is 1 - p, which no subtraction from a rounded p survives."""
    height = torch.tensor([14.0, 16.0, 18.0, 22.0, 30.0, 300.0])
    x.mul_(0.01).scatter_(-1, targets[:, None], height[:, None])


LOWEST = torch.finfo(torch.float32).min
LATE = V - V % 64  # behind the steps of the widest instruction set
HARD: dict[str, Callable[[Tensor, Tensor], Any]] = {
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
    "likely and absurd targets": lambda x, targets: x[1::2].scatter_(-1, targets[1::2, None], -700.0),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_rows(module: Backend, name: str) -> None:
    """Exponentials are kept relative to the maximum so far, which the second visit makes up for."""
    for dtype in SOME:
        r = drawn()
        HARD[name](r.logits.view(6, V), r.targets)
        held = torch.where(r.logits == -math.inf, r.logits, r.logits.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max))
        check_each_way(module, replace(r, logits=held.to(dtype)))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all but the last token": lambda x: x[:, :-1],
    "every second row": lambda x: x[:, ::2],
    "a column of sequences": lambda x: x.transpose(0, 1),
    "a padded vocabulary": lambda x: x[..., 1 : x.shape[-1] - 3],
}


@pytest.mark.parametrize("view", VIEWS)
@each_stream
def test_where_rows_lie(module: Backend, view: str, second: Any) -> None:
    """The bits do not depend on strides, of either stream; a gradient goes over its logits, or narrower into their memory, and
    nothing beside it is written."""
    for dtype in SOME if second is None else (torch.bfloat16,):
        whole = torch.randn(3, 4, V if second is None else 291).to(dtype)
        logits = VIEWS[view](whole)
        moved = TRITON and view == "a padded vocabulary"  # threads take other columns there, and sums have another order
        dense = Rows(VIEWS[view](whole.clone()) if moved else logits.clone(memory_format=torch.contiguous_format))
        if second:
            of_second = VIEWS[view](torch.randn_like(whole))
            dense = beside(dense, of_second if moved else of_second.contiguous(), second, COOL)
        for way, one in ways(dense):
            expected, around = way(module, one), whole.clone()
            of_view = replace(one, logits=logits)
            if second:
                of_view.second = one.second._replace(logits=of_second)  # type: ignore[union-attr]
            same(way(module, of_view), expected, dtype)
            before = whole.clone()
            same(way(module, of_view, out=logits), expected, "in place")
            VIEWS[view](around).copy_(expected[1])
            assert torch.equal(whole, around), "beside the rows"
            whole.copy_(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_stream
def test_a_gradient_of_another_dtype(module: Backend, dtype: torch.dtype, second: Any) -> None:
    """Apart and, where the backend says that it may, narrower at the beginning of its row of logits: the same but for rounding."""
    for of_logits in SOME if second is None else (torch.float32,):
        r = drawn(1003 if second is None else 291, of_logits, second=second)
        for way, one in ways(r):
            found = way(module, one, out=torch.full(r.logits.shape, math.nan, dtype=dtype))
            check(one, found)
            if module.writes_behind_reads and dtype.itemsize < of_logits.itemsize:
                logits = r.logits.clone()
                narrow = logits.view(dtype)[..., : r.logits.shape[-1]]
                same(way(module, replace(one, logits=logits), out=narrow), found, "narrower, in place")


@each_stream
def test_a_row_depends_on_nothing_but_itself(module: Backend, second: Any) -> None:
    """Bit by bit: not on threads, on the range of rows, on the rows beside it, on what a thread's memory held before."""
    for dtype in SOME if second is None else SOME[:1]:
        vocab = 2085 if second and not TRITON else 20_011 if in_cpp(module) else V
        t = torch.linspace(0.5, 2.0, 12)
        r = drawn(vocab, dtype, (3, 4), second, transform=PLAIN._replace(inv_temperature=t))
        expected = [way(module, one) for way, one in ways(r)]
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            for way, one in ways(drawn(7, dtype, (1, threads), second)):
                way(module, one)
            for (way, one), right in zip(ways(r), expected, strict=True):
                same(way(module, one), right, threads)
        torch.set_num_threads(1)
        out = torch.full_like(r.logits, math.nan)
        for lo, hi in ((0, 1), (1, 6), (6, 11), (11, 12)):
            part, _ = visited(module, r, out, (lo, hi))
            assert all(torch.equal(x, expected[0][0][name][lo:hi]) for name, x in part.items())
            assert out.view(12, -1)[hi:].isnan().all(), "rows that were not asked for"
        assert torch.equal(out, expected[0][1])
        for (way, one), (values, gradient) in zip(ways(r), expected, strict=True):
            for i in (0, 5, 11):
                found = way(module, one.at(i, i + 1))
                assert all(torch.equal(x[0], values[name][i]) for name, x in found[0].items())
                assert torch.equal(found[1].view(-1), gradient.view(12, -1)[i])


@each_stream
def test_rows_that_are_not_read(module: Backend, second: Any) -> None:
    """Whatever they, their targets, their temperatures and their second stream hold, they are 0."""
    read = torch.tensor([True, False, True, True, False, True])
    t = torch.tensor([0.8, math.nan, 1.0, 1.2, math.inf, 1.0])
    for dtype in SOME:
        clean = drawn(
            1000, dtype, second=second, read=read, transform=PLAIN._replace(inv_temperature=torch.where(read, t, 1.0))
        )
        for way, one in ways(clean):
            bad = replace(
                one, logits=one.logits.clone(), targets=one.targets.clone(), transform=one.transform._replace(inv_temperature=t)
            )
            bad.logits.view(6, -1)[~read] = torch.tensor([math.nan, math.inf])[:, None].to(dtype)
            bad.targets[~read] = torch.tensor([2**40, -100])
            expected = way(module, one)
            if bad.second is not None:
                bad.second = bad.second._replace(logits=bad.second.logits.clone())
                bad.second.logits.view(6, -1)[~read] = math.nan
            values, gradient = way(module, bad)
            same((values, gradient), expected)
            for name, x in values.items():
                assert name == "top_prob" or (not x[~read].any() and x[read].all()), name
            assert gradient.view(6, -1).any(1).tolist() == read.tolist()
            if way is fused:
                same(fused(module, bad, out=bad.logits), expected, "in place")
        stats = stats_of(module, clean)
        nothing = {"sum": 1.0, "teacher_sum": 1.0, "top": -1}
        assert all((stats.get(name)[~read] == nothing.get(name, 0.0)).all() for name in stats.names)  # type: ignore[index]


@each_stream
def test_rows_without_a_slope_are_not_looked_at(module: Backend, second: Any) -> None:
    """Again: the gradient is 0. Of a row in which the divergence has no weight its stream may hold anything."""
    r, last = drawn(1000, second=second), "divergence" if second else "logps"
    r.slopes = {"logps": torch.zeros(6), last: torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 0.0])}
    none, stats = r.slopes[last] == 0, stats_of(module, r)
    assert not fused(module, r)[1].view(6, -1)[none].any()
    losses, out = fused(module, r)[0]["losses"], torch.full_like(r.logits, math.nan)
    if r.second is not None:
        r.second.logits.view(6, -1)[none] = math.nan
        assert not in_cpp(module) or torch.equal(fused(module, r)[0]["losses"], losses)  # the others look at both streams
    r.logits.view(6, -1)[none] = math.nan
    module.pull(given(r), stats, slopes_of(stats, {last: r.slopes[last]}), out)
    assert not out.view(6, -1)[none].any() and out.view(6, -1)[~none].all()


@pytest.mark.parametrize("at", [0, 500, 1002])
def test_what_cannot_be_computed_shows_in_its_row(module: Backend, at: int) -> None:
    """NaN, +inf, a row of only -inf, a target that is no id; rows beside it keep their bits, and memory around is not written."""
    for dtype in SOME:
        r = drawn(1003, dtype, (1, 6))
        bad = replace(r, logits=r.logits.clone(), targets=r.targets.clone())
        bad.logits[0, 1, at], bad.logits[0, 2, at], bad.logits[0, 3] = math.nan, math.inf, -math.inf
        bad.targets[4] = (-1, 1003, 1 << 60)[(at + 1) % 3]
        for (way, one), (_, spoiled) in zip(ways(r), ways(bad), strict=True):
            (values, gradient), around = way(module, one), torch.full((3, 6, 1003), 7.0).to(dtype)
            found, out = way(module, spoiled, around[1:2])
            check(spoiled, (found, out))
            fine = [0, 5]
            same(
                ({name: x[fine] for name, x in found.items()}, out[0, fine]),
                ({k: x[fine] for k, x in values.items()}, gradient[0, fine]),
            )
            assert found["logps"][1:5].isnan().all() and out[0, 1:3].isnan().all() and (around[[0, 2]] == 7.0).all()


def test_every_nan_pattern_shows(module: Backend) -> None:
    payloads = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, 0x7FC001FF], dtype=torch.int32).view(torch.float32)
    r = drawn(40, shape=(1, 5))
    r.logits[0, torch.arange(5), 17] = payloads
    assert stats_of(module, r).logps.isnan().all()


def test_sums_of_a_million_terms_and_exponentials_between_powers_of_2(module: Backend) -> None:
    """Rows of an element at 0 and one at d: the sum and the entropy's term show exp(d)."""
    r = Rows(2 * torch.rand(1, 1, 4099 if TRITON else 1 << 20))
    d, stats = r.logits.double() - r.logits.double().max(), stats_of(module, r)
    for name, terms in (("sum", d.exp()), ("weighted", d * d.exp()), ("squares", (2 * d).exp())):
        assert abs(stats.get(name) / terms.sum() - 1) < 1e-6, name  # type: ignore[operator]
    assert stats.max == r.logits.max()
    some = torch.tensor([0.0, -0.3, -17.3, -60.0, -86.99, -87.01, -1e4, -math.inf])
    d = torch.cat([some, torch.linspace(-86.9, 0, 50 if TRITON else 5000)])
    stats = stats_of(module, Rows(torch.stack([torch.zeros_like(d), d], -1)[None]))
    exp, wide = d.double().exp(), d.double().clamp(min=-1e9)
    assert ((stats.sum - 1 - exp).abs() <= 2.5e-7).all()
    assert ((stats.get("weighted") - wide * exp).abs() <= (3e-7 + 1e-7 * wide.abs()) * (wide * exp).abs() + 1e-35).all()


def test_fewer_statistics_are_the_same(module: Backend) -> None:
    r = drawn()
    more = stats_of(module, r)
    for names in ((), ("entropy",), ("top_id",)):
        fewer = module.stats(given(r), partials_of(names))
        assert fewer.names == partials_of(names) and all(torch.equal(fewer.get(name), more.get(name)) for name in fewer.names)
    logits = torch.zeros(1, 3, 300)
    logits[0, 0, [17, 40, 299]], logits[0, 1] = 3.0, -math.inf
    assert stats_of(module, Rows(logits)).top_id.tolist() == [17, 0, 0], "the first of equal ones"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale(module: Backend, dtype: torch.dtype) -> None:
    for shape in ((1,), (37,), (3, V), (2, 3, 531 if TRITON else 40_000)):
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


def test_nothing_to_do(module: Backend) -> None:
    """No rows; and a factor of 1, for which more than the machine has is not looked at."""
    r = Rows(torch.zeros(0, 3, 10))
    for values, gradient in (visited(module, r), fused(module, r.only("logps"))):
        assert all(x.shape == (0,) for x in values.values()) and gradient.shape == (0, 3, 10)
    if in_cpp(module):
        module.scale_(torch.zeros(1).expand(1 << 40), torch.tensor(1.0))


def test_a_slope_beyond_fp32_is_no_finite_gradient(module: Backend) -> None:
    """Also where only its product with 1 / temperature is beyond it, with kept exponentials and without them."""

    def steep(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
        return -advantage * logp, advantage * 1e38 * params[0]

    for factor, inverse, coefficient in ((1e10, 1.0, 0.0), (1.0, 1e4, 0.0), (1.0, 1e4, 1e-3)):
        r = Rows(torch.randn(1, 2, 100), PLAIN._replace(inv_temperature=inverse))
        r.slopes = {"logps": torch.ones(2), "entropy": torch.full((2,), -coefficient)}
        module.fused(given(r), stage_of(r, Custom(steep, (factor,))), r.logits)
        assert not r.logits.isfinite().any()


def test_what_is_compared_is_not_trivial() -> None:
    (values, gradient) = exact(drawn(transform=COOL))
    assert all(x.abs().min() > 1e-3 for x in values.values()) and (gradient.abs().amax(-1) > 1e-2).all()
