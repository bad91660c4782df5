"""The folder of a run on disk, where a crash at any moment costs nothing that was complete: its lock, its checkpoints, its files of
one JSON object per line.

A checkpoint is a folder `step-00000120` with `state.pt` and `manifest.json`, which holds the SHA-256 of the former. It is written
under another name and renamed, so a folder with the right name was complete when it appeared. It is on the disk, with its name,
before an older one is removed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch


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
            self.hold()
        except OSError as error:
            raise ValueError(f"out={str(self.path)!r} cannot be written ({error}): choose another folder.") from error
        if not resume and (listed(self.checkpoints) or self.metrics.exists()):
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


# ---- checkpoints

FILES = ("state.pt", "manifest.json")


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write the checkpoint of a step and drop all but the newest `keep`."""
    final, draft = folder / f"step-{step:08d}", folder / f"draft-{step:08d}"
    with contextlib.suppress(Exception):
        read(final)
        return  # the same step is the same state
    for left in _named("draft", folder):  # of a write that failed
        _drop(left)
    draft.mkdir()
    _write(draft / "state.pt", lambda file: torch.save(state, file))
    manifest = json.dumps({"step": step, "sha256": _digest(draft / "state.pt")})
    _write(draft / "manifest.json", lambda file: file.write(manifest.encode()))
    _drop(final)
    _sync(draft)
    draft.rename(final)
    _sync(folder)  # before the older ones go: a crash of the machine must not leave neither
    # Newer ones than this were passed over by the run that writes it: they are damaged.
    until = [path for path in listed(folder) if step_of(path) <= step]
    for path in set(listed(folder)) - set(until[-keep:]):
        _drop(path)


def load_newest(folder: Path) -> dict[str, Any]:
    """The newest intact checkpoint, {} if there is none at all. Those passed over are told; where they are all that there is,
    ValueError: a fresh start would drop them."""
    paths = listed(folder)
    for path in reversed(paths):
        try:
            return read(path)
        except Exception as error:  # whatever the bytes of a file may lead to
            print(f"checkpoint passed over: {path}: {error}", file=sys.stderr)
    if paths:
        raise ValueError(f"{str(folder)!r} holds damaged checkpoints only: mend or remove them, or choose another folder.")
    return {}


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint. Raises whatever error its files lead to where they are not what `save` wrote."""
    manifest = json.loads((path / "manifest.json").read_text())
    if not isinstance(manifest, dict) or manifest.get("sha256") != _digest(path / "state.pt"):
        raise ValueError("state.pt does not match its checksum")
    # The checksum says that the file is the one written; weights_only keeps it from being a program.
    state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or state.get("step") != step_of(path):
        raise ValueError("state.pt does not hold a run of that step")
    return state


def listed(folder: Path) -> list[Path]:
    """Checkpoints, oldest first. Copies under other names and archives are not listed."""
    return [path for path in _named("step", folder) if any((path / name).exists() for name in FILES)]


def step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _named(kind: str, folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob(f"{kind}-*") if re.fullmatch(rf"{kind}-\d{{8,}}", path.name)), key=step_of)


def _write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Put the names in a folder on the disk, where the file system does that for a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop(path: Path) -> None:
    """Remove the files of a checkpoint, and its folder unless somebody keeps something else there. A link, and what cannot be
    removed, stays: the run that saves is worth more than the room."""
    if path.is_symlink() or not path.is_dir():
        return
    try:
        for name in FILES:
            (path / name).unlink(missing_ok=True)
        if not any(path.iterdir()):
            path.rmdir()
    except OSError as error:
        print(f"old checkpoint not removed: {error}", file=sys.stderr)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


# ---- files of lines


class JsonLines:
    """A file of objects with a "step", whole on disk when a line is written."""

    def __init__(self, path: Path, resume_at: int) -> None:
        """Lines of steps from `resume_at` on, which a resumed run writes again, are dropped."""
        if path.exists():
            draft = path.with_suffix(".draft")
            kept = [line for line in read_metrics(path, tell=True) if line["step"] < resume_at]
            draft.write_text("".join(map(_dump, kept)))
            draft.replace(path)
        self.file = open(path, "a")

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.file.write(_dump({"step": step, **values}))
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def read_metrics(path: Path, tell: bool = False) -> list[dict[str, Any]]:
    """All complete lines, without what a crash while writing leaves: a partial last line, or NUL bytes. tell: say how many others
    are damaged."""
    found, damaged = [], 0
    for text in path.read_text(errors="replace").splitlines(keepends=True):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int) and text.endswith("\n"):
            found.append(line)
        else:
            damaged += text.endswith("\n")
    if damaged and tell:
        print(f"{path}: {damaged} damaged lines are left out", file=sys.stderr)
    return found


def _dump(line: dict[str, Any]) -> str:
    """A line of JSON; NaN and infinity, which JSON lacks, become null."""
    known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(known, allow_nan=False) + "\n"
