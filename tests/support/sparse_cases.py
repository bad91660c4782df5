"""Sparse products in plain float64 torch, and checks that every backend has to pass. A backend is passed as its module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_kernels.vocabulary.sparse import Slots
from support.largest import note

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 3, 16, 33, 64, 100, 513)


def slots_of(lists: Sequence[Sequence[int]]) -> Slots:
    """Slots from the ids of each row; -1: a slot that is not used."""
    counts = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
    return Slots(
        torch.tensor([i for ids in lists for i in ids], dtype=torch.int64),
        torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        torch.repeat_interleave(torch.arange(len(lists)), counts),
    )


def random_slots(n: int, vocab: int, seed: int = 0) -> Slots:
    """Rows of 0 to 9 slots with repeated ids and some that are not used; id 0 is in every third row, id 1 in none."""
    g = torch.Generator().manual_seed(seed)
    lists = []
    for i in range(n):
        count = int(torch.randint(0, 10, (), generator=g)) if i % 5 else 0
        ids = torch.randint(2, vocab, (count,), generator=g).tolist()
        ids = [-1 if k % 4 == 3 else x for k, x in enumerate(ids)]
        lists.append([*ids, 0] if i % 3 == 0 else ids)
    return slots_of(lists)


def values_for(slots: Slots, seed: int = 1) -> Tensor:
    """Every seventh value is 0."""
    values = torch.randn(slots.ids.shape, generator=torch.Generator().manual_seed(seed))
    values[::7] = 0.0
    return values


def matrix(rows: int, width: int, dtype: torch.dtype, seed: int, gap: int = 0) -> Tensor:
    """Random numbers; with `gap` the rows lie further apart than they are wide."""
    numbers = torch.randn(rows, width + gap, generator=torch.Generator().manual_seed(seed)) / 2
    return numbers.to(dtype)[:, gap // 2 : gap // 2 + width]


# ---- float64, one slot after the other


def pairs(slots: Slots, values: Tensor | None = None) -> list[tuple[int, int, int]]:
    """(slot, row, id) of what counts."""
    return [
        (s, i, int(slots.ids[s]))
        for i in range(len(slots.offsets) - 1)
        for s in range(int(slots.offsets[i]), int(slots.offsets[i + 1]))
        if slots.ids[s] >= 0 and (values is None or values[s] != 0)
    ]


def exact_logits(hidden: Tensor, weight: Tensor, slots: Slots) -> Tensor:
    logits = torch.full(slots.ids.shape, -torch.inf, dtype=torch.float64)
    for s, i, j in pairs(slots):
        logits[s] = (hidden[i].double() * weight[j].double()).sum()
    return logits


def exact_sums(values: Tensor, slots: Slots, source: Tensor, out: Tensor, *, of: str) -> tuple[Tensor, Tensor]:
    """(out after the product, the sum of magnitudes that went into each element). `of`: "weight" or "hidden"."""
    result, size, fresh = out.double(), torch.zeros(out.shape, dtype=torch.float64), set(range(len(out)))
    for s, i, j in pairs(slots, values):
        to, row = (i, j) if of == "weight" else (j, i)
        if to in fresh:
            fresh.remove(to)
            if of == "weight":
                result[to] = 0.0
            size[to] = result[to].abs()
        term = values[s].double() * source[row].double()
        result[to] += term
        size[to] += term.abs()
    return result, size


def assert_close_sums(got: Tensor, want: Tensor, size: Tensor, terms: int) -> None:
    """fp32 roundings of the sum, then one of the store (the interpreter of Triton truncates bf16)."""
    stored = torch.finfo(got.dtype).eps * want.abs() + (2**-24 if got.dtype == torch.float16 else 0.0)
    beyond = (got.double() - want).abs() - stored
    note("sparse sums", beyond / size)
    excess = beyond - 1.2e-7 * (terms + 1) * size
    assert excess.max() <= 0, excess.max()


def products(backend: Any) -> dict[str, Callable[..., None]]:
    return {"weight": backend.add_weight_rows, "hidden": backend.add_hidden_rows}


# ---- checks


def check_logits(backend: Any, n: int, width: int, hidden_dtype: torch.dtype, weight_dtype: torch.dtype, gap: int) -> None:
    vocab, slots = 40, random_slots(n, 40)
    hidden, weight = matrix(n, width, hidden_dtype, 1, gap), matrix(vocab, width, weight_dtype, 2, gap)
    want, got = exact_logits(hidden, weight, slots), backend.slot_logits(hidden, weight, slots)
    assert got.dtype == torch.float32
    used = slots.ids >= 0
    assert (got[~used] == -torch.inf).all() and (~used).any()
    size = exact_logits(hidden.abs(), weight.abs(), slots)[used]
    error = (got[used] - want[used]).abs()
    note("sparse logits", error / size)
    excess = error - 1.2e-7 * (4 + width / 8) * size
    assert excess.max() <= 0, excess.max()


def check_sums(
    backend: Any, of: str, n: int, width: int, dtype: torch.dtype, out_dtype: torch.dtype, gap: int, vocab: int = 40
) -> None:
    slots = random_slots(n, vocab)
    values = values_for(slots)
    source = matrix(vocab if of == "weight" else n, width, dtype, 2, gap)
    out = matrix(n if of == "weight" else vocab, width, out_dtype, 3, gap)
    before = out.clone()
    want, size = exact_sums(values, slots, source, before, of=of)
    products(backend)[of](values, slots, source, out)
    touched = size.sum(1) > 0
    assert touched.any() and not touched.all()
    assert torch.equal(out[~touched], before[~touched])
    assert_close_sums(out[touched], want[touched], size[touched], terms=n)


def check_poison(backend: Any, dtype: torch.dtype) -> None:
    """Rows that no used slot refers to may hold anything."""
    slots = slots_of([[3, -1, 5], [], [-1, -1], [3, 4], [1, 3]])
    values = torch.tensor([0.5, torch.nan, 2.0, 1.0, torch.nan, -1.0, 0.0, 0.0, 0.25])
    used_ids, used_rows = [1, 3, 4, 5], [0, 3, 4]
    hidden, weight = torch.full((5, 37), torch.nan).to(dtype), torch.full((7, 37), torch.nan).to(dtype)
    hidden[used_rows], weight[used_ids] = matrix(3, 37, dtype, 1), matrix(4, 37, dtype, 2)
    assert not backend.slot_logits(hidden, weight, slots).isnan().any()
    # With values: slot 6 of row 3 (id 4) and slot 7 of row 4 (id 1) are 0, so that row 3 and ids 1 and 4 are not read.
    hidden[3] = weight[1] = weight[4] = torch.nan
    d_hidden, d_weight = torch.full((5, 37), torch.nan), torch.full((7, 37), torch.nan)
    values[5] = 0.0
    d_hidden[used_rows], d_weight[[3, 5]] = 0.0, 0.0
    backend.add_weight_rows(values, slots, weight, d_hidden)
    backend.add_hidden_rows(values, slots, hidden, d_weight)
    for out, live in ((d_hidden, [0, 4]), (d_weight, [3, 5])):
        assert out[live].isfinite().all() and (out[live] != 0).any(1).all()
    assert d_hidden[[1, 2]].isnan().all() and d_weight[[0, 1, 2, 4, 6]].isnan().all()
    assert (d_hidden[3] == 0).all()


def check_nan_goes_through(backend: Any) -> None:
    slots, hidden, weight = slots_of([[0, 2], [1]]), matrix(2, 19, torch.float32, 1), matrix(3, 19, torch.float32, 2)
    values, d_hidden, d_weight = torch.tensor([torch.nan, 1.0, 2.0]), torch.zeros(2, 19), torch.zeros(3, 19)
    backend.add_weight_rows(values, slots, weight, d_hidden)
    backend.add_hidden_rows(values, slots, hidden, d_weight)
    assert d_hidden.isnan().all(1).tolist() == [True, False] and d_weight.isnan().all(1).tolist() == [True, False, False]
    weight[2, 18] = torch.nan
    assert backend.slot_logits(hidden, weight, slots).isnan().tolist() == [False, True, False]
    for dtype in DTYPES:
        d_hidden = torch.zeros(2, 19, dtype=dtype)
        backend.add_weight_rows(torch.ones(3), slots, weight, d_hidden)
        assert d_hidden.isnan().nonzero().tolist() == [[0, 18]]


def check_nothing(backend: Any) -> None:
    """No slots, no rows, only slots that are not used."""
    for lists in ([], [[], []], [[-1], [-1, -1]]):
        slots, n = slots_of(lists), len(lists)
        hidden, weight = torch.full((n, 5), torch.nan), torch.full((4, 5), torch.nan)
        assert torch.equal(backend.slot_logits(hidden, weight, slots), torch.full(slots.ids.shape, -torch.inf))
        for value in (0.0, 1.0):
            values, d_hidden, d_weight = torch.full(slots.ids.shape, value), torch.ones(n, 5), torch.ones(4, 5)
            backend.add_weight_rows(values, slots, weight, d_hidden)
            backend.add_hidden_rows(values, slots, hidden, d_weight)
            assert (d_hidden == 1).all() and (d_weight == 1).all()


def check_one_rounding(backend: Any, dtype: torch.dtype) -> None:
    """Terms that are each too small for out's dtype still count in their sum."""
    n, width, eps = 64, 21, torch.finfo(dtype).eps
    slots, hidden = slots_of([[1]] * n), torch.ones(n, width, dtype=dtype)
    out = torch.ones(2, width, dtype=dtype)
    backend.add_hidden_rows(torch.full((n,), eps / 4), slots, hidden, out)
    assert (out[1] == 1 + eps * n / 4).all() and (out[0] == 1).all()


