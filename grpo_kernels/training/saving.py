"""The output folder of a run, its checkpoints, and the signals that stop it.

A checkpoint is a file `step-00000120.pt`, a zip archive with a checksum of each record, as torch
writes it. It is written under another name and then renamed, so a file with this name is complete.
It is on the disk before an older checkpoint is deleted, so a crash at any time loses no complete
checkpoint. It records the sizes of the files of metrics and samples, and a resumed run cuts them to
these sizes.
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

#: Options that may differ between a run and its continuation without changing its steps.
FREE_TO_CHANGE = {
    "steps", "out", "resume", "progress", "checkpoint_steps", "keep_checkpoints", "eval_steps", "eval_prompts", "parallel",
    "log_to", "sample_every", "sample_count",
}  # fmt: skip
#: Entries of a checkpoint that rank 0 sends to the other ranks as Python objects.
SENT_ENTRIES = ("step", "entropy_coef", "draft", "rng", "sizes")
#: Seconds within which the same signal may arrive twice, from a launcher and its batch system.
ECHO = 3.0
#: Errors of file systems without locks, such as NFS without its lock daemon.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class OutputFolder:
    """The output folder of a run, locked against other runs from `take` to `release`.

    The lock ends with the process, even in a crash.

    path   the folder; `take` creates it
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.lock = filelock.FileLock(path / ".lock", blocking=False, thread_local=False)

    def take(self, resume: bool) -> None:
        """Create and lock the folder.

        resume   whether this run continues the one in the folder

        Raises ValueError if the folder cannot be written, is in use by another run, or has a run
        that this one does not continue.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.hold()
        except OSError as error:
            raise ValueError(
                f"out={str(self.path)!r} cannot be written ({error}): choose another folder."
            ) from error
        has_metrics = (self.path / "metrics.jsonl").exists()
        has_run = has_metrics or bool(checkpoint_paths(self.checkpoints))
        if has_run and not resume:
            self.release()
            raise ValueError(
                f"out={str(self.path)!r} holds a run: continue it with resume, or choose another"
                " folder."
            )

    def hold(self) -> None:
        """Lock the folder, unless it is locked already. Raises ValueError if another run has it.

        On a file system without locks, a message is printed, and the folder is not locked.
        """
        try:
            if not self.lock.is_locked:
                self.lock.acquire()
        except filelock.Timeout as error:
            raise ValueError(
                f"out={str(self.path)!r} is in use by another run: wait for that run to end, or"
                " choose another folder."
            ) from error
        except (NotImplementedError, OSError) as error:
            # NotImplementedError has no errno. filelock raises it if the system has no locks.
            code = getattr(error, "errno", errno.ENOSYS)
            if code not in WITHOUT_LOCKS:
                raise
            print(
                f"out={str(self.path)!r} is not safe from a second run: it cannot be locked"
                f" ({error})",
                file=sys.stderr,
            )

    def release(self) -> None:
        """Unlock the folder."""
        self.lock.release()


# ---- checkpoints


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write the checkpoint of a step, then delete all but the newest `keep` checkpoints.

    folder   folder of the checkpoints
    step     number of steps done
    state    what `read` will return: tensors, numbers, texts, dictionaries and lists
    """
    temporary = folder / "draft.pt"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    written = temporary.rename(folder / f"step-{step:08d}.pt")
    # Before older checkpoints are deleted, the new name must be on the disk too, in case the
    # machine crashes.
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems cannot do this for folders
        os.fsync(descriptor)
    os.close(descriptor)
    # A checkpoint with a later step is damaged: this run skipped it when it resumed.
    all_paths = checkpoint_paths(folder)
    intact = [path for path in all_paths if path <= written]
    for path in set(all_paths) - set(intact[-keep:]):
        try:
            path.unlink()
        except OSError as error:  # a full disk is better than a lost run
            print(f"old checkpoint not removed: {error}", file=sys.stderr)


