"""Kernels over two streams of rows, for divergences: of every backend and instruction set, against
float64. Run for Triton as test_row_kernels.py is.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_kernels.core.divergence import DivergenceKind
from grpo_kernels.core.softmax import ReferenceRows, RowTransform
from support.kernel_rows import (
    CAPPED,
    COOL,
    KERNELS,
    KINDS,
    PLAIN,
    TRITON,
    Rows,
    assert_equal_results,
    assert_near_float64,
    exact,
    fused_loss_call,
    in_cpp,
    kernels,
    loss_formula_of,
    row_pairs,
    to_logit_rows,
    total_variation_errors,
    two_passes,
    ways_to_compute,
)

V = 131
each_kind = pytest.mark.parametrize("kind, mixture", KINDS[:2] + KINDS[3:] if TRITON else KINDS)
WARM = RowTransform(-0.7, 9.0, torch.linspace(0.4, 2.0, 10))


@pytest.fixture(params=KERNELS)
def module(request):
    with kernels(request.param) as module:
        yield module


def two(z, w, kind, mixture, transform=PLAIN, own=PLAIN, **fields):
    """Rows [n, V] of both streams."""
    return Rows(
        z[None], transform, ReferenceRows(w[None], own, DivergenceKind(kind, mixture)), **fields
    )


def check_each_way(module, r):
    for way, one in ways_to_compute(r):
        if way is two_passes or in_cpp(module):  # the others make them one after the other
            assert_near_float64(one, way(module, one))


def check_closely(module, r, rtol, of_gradient):
    """The divergence alone: no digit may cancel."""
    right, steep = exact(r.divergence_alone)
    for way in (two_passes, fused_loss_call):
        values, gradient = way(module, r.divergence_alone)
        assert (values["divergence"] >= 0).all()
        torch.testing.assert_close(
            values["divergence"].double(), right["divergence"], rtol=rtol, atol=0.0
        )
        error = ((gradient[0] - steep).abs() - total_variation_errors(r.divergence_alone)[1]).clamp(
            min=0.0
        )
        assert (error.norm(dim=-1) <= of_gradient * steep.norm(dim=-1)).all()


@each_kind
def test_values_and_gradients(module, kind, mixture):
    """Blocks, vectors and tiles that end anywhere; dtypes and transforms of each stream; the slopes
    of all statistics at once.
    """
    single, half = torch.float32, torch.bfloat16
    cases = (
        (single, single, PLAIN, PLAIN), (half, torch.float16, CAPPED, COOL), (single, half, COOL, CAPPED), (half, half, WARM, COOL),
    )  # fmt: skip
    for i, vocab in enumerate((1, 131, 530) if TRITON else (1, 2, 7, 33, V, 1030, 5003)):
        for own, of_second, *transforms in cases[i % 4 : i % 4 + 1] if TRITON else cases:
            z, w = row_pairs(vocab)
            r = Rows(
                z.to(own)[None],
                transforms[0],
                ReferenceRows(w.to(of_second)[None], transforms[1], DivergenceKind(kind, mixture)),
            )
            check_each_way(module, r)
            without = module.fused_loss(to_logit_rows(r), loss_formula_of(r), None).losses
            assert torch.equal(without, fused_loss_call(module, r)[0]["losses"])


@each_kind
def test_nearly_equal_rows(module, kind, mixture):
    """Down to 1e-10 the value keeps three digits, none is negative; so in a row whose maxima move
    while it is visited, and 83 apart.
    """
    vocab = 300 if TRITON else 32_003
    base = torch.cat(
        [
            torch.randn(4, vocab) * 3.0,
            torch.randn(3, vocab).sort(-1).values * torch.tensor([[0.3], [2.0], [6.0]]),
        ]
    )
    for size, shift in ((1e-2, 0.0), (3e-5, 0.0), (1e-2, 83.0)):
        r = two(base + shift, base + size * torch.randn_like(base) - shift / 30, kind, mixture)
        check_closely(module, r, 1e-3, 3e-3)


@pytest.mark.parametrize("mixture", (1e-6, 1 - 1e-6))
def test_shares_near_an_end(module, mixture):
    """In fp32, 1 less the larger share has few digits of the smaller one, and m/p - 1 few of a
    small m/p.
    """
    z, w = 4.0 * torch.randn(2, 6, V)
    z[0, 7], w[1, 9] = 8.0, 40.0
    check_closely(module, two(z, w, "jsd", mixture), 3e-6, 2e-5)


def test_a_total_variation_by_hand(module):
    """p (sg - E_p[sg]) / 2; between equal rows the sign is 0, and between disjoint ones the value
    is 1.
    """
    p = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.2, 0.3, 0.5], [0.2, 0.4, 0.4], [0.6, 0.3, 0.1], [0.0, 0.5, 0.5]])
    r = replace(
        two(p.log(), q.log(), "tv", 0.0),
        upstream={"logps": torch.zeros(4), "divergence": torch.ones(4)},
    )
    by_hand = torch.tensor(
        [[0.21, -0.14, -0.07], [0.25, -0.15, -0.1], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    )
    for way in (two_passes, fused_loss_call):
        values, gradient = way(module, r)
        torch.testing.assert_close(
            values["divergence"], torch.tensor([0.5, 0.3, 0.0, 1.0]), rtol=1e-6, atol=0.0
        )
        torch.testing.assert_close(gradient[0], by_hand, rtol=1e-5, atol=1e-7)
        assert values["divergence"][2] == 0 and not gradient[0, 2].any()


@each_kind
def test_what_is_impossible_or_no_number(module, kind, mixture):
    """-inf in both streams counts nothing; where only the second distribution is 0 a KL is
    infinite, others are not. NaN and rows of only -inf show, in either stream; a row that is not
    read is 0.
    """
    z, w = torch.randn(2, 9, 300 if TRITON else 2100)
    z[:, 3], w[:, 3] = -math.inf, -math.inf
    behind, front = (z, w) if kind == "forward" else (w, z)
    z[0, 250], w[1, -1], z[2], w[3] = math.nan, math.nan, -math.inf, -math.inf
    front[4, 7], behind[5, 200] = -math.inf, -math.inf
    z[8], w[8] = math.nan, math.inf
    r = two(z, w, kind, mixture, targets=torch.full((9,), 9), mask=torch.arange(9) < 8)
    for way, one in (
        (two_passes, r),
        (two_passes, r.divergence_alone),
        (fused_loss_call, r.divergence_alone),
    ):
        values, gradient = way(module, one)
        assert_near_float64(one, (values, gradient))
        found = values["divergence"]
        assert found.isnan().tolist() == [True] * 4 + [False] * 5
        assert found.isinf().tolist() == [
            kind in ("reverse", "forward") and i == 5 for i in range(9)
        ]
        assert (
            gradient[0, : 4 if in_cpp(module) else 2].isnan().any(-1).all()
            and gradient[0, [4, 6, 7]].isfinite().all()
        )
        assert found[8] == 0 and not gradient[0, 8].any() and not gradient[0, [4, 6, 7], 3].any()


@each_kind
def test_maxima_that_rise_apart(module, kind, mixture):
    """The terms of each block are relative to other maxima, of either row, some far below the
    last.
    """
    vocab = 400 if TRITON else 5000
    up, early, late = (
        torch.arange(vocab) * (250.0 / vocab),
        torch.full((vocab,), -3e4),
        torch.full((vocab,), -200.0),
    )
    early[: vocab // 3], late[2 * vocab // 3 :] = (
        torch.randn(vocab // 3),
        torch.randn(vocab - 2 * vocab // 3),
    )
    z = torch.stack([up, up, -up, torch.randn(vocab), early, late, torch.randn(vocab)])
    w = torch.stack(
        [
            up + 0.1 * torch.randn(vocab),
            -up,
            up,
            up,
            torch.randn(vocab),
            late + 1.0,
            early.clamp(min=-300),
        ]
    )
    check_each_way(module, two(z, w, kind, mixture))


@each_kind
def test_a_gradient_over_the_second_stream(module, kind, mixture, monkeypatch):
    """Where both streams are the same memory, and several warps share a row."""
    if TRITON:
        from grpo_kernels.core.backends.triton.launch import LAUNCH

        monkeypatch.setitem(LAUNCH, "reference", LAUNCH["reference"]._replace(threads=64))
    both = row_pairs(291)[0][None]
    r = two(both[0], both[0], kind, mixture, PLAIN, COOL, targets=torch.arange(10) * 40)
    found, memory = two_passes(module, replace(r, logits=both.clone())), both.clone()
    shared = replace(r, logits=memory, reference=r.reference._replace(logits=memory))
    if not type(module).__module__.endswith("eager"):
        assert_equal_results(two_passes(module, shared, out=memory), found)