def check_heavy_id(backend: Any, n: int, width: int, dtype: torch.dtype) -> None:
    """One id in all rows."""
    slots = slots_of([[2, 0] if i % 2 else [i % 4 + 3, 2] for i in range(n)])
    values, hidden, out = values_for(slots), matrix(n, width, dtype, 4), torch.zeros(8, width)
    want, size = exact_sums(values, slots, hidden, out, of="hidden")
    backend.add_hidden_rows(values, slots, hidden, out)
    assert_close_sums(out, want, size, terms=n)


def check_rows_are_independent(backend: Any, dtype: torch.dtype, width: int) -> None:
    """Each row alone, and each id alone, gives the same bits as all together."""
    n, vocab = 12, 9
    slots = random_slots(n, vocab, seed=3)
    values, hidden, weight = values_for(slots), matrix(n, width, dtype, 1), matrix(vocab, width, dtype, 2)
    logits, d_hidden, d_weight = results(backend, values, slots, hidden, weight)
    offsets = slots.offsets.tolist()
    for i in range(n):
        at = slice(offsets[i], offsets[i + 1])
        alone = Slots(slots.ids[at], torch.tensor([0, offsets[i + 1] - offsets[i]]), torch.zeros_like(slots.ids[at]))
        row = torch.zeros(1, width)
        backend.add_weight_rows(values[at].clone(), alone, weight, row)
        assert torch.equal(backend.slot_logits(hidden[i : i + 1], weight, alone), logits[at]), i
        assert torch.equal(row, d_hidden[i : i + 1]), i
    for j in range(vocab):
        only = slots._replace(ids=torch.where(slots.ids == j, j, -1))
        of_id = torch.zeros(vocab, width)
        backend.add_hidden_rows(values, only, hidden, of_id)
        assert torch.equal(of_id[j], d_weight[j]), j
    for s in range(0, slots.ids.numel(), 3):  # a slot alone, and moved to another place of a longer row
        moved = slots_of([[0, int(slots.ids[s])]])
        alone_logits = backend.slot_logits(hidden[slots.rows[s] : slots.rows[s] + 1], weight, moved)
        assert torch.equal(alone_logits[1], logits[s]), s


def results(backend: Any, values: Tensor, slots: Slots, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three products, the sums into zeros."""
    d_hidden, d_weight = torch.zeros(hidden.shape), torch.zeros(weight.shape)
    backend.add_weight_rows(values, slots, weight, d_hidden)
    backend.add_hidden_rows(values, slots, hidden, d_weight)
    return backend.slot_logits(hidden, weight, slots), d_hidden, d_weight
