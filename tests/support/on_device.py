r"""A pytest plugin that runs tests written for the CPU on another device, unchanged:

    GRPO_KERNELS_TEST_DEVICE=cuda GRPO_KERNELS_TEST_BACKENDS=triton python -m pytest -p
    support.on_device \
      tests/core/test_objectives.py

Tensors that a test makes without naming a device are made there (the package has to name its own);
random ones are drawn on the CPU and moved, so that the numbers are those the tests were written
with.

Tests run in an order for a run that may be cut off: each value of a parameter comes before its
other combinations, which GRPO_KERNELS_TEST_FIRST=1 leaves out (what tests/repository/versions.py
runs with --quick). With GRPO_KERNELS_TEST_REPORT=file, the number of tests and each outcome are
appended to it as lines of JSON at once. benchmarks/gpu_kit.py uses all of it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from grpo_kernels import TokenSets

RANDOM = {torch.rand, torch.randn, torch.randint, torch.randperm}
MADE = RANDOM | {
    torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros,
}  # fmt: skip
FIRST: set[str] = set()  # the tests of the first wave
#: Errors after which a CUDA context cannot be used any more.
FATAL = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
)


class OnDevice(TorchFunctionMode):
    """Like torch.device as a context, but for random tensors (see above) and pinned memory, which
    is the host's. Sets made of lists are tensors that a test makes.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __enter__(self) -> Any:
        made = TokenSets.from_lists.__func__  # type: ignore[attr-defined]

        def of_lists(cls: type, *given: Any, device: Any = None, **named: Any) -> TokenSets:
            beside = named.get("generated") is not None  # these say where
            return made(
                cls, *given, device=device if device is not None or beside else self.device, **named
            )

        self.patch = mock.patch.object(TokenSets, "from_lists", classmethod(of_lists))
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.patch.stop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func not in MADE
            or any(kwargs.get(name) is not None for name in ("device", "pin_memory", "out"))
            or in_package()
        ):
            return func(*args, **kwargs)
        if func not in RANDOM:
            return func(*args, **kwargs, device=self.device)
        needs_grad = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).to(self.device).requires_grad_(needs_grad)


def in_package() -> bool:
    """Whether the function that `__torch_function__` stands in for was called by the package under
    test.
    """
    frame = sys._getframe(2)
    while (
        frame is not None and frame.f_globals.get("__name__") == "conftest"
    ):  # which poisons new memory
        frame = frame.f_back
    return (
        frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "grpo_kernels"
    )


MODE = OnDevice(os.environ.get("GRPO_KERNELS_TEST_DEVICE", "cpu"))


def pytest_configure(config: pytest.Config) -> None:
    if MODE.device != "cpu":
        MODE.__enter__()  # before modules are imported: some make tensors for their parameters


def pytest_unconfigure(config: pytest.Config) -> None:
    if MODE.device != "cpu":
        MODE.__exit__(None, None, None)


@pytest.hookimpl(trylast=True)  # of the tests that are left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = in_waves(items)
    if os.environ.get("GRPO_KERNELS_TEST_FIRST") == "1":
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in FIRST])
        items[:] = [item for item in items if item.nodeid in FIRST]


def in_waves(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sorts the tests. First come as many cases of each test as are needed for every value of each
    parameter to occur, file by file. In a file they alternate between the tests. Then the remaining
    cases follow in their order.
    """
    values: dict[tuple[str, str], list[int]] = {}
    for item in items:
        for name, value in parameters(item).items():
            known = values.setdefault((test_of(item), name), [])
            if id(value) not in known:
                known.append(id(value))

    def on_the_diagonal(item: pytest.Item) -> bool:
        known = [values[test_of(item), name] for name in parameters(item)]
        places = [
            k.index(id(value)) for k, value in zip(known, parameters(item).values(), strict=True)
        ]
        along = max(
            zip(map(len, known), places, strict=True), default=(0, 0), key=lambda pair: pair[0]
        )[1]
        return all(place == along % len(k) for place, k in zip(places, known, strict=True))

    files, turn, seen = (
        list(dict.fromkeys(item.path for item in items)),
        Counter[str](),
        set[tuple[str, str, int]](),
    )
    first: dict[pytest.Item, tuple[int, int]] = {}
    for wanted in (on_the_diagonal, lambda item: item not in first):
        for item in filter(wanted, items):
            new = {(test_of(item), name, id(value)) for name, value in parameters(item).items()}
            if new - seen or not new:
                seen |= new
                turn[test_of(item)] += 1
                first[item] = files.index(item.path), turn[test_of(item)]
    FIRST.update(item.nodeid for item in first)
    return [*sorted(first, key=first.__getitem__), *(item for item in items if item not in first)]


def test_of(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def write(**line: Any) -> None:
    if os.environ.get("GRPO_KERNELS_TEST_REPORT"):
        with Path(os.environ["GRPO_KERNELS_TEST_REPORT"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    if (
        os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0" and session.items
    ):  # the process that starts workers has none
        names = [item.nodeid for item in session.items]
        files, first = (
            Counter(name.split("::")[0] for name in some)
            for some in (names, FIRST.intersection(names))
        )
        write(collected=files, first=first)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    finished = report.when == "call" or report.outcome != "passed"
    if (
        finished and "PYTEST_XDIST_WORKER" not in os.environ
    ):  # the process that started the workers hears of all
        crash = getattr(report.longrepr, "reprcrash", None)
        message = (
            ""
            if report.passed
            else str(report.longrepr if crash is None else crash.message).strip()[:500]
        )
        write(
            test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), message=message,
            properties=dict(report.user_properties),
        )  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Returns the memory of a test before the next one:

    several processes share a GPU, and an oracle in float64 takes gigabytes.
    """
    if MODE.device != "cpu":
        gc.collect()
        torch.get_device_module(MODE.device).empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(call: pytest.CallInfo[Any]) -> None:
    """A worker of pytest-xdist whose CUDA context is broken ends, and another takes its place."""
    text = "" if call.excinfo is None else str(call.excinfo.value)
    if "PYTEST_XDIST_WORKER" in os.environ and any(words in text for words in FATAL):
        os._exit(70)
