"""Runs tests/vocabulary/triton_cases.py in a process of its own: Triton chooses its interpreter when the kernels are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("numpy")  # Triton's interpreter imports it


def test_the_kernels_agree_with_float64_in_the_interpreter() -> None:
    cases = Path(__file__).with_name("triton_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
    inherited = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}  # the summary below is read
    environment = inherited | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, env=environment, cwd=cases.parents[2], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout
