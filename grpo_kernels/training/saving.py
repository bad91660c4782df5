"""The state of a run: saved, resumed from, and saved once more when the run is asked to stop."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from ..rewards.entropy import AdaptiveEntropyCoef
from . import output, require
from .config import TrainConfig
from .output import OutputFolder
from .ranks import ParallelModel, Ranks

#: What may differ between a run and its continuation without changing the steps.
FREE_TO_CHANGE = {
    "steps", "out", "resume", "progress", "checkpoint_steps", "keep_checkpoints", "eval_steps", "eval_prompts", "parallel",
    "log_to", "sample_every", "sample_count",
}  # fmt: skip
#: Seconds within which a launcher and its batch system may pass on one and the same signal.
ECHO = 3.0


@dataclass
class Saved:
    """The parts of a run that have a state. Its checkpoints are read by runs of any number of processes and either layout."""

    config: TrainConfig
    folder: OutputFolder
    ranks: Ranks
    policy: ParallelModel
    reference: ParallelModel | None
    optimizer: torch.optim.Optimizer
    entropy_coef: AdaptiveEntropyCoef | None

    def save(self, step: int, rng: dict[str, Any]) -> None:
        """A checkpoint of the run after `step` steps, where the shared random generators were at `rng`."""
        state = {
            "step": step,
            "policy": self.policy.state(self.optimizer),
            "reference": None if self.reference is None else self.reference.state(),
            "entropy_coef": None if self.entropy_coef is None else self.entropy_coef.state_dict(),
            "rng": self.ranks.gather(rng),
            "config": asdict(self.config),
        }
        self.ranks.on_main(lambda: output.save(self.folder.checkpoints, step, state, self.config.keep_checkpoints))

    def restore(self) -> tuple[int, dict[str, Any]]:
        """Continue from the newest intact checkpoint: model, optimizer, reference, random states. Returns the steps done and the
        random states; 0 and those of now where there is no checkpoint."""
        whole: dict[str, Any] = {}  # on rank 0, which alone reads

        def read() -> dict[str, Any]:
            whole.update(output.load_newest(self.folder.checkpoints))
            self.tell_changes(whole.get("config", {}))
            small = {name: whole.get(name) for name in ("step", "entropy_coef", "rng")}
            return small | {"refers": bool(whole.get("reference"))}

        small, rng = self.ranks.on_main(read), random_state(self.ranks.device)
        if small["step"] is None:
            return 0, rng
        self.policy.load_state(whole.get("policy", ({}, {})), self.optimizer)
        if self.reference is not None and small["refers"]:
            self.reference.load_state(whole.get("reference", ({}, {})))
        if self.entropy_coef is not None and small["entropy_coef"] is not None:
            self.entropy_coef.load_state_dict(small["entropy_coef"])
        if self.ranks.rank < len(small["rng"]):  # a rank that the run did not have keeps its own
            rng = small["rng"][self.ranks.rank]
            set_random_state(rng, self.ranks.device)
        return small["step"], rng

    def tell_changes(self, before: dict[str, Any]) -> None:
        """Say which options are others than those of the run that goes on, unless they change no step."""
        free = set(FREE_TO_CHANGE)
        if self.config.lr_schedule != "constant":
            free -= {"steps"}
        if os.path.isfile(self.config.dataset):  # which gives up rows for evaluation
            free -= {"eval_steps", "eval_prompts"}
        now = asdict(self.config)
        changed = [name for name in before if name not in free and before[name] != now.get(name)]
        if changed:
            print(f"resuming with other values of {', '.join(changed)}: not the run that was interrupted", file=sys.stderr)

    def check_space(self) -> None:
        """Room for one checkpoint more than are kept (a new one is whole before an old one goes) and for the model."""
        size = {p: p.numel() * p.element_size() for p in self.policy.model.parameters()}  # of shards: the whole
        model, moments = sum(size.values()), 2 * sum(size[p] for p in size if p.requires_grad)
        frozen = [] if self.reference is None else self.reference.model.parameters()
        each = model + moments + sum(p.numel() * p.element_size() for p in frozen)
        there = len(output.listed(self.folder.checkpoints))
        self.folder.check_space(model + each * max(self.config.keep_checkpoints + 1 - there, 1))

    def save_model(self, tokenizer: Any) -> None:
        """The policy and its tokenizer, as transformers loads them."""
        state = self.policy.state()[0] if self.policy.sharded else None

        def write() -> None:
            self.policy.model.save_pretrained(self.folder.model, state_dict=state)
            tokenizer.save_pretrained(self.folder.model)

        self.ranks.on_main(write)


# ---- random numbers that everybody in a process shares: a model may use them, and reward functions do


def random_state(device: torch.device) -> dict[str, Any]:
    """Of torch, Python and NumPy, as plain numbers and tensors, which a checkpoint can hold."""
    kind, keys, *rest = cast(Any, require("numpy").random.get_state())
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "cuda": cuda}


def set_random_state(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    require("numpy").random.set_state(tuple(states["numpy"]))
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


# ---- a request to stop: SIGINT or SIGTERM, from a keyboard, a launcher or a batch system


@contextmanager
def stop_after_step() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the step at hand ends whole; a second signal, `ECHO` seconds later, acts at once."""
    received: list[int] = []
    before: dict[signal.Signals, Any] = {}
    first = 0.0

    def note(number: int, frame: Any) -> None:
        nonlocal first
        if not received:
            first = time.monotonic()
            received.append(number)
            print(f"stopping after this step; once more after {ECHO:.0f} s to stop now", file=sys.stderr)
        elif time.monotonic() - first > ECHO:
            for known, handler in before.items():
                signal.signal(known, handler)
            signal.raise_signal(number)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread, where Python allows no handlers
        before.clear()
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
