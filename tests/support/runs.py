"""Run the reference trainer for a few steps on a tiny model, and read the files that it writes.

Model, data, rewards and options are passed in as a user would pass them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import numpy
import transformers
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from grpo_kernels.__main__ import main as command_line
from grpo_kernels.training.trainer import TrainConfig, Trainer

#: The metrics of a step, a line of the file metrics.jsonl.
Line = dict[str, Any]

# The trainer calls a reward function with the texts of prompts and completions, the ids of the
# completions, and the columns of its data set. The functions below ignore what they do not name.

#: Sums of two numbers, as text. Prompts have different lengths.
PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in (0, 11, 2, 3)]
#: (training rows, held-out rows)
ROWS = (PROMPTS[:16], PROMPTS[16:])


def tiny(tok: Any, seed: int = 0, **changes: Any) -> Any:
    """Return a Qwen3 model with one layer and random weights.

    tok       the tokenizer, which says the vocabulary size and the end token
    changes   fields of Qwen3Config that differ from the defaults here
    """
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
        initializer_range=0.1, eos_token_id=tok.eos_token_id, pad_token_id=tok.eos_token_id,
        bos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(settings | changes)))


def evens(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return a reward for each completion: its number of even digits, divided by 4.

    Completions of these runs have at most four characters. Many completions get a reward above 0,
    so that 30 steps of training raise it.
    """
    return [sum(character in "02468" for character in text) / 4 for text in completions]


def varied(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return a checksum of each completion's characters, in [0, 1), so that rewards differ."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def of_steps(
    prompts: list[str], completions: list[str], *, completion_ids: list[list[int]], **_: Any
) -> list[Any]:
    """Return process rewards: for each completion a list with a reward or None for each token.

    The first, third, ... token has the reward 1 for an even id and 0 for an odd id. The others have
    None, because no step ends there.
    """
    return [
        [
            float(token_id % 2 == 0) if position % 2 == 0 else None
            for position, token_id in enumerate(ids)
        ]
        for ids in completion_ids
    ]


