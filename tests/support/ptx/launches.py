"""Run Triton kernels as compiled for a GPU, on CPU tensors.

    with executing("sm_90") as launches:
        kernel[grid](...)

Triton compiles each kernel to PTX, and support.ptx.program runs the PTX.

As a pytest plugin, this module does so in every test. `support.ptx.runs.run_cases` starts such
a run:

    GRPO_KERNELS_TEST_TARGET=sm_90 GRPO_KERNELS_TEST_ORDER=0 python -m pytest -p
    support.ptx.launches FILE ...

GRPO_KERNELS_TEST_FIRST=1     runs only the first case of each test
GRPO_KERNELS_TEST_REPORT=FILE writes what was run to this JSON file
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
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

#: A cache of its own, because compilation ends with PTX and these kernels have no machine code.
CACHE = Path(tempfile.gettempdir()) / f"grpo_kernels_ptx_{os.getuid()}_{triton.__version__}"


class Executed(NamedTuple):
    """A launch: the name of the kernel, its program, and what the launch did."""

    kernel: str
    program: Program
    counts: Counts


class _Executor(_Driver):
    """A Triton driver that compiles for a GPU architecture without a GPU."""

    def get_current_device(self) -> str:
        """Return a name for each target, because Triton caches compiled kernels by device."""
        return f"executed {self.target}"


@contextlib.contextmanager
def executing(target: str, order: int = 0) -> Iterator[list[Executed]]:
    """Compile launches for `target` and run them on the CPU.

    order   of warps and programs, see Program.run
    Yields a list to which each launch is appended.
    """
    launches: list[Executed] = []
    compile_or_launch = JITFunction.run

    def compile_and_execute(
        function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> Any:
        """Replace JITFunction.run, which compiles a kernel and launches it unless warmup is True.

        Runs the PTX of the kernel on the CPU instead, in the order and for the target of the
        enclosing call, and appends the launch to its list. Returns the compiled kernel.

        function   the JITFunction
        args       of the Triton function, as far as they are passed by position
        grid       number of programs along each axis, or a function that returns it
        kwargs     further arguments of the Triton function, and options of the launch
        """
        # Triton launches a kernel on the GPU unless warmup is True, and there is no GPU.
        kernel = compile_or_launch(function, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            # Arguments may be passed by position or by keyword, so args may be the shorter list.
            arguments = dict(zip(function.arg_names, args, strict=False)) | kwargs
            program = _program_of(kernel)
            counts = _execute(kernel, program, arguments, grid, order)
            launches.append(Executed(function.__name__, program, counts))
        return kernel

    with (
        triton.knobs.cache.scope(),
        mock.patch.object(triton.runtime.driver, "_active", _Executor(target)),
        # Compilation ends with PTX: no ptxas, no machine code.
        mock.patch.object(CUDABackend, "make_cubin", lambda *_: b""),
        mock.patch.object(JITFunction, "run", compile_and_execute),
        # The package would refuse CPU tensors, and Triton without a GPU.
        mock.patch.object(backend, "serves", lambda device: True),
        mock.patch.object(backend, "unavailable_reason", lambda: None),
    ):
        triton.knobs.cache.dir = str(CACHE)
        yield launches


def _execute(
    kernel: Any,
    program: Program,
    arguments: dict[str, Any],
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]],
    order: int,
) -> Counts:
    """Run the program of a compiled kernel on the CPU, and return what it did.

    kernel      what Triton has compiled: its signature and metadata are read
    program     its PTX, parsed
    arguments   of the Triton function, by name
    grid        number of programs along each axis, or a function of the arguments that returns it
    order       of warps and programs, see Program.run
    """
    typed_values: list[tuple[str, Any]] = []
    for name, triton_type in kernel.src.signature.items():
        if name in arguments:  # parameters with a default may be left out
            typed_values += _flatten(triton_type, arguments[name])
    grid_sizes = grid(arguments) if callable(grid) else grid
    return program.run(
        arguments=[_to_word(triton_type, value) for triton_type, value in typed_values],
        tensors=[value for _, value in typed_values if isinstance(value, Tensor)],
        programs=grid_sizes[0],  # the package's kernels use one axis
        shared=kernel.metadata.shared,
        order=order,
    )


def _program_of(kernel: Any) -> Program:
    """Return the program of a compiled kernel. It is parsed once per kernel."""
    if not hasattr(kernel, "executed"):
        kernel.executed = Program(kernel.asm["ptx"])
    return kernel.executed


def _flatten(triton_type: Any, value: Any) -> list[tuple[str, Any]]:
    """Return (type, value) of each number, tensor or pointer in an argument of a kernel.

    Compile-time constants are left out.

    triton_type   such as "i32", "*bf16" (a pointer) or "constexpr"; for a tuple, a type per element
    value         the argument; for a tuple of types, a tuple of the same structure
    """
    if isinstance(triton_type, (tuple, list)):
        pairs = []
        for element_type, element in zip(triton_type, value, strict=True):
            pairs += _flatten(element_type, element)
        return pairs
    return [] if triton_type == "constexpr" else [(triton_type, value)]


def _to_word(triton_type: str, value: Any) -> int:
    """Return an argument as an integer: an address, the bits of an fp32 number, or itself.

    triton_type   a pointer, "fp32", or an integer type such as "i32" or "u1"
    value         a tensor for a pointer, otherwise a number
    """
    if isinstance(value, Tensor):
        return value.data_ptr()
    if triton_type == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    assert triton_type[0] in "iu", triton_type
    return int(value)


# ---- the plugin

#: Outcomes of tests; launches by kernel; the sums of Counts; the largest noted errors.
REPORT: dict[str, Any] = {
    "outcomes": Counter(),
    "launches": Counter(),
    "done": Counter(),
    "largest": LARGEST,
}
KERNELS: set[Program] = set()


@pytest.fixture(autouse=True)
def executed() -> Iterator[None]:
    """Run the launches of a test as compiled, and add them to the report."""
    target = os.environ.get("GRPO_KERNELS_TEST_TARGET", "sm_90")
    order = int(os.environ.get("GRPO_KERNELS_TEST_ORDER", "0"))
    with executing(target, order) as launches:
        yield
    for launch in launches:
        KERNELS.add(launch.program)
        REPORT["launches"][launch.kernel] += 1
        REPORT["done"].update(asdict(launch.counts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep only the first case of each test, if GRPO_KERNELS_TEST_FIRST is 1."""
    if os.environ.get("GRPO_KERNELS_TEST_FIRST") != "1":
        return
    first_cases: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            first_cases.setdefault(item.nodeid.split("[")[0], item)
    items[:] = first_cases.values()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the outcome of a test, or of a setup or teardown that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        REPORT["outcomes"][report.outcome] += 1


def pytest_sessionfinish() -> None:
    """Write the report, if GRPO_KERNELS_TEST_REPORT names a file."""
    path = os.environ.get("GRPO_KERNELS_TEST_REPORT")
    if path:
        report = REPORT | {"triton": triton.__version__, "kernels": len(KERNELS)}
        Path(path).write_text(json.dumps(report))
