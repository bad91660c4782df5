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
import transformers.hf_argparser
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from grpo_kernels.__main__ import main as command_line

#: What is counted: before each of these something is not yet there that will be after it.
EVENTS = set("open os.rename os.remove os.mkdir os.rmdir os.truncate shutil.rmtree fcntl.flock fcntl.lockf".split())


def count_events(metrics: Path, after: int, seen: Callable[[int], None]) -> None:
    """Calls `seen` at each event of this process once `after` steps are written, with its number."""
    number, asking = 0, False

    def hook(event: str, _: Any) -> None:
        nonlocal number, asking
        if event in EVENTS and not asking:
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


def steps_written(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def killed(argv: list[str], metrics: Path, after: int, at: int) -> bool:
    """Whether a run ended by a kill at event number `at` after so many of its steps."""
    child = fork(argv, lambda: count_events(metrics, after, lambda n: n == at and os.kill(os.getpid(), signal.SIGKILL)))
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def killed_by_the_clock(argv: list[str], metrics: Path, after: int, delay: float) -> bool:
    child = fork(argv)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if steps_written(metrics) >= after:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            return os.WIFSIGNALED(os.waitpid(child, 0)[1])
        time.sleep(0.001)
    return False


def main(argv: list[str], folder: str, steps: int, kills: int, seed: int, clock: bool) -> None:
    """`argv` runs straight, and with kills, each after a step of its own; every fifth while the run still starts."""
    root, rng = Path(folder), random.Random(seed)
    sys.path.insert(0, folder)
    events, metrics = root / "events", root / "straight" / "metrics.jsonl"
    counting = os.open(events, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    straight = fork([*argv, "--out", f"{root}/straight"], lambda: count_events(metrics, 1, lambda _: os.write(counting, b".")))
    assert os.waitpid(straight, 0)[1] == 0
    a_step = events.stat().st_size // (steps - 1)
    assert a_step > 3, "a step that opens no file"
    argv, metrics = [*argv, "--resume", "--out", f"{root}/killed"], root / "killed" / "metrics.jsonl"
    for i in range(kills):
        after = 0 if i % 5 == 4 else 1 + (steps - 4) * i // kills
        if clock:
            assert killed_by_the_clock(argv, metrics, after, rng.uniform(0.0, 0.08 if after else 0.4))
        else:
            assert killed(argv, metrics, after, rng.randrange(1, 3 * a_step)), "it ended before it was killed"
    assert os.waitpid(fork(argv), 0)[1] == 0
