"""A run that is killed at random moments and resumed after each, in a process of its own: `main` forks the runs, so that each
starts with everything imported.

The moments are counted in file operations of the run, so that they are the same on a busy and on an idle machine. With times by the
clock, a kill may also come during a computation or a write."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


#: What is counted: before each of these something is not yet there that will be after it.
EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
    "fcntl.flock",
    "fcntl.lockf",
}


def count_events(metrics: Path, after: int, seen: Callable[[int], None]) -> None:
    """Calls `seen` at each event of this process once `after` steps are written, with its number."""
    number, asking = 0, False

    def hook(event: str, _: Any) -> None:
        nonlocal number, asking
        if event not in EVENTS or asking:
            return
        asking = True
        if steps_written(metrics) >= after:
            number += 1
            seen(number)
        asking = False

    sys.addaudithook(hook)


def fork(argv: list[str], prepare: Callable[[], None] = lambda: None) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            prepare()
            status = command_line(argv)
        finally:
            os._exit(status)
    return child


def alive(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG) == (0, 0)


def steps_written(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def step_of(i: int, steps: int, kills: int) -> int:
    """After which step the i-th run is killed; every fifth while it still starts."""
    return 0 if i % 5 == 4 else 1 + (steps - 4) * i // kills


def killed_by_events(argv: list[str], metrics: Path, steps: int, kills: int, rng: random.Random, a_step: int) -> int:
    """Kill `kills` runs, each within the events of three steps after one of its own; how many were."""
    done = 0
    for i in range(kills):
        last = rng.randrange(1, 3 * a_step)

        def kill(number: int, last: int = last) -> None:
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)

        child = fork(argv, lambda i=i, kill=kill: count_events(metrics, step_of(i, steps, kills), kill))
        done += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    return done


def killed_by_the_clock(argv: list[str], metrics: Path, steps: int, kills: int, rng: random.Random) -> int:
    """Kill `kills` runs, each at a random time after a step of its own; how many were."""
    done = 0
    for i in range(kills):
        child = fork(argv)
        target = step_of(i, steps, kills)
        delay = rng.uniform(0.0, 0.4 if target == 0 else 0.08)
        while (there := alive(child)) and steps_written(metrics) < target:
            time.sleep(0.001)
        time.sleep(delay)
        if there and alive(child):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            done += 1
    return done


def main(folder: str, steps: int, kills: int, seed: int, by: str) -> None:
    root, rng = Path(folder), random.Random(seed)
    sys.path.insert(0, folder)
    events, metrics = root / "events", root / "straight" / "metrics.jsonl"
    counting = os.open(events, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    straight = fork(
        arguments(root, root / "straight", steps), lambda: count_events(metrics, 1, lambda _: os.write(counting, b"."))
    )
    assert os.waitpid(straight, 0)[1] == 0
    a_step = events.stat().st_size // (steps - 1)
    assert a_step > 3, "a step that opens no file"
    argv, metrics = arguments(root, root / "killed", steps), root / "killed" / "metrics.jsonl"
    if by == "the clock":
        done = killed_by_the_clock(argv, metrics, steps, kills, rng)
    else:
        done = killed_by_events(argv, metrics, steps, kills, rng, a_step)
    assert done == kills, f"{kills - done} runs ended before they were killed"
    assert os.waitpid(fork(argv), 0)[1] == 0
