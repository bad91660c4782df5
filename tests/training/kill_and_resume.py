"""A run that is killed at random moments and resumed after each, in a process of its own: `main` forks the runs, so that each starts
with everything imported."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import datasets  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from grpo_kernels.__main__ import main as command_line

REWARDS = """
import random
import numpy
import torch

def noisy(prompts, completions, **_):
    draws = [random.random() + float(numpy.random.rand()) + torch.rand(()).item() for _ in completions]
    return [sum(c in "02468" for c in text) / 4 + 0.1 * draw for text, draw in zip(completions, draws)]
"""


def arguments(folder: Path, out: Path, steps: int) -> list[str]:
    """Of a run with everything that has a state: reference, optimizer, evaluations, several updates, random rewards."""
    options = dict(
        model=folder / "model", dataset=folder / "rows.jsonl", rewards="kill_rewards:noisy", out=out, steps=steps, seed=3,
        prompts_per_step=3, group_size=4, num_updates=2, max_new_tokens=4, lr=1e-3, beta=0.1, ref_refresh_steps=4, eval_steps=3,
        eval_prompts=5, entropy_target=2.0, checkpoint_steps=2, device="cpu",
    )  # fmt: skip
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return ["train", *(text for pair in pairs for text in pair), "--no-progress", "--resume"]


def fork(argv: list[str]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = command_line(argv)
        finally:
            os._exit(status)
    return child


def alive(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG) == (0, 0)


def steps_written(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def killed_runs(argv: list[str], metrics: Path, steps: int, kills: int, rng: random.Random) -> int:
    """Kill `kills` runs, each at a random time after a step of its own, every fifth while it still starts; how many were."""
    done = 0
    for i in range(kills):
        child = fork(argv)
        target = 0 if i % 5 == 4 else 1 + (steps - 4) * i // kills
        delay = rng.uniform(0.0, 0.4 if target == 0 else 0.08)
        while (there := alive(child)) and steps_written(metrics) < target:
            time.sleep(0.001)
        time.sleep(delay)
        if there and alive(child):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            done += 1
    return done


def main(folder: str, steps: int, kills: int, seed: int) -> None:
    root = Path(folder)
    sys.path.insert(0, folder)
    straight = fork(arguments(root, root / "straight", steps))
    assert os.waitpid(straight, 0)[1] == 0
    argv = arguments(root, root / "killed", steps)
    done = killed_runs(argv, root / "killed" / "metrics.jsonl", steps, kills, random.Random(seed))
    assert done == kills, f"{kills - done} runs ended before they were killed"
    assert os.waitpid(fork(argv), 0)[1] == 0
