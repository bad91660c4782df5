"""The sparse products of the Triton backend, against float64. Run as triton_cases.py is."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends import triton_sparse
from grpo_kernels.vocabulary.backends.triton_choices import LAUNCH
from support import sparse_cases as cases
from support.sparse_cases import DTYPES

#: Each dtype on either side of another and of itself in one width, each of the others with a dtype of its own.
PRODUCTS = [
    *((33, 6, dtype, other) for i, dtype in enumerate(DTYPES) for other in (dtype, DTYPES[i - 1])),
    (1, 0, torch.float32, torch.float32),
    (64, 0, torch.bfloat16, torch.bfloat16),
    (64, 16, torch.float16, torch.float32),
    (1040, 2, torch.bfloat16, torch.float32),
    (1040, 2, torch.float16, torch.float16),
]
#: The other pairs of those widths, for -m slow.
FURTHER = [
    (width, gap, dtype, other)
    for width, gap in ((33, 6), (1, 0), (64, 0), (64, 16), (1040, 2))
    for dtype in DTYPES
    for other in (DTYPES if width == 33 else dict.fromkeys((dtype, torch.float32)))
    if (width, gap, dtype, other) not in PRODUCTS
]


@pytest.mark.parametrize(
    "width, gap, dtype, other", [*PRODUCTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER)], ids=str
)
def test_products(width: int, gap: int, dtype: torch.dtype, other: torch.dtype) -> None:
    n = 5 if width > 1000 else 12
    cases.check_logits(backend, n, width, dtype, other, gap)
    cases.check_sums(backend, "weight", n, width, dtype, other, gap)
    cases.check_sums(backend, "hidden", n, width, dtype, other, gap)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_no_slot_names_is_not_read(dtype: torch.dtype) -> None:
    cases.check_poison(backend, dtype)


def test_nan_goes_through() -> None:
    cases.check_nan_goes_through(backend)


def test_nothing_to_do() -> None:
    cases.check_nothing(backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    cases.check_one_rounding(backend, dtype)


def test_an_id_that_is_in_all_rows() -> None:
    cases.check_heavy_id(backend, 60, 20, torch.float32)


@pytest.mark.parametrize("width", (20, 48))
def test_an_id_with_many_slots_is_summed_in_pieces(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 slots here, the last longer. Its bits do not depend on what other ids have, nor on how columns go to programs."""
    monkeypatch.setattr(triton_sparse, "PIECE", 16)
    counts = {0: 31, 1: 32, 2: 5, 3: 33, 4: 161, 5: 1, 7: 48}
    ids = torch.tensor([id for id, count in counts.items() for _ in range(count)] + [-1] * 19)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    slots = cases.slots_of([[id] for id in ids.tolist()])
    values, hidden = torch.randn(len(ids)), cases.matrix(len(ids), width, torch.float32, 4)
    zeros = torch.zeros(8, width)
    want, size = cases.exact_sums(values, slots, hidden, zeros, of="hidden")
    out = zeros.clone()
    backend.add_hidden_rows(values, slots, hidden, out)
    cases.assert_close_sums(out, want, size, terms=40)  # of a piece, and of pieces: fewer roundings than slots
    monkeypatch.setitem(LAUNCH, "slots", LAUNCH["slots"]._replace(threads=32))
    for id in counts:
        alone = zeros.clone()
        backend.add_hidden_rows(values, slots._replace(ids=torch.where(ids == id, id, -1)), hidden, alone)
        assert torch.equal(alone[id], out[id]) and not alone[torch.arange(8) != id].any(), id


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_rows_are_independent(dtype: torch.dtype) -> None:
    cases.check_rows_are_independent(backend, dtype, 20)
