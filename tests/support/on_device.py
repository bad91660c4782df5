r"""A pytest plugin that runs tests written for the CPU on another device, unchanged.

    GRPO_KERNELS_TEST_DEVICE=cuda GRPO_KERNELS_TEST_BACKENDS=triton python -m pytest -p
    support.on_device \
      tests/core/test_objectives.py

Tensors that a test makes without a device are made on this device. The package has to name the
device of its tensors. Random tensors are drawn on the CPU and then moved, so that the numbers are
the same as on the CPU.

Tests run in an order that suits a run which may be cut off: first come the cases that cover each
value of each parameter, then their other combinations.

GRPO_KERNELS_TEST_FIRST=1       leaves the other combinations out, as tests/repository/versions.py
                                --quick does
GRPO_KERNELS_TEST_REPORT=FILE   appends the number of tests and each outcome to this file at once,
                                as lines of JSON

benchmarks/gpu_kit.py uses all of these.
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

#: Functions that draw random tensors, and all functions that make tensors.
RANDOM = {torch.rand, torch.randn, torch.randint, torch.randperm}
MADE = RANDOM | {
    torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace,
    torch.ones, torch.tensor, torch.zeros,
}  # fmt: skip
#: Ids of the tests of the first wave, see `in_waves`.
FIRST: set[str] = set()
#: Errors after which a CUDA context cannot be used any more.
FATAL = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
)


class OnDevice(TorchFunctionMode):
    """A context in which tensors are made on a device, like `with torch.device(...)`.

    Unlike with torch.device, random tensors are drawn on the CPU and moved, pinned memory stays on
    the host, `TokenSets.from_lists` puts its sets on the device, and calls by the package itself
    are not changed.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __enter__(self) -> Any:
        """Enter the context, and replace `TokenSets.from_lists` until it ends.

        The package would make the sets on the CPU, because its own calls are not changed.
        """
        # __func__ is the function under the classmethod, which takes the class as its first
        # argument. The bound method would ignore the subclass that the replacement is called on.
        from_lists = TokenSets.from_lists.__func__  # type: ignore[attr-defined]

        def from_lists_on_device(
            cls: type, *args: Any, device: Any = None, **kwargs: Any
        ) -> TokenSets:
            """Replace TokenSets.from_lists: without a device, use the device of this context."""
            # With the mask `generated`, from_lists uses the device of the mask.
            if device is None and kwargs.get("generated") is None:
                device = self.device
            return from_lists(cls, *args, device=device, **kwargs)

        self.patch = mock.patch.object(TokenSets, "from_lists", classmethod(from_lists_on_device))
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        """Leave the context, and restore `TokenSets.from_lists`."""
        super().__exit__(*raised)
        self.patch.stop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch. If it makes a tensor, make the tensor on the device.

        func     the function, such as torch.randn
        types    ignored: PyTorch passes the types of tensor arguments
        kwargs   its keywords. A call that names memory (device=, pin_memory=, out=) is not changed.
        """
        kwargs = kwargs or {}
        names_memory = any(kwargs.get(name) is not None for name in ("device", "pin_memory", "out"))
        if func not in MADE or names_memory or in_package():
            return func(*args, **kwargs)
        if func not in RANDOM:
            return func(*args, **kwargs, device=self.device)
        # The gradient must arrive at the moved tensor, so that it is the leaf.
        needs_grad = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).to(self.device).requires_grad_(needs_grad)


def in_package() -> bool:
    """Return whether the package under test called the function that `__torch_function__` handles.

    Only `__torch_function__` may call this, because it inspects the stack.
    """
    # 0 is this function, 1 is __torch_function__, 2 is the caller of the function of torch.
    frame = sys._getframe(2)
    # conftest.py wraps functions to fill new memory with NaN.
    while frame is not None and frame.f_globals.get("__name__") == "conftest":
        frame = frame.f_back
    if frame is None:
        return False
    return str(frame.f_globals.get("__name__")).split(".")[0] == "grpo_kernels"


MODE = OnDevice(os.environ.get("GRPO_KERNELS_TEST_DEVICE", "cpu"))


def pytest_configure(config: pytest.Config) -> None:
    """Enter the context before test modules are imported: some make tensors for parameters."""
    if MODE.device != "cpu":
        MODE.__enter__()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the context."""
    if MODE.device != "cpu":
        MODE.__exit__(None, None, None)


@pytest.hookimpl(trylast=True)  # after other plugins have deselected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests, and keep only the first wave if GRPO_KERNELS_TEST_FIRST is 1."""
    items[:] = in_waves(items)
    if os.environ.get("GRPO_KERNELS_TEST_FIRST") == "1":
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in FIRST])
        items[:] = [item for item in items if item.nodeid in FIRST]


