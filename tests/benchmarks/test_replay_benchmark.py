"""The experiment with and without replay: its runs, their ratios, its page and picture."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from benchmarks import replay


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    runs = replay.measure((0,), 2, steps=2, eval_steps=2, prompts_per_step=4)
    runs += [made | {"seed": 1, "entropy": [x + 0.5 for x in made["entropy"]]} for made in runs]
    machine = {"name": "a machine", "threads": 1, "torch": "2"}
    return {"command": replay.COMMAND, "date": "2026-01-01", "machine": machine, "settings": {}, "runs": runs}


def test_ratios_are_1_over_the_sets_and_below_it_over_the_vocabulary(record: dict[str, Any]) -> None:
    assert [(made["arm"], made["seed"]) for made in record["runs"]] == [(arm, seed) for seed in (0, 1) for arm in replay.ARMS]
    for over_sets, to_sampler, to_own in zip(*(record["runs"][i::3] for i in range(3)), strict=True):
        for exact in (over_sets, to_own):
            assert exact["ratio"] == [1.0, 1.0] and exact["outside"] == [0.0, 0.0]
        assert max(to_sampler["ratio"]) < 0.9 and min(to_sampler["outside"]) > 0.2
        assert over_sets["reward"][0] == to_sampler["reward"][0] == to_own["reward"][0]  # the same first batch
        assert over_sets["entropy"][0] == to_own["entropy"][0]
        assert all(len(made["accuracy"]) == 2 for made in (over_sets, to_sampler, to_own))


def test_the_page_and_the_picture_hold_means_over_seeds(record: dict[str, Any], tmp_path: Any) -> None:
    (row,) = [line for line in replay.block(record).splitlines() if replay.ARMS and line.startswith("| over the sets |")]
    assert "1.000 -> 1.000" in row and "0.0% -> 0.0%" in row
    made = [x["entropy"] for x in record["runs"] if x["arm"] == "over the sets"]
    drawn = replay.curves(record)["entropy"]["over the sets"]
    assert drawn == pytest.approx([(a + b) / 2 for a, b in zip(*map(replay.smooth, made), strict=True)], rel=1e-3)
    replay.save_picture(record, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 5000 and json.loads(replay.described(record)).keys() == dict(
        replay.FIELDS
    ).keys()