def load_newest(folder: Path) -> dict[str, Any]:
    """Return the state in the newest intact checkpoint, {} if the folder has no checkpoint.

    folder   the folder of the checkpoints, files "step-00000120.pt"

    Damaged checkpoints are skipped with a message. Raises ValueError if there are only damaged
    ones, or ones of another version: a new run would delete them.
    """
    for path in reversed(checkpoint_paths(folder)):
        try:
            return read(path)
        except Exception as error:  # a damaged file may raise exceptions of any type
            print(f"checkpoint passed over: {path}: {error}", file=sys.stderr)
    if any(folder.glob("step-*")):
        raise ValueError(
            f"{str(folder)!r} holds only checkpoints that are damaged or of another version: repair or"
            " remove them, or choose another folder."
        )
    return {}


def read(path: Path) -> dict[str, Any]:
    """Return the state that `save` wrote to a checkpoint.

    path   a file "step-00000120.pt"

    Raises an error of any type if the file is damaged, or if `save` did not write it.
    """
    with zipfile.ZipFile(path) as archive:
        if archive.testzip() is not None:
            raise ValueError("a record of the file does not match its checksum")
    # weights_only: a pickle could run a program.
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or f"step-{state.get('step'):08d}" != path.stem:
        raise ValueError("the file does not hold a run of that step")
    return state


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first. Files with other names are ignored."""
    return sorted(folder.glob(f"step-{'[0-9]' * 8}.pt"))


# ---- the state of a run


@dataclass
class Saved:
    """Saves and restores the parts of a run that have a state.

    A run with another number of ranks, or another `config.parallel`, can read the checkpoints.

    newest   the step of the newest checkpoint, 0 if there is none
    """

    config: TrainConfig
    folder: OutputFolder
    ranks: Ranks
    policy: ParallelModel
    reference: ParallelModel | None
    optimizer: torch.optim.Optimizer
    entropy_coef: AdaptiveEntropyCoef | None
    draft: DraftTrainer | None
    newest: int = 0

    def save(self, step: int, rng: dict[str, Any], sizes: dict[str, int]) -> None:
        """Write a checkpoint.

        step    number of steps done
        rng     random state of this rank after the step, see `random_state`
        sizes   sizes of the files of `RunLog` after the step
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
        """Restore the newest intact checkpoint. All ranks must call this.

        Returns (number of steps done, random state of this rank, sizes of the files of `RunLog`),
        as `save` got them. Without a checkpoint this is (0, the present random state, {}).
        """
        # Only rank 0 reads the file. It sends small entries to the other ranks as Python objects.
        # `ParallelModel.load_state` sends the parameters.
        checkpoint = {}  # stays empty on other ranks

        def read_on_main() -> dict[str, Any]:
            """Fill `checkpoint`, and return its small entries, None for each that it lacks."""
            checkpoint.update(load_newest(self.folder.checkpoints))
            self.warn_of_changes(checkpoint.get("config", {}))
            small_entries = {name: checkpoint.get(name) for name in SENT_ENTRIES}
            return small_entries | {"has_reference": bool(checkpoint.get("reference"))}

        entries = self.ranks.on_main(read_on_main)
        rng = random_state(self.ranks.device)
        if entries["step"] is None:
            return 0, rng, {}
        no_state: tuple[dict[str, Any], dict[str, Any]] = ({}, {})  # on other ranks than rank 0
        self.policy.load_state(checkpoint.get("policy", no_state), self.optimizer)
        if self.reference is not None and entries["has_reference"]:
            self.reference.load_state(checkpoint.get("reference", no_state))
        if self.entropy_coef is not None and entries["entropy_coef"] is not None:
            self.entropy_coef.load_state_dict(entries["entropy_coef"])
        if self.draft is not None and entries["draft"] is not None:
            self.draft.load_state(entries["draft"])
        if self.ranks.rank < len(entries["rng"]):  # the saved run may have had fewer ranks
            rng = entries["rng"][self.ranks.rank]
            set_random_state(rng, self.ranks.device)
        self.newest = entries["step"]
        return self.newest, rng, entries["sizes"]

    def warn_of_changes(self, saved_options: dict[str, Any]) -> None:
        """Print the names of options that differ from the checkpoint's and that change the steps.

        saved_options   the options of the run that wrote the checkpoint, {} without a checkpoint
        """
        free = set(FREE_TO_CHANGE)
        if self.config.lr_schedule != "constant":  # the learning rate then depends on `steps`
            free -= {"steps"}
        if os.path.isfile(self.config.dataset):  # its last rows are held out for evaluation
            free -= {"eval_steps", "eval_prompts"}
        options = asdict(self.config)
        changed = [
            name
            for name, saved_value in saved_options.items()
            if name not in free and saved_value != options.get(name)
        ]
        if changed:
            print(
                f"resuming with other values of {', '.join(changed)}: not the run that was"
                " interrupted",
                file=sys.stderr,
            )

    def check_space(self) -> None:
        """Raise ValueError unless the disk has space for all that the run will write.

        That is the final model, and the checkpoints. A new checkpoint is complete before an old one
        is deleted, so `keep_checkpoints` + 1 exist for a moment. Checkpoints that an interrupted
        run left are on the disk already.
        """
        model_bytes = _num_bytes(self.policy.model)
        reference_bytes = 0 if self.reference is None else _num_bytes(self.reference.model)
        # A checkpoint has the parameters, and AdamW's two moments of each.
        checkpoint_bytes = 3 * model_bytes + reference_bytes
        num_present = len(checkpoint_paths(self.folder.checkpoints))
        # At least 1: the next checkpoint is written before an old one is deleted.
        num_new = max(self.config.keep_checkpoints + 1 - num_present, 1)
        needed = model_bytes + num_new * checkpoint_bytes
        free = shutil.disk_usage(self.folder.path).free
        if free < needed:
            raise ValueError(
                f"out={str(self.folder.path)!r} has {free / 1e6:.0f} MB free, and the run writes up"
                f" to {needed / 1e6:.0f} MB: free some space, lower keep_checkpoints, or choose"
                " another folder."
            )

    def save_draft(self) -> None:
        """Write the parameters of the draft head to out/draft.pt, if there is one."""
        if self.draft is not None:
            parameters = self.draft.head.state_dict()
            self.ranks.on_main(lambda: torch.save(parameters, self.folder.path / "draft.pt"))

    def save_model(self, tokenizer: Any) -> None:
        """Write the policy and its tokenizer to out/model, as transformers loads them."""
        # The parameters of a sharded model are gathered on rank 0, for which all ranks are needed.
        state = self.policy.state()[0] if self.policy.sharded else None

        def write() -> None:
            self.policy.model.save_pretrained(self.folder.path / "model", state_dict=state)
            tokenizer.save_pretrained(self.folder.path / "model")

        self.ranks.on_main(write)


