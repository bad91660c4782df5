"""Runs tests/vocabulary/triton_cases.py in a process of its own: Triton chooses its interpreter when the kernels are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import interpreted

pytest.importorskip("triton")
pytest.importorskip("numpy")  # Triton's interpreter imports it


def test_the_kernels_agree_with_float64_in_the_interpreter() -> None:
    interpreted(Path(__file__).with_name("triton_cases.py"))
