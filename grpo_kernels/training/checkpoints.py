"""Checkpoints: written atomically, verified before use.

A checkpoint is a folder `step-00000120` with `state.pt` and `manifest.json`, which holds the size and SHA-256 of the
former. It is written under another name and renamed, so a folder with the right name was complete when it appeared. It is on
the disk, with its name, before an older one is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

FILES = ("state.pt", "manifest.json")


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of a step and drop all but the newest `keep`."""
    final, draft = folder / f"step-{step:08d}", folder / f"draft-{step:08d}"
    if _readable(final):  # the same step is the same state
        return final
    for left in _named("draft", folder):  # of a write that failed
        _drop(left)
    _make_way(draft)
    draft.mkdir(parents=True)
    with open(draft / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    with open(draft / "manifest.json", "w") as file:
        json.dump({"step": step, "bytes": (draft / "state.pt").stat().st_size, "sha256": _digest(draft / "state.pt")}, file)
        file.flush()
        os.fsync(file.fileno())
    _drop(final)
    _make_way(final)
    _sync(draft)
    draft.rename(final)
    _sync(folder)  # before the older ones go: a crash of the machine must not leave neither
    # Newer ones than this were passed over by the run that writes it: they are damaged.
    until = [path for path in listed(folder) if step_of(path) <= step]
    for path in set(listed(folder)) - set(until[-keep:]):
        _drop(path)
    return final


def listed(folder: Path) -> list[Path]:
    """Checkpoints, oldest first. Copies under other names and archives are not listed."""
    return [path for path in _named("step", folder) if any((path / name).exists() for name in FILES)]


def step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _sync(folder: Path) -> None:
    """Put the names in a folder on the disk, where the file system does that for a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(kind: str, folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob(f"{kind}-*") if re.fullmatch(rf"{kind}-\d{{8,}}", path.name)), key=step_of)


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


def _make_way(path: Path) -> None:
    """Give what has the name of a new checkpoint another name: a file, a link, a folder with things that are not ours."""
    aside = path
    while os.path.lexists(aside):
        aside = aside.with_name(aside.name + "-aside")
    if aside != path:
        path.rename(aside)
        print(f"{path} is not a checkpoint of this run, and is now {aside.name}", file=sys.stderr)


def load_newest(folder: Path, until: int | None = None) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest intact checkpoint (None if there is none), and what was wrong with those passed over. until: the newest up to
    this step, from which on the metrics are damaged; a later one where there is none."""
    problems: list[str] = []
    late: list[tuple[Path, dict[str, Any]]] = []
    for path in reversed(listed(folder)):
        try:
            state = _read(path)
        except Exception as error:  # whatever the bytes of a file may lead to
            problems.append(f"{path}: {error}")
            continue
        if until is None or state["step"] <= until:
            return state, [*problems, *(f"{path}: the metrics are damaged from step {until} on" for path, _ in late)]
        late = late or [(path, state)]
    return (late[0][1] if late else None), problems


def _read(path: Path) -> dict[str, Any]:
    manifest = json.loads((path / "manifest.json").read_text())
    if not isinstance(manifest, dict) or manifest.get("sha256") != _digest(path / "state.pt"):
        raise ValueError("state.pt does not match its checksum")
    # The checksum says that the file is the one written; weights_only keeps it from being a program.
    state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or state.get("step") != step_of(path):
        raise ValueError("state.pt does not hold a run of that step")
    return state


def _readable(path: Path) -> bool:
    try:
        return _read(path) is not None
    except Exception:
        return False


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
