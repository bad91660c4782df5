"""The sparse products of every backend and instruction set against float64; Triton's as test_row_kernels.py. Matrices between
protected pages: fuzz_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_kernels.rows.backends import Backend, eager
from grpo_kernels.rows.ragged import Ragged, write_at
from support.kernel_rows import DTYPES, EPS, KERNELS, TRITON, UNIT, kernels
from support.largest import note
from support.slots import matrix, random_slots, slots_of, values_for

Tensor = torch.Tensor
EAGER = eager.Kernels()


@pytest.fixture(params=KERNELS)
def module(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with kernels(request.param) as module:
        yield module


def close(got: Tensor, want: Tensor, size: Tensor, terms: float) -> None:
    """fp32 roundings of a sum whose terms have magnitudes of `size` in all, then one of the store."""
    stored = UNIT[got.dtype] * want.abs() * (got.dtype != torch.float32) + (2.0**-24 if got.dtype == torch.float16 else 0.0)
    beyond = (got.double() - want).abs() - stored
    note("sparse products", beyond / size)
    assert (beyond <= EPS * (terms + 1) * size).all(), beyond.max()


def check(module: Backend, slots: Ragged, hidden: Tensor, weight: Tensor, d_hidden: Tensor, d_weight: Tensor) -> None:
    """The three products; rows that no slot with a value names are left alone."""
    values, (n, width) = values_for(slots), hidden.shape
    used = slots.ids >= 0
    x, w = hidden.double()[slots.rows], weight.double()[slots.ids.clamp(min=0)]
    got = module.slot_logits(hidden, weight, slots)
    assert got.dtype == torch.float32 and (got[~used] == -torch.inf).all()
    close(got[used], (x * w).sum(1)[used], (x * w).abs().sum(1)[used], 4 + width / 8)
    counted = used & (values != 0)
    by_row, by_id, v = slots.rows[counted], slots.ids[counted], values.double()[counted, None]
    for add, to, source, terms, out, kept in (
        (module.add_weight_rows, by_row, weight, v * w[counted], d_hidden, 0.0),
        (module.add_hidden_rows, by_id, hidden, v * x[counted], d_weight, 1.0),
    ):
        before, named = out.clone(), torch.zeros(len(out), dtype=torch.bool).index_fill(0, to, True)
        add(values, slots, source, out)
        want, size = (
            (before.double() * kept).index_add(0, to, terms),
            (before.double().abs() * kept).index_add(0, to, terms.abs()),
        )
        assert torch.equal(out[~named], before[~named]) and (not len(slots.ids) or named.any())
        close(out[named], want[named], size[named], n)


@pytest.mark.parametrize(
    "width, gap", [(20, 6), (1, 0)] if TRITON else [(w, 6 * (i % 2)) for i, w in enumerate((1, 3, 16, 33, 64, 100, 513, 2100))]
)
def test_products(module: Backend, width: int, gap: int) -> None:
    """Of every two dtypes, at tails of every vector, wider than what C++ sums up at a time; rows apart."""
    n = 5 if width > 1000 else 23
    for dtype in DTYPES:
        for other in (dtype, DTYPES[DTYPES.index(dtype) - 1]):
            hidden, weight = matrix(n, width, dtype, 1, gap), matrix(40, width, other, 2, gap)
            check(
                module, random_slots(n, 40), hidden, weight, matrix(n, width, other, 3, gap), matrix(40, width, dtype, 4, gap)
            )


def test_many_ids_and_one_in_all_rows(module: Backend) -> None:
    n, vocab = (60, 300) if TRITON else (500, 70_000)
    check(module, random_slots(n, vocab), *(matrix(rows, 20, torch.float32, i) for i, rows in enumerate((n, vocab, n, vocab))))
    heavy = slots_of([[2, 0] if i % 2 else [i % 4 + 3, 2] for i in range(n)])
    check(module, heavy, *(matrix(rows, 20, torch.float32, i) for i, rows in enumerate((n, 8, n, 8))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_no_slot_names_is_not_read(module: Backend, dtype: torch.dtype) -> None:
    """Nor is what a value of 0 multiplies. NaN of what is read goes through."""
    slots = slots_of([[3, -1, 5], [], [-1, -1], [3, 4], [1, 3]])
    values = torch.tensor([0.5, torch.nan, 2.0, 1.0, torch.nan, -1.0, 0.0, 0.0, 0.25])
    hidden, weight = torch.full((5, 37), torch.nan).to(dtype), torch.full((7, 37), torch.nan).to(dtype)
    hidden[[0, 3, 4]], weight[[1, 3, 4, 5]] = matrix(3, 37, dtype, 1), matrix(4, 37, dtype, 2)
    assert not module.slot_logits(hidden, weight, slots).isnan().any()
    hidden[3] = weight[1] = weight[4] = torch.nan
    values[5] = 0.0  # with those of slots 6 and 7: row 3, ids 1 and 4
    d_hidden, d_weight = torch.full((5, 37), torch.nan), torch.full((7, 37), torch.nan)
    d_hidden[[0, 3, 4]], d_weight[[3, 5]] = 0.0, 0.0
    module.add_weight_rows(values, slots, weight, d_hidden)
    module.add_hidden_rows(values, slots, hidden, d_weight)
    for out, live in ((d_hidden, [0, 4]), (d_weight, [3, 5])):
        assert out[live].isfinite().all() and (out[live] != 0).any(1).all()
    assert d_hidden[[1, 2]].isnan().all() and d_weight[[0, 1, 2, 4, 6]].isnan().all() and not d_hidden[3].any()
    slots, hidden, weight = slots_of([[0, 2], [1]]), matrix(2, 19, dtype, 1), matrix(3, 19, dtype, 2)
    d_hidden, d_weight = torch.zeros(2, 19, dtype=dtype), torch.zeros(3, 19, dtype=dtype)
    module.add_weight_rows(torch.tensor([torch.nan, 1.0, 2.0]), slots, weight, d_hidden)
    module.add_hidden_rows(torch.tensor([torch.nan, 1.0, 2.0]), slots, hidden, d_weight)
    assert d_hidden.isnan().all(1).tolist() == [True, False] and d_weight.isnan().all(1).tolist() == [True, False, False]
    weight[2, 18], d_hidden = torch.nan, torch.zeros(2, 19, dtype=dtype)
    module.add_weight_rows(torch.ones(3), slots, weight, d_hidden)
    assert d_hidden.isnan().nonzero().tolist() == [[0, 18]]
    assert module.slot_logits(hidden, weight, slots).isnan().tolist() == [False, True, False]


def test_nothing_to_do(module: Backend) -> None:
    """No slots, no rows, only slots that are not used."""
    for lists in ([], [[], []], [[-1], [-1, -1]]):
        slots, n = slots_of(lists), len(lists)
        hidden, weight = torch.full((n, 5), torch.nan), torch.full((4, 5), torch.nan)
        assert torch.equal(module.slot_logits(hidden, weight, slots), torch.full(slots.ids.shape, -torch.inf))
        for value in (0.0, 1.0):
            values, d_hidden, d_weight = torch.full(slots.ids.shape, value), torch.ones(n, 5), torch.ones(4, 5)
            module.add_weight_rows(values, slots, weight, d_hidden)
            module.add_hidden_rows(values, slots, hidden, d_weight)
            assert (d_hidden == 1).all() and (d_weight == 1).all()


def check_one_rounding(module: Backend, dtype: torch.dtype) -> None:
    n, eps, out = 64, torch.finfo(dtype).eps, torch.ones(2, 21, dtype=dtype)
    module.add_hidden_rows(torch.full((n,), eps / 4), slots_of([[1]] * n), torch.ones(n, 21, dtype=dtype), out)
    assert (out[1] == 1 + eps * n / 4).all() and (out[0] == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_rounded_once(module: Backend, dtype: torch.dtype) -> None:
    """Terms that are each too small for the sum's dtype still count."""
    check_one_rounding(module, dtype)


