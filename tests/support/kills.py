"""A run that is killed at random moments and resumed after each, in a process of its own: `main` forks the runs, so that each
starts with everything imported.

The moments are counted in file operations of the run, so that they are the same on a busy and on an idle machine. Between two of
them nothing changes on the disk but the end of a file that is written."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import datasets  # noqa: F401
import transformers.hf_argparser
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from grpo_kernels.__main__ import main as command_line

#: What is counted: before each of these something is not yet there that will be after it.
EVENTS = set("open os.rename os.remove os.mkdir os.rmdir os.truncate shutil.rmtree fcntl.flock fcntl.lockf".split())


def kill_at(metrics: Path, after: int, at: int) -> None:
    """Kills this process at event number `at` once `after` steps are written."""
    number, asking = 0, False

    def hook(event: str, _: Any) -> None:
        nonlocal number, asking
        if event in EVENTS and not asking:
            asking = True
            number += (metrics.read_bytes().count(b"\n") if metrics.exists() else 0) >= after
            asking = False
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run(argv: list[str], *kill: Any) -> int:
    """The status with which a process ends that runs this, and is killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if kill:
                kill_at(*kill)
            status = command_line(argv)
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def main(argv: list[str], folder: str, steps: int, kills: int, seed: int) -> None:
    """`argv` runs straight, and with kills, each after a step of its own; every fifth while the run still starts."""
    rng = random.Random(seed)
    sys.path.insert(0, folder)
    assert run([*argv, "--out", f"{folder}/straight"]) == 0
    argv = [*argv, "--resume", "--out", f"{folder}/killed"]
    for i in range(kills):
        after = 0 if i % 5 == 4 else 1 + (steps - 4) * i // kills
        ended = run(argv, Path(folder, "killed", "metrics.jsonl"), after, rng.randrange(1, 25))
        assert os.WIFSIGNALED(ended), "it ended before it was killed"
    assert run(argv) == 0