def in_waves(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in two waves, and add the ids of the first wave to FIRST.

    The first wave has cases of each test that cover every value of each parameter. It goes file by
    file, and alternates between the tests of a file. The second wave has the remaining cases in
    their order.
    """
    first = first_wave(items)
    FIRST.update(item.nodeid for item in first)
    taken = set(first)
    return [*first, *(item for item in items if item not in taken)]


def first_wave(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the first wave, sorted by file and by the number of their case.

    Cases on the diagonal of the grid of parameters are taken first, because they cover many values
    with few cases. Then every case is taken that has a value which no case has so far. A test
    without parameters is always taken.
    """
    diagonal = diagonal_cases(items)
    files = list(dict.fromkeys(item.path for item in items))
    cases_of_test: Counter[str] = Counter()
    covered: set[tuple[str, str, int]] = set()
    # {test: (index of its file, which of the cases of its test it is)}, the sort key.
    order: dict[pytest.Item, tuple[int, int]] = {}
    # A case on the diagonal that is not taken covers nothing new, so it is not taken later either.
    for item in [*diagonal, *items]:
        if item in order:
            continue
        test = test_of(item)
        values = {(test, name, id(value)) for name, value in parameters(item).items()}
        if values and values <= covered:
            continue
        covered |= values
        cases_of_test[test] += 1
        order[item] = (files.index(item.path), cases_of_test[test])
    return sorted(order, key=order.__getitem__)


def diagonal_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases in which all parameters have the same index among their values.

    A parameter with fewer values than the longest one starts again at its first value.
    """
    # {(test, parameter): ids of its values, in the order of the cases}
    values: dict[tuple[str, str], list[int]] = {}
    for item in items:
        for name, value in parameters(item).items():
            ids_of_values = values.setdefault((test_of(item), name), [])
            if id(value) not in ids_of_values:
                ids_of_values.append(id(value))

    def is_diagonal(item: pytest.Item) -> bool:
        """Return whether the values of a case have the same index, modulo their numbers."""
        sizes = []  # the number of values of each parameter
        indices = []  # of the values of this case
        for name, value in parameters(item).items():
            ids_of_values = values[test_of(item), name]
            sizes.append(len(ids_of_values))
            indices.append(ids_of_values.index(id(value)))
        if not sizes:
            return True
        # The index of the parameter with the most values. Others start again at their first value.
        step = indices[sizes.index(max(sizes))]
        return all(index == step % size for index, size in zip(indices, sizes, strict=True))

    return [item for item in items if is_diagonal(item)]


def test_of(item: pytest.Item) -> str:
    """Return the id of a test without the values of its parameters."""
    return item.nodeid.split("[")[0]


def parameters(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a case by name, {} for a test without parameters."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def write(**line: Any) -> None:
    """Append a line of JSON to the report, if GRPO_KERNELS_TEST_REPORT names a file.

    line   the keys and values of the line
    """
    report = os.environ.get("GRPO_KERNELS_TEST_REPORT")
    if report:
        with Path(report).open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Report the number of tests of each file, and of those of the first wave."""
    is_first_worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    # The process that starts workers has no items.
    if is_first_worker and session.items:
        names = [item.nodeid for item in session.items]
        first_names = FIRST.intersection(names)
        write(
            collected=Counter(name.split("::")[0] for name in names),
            first=Counter(name.split("::")[0] for name in first_names),
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report the outcome of a test, or of a setup or teardown that did not pass."""
    is_finished = report.when == "call" or report.outcome != "passed"
    # The process that started the workers gets the reports of all workers.
    if not is_finished or "PYTEST_XDIST_WORKER" in os.environ:
        return
    message = ""
    if not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = str(report.longrepr if crash is None else crash.message).strip()[:500]
    write(
        test=report.nodeid,
        outcome=report.outcome,
        seconds=round(report.duration, 3),
        message=message,
        properties=dict(report.user_properties),
    )


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Free the GPU memory of a test before the next one.

    Several processes share a GPU, and a float64 oracle takes gigabytes.
    """
    if MODE.device != "cpu":
        gc.collect()
        torch.get_device_module(MODE.device).empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(call: pytest.CallInfo[Any]) -> None:
    """End a worker of pytest-xdist whose CUDA context is broken. pytest-xdist starts another.

    In the broken context, all later tests of the worker would fail.
    """
    text = "" if call.excinfo is None else str(call.excinfo.value)
    if "PYTEST_XDIST_WORKER" in os.environ and any(words in text for words in FATAL):
        os._exit(70)
