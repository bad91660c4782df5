"""The reference trainer on two processes: the curve of one, whatever is split; checkpoints that go
anywhere; launchers.

All runs of two ranks are made by one pair of processes on gloo; what they leave is compared with
runs of one process here. Ranks have prompts, and so data, of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from examples.arithmetic import tokenizer
from grpo_kernels.__main__ import main as command_line
from support.processes import finish, start_ranks
from support.runs import (
    PROMPTS,
    evens,
    flags,
    lines,
    noisy,
    of_steps,
    on_disk,
    saved,
    saved_steps,
    seed,
    smooth_optimizers,
    tiny,
    trainer,
    usual_optimizers,
    varied,
    weights,
)

BEFORE_THE_RANKS = ("torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3")
ROOT = Path(__file__).parents[2]


def small_first(prompts, completions, **_):
    """Completions differ in reward where the problem starts with 0 or 1, nowhere else."""
    return [
        s if p[0] in "01" else 0.7
        for p, s in zip(prompts, varied(prompts, completions), strict=True)
    ]


#: Of the draft head in those runs.
RATE_OF_DRAFT = 0.01
#: Five prompts are three and two; in micro-batches of five completions three passes and two.
UNEVEN = dict(
    steps=4, prompts_per_step=5, micro_batch=5, num_updates=2, beta=0.1, ref_refresh_steps=2, eval_steps=2, eval_prompts=7,
    warmup_steps=2, weight_decay=0.1, draft_lr=RATE_OF_DRAFT,
)  # fmt: skip
#: With `smooth_optimizers` parameters move as far as at a usual rate without.
RATE = 0.03
#: What a run is, by name: its layout, reward functions, changes of the configuration.
RUNS = {
    "uneven": ("ddp", (evens,), UNEVEN),
    "shards": ("fsdp2", (evens,), UNEVEN),
    "masked": ("ddp", (small_first,), {"steps": 6, "prompts_per_step": 2, "drop_zero_variance": True, "preset": "dapo"}),
    "steps": (
        "fsdp2", (evens, of_steps),
        {"steps": 3, "advantage_scale": "batch", "entropy_target": 50.0, "gradient_checkpointing": True, "loss": "logits"},
    ),
    "tokens": (
        "fsdp2", (varied, of_steps),
        {"prompts_per_step": 5, "lr": 0.2, "advantages": "optimal_token", "micro_batch": 3, "top_p": 0.8, "replay": False,
         "corrections": ["tis:high=0.9,normalize=True", "without_truncated"]},
    ),
    "sets": (
        "ddp", (varied, of_steps),
        {"prompts_per_step": 5, "micro_batch": 5, "num_updates": 2, "beta": 0.1, "advantages": "optimal_token", "top_k": 12,
         "top_p": 0.9, "min_p": 0.01, "ratio_to": "sampler"},
    ),
    "quantile": ("ddp", (evens,), {"entropy_share": 0.3}),
}  # fmt: skip


def make(out, name, *, own=0, rewards=None, **changes):
    _, functions, options = RUNS[name]
    model = tiny(tokenizer(), own, tie_word_embeddings=name == "steps")
    return trainer(
        tokenizer(),
        out,
        model=model,
        rewards=rewards or functions,
        **{"lr": RATE} | options | changes,
    )


def run(out, name, **changes):
    t = make(out, name, **changes)
    assert t.train()
    return t


# ---- in the two processes


def layouts(folder, rank):
    """Rank 1 brings another model, which must not matter; what a rank has at the end is what the
    other has.
    """
    for name, (layout, *_) in RUNS.items():
        t = run(folder / name, name, parallel=layout, own=rank)
        kinds = {type(p).__name__ for p in t.model.parameters()}
        assert kinds == {"Parameter" if layout == "ddp" else "DTensor"}, kinds
        if layout == "ddp":
            first, second = t.ranks.gather(
                float(sum(p.detach().double().abs().sum() for p in t.model.parameters()))
            )
            assert first == second
    # Without a prompt to evaluate a rank samples all the same, and has nothing.
    completions = make(folder / "one row", "uneven", own=rank).rollouts.sample(
        [PROMPTS[0] | {"prompt_ids": [1, 2]}], 3
    )
    assert len(completions.ids) == len(completions.tokens) == (0 if rank else 3)


def continued(folder, rank):
    """Runs of two steps, and what goes on from them:

    the other layout, a damaged checkpoint, another number of processes.
    """
    again = {"resume": True, "own": 5, "checkpoint_steps": 1}
    for layout in ("ddp", "fsdp2"):
        run(folder / f"half {layout}", "uneven", parallel=layout, steps=2, checkpoint_steps=1)
    if rank == 0:
        shutil.copytree(folder / "half ddp", folder / "ddp then fsdp2")
        for layout in ("ddp", "fsdp2"):
            shutil.copytree(folder / f"half {layout}", folder / f"{layout} then one")
        os.truncate(saved_steps(folder / "half ddp")[-1], 100)
    dist.barrier()
    for name in ("half ddp", "half fsdp2", "ddp then fsdp2", "one then fsdp2"):
        run(folder / name, "uneven", parallel=name.split()[-1], **again)
    # Rewards of random numbers that each rank draws for itself.
    for name, count, resume in (
        ("noisy", 3, False),
        ("noisy again", 2, False),
        ("noisy again", 3, True),
    ):
        seed(1000 + rank if resume else 7 + rank)
        run(folder / name, "uneven", parallel="fsdp2", rewards=[noisy], steps=count, resume=resume)


def stopped(folder, rank):
    """A signal that one rank alone gets, and a reward function that fails on one rank alone."""
    found = {}

    def evens_at(act):
        """Something happens on rank 1 at the third call that is no evaluation."""
        calls = []

        def evens_(prompts, completions, **_):
            calls.extend([1] * (len(completions) in (8, 12)))
            if len(calls) == 3 and rank == 1:
                act()
            return evens(prompts, completions)

        evens_.__name__ = "evens"
        return evens_

    def gone():
        raise RuntimeError("the grader is gone")

    t = make(
        folder / "signal",
        "uneven",
        rewards=[evens_at(lambda: os.kill(os.getpid(), signal.SIGTERM))],
    )
    found["signal"] = [t.train(), len(lines(t.out)), t.stopped_by]
    with pytest.raises(RuntimeError) as caught:
        make(folder / "grader", "uneven", rewards=[evens_at(gone)], parallel="fsdp2").train()
    found["grader"] = str(caught.value)
    return found


def main(rank, path, argv, port):
    torch.set_num_threads(1)
    folder = Path(path)
    smooth_optimizers()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    layouts(folder, rank)
    continued(folder, rank)
    torch.save(stopped(folder, rank), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
    }
    sys.path.insert(0, path)
    command_line(["train", *argv])  # which ends the process


# ---- the tests


@pytest.fixture(scope="module", autouse=True)
def smooth():
    """The optimizers of this process are those of the two processes."""
    smooth_optimizers()
    yield
    usual_optimizers()


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """What two processes leave; the last of it is a run from the command line."""
    folder = tmp_path_factory.mktemp("ranks")
    run(folder / "one then fsdp2", "uneven", steps=2)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    finish(
        start_ranks(
            2, main, str(folder), command(folder, out=folder / "command", parallel="fsdp2"), port
        )
    )
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    for name in RUNS:
        if name == "shards":
            shutil.copytree(folder / "uneven", folder / name)
        else:
            run(folder / name, name)
    return folder


def assert_same_run(got, want):
    """The same curve and the same parameters but for rounding.

    `test_a_step_is_the_plain_one` allows an fp32 gradient a relative error of 1e-4 against float64,
    so two runs may differ by 2e-4. An update m / (sqrt(v) + eps) with eps above every gradient is
    at most four times as sensitive, relative to the distance that a parameter moves: twice because
    both moments carry the error, twice because sqrt(v) is at most eps. Metrics may differ by twice
    what that test allows them, and by what the parameters add.
    """
    pairs = [*zip(lines(got), lines(want), strict=True)]
    assert pairs
    for found, expected in pairs:
        if want.name == "quantile":  # of which "kept" says nothing where it is one over ranks
            expected.pop("kept", None)
        assert found == pytest.approx(expected, rel=1e-3, abs=2e-5)
    start = tiny(tokenizer(), tie_word_embeddings=want.name == "steps").state_dict()
    found, expected = weights(got), weights(want)
    moved = {name: (value - start[name]).norm() for name, value in expected.items()}
    whole = torch.stack([*moved.values()]).norm()
    assert found.keys() == moved.keys() and whole > 0.05
    for name, distance in moved.items():
        error = (found[name] - expected[name]).norm()
        assert error <= 1e-3 * (distance + 0.01 * whole), (name, float(error), float(distance))


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_curve_and_parameters_are_those_of_one_process(folder, alone, name):
    assert_same_run(folder / name, alone / name)


def test_the_runs_hold_the_cases_that_they_are_about(alone):
    """Steps without any advantage, and with one on one rank only; a ratio that is not 1; sets; else
    a gradient in every step.
    """
    assert {line["dropped"] for line in lines(alone / "masked")} >= {0.875, 0.5}
    for name in RUNS:
        assert name == "masked" or all(
            line["grad_norm"] > 0.1 for line in lines(alone / name) if "grad_norm" in line
        ), name
    for line in [*lines(alone / "uneven")[1:-1], *lines(alone / "sets")]:
        assert line["ratio_max"] > 1 + 1e-3


@pytest.mark.parametrize("name", ["half ddp", "half fsdp2", "ddp then fsdp2", "one then fsdp2"])
def test_a_run_goes_on_with_two_processes(folder, alone, name):
    """From a checkpoint before the damaged newest, of the same layout, of the other one, of one
    process.
    """
    assert_same_run(folder / name, alone / "uneven")


@pytest.mark.parametrize("name", ["ddp then one", "fsdp2 then one", "signal", "grader"])
def test_a_run_of_two_processes_goes_on_with_one(folder, alone, name):
    run(folder / name, "uneven", resume=True, own=5)
    assert_same_run(folder / name, alone / "uneven")


def test_a_resumed_run_of_two_processes_is_bitwise_the_same(folder):
    """The random states of both come back."""
    assert (
        lines(folder / "noisy again") == lines(folder / "noisy")
        and len(lines(folder / "noisy")) == 4
    )
    want = weights(folder / "noisy")
    assert all(
        torch.equal(value, want[name]) for name, value in weights(folder / "noisy again").items()
    )


def test_what_happens_to_one_process_happens_to_all(folder):
    first, second = (torch.load(folder / f"rank{rank}.pt") for rank in (0, 1))
    assert first["signal"] == second["signal"] == [False, 3, signal.SIGTERM]
    assert second["grader"] == "reward evens raised RuntimeError: the grader is gone"
    assert first["grader"] == f"process 1 of the run failed: RuntimeError: {second['grader']}"


# ---- launchers


def command(folder, **changes):
    """Options of `python -m grpo_kernels train`, with a model, a data set and a reward function on
    disk.
    """
    (folder / "launch_rewards.py").write_text(
        "from support.runs import evens, smooth_optimizers\n\nsmooth_optimizers()\n"
    )
    options = dict(
        rewards="launch_rewards:evens", prompts_per_step=3, group_size=4, max_new_tokens=4, lr=RATE, beta=0.1, micro_batch=5,
        eval_steps=2, eval_prompts=5, steps=3,
    )  # fmt: skip
    return [*on_disk(tokenizer(), folder), *flags(**options | changes), "--no-progress"]


def assert_as_alone(folder, out, monkeypatch):
    """What two processes have left in `out` is the run of one."""
    monkeypatch.syspath_prepend(folder)
    alone = folder / "command-alone"
    assert command_line(["train", *command(folder, out=alone)]) == 0
    assert_same_run(out, alone)
    state = saved(out)
    assert len(state["rng"]) == 2 and state["config"]["parallel"] == "fsdp2"


def test_a_run_of_two_processes_from_the_command_line(folder, monkeypatch):
    """With the environment that torchrun makes."""
    assert_as_alone(folder, folder / "command", monkeypatch)


def launch(arguments, folder, **environment):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(folder), *filter(None, sys.path)])
    variables = {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHON": sys.executable,
    } | environment
    return subprocess.Popen(
        arguments,
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


#: accelerate's own --cpu starts one process, whatever --num_processes says.
LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc-per-node 2",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(tmp_path, monkeypatch, launcher):
    module, *rest = LAUNCHERS[launcher].split()
    pytest.importorskip(module.partition(".")[0])
    arguments = command(tmp_path, out=tmp_path / "run", parallel="fsdp2")
    finish(
        launch(
            [sys.executable, "-m", module, *rest, "-m", "grpo_kernels", "train", *arguments],
            tmp_path,
        )
    )
    assert_as_alone(tmp_path, tmp_path / "run", monkeypatch)
