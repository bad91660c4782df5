"""Run the tests of the Triton kernels in processes that execute compiled kernels (support.ptx)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.processes import for_its_own_pytest, said

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "rows"
CASES = [
    FOLDER / f"{name}.py"
    for name in (
        "triton_cases",
        "test_row_kernels",
        "test_two_row_kernels",
        "test_slot_products",
        "test_evaluate",
    )
]
#: Files that run in order 0 only. They take longer, and call the same kernels by the package.
ONCE = [FOLDER / "triton_call_cases.py"]
TARGETS = ("sm_90", "sm_100")
#: Orders of warps: by index, reversed, shuffled with seed 7.
ORDERS = (0, 1, 7)


def known(triton: str) -> bool:
    """Return whether the executor was tested with the PTX of this version of Triton.

    These are 3.6, and versions from 3.9 on.
    """
    version = tuple(map(int, triton.split(".")[:2]))
    return version == (3, 6) or version >= (3, 9)


def executed(
    cases: Sequence[Path], target: str, order: int, *, first: bool = False, triton: str = ""
) -> dict[str, Any]:
    """Run test files with compiled kernels, and assert that every test passes and none is skipped.

    cases    the test files
    target   the GPU architecture that Triton compiles for
    order    of warps, see ORDERS
    first    whether to run only the first case of each test
    triton   a folder with another version of Triton; "": the installed one

    Returns the report of support.ptx.launches.
    """
    search_path = [triton, *sys.path] if triton else sys.path
    command = [sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "support.ptx.launches"]
    command += map(str, cases)
    with tempfile.TemporaryDirectory() as folder:
        report_file = Path(folder) / "report.json"
        environment = for_its_own_pytest() | {
            "PYTHONPATH": os.pathsep.join(search_path),
            "GRPO_KERNELS_TEST_TARGET": target,
            "GRPO_KERNELS_TEST_ORDER": str(order),
            "GRPO_KERNELS_TEST_FIRST": str(int(first)),
            "GRPO_KERNELS_TEST_REPORT": str(report_file),
            "GRPO_KERNELS_TEST_BACKENDS": "triton",
        }
        environment.pop("TRITON_INTERPRET", None)
        said(command, env=environment, cwd=ROOT)
        report = json.loads(report_file.read_text())
    assert set(report["outcomes"]) == {"passed"} and report["launches"], report
    return report


def all_cases(target: str, order: int, triton: str = "") -> dict[str, Any]:
    """Run all test files that belong to an order, see `executed`.

    Returns the report, with the time in "seconds".
    """
    files = [*CASES, *ONCE] if order == 0 else CASES
    started = time.monotonic()
    report = executed(files, target, order, triton=triton)
    return report | {"seconds": round(time.monotonic() - started)}
