"""The output folder: which run owns it, which files may be removed, and the files that a crash may leave."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_kernels.training import checkpoints, randomness
from grpo_kernels.training.jsonl import damaged_from, read_metrics
from grpo_kernels.training.output import OutputFolder
from support.processes import start
from support.runs import RUN, lines, noisy, parameters, seeded_run, tiny, trainer

# ---- one run a folder


def test_two_runs_in_one_folder_do_not_destroy_each_other(tok: Any, tmp_path: Path) -> None:
    """The second is refused while the first is there, also to resume; a run that has ended gives the folder back."""
    first = trainer(tok, tmp_path, steps=2)
    for resume in (False, True):
        with pytest.raises(ValueError, match=rf"out=.* is in use by process {os.getpid()} on .*: wait for that run to end"):
            trainer(tok, tmp_path, resume=resume)
    assert first.train() and [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert trainer(tok, tmp_path, steps=3, resume=True).train()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from grpo_kernels.training.output import OutputFolder\n"
        "folder = OutputFolder(pathlib.Path(sys.argv[1])); folder.take(False); print('held', flush=True); time.sleep(100)"
    )
    other = start(code, str(tmp_path))
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"is in use by process {other.pid} on"):
            OutputFolder(tmp_path).take(resume=False)
    finally:
        other.kill()
        other.wait()
    folder = OutputFolder(tmp_path)
    folder.take(resume=False)
    folder.release()


def test_a_run_that_cannot_start_gives_its_folder_back(tok: Any, tmp_path: Path) -> None:
    errors = []
    for _ in range(2):
        with pytest.raises(ValueError, match="prompts are longer") as error:
            trainer(tok, tmp_path, max_prompt_tokens=1)
        errors.append(error)  # which holds the trainer, as a notebook does
    assert trainer(tok, tmp_path).train()


# ---- files that are not checkpoints of this run


def put(folder: Path, kind: str) -> Path:
    """Something of a user's among the checkpoints."""
    good = checkpoints.save(folder.parent / "elsewhere", 5, {"step": 5}, keep=2)
    path = folder / {"copy": "step-00000005-good", "archive": "step-00000005.tar.gz"}.get(kind, "step-00000001")
    if kind in ("copy", "folder"):
        shutil.copytree(good, path) if kind == "copy" else path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif kind == "link":
        path.symlink_to(good, target_is_directory=True)
    else:
        path.write_text("mine")
    return path


