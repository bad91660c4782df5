"""The sparse products of the eager and the C++ backend against float64. Triton's: sparse_triton_cases.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.backends import eager_sparse
from grpo_kernels.vocabulary.sparse import Slots, write_at
from support import sparse_cases as cases
from support.processes import finish, start
from support.sparse_cases import DTYPES, WIDTHS

Tensor = torch.Tensor


def kernels() -> list[str]:
    """The eager backend, and the C++ one once for each instruction set that this processor has."""
    from grpo_kernels.vocabulary.backends import cpu

    return ["eager"] if cpu.available() is not None else ["eager", *(f"cpu {isa}" for isa in cpu._cpu.isas())]


@pytest.fixture(params=kernels())
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    name, _, isa = request.param.partition(" ")
    module = backends.load(name)
    if isa:
        module._cpu.use_isa(isa)
    yield module
    if isa:
        module._cpu.use_isa(module._cpu.isas()[0])


@pytest.mark.parametrize("gap", (0, 6))
@pytest.mark.parametrize("width", WIDTHS)
def test_logits(module: Any, width: int, gap: int) -> None:
    for hidden_dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        cases.check_logits(module, 23, width, hidden_dtype, weight_dtype, gap)


@pytest.mark.parametrize("gap", (0, 6))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("of", ("weight", "hidden"))
def test_sums(module: Any, of: str, width: int, gap: int) -> None:
    for dtype, out_dtype in itertools.product(DTYPES, DTYPES):
        cases.check_sums(module, of, 23, width, dtype, out_dtype, gap)


@pytest.mark.parametrize("of", ("weight", "hidden"))
def test_sums_over_many_ids(module: Any, of: str) -> None:
    cases.check_sums(module, of, 400, 40, torch.float32, torch.float32, 0, vocab=70_000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_no_slot_names_is_not_read(module: Any, dtype: torch.dtype) -> None:
    cases.check_poison(module, dtype)


def test_nan_goes_through(module: Any) -> None:
    cases.check_nan_goes_through(module)


def test_nothing_to_do(module: Any) -> None:
    cases.check_nothing(module)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_rounded_once(module: Any, dtype: torch.dtype) -> None:
    cases.check_one_rounding(module, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_id_that_is_in_all_rows(module: Any, dtype: torch.dtype) -> None:
    cases.check_heavy_id(module, 500, 70, dtype)


@pytest.mark.parametrize("width", (1, 16, 77))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_independent(module: Any, dtype: torch.dtype, width: int) -> None:
    cases.check_rows_are_independent(module, dtype, width)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_threads_change_no_bit(module: Any, dtype: torch.dtype) -> None:
    slots, width = cases.random_slots(600, 50), 1100
    values, hidden, weight = cases.values_for(slots), cases.matrix(600, width, dtype, 1), cases.matrix(50, width, dtype, 2)
    assert_threads_change_no_bit(module, values, slots, hidden, weight)


def assert_threads_change_no_bit(module: Any, *arguments: Any) -> list[Tensor]:
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(cases.results(module, *arguments))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return list(found[0])


def test_slots_of_an_id_keep_their_order_when_threads_sort(module: Any) -> None:
    """The order of an id's slots counts: 2^24 + 1 - 2^24 is 0 in fp32, and 2^24 - 2^24 + 1 is 1."""
    n, vocab = 90_000, 3000
    g = torch.Generator().manual_seed(1)
    ids, rows = torch.randint(0, vocab, (n,), generator=g), torch.arange(n)
    ids[5:9] = ids[-1] = 17
    ids[(torch.arange(n) > 100) & (ids == 17)] = 18
    slots, values = Slots(ids, torch.arange(n + 1), rows), torch.randn(n, generator=g)
    values[ids == 17] = 0.0
    values[5:9] = torch.tensor([2.0**24, 1.0, -(2.0**24), 0.5])
    hidden, weight = torch.ones(n, 2), torch.ones(vocab, 2)
    _, _, d_weight = assert_threads_change_no_bit(module, values, slots, hidden, weight)
    assert (d_weight[17] == 0.5).all()
    exact = torch.zeros(vocab, dtype=torch.float64).index_add_(0, ids, values.double())
    size = torch.zeros(vocab, dtype=torch.float64).index_add_(0, ids, values.double().abs())
    assert ((d_weight[:, 0] - exact).abs()[:17] <= 1e-6 * size[:17]).all()
    assert ((d_weight[:, 0] - exact).abs()[18:] <= 1e-6 * size[18:]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows(module: Any, dtype: torch.dtype) -> None:
    """Wider than what C++ sums up at a time."""
    cases.check_logits(module, 5, 2100, dtype, dtype, 2)
    cases.check_sums(module, "weight", 7, 2100, dtype, dtype, 2)
    cases.check_sums(module, "hidden", 7, 2100, dtype, dtype, 2)


#: Matrices whose last element is the last of a readable page. What reads or writes beyond it ends the process.
GUARDED = """
import itertools, sys
import numpy, torch
from grpo_kernels.vocabulary.backends import cpu
from guarded_memory import Memory
from support import sparse_cases as cases

def guarded(memory, x):
    buffer = memory.take(x.numel() * x.element_size())
    ends_a_page = buffer.bytes.ctypes.data + len(buffer.bytes) == buffer.pages.ctypes.data + len(buffer.pages)
    moved = torch.frombuffer(buffer.bytes, dtype=x.dtype).view(x.shape).copy_(x)
    return moved, ends_a_page

memory, slots, ends = Memory(1 << 22), cases.random_slots(9, 12), 0
for isa, width in itertools.product(sys.argv[1:], (1, 7, 15, 17, 31, 64, 65, 100, 127, 1030)):
    cpu._cpu.use_isa(isa)
    for dtype in cases.DTYPES:
        for seed in range(3):
            memory.reset(numpy.random.default_rng(seed))
            made = [cases.matrix(n, width, dtype, n) for n in (9, 12)] * 2
            (hidden, a), (weight, b), (d_hidden, c), (d_weight, d) = (guarded(memory, x) for x in made)
            ends += a + b + c + d
            cpu.slot_logits(hidden, weight, slots)
            cpu.add_weight_rows(cases.values_for(slots), slots, weight, d_hidden)
            cpu.add_hidden_rows(cases.values_for(slots), slots, hidden, d_weight)
assert ends > 60 * len(sys.argv[1:])
"""


def test_nothing_beyond_a_matrix_is_touched() -> None:
    pytest.importorskip("numpy")
    isas = [name.partition(" ")[2] for name in kernels() if name != "eager"]
    if not isas:
        pytest.skip("no C++ backend")
    finish(start(GUARDED, *isas))


def test_blocks_of_eager_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group may lie in several blocks, one of a single slot among them: rounded once all the same, and the same bits."""
    slots = cases.random_slots(60, 9)
    values, hidden, weight = cases.values_for(slots), *(cases.matrix(n, 8, torch.float32, n) for n in (60, 9))
    whole = cases.results(eager_sparse, values, slots, hidden, weight)
    for rows in (1, 2, 7):
        monkeypatch.setattr(eager_sparse, "block_bytes", lambda device, rows=rows: 16 * 8 * rows)
        parts = cases.results(eager_sparse, values, slots, hidden, weight)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True)), rows
        for dtype in DTYPES:
            cases.check_one_rounding(eager_sparse, dtype)


@pytest.mark.parametrize("used", ["some", "the last", "none"])
def test_values_are_written_where_slots_are_used(used: str) -> None:
    """Slots that are not used stand anywhere, also where others do."""
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
    slots = cases.random_slots(12, 9)
    arguments = (cases.values_for(slots), slots, cases.matrix(12, 8, torch.float32, 1), cases.matrix(9, 8, torch.float32, 2))
    mode = FakeTensorMode()
    values, slots, hidden, weight = torch.utils._pytree.tree_map(mode.from_tensor, arguments)
    with mode:
        logits, d_hidden, d_weight = cases.results(eager_sparse, values, slots, hidden, weight)
    assert (logits.shape, d_hidden.shape, d_weight.shape) == (values.shape, (12, 8), (9, 8))
