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

from support.processes import checked_output, for_its_own_pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "rows"
#: Test files of single kernels, which run with each of ORDERS.
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
#: Test files that run with order 0 only. They take longer, and call the same kernels through the
#: package.
ONCE = [FOLDER / "triton_call_cases.py"]
TARGETS = ("sm_90", "sm_100")
#: Orders in which the executor runs warps: 0 by index, 1 reversed, 7 shuffled with this seed.
ORDERS = (0, 1, 7)


def is_tested_version(triton: str) -> bool:
    """Return whether the executor was tested with the PTX of a version of Triton.

    The tested versions are 3.6, and those from 3.9 on.

    triton   the version, such as "3.6.0"
    """
    major, minor = triton.split(".")[:2]
    version = (int(major), int(minor))
    return version == (3, 6) or version >= (3, 9)


def run_cases(
    cases: Sequence[Path], target: str, order: int, *, first: bool = False, triton: str = ""
) -> dict[str, Any]:
    """Run test files with compiled kernels in a new pytest process.

    The plugin support.ptx.launches runs the PTX of the kernels on the CPU. Asserts that a kernel
    was launched, that every test passes, and that none is skipped.

    cases    the test files
    target   the GPU architecture that Triton compiles for, one of TARGETS
    order    in which the executor runs warps, see ORDERS
    first    whether to run only the first case of each test
    triton   a folder with another version of Triton; "": the installed one

    Returns the report of the plugin, a dictionary whose keys are described at
    support.ptx.launches.REPORT.
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
        # In Triton's interpreter no kernel is compiled.
        environment.pop("TRITON_INTERPRET", None)
        checked_output(command, env=environment, cwd=ROOT)
        report = json.loads(report_file.read_text())
    assert set(report["outcomes"]) == {"passed"} and report["launches"], report
    return report


def run_all_cases(target: str, order: int, triton: str = "") -> dict[str, Any]:
    """Run CASES, and with order 0 also ONCE, with compiled kernels.

    target   the GPU architecture, one of TARGETS
    order    in which the executor runs warps, see ORDERS
    triton   a folder with another version of Triton; "": the installed one

    Returns the report of `run_cases`, with the time in "seconds".
    """
    files = [*CASES, *ONCE] if order == 0 else CASES
    started = time.monotonic()
    report = run_cases(files, target, order, triton=triton)
    return report | {"seconds": round(time.monotonic() - started)}
