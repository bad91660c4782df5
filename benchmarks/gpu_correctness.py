"""The stage of the GPU kit that runs the cases of the tests on the device and reads their reports."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_plan import CASES, REHEARSED
from benchmarks.gpu_running import ROOT, Kit, outcome


def correctness(kit: Kit) -> None:
    """Runs the cases of the tests on the device, one group after the other. Of each test, single values of the parameters come
    first and combinations later, see tests/support/on_device.py. Combinations that do not fit into the time are not a failure."""
    begin, whole, found, spent = time.monotonic(), 0.95 * kit.left, {}, 0.0
    for name, cases in CASES.items():
        spent += cases.share  # time left over by earlier groups is given to this one
        report = kit.work / "json" / f"tests-{slug_of(name)}.jsonl"
        report.unlink(missing_ok=True)
        status = kit.python(
            *pytest_command(cases.processes, kit.rehearse), *(f"tests/{file}" for file in cases.files),
            PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
            PYTEST_ADDOPTS="", GRPO_KERNELS_TEST_DEVICE=kit.device, GRPO_KERNELS_TEST_BACKENDS="triton",
            GRPO_KERNELS_TEST_REPORT=str(report), seconds=max(1.0, spent * whole - (time.monotonic() - begin)),
        )  # fmt: skip
        group = found[name] = tally(report, cases.files)
        kit.add(groups=found)
        enough = 0 < group["first"] <= group["ran"] and not group["failed"]
        kit.say(
            f"{name}: {group['passed']} passed, {len(group['failed'])} failed; {group['ran']} of {group['collected']} ran, "
            f"{group['first']} have every value of every parameter ({outcome(status)})",
            well=status == 0 or (status is None and enough),
        )
        for failure in group["failed"][:8]:
            kit.say(f"  {failure['test'].removeprefix('tests/')}: {' '.join(failure['message'].split())[:160]}")
        for what, value in group["largest"].items():
            kit.say(f"  largest error, {what}: {value:.1e}")


def slug_of(name: str) -> str:
    return name.lower().replace(" ", "-")


def pytest_command(processes: int, rehearse: bool) -> list[str]:
    command = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "support.on_device"]
    if importlib.util.find_spec("xdist") and not rehearse:  # few at a time, so that they keep their order
        command += ["-n", str(min(processes, os.cpu_count() or 1)), "--maxschedchunk=2"]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout=90"]
    return command + (["-k", REHEARSED] if rehearse else [])


def tally(report: Path, files: Sequence[str]) -> dict:
    """What tests/support/on_device.py wrote about these files: {"collected", "first", "ran", "passed", "failed", "skipped",
    "largest": {recorded property: its maximum}}."""
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    names = {Path(file).name for file in files}
    sizes = {
        what: sum(count for line in lines for file, count in line.get(what, {}).items() if Path(file).name in names)
        for what in ("collected", "first")
    }
    lines = [line for line in lines if "test" in line and Path(line["test"].split("::")[0]).name in names]
    largest: dict[str, float] = {}
    for line in lines:
        test = re.sub(r".*::|\[.*", "", line["test"])
        for what, value in line["properties"].items():
            largest[f"{test}, {what}"] = max(value, largest.get(f"{test}, {what}", 0.0))
    return sizes | {
        "ran": len({line["test"] for line in lines}),
        "passed": sum(line["outcome"] == "passed" for line in lines),
        "failed": [line for line in lines if line["outcome"] == "failed"],
        "skipped": sorted({f"{line['test']}: {line['message']}" for line in lines if line["outcome"] == "skipped"}),
        "largest": largest,
    }
