"""The selection of the Triton backend. Run as triton_cases.py is, these are tests of test_selection.py."""

from __future__ import annotations

from typing import Any

import pytest
import test_selection as of_every_backend
import torch
from test_selection import (  # noqa: F401 - collected here, with the fixture below
    test_no_rows_and_strided_rows,
    test_parts_of_a_row_draw_what_the_row_does,
    test_rows_without_probabilities,
    test_transforms,
)

from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends.triton_choices import LAUNCH, Choice


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With tiles of 128 columns of fp32, so that rows have several."""
    monkeypatch.setitem(LAUNCH, "select", Choice(32, 1))
    return backend


@pytest.mark.parametrize(
    "vocab, dtype", [(1, torch.float32), (61, torch.bfloat16), (256, torch.float16), (1000, torch.float32)], ids=str
)
def test_columns(module: Any, vocab: int, dtype: torch.dtype) -> None:
    of_every_backend.test_columns_are_those_of_whole_numbers(module, vocab, dtype)


def test_tiles_of_any_size(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change no column."""
    logits, targets, first = of_every_backend.rows_of(1000)
    stats, _ = of_every_backend.probabilities(module, logits)
    few = module.select(logits, targets, stats, of_every_backend.AS_IT_IS, 1 / 100, first)
    monkeypatch.setitem(LAUNCH, "select", Choice(256, 2))
    one = module.select(logits, targets, stats, of_every_backend.AS_IT_IS, 1 / 100, first)
    assert all(torch.equal(a, b) for a, b in zip(few, one, strict=True)) and (one.ids >= 0).sum() > 100
