"""AMX for tests: the processor's, or on others the emulator of amx_emulator.cpp, which executes
what the compiler made of csrc/matmuls_amx.cpp. As a plugin it makes tiles the engine of every
product of a test run:

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

INTEL = (
    "GenuineIntel",
    1 << 22 | 1 << 24,
    1 << 17 | 1 << 18,
)  # a processor with AMX, and a system that saves its tiles


@functools.cache
def emulator() -> Path | None:
    """The compiled emulator, for a process to load and to install; None without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    library = Path(tempfile.mkdtemp()) / "amx_emulator.so"
    source = Path(__file__).with_name("amx_emulator.cpp")
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-o"]
    environment = {
        k: v for k, v in os.environ.items() if k != "LD_PRELOAD"
    }  # a sanitizer's, for this process only
    subprocess.run(
        [compiler, *flags, library, source], check=True, capture_output=True, env=environment
    )
    return library


@functools.cache
def install(library: Path) -> Any:
    """Loads the emulator: from now on tile instructions run in this process."""
    loaded = ctypes.CDLL(str(library))
    assert loaded.amx_install() == 0
    loaded.amx_executed.restype = loaded.amx_configured.restype = ctypes.c_long
    return loaded


@contextmanager
def processor(
    found: tuple[str, int, int], refusal: int = 0, difference: str | None = "as compared"
) -> Iterator[None]:
    """Run as on another processor and system.

    found        what CPUID and XCR0 say, as in INTEL
    refusal      errno of the request to use AMX, 0 if it is granted
    difference   what comparing the AMX products gives, None if they are equal; "as compared": they
                 are compared
    """
    from grpo_kernels.core.backends import cpu_matmuls

    compare = (
        cpu_matmuls.first_difference
        if difference == "as compared"
        else lambda engine, reference: difference
    )
    with ExitStack() as patches:
        for owner, name, value in (
            (cpu_matmuls._cpu, "has_matmuls", lambda: True),
            (cpu_matmuls._cpu, "processor", lambda: found),
            (cpu_matmuls._cpu, "request_amx_permission", lambda: refusal),
            (cpu_matmuls, "first_difference", compare),
            (cpu_matmuls, "_chosen", None),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        cpu_matmuls._examine_amx.cache_clear()
        try:
            yield
        finally:
            cpu_matmuls._examine_amx.cache_clear()


@contextmanager
def tiles(difference: str | None = None) -> Iterator[Any]:
    """Where products may take the engine "amx"; gives the emulator, None on a processor with AMX.
    Skips where there is neither. The emulated products are compared only if `difference` asks for
    it, see `processor`: that takes a second.
    """
    from grpo_kernels.core.backends import cpu_matmuls

    if cpu_matmuls.engines()["amx"] is None:
        yield None
        return
    library = emulator()
    if library is None or "amx" not in cpu_matmuls._cpu.matmul_engines():
        pytest.skip("no AMX here, and no compiler with AMX for its emulation")
    loaded = install(library)
    with processor(INTEL, difference=difference):
        yield loaded


def pytest_sessionstart(session: pytest.Session) -> None:
    """Later than pytest's own handler of SIGILL."""
    stack = ExitStack()
    stack.enter_context(tiles())
    session.config.add_cleanup(stack.close)
