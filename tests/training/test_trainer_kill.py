"""A run that was killed at any moment and resumed ends bitwise equal to an uninterrupted one: parameters, optimizer and metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("numpy")

import kill_and_resume

from grpo_kernels.training import checkpoints
from support.processes import finish, start
from support.runs import PROMPTS, lines, tiny


def same(a: Any, b: Any) -> bool:
    """Equal, bit by bit, whatever they are made of."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "kills, steps, by",
    [
        (3, 10, "events"),
        pytest.param(25, 60, "events", marks=pytest.mark.slow),
        pytest.param(25, 60, "the clock", marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments_and_resumed_it_is_the_same_run(
    tok: Any, tmp_path: Path, kills: int, steps: int, by: str
) -> None:
    tiny(tok).save_pretrained(tmp_path / "model")
    tok.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "kill_rewards.py").write_text(kill_and_resume.REWARDS)
    seed = 20260 if steps == 10 else int.from_bytes(os.urandom(4), "little")
    finish(start(f"import kill_and_resume; kill_and_resume.main({str(tmp_path)!r}, {steps}, {kills}, {seed}, {by!r})"))
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert len(lines(straight)) == steps + 1 and lines(killed) == lines(straight)
    assert all(line["grad_norm"] > 0 for line in lines(straight)[:-1])
    (want, problems), (got, _) = (checkpoints.load_newest(out / "checkpoints") for out in (straight, killed))
    assert want is not None and got is not None and want["step"] == steps and not problems
    for part in ("step", "model", "optimizer", "reference", "entropy_coef", "rng"):
        assert want[part] is not None and same(got[part], want[part]), part
    weights = [(out / "model" / "model.safetensors").read_bytes() for out in (straight, killed)]
    assert weights[0] == weights[1]
