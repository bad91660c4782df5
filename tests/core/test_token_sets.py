"""TokenSets: its contents, its refusals, slicing and concatenation. The oracle is a list of lists."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_kernels import TokenSets
from support.sets import ROWS, SOME, assert_facts, build, examples, ints, lists, number

Tensor = torch.Tensor
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@examples
@given(rows=ROWS)
def test_facts(dtype: torch.dtype, rows: list[list[int]]) -> None:
    sets = build(rows, dtype=dtype)
    assert sets.ids.dtype == dtype
    assert_facts(sets, rows)


def test_fields() -> None:
    sets = TokenSets(torch.tensor([5, 2], dtype=torch.int32), torch.tensor([0, 2, 2], dtype=torch.int32), torch.zeros(2).half())
    assert repr(sets) == "TokenSets(ids=int32 [2], offsets=int64 [3], values=float16 [2])"
    assert repr(build(SOME)) == "TokenSets(ids=int64 [6], offsets=int64 [6])"
    with pytest.raises(FrozenInstanceError):
        sets.ids = sets.ids  # type: ignore[misc]
    assert sets == sets and build(SOME) != build(SOME)  # by identity, as a key wants it
    strided = TokenSets(torch.arange(8)[::2], torch.tensor([0, 4]))
    assert strided.ids.is_contiguous() and lists(strided) == [[0, 2, 4, 6]]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ids: list": ({"ids": [1, 2, 3]}, r"ids is list: pass int32 or int64 \[nnz\]"),
    "ids: float": ({"ids": torch.ones(3)}, r"ids is torch.float32: pass int32 or int64"),
    "ids: padded": ({"ids": torch.ones(3, 1, dtype=torch.int64)}, r"ids has shape \[3, 1\].*TokenSets.from_padded"),
    "ids: 0-d": ({"ids": torch.tensor(1)}, r"ids has shape \[\]"),
    "offsets: bool": ({"offsets": torch.tensor([False, True])}, r"offsets is torch.bool: pass int32 or int64 \[rows \+ 1\]"),
    "offsets: none": ({"offsets": ints()}, r"offsets has shape \[0\]: pass \[rows \+ 1\], a single 0 for no row"),
    "offsets: 2-d": ({"offsets": ints(0, 3)[None]}, r"offsets has shape \[1, 2\]"),
    "offsets: device": ({"offsets": ints(0, 3).to("meta")}, "offsets is on meta, but ids is on cpu: move one of them"),
    "offsets: start": ({"offsets": ints(1, 3)}, r"offsets\[0\]=1: the ids of row 0 start at 0"),
    "offsets: fall": ({"offsets": ints(0, 2, 1, 3)}, r"offsets\[1\]=2, offsets\[2\]=1: row 1 ends before it starts.*the number of ids, 3"),
    "offsets: beyond": ({"offsets": ints(0, 9, 3)}, r"offsets\[1\]=9, offsets\[2\]=3: row 1 ends before it starts"),
    "offsets: short": ({"offsets": ints(0, 1, 2)}, r"offsets\[2\]=2, but there are 3 ids"),
    "offsets: long": ({"offsets": ints(0, 1, 5)}, r"offsets\[2\]=5, but there are 3 ids"),
    "ids: negative": ({"ids": ints(4, 6, -1)}, r"ids is -1 in row 1 \(ids\[2\]\): ids are at least 0.*from_padded"),
    "ids: twice": ({"ids": ints(4, 4, 1)}, r"ids is 4 twice in row 0 \(offsets 0 to 2\)"),
    "ids: twice, apart": (
        {"ids": ints(9, 5, 7, 5, 9), "offsets": ints(0, 1, 1, 5), "values": None}, r"ids is 5 twice in row 2 \(offsets 1 to 5\)",
    ),
    "values: list": ({"values": [0.0, 1.0, 2.0]}, "values is list: pass a float tensor, one number for each id, or None"),
    "values: integer": ({"values": ints(1, 2, 3)}, "values is torch.int64: pass a float tensor"),
    "values: shape": ({"values": torch.zeros(4)}, r"values has shape \[4\], but ids has \[3\]: they must be the same"),
    "values: device": ({"values": torch.zeros(3, device="meta")}, "values is on meta, but ids is on cpu"),
    "values: NaN": ({"values": torch.tensor([0.0, -INF, NAN])}, r"values is NaN in row 1 \(values\[2\], id 1\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, message = REFUSED[name]
    valid: dict[str, Any] = {"ids": ints(4, 6, 1), "offsets": ints(0, 2, 3), "values": torch.zeros(3)}
    TokenSets(**valid)
    with pytest.raises(ValueError, match=message):
        TokenSets(**{**valid, **changes})


@examples
@given(rows=ROWS.filter(any), seed=st.integers(0, 2**31))
def test_an_id_twice_is_always_seen(rows: list[list[int]], seed: int) -> None:
    """Wherever the second stands, and whatever the order."""
    rng = random.Random(seed)
    row = rng.choice([i for i, ids in enumerate(rows) if ids])
    spoiled = [*rows[row]]
    spoiled.insert(rng.randint(0, len(spoiled)), rng.choice(spoiled))
    with pytest.raises(ValueError, match=rf"twice in row {row} "):
        build([*rows[:row], spoiled, *rows[row + 1 :]])


def test_ids_that_ascend_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their rows: as vLLM's do. Sorting is for those by weight, as SGLang's are."""
    monkeypatch.setattr("grpo_kernels.token_set_checks.check_unique", lambda *_: pytest.fail("sorted"))
    assert lists(build([[2, 5], [1, 9], [], [3]])) == [[2, 5], [1, 9], [], [3]]
    with pytest.raises(pytest.fail.Exception, match="sorted"):
        build([[2, 5], [9, 1]])


