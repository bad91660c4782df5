"""Run tests of AMX instructions on any processor.

On a processor without AMX, amx_emulator.cpp executes the AMX instructions in the machine code of
csrc/matmuls_amx.cpp. As a pytest plugin, this module lets all matmuls of a test run use AMX:

    GRPO_KERNELS_PRODUCTS=amx python -m pytest -p support.amx tests/core/test_combinations.py
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

#: (vendor, features in CPUID, state components in XCR0) of a processor with AMX, on a system that
#: saves the tiles at a context switch. The features are amx_bf16 and amx_tile.
INTEL = ("GenuineIntel", 1 << 22 | 1 << 24, 1 << 17 | 1 << 18)


@functools.cache
def emulator() -> Path | None:
    """Compile the emulator, and return the path of the library, or None without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    library = Path(tempfile.mkdtemp()) / "amx_emulator.so"
    source = Path(__file__).with_name("amx_emulator.cpp")
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-o"]
    # LD_PRELOAD may name the library of a sanitizer, which only this process needs.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [compiler, *flags, library, source]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return library


@functools.cache
def install(library: Path) -> Any:
    """Load the emulator, after which AMX instructions can be executed in this process.

    library   see `emulator`

    Returns the library, whose functions amx_executed and amx_configured count instructions.
    """
    emulator_library = ctypes.CDLL(str(library))
    assert emulator_library.amx_install() == 0
    # Functions of a ctypes library return int unless told otherwise.
    emulator_library.amx_executed.restype = ctypes.c_long
    emulator_library.amx_configured.restype = ctypes.c_long
    return emulator_library


@contextmanager
def processor(
    found: tuple[str, int, int], refusal: int = 0, difference: str | None = "as compared"
) -> Iterator[None]:
    """Let the package believe that it runs on another processor, within the block.

    The package asks its C++ module about the processor, and examines AMX once per process. Here the
    answers of the module are replaced, and the examination is repeated.

    found        what CPUID and XCR0 say: (vendor, features, state components), as in INTEL
    refusal      errno of the request to the operating system to use AMX, 0 if granted
    difference   result of the comparison of AMX matmuls with others: None if they are equal, a text
                 about the difference if not. "as compared": they are really compared
    """
    from grpo_kernels.core.backends import cpu_matmuls

    def given_difference(engine: Any, reference: Any) -> str | None:
        """Return `difference` without a comparison."""
        return difference

    first_difference = given_difference
    if difference == "as compared":
        first_difference = cpu_matmuls.first_difference
    _cpu = cpu_matmuls._cpu
    with (
        mock.patch.object(_cpu, "has_matmuls", lambda: True),
        mock.patch.object(_cpu, "processor", lambda: found),
        mock.patch.object(_cpu, "request_amx_permission", lambda: refusal),
        mock.patch.object(cpu_matmuls, "first_difference", first_difference),
        mock.patch.object(cpu_matmuls, "_chosen", None),
    ):
        cpu_matmuls._examine_amx.cache_clear()
        try:
            yield
        finally:
            cpu_matmuls._examine_amx.cache_clear()


@contextmanager
def tiles(difference: str | None = None) -> Iterator[Any]:
    """Make the matmul engine "amx" available within the block, or skip the test if this fails.

    Yields the library of the emulator, see `install`, or None on a processor with AMX.

    difference   see `processor`. By default the emulated matmuls are not compared with others,
                 which takes a second.
    """
    from grpo_kernels.core.backends import cpu_matmuls

    if cpu_matmuls.engines()["amx"] is None:
        yield None
        return
    library = emulator()
    if library is None or "amx" not in cpu_matmuls._cpu.matmul_engines():
        pytest.skip("no AMX here, and no compiler with AMX for its emulation")
    emulator_library = install(library)
    with processor(INTEL, difference=difference):
        yield emulator_library


def pytest_sessionstart(session: pytest.Session) -> None:
    """Make AMX available until the end of the session.

    The emulator handles SIGILL, for which pytest has installed its own handler by now. So its
    handler replaces that of pytest, and not the other way round.
    """
    stack = ExitStack()
    stack.enter_context(tiles())
    session.config.add_cleanup(stack.close)
