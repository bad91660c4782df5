"""TokenSets from the formats of samplers and trainers: counts, padding, lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_kernels import TokenSets
from grpo_kernels.batch import shift_targets
from support.pages import example
from support.sets import ROWS, SOME, assert_facts, examples, ints, lists, number

NAN = float("nan")


def values_of(rows: list[list[int]]) -> list[list[float]]:
    return [[number(i, token) for token in row] for i, row in enumerate(rows)]


def assert_values(sets: TokenSets, rows: list[list[int]]) -> None:
    assert_facts(sets, rows)
    assert sets.values is not None and sets.values.tolist() == [x for row in values_of(rows) for x in row]


# ---- counts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@examples
@given(rows=ROWS)
def test_counts(dtype: torch.dtype, rows: list[list[int]]) -> None:
    ids = torch.tensor([token for row in rows for token in row], dtype=dtype)
    counts = torch.tensor([len(row) for row in rows], dtype=dtype)
    assert_facts(TokenSets.from_counts(ids, counts), rows)
    values = torch.tensor([x for row in values_of(rows) for x in row], dtype=torch.float32)
    assert_values(TokenSets.from_counts(ids, counts, values), rows)


def test_counts_of_bytes() -> None:
    """As prime-rl sends them."""
    ids, counts = (torch.tensor(x, dtype=torch.int32).numpy().tobytes() for x in ([4, 2, 9], [0, 2, 0, 1]))
    read = [torch.frombuffer(bytearray(data), dtype=torch.int32) for data in (ids, counts)]
    assert_facts(TokenSets.from_counts(*read), [[], [4, 2], [], [9]])


@pytest.mark.parametrize(
    "counts, message",
    [
        ([1, 2], r"counts is list: pass int32 or int64 \[rows\]"),
        (torch.ones(3), r"counts is torch.float32: pass int32 or int64 \[rows\]"),
        (
            ints(1, 2)[None],
            r"counts has shape \[1, 2\]: pass one number for each row, \[rows\]; of \[B, T\], counts.flatten\(\)",
        ),
        (ints(2, -1, 2), r"counts is -1 in row 1: a number of ids is at least 0"),
        (ints(1, 1), r"counts adds up to 2, but there are 3 ids"),
        (ints(1, 3), r"counts adds up to 4, but there are 3 ids"),
        (ints(1, 2).to("meta"), r"counts is on meta, but ids is on cpu"),
    ],
)
def test_counts_that_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenSets.from_counts(ints(3, 4, 5), counts)


# ---- padding


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@examples
@given(rows=ROWS, fill=st.sampled_from([-1, -100, 41]), seed=st.integers(0, 1000))
def test_padding(dtype: torch.dtype, rows: list[list[int]], fill: int, seed: int) -> None:
    """Wherever it stands in a row."""
    width = 8
    ids, values = torch.full((len(rows), width), fill, dtype=dtype), torch.full((len(rows), width), NAN)
    g = torch.Generator().manual_seed(seed)
    for i, row in enumerate(rows):
        places = torch.randperm(width, generator=g)[: len(row)].sort().values
        ids[i, places] = torch.tensor(row, dtype=dtype)
        values[i, places] = torch.tensor(values_of(rows)[i], dtype=torch.float32)
    sets = TokenSets.from_padded(ids, fill, values)
    assert sets.ids.dtype == dtype
    assert_values(sets, rows)


def test_padding_of_a_batch() -> None:
    ids = torch.tensor([[[5, 2, -1], [-1, -1, -1]], [[7, -1, -1], [1, 3, 8]]])
    expected = [[5, 2], [], [7], [1, 3, 8]]
    assert_facts(TokenSets.from_padded(ids), expected)
    assert_facts(TokenSets.from_padded(ids.transpose(0, 1)), [expected[i] for i in (0, 2, 1, 3)])  # a strided one
    assert_facts(TokenSets.from_padded(ids[:, :, :0]), [[], [], [], []])


@pytest.mark.parametrize(
    "given, message",
    [
        ({"ids": ints(1, 2)}, r"ids has shape \[2\]: pass padded sets, \[rows, K\] or \[B, T, K\]"),
        ({"ids": torch.ones(2, 3)}, r"ids is torch.float32: pass int32 or int64 \[rows, K\]"),
        ({"values": torch.zeros(2)}, r"values has shape \[2\], but ids has \[2, 2\]"),
        ({"values": [0.0, 1.0]}, r"values has shape list, but ids has \[2, 2\]"),
        ({"values": torch.tensor([[0, NAN], [0, NAN]])}, r"values is NaN in row 0 \(values\[1\], id 2\)"),
        ({"ids": torch.tensor([[1, 2], [-100, 3]])}, r"ids is -100 in row 1 \(ids\[2\]\)"),
    ],
)
def test_padding_that_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenSets.from_padded(**{"ids": torch.tensor([[1, 2], [3, -1]]), **given})


# ---- lists


@examples
@given(rows=ROWS)
def test_lists(rows: list[list[int]]) -> None:
    sets = TokenSets.from_lists([row or None for row in rows])
    assert sets.ids.dtype == torch.int32
    assert_facts(sets, rows)
    assert_facts(TokenSets.from_lists(rows), rows)
    assert_values(TokenSets.from_lists(rows, values_of(rows)), rows)


@examples
@given(
    sequences=st.lists(st.none() | st.lists(st.tuples(st.booleans(), st.none() | st.just([2, 1]) | st.just([7]))), max_size=4),
    data=st.data(),
)
def test_lists_of_sequences(sequences: list[Any], data: st.DataObject) -> None:
    """Each token either has a record or was not generated. Sequences without records may have any mask."""
    T = max((len(s) for s in sequences if s is not None), default=0) + 2
    expected, records, masks = [], [], []
    for tokens in sequences:
        rows: list[list[int]] = [[] for _ in range(T)]
        mask = [False] * T
        if tokens is None:
            mask = data.draw(st.lists(st.booleans(), min_size=T, max_size=T))
        else:
            for t, (generated, record) in enumerate(tokens):
                mask[t] = generated
                rows[t] = list(record or []) if generated else []
        records.append(None if tokens is None else [record for generated, record in tokens if generated])
        expected.append(rows)
        masks.append(mask)
    generated = torch.tensor(masks, dtype=torch.bool).reshape(len(sequences), T)
    assert_facts(TokenSets.from_lists(records, generated=generated), [row for rows in expected for row in rows])
    # Packed: the same rows, with each sequence cut to another length.
    lengths = [T - (b % 2) for b in range(len(sequences))]
    packed = torch.cat([generated.new_zeros(0), *(generated[b, :n] for b, n in enumerate(lengths))])
    cuts = torch.tensor([0, *lengths]).cumsum(0)
    rows = [row for own, n in zip(expected, lengths, strict=True) for row in own[:n]]
    assert_facts(TokenSets.from_lists(records, generated=packed, cu_seqlens=cuts), rows)
    if None not in records:
        flat = [record for own in records for record in own]
        assert_facts(TokenSets.from_lists(flat, generated=packed), rows)


def test_records_of_an_engine_on_the_rows_of_targets() -> None:
    """Two completions, prompts of two and three tokens: a record goes to the row that predicts its token."""
    ids = torch.tensor([[9, 9, 1, 2, 3], [9, 9, 9, 4, 0]])
    completion = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 0]])
    targets, generated = shift_targets(ids, mask=completion)
    records = [[[1, 5], [2], [3, 7, 6]], [[8, 4]]]
    sets = TokenSets.from_lists(records, [[[1, 2], [3], [4, 5, 6]], [[7, 8]]], generated=generated)
    assert lists(sets) == [[], [1, 5], [2], [3, 7, 6], [], [], [], [8, 4], [], []]
    assert sets.values is not None and sets.values.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    for row, target, marked in zip(lists(sets), targets.flatten().tolist(), generated.flatten().tolist(), strict=True):
        assert (target in row) == marked


MASK = torch.tensor([[0, 1, 1], [1, 0, 0]])

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"lists": torch.ones(2, 2)}, "lists is a Tensor: pass a list of lists"),
    "text": ({"lists": "12"}, "lists is a str: pass a list of lists"),
    "numbers": ({"lists": [1, 2]}, r"lists is not one list of numbers for each row.*generated="),
    "sequences": ({"lists": [[[1], [2]], [[3]]]}, "lists is not one list of numbers for each row.*generated="),
    "floats": ({"lists": [[1.5]]}, "lists holds torch.float32: pass lists of integer ids"),
    "bools": ({"lists": [[True]]}, "lists holds torch.bool: pass lists of integer ids"),
    "large": ({"lists": [[2**31]]}, "lists holds ids up to 2147483648: from lists ids become int32"),
    "negative": ({"lists": [[1], [3, -1]]}, r"ids is -1 in row 1"),
    "twice": ({"lists": [[], [3, 3]]}, r"ids is 3 twice in row 1"),
    "values: rows": ({"lists": [[1], [2]], "values": [[0.5]]}, "values has 1 rows, but lists has 2"),
    "values: numbers": ({"lists": [[1], [2, 3]], "values": [[1.0], [1.0]]}, "values has 1 numbers in row 1, but lists has 2 ids there"),
    "values: NaN": ({"lists": [[1], [2]], "values": [[1.0], [NAN]]}, r"values is NaN in row 1 \(values\[1\], id 2\)"),
    "cu_seqlens alone": ({"lists": [[1]], "cu_seqlens": ints(0, 1)}, "cu_seqlens is given without generated"),
    "generated: list": ({"lists": [[[1]]], "generated": [[True]]}, "generated is list: pass a bool tensor"),
    "generated: float": ({"lists": [[[1]]], "generated": torch.ones(1, 1)}, "generated has dtype torch.float32"),
    "generated: 3-d": ({"lists": [[[1]]], "generated": MASK[None]}, r"generated is shape \[1, 2, 3\]: pass a bool tensor"),
    "sequences: fewer": ({"lists": [[[1], [2]]], "generated": MASK}, "lists has 1 sequences, but generated has 2"),
    "records: fewer": ({"lists": [[[1]], [[2]]], "generated": MASK}, r"lists\[0\] has 1 records, but generated marks 2 tokens of sequence 0"),
    "records: more": ({"lists": [[[1], [2]], [[2], [3]]], "generated": MASK}, r"lists\[1\] has 2 records, but generated marks 1 "),
    "packed: fewer": ({"lists": [[1]], "generated": MASK[0]}, r"lists\[0\] has 1 records, but generated marks 2"),
    "packed: cuts": ({"lists": [[[1]]], "generated": MASK[0], "cu_seqlens": ints(0, 2)}, r"cu_seqlens=\[0, 2\]: it must rise"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_are_refused(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        TokenSets.from_lists(**given)


def test_sets_from_lists_are_made_on_the_given_device() -> None:
    assert TokenSets.from_lists(SOME, device="meta").ids.device.type == "meta"


# ---- the page


def test_the_page_of_kept_sets_runs() -> None:
    """Two sequences of a prompt and a completion, read from each of the formats: the same sets."""
    ids, completion_mask = torch.tensor([[9, 1, 2, 3], [9, 9, 4, 0]]), torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]])
    records = [[[1, 5], [2], [3, 7, 6]], [[8, 4]]]
    expected = [[1, 5], [2], [3, 7, 6], [], [], [8, 4], [], []]
    exec(example("assert (kept.rows"), {})
    of_lists, of_counts, of_a_response = map(example, ("output.sampling_mask", "from_counts(kept_ids", "of_sequence"))
    given: dict[str, Any] = {"TokenSets": TokenSets, "ids": ids, "completion_mask": completion_mask}
    given["outputs"] = [SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=own)) for own in records]
    exec(of_lists, given)
    assert lists(given["kept"]) == expected
    given |= {"kept_ids": ints(1, 5, 2, 3, 7, 6, 8, 4), "counts": ints(0, 2, 1, 3, 0, 0, 2, 0)}
    exec(of_counts, given)
    assert lists(given["kept"]) == expected
    for b, prompt_length in enumerate((1, 2)):
        given |= {"response": TokenSets.from_lists(records[b]), "prompt_length": prompt_length, "length": 4}
        exec(of_a_response, given)
        assert lists(given["of_sequence"]) == expected[4 * b : 4 * b + 4]