def noisy(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Add noise from the global generators of random, numpy and torch to the rewards of `evens`.

    A resumed run only gets the same rewards if it restores all three generators.
    """
    noise = [
        random.random() + float(numpy.random.rand()) + torch.rand(()).item() for _ in completions
    ]
    scores = evens(prompts, completions)
    return [score + 0.1 * x for score, x in zip(scores, noise, strict=True)]


def seed(value: int) -> None:
    """Seed the global random generators of random, numpy and torch."""
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)


#: Larger than every element of the gradients of these runs, which are clipped to a norm of 1.
SMOOTH_EPS = 0.25
#: The handle of the hook that `smooth_optimizers` has registered, or nothing.
_smooth_hooks: list[RemovableHandle] = []


def smooth_optimizers() -> None:
    """Set AdamW's eps to 0.25 at each optimizer step of this process.

    `usual_optimizers` undoes this.

    With eps=1e-8, an element of the gradient that is mostly rounding error still moves its
    parameter by up to the learning rate, so that the parameters of two correct runs differ as much.
    If eps is larger than the gradients, the step is a smooth function of them, and parameters
    differ only as much as gradients.
    """

    def set_eps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Set eps before an optimizer step, and assert that all gradients are smaller.

        PyTorch also passes the arguments of `optimizer.step`, which are ignored.
        """
        for group in optimizer.param_groups:
            group["eps"] = SMOOTH_EPS
            for parameter in group["params"]:
                gradient = parameter.grad
                if isinstance(gradient, DTensor):
                    gradient = gradient.to_local()
                assert gradient is None or (gradient.abs() < SMOOTH_EPS).all(), (
                    "a gradient is above eps"
                )

    if not _smooth_hooks:
        _smooth_hooks.append(register_optimizer_step_pre_hook(set_eps))


def usual_optimizers() -> None:
    """Undo `smooth_optimizers`: optimizers use their own eps again."""
    while _smooth_hooks:
        _smooth_hooks.pop().remove()


def config(out: Path, **changes: Any) -> TrainConfig:
    """Return the configuration of a run of two steps that writes to the folder `out`.

    changes   fields that differ from the defaults here
    """
    settings = dict(
        steps=2, prompts_per_step=3, group_size=4, max_new_tokens=4, lr=1e-3, eval_steps=0,
        checkpoint_steps=0, out=str(out), progress=False, device="cpu",
    )  # fmt: skip
    return TrainConfig(**(settings | changes))


def trainer(
    tok: Any,
    out: Path,
    *,
    rewards: Any = (evens,),
    model: Any = None,
    rows: Any = ROWS,
    teacher: Any = None,
    trackers: Any = (),
    **changes: Any,
) -> Trainer:
    """Return a trainer for a tiny model, which writes to the folder `out`.

    tok        the tokenizer
    rewards    reward functions, which replace the rewards that the configuration names
    model      the policy; None: a new one from `tiny`
    rows       (training rows, held-out rows)
    teacher    a model, or the path of a model, which goes into the configuration
    trackers   passed on to the trainer
    changes    fields of the configuration, see `config`
    """
    # The configuration must name as many rewards as there are functions.
    settings: dict[str, Any] = {"rewards": ["exact"] * len(rewards)}
    if isinstance(teacher, str):
        teacher_model = None
        settings["teacher"] = teacher
    else:
        teacher_model = teacher
    return Trainer(
        config(out, **{**settings, **changes}),
        model=model or tiny(tok),
        tokenizer=tok,
        rows=rows,
        rewards=list(rewards),
        teacher=teacher_model,
        trackers=trackers,
    )


def on_disk(tok: Any, folder: Path) -> list[str]:
    """Save a tiny model and a data set, and return the command-line options that name them.

    folder   gets the folder "model", with the tokenizer `tok`, and the file "rows.jsonl"
    """
    tiny(tok).save_pretrained(folder / "model")
    tok.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return flags(model=folder / "model", dataset=folder / "rows.jsonl", device="cpu")


def flags(**options: Any) -> list[str]:
    """Return options as a list of command-line arguments: batch_size=4 gives --batch-size 4.

    A value with spaces becomes several arguments.
    """
    arguments = []
    for name, value in options.items():
        arguments.append(f"--{name.replace('_', '-')}")
        arguments += str(value).split()
    return arguments


def read(path: Path) -> list[Line]:
    """Return the lines of a JSONL file."""
    return [json.loads(text) for text in path.read_text().splitlines()]


def lines(out: Path) -> list[Line]:
    """Return the metrics of each step of a run, without times and memory.

    Two runs with the same configuration and seeds give equal lines.
    """
    varying = ("seconds", "per_second", "memory_gb")
    return [
        {name: value for name, value in line.items() if not name.endswith(varying)}
        for line in read(out / "metrics.jsonl")
    ]


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the model that a run has saved, loaded with transformers in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    return dict(model.state_dict())


def saved_steps(out: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((out / "checkpoints").glob("step-*"))


def saved(out: Path, which: int = -1) -> dict[str, Any]:
    """Load a checkpoint of a run, by default the newest.

    which   index into `saved_steps`
    """
    return torch.load(saved_steps(out)[which], weights_only=True)


#: Options that switch on everything that a checkpoint must save: reference model, schedules,
#: evaluation.
RUN: dict[str, Any] = dict(
    beta=0.1,
    ref_refresh_steps=2,
    num_updates=2,
    eval_steps=2,
    eval_prompts=4,
    warmup_steps=2,
    weight_decay=0.1,
)

# ---- a run that is killed at random moments and resumed after each, in separate processes

#: Audit events of Python (sys.addaudithook) that are raised before a change in the file system.
#: A process is killed at one of them: counting events, not seconds, gives the same moments on a
#: busy and on an idle machine. Between two events only the end of an open file may change.
EVENTS = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree",
    "fcntl.flock", "fcntl.lockf",
}  # fmt: skip


class _Kill(NamedTuple):
    """When a process kills itself: at an event, counted from the time when some steps are done."""

    metrics: Path  # the file to which the run appends a line for each step
    after_steps: int  # events count as soon as this number of lines is written
    at_event: int  # number of the event, from 1


class _KillHook:
    """An audit hook (sys.addaudithook) that kills its process as a `_Kill` says."""

    def __init__(self, kill: _Kill) -> None:
        """Begin to count events from 0."""
        self.kill = kill
        self.num_events = 0  # counted so far
        self.is_reading = False  # whether this hook reads the metrics at the moment

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count an event if it is one of EVENTS and `after_steps` steps are done.

        Python calls this before each event, with its arguments, which are not used.
        """
        # Reading the metrics raises an "open" event itself, which must not count.
        if event not in EVENTS or self.is_reading:
            return
        self.is_reading = True
        if self._num_steps() >= self.kill.after_steps:
            self.num_events += 1
        self.is_reading = False
        if self.num_events == self.kill.at_event:
            os.kill(os.getpid(), signal.SIGKILL)

    def _num_steps(self) -> int:
        """Return the number of steps that the run has written to its metrics."""
        metrics = self.kill.metrics
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _exit_status(argv: list[str], kill: _Kill | None = None) -> int:
    """Run the package's command line in a forked process, and return the status of os.waitpid.

    argv   the arguments of the command line
    kill   when the process kills itself; None: it runs to the end
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if kill is not None:
                sys.addaudithook(_KillHook(kill))
            status = command_line(argv)
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def killed(argv: list[str], folder: str, steps: int, kills: int, seed: int) -> None:
    """Run a command line without interruption in folder/straight, and with kills in folder/killed.

    After each kill the run is resumed, and after the last one it runs to its end. The kills are
    spread over the steps, at random events. Every fifth comes while the resumed run is still
    starting.

    argv    the command line without --out and --resume
    steps   how many steps the run has
    kills   how often it is killed
    seed    of the random events
    """
    # Imports open files too. The forked processes inherit these modules, so that they import
    # nothing.
    import transformers.hf_argparser
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    rng = random.Random(seed)
    sys.path.insert(0, folder)
    assert _exit_status([*argv, "--out", f"{folder}/straight"]) == 0
    argv = [*argv, "--resume", "--out", f"{folder}/killed"]
    for i in range(kills):
        kill = _Kill(
            metrics=Path(folder, "killed", "metrics.jsonl"),
            # Counting begins at least four steps before the end.
            after_steps=0 if i % 5 == 4 else 1 + (steps - 4) * i // kills,
            at_event=rng.randrange(1, 25),
        )
        assert os.WIFSIGNALED(_exit_status(argv, kill)), "it ended before it was killed"
    assert _exit_status(argv) == 0
