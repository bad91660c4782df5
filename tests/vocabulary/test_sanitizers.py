"""The C++ module under hostile calls and under sanitizers: nothing outside the arguments' memory is read or written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_kernels.rows.backends import cpu
from support import amx
from support.processes import finish, start

if cpu.available() is not None:
    pytest.skip(cpu.available() or "", allow_module_level=True)

from grpo_kernels import _cpu

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
MANY = os.environ.get("GRPO_KERNELS_FUZZ", "3000")

#: Runs Python code with another build of the module in place of the installed one.
WITH_MODULE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("grpo_kernels._cpu", sys.argv[1])
sys.modules["grpo_kernels._cpu"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from grpo_kernels.rows.backends import cpu
assert cpu._cpu is module
import pytest, torch
if len(sys.argv) > 2 and sys.argv[2].startswith("threads="):
    threads = int(sys.argv.pop(2).removeprefix("threads="))
    torch.get_num_threads = lambda: threads  # which the module is asked to take; torch itself keeps to one
sys.exit(pytest.main(sys.argv[2:]))
"""

#: Stands in for the OpenMP runtime that torch loads, whose own waiting the thread sanitizer does not see: each team is one of
#: new threads, which it does see.
TEAM = """
#include <thread>
#include <vector>
static thread_local int number = 0, size = 1;
extern "C" int omp_get_thread_num() { return number; }
extern "C" int omp_get_num_threads() { return size; }
extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
    const int team = threads ? int(threads) : 1;
    auto run = [=](int k) { number = k; size = team; body(data); number = 0; size = 1; };
    std::vector<std::thread> others;
    for (int k = 1; k < team; k++) others.emplace_back(run, k);
    run(0);
    for (auto& other : others) other.join();
}
"""

#: Two hundred threads are wanted where the memory has room for the stacks of a few.
WITHOUT_THREADS = """
import resource, sys
import numpy as np
from fuzz_kernels import FP16, PAGE, load
module = load(sys.argv[1])
rows, vocab = 400, 16384
logits = np.random.default_rng(0).standard_normal((rows, vocab)).astype(np.float16)
targets, outs = np.zeros(rows, np.int64), [np.full((4, rows), np.nan, np.float32) for _ in range(2)]
used = int(open("/proc/self/statm").read().split()[0]) * PAGE
own = module.LogitRows(logits.ctypes.data, FP16, (1, rows, vocab), (0, vocab, 1), 0, rows, 1.0, 0.0, 1.0, 0)
for out, threads in zip(outs, (1, 200)):
    if threads > 1:
        resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), used + (100 << 20)))
    to = module.Named(out.ctypes.data, out.shape, (rows, 1), 0b1111)
    module.stats(own, None, targets.ctypes.data, 0, to, threads)
assert np.isfinite(outs[0]).all() and np.array_equal(*outs)
"""


def fuzz(module: str, seed: int, calls: int | str, **environment: str) -> None:
    library = amx.emulator() if "LD_PRELOAD" not in environment else None  # a sanitizer sees no access of tiles
    command = [sys.executable, str(HERE / "fuzz_kernels.py"), module, str(seed), "0", str(calls), str(library or "")]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert run.returncode == 0, f"{' '.join(command)}: {run.returncode}\n{run.stdout[-1500:]}\n{run.stderr[-6000:]}"
    assert run.stdout.endswith(f"{calls} calls were right\n")


def test_hostile_calls() -> None:
    """Guard pages around every buffer, wild values and sizes, float64 and the other bytes compared; see fuzz_kernels.py."""
    fuzz(_cpu.__file__, 1, 400)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [2, 3])
def test_many_hostile_calls(seed: int) -> None:
    fuzz(_cpu.__file__, seed, MANY)


def test_threads_that_cannot_be_had_are_done_without() -> None:
    finish(start(WITHOUT_THREADS, _cpu.__file__))


# ---- sanitizers


def runtime(name: str) -> str:
    """The sanitizer's library, and that of C++, whose exceptions it wants to see: to be loaded before Python."""
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("cmake") is None:
        pytest.skip("the sanitized module wants g++ and cmake")
    found = [
        subprocess.run([compiler, f"-print-file-name={lib}"], capture_output=True, text=True, check=True).stdout.strip()
        for lib in (name, "libstdc++.so.6")
    ]
    if not os.path.isabs(found[0]):
        pytest.skip(f"{compiler} has no {name}")
    return ":".join(found)


def build(folder: Path, sanitizers: str) -> str:
    """The module compiled from this checkout."""
    options = [f"-DGRPO_SANITIZE={sanitizers}", "-DCMAKE_CXX_COMPILER=g++", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count())],
    ):
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return str(next(folder.glob("_cpu*.so")))


def run_tests(module: str, *arguments: str, **environment: str) -> None:
    """pytest with another build of the module; no test is skipped. What a sanitizer says goes past pytest."""
    command = [sys.executable, "-c", WITH_MODULE, module, *arguments, "-q", "-x", "--capture=sys", "-p", "no:cacheprovider"]
    own = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
    }
    run = subprocess.run(command, env=own | environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-6000:]}"
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout


@pytest.mark.slow
def test_addresses_and_undefined_behaviour(tmp_path: Path) -> None:
    """The tests of the kernels and hostile calls, compiled with the address and undefined-behaviour sanitizers."""
    environment = {
        "LD_PRELOAD": runtime("libasan.so"),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    module = build(tmp_path, "address,undefined")
    fuzz(module, 4, 1000, **environment)
    tests = [str(HERE / name) for name in ("test_row_kernels.py", "test_two_row_kernels.py", "test_cpu_products.py")]
    # Of the sparse products those of this module in this process, and no backend twice.
    tests += [str(HERE / "test_sparse.py"), "-k", "not (eager or triton)"]
    run_tests(module, *tests, **environment)


@pytest.mark.slow
def test_races(tmp_path: Path) -> None:
    """The threads of parallel.h, its own where no OpenMP is loaded and those of a team, with the thread sanitizer."""
    environment = {"LD_PRELOAD": runtime("libtsan.so"), "TSAN_OPTIONS": "halt_on_error=1", "OPENBLAS_NUM_THREADS": "1"}
    module = build(tmp_path / "module", "thread")
    fuzz(module, 5, 300, **environment)
    team = tmp_path / "team.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fsanitize=thread", "-x", "c++", "-", "-o", str(team)]
    subprocess.run(["g++", *flags], input=TEAM, text=True, check=True)
    environment |= {"LD_PRELOAD": f"{environment['LD_PRELOAD']}:{team}", "OMP_NUM_THREADS": "1"}
    names = ("test_row_kernels.py", "test_two_row_kernels.py", "test_cpu_products.py", "test_selection.py")
    # Without those that limit the memory of a process, which the sanitizer's own has no room in.
    tests = [*(str(HERE / name) for name in names), "-k", "cpu and not (triton or memory)"]
    run_tests(module, "threads=4", *tests, **environment)
