"""The cases of the Triton kernels, in processes of their own: they execute the code that Triton
compiles for a GPU (support/ptx).

    GRPO_KERNELS_TRITON_36=FOLDER python -m pytest -m compiled tests/rows/test_triton_compiled.py

runs all of them for each target, with warps in three orders, with the Triton that is installed and
with 3.6 from that folder (`pip install --no-deps --target FOLDER triton==3.6.0`). `python
tests/repository/compiled.py` writes what that came to.
"""

from __future__ import annotations

import os
import shutil

import pytest

pytest.importorskip("triton")

import triton

from support.processes import interpreted
from support.ptx.runs import (
    CASES,
    ONCE,
    ORDERS,
    TARGETS,
    is_tested_version,
    run_all_cases,
    run_cases,
)

FOLDERS = {"installed": "", "3.6": os.environ.get("GRPO_KERNELS_TRITON_36", "")}

builds = pytest.mark.skipif(
    shutil.which("cc") is None, reason="the machine of the executor is built by a C compiler"
)


@builds
@pytest.mark.skipif(
    not is_tested_version(triton.__version__),
    reason="the executor has not read what this version emits",
)
@pytest.mark.parametrize(
    "cases",
    [CASES[:2], CASES[2:], ONCE],
    ids=["policy", "reference, pairs and vectors", "public functions"],
)
def test_the_first_case_of_each_test(cases):
    run_cases(cases, "sm_90", 0, first=True)


@builds
@pytest.mark.compiled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", FOLDERS)
def test_all_cases(version, target, order):
    if version != "installed" and not FOLDERS[version]:
        pytest.skip("GRPO_KERNELS_TRITON_36 names no folder")
    run_all_cases(target, order, FOLDERS[version])


@pytest.mark.skipif(is_tested_version(triton.__version__), reason="the executor runs them")
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_in_the_interpreter(cases):
    """For versions of Triton whose code the executor has not read."""
    pytest.importorskip("numpy")
    interpreted(cases)
