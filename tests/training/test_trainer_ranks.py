"""The reference trainer on two processes: the curve of one, whatever is split; checkpoints that go anywhere; launchers.

All runs of two ranks are made by one pair of processes on gloo, which write what they found; the tests compare it with runs of one
process here. Ranks have prompts, and so data, of their own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import numpy

from examples.arithmetic import tokenizer as arithmetic_tokenizer
from grpo_kernels.__main__ import main as command_line
from grpo_kernels.training import checkpoints, randomness, report
from grpo_kernels.training.loading import pick_device
from grpo_kernels.training.ranks import Ranks
from grpo_kernels.training.report import read_metrics
from grpo_kernels.training.trainer import Trainer
from support.processes import finish, start, start_ranks
from support.runs import PROMPTS, config, evens, lines, tiny

BEFORE_THE_RANKS = ("torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3")
Tensor = torch.Tensor
ROOT = Path(__file__).parents[2]


def small_first(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Completions differ in reward where the problem starts with 0 or 1, nowhere else."""
    return [s if p[0] in "01" else 0.7 for p, s in zip(prompts, evens(prompts, completions), strict=True)]


def noisy(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """With numbers that each rank draws for itself."""
    noise = [random.random() + float(numpy.random.rand()) + torch.rand(()).item() for _ in completions]
    return [score + 0.1 * n for score, n in zip(evens(prompts, completions), noise, strict=True)]


def steps(prompts: list[str], completions: list[str], *, completion_ids: list[list[int]], **_: Any) -> list[list[Any]]:
    return [[float(i % 2 == 0) if t % 2 == 0 else None for t, i in enumerate(ids)] for ids in completion_ids]


#: Five prompts are three and two; in micro-batches of five completions three passes and two.
UNEVEN: dict[str, Any] = dict(
    steps=5, prompts_per_step=5, micro_batch=5, num_updates=2, beta=0.1, ref_refresh_steps=2, eval_steps=2, eval_prompts=7,
    warmup_steps=2, weight_decay=0.1,
)  # fmt: skip
#: What a run is, by name: changes of the configuration, of the model, reward functions.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any]]] = {
    "uneven": (UNEVEN, {}, [evens]),
    "masked": ({"steps": 6, "prompts_per_step": 2, "drop_zero_variance": True, "preset": "dapo"}, {}, [small_first]),
    "process": (
        {"steps": 4, "advantage_scale": "batch", "entropy_target": 50.0, "gradient_checkpointing": True, "loss": "logits"},
        {"tie_word_embeddings": True}, [evens, steps],
    ),
    "tokens": (
        {"steps": 2, "prompts_per_step": 5, "advantages": "optimal_token", "micro_batch": 3, "top_p": 0.8, "replay": False,
         "corrections": ["tis:high=0.9,normalize=True", "without_truncated"]},
        {}, [evens, steps],
    ),
    "sets": (
        {"steps": 3, "prompts_per_step": 5, "micro_batch": 5, "num_updates": 2, "beta": 0.1, "advantages": "optimal_token",
         "top_k": 12, "top_p": 0.9, "min_p": 0.01, "ratio_to": "sampler", "entropy_over": "vocabulary"},
        {}, [evens, steps],
    ),
    "greedy": ({"steps": 2, "advantages": "remax", "corrections": ["sequence_mask"], "top_k": 9}, {}, [evens]),
    "quantile": ({"steps": 3, "entropy_share": 0.3, "eval_steps": 2, "eval_prompts": 1, "eval_temperature": 1.0}, {}, [evens]),
}  # fmt: skip


#: Each run in one layout, those that look at shards in both; the others with -m slow.
LAYOUTS = [
    ("uneven", "ddp"), ("uneven", "fsdp2"), ("masked", "ddp"), ("process", "fsdp2"), ("tokens", "fsdp2"), ("sets", "ddp"),
    ("greedy", "fsdp2"), ("quantile", "ddp"),
]  # fmt: skip
OTHER_LAYOUTS = [(name, parallel) for name in RUNS for parallel in ("ddp", "fsdp2") if (name, parallel) not in LAYOUTS]


def make(out: Path, name: str, *, rewards: Any = None, seed: int = 0, **changes: Any) -> Trainer:
    options, model, functions = RUNS[name]
    tok = arithmetic_tokenizer()
    return Trainer(
        config(out, **(options | changes)),
        model=tiny(tok, seed, **model), tokenizer=tok, rows=(PROMPTS[:16], PROMPTS[16:]), rewards=list(rewards or functions),
    )  # fmt: skip


