"""Checkpoints: written whole or not at all, verified before use.

A checkpoint is a folder `step-00000120` with `state.pt` and `manifest.json`, which holds the size and SHA-256 of the
former. It is written under another name and renamed, so a folder with the right name was complete when it appeared.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch


def prepare_output(out: Path, resume: bool) -> None:
    """Make the folder, and find out now rather than at the first checkpoint that it cannot be written."""
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = out / "checkpoints" / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out={str(out)!r} cannot be written ({error}): choose another folder.") from error
    if not resume and (listed(out / "checkpoints") or (out / "metrics.jsonl").exists()):
        raise ValueError(f"out={str(out)!r} holds a run: continue it with resume, or choose another folder.")


def check_space(out: Path, needed: int) -> None:
    """Raise ValueError unless `needed` bytes are free where the run writes."""
    free = shutil.disk_usage(out).free
    if free < needed:
        raise ValueError(
            f"out={str(out)!r} has {free / 1e6:.0f} MB free, and the run writes up to {needed / 1e6:.0f} MB: "
            "make room, lower keep_checkpoints, or choose another folder."
        )


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of a step and drop all but the newest `keep`."""
    final, draft = folder / f"step-{step:08d}", folder / f"draft-{step:08d}"
    if _intact(final):  # the same step is the same state
        return final
    for left in folder.glob("draft-*"):  # of a write that failed
        shutil.rmtree(left)
    draft.mkdir(parents=True)
    with open(draft / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    with open(draft / "manifest.json", "w") as file:
        json.dump({"step": step, "bytes": (draft / "state.pt").stat().st_size, "sha256": _digest(draft / "state.pt")}, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    # Newer ones than this were passed over by the run that writes it: they are damaged.
    until = [path for path in listed(folder) if path.name <= final.name]
    for path in set(listed(folder)) - set(until[-keep:]):
        shutil.rmtree(path)
    return final


def listed(folder: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def load_newest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest intact checkpoint (None if there is none), and what was wrong with those passed over."""
    problems: list[str] = []
    for path in reversed(listed(folder)):
        try:
            if not _intact(path):
                raise ValueError("state.pt does not match its checksum")
            # The checksum says that the file is the one written; weights_only keeps it from being a program.
            return torch.load(path / "state.pt", map_location="cpu", weights_only=True), problems
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            problems.append(f"{path}: {error}")
    return None, problems


def _intact(path: Path) -> bool:
    try:
        return _digest(path / "state.pt") == json.loads((path / "manifest.json").read_text())["sha256"]
    except (OSError, ValueError, KeyError):
        return False


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def rng_state(device: torch.device) -> dict[str, Any]:
    """Global generators of this process, which dropout and reward functions may use; sampling and the data order have their
    own."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