@pytest.mark.parametrize("kind", ["copy", "archive", "link", "file", "folder"])
def test_pruning_leaves_what_a_user_put_beside_the_checkpoints(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mine = put(folder, kind)
    for step in (3, 4, 6, 7):
        checkpoints.save(folder, step, {"step": step}, keep=2)
    assert {path.name for path in folder.iterdir()} == {mine.name, "step-00000006", "step-00000007"}
    if kind in ("copy", "folder"):
        assert (mine / "notes.txt").read_text() == "mine"
    if kind in ("copy", "link"):
        assert torch.load(mine / "state.pt") == {"step": 5}
    assert checkpoints.load_newest(folder)[0] == {"step": 7}


@pytest.mark.parametrize("kind", ["archive", "link", "file", "folder"])
@pytest.mark.parametrize("name", ["step-00000003", "draft-00000003"])
def test_other_files_with_a_checkpoints_name_are_moved_aside(tmp_path: Path, kind: str, name: str) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    put(folder, kind).rename(folder / name)
    checkpoints.save(folder, 3, {"step": 3}, keep=2)
    assert checkpoints.load_newest(folder) == ({"step": 3}, [])
    aside = folder / f"{name}-aside"
    assert aside.is_symlink() if kind == "link" else (aside / "notes.txt" if kind == "folder" else aside).read_text() == "mine"


def test_drafts_are_removed_and_nothing_else_of_that_name(tmp_path: Path) -> None:
    for name in ("draft-00000001", "draft-of-my-paper"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_text("")
    (tmp_path / "draft-notes.md").write_text("")
    checkpoints.save(tmp_path, 2, {"step": 2}, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"draft-of-my-paper", "draft-notes.md", "step-00000002"}


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(f"no permission for {path}")

    checkpoints.save(tmp_path, 1, {"step": 1}, keep=2)
    checkpoints.save(tmp_path, 2, {"step": 2}, keep=2)
    monkeypatch.setattr(Path, "unlink", refuse)
    checkpoints.save(tmp_path, 3, {"step": 3}, keep=2)
    assert "old checkpoint not removed: no permission" in capsys.readouterr().err
    assert checkpoints.load_newest(tmp_path)[0] == {"step": 3}


# ---- damaged files are replaced by earlier ones


def rewritten(newest: Path, data: bytes) -> None:
    """Another state with a manifest that fits."""
    (newest / "state.pt").write_bytes(data)
    (newest / "manifest.json").write_text(json.dumps({"sha256": hashlib.sha256(data).hexdigest()}))


@pytest.mark.parametrize("harm", ["list", "number", "empty", "not text", "not a pickle", "foreign pickle", "not a run"])
def test_damage_falls_back_to_the_checkpoint_before(tmp_path: Path, harm: str) -> None:
    checkpoints.save(tmp_path, 1, {"step": 1}, keep=2)
    newest = checkpoints.save(tmp_path, 2, {"step": 2}, keep=2)
    manifests = {"list": b"[]", "number": b"3", "empty": b"", "not text": b"\xff\x00"}
    if harm in manifests:
        (newest / "manifest.json").write_bytes(manifests[harm])
    elif harm == "not a run":
        torch.save([1, 2], newest / "state.pt")
        rewritten(newest, (newest / "state.pt").read_bytes())
    else:
        rewritten(newest, b"\0" * 100 if harm == "not a pickle" else pickle.dumps({"step": Path("x")}, protocol=2))
    state, problems = checkpoints.load_newest(tmp_path)
    assert state == {"step": 1} and len(problems) == 1 and str(newest) in problems[0]
    checkpoints.save(tmp_path, 2, {"step": 2, "again": True}, keep=2)
    assert checkpoints.load_newest(tmp_path) == ({"step": 2, "again": True}, [])


@pytest.mark.parametrize("line", ["\0" * 20, "[]", '{"reward": 1.0}', '{"step": 3, "rew', "\N{REPLACEMENT CHARACTER}"])
def test_a_damaged_line_of_metrics_falls_back_to_the_checkpoint_before(
    tok: Any, tmp_path: Path, line: str, capsys: Any
) -> None:
    """The line of step 3 of a run with checkpoints at 3 and 4: step 3 is run again, and its line is as it was."""
    straight = seeded_run(tok, tmp_path / "a", steps=6)
    assert straight.train()
    assert seeded_run(tok, tmp_path / "b", steps=4, checkpoint_steps=1).train()
    metrics = tmp_path / "b" / "metrics.jsonl"
    texts = metrics.read_text().splitlines()
    metrics.write_text("".join(text + "\n" for text in [*texts[:3], line, *texts[4:]]))
    assert damaged_from(metrics) == 3 and [x["step"] for x in read_metrics(metrics)] == [0, 1, 2, 4]
    randomness.seed(99)
    again = trainer(tok, tmp_path / "b", model=tiny(tok, seed=5), rewards=[noisy], steps=6, resume=True, **RUN)
    assert again.train()
    assert "step-00000004: the metrics are damaged from step 3 on" in capsys.readouterr().err
    assert lines(tmp_path / "b") == lines(tmp_path / "a")
    assert all(torch.equal(p, parameters(straight)[name]) for name, p in parameters(again).items())


def test_damaged_metrics_without_a_checkpoint_before_cost_lines_and_not_the_run(tok: Any, tmp_path: Path, capsys: Any) -> None:
    assert trainer(tok, tmp_path, steps=4, checkpoint_steps=1).train()
    metrics = tmp_path / "metrics.jsonl"
    texts = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([texts[0], "\0\n", *texts[2:]]))
    assert trainer(tok, tmp_path, steps=5, resume=True).train()
    assert [line["step"] for line in lines(tmp_path)] == [0, 2, 3, 4]
    assert "is damaged: lines from step 1 on are lost" in capsys.readouterr().err


def test_a_resumed_run_draws_the_numbers_of_numpy_that_it_would_have_drawn(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    device = torch.device("cpu")
    randomness.seed(3)
    checkpoints.save(tmp_path, 1, {"step": 1, "rng": randomness.state(device)}, keep=2)
    expected = numpy.random.rand(5).tolist(), numpy.random.randn(3).tolist()
    randomness.seed(4)
    state, problems = checkpoints.load_newest(tmp_path)
    assert state is not None and not problems
    randomness.set_state(state["rng"], device)
    assert (numpy.random.rand(5).tolist(), numpy.random.randn(3).tolist()) == expected


@pytest.mark.parametrize("keep", [1, 2])
def test_a_checkpoint_is_on_the_disk_before_an_older_one_goes(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine at any moment leaves one: names and files are synced before what they replace is removed."""
    for step in (1, 2):
        checkpoints.save(tmp_path, step, {"step": step}, keep=keep)
    events: list[str] = []
    sync, rename, unlink = os.fsync, Path.rename, Path.unlink

    def path_of(descriptor: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)

    def recorded(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    def removed(path: Path, missing_ok: bool = False) -> None:
        events.append(f"remove {path.relative_to(tmp_path)}")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append(f"sync {path_of(descriptor)}"), sync(descriptor))[1])
    monkeypatch.setattr(Path, "rename", recorded)
    monkeypatch.setattr(Path, "unlink", removed)
    checkpoints.save(tmp_path, 3, {"step": 3}, keep=keep)
    draft, final, old = "draft-00000003", "step-00000003", f"step-0000000{3 - keep}"
    assert events == [
        f"sync {draft}/state.pt", f"sync {draft}/manifest.json", f"sync {draft}", f"rename {draft} {final}", "sync .",
        f"remove {old}/state.pt", f"remove {old}/manifest.json",
    ]  # fmt: skip
