"""A pytest plugin that runs tests written for the CPU on another device, unchanged:

    GRPO_KERNELS_TEST_DEVICE=cuda GRPO_KERNELS_TEST_BACKENDS=triton python -m pytest -p on_device tests/test_grpo_loss.py

Tensors that a test makes without naming a device are made there (the package has to name its own); random ones are drawn on
the CPU and moved, so that the numbers are those the tests were written with. With GRPO_KERNELS_TEST_REPORT=file, each outcome is appended to it as a line
of JSON at once: a run that is cut off leaves what it found. benchmarks/gpu_kit.py uses both."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

RANDOM = {torch.rand, torch.randn, torch.randint, torch.randperm}
MADE = RANDOM | {
    torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros,
}  # fmt: skip
#: Tests about the CPU. Everything else is expected to pass on every device.
CPU_ONLY = {
    "test_autocast": "it switches on the CPU's autocast",
    "test_chunk_count_changes_only_rounding": "it changes the CPU's chunk size",
}
#: A CUDA context is of no use after these.
FATAL = ("illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure")


class OnDevice(TorchFunctionMode):
    """Like torch.device as a context, but for random tensors (see above) and pinned memory, which is the host's."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in MADE or any(kwargs.get(name) is not None for name in ("device", "pin_memory", "out")) or in_package():
            return func(*args, **kwargs)
        if func not in RANDOM:
            return func(*args, **kwargs, device=self.device)
        needs_grad = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).to(self.device).requires_grad_(needs_grad)


def in_package() -> bool:
    """Whether the function that `__torch_function__` stands in for was called by the package under test."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "conftest":  # which poisons new memory
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "grpo_kernels"


MODE = OnDevice(os.environ.get("GRPO_KERNELS_TEST_DEVICE", "cpu"))


def pytest_configure(config: pytest.Config) -> None:
    MODE.__enter__()  # before modules are imported: some make tensors for their parameters


def pytest_unconfigure(config: pytest.Config) -> None:
    MODE.__exit__(None, None, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = CPU_ONLY.get(getattr(item, "originalname", ""))
        if reason is not None and MODE.device != "cpu":
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path, in_worker = os.environ.get("GRPO_KERNELS_TEST_REPORT"), "PYTEST_XDIST_WORKER" in os.environ
    finished = report.when == "call" or report.outcome != "passed"
    if path and finished and not in_worker:  # the process that started the workers hears of all
        crash = getattr(report.longrepr, "reprcrash", None)
        message = "" if report.passed else str(report.longrepr if crash is None else crash.message).strip()[:500]
        line = {
            "test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3), "message": message,
            "properties": dict(report.user_properties),
        }  # fmt: skip
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(call: pytest.CallInfo[Any]) -> None:
    """A worker of pytest-xdist whose CUDA context is broken ends, and another takes its place."""
    text = "" if call.excinfo is None else str(call.excinfo.value)
    if "PYTEST_XDIST_WORKER" in os.environ and any(words in text for words in FATAL):
        os._exit(70)
