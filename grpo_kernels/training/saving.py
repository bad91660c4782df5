"""Saves the state of a run, and resumes from it."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import torch

from ..rewards.entropy import AdaptiveEntropyCoef
from . import checkpoints, randomness
from .config import TrainConfig
from .jsonl import damaged_from
from .output import OutputFolder
from .parallel import ParallelModel
from .ranks import Ranks

#: What may differ between a run and its continuation without changing the steps.
FREE_TO_CHANGE = {
    "steps", "out", "resume", "progress", "checkpoint_steps", "keep_checkpoints", "eval_steps", "eval_prompts", "parallel",
    "log_to", "sample_every", "sample_count",
}  # fmt: skip


@dataclasses.dataclass
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
            "model": self.policy.state(),
            "optimizer": self.policy.optimizer_state(self.optimizer),
            "reference": None if self.reference is None else self.reference.state(),
            "entropy_coef": None if self.entropy_coef is None else self.entropy_coef.state_dict(),
            "rng": self.ranks.gather(rng),
            "config": dataclasses.asdict(self.config),
        }
        self.ranks.on_main(lambda: checkpoints.save(self.folder.checkpoints, step, state, self.config.keep_checkpoints))

    def restore(self) -> tuple[int, dict[str, Any]]:
        """Continue from the newest intact checkpoint: model, optimizer, reference, random states. Returns the steps done and the
        random states; 0 and those of now where there is no checkpoint."""
        state: dict[str, Any] = {}  # whole on rank 0, which alone reads
        own = ("model", "optimizer", "reference")

        def read() -> dict[str, Any]:
            if self.ranks.main:
                state.update(self.read_checkpoint())
            return {name: value for name, value in state.items() if name not in own} | {
                "reference": state.get("reference") is not None
            }

        small = self.ranks.together(read)[0]
        rng = randomness.state(self.ranks.device)
        if "step" not in small:
            return 0, rng
        self.policy.load_state(state.get("model", {}))
        self.policy.load_optimizer_state(self.optimizer, state.get("optimizer", {}))
        if self.reference is not None and small["reference"]:
            self.reference.load_state(state.get("reference", {}))
        if self.entropy_coef is not None and small.get("entropy_coef") is not None:
            self.entropy_coef.load_state_dict(small["entropy_coef"])
        if self.ranks.rank < len(small["rng"]):  # a rank that the run did not have keeps its own
            rng = small["rng"][self.ranks.rank]
            randomness.set_state(rng, self.ranks.device)
        return small["step"], rng

    def read_checkpoint(self) -> dict[str, Any]:
        """{} where there is none."""
        damaged = damaged_from(self.folder.metrics)
        state, problems = checkpoints.load_newest(self.folder.checkpoints, until=damaged)
        for problem in problems:
            print(f"checkpoint passed over: {problem}", file=sys.stderr)
        if state is None:
            if problems:  # to start afresh here would drop the metrics and the damaged checkpoints
                raise ValueError(
                    f"out={str(self.folder.path)!r} holds damaged checkpoints only: mend or remove them, or choose another folder."
                )
            return {}
        if damaged is not None and state["step"] > damaged:
            print(f"{self.folder.metrics} is damaged: lines from step {damaged} on are lost", file=sys.stderr)
        now = dataclasses.asdict(self.config)
        changed = [k for k in now if k not in self.free_to_change() and state["config"].get(k) != now[k]]
        if changed:
            print(f"resuming with other values of {', '.join(changed)}: not the run that was interrupted", file=sys.stderr)
        return state

    def free_to_change(self) -> set[str]:
        fixed = set() if self.config.lr_schedule == "constant" else {"steps"}
        if os.path.isfile(self.config.dataset):  # which gives up rows for evaluation
            fixed |= {"eval_steps", "eval_prompts"}
        return FREE_TO_CHANGE - fixed

    def check_space(self) -> None:
        """Room for one checkpoint more than are kept (a new one is whole before an old one goes) and for the model."""

        def size(model: ParallelModel | None, trained: bool = False) -> int:  # of shards: the whole
            parameters = [] if model is None else list(model.model.parameters())
            return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad or not trained)

        model = size(self.policy)
        each = model + size(self.reference) + 2 * size(self.policy, trained=True)
        there = len(checkpoints.listed(self.folder.checkpoints))
        self.folder.check_space(model + each * max(self.config.keep_checkpoints + 1 - there, 1))

    def save_model(self, tokenizer: Any) -> None:
        """The policy and its tokenizer, as transformers loads them."""
        state = self.policy.state() if self.policy.sharded else None

        def write() -> None:
            self.policy.model.save_pretrained(self.folder.model, state_dict=state)
            tokenizer.save_pretrained(self.folder.model)

        self.ranks.on_main(write)
