"""What a run keeps on disk, and how it stops: the folder that belongs to it, its checkpoints, the
state in them, and signals.

A checkpoint is a file `step-00000120.pt`, a zip archive with a checksum of each record, as torch
writes it. It is written under another name and renamed, so a file with the right name was complete
when it appeared. It is on the disk, with its name, before an older one is removed: a crash at any
moment costs nothing that was complete. It knows how long the files of metrics and samples were; a
resumed run cuts them there.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import torch

from ..rewards.entropy import AdaptiveEntropyCoef
from . import Ranks, require
from .config import TrainConfig
from .draft import DraftTrainer
from .policy import ParallelModel

#: What may differ between a run and its continuation without changing the steps.
FREE_TO_CHANGE = {
    "steps", "out", "resume", "progress", "checkpoint_steps", "keep_checkpoints", "eval_steps", "eval_prompts", "parallel",
    "log_to", "sample_every", "sample_count",
}  # fmt: skip
#: What of a checkpoint rank 0 sends to the other ranks as Python objects.
SMALL = ("step", "entropy_coef", "draft", "rng", "sizes")
#: Seconds within which a launcher and its batch system may pass on one and the same signal.
ECHO = 3.0
#: What file systems without locks answer, as NFS without its lock daemon does.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class OutputFolder:
    """`config.out`, which belongs to this run from `take` to `release`, or until its process ends,
    even by a crash.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.lock = filelock.FileLock(path / ".lock", blocking=False, thread_local=False)

    def take(self, resume: bool) -> None:
        """Make the folder, and find out now rather than at the first checkpoint that it cannot be
        written, that another run writes there, or that it holds a run which this one does not
        continue.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.hold()
        except OSError as error:
            raise ValueError(
                f"out={str(self.path)!r} cannot be written ({error}): choose another folder."
            ) from error
        if not resume and (listed(self.checkpoints) or (self.path / "metrics.jsonl").exists()):
            self.release()
            raise ValueError(
                f"out={str(self.path)!r} holds a run: continue it with resume, or choose another"
                " folder."
            )

    def hold(self) -> None:
        """Lock the folder against other runs."""
        try:
            if not self.lock.is_locked:
                self.lock.acquire()
        except filelock.Timeout as error:
            raise ValueError(
                f"out={str(self.path)!r} is in use by another run: wait for that run to end, or"
                " choose another folder."
            ) from error
        except (
            NotImplementedError,
            OSError,
        ) as error:  # a file system without locks, unless it says something else
            if getattr(error, "errno", errno.ENOSYS) not in WITHOUT_LOCKS:
                raise
            print(
                f"out={str(self.path)!r} is not safe from a second run: it cannot be locked"
                f" ({error})",
                file=sys.stderr,
            )

    def release(self) -> None:
        self.lock.release()


# ---- checkpoints


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write the checkpoint of a step and drop all but the newest `keep`."""
    draft = folder / "draft.pt"
    with open(draft, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    final = draft.rename(folder / f"step-{step:08d}.pt")
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system that does not do that for folders
        os.fsync(
            descriptor
        )  # before the older ones go: a crash of the machine must not leave neither
    os.close(descriptor)
    # Newer ones than this were passed over by the run that writes it: they are damaged.
    good = [path for path in listed(folder) if path <= final]
    for path in set(listed(folder)) - set(good[-keep:]):
        try:
            path.unlink()
        except OSError as error:  # losing the run is worse than filling the disk
            print(f"old checkpoint not removed: {error}", file=sys.stderr)


def load_newest(folder: Path) -> dict[str, Any]:
    """The newest intact checkpoint, {} if there is none at all. Those passed over are told; where
    there is nothing else, and where checkpoints have another form, ValueError: a fresh start would
    drop them.
    """
    for path in reversed(listed(folder)):
        try:
            return read(path)
        except Exception as error:  # whatever the bytes of a file may lead to
            print(f"checkpoint passed over: {path}: {error}", file=sys.stderr)
    if any(folder.glob("step-*")):
        raise ValueError(
            f"{str(folder)!r} holds only checkpoints that are damaged or of another version: repair or"
            " remove them, or choose another folder."
        )
    return {}


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint.

    Raises whatever error the file leads to where it is not what `save` wrote.
    """
    with zipfile.ZipFile(path) as archive:
        if archive.testzip() is not None:
            raise ValueError("a record of the file does not match its checksum")
    # The checksums say that the file is the one written; weights_only keeps it from being a
    # program.
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or f"step-{state.get('step'):08d}" != path.stem:
        raise ValueError("the file does not hold a run of that step")
    return state


def listed(folder: Path) -> list[Path]:
    """Checkpoints, oldest first. Copies under other names are not listed."""
    return sorted(folder.glob(f"step-{'[0-9]' * 8}.pt"))


# ---- the state of a run


@dataclass
class Saved:
    """The parts of a run that have a state.

    Its checkpoints are read by runs of any number of processes and either layout.
    """

    config: TrainConfig
    folder: OutputFolder
    ranks: Ranks
    policy: ParallelModel
    reference: ParallelModel | None
    optimizer: torch.optim.Optimizer
    entropy_coef: AdaptiveEntropyCoef | None
    draft: DraftTrainer | None
    newest: int = 0  # step of which there is a checkpoint

    def save(self, step: int, rng: dict[str, Any], sizes: dict[str, int]) -> None:
        """A checkpoint of the run after `step` steps, where the shared random generators were at
        `rng` and the files of its log had these sizes.
        """
        state = {
            "step": step,
            "policy": self.policy.state(self.optimizer),
            "reference": None if self.reference is None else self.reference.state(),
            "entropy_coef": None if self.entropy_coef is None else self.entropy_coef.state_dict(),
            "draft": None if self.draft is None else self.draft.state(),
            "rng": self.ranks.gather(rng),
            "sizes": sizes,
            "config": asdict(self.config),
        }
        self.ranks.on_main(
            lambda: save(self.folder.checkpoints, step, state, self.config.keep_checkpoints)
        )
        self.newest = step

    def restore(self) -> tuple[int, dict[str, Any], dict[str, int]]:
        """Continue from the newest intact checkpoint: model, optimizer, reference, random states.
        Returns what `save` was given, or where there is no checkpoint 0, the random states of now
        and no sizes.
        """
        whole = {}  # on rank 0, which alone reads

        def read() -> dict[str, Any]:
            whole.update(load_newest(self.folder.checkpoints))
            self.tell_changes(whole.get("config", {}))
            small = {name: whole.get(name) for name in SMALL}
            return small | {"refers": bool(whole.get("reference"))}

        small = self.ranks.on_main(read)
        rng = random_state(self.ranks.device)
        if small["step"] is None:
            return 0, rng, {}
        self.policy.load_state(whole.get("policy", ({}, {})), self.optimizer)
        if self.reference is not None and small["refers"]:
            self.reference.load_state(whole.get("reference", ({}, {})))
        if self.entropy_coef is not None and small["entropy_coef"] is not None:
            self.entropy_coef.load_state_dict(small["entropy_coef"])
        if self.draft is not None and small["draft"] is not None:
            self.draft.load_state(small["draft"])
        if self.ranks.rank < len(small["rng"]):  # a rank that the run did not have keeps its own
            rng = small["rng"][self.ranks.rank]
            set_random_state(rng, self.ranks.device)
        self.newest = small["step"]
        return self.newest, rng, small["sizes"]

    def tell_changes(self, before: dict[str, Any]) -> None:
        """Say which options are others than those of the run that goes on, unless they change no
        step.
        """
        free = set(FREE_TO_CHANGE)
        if self.config.lr_schedule != "constant":
            free -= {"steps"}
        if os.path.isfile(self.config.dataset):  # which gives up rows for evaluation
            free -= {"eval_steps", "eval_prompts"}
        now = asdict(self.config)
        changed = [name for name in before if name not in free and before[name] != now.get(name)]
        if changed:
            print(
                f"resuming with other values of {', '.join(changed)}: not the run that was"
                " interrupted",
                file=sys.stderr,
            )

    def check_space(self) -> None:
        """Check that the disk has space for the model and for one checkpoint more than are kept.

        A new checkpoint is complete before an old one is deleted.
        """
        models = [each.model for each in (self.policy, self.reference) if each is not None]
        model, *frozen = (
            sum(p.nbytes for p in each.parameters()) for each in models
        )  # of shards: the whole
        more = max(self.config.keep_checkpoints + 1 - len(listed(self.folder.checkpoints)), 1)
        needed = model + more * (3 * model + sum(frozen))  # AdamW has two moments
        free = shutil.disk_usage(self.folder.path).free
        if free < needed:
            raise ValueError(
                f"out={str(self.folder.path)!r} has {free / 1e6:.0f} MB free, and the run writes up"
                f" to {needed / 1e6:.0f} MB: free some space, lower keep_checkpoints, or choose"
                " another folder."
            )

    def save_draft(self) -> None:
        """The parameters of the draft head, in out/draft.pt."""
        if self.draft is not None:
            parameters = self.draft.head.state_dict()
            self.ranks.on_main(lambda: torch.save(parameters, self.folder.path / "draft.pt"))

    def save_model(self, tokenizer: Any) -> None:
        """The policy and its tokenizer, as transformers loads them."""
        state = self.policy.state()[0] if self.policy.sharded else None

        def write() -> None:
            self.policy.model.save_pretrained(self.folder.path / "model", state_dict=state)
            tokenizer.save_pretrained(self.folder.path / "model")

        self.ranks.on_main(write)


# ---- random numbers that everybody in a process shares: a model may use them, and reward functions
# do


def random_state(device: torch.device) -> dict[str, Any]:
    """Of torch, Python and NumPy, as plain numbers and tensors, which a checkpoint can hold."""
    kind, keys, *rest = require("numpy").random.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "cuda": cuda,
    }


def set_random_state(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    require("numpy").random.set_state(states["numpy"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


# ---- a request to stop: SIGINT or SIGTERM, from a keyboard, a launcher or a batch system


@contextlib.contextmanager
def stop_after_step() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the step at hand ends whole; a second signal, `ECHO`
    seconds later, acts at once.
    """
    received = list[int]()
    first = math.inf  # when the first one came
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: Any) -> None:
        nonlocal first
        received.append(number)
        if len(received) == 1:
            first = time.monotonic()  # another signal may arrive before this line
            print(
                f"stopping after this step; interrupt again after {ECHO:.0f} s to stop now",
                file=sys.stderr,
            )
        elif time.monotonic() - first > ECHO:
            restore()
            signal.raise_signal(number)

    try:
        for known in (signal.SIGINT, signal.SIGTERM):
            before[known] = signal.signal(known, note)
    except ValueError:  # not the main thread, where Python allows no handlers
        before.clear()
    try:
        yield received
    finally:
        restore()