def _num_bytes(model: torch.nn.Module) -> int:
    """Return the size of all parameters of a model in bytes, also if they are sharded."""
    return sum(p.nbytes for p in model.parameters())


# ---- the global random states, which reward functions and models use


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the global random states of torch, Python and NumPy, in types for a checkpoint.

    device   if it is a GPU, torch's state of this GPU is included
    """
    # weights_only loading refuses NumPy arrays, so the keys become a list.
    algorithm, keys, *position = require("numpy").random.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (algorithm, keys.tolist(), *position),
        "cuda": cuda,
    }


def set_random_state(states: dict[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned.

    device   if it is a GPU, torch's state of this GPU is restored if it was saved
    """
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    require("numpy").random.set_state(states["numpy"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


# ---- a request to stop: SIGINT or SIGTERM, from a keyboard, a launcher or a batch system


@contextlib.contextmanager
def stop_after_step() -> Iterator[list[int]]:
    """Return a context in which SIGINT and SIGTERM do not end the process at once.

    The value of the context is the list of received signals, by number. The caller looks at it
    after each step. A signal more than `ECHO` seconds after the first one acts at once. Outside the
    main thread signals act as usual.
    """
    received = list[int]()
    first_time = math.inf
    previous_handlers: dict[signal.Signals, Any] = {}

    def restore_handlers() -> None:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

    def receive(number: int, frame: Any) -> None:
        """Handle a signal: add it to `received`, or let it act if it is a second request."""
        nonlocal first_time
        received.append(number)
        if len(received) == 1:
            first_time = time.monotonic()  # another signal may arrive before this line
            print(
                f"stopping after this step; interrupt again after {ECHO:.0f} s to stop now",
                file=sys.stderr,
            )
        elif time.monotonic() - first_time > ECHO:
            restore_handlers()
            signal.raise_signal(number)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous_handlers[number] = signal.signal(number, receive)
    except ValueError:  # not the main thread, where Python allows no handlers
        previous_handlers.clear()
    try:
        yield received
    finally:
        restore_handlers()
