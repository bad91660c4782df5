"""Small faults, each of which some test must find: the proof that the tests have power.

    python tests/faults.py [PART OF A NAME OR FILE ...] [--all]

copies the project, puts in one fault after the other, builds what is compiled where that is the faulty part, and runs the tests
that are named beside it, or with --all the whole quick suite. It ends with the faults that no test found. `test_faults.py` sees
to it that every fault still fits the code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    what: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: str  # that find it


FAULTS: list[Fault] = []


def run(fault: Fault, copy: Path, everything: bool) -> bool:
    """Whether a test fails."""
    path = copy / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.what}: {fault.file} has this text {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new))
    try:
        if fault.file.startswith("csrc"):
            subprocess.run(["cmake", "--build", str(copy / "build" / "faults"), "-j2"], check=True, capture_output=True)
            for module in (copy / "build" / "faults").glob("_cpu*.so"):
                shutil.copy(module, copy / "grpo_kernels")
        tests = [] if everything else fault.tests.split()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=copy, capture_output=True, timeout=1800).returncode == 1
    finally:
        path.write_text(text)


def main(words: list[str]) -> None:
    everything, words = "--all" in words, [word for word in words if word != "--all"]
    chosen = [f for f in FAULTS if not words or any(word in f.what or word in f.file for word in words)]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist"))
        if any(f.file.startswith("csrc") for f in chosen):
            subprocess.run(
                ["cmake", "-S", str(copy), "-B", str(copy / "build" / "faults"), f"-DPython_EXECUTABLE={sys.executable}"],
                check=True,
            )
        for fault in chosen:
            found = run(fault, copy, everything)
            print(f"{'found' if found else 'MISSED'}  {fault.file}: {fault.what}", flush=True)
            missed += [] if found else [fault]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults found")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main(sys.argv[1:])
