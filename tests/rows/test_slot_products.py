"""Products over slots of every backend and instruction set, against float64; Triton's as
test_row_kernels.py. Matrices between protected pages: fuzz_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.core.backends import eager
from grpo_kernels.core.pairs import Pairs
from support.bits import note
from support.kernel_rows import (
    DTYPES,
    EPS,
    KERNELS,
    TRITON,
    UNIT,
    kernels,
    matrix,
    random_slots,
    slots_of,
    values_for,
)

EAGER = eager.Kernels()


@pytest.fixture(params=KERNELS)
def module(request):
    with kernels(request.param) as module:
        yield module


def close(got, want, size, terms):
    """fp32 roundings of a sum whose terms have magnitudes of `size` in all, then one of the
    store.
    """
    stored = UNIT[got.dtype] * want.abs() * (got.dtype != torch.float32) + (
        2.0**-24 if got.dtype == torch.float16 else 0.0
    )
    beyond = (got.double() - want).abs() - stored
    note("sparse products", beyond / size)
    assert (beyond <= EPS * (terms + 1) * size).all(), beyond.max()


def check(module, slots, hidden, weight, d_hidden, d_weight):
    """The three products; rows that no slot with a value names are left alone."""
    values, (n, width) = values_for(slots), hidden.shape
    used = slots.ids >= 0
    x, w = hidden.double()[slots.rows], weight.double()[slots.ids.clamp(min=0)]
    got = module.pair_logits(hidden, weight, slots)
    assert got.dtype == torch.float32 and (got[~used] == -torch.inf).all()
    close(got[used], (x * w).sum(1)[used], (x * w).abs().sum(1)[used], 4 + width / 8)
    counted = used & (values != 0)
    by_row, by_id, v = slots.rows[counted], slots.ids[counted], values.double()[counted, None]
    for add, to, source, terms, out, kept in (
        (module.write_grad_hidden_of_pairs, by_row, weight, v * w[counted], d_hidden, 0.0),
        (module.add_grad_weight_of_pairs, by_id, hidden, v * x[counted], d_weight, 1.0),
    ):
        before, named = out.clone(), torch.zeros(len(out), dtype=torch.bool).index_fill(0, to, True)
        add(values, slots, source, out)
        want, size = (
            (before.double() * kept).index_add(0, to, terms),
            (before.double().abs() * kept).index_add(0, to, terms.abs()),
        )
        assert torch.equal(out[~named], before[~named])
        close(out[named], want[named], size[named], n)


@pytest.mark.parametrize(
    "width, gap",
    (
        [(20, 6), (1, 0)]
        if TRITON
        else [(w, 6 * (i % 2)) for i, w in enumerate((1, 3, 16, 33, 64, 100, 513, 2100))]
    ),
)
def test_products(module, width, gap):
    """Of every two dtypes, at tails of every vector, wider than what C++ sums up at a time; rows
    apart.
    """
    n = 5 if width > 1000 else 23
    for dtype in DTYPES:
        for other in (dtype, DTYPES[DTYPES.index(dtype) - 1]):
            hidden, weight = matrix(n, width, dtype, 1, gap), matrix(40, width, other, 2, gap)
            check(
                module,
                random_slots(n, 40),
                hidden,
                weight,
                matrix(n, width, other, 3, gap),
                matrix(40, width, dtype, 4, gap),
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_no_slot_names_is_not_read(module, dtype):
    """Nor is what a value of 0 multiplies, and rows of sums that nothing is added to are left
    alone.
    """
    slots = slots_of([[3, -1, 5], [], [-1, -1], [3, 4], [1, 3]])
    hidden, weight = (
        torch.full((5, 37), torch.nan).to(dtype),
        torch.full((7, 37), torch.nan).to(dtype),
    )
    hidden[[0, 3, 4]], weight[[1, 3, 4, 5]] = matrix(3, 37, dtype, 1), matrix(4, 37, dtype, 2)
    assert not module.pair_logits(hidden, weight, slots).isnan().any()
    hidden[3] = weight[1] = weight[4] = torch.nan
    values = torch.tensor(
        [0.5, torch.nan, 2.0, 1.0, torch.nan, 0.0, 0.0, 0.0, 0.25]
    )  # row 3 has none, nor have ids 1 and 4
    _, *found = results(module, values, slots, hidden, weight)
    for sums, live in zip(found, ([0, 4], [3, 5]), strict=True):
        assert sums.isfinite().all() and (sums != 0).all(1)[live].all()
        assert sums.any(1).nonzero()[:, 0].tolist() == live
    slots, hidden, weight = (
        slots_of([[-1], [-1, -1]]),
        torch.full((2, 5), torch.nan),
        torch.full((4, 5), torch.nan),
    )
    found = results(module, torch.ones(3), slots, hidden, weight)
    assert (found[0] == -torch.inf).all() and not any(x.any() for x in found[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_rounded_once(module, dtype):
    """Terms that are each too small for the sum's dtype still count."""
    n, eps, out = 64, torch.finfo(dtype).eps, torch.ones(2, 21, dtype=dtype)
    module.add_grad_weight_of_pairs(
        torch.full((n,), eps / 4), slots_of([[1]] * n), torch.ones(n, 21, dtype=dtype), out
    )
    assert (out[1] == 1 + eps * n / 4).all() and (out[0] == 1).all()


def results(module, values, slots, hidden, weight):
    """The three products, the sums into zeros."""
    d_hidden, d_weight = torch.zeros(hidden.shape), torch.zeros(weight.shape)
    module.write_grad_hidden_of_pairs(values, slots, weight, d_hidden)
    module.add_grad_weight_of_pairs(values, slots, hidden, d_weight)
    return module.pair_logits(hidden, weight, slots), d_hidden, d_weight


def assert_threads_change_no_bit(module, *arguments):
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(results(module, *arguments))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return list(found[0])


def test_slots_of_an_id_keep_their_order_when_threads_sort(module):
    """The order of an id's slots counts: 2^24 + 1 - 2^24 is 0 in fp32, and 2^24 - 2^24 + 1 is 1."""
    n, vocab = (600, 40) if TRITON else (90_000, 3000)
    g = torch.Generator().manual_seed(1)
    ids, rows = torch.randint(0, vocab, (n,), generator=g), torch.arange(n)
    ids[5:9] = ids[-1] = 17
    ids[(torch.arange(n) > 100) & (ids == 17)] = 18
    slots, values = Pairs(ids, torch.arange(n + 1), rows), torch.randn(n, generator=g)
    values[ids == 17] = 0.0
    values[5:9] = torch.tensor([2.0**24, 1.0, -(2.0**24), 0.5])
    hidden, weight = torch.ones(n, 2), torch.ones(vocab, 2)
    _, _, d_weight = assert_threads_change_no_bit(module, values, slots, hidden, weight)
    assert (d_weight[17] == 0.5).all()
