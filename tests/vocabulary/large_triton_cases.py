"""The fused kernel on rows of a real length, as it is launched, against float64. Run as triton_cases.py is."""

from __future__ import annotations

import pytest
import torch
from triton_cases import DTYPES, FULL, check, make_logits, make_rows

from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.rows import RowTransform


@pytest.mark.parametrize("V", (151_936, 128_257))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_of_its_own_and_in_place(dtype: torch.dtype, V: int) -> None:
    rows = make_rows(3, V, 13)
    logits = make_logits(3, V, dtype, 5, std=2.0)
    out = check("clip", logits, rows, FULL, RowTransform(1.0, 0.0, 0.8))
    backend.fused(logits, rows, FULL, RowTransform(1.0, 0.0, 0.8), logits)
    assert torch.equal(logits, out)
