"""The C++ module under hostile calls and under sanitizers:

nothing outside the arguments' memory is read or written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_kernels.core.backends import cpu
from support import amx
from support.pairs import MANY
from support.processes import checked_output, for_its_own_pytest

if cpu.unavailable_reason() is not None:
    pytest.skip(cpu.unavailable_reason() or "", allow_module_level=True)

from grpo_kernels import _cpu

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

#: Python code with another build of the module in place of the installed one, which it asks for a
#: number of threads; torch itself keeps to one.
WITH_MODULE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("grpo_kernels._cpu", sys.argv[1])
sys.modules["grpo_kernels._cpu"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from grpo_kernels.core.backends import cpu
assert cpu._cpu is module
"""
TESTS = f"""{WITH_MODULE}
import pytest, torch
threads = int(sys.argv[2])
torch.get_num_threads = lambda: threads
sys.exit(pytest.main(sys.argv[3:]))
"""
FUZZ = f"{WITH_MODULE}\nimport fuzz_kernels\nfuzz_kernels.main(*sys.argv[2:])"

#: Stands in for the OpenMP runtime that torch loads, whose own waiting the thread sanitizer does
#: not see: each team is one of new threads, which it does see.
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

#: Without torch, whose threads these would be: many are wanted, where the memory may have room for
#: the stacks of a few.
THREADS = """
import ctypes, importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("_cpu", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
rows, vocab, room = 400, 16384, int(sys.argv[2])
logits, targets = ((ctypes.c_uint16 * vocab) * rows)(), (ctypes.c_int64 * rows)()
for i in range(rows):
    logits[i][:] = [0x3C00 + (7 * i + j) % 1024 for j in range(vocab)]
outs = [((ctypes.c_float * rows) * 4)() for _ in range(2)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
policy = module.LogitRows(ctypes.addressof(logits), 2, (1, rows, vocab), (0, vocab, 1), 0, rows, 1.0, 0.0, 1.0, 0)
for out, threads in zip(outs, (1, 200)):
    if threads > 1 and room:
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    module.softmax_sums(policy, None, ctypes.addressof(targets), 0, module.NamedRows(ctypes.addressof(out), (4, rows), (rows, 1), 0b1111), threads)
assert bytes(outs[0]) == bytes(outs[1]) and all(x > 1 for x in outs[0][1])
"""


def run(code, module, *arguments, **environment):
    """What code prints that runs with a build of the module."""
    command = [sys.executable, "-c", code, module, *arguments]
    paths = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    return checked_output(
        command, env=for_its_own_pytest() | {"PYTHONPATH": paths} | environment, cwd=ROOT
    )


def fuzz(module, seed, calls, **environment):
    library = (
        amx.emulator() if "LD_PRELOAD" not in environment else None
    )  # a sanitizer sees no access of tiles
    printed = run(FUZZ, module, str(seed), "0", str(calls), str(library or ""), **environment)
    assert printed.endswith(f"{calls} calls were right\n")


def test_hostile_calls():
    """Guard pages around every tensor, wild values and sizes, results compared with float64; see
    fuzz_kernels.py.
    """
    fuzz(_cpu.__file__, 1, 70)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [2, 3])
def test_many_hostile_calls(seed):
    fuzz(_cpu.__file__, seed, MANY)


def test_threads_that_cannot_be_had_are_done_without():
    run(THREADS, _cpu.__file__, str(100 << 20))


# ---- sanitizers


def runtime(name):
    """The sanitizer's library, and that of C++, whose exceptions it wants to see:

    to be loaded before Python.
    """
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("cmake") is None:
        pytest.skip("the sanitized module wants g++ and cmake")
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={lib}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for lib in (name, "libstdc++.so.6")
    ]
    if not os.path.isabs(found[0]):
        pytest.skip(f"{compiler} has no {name}")
    return ":".join(found)


def build(folder, sanitizers):
    """The module compiled from this checkout."""
    options = [
        f"-DGRPO_SANITIZE={sanitizers}",
        "-DCMAKE_CXX_COMPILER=g++",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count())],
    ):
        checked_output(command)
    return str(next(folder.glob("_cpu*.so")))


def run_tests(module, threads, *arguments, **environment):
    """pytest with another build of the module; no test is skipped.

    What a sanitizer says goes past pytest.
    """
    options = ("-q", "-x", "--capture=sys", "-p", "no:cacheprovider")
    printed = run(
        TESTS,
        module,
        str(threads),
        *(str(HERE / x) if x.endswith(".py") else x for x in arguments),
        *options,
        **environment,
    )
    assert " passed" in printed and "skipped" not in printed, printed


@pytest.mark.slow
def test_addresses_and_undefined_behaviour(tmp_path):
    """The tests of the kernels and hostile calls, compiled with the address and undefined-behaviour
    sanitizers.
    """
    environment = {
        "LD_PRELOAD": runtime("libasan.so"),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    module = build(tmp_path, "address,undefined")
    fuzz(module, 4, 300, **environment)
    tests = (
        "test_row_kernels.py",
        "test_two_row_kernels.py",
        "test_cpu_products.py",
        "test_raw_pointers.py",
        "test_slot_products.py",
        "test_evaluate.py",
    )
    # No backend twice, and not what counts the pages that are given back: the sanitizer keeps them
    # for a while.
    run_tests(module, 1, *tests, "-k", "not (eager or triton or without_memory)", **environment)


@pytest.mark.slow
def test_races(tmp_path):
    """The threads of parallel.h, its own where no OpenMP is loaded and those of a team, with the
    thread sanitizer.
    """
    environment = {
        "LD_PRELOAD": runtime("libtsan.so"),
        # The emulator of tiles takes memory in its handler of signals, which come at its own
        # instructions alone: that is safe.
        "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    module = build(tmp_path / "module", "thread")
    run(THREADS, module, "0", **environment)
    team = tmp_path / "team.so"
    flags = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-fsanitize=thread",
        "-x",
        "c++",
        "-",
        "-o",
        str(team),
    ]
    subprocess.run(["g++", *flags], input=TEAM, text=True, check=True)
    environment |= {"LD_PRELOAD": f"{environment['LD_PRELOAD']}:{team}", "OMP_NUM_THREADS": "1"}
    fuzz(module, 5, 100, **environment)
    tests = (
        "test_row_kernels.py",
        "test_two_row_kernels.py",
        "test_cpu_products.py",
        "test_slot_products.py",
        "test_evaluate.py",
    )
    # Without those that limit the memory of a process, which the sanitizer's own has no room in.
    run_tests(module, 4, *tests, "-k", "cpu and not (triton or memory)", **environment)
