"""Result files, benchmarks/results/<machine>/<suite>.json: written after every cell, so that an
interrupted run continues where it stopped. A cell is measured again when its fingerprint changes: a
file never mixes figures of different code or machines.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.cases import Cell

Record = dict[str, Any]  # a result file, or a part of one
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: The files that a figure depends on: the library, and the parts of the benchmarks that measure.
SOURCES = (
    "grpo_kernels/**/*.py", "csrc/*", "benchmarks/cases.py", "benchmarks/harness.py", "benchmarks/measure.py",
    "benchmarks/suites.py", "benchmarks/providers/*.py",
)  # fmt: skip


def load(path: Path) -> Record:
    """A result file; {} if there is none yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, record: Record) -> None:
    """Replaces the file at once, so that it is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def origin(machine: Record, command: str) -> Record:
    """How a file, or a cell of one, was made."""
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine,
    }


@functools.cache
def commit(root: Path = ROOT) -> str | None:
    """The commit of the checkout, with "-dirty" if a tracked file differs from it; None without git
    or outside of a repository.

    A result file that was written to the checkout before makes no difference.
    """
    where = ["git", "-C", str(root)]
    changes = [
        *where,
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":!benchmarks/results",
    ]
    try:
        head, changed = (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            for command in ([*where, "rev-parse", "HEAD"], changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def fingerprint(cell: Cell, only: tuple[str, ...] | None, quick: bool, machine: Record) -> str:
    """Changes with the cell, the providers that take part, the effort, the machine, the packages
    and the code.
    """
    return _hash(cell, only, quick, setting(machine))


def setting(machine: Record) -> str:
    """Changes with the machine (`machine.machine`), the packages and the code."""
    return _hash(json.dumps(machine, sort_keys=True), _code())


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                digest.update(
                    path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes()
                )
    return digest.hexdigest()
