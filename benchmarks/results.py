"""Read and write result files, benchmarks/results/<machine>/<suite>.json.

A file is written after every cell, so that an interrupted run continues where it stopped. A cell is
measured again when its fingerprint changes, so that a file never mixes figures of different code or
machines.
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
    """Return the content of a JSON file, or {} if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, record: Record) -> None:
    """Write a JSON file. It is replaced in one step, so that it is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def origin(machine: Record, command: str) -> Record:
    """Return the fields of a result file, or of a cell, that say how it was measured.

    machine  see machine.machine
    command  the command line that measures it
    """
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine,
    }


@functools.cache
def commit(root: Path = ROOT) -> str | None:
    """Return the commit of the checkout, or None without git or outside of a repository.

    It ends in "-dirty" if a tracked file has changed. Result files do not count, because the
    benchmarks themselves write them.
    """
    git = ["git", "-C", str(root)]
    files = ["--untracked-files=no", "--", ".", ":!benchmarks/results"]

    def output(*command: str) -> str:
        """Return what a git command prints."""
        answer = subprocess.run([*git, *command], capture_output=True, text=True, check=True)
        return answer.stdout.strip()

    try:
        head = output("rev-parse", "HEAD")
        changed = output("status", "--porcelain", *files)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def fingerprint(cell: Cell, only: tuple[str, ...] | None, quick: bool, machine: Record) -> str:
    """Return a hash that changes if a cell has to be measured again.

    It depends on the cell, the names of its providers (`only`), the effort (`quick`), and
    `setting`.
    """
    return _hash(cell, only, quick, setting(machine))


def setting(machine: Record) -> str:
    """Return a hash of the code and of the machine and its packages (machine.machine)."""
    return _hash(json.dumps(machine, sort_keys=True), _code())


def _hash(*parts: Any) -> str:
    """Return 16 hexadecimal digits that depend on the repr of all parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@functools.cache
def _code() -> str:
    """Return a hash of the names and contents of all files of SOURCES."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                name = path.relative_to(ROOT).as_posix()
                digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
