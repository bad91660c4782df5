"""Tests in processes of their own: several ranks, or another environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A Python process that finds what this one finds, the tests' modules included."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(*processes: subprocess.Popen[str]) -> None:
    """Wait for all of them, and show what those that failed have said."""
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
        failed = [out[-4000:] for process, out in zip(processes, outputs, strict=True) if process.returncode != 0]
        assert not failed, "\n\n".join(failed)
    finally:
        for process in processes:
            process.kill()
