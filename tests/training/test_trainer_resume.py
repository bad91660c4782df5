"""Runs that stop, fail, are killed and go on; files that a crash leaves; the output folder, which
belongs to one run.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import filelock

from support.processes import finish, start
from support.runs import RUN, flags, lines, noisy, on_disk, saved, saved_steps, seed, tiny, trainer

#: A run of four steps with everything that has a state, and its three steps with checkpoints of the
#: last two.
FULL = {**RUN, "steps": 4, "checkpoint_steps": 1}


def begun(tok, out, reward=noisy, **changes):
    seed(7)
    return trainer(tok, out, rewards=[reward], **FULL | changes)


def resumed(tok, out, **changes):
    """A trainer with another model and another random state: a resumed run must replace both."""
    seed(99)
    return trainer(
        tok, out, model=tiny(tok, seed=5), rewards=[noisy], resume=True, **FULL | changes
    )


@pytest.fixture(scope="module")
def straight(tok, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    assert begun(tok, out).train()
    assert len(lines(out)) == 5 and "accuracy" in lines(out)[-1] and lines(out)[2]["kl"] > 0
    return out


@pytest.fixture(scope="module")
def of_three(tok, tmp_path_factory):
    out = tmp_path_factory.mktemp("three") / "run"
    assert begun(tok, out, steps=3).train()
    return out


@pytest.fixture
def three(of_three, tmp_path):
    return shutil.copytree(of_three, tmp_path / "three")


def assert_same(out, straight):
    first, second = (path / "model" / "model.safetensors" for path in (out, straight))
    assert lines(out) == lines(straight) and first.read_bytes() == second.read_bytes()


# ---- stops


def acting(act, at):
    """The rewards of `noisy`, with something that happens in step `at`; what is asked about fewer
    completions is no step.
    """
    calls = []

    def noisy_(prompts, completions, **_):
        calls.extend([1] * (len(completions) == 12))
        if len(completions) == 12 and len(calls) == at + 1:
            act()
        return noisy(prompts, completions)

    noisy_.__name__ = "noisy"
    return noisy_


def signalled(number):
    return lambda: os.kill(os.getpid(), number)


#: The last is not over when it is stopped, for the schedule of a run is that of its own number of
#: steps.
OTHERS = [
    {"top_k": 9, "top_p": 0.8, "micro_batch": 5, "ratio_to": "sampler"}, {"top_k": 9, "replay": False},
    {"lr_schedule": "cosine", "entropy_target": 3.0, "preset": "dapo", "advantages": "remax"},
]  # fmt: skip


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_other_runs_of_two_parts(tok, tmp_path, changes):
    assert begun(tok, tmp_path / "a", acting(int, 2), **changes).train()
    cut = begun(tok, tmp_path / "b", acting(signalled(signal.SIGTERM), 2), **changes)
    assert not cut.train() and 0 < cut.step < 4
    again = {
        **FULL,
        **changes,
        "model": tiny(tok, seed=5),
        "rewards": [acting(int, 0)],
        "resume": True,
    }
    assert trainer(tok, tmp_path / "b", **again).train()
    assert_same(tmp_path / "b", tmp_path / "a")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_saves(tok, tmp_path, straight, number):
    """It goes on with the same trainer, or with another."""
    before = signal.getsignal(number)
    t = begun(tok, tmp_path, acting(signalled(number), 2), checkpoint_steps=0)
    assert not t.train() and t.stopped_by == number and signal.getsignal(number) is before
    assert len(lines(tmp_path)) == 3 and not (tmp_path / "model").exists()
    t = t if number == signal.SIGINT else resumed(tok, tmp_path)
    assert t.train() and t.stopped_by == 0
    assert_same(tmp_path, straight)


def test_a_run_that_fails_keeps_its_steps(tok, tmp_path, straight):
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        begun(tok, tmp_path, acting(lambda: 1 / 0, 2), checkpoint_steps=0).train()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert resumed(tok, tmp_path).train()
    assert_same(tmp_path, straight)


@pytest.mark.long
@pytest.mark.parametrize(("kills", "steps"), [(2, 6), pytest.param(25, 60, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed_it_is_the_same_run(tok, tmp_path, kills, steps):
    (tmp_path / "kill_rewards.py").write_text("from support.runs import noisy\n")
    options = dict(
        rewards="kill_rewards:noisy", steps=steps, seed=3, prompts_per_step=3, group_size=4, max_new_tokens=4, lr=1e-3, eval_steps=3,
        eval_prompts=5, num_updates=2, beta=0.1, ref_refresh_steps=4, entropy_target=2.0, checkpoint_steps=2, top_k=20,
    )  # fmt: skip
    argv = ["train", *on_disk(tok, tmp_path), *flags(**options), "--no-progress"]
    number = 20260 if steps == 6 else int.from_bytes(os.urandom(4), "little")
    finish(
        start(
            "from support import runs;"
            f" runs.killed(*{(argv, str(tmp_path), steps, kills, number)!r})"
        )
    )
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert_same(killed, straight)
    assert len(lines(straight)) == steps + 1 and all(
        line["grad_norm"] > 0 for line in lines(straight)[:-1]
    )
    want, got = (tree_leaves(saved(out) | {"config": 0, "sizes": 0}) for out in (straight, killed))
    pairs = [*zip(want, got, strict=True)]
    assert len(pairs) > 50 and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


# ---- files that are damaged, or not of this run


class Program:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("a program ran",)


def flip(checkpoint):
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    checkpoint.write_bytes(data)


HARMS = {
    "a bit": flip,
    "cut off": lambda path: os.truncate(path, 100),
    "no archive": lambda path: path.write_bytes(b"\0" * 100),
    "a program": lambda path: torch.save({"step": Program()}, path),
    "no run": lambda path: torch.save([1, 2], path),
    "another step": lambda path: shutil.copy(saved_steps(path.parents[1])[0], path),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_checkpoint_gives_way_to_its_predecessor(
    tok, three, straight, capsys, harm, monkeypatch
):
    monkeypatch.chdir(three.parent)
    HARMS[harm](saved_steps(three)[-1])
    newest = saved_steps(three)[-1]
    assert resumed(tok, three).train()
    assert (
        f"checkpoint passed over: {newest}" in capsys.readouterr().err
        and not Path("a program ran").exists()
    )
    assert_same(three, straight)
    assert [path.name[:13] for path in saved_steps(three)] == ["step-00000003", "step-00000004"]
    assert saved(three, -2)["step"] == 3


def test_a_damaged_checkpoint_displaces_no_good_one(tok, tmp_path):
    """It is newer than what the run writes that goes on from the one before."""
    assert begun(tok, tmp_path, checkpoint_steps=2).train()
    flip(saved_steps(tmp_path)[-1])
    stop = acting(signalled(signal.SIGTERM), 0)
    assert not trainer(
        tok, tmp_path, rewards=[stop], resume=True, **FULL | {"checkpoint_steps": 0}
    ).train()
    assert [path.name[:13] for path in saved_steps(tmp_path)] == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    "harm",
    [flip, lambda path: (path.unlink(), path.with_suffix("").mkdir())],
    ids=["damaged", "other"],
)
def test_damaged_checkpoints_only_are_not_a_fresh_start(tok, three, harm):
    """Nor are those of another version."""
    before = (three / "metrics.jsonl").read_text()
    for checkpoint in saved_steps(three):
        harm(checkpoint)
    with pytest.raises(
        ValueError, match="holds only checkpoints that are damaged or of another version"
    ):
        resumed(tok, three).train()
    assert (three / "metrics.jsonl").read_text() == before


def test_lines_that_a_crash_leaves(tok, three, straight):
    """A torn last line, which no checkpoint knows, costs nothing; one that is damaged is left out
    of what a run came to, and where the file is gone the run goes on all the same.
    """
    other = shutil.copytree(three, three.parent / "other")
    with open(three / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    assert resumed(tok, three).train()
    assert_same(three, straight)
    (other / "metrics.jsonl").unlink()
    assert resumed(tok, other).train()
    assert (
        lines(other) == lines(straight)[3:] and "1 steps in" in (other / "summary.txt").read_text()
    )
    first, rest = (three / "metrics.jsonl").read_bytes().split(b"\n", 1)
    (three / "metrics.jsonl").write_bytes(b"\0" * len(first) + b"\n" + rest)
    assert resumed(tok, three).train() and "3 steps in" in (three / "summary.txt").read_text()


def test_a_checkpoint_is_on_the_disk_before_an_older_one_goes(tok, tmp_path, monkeypatch):
    """A crash of the machine at any moment leaves one:

    content and name are synced before what they replace is removed.
    """
    events = []

    def noted(owner, name, path_of=str):
        act = getattr(owner, name)

        def noting(what, *arguments, **options):
            events.append(f"{name} {Path(path_of(what)).name[:13]}")
            return act(what, *arguments, **options)

        monkeypatch.setattr(owner, name, noting)

    noted(os, "fsync", lambda number: os.readlink(f"/proc/self/fd/{number}"))
    noted(Path, "rename")
    noted(Path, "unlink")
    assert begun(tok, tmp_path, keep_checkpoints=3).train()
    assert events[-5:-1] == [
        "fsync draft.pt",
        "rename draft.pt",
        "fsync checkpoints",
        "unlink step-00000001",
    ]
    assert [path.name[12] for path in saved_steps(tmp_path)] == ["2", "3", "4"]


# ---- one run a folder


def test_two_runs_in_one_folder_do_not_destroy_each_other(tok, tmp_path):
    """The second is refused while the first is there, also to resume; one that has ended, or cannot
    start, gives it back.
    """
    with pytest.raises(
        ValueError, match="prompts are longer"
    ) as held:  # with the trainer, as a notebook does
        trainer(tok, tmp_path, max_prompt_tokens=1)
    first = trainer(tok, tmp_path)
    for resume in (False, True):
        with pytest.raises(
            ValueError, match=r"out=.* is in use by another run: wait for that run to end"
        ):
            trainer(tok, tmp_path, resume=resume)
    assert first.train() and held
    with pytest.raises(ValueError, match="holds a run: continue it with resume"):
        trainer(tok, tmp_path)
    assert trainer(tok, tmp_path, steps=3, resume=True).train() and [
        x["step"] for x in lines(tmp_path)
    ] == [0, 1, 2]


@pytest.mark.parametrize("answer", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_of(tok, tmp_path, monkeypatch, capsys, answer):
    monkeypatch.setattr(filelock.FileLock, "acquire", Mock(side_effect=OSError(answer, "none")))
    assert (
        trainer(tok, tmp_path)
        and "is not safe from a second run: it cannot be locked" in capsys.readouterr().err
    )


def test_a_full_disk_is_reported_before_training(tok, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(
        ValueError, match=r"has \d MB free, and the run writes up to \d MB: free some space"
    ):
        trainer(tok, tmp_path)
