"""The cases of the Triton kernels in Triton's interpreter, for versions of Triton whose code the executor has not read: others run
them as they are compiled, see test_triton_compiled.py. In processes of their own: the interpreter is chosen when kernels are
imported."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("numpy")  # Triton's interpreter imports it

import triton

from support.processes import interpreted
from support.ptx.runs import CASES, known


@pytest.mark.skipif(known(triton.__version__), reason="the executor runs them: test_triton_compiled")
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_the_kernels_agree_with_float64_in_the_interpreter(cases: Path) -> None:
    interpreted(cases)
