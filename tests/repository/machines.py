"""Run the test suite as on other kinds of machine: `python tests/repository/machines.py [NAME ...]
[-- PYTEST ARGUMENTS]`.

Each configuration limits torch, oneDNN, MKL and the C++ module to some instruction sets, so that
sums have the order and the rounding that they have on a processor with those alone. Without names
all configurations run, one after the other. Each prints one line when it ends: what ran, the result
of pytest, and the tests that failed. The exit status is 1 if a test failed.

The whole output of pytest is in build/machines/NAME.log. Comparisons of speed are left out; `make
test` runs them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from grpo_kernels.diagnosis.machine import best_isa, processor

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "machines"
SPEED = "tests/benchmarks/test_speed.py"


class Configuration(NamedTuple):
    """Environment variables, and for which best instruction sets of a processor they limit anything
    (None: for all).
    """

    environment: dict[str, str]
    runs_on: tuple[str, ...] | None = None


#: MKL ignores MKL_ENABLE_INSTRUCTIONS on AMD. There MKL_CBWR chooses its code.
CONFIGURATIONS = {
    # Torch and MKL sum in an order that no processor with AVX2 has: the nearest to a machine that
    # nobody has met.
    "sse": Configuration(
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "MKL_CBWR": "COMPATIBLE",
            "GRPO_KERNELS_ISA": "avx2",
        },
        ("avx2", "avx512", "avx512bf16"),
    ),
    "avx2": Configuration(
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "MKL_CBWR": "AVX2",
            "GRPO_KERNELS_ISA": "avx2",
        },
        ("avx512", "avx512bf16"),
    ),
    "avx512": Configuration(
        {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "GRPO_KERNELS_ISA": "avx512",
        },
        ("avx512bf16",),
    ),
    "as it is": Configuration({}),
    "one thread": Configuration({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
}

#: What the libraries of a process say that they use.
IN_USE = """
import torch
from grpo_kernels.core.backends import cpu, cpu_matmuls
module = cpu._cpu.isa() if cpu.unavailable_reason() is None else "none"
print(f"torch {torch.backends.cpu.get_cpu_capability()}, C++ module {module}, products {cpu_matmuls.engine()}, "
      f"threads {torch.get_num_threads()}")
"""


def why_not(name: str) -> str | None:
    """Return why this processor cannot run a configuration, or None if it can."""
    runs_on = CONFIGURATIONS[name].runs_on
    best = best_isa(processor()[1])
    if runs_on is None or best in runs_on:
        return None
    return (
        f"skipped, because it limits processors with {' or '.join(runs_on)}, and this one has"
        f" {best} at best."
    )


def run(name: str, arguments: list[str]) -> tuple[bool, str]:
    """Run the tests in one configuration. Return whether they pass, and the line about them."""
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    environment = inherited | CONFIGURATIONS[name].environment
    how = {"cwd": ROOT, "env": environment}
    in_use = subprocess.check_output([sys.executable, "-c", IN_USE], text=True, **how).strip()
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        tests = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, **how)
    output = log.read_text().splitlines()
    failed = [line for line in output if re.match(r"(FAILED|ERROR) ", line)]
    closing = next(
        (
            line.strip("= ")
            for line in reversed(output)
            if re.search(r"\d (passed|failed|error)", line)
        ),
        "",
    )
    if not closing:
        failed = output[-30:]
    return tests.returncode == 0, "\n    ".join(
        [f"{in_use}: {closing or f'pytest ended with {tests.returncode}'}", *failed]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(CONFIGURATIONS)}; all if none is given",
    )
    parser.add_argument("--processes", default="2", help="how many processes run tests")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    arguments = words[cut + 1 :]
    unknown = [name for name in options.names if name not in CONFIGURATIONS]
    if unknown:
        parser.error(
            f"there is no configuration {unknown[0]!r}: choose from {', '.join(CONFIGURATIONS)}"
        )
    distribution = [
        "--numprocesses",
        options.processes,
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "--ignore",
        SPEED,
    ]
    sound = True
    for name in options.names or CONFIGURATIONS:
        reason = why_not(name)
        passed, line = (True, reason) if reason else run(name, [*distribution, *arguments])
        sound = sound and passed
        print(f"{name}: {line}", flush=True)
    sys.exit(not sound)


if __name__ == "__main__":
    main()
