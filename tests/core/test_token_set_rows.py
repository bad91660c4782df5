"""TokenSets by rows: cut out, shifted, as tensors, beside a batch. The oracle is a list of lists."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_kernels import TokenSets
from grpo_kernels.batch import shift_sets, shift_targets
from grpo_kernels.token_sets import check_sets
from support.sets import ROWS, SOME, assert_facts, build, examples, ints, lists, number

BOUND = st.none() | st.integers(-10, 10)


def assert_part(part: TokenSets, rows: list[list[int]], index: list[int]) -> None:
    """The rows of this index, with their values."""
    assert_facts(part, [rows[i] for i in index], bound=True)
    assert part.values is not None and part.values.tolist() == [number(i, token) for i in index for token in rows[i]]


# ---- cut out


@examples
@given(rows=ROWS, start=BOUND, stop=BOUND, step=st.sampled_from([None, 1, 2, -1, -3]))
@example(rows=SOME, start=3, stop=1, step=None)
@example(rows=SOME, start=9, stop=20, step=None)
@example(rows=SOME, start=-4, stop=-1, step=1)
def test_slices(rows: list[list[int]], start: int | None, stop: int | None, step: int | None) -> None:
    where = slice(start, stop, step)
    assert_part(build(rows, True)[where], rows, [*range(len(rows))[where]])


@examples
@given(rows=ROWS.filter(len), data=st.data())
def test_index_and_mask(rows: list[list[int]], data: st.DataObject) -> None:
    sets, count = build(rows, True), len(rows)
    index = data.draw(st.lists(st.integers(-count, count - 1), max_size=6))
    expected = [i % count for i in index]
    assert_part(sets[index], rows, expected)
    for dtype in (torch.int32, torch.int64):
        assert_part(sets[torch.tensor(index, dtype=dtype)], rows, expected)
    mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    marked = [i for i in range(count) if mask[i]]
    assert_part(sets[torch.tensor(mask)], rows, marked)
    assert_part(sets[mask], rows, marked)


def test_mask_of_the_shape_of_targets() -> None:
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert lists(build([[1], [2], [3], [4], [5], [6]])[mask]) == [[1], [3], [5]]


@examples
@given(rows=ROWS, cuts=st.lists(st.integers(0, 8), max_size=3))
def test_slices_put_together_are_the_whole(rows: list[list[int]], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    sets = build(rows, True)
    parts = [sets[a:b] for a, b in pairwise(edges)]
    whole = TokenSets.cat(parts)
    assert_part(whole, rows, [*range(len(rows))])
    assert torch.equal(whole.offsets, sets.offsets)


@pytest.mark.parametrize(
    "rows, message",
    [
        (3, "pass a slice, integers, or a bool of the shape of targets. For one row, "),
        (torch.tensor(0), r"rows is torch.int64 \[\]: pass a slice"),
        (torch.ones(5), r"rows is torch.float32 \[5\]: pass a slice"),
        (ints(0, 5), "row 5 is asked for, but there are 5"),
        (ints(-6), "row -6 is asked for, but there are 5"),
        (torch.ones(4, dtype=torch.bool), "the mask has 4 elements, but there are 5 rows"),
    ],
)
def test_bad_row_indices_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(SOME)[rows]


def test_a_slice_is_pickled_alone() -> None:
    sets = build([[*range(1000)], [3], []], True)
    part = sets[1:]
    assert len(pickle.dumps(part)) < len(pickle.dumps(sets)) / 4
    assert_part(pickle.loads(pickle.dumps(part)), [[*range(1000)], [3], []], [1, 2])


# ---- shifted


@examples
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), data=st.data())
def test_shifted_packed(lengths: list[int], data: st.DataObject) -> None:
    """The target of a row is in the set of a row, wherever its token has a record."""
    total = sum(lengths)
    rows = data.draw(st.lists(st.lists(st.integers(0, 40), max_size=3, unique=True), min_size=total, max_size=total))
    cuts = torch.tensor([0, *lengths]).cumsum(0)
    expected: list[list[int]] = []
    index: list[int] = []
    for a, b in pairwise(cuts.tolist()):
        expected += [*rows[a + 1 : b], []][: b - a]
        index += [*range(a + 1, b), -1][: b - a]
    ids = torch.zeros(total, dtype=torch.int64)
    segments = torch.repeat_interleave(torch.tensor(lengths))
    for known in ({"cu_seqlens": cuts}, {"cu_seqlens": cuts.int()}, {"segment_ids": segments}):
        shifted = shift_sets(build(rows, True), ids, **known)
        assert_facts(shifted, expected, bound=True)
        assert shifted.values is not None
        assert shifted.values.tolist() == [number(i, token) for i in index if i >= 0 for token in rows[i]]


def test_shifted_padded() -> None:
    """As the targets are: where a token of a completion has a record, its row has it."""
    ids = torch.tensor([[8, 8, 1, 2], [8, 3, 4, 0]])
    recorded = [[8], [], [1, 5], [2], [7, 3], [6, 3], [4], []]
    shifted = shift_sets(build(recorded), ids)
    assert lists(shifted) == [[], [1, 5], [2], [], [6, 3], [4], [], []]
    targets, mask = shift_targets(ids, mask=torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]))
    assert (shifted.contains(targets) | ~mask.flatten()).all()
    with pytest.raises(ValueError, match=r"targets of shape \[2, 4\] has 8 tokens, but sets have 7 rows"):
        shift_sets(build(recorded[1:]), ids)


# ---- as tensors


@examples
@given(rows=ROWS)
def test_counts_padded_ids_and_mask(rows: list[list[int]]) -> None:
    sets = build(rows)
    assert sets.counts.tolist() == [len(row) for row in rows]
    assert sets.row_of.tolist() == [i for i, row in enumerate(rows) for _ in row]
    longest = max(map(len, rows), default=0)
    for fill in (-1, 77):
        padded = sets.padded(fill)
        assert padded.shape == (len(rows), longest)
        assert padded.tolist() == [row + [fill] * (longest - len(row)) for row in rows]
        assert_facts(TokenSets.from_padded(padded, fill), rows)
    assert sets.mask(41).tolist() == [[not row or token in row for token in range(41)] for row in rows]


@examples
@given(rows=ROWS, data=st.data())
def test_contains(rows: list[list[int]], data: st.DataObject) -> None:
    """A row without ids holds everything, ids out of range too."""
    targets = [data.draw(st.sampled_from([*row, -100, 0, 41])) for row in rows]
    expected = [not row or target in row for row, target in zip(rows, targets, strict=True)]
    for dtype in (torch.int32, torch.int64):
        for ids in (torch.int32, torch.int64):
            assert build(rows, dtype=ids).contains(torch.tensor(targets, dtype=dtype)).tolist() == expected


def test_contains_takes_targets_of_a_batch() -> None:
    sets = build([[3, 1], [], [7], [2, 9, 4]])
    assert sets.contains(torch.tensor([[1, 5], [8, 2]])).tolist() == [True, True, False, True]


# ---- beside a batch


@pytest.mark.parametrize(
    "sets, targets, message",
    [
        ([[1]], ints(1), r"kept is a list: pass TokenSets, for example TokenSets.from_padded\(ids\)"),
        (build(SOME), torch.zeros(2, 3).long(), r"targets of shape \[2, 3\] has 6 tokens, but kept have 5 rows"),
        (build(SOME), torch.zeros(5), "targets is torch.float32: pass a tensor of integers"),
        (build(SOME), ints(0, 0, 0, 0, 0).to("meta"), r"kept are on cpu, but targets is on meta: pass sets.to\('meta'\)"),
        (build([[1], [], [4, 9, 10, 12], [11]])[1:], ints(0, 0, 0), r"kept holds id 10 in row 1: it is outside .*\[0, 10\)"),
    ],
)
def test_sets_that_do_not_fit_are_refused(sets: Any, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_sets("kept", sets, targets, 10)


def test_sets_that_fit_are_accepted() -> None:
    check_sets("kept", build(SOME), torch.zeros(1, 5).long(), 10)
    check_sets("kept", build([[99], [3]])[1:], ints(0), 4)  # the larger id is in a row that was cut off
    check_sets("kept", TokenSets.whole(2), ints(0, 0), 1)
    with pytest.raises(ValueError, match=r"ids holds id 9 in row 3"):
        build(SOME).mask(9)
    with pytest.raises(ValueError, match="vocab=0: the size of the vocabulary is a whole number"):
        build(SOME).mask(0)
    with pytest.raises(ValueError, match=r"targets of shape \[2\] has 2 tokens, but these sets have 5 rows"):
        build(SOME).contains(ints(0, 0))


# ---- no wait for a device


def use(sets: TokenSets, targets: torch.Tensor) -> list[torch.Tensor]:
    """Everything that is promised not to wait."""
    part = TokenSets.cat([sets[2:], sets[:1], sets.with_values(sets.values)])
    facts = (part.rows, part.longest, part.empty_rows, part.largest_id)
    assert facts == (9, 3, 3, 9) and all(type(fact) is int for fact in facts)
    check_sets("kept", sets, targets, 10)
    return [
        part.ids, part.offsets, part.counts, part.row_of, part.padded(), part.mask(12), sets.contains(targets),
        sets.to(sets.ids.device).counts,
    ]  # fmt: skip


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta and fake tensors have no values that the host could ask for. What comes out has the shapes of the real thing."""
    sets, targets = build(SOME, True), ints(0, 1, 2, 3, 4)
    expected = [(x.shape, x.dtype) for x in use(sets, targets)]
    assert [(x.shape, x.dtype) for x in use(sets.to("meta"), targets.to("meta"))] == expected
    monkeypatch.setattr("grpo_kernels.token_sets.values_are_checked", lambda _: False)
    mode = FakeTensorMode()
    fakes = sets._apply(mode.from_tensor), mode.from_tensor(targets)
    with mode:
        assert [(x.shape, x.dtype) for x in use(*fakes)] == expected


def test_inference_mode() -> None:
    sets, targets = build(SOME, True), ints(3, 1, 2, 3, 4)
    expected = use(sets, targets)
    with torch.inference_mode():
        found = use(build(SOME, True), targets)
        assert lists(sets[[3, 0]]) == [SOME[3], SOME[0]]
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_compiled() -> None:
    """What a loss asks of sets is one graph, of slices too, and new sizes compile nothing after the first few."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def ask(sets: TokenSets, targets: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        check_sets("kept", sets, targets, 50)
        sums = torch.zeros(sets.rows).index_add(0, sets.row_of, x[sets.ids])
        return sums + sets.contains(targets) + sets.counts + sets.longest + 0.5 * sets.empty_rows

    compiled, x = torch.compile(ask, backend=count, fullgraph=True), torch.randn(50)
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        rows = [torch.randperm(40, generator=g)[: (i * (seed + 2)) % (5 + seed)].tolist() for i in range(4 + seed)]
        sets = build([[1], *rows])[1:]
        targets = torch.arange(len(rows))
        torch.testing.assert_close(compiled(sets, targets, x), ask(sets, targets, x))
        if seed == 2:
            known = len(graphs)
    assert len(graphs) == known
