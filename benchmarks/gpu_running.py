"""One running stage of the GPU kit: its folder, its time limit, its results, and the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results import save

ROOT = Path(__file__).parent.parent


class Kit:
    """One running stage: its folder, its time limit, and its results."""

    def __init__(
        self,
        stage: str,
        work: Path,
        seconds: float,
        wheels: Path | None = None,
        rehearse: bool = False,
        asked: tuple[str, ...] = (),
    ) -> None:
        self.stage, self.work, self.wheels, self.rehearse, self.asked = stage, work, wheels, rehearse, asked
        self.device = "cpu" if rehearse else "cuda"
        self.deadline = time.monotonic() + seconds
        self.found: dict[str, Any] = {"lines": []}
        self.well = True  # the process ends with 1 otherwise

    @property
    def left(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    def add(self, **found: Any) -> None:
        self.found |= found
        save(self.work / "json" / f"{self.stage}.json", self.found)

    def say(self, line: str, well: bool = True) -> None:
        """Adds a line to the summary."""
        self.well &= well
        print(line, flush=True)
        self.add(lines=[*self.found["lines"], line])

    def leave_out(self, *names: str) -> None:
        """Notes what this machine cannot do, and why."""
        self.add(left_out=[*self.found.get("left_out", []), *names])
        for name in names:
            self.say(f"left out: {name}")

    def child(self, *command: str, seconds: float | None = None, **environment: str) -> int | None:
        """The exit status of a command, whose output goes to this stage's log; None if it took too long. "" unsets a
        variable."""
        values = {k: v for k, v in (os.environ | environment).items() if v or k not in environment}
        print(f"\n$ {' '.join(command)}", flush=True)
        try:
            return subprocess.run(command, cwd=ROOT, env=values, timeout=min(seconds or self.left, self.left)).returncode
        except subprocess.TimeoutExpired:
            print("(took too long, ended)", flush=True)
            return None

    def python(self, *command: str, seconds: float | None = None, **environment: str) -> int | None:
        return self.child(sys.executable, *command, seconds=seconds, **environment)


def outcome(status: int | None) -> str:
    return "ok" if status == 0 else "took too long" if status is None else f"exit status {status}"
