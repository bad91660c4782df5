"""The output folder of a run: checks that it can be written, has room, and holds no other run."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import IO

from . import checkpoints


class OutputFolder:
    """`config.out`, which belongs to this run from `take` to `release`, or until its process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.summary = path / "summary.txt"
        self.picture = path / "curves.png"
        self.model = path / "model"
        self.lock: IO[str] | None = None

    def take(self, resume: bool) -> None:
        """Make the folder, and find out now rather than at the first checkpoint that it cannot be written, that another run
        writes there, or that it holds a run which this one does not continue."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            probe = self.checkpoints / ".probe"
            probe.write_text("")
            probe.unlink()
            self.hold()
        except OSError as error:
            raise ValueError(f"out={str(self.path)!r} cannot be written ({error}): choose another folder.") from error
        if not resume and (checkpoints.listed(self.checkpoints) or self.metrics.exists()):
            self.release()
            raise ValueError(f"out={str(self.path)!r} holds a run: continue it with resume, or choose another folder.")

    def hold(self) -> None:
        """Lock the folder against other runs. The operating system releases the lock when this process ends, even after a crash."""
        if self.lock is not None:
            return
        file = open(self.path / ".lock", "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            raise ValueError(
                f"out={str(self.path)!r} is in use by {owner}: wait for that run to end, or choose another folder."
            ) from error
        except OSError as error:  # a file system without locks
            print(f"out={str(self.path)!r} is not safe from a second run: it cannot be locked ({error})", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        self.lock = file

    def release(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def check_space(self, needed: int) -> None:
        """Raise ValueError unless `needed` bytes are free where the run writes."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise ValueError(
                f"out={str(self.path)!r} has {free / 1e6:.0f} MB free, and the run writes up to {needed / 1e6:.0f} MB: "
                "make room, lower keep_checkpoints, or choose another folder."
            )