def result(t: Trainer) -> dict[str, Any]:
    """What rank 0 has: curve and whole parameters."""
    return {"lines": lines(t.out) if t.ranks.main else [], "parameters": t.policy.state()}


def run(out: Path, name: str, **changes: Any) -> dict[str, Any]:
    t = make(out, name, **changes)
    assert t.train()
    return result(t)


# ---- in the two processes


def run_layouts(folder: Path, rank: int, chosen: list[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parallel in chosen:
        # Rank 1 brings another model, which must not matter.
        t = make(folder / f"{name} {parallel}", name, parallel=parallel, seed=rank)
        assert t.policy.layout == parallel and t.ranks.world == 2
        kinds = {type(p).__name__ for p in t.model.parameters()}
        assert kinds == {"Parameter" if parallel == "ddp" else "DTensor"}, kinds
        assert t.train()
        own = float(sum(p.detach().double().abs().sum() for p in t.model.parameters())) if parallel == "ddp" else 0.0
        found[f"{name} {parallel}"] = result(t) | {"own": t.ranks.gather(own)}
    return found


def layouts(folder: Path, rank: int) -> dict[str, Any]:
    return run_layouts(folder, rank, LAYOUTS)


def other_layouts(folder: Path, rank: int) -> dict[str, Any]:
    return run_layouts(folder, rank, OTHER_LAYOUTS)


def half_precision(folder: Path, rank: int) -> dict[str, Any]:
    changes = {"dtype": "bfloat16", "gradient_checkpointing": True, "steps": 2, "eval_steps": 0}
    return {
        f"bf16 {parallel}": run(folder / f"bf16 {parallel}", "uneven", parallel=parallel, **changes)
        for parallel in ("ddp", "fsdp2")
    }


def continued(folder: Path, rank: int) -> dict[str, Any]:
    """Runs of three steps, and what goes on from them: the same bitwise, the other layout, a damaged checkpoint."""
    found: dict[str, Any] = {}
    for parallel in ("ddp", "fsdp2"):
        run(folder / f"half {parallel}", "uneven", parallel=parallel, steps=3, checkpoint_steps=1)
    if rank == 0:
        for name in ("ddp then fsdp2", "damaged", "ddp then one"):
            shutil.copytree(folder / "half ddp", folder / name)
        shutil.copytree(folder / "half fsdp2", folder / "fsdp2 then one")
        _, newest = checkpoints.listed(folder / "damaged" / "checkpoints")
        os.truncate(newest / "state.pt", 100)
    dist.barrier()
    torch.manual_seed(99 + rank)
    again = {"resume": True, "seed": 5, "steps": 5, "checkpoint_steps": 1}
    for name, parallel in (("half ddp", "ddp"), ("half fsdp2", "fsdp2"), ("ddp then fsdp2", "fsdp2"), ("damaged", "ddp")):
        found[name] = run(folder / name, "uneven", parallel=parallel, **again)
    found["one then fsdp2"] = run(folder / "one then fsdp2", "uneven", parallel="fsdp2", **again)
    return found


def random_states(folder: Path, rank: int) -> dict[str, Any]:
    RUNS["noisy"] = ({**UNEVEN, "steps": 4, "checkpoint_steps": 2, "parallel": "fsdp2"}, {}, [noisy])
    randomness.seed(7 + rank)
    straight = run(folder / "noisy", "noisy")
    randomness.seed(7 + rank)
    run(folder / "noisy again", "noisy", steps=2)
    randomness.seed(1000 + rank)
    return {"noisy": straight, "noisy again": run(folder / "noisy again", "noisy", resume=True)}


def stopped(folder: Path, rank: int) -> dict[str, Any]:
    """A signal that one rank alone gets, and a reward function that fails on one rank alone."""
    calls: list[int] = []

    def counted(prompts: list[str], completions: list[str], act: Callable[[], None]) -> list[float]:
        if len(completions) in (8, 12):  # no evaluation
            calls.append(rank)
        if len(calls) == 3 and rank == 1:
            act()
        return evens(prompts, completions)

    @wraps(evens)
    def interrupting(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return counted(prompts, completions, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def gone() -> None:
        raise RuntimeError("the grader is gone")

    @wraps(evens)
    def failing(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return counted(prompts, completions, gone)

    t = make(folder / "signal", "uneven", rewards=[interrupting])
    found: dict[str, Any] = {"signal": [t.train(), t.step, t.stopped_by]}
    calls.clear()
    t = make(folder / "grader", "uneven", rewards=[failing], parallel="fsdp2")
    try:
        t.train()
    except RuntimeError as error:
        found["grader"] = [str(error), t.step, len(checkpoints.listed(folder / "grader" / "checkpoints"))]
    return found


def refused(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"refused": []}
    if rank == 0:
        (folder / "file").write_text("")
    dist.barrier()
    for out, changes in ((folder / "refused", {"prompts_per_step": 1}), (folder / "file" / "run", {})):
        try:
            make(out, "uneven", **changes)
        except ValueError as error:
            found["refused"].append(str(error))
    return found


PARTS = (layouts, half_precision, continued, random_states, stopped, refused)


def main(rank: int, path: str, others: bool = False) -> None:
    torch.set_num_threads(1)
    report.plot = lambda metrics, picture: picture.write_bytes(b"")  # as in the tests' own process: no test looks at it
    folder = Path(path)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for part in (other_layouts,) if others else PARTS:
        began = time.perf_counter()
        results |= part(folder, rank)
        print(part.__name__, time.perf_counter() - began, flush=True)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()


# ---- the tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run(folder / "one then fsdp2", "uneven", steps=3)
    finish(start_ranks(2, main, str(folder)))
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def other_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("others")
    finish(start_ranks(2, main, str(folder), True))
    return torch.load(folder / "rank0.pt")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return {name: run(folder / f"{name} alone", name) for name in RUNS}


def assert_same_run(got: dict[str, Any], want: dict[str, Any], *, start: int = 0) -> None:
    """The same curve, from step `start` on, and the same parameters but for rounding."""
    assert_same_curve(got["lines"], want["lines"], start=start)
    assert got["parameters"].keys() == want["parameters"].keys()
    for name, value in want["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], value, rtol=1e-5, atol=5e-6)


def assert_same_curve(got: list[dict[str, Any]], want: list[dict[str, Any]], *, start: int = 0) -> None:
    assert [line["step"] for line in got] == [line["step"] for line in want] and len(want) > start
    for found, expected in zip(got[start:], want[start:], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name, parallel", LAYOUTS)
def test_curve_and_parameters_are_those_of_one_process(ranks: Any, alone: Any, name: str, parallel: str) -> None:
    assert_as_alone(ranks[0][f"{name} {parallel}"], alone[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name, parallel", OTHER_LAYOUTS)
def test_curve_and_parameters_in_the_other_layout(other_ranks: Any, alone: Any, name: str, parallel: str) -> None:
    assert_as_alone(other_ranks[f"{name} {parallel}"], alone[name], name)


def assert_as_alone(got: dict[str, Any], want: dict[str, Any], name: str) -> None:
    if name == "quantile":  # of which "kept" says nothing where it is one over ranks
        want = want | {"lines": [{k: v for k, v in line.items() if k != "kept"} for line in want["lines"]]}
    assert_same_run(got, want)
    assert got["own"][0] == got["own"][1]


def test_the_runs_hold_the_cases_that_they_are_about(alone: Any) -> None:
    """Steps without any advantage, and with one on one rank only; a KL; a ratio that is not 1; an evaluation; sets."""
    assert {line["dropped"] for line in alone["masked"]["lines"]} >= {0.875, 0.5}
    curve = alone["uneven"]["lines"]
    assert all(line["kl"] > 1e-6 and line["ratio_max"] > 1 + 1e-3 for line in curve[1:-1]) and "accuracy" in curve[-1]
    assert [line["entropy_coef"] for line in alone["process"]["lines"]][-1] > 0
    assert all(line["kept_mass"] < 0.95 and line["ratio_max"] > 1 + 1e-3 for line in alone["sets"]["lines"])


def test_half_precision(ranks: Any, folder: Path) -> None:
    """The two layouts compute the same. One process multiplies matrices of other shapes, and rounds them in its own way."""
    ddp, fsdp2 = ranks[0]["bf16 ddp"], ranks[0]["bf16 fsdp2"]
    assert_same_run(ddp, fsdp2)
    changes = {"dtype": "bfloat16", "gradient_checkpointing": True, "steps": 2, "eval_steps": 0}
    for alone in (run(folder / "bf16 alone", "uneven", **changes), run(folder / "fp32", "uneven", steps=2, eval_steps=0)):
        for name in ("reward", "entropy", "grad_norm"):
            assert ddp["lines"][0][name] == pytest.approx(alone["lines"][0][name], rel=3e-2), name
    assert ddp["lines"][0]["grad_norm"] != alone["lines"][0]["grad_norm"]  # of fp32


@pytest.mark.parametrize("name", ["half ddp", "half fsdp2", "ddp then fsdp2", "damaged", "one then fsdp2"])
def test_a_run_goes_on_with_two_processes(ranks: Any, alone: Any, name: str) -> None:
    """From a checkpoint of the same layout, of the other one, of one process, and of the one before the damaged newest."""
    assert_same_run(ranks[0][name], alone["uneven"])


@pytest.mark.parametrize("name", ["ddp then one", "fsdp2 then one"])
def test_a_run_of_two_processes_goes_on_with_one(folder: Path, ranks: Any, alone: Any, name: str) -> None:
    assert_same_run(run(folder / name, "uneven", resume=True, seed=5), alone["uneven"])


def test_a_resumed_run_of_two_processes_is_bitwise_the_same(ranks: Any) -> None:
    """With rewards of random numbers that each rank draws for itself: the random states of both come back."""
    straight, again = ranks[0]["noisy"], ranks[0]["noisy again"]
    assert again["lines"] == straight["lines"] and len(straight["lines"]) == 5
    assert all(torch.equal(again["parameters"][name], value) for name, value in straight["parameters"].items())


def test_the_model_of_a_sharded_run_is_whole(folder: Path, ranks: Any) -> None:
    import transformers

    for name in ("uneven fsdp2", "process fsdp2"):  # untied and tied
        saved = transformers.AutoModelForCausalLM.from_pretrained(folder / name / "model").state_dict()
        assert type(transformers.AutoConfig.from_pretrained(folder / name / "model")).__name__ == "Qwen3Config"
        assert all(torch.equal(saved[n], value) for n, value in ranks[0][name]["parameters"].items())


def test_a_signal_to_one_process_stops_all_after_the_step(folder: Path, ranks: Any, alone: Any) -> None:
    assert [r["signal"] for r in ranks] == 2 * [[False, 3, signal.SIGTERM]]
    assert_same_run(run(folder / "signal", "uneven", resume=True, seed=5), alone["uneven"])


def test_a_reward_that_fails_on_one_process_fails_all_and_keeps_the_steps(folder: Path, ranks: Any, alone: Any) -> None:
    said = ranks[1]["grader"][0]
    assert (
        said.startswith("reward evens raised RuntimeError: the grader is gone\nWith completion 0 of 8 alone")
        and "prompt" in said
    )
    assert ranks[1]["grader"] == [said, 2, 1]
    assert ranks[0]["grader"] == [f"process 1 of the run failed: RuntimeError: {said}", 2, 1]
    assert_same_run(run(folder / "grader", "uneven", resume=True, seed=5), alone["uneven"])


def test_refusals_reach_all_processes(ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        few, unwritable = found["refused"]
        assert few.startswith("prompts_per_step=1: the 2 processes of this run take a prompt each")
        assert "cannot be written" in unwritable and unwritable.startswith("process 0 of the run failed: " if rank else "out=")


def test_shares_are_whole_and_in_order() -> None:
    ranks, parts = Ranks(torch.device("cpu")), []
    assert ranks.share(7) == slice(0, 7) and ranks.gather("x") == ["x"] and ranks.main
    ranks.world = 3
    for ranks.rank in range(3):
        parts.append([list(range(n))[ranks.share(n)] for n in (7, 3, 2)])
    assert parts == [[[0, 1, 2], [0], [0]], [[3, 4], [1], [1]], [[5, 6], [2], []]]


def test_each_process_of_a_machine_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 4), ("current_device", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:3") and pick_device("cuda:1").index == 1
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:2") and pick_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a launcher that hides the devices of the others
    assert pick_device("cuda") == torch.device("cuda:0")
    with pytest.raises(ValueError, match="device='cuda:1': of several processes each has a device of its own"):
        pick_device("cuda:1")


# ---- launchers

REWARDS = "def evens(prompts, completions, **_):\n    return [sum(c in '02468' for c in text) / 4 for text in completions]\n"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Arguments of `python -m grpo_kernels train`: a model, a data set and a reward function on disk."""
    folder, tok = tmp_path_factory.mktemp("launch"), arithmetic_tokenizer()
    tiny(tok).save_pretrained(folder / "model")
    tok.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (folder / "launch_rewards.py").write_text(REWARDS)
    options = dict(
        model=folder / "model", dataset=folder / "rows.jsonl", rewards="launch_rewards:evens", prompts_per_step=3, group_size=4,
        max_new_tokens=4, lr=1e-3, beta=0.1, micro_batch=5, eval_steps=2, eval_prompts=5, device="cpu",
    )  # fmt: skip

    def arguments(**changes: Any) -> list[str]:
        pairs = (("--" + name.replace("_", "-"), str(value)) for name, value in (options | changes).items())
        return [text for pair in pairs for text in pair] + ["--no-progress"]

    return arguments


def launch(arguments: list[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
    folder = Path(arguments[arguments.index("--dataset") + 1]).parent
    paths = os.pathsep.join([str(ROOT), str(folder), *filter(None, sys.path)])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHON": sys.executable} | environment
    return subprocess.Popen(
        arguments, cwd=cwd, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def launched_alone(command: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    arguments = command(out=tmp_path_factory.mktemp("alone") / "run", steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(arguments[arguments.index("--dataset") + 1]).parent)
        assert command_line(["train", *arguments]) == 0
    return lines(Path(arguments[arguments.index("--out") + 1]))


#: accelerate's own --cpu starts one process, whatever --num_processes says.
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
}


#: accelerate starts the processes by torchrun, so that one of the two is enough where it has to be quick.
@pytest.mark.parametrize(
    "launcher, parallel", [("torchrun", "fsdp2"), pytest.param("accelerate", "fsdp2", marks=pytest.mark.slow)]
)
def test_launchers(command: Any, launched_alone: Any, tmp_path: Path, launcher: str, parallel: str) -> None:
    if launcher == "accelerate":
        pytest.importorskip("accelerate")
    arguments = ["-m", "grpo_kernels", "train", *command(out=tmp_path / "run", steps=3, parallel=parallel)]
    finish(launch([sys.executable, "-m", *LAUNCHERS[launcher], *arguments], tmp_path))
    assert_same_curve(lines(tmp_path / "run"), launched_alone)
    state, _ = checkpoints.load_newest(tmp_path / "run" / "checkpoints")
    assert len(state["rng"]) == 2 and state["config"]["parallel"] == parallel
    assert (tmp_path / "run" / "model" / "model.safetensors").exists() and (tmp_path / "run" / "curves.png").exists()


#: Of Slurm's commands, what the batch script uses, for one node: tasks, their names, signals to them.
SLURM = {
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi',
    "scancel": "kill -TERM $(cat tasks)",
    "srun": """
shift
: > tasks
for i in 0 1; do
  SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=2 "$@" &
  echo $! >> tasks
done
status=0
for task in $(cat tasks); do wait $task || status=$?; done
exit $status
""",
}


@pytest.mark.slow
def test_the_batch_script_of_slurm(command: Any, tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands: a job that is told of its end saves and goes back into the queue, and then goes on."""
    script = ROOT / "examples" / "train.slurm"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text("#!/bin/bash\n" + text)
        (tmp_path / "bin" / name).chmod(0o755)

    def job(steps: int) -> subprocess.Popen[str]:
        arguments = command(steps=steps, checkpoint_steps=0, eval_steps=0)
        return launch(
            ["bash", str(script), *arguments], tmp_path, PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            SLURM_JOB_ID=str(os.getpid()), SLURM_JOB_NODELIST="here", OUT=str(tmp_path / "run"),
        )  # fmt: skip

    metrics, first = tmp_path / "run" / "metrics.jsonl", job(10_000)
    deadline = time.monotonic() + 200
    while not (metrics.exists() and len(read_metrics(metrics)) >= 2) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)
    finish(first)
    done = len(lines(tmp_path / "run"))
    assert (tmp_path / "requeued").read_text().split() == ["requeue", str(os.getpid())] and done >= 2
    (saved,) = checkpoints.listed(tmp_path / "run" / "checkpoints")
    assert saved.name == f"step-{done:08d}"
    finish(job(done + 2))
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(done + 2))
    assert (tmp_path / "run" / "model").exists() and len((tmp_path / "requeued").read_text().splitlines()) == 1


def test_one_signal_passed_on_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_kernels.training import stopping

    now = [100.0]
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now[0]))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background of a shell ignores it
    try:
        with stopping.stop_after_step() as received:
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += stopping.ECHO
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
            now[0] += 0.1
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ray_train(tmp_path: Path) -> None:
    """Two workers of Ray and one process run the same steps."""
    pytest.importorskip("ray.train.torch")
    code = "import sys; from examples.ray_train import main; sys.exit(main(sys.argv[1:]))"
    finish(start(code, "--steps", "3", "--out", str(tmp_path / "two"), RAY_DEDUP_LOGS="0"))
    state, _ = checkpoints.load_newest(tmp_path / "two" / "checkpoints")
    assert len(state["rng"]) == 2
    from examples.ray_train import make_trainer

    assert make_trainer(state["config"] | {"out": str(tmp_path / "one")}).train()
    assert_same_curve(lines(tmp_path / "two"), lines(tmp_path / "one"))
