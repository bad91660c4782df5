"""Runs of the cases of the Triton kernels, in processes that execute what Triton compiles for a
GPU.
"""

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
#: What takes longer, or runs the same kernels by calls of the package: in one order only.
ONCE = [FOLDER / "triton_call_cases.py"]
#: Orders of warps: as they are, reversed, shuffled by a seed.
TARGETS, ORDERS = ("sm_90", "sm_100"), (0, 1, 7)


def known(triton: str) -> bool:
    """Whether the executor has read what this version of Triton emits:

    3.6, and the newest from 3.9 on.
    """
    version = tuple(map(int, triton.split(".")[:2]))
    return version == (3, 6) or version >= (3, 9)


def executed(
    cases: Sequence[Path], target: str, order: int, *, first: bool = False, triton: str = ""
) -> dict[str, Any]:
    """Asserts that all cases of these files, or the `first` of each test, pass and none is skipped,
    where launches run what Triton compiles for `target` with warps in that `order` (see
    support.ptx). What was run. `triton`: a folder with another version.
    """
    paths = os.pathsep.join([*filter(None, [triton]), *sys.path])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = for_its_own_pytest() | {
            "PYTHONPATH": paths, "GRPO_KERNELS_TEST_TARGET": target, "GRPO_KERNELS_TEST_ORDER": str(order),
            "GRPO_KERNELS_TEST_FIRST": str(int(first)), "GRPO_KERNELS_TEST_REPORT": str(report),
            "GRPO_KERNELS_TEST_BACKENDS": "triton",
        }  # fmt: skip
        environment.pop("TRITON_INTERPRET", None)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "support.ptx.launches",
            *map(str, cases),
        ]
        said(command, env=environment, cwd=ROOT)
        found = json.loads(report.read_text())
    assert set(found["outcomes"]) == {"passed"} and found["launches"], found
    return found


def all_cases(target: str, order: int, triton: str = "") -> dict[str, Any]:
    """The same of every file, and how long it took."""
    started = time.monotonic()
    found = executed([*CASES, *ONCE] if order == 0 else CASES, target, order, triton=triton)
    return found | {"seconds": round(time.monotonic() - started)}
