"""Short runs of the reference trainer on a tiny model, made and looked at as a user would:

options, rewards, files.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import numpy
import transformers
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grpo_kernels.__main__ import main as command_line
from grpo_kernels.training.trainer import TrainConfig, Trainer

Line = dict[str, Any]

#: Sums in characters, of two lengths.
PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in (0, 11, 2, 3)]
#: Training rows, held-out rows.
ROWS = (PROMPTS[:16], PROMPTS[16:])


def tiny(tok: Any, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, initializer_range=0.1,
        eos_token_id=tok.eos_token_id, pad_token_id=tok.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(settings | changes)))


def evens(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward, the share of even digits: dense enough that 30 steps raise it."""
    return [sum(c in "02468" for c in text) / 4 for text in completions]


def varied(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward that hardly two completions share."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def of_steps(
    prompts: list[str], completions: list[str], *, completion_ids: list[list[int]], **_: Any
) -> list[Any]:
    """A process reward at every other token."""
    return [
        [float(i % 2 == 0) if t % 2 == 0 else None for t, i in enumerate(ids)]
        for ids in completion_ids
    ]


def noisy(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Rewards that can only be reproduced with the state of all three shared random generators."""
    draws = [
        random.random() + float(numpy.random.rand()) + torch.rand(()).item() for _ in completions
    ]
    return [
        score + 0.1 * draw for score, draw in zip(evens(prompts, completions), draws, strict=True)
    ]


def seed(value: int) -> None:
    """Of the random generators that everybody in a process shares."""
    for each in (random.seed, numpy.random.seed, torch.manual_seed):
        each(value)


#: Above every element of the gradients of these runs, which are clipped to a norm of 1.
SMOOTH_EPS = 0.25
_smooth: list[Any] = []


def smooth_optimizers() -> None:
    """Set AdamW's eps to 0.25 at each optimizer step of this process, until `usual_optimizers` is
    called.

    With eps=1e-8 an element of the gradient that is mostly rounding error still moves its parameter
    by up to the learning rate, so that two right runs differ as far. With an eps above the
    gradients the step is a smooth function of them, and the parameters of two runs are as close as
    their gradients.
    """

    def set_eps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["eps"] = SMOOTH_EPS
            for p in group["params"]:
                gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                assert gradient is None or (gradient.abs() < SMOOTH_EPS).all(), (
                    "a gradient is above eps"
                )

    if not _smooth:
        _smooth.append(register_optimizer_step_pre_hook(set_eps))


def usual_optimizers() -> None:
    """End what `smooth_optimizers` began."""
    while _smooth:
        _smooth.pop().remove()


def config(out: Path, **changes: Any) -> TrainConfig:
    settings = dict(
        steps=2, prompts_per_step=3, group_size=4, max_new_tokens=4, lr=1e-3, eval_steps=0, checkpoint_steps=0, out=str(out),
        progress=False, device="cpu",
    )  # fmt: skip
    return TrainConfig(**(settings | changes))


def trainer(
    tok: Any, out: Path, *, rewards: Any = (evens,), model: Any = None, rows: Any = ROWS, teacher: Any = None, trackers: Any = (),
    **changes: Any,
) -> Trainer:  # fmt: skip
    """`teacher`: a model, or the path of one."""
    if isinstance(teacher, str):
        teacher, changes = None, changes | {"teacher": teacher}
    model, named = model or tiny(tok), {"rewards": ["exact"] * len(rewards)}
    return Trainer(
        config(out, **named | changes),
        model=model,
        tokenizer=tok,
        rows=rows,
        rewards=list(rewards),
        teacher=teacher,
        trackers=trackers,
    )


def on_disk(tok: Any, folder: Path) -> list[str]:
    """A model and a data set in files; what the command line says of them."""
    tiny(tok).save_pretrained(folder / "model")
    tok.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return flags(model=folder / "model", dataset=folder / "rows.jsonl", device="cpu")


def flags(**options: Any) -> list[str]:
    """Options as the command line takes them."""
    return [
        text
        for name, value in options.items()
        for text in (f"--{name.replace('_', '-')}", *str(value).split())
    ]


def read(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def lines(out: Path) -> list[Line]:
    """The metrics of a run, but for those that differ whenever it is run."""
    found = read(out / "metrics.jsonl")
    return [
        {k: v for k, v in x.items() if not k.endswith(("seconds", "per_second", "memory_gb"))}
        for x in found
    ]


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The model that a run has saved, as transformers loads it."""
    return dict(
        transformers.AutoModelForCausalLM.from_pretrained(
            out / "model", dtype=torch.float32
        ).state_dict()
    )


def saved_steps(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((out / "checkpoints").glob("step-*"))


def saved(out: Path, which: int = -1) -> dict[str, Any]:
    """The state in one of them, as a rule the newest."""
    return torch.load(saved_steps(out)[which], weights_only=True)


#: Everything that has a state.
RUN: dict[str, Any] = dict(
    beta=0.1,
    ref_refresh_steps=2,
    num_updates=2,
    eval_steps=2,
    eval_prompts=4,
    warmup_steps=2,
    weight_decay=0.1,
)

# ---- a run that is killed at random moments and resumed after each, in a process of its own

#: Events that are counted, so that the moments are the same on a busy and on an idle machine:
#: before each of these something is not yet there that will be after it. Between two of them
#: nothing changes on the disk but the end of a file that is written.
EVENTS = set(
    "open os.rename os.remove os.mkdir os.rmdir os.truncate shutil.rmtree fcntl.flock fcntl.lockf".split()
)


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


def ended_with(argv: list[str], *kill: Any) -> int:
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


def killed(argv: list[str], folder: str, steps: int, kills: int, seed: int) -> None:
    """`argv` runs straight, and with kills, each after a step of its own; every fifth while the run
    still starts.
    """
    import transformers.hf_argparser
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  # so that each run has everything imported

    rng = random.Random(seed)
    sys.path.insert(0, folder)
    assert ended_with([*argv, "--out", f"{folder}/straight"]) == 0
    argv = [*argv, "--resume", "--out", f"{folder}/killed"]
    for i in range(kills):
        after = 0 if i % 5 == 4 else 1 + (steps - 4) * i // kills
        ended = ended_with(
            argv, Path(folder, "killed", "metrics.jsonl"), after, rng.randrange(1, 25)
        )
        assert os.WIFSIGNALED(ended), "it ended before it was killed"
    assert ended_with(argv) == 0
