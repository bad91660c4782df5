"""Files of one JSON object per line and step, whole on disk when a line is written; what a crash leaves is seen."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


class JsonLines:
    """A file of objects with a "step"."""

    def __init__(self, path: Path, resume_at: int) -> None:
        """Lines of steps from `resume_at` on, which a resumed run writes again, are dropped."""
        if path.exists():
            draft = path.with_suffix(".draft")
            kept = [line for line in read_metrics(path) if line["step"] < resume_at]
            draft.write_text("".join(_dump(line) for line in kept))
            draft.replace(path)
        self.file = open(path, "a")

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.file.write(_dump({"step": step, **values}))
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines, without what a crash while writing leaves: a partial last line, or NUL bytes."""
    return [line for line in map(_parsed, _texts(path)) if line is not None]


def damaged_from(path: Path) -> int | None:
    """The first step whose line a crash has damaged; None where all lines are whole, or there is no file."""
    step = 0
    for text in _texts(path) if path.exists() else ():
        line = _parsed(text)
        if line is None:
            return step
        step = line["step"] + 1
    return None


def _dump(line: dict[str, Any]) -> str:
    """A line of JSON; NaN and infinity, which JSON lacks, become null."""
    known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(known, allow_nan=False) + "\n"


def _texts(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines(keepends=True)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text) if text.endswith("\n") else None
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