def results(module: Backend, values: Tensor, slots: Ragged, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three products, the sums into zeros."""
    d_hidden, d_weight = torch.zeros(hidden.shape), torch.zeros(weight.shape)
    module.add_weight_rows(values, slots, weight, d_hidden)
    module.add_hidden_rows(values, slots, hidden, d_weight)
    return module.slot_logits(hidden, weight, slots), d_hidden, d_weight


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_rows_are_independent(module: Backend, dtype: torch.dtype) -> None:
    """Each row, each id and each slot alone gives the same bits as all together."""
    for width in (20,) if TRITON else (1, 16, 77):
        n, vocab = 12, 9
        slots = random_slots(n, vocab, seed=3)
        values, hidden, weight = values_for(slots), matrix(n, width, dtype, 1), matrix(vocab, width, dtype, 2)
        logits, d_hidden, d_weight = results(module, values, slots, hidden, weight)
        for i, (lo, hi) in enumerate(zip(slots.offsets.tolist(), slots.offsets.tolist()[1:], strict=False)):
            one, row = slots_of([slots.ids[lo:hi].tolist()]), torch.zeros(1, width)
            module.add_weight_rows(values[lo:hi].clone(), one, weight, row)
            assert torch.equal(module.slot_logits(hidden[i : i + 1], weight, one), logits[lo:hi]) and torch.equal(
                row, d_hidden[i : i + 1]
            )
        for j in range(vocab):
            of_id = torch.zeros(vocab, width)
            module.add_hidden_rows(values, slots._replace(ids=torch.where(slots.ids == j, j, -1)), hidden, of_id)
            assert torch.equal(of_id[j], d_weight[j]), j
        for s in range(0, slots.ids.numel(), 3):  # moved to another place of a longer row
            moved = module.slot_logits(hidden[slots.rows[s] : slots.rows[s] + 1], weight, slots_of([[0, int(slots.ids[s])]]))
            assert torch.equal(moved[1], logits[s]), s


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_threads_change_no_bit(module: Backend, dtype: torch.dtype) -> None:
    n, width = (60, 40) if TRITON else (600, 1100)
    slots = random_slots(n, 50)
    assert_threads_change_no_bit(module, values_for(slots), slots, matrix(n, width, dtype, 1), matrix(50, width, dtype, 2))


def assert_threads_change_no_bit(module: Backend, *arguments: Any) -> list[Tensor]:
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(results(module, *arguments))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return list(found[0])


def test_slots_of_an_id_keep_their_order_when_threads_sort(module: Backend) -> None:
    """The order of an id's slots counts: 2^24 + 1 - 2^24 is 0 in fp32, and 2^24 - 2^24 + 1 is 1."""
    n, vocab = (600, 40) if TRITON else (90_000, 3000)
    g = torch.Generator().manual_seed(1)
    ids, rows = torch.randint(0, vocab, (n,), generator=g), torch.arange(n)
    ids[5:9] = ids[-1] = 17
    ids[(torch.arange(n) > 100) & (ids == 17)] = 18
    slots, values = Ragged(ids, torch.arange(n + 1), rows), torch.randn(n, generator=g)
    values[ids == 17] = 0.0
    values[5:9] = torch.tensor([2.0**24, 1.0, -(2.0**24), 0.5])
    hidden, weight = torch.ones(n, 2), torch.ones(vocab, 2)
    _, _, d_weight = assert_threads_change_no_bit(module, values, slots, hidden, weight)
    assert (d_weight[17] == 0.5).all()
    exact = torch.zeros(vocab, dtype=torch.float64).index_add_(0, ids, values.double())
    size = torch.zeros(vocab, dtype=torch.float64).index_add_(0, ids, values.double().abs())
    assert ((d_weight[:, 0] - exact).abs()[:17] <= 1e-6 * size[:17]).all()
    assert ((d_weight[:, 0] - exact).abs()[18:] <= 1e-6 * size[18:]).all()


def test_blocks_of_eager_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group may lie in several blocks, one of a single slot among them: rounded once all the same, and the same bits."""
    slots = random_slots(60, 9)
    values, hidden, weight = values_for(slots), *(matrix(n, 8, torch.float32, n) for n in (60, 9))
    whole = results(EAGER, values, slots, hidden, weight)
    for rows in (1, 2, 7):
        monkeypatch.setattr(eager, "block_bytes", lambda device, rows=rows: 16 * 8 * rows)
        parts = results(EAGER, values, slots, hidden, weight)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True)), rows
        for dtype in DTYPES:
            check_one_rounding(EAGER, dtype)


@pytest.mark.parametrize("used", ["some", "the last", "none"])
def test_values_are_written_where_slots_are_used(used: str) -> None:
    """Ragged that are not used stand anywhere, also where others do."""
    g = torch.Generator().manual_seed(3)
    flat = torch.randperm(7 * 9, generator=g)[:20]
    places = torch.stack([flat // 9, flat % 9])
    chosen = {"some": torch.rand(20, generator=g) < 0.5, "the last": torch.arange(20) == 19, "none": torch.zeros(20) > 0}[used]
    places[:, ~chosen] = torch.where(torch.rand((~chosen).sum(), generator=g) < 0.5, -1, places[:, 19:])
    out, values = torch.randn(7, 9, generator=g).to(torch.bfloat16), torch.randn(20, generator=g)
    expected = out.clone()
    for i in chosen.nonzero()[:, 0].tolist():
        expected[places[0, i], places[1, i]] = values[i]
    write_at(out, tuple(places), values, chosen)
    assert torch.equal(out, expected)
    write_at(out, (torch.empty(0, dtype=torch.int64),) * 2, torch.empty(0), torch.empty(0, dtype=torch.bool))
    write_at(out[:, :0], tuple(places), values, torch.zeros(20) > 0)
    assert torch.equal(out, expected)


def test_eager_asks_for_no_value() -> None:
    """Fake tensors have none."""
    slots = random_slots(12, 9)
    arguments = (values_for(slots), slots, matrix(12, 8, torch.float32, 1), matrix(9, 8, torch.float32, 2))
    mode = FakeTensorMode()
    values, slots, hidden, weight = torch.utils._pytree.tree_map(mode.from_tensor, arguments)
    with mode:
        logits, d_hidden, d_weight = results(EAGER, values, slots, hidden, weight)
    assert (logits.shape, d_hidden.shape, d_weight.shape) == (values.shape, (12, 8), (9, 8))
