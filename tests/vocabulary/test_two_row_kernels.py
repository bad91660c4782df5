"""Kernels over two streams of rows, for divergences: of every backend and instruction set, against float64. Run for Triton as
test_row_kernels.py is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels.rows.backends import Backend
from grpo_kernels.rows.partials import Partials, RowTransform, Second, merge
from support.kernel_rows import (
    CAPPED,
    COOL,
    KERNELS,
    KINDS,
    PLAIN,
    TRITON,
    Rows,
    check,
    exact,
    fused,
    given,
    in_cpp,
    kernels,
    row_pairs,
    same,
    slopes_of,
    stage_of,
    stats_of,
    visited,
)

Tensor = torch.Tensor
V = 131
each_kind = pytest.mark.parametrize("kind, mixture", KINDS[:2] + KINDS[3:] if TRITON else KINDS)
WARM = RowTransform(-0.7, 9.0, torch.linspace(0.4, 2.0, 10))


@pytest.fixture(params=KERNELS)
def module(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with kernels(request.param) as module:
        yield module


def two(
    z: Tensor, w: Tensor, kind: str, mixture: float, transform: RowTransform = PLAIN, own: RowTransform = PLAIN, **fields: Any
) -> Rows:
    """Rows [n, V] of both streams, with slopes of the divergence alone."""
    r = Rows(z[None], transform, Second(w[None], own, kind, mixture), **fields)
    return replace(r, slopes={"divergence": torch.randn(len(z))}) if "slopes" not in fields else r


def alone(r: Rows) -> Rows:
    """As the loss of a divergence has its slopes."""
    return replace(r, slopes={"logps": torch.zeros(r.count), "divergence": r.slopes["divergence"]})


def check_both(module: Backend, r: Rows, what: str = "") -> tuple[dict[str, Tensor], Tensor]:
    found = visited(module, r)
    check(r, found, f"{what}, two visits")
    if in_cpp(module):  # the others make them one after the other
        check(alone(r), fused(module, alone(r)), f"{what}, one call")
    return found


@each_kind
def test_values_and_gradients(module: Backend, kind: str, mixture: float) -> None:
    """Blocks, vectors and tiles that end anywhere; dtypes and transforms of each stream; the slopes of all statistics at once."""
    single, half = torch.float32, torch.bfloat16
    cases = [
        ((single, single), (PLAIN, PLAIN)),
        ((half, torch.float16), (CAPPED, COOL)),
        ((single, half), (COOL, CAPPED)),
        ((half, half), (WARM, COOL)),
    ]
    for i, vocab in enumerate((1, 131, 530) if TRITON else (1, 2, 7, 33, V, 1030, 5003)):
        for (own, of_teacher), transforms in cases[i % 4 : i % 4 + 1] if TRITON else cases:
            z, w = row_pairs(vocab)
            r = two(z.to(own), w.to(of_teacher), kind, mixture, *transforms)
            check_both(module, r, f"{vocab} {own} {of_teacher}")
            r = Rows(r.logits, r.transform, r.second)
            together, apart = visited(module, r), [visited(module, r.only(name))[1].float() for name in r.slopes]
            scale = torch.stack(apart).abs().sum(0).amax(-1, keepdim=True)
            unit = {single: 1e-5, half: 2.0**-7}[own]
            assert ((together[1].float() - sum(apart)).abs() <= unit * scale + 1e-6).all()
            single_stream = visited(module, replace(r, second=None, slopes={"logps": r.slopes["logps"]}))[0]
            for name, x in single_stream.items():
                torch.testing.assert_close(together[0][name], x, rtol=1e-5, atol=1e-5)
            if in_cpp(module):
                all_terms = r.only("logps", "entropy", "divergence")
                found = fused(module, all_terms)
                check(replace(all_terms), found, "one call, all terms")
                alone_losses = module.fused(given(all_terms), stage_of(all_terms), None).losses
                assert torch.equal(alone_losses, found[0]["losses"])


@each_kind
def test_nearly_equal_rows(module: Backend, kind: str, mixture: float) -> None:
    """Down to 1e-10 the value keeps three digits, none is negative; so in a row whose maxima move while it is visited, and 83
    apart."""
    vocab = 300 if TRITON else 32_003
    base = torch.cat([torch.randn(4, vocab) * 3.0, torch.randn(3, vocab).sort(-1).values * torch.tensor([[0.3], [2.0], [6.0]])])
    for size, shift in ((1e-2, 0.0), (3e-5, 0.0), (1e-2, 83.0)):
        r = alone(two(base + shift, base + size * torch.randn_like(base) - shift / 30, kind, mixture))
        right, steep = exact(r)
        for way in (visited, fused):
            values, gradient = way(module, r)
            found = values["divergence"].double()
            assert (found >= 0).all() and right["divergence"].min() > 1e-12
            assert ((found - right["divergence"]).abs() <= 1e-3 * right["divergence"]).all(), (size, shift)
            assert ((gradient[0] - steep).norm(dim=-1) <= 3e-3 * steep.norm(dim=-1)).all(), (size, shift)


@pytest.mark.parametrize("mixture", (1e-6, 1 - 1e-6))
def test_shares_near_an_end(module: Backend, mixture: float) -> None:
    """In fp32, 1 less the larger share has few digits of the smaller one, and m/p - 1 few of a small m/p."""
    z, w = 4.0 * torch.randn(2, 6, V)
    z[0, 7], w[1, 9] = 8.0, 40.0
    r = alone(two(z, w, "jsd", mixture))
    right, steep = exact(r)
    for way in (visited, fused):
        values, gradient = way(module, r)
        torch.testing.assert_close(values["divergence"].double(), right["divergence"], rtol=3e-6, atol=0.0)
        assert ((gradient[0] - steep).norm(dim=-1) <= 2e-5 * steep.norm(dim=-1)).all()


FAR = (-60.0, -88.0, -100.0, -300.0, -715.0, -2000.0, -1e30)


@each_kind
def test_targets_that_hardly_are(module: Backend, kind: str, mixture: float) -> None:
    """The column of a target, which is formed apart, is one like any other; also where one side has no probability there."""
    z, w = torch.randn(2, 2 * len(FAR), V)
    z[: len(FAR), 0], w[len(FAR) :, 0] = torch.tensor(FAR), torch.tensor(FAR)
    r = two(z, w, kind, mixture, targets=torch.zeros(2 * len(FAR), dtype=torch.int64))
    _, at_target = check_both(module, r)
    for way, one in ((visited, r), (fused, alone(r))):
        at_target = way(module, one)[1]
        torch.testing.assert_close(
            at_target, way(module, replace(one, targets=torch.full_like(r.targets, 9)))[1], rtol=1e-5, atol=1e-7
        )
    front, behind = torch.randn(2, len(FAR), V)
    front[:, 0], behind[:, 0] = torch.tensor(FAR), -math.inf
    z, w = (behind, front) if kind == "forward" else (front, behind)
    values, gradient = visited(module, two(z, w, kind, mixture, targets=torch.zeros(len(FAR), dtype=torch.int64)))
    finite = values["divergence"].isfinite()
    assert finite[FAR.index(-300.0) :].all() and gradient[0, finite].isfinite().all()


@each_kind
def test_what_is_impossible_or_no_number(module: Backend, kind: str, mixture: float) -> None:
    """-inf in both streams counts nothing; where only the second distribution is 0 a KL is infinite, and a JSD is not. NaN and rows
    of only -inf show, in either stream; a row that is not read is 0."""
    z, w = torch.randn(2, 9, 300 if TRITON else 2100)
    z[:, 3], w[:, 3] = -math.inf, -math.inf
    behind, front = (z, w) if kind == "forward" else (w, z)
    z[0, 250], w[1, -1], z[2], w[3] = math.nan, math.nan, -math.inf, -math.inf
    front[4, 7], behind[5, 200] = -math.inf, -math.inf
    z[8], w[8] = math.nan, math.inf
    read = torch.arange(9) < 8
    for way in (visited, fused):
        r = alone(two(z, w, kind, mixture, read=read))
        r.slopes["divergence"][~read] = 0.0
        values, gradient = way(module, r)
        found = values["divergence"]
        assert (
            found.isnan().tolist() == [True] * 4 + [False] * 5
            and gradient[0, : 4 if in_cpp(module) else 2].isnan().any(-1).all()
        )
        assert found.isinf().tolist() == [kind != "jsd" and i == 5 for i in range(9)]
        assert (
            found[8] == 0
            and not gradient[0, 8].any()
            and not gradient[0, 4:8, 3].any()
            and gradient[0, [4, 6, 7]].isfinite().all()
        )
        rest = [4, 6, 7]
        part = replace(alone(two(z[rest], w[rest], kind, mixture)), slopes={name: x[rest] for name, x in r.slopes.items()})
        check(part, ({"divergence": found[rest]}, gradient[:, rest]))


@each_kind
def test_maxima_that_rise_apart_and_logits_of_1e30(module: Backend, kind: str, mixture: float) -> None:
    """The terms of each block are relative to other maxima, of either row, some far below the last. A row of 1e30 keeps the
    differences of the row beside it."""
    vocab = 400 if TRITON else 5000
    up, early, late = torch.arange(vocab) * (250.0 / vocab), torch.full((vocab,), -3e4), torch.full((vocab,), -200.0)
    early[: vocab // 3], late[2 * vocab // 3 :] = torch.randn(vocab // 3), torch.randn(vocab - 2 * vocab // 3)
    z = torch.stack([up, up, -up, torch.randn(vocab), early, late, torch.randn(vocab)])
    w = torch.stack([up + 0.1 * torch.randn(vocab), -up, up, up, torch.randn(vocab), late + 1.0, early.clamp(min=-300)])
    check_both(module, two(z, w, kind, mixture))
    rising = torch.randn(4, vocab).sort(-1).values * 3.0
    rising[:, 0] = -2.0
    level = torch.tensor([1e30, -1e30, 3e38, 1e30])[:, None].expand(4, vocab).contiguous()
    level[3, 5] = 0.0  # and an id of no probability
    for z, w in (
        ((rising, level), (level, rising)) if kind == "jsd" else [(rising, level) if kind == "forward" else (level, rising)]
    ):
        r = two(z, w, kind, mixture, targets=torch.zeros(4, dtype=torch.int64))
        values, gradient = visited(module, r)
        right, steep = exact(r)
        torch.testing.assert_close(values["divergence"].double(), right["divergence"], rtol=1e-5, atol=0.0)
        assert (gradient[0] - steep).abs().max() <= 1e-5 * steep.abs().max()


@each_kind
def test_where_rows_lie(module: Backend, kind: str, mixture: float) -> None:
    """Strides, gradients over the logits, narrower in their memory, over a teacher; ranges of rows, threads: no bit changes."""
    z, w = row_pairs(291 if TRITON else 2085)
    n, vocab = z.shape
    r = Rows(
        z.bfloat16().view(2, 5, vocab), WARM, Second(w.view(2, 5, vocab), COOL, kind, mixture), read=torch.arange(n) % 5 != 4
    )
    for way, one in ((visited, r), (fused, r.only("logps", "entropy", "divergence"))):
        expected = way(module, one)
        wide = torch.full((2, 7, vocab + 5), math.nan)[:, 1:6, : vocab + 4][..., 3 : vocab + 3].copy_(w.view(2, 5, vocab))
        if not TRITON:  # whose threads take other columns, so that sums have another order
            same(way(module, replace(one, second=one.second._replace(logits=wide))), expected, "strides")  # type: ignore[union-attr]
        for threads in (2, 3):
            torch.set_num_threads(threads)
            way(module, alone(two(*torch.randn(2, threads, 7), "reverse", 0.0)))
            same(way(module, one), expected, "threads")
        torch.set_num_threads(1)
        own = one.logits.clone()
        same(way(module, replace(one, logits=own), out=own), expected, "in place")
        if module.writes_behind_reads:
            single = replace(one, logits=one.logits.float())
            apart = way(module, single)
            for dtype in (torch.bfloat16, torch.float16):
                logits = single.logits.clone()
                rows = torch.as_strided(logits.view(dtype), logits.shape, (5 * 2 * vocab, 2 * vocab, 1))
                same(way(module, replace(single, logits=logits), out=rows), (apart[0], apart[1].to(dtype)), "narrower")
    whole, out = visited(module, r), torch.full_like(r.logits, math.nan)
    part, _ = visited(module, r, out, (3, 7))
    assert all(torch.equal(x.nan_to_num(), whole[0][name][3:7].nan_to_num()) for name, x in part.items())
    flat = out.view(n, -1)
    assert torch.equal(flat[3:7], whole[1].view(n, -1)[3:7]) and flat[[0, 2, 7, 9]].isnan().all()
    both = z[None].clone()
    over = two(both[0], both[0], kind, mixture, PLAIN, COOL, targets=torch.arange(n) * 40)
    over.targets[-1] = vocab + 9
    found = visited(module, replace(over, logits=both.clone()))
    shared = replace(over, logits=both, second=over.second._replace(logits=both))  # type: ignore[union-attr]
    if not type(module).__module__.endswith("eager"):
        same(visited(module, shared, out=both), found, "over its teacher")


@each_kind
def test_rows_without_a_slope_are_not_looked_at(module: Backend, kind: str, mixture: float) -> None:
    """Of a row in which the divergence has no weight the teacher may hold anything; of one that is not read both streams."""
    z, w = torch.randn(2, 4, V)
    read, weight = torch.tensor([True, True, True, False]), torch.tensor([0.7, 0.0, 0.0, 0.0])
    r = two(z, w, kind, mixture, read=read)
    r.slopes = {"logps": torch.randn(4) * read, "divergence": weight}
    expected, stats = fused(module, r), stats_of(module, r)
    z[3], w[3], w[1], w[2, 5] = math.nan, math.inf, math.nan, -math.inf
    values, gradient = fused(module, r) if in_cpp(module) else expected  # others look at both streams
    assert (
        torch.equal(gradient, expected[1]) and torch.equal(values["losses"], expected[0]["losses"]) and not gradient[0, 3].any()
    )
    z[1], out = math.nan, torch.full_like(r.logits, math.nan)
    module.pull(given(r), stats, slopes_of(stats, {"divergence": weight}), out)
    assert not out[0, 1:].any() and out[0, 0].all()
    of_both = [stats.get(name)[3].item() for name in ("teacher_max", "teacher_sum", "cross", "excess")]  # type: ignore[index]
    assert of_both == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("floor", [-math.inf, torch.finfo(torch.float32).min, -1e30, -2e4, -300.0])
@each_kind
def test_parts_of_rows_merge(module: Backend, kind: str, mixture: float, floor: float) -> None:
    """Also parts that a number masks, in both streams or in the one that may be 0 there, and rows that are nearly equal."""
    z, w = row_pairs(V)
    near = 3.0 * torch.randn(4, V)
    z, w = torch.cat([z, near, z[:4]]), torch.cat([w, near + 1e-5 * torch.randn(4, V), w[:4]])
    z[-1, :50] = w[-1, :50] = (w if kind == "forward" else z)[-2, :50] = z[-3, 90:] = w[-3, 90:] = floor
    r = two(z, w, kind, mixture)
    cuts = (slice(0, 50), slice(50, 90), slice(90, V))

    def of(columns: slice) -> Rows:
        second = r.second._replace(logits=r.second.logits[..., columns])  # type: ignore[union-attr]
        return replace(r, logits=r.logits[..., columns], targets=r.targets - columns.start, second=second)

    whole, (right, _) = stats_of(module, r), exact(r)
    names = tuple(name for name in whole.names if not name.startswith("mixed"))
    parts = [stats_of(module, of(c)).values[: len(names)] for c in cuts]
    starts = torch.tensor([[c.start] * len(z) for c in cuts], dtype=torch.int32)
    merged: Partials = merge(torch.stack(parts), names, None, starts, r.second)
    assert torch.equal(merged.top_id, whole.top_id)
    for name, rtol, atol in (("logps", 1e-5, 1e-5), ("entropy", 1e-5, 1e-6), ("sum_squares", 1e-5, 1e-6)):
        torch.testing.assert_close(getattr(merged, name).double(), right[name], rtol=rtol, atol=atol)
    torch.testing.assert_close(merged.log_sums, whole.log_sums, rtol=2e-5, atol=2e-6)
    if kind == "jsd":
        sums = [module.mixed(given(of(c)), merged) for c in cuts]
        student, of_teacher = torch.stack(sums).sum(0)
        found = mixture * of_teacher + (1 - mixture) * student
    else:
        found = merged.divergence
    torch.testing.assert_close(found.double(), right["divergence"], rtol=1e-4, atol=1e-6 if floor > -math.inf else 1e-12)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_a_part_without_probability_may_have_an_impossible_id(module: Backend, kind: str) -> None:
    """Its own KL is infinite, and in the row its probabilities are 0."""
    front, behind = torch.randn(2, V), torch.randn(2, V)
    front[:, :50] -= 400.0
    behind[:, 10] = -math.inf
    z, w = (front, behind) if kind == "reverse" else (behind, front)
    whole = stats_of(module, two(z, w, kind, 0.0))
    parts = [stats_of(module, two(z[:, c], w[:, c], kind, 0.0)) for c in (slice(0, 50), slice(50, V))]
    merged = merge(
        torch.stack([part.values for part in parts]),
        whole.names,
        None,
        torch.tensor([[0, 0], [50, 50]], dtype=torch.int32),
        whole,
    )
    assert parts[0].divergence.isinf().all() and whole.divergence.isfinite().all()
    torch.testing.assert_close(merged.divergence, whole.divergence, rtol=1e-5, atol=1e-6)
