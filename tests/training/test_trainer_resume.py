"""Runs of the reference trainer that stop, fail and continue."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")


from grpo_kernels.training import checkpoints, randomness
from grpo_kernels.training.trainer import Trainer
from support.runs import RUN, config, lines, noisy, parameters, seeded_run, tiny, trainer


@pytest.fixture(scope="module")
def straight(tok: Any, tmp_path_factory: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("straight")
    t = seeded_run(tok, out, steps=6)
    assert t.train()
    return parameters(t), lines(out)


def assert_same(t: Trainer, expected: tuple[dict[str, torch.Tensor], list[dict[str, Any]]]) -> None:
    assert all(torch.equal(p, expected[0][name]) for name, p in parameters(t).items())
    assert lines(t.out) == expected[1]


def resumed(tok: Any, out: Path) -> Trainer:
    """A trainer with another model and another random state: a resumed run must replace both."""
    randomness.seed(99)
    t = trainer(tok, out, model=tiny(tok, seed=5), rewards=[noisy], steps=6, resume=True, **RUN)
    assert t.train()
    return t


def test_three_steps_and_three_more_are_six(tok: Any, tmp_path: Path, straight: Any) -> None:
    assert seeded_run(tok, tmp_path, steps=3).train()
    t = resumed(tok, tmp_path)
    assert_same(t, straight)
    assert len(straight[1]) == 7 and "accuracy" in straight[1][-1]


def test_a_damaged_checkpoint_gives_way_to_its_predecessor(tok: Any, tmp_path: Path, straight: Any, capsys: Any) -> None:
    assert seeded_run(tok, tmp_path, steps=4, checkpoint_steps=1).train()
    _, newest = checkpoints.listed(tmp_path / "checkpoints")
    data = bytearray((newest / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "state.pt").write_bytes(data)
    t = resumed(tok, tmp_path)
    assert "passed over" in capsys.readouterr().err
    assert_same(t, straight)


def test_damaged_checkpoints_only_are_not_a_fresh_start(tok: Any, tmp_path: Path) -> None:
    assert trainer(tok, tmp_path, steps=2).train()
    before = (tmp_path / "metrics.jsonl").read_text()
    for folder in checkpoints.listed(tmp_path / "checkpoints"):
        os.truncate(folder / "state.pt", 100)
    with pytest.raises(ValueError, match="holds damaged checkpoints only"):
        trainer(tok, tmp_path, steps=4, resume=True).train()
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("harm", ["truncated", "no manifest", "draft"])
def test_other_damage_to_a_checkpoint(tmp_path: Path, harm: str) -> None:
    checkpoints.save(tmp_path, 1, {"step": 1}, keep=2)
    newest = checkpoints.save(tmp_path, 2, {"step": 2}, keep=2)
    if harm == "truncated":
        os.truncate(newest / "state.pt", 100)
    elif harm == "no manifest":
        (newest / "manifest.json").unlink()
    else:  # the program ended while writing
        newest.rename(tmp_path / "draft-00000002")
    state, problems = checkpoints.load_newest(tmp_path)
    assert state == {"step": 1} and len(problems) == (harm != "draft")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_saves(tok: Any, tmp_path: Path, straight: Any, number: int) -> None:
    calls: list[int] = []

    @wraps(noisy)
    def interrupting(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        if calls.count(12) == 3 and len(completions) == 12:
            os.kill(os.getpid(), number)
        return noisy(prompts, completions)

    before = signal.getsignal(number)
    t = seeded_run(tok, tmp_path, steps=6, rewards=[interrupting])
    assert not t.train() and t.step == 3 and t.stopped_by == number
    assert signal.getsignal(number) is before
    assert len(lines(tmp_path)) == 3 and (tmp_path / "curves.png").exists()
    again = resumed(tok, tmp_path)
    assert_same(again, straight)
    assert again.stopped_by == 0


def test_a_stopped_trainer_goes_on_when_it_is_asked_to(tok: Any, tmp_path: Path, straight: Any) -> None:
    signals = [signal.SIGTERM]

    @wraps(noisy)
    def interrupting(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        while signals:
            os.kill(os.getpid(), signals.pop())
        return noisy(prompts, completions)

    t = seeded_run(tok, tmp_path, steps=6, rewards=[interrupting])
    assert not t.train() and t.step == 1
    assert t.train() and t.stopped_by == 0
    assert_same(t, straight)


def test_a_run_that_fails_keeps_its_steps(tok: Any, tmp_path: Path, straight: Any) -> None:
    calls: list[int] = []

    @wraps(noisy)
    def failing(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        if calls.count(12) == 4 and len(completions) == 12:  # with fewer it draws numbers, and finds no fault
            raise RuntimeError("the grader is gone")
        return noisy(prompts, completions)

    t = seeded_run(tok, tmp_path, steps=6, rewards=[failing])
    with pytest.raises(RuntimeError, match="RuntimeError: the grader is gone\nWith none of the 12 completions alone"):
        t.train()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert_same(resumed(tok, tmp_path), straight)


def test_a_torn_last_metrics_line_is_dropped(tok: Any, tmp_path: Path) -> None:
    assert trainer(tok, tmp_path).train()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    assert trainer(tok, tmp_path, resume=True, steps=3).train()
    assert [json.loads(text)["step"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_a_run_is_not_overwritten(tok: Any, tmp_path: Path) -> None:
    assert trainer(tok, tmp_path).train()
    with pytest.raises(ValueError, match="holds a run: continue it with resume"):
        trainer(tok, tmp_path)


def test_unwritable_output_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out=.*cannot be written"):
        Trainer(config(tmp_path / "file" / "run", model="no/such-model", dataset="no/such-data"))


def test_a_full_disk_is_reported_before_training(tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(ValueError, match=r"out=.* has 0 MB free, and the run writes up to \d+ MB: make room"):
        trainer(tok, tmp_path)


@pytest.mark.parametrize(
    ("there", "step", "left"), [((50, 100), 75, [50, 75]), ((50, 100, 150), 60, [50, 60]), ((1, 2), 3, [2, 3])]
)
def test_what_a_checkpoint_replaces(there: tuple[int, ...], step: int, left: list[int], tmp_path: Path) -> None:
    """Older ones beyond `keep`; newer ones, which a run that writes this one has found damaged; drafts of failed writes."""
    for at in there:
        checkpoints.save(tmp_path, at, {"step": at}, keep=9)
        if at > step:
            os.truncate(tmp_path / f"step-{at:08d}" / "state.pt", 10)
    (tmp_path / "draft-00000007").mkdir()
    checkpoints.save(tmp_path, step, {"step": step}, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-{at:08d}" for at in left]
    assert checkpoints.load_newest(tmp_path)[0] == {"step": step}