def test_very_large_ids() -> None:
    """No product of row and id that could overflow."""
    big = 2**63 - 1
    sets = TokenSets(ints(big, 0, big), ints(0, 2, 3))
    assert sets.largest_id == big
    with pytest.raises(ValueError, match=f"ids is {big} twice in row 1"):
        TokenSets(ints(0, big, 0, big), ints(0, 1, 4))


def test_sets_of_the_whole_vocabulary() -> None:
    assert_facts(TokenSets.whole(3), [[], [], []])
    assert_facts(TokenSets.whole(0), [])
    assert TokenSets.whole(2, device="meta").offsets.device.type == "meta"
    for rows in (-1, 2.5, True):
        with pytest.raises(ValueError, match=f"rows={rows}: the number of rows is a whole number of at least 0"):
            TokenSets.whole(rows)  # type: ignore[arg-type]


@examples
@given(parts=st.lists(ROWS, min_size=1, max_size=4), values=st.booleans())
def test_cat(parts: list[list[list[int]]], values: bool) -> None:
    sets = TokenSets.cat([build(rows, values) for rows in parts])
    assert_facts(sets, [row for rows in parts for row in rows])
    if values:
        assert sets.values is not None
        assert sets.values.tolist() == [number(i, token) for rows in parts for i, row in enumerate(rows) for token in row]


def test_cat_of_both_integers() -> None:
    sets = TokenSets.cat([build([[2**40]]), build([[1]], dtype=torch.int32)])
    assert sets.ids.dtype == torch.int64 and lists(sets) == [[2**40], [1]]


def test_cat_is_refused() -> None:
    one = build(SOME)
    for parts, message in (
        ([], "parts is an empty list: pass a list of TokenSets"),
        ([one, one.ids], "parts is a list with a Tensor: pass a list of TokenSets"),
        ([one, one.to("meta")], r"parts=\['cpu', 'meta'\]: they are on different devices: move them to one"),
        ([build(SOME, True), one], r"parts\[1\] has no values, but others have"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenSets.cat(parts)  # type: ignore[arg-type]


def test_moving_sets_to_a_device() -> None:
    sets = build(SOME, True)
    moved = sets.to("meta")
    assert moved.values is not None
    assert {x.device.type for x in (moved.ids, moved.offsets, moved.values)} == {"meta"}
    facts = ("rows", "longest", "empty_rows", "largest_id")
    assert [getattr(moved, name) for name in facts] == [getattr(sets, name) for name in facts] == [5, 3, 2, 9]
    assert lists(sets.to(torch.device("cpu"))) == SOME


def test_pin_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self + 0)  # there is no GPU to pin for
    sets = build(SOME, True)
    pinned = sets.pin_memory()
    assert_facts(pinned, SOME)
    for name in ("ids", "offsets", "values"):
        assert torch.equal(getattr(pinned, name), getattr(sets, name)) and getattr(pinned, name) is not getattr(sets, name)


def test_values_can_be_replaced() -> None:
    sets = build(SOME, True)
    weights = torch.arange(6.0, requires_grad=True)
    changed = sets.with_values(weights * 2)
    assert_facts(changed, SOME)
    assert changed.values is not None
    changed.values.sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [2.0] * 6
    assert sets.with_values(None).values is None and sets.values is not None
    for values, message in (
        (torch.zeros(5), r"values has shape \[5\], but ids has \[6\]"),
        (torch.tensor([0, 0, 0, NAN, 0, 0]), r"values is NaN in row 3 \(values\[3\], id 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            sets.with_values(values)


@pytest.mark.parametrize("values", [False, True])
def test_pickling(values: bool) -> None:
    sets = build(SOME, values)
    for other in (pickle.loads(pickle.dumps(sets)), copy.deepcopy(sets)):
        assert type(other) is TokenSets and other is not sets
        assert_facts(other, SOME)
        if values:
            assert sets.values is not None and torch.equal(other.values, sets.values)


def test_a_deep_copy_has_no_gradient() -> None:
    """One that is computed could not be copied with its history. A shallow copy has the tensors themselves."""
    sets = build(SOME).with_values(torch.arange(6.0, requires_grad=True) * 2)
    shallow = copy.copy(sets)
    assert_facts(shallow, SOME)
    assert shallow is not sets and shallow.values is sets.values and shallow.ids is sets.ids
    for other in (pickle.loads(pickle.dumps(sets)), copy.deepcopy(sets)):
        assert other.values.tolist() == [0, 2, 4, 6, 8, 10] and not other.values.requires_grad


def test_sets_made_in_inference_mode_can_be_trained_on() -> None:
    with torch.inference_mode():
        made = TokenSets.cat([build(SOME, True), build(SOME, True)])
        assert_facts(made, SOME + SOME)
    assert made.values is not None
    for x in (made.ids, made.offsets, made.values):
        assert not x.is_inference()
    weight = torch.randn(10, requires_grad=True)
    (weight[made.ids] * made.values).sum().backward()
    assert weight.grad is not None and weight.grad[3] == 2 * number(0, 3)
