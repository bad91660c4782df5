"""Triton's launches, with CPU tensors, run what Triton compiles for a GPU: `with
executing("sm_90"): kernel[grid](...)`.

As a plugin of pytest, every test of a run does so; support.processes.executed starts such a run:

    GRPO_KERNELS_TEST_TARGET=sm_90 GRPO_KERNELS_TEST_ORDER=0 python -m pytest -p
    support.ptx.launches FILE ...

GRPO_KERNELS_TEST_FIRST=1: only the first case of each test; GRPO_KERNELS_TEST_REPORT=FILE: what was
run is written there, as JSON. Triton compiles to PTX only, with a cache of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from benchmarks.launches import _Driver
from grpo_kernels.core.backends import triton as backend
from support.bits import LARGEST
from support.ptx.program import Counts, Program

#: Compilation ends with PTX here, so what is kept must not be taken for a whole kernel.
CACHE = Path(tempfile.gettempdir()) / f"grpo_kernels_ptx_{os.getuid()}_{triton.__version__}"


class Executed(NamedTuple):
    kernel: str
    program: Program
    counts: Counts


class _Executor(_Driver):
    def get_current_device(self) -> str:
        return f"executed {self.target}"


@contextlib.contextmanager
def executing(target: str, order: int = 0) -> Iterator[list[Executed]]:
    """Inside, a launch is compiled for `target` and run, with warps in that `order`; each is
    appended to the list.
    """
    launches: list[Executed] = []
    run = JITFunction.run

    def execute(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if warmup:
            return kernel
        program = _program(kernel)
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        types = {name: kind for name, kind in kernel.src.signature.items() if name in given}
        values = [pair for name, kind in types.items() for pair in _flat(kind, given[name])]
        tensors = [x for _, x in values if isinstance(x, Tensor)]
        programs = (grid(given) if callable(grid) else grid)[0]
        words = [_word(kind, x) for kind, x in values]
        counts = program.run(words, tensors, programs, kernel.metadata.shared, order)
        launches.append(Executed(self.__name__, program, counts))
        return kernel

    with (
        triton.knobs.cache.scope(),
        mock.patch.object(triton.runtime.driver, "_active", _Executor(target)),
        mock.patch.object(CUDABackend, "make_cubin", lambda *_: b""),
        mock.patch.object(JITFunction, "run", execute),
        mock.patch.object(backend, "serves", lambda device: True),
        mock.patch.object(backend, "unavailable_reason", lambda: None),
    ):
        triton.knobs.cache.dir = str(CACHE)
        yield launches


def _program(kernel: Any) -> Program:
    """Read once for each compiled kernel."""
    if not hasattr(kernel, "executed"):
        kernel.executed = Program(kernel.asm["ptx"])
    return kernel.executed


def _flat(kind: Any, value: Any) -> list[tuple[str, Any]]:
    """Runtime arguments with their types, those of tuples one by one."""
    if isinstance(kind, (tuple, list)):
        return [pair for k, v in zip(kind, value, strict=True) for pair in _flat(k, v)]
    return [] if kind == "constexpr" else [(kind, value)]


def _word(kind: str, value: Any) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    assert kind[0] in "iu", kind
    return int(value)


# ---- the plugin

REPORT: dict[str, Any] = {
    "outcomes": Counter(),
    "launches": Counter(),
    "done": Counter(),
    "largest": LARGEST,
}
KERNELS: set[Program] = set()


@pytest.fixture(autouse=True)
def executed() -> Iterator[None]:
    target, order = (
        os.environ.get("GRPO_KERNELS_TEST_TARGET", "sm_90"),
        int(os.environ.get("GRPO_KERNELS_TEST_ORDER", "0")),
    )
    with executing(target, order) as launches:
        yield
    for launch in launches:
        KERNELS.add(launch.program)
        REPORT["launches"][launch.kernel] += 1
        REPORT["done"].update(asdict(launch.counts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("GRPO_KERNELS_TEST_FIRST") == "1":
        usual = [item for item in items if item.get_closest_marker("slow") is None]
        items[:] = {item.nodeid.split("[")[0]: item for item in reversed(usual)}.values()
        items.reverse()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        REPORT["outcomes"][report.outcome] += 1


def pytest_sessionfinish() -> None:
    if path := os.environ.get("GRPO_KERNELS_TEST_REPORT"):
        Path(path).write_text(
            json.dumps(REPORT | {"triton": triton.__version__, "kernels": len(KERNELS)})
        )
